"""Answers under a grammar of calls: whatever a model draws is a call that fits its schema."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from text_toys import EOS, bytes_and
from tokenizers import Tokenizer as HubTokenizer

from jaxserve.parsers.answer import AnswerParser
from jaxserve.parsers.answer_grammar import CallRules, answer_grammar, json_rule, regex_rule
from jaxserve.parsers.formats import HERMES, LLAMA3, MISTRAL
from jaxserve.parsers.parsed import Parsed
from jaxserve.parsers.thinking import ThinkingParser
from jaxserve.parsers.tool_calls import ToolCallParser

VOCAB_SIZE = 300
NAMED = replace(MISTRAL, writes_names=True)
FORMS = [
    pytest.param(HERMES, id="hermes"),
    pytest.param(LLAMA3, id="llama3"),
    pytest.param(MISTRAL, id="mistral"),
    pytest.param(NAMED, id="mistral by name"),
]
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 3},
            "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "weather_now": {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/unit"}},
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
    "end": {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]")


def vocabulary(*, with_marks: bool) -> HubTokenizer:
    return bytes_and(*MARKS, "[ARGS]") if with_marks else bytes_and()


def matcher(
    tokenizer: HubTokenizer, form, *, thoughts="none", parallel=True, forced=True, content=None
):
    calls = None if form is None else CallRules(form, SCHEMAS, forced, parallel)
    grammar = answer_grammar(tokenizer.token_to_id, thoughts=thoughts, calls=calls, content=content)
    library = LLTokenizer(
        tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=tokenizer.token_to_id(EOS)
    )
    made = LLMatcher(library, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def begins(tokenizer: HubTokenizer, form, text: str, *, spelled: bool = False, **how) -> bool:
    """Whether the text can be the beginning of one in the grammar."""
    made = matcher(tokenizer, form, **how)
    encode = vocabulary(with_marks=False) if spelled else tokenizer
    ids = encode.encode(text, add_special_tokens=False).ids
    return made.validate_tokens(ids) == len(ids)


def complete(tokenizer: HubTokenizer, form, text: str, **how) -> bool:
    """Whether the text is in the grammar."""
    made = matcher(tokenizer, form, **how)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return all(made.consume_token(i) for i in ids) and made.is_accepting()


def draw(made: LLMatcher, tokenizer: HubTokenizer, rng: random.Random, most: int) -> str | None:
    """What a model without a will of its own writes. None if it finds no end."""
    mask, ids = allocate_token_bitmask(1, VOCAB_SIZE), []
    end_of_thoughts = tokenizer.encode("</think>", add_special_tokens=False).ids
    planned: list[int] = []
    while not made.is_stopped():
        if len(ids) == most:
            return None
        fill_next_token_bitmask(made, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        allowed = [int(i) for i in np.flatnonzero(bits)]
        # Text without structure never ends by chance: ends are drawn more often.
        rare = [i for i in allowed if tokenizer.id_to_token(i) in ('"', "}", "]", EOS)]
        if not planned and rng.random() < 0.1:
            planned = list(end_of_thoughts)
        if planned and planned[0] in allowed:
            ids.append(planned.pop(0))
        else:
            planned = []
            ids.append(rng.choice(rare if rare and rng.random() < 0.5 else allowed))
        assert made.consume_token(ids[-1])
    return tokenizer.decode(ids, skip_special_tokens=False).removesuffix(EOS)


@pytest.mark.parametrize("thoughts", ["none", "possible", "open"])
@pytest.mark.parametrize("with_marks", [True, False], ids=["marks are tokens", "marks are spelled"])
@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_drawn_is_a_call_that_fits_its_schema(form, with_marks, thoughts):
    tokenizer, rng = vocabulary(with_marks=with_marks), random.Random(1)
    done = 0
    for _ in range(8):
        parallel = rng.random() < 0.5
        made = matcher(tokenizer, form, thoughts=thoughts, parallel=parallel)
        text = draw(made, tokenizer, rng, most=2000)
        if text is None:
            continue
        done += 1
        thinking = None if thoughts == "none" else ThinkingParser(opened=thoughts == "open")
        parser = AnswerParser(thinking, ToolCallParser(form, SCHEMAS))
        parsed = Parsed()
        parser.push(text, parsed)
        parser.flush(parsed)
        assert parsed.content == ""
        assert len(parsed.calls) == 1 or (parallel and len(parsed.calls) > 1)
        for call in parsed.calls:
            assert call.name is not None
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert done >= 2


ONE = {
    "hermes": '<tool_call>\n{"name": "end", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "end", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "end", "arguments": {}}]',
    "by name": "[TOOL_CALLS]end[ARGS]{}",
}
TWO = {
    "hermes": ONE["hermes"] + "\n" + ONE["hermes"],
    "llama3": ONE["llama3"] + "; " + ONE["llama3"],
    "mistral": '[TOOL_CALLS] [{"name": "end", "arguments": {}}, {"name": "end", "arguments": {}}]',
    "by name": ONE["by name"] * 2,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_models_write_is_in_the_grammar(form):
    name = "by name" if form is NAMED else form.name
    tokenizer = vocabulary(with_marks=True)
    assert complete(tokenizer, form, ONE[name])
    assert complete(tokenizer, form, TWO[name])
    assert not complete(tokenizer, form, TWO[name], parallel=False)
    assert complete(tokenizer, form, "Well.\n</think>\n\n" + ONE[name], thoughts="open")
    assert complete(tokenizer, form, f"<think>\nWell.</think>\n{ONE[name]}", thoughts="possible")
    assert complete(tokenizer, form, ONE[name], thoughts="possible")
    assert not begins(tokenizer, form, "Well", thoughts="possible")
    assert not begins(tokenizer, form, "Well")
    assert not begins(tokenizer, form, ONE[name].replace("end", "other"))


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_free_text_is_free_until_a_call_begins(form, spelled):
    name = "by name" if form is NAMED else form.name
    tokenizer = vocabulary(with_marks=True)
    free = {"forced": False}
    assert complete(tokenizer, form, "I think {that} <this> [is]\n fine.", **free)
    assert complete(tokenizer, form, "", **free)
    assert complete(tokenizer, form, f"Hm.</think>\n{ONE[name]}", **free, thoughts="open")
    marked = ONE[name] if form is not LLAMA3 else form.opening + ONE[name]
    assert complete(tokenizer, form, "Well. " + marked, **free)
    for wrong in (form.opening + "x", marked.replace("end", "other")):
        assert not begins(tokenizer, form, "Well. " + wrong, spelled=spelled, **free)
    if form is LLAMA3:
        assert complete(tokenizer, form, ONE[name], **free)
        assert not begins(tokenizer, form, ' {"answer": 1}', **free)


CAPITAL = json_rule({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {})


@pytest.mark.parametrize("form", FORMS)
def test_content_that_has_a_form_may_come_in_place_of_calls(form):
    name = "by name" if form is NAMED else form.name
    tokenizer, how = vocabulary(with_marks=True), {"forced": False, "content": CAPITAL}
    marked = ONE[name] if form is not LLAMA3 else form.opening + ONE[name]
    assert complete(tokenizer, form, marked, **how)
    assert complete(tokenizer, form, '{"a":1}', **how)
    assert not begins(tokenizer, form, '{"a":2}', **how)
    assert not begins(tokenizer, form, "Well", **how)
    assert not begins(tokenizer, form, '{"a":1}' + form.opening, **how)


def test_content_that_has_a_form_comes_after_the_thoughts():
    tokenizer = vocabulary(with_marks=True)
    how = {"content": CAPITAL, "thoughts": "open"}
    assert complete(tokenizer, None, 'So {"a":1}?</think>\n\n{"a":1}', **how)
    assert not begins(tokenizer, None, "So</think>\n\nNo", **how)
    how["thoughts"] = "possible"
    assert complete(tokenizer, None, '{"a":1}', **how)
    assert complete(tokenizer, None, '<think>x</think>{"a":1}', **how)


@pytest.mark.parametrize(
    "expression, text",
    [("a/b|c", "a/b"), (r"\d+\/\d+", "12/3"), (r"\\/", "\\/"), ("a\nb", "a\nb"), ("[/]", "/")],
)
def test_a_regular_expression_may_hold_any_character(expression, text):
    tokenizer = vocabulary(with_marks=True)
    assert complete(tokenizer, None, text, content=regex_rule(expression))
    assert not begins(tokenizer, None, "x", content=regex_rule(expression))
