"""The pace of large snapshots: who pauses, when, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidegate.actors.drivers.write_pace import (
    FREE_MS,
    PARTS,
    PAUSED_MS_MAX,
    STEP_MS,
    PacedStore,
    Usage,
    WritePace,
    paused_ms_max,
    usage_of_this_thread,
)
from tidegate.storage.files.file_system_store import FileSystemStore

_LIMIT_MS = 20_000


class _Machine:
    """A thread that writes on processors that others want as well."""

    def __init__(self, others: float = 1.0, waited: float | None = 1.0, limit_ms: int = _LIMIT_MS) -> None:
        self.others, self.waited = others, waited
        self.own_ms = self.process_ms = self.waited_ms = 0.0
        self.pace = WritePace(limit_ms)
        self.pauses_ms: list[float] = []
        self.asked = 0
        self.pace.begin(self.usage())

    def usage(self) -> Usage:
        """As it is now."""
        self.asked += 1
        return Usage(self.own_ms, self.process_ms, None if self.waited is None else self.waited_ms)

    def own(self) -> float:
        """What the thread has used."""
        return self.own_ms

    def run(self, ms: float) -> None:
        """The thread runs so long. For each ms of it the others run `others`, and it waits `waited`."""
        self.own_ms += ms
        self.process_ms += ms + ms * self.others
        self.waited_ms += ms * (self.waited or 0)

    def write(self, ms: float, step_ms: float = STEP_MS) -> float:
        """Run so long, with a decision after each step. Returns the pauses in all."""
        pauses_ms = 0.0
        for _ in range(round(ms / step_ms)):
            self.run(step_ms)
            if pause_ms := self.pace.pause_ms(self.usage()):
                pauses_ms += pause_ms
                self.pause(pause_ms / 1000)
                self.pace.begin(self.usage())
        return pauses_ms

    def pause(self, seconds: float) -> None:
        """Others run meanwhile."""
        self.process_ms += seconds * 1000 * self.others
        self.pauses_ms.append(seconds * 1000)


def test_a_small_snapshot_is_written_without_a_pause() -> None:
    """Also in small steps, of which none alone is looked at."""
    machine = _Machine()
    assert machine.write(FREE_MS) == 0
    assert _Machine().write(FREE_MS, step_ms=1) == 0
    assert machine.write(STEP_MS) == (PARTS - 1) * STEP_MS


@pytest.mark.parametrize("waited", [0.2, 1.0, None])
def test_a_large_one_takes_its_part_of_the_time(waited: float | None) -> None:
    """What is beyond the free part takes one part in `PARTS` of the time, whatever the steps; also where nobody tells
    who waits for a processor."""
    for step_ms in (STEP_MS / 4, STEP_MS, 5 * STEP_MS):
        machine = _Machine(waited=waited)
        assert machine.write(FREE_MS + 1_000, step_ms) == (PARTS - 1) * 1_000


@pytest.mark.parametrize(("others", "waited"), [(0.0, 1.0), (0.24, 1.0), (1.0, 0.0), (1.0, 0.09)])
def test_nobody_pauses_for_nothing(others: float, waited: float) -> None:
    """Where nothing else is done in the process, or a processor is free."""
    assert _Machine(others, waited).write(5_000) == 0


def test_pauses_have_a_limit() -> None:
    """Then it goes on as fast as can be. The limit leaves most of the timeout, and half of the interval."""
    assert _Machine(limit_ms=1_500).write(FREE_MS + 5_000) == 1_500
    assert paused_ms_max(600_000, None) == PAUSED_MS_MAX
    assert paused_ms_max(600_000, 1_000) == 500
    assert paused_ms_max(2_000, 60_000) == 200
    assert paused_ms_max(10, 10) == 1


def test_files_of_a_snapshot_share_the_pace() -> None:
    """Between chunks, in the order and with the bytes of the file; time between two files counts for nothing."""
    machine = _Machine(limit_ms=(PARTS + 2) * STEP_MS)
    store = FileSystemStore("memory://paced-store-tests")
    paced = PacedStore(store, machine.pace, machine.pause, machine.usage, machine.own)

    def chunks() -> Iterator[bytes]:
        for number in range(5):
            machine.run(FREE_MS / 5 if not machine.pauses_ms else STEP_MS)
            yield bytes([number])

    assert paced.write("a", chunks()) == 5
    assert store.read("a") == bytes(range(5))
    assert machine.pauses_ms == []
    machine.run(1_000)
    assert paced.write("b", chunks()) == 5
    assert machine.pauses_ms == [(PARTS - 1) * STEP_MS, 3 * STEP_MS]


def test_what_runs_during_a_pause_counts_for_nothing() -> None:
    """The others have done what there was to do: there is no second pause."""
    machine = _Machine()
    paced = PacedStore(
        FileSystemStore("memory://paced-store-tests"), machine.pace, machine.pause, machine.usage, machine.own
    )

    def chunks() -> Iterator[bytes]:
        for _ in range(3):
            machine.run(FREE_MS + STEP_MS)
            yield b"-"
            machine.others = 0.0

    assert paced.write("c", chunks()) == 3
    assert machine.pauses_ms == [(PARTS - 1) * (FREE_MS + STEP_MS)]


def test_what_all_threads_have_used_is_asked_once_in_a_step() -> None:
    """A snapshot of many small chunks costs no question for each of them."""
    machine = _Machine()
    paced = PacedStore(
        FileSystemStore("memory://paced-store-tests"), machine.pace, machine.pause, machine.usage, machine.own
    )

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            machine.run(STEP_MS / 20)
            yield b"-"

    machine.asked = 0
    assert paced.write("d", chunks()) == 100
    assert machine.asked == 1 + 100 // 20


def test_this_thread() -> None:
    """What it has run counts for it and for its process. The two are not read at the same moment."""
    before = usage_of_this_thread()
    sum(range(200_000))
    after = usage_of_this_thread()

    assert after.own_ms > before.own_ms
    assert after.process_ms > before.process_ms
    assert (after.waited_ms is None) == (before.waited_ms is None)
