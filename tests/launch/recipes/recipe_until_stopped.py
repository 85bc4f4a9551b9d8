"""Steps until asked to stop, then says at which step: equal on all ranks or the collective would hang."""

import time


def main(config, shape, context):
    print("stepping", flush=True)
    step = 0
    while not context.any_rank_stops():
        step += 1
        print(step, flush=True)
        time.sleep(0.02)
    context.preempted = True
    (context.run_dir / f"stopped{context.rank}").write_text(str(step))
    return 1.0
