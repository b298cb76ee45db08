"""Conversations to prompts: any request gets the model's text or a clear refusal, and soon."""

from __future__ import annotations

import json

import pytest

from checkpoints.model_config import TokenizerSpec
from jaxserve.chat_template import ChatTemplate
from jaxserve.errors import RequestError
from jaxserve.template_sandbox import RenderLimits

STRING_ONLY = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{{ '<' + message['role'] + '>' + message['content'] + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PART_AWARE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
)
RAISING = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != loop.index0 is even %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]
SMALL = RenderLimits(steps=1000, seconds=60.0, characters=10_000)


def make(source: str, limits: RenderLimits | None = None) -> ChatTemplate:
    special = (("pad_token", "<pad>"),)
    return ChatTemplate(TokenizerSpec("", False, "<s>", "</s>", source, special), limits=limits)


def render(source: str, messages=HI, limits=None, *, add_generation_prompt=True, **arguments):
    return make(source, limits).render(
        messages, add_generation_prompt=add_generation_prompt, template_arguments=arguments
    )


def refusal(source: str, messages=HI, limits=None, **arguments) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(source, messages, limits, **arguments)
    return caught.value


def test_turns_special_tokens_and_the_generation_prompt_are_the_templates_to_place():
    assert render(STRING_ONLY) == "<s><user>hi</s>\n<assistant>"
    assert render(STRING_ONLY, add_generation_prompt=False) == "<s><user>hi</s>\n"


def test_a_lone_system_message_is_the_templates_to_judge():
    messages = [{"role": "system", "content": "Be brief."}]
    assert render(PART_AWARE, messages) == "<system>Be brief."


@pytest.mark.parametrize("source", [STRING_ONLY, PART_AWARE, PARTS_ONLY, RAISING])
def test_text_parts_read_as_the_string_they_make(source):
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": " fruit."}]
    text = render(source, [{"role": "user", "content": "Name a fruit."}])
    assert render(source, [{"role": "user", "content": parts}]) == text
    assert "Name a fruit." in text


def test_a_null_assistant_turn_is_empty_and_other_null_fields_are_absent():
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": None, "name": None}]
    template = "{% for m in messages %}<{{ m.content }}{{ m.name is defined }}>{% endfor %}"
    assert render(template, messages) == "<hiFalse><False>"


def test_null_stays_null_where_calls_stand_in_its_place():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
    template = (
        "{% for m in messages %}{{ m.content is none }}"
        "{% for call in m.tool_calls or () %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    assert render(template, messages) == 'FalseTrue{"a": 1}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.content.split('x')[0] }}",
        "{{ 'x' in m.content }}",
        "[{{ m.content }}]",
        "{{ '' if m.content is string else raise_exception('a string, please') }}",
    ],
)
def test_null_reads_as_empty_for_a_template_that_cannot_have_it(source):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}]
    loop = "{% for m in messages %}" + source + "{% endfor %}"
    assert render(loop, turns) == render(loop, [*HI, turns[1] | {"content": ""}])


def test_tools_are_the_templates_to_show():
    template = make("{% for tool in tools %}{{ tool | tojson }}{% endfor %}")
    tool = {"type": "function", "function": {"name": "f"}}
    assert json.loads(template.render(HI, tools=[tool], template_arguments={})) == tool
    assert "tools" in template.variables


@pytest.mark.parametrize(
    "source, known",
    [
        ("{% if tools %}x{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% macro f(tools) %}{{ tools }}{% endmacro %}", False),
        ("no tools here: {{ messages }}", False),
        ("{% for %}", False),
    ],
)
def test_a_template_says_what_it_looks_at(source, known):
    assert ("tools" in make(source).variables) == known


@pytest.mark.parametrize(
    "messages, place, reason",
    [
        ([], "messages", "empty"),
        (None, "messages", "a list of messages"),
        ("hi", "messages", "a list of messages"),
        ({"role": "user"}, "messages", "a list of messages"),
        (["hi"], "messages[0]", "an object"),
        ([*HI, {"content": "x"}], "messages[1].role", "not None"),
        ([{"role": 7, "content": "x"}], "messages[0].role", "not 7"),
        ([{"role": "user\nsystem", "content": "x"}], "messages[0].role", "one word"),
        ([{"role": "user\n", "content": "x"}], "messages[0].role", "one word"),
        ([{"role": "", "content": "x"}], "messages[0].role", "one word"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "user", "content": None}], "messages[0].content", "not None"),
        ([*HI, *HI, {"role": "user", "content": 3}], "messages[2].content", "not 3"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content", "text parts"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "an object"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages[0].content[1].type",
            "'image_url' is not supported",
        ),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type", "None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "None"),
    ],
)
def test_a_malformed_message_is_refused_and_its_place_named(messages, place, reason):
    error = refusal(STRING_ONLY, messages)
    assert error.param == place
    assert str(error).startswith(place)
    assert reason in str(error)


def test_a_long_wrong_value_is_not_repeated_in_full():
    assert len(str(refusal(PART_AWARE, [{"role": "x" * 9999 + "!", "content": ""}]))) < 200


def test_a_template_that_refuses_is_quoted():
    assert "Roles must alternate user/assistant" in str(refusal(RAISING, [*HI, *HI]))


@pytest.mark.parametrize(
    "source, reason",
    [
        ("{{ messages[5].content }}", "has no element 5"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ (messages | first).role.nothing() }}", "not"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_a_refusal_never_an_internal_error(source, reason):
    error = refusal(source)
    assert reason in str(error)
    assert error.param == "messages"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | no_such_filter }}", "{% nonsense %}"])
def test_a_template_that_does_not_compile_refuses_chats_only(source):
    assert "does not compile" in str(refusal(source))


@pytest.mark.parametrize(
    "source, limit",
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for i in range(9**4) %}{% for j in range(9**4) %}{% endfor %}{% endfor %}", "steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "steps",
        ),
        (
            "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
            "{% for i in range(999) %}{% call f() %}{% endcall %}{% endfor %}",
            "steps",
        ),
        ("{% for i in range(900) %}{{ messages[0].content * 99 }}{% endfor %}", "characters"),
        ("{{ 'a' * 10**10 }}", "size"),
        ("{{ 10**10 * 'a' }}", "size"),
        ("{{ [0] * 10**10 }}", "size"),
        ("{{ 9 ** (9 ** 9) }}", "size"),
        ("{{ 'a' | center(20000) }}", "size"),
        ("{{ 'a'.ljust(20000) }}", "size"),
    ],
)
def test_work_without_end_is_bounded(source, limit):
    assert limit in str(refusal(source, limits=SMALL))


@pytest.mark.parametrize(
    "growth",
    [
        "{% set n.s = n.s ~ n.s %}",
        "{% set n.s = n.s + n.s %}",
        "{% set n.s = '%s%s' % (n.s, n.s) %}",
        "{% set n.s = (n.s, n.s) | join %}",
        "{% set n.s = n.s.replace('a', 'aa') %}",
        "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}",
    ],
)
def test_a_value_cannot_be_doubled_again_and_again(growth):
    source = "{% set n = namespace(s='a') %}{% for i in range(60) %}" + growth + "{% endfor %}"
    assert "exceeds the size of 10000" in str(refusal(source, limits=SMALL))


def test_slow_work_is_bounded_by_the_clock():
    limits = RenderLimits(steps=10**9, seconds=0.05)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert "longer than 0.05 seconds" in str(refusal(source, limits=limits))


def test_limits_leave_room_for_long_conversations():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "x" * 200} for i in range(2000)]
    assert len(render(RAISING, messages)) > 400_000


def test_the_language_is_the_one_hugging_face_templates_are_written_in():
    messages = [*HI, {"role": "assistant", "content": "<é>"}]
    source = (
        "  {% if true %}\n"
        "{{ messages | tojson }}\n"
        "  {% endif %}\n"
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
        "{% if i == 3 %}{% break %}{% endif %}{% endfor %}"
        "{% generation %}g{% endgeneration %}{% filter upper | lower %}F{% endfilter %}"
        "{{ strftime_now('%Y') | length }}{{ pad_token }}{{ tools is none }}{{ documents is none }}"
        "{{ messages[::-1] | map(attribute='role') | join('+') }}"
    )
    expected = "02" + "3" + "gf" + "4" + "<pad>TrueTrue" + "assistant+user"
    assert render(source, messages) == json.dumps(messages, ensure_ascii=False) + "\n" + expected


def test_json_keeps_markup_characters_and_takes_the_usual_options():
    source = "{{ {'b': '<&>', 'a': 1} | tojson(indent=1, sort_keys=true) }}"
    assert render(source) == json.dumps({"a": 1, "b": "<&>"}, indent=1)


def test_a_token_the_model_lacks_is_undefined_rather_than_none():
    spec = TokenizerSpec("", False, None, None, "{{ bos_token }}|{{ bos_token is defined }}")
    assert ChatTemplate(spec).render(HI, template_arguments={}) == "|False"


def test_template_arguments_are_variables():
    source = "{% if enable_thinking is defined and not enable_thinking %}<think/>{% endif %}"
    assert render(source) == ""
    assert render(source, enable_thinking=False) == "<think/>"


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "raise_exception"])
def test_template_arguments_cannot_replace_what_the_server_sets(name):
    with pytest.raises(RequestError, match=name) as caught:
        make(STRING_ONLY).render(HI, template_arguments={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_renderings_share_nothing():
    template = make("{% set n = namespace(x=0) %}{% set n.x = n.x + 1 %}{{ n.x }}{{ messages }}")
    messages = [{"role": "user", "content": "hi"}]
    first = template.render(messages, template_arguments={})
    assert template.render(messages, template_arguments={}) == first
    assert messages == HI
