"""Opens the operators of a program on the columns of a checkpoint, to find at submission what their tasks would refuse.

Which states a function has is known only when its `open` has declared them. So each operator with state is made and
opened once in the process that submits the job, with tables that have the columns of the checkpoint and no rows, and
is closed again. It is the same code that runs in a task, so both refuse the same. Rules:

- Table sinks and sinks of users are not opened: what they keep is tidegate's own.
- State lies in memory meanwhile, whatever the backend of the job is.
- A state that a function does not declare any more is dropped if the user agrees (`allow_non_restored_state`). The
  restore point of the job names it, and no task reads it. Without consent it is refused.
- A function whose `open` fails here (it needs a machine of the cluster, or rows) is compared by its task, as the log
  reports. A mismatch that is found there ends the job without a restart, and so does a state that is not declared.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from tidegate.actors.graph.job_graph import JobGraph, OperatorSpec
from tidegate.actors.restore.meaning_checks import Comparison
from tidegate.actors.restore.restore_task import subtasks_of
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import Operator, OperatorContext, ProcessingTime
from tidegate.operators.operator_errors import is_failure
from tidegate.operators.state.keyed_state import UndeclaredStateError
from tidegate.protocol.errors import OperatorError
from tidegate.protocol.failure_reasons import error_text
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import TidegateError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.handover import Handover
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.timer_rows import TIMERS_STATE
from tidegate.storage.subtasks.stored_columns import stored_columns
from tidegate.storage.subtasks.subtask_state import operators_with_state

log = logging.getLogger(__name__)


def rehearsed(
    store: Store,
    metadata: CheckpointMetadata,
    graph: JobGraph,
    left_out: Collection[OperatorUid] = (),
    *,
    allow_non_restored_state: bool = False,
) -> list[Comparison]:
    """What becomes of the states of each operator that has state in the checkpoint, in the graph's order.

    `store` is opened at the root of the checkpoint. `left_out`: operators that are not opened.
    `allow_non_restored_state`: states that functions do not declare any more are dropped. Raises CorruptionError,
    NotFoundError, CodecError and StorageError if the state cannot be read.
    """
    known = {info.uid: info.max_parallelism for info in metadata.operators}
    with_state = {uid for subtask in metadata.subtasks for uid in operators_with_state(subtask)}
    return [
        _rehearsed(store, metadata, spec, vertex.parallelism, known[spec.uid], allow_non_restored_state)
        for vertex in graph.vertices
        for spec in vertex.operators
        if spec.uid in known.keys() & with_state
        and spec.uid not in left_out
        and spec.table is None
        and spec.sink is None
    ]


def _rehearsed(
    store: Store,
    metadata: CheckpointMetadata,
    spec: OperatorSpec,
    parallelism: int,
    max_parallelism: int,
    allow_non_restored_state: bool,
) -> Comparison:
    found = Comparison(spec.uid, spec.name)
    tables: Sequence[StateTable] = stored_columns(store, subtasks_of(metadata, spec.uid), spec.uid)
    context = OperatorContext(
        spec.uid, spec.name, SubtaskIndex(0), parallelism, max_parallelism, backend=StateBackendOptions()
    )
    try:
        refusal, operator = _opened(spec, context, tables)
        while isinstance(refusal, UndeclaredStateError):
            _leave_behind(found, refusal, allow_non_restored_state)
            tables = [table for table in tables if table.state != refusal.state]
            refusal, operator = _opened(spec, context, tables)
        if refusal is None:
            if not found.problems:
                _compare_states(found, operator, tables)
            return found
        found.problems.append(str(refusal))
        if isinstance(operator, ProcessOperator):
            for alone in _refused_alone(spec, context, tables):
                if isinstance(alone, UndeclaredStateError):
                    _leave_behind(found, alone, allow_non_restored_state)
                elif str(alone) not in found.problems:
                    found.problems.append(str(alone))
    except TidegateError as error:
        log.info(
            "The states of operator %r (%r) are compared by its tasks: its function failed where it was opened to find "
            "which states it declares: %s",
            spec.uid, spec.name, error_text(error),
        )  # fmt: skip
    return found


def _leave_behind(found: Comparison, undeclared: UndeclaredStateError, allow_non_restored_state: bool) -> None:
    """Drop a state of the checkpoint, or refuse it."""
    if allow_non_restored_state:
        found.dropped.append(f"state {undeclared.state}")
        found.dropped_states.append(undeclared.state)
    else:
        found.problems.append(f"{undeclared}; or drop the state with allow_non_restored_state=True")


def _opened(
    spec: OperatorSpec, context: OperatorContext, tables: Sequence[StateTable]
) -> tuple[TidegateError | None, Operator]:
    """Open and close the operator. Returns why it refuses the tables, if it does. OperatorError if a function fails."""
    operator = spec.factory()
    refusal: TidegateError | None = None
    try:
        operator.open(replace(context, time=ProcessingTime(now_ms())), Handover(tables))
    except OperatorError as error:
        if not isinstance(error.__cause__, TidegateError) and error.__cause__ is not None:
            raise
        refusal = error
    except TidegateError as error:
        refusal = error
    finally:
        _close(operator, context)
    return refusal, operator


def _close(operator: Operator, context: OperatorContext) -> None:
    try:
        operator.close()
    except BaseException as error:
        if not is_failure(error):
            raise
        # A function that was not opened to its end may be unable to close.
        log.debug("Operator %r could not be closed again: %s", context.uid, error_text(error))


def _refused_alone(
    spec: OperatorSpec, context: OperatorContext, tables: Sequence[StateTable]
) -> Iterator[TidegateError]:
    """Why a function refuses each of its states, one by one: the first open reports only the first of them."""
    for state in dict.fromkeys(table.state for table in tables):
        refusal, _ = _opened(spec, context, [table for table in tables if table.state == state])
        if refusal is not None:
            yield refusal


def _compare_states(found: Comparison, operator: Operator, tables: Sequence[StateTable]) -> None:
    """Report the states of a function that start empty, and those whose types widen."""
    if not isinstance(operator, ProcessOperator):
        return
    stored: dict[str, list[pa.DataType]] = {}
    for table in tables:
        if not table.removed and table.state != TIMERS_STATE:
            stored.setdefault(table.state, []).append(table.rows.schema.types[-1])
    for name, data_type in operator.bound_states.items():
        if name not in stored:
            found.started_empty.append(f"state {name}")
        elif any(not before.equals(data_type) for before in stored[name]):
            found.migrated.append(f"state {name}")
