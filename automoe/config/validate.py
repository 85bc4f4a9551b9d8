"""Every rule that can be checked before a rank starts, in milliseconds and without torch."""

from __future__ import annotations

import glob
import os
from math import gcd
from pathlib import Path

from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.recompute import check_recompute
from automoe.config.schema import Config
from automoe.config.stages import split_layers, stage_of_rank
from automoe.config.validate_checkpoint import check_checkpoint
from automoe.config.validate_compile import check_compile
from automoe.config.validate_fp8 import check_fp8
from automoe.config.validate_kernels import check_kernels
from automoe.config.validate_layers import check_layers
from automoe.config.validate_moe import check_moe
from automoe.config.validate_numbers import check_numbers, parse_profile_steps
from automoe.config.validate_optim import check_optimizer
from automoe.errors import ConfigError
from automoe.shipped import find_recipe

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def validate(config: Config, num_ranks: int | None, device: str | None = None) -> MeshShape:
    """Check a whole configuration and resolve its mesh.

    Args:
        config: composed configuration; not changed.
        num_ranks: ranks that a derived mesh axis fills (see ``resolve_mesh``).
        device: ``cpu`` or ``cuda`` where it is known; None takes ``launch.device``, and leaves the
            rules that depend on the device alone when that is ``auto``.

    Returns:
        The mesh with every axis resolved.

    Raises:
        ConfigError: the first rule that is broken, with its numbers and the nearest valid choice.
    """
    device = device or config.launch.device
    check_numbers(config)
    shape = resolve_mesh(config.mesh, num_ranks)
    check_model(config, shape)
    check_moe(config)
    _check_batch(config, shape)
    _check_pipeline(config, shape)
    _check_context(config, shape, device)
    _check_backend(config, shape, device)
    check_fp8(config, shape, device)
    check_recompute(config)
    check_kernels(config, shape, device)
    check_compile(config, shape)
    check_optimizer(config)
    _check_data(config)
    check_checkpoint(config)
    parse_profile_steps(config.observe.profile_steps)
    _check_paths(config)
    return shape


def check_model(config: Config, shape: MeshShape) -> None:
    """The rules for a model's sizes, and for how a mesh cuts them. Raises ``ConfigError``."""
    _check_experts(config, shape)
    _check_routing(config)
    _check_attention(config)
    check_layers(config, shape)
    _check_tensor(config, shape)


def _divisor_error(key: str, value: int, divisor: int, rule: str, remedy: str = "") -> ConfigError:
    below, above = value // divisor * divisor, (value // divisor + 1) * divisor
    choices = f"{key}={below} or {above}" if below else f"{key}={above}"
    return ConfigError(key, value, rule, f"Nearest valid choices: {choices}" + (f", or {remedy}" if remedy else ""))


def _check_experts(config: Config, shape: MeshShape) -> None:
    model = config.model
    if model.first_k_dense > model.num_layers:
        raise ConfigError(
            "model.first_k_dense",
            model.first_k_dense,
            f"there are {model.num_layers} layers in all (model.num_layers)",
            f"Set model.first_k_dense={model.num_layers} or less",
        )
    if model.first_k_dense == model.num_layers:  # no layer has experts
        return
    if model.num_experts % shape.ep:
        raise _divisor_error(
            "model.num_experts",
            model.num_experts,
            shape.ep,
            f"mesh.ep={shape.ep} ranks hold equal numbers of experts: {model.num_experts} % {shape.ep} = "
            f"{model.num_experts % shape.ep}",
            f"mesh.ep={gcd(model.num_experts, shape.ep)}",
        )
    for key, size, ranks, what in (
        (
            "model.moe_intermediate_size",
            model.moe_intermediate_size,
            shape.etp * shape.ep_shard,
            f"etp and FSDP cut the width of the experts evenly over mesh.etp*mesh.ep_shard = "
            f"{shape.etp}*{shape.ep_shard} = {shape.etp * shape.ep_shard} ranks",
        ),
        (
            "model.hidden_size",
            model.hidden_size,
            shape.ep_shard,
            f"FSDP cuts the rows of the experts' down projection evenly over mesh.ep_shard={shape.ep_shard} ranks",
        ),
    ):
        if size % ranks:
            raise _divisor_error(
                key,
                size,
                ranks,
                f"{what}: {size} % {ranks} = {size % ranks}",
                f"a mesh.ep that is {ranks // gcd(size, ranks)} times larger",
            )


def _check_tensor(config: Config, shape: MeshShape) -> None:
    model, tp = config.model, shape.tp
    if tp == 1:
        return
    sizes = {
        "model.attention.num_heads": (model.attention.num_heads, "attention heads"),
        "model.vocab_size": (model.vocab_size, "rows of the embedding"),
    }
    if model.first_k_dense:
        sizes["model.intermediate_size"] = (model.intermediate_size, "columns of the dense FFN")
    for key, (size, what) in sizes.items():
        if size % tp:
            raise _divisor_error(
                key, size, tp, f"mesh.tp={tp} ranks hold equal numbers of {what}: {size} % {tp} = {size % tp}"
            )
    shared = model.num_shared_experts * model.moe_intermediate_size
    if shared % tp:
        raise _divisor_error(
            "model.moe_intermediate_size",
            model.moe_intermediate_size,
            tp // gcd(tp, model.num_shared_experts),
            f"mesh.tp={tp} ranks hold equal numbers of columns of the shared experts: num_shared_experts * "
            f"moe_intermediate_size = {shared}, {shared} % {tp} = {shared % tp}",
        )
    groups = model.attention.num_kv_heads
    if model.attention.kind == "gqa" and groups % tp and tp % groups:
        raise ConfigError(
            "mesh.tp",
            tp,
            f"key/value heads divide over tp ranks or tp ranks over them: {groups} heads (model.attention.num_kv_heads)",
            f"Nearest valid choice: mesh.tp={gcd(groups, tp)}",
        )


def _check_routing(config: Config) -> None:
    experts, k, router = config.model.num_experts, config.model.num_experts_per_token, config.model.router
    if k > experts:
        raise ConfigError(
            "model.num_experts_per_token",
            k,
            f"a token cannot choose more than all {experts} experts (model.num_experts)",
            f"Set model.num_experts_per_token={experts} or less",
        )
    if experts % router.num_groups:
        divisors = [n for n in range(1, experts + 1) if experts % n == 0]
        near = min(divisors, key=lambda n: (abs(n - router.num_groups), n))
        raise ConfigError(
            "model.router.num_groups",
            router.num_groups,
            f"groups hold equal numbers of experts: {experts} % {router.num_groups} = {experts % router.num_groups}",
            f"Nearest valid choice: model.router.num_groups={near}",
        )
    if router.topk_groups > router.num_groups:
        raise ConfigError(
            "model.router.topk_groups",
            router.topk_groups,
            f"there are only {router.num_groups} groups (model.router.num_groups)",
            f"Set model.router.topk_groups={router.num_groups} or less",
        )
    group = experts // router.num_groups
    if k > router.topk_groups * group:
        raise ConfigError(
            "model.router.topk_groups",
            router.topk_groups,
            f"{router.topk_groups} groups of {group} experts hold {router.topk_groups * group}, fewer than "
            f"model.num_experts_per_token={k}",
            f"Nearest valid choice: model.router.topk_groups={-(-k // group)}",
        )
    if router.num_groups > 1 and router.group_score_topk > group:
        raise ConfigError(
            "model.router.group_score_topk",
            router.group_score_topk,
            f"a group has {group} experts",
            f"Set model.router.group_score_topk={group} or less",
        )


def _check_attention(config: Config) -> None:
    a = config.model.attention
    if a.kind == "gqa":
        if a.num_heads % a.num_kv_heads:
            raise ConfigError(
                "model.attention.num_kv_heads",
                a.num_kv_heads,
                f"key/value heads serve equal numbers of query heads: {a.num_heads} % {a.num_kv_heads} = "
                f"{a.num_heads % a.num_kv_heads}",
                f"Nearest valid choice: model.attention.num_kv_heads={gcd(a.num_heads, a.num_kv_heads)}",
            )
        share = config.model.rope.partial_rotary_factor
        rotary_key, rotary = "model.attention.head_dim", int(a.head_dim * share)
        if share < 1 and (rotary % 2 or not rotary):
            raise ConfigError(
                "model.rope.partial_rotary_factor",
                share,
                f"rotary embedding turns pairs of dimensions, and int({a.head_dim} * {share}) = {rotary} of a head",
                f"Nearest valid choice: model.rope.partial_rotary_factor={max(rotary // 2 * 2, 2) / a.head_dim}",
            )
    else:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(a, name) < 1:
                raise ConfigError(
                    f"model.attention.{name}",
                    getattr(a, name),
                    "attention kind mla needs this size",
                    f"Set model.attention.{name}=1 or more, or model.attention.kind=gqa",
                )
        for key, value, plain in (
            ("attention.qkv_bias", a.qkv_bias, False),
            ("rope.partial_rotary_factor", config.model.rope.partial_rotary_factor, 1.0),
        ):
            if value != plain:
                raise ConfigError(
                    f"model.{key}",
                    value,
                    "attention kind gqa alone has it",
                    f"Set model.{key}={str(plain).lower()}, or model.attention.kind=gqa",
                )
        rotary_key, rotary = "model.attention.qk_rope_head_dim", a.qk_rope_head_dim
    if rotary % 2:
        raise _divisor_error(rotary_key, rotary, 2, "rotary embedding turns pairs of dimensions")


def _check_batch(config: Config, shape: MeshShape) -> None:
    train = config.train
    unit = shape.dp * train.micro_batch_size
    if train.global_batch_size % unit:
        raise _divisor_error(
            "train.global_batch_size",
            train.global_batch_size,
            unit,
            "every data-parallel rank runs whole micro-batches, so dp_replicate*dp_shard*micro_batch_size = "
            f"{shape.dp_replicate}*{shape.dp_shard}*{train.micro_batch_size} = {unit} divides it: "
            f"{train.global_batch_size} % {unit} = {train.global_batch_size % unit}",
        )
    if shape.tp > 1 and train.seq_len % (shape.cp * shape.tp):
        raise _divisor_error(
            "train.seq_len",
            train.seq_len,
            shape.cp * shape.tp,
            f"between blocks the ranks of cp and tp hold equal parts of a row: cp*tp = {shape.cp}*{shape.tp} = "
            f"{shape.cp * shape.tp}, {train.seq_len} % {shape.cp * shape.tp} = {train.seq_len % (shape.cp * shape.tp)}",
        )
    if shape.cp > 1 and train.seq_len % (2 * shape.cp):
        raise _divisor_error(
            "train.seq_len",
            train.seq_len,
            2 * shape.cp,
            f"with mesh.cp={shape.cp} every rank holds a head piece and a tail piece, 2*cp = {2 * shape.cp} equal "
            f"pieces: {train.seq_len} % {2 * shape.cp} = {train.seq_len % (2 * shape.cp)}",
        )


def _check_pipeline(config: Config, shape: MeshShape) -> None:
    parallel, train = config.parallel, config.train
    stage_of_rank(parallel.schedule, shape.pp, parallel.stages_per_rank)
    if shape.pp == 1:
        if parallel.stages_per_rank > 1:
            raise ConfigError(
                "parallel.stages_per_rank",
                parallel.stages_per_rank,
                "with mesh.pp=1 the model is one stage",
                "Set parallel.stages_per_rank=1, or mesh.pp=2 or more",
            )
        return
    if parallel.schedule == "Interleaved1F1B" and parallel.stages_per_rank < 2:
        raise ConfigError(
            "parallel.stages_per_rank",
            parallel.stages_per_rank,
            "Interleaved1F1B runs at least 2 stages a rank",
            "Set parallel.stages_per_rank=2 or parallel.schedule=1F1B",
        )
    split_layers(config.model.num_layers, shape.pp * parallel.stages_per_rank, parallel.layers_per_stage)
    micro_batches = train.global_batch_size // (shape.dp * train.micro_batch_size)
    row_unit = shape.dp * train.micro_batch_size
    arithmetic = (
        f"global_batch_size / (dp_replicate*dp_shard*micro_batch_size) = {train.global_batch_size} / "
        f"({shape.dp_replicate}*{shape.dp_shard}*{train.micro_batch_size}) = {micro_batches} micro-batches"
    )
    if parallel.schedule != "GPipe" and micro_batches < shape.pp:
        raise ConfigError(
            "train.global_batch_size",
            train.global_batch_size,
            f"{parallel.schedule} needs at least mesh.pp={shape.pp} micro-batches in flight; {arithmetic}",
            f"Nearest valid choice: train.global_batch_size={shape.pp * row_unit}, or a smaller micro_batch_size",
        )
    if parallel.schedule == "Interleaved1F1B" and micro_batches % shape.pp:
        raise _divisor_error(
            "train.global_batch_size",
            train.global_batch_size,
            shape.pp * row_unit,
            f"Interleaved1F1B runs its micro-batches in rounds of mesh.pp={shape.pp}; {arithmetic}, "
            f"{micro_batches} % {shape.pp} = {micro_batches % shape.pp}",
        )
    for key in ("reshard", "grad_sync"):
        if getattr(parallel, key) == "micro_batch":
            raise ConfigError(
                f"parallel.{key}",
                "micro_batch",
                f"with mesh.pp={shape.pp} > 1 torch's pipeline stages always wait for the end of the step",
                f"Set parallel.{key}=step, or mesh.pp=1",
            )


def _check_context(config: Config, shape: MeshShape, device: str) -> None:
    if config.parallel.context != "ring" or shape.cp == 1:
        return
    if config.data.document_mask:
        raise ConfigError(
            "parallel.context",
            "ring",
            "ring attention has no document mask, and data.document_mask=true asks for one",
            "Set parallel.context=gather, or data.document_mask=false",
        )
    if device == "cpu":
        raise ConfigError(
            "parallel.context",
            "ring",
            "ring attention needs CUDA, and this run is on cpu",
            "Set parallel.context=gather",
        )


def _check_backend(config: Config, shape: MeshShape, device: str) -> None:
    backend = config.moe.experts
    if backend == "loop" or config.model.first_k_dense == config.model.num_layers:
        return
    if config.train.dtype == "float64" and config.train.fp8 == "off":  # 8-bit products are emulated in it too
        raise ConfigError(
            "moe.experts",
            backend,
            f"{backend} has no float64, and train.dtype=float64",
            "Set moe.experts=loop",
        )
    if backend == "triton":
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                "moe.experts",
                backend,
                "Triton's kernels need CUDA, and this run is on cpu",
                "Set moe.experts=grouped_mm, or TRITON_INTERPRET=1 to try the kernels out, very slowly",
            )
        return
    size = ELEMENT_BYTES[config.train.dtype]
    for key, width in (
        ("model.hidden_size", config.model.hidden_size),
        ("model.moe_intermediate_size", config.model.moe_intermediate_size // shape.etp),
    ):
        if width * size % 16:
            raise _divisor_error(
                key,
                width,
                16 // size,
                f"{backend} needs rows of a multiple of 16 bytes: {width} * {size} bytes = {width * size}",
                "moe.experts=loop",
            )


def _check_data(config: Config) -> None:
    data = config.data
    if not 0 <= data.val_fraction < 1:
        raise ConfigError(
            "data.val_fraction",
            data.val_fraction,
            "a share of the text in [0, 1)",
            "Set data.val_fraction=0.02",
        )
    if config.train.val_every and not data.val_fraction:
        raise ConfigError(
            "data.val_fraction",
            data.val_fraction,
            f"train.val_every={config.train.val_every} validates, and no text is set aside for it",
            "Set data.val_fraction=0.02, or train.val_every=0",
        )
    if data.kind == "stdlib":
        if data.path is not None:
            raise ConfigError(
                "data.path",
                data.path,
                "data.path is set and data.kind=stdlib reads none",
                "Set data=text|jsonl|parquet, or leave data.path out",
            )
    else:
        if data.path is None:
            raise ConfigError(
                "data.path",
                None,
                f"data.kind={data.kind} reads files, and no path is given",
                "Set data.path=FILE, or data=stdlib",
            )
        if not glob.glob(os.path.expanduser(data.path), recursive=True):
            raise ConfigError(
                "data.path",
                data.path,
                f"nothing there (looked from {os.getcwd()})",
                "Name a file, a directory or a glob that exists",
            )
    # Upwards, against the order of the house: the number of ids is known to the tokenizer alone.
    from automoe.data.tokenizer import tokenizer_vocab_size

    vocab = tokenizer_vocab_size(data.tokenizer)
    if vocab > config.model.vocab_size:
        remedy = f"Nearest valid choice: model.vocab_size={8 * -(-vocab // 8)}"
        if config.model.hf_path is not None:  # whose embedding has the rows it has
            remedy = f"Set data.tokenizer={config.model.hf_path} for the checkpoint's own, or a smaller one"
        raise ConfigError(
            "model.vocab_size",
            config.model.vocab_size,
            f"the tokenizer {data.tokenizer} makes ids up to {vocab - 1}, and the embedding ends at "
            f"{config.model.vocab_size - 1}",
            remedy,
        )


def _check_paths(config: Config) -> None:
    if config.model.hf_path is not None and not Path(config.model.hf_path).expanduser().is_dir():
        raise ConfigError(
            "model.hf_path",
            config.model.hf_path,
            f"no such directory (looked from {os.getcwd()})",
            "Name a directory with config.json and *.safetensors, or null to start from random weights",
        )
    if config.checkpoint.export_hf:
        # Upwards, as above: better now than when the run ends in an export.
        from automoe.hf.families.registry import check_exportable

        check_exportable(config.model)
    find_recipe(config.recipe)
    check_writable(config.run_dir)
    if config.moe.record_routing is not None:
        check_writable(os.path.expanduser(config.moe.record_routing), "moe.record_routing")


def check_writable(directory: str, key: str = "run_dir") -> None:
    """Raise ``ConfigError`` where ``key`` names no directory that can be made and written; makes nothing."""
    if not directory:
        raise ConfigError(key, directory, "names no directory", f"Set {key} to a directory")
    path = Path(directory).absolute()
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        raise ConfigError(key, directory, f"{path} is a file, not a directory", f"Name another {key}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(key, directory, f"no permission to write in {path}", f"Name a {key} that can be written")
