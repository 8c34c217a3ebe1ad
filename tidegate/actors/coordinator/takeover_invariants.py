"""What must hold while a coordinator takes over, as `invariants.py` has it for everything else.

The numbers are those of the invariants in `docs/architecture.md`.
"""

from __future__ import annotations

from tidegate.actors.coordinator.messages.takeovers import TaskAnswered
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.storage.errors import InvariantError


def may_trigger(state: CoordinatorState) -> bool:
    """Whether a checkpoint may be started (7, 8): not before every task that runs has answered.

    One that has not may be dead, and the checkpoint would wait for it. And it does not know of this coordinator yet: it
    would still obey the one before, which may live on and know of other checkpoints.
    """
    return not state.adopting


def knows_its_checkpoints(state: CoordinatorState, answer: TaskAnswered) -> bool:
    """Whether the log knows every checkpoint that a task has taken part in (4).

    `<` and not `<=`: the next number is nobody's. A task that has taken a snapshot for it obeys somebody whose log this
    is not, and two checkpoints would share the number.
    """
    return answer.snapshotted < state.next_checkpoint_id


def goes_on(state: CoordinatorState, answer: TaskAnswered) -> bool:
    """Whether a task that answers is one that the log takes to be running (7): in its attempt, and not stopped."""
    return state.is_current(answer.task, answer.attempt) and answer.task in state.ready


def check_trigger(state: CoordinatorState) -> None:
    """Before a checkpoint is given a number."""
    _require(may_trigger(state), "8: no checkpoint begins before every task has answered its new coordinator")


def check_answer(state: CoordinatorState, answer: TaskAnswered) -> None:
    """Before a task is adopted."""
    _require(goes_on(state, answer), "7: a task that is adopted runs, in its own attempt")
    _require(knows_its_checkpoints(state, answer), "4: a task has taken part in no checkpoint that the log lacks")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {rule}")
