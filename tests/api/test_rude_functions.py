"""Code of users that does what nobody expects: whatever it raises has failed its task, and the job says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config, finish, local
from rude import RAISED

import tidegate as tg
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.table_files import read_table

SCHEMA = pa.schema([("k", pa.int64())])
TABLE = pa.table({"k": [1, 2, 3]}, SCHEMA)
ONCE = tg.RestartStrategy.fixed_delay(1, "1ms")


class Rude(tg.ProcessFunction):
    """Raises in one of its methods."""

    def __init__(self, place: str, error: BaseException) -> None:
        self.place, self.error = place, error

    def at(self, place: str) -> None:
        if place == self.place:
            raise self.error

    def __deepcopy__(self, memo: dict[int, Any]) -> Rude:
        if threading.current_thread() is not threading.main_thread():  # There it is refused at once.
            self.at("copy")
        return Rude(self.place, self.error)

    def open(self, context: tg.ProcessContext) -> None:
        self.at("open")

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        context.timer_service.register_event_time_timer(0)
        self.at("process")
        yield row

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> None:
        self.at("on_timer")

    def finish(self, context: tg.ProcessContext) -> None:
        self.at("finish")


class RudeSource:
    """Raises in one of its methods."""

    schema = SCHEMA

    def __init__(self, place: str, error: BaseException) -> None:
        self.place, self.error = place, error

    def at(self, place: str) -> None:
        if place == self.place:
            raise self.error

    def splits(self) -> list[tg.SourceSplit]:
        return [tg.SourceSplit("all", b"", 3)]

    def reader(self) -> RudeSource:
        self.at("reader")
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        self.at("read")
        return tg.ReadResult(TABLE.to_batches()[0], 3, True)

    def close(self) -> None:
        self.at("source close")


def fails(job: tg.Job, restarts: int = 1) -> str:
    """What is told of a job that has failed after its one restart, or at once."""
    with pytest.raises(tg.JobFailedError) as failed:
        job.wait("4min")
    assert job.status() == "failed"
    assert job.progress().restarts == restarts, "the restart strategy was asked, unless no restart can help"
    text = str(failed.value)
    assert len(text) < 10_000
    text.encode()
    return text


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("place", ["copy", "open", "process", "on_timer", "finish", "reader", "read"])
def test_whatever_code_of_the_user_raises_has_failed_its_task(tmp_path: Path, place: str, raised: str) -> None:
    """As a JobFailedError with the name of what was raised, after the restarts; what can't be copied never can."""
    error = RAISED[raised]()
    with local(1) as env:
        rows = env.from_source(RudeSource(place, error))
        rows.key_by("k").process(Rude(place, error), schema=SCHEMA).collect()
        # No restart helps against a function that cannot be copied.
        restarts = 0 if place == "copy" else 1
        job = env.execute("rude", checkpoints=config(tmp_path), restart=ONCE)
        assert raised in fails(job, restarts)


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("kind", ["map", "flat_map", "filter_rows", "map_batches"])
def test_functions_without_state_too(tmp_path: Path, kind: str, raised: str) -> None:
    """And those over batches."""

    def rude(argument: object) -> NoReturn:
        raise RAISED[raised]()

    with local(1) as env:
        rows: Any = env.from_batches(TABLE.to_batches())
        method: Callable[..., Any] = rows.filter if kind == "filter_rows" else getattr(rows, kind)
        (method(rude) if kind == "filter_rows" else method(rude, schema=SCHEMA)).collect()
        job = env.execute("rude", checkpoints=config(tmp_path), restart=ONCE)
        text = fails(job)
        assert raised in text
        assert f"operator '{'filter' if kind == 'filter_rows' else kind}'" in text


def test_what_closing_raises_holds_up_nobody(tmp_path: Path) -> None:
    """The task is over by then."""
    with local(1) as env:
        collected = env.from_source(RudeSource("source close", SystemExit(3))).collect()
        finish(env, tmp_path)
        assert len(collected.to_arrow()) == 3


def test_a_function_may_change_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths were made absolute when the job was submitted; not even a folder that is gone matters."""
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"

    def leave(row: dict[str, Any]) -> dict[str, Any]:
        gone.mkdir(exist_ok=True)
        os.chdir(gone)
        gone.rmdir()
        return row

    with local(1) as env:
        env.from_batches(TABLE.to_batches()).map(leave, schema=SCHEMA).to_table("table")
        finish(env, "checkpoints")
    os.chdir(tmp_path)
    assert len(read_table(open_store(str(tmp_path / "table")))) == 3


def test_a_real_interrupt_reaches_the_driver(tmp_path: Path) -> None:
    """Somebody presses Ctrl-C while the driver waits: it stops waiting, and the job is none the worse."""
    pressed, waiting, go = threading.Event(), threading.Event(), threading.Event()
    # A test process may ignore interrupts, as those of a run of several do.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(batch: pa.RecordBatch) -> pa.RecordBatch:
        if not pressed.is_set():
            pressed.set()
            assert waiting.wait(240)
            os.kill(os.getpid(), signal.SIGINT)
        assert go.wait(240)
        return batch

    with local(1) as env:
        env.from_batches(TABLE.to_batches()).map_batches(interrupt, schema=SCHEMA).collect()
        job = env.execute("interrupted", checkpoints=config(tmp_path), restart=NO_RESTART)

        def wait() -> None:
            waiting.set()
            job.wait("4min")

        try:
            with pytest.raises(KeyboardInterrupt):
                wait()
        finally:
            signal.signal(signal.SIGINT, before)
            go.set()
        assert job.wait("4min") == "finished"


BLOCKED = """
import sys, threading
import pyarrow as pa
import tidegate as tg

class Blocked:
    schema = pa.schema([("k", pa.int64())])
    def __init__(self): self.reading = threading.Event()
    def splits(self): return [tg.SourceSplit("all", b"", 3)]
    def reader(self): return self
    def read(self, split, offset, rows_max):
        self.reading.set()
        threading.Event().wait()
    def close(self): pass

def start(name):
    env, source = tg.StreamEnvironment.local(1), Blocked()
    env.from_source(source).collect()
    job = env.execute(name, checkpoints=tg.CheckpointConfig(storage=sys.argv[1]))
    assert source.reading.wait(240)
    return env, job

env, job = start("cancelled")
job.cancel()
assert job.wait("4min") == "cancelled"
closed, _ = start("closed")
closed.close()
left = start("left behind")
print("the end")
"""


@pytest.mark.slow
def test_a_read_that_blocks_keeps_no_process_from_ending(tmp_path: Path) -> None:
    """Not after the job was cancelled, nor after its environment was closed, nor when the driver just ends."""
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.stdout, ended.returncode) == ("the end\n", 0), ended.stderr
