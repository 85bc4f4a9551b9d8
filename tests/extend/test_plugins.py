"""What docs/extend.md says can be added from outside the package, really added: every block of it is run."""

from __future__ import annotations

import copy
import csv
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import automoe
from automoe.classes.model import TransformersModel
from automoe.config import plugins
from automoe.config.compose import compose_config
from automoe.config.frozen import load_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.plugins import register
from automoe.config.rules import Row
from automoe.config.schema import Config, ModelConfig, MoEConfig, TrainConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.hf.families.family import Family
from automoe.hf.families.registry import known_families
from automoe.model.backend import BackendConfig
from automoe.model.causal_lm import CausalLM
from automoe.model.decoder import Decoder
from automoe.model.loss import LossInputs
from automoe.model.params import Param, count_params, model_params
from automoe.observe.metrics import read_metrics
from automoe.parallel.choices import build_backend
from automoe.parallel.parallelize import build_decoder
from automoe.run.hooks import hook_numbers
from automoe.verify.pool import RankPool
from automoe.verify.proxy import make_proxy
from automoe.verify.run import passes
from tests.support.class_models import against_class, save_class, tier_config
from tests.support.expert_parallel import tiny_model, worst_difference

ROOT = Path(automoe.__file__).parents[1]
PAGE = ROOT / "docs" / "extend.md"
TINY = ["train.steps=3", "train.seq_len=32", "train.global_batch_size=4", "train.val_every=0", "observe.report=false"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every block of docs/extend.md as the file that it names, and texts."""
    folder = tmp_path_factory.mktemp("page")
    blocks = re.findall(r"^```(\w*)\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == PAGE.read_text().count("\n```\n") and {kind for kind, _, _ in blocks} == {"python"}
    for _, name, text in blocks:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "texts").mkdir()
    rows = [{"id": i, "body": f"line {i} of a text, said {'again and ' * (i % 5)}again"} for i in range(200)]
    with (folder / "texts" / "lines.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "body"])
        writer.writeheader()
        writer.writerows(rows)
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered until the end of the test is forgotten."""
    monkeypatch.setattr(plugins, "_registered", {key: {} for key in plugins.KINDS})


@pytest.fixture
def house(page: Path, nothing_registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's plugin is loaded, and nothing else is registered."""
    monkeypatch.syspath_prepend(page)
    monkeypatch.delitem(sys.modules, "house", raising=False)
    plugins.load_plugins(["house"])


def python(folder: Path, *words: str, **options: str) -> str:
    """Run Python in ``folder``, with nothing of this process's paths but automoe; what it printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# As in a notebook: no file, and a standard output that is none.
CELL = """
import io, sys, time
import automoe.train
from automoe import train
assert train is automoe.train and "torch" not in sys.modules
terminal, sys.stdout = sys.stdout, io.StringIO()
source = open("my_script.py").read()
exec(compile(source, "<cell>", "exec"))
text, sys.stdout = sys.stdout.getvalue(), terminal
try:
    train(["mesh.ep=3", "launch.num_ranks=2"])
except automoe.errors.ConfigError as error:
    text += f"refused: {error}"
print(text)
"""


@pytest.fixture(scope="module")
def from_python(page: Path) -> tuple[Path, str]:
    """The script of the page, run as a cell: the run's directory, and what it printed."""
    said = python(page, input=CELL)
    [run_dir] = (page / "runs").glob("default-*")
    return run_dir, said


@pytest.mark.exhaustive
def test_every_block_of_the_page_in_one_run_that_equals_one_with_what_is_built_in(
    page: Path, from_python: tuple[Path, str]
) -> None:
    """Same numbers from the page's recipe on automoe's own parts as from its loop on the page's parts."""
    words = ["recipe=my_recipe.py", "recipe_args.file=own.txt", "moe.experts=loop", "run_dir=own", *TINY]
    words += ["train.steps=2", "train.dtype=float64", "mesh.pp=1", "mesh.ep=2", "launch.num_ranks=2"]
    python(page, "-m", "automoe.train", *words, "data.kind=jsonl", "data.path=lines.jsonl", "data.text_key=body")
    own = [list(map(float, line.split())) for line in (page / "own" / "own.txt").read_text().splitlines()]
    theirs = read_metrics(from_python[0])
    assert len(own) == len(theirs) == 2
    for (loss, grad_norm), record in zip(own, theirs, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-12)
        assert record["grad_norm"] == pytest.approx(grad_norm, rel=1e-10)
        assert record["unsure"] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"alone does not make automoe import code.*--plugins house"):
        load_config(from_python[0])  # as `automoe export` does


@pytest.mark.exhaustive
def test_what_a_plugin_measures_is_in_the_record_and_the_tracker(
    page: Path, from_python: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, said = from_python
    first, last = read_metrics(run_dir)
    assert 0.05 < first["largest_weight"] < 10 and "val_gap" not in first
    assert last["val_gap"] == last["val_loss"] - last["loss"]
    assert (run_dir / "saved.txt").read_text() == "step-2\n"
    assert said.count("the largest of all came to an end at step 2") == 1
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(str(page / "tracked"))
    [run] = client.search_runs([client.get_experiment_by_name("automoe").experiment_id])
    assert run.data.metrics["largest_weight"] == last["largest_weight"] and run.info.status == "FINISHED"
    assert run.info.run_name == run_dir.name and run.data.tags["small"] == "true"


@pytest.mark.exhaustive
def test_a_cell_prints_what_rank_0_prints_and_holds_its_result(from_python: tuple[Path, str]) -> None:
    run_dir, said = from_python
    first, last = read_metrics(run_dir)
    assert said.index("starting 2 ranks on cpu") < said.index("step") < said.index(f"{last['loss']} {last['val_loss']}")
    assert f"{run_dir} {run_dir / 'hf'}" in said and (run_dir / "hf" / "config.json").exists()
    assert "refused: mesh." in said


def difference_of_the_page() -> float:
    page = importlib.import_module("parallel_experts")
    whole = tiny_model("qwen3_moe")
    model = copy.deepcopy(whole)
    page.shard_experts(model)
    return worst_difference(model, whole)


@pytest.mark.exhaustive
def test_expert_parallelism_of_the_page_equals_one_process(
    page: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(page)
    assert ranks.run(difference_of_the_page, 4)[0] < 1e-12


@pytest.mark.exhaustive
def test_a_recipe_from_outside_trains_as_the_shipped_one(page: Path) -> None:
    words = [*TINY, "mesh.pp=1", "mesh.ep=2", "launch.num_ranks=2", "data.kind=text", "data.path=texts/lines.csv"]
    python(page, "-m", "automoe.train", *words, "run_dir=shipped", "checkpoint.export_hf=false")
    python(page, "-m", "automoe.train", *words, "run_dir=mine", "recipe=my_recipe.py")
    lines = (page / "mine" / "losses.txt").read_text().splitlines()
    assert [float(line.split()[0]) for line in lines] == [record["loss"] for record in read_metrics(page / "shipped")]


@pytest.mark.usefixtures("house")
def test_experts_from_outside_compute_a_class_of_transformers(tmp_path: Path) -> None:
    """If they are SwiGLU of two stacks; a class with others is refused."""
    for model_type in ("flex_olmo", "nemotron_h"):
        save_class(model_type, tmp_path / model_type)
    made, worst = against_class(tier_config(tmp_path / "flex_olmo"), "bmm")
    assert worst <= 1e-10 and made.experts_by.endswith(" bmm")
    with pytest.raises(ConfigError, match="NemotronHExperts is not SwiGLU of two stacks, which bmm multiplies"):
        TransformersModel(tier_config(tmp_path / "nemotron_h"), MoEConfig(experts="bmm"))


@pytest.mark.usefixtures("house")
def test_a_family_from_outside_is_read_and_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 12}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 40, "moe_intermediate_size": 16, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2}
    sizes |= {"topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None}
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("dots1", **sizes)).eval()
    for name, buffer in hf.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    hf.save_pretrained(tmp_path / "hf")
    model = automoe.from_hf(tmp_path / "hf")
    tokens = torch.randint(96, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf(tokens).logits, rtol=1e-4, atol=1e-5)
    automoe.to_hf(model, tmp_path / "again")  # compared with transformers before it is called written
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["model_type"] == "dots1"


class Narrow(Family):
    """A family whose models are a part of the decoder, under a table and a rule of its own."""

    resizable = False
    repeats_routing = False

    def rows(self, config: Config, shape: MeshShape) -> list[Row]:
        return [("mesh.tp", shape.tp > 1, f"{config.model.num_layers} narrow layers", "Set mesh.tp=1")]

    def params(self, model: ModelConfig, buffers: bool) -> list[Param]:
        return [
            param for param in model_params(replace(model, family="qwen3_moe"), buffers) if ".experts." in param.name
        ]

    def build(self, model: ModelConfig, moe: MoEConfig, backend: BackendConfig | None) -> CausalLM:
        with torch.device("meta"):
            return Decoder(model, moe, range(1), embeds=False, predicts=False, backend=backend)


@pytest.mark.usefixtures("nothing_registered")
def test_a_family_from_outside_may_say_who_computes_its_models() -> None:
    """Rules, table and model are those of the family, through the functions that the trainer and the planner call."""
    register("model.family", "narrow", Narrow("narrow", "NarrowForCausalLM", {}, {}))
    config = compose_config(overrides=["model.family=narrow", "mesh.pp=1", "mesh.ep=1"])
    assert validate(config, 1).world_size == 1 and known_families()["narrow"].of(config.model).resizable is False
    with pytest.raises(ConfigError, match="mesh.tp=2: 4 narrow layers"):
        validate(compose_config(overrides=["model.family=narrow", "mesh.pp=1", "mesh.ep=1", "mesh.tp=2"]), 2)
    experts = count_params(replace(config.model, family="qwen3_moe")).by_part["routed_experts"]
    assert count_params(config.model).total == experts
    built = build_decoder(config.model, config.moe, torch.float32)
    assert [unit.number for unit in built.units()] == [0]
    assert make_proxy(config, validate(config, 1), 300)[0].model == config.model
    [only] = passes(config)
    assert only.train.dtype == "float64"


@pytest.mark.parametrize(
    ("key", "name", "rule"),
    [("moe.experts", "loop", "automoe itself uses this name"), ("optim.lr", "mine", "nothing can be registered")],
)
def test_names_that_cannot_be_registered(key: str, name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        register(key, name, object())


@pytest.mark.usefixtures("nothing_registered")
def test_two_packages_cannot_register_one_name() -> None:
    register("moe.experts", "mine", "a:b")
    register("moe.experts", "mine", "a:b")
    with pytest.raises(ConfigError, match="registered already"):
        register("moe.experts", "mine", "c:d")


@pytest.mark.usefixtures("nothing_registered")
def test_a_name_stays_registered_after_its_first_use() -> None:
    register("moe.experts", "mine", "math:sqrt")
    assert plugins.registered("moe.experts")["mine"](4) == 2
    register("moe.experts", "mine", "math:sqrt")


@pytest.mark.usefixtures("nothing_registered")
def test_a_family_is_registered_under_its_model_type(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(page)
    register("model.family", "dots", "house.dots1:FAMILY")
    with pytest.raises(ConfigError, match="model_type=dots1"):
        known_families()


@pytest.mark.parametrize(
    "metrics",
    ["loss", "lr", "loss_ema", "loss.code", "perplexity", "bits_per_byte", "val_mine", "crc32", "skip_reason"],
)
@pytest.mark.usefixtures("nothing_registered")
def test_a_loss_that_reports_under_a_name_of_the_record_is_refused_where_it_is_chosen(metrics: str) -> None:
    def mine(nll_BS: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        return nll_BS.sum()

    register("train.loss", "mine", mine)
    config, mine.metrics = Config(train=TrainConfig(loss="mine")), ("nats", "count", "bytes", metrics)
    with pytest.raises(ConfigError, match=f"train.loss=mine: it reports '{metrics}'"):
        build_backend(config)
    mine.metrics = ("nats", "count", "bytes")  # of a validation's sums, and of no record
    assert build_backend(config).loss is mine
    mine.mean_over = "samples"
    with pytest.raises(ConfigError, match="a mean over tokens or documents"):
        build_backend(config)


@pytest.mark.usefixtures("nothing_registered")
def test_a_number_of_a_step_cannot_have_a_name_that_other_steps_have() -> None:
    register("run.step", "early", lambda run, record: {"val_loss": 0.0})
    with pytest.raises(ConfigError, match="'val_loss' is in the record already"):
        hook_numbers(None, {"step": 1, "loss": 2.0})  # which was not validated


def test_a_plugin_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="no_such_package"):
        compose_config(overrides=["plugins=[no_such_package]"])


def test_names_of_plugins_are_refused_where_the_plugin_was_not_asked_for() -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        compose_config(overrides=["moe.experts=bmm"])
