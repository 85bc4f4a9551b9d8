"""Rules of ``train.compile``: what cannot be compiled whole, and is therefore not run beside it."""

from __future__ import annotations

from automoe.config.mesh_shape import MeshShape
from automoe.config.recompute import PROMISED
from automoe.config.schema import Config
from automoe.errors import ConfigError


def check_compile(config: Config, shape: MeshShape) -> None:
    """Raise ``ConfigError`` for the first choice that ``train.compile`` excludes."""
    if not config.train.compile:
        return
    names = config.parallel.recompute
    # What is made again for whoever reads it: within a compiled part the compiler decides that.
    names = [names] if isinstance(names, str) else names
    promised = [name for name in PROMISED if name in names]
    kernels = config.kernels
    left = f"[{','.join(name for name in names if name not in PROMISED)}]"
    without_core = f"[{','.join(name for name in names if name != 'core_attn')}]"
    for found, what, instead in (
        (
            config.parallel.context == "ring" and shape.cp > 1,
            "the calls of parallel.context=ring",
            "parallel.context=gather",
        ),
        (kernels.attention == "te", "the modules of kernels.attention=te", "kernels.attention=sdpa"),
        (kernels.rope == "triton", "the kernels of kernels.rope=triton", "kernels.rope=torch"),
        (kernels.norm == "te", "the modules of kernels.norm=te", "kernels.norm=torch"),
        (config.train.fp8 != "off", f"the products of train.fp8={config.train.fp8}", "train.fp8=off"),
        (
            bool(promised),
            f"the hooks of parallel.recompute=[{','.join(promised)}]",
            f"parallel.recompute={left}",
        ),
        # torch 2.13 then takes the mesh of a weight for a tensor that it has to keep.
        (
            "core_attn" in names and shape.tp > 1,
            f"parallel.recompute=[core_attn] with mesh.tp={shape.tp}",
            f"parallel.recompute={without_core}",
        ),
    ):
        if found:
            raise ConfigError(
                "train.compile",
                True,
                f"attention and norms are compiled whole, and {what} cannot be a part of that",
                f"Set train.compile=false, or {instead}",
            )
