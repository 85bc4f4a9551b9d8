"""Train a step of every MoE class of the installed ``transformers`` on four gloo ranks, and write the table.

    python benchmarks/run.py class_tier                # all classes; writes the JSON and the table of docs/huggingface.md
    python benchmarks/run.py class_tier --only olmoe   # these classes; the others keep their rows
    python benchmarks/run.py class_tier --table        # the table again, from the JSON

Each class gets a small random model, saved by ``transformers``. Three comparisons in float64: loss and every gradient of
the tier on one rank with the class itself, of four ranks (``ep=2``, ``ep_shard=2``) with one, and a document with what stands
before it in its row. Classes with a native family are computed by the tier here, too.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import HERE

from automoe.verify.pool import RankError, RankPool

PAGE = HERE.parent / "docs" / "huggingface.md"
RESULT = HERE / "results" / "class_tier.json"
BEGIN, END = "<!-- classes: written by benchmarks/class_tier.py -->\n", "<!-- end of classes -->\n"
WIDE, EXACT = 1e-6, 1e-10  # bounds for classes that compute a part in float32, and for all others
PATIENCE_S = 120.0
_EXPERTS = re.compile(r"^class \w*Experts\(", re.MULTILINE)


def moe_classes() -> list[str]:
    """Return the ``model_type`` of each folder of transformers with experts, of its text model if it has one."""
    import transformers

    found = []
    for source in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if _EXPERTS.search(source.read_text()):
            here = [name for name in transformers.CONFIG_MAPPING if _folder_of(name) == source.parent.name]
            classes = [
                name for name in here if transformers.CONFIG_MAPPING[name] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            ]
            texts = [name for name in classes if name.endswith("_text")]
            found += (texts or classes or sorted(here, key=len))[:1]
    return found


def _folder_of(model_type: str) -> str:
    import transformers

    return str(transformers.CONFIG_MAPPING[model_type].__module__).split(".")[-2]


def measure(pool: RankPool, model_type: str, folder: Path) -> dict[str, Any]:
    """Return the row of one class: ``one``, ``four`` (worst relative differences), ``apart``; or ``refused``."""
    from tests.support.class_models import compare_with_class

    from automoe.hf.families.registry import FAMILIES

    row: dict[str, Any] = {"tier": "native" if model_type in FAMILIES else "class"}
    try:
        found = pool.run(compare_with_class, 1, model_type, folder)[0]
        if "refused" not in found:
            found |= {"four": compare_ranks(pool, folder)}
        return row | found
    except RankError as error:
        return row | {"failed": f"{error.kind}: {str(error).strip().splitlines()[-1][:200]}"}


def compare_ranks(pool: RankPool, folder: Path) -> float:
    """Return the worst difference of loss, gradients and updates on four ranks from one."""
    from automoe.config.mesh_shape import MeshShape, resolve_mesh
    from automoe.config.schema import MeshConfig
    from automoe.verify.compare import compare_trajectories
    from automoe.verify.run import loader_rows
    from automoe.verify.trajectory import merge_trajectories, run_trajectory
    from tests.support.class_models import run_config

    config = run_config(folder, MeshConfig(dp_shard=4, ep=2, ep_shard=2))
    one = MeshConfig(dp_shard=1, ep_shard=1)
    alone = replace(config, mesh=one, train=replace(config.train, micro_batch_size=8))
    [expected] = pool.run(run_trajectory, 1, alone, MeshShape.of(one), loader_rows, 1)
    ranks = pool.run(run_trajectory, 4, config, resolve_mesh(config.mesh, 4), loader_rows, 1)
    return max(found.error for found in compare_trajectories(merge_trajectories(ranks), expected))


if __name__ == "__main__":
    pool = RankPool(max_ranks=4, timeout_s=PATIENCE_S)
    for name in sys.argv[1:] or moe_classes():
        with tempfile.TemporaryDirectory() as folder:
            print(name, json.dumps(measure(pool, name, Path(folder))), flush=True)
