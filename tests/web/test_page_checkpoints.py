"""The checkpoints of a job, and one checkpoint by subtask, as the pages show them."""

from __future__ import annotations

import page_answers as answers

from tidegate.web.page.checkpoints import ROWS_MAX, STRIP_MAX, SUBTASKS_MAX, VERTICES_MAX, breakdown_of, checkpoints_of
from tidegate.web.page.jobs import PARTS, part_names, recoveries_of

FIRST_ROW = PARTS["first-row"]


def test_the_strip_has_the_newest_at_its_right_end() -> None:
    """Oldest first, at most sixty, the longest highest, all standing on one line."""
    bars = checkpoints_of(answers.checkpoints(*(answers.checkpoint(n) for n in range(80, 0, -1)))).bars
    assert [bar.checkpoint.number for bar in bars] == list(range(21, 81))
    assert bars[-1].x + bars[-1].width <= 100 < bars[-1].x + 100 / STRIP_MAX + 0.01
    assert bars[-1].height == max(bar.height for bar in bars)
    assert {round(bar.y + bar.height, 1) for bar in bars} == {70.0}
    few = checkpoints_of(answers.checkpoints(answers.checkpoint(2), answers.checkpoint(1))).bars
    assert [round(bar.x) for bar in few] == [97, 98]


def test_a_bar_says_what_it_shows() -> None:
    """Kind, number, status, duration, size, and the cause of a failure."""
    history = (answers.checkpoint(3, "FAILED", "declined by keyed"), answers.savepoint(2), answers.checkpoint(1))
    bars = checkpoints_of(answers.checkpoints(*history)).bars
    assert [bar.words for bar in bars] == [
        "Checkpoint 1: completed, 85 ms, 1.2 MB",
        "Savepoint 2: completed, 86 ms, 1.2 MB",
        "Checkpoint 3: failed, 87 ms, declined by keyed",
    ]


def test_the_newest_counts_savepoints_too() -> None:
    """What the head of the page calls the last checkpoint."""
    checkpoints = checkpoints_of(answers.checkpoints(answers.savepoint(2), answers.checkpoint(1)))
    assert checkpoints.newest is not None
    assert checkpoints.newest.number == 2
    assert checkpoints_of(answers.checkpoints()).newest is None


def test_a_summary_without_checkpoints_is_not_known() -> None:
    """Flink says NaN."""
    assert {value for _, row in checkpoints_of(answers.checkpoints()).summary for value in row} == {"–"}  # noqa: RUF001


def test_phases_follow_each_other_on_one_scale() -> None:
    """The whole width is the slowest subtask of the checkpoint, of whatever vertex."""
    given, subtasks = answers.with_tasks(
        answers.checkpoint(17), source=[answers.subtask(0, 10, 0, 5, 25)], keyed=[answers.subtask(0, 50, 40, 10, 91)]
    )
    breakdown = breakdown_of(given, subtasks, {"keyed": "sum by key"})
    assert breakdown.scale_ms == 200
    assert [vertex.name for vertex in breakdown.vertices] == ["source", "sum by key"]
    source, keyed = (vertex.subtasks[0] for vertex in breakdown.vertices)
    assert [(s.kind, s.x, s.width) for s in source.segments] == [
        ("start-delay", 0.0, 5.0),
        ("sync", 5.0, 2.5),
        ("async", 7.5, 12.5),
    ]
    assert source.end == 24.5
    assert [(s.kind, s.x, s.width) for s in keyed.segments] == [
        ("start-delay", 0.0, 25.0),
        ("alignment", 25.0, 20.0),
        ("sync", 45.0, 5.0),
        ("async", 50.0, 45.5),
    ]
    assert keyed.words == "200 ms in all: start delay 50 ms, alignment 40 ms, sync 10 ms, async 91 ms"


def test_of_many_subtasks_the_slowest_are_shown_and_those_that_wait() -> None:
    """A thousand rows help nobody."""
    parts = [answers.subtask(i, start_delay=i) for i in range(999)] + [answers.pending(999)]
    given, subtasks = answers.with_tasks(answers.checkpoint(17, "IN_PROGRESS"), keyed=parts)
    (vertex,) = breakdown_of(given, subtasks, {}).vertices
    assert [s.number for s in vertex.subtasks[:3]] == [1_000, 999, 998]
    assert (len(vertex.subtasks), vertex.hidden) == (SUBTASKS_MAX, 1_000 - SUBTASKS_MAX)


def test_many_vertices_share_the_rows_of_a_page() -> None:
    """Each shows fewer of its subtasks, and some are not shown at all."""
    parts = {f"v{n}": [answers.subtask(i) for i in range(50)] for n in range(VERTICES_MAX + 5)}
    breakdown = breakdown_of(*answers.with_tasks(answers.checkpoint(17), **parts), {})
    assert sum(len(vertex.subtasks) for vertex in breakdown.vertices) <= ROWS_MAX
    assert (len(breakdown.vertices), breakdown.hidden) == (VERTICES_MAX, 5)


def test_subtasks_that_are_forgotten_are_said_to_be() -> None:
    """Of old checkpoints only the sums are remembered."""
    given, _ = answers.with_tasks(answers.checkpoint(1), keyed=[answers.subtask(0)])
    (vertex,) = breakdown_of(given, {"keyed": None}, {}).vertices
    assert (vertex.known, vertex.subtasks, vertex.hidden) == (False, (), 0)


def test_recoveries_share_a_scale() -> None:
    """The longest has the whole width; one that goes on shows what is over of it."""
    going_on, over = recoveries_of({"recoveries": [answers.recovery(2, over=False), answers.recovery(1)]})
    assert [(p.name, p.x, round(p.width, 1)) for p in over.parts] == [
        ("until the deployment", 0.0, 15.8),
        ("restore", 15.789, 84.2),
    ]
    assert over.words == "760 ms in all: until the deployment 120 ms, restore 640 ms"
    assert going_on.words == "not over yet: until the deployment 120 ms, restore –"  # noqa: RUF001
    assert part_names([over]) == [("until the deployment", "wait"), ("restore", "restore")]
    assert (over.tasks, going_on.over) == ("4 of 7 tasks", False)


def test_a_recovery_shows_both_ends_where_they_are_known() -> None:
    """How long nobody had noticed it comes first, and the first row last."""
    known = answers.recovery() | {"total": 910, "parts": {"first-row": 50, "detect": 100, "wait": 120, "restore": 640}}
    (recovery,) = recoveries_of({"recoveries": [known]})
    noticed = "until it was noticed, at most 100 ms"
    assert recovery.words == f"910 ms in all: {noticed}, until the deployment 120 ms, restore 640 ms, {FIRST_ROW} 50 ms"
    assert [part.kind for part in recovery.parts] == ["detect", "wait", "restore", "first-row"]
