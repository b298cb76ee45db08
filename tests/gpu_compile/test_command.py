"""`jaxserve compile` as a user runs it, on a model small enough to do all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.aot.result import ServerSizes
from jaxserve.aot.saved import read_manifest
from jaxserve.cli import main, make_parser, settings

TINY = Path(__file__).parent.parent / "fixtures" / "tiny" / "llama-untied"
SMALL = ("--model", str(TINY), "--max-rows", "4", "--token-budget", "4", "--max-context", "64")


def test_a_model_is_surveyed_and_its_executables_are_saved(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out, saved = tmp_path / "survey.json", tmp_path / "saved"
    flags = ["--gpu", "h200-141gb", "--kv", "int8", "--out", str(out), "--save", str(saved)]
    assert main(["compile", *SMALL, *flags]) == 0
    printed, progress = capsys.readouterr()
    assert max(map(len, printed.splitlines())) <= 100
    for text in ("decode_attention", "Nothing here was measured", "h200-141gb", "int8 cache"):
        assert text in printed
    assert "2 executables" in progress

    survey = json.loads(out.read_text())
    assert survey["fits"] is True
    assert survey["pages"] == 4 * 64 // 16 + 1
    assert survey["alias_bytes"] == survey["cache_bytes"] > 0
    assert 0 < survey["temp_bytes"] < survey["memory_bytes"]
    names = {kernel["name"] for kernel in survey["kernels"] if kernel["custom"]}
    assert names >= {"decode_attention", "prefill_attention"}
    for kernel in survey["kernels"]:
        assert kernel["registers"] > 0
        assert {"spill_bytes", "stack_bytes", "shared_bytes"} <= kernel.keys()
    prefill = survey["steps"][-1]
    assert prefill["name"].startswith("prefill")
    assert prefill["bytes_ratio"] == prefill["bytes"] / prefill["least_bytes"] > 1

    manifest = read_manifest(saved)
    assert (manifest.device_kind, manifest.num_pages) == ("NVIDIA H200", survey["pages"])
    assert (manifest.dtype, manifest.kv_dtype) == ("bfloat16", "int8")
    assert len(list(saved.glob("*.executable"))) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--attention", "flash"],
            "'flash' is not one of auto, cpu, native, reference, triton, mosaic",
        ),
        (["--attention", "mosaic"], "attention 'mosaic' is not surveyed: take 'triton'"),
        (["--max-context", "999999"], "a context of 999999 tokens is beyond the"),
        (["--model", "nobody/knows"], "Planned for without a checkpoint: llama-3.1-8b"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(capsys, flags, message):
    assert main(["compile", *SMALL, *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_without_flags_a_server_is_compiled_for_as_a_gpu_serves_it():
    flags = make_parser().parse_args(["compile", "--max-context", "4096"])
    assert settings(ServerSizes, flags) == ServerSizes(256, 1024, 4096)
