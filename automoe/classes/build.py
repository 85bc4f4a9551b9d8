"""Build a causal language model by its class of ``transformers``; find its layers, experts, head.

The class is built on the meta device from a ``config.json``. Code that comes with a checkpoint is
never imported.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from automoe.classes.expert_parallel import obstacle
from automoe.config.hub import local_folder
from automoe.errors import ConfigError, one_line
from automoe.hf.wrapper import text_config, text_path
from automoe.kernels.logits import cap_logits
from automoe.model.init import default_dtype
from automoe.model.param_spec import Param, ParamSpec

# The first of these words in a parameter's name, before the colon, tells its part of the model.
_PART_WORDS = (
    "norm:norms shared:shared_experts router:router .gate.:router attn:attention "
    "attention:attention mixer:attention mamba:attention conv:attention :dense_ffn"
).split()
_PLACES = {"attention": 1, "router": 7, "dense_ffn": 7, "shared_experts": 7, "routed_experts": 7}
# Groups of ``lora.targets``, by part.
_GROUPS = {
    "attention": "attention",
    "dense_ffn": "mlp",
    "shared_experts": "shared_experts",
    "routed_experts": "experts",
}
ADAPTED_STACKS = {"gate_up_proj", "down_proj"}
# Words in keys of config.json that make training draw random numbers.
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")


def refused(path: object, problem: str, remedy: str = "Choose another checkpoint") -> ConfigError:
    """Return the error for a model that automoe can train neither natively nor by ``transformers``.

    Args:
        path: the model's checkpoint folder.
        problem: end of a sentence about the model's transformers class, such as "its logits are no
            multiple of ...".
        remedy: what the user should do.
    """
    rule = (
        f"automoe has no native family for it, and its transformers class cannot serve: {problem}"
    )
    return ConfigError("model.hf_path", path, rule, remedy)


def build_causal_lm(path: str, experts: str = "eager") -> Any:
    """Build a checkpoint's text model by its class of ``transformers``, on the meta device.

    Parameters have torch's default dtype; those that are not trained become buffers.

    Args:
        path: checkpoint folder or Hub id.
        experts: transformers' ``experts_implementation``; classes with only one take ``eager``.

    Raises:
        ConfigError: transformers has no such class or refuses the configuration; or the class does
            not generate token by token, draws random numbers in training (dropout), or has a
            single way to compute experts, which is not ``experts``.
    """
    import transformers

    stated, _ = transformers.PreTrainedConfig.get_config_dict(local_folder(path))
    model_type = stated.get("model_type")
    if model_type is None:
        names = stated.get("architectures")
        problem = f"config.json has no model_type; its architectures are {names}"
        raise refused(path, problem, "State the model_type of one architecture")
    if model_type not in transformers.CONFIG_MAPPING:
        problem = f"transformers {transformers.__version__} has no model_type={model_type}"
        raise refused(path, problem, "Install a newer transformers, or choose another checkpoint")
    stated.pop("quantization_config", None)
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        kind = transformers.CONFIG_MAPPING[model_type]
        config = kind.from_dict(stated)
        text = config.get_text_config(decoder=True)
        if text is not config and type(text) in classes:  # the text model of a wrapper
            text.tie_word_embeddings = text_config(stated)["tie_word_embeddings"]
            config = text
        if type(config) not in classes:
            classes = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if type(config) not in classes:
            raise ValueError(f"model_type={model_type} has no causal language model")
        _refuse_random(text.to_dict())
        made = classes[type(config)]
        if not issubclass(made, transformers.GenerationMixin):  # such as one that denoises blocks
            raise ValueError(f"{made.__name__} does not generate token by token")
        one_way = not made._can_set_experts_implementation()
        chosen = "eager" if one_way else experts
        text._experts_implementation = chosen
        config._experts_implementation = {"": chosen}  # not of vision, which may have one way only
        with torch.device("meta"):
            model = made(config)
        if one_way and experts != "eager" and experts_modules(model):
            raise ValueError(f"it computes experts in only one way, not as {experts}")
        _remove_beside(model)
    except Exception as error:  # a configuration class or a model's may raise any exception
        problem = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise refused(path, one_line(f"{problem}{error}")) from error
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter.requires_grad:  # FSDP needs one dtype
                parameter.data = parameter.data.to(torch.get_default_dtype())
            else:  # such as a selection bias, which must be neither sharded nor rounded
                del module._parameters[key]
                module.register_buffer(key, parameter.data)
    return model


def _remove_beside(model: Any) -> None:
    """Remove the modules and parameters of a multimodal model that are neither its text model nor its output head."""
    owner = model
    for name in filter(None, text_path(model).split(".")):
        for key in list(owner._parameters):  # such as a separator between images
            vars(owner)[key] = owner._parameters.pop(key)  # the class may initialise it
        for other, module in list(owner.named_children()):
            if other != name and module is not model.get_output_embeddings():
                setattr(owner, other, None)
        owner = getattr(owner, name)


def _refuse_random(values: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a setting makes training draw random numbers, such as dropout > 0.

    Args:
        values: the model's configuration; nested dictionaries are searched too.
    """
    for key, value in values.items():
        if isinstance(value, dict):
            _refuse_random(value)
        elif (
            any(word in str(key) for word in _RANDOM)
            and isinstance(value, int | float)
            and value > 0
        ):
            raise ValueError(f"{key}={value} draws random numbers; set it to 0 in config.json")


def is_tied(model: Any) -> bool:
    """Return whether the output head and the embedding share one weight."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module of the model's modules whose experts ``ExpertParallel`` can shard."""
    return {name: module for name, module in model.named_modules() if holds_experts(module)}


def holds_experts(module: nn.Module) -> bool:
    """Return whether ``module`` has stacked expert weights that ``ExpertParallel`` can shard."""
    return any(weight.dim() > 2 for weight in module.parameters()) and not obstacle(module)


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a transformers model, in the order of the forward pass."""
    kinds = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    inner = {id(part) for module in layers for part in list(module.modules())[1:]}
    return [module for module in layers if id(module) not in inner]


def class_params(path: str) -> tuple[Param, ...]:
    """Return the parameters and persistent buffers of a checkpoint's ``transformers`` model.

    Args:
        path: checkpoint folder or Hub id; its config.json names the class.

    Raises:
        ConfigError: ``build_causal_lm`` cannot build the class.
    """
    return _class_params(path, (local_folder(path) / "config.json").read_bytes())


@cache
def _class_params(path: str, stated: bytes) -> tuple[Param, ...]:
    model = build_causal_lm(path)
    layer_of = {
        tensor: number
        for number, layer in enumerate(decoder_layers(model))
        for tensor in layer.state_dict(keep_vars=True).values()
    }
    experts = {p for module in experts_modules(model).values() for p in module.parameters()}
    adapted = _adapted(model)
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    part_of = {module.weight: part for part, module in reversed(ends.items()) if module is not None}
    params = []
    if is_tied(model):
        model.set_output_embeddings(None)
    for name, parameter in model.state_dict(keep_vars=True).items():
        part = "routed_experts" if parameter in experts else part_of.get(parameter)
        if part is None:
            words = (pair.split(":") for pair in _PART_WORDS)
            part = next(part for word, part in words if word in name)
        matrix = parameter.dim() > 1 and not name.endswith("bias")
        kind = "matrix" if matrix else "vector"
        if not isinstance(parameter, nn.Parameter):
            kind = "buffer"
        if part == "router" and not matrix:
            part = "norms"
        spec = ParamSpec(name, "", _PLACES.get(part, 0), kind, part=part)
        if name in adapted and (group := _GROUPS.get(part)):
            # As in native families, names of attention's matrices stand alone.
            inside = "" if group == "attention" else f"{group}."
            spec = replace(spec, shape="O I", group=group, lora=inside + adapted[name])
        params.append(Param(name, tuple(parameter.shape), spec, layer_of.get(parameter)))
    return tuple(params)


def _adapted(model: Any) -> dict[str, str]:
    """Return parameter name -> name in ``lora.targets``, for parameters that may get LoRA adapters.

    These are the matrices of linear layers, named as the layer, and the experts' stacks [E, O, I]
    ``gate_up_proj`` and ``down_proj``. No adapter is added to layers with one output (gates), to
    subclasses of ``nn.Linear`` with another ``forward``, or to indexers of sparse attention, which
    the loss does not reach.
    """
    adapted = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        linear = type(module).forward is nn.Linear.forward and module.out_features > 1
        if linear and "indexer" not in name:
            adapted[f"{name}.weight"] = last
        elif holds_experts(module) and not getattr(module, "is_transposed", False):
            stacks = {key: p for key, p in module.named_parameters() if p.dim() == 3}
            if stacks.keys() == ADAPTED_STACKS:
                adapted |= {f"{name}.{key}": key for key in stacks}
    return adapted


class Head(NamedTuple):
    """How a model computes logits from its last hidden states x and its head's weight W.

    Logits are y = scale W x, or soft_cap tanh(y / soft_cap).

    Attributes:
        scale: factor of the product.
        soft_cap: bound of the logits; 0: none.
        rows: number of rows of W that give logits; any further rows are padding.
    """

    scale: float
    soft_cap: float
    rows: int


def inner_model(model: Any, path: str) -> tuple[str, nn.Module]:
    """Return name and module of the submodule that runs before the output head (base model).

    Args:
        path: checkpoint folder, for the error.

    Raises:
        ConfigError: the class names no base model, and no direct child has the decoder layers.
    """
    if model.base_model is not model:
        return model.base_model_prefix, model.base_model
    layers = decoder_layers(model)
    for name, module in model.named_children():
        if layers and layers[0] in module.modules():
            return name, module
    raise refused(path, f"{type(model).__name__} does not name the module of its layers")


def head_of(model: Any, path: str) -> Head:
    """Return how the model's class computes logits: scale, soft cap and number of rows of the head.

    The class's code is run with a small head: tiny hidden states give the scale, huge ones the cap.

    Args:
        path: checkpoint folder, for messages.

    Raises:
        ConfigError: logits are no multiple, with or without a soft cap, of hidden states times the
            head's weight.
    """
    head = model.get_output_embeddings()
    probe = copy(model)
    probe._modules = dict(model._modules)
    name, _ = inner_model(model, path)

    def logits(weight: nn.Linear, hidden: Tensor) -> Tensor:
        setattr(probe, name, _Returns(hidden))
        probe.set_output_embeddings(weight)
        with torch.no_grad():
            return probe(input_ids=torch.zeros(2, 3, dtype=torch.int64)).logits.double()

    # The dtype of the model's parameters, unless it is too coarse to tell a factor.
    with default_dtype(torch.promote_types(torch.get_default_dtype(), torch.float32)):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, 3, head.in_features, generator=generator)
        small = nn.Linear(head.in_features, 5, bias=False)
        product = small(hidden).detach().double()
        stated = _numbers(model.config.to_dict())
        slope = float((1e4 * logits(small, 1e-4 * hidden) * product).sum() / product.square().sum())
        scale = _as_stated(slope, stated)
        largest = logits(small, 1e6 * hidden)
        soft_cap = 0.0
        if not torch.allclose(largest, 1e6 * scale * product, rtol=1e-4):
            soft_cap = _as_stated(float(largest.abs().max()), stated)
        expected, _ = cap_logits(10 * scale * product, soft_cap)
        equal = torch.allclose(logits(small, 10 * hidden), expected, atol=1e-4, rtol=1e-4)
        if head.bias is not None or not equal:
            raise refused(path, "its logits are no multiple of hidden states times the head")
        whole = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        return Head(scale, soft_cap, logits(whole, hidden.to("meta")).shape[-1])


def _numbers(values: Any) -> set[float]:
    """Return a set of 1, all numbers in the configuration ``values`` (nested dicts and lists), and their inverses.

    ``_as_stated`` replaces a measured factor, which has rounding errors, by the nearest of these
    numbers.
    """
    numbers = {1.0}
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, dict | list):
            numbers |= _numbers(value)
        elif type(value) in (int, float) and value:
            numbers |= {float(value), 1 / value}
    return numbers


def _as_stated(measured: float, stated: set[float]) -> float:
    """Return the closest number of ``stated`` with a relative error below 1e-6, else ``measured``."""
    near = (number for number in stated if abs(measured - number) < 1e-6 * abs(number))
    return min(near, key=lambda number: abs(measured - number), default=measured)


class _Outputs:
    """Stand-in for a base model's outputs: ``last_hidden_state`` and any index return ``hidden``.

    All other attributes are None.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, _: object) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


class _Returns(nn.Module):
    """Stand-in for a base model, whose forward ignores its arguments and returns ``hidden``.

    Args:
        hidden: last hidden states, returned as ``last_hidden_state`` of an object.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, **_):
        return _Outputs(self.hidden)
