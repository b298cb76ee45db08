"""Calls of functions in OpenAI's form: whole ones, and the pieces of a stream."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from jaxserve.parsers.parsed import CallDelta
from jaxserve.server.replies import CalledFunction, FunctionDelta, ToolCall, ToolCallDelta

ALPHABET = string.ascii_letters + string.digits


def new_call_id(*, short: bool) -> str:
    """A fresh id: nine letters and digits, or longer ones."""
    if short:
        return "".join(secrets.choice(ALPHABET) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def whole_calls(pieces: Sequence[CallDelta], *, short_ids: bool) -> list[ToolCall]:
    """All pieces of an answer's calls as calls."""
    names = {piece.index: piece.name for piece in pieces if piece.name is not None}
    arguments = dict.fromkeys(names, "")
    for piece in pieces:
        arguments[piece.index] += piece.arguments
    return [
        ToolCall(new_call_id(short=short_ids), CalledFunction(name, arguments[index]))
        for index, name in names.items()
    ]


def call_deltas(piece: CallDelta, *, short_ids: bool) -> list[ToolCallDelta]:
    """A piece as a stream shows it: first the name, then arguments, never both at once."""
    deltas = []
    if piece.name is not None:
        call_id = new_call_id(short=short_ids)
        begin = FunctionDelta("", name=piece.name)
        deltas.append(ToolCallDelta(piece.index, begin, id=call_id, type="function"))
    if piece.arguments:
        deltas.append(ToolCallDelta(piece.index, FunctionDelta(piece.arguments)))
    return deltas
