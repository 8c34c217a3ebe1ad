"""How far a bounded job is, as its driver shows it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening
from programs import runtime_of
from rich.console import Console
from waiting import until

import tidegate as tg
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.runtimes.running_job import JobProgress, progress_of
from tidegate.api import job_progress
from tidegate.api.job_progress import (
    Bars,
    BoundedInput,
    Follower,
    Lines,
    ProgressMeter,
    Reading,
    bounded_input,
    progress_kind,
    stop_progress,
)

INPUT = BoundedInput(frozenset({"in"}), 1_000, 4, frozenset({"in"}))


def at(rows: int, before: int = 0, left: int = 0, status: str = "running") -> JobProgress:
    """What a coordinator says; rows of another vertex do not count."""
    told = progress_of(CoordinatorState(), {"in": rows, "sums": 77})
    return replace(told, status=status, rows_before={"in": before}, splits_left={"in": left})


def test_a_reading_has_rows_splits_part_rate_and_time_left() -> None:
    """All that a person wants to know, in one line."""
    meter = ProgressMeter(INPUT)
    first = meter.read(10.0, at(0, left=4))
    assert (first.part, first.splits_begun, first.rows_per_s, first.left_s) == (0.0, 0, None, None)
    second = meter.read(12.0, at(200, left=3))
    assert (second.part, second.splits_begun, second.rows_per_s, second.left_s) == (0.2, 1, 100.0, 8.0)
    assert str(second) == "running, 20 %, 200 of 1,000 rows, 1 of 4 splits begun, 100 rows/s, 8 s left"


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    """What was long ago says nothing about the time that is left."""
    meter = ProgressMeter(INPUT)
    for second in range(0, 101, 5):
        reading = meter.read(float(second), at(second if second < 50 else 50 + 2 * (second - 50)))
    assert reading.rows_per_s == 2.0


def test_rows_go_back_with_a_restart_and_those_of_the_checkpoint_stay() -> None:
    """The rate is measured anew."""
    meter = ProgressMeter(INPUT)
    meter.read(0.0, at(0))
    assert meter.read(1.0, at(600)).rows == 600
    back = meter.read(2.0, at(0, before=400))
    assert (back.rows, back.rows_per_s) == (400, None)
    assert meter.read(3.0, at(100, before=400)).rows_per_s == 100.0


def test_what_nobody_knows_is_left_out() -> None:
    """Without the lengths of splits their number says how far it is; without that nobody knows."""
    by_splits = ProgressMeter(replace(INPUT, rows=None)).read(0.0, at(7, left=1))
    assert (by_splits.part, str(by_splits)) == (0.75, "running, 75 %, 7 rows, 3 of 4 splits begun")
    unknown = ProgressMeter(replace(INPUT, rows=None, assigned=frozenset())).read(0.0, at(7))
    assert (unknown.part, str(unknown)) == (None, "running, 7 rows, 4 splits")
    assert ProgressMeter(replace(INPUT, rows=0, splits=0)).read(0.0, at(0)).part == 1.0


def test_a_job_that_has_finished_is_done() -> None:
    """Whatever was counted; another end is none."""
    assert ProgressMeter(INPUT).read(0.0, at(0, status="finished")).part == 1.0
    assert ProgressMeter(INPUT).read(0.0, at(500, status="cancelled")).part == 0.5


def test_durations_are_for_people() -> None:
    """Two units at most, of rounded seconds."""
    texts = [str(replace(reading(), left_s=s)) for s in (8.6, 125, 12_000)]
    assert [text.rpartition(", ")[2] for text in texts] == ["9 s left", "2 min 5 s left", "3 h 20 min left"]


def reading(status: str = "running", part: float | None = 0.5) -> Reading:
    """A job in the middle of its input."""
    return Reading(status, 5, 10, None, 1, part, None, None)


def test_lines_are_few_and_the_last_one_says_the_end() -> None:
    """After 10 s, then twice as far apart each time, up to 10 minutes."""
    lines: list[str] = []
    shown = Lines("job", lines.append)
    written = []
    for second in range(3_000):
        shown.update(float(second), reading())
        written += [second] * (len(lines) - len(written))
    assert written == [10, 30, 70, 150, 310, 630, 1230, 1830, 2430]
    shown.update(3_000.0, reading("finished", 1.0))
    assert lines[-1] == "job: finished, 100 %, 5 of 10 rows, 1 split"


def test_a_short_job_says_nothing() -> None:
    """Nor does its end."""
    lines: list[str] = []
    shown = Lines("job", lines.append)
    for second in range(9):
        shown.update(float(second), reading())
    shown.update(9.0, reading("finished"))
    assert lines == []


def test_bars_of_several_jobs_are_one_display() -> None:
    """It ends with the last of them, and begins again with the next one."""
    text = io.StringIO()
    bars = Bars(Console(file=text, force_terminal=True, width=200))
    one, other = bars.add("one"), bars.add("other")
    one.update(0.0, reading())
    other.update(0.0, reading(part=None))
    one.end()
    assert bars.shown
    other.end()
    assert not bars.shown
    assert all(word in text.getvalue() for word in ("one", "50 %", "other"))
    bars.add("third").end()
    assert not bars.shown


@pytest.mark.parametrize(
    ("given", "configured", "kind"),
    [
        ("off", "bar", "off"),
        (None, "bar", "bar"),
        (None, "off", "off"),
        (None, "auto", "lines"),
        ("auto", "off", "lines"),
    ],
)
def test_the_call_says_more_than_the_configuration(
    monkeypatch: pytest.MonkeyPatch, given: Any, configured: Any, kind: str
) -> None:
    """And where nobody says anything, and there is no terminal, there are lines."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert progress_kind(given, configured) == kind


def test_another_word_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the program says it or the environment."""
    with local() as env:
        env.from_batches(pa.table({"x": [1]})).collect()
        with pytest.raises(
            tg.ConfigurationError, match=r"execute\(progress=...\): 'loud' is not known; give one of auto, bar"
        ):
            env.execute("job", checkpoints=config(tmp_path), progress="loud")  # type: ignore[arg-type]
    monkeypatch.setenv("TIDEGATE_PROGRESS", "1")
    with pytest.raises(tg.ConfigurationError, match=r"variable TIDEGATE_PROGRESS: .*1 is none of 'auto', 'bar'"):
        local()


class Seen:
    """What was shown of a job."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.ended = False

    def update(self, now_s: float, reading: Reading) -> None:
        self.readings.append(reading)

    def end(self) -> None:
        self.ended = True


def test_a_job_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a restored one, which has its rows from before the checkpoint."""
    monkeypatch.setattr(job_progress, "POLL_S", 0.001)
    with opening(GatedSource(30, 30, gates=[10])) as source, local(2) as env:
        env.from_source(source, uid="in").to_table(str(tmp_path / "out"), uid="out")
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        job.trigger_checkpoint("4min")
        job.cancel()
        job.wait("4min")
    with local(2) as env:
        env.from_source(GatedSource(30, 30), uid="in").to_table(str(tmp_path / "out"), uid="out")
        submission = env.plan("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore="latest")
        given = bounded_input(submission)
        assert given is not None
        assert (given.rows, given.splits, given.assigned) == (60, 2, frozenset())
        seen, running = Seen(), runtime_of(env).submit(submission)
        Follower(running, ProgressMeter(given), seen).follow()
    assert seen.ended
    assert (seen.readings[-1].status, seen.readings[-1].part) == ("finished", 1.0)
    assert running.progress().rows_before == {next(iter(given.vertices)): 20}


def test_a_job_of_which_nobody_knows_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cluster may be gone: the display ends, and says nothing."""
    monkeypatch.setattr(job_progress, "POLL_S", 0.001)

    class Gone:
        def progress(self) -> None:
            raise tg.TidegateError("the cluster is gone")

    seen = Seen()
    Follower(Gone(), ProgressMeter(INPUT), seen).follow()  # type: ignore[arg-type]
    assert seen.ended
    assert seen.readings == []


def test_nothing_is_asked_once_the_environment_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Ray may be shut down, and a question would start another one. A job that is followed is asked until then."""
    shown = Seen()
    monkeypatch.setattr(job_progress, "POLL_S", 0.001)
    monkeypatch.setattr(job_progress, "Lines", lambda *_: shown)
    with opening(GatedSource(30, gates=[10])) as source, local() as env:
        env.from_source(source, uid="in").to_table(str(tmp_path / "out"))
        env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, progress="lines")
        source.await_gate(10)
        until("a reading of the job", lambda: shown.readings and shown.readings[-1].status == "running")
        assert not shown.ended
        stop_progress(runtime_of(env))
        assert shown.ended
        assert shown.readings[-1].status == "running"


def test_a_job_without_an_end_shows_nothing(tmp_path: Path) -> None:
    """Nobody could say how far it is."""
    with local() as env:
        env.from_rate(1_000).to_table(str(tmp_path / "out"))
        assert bounded_input(env.plan("job", checkpoints=config(tmp_path))) is None


def test_a_short_job_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tests and examples stay as quiet as they were."""
    with local(2) as env:
        env.from_batches(pa.table({"x": list(range(100))})).to_table(str(tmp_path / "out"))
        finish(env, tmp_path / "checkpoints")
    assert capfd.readouterr().err == ""
