"""Which options need which private parts of torch, looked up in torch's files without importing it.

``torch_private`` and ``torch_pipelining`` use these parts and say what for.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from automoe.config.mesh_shape import MeshShape
from automoe.config.pipeline import SINGLE, runs_halves
from automoe.config.schema import Config

_SUMS = "distributed/fsdp/_fully_shard/_fsdp_param.py"
_ORDERS = "distributed/pipelining/schedules.py"
_STAGES = "distributed/pipelining/stage.py"
_RUN = "_PipelineScheduleRuntime"
_ORDERED = (f"{_RUN}._prepare_schedule_with_comms", f"{_RUN}.register_custom_function", "_Action")

# (is chosen, key=value, remedy, file, forms); a form is what one release has, and ``=`` follows an
# attribute that is set
Part = tuple[bool, str, str, str, tuple[tuple[str, ...], ...]]


# fmt: off
def parts(config: Config, shape: MeshShape) -> Iterator[Part]:
    """Yield the private parts of each option that needs some beyond those of every run."""
    parallel = config.parallel
    wgrad = parallel.expert_wgrad
    schedule = parallel.schedule
    piped = shape.pp > 1
    merged = parallel.overlap_all_to_all
    yield (wgrad != "autograd", f"parallel.expert_wgrad={wgrad}", "parallel.expert_wgrad=autograd", _SUMS,
           (("FSDPParam.unsharded_accumulated_grad=",), ("FSDPParam.unsharded_grad_dtype",)))
    for chosen, key, remedy in (
        (piped and schedule not in SINGLE, f"parallel.schedule={schedule}", "parallel.schedule=1F1B"),
        (merged, "parallel.overlap_all_to_all=true", "parallel.overlap_all_to_all=false")):
        yield chosen, key, remedy, _ORDERS, (_ORDERED,)
    yield (piped and runs_halves(schedule), f"parallel.schedule={schedule}", "parallel.schedule=Interleaved1F1B", _SUMS,
           (("FSDPParam.to_accumulated_grad_if_needed", "FSDPParam.accumulate_unsharded_grad_if_needed"),
            ("FSDPParam.unsharded_grad_dtype",)))
    yield piped, f"mesh.pp={shape.pp}", "mesh.pp=1", _ORDERS, (("_wait_batch_p2p", "_add_unshard_reshard"),)
    yield (piped, f"mesh.pp={shape.pp}", "mesh.pp=1", _STAGES,
           (("PipelineStage._prepare_forward_infra", "PipelineStage._prepare_backward_infra"),))
    yield (parallel.context == "ring" and shape.cp > 1, "parallel.context=ring", "parallel.context=gather",
           "distributed/tensor/experimental/_attention.py", (("_enable_context_parallel_dispatcher",),))
# fmt: on


def missing_part(config: Config, shape: MeshShape, installed: str) -> str:
    """Return which option needs a part that torch ``installed`` lacks; an empty string if none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    for chosen, key, remedy, file, forms in parts(config, shape):
        if not chosen:
            continue
        path = Path(spec.origin).parent / file
        tree = ast.parse(path.read_text() if path.is_file() else "")
        if not any(all(_has(tree, name) for name in form) for form in forms):
            names = " or ".join(" and ".join(form).replace("=", " (set)") for form in forms)
            return f"{key} needs {names} of torch, and torch {installed} has none in {file}. Set {remedy}"
    return ""


def _has(tree: ast.Module, dotted: str) -> bool:
    """Return True if a file defines the name ``NAME`` or ``CLASS.NAME``; with ``=``, one to set."""
    name = dotted.rstrip("=")
    body = tree.body
    for part in name.split("."):
        found = [node for node in body if part in _names(node)]
        body = getattr(found[-1], "body", []) if found else []
    property_alone = len(found) == 1 and isinstance(found[0], ast.FunctionDef)
    return bool(found) and not (dotted.endswith("=") and property_alone)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [getattr(node, "name", "")]
