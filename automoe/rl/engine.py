"""Inference engines that sample answers with the weights in training, and a check of their numbers.

Every rank calls an engine's two methods: ``update`` loads a stream of weights, ``sample`` answers
prompts. This module has the engine that needs no other program: ``generate`` of transformers.

Letters: N answers to a prompt, P tokens of the prompt, A tokens of the answers, L MoE layers, K
top-k, V vocabulary.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from automoe.comm.agreement import Ranks
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.hf.folder import write_settings
from automoe.hf.transformers_models import loading_class, stated_config
from automoe.hf.verify import multiply_as_torch_can
from automoe.parallel.fsdp import COMPUTE_DTYPES
from automoe.rl.routes import ROUTES_DTYPE
from automoe.rl.weights import WeightStream


@dataclass(frozen=True)
class Answer:
    """One answer that an inference engine sampled for one prompt of P tokens.

    Attributes:
        tokens: [A] ids, including the id that ended the answer.
        log_probs: [A] log-probability of each token under the distribution that it was drawn from.
        routes: [P + A - 1, L, K] expert ids that the engine chose in its L MoE layers (top-k K) for
            every token of prompt and answer but the last; None if the engine returns no expert ids.
    """

    tokens: list[int]
    log_probs: list[float]
    routes: torch.Tensor | None = None

    def without_stop(self, stops: Collection[int]) -> list[int]:
        """Return ``tokens`` without the last one if it is among ``stops``, ids that end an answer."""
        return self.tokens[:-1] if self.tokens[-1] in stops else self.tokens

    def as_json(self) -> tuple[Any, ...]:
        """Return (tokens, log_probs, routes) for JSON; routes: [shape, base64 of little-endian int16] or None."""
        if self.routes is None:
            return self.tokens, self.log_probs, None
        lines = self.routes.cpu().numpy().astype("<i2")
        return self.tokens, self.log_probs, [lines.shape, base64.b64encode(lines).decode()]

    @classmethod
    def of_json(cls, tokens: list[int], log_probs: list[float], routes: Any) -> Answer:
        """Return the answer with A token ids, their A log-probabilities, and expert ids from JSON.

        Args:
            routes: expert ids as [shape, base64 of little-endian int16] (``as_json``), or None.
        """
        if routes is not None:
            shape, text = routes
            lines = np.frombuffer(base64.b64decode(text), "<i2").reshape(shape)
            routes = torch.from_numpy(lines.astype(np.int16))
        return cls(tokens, log_probs, routes)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one call of an engine; equal weights and seed give equal answers.

    Attributes:
        num: number of answers to each prompt.
        max_tokens: largest number of tokens of an answer.
        temperature: divisor of the logits.
        seed: seed of the call's random numbers.
        stops: ids of tokens that end an answer.
    """

    num: int
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stops: Sequence[int] = ()


class Engine(Protocol):
    """Interface of an inference engine that answers prompts; every rank makes each call.

    Attributes:
        options: keyword arguments (number format, bucket size) with which a caller must make the
            ``WeightStream`` that it passes to ``update``.
    """

    options: dict[str, Any]

    def update(self, stream: WeightStream) -> None:
        """Load the weights of ``stream`` into the engine. Collective."""

    def sample(self, prompts: Sequence[list[int]], how: Sampling) -> list[list[Answer]]:
        """Return ``how.num`` answers to each prompt (token ids), equal on every rank. Collective."""


def gaps_of(
    answers: Sequence[Answer], scores: dict[str, list[list[Any]]], bound: float
) -> dict[str, float]:
    """Return statistics of |engine's - trainer's log-probability| over all answers' tokens in nats.

    Rounding to bfloat16 moves a token by 0.02 nats. An engine with stale weights or wrongly loaded
    experts is off by 0.1 or more.

    Args:
        answers: answers with the engine's log-probabilities.
        scores: ``old_log_probs``: for each answer the trainer's log-probabilities of its tokens; if
            the answers have routes (the engine's expert ids) also ``differing``: for each token the
            index, among MoE layers, of the first whose router would choose other experts, or -1. This function removes
            ``differing`` from the dictionary.
        bound: largest allowed mean.

    Returns:
        ``engine_gap`` (mean) and ``engine_gap_max``. With routes also these means:
        ``engine_gap.same`` over tokens for which router and engine agree in all layers, and
        ``engine_gap.layer_N`` over tokens for which MoE layer N is the first to disagree.

    Raises:
        BackendError: the mean is above ``bound``.
    """
    theirs = np.concatenate([answer.log_probs for answer in answers])
    ours = np.concatenate(scores["old_log_probs"])
    gaps = np.abs(theirs - ours)
    mean = float(gaps.mean())
    if not mean <= bound:  # so that NaN fails
        at = gaps.argmax()
        raise BackendError(
            f"the engine's log-probabilities of {len(gaps)} tokens are {mean:.3g} nats from the trainer's on average "
            f"(allowed {bound:g}; token {at}: {theirs[at]:.3f} and {ours[at]:.3f}): it has other weights, or "
            "computes another model. Start it again from an export; if it stays so, the engine is wrong for this model"
        )
    numbers = {"engine_gap": mean, "engine_gap_max": float(gaps.max())}
    if differing := scores.pop("differing", None):
        layers = np.concatenate(differing)
        for layer in np.unique(layers):
            name = "same" if layer < 0 else f"layer_{int(layer)}"
            numbers[f"engine_gap.{name}"] = float(gaps[layers == layer].mean())
    return numbers


class TransformersEngine:
    """Inference engine that runs transformers' ``generate`` in the training processes.

    Each rank holds a full copy of the model and answers its share of the prompts.

    Attributes:
        options: keyword arguments with which a caller must make the ``WeightStream`` for ``update``.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.options = {"layout": "fused"}
        dtype = COMPUTE_DTYPES[config.train.dtype]
        with tempfile.TemporaryDirectory() as folder:
            write_settings(Path(folder), config.model, dtype, "none")
            hf_config = stated_config(Path(folder))
        multiply_as_torch_can(hf_config, config.model, dtype)
        self._model = loading_class(hf_config).from_config(hf_config, dtype=dtype).to(device).eval()
        self._choices: list[list[torch.Tensor]] = []  # [rows, K] of each call of each MoE layer
        for name, module in self._model.named_modules():
            if name.endswith(".mlp.experts"):
                self._choices.append(calls := [])
                module.register_forward_pre_hook(
                    lambda _module, inputs, calls=calls: calls.append(inputs[1].cpu())
                )

    @torch.no_grad()
    def update(self, stream: WeightStream) -> None:
        state = self._model.state_dict()
        assert state.keys() - stream.contents.keys() <= {"lm_head.weight"}  # if it is tied
        for bucket in stream.lent():
            for name, tensor in bucket.items():
                if name in state:  # transformers has no modules for multi-token prediction
                    state[name].copy_(tensor)

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]], how: Sampling) -> list[list[Answer]]:
        ranks = Ranks()
        # A call answers one prompt, so its numbers do not depend on the number of ranks.
        by_rank = ranks.all(
            lambda: [
                self._answers(prompts[number], replace(how, seed=how.seed + number))
                for number in range(ranks.rank, len(prompts), ranks.size)
            ]
        )
        return [by_rank[n % ranks.size][n // ranks.size] for n in range(len(prompts))]

    def _answers(self, prompt: list[int], how: Sampling) -> list[Answer]:
        from transformers import GenerationConfig

        device = self._model.device
        for calls in self._choices:
            calls.clear()
        tokens_NP = torch.tensor([prompt] * how.num, device=device)
        settings = GenerationConfig(
            do_sample=True,
            temperature=how.temperature,
            top_k=0,
            max_new_tokens=how.max_tokens,
            eos_token_id=how.stops or None,
            pad_token_id=how.stops[0] if how.stops else 0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(how.seed)
            made = self._model.generate(
                tokens_NP, attention_mask=torch.ones_like(tokens_NP), generation_config=settings
            )
        new_NA = made.sequences[:, len(prompt) :]
        logits_NAV = torch.stack(made.logits, dim=1).float() / how.temperature
        log_probs_NA = logits_NAV.log_softmax(-1).gather(2, new_NA.unsqueeze(-1)).squeeze(-1)
        routes = None
        if self._choices:
            layers = [
                torch.cat([call.view(how.num, -1, call.shape[-1]) for call in calls], dim=1)
                for calls in self._choices
            ]
            routes = torch.stack(layers, dim=2)
        answers = []
        for row, tokens in enumerate(new_NA.tolist()):
            ends = (at for at, token in enumerate(tokens, 1) if token in how.stops)
            size = next(ends, len(tokens))
            lines = None
            if routes is not None:  # a copy: a view would take all answers along to other ranks
                lines = routes[row, : len(prompt) + size - 1].to("cpu", ROUTES_DTYPE, copy=True)
            answers.append(Answer(tokens[:size], log_probs_NA[row, :size].tolist(), lines))
        return answers
