"""A sink of the user's under faults: every row becomes visible once, and nothing that no checkpoint covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pytest
from pipelines import HARSH

import tidegate as tg
from tidegate.testing import SimulatedPipeline

ROWS = pa.table({"x": list(range(120))})
SEEDS = 6


class World:
    """The system that a sink writes to: it survives whatever crashes, and all copies of a sink see the same."""

    def __init__(self) -> None:
        self.prepared: dict[str, list[int]] = {}
        self.visible: Counter[int] = Counter()
        self.commits: Counter[str] = Counter()
        self.calls = 0

    def __deepcopy__(self, memo: object) -> World:
        return self


class WorldSink(tg.Sink):
    """Keeps the contract; with `forgets` a commit does not look at what was committed before."""

    def __init__(self, world: World, forgets: bool = False) -> None:
        self.world, self.forgets = world, forgets
        self.rows: list[int] = []
        self.number = 0

    def open(self, context: tg.SinkContext) -> None:
        """Remember the prefix."""
        self.prefix = context.prefix

    def write(self, batch: pa.RecordBatch) -> None:
        """Remember the rows."""
        self.rows += batch["x"].to_pylist()

    def prepare(self) -> Iterable[bytes]:
        """Hand them to the world under a name."""
        name = f"{self.prefix}/{self.number}"
        assert name not in self.world.prepared, "a name is used once"
        self.world.prepared[name], self.rows, self.number = self.rows, [], self.number + 1
        return [name.encode()]

    def commit(self, committables: Sequence[bytes], context: tg.CommitContext) -> None:
        """Show what is not shown yet. The answer to every other commit is lost."""
        for name in (committable.decode() for committable in committables):
            self.world.commits[name] += 1
            if self.forgets or self.world.commits[name] == 1:
                self.world.visible.update(self.world.prepared[name])
        self.world.calls += 1
        if self.world.calls % 2:
            raise ConnectionError("no answer")

    def abort(self, job_id: str) -> None:
        """Drops transactions that were not committed."""
        self.world.prepared = {name: rows for name, rows in self.world.prepared.items() if self.world.commits[name]}


class Worlds:
    """A pipeline, and the worlds of its runs, the newest last."""

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets
        self.seen: list[World] = []

    def build(self, env: tg.StreamEnvironment) -> None:
        """Rows to a sink, and to a table, which the oracle compares."""
        self.seen.append(World())
        rows = env.from_batches(ROWS, splits=4, uid="rows")
        rows.to_sink(WorldSink(self.seen[-1], self.forgets), flush_bytes=100, uid="sink")
        rows.to_table("sim://table", uid="table")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_row_is_visible_once(seed: int) -> None:
    """Whatever crashes, between any two steps, and however often a commit is repeated."""
    worlds = Worlds()
    report = SimulatedPipeline(worlds.build).run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
    for world in worlds.seen:
        assert world.visible == Counter(ROWS["x"].to_pylist())
        assert all(world.commits[name] for name in world.prepared), "the end of a job drops what was never committed"


def test_a_commit_is_repeated_and_the_sink_must_know() -> None:
    """A sink whose commit is not idempotent shows rows twice: so the test above can fail."""
    worlds = Worlds(forgets=True)
    assert SimulatedPipeline(worlds.build).run(0, HARSH).ok
    assert all(max(world.visible.values()) > 1 for world in worlds.seen)
