"""Rows in order of event time under faults and rescales: a function sees them, and timers between, as if sorted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pipelines import HARSH
from rescaled_runs import check_rescaled

import tidegate as tg
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.runtime.run import Simulation

SEEN_TABLE, LATE_TABLE = "sim://seen", "sim://late"
FAULTS = replace(HARSH, crash=0.04, slow=0.0, storage=0.03, delay="0ms..20ms", duration="5s")
KEYS, ROWS, SLACK_MS, AHEAD_MS = 2, 60, 12, 1
ARRIVED = [(n % KEYS, 2 * n + (n * 11) % 17 - (30 if n % 13 == 12 else 0), n) for n in range(ROWS)]
"""Key, event time and number. Every 13th row is too late."""
INPUT = pa.table(
    {name: list(column) for name, column in zip(("k", "at", "n"), zip(*ARRIVED, strict=True), strict=True)}
)
SEEN = {"k": int, "seq": int, "what": str, "at": int, "n": int}


class Journal(tg.ProcessFunction):
    """Numbers what it sees of a key: rows, and a timer that each row sets ahead of itself."""

    def open(self, context: tg.ProcessContext) -> None:
        self.seq = context.state(tg.ValueState("seq", int))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield self._seen(row["k"], "row", row["at"], row["n"])
        context.timer_service.register_event_time_timer(row["at"] + AHEAD_MS)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield self._seen(context.current_key["k"], "timer", timestamp, -1)

    def _seen(self, key: int, what: str, at: int, n: int) -> dict[str, Any]:
        number = (self.seq.value() or 0) + 1
        self.seq.update(number)
        return {"k": key, "seq": number, "what": what, "at": at, "n": n}


def _build(env: tg.StreamEnvironment) -> None:
    rows = env.from_batches(INPUT, splits=1, parallelism=1, timestamp="at", max_out_of_orderness=SLACK_MS, uid="rows")
    seen = rows.key_by("k").process(Journal(), schema=SEEN, in_order=True, uid="journal")
    seen.to_table(SEEN_TABLE, uid="seen")
    seen.late_rows().to_table(LATE_TABLE, uid="late")


def _expected() -> tuple[list[tuple[int, str, int, int]], list[int]]:
    late, newest = [], -(10**9)
    for _, at, n in ARRIVED:
        if at <= newest - SLACK_MS - 1:
            late.append(n)
        newest = max(newest, at)
    found = []
    for key in range(KEYS):
        of_key = [(at, n) for k, at, n in ARRIVED if k == key and n not in late]
        events = [(at, 0, n) for at, n in of_key] + [(at, 1, -1) for at in {at + AHEAD_MS for at, _ in of_key}]
        found += [(key, "timer" if kind else "row", at, n) for at, kind, n in sorted(events)]
    return found, late


def _violation(simulation: Simulation) -> str | None:
    rows = sorted(read_table(simulation.open_store(SEEN_TABLE)).to_pylist(), key=lambda row: (row["k"], row["seq"]))
    seen = [(row["k"], row["what"], row["at"], row["n"]) for row in rows]
    late = sorted(read_table(simulation.open_store(LATE_TABLE)).column("n").to_pylist())
    expected, expected_late = _expected()
    wrong = [(found, wanted) for found, wanted in zip(seen, expected, strict=False) if found != wanted]
    if not wrong and (len(seen), late) == (len(expected), expected_late):
        return None
    return f"not as if sorted: {wrong[:5]}, {len(seen)} of {len(expected)} rows, late {late} of {expected_late}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_function_sees_rows_in_order_under_faults(seed: int) -> None:
    """Whatever crashes, and at another parallelism after a savepoint that comes in the midst of it."""
    check_rescaled(seed, FAULTS, _build, _violation, rows_max=3)
