"""What a runtime notes of recoveries: since when nobody had heard of who failed, and the first row afterwards."""

from __future__ import annotations

from ray_fakes import SINK, SOURCE, source_to_sink

from tidegate.actors.coordinator.job_history import RECOVERIES_MAX
from tidegate.actors.runtimes.job_metrics import Recovery, RecoveryEnds, RecoveryWatch
from tidegate.storage.ids import AttemptNumber

FIRST, SECOND, THIRD = AttemptNumber(0), AttemptNumber(1), AttemptNumber(2)
BOTH = (SOURCE, SINK)


def watch_after_failure(unnoticed_ms: int | None = None) -> RecoveryWatch:
    """Of a job that failed at 1,000 ms, and was deployed again at 1,200."""
    _, graph = source_to_sink()
    watch = RecoveryWatch(graph)
    watch.deployed(FIRST, BOTH, 0)
    for task in BOTH:
        watch.ready(FIRST, task, 10)
    watch.row_came_in(FIRST, SINK, 20)
    watch.failed(1_000, unnoticed_ms)
    watch.deployed(SECOND, BOTH, 1_200)
    return watch


def test_what_a_source_reads_ahead_ends_no_recovery() -> None:
    """The first row is the first one behind the sources, and told once."""
    watch = watch_after_failure()
    assert watch.row_came_in(SECOND, SOURCE, 1_300) is None
    assert watch.row_came_in(FIRST, SINK, 1_350) is None
    assert watch.row_came_in(SECOND, SINK, 1_400) == "200 ms after its deployment, 400 ms after the failure"
    assert watch.row_came_in(SECOND, SINK, 1_500) is None
    assert watch.ends == {SECOND: RecoveryEnds(None, 1_400)}


def test_a_restart_of_sources_alone_ends_with_their_rows() -> None:
    """Nothing else would ever end it."""
    watch = watch_after_failure()
    watch.failed(2_000)
    watch.deployed(THIRD, (SOURCE,), 2_100)
    assert watch.row_came_in(THIRD, SOURCE, 2_150) is not None


def test_how_long_nobody_had_noticed_it() -> None:
    """Only where nobody has told it; it counts for the recovery that follows, and for no other."""
    watch = watch_after_failure(unnoticed_ms=180)
    watch.failed(1_010, 900)  # a second process of the same node
    assert watch.ends == {SECOND: RecoveryEnds(180)}
    for task in BOTH:
        watch.ready(SECOND, task, 1_500)
    watch.row_came_in(SECOND, SINK, 1_600)
    watch.failed(3_000)
    watch.deployed(THIRD, BOTH, 3_100)
    assert watch.ends[THIRD] == RecoveryEnds(None)


def test_a_failure_after_all_were_ready_begins_another_recovery() -> None:
    """Also where no row has come in between: an idle job is not down since its first failure."""
    watch = watch_after_failure()
    for task in BOTH:
        watch.ready(SECOND, task, 1_500)
    assert watch.newest == Recovery(200, 300)
    watch.failed(9_000)
    watch.failed(9_010)
    watch.deployed(THIRD, BOTH, 9_100)
    watch.ready(THIRD, SINK, 9_150)
    assert watch.newest == Recovery(100, 50)
    watch.ready(SECOND, SOURCE, 9_999)
    assert watch.newest == Recovery(100, 50), "what an older attempt says is late"


def test_only_the_newest_are_kept() -> None:
    """A job may fail for ever."""
    watch = watch_after_failure()
    for number in range(2, 100):
        watch.failed(number * 10_000)
        watch.deployed(AttemptNumber(number), BOTH, number * 10_000 + 1)
    assert list(watch.ends) == list(range(100 - RECOVERIES_MAX, 100))
