"""Steps on a GPU that computes nothing: whatever mixes devices or asks an operator for what it cannot do is found here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NORM = {"_norm_rows", "_norm_grads"}  # kernels of every step on CUDA
SHARED_MEMORY = 227 * 1024  # bytes that one program may have on Hopper
TIMEOUT_S = 1800  # for a process that hangs: the longest list takes tens of seconds of CPU time


def traced(*names: str) -> dict[str, Any]:
    """What ``fake_cuda_steps.py`` says, whose kernels are compiled and not interpreted."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}  # a CUDA build asks for cuDNN's version, and there is no GPU to ask
    script = Path(__file__).with_name("fake_cuda_steps.py")
    command = [sys.executable, script, *names]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def check(rank: dict[str, Any], dtypes: tuple[str, ...] = ("float32",), sizes: int = 0) -> None:
    """``sizes``: numbers of rows that the host reads, besides the step's statistics and its norm."""
    assert rank["without_gradient"] == [] and rank["elsewhere"] == []
    assert rank["num_reads"] == 2 + sizes
    assert rank["dtypes"] == [f"torch.{dtype}" for dtype in dtypes]
    assert set(rank["kernels"].values()) <= {0}, f"registers spill: {rank['kernels']}"
    assert rank["shared"] <= SHARED_MEMORY


@pytest.mark.exhaustive
def test_a_step_on_a_gpu_and_what_would_fail_there() -> None:
    found = traced("dsv3", "fused", "faults")
    check(found["dsv3"])
    check(found["fused"], sizes=1)  # where experts' rows end, copied in the forward pass
    assert set(found["dsv3"]["kernels"]) == NORM
    faults = found["faults"]
    assert "found at least two devices, cuda:0 and cpu" in faults["a tensor made on the CPU"]
    assert faults["a pointer to the CPU"].startswith("ValueError: a kernel was given a pointer to memory of the cpu")
    assert "ValueError: copy_one was launched over a grid of (0,)" in faults["an empty grid"]
    assert "must be long, int, byte or bool tensors" in faults["no index of floats"]


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    command = [sys.executable, "-c", "import tests.support.cuda_device"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 1
    assert "BackendError: tests.support.cuda_device compiles a few C++ functions with g++" in ended.stderr


@pytest.mark.exhaustive
def test_steps_with_triton_8_bits_and_folded_experts_and_that_their_kernels_fit() -> None:
    found = traced("triton", "triton_float32", "gpt_oss", "blockwise", "etp_hsdp")
    kernels = {name: set(rank["kernels"]) for name, rank in found.items()}
    experts = {"gather_up_activate", "rows_times_weights", "grad_down_activate", "grad_weights"}
    experts |= {"sum_rows_of_token", "turn_heads"} | NORM
    mla = {"join_heads", "part_heads"}
    check(found["triton"], dtypes=("bfloat16", "float32"))  # float32: the router's
    assert kernels["triton"] == experts | mla | {"update_part"}
    check(found["triton_float32"])
    assert kernels["triton_float32"] == experts | mla
    check(found["gpt_oss"])
    assert kernels["gpt_oss"] == experts
    check(found["blockwise"])
    assert kernels["blockwise"] == {"encode_tiles", "rows_by_blocks", "weights_by_lines", "_squares"} | NORM
    # Of two MoE layers: rows sent to and received from two ranks of ep, and received from two of etp.
    check(found["etp_hsdp"], sizes=2 * (4 + 2))


@pytest.mark.exhaustive
def test_steps_that_exchange_heads_wait_for_no_more() -> None:
    """One MoE layer and four: in two micro-batches rows sent to and received from two ranks of ep."""
    found = traced("ulysses_cp2", "qwen3_next_cp2")
    check(found["ulysses_cp2"], sizes=2 * 4)
    check(found["qwen3_next_cp2"], sizes=4 * 2 * 4)
    assert {"join_heads", "part_heads", "turn_heads"} < set(found["ulysses_cp2"]["kernels"])


@pytest.mark.exhaustive
def test_steps_without_fsdp_with_recompute_dropping_delta_rule_and_delayed_scales() -> None:
    found = traced("without_fsdp", "recomputed", "dropping_cp2", "qwen3_next", "delayed_tp2")
    check(found["without_fsdp"], dtypes=("bfloat16", "float32"))
    for name in ("recomputed", "qwen3_next"):
        check(found[name])
    # Of two micro-batches of a MoE layer: rows sent to and received from two ranks of ep.
    check(found["dropping_cp2"], sizes=2 * 4)
    check(found["delayed_tp2"], sizes=2 * 4 + 1)  # and what went beyond the scales, once a step
    kernels = {name: set(rank["kernels"]) for name, rank in found.items()}
    launching = {"without_fsdp": {"update_part"}, "delayed_tp2": {"encode_tiles"}}
    assert kernels == {name: NORM | launching.get(name, set()) for name in found}
