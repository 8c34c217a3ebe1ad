"""Filters what Ray brings to the driver's terminal of its processes: drops lines that nobody can act on.

Ray shows there all that its processes print: what a function of a user prints, and errors, but also notices of Java and
of Ray itself, and each line of a coordinator's log. Rules:

- Only whole lines are dropped that `jvm_output.py` lists, and lines of tidegate's own log below WARNING unless the
  program has asked for them. All of them are in Ray's log files.
- So is what Ray says of a frame or credit that it sends again after a connection broke: what comes of it is told by the
  coordinator. Ray prints it in another way than lines of processes.
- What Ray does with the others is Ray's: the filter comes before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ray._private import worker as ray_worker

from tidegate.spark_bridge.session.jvm_output import is_notice

_NAME = "tidegate_filter"
_QUIET = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO) tidegate\..*")
_SENT_AGAIN = re.compile(
    r"Task (\S*\b)?TaskProcess\.(frame|credit)\b.* failed\. There are infinite retries remaining, .*", re.DOTALL
)


def is_dropped(line: str, show_log: bool) -> bool:
    """Whether a line of a process is not shown. `show_log`: the program has asked for tidegate's own lines."""
    return (
        is_notice(line)
        or _SENT_AGAIN.fullmatch(line) is not None
        or (not show_log and _QUIET.fullmatch(line) is not None)
    )


def filter_worker_output(show_log: bool) -> None:
    """Filter what Ray prints in this process from now on, until it disconnects."""
    # Ray has no public word for it.
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def drop(batch: dict[str, Any]) -> None:
        batch["lines"] = [line for line in batch["lines"] if not is_dropped(line, show_log)]

    dispatcher.remove_handler(_NAME)
    first: tuple[str, Callable[[dict[str, Any]], None]] = (_NAME, drop)
    with dispatcher._lock:
        dispatcher.handlers = [first, *dispatcher.handlers]
    _filter_errors(drop)


def _filter_errors(drop: Callable[[dict[str, Any]], None]) -> None:
    """Filter what Ray's thread for errors prints, which goes past the handlers."""
    ray: Any = ray_worker
    show = getattr(ray.print_to_stdstream, "unfiltered", ray.print_to_stdstream)

    def show_filtered(batch: dict[str, Any], ignore_prefix: bool) -> None:
        drop(batch)
        if batch["lines"]:
            show(batch, ignore_prefix)

    show_filtered.unfiltered = show  # type: ignore[attr-defined]
    ray.print_to_stdstream = show_filtered
