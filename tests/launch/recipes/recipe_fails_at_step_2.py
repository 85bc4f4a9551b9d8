"""Keeps a record of steps and always fails in the same one."""

import json


def main(config, shape, context):
    if context.rank == 0:
        with open(context.run_dir / "metrics.jsonl", "w") as file:
            print(json.dumps({"step": 1}), file=file)
            print(json.dumps({"step": 2}), file=file)
    context.any_rank_stops()
    raise ValueError("the seventh seal is broken")
