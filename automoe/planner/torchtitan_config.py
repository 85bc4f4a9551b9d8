"""Export of a planned run to torchtitan 0.3's trainer: ``automoe plan ... export=torchtitan``.

The result is a Python module with torchtitan's ``Trainer.Config``. torchtitan's meshes are
automoe's without etp: pp x dp_replicate x dp_shard x cp x tp for dense layers, pp x dp_replicate x
efsdp x ep for experts, with ranks in the same order. With ep=1 torchtitan shards experts over tp,
like etp=tp. A setting that torchtitan lacks is refused if it would change the ranks or the model;
otherwise the top of the file names it. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from keyword import iskeyword
from pathlib import Path
from pprint import pformat
from textwrap import fill, indent

import yaml

from automoe import __version__
from automoe.config.compose import compose_config
from automoe.config.mesh_shape import MeshShape, stage_layers
from automoe.config.paths import user_path
from automoe.config.recompute import FULL, recomputed_names
from automoe.config.rule_engine import Row, check_rows
from automoe.config.schema import Config, ModelConfig
from automoe.config.shipped import shipped_folder
from automoe.errors import ConfigError
from automoe.planner.output_file import write_out
from automoe.planner.time import step_time

# name in conf/model: (torchtitan's module, torchtitan's flavour)
MODELS = {
    "dsv3_671b": ("deepseek_v3", "671B"),
    "qwen3_30b_a3b": ("qwen3", "30B-A3B"),
    "qwen3_235b_a22b": ("qwen3", "235B-A22B"),
    "gpt_oss_20b": ("gpt_oss", "20b"),
    "gpt_oss_120b": ("gpt_oss", "120b"),
    "moonlight_16b_a3b": ("kimi_k2_7", "moonlight-16B-A3B"),
    "qwen3_0_6b": ("qwen3", "0.6B"),
    "qwen3_8b": ("qwen3", "8B"),
    "qwen3_32b": ("qwen3", "32B"),
    "llama31_8b": ("llama3", "8B"),
    "llama31_70b": ("llama3", "70B"),
}
# model keys for the start of training, not for the model's shape
_NOT_SHAPE = ("hf_path", "upcycle", "initializer_range")


def titan_model(model: ModelConfig) -> tuple[str, str]:
    """Return torchtitan's names of the same model: (module, flavour), e.g. ``("qwen3", "8B")``.

    Raises:
        ConfigError: torchtitan has no such model; the message lists the models that it has.
    """

    def shape(other: ModelConfig) -> dict[str, object]:
        return {key: value for key, value in asdict(other).items() if key not in _NOT_SHAPE}

    folder = shipped_folder("conf") / "model"
    for name, preset in MODELS.items():
        raw = yaml.safe_load((folder / f"{name}.yaml").read_text())
        # Files with defaults omit keys, so missing keys count as equal. Composing is slow and comes
        # last.
        alike = all(
            raw.get(key, getattr(model, key)) == getattr(model, key)
            for key in ("family", "num_layers")
        )
        if alike and shape(compose_config("config", [f"model={name}"]).model) == shape(model):
            return preset
    described = f"{model.family} of {model.num_layers} layers"
    raise ConfigError(
        "export",
        "torchtitan",
        f"torchtitan 0.3 has no such {described}",
        f"It has model={', '.join(MODELS)}",
    )


# fmt: off
def export_rows(config: Config, mesh: MeshShape) -> Iterator[Row]:
    """Yield (key, whether broken, rule, remedy) for each rule of an export to torchtitan.

    A rule is broken if torchtitan cannot train with this value of the key. Rule and remedy are
    texts for the user.
    """
    model = config.model
    train = config.train
    routed = model.num_moe_layers > 0
    kv_heads = model.attention.num_kv_heads
    unit = mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1)
    stages = stage_layers(config, mesh)
    yield ("mesh.etp", routed and mesh.etp != (mesh.tp if mesh.ep == 1 else 1),
           "torchtitan distributes experts over ep or, with ep=1, cuts all over tp", "Set mesh.etp=1, with mesh.ep")
    yield ("mesh.ep_replicate", routed and mesh.ep_replicate != mesh.dp_replicate,
           f"torchtitan replicates experts as often as the rest, mesh.dp_replicate={mesh.dp_replicate}",
           "Make the two equal")
    yield ("mesh.tp", kv_heads % mesh.tp != 0, f"torchtitan divides {kv_heads} heads of keys evenly",
           f"Set it to a divisor of {kv_heads}")
    yield ("train.seq_len", train.seq_len % unit != 0, f"torchtitan cuts rows into {unit} equal parts",
           f"Set a multiple of {unit}")
    yield ("parallel.layers_per_stage", not all(stages[1:-1]), "torchtitan has no stage without a module",
           "Give every stage between the ends a layer")
    yield ("mesh.pp", mesh.pp > 1 and model.tie_embeddings, "torchtitan cannot tie the embedding in a pipeline",
           "Set mesh.pp=1")
    yield ("optim.master_weights", config.optim.master_weights != "float32", "torchtitan does not round stochastically",
           "Set optim.master_weights=float32")
    yield ("moe.gate", config.moe.gate not in ("learned", "balanced"), "torchtitan routes as learned, or round robin",
           "Set moe.gate=learned")
    for key, wrong, rule, value in (
        ("train.dtype", train.dtype == "float64", "computes in bfloat16 or float32", "bfloat16"),
        ("train.fp8", train.fp8 != "off", "has converters (model_registry) with other products and scales", "off"),
        ("train.loss", train.loss != "cross_entropy", "does not have it", "cross_entropy"),
        ("recipe", config.recipe != "pretrain", "has a trainer that pretrains", "pretrain"),
        ("lora.rank", config.lora.rank > 0, "trains all weights", "0"),
        ("train.freeze", bool(train.freeze), "trains all weights", "[]"),
        ("model.upcycle", model.upcycle, "does not upcycle; automoe upcycle writes a checkpoint", "false"),
    ):
        yield key, wrong, f"torchtitan {rule}", f"Set {key}={value}"


# fmt: on
def not_expressed(config: Config, mesh: MeshShape) -> Iterator[str]:
    """Yield a text on each setting that the exported module omits: its key, and what torchtitan does."""
    moe = config.moe
    parallel = config.parallel
    train = config.train
    names = recomputed_names(config.parallel)
    several = train.global_batch_size > train.micro_batch_size * mesh.dp
    deferred = mesh.pp == 1 and several and "step" in (parallel.reshard, parallel.grad_sync)
    losses = "seq_balance_coef", "global_balance_coef", "micro_batch_balance_coef", "z_loss_coef"
    yield "data: the corpus c4 stands in for yours, set dataloader and hf_assets_path (its tokenizer)"
    if not _folder(config.model):
        yield f"first weights: torchtitan's own; model.hf_path={config.model.hf_path} is not a folder here"
    if config.model.num_moe_layers:
        yield "experts are multiplied in bfloat16 whatever train.dtype says"
    for key, value, instead in (
        ("moe.capacity_factor", moe.capacity_factor, "nothing is dropped"),
        *((f"moe.{key}", getattr(moe, key), "no such loss") for key in losses),
        ("moe.router_jitter", moe.router_jitter, "none"),
        (
            "moe.dispatcher",
            moe.dispatcher not in ("alltoall", "deepep") and moe.dispatcher,
            "all rows, all to all",
        ),
        ("moe.dispatch_dtype", moe.dispatch_dtype == "fp8" and "fp8", "rows travel as computed"),
        (
            "parallel.recompute",
            FULL not in names and names,
            "SelectiveAC, by operators: its memory differs",
        ),
        ("parallel.recompute_layers", parallel.recompute_layers, "every layer"),
        (
            "parallel.reshard, grad_sync",
            deferred and "step",
            "weights and gradients move every micro-batch",
        ),
        ("parallel.context", mesh.cp > 1 and parallel.context, "FlexAttention with gathered keys"),
        ("data.document_mask", not config.data.document_mask and "false", "documents are masked"),
        ("train.compile", train.compile, "experts as well"),
        ("optim.phases", len(config.optim.phases), "the learning rate stays after the warm-up"),
        ("optim.algorithm", config.optim.algorithm != "adamw" and "muon", "AdamW"),
        ("optim.moments", config.optim.moments != "float32" and "bfloat16", "float32"),
        ("train.epochs", train.epochs, f"{train.steps} steps (train.steps)"),
        ("optim.qk_clip", config.optim.qk_clip, "no weights are clipped"),
        ("optim.ema_decay", config.optim.ema_decay, "no averages"),
        ("train.rampup_batch_size", train.rampup_batch_size, "the full batch from the first step"),
        ("train.spike_factor", train.spike_factor, "no step is skipped"),
        ("train.val_every", train.val_every, "no validation; set validator"),
        (
            "checkpoint.every_minutes",
            config.checkpoint.every_minutes,
            "steps, by the predicted time of one",
        ),
    ):
        if value:
            yield f"{key}={value}: {instead}"


def titan_module(config: Config, mesh: MeshShape, name: str) -> str:
    """Return the source of a Python module with torchtitan's configuration of the same training.

    Its function ``name`` returns a ``Trainer.Config``.

    Raises:
        ConfigError: torchtitan cannot train this configuration; the message says what would work.
    """
    module, flavour = titan_model(config.model)
    check_rows(config, export_rows(config, mesh), mesh)
    train = config.train
    saves = config.checkpoint
    optim = config.optim
    start = _folder(config.model)
    names = recomputed_names(config.parallel)
    model = config.model
    backend = "deepep" if config.moe.dispatcher == "deepep" else "standard"
    experts = f', moe_comm_backend="{backend}"' if model.num_moe_layers else ""
    again = "None"
    if names:
        again = "FullAC.Config()" if FULL in names else "SelectiveAC.Config()"
    minutes = round(60 * saves.every_minutes / step_time(config, mesh).seconds)
    return (
        (Path(__file__).with_suffix(".txt"))
        .read_text()
        .format(
            config=config,
            mesh=mesh,
            name=name,
            module=module,
            version=__version__,
            axes=f"{mesh.describe('default')}; experts {mesh.describe('moe')}",
            nothing="\n".join(
                fill(f"- {x}", 116, subsequent_indent="  ") for x in not_expressed(config, mesh)
            ),
            schedule=config.parallel.schedule,
            registry=f'model_registry("{flavour}", attn_backend="flex"{experts})',
            bias=config.moe.bias_update_rate if model.router.expert_bias else None,
            assets=repr(model.hf_path or f"./assets/hf/{flavour}"),
            betas=tuple(optim.betas),
            decay={"cosine": None, "wsd": optim.decay_steps / train.steps}.get(optim.schedule, 0.0),
            decay_type="cosine" if optim.schedule == "cosine" else "linear",
            local=train.global_batch_size // mesh.dp if mesh.pp > 1 else train.micro_batch_size,
            max_norm=train.grad_clip or 'float("inf")',
            param="float32" if train.dtype == "float32" else "bfloat16",
            reshard="always"
            if config.parallel.reshard == "micro_batch" and mesh.pp == 1
            else "never",
            stages=_stages(config, mesh),
            saves=saves.saves or start is not None,
            every=(saves.every or max(1, minutes)) if saves.saves else train.steps,
            keep=max(2, saves.keep),  # torchtitan keeps at least two, or all (0)
            asynchronous="async" if saves.async_save else "disabled",
            start=f"\n            initial_load_path={str(start)!r},\n            initial_load_in_hf=True,"
            if start
            else "",
            again=again,
            balanced=config.moe.gate == "balanced",
        )
    )


def _folder(model: ModelConfig) -> Path | None:
    """Return the folder of the checkpoint that training starts from; None if it is not local."""
    folder = Path(model.hf_path).expanduser().absolute() if model.hf_path else None
    return folder if folder and folder.is_dir() else None


def _stages(config: Config, mesh: MeshShape) -> str:
    """Return Python source: a list of module names for every pipeline stage; "None" without pp."""
    if mesh.pp == 1:
        return "None"
    held = [[f"layers.{i}" for i in layers] for layers in stage_layers(config, mesh)]
    held[0].insert(0, "tok_embeddings")
    held[-1] += ["norm", "lm_head"]
    return indent(pformat(held, width=104), " " * 12).strip()


def write_titan(config: Config, mesh: MeshShape, config_name: str, out: str) -> tuple[Path, str]:
    """Write the torchtitan module; return its path and the command that trains with it.

    Args:
        config_name: name for the module's function, and for its file unless ``out`` names one.
        out: path of a file that ends in .py, or of a folder; empty: the folder ``plans``.

    Raises:
        ConfigError: torchtitan cannot train the configuration, the file's name is not a Python
            name, another file exists at the path, or the file cannot be written.
    """
    name = re.sub(r"\W", "_", config_name)
    if not name.isidentifier() or iskeyword(name):
        name = f"run_{name}"
    path = user_path("out", out or "plans")
    if path.suffix != ".py":
        path /= f"torchtitan_{name}_{mesh.world_size}.py"
    if not path.stem.isidentifier():
        raise ConfigError(
            "out",
            str(path),
            "torchtitan imports it: the file's name must be a Python name",
            "Set out=NAME.py",
        )
    write_out(path, titan_module(config, mesh, name), str(path), "it", "out=FILE")
    each = min(mesh.world_size, config.cluster.gpus_per_node)
    where = f"--nproc-per-node {each}"
    if mesh.world_size > each:
        nodes = -(-mesh.world_size // each)
        where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 {where}"
    return (
        path,
        f"PYTHONPATH={path.parent} torchrun {where} -m torchtitan.train --module {path.stem} --config {name}",
    )
