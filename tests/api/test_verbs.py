"""The verbs of DataFrames that people type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg

ROWS = [
    {"k": "a", "n": 1, "tags": ["x", "y"]},
    {"k": "b", "n": 2, "tags": []},
    {"k": "a", "n": 3, "tags": None},
    {"k": None, "n": None, "tags": ["z"]},
]


def _found(step: Callable[[tg.Stream], tg.Stream]) -> list[dict[str, Any]]:
    with local(2, 2) as env:
        found = step(env.from_rows(ROWS)).collect()
        env.execute("verbs").wait()
        return found.to_arrow().to_pylist()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda s: s.drop("tags", "n").limit(2), [{"k": "a"}, {"k": "b"}]),
        (lambda s: s.drop(["tags", "n"]).where(pl.col("k") == "b"), [{"k": "b"}]),
        (lambda s: s.select(["n", "k"]).limit(1), [{"n": 1, "k": "a"}]),
        (lambda s: s.drop("tags").rename({"k": "n", "n": "k"}).limit(1), [{"n": "a", "k": 1}]),
        (lambda s: s.drop("tags").rename(str.upper).limit(1), [{"K": "a", "N": 1}]),
        (lambda s: s.select("n").cast({"n": float}).limit(2), [{"n": 1.0}, {"n": 2.0}]),
        (lambda s: s.select("n").cast({"n": str}).limit(1), [{"n": "1"}]),
        (lambda s: s.limit(0), []),
        (lambda s: s.limit(9).select("n"), [{"n": 1}, {"n": 2}, {"n": 3}, {"n": None}]),
        (
            lambda s: s.select("n", "tags").explode("tags"),
            [{"n": 1, "tags": "x"}, {"n": 1, "tags": "y"}, {"n": None, "tags": "z"}],
        ),
        (
            lambda s: s.select("n", "tags").explode("tags", outer=True),
            [
                {"n": 1, "tags": "x"},
                {"n": 1, "tags": "y"},
                {"n": 2, "tags": None},
                {"n": 3, "tags": None},
                {"n": None, "tags": "z"},
            ],
        ),
        (lambda s: s.branch(pl.col("n") > 1)[0].select("n"), [{"n": 2}, {"n": 3}]),
        (lambda s: s.branch(pl.col("n") > 1)[1].select("n"), [{"n": 1}, {"n": None}]),
        (lambda s: s.branch(lambda row: row["k"] == "a")[1].select("n"), [{"n": 2}, {"n": None}]),
        (lambda s: s.pipe(lambda stream, column: stream.select(column), "k").limit(1), [{"k": "a"}]),
    ],
)
def test_each_verb_does_what_it_says(step: Callable[[tg.Stream], tg.Stream], expected: list[dict[str, Any]]) -> None:
    """In the order of the rows, which one subtask reads."""
    assert sorted(_found(step), key=repr) == sorted(expected, key=repr)


def test_distinct_rows() -> None:
    """Of all columns, or of some: then the first row of each."""
    twice = [*ROWS, *ROWS]
    with local(2, 2) as env:
        rows = env.from_rows(twice).drop("tags")
        found = rows.distinct().collect(uid="all"), rows.distinct("k").collect(uid="some")
        env.execute("distinct").wait()
        assert sorted(map(repr, found[0].to_arrow().to_pylist())) == sorted(
            repr({"k": row["k"], "n": row["n"]}) for row in ROWS
        )
        assert sorted(row["n"] or 0 for row in found[1].to_arrow().to_pylist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda s: s.drop("x"), r"drop: there is no column 'x'; name one of .*k"),
        (lambda s: s.drop("k", "n", "tags"), "no column would remain"),
        (lambda s: s.drop(), "drop needs at least one column"),
        (lambda s: s.rename({"x": "y"}), "rename: there is no column 'x'"),
        (lambda s: s.rename({"k": "n"}), "two columns would have the name 'n'"),
        (lambda s: s.cast({"x": int}), "cast: there is no column 'x'"),
        (lambda s: s.cast({"k": object}), "not a type of a column"),
        (lambda s: s.limit(-1), r"limit\(-1\)"),
        (lambda s: s.explode("k"), "explode needs a list; column 'k' is string"),
        (lambda s: s.branch("k"), "branch takes a function of a row"),
    ],
)
def test_verbs_refuse_what_cannot_be(step: Callable[[tg.Stream], object], words: str) -> None:
    """When the program is written."""
    with local() as env, pytest.raises(tg.ConfigurationError, match=words):
        step(env.from_rows(ROWS))


def test_a_text_that_is_no_number_fails_the_job() -> None:
    """A cast never makes nulls."""
    with local() as env:
        env.from_rows(ROWS).select("k").cast({"k": int}).collect()
        with pytest.raises(tg.JobFailedError, match="conversion from `str` to `i64` failed"):
            env.execute("cast", restart=NO_RESTART).wait()


def test_columns_are_listed() -> None:
    """The names, in their order."""
    with local() as env:
        assert env.from_rows(ROWS).columns == ["k", "n", "tags"]


def test_a_limit_counts_over_a_restore(tmp_path: Path) -> None:
    """Rows that passed before a savepoint count after it."""
    paths: list[str] = []
    found = []
    for restore in (None, "savepoint"):
        with opening(GatedSource(60, gates=(20,) if restore is None else ())) as source, local(1, 5) as env:
            rows = env.from_source(source, uid="in").limit(30, uid="limit").collect(uid="out")
            job = env.execute(
                "limited", checkpoints=config(tmp_path / "c"), restart=NO_RESTART, restore=paths[0] if restore else None
            )
            if restore is None:
                source.await_gate(20)
                paths.append(job.stop(savepoint=str(tmp_path / "savepoint")))
            else:
                assert job.wait("4min") == "finished"
                found = [row["x"] for row in rows.to_arrow().to_pylist()]
    assert sorted(found) == list(range(30))


def test_a_stream_is_looked_at(capfd: pytest.CaptureFixture[str]) -> None:
    """`print` and `peek` pass rows on as they are, and `peek` cannot change them."""
    seen = []

    def look(row: dict[str, Any]) -> None:
        seen.append(row["n"])
        row["n"] = 99

    with local() as env:
        rows = env.from_rows([{"n": 1}, {"n": 2}])
        found = rows.print("row: ").peek(look).collect()
        assert repr(rows) == "Stream('from_rows-0': (n: int64))"
        assert repr(rows.key_by("n")) == "KeyedStream(by n; Stream('from_rows-0': (n: int64)))"
        assert repr(found).endswith("not executed yet: (n: int64))")
        env.execute().wait()
        assert seen == [1, 2]
        assert "row: {'n': 1}\nrow: {'n': 2}\n" in capfd.readouterr().out
        assert found.to_polars().rows() == [(1,), (2,)]
        assert found.to_pandas()["n"].tolist() == [1, 2]
        assert repr(found).endswith("the job is finished: (n: int64))")


@pytest.mark.parametrize(
    ("values", "to"),
    [
        (pa.array(["a"], pa.large_string()), pa.string()),
        (pa.array([b"a"], pa.large_binary()), pa.binary()),
        (pa.array([b"a"], pa.binary(1)), pa.binary()),
    ],
    ids=str,
)
def test_a_cast_makes_texts_and_bytes_of_plain_types(values: pa.Array, to: pa.DataType) -> None:
    """The error of a join of a string with a large string names this remedy. Polars has one type for both."""
    rows = pa.table({"k": values, "n": [1]})
    plain = pa.table({"k": values.cast(to), "m": [2]})
    dtype = pl.Series(plain.column("k")).dtype
    casts: list[Callable[[tg.Stream], tg.Stream]] = [
        lambda s: s.cast({"k": to}),
        lambda s: s.with_columns(pl.col("k").cast(dtype)),
        lambda s: s.select("n", k=pl.col("k").cast(dtype)),
    ]
    for cast in casts:
        with local() as env:
            stream = env.from_batches(rows)
            with pytest.raises(tg.ConfigurationError, match="cast one of them"):
                stream.join(env.from_batches(plain), on="k")
            made = cast(stream)
            assert made.schema is not None
            assert made.schema.field("k").type == to
            found = made.join(env.from_batches(plain), on="k").collect()
            env.execute("casts").wait()
            assert found.to_arrow().select(["n", "m"]).to_pylist() == [{"n": 1, "m": 2}]
