"""What a step is given by keyword is an option or a column. What could be both is refused, as forgotten columns are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, local
from programs import inputs_of

import tidegate as tg
from tidegate.storage.errors import ConfigurationError, JobFailedError

ROWS = pa.table({"id": [1, 2], "full_name": ["ann", "bob"]})
OPTIONS = ("name", "uid", "parallelism")


@pytest.mark.parametrize("option", OPTIONS)
def test_an_expression_under_the_word_of_an_option_is_a_column(option: str) -> None:
    """And a mapping always has columns."""
    with local(1) as env:
        rows = env.from_batches(ROWS)
        made = [
            rows.select("id", **{option: pl.col("full_name")}),
            rows.select("id", {option: "full_name"}),
            rows.with_columns(**{option: pl.col("full_name")}).select("id", {option: option}),
            rows.with_columns({option: "full_name"}).select("id", {option: option}),
        ]
        found = [stream.collect() for stream in made]
        assert [stream.schema.names for stream in made] == [["id", option]] * 4
        env.execute("columns").wait("4min")
    for rows_found in found:
        assert rows_found.to_arrow().column(option).to_pylist() == ["ann", "bob"]


def test_a_string_that_may_be_both_is_refused() -> None:
    """With the way out. A string that is no column is the option, and under `parallelism` it is a column."""
    with local(1) as env:
        rows = env.from_batches(ROWS)
        for option in ("name", "uid"):
            for step in (rows.select, rows.with_columns):
                hint = rf"For the column write {step.__name__}\(\{{'{option}': 'full_name'\}}\)"
                with pytest.raises(ConfigurationError, match=hint):
                    step(pl.col("id"), **{option: "full_name"})
        named = rows.select("id", name="short", uid="short-1")
        (node,) = inputs_of(named)
        assert (node.name, node.uid) == ("short", "short-1")
        assert rows.select("id", parallelism="full_name").schema.names == ["id", "parallelism"]


@pytest.mark.parametrize("option", ["emit", "name", "uid", "parallelism", "ttl", "ttl_time"])
def test_an_aggregate_under_the_word_of_an_option_is_one_of_that_name(option: str) -> None:
    """By keyword or in a mapping, with keys and in windows."""
    table = pa.table({"k": [1, 1], "t": [0, 1], "v": [4, 5]})
    with local(1) as env:
        keyed = env.from_batches(table, timestamp="t").key_by("k")
        final = {} if option == "emit" else {"emit": "final"}
        found = [
            keyed.aggregate(n=tg.count(), **{option: tg.max("v")}, **final).collect(),
            keyed.aggregate({option: tg.max("v"), "n": tg.count()}, emit="final").collect(),
            keyed.window(tg.Tumbling("1h")).aggregate({option: tg.max("v"), "n": tg.count()}).collect(),
        ]
        if option in ("emit", "name", "uid"):
            found.append(keyed.stream.aggregate(n=tg.count(), **{option: tg.max("v")}, **final).collect())
        env.execute("aggregates").wait("4min")
    for rows in found:
        last = rows.to_arrow().to_pylist()[-1]
        assert (last["n"], last[option]) == (2, 5)


def test_what_is_no_name_of_a_column_is_refused() -> None:
    """Keys of mappings are strings, values are what steps take, and each aggregate is given once."""
    with local(1) as env:
        rows = env.from_batches(ROWS)
        refused: list[tuple[Callable[[], object], str]] = [
            (lambda: rows.select({1: "id"}), "the key 1 of the mapping is not the name"),  # type: ignore[dict-item]
            (lambda: rows.select({"x": 1}), "takes the name of a column or a polars expression, not int"),  # type: ignore[dict-item]
            (lambda: rows.key_by(["id"]), "not list; give several columns one by one"),  # type: ignore[list-item]
            (lambda: rows.key_by("id").aggregate({"n": tg.count()}, n=tg.count()), "in the mapping and by keyword"),
            (lambda: rows.key_by("id").aggregate([tg.count()]), "or in one mapping"),  # type: ignore[arg-type]
        ]
        for step, said in refused:
            with pytest.raises(ConfigurationError, match=said):
                step()


class Yields(tg.ProcessFunction):
    """Forgets a column in its second row."""

    def process(self, row: dict[str, Any], context: Any) -> Iterator[dict[str, Any]]:
        yield {"x": row["id"], "total": 1} if row["id"] == 1 else {"x": row["id"]}


SCHEMA = pa.schema({"x": pa.int64(), "total": pa.int64()})
FORGETFUL: dict[str, Callable[[Any], Any]] = {
    "map": lambda s: s.map(lambda row: {"x": row["id"]}, schema=SCHEMA, traced=False, uid="step"),
    "traced map": lambda s: s.map(lambda row: {"x": row["id"]}, schema=SCHEMA, uid="step"),
    "empty row": lambda s: s.map(lambda row: {}, schema=SCHEMA, uid="step"),
    "flat_map": lambda s: s.flat_map(lambda row: [{"x": 1, "total": 2}, {"x": 1}], schema=SCHEMA, uid="step"),
    "process": lambda s: s.process(Yields(), schema=SCHEMA, uid="step"),
    "keyed process": lambda s: s.key_by("id").process(Yields(), schema=SCHEMA, uid="step"),
}


@pytest.mark.parametrize("step", FORGETFUL)
def test_a_column_that_a_function_forgets_is_refused(step: str) -> None:
    """It was null, without a word."""
    with local(1) as env:
        FORGETFUL[step](env.from_batches(ROWS)).collect()
        with pytest.raises(JobFailedError, match=r"uid 'step'.*'total'"):
            env.execute("forgetful", restart=NO_RESTART).wait("4min")


def test_the_error_names_the_function() -> None:
    """And says how a null is returned."""

    def forgets(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": row["id"]} if row["id"] else {}

    with local(1) as env:
        env.from_batches(ROWS).map(forgets, schema=SCHEMA, traced=False).collect()
        said = r"the function forgets returned a row without 'total', which schema= has: \{'x': 1\}.*'total': None"
        with pytest.raises(JobFailedError, match=said):
            env.execute("forgetful", restart=NO_RESTART).wait("4min")


def test_a_null_is_returned_as_none() -> None:
    """Then it is one."""
    with local(1) as env:
        rows = env.from_batches(ROWS).map(lambda row: {"x": row["id"], "total": None}, schema=SCHEMA).collect()
        env.execute("nulls").wait("4min")
    assert rows.to_arrow().to_pylist() == [{"x": 1, "total": None}, {"x": 2, "total": None}]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_rows_in_memory_keep_their_order(parallelism: int) -> None:
    """Also behind key_by. With `splits` they may come in another one."""
    table = pa.table({"k": [n % 3 for n in range(300)], "n": range(300)})
    with local(parallelism, 7) as env:
        source = env.from_batches(table)
        rows = source.key_by("k").process(
            _Order(), schema=pa.schema({"k": pa.int64(), "n": pa.int64(), "before": pa.int64()})
        )
        found = rows.collect()
        env.execute("order").wait("4min")
    assert all(row["before"] in (None, row["n"] - 3) for row in found.to_arrow().to_pylist())
    assert len(inputs_of(source)[0].source.splits()) == 1  # type: ignore[union-attr]


class _Order(tg.ProcessFunction):
    def open(self, context: tg.RuntimeContext) -> None:
        self.last = context.state(tg.ValueState("last", int))

    def process(self, row: dict[str, Any], context: Any) -> Iterator[dict[str, Any]]:
        before = self.last.value()
        self.last.update(row["n"])
        yield {"k": row["k"], "n": row["n"], "before": before}


KIND = pl.col("row_kind")
READS_KIND: dict[str, Callable[[Any], object]] = {
    "filter": lambda s: s.filter(KIND == "+I"),
    "where": lambda s: s.aggregate(n=tg.count().where(KIND == "+I"), emit="changes"),
    "where by name": lambda s: s.key_by("k").aggregate(n=tg.count().where("row_kind"), emit="changes"),
    "an aggregate": lambda s: s.key_by("k").aggregate(n=tg.max("row_kind"), emit="changes"),
    "an expression of an aggregate": lambda s: s.key_by("k").aggregate(n=tg.sum(KIND.str.len_bytes()), emit="changes"),
    "choosing by it": lambda s: s.key_by("k").aggregate(n=tg.last("n", by=KIND == "+I"), emit="changes"),
    "a column": lambda s: s.with_columns(up=KIND == "+U"),
    "a copy": lambda s: s.with_columns(kind=KIND),
    "a copy by name": lambda s: s.select("k", kind="row_kind"),
    "a selected expression": lambda s: s.select("k", up=KIND == "+U"),
    "a selector": lambda s: s.with_columns(cs.string().str.to_uppercase().name.suffix("_up")),
    "a key": lambda s: s.key_by("row_kind"),
    "a key expression": lambda s: s.key_by((KIND == "+U").alias("up")),
    "keys of a join": lambda s: s.join(s.select("k", "n"), on="row_kind"),
    "keys of an upsert": lambda s: s.to_table("memory://kinds", mode="upsert", keys=["k", "row_kind"]),
}


@pytest.mark.parametrize("step", READS_KIND)
def test_no_step_reads_what_a_change_is(step: str) -> None:
    """How often a row comes and is taken back depends on batches. One rule for all steps, with the way out."""
    with local(1) as env:
        changes = env.from_batches(pa.table({"k": [1, 1]})).key_by("k").aggregate(n=tg.count(), emit="changes")
        with pytest.raises(ConfigurationError, match=r"reads 'row_kind' of .* emit=\"final\""):
            READS_KIND[step](changes)


def test_steps_pass_on_what_a_change_is() -> None:
    """Under its own name, and aggregates behind are right."""
    with local(1) as env:
        changes = env.from_batches(pa.table({"k": [1, 1, 2]})).key_by("k").aggregate(n=tg.count(), emit="changes")
        kept = changes.select("k", "n", "row_kind").with_columns(m=pl.col("n") + 1).filter(pl.col("n") > 0)
        every = kept.select(pl.all())
        total = every.key_by("k").aggregate(total=tg.sum("m"), emit="final").collect()
        env.execute("changes").wait("4min")
    assert sorted(map(tuple, map(dict.values, total.to_arrow().to_pylist()))) == [(1, 3), (2, 2)]
