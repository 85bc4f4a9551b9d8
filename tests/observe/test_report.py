from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from synthetic_run import small_config, write_run

import automoe.observe.plots
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.observe.mesh_view import draw_mesh
from automoe.observe.plot_style import save
from automoe.observe.report import build_report, write_report
from tests.support.configurations import quick_config

ERROR = {
    "rank": 2,
    "type": "DataError",
    "message": "corpus.jsonl line 17: not JSON: <Expecting value>",
    "for_user": True,
    "traceback": ["loader.py:10 in read: json.loads(line)"],
}
VOID = {"meta", "img", "br"}


class Checker(HTMLParser):
    """Collects text and image sources, and insists that every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                (self.images if tag == "img" else self.links).append(value)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.words += data


def page_of(run_dir: Path) -> Checker:
    path = build_report(run_dir)
    assert path == run_dir / "report.html"
    return Checker(path.read_text())


def assert_a_picture(
    path: Path, *, width: tuple[int, int] = (500, 2400), height: tuple[int, int] = (200, 2000)
) -> None:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
        assert width[0] <= image.width <= width[1] and height[0] <= image.height <= height[1], (path.name, image.size)
    assert (pixels < 128).mean() > 0.0005, f"{path.name} shows nothing"
    border = np.concatenate([pixels[:3].ravel(), pixels[-3:].ravel(), pixels[:, :3].ravel(), pixels[:, -3:].ravel()])
    assert border.min() > 250, f"{path.name}: something is cut off at the edge"


def test_a_finished_run(tmp_path):
    write_run(tmp_path, steps=200, status={"state": "done"})
    page = page_of(tmp_path)
    names = {path.stem for path in (tmp_path / "plots").glob("*.png")}
    assert names == {
        "loss",
        "throughput",
        "grad_norm",
        "learning_rate",
        "balance_loss",
        "expert_load",
        "expert_balance",
        "mesh",
    }
    for path in (tmp_path / "plots").glob("*.png"):
        assert_a_picture(path)
    assert len(page.images) == len(names)
    assert all(source.startswith("data:image/png;base64,") for source in page.images)
    assert not page.links  # nothing outside the file
    for words in ("done", "step 200 of 200", "validation bits per byte", "torch", "pp2 x dp_shard2 = 4 ranks", "819k"):
        assert words in page.words


@pytest.mark.exhaustive
def test_a_dense_model_has_no_expert_load(tmp_path):
    config = small_config(tmp_path)
    config.model.first_k_dense = config.model.num_layers
    write_run(tmp_path, steps=30, config=config, num_layers=0, status={"state": "done"})
    page = page_of(tmp_path)
    assert {path.stem for path in (tmp_path / "plots").glob("*.png")} == {
        "loss",
        "throughput",
        "grad_norm",
        "learning_rate",
        "balance_loss",
        "mesh",
    }
    assert f"{config.model.num_layers} dense layers" in page.words
    for words in ("MoE layer", "busiest / mean expert", "experts "):
        assert words not in page.words


def test_a_run_that_died_before_its_first_step(tmp_path):
    write_run(tmp_path, steps=0, status={"state": "failed", "error": ERROR})
    page = page_of(tmp_path)
    assert "First error on rank 2" in page.words
    assert "DataError: corpus.jsonl line 17: not JSON: <Expecting value>" in page.words
    assert "loader.py:10" in page.words
    assert "No step finished" in page.words
    assert len(page.images) == 1  # the meshes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", [1, 2, 3], ids=str)
def test_a_run_that_died_early(tmp_path, steps):
    write_run(tmp_path, steps=steps, status={"state": "failed", "error": ERROR})
    page_of(tmp_path)
    for path in (tmp_path / "plots").glob("*.png"):
        assert_a_picture(path)


@pytest.mark.exhaustive
def test_a_run_that_diverged(tmp_path):
    write_run(
        tmp_path, steps=80, nan_steps=tuple(range(61, 81)), status={"state": "failed", "error": "loss is not finite"}
    )
    page = page_of(tmp_path)
    assert "nan" in page.words and "loss is not finite" in page.words
    assert_a_picture(tmp_path / "plots" / "loss.png")


@pytest.mark.faults
def test_a_run_whose_every_loss_is_nan(tmp_path):
    write_run(tmp_path, steps=4, nan_steps=(1, 2, 3, 4))
    page_of(tmp_path)
    assert_a_picture(tmp_path / "plots" / "loss.png")


@pytest.mark.exhaustive
def test_many_layers_and_experts(tmp_path):
    write_run(tmp_path, steps=12, num_layers=58, num_experts=256)
    page_of(tmp_path)
    assert_a_picture(tmp_path / "plots" / "expert_load.png")
    assert_a_picture(tmp_path / "plots" / "expert_balance.png")


def test_an_empty_directory_and_half_written_files(tmp_path):
    page = page_of(tmp_path)
    assert "no config.yaml" in page.words and "state unknown" in page.words
    (tmp_path / "status.json").write_text('{"state": "runn')
    (tmp_path / "config.yaml").write_text("no_such_key: 1\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    page = page_of(tmp_path)
    assert "no_such_key" in page.words and "step 1" in page.words


@pytest.mark.exhaustive
def test_mfu_is_shown_where_the_peak_is_known(tmp_path):
    write_run(tmp_path, steps=5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(re.sub('"mfu": null', '"mfu": 0.415', re.sub(', "crc32": [0-9]+', "", path.read_text())))
    assert "41.5%" in page_of(tmp_path).words


def test_the_heat_map_is_brightest_where_the_load_is(tmp_path):
    """Expert 5 of layer 1 alone gets its layer's tokens: its cell, and no other, has the darkest orange."""
    from automoe.observe.plots import draw_plots, relative_load

    counts = np.ones((1, 2, 8))
    counts[0, 1] = [0, 0, 0, 0, 0, 80, 0, 0]
    assert relative_load(counts)[0, 1, 5] == 8.0
    records = [{"step": 1, "loss": 1.0}]
    draw_plots(records, (np.array([1]), counts), tmp_path)
    with Image.open(tmp_path / "expert_load.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    plot = pixels[:, : int(0.75 * pixels.shape[1])]  # without the colour bar
    orange = np.argwhere(np.abs(plot - np.array([0xDD, 0x7A, 0x3C])).sum(axis=2) < 12)
    centre = orange.mean(axis=0) / np.array(plot.shape[:2])
    assert 0.5 < centre[0] < 0.8 and 0.5 < centre[1] < 0.9
    assert (orange.max(axis=0) - orange.min(axis=0))[1] < 0.15 * plot.shape[1]


def test_plots_of_pairs_number_the_layers_that_have_experts_and_leave_zero_experts_out(tmp_path, monkeypatch):
    """The second of a pair has none; the busiest of all is an identity, whose load is no load."""
    from automoe.observe import plots

    config = quick_config(overrides=["model=small_longcat", "model.num_layers=6"])
    counts = np.ones((2, 3, 24))
    counts[:, 1, 20], counts[:, 2, 3] = 1000, 5
    records = [{"step": step, "loss": 1.0, "expert_max_load": 1.0} for step in (1, 2)]
    figures = {}
    monkeypatch.setattr(plots, "save", lambda figure, path, **_: figures.setdefault(path.stem, figure))
    plots.draw_plots(records, (np.array([1, 2]), counts), tmp_path, config)
    image = figures["expert_load"].axes[0].images[0]
    assert image.get_extent() == [-0.5, 23.5, 5.0, -1.0], "the middles of three rows are 0, 2 and 4"
    axis, bar = figures["expert_balance"].axes
    assert bar.get_ylim() == (-1.0, 5.0)
    loads = [line.get_ydata()[0] for line in axis.lines if len(line.get_ydata()) == 2 and line.get_marker() != "None"]
    assert max(loads) == pytest.approx(5 * 16 / 20)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "axes, ranks",
    [
        ({}, 1),
        ({"pp": 2, "ep": 2}, 4),
        ({"pp": 4}, 4),
        ({"ep": 3}, 6),
        ({"pp": 2, "dp_shard": 2, "cp": 2, "ep": 4}, 8),
        ({"pp": 8, "ep": 4}, 32),
        ({"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 2}, 64),
        ({"ep": 7}, 49),
        ({"pp": 64}, 64),
        ({"pp": 16, "ep": 64}, 1024),
        ({"pp": 8, "dp_replicate": 4, "tp": 2, "ep": 16}, 1024),
    ],
)
def test_mesh_pictures(tmp_path, axes, ranks):
    path = save(draw_mesh(resolve_mesh(MeshConfig(**axes), ranks)), tmp_path / "mesh.png", crop=True)
    assert_a_picture(path, height=(200, 3000))


def test_write_report_says_what_went_wrong_and_returns(tmp_path, capsys):
    assert write_report(tmp_path / "missing") is None
    assert "no such run directory" in capsys.readouterr().err
    write_run(tmp_path, steps=2)
    (tmp_path / "plots").write_text("a file where a directory must go")
    assert write_report(tmp_path) is None
    assert "no report" in capsys.readouterr().err


def test_the_command_needs_no_torch(tmp_path):
    write_run(tmp_path, steps=2, config=small_config(tmp_path))
    code = (
        "import sys; from automoe.observe.report import main; code = main([sys.argv[1]]);"
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "report.html"), "False"]
    module = [sys.executable, "-m", "automoe.observe.report", str(tmp_path / "missing")]
    done = subprocess.run(module, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "no such run directory" in done.stderr and "Traceback" not in done.stderr


def test_the_environment_is_recorded_when_the_run_starts(tmp_path):
    write_run(tmp_path, steps=0)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["torch"][0].isdigit()


def test_one_validation_does_not_push_the_training_out_of_the_picture() -> None:
    records = [{"step": step, "loss": 5.0 - step / 40} for step in range(1, 41)]
    records[-1] |= {"val_loss": 4.1, "val_bits_per_byte": 3.7}
    loss, bits = automoe.observe.plots._loss(records).axes
    assert loss.get_xlim()[0] < 1.5 and loss.get_xlim()[1] > 40
    assert bits.get_xlim()[0] < 40 < bits.get_xlim()[1] and [tick for tick in bits.get_xticks() if tick == 40]


@pytest.mark.exhaustive
def test_nothing_that_is_shown_can_become_a_part_of_the_page(tmp_path):
    """Names, values and messages that a folder from elsewhere may hold."""
    evil = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}$\\frac{"
    run_dir = tmp_path / evil.replace("/", "-")
    config = small_config(run_dir)
    config.data.kind, config.data.path, config.data.tokenizer, config.cluster.name = "text", evil, evil, evil
    status = {"state": evil, "error": ERROR | {"type": evil, "message": evil, "traceback": [evil]}}
    write_run(run_dir, steps=3, config=config, status=status)
    (run_dir / "environment.json").write_text(json.dumps({evil: evil}))
    samples = [{"prompt": evil, "text": evil}]
    (run_dir / "samples.jsonl").write_text(json.dumps({"step": 2, "samples": samples}) + "\n")
    page = page_of(run_dir)
    assert page.words.count(evil) >= 8  # as text: state twice or more, error, data, environment, configuration, sample
    assert evil.replace("/", "-") in page.words
    assert all(source.startswith("data:image/png;base64,") for source in page.images) and not page.links
    raw = (run_dir / "report.html").read_text()
    assert "<script" not in raw and "<img src=x" not in raw and ">49<" not in raw
    (run_dir / "config.yaml").write_text(f"run_dir: 1\n{json.dumps(evil)}: 2\n")
    assert evil in page_of(run_dir).words and "<script" not in (run_dir / "report.html").read_text()
