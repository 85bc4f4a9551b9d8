"""Compile every kernel for Hopper, without a GPU, with the blocks it is launched with there; print JSON.

Run in a process of its own without TRITON_INTERPRET: what triton decorates is either compiled or interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from automoe.model import rope_kernels
from automoe.moe.kernels import experts, products, scaled
from automoe.optim import kernels as adamw
from automoe.quantise import kernels as encoding

HEIGHT = 128
POINTERS = {
    **dict.fromkeys(
        "x w_gate_up b_gate_up pre act a w bias out grad_out w_down grad_pre left right rows".split(), "*bf16"
    ),
    **dict.fromkeys("kv k_rope k grad_k grad_v grad_kv grad_k_rope".split(), "*bf16"),
    **dict.fromkeys("probs grad_probs cos sin".split(), "*fp32"),
    **dict.fromkeys("gather_idx order first steps".split(), "*i64"),
    **dict.fromkeys("values grads".split(), "*bf16"),
    **dict.fromkeys("firsts seconds rates second_scales".split(), "*fp32"),
    **dict.fromkeys("tile_expert tile_row offsets".split(), "*i32"),
    **dict.fromkeys("alpha limit largest beta1 beta1_rest beta2 beta2_rest eps kept".split(), "fp32"),
    **dict.fromkeys("key first_index outer_stride middle_stride".split(), "i64"),
    **dict(scales="*fp32", codes="*u8"),
}
# Of kernels with 8-bit operands, where a name means another type.
SCALED = dict.fromkeys("a w b".split(), "*fp8e4nv") | dict.fromkeys(
    "a_scales w_scales b_scales".split(), "*fp32"
)
SIZES = {
    "hidden",
    "width",
    "K",
    "M",
    "N",
    "R",
    "num_cols",
    "stride_row",
    "stride_w_k",
    "stride_w_n",
}  # multiples of 16 in every model
SIZES |= {prefix + "stride_" + axis for prefix in ("", "rope_", "k_", "v_") for axis in "bsn"}


def kernels():
    """(name, kernel, values of its constants, blocks)."""
    row = dict(PRECISION="tf32", BLOCK_M=HEIGHT)
    for kind, flags in (("swiglu", False), ("biased", True)):
        up = row | dict(BIASED=flags, CLAMPED=flags, BLOCK_N=experts._UP.columns, BLOCK_K=experts._UP.summed)
        yield f"up {kind}", products.gather_up_activate, up, experts._UP
        back = row | dict(CLAMPED=flags, BLOCK_N=experts._BACK.columns, BLOCK_K=experts._BACK.summed)
        yield f"back {kind}", products.grad_down_activate, back, experts._BACK
    one = row | dict(BLOCK_N=experts._ONE.columns, BLOCK_K=experts._ONE.summed, BIASED=False)
    yield "down", products.rows_times_weights, one | dict(stride_w_k=1), experts._ONE
    yield "down biased", products.rows_times_weights, one | dict(stride_w_k=1, BIASED=True), experts._ONE
    yield "grad of rows", products.rows_times_weights, one | dict(stride_w_n=1), experts._ONE
    for gathered in (False, True):
        blocks = experts._WEIGHT
        constants = dict(GATHERED=gathered, PRECISION="tf32", BLOCK_R=blocks.summed)
        constants |= dict(BLOCK_M=blocks.columns, BLOCK_N=blocks.columns)
        yield f"grad of weights, gathered={gathered}", products.grad_weights, constants, blocks
    constants = dict(PRECISION="tf32", BLOCK_H=experts._SUM_COLUMNS)
    yield "sum", products.sum_rows_of_token, constants, experts._Blocks(0, 0, 4, 1)
    for kind, block, height in (("lines", False, encoding._HEIGHT), ("blocks", True, 128)):
        constants = dict(FIND=True, BLOCK=block, HEIGHT=height) | encoding.FORMATS[torch.float8_e4m3fn]
        yield f"quantise {kind}", encoding.encode_tiles, constants, experts._Blocks(0, 0, encoding.WARPS, 1)
    blocks = experts._Blocks(128, 128, scaled.WARPS, scaled.STAGES)
    yield "8 bits, rows", scaled.rows_by_blocks, dict(PRECISION="tf32", BLOCK_M=HEIGHT), blocks
    yield "8 bits, weights", scaled.weights_by_lines, dict(PRECISION="tf32"), blocks
    heads = experts._Blocks(0, 0, rope_kernels._NUM_WARPS, 1)
    shared = dict(HEADS=rope_kernels._HEADS)
    turn = shared | dict(DIM=192, START=128, HALF=32, BLOCK_HALF=32, BLOCK_KEPT=128, INTERPRETED=False)
    for back in (False, True):
        order = dict(FROM_PAIRS=not back, TO_PAIRS=back, BACK=back)
        yield f"rope turn, back={back}", rope_kernels.turn_heads, turn | order, heads
    join = shared | dict(KEEP=128, TURN=64, BLOCK_KEEP=128, BLOCK_TURN=64)
    yield "rope join", rope_kernels.join_heads, join, heads
    part = join | dict(VALUES=128, BLOCK_VALUES=128, INTERPRETED=False)
    yield "rope part", rope_kernels.part_heads, part, heads
    blocks = experts._Blocks(0, 0, adamw.WARPS, 1)
    yield "adamw, dense", adamw.update_part, dict(ROWS=1, COLS=adamw.BLOCK), blocks
    yield "adamw, cut", adamw.update_part, dict(ROWS=4, COLS=adamw.BLOCK // 4), blocks


def compiled(kernel, constants, blocks) -> dict[str, object]:
    """Shared memory in bytes, registers and spilled bytes of a thread, whether matrix units are used, and whether every
    operation is rounded by itself, to the nearest number, down to the smallest."""
    names = kernel.arg_names
    types = POINTERS | (SCALED if "a_scales" in names else {})
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [
        (place,)
        for place, name in enumerate(names)
        if name not in constants and (name in SIZES or signature[name].startswith("*"))
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    options = dict(num_warps=blocks.num_warps, num_stages=blocks.num_stages)
    if kernel is adamw.update_part:
        options["enable_fp_fusion"] = False
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    [tool] = Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    return dict(
        shared=made.metadata.shared,
        registers=int(registers),
        spilled=int(stack),
        matrix_units="wgmma" in made.asm["ptx"],
        exact=not re.search(r"fma\.|\.ftz|\.approx", made.asm["ptx"]),
    )


if __name__ == "__main__":
    print(json.dumps({name: compiled(*rest) for name, *rest in kernels()}))
