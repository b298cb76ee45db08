"""Answers taken apart: the same whatever the pieces, and nothing of the text gets lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.parsers.answer import AnswerParser
from jaxserve.parsers.formats import FORMATS, HERMES, LLAMA3, MISTRAL, recognise_format
from jaxserve.parsers.parsed import Parsed
from jaxserve.parsers.thinking import ThinkingParser
from jaxserve.parsers.tool_calls import ToolCallParser

NAMES = ("get_weather", "add", "f-1")
WEATHER = '{"city": "Zürich", "days": [1, 2]}'


def read(pieces, form=None, *, single=False, think=None) -> list[Parsed]:
    """What each piece of an answer, and then its end, made certain."""
    parser = AnswerParser(
        None if think is None else ThinkingParser(opened=think == "opened"),
        None if form is None else ToolCallParser(form, NAMES, single=single),
    )
    seen = []
    for piece in pieces:
        seen.append(Parsed())
        parser.push(piece, seen[-1])
    seen.append(Parsed())
    parser.flush(seen[-1])
    return seen


def join(seen: list[Parsed]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[list[str]] = []
    for delta in (delta for parsed in seen for delta in parsed.calls):
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
        calls[delta.index][1] += delta.arguments
    return (
        "".join(parsed.reasoning for parsed in seen),
        "".join(parsed.content for parsed in seen),
        [(name, arguments) for name, arguments in calls],
    )


def answer(text: str, form, **how):
    """Content and calls, held to be the same in one piece and character by character."""
    reasoning, content, calls = join(read([text], form, **how))
    assert join(read(text, form, **how)) == (reasoning, content, calls)
    assert reasoning == ""
    return content, calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Each way to write calls, as models write them


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (hermes("get_weather", WEATHER), "", [("get_weather", WEATHER)]),
        ("Let me see.\n\n" + hermes("add", "{}"), "Let me see.", [("add", "{}")]),
        (
            hermes("add", '{"a":1}') + "\n" + hermes("add", '{"a": 2}'),
            "",
            [("add", '{"a":1}'), ("add", '{"a": 2}')],
        ),
        (hermes("add", "{}") + "\nDone.", "Done.", [("add", "{}")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": null}', "", [("add", "{}")]),
        (
            '<tool_call>{"name": "add", "arguments": {"s": "}</tool_call>\\""}, "id": 7}',
            "",
            [("add", '{"s": "}</tool_call>\\""}')],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": [1, {"b', "", [("add", '{"a": [1, {"b')]),
    ],
)
def test_hermes(text, content, calls):
    assert answer(text, HERMES) == (content, calls)


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ('\n\n<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", "{}")]),
        ('{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        (
            '{"name": "add", "parameters": {}}; {"name": "f-1", "parameters": {"x": true}}',
            "",
            [("add", "{}"), ("f-1", '{"x": true}')],
        ),
        ('I will.<|python_tag|>{"name": "add", "arguments": {}}', "I will.", [("add", "{}")]),
        (' {"city": "Rome"}', ' {"city": "Rome"}', []),
        ('See {"name": "add", "parameters": {}}', 'See {"name": "add", "parameters": {}}', []),
    ],
)
def test_llama3(text, content, calls):
    assert answer(text, LLAMA3) == (content, calls)


@pytest.mark.parametrize(
    "text, content, calls",
    [
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, '
            '{"name": "get_weather", "arguments": {}, "id": "a1b2c3d4e"}]',
            "",
            [("add", '{"a": 1}'), ("get_weather", "{}")],
        ),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ('Well.[TOOL_CALLS]add{"a": {"b": 1}}', "Well.", [("add", '{"a": {"b": 1}}')]),
        (
            "[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]f-1[ARGS]{}",
            "",
            [("add", "{}"), ("f-1", "{}")],
        ),
        ('[TOOL_CALLS]{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    ],
)
def test_mistral(text, content, calls):
    assert answer(text, MISTRAL) == (content, calls)


@pytest.mark.parametrize(
    "form, text",
    [
        (HERMES, "<tool_call>"),
        (HERMES, "<tool_call> is how a call begins."),
        (HERMES, 'A\n <tool_call>{"name": "unknown", "arguments": {}}</tool_call>\n'),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": "no JSON"}</tool_call>'),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "ad'),
        (HERMES, '<tool_call>{"nom": "add", "arguments": {}}'),
        (HERMES, "a < b and <tool <tool_cal "),
        (LLAMA3, "<|python_tag|>print(1)"),
        (LLAMA3, '{"name": "Bob", "parameters": {}}'),
        (LLAMA3, "{"),
        (MISTRAL, "[TOOL_CALLS] []"),
        (MISTRAL, "[TOOL_CALLS]This is no call."),
        (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
        (MISTRAL, "[TOOL_CALLS]add[CALLS]{}"),
        (MISTRAL, "[TOOL_CALLS]" + "a" * 200),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(form, text):
    assert answer(text, form) == (text, [])


def test_with_one_call_allowed_the_answer_ends_with_it():
    text = hermes("add", "{}") + hermes("add", "{}") + "more"
    assert answer(text, HERMES, single=True) == ("", [("add", "{}")])


# As it comes


def test_a_name_comes_first_and_arguments_follow_as_they_are_written():
    pieces = [
        "<tool_",
        'call>\n{"name": "get_',
        'weather", "argum',
        'ents": {"ci',
        'ty": "R"',
        "}}",
    ]
    seen = read(pieces, HERMES)
    deltas = [[(d.index, d.name, d.arguments) for d in parsed.calls] for parsed in seen]
    assert deltas == [
        [],
        [],
        [],
        [(0, "get_weather", '{"ci')],
        [(0, None, 'ty": "R"')],
        [(0, None, "}")],
        [],
    ]


@pytest.mark.parametrize(
    "form, pieces, shown",
    [
        (HERMES, ["a <", "b <tool_", "x"], ["a", " <b", " <tool_x"]),
        (HERMES, ["<tool_call>", "{", '"na', "ïve"], ["", "", "", ""]),
        (HERMES, ["<tool_call>", "so"], ["", "<tool_call>so"]),
        (LLAMA3, ['{"', 'answer"', ": 1}"], ["", '{"answer"', ": 1}"]),
        (MISTRAL, ["[", "TOOL", "]"], ["", "", "[TOOL]"]),
    ],
)
def test_text_is_held_back_only_while_it_may_become_a_call(form, pieces, shown):
    assert [parsed.content for parsed in read(pieces, form)][: len(shown)] == shown


# Thinking


@pytest.mark.parametrize(
    "think, text, reasoning, content",
    [
        ("auto", "<think>\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
        ("opened", "Well,\n\nso.\n</think>\nYes.\n", "Well,\n\nso.", "Yes.\n"),
        ("opened", "<think>Well.</think>Yes.", "Well.", "Yes."),
        ("auto", "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("auto", "\n\nYes <think>no</think>", "", "\n\nYes <think>no</think>"),
        ("auto", "<think>cut of", "cut of", ""),
        ("auto", "<thin", "", "<thin"),
        ("opened", "a </thi", "a </thi", ""),
        ("opened", "a < b </think>", "a < b", ""),
        ("auto", "", "", ""),
    ],
)
def test_thoughts_are_told_from_the_answer(think, text, reasoning, content):
    for pieces in ([text], text):
        assert join(read(pieces, think=think)) == (reasoning, content, [])


def test_a_call_that_is_only_thought_of_is_no_call():
    text = f"<think>{hermes('add', '{}')}</think>\n{hermes('f-1', '{}')}"
    expected = (hermes("add", "{}"), "", [("f-1", "{}")])
    assert join(read(text, HERMES, think="auto")) == expected


# Whatever the text and whatever the pieces

FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<think>", "</think>", "<tool_", "[", "]", "{", "}", ",", ";", ":", '"', "\\", " ", "\n"),
        *('"name": "add"', '"arguments": ', '"parameters": {', "add", "null", "x", "é", "{}"),
        hermes("get_weather", WEATHER),
        '{"name": "add", "parameters": {"a": "\\"}"}}',
        "[TOOL_CALLS]add[ARGS]" + WEATHER,
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(
    TEXTS,
    st.lists(st.integers(0, 200), max_size=12),
    st.sampled_from([None, *FORMATS.values()]),
    st.sampled_from([None, "auto", "opened"]),
    st.booleans(),
)
def test_the_pieces_change_nothing(text, cuts, form, think, single):
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = join(read([text], form, think=think, single=single))
    assert join(read(pieces, form, think=think, single=single)) == whole
    if not whole[2] and not think:
        assert whole[1] == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
WRITERS = [
    (HERMES, lambda calls: "\n".join(hermes(*call) for call in calls)),
    (
        LLAMA3,
        lambda calls: "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls),
    ),
    (
        MISTRAL,
        lambda calls: (
            "[TOOL_CALLS] ["
            + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls)
            + "]"
        ),
    ),
    (MISTRAL, lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)),
]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), JSON, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(WRITERS),
    st.booleans(),
    st.integers(1, 9),
)
def test_what_a_model_meant_is_what_is_read(calls, writer, ascii_only, size):
    form, write = writer
    meant = [(name, json.dumps(args, ensure_ascii=ascii_only)) for name, args in calls]
    text = write(meant)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert join(read(pieces, form)) == ("", "", meant)


@pytest.mark.parametrize(
    "template, form",
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}', HERMES),
        (r'{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>" }}', HERMES),
        ("<tool_call>\n<function=example>", None),
        ("<tool_call>function-name\n<arg_key>argument-key</arg_key>", None),
        ("<|python_tag|> or <function=example>", None),
        ("{{ '<|python_tag|>' }}", LLAMA3),
        ("<|start_header_id|>{{ '\"parameters\": ' }}", LLAMA3),
        ("[AVAILABLE_TOOLS] ... [TOOL_CALLS]", MISTRAL),
        ("{{ tools }}", None),
    ],
)
def test_the_format_is_read_off_the_chat_template(template, form):
    assert recognise_format(template) == form
