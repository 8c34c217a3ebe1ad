"""Tasks on one node share memory for rows and a socket for all else, and stay exact when either process is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from ray import cloudpickle

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.spark_bridge import RayDPSession

# Processes of the job cannot import the modules of the tests: they are sent by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, KEYS, ROWS_A_BATCH = 300_000, 1_000, 4_000
AT_ONCE = 20_000
"""Rows of a split that come at once, many times what a channel carries before memory is shared."""
A_FEW = 20
"""Rows of a split that come between two pauses from then on, until both ends have been lost and share memory again."""


@dataclass(frozen=True)
class Flags:
    """Files by which the processes of the job tell what has happened."""

    folder: Path

    def once(self, name: str) -> bool:
        """Whether this is told for the first time."""
        if (self.folder / name).exists():
            return False
        (self.folder / name).touch()
        return True

    def all(self, what: str) -> bool:
        """Whether this is told of both ends."""
        return all((self.folder / f"{end} {what}").exists() for end in ("sender", "receiver"))


@dataclass
class DiesOnce(tg.BatchFunction):
    """Passes rows on, says whether the process shares memory and a socket with others, and is killed once when so."""

    flags: Flags
    end: str

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Pass the rows on."""
        shares = "memfd:tidegate" in Path("/proc/self/maps").read_text() and any(
            thread.name == "tidegate-link" for thread in threading.enumerate()
        )
        if shares and self.flags.once(f"{self.end} is killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if shares and self.flags.all("is killed"):
            self.flags.once(f"{self.end} shares again")
        return batch.append_column(self.end, pa.array([shares] * batch.num_rows))


@dataclass(frozen=True)
class DeferredInputs:
    """A source that does not come to its end before both ends have been killed, and share memory again."""

    source: MemorySource
    flags: Flags
    unbounded: Literal[True] = True

    @property
    def schema(self) -> pa.Schema:
        """That of the source."""
        return self.source.schema

    def splits(self) -> Sequence[SourceSplit]:
        """Those of the source."""
        return self.source.splits()

    def reader(self) -> SourceReader:
        """One that pauses."""
        return HeldBackReader(self.source.reader(), self.flags)


@dataclass
class HeldBackReader:
    """After some rows of a split there are few at a time, with nothing between them."""

    reader: SourceReader
    flags: Flags
    paused: set[str] = field(default_factory=set)

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """The rows of the source, or none yet."""
        if offset < AT_ONCE or self.flags.all("shares again"):
            return self.reader.read(split, offset, rows_max)
        if split.split_id not in self.paused:
            self.paused.add(split.split_id)
            return ReadResult(None, offset, at_end=False)
        self.paused.remove(split.split_id)
        return self.reader.read(split, offset, min(rows_max, A_FEW))

    def close(self) -> None:
        """Close the reader of the source."""
        self.reader.close()


def test_rows_are_exact_through_the_loss_of_either_end(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """The sender is killed while frames of it lie in memory, and so is the receiver while it holds rows of them."""
    rows = pa.table({"k": pa.array([n % KEYS for n in range(ROWS)]), "v": pa.array(range(ROWS))})
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    one = rows.schema.append(pa.field("sender", pa.bool_()))
    both = one.append(pa.field("receiver", pa.bool_()))
    flags = Flags(tmp_path)
    options = tg.DataPlaneOptions(source_rows_max=ROWS_A_BATCH, sockets=True)
    with tg.StreamEnvironment(runtime, parallelism=2, options=options) as env:
        table = (
            env.from_source(DeferredInputs(MemorySource(rows, 4), flags))
            .map_batches(DiesOnce(flags, "sender"), schema=one, uid="sender")
            .rebalance()
            .map_batches(DiesOnce(flags, "receiver"), schema=both, uid="receiver")
            .to_table(str(tmp_path / "out"), uid="table")
        )
        config = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        job = env.execute("shared", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(5, 0))
        assert job.wait("4min") == "finished"
        found = table.to_arrow()
    assert flags.all("is killed")
    assert found.select(["k", "v"]).sort_by("v") == rows
    assert pc.any(found["sender"]).as_py()
    assert pc.any(found["receiver"]).as_py()
