"""Loss functions for reinforcement learning and distillation, written to be copied and changed.

A loss takes ``nll_BS`` (-log pi of trained tokens, 0 elsewhere) and ``LossInputs``, whose ``given`` has the
samples' values. It returns this rank's share: the sum of the shares over ranks and micro-batches is the loss.
Shares are divided by counts of the global batch, so mesh, micro-batch size and accumulation do not change the loss.
``policy_loss`` makes a loss from a function that returns per-token losses.

Symbols: pi is a token's probability by the weights in training, old by those before the update (``old_log_probs``),
mu by the inference engine (``sampler_log_probs``); r = pi / old; A is ``advantages``; sg is stop-gradient. Letters:
B rows, S positions of this rank, K scored ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from automoe.config.convert import converted, field_types
from automoe.errors import ConfigError
from automoe.model.loss import LossInputs
from automoe.rl.loss_options import on_policy as on_policy

Mean = Literal["tokens", "samples", "length", "sum"]
KL = Literal["k1", "k2", "k3", "k3_weighted", "k3_by_k2"]
LENGTHS = (128, 512, 2048, 8192)  # tokens of an answer, by which dropped answers are counted
BY_LENGTH = (*(f"to_{length}" for length in LENGTHS), "longer")
METRICS = (
    *("clipped_share", "ref_kl", "old_kl", "sampler_kl"),
    *(f"{name}.{length}" for name in ("answers", "dropped_share") for length in BY_LENGTH),
)


@dataclass(frozen=True)
class Correction:
    """Options of the importance weight w = old / mu: probability by the trainer over the inference engine's.

    Attributes:
        kind: ``truncate``: min(w, high); ``mask``: w within [low, high], else 0 (IcePop, arXiv 2510.18855);
            ``reject``: 1 within [low, high], else 0. A ``low`` above ``high`` raises ``ConfigError``.
        level: use w of each ``token``, the product of w over the answer (``sequence``), or the geometric mean
            (``mean``).
    """

    kind: Literal["truncate", "mask", "reject"] = "truncate"
    level: Literal["token", "sequence", "mean"] = "token"
    high: float = 2.0
    low: float = 0.0

    def __post_init__(self) -> None:
        for name, hint in field_types(Correction).items():
            converted(hint, getattr(self, name), f"correction.{name}")
        if not self.low <= self.high:
            rule = f"must be at most correction.high={self.high}"
            raise ConfigError("correction.low", self.low, rule, "Lower it")


# ---------------------------------------------------------------- what losses are made of


def group_advantages(
    rewards: Sequence[float], group_size: int, scale: bool = True, epsilon: float = 1e-4
) -> list[float]:
    """Return (reward - group's mean) / (group's standard deviation + epsilon), or 0 if its rewards are equal.

    ``rewards`` are of the ``group_size`` answers to the first prompt, then to the second, and so on; ``scale=False``
    omits the division (Dr. GRPO). The variance divides by group_size - 1. ``ConfigError`` unless groups are whole.
    """
    if group_size < 1 or len(rewards) % group_size:
        rule = f"{len(rewards)} rewards are no number of whole groups"
        raise ConfigError("group_size", group_size, rule, "Give the answers to a prompt")
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    gained = groups - groups.mean(1, keepdim=True)
    # The mean of equal numbers may differ from them by rounding.
    gained[groups.amin(1) == groups.amax(1)] = 0.0
    if scale and group_size > 1:
        gained /= groups.std(1, keepdim=True) + epsilon
    return gained.flatten().tolist()


def trained(inputs: LossInputs) -> Tensor:
    """Return [B, S] bool: True for trained tokens, False for prompts and padding."""
    return inputs.labels >= 0


def log_ratio(nll_BS: Tensor, inputs: LossInputs) -> Tensor:
    """Return log(pi / old) [B, S], of current weights over those before the update; 0 for untrained tokens."""
    return torch.where(trained(inputs), -nll_BS - inputs.given["old_log_probs"], 0.0)


def sum_of_sample(x_BS: Tensor, inputs: LossInputs) -> Tensor:
    """Return, at each token, the detached sum of ``x_BS`` over its sample's trained tokens: [B, S]."""
    sums_BD = inputs.sum_by_document(torch.where(trained(inputs), x_BS.detach(), 0.0))
    doc_ids = torch.zeros_like(inputs.labels) if inputs.doc_ids is None else inputs.doc_ids
    return sums_BD.gather(1, doc_ids.clamp_min(0))


def length_of_sample(inputs: LossInputs, dtype: torch.dtype) -> Tensor:
    """Return, at each token, the number of its sample's trained tokens, at least 1: [B, S]."""
    return sum_of_sample(trained(inputs).to(dtype), inputs).clamp_min(1)


def mean_of_sample(x_BS: Tensor, inputs: LossInputs) -> Tensor:
    """Return, at each token, the detached mean of ``x_BS`` over its sample's trained tokens: [B, S]."""
    return sum_of_sample(x_BS, inputs) / length_of_sample(inputs, x_BS.dtype)


def kl(nll_BS: Tensor, inputs: LossInputs, kind: KL = "k3") -> Tensor:
    """Return an estimate of KL(pi || ref), policy to reference model, for each token, [B, S].

    d = log pi - log ref (pi: by current weights, -``nll_BS``); old: probability by the weights before the update.
    - ``k1``: d. ``k2``: d^2 / 2. ``k3``: exp(-d) - 1 + d (Schulman, "Approximating KL divergence").
    - ``k3_weighted``: (pi / old) k3, whose gradient is unbiased (DeepSeek-V3.2, arXiv 2512.02556).
    - ``k3_by_k2``: the value of k3 with the gradient of k2, which is unbiased on policy.
    """
    d_BS = torch.where(trained(inputs), -nll_BS - inputs.given["ref_log_probs"], 0.0)
    if kind == "k1":
        return d_BS
    k2_BS, k3_BS = d_BS**2 / 2, _k3(d_BS)
    if kind == "k2":
        return k2_BS
    if kind == "k3_weighted":
        return log_ratio(nll_BS, inputs).exp() * k3_BS
    return k3_BS if kind == "k3" else k2_BS + (k3_BS - k2_BS).detach()


def _k3(d_BS: Tensor) -> Tensor:
    return torch.expm1(-d_BS) + d_BS


def corrected(inputs: LossInputs, correction: Correction) -> Tensor:
    """Return each token's importance weight [B, S], from w = (probability before the update) / (that of the engine).

    For level ``token`` w is each token's own, for ``sequence`` the product over the answer's tokens, for ``mean``
    their geometric mean. The weight is min(w, high) for kind ``truncate``; w for ``mask`` and 1 for ``reject`` if w is
    within [low, high], else 0. The last two kinds report the number of answers with a weight of 0.
    """
    log_w_BS = inputs.given["old_log_probs"] - inputs.given["sampler_log_probs"]
    log_w_BS = torch.where(trained(inputs), log_w_BS, 0.0)
    if correction.level != "token":
        over = sum_of_sample if correction.level == "sequence" else mean_of_sample
        log_w_BS = over(log_w_BS, inputs)
    w_BS = log_w_BS.exp()
    if correction.kind == "truncate":
        return w_BS.clamp_max(correction.high)
    inside_BS = (w_BS >= correction.low) & (w_BS <= correction.high)
    report_dropped(~inside_BS, inputs)
    weight_BS = w_BS if correction.kind == "mask" else torch.ones_like(w_BS)
    return torch.where(inside_BS, weight_BS, 0.0)


def report_dropped(dropped_BS: Tensor, inputs: LossInputs) -> None:
    """Report the numbers of answers, and of answers with a token that ``dropped_BS`` marks, by range of their length.

    They go to ``inputs.report`` as ``answers.RANGE`` and ``dropped_share.RANGE`` (``to_128``, ..., ``longer``).
    """
    number_BS = sum_of_sample(dropped_BS.to(torch.float64), inputs)
    length_BS = length_of_sample(inputs, torch.float64)
    once_BS = trained(inputs) / length_BS  # its sum over an answer is 1
    last = 0.0
    for name, most in zip(BY_LENGTH, (*LENGTHS, torch.inf), strict=True):
        here_BS = once_BS * ((length_BS > last) & (length_BS <= most))
        inputs.report(f"answers.{name}", here_BS.sum())
        inputs.report(f"dropped_share.{name}", (here_BS * (number_BS > 0)).sum())
        last = most


def finish(
    loss_BS: Tensor,
    nll_BS: Tensor,
    inputs: LossInputs,
    mean: Mean,
    length: int = 1,
    correction: Correction | None = None,
    max_drift: float | None = None,
    kl_coef: float = 0.0,
    kl_kind: KL = "k3",
    entropy_coef: float = 0.0,
) -> Tensor:
    """Apply the common options to token losses; return this rank's share (the loss is the shares' sum).

    Args:
        loss_BS: loss of each token, multiplied here by the samples' ``weights`` if given. nll_BS: -log pi.
        mean: ``tokens``: over trained tokens of the global batch; ``samples``: over the tokens of a sample, then over
            samples; ``length``: the sum divided by samples * ``length``; ``sum``: no division.
        correction: importance weight for the mismatch of trainer and inference engine.
        max_drift: answers with advantage < 0 and mean log mu - log pi above it have no policy loss; mu: the engine's
            probability, or if missing that by the weights before the update (arXiv 2512.02556, eq. 9).
        kl_coef, kl_kind: weight and estimator of the divergence ``kl`` to the reference model (``ref_log_probs``).
        entropy_coef: weight of the entropy, which is subtracted from the loss.
    """
    if correction is not None:
        loss_BS = loss_BS * corrected(inputs, correction)
    if max_drift is not None:
        values = inputs.given
        drawn_BS = values.get("sampler_log_probs", values["old_log_probs"])
        drift_BS = mean_of_sample(drawn_BS + nll_BS, inputs)
        far_BS = (drift_BS > max_drift) & (values["advantages"] < 0) & trained(inputs)
        report_dropped(far_BS, inputs)
        loss_BS = loss_BS.masked_fill(far_BS, 0.0)
    if "weights" in inputs.given:
        loss_BS = loss_BS * inputs.given["weights"]
    if kl_coef:
        loss_BS = loss_BS + kl_coef * kl(nll_BS, inputs, kl_kind)
    if entropy_coef:
        assert inputs.entropy is not None  # the session asks for it with this option
        loss_BS = loss_BS - entropy_coef * inputs.entropy
    _report_gaps(nll_BS.detach(), inputs)
    return averaged(loss_BS, inputs, mean, length)


def averaged(loss_BS: Tensor, inputs: LossInputs, mean: Mean, length: int = 1) -> Tensor:
    """Return this rank's share of a mean of ``loss_BS``; the sum of shares is the mean over the global batch.

    ``mean`` is ``tokens``: over trained tokens; ``samples``: over each sample's tokens, then over samples;
    ``length``: the sum divided by samples * ``length``; or ``sum``: no division.
    """
    loss_BS = torch.where(trained(inputs), loss_BS, 0.0)
    counts = inputs.counts
    if mean == "tokens":
        return loss_BS.sum() / counts.trained.clamp_min(1)
    if mean == "samples":
        loss_BS = loss_BS / length_of_sample(inputs, loss_BS.dtype)
        return loss_BS.sum() / counts.documents.clamp_min(1)
    if mean == "length":
        return loss_BS.sum() / (counts.documents.clamp_min(1) * length)
    assert mean == "sum", mean
    return loss_BS.sum()


def _clipped(
    r_BS: Tensor, inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    advantages_BS = inputs.given["advantages"]
    plain_BS = -r_BS * advantages_BS
    clipped_BS = -r_BS.clamp(1 - clip_low, 1 + clip_high) * advantages_BS
    _report_mean("clipped_share", clipped_BS > plain_BS, inputs)
    loss_BS = torch.maximum(plain_BS, clipped_BS)
    if dual_clip is None:
        return loss_BS
    limited_BS = torch.minimum(loss_BS, -dual_clip * advantages_BS)
    return torch.where(advantages_BS < 0, limited_BS, loss_BS)


def _with_rest(log_probs_BSK: Tensor) -> Tensor:
    """Append, to the log-probabilities of K ids, that of all other ids together: [B, S, K] -> [B, S, K + 1]."""
    tiny = torch.finfo(log_probs_BSK.dtype).eps
    mass_BS1 = log_probs_BSK.exp().sum(-1, keepdim=True).clamp_max(1 - tiny)
    return torch.cat((log_probs_BSK, torch.log1p(-mass_BS1)), dim=-1)


def _report_mean(name: str, x_BS: Tensor, inputs: LossInputs) -> None:
    """Report as metric ``name`` the mean of ``x_BS`` over the global batch's trained tokens."""
    total = torch.where(trained(inputs), x_BS, 0).sum()
    inputs.report(name, total / inputs.counts.trained.clamp_min(1))


def _report_gaps(nll_BS: Tensor, inputs: LossInputs) -> None:
    """Report as metrics k3 estimates of KL divergences, as means over trained tokens.

    With pi the policy and pi_old that before the update: ``old_kl`` is KL(pi_old || pi), ``ref_kl`` KL(pi || reference
    model), ``sampler_kl`` KL(inference engine || pi_old); the last two need their log-probabilities in ``inputs``.
    """
    old_BS = inputs.given.get("old_log_probs", -nll_BS)
    gaps = {"old_kl": old_BS + nll_BS}
    if "ref_log_probs" in inputs.given:
        gaps["ref_kl"] = -nll_BS - inputs.given["ref_log_probs"]
    if "sampler_log_probs" in inputs.given:
        gaps["sampler_kl"] = inputs.given["sampler_log_probs"] - old_BS
    for name, d_BS in gaps.items():
        _report_mean(name, _k3(d_BS), inputs)


def policy_loss(
    mean: Mean,
    reads: Sequence[str] = ("advantages", "old_log_probs"),
    metrics: Sequence[str] = (),
    fixed: bool = False,
) -> Callable[[Callable[..., Tensor]], Any]:
    """Return a decorator that turns a function for per-token losses into a loss for ``Session``.

    The decorated function takes (nll_BS, inputs, its own options) and returns [B, S]. The loss also takes the options
    of ``finish``; its attribute ``options`` maps the name of each option to its type. ``mean`` is the default of that
    option (with ``fixed``, callers may not change it). ``reads`` names the samples' values that the loss needs,
    ``metrics`` those that the function reports besides the common ones (``METRICS``).
    """

    def decorate(of_tokens: Callable[..., Tensor]) -> Any:
        special, shared = _options_of(of_tokens), _options_of(finish)
        if fixed:
            del shared["mean"]

        @wraps(of_tokens)
        def loss(nll_BS: Tensor, inputs: LossInputs, **options: Any) -> Tensor:
            taken = {name: options.pop(name) for name in special.keys() & options.keys()}
            loss_BS = of_tokens(nll_BS, inputs, **taken)
            return finish(loss_BS, nll_BS, inputs, **{"mean": mean} | options)

        facts = {"reads": reads, "metrics": (*METRICS, *metrics), "mean": mean}
        vars(loss).update(facts, options=shared | special)
        return loss

    return decorate


def _options_of(function: Callable[..., Tensor]) -> dict[str, Any]:
    """Return name -> type of a loss function's options: all its arguments but tensors and ``inputs``."""
    hints = get_type_hints(function)
    return {name: hints[name] for name in hints.keys() - {"loss_BS", "nll_BS", "inputs", "return"}}


# ---------------------------------------------------------------- losses


@policy_loss("samples")
def grpo(
    nll_BS: Tensor,
    inputs: LossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Return GRPO's token losses (arXiv 2402.03300), [B, S].

    Each is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), but at most -dual_clip A if A < 0 (arXiv
    1912.09729), where r = pi / pi_old, pi_old is the probability before the update, and A is the
    advantage. ``policy_loss`` averages over an answer's tokens, then over answers.
    """
    return _clipped(log_ratio(nll_BS, inputs).exp(), inputs, clip_low, clip_high, dual_clip)


@policy_loss("length", fixed=True)
def dr_grpo(
    nll_BS: Tensor,
    inputs: LossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Return Dr. GRPO's token losses (arXiv 2503.20783), [B, S].

    Each is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), but at most -dual_clip A if A < 0, with
    r = pi / pi_old and advantage A. ``policy_loss`` divides their sum by answers * ``length``, a
    required option, e.g. an answer's token limit.
    """
    return _clipped(log_ratio(nll_BS, inputs).exp(), inputs, clip_low, clip_high, dual_clip)


@policy_loss("tokens", fixed=True)
def dapo(
    nll_BS: Tensor,
    inputs: LossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """Return DAPO's token losses (arXiv 2503.14476), [B, S].

    Each is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), but at most -dual_clip A if A < 0, with
    r = pi / pi_old and advantage A. ``policy_loss`` averages over tokens.
    """
    return _clipped(log_ratio(nll_BS, inputs).exp(), inputs, clip_low, clip_high, dual_clip)


@policy_loss("samples")
def gspo(
    nll_BS: Tensor,
    inputs: LossInputs,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Tensor:
    """Return GSPO's token losses (arXiv 2507.18071), [B, S].

    Each is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), but at most -dual_clip A if A < 0, with
    advantage A, r = sg[s] pi / sg[pi], s = exp(an answer's mean log(pi / pi_old)), and
    stop-gradient sg. ``policy_loss`` averages over an answer's tokens, then over answers.
    """
    d_BS = log_ratio(nll_BS, inputs)
    s_BS = (mean_of_sample(d_BS, inputs) + d_BS - d_BS.detach()).exp()
    return _clipped(s_BS, inputs, clip_low, clip_high, dual_clip)


@policy_loss("tokens")
def cispo(
    nll_BS: Tensor, inputs: LossInputs, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """Return CISPO's token losses (arXiv 2506.13585), [B, S]; report ``clipped_share`` (of tokens whose r is clipped).

    Each is -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi, with r = pi / pi_old, advantage A,
    and stop-gradient sg. ``policy_loss`` averages over tokens.
    """
    r_BS = log_ratio(nll_BS, inputs).detach().exp()
    weight_BS = r_BS.clamp(1 - clip_low, 1 + clip_high)
    _report_mean("clipped_share", weight_BS != r_BS, inputs)
    return weight_BS * inputs.given["advantages"] * nll_BS


@policy_loss("samples")
def sapo(
    nll_BS: Tensor, inputs: LossInputs, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Return SAPO's token losses (arXiv 2511.20347), [B, S].

    Each is -A sigmoid(tau (r - 1)) 4 / tau, with r = pi / pi_old and advantage A; tau is
    ``tau_positive`` if A > 0, else ``tau_negative``. ``policy_loss`` averages over an
    answer's tokens, then over answers.
    """
    advantages_BS = inputs.given["advantages"]
    r_BS = log_ratio(nll_BS, inputs).exp()
    tau_BS = torch.where(advantages_BS > 0, tau_positive, tau_negative)
    gate_BS = torch.sigmoid(tau_BS * (r_BS - 1)) * 4 / tau_BS
    return -gate_BS * advantages_BS


@policy_loss("tokens")
def dppo(
    nll_BS: Tensor,
    inputs: LossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    high: float = 20.0,
) -> Tensor:
    """Return DPPO's token losses (arXiv 2602.04879), [B, S]; report ``clipped_share`` (of tokens beyond the bounds).

    Each is -sg[min(r, high)] A log pi, with r = pi / pi_old, advantage A, and stop-gradient sg. It
    is 0 if pi - pi_old is above clip_high (A > 0) or below -clip_low (A <= 0). ``policy_loss``
    averages over tokens.
    """
    advantages_BS = inputs.given["advantages"]
    d_BS = log_ratio(nll_BS, inputs).detach()
    gained_BS = (-nll_BS.detach()).exp() * -torch.expm1(-d_BS)
    far_BS = torch.where(advantages_BS > 0, gained_BS > clip_high, gained_BS < -clip_low)
    _report_mean("clipped_share", far_BS, inputs)
    weight_BS = d_BS.exp().clamp_max(high).masked_fill(far_BS, 0.0)
    return weight_BS * advantages_BS * nll_BS


@policy_loss("tokens")
def importance_sampling(nll_BS: Tensor, inputs: LossInputs) -> Tensor:
    """Return policy-gradient losses of tokens, [B, S]: -r A, with r = pi / pi_old, advantage A.

    pi_old is the probability before the update. ``policy_loss`` averages over tokens.
    """
    return -log_ratio(nll_BS, inputs).exp() * inputs.given["advantages"]


@policy_loss("tokens", reads=())
def cross_entropy(nll_BS: Tensor, inputs: LossInputs) -> Tensor:
    """Return -log pi of each token, [B, S].

    ``policy_loss`` multiplies by the samples' ``weights`` (of any sign) if given, and averages
    over tokens.
    """
    return nll_BS


@policy_loss("tokens", ("old_log_probs", "teacher_log_probs"), ["teacher_kl"])
def distill(nll_BS: Tensor, inputs: LossInputs, strength: float = 1.0) -> Tensor:
    """Return token losses of on-policy distillation, [B, S]; report the reverse KL ``teacher_kl``.

    Each is -r A', with r = pi / pi_old, A' = A - strength sg[log pi - ``teacher_log_probs``],
    stop-gradient sg, and A = ``advantages`` or 0. ``policy_loss`` averages over tokens.
    """
    gap_BS = -nll_BS.detach() - inputs.given["teacher_log_probs"]
    advantages_BS = inputs.given.get("advantages", torch.zeros_like(gap_BS)) - strength * gap_BS
    _report_mean("teacher_kl", gap_BS, inputs)
    return -log_ratio(nll_BS, inputs).exp() * advantages_BS


@policy_loss("tokens", ("teacher_log_probs", "scored_ids"))
def distill_top_k(
    nll_BS: Tensor,
    inputs: LossInputs,
    direction: Literal["forward", "reverse"] = "forward",
    tail: bool = True,
) -> Tensor:
    """Return the KL divergence over the teacher's K likeliest ids at each token, [B, S].

    The ids are a sample's ``scored_ids`` [tokens, K]. ``policy_loss`` averages over tokens.

    Args:
        direction: ``forward``: sum of p log(p / pi), p the teacher's probability (``teacher_log_probs`` [tokens, K])
            and pi the student's; ``reverse``: sum of pi log(pi / p).
        tail: treat all other ids as one more id; without it, the reverse KL is lowest at pi = p / e, not at p.
    """
    ours_BSK, theirs_BSK = inputs.scored, inputs.given["teacher_log_probs"]
    assert ours_BSK is not None  # scored_ids are there
    if tail:
        ours_BSK, theirs_BSK = _with_rest(ours_BSK), _with_rest(theirs_BSK)
    gap_BSK = theirs_BSK - ours_BSK
    if direction == "reverse":
        gap_BSK, theirs_BSK = -gap_BSK, ours_BSK
    return (theirs_BSK.exp() * gap_BSK).sum(-1)
