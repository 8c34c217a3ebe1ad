"""The lease of a job: a small file that says that the job lives, because only a living job renews it.

Rules:

- A lease holds for a time. Whoever drives the job renews it after a third of that, whatever else happens. At the end it
  says in the lease that the job is over.
- A lease that was not renewed in its time has expired: its job is dead. There is a margin, because clocks may differ.
  A lease whose process is known to be gone has expired at once.
- A lease is no lock. What a job that was thought dead still does is stopped where it does it: by the event log, by the
  logs of tables, by tombstones of checkpoints.
- It is no part of the event log: no decision of the job follows from it.
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
"""How far the clock of a reader may be from that of the writer: an expired lease counts for so much longer."""
LEASE_VERSION = 3
_LAST_MS = 253_402_300_799_000
"""The last second of the year 9999, beyond which calendars do not go."""
_MAGIC = b"TGLEASE"

_logger = logging.getLogger(__name__)

_held: set[str] = set()
"""Tokens of the leases that this process renews."""


@wire
@dataclass(frozen=True, slots=True)
class Lease:
    """What a living job writes, again and again. `renewals` counts, so that a renewal shows whatever clocks say.

    `holder` is the process that renews it. A `driver` has started the holder elsewhere and starts it again when it is
    lost, as long as it lives itself. `token` names one holder among several in one process. `asking`: a driver asks
    for the name with it, and has not been given it yet.
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
    """Of a job that has ended: whether it has finished, so that there is nothing left to restore or to commit."""

    @property
    def counts_until_ms(self) -> int:
        """When it has expired for everybody, if it is not renewed; in milliseconds since the epoch."""
        return self.renewed_at_ms + self.lease_ms + CLOCKS_DIFFER_MS_MAX

    def renewed(self, at_ms: int) -> Lease:
        """The same, a renewal later."""
        return replace(self, renewed_at_ms=at_ms, renewals=self.renewals + 1)

    def ended_at(self, at_ms: int, *, finished: bool = False) -> Lease:
        """The last one: the job is over."""
        return replace(self.renewed(at_ms), ended=True, finished=finished)


class Life(enum.Enum):
    """What is known of the job of a lease."""

    DEAD = "dead"
    UNKNOWN = "unknown"
    """Its lease has not expired, and nobody can tell from here whether its processes are there."""
    ALIVE = "alive"


def write_lease(store: Store, lease: Lease) -> None:
    """Take a lease, renew it or end it. Raises StorageError."""
    store.write(_path(lease.job_id), (seal(_MAGIC, LEASE_VERSION, encode(lease)),))


def read_lease(store: Store, job_id: JobId) -> Lease | None:
    """The lease of a job; None for a job that never had one. CorruptionError for damage, StorageError."""
    path = _path(job_id)
    where = join_url(store.url, path)
    try:
        data = store.read(path)
    except NotFoundError:
        return None
    try:
        lease = decode(unseal(_MAGIC, LEASE_VERSION, data, where))
    except CodecError as error:
        raise CorruptionError(f"{where} cannot be read: {error}") from error
    if not isinstance(lease, Lease) or lease.job_id != job_id:
        raise CorruptionError(f"{where} does not hold the lease of {job_id}")
    return lease


def delete_lease(store: Store, job_id: JobId) -> None:
    """Leave nothing of a job that never began. Raises StorageError."""
    store.delete(_path(job_id))


def life_of(lease: Lease, now_ms: int) -> Life:
    """What a lease says of its job now."""
    if lease.ended:
        return Life.DEAD
    holder = _is_held(lease)
    driver = None if lease.driver is None else is_there(lease.driver)
    if holder is False and (lease.driver is None or driver is False):
        return Life.DEAD
    # A renewal that seems to be to come is one by a clock that was set back since: nobody knows how old it is.
    if now_ms > lease.counts_until_ms:
        return Life.DEAD
    return Life.ALIVE if holder and (lease.driver is None or driver) else Life.UNKNOWN


def is_alive(store: Store, job_id: JobId, now_ms: int) -> bool:
    """Whether a job has to be taken for living: its lease has not expired, or cannot be read.

    False for a job without a lease. Raises StorageError for a storage that does not answer.
    """
    try:
        lease = read_lease(store, job_id)
    except CorruptionError as error:
        _logger.warning("The job is taken for living, because its lease is damaged: %s", error)
        return True
    return lease is not None and life_of(lease, now_ms) is not Life.DEAD


def may_live(store: Store, job_id: JobId, now_ms: int) -> bool:
    """Whether nothing of a job may be deleted: it is alive, or its process is there and has not said that it is over.

    While storage is away, or full, no lease is renewed, and the job goes on all the same. Raises StorageError.
    """
    if is_alive(store, job_id, now_ms):
        return True
    lease = read_lease(store, job_id)
    return lease is not None and not lease.ended and bool(_is_held(lease))


def why_alive(store: Store, job_id: JobId) -> str | None:
    """What lets a job that has to be taken for living seem so, in words; None if it never had a lease. StorageError."""
    try:
        lease = read_lease(store, job_id)
    except CorruptionError as error:
        return f"and nobody can tell: {error}"
    if lease is None:
        return None
    until = datetime.fromtimestamp(min(lease.counts_until_ms, _LAST_MS) / 1000, UTC)
    there = f"{lease.holder} is there, and " if _is_held(lease) else ""
    return f"{there}its lease was renewed by {lease.holder} and counts until {until:%Y-%m-%d %H:%M:%S} UTC"


def hold(token: str) -> None:
    """This process renews a lease with this token from now on."""
    _held.add(token)


def let_go(token: str) -> None:
    """This process does not renew it any more."""
    _held.discard(token)


def _is_held(lease: Lease) -> bool | None:
    """Whether the holder is there; None where nobody can tell."""
    there = is_there(lease.holder)
    own = there and lease.token and lease.holder.pid == os.getpid()
    return lease.token in _held if own else there


def _path(job_id: JobId) -> str:
    return CheckpointLayout(job_id).lease()
