"""The contract between the DeepEP adapters and the two published signatures, and how absence is told.

DeepEP itself needs GPUs and has never run here. What stands in for it checks the names, types and shapes of
what it is given, and behaves like a world in which all tokens of the other ranks choose no expert: this rank
has experts 0 ... L - 1 and receives its own tokens only.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.rules_model import moe_rows
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from automoe.errors import BackendError, ConfigError
from automoe.interop import deepep
from automoe.interop.deepep import DeepEPDispatcher, open_deepep
from automoe.launch.hardware import check_backends
from automoe.launch.ranks import close_ranks
from automoe.parallel.overlap import MERGED_PASSES
from tests.support.host_syncs import HostReads

T, K, H, E, RANKS = 6, 3, 128, 8, 2
LOCAL = E // RANKS
CALLS: list[str] = []


class Group:
    """As much of a process group as the adapters ask for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def route(x: Any, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Any, ...]:
    """Rows, local ids, weights, counts and the tokens that came, after checks that both lines share."""
    if isinstance(x, tuple):
        codes, scales = x
        assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and codes.shape[1] % 128 == 0
        assert scales.dtype == torch.float32 and scales.shape == (len(codes), codes.shape[1] // 128)
    else:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] * 2 % 16 == 0
        codes, scales = x, None
    assert ids.dtype == torch.int64 and ids.shape == weights.shape == (codes.shape[0], K)
    assert weights.dtype == torch.float32 and weights.is_contiguous()
    assert int(ids.min()) >= -1 and int(ids.max()) < E
    here = (ids >= 0) & (ids < LOCAL)
    tokens = here.any(1).nonzero().squeeze(1)
    local = ids.masked_fill(~here, -1)[tokens]
    counts = [int((local == e).sum()) for e in range(LOCAL)]
    rows = codes.view(torch.uint8 if scales is not None else codes.dtype)[tokens].view(codes.dtype)
    return (
        rows if scales is None else (rows, scales[tokens]),
        local,
        weights.masked_fill(~here, 0)[tokens],
        counts,
        tokens,
    )


def add_up(rows: torch.Tensor, weights: torch.Tensor | None, tokens: torch.Tensor) -> tuple[Any, Any]:
    assert rows.dtype == torch.bfloat16 and rows.is_contiguous() and rows.shape == (len(tokens), H)
    x = rows.new_zeros(T, H).index_add_(0, tokens, rows)
    if weights is None:
        return x, None
    assert weights.dtype == torch.float32 and weights.shape == (len(tokens), K)
    return x, weights.new_zeros(T, K).index_add_(0, tokens, weights)


def started(later: bool) -> SimpleNamespace:
    """The event of a call. One that nobody asked for holds what v2 holds then: nothing to wait for."""
    return SimpleNamespace(current_stream_wait=lambda: CALLS.append("wait")) if later else SimpleNamespace()


class Settings:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert hidden_bytes == 2 * H and num_ranks == RANKS
        return 1024


class Buffer:
    """v1, with the parameters that v1.2.1 names."""

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Settings:
        return Settings()

    get_combine_config = get_dispatch_config

    def __init__(
        self, group: Group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, explicitly_destroy: bool = False
    ) -> None:
        assert group.size() == RANKS and (num_nvl_bytes, num_rdma_bytes) == (1024, 0) and explicitly_destroy
        CALLS.append("build")

    def destroy(self) -> None:
        CALLS.append("destroy")

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False):
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        owner = torch.where(topk_idx >= 0, topk_idx // LOCAL, -1)
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(RANKS)], dim=1)
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        async_finish=False,
    ):
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            CALLS.append("dispatch again")
            return x[handle[0]], None, None, None, None, started(async_finish)
        assert num_tokens_per_rank.shape == (RANKS,) and num_tokens_per_expert.shape == (E,)
        assert is_token_in_rank.shape == (T, RANKS) and is_token_in_rank.dtype == torch.bool
        CALLS.append("dispatch")
        rows, ids, weights, counts, tokens = route(x, topk_idx, topk_weights)
        return rows, ids, weights, counts, (tokens,), started(async_finish)

    def combine(self, x, handle, topk_weights=None, bias=None, async_finish=False):
        CALLS.append("combine" if topk_weights is None else "combine with weights")
        return *add_up(x, topk_weights, handle[0]), started(async_finish)


class ElasticBuffer:
    """v2, with the parameters that 2.1.0 names."""

    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        explicitly_destroy=False,
    ) -> None:  # fmt: skip
        sizes = num_max_tokens_per_rank, hidden, num_topk
        assert (group.size(), num_bytes, sizes) == (RANKS, None, (T, H, K)) and explicitly_destroy
        assert CALLS[-1:] == ["all_reduce"], "the group's communicator is there before the buffer asks for it"
        CALLS.append("build")

    destroy = Buffer.destroy

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        handle=None,
        do_cpu_sync=None,
        do_expand=False,
        async_with_compute_stream=False,
    ):
        assert num_sms > 0, "its own estimate fails without num_experts and without RDMA"
        if handle is not None:
            assert topk_idx is None and not do_cpu_sync
            CALLS.append("dispatch again")
            return x[handle.tokens], None, None, handle, started(async_with_compute_stream)
        assert num_experts == E and do_cpu_sync and not do_expand
        CALLS.append("dispatch")
        rows, ids, weights, counts, tokens = route(x, topk_idx, topk_weights)
        handle = SimpleNamespace(tokens=tokens, num_recv_tokens_per_expert_list=counts)
        return rows, ids, weights, handle, started(async_with_compute_stream)

    def combine(self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, async_with_compute_stream=False):
        CALLS.append("combine" if topk_weights is None else "combine with weights")
        return *add_up(x, topk_weights, handle.tokens), started(async_with_compute_stream)


LINES = {
    "v1": SimpleNamespace(Buffer=Buffer),
    # 2.x keeps the old class next to the new one
    "v2": SimpleNamespace(Buffer=Buffer, ElasticBuffer=ElasticBuffer, topk_idx_t=torch.int64),
}


def multiplying_experts(x, gather_idx, offsets, probs):
    """Expert e multiplies by e + 1."""
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).long()
    factors = torch.arange(1, LOCAL + 1, dtype=x.dtype).repeat_interleave(counts)
    assert len(factors) == len(gather_idx) == len(probs)
    return x[gather_idx] * (probs * factors).to(x.dtype).unsqueeze(1)


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("line", LINES)
def test_both_lines_behind_one_dispatcher(line: str, in_8_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small whole numbers, which bfloat16 adds exactly and e4m3 holds: output and both gradients equal the formula."""
    monkeypatch.setitem(sys.modules, "deep_ep", LINES[line])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x, group: CALLS.append("all_reduce"))
    monkeypatch.setattr(deepep, "_buffers", [])
    CALLS.clear()
    generator = torch.Generator().manual_seed(0)
    # E is a dropped choice; one token has no expert here, one none at all
    ids = torch.stack([torch.randperm(E + 1, generator=generator)[:K] for _ in range(T)])
    ids[1], ids[2] = torch.tensor([LOCAL, LOCAL + 1, LOCAL + 2]), torch.tensor([E, E, E])
    x = torch.randint(-3, 4, (T, H), generator=generator).bfloat16().requires_grad_()
    weights = torch.randint(1, 4, (T, K), generator=generator).float().requires_grad_()
    upstream = torch.randint(-2, 3, (T, H), generator=generator).bfloat16()

    dispatcher = DeepEPDispatcher(E, RANKS, open_deepep(Group(RANKS)), in_8_bits)  # type: ignore[arg-type]
    with HostReads() as reads:
        got = dispatcher(x, ids, weights, multiplying_experts)
    got.backward(upstream)
    grads = x.grad, weights.grad
    x.grad = weights.grad = None
    want = x.float() * (weights * torch.where(ids < LOCAL, ids + 1, 0)).sum(1, keepdim=True)
    want.backward(upstream.float())

    assert torch.equal(got.float(), want)
    assert torch.equal(grads[0], x.grad) and torch.equal(grads[1], weights.grad)
    first = ["all_reduce"] if line == "v2" else []
    assert CALLS == [*first, "build", "dispatch", "combine", "dispatch again", "combine with weights"]
    assert reads.count == 0, "the library waits for the number of rows; nothing else does"
    CALLS.clear()
    dispatcher(x, ids, weights, multiplying_experts)
    assert CALLS == ["dispatch", "combine"], "the buffer is made once"

    CALLS.clear()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.barrier", lambda: CALLS.append("barrier"))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: CALLS.append("leave"))
    close_ranks()
    assert CALLS == ["destroy", "barrier", "leave"], "buffers before the process group that they live on"
    close_ranks()
    assert CALLS.count("destroy") == 1


@pytest.mark.parametrize("line", LINES)
def test_another_pass_runs_while_tokens_travel(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two merged passes each gives the turn away behind every call of the library, and waits when it has it again."""
    monkeypatch.setitem(sys.modules, "deep_ep", LINES[line])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x, group: CALLS.append("all_reduce"))
    monkeypatch.setattr(deepep, "_buffers", [])
    dispatcher = DeepEPDispatcher(E, RANKS, open_deepep(Group(RANKS), MERGED_PASSES.overlap))  # type: ignore[arg-type]
    ids = torch.arange(K).repeat(T, 1)
    x = torch.ones(T, H, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        return dispatcher(x, ids, torch.ones(T, K), multiplying_experts)

    earlier = forward()
    CALLS.clear()
    later = MERGED_PASSES.run(lambda: earlier.backward(torch.ones_like(earlier)), forward)
    assert torch.equal(later, earlier) and x.grad is not None
    back, ahead = ["dispatch again", "combine with weights"], ["dispatch", "combine"]
    assert CALLS == [back[0], ahead[0], "wait", back[1], "wait", ahead[1], "wait", "wait"]


def test_rows_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", LINES["v1"])
    dispatcher = DeepEPDispatcher(E, RANKS, open_deepep(Group(RANKS)))  # type: ignore[arg-type]
    ids, weights = torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K)
    for x, problem in (
        (torch.zeros(T, H), r"torch\.float32 rows of 512 bytes.*alltoall"),
        (torch.zeros(T, 12, dtype=torch.bfloat16), r"rows of 24 bytes.*alltoall"),
    ):
        with pytest.raises(BackendError, match=problem):
            dispatcher(x, ids, weights, multiplying_experts)
    with pytest.raises(BackendError, match="multiple of 128 columns, and these have 136"):
        in_8_bits = DeepEPDispatcher(E, RANKS, dispatcher.exchange, in_8_bits=True)
        in_8_bits(torch.zeros(T, 136, dtype=torch.bfloat16), ids, weights, multiplying_experts)
    with pytest.raises(BackendError, match="int64 expert ids"):
        dispatcher(torch.zeros(T, H, dtype=torch.bfloat16), ids.int(), weights, multiplying_experts)


def test_v1_names_the_group_sizes_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", LINES["v1"])
    with pytest.raises(BackendError, match=r"mesh\.ep=12: .*2, 4, 8, 16,.* 160 ranks.*alltoall"):
        open_deepep(Group(12))  # type: ignore[arg-type]


def config(**changes: Any) -> Config:
    return Config(
        mesh=MeshConfig(dp_shard=2, ep=2),
        moe=MoEConfig(dispatcher="deepep", dispatch_dtype=changes.pop("dispatch_dtype", "auto")),
        train=TrainConfig(dtype=changes.pop("dtype", "bfloat16")),
        model=ModelConfig(**changes),
    )


def test_absence_names_alltoall_when_a_dispatcher_is_built() -> None:
    with pytest.raises(BackendError, match=r"deep_ep does not import .*moe\.dispatcher=alltoall"):
        open_deepep(Group(RANKS))  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "problem"), [("cuda", "not installed here"), ("cpu", "needs CUDA")])
def test_absence_is_told_before_ranks_start(device: str, problem: str) -> None:
    on = config()
    shape = resolve_mesh(on.mesh, None)
    with pytest.raises(BackendError, match=rf"moe\.dispatcher=deepep.*{problem}.*moe\.dispatcher=alltoall"):
        check_backends(on, shape, device)
    check_backends(Config(mesh=on.mesh), shape, device)
    one = MeshConfig(dp_shard=1)
    check_backends(Config(mesh=one, moe=on.moe), resolve_mesh(one, None), device)  # ep=1 sends nothing


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "float32"}, r"train\.dtype=float32: .*bfloat16"),
        (
            {"hidden_size": 136, "dispatch_dtype": "fp8"},
            r"blocks of 128 columns: .*136 % 128 = 8.*\. Set moe\.dispatch_dtype",
        ),
        ({"hidden_size": 20}, r"model\.hidden_size=20: .*16 bytes: .*40 % 16 = 8.*\. Set model\.hidden_size=16 or 24"),
    ],
)
def test_what_never_fits_is_a_configuration_error(changes: dict[str, Any], problem: str) -> None:
    changed = config(**changes)
    with pytest.raises(ConfigError, match=problem):
        check_rows(changed, moe_rows(changed))
