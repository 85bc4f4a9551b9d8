"""Engines that answer prompts with the weights in training, and what is checked of them.

An engine has two methods that every rank calls: ``update`` takes a stream of weights, ``sample``
answers prompts. This module has the one that needs no other program, ``generate`` of transformers.

Letters: N answers to a prompt, P tokens of the prompt, A tokens of the answers, L MoE layers, K
top-k, V vocabulary.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from automoe.comm.agreement import Ranks
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.hf.folder import write_settings
from automoe.hf.verify import multiply_as_torch_can
from automoe.parallel.fsdp import COMPUTE_DTYPES
from automoe.rl.routes import ROUTES_DTYPE
from automoe.rl.weights import WeightStream


@dataclass(frozen=True)
class Answer:
    """One sampled answer of an engine to one prompt of P tokens.

    Attributes:
        tokens: [A] ids, including the id that ended the answer.
        log_probs: [A] log-probability of each token under the distribution that it was drawn from.
        routes: [P + A - 1, L, K] expert ids of every token but the last; None if the engine returns
            no expert ids.
    """

    tokens: list[int]
    log_probs: list[float]
    routes: torch.Tensor | None = None

    def as_json(self) -> tuple[Any, ...]:
        """Return (tokens, log_probs, routes); routes as [shape, base64 of int16], or None."""
        if self.routes is None:
            return self.tokens, self.log_probs, None
        lines = self.routes.cpu().numpy().astype("<i2")
        return self.tokens, self.log_probs, [lines.shape, base64.b64encode(lines).decode()]

    @classmethod
    def of_json(cls, tokens: list[int], log_probs: list[float], routes: Any) -> Answer:
        """Return the answer from tokens, log-probabilities and encoded routes of ``as_json``."""
        if routes is not None:
            shape, text = routes
            lines = np.frombuffer(base64.b64decode(text), "<i2").reshape(shape)
            routes = torch.from_numpy(lines.astype(np.int16))
        return cls(tokens, log_probs, routes)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a call of an engine; equal weights and seed give equal answers.

    Attributes:
        num: number of answers to each prompt.
        max_tokens: largest number of tokens of an answer.
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
        options: keyword arguments of the ``WeightStream`` that ``update`` takes.
    """

    options: dict[str, Any]

    def update(self, stream: WeightStream) -> None:
        """Load the weights of ``stream`` into the engine. Collective."""

    def sample(self, prompts: Sequence[list[int]], how: Sampling) -> list[list[Answer]]:
        """Return for each prompt (token ids) its ``how.num`` answers, the same on every rank."""


def gaps_of(
    answers: Sequence[Answer], scores: dict[str, list[list[Any]]], bound: float
) -> dict[str, float]:
    """Return the gap |log-probability of the engine - of the trainer| over all answers, in nats.

    Rounding moves a token by 0.02 nats in bfloat16. An engine whose weights are stale, or whose
    experts are scrambled, is off by tenths or more.

    Args:
        scores: ``old_log_probs``: for each answer the trainer's log-probabilities of its tokens; if
            there are routes also ``differing``: for each token ``LogProbs.first_differing``. This
            function removes ``differing``.
        bound: largest allowed mean.

    Returns:
        ``engine_gap`` (mean) and ``engine_gap_max``. With routes also the mean of
            ``engine_gap.same``: tokens for which router and engine agree in all layers, and of
            ``engine_gap.layer_N``: tokens for which MoE layer N is the first where they do not.

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
    """Engine that runs transformers' ``generate`` in the training ranks, each with a full model."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.options = {"layout": "fused"}
        dtype = COMPUTE_DTYPES[config.train.dtype]
        with tempfile.TemporaryDirectory() as folder:
            write_settings(Path(folder), config.model, dtype, "none")
            hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        multiply_as_torch_can(hf_config, config.model, dtype)
        self._model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).to(device).eval()
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
        for bucket in stream:
            for name, tensor in bucket.items():
                if name in state:  # transformers has no modules for multi-token prediction
                    state[name].copy_(tensor)

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]], how: Sampling) -> list[list[Answer]]:
        ranks = Ranks()
        numbered = list(enumerate(prompts))
        # A call answers one prompt, so its numbers do not depend on the number of ranks.
        by_rank = ranks.all(
            lambda: [
                self._answers(prompt, replace(how, seed=how.seed + number))
                for number, prompt in numbered[ranks.rank :: ranks.size]
            ]
        )
        return [by_rank[number % ranks.size][number // ranks.size] for number, _ in numbered]

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
