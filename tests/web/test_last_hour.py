"""What a web server keeps of the last hour of a job, and the charts that the page draws of it."""

from __future__ import annotations

from dataclasses import replace

import page_answers as answers
from fixture_jobs import NOW_MS, SINK, START_MS, ended, failed_job, restarting_job, running_job
from page_html import Read

from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.runtimes.job_snapshot import JobSnapshot
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.web.jobs import SAMPLES_MAX, Sample, SeenJob, seen, with_sample
from tidegate.web.model import last_hour
from tidegate.web.page.jobs import HEIGHT, WIDTH, charts_of
from tidegate.web.page.pages import job_page


def at(second: int, rows: float = 1_200.0, job: SeenJob | None = None) -> JobSnapshot:
    """A snapshot so many seconds after `NOW_MS`, whose source reads this many rows a second. No checkpoint ended."""
    told = (running_job() if job is None else job).snapshot
    source, *others = told.vertices
    subtasks = tuple(replace(each, records_in_per_second=rows) for each in source.subtasks)
    return replace(
        told, at_ms=NOW_MS + 1_000 * second, ended=(), vertices=(replace(source, subtasks=subtasks), *others)
    )


def looked(*snapshots: JobSnapshot) -> tuple[Sample, ...]:
    """The samples of a job after these snapshots."""
    job: SeenJob | None = None
    for snapshot in snapshots:
        job = seen(job, snapshot)
    assert job is not None
    return job.samples


def test_a_sample_is_of_sources_and_of_the_slowest_vertex() -> None:
    """Rows that later vertices read are not counted again; the lag is that of the least watermark."""
    assert looked(at(0)) == (Sample(NOW_MS, 1, 1_200.0, 9_000, None),)


def test_looks_within_ten_seconds_are_one_sample() -> None:
    """The mean of the rates, and the slowest checkpoint of all looks; one that failed has no duration."""
    first, failed = ended(30), ended(31, reason=CheckpointFailureReason.EXPIRED)
    slow = replace(first, record=replace(first.record, ended_at_ms=first.record.triggered_at_ms + 5_000))
    failed = replace(failed, record=replace(failed.record, ended_at_ms=START_MS + 9_000_000))
    looks = (at(0, 100.0), replace(at(4, 200.0), ended=(slow, failed)), replace(at(9, 600.0), ended=(first,)))
    (sample,) = looked(*looks)
    assert (sample.at_ms, sample.looks, sample.rows_per_second) == (NOW_MS, 3, 300.0)
    assert (sample.lag_ms, sample.checkpoint_ms) == (18_000, 5_000)
    assert [each.at_ms for each in looked(*looks, at(10))] == [NOW_MS, NOW_MS + 10_000]


def test_an_hour_is_kept() -> None:
    """With a look every 11 s, and with one every 5 s: never more than 360 samples, none older than an hour."""
    told, about = at(0), running_job().about
    for every in (5, 11):
        samples: tuple[Sample, ...] = ()
        for second in range(0, 4_000, every):
            samples = with_sample(samples, replace(told, at_ms=NOW_MS + 1_000 * second), about)
        assert 320 < len(samples) <= SAMPLES_MAX
        assert 3_500_000 < samples[-1].at_ms - samples[0].at_ms < 3_600_000


def test_what_was_not_reported_is_no_zero() -> None:
    """While a job restarts, and before its sources and watermarks have reported."""
    restarting = replace(restarting_job().snapshot, at_ms=NOW_MS + 11_000, ended=())
    samples = looked(at(0), restarting, at(22))
    assert [sample.rows_per_second for sample in samples] == [1_200.0, None, 1_200.0]
    assert [sample.lag_ms for sample in samples] == [9_000, None, 31_000]
    unheard = replace(at(0), vertices=(VertexMetrics(SINK, "to table", 1),))
    assert looked(unheard) == (Sample(NOW_MS, 0, None, None, None),)
    # The mean is that of the looks that had a rate.
    assert looked(unheard, at(1, 80.0))[0].rows_per_second == 80.0


def test_nothing_is_behind_at_the_end_of_the_input() -> None:
    """The last watermark is the largest number, which lies in the future of every clock."""
    source, keyed, sink = at(0).vertices
    over = tuple(replace(s, input_watermark_ms=MAX_WATERMARK_MS, output_watermark_ms=None) for s in keyed.subtasks)
    assert looked(replace(at(0), vertices=(source, replace(keyed, subtasks=over), sink)))[0].lag_ms == 0


def test_charts_stay_when_the_job_is_over() -> None:
    """A job that has ended adds no sample, and keeps those it has."""
    job = seen(None, at(0))
    assert job is not None
    over = replace(failed_job().snapshot, at_ms=NOW_MS + 60_000, status=JobStatus.FAILED, card=job.snapshot.card)
    after = seen(job, over)
    assert after is not None
    assert after.samples == job.samples
    assert last_hour(after) == [
        {"timestamp": NOW_MS, "rows-per-second": 1_200.0, "lag": 9_000, "checkpoint-duration": None}
    ]


def test_a_line_goes_from_the_first_sample_to_the_last() -> None:
    """Zero stands at the bottom, the maximum near the top; where nothing was reported the line has a gap."""
    rows = (0.0, 500.0, None, 1_000.0)
    charts = charts_of([answers.sample(10 * place, value, None) for place, value in enumerate(rows)])
    chart, lag, duration = charts.charts
    assert chart.path == f"M0.0,{HEIGHT}.0h1L120.0,34.0M{WIDTH}.0,4.0h1"
    assert (chart.latest, chart.least, chart.most) == ("1.0k", "0", "1.0k")
    assert chart.words == "Rows a second, latest 1.0k, minimum 0, maximum 1.0k, over 30.0 s."
    assert (lag.path, lag.words) == ("", "Lag of event time: nothing was reported.")
    assert duration.latest == "84 ms"
    assert (charts.since, charts.until) == (answers.NOW_MS - 3_600_000, answers.NOW_MS - 3_570_000)


def test_one_sample_of_zero_is_a_chart() -> None:
    """Neither the time axis nor the other one has a length then."""
    (chart, *_) = charts_of([answers.sample(0, 0.0)]).charts
    assert chart.path == f"M0.0,{HEIGHT}.0h1"


def test_the_page_has_a_picture_with_a_text_for_each() -> None:
    """Title and label are the numbers in words; without samples the page says so."""
    page = Read(job_page(answers.job(last_hour=[answers.sample(0), answers.sample(11, 600.0)])))
    pictures = page.all("svg", of="line")
    assert [picture.attributes["role"] for picture in pictures] == ["img"] * 3
    assert pictures[0].attributes["aria-label"] == (
        "Rows a second, latest 600, minimum 600, maximum 1.2k, over 11.0 s."
    )
    assert [picture.text.strip() for picture in pictures] == [p.attributes["aria-label"] for p in pictures]
    assert [chart.path for chart in charts_of([]).charts] == []
    assert "There are no figures yet" in job_page(answers.job())
