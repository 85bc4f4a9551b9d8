"""What a loss of ``automoe.rl.losses`` takes and reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, get_type_hints

from torch import Tensor

from automoe.config.convert import converted
from automoe.errors import ConfigError
from automoe.rl import losses


def check_options(loss: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if one of ``automoe.rl.losses`` cannot run with these options."""
    if not callable(loss):
        raise ConfigError("loss", loss, "must be a function", "Give one of automoe.rl.losses")
    if getattr(loss, "__module__", None) != losses.__name__:
        return
    key = f"losses.{getattr(loss, '__name__', '')}"
    taken = signature(loss).parameters
    passed_on = [losses.finish] if "options" in taken else []
    passed_on += (
        [losses.grpo] if passed_on and loss in (losses.dr_grpo, losses.dapo, losses.gspo) else []
    )
    hints: dict[str, Any] = {}
    for function in (*passed_on, loss):
        hints |= get_type_hints(function)
    left_out = {"nll_BS", "inputs", "loss_BS", "options", "return"}
    left_out |= {"mean"} if loss in (losses.dr_grpo, losses.dapo) else set()  # theirs is fixed
    known = sorted(hints.keys() - left_out)
    if unknown := sorted(options.keys() - known):
        rule = f"the loss takes {', '.join(known)}"
        raise ConfigError(key, unknown, rule, "Correct the option's name")
    for name in known:
        if name in options:
            converted(hints[name], options[name], f"{key}.{name}")
        elif name in taken and taken[name].default is Parameter.empty:
            raise ConfigError(f"{key}.{name}", "", "has no default", f"Give {name}")
    if (length := options.get("length", 1)) < 1:
        raise ConfigError(f"{key}.length", length, "is a divisor", "Give 1 or more")


def values_read(loss: Callable[..., Tensor], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the samples' values that a loss reads with these options."""
    names = {*getattr(loss, "reads", ())}
    if options.get("correction") is not None:
        names |= {"old_log_probs", "sampler_log_probs"}
    if options.get("max_drift") is not None:
        names |= {"advantages", "old_log_probs"}
    if options.get("kl_coef"):
        names.add("ref_log_probs")
        if options.get("kl_kind") == "k3_weighted":
            names.add("old_log_probs")
    return tuple(sorted(names))
