"""Generation of answers to fixed prompts during training (``observe.samples``), on any mesh.

Each new token takes a forward pass over whole rows (prompt and answer so far), like a pass of
validation, without a key-value cache. So every mesh can generate, and all meshes generate the same
tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from automoe.comm.agreement import Ranks
from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.schema import Config, tokenizer_of
from automoe.data.chat_template import chat_template_of
from automoe.data.prompts import encoded_prompts
from automoe.data.tokenizer import Tokenizer
from automoe.hf.folder import write_settings
from automoe.model.loss import NAN_TOKEN
from automoe.parallel.mesh import Meshes
from automoe.parallel.runner import StepRunner
from automoe.passes.trace import phase
from automoe.training.stats import max_over_ranks
from automoe.training.step import prepare_inputs

_ROUNDED = 64  # row lengths are multiples of this number times 2 cp tp


@dataclass
class Engine:
    """Greedy generator that uses the model in training, on the training mesh.

    Its fields are the run's configuration, the runner of this rank's pipeline stages, the device
    meshes and the device.
    """

    config: Config
    runner: StepRunner  # of this rank's pipeline stages
    meshes: Meshes
    device: torch.device

    def generate(
        self, prompts: list[list[int]], max_tokens: int, stops: Collection[int]
    ) -> list[list[int]]:
        """Return the new tokens that follow each prompt, each the likeliest one (greedy). Collective.

        An answer ends with a token of ``stops``, which is included, with ``NAN_TOKEN`` (-1) if the
        logits are NaN, or after ``max_tokens`` tokens.

        Args:
            prompts: token ids of each prompt; the results are in the same order.
            stops: ids of tokens that end an answer.
        """
        rows = dict(enumerate(prompts))
        running = list(rows)
        for _ in range(max_tokens):
            if not running:
                break
            for n, token in self._next_tokens({n: rows[n] for n in running}).items():
                rows[n] = [*rows[n], token]
            running = [n for n in running if rows[n][-1] not in (*stops, NAN_TOKEN)]
        return [rows[n][len(prompt) :] for n, prompt in enumerate(prompts)]

    def _next_tokens(self, rows: dict[int, list[int]]) -> dict[int, int]:
        """Return index of the prompt -> likeliest next token, -1 if the logits are NaN. Collective.

        Data-parallel ranks must run equally many rows, so some ranks repeat rows.

        Args:
            rows: index of the prompt -> token ids of the prompt and its answer so far.
        """
        train = self.config.train
        shape = self.meshes.shape
        # A pipeline's shapes are fixed.
        count = train.global_batch_size // shape.dp if shape.pp > 1 else train.micro_batch_size
        unit = _ROUNDED * 2 * shape.cp * shape.tp
        length = -(-max(map(len, rows.values())) // unit) * unit
        length = train.seq_len if shape.pp > 1 else min(length, train.seq_len)
        numbers = list(rows)
        next_tokens = dict.fromkeys(rows, NAN_TOKEN)
        for first in range(0, len(numbers), count * shape.dp):
            start = first + self.meshes.dp_rank * count
            chunk = numbers[start : start + count]
            batch = _batch([rows[n] for n in chunk], rows[numbers[0]], count, length)
            inputs, _ = prepare_inputs(batch, self.meshes, self.config, self.device)
            assert inputs.labels is not None
            tokens = self.runner.outputs(replace(inputs, next_token_at=inputs.labels != IGNORE))
            # Only the last stage has tokens; a cp rank without the row's end has none for the row.
            if tokens is not None:
                for n, token in zip(chunk, tokens.amax(1).tolist(), strict=False):
                    next_tokens[n] = max(token, NAN_TOKEN)
        return {n: int(token) for n, token in max_over_ranks(next_tokens).items()}


class Sampler:
    """Generator of greedy answers to the prompts ``observe.samples`` (none by default).

    ``transformers`` generates the same answers from an exported checkpoint. Every rank makes a
    sampler and calls ``generate``.

    Args:
        runner: runner of this rank's pipeline stages.
        tokenizer: tokenizer of the training data.

    Raises:
        CheckpointError: rank 0 can no longer read the prompts (``automoe.data.prompts``).
    """

    def __init__(
        self,
        config: Config,
        runner: StepRunner,
        tokenizer: Tokenizer,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.engine = Engine(config, runner, meshes, device)
        self.texts: list[str] = []
        if config.observe.samples:
            self.texts, self._prompts = Ranks().lead(lambda: encoded_prompts(config, tokenizer))
            self._stops = Ranks().lead(lambda: stop_tokens(config))

    def generate(self) -> list[dict[str, str]]:
        """Return ``prompt`` and ``text`` of each answer, on every rank. Collective.

        The text excludes the token that ends the answer. Without prompts the result is [].
        """
        if not self.texts:
            return []
        with phase("sample"):
            answers = self.engine.generate(
                self._prompts, self.config.observe.sample_tokens, self._stops
            )
        samples = []
        for prompt, ids in zip(self.texts, answers, strict=True):
            text = self.tokenizer.decode(ids[:-1] if ids[-1] in (*self._stops, NAN_TOKEN) else ids)
            if ids[-1] == NAN_TOKEN:
                text += "[NaN: no next token]"
            samples.append({"prompt": prompt, "text": text})
        return samples


def stop_tokens(config: Config) -> list[int]:
    """Return the ids of the tokens that end an answer; [] if there are none.

    They are ``eos_token_id`` of the ``generation_config.json`` that an export of the run would
    have.
    """
    with tempfile.TemporaryDirectory() as scratch:
        chat = chat_template_of(config)
        write_settings(Path(scratch), config.model, torch.float32, tokenizer_of(config), chat=chat)
        stops = json.loads(Path(scratch, "generation_config.json").read_bytes()).get("eos_token_id")
    if stops is None:
        return []
    return stops if isinstance(stops, list) else [stops]


def _batch(rows: list[list[int]], filler: list[int], count: int, length: int) -> StepBatch:
    """Return a batch of token rows to predict one next token each.

    Only the last token of each row has a label. Rows are padded to ``length`` tokens.

    Args:
        rows: token ids of each row.
        filler: row that is repeated until there are ``count`` rows.
        count: number of rows of the batch.
    """
    rows = [*rows, *[filler] * (count - len(rows))]
    tokens = torch.zeros(count, length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    doc_ids = torch.full_like(tokens, -1)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        doc_ids[place, : len(row)] = 0
        labels[place, len(row) - 1] = 0
    return StepBatch(
        tokens, labels, torch.arange(length).expand(count, -1).contiguous(), doc_ids, 0, 0
    )
