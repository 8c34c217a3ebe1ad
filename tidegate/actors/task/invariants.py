"""The rules that always hold in a task, as predicates. Each docstring gives the reason for its rule.

The predicates take plain numbers, because they run for every element of queues, gates and barriers. If a rule can be
broken by a lost message, the caller raises `ProtocolError`, and a new attempt begins. If only a bug of the task can
break a rule, a `check_*` function raises `InvariantError`.

The numbers in brackets refer to the invariants in `docs/architecture.md`. The oracle of the simulator checks the same
rules from outside (`tidegate/testing/oracle/job_oracle.py`). `tests/simulation/broken_tasks.py` breaks them, and
`broken_predicates.py` weakens the predicates.
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.storage.errors import InvariantError

# --- channels ---------------------------------------------------------------------------------------------------------


def is_gapless(first_sequence: int, due: int) -> bool:
    """Returns whether a frame leaves no gap after the elements that have arrived (1). `due`: the next sequence number.

    `<=` and not `==`: a repeated frame begins with elements that have arrived, which the receiver drops. A frame that
    begins later leaves a gap that would never be filled.
    """
    return first_sequence <= due


def are_contiguous(taken: int, queued: int, arrived: int) -> bool:
    """Returns whether the number of elements that have arrived equals the taken and the queued ones (invariant 1).

    So the task neither loses an element nor processes one twice.
    """
    return taken + queued == arrived


def may_recover(rows_taken: int) -> bool:
    """Returns whether restored in-flight rows may still be inserted before all other rows (3, 9).

    This is allowed until the first row of this attempt was processed.
    """
    return rows_taken == 0


def goes_on(reached_ms: int | None, watermark_ms: int) -> bool:
    """Returns whether a watermark may follow the previous watermark on a channel, because event time never goes back.

    Equal watermarks are allowed: the end of event time may be announced twice, by a generator and by the source that
    ends.
    """
    return reached_ms is None or watermark_ms >= reached_ms


def may_process(blocked: bool) -> bool:
    """Returns whether the next element of a channel may be processed (2). `blocked`: the channel's barrier was taken.

    Between the barrier of a channel and the snapshot, no element of the channel may be processed. Its rows would be in
    the snapshot, and a source that is restored from the same checkpoint would read them again.
    """
    return not blocked


def may_send(sent_bytes: int, credit_bytes: int) -> bool:
    """Returns whether a batch may be sent (10), given the bytes sent so far and the granted credit.

    `<` and not `sent + size <= credit`: a batch larger than the whole credit could never be sent. So the last batch may
    overdraw the credit, but only one.
    """
    return sent_bytes < credit_bytes


def is_full(queued_bytes: int, limit_bytes: int) -> bool:
    """Returns whether an output queue is full, so that the task processes no more input (10).

    `>=` and not `>`: the queue has reached its limit, and the next batch, however large, would be added.
    """
    return queued_bytes >= limit_bytes


def check_contiguous(taken: int, queued: int, arrived: int) -> None:
    """Raises InvariantError if an element was lost or taken twice (`are_contiguous`). Called after the input gate took
    an element.
    """
    if not are_contiguous(taken, queued, arrived):
        raise InvariantError(
            f"invariant 1: {taken} elements were taken and {queued} wait, of {arrived} that arrived; this is a bug in "
            "tidegate, please report it"
        )


def check_recover(rows_taken: int) -> None:
    """Raises InvariantError if restored in-flight rows are inserted too late (`may_recover`)."""
    if not may_recover(rows_taken):
        raise InvariantError(
            f"invariant 3: in-flight rows are restored after {rows_taken} rows were processed; this is a bug in "
            "tidegate, please report it"
        )


def check_watermark(reached_ms: int | None, watermark_ms: int) -> None:
    """Raises InvariantError if a watermark is below the one that the task has reached."""
    if not goes_on(reached_ms, watermark_ms):
        raise InvariantError(
            f"the watermark of a task goes back from {reached_ms} to {watermark_ms} ms; this is a bug in tidegate, "
            "please report it"
        )


def check_process(blocked: bool) -> None:
    """Raises InvariantError if the channel of the next element is blocked (`may_process`). Called before an element is
    processed.
    """
    if not may_process(blocked):
        raise InvariantError(
            "invariant 2: no element of a channel is processed between its barrier and the snapshot; this is a bug in "
            "tidegate, please report it"
        )


# --- the coordinator --------------------------------------------------------------------------------------------------


def may_obey(generation: int, newest: int) -> bool:
    """Returns whether a task may obey a coordinator of this generation (8). `newest`: the newest generation seen so
    far.

    `>=` and not `>`: all orders of one coordinator have the same generation. A replaced coordinator may not have
    noticed that it was replaced, and its orders may contradict the new one.
    """
    return generation >= newest


# --- snapshots --------------------------------------------------------------------------------------------------------


def may_hold(checkpoints: int, limit: int) -> bool:
    """Returns whether a task whose operators are finishing may defer inputs of this many checkpoints (10).

    Without a limit, each trigger would add inputs for as long as the operators take.
    """
    return checkpoints <= limit


def is_newer(checkpoint_id: int, closed: int) -> bool:
    """Returns whether a task may still take a snapshot for a checkpoint (2, 3). `closed`: the newest checkpoint that is
    over.

    `>` and not `>=`: a second snapshot of `closed` would contain other rows than the first.
    """
    return checkpoint_id > closed


def may_acknowledge(missing: Collection[object], sink_files_durable: bool) -> bool:
    """Returns whether a snapshot may be acknowledged to the coordinator (4, 6).

    All parts have to be in storage: state, in-flight elements, the changelog below it, *and* each sink file from before
    its barrier. The acknowledgement may complete the checkpoint, which may then be restored or committed at once.
    """
    return not missing and sink_files_durable


def may_leave(covered: bool, inputs_over: bool, outputs_empty: bool, committed: bool = True) -> bool:
    """Returns whether a task whose operators have finished may end (4, 6, 7).

    All arguments must be True. `covered`: a completed checkpoint records the task as finished, so that a restart does
    not need its state. `inputs_over` and `outputs_empty`: no other task waits for this one. `committed`: the task has
    committed the rows of its own sinks, which it could not do after its end.
    """
    return covered and inputs_over and outputs_empty and committed


def check_hold(checkpoints: int, limit: int) -> None:
    """Raises InvariantError if a task defers inputs of more checkpoints than allowed (`may_hold`). Called after the
    task deferred an input.
    """
    if not may_hold(checkpoints, limit):
        raise InvariantError(
            f"invariant 10: inputs of {checkpoints} checkpoints are deferred, and the limit is {limit}; this is a bug "
            "in tidegate, please report it"
        )


def check_newer(checkpoint_id: int, closed: int) -> None:
    """Raises InvariantError if a checkpoint is over already (see `is_newer`). Called before the task treats a
    checkpoint as over.
    """
    if not is_newer(checkpoint_id, closed):
        raise InvariantError(
            f"invariant 2: checkpoint {checkpoint_id} ends a second time; the last one that ended was {closed}; this "
            "is a bug in tidegate, please report it"
        )
