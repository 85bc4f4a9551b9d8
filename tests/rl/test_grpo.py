"""The loop of ``recipes/grpo.py``: rewards rise, a run that was cut goes on to the bit, the engine has the weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from automoe.config.compose import compose_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.recipe_args import GRPOArgs, check_args
from automoe.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ObserveConfig,
    OptimConfig,
    TrainConfig,
)
from automoe.config.validate import validate
from automoe.data.tokenizer import ByteTokenizer
from automoe.errors import BackendError, ConfigError, DataError
from automoe.hf.folder import write_settings
from automoe.hf.write import to_hf
from automoe.observe.metrics import read_metrics
from automoe.rl.engine import Answer, TransformersEngine, gaps_of
from automoe.rl.engines import teacher_of
from automoe.rl.rollouts import Rollouts
from automoe.rl.weights import WeightStream
from automoe.session import open_session
from automoe.training.context import RunContext
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from recipes import grpo
from tests.support.configurations import quick_model
from tests.support.gpu import one_rank

PROMPTS = ["x = ", "count: ", "the year "]
STEPS = 4
VOLATILE = ("second", "mfu", "memory", "checkpoint_", "slowest", "crc32")


def config(run_dir: Path, **mesh: int) -> Config:
    return Config(
        run_dir=str(run_dir),
        recipe="grpo",
        recipe_args=GRPOArgs(prompts=2, samples=4, kl=0.01),
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=264,
            hidden_size=16,
            num_layers=2,
            num_experts=4,
            num_experts_per_token=2,
            moe_intermediate_size=8,
            attention=AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True),
        ),
        moe=MoEConfig(experts="loop"),
        train=TrainConfig(
            steps=STEPS, seq_len=32, global_batch_size=8, micro_batch_size=2, dtype="float32", val_every=0
        ),
        optim=OptimConfig(lr=0.02, schedule="constant", warmup_steps=0, weight_decay=0.0),
        checkpoint=CheckpointConfig(every=2, export_hf=False),
        observe=ObserveConfig(samples=PROMPTS, sample_tokens=6, report=False),
    )


class Cut(Exception):
    """What ends a run in the middle."""


def train(settings: Config, cut: str = "", at: int = -1) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """On a rank: the weights at the end, and rank 0's records; ``cut`` at step ``at`` ends the run there."""
    run_dir = Path(settings.run_dir)
    run_dir.mkdir(exist_ok=True)
    shape = resolve_mesh(settings.mesh, None)
    rank = torch.distributed.get_rank()
    context = RunContext(rank, shape.world_size, rank, torch.device("cpu"), run_dir)
    sessions = []
    opened = grpo.Session.open

    def open_session(*given: Any) -> Any:
        sessions.append(opened(*given))
        return sessions[-1]

    def cutting(real: Any) -> Any:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            result = real(self, *given, **named)
            if sessions[0].state.step == at:
                raise Cut
            return result

        return call

    places = {"draw": (Rollouts, "draw"), "step": (grpo.Session, "optim_step"), "forget": (Rollouts, "forget")}
    with mock.patch.object(grpo.Session, "open", open_session):
        if not cut:
            grpo.main(settings, shape, context)
        else:
            owner, name = places[cut]
            with mock.patch.object(owner, name, cutting(getattr(owner, name))), pytest.raises(Cut):
                grpo.main(settings, shape, context)
    weights = {name: whole(p) for name, p in named_parameters(sessions[0].state.model_parts).items()}
    records = [
        {key: value for key, value in one.items() if not any(word in key for word in VOLATILE)}
        for one in read_metrics(run_dir)
    ]
    return weights, records


UPDATES = {"iterations": 2, "mini_batches": 3}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mesh", "cuts"),
    [
        ({"dp_shard": 2, "ep": 2}, [("step", 3), ("forget", 4), ("draw", 6)]),
        ({}, [("step", 3), ("forget", 4), ("draw", 4), ("step", 5), ("draw", 6), ("step", 7)]),
    ],
)
def test_a_run_that_was_cut_between_the_updates_of_a_rollout_goes_on_to_the_bit(
    mesh: dict[str, int], cuts: list[tuple[str, int]], tmp_path: Path, ranks: RankPool
) -> None:
    """Advantages and old log-probabilities are those of the weights that drew the answers, whatever was cut."""
    settings = [config(tmp_path / name, **mesh) for name in ("whole", "cut")]
    for one in settings:
        one.train.steps = 8
        vars(one.recipe_args).update(UPDATES)
    count = resolve_mesh(settings[0].mesh, None).world_size
    expected, records = ranks.run(train, count, settings[0])[0]
    assert [one["rollout"] for one in records] == [1] * 6 + [2] * 2
    assert len({one["reward"] for one in records[:6]}) == 1
    tokens = [one["update_tokens"] for one in records]
    answers = 2 * 4 * records[0]["answer_tokens"]
    assert sum(tokens[:3]) == sum(tokens[3:6]) == answers and tokens[:3] == tokens[3:6]
    assert records[0]["old_kl"] < 1e-9 < records[5]["old_kl"]
    for cut, at in cuts:
        ranks.run(train, count, settings[1], cut, at)
    weights, again = ranks.run(train, count, settings[1])[0]
    assert again == records
    assert all(torch.equal(weights[name], one) for name, one in expected.items())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2, "ep": 2}])
def test_a_run_that_was_cut_goes_on_to_the_bit(mesh: dict[str, int], tmp_path: Path, ranks: RankPool) -> None:
    """Between drawing and training, between a checkpoint and the removal of its answers, after an update."""
    count = resolve_mesh(MeshConfig(**({"dp_shard": 1} | mesh)), None).world_size
    expected, records = ranks.run(train, count, config(tmp_path / "whole", **mesh))[0]
    assert [one["step"] for one in records] == list(range(1, STEPS + 1))
    settings = config(tmp_path / "cut", **mesh)
    for cut, at in (("draw", 1), ("forget", 2), ("step", 3), ("draw", 3)):
        ranks.run(train, count, settings, cut, at)
    weights, again = ranks.run(train, count, settings)[0]
    assert again == records
    assert all(torch.equal(weights[name], one) for name, one in expected.items())


def test_answers_that_were_drawn_are_trained_on_whatever_the_engine_says_now(tmp_path: Path, ranks: RankPool) -> None:
    settings = config(tmp_path / "run")
    expected, _ = ranks.run(train, 1, config(tmp_path / "whole"))[0]
    ranks.run(train, 1, settings, "draw", 3)
    weights, _ = ranks.run(with_another_engine, 1, settings)[0]
    assert all(torch.equal(weights[name], one) for name, one in expected.items())


def test_another_reward_function_judges_answers_that_were_drawn(tmp_path: Path, ranks: RankPool) -> None:
    settings = config(tmp_path / "run")
    settings.train.steps = 3
    ranks.run(train, 1, settings, "draw", 2)
    _, records = ranks.run(with_another_reward, 1, settings)[0]
    assert [one["reward"] for one in records][2:] == [0.5]


def test_answers_of_weights_that_another_reward_made_are_drawn_anew(tmp_path: Path, ranks: RankPool) -> None:
    """After the checkpoint of step 2: answers of rollout 3 stay, those of rollout 4 are of weights that are gone."""
    ends = []
    for name, cut, at in (("before", "draw", 2), ("after", "step", 4)):
        settings = config(tmp_path / name)
        ranks.run(train, 1, settings, cut, at)
        ends.append(ranks.run(with_even_rewards, 1, settings)[0])
    (weights, records), (again, records_again) = ends
    assert records_again == records
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def with_even_rewards(settings: Config) -> Any:
    """Train with a reward of 0 or 1."""
    with mock.patch.object(grpo, "reward", lambda prompt, answer, num_tokens: float(len(answer) % 2)):
        return train(settings)


def with_another_reward(settings: Config) -> Any:
    with mock.patch.object(grpo, "reward", lambda prompt, answer, num_tokens: 0.5):
        return with_another_engine(settings)


def with_another_engine(settings: Config) -> Any:
    def sample(*given: Any) -> list[list[Answer]]:
        raise AssertionError("the answers are on disk")

    with mock.patch.object(TransformersEngine, "sample", sample):
        return train(settings)


def test_rewards_rise(tmp_path: Path, ranks: RankPool) -> None:
    settings = config(tmp_path / "run")
    settings.train.steps, settings.optim.lr, settings.recipe_args.samples, settings.recipe_args.prompts = 14, 0.04, 8, 3
    settings.checkpoint.every = 0
    _, records = ranks.run(train, 1, settings)[0]
    rewards = [one["reward"] for one in records]
    assert rewards[0] < 0.15 and rewards[-1] > 0.5
    assert all(one["engine_gap.same"] == one["engine_gap"] for one in records if not one["routes_differ"])
    assert all(one["engine_gap_max"] < 5e-6 and one["ref_kl"] >= 0 and one["answer_tokens"] <= 6 for one in records)


def test_answers_stay_until_no_checkpoint_goes_on_with_them(tmp_path: Path) -> None:
    """A save in the background is no checkpoint yet, and the newest one may turn out to be damaged."""
    with one_rank("cpu"):
        rollouts = rollouts_of(tmp_path, [[1], [2]])
        rollouts._updates = 3
        for rollout in range(4):
            rollouts.once(rollout, "answers", list)
        kept = {(): 4, (8,): 2, (4, 8): 3, (8, 9): 2, (2,): 4, (12,): 0}
        for steps, number in kept.items():
            folder = tmp_path / f"checkpoints-{len(steps)}-{sum(steps)}"
            for step in steps:
                (folder / f"step-{step}").mkdir(parents=True)
                (folder / f"step-{step}" / "manifest.json").write_text(json.dumps({"step": step}))
            for rollout in range(4):
                rollouts.once(rollout, "answers", list)
            rollouts.forget(folder)
            assert len([*(tmp_path / "rollouts").iterdir()]) == number, steps


def rollouts_of(folder: Path, prompts: list[list[int]], per_step: int = 2) -> Rollouts:
    settings = config(folder)
    settings.recipe_args.prompts = per_step
    return Rollouts(settings, folder, ["" for _ in prompts], prompts, ByteTokenizer())


def test_other_prompts_are_refused_on_a_resume(tmp_path: Path) -> None:
    with one_rank("cpu"):
        first, second, third = (rollouts_of(tmp_path, prompts) for prompts in ([[1], [2]], [[1], [3]], [[1], [3]]))
        second.load_state_dict(third.state_dict())
        with pytest.raises(DataError, match="the prompts are not those that the checkpoint was trained with"):
            second.load_state_dict(first.state_dict())
        for other_recipes in ({"fingerprint": {}, "consumed_rows": 8}, None):  # of pretrain, and of a session
            with pytest.raises(DataError, match="the prompts are not those"):
                second.load_state_dict(other_recipes)  # type: ignore[arg-type]


def drawn_first(rollouts: Rollouts, token: int) -> int:
    groups = rollouts.draw(0, lambda prompts: [[Answer([token], [-1.0])] for _ in prompts])
    return groups[0][0].tokens[0]


def test_answers_of_other_settings_are_drawn_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of another learning rate did not give them; a damaged file is named."""
    with one_rank("cpu"):
        prompts = [[1], [2]]
        assert drawn_first(rollouts_of(tmp_path, prompts), 1) == 1 == drawn_first(rollouts_of(tmp_path, prompts), 2)
        for number, (section, key, value) in enumerate((("optim", "lr", 0.5), ("observe", "sample_tokens", 3)), 3):
            settings = config(tmp_path)
            setattr(getattr(settings, section), key, value)
            other = Rollouts(settings, tmp_path, ["", ""], prompts, ByteTokenizer())
            assert drawn_first(other, number) == number
            assert "answers-00000001.json: of a run with other settings" in capsys.readouterr().out
        [file] = (tmp_path / "rollouts").iterdir()
        unsealed = file.read_bytes().rpartition(b",")[0].replace(b"-1.0", b"-2.0") + b"}"
        for content in (b"", file.read_bytes()[:20], file.read_bytes().replace(b"-1.0", b"-2.0"), unsealed, b"\xff"):
            file.write_bytes(content)
            with pytest.raises(DataError, match="answers-00000001.json cannot be read.*Remove answers-00000001.json"):
                drawn_first(rollouts_of(tmp_path, prompts), 5)
        file.unlink()
        rollouts_of(tmp_path, prompts).once(0, "scores", lambda: [0.5])
        settings = config(tmp_path)
        settings.recipe_args.engine, settings.recipe_args.max_gap = "http://another:8000", 0.2
        moved = Rollouts(settings, tmp_path, ["", ""], prompts, ByteTokenizer())
        assert moved.once(0, "scores", list) == [0.5], "another engine's address makes no other run"
        assert drawn_first(moved, 6) == 6 and moved.once(0, "scores", list) == [], "scores of other answers are gone"


def test_routes_come_back_from_the_disk_as_they_were(tmp_path: Path) -> None:
    routes = torch.tensor([[[3, 0], [299, -1]], [[1, 2], [-1, -1]]], dtype=torch.int64)
    with one_rank("cpu"):
        for _ in range(2):  # drawn, and read again
            [answer, alone], _ = rollouts_of(tmp_path, [[1], [2]]).draw(
                0, lambda _: [[Answer([5, 6], [-1.0, -0.5], routes), Answer([7], [-2.0])], []]
            )
            assert answer.routes is not None and answer.routes.tolist() == routes.tolist()
            assert (alone.tokens, alone.log_probs, alone.routes) == ([7], [-2.0], None)


def test_the_token_that_ends_an_answer_is_no_part_of_its_text() -> None:
    answers = Answer([5, 6, 2], [-1.0] * 3), Answer([5, 2, 6], [-1.0] * 3), Answer([2], [-1.0])
    assert [answer.without_stop([2, 9]) for answer in answers] == [[5, 6], [5, 2, 6], []]


def test_each_prompt_comes_once_an_epoch(tmp_path: Path) -> None:
    with one_rank("cpu"):
        rollouts = rollouts_of(tmp_path, [[n] for n in range(6)], per_step=4)
    drawn = [number for step in range(6) for number in rollouts.numbers(step)]
    epochs = [drawn[at : at + 6] for at in range(0, 24, 6)]
    assert all(sorted(one) == list(range(6)) for one in epochs) and len({tuple(one) for one in epochs}) > 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"samples": 1}, "recipe_args.samples=1: the answers to a prompt are compared"),
        ({"mini_batches": 65}, "recipe_args.mini_batches=65: a rollout has prompts \\* samples = 64 answers"),
        ({"iterations": 0}, "recipe_args.iterations=0: must be larger than 0"),
        ({"teacher": "nowhere"}, "recipe_args.teacher=nowhere: is no folder of a checkpoint"),
        ({"kl": -0.1}, "recipe_args.kl=-0.1: would drive the weights away"),
        ({"sampler": "vllm", "engine": "http://", "replay": False}, "sampler=vllm takes an address"),
        ({"sampler": "sglang", "engine": "ftp://there"}, "sampler=sglang takes an address"),
        ({"temperature": 0.0}, "recipe_args.temperature=0.0: must be larger than 0"),
        ({"sampler": "vllm"}, "sampler=vllm takes an address or a Python with vLLM"),
        ({"sampler": "sglang", "engine": "/usr/bin/python"}, "sampler=sglang takes an address"),
        ({"engine": "http://there:8000"}, "sampler=generate takes none"),
        ({"sampler": "vllm", "engine": "http://there:8000"}, "recipe_args.replay=True: a server of vLLM is not asked"),
    ],
)
def test_settings_that_cannot_work_are_refused(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.recipe_args = GRPOArgs(**args)
    with pytest.raises(ConfigError, match=message):
        check_args(settings)


def test_a_text_model_of_a_wrapper_has_another_engine(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.model.family = "muse_spark_text"
    with pytest.raises(ConfigError, match="recipe_args.sampler=generate: transformers generates with its text model"):
        check_args(settings)
    settings.recipe_args = GRPOArgs(sampler="sglang", engine="http://there:8000")
    check_args(settings)


def test_settings_that_it_would_ignore_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for section, key, value in (
        ("train", "epochs", 2.0),
        ("train", "rampup_batch_size", [4, 4, 8]),
        ("train", "loss", "mine"),
        ("checkpoint", "keep_best", 1),
        ("moe", "record_routing", folder),
        ("moe", "replay_routing", folder),
    ):
        settings = config(tmp_path)
        setattr(getattr(settings, section), key, value)
        with pytest.raises(ConfigError, match=re.escape(f"{section}.{key}={value}: recipe=grpo ") + ".*Leave it out"):
            check_args(settings)


def test_an_engine_with_other_weights_is_refused() -> None:
    """Rounding passes; weights of another step, experts in another order or NaN do not."""
    trainer = [-1.0 - 0.1 * n for n in range(20)]

    def gaps(engine: list[float]) -> dict[str, float]:
        return gaps_of([Answer([], engine[:7]), Answer([], engine[7:])], {"old_log_probs": [trainer]}, 0.1)

    assert [*gaps([p + 0.02 * (-1) ** n for n, p in enumerate(trainer)]).values()] == pytest.approx([0.02, 0.02])
    for engine in ([p - 0.3 for p in trainer], trainer[::-1], [*trainer[1:], float("nan")]):
        with pytest.raises(BackendError, match="nats from the trainer's on average"):
            gaps(engine)


def engine_of_stale_weights(settings: Config) -> None:
    """An engine that was not told of an update, or got its experts in another order."""
    shape = resolve_mesh(settings.mesh, None)
    context = RunContext(0, 1, 0, torch.device("cpu"), Path(settings.run_dir))
    update = TransformersEngine.update

    def scrambled(self: TransformersEngine, stream: WeightStream) -> None:
        update(self, stream)
        for name, tensor in self._model.state_dict().items():
            if "experts" in name:
                tensor.copy_(tensor.flip(0) * 30)

    with mock.patch.object(TransformersEngine, "update", scrambled):
        grpo.main(settings, shape, context)


def test_scrambled_experts_end_the_run(tmp_path: Path, ranks: RankPool) -> None:
    settings = config(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(Exception, match="it has other weights, or computes another model"):
        ranks.run(engine_of_stale_weights, 1, settings)


def test_a_student_learns_the_teachers_answers(tmp_path: Path, ranks: RankPool) -> None:
    """On-policy distillation: the reverse KL to the teacher, here of another shape, falls on the student's answers."""
    teacher = replace(config(tmp_path).model, num_layers=1, num_experts=6)
    settings = config(tmp_path / "run")
    settings.train.steps, settings.optim.lr, settings.observe.sample_tokens, settings.checkpoint.every = 16, 0.03, 2, 0
    settings.recipe_args = GRPOArgs(prompts=2, samples=48, teacher=str(tmp_path / "teacher"))
    ranks.run(export_sharp, 1, teacher, tmp_path / "teacher")
    _, records = ranks.run(train, 1, settings)[0]
    far = [one["teacher_kl"] for one in records]
    assert sum(far[-4:]) / 4 < 0.75 * far[0], far
    assert "ref_kl" not in {k for one in records for k, v in one.items() if v}


def test_prompts_are_answered_in_rollouts_without_validations() -> None:
    settings = compose_config("grpo_small", overrides=["train.val_every=0", "data.val_fraction=0"])
    validate(settings, settings.launch.num_ranks, "cpu")
    with pytest.raises(ConfigError, match="answered after validations"):
        validate(compose_config(overrides=["train.val_every=0", "observe.samples=[a]"]), 4)


def test_a_teacher_has_its_own_stages_and_must_fit_the_mesh(tmp_path: Path) -> None:
    settings = config(tmp_path)
    teacher = replace(settings.model, num_layers=4)
    write_settings(tmp_path, teacher, torch.float32, "none")
    settings.recipe_args = GRPOArgs(teacher=str(tmp_path))
    settings.mesh, settings.parallel.layers_per_stage = MeshConfig(pp=2, dp_shard=1, ep=1), [1, 1]
    settings.moe.capacity_factor = 1.0
    found = teacher_of(settings, 2)
    assert found.model.num_layers == 4 and found.parallel.layers_per_stage is None and found.moe.capacity_factor == 0
    settings.mesh, settings.parallel.layers_per_stage = MeshConfig(pp=1, dp_shard=3, ep=3), None
    with pytest.raises(ConfigError, match=r"recipe_args\.teacher=.*does not run as the student does: .*ep"):
        teacher_of(settings, 3)


def export_sharp(model: ModelConfig, folder: Path) -> None:
    """A model that is sure of few tokens."""
    settings = config(folder.parent / "of_teacher")
    settings.model, settings.train.val_every = model, 1
    part = open_session(settings).state.model_parts[0]
    with torch.no_grad():
        part.head_weight.mul_(40)
    to_hf(part, folder, verify=False)


def test_generate_answers_in_float64(tmp_path: Path, ranks: RankPool) -> None:
    """The grouped products of transformers' experts have none, so its loop over experts answers."""
    settings = config(tmp_path / "run")
    settings.train.dtype, settings.train.steps = "float64", 1
    _, [record] = ranks.run(train, 1, settings)[0]
    assert record["engine_gap_max"] < 1e-6 and record["engine_gap_max"] != 0


def test_experts_without_weights_are_drawn_with_and_replayed(tmp_path: Path, ranks: RankPool) -> None:
    settings = config(tmp_path / "run", ep=2, dp_shard=2)
    settings.model = replace(quick_model("small_longcat"), hidden_size=32, num_layers=2, vocab_size=264)
    settings.train.steps = 2
    _, records = ranks.run(train, 2, settings)[0]
    assert all(0 < record["engine_gap_max"] < 1e-5 and record["routes_differ"] < 0.01 for record in records)
    assert all(record["zero_expert_share"] > 0 for record in records)
