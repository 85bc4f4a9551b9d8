"""Model that runs the code of its class of ``transformers``, for model families without native code.

``transformers`` builds the class on the meta device from the ``config.json`` at ``model.hf_path``.
``TransformersModel`` gives it the trainer's interface (``CausalLM``). The class computes its layers; loss, balance
losses and counters are those of native families. Parameters keep the class's names. Code that comes with a
checkpoint is never imported.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from automoe.classes.build import (
    build_causal_lm,
    decoder_layers,
    experts_modules,
    head_of,
    inner_model,
    refused,
)
from automoe.classes.experts import are_swiglu, compute_by
from automoe.classes.lora import add_to_experts, add_to_linear, check_called
from automoe.comm.tokens import MicroBatch, Tokens
from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.errors import ConfigError
from automoe.kernels.counter_random import stream_key
from automoe.model.backend import BackendConfig
from automoe.model.causal_lm import CausalLM, Unit
from automoe.model.init import default_dtype, initialize, reset_buffers
from automoe.moe.experts import expert_backend
from automoe.moe.lora import ExpertLora
from automoe.moe.router import BalancedRouter, Routing, score_experts
from automoe.parallel.fsdp import reshard

SMALL = 1 << 16  # the class itself initialises parameters of up to so many numbers, on every rank
# value of ``moe.experts``: transformers' own implementation, for experts that are not plain SwiGLU
EXPERTS = {"loop": "eager", "grouped_mm": "grouped_mm", "triton": "grouped_mm"}
_ROUNDING = 8  # units in the last place, of a token's last hidden states
_LEAST, _ROW = 16, 2048  # tokens: see ``row_to_try``
# in names of sizes that count positions, in configurations of classes
_SPANS = re.compile("block|chunk|compress|index_topk|kernel|stride|window")
_BLOCKS = re.compile("block_size|compress")


@torch.no_grad()
def _keep_own_values(model: Any, path: str, seed: int) -> None:
    """Store the class's own initial values of buffers and small parameters on its modules, for ``initialize``.

    To find values that the class leaves unset, it initialises twice, over zeros and over ones: those differ
    afterwards. Large parameters stay on meta; ``automoe.model.init`` initialises them.

    Args:
        model: transformers model on meta; modules get ``first_values`` (of parameters) and ``reset_buffers``.
        path: checkpoint folder, for error messages.
        seed: seed of the class's random initial values.

    Raises:
        ConfigError: the class leaves a buffer or a small parameter unset.
    """
    modules = list(model.named_modules())
    held = {
        (module, kind, key): buffer
        for _, module in modules
        for kind in ("_parameters", "_buffers")
        for key, buffer in vars(module)[kind].items()
        if buffer is not None and (kind == "_buffers" or buffer.numel() <= SMALL)
    }
    # as in transformers, a model within the model initialises its own modules
    owner = {
        part: module
        for _, module in modules
        if hasattr(module, "_init_weights")
        for part in module.modules()
    }
    values: list[dict[Any, Tensor]] = []
    for fill in (0, 1):
        for (module, kind, key), buffer in held.items():
            made = torch.full_like(buffer, fill, device="cpu")
            vars(module)[kind][key] = nn.Parameter(made) if kind == "_parameters" else made
        for name, module in reversed(modules):  # submodules before their parent
            with torch.random.fork_rng([]):
                torch.default_generator.manual_seed(stream_key(name, seed) % (1 << 63))
                try:
                    owner[module]._init_weights(module)
                except RuntimeError as error:  # such as a negative initializer_range
                    raise refused(path, f"it cannot initialise {name}: {error}") from error
        values.append({place: vars(place[0])[place[1]][place[2]].detach() for place in held})
    names = {module: name for name, module in modules}
    initial: dict[nn.Module, dict[str, dict[str, Tensor]]] = {}
    for place, buffer in held.items():
        module, kind, key = place
        if not torch.equal(values[0][place], values[1][place]):
            problem = f"{type(model).__name__} does not initialise {names[module]}.{key}"
            raise refused(path, problem)
        vars(module)[kind][key] = buffer
        first = values[0][place]
        if _is_expert_table(model, *place) and not first.any():
            # It waits for a checkpoint: let token ids use all experts alike.
            experts = next(iter(experts_modules(model).values()))
            first = torch.arange(first.numel()).view_as(first) % experts.num_experts
        initial.setdefault(module, {}).setdefault(kind, {})[key] = first
    for module, kinds in initial.items():
        module.first_values = kinds.get("_parameters", {})
        module.reset_buffers = partial(_reset, module, kinds.get("_buffers", {}))


def _is_expert_table(model: Any, module: nn.Module, kind: str, key: str) -> bool:
    """Return whether ``vars(module)[kind][key]`` is a saved buffer with a row of expert ids for each token id."""
    table = vars(module)[kind][key]
    saved = kind == "_buffers" and table.dtype == torch.int64 and key in module.state_dict()
    by_token = table.dim() == 2 and len(table) == len(model.get_input_embeddings().weight)
    return saved and by_token and bool(experts_modules(model))


def _reset(module: nn.Module, values: dict[str, Tensor]) -> None:
    for key, value in values.items():
        module._buffers[key].copy_(value)


class _Narrow(TorchFunctionMode):
    """Torch-function mode that sets ``seen`` if an operation returns float32 numbers that need a gradient."""

    seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.requires_grad and out.dtype == torch.float32:
            self.seen = True
        return out


def computes_in_float32(config: ModelConfig) -> bool:
    """Return whether the model's ``transformers`` class converts float64 activations to float32.

    It runs the model once with parameters in float64 to find out.
    """
    with default_dtype(torch.float64):
        model = TransformersModel(config, MoEConfig(experts="loop")).to_empty(device="cpu")
    reset_buffers(model)
    initialize(model, 0.02, 0)
    with _Narrow() as narrow:
        model(torch.zeros(1, model.row_to_try(), dtype=torch.int64))
    return narrow.seen


class ClassRouter(BalancedRouter):
    """Balance losses and load counters of one MoE layer whose router is code of ``transformers``.

    Attributes:
        logits: [T, E] router logits that the class computed last; None if no balance loss is on.
        live: [B, S, K] the router's own choice of experts while forced ids replace it; else None.
    """

    logits: Tensor | None = None
    live: Tensor | None = None

    def forward(self, routing: Routing, tokens: Tokens) -> Routing:
        """In training, count expert choices and attach balance losses to the routing weights; return ``routing``."""
        if not (self.training and torch.is_grad_enabled()):
            return routing
        shape = (*tokens.index.shape, self.num_scored_experts)
        logits = routing.topk_probs.new_zeros(shape) if self.logits is None else self.logits
        self.logits = None
        return self._balance(score_experts(logits.view(shape), RouterConfig()), routing, tokens)

    def keep(self, recorder: Any, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a module that computes router logits: store them in ``self.logits``.

        Args:
            recorder: transformers' ``OutputRecorder``; its ``index`` is the place of the logits in ``output``.
        """
        self.logits = output[recorder.index]


class _Repeated(TorchFunctionMode):
    """Torch-function mode that replays routing: a top-k over all experts returns ``Tokens.forced_ids``.

    Where a forced id is -1, top-k's own stays. The class computes routing weights from its own scores of these ids.
    """

    def __init__(self, router: ClassRouter, tokens: Tokens) -> None:
        super().__init__()
        self._router, self._tokens = router, tokens
        router.live = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        router, shape, name = self._router, self._tokens.index.shape, getattr(func, "__name__", "")
        if name != "topk" or args[0].shape[-1] != router.num_scored_experts:
            return out
        live = out.indices
        if live.shape[-1] != router.top_k or live.numel() != shape.numel() * router.top_k:
            return out
        router.live = live.view(*shape, router.top_k)
        ids_BSK, *_ = router.replay(router.live, router.live, self._tokens)
        ids = ids_BSK.view(live.shape)
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


class _MoELayer(NamedTuple):
    router: ClassRouter
    experts: nn.Module


class _Probe(NamedTuple):
    """State of a test whether the first document of a packed row affects the second, by two forward passes.

    The passes differ only in the first document.

    Attributes:
        first: number of tokens of the first document.
        choices: experts module -> expert ids [T, K] that it used in the first pass.
        states: last hidden states [1, S, H] of each pass.
    """

    first: int
    choices: dict[nn.Module, Tensor]
    states: list[Tensor]

    def choose(self, experts: nn.Module, ids_TK: Tensor) -> Tensor:
        """Return the expert ids [T, K] that ``experts`` is to use, given the router's ``ids_TK``.

        The first pass stores them. The second repeats them for the first document, whose tokens keep their experts.
        """
        kept_TK = self.choices.setdefault(experts, ids_TK)
        return torch.cat((kept_TK[: self.first], ids_TK[self.first :]))


def spans(config: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield (key, number) for each integer in nested ``config`` under a key that names a size in positions.

    Such a key contains block, chunk, compress, index_topk, kernel, stride or window. ``name`` is that of ``config``.
    """
    if isinstance(config, dict):
        for key, value in config.items():
            yield from spans(value, f"{name}.{key}" if _SPANS.search(name) else key)
    elif isinstance(config, list):
        for value in config:
            yield from spans(value, name)
    elif type(config) is int and _SPANS.search(name):
        yield name, config


def longest_span(config: Any) -> int:
    """Return the most positions that a block, window, stride or rate in ``config`` (nested dictionaries) covers.

    It is at least 16. A top-k over blocks covers k blocks.
    """
    lengths = list(spans(config))
    chosen = max((number for name, number in lengths if "topk" in name), default=0)
    sizes = [number for name, number in lengths if "topk" not in name]
    blocks = [number for name, number in lengths if _BLOCKS.search(name)]
    return max(_LEAST, *sizes, chosen * max([1, *blocks]))


def _prime(least: int) -> int:
    """Return the smallest prime >= ``least``; 1 if ``least`` is below 2."""
    return next(n for n in itertools.count(max(least, 1)) if all(n % k for k in range(2, n)))


class TransformersModel(CausalLM):
    """Model that runs the ``transformers`` class for ``config.hf_path``, without pipeline stages.

    The class's modules are direct children of this module, so parameters keep the class's names.

    Raises:
        ConfigError: the class cannot be built, or its logits are no multiple of hidden states times a weight.
    """

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, backend: BackendConfig | None = None
    ) -> None:
        super().__init__(config, backend)
        path = str(config.hf_path)
        model = build_causal_lm(path, EXPERTS.get(moe.experts, "eager"))
        self.logit_scale, self.soft_cap, self._head_rows = head_of(model, path)
        self._inner = [inner_model(model, path)[1]]
        _keep_own_values(model, path, self.backend.seed)
        if config.tie_embeddings:
            model.set_output_embeddings(None)
        for name, module in model.named_children():
            self.add_module(name, module)
        self._class = [model]  # in a list, so that its modules have no second name here
        self._layers = decoder_layers(model)  # FSDP renames their class
        for number, layer in enumerate(self._layers):
            # Replacing forward, not wrapping the module, keeps parameter names.
            call = self.backend.calls(number).layer(layer.forward)
            if call != layer.forward:
                layer.forward = call
        self._tokens: Tokens | None = None
        self._unchecked = True
        self._probe: _Probe | None = None
        self._moe: dict[nn.Module, _MoELayer] = {}
        self.routers = nn.ModuleDict()
        stacks = experts_modules(model)
        modules = list(stacks.values())
        self.experts_by = self._choose_experts(modules, moe.experts)
        note = f"{config.architecture}: layers and routers by transformers' own code"
        indexer = any("indexer" in name for name, _ in self.named_parameters())
        said = "; the loss reaches no indexer, so none is trained" * indexer
        self.notes = (f"{note}; {self.experts_by}{said}",)
        for index, (name, experts) in enumerate(stacks.items()):
            router = ClassRouter(config, moe, index, self.backend.pg_collection)
            self.routers[str(index)] = router
            self._moe[experts] = _MoELayer(router, experts)
            experts.register_forward_pre_hook(partial(self._route, router))
            block = model.get_submodule(name.rpartition(".")[0])
            block.forward = self._repeating(router, block.forward)
        for key, coefficient in vars(moe).items():
            if key.endswith("_coef") and coefficient:
                self._record_logits(key, coefficient)
                break

    def _choose_experts(self, modules: list[nn.Module], chosen: str) -> str:
        """Let automoe's backend or transformers' own code compute the experts; return a line that says which.

        Args:
            modules: the experts modules of all layers.
            chosen: value of ``moe.experts``.

        Raises:
            ConfigError: ``chosen`` needs automoe's backend, and the experts are not plain SwiGLU.
        """
        if not modules:
            return "no layer has experts in stacks, which moe.experts and mesh.ep are for"
        ours = chosen != "loop" and all(map(are_swiglu, modules))
        wide = torch.get_default_dtype() == torch.float64
        if not ours and chosen != "loop" and (chosen != "grouped_mm" or wide):
            rule = f"{type(modules[0]).__name__} is not SwiGLU of two stacks, which {chosen} multiplies; "
            rule += "transformers' own grouped_mm has no float64"
            raise ConfigError("moe.experts", chosen, rule, "Set moe.experts=loop")
        if ours:
            make = self.backend.make_expert_backend or (lambda _: expert_backend(chosen))
            for experts in modules:
                compute_by(experts, make(experts))
        whose = "automoe's" if ours else "transformers' own"
        return f"experts by {whose} {chosen}"

    def _record_logits(self, key: str, coefficient: float) -> None:
        """Register hooks that pass the class's router logits to each layer's ``ClassRouter``.

        Args:
            key: config key of the balance loss that needs logits, for errors.
            coefficient: that key's value.

        Raises:
            ConfigError: a layer does not return the router logits of exactly one module.
        """
        recorded = getattr(self._inner[0], "_can_record_outputs", None) or {}
        recorder = recorded.get("router_logits")
        kind = getattr(recorder, "target_class", recorder)
        for unit in self.units():
            if unit.experts is None:
                continue
            modules = [
                m for m in unit.layer.modules() if isinstance(kind, type) and isinstance(m, kind)
            ]
            if len(modules) != 1 or not hasattr(recorder, "index"):
                rule = (
                    f"{self.config.architecture} does not give one module's router logits per layer"
                )
                raise ConfigError(f"moe.{key}", coefficient, rule, f"Set moe.{key}=0")
            modules[0].register_forward_hook(partial(self._moe[unit.experts].router.keep, recorder))

    def add_adapter(self, module: nn.Module, adapter: nn.Module) -> None:
        add = add_to_experts if isinstance(adapter, ExpertLora) else add_to_linear
        add(module, adapter)

    @property
    def embedding(self) -> nn.Module:
        return self._class[0].get_input_embeddings()

    @property
    def head_weight(self) -> Tensor:
        head = self._class[0].get_output_embeddings()
        weight = (self.embedding if head is None else head).weight
        return weight if len(weight) == self._head_rows else weight[: self._head_rows]

    def moe_layers(self) -> Iterator[tuple[int, _MoELayer]]:
        for unit in self.units():
            if unit.experts is not None:
                yield unit.number, self._moe[unit.experts]

    def units(self) -> Iterator[Unit]:
        for number, layer in enumerate(self._layers):
            experts = [module for module in layer.modules() if module in self._moe]
            yield Unit(number, layer, *experts)

    def run_layers(self, x: Tensor, tokens: Tokens) -> Tensor:
        self._tokens = tokens
        # transformers starts a new span of attention wherever positions start again.
        positions = tokens.index if tokens.doc_ids is None else tokens.positions
        x = self._inner[0](input_ids=x, position_ids=positions, use_cache=False).last_hidden_state
        if self._unchecked:
            check_called(self)
            self._unchecked = False
        return x

    def row_to_try(self, seq_len: int = 0) -> int:
        """Return the number of tokens of the row that ``check_isolation`` tries: max(seq_len, min(4 w, 2048)).

        w is the longest attention window, block or compression rate of the configuration, so up to w = 512 all take
        effect in each of the row's two documents.
        """
        return max(seq_len, min(4 * longest_span(self._class[0].config.to_dict()), _ROW))

    @torch.no_grad()
    def check_isolation(self, seq_len: int = 0) -> None:
        """Check that a document does not affect the next one in its packed row. Collective.

        Two passes differ in the first document's tokens, but use the same experts for it, so that products have equal
        shapes. The second document's states must be equal up to rounding. It begins at two prime positions in turn: no
        multiples of a block, window or stride. A note in ``self.notes`` says if the row is too short.

        Args:
            seq_len: positions of a training row. Longer windows have no effect there, so the test row needs only
                this length, or that of ``row_to_try`` if it is larger.

        Raises:
            ConfigError: the change reaches the second document.
        """
        device = self.head_weight.device
        length = self.row_to_try(seq_len)
        rng = torch.Generator().manual_seed(0)
        row, other = torch.randint(self.config.vocab_size, (2, 1, length), generator=rng).to(device)
        index = torch.arange(length, device=device).unsqueeze(0)
        trains = self.training
        for first in {_prime(length // 4), _prime(length // 2)}:
            self.eval()
            later = index >= first
            rows = {"positions": index - later * first, "doc_ids": later.long()}
            self._probe = _Probe(first, {}, [])
            for tokens in (row, row.where(later, other)):
                self(batch=MicroBatch(tokens, next_token_at=later & False, **rows))
            alone, changed = (state[0, first:].double() for state in self._probe.states)
            eps = torch.finfo(self._probe.states[0].dtype).eps
            self._probe = None
            moved = float(((changed - alone).norm(dim=-1) / alone.norm(dim=-1)).max())
            self.train(trains)
            if not moved <= _ROUNDING * eps:
                raise ConfigError(
                    "data.document_mask",
                    True,
                    f"{self.config.architecture} does not keep the documents of a row apart: in a row of {length}, "
                    f"other tokens before position {first} move a token of the document that begins there by "
                    f"{moved:.1%} of its size, and rounding by {eps:.0e}",
                    "Set data.document_mask=false; for conversations data.chat.pack=false, too",
                )
        if 4 * (longest := longest_span(self._class[0].config.to_dict())) > length:
            self.notes += (
                f"documents of a row were tried in {length:,} positions; the longest block, window or choice has "
                f"{longest:,}",
            )
        reshard([self])

    def last_norm(self, x_BsH: Tensor) -> Tensor:
        if self._probe is not None:
            self._probe.states.append(x_BsH)
        return x_BsH

    def _repeating(self, router: ClassRouter, forward: Any) -> Any:
        """Return the MoE module's ``forward``, wrapped to route by ``forced_ids`` if the micro-batch has them."""

        @wraps(forward)
        def repeating(*args, **kwargs):
            if self._tokens is None or self._tokens.forced_ids is None:
                return forward(*args, **kwargs)
            with _Repeated(router, self._tokens):
                return forward(*args, **kwargs)

        return repeating

    def _route(self, router: ClassRouter, experts: nn.Module, args: tuple[Any, ...]) -> Any:
        """Forward pre-hook of experts: count choices; return (tokens, ids, weights with balance losses attached)."""
        tokens = self._tokens
        assert tokens is not None
        x_TH, ids_TK, probs_TK = args
        if self._probe is not None:
            ids_TK = self._probe.choose(experts, ids_TK)
        ids_BSK, probs_BSK = (
            tensor.unflatten(0, tokens.index.shape) for tensor in (ids_TK, probs_TK)
        )
        live_BSK, differing = ids_BSK, None
        if tokens.forced_ids is not None:
            if router.live is None:
                rule = f"{self.config.architecture} chooses experts by other means than topk"
                raise ConfigError("routes", "given", rule, "Train without routes of an engine")
            live_BSK, router.live = router.live, None
            _, _, differing = router.replay(live_BSK, live_BSK, tokens)
        routing = router(Routing(ids_BSK, probs_BSK, live_BSK, differing=differing), tokens)
        return x_TH, ids_TK, routing.topk_probs.flatten(0, 1)
