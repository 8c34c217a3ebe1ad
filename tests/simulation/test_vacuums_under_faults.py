"""Old files of tables are deleted while jobs commit, fail, fall back and are restored: no rule is broken by it."""

from __future__ import annotations

from collections import Counter

import pytest

from tidegate.simulation.oracle.violation import InvariantViolated
from tidegate.simulation.pipelines import pieces
from tidegate.storage.tables.compaction import running_vacuum
from tidegate.storage.tables.compaction.running_vacuum import RunningVacuum
from tidegate.testing import simulate_random

SEEDS = (0, 2, 3, 23, 103)
HISTORY_MS = 1


def test_vacuums_beside_commits_break_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files a step, so that processes are killed between two steps of one vacuum."""
    monkeypatch.setattr(pieces, "HISTORY_MS", HISTORY_MS)
    monkeypatch.setattr(running_vacuum, "FILES_A_STEP", 2)
    steps: Counter[bool] = Counter()
    broken: list[str] = []
    step = RunningVacuum.step

    def counted(self: RunningVacuum, *arguments: object) -> bool:
        try:
            worked = step(self, *arguments)  # type: ignore[arg-type]
        except InvariantViolated as error:  # A job goes on without its vacuums, whatever they raise.
            broken.append(str(error))
            raise
        steps[worked] += 1
        return worked

    monkeypatch.setattr(RunningVacuum, "step", counted)
    for seed in SEEDS:
        report = simulate_random(seed)
        assert report.violation is None, f"seed {seed}: {report.violation}"
        assert broken == [], f"seed {seed}"
    assert steps[True] >= 4, steps
