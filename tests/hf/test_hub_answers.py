"""What a Hub may answer in place of files: each ends in words, and the next start finds nothing of it."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import huggingface_hub.constants as constants
import pytest
from huggingface_hub import close_session

from automoe import convert
from automoe.config.data_schema import DataConfig
from automoe.config.hub import pinned
from automoe.data.hub import hub_files
from automoe.errors import ConfigError, DataError
from tests.support.hub import NAME, Hub, published

KEY = "model.hf_path"
LOGIN = b"<!doctype html><html><body>Sign in to this network</body></html>"
Fault = Callable[[BaseHTTPRequestHandler], None]


def answer(status: int, body: bytes = b"{}", **headers: str) -> Fault:
    def say(asked: BaseHTTPRequestHandler) -> None:
        asked.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            asked.send_header(name.replace("_", "-"), value.replace("COMMIT", asked.server.main))  # type: ignore[attr-defined]
        asked.end_headers()
        if asked.command == "GET":
            asked.wfile.write(body)
        asked.close_connection = int(headers.get("Content_Length", 0)) > 0

    return say


def silence(asked: BaseHTTPRequestHandler) -> None:
    asked.server.ended.wait(30)  # type: ignore[attr-defined]
    asked.close_connection = True


# answer -> what the message must say
ANSWERS: dict[str, tuple[Fault, str]] = {
    "login": (answer(401), "401.*hf auth login"),
    "forbidden": (answer(403), "403.*hf auth login"),
    "gated": (answer(403, X_Error_Code="GatedRepo"), "gated.*Accept the terms at .*lab/tiny"),
    "repository": (answer(404, X_Error_Code="RepoNotFound"), "404.*Correct"),
    "revision": (answer(404, X_Error_Code="RevisionNotFound"), "404.*Correct the name or the revision"),
    "file": (answer(404, X_Error_Code="EntryNotFound"), "404.*HF_ENDPOINT"),
    "limit": (answer(429), "429.*Start again later"),
    "long wait": (answer(429, Retry_After="3600"), "429.*come back in 3600 s.*Start again later"),
    "fault": (answer(500), "500.*status.huggingface.co"),
    "closed": (answer(503), "503.*status.huggingface.co"),
    "page": (answer(200, LOGIN), "Open .* in a browser"),
    "page like a file": (answer(200, LOGIN, ETag='"a"', X_Repo_Commit="COMMIT"), "Open .* in a browser"),
    # of threads that share a connection, one may find it closed first
    "cut": (
        answer(200, Content_Length="5000", ETag='"a"', X_Repo_Commit="COMMIT"),
        "(received 2 bytes|disconnected).*Start again",
    ),
    "nowhere": (answer(302, Location="http://127.0.0.1:9/"), "Start again; if the Hub cannot be reached"),
    "loop": (answer(302, Location="/lab/tiny/resolve/loop"), "redirects.*Open .* in a browser"),
    "silence": (silence, "(timed out|time-?out).*Start again"),
}
PLACES = {
    "revision": lambda path: "/revision/" in path or path.endswith("/resolve/loop"),
    "listing": lambda path: "/tree/" in path or path.endswith("/resolve/loop"),
    "config": lambda path: path.endswith(("/config.json", "/resolve/loop")),
    "weights": lambda path: path.endswith((".safetensors", "/resolve/loop")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("published") / "0", 0)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose cache is in the working directory; pauses between tries pass at once and are added up."""
    really, server = time.sleep, Hub()
    server.publish(folder)
    server.ended, server.slept = threading.Event(), 0.0  # type: ignore[attr-defined]

    def sleep(seconds: float) -> None:
        server.slept += seconds  # type: ignore[attr-defined]
        really(min(seconds, 0.001))

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("automoe.config.hub.SILENT_S", 0.2)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    files = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    told = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": str(tmp_path / "cache")}
    told |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DOWNLOAD_TIMEOUT": 0.2}
    for name, value in (told | {"DEFAULT_ETAG_TIMEOUT": 0.2, "HF_HUB_ETAG_TIMEOUT": 0.2}).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.chdir(tmp_path)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.ended.set()  # type: ignore[attr-defined]
    server.shutdown()


def kept(folder: Path, cache: Path) -> bool:
    """Whether each file of the cached commit is the published one."""
    files = [file for file in cache.glob("models--*/snapshots/*/**/*") if file.is_file()]
    return all(file.read_bytes() == (folder / file.name).read_bytes() for file in files)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
def test_every_answer_ends_in_words_and_leaves_nothing(
    place: str,
    hub: Hub,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, (fault, words) in ANSWERS.items():
        cache = tmp_path / name.replace(" ", "-")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        if name == "silence" and place in ("config", "weights"):
            continue  # the library itself waits ten seconds for a file, and the constant is a default
        here = PLACES[place]
        hub.fault = lambda asked, here=here, fault=fault: here(asked.path) and (fault(asked) or True)
        hub.slept = 0.0  # type: ignore[attr-defined]
        if place == "weights":
            assert convert.main([NAME, "--out", str(tmp_path / "out")]) == 2, name
            said = capsys.readouterr().err
            assert "Traceback" not in said
        else:
            with pytest.raises(ConfigError) as caught:
                pinned(KEY, NAME)
            said = str(caught.value)

        assert re.search(words, said, re.DOTALL), (name, said)
        assert NAME in said and kept(folder, cache) and not (tmp_path / "out").exists(), name
        assert hub.slept < 1000, name  # type: ignore[attr-defined]
        hub.fault = lambda asked: False
        if place == "weights":
            assert convert.main([NAME, "--out", str(tmp_path / "out")]) == 0, name
            shutil.rmtree(tmp_path / "out")
        assert pinned(KEY, NAME) == f"{NAME}@{hub.main}" and kept(folder, cache)
        hub.fault = lambda asked: False


def certified(folder: Path, host: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate that nobody has signed, made now, and a server's end of it."""
    key, certificate = folder / "key.pem", folder / f"{host}.pem"
    what = f"-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} -out {certificate} -days 2"
    name = f"-subj /CN={host} -addext subjectAltName=IP:{host}"
    subprocess.run(f"openssl req -x509 {what} {name}".split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3"])
def test_a_certificate_that_is_not_the_hubs_is_said_and_the_remedy_helps(
    host: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Self-signed, and self-signed for another host; the same for data, whose library hides the reason."""
    import datasets

    server = Hub()
    server.publish(folder)
    certificate, context = certified(tmp_path, host)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"https://127.0.0.1:{server.server_port}"
    files = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    told = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": str(tmp_path / "cache")}
    for name, value in (told | {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}).items():
        monkeypatch.setattr(constants, name, value)
    for name, value in (("HF_ENDPOINT", endpoint), ("HF_DATASETS_CACHE", str(tmp_path / "data"))):
        monkeypatch.setattr(datasets.config, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of tries that change nothing
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{NAME}.*CERTIFICATE_VERIFY_FAILED.*Set SSL_CERT_FILE to"):
        pinned(KEY, NAME)
    with pytest.raises(DataError, match=f"{NAME}.*CERTIFICATE_VERIFY_FAILED.*Set SSL_CERT_FILE to"):
        hub_files(DataConfig(kind="hub", path=NAME))
    assert not list((tmp_path / "cache").rglob("*.json"))
    close_session()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    if host == "127.0.0.1":
        assert pinned(KEY, NAME) == f"{NAME}@{server.main}" and kept(folder, tmp_path / "cache")
    else:
        with pytest.raises(ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.*(mismatch|not valid for)"):
            pinned(KEY, NAME)
    close_session()
    server.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["login", "gated", "repository", "limit", "long wait", "fault", "page", "loop"])
def test_the_hub_of_data_answers_in_words(name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    for key in ("HF_ENDPOINT", "HF_DATASETS_CACHE"):
        value = constants.ENDPOINT if key == "HF_ENDPOINT" else str(tmp_path / key)
        monkeypatch.setattr(datasets.config, key, value)
    fault, words = ANSWERS[name]
    hub.fault = lambda asked: fault(asked) or True
    with pytest.raises(DataError, match=f"(?s){NAME}.*{words.rsplit('.*', 1)[-1]}"):
        hub_files(DataConfig(kind="hub", path=NAME))
    assert hub.slept < 1000  # type: ignore[attr-defined]
