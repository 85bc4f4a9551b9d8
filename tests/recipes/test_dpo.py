"""Preferences are learned as TRL's ``DPOTrainer`` learns them, from a reference that is kept and known again."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from automoe.checkpoint.store import CheckpointStore
from automoe.config.convert import config_from_dict, config_to_dict
from automoe.config.data_schema import DataConfig
from automoe.config.frozen import dump_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    CheckpointConfig,
    Config,
    LoraConfig,
    MeshConfig,
    MoEConfig,
    ObserveConfig,
    OptimConfig,
    TrainConfig,
)
from automoe.data.loader import Loader
from automoe.errors import CheckpointError, ConfigError, DataError
from automoe.export import export_run
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.read import load_hf
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.parallel.pipeline import build_runner
from automoe.passes.trace import listening
from automoe.run.reference import REFERENCE_FILE, Reference, _belongs, _write, open_reference
from automoe.run.run import Run
from automoe.run.weights import load_or_initialize
from automoe.storage.sealed import read_json
from automoe.training.context import RunContext
from automoe.training.preference import PreferenceLoss
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from recipes import dpo, pretrain
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.gpu import one_rank
from tests.support.hf_models import save_small_hf
from tests.support.preference import write_pairs

CPU, PAIRS, BETA = torch.device("cpu"), 12, 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two checkpoints of one shape, a reference and what was trained from it, with a tokenizer; and pairs."""
    folder = tmp_path_factory.mktemp("dpo")
    for seed, name in enumerate(("reference", "policy")):
        torch.manual_seed(seed)
        save_small_hf("qwen3_moe", folder / name, seed=seed, other_sizes={"vocab_size": 304, "num_hidden_layers": 2})
        save_tokenizer(folder / name, "returns")  # an answer ends in its stop token, and nothing follows
    write_pairs(folder / "pairs.jsonl", PAIRS)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")):
        yield folder


def config_of(folder: Path) -> Config:
    return Config(
        run_dir=str(folder),
        recipe="dpo",
        mesh=MeshConfig(dp_shard=1),
        model=replace(model_config_from_hf(folder / "reference"), hf_path=str(folder / "reference")),
        moe=MoEConfig(experts="loop"),
        # Every pair in one step: three rows and micro-batches of some of them.
        train=TrainConfig(seq_len=256, global_batch_size=4, micro_batch_size=2, dtype="float64", val_every=0),
        optim=OptimConfig(lr=1e-3, warmup_steps=0),
        data=DataConfig(kind="preference", path=str(folder / "pairs.jsonl"), on_long="error", val_fraction=0.0),
    )


class OneRank:
    """What a recipe builds, on one rank."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, shape = config, resolve_mesh(config.mesh, None)
        self.store = CheckpointStore(config, shape, run_dir)
        self.meshes = build_meshes(shape, CPU)
        self.parts = build_parts(config, self.meshes)
        load_or_initialize(self.parts, config, CPU)
        self.runner = build_runner(self.parts, self.meshes, config, CPU)
        self.loader = Loader(config, 0, 1, pairs=True)
        self.context = RunContext(0, 1, 0, CPU, run_dir)

    def reference(self) -> Reference:
        found = open_reference(self.config, self.runner, self.loader, self.meshes, self.context, self.store)
        assert found is not None
        return found


def our_step(folder: Path, kind: str, spoil: float = 0.0) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, what it reports and gradients of the weights in ``policy`` against those in ``reference``."""
    config = config_of(folder)
    with one_rank("cpu"):
        made = OneRank(config, folder / "unkept")
        made.context.run_dir.mkdir(exist_ok=True)
        reference = made.reference()
        reference.log_probs[3, 0] += spoil
        load_hf(made.parts, folder / "policy")
        made.runner.set_loss(PreferenceLoss(BETA, kind))
        [batch] = made.loader.every_pair("train")
        assert sorted(batch.pairs[batch.pairs >= 0].tolist()) == list(range(PAIRS))
        inputs, _ = prepare_inputs(batch, made.meshes, config, CPU)
        loss = float(made.runner.train(inputs | reference.inputs(batch)))
        reported = {name: float(share) for name, share in made.runner.take_reported().items()}
        return loss, reported, {name: whole(p.grad) for name, p in named_parameters(made.parts).items()}


def our_name(name: str) -> str:
    """The parameter of ours that holds what ``transformers`` calls ``name``."""
    experts = {
        "mlp.gate.weight": "mlp.router.weight",
        "gate_up_proj": "gate_up_proj",
        "experts.down_proj": "experts.down_proj",
    }
    for theirs, ours in experts.items():
        name = name.replace(theirs, ours)
    return name.removeprefix("model.")


def trls_step(folder: Path, kind: str) -> tuple[float, dict[str, float], dict[str, torch.Tensor], list[list[int]]]:
    """The same from ``DPOTrainer``, all pairs at once; and the tokens of every sequence, its prompt as negative ids."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, experts_implementation="eager")
        for name in ("policy", "reference")
    )
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    args = DPOConfig(
        output_dir=str(folder / "trl"),
        beta=BETA,
        loss_type=[kind],
        max_length=None,
        per_device_train_batch_size=PAIRS,
        activation_checkpointing=False,
        router_aux_loss_coef=0.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    trainer = DPOTrainer(policy, reference, args, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    inputs = next(iter(trainer.get_train_dataloader()))
    policy.train()
    loss = trainer.compute_loss(policy, inputs)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    gradients = {our_name(name): parameter.grad for name, parameter in policy.named_parameters()}
    signed = torch.where(inputs["completion_mask"] == 1, inputs["input_ids"], -1 - inputs["input_ids"])
    sequences = [ids[mask == 1].tolist() for ids, mask in zip(signed, inputs["attention_mask"], strict=True)]
    return float(loss.detach()), metrics, gradients, sequences


def our_sequences(folder: Path) -> list[list[int]]:
    """Every sequence of the pairs in rows, its prompt as negative ids."""
    loader = Loader(config_of(folder), 0, 1, pairs=True)
    [batch] = loader.every_pair("train")
    found = []
    for tokens, labels, doc_ids in zip(batch.tokens, batch.labels, batch.doc_ids, strict=True):
        generated = torch.cat([torch.tensor([False]), labels[:-1] >= 0])
        signed = torch.where(generated, tokens, -1 - tokens)
        found += [signed[doc_ids == number].tolist() for number in range(int(doc_ids.max()) + 1)]
    return found


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_tokens_loss_rewards_and_gradients_are_trls(folder: Path, kind: str) -> None:
    loss, reported, gradients = our_step(folder, kind)
    theirs, their_metrics, their_gradients, sequences = trls_step(folder, kind)
    assert sorted(our_sequences(folder)) == sorted(sequences)
    assert loss == pytest.approx(theirs, rel=1e-5)
    assert reported == pytest.approx({name: their_metrics[name] for name in reported}, rel=1e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, expected in their_gradients.items():
        difference = gradients[name].view_as(expected) - expected
        assert difference.norm() <= 1e-5 * expected.norm() > 0, name
    assert our_step(folder, kind, spoil=0.5)[0] != pytest.approx(theirs, rel=1e-3)  # a wrong reference is seen


def test_the_reference_is_kept_and_known_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Computed once; a file that is damaged, or of other weights or data, is said and never used."""
    file = tmp_path / REFERENCE_FILE
    with one_rank("cpu"):
        made = OneRank(config_of(folder), tmp_path)
        first = made.reference().log_probs
        assert "one pass over 12 pairs" in capsys.readouterr().out
        assert first.shape == (PAIRS, 2) and (first < 0).all()
        written = file.read_bytes()
        load_hf(made.parts, folder / "policy")  # as a resumed run has other weights by now
        assert torch.equal(made.reference().log_probs, first) and capsys.readouterr().out == ""

        load_hf(made.parts, folder / "reference")
        place = written.index(b"log_probs") + 20
        flipped = written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :]
        without_seal = json.dumps(
            {**read_json(file), "log_probs": base64.b64encode(bytes(16 * PAIRS)).decode()}
        ).encode()
        for damaged in (flipped, written[:-40], b"", b"[]", without_seal):
            file.write_bytes(damaged)
            assert torch.equal(made.reference().log_probs, first)
            assert "warning" in (said := capsys.readouterr().out) and "damaged" in said
            assert file.read_bytes() == written
        for section, changed in (("model", {"hf_path": str(folder / "policy")}), ("train", {"dtype": "float32"})):
            other = replace(made.config, **{section: replace(getattr(made.config, section), **changed)})
            foreign = OneRank(other, tmp_path)
            assert not torch.allclose(foreign.reference().log_probs, first, rtol=1e-12)
            assert "it belongs to other" in capsys.readouterr().out
        file.write_bytes(written)
        made.loader.config = replace(made.config, train=replace(made.config.train, seed=7))
        made.reference()
        assert "it belongs to other data" in capsys.readouterr().out
        file.unlink()
        file.mkdir()
        with pytest.raises(IsADirectoryError, match="it is a folder, where a file belongs"):  # before the pass
            made.reference()


# Each setting that changes what the weights say of a pair, and settings that do not.
BELONGS = {
    "train.dtype": "float32",
    "train.fp8": "tensorwise",
    "optim.master_weights": "stochastic",
    "lora.base": "nf4",
    "moe.gate": "balanced",
    "moe.dispatch_dtype": "fp8",
    "moe.router_dtype": "bfloat16",
    "moe.capacity_factor": 1.0,
    "moe.drop_policy": "position",
    "moe.drop_scope": "sequence",
    "model.norm_eps": 1e-3,
    "model.rope.theta": 5000.0,
    "train.val_every": 1,
    "train.seq_len": 320,
    "data.val_fraction": 0.3,
}
FREE = {
    "moe.router_jitter": 0.1,
    "moe.z_loss_coef": 0.1,
    "moe.dispatcher": "allgather",
    "optim.lr": 0.1,
    "train.micro_batch_size": 1,
    "lora.rank": 2,
    "recipe_args.beta": 0.7,
    "parallel.recompute": ["moe"],
}


def test_the_reference_belongs_to_each_setting_that_changes_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def belongs(changed: dict[str, object]) -> dict[str, object]:
        content = config_to_dict(replace(config_of(folder), recipe_args=dpo.Args()))
        content["data"]["val_fraction"] = 0.2
        for key, value in changed.items():
            *sections, last = key.split(".")
            place = content
            for section in sections:
                place = place[section]
            assert place[last] != value
            place[last] = value
        config = config_from_dict(content)
        loader, meshes = Loader(config, 0, 1, pairs=True), build_meshes(resolve_mesh(config.mesh, None), CPU)
        splits = ["train", "validation"] if config.train.val_every else ["train"]
        return _belongs(config, "crc32:0", loader, splits, meshes)

    names = {"train.val_every": "splits", "train.seq_len": "data", "data.val_fraction": "data"}
    with one_rank("cpu"):
        plain = belongs({})
        for key, value in BELONGS.items():
            other = belongs({key: value})
            assert [name for name in plain if plain[name] != other[name]] == [names.get(key, key)]
        assert [key for key, value in FREE.items() if belongs({key: value}) != plain] == []
        # A capacity counts the tokens of a rank.
        dropping = {"moe.capacity_factor": 1.0}
        assert belongs(dropping | {"train.micro_batch_size": 1}) != belongs(dropping)

        # The reference of another gate is not taken: the first loss is log 2 all the same.
        balanced, packed = MoEConfig(experts="loop", gate="balanced"), LoraConfig(rank=2, base="nf4")
        for moe, lora in ((balanced, LoraConfig()), (MoEConfig(experts="loop"), packed)):
            plain_run = OneRank(config_of(folder), tmp_path)
            plain_run.reference()
            capsys.readouterr()
            config = replace(config_of(folder), moe=moe, lora=lora)
            made = OneRank(replace(config, train=replace(config.train, dtype="float32")), tmp_path)
            reference = made.reference()
            assert "it belongs to other" in capsys.readouterr().out
            made.runner.set_loss(PreferenceLoss(BETA, "sigmoid"))
            [batch] = made.loader.every_pair("train")
            inputs, _ = prepare_inputs(batch, made.meshes, config, CPU)
            assert float(made.runner.evaluate(inputs | reference.inputs(batch))) == pytest.approx(math.log(2))


@pytest.mark.exhaustive
def test_a_resume_knows_the_reference_of_its_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other starting weights are refused before anything is written; an exchanged file is said."""
    base = tmp_path / "base"
    shutil.copytree(folder / "reference", base)
    config = replace(
        config_of(folder),
        recipe_args=dpo.Args(beta=0.5),
        checkpoint=CheckpointConfig(every=1, export_hf=False, keep=9),
        observe=ObserveConfig(report=False),
    )
    config = replace(config, model=replace(config.model, hf_path=str(base)))

    def train(run_dir: Path, steps: int, config: Config = config) -> list[float]:
        run_dir.mkdir(exist_ok=True)
        config = replace(config, run_dir=str(run_dir), train=replace(config.train, steps=steps))
        with one_rank("cpu"):
            dpo.main(config, resolve_mesh(config.mesh, None), RunContext(0, 1, 0, CPU, run_dir))
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    # One schedule for all: a constant rate.
    config.optim.schedule = "constant"
    whole = train(tmp_path / "whole", 3)
    run_dir = tmp_path / "run"
    assert train(run_dir, 2) == whole[:2]
    file = run_dir / REFERENCE_FILE
    kept = file.read_bytes()

    weights, others = base / "model.safetensors", (folder / "policy" / "model.safetensors").read_bytes()
    right = weights.read_bytes()
    weights.write_bytes(others)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=f"fixed weights of {base}, .*another checkpoint"):
        train(run_dir, 3)
    # Nor where the run goes on elsewhere, without a reference there.
    elsewhere = replace(config, checkpoint=replace(config.checkpoint, resume=str(run_dir)))
    with pytest.raises(CheckpointError, match="another checkpoint"):
        train(tmp_path / "elsewhere", 3, elsewhere)
    other_data = replace(config, data=replace(config.data, val_fraction=0.3))
    weights.write_bytes(right)
    with pytest.raises(DataError, match="data.val_fraction was 0.0, is 0.3"):
        train(run_dir, 3, other_data)
    assert file.read_bytes() == kept and "one pass" not in capsys.readouterr().out

    # The right seal, the right name of what it belongs to, other numbers.
    content = json.loads(kept)
    values = np.frombuffer(base64.b64decode(content["log_probs"])).reshape(PAIRS, 2) - 1.0
    file.unlink()
    _write(file, content["belongs"], values * [1, 0.5])
    assert train(run_dir, 3) == whole
    assert "it is not the one that" in (said := capsys.readouterr().out) and "step-2" in said
    assert file.read_bytes() == kept

    branched = replace(elsewhere, recipe_args=dpo.Args(beta=0.1))
    train(tmp_path / "branched", 4, branched)
    said = capsys.readouterr().out
    assert "was trained with recipe_args.beta=0.5, train.steps=3; it goes on with recipe_args.beta=0.1" in said


def test_a_step_without_steps_starts_at_log_two_and_counts_padding_rows_for_nothing(
    folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder)
    with one_rank("cpu"):
        made = OneRank(config, tmp_path)
        reference = made.reference()
        made.runner.set_loss(PreferenceLoss(BETA, "sigmoid"))
        [batch] = made.loader.every_pair("train")
        assert (batch.pairs == -1).all(1).any() and (batch.pairs == -1).any(1).sum() > 1
        inputs, _ = prepare_inputs(batch, made.meshes, config, CPU)
        loss = made.runner.evaluate(inputs | reference.inputs(batch))
        reported = made.runner.take_reported()
    assert float(loss) == pytest.approx(0.6931471805599453, abs=1e-12)
    assert float(reported["rewards/margins"]) == 0 and float(reported["rewards/accuracies"]) == 0


def test_a_start_from_a_run_over_other_data_is_refused_before_the_pass(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it is the run's own directory; and what the error says to do is a start."""
    pairs = config_of(folder)
    chats = write_chat(tmp_path / "chats.jsonl", [messages(f"{n}?", "yes") for n in range(8)])
    kept = CheckpointConfig(every=1, export_hf=False)
    once = replace(pairs.train, steps=1)
    tuned = replace(
        pairs,
        recipe="pretrain",
        run_dir=str(tmp_path / "tuned"),
        data=replace(pairs.data, kind="chat", path=str(chats)),
        train=once,
        checkpoint=kept,
        observe=ObserveConfig(report=False),
    )
    asked = replace(tuned, recipe="dpo", data=pairs.data, recipe_args=dpo.Args())

    def main(recipe: Any, config: Config, run_dir: Path) -> str:
        run_dir.mkdir(exist_ok=True)
        recipe.main(
            replace(config, run_dir=str(run_dir)), resolve_mesh(config.mesh, None), RunContext(0, 1, 0, CPU, run_dir)
        )
        return capsys.readouterr().out

    with one_rank("cpu"):
        with mock.patch.object(Run, "describe_start"):  # a recipe of one's own may leave it out
            said = main(pretrain, tuned, tmp_path / "tuned")
        (tmp_path / "tuned" / "config.yaml").write_text(dump_config(tuned))
        assert "8 conversations, 8 answers" in said
        fewer = replace(tuned, data=replace(tuned.data, val_fraction=0.25))
        with mock.patch.object(pretrain, "load_or_initialize", side_effect=AssertionError("weights were read")):
            with pytest.raises(DataError, match=r"data.val_fraction was 0.0, is 0.25.*automoe export RUN --out DIR"):
                main(pretrain, fewer, tmp_path / "tuned")
        for name, resume in (("new", str(tmp_path / "tuned")), ("tuned", "auto")):
            other = replace(asked, checkpoint=replace(kept, resume=resume))
            with pytest.raises(DataError, match=r"data.kind was chat, is preference.*automoe export RUN --out DIR"):
                main(dpo, other, tmp_path / name)
            assert "one pass over" not in capsys.readouterr().out
            assert not (tmp_path / name / REFERENCE_FILE).exists()
        hf = export_run(tmp_path / "tuned", tmp_path / "hf").path
        begun = main(dpo, replace(asked, model=replace(asked.model, hf_path=str(hf))), tmp_path / "begun")
    assert "one pass over 12 pairs" in begun and "12 pairs of answers" in begun


def run_rank(config: Config, stop_after: int, cache: str) -> None:
    rank, run_dir = torch.distributed.get_rank(), Path(config.run_dir)
    context = RunContext(rank, torch.distributed.get_world_size(), rank, CPU, run_dir)

    def ask(name: str, step: int | None, edge: str) -> None:
        if (name, step, edge) == ("forward_backward", stop_after, "end"):
            context.stop.set()

    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=cache),
        (run_dir / f"said{rank}").open("a") as file,
        contextlib.redirect_stdout(file),
        listening(ask),
    ):
        dpo.main(config, resolve_mesh(config.mesh, None), context)


@pytest.mark.faults
def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """Also where its reference was damaged meanwhile, and on weights that come from adapters."""
    records = []
    for name in ("whole", "stopped"):
        config = config_of(folder)
        config = replace(
            config,
            run_dir=str(tmp_path / name),
            recipe_args=dpo.Args(beta=0.5),
            mesh=MeshConfig(dp_shard=2, ep=2),
            lora=LoraConfig(rank=2),
            checkpoint=CheckpointConfig(every=2, export_hf=False),
            train=replace(config.train, steps=5, micro_batch_size=1, val_every=2),
            data=replace(config.data, val_fraction=0.2),
            observe=ObserveConfig(report=False, samples=["0?"], sample_tokens=2),
        )
        Path(config.run_dir).mkdir()
        cache, reference = str(folder / "cache"), Path(config.run_dir) / REFERENCE_FILE
        if name == "stopped":
            ranks.run(run_rank, 2, config, 3, cache)
            assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 3
            kept = reference.read_bytes()
            ranks.run(run_rank, 2, config, 4, cache)
            reference.write_bytes(kept.replace(b"log_probs", b"log_prob5"))
        ranks.run(run_rank, 2, config, 0, cache)
        said = (tmp_path / name / "said0").read_text()
        assert said.count("one pass over 12 pairs") == (2 if name == "stopped" else 1)
        assert name == "whole" or (reference.read_bytes() == kept and "it is damaged" in said)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        wanted = ("loss", "grad_norm", *PreferenceLoss.metrics)
        records.append([[record[key] for key in wanted] for record in map(json.loads, lines)])
    assert len(records[0]) == 5 and records[0] == records[1]
    assert records[0][0][0] == pytest.approx(math.log(2), rel=1e-12) and records[0][4][0] != records[0][3][0]


def test_another_loss_beside_that_of_the_recipe_is_refused(folder: Path) -> None:
    config = config_of(folder)
    config.train.loss = "focal"
    with pytest.raises(ConfigError, match="train.loss=focal: recipe=dpo has its own loss"):
        dpo.Args().check(config)
