"""What a program is given that cannot work: refused where it is given, or made to work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import config, finish, local, rows
from programs import nodes_of

import tidegate as tg
from tidegate import recovery
from tidegate.actors.graph.stream_graph import translate

DATA = pa.table({"k": ["a", "b", "a"], "x": [1, 2, 3]})
RESTARTS = tg.RestartStrategy.fixed_delay(3, 0)


# --- configuration errors in tasks --------------------------------------------------------------------------------


def test_a_configuration_error_in_a_task_is_not_tried_again(tmp_path: Path) -> None:
    """A state that is called as a key column is found in `open`; the job fails at once, with restarts left."""

    class Clashes(tg.ProcessFunction):
        def open(self, context: tg.ProcessContext) -> None:
            self.state = context.state(tg.ValueState("k", int))

        def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
            pass

    with local(1) as env:
        env.from_batches(DATA).key_by("k").process(Clashes(), schema=DATA.schema).collect()
        job = env.execute("job", checkpoints=config(tmp_path), restart=RESTARTS)
        with pytest.raises(tg.JobFailedError, match=r"ConfigurationError.*'k'"):
            job.wait("4min")
        assert job.progress().attempt == 0


# --- sources ------------------------------------------------------------------------------------------------------


class Answers:
    """A source whose every read gives the same answer."""

    schema = pa.schema([("x", pa.int64())])

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def splits(self) -> Sequence[tg.SourceSplit]:
        return [tg.SourceSplit("the only one", b"")]

    def reader(self) -> Answers:
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> Any:
        return self._answer

    def close(self) -> None:
        pass


TWO = pa.record_batch({"x": [1, 2]})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            tg.ReadResult(pa.record_batch({"y": [1, 2]}), 2, True),
            r"has columns \(y: int64\), and the schema.* is \(x: int64\)",
        ),
        (tg.ReadResult(pa.record_batch({"x": [1.0, 2.0]}), 2, True), r"has columns \(x: double\)"),
        (tg.ReadResult(TWO, 3, True), "2 rows and next_offset 3; it must be 2"),
        (tg.ReadResult(TWO, 0, False), "next_offset 0"),
        (tg.ReadResult(TWO, -1, False), "next_offset -1"),
        (tg.ReadResult(None, 5, True), "0 rows and next_offset 5"),
        (tg.ReadResult(TWO, 2.0, True), "no int: 2.0"),  # type: ignore[arg-type]
        (tg.ReadResult(TWO, 2, 1), "no bool: 1"),  # type: ignore[arg-type]
        (tg.ReadResult([1, 2], 2, True), "no Arrow record batch, but list"),
        (tg.ReadResult(TWO, 2, True, payload="row 2"), "a payload that is no bytes: 'row 2'"),  # type: ignore[arg-type]
        (tg.ReadResult(TWO, 2, True, found=("more",)), "no tg.SourceSplit: 'more'"),  # type: ignore[arg-type]
        (tg.ReadResult(TWO, 2, True, found=(tg.SourceSplit("b", b""),)), "only a source with unbounded = True may"),
        (TWO, "returned RecordBatch"),
    ],
)
def test_a_source_that_answers_wrongly_fails_its_job(tmp_path: Path, answer: object, said: str) -> None:
    """With the names of source and split, at once; a table that nobody can read is worse."""
    with local(1) as env:
        env.from_source(Answers(answer), uid="mine").to_table(tmp_path / "out")  # type: ignore[arg-type]
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=RESTARTS)
        with pytest.raises(tg.JobFailedError, match=rf"uid 'mine'\): read\('the only one', offset 0\).*{said}"):
            job.wait("4min")
        assert job.progress().attempt == 0


class Unsplittable(Answers):
    """A source that does something when it is asked for its splits."""

    def __init__(self, act: Callable[[], Sequence[Any]]) -> None:
        super().__init__(tg.ReadResult(TWO, 2, True))
        self.splits = act  # type: ignore[method-assign]


def raising(error: BaseException) -> Callable[[], Sequence[Any]]:
    """What raises this."""

    def act() -> Sequence[Any]:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raising(SystemExit(3)), r"splits\(\) failed with SystemExit: 3"),
        (raising(GeneratorExit()), r"splits\(\) failed with GeneratorExit"),
        (raising(pl.exceptions.PanicException("panic")), r"splits\(\) failed with PanicException: panic"),
        (raising(FileNotFoundError("no input")), r"splits\(\) failed with FileNotFoundError: no input"),
        (lambda: None, r"splits\(\) failed with TypeError"),
        (lambda: ["a"], r"splits\(\) must return tg.SourceSplit objects, not 'a'"),
    ],
)
def test_a_source_that_cannot_say_its_splits_is_refused(
    tmp_path: Path, act: Callable[[], Sequence[Any]], said: str
) -> None:
    """With its name, when the job is submitted: an exit would end the driver without a word."""
    with local(1) as env:
        env.from_source(Unsplittable(act), uid="mine").collect()
        with pytest.raises(tg.ConfigurationError, match=rf"uid 'mine'\): {said}"):
            env.execute("job", checkpoints=config(tmp_path), restart=RESTARTS)


def test_an_interrupt_while_a_source_says_its_splits_interrupts(tmp_path: Path) -> None:
    """Somebody has pressed Ctrl-C."""
    with local(1) as env:
        env.from_source(Unsplittable(raising(KeyboardInterrupt())), uid="mine").collect()
        with pytest.raises(KeyboardInterrupt):
            env.execute("job", checkpoints=config(tmp_path), restart=RESTARTS)


def test_polars_frames_are_taken_as_they_are(tmp_path: Path) -> None:
    """One, or several of the same columns."""
    frame = pl.DataFrame({"x": [1, 2], "s": ["a", "b"], "l": [["p"], []]})
    for data in (frame, [frame, frame.slice(0, 1)]):
        with local(1) as env:
            stream = env.from_batches(data)
            assert stream.schema == pa.schema([("x", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.string()))])
            out = stream.collect()
            finish(env, tmp_path)
        assert out.to_arrow().num_rows == (2 if data is frame else 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([TWO, pa.record_batch({"y": [1]})], r"batch 1 has other columns.*lacks \['x: int64'\] and has \['y: int64'\]"),
        ([TWO, "text"], "item 1 is str"),
        ("text", "takes an Arrow table"),
        (5, "takes an Arrow table"),
    ],
)
def test_batches_that_do_not_fit_are_refused(data: Any, said: str) -> None:
    """With the difference."""
    with local() as env, pytest.raises(tg.ConfigurationError, match=said):
        env.from_batches(data)


# --- views --------------------------------------------------------------------------------------------------------

VIEWS = pa.table(
    {"k": pa.array(["a", "b", "a"], pa.string_view()), "b": pa.array([b"1", b"2", b"1"], pa.binary_view())}
)


def test_views_in_memory_become_plain_strings(tmp_path: Path) -> None:
    """As keys, in tables, in upserts, through functions and expressions."""
    with local() as env:
        stream = env.from_batches(VIEWS)
        same = [
            stream.collect(name="collected"),
            stream.to_table(tmp_path / "table"),
            stream.map_batches(lambda b: b.cast(VIEWS.schema), schema=stream.schema).collect(name="functions"),
            stream.filter(pl.col("k") != "").select(pl.col("k"), "b").collect(name="expressions"),
            stream.map(lambda row: row, schema=stream.schema).rebalance().collect(name="rows"),
        ]
        counts = (
            stream.key_by("k", "b")
            .aggregate(n=tg.count())
            .to_table(tmp_path / "counts", mode="upsert", keys=["k", "b"])
        )
        finish(env, tmp_path / "checkpoints")
    for out in same:
        assert rows(out.to_arrow()) == [("a", b"1"), ("a", b"1"), ("b", b"2")]  # type: ignore[attr-defined]
    assert rows(counts.to_arrow()) == [("a", b"1", 2), ("b", b"2", 1)]


def test_a_schema_with_views_is_refused() -> None:
    """Of a source and of a function: nothing could keep the promise."""
    views = type("Views", (Answers,), {"schema": VIEWS.schema})
    with local() as env:
        with pytest.raises(tg.ConfigurationError, match=r"column 'k' is string_view.*use large_string"):
            env.from_source(views(None))
        with pytest.raises(tg.ConfigurationError, match=r"operator 'mine'.*'k' is string_view"):
            env.from_batches(DATA).map(lambda row: row, schema=VIEWS.schema, name="mine")
        with pytest.raises(tg.ConfigurationError, match=r"mine\(schema=\) takes a pa.schema, a dict of types.*not 'x'"):
            env.from_batches(DATA).map_batches(lambda b: b, schema="x", name="mine")  # type: ignore[arg-type]


# --- names and places ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", ["", ".", "..", "a/b", "u" * 300, "日" * 30, "nul\0", "\ud800", "line\nbreak", 5])
def test_a_uid_that_names_no_file_is_refused(uid: Any) -> None:
    """While the program is made."""
    with local() as env:
        with pytest.raises(tg.ConfigurationError, match=r"'source'.*uid"):
            env.from_source(Answers(None), uid=uid)
        with pytest.raises(tg.ConfigurationError, match="uid"):
            env.from_batches(DATA).select("x", uid=uid)


def test_a_long_or_foreign_name_is_no_uid_but_is_taken(tmp_path: Path) -> None:
    """What people read may be anything that can be read."""
    with local(1) as env:
        out = env.from_batches(DATA, name="a/b 日本" + "x" * 80).select("x", name="計").collect()
        finish(env, tmp_path)
    assert out.to_arrow().num_rows == 3


@pytest.mark.parametrize("name", ["\ud800x", "a\0b", "", "n" * 300, "...", 5])
def test_a_job_name_that_cannot_be_written_down_is_refused(tmp_path: Path, name: Any) -> None:
    """Nothing has started then."""
    with local() as env:
        env.from_batches(DATA).collect()
        with pytest.raises(tg.ConfigurationError, match="a job's name"):
            env.execute(name, checkpoints=config(tmp_path))
    assert not (tmp_path / "checkpoints").exists()


def test_a_job_may_have_a_name_in_any_script(tmp_path: Path) -> None:
    """Its id is made of letters that folders can have; two names have two ids; the name leads back to it."""
    ids = []
    for name in ("日本", "中国", "café", "cafè"):
        with local(1) as env:
            env.from_batches(DATA).collect(uid="out")
            job = env.execute(name, checkpoints=config(tmp_path), restore="latest")
            assert job.wait("4min") == "finished"
            ids.append(job.job_id.rpartition("-")[0])
            assert [found.job_name for found in job.checkpoints()] == [name]
    assert len(set(ids)) == 4
    assert all(job_id.isascii() for job_id in ids)


def test_places_may_be_paths_or_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, checkpoints, savepoints and restore pointers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with local(1) as env:
        out = env.from_batches(DATA, uid="in").to_table("~/table", uid="out")
        job = env.execute("job", checkpoints=tg.CheckpointConfig(storage="~/checkpoints"))
        assert job.wait("4min") == "finished"
        (checkpoint,) = job.checkpoints()
    assert (tmp_path / "table").is_dir()
    assert (tmp_path / "checkpoints").is_dir()
    assert not (tmp_path / "~").exists()
    assert [found.path for found in recovery.list_checkpoints("~/checkpoints")] == [checkpoint.path]
    assert out.to_arrow().num_rows == 3
    with local(1) as env:
        env.from_batches(DATA, uid="in").to_table(tmp_path / "table", uid="out")
        pointer = Path(checkpoint.path.removeprefix("file://"))
        job = env.execute("job", checkpoints=tg.CheckpointConfig(storage=tmp_path / "checkpoints"), restore=pointer)
        assert job.wait("4min") == "finished"
    with local(1) as env, pytest.raises(tg.ConfigurationError, match="to_table 'to_table': 5 is not a folder or URL"):
        env.from_batches(DATA).to_table(5)  # type: ignore[arg-type]


# --- the rest -----------------------------------------------------------------------------------------------------


def test_a_sum_beyond_int64_says_so(tmp_path: Path) -> None:
    """With operator and column, and what to do."""
    data = pa.table({"k": [1], "x": pa.array([2**63], pa.uint64())})
    with local(1) as env:
        env.from_batches(data).key_by("k").aggregate(t=tg.sum("x"), uid="totals").collect()
        job = env.execute("job", checkpoints=config(tmp_path), restart=tg.RestartStrategy.none())
        with pytest.raises(tg.JobFailedError, match=r"uid 'totals'.*column 'x'.*2\*\*63.*float64"):
            job.wait("4min")


def test_a_timeout_is_an_error_of_both_kinds(tmp_path: Path) -> None:
    """Of tidegate, and Python's own."""
    assert issubclass(tg.JobTimeoutError, tg.TidegateError)
    assert issubclass(tg.JobTimeoutError, TimeoutError)
    with local(1) as env:
        env.from_source(Answers(tg.ReadResult(None, 0, False))).collect()
        job = env.execute("job", checkpoints=config(tmp_path))
        with pytest.raises(tg.JobTimeoutError):
            job.wait("1ms")
        job.cancel()


def test_a_program_can_be_made_again_after_it_was_refused(tmp_path: Path) -> None:
    """In the same environment with the same uids; or executed again as it is. Streams of before are over then."""
    with local(1) as env:
        for attempt in range(3):
            stream = env.from_batches(DATA, uid="in")
            out = stream.to_table(tmp_path / "table", uid="out")
            if attempt < 2:
                with pytest.raises(tg.ConfigurationError):
                    env.execute("...", checkpoints=config(tmp_path / "checkpoints"))
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"))
        assert job.wait("4min") == "finished"
        assert out.to_arrow().num_rows == 3
        with pytest.raises(tg.ConfigurationError, match="earlier program"):
            stream.collect()


def test_expressions_beyond_a_row_are_refused_while_the_program_is_made() -> None:
    """Also a filter that makes no sense for the columns."""
    with local() as env:
        stream = env.from_batches(DATA)
        for make in (
            lambda: stream.select(pl.col("x").cum_sum()),
            lambda: stream.with_columns(pl.col("x").sum().alias("t")),
            lambda: stream.filter(pl.col("x") > pl.col("x").mean()),
        ):
            with pytest.raises(tg.ConfigurationError, match="row by row"):
                make()
        with pytest.raises(tg.TidegateError, match="boolean"):
            stream.filter(pl.col("x") + 1)
        assert len(translate(nodes_of(env)).vertices) == 1


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda keyed: keyed.top_n(1, by=["x", pl.col("x") * 2]), "top_n"),
        (lambda keyed: keyed.window(tg.Tumbling(5)).top_n(1, by=pl.col("x") * 2), "top_n"),
        (lambda keyed: keyed.deduplicate(by=pl.col("x") * 2), "deduplicate"),
        (lambda keyed: keyed.stream.join(keyed.stream, on=pl.col("x") * 2, window=tg.Tumbling(5)), "join: on="),
    ],
)
def test_expressions_where_only_names_may_stand(call: Callable[[Any], object], where: str) -> None:
    """The error says what to do. One that is only a column is its name."""
    with tg.StreamEnvironment.local() as env:
        keyed = env.from_batches(pa.table({"k": [1], "x": [2]}), timestamp="x").key_by("k")
        with pytest.raises(tg.ConfigurationError, match=rf"{where}.* takes names of columns.*with_columns"):
            call(keyed)
        assert keyed.top_n(1, by=pl.col("x")).schema == keyed.top_n(1, by="x", name="named").schema
