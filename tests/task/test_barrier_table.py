"""The aligner's transition table: complete, every row of it reached, illegal ones harmless, and shown in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from barrier_script import Script, channels_of
from test_barrier_aligner import ALIGNED, TIMEOUT, TRIGGERED, UNALIGNED, fields_of

from tidegate.actors.task.__main__ import render, transition_table
from tidegate.actors.task.barrier_aligner import TABLE, BarrierAligner, BarrierInput, BarrierState, Step
from tidegate.actors.task.barrier_handler import Outcome
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId

PAGE = Path(__file__).resolve().parents[2] / "docs" / "barriers.md"

# Rows that the rules' own scripts do not reach.
MORE_SCRIPTS = (
    ("a", "*1 a1"),
    ("a", "*1 a!1u"),
    ("ab", "*1 ~2 a!3"),
    ("a", "*1t a!1 @100 T"),
    ("ab", "a!1u ~2 a!3"),
    ("ab", "a1t b!1t @100 T"),
    ("a", "a!1u *1 ~1"),
    ("ab", "a!1u a1 b1"),
)
REACHED = {
    BarrierState.IDLE: "",
    BarrierState.TRIGGERED: "*1",
    BarrierState.ALIGNING: "a1",
    BarrierState.COLLECTING_UNALIGNED: "a!1u",
}


class Recorded(BarrierAligner):
    """An aligner that notes which transitions it makes."""

    seen: set[tuple[BarrierState, BarrierInput, BarrierState]]

    def apply(self, given: BarrierInput, step: Step) -> Outcome:
        before = self.state
        outcome = super().apply(given, step)
        self.seen.add((before, given, self.state))
        return outcome


def test_the_table_is_complete() -> None:
    """Every state has a row for every input, and a row leads somewhere exactly if something answers it."""
    assert {(state, given) for state in BarrierState for given in BarrierInput} == set(TABLE)
    assert {pair for pair, row in TABLE.items() if row.act} == {pair for pair, row in TABLE.items() if row.to}


def test_every_transition_is_reached() -> None:
    """No row of the table, and no state that a row leads to, is there in vain; and nothing happens beside the table."""
    seen: set[tuple[BarrierState, BarrierInput, BarrierState]] = set()
    scripts = [rule[:2] for rules in (ALIGNED, UNALIGNED, TIMEOUT, TRIGGERED) for rule in rules.values()]
    for channels, steps in (*scripts, *MORE_SCRIPTS):
        aligner = Recorded(channels_of(channels))
        aligner.seen = seen
        Script(aligner).run(steps)

    assert {(state, given, to) for state, given, next_states in transition_table() for to in next_states} == seen


@pytest.mark.parametrize(
    ("state", "given"), [(state, given) for state, given, to in transition_table() if not to], ids=lambda e: e.name
)
def test_an_illegal_transition_changes_nothing(state: BarrierState, given: BarrierInput) -> None:
    """An input that a state does not allow is a ProtocolError that names both, and no field differs afterwards."""
    aligner = BarrierAligner(channels_of("ab"))
    Script(aligner).run(REACHED[state])
    assert state is aligner.state
    fields = fields_of(aligner)

    with pytest.raises(ProtocolError, match=rf"{state.name} .* {given.name}"):
        aligner.apply(given, Step(CheckpointId(1)))

    assert fields == fields_of(aligner)


def test_the_page_shows_the_table() -> None:
    """docs/barriers.md is what `python -m tidegate.actors.task` prints."""
    assert render() == PAGE.read_text(encoding="utf-8")
