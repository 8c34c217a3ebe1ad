"""Formats the logs of tidegate's processes: one line for each record, as text or as JSON.

Rules:

- A record is one line: characters that cannot be printed are escaped, so that no value of a user can pass for another
  record, or control the terminal. A stack trace is shortened and escaped as well.
- A message has a limit. A longer message loses its middle.
- Values of users' rows are withheld unless `log_rows` is on (`tidegate/storage/user_values.py`).
- With JSON a line is one object: time, level, logger, message, process, and as far as known job, job_id, attempt,
  checkpoint, task, the number of the event that the line is about, and of its cause.
- Only the loggers of `tidegate` get a handler. The logging of the user's program is unchanged.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TextIO

from tidegate.protocol.failures import bounded_text
from tidegate.storage.user_values import logged_text, show_rows_in_logs

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = ("job", "job_id", "attempt", "checkpoint", "task", "event", "cause")
_EXTRA = "tidegate_fields"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The log settings of a job's processes. With `level` None each process uses its default level."""

    level: str | None = None
    levels: Mapping[str, str] = field(default_factory=dict)
    """Levels of individual loggers, by name."""
    as_json: bool = False
    rows: bool = False
    """True if logs, the event log, pages and REST may contain values of users' rows."""


def log_fields(**given: object) -> dict[str, object]:
    """Returns the argument `extra=` for a log call with some of the `FIELDS`, such as job and attempt. Omits None
    values.
    """
    return {_EXTRA: {name: given[name] for name in FIELDS if given.get(name) is not None}}


class _Thread(threading.local):
    """Thread-local storage of the fields that a thread adds to its log lines."""

    fields: Mapping[str, object] = {}


_thread = _Thread()


def lines_are_about(fields: Mapping[str, object]) -> None:
    """Sets the `FIELDS` of the JSON lines that the calling thread logs from now on. They replace the earlier
    ones.
    """
    _thread.fields = fields


def one_line(text: str) -> str:
    """Returns the text as one line of limited length. Line ends and other unprintable characters are escaped."""
    bounded = bounded_text(text)
    if bounded.isprintable():
        return bounded
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in bounded)


class LineFormatter(logging.Formatter):
    """Formats a log record as one line. `known` has the fields of all records of the process, and may change."""

    def __init__(self, as_json: bool, known: Mapping[str, object]) -> None:
        super().__init__(TEXT_FORMAT)
        self._as_json = as_json
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        """Returns the log record as one line of text, without a line end."""
        message = one_line(logged_text(bounded_text(record.getMessage())))
        stack = one_line(logged_text(bounded_text(self.formatException(record.exc_info)))) if record.exc_info else None
        if not self._as_json:
            line = f"{self.formatTime(record)} {record.levelname} {record.name}: {message}"
            return line if stack is None else f"{line} | {stack}"
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            **self._known,
            **_thread.fields,
            **getattr(record, _EXTRA, {}),
        }
        if stack is not None:
            said["stack"] = stack
        return json.dumps(said, default=str)


def log_to(stream: TextIO, settings: LogSettings, level: str, known: Mapping[str, object]) -> None:
    """Writes the lines of tidegate's loggers to a stream, replacing an earlier call. `level` applies if
    `settings` has none.
    """
    logger = logging.getLogger("tidegate")
    for earlier in [each for each in logger.handlers if isinstance(each.formatter, LineFormatter)]:
        logger.removeHandler(earlier)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(settings.as_json, known))
    logger.addHandler(handler)
    set_levels(settings, level)


def set_levels(settings: LogSettings, level: str | None = None) -> None:
    """Sets the levels of tidegate's loggers and of the loggers in `settings`, and whether lines may contain
    values of rows.
    """
    show_rows_in_logs(settings.rows)
    chosen = settings.level or level
    if chosen is not None:
        logging.getLogger("tidegate").setLevel(chosen)
    for name, of_one in settings.levels.items():
        logging.getLogger(name).setLevel(of_one)
