"""A server whose model writes what the last message says, and whose template knows tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from text_toys import bytes_and, spec_of
from toy_server import Reply, Server, running_server
from toy_worker import VOCAB_SIZE

from jaxserve.tokenizer import Tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]")
"""Special tokens, so that only who has to see them does."""
TEMPLATE = (
    "{%- if show == 'tools' %}{{ tools | tojson }}</s>{% endif -%}"
    "{%- if show == 'messages' %}{{ messages | tojson }}</s>{% endif -%}"
    "{%- if show == 'effort' %}{{ reasoning_effort }}</s>{% endif -%}"
    "{{- messages[-1].content }}</s>"
    "{%- if enable_thinking %}{{ '<' ~ 'think>' }}\n{% endif -%}"
    "{#- MARK -#}"
)
"""Whatever the prompt holds after the first end token, the toy model does not write."""


CALLS_ONLY = '<tool_call>{"name": ..., "arguments": ...}'
HERMES = f"{CALLS_ONLY} <think>"
"""What tells a template of the family that writes calls, and perhaps thoughts, so."""


def template(mark: str) -> str:
    """Of the family that this tells."""
    return TEMPLATE.replace("MARK", mark)


def tool_tokenizer(chat_template: str) -> Tokenizer:
    return Tokenizer(spec_of(bytes_and(*MARKS), chat_template=chat_template), vocab_size=VOCAB_SIZE)


@contextmanager
def tool_server(chat_template: str, *worker_flags: str, **settings: Any) -> Iterator[Server]:
    tokenizer = tool_tokenizer(chat_template)
    flags = ("--max-context", "8192", *worker_flags)
    with running_server(*flags, tokenizer=tokenizer, **settings) as server:
        yield server


def function(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema} | fields}


TOOLS = [function(), function("add", description="Adds.")]


def say(server: Server, script: str, **fields: Any) -> Reply:
    """A chat in which the model writes `script`."""
    return server.chat(script, **{"tools": TOOLS} | fields)


def message(reply: Reply, index: int = 0) -> dict[str, Any]:
    """A choice's message; a streamed one is put together, and its form checked."""
    choices = reply.choices(index)
    if "message" in choices[0]:
        return choices[0]["message"]
    whole: dict[str, Any] = {"role": "assistant", "refusal": None, "content": ""}
    for choice in choices:
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                add_call(whole.setdefault(name, []), *value)
            elif name != "role":
                whole[name] = whole.get(name, "") + value
    if "tool_calls" in whole:
        whole["content"] = whole["content"] or None
    return whole


def add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """A call's first piece has all but the arguments, every other one only those."""
    index = delta.pop("index")
    if index == len(calls):
        assert delta.keys() == {"id", "type", "function"}
        assert delta["function"].keys() == {"name", "arguments"}
        assert delta["function"]["arguments"] == ""
        calls.append(delta)
    else:
        assert delta.keys() == {"function"} and delta["function"].keys() == {"arguments"}
        assert index == len(calls) - 1
        calls[index]["function"]["arguments"] += delta["function"]["arguments"]


def called(reply: Reply, index: int = 0) -> list[tuple[str, str]]:
    """Names and arguments; every call has an id of its own."""
    calls = message(reply, index).get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
