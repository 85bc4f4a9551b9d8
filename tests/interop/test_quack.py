"""The contract between the adapter and quack-kernels' published signatures, and the mathematics that it composes.

quack-kernels needs a GPU and has never run here. What stands in for it takes the arguments that 0.3.11 has,
refuses others and layouts that its asserts refuse, and computes in torch what its sources say each call means.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, MoEConfig
from automoe.errors import BackendError
from automoe.interop import quack
from automoe.launch.hardware import check_backends
from automoe.moe.activation import ClampedSwiGLU
from automoe.moe.experts import loop_experts
from tests.support.experts import flat

# quack-kernels 0.3.11, quack/gemm_interface.py; gemm_gated is gemm_act, gemm_dgated is gemm_dact.
SIGNATURES = {
    "gemm": "A, B, out=None, bias=None, alpha=1.0, out_dtype=None, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, "
    "batch_idx_permute=None, dynamic_scheduler=False, tuned=True, rounding_mode=0, sr_seed=0, concat_layout=None",
    "gemm_gated": "A, B, C=None, bias=None, activation=None, preact_out=None, postact_out=None, out_dtype=None, "
    "postact_dtype=None, cu_seqlens_m=None, A_idx=None, store_preact=True, dynamic_scheduler=False, tuned=True, "
    "concat_layout=None",
    "gemm_dgated": "A, B, PreAct, activation=None, dx_out=None, postact_out=None, out_dtype=None, postact_dtype=None, "
    "colvec_scale=None, colvec_reduce=False, cu_seqlens_m=None, A_idx=None, dynamic_scheduler=True, tuned=True",
}
E, N, H, WIDTH = 4, 5, 8, 6
KEPT: list[int] = []


def bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    namespace: dict[str, Any] = {}
    exec(f"def documented({SIGNATURES[name]}): pass", namespace)
    given = inspect.signature(namespace["documented"]).bind(*args, **kwargs)
    given.apply_defaults()
    call = SimpleNamespace(**given.arguments)
    for ends in (call.cu_seqlens_m, getattr(call, "cu_seqlens_k", None), call.A_idx):
        assert ends is None or (ends.dtype == torch.int32 and ends.data_ptr() % 16 == 0)
    assert not call.tuned, "an autotuner would run in training steps"
    return call


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """[first half; second half] along the dim that is not contiguous -> f0, s0, f1, s1, ..."""
    dim = -2 if tensor.stride(-1) == 1 else -1
    assert tensor.stride(-1) == 1 or tensor.stride(-2) == 1
    first, second = tensor.chunk(2, dim)
    return torch.stack((first, second), dim if dim == -1 else -2).flatten(*((-2, -1) if dim == -1 else (-3, -2)))


def spans(ends: torch.Tensor) -> list[slice]:
    assert ends.shape == (E + 1,) and ends[0] == 0
    return [slice(a, b) for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False)]


def rows_times(call: SimpleNamespace, b: torch.Tensor) -> torch.Tensor:
    """A [total_M, K], or what A_idx picks of it, times B [E, K, N]; rows past the end stay as memory was."""
    assert call.A.stride(-1) == 1 and b.shape[0] == E
    a = call.A if call.A_idx is None else call.A[call.A_idx.long().clamp(0, len(call.A) - 1)]
    out = a.new_full((a.shape[0], b.shape[-1]), torch.nan)
    for expert, span in enumerate(spans(call.cu_seqlens_m)):
        out[span] = a[span] @ b[expert]
    return out


def gemm(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = bound("gemm", args, kwargs)
    if call.cu_seqlens_m is not None:
        assert call.cu_seqlens_k is None and call.concat_layout in (None, ("B",)) and call.out is None
        return rows_times(call, side_by_side(call.B) if call.concat_layout else call.B)
    # varlen_k: A (M, total_K) m-major, or (M, whatever) gathered; B (total_K, N) n-major; out (E, M, N)
    assert call.A.stride(-2) == 1 and call.B.stride(-1) == 1
    a = call.A if call.A_idx is None else call.A[:, call.A_idx.long().clamp(0, call.A.shape[1] - 1)]
    product = torch.stack([a[:, span] @ call.B[span] for span in spans(call.cu_seqlens_k)])
    if call.out is None:
        assert call.concat_layout is None
        return product
    assert call.concat_layout == ("out",) and call.out.shape == product.shape
    # Written side by side, into storage whose non-contiguous dim has one half behind the other.
    dim = -2 if call.out.stride(-1) == 1 else -1
    even, odd = product.unflatten(dim, (-1, 2)).unbind(dim)
    call.out.copy_(torch.cat((even, odd), dim))
    return call.out


def gemm_gated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = bound("gemm_gated", args, kwargs)
    assert call.activation == "swiglu" and call.store_preact and call.concat_layout == ("B",)
    both = rows_times(call, side_by_side(call.B))
    gate, up = both[:, ::2], both[:, 1::2]
    KEPT.append(both.numel())
    return both, torch.nn.functional.silu(gate) * up


def gemm_dgated(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = bound("gemm_dgated", args, kwargs)
    assert call.activation == "swiglu" and call.colvec_reduce and call.PreAct.stride(-1) == 1
    assert call.colvec_scale.dtype in (torch.float32, torch.float64) and call.colvec_scale.data_ptr() % 16 == 0
    grad = rows_times(call, call.B)
    scaled = grad * call.colvec_scale.unsqueeze(1)
    gate, up = call.PreAct[:, ::2], call.PreAct[:, 1::2]
    sigmoid = gate.sigmoid()
    act = gate * sigmoid * up
    grads = (scaled * up * sigmoid * (1 + gate * (1 - sigmoid)), scaled * gate * sigmoid)
    both = torch.stack(grads, -1).flatten(-2)
    return both, act * call.colvec_scale.unsqueeze(1), (act * grad).sum(1)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(gemm=gemm, gemm_gated=gemm_gated, gemm_dgated=gemm_dgated)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", ops)
    monkeypatch.setattr(quack, "DTYPES", (*quack.DTYPES, torch.float64))  # the oracle's
    KEPT.clear()


def expert_args(counts: list[int], past_the_end: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_rows = sum(counts) + past_the_end
    gather_idx = torch.randint(N, (num_rows,), generator=generator)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    return [
        normal(N, H), gather_idx, offsets, normal(num_rows).abs(), normal(E, 2, WIDTH, H), normal(E, H, WIDTH)
    ]  # fmt: skip


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 8, 0], [0, 0, 0, 0]], ids=str)
def test_experts_equal_the_float64_loop(counts: list[int]) -> None:
    args, results = expert_args(counts), []
    for fn in (quack.experts(), loop_experts):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        out = flat(fn)(*leaves)
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        out.backward(upstream)
        results.append([out, *(leaf.grad for leaf in leaves if leaf.requires_grad)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("documented")
def test_rows_past_the_last_offset_touch_no_weight() -> None:
    args, used = expert_args([2, 0, 3, 1], past_the_end=3), 6
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    out = flat(quack.experts())(*leaves)
    expected = flat(loop_experts)(*args)
    torch.testing.assert_close(out[:used], expected, rtol=1e-11, atol=1e-12)
    out.backward(torch.ones_like(out))
    exact = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    flat(loop_experts)(*exact).sum().backward()
    for got, wanted in zip(leaves[4:], exact[4:], strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(leaves[3].grad[:used], exact[3].grad[:used], rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("documented")
def test_what_is_kept_besides_the_arguments_is_gate_and_up() -> None:
    args = [x.requires_grad_(x.is_floating_point()) for x in expert_args([3, 1, 2, 2])]
    known = {x.untyped_storage().data_ptr() for x in args}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.is_floating_point():
            kept[storage.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        flat(quack.experts())(*args)
    assert list(kept.values()) == KEPT == [8 * 2 * WIDTH]


@pytest.mark.usefixtures("documented")
def test_what_it_has_not() -> None:
    experts, args = flat(quack.experts()), expert_args([1, 1, 1, 1])
    biases = torch.zeros(E, 2, WIDTH), torch.zeros(E, H)
    for more, options in ((biases, {}), ((), {"activation": ClampedSwiGLU(1.7, 7.0)})):
        with pytest.raises(BackendError, match="only SwiGLU experts without biases.*moe.experts=grouped_mm"):
            experts(*args, *more, **options)
    with pytest.raises(BackendError, match=r"the rows are torch\.float32.*moe.experts=grouped_mm"):
        experts(args[0].float(), *args[1:])


@pytest.mark.usefixtures("documented")
def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(BackendError, match=r"capability 9\.0 and later, and this GPU has \(8, 0\)"):
        quack.experts()


def test_the_recorded_signatures_refuse_what_they_do_not_have() -> None:
    for name, options in (("gemm", {"cu_seqlens": 1}), ("gemm_dgated", {"concat_layout": ("B",)})):
        with pytest.raises(TypeError):
            bound(name, (1, 2, 3), options)


def test_absence_is_told_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, shape = Config(moe=MoEConfig(experts="quack")), resolve_mesh(MeshConfig(dp_shard=1), None)
    dense = replace(chosen, model=replace(chosen.model, first_k_dense=chosen.model.num_layers))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "quack", None)  # it may be installed
        with pytest.raises(BackendError, match="moe.experts=quack: the package quack is not .*moe.experts=grouped_mm"):
            check_backends(chosen, shape, "cuda")
        check_backends(dense, shape, "cuda")  # computes no experts
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").write_text("raise RuntimeError('no CUDA driver')")
    monkeypatch.syspath_prepend(tmp_path)
    check_backends(chosen, shape, "cuda")
    with pytest.raises(
        BackendError, match="moe.experts=quack: .* does not import .*no CUDA driver.*moe.experts=grouped_mm"
    ):
        quack.experts()
