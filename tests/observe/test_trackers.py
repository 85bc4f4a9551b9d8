"""Each tracker read back by its own library; W&B in processes of its own, with no login from outside."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from automoe.config.convert import FromEnvironment
from automoe.config.mesh_shape import MeshShape
from automoe.config.metrics import REQUIRED_KEYS
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.schema import Config
from automoe.errors import BackendError, ConfigError
from automoe.launch.hardware import check_backends
from automoe.observe.metrics import MetricsLog
from automoe.observe.trackers import make_trackers
from automoe.observe.trackers.base import hidden

PROGRAM = """
import sys
from pathlib import Path
from automoe.config.schema import Config
from automoe.config.metrics import REQUIRED_KEYS
from automoe.observe.metrics import MetricsLog
from automoe.observe.trackers import make_trackers

config = Config()
config.observe.wandb = sys.argv[1]
config.observe.run_tags, config.observe.run_group = ["small"], "mine"
resumed = "resumed" in sys.argv
tracker = make_trackers(config, Path(sys.argv[2]), 2 if resumed else None)
started = tracker.places
for step in (3, 4) if resumed else (1, 2, 3):
    tracker.log({"step": step, "loss": 5.0 / step, "mfu": None})
    if sys.argv[3:] == ["kill-service"] and step == 1:
        import psutil
        for child in psutil.Process().children(recursive=True):
            child.kill()
            child.wait()
tracker.texts(step, "samples", [{"prompt": "Who?", "text": "<b>I"}])
tracker.finish("done")
print("trained to step", step, "with", "W&B" if started else "nothing", "wandb" in sys.modules)
print(*tracker.places.values())
"""


def run(tmp_path: Path, mode: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    clean |= {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "netrc"), **environment}
    (tmp_path / "home").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, str(tmp_path), *arguments],
        env=clean,
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
    )


def recorded(directory: Path) -> list[Path]:
    return [path for path in directory.glob("wandb/offline-run-*/run-*.wandb") if path.stat().st_size > 0]


def read_wandb(path: Path) -> tuple[tuple, list[tuple[int, float]]]:
    """Id, name, group and tags of a file's run, and (step, loss) of its rows, in their order."""
    from wandb.proto import wandb_internal_pb2

    about, rows, waiting, at, data = (), [], b"", 7, path.read_bytes()  # LevelDB's log format, after 7 bytes
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]  # 1 whole, 2 first, 3 middle, 4 last
        waiting, at = waiting + data[at + 7 : at + 7 + size], at + 7 + size
        if kind not in (1, 4):
            continue
        record = wandb_internal_pb2.Record.FromString(waiting)
        waiting = b""
        if record.HasField("run") and not about:
            about = (record.run.run_id, record.run.display_name, record.run.run_group, list(record.run.tags))
        if record.HasField("history"):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows += [(row["step"], row["loss"])] if "loss" in row else []
            assert "mfu" not in row
    return about, rows


def test_a_new_run_forgets_who_was_here_before(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text(json.dumps({"W&B": "earlier"}))
    make_trackers(Config(), tmp_path, resume_step=3)
    assert (tmp_path / "trackers.json").exists()
    make_trackers(Config(), tmp_path)
    assert not (tmp_path / "trackers.json").exists()


def test_off_does_not_import_wandb(tmp_path):
    done = run(tmp_path, "off")
    assert done.stdout == "trained to step 3 with nothing False\n\n", done.stderr


@pytest.mark.exhaustive
def test_offline_records_the_steps(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = run(tmp_path, "offline", WANDB_DIR=str(tmp_path / "elsewhere"))
    assert "with W&B" in done.stdout, done.stderr
    assert done.stderr == ""
    (path,) = recorded(tmp_path / "elsewhere")
    assert done.stdout.splitlines()[1] == str(path.parent)
    [table] = path.parent.rglob("*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["prompt", "text"], "data": [["Who?", "<b>I"]]}
    done = run(tmp_path, "offline", "resumed", WANDB_DIR=str(tmp_path / "elsewhere"))
    assert done.stdout.startswith("trained to step 4 with W&B"), done.stderr
    runs, rows = zip(*map(read_wandb, sorted(recorded(tmp_path / "elsewhere"))), strict=True)
    # One run, whose repeated step 3 is a second point and not dropped.
    assert rows == ([(1, 5.0), (2, 2.5), (3, 5 / 3)], [(3, 5 / 3), (4, 1.25)])
    assert runs[0] == runs[1] and runs[0][1:] == (tmp_path.name, "mine", ["small"])


@pytest.mark.exhaustive
def test_online_without_a_login_records_offline_after_one_warning(tmp_path):
    done = run(tmp_path, "online")
    assert "trained to step 3 with W&B" in done.stdout, done.stderr
    assert done.stderr.count("\n") == 1 and "no login" in done.stderr and "wandb sync" in done.stderr
    assert len(recorded(tmp_path)) == 1


@pytest.mark.faults
def test_online_without_a_network_records_offline_after_one_warning(tmp_path):
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "5"}
    done = run(tmp_path, "online", **nowhere)
    assert "trained to step 3" in done.stdout, done.stderr
    assert "W&B does not work online" in done.stderr and "wandb sync" in done.stderr
    assert len(recorded(tmp_path)) == 1


def test_training_outlives_the_service_process(tmp_path):
    done = run(tmp_path, "offline", "kill-service")
    assert done.returncode == 0, done.stderr
    assert "trained to step 3" in done.stdout
    assert done.stderr.count("W&B stopped working") == 1


KILLED = """
import os, signal, sys
from pathlib import Path
import psutil
from automoe.config.schema import Config
from automoe.config.metrics import REQUIRED_KEYS
from automoe.observe.metrics import MetricsLog
from automoe.observe.trackers import make_trackers

config, run_dir, begin, end = Config(), Path(sys.argv[1]), *map(int, sys.argv[2:4])
config.observe.wandb = "offline"
resume = begin - 1 or None
with MetricsLog(run_dir, resume, print) as log:
    trackers = make_trackers(config, run_dir, resume)
    for step in range(begin, end + 1):
        record = dict.fromkeys(REQUIRED_KEYS, 0.5) | {"step": step, "mfu": None}
        record["loss"] = 5.0 / step if step % 7 else float("nan")
        log.write(record)
        trackers.log(record)
    for child in psutil.Process().children(recursive=True) if sys.argv[4:] else []:
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL if sys.argv[4:] else 0)
trackers.finish("done")
"""


@pytest.mark.faults
@pytest.mark.parametrize("kills", [[10], [150, 140], [150, 190]], ids=str)
def test_what_an_offline_run_lost_at_a_kill_is_added_by_the_next_start(tmp_path: Path, kills: list[int]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path)}
    begin = 1
    for end, *signals in [*((last, "kill") for last in kills), (kills[-1] + 2,)]:
        words = [sys.executable, "-c", KILLED, str(tmp_path), str(begin), str(end), *signals]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == -9 * len(signals) and not done.stderr, done.stderr
        begin = end - 4  # the newest checkpoint lies five steps back
        time.sleep(1.1)  # W&B names a start's folder by the second
    rows = [row for path in sorted(recorded(tmp_path)) for row in read_wandb(path)[1]]
    last = kills[-1] + 2
    assert {step: str(float(loss)) for step, loss in rows} == {
        step: str(5.0 / step) if step % 7 else "nan" for step in range(1, last + 1)
    }
    # A step stands twice only where it was trained twice.
    assert len(rows) <= last + 5 * len(kills)


def test_what_a_tracker_missed_is_added_when_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config, said = Config(), list[str]()
    config.observe.tensorboard, config.observe.mlflow = True, str(tmp_path / "store")
    trackers = make_trackers(config, tmp_path, None, said.append)
    losses = [9.1, float("nan"), 7.3, 6.4, 5.5, 4.6]
    with MetricsLog(tmp_path, None, said.append) as log:
        for step, loss in enumerate(losses, start=1):
            record = dict.fromkeys(REQUIRED_KEYS, 1.0) | {"step": step, "loss": loss}
            log.write(record)
            log.write_samples(step, [{"prompt": "Who?", "text": f"I{step}"}])
            if step in (1, 2, 4):  # of the others the services know nothing
                trackers.log(record | {"loss": 60.0} if step == 4 else record)  # 4: from an earlier attempt
    with (tmp_path / "tensorboard" / "events.out.cut").open("wb") as cut:
        cut.write((9).to_bytes(8, "little") + b"abcdcu")
    MetricsLog(tmp_path, 5, said.append).close()
    trackers = make_trackers(config, tmp_path, 5, said.append)
    trackers.finish("done")
    assert said == []
    [run] = (client := MlflowClient(config.observe.mlflow)).search_runs(
        ["0", *(e.experiment_id for e in client.search_experiments())]
    )
    points = [(one.step, str(one.value)) for one in client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(points) == sorted([*((n, str(x)) for n, x in enumerate(losses[:5], start=1)), (4, "60.0")])
    assert dict(points)[4] == "6.4", "the later point of a step is last"
    assert len(client.list_artifacts(run.info.run_id, "samples")) == 3
    (tmp_path / "tensorboard" / "events.out.cut").unlink()  # TensorBoard's own reader stops there
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert shown == {n: pytest.approx(x, nan_ok=True) for n, x in enumerate(losses[:5], start=1)}
    # Nothing is sent twice.
    make_trackers(config, tmp_path, 5, said.append).finish("done")
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 6 and said == []


def record_twice(config: Config, run_dir: Path, said: list[str]) -> None:
    """Steps 1 to 5 and a failure; on from step 3, and at step 5 back to step 4."""
    trackers = make_trackers(config, run_dir, None, said.append)
    for step in range(1, 6):
        trackers.log({"step": step, "loss": float(step), "val_loss/a+b": float("nan"), "max_share": [1.0], "mfu": None})
    trackers.finish("failed")
    trackers = make_trackers(config, run_dir, 3, said.append)
    for step in (4, 5):
        trackers.log({"step": step, "loss": 10.0 * step})
        trackers.texts(step, "samples", [{"prompt": "Who?", "text": "# I\n\n<b>"}, {"prompt": "Why?", "text": ""}])
    trackers.rewind(4)
    trackers.log({"step": 5, "loss": 100.0})
    trackers.finish("done")
    trackers.log({"step": 6, "loss": 0.0})  # closed: nothing


def test_tensorboard_and_mlflow_go_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_dir, said = tmp_path / "sweep" / "lr0.1", []
    run_dir.mkdir(parents=True)
    (tmp_path / "sweep" / "sweep.json").touch()
    config, secret = Config(), "sesame"
    config.observe.tensorboard, config.observe.run_tags = True, ["small", "first"]
    config.observe.mlflow = FromEnvironment(str(tmp_path / secret), "${oc.env:STORE}")
    record_twice(config, run_dir, said)
    assert said == []

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 100.0)]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["tags/text_summary"] == "small, first" and "hidden_size: 256" in texts["config/text_summary"]
    assert texts["samples/text_summary"] == "    Who?\n\n    # I\n    \n    <b>\n\n---\n\n    Why?\n\n"

    from mlflow import MlflowClient

    client = MlflowClient(str(tmp_path / secret))
    [run] = client.search_runs([client.get_experiment_by_name("automoe").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["group"]) == ("lr0.1", "FINISHED", "sweep")
    assert run.data.tags["small"] == "true" and run.data.params["model.hidden_size"] == "256"
    values = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(values) == [(1, 1), (2, 2), (3, 3), (4, 4), (4, 40), (5, 5), (5, 50), (5, 100)]
    assert dict(values)[5] == 100, "the later point of a step is last"
    assert run.data.params["observe.mlflow"] == "${oc.env:STORE}"
    assert "val_loss/a_b" in run.data.metrics
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == [
        "samples/step-4.json",
        "samples/step-5.json",
    ]
    assert not [path for path in run_dir.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]

    # A run that starts over leaves the earlier one alone.
    make_trackers(config, run_dir, None, said.append).finish("preempted")
    assert (run_dir / "tensorboard.1").is_dir()
    runs = client.search_runs([run.info.experiment_id])
    assert sorted(one.info.status for one in runs) == ["FINISHED", "KILLED"] and said == []


def test_a_server_that_is_not_there_costs_a_warning_without_its_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config, said = Config(), []
    config.observe.mlflow = FromEnvironment("http://me:ses@me@127.0.0.1:9/hidden", "${oc.env:STORE}")
    trackers = make_trackers(config, tmp_path, None, said.append)
    trackers.log({"step": 1, "loss": 1.0})
    trackers.finish("done")
    assert len(said) == 1 and "MLflow does not work" in said[0] and "training goes on without it" in said[0]
    assert "ses" not in said[0] and "hidden" not in said[0] and not (tmp_path / "trackers.json").exists()


def test_a_server_that_sends_a_byte_now_and_then_holds_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automoe.observe.trackers.mlflow.ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with suppress(OSError):
                taken, _ = server.accept()
                taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while True:
                    taken.sendall(b"x")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        config, said = Config(), []
        config.observe.mlflow = f"http://127.0.0.1:{server.getsockname()[1]}"
        make_trackers(config, tmp_path, None, said.append).log({"step": 1, "loss": 1.0})
    assert len(said) == 1 and "no whole answer to get_experiment_by_name within 0.5 s" in said[0]


@pytest.mark.parametrize(
    "address",
    [
        "https://me:sesame@tracking.org/x",
        "https://sesame@tracking.org",
        "https://me:ses/sesame@tracking.org/x",
        "postgresql://u:p/sesame@h/db",
        "postgresql+psycopg2://u:12/sesame@h/db",
        "postgresql://h/db?user=u&password=sesame",
        "mysql://h/db?ssl_ca=a&AccessToken=sesame",
        "mssql+pyodbc:///?odbc_connect=UID%3Du%3BPWD%3Dsesame",
        "https://tracking.org/x?api_key=sesame#y",
        "tracking.org/x?token=sesame",
    ],
)
def test_a_login_in_an_address_is_refused_without_being_shown(address: str) -> None:
    config = Config()
    config.observe.mlflow = address
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as raised:
        check_rows(config, number_rows(config))
    assert "sesame" not in str(raised.value) and "sesame" not in hidden(f"cannot reach ({address!r}, now)")


@pytest.mark.parametrize(
    "address",
    ["https://tracking.org/@me", "http://localhost:5000/a@b", "http://[::1]:5000/a@b", "sqlite:////home/me@work/a.db"]
    + ["file:///home/me@work", "folder@work", "databricks://profile", "https://a.org?workspace=x", ""],
)
def test_an_address_without_a_login_is_taken_as_it_is(address: str) -> None:
    config = Config()
    config.observe.mlflow = address
    check_rows(config, number_rows(config))
    assert hidden(address) == address


@pytest.mark.parametrize(
    ("key", "value", "package"),
    [
        ("wandb", "offline", "wandb"),
        ("tensorboard", True, "tensorboard"),
        ("mlflow", "folder", "mlflow-skinny"),
        ("mlflow", "sqlite:///a.db", "mlflow"),
    ],
)
def test_a_missing_package_is_an_error_before_training(
    key: str, value: object, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config()
    setattr(config.observe, key, value)
    absent = {"wandb", "tensorboard", "sqlalchemy" if "sqlite" in str(value) else "mlflow"}
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    with pytest.raises(BackendError, match=f"observe.{key}.*is not installed here. pip install {package}"):
        check_backends(config, MeshShape(*[1] * 9), "cpu")
