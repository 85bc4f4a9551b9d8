"""Compile every kernel for Hopper, without a GPU, with the blocks it is launched with there; print JSON.

``--everything``: also with those that ``benchmarks/tune_kernels.py`` would time, at all heights of tiles, in float16;
minutes.

Run in a process of its own without TRITON_INTERPRET: what triton decorates is either compiled or interpreted.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from automoe.kernels import fp8, launches, products
from automoe.kernels import rope as rope_kernels
from automoe.kernels import stochastic_adamw as adamw
from automoe.kernels.tiling import HOPPER, Blocks, blocks_of
from benchmarks.measuring import candidates
from tests.support.gpu import resource_usage

HEIGHT = 128
POINTERS = {
    **dict.fromkeys(
        "x gate_up_proj gate_up_proj_bias pre act a w bias out grad_out down_proj grad_pre left right rows".split(),
        "*bf16",
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
FLOAT32 = {name: "*fp32" for name, kind in POINTERS.items() if kind == "*bf16"}
# Of kernels with 8-bit operands, where a name means another type.
SCALED = dict.fromkeys("a w b".split(), "*fp8e4nv") | dict.fromkeys("a_scales w_scales b_scales".split(), "*fp32")
SIZES = {"hidden", "width", "K", "M", "N", "R", "num_cols", "stride_row"}  # multiples of 16 in every model
SIZES |= {prefix + "stride_" + axis for prefix in ("", "rope_", "k_", "v_") for axis in "bsn"}


def expert_kernels(product: str, blocks: Blocks, height: int, step: int, precision: str = "tf32"):
    """(variant, kernel, values of its constants, types of its descriptors) of one of the experts' products."""
    row = dict(PRECISION=precision, STEP=step, TMA=blocks.tma)
    row |= dict(BLOCK_M=height, BLOCK_N=blocks.columns, BLOCK_K=blocks.summed)

    def described(**boxes: tuple[int, ...]) -> dict[str, str]:
        return {name: f"tensordesc<bf16{list(box)}>" for name, box in boxes.items() if blocks.tma}

    rows, n, k = (height, blocks.summed), blocks.columns, blocks.summed
    if product == "up":
        for kind, flag in (("", False), (" biased", True)):
            constants = row | dict(CLAMPED=flag) | ({} if flag else dict(gate_up_proj_bias=None))
            yield kind, products.gather_up_activate, constants, described(gate_up_proj=(2, n, k))
    elif product == "back":
        for kind, flag in (("", False), (" clamped", True)):
            constants = row | dict(CLAMPED=flag, COLUMNS_AT_ONCE=blocks.columns_at_once)
            yield kind, products.grad_down_activate, constants, described(grad_out=rows, down_proj=(1, k, n))
    elif product == "down":
        for kind, flag in (("", False), (" biased", True)):
            constants = row | dict(BY_COLUMNS=True) | ({} if flag else dict(bias=None, probs=None))
            yield kind, products.rows_times_weights, constants, described(a=rows, w=(1, n, k))
    elif product == "grad_rows":
        constants = row | dict(BY_COLUMNS=False, bias=None, probs=None)
        yield "", products.rows_times_weights, constants, described(a=rows, w=(1, k, n))
    else:
        constants = dict(BLOCK_M=blocks.rows, BLOCK_N=blocks.columns, BLOCK_R=blocks.summed)
        constants |= dict(PRECISION=precision, STEP=step)
        constants |= {} if product.endswith("gathered") else dict(gather_idx=None)
        yield "", products.grad_weights, constants, {}


def kernels(everything: bool):
    """(name, kernel, values of its constants, blocks, types by name where they are not the usual ones)."""
    small = blocks_of("", torch.float32, aligned=True)
    for product, chosen in HOPPER.items():
        heights = (16, 32, 64, 128) if everything else (16, 128)
        cases = [(f"{height} rows", height, chosen, 8) for height in heights]
        cases += [("rows that begin anywhere", 128, small, 1)]
        if everything:
            cases += [(str(blocks), 128, blocks, 8) for blocks in candidates(product)[1:]]
        for name, height, blocks, step in cases:
            if product.startswith("grad_weights") and height != 128:
                continue
            for kind, kernel, constants, types in expert_kernels(product, blocks, height, step):
                yield f"{product}{kind}, {name}", kernel, constants, blocks, types
                if everything and blocks == chosen:
                    half = {of: kind.replace("bf16", "fp16") for of, kind in (POINTERS | types).items()}
                    yield f"{product}{kind}, {name}, float16", kernel, constants, blocks, half
        for kind, kernel, constants, _ in expert_kernels(product, small, 128, 4, "ieee"):
            yield f"{product}{kind}, float32", kernel, constants, small, FLOAT32
    constants = dict(PRECISION="tf32", BLOCK_H=launches._SUM_COLUMNS)
    yield "sum", products.sum_rows_of_token, constants, Blocks(0, num_warps=4, num_stages=1)
    for kind, block, height in (("lines", False, fp8._HEIGHT), ("blocks", True, 128)):
        constants = dict(FIND=True, BLOCK=block, HEIGHT=height) | fp8.FORMATS[torch.float8_e4m3fn]
        yield (f"quantize {kind}", fp8.encode_tiles, constants, Blocks(0, num_warps=fp8.WARPS, num_stages=1))
    blocks = Blocks(128, num_warps=fp8.WARPS, num_stages=fp8.STAGES)
    yield "8 bits, rows", fp8.rows_by_blocks, dict(PRECISION="tf32", BLOCK_M=HEIGHT), blocks
    yield "8 bits, weights", fp8.weights_by_lines, dict(PRECISION="tf32"), blocks
    heads = Blocks(0, num_warps=rope_kernels._NUM_WARPS, num_stages=1)
    shared = dict(HEADS=rope_kernels._HEADS)
    turn = shared | dict(DIM=192, START=128, HALF=32, BLOCK_HALF=32, BLOCK_KEPT=128, PRECISION="tf32")
    for back in (False, True):
        order = dict(FROM_PAIRS=not back, TO_PAIRS=back, BACK=back)
        yield f"rope turn, back={back}", rope_kernels.turn_heads, turn | order, heads
    join = shared | dict(KEEP=128, TURN=64, BLOCK_KEEP=128, BLOCK_TURN=64)
    yield "rope join", rope_kernels.join_heads, join, heads
    part = join | dict(VALUES=128, BLOCK_VALUES=128, PRECISION="tf32")
    yield "rope part", rope_kernels.part_heads, part, heads
    blocks = Blocks(0, num_warps=adamw.WARPS, num_stages=1)
    yield "adamw, dense", adamw.update_part, dict(ROWS=1, COLS=adamw.BLOCK), blocks
    narrow = dict.fromkeys(("firsts", "seconds"), "*bf16")
    yield "adamw, cut", adamw.update_part, dict(ROWS=4, COLS=adamw.BLOCK // 4), blocks, narrow


def compiled(kernel, constants, blocks, types=None) -> dict[str, object]:
    """Shared memory in bytes, registers and spilled bytes of a thread, whether matrix units are used, and whether every
    operation is rounded by itself, to the nearest number, down to the smallest."""
    names = kernel.arg_names
    types = POINTERS | (SCALED if "a_scales" in names else {}) | (types or {})
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    sizes = set() if "STEP" in constants else SIZES  # kernels with steps are told what sizes are multiples of
    aligned = [
        (place,)
        for place, name in enumerate(names)
        if name not in constants and (name in sizes or signature[name].startswith("*"))
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
    registers, spilled = resource_usage(made)
    return dict(
        shared=made.metadata.shared,
        registers=registers,
        spilled=spilled,
        matrix_units="wgmma" in made.asm["ptx"],
        exact=not re.search(r"fma\.|\.ftz|\.approx", made.asm["ptx"]),
    )


if __name__ == "__main__":
    print(json.dumps({name: compiled(*rest) for name, *rest in kernels("--everything" in sys.argv)}))
