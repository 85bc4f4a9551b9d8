"""``automoe.ExpertParallel`` over modules of transformers and over our own experts, against one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import automoe
from automoe.classes.expert_parallel import RoutedRows
from automoe.comm.collectives import DispatchGroup
from automoe.comm.tokens import MicroBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from automoe.errors import BackendError, ConfigError
from automoe.model.backend import BackendConfig
from automoe.model.block import Latent
from automoe.moe.dispatch.alltoall import AllToAllDispatcher
from automoe.moe.dispatch.base import run_choices
from automoe.moe.experts import GroupedExperts
from automoe.moe.layer import MoE
from automoe.parallel import dispatchers, expert
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.verify.fake_world import fake_world
from automoe.verify.pool import RankPool
from tests.support.expert_parallel import EXPERTS, tiny_model, worst_difference

DISPATCHERS = ("alltoall", "allgather", "hierarchical")


def sharded(whole: nn.Module, dispatcher: str, ep: int, fsdp: bool = False) -> nn.Module:
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("ep_shard", "ep"))
    style = automoe.ExpertParallel(dispatcher, gpus_per_node=2)
    parallelize_module(model, mesh["ep"], {EXPERTS: style})
    layers = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for experts in layers if fsdp else ():
        fully_shard(experts, mesh=mesh["ep_shard"], shard_placement_fn=lambda _: Shard(1))
        assert isinstance(experts, FSDPModule)
        experts.set_force_sum_reduction_for_comms(True)
        experts.set_gradient_divide_factor(1.0)
    axes = ("ep_shard", "ep") if fsdp else ("ep",)
    assert all(parameter.device_mesh.mesh_dim_names == axes for part in layers for parameter in part.parameters())
    return model


def differences(family: str, cases: list[tuple[str, int]], fsdp: bool = False) -> list[float]:
    whole = tiny_model(family)
    return [worst_difference(sharded(whole, dispatcher, ep, fsdp), whole) for dispatcher, ep in cases]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_an_unchanged_transformers_model_computes_what_one_process_computes(ranks: RankPool, family: str) -> None:
    """Two families with every dispatcher, two with the default one; gpt_oss has biases, deepseek_v3 a dense layer."""
    names = DISPATCHERS if family in ("qwen3_moe", "gpt_oss") else DISPATCHERS[:1]
    cases = [(name, ep) for name in names for ep in (2, 4)]
    found = ranks.run(differences, 4, family, cases)[0]
    limit = 1e-5 if family == "deepseek_v3" else 1e-12  # its router multiplies in float32
    assert max(found) < limit, dict(zip(cases, found, strict=True))


def test_fully_shard_over_another_axis_follows(ranks: RankPool) -> None:
    assert max(ranks.run(differences, 4, "gpt_oss", [("alltoall", 2)], True)[0]) < 1e-12


def differences_of_a_copy() -> list[float]:
    """What a copy differs from the model it was made of, which no longer has weights."""
    whole = tiny_model("gpt_oss")
    original = sharded(whole, "hierarchical", 4)
    model = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    return [worst_difference(model, whole), float(any(p.grad is not None for p in original.parameters()))]


def test_a_copy_of_a_sharded_model_has_weights_of_its_own(ranks: RankPool) -> None:
    assert max(ranks.run(differences_of_a_copy, 4)[0]) < 1e-12


def differences_with_faults() -> list[float]:
    whole = tiny_model("qwen3_moe")
    send = DispatchGroup.all_to_all

    def halved_gradient(self, x, *splits):
        if x.requires_grad:
            x = x * 0.5 + x.detach() * 0.5
        return send(self, x, *splits)

    def stay_here(self, x_TH, topk_ids_TK, weights_TK, experts, rows_per_expert=None):
        return run_choices(x_TH, topk_ids_TK % 2, weights_TK, experts, 2, topk_ids_TK.numel())

    faults = [patch.object(DispatchGroup, "all_to_all", halved_gradient)]
    faults += [patch.object(AllToAllDispatcher, "__call__", stay_here)]
    found = []
    for fault in faults:
        with fault:
            found.append(worst_difference(sharded(whole, "alltoall", 4), whole))
    return found


def test_scaled_gradients_and_a_call_past_the_dispatcher_are_seen(ranks: RankPool) -> None:
    assert min(ranks.run(differences_with_faults, 4)[0]) > 1e-3


def only_the_first_rank_has_work(implementation: str, dtype: torch.dtype) -> bool:
    """No token chooses an expert of other ranks, whose calls and gradients take part; one parameter is frozen."""
    experts = tiny_model("qwen3_moe").model.layers[0].mlp.experts.to(dtype)
    experts.config._experts_implementation = implementation
    experts.down_proj.requires_grad_(False)
    whole = copy.deepcopy(experts)
    mesh = init_device_mesh("cpu", (4,))  # an axis without a name is ep
    parallelize_module(experts, mesh, automoe.ExpertParallel())
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = dist.get_rank()  # none on rank 0
    x = torch.randn(tokens, 32, generator=generator).to(dtype)
    ids = torch.arange(2).expand(tokens, 2)
    weights = torch.rand(tokens, 2, generator=generator).to(dtype)
    results = []
    for module in (whole, experts):
        x_TH, weights_TK = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = module(hidden_states=x_TH, top_k_index=ids, top_k_weights=weights_TK)
        if tokens or module is experts:
            out.square().sum().backward()
            results.append((out.detach(), x_TH.grad, weights_TK.grad))
        else:  # transformers' own call has no gradient then
            module.gate_up_proj.grad = torch.zeros_like(module.gate_up_proj)
            results.append((out, x, weights))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for mine, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    dist.all_reduce(whole.gate_up_proj.grad)
    grad = experts.gate_up_proj.grad.full_tensor()
    torch.testing.assert_close(grad, whole.gate_up_proj.grad, rtol=tolerance, atol=tolerance)
    assert experts.down_proj.grad is None and not experts.down_proj.requires_grad
    with torch.no_grad():
        assert torch.equal(experts.eval()(x, ids, weights), results[1][0])
    return True


def test_ranks_that_no_token_reaches_take_part(ranks: RankPool) -> None:
    assert all(ranks.run(only_the_first_rank_has_work, 4, "eager", torch.float64))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_other_implementations_of_transformers_and_narrow_weights(ranks: RankPool, implementation: str) -> None:
    assert all(ranks.run(only_the_first_rank_has_work, 4, implementation, torch.bfloat16))


class Experts(nn.Module):
    def __init__(self, *shapes: tuple[int, ...], num_experts: int | None = 8) -> None:
        super().__init__()
        self.num_experts = num_experts
        for number, shape in enumerate(shapes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.empty(*shape)))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


class OneArgument(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_gradients_of_a_users_module_are_summed_in_a_fixed_order() -> None:
    """With several threads torch adds float32 of rows that occur several times in any order."""
    module = Experts((8, 4))
    module.own_forward = lambda rows, *rest: rows
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(512).repeat(8)[torch.randperm(4096, generator=generator)]
    slope = torch.randn(4096, 64, generator=generator)
    expected = torch.zeros(512, 64)
    for row, token in enumerate(index.tolist()):
        expected[token] += slope[row]
    routed = RoutedRows(module, lambda rows, ids, probs, experts: rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        for _ in range(5):
            x = torch.zeros(512, 64, requires_grad=True)
            (routed.route(x, index, torch.arange(512, 4097, 512), torch.ones(4096)) * slope).sum().backward()
            assert torch.equal(x.grad, expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Experts((6, 4), (6, 4, 4), num_experts=6), r"ep=4: every rank holds an equal part of 6 experts: 6 % 4 = 2"),
        (Experts((8, 4), (4, 8)), r"module=Experts: dim 0 of every parameter must be its 8 experts .*w1 \[4, 8\]"),
        (Experts((8,)), r"dim 0 of every parameter .*w0 \[8\]"),
        (Experts((8, 4), num_experts=None), r"must be its None experts \(num_experts\)"),
        (Experts(), "it has no parameters to shard"),
        (OneArgument((8, 4)), r"it is called with \(x\), and ExpertParallel needs three arguments"),
    ],
)
def test_what_cannot_be_sharded_is_refused(module: nn.Module, message: str) -> None:
    with fake_world(0, 4), pytest.raises(ConfigError, match=message):
        parallelize_module(module, init_device_mesh("cpu", (4,)), automoe.ExpertParallel())


def test_a_module_is_sharded_once_and_called_with_rows_choices_and_weights() -> None:
    module, style = Experts((8, 4)), automoe.ExpertParallel()
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        parallelize_module(module, mesh, style)
        with pytest.raises(ConfigError, match="sharded already.*once to each module"):
            parallelize_module(module, mesh, style)
        for weights in (torch.ones(3, 8), torch.ones(3)):  # of all experts, of one
            with pytest.raises(ConfigError, match=r"it was called with \[\(3, 4\), \(3, 2\), "):
                module(torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64), weights)
        for kind in (torch.bool, torch.float32):  # a mask over all experts, as NllbMoeExperts takes, or their scores
            with pytest.raises(ConfigError, match="chosen experts .T, K. as int32 or int64 .*A mask over all experts"):
                module(torch.ones(3, 4), torch.zeros(3, 8, dtype=kind), torch.ones(3, 8))
        for ids, weights in ((None, None), (torch.zeros(3, dtype=torch.int64), torch.ones(3)), (2, 0.5)):
            with pytest.raises(ConfigError, match=r"it was called with \[\(3, 4\), "):
                module(torch.ones(3, 4), ids, weights)
        for ids, named in (([[0, 8]], "0 to 8"), ([[-1, 7]], "-1 to 7")):
            with pytest.raises(ConfigError, match=f"experts {named} were chosen, and it has experts 0 to 7"):
                module(torch.ones(1, 4), torch.tensor(ids), torch.ones(1, 2))
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
        with pytest.raises(ConfigError, match="experts of this module can be sharded only over the axes ep\\. "):
            parallelize_module(Experts((8, 4)), two, style)


def test_a_dispatcher_is_chosen_by_name() -> None:
    with pytest.raises(BackendError, match="no such dispatcher. Available: alltoall, allgather, hierarchical, deepep"):
        automoe.ExpertParallel(dispatcher="pigeon")
    mesh: Any = SimpleNamespace(ranks=[0, 1, 2, 3])
    with (
        patch.object(dist, "get_process_group_ranks", lambda group: group.ranks),
        pytest.raises(ConfigError, match=r"gpus_per_node=3: .*equal numbers .*\[0, 0, 0, 1\]"),
    ):
        dispatchers.node_levels(mesh, 3, None)
    for number in (0, -2):
        with pytest.raises(ConfigError, match=f"gpus_per_node={number}: a node has at least one rank"):
            automoe.ExpertParallel("hierarchical", gpus_per_node=number)


def test_a_maker_of_dispatchers_takes_no_other_arguments() -> None:
    maker = dispatchers.Dispatchers("allgather")
    assert automoe.ExpertParallel(maker).dispatchers is maker
    with pytest.raises(ConfigError, match="Give them to the maker"):
        automoe.ExpertParallel(maker, in_8_bits=True)


def differences_of_our_layer(axes: dict[str, int]) -> list[float]:
    """Of results and gradients, between a MoE layer whose experts the style shards and the same layer whole."""
    sizes = dict(num_experts=8, num_experts_per_token=2, moe_intermediate_size=16, hidden_size=32, biased_experts=True)
    model = ModelConfig(num_layers=1, first_k_dense=0, **sizes)
    torch.manual_seed(0)
    whole = MoE(model, MoEConfig(experts="loop"), 0, None, BackendConfig(), Latent(model, BackendConfig())).to(
        torch.float64
    )
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    layer = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallelize_module(layer, mesh, {"experts": automoe.ExpertParallel()})
    layer = copy.deepcopy(layer)  # with weights and a dispatcher of its own
    x = torch.randn(1, 4 + dist.get_rank(), 32, dtype=torch.float64)
    tokens = MicroBatch(torch.zeros(x.shape[:2], dtype=torch.int64)).per_token(torch.tensor(1))
    results = []
    for module in (whole, layer):
        x_BSH = x.clone().requires_grad_()
        y_BSH = module(x_BSH, tokens)
        y_BSH.square().sum().backward()
        results.append([y_BSH.detach(), x_BSH.grad])
    for parameter, shard in zip(whole.experts.parameters(), layer.experts.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        results[0].append(parameter.grad)
        results[1].append(shard.grad.full_tensor())
    return [float((got - expected).norm() / expected.norm()) for expected, got in zip(*results, strict=True)]


@pytest.mark.parametrize("axes", [{"ep": 4}, {"ep": 2, "etp": 2}, {"etp": 4}], ids=str)
def test_experts_of_our_layer_are_sharded_too(ranks: RankPool, axes: dict[str, int]) -> None:
    for found in ranks.run(differences_of_our_layer, 4, axes):
        assert max(found) < 1e-12


def our_parameters() -> dict[str, tuple[bool, tuple[str, ...], list[str], tuple[int, ...]]]:
    model = ModelConfig(num_layers=2, first_k_dense=1, num_experts=8, moe_intermediate_size=16, hidden_size=32)
    config = Config(model=model, moe=MoEConfig(experts="loop"), train=TrainConfig(dtype="float64"))
    meshes = build_meshes(resolve_mesh(MeshConfig(dp_shard=8, ep=2, etp=2), None), torch.device("cpu"))
    applied = []

    def record(module, mesh, plan, **options):
        applied.extend((type(module.get_submodule(name)), style, mesh) for name, style in plan.items())
        return parallelize_module(module, mesh, plan, **options)

    with patch.object(expert, "parallelize_module", record):
        [part] = build_parts(config, meshes).values()
    [(module, style, mesh)] = applied
    assert module is GroupedExperts and isinstance(style, ParallelStyle) and mesh.mesh_dim_names == ("ep", "etp")
    [(_, layer)] = part.moe_layers()
    found = {}
    for name, parameter in layer.experts.named_parameters():
        assert isinstance(parameter, DTensor)
        placements = [str(placement) for placement in parameter.placements]
        names = parameter.device_mesh.mesh_dim_names
        on_moe_mesh = parameter.device_mesh == meshes.moe[names]
        found[name] = on_moe_mesh, names, placements, tuple(parameter.to_local().shape)
    return found


def test_experts_of_our_decoder_are_sharded_by_a_parallel_style_on_the_moe_mesh(ranks: RankPool) -> None:
    for found in ranks.run(our_parameters, 8):
        assert set(found) == {"gate_up_proj", "down_proj"}
        for on_moe_mesh, names, _, _ in found.values():
            assert on_moe_mesh and names == ("ep_shard", "ep", "etp")
        assert found["gate_up_proj"][3] == (4, 2, 4, 32) and found["down_proj"][3] == (4, 16, 8)
