"""Client with the names and types of tinker's SDK, which trains in this process.

A training loop written for the tinker service runs with ``automoe.tinker.ServiceClient`` instead of
``tinker.ServiceClient``, in one process or on every rank of torchrun with the same data. A call returns when its
work is done, and raises its errors itself; its future's ``result()``, or ``await``, gives the result.

    ServiceClient    create_lora_training_client, create_training_client_from_state,
                     create_training_client_from_state_with_optimizer
    TrainingClient   forward, forward_backward, optim_step, save_state, load_state, load_state_with_optimizer,
                     save_weights_for_sampler, save_weights_and_get_sampling_client
    SamplingClient   sample

Other methods of the SDK raise ``MissingVerbError``, which says what to use.

Letters: n tokens of a datum's input, P of a prompt, A of an answer, L MoE layers, K top-k.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tinker import APIFuture, types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from torch import Tensor

from automoe.config.convert import converted
from automoe.config.frozen import load_config
from automoe.errors import BackendError, CheckpointError, ConfigError, DataError
from automoe.launch.from_python import override_text
from automoe.model.loss import LossInputs
from automoe.rl.engine import Sampling, TransformersEngine
from automoe.rl.session import at_least
from automoe.rl.weights import WeightStream
from automoe.run.samples import stop_tokens
from automoe.session import Sample, Session, load_from, open_session, save_at
from automoe.storage.files import set_aside

# What each loss reads beside target_tokens, the factor of its tokens first.
READS = {"cross_entropy": ("weights",)}
READS |= dict.fromkeys(("importance_sampling", "ppo", "cispo"), ("advantages", "logprobs"))


@dataclass(frozen=True)
class RoutedSequence(types.SampledSequence):
    """A sampled sequence with the expert ids that the model chose for its tokens.

    Attributes:
        routes: [P + A - 1, L, K] expert ids of all tokens of a prompt and its answer but the last; None for a dense
            model. Pass them as ``routes`` of a datum to train with the same experts.
    """

    routes: Tensor | None = None


# What to use for verbs of the service that are not here.
INSTEAD = {
    "forward_backward_custom": "TrainingClient.session.forward_backward(batch, loss), for any loss",
    "compute_logprobs": "TrainingClient.forward",
    "create_sampling_client": "TrainingClient.save_weights_and_get_sampling_client",
    "get_tokenizer": "the tokenizer of the checkpoint's folder",
    "get_info": "TrainingClient.session.config",
}


class MissingVerbError(BackendError, AttributeError):
    """Use of a method that tinker's service has and this client lacks; the message says what to use."""


class _Client:
    def __getattr__(self, name: str) -> NoReturn:
        client, verb = type(self), name.removesuffix("_async")
        verbs = [each for each in sorted(dir(client)) if each[0] != "_"]
        use = INSTEAD.get(verb, "one of " + ", ".join(verbs))
        if verb in verbs:
            use = f"{verb}, whose future can be awaited"
        raise MissingVerbError(f"{client.__name__}.{name} is not in automoe.tinker. Use {use}")


class ServiceClient(_Client):
    """Factory of training clients, each with its own session (``automoe.session.open_session``).

    Args:
        overrides: overrides of the configuration, such as ``mesh.ep=4``.
        options: further arguments of ``open_session``.
    """

    def __init__(self, overrides: Sequence[str] = (), **options: Any) -> None:
        self._overrides = overrides
        self._options = options

    def create_lora_training_client(
        self, base_model: str | None = None, rank: int = 32, seed: int | None = None
    ) -> APIFuture[TrainingClient]:
        """Open a session on a checkpoint by ``open_session``; return a future of its training client.

        Args:
            base_model: folder or Hub id of the checkpoint; None: the model of the overrides.
            rank: rank of the LoRA adapters; 0 trains the weights themselves.
            seed: ``train.seed``; None: the seed of the overrides.
        """
        # The decay marks the groups of parameters that a step's weight_decay applies to.
        words = [*self._overrides, f"lora.rank={rank}", "optim.weight_decay=1"]
        words += [f"model.hf_path={override_text(base_model)}"] if base_model else []
        words += [] if seed is None else [f"train.seed={seed}"]
        return _done(TrainingClient(open_session(words, **self._options)))

    def create_training_client_from_state(self, path: str) -> APIFuture[TrainingClient]:
        """Return a future of a training client with weights that ``save_state`` wrote to ``path``.

        The optimizer's moments start at zero.

        Raises:
            ConfigError: the state was saved with other settings of the model or LoRA.
        """
        client = self._opened(path)
        client.load_state(path)
        return _done(client)

    def create_training_client_from_state_with_optimizer(
        self, path: str
    ) -> APIFuture[TrainingClient]:
        """Return a future of a training client with weights and optimizer that ``save_state`` wrote to ``path``."""
        client = self._opened(path)
        client.load_state_with_optimizer(path)
        return _done(client)

    def _opened(self, path: str) -> TrainingClient:
        """Return a client for the state at ``path``, not loaded yet; ``ConfigError`` if its LoRA or model differs."""
        config = load_config(path)
        saved = config.model.hf_path, config.lora.rank, config.train.seed
        client = self.create_lora_training_client(*saved).result()
        for section in ("lora", "model"):
            there, here = (vars(getattr(each, section)) for each in (config, client.session.config))
            others = [f"{section}.{key}={there[key]}" for key in there if there[key] != here[key]]
            if others:
                rule = f"the state at {path} was saved with {', '.join(others)}"
                raise ConfigError(section, "", rule, "Give these overrides to ServiceClient")
        return client


class TrainingClient(_Client):
    """Client that trains one model, with the methods of tinker's training client; ``ServiceClient`` makes it."""

    def __init__(self, session: Session) -> None:
        algorithm = session.config.optim.algorithm
        if algorithm != "adamw":
            rule = "optim_step takes AdamParams"
            raise ConfigError("optim.algorithm", algorithm, rule, "Set it to adamw")
        self.session = session
        self._decays = [g["weight_decay"] for g in session.state.optimizer.param_groups]
        self.engine: TransformersEngine | None = None
        self.num_updates = 0  # of the engine's weights
        self.num_calls = 0  # of the engine

    def forward(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Return a future of each token's loss and log-probability, without computing gradients.

        Args:
            data: sequences, with ``target_tokens`` and the inputs of the loss as ``loss_fn_inputs``.
            loss_fn: ``cross_entropy``, ``importance_sampling``, ``ppo`` or ``cispo`` (formulas: ``forward_backward``).
            loss_fn_config: bounds of the clipped ratio: ``clip_low_threshold`` and ``clip_high_threshold``.
        """
        return self.forward_backward(data, loss_fn, loss_fn_config, backward=False)

    def forward_backward(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
        *,
        backward: bool = True,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Accumulate gradients of a loss summed over tokens; return a future of each token's loss and log-probability.

        ``loss_fn_inputs`` of a datum are ``target_tokens``, the inputs that the loss names below, and optionally
        ``routes`` [n, L, K], expert ids to use for n tokens, L MoE layers and top-k K (-1: the router chooses).
        Each target must be the next input token. A target that is not needs a weight (or advantage) of 0, and gets
        no log-probability.

        Args:
            loss_fn: with r = pi / exp(logprobs) and A = advantages, the sum of: ``cross_entropy``, -weights log pi;
                ``importance_sampling``, -r A; ``ppo``, -min(r A, clip(r) A); ``cispo``, -sg[clip(r)] A log pi. pi
                is the probability by the current weights, sg stop-gradient.
            loss_fn_config: bounds of clip(r): ``clip_low_threshold`` (0.8), ``clip_high_threshold`` (1.2).
            backward: False computes no gradients.

        Raises:
            ConfigError: there is no such loss, or it does not take an option.
            DataError: a datum is invalid; the message names the datum and the field.
        """
        options = _options(loss_fn, loss_fn_config)
        batch, session = _Samples(data, loss_fn), self.session
        scores: Any
        try:
            if backward:
                scores = session.forward_backward(batch, summed, **options)
            else:
                scores = session.log_probs(batch)
        except DataError as error:
            text = str(error).replace("sample", "datum")
            raise DataError(text.replace("field tokens", "field model_input")) from None
        outputs, total = [], 0.0
        for sample, log_probs in zip(batch, scores.log_probs, strict=True):
            values = {name: torch.as_tensor(value)[1:] for name, value in sample.values.items()}
            terms = elementwise(log_probs[1:], values, **options)
            total += terms.sum().item()
            tensors = {"logprobs": log_probs[1:], "elementwise_loss": terms}
            outputs.append({k: types.TensorData.from_torch(v) for k, v in tensors.items()})
        metrics = {"loss:sum": getattr(scores, "loss", total)}
        return _done(types.ForwardBackwardOutput("TorchLossReturn", outputs, metrics))

    def optim_step(
        self, optim_params: Any = None, *, adam_params: Any = None
    ) -> APIFuture[types.OptimStepResponse]:
        """Update the weights by Adam with tinker's ``AdamParams``, and clear the gradients.

        Norms and biases have no weight decay. If all gradients are 0, the loss or a gradient is not finite, or the
        loss spikes, no weight changes, and the metric ``skipped`` of the result is 1.

        Args:
            optim_params, adam_params: two names of the same argument; ``ConfigError`` if a value of it is invalid.
        """
        params = adam_params if optim_params is None else optim_params
        lr, beta1, beta2, eps, decay, clip = (
            at_least(
                1e-30 if name == "eps" else 0, f"AdamParams.{name}", getattr(params, name, None)
            )
            for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        )
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if beta >= 1:
                raise ConfigError(f"AdamParams.{name}", beta, "must be below 1", "Lower it")
        session = self.session
        for group, factor in zip(session.state.optimizer.param_groups, self._decays, strict=True):
            group |= {"betas": (beta1, beta2), "eps": eps, "weight_decay": decay * factor}
        session.config = replace(
            session.config, train=replace(session.config.train, grad_clip=clip)
        )
        update = session.optim_step(lr)
        metrics = {"grad_norm": update.grad_norm, "skipped": float(update.skipped)}
        return _done(types.OptimStepResponse(metrics=metrics))

    # ---------------------------------------------------------------- states

    def save_state(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Save weights and optimizer in ``run_dir/weights/NAME``; ``ttl_seconds`` has no effect.

        Raises:
            ConfigError, CheckpointError: ``name`` is no plain file name; the folder exists without ``overwrite``.
        """
        return _done(types.SaveWeightsResponse(path=self._save("weights", name, overwrite)))

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save a checkpoint for ``automoe export`` in ``run_dir/sampler_weights/NAME``; ``ttl_seconds`` is ignored."""
        path = self._save("sampler_weights", name, False)
        return _done(types.SaveWeightsForSamplerResponse(path=path))

    def load_state(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Load the weights that ``save_state`` wrote to ``path``, and reset the optimizer's state."""
        response = self.load_state_with_optimizer(path)
        for tensors in self.session.state.optimizer.state.values():
            for name in ("step", "exp_avg", "exp_avg_sq"):
                tensors[name].zero_()
        return response

    def load_state_with_optimizer(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Load weights and optimizer that ``save_state`` wrote to ``path``; ``CheckpointError`` if it has none."""
        load_from(self.session, Path(path))
        return _done(types.LoadWeightsResponse(path=path))

    def _save(self, kind: str, name: str, overwrite: bool) -> str:
        if name in ("", "..") or Path(name).name != name:
            raise ConfigError("name", name, "names a folder of the run directory", "Use letters")
        folder = self.session.store.run_dir / kind / name

        def prepare() -> str | None:
            if folder.exists() and not overwrite:
                raise CheckpointError(f"{folder} is there. Give another name, or overwrite=True")
            older = set_aside(folder, f"older-{name}")  # stays if the save fails
            folder.mkdir(parents=True)
            return older

        ranks = self.session.store.ranks
        older = ranks.lead(prepare, again=False)
        save_at(self.session, folder)
        if older is not None:
            ranks.lead(lambda: shutil.rmtree(folder.with_name(older)))
        return str(folder)

    # ---------------------------------------------------------------- sampling

    def save_weights_and_get_sampling_client(
        self, record_stability_info: bool = False
    ) -> APIFuture[SamplingClient]:
        """Return a future of a client that samples from the current weights.

        Earlier sampling clients raise errors from then on, as their weights are gone. ``record_stability_info``
        must be False, else ``ConfigError`` is raised.
        """
        if record_stability_info:
            rule = "only the loss stable_reinforce of the service reads it"
            raise ConfigError("record_stability_info", True, rule, "Leave it out")
        session = self.session
        if self.engine is None:
            self.engine = TransformersEngine(session.config, session.device)
        self.engine.update(WeightStream(session.state.model_parts, **self.engine.options))
        self.num_updates += 1
        return _done(SamplingClient(self))


class SamplingClient(_Client):
    """Client that samples answers by transformers' ``generate``, with a ``TrainingClient``'s weights.

    After the next ``save_weights_and_get_sampling_client``, ``sample`` raises ``BackendError``.
    """

    def __init__(self, trainer: TrainingClient) -> None:
        self._trainer = trainer
        self._number = trainer.num_updates
        self._stops = stop_tokens(trainer.session.config)

    def sample(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> APIFuture[types.SampleResponse]:
        """Return a future of ``num_samples`` answers, each with tokens, log-probabilities and expert ids (``routes``).

        Raises:
            ConfigError: a sampling parameter is invalid or not supported.
            DataError: the prompt is empty, or has ids beyond the vocabulary.
            BackendError: a newer sampling client has been made.
        """
        trainer, engine = self._trainer, self._trainer.engine
        if self._number != trainer.num_updates or engine is None:
            raise BackendError(
                "the engine has newer weights than this client had. Use the newest client, or sample before it is made"
            )
        config = trainer.session.config
        tokens, vocab_size = prompt.to_ints(), config.model.vocab_size
        if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise DataError(f"prompt: expected ids from 0 to {vocab_size - 1}, one or more")
        params = sampling_params
        stop = self._stops if params.stop is None else params.stop
        most = params.max_tokens
        if most is None:
            most = config.train.seq_len + 1 - len(tokens)
        holds = {
            "top_k": params.top_k == -1,
            "top_p": params.top_p == 1,
            "temperature": 0 < params.temperature < math.inf,
            "seed": params.seed is None or 0 <= params.seed < 1 << 63,
            "max_tokens": most > 0,
            "num_samples": num_samples > 0,
            "stop": all(type(token) is int for token in stop),
        }
        if name := next((name for name, right in holds.items() if not right), None):
            rule = "expected top_k=-1, top_p=1, stop=[ids of tokens], seed >= 0 in 63 bits, others above 0"
            value = getattr(params, name, num_samples)
            raise ConfigError(f"sample.{name}", value, rule, "The engine has no other")
        seed = params.seed
        if seed is None:
            seed = config.train.seed * 1_000_003 + trainer.num_calls
        trainer.num_calls += 1
        how = Sampling(num_samples, most, params.temperature, seed, sorted(stop))
        [answers] = engine.sample([tokens], how)
        sequences = [
            RoutedSequence(
                stop_reason="stop" if answer.tokens[-1] in stop else "length",
                sequence_id=f"{trainer.num_calls}-{number}",
                tokens_np=np.array(answer.tokens, dtype=np.int32),
                logprobs_np=np.array(answer.log_probs, dtype=np.float32),
                routes=answer.routes,
            )
            for number, answer in enumerate(answers)
        ]
        return _done(types.SampleResponse(sequences=sequences))


# ---------------------------------------------------------------- losses


def elementwise(
    log_probs: Tensor,
    values: Mapping[str, Tensor],
    loss_fn: str,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    """Return each token's term of a loss, in the shape of ``log_probs``.

    Args:
        log_probs: log-probabilities by the current weights.
        values: tensors of the same shape: ``weights`` for ``cross_entropy``, else ``advantages`` A and
            ``logprobs``, log-probabilities by the weights that sampled the tokens.
        loss_fn: with r = exp(log_probs - logprobs): ``cross_entropy``: -weights log_probs; ``importance_sampling``:
            -r A; ``ppo``: -min(r A, clip(r) A); ``cispo``: -sg[clip(r)] A log_probs (sg: stop-gradient).
        clip_low_threshold, clip_high_threshold: bounds of clip(r).
    """
    if loss_fn == "cross_entropy":
        return -values["weights"] * log_probs
    advantages = values["advantages"]
    ratio = (log_probs - values["logprobs"]).exp()
    if loss_fn == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    if loss_fn == "cispo":
        return -clipped.detach() * advantages * log_probs
    return -torch.minimum(ratio * advantages, clipped * advantages)


def summed(nll_BS: Tensor, inputs: LossInputs, **options: Any) -> Tensor:
    """Loss for ``Session``: return the sum over tokens of ``elementwise`` (a token's loss term) with ``options``.

    Untrained tokens add nothing, since their weights and advantages are 0.
    """
    return elementwise(-nll_BS, inputs.given, **options).sum()


def _options(loss_fn: str, config: Mapping[str, float] | None) -> dict[str, Any]:
    if loss_fn not in READS:
        raise ConfigError("loss_fn", loss_fn, f"must be one of {', '.join(READS)}", "Name one")
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    for name, value in (config or {}).items():
        key = f"loss_fn_config.{name}"
        if name not in bounds or loss_fn not in ("ppo", "cispo"):
            rule = f"ppo and cispo take {' and '.join(bounds)}, other losses no option"
            raise ConfigError(key, value, rule, "Leave it out")
        bounds[name] = converted(float, value, key)
    low, high = bounds.values()
    if not 0 <= low <= high:
        raise ConfigError("loss_fn_config", bounds, "bounds are ratios, in order", "Correct them")
    return {"loss_fn": loss_fn, **bounds}


class _Samples(Sequence[Sample]):
    """Sequence that converts tinker's data to samples, each when it is read.

    An error in a datum is thus raised while the session checks its batch, which raises it on all ranks.
    """

    def __init__(self, data: Sequence[types.Datum], loss_fn: str) -> None:
        self._data = data
        self._loss_fn = loss_fn

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: Any) -> Sample:
        datum, reads = self._data[number], READS[self._loss_fn]
        try:
            tokens = torch.tensor(datum.model_input.to_ints(), dtype=torch.int64)
            fields = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"datum {number}: expected a Datum of text tokens ({error})") from None
        if reads == ("weights",):
            fields.setdefault("weights", torch.ones(len(tokens)))
        routes = fields.pop("routes", None)
        for name in sorted({"target_tokens", *reads, *fields}):
            expected: Any = [len(tokens)] if name in ("target_tokens", *reads) else "nothing"
            got: Any = list(fields[name].shape) if name in fields else "nothing"
            if got != expected:
                rule = (
                    f"{self._loss_fn} takes one number a token of model_input: expected {expected}"
                )
                raise DataError(f"datum {number}, field {name}: {rule}, got {got}")
        targets = fields.pop("target_tokens")
        sequence = torch.cat((tokens, targets[-1:]))
        follows = sequence[1:] == targets
        if len(wrong := (~follows & (fields[reads[0]] != 0)).nonzero()):
            at = int(wrong[0])
            raise DataError(
                f"datum {number}, field target_tokens: token {at} is {targets[at]}, and model_input goes on with "
                f"{sequence[at + 1]}. Give it {reads[0]} of 0, or the token that follows"
            )
        values = {name: torch.cat((torch.zeros(1), value)) for name, value in fields.items()}
        return Sample(sequence, torch.cat((torch.tensor([False]), follows)), values, routes)


def _done(answer: Any) -> APIFuture[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return AwaitableConcurrentFuture(future)
