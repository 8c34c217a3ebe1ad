"""Values of rows are in logs, the event log, REST and the page only where `log_rows` is on; secrets never are."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config, local
from waiting import LIMIT_S, until

import tidegate as tg
from tidegate.recovery import history
from tidegate.storage.user_values import WITHHELD

VALUE = "maria.huber@example.org"
ROWS = pa.table({"email": [VALUE], "amount": [48_151_623]})

Program = Callable[[tg.StreamEnvironment, Path], object]


def a_function_names_its_row(env: tg.StreamEnvironment, folder: Path) -> object:
    """The row, and a message that repeats both values."""

    def fails(row: dict[str, object]) -> dict[str, object]:
        raise LookupError(f"no customer {row['email']!r} owes {row['amount']}")

    return env.from_batches(ROWS).map(fails, schema=ROWS.schema).collect()


def a_library_names_a_value(env: tg.StreamEnvironment, folder: Path) -> object:
    """Arrow's own text."""

    def casts(rows: pa.Table) -> pa.Table:
        return pa.table({"email": rows["email"].cast(pa.int64())})

    return env.from_batches(ROWS).map_batches(casts, schema=pa.schema([("email", pa.int64())])).collect()


def an_expression_fails(env: tg.StreamEnvironment, folder: Path) -> object:
    """Polars' own text."""
    import polars as pl

    return env.from_batches(ROWS).with_columns(n=pl.col("email").cast(pl.Int64)).collect()


def a_result_does_not_fit(env: tg.StreamEnvironment, folder: Path) -> object:
    """tidegate's own text, about a row that a function returned."""
    schema = pa.schema([("email", pa.int64())])
    return env.from_batches(ROWS).map(lambda row: {"email": row["email"]}, schema=schema).collect()


def a_key_names_its_window(env: tg.StreamEnvironment, folder: Path) -> object:
    """The key of a window whose function fails."""

    def fails(rows: pa.Table) -> pa.Table:
        raise RuntimeError("no")

    windows = env.from_batches(ROWS).key_by("email").window(tg.Count(1))
    return windows.apply(fails, schema=pa.schema([("n", pa.int64())])).collect()


def a_file_has_a_bad_value(env: tg.StreamEnvironment, folder: Path) -> object:
    """A record of CSV that is no row."""
    (folder / "in.csv").write_text(f"email,amount\n{VALUE},{VALUE}\n")
    return env.from_files(str(folder / "in.csv"), schema=ROWS.schema).collect()


def a_json_record_has_a_bad_value(env: tg.StreamEnvironment, folder: Path) -> object:
    """A record of JSON that is no row."""
    (folder / "in.json").write_text(json.dumps({"email": VALUE, "at": VALUE}) + "\n")
    schema = pa.schema([("email", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    return env.from_files(str(folder / "in.json"), schema=schema).collect()


PROGRAMS = [
    a_function_names_its_row,
    a_library_names_a_value,
    an_expression_fails,
    a_result_does_not_fit,
    a_key_names_its_window,
    a_file_has_a_bad_value,
    a_json_record_has_a_bad_value,
]


def got(url: str) -> str:
    """The body of an answer."""
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def shown(program: Program, folder: Path, rows: bool, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """What a failing program raises in its driver, and all that others see of it."""
    caplog.set_level(logging.DEBUG, "tidegate")
    with tg.StreamEnvironment.local(log_rows=rows) as env:
        url = env.serve_web(port=0)
        program(env, folder)
        job = env.execute("leaky", checkpoints=config(folder / "c", keep_events=True), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError) as raised:
            job.wait("4min")
        of_job = f"{url}/jobs/{job.job_id}"
        until("its end", lambda: json.loads(got(of_job))["state"] == "FAILED", lambda: got(of_job))
        pages = [got(f"{of_job}/exceptions"), got(of_job), got(f"{url}/ui/jobs/{job.job_id}")]
    events = [repr(event) for event in history(str(folder / "c")).to_pylist()]
    assert any("LookupError" in each or "failed" in each for each in events)
    stored = [path.read_bytes().decode("utf-8", "replace") for path in (folder / "c").rglob("*") if path.is_file()]
    return f"{raised.value} {raised.value.__cause__}", "\n".join([caplog.text, *pages, *events, *stored])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_only_the_driver_sees_values(program: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever names the value: the driver's error has it, everything else has `<withheld>`."""
    raised, others = shown(program, tmp_path, False, caplog)
    assert VALUE in raised
    assert "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}" not in raised
    assert WITHHELD in others
    assert VALUE not in others
    if "48151623" in raised:
        assert "48151623" not in others


def test_log_rows_shows_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is one setting for log lines, the event log, REST and the page."""
    raised, others = shown(a_function_names_its_row, tmp_path, True, caplog)
    assert VALUE in raised
    assert WITHHELD not in others
    assert others.count(VALUE) > 4


def test_a_secret_is_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In no mode, and to no reader."""

    def fails(row: dict[str, object]) -> dict[str, object]:
        raise ConnectionError("postgresql://app:hunter22@db/shop and {'sasl.password': 'hunter22'} refused")

    def program(env: tg.StreamEnvironment, folder: Path) -> object:
        return env.from_batches(ROWS).map(fails, schema=ROWS.schema).collect()

    _, others = shown(program, tmp_path, True, caplog)
    assert "postgresql://app:***@db/shop" in others
    assert "hunter22" not in others


def test_a_place_with_a_password_is_refused(tmp_path: Path) -> None:
    """URLs stand in checkpoints, in logs and on pages."""
    with local(1) as env:
        rows = env.from_batches(ROWS)
        with pytest.raises(tg.ConfigurationError, match=r"s3://AKIA:\*\*\*@bucket/t' contains a password"):
            rows.to_table("s3://AKIA:abc/def@bucket/t")


def test_dead_letters_have_values_and_their_log_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A table of dead letters is the user's own."""
    (tmp_path / "in.csv").write_text(f"amount\n{VALUE}\n7\n")
    with local(1) as env:
        source = env.from_files(str(tmp_path / "in.csv"), schema=pa.schema([("amount", pa.int64())]), bad_rows="side")
        letters = source.bad_rows().collect()
        source.collect()
        assert env.execute("letters", checkpoints=config(tmp_path / "c"), restart=NO_RESTART).wait("4min") == "finished"
        (error,) = letters.to_arrow()["error"].to_pylist()
    assert f"'{VALUE}' is not a value of type int64" in error
    assert "is skipped" in caplog.text
    assert VALUE not in caplog.text


def test_the_driver_sees_the_row_of_an_error_that_keeps_coming_back(tmp_path: Path) -> None:
    """The coordinator adds to the error that it does not restart the job again. The row is shown all the same."""

    def fails(row: dict[str, object]) -> dict[str, object]:
        raise LookupError("no such customer")

    restart = tg.RestartStrategy.exponential_delay(initial="1ms", maximum="1ms", same_errors=2)
    with tg.StreamEnvironment.local() as env:
        env.from_batches(ROWS).map(fails, schema=ROWS.schema).collect()
        job = env.execute("leaky", checkpoints=config(tmp_path), restart=restart)
        with pytest.raises(tg.JobFailedError, match="came back 2 times at the same row") as raised:
            job.wait("4min")
    assert VALUE in str(raised.value)
    assert WITHHELD not in str(raised.value)
