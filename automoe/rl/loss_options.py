"""Helpers for a reinforcement learning loss: check its options, name the values of samples that it
needs (such as ``advantages``), and wrap it for the first update on new answers.

They read the attributes that the decorator ``automoe.rl.losses.policy_loss`` sets on a loss. B
rows, S positions of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import Tensor

from automoe.config.convert import converted
from automoe.errors import ConfigError
from automoe.model.loss import LossInputs


def check_options(loss: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if ``loss`` is not a function, or an option is unknown or has a wrong value.

    The option ``length``, the divisor of some losses, must be at least 1, and they require it.
    """
    if not callable(loss):
        raise ConfigError("loss", loss, "must be a function", "Give one of automoe.rl.losses")
    known: Mapping[str, Any] | None = getattr(loss, "options", None)
    if known is None:
        return
    key = f"losses.{loss.__name__}"
    for name, value in options.items():
        if name not in known:
            rule = f"the loss takes {', '.join(sorted(known))}"
            raise ConfigError(f"{key}.{name}", value, rule, "Correct the option's name")
        converted(known[name], value, f"{key}.{name}")
    if (length := options.get("length", 0 if loss.mean == "length" else 1)) < 1:  # type: ignore[attr-defined]
        rule = "is a divisor, and has no default"
        raise ConfigError(f"{key}.length", length, rule, "Give 1 or more")


def values_read(loss: Callable[..., Tensor], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the samples' values, such as ``advantages``, that a loss with these options needs."""
    names = {*getattr(loss, "reads", ())}
    if options.get("correction") is not None:
        names |= {"old_log_probs", "sampler_log_probs"}
    if options.get("max_drift") is not None:
        names |= {"advantages", "old_log_probs"}
    if options.get("kl_coef"):
        names.add("ref_log_probs")
        if options.get("kl_kind") == "k3_weighted":
            names.add("old_log_probs")
    return tuple(sorted(names - {getattr(loss, "computes", "")}))


def on_policy(loss: Callable[..., Tensor]) -> Any:
    """Return ``loss`` wrapped for the first update on new answers: ``old_log_probs`` are those of
    the update's own forward pass.

    The caller then needs no ``Session.log_probs``. The result is the same, unless dropout or
    router jitter is on, which ``log_probs`` leaves out. Samples need no ``old_log_probs``, and any
    that they have are not read. For later updates on the same answers, pass
    this update's ``Outcome.log_probs`` as ``old_log_probs``.
    """

    if isinstance(loss, partial):  # the attributes are those of the function
        return partial(on_policy(loss.func), *loss.args, **loss.keywords)

    @wraps(loss)
    def own(nll_BS: Tensor, inputs: LossInputs, **options: Any) -> Tensor:
        values = {**inputs.given, "old_log_probs": -nll_BS.detach()}
        return loss(nll_BS, replace(inputs, given=values), **options)

    vars(own).update(computes="old_log_probs")
    return own
