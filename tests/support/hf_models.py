"""Small random models of every family, made by ``transformers``: what adapters are compared with."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from automoe.config.schema import ModelConfig
from automoe.hf.families.registry import family_of
from automoe.hf.transformers_models import loading_class
from automoe.hf.wrapper import names_in_class
from tests.support.class_models import hf_class_config
from tests.support.hf_sizes import SIZES, SMALL_MODELS
from tests.support.releases import skip_without

# Published with the experts of a layer in one tensor; transformers saves them one by one unless told otherwise.
PUBLISHED_FUSED = ("qwen3_5_moe", "qwen3_5_moe_text")


def in_wrapper(config: Any) -> Any:
    """A text model's configuration; of one that transformers has in wrappers alone, that of a small wrapper."""
    if config.model_type != "muse_spark_text":
        return config
    from transformers import AutoConfig

    small = hf_class_config("muse_spark").to_dict()
    small["audio_config"]["out_hidden_size"] = config.hidden_size
    sizes = {"text_config": config.to_dict(), "out_hidden_size": 16, "projector_hidden_size": 16}
    return AutoConfig.for_model(**deepcopy(small | sizes))


def text_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters of the text model, by their names in it alone."""
    plain = names_in_class(model).plain
    return {name: one for key, one in model.named_parameters() if (name := plain(key)) is not None}


def hf_model_of(folder: Path, **options: Any) -> Any:
    """The checkpoint in ``folder`` as a model of transformers, with vision and audio if it has them."""
    from transformers import AutoConfig

    kind = loading_class(AutoConfig.from_pretrained(folder), whole=True)
    return kind.from_pretrained(folder, **options)


def small_hf_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, other_sizes: dict[str, Any] | None = None
) -> Any:
    """A transformers model of ``SMALL_MODELS`` with random weights, norms and selection biases."""
    from transformers import AutoConfig

    model_type, sizes = SMALL_MODELS[name]
    skip_without(model_type)
    sizes = sizes | (other_sizes or {})
    config = in_wrapper(AutoConfig.for_model(model_type, **deepcopy(SIZES | sizes)))  # it writes into nested dicts
    model = loading_class(config, whole=True).from_config(config, dtype=dtype)
    for module in model.modules():
        if hasattr(module, "alpha"):  # GPT-OSS: transformers before 5.19 does not read them
            module.alpha = sizes.get("swiglu_alpha", module.alpha)
            module.limit = sizes.get("swiglu_limit", module.limit)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith(("_correction_bias", ".bias")):
                parameter.copy_(0.2 * noise)
            elif key.endswith("norm.weight"):
                parameter.add_(0.1 * noise)  # to one or, where norms are zero-centred, zero
            elif key.endswith("A_log"):
                # A state that remembers: read from one token alone, a head whose query and key are almost
                # orthogonal is almost zero, and its norm would make rounding as large as the rest.
                parameter.copy_(0.5 * noise - 3)
            else:
                # Large enough that experts differ and attention is not flat.
                parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if key.endswith("tid2eid"):
                noise = torch.rand(len(buffer), config.n_routed_experts, generator=generator)
                buffer.copy_(noise.topk(buffer.shape[1]).indices)
    return model.eval()


def as_our_tensor(name: str, shape: torch.Size, theirs: dict[str, torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Our tensor ``name`` of ``shape``, or its gradient, put together from transformers' tensors in memory."""
    whole = torch.empty(shape)
    for piece in family_of(config).keys.in_memory.pieces(name, tuple(shape)):
        whole[piece.box] = piece.within(theirs[piece.key].view(piece.shape))
    return whole


def save_small_hf(
    name: str,
    path: str | Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    other_sizes: dict[str, Any] | None = None,
    **save_options: Any,
) -> Any:
    """Write ``small_hf_model`` as a checkpoint directory, in the published layout, and return it."""
    model = small_hf_model(name, seed, dtype, other_sizes)
    save_options.setdefault("save_original_format", model.config.model_type not in PUBLISHED_FUSED)
    model.save_pretrained(path, **save_options)
    return model
