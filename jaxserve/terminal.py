"""Progress for a person: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class ProgressBar:
    """One line that follows whatever is reported. Writes to stderr, so that output stays clean."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        """`quiet` shows nothing at all."""
        self._quiet = quiet
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._is_live,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._last = ""

    @property
    def _is_live(self) -> bool:
        """Whether what has been shown can be replaced."""
        return self._console.is_terminal or self._console.is_jupyter

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def update(self, message: str, done: int, total: int) -> None:
        """Show how far something is. total 0: nobody knows how much there is."""
        self._bar.update(self._task, description=message, completed=done, total=total or None)
        if not (self._quiet or self._is_live) and message != self._last:
            self._console.print(message, markup=False, highlight=False)
        self._last = message

    def stop(self) -> None:
        """Remove the bar; lines may be printed from here on."""
        self._bar.stop()
