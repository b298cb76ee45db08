"""The body of POST /v1/responses, and the chat it asks for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxserve.errors import RequestError
from jaxserve.server.limits import checked_metadata
from jaxserve.server.openai import (
    ChatBody,
    FunctionDefinition,
    Int,
    JsonSchema,
    Message,
    MessageFunction,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
)
from jaxserve.server.response_items import FunctionCall, Item, OutputMessage, Reasoning

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class InputPart(msgspec.Struct, frozen=True):
    """One part of an item's content. Only text is supported."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of the input: a message, a call of an earlier output, its result, or thoughts.

    Attributes:
        type: "message", which may be left out, "function_call", "function_call_output" or
            "reasoning".
        role, content: of a message; content of thoughts.
        call_id, name, arguments: of a call. call_id, output: of its result.
        id, status, summary, phase: as an earlier output had them. They change nothing.
        encrypted_content: not supported, may be empty.
    """

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    summary: list[InputPart] | None = None
    phase: str | None = None
    encrypted_content: str | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the answer has to be like: see `ResponseFormat` and `JsonSchema`, here in one."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the text. `verbosity`: not supported."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`effort`: as the model's template takes it. Summaries are not supported."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseTool(msgspec.Struct, frozen=True):
    """Something the model may use. Only those of type "function" are supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True):
    """The tool that the model has to use."""

    type: str
    name: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation`: not supported, may be false."""

    include_obfuscation: bool | None = None


class ResponseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses. None stands for absent everywhere.

    Attributes:
        input: a text, or items. instructions: a system message before all others.
        previous_response_id: what was said before this input.
        store: keep the response, to be fetched or continued; true unless said otherwise.
        background, truncation, include: false, "disabled" and [] only.
    """

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    cache_salt: str | None = None
    service_tier: str | None = None
    priority: Int | None = None
    timeout: float | None = None
    user: str | None = None


def check_supported(body: ResponseBody) -> None:
    """RequestError for what the body asks for and is not had here."""
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    options = body.stream_options
    refused = {
        "background": body.background,
        "include": body.include,
        "truncation": body.truncation not in (None, "disabled"),
        "text": text.verbosity,
        "reasoning": reasoning.summary or reasoning.generate_summary,
        "stream_options": options is not None and options.include_obfuscation,
    }
    remedies = {
        "background": "ask for the response with stream, or in a batch",
        "truncation": "send 'disabled', and no more than the context holds",
        "text": "send no verbosity",
        "reasoning": "only effort can be set",
    }
    for name, asked in refused.items():
        if asked:
            raise RequestError(
                f"this {name} is not supported: {remedies.get(name, 'leave it out')}", param=name
            )
    if options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    checked_metadata(body.metadata)


def chat_body(body: ResponseBody, before: Sequence[Message]) -> ChatBody:
    """The chat that answers this. `before`: what was said earlier, without instructions.

    Raises:
        RequestError: there is no input, or something of it cannot be part of a chat.
    """
    check_supported(body)
    instructions = () if body.instructions is None else (Message("system", body.instructions),)
    reasoning = body.reasoning or ReasoningConfig()
    return ChatBody(
        messages=[*instructions, *before, *input_messages(body)],
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stream=body.stream,
        tools=[chat_tool(tool) for tool in body.tools or ()],
        tool_choice=chat_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=reasoning.effort,
        response_format=response_format(body.text),
        cache_salt=body.cache_salt,
        service_tier=body.service_tier,
        priority=body.priority,
        timeout=body.timeout,
        user=body.user,
    )


def response_format(text: TextConfig | None) -> ResponseFormat | None:
    """The format as chats have it."""
    if text is None or text.format is None:
        return None
    given, schema = text.format, None
    if given.type == "json_schema" or given.schema is not None:
        schema = JsonSchema(given.name, given.description, given.schema, given.strict)
    return ResponseFormat(given.type, schema)


def chat_tool(tool: ResponseTool) -> Tool:
    """A function as chats have it; what is none is refused there."""
    if tool.name is None:
        return Tool(tool.type)
    definition = FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)
    return Tool(tool.type, definition)


def chat_tool_choice(choice: str | ResponseToolChoice | None) -> str | NamedTool | None:
    """The choice as chats have it."""
    if isinstance(choice, ResponseToolChoice):
        return NamedTool(choice.type, None if choice.name is None else NamedFunction(choice.name))
    return choice


def input_messages(body: ResponseBody) -> list[Message]:
    """The input as messages of a chat. RequestError for what cannot be one."""
    if not body.input:
        raise RequestError("input is missing or empty: send a text or items", param="input")
    if isinstance(body.input, str):
        return [Message("user", body.input)]
    turns = Turns()
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        match item.type or "message":
            case "message":
                role = item.role or ""
                turns.say(role, text_of(item.content, f"{where}.content"))
            case "function_call":
                turns.call(item.call_id, item.name, item.arguments)
            case "function_call_output":
                output = text_of(item.output, f"{where}.output")
                turns.messages.append(Message("tool", output, tool_call_id=item.call_id))
            case "reasoning":
                if item.encrypted_content:
                    raise wrong(f"{where}.encrypted_content", "is not supported: leave it out")
                turns.think(text_of(item.content or [], f"{where}.content"))
            case kind:
                raise wrong(
                    f"{where}.type",
                    f"is {kind[:40]!r}: 'message', 'function_call', 'function_call_output' and "
                    "'reasoning' are supported",
                )
    return turns.messages


def output_messages(items: Sequence[Item]) -> list[Message]:
    """The output of a response as messages of a chat."""
    turns = Turns()
    for item in items:
        match item:
            case OutputMessage():
                turns.say("assistant", "".join(part.text for part in item.content))
            case Reasoning():
                turns.think("".join(part.text for part in item.content))
            case FunctionCall():
                turns.call(item.call_id, item.name, item.arguments)
    return turns.messages


class Turns:
    """Messages in the making. What the model thinks, says and calls in a row is one turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts = ""

    def say(self, role: str, text: str) -> None:
        """A message of anybody's. Thoughts before one of the assistant's are its own."""
        thoughts, self._thoughts = self._thoughts, ""
        own = thoughts if role == "assistant" else ""
        self.messages.append(Message(role, text, reasoning_content=own or None))

    def think(self, text: str) -> None:
        """Thoughts before what comes next."""
        self._thoughts += text

    def call(self, call_id: str | None, name: str | None, arguments: str | None) -> None:
        """A call, of the assistant's turn before it if there is one."""
        call = MessageToolCall(call_id, "function", MessageFunction(name or "", arguments))
        if not (self.messages and self.messages[-1].role == "assistant") or self._thoughts:
            thoughts, self._thoughts = self._thoughts, ""
            self.messages.append(Message("assistant", reasoning_content=thoughts or None))
        turn = self.messages[-1]
        calls = [*(turn.tool_calls or ()), call]
        self.messages[-1] = msgspec.structs.replace(turn, tool_calls=calls)


def text_of(content: str | list[InputPart] | None, where: str) -> str:
    """The text of an item's content."""
    if isinstance(content, str):
        return content
    if content is None:
        raise wrong(where, "is missing: send a string, or parts of text")
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS or part.text is None:
            raise wrong(
                f"{where}[{i}]", f"is {part.type[:40]!r} or has no text: this model reads text only"
            )
    return "".join(part.text or "" for part in content)


def wrong(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}", param="input")
