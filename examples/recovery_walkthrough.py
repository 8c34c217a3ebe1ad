"""Recovery, step by step: kill a job, restore it, change its program, repair its state, and find it again.

    .venv/bin/python examples/recovery_walkthrough.py

Clicks come in for as long as the job runs; the job counts them by user. Click number i is always the same one, so a
table of counts can be checked: it must be the counts of the first n clicks, for some n. One click less, or one that
was counted twice, and there is no such n. The script checks that after each step. It needs neither Ray nor Spark; on
Ray the same calls do the same (docs/recovery.md).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import tidegate as tg
from tidegate import recovery

USERS = 7
READ_S, LOOK_S, WAIT_S = 0.01, 0.05, 60.0
CLICKS = pa.schema({"user": pa.string(), "page": pa.int64()})
VISITED = pa.schema({"user": pa.string(), "pages": pa.int64()})


class Clicks:
    """A source without an end: some clicks every few milliseconds."""

    schema = CLICKS

    def splits(self) -> Sequence[tg.SourceSplit]:
        """One; nobody knows how long it is."""
        return [tg.SourceSplit("clicks", b"")]

    def reader(self) -> tg.SourceReader:
        """Reads by the number of the first click."""
        return ClickReader()


class ClickReader:
    """See `Clicks`."""

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """The next clicks, once they are there. The same numbers give the same clicks, always."""
        threading.Event().wait(READ_S)
        numbers = range(offset, offset + min(rows_max, 50))
        columns = {"user": [f"user-{i % USERS}" for i in numbers], "page": [i // 100 % 5 for i in numbers]}
        return tg.ReadResult(pa.record_batch(columns, CLICKS), numbers.stop, False)

    def close(self) -> None:
        """Nothing is open."""


class Pages(tg.ProcessFunction):
    """On how many pages each user was: the changed program has this operator in addition."""

    def open(self, context: tg.ProcessContext) -> None:
        """The pages that were seen."""
        self.seen = context.state(tg.MapState("seen", pa.int64(), pa.bool_()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Tell of a page that is new."""
        if row["page"] not in self.seen:
            self.seen.put(row["page"], True)
            yield {"user": row["user"], "pages": len(list(self.seen.keys()))}


def build(env: tg.StreamEnvironment, folder: Path, with_pages: bool = False) -> tg.OutputTable:
    """The program. State finds its operator again by the `uid`."""
    by_user = env.from_source(Clicks(), uid="clicks", parallelism=1).key_by("user")
    if with_pages:
        visited = by_user.process(Pages(), schema=VISITED, uid="pages")
        visited.to_table(str(folder / "pages"), mode="upsert", keys=["user"], uid="pages-table")
    counts = by_user.aggregate(n=tg.count(), uid="counts")
    return counts.to_table(str(folder / "counts"), mode="upsert", keys=["user"], uid="counts-table")


@contextmanager
def running(folder: Path, restore: str | None = None, **changes: bool) -> Iterator[tuple[tg.Job, tg.OutputTable]]:
    """The program, executed. `restore`: the path of a checkpoint or savepoint, or "latest"."""
    checkpoints = tg.CheckpointConfig(storage=str(folder / "checkpoints"), interval="100ms", savepoints=str(folder))
    with tg.StreamEnvironment.local(parallelism=2) as env:
        table = build(env, folder, **changes)
        yield env.execute("clicks", checkpoints=checkpoints, restore=restore), table


def await_checkpoint(folder: Path, after: int) -> int:
    """Wait until the newest checkpoint of the job is newer than this one; its number."""
    for _ in range(int(WAIT_S / LOOK_S)):
        newest = recovery.latest(str(folder / "checkpoints"), job="clicks")
        if newest is not None and newest.checkpoint_id > after:
            return newest.checkpoint_id
        threading.Event().wait(LOOK_S)
    raise TimeoutError(f"no checkpoint after number {after} within {WAIT_S:g} s")


def checked(table: tg.OutputTable, forgotten: str | None = None) -> int:
    """How many clicks the table counts. RuntimeError if they are not the first ones, each of them once."""
    rows = table.to_arrow()
    found: dict[str, int] = {row["user"]: row["n"] for row in rows.to_pylist() if row["user"] != forgotten}
    total = sum(found.values())
    if forgotten is not None:
        total += total // (USERS - 1)
    expected = {f"user-{user}": len(range(user, total, USERS)) for user in range(USERS)}
    if any(expected[user] != n for user, n in found.items()):
        raise RuntimeError(f"{found} are not the counts of the first {total} clicks")
    return total


def kill_a_driver(folder: Path) -> None:
    """Step 1: another script runs the job. It is killed as it goes."""
    driver = subprocess.Popen([sys.executable, __file__, str(folder)])
    try:
        await_checkpoint(folder, after=1)
    finally:
        driver.kill()
        driver.wait()
    print("1. a driver was killed while its job ran; its checkpoints are there:")
    print(f"   {recovery.latest(str(folder / 'checkpoints'), job='clicks')}")


def go_on(folder: Path) -> str:
    """Step 2: the newest checkpoint is restored; the job goes on, and stops with a savepoint."""
    with running(folder, "latest") as (job, table):
        await_checkpoint(folder, await_checkpoint(folder, after=0))
        savepoint = job.stop()
        print(f"2. restored and stopped: the first {checked(table)} clicks are counted, each of them once")
    return savepoint


def change_the_program(folder: Path, savepoint: str) -> str:
    """Step 3: an operator comes, and may only go again when that is said."""
    with running(folder, savepoint, with_pages=True) as (job, table):
        await_checkpoint(folder, await_checkpoint(folder, after=0))
        changed = job.stop()
        print(f"3. with one more operator {checked(table)} clicks are counted; without it again:")
    try:
        with running(folder, changed):
            raise RuntimeError("state was left behind, and nobody has asked for it")
    except tg.ConfigurationError as error:
        print(textwrap.indent(f"refused: {error}", "   "))
    return changed


def repair_the_state(folder: Path, savepoint: str) -> str:
    """Step 4: a user wants to be forgotten. The state is read, corrected and written as a new savepoint."""
    counts = recovery.read_state(savepoint, uid="counts")
    others = counts.filter(pc.not_equal(counts["user"], "user-6"))
    with recovery.SavepointWriter(str(folder / "repaired"), base=savepoint) as writer:
        writer.with_keyed_state(uid="counts", keys=["user"], state="aggregate", rows=others)
    changes = recovery.diff(savepoint, writer.path, keys=True)
    print("4. user-6 is forgotten; what has changed in the state, by keys:")
    for operator in changes.operators:
        for state in operator.states:
            if state.keys is not None:
                print(f"   {operator.uid}, {state.state}: {state.keys}")
    return writer.path


def attach(folder: Path, savepoint: str) -> None:
    """Step 5: the repaired savepoint is restored, and another environment finds the job by its name."""
    with running(folder, savepoint, with_pages=True) as (_, table), tg.StreamEnvironment.local() as other:
        job = other.attach("clicks")
        await_checkpoint(folder, await_checkpoint(folder, after=0))
        job.stop()
        print(
            f"5. attached to {job.name}, which has counted {checked(table, forgotten='user-6')} clicks: {job.status()}"
        )


def main(folder: Path) -> None:
    """All steps."""
    kill_a_driver(folder)
    changed = change_the_program(folder, go_on(folder))
    attach(folder, repair_the_state(folder, changed))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with running(Path(sys.argv[1])) as (endless, _):
            endless.wait()
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
