"""What has been read of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallDelta:
    """A piece of one call.

    Attributes:
        index: of the call in its answer, from 0.
        name: of the function, on the call's first piece.
        arguments: to append: JSON, as the model wrote it.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What became certain about an answer since the last look. Parsers append to it.

    Attributes:
        reasoning: what the model thought before it answered.
        content: the answer's text.
        calls: at most one piece with a name, and one without, of each call.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add_call(self, index: int, name: str) -> None:
        """A call begins."""
        self.calls.append(CallDelta(index, name, ""))

    def add_arguments(self, index: int, text: str) -> None:
        """More of a call's arguments."""
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += text
        elif text:
            self.calls.append(CallDelta(index, None, text))
