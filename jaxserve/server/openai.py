"""Request bodies of the OpenAI API, and how bytes become one. Strict: nothing is ignored silently.

Knows the shape of a request only; what the numbers may be is `generation.py`'s business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from jaxserve.errors import RequestError
from jaxserve.server.neutral import drop_neutral

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Whole numbers that fit in 64 bits. JSON itself has no limit."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream differs from the default one.

    Attributes:
        include_usage: end with a chunk that counts the tokens.
        continuous_usage_stats: and have the count so far in every chunk.
        include_obfuscation: not supported, may be false.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message. Only parts of type "text" are supported."""

    type: str
    text: str | None = None


class MessageFunction(msgspec.Struct, frozen=True):
    """What a call in a conversation calls. `arguments` is an object, as JSON."""

    name: str
    arguments: str | None = None


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call that an earlier answer has made. Only those of type "function" are supported."""

    id: str | None = None
    type: str | None = None
    function: MessageFunction | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation.

    Attributes:
        tool_calls, reasoning_content, reasoning: of an assistant's turn; the last two are two
            names of the same.
        tool_call_id: of the turn that brings a call's result.
        parsed: what the client's library has made of its content. Nothing new.
        refusal, annotations, audio, function_call: not supported, may be empty.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: msgspec.Raw | None = None
    refusal: str | None = None
    annotations: list[msgspec.Raw] | None = None
    audio: dict[str, msgspec.Raw] | None = None
    function_call: dict[str, msgspec.Raw] | None = None


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of an object; absent for a function without any.
        strict: arguments follow the schema in any case.
    """

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """Something the model may use. Only those of type "function" are supported."""

    type: str
    function: FunctionDefinition | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that the model has to use."""

    type: str
    function: NamedFunction | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema that the answer satisfies, whatever `strict` says. Its names are for people."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer has to be like: of type "text", "json_object" or "json_schema"."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer has to be like, in one of several ways.

    Attributes:
        json: a JSON schema, or the text of one. json_object: any JSON object.
        regex: the whole answer matches. choice: it is one of these texts.
        grammar: in Lark's notation or llama.cpp's.
        whitespace_pattern: a regular expression for what may be between tokens of JSON.
        disable_any_whitespace: nothing may.
        structural_tag, disable_additional_properties: not supported, may be empty or false.
    """

    json: dict[str, object] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: str | None = None
    disable_additional_properties: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. None stands for absent everywhere."""

    model: str | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Int | None = None
    cache_salt: str | None = None
    service_tier: str | None = None
    priority: Int | None = None
    timeout: float | None = None
    user: str | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    best_of: Int | None = None
    logprobs: Int | None = None
    echo: bool | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Read a request body.

    Args:
        body: JSON as it came from the client.
        kind: the body's type.

    Raises:
        RequestError: not JSON, a field of the wrong type, twice, unknown, or known but not
            supported with a value other than a neutral one. `param` names the field.
    """
    if not body.strip():
        raise RequestError("the request body is empty: send a JSON object")
    try:
        fields = drop_neutral(_decode_fields(body), kind.__struct_fields__)
        refuse_unknown(fields, kind)
        decoded = msgspec.json.decode(msgspec.json.encode(fields), type=kind)
        json.loads(body, object_pairs_hook=refuse_duplicates)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    return decoded


def decode_query(query: Mapping[str, str], kind: type[Body]) -> Body:
    """Read what follows the "?" of a URL. RequestError, with `param`, for what does not fit."""
    unknown = sorted(query.keys() - set(kind.__struct_fields__))
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        raise RequestError(f"unknown {unknown[0][:80]!r}; this takes {known}", param=unknown[0])
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None


def refuse_unknown(fields: dict[str, msgspec.Raw], kind: type[Body]) -> None:
    """RequestError for a field that neither the endpoint nor the table of known fields has."""
    unknown = sorted(fields.keys() - set(kind.__struct_fields__))
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        raise RequestError(
            f"unknown field {unknown[0]!r}; this endpoint takes {known}", param=unknown[0]
        )


def refuse_duplicates(pairs: list[tuple[str, object]]) -> None:
    """RequestError for an object with a name twice: which value was meant is anyone's guess."""
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise RequestError(f"field {name!r} appears twice in one object", param=name)
        seen.add(name)


def wrong_type(error: msgspec.ValidationError) -> RequestError:
    """The same complaint with the path as `param`, for a person to read."""
    message = str(error)
    match = _PATH.search(message)
    if match is None or not match["path"]:
        return RequestError(f"the request body does not fit: {message}")
    what = message[: match.start()].replace("`", "")
    field = match["path"]
    return RequestError(f"{field}: {what[0].lower()}{what[1:]}", param=re.split(r"[.\[]", field)[0])
