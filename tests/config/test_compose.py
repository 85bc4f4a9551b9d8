from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from automoe.config.compose import Arguments, compose_config, list_groups, list_options, parse_arguments
from automoe.config.convert import config_from_dict, config_to_dict, leaf_keys
from automoe.config.frozen import dump_config, frozen_shape, load_config, parse_config, resolved, save_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, tokenizer_of
from automoe.config.shipped import shipped_folder
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.hf.families.registry import family_of
from automoe.launch.prepare import compose


def test_a_primary_of_the_users_own_folder_wins_over_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: [base, model: small_qwen3_moe, _self_]\ntrain: {steps: 7}\n")
    own = compose_config("config", config_dir=str(tmp_path))
    assert (own.train.steps, own.model.family) == (7, "qwen3_moe")
    assert compose_config("config").train.steps != 7


def error_of(*overrides: str, config_name: str = "config", config_dir: str | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose_config(config_name, list(overrides), config_dir)
    return caught.value


def test_the_default_is_the_small_deepseek_on_both_meshes() -> None:
    config = compose_config()
    shape = validate(config, config.launch.num_ranks)
    assert (shape.describe("default"), shape.describe("moe")) == ("pp2 x dp_shard2", "pp2 x ep2")
    assert config.model.family == "deepseek_v3" and config.model.attention.kind == "mla"
    assert config.model.router.expert_bias and config.model.first_k_dense == 1
    assert config.data.kind == "stdlib" and tokenizer_of(config) == "byte"


@pytest.mark.parametrize("name", list_options())
def test_every_primary_composes_and_validates(name: str, tmp_path: Path) -> None:
    config = compose_config(name)
    if teacher := getattr(config.recipe_args, "teacher", None):  # an export of another run, which is looked for
        with pytest.raises(ConfigError, match=f"recipe_args.teacher={teacher}: is no folder of a checkpoint"):
            validate(config, config.launch.num_ranks, "cpu")
        (tmp_path / "config.json").write_text("{}")
        config = compose_config(name, overrides=[f"recipe_args.teacher={tmp_path}"])
    assert validate(config, config.launch.num_ranks, "cpu").world_size >= 1


def test_what_primaries_share_is_no_primary() -> None:
    assert "dsv3_671b" in list_options() and not any(name.startswith("_") for name in list_options())
    with pytest.raises(ConfigError, match="no such primary configuration"):
        compose_config("_large")


def test_the_flagship_is_1024_ranks() -> None:
    config = compose_config("dsv3_671b")
    shape = validate(config, None)
    assert shape.world_size == 1024 and shape.ep == 64 and shape.pp == 16 and shape.tp == 1


SMALL = [name for name in list_options("model") if name.startswith("small")]
MESHES = [
    name for name in list_options("mesh") if not name.startswith(("paper_", "tuned_", "steady_", "overlap_", "first_"))
]


@pytest.mark.one_in(40)
@pytest.mark.parametrize(
    ("model", "mesh"), list(product(SMALL, MESHES)), ids=map("-".join, list(product(SMALL, MESHES)))
)
def test_every_small_model_fits_every_mesh_group(model: str, mesh: str) -> None:
    config = compose_config(overrides=[f"model={model}", f"mesh={mesh}"])
    if config.model.attention.linear_num_key_heads:  # a delta net's state runs through the whole row
        config.data.document_mask = False
    if config.model.family == "muse_spark_text":  # whose export needs a checkpoint to start from
        config.checkpoint.export_hf = False
    refused = {("small_dsv4", "cp2_ep4"): "mesh.cp=2", ("small_muse", "tp_ep_dp"): "mesh.etp=2"}.get((model, mesh))
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        assert validate(config, 4).world_size == 4


@pytest.mark.one_in(6)
@pytest.mark.parametrize("group", [group for group in list_groups() if group not in ("model", "mesh")])
def test_every_option_of_every_group_composes(group: str) -> None:
    for option in list_options(group):
        compose_config(overrides=[f"{group}={option}"])


@pytest.mark.parametrize("option", list_options("checkpoint"))
def test_an_option_that_is_chosen_is_not_undone_by_the_primary(option: str) -> None:
    file = shipped_folder("conf") / "checkpoint" / f"{option}.yaml"
    found = config_to_dict(compose_config(overrides=[f"checkpoint={option}"]))["checkpoint"]
    assert found == found | yaml.safe_load(file.read_text())


def test_overrides_win_over_groups_and_experiments_over_primaries() -> None:
    config = compose_config(overrides=["experiment=smoke", "optim=large", "optim.lr=1e-4", "train.steps=7"])
    assert (config.train.steps, config.train.seq_len, config.launch.num_ranks) == (7, 64, 1)
    assert (config.optim.lr, config.optim.warmup_steps) == (1e-4, 2000)


def test_a_directory_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base, {model: wide}, _self_]\ntrain: {steps: 9}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "wide.yaml").write_text("hidden_size: 512\n")
    config = compose_config("mine", ["optim.eps=1e-9"], str(tmp_path))
    assert (config.train.steps, config.model.hidden_size, config.optim.eps) == (9, 512, 1e-9)
    (tmp_path / "bad.yaml").write_text("defaults: [base, _self_]\ntrain: {stepz: 9}\n")
    error = error_of(config_name="bad", config_dir=str(tmp_path))
    assert (error.key, error.value) == ("train.stepz", 9) and "train.steps" in error.remedy
    (tmp_path / "broken.yaml").write_text("train: {steps: [}\n")
    assert "broken" in str(error_of(config_name="broken", config_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("train.stepz=3", "train.stepz", "Did you mean train.steps?"),
        ("sweep.x=1", "sweep.x", "Keys here: run_dir"),
        ("model.router2.x.y=1", "model.router2.x.y", "Did you mean model.router?"),
        ("+train.stepz=3", "train.stepz", "Did you mean train.steps?"),
        ("trian.steps=3", "trian.steps", "Did you mean train?"),
        ("train.lr=3", "train.lr", "Did you mean optim.lr?"),
        ("train.steps.x=3", "train.steps.x", "train.steps is a single value"),
        ("train.steps=many", "train.steps", "expected a whole number, got str 'many'"),
        ("train.steps=2.5", "train.steps", "expected a whole number, got float 2.5"),
        ("train.steps=true", "train.steps", "expected a whole number, got bool True"),
        ("train.steps=null", "train.steps", "expected a whole number, got null"),
        ("optim.lr=fast", "optim.lr", "expected a number, got str 'fast'"),
        ("optim.betas=[0.9]", "optim.betas", "expected a list of 2 values"),
        ("parallel.layers_per_stage=[1,x]", "parallel.layers_per_stage[1]", "expected a whole number"),
        ("observe.report=maybe", "observe.report", "expected true or false"),
        ("train=3", "train", "expected a mapping with keys steps"),
        ("train.dtype=fp16", "train.dtype", "must be one of float64, float32, bfloat16"),
        ("moe.experts=GROUPED_MM", "moe.experts", "Nearest valid choice: moe.experts=grouped_mm"),
        ("model=small_mixtrl", "model", "Did you mean model=small_mixtral?"),
        ("mesh.ep=1,2", "mesh.ep", "Add -m"),
        ("~train.steps", "train.steps", "cannot be deleted"),
        ("+experiment=smoke", "--config-name", "Multiple values for experiment"),
        ("+train.steps=3", "--config-name", "already at 'train.steps'"),
        ("hydra.run.dir=out", "hydra.run.dir", "set run_dir="),
        ("hydra/launcher=basic", "hydra/launcher", "set run_dir="),
        ("train.steps", "override", "key=value"),
    ],
)
def test_a_wrong_override_names_key_value_and_the_nearest_choice(override: str, key: str, says: str) -> None:
    error = error_of(override)
    assert error.key == key
    assert says in str(error)


def test_a_wrong_primary_lists_those_there_are() -> None:
    error = error_of(config_name="dsv3_617b")
    assert "Did you mean dsv3_671b?" in str(error) and "mixtral_8x22b" in str(error)
    assert "no such directory" in str(error_of(config_dir="/nowhere/at/all"))


def test_numeric_text_and_whole_numbers_are_floats() -> None:
    config = config_from_dict({"optim": {"lr": "1e-3", "eps": 1}})
    assert config.optim.lr == 1e-3 and config.optim.eps == 1.0
    assert isinstance(config.optim.eps, float)


def test_a_bare_off_in_yaml_means_off() -> None:
    raw = yaml.safe_load("observe: {wandb: off}")
    assert raw["observe"]["wandb"] is False
    assert config_from_dict(raw).observe.wandb == "off"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", list_options())
def test_the_frozen_file_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = compose_config(name)
    if name == "distill_small":
        config.recipe_args.teacher = None  # which another run makes
    frozen = resolved(config, validate(config, config.launch.num_ranks), "cpu")
    save_config(frozen, tmp_path)
    assert load_config(tmp_path, plugins=True) == frozen
    assert frozen.mesh.dp_shard > 0 and frozen.mesh.ep_shard > 0 and frozen.launch.device == "cpu"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "no scratch file stays"


def test_freezing_keeps_what_yaml_would_bend() -> None:
    config = Config()
    config.observe.wandb = "off"
    config.run_dir = "1e3"
    config.optim.eps = 1e-8
    config.parallel.layers_per_stage = [1, 3]
    assert parse_config(dump_config(config)) == config
    assert config_from_dict(config_to_dict(config)) == config


def test_a_directory_without_a_frozen_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no config.yaml"):
        load_config(tmp_path)


FLIPS = st.tuples(st.integers(0, 10**6), st.integers(0, 7))


@settings(max_examples=25)
@given(flips=st.lists(FLIPS, min_size=1, max_size=3), length=st.floats(0, 1))
@example(flips=[], length=0.0)
def test_a_damaged_file_is_another_configuration_or_an_error_for_people(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], length: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    content = bytearray(dump_config(resolved(Config(), resolve_mesh(Config().mesh, 4), "cpu")).encode())
    for place, bit in flips:
        content[place % len(content)] ^= 1 << bit
    (folder / "config.yaml").write_bytes(content[: round(length * len(content))])
    try:
        frozen_shape(load_config(folder))
    except ConfigError as error:
        assert str(folder / "config.yaml") in str(error) or error.key.startswith("mesh")


@pytest.mark.parametrize(
    "text", ["", "3", "[a]", "a: [", "a: 2026-13-45", "\0", "plugins: 3", "mesh: 3", "3: 4", "train: {steps: []}"]
)
def test_what_is_no_configuration_is_an_error_for_people(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    for plugins in (False, True):
        with pytest.raises(ConfigError, match="config.yaml"):
            load_config(tmp_path, plugins)


def test_a_checkpoint_says_what_the_model_is(tmp_path: Path) -> None:
    model = replace(compose_config(overrides=["model=small_mixtral"]).model, hidden_size=128)
    (tmp_path / "config.json").write_text(json.dumps(family_of(model).write_config(model)))
    config = compose(Arguments(overrides=[f"model.hf_path={tmp_path}", "data=stdlib"]))
    assert config.model == replace(model, hf_path=str(tmp_path)), "not the default's DeepSeek"
    compose(Arguments(overrides=[f"model.hf_path={tmp_path}", "model.hidden_size=128", "data=stdlib"]))
    with pytest.raises(ConfigError) as caught:
        compose(Arguments(overrides=[f"model.hf_path={tmp_path}", "model.hidden_size=192"]))
    error = caught.value
    assert error.key == "model.hidden_size" and f"model.hf_path={tmp_path} has model.hidden_size=128" in error.rule
    with pytest.raises(ConfigError, match="there is no such folder"):
        compose(Arguments(overrides=["model.hf_path=/nowhere"]))


def test_arguments() -> None:
    args = parse_arguments(["--config-name=dsv3_671b", "mesh.pp=2", "-m", "--config-dir", "d", "data.path='a=b'"])
    assert args == Arguments("dsv3_671b", "d", multirun=True, overrides=["mesh.pp=2", "data.path='a=b'"])
    assert replace(args, help=True) == parse_arguments(
        ["-cn", "dsv3_671b.yaml", "-cd", "d", *args.overrides, "-m", "-h"]
    )
    with pytest.raises(ConfigError, match="Did you mean --config-name"):
        parse_arguments(["--config_name", "x"])
    with pytest.raises(ConfigError, match="^--jsn: unknown option. Did you mean --json\\?"):
        parse_arguments(["--jsn"], ["--json"])
    with pytest.raises(ConfigError, match="needs a value"):
        parse_arguments(["--config-name"])


def test_leaf_keys_are_the_documented_names() -> None:
    keys = set(leaf_keys())
    named = {"run_dir", "train.steps", "mesh.ep_shard", "moe.dispatcher", "model.hf_path", "checkpoint.every"}
    assert named <= keys and "mesh" not in keys


def imported_by(*argv: str) -> tuple[int, str, set[str]]:
    """Exit status, output, and which heavy packages ``automoe.train`` imported on the way."""
    code = (
        "import sys; from automoe.train import main; status = main(sys.argv[1:]);"
        "print('IMPORTED', *[m for m in ('torch', 'hydra', 'transformers', 'matplotlib', 'wandb') if m in sys.modules]);"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
    out, _, modules = done.stdout.rpartition("IMPORTED")
    return done.returncode, out + done.stderr, set(modules.split())


def test_help_imports_nothing_heavy() -> None:
    status, text, modules = imported_by("--help")
    assert status == 0 and modules == set()
    for shown in ("dsv3_671b", "small_mixtral", "pp2_ep2", "--config-name", "-m, --multirun"):
        assert shown in text


@pytest.mark.parametrize("wrong", ["train.stepz=3", "mesh.ep=3", "train.global_batch_size=7"])
def test_a_config_error_comes_before_torch(wrong: str) -> None:
    status, text, modules = imported_by(wrong)
    assert status == 2 and f"error: {wrong}" in text
    assert "torch" not in modules


def test_a_valid_config_for_absent_hardware_prints_the_plan_and_says_what_is_missing() -> None:
    status, text, modules = imported_by("--config-name", "dsv3_671b")
    assert status == 3
    assert "pp16" in text and "ep64" in text
    assert "1024 CUDA ranks need 1024 GPUs, and this machine has" in text
    assert "it lacks data: data.kind=stdlib: the demonstration corpus" in text and "data=benchmark" in text
    assert max(map(len, text.splitlines())) <= 80, "of a terminal"
    assert "torch" not in modules


def test_names_of_a_users_own_are_mapped_on_the_command_line() -> None:
    data = ["data=chat", "data.path=README.md", "data.chat.keys={messages: dialogue, role: who}"]
    config = compose_config("sft_small", [*data, "data.chat.template_args={enable_thinking: false, effort: low, n: 3}"])
    assert config.data.chat.keys == {"messages": "dialogue", "role": "who"} and config.data.chat.template is None
    assert config.data.chat.template_args == {"enable_thinking": False, "effort": "low", "n": 3}
    with pytest.raises(ConfigError, match=r"data\.chat\.roles\.bot.*expected text, got int 3"):
        compose_config("sft_small", [*data, "data.chat.roles={bot: 3}"])
