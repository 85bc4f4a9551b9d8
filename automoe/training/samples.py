"""What the model says to fixed prompts while it is trained (``observe.samples``), on the mesh that it is trained on.

A new token is a validation pass over rows that hold the prompts and what was said so far: the likeliest token behind
each is read where the loss would be. So every mesh that can validate can speak, whatever it cuts, with the same tokens;
there is no cache of keys, and a token costs a forward pass.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from automoe.config.schema import Config, tokenizer_of
from automoe.data.chat_template import chat_template_of
from automoe.data.loader import StepBatch
from automoe.data.prompts import encoded_prompts
from automoe.data.tokenizer import Tokenizer
from automoe.hf.folder import write_settings
from automoe.model.decoder import Decoder
from automoe.moe.communicators import Communicator
from automoe.moe.tokens import IGNORE
from automoe.parallel.agreement import Ranks
from automoe.parallel.mesh import Meshes
from automoe.parallel.pipeline import StepRunner
from automoe.storage.trace import phase
from automoe.training.stats import max_over_ranks
from automoe.training.step import prepare_inputs

NO_TOKEN = -1  # behind a row whose logits are NaN
_ROUNDED = 64  # rows are as long as they must be, in steps of this many tokens a rank


class Sampler:
    """Greedy answers to ``observe.samples``, as ``transformers`` generates them from an export; none without prompts.

    Every rank makes one and calls ``generate``. Text goes on where the prompt ends.

    Args:
        parts: this rank's pipeline stages, which ``runner`` runs.
        tokenizer: the loader's.

    Raises:
        CheckpointError: rank 0 cannot read the prompts any more (``automoe.data.prompts``).
    """

    def __init__(
        self,
        config: Config,
        parts: dict[int, Decoder],
        runner: StepRunner,
        tokenizer: Tokenizer,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        self.config, self.parts, self.runner, self.tokenizer = config, parts, runner, tokenizer
        self.meshes, self.device = meshes, device
        self.texts: list[str] = []
        if config.observe.samples:
            self.texts, self._prompts = Ranks().lead(lambda: encoded_prompts(config, tokenizer))
            self._stops = Ranks().lead(lambda: _stops(config))

    def generate(self) -> list[dict[str, str]]:
        """``prompt`` and ``text`` of each, on every rank; the token that ends an answer is left out. Collective."""
        rows = {n: list(prompt) for n, prompt in enumerate(self._prompts)} if self.texts else {}
        speaking = list(rows)
        with phase("sample"):
            for _ in range(self.config.observe.sample_tokens):
                for n, token in self._next({n: rows[n] for n in speaking}).items():
                    rows[n].append(token)
                speaking = [n for n in speaking if rows[n][-1] not in (*self._stops, NO_TOKEN)]
                if not speaking:
                    break
        said = (rows[n][len(self._prompts[n]) :] for n in rows)
        texts = (self._spell(ids) for ids in said)
        return [{"prompt": prompt, "text": text} for prompt, text in zip(self.texts, texts, strict=True)]

    def _spell(self, ids: list[int]) -> str:
        """The text of an answer; a model whose logits are NaN says no more."""
        text = self.tokenizer.decode(ids[:-1] if ids[-1] in (*self._stops, NO_TOKEN) else ids)
        return f"{text}[NaN: no next token]" if ids[-1] == NO_TOKEN else text

    def _next(self, rows: dict[int, list[int]]) -> dict[int, int]:
        """The token behind each row. Every data-parallel rank runs as many rows, some of them for company."""
        train, shape, found = self.config.train, self.meshes.shape, dict.fromkeys(range(len(self.texts)), NO_TOKEN)
        # A pipeline's shapes are fixed.
        count = train.global_batch_size // shape.dp if shape.pp > 1 else train.micro_batch_size
        unit = _ROUNDED * 2 * shape.cp * shape.tp
        length = -(-max(map(len, rows.values())) // unit) * unit
        length = train.seq_len if shape.pp > 1 else min(length, train.seq_len)
        numbers = list(rows)
        with _asking(self.parts.values(), found):
            for first in range(0, len(numbers), count * shape.dp):
                start = first + self.meshes.dp_rank * count
                batch = _batch({n: rows[n] for n in numbers[start : start + count]}, rows[numbers[0]], count, length)
                self.runner.evaluate(prepare_inputs(batch, self.meshes, self.config, self.device)[0])
        tokens = max_over_ranks(found)
        return {n: int(tokens[n]) for n in rows}


def _stops(config: Config) -> list[int]:
    """The tokens that end an answer: those of an export's generation settings."""
    with tempfile.TemporaryDirectory() as scratch:
        chat = chat_template_of(config)
        write_settings(Path(scratch), config.model, torch.float32, tokenizer_of(config), chat=chat)
        stops = json.loads(Path(scratch, "generation_config.json").read_bytes()).get("eos_token_id")
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


def _batch(asked: dict[int, list[int]], company: list[int], count: int, length: int) -> StepBatch:
    """``count`` rows of ``length`` tokens; the label of each asked row's last token is its number."""
    rows = [*asked.values(), *[company] * (count - len(asked))]
    tokens = torch.zeros(count, length, dtype=torch.int64)
    labels, doc_ids = torch.full_like(tokens, IGNORE), torch.full_like(tokens, -1)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        doc_ids[place, : len(row)] = 0
    for place, (number, row) in enumerate(asked.items()):
        labels[place, len(row) - 1] = number
    return StepBatch(tokens, labels, torch.arange(length).expand(count, -1).contiguous(), doc_ids, 0, 0)


@contextmanager
def _asking(parts: Iterable[Decoder], found: dict[int, int]) -> Iterator[None]:
    """In place of the loss, the likeliest token behind each position with a label goes to ``found`` of that label."""

    def ask(
        x_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_T: torch.Tensor,
        first_id: int,
        vocab: Communicator,
        wanted: bool,
    ) -> tuple[torch.Tensor, None]:
        asked_T = labels_T != IGNORE
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        if asked_T.any():  # alike on all ranks that share the vocabulary
            logits_NV = x_TH[asked_T] @ weight_VH.T
            place_N1 = logits_NV.argmax(-1, keepdim=True)
            best_N1 = logits_NV.gather(1, place_N1).to(wide)
            no_number_N1 = vocab.all_reduce_max(best_N1.isnan().to(wide)) > 0
            best_N1 = best_N1.nan_to_num(nan=math.inf, posinf=math.inf)
            first_N1 = torch.where(
                best_N1 == vocab.all_reduce_max(best_N1), place_N1 + first_id, torch.iinfo(torch.int64).max
            )
            tokens_N1 = -vocab.all_reduce_max(-first_N1)  # of equally likely ones the first
            tokens_N1 = tokens_N1.masked_fill(no_number_N1, NO_TOKEN)
            found.update(zip(labels_T[asked_T].tolist(), tokens_N1.flatten().tolist(), strict=True))
        return torch.zeros((), dtype=wide, device=x_TH.device), None

    own = [(part, part.runtime, part.loss) for part in parts]
    for part, runtime, _ in own:
        part.runtime, part.loss = replace(runtime, chunk_loss=ask), None
    try:
        yield
    finally:
        for part, runtime, loss in own:
            part.runtime, part.loss = runtime, loss
