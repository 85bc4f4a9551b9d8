"""All uses of torchtitan, in one file because its public names change between releases.

Torchtitan is imported only when called: it loads triton and torch's distributed stack.
"""

from __future__ import annotations

from types import ModuleType

from automoe.errors import import_backend

_A100 = 312e12  # what torchtitan answers for any device that it does not know


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device by its ``torch.cuda.get_device_name``, or None.

    torchtitan returns an A100's value for any device that is not in its table, which would turn an
    unknown peak into a wrong utilisation: that value counts only for an A100. On a machine with an
    H100 torchtitan looks at the hardware first and returns that card's value, whatever the name.
    """
    get_peak_flops = _titan("torchtitan.tools.utils").get_peak_flops
    logger = _titan("torchtitan.tools.logging").logger
    # it warns about the guess that is discarded here
    disabled = logger.disabled
    logger.disabled = True
    try:
        flops = float(get_peak_flops(device_name))
    finally:
        logger.disabled = disabled
    return None if flops == _A100 and "A100" not in device_name else flops


def _titan(module: str) -> ModuleType:
    remedy = (
        "torchtitan is used for its table of peak FLOPs: install torchtitan (and triton, which it needs and does not "
        "declare), or say cluster.peak_flops, dense bfloat16 FLOP/s of one GPU"
    )
    return import_backend(module, "torchtitan", remedy)
