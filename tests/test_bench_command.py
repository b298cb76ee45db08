"""`jaxserve bench`: the load is the one asked for, the figures are sums, refusals are lines."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from xml.etree import ElementTree

import jax
import pytest
from engines import TINY
from toy_server import running_server

from jaxserve.bench.figures import Answer, summarise
from jaxserve.bench.load import make_load, read_trace
from jaxserve.cli import main
from jaxserve.errors import ConfigError

SIZES = {"prompts": None, "prompt_tokens": 5, "output_tokens": 7}


@pytest.fixture(scope="module")
def server():
    with running_server("--step-seconds", "0.002", "--max-rows", "4") as server:
        yield server


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """What one benchmark compiles the other finds."""
    yield tmp_path_factory.mktemp("store")
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def bench(server, tmp_path, capsys):
    def run(kind: str, *flags: str) -> tuple[int, list[dict], str, str]:
        file = tmp_path / "points.jsonl"
        url = f"http://127.0.0.1:{server.port}"
        sizes = ["--prompt-tokens=4", "--output-tokens=12", "--requests=20", "--json", str(file)]
        code = main(["bench", kind, "--url", url, *sizes, *flags])
        said = capsys.readouterr()
        points = [json.loads(line) for line in file.read_text().splitlines()] if not code else []
        return code, points, said.out, said.err

    return run


def answer(sent, *pieces, tokens, prompt=10, error=None):
    return Answer(sent, pieces[-1] if pieces else sent, pieces, prompt, tokens, error)


def test_figures_are_what_can_be_worked_out_by_hand():
    answers = [
        answer(0.0, 0.1, 0.2, 0.4, tokens=4),
        answer(1.0, 1.3, 1.5, tokens=3),
        answer(1.0, tokens=0, error="refused"),
    ]
    figures = summarise(answers, 2.0, {"ttft": 200, "tpot": 150})
    assert (figures["requests"], figures["failed"]) == (3, 1)
    assert figures["requests_per_s"] == 1.0 and figures["output_tokens_per_s"] == 3.5
    assert figures["total_tokens_per_s"] == 13.5
    assert figures["ttft_mean_ms"] == pytest.approx(200)
    assert figures["tpot_mean_ms"] == pytest.approx(100)  # 300 / 3 and 200 / 2
    assert figures["itl_p50_ms"] == pytest.approx(200)
    assert figures["e2e_p99_ms"] == pytest.approx(499, abs=1)
    assert figures["goodput_per_s"] == 0.5 and figures["good_share"] == 0.3333


def test_arrivals_are_a_poisson_process_and_the_same_for_the_same_seed():
    asks = make_load(4000, rate=20.0, seed=3, **SIZES)
    gaps = [after.at - before.at for before, after in pairwise(asks)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert asks == make_load(4000, rate=20.0, seed=3, **SIZES)
    assert len({ask.prompt for ask in asks}) == len(asks)
    assert {ask.at for ask in make_load(5, rate=None, seed=3, **SIZES)} == {0.0}


def test_prompts_and_traces_come_from_files(tmp_path):
    texts, bodies, trace = (tmp_path / name for name in ("a.txt", "b.jsonl", "t.jsonl"))
    texts.write_text("one\n\ntwo\n")
    bodies.write_text('{"prompt": "three"}\n')
    sizes = SIZES | {"rate": None, "seed": 0}
    assert [a.prompt for a in make_load(3, **sizes | {"prompts": texts})] == ["one", "two", "one"]
    assert make_load(1, **sizes | {"prompts": bodies})[0].prompt == "three"
    trace.write_text(
        '{"at": 7, "prompt_tokens": 3, "output_tokens": 5}\n'
        '{"at": 4, "prompt_tokens": 2, "output_tokens": 6}\n'
    )
    first, second = read_trace(trace, 0)
    assert (first.at, first.max_tokens, len(first.prompt.split())) == (0.0, 6, 2)
    assert (second.at, second.max_tokens, len(second.prompt.split())) == (3.0, 5, 3)
    for file, text in ((texts, ""), (bodies, '{"text": 1}'), (bodies, "[")):
        file.write_text(text)
        with pytest.raises(ConfigError):
            make_load(1, **sizes | {"prompts": file})
    trace.write_text("{}")
    with pytest.raises(ConfigError, match="trace"):
        read_trace(trace, 0)


def test_a_load_is_measured_by_what_the_server_counts(server, bench):
    before = server.metric("jaxserve_output_tokens_total")
    code, (point,), out, _ = bench("serve", "--max-concurrency", "3", "--ignore-eos")
    assert code == 0
    assert server.becomes(lambda: server.metric("jaxserve_output_tokens_total") == before + 20 * 12)
    assert (point["requests"], point["failed"]) == (20, 0)
    assert point["output_tokens_mean"] == 12
    assert 0 < point["ttft_p50_ms"] <= point["ttft_p99_ms"] <= point["e2e_p99_ms"]
    assert "TTFT" in out and "20 requests, 0 failed" in out


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_sweep_has_a_point_and_a_place_in_the_chart_for_each_rate(bench, tmp_path, endpoint):
    chart = tmp_path / "sweep.svg"
    flags = ["--request-rates", "100,400", "--goodput", "ttft:5000,e2e:0.001"]
    code, points, _, _ = bench("sweep", *flags, "--plot", str(chart), "--endpoint", endpoint)
    assert code == 0 and [point["request_rate"] for point in points] == [100, 400]
    assert all(point["goodput_per_s"] == 0 for point in points), "nothing is that quick"
    curves = ElementTree.parse(chart).findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [curve.get("id") for curve in curves] == ["answered", "good"]
    assert all(len(curve.get("points").split()) == 2 for curve in curves)


def test_what_failed_is_counted_and_said(bench, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"at": 0, "prompt_tokens": size, "output_tokens": 5} for size in (2, 90)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, out, said = bench("serve", "--trace", str(trace))
    assert code == 1 and "2 requests, 1 failed" in out
    assert "1 of 2 requests failed, the first with: 400: this model's context holds 64" in said


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("serve", ["--model", "other"], "20 of 20 requests failed"),
        ("serve", ["--trace", "/no/such/file"], "/no/such/file"),
        ("serve", ["--prompts", "/no/such/file"], "/no/such/file"),
        ("serve", ["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        ("sweep", ["--request-rates", "100", "--plot", "chart.png"], "must end in .svg"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(bench, kind, flags, words):
    code, _, _, said = bench(kind, *flags)
    assert code == 1 and words in said.splitlines()[-1] and "Traceback" not in said


@pytest.mark.parametrize(
    "flags", [["--goodput", "speed:3"], ["--goodput", "ttft:x"], ["--request-rate", "0"]]
)
def test_limits_that_cannot_be_meant_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--url", "http://127.0.0.1:9", *flags])
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_the_engine_alone_is_measured_in_this_process(kind, store, tmp_path, capsys):
    file = tmp_path / "points.jsonl"
    engine = ["--max-rows=2", "--token-budget=4", "--max-context=32", "--store", str(store)]
    work = ["--prompt-tokens=6", "--output-tokens=10", "--json", str(file)]
    more = ["--batch-size=2", "--repeats=2"] if kind == "latency" else ["--requests=5"]
    code = main(["bench", kind, str(TINY / "llama-untied"), *engine, *work, *more])
    point = json.loads(file.read_text())
    assert code == 0 and point["output_tokens_per_s"] > 0
    assert "cpu, float32" in point["engine"] and "output_tokens_per_s" in capsys.readouterr().out
