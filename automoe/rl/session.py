"""A session: a few verbs that a framework or a script drives, on any mesh.

    log_probs(batch)                 -> log-probabilities of the samples' tokens
    forward_backward(batch, loss)    -> loss, metrics; adds to the gradients
    optim_step(lr)                   -> gradient norm, whether the weights moved
    weights() save() load() adapter_off()

Every rank makes every call, with the same batch; answers are in the caller's order, on every rank.
The session packs samples into rows and calls ``automoe.training.step``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from automoe.checkpoint.folder import is_saved
from automoe.checkpoint.store import CheckpointStore
from automoe.comm.tokens import MicroBatch, Tokens
from automoe.config.convert import converted
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import AutomoeError, CheckpointError, ConfigError, DataError, SaveError
from automoe.model.loss import LossInputs
from automoe.moe.lora import Adapter
from automoe.moe.router import BalancedRouter, Routing, watch_routing
from automoe.optim.adamw import build_optimizer
from automoe.parallel.fsdp import COMPUTE_DTYPES
from automoe.parallel.mesh import Meshes, build_meshes
from automoe.parallel.pipeline import build_runner
from automoe.parallel.runner import StepRunner
from automoe.rl.batch import Batch, Packed, check_batch, pack
from automoe.rl.losses import check_options, values_read
from automoe.rl.routes import MAX_DIFFER, check_replay
from automoe.rl.weights import WeightStream
from automoe.run.weights import first_weights
from automoe.training.context import RunContext
from automoe.training.state import TrainState
from automoe.training.stats import StepStats
from automoe.training.step import Update, forward_backward, optimizer_step, prepare_inputs


@dataclass(frozen=True)
class LogProbs:
    """Answer of ``Session.log_probs``, in the order of the batch; float64 on the CPU.

    Attributes:
        log_probs: [n] of each sample: log-probability of token i after those before it, 0 for
            tokens that are not trained.
        entropy: [n] of each sample: entropy of the distribution that token i was drawn from, in
            nats, 0 for tokens that are not trained; None: not asked for.
        first_differing: [n] of each sample: the first MoE layer in which the router would have sent
            the token before token i elsewhere than the routes say, -1 if there is none; None: no
            sample has routes.
    """

    log_probs: list[torch.Tensor]
    entropy: list[torch.Tensor] | None = None
    first_differing: list[torch.Tensor] | None = None


@dataclass(frozen=True)
class Counts:
    """Divisors of a loss: numbers of the global batch of one update.

    Attributes:
        tokens: trained tokens.
        samples: samples with a trained token.
    """

    tokens: int
    samples: int


@dataclass(frozen=True)
class Outcome:
    """Answer of ``Session.forward_backward``, equal on every rank.

    Attributes:
        loss: the loss over the whole batch.
        metrics: numbers that the loss reports, by name, and balance losses if they are on.
        counts: what the loss was divided by.
        log_probs: as in ``LogProbs``, under the weights before the update.
        stats: statistics of the pass, for the record of a run.
    """

    loss: float
    metrics: dict[str, float]
    counts: Counts
    log_probs: list[torch.Tensor]
    stats: StepStats


class _Recorded:
    """A loss that also remembers log-probability and entropy of each token, by its place in the batch."""

    def __init__(
        self,
        loss: Callable[..., torch.Tensor] | None,
        options: Mapping[str, Any],
        entropy: bool,
        log_probs: torch.Tensor,
    ) -> None:
        self.loss = loss
        self.options = options
        self.uses_entropy = entropy
        self.metrics = getattr(loss, "metrics", ())
        self.log_probs = log_probs
        self.entropies = torch.zeros_like(log_probs)

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
    """A model on a mesh, its optimizer, and the verbs of reinforcement learning.

    Attributes:
        config: the configuration that the session runs with.
        meshes: the meshes of the ranks; ``dp_rank`` and the shape are in it.
        state: model parts of this rank, optimizer, counters.
        store: checkpoints of the run directory.
        max_routes_differ: routes of an engine are refused if they differ from the router's own by
            more than this part of what chance makes (``automoe.rl.routes.check_replay``).
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
        """Open a session on this rank, as a recipe's ``main`` is called. Collective.

        ``automoe.session`` opens one from overrides, in one process or under torchrun.

        Args:
            config: ``train.seq_len`` is the longest row, ``train.micro_batch_size`` times it the
                most positions of a micro-batch, ``optim`` and ``mesh`` as for any training.
            auxiliary_losses: False turns balance losses, updates of expert biases and losses of
                modules for multi-token prediction off, so that a batch whose gradient is zero
                leaves every weight as it was. True does what the configuration says.

        Raises:
            ConfigError: samples of a row would see one another (``data.document_mask``).
        """
        if not config.data.document_mask:
            raise ConfigError(
                "data.document_mask", False, "a session packs samples into rows", "Set it to true"
            )
        timeout = timedelta(seconds=config.launch.init_timeout_s)
        meshes = build_meshes(shape, context.device, timeout)
        # Of the settings as given: those are what a resumed run is compared with.
        store = CheckpointStore(config, shape, context.run_dir)
        store.check()  # before the weights are read
        if not auxiliary_losses:
            config = without_auxiliary_losses(config)
        model_parts, _ = first_weights(config, meshes, context.device)
        runner = build_runner(model_parts, meshes, config, context.device)
        parts = list(model_parts.values())
        optimizer = build_optimizer(parts, config.optim, config.train.seed, meshes.stage_group())
        state = TrainState(model_parts, optimizer)
        return cls(config, meshes, state, store, context.device, auxiliary_losses, runner)

    # ---------------------------------------------------------------- the verbs

    def log_probs(self, batch: Batch, temperature: float = 1.0, entropy: bool = False) -> LogProbs:
        """Return the log-probabilities of the trained tokens, without gradients. Collective.

        Args:
            temperature: divides the logits, as the sampler's does. Samples' ``candidates`` are the
                ids that the sampler's top-p or top-k left.
            entropy: True to return entropies too.

        Raises:
            DataError: as ``check_batch``.
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
        """Add the gradients of ``loss`` over the batch to those that are there. Collective.

        Args:
            loss: a function of ``automoe.rl.losses``, or one of your own: (nll_BS, inputs,
                **options) -> this rank's share of the loss (``automoe.model.loss.Loss``).
            counts: what the loss is divided by; None: the counts of this batch. Give those of all
                parts (``count``) if an update is made of several calls.

        Raises:
            ConfigError: the loss does not take an option or returns no scalar, or the temperature or
                a count is none.
            DataError: as ``check_batch`` and ``check_replay``.
            Exception: whatever the loss raises; the gradients so far are then forgotten, as after
                ``check_replay``.
        """
        if isinstance(loss, partial):  # which has not the loss's notes of what it reads
            loss, options = loss.func, {**loss.keywords, **options}
        check_options(loss, options)
        packed, inputs, own_counts = self._inputs(batch, temperature, values_read(loss, options))
        if counts is None:
            counts = own_counts
        else:
            for name in ("tokens", "samples"):
                at_least(1, f"counts.{name}", getattr(counts, name, None), int)
        tensors = (torch.tensor(n, device=self.device) for n in (counts.tokens, counts.samples))
        divisors = dict(zip(("trained", "documents"), tensors, strict=True))
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
            answers, share = reported[name], name.replace("answers", "dropped_share")
            reported[share] /= max(answers, 1)
        self._pending = stats if self._pending is None else added_stats(self._pending, stats)
        self._pending_tokens += own_counts.tokens
        metrics = stats.metrics | {k: v for k, v in stats.balance_losses.items() if v}
        placed = self._in_order(recorded.log_probs, packed)
        return Outcome(stats.loss, metrics, counts, placed, stats)

    def optim_step(
        self, lr: float | None = None, report: Mapping[str, float] = MappingProxyType({})
    ) -> Update:
        """Clip, update the weights by the gradients so far, and clear these. Collective.

        Args:
            lr: learning rate of this step; None: the one of ``optim`` at this step.
            report: as of ``automoe.training.step.optimizer_step``.

        Returns:
            Learning rate, gradient norm before clipping, and whether the update was skipped.
        """
        if self._pending is None:
            raise AutomoeError("optim_step: there are no gradients. Call forward_backward first")
        optim = self.config.optim
        if lr is not None:
            lr = at_least(0, "lr", lr)
            optim = replace(optim, lr=lr, schedule="constant", warmup_steps=0)
        config = replace(self.config, optim=optim)
        update = optimizer_step(
            self.state,
            self._pending,
            self._pending_tokens,
            self.meshes,
            config,
            report,
            skip_zero=True,
            balances=None if self.auxiliary_losses else False,
        )
        self.zero_grad()
        return update

    def count(self, batch: Batch) -> Counts:
        """Return the divisors of a loss over this batch; no rank needs another for it."""
        trained = [sum(bool(trained_token) for trained_token in sample.mask) for sample in batch]
        return Counts(sum(trained), sum(number > 0 for number in trained))

    def zero_grad(self) -> None:
        """Forget the gradients so far."""
        self.state.optimizer.zero_grad()
        self._pending, self._pending_tokens = None, 0

    def weights(self, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, full tensor), the same on every rank in the same order. Collective.

        The weights are those of now; a tensor is valid until the next one is asked for. Options are
        those of ``automoe.rl.weights.WeightStream``.
        """
        for bucket in WeightStream(self.state.model_parts, **options):
            yield from bucket.items()

    def save(self, extra: Mapping[str, Any] | None = None) -> Path | None:
        """Save weights, optimizer and counters to the run directory. Collective.

        Args:
            extra: plain JSON of the caller, equal on every rank, which ``load`` gives back.

        Returns:
            The checkpoint's folder; None if it is being written in the background
            (``checkpoint.async_save``).

        Raises:
            SaveError: it could not be written, or the one in the background before it.
            CheckpointError: the run directory has a checkpoint of this step, of other content.
            DataError: ``extra`` is no JSON object.
        """
        try:
            extra = json.loads(json.dumps({**(extra or {})}))
        except (TypeError, ValueError) as error:
            raise DataError(f"extra of Session.save: expected a JSON object ({error})") from None
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
        failures, saved = self.store.failures, None
        self.store.poll(wait=True)
        if self.store.failures == failures:
            saved = self.store.save(self.state, stopping=not self.config.checkpoint.async_save)
        if self.store.failures > failures:
            raise SaveError("a save in the background failed, as a warning says. Save again")
        self._stored = self.state.step, extra
        return saved

    def load(self) -> dict[str, Any] | None:
        """Fill the state from the newest checkpoint; return the caller's ``extra``. Collective.

        Returns:
            None if there is no checkpoint; the state is then as it was.
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
        """Within the block, the model computes without its adapters: the weights it started from.

        Raises:
            ConfigError: the model has no adapters (``lora.rank=0``).
        """
        if not self.config.lora.rank:
            rule = "the model has no adapter to switch off"
            raise ConfigError("lora.rank", 0, rule, "Open a second session for the reference")
        parts = self.state.model_parts.values()
        modules = [module for part in parts for module in part.modules()]
        scales = {module: module.scale for module in modules if isinstance(module, Adapter)}
        try:
            for module in scales:
                module.scale = 0.0
            yield
        finally:
            for module, scale in scales.items():
                module.scale = scale

    # ---------------------------------------------------------------- from samples to rows and back

    def _inputs(
        self, batch: Batch, temperature: float, reads: tuple[str, ...] = ()
    ) -> tuple[Packed, MicroBatch, Counts]:
        """Return the batch's packed rows and this rank's inputs of the step. Collective."""
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
        inputs, num_tokens = prepare_inputs(
            packed.rows, self.meshes, config, self.device, forced_ids, values, self.auxiliary_losses
        )
        return packed, inputs, Counts(num_tokens, int(inputs.known_counts().documents))

    def _set_loss(
        self,
        packed: Packed,
        loss: Callable[..., torch.Tensor] | None,
        options: Mapping[str, Any],
        entropy: bool,
    ) -> _Recorded:
        zeros = torch.zeros(sum(packed.lengths), dtype=torch.float64, device=self.device)
        recorded = _Recorded(loss, options, entropy, zeros)
        self._runner.set_loss(recorded, self.auxiliary_losses)
        return recorded

    def _in_order(self, numbers: torch.Tensor, packed: Packed) -> list[torch.Tensor]:
        """Return the numbers that all ranks recorded, by sample. Collective."""
        if self.meshes.coordinate("tp"):
            numbers.zero_()  # ranks of tp have the same tokens
        if dist.get_world_size() > 1:
            dist.all_reduce(numbers)
        return list(numbers.cpu().split(packed.lengths))


def at_least(least: float, key: str, value: Any, kind: type[float] = float) -> Any:
    """Return ``value`` as a finite number of at least ``least``.

    Raises:
        ConfigError: it is none; the message begins with ``key``.
    """
    number = converted(kind, value, key)
    if not least <= number < math.inf:
        raise ConfigError(key, number, f"must be finite, and at least {least:g}", "Correct it")
    return number


def without_auxiliary_losses(config: Config) -> Config:
    """Return ``config`` without balance losses and updates of expert biases."""
    off = dict(seq_balance_coef=0.0, global_balance_coef=0.0, micro_batch_balance_coef=0.0)
    moe = replace(config.moe, **off, z_loss_coef=0.0, bias_update_rate=0.0)
    phases = [replace(phase, bias_update_rate=None) for phase in config.optim.phases]
    return replace(config, moe=moe, optim=replace(config.optim, phases=phases))


def added_stats(first: StepStats, second: StepStats) -> StepStats:
    """Return the statistics of two passes whose gradients are added."""
    replays = [stats.replayed for stats in (first, second) if len(stats.replayed)]
    return replace(
        second,
        loss=first.loss + second.loss,
        expert_counts=first.expert_counts + second.expert_counts,
        device_counts=first.device_counts + second.device_counts,
        replayed=sum(replays[1:], replays[0]) if replays else second.replayed,
    )
