"""Old files of tables are deleted, and logs cut, while jobs commit, fall back and are restored: no rule breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from random_jobs import pieces
from random_jobs.scenarios import simulate_random

from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables import maintenance, table_log
from tidegate.storage.tables.log import vacuum
from tidegate.storage.tables.log.entries import TableEntry, TableFold, TableVacuum
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.maintenance import RunningVacuum
from tidegate.storage.tables.table_log import TableLog
from tidegate.testing.oracle import InvariantViolated

SEEDS = (0, 2, 3, 23, 103)
HISTORY_MS = 1


def test_vacuums_beside_commits_break_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files a step, so that processes are killed between two steps of one vacuum."""
    monkeypatch.setattr(pieces, "HISTORY_MS", HISTORY_MS)
    monkeypatch.setattr(maintenance, "FILES_A_STEP", 2)
    monkeypatch.setattr(vacuum, "DROPPED_MIN", 1)
    steps: Counter[bool] = Counter()
    cuts: Counter[bool] = Counter()
    broken: list[str] = []
    step = RunningVacuum.step

    def counted(self: RunningVacuum, *arguments: object) -> bool:
        try:
            worked = step(self, *arguments)  # type: ignore[arg-type]
        except InvariantViolated as error:  # A job continues without its vacuums, whatever they raise.
            broken.append(str(error))
            raise
        steps[worked] += 1
        return worked

    cut = TableLog.cut

    def counted_cut(self: TableLog, *arguments: Any) -> bool:
        done = cut(self, *arguments)
        cuts[done] += 1
        return done

    monkeypatch.setattr(RunningVacuum, "step", counted)
    monkeypatch.setattr(TableLog, "cut", counted_cut)
    for seed in SEEDS:
        report = simulate_random(seed)
        assert report.violation is None, f"seed {seed}: {report.violation}"
        assert broken == [], f"seed {seed}"
    assert steps[True] >= 4, steps
    assert cuts[True] >= 2, cuts


@pytest.mark.parametrize("what", ["within its history", "that a checkpoint needs"])
def test_a_vacuum_that_takes_too_much_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle records when a file was hidden and which files have the rows of a checkpoint, whatever the log
    contains.
    """
    monkeypatch.setattr(pieces, "HISTORY_MS", 1 if what == "that a checkpoint needs" else 1_000)
    broken: list[str] = []
    step = RunningVacuum.step
    vacuum_of = vacuum.vacuum_of

    def noted(self: RunningVacuum, *arguments: Any) -> bool:
        try:
            return step(self, *arguments)
        except InvariantViolated as error:
            broken.append(str(error))
            raise

    def too_much(url: str, entries: Sequence[TableEntry], fold: TableFold, retention: Retention) -> TableVacuum:
        if what == "within its history":
            return vacuum_of(url, entries, fold, replace(retention, since_ms=10**15))
        return vacuum_of(url, entries, fold, replace(retention, checkpoints=(CheckpointId(10**9),)))

    monkeypatch.setattr(RunningVacuum, "step", noted)
    monkeypatch.setattr(table_log, "vacuum_of", too_much)
    for seed in (*SEEDS, *range(30)):
        report = simulate_random(seed)
        if broken or report.violation is not None:
            return
    pytest.fail("nobody has noticed")
