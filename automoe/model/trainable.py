"""Which parameters of a model are trained: low-rank adapters (``lora``) and freezing by name.

The file handles names and shapes alone and needs no torch. Letters: r rank, O output and I input
features (of experts: I width), E experts, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from automoe.config.facts import BASE_BLOCKS
from automoe.config.schema import Config, LoraConfig
from automoe.model.params import Param, adapter_specs


def target_names(param: Param) -> tuple[str, ...]:
    """Return the names by which ``lora.targets`` may select this parameter.

    They are its group and its own name, such as ("attention", "q_proj"); () if it gets no adapter.
    """
    return () if param.spec.lora is None else (param.spec.group, param.spec.lora)


def is_target(param: Param, lora: LoraConfig) -> bool:
    """Return whether ``param`` gets a LoRA adapter: rank above 0, and ``lora.targets`` selects it."""
    return lora.rank > 0 and any(name in lora.targets for name in target_names(param))


def adapters(param: Param, rank: int) -> list[Param]:
    """Return the parameters of the LoRA adapter of ``param``: A [r, I] and B [O, r] for rank r.

    Routed experts have stacks of E adapters, with one A for gate and up projection.
    """
    stack = param.shape[:1] if param.expert else ()
    shapes = (*stack, rank, param.shape[-1]), (*param.shape[:-1], rank)
    before = param.name.removesuffix(param.spec.name)
    return [
        replace(param, name=before + spec.name, shape=shape, spec=spec)
        for spec, shape in zip(adapter_specs(param.spec), shapes, strict=True)
    ]


def is_trained(name: str, config: Config) -> bool:
    """Return whether the model's own parameter ``name`` (not an adapter's) is trained.

    Patterns in ``train.freeze`` freeze parameters; with LoRA all are frozen. In both cases patterns
    in ``train.trainable`` train a parameter nevertheless.
    """
    frozen = ["*"] if config.lora.rank else config.train.freeze
    return not _matches(name, frozen) or _matches(name, config.train.trainable)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def packed_shape(param: Param, config: Config) -> tuple[int, ...] | None:
    """Return the shape [..., rows, blocks, bytes] in which the matrix ``param`` is stored quantized.

    Blocks are of consecutive numbers of a row, bytes those of one block.

    ``lora.base`` names the format. None: the matrix is stored unquantized, since it is trained, can
    take no adapter, or ``lora.base`` is weights.
    """
    stays = config.lora.base == "weights" or param.spec.lora is None
    if stays or is_trained(param.name, config):
        return None
    size, num_bytes = BASE_BLOCKS[config.lora.base]
    return *param.shape[:-1], -(-param.shape[-1] // size), num_bytes


def as_stored(params: list[Param], config: Config) -> list[Param]:
    """Return ``params`` with the shapes in which they are stored.

    A matrix that ``lora.base`` quantizes gets the shape that ``packed_shape`` returns, and the
    numbers per block in ``Param.packed``.
    """
    shapes = [packed_shape(param, config) for param in params]
    return [
        param
        if shape is None
        else replace(param, shape=shape, packed=BASE_BLOCKS[config.lora.base][0])
        for param, shape in zip(params, shapes, strict=True)
    ]


def with_adapters(params: list[Param], config: Config) -> list[Param]:
    """Return ``params`` with ``Param.trained`` set, each LoRA target followed by A and B of its adapter."""
    made: list[Param] = []
    for param in params:
        made.append(replace(param, trained=is_trained(param.name, config)))
        if is_target(param, config.lora):
            made += adapters(param, config.lora.rank)
    return made
