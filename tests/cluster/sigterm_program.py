"""What `test_sigterm_of_drivers.py` ends: a driver whose job is being deployed."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import ray
from ray_jobs import Gated
from story import tell

import tidegate as tg
from tidegate.connectors.memory_source import MemorySource


def main(folder: Path) -> None:
    """Submit a job that does not end, and wait for it."""
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    with tg.StreamEnvironment.ray(parallelism=2) as env:
        rows = env.from_source(Gated(MemorySource(pa.table({"x": range(600)}), 4), folder / "gate"))
        rows.to_table(str(folder / "out"))
        job = env.execute("ended", progress="off", checkpoints=tg.CheckpointConfig(storage=str(folder / "ck")))
        tell(submitted=job.status())
        job.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
