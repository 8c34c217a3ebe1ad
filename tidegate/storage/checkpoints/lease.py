"""The lease of a job: a small file that shows that the job is alive, because only a running job renews it.

Rules:

- A lease is valid for a limited time. The process that drives the job renews it after a third of that time. At the end
  of the job it marks the lease as ended.
- A lease that was not renewed in time has expired, and its job counts as dead. There is a margin, because clocks may
  differ. A lease whose process is known to be gone has expired at once.
- A lease is not a lock. A job that was wrongly taken for dead fails when it writes: to the event log, to the log of a
  table, or to a checkpoint that was marked as void.
- The lease is not part of the event log: the job makes no decision from it.
"""

from __future__ import annotations

import enum
import logging
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId
from tidegate.storage.process_id import ProcessId, is_there

LEASE_MS_DEFAULT = 30_000
RENEWALS_A_LEASE = 3
CLOCKS_DIFFER_MS_MAX = 10_000
"""Largest difference, in ms, to allow for between the clocks of writer and reader. An expired lease stays valid for
this long.
"""
LEASE_VERSION = 3
_LAST_MS = 253_402_300_799_000
"""Last second of the year 9999, in ms since the epoch: the greatest time that `datetime` supports."""
_MAGIC = b"TGLEASE"

_logger = logging.getLogger(__name__)

_held_tokens: set[str] = set()
"""Tokens of the leases that this process currently renews."""


@wire
@dataclass(frozen=True, slots=True)
class Lease:
    """The content of the lease file. `renewals` increases with each renewal, so that a renewal is visible even if
    clocks are wrong.

    - `holder` is the process that renews the lease. `token` is unique to the lease, because one process may hold the
      leases of several jobs.
    - `driver` is the process that started the holder elsewhere, and starts it again if it is lost, as long as the
      driver itself lives. None if there is no such process.
    - `asking`: a driver requests the job's name with this lease, and has not been granted the name yet.
    """

    job_id: JobId
    job_name: str
    holder: ProcessId
    token: str
    renewed_at_ms: int
    lease_ms: int
    renewals: int = 0
    driver: ProcessId | None = None
    ended: bool = False
    asking: bool = False
    finished: bool = False
    """For a job that has ended: True if it has finished, so that nothing remains to be restored or committed. None
    while it runs.
    """

    @property
    def counts_until_ms(self) -> int:
        """Returns the time, in ms since the epoch, at which the lease expires for every reader unless the job renews
        it.
        """
        return self.renewed_at_ms + self.lease_ms + CLOCKS_DIFFER_MS_MAX

    def renewed(self, at_ms: int) -> Lease:
        """Returns a copy of the lease that is renewed at the time `at_ms`, in ms since the epoch."""
        return replace(self, renewed_at_ms=at_ms, renewals=self.renewals + 1)

    def ended_at(self, at_ms: int, *, finished: bool = False) -> Lease:
        """Returns the final lease of a job, which marks the job as ended at `at_ms` (ms since the epoch)."""
        return replace(self.renewed(at_ms), ended=True, finished=finished)


class Life(enum.Enum):
    """The state of a job according to its lease: alive, dead, or unknown."""

    DEAD = "dead"
    UNKNOWN = "unknown"
    """The lease has not expired, but this machine cannot check whether the processes of the job exist."""
    ALIVE = "alive"


def write_lease(store: Store, lease: Lease) -> None:
    """Writes the lease file of a job: to take, renew or end the lease. Raises StorageError."""
    store.write(_path(lease.job_id), (seal(_MAGIC, LEASE_VERSION, encode(lease)),))


def read_lease(store: Store, job_id: JobId) -> Lease | None:
    """Returns the lease of a job, or None if the job never had one. Raises CorruptionError for damage, StorageError."""
    path = _path(job_id)
    where = join_url(store.url, path)
    try:
        data = store.read(path)
    except NotFoundError:
        return None
    try:
        lease = decode(unseal(_MAGIC, LEASE_VERSION, data, where))
    except CodecError as error:
        raise CorruptionError(
            f"the lease of {job_id} in {where} cannot be read: {error}; delete the file if you are sure that the job "
            "does not run"
        ) from error
    if not isinstance(lease, Lease) or lease.job_id != job_id:
        raise CorruptionError(
            f"{where} does not hold the lease of {job_id}; delete the file if you are sure that the job does not run"
        )
    return lease


def delete_lease(store: Store, job_id: JobId) -> None:
    """Deletes the lease file of a job that never started. Raises StorageError."""
    store.delete(_path(job_id))


def life_of(lease: Lease, now_ms: int) -> Life:
    """Returns whether the job of a lease is alive at the time `now_ms`, in ms since the epoch."""
    if lease.ended:
        return Life.DEAD
    holder = _is_held(lease)
    driver = None if lease.driver is None else is_there(lease.driver)
    if holder is False and (lease.driver is None or driver is False):
        return Life.DEAD
    # A renewal in the future was made by a clock that was set back since. Its age is unknown, so it counts as fresh.
    if now_ms > lease.counts_until_ms:
        return Life.DEAD
    return Life.ALIVE if holder and (lease.driver is None or driver) else Life.UNKNOWN


def is_alive(store: Store, job_id: JobId, now_ms: int) -> bool:
    """Returns whether a job must be assumed alive: its lease has not expired, or the lease is damaged.

    Returns False for a job without a lease. Raises StorageError if the storage does not answer.
    """
    try:
        lease = read_lease(store, job_id)
    except CorruptionError as error:
        _logger.warning("The job is assumed alive, because its lease is damaged: %s", error)
        return True
    return lease is not None and life_of(lease, now_ms) is not Life.DEAD


def may_live(store: Store, job_id: JobId, now_ms: int) -> bool:
    """Returns whether the job may still run, so that its files must not be deleted.

    True if the job is alive, and also if the process of its lease exists and has not ended the lease: while the storage
    is unavailable or full, a running job cannot renew its lease. Raises StorageError.
    """
    if is_alive(store, job_id, now_ms):
        return True
    lease = read_lease(store, job_id)
    return lease is not None and not lease.ended and bool(_is_held(lease))


def why_alive(store: Store, job_id: JobId) -> str | None:
    """Returns the reason why a job must be assumed alive, as text for an error, or None if it never had a lease.

    Raises StorageError.
    """
    try:
        lease = read_lease(store, job_id)
    except CorruptionError as error:
        return f"because its lease is damaged: {error}"
    if lease is None:
        return None
    until = datetime.fromtimestamp(min(lease.counts_until_ms, _LAST_MS) / 1000, UTC)
    there = f"{lease.holder} exists, and " if _is_held(lease) else ""
    return f"because {there}its lease was renewed by {lease.holder} and counts until {until:%Y-%m-%d %H:%M:%S} UTC"


def hold_lease(token: str) -> None:
    """Records in this process that it renews the lease with the token `token`."""
    _held_tokens.add(token)


def release_lease(token: str) -> None:
    """Records in this process that it no longer renews the lease with the token `token`."""
    _held_tokens.discard(token)


def _is_held(lease: Lease) -> bool | None:
    """Returns whether the process that holds a lease still exists, or None if this machine cannot find out."""
    there = is_there(lease.holder)
    own = there and lease.token and lease.holder.pid == os.getpid()
    return lease.token in _held_tokens if own else there


def _path(job_id: JobId) -> str:
    return CheckpointLayout(job_id).lease()
