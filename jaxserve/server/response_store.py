"""Responses that can be fetched and continued, in memory: the newest, of a bounded size."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import chain

from jaxserve.errors import NotFound
from jaxserve.server.openai import Message
from jaxserve.server.response_items import Response

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one request and its answer added to a conversation, without instructions.

    Attributes:
        messages: the same objects in every response that continues from here.
        size: bytes, those of the response included.
    """

    messages: tuple[Message, ...]
    size: int


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended. `turns`: the conversation up to its end; `owner`: name of an API
    key, or empty."""

    response: Response
    turns: tuple[Turn, ...]
    owner: str

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(chain.from_iterable(turn.messages for turn in self.turns))


class ResponseStore:
    """What is not the asker's own is not there for it. The oldest make room for the newest.

    What a response has of earlier ones counts as long as anyone has it, and once.
    """

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._users: Counter[Turn] = Counter()
        self.size = 0

    def add(self, stored: StoredResponse) -> None:
        """Keep a response. One larger than all there is room for is not kept."""
        self._stored[stored.response.id] = stored
        for turn in stored.turns:
            self.size += turn.size if turn not in self._users else 0
            self._users[turn] += 1
        while len(self._stored) > MAX_RESPONSES or self.size > MAX_BYTES:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, *, param: str = "response_id") -> StoredResponse:
        """Raises NotFound, naming `param`."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise NotFound(
                f"there is no response {response_id[:80]!r}: it was not stored, was deleted, or "
                "made room for newer ones",
                param=param,
            )
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Raises NotFound."""
        self.get(response_id, owner)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        for turn in self._stored.pop(response_id).turns:
            self._users[turn] -= 1
            if not self._users[turn]:
                del self._users[turn]
                self.size -= turn.size
