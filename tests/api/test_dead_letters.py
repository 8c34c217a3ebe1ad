"""Dead letters of sources: counted, logged, and exactly once in a table, whatever crashes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from local_jobs import config, finish, local
from waiting import until

import tidegate as tg
from tidegate.testing import Faults, simulate

SCHEMA = pa.schema([("id", pa.int64())])


def write(folder: Path, files: int = 6, lines: int = 43) -> None:
    """Files of JSON lines, of which line 2n of file n, from 0, is cut, and its last one is of another type."""
    folder.mkdir()
    for number in range(files):
        rows = [json.dumps({"id": number * 100 + line}) for line in range(lines)]
        rows[2 * number], rows[-1] = '{"id": 9, "cust', '{"id": "x"}'
        (folder / f"{number:02d}.json").write_text("\n".join(rows) + "\n")


def ids(files: int = 6, lines: int = 43) -> list[int]:
    """Returns the ids of the rows that can be read."""
    return [n * 100 + line for n in range(files) for line in range(lines - 1) if line != 2 * n]


@pytest.mark.parametrize("policy", ["skip", "side"])
def test_bad_rows_are_left_out_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: Literal["skip", "side"]
) -> None:
    """The rows around them come; the log has file, line and byte, and stops after some."""
    write(tmp_path / "in", 12)
    with local(1) as env, caplog.at_level(logging.WARNING):
        rows = env.from_files(f"{tmp_path}/in/*.json", schema=SCHEMA, bad_rows=policy, uid="in").collect()
        job = finish(env, tmp_path / "c")
        metrics = job.user_metrics()
    assert sorted(rows.to_arrow()["id"].to_pylist()) == ids(12)
    (counted,) = [metric for found in metrics.values() for metric in found if metric.uid == "in"]
    assert (counted.name, counted.value) == ("numRecordsInErrors", 24)
    lines = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(lines) == 20
    assert f"line 1 of {tmp_path}/in/00.json (byte 0) is skipped" in lines[0]
    assert f"line 3 of {tmp_path}/in/01.json (byte 24) is skipped" in "\n".join(lines)


@pytest.mark.parametrize("discover", [None, "10ms"])
def test_dead_letters_are_a_stream(tmp_path: Path, discover: str | None) -> None:
    """Also behind `timestamp=` and other steps, of files that are there and of a folder that grows; then in a table."""
    write(tmp_path / "in")
    with local(2) as env:
        rows = env.from_files(
            f"{tmp_path}/in/*.json", schema=SCHEMA, bad_rows="side", timestamp="id", discover=discover, uid="in"
        )
        found = rows.filter(lambda row: True).collect()
        dead = rows.bad_rows().to_table(tmp_path / "dead", uid="dead")
        if discover is None:
            finish(env, tmp_path / "c")
        else:
            job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"))
            until("all rows", lambda: len(dead.to_arrow()) == 12 and len(found.to_arrow(wait=False)) == len(ids()))
            job.cancel()
    assert sorted(found.to_arrow()["id"].to_pylist()) == ids()
    letters = sorted(dead.to_arrow().to_pylist(), key=lambda row: (row["file"], row["line"]))
    assert [(row["file"], row["line"]) for row in letters] == [
        (f"{tmp_path}/in/{n:02d}.json", line) for n in range(6) for line in (2 * n + 1, 43)
    ]
    assert {row["raw"] for row in letters} == {b'{"id": 9, "cust', b'{"id": "x"}'}
    assert "the JSON object does not end" in {row["error"] for row in letters}


def test_who_has_dead_letters(tmp_path: Path) -> None:
    """A source that was told to keep them; not one that fails or skips, nor a stream of two sources."""
    write(tmp_path / "in", 1)
    with local(1) as env:
        skipping = env.from_files(f"{tmp_path}/in/*.json", schema=SCHEMA, bad_rows="skip")
        with pytest.raises(tg.ConfigurationError, match=r'keeps no bad rows; give it bad_rows="side"'):
            skipping.bad_rows()
        keeping = env.from_files(f"{tmp_path}/in/*.json", schema=SCHEMA, bad_rows="side")
        with pytest.raises(tg.ConfigurationError, match="has several sources"):
            skipping.union(keeping).bad_rows()
        assert keeping.bad_rows().schema.names == ["raw", "file", "line", "offset", "error"]  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_dead_letters_come_once_whatever_crashes(tmp_path: Path, seed: int) -> None:
    """The simulator compares rows and dead letters with those of an undisturbed run."""
    write(tmp_path / "in", 8)

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_files(f"{tmp_path}/in/*.json", schema=SCHEMA, bad_rows="side", parallelism=2)
        rows.to_table("sim://rows")
        rows.bad_rows().select("file", "line", "raw").to_table("sim://dead")

    check(build, seed)


class Counting(tg.ProcessFunction):
    """Counts the rows of each key, and fails behind that for every seventh row and for some timers."""

    def open(self, context: tg.ProcessContext) -> None:
        self.count = context.state(tg.ValueState("count", int))
        self.seen = context.state(tg.ListState("seen", int))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.count.update((self.count.value() or 0) + 1)
        self.seen.add(row["x"])
        context.timer_service.register_event_time_timer(row["x"] // 50 * 50 + 49)
        yield {"k": row["k"], "n": self.count.value(), "x": row["x"]}
        if row["x"] % 7 == 0:
            raise ValueError("a seventh row")

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        seen = self.seen.get()
        self.seen.clear()
        yield {**context.current_key, "n": len(seen), "x": sum(seen)}
        if timestamp % 100 < 50:
            raise ValueError("a timer")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_rows_for_which_a_function_fails_come_once_whatever_crashes(seed: int) -> None:
    """One in the results or aside, never in both; state that a failing row has changed does not count."""
    data = pa.table({"k": [x * 7 % 5 for x in range(240)], "x": range(240)})
    schema = pa.schema({"k": pa.int64(), "n": pa.int64(), "x": pa.int64()})

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_batches(data, timestamp="x", parallelism=1)
        counted = rows.key_by("k").process(Counting(), schema=schema, errors_to="bad", parallelism=2)
        counted.to_table("sim://counted")
        counted.side_output("bad").to_table("sim://bad")

    check(build, seed)


def check(build: Callable[[tg.StreamEnvironment], None], seed: int) -> None:
    """Run a program under faults, and compare its tables with those of an undisturbed run."""
    report = simulate(
        build,
        seed=seed,
        faults=Faults(crash=0.05, coordinator_crash=0.01, storage=0.03, delay="0..1s"),
        options=tg.DataPlaneOptions(source_rows_max=5),
    )
    assert report.ok, report
    assert report.crashes + report.coordinator_crashes > 0
