"""The messages of a chat, checked, in the form chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxserve.errors import RequestError
from jaxserve.server.openai import Message, MessageToolCall

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role a client may name -> role the chat template sees."""
UNSUPPORTED = ("refusal", "annotations", "audio", "function_call")


def plain_messages(messages: Sequence[Message], *, with_tools: bool) -> list[dict[str, object]]:
    """Roles, texts and calls; arguments of calls as objects, as transformers has them.

    Args:
        with_tools: the template can show calls and their results.

    Raises:
        RequestError: naming the place, for what no template could render.
    """
    called: dict[str, str] = {}  # id of a call so far -> the function
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        check_fields(message, where, with_tools=with_tools)
        turn: dict[str, object] = {"role": ROLES[message.role]}
        if message.content is None and message.tool_calls:
            turn["content"] = None
        else:
            turn["content"] = plain_content(message, where)
        if message.name is not None:
            turn["name"] = message.name
        if message.reasoning_content or message.reasoning:
            turn["reasoning_content"] = message.reasoning_content or message.reasoning
        if message.tool_calls:
            turn["tool_calls"] = [
                plain_call(call, f"{where}.tool_calls[{j}]", called)
                for j, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            turn["tool_call_id"] = call_id = checked_call_id(message, where, called)
            turn.setdefault("name", called[call_id])
        plain.append(turn)
    return plain


def check_fields(message: Message, where: str, *, with_tools: bool) -> None:
    """RequestError for an unknown role, or a field that a message of this role cannot have."""
    if message.role == "function":
        raise wrong(f"{where}.role", "is 'function', which is deprecated: send role 'tool'")
    if message.role not in ROLES:
        raise wrong(
            f"{where}.role", f"is {message.role[:40]!r}, expected one of {', '.join(ROLES)}"
        )
    for name in UNSUPPORTED:
        if getattr(message, name):
            raise wrong(f"{where}.{name}", "is not supported: leave it out")
    for name, role in (
        ("tool_calls", "assistant"),
        ("reasoning_content", "assistant"),
        ("reasoning", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) and message.role != role:
            raise wrong(f"{where}.{name}", f"is for the role {role!r}, and this is {message.role}")
    if not with_tools and (message.tool_calls or message.role == "tool"):
        raise wrong(where, "has to do with tools, which this model's chat template does not know")


def plain_content(message: Message, where: str) -> str:
    """The text of a message; text parts are joined as they are, with nothing between them."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise wrong(f"{where}.content", "is missing: send a string")
    for i, part in enumerate(message.content):
        if part.type != "text":
            raise wrong(
                f"{where}.content[{i}]",
                f"is of type {part.type[:40]!r}, which is not supported: this model reads text "
                "only",
            )
        if part.text is None:
            raise wrong(f"{where}.content[{i}].text", "is missing")
    return "".join(part.text or "" for part in message.content)


def plain_call(call: MessageToolCall, where: str, called: dict[str, str]) -> dict[str, object]:
    """A call as templates read it. Noted in `called`."""
    if call.type not in (None, "function"):
        raise wrong(f"{where}.type", f"is {call.type[:40]!r}, expected 'function'")
    if not call.id:
        raise wrong(f"{where}.id", "is missing: the result refers to it")
    if call.function is None or not call.function.name:
        raise wrong(f"{where}.function", "is missing: send its name and its arguments")
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(
            f"{where}.function.arguments",
            'is not an object in JSON, such as \'{"city": "Paris"}\'',
        )
    called[call.id] = call.function.name
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def checked_call_id(message: Message, where: str, called: dict[str, str]) -> str:
    """Whose result a message is."""
    if not message.tool_call_id:
        raise wrong(f"{where}.tool_call_id", "is missing: whose result is this?")
    if message.tool_call_id not in called:
        raise wrong(
            f"{where}.tool_call_id",
            f"is {message.tool_call_id[:40]!r}, which no call before it has as its id",
        )
    return message.tool_call_id


def wrong(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}", param="messages")
