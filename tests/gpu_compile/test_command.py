"""`jaxserve compile` as a user runs it, on a model small enough to do all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.aot.result import ServerSizes
from jaxserve.aot.saved import read_manifest
from jaxserve.aot.target import find_target
from jaxserve.cli import main, make_parser
from jaxserve.flags.settings import config_of
from pallas_kernels.mosaic.support import OFFERED

TINY = Path(__file__).parent.parent / "fixtures" / "tiny"
SIZES = ("--max-rows", "4", "--token-budget", "4", "--max-context", "64")
SMALL = ("--model", str(TINY / "llama-untied"), *SIZES)
MOSAIC = ("--model", str(TINY / "qwen3-qknorm"), *SIZES, "--attention", "mosaic")


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


def test_the_kernels_for_hopper_are_surveyed_as_their_own_compiler_assembles_them(tmp_path, capsys):
    out, saved = tmp_path / "survey.json", tmp_path / "saved"
    flags = ["--gpu", "h100-80gb", "--out", str(out), "--save", str(saved)]
    if not OFFERED:
        assert main(["compile", *MOSAIC, *flags]) == 1
        assert "it needs jax 0.11 or later, this is 0.10" in capsys.readouterr().err
        return
    assert main(["compile", *MOSAIC, *flags]) == 0
    assert "attention mosaic" in capsys.readouterr().out
    survey = json.loads(out.read_text())
    kernels = {kernel["name"]: kernel for kernel in survey["kernels"] if kernel["custom"]}
    assert kernels.keys() >= {"decode_attention", "prefill_attention", "merge_decodes"}
    for kernel in kernels.values():
        assert (kernel["spill_bytes"], kernel["stack_bytes"]) == (0, 0)
        assert 0 < kernel["registers"] <= 255
    for name in ("decode_attention", "prefill_attention"):
        assert kernels[name]["tensor_core"]
        assert 32 << 10 < kernels[name]["shared_bytes"] <= find_target("h100-80gb").shared_bytes
    assert survey["alias_bytes"] == survey["cache_bytes"] > 0
    for step in survey["steps"]:
        assert step["copies"] == []
    assert read_manifest(saved).attention == "mosaic"
    assert len(list(saved.glob("*.executable"))) == 2

    # The process has assembled all of these kernels: what it was told of them still stands.
    again = tmp_path / "again.json"
    assert main(["compile", *MOSAIC, "--gpu", "h100-80gb", "--out", str(again)]) == 0
    assert json.loads(again.read_text())["kernels"] == survey["kernels"]


def test_an_int8_cache_is_refused_where_mosaic_attends(capsys):
    assert main(["compile", *MOSAIC, "--gpu", "h200-141gb", "--kv", "int8"]) == 1
    told = "the cache is int8: it does bfloat16" if OFFERED else "it needs jax 0.11 or later"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--attention", "flash"],
            "'flash' is not one of auto, cpu, native, reference, triton, mosaic",
        ),
        (
            ["--attention", "mosaic", "--gpu", "a100-80gb"],
            "'mosaic': it needs a GPU of compute capability 9.0, a100-80gb is sm_80; 'triton' is",
        ),
        (
            ["--attention", "mosaic", "--gpu", "h100-80gb"],
            "'mosaic': head_dim 8: it does multiples of 16"
            if OFFERED
            else "'mosaic': it needs jax 0.11 or later, this is 0.10",
        ),
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
    assert config_of(ServerSizes, flags) == ServerSizes(256, 1024, 4096)
