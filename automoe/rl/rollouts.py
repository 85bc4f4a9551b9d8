"""Answers that a run samples, step by step: what stands where other recipes have a data loader."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from automoe.comm.agreement import Ranks
from automoe.config.schema import Config
from automoe.data.prompts import encoded_prompts
from automoe.data.tokenizer import Tokenizer, fitting_tokenizer
from automoe.errors import DataError
from automoe.rl.engine import Answer
from automoe.storage.files import replace_durably
from automoe.storage.sealed import sealed, unsealed

FOLDER = "rollouts"


class Rollouts:
    """Prompts in an order that the seed decides, and the answers drawn since the last checkpoint.

    Answers are written before they are trained on. A run that was killed trains on them again from
    its checkpoint, so it goes on to the bit, whatever the engine would sample now. It has the
    methods of a loader that a run and its checkpoints call.

    Args:
        texts: the prompts.
        prompts: token ids of each prompt.
        tokenizer: of prompts and answers.

    Attributes:
        rows_of_last_step: rows of ``train.seq_len`` tokens that the step's answers would fill.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        texts: list[str],
        prompts: list[list[int]],
        tokenizer: Tokenizer,
    ) -> None:
        self.texts = texts
        self.prompts = prompts
        self.tokenizer = tokenizer
        self._config = config
        self._folder = run_dir / FOLDER
        self._per_step = config.recipe_args.prompts
        self._step = 0
        self._ranks = Ranks()
        self.rows_of_last_step = 0.0
        self.digest = xxhash.xxh3_128(json.dumps(prompts).encode()).hexdigest()
        # Answers of a run that was drawn otherwise are not this run's.
        settings = (config.recipe_args, config.observe.sample_tokens, config.model, config.optim)
        self._drawn_by = f"{self.digest} {config.train.seed} {config.train.dtype} {settings}"

    @classmethod
    def open(cls, config: Config, run_dir: Path) -> Rollouts:
        """Return those of a run: the prompts of ``observe.samples``, which every rank reads."""
        tokenizer = fitting_tokenizer(config)
        rollouts = cls(config, run_dir, *encoded_prompts(config, tokenizer), tokenizer)
        if config.checkpoint.resume == "never":
            rollouts.forget()
        return rollouts

    def of_step(self, step: int) -> list[int]:
        """Return the numbers of the prompts of a step, counted from 0; each comes once an epoch."""
        numbers = []
        for place in range(step * self._per_step, (step + 1) * self._per_step):
            epoch, at = divmod(place, len(self.prompts))
            order = list(range(len(self.prompts)))
            random.Random(f"{self._config.train.seed} {epoch}").shuffle(order)
            numbers.append(order[at])
        return numbers

    def draw(
        self, step: int, sample: Callable[[list[list[int]]], list[list[Answer]]]
    ) -> list[list[Answer]]:
        """Return the answers to the prompts of a step: those on disk, else new ones. Collective."""
        self._step = step
        prompts = [self.prompts[number] for number in self.of_step(step)]
        file = self._folder / f"step-{step + 1:08d}.json"
        groups = self._ranks.lead(lambda: self._read(file))
        if groups is None:
            groups = sample(prompts)
            self._ranks.lead(lambda: self._write(file, groups), again=False)
        lengths = [
            len(prompt) + len(answer.tokens)
            for prompt, group in zip(prompts, groups, strict=True)
            for answer in group
        ]
        self.rows_of_last_step = sum(lengths) / self._config.train.seq_len
        return groups

    def forget(self, before: int | None = None) -> None:
        """Remove the answers of the first ``before`` steps, which a checkpoint holds; None: all."""

        def remove() -> None:
            if before is None:
                shutil.rmtree(self._folder, ignore_errors=True)
            for file in self._folder.glob("step-*.json") if before else ():
                if int(file.stem.removeprefix("step-")) <= before:
                    file.unlink()

        self._ranks.lead(remove)

    def _read(self, file: Path) -> list[list[Answer]] | None:
        try:
            content = unsealed(file.read_bytes()) if file.is_file() else {}
        except ValueError as error:
            raise DataError(
                f"{file} cannot be read ({error}). Remove it: the answers are then drawn anew"
            ) from None
        if content.get("drawn_by") != self._drawn_by:
            return None
        return [
            [
                Answer(tokens, log_probs, None if routes is None else torch.tensor(routes))
                for tokens, log_probs, routes in group
            ]
            for group in content["groups"]
        ]

    def _write(self, file: Path, groups: list[list[Answer]]) -> None:
        self._folder.mkdir(exist_ok=True)
        content = [
            [
                (
                    answer.tokens,
                    answer.log_probs,
                    None if answer.routes is None else answer.routes.tolist(),
                )
                for answer in group
            ]
            for group in groups
        ]
        replace_durably(file, sealed({"drawn_by": self._drawn_by, "groups": content}))

    # ---------------------------------------------------------------- as a loader

    def describe(self) -> list[str]:
        return [f"{len(self.prompts)} prompts, {self._per_step} a step"]

    def last_batch(self) -> tuple[int, int, list[str]]:
        numbers = self.of_step(self._step)
        return numbers[0], numbers[-1], [f"observe.samples:{number + 1}" for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with the checkpoint's prompts.

        Raises:
            DataError: the prompts are others.
        """
        if state != self.state_dict():
            raise DataError(
                "observe.samples: the prompts are not those that the checkpoint was trained with. "
                "Restore them, or set checkpoint.resume=never"
            )
