"""Which optimizer steps are better not taken: no finite loss or gradient, or a loss far above the recent ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from automoe.config.schema import TrainConfig

_NORMAL = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
_LEAST_SPREAD = 1e-3  # of the median: losses that happen to be all alike make nothing a spike


def spike_threshold(recent: Sequence[float], train: TrainConfig) -> float:
    """The loss above which a step is a spike, in nats; infinite while there is too little to compare with.

    ``median + spike_factor * 1.4826 * MAD`` over ``recent``. Median and median absolute deviation do not
    move with single outliers, as a mean and a standard deviation would. ``spike_factor=6`` is far out.

    Args:
        recent: losses of the last steps that were taken, oldest first; judged once there are
            ``train.spike_window`` of them.
    """
    if not train.spike_factor or len(recent) < train.spike_window:
        return math.inf
    middle = median(recent)
    deviation = _NORMAL * median(abs(loss - middle) for loss in recent)
    return middle + train.spike_factor * max(deviation, _LEAST_SPREAD * abs(middle))


def reason_to_skip(loss: float, norm: float, recent: Sequence[float], train: TrainConfig) -> str | None:
    """Why the step that gave ``loss`` and gradient norm ``norm`` should change nothing; None if it should."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"loss {loss}, gradient norm {norm}"
    threshold = spike_threshold(recent, train)
    if loss > threshold:
        return (
            f"loss {loss:.4f} is a spike: above {threshold:.4f}, train.spike_factor={train.spike_factor:g} "
            f"deviations over the median of the last {len(recent)}"
        )
    return None


def remember(loss: float, recent: list[float], train: TrainConfig) -> None:
    """Add the loss of a step that was taken, and forget those that no longer count. In place."""
    if train.spike_factor:
        recent.append(loss)
        del recent[: -train.spike_window]
