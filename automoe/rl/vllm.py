"""vLLM as the engine: started beside the training, or at an address."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from automoe.comm.agreement import Ranks
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.hf.files import raw_bytes
from automoe.hf.folder import write_settings
from automoe.rl import vllm_worker
from automoe.rl.engine import Answer
from automoe.rl.routes import read_vllm
from automoe.rl.served import ServedEngine
from automoe.rl.weights import WeightStream, feed

_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the iterator of tensors stays in one process
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class LocalVLLM:
    """vLLM in a process of rank 0's machine (``automoe.rl.vllm_worker``), fed through shared memory.

    Args:
        python: the Python that has vLLM.
        stops: tokens that end an answer.
        run_dir: the engine's output goes to ``engine.log`` there.
    """

    options: dict[str, Any] = {"bucket_bytes": 64 << 20}  # memory that the next bucket uses again

    def __init__(self, python: str, config: Config, stops: Collection[int], run_dir: Path) -> None:
        self._stops = sorted(stops)
        self._model = config.model
        self._ranks = Ranks()
        self._log = run_dir / "engine.log"
        self._ranks.lead(lambda: self._start(python, config), again=False)

    def _start(self, python: str, config: Config) -> None:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._scratch = tempfile.TemporaryDirectory(prefix="automoe-", dir=shared)
        folder = Path(self._scratch.name)
        # The engine reads its first weights as any later ones: a folder needs no more than this.
        dtype = config.train.dtype
        write_settings(folder, config.model, getattr(torch, dtype), "none")
        read, write = os.pipe()
        command = [python, vllm_worker.__file__, str(folder), dtype, str(config.train.seq_len)]
        self._replies = os.fdopen(read)
        try:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    pass_fds=[write],
                    env=_own_environment() | _CPU | {"FD": str(write)},
                )
        except OSError as error:
            raise BackendError(
                f"recipe_args.engine={python}: {error.strerror}. Name a Python that has vLLM, or http://HOST:PORT"
            ) from None
        finally:
            os.close(write)
        self._reply()

    def _ask(self, **content: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reply is then its last words
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()

    def _reply(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            lines = self._log.read_text(errors="replace").splitlines()
            raise BackendError(
                f"the engine has ended: {lines[-1] if lines else 'no output'}. {self._log} has all of its output"
            )
        return json.loads(line)

    def update(self, stream: WeightStream) -> None:
        self._ranks.lead(lambda: self._ask(do="update"), again=False)
        feed(stream, self._hand_over)
        self._ranks.lead(self._finish, again=False)

    def _hand_over(self, bucket: Mapping[str, torch.Tensor]) -> None:
        file = Path(self._scratch.name) / "bucket"
        tensors, at = [], 0
        with file.open("wb") as out:
            for name, tensor in bucket.items():
                raw = raw_bytes(tensor)
                out.write(raw.data)
                out.write(bytes(-len(raw) % 16))  # where a view of any dtype may begin
                kind = str(tensor.dtype).removeprefix("torch.")
                tensors.append((name, kind, list(tensor.shape), at))
                at += -(-len(raw) // 16) * 16
        self._ask(file=str(file), tensors=tensors)
        self._reply()

    def _finish(self) -> None:
        self._ask()
        self._reply()

    def sample(
        self, prompts: Sequence[list[int]], num: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Answer]]:
        def answers() -> list[Answer]:
            self._ask(
                do="sample",
                prompts=prompts,
                num=num,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stops=self._stops,
            )
            asked = (prompt for prompt in prompts for _ in range(num))
            return [
                Answer(
                    tokens,
                    log_probs,
                    routes and read_vllm(routes, self._model, len(prompt) + len(tokens)),
                )
                for prompt, (tokens, log_probs, routes) in zip(
                    asked, self._reply()["answers"], strict=True
                )
            ]

        flat = self._ranks.lead(answers, again=False)
        return [flat[at : at + num] for at in range(0, len(flat), num)]

    def close(self) -> None:
        """End the engine, which otherwise ends with this process."""
        if self._ranks.rank == 0:
            self._process.terminate()
            self._process.wait()


class ServedVLLM(ServedEngine):
    """A server of vLLM, started with VLLM_SERVER_DEV_MODE=1, which opens the calls of an update."""

    def reload(self) -> None:
        self.post("/pause?mode=wait")
        self.post(
            "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(self.folder)}
        )
        self.post("/reset_prefix_cache")
        self.post("/resume")

    def answers(
        self, prompt: list[int], num: int, max_tokens: int, temperature: float, seed: int
    ) -> list[Answer]:
        made = self.post(
            "/v1/completions",
            prompt=prompt,
            n=num,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=self.stops,
            ignore_eos=True,
            logprobs=0,
            return_token_ids=True,
        )
        return [
            Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])
            for choice in made["choices"]
        ]


def _own_environment() -> dict[str, str]:
    """Return this process's environment without what belongs to this rank and its Python."""
    ours = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "GROUP_",
        "PYTHON",
        "TORCHELASTIC",
        "VIRTUAL_ENV",
    )
    return {key: value for key, value in os.environ.items() if not key.startswith(ours)}
