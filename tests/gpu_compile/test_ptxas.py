"""Reading what ptxas and XLA say of kernels, from short samples of both."""

from __future__ import annotations

import pytest

from jaxserve.aot.kernels import AssemblerError, Kernel, parse_launches, parse_ptxas

SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_attention' for 'sm_80'
ptxas info    : Function properties for decode_attention
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 424 bytes cmem[0]
ptxas info    : Compile time = 11.292 ms
ptxas info    : Compiling entry function 'loop_add_fusion_2' for 'sm_80'
ptxas info    : Function properties for loop_add_fusion_2
    40 bytes stack frame, 32 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, \
2048 bytes smem, 400 bytes cmem[0], 8 bytes cmem[2]
"""

LAUNCHED = """\
000: kCommandBuffer [source       | next=010 (1)]
    001: kCustomKernel [source       | next=002 (1)] decode_attention grid: [8, 54, 1] \
threads: [128, 1, 1]  shared_memory: 39168 bytes
    002: kCopy         [prev=001 (1) | sink        ] kCopy
    003: kCustomKernel [prev=002 (1) | next=024 (2)] gemm_fusion_dot_12 grid: [12288, 1, 1] \
threads: [64, 1, 1]  shared_memory: 6144 bytes
"""


def test_every_kernel_is_read_with_its_registers_spills_stack_and_shared_memory():
    assert parse_ptxas(SAID) == [
        Kernel("decode_attention", 128, spill_bytes=0, stack_bytes=0, shared_bytes=0),
        Kernel("loop_add_fusion_2", 255, spill_bytes=32, stack_bytes=40, shared_bytes=2048),
    ]


def test_a_file_of_constants_has_no_kernel():
    assert parse_ptxas("ptxas info    : 24 bytes gmem\n") == []


def test_a_kernel_without_its_figures_is_an_error():
    cut = SAID[: SAID.index("ptxas info    : Used 128")]
    with pytest.raises(AssemblerError, match="nothing of the registers of decode_attention"):
        parse_ptxas(cut)


def test_shared_memory_asked_for_at_launch_is_read_from_the_thunks():
    assert parse_launches(LAUNCHED) == {"decode_attention": 39168, "gemm_fusion_dot_12": 6144}
