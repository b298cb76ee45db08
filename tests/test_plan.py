"""The planner: the textbook's figures, the limits it derives from them, and what it prints."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxserve.cards import CARDS, find_card
from jaxserve.cli import main
from jaxserve.errors import ConfigError
from jaxserve.plan import (
    PLAN_MODELS,
    Plan,
    make_plan,
    max_sequences,
    over_reservation,
    shared_prompt_saving,
    static_batch_utilisation,
)
from jaxserve.plan.chart import draw_chart
from jaxserve.roofline import ModelShape, Roofline, model_shape
from jaxserve.workload import Promise, Workload

LLAMA = PLAN_MODELS["llama-3.1-8b"]
A100 = CARDS["a100-80gb"]
TINY = Path(__file__).parent / "fixtures" / "tiny"


def shape_of(name: str, **changes: int) -> ModelShape:
    return model_shape(name, dataclasses.replace(PLAN_MODELS[name], **changes))


@pytest.fixture(scope="module")
def full() -> Roofline:
    return Roofline(shape_of("llama-3.1-8b"), A100)


@pytest.fixture(scope="module")
def textbook(full: Roofline) -> Roofline:
    """The weights-only mode, for a model of 8e9 parameters to the digit."""
    params = 8_000_000_000 - 2 * full.shape.table_params
    shape = dataclasses.replace(full.shape, layer_params=params)
    return dataclasses.replace(full, shape=shape, weights_only=True)


@pytest.fixture(scope="module")
def reference(full: Roofline) -> Plan:
    return make_plan(full, Workload(), Promise())


# The textbook's figures


def test_the_weights_are_16_gb(textbook):
    assert textbook.shape.weight_bytes == 16e9


def test_the_decode_floor_is_7_8_ms_and_one_sequence_gets_128_tokens_a_second(textbook):
    assert round(textbook.step_seconds(1) * 1e3, 1) == 7.8
    assert 1 / textbook.step_seconds(1) == pytest.approx(128, rel=0.01)


def test_the_real_parameter_count_changes_the_floor_by_less_than_a_hundredth(textbook, full):
    real = dataclasses.replace(full, weights_only=True)
    assert real.step_seconds(1) == pytest.approx(textbook.step_seconds(1), rel=0.01)


def test_a_token_takes_128_kib_of_cache_and_512_without_grouped_heads(textbook):
    assert textbook.shape.kv_bytes_per_token == 128 * 1024
    assert shape_of("llama-3.1-8b", num_kv_heads=32).kv_bytes_per_token == 512 * 1024


def test_60_gb_hold_about_460_sequences_and_about_117_without_grouped_heads():
    assert max_sequences(60e9, 128 * 1024, 1000) == pytest.approx(460, rel=0.01)
    assert max_sequences(60e9, 512 * 1024, 1000) == pytest.approx(117, rel=0.03)
    assert max_sequences(60e9, 512 * 1000, 1000) == 117  # a KiB counted as 1,000 bytes


def test_the_card_has_those_60_gb_left_beside_the_weights(reference):
    assert reference.kv_memory_bytes == pytest.approx(60e9, rel=0.02)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(800, 82), (4000, 410)])
def test_prefill_takes_two_operations_a_parameter_at_half_the_peak(textbook, tokens, milliseconds):
    assert round(textbook.prefill_seconds(tokens) * 1e3) == milliseconds


def test_a_static_batch_with_one_long_output_uses_17_percent_of_its_rows():
    assert round(static_batch_utilisation([50] * 7 + [1000]), 2) == 0.17
    assert static_batch_utilisation([30] * 4) == 1


def test_reserving_the_whole_context_wastes_97_percent():
    assert round(over_reservation(32_768, 1000), 2) == 0.97
    assert round(over_reservation(8_192, 240), 2) == 0.97


def test_sharing_a_2000_token_prompt_among_100_requests_saves_25_gb():
    assert shared_prompt_saving(128 * 1000, 2000, 100) == pytest.approx(25e9, rel=0.02)
    assert shared_prompt_saving(128 * 1024, 2000, 100) == pytest.approx(25e9, rel=0.04)


def test_kv_reads_alone_take_30_ms_where_the_weights_only_picture_has_none(textbook, full):
    reads = full.step_seconds(460, kv_tokens=460_000) - full.step_seconds(460)
    assert reads == pytest.approx(0.030, rel=0.02)
    assert textbook.step_seconds(460, kv_tokens=460_000) == textbook.step_seconds(460)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_plan_says_where_the_weights_only_picture_is_optimistic(full, weights_only):
    roofline = dataclasses.replace(full, weights_only=weights_only)
    plan = make_plan(roofline, Workload(context=1000), Promise(), kv_memory=460 * 1000 * 131_072)
    (note,) = [note for note in plan.notes if "optimistic" in note]
    assert "460 sequences of 1,000 tokens" in note
    assert "KV reads alone take 29.6 ms" in note


# The roofline


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen3-8b", 8_190_735_360),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b", 7_248_023_552),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-270m", 268_098_176),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_a_known_model_has_the_published_number_of_parameters(name, num_params):
    assert shape_of(name).num_params == num_params


def test_multi_query_attention_reads_one_head_in_thirty_two():
    many, one = (shape_of("llama-3.1-8b", num_kv_heads=heads).span(999, 1000) for heads in (32, 1))
    assert many.kv_bytes == 32 * one.kv_bytes
    assert many.attention_flops == one.attention_flops


def test_a_window_bounds_what_is_read_but_not_what_is_kept():
    windowed, plain = shape_of("mistral-7b-v0.1"), shape_of("mistral-7b")
    assert windowed.kv_bytes_per_token == plain.kv_bytes_per_token
    assert windowed.span(3999, 4000) == plain.span(3999, 4000)
    assert windowed.span(7999, 8000).kv_bytes == plain.span(4095, 4096).kv_bytes


def test_windows_count_layer_by_layer():
    shape = shape_of("gemma-3-270m")  # 15 layers see 512 tokens, 3 see everything
    assert shape.span(2047, 2048).kv_bytes == shape.kv_bytes_per_layer * (15 * 512 + 3 * 2048)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-270m", "mistral-7b-v0.1"])
def test_a_prompt_in_chunks_attends_to_as_many_pairs_as_in_one(name):
    shape = shape_of(name)
    chunks = [shape.span(start, start + 700) for start in range(0, 7000, 700)]
    whole = shape.span(0, 7000)
    assert sum(chunk.attention_flops for chunk in chunks) == whole.attention_flops


def test_pairs_of_a_window_are_those_a_mask_has():
    shape = dataclasses.replace(shape_of("smollm2-135m"), windows=(4,))
    pairs = sum(1 for query in range(3, 9) for key in range(9) if query - 4 < key <= query)
    assert shape.span(3, 9).attention_flops == 4 * 9 * 64 * pairs
    assert shape.span(3, 9).kv_bytes == 9 * shape.kv_bytes_per_token  # tokens 0 to 8


def test_a_step_only_grows_with_what_it_has_to_do(full):
    steps = [full.step_seconds(rows, 0, rows * 1000) for rows in (1, 8, 64, 77, 78, 256)]
    assert steps == sorted(steps)
    assert full.step_seconds(64, 256, 64_000) > full.step_seconds(64, 0, 64_000)
    slow = dataclasses.replace(full, overhead=0.001)
    assert slow.step_seconds(1) == pytest.approx(full.step_seconds(1) + 0.001)


def test_arithmetic_outlasts_the_weights_from_the_row_that_is_named(full):
    rows = full.compute_bound_rows
    assert full.step_seconds(rows - 1) == full.step_seconds(1)
    assert full.step_seconds(rows) > full.step_seconds(1)


def test_an_embedding_of_its_own_is_held_but_not_read():
    untied, tied = shape_of("llama-3.1-8b"), shape_of("llama-3.2-1b")
    assert untied.weight_bytes - untied.read_bytes == 2 * 128_256 * 4096
    assert tied.weight_bytes == tied.read_bytes


def test_int8_weights_halve_the_floor(full):
    shape = model_shape("x", LLAMA, weight_dtype="int8", kv_dtype="int8")
    assert shape.kv_bytes_per_token == 64 * 1024
    halved = dataclasses.replace(full, shape=shape).step_seconds(1)
    assert halved == pytest.approx(full.step_seconds(1) / 2)


# The workload


def test_lengths_are_log_normal_through_their_percentiles():
    workload = Workload(prompt_max=10**9)
    assert workload.prompt_mean == pytest.approx(1290, abs=2)  # 800 exp(sigma^2 / 2)
    assert Workload().prompt_mean < workload.prompt_mean
    assert workload.output_mean == pytest.approx(250, abs=1)


def test_lengths_that_are_all_the_same_are_their_mean():
    workload = Workload(500, 500, 500, 100, 100)
    assert (workload.prompt_mean, workload.output_mean) == (500, 100)
    assert workload.running_context == 550


# The plan


def test_the_admission_limit_is_where_tpot_is_just_kept(full, reference):
    points = {point.rows: point for point in reference.batches}
    limit = reference.limits.admission
    assert points[limit].tpot_seconds <= 0.033
    beyond = make_plan(full, Workload(), Promise(tpot=points[limit].tpot_seconds - 1e-6))
    assert beyond.limits.admission == limit - 1


def test_the_limits_of_the_reference_case_are_far_below_memory(reference):
    limits = reference.limits
    assert limits.ttft < limits.admission < limits.decode_only < limits.memory
    assert 45 <= limits.admission <= 55
    assert reference.token_budget == limits.admission + reference.chunk
    assert reference.chunk >= reference.prefill_share


def test_chunk_is_what_the_step_has_room_for(full, reference):
    rows, context = reference.limits.admission, reference.context
    decodes = full.decode_work(rows, context)
    middle = (4000 - reference.chunk) / 2
    for tokens, fits in ((reference.chunk, True), (reference.chunk + 1, False)):
        step = decodes + full.shape.span(middle, middle + tokens)
        assert (full.work_seconds(step) <= 0.033) is fits


def test_prompts_keep_up_with_outputs_at_the_admission_limit(reference):
    drawn = reference.requests_per_second * reference.workload.output_mean
    point = next(p for p in reference.batches if p.rows == reference.limits.admission)
    assert drawn == pytest.approx(point.tokens_per_second)


def test_a_prompt_at_the_ttft_limit_is_ready_in_time(full, reference):
    limit = reference.limits.ttft
    plan = make_plan(full, Workload(), Promise(), kv_memory=limit * reference.context * 131_072 + 1)
    assert plan.limits.admission == limit
    (prompt,) = [point for point in plan.prefills if point.tokens == 4000]
    assert prompt.ttft_seconds <= 0.5
    assert any("keeps TTFT" in note for note in plan.notes)


def test_decode_heavy_work_is_limited_by_memory_on_a_small_card():
    small = Roofline(shape_of("llama-3.1-8b"), CARDS["rtx-4090"])
    plan = make_plan(small, Workload(100, 200, 400, 2000, 3000), Promise(tpot=0.2))
    assert plan.limits.admission == plan.limits.memory
    assert any("Memory, not TPOT" in note for note in plan.notes)


def test_a_smaller_prefill_share_admits_more_but_serves_no_more_requests(full, reference):
    plan = make_plan(full, Workload(), Promise(), min_prefill=64)
    assert reference.limits.admission < plan.limits.admission < plan.limits.decode_only
    assert plan.requests_per_second <= reference.requests_per_second


def test_a_promise_that_cannot_be_kept_is_a_plan_that_says_so(full):
    plan = make_plan(full, Workload(), Promise(tpot=0.005))
    assert plan.limits.admission == 0
    assert plan.requests_per_second == 0
    assert plan.notes[0].startswith("The promise cannot be kept: a step for one sequence")
    assert "null" in plan.to_json()
    ElementTree.fromstring(draw_chart(plan))


def test_a_cache_too_small_for_one_sequence_is_a_plan_that_says_so(full):
    plan = make_plan(full, Workload(), Promise(), kv_memory=1e6)
    assert plan.limits.memory == 0
    assert "cache holds no sequence" in plan.notes[0]


def test_requests_longer_than_the_model_takes_are_noted():
    plan = make_plan(Roofline(shape_of("smollm2-135m"), A100), Workload(), Promise())
    assert any("need 8,600 tokens; the model was made for 8,192" in n for n in plan.notes)


@pytest.mark.parametrize("name", PLAN_MODELS)
@pytest.mark.parametrize("card", CARDS)
def test_every_known_model_can_be_planned_on_every_card_it_fits(name, card):
    plan = make_plan(Roofline(shape_of(name), CARDS[card]), Workload(), Promise())
    assert 1 <= plan.limits.admission <= plan.limits.memory
    assert len(plan.batches) < 40
    json.loads(plan.to_json())
    ElementTree.fromstring(draw_chart(plan))


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "v100"}, "no card 'v100': known are a100-80gb, a100-40gb, .* and cpu"),
        ({"name": "cpu", "memory": 1e9}, "give --memory .*, --bandwidth .* and --flops"),
    ],
)
def test_a_card_nobody_knows_the_rates_of_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        find_card(**settings)


def test_measured_rates_replace_published_ones():
    card = find_card("a100-80gb", bandwidth=1.7e12)
    assert (card.bandwidth, card.bf16_flops) == (1.7e12, A100.bf16_flops)
    cpu = find_card("cpu", memory=16e9, bandwidth=20e9, flops=1e11)
    assert cpu.flops("float32") == cpu.flops("int8") == 1e11


def test_weights_that_do_not_fit_are_refused_with_both_sizes():
    shape = model_shape("big", LLAMA, weight_dtype="float32")
    with pytest.raises(ConfigError, match=r"32\.1 GB of weights .* 90% of the 25\.8 GB of rtx"):
        make_plan(Roofline(shape, CARDS["rtx-4090"]), Workload(), Promise())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(prompt_p95=100), "p50 800, p95 100 and max 8000 must not fall"),
        (lambda: Workload(output_p95=100), "p50 200 and p95 100 must not fall"),
        (lambda: Promise(ttft=0.0), "more than 0 ms"),
    ],
)
def test_a_workload_or_promise_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# The command


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
    assert plan["promise"] == {"ttft": 0.5, "tpot": 0.033}
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
