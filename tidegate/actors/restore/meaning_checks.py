"""Checks, before a restored program runs, whether its operators interpret stored state as it was written.

`comparisons` compares the recorded descriptions of the state, and `rehearsed` opens operators on the columns of the
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from tidegate.actors.graph.job_graph import JobGraph, OperatorSpec
from tidegate.actors.restore.restore_task import edges_with_in_flight, subtasks_of
from tidegate.operators.aggregates.aggregate_state import SPREADS, AggregateKind
from tidegate.operators.aggregates.keyed_aggregate import field_refusal
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import Operator, OperatorContext, ProcessingTime
from tidegate.operators.operator_errors import is_failure
from tidegate.operators.state.keyed_state import UndeclaredStateError
from tidegate.protocol.failures import OperatorError, error_text
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    MeaningColumns,
    MeaningPart,
    OperatorInfo,
    StateMeaning,
)
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError, TidegateError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.evolution import widens
from tidegate.storage.state.handover import Handover
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.stored_rows import TIMERS_STATE
from tidegate.storage.state.subtask_state import operators_with_state, stored_columns


@dataclass
class Comparison:
    """The outcome of a restore for the state of one operator.

    `problems` has a sentence for each part of the state that does not fit. `started_empty`, `dropped` and `migrated`
    are names of parts, such as `aggregate n`. `dropped_states` are names of dropped states of a user's function.
    `of_times` are the problems that only concern event time.
    """

    uid: OperatorUid
    name: str
    problems: list[str] = field(default_factory=list)
    started_empty: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    migrated: list[str] = field(default_factory=list)
    dropped_states: list[str] = field(default_factory=list)
    of_times: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Returns whether some part of the state is converted, dropped or starts empty."""
        return bool(self.started_empty or self.dropped or self.migrated)

    @property
    def summary(self) -> str:
        """Returns one line of text about the state that is converted, dropped or starts empty."""
        kinds = {"starts empty": self.started_empty, "is dropped": self.dropped, "gets a wider type": self.migrated}
        return "; ".join(f"{', '.join(parts)} {what}" for what, parts in kinds.items() if parts)


def comparisons(metadata: CheckpointMetadata, graph: JobGraph, allow_non_restored_state: bool) -> list[Comparison]:
    """Compares the description of each operator's stored state with the description of its state in the program.

    Returns a `Comparison` for each operator that both the checkpoint and the graph have, in the graph's order. Both
    descriptions exist before the job runs (`tidegate/storage/checkpoints/metadata.py`): no operator is created and no
    state is read. Rules:

    - Aggregates that were added start empty, and removed aggregates are dropped if the user agrees
      (`allow_non_restored_state`). The types of an aggregate may widen.
    - Every other difference is refused: another function, filter, key, window, order, time to live or kind of step. Its
      state has another meaning, and results would be wrong without an error.
    - Key types do not change, because the hash of a key decides which subtask has it. Stored rows keep their columns
      and types.
    - State without a description, which `recovery.SavepointWriter` creates, is checked by the tasks.
    """
    held = {info.uid: info for info in metadata.operators}
    with_state = {uid for subtask in metadata.subtasks for uid in operators_with_state(subtask)}
    in_flight = {_receiver(edge) for edge in edges_with_in_flight(metadata)}
    return [
        _compared(held[info.uid], info, allow_non_restored_state, info.uid in in_flight)
        for info in graph.operator_infos()
        if info.uid in held and (info.uid in with_state or held[info.uid].meaning is not None)
    ]


def reported(compared: Sequence[Comparison], graph: JobGraph) -> Iterator[tuple[Comparison, str]]:
    """Yields each problem of the comparisons, with its comparison.

    If the step that assigns the event time has changed, the operators behind it have another event time for this
    reason. Only the problem of that step is yielded then.
    """
    infos = {info.uid: info for info in graph.operator_infos()}
    retimed = {each.uid for each in compared if each.problems and _assigns_times(infos[each.uid])}
    for each in compared:
        repeated = each.of_times if retimed & _all_before(each.uid, infos) else ()
        for problem in each.problems:
            if problem not in repeated:
                yield each, problem


def _assigns_times(info: OperatorInfo) -> bool:
    return info.meaning is not None and info.meaning.kind == _EVENT_TIME


def _all_before(uid: OperatorUid, infos: Mapping[OperatorUid, OperatorInfo]) -> set[OperatorUid]:
    """Returns the uids of all operators whose rows an operator gets, also through other operators."""
    found = set[OperatorUid]()
    left = list(infos[uid].inputs)
    while left:
        each = left.pop()
        if each not in found and each in infos:
            found.add(each)
            left += infos[each].inputs
    return found


_EVENT_TIME = "event time"
"""The kind of the state of a step that assigns event time, and the beginning of the texts of event-time columns."""
_TIME_ROLES = ("time", "left time", "right time")


def _is_of_time(part: MeaningPart) -> bool:
    """Returns whether a part only describes which event time a step uses."""
    return part.role.startswith("time expression") or (
        part.role in _TIME_ROLES and part.text.startswith(f"{_EVENT_TIME} in ")
    )


def _receiver(edge: str) -> str:
    """Returns the uid of the operator that receives the rows of an edge, from the name of the edge."""
    return edge.rpartition("->")[2].rpartition("#")[0]


def _compared(held: OperatorInfo, now: OperatorInfo, allow: bool, in_flight: bool) -> Comparison:
    found = Comparison(now.uid, now.name)
    if held.meaning is None:
        return found
    if now.meaning is None:
        text = f"{_kind(held.meaning)}, and the program's step has no state"
        if allow:
            found.dropped.append(held.meaning.kind)
        else:
            found.problems.append(f"{text}; leave the state behind with allow_non_restored_state=True")
        return found
    found.problems += _other_kinds(held.meaning, now.meaning)
    if not found.problems:
        _compare_parts(found, held.meaning, now.meaning, allow)
        found.problems += _changed_columns(found, held.meaning, now.meaning)
    if in_flight and found.changes and not found.problems:
        found.problems.append(
            "the checkpoint has rows in flight to the step, which were made for the former aggregates; restore from a "
            "savepoint, which has none, or give them up with CheckpointConfig(ignore_in_flight_of=...)"
        )
    return found


def _kind(meaning: StateMeaning) -> str:
    return f"the checkpoint holds the state of a step of the kind {meaning.kind!r}"


def _other_kinds(held: StateMeaning, now: StateMeaning) -> Iterator[str]:
    if held.version != now.version:
        yield (
            f"the checkpoint describes the state in version {held.version}, and this tidegate in version {now.version}"
        )
    elif held.kind != now.kind:
        yield f"{_kind(held)}, and the program's step is of the kind {now.kind!r}"


def _compare_parts(found: Comparison, held: StateMeaning, now: StateMeaning, allow: bool) -> None:
    before = {(part.role, part.name): part for part in held.parts}
    after = {(part.role, part.name): part for part in now.parts}
    evolves = {role for role in now.evolves if role in held.evolves}
    known = {(columns.role, columns.name) for columns in now.columns}
    for key in dict.fromkeys((*before, *after)):
        old = before.get(key)
        new = after.get(key)
        known_problems = len(found.problems)
        if old is not None and new is not None:
            if _kept(old) != _kept(new):
                found.problems.append(f"the checkpoint has {old.label}, and the program {new.label}")
        elif old is None and new is not None:
            if new.role not in evolves:
                found.problems.append(f"the program has {new.label}, and the checkpoint has no such {new.role}")
            elif (new.role, new.name) not in known:
                found.problems.append(
                    f"the program adds {new.label}, and the columns of its input are known only when the job runs; "
                    "pass schema= to the step before, so that it can start empty"
                )
            else:
                found.started_empty.append(_short(new))
        elif old is not None:
            if old.role not in evolves:
                found.problems.append(f"the checkpoint has {old.label}, and the program has no such {old.role}")
            elif allow:
                found.dropped.append(_short(old))
            else:
                found.problems.append(
                    f"the checkpoint has {old.label}, and the program has no such {old.role}; drop it with "
                    "allow_non_restored_state=True"
                )
        if all(part is None or _is_of_time(part) for part in (old, new)):
            found.of_times += found.problems[known_problems:]


def _kept(part: MeaningPart) -> str:
    """Returns the kind of the values that an aggregate stores, such as `VAR` for variances and standard deviations.

    Aggregates of the same kind can replace each other.
    """
    function, paren, rest = part.text.partition("(")
    return f"moments({rest}" if paren and function in _SPREADS else part.text


_SPREADS = frozenset(kind.value for kind in SPREADS)


def _short(part: MeaningPart) -> str:
    return f"{part.role} {part.name}"


def _changed_columns(found: Comparison, held: StateMeaning, now: StateMeaning) -> Iterator[str]:
    before = {(columns.role, columns.name): columns for columns in held.columns}
    texts = {(part.role, part.name): part.text for part in held.parts}
    for columns in now.columns:
        key = (columns.role, columns.name)
        old = before.get(key)
        if old is None or old.schema == columns.schema:
            continue
        schema = old.arrow_schema
        expected = columns.arrow_schema
        if columns.role == "keys" and schema.names != expected.names and found.problems:
            continue  # The parts have other keys too, and one reason is enough.
        reason = _refusal(columns, schema, expected, texts.get(key, ""))
        if reason is None:
            found.migrated.append(f"{columns.role} {columns.name}".rstrip())
        else:
            of = f"{columns.role} {columns.name}".rstrip()
            yield f"{of}: stored as {columns_text(schema)}, and the program has {columns_text(expected)}: {reason}"


def _refusal(columns: MeaningColumns, before: pa.Schema, now: pa.Schema, text: str) -> str | None:
    """Returns why stored columns cannot be converted to the columns of the program, or None if they can."""
    match columns.role:
        case "keys":
            if before.types == now.types and before.names == now.names:
                return None
            return "a key keeps its name and type, because its hash decides which subtask has it; cast it back"
        case "rows":
            if before.names != now.names:
                return "stored rows keep their columns"
            for old, new in zip(before, now, strict=True):
                if not widens(old.type, new.type):
                    return f"{old.name!r} cannot become {new.type} without a loss"
            return None
        case _:
            return field_refusal(AggregateKind(text.partition("(")[0]), list(before), list(now))


log = logging.getLogger(__name__)


def rehearsed(
    store: Store,
    metadata: CheckpointMetadata,
    graph: JobGraph,
    left_out: Collection[OperatorUid] = (),
    *,
    allow_non_restored_state: bool = False,
) -> list[Comparison]:
    """Opens the operators of a program on the columns of a checkpoint, to find at submission what their tasks would
    refuse.

    Returns a `Comparison` for each operator that has state in the checkpoint, in the graph's order. The states of a
    function are known only after its `open` has declared them. So each operator with state is created and opened once
    in the process that submits the job, with tables that have the columns of the checkpoint and no rows, and is closed
    again. A task runs the same code, so both refuse the same state. Rules:

    - Table sinks and sinks of users are not opened, because their state is tidegate's own.
    - State is in memory meanwhile, whatever the backend of the job is.
    - A state that a function no longer declares is dropped if the user agrees (`allow_non_restored_state`). The restore
      point of the job names it, and no task reads it. Without consent it is refused.
    - A function whose `open` fails here (it needs a machine of the cluster, or rows) is checked by its task, as the log
      reports. A mismatch that is found there ends the job without a restart, and so does a state that is not declared.

    `store` is opened at the root of the checkpoint. `left_out`: operators that are not opened. Raises
    ConfigurationError for an operator that cannot be opened without state either, and CorruptionError, NotFoundError,
    CodecError and StorageError if the state cannot be read.
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
        and spec.committing is None
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
    wrong: ConfigurationError | None = None
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
        wrong = _wrong_setting(spec, context)
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
    if wrong is not None:
        raise wrong
    return found


def _leave_behind(found: Comparison, undeclared: UndeclaredStateError, allow_non_restored_state: bool) -> None:
    """Marks a state that the function no longer declares as dropped, or as a problem if the user has not agreed."""
    if allow_non_restored_state:
        found.dropped.append(f"state {undeclared.state}")
        found.dropped_states.append(undeclared.state)
    else:
        found.problems.append(f"{undeclared}; or drop the state with allow_non_restored_state=True")


def _opened(
    spec: OperatorSpec, context: OperatorContext, tables: Sequence[StateTable]
) -> tuple[TidegateError | None, Operator]:
    """Opens the operator on the tables, and closes it. Returns the operator, and the error if it refuses the tables, or
    None.

    Raises OperatorError if a user's function fails.
    """
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


def _wrong_setting(spec: OperatorSpec, context: OperatorContext) -> ConfigurationError | None:
    """Returns the error of an operator that refuses to open also without any state: a setting is wrong then, and no
    state of the checkpoint is the reason. None if it opens.
    """
    refusal, _ = _opened(spec, context, ())
    cause = refusal.__cause__ if isinstance(refusal, OperatorError) else refusal
    if not isinstance(cause, ConfigurationError) or isinstance(cause, IncompatibleStateError):
        return None
    return ConfigurationError(f"operator {spec.uid!r} ({spec.name!r}): {cause}")


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
    """Yields the error of each state that a function refuses, by opening it once for each state.

    Opening the function with all states reports only the first error.
    """
    for state in dict.fromkeys(table.state for table in tables):
        refusal, _ = _opened(spec, context, [table for table in tables if table.state == state])
        if refusal is not None:
            yield refusal


def _compare_states(found: Comparison, operator: Operator, tables: Sequence[StateTable]) -> None:
    """Records which states of a function start empty, and which are converted to another type."""
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
