"""Refuses, at submission, a program whose graph does not fit the checkpoint from which it starts.

One error lists everything that does not fit. Rules:

- The graph has an operator or edge for all state and all in-flight rows of the checkpoint.
- The steps before an edge with in-flight rows are unchanged, as far as a program describes its steps. Otherwise the
  steps behind the edge would get rows of two programs.
- The program interprets stored state as it was written (`meaning_checks.py`), and functions declare the states that are
  stored (`rehearse`).
- The number of key groups is the same as in the checkpoint.
- Each source has the splits of the checkpoint.
- An operator that had finished gets no more input (FLIP-147, Flink's `VertexFinishedStateChecker`).
- If all operators had finished, after a drain or at the end of the input, the job has nothing to do. That is logged.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches

from tidegate.actors.graph.job_graph import JobEdge, JobGraph, JobVertex
from tidegate.actors.graph.source_checks import splits_of
from tidegate.actors.restore.meaning_checks import Comparison, comparisons, rehearsed, reported
from tidegate.actors.restore.restore_task import can_take_in_flight, edges_with_in_flight, subtasks_of
from tidegate.actors.task.split_positions import SplitPosition, positions_from_tables
from tidegate.connectors.source import DynamicSource, LastingInputSource, SourceSplit
from tidegate.protocol.edges import PartitioningKind
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, OperatorInfo, SnapshotKind
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid, VertexId
from tidegate.storage.state.subtask_state import operators_with_state, read_subtask_state

log = logging.getLogger(__name__)

PROBLEMS_SHOWN_MAX = 50


def check_restorable(
    store: Store,
    metadata: CheckpointMetadata,
    graph: JobGraph,
    *,
    ignore_in_flight: bool = False,
    allow_non_restored_state: bool = False,
    announce: bool = True,
    rehearsal: Sequence[Comparison] = (),
    dropped_states: Sequence[tuple[OperatorUid, str]] = (),
) -> None:
    """Raises IncompatibleStateError if the graph cannot continue from the checkpoint. The error lists every problem.

    `store` is opened at the root of the checkpoint. With `allow_non_restored_state` the state of operators that the
    graph lacks is dropped, with a warning. `announce`: log what is dropped. `rehearsal`: the results of `rehearse`.
    `dropped_states`: dropped states of functions, with the uids of their operators, for the log. Raises StorageError if
    the positions of a source cannot be read.
    """
    found = misfits(
        metadata, graph, ignore_in_flight=ignore_in_flight, allow_non_restored_state=allow_non_restored_state
    )
    refused = [_refusal(metadata, each, problem) for each in rehearsal for problem in each.problems]
    refuse(metadata, [*found, *refused, *_changed_sources(store, metadata, graph)])
    if not announce:
        return
    for compared in comparisons(metadata, graph, allow_non_restored_state):
        if compared.changes:
            log.info("Operator %r goes on from %s with changes: %s", compared.uid, _where(metadata), compared.summary)
    if allow_non_restored_state:
        _say_what_is_left_behind(metadata, graph)
    for uid, state in dropped_states:
        log.warning(
            "The state %r of operator %r in %s is dropped, as was asked for: its function does not declare it any more",
            state, uid, _where(metadata),
        )  # fmt: skip
    _say_that_nothing_is_left_to_do(metadata, graph)


def check_unread(store: Store, metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Raises ConfigurationError if a source of the graph cannot provide the unread splits of the checkpoint.

    Staged sources are checked, too. Only a `LastingInputSource` can be checked. Raises StorageError.
    """
    known = {info.uid for info in metadata.operators}
    for vertex in graph.vertices:
        spec = vertex.source
        if spec is None or spec.uid not in known or not isinstance(spec.source, LastingInputSource):
            continue
        unread = [position.split for position in _positions(store, metadata, spec.uid) if not position.at_end]
        try:
            spec.source.check_unread([*unread, *_pooled(metadata, spec.uid)])
        except ConfigurationError as error:
            raise ConfigurationError(
                f"source {spec.uid!r} cannot continue from {_where(metadata)}: {error}"
                "; restore with the source of the checkpoint, or start without restore"
            ) from error


def rehearse(
    store: Store, metadata: CheckpointMetadata, graph: JobGraph, *, allow_non_restored_state: bool = False
) -> list[Comparison]:
    """Opens operators on the columns of the checkpoint, and returns the outcome for state that only the operators can
    judge.

    Operators with a known mismatch, or whose state is dropped, are skipped. `store` is opened at the root of the
    checkpoint. Raises CorruptionError, NotFoundError, CodecError and StorageError if the state cannot be read.
    """
    described = comparisons(metadata, graph, allow_non_restored_state)
    stateful = {info.uid for info in graph.operator_infos() if info.meaning is not None}
    held = {info.uid for info in metadata.operators if info.meaning is None}
    misfit = {compared.uid for compared in described if compared.problems}
    left_out = {info.uid for info in metadata.operators if info.uid not in stateful | held} | misfit
    return rehearsed(store, metadata, graph, left_out, allow_non_restored_state=allow_non_restored_state)


def misfits(
    metadata: CheckpointMetadata,
    graph: JobGraph,
    *,
    ignore_in_flight: bool = False,
    allow_non_restored_state: bool = False,
) -> list[str]:
    """Returns the reasons why the graph cannot be restored from the checkpoint, as texts.

    Only compares metadata and graph. Calls no source.
    """
    return [
        *(() if allow_non_restored_state else _without_an_operator(metadata, graph)),
        *_other_meanings(metadata, graph, allow_non_restored_state),
        *_changed_key_groups(metadata, graph),
        *_fed_after_the_end(metadata, graph),
        *(() if ignore_in_flight else _without_an_edge(metadata, graph)),
        *(() if ignore_in_flight else _made_by_others(metadata, graph)),
    ]


def refuse(metadata: CheckpointMetadata, problems: Sequence[str]) -> None:
    """Raises an IncompatibleStateError that lists all problems. Does nothing if there are none."""
    if len(problems) == 1:
        raise IncompatibleStateError(problems[0])
    if problems:
        listed = "".join(f"\n{number}. {text}" for number, text in enumerate(problems[:PROBLEMS_SHOWN_MAX], start=1))
        left_out = len(problems) - PROBLEMS_SHOWN_MAX
        more = f"\nand {left_out} more" if left_out > 0 else ""
        raise IncompatibleStateError(
            f"{len(problems)} things in the program do not fit {_where(metadata)}:{listed}{more}"
        )


def with_key_groups_of(metadata: CheckpointMetadata, graph: JobGraph) -> JobGraph:
    """Returns the graph with the checkpoint's number of key groups, which stored state cannot change.

    Raises ConfigurationError for an operator with more subtasks than key groups.
    """
    found = {info.max_parallelism for info in metadata.operators}
    if len(found) != 1:
        return graph
    (max_parallelism,) = found
    for vertex in graph.vertices:
        if vertex.parallelism > max_parallelism:
            raise ConfigurationError(
                f"operator {vertex.name!r}: parallelism {vertex.parallelism} is more than max_parallelism "
                f"{max_parallelism} of {_where(metadata)}, which cannot change; lower the parallelism, or write a "
                "savepoint with more key groups (recovery.SavepointWriter)"
            )
    return replace(graph, max_parallelism=max_parallelism)


def _where(metadata: CheckpointMetadata) -> str:
    return f"checkpoint {metadata.checkpoint_id} of {metadata.job_id}"


def non_restored(metadata: CheckpointMetadata, graph: JobGraph) -> dict[OperatorUid, tuple[int, int]]:
    """Returns the operators that have state in the checkpoint and are missing from the graph.

    For each, the number of states and of bytes. The native files of a backend count as one state, because they are not
    opened here.
    """
    known = {info.uid for info in graph.operator_infos()}
    found: dict[OperatorUid, tuple[set[str], int]] = {}
    for subtask in metadata.subtasks:
        for handle in subtask.state_handles:
            for section in handle.sections:
                names, size = found.get(section.uid, (set(), 0))
                found[section.uid] = ({*names, section.state}, size + section.length_bytes)
        for native in subtask.native:
            names, size = found.get(native.uid, (set(), 0))
            found[native.uid] = ({*names, native.backend}, size + native.size_bytes)
    return {uid: (len(names), size) for uid, (names, size) in sorted(found.items()) if uid not in known}


def _say_what_is_left_behind(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    for uid, (states, size) in non_restored(metadata, graph).items():
        log.warning(
            "The state of operator %r (%d states, %s bytes) in %s is left behind, as was asked for: the job has no "
            "operator of that uid",
            uid, states, f"{size:,}", _where(metadata),
        )  # fmt: skip


def _say_that_nothing_is_left_to_do(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    if any([each for each, _ in _finished(metadata, vertex)] != [_Finished.FULLY] for vertex in graph.vertices):
        return
    drained = metadata.kind is SnapshotKind.TERMINATE
    log.warning(
        "All operators had finished at %s, because %s there: the job reads no rows and ends at once. %s",
        _where(metadata),
        "the job was stopped with a drain" if drained else "its input had ended",
        "To go on later, stop a job without drain."
        if drained
        else "Rows that have come since need a job of their own.",
    )


def _without_an_operator(metadata: CheckpointMetadata, graph: JobGraph) -> Iterator[str]:
    """Yields a problem for each operator with state that the graph lacks, because its state would be lost
    silently.
    """
    names = {info.uid: info.name for info in metadata.operators}
    uids = [info.uid for info in graph.operator_infos()]
    new = [uid for uid in uids if uid not in names]
    for uid, (states, size) in non_restored(metadata, graph).items():
        nearest = get_close_matches(uid, new, n=1)
        held = f"{states} state{'s' if states > 1 else ''}, {size:,} bytes"
        meant = f"the nearest one that has no state there is {nearest[0]!r}: " if nearest else ""
        yield (
            f"{_where(metadata)} has state of operator {uid!r} ({names.get(uid, uid)!r}, {held}), and the job has no "
            f"operator of that uid (it has {', '.join(sorted(uids))}); {meant}give the operator its old uid=, or leave "
            "its state behind with allow_non_restored_state=True"
        )


def _other_meanings(metadata: CheckpointMetadata, graph: JobGraph, allow_non_restored_state: bool) -> Iterator[str]:
    """Yields a problem for each state that the program interprets differently: another function, window, order or
    time to live.
    """
    for compared, problem in reported(comparisons(metadata, graph, allow_non_restored_state), graph):
        yield _refusal(metadata, compared, problem)


def _refusal(metadata: CheckpointMetadata, compared: Comparison, problem: str) -> str:
    return f"operator {compared.uid!r} ({compared.name!r}) at {_where(metadata)}: {problem}{_WAYS_OUT}"


_WAYS_OUT = (
    ". Restore with the former parameters; or give the operator a new uid and leave its state behind with "
    "allow_non_restored_state=True, so that it starts empty"
)


def _changed_key_groups(metadata: CheckpointMetadata, graph: JobGraph) -> Iterator[str]:
    uids = {info.uid for info in graph.operator_infos()}
    kept = [info for info in metadata.operators if info.uid in uids]
    for number in sorted({info.max_parallelism for info in kept} - {graph.max_parallelism}):
        affected = ", ".join(repr(info.uid) for info in kept if info.max_parallelism == number)
        yield (
            f"max_parallelism is {number} in {_where(metadata)} (operators {affected}) and {graph.max_parallelism} in "
            "the job; it cannot change, because it decides which key group a key is in: leave it unset, and it is that "
            "of the checkpoint"
        )


def _without_an_edge(metadata: CheckpointMetadata, graph: JobGraph) -> Iterator[str]:
    edges = {graph.edge_name(edge): edge for edge in graph.edges}
    for name in sorted(edges_with_in_flight(metadata)):
        edge = edges.get(name)
        if edge is not None and can_take_in_flight(metadata, graph, edge):
            continue
        now = "no such edge" if edge is None else f"a {edge.partitioning.kind.value} edge there, which takes none"
        yield (
            f"{_where(metadata)} has in-flight rows on the edge {name!r}, and the job has {now}; restore from a "
            "savepoint, which is aligned and has no in-flight rows, or give them up with "
            f"CheckpointConfig(ignore_in_flight_of={metadata.checkpoint_id})"
        )


def _made_by_others(metadata: CheckpointMetadata, graph: JobGraph) -> Iterator[str]:
    """Yields a problem for each edge whose in-flight rows would not be the same in the changed program."""
    held = {info.uid: info for info in metadata.operators}
    now = {info.uid: info for info in graph.operator_infos()}
    in_flight = edges_with_in_flight(metadata)
    found: dict[OperatorUid, tuple[str, str]] = {}
    for edge in graph.edges:
        name = graph.edge_name(edge)
        if name not in in_flight:
            continue
        left = [(graph.emitter(edge), True)]
        seen = set[tuple[OperatorUid, bool]]()
        while left:
            uid, passes = left.pop()
            if (uid, passes) in seen or uid not in held or uid not in now:
                continue
            seen.add((uid, passes))
            before = held[uid]
            after = now[uid]
            missed = _columns_not_read(before, after) if passes else []
            if before.makes != after.makes:
                found.setdefault(uid, (name, f"made {before.makes}, and in the program it makes {after.makes}"))
            elif before.inputs != after.inputs:
                fed, feeds = (", ".join(map(repr, each.inputs)) for each in (before, after))
                found.setdefault(uid, (name, f"got its rows from {fed}, and in the program it gets them from {feeds}"))
            elif missed:
                found.setdefault(uid, (name, f"had not read {', '.join(missed)}, which the program uses now"))
            passes = passes and not _chooses_columns(before)
            left += [(each, passes) for each in before.inputs]
    for uid, (name, difference) in found.items():
        yield (
            f"{_where(metadata)} has in-flight rows on the edge {name!r} that the former program made: operator "
            f"{uid!r} ({now[uid].name!r}) {difference}. Restore the former program and take a savepoint, which is "
            "aligned and has no in-flight rows, or give the rows up with "
            f"CheckpointConfig(ignore_in_flight_of={metadata.checkpoint_id})"
        )


def _columns_not_read(before: OperatorInfo, after: OperatorInfo) -> list[str]:
    """Returns the columns of a source that the new program uses and the earlier program did not.

    In-flight rows of the earlier program lack these columns.
    """
    if before.reads is None:
        return []
    return ["some columns"] if after.reads is None else sorted({*after.reads} - {*before.reads})


def _chooses_columns(info: OperatorInfo) -> bool:
    """Returns whether a step emits only columns that it names. Other steps pass on all columns of their input."""
    aggregates = info.meaning is not None and info.meaning.kind.endswith("aggregate")
    return aggregates or info.makes.startswith("select(")


def _changed_sources(store: Store, metadata: CheckpointMetadata, graph: JobGraph) -> Iterator[str]:
    """Yields a problem for each source whose splits differ from the checkpoint, because it would skip rows or read
    other rows.

    If a subtask had finished, its splits may be missing from the checkpoint. Then only the splits in the checkpoint are
    compared. A staged source is read again from the staged files, so it is not compared. A dynamic source checks its
    splits itself.
    """
    known = {info.uid for info in metadata.operators}
    for vertex in graph.vertices:
        spec = vertex.source
        if spec is None or spec.uid not in known:
            continue
        if hasattr(spec.source, "reopen") and not isinstance(spec.source, DynamicSource):
            continue
        subtasks = subtasks_of(metadata, spec.uid)
        before = {p.split.split_id: p.split for p in _positions(store, metadata, spec.uid)}
        before |= {split.split_id: split for split in _pooled(metadata, spec.uid)}
        if isinstance(spec.source, DynamicSource):
            read = [split for subtask in subtasks if subtask.finished for split in subtask.read_splits]
            ended = [SourceSplit(each.split_id, each.payload, each.rows) for each in read]
            try:
                spec.source.check_restored((*before.values(), *ended))
            except ConfigurationError as error:
                yield f"source {spec.uid!r} cannot go on from {_where(metadata)}: {error}"
            continue
        now = {split.split_id: split for split in splits_of(spec)}
        some_unknown = any(subtask.finished and spec.uid not in operators_with_state(subtask) for subtask in subtasks)
        compared = before.keys() if some_unknown else before.keys() | now.keys()
        changed = sorted(n for n in compared if before.get(n) != now.get(n))
        if changed:
            yield (
                f"source {spec.uid!r} is not what it was at {_where(metadata)}: split {changed[0]!r} and "
                f"{len(changed) - 1} more were added, removed or changed; give it the same input and the same number "
                "of splits, or start without restore"
            )


def _positions(store: Store, metadata: CheckpointMetadata, uid: OperatorUid) -> tuple[SplitPosition, ...]:
    """Returns the stored positions of the splits that were assigned to subtasks."""
    subtasks = subtasks_of(metadata, uid)
    return positions_from_tables([table for each in subtasks for table in read_subtask_state(store, each, uid)])


def _pooled(metadata: CheckpointMetadata, uid: OperatorUid) -> list[SourceSplit]:
    """Returns the splits that were not assigned to a subtask."""
    return [SourceSplit(each.split_id, each.payload, each.rows) for each in metadata.pool_of(uid)]


class _Finished(enum.Enum):
    """How many of an operator's subtasks had finished in the checkpoint: all, some or none. NONE for a new
    operator.
    """

    NONE = "not finished"
    PARTLY = "partly finished"
    FULLY = "finished"


def _fed_after_the_end(metadata: CheckpointMetadata, graph: JobGraph) -> Iterator[str]:
    found: dict[VertexId, list[_Finished]] = {}
    for vertex in graph.vertices:
        conditions = _finished(metadata, vertex)
        found[vertex.vertex] = [condition for condition, _ in conditions]
        if len(conditions) > 1 and found[vertex.vertex] != [_Finished.PARTLY, _Finished.NONE]:
            listed = " and ".join(f"{uid!r} ({condition.value})" for condition, uid in conditions)
            yield (
                f"operators that run in one task must have finished alike at {_where(metadata)}, and these had not: "
                f"{listed}; leave out the new one, or restore from a checkpoint before the end"
            )
    for edge in graph.edges:
        upstream = found[edge.upstream][-1]
        downstream = found[edge.downstream][0]
        if not _may_feed(upstream, downstream, edge):
            yield (
                f"{_name(graph, edge.downstream)} had {downstream.value} at {_where(metadata)}, and "
                f"{_name(graph, edge.upstream)}, which is {upstream.value} there or new, would give it more rows; "
                "leave out the new operator, or restore from a checkpoint before the end"
            )


def _may_feed(upstream: _Finished, downstream: _Finished, edge: JobEdge) -> bool:
    if downstream is _Finished.NONE or upstream is _Finished.FULLY:
        return True
    # On a forward edge subtask i feeds subtask i alone, so some subtasks of both may have finished. If the parallelism
    # has changed since, the edge is rebalanced now: the unfinished rest feeds the unfinished rest.
    was_pointwise = edge.partitioning.kind in (PartitioningKind.FORWARD, PartitioningKind.REBALANCE)
    return downstream is _Finished.PARTLY and was_pointwise and upstream is _Finished.PARTLY


def _finished(metadata: CheckpointMetadata, vertex: JobVertex) -> list[tuple[_Finished, OperatorUid]]:
    """Returns whether the operators of a vertex had finished, each with its uid. Neighbours in the chain with the same
    answer are reported once.

    Operators that had separate tasks may be chained now, for example when a job shrinks to one subtask. Then a partly
    finished operator, such as a source with fewer splits than subtasks, continues to send rows to an operator that had
    not finished.
    """
    known = {info.uid for info in metadata.operators}
    sources = () if vertex.source is None else (vertex.source,)
    found: list[tuple[_Finished, OperatorUid]] = []
    for spec in (*sources, *vertex.operators):
        flags = {subtask.finished for subtask in subtasks_of(metadata, spec.uid)} if spec.uid in known else {False}
        condition = _Finished.PARTLY if len(flags) > 1 else _Finished.FULLY if flags == {True} else _Finished.NONE
        if not found or found[-1][0] is not condition:
            found.append((condition, spec.uid))
    return found


def _name(graph: JobGraph, vertex: VertexId) -> str:
    return f"operator {graph.vertex(vertex).name!r}"
