"""Peak FLOP/s of GPUs by device name, the divisor of MFU."""

from __future__ import annotations

# Dense bfloat16 FLOP/s from the makers' data sheets. The first entry contained in a device's name
# wins, so H200 stands before H20, and GB200 before B200.
_PEAKS = {
    "A100": 312e12,
    "RTX A6000": 154.85e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "H200 NVL": 835e12,
    "H200": 989.5e12,
    "H20": 148e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "L40S": 362e12,
    "MI250X": 191.5e12,
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
    "MI355X": 2500e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU; None if it is not known.

    Args:
        device_name: result of ``torch.cuda.get_device_name``.
    """
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)
