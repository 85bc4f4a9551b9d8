"""What a loss of ``automoe.rl.losses`` takes and reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from automoe.config.convert import converted
from automoe.errors import ConfigError


def check_options(loss: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a loss that ``policy_loss`` made cannot run with these options."""
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
