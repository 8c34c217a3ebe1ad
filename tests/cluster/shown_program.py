"""What `test_shown_on_ray.py` looks at: how Ray shows the actors of a job before and after a standby takes a task."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.util.state import list_actors
from ray_jobs import Gated
from story import tell
from waiting import until

import tidegate as tg
from tidegate.connectors.memory_source import MemorySource

AT_ONCE = tg.RestartStrategy.fixed_delay(attempts=3, delay="1ms")


def shown(address: str) -> dict[str, str]:
    """What Ray shows of each actor that lives, by its name."""
    actors = list_actors(address, filters=[("state", "=", "ALIVE")], detail=True, limit=100)
    return {str(actor.name): str(actor.repr_name) for actor in actors}


def main(folder: Path) -> None:
    """Run a job with a spare process, and kill the process of a task."""
    context: Any = ray.init(address="local", num_cpus=2, include_dashboard=True)
    address: str = context.address_info["gcs_address"]
    gate, fuse = folder / "gate", folder / "fuse"

    def look(row: Mapping[str, Any]) -> None:
        if fuse.exists():
            fuse.unlink()
            print("a function is called in a process that was spare")

    with tg.StreamEnvironment.ray(parallelism=1, standbys=1) as env:
        rows = env.from_source(Gated(MemorySource(pa.table({"x": range(20_000)}), 1), gate), uid="rows", name="rows")
        checked = rows.rebalance().peek(look, name="check", uid="check")
        checked.to_table(str(folder / "out"), uid="to", name="out")
        checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints"))
        job = env.execute("orders", checkpoints=checkpoints, progress="off", restart=AT_ONCE)
        until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)
        until("a standby", lambda: job.progress().standbys_ready == 1, job.progress)
        tell(before=shown(address))
        # The job reads a row now and then until the gate is there, so there is one for the standby.
        victim = next(process for process in job.processes() if process.task.vertex == "check")
        fuse.touch()
        os.kill(victim.pid, signal.SIGKILL)
        until("a restart", lambda: job.progress().restarts > 0, job.progress)
        until("a row", lambda: not fuse.exists(), job.progress)
        after = {str(process.task.vertex): process.actor for process in job.processes()}
        tell(moved=after["check"])
        tell(still=shown(address)[after["check"]])
        gate.touch()
        tell(status=job.wait("4min"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
