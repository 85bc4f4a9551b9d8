"""Engines at an address or in a child process: what they are asked, against one that records it and answers as they do."""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import automoe
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.hf.write import to_hf
from automoe.rl import vllm_worker
from automoe.rl.engine import Sampling
from automoe.rl.sglang import ServedSGLang
from automoe.rl.vllm import LocalVLLM, ServedVLLM
from automoe.rl.weights import WeightStream
from tests.support.gpu import one_rank
from tests.support.hf_models import save_small_hf

ROUTES = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 0], [1, 3]]], dtype="<i4")  # 4 tokens, 2 layers, K = 2
ANSWERS = {
    "/v1/completions": {"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -1.5]}}] * 2},
    "/generate": {
        "meta_info": {
            "output_token_logprobs": [[-0.5, 7, "a"], [-1.5, 8, "b"]],
            "routed_experts": base64.b64encode(ROUTES.tobytes()).decode(),
        }
    },
}


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    calls: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            calls.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(500 if self.path == "/broken/resume" else 200)
            self.end_headers()
            self.wfile.write(json.dumps(ANSWERS.get(self.path, {"ok": True})).encode())

        def log_message(self, *given: Any) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}", calls
    served.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("source")
    save_small_hf(
        "qwen3_moe", folder, dtype=torch.bfloat16, other_sizes={"num_hidden_layers": 2, "num_experts_per_tok": 2}
    )
    return automoe.from_hf(folder)


@pytest.mark.parametrize("kind", [ServedVLLM, ServedSGLang])
def test_a_server_reads_the_weights_and_is_asked_in_its_words(
    kind: Any, model: Any, server: Any, tmp_path: Path
) -> None:
    address, calls = server
    with one_rank("cpu"):
        engine = kind(address, Config(model=model.config), tmp_path)
        engine.update(WeightStream(model, 100_000))
        to_hf(model, tmp_path / "export", verify=False)
        [[first, second]] = engine.sample([[1, 2]], Sampling(2, 6, 0.8, 11, [5]))
    ours, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("engine", "export"))
    assert ours.keys() == exported.keys() and all(torch.equal(ours[name], one) for name, one in exported.items())
    assert json.loads((tmp_path / "engine" / "config.json").read_text())["model_type"] == "qwen3_moe"
    paths = [path for path, _ in calls]
    asked = dict(calls)
    if kind is ServedVLLM:
        assert paths == ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume", "/v1/completions"]
        assert asked["/collective_rpc"]["kwargs"] == {"weights_path": str(tmp_path / "engine")}
        assert (
            asked["/v1/completions"] | {"n": 2, "seed": 22, "prompt": [1, 2], "stop_token_ids": [5]}
            == asked["/v1/completions"]
        )
    else:
        assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation", *["/generate"] * 2]
        assert asked["/update_weights_from_disk"] == {"model_path": str(tmp_path / "engine"), "flush_cache": True}
        seeds = [content["sampling_params"]["sampling_seed"] for path, content in calls if path == "/generate"]
        assert len(set(seeds)) == 2, "answers to a prompt differ"
        assert first.routes.tolist() == ROUTES.tolist()
    assert first.tokens == second.tokens == [7, 8] and first.log_probs == [-0.5, -1.5]


def test_a_server_that_refuses_or_is_not_there_is_named(model: Any, server: Any, tmp_path: Path) -> None:
    address, _ = server
    with one_rank("cpu"):
        engine = ServedVLLM(address, Config(model=model.config), tmp_path)
        with pytest.raises(BackendError, match="/broken/resume: 500"):
            engine.post("/broken/resume")
        engine.address = "http://127.0.0.1:9"
        with pytest.raises(BackendError, match="127.0.0.1:9/pause.*Start the engine, or mend recipe_args.engine"):
            engine.update(WeightStream(model))


def completion(**fields: Any) -> Any:
    one = {"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -1.5]}} | fields
    return {"choices": [one] * 2}


WRONG = {
    "no choices": {},
    "null": None,
    "too few": {"choices": completion()["choices"][:1]},
    "no ids": completion(token_ids=None),
    "no tokens": completion(token_ids=[], logprobs={"token_logprobs": []}),
    "too many tokens": completion(token_ids=[7] * 9, logprobs={"token_logprobs": [-0.5] * 9}),
    "no log-probabilities": completion(logprobs=None),
    "one for two": completion(logprobs={"token_logprobs": [-0.5]}),
    "null among them": completion(logprobs={"token_logprobs": [-0.5, None]}),
}


@pytest.mark.parametrize("kind", [ServedVLLM, ServedSGLang])
@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_lacks_something_is_refused(
    case: str, kind: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few answers would be compared with those to another prompt."""
    with one_rank("cpu"):
        engine = kind("http://there", Config(model=model.config), tmp_path)
        monkeypatch.setattr(engine, "post", lambda path, **content: WRONG[case])
        with pytest.raises(BackendError, match="http://there: (an answer|asked for)"):
            engine.sample([[1, 2], [3]], Sampling(2, 6))


def test_what_speaks_no_http_is_named(model: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, one_rank("cpu"):

        def answer() -> None:
            connection, _ = listening.accept()
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # a close before the request is read would be a reset
                pass
            connection.close()

        Thread(target=answer, daemon=True).start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(BackendError, match="BadStatusLine.*mend recipe_args.engine"):
            ServedVLLM(address, Config(model=model.config), tmp_path).post("/resume")


@pytest.mark.parametrize("python", ["/no/such/python", __file__, "python_that_is_not_there"])
def test_a_python_that_cannot_be_started_is_named(python: str, model: Any, tmp_path: Path) -> None:
    with one_rank("cpu"), pytest.raises(BackendError, match=f"engine={python}: .*Name a Python that has vLLM"):
        LocalVLLM(python, Config(model=model.config), tmp_path)


# Speaks the protocol of vllm_worker.py, keeps every tensor until the last one has come, as vLLM does, and says which files
# of ours lie in folders for temporary ones meanwhile.
RECEIVER = """
import glob, json, os, sys
from safetensors.torch import load_file, save_file
reply = os.fdopen(int(os.environ["FD"]), "w")
def send(content):
    print(json.dumps(content), file=reply, flush=True)
send("ready")
for turn in range(2):
    assert json.loads(sys.stdin.readline()) == {"do": "update"}
    send("waiting")
    tensors, left = {}, []
    while file := json.loads(sys.stdin.readline())["file"]:
        tensors |= load_file(file)
        left += [name for folder in ("/dev/shm", os.environ["TMPDIR"]) for name in glob.glob(folder + "/automoe-*")]
        send("taken")
    save_file(tensors, os.environ["OUT"] + str(turn))
    send(left)
sys.stdin.read()
"""


def test_weights_reach_a_child_process_and_leave_no_file(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any moment leaves nothing behind, in memory either; /dev/shm may be as small as containers have it."""
    (tmp_path / "worker.py").write_text(RECEIVER)
    monkeypatch.setattr(vllm_worker, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("OUT", str(tmp_path / "received"))
    replies: list[Any] = []
    with one_rank("cpu"):
        engine = LocalVLLM(sys.executable, Config(model=model.config), tmp_path)
        asked = engine._asked
        monkeypatch.setattr(engine, "_asked", lambda **content: replies.append(asked(**content)))
        for turn in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            engine.update(stream := WeightStream(model, 1 << 15))
            received = load_file(tmp_path / f"received{turn}")
            expected = {name: tensor for bucket in stream for name, tensor in bucket.items()}
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
        child = engine._process.pid
        assert os.getsid(child) == child != os.getsid(0), "a scheduler's signal for the ranks' group is not for it"
        engine.close()
    assert replies.count("taken") > 4 and replies.count([]) == 2
