from __future__ import annotations

import pytest
from launch_command import TORCHRUN, Command
from test_external_launch import AGENT, SRUN

from automoe.errors import LaunchError
from automoe.launch.external import check_gpus, detect_external
from automoe.launch.ranks import device_index

ON_CPU = ("mesh=fsdp", "launch.device=cpu", "observe.report=true")


@pytest.mark.faults
@pytest.mark.parametrize(
    "recipe", ["recipe_raises_unheard", pytest.param("recipe_raises", marks=pytest.mark.exhaustive)]
)
def test_rank_0_writes_the_report_when_another_rank_fails(command: Command, recipe: str) -> None:
    code, _, _ = command.run(recipe, *ON_CPU, before=TORCHRUN)
    assert code != 0
    assert "the seventh seal is broken" in (command.run_dir / "report.html").read_text()
    assert command.pids() == []


def test_every_rank_needs_a_gpu_of_the_node_or_one_that_srun_gave_it() -> None:
    task = detect_external(SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    agent = detect_external(AGENT)
    assert task is not None and agent is not None
    assert (task.local_world_size, agent.local_world_size) == (2, 2)
    check_gpus(task, 2)
    check_gpus(task, 1)  # --gpus-per-task=1
    check_gpus(agent, 2)
    with pytest.raises(LaunchError, match="torchrun started WORLD_SIZE=4 ranks, 2 of them .* which has 1 GPUs"):
        check_gpus(agent, 1)
    with pytest.raises(LaunchError, match="which has 0 GPUs. Start one rank per GPU"):
        check_gpus(task, 0)


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(1, 1, 0), (1, 2, 1), (7, 8, 7), (0, 1, 0)])
def test_a_task_with_a_gpu_of_its_own_calls_it_device_0(local_rank: int, visible: int, index: int) -> None:
    assert device_index(local_rank, visible) == index
