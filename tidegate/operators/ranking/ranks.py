"""Ranks rows within their groups, one batch at a time.

Rows are compared by order words. An order word is a 64-bit integer that represents a value of an order column, and that
sorts like the values. Rules:

- Rows are sorted by the words of the first order column, then of the second, and so on. Of rows that are equal in all
  words the first to arrive comes first. With `ties` they share the rank of the first of them (SQL's `RANK`).
- Words are comparable only if values of the same kind of type made them. `order_form` names this kind, and state
  columns have it in their names.
- Minus zero equals zero. NaN is greater than any number.
- A null has no word. A ranking places nulls before or after all words (`placed_words`), and a deduplication refuses
  them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Words, key_form, plain, storage_dtype
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type

Positions = NDArray[np.int64]
OrderWords = list[NDArray[np.int64]]

_BEHIND = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class RankWords:
    """The order words of rows: for each order column, integers that sort as the values of the column do.

    `nulls` has, for each column, an array that separates nulls from values with the same word, or None (see
    `placed_words`).
    """

    values: OrderWords
    nulls: list[NDArray[np.int64] | None]

    @property
    def sorting(self) -> OrderWords:
        """Returns the sort keys of the rows, the most significant first: for each column its words, then the array that
        places its nulls.
        """
        pairs = zip(self.values, self.nulls, strict=True)
        return [each for pair in pairs for each in pair if each is not None]

    def take(self, rows: NDArray[np.int64]) -> RankWords:
        """Returns the order words, and their nulls, of the rows with these indices."""
        return RankWords(
            [words[rows] for words in self.values],
            [None if nulls is None else nulls[rows] for nulls in self.nulls],
        )

    def then(self, other: RankWords) -> RankWords:
        """Returns the order words of these rows and, appended, the order words of the rows of `other`."""
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


def ranks_of(groups: NDArray[np.int64], words: OrderWords, ties: bool = False) -> Positions:
    """Returns the rank of each row in its group, counted from 0.

    With `ties` rows that are equal in all words share a rank.
    """
    order = np.lexsort((*reversed(words), groups))  # stable: of equal rows the first to come is first
    begins = _begins((groups,), order)
    numbers = np.arange(len(order), dtype=np.int64)
    starts = np.maximum.accumulate(np.where(begins, numbers, 0))
    if ties:
        numbers = np.maximum.accumulate(np.where(_begins((groups, *words), order), numbers, 0))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = numbers - starts
    return ranks


def first_rows(groups: NDArray[np.int64], words: OrderWords, n: int, ties: bool, size: int) -> NDArray[np.bool_]:
    """Returns whether each row is among the first `n` of its group.

    `groups` has the group number of each row, less than `size`. With `ties` rows that are equal in all words share a
    rank.
    """
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
    """Returns, for each row in the sort order `order`, whether its values in `columns` differ from the previous row.
    True for the first row.
    """
    begins = np.zeros(len(order), dtype=np.bool_)
    begins[:1] = True
    for column in columns:
        ordered = column[order]
        begins[1:] |= ordered[1:] != ordered[:-1]
    return begins


_MOST = np.int64(np.iinfo(np.int64).max)
_LEAST = np.int64(np.iinfo(np.int64).min)


def check_order_column(schema: pa.Schema, column: str, operator: str) -> None:
    """Raises ConfigurationError if the column is missing, or if its type cannot order rows.

    `operator` names the step in the error.
    """
    position = schema.get_field_index(column)
    if position < 0:
        raise ConfigurationError(
            f"{operator}(by={column!r}): there is no column {column!r} (or two of them) in {schema.names}"
            "; name one of these"
        )
    data_type = decoded_type(schema.field(position).type)
    if storage_dtype(data_type) is None and not pa.types.is_boolean(data_type):
        raise ConfigurationError(
            f"{operator}(by={column!r}): rows cannot be ordered by a column of type {data_type}; use numbers, dates, "
            "times or timestamps (derive such a column with with_columns before key_by)"
        )


def order_form(data_type: pa.DataType) -> str:
    """Returns the kind of a type for the comparison of order words.

    Order words of columns with the same kind can be compared with each other.
    """
    data_type = decoded_type(data_type)
    if pa.types.is_floating(data_type):
        return "double"
    if pa.types.is_uint64(data_type):
        return "uint64"
    if pa.types.is_integer(data_type) or pa.types.is_boolean(data_type):
        return "int64"
    return str(data_type)


def placed_words(
    batch: pa.RecordBatch, column: str, descending: bool, nulls_last: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns order words that ascend in the order of a ranking, and an array that places nulls. The array is None if
    there are no nulls.

    Nulls have the least or the greatest possible word. The second array distinguishes them from values with that word:
    it is -1 for nulls that come first, 1 for nulls that come last, and 0 for values. Raises ConfigurationError for a
    type that cannot order rows.
    """
    values = plain(batch.column(column))
    nulls = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    words = _words_of(values, column)
    words = ~words if descending else words
    if nulls is None:
        return words, None
    return np.where(nulls, _MOST if nulls_last else _LEAST, words), np.where(
        nulls, np.int64(1 if nulls_last else -1), 0
    )


def order_words(batch: pa.RecordBatch, column: str) -> NDArray[np.int64]:
    """Returns integers that are in the same order as the values of a column (order words), as a read-only array.

    Raises ValueError for a null, and ConfigurationError for a type that cannot order rows.
    """
    values = plain(batch.column(column))
    if values.null_count:
        raise ValueError(
            f"column {column!r} is null in a row, and deduplicate orders rows by it; filter such rows out before "
            f"(WHERE {column} IS NOT NULL), or fill in a value"
        )
    return _words_of(values, column)


def _words_of(values: pa.Array, column: str) -> NDArray[np.int64]:
    """Returns the order words of values as a read-only array. Words of nulls are undefined."""
    form = key_form(values, column)
    assert isinstance(form, Words), f"{values.type} has no order words"
    words = form.words
    if pa.types.is_floating(values.type):
        words = words ^ ((words >> 63) & _MOST)
    elif pa.types.is_uint64(values.type):
        words = words ^ _LEAST
    words.flags.writeable = False
    return words
