"""What tests of `for_each_checkpoint` share: a function that remembers its calls, and a program around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from local_jobs import NO_RESTART, WAIT_S, GatedSource, config, local, opening
from waiting import until

import tidegate as tg

ROWS = 40


class Calls:
    """A function for `for_each_checkpoint`: remembers ids and rows of its calls. `before` may raise, or wait."""

    def __init__(self, before: Callable[[int], object] = lambda number: None) -> None:
        self.all: list[tuple[int, list[int]]] = []
        self._before = before

    def __call__(self, df: pa.Table, checkpoint_id: int) -> None:
        """A call that has worked is remembered after `before`."""
        self._before(checkpoint_id)
        self.all.append((checkpoint_id, df["x"].to_pylist()))

    def await_calls(self, count: int) -> None:
        """Wait until there were so many."""
        until(f"{count} calls", lambda: len(self.all) >= count, lambda: self.all)

    @property
    def ids(self) -> list[int]:
        """Of the calls, in order."""
        return [number for number, _ in self.all]

    @property
    def rows(self) -> list[int]:
        """Of all calls."""
        return sorted(x for _, xs in self.all for x in xs)

    @property
    def by_id(self) -> list[int]:
        """What somebody has who takes the rows of an id once."""
        return sorted(x for xs in dict(self.all).values() for x in xs)


class HeldCalls(Calls):
    """Calls from an id on wait until they may `go` on, and raise the error then, if there is one.

    A call that its driver has left behind must raise one: else it is noted when nobody expects that any more.
    """

    def __init__(self, error: Exception | None = None, from_id: int = 0) -> None:
        super().__init__(self._hold)
        self.go = threading.Event()
        self._called = threading.Event()
        self._error = error
        self._from_id = from_id

    def await_call(self) -> None:
        """Wait for the first one that waits."""
        until("a call", self._called.is_set)

    def _hold(self, number: int) -> None:
        if number < self._from_id:
            return
        self._called.set()
        assert self.go.wait(WAIT_S), "nobody let the call go on"
        if self._error is not None:
            raise self._error


def calling(
    env: tg.StreamEnvironment, source: GatedSource, calls: Callable[[pa.Table, int], object], **options: int
) -> None:
    """The whole program."""
    env.from_source(source, uid="source").for_each_checkpoint(calls, uid="out", **options)


@dataclass(frozen=True)
class Running:
    """A job that runs, up to a gate of its source; `paths` are those of its checkpoints."""

    env: tg.StreamEnvironment
    source: GatedSource
    job: tg.Job
    paths: list[str]


@contextmanager
def running(folder: Path, calls: Callable[[pa.Table, int], object], *gates: int, **options: int) -> Iterator[Running]:
    """The program over 40 rows, with a checkpoint at each gate but the last."""
    with opening(GatedSource(ROWS, gates=gates)) as source, local(1) as env:
        calling(env, source, calls, **options)
        job = env.execute("calls", checkpoints=config(folder, num_retained=9), restart=NO_RESTART)
        try:
            yield Running(env, source, job, [checkpoint_at(source, job, gate) for gate in gates[:-1]])
        except BaseException:
            if isinstance(calls, HeldCalls):
                calls.go.set()  # The end of the environment waits for the call.
            raise


def checkpoint_at(source: GatedSource, job: tg.Job, gate: int) -> str:
    """Take a checkpoint of all rows before a gate, and open that; the checkpoint's path."""
    source.await_gate(gate)
    path = job.trigger_checkpoint("4min")
    source.open_gate(gate)
    return path


def interrupted(folder: Path, calls: Calls, *gates: int, called: int | None = None) -> list[str]:
    """A job with a checkpoint at each gate but the last, where it is cancelled; paths of the checkpoints.

    With `called` it is cancelled when so many calls have come back.
    """
    with running(folder, calls, *gates) as now:
        now.source.await_gate(gates[-1])
        calls.await_calls(len(now.paths) if called is None else called)
        until("all commits", lambda: commits(folder) >= len(now.paths), lambda: commits(folder))
        now.job.cancel()
        assert now.job.wait("4min") == "cancelled"
    return now.paths


def commits(folder: Path) -> int:
    """How many commits there are in the log of the first job's table."""
    logs = list(folder.glob("*/taskowned/collect-out/_tidegate/log"))
    return len(list(logs[0].iterdir())) - 2 if logs else 0


def resumed(folder: Path, calls: Calls, restore: str = "latest") -> tg.Job:
    """The same program again, to its end."""
    with local(1) as env:
        calling(env, GatedSource(ROWS), calls)
        job = env.execute("calls", checkpoints=config(folder, num_retained=9), restart=NO_RESTART, restore=restore)
        assert job.wait("4min") == "finished"
    return job
