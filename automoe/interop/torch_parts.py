"""Which configuration options need which private parts of torch, and whether torch has them.

The parts are searched for in torch's source files, without importing torch. ``torch_private`` and
``torch_pipelining`` use them and describe each one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from automoe.config.mesh_shape import MeshShape, stays_unsharded
from automoe.config.pipeline import SINGLE, runs_halves
from automoe.config.schema import Config

_SUMS = "distributed/fsdp/_fully_shard/_fsdp_param.py"
_ORDERS = "distributed/pipelining/schedules.py"
_RING = "distributed/tensor/experimental/_attention.py"
_ORDERED = "_Action _PipelineScheduleRuntime _prepare_schedule_with_comms"
_LATER = "unsharded_grad_dtype"  # since 2.15


# fmt: off
def parts(config: Config, shape: MeshShape) -> Iterator[tuple[bool, str, str, str, list[str]]]:
    """Yield each option that needs a private part of torch, and the file that defines this part.

    Yields:
        (True if ``config`` chooses the option; the option as key=value; a key=value that avoids it;
            torch's source file; alternatives). An alternative is a text of words, as some torch
            release needs them. The file must contain all words of at least one alternative.
    """
    parallel = config.parallel
    name = f"parallel.schedule={parallel.schedule}"
    piped = shape.pp > 1
    yield (parallel.expert_wgrad != "autograd", f"parallel.expert_wgrad={parallel.expert_wgrad}",
           "parallel.expert_wgrad=autograd", _SUMS,
           # that can be set: a property that can only be read has neither of the first two
           ["unsharded_accumulated_grad:", "unsharded_accumulated_grad.setter", _LATER])
    yield piped and parallel.schedule not in SINGLE, name, "parallel.schedule=1F1B", _ORDERS, [_ORDERED]
    yield (parallel.overlap_all_to_all, "parallel.overlap_all_to_all=true", "parallel.overlap_all_to_all=false",
           _ORDERS, [_ORDERED])
    yield (piped and runs_halves(parallel.schedule), name, "parallel.schedule=Interleaved1F1B", _SUMS,
           ["to_accumulated_grad_if_needed", _LATER])
    yield (config.lora.base != "weights" and not stays_unsharded(config, shape), f"lora.base={config.lora.base}",
           "lora.base=weights", _SUMS, ["requires_grad=param.requires_grad", _LATER])
    yield piped, f"mesh.pp={shape.pp}", "mesh.pp=1", _ORDERS, ["_wait_batch_p2p _add_unshard_reshard"]
    yield (parallel.context == "ring", "parallel.context=ring", "parallel.context=gather", _RING,
           ["_enable_context_parallel_dispatcher"])
# fmt: on


def missing_part(config: Config, shape: MeshShape, installed: str) -> str:
    """Return an error text for the first chosen option whose private part torch lacks; "" if none.

    Args:
        installed: torch's version, for the text.
    """
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    for chosen, key, remedy, file, forms in parts(config, shape):
        path = folder / file
        text = path.read_text() if chosen and path.is_file() else ""
        if chosen and not any(all(name in text for name in form.split()) for form in forms):
            return f"{key} needs {' or '.join(forms)} in {file}, which torch {installed} lacks. Set {remedy}"
    return ""
