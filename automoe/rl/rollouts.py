"""Prompts and stored answers of an RL run, which replace the data loader of other recipes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from automoe.checkpoint.steps import committed_steps, step_number
from automoe.comm.agreement import Ranks
from automoe.config.frozen import GOES_ON
from automoe.config.recipe_args import SECTION
from automoe.config.schema import Config
from automoe.data.prompts import encoded_prompts
from automoe.data.tokenizer import Tokenizer, fitting_tokenizer
from automoe.errors import DataError
from automoe.rl.batch import Sample
from automoe.rl.engine import Answer
from automoe.storage.files import replace_durably, set_aside
from automoe.storage.sealed import read_json, sealed

FOLDER = "rollouts"


class Rollouts:
    """Prompts of a run in a seeded order, and the stored answers to them.

    A rollout is a set of prompts and their answers, sampled with one version of the weights; one or
    several updates train on it. Answers and their scores are written to disk before training uses
    them. A restarted run reads them again, so its results are bit-identical. If its settings or
    rewards have changed, it samples new answers and prints a line. The run and its checkpoints use
    this object as their data loader.

    Args:
        texts: the prompts.
        prompts: token ids of each prompt.
        tokenizer: tokenizer of prompts and answers.

    Attributes:
        rows_of_last_step: number of tokens of the last update, divided by ``train.seq_len``.
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
        args = config.recipe_args
        self._per_rollout, self._updates = args.prompts, args.iterations * args.mini_batches
        self._rollout = 0
        self._ranks = Ranks()
        self._order = lru_cache(2)(self._shuffled)  # a rollout may begin the next epoch
        self.rows_of_last_step = 0.0
        self._history: dict[str, str] = {}  # rollout -> digest of the rewards of those before it
        self.digest = xxhash.xxh3_128(json.dumps(prompts).encode()).hexdigest()
        # Answers of a run that was drawn otherwise are not this run's.
        train = config.train
        drawn = {
            name: value for name, value in vars(args).items() if f"{SECTION}.{name}" not in GOES_ON
        }
        settings: list[Any] = [drawn, config.observe.sample_tokens, config.model]
        settings += [config.optim, config.lora, config.moe, train.seed, train.dtype]
        settings += [train.grad_clip, train.freeze, train.trainable, train.fp8]
        self._drawn_by = f"{self.digest} {settings}"

    @classmethod
    def open(cls, config: Config, run_dir: Path) -> Rollouts:
        """Return the rollouts of a run, with the prompts of ``observe.samples``. Collective.

        With ``checkpoint.resume=never``, the folder with an earlier run's answers is renamed. Raises ``ConfigError``
        or ``DataError`` if the prompts cannot be read or encoded.
        """
        tokenizer = fitting_tokenizer(config)
        rollouts = cls(config, run_dir, *encoded_prompts(config, tokenizer), tokenizer)
        if config.checkpoint.resume == "never":
            rollouts._ranks.lead(lambda: set_aside(run_dir / FOLDER, FOLDER), again=False)
        return rollouts

    def numbers(self, rollout: int) -> list[int]:
        """Return the indices of a rollout's prompts; every prompt occurs once per epoch.

        Args:
            rollout: number of the rollout, from 0.
        """
        numbers = []
        for place in range(rollout * self._per_rollout, (rollout + 1) * self._per_rollout):
            epoch, at = divmod(place, len(self.prompts))
            numbers.append(self._order(epoch)[at])
        return numbers

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(f"{self._config.train.seed} {epoch}").shuffle(order)
        return order

    def draw(
        self, rollout: int, sample: Callable[[list[list[int]]], list[list[Answer]]]
    ) -> list[list[Answer]]:
        """Return the answers to each prompt of a rollout: stored ones, else new ones. Collective.

        Args:
            rollout: number of the rollout, from 0.
            sample: function of prompts (token ids) that returns the engine's answers to each.
        """
        self._rollout = rollout

        def drawn() -> Any:
            self._ranks.lead(lambda: self._remove(lambda number: number == rollout + 1))
            groups = sample([self.prompts[number] for number in self.numbers(rollout)])
            return [[answer.as_json() for answer in of_prompt] for of_prompt in groups]

        groups = self.once(rollout, "answers", drawn)
        return [[Answer.of_json(*fields) for fields in of_prompt] for of_prompt in groups]

    def once(self, rollout: int, name: str, make: Callable[[], Any]) -> Any:
        """Return a rollout's JSON value from disk, or if missing compute and store it. Collective.

        A value that was stored with other settings or rewards is computed again.

        Args:
            rollout: number of the rollout, from 0.
            name: first part of the file's name, such as ``answers``.
            make: function that computes the value; every rank calls it, and rank 0's result is
                used.

        Raises:
            DataError: the stored file is damaged.
        """
        file = self._folder / f"{name}-{rollout + 1:08d}.json"
        facts = f"{self._drawn_by} {self._history.get(str(rollout), '')}"
        content = self._ranks.lead(lambda: self._read(file, facts))
        if content is not None:
            return content
        made = make()

        def write() -> Any:
            self._folder.mkdir(exist_ok=True)
            replace_durably(file, sealed({"drawn_by": facts, "content": made}))
            return made

        return self._ranks.lead(write, again=False)

    def judged(self, rewards: Sequence[float]) -> float:
        """Record the rewards of the rollout that was drawn last; return their mean.

        Updates depend on rewards. A restarted run therefore uses the stored answers of later
        rollouts only if it computed the same rewards for all rollouts before them.
        """
        here, after = str(self._rollout), str(self._rollout + 1)
        text = json.dumps([self._history.setdefault(here, ""), *rewards])
        digest = xxhash.xxh3_128(text.encode()).hexdigest()
        self._history = {here: self._history[here], after: digest}
        return sum(rewards) / len(rewards)

    def part(self, batch: Sequence[Sample], at: int) -> list[Sample]:
        """Return the samples of one update of a rollout; set ``rows_of_last_step``: their tokens / ``train.seq_len``.

        Each pass over ``batch`` trains on ``recipe_args.mini_batches`` equal sets of samples, one
        per update, which are the same in every pass. Each set has equally many answers to each
        prompt.

        Args:
            batch: all samples of the rollout.
            at: number of the update within the rollout, from 0.
        """
        count = self._config.recipe_args.mini_batches
        samples = list(batch[at % count :: count])
        tokens = sum(len(sample.tokens) for sample in samples)
        self.rows_of_last_step = tokens / self._config.train.seq_len
        return samples

    def forget(self, checkpoints: Path) -> None:
        """Delete stored rollouts that a resume from any checkpoint would not read. Collective.

        The oldest complete checkpoint decides: a run resumes from it if the newer ones are damaged.

        Args:
            checkpoints: folder of the run's checkpoints.
        """

        def remove() -> None:
            steps = [step_number(name) for name in committed_steps(checkpoints)]
            before = min(steps, default=0) // self._updates
            self._remove(lambda number: number <= before)

        self._ranks.lead(remove)

    def _remove(self, chosen: Callable[[int], bool]) -> None:
        for file in self._folder.glob("*-*.json"):
            if chosen(int(file.stem.partition("-")[2])):
                file.unlink()

    def _read(self, file: Path, facts: str) -> Any:
        try:
            content = read_json(file, must_be_sealed=True) if file.is_file() else {}
        except ValueError as error:
            raise DataError(
                f"{file} cannot be read ({error}). Remove answers-{file.stem.partition('-')[2]}.json: the answers are "
                "then drawn anew, and all files of the rollout made anew"
            ) from None
        if content and content["drawn_by"] != facts:
            print(
                f"{file}: of a run with other settings or rewards, so it is made anew", flush=True
            )
            return None
        return content.get("content")

    # ---------------------------------------------------------------- as a loader

    def describe(self) -> list[str]:
        return [f"{len(self.prompts)} prompts, {self._per_rollout} a rollout"]

    def last_batch(self) -> tuple[int, int, list[str]]:
        numbers = self.numbers(self._rollout)
        return numbers[0], numbers[-1], [f"observe.samples:{number + 1}" for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.digest, "history": self._history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the hash of all rewards before a checkpoint, from ``state``, which ``state_dict`` returned then.

        The file of a rollout's answers has the hash of all rewards before that rollout. A run
        reads the file again only if both hashes are equal.

        Raises:
            DataError: the checkpoint's run had other prompts.
        """
        state = state or {}  # a session's checkpoint has None
        self._history = dict(state.get("history", {}))  # states before 0.18 have none
        if state.get("prompts") != self.digest:
            raise DataError(
                "observe.samples: the prompts are not those that the checkpoint was trained with. "
                "Restore them, or set checkpoint.resume=never"
            )
