"""Master hooks that hang, raise or exit: whatever they do, the coordinator goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from waiting import until

import tidegate as tg
from tidegate.actors.drivers.coordinator_effects import HookCalls, HookError
from tidegate.storage.ids import CheckpointId

WAIT_S = 240


class Hook:
    """Waits in `trigger` until it is let go."""

    identifier = "outside"

    def __init__(self) -> None:
        self.called = threading.Event()
        self.go = threading.Event()
        self.restored: list[int] = []

    def trigger(self, checkpoint_id: int, timestamp_ms: int) -> bytes | None:
        self.called.set()
        self.go.wait(WAIT_S)
        return b"%d" % checkpoint_id

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self.restored.append(checkpoint_id)


class Exits(Hook):
    """Ends its thread."""

    def trigger(self, checkpoint_id: int, timestamp_ms: int) -> bytes | None:
        raise SystemExit(3)


@pytest.fixture
def hook() -> Iterator[Hook]:
    """A hook that is let go in any case."""
    hook = Hook()
    yield hook
    hook.go.set()


def test_a_call_that_does_not_come_back_holds_no_thread_but_its_own(hook: Hook) -> None:
    """The calls after it fail after a while, and say which one they waited for."""
    calls = HookCalls([hook], turn_timeout_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(calls.trigger, CheckpointId(1), 0)
        until("the call", hook.called.is_set)

        for _ in range(3):
            with pytest.raises(HookError, match="'outside' for checkpoint 1 has not returned"):
                calls.trigger(CheckpointId(2), 0)
        with pytest.raises(HookError, match="'outside' for checkpoint 1"):
            calls.restore(CheckpointId(1), {})
        assert hook.restored == [], "one call at a time"

        hook.go.set()
        assert first.result(WAIT_S) == (("outside", b"1"),)
    assert calls.trigger(CheckpointId(3), 0) == (("outside", b"3"),)


def test_nobody_waits_for_a_call_when_the_job_is_over(hook: Hook) -> None:
    """Closing lets the waiting thread go, before and after the call."""
    calls = HookCalls([hook])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(calls.trigger, CheckpointId(1), 0)
        until("the call", hook.called.is_set)
        calls.close()
        assert isinstance(waiting.exception(WAIT_S), HookError)
    late = HookCalls([hook])
    late.close()
    with pytest.raises(HookError, match="the job has ended"):
        late.trigger(CheckpointId(2), 0)


def test_a_hook_that_exits_has_failed() -> None:
    """It is code of the user: it must not take the coordinator's thread with it."""
    with pytest.raises(HookError, match="'outside' raised SystemExit: 3"):
        HookCalls([Exits()]).trigger(CheckpointId(1), 0)


def test_a_job_whose_hook_hangs_can_be_cancelled_and_ends(tmp_path: Path, hook: Hook) -> None:
    """The checkpoint expires, whoever asked is told, and the job's thread ends though the hook has not come back."""
    with tg.StreamEnvironment.local(1) as env:
        stream = env.from_batches(pa.table({"x": [1, 2, 3]}).to_batches(), uid="source")
        stream.to_table(str(tmp_path / "table"), uid="table")
        job = env.execute(
            "hung",
            checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "chk"), timeout="1h"),
            hooks=[hook],
        )
        until("the final checkpoint", hook.called.is_set)
        mine = [t for t in threading.enumerate() if t.name == "tidegate-hung"]
        job.cancel()
        assert job.wait("4min") == "cancelled"
        for thread in mine:
            thread.join(WAIT_S)
        assert [t.is_alive() for t in mine] == [False]
