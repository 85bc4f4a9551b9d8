"""Writer of a run's record on rank 0: console, ``metrics.jsonl``, samples, experiment trackers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from automoe.checkpoint.store import Resumed
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.errors import in_words
from automoe.hf.families.registry import read_hf_config
from automoe.hf.wrapper import text_config
from automoe.observe.console import Console
from automoe.observe.metrics import MetricsLog
from automoe.observe.trackers import Trackers, make_trackers
from automoe.observe.trackers.base import Outcome
from automoe.observe.trained import describe_training
from automoe.training.context import RunContext


class RunRecord:
    """Console printer, ``metrics.jsonl`` writer and experiment trackers of one run.

    Every rank makes one. Rank 0 then prints the banner; on other ranks all methods do nothing.

    Args:
        step: last completed step; the run continues after it.
        resumed: checkpoint that the run resumes from. If the checkpoint is in the run's own
            directory, the metrics there are continued.
    """

    def __init__(
        self,
        config: Config,
        shape: MeshShape,
        context: RunContext,
        step: int,
        resumed: Resumed | None,
    ) -> None:
        self._run_dir = context.run_dir
        self._num_steps = config.train.steps
        self._console = Console(config, shape, enabled=context.rank == 0)
        self.note = self._console.note
        self.warn = self._console.warn
        self.show_row = self._console.row
        self.show_step = self._console.step
        self._console.start(resume_step=step)
        self.note_wrapped([*describe_training(config), *_describe_length(config)])
        self._log = None
        self._trackers = Trackers({}, config, self.warn)
        if context.rank == 0:
            # The record of another run is not continued.
            record_ends = resumed.step if resumed and resumed.of_run else None
            self._log = self._open_log(record_ends)
            self._trackers = make_trackers(config, context.run_dir, record_ends, self.warn)

    def _open_log(self, resume_step: int | None) -> MetricsLog:
        return MetricsLog(self._run_dir, resume_step, self.warn, self._num_steps)

    def note_wrapped(self, lines: list[str]) -> None:
        """Print lines for the user, wrapped to the console's 80 columns."""
        for line in lines:
            for part in textwrap.wrap(line, 66, break_long_words=False, break_on_hyphens=False):
                self.note(part)

    def write_step(self, record: Mapping[str, Any], expert_counts: torch.Tensor) -> None:
        """Write a step's record to ``metrics.jsonl`` and the trackers.

        Args:
            record: metric name -> value.
            expert_counts: [L, E] tokens that each expert of each MoE layer received in the step.
        """
        if self._log is not None:
            self._log.write(record, expert_counts)
            self._trackers.log(record)

    def write_samples(self, step: int, samples: list[dict[str, str]], seconds: float) -> None:
        """Print the answers to the prompts ``observe.samples``; write them to file and trackers.

        Args:
            step: step after which the answers were generated.
            samples: ``prompt`` and ``text`` of each answer.
            seconds: time that generating them took.
        """
        self._console.samples(samples, seconds)
        if self._log is not None:
            self._log.write_samples(step, samples)
            self._trackers.texts(step, "samples", samples)

    def rewind(self, step: int) -> None:
        """Remove the records of steps after ``step``, since training continues again from there."""
        if self._log is not None:
            self._log.close()
            self._log = self._open_log(step)
            self._trackers.rewind(step)

    def close(self, outcome: Outcome) -> None:
        """Write pending records and tell the trackers how the run ended.

        Args:
            outcome: ``done``, ``preempted`` or ``failed``.

        Raises:
            OSError: the records cannot be written; after ``failed`` this is only a warning.
        """
        if self._log is not None:
            try:
                self._log.close()
            except OSError as error:
                if outcome != "failed":
                    raise
                self.warn(str(in_words(error)))  # a warning, so the error that ended the run shows
            self._trackers.finish(outcome)

    def finish(self, outcome: Outcome, paths: Mapping[str, str | Path]) -> None:
        """Close the record and print the run's summary.

        Args:
            outcome: how the run ended, for the trackers.
            paths: name -> path of each result, to print in the summary.
        """
        self.close(outcome)
        self._console.finish({**paths, **self._trackers.places})


def _describe_length(config: Config) -> list[str]:
    """Return a warning if rows are longer than the model's position embeddings allow; else []."""
    rope = config.model.rope
    longest = round(rope.original_seq_len * (1 if rope.scaling == "none" else rope.factor))
    if config.model.hf_path is not None:
        hf = text_config(read_hf_config(config.model.hf_path))
        longest = max(longest, hf.get("max_position_embeddings") or 0)
    length = config.train.seq_len
    if length <= longest:
        return []
    return [
        f"train.seq_len={length} is above the model's max_position_embeddings={longest}: rows have "
        "positions that it has not seen, and an export keeps the limit"
    ]
