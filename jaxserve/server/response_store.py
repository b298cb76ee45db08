"""Responses that can be fetched and continued, in memory: the newest, of a bounded size."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from jaxserve.errors import NotFound
from jaxserve.server.openai import Message
from jaxserve.server.response_items import Response

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        messages: the conversation up to its end, without instructions. Those of earlier
            responses are shared with them.
        owner: name of an API key, or empty.
        size: bytes, what earlier responses hold not counted.
    """

    response: Response
    messages: tuple[Message, ...]
    owner: str
    size: int


class ResponseStore:
    """What is not the asker's own is not there for it. The oldest make room for the newest."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0

    def add(self, stored: StoredResponse) -> None:
        """Keep a response. One larger than all there is room for is not kept."""
        self._stored[stored.response.id] = stored
        self._size += stored.size
        while len(self._stored) > MAX_RESPONSES or self._size > MAX_BYTES:
            _, oldest = self._stored.popitem(last=False)
            self._size -= oldest.size

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
        self._size -= self.get(response_id, owner).size
        del self._stored[response_id]
