"""Activation memory of a model's ``transformers`` class, measured on fake tensors.

The layers run forward and backward over torch's fake tensors, which have shapes and no storage.
The outputs of operators (as the CPU dispatches them) are counted from their creation until they
are freed; temporary memory inside an operator is not.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from automoe.classes.build import experts_modules
from automoe.classes.expert_parallel import RoutedCall
from automoe.classes.model import TransformersModel
from automoe.comm.tokens import Tokens
from automoe.config.schema import Config, MoEConfig
from automoe.interop.torch_fake import NEED_NUMBERS, AliveBytes, FakeTensorMode
from automoe.model.init import default_dtype
from automoe.storage.foreign import brief

# what a micro-batch keeps once, such as masks; of each layer what it keeps, and the most that its
# backward pass needs beyond what this and earlier layers kept
Counted = tuple[float, list[tuple[float, float]]]


def class_layers(config: Config, ep: int, expert_rows: float) -> Counted | str:
    """Return the activation bytes of one micro-batch, or text that says why they are unknown.

    The model's ``transformers`` class runs on fake tensors.

    Args:
        ep: ranks that hold equal parts of the experts.
        expert_rows: number of (token, expert) pairs that a rank's experts compute; read if ep is
            above 1.

    Returns:
        (bytes stored once per micro-batch, such as masks; a pair for each layer: bytes it stores
        for the backward pass, and the most that its backward pass adds to what this and earlier
        layers store). Text if the class's code cannot run on fake tensors.
    """
    train = config.train
    rows = int(expert_rows) if ep > 1 else 0
    narrow = train.dtype == "bfloat16"
    sizes = train.micro_batch_size, train.seq_len, config.data.document_mask
    key = config.model.hf_path, config.moe.experts, narrow, *sizes, ep, rows
    if key not in _counted:
        try:
            _counted[key] = _count(config, narrow, ep, rows)
        except NEED_NUMBERS:
            _counted[key] = "its code needs numbers"
        except Exception as error:  # code of a class may raise any exception: which one is said
            _counted[key] = f"its code failed without numbers: {brief(error)}"
    if isinstance(_counted[key], str) or train.dtype != "float64":
        return _counted[key]
    once, layers = _counted[key]
    return 2 * once, [(2 * num_bytes, 2 * work) for num_bytes, work in layers]


_counted: dict[Any, Any] = {}


def _count(config: Config, narrow: bool, ep: int, expert_rows: int) -> Counted:
    model, train = config.model, config.train
    with default_dtype(torch.bfloat16 if narrow else torch.float32):
        part = TransformersModel(model, MoEConfig(experts=config.moe.experts))
    num_local = max(1, model.num_experts // ep)

    def dispatch(x_TH, topk_ids_TK, probs_TK, experts) -> Tensor:
        """Stand in for a token dispatcher under ``FakeTensorMode``; return [T, H].

        Call ``experts`` on ``expert_rows`` rows, this rank's number of (token, expert) pairs.
        Only shapes are right: every row is token 0.
        """
        token_R = topk_ids_TK.new_zeros(expert_rows)
        received_RH = x_TH.index_select(0, token_R)
        probs_R = probs_TK.flatten().index_select(0, token_R)
        out_RH = experts(received_RH, token_R, token_R.new_zeros(num_local).int(), probs_R)
        return torch.zeros_like(x_TH).index_add(0, token_R, out_RH)

    modules: list[Any] = list(experts_modules(part).values())
    for module in modules if ep > 1 else ():
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(parameter[:num_local].clone()))
        module.forward = RoutedCall(module, dispatch).route
        module.num_experts = num_local
    with FakeTensorMode(allow_non_fake_inputs=True):
        part.to_empty(device="cpu").train()
        index = torch.zeros(train.micro_batch_size, train.seq_len, dtype=torch.int64)
        docs = index if config.data.document_mask else None
        tokens = Tokens(index, index, docs, index[0, 0])
        before = [*part.parameters(), *part.buffers(), index]
        with AliveBytes(num_local, before) as alive:
            return _run(part, index, tokens, alive)


def _run(part: TransformersModel, index: Tensor, tokens: Tokens, alive: AliveBytes) -> Counted:
    marks: list[int] = []  # alive before each layer, and after the last
    # in the backward pass behind the last layer, then of each layer from the last
    most: list[int] = []
    inputs: list[int] = []

    def begin(_, args, kwargs) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        marks.append(alive.now)
        inputs.append(x.untyped_storage().nbytes())
        x.register_hook(end)

    def end(_) -> None:
        most.append(alive.most)
        alive.most = alive.now

    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None

    layers = [unit.layer for unit in part.units()]
    first: dict[Any, nn.Module] = {}
    alike = [first.setdefault(_kind(layer), layer) for layer in layers]
    for layer, like in zip(layers, alike, strict=True):
        _run_once(layer, like)
        layer.register_forward_pre_hook(begin, with_kwargs=True)
    layers[-1].register_forward_hook(lambda *_: marks.append(alive.now))
    for parameter in part.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    hidden = part.run_layers(index, tokens)
    hidden.register_hook(end)
    alive.most = alive.now
    hidden.backward(torch.empty_like(hidden))
    del hidden
    sizes = {}
    for number, layer in enumerate(layers):
        below = marks[number + 1] - inputs[0]
        sizes[layer] = marks[number + 1] - marks[number], most[-1 - number] - below
    # The class may run a layer whose like it has run, if layers return more than one tensor.
    return marks[0] - inputs[0], [sizes[like] for like in alike]


def _kind(layer: nn.Module) -> Any:
    """Return a key that is equal for layers whose shapes, settings and submodules are equal."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, parameter.shape) for key, parameter in module.named_parameters(recurse=False)
            ),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, int | float | str) and key not in ("layer_idx", "layer_id")
            ),
        )
        for name, module in layer.named_modules()
    )


def _run_once(layer: Any, like: Any) -> None:
    """Make ``layer`` return its input instead of computing, if it is not the first of its kind.

    Memory is measured once per kind of layer. If ``like``, when it ran, returned anything but
    a single tensor, ``layer`` computes as usual.

    Args:
        like: first layer of the model with equal shapes and settings; it may be ``layer`` itself.
    """
    original = layer.forward

    @wraps(original)
    def forward(*args, **kwargs):
        if layer is not like and like.returns_one:
            return args[0] if args else kwargs["hidden_states"]
        out = original(*args, **kwargs)
        layer.returns_one = isinstance(out, Tensor)
        return out

    layer.forward = forward
