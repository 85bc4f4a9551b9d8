"""Named ways to fold attention and experts, scaled to the ranks at hand, so that one sweep compares them.

They are the strategies that arXiv 2504.14960 (table 2) compares: FSDP; FSDP with experts spread out;
tensor, expert and data parallelism; all five axes with the experts' mapping tied to attention's
("coupled"); all five with the two mappings chosen apart ("folded").
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from automoe.config.schema import MeshConfig
from automoe.errors import ConfigError

# Which axis takes the next factor of two as ranks double; what is left goes to dp_shard.
_ATTENTION_GROWTH = {
    "fsdp": (),
    "fsdp_ep": (),
    "tp_ep_dp": ("tp", "dp", "tp"),
    "coupled_5d": ("pp", "dp", "tp", "cp", "dp", "pp"),
    "folded_5d": ("pp", "tp", "dp", "cp", "dp", "pp"),
}
PRESETS = tuple(_ATTENTION_GROWTH)
MAX_EP = 8  # a node: beyond it tokens cross the slow network


def expand_preset(mesh: MeshConfig, num_ranks: int | None) -> MeshConfig:
    """The axes of ``mesh.preset`` for ``num_ranks``; an axis that is set beside the preset replaces the preset's.

    Raises:
        ConfigError: no such preset, or no number of ranks to scale it to.
    """
    if not mesh.preset:
        return mesh
    if mesh.preset not in PRESETS:
        raise ConfigError("mesh.preset", mesh.preset, f"there are {', '.join(PRESETS)}", "Name one of them")
    if num_ranks is None:
        raise ConfigError(
            "mesh.preset", mesh.preset, "a preset is scaled to the number of ranks", "Set launch.num_ranks"
        )
    sizes = _sizes(mesh.preset, num_ranks)
    plain = MeshConfig()
    own: dict[str, Any] = {
        field.name: getattr(mesh, field.name)
        for field in fields(MeshConfig)
        if field.name != "preset" and getattr(mesh, field.name) != getattr(plain, field.name)
    }
    return MeshConfig(**{**sizes, **own})


def _sizes(preset: str, num_ranks: int) -> dict[str, int]:
    sizes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    rest = num_ranks
    for axis in _ATTENTION_GROWTH[preset]:
        if rest % 2:
            break
        sizes[axis] *= 2
        rest //= 2
    data = sizes.pop("dp") * rest
    attention = data * sizes["cp"] * sizes["tp"]
    if preset == "fsdp":
        ep = etp = 1
    elif preset in ("tp_ep_dp", "coupled_5d"):
        # Coupled: experts keep attention's tensor parallelism, and ep takes data-parallel ranks alone.
        etp, ep = sizes["tp"], _largest_divisor(data, MAX_EP)
    else:
        etp, ep = 1, _largest_divisor(attention, MAX_EP)
    return sizes | {"ep": ep, "etp": etp}


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, limit + 1) if number % n == 0)
