"""The benchmarks run, say what they measured on what, and leave nothing behind. Not how fast."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TINY, all_logits, tiny

from bench import gpu_check, overload, quality
from bench.clients import Attempt
from bench.gpu import kernels
from bench.gpu.mosaic import mosaic_target
from bench.gpu.stage import Given, Outcome, Rates, Stage, run_stage
from bench.measure import Round, Timeline, figures, random_prompts, rounded
from jaxserve.workload import Promise
from pallas_kernels.mosaic.support import OFFERED

ROOT = Path(__file__).parent.parent
MODEL = str(TINY / "llama-untied")
ENGINE = ["--max-rows", "2", "--token-budget", "4", "--max-context", "64"]
WORK = ["--concurrency", "1", "3", "--prompt-tokens=10", "--output-tokens=40", "--repeats=2"]
TIMES = ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms", "tpot_p95_ms")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One store for the file: what the first benchmark compiles the second one finds."""
    return str(tmp_path_factory.mktemp("store"))


def run(bench: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", bench, *flags]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )


def command_line(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # the process has ended meanwhile
        return ""


@pytest.mark.parametrize("bench", ["offline", "serve"])
def test_each_point_is_one_line_of_json(bench, store, tmp_path):
    file = tmp_path / "points.jsonl"
    file.write_text("what was there stays\n")
    done = run(f"bench.{bench}", MODEL, "--store", store, *ENGINE, *WORK, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "what was there stays\n" + done.stdout
    assert "TTFT" in done.stderr and "Traceback" not in done.stderr

    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if store in command_line(path)]
    assert not left, "a server or a worker still runs"

    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert [point["concurrency"] for point in points] == [1, 3]
    for point in points:
        assert (point["bench"], point["jax"]) == (bench, jax.__version__)
        assert point["model"].endswith("llama-untied")
        assert (point["device"], point["dtype"]) == ("cpu", "float32")
        assert (point["prompt_tokens"], point["output_tokens"], point["repeats"]) == (10, 40, 2)
        assert (point["max_rows"], point["token_budget"], point["max_context"]) == (2, 4, 64)
        assert point["commit"] and point["cpu"] and point["cores"] >= 1
        assert all(point[name] > 0 for name in TIMES)
        low, high = point["output_tokens_per_s_range"]
        assert 0 < low <= point["output_tokens_per_s"] <= high
        assert ("host_ms" in point) == ("step_ms" in point) == (bench == "offline")


@pytest.mark.parametrize(
    ("bench", "flags", "words"),
    [
        ("bench.offline", ["no-such-model"], "no-such-model"),
        ("bench.offline", [MODEL, "--max-context", "9999"], "beyond the 512"),
        ("bench.offline", [MODEL, "--max-rows", "0"], "whole number from 1"),
        ("bench.offline", [MODEL, "--output-tokens", "1"], "whole number from 2"),
        ("bench.overload", ["no-such-model"], "no-such-model"),
        ("bench.overload", [MODEL, "--ttft-ms", "0"], "more than 0 ms"),
        ("bench.gpu_check", ["--out", "/no/such/folder/check.json"], "/no/such/folder"),
        ("bench.step", ["no-such-model"], "no-such-model"),
        ("bench.step", [MODEL, "--tokens", "9", "--context", "8"], "no --tokens fit"),
        ("bench.step", [MODEL, "--step", "examples.norm_probe"], "package.module:factory"),
        ("bench.serve", [MODEL, "--url", "http://127.0.0.1:9"], "--vocab-size"),
        ("bench.serve", ["--url", "http://127.0.0.1:9", "--vocab-size", "9"], "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(bench, flags, words, store):
    if bench != "bench.gpu_check":  # which has models of its own
        flags = [*flags, "--store", store]
    done = run(bench, *flags)
    assert done.returncode != 0 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr


LENGTHS = {
    "prompt_p50": 8,
    "prompt_p95": 16,
    "prompt_max": 30,
    "output_p50": 8,
    "output_p95": 10,
}


def test_overload_says_what_was_kept_of_the_promise_and_what_became_of_the_refused(store, tmp_path):
    file = tmp_path / "points.jsonl"
    lengths = [f"--{name.replace('_', '-')}={value}" for name, value in LENGTHS.items()]
    limits = ["--ttft-ms=1000", "--tpot-ms=300", "--clients", "2", "6", "--retries=3"]
    times = ["--calibrate-seconds=1.5", "--seconds=4", "--load=3"]
    command = [MODEL, "--store", store, *ENGINE, *lengths, *limits, *times]
    done = run("bench.overload", *command, "--out", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_text() == done.stdout
    assert "ttft_p95_ms" in done.stderr and "Traceback" not in done.stderr
    point = json.loads(done.stdout)
    assert {name: point[name] for name in LENGTHS} == LENGTHS
    assert (point["ttft_ms"], point["tpot_ms"], point["percentile"]) == (1000, 300, 95)
    assert point["requests"] == pytest.approx(3 * 4 * point["capacity_per_s"], rel=0.01, abs=1)
    assert point["ttft_p95_ms"] > 0 and point["tpot_p95_ms"] > 0 and point["goodput_per_s"] > 0
    assert 0 < point["first_attempts_admitted"] <= point["served_in_the_end"] <= 1
    assert 0 <= point["ttft_kept"] <= 1 and 0 <= point["tpot_kept"] <= 1
    by_reason = [value for name, value in point.items() if name.startswith("refused_")]
    assert sum(by_reason) == point["refusals"] > 0, "three times the capacity, and nobody refused"
    assert point["refusal_p95_ms"] > 0


def attempts(*answers: tuple[float, float] | None) -> list[Attempt]:
    """Sendings of one request: TTFT and TPOT, or None for a 429 after 10 ms."""
    made = []
    for answer in answers:
        if answer is None:
            made.append(Attempt(0.0, 0.01, None, retry_after=2.0))
        else:
            ttft, tpot = answer
            made.append(Attempt(0.0, ttft, Timeline(0.0, ttft, ttft + 4 * tpot, 5)))
    return made


def test_overload_counts_requests_attempts_and_retries_apart():
    requests = [
        attempts((0.3, 0.02)),
        attempts(None, (0.4, 0.05)),
        attempts(None, None, (0.6, 0.03)),
        attempts(None, None),
    ]
    got = overload.figures(requests, Promise(ttft=0.5, tpot=0.04), seconds=2.0)
    assert got["ttft_p95_ms"] == pytest.approx(580)
    assert (got["ttft_kept"], got["tpot_kept"]) == (0.6667, 0.6667)
    assert got["goodput_per_s"] == 0.5
    assert (got["first_attempts_admitted"], got["served_in_the_end"]) == (0.25, 0.75)
    assert (got["refusals"], got["retries"], got["retries_admitted"]) == (5, 4, 0.5)
    assert (got["refusal_p95_ms"], got["retry_after_p50_s"]) == (10.0, 2.0)


def test_figures_are_medians_of_rounds_and_percentiles_of_requests():
    def round_of(seconds: float, tpot: float) -> Round:
        requests = (Timeline(0.0, 1.0, 1.0 + 9 * tpot, 10), Timeline(0.0, 2.0, 2.0 + 9 * tpot, 10))
        return Round(seconds, requests)

    got = figures([round_of(4.0, 0.1), round_of(2.0, 0.2), round_of(5.0, 0.4)])
    assert got == {
        "output_tokens_per_s": 5.0,
        "output_tokens_per_s_range": [4.0, 10.0],
        "decode_tokens_per_s": 10.0,
        "ttft_p50_ms": 1500.0,
        "ttft_p95_ms": 2000.0,
        "tpot_p50_ms": 200.0,
        "tpot_p95_ms": 400.0,
    }


def test_no_prompt_comes_twice_and_a_seed_repeats_them():
    first, again, other = (random_prompts(8, 16, 320, seed) for seed in (0, 0, 1))
    prompts = [tuple(prompt) for _ in range(3) for prompt in next(first)]
    assert len(set(prompts)) == 24 and all(0 <= t < 320 for prompt in prompts for t in prompt)
    assert [tuple(prompt) for prompt in next(again)] == prompts[:8]
    assert tuple(next(other)[0]) not in prompts


def test_the_gpu_check_runs_to_its_end_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # Compiling is what takes the time here, and LLVM's optimiser most of that.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    file = tmp_path / "check.json"
    done = run("bench.gpu_check", "--out", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU" in done.stdout and "Traceback" not in done.stderr
    got = json.loads(file.read_text())
    assert (got["platform"], got["passed"], got["jax"]) == ("cpu", True, jax.__version__)
    ended = {stage["stage"]: stage["ended"] for stage in got["stages"]}
    assert ended == dict.fromkeys(("rates", "agreement", "kernels", "step", "engine"), "done")
    points = {stage["stage"]: stage["points"] for stage in got["stages"]}

    compared = [(point["kernel"], point["case"]) for point in points["agreement"]]
    assert {("paged_attention", case) for case in ("decode", "prefill", "mixed")} < set(compared)
    assert {"write_kv", "copy_pages"} < {kernel for kernel, _ in compared}
    assert all(point["agrees"] for point in points["agreement"])
    dialects = {"triton", "mosaic"} if OFFERED else {"triton"}
    assert {point["dialect"] for point in points["agreement"]} == dialects
    for point in points["kernels"]:
        assert (point.get("mosaic_us", 0) > 0) == (OFFERED and point["kernel"] == "decode")
        assert point["triton_us"] > 0 and point["jnp_us"] > 0 and point["triton_share"] > 0
        assert ("xla_us" in point) == (point["kernel"] == "decode")
    for point in points["step"]:
        assert point["roofline_share"] == pytest.approx(
            point["roofline_ms"] / point["step_ms"], rel=0.01
        )
    assert {point["step"] for point in points["step"]} == {"prefill", "decode"}
    assert all(point[name] > 0 for point in points["engine"] for name in TIMES)


@pytest.mark.parametrize(
    ("toy", "ended", "error"),
    [
        ("raising", "failed", "ValueError: no such tile"),
        ("crashing", "failed", "ended with -9"),
        ("endless", "cut", "its 5 s were over"),
    ],
)
def test_a_stage_that_ends_badly_keeps_its_points_and_says_why(toy, ended, error, tmp_path):
    outcome = run_stage(Stage("toy", f"toy_stages:{toy}", 5), Given(tmp_path))
    assert (outcome.ended, outcome.points) == (ended, [{"n": 1}])
    assert error in outcome.error
    assert gpu_check.passed([outcome]) == (ended == "cut")


def test_a_share_is_of_the_rate_that_bounds_the_kernel():
    rates = Rates(bandwidth=1e6, flops=1e6)
    # 2 rows whose 3 queries see 3, 4 and 5 keys: 4 operations for each of 4 heads of 8.
    prefill = kernels.Work(2, 3, 5, num_heads=4, num_kv_heads=2, head_dim=8)
    got = kernels.point(prefill, {"triton": 1.0}, rates)
    assert got["triton_share"] == rounded(2 * (3 + 4 + 5) * 4 * 4 * 8 / 1e6)
    # 2 rows of 5 keys and values in 2 heads: 8 bytes and a scale each, or 16 bytes.
    for int8, each in ((True, 8 + 4), (False, 16)):
        decode = kernels.Work(2, 1, 5, int8=int8, num_heads=4, num_kv_heads=2, head_dim=8)
        got = kernels.point(decode, {"triton": 1.0}, rates)
        assert got["triton_share"] == rounded(2 * 5 * 2 * 2 * each / 1e6)
        assert "triton_share" not in kernels.point(decode, {"triton": 1.0}, None)


def test_the_gpu_check_does_not_pass_if_anything_disagrees():
    points = [{"kernel": "write_kv", "agrees": True}, {"kernel": "copy_pages", "agrees": False}]
    assert gpu_check.passed([Outcome("agreement", points=points[:1])])
    assert not gpu_check.passed([Outcome("agreement", points=points)])


@pytest.mark.parametrize(
    ("ended", "points", "fit"),
    [
        ("done", [("triton", False), ("mosaic", True)], True),
        ("done", [("triton", True), ("mosaic", False)], False),
        ("cut", [("mosaic", True)], False),  # perhaps by a kernel that hangs
        ("done", [("triton", True)], False),
        ("failed", [], False),
    ],
)
def test_kernels_for_hopper_are_timed_once_they_were_right_to_the_end(ended, points, fit):
    told = [{"dialect": dialect, "agrees": agrees} for dialect, agrees in points]
    assert gpu_check.mosaic_agrees(Outcome("agreement", ended, points=told)) == fit


@pytest.mark.parametrize(
    ("platform", "capability", "int8", "takes_part"),
    [
        ("gpu", "9.0", False, OFFERED),
        ("gpu", "9.0", True, False),
        ("gpu", "8.0", False, False),
        ("gpu", "10.0", False, False),
        ("cpu", "", False, OFFERED),
    ],
)
def test_kernels_for_hopper_take_part_where_card_jax_and_cache_allow_it(
    platform, capability, int8, takes_part, monkeypatch
):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    found = mosaic_target(kernels.Work(1, 1, 16, int8=int8).wanted)
    assert (found is not None) == takes_part
    if found:
        assert (found.dialect, found.interpret) == ("mosaic", platform == "cpu")


def test_the_stages_together_stay_under_eight_minutes():
    assert sum(stage.budget for stage in gpu_check.STAGES) < 8 * 60


def test_the_quality_of_a_text_is_what_a_plain_forward_pass_gives_it():
    loaded, tokens = tiny("llama-untied"), random.Random(1).choices(range(3, 320), k=170)
    scorer = quality.Scorer(loaded.decoder, loaded.params, jnp.dtype("float32"), 75, chunk=16)
    scores = scorer.score(tokens)  # two windows, and 20 tokens that fill none
    expected = []
    for window in (tokens[:75], tokens[75:150]):
        logprobs = np.asarray(jax.nn.log_softmax(all_logits(loaded, window)))[:-1]
        expected.append((logprobs[range(74), window[1:]], logprobs.argmax(axis=-1)))
    logprobs, likeliest = map(np.concatenate, zip(*expected, strict=True))
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=1e-4)
    assert (scores.likeliest == likeliest).mean() > 0.98  # near ties may fall either way

    same = quality.compare(scores, scores)
    assert same["perplexity"] == pytest.approx(np.exp(-logprobs.mean()), rel=1e-3)
    assert (same["perplexity_ratio"], same["logprob_change"], same["same_likeliest"]) == (1, 0, 1)
    by_turns = np.float32([0, 1] * 74)
    worse = quality.compare(scores._replace(logprobs=scores.logprobs - by_turns), scores)
    assert worse["logprob_change"] == pytest.approx(-0.5)
    assert worse["logprob_change_stderr"] == pytest.approx(0.5 / 148**0.5, rel=1e-3)


def test_steps_are_timed_beside_each_other_at_every_size_and_drawn(store, tmp_path):
    file, plot = tmp_path / "points.jsonl", tmp_path / "step.svg"
    sizes = ["--rows", "1", "3", "--tokens", "1", "8", "--context", "4", "20", "--repeats=2"]
    other = ["--step", "examples.norm_probe:make_step"]
    outputs = ["--json", str(file), "--plot", str(plot)]
    done = run("bench.step", MODEL, "--store", store, *sizes, *other, *outputs)
    assert done.returncode == 0, done.stderr
    assert file.read_text() == done.stdout
    points = [json.loads(line) for line in done.stdout.splitlines()]
    measured = [(point["rows"], point["tokens"], point["context"]) for point in points]
    fitting = [(r, t, c) for r in (1, 3) for t, c in ((1, 4), (1, 20), (8, 20))]
    assert measured == fitting * 2, "8 tokens do not fit into 4"
    assert [point["step"] for point in points] == ["default"] * 6 + [other[1]] * 6
    for point in points:
        low, high = point["step_ms_range"]
        assert 0 < low <= point["step_ms"] <= high
        assert point["tokens_per_s"] == pytest.approx(
            1e3 * point["rows"] * point["tokens"] / point["step_ms"], rel=1e-2
        )
    assert done.stderr.count("ms") == 2 and "norm_probe" in done.stderr
    assert plot.read_text().count("<polyline") == 6
