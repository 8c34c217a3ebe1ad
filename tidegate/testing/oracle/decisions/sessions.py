"""`RestoredSessions`: sees sessions that tasks were restored with grow by rows that have come since.

It only counts. Whether such sessions are right is seen in the rows that come out. The simulated host tells it of
restores and of turns; it looks at a task as long as sessions are open there that the task was restored with.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from tidegate.actors.task import events as ev
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.operators.windows.session_windows import END, START, SessionWindows
from tidegate.testing.oracle.coverage import Coverage

_ROWS_MAX = 1_000

Session = tuple[str, int, int]
"""Key, start and end."""


class RestoredSessions:
    """The sessions that tasks were restored with, and that have neither grown nor ended."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self._open: weakref.WeakKeyDictionary[TaskMachine, set[Session]] = weakref.WeakKeyDictionary()

    def after_event(self, machine: TaskMachine, event: ev.TaskEvent) -> None:
        """A task was restored, or a turn of it is over."""
        if isinstance(event, ev.TaskRestored):
            restored = set(_sessions(machine))
            if restored:
                self._open[machine] = restored
        elif isinstance(event, ev.TurnGranted) and machine in self._open:
            now = set(_sessions(machine))
            before = self._open[machine]
            gone = before - now
            if any(_holds(session, old) for old in gone for session in now - before):
                self._coverage.saw("restored_session_grew")
            if before == gone:
                del self._open[machine]
            else:
                self._open[machine] = before - gone


def _holds(session: Session, old: Session) -> bool:
    return session[0] == old[0] and session[1] <= old[1] and session[2] >= old[2]


def _sessions(machine: TaskMachine) -> Iterator[Session]:
    for link in machine._chain._links:
        operator = link.operator
        if not isinstance(operator, SessionWindows) or operator._opened is None or not operator._opened.exists:
            continue
        state = operator._opened
        number, some = 0, True
        while some:
            some = False
            for stored, slots in state.table.scan_namespace(number, _ROWS_MAX):
                some = True
                keys = map(str, state.user_keys(stored).to_pylist())
                starts, ends = (state.extra(name).raw(slots).tolist() for name in (START, END))
                yield from zip(keys, starts, ends, strict=True)
            number += 1
