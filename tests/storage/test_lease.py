"""A lease says whether its job lives: by its renewals, and at once where it is known that its process is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.recovery.deletion_permits import GRACE_MS_DEFAULT, may_run
from tidegate.recovery.sweeper import sweep
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.checkpoints.lease import (
    CLOCKS_DIFFER_MS_MAX,
    Lease,
    Life,
    delete_lease,
    hold_lease,
    is_alive,
    life_of,
    read_lease,
    release_lease,
    why_alive,
    write_lease,
)
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import Generation, JobId
from tidegate.storage.process_id import ProcessId, is_there, this_process

JOB = JobId("job-12345678")
LEASE_MS = 1_000
AT_MS = 1_000_000
EXPIRES_MS = AT_MS + LEASE_MS + CLOCKS_DIFFER_MS_MAX
ELSEWHERE = ProcessId("another host", "another place", 1, "5")


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A checkpoint root with nothing in it."""
    return open_store(str(tmp_path))


def lease(holder: ProcessId = ELSEWHERE, token: str = "", driver: ProcessId | None = None) -> Lease:
    """A lease that was renewed at `AT_MS`."""
    return Lease(JOB, "job", holder, token, AT_MS, LEASE_MS, driver=driver)


def gone() -> ProcessId:
    """A process that was, until a moment ago, on this machine."""
    script = (
        "from tidegate.storage.process_id import this_process as t; p = t(); print(p.host, p.place, p.pid, p.began)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    host, place, pid, began = done.stdout.split()
    return ProcessId(host, place, int(pid), began)


def test_a_process_is_known_again() -> None:
    """By its place, its number and its beginning; of another place nothing is known."""
    own = this_process()

    assert is_there(own)
    assert is_there(replace(own, began="1")) is False
    assert is_there(ELSEWHERE) is None
    assert is_there(gone()) is False


def test_a_dead_process_that_nobody_has_waited_for_is_gone() -> None:
    """Its entry in the table of processes stays until its parent asks for it."""
    script = "from tidegate.storage.process_id import this_process as t; print(t().began, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        process = replace(this_process(), pid=child.pid, began=child.stdout.readline().decode().strip())
        assert is_there(process)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_there(process) is False


def test_it_lives_as_long_as_it_is_renewed() -> None:
    """And for the margin in which clocks may differ."""
    held = lease()

    assert life_of(held, EXPIRES_MS) is Life.UNKNOWN
    assert life_of(held, EXPIRES_MS + 1) is Life.DEAD
    assert life_of(held.renewed(AT_MS + 1), EXPIRES_MS + 1) is Life.UNKNOWN
    assert life_of(held.ended_at(AT_MS), AT_MS) is Life.DEAD
    assert life_of(held, 0) is Life.UNKNOWN, "a clock was set back: nobody knows how old the lease is"


def test_the_end_of_its_process_is_the_end_of_its_job() -> None:
    """Unless a driver lives that starts another one; a process of many jobs knows which it has."""
    dead, own = gone(), this_process()

    assert life_of(lease(dead), AT_MS) is Life.DEAD
    assert life_of(lease(own), AT_MS) is Life.ALIVE
    assert life_of(lease(own), EXPIRES_MS + 1) is Life.DEAD
    assert life_of(lease(own, token="never held"), AT_MS) is Life.DEAD
    assert life_of(lease(dead, driver=own), AT_MS) is Life.UNKNOWN
    assert life_of(lease(dead, driver=dead), AT_MS) is Life.DEAD
    assert life_of(lease(dead, driver=ELSEWHERE), AT_MS) is Life.UNKNOWN
    assert life_of(lease(own, driver=dead), AT_MS) is Life.UNKNOWN, "Ray ends what its driver leaves behind"
    assert life_of(lease(own, driver=own), AT_MS) is Life.ALIVE
    hold_lease("held")
    assert life_of(lease(own, token="held"), AT_MS) is Life.ALIVE
    release_lease("held")
    assert life_of(lease(own, token="held"), AT_MS) is Life.DEAD


def test_it_is_read_as_it_was_written(store: FileSystemStore) -> None:
    """A job without a lease is not alive; one with a damaged one has to be taken for it."""
    assert read_lease(store, JOB) is None
    assert not is_alive(store, JOB, AT_MS)
    write_lease(store, lease(driver=this_process()))
    assert read_lease(store, JOB) == lease(driver=this_process())
    assert is_alive(store, JOB, AT_MS)
    assert not is_alive(store, JOB, EXPIRES_MS + 1)

    path = Path(store.url, JOB, "lease")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=str(path)):
        read_lease(store, JOB)
    assert is_alive(store, JOB, EXPIRES_MS + 1)
    delete_lease(store, JOB)
    assert not is_alive(store, JOB, AT_MS)


def test_nothing_of_a_living_job_is_swept(store: FileSystemStore) -> None:
    """However old the newest entry of its log is; what a dead one has left goes, however young that entry is."""
    EventLog(store, JOB).append(LogEntry(0, Generation(1), 5, "nonce", (), 0, ()))
    store.write(f"{JOB}/chk-1/map-0", [b"state"])
    written_ms = max(file.modified_at_ms or 0 for file in store.walk(JOB))
    late_ms = written_ms + 2 * GRACE_MS_DEFAULT
    write_lease(store, replace(lease(), renewed_at_ms=late_ms))

    assert may_run(store, JOB, late_ms)
    with pytest.raises(
        ConfigurationError, match="may be running, because its lease was renewed by process 1 on another host"
    ):
        sweep(store, JOB, now_ms=late_ms, dry_run=False)
    assert store.exists(f"{JOB}/chk-1/map-0")

    write_lease(store, lease().ended_at(late_ms))
    assert not may_run(store, JOB, written_ms)
    assert [orphan.path for orphan in sweep(store, JOB, now_ms=late_ms, dry_run=False)] == [f"{JOB}/chk-1/map-0"]


def test_nothing_is_deleted_as_long_as_its_process_is_there(store: FileSystemStore) -> None:
    """Nobody renews a lease on a full disk, and to sweep is what one does then."""
    EventLog(store, JOB).append(LogEntry(0, Generation(1), 5, "nonce", (), 0, ()))
    write_lease(store, lease(this_process()))

    assert not is_alive(store, JOB, EXPIRES_MS + 1)
    assert may_run(store, JOB, EXPIRES_MS + 1)
    assert (why_alive(store, JOB) or "").startswith(f"because process {os.getpid()} on ")
    write_lease(store, lease(this_process(), token="let go"))
    assert not may_run(store, JOB, EXPIRES_MS + 1)
    write_lease(store, lease(this_process()).ended_at(AT_MS))
    assert not may_run(store, JOB, AT_MS)
    write_lease(store, lease(ELSEWHERE))
    assert not may_run(store, JOB, EXPIRES_MS + 1)
