"""Train a step of every MoE class of the installed ``transformers`` on four gloo ranks, and write the table.

    python benchmarks/run.py class_tier                # all classes; writes the JSON and the table of docs/huggingface.md
    python benchmarks/run.py class_tier --only olmoe   # these classes; the others keep their rows
    python benchmarks/run.py class_tier --table        # the table again, from the JSON
    python benchmarks/run.py class_tier --experts      # steps with automoe's grouped products and transformers', in turns
    python benchmarks/run.py class_tier --check        # half a minute: is each class of transformers there, in its tier?

Each class gets a small random model, saved by ``transformers``. What a class computes in float32 is computed in float64
as well, so three comparisons are exact: loss and every gradient of the tier on one rank with the class itself, of four
ranks (``ep=2``, ``ep_shard=2``) with one, and a document with and without another one before it in its row. Classes with
a native family are computed by the tier here, too.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import HERE, commit, cpu_model

from automoe.verify.pool import RankError, RankPool
from automoe.verify.run import AMPLIFIED

PAGE = HERE.parent / "docs" / "huggingface.md"
RESULT = HERE / "results" / "class_tier.json"
EXPERTS = HERE / "results" / "class_experts.json"
BEGIN, END = "<!-- classes: written by benchmarks/class_tier.py -->\n", "<!-- end of classes -->\n"
EXACT = 1e-10
PATIENCE_S = 120.0
COMPARED = ("qwen3_moe", "mixtral")  # whose step is timed in both tiers
TIMED = ("flex_olmo", "dots1", "granitemoe")  # with both expert functions
NOT_CAUSAL = "no causal language model"
_EXPERTS = re.compile(r"^class \w*Experts\(", re.MULTILINE)


def moe_classes() -> dict[str, bool]:
    """Return {model_type: whether it is a causal language model} of each folder of transformers with experts.

    Of a folder with a wrapper and its text model the text model is taken, if it has a class of its own.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, __file__

    folders: dict[str, list[str]] = {}
    for name in CONFIG_MAPPING:
        folders.setdefault(CONFIG_MAPPING[name].__module__.split(".")[-2], []).append(name)
    found = {}
    for source in sorted(Path(__file__).parent.glob("models/*/modeling_*.py")):
        if not _EXPERTS.search(source.read_text()):
            continue
        here = folders[source.parent.name]
        causal = [name for name in here if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING]
        texts = [name for name in causal if name.endswith("_text")]
        causal += [name for name in here if CONFIG_MAPPING[name] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
        found[(texts or causal or here)[0]] = bool(causal)
    return found


def tier_of(model_type: str) -> dict[str, str]:
    """Return ``tier`` of a class, or why it is ``refused``, from a configuration alone, without weights."""
    from transformers import CONFIG_MAPPING

    from automoe.classes.model import TransformersModel
    from automoe.config.schema import MoEConfig
    from automoe.errors import ConfigError
    from automoe.hf.families.registry import FAMILIES, family_of, read_hf_config
    from automoe.hf.wrapper import text_config
    from tests.support.class_models import hf_class_config, tier_config

    with tempfile.TemporaryDirectory() as folder:
        try:
            hf_class_config(model_type).save_pretrained(folder)
        except Exception:  # a class may want other sizes than most; its own are too large for weights alone
            CONFIG_MAPPING[model_type]().save_pretrained(folder)
        text_type = text_config(read_hf_config(folder)).get("model_type")
        try:
            config = tier_config(Path(folder))
            TransformersModel(config, MoEConfig(experts="loop"))
            if len(family_of(config).keys.layouts) == 1:
                return {"refused": "its published tensors are more than slices of its parameters"}
        except ConfigError as error:
            return {"refused": error.rule.partition(" serve: ")[2] or error.rule}
    if text_type in FAMILIES:
        return {"tier": "native"}
    return {"tier": "class" if config.num_moe_layers else "class without ep"}


def outdated(report: dict[str, Any]) -> list[str]:
    """Return the classes of the installed ``transformers`` that the table lacks, has in another tier, or in part."""
    from tests.support.class_models import lacks

    rows = report["classes"]
    found = {name: tier_of(name) if causal else {"refused": NOT_CAUSAL} for name, causal in moe_classes().items()}
    differ = [
        f"{name}: {one}, and the table has {rows.get(name, 'no such class')}"
        for name, one in found.items()
        if not one.items() <= rows.get(name, {}).items()
    ]
    ran = [name for name, one in found.items() if "refused" not in one]
    return differ + [f"{name}: its small model lacks {what}" for name in ran for what in lacks(name)]


def measure(pool: RankPool, model_type: str, folder: Path) -> dict[str, Any]:
    """Return the row of one class: its tier, ``one``, ``four`` (worst relative differences), ``apart``; or ``refused``."""
    from tests.support.class_models import compare_with_class

    row: dict[str, Any] = tier_of(model_type)
    if "refused" in row:
        return row
    try:
        [found] = pool.run(compare_with_class, 1, model_type, folder)
        return row | found | {"four": compare_ranks(pool, folder)}
    except RankError as error:
        return row | {"failed": f"{error.kind}: {str(error).strip().splitlines()[-1][:200]}"}


def compare_ranks(pool: RankPool, folder: Path) -> float:
    """Return the worst difference of loss, gradients and updates of a step on four ranks from one."""
    import torch

    from automoe.config.mesh_shape import MeshShape, resolve_mesh
    from automoe.config.schema import MeshConfig
    from automoe.verify.compare import compare_trajectories
    from automoe.verify.run import loader_rows
    from automoe.verify.trajectory import merge_trajectories
    from tests.support.class_models import run_config, trajectory_in_float64

    config = run_config(folder, MeshConfig(dp_shard=4, ep=2, ep_shard=2))
    if not config.model.num_moe_layers:  # its experts are no stacked parameters of one module
        config.mesh = MeshConfig(dp_shard=4)
    one = MeshConfig(dp_shard=1, ep_shard=1)
    alone = replace(config, mesh=one, train=replace(config.train, micro_batch_size=8))
    [expected] = pool.run(trajectory_in_float64, 1, alone, MeshShape.of(one), loader_rows, 1)
    ranks = pool.run(trajectory_in_float64, 4, config, resolve_mesh(config.mesh, 4), loader_rows, 1)
    compared = compare_trajectories(merge_trajectories(ranks), expected)
    errors = [one.error for one in compared if one.kind not in AMPLIFIED]
    return float(torch.tensor(errors, dtype=torch.float64).max())  # NaN if one is


def table(report: dict[str, Any]) -> str:
    """Return what stands between the markers of the page."""
    rows = report["classes"]
    ran = {name: row for name, row in rows.items() if "one" in row}
    lines = [
        f"{len(ran)} of {len(rows)} folders with experts in transformers {report['transformers']}, by `model_type`; "
        "the worst relative difference of loss and gradients, all in float64, in this tier "
        "also for native families:",
        "",
        "|class|tier|one process|four ranks|documents|",
        "|---|---|---|---|---|",
    ]
    for name, row in ran.items():
        lines.append(
            f"|`{name}`|{row['tier']}|{row['one']:.0e}|{row['four']:.0e}|{'apart' if row['apart'] else 'refused'}|"
        )
    reasons: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "one" not in row:
            reasons.setdefault(row.get("refused") or row["failed"], []).append(f"`{name}`")
    lines += ["", "Refused:", ""]
    lines += [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    ratios = ", ".join(f"{ratio:.2f} of `{name}`" for name, ratio in report["step_over_native"].items())
    lines += ["", f"CPU seconds of a small model's step in this tier over those of the native family: {ratios}."]
    return "\n".join(lines) + "\n"


def page(report: dict[str, Any]) -> str:
    """Return ``docs/huggingface.md`` with the table of ``report``."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table(report) + END + rest.split(END)[1]


def wrong(row: dict[str, Any]) -> bool:
    """Return True if a class failed, or computes other numbers than it should."""
    asked = () if "refused" in row else ("one", "four")
    return "failed" in row or not all(row.get(key, math.inf) <= EXACT for key in asked)


def time_experts() -> int:
    """Write ``class_experts.json``: CPU seconds of a step, with our grouped products and with those of transformers."""
    from tests.support.class_models import experts_seconds

    pool = RankPool(max_ranks=1, timeout_s=PATIENCE_S)
    steps = {}
    for name in TIMED:
        with tempfile.TemporaryDirectory() as folder:
            [(ours, theirs)] = pool.run(experts_seconds, 1, name, Path(folder))
        steps[name] = {"automoe_s": ours, "transformers_s": theirs, "ratio": ours / theirs}
        print(name, steps[name], flush=True)
    pool.close()
    report = {"provenance": provenance(), "steps": steps}
    EXPERTS.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def provenance() -> dict[str, str]:
    """Return what a result was measured with."""
    return {
        "commit": commit("../automoe"),
        "cpu": cpu_model(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def main() -> int:
    """Return 0 if every class is equal or refused by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="CLASS")
    parser.add_argument("--table", action="store_true", help="write the table from the JSON, measure nothing")
    parser.add_argument("--check", action="store_true", help="return 1 if the table lacks a class or has another tier")
    parser.add_argument(
        "--experts", action="store_true", help="time the two expert functions, write class_experts.json"
    )
    args = parser.parse_args()
    if args.experts:
        return time_experts()
    keeps = args.only or args.table or args.check
    report = json.loads(RESULT.read_text()) if RESULT.exists() and keeps else {}
    rows = report.setdefault("classes", {})
    if args.check:
        differ = outdated(report)
        here = f"transformers {version('transformers')}; the table was measured with {report['transformers']}"
        how = "Give a new class its sizes in tests/support/class_models.py, and run class_tier with this release"
        print("\n".join([*differ, f"{len(differ)} differ: {here}.{f' {how}' * bool(differ)}"]))
        return int(bool(differ))
    if not args.table:
        report |= {
            "provenance": {"commit": commit("../automoe"), "cpu": cpu_model()},
            "transformers": version("transformers"),
            "torch": version("torch"),
        }
        from tests.support.class_models import step_ratio

        pool = RankPool(max_ranks=4, timeout_s=PATIENCE_S)
        for name, causal in moe_classes().items():
            if args.only and name not in args.only:
                continue
            with tempfile.TemporaryDirectory() as folder:
                rows[name] = measure(pool, name, Path(folder)) if causal else {"refused": NOT_CAUSAL}
            print(name, json.dumps(rows[name]), flush=True)
        for name in COMPARED:
            with tempfile.TemporaryDirectory() as folder:
                [report.setdefault("step_over_native", {})[name]] = pool.run(step_ratio, 1, name, Path(folder))
        pool.close()
        report["classes"] = dict(sorted(rows.items()))
        RESULT.write_text(json.dumps(report, indent=1) + "\n")
    PAGE.write_text(page(report))
    bad = [name for name, row in report["classes"].items() if wrong(row)]
    print(f"{len(rows) - len(bad)} of {len(rows)} are equal or refused by name; not: {bad or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
