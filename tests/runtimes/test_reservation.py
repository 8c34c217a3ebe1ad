"""How slots are reserved: how long is waited, what is said meanwhile, and what is left behind. Without Ray."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from tidegate.actors.ray import reservation
from tidegate.actors.ray.reservation import TELL_EVERY_S, NodeRoom, SlotRequest, check_fits, release, reserve
from tidegate.storage.errors import ConfigurationError

WANTED = SlotRequest("job (slots of steps)", [{"CPU": 1.0, "GPU": 1.0}] * 2, ["score"] * 2, "SPREAD")


class Ray:
    """A Ray that finds room after a time, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_after_s: float, gpus: float, ours: bool) -> None:
        self.now_s, self.room_after_s = 0.0, room_after_s
        self.asked: list[Mapping[str, Any]] = []
        self.removed: list[object] = []
        nodes = [NodeRoom("north", {"CPU": 4.0}, {"CPU": 4.0, "GPU": gpus})]
        monkeypatch.setattr(reservation.ray.util, "placement_group", self._ask)
        monkeypatch.setattr(reservation.ray.util, "remove_placement_group", self.removed.append)
        monkeypatch.setattr(reservation.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(reservation, "nodes_that_live", lambda: nodes)
        monkeypatch.setattr(reservation, "started_here", lambda: ours)
        monkeypatch.setattr(reservation, "monotonic_ms", lambda: round(self.now_s * 1_000))

    def _ask(self, bundles: list[Any], **options: Any) -> Ray:
        self.asked.append({"bundles": bundles, **options})
        return self

    def wait(self, timeout_seconds: float) -> bool:
        """Time passes until there is room, or this wait is over, which is whole seconds long."""
        timeout_seconds = int(timeout_seconds)
        assert timeout_seconds > 0, "a wait that takes no time would be repeated without end"
        left_s = self.room_after_s - self.now_s
        self.now_s += max(0.0, min(timeout_seconds, left_s))
        return left_s <= timeout_seconds


def test_slots_are_had_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one placement group, of the given strategy."""
    ray = Ray(monkeypatch, 0.0, 2, ours=True)
    assert reserve(WANTED, 60.0, "advice") is ray  # type: ignore[comparison-overlap]
    assert ray.asked == [{"bundles": list(WANTED.bundles), "strategy": "SPREAD", "name": "job (slots of steps)"}]
    assert ray.removed == []


def test_those_of_a_detached_job_outlive_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the job does."""
    ray = Ray(monkeypatch, 0.0, 2, ours=False)
    reserve(SlotRequest("job", [{"CPU": 1.0}], ["x"], "PACK", detached=True), 60.0, "advice")
    assert (ray.asked[0]["strategy"], ray.asked[0]["lifetime"]) == ("PACK", "detached")


def test_a_wait_is_told_while_it_lasts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is missing, and since when; room that comes in time ends it."""
    Ray(monkeypatch, 2.5 * TELL_EVERY_S, 2, ours=False)
    with caplog.at_level(logging.WARNING):
        reserve(WANTED, 60.0, "advice")
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told] == [f"job (slots of steps) has waited for {s} s" for s in (5, 10)]
    assert "2 bundles of 1 CPU + 1 GPU for score have no node. 2 GPU needed, and 0 GPU free of 2 GPU." in told[0]


def test_a_wait_that_is_over_says_all_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a GPU that no node has is waited for where somebody may add nodes."""
    ray = Ray(monkeypatch, 1_000.0, 0, ours=False)
    with pytest.raises(ConfigurationError) as refused:
        reserve(WANTED, 12.0, "Add nodes")
    assert str(refused.value) == (
        "job (slots of steps): 2 bundles of 1 CPU + 1 GPU for score have no node. No node has any GPU. Free on the "
        "nodes that live (1): north: 4 of 4 CPU, 0 of 0 GPU. It has waited for 12 s. Add nodes"
    )
    assert ray.removed == [ray]


def test_what_a_cluster_of_our_own_never_holds_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody adds nodes to it."""
    ray = Ray(monkeypatch, 1_000.0, 0, ours=True)
    with pytest.raises(ConfigurationError, match=r"No node has any GPU\. .* request less, or start it with more"):
        reserve(WANTED, 60.0, "advice")
    assert (ray.asked, ray.now_s) == ([], 0.0)
    check_fits(SlotRequest("nothing", [], [], "SPREAD"))


def test_a_wait_takes_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the second, as Ray counts."""
    ray = Ray(monkeypatch, 1_000.0, 2, ours=False)
    with pytest.raises(ConfigurationError, match="It has waited for 7 s"):
        reserve(WANTED, 6.5, "advice")
    assert ray.now_s == 7


def test_a_wait_that_is_broken_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, as a rule."""
    ray = Ray(monkeypatch, 1_000.0, 2, ours=False)

    def interrupted(timeout_seconds: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reserve(WANTED, 60.0, "advice")
    assert ray.removed == [ray]
    release(None)
