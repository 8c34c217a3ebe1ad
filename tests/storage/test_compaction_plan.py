"""Which units of a growing table are put together, and how few are left."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.storage.tables.maintenance import (
    FILES_A_UNIT_MAX,
    CompactionSettings,
    Unit,
    next_compaction,
)


def put_together(units: list[Unit], settings: CompactionSettings) -> list[Unit]:
    """The units after one compaction; small files become large ones, but for one."""
    level, chosen = next_compaction(units, settings)
    if not chosen:
        return units
    at = units.index(chosen[0])
    assert units[at : at + len(chosen)] == list(chosen), "they are next to each other"
    sum_bytes = sum(unit.small_bytes for unit in chosen)
    new = Unit(chosen[-1].seq, level, 1 + sum_bytes // settings.file_bytes, sum_bytes % settings.file_bytes)
    return [*units[:at], new, *units[at + len(chosen) :]]


@given(st.integers(2, 10), st.integers(1, 300), st.integers(1, 100))
def test_few_units_are_left_however_many_commits_there_are(fan_in: int, commits: int, file_bytes: int) -> None:
    """With one step after each commit: less than `fan_in` of each level, and levels that grow with the logarithm."""
    settings = CompactionSettings(file_bytes, fan_in)
    units: list[Unit] = []
    for seq in range(commits):
        units = put_together([*units, Unit(seq, 0, 1, 1)], settings)
        levels = [unit.level for unit in units]
        assert all(first >= second for first, second in pairwise(levels))
        # A level that has become full waits for the steps of those below it.
        assert all(levels.count(level) <= fan_in for level in levels)
    assert fan_in ** max(unit.level for unit in units) <= commits


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=60), st.integers(2, 5))
def test_whatever_was_left_behind_is_put_together_in_the_end(given: list[tuple[int, int]], fan_in: int) -> None:
    """Levels in any order, as restored jobs leave them. Every step leaves fewer, and nothing is due twice for ever."""
    settings = CompactionSettings(100, fan_in)
    units = [Unit(seq, level, 1, small) for seq, (level, small) in enumerate(given)]
    for _ in range(len(units) + 1):
        before, units = units, put_together(units, settings)
        if units == before:
            break
        assert len(units) <= len(before) - fan_in + 1
    assert len(units) <= (fan_in - 1) * len({unit.level for unit in units})


def test_who_has_fallen_behind_takes_more_at_once_and_reads_no_more_than_the_limit() -> None:
    """All that wait, up to eight times the size of a file; at least as many as are always taken."""
    units = [Unit(seq, 0, 1, 10) for seq in range(100)]
    assert len(next_compaction(units, CompactionSettings(1_000))[1]) == 100
    assert len(next_compaction(units, CompactionSettings(50))[1]) == 40
    assert len(next_compaction(units, CompactionSettings(1))[1]) == 10


def test_a_unit_of_very_many_files_stays_as_it_is() -> None:
    """And what comes after it goes on by itself."""
    large = Unit(0, 3, FILES_A_UNIT_MAX, 0)
    after = [Unit(seq, 0, 1, 1) for seq in range(1, 3)]
    assert next_compaction([large, *after], CompactionSettings(10, 2)) == (1, tuple(after))
    assert next_compaction([large, large], CompactionSettings(10, 2)) == (0, ())


@pytest.mark.parametrize("count", [0, 1, 9])
def test_nothing_is_due_before_there_are_enough(count: int) -> None:
    """However small they are."""
    assert next_compaction([Unit(seq, 0, 1, 1) for seq in range(count)], CompactionSettings(10)) == (0, ())
