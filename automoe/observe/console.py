"""Terminal output of a run on rank 0: a banner, a line for each logged step, and a summary."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.observe.metrics import read_metrics
from automoe.observe.summary import (
    MAX_GRID_RANKS,
    Facts,
    bytes_text,
    describe_run,
    duration,
    fact_lines,
    final_numbers,
    from_here,
    losses_by_source,
    number,
    perplexity_text,
    render_mesh_text,
    short_number,
)

HEADER_EVERY = 20  # lines between two headers, so that one is always in sight
# With observe.log_every=0 a step prints if the last line is a 30th of the run's expected duration
# old, or 30 s. A run of at most that many steps prints each.
LINES = 30
MAX_SILENCE_S = 30.0
# Widths of the columns loss, grad norm, lr, tokens/s, memory, load (of the busiest expert over the
# mean), time and left. The first column, the step, grows with the number of steps.
WIDTHS = (9, 10, 9, 9, 9, 7, 8, 9)
# With a preference loss, two columns show the margin of the preferred answer and the share of pairs
# in which it wins, instead of memory and load.
REWARDS = {4: ("margin", "rewards/margins"), 5: ("right", "rewards/accuracies")}
REWARDS |= {-4: ("reward", "reward"), -3: ("tokens", "answer_tokens")}


class Console:
    """Terminal output of a run; methods print nothing on ranks other than 0 (``enabled`` False).

    Step lines have 80 columns in runs of up to 9,999 steps. Output moves no cursor, so a log file
    reads like the terminal. Colours appear only in a terminal.

    Args:
        config, mesh: configuration and mesh shape of the run.
        enabled: whether this process prints.
        file: output file; default: standard output.
    """

    def __init__(
        self, config: Config, mesh: MeshShape, *, enabled: bool = True, file: IO[str] | None = None
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.enabled = enabled
        self._lines = 0
        self._last: tuple[int, float] | None = None  # step and clock of the previous record
        self._pace: float | None = None  # smoothed seconds per step
        self._first = (0, 0.0)  # step and clock of the first record
        self._printed = -math.inf  # clock of the last step line
        self._step_width = max(10, 2 * len(str(config.train.steps)) + 2)
        if enabled:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=file or sys.stdout, highlight=False, soft_wrap=True)

    def start(self, *, resume_step: int = 0) -> None:
        """Print the banner: the run's model, meshes, batch, data and run directory.

        Args:
            resume_step: step of the checkpoint that the run continues from; 0: a new run.
        """
        if not self.enabled:
            return
        facts = describe_run(self.config, self.mesh)
        if resume_step:
            facts.append(("resumed", f"after step {resume_step}"))
        facts.append(("run directory", from_here(str(self.config.run_dir))))
        self._print("automoe", "bold")
        self._print_facts(facts)
        if 1 < self.mesh.world_size <= MAX_GRID_RANKS:
            self._print()
            self._print(render_mesh_text(self.mesh, groups=False).rstrip(), "dim")
        self._print()

    def step(self, record: Mapping[str, Any]) -> None:
        """Print a line with a step's metrics, and a second line if the step had a validation.

        A step is printed every ``observe.log_every`` steps. If that is 0, each is printed if at most
        30 were to go when this process started; else one as soon as 30 s, or a 30th of the expected
        time if that is less, have passed since the last printed step. Always printed are the first
        and the last step, and steps with a validation or a loss or gradient norm that is not finite.

        Args:
            record: the step's record, as in ``metrics.jsonl``.
        """
        if not self.enabled:
            return
        step = record["step"]
        steps = self.config.train.steps
        now = time.monotonic()
        left = self._time_left(record, now)
        finite = math.isfinite(float(record["loss"])) and math.isfinite(float(record["grad_norm"]))
        validates = record.get("val_loss") is not None
        every = self.config.observe.log_every
        first, since = self._first
        due = (
            step % every == 0
            if every
            else (
                steps - first < LINES
                or now - self._printed >= min(MAX_SILENCE_S, (now - since + left) / LINES)
            )
        )
        if not (self._lines == 0 or step == steps or validates or not finite or due):
            return
        self._printed = now
        mfu = record["mfu"]
        load = record["expert_max_load"]  # 0 for a dense model
        cells = [
            ("loss", loss_text(record["loss"])),
            ("grad norm", f"{float(record['grad_norm']):.3g}"),
            ("lr", f"{record['lr']:.2e}"),
            ("tokens/s", short_number(record["tokens_per_second"])),
            ("memory", bytes_text(record["peak_memory_bytes"])),
            ("load", f"{number(load, 2)}x" if load else "-"),
            ("time", seconds_text(record.get("step_seconds"))),
            ("left", duration(left) if step < steps else "-"),
        ]
        if mfu is not None:  # tokens/s implies the time, so MFU replaces it.
            cells[6] = "MFU", f"{100 * mfu:.1f}%"
        for place, (heading, key) in REWARDS.items():
            if key in record:
                cells[place] = heading, f"{float(record[key]):.3g}"
        if self._lines % HEADER_EVERY == 0:
            self._row("step", [heading for heading, _ in cells], "dim")
        self._lines += 1
        self._row(f"{step}/{steps}", [text for _, text in cells], None if finite else "bold red")
        if validates:
            text = f"{'validation':>{self._step_width}}{loss_text(record['val_loss']):>{WIDTHS[0]}}"
            if (bits := record.get("val_bits_per_byte")) is not None:
                text += f"   {float(bits):.3f} bits per byte"
            if "val_perplexity" in record:
                text += f"   perplexity {perplexity_text(record['val_loss'])}"
            for heading, key in REWARDS.values():
                if f"val_{key}" in record:
                    text += f"   {heading} {float(record[f'val_{key}']):.3g}"
            if (averaged := record.get("val_loss_ema")) is not None:
                text += f"   EMA {loss_text(averaged)}"
            self._print(text, "bold green")
            for name, loss in losses_by_source(record):
                numbers = f"{loss_text(loss):>{WIDTHS[0]}}"
                if "val_perplexity" in record:
                    numbers += f"   perplexity {perplexity_text(loss)}"
                self._print(f"{'':>{self._step_width}}{numbers}   {name}", "green")

    def note(self, text: str) -> None:
        """Print a line between step lines, for example about a saved checkpoint or a skipped step."""
        self._print(f"{'':>{self._step_width}}  {from_here(text)}", "cyan")

    def row(self, lines: Iterable[tuple[str, bool]]) -> None:
        """Print the text of a row of training data; lines of trained tokens are green.

        Args:
            lines: (text, whether its tokens are trained) per line.
        """
        for text, trained in lines:
            self._print(text, "green" if trained else "dim")
        self._print()

    def samples(self, samples: Sequence[Mapping[str, str]], seconds: float) -> None:
        """Print each sample's ``prompt`` and the model's ``text``, a line of up to 80 columns each, then the time.

        Args:
            seconds: time that generating the samples took.
        """
        for sample in samples:
            for text, style in ((f"> {sample['prompt']}", "dim"), (f"  {sample['text']}", "green")):
                shown = "".join(
                    char if char.isprintable() else " " for char in text.replace("\n", "⏎")
                )
                self._print(f"{'':>{self._step_width}}  {shown}"[:80].rstrip(), style)
        self.note(f"answered in {seconds_text(seconds)}")

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    def finish(self, paths: Mapping[str, str | Path] | None = None) -> None:
        """Print the closing summary of the run, and where its results are.

        Args:
            paths: name -> path of each result, to print after the summary.
        """
        if not self.enabled:
            return
        facts = [
            *final_numbers(read_metrics(self.config.run_dir)),
            *((name, from_here(str(path))) for name, path in (paths or {}).items()),
        ]
        self._print()
        self._print_facts(facts)

    def _row(self, first: str, cells: list[str], style: str | None) -> None:
        body = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
        self._print(f"{first:>{self._step_width}}{body}", style)

    def _time_left(self, record: Mapping[str, Any], now: float) -> float:
        """Estimate the seconds until the last step from the pace of recent steps and validations.

        Step and time are kept: the next call measures the pace from them. The result is NaN if no
        pace is known.

        Args:
            record: the current step's record.
            now: current time in seconds (``time.monotonic``).
        """
        step = record["step"]
        pace = float(record.get("step_seconds") or math.nan)
        # The first step is slow because of warm-up: its pace is used once and then forgotten.
        if self._last is not None:
            pace = (now - self._last[1]) / max(1, step - self._last[0])
            if self._pace is not None:
                pace = 0.95 * self._pace + 0.05 * pace
            self._pace = pace
        else:
            self._first = (step, now)
        self._last = (step, now)
        return pace * (self.config.train.steps - step)

    def _print_facts(self, facts: Facts) -> None:
        from rich.text import Text

        for name, text in fact_lines(facts, self._rich.width):
            self._rich.print(Text.assemble((name, "dim"), text), crop=False)

    def _print(self, text: str = "", style: str | None = None) -> None:
        from rich.text import Text

        if self.enabled:
            self._rich.print(Text(text, style=style or ""), crop=False)
            self._rich.file.flush()  # A log file is read during the run.


def loss_text(loss: Any) -> str:
    loss = float(loss)
    return f"{loss:.3g}" if abs(loss) >= 999.99995 else f"{loss:.4f}"


def seconds_text(seconds: Any) -> str:
    if seconds is None:
        return "-"
    seconds = float(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 99.995 else duration(seconds)
