"""Chosen rows equal those that plain Python chooses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
from aggregate_model import model
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn
from tidegate.state.kernels import choose
from tidegate.state.kernels.columns import NO_MASK, Strings, key_form
from tidegate.state.kernels.paged import PAGE_ROWS

_FIRST = PAGE_ROWS - 2
_BY = st.none() | st.sampled_from([0.5, -1.0, 2.0, math.nan, math.inf])


def _column(data_type: pa.DataType) -> PagedColumn:
    column = PagedColumn(ValueSpec("x", data_type, 0))
    column.grow(2)
    return column


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), _BY), max_size=12), st.integers(0, 12), st.booleans())
def test_rows_are_chosen_as_in_plain_python(found: list[tuple[int, Any]], cut: int, masked: bool) -> None:
    """Across two batches and two pages: the first, the last, and those with the least and the greatest value."""
    rows = [{"slot": slot, "by": by, "row": row} for row, (slot, by) in enumerate(found)]
    for kind in ("first", "last", "arg_min", "arg_max"):
        for by in ("by", None) if kind in ("first", "last") else ("by",):
            seen, bests, chosen_rows = _column(pa.uint8()), _column(pa.float64()), _column(pa.int32())
            for part in (rows[:cut], rows[cut:]):
                slots = np.array([_FIRST + row["slot"] for row in part], dtype=np.int32)
                values = np.array([0.0 if row["by"] is None else row["by"] for row in part])
                known = np.array([by is None or row["by"] is not None for row in part], dtype=np.uint8)
                mask = known if masked or not known.all() else NO_MASK
                chosen = np.zeros(len(part), dtype=np.uint8)
                if by is None:
                    kernel = choose.choose_first if kind == "first" else choose.choose_last
                    kernel(seen.pages, slots, mask, chosen)
                else:
                    greatest, ties = kind in ("last", "arg_max"), kind == "last"
                    choose.choose_extreme(seen.pages, bests.pages, slots, values, mask, chosen, greatest, ties)
                numbers = np.array([row["row"] for row in part], dtype=np.int32)
                choose.store_chosen(chosen_rows.pages, slots, numbers, chosen)
            places = np.arange(_FIRST, _FIRST + 4)
            results = zip(seen.raw(places).tolist(), chosen_rows.raw(places).tolist(), strict=True)
            expected = [model(kind, [row for row in rows if row["slot"] == slot], "row", by) for slot in range(4)]
            assert [row if flag else None for flag, row in results] == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.text(max_size=3)), max_size=10), st.booleans())
def test_strings_are_chosen_by_their_bytes(found: list[tuple[int, str | None]], greatest: bool) -> None:
    """The first of the least, or of the greatest, in each group; also of an array that is a slice."""
    texts = pa.array(["", *(text for _, text in found)], pa.string()).slice(1)
    form = key_form(texts, "x")
    assert isinstance(form, Strings)
    rows = np.array([row for row, (_, text) in enumerate(found) if text is not None], dtype=np.int64)
    groups = np.array([found[row][0] for row in rows], dtype=np.int32)
    best = np.full(3, -1, dtype=np.int64)
    choose.choose_strings(form.offsets, form.data, rows, groups, best, greatest)
    for group in range(3):
        known = [(str(text).encode(), row) for row, (of, text) in enumerate(found) if of == group and text is not None]
        most = (max if greatest else min)((text for text, _ in known), default=None)
        assert best[group] == next((row for text, row in known if text == most), -1)
