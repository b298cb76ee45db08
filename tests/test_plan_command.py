"""`jaxserve plan`: the tables, the JSON, the chart, and mistakes in its flags."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest
from fixture_files import TINY

from jaxserve.cli import main
from jaxserve.plan import (
    Plan,
)


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(["plan", *flags])
    return (code, *capsys.readouterr())


def test_the_command_prints_the_plan_in_100_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run(capsys, "--model", "llama-3.1-8b", "--gpu", "a100-80gb")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in out  # nothing was cut short
    for text in ("16.06 GB", "128.0 KiB", "admission", "token budget", "optimistic"):
        assert text in out


def test_the_command_prints_the_textbook_in_weights_only_mode(capsys):
    code, out, _ = run(
        capsys, "--weights-only", "--context", "1000", "--kv-memory", "60.3", "--json"
    )
    plan = json.loads(out)
    assert code == 0
    assert plan["weights_only"] is True
    assert plan["weight_bytes"] == pytest.approx(16e9, rel=0.005)
    assert plan["floor_seconds"] == pytest.approx(7.8e-3, rel=0.01)
    assert plan["single_tokens_per_second"] == pytest.approx(128, rel=0.01)
    assert plan["limits"]["memory"] == 460
    prefills = {point["tokens"]: point["alone_seconds"] for point in plan["prefills"]}
    assert prefills[800] == pytest.approx(0.082, rel=0.005)
    assert prefills[4000] == pytest.approx(0.410, rel=0.005)
    last = plan["batches"][-1]
    assert last["rows"] == 460 or plan["limits"]["decode_only"] < 460
    assert any("460 sequences of 1,000 tokens" in note for note in plan["notes"])


def test_the_json_has_a_field_for_everything_a_plan_says(capsys):
    code, out, _ = run(capsys, "--json")
    plan = json.loads(out)
    assert code == 0
    assert list(plan) == [field.name for field in dataclasses.fields(Plan)]
    assert plan["promise"] == {"ttft": 0.5, "tpot": 0.033, "percentile": 95.0}
    assert plan["card"]["name"] == "a100-80gb"
    for key in ("memory", "decode_only", "admission", "ttft"):
        assert isinstance(plan["limits"][key], int)
    for point in plan["batches"]:
        assert point["without_kv_seconds"] < point["decode_seconds"] <= point["tpot_seconds"]


def test_the_plot_is_an_svg_with_all_curves_and_limits(capsys, tmp_path):
    file = tmp_path / "plan.svg"
    code, _, err = run(capsys, "--plot", str(file))
    assert (code, err) == (0, "")
    svg = ElementTree.parse(file).getroot()
    name = {"svg": "http://www.w3.org/2000/svg"}
    curves = {
        line.get("id"): [tuple(map(float, p.split(","))) for p in line.get("points").split()]
        for line in svg.findall(".//svg:polyline", name)
    }
    assert set(curves) == {"without", "decode", "tpot"}
    for places in curves.values():
        assert len(places) > 5
        assert places == sorted(places)
    # y grows downwards: with KV reads a step is never faster.
    for (_, without), (_, decode) in zip(curves["without"], curves["decode"], strict=True):
        assert decode <= without
    texts = {text.text for text in svg.findall(".//svg:text", name)}
    assert {"admission: 51", "TPOT 33 ms"} <= texts
    assert any(text.startswith("memory: 319") for text in texts)
    assert "prefers-color-scheme: dark" in svg.find("svg:style", name).text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "tpu"], "no card 'tpu': known are"),
        (["--gpu", "cpu"], "measure this machine and give --memory"),
        (["--model", "nobody/knows"], "Planned for without a checkpoint: llama-3.1-8b"),
        (["--plot", "plan.png"], "'plan.png' must end in .svg"),
        (["--plot", "/nowhere/plan.svg"], "cannot write /nowhere/plan.svg: No such file"),
        (["--prompt-p95", "9000"], "p95 9000 and max 8000 must not fall"),
        (["--weights", "float32", "--gpu", "l40s", "--memory", "30"], "choose a larger card"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(capsys, flags, message):
    code, out, err = run(capsys, *flags)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--mfu", "0"], ["--bandwidth", "-1"], ["--tpot", "soon"]])
def test_a_number_that_makes_no_sense_is_a_usage_error(capsys, flags):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *flags])
    assert stopped.value.code == 2


def test_a_local_checkpoint_is_planned_for_without_reading_weights(capsys, tmp_path):
    config = json.loads((next(TINY.rglob("config.json"))).read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    cpu = ["--gpu", "cpu", "--memory", "8", "--bandwidth", "20", "--flops", "0.1"]
    code, out, err = run(capsys, "--model", str(tmp_path), *cpu, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["weight_dtype"] == "float32"
