"""Sees to it that only one living job has a name under a checkpoint root. `StreamEnvironment.execute` asks.

Rules:

- Leases say which jobs live. A job whose processes are known to be gone is over at once. If nothing can be known of
  them from here, it is waited for, until its lease expires or is renewed.
- A new job writes a lease that asks for the name before it looks at the others, and takes the name by that lease once
  it has looked without having to wait. So of two that ask at the same moment at least one sees the other.
- Of those that ask, the one with the lowest id has precedence. The others are refused. It waits until each of them has
  withdrawn, or has taken the name because it had looked before. So one of them gets the name, and never two.
- No job is evicted: the one that is refused is told of the one that lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidegate.actors.drivers.lease_keeper import LeaseKeeper
from tidegate.storage.checkpoints.lease import CLOCKS_DIFFER_MS_MAX, Lease, Life, delete_lease, life_of, read_lease
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError, CorruptionError, StorageError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId
from tidegate.storage.process_id import is_there

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.2
DYING_LEASES_MAX = 3
"""A job that has lost its driver and still renews its lease is waited for this many times as long as the lease."""


@contextmanager
def name_taken(store: Store, name: str, job_id: JobId, prefix: str, lease_ms: int) -> Iterator[LeaseKeeper]:
    """Take the name for a job that is about to be submitted. `prefix` begins the ids of all jobs of this name.

    Abandon the keeper before the job's coordinator takes the lease over. After an exception in the block nothing is
    left of the lease. Raises ConfigurationError while another job of the name lives, CorruptionError for a lease that
    cannot be read, StorageError.
    """
    keeper = LeaseKeeper(store, job_id, name, lease_ms, own=False, asking=True)
    keeper.start()
    try:
        while _await_others(store, name, job_id, prefix):
            pass  # Whoever has asked meanwhile has not been looked at.
        keeper.take()
        yield keeper
    except BaseException:
        keeper.abandon()
        try:
            delete_lease(store, job_id)
        except StorageError as error:
            log.warning("the lease of %s, which was not started, stays until it expires: %s", job_id, error)
        raise


def _await_others(store: Store, name: str, job_id: JobId, prefix: str) -> bool:
    """Look at every other job of the name. Returns whether one of them had to be waited for."""
    others = [JobId(other) for other in sorted(store.list("")) if other != job_id and other.startswith(prefix)]
    waited = [await_end(store, other, name, asker=job_id) for other in others]
    return any(waited)


def await_end(
    store: Store,
    job_id: JobId,
    name: str,
    *,
    asker: JobId | None = None,
    clock: Callable[[], int] = now_ms,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait until a job is dead, or asks for its name no longer. Returns whether it had to be waited for.

    Returns False at once where the job is known to be dead, and where it has another name. `asker`: the job that asks
    for the name, if one does. Raises ConfigurationError when the job is alive, CorruptionError for a lease that cannot
    be read, StorageError.
    """
    first = _read(store, job_id)
    if first is None or first.job_name != name:
        return False
    lease, waited = first, False
    limit_s = (first.lease_ms + CLOCKS_DIFFER_MS_MAX) / 1000
    began_s = heard_s = monotonic()
    told = False
    while True:
        life = life_of(lease, clock())
        # Or it was not renewed for its whole time, by the monotonic clock, which nobody can set.
        if life is Life.DEAD or monotonic() > heard_s + limit_s:
            return waited
        withdraws = lease.asking and asker is not None and asker < lease.job_id
        if lease.asking and not withdraws:
            raise _refusal(store, lease, clock())
        # Without its driver the job is ended by Ray; until then it may renew its lease.
        dying = lease.driver is not None and is_there(lease.driver) is False
        renewed = lease.renewals > first.renewals
        lives = not withdraws and (life is Life.ALIVE or (renewed and not dying))
        if lives or monotonic() > began_s + DYING_LEASES_MAX * limit_s:
            raise _refusal(store, lease, clock())
        if not told:
            told = True
            log.info("job %s may be alive: it is waited for, until its lease expires in %.0f s", job_id, limit_s)
        sleep(LOOK_AGAIN_S)
        waited = True
        found = _read(store, job_id)
        if found is None:
            return True
        if found.renewals != lease.renewals:
            lease, heard_s = found, monotonic()


def _read(store: Store, job_id: JobId) -> Lease | None:
    try:
        return read_lease(store, job_id)
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}. Nobody can tell whether that job lives; delete the file if you know that it does not"
        ) from error


def _refusal(store: Store, lease: Lease, at_ms: int) -> ConfigurationError:
    if lease.asking:
        return ConfigurationError(
            f"a job named {lease.job_name!r} is being started at this moment: {lease.job_id}, by {lease.holder}. Give "
            "this one another name, or look whether that one runs"
        )
    ago_s = max(0, at_ms - lease.renewed_at_ms) / 1000
    return ConfigurationError(
        f"a job named {lease.job_name!r} is running already: {lease.job_id}, of {lease.holder}, which gave a sign "
        f"of life {ago_s:.0f} s ago. Give this one another name, or end that one first (job.stop(), job.cancel()); "
        f"`tidegate checkpoints list {store.url} --job {lease.job_id}` shows what it has done"
    )
