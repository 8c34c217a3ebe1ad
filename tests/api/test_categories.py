"""Categories go through a job into its tables, however many there are in all."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import finish, local, rows

import tidegate as tg

_CATEGORY = pa.dictionary(pa.int8(), pa.string())
_SCHEMA = pa.schema({"word": _CATEGORY, "n": pa.int64()})


def _categories(batch: pa.RecordBatch) -> pa.RecordBatch:
    """As pandas makes them: the indexes are as small as the batch allows."""
    numbers = batch.column("n")
    return pa.record_batch({"word": pa.array([f"w{n}" for n in numbers.to_pylist()], _CATEGORY), "n": numbers})


def test_tables_hold_more_categories_than_a_batch(tmp_path: Path) -> None:
    """Appended, upserted by category, and collected: 300 categories from batches of 50."""
    data = pa.table({"n": list(range(300))})
    with local() as env:
        words = env.from_batches(data).map_batches(_categories, schema=_SCHEMA)
        appended = words.to_table(str(tmp_path / "append"))
        upserted = words.to_table(str(tmp_path / "upsert"), mode="upsert", keys=["word"])
        collected = words.collect()
        finish(env, tmp_path / "checkpoints")

    expected = sorted(((f"w{n}", n) for n in range(300)), key=repr)
    for found in (appended.to_arrow(), upserted.to_arrow(), collected.to_arrow()):
        assert pa.dictionary(pa.int32(), pa.string()) == found.schema.field("word").type
        assert expected == rows(found.set_column(0, "word", found.column("word").cast(pa.string())))


def test_a_dictionary_that_no_table_holds_is_refused_at_once(tmp_path: Path) -> None:
    """When the program is made, not when rows come."""
    schema = pa.schema({"odd": pa.list_view(_CATEGORY)})
    with local() as env, pytest.raises(tg.TableError, match="column 'odd'"):
        env.from_batches(pa.table({"n": [1]})).map_batches(_categories, schema=schema).to_table(str(tmp_path / "t"))
