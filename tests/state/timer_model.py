"""Helpers: the timers of a backend, beside a set of what should be registered."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from backend_model import KEYS, Key, MakeBackend, Rows, composed, key_batch, key_of

from tidegate.operators.state.keys import sort_key
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.stored_rows import DOMAINS

Timer = tuple[Key, int, int]
"""Key, clock and moment."""


class TimersSubject:
    """A backend with timers. `files`: what it has in files that it is opened on, or goes back to."""

    def __init__(
        self,
        make: MakeBackend | KeyedBackend,
        incremental: bool,
        stored: Sequence[StateTable] = (),
        files: Rows | None = None,
    ) -> None:
        """Opens a backend like `ObjectState`. `stored` and `files`: the state that it starts from."""
        self.backend = make(incremental) if callable(make) else make
        self.backend.fix_keys(KEYS)
        for table in stored:
            self.backend.load(table)
        self.backend.loaded()
        rows = composed(stored) if files is None else files
        self.model: set[Timer] = {
            ((k, s), DOMAINS.index(domain), moment) for k, s, domain, moment in rows.get("_tidegate_timers", {})
        }

    def batch(self, changes: Sequence[tuple[int, int, int, bool]]) -> None:
        """Register and delete (key, clock, moment, registered) in one batch."""
        numbers, domains, moments, registered = (list(column) for column in zip(*changes, strict=True))
        self.backend.timers.change(key_batch(numbers), domains, moments, registered)
        for number, domain, moment, is_there in changes:
            (self.model.add if is_there else self.model.discard)((key_of(number), domain, moment))
        self.backend.leave()

    def fire(self, domain: int, time_ms: int, timers_max: int) -> list[tuple[int, Key]]:
        """Take what is due in one step; it must be the first of what the model has, and not nothing without need."""
        expected = self.due(domain, time_ms)
        due = self.backend.timers.due(domain, time_ms, timers_max)
        keys = [tuple(row.values()) for row in due.keys.to_pylist()]
        fired = list(zip(due.moments, keys, strict=True))
        assert fired == expected[: len(fired)]
        assert len(fired) <= timers_max
        assert bool(fired) == bool(expected)
        assert due.more or len(fired) == len(expected)
        self._delete(due.keys, domain, due.moments)
        self.model -= {(key, domain, moment) for moment, key in fired}
        return fired

    def due(self, domain: int, time_ms: int) -> list[tuple[int, Key]]:
        """What the model says is due, in order."""
        found = [(moment, key) for key, of, moment in self.model if of == domain and moment <= time_ms]
        return sorted(found, key=lambda timer: (timer[0], sort_key(timer[1])))

    def expected(self) -> Rows:
        """What a checkpoint must hold now."""
        rows: dict[Key, dict[str, object]] = {(*key, DOMAINS[domain], moment): {} for key, domain, moment in self.model}
        return {"_tidegate_timers": rows} if rows else {}

    def check(self) -> None:
        """The first of each clock, and how many there are, is as the model has it."""
        for domain in range(len(DOMAINS)):
            moments = [moment for _, of, moment in self.model if of == domain]
            assert self.backend.timers.first_ms(domain) == min(moments, default=None)
        assert self.backend.timers.count(1 << 20) == len(self.model)
        assert self.backend.timers.count(2) == min(2, len(self.model))

    def fire_all(self) -> None:
        """Take everything, in steps of a few."""
        for domain in range(len(DOMAINS)):
            while self.fire(domain, 1 << 60, 3):
                pass
        self.check()

    def _delete(self, keys: pa.RecordBatch, domain: int, moments: Sequence[int]) -> None:
        rows = len(moments)
        self.backend.timers.change(keys, [domain] * rows, moments, [False] * rows)
        self.backend.leave()
