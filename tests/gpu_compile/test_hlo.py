"""Reading HLO and counting what it moves: short programs, answers worked out by hand."""

from __future__ import annotations

import pytest

from jaxserve.aot.hlo import Module, parse_hlo
from jaxserve.aot.schedule import copies, kernels_per_layer
from jaxserve.aot.traffic import Price, Work, step_work

COMPUTATIONS = """\
HloModule jit_step, is_scheduled=true

%fused_gather (param_0: bf16[1000,512], param_1: s32[4]) -> bf16[4,512] {
  %param_0 = bf16[1000,512]{1,0} parameter(0)
  %param_1 = s32[4]{0} parameter(1)
  %bitcast.1 = s32[4,1]{1,0} bitcast(%param_1)
  ROOT %gather.1 = bf16[4,512]{1,0} gather(%param_0, %bitcast.1), slice_sizes={1,512}
}

%fused_scatter (param_0: bf16[1000,512], param_1: s32[4], param_2: bf16[4,512]) -> bf16[1000,512] {
  %param_0 = bf16[1000,512]{1,0} parameter(0)
  %param_1 = s32[4]{0} parameter(1)
  %param_2 = bf16[4,512]{1,0} parameter(2)
  %bitcast.2 = s32[4,1]{1,0} bitcast(%param_1)
  ROOT %scatter.1 = bf16[1000,512]{1,0} scatter(%param_0, %bitcast.2, %param_2), to_apply=%add
}

%gemm_computation (param_0: bf16[4,512], param_1: bf16[2048,512]) -> bf16[4,2048] {
  %param_0 = bf16[4,512]{1,0} parameter(0)
  %param_1 = bf16[2048,512]{1,0} parameter(1)
  %dot.1 = f32[4,2048]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}
  ROOT %convert.1 = bf16[4,2048]{1,0} convert(%dot.1)
}

%fused_slice (param_0: bf16[4,2048]) -> bf16[4,512] {
  %param_0 = bf16[4,2048]{1,0} parameter(0)
  %multiply.1 = bf16[4,2048]{1,0} multiply(%param_0, %param_0)
  ROOT %slice.1 = bf16[4,512]{1,0} slice(%multiply.1), slice={[0:4], [512:1024]}
}

%body (p: (s32[], bf16[4,512])) -> (s32[], bf16[4,512]) {
  %p = (s32[], bf16[4,512]{1,0}) parameter(0)
  %get-tuple-element.1 = s32[] get-tuple-element(%p), index=0
  %get-tuple-element.2 = bf16[4,512]{1,0} get-tuple-element(%p), index=1
  %negate.1 = bf16[4,512]{1,0} negate(%get-tuple-element.2)
  ROOT %tuple.1 = (s32[], bf16[4,512]{1,0}) tuple(%get-tuple-element.1, %negate.1)
}

%condition (p: (s32[], bf16[4,512])) -> pred[] {
  %p = (s32[], bf16[4,512]{1,0}) parameter(0)
  ROOT %constant.1 = pred[] constant(false)
}

%keep (p: (bf16[4,512])) -> bf16[4,512] {
  %p = (bf16[4,512]{1,0}) parameter(0)
  ROOT %get-tuple-element.3 = bf16[4,512]{1,0} get-tuple-element(%p), index=0
}

%twice (p: (bf16[4,512])) -> bf16[4,512] {
  %p = (bf16[4,512]{1,0}) parameter(0)
  %get-tuple-element.4 = bf16[4,512]{1,0} get-tuple-element(%p), index=0
  ROOT %add.1 = bf16[4,512]{1,0} add(%get-tuple-element.4, %get-tuple-element.4)
}

"""

PARAMETERS = """\
  %embed.1 = bf16[1000,512]{1,0} parameter(0), metadata={op_name="params[\\'embed\\']"}
  %first.1 = bf16[2048,512]{1,0} parameter(1), metadata={op_name="params[\\'layers\\'][0][\\'o\\']"}
  %other.1 = bf16[2048,512]{1,0} parameter(2), metadata={op_name="params[\\'layers\\'][1][\\'o\\']"}
  %ids.1 = s32[4]{0} parameter(3), metadata={op_name="batch.token_ids"}
  %pages.1 = bf16[1000,512]{1,0} parameter(4), metadata={op_name="state.layers[0].k"}
  %x.1 = bf16[4,512]{1,0} parameter(5), metadata={op_name="x"}
  %flag.1 = pred[] parameter(6), metadata={op_name="flag"}
"""

KERNEL = (
    "  %attend.1 = (bf16[1000,512]{1,0}, bf16[4,512]{1,0}) custom-call(%pages.1, %x.1), "
    'custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (0, {})}, '
    'backend_config={debug = false, ir = "ML\\EFR(x", name = "decode_attention", num_stages = 1}'
)


def program(*lines: str) -> Module:
    entry = "ENTRY %main (embed.1: bf16[1000,512]) -> bf16[4,512] {\n" + PARAMETERS
    body = "\n".join(line if line.startswith("  ") else f"  {line}" for line in lines)
    return parse_hlo(COMPUTATIONS + entry + body + "\n}\n")


def work(*lines: str, **prices: Price) -> Work:
    return step_work(program(*lines), prices)


ROW = 512 * 2  # bytes


def test_a_lookup_reads_what_it_looks_up():
    found = work(
        "ROOT %f = bf16[4,512]{1,0} fusion(%embed.1, %ids.1), kind=kLoop, calls=%fused_gather"
    )
    assert found == Work(bytes=4 * ROW + 4 * 4 + 4 * ROW, kernels=1)


def test_an_update_in_place_writes_what_it_updates():
    found = work(
        "ROOT %f = bf16[1000,512]{1,0} fusion(%pages.1, %ids.1, %x.1), kind=kInput, "
        "calls=%fused_scatter"
    )
    assert found == Work(bytes=4 * 4 + 4 * ROW + 4 * ROW, kernels=1)


def test_a_product_reads_both_sides_and_writes_its_result():
    found = work(
        "ROOT %f = bf16[4,2048]{1,0} fusion(%x.1, %first.1), kind=kCustom, calls=%gemm_computation"
    )
    assert found == Work(
        bytes=4 * ROW + 2048 * ROW + 4 * 2048 * 2, flops=2 * 4 * 2048 * 512, kernels=1
    )


def test_a_product_of_cublas_counts_the_same_and_its_scratch_space_not():
    found = work(
        "ROOT %f = (bf16[4,2048]{1,0}, s8[4194304]{0}) custom-call(%x.1, %first.1), "
        'custom_call_target="__cublas$gemm"'
    )
    assert found == Work(
        bytes=4 * ROW + 2048 * ROW + 4 * 2048 * 2, flops=2 * 4 * 2048 * 512, kernels=1
    )


def test_of_a_slice_within_a_fusion_only_the_slice_is_read():
    found = work(
        "%y = bf16[4,2048]{1,0} broadcast(%x.1), dimensions={0}",
        "ROOT %f = bf16[4,512]{1,0} fusion(%y), kind=kLoop, calls=%fused_slice",
    )
    assert found == Work(bytes=(4 * ROW + 4 * 2048 * 2) + 2 * 4 * ROW, kernels=2)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (
            'backend_config={"known_trip_count":{"n":"31"}}',
            Work(bytes=31 * 2 * 4 * ROW, kernels=31),
        ),
        ("metadata={}", Work(bytes=2 * 4 * ROW, kernels=1, host_waits=1, open_loops=1)),
    ],
    ids=["turns known", "turns decided by data"],
)
def test_a_loop_counts_its_turns(known, expected):
    found = work(
        "%zero = s32[] constant(0)",
        "%t = (s32[], bf16[4,512]{1,0}) tuple(%zero, %x.1)",
        "ROOT %w = (s32[], bf16[4,512]{1,0}) while(%t), condition=%condition, body=%body, " + known,
    )
    assert found == expected


def test_of_a_conditional_the_branch_that_moves_least_counts_and_the_host_waits():
    found = work(
        "%t = (bf16[4,512]{1,0}) tuple(%x.1)",
        "ROOT %c = bf16[4,512]{1,0} conditional(%flag.1, %t, %t), true_computation=%twice, "
        "false_computation=%keep",
    )
    assert found == Work(host_waits=1)


def test_a_kernel_of_ours_counts_what_it_declares():
    assert work(KERNEL, decode_attention=Price(calls=2, bytes=600, flops=80)) == Work(300, 40, 1)


def test_a_kernel_in_mosaic_is_known_by_the_scope_that_launches_it():
    call = (
        '%a = bf16[4,512]{1,0} custom-call(%x.1), custom_call_target="mosaic_gpu_v2", '
        'metadata={op_name="jit(step)/jit(attend)/merge_decodes/mpmd_map"}, '
        'backend_config={kernel_hash = "\\22\\A0", module = "ML\\EFR"}'
    )
    assert work(call, merge_decodes=Price(calls=1, bytes=300, flops=40)) == Work(300, 40, 1)
    assert work(call).unpriced == ("merge_decodes",)


def test_a_kernel_that_declares_nothing_is_named():
    assert work(KERNEL).unpriced == ("decode_attention",)


def test_a_copy_of_a_weight_is_found_also_transposed_and_in_another_type():
    found = copies(
        program(
            "%copied = bf16[2048,512]{1,0} copy(%first.1)",
            "%turned = bf16[512,2048]{1,0} transpose(%other.1), dimensions={1,0}",
            "%widened = f32[1000,512]{1,0} convert(%embed.1)",
            "ROOT %y = bf16[4,512]{1,0} copy(%x.1)",
        )
    )
    assert [line.split()[0] for line in found] == ["copied", "turned", "widened"]


def test_what_is_updated_in_place_is_no_copy():
    module = program(
        "%f = bf16[1000,512]{1,0} fusion(%pages.1, %ids.1, %x.1), kind=kInput, "
        "calls=%fused_scatter",
        KERNEL,
    )
    assert copies(module) == []


def test_a_product_as_large_as_a_weight_is_no_copy():
    call = 'custom-call(%x.1, %first.1), custom_call_target="__cublas$lt$matmul"'
    assert copies(program(f"ROOT %y = (f32[2048,512]{{1,0}}, s8[4194304]{{0}}) {call}")) == []


def test_of_what_our_kernels_make_only_pages_are_a_copy():
    target = 'custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "decode"}'
    found = copies(
        program(
            f"%partial = f32[2048,512]{{1,0}} custom-call(%x.1), {target}",  # as large as a weight
            f"%written = bf16[1000,512]{{1,0}} custom-call(%pages.1), {target}",
        )
    )
    assert [line.split()[0] for line in found] == ["written"]


def test_kernels_of_a_layer_lie_between_the_first_readings_of_its_weights_and_of_the_next_ones():
    module = program(
        "%before = bf16[4,512]{1,0} negate(%x.1)",
        "%a = bf16[4,2048]{1,0} fusion(%before, %first.1), kind=kCustom, calls=%gemm_computation",
        "%b = bf16[4,512]{1,0} fusion(%a), kind=kLoop, calls=%fused_slice",
        "%c = bf16[4,512]{1,0} negate(%b)",
        "%bits = bf16[2048,512]{1,0} bitcast(%other.1)",
        "ROOT %d = bf16[4,2048]{1,0} fusion(%c, %bits), kind=kCustom, calls=%gemm_computation",
    )
    assert kernels_per_layer(module) == 3


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("HloModule nothing\n")
