"""MLflow tracker, which writes to a server or a folder (``observe.mlflow=URI``)."""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from automoe.config.convert import FromEnvironment
from automoe.config.frozen import flat
from automoe.config.schema import Config
from automoe.errors import import_backend
from automoe.observe.trackers.base import About, Numbers, Outcome, Texts, Tracker, hidden, one_line

STATUS: dict[Outcome, str] = {"done": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}
# Limits of one request, during which training waits. MLflow's own are two minutes and seven
# retries.
WAITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

ANSWER_S = 60.0  # longest call in seconds, with its retries


class _Answering:
    """Wrapper of MLflow's client whose calls raise ``TimeoutError`` after 60 seconds.

    MLflow's own timeout does not end a call if the server sends a byte now and then. Each call runs
    in a thread, which is abandoned after the timeout.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            answer = Future()

            def work() -> None:
                try:
                    answer.set_result(getattr(self._client, name)(*args, **options))
                except Exception as error:
                    answer.set_exception(error)

            threading.Thread(target=work, daemon=True).start()
            if not wait([answer], ANSWER_S).done:
                raise TimeoutError(f"no whole answer to {name} within {ANSWER_S:g} s")
            return answer.result()

        return call


class MlflowTracker(Tracker):
    """Tracker that writes to an MLflow run on a server or in a folder.

    MLflow cannot remove points: a step that runs twice has two points.
    """

    def __init__(self, client: Any, run: Any, place: str) -> None:
        self._client = client
        self.id = str(run.info.run_id)
        self.places = {"MLflow": f"{place}, run {self.id}"}

    def held(self) -> dict[int, float | None]:
        return {
            metric.step: metric.value for metric in self._client.get_metric_history(self.id, "loss")
        }

    def log(self, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w\-./ :]", "_", key), value, now, step)
            for key, value in numbers.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def texts(self, step: int, name: str, rows: Texts) -> None:
        content = {"step": step, name: [dict(row) for row in rows]}
        self._client.log_dict(self.id, content, f"{name}/step-{step}.json")

    def finish(self, outcome: Outcome) -> None:
        self._client.set_terminated(self.id, STATUS[outcome])


def start(config: Config, about: About) -> MlflowTracker:
    """Start an MLflow run, or continue the run of an earlier start.

    If the server no longer has that run, a new one is started with a warning.

    Args:
        about: name, tags, configuration and earlier id of the run.
    """
    uri = config.observe.mlflow
    shown = uri.written if isinstance(uri, FromEnvironment) else hidden(uri)
    for name, value in (WAITS | {"MLFLOW_DISABLE_TELEMETRY": "true"}).items():
        os.environ.setdefault(name, value)
    if "://" not in uri:  # MLflow requires this variable before it writes to a folder.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = str(Path(uri).expanduser().absolute())
    mlflow = import_backend("mlflow", f"observe.mlflow={shown}", "pip install mlflow-skinny")
    client = _Answering(mlflow.MlflowClient(tracking_uri=str(uri)))
    if about.earlier:
        try:
            client.update_run(about.earlier, status="RUNNING")
            return MlflowTracker(client, client.get_run(about.earlier), shown)
        except mlflow.exceptions.MlflowException as error:
            about.warn(
                f"MLflow does not have run {about.earlier} ({one_line(error, config)}); it begins a new one"
            )
    title = config.observe.mlflow_experiment
    experiment = client.get_experiment_by_name(title)
    number = experiment.experiment_id if experiment is not None else client.create_experiment(title)
    tags = {tag: "true" for tag in about.tags} | ({"group": about.group} if about.group else {})
    run = client.create_run(number, run_name=about.name, tags=tags)
    values = [mlflow.entities.Param(key, str(value)) for key, value in flat(about.config).items()]
    for first in range(0, len(values), 100):  # a request takes at most 100 parameters
        client.log_batch(run.info.run_id, params=values[first : first + 100])
    return MlflowTracker(client, run, shown)
