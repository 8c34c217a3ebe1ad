"""Compares what stored state means with what a restored program makes of it, before anything runs.

Both sides are descriptions (`tidegate/storage/checkpoints/state_meaning.py`); no operator is made and no state is
read. Rules:

- Aggregates that were added start empty, and those that were removed are dropped if the user agrees
  (`allow_non_restored_state`). The types of an aggregate may widen.
- Every other difference is refused: another function, filter, key, window, order, time to live or kind of step. Its
  state holds something else, and results would be wrong without an error.
- Key types do not change, because the hash of a key decides which subtask has it. Stored rows keep their columns; their
  types may widen.
- State without a description, which `recovery.SavepointWriter` makes, is compared by the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.restore.restore_in_flight import edges_with_in_flight
from tidegate.operators.aggregates.aggregate_state import SPREADS, AggregateKind
from tidegate.operators.aggregates.stored_layout import field_refusal
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, OperatorInfo
from tidegate.storage.checkpoints.state_meaning import MeaningColumns, MeaningPart, StateMeaning
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.evolution import widens
from tidegate.storage.subtasks.subtask_state import operators_with_state


@dataclass
class Comparison:
    """What becomes of the state of one operator.

    `problems`: what does not fit, each a sentence. `started_empty`, `dropped` and `migrated`: names of parts, such as
    `aggregate n`. `dropped_states`: names of the states of a function among those that are dropped.
    """

    uid: OperatorUid
    name: str
    problems: list[str] = field(default_factory=list)
    started_empty: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    migrated: list[str] = field(default_factory=list)
    dropped_states: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether the state of the operator is restored in another form."""
        return bool(self.started_empty or self.dropped or self.migrated)

    @property
    def summary(self) -> str:
        """The changes in one line."""
        kinds = {"starts empty": self.started_empty, "is dropped": self.dropped, "gets a wider type": self.migrated}
        return "; ".join(f"{', '.join(parts)} {what}" for what, parts in kinds.items() if parts)


def comparisons(metadata: CheckpointMetadata, graph: JobGraph, allow_non_restored_state: bool) -> list[Comparison]:
    """What becomes of the state of each operator that both the checkpoint and the graph have, in the graph's order."""
    held = {info.uid: info for info in metadata.operators}
    with_state = {uid for subtask in metadata.subtasks for uid in operators_with_state(subtask)}
    in_flight = {_receiver(edge) for edge in edges_with_in_flight(metadata)}
    return [
        _compared(held[info.uid], info, allow_non_restored_state, info.uid in in_flight)
        for info in graph.operator_infos()
        if info.uid in held and (info.uid in with_state or held[info.uid].meaning is not None)
    ]


def _receiver(edge: str) -> str:
    """The uid of the operator that an edge leads to, by the name of the edge."""
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
        old, new = before.get(key), after.get(key)
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


def _kept(part: MeaningPart) -> str:
    """What a part keeps. Variances and standard deviations keep the same moments, and calculate from these."""
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
        schema, expected = old.arrow_schema, columns.arrow_schema
        if columns.role == "keys" and schema.names != expected.names and found.problems:
            continue  # The parts have other keys too, and one reason is enough.
        reason = _refusal(columns, schema, expected, texts.get(key, ""))
        if reason is None:
            found.migrated.append(f"{columns.role} {columns.name}".rstrip())
        else:
            of = f"{columns.role} {columns.name}".rstrip()
            yield f"{of}: stored as {columns_text(schema)}, and the program has {columns_text(expected)}: {reason}"


def _refusal(columns: MeaningColumns, before: pa.Schema, now: pa.Schema, text: str) -> str | None:
    """Why stored columns cannot become those of the program; None if they can."""
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
