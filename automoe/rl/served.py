"""Inference engines behind an HTTP address; they read new weights from a shared folder."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from automoe.comm.agreement import Ranks
from automoe.config.schema import Config
from automoe.errors import BackendError, DataError
from automoe.hf.files import header_bytes, raw_bytes
from automoe.hf.folder import write_settings
from automoe.hf.headers import SINGLE_FILE
from automoe.parallel.fsdp import COMPUTE_DTYPES
from automoe.rl.engine import Answer, Sampling
from automoe.rl.weights import WeightStream, feed

_SILENT_S = 1800  # longest wait for an answer: loading weights and sampling take minutes


class ServedEngine(ABC):
    """Base class of engines that are an inference server at an HTTP address.

    A subclass implements the requests of one kind of server.

    Args:
        address: such as ``http://host:8000``.
        run_dir: run directory; the weights are written to its folder ``engine``, which the server
            must be able to read under the same path.

    Attributes:
        options: keyword arguments with which a caller must make the ``WeightStream`` that it passes
            to ``update``; here none.
    """

    options: dict[str, Any] = {}

    def __init__(self, address: str, config: Config, run_dir: Path) -> None:
        self.address = address.rstrip("/")
        self.model = config.model
        self.folder = run_dir / "engine"
        self._ranks = Ranks()
        dtype = COMPUTE_DTYPES[config.train.dtype]

        def settings() -> None:
            self.folder.mkdir(exist_ok=True)
            write_settings(self.folder, config.model, dtype, "none")

        self._ranks.lead(settings)

    @abstractmethod
    def reload(self) -> None:
        """Make the server load the weights in ``run_dir/engine``; drop caches of older weights."""

    @abstractmethod
    def answers(self, prompt: list[int], how: Sampling) -> list[Answer]:
        """Return the server's ``how.num`` answers to one prompt (token ids), not yet checked.

        Raises:
            BackendError: the server cannot be reached, or refuses the request.
        """

    def checked(self, prompt: list[int], how: Sampling) -> list[Answer]:
        """Return the server's answers to one prompt, after a check that nothing is missing.

        Raises:
            BackendError: the server cannot be reached, refuses the request, or its reply is
                incomplete.
            DataError: the expert ids in its reply are invalid.
        """
        try:
            answers = self.answers(prompt, how)
            if len(answers) != how.num:
                raise ValueError(f"asked for {how.num} answers, got {len(answers)}")
            for answer in answers:
                size = len(answer.tokens)
                if (
                    not 0 < size == len(answer.log_probs) <= how.max_tokens
                    or None in answer.log_probs
                ):
                    said = f"{size} tokens with log-probabilities {answer.log_probs[:9]}"
                    raise ValueError(f"{said}, of 1 to {how.max_tokens} tokens")
        except DataError:  # of routes
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise BackendError(
                f"{self.address}: an answer lacks what was asked for ({error!r}): a log-probability and an id of each "
                "token. Is it a server of recipe_args.sampler?"
            ) from error
        return answers

    def post(self, path: str, **content: Any) -> Any:
        """POST ``content`` as JSON to ``path`` of the server; return its JSON reply, None if empty.

        Raises:
            BackendError: the server cannot be reached, refuses the request, or its reply is not
                JSON.
        """
        url = f"{self.address}{path}"
        request = urllib.request.Request(
            url, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_SILENT_S) as response:
                text = response.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise BackendError(f"{url}: {error.code} {error.reason}: {said}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise BackendError(
                f"{url}: {error!r} (waiting for up to {_SILENT_S} s). Start the engine, or mend recipe_args.engine"
            ) from None

    def update(self, stream: WeightStream) -> None:
        scratch = self.folder / f".{SINGLE_FILE}"

        def begin() -> None:
            scratch.write_bytes(header_bytes(stream.contents))

        def append(bucket: Mapping[str, torch.Tensor]) -> None:
            with scratch.open("ab") as file:
                for tensor in bucket.values():
                    file.write(raw_bytes(tensor).data)

        def finish() -> None:
            os.replace(scratch, self.folder / SINGLE_FILE)
            self.reload()

        self._ranks.lead(begin)
        feed(stream, append)
        self._ranks.lead(finish, again=False)

    def sample(self, prompts: Sequence[list[int]], how: Sampling) -> list[list[Answer]]:
        def ask() -> list[list[Answer]]:
            return [
                self.checked(prompt, replace(how, seed=how.seed + index))
                for index, prompt in enumerate(prompts)
            ]

        return self._ranks.lead(ask, again=False)
