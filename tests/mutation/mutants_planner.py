"""Mistakes in the planner's figures; see ``mutants.py``."""

from __future__ import annotations

from mutant import Mutant

TIME, SCHEDULE_T = ["tests/planner/test_time.py"], ["tests/planner/test_cost_schedule.py"]
MEMORY = ["tests/planner/test_measured_memory.py"]

_ROWS = [
    ("communication.py", "whole * group.off_node / per_node", "whole * group.off_node", SCHEDULE_T),
    ("communication.py", "return 1 - 1 / self.nodes", "return 1 - 1 / self.size", SCHEDULE_T),
    ("communication.py", "max(parts) if together", "min(parts) if together", TIME),
    ("schedule.py", "a_round = end - start if overlap else", "a_round = end - start if not overlap else", SCHEDULE_T),
    ("layer_time.py", "ATTENTION_BACKWARD * seconds", "2 * seconds", TIME),
    ("layer_time.py", 'forward.again["moe"][axis] if axis in ("ep", "etp") else cost', "cost", TIME),
    ("layer_time.py", "seconds * weight.trained", "seconds", TIME),
    ("layer_time.py", "mesh.etp) * (not place.fused_experts)", "mesh.etp)", TIME),
    ("layer_time.py", "own += left * machine", "own += 0.0 * machine", ["tests/planner/test_plan.py"]),
    ("time.py", "max(0.0, cost.seconds - behind)", "cost.seconds", TIME),
    (
        "time.py",
        "once += seen(reduced + replicas, backward) if once_gradients",
        "once += NOTHING if once_gradients",
        TIME,
    ),
    ("step_memory.py", "merged.grown(place + 1)", "merged.grown(place)", MEMORY),
    ("workspace.py", 'load.wgrad == "autograd"', 'load.wgrad != "fused"', ["tests/planner/test_memory.py"]),
    ("workspace.py", "(2 + waits) * width", "2 * width", ["tests/planner/test_memory.py"]),
    ("machine.py", "self.constants.grouped if groups > 1 else 1.0", "1.0", TIME),
]
PLANNER = [Mutant(f"automoe/planner/{file}", *rest) for file, *rest in _ROWS]
