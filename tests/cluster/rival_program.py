"""What `test_rivals_on_ray.py` starts twice: a driver that starts a job whose name another driver asks for as well.

The folder of each driver is in one that they share. A driver does not look at the leases before both have written one,
and does not decide before both have read the lease of the other one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
from ray_jobs import Gated
from story import tell
from waiting import until

import tidegate as tg
from tidegate.api.submission import job_names
from tidegate.connectors.memory_source import MemorySource
from tidegate.storage.checkpoints.lease import Lease
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId

DRIVERS, ROWS = 2, 400
NAME = "rivals"


def main(folder: Path) -> None:
    """Start the job, or be refused."""
    look, read, shared = job_names.await_others, job_names.lease_of, folder.parent

    def meet(place: str) -> None:
        (folder / place).touch()
        until(f"both: {place}", lambda: len(list(shared.glob(f"*/{place}"))) == DRIVERS)

    def look_once_both_ask(store: Store, name: str, job_id: JobId, prefix: str) -> bool:
        meet("asks")
        return look(store, name, job_id, prefix)

    def decide_once_both_have_read(store: Store, job_id: JobId) -> Lease | None:
        found = read(store, job_id)
        meet("has-read")
        return found

    job_names.await_others, job_names.lease_of = look_once_both_ask, decide_once_both_have_read
    with tg.StreamEnvironment.ray(standbys=0) as env:
        rows = env.from_source(Gated(MemorySource(pa.table({"x": range(ROWS)}), 2), shared / "gate"), uid="rows")
        rows.to_table(str(shared / "out"), uid="to")
        checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(shared / "checkpoints"))
        try:
            job = env.execute(NAME, progress="off", checkpoints=checkpoints)
        except ConfigurationError as error:
            tell(started=False, refused=str(error))
        else:
            tell(started=True, job_id=job.job_id)
            tell(status=job.wait("4min"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
