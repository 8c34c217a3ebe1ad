"""The rules of assigned splits: what must hold before splits are given away, and before a checkpoint is written.

`split_enumerator.py` checks them. `invariants.py` has all other rules. Numbers in brackets are the invariants of
`docs/architecture.md`.
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.storage.errors import InvariantError


def is_untaken(splits: Collection[int], taken: Collection[int]) -> bool:
    """Whether nobody has any of these splits (9): the rows of a split that two subtasks read would count twice.

    A subtask that is down has what it was given, until it says what its checkpoint had.
    """
    return not any(split in taken for split in splits)


def may_tell_end(left: Collection[int], others_ask: bool) -> bool:
    """Whether a subtask may be told that there are no more splits for it (7).

    Splits that are left need somebody who will still ask: nobody else reads them, and the job would end without them.
    """
    return not left or others_ask


def is_answerable(first: int, given: int) -> bool:
    """Whether a question is one that can come (7): a subtask has taken no more than it was given.

    `<=` and not `==`: a question that comes twice is older than what was given since.
    """
    return first <= given


def is_prefix(in_snapshot: int, restored: int, given: int) -> bool:
    """Whether a snapshot has all that its subtask was restored with, and the first of what it was given (3).

    So each split is in one place: in the snapshot of one subtask or, if its answer was still on the way there or it was
    given to nobody, in the pool of the checkpoint.
    """
    return restored <= in_snapshot <= restored + given


def check_assigned(splits: Collection[int], taken: Collection[int]) -> None:
    """Before splits are given to a subtask."""
    _require(is_untaken(splits, taken), "9: a split is given to one subtask")


def check_told_end(left: Collection[int], others_ask: bool) -> None:
    """Before a subtask is told that there are no more splits."""
    _require(may_tell_end(left, others_ask), "7: a source ends when all of its splits are taken")


def check_question(first: int, given: int) -> None:
    """Before a question is answered."""
    _require(is_answerable(first, given), "7: a subtask has taken no more splits than it was given")


def check_snapshot(in_snapshot: int, restored: int, given: int) -> None:
    """Before a checkpoint with this snapshot is written."""
    _require(is_prefix(in_snapshot, restored, given), "3: a snapshot has the first splits that its subtask was given")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {rule}")
