"""Training session for reinforcement learning, which a script or a framework drives on any mesh.

    log_probs(batch)                 -> log-probabilities of the samples' tokens
    forward_backward(batch, loss)    -> loss, metrics; adds to the gradients
    optim_step(lr)                   -> gradient norm, whether the update was skipped
    weights() save() load() adapter_off()

Every rank makes every call, with the same batch; results are in the caller's order, on every rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from automoe.checkpoint.folder import is_saved
from automoe.checkpoint.store import CheckpointStore
from automoe.comm.tokens import MicroBatch, Tokens
from automoe.config.convert import converted
from automoe.config.frozen import save_first_config
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError, CheckpointError, ConfigError, DataError, SaveError
from automoe.model.loss import LossInputs
from automoe.moe.lora import Adapter
from automoe.moe.router import BalancedRouter, Routing, watch_routing
from automoe.optim.adamw import build_optimizer
from automoe.parallel.fsdp import COMPUTE_DTYPES
from automoe.parallel.mesh import Meshes, build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.parallel.pipeline import build_runner
from automoe.parallel.runner import StepRunner
from automoe.rl.batch import Batch, Packed, check_batch, pack
from automoe.rl.loss_options import check_options, values_read
from automoe.rl.routes import MAX_DIFFER, check_replay
from automoe.rl.weights import WeightStream
from automoe.run.weights import load_or_initialize
from automoe.training.context import RunContext
from automoe.training.state import TrainState
from automoe.training.stats import StepStats
from automoe.training.step import (
    StepOptions,
    Update,
    forward_backward,
    optimizer_step,
    prepare_inputs,
)


@dataclass(frozen=True)
class LogProbs:
    """Result of ``Session.log_probs``: in each field, one CPU tensor [n] per sample of n tokens.

    Attributes:
        log_probs: float64 log-probability of token i given the tokens before it, 0 if untrained.
        entropy: float64 entropy in nats of the distribution of token i, 0 if untrained; None: not requested.
        first_differing: int64 index, among MoE layers, of the first one whose router would choose other experts
            than ``Sample.routes`` has when predicting token i; -1: none. None: no sample has routes.
    """

    log_probs: list[torch.Tensor]
    entropy: list[torch.Tensor] | None = None
    first_differing: list[torch.Tensor] | None = None


@dataclass(frozen=True)
class Counts:
    """Divisors of a loss, counted over the global batch of one update.

    Attributes:
        tokens: number of trained tokens.
        samples: number of samples with a trained token.
    """

    tokens: int
    samples: int


@dataclass(frozen=True)
class Outcome:
    """Result of ``Session.forward_backward``, equal on every rank.

    Attributes:
        loss: the loss over the whole batch.
        metrics: name -> metric that the loss reports; also balance losses if they are on.
        counts: the divisors of the loss.
        log_probs: for each sample [n] log-probabilities of its tokens before the update, 0 for untrained tokens.
        stats: statistics of the forward and backward pass, for the step's record in a run's log.
    """

    loss: float
    metrics: dict[str, float]
    counts: Counts
    log_probs: list[torch.Tensor]
    stats: StepStats


@dataclass(eq=False)
class _Recorded:
    """Wrapper of ``loss``, called with ``options``, that also stores log-probability and entropy of trained tokens.

    ``log_probs`` and ``entropies`` have an entry for each token of the whole batch, at the index in
    ``LossInputs.given["places"]``. With ``loss`` None, a call returns the sum of ``nll_BS``. ``uses_entropy`` requests
    entropies in ``LossInputs.entropy``; ``metrics`` names the metrics that the loss reports.
    """

    skips_untrained: ClassVar = True
    loss: Callable[..., torch.Tensor] | None
    options: Mapping[str, Any]
    uses_entropy: bool
    metrics: Sequence[str]
    log_probs: torch.Tensor
    entropies: torch.Tensor

    def __call__(self, nll_BS: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        trained = (places_BS := inputs.given["places"]) >= 0
        places = places_BS[trained]
        self.log_probs[places] = -nll_BS.detach()[trained].double()
        if inputs.entropy is not None:
            self.entropies[places] = inputs.entropy.detach()[trained].double()
        if self.loss is None:
            return nll_BS.sum()
        share = self.loss(nll_BS, inputs, **self.options)
        if not isinstance(share, torch.Tensor) or share.dim():
            said = list(share.shape) if isinstance(share, torch.Tensor) else type(share).__name__
            rule = "returns one number, this rank's share of the loss"
            raise ConfigError(
                "loss", said, rule, "Sum over tokens, divided by a count of the batch"
            )
        return share


@dataclass(eq=False)
class Session:
    """A model on a mesh with its optimizer, and the operations of a reinforcement learning loop.

    Attributes:
        config, device, meshes: configuration, this rank's device, and device meshes of the ranks.
        state: this rank's pipeline stages, the optimizer, and step and token counters.
        store: reader and writer of the run directory's checkpoints.
        auxiliary_losses: whether balance losses, expert-bias updates and multi-token prediction losses may be on.
        max_routes_differ: bound on how far an engine's expert ids may differ from the router's own choices, as a
            fraction of the difference of random choices (``check_replay``).
    """

    config: Config
    meshes: Meshes
    state: TrainState
    store: CheckpointStore
    device: torch.device
    auxiliary_losses: bool
    _runner: StepRunner
    max_routes_differ: float = MAX_DIFFER
    _pending: StepStats | None = None  # of gradients that no step has used yet
    _pending_tokens: int = 0
    _stored: Any = None  # step and extra of the newest checkpoint of this session

    @classmethod
    def open(
        cls, config: Config, shape: MeshShape, context: RunContext, auxiliary_losses: bool = False
    ) -> Session:
        """Build the model on the mesh, load or draw its weights, and return a session. Collective.

        A recipe's ``main`` gets these arguments; other scripts call ``automoe.session.open_session`` instead.

        Args:
            config: ``train.seq_len`` is the longest packed row; a micro-batch has at most
                ``train.micro_batch_size`` times as many positions.
            auxiliary_losses: False turns off balance losses, updates of expert biases and losses of modules for
                multi-token prediction, so that a batch whose gradient is zero leaves every weight unchanged. True
                follows the configuration.

        Raises:
            ConfigError: ``data.document_mask`` is false, or ``moe.record_routing`` or ``moe.replay_routing`` is set.
        """
        if not config.data.document_mask:
            raise ConfigError(
                "data.document_mask", False, "a session packs samples into rows", "Set it to true"
            )
        for name in ("record_routing", "replay_routing"):
            if (folder := getattr(config.moe, name)) is not None:
                rule = "a session takes routes with its samples"
                raise ConfigError(f"moe.{name}", folder, rule, "Leave it out")
        timeout = timedelta(seconds=config.launch.init_timeout_s)
        meshes = build_meshes(shape, context.device, timeout)
        store = CheckpointStore(config, shape, context.run_dir)  # a resumed run compares these
        store.check()  # before the weights are read
        if not auxiliary_losses:
            config = without_auxiliary_losses(config)
        model_parts = build_parts(config, meshes)
        load_or_initialize(model_parts, config, context.device)
        runner = build_runner(model_parts, meshes, config, context.device)
        parts = list(model_parts.values())
        optimizer = build_optimizer(parts, config.optim, config.train.seed, meshes.stage_group())
        state = TrainState(model_parts, optimizer)
        return cls(config, meshes, state, store, context.device, auxiliary_losses, runner)

    # ---------------------------------------------------------------- the verbs

    def log_probs(self, batch: Batch, temperature: float = 1.0, entropy: bool = False) -> LogProbs:
        """Return the log-probabilities of the trained tokens, without gradients. Collective.

        Args:
            temperature: divides the logits; pass the temperature at which the answers were sampled.
            entropy: True to return entropies too.

        Raises:
            ConfigError, DataError: the temperature is below 1e-6; a sample is wrong, or the ranks' batches differ.
        """
        packed, inputs, _ = self._inputs(batch, temperature)
        recorded = self._set_loss(packed, None, {}, entropy)
        layers = self.config.model.num_moe_layers
        firsts = torch.full_like(recorded.log_probs, layers, dtype=torch.int64)

        def compare(router: BalancedRouter, tokens: Tokens, routing: Routing) -> None:
            if (differing_BS := routing.differing) is not None and tokens.row_ids is not None:
                differs_BS = differing_BS > 0
                rows = tokens.row_ids[differs_BS].cpu() - packed.rows.first_row
                places = packed.values["places"][rows, tokens.index[differs_BS].cpu()]
                places = places[places >= 0]
                firsts[places] = firsts[places].clamp_max(router.moe_index)

        with watch_routing(self.state.model_parts.values(), compare):
            self._runner.evaluate(inputs)
        differing = None
        if packed.routes is not None:
            dist.all_reduce(firsts, op=dist.ReduceOp.MIN)
            firsts[firsts == layers] = -1
            differing = list(firsts.cpu().split(packed.lengths))
        entropies = self._in_order(recorded.entropies, packed) if entropy else None
        return LogProbs(self._in_order(recorded.log_probs, packed), entropies, differing)

    def forward_backward(
        self,
        batch: Batch,
        loss: Callable[..., torch.Tensor],
        temperature: float = 1.0,
        counts: Counts | None = None,
        **options: Any,
    ) -> Outcome:
        """Compute ``loss`` over the batch and accumulate its gradients. Collective.

        Args:
            loss: a function of ``automoe.rl.losses``, or your own: (nll_BS, inputs, **options) -> this rank's share
                of the loss (``automoe.model.loss.Loss``).
            temperature: divides the logits; pass the temperature at which the answers were sampled.
            counts: divisors of the loss; None: the counts of this batch. If several calls accumulate for one
                update, pass the counts of all their batches (``count``).
            options: options of ``loss``.

        Raises:
            ConfigError: the loss does not take an option or returns no scalar, or the temperature or a count is
                invalid.
            DataError: a sample is wrong, or its routes are far from the router's choices.
            Exception: any error of the loss; this and wrong routes clear the accumulated gradients.
        """
        if isinstance(loss, partial):  # which has not the loss's notes of what it reads
            loss, options = loss.func, {**loss.keywords, **options}
        check_options(loss, options)
        packed, inputs, own_counts = self._inputs(batch, temperature, values_read(loss, options))
        if counts is None:
            counts = own_counts
        else:
            divisors = {
                known: torch.tensor(
                    at_least(1, f"counts.{name}", getattr(counts, name, None), int),
                    device=self.device,
                )
                for known, name in (("trained", "tokens"), ("documents", "samples"))
            }
            inputs = replace(inputs, counts=replace(inputs.known_counts(), **divisors))
        entropy = getattr(loss, "uses_entropy", False) or bool(options.get("entropy_coef"))
        recorded = self._set_loss(packed, loss, options, entropy)
        try:
            stats = forward_backward(self.state, self._runner, inputs, self.config)
            check_replay(stats, self.config.model.num_experts_per_token, self.max_routes_differ)
        except BaseException:
            self.zero_grad()  # some micro-batches have added theirs
            raise
        # Losses report sums over ranks: a share is divided by its own number of answers here.
        reported = stats.metrics
        for name in [name for name in reported if name.startswith("answers.")]:
            reported[name.replace("answers", "dropped_share")] /= max(reported[name], 1)
        self._pending = stats if self._pending is None else added_stats(self._pending, stats)
        self._pending_tokens += own_counts.tokens
        metrics = stats.metrics | {k: v for k, v in stats.balance_losses.items() if v}
        placed = self._in_order(recorded.log_probs, packed)
        return Outcome(stats.loss, metrics, counts, placed, stats)

    def optim_step(
        self, lr: float | None = None, report: Mapping[str, float] = MappingProxyType({})
    ) -> Update:
        """Clip the accumulated gradients, update the weights, and clear the gradients. Collective.

        Args:
            lr: learning rate of this step; None: the one that ``optim`` schedules for this step.
            report: name -> this rank's number; the result has the maximum of each over ranks.

        Returns:
            ``lr``, ``grad_norm`` before clipping, ``skipped``: loss or norm is not finite, norm is 0, or loss spikes.

        Raises:
            AutomoeError: ``forward_backward`` was not called since the last step, or ``lr`` is negative or not finite.
        """
        if self._pending is None:
            raise AutomoeError("optim_step: there are no gradients. Call forward_backward first")
        options = StepOptions(
            auxiliary_losses=self.auxiliary_losses,
            skip_zero_gradient=True,
            lr=None if lr is None else at_least(0, "lr", lr),
        )
        gradients = self._pending, self._pending_tokens
        update = optimizer_step(self.state, *gradients, self.meshes, self.config, report, options)
        self.zero_grad()
        return update

    def count(self, batch: Batch) -> Counts:
        """Return the divisors of a loss over ``batch``: numbers of trained tokens, and of samples with such tokens."""
        trained = [int(torch.as_tensor(sample.mask).sum()) for sample in batch]
        return Counts(sum(trained), sum(number > 0 for number in trained))

    def zero_grad(self) -> None:
        """Clear the accumulated gradients."""
        self.state.optimizer.zero_grad()
        self._pending, self._pending_tokens = None, 0

    def weights(self, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, full tensor) of the current weights, in the same order on all ranks. Collective.

        A tensor is valid until the next one is requested. ``options`` are keyword arguments of ``WeightStream``:
        ``dtype``, ``encoding``, ``layout`` and ``bucket_bytes``.
        """
        for bucket in WeightStream(self.state.model_parts, **options):
            yield from bucket.items()

    def save(self, extra: Mapping[str, Any] | None = None) -> Path | None:
        """Save weights, optimizer and counters to the run directory. Collective.

        Args:
            extra: a JSON object of the caller, equal on every rank, which ``load`` returns.

        Returns:
            The checkpoint's folder; None while it is written in the background (``checkpoint.async_save``).

        Raises:
            SaveError: this checkpoint, or an earlier one in the background, could not be written.
            CheckpointError: the run directory has a checkpoint of this step with other content.
            DataError: ``extra`` is not a JSON object.
        """
        try:
            extra = json.loads(json.dumps({**(extra or {})}))
        except (TypeError, ValueError) as error:
            raise DataError(f"extra of Session.save: expected a JSON object ({error})") from None
        failures, saved = self.store.failures, None
        self.store.poll(wait=True)
        folder = self.store.folder / f"step-{self.state.step}"
        # The store leaves a step that is there as it is.
        if (self.state.step, extra) != self._stored and self.store.ranks.lead(
            lambda: is_saved(folder), again=False
        ):
            raise CheckpointError(
                f"{folder} is there, and this session did not write it with this extra. Load it, make a step before "
                "the next save, or set another run_dir"
            )
        self.store.facts["session"] = extra
        if self.store.failures == failures:
            store = self.store
            store.ranks.lead(lambda: save_first_config(store.config, store.run_dir), again=False)
            saved = self.store.save(self.state, stopping=not self.config.checkpoint.async_save)
        if self.store.failures > failures:
            raise SaveError("a save in the background failed, as a warning says. Save again")
        self._stored = self.state.step, extra
        return saved

    def load(self) -> dict[str, Any] | None:
        """Load weights, optimizer and counters from the run's newest checkpoint; clear gradients. Collective.

        Returns:
            The dictionary that ``save`` got as ``extra``; None if there is no checkpoint, and nothing is loaded.
        """
        newest = self.store.newest()
        if self.store.load_latest(self.state) is None:
            return None
        assert newest is not None
        self.zero_grad()  # those of other weights
        extra = dict(newest[1]["counters"].get("session", {}))
        self._stored = self.state.step, extra
        return extra

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Switch the LoRA adapters off within a ``with`` block, so the model has its base weights.

        Raises:
            ConfigError: the model has no adapters (``lora.rank=0``).
        """
        if not self.config.lora.rank:
            rule = "the model has no adapter to switch off"
            raise ConfigError("lora.rank", 0, rule, "Open a second session for the reference")
        parts = self.state.model_parts.values()
        adapters = [m for part in parts for m in part.modules() if isinstance(m, Adapter)]
        scales = [adapter.scale for adapter in adapters]
        try:
            for adapter in adapters:
                adapter.scale = 0.0
            yield
        finally:
            for adapter, scale in zip(adapters, scales, strict=True):
                adapter.scale = scale

    # ---------------------------------------------------------------- from samples to rows and back

    def _inputs(
        self, batch: Batch, temperature: float, reads: tuple[str, ...] = ()
    ) -> tuple[Packed, MicroBatch, Counts]:
        """Check a batch and pack it into this rank's rows; return rows, step inputs, loss divisors. Collective.

        The logits are divided by ``temperature``. The loss needs the samples' values named in ``reads``.
        """
        config, shape = self.config, self.meshes.shape
        train = config.train
        temperature = at_least(1e-6, "temperature", temperature)
        samples = check_batch(batch, config.model, train.seq_len, reads)
        packed = pack(samples, config, shape, self.meshes.dp_rank)
        self._runner.micro_batch_rows = packed.micro_batch_rows
        wide = torch.promote_types(COMPUTE_DTYPES[train.dtype], torch.float32)
        values = {
            name: value.to(wide) if value.is_floating_point() else value
            for name, value in packed.values.items()
        }
        if temperature != 1:
            values["temperature"] = torch.full_like(values["places"], temperature, dtype=wide)
        forced_ids = None
        if packed.routes is not None:
            forced_ids = packed.routes.unsqueeze(3)  # plain top-k is that of the live scores
        options = StepOptions(values, self.auxiliary_losses)
        inputs, num_tokens = prepare_inputs(
            packed.rows, self.meshes, config, self.device, forced_ids, options
        )
        return packed, inputs, Counts(num_tokens, int(inputs.known_counts().documents))

    def _set_loss(
        self,
        packed: Packed,
        loss: Callable[..., torch.Tensor] | None,
        options: Mapping[str, Any],
        entropy: bool,
    ) -> _Recorded:
        zeros = torch.zeros(2, sum(packed.lengths), dtype=torch.float64, device=self.device)
        recorded = _Recorded(loss, options, entropy, getattr(loss, "metrics", ()), *zeros)
        self._runner.set_loss(recorded, self.auxiliary_losses)
        return recorded

    def _in_order(self, numbers: torch.Tensor, packed: Packed) -> list[torch.Tensor]:
        """Sum ``numbers``, 0 on all but each token's rank, over ranks; return CPU tensors of ``packed.lengths``."""
        if self.meshes.coordinate("tp"):
            numbers.zero_()  # ranks of tp have the same tokens
        if dist.get_world_size() > 1:
            dist.all_reduce(numbers)
        return list(numbers.cpu().split(packed.lengths))


def at_least(least: float, key: str, value: Any, kind: type[float] = float) -> Any:
    """Return ``kind(value)``; raise ``ConfigError``, which names ``key``, unless ``least`` <= value < infinity."""
    number = converted(kind, value, key)
    if not least <= number < math.inf:
        raise ConfigError(key, number, f"must be finite, and at least {least:g}", "Correct it")
    return number


def without_auxiliary_losses(config: Config) -> Config:
    """Return ``config`` with balance losses, z-loss and updates of expert biases switched off."""
    coefficients = ("seq_balance_coef", "global_balance_coef", "micro_batch_balance_coef")
    off = dict.fromkeys((*coefficients, "z_loss_coef", "bias_update_rate"), 0.0)
    moe = replace(config.moe, **off)
    phases = [replace(phase, bias_update_rate=None) for phase in config.optim.phases]
    return replace(config, moe=moe, optim=replace(config.optim, phases=phases))


def added_stats(first: StepStats, second: StepStats) -> StepStats:
    """Return a copy of ``second`` whose loss, tokens per expert and counts of replayed choices include ``first``'s."""
    return replace(
        second,
        loss=first.loss + second.loss,
        expert_counts=first.expert_counts + second.expert_counts,
        device_counts=first.device_counts + second.device_counts,
        replayed=first.replayed + second.replayed,
    )
