"""A program whose checkpoints are kept in `old_checkpoints/`, and must be restored by every later commit.

It has the kinds of state that a checkpoint stores. It uses only public names, `old_archives.py` and `local_jobs.py`, so
that it runs on old commits too. This is how a file is made: in a worktree of the commit, with this module and
`old_archives.py` beside its `local_jobs.py`,

    PYTHONPATH=tests/api:tests/support .venv/bin/python -m old_program COMMIT FOLDER

writes `FOLDER/COMMIT-BACKEND.zip` for every backend. Never change what the program keeps: add another one beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from local_jobs import GatedSource
from old_archives import write_archives

import tidegate as tg

BACKENDS = ("columnar", "rocksdb")
KEYED = pa.schema(
    {
        "k": pa.int64(),
        "count": pa.int64(),
        "seen": pa.list_(pa.int64()),
        "times": pa.list_(pa.int64()),
        "total": pa.int64(),
        "timer": pa.int64(),
    }
)
KEPT = pa.schema({"x": pa.int64(), "count": pa.int64()})


class Remembers(tg.ProcessFunction):
    """Keeps a value, a list, a map and a reduced value of each key; two timers tell all of it at the end."""

    def open(self, context: tg.ProcessContext) -> None:
        """Bind the states."""
        self.count = context.state(tg.ValueState("count", pa.int64()))
        self.seen = context.state(tg.ListState("seen", int))
        self.times = context.state(tg.MapState("times", pa.string(), pa.int64()))
        self.total = context.state(tg.ReducingState("total", lambda one, other: one + other, pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        """Put the row into each state."""
        self.count.update((self.count.value() or 0) + 1)
        self.seen.add(row["x"])
        name = f"x{row['x'] // 5}"
        self.times.put(name, (self.times.get(name) or 0) + 1)
        self.total.add(row["x"])
        for time in (1, 2):
            context.timer_service.register_event_time_timer(time)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Tell what was kept."""
        yield {
            **context.current_key,
            "count": self.count.value(),
            "seen": sorted(self.seen.get()),
            "times": [self.times.get(name) for name in sorted(self.times.keys())],
            "total": self.total.get(),
            "timer": timestamp,
        }


class Keeps(tg.ProcessFunction):
    """Keeps rows in operator state: those of a subtask in a list, how many there were in a union list."""

    def open(self, context: tg.ProcessContext) -> None:
        """Bind the states, and go on with the count in one subtask."""
        self.rows = context.list_state(tg.ListState("rows", pa.int64()))
        self.counts = context.union_list_state(tg.ListState("counts", pa.int64()))
        self.counts.update([sum(self.counts.get())] if context.subtask == 0 else [])

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        """Keep the row."""
        self.rows.add(row["x"])
        self.counts.update([sum(self.counts.get()) + 1])

    def finish(self, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Tell what was kept."""
        yield from ({"x": x, "count": 0} for x in self.rows.get())
        yield {"x": -1, "count": sum(self.counts.get())}


def program(env: tg.StreamEnvironment, source: GatedSource) -> dict[str, tg.CollectedRows]:
    """Aggregates, keyed state with timers, operator state, and rows that are collected as they come."""
    rows = env.from_source(source, uid="source")
    keyed = rows.key_by("k")
    sums = keyed.aggregate(
        n=tg.count(), total=tg.sum("x"), mean=tg.mean("x"), most=tg.max("x"), emit="final", uid="sums"
    )
    return {
        "sums": sums.collect(uid="summed"),
        "keyed": keyed.process(Remembers(), schema=KEYED, uid="remembers").collect(uid="remembered"),
        "kept": rows.process(Keeps(), schema=KEPT, uid="keeps").collect(uid="kept"),
        "rows": rows.collect(uid="passed"),
    }


if __name__ == "__main__":
    write_archives(program, BACKENDS, *sys.argv[1:])
