"""The transition tables of the coordinator: complete, strict, and shown in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinators import Coordinator

from tidegate.actors.coordinator.__main__ import render
from tidegate.actors.coordinator.phases import (
    JOB_TRANSITIONS,
    PENDING_TRANSITIONS,
    JobInput,
    JobStatus,
    PendingInput,
    PendingPhase,
    next_phase,
    next_status,
)
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId

PAGE = Path(__file__).parents[2] / "docs" / "coordinator-states.md"


def test_the_tables_have_every_pair() -> None:
    """Nothing is left to a default."""
    assert set(JOB_TRANSITIONS) == {(status, input) for status in JobStatus for input in JobInput}
    assert set(PENDING_TRANSITIONS) == {(phase, input) for phase in PendingPhase for input in PendingInput}


def test_nothing_follows_the_end() -> None:
    """Terminal statuses and phases have no way out, every other one has, and each can be reached."""
    for status in JobStatus:
        assert status.terminal == all(JOB_TRANSITIONS[status, i] is None for i in JobInput)
    for phase in PendingPhase:
        over = phase in (PendingPhase.COMPLETED, PendingPhase.FAILED)
        assert over == all(PENDING_TRANSITIONS[phase, i] is None for i in PendingInput)
    assert set(JobStatus) - {JobStatus.CREATED} == set(JOB_TRANSITIONS.values()) - {None}
    assert set(PendingPhase) - {PendingPhase.HOOKS} == set(PENDING_TRANSITIONS.values()) - {None}


def test_an_open_checkpoint_can_be_given_up_and_one_in_storage_cannot() -> None:
    """Once `_metadata` may be there, only what is found in storage decides (invariant 4)."""
    for phase in PendingPhase:
        assert phase.open == (PENDING_TRANSITIONS[phase, PendingInput.GIVEN_UP] is not None)


@pytest.mark.parametrize("pair", [p for p, following in PENDING_TRANSITIONS.items() if following is None])
def test_an_illegal_phase_raises_and_changes_nothing(pair: tuple[PendingPhase, PendingInput]) -> None:
    """The error names both."""
    phase, input = pair
    coordinator = Coordinator().run()
    pending = coordinator.state.pending
    coordinator.ask()
    checkpoint = pending[CheckpointId(1)]
    checkpoint.phase = phase

    with pytest.raises(ProtocolError, match=f"phase {phase.value} does not allow"):
        checkpoint.advance(input)
    assert checkpoint.phase is phase
    with pytest.raises(ProtocolError):
        next_phase(phase, input)


@pytest.mark.parametrize("pair", [p for p, following in JOB_TRANSITIONS.items() if following is None])
def test_an_illegal_status_raises_and_changes_nothing(pair: tuple[JobStatus, JobInput]) -> None:
    """The error names both."""
    status, input = pair
    coordinator = Coordinator()
    coordinator.state.status = status

    with pytest.raises(ProtocolError, match=f"a job with status {status.value} does not allow"):
        coordinator.state.move(input)
    assert coordinator.status is status
    with pytest.raises(ProtocolError):
        next_status(status, input)


def test_the_page_shows_the_tables() -> None:
    """`python -m tidegate.actors.coordinator > docs/coordinator-states.md` makes it."""
    assert render() == PAGE.read_text(encoding="utf-8")
