"""Fifteen public failures of reinforcement learning of MoE models; each is injected, here or in the test that its row names."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.recipe_args import GRPOArgs
from automoe.config.schema import Config
from automoe.errors import AutomoeError, DataError
from automoe.observe.metrics import read_metrics
from automoe.parallel.pipeline import PipelineRunner
from automoe.rl.engine import Sampling, TransformersEngine
from automoe.rl.losses import dapo
from automoe.rl.routes import read_vllm
from automoe.rl.weights import WeightStream
from automoe.session import Sample, Session, open_session
from automoe.training.context import RunContext
from automoe.verify.pool import RankError, RankPool
from recipes import grpo
from tests.rl.small import SMALL
from tests.rl.test_grpo import config, export_sharp
from tests.rl.test_session import batch_of
from tests.support.gpu import one_rank
from tests.support.toys import DEEPSEEK

HERE, ROOT = Path(__file__), Path(__file__).parents[2]
REPLAY, MESH = "tests/rl/test_replay.py", "tests/mesh/test_mesh_replay.py"
WRONG_LINES = f"{REPLAY}::test_lines_that_are_no_routes_of_the_model_are_refused"
SHIFTED = f"{REPLAY}::test_shifted_routes_are_refused_with_the_share_that_differs"
MINE = "tests/rl/test_failures.py"
# Failure -> tests that inject it; of the mesh suite's one test of faults, the functions that put them in.
FAILURES: dict[str, tuple[str, ...]] = {
    "verl#5037: dense layers shift the routes of every layer": (f"{MESH}::dense_layers_counted", WRONG_LINES, SHIFTED),
    "verl#7106: packing and virtual pipelines shift routes": (
        f"{MESH}::layers_counted_from_the_stage",
        f"{MESH}::samples_out_of_order",
    ),
    "NeMo-RL#3903: modules for multi-token prediction take the backbone's routes": (
        f"{MESH}::modules_for_prediction_take_the_last_layers_routes",
    ),
    "SkyRL#1908: padding is routed, and routes outlive their batch": (f"{MESH}::routes_outlive_their_micro_batch",),
    "AReno#524: a merge over dp drops routes, turns are misaligned": (
        f"{MESH}::routes_of_dp_ranks_dropped_at_a_merge",
        SHIFTED,  # of half misaligned answers the record has the share; the bound leaves it to many updates
    ),
    "tunix#2046: padding before prompts detaches every route": (f"{MESH}::padding_on_the_left_shifts_routes", SHIFTED),
    "prime-rl#2738: replay does nothing in latent MoE": (f"{MESH}::replay_does_nothing",),
    "prime-rl#2953: biases move under replay": (f"{MESH}::biases_move",),
    "ms-swift#9804: routes beside cp are another rank's": (f"{MESH}::routes_of_the_first_cp_ranks_positions",),
    "vllm#40692: hybrid attention leaves out routes": (f"{MINE}::test_routes_of_attention_layers_alone_are_refused",),
    "SkyRL#1680: a later chunk of a weight update restores old experts": (f"{MINE}::test_an_engine_that_is_wrong_ends_the_run",),
    "SkyRL#1345: a pipeline keeps the shapes of an earlier batch": (f"{MINE}::test_shapes_of_an_earlier_batch_would_be_found",),
    "verl#7978: experts in another kernel's layout": (
        f"{MINE}::test_an_engine_that_is_wrong_ends_the_run",
        "tests/interop/test_vllm.py::test_experts_that_a_kernel_has_packed_are_found",
    ),
    "verl#7195: an engine that needs all experts of a GPT-OSS layer at once gets a part": (
        f"{MINE}::test_experts_of_a_gpt_oss_layer_arrive_at_once",
    ),
    "slime#2085: a teacher scores at temperature 0": (f"{MINE}::test_a_teacher_scores_at_the_temperature_of_the_sampling",),
}  # fmt: skip


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_failure_is_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(FAILURES) == 15
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "mesh"))
    modules: dict[str, ModuleType] = {}
    for test in {test for tests in FAILURES.values() for test in tests}:
        file, _, name = test.partition("::")
        module = modules.setdefault(file, module_at(ROOT / file))
        function = getattr(module, name)
        if file == MESH:
            assert function in [fault for fault, _ in module.FAULTS], name
        else:
            assert name.startswith("test_"), name


# ---------------------------------------------------------------- routes


def test_routes_of_attention_layers_alone_are_refused() -> None:
    """A hybrid model has one attention layer of four here; all four have experts."""
    model = replace(DEEPSEEK, num_layers=4, first_k_dense=0, num_experts=8, num_experts_per_token=2)
    lines = torch.rand(8, 4, 8, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    assert torch.equal(read_vllm(lines.numpy(), model, 9).long(), lines)
    with pytest.raises(DataError, match="1 layers and K=2, and the model has 4 MoE layers"):
        read_vllm(lines[:, 3:].numpy(), model, 9)
    lines[:, :3] = 0  # a buffer that no delta net's layer has filled
    with pytest.raises(DataError, match=r"token 0, layer 0: experts \[0, 0\]; a token has K different experts"):
        read_vllm(lines.numpy(), model, 9)


# ---------------------------------------------------------------- weights in an engine


def as_it_must_be(engine: TransformersEngine, before: dict[str, torch.Tensor]) -> None: ...


def old_experts(engine: TransformersEngine, before: dict[str, torch.Tensor]) -> None:
    """Restore those of the last update, as a chunk that reloads a whole layer does; the first update stays."""
    if vars(engine).setdefault("updates", []):
        engine._model.load_state_dict(before, strict=False)
    vars(engine)["updates"].append(1)


def layout_of_a_kernel(engine: TransformersEngine, before: dict[str, torch.Tensor]) -> None:
    """Put gate and up projections in turns, as fused kernels read them; the shape stays."""
    for name in before:
        if name.endswith("gate_up_proj"):
            tensor_ENH = engine._model.state_dict()[name]
            tensor_ENH.copy_(tensor_ENH.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def train_with(settings: Config, change: Callable[..., None]) -> list[dict[str, Any]]:
    """On a rank: train with an engine that ``change`` spoils after each update; its records."""
    update = TransformersEngine.update

    def changed(self: TransformersEngine, stream: WeightStream) -> None:
        before = {name: one.clone() for name, one in self._model.state_dict().items() if "experts" in name}
        update(self, stream)
        with torch.no_grad():
            change(self, before)

    run_dir = Path(settings.run_dir)
    context = RunContext(0, 1, 0, torch.device("cpu"), run_dir)
    with mock.patch.object(TransformersEngine, "update", changed):
        try:
            grpo.main(settings, resolve_mesh(settings.mesh, None), context)
        except AutomoeError as error:
            return [*read_metrics(run_dir), {"error": str(error)}]
    return [*read_metrics(run_dir)]


@pytest.mark.parametrize("change", [as_it_must_be, old_experts, layout_of_a_kernel])
def test_an_engine_that_is_wrong_ends_the_run(change: Callable[..., None], tmp_path: Path, ranks: RankPool) -> None:
    settings = config(tmp_path)
    settings.model = replace(settings.model, initializer_range=0.5)  # experts that say something, as trained ones
    settings.train.steps = 3
    records = ranks.run(train_with, 1, settings, change)[0]
    if change is as_it_must_be:
        assert len(records) == 3 and all(record["engine_gap_max"] < 1e-5 for record in records)
        return
    assert len(records) == (2 if change is old_experts else 1)
    assert "nats from the trainer's on average (allowed 0.1" in records[-1]["error"]


GPT_OSS = ["model=small_gpt_oss", "model.num_layers=2", "model.initializer_range=0.2", "mesh=fsdp_ep"]


class InParts:
    """A stream whose every tensor of experts comes in two halves, one after the other."""

    def __init__(self, stream: WeightStream) -> None:
        self.stream, self.contents = stream, stream.contents

    def lent(self) -> Any:
        for bucket in self.stream:
            for name, tensor in bucket.items():
                yield from ({name: part} for part in (tensor.chunk(2) if ".experts." in name else [tensor]))


def gpt_oss_in_an_engine(run_dir: str) -> tuple[int, float, str]:
    """On a rank of two: most buckets of a layer's experts, gap of engine and session, and what parts of experts raise."""
    session = open_session(
        [*GPT_OSS, "train.seq_len=32", "train.dtype=float32", "launch.device=cpu", f"run_dir={run_dir}"]
    )
    engine = TransformersEngine(session.config, session.device)
    stream = WeightStream(session.state.model_parts, 1 << 16, **engine.options)  # a layer's experts are larger
    experts = [name for bucket in stream for name, one in bucket.items() if ".experts." in name and len(one) > 1]
    number = session.config.model.num_experts
    assert len(experts) == len({*experts}) and all(stream.contents[name].shape[0] == number for name in experts)
    engine.update(stream)
    [answers] = engine.sample([[5, 17, 3]], Sampling(4, 8))
    ours = session.log_probs([Sample.of_answer([5, 17, 3], answer.tokens) for answer in answers]).log_probs
    gaps = [
        abs(a - b)
        for answer, one in zip(answers, ours, strict=True)
        for a, b in zip(answer.log_probs, one[3:].tolist(), strict=True)
    ]
    with pytest.raises(RuntimeError) as caught:
        engine.update(InParts(stream))  # type: ignore[arg-type]
    return len(experts), max(gaps), str(caught.value)


def test_experts_of_a_gpt_oss_layer_arrive_at_once(tmp_path: Path, ranks: RankPool) -> None:
    """However small a bucket is: a tensor has the experts of all ranks."""
    for number, gap, error in ranks.run(gpt_oss_in_an_engine, 2, str(tmp_path)):
        assert number == 2 * 4 and gap < 1e-3 and "must match the size" in error


# ---------------------------------------------------------------- a session


def norms_of(run_dir: str, mesh: list[str], kept: bool) -> list[float]:
    """Gradient norms of batches of other lengths; ``kept``: the pipeline is built for the first one alone."""
    session = open_session([*SMALL, *mesh, "train.dtype=float64", "moe.experts=loop", f"run_dir={run_dir}"])
    build = PipelineRunner._build_schedule

    def first_alone(self: PipelineRunner, shape: Any) -> None:
        if self._step_shape is None or not kept:
            build(self, shape)

    norms = []
    with mock.patch.object(PipelineRunner, "_build_schedule", first_alone):
        for batch in (batch_of(number=2), batch_of(number=6), batch_of(number=4)[::-1]):
            session.forward_backward(batch, dapo)
            norms.append(session.optim_step(lr=0.0).grad_norm)
    return norms


def test_shapes_of_an_earlier_batch_would_be_found(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(norms_of, 1, str(tmp_path / "alone"), ["mesh.pp=1"], False)[0]
    stages = ["mesh.pp=2", "mesh.dp_shard=1"]
    for norms in ranks.run(norms_of, 2, str(tmp_path / "stages"), stages, False):
        assert norms == pytest.approx(alone, rel=1e-10)
    with pytest.raises(RankError, match="must match the size of tensor"):
        ranks.run(norms_of, 2, str(tmp_path / "kept"), stages, True)


def scores_by(settings: Config, temperature: float | None) -> tuple[dict[str, Any], Any]:
    """One step of distillation, whose teacher scores at ``temperature`` if it is given: the scores, and the answers."""
    log_probs = Session.log_probs

    def scored(self: Session, batch: Any, asked: float = 1.0, entropy: bool = False) -> Any:
        is_teacher = self.config.model.num_layers == 1
        return log_probs(self, batch, temperature if is_teacher and temperature else asked, entropy)

    context = RunContext(0, 1, 0, torch.device("cpu"), Path(settings.run_dir))
    context.run_dir.mkdir()
    with mock.patch.object(Session, "log_probs", scored):
        grpo.main(settings, resolve_mesh(settings.mesh, None), context)
    names = ("scores", "answers")
    return tuple(  # type: ignore[return-value]
        json.loads((context.run_dir / "rollouts" / f"{name}-00000001.json").read_text())["content"] for name in names
    )


def test_a_teacher_scores_at_the_temperature_of_the_sampling(tmp_path: Path, ranks: RankPool) -> None:
    """Its log-probabilities are those of transformers; a temperature of 0 is refused, one near it is far from them."""
    teacher = replace(config(tmp_path).model, num_layers=1, num_experts=6)
    ranks.run(export_sharp, 1, teacher, tmp_path / "teacher")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32).eval()
    gaps = []
    for number, temperature in enumerate((None, 1e-3)):
        settings = config(tmp_path / f"run-{number}")
        settings.train.steps, settings.checkpoint.every = 1, 0
        settings.recipe_args = GRPOArgs(prompts=1, samples=4, teacher=str(tmp_path / "teacher"), temperature=0.7)
        scores, [answers] = ranks.run(scores_by, 1, settings, temperature)[0]
        with one_rank("cpu"):
            rollouts = grpo.Rollouts.open(settings, tmp_path / f"again-{number}")
        [prompt] = rollouts.numbers(0)
        for (tokens, *_), said in zip(answers, scores["teacher_log_probs"], strict=True):
            with torch.no_grad():
                logits = theirs(torch.tensor([rollouts.prompts[prompt] + tokens])).logits[0, -len(tokens) - 1 : -1]
            expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            gaps.append(float((torch.tensor(said) - expected).abs().max()))
    assert max(gaps[:4]) < 1e-4 and min(gaps[4:]) > 1
    with pytest.raises(Exception, match="temperature=1e-09: must be finite, and at least 1e-06"):
        ranks.run(scores_by, 1, replace(settings, run_dir=str(tmp_path / "cold")), 1e-9)
