"""The contract between the adapters and transformer-engine's published signatures, and how absence is told.

transformer-engine needs a GPU and has never run here. What stands in for it takes the arguments that 2.20.2
documents, refuses others, and does in torch what the documentation says a call means: so these tests show that
the adapters ask for the right thing, not that transformer-engine gives it.
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automoe.comm.tokens import StepBatch
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    TrainConfig,
)
from automoe.errors import BackendError
from automoe.interop import transformer_engine
from automoe.kernels.activation import ClampedSwiGLU
from automoe.kernels.attention import attention_fn
from automoe.launch.hardware import check_backends
from automoe.moe.experts import loop_experts
from automoe.parallel.choices import build_backend
from automoe.parallel.parallelize import build_decoder
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory
from tests.support.experts import flat
from tests.support.gpu import conf_model, one_rank
from tests.support.host_syncs import HostReads
from tests.support.trajectories import run_trajectory

# transformer_engine 2.20.2, read from the wheel's sources: parameters of what the adapters call.
SIGNATURES = {
    # attention/dot_product_attention/dot_product_attention.py
    "DotProductAttention": "num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, "
    "qkv_format='sbhd', attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, softcap=0.0, "
    "sequence_parallel=False, tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, "
    "attention_type='self', cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type='p2p', "
    "softmax_scale=None, softmax_type='vanilla', return_max_logit=False, name=None",
    "DotProductAttention.forward": "query_layer=None, key_layer=None, value_layer=None, attention_mask=None, "
    "qkv_format=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, "
    "cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, window_size=None",
    # module/rmsnorm.py; what it does not name goes to ops/basic/rmsnorm.py
    "RMSNorm": "normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, "
    "zero_centered_gamma=False, hidden_size=None, *, device=None, dtype=None, sm_margin=0",
    "RMSNorm.forward": "input",
    # module/grouped_linear.py
    "GroupedLinear": "num_gemms, in_features, out_features, sequence_parallel=False, "
    "fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, "
    "init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None, device='cuda', "
    "ub_overlap_rs=False, ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, "
    "save_original_input=False, single_grouped_weight=False, single_grouped_bias=False, name=None, "
    "use_grouped_tensor=None",
    "GroupedLinear.forward": "inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None",
}
MADE: list[str] = []


def bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """The arguments by name, defaults included; ``TypeError`` where the signature does not take them."""
    namespace: dict[str, Any] = {}
    exec(f"def documented({SIGNATURES[name]}): pass", namespace)
    given = inspect.signature(namespace["documented"]).bind(*args, **kwargs)
    given.apply_defaults()
    return SimpleNamespace(**given.arguments)


class DotProductAttention(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.made = bound("DotProductAttention", args, kwargs)
        assert self.made.qkv_format == "bshd" and self.made.attn_mask_type == "causal"
        assert self.made.attention_dropout == 0 and self.made.softmax_type == "vanilla"
        MADE.append("attention")

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = bound("DotProductAttention.forward", args, kwargs)
        q, k, v = given.query_layer, given.key_layer, given.value_layer
        made = self.made
        assert (q.shape[2], k.shape[2]) == (made.num_attention_heads, made.num_gqa_groups)
        assert (k.shape[3], v.shape[3]) == made.kv_channels and q.dtype == k.dtype == v.dtype
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) * made.softmax_scale
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("bnqk,bknd->bqnd", weights, v).flatten(2)  # [B, S, N Dv]


class RMSNorm(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.made = bound("RMSNorm", args, kwargs)
        assert self.made.hidden_size is None and self.made.params_dtype is None  # deprecated
        shape, device, dtype = self.made.normalized_shape, self.made.device, self.made.dtype
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        MADE.append("norm")
        x = bound("RMSNorm.forward", args, kwargs).input
        assert type(x) is torch.Tensor, "its kernels read by pointer"
        x = x.to(self.weight.dtype)
        weight = self.weight + 1 if self.made.zero_centered_gamma else self.weight
        return x * (x.square().mean(-1, keepdim=True) + self.made.eps).rsqrt() * weight


class GroupedLinear(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.made = bound("GroupedLinear", args, kwargs)
        assert not self.made.bias
        for i in range(self.made.num_gemms):
            shape = (self.made.out_features, self.made.in_features)
            weight = torch.empty(shape, device=self.made.device, dtype=self.made.params_dtype)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
        MADE.append("linear")

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = bound("GroupedLinear.forward", args, kwargs)
        assert all(type(size) is int for size in given.m_splits)
        assert len(given.m_splits) == self.made.num_gemms and sum(given.m_splits) == len(given.inp) > 0
        weights = [getattr(self, f"weight{i}") for i in range(self.made.num_gemms)]
        assert {weight.dtype for weight in weights} == {given.inp.dtype} == {self.made.params_dtype}
        pairs = zip(given.inp.split(given.m_splits), weights, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pairs])


PARTS = SimpleNamespace(DotProductAttention=DotProductAttention, RMSNorm=RMSNorm, GroupedLinear=GroupedLinear)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", PARTS)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    MADE.clear()


def test_the_recorded_signatures_refuse_what_they_do_not_have() -> None:
    with pytest.raises(TypeError):
        bound("GroupedLinear", (4, 8, 8), {"m_splits": [1]})
    with pytest.raises(TypeError):
        bound("RMSNorm.forward", (1, 2), {})


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(("groups", "dims"), [(4, (24, 16)), (2, (8, 8))], ids=["mla", "gqa"])
def test_attention_asks_for_causal_heads_in_our_layout(groups: int, dims: tuple[int, int]) -> None:
    generator, results = torch.Generator().manual_seed(0), []
    shapes = ((2, 7, 4, dims[0]), (2, 7, groups, dims[0]), (2, 7, groups, dims[1]))
    args = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    te = transformer_engine.attention()
    assert os.environ["NVTE_UNFUSED_ATTN"] == "0", "scores are not kept behind one's back"
    for fn in (te, te, attention_fn("math")):
        leaves = [x.clone().requires_grad_() for x in args]
        out = fn(*leaves, None, 0.3)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for parts in zip(*results, strict=True):
        for got in parts[:2]:
            torch.testing.assert_close(got, parts[2], rtol=1e-11, atol=1e-12)
    assert MADE == ["attention"], "made once for all layers of a shape"
    with pytest.raises(BackendError, match="has a mask.*kernels.attention=sdpa"):
        te(*args, torch.ones(2, 1, 7, 7, dtype=torch.bool), 0.3)
    with pytest.raises(BackendError, match="has sinks.*kernels.attention=sdpa"):
        te(*args, None, 0.3, torch.zeros(4))


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_and_attention_of_a_model_keep_names_numbers_and_gradients(zero_centered: bool) -> None:
    config = ModelConfig(
        num_layers=2,
        vocab_size=16,
        hidden_size=16,
        first_k_dense=2,
        intermediate_size=16,
        zero_centered_norms=zero_centered,
        norm_eps=0.1,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, qk_norm=True),
    )
    results = []
    for kernels in (KernelsConfig(), KernelsConfig(attention="te", norm="te")):
        model = build_decoder(
            config, MoEConfig(), torch.float32, backend=build_backend(Config(kernels=kernels))
        ).to_empty(device="cpu")
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.5, 0.3, generator=generator)
        logits = model(torch.arange(12).view(2, 6))
        logits.square().sum().backward()
        results.append((list(model.state_dict()), logits, [parameter.grad for parameter in model.parameters()]))
    assert results[0][0] == results[1][0], "a checkpoint does not see it"
    for got, expected in zip([results[1][1], *results[1][2]], [results[0][1], *results[0][2]], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert MADE.count("norm") == 2 * 4 + 1 and MADE.count("attention") == 1


@pytest.mark.usefixtures("documented")
def test_a_norm_gives_back_the_dtype_of_its_rows() -> None:
    config = ModelConfig(num_layers=1, vocab_size=16, hidden_size=16, first_k_dense=1)
    model = build_decoder(
        config, MoEConfig(), torch.float32, backend=build_backend(Config(kernels=KernelsConfig(norm="te")))
    )
    norm = model.to_empty(device="cpu").norm
    nn.init.ones_(norm.weight)
    assert norm(torch.ones(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


E, H, WIDTH = 4, 8, 6


def expert_args(counts: list[int], past_the_end: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_rows = sum(counts) + past_the_end
    gather_idx = torch.randint(5, (num_rows,), generator=generator)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    return [
        normal(5, H), gather_idx, offsets, normal(num_rows).abs(), normal(E, 2, WIDTH, H), normal(E, H, WIDTH)
    ]  # fmt: skip


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 8, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("past_the_end", [0, 3])
def test_experts_equal_the_float64_loop(counts: list[int], past_the_end: int) -> None:
    args, used = expert_args(counts, past_the_end), sum(counts)
    te, results = transformer_engine.experts(), []
    for fn in (te, loop_experts):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        with HostReads("interop") as reads:
            out = flat(fn)(*leaves)
        assert fn is loop_experts or (reads.count == 1 and out.shape == (used + past_the_end, H))
        out[:used].square().sum().backward()
        results.append([out[:used], *(leaf.grad for leaf in leaves if leaf.requires_grad)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    flat(te)(*args)
    assert MADE == ["linear", "linear"] * (used > 0), "made once for all layers of a shape"


@pytest.mark.usefixtures("documented")
def test_experts_take_any_activation_and_no_biases() -> None:
    args, clamped = expert_args([2, 1, 0, 4]), ClampedSwiGLU(1.7, 0.5)
    got, expected = (flat(fn)(*args, activation=clamped) for fn in (transformer_engine.experts(), loop_experts))
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(BackendError, match="only experts without biases.*moe.experts=grouped_mm"):
        flat(transformer_engine.experts())(*args, torch.zeros(E, 2, WIDTH), torch.zeros(E, H))


def rows(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    tokens = torch.randint(config.model.vocab_size, (4, 17), generator=torch.Generator().manual_seed(step))
    index = torch.arange(16).expand(4, 16)
    return StepBatch(tokens[:, :-1], tokens[:, 1:], index, torch.zeros_like(index), 0, 0)


@pytest.mark.usefixtures("documented")
def test_a_training_step_with_all_of_it_is_the_step_without() -> None:
    """Through FSDP, which swaps parameters behind the modules' backs, and recomputation."""
    plain = Config(
        mesh=MeshConfig(dp_shard=1),
        model=replace(conf_model("small_dsv3"), num_layers=2),
        moe=MoEConfig(experts="loop"),
        parallel=ParallelConfig(recompute=["core_attn", "moe"]),
        train=TrainConfig(seq_len=16, global_batch_size=4, micro_batch_size=2, dtype="float64"),
        data=DataConfig(document_mask=False),
    )
    foreign = replace(plain, moe=MoEConfig(experts="te"), kernels=KernelsConfig(attention="te", norm="te"))
    with one_rank("cpu"):
        expected, got = (run_trajectory(config, rows, 2) for config in (plain, foreign))
    assert set(MADE) == {"attention", "norm", "linear"}
    assert got.losses == pytest.approx(expected.losses, rel=1e-10)
    assert got.gradients[0].keys() == expected.gradients[0].keys()
    for name, gradient in expected.gradients[0].items():
        torch.testing.assert_close(got.gradients[0][name], gradient, rtol=1e-8, atol=1e-12, msg=name)


def run_documented(config: Config) -> Trajectory:
    sys.modules["transformer_engine.pytorch"] = PARTS  # not patch.dict: it would forget what the run imports
    try:
        return run_trajectory(config, rows, 1)
    finally:
        del sys.modules["transformer_engine.pytorch"]


def test_norms_under_tp_are_given_tokens_that_have_arrived(ranks: RankPool) -> None:
    """The first layer's gets the embedding's sum, which other ranks may still be sending."""
    config = Config(
        mesh=MeshConfig(dp_shard=1, tp=2),
        model=ModelConfig(
            num_layers=1,
            vocab_size=16,
            hidden_size=16,
            first_k_dense=1,
            intermediate_size=16,
            attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        ),
        train=TrainConfig(seq_len=16, global_batch_size=4, micro_batch_size=4, dtype="float64"),
    )
    [expected, _] = ranks.run(run_trajectory, 2, config, rows, 1)
    [got, _] = ranks.run(run_documented, 2, replace(config, kernels=KernelsConfig(norm="te")))
    assert got.losses == pytest.approx(expected.losses, rel=1e-10)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-10)


CHOICES = [
    (Config(kernels=KernelsConfig(attention="te")), "kernels.attention=te", "kernels.attention=sdpa"),
    (Config(kernels=KernelsConfig(norm="te")), "kernels.norm=te", "kernels.norm=torch"),
    (Config(moe=MoEConfig(experts="te")), "moe.experts=te", "moe.experts=grouped_mm"),
]


@pytest.mark.parametrize(("chosen", "key", "instead"), CHOICES, ids=[c[1] for c in CHOICES])
def test_absence_is_told_before_ranks_start(
    chosen: Config, key: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = resolve_mesh(MeshConfig(dp_shard=1), None)
    for package in ("transformer_engine", "transformer_engine_torch"):  # its Python part alone is no use
        with pytest.raises(BackendError, match=f"{key}: the package {package} is not .*set {instead}"):
            check_backends(chosen, shape, "cuda")
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    check_backends(chosen, shape, "cuda")
    check_backends(Config(), shape, "cuda")


@pytest.mark.parametrize("problem", ["RuntimeError('cudnn shared object not found')", "OSError('libcublas')"])
def test_an_import_that_fails_is_a_backend_error_whatever_it_raises(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").write_text(f"raise {problem}")
    monkeypatch.syspath_prepend(tmp_path)
    what = problem.split("'")[1]
    try:
        for make, instead in (
            (transformer_engine.attention, "kernels.attention=sdpa"),
            (transformer_engine.experts, "moe.experts=grouped_mm"),
            (transformer_engine.norm, "kernels.norm=torch"),
        ):
            with pytest.raises(BackendError, match=f"does not import .*{what}.*set {instead}"):
                make()
    finally:
        sys.modules.pop("transformer_engine", None)
