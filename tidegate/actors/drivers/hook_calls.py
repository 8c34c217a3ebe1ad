"""Calls a job's master hooks: one at a time, and on a thread of their own, because they are code of users.

Rules:

- A call that does not come back holds its own thread and the one that waits for it, never more, however many calls
  follow: those fail after a while. So checkpoints are still written and committed.
- Closing lets the waiting thread go; the hook's thread is a daemon, so a process can end without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from tidegate.actors.drivers.threads import leave_if_forked
from tidegate.connectors.master_hooks import MasterHook
from tidegate.protocol.failure_reasons import failure_text
from tidegate.storage.ids import CheckpointId
from tidegate.storage.user_values import repr_text

TURN_TIMEOUT_S = 10.0
"""How long a call waits for those before it. One that waits holds a thread of the coordinator's."""


class HookError(Exception):
    """A master hook raised, or an earlier call has not come back."""


class HookCalls:
    """The hooks of one job. Thread-safe."""

    def __init__(self, hooks: Sequence[MasterHook], turn_timeout_s: float = TURN_TIMEOUT_S) -> None:
        self._hooks = hooks
        self._turn_timeout_s = turn_timeout_s
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._waiting: Future[object] | None = None
        self._closed = False
        self._running = ""
        self._pid = os.getpid()

    def trigger(self, checkpoint_id: CheckpointId, timestamp_ms: int) -> tuple[tuple[str, bytes], ...]:
        """Call every hook for a checkpoint that starts; returns what is to be kept. HookError."""
        states: list[tuple[str, bytes]] = []

        def call(hook: MasterHook) -> None:
            data = hook.trigger(checkpoint_id, timestamp_ms)
            if data is not None:
                states.append((hook.identifier, bytes(data)))

        self._call_all(call, f"for checkpoint {checkpoint_id}")
        return tuple(states)

    def restore(self, checkpoint_id: CheckpointId, states: Mapping[str, bytes]) -> None:
        """Give every hook what it had kept with a checkpoint. HookError."""
        self._call_all(
            lambda hook: hook.restore(checkpoint_id, states.get(hook.identifier)), f"to restore {checkpoint_id}"
        )

    def close(self) -> None:
        """Nobody waits for an answer any more."""
        with self._guard:
            self._closed = True
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_exception(HookError("the job is over"))

    def _call_all(self, call: Callable[[MasterHook], None], what: str) -> None:
        if not self._turn.acquire(timeout=self._turn_timeout_s):
            raise HookError(f"master hook {self._running} has not come back yet, so none was called {what}")
        done: Future[object] = Future()
        with self._guard:
            self._waiting = done
        try:
            threading.Thread(target=self._run, args=(call, what, done), name="tidegate-hooks", daemon=True).start()
        except RuntimeError as error:
            self._turn.release()
            raise HookError(f"no master hook was called {what}: {error}") from error
        if self._closed:
            self.close()
        done.result()

    def _run(self, call: Callable[[MasterHook], None], what: str, done: Future[object]) -> None:
        error: HookError | None = None
        name = "of unknown identifier"
        try:
            for hook in self._hooks:
                name = repr_text(hook.identifier)
                self._running = f"{name} {what}"
                call(hook)
        except BaseException as raised:  # noqa: BLE001 (code of the user: whatever it raises, also an exit, is told)
            error = HookError(f"master hook {name} raised {failure_text(raised)}")
        leave_if_forked(self._pid)
        self._turn.release()
        with self._guard:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
