"""`Mailbox`: one thread that runs all actions of a machine's driver, one after the other.

Rules:

- Calls of Ray only `post` an action, so they never block. Actions run in the order in which they were posted.
- Messages and timers run before turns, so that a barrier or a cancellation does not wait behind a full queue of rows.
- Without work the thread sleeps until the next message, timer or tick. Ticks are rare while nothing happens.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from tidegate.actors.drivers.threads import leave_if_forked, leave_unreported
from tidegate.actors.runtimes.timers import Timers
from tidegate.protocol.failures import log_failure
from tidegate.storage.clock import monotonic_ms

log = logging.getLogger(__name__)

TURNS_A_ROUND_MAX = 16
MESSAGES_A_ROUND_MAX = 256

Action = Callable[[], object]


class Mailbox:
    """A thread with a queue of actions, timers and ticks.

    `turn` processes one element, and returns False if there was none. `tick` is called every `tick_ms` while there is
    work, else every `idle_tick_ms`. After an idle time the next tick is due `tick_ms` after the last one.

    `flush` is called after messages, ticks and timers, because they may have queued messages to send.

    `broke_down` is called with each exception of an action, on the same thread, which then continues. If `broke_down`
    fails as well, the process ends: other processes notice its end, but not a failure that is only stored.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], bool],
        tick: Action,
        tick_ms: int,
        broke_down: Callable[[BaseException], None],
        idle_tick_ms: int | None = None,
        flush: Action = lambda: None,
    ) -> None:
        self._inbox: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._timers = Timers()
        self._turn = turn
        self._tick = tick
        self._flush = flush
        self._tick_ms = tick_ms
        self._idle_tick_ms = tick_ms if idle_tick_ms is None else idle_tick_ms
        self._ticked_ms = monotonic_ms() - self._idle_tick_ms
        self._worked = False
        """True if the thread has run an action or a turn since the last tick."""
        self._broke_down = broke_down
        self._pid = os.getpid()
        self._calls = 0
        self.call: int | None = None
        """Number of the current action, or None while the thread waits. May be read from any thread."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the mailbox's thread."""
        self._thread.start()

    @property
    def thread(self) -> int:
        """Returns the thread's identifier, or 0 before the thread has started."""
        return self._thread.ident or 0

    def post(self, action: Action) -> None:
        """Runs an action on the mailbox's thread. May be called from any thread."""
        self._inbox.put(action)

    def call_later(self, delay_ms: int, action: Action, name: str | None = None) -> None:
        """Runs an action after a delay, in place of a waiting action with the same name. Call it on the mailbox's
        thread only.
        """
        assert threading.current_thread() is self._thread
        self._timers.after(delay_ms, action, name)

    def cancel_call(self, name: str) -> None:
        """Drops the waiting action with this name, if there is one. Call it on the mailbox's thread only."""
        assert threading.current_thread() is self._thread
        self._timers.cancel(name)

    def _run(self) -> None:
        try:
            while True:
                self._guarded_round()
        except BaseException:  # noqa: BLE001 (the failure of a failure)
            leave_unreported()

    def _guarded_round(self) -> None:
        try:
            self._round()
        except BaseException as error:  # noqa: BLE001 (reported; code of users runs here)
            leave_if_forked(self._pid)
            self._broke_down(error)
            log_failure(log, f"an action on {self._thread.name} failed", error)

    def _round(self) -> None:
        busy = False
        self._begin()
        for _ in range(TURNS_A_ROUND_MAX):
            if not self._inbox.empty() or self._timers.due or not self._turn():
                break
            busy = self._worked = True
            self._begin()
        at_ms = monotonic_ms()
        if at_ms >= self._next_tick_ms:
            self._ticked_ms, self._worked = at_ms, False
            self._tick()
        while self._timers.due:
            self._begin()
            self._timers.pop()()
            busy = self._worked = True
        self._flush()
        self.call = None
        self._take_messages(0.0 if busy else self._idle_s(at_ms))

    def _begin(self) -> None:
        """Increases the number of the current action, by which a watcher recognizes an action that does not return."""
        self._calls += 1
        self.call = self._calls

    @property
    def _next_tick_ms(self) -> int:
        return self._ticked_ms + (self._tick_ms if self._worked else self._idle_tick_ms)

    def _idle_s(self, at_ms: int) -> float:
        until_tick_ms = max(0, self._next_tick_ms - at_ms)
        until_timer_ms = self._timers.wait_ms
        return min(until_tick_ms, until_tick_ms if until_timer_ms is None else until_timer_ms) / 1000

    def _take_messages(self, wait_s: float) -> None:
        for _ in range(MESSAGES_A_ROUND_MAX):
            try:
                action = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except queue.Empty:
                break
            wait_s, self._worked = 0.0, True
            self._begin()
            action()
            self.call = None
        self._flush()
