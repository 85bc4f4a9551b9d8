"""When a training loop saves, what it says about it, and what it costs the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from automoe.checkpoint.store import Checkpointed, CheckpointStore
from automoe.config.schema import Config
from automoe.errors import SaveError


class Saver:
    """Saves every ``checkpoint.every`` steps, at the end and when asked to stop; every rank calls every method.

    A save that cannot be written (a full disk) is a warning, and training goes on. The last save of a run
    has no later one to make up for it: it is written before the loop leaves, and a failure is an error.

    Args:
        note, warn: take a line for the user.
    """

    def __init__(
        self,
        store: CheckpointStore,
        config: Config,
        note: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        self.store, self.config, self.note, self.warn = store, config, note, warn
        self.failures = 0  # saves that could not be written, since this process began
        self._blocked_s = 0.0

    def poll(self) -> None:
        """Report a background save that is over; call it once a step.

        Raises:
            Exception: what ended that save, unless it was a write error.
        """
        if self.store.in_flight:
            with self._blocking():
                self._finish(wait=False)

    def due(self, step: int, stopping: bool) -> bool:
        """Whether the state after ``step`` is to be saved."""
        every = self.config.checkpoint.every
        return bool(every) and (step % every == 0 or self._is_last(step, stopping))

    def save(self, state: Checkpointed, val_loss: float | None, stopping: bool) -> None:
        """Save ``state``, in the background with ``checkpoint.async_save`` unless the loop leaves after it.

        A save that is still in flight is waited for.

        Raises:
            SaveError: the last checkpoint of the run could not be written.
        """
        with self._blocking():
            self._finish(wait=True)
            last = self._is_last(state.step, stopping)
            try:
                if self.config.checkpoint.async_save and not last:
                    self.store.begin(state, val_loss)
                else:
                    self._committed(self.store.save(state, val_loss))
            except SaveError as error:
                if last:
                    raise
                self._failed(error)

    def finish(self) -> None:
        """Wait for a save that is in flight, for a loop that leaves without a last save."""
        with self._blocking():
            self._finish(wait=True)

    def record(self, step_seconds: float) -> dict[str, Any]:
        """Keys for a step's metrics: what saving cost the loop since the record before.

        ``checkpoint_seconds`` the loop stood still, ``checkpoint_share`` of the time since then, whether a
        save was in flight during the step, and how many saves have failed. Empty for a run that never saves.
        """
        if not self.config.checkpoint.every:
            return {}
        blocked, self._blocked_s = self._blocked_s, 0.0
        return {
            "checkpoint_seconds": blocked,
            "checkpoint_share": blocked / max(blocked + step_seconds, 1e-9),
            "checkpoint_in_flight": self.store.in_flight,
            "checkpoint_failures": self.failures,
        }

    def _is_last(self, step: int, stopping: bool) -> bool:
        return stopping or step == self.config.train.steps

    def _finish(self, wait: bool) -> None:
        try:
            self._committed(self.store.poll(wait))
        except SaveError as error:
            self._failed(error)

    def _committed(self, step_dir: Path | None) -> None:
        if step_dir is not None:
            self.note(f"checkpoint {step_dir}")

    def _failed(self, error: SaveError) -> None:
        self.failures += 1
        self.warn(f"{error}. Training goes on")

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._blocked_s += time.perf_counter() - started
