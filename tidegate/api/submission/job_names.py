"""Makes sure that only one living job has a given name under a checkpoint root.

Rules:

- A job lives as long as its processes renew its lease. If its processes are certainly gone, the job is dead at once. If
  its processes cannot be checked from this machine, the new job waits until the lease expires or is renewed.
- A new job first writes a lease that requests the name, and then checks the leases of all other jobs, until it has
  checked all of them without having to wait. Then it marks in its lease that it has taken the name. So if two jobs
  request the name at the same moment, at least one of them sees the other.
- Among jobs that request the name at the same time the one with the lowest id has precedence, and jobs with a higher id
  are refused. The job with the lowest id waits until each other job has withdrawn, or has taken the name because it had
  finished its checks before. So exactly one of these jobs gets the name.
- A new job never stops a living one. The error of the refused job names the living job.
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
"""How many lease durations a new job waits for a job of its name that has lost its driver but still renews its
lease.
"""


@contextmanager
def name_taken(store: Store, name: str, job_id: JobId, prefix: str, lease_ms: int) -> Iterator[LeaseKeeper]:
    """Takes the name for a job that is about to be submitted, and yields the keeper that renews its lease.

    The ids of all jobs of this name begin with `prefix`. The lease lasts `lease_ms`.

    Call `abandon` on the keeper before the coordinator of the job takes over the lease. The lease is deleted if the
    block raises an exception.

    Raises ConfigurationError while another job of the name lives, CorruptionError for a lease that cannot be read, and
    StorageError.
    """
    keeper = LeaseKeeper(store, job_id, name, lease_ms, own=False, asking=True)
    keeper.start()
    try:
        while await_others(store, name, job_id, prefix):
            pass  # Jobs that requested the name during the wait have not been looked at yet.
        keeper.take()
        yield keeper
    except BaseException:
        keeper.abandon()
        try:
            delete_lease(store, job_id)
        except StorageError as error:
            log.warning("the lease of %s, which was not started, stays until it expires: %s", job_id, error)
        raise


def await_others(store: Store, name: str, job_id: JobId, prefix: str) -> bool:
    """Checks all other jobs of the name, and waits until none of them lives. Returns whether it had to wait."""
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
    """Waits until a job is dead, or has withdrawn its request for the name. Returns whether it had to wait.

    Returns False at once if the job is certainly dead, or has another name. `asker` is the new job that requests the
    name, or None if no job does.

    Raises ConfigurationError if the job is alive, CorruptionError if its lease cannot be read, and StorageError.
    """
    first = lease_of(store, job_id)
    if first is None or first.job_name != name:
        return False
    lease, waited = first, False
    limit_s = (first.lease_ms + CLOCKS_DIFFER_MS_MAX) / 1000
    began_s = seen_s = monotonic()
    logged = False
    while True:
        life = life_of(lease, clock())
        # The lease also expires by the monotonic clock, because a user can set the wall clock.
        if life is Life.DEAD or monotonic() > seen_s + limit_s:
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
        if not logged:
            logged = True
            log.info("job %s may be alive: waiting until its lease expires in %.0f s", job_id, limit_s)
        sleep(LOOK_AGAIN_S)
        waited = True
        found = lease_of(store, job_id)
        if found is None:
            return True
        if found.renewals != lease.renewals:
            lease, seen_s = found, monotonic()


def lease_of(store: Store, job_id: JobId) -> Lease | None:
    """Returns the lease of a job, or None. Raises CorruptionError, with what to do about it."""
    try:
        return read_lease(store, job_id)
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}. So tidegate cannot check whether that job lives; delete the file if you are sure that it does "
            "not"
        ) from error


def _refusal(store: Store, lease: Lease, at_ms: int) -> ConfigurationError:
    if lease.asking:
        return ConfigurationError(
            f"a job named {lease.job_name!r} is being started at this moment: {lease.job_id}, by {lease.holder}. Give "
            "this job another name, or check whether the other one runs"
        )
    ago_s = max(0, at_ms - lease.renewed_at_ms) / 1000
    return ConfigurationError(
        f"a job named {lease.job_name!r} is running already: {lease.job_id}, of {lease.holder}, which renewed its "
        f"lease {ago_s:.0f} s ago. Give this job another name, or end the other one first (job.stop(), job.cancel()); "
        f"`tidegate checkpoints list {store.url} --job {lease.job_id}` shows its checkpoints"
    )
