"""The rules of a takeover: what must hold before tasks are adopted, and before the next checkpoint starts.

`adoption.py` and `checkpoint_keeper.py` check them. `invariants.py` has all other rules. Numbers in brackets are the
invariants of `docs/architecture.md`.
"""

from __future__ import annotations

from tidegate.actors.coordinator.messages.takeovers import TaskAnswered
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState
from tidegate.storage.errors import InvariantError


def may_trigger(state: CoordinatorState) -> bool:
    """Whether a checkpoint may start (7, 8): not before every running task has answered the new coordinator.

    A task that has not answered may be dead, and the checkpoint would wait for it. Or it still obeys the previous
    coordinator, which may be alive and know of other checkpoints.
    """
    return not state.adopting


def knows_its_checkpoints(state: CoordinatorState, answer: TaskAnswered) -> bool:
    """Whether the log knows every checkpoint that a task has taken part in (4).

    `<` and not `<=`: the next number is still free. A task with a snapshot for it obeys a coordinator that writes
    another log, and two checkpoints would share the number.
    """
    return answer.snapshotted < state.next_checkpoint_id


def goes_on(state: CoordinatorState, answer: TaskAnswered) -> bool:
    """Whether a task that answers runs according to the log (7): in its attempt, and not stopped."""
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
