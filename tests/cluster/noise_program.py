"""What `test_noise_on_ray.py` looks at: a job with more processes than the node likes, which loses a task and goes on.

Ray has one CPU, and prints in this process what its processes print, as it does unless a program asks otherwise.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray_jobs import Gated
from story import tell
from waiting import until

import tidegate as tg
from tidegate.connectors.memory_source import MemorySource

WIDTH = 6
WAIT_S = 60.0
RETRIED = "Task WorkerProcess.frame failed. There are infinite retries remaining, so the task will be retried. Error: x"
LAST = "the last warning of this Ray"


def last_is_printed() -> threading.Event:
    """An event that is set once `LAST` reaches what prints Ray's warnings."""
    seen = threading.Event()
    worker: Any = ray._private.worker
    show: Any = worker.print_to_stdstream

    def show_and_look(batch: dict[str, Any], ignore_prefix: bool) -> None:
        show(batch, ignore_prefix)
        if LAST in batch["lines"]:
            seen.set()

    worker.print_to_stdstream = show_and_look
    return seen


def warn(text: str) -> None:
    """Publish a warning as Ray's own processes do: it is printed in this process."""
    utils: Any = ray._private.utils
    utils.push_error_to_driver(ray._private.worker.global_worker, "test", text)


def main(folder: Path) -> None:
    """Run the job, kill a task, and list the jobs."""
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    gate, seen = folder / "gate", last_is_printed()
    with tg.StreamEnvironment.ray(parallelism=WIDTH, standbys=0) as env:
        rows = env.from_source(Gated(MemorySource(pa.table({"x": range(600)}), 4), gate), uid="rows").key_by("x")
        counts = rows.aggregate(n=tg.count(), uid="count")
        out = counts.to_table(str(folder / "out"), mode="upsert", keys=["x"], uid="to")
        checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints"))
        # A process for each subtask: so many that Ray warns.
        job = env.execute("noise", checkpoints=checkpoints, progress="off", slot_sharing=False)
        until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)
        os.kill(job.processes()[0].pid, signal.SIGKILL)
        until("a restart", lambda: job.progress().restarts > 0, job.progress)
        before = job.progress().completed_checkpoints
        until("another checkpoint", lambda: job.progress().completed_checkpoints > before, job.progress)
        gate.touch()
        tell(status=job.wait("4min"), rows=out.to_arrow().num_rows)
        warn(RETRIED)
        warn(LAST)
        tell(last=seen.wait(WAIT_S))
    worker: Any = ray._private.worker.global_worker
    logs = Path(worker.node.get_logs_dir_path())
    tell(warned=any("worker processes have been started" in log.read_text() for log in logs.glob("raylet*")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
