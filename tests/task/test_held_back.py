"""What a task holds back while its operators finish: in order, each thing once, and no more than fits."""

from __future__ import annotations

from typing import Any

from tidegate.actors.task.subtask_checkpoints import HELD_MAX, DeferredInputs, Told
from tidegate.storage.ids import CheckpointId

ONE, TWO, THREE = (CheckpointId(n) for n in (1, 2, 3))
LEFT, RIGHT = "left", "right"
"""Two channels."""


class Said:
    """What was taken in."""

    def __init__(self) -> None:
        self.held = DeferredInputs()
        self.found: list[tuple[object, int]] = []

    def add(self, news: Any) -> CheckpointId | None:
        """Hold something back."""
        return self.held.add(news, self.told(news))

    def told(self, news: object) -> Told:
        """Notes what was told, and when it was taken in."""
        return lambda at_ms: self.found.append((news, at_ms))

    def take_all(self) -> list[object]:
        """Everything, in order."""
        for told in self.held.take_all():
            told(7)
        assert {at_ms for _, at_ms in self.found} <= {7}
        return [news for news, _ in self.found]


def test_all_is_taken_in_once_and_in_order() -> None:
    """Triggers, barriers of each channel, and the timer; what is told again adds nothing."""
    said = Said()
    news = [(ONE, LEFT), (TWO, None), None, (ONE, RIGHT), (TWO, LEFT)]
    assert [said.add(each) for each in [*news, *reversed(news)]] == [None] * 10
    assert said.take_all() == news
    assert said.held.checkpoints == frozenset()
    assert said.held.take_all() == []


def test_what_is_given_up_is_forgotten() -> None:
    """With its trigger and its barriers; others stay, and so does the timer."""
    said = Said()
    for news in [(ONE, LEFT), (TWO, None), None, (ONE, RIGHT), (TWO, LEFT)]:
        said.add(news)
    assert not said.held.forget(ONE)
    assert not said.held.forget(THREE)
    assert said.held.checkpoints == {TWO}
    assert said.held.forget(TWO)
    assert said.take_all() == [None]


def test_one_too_many_gives_up_the_oldest() -> None:
    """Whichever came first, and if it is the new one itself."""
    said = Said()
    for number in reversed(range(2, HELD_MAX + 2)):
        assert said.add((CheckpointId(number), LEFT)) is None
    assert said.add((ONE, None)) == ONE
    assert said.add((CheckpointId(HELD_MAX + 2), None)) == TWO
    assert said.add((CheckpointId(HELD_MAX + 2), RIGHT)) is None
    assert said.held.checkpoints == set(range(3, HELD_MAX + 3))
