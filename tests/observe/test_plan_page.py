"""The page of a plan: everything in one file, nothing of it markup, no other file lost, pictures of what is planned."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_report import Checker

from automoe.config.compose import Arguments
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.plan import main
from automoe.planner.plan import gib, make_plan
from automoe.planner.step_memory import PARTS
from automoe.planner.time import step_spans
from automoe.planner.views.plan_page import write_plan_page
from automoe.planner.views.plan_plots import MEMORY, draw_memory, draw_schedule, draw_time
from automoe.planner.views.plan_view import plan_tables, print_plan
from tests.support.configurations import quick_config

EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}$\\frac{"


def planned(name: str, *overrides: str) -> tuple[Config, MeshShape]:
    config = quick_config(name, list(overrides))
    return config, validate(config, config.launch.num_ranks)


def test_a_page_holds_its_pictures_and_nothing_in_it_becomes_markup(tmp_path: Path) -> None:
    config, mesh = planned("config", "parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2")
    config.cluster.name = config.cluster.gpu = config.data.path = EVIL
    config.cluster.memory_bytes = 10**7
    plan = make_plan(config, mesh)
    path = tmp_path / "plan.html"
    write_plan_page(config, plan, path, Arguments(config_name=EVIL, overrides=[f"run_dir={EVIL}"]))
    raw = path.read_text()
    page = Checker(raw)
    assert len(page.images) == 4 and not page.links  # time and traffic, memory, pipeline, meshes
    assert all(source.startswith("data:image/png;base64,") for source in page.images)
    assert "<script" not in raw and "<img src=x" not in raw and ">49<" not in raw and page.words.count(EVIL) >= 4
    warning, _ = plan.warnings  # the other: such a cluster has no speeds
    assert warning in page.words and "does not fit" in page.words
    for said in (gib(plan.heaviest.peak), f"{plan.time.bubble:.3g}", "Interleaved1F1B, 4 stages"):
        assert said in page.words


@pytest.mark.exhaustive
def test_html_replaces_a_page_and_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    path.write_text("<p>a letter</p>")
    mesh = ["mesh.pp=1", "mesh.ep=4"]
    assert main([f"html={path}", *mesh]) == 2
    said = capsys.readouterr()
    assert "not a page of a plan" in said.err and not said.out and path.read_text() == "<p>a letter</p>"
    path.unlink()
    for twice in range(2):
        assert main([f"html={path}", "--json", *mesh]) == 0, twice
        assert capsys.readouterr().out.startswith("{"), "stdout is the object's"
    assert len(Checker(path.read_text()).images) == 3  # without a pipeline, none is drawn
    for words in (
        ["html="],
        [f"html={tmp_path}"],
        [f"html={tmp_path}/no/plan.html"],
        ["html=x", "search=true", "world=4"],
    ):
        assert main([*words, *mesh]) == 2
        assert "error: html" in capsys.readouterr().err


def test_pictures_show_what_the_plan_says() -> None:
    assert sorted(field for _, fields, _ in MEMORY for field in fields) == sorted(PARTS), "each byte in one colour"
    config, mesh = planned("gpt_oss_20b", "mesh.pp=2", "mesh.ep=4")
    plan = make_plan(config, mesh)
    (axis,) = draw_memory(config, plan).axes
    ends = sorted(bar.get_x() + bar.get_width() for bar in axis.patches)
    assert ends[-1] == pytest.approx(plan.uneven_needed / 2**30) and plan.uneven_needed > plan.uneven_peak
    assert axis.lines[0].get_xdata()[0] == pytest.approx(config.cluster.memory_bytes / 2**30)
    parts, sent = draw_time(plan).axes
    assert sum(bar.get_width() for bar in parts.patches) == pytest.approx(plan.time.seconds)
    assert sum(plan.time.parts.values()) == pytest.approx(plan.time.seconds)
    all_bytes = sum(plan.time.traffic.values()) + sum(plan.time.off_node.values())
    assert sum(bar.get_width() for bar in sent.patches) * 2**30 == pytest.approx(all_bytes)


@pytest.mark.parametrize("schedule, stages", [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
def test_spans_are_the_step(schedule: str, stages: int) -> None:
    words = [f"parallel.schedule={schedule}", f"parallel.stages_per_rank={stages}", "train.global_batch_size=64"]
    config, mesh = planned("config", *words)
    spans, again = step_spans(config, mesh)
    plan = make_plan(config, mesh)
    assert len(spans) == 2 * 2 * stages * plan.batch.num_micro_batches and again == [0.0] * 2 * stages
    busiest = 0.0
    for rank in range(2):
        mine = [span for span in spans if span.rank == rank]
        assert all(one.end <= other.start for one, other in zip(mine, mine[1:], strict=False)), "one thing at a time"
        busiest = max(busiest, sum(span.end - span.start for span in mine))
    waits = max(span.end for span in spans) - busiest
    assert waits == pytest.approx(plan.time.bubble + plan.time.communication["pp"], rel=0.05)
    full, _ = planned("config", *words, "parallel.recompute=full")
    longer, again = step_spans(full, mesh)
    assert all(0.2 < share < 0.5 for share in again) and longer[-1].end > spans[-1].end


def test_a_long_schedule_is_drawn_at_both_ends_and_a_short_one_whole() -> None:
    config, mesh = planned("config")
    figure, said = draw_schedule(config, make_plan(config, mesh))
    assert len(figure.axes) == 1 and said.startswith("The whole step")
    config, mesh = planned("config", "train.global_batch_size=512")
    figure, said = draw_schedule(config, make_plan(config, mesh))
    (_, first), (last, end) = (axis.get_xlim() for axis in figure.axes)
    assert f"{last - first:.3g} s between them are left out" in said and 0 < first < last < end


def test_the_terminal_shows_the_heaviest_rank_and_remedies_as_they_are_typed() -> None:
    config, mesh = planned("gpt_oss_120b", "parallel.recompute=[layernorm]")
    console = Console(file=io.StringIO(), width=200)
    print_plan(config, mesh, console)
    assert "parallel.recompute=[layernorm,moe]" in console.file.getvalue()  # type: ignore[attr-defined]
    narrow = Console(file=io.StringIO(), width=80)
    print_plan(config, mesh, narrow)
    assert "…" not in (text := narrow.file.getvalue()), "three stages a rank: layers and micro-batches wrap"  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    config, mesh = planned("dsv3_671b")
    for heaviest in (2, 6, 15):
        plan = make_plan(config, mesh)
        ranks = [replace(rank, moments=10**13 if rank.pp_rank == heaviest else 1) for rank in plan.ranks]
        table = next(one for one in plan_tables(config, replace(plan, ranks=ranks)) if one.title == "pipeline ranks")
        shown = [*table.columns[0].cells]
        assert len(shown) <= 8 and {"0", str(heaviest), "15"} <= set(shown)
