"""Row tables in RocksDB hold few values in memory, however many rows a scan reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backend_model import BACKENDS, KEYS, key_batch, key_of

from tidegate.state.rocksdb import row_table
from tidegate.storage.state.rocksdb import value_layout

_VALUES = pa.schema([("i", pa.int64()), ("text", pa.string())])
_ROWS = 400


def test_values_are_read_in_pieces_and_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of 400 rows decodes seven at a time and holds what the limit allows; the others are read when taken."""
    decoded: list[int] = []
    unpacked = value_layout.unpacked

    def counting(values: Sequence[bytes], schema: pa.Schema) -> Any:
        decoded.append(len(values))
        return unpacked(values, schema)

    monkeypatch.setattr(value_layout, "unpacked", counting)
    monkeypatch.setattr(row_table, "_PIECE_ROWS", 7)
    monkeypatch.setattr(row_table, "_HELD_BYTES", 1000)
    backend = BACKENDS["rocksdb"](True)
    table = backend.rows("r", _VALUES)
    backend.fix_keys(KEYS)
    texts = [f"text {number}" * 10 for number in range(_ROWS)]
    rows = pa.record_batch([pa.array(range(_ROWS)), pa.array(texts)], schema=_VALUES)
    table.append(key_batch([number % 2 for number in range(_ROWS)]), rows)
    table.done()

    scanned = [(part.column("i").to_pylist(), refs) for part, refs in table.scan(["i"], 50)]
    numbers, refs = [i for part, _ in scanned for i in part], [ref for _, part in scanned for ref in part.tolist()]
    assert sorted(numbers) == list(range(_ROWS))
    assert max(len(part) for part, _ in scanned) <= 50
    assert max(decoded) <= 7
    held = [value for _, value in table._scanned.entries if value is not None]  # type: ignore[attr-defined]
    assert 0 < sum(map(len, held)) <= 1000

    # Rows that are taken away are there until the batch ends, for refs; a find does not see them.
    by_number = dict(zip(numbers, refs, strict=True))
    gone = pa.array([by_number[number] for number in range(0, _ROWS, 2)]).to_numpy()
    table.remove(gone)
    assert table.take(gone, ["text"]).column(0).to_pylist() == texts[::2]
    assert max(decoded) <= 7
    assert len(table.find(key_batch([0])).refs) == 0
    table.done()
    left = table.find(key_batch([0, 1]))
    assert table.take(left.refs, ["i", "k"]).to_pylist() == [
        {"i": number, "k": key_of(1)[0]} for number in range(1, _ROWS, 2)
    ]
    assert table.take(left.refs[:0]).num_rows == 0
    table.done()
    assert [part.num_rows for part, _ in table.scan(["k"], 1000)] == [_ROWS // 2]
    table.done()
    backend.close()


@pytest.mark.parametrize("rows_of_later", [3, 9])
def test_rows_that_are_removed_while_a_scan_goes_on_are_not_in_it(
    monkeypatch: pytest.MonkeyPatch, rows_of_later: int
) -> None:
    """Also those whose turn has not come: a row has its own ref, whatever goes."""
    monkeypatch.setattr(row_table, "_PIECE_ROWS", 4)
    backend = BACKENDS["rocksdb"](True)
    table = backend.rows("r", _VALUES)
    backend.fix_keys(KEYS)
    keys = [0, 0, 0, *[1] * rows_of_later, *[2] * rows_of_later]
    texts = [str(number) for number in range(len(keys))]
    table.append(key_batch(keys), pa.record_batch([pa.array(range(len(keys))), pa.array(texts)], schema=_VALUES))
    table.done()

    found = table.find(key_batch(range(3)))
    scan = table.scan(["i", "k"], 1)
    part, refs = next(scan)
    seen = {int(refs[0]): part.column("i")[0].as_py()}
    others = found.refs[table.take(found.refs, ["k"]).column(0).to_numpy() != part.column("k")[0].as_py()]
    removed = set(table.take(others[::2], ["i"]).column(0).to_pylist())
    table.remove(others[::2])
    for part, refs in scan:
        assert part.num_rows == len(refs)
        seen |= dict(zip(refs.tolist(), part.column("i").to_pylist(), strict=True))
    assert table.take(np.array(list(seen), dtype=np.int64), ["i"]).column(0).to_pylist() == list(seen.values())
    assert sorted(seen.values()) == sorted(set(range(len(keys))) - removed)
    table.done()
