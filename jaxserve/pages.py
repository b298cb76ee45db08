"""The pool of cache pages: who holds which, and what can be found again. Plain Python, no arrays.

A page is *live* while sequences hold it, *cached* when nobody holds it but its content can still
be found, *empty* otherwise. Cached pages are free: they are reused, least recently used first,
once no empty page is left. Always: live + cached + empty = all pages but the null page.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator

from jaxserve.errors import ConfigError


class PagePool:
    """Hands out page numbers 1 .. num_pages - 1; page 0 is the null page and never handed out.

    Pages are given and taken back while steps are still running on the device. That is safe: a
    step consumes the state of the one before it, so whatever a later step writes into a page
    happens after everything an earlier step still reads or writes there.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ConfigError(
                f"a pool needs 2 or more pages of 1 or more tokens, got {num_pages} of {page_size}"
            )
        self.page_size = page_size
        self.num_total = num_pages - 1
        self._holders = [0] * num_pages
        # A stack: the page freed last is the warmest.
        self._empty = list(range(num_pages - 1, 0, -1))
        # Insertion order is the order of eviction.
        self._cached: dict[int, None] = {}
        self._page_of: dict[bytes, int] = {}
        self._digests_of: dict[int, list[bytes]] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_live(self) -> int:
        """Pages that at least one sequence holds."""
        return self.num_total - self.num_free

    @property
    def capacity(self) -> int:
        """Tokens one sequence could hold if it had every page."""
        return self.num_total * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill or begin to fill."""
        return -(-num_tokens // self.page_size)

    def room(self, pages: array[int]) -> int:
        """Tokens that `pages` would hold with every free page added."""
        return (len(pages) + self.num_free) * self.page_size

    def grow(self, pages: array[int], num_tokens: int) -> bool:
        """Append to `pages` until they hold `num_tokens`. False, and no change, if too few are
        free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            pages.append(self._take())
        return True

    def release(self, pages: array[int]) -> None:
        """Give up all of `pages` and empty the list, last page first: of a prefix that nobody
        holds, the end is evicted before the beginning, without which it could not be found."""
        while pages:
            page = pages.pop()
            self._holders[page] -= 1
            if self._holders[page] > 0:
                continue
            if page in self._digests_of:
                self._cached[page] = None
            else:
                self._empty.append(page)

    def label(self, page: int, digest: bytes) -> None:
        """Let a page that somebody holds be found by what it contains, from now on.

        A page may have several labels, one for each beginning of it that is worth finding. The
        first page of a content keeps the label: later copies are only used by who made them.
        """
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digests_of.setdefault(page, []).append(digest)

    def find(self, digest: bytes) -> int | None:
        """The page with this label, live or cached."""
        return self._page_of.get(digest)

    def find_run(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the longest beginning of `digests` that can be found."""
        found: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def num_holders(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._holders[page]

    def is_cached(self, page: int) -> bool:
        """Whether the page is free, so that holding it leaves one free page fewer."""
        return page in self._cached

    def hold(self, pages: array[int], page: int) -> None:
        """Append a page that was found to `pages`: one holder more."""
        self._cached.pop(page, None)
        self._holders[page] += 1
        pages.append(page)

    def forget(self) -> None:
        """Drop every label: nothing is found again until it is computed anew."""
        self._page_of.clear()
        self._digests_of.clear()
        self._empty.extend(self._cached)
        self._cached.clear()

    def _take(self) -> int:
        if self._empty:
            page = self._empty.pop()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
            for digest in self._digests_of.pop(page):
                del self._page_of[digest]
        self._holders[page] = 1
        return page


def page_digests(
    tokens: array[int], page_size: int, *, start: int, parent: bytes
) -> Iterator[bytes]:
    """Labels of the full pages of `tokens` from page `start` on.

    Each is the SHA-256 of the label before it and the page's tokens (i32), so a label stands for
    everything up to the page's end, and two tenants with different salts share none.

    Args:
        tokens: i32, from the beginning of the sequence.
        page_size: B.
        start: index of the first page to label.
        parent: label of the page before `start`, or `root_digest` for page 0.
    """
    data = memoryview(tokens).cast("B")
    width = page_size * tokens.itemsize
    for page in range(start, len(tokens) // page_size):
        parent = hashlib.sha256(parent + data[page * width : (page + 1) * width]).digest()
        yield parent


def root_digest(salt: str) -> bytes:
    """What the label of a sequence's first page builds on. Salts keep tenants apart."""
    return hashlib.sha256(salt.encode()).digest()
