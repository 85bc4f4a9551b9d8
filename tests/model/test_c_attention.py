"""``kernels.attention=c``: the C kernel against float64, and its library, compiled for this machine's processor."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, KernelsConfig, MeshConfig
from automoe.errors import BackendError
from automoe.kernels import c_attention as c_attention_module
from automoe.kernels import c_library
from automoe.kernels.c_attention import _backward, _forward, c_attention, compiled_functions
from automoe.kernels.c_library import ATTENTION, load_library
from automoe.launch.hardware import check_backends
from automoe.model.attention_kernels import attend

Args = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float]

# B, S, R, N, G, D, E: whole blocks and parts of them, more keys than fit at once, more queries than keys.
SHAPES = [
    (2, 128, 128, 4, 2, 64, 64),
    (2, 333, 333, 4, 4, 40, 24),
    (1, 77, 1301, 3, 1, 7, 13),
    (3, 1, 1, 2, 2, 1, 1),
    (2, 200, 90, 6, 3, 17, 33),
    (1, 640, 640, 2, 1, 96, 64),
]


def inputs(shape: tuple[int, ...], masked: bool) -> Args:
    """Heads that lie in wider storage, and a mask of documents; of one row for all of them."""
    B, S, R, N, G, D, E = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def heads(length: int, count: int, dim: int) -> torch.Tensor:
        return torch.randn(B, length, count, dim + 3, generator=generator)[..., 1 : dim + 1].requires_grad_()

    mask = None
    if masked:
        query, key = torch.arange(S)[:, None] + max(R - S, 0), torch.arange(R)
        mask = ((key <= query) & (key * 3 // R == (query * 3 // R).clamp(max=2)))[None, None]
    return heads(S, N, D), heads(R, G, D), heads(R, G, E), mask, D**-0.5


def gradients(fn, args: Args) -> list[torch.Tensor]:
    """The output, and gradients of queries, keys and values."""
    tensors = args[:3]
    out = fn(*args)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


def in_float64(args: Args) -> list[torch.Tensor]:
    q, k, v = (x.detach().double().requires_grad_() for x in args[:3])
    return gradients(lambda *given: attend(*given, kernel="math"), (q, k, v, *args[3:]))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_those_of_float64(shape: tuple[int, ...], masked: bool) -> None:
    args = inputs(shape, masked)
    for got, expected in zip(gradients(c_attention, args), in_float64(args), strict=True):
        assert (got - expected).norm() <= 1e-6 * max(expected.norm(), 1e-6)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
def test_threads_share_the_heads_and_change_no_bit(masked: bool) -> None:
    args, before = inputs(SHAPES[4], masked), torch.get_num_threads()
    try:
        results = []
        for count in (1, 5, 64):
            torch.set_num_threads(count)
            results.append(gradients(c_attention, args))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_scores_that_overflow_exp_pick_one_key() -> None:
    q, k, v, mask, _ = inputs(SHAPES[0], False)
    args = (q, k, v, mask, 1e4)
    found, expected = gradients(c_attention, args), in_float64(args)
    assert all(x.isfinite().all() for x in found)
    for of in (0, 3):  # gradients of queries and keys are those of the rounding of such scores
        torch.testing.assert_close(found[of].double(), expected[of], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_reaches_those_who_see_it_and_no_others(bad: float) -> None:
    q, k, v, mask, scale = inputs(SHAPES[1], True)
    assert mask is not None
    with torch.no_grad():
        k[0, 100, 0, 0] = bad
    out, dq, _, _ = gradients(c_attention, (q, k, v, mask, scale))
    sees = torch.zeros(q.shape[:3], dtype=torch.bool)
    sees[0, :, 0] = mask[0, 0, :, 100]
    lost = out.isnan().any(-1)
    assert lost.any() and not (lost & ~sees).any()
    if math.isnan(bad):  # with infinity some scores are minus infinity: no weight at all
        assert torch.equal(lost, sees)
    assert dq.isnan().any(-1)[lost].all()


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient() -> None:
    q, k, v, _, scale = inputs(SHAPES[1], False)
    mask = torch.ones(1, 1, q.shape[1], k.shape[1], dtype=torch.bool)
    mask[0, 0, 70] = False
    out, dq, dk, _ = gradients(c_attention, (q, k, v, mask, scale))
    assert not out[:, 70].any() and not dq[:, 70].any()
    assert out[:, 71].any() and torch.isfinite(dk).all()


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
def test_torch_s_own_check_of_both_operations(masked: bool) -> None:
    args = inputs(SHAPES[1], masked)
    torch.library.opcheck(_forward, args)
    q, k, v, mask, scale = (x.detach() if isinstance(x, torch.Tensor) else x for x in args)
    out, log_sum = _forward(q, k, v, mask, scale)
    torch.library.opcheck(_backward, (q, k, v, mask, out, log_sum, torch.ones_like(out), scale))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torch_s_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    args = inputs(SHAPES[1], False)
    expected = gradients(c_attention, args)
    torch.set_default_dtype(dtype)
    try:
        assert all(map(torch.equal, gradients(c_attention, args), expected))
    finally:
        torch.set_default_dtype(torch.float32)


def test_heads_that_do_not_fit_are_not_read_by_address() -> None:
    q, k, v, mask, scale = inputs(SHAPES[0], True)
    assert mask is not None
    for wrong in ((q, k[..., 1:], v, mask), (q, k, v[:, 1:], mask), (q[:, :, 1:], k, v, mask), (q, k, v, mask.float())):
        with pytest.raises(AssertionError):
            c_attention(*wrong, scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    q, k, v, mask, scale = inputs(SHAPES[0], False)
    with pytest.raises(BackendError, match=rf"float32 on the CPU, and got {dtype} on cpu. Set kernels.attention=sdpa"):
        c_attention(q.to(dtype), k, v, mask, scale)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of which a process that has the library already knows nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(c_library, "load_library", load_library.__wrapped__)
    return tmp_path / "automoe" / "kernels"


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_library_is_compiled_once_and_again_where_it_is_damaged(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CC", str(script(tmp_path / "counting", f'echo "$@" >> {calls}; exec cc "$@"')))

    def compiled() -> int:
        c_library.load_library(ATTENTION)
        return sum("attention.c" in line for line in calls.read_text().splitlines())

    assert [compiled(), compiled()] == [1, 1]
    [entry] = entries(fresh)
    # Not in place: this process runs what lies there.
    (entry / "other").write_bytes((entry / "library.so").read_bytes()[:-1])
    os.replace(entry / "other", entry / "library.so")
    assert compiled() == 2 and entries(fresh) == [entry]
    assert "is damaged (library.so: another checksum), so it is compiled again" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["-ffast-math", "-fassociative-math -fno-signed-zeros -fno-trapping-math"])
def test_flags_of_the_compiler_change_no_number(fresh: Path, monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    args = inputs(SHAPES[1], True)
    expected = gradients(c_attention, args)
    monkeypatch.setenv("CC", f"cc {flags}")
    monkeypatch.setattr(c_attention_module, "load_library", c_library.load_library)
    monkeypatch.setattr(c_attention_module, "compiled_functions", compiled_functions.__wrapped__)
    assert all(map(torch.equal, gradients(c_attention, args), expected))
    assert len(entries(fresh)) == 1


def test_another_compiler_or_processor_has_a_library_of_its_own(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c_library.load_library(ATTENTION)
    monkeypatch.setenv("CC", "cc -DANOTHER")
    c_library.load_library(ATTENTION)
    monkeypatch.setattr(c_library, "_processor", lambda: "another")
    c_library.load_library(ATTENTION)
    assert len(entries(fresh)) == 3


def refusal() -> str:
    """Why a run does not start."""
    with pytest.raises(BackendError) as caught:
        check_backends(Config(kernels=KernelsConfig(attention="c")), resolve_mesh(MeshConfig(dp_shard=1), 1), "cpu")
    return str(caught.value)


def test_what_does_not_compile_is_an_error_before_ranks_start(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = script(tmp_path / "broken", 'case "$*" in *attention.c*) echo no >&2; exit 4;; esac')
    monkeypatch.setenv("CC", str(broken))
    assert "broken" in (said := refusal()) and "failed with status 4:\nno\n" in said
    assert said.endswith("Set CC to another compiler, or set kernels.attention=sdpa") and not entries(fresh)
    monkeypatch.setenv("CC", "true")
    assert "what true -O3" in (said := refusal()) and "cannot be loaded" in said and not entries(fresh)
    monkeypatch.setenv("CC", "gcc 'x")
    assert "CC=gcc 'x is no command (No closing quotation)" in refusal()
    monkeypatch.setenv("CC", "absent-cc -O2")
    assert "compiles with absent-cc, and there is none on the PATH" in refusal()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert (
        "cc or gcc or clang, and there is none on the PATH. Install it, set CC to another compiler, or set" in refusal()
    )


def test_code_of_another_user_is_not_run(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # whose files everybody trusts
        original = Path.stat
        monkeypatch.setattr(Path, "stat", lambda path, **how: _owned_by(original(path, **how), 7))
    with pytest.raises(BackendError, match=r"belongs to user \d+, and kernels.attention=c runs code from it as user"):
        c_library.load_library(ATTENTION)


def _owned_by(found: os.stat_result, user: int) -> os.stat_result:
    return os.stat_result([*found[:4], user, *found[5:]])
