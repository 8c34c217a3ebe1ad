"""Rows that are gathered come out in the order of the database, some key groups at a time."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.rocksdb import row_writer
from tidegate.state.rocksdb.keys import strings_of
from tidegate.state.rocksdb.row_writer import GatheredRows, sst_file

_Rows = dict[tuple[int, bytes], bytes]
"""By key group and key."""


def strings(parts: list[bytes]) -> Strings:
    """As arrays."""
    data = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return Strings(np.array([0, *accumulate(map(len, parts))], dtype=np.int64), data, NO_MASK)


def gathered(rows: _Rows, parts: int, sorted_by_group: bool, removes: bool = False) -> GatheredRows:
    """Rows in so many parts, as snapshots have them, or in any order."""
    found = GatheredRows()
    of = list(rows.items())
    for number in range(parts):
        some = of[number::parts]
        if not some:
            continue
        starts: list[int] = []
        first = 0
        if sorted_by_group:
            some.sort(key=lambda row: row[0][0])
            groups = [group for (group, _), _ in some]
            first = groups[0]
            starts = [int(start) for start in np.searchsorted(groups, range(first, groups[-1] + 2))]
        keys = strings([group.to_bytes(2, "big") + key for (group, key), _ in some])
        found.add(keys, None if removes else strings([value for _, value in some]), first, starts)
    return found


_ROWS = st.dictionaries(
    st.tuples(st.integers(0, 9), st.binary(min_size=1, max_size=12)), st.binary(max_size=9), min_size=1
)


@given(_ROWS, st.integers(1, 4), st.booleans(), st.integers(1, 200))
def test_all_rows_come_out_in_order(rows: _Rows, parts: int, sorted_by_group: bool, slice_bytes: int) -> None:
    """Each key once, with its value, however they came and however much comes out at a time."""
    expected = sorted((group.to_bytes(2, "big") + key, value) for (group, key), value in rows.items())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_writer, "_SLICE_BYTES", slice_bytes)
        for removes in (False, True):
            all_rows = gathered(rows, parts, sorted_by_group, removes)
            assert all_rows.rows == len(rows)
            slices = list(all_rows.slices())
            assert all_rows.rows == all_rows.size_bytes == len(list(all_rows.slices())) == 0
            assert [key for some in slices for key in strings_of(some.keys, some.order)] == [key for key, _ in expected]
            if removes:
                assert all(some.values is None for some in slices)
            else:
                values = [strings_of(some.values, some.order) for some in slices if some.values is not None]
                assert [value for some in values for value in some] == [value for _, value in expected]


def test_some_key_groups_come_out_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array has all rows, and none has a part of a key group."""
    rows = {(group, number.to_bytes(4, "big")): bytes(10) for group in range(10) for number in range(100)}
    monkeypatch.setattr(row_writer, "_SLICE_BYTES", 16 * 150)
    slices = list(gathered(rows, 3, sorted_by_group=True).slices())
    assert [len(some.order) for some in slices] == [200] * 5


def test_slices_out_of_order_are_no_file() -> None:
    """A part whose groups are not those of its keys is noticed: RocksDB would not notice, and find the wrong row."""
    wrong = GatheredRows()
    wrong.add(strings([b"\0\2a", b"\0\1a"]), strings([b"", b""]), 1, (0, 1, 2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_writer, "_SLICE_BYTES", 1)
        with pytest.raises(AssertionError, match="keys of an SST file must ascend"):
            list(sst_file(wrong.slices(), 8_192))
