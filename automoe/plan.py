"""``python -m automoe.plan``: print a configuration's memory and speed estimates, without a GPU.

python -m automoe.plan --config-name dsv3_671b
python -m automoe.plan --config-name qwen3_30b_a3b mesh.ep=8 cluster=h200 --json
python -m automoe.plan --config-name qwen3_30b_a3b export=torchtitan
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from automoe.config.paths import user_path
from automoe.errors import ConfigError, exit_status

if TYPE_CHECKING:
    from automoe.config.schema import Config
    from automoe.planner.plan import Plan

EXIT_DIFFERENT = 1  # --build found other sizes than the plan predicts

USAGE = """usage: automoe plan [--config-name NAME] [--json] [--build] [key=value ...]

Prints both mesh views, parameters, bytes per rank, tokens and micro-batches per
step, and what will not fit. Needs no GPU and starts no rank.

  search=true world=N  rank all meshes of N GPUs by predicted tokens/s, write
                       the fastest as a preset, into plans/ or out=FOLDER.
                       What is typed beside it stays fixed: mesh.tp=2,
                       train.micro_batch_size=1, parallel.recompute=full
  search=fewest_gpus   the fewest GPUs, in powers of two, that it fits on
  search=longest_context world=N
                       the longest rows, in doublings, that fit
  search=largest_batch world=N
                       the largest micro-batch, in doublings, that fits
  calibrate=true       measure this machine in half a minute, and write what it
                       reaches as a cluster, into plans/ or out=FOLDER
  export=torchtitan    write the run as a configuration module of torchtitan's
                       trainer, into plans/ or out=FILE.py or FOLDER
  --config-name NAME   a primary configuration (default: config)
  --config-dir DIR     look for configurations here too
  html=FILE            also write a page with pictures: memory against what the
                       GPU has, the pipeline's schedule, time, traffic, meshes
  --json               one JSON object instead of tables
  --build              also build the heaviest rank's model for real, without
                       storage and without the other ranks, and compare its
                       shards with the plan (imports torch: seconds)
  --help               this text

Overrides are those of automoe train: mesh.pp=8, model=mixtral_8x22b,
cluster=h200, ...
"""


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Plan a configuration, or search for a mesh, as the arguments of ``automoe plan`` say.

    ``argv`` None: this process's arguments. Returns the exit status: 1 if a search found no mesh
    that fits, or ``--build`` measured other sizes than planned; 2 if an argument or the
    configuration is invalid; else 0.
    """
    argv = sys.argv[1:] if argv is None else argv
    as_json = "--json" in argv
    build = "--build" in argv
    argv = [word for word in argv if word not in ("--json", "--build")]
    # Hydra takes half a second to import; --help without it takes a tenth.
    from automoe.config.compose import parse_arguments
    from automoe.planner.search_command import answer, question_of, take_own

    search_words, argv = take_own(argv)
    page = user_path("html", search_words["html"]) if "html" in search_words else None
    args = parse_arguments(argv, ["--json", "--build"])
    if args.help:
        print(USAGE, end="")
        return 0
    question = question_of(search_words, args.config_dir)
    if question is not None:
        if page:
            raise ConfigError(
                "html",
                str(page),
                "a search has no page",
                "Plan the mesh that it finds: mesh=found_...",
            )
        return answer(question, args, as_json)
    from automoe.launch.prepare import prepare
    from automoe.planner.plan import make_plan
    from automoe.planner.torchtitan_config import write_titan
    from automoe.planner.views.plan_page import check_page, write_plan_page
    from automoe.planner.views.plan_view import print_plan

    config, mesh, _ = prepare(args)
    if page:
        check_page(page)
    plan = make_plan(config, mesh) if as_json else print_plan(config, mesh)
    if page:
        write_plan_page(config, plan, page, args)
        print(f"page    {page}", file=sys.stderr if as_json else sys.stdout)
    built = build_heaviest(config, plan) if build else None
    written = None
    if "export" in search_words:
        written, command = write_titan(config, mesh, args.config_name, search_words.get("out", ""))
    if as_json:
        facts = plan.to_dict()
        if written:
            facts["exported"] = str(written)
        if built:
            facts["built"] = asdict(built)
        print(json.dumps(facts, indent=2))
    else:
        if built:
            verdict = (
                "as planned" if built.as_planned else f"but the plan says {plan.heaviest.weights:,}"
            )
            print(
                f"built   rank {built.rank} of {mesh.world_size:,}: {built.num_params} sharded parameters, "
                f"{built.bytes:,} bytes, {verdict}"
            )
        if written:
            print(
                f"written {written}, with what torchtitan cannot express at its top\ntake it {command}"
            )
    return EXIT_DIFFERENT if built and not built.as_planned else 0


@dataclass(frozen=True)
class BuiltRank:
    """Size of one rank's weights, measured on its sharded model (DTensors on the meta device).

    Attributes:
        rank: global rank.
        num_params: number of the rank's parameter tensors (shards), not of their elements.
        bytes: size of these shards.
        as_planned: True if ``bytes`` equals the plan's prediction.
    """

    rank: int
    num_params: int
    bytes: int
    as_planned: bool


def build_heaviest(config: Config, plan: Plan) -> BuiltRank:
    """Build the model of the rank with the most memory; return number and bytes of its weight shards.

    The model is on the meta device, sharded in a fake process group. The result also says whether
    the plan predicted these bytes.

    Args:
        plan: the plan of ``config``, which has the memory of every rank.
    """
    from automoe.verify.fake_world import local_shards

    rank = plan.mesh.groups("default", "pp")[0][plan.heaviest.pp_rank]
    shards = local_shards(config, plan.mesh, rank)
    num_bytes = sum(size for _, size in shards.values())
    return BuiltRank(rank, len(shards), num_bytes, num_bytes == plan.heaviest.weights)


if __name__ == "__main__":
    sys.exit(main())
