"""Renews the lease of a job on a separate thread, so that the job counts as alive whatever else its process does.

The thread waits by the monotonic clock. A renewal that fails, with any error, is tried again soon, for as long as the
job runs: other processes would take a job without a lease for dead, and its files for abandoned.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace

from tidegate.actors.drivers.job_context import JobContext
from tidegate.storage.checkpoints.lease import (
    RENEWALS_A_LEASE,
    Lease,
    hold_lease,
    read_lease,
    release_lease,
    write_lease,
)
from tidegate.storage.clock import now_ms
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import JobId
from tidegate.storage.process_id import ProcessId, this_process

log = logging.getLogger(__name__)

TRIES_A_RENEWAL = 5
END_WAIT_S = 5.0
"""Seconds to wait for a running renewal before the end of the lease is written."""


class LeaseKeeper:
    """Keeps one job's lease from `start` to `end` or `abandon`.

    `driver`: the process that restarts this one if it is lost. `own`: no other process takes over the lease, so this
    process has to notice when the lease is no longer renewed. `asking`: the lease only reserves the name of the job
    until `take` is called.
    """

    def __init__(
        self,
        store: Store,
        job_id: JobId,
        job_name: str,
        lease_ms: int,
        driver: ProcessId | None = None,
        clock: Callable[[], int] = now_ms,
        own: bool = True,
        asking: bool = False,
    ) -> None:
        self._store = store
        self._clock = clock
        self._token = uuid.uuid4().hex if own else ""
        self._lease = Lease(
            job_id, job_name, this_process(), self._token, clock(), lease_ms, driver=driver, asking=asking
        )
        self._renewing = threading.Lock()
        self._renewed = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tidegate-lease-{job_id}", daemon=True)

    @staticmethod
    def started(context: JobContext, open_store: OpenStore, driver: ProcessId | None = None) -> LeaseKeeper:
        """Takes the lease of a job that begins to run. Returns the keeper, which renews it."""
        root = open_store(context.root)
        keeper = LeaseKeeper(root, context.job_id, context.job_name, context.lease_ms, driver)
        keeper.start()
        return keeper

    def start(self) -> None:
        """Takes the lease and starts the thread that renews it. If storage does not answer, the job runs without a
        lease meanwhile.

        Raises RuntimeError if the process cannot start another thread. Then the lease is ended.
        """
        if self._token:
            hold_lease(self._token)
        self._renew()
        try:
            self._thread.start()
        except RuntimeError:
            self.end()
            raise

    def take(self) -> None:
        """Turns the reservation of the job's name (`asking`) into a full lease. Raises StorageError if it cannot
        be written.
        """
        with self._renewing:
            self._lease = replace(self._lease.renewed(self._clock()), asking=False)
            write_lease(self._store, self._lease)

    def end(self, *, finished: bool = False) -> None:
        """Ends the lease, because the job has ended. May be called again. `finished`: the job has finished, and
        has not failed.
        """
        if not self.abandon():
            return
        try:
            found = read_lease(self._store, self._lease.job_id)
            if found is None or found.token == self._token:  # Otherwise another process continues the job.
                write_lease(self._store, self._lease.ended_at(self._clock(), finished=finished))
        except Exception as error:  # noqa: BLE001 (it is the last that a job does, and must not keep it from its end)
            log.warning("the lease of job %s was not ended, and will expire: %s", self._lease.job_id, error)

    def abandon(self) -> bool:
        """Stops renewing the lease, which another process of the job takes over. Returns False if it was stopped
        before.
        """
        if self._stopped.is_set():
            return False
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(END_WAIT_S)
        release_lease(self._token)
        return True

    def _run(self) -> None:
        wait_s = self._lease.lease_ms / RENEWALS_A_LEASE / 1000
        while not self._stopped.wait(wait_s if self._renewed else wait_s / TRIES_A_RENEWAL):
            self._renew()

    def _renew(self) -> None:
        with self._renewing:
            self._renew_alone()

    def _renew_alone(self) -> None:
        self._lease = self._lease.renewed(self._clock())
        try:
            write_lease(self._store, self._lease)
        except Exception as error:  # noqa: BLE001 (see above)
            # Once an outage, not once an attempt.
            level = logging.WARNING if self._renewed else logging.DEBUG
            log.log(level, "the lease of job %s was not renewed, which is tried again: %s", self._lease.job_id, error)
            self._renewed = False
        else:
            self._renewed = True
