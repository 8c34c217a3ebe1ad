"""Ranks of rows within their groups, and which rows are among the first ones, a batch at a time.

Rules: rows are ordered by words (`order_words.py`), the first column counts most. Of rows that are equal in all words
the first to come is before the others; with `ties` they share the rank of the first of them (SQL's `RANK`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Words = list[NDArray[np.int64]]

_BEHIND = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class RankWords:
    """The words of rows, of one column after the other, and which of these are null (`placed_words`)."""

    values: Words
    nulls: list[NDArray[np.int64] | None]

    @property
    def sorting(self) -> Words:
        """What rows are sorted by, the first one counts most. Without nulls these are the words."""
        pairs = zip(self.values, self.nulls, strict=True)
        return [each for pair in pairs for each in pair if each is not None]

    def take(self, rows: NDArray[np.int64]) -> RankWords:
        """The words of some rows."""
        return RankWords(
            [words[rows] for words in self.values],
            [None if nulls is None else nulls[rows] for nulls in self.nulls],
        )

    def then(self, other: RankWords) -> RankWords:
        """These rows, and others behind them."""
        values = [np.concatenate(pair) for pair in zip(self.values, other.values, strict=True)]
        lengths = len(self.values[0]), len(other.values[0])
        nulls: list[NDArray[np.int64] | None] = []
        for pair in zip(self.nulls, other.nulls, strict=True):
            if all(part is None for part in pair):
                nulls.append(None)
                continue
            parts = [
                np.zeros(length, dtype=np.int64) if part is None else part
                for part, length in zip(pair, lengths, strict=True)
            ]
            nulls.append(np.concatenate(parts))
        return RankWords(values, nulls)


def ranks_of(groups: NDArray[np.int64], words: Words, ties: bool = False) -> Positions:
    """The rank of each row in its group, from 0."""
    order = np.lexsort((*reversed(words), groups))  # stable: of equal rows the first to come is first
    begins = _begins((groups,), order)
    numbers = np.arange(len(order), dtype=np.int64)
    starts = np.maximum.accumulate(np.where(begins, numbers, 0))
    if ties:
        numbers = np.maximum.accumulate(np.where(_begins((groups, *words), order), numbers, 0))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = numbers - starts
    return ranks


def first_rows(groups: NDArray[np.int64], words: Words, n: int, ties: bool, size: int) -> NDArray[np.bool_]:
    """Which rows are among the first `n` of their group. `groups` are numbers below `size`."""
    kept = np.zeros(len(groups), dtype=np.bool_)
    candidates = np.arange(len(groups), dtype=np.int64)
    if n == 1:  # no other than the best by the first column can be the first: that needs no sort
        best = np.full(size, _BEHIND, dtype=np.int64)
        np.minimum.at(best, groups, words[0])
        best_ones: NDArray[np.bool_] = words[0] == best[groups]
        if ties and len(words) == 1:
            return best_ones
        candidates = np.flatnonzero(best_ones)
    ranks = ranks_of(groups[candidates], [word[candidates] for word in words], ties)
    kept[candidates[ranks < n]] = True
    return kept


def _begins(columns: Sequence[NDArray[np.int64]], order: Positions) -> NDArray[np.bool_]:
    """Where one of the columns is another than in the row before, in this order."""
    begins = np.zeros(len(order), dtype=np.bool_)
    begins[:1] = True
    for column in columns:
        ordered = column[order]
        begins[1:] |= ordered[1:] != ordered[:-1]
    return begins
