"""The pool of cache pages: who may use which. Plain Python, knows neither tokens nor arrays."""

from __future__ import annotations

from array import array


class PagePool:
    """Hands out page numbers 1 .. num_pages - 1; page 0 is the null page and never handed out.

    Pages are given and taken back while steps are still running on the device. That is safe: a
    step consumes the state of the one before it, so whatever a later step writes into a page
    happens after everything an earlier step still reads or writes there.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"a pool needs 2 or more pages of 1 or more tokens, got {num_pages} of {page_size}"
            )
        self.page_size = page_size
        self.num_total = num_pages - 1
        # A stack: the page freed last is the warmest.
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Pages that belong to a sequence."""
        return self.num_total - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens one sequence could hold if it had every page."""
        return self.num_total * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill or begin to fill."""
        return -(-num_tokens // self.page_size)

    def room(self, pages: array[int]) -> int:
        """Tokens that `pages` would hold with every free page added."""
        return (len(pages) + len(self._free)) * self.page_size

    def grow(self, pages: array[int], num_tokens: int) -> bool:
        """Append to `pages` until they hold `num_tokens`. False, and no change, if too few are
        free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            pages.append(self._free.pop())
        return True

    def release(self, pages: array[int]) -> None:
        """Take all of `pages` back and empty the list, last page first."""
        while pages:
            self._free.append(pages.pop())
