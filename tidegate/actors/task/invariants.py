"""The rules that always hold in a task, as predicates. The docstring of each predicate gives the reason for its rule.

The predicates take plain numbers, because they run for every element: queues, gates and barriers have the rest. A lost
message can break some rules. Then the caller raises `ProtocolError`, and a new attempt begins. Only a bug of the task
itself can break other rules. For these the `check_*` functions raise `InvariantError`.

The numbers refer to the invariants in `docs/architecture.md`. The oracle of the simulator looks at the same rules from
outside (`tidegate/testing/oracle/job_oracle.py`); `tests/simulation/broken_tasks.py` breaks them, and
`broken_predicates.py` weakens the predicates.
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.storage.errors import InvariantError

# --- channels ---------------------------------------------------------------------------------------------------------


def is_gapless(first_sequence: int, due: int) -> bool:
    """Returns whether a frame leaves no gap after what has arrived (1).

    `<=` and not `==`: a frame that is sent again begins with elements that have arrived. The receiver drops these; the
    rest is new. A frame that begins later leaves a gap that would never be filled.
    """
    return first_sequence <= due


def are_contiguous(taken: int, queued: int, arrived: int) -> bool:
    """Returns whether every element that has arrived was either processed or still waits (1). So the task loses no
    element and processes none twice.
    """
    return taken + queued == arrived


def may_recover(rows_taken: int) -> bool:
    """Returns whether restored in-flight rows may still be put before all other rows (3, 9). They may until the first
    row of this attempt was processed.
    """
    return rows_taken == 0


def goes_on(reached_ms: int | None, watermark_ms: int) -> bool:
    """Returns whether a watermark may follow the one before it on a channel: event time never goes back.

    `>=` and not `>`: the end of event time may be announced twice, by a generator and by the source that ends.
    """
    return reached_ms is None or watermark_ms >= reached_ms


def may_process(blocked: bool) -> bool:
    """Returns whether the next element of a channel may be processed (2). It may not between the channel's barrier and
    the snapshot. Otherwise the row would be in the snapshot, and a source that is restored from the same checkpoint
    would read the row again.

    Not between the channel's barrier and the snapshot: the row would be in the snapshot, and a source that is restored
    from the same checkpoint would read it again.
    """
    return not blocked


def may_send(sent_bytes: int, credit_bytes: int) -> bool:
    """Returns whether a batch may be sent (10).

    `<` and not `sent + size <= credit`: a batch that is larger than all the credit there is could never leave. So the
    last one may overdraw, by itself alone. With `<=` a sender that has used up its credit would send one more.
    """
    return sent_bytes < credit_bytes


def is_full(queued_bytes: int, limit_bytes: int) -> bool:
    """Returns whether an output queue is full, so that the task processes no more input (10).

    `>=` and not `>`: the limit is reached by what is there, and the next batch, however large, comes on top of it.
    """
    return queued_bytes >= limit_bytes


def check_contiguous(taken: int, queued: int, arrived: int) -> None:
    """Raises InvariantError unless `are_contiguous`. The input gate calls it after it took an element."""
    if not are_contiguous(taken, queued, arrived):
        raise InvariantError(f"invariant 1: {taken} elements were taken and {queued} wait, of {arrived} that arrived")


def check_recover(rows_taken: int) -> None:
    """Raises InvariantError unless `may_recover`. Called before restored in-flight rows are put before all
    other rows.
    """
    if not may_recover(rows_taken):
        raise InvariantError(f"invariant 3: what was in flight is restored after {rows_taken} rows were processed")


def check_watermark(reached_ms: int | None, watermark_ms: int) -> None:
    """Raises InvariantError unless `goes_on`: a watermark must not go back."""
    if not goes_on(reached_ms, watermark_ms):
        raise InvariantError(f"a task that has reached event time {reached_ms} goes back to {watermark_ms}")


def check_process(blocked: bool) -> None:
    """Raises InvariantError unless `may_process`. Called before an element is processed."""
    if not may_process(blocked):
        raise InvariantError("invariant 2: nothing of a channel is processed between its barrier and the snapshot")


# --- the coordinator --------------------------------------------------------------------------------------------------


def may_obey(generation: int, newest: int) -> bool:
    """Returns whether a task may obey a coordinator of this generation (8).

    `>=` and not `>`: all orders of one coordinator have the same generation. A replaced coordinator may not have
    noticed it. Its orders may contradict the new one, for example about checkpoints that the new one has given up.
    """
    return generation >= newest


# --- snapshots --------------------------------------------------------------------------------------------------------


def may_hold(checkpoints: int, limit: int) -> bool:
    """Returns whether a task whose operators are finishing may defer inputs of this many checkpoints (10).

    `<=`: the limit is how many it may hold. Without one there would be another with every trigger, for as long as the
    operators take.
    """
    return checkpoints <= limit


def is_newer(checkpoint_id: int, closed: int) -> bool:
    """Returns whether a task may still take a snapshot for a checkpoint (2, 3).

    `>` and not `>=`: `closed` itself is over for the task. A second snapshot of it would cut the channels elsewhere.
    """
    return checkpoint_id > closed


def may_acknowledge(missing: Collection[object], sink_files_durable: bool) -> bool:
    """Returns whether a snapshot may be acknowledged to the coordinator (4, 6).

    All of it has to be in storage: state, what was in flight, the changelog below it, *and* each sink file from before
    its barrier. The report may complete the checkpoint at once, and then it may be restored or committed.
    """
    return not missing and sink_files_durable


def may_leave(covered: bool, inputs_over: bool, outputs_empty: bool, committed: bool = True) -> bool:
    """Returns whether a task whose operators have finished may end (4, 6, 7).

    A completed checkpoint has to cover its finish, or a restart would still need its state. And no other task may wait
    for it: all its inputs are over, and all its output has left, barriers included. `committed`: it has committed the
    rows that it is to commit itself. After its end it would not be there to repeat a commit.
    """
    return covered and inputs_over and outputs_empty and committed


def check_hold(checkpoints: int, limit: int) -> None:
    """Raises InvariantError unless `may_hold`. Called after an input was deferred."""
    if not may_hold(checkpoints, limit):
        raise InvariantError(f"invariant 10: {checkpoints} checkpoints are held back, and {limit} may be")


def check_newer(checkpoint_id: int, closed: int) -> None:
    """Raises InvariantError unless `is_newer`. Called before the task treats a checkpoint as over."""
    if not is_newer(checkpoint_id, closed):
        raise InvariantError(f"invariant 2: checkpoint {checkpoint_id} is over a second time, {closed} was the last")
