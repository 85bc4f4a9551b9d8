"""TensorBoard tracker, which writes event files in ``run_dir/tensorboard``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import yaml

from automoe.config.schema import Config
from automoe.errors import import_backend
from automoe.observe.trackers.base import About, Numbers, Outcome, Texts, Tracker
from automoe.storage.files import set_aside

FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Tracker that writes TensorBoard event files.

    When training returns to an earlier checkpoint, a new file is started with a purge step, which
    makes TensorBoard ignore later steps in earlier files.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        library = import_backend(
            "torch.utils.tensorboard", "observe.tensorboard=true", "pip install tensorboard"
        )
        self._earlier = sorted(folder.glob("events.*"))
        self._open = partial(library.SummaryWriter, str(folder))
        self.places = {"TensorBoard": str(folder)}
        self.events = self._open(purge_step=None if resume_step is None else resume_step + 1)

    def held(self) -> Mapping[int, float | None]:
        """Return step -> loss from the event files that earlier starts of this run wrote.

        Left out are steps that a return to an earlier checkpoint took back.
        """
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        held = {}
        for path in self._earlier:
            for event in LegacyEventFileLoader(
                str(path)
            ).Load():  # up to a record that a kill has cut
                if event.HasField("session_log"):  # it takes these steps back
                    held = {step: loss for step, loss in held.items() if step < event.step}
                for value in event.summary.value:
                    if value.tag == "loss":
                        held[event.step] = value.simple_value
        return held

    def log(self, step: int, numbers: Numbers) -> None:
        for key, value in numbers.items():
            self.events.add_scalar(key, value, step)
        self.events.flush()  # A killed run keeps the steps written so far.

    def texts(self, step: int, name: str, rows: Texts) -> None:
        """Record a table of texts as indented blocks, so that TensorBoard does not render Markdown.

        Args:
            step: step to which the texts belong.
            name: name of the table.
            rows: rows of the table, each {column: text}; all have the same columns.
        """
        shown = [
            "\n\n".join(textwrap.indent(text, "    ", lambda line: True) for text in row.values())
            for row in rows
        ]
        self.events.add_text(name, "\n\n---\n\n".join(shown), step)
        self.events.flush()

    def rewind(self, step: int) -> None:
        self.events.close()
        self.events = self._open(purge_step=step + 1)

    def finish(self, outcome: Outcome) -> None:
        self.events.close()


def start(config: Config, about: About) -> TensorBoardTracker:
    """Open ``run_dir/tensorboard`` to continue it; for a new run, rename an existing folder first.

    Args:
        about: name, tags, configuration and directory of the run.
    """
    folder = about.run_dir / FOLDER
    if about.resume_step is not None:
        return TensorBoardTracker(folder, about.resume_step)
    set_aside(folder, FOLDER)
    tracker = TensorBoardTracker(folder, None)
    facts = {
        "name": about.name,
        "group": about.group,
        "tags": ", ".join(about.tags),
        "config": f"```\n{yaml.safe_dump(about.config, sort_keys=False)}```",
    }
    for key, value in facts.items():
        if value:
            tracker.events.add_text(key, value)
    return tracker
