"""The engine in this process: `LLM` and `jaxserve generate`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest
from engines import TINY
from text_toys import byte_level

from jaxserve import LLM, ConfigError, EngineStopped, RequestError, SamplingParams
from jaxserve.cli import main, make_parser
from jaxserve.offline.command import engine_options
from jaxserve.offline.llm import body_fields
from jaxserve.request import Constraint

SIZES = {"max_rows": 2, "token_budget": 4, "max_context": 256, "num_pages": 40}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tail }}"
GOLDEN = np.load(TINY / "llama-untied" / "golden.npz")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a tokenizer of bytes and a chat template."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    shutil.copytree(TINY / "llama-untied", folder)
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    yield tmp_path_factory.mktemp("store")
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def llm(checkpoint, store):
    with LLM(str(checkpoint), store=store, progress=False, **SIZES) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_stays_in_the_engine(request):
    yield
    if "llm" in request.fixturenames:
        scheduler = request.getfixturevalue("llm")._loaded.engine.scheduler
        assert not scheduler.running and not scheduler.waiting


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(max_tokens, **changes)


def test_answers_are_the_reference_tokens_in_the_order_of_the_prompts(llm):
    numbers = [3, 0, 2, 1, 3]
    prompts = [GOLDEN[f"prompt_{i}"].tolist() for i in numbers]
    answers = llm.generate(prompts, greedy(8), ignore_eos=True)
    for number, prompt, answer in zip(numbers, prompts, answers, strict=True):
        assert answer.prompt_ids == tuple(prompt)
        sure = int(np.argmax([*(GOLDEN[f"greedy_margin_{number}"][:8] < 1e-3), True]))
        assert answer.token_ids[:sure] == tuple(GOLDEN[f"greedy_{number}"][:sure])
        assert (len(answer.token_ids), answer.finish_reason) == (8, "length")
        assert answer.logprobs is answer.top_logprobs is answer.prompt_logprobs is None


def test_text_and_its_ids_are_the_same_prompt(llm):
    (by_text,) = llm.generate("hello", greedy(6))
    (by_ids,) = llm.generate(np.array(by_text.prompt_ids), greedy(6))
    assert by_text == dataclasses.replace(by_ids, num_cached=by_text.num_cached)
    assert llm.generate([], greedy(6)) == []


def test_each_prompt_may_have_its_own_settings(llm):
    settings = [greedy(3), greedy(5, top_logprobs=2, prompt_logprobs=1)]
    first, second = llm.generate(["hello", "hello"], settings, ignore_eos=True)
    assert len(first.token_ids) == 3 and first.token_ids == second.token_ids[:3]
    assert len(second.logprobs) == len(second.top_logprobs) == 5
    assert all(
        len(top) == 2 and top[0][1] == lp
        for top, lp in zip(second.top_logprobs, second.logprobs, strict=True)
    )
    assert len(second.prompt_logprobs) == len(second.prompt_ids) - 1


def test_the_same_seed_draws_the_same_tokens_and_none_a_fresh_one(llm):
    def draw(seed):
        settings = greedy(12, temperature=1.0, seed=seed)
        return llm.generate("hello", settings, ignore_eos=True)[0].token_ids

    assert draw(1) == draw(1) != draw(2)
    assert draw(2**64 - 1) == draw(2**64 - 1)
    unseeded = llm.generate(["hello"] * 3, ignore_eos=True)
    assert len({answer.token_ids for answer in unseeded}) == 3
    assert {len(answer.token_ids) for answer in unseeded} == {16}, "the API's default"


def test_stop_strings_and_bad_words_are_honoured(llm):
    (plain,) = llm.generate("hello", greedy(24), ignore_eos=True)
    stop = plain.text[3:5]
    (stopped,) = llm.generate("hello", greedy(24), stop=stop, ignore_eos=True)
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) < 24
    banned = plain.token_ids[2]
    (other,) = llm.generate("hello", greedy(24, bad_words=((banned,),)), ignore_eos=True)
    assert banned not in other.token_ids


def test_an_answer_can_be_held_to_an_expression(llm):
    settings = greedy(12, constraint=Constraint("regex", "hell(o|ort)"))
    (answer,) = llm.generate("he", settings)
    assert answer.text in ("hello", "hellort") and answer.finish_reason == "stop"
    with pytest.raises(RequestError):
        llm.generate("he", greedy(3, constraint=Constraint("regex", "(")))
    (planned,) = llm.plan({"prompt": "he", "guided_regex": "a+"}).requests
    assert planned.sampling.constraint == Constraint("regex", "a+")


def test_a_chat_is_written_out_by_the_models_template(llm):
    chats = [[{"role": "user", "content": "he"}], [{"role": "user", "content": "ll"}]]
    both = llm.chat(chats, greedy(4, top_logprobs=1), ignore_eos=True, tail="assistant: ")
    (alone,) = llm.chat(chats[1], greedy(4), ignore_eos=True, tail="assistant: ")
    (written,) = llm.generate("user: ll\nassistant: ", greedy(4), ignore_eos=True)
    assert both[1].token_ids == alone.token_ids == written.token_ids
    assert alone.prompt_ids == written.prompt_ids
    assert len(both[0].logprobs) == 4


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        ("hello", greedy(9999), r"prompts\[0\]: .* context holds 256"),
        (["hello", [1, 999]], greedy(3), r"prompts\[1\]: .*token id 999"),
        (["hello", ""], greedy(3), r"prompts\[1\]: .*empty"),
        ("hello", greedy(3, temperature=float("nan")), "temperature"),
        ("hello", greedy(3, top_p=2.0), "top_p is 2"),
        ("hello", greedy(3, prompt_logprobs=99), "prompt_logprobs is 99"),
        ("hello", greedy(3, bad_words=((),)), "bad_words"),
        ("hello", greedy(3, pooling="mean"), "pooling is for vectors"),
        ("hello", greedy(3, bad_words=((999,),)), "bad_words has token id 999"),
        ("hello", [greedy(3), greedy(3)], "1 prompts and 2 sampling settings"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(llm, prompts, sampling, words):
    steps = llm._loaded.engine.counters.steps
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, sampling)
    assert llm._loaded.engine.counters.steps == steps


def test_every_field_of_the_settings_is_passed_on(llm):
    given = SamplingParams(
        max_tokens=7, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=5,
        stop_token_ids=(4,), top_logprobs=2, prompt_logprobs=1, presence_penalty=0.5,
        frequency_penalty=0.25, repetition_penalty=1.5, logit_bias=((3, 1.0),),
        allowed_token_ids=(1, 2, 3, 4), bad_words=((9, 8),), min_tokens=2,
        constraint=Constraint("regex", "a+"),
    )  # fmt: skip
    defaults = SamplingParams(max_tokens=1)
    changed = [
        f.name
        for f in dataclasses.fields(given)
        if getattr(given, f.name) != getattr(defaults, f.name)
    ]
    every = [f.name for f in dataclasses.fields(given) if f.name != "pooling"]  # that is refused
    assert changed == every, "a field is not tried here"
    (request,) = llm.plan({"prompt": [1, 2], "ignore_eos": True}, given).requests
    assert dataclasses.replace(request.sampling, seed=5) == given
    assert "seed" in body_fields(given)


def test_more_prompts_than_are_let_wait_at_once(llm):
    prompts = [[1 + i % 200, 2] for i in range(60)]
    answers = llm.generate(prompts, greedy(2), ignore_eos=True)
    assert [answer.prompt_ids for answer in answers] == [tuple(prompt) for prompt in prompts]
    assert all(len(answer.token_ids) == 2 for answer in answers)


def test_an_interrupt_ends_the_call_and_not_the_engine(llm):
    before = signal.getsignal(signal.SIGINT)
    scheduler = llm._loaded.engine.scheduler

    def interrupt():
        while not scheduler.running:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=interrupt, daemon=True)
    user.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1 + i % 300] for i in range(4000)], greedy(200), ignore_eos=True)
    user.join()
    assert time.monotonic() - started < 20
    assert signal.getsignal(signal.SIGINT) is before
    assert not scheduler.running and not scheduler.waiting
    assert llm.generate("hello", greedy(3), ignore_eos=True)[0].finish_reason == "length"


def test_threads_take_turns(llm):
    found = {}

    def ask(name):
        found[name] = llm.generate([name] * 5, greedy(6), ignore_eos=True)[0].text

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("he", "ll", "ort")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, text in found.items():
        assert llm.generate(name, greedy(6), ignore_eos=True)[0].text == text
    assert len(found) == 3


# Files of prompts.


@pytest.fixture
def generate(checkpoint, store, tmp_path, capsys):
    def run(*flags: str) -> tuple[int, list, str]:
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        out = tmp_path / "out.jsonl"
        argv = ["generate", str(checkpoint), "--store", str(store), *sizes]
        code = main([*argv, "--output", str(out), *flags])
        lines = out.read_text().splitlines() if out.exists() else []
        return code, [json.loads(line) for line in lines], capsys.readouterr().err

    return run


def test_a_file_of_texts_becomes_a_file_of_answers_and_is_gone_on_with(generate, tmp_path, llm):
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("hello\n\nhell\nort\n")
    flags = ["--input", str(file), "--max-tokens", "5", "--temperature", "0"]
    code, answers, said = generate(*flags)
    assert code == 0 and "3 answers" in said
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    for text, answer in zip(("hello", "hell", "ort"), answers, strict=True):
        (expected,) = llm.generate(text, greedy(5))
        assert answer["text"] == expected.text
        assert answer["completion_tokens"] == len(expected.token_ids)

    kept = out.read_text().splitlines(keepends=True)
    out.write_text(kept[2] + kept[0][: len(kept[0]) // 2])  # broken off in the middle of a line
    code, again, said = generate(*flags)
    assert code == 0 and again == answers
    assert "1 prompts are answered already" in said and "2 answers" in said
    code, again, said = generate(*flags)
    assert again == answers and "3 prompts are answered already" in said

    code, _, said = generate(*flags, "--seed", "4")
    assert code == 1 and "--overwrite" in said and out.read_text() == "".join(kept)
    code, changed, _ = generate(*flags, "--seed", "4", "--overwrite")
    assert code == 0 and changed[0]["mark"] != answers[0]["mark"]


def test_a_file_of_bodies_may_mix_chats_and_completions_and_errors_are_tried_again(
    generate, tmp_path
):
    file = tmp_path / "prompts.jsonl"
    bodies = [
        {"id": "a", "prompt": "hello", "max_tokens": 3, "logprobs": 0},
        {"messages": [{"role": "user", "content": "he"}], "max_tokens": 4},
        {"prompt": "hello", "max_tokens": 9999},
        {"prompt": "hello", "n": 2},
        {"prompt": "hello", "colour": "red"},
    ]
    file.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    code, answers, said = generate("--input", str(file), "--temperature", "0")
    assert code == 1 and "2 answers" in said and "3 could not be answered" in said
    by_index = {answer["index"]: answer for answer in answers}
    assert by_index[0]["id"] == "a" and len(by_index[0]["logprobs"]) == 3
    assert by_index[1]["completion_tokens"] == 4
    assert "context holds 256" in by_index[2]["error"]
    assert "at most 1" in by_index[3]["error"]
    assert "colour" in by_index[4]["error"]
    code, again, said = generate("--input", str(file), "--temperature", "0")
    assert code == 1 and "2 prompts are answered already" in said
    assert sorted(again, key=lambda a: a["index"]) == answers


def test_with_chat_a_text_is_what_a_user_says(generate, tmp_path, llm):
    file = tmp_path / "prompts.txt"
    file.write_text("he\n")
    flags = ["--input", str(file), "--chat", "--system", "ort", "--max-tokens", "4"]
    _, (answer,), _ = generate(*flags, "--temperature", "0")
    messages = [{"role": "system", "content": "ort"}, {"role": "user", "content": "he"}]
    assert answer["text"] == llm.chat(messages, greedy(4))[0].text


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (None, [], "No such file"),
        ("\n \n", [], "has no prompts"),
        ("hello", ["--format", "jsonl"], "line 1 is not JSON"),
        ("[1]", ["--format", "jsonl"], "line 1 is not a JSON object"),
        ("hello", ["--system", "be brief"], "add --chat"),
    ],
)
def test_an_input_that_cannot_be_meant_is_refused_in_a_line(generate, tmp_path, text, flags, words):
    file = tmp_path / "prompts.txt"
    if text is not None:
        file.write_text(text)
    code, answers, said = generate("--input", str(file), *flags)
    assert code == 1 and not answers
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "promises"),
    [
        ([], False),
        (["--ttft-ms=900"], True),
        (["--tpot-ms=90"], True),
        (["--promise"], True),
        (["--no-promise", "--ttft-ms=900"], False),
    ],
)
def test_it_promises_only_what_the_flags_ask_for(flags, promises):
    parsed = make_parser().parse_args(["generate", "--input", "-", *flags])
    assert engine_options(parsed)["no_promise"] is not promises


def test_a_closed_one_says_so(checkpoint, store):
    with LLM(str(checkpoint), store=store, progress=False, **SIZES) as llm:
        pass
    llm.close()
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate("hello")
    with pytest.raises(ConfigError, match="beyond the 512"):
        LLM(str(checkpoint), store=store, progress=False, max_context=9999)
