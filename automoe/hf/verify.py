"""Verification of an export: all bits against the live shards, logits against ``transformers``.

The first comparison ties the files to the trained weights, on any mesh. The second ties the files
to the results that other programs compute from them. With both, an error of the writer cannot be
hidden by the same error of the reader.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from automoe.comm.agreement import Ranks
from automoe.comm.tokens import MicroBatch
from automoe.config.schema import ModelConfig, MoEConfig
from automoe.config.tier import tier_of
from automoe.errors import CheckpointError, listed
from automoe.hf.catalog import Catalog, open_catalog
from automoe.hf.families.as_transformers import without_warnings
from automoe.hf.families.family import differing_values, value_of
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.folder import write_settings
from automoe.hf.headers import switched_off, without_adapter
from automoe.hf.keys import Encoding, hf_tensors
from automoe.hf.merge import adapters_of
from automoe.hf.read import Reader, ReadItem, load_hf, num_not_finite
from automoe.hf.save_plan import Transfer, compare_beside, not_exported, plan_writes, unread_shards
from automoe.hf.shards import Parts, as_parts, config_of, local_shards
from automoe.hf.transformers_models import loading_class, stated_config, weightless
from automoe.hf.wrapper import names_in_class
from automoe.model.causal_lm import CausalLM
from automoe.model.params import count_params
from automoe.moe.router import recorded_choices
from automoe.parallel.parallelize import build_decoder
from automoe.storage.foreign import read_settings

LOGITS_TOLERANCE = 1e-5  # relative error in float32, with the same experts chosen
# Programs that round differently may resolve a near tie differently; a larger margin is an error.
MIN_SAME_ROUTING = 0.98
# Bytes of float32 weights. A larger model is not run; only its tensor names and shapes are checked.
MAX_COMPARED_BYTES = 4 << 30
# Largest relative error (L2) of rounding, by encoding. FP8 has three bits of mantissa, so a number
# is off by half a step at most. The worst group of MXFP4 has one number of 5 scales and 31 numbers
# of 0.25, which become zero; the worst group of INT4 has one number of 7.5 scales and 31 of 0.5.
ROUNDING = {"fp8": 2**-4, "mxfp4": (94 / 862) ** 0.5, "int4": 0.36}
_ROWS = 4
_SEQ = 64


def verify_hf(
    parts: Parts | CausalLM,
    folder: str | Path,
    *,
    dtype: Mapping[str, torch.dtype] | None = None,
    encoding: Encoding = "plain",
    source: Catalog | None = None,
) -> float | None:
    """Compare a checkpoint directory with the live model and with ``transformers``. Collective.

    Args:
        parts: the model, or this rank's pipeline stages of it; not changed.
        dtype: expected dtypes by name of the HuggingFace tensor; tensors without one have the
            model's own.
        encoding: tensors in this encoding are compared within its rounding error.
        source: checkpoint whose tensors outside the text model (a vision part) the export copied.

    Returns:
        Relative L2 difference of our logits from transformers'; None for a model that is too large
        to run.

    Raises:
        CheckpointError, on every rank: names the first difference.
    """
    parts = as_parts(parts)
    config = config_of(parts)
    ranks = Ranks()
    catalog = open_catalog(folder, config)
    dtypes = dtype or {}
    shards = list(local_shards(parts, adapters_of(parts)))

    def compare_shards() -> None:
        # Every number that this rank holds is compared, bit for bit, with its place in the files.
        # Sums of squared errors and of squared numbers of each quantized tensor.
        errors = defaultdict(float)
        sizes = defaultdict(float)

        def compare(item: ReadItem, source: Tensor, target: Tensor) -> None:
            # In 8 or 4 bits a number that is not finite makes its whole block NaN.
            if odd := num_not_finite(target) or num_not_finite(source):
                raise not_exported(catalog.folder, item.key, odd)
            if encoding != "plain" and item.source.encoding == encoding:
                live = target.to("cpu", torch.float32)
                errors[item.key] += float((source - live).square().sum())
                sizes[item.key] += float(live.square().sum())
                return
            # Only the stage that writes a tied embedding knows the dtype of its copies.
            wanted = dtypes.get(item.key, source.dtype if item.shard.copy else target.dtype)
            if source.dtype != wanted:
                raise CheckpointError(
                    f"{catalog.folder}: {item.key} is {source.dtype}, not {wanted}"
                )
            live = target.to("cpu", wanted)
            if not torch.equal(source, live):
                differ = int((source != live).sum())
                raise CheckpointError(
                    f"{catalog.folder}: {item.key} is not the model's {item.shard.name}: {differ} of "
                    f"{live.numel()} numbers differ"
                )

        made = (shard for shard in shards if (shard.added and shard.added()) or shard.base)
        with Reader(catalog) as reader:
            try:
                plain = [shard for shard in shards if not (shard.base or shard.added)]
                reader.visit(reader.plan(plain), compare)
                for shard in made:
                    for index, matrix in shard.matrices():
                        matrix.local.copy_(shard.numbers(index))
                        reader.visit(reader.plan([matrix]), compare)
            finally:  # a rank that fails still takes part in gathering adapters
                for _ in made:
                    pass
        for key, size in sizes.items():
            if not errors[key] <= ROUNDING[encoding] ** 2 * size:  # so that NaN fails
                off = math.sqrt(errors[key] / size) if size else math.inf
                raise CheckpointError(
                    f"{catalog.folder}: {key} is not the model's: its numbers are off by {off:.1%}, and "
                    f"{encoding.upper()} rounds by no more than {ROUNDING[encoding]:.1%}"
                )

    ranks.all(compare_shards)
    if source is not None:
        copied = ranks.share({key: stored.num_bytes for key, stored in source.beside.items()})
        ranks.all(lambda: compare_beside(source, catalog, copied))
    return ranks.lead(lambda: verify_with_transformers(config, catalog))


def verify_with_transformers(config: ModelConfig, catalog: Catalog) -> float | None:
    """Check that transformers builds the model ``config`` from an export, and computes our logits.

    Args:
        config: configuration of the exported model.
        catalog: catalog of the export.

    Returns:
        Relative L2 difference of the logits; None for a model that is too large to run, or which
        the installed transformers lacks: a warning says so.

    Raises:
        CheckpointError: names the first difference, or why transformers does not load the files.
    """
    import transformers

    try:
        read = model_config_from_hf(catalog.folder, mtp=True)
        # The files may also hold copies of the source's modules, which the model does not have.
        trained = min(read.num_mtp_layers, config.num_mtp_layers)
        read = replace(read, num_mtp_layers=trained)
        for key in differing_values(config, read, family_of(config)):
            raise CheckpointError(
                f"{catalog.folder}/config.json says model.{key}={value_of(read, key)}, and the model has "
                f"{value_of(config, key)}: the family {config.family} cannot express it"
            )
        kind = read_settings(catalog.folder, "config.json").get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            warnings.warn(
                f"{catalog.folder} is not compared with transformers, whose release "
                f"{transformers.__version__} has no model_type={kind}",
                stacklevel=2,
            )
            return None
        _compare_census(config, catalog.folder)
        return _compare_logits(catalog)
    except CheckpointError:
        raise
    # transformers may raise any exception, and other ranks may be waiting for the result
    except Exception as error:
        raise CheckpointError(
            f"{catalog.folder} does not reload in transformers: {type(error).__name__}: {error}"
        ) from error


def _compare_census(config: ModelConfig, folder: Path) -> None:
    """Check that transformers builds the tensors of ``config`` from config.json in ``folder``.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    model = weightless(stated_config(folder), whole=True)
    names = names_in_class(model)
    theirs = {
        plain: tuple(value.shape)
        for key, value in model.state_dict().items()
        if (plain := names.plain(key)) is not None
    }
    if config.tie_embeddings:
        theirs.pop("lm_head.weight", None)
    # transformers has no modules for multi-token prediction
    ours = hf_tensors(replace(config, num_mtp_layers=0), family_of(config).keys.in_memory)
    if theirs != ours:
        differ = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
        raise CheckpointError(
            f"{folder}: transformers builds another model from its config.json: {len(differ)} tensors are "
            f"missing, unknown or of another shape: {listed(differ)}"
        )


def _compare_logits(catalog: Catalog) -> float | None:
    """Run the export in float32 on the CPU by transformers and by our model; compare logits.

    Returns:
        Relative L2 difference of the logits; None for a model that is too large to run.

    Raises:
        CheckpointError: transformers does not use all tensors or initialises missing ones, chooses
            other experts, or computes other logits.
    """
    config = model_config_from_hf(catalog.folder)
    if _too_large(config):
        return None
    tokens = _tokens(config)
    with _unquantized(catalog, config) as folder:
        theirs, choices = _run_transformers(folder, tokens, config, catalog.parts_beside)
    model = build_decoder(config, MoEConfig(experts="loop"), torch.float32)
    model.to_empty(device="cpu")
    load_hf(model, catalog.folder, catalog)
    model.eval()
    with torch.no_grad(), recorded_choices(model) as free:
        model(tokens)
    forced = None
    if config.num_moe_layers and tier_of(config).repeats_routing:
        chosen = free()[:, :, :, 0].sort(-1).values
        same = (chosen == choices.sort(-1).values).all(-1).float().mean().item()
        if same < MIN_SAME_ROUTING:
            raise CheckpointError(
                f"{catalog.folder}: transformers sends {1 - same:.1%} of tokens to other experts"
            )
        forced = torch.stack((choices, choices), dim=3)
    with torch.no_grad():
        ours = model(batch=MicroBatch(tokens, forced_ids=forced))
    return _relative_error(
        ours, theirs, catalog.folder, "transformers computes other logits from it"
    )


def _too_large(config: ModelConfig) -> bool:
    return 4 * count_params(config).total > MAX_COMPARED_BYTES


def _tokens(config: ModelConfig) -> Tensor:
    """Return 4 rows of 64 random token ids below the vocabulary's size, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (_ROWS, _SEQ), generator=generator)


def _relative_error(
    ours: Tensor, wanted: Tensor, folder: Path, rule: str, remedy: str = ""
) -> float:
    """Return the relative L2 difference of logits; raise ``CheckpointError`` if it is over 1e-5 or NaN.

    Args:
        ours: logits to check.
        wanted: logits that they should equal, computed by transformers.
        folder: checkpoint directory of ``ours``, for the error.
        rule: what the error says is wrong, such as ``logits differ from transformers'``.
        remedy: sentence to append to the error.
    """
    if odd := num_not_finite(wanted):
        raise CheckpointError(
            f"{folder}: {odd:,} of {wanted.numel():,} logits of transformers are NaN or infinite: its weights are "
            "finite, and their products are not in float32. Export an earlier checkpoint"
        )
    error = float((ours - wanted).norm() / wanted.norm())
    if not error <= LOGITS_TOLERANCE:  # so that NaN fails
        raise CheckpointError(
            f"{folder}: {rule}: relative difference {error:.1e}, allowed {LOGITS_TOLERANCE:.0e}{remedy}"
        )
    return error


def expert_product(
    config: ModelConfig, dtype: torch.dtype, etp: int = 1
) -> Literal["grouped_mm", "loop"]:
    """Return grouped_mm if torch's grouped product can multiply the model's experts, else loop.

    The grouped product does not support float64, and needs rows of a multiple of 16 bytes.

    Args:
        etp: number of ranks among which the width of an expert is divided.
    """
    widths = (config.expert_hidden_size, config.moe_intermediate_size // etp)
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    return "grouped_mm" if aligned and dtype != torch.float64 else "loop"


def multiply_as_torch_can(hf_config: Any, config: ModelConfig, dtype: torch.dtype) -> None:
    """Set transformers to loop over experts if torch's grouped product cannot multiply the experts.

    Args:
        hf_config: transformers' configuration object, changed in place.
        dtype: dtype of the weights.
    """
    if config.num_moe_layers and expert_product(config, dtype) == "loop":
        hf_config._experts_implementation = "eager"


def compare_with_dense(dense: Path, mixture: Path, rounded: bool) -> float | None:
    """Compare the logits of an upcycled checkpoint with its dense source's.

    transformers runs both in float32.

    Args:
        rounded: True if the mixture was rounded from float32 to bfloat16; the error then says so.

    Returns:
        Relative difference; None for models that are too large to run.

    Raises:
        CheckpointError: the relative difference is more than 1e-5.
    """
    configs = {folder: model_config_from_hf(folder) for folder in (dense, mixture)}
    if any(map(_too_large, configs.values())):
        return None
    tokens = _tokens(configs[dense])
    (before, _), (after, _) = (
        _run_transformers(folder, tokens, configs[folder]) for folder in configs
    )
    why = (
        ". If weights are in bfloat16 and the granularity is not a power of two, down "
        "projections are rounded: write them with --dtype float32"
    )
    if rounded:
        why = (
            ", since it was rounded from float32 to bfloat16: upcycle without --dtype, and round the "
            "result with automoe convert --dtype bfloat16"
        )
    return _relative_error(after, before, mixture, f"its logits are not those of {dense}", why)


@contextmanager
def _unquantized(catalog: Catalog, config: ModelConfig) -> Iterator[Path]:
    """Yield the directory of ``catalog``, or of a temporary float32 copy if it is quantized.

    transformers 5 derives the block size from the number of scales. This is wrong if rows or
    columns are no multiple of 128 (576 rows have five scales), and transformers then refuses or
    misreads the matrix.
    """
    if all(source.encoding == "plain" for source in catalog.sources.values()):
        yield catalog.folder
        return
    with TemporaryDirectory(prefix=".float32.", dir=catalog.folder) as copy:
        folder = Path(copy)
        keys, shards = family_of(config).keys, unread_shards(config)
        plan = plan_writes(shards, config, keys, torch.float32, source=catalog)
        Transfer(plan, Ranks(alone=True), catalog).write(folder)
        of_folder = replace(config, hf_path=str(catalog.folder))
        write_settings(folder, of_folder, torch.float32, None, source=catalog)
        yield folder


# transformers would warn of tensors that are judged here, and of kernels that are not installed.
@without_warnings()
def _run_transformers(
    folder: Path, tokens: Tensor, config: ModelConfig, beside: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Run the checkpoint in transformers; return logits [B, S, V] and chosen experts [B, S, L, K].

    L counts layers with experts; without any the second result is an empty tensor.

    Args:
        beside: name prefixes of tensors that transformers need not use.

    Raises:
        CheckpointError: transformers misses tensors, or has no use for some.
    """
    from transformers.utils import logging as bars

    # transformers' progress bars would overwrite this run's own line.
    hidden = switched_off(
        bars.is_progress_bar_enabled, bars.disable_progress_bar, bars.enable_progress_bar
    )
    with hidden, without_adapter(folder) as plain:
        hf_config = stated_config(folder)
        multiply_as_torch_can(hf_config, config, torch.float32)
        model, info = loading_class(hf_config, whole=True).from_pretrained(
            plain,
            config=hf_config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    modules = re.compile(r"model\.layers\.(\d+)\.")
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        odd = [
            key
            for key in info[kind]
            if not (kind[0] == "u" and key.startswith(beside))
            and not ((match := modules.match(str(key))) and int(match[1]) >= config.num_layers)
        ]
        if odd:
            raise CheckpointError(
                f"{folder}: transformers reports {len(odd)} {kind.replace('_', ' ')}: {listed(odd)}"
            )
    chosen = []
    for name, module in model.named_modules():
        # Experts take (rows, choices, weights) in every release; routers' return values differ.
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _module, inputs: chosen.append(inputs[1].view(*tokens.shape, -1))
            )
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits
    return logits, torch.stack(chosen, dim=2) if chosen else torch.empty(0)
