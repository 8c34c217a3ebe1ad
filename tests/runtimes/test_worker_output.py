"""What Ray brings to the driver's terminal: what people printed, and what went wrong; no notices."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private import worker as ray_worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from tidegate.actors.ray.connection import filter_worker_output, is_dropped

NOTICES = [
    "NOTE: Picked up JDK_JAVA_OPTIONS: --add-opens=java.base/java.lang=ALL-UNNAMED -XX:+UseSerialGC",
    "[2026-11-23 19:31:07,730 I 28376 45] gcs_client.cc:96: GcsClient has no Cluster ID set, and won't fetch from GCS.",
    "Task WorkerProcess.frame failed. There are infinite retries remaining, so the task will be retried. Error: a\nb",
    "WARNING: 18 PYTHON worker processes have been started on node: 7e with address: 10.0.0.7, which is 3x the maximum",
]
QUIET = "2026-11-23 19:31:24,407 INFO tidegate.actors.coordinator: quiet: Deploying attempt 0 afresh: all 2 tasks"
SHOWN = [
    "a row",
    "2026-11-23 19:31:24,407 WARNING tidegate.actors.coordinator: quiet: Checkpoint 3 failed after 2 s",
    "2026-11-23 19:31:24,407 INFO my_program: tidegate. is what I run",
    'Exception in thread "main" java.lang.OutOfMemoryError',
    "Task Mine.frame failed. There are infinite retries remaining, so the task will be retried. Error: ...",
    "",
]


@pytest.mark.parametrize("line", NOTICES)
def test_notices_are_dropped(line: str) -> None:
    """Nobody can act on them, whatever the level of the log."""
    assert is_dropped(line, show_log=False)
    assert is_dropped(line, show_log=True)


def test_lines_of_the_log_are_shown_where_they_are_asked_for() -> None:
    """Else they are in Ray's files alone; what is a warning is shown in any case."""
    assert is_dropped(QUIET, show_log=False)
    assert not is_dropped(QUIET, show_log=True)


@pytest.mark.parametrize("line", SHOWN)
def test_all_else_is_shown(line: str) -> None:
    """Also an empty line, which a function may have printed."""
    assert not is_dropped(line, show_log=False)


def test_the_filter_comes_before_what_ray_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler gets what is left; a second call takes the place of the first."""
    printed: list[str] = []

    def print_lines(batch: dict[str, Any]) -> None:
        printed.extend(batch["lines"])

    monkeypatch.setattr(dispatcher, "handlers", [("ray_print_logs", print_lines)])
    monkeypatch.setattr(ray_worker, "print_to_stdstream", lambda data, ignore_prefix: None)
    filter_worker_output(show_log=True)
    filter_worker_output(show_log=False)
    dispatcher.emit({"lines": [*NOTICES, QUIET, *SHOWN], "pid": 7, "is_err": True})
    assert printed == SHOWN
    assert [name for name, _ in dispatcher.handlers] == ["tidegate_filter", "ray_print_logs"]


def test_what_ray_says_of_errors_is_filtered_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes past the handlers, by a function that Ray looks up each time; nothing is filtered twice."""
    printed: list[list[str]] = []
    monkeypatch.setattr(dispatcher, "handlers", [])
    monkeypatch.setattr(ray_worker, "print_to_stdstream", lambda data, ignore_prefix: printed.append(data["lines"]))
    filter_worker_output(show_log=False)
    filter_worker_output(show_log=False)
    for line in (*NOTICES, *SHOWN):
        ray_worker.print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert printed == [[line] for line in SHOWN]
