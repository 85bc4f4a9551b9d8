"""Inference engines that are vLLM: a child process of the training, or a server at an address."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from automoe.comm.agreement import Ranks
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.hf.files import write_files
from automoe.hf.folder import write_settings
from automoe.hf.headers import Contents
from automoe.rl import vllm_worker
from automoe.rl.engine import Answer, Sampling
from automoe.rl.routes import read_vllm
from automoe.rl.served import ServedEngine
from automoe.rl.weights import WeightStream, feed

# Variables of this rank and of its Python.
_OURS = tuple("RANK WORLD_SIZE LOCAL_ MASTER_ GROUP_ PYTHON TORCHELASTIC VIRTUAL_ENV".split())
# For an engine that shares cores and memory with the training; variables of yours come first.
_BESIDE_TRAINING = {
    # Each layer is loaded into the memory of the one before it: new pages cost a third of an update.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait for work sleep: spinning cost another third
}
_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the iterator of tensors stays in one process
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class LocalVLLM:
    """Inference engine that is vLLM in a child process of rank 0; new weights pass through memory. Linux only.

    Args:
        python: path of a Python interpreter that has vLLM; it runs ``automoe.rl.vllm_worker``.
        run_dir: run directory, whose file ``engine.log`` gets the child's output.

    Attributes:
        options: keyword arguments with which a caller must make the ``WeightStream`` for ``update``.

    Raises:
        BackendError: the child process does not start, or ends before it answers; or this is not Linux.
    """

    options: dict[str, Any] = {"bucket_bytes": 64 << 20}  # one is loaded while the next is written

    def __init__(self, python: str, config: Config, run_dir: Path) -> None:
        self._model = config.model
        self._ranks = Ranks()
        self._log = run_dir / "engine.log"
        self._ranks.lead(lambda: self._start(python, config), again=False)

    def _start(self, python: str, config: Config) -> None:
        if not hasattr(os, "memfd_create"):
            raise BackendError(
                f"recipe_args.engine={python}: a vLLM of the training itself needs Linux. Name http://HOST:PORT"
            )
        dtype = config.train.dtype
        others = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
        with tempfile.TemporaryDirectory(prefix="automoe-") as folder, self._log.open("w") as log:
            # The engine reads its first weights as any later ones: a folder needs no more than this.
            write_settings(Path(folder), config.model, getattr(torch, dtype), "none")
            read, write = os.pipe()
            self._replies = os.fdopen(read)
            try:
                self._process = subprocess.Popen(
                    [python, vllm_worker.__file__, folder, dtype, str(config.train.seq_len)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    pass_fds=[write],
                    start_new_session=True,  # signals for the ranks are not for the engine
                    env=_BESIDE_TRAINING | others | _CPU | {"FD": str(write)},
                )
            except OSError as error:
                raise BackendError(
                    f"recipe_args.engine={python}: {error.strerror}. Name a Python that has vLLM, or http://HOST:PORT"
                ) from None
            finally:
                os.close(write)
            self._reply()

    def _asked(self, **content: Any) -> Any:
        """Send one JSON request to the child process and return its JSON reply.

        Raises:
            BackendError: the child process has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reply is then its last words
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        line = self._replies.readline()
        if not line:
            lines = self._log.read_text(errors="replace").splitlines()
            raise BackendError(
                f"the engine has ended: {lines[-1] if lines else 'no output'}. {self._log} has all of its output"
            )
        return json.loads(line)

    def update(self, stream: WeightStream) -> None:
        self._ranks.lead(lambda: self._asked(do="update"), again=False)
        feed(stream, partial(self._hand_over, stream.contents))
        self._ranks.lead(lambda: self._asked(file=None), again=False)

    def _hand_over(self, contents: Contents, bucket: Mapping[str, torch.Tensor]) -> None:
        # This file has no name and ends with its last reader: a kill leaves nothing, and a container's
        # limit of /dev/shm does not hold for it.
        memory = os.memfd_create("bucket")
        try:
            path = Path(f"/proc/{os.getpid()}/fd/{memory}")
            here = {name: contents[name] for name in bucket}
            write_files([(path, here)], ([tensor] for tensor in bucket.values()))
            self._asked(file=str(path))
        finally:
            os.close(memory)

    def sample(self, prompts: Sequence[list[int]], how: Sampling) -> list[list[Answer]]:
        def answers() -> list[list[Answer]]:
            groups = self._asked(do="sample", prompts=prompts, **vars(how))
            return [
                [
                    Answer(
                        tokens,
                        log_probs,
                        routes and read_vllm(routes, self._model, len(prompt) + len(tokens)),
                    )
                    for tokens, log_probs, routes in group
                ]
                for prompt, group in zip(prompts, groups, strict=True)
            ]

        return self._ranks.lead(answers, again=False)

    def close(self) -> None:
        """End the child process now; without this call it ends with the training process."""
        if self._ranks.rank == 0:
            self._process.terminate()
            self._process.wait()


class ServedVLLM(ServedEngine):
    """Inference engine that is a vLLM server at an HTTP address; it returns no expert ids.

    Start the server with VLLM_SERVER_DEV_MODE=1, which enables the requests that update weights.
    """

    def reload(self) -> None:
        self.post("/pause?mode=wait")
        self.post(
            "/collective_rpc", method="reload_weights", kwargs={"weights_path": str(self.folder)}
        )
        self.post("/reset_prefix_cache")
        self.post("/resume")

    def answers(self, prompt: list[int], how: Sampling) -> list[Answer]:
        made = self.post(
            "/v1/completions",
            prompt=prompt,
            n=how.num,
            max_tokens=how.max_tokens,
            temperature=how.temperature,
            seed=how.seed * how.num,  # the server adds an answer's number
            stop_token_ids=how.stops,
            ignore_eos=True,
            logprobs=0,
            return_token_ids=True,
        )
        return [
            Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])
            for choice in made["choices"]
        ]
