"""Top-N, joins without a window, as of event time and with tables, as programs write them: whole local jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from change_view import ChangeView
from local_jobs import finish, local, rows
from waiting import until

import tidegate as tg
from tidegate.operators.functions.batch_functions import BatchContext
from tidegate.operators.joins import lookup_join
from tidegate.operators.joins.join_operator import JoinSides
from tidegate.operators.joins.lookup_join import FAILED_REFRESHES, Lookup, LookupTable
from tidegate.operators.operator import OperatorContext
from tidegate.operators.user_metrics import UserMetrics
from tidegate.storage.ids import OperatorUid, SubtaskIndex

BIDS = pa.table({"auction": [n * n % 7 for n in range(300)], "price": range(300), "t": [10 * n for n in range(300)]})
AUCTIONS = pa.table({"id": [0, 1, 2, 3], "category": ["a", "b", "a", "c"], "t": [0, 500, 1_000, 2_500]})
FRAMES = {name: pl.from_arrow(table) for name, table in (("bids", BIDS), ("auctions", AUCTIONS))}


def _streams(env: tg.StreamEnvironment) -> tuple[tg.Stream, tg.Stream]:
    bids = env.from_batches(BIDS, splits=3, timestamp="t", max_out_of_orderness="1min", uid="bids")
    auctions = env.from_batches(AUCTIONS, splits=2, timestamp="t", max_out_of_orderness="1min", uid="auctions")
    return bids, auctions


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["changes", "update"])
def test_top_n_of_a_job(tmp_path: Path, emit: Any) -> None:
    """The three highest bids of each auction with their ranks, in a table."""
    with local(3) as env:
        top = _streams(env)[0].key_by("auction").top_n(3, by="price", rank="rank", emit=emit, ttl="1h")
        table = top.to_table(str(tmp_path / "t"), mode="upsert", keys=["auction", "rank"])
        finish(env, tmp_path / "checkpoints")
    ranked = FRAMES["bids"].with_columns(rank=pl.col("price").rank("ordinal", descending=True).over("auction"))
    expected = ranked.filter(pl.col("rank") <= 3).with_columns(pl.col("rank").cast(pl.Int64))
    assert rows(table.to_arrow()) == rows(expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_a_join_without_a_window(tmp_path: Path, how: Any) -> None:
    """The mean of the greatest prices by category: a join of plain rows, an aggregate, and one behind changes."""
    with local(2) as env:
        bids, auctions = _streams(env)
        joined = bids.join(auctions, on=[("auction", "id")], how=how)
        found, emit = joined.collect(), {"emit": "changes"}
        groups = joined.key_by("category") if how == "inner" else joined.select("category", "price").key_by("category")
        table = groups.aggregate(n=tg.count(), total=tg.sum("price"), **emit).to_table(
            str(tmp_path / "t"), mode="upsert", keys=["category"]
        )
        finish(env, tmp_path / "checkpoints")
    pairs = FRAMES["bids"].join(FRAMES["auctions"], left_on="auction", right_on="id", how=how, coalesce=True)
    pairs = pairs.rename({"id": "auction"}) if how == "right" else pairs
    view = ChangeView()
    view.apply([{"row_kind": "+I", **row} for row in found.to_arrow().to_pylist()])
    names = [name for name in found.to_arrow().schema.names if name != "row_kind"]
    assert sorted(map(repr, view.rows.elements())) == sorted(map(repr, pairs.select(names).rows()))
    price = pl.col("price")
    total = pl.when(price.count() > 0).then(price.sum())  # of nothing but nulls it is null, as in SQL
    counted = pairs.group_by("category").agg(n=pl.len().cast(pl.Int64), total=total)
    assert rows(table.to_arrow()) == rows(counted)


def test_a_join_of_changes(tmp_path: Path) -> None:
    """Of running aggregates: what was joined with an older version is taken back."""
    with local(2) as env:
        bids, auctions = _streams(env)
        best = bids.key_by("auction").aggregate(best=tg.max("price"), emit="changes")
        table = best.join(auctions, on=[("auction", "id")], how="left").to_table(
            str(tmp_path / "t"), mode="upsert", keys=["auction"]
        )
        finish(env, tmp_path / "checkpoints")
    best_of = FRAMES["bids"].group_by("auction").agg(best=pl.col("price").max())
    expected = best_of.join(FRAMES["auctions"], left_on="auction", right_on="id", how="left")
    assert rows(table.to_arrow()) == rows(expected.select(table.to_arrow().schema.names))


@pytest.mark.parametrize("how", ["left", "inner"])
def test_an_as_of_join(tmp_path: Path, how: Any) -> None:
    """As polars has it, at any order of arrival; event time goes on, so a window may follow."""
    with local(3) as env:
        bids, auctions = _streams(env)
        joined = bids.join_asof(auctions, on=[("auction", "id")], by="t", how=how)
        found = joined.collect()
        counts = joined.key_by("auction").window(tg.Tumbling("1s")).aggregate(n=tg.count()).collect()
        finish(env, tmp_path)
    sides = [FRAMES["bids"].sort("t"), FRAMES["auctions"].rename({"id": "auction"}).sort("t")]
    sides[1] = sides[1].with_columns(t_right=pl.col("t"))
    expected = sides[0].join_asof(sides[1], on="t", by="auction", strategy="backward")
    expected = expected.select("auction", "price", "t", "category", "t_right")
    if how == "inner":
        expected = expected.filter(pl.col("category").is_not_null())
    assert rows(found.to_arrow()) == rows(expected)
    assert sum(counts.to_arrow().column("n").to_pylist()) == len(expected)


def _as(table: pa.Table, what: str, place: Path, env: tg.StreamEnvironment) -> Any:
    """A table in each form that a lookup takes."""
    if what in ("files", "file"):
        place.mkdir()
        pq.write_table(table.slice(0, 2), place / "1.parquet")
        pq.write_table(table.slice(2), place / "2.parquet")
        return place if what == "files" else str(place / "1.parquet")
    if what == "delta":
        from deltalake import write_deltalake

        write_deltalake(str(place), table)
        return str(place)
    if what in ("table", "its url"):
        written = env.from_batches(table).to_table(str(place), mode="upsert", keys=["id"])
        finish(env, place / "checkpoints")
        return written if what == "table" else place
    return {"arrow": table, "polars": pl.from_arrow(table), "function": lambda: table}[what]


@pytest.mark.parametrize("what", ["arrow", "polars", "function", "files", "file", "delta", "table", "its url"])
def test_tables_that_are_looked_up(tmp_path: Path, what: str) -> None:
    """In each form that a table has, a row meets those of its key, and keeps its place in event time."""
    with local() as env:
        table = _as(AUCTIONS.select(["id", "category"]), what, tmp_path / "looked-up", env)
    with local(2) as env:
        joined = _streams(env)[0].lookup_join(table, on=[("auction", "id")])
        assert joined.timestamp == "t"
        found = joined.collect()
        finish(env, tmp_path / "checkpoints")
    known = FRAMES["auctions"].head(2) if what == "file" else FRAMES["auctions"]
    expected = FRAMES["bids"].join(known.drop("t"), left_on="auction", right_on="id", how="left")
    assert rows(found.to_arrow()) == rows(expected)


class _Shelf:
    """A table that a test changes, or that cannot be read."""

    def __init__(self) -> None:
        self.table: pa.Table | None = pa.table({"k": [1, 1, 2], "v": ["a", "b", "c"]})
        self.reads = 0

    def read(self) -> pa.Table:
        """Raises if there is none."""
        self.reads += 1
        if self.table is None:
            raise OSError("nobody is there")
        return self.table


def _looking_up(shelf: _Shelf, inner: bool = True, refresh_ms: int | None = 1, **limits: int) -> LookupTable:
    schema = pa.schema({"k": pa.int64()})
    lookup = Lookup(
        JoinSides((("k",), ("k",)), (None, None)), schema, shelf.read().schema, inner, limits.get("rows", 9)
    )
    return LookupTable(lookup, shelf.read, refresh_ms, limits.get("stale_ms", 60_000))


def _found(function: LookupTable, keys: list[int | None]) -> list[tuple[Any, ...]]:
    found = function.process(pa.RecordBatch.from_pydict({"k": pa.array(keys, pa.int64())}))
    return [] if found is None else sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)


def _open(function: LookupTable) -> BatchContext:
    uid = OperatorUid("lookup")
    where = BatchContext(OperatorContext(uid, "lookup", SubtaskIndex(0), 1, 1, metrics=UserMetrics("a lookup")))
    function.open(where)
    return where


def test_a_table_is_read_again() -> None:
    """Beside processing: rows that come later meet the new version. A failure keeps the old one, and is counted."""
    shelf = _Shelf()
    function = _looking_up(shelf)
    where = _open(function)
    assert _found(function, [1, 2, 3, None]) == [(1, "a"), (1, "b"), (2, "c")]
    shelf.table = pa.table({"k": [3], "v": ["new"]})
    until("the table is read again", lambda: _found(function, [1, 3]) == [(3, "new")])
    shelf.table = None
    until(
        "the table is read again",
        lambda: _found(function, [3]) == [(3, "new")] and where.metrics.counter(FAILED_REFRESHES).value > 1,
    )
    shelf.table = pa.table({"k": [3], "x": ["other columns"]})
    before = shelf.reads
    until("the table is read again", lambda: shelf.reads > before + 1)
    assert _found(function, [3]) == [(3, "new")]
    function.close()


def test_a_table_that_is_too_old_fails_the_task() -> None:
    """With the last error of reading it."""
    shelf = _Shelf()
    function = _looking_up(shelf, stale_ms=0)
    _open(function)
    shelf.table = None

    def failed() -> bool:
        try:
            _found(function, [1])
        except tg.ConfigurationError as error:
            return "too old; the last error was OSError: nobody is there" in str(error)
        return False

    until("the table is too old", failed)
    function.close()


def test_a_table_that_is_too_large_is_refused() -> None:
    """When the task begins."""
    with pytest.raises(tg.ConfigurationError, match="has 3 rows, more than max_rows=2"):
        _open(_looking_up(_Shelf(), rows=2))


def test_unknown_keys_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index forgets them now and then, and finds what is there as before."""
    monkeypatch.setattr(lookup_join, "_STRANGERS_MAX", 10)
    function = _looking_up(_Shelf(), inner=False, refresh_ms=None)
    _open(function)
    for start in range(100, 200, 7):
        assert (2, "c") in _found(function, [2, *range(start, start + 7)])
        assert function._version._index.size <= 2 + 10 + 8
    function.close()


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    """While the program is made, with what to do."""
    with local() as env:
        bids, auctions = _streams(env)
        updates = bids.key_by("auction").aggregate(n=tg.count())
        changes = bids.key_by("auction").aggregate(n=tg.count(), emit="changes")
        refused: list[tuple[Any, str]] = [
            (lambda: bids.join(auctions, on=[("auction", "id")], how="semi"), "without a window is one of"),
            (lambda: bids.join(auctions, on="t", window=tg.Tumbling("1s"), ttl="1s"), "remove ttl= or window="),
            (lambda: updates.join(auctions, on=[("auction", "id")]), "emits updates"),
            (lambda: bids.join(env.from_batches(AUCTIONS), on=[("auction", "id")], ttl="1d"), "has no event time"),
            (lambda: bids.join_asof(auctions, on=[("auction", "id")], by="price"), "name it with assign_timestamps"),
            (lambda: bids.join_asof(auctions, on=[("auction", "id")], how="full"), 'must be "inner" or "left"'),
            (lambda: bids.join_latest(auctions, on=[("auction", "id")], emit="final"), '"complete" or "always"'),
            (lambda: updates.join_latest(auctions, on=[("auction", "id")]), "emits updates"),
            (lambda: auctions.join_latest(changes, on=[("id", "auction")]), "emits changes"),
            (lambda: bids.join_latest(env.from_batches(AUCTIONS), on="t", ttl="1d"), "has no event time"),
            (lambda: bids.join_latest(auctions, on="auction"), "no column 'auction'"),
            (lambda: bids.lookup_join(AUCTIONS, on=[("auction", "id")], refresh="1s"), "for tables that may change"),
            (lambda: bids.lookup_join(7, on="t"), "int is not a table"),
            (lambda: bids.lookup_join(tmp_path / "nothing", on="t"), "neither a table nor a Parquet file"),
            (lambda: updates.lookup_join(AUCTIONS, on="t"), "emits updates"),
            (lambda: bids.key_by("auction").top_n(0, by="price"), "between 1 and"),
            (lambda: bids.map_batches(lambda b: b).key_by("t").top_n(1, by="t"), "not known before the job runs"),
        ]
        for make, reason in refused:
            with pytest.raises(tg.ConfigurationError, match=reason):
                make()


def test_reading_that_fails_at_first_says_where() -> None:
    """A task does not begin without its table."""
    shelf = _Shelf()
    function = _looking_up(shelf)
    shelf.table = None
    with pytest.raises(OSError, match="nobody is there"):
        _open(function)
