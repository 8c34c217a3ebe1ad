"""Who did not answer for long is asked once more before it counts as hung: what that changes, and what it does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest

from tidegate.actors.drivers.job_context import HeartbeatSettings
from tidegate.actors.ray.heartbeats import HeartbeatMonitor, Hung

SETTINGS = HeartbeatSettings(interval_ms=1_000, timeout_ms=15_000, call_timeout_ms=40_000)
TICK_MS, TIMEOUT_MS = SETTINGS.tick_ms, SETTINGS.timeout_ms
LAST_MS, CUT_OFF_MS = TIMEOUT_MS // 5, 2 * TIMEOUT_MS
LOOK_MS = 5_000


@dataclass
class Watch:
    """A monitor, the processes that answer, and how long a look takes."""

    here: Collection[str] = ()
    elsewhere: Collection[str] = ()
    now_ms: int = 0
    monitor: HeartbeatMonitor = field(default_factory=lambda: HeartbeatMonitor(SETTINGS))
    looks: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.monitor.tick(0)
        for name in (*self.here, *self.elsewhere):
            self.monitor.watch(name, elsewhere=name in self.elsewhere)

    def run(self, for_ms: int, answers: Mapping[str, int | None]) -> list[Hung]:
        """Time passes; those in `answers` answer each question at once, with the call that they are in."""
        found: list[Hung] = []
        for _ in range(for_ms // TICK_MS):
            self.now_ms += TICK_MS
            for name in [name for name, due_ms in self.looks.items() if due_ms <= self.now_ms]:
                del self.looks[name]
                self.monitor.looked(name)
            self.asked, doubted, hung = map(list, self.monitor.tick(self.now_ms))
            found += hung
            self.looks |= dict.fromkeys(doubted, self.now_ms + LOOK_MS)
            for name in self.asked:
                if name in answers:
                    self.monitor.answered(name, answers[name])
        return found


def test_a_silent_process_that_answers_the_last_question_does_not_hang() -> None:
    """Its earlier question never came back; the last one is asked all the same, after the look."""
    watch = Watch(here=("silent", "well"))
    watch.run(3_000, {"silent": None, "well": None})
    watch.run(TIMEOUT_MS, {"well": None})
    assert watch.monitor.doubted == {"silent"}
    assert watch.run(LOOK_MS - 2 * TICK_MS, {"silent": None, "well": None}) == []
    assert watch.monitor.doubted == {"silent"}, "nobody asks while it is being looked at"
    assert watch.run(60_000, {"silent": None, "well": None}) == []
    assert watch.monitor.doubted == frozenset()


def test_a_process_that_hangs_is_found_within_timeout_look_and_last_question() -> None:
    """And not before that, so it had time to answer."""
    watch = Watch(here=("stopped",), elsewhere=("well",))
    well = {"well": None}
    watch.run(3_000, {"stopped": None, **well})
    assert watch.run(TIMEOUT_MS + LOOK_MS + LAST_MS - 2 * TICK_MS, well) == []
    (hung,) = watch.run(4 * TICK_MS, well)
    assert (hung.name, hung.kind) == ("stopped", "silent")
    assert watch.monitor.watched == {"well"}


def test_a_lost_last_question_is_asked_again_and_gives_no_more_time() -> None:
    """A connection that breaks again and again is no sign of life."""
    watch = Watch(here=("stopped",))
    watch.run(TIMEOUT_MS + LOOK_MS + 2 * TICK_MS, {})
    asked_each_tick = []
    for _ in range(CUT_OFF_MS // TICK_MS):
        watch.monitor.not_answered("stopped")
        if watch.run(TICK_MS, {}):
            break
        asked_each_tick.append("stopped" in watch.asked)
    assert all(asked_each_tick)
    assert 0 < len(asked_each_tick) <= LAST_MS // TICK_MS


def test_an_answer_is_no_excuse_for_a_call_that_takes_too_long() -> None:
    """A mailbox that was stuck before the doubt, and is in the same call after it, counts as busy for all that time."""
    watch = Watch(here=("stuck",))
    watch.run(10_000, {"stuck": 7})
    assert watch.run(TIMEOUT_MS + LOOK_MS - 2 * TICK_MS, {}) == []
    assert watch.monitor.doubted == {"stuck"}
    (hung,) = watch.run(20_000, {"stuck": 7})
    assert hung.kind == "busy"
    assert hung.for_ms >= 40_000


@pytest.mark.parametrize("late_ms", [0, 10_000])
def test_who_hears_nobody_elsewhere_accuses_nobody_of_a_cut_of_its_own_link(late_ms: int) -> None:
    """30 s with a timeout of 15 s; the answers of one node come later than those of the other. Nobody is replaced."""
    watch = Watch(here=("beside",), elsewhere=("first", "second", "third"))
    everybody = dict.fromkeys(("beside", "first", "second", "third"))
    watch.run(5_000, everybody)
    found = watch.run(30_000, {"beside": None})
    assert watch.monitor.doubted == {"first", "second", "third"}
    for name in ("first", "second", "third"):
        watch.monitor.not_answered(name)
    found += watch.run(late_ms, {"beside": None, "first": None})
    found += watch.run(60_000, everybody)
    assert found == []
    assert watch.monitor.doubted == frozenset()


def test_one_that_hangs_on_another_node_is_found_fast_while_others_there_answer() -> None:
    """Nothing says that the link was cut. Those that hang alone elsewhere, and nobody answers there, take longer."""
    watch = Watch(elsewhere=("stopped", "well"))
    (hung,) = watch.run(TIMEOUT_MS + LOOK_MS + LAST_MS + 2 * TICK_MS, {"well": None})
    assert hung.name == "stopped"
    watch = Watch(elsewhere=("stopped",))
    assert watch.run(TIMEOUT_MS + LOOK_MS + CUT_OFF_MS - 2 * TICK_MS, {}) == []
    (hung,) = watch.run(6 * TICK_MS, {})
    assert hung.name == "stopped"


def test_links_that_are_cut_again_and_again_excuse_one_that_hangs_once() -> None:
    """The silence of the others begins anew with the first answer, and that does not happen twice in a row."""
    watch = Watch(elsewhere=("stopped", "flaps"))
    found = []
    for _ in range(4):
        found += watch.run(TIMEOUT_MS + LOOK_MS - 2 * TICK_MS, {})
        found += watch.run(3_000, {"flaps": None})
    assert [hung.name for hung in found] == ["stopped"]
