"""Operator state over restores and changes of parallelism in a row: dealt out, united, or the same for all."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from restored_graphs import REBALANCE, checkpoint_of, complete, graph_of

from tidegate.actors.restore.restore_task import restore_task
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import OperatorContext
from tidegate.operators.state.keyed_state import ListState, MapState
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.snapshot import Cut, StateTable
from tidegate.storage.state.state_file import write_state

UID = OperatorUid("op")


class Keeps(ProcessFunction):
    """Keeps what it is given; of the union each subtask keeps its part when it opens."""

    def __init__(self, with_union: bool) -> None:
        self._with_union = with_union

    def open(self, context: ProcessContext) -> None:
        self.few = context.list_state(ListState("few", pa.int64()))
        self.points = context.list_state(ListState("points", pa.struct({"x": pa.int64()})))
        self.rules = context.broadcast_state(MapState("rules", pa.string(), pa.int64()))
        self.found: list[int] = []
        if self._with_union:
            self.union = context.union_list_state(ListState("union", pa.int64()))
            self.found = self.union.get()
            self.union.update(self.found[context.subtask :: context.parallelism])

    def process(self, row: dict[str, Any], context: ProcessContext) -> None:
        """Nothing."""


@dataclass
class Step:
    """What every subtask is given, who has finished then, and the parallelism that the job goes on with."""

    few: list[list[int]]
    points: list[list[int]]
    union: list[list[int]]
    rules: dict[str, int | None]
    finished: set[int]
    parallelism: int
    clears: set[int] = field(default_factory=set)


@st.composite
def steps(draw: st.DrawFn) -> tuple[bool, int, list[Step]]:
    """Whether there is a union (then nobody finishes before the others), the first parallelism, and what follows."""
    with_union = draw(st.booleans())
    first = parallelism = draw(st.integers(1, 5))
    drawn = []
    for _ in range(draw(st.integers(1, 5))):
        given_each = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=parallelism, max_size=parallelism)
        subtasks = st.sets(st.integers(0, parallelism - 1), max_size=parallelism - 1)
        step = Step(
            draw(given_each),
            draw(given_each),
            draw(given_each),
            draw(st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(0, 9), max_size=3)),
            set() if with_union else draw(subtasks),
            draw(st.integers(1, 5)),
            draw(subtasks),
        )
        parallelism = step.parallelism
        drawn.append(step)
    return with_union, first, drawn


class Job:
    """The subtasks of the operator, and their checkpoints."""

    def __init__(self, with_union: bool, tables: list[list[StateTable]]) -> None:
        self._with_union = with_union
        self._operators = [ProcessOperator(Keeps(with_union)) for _ in tables]
        for subtask, (operator, restored) in enumerate(zip(self._operators, tables, strict=True)):
            operator.open(OperatorContext(UID, "op", SubtaskIndex(subtask), len(tables), 16), restored)

    @property
    def functions(self) -> list[Keeps]:
        """The function of each subtask."""
        functions = [operator.function for operator in self._operators]
        assert all(isinstance(function, Keeps) for function in functions)
        return functions  # type: ignore[return-value]

    def give(self, step: Step) -> None:
        """Let every subtask have its part."""
        for subtask, function in enumerate(self.functions):
            if subtask in step.clears:
                function.few.clear()
            function.few.add_all(step.few[subtask])
            function.points.add_all({"x": x} for x in step.points[subtask])
            function.rules.put_all(step.rules)
            if self._with_union:
                function.union.add_all(step.union[subtask])

    def restored(self, finished: set[int], parallelism: int) -> Job:
        """What goes on from a checkpoint of now."""
        store = open_store(f"memory://{uuid.uuid4().hex}")
        handles = {}
        for subtask, operator in enumerate(self._operators):
            snapshot = operator.snapshot(Cut(CheckpointId(5)))
            assert snapshot is not None
            states = [(UID, state) for state in snapshot.states]
            handles["op", subtask] = write_state(store, f"op-{subtask}", states, inline_bytes_max=0)
        edge = ("source", "op", REBALANCE)
        old = graph_of({"source": 1, "op": len(self._operators)}, edge)
        flags = {"op": sorted(finished), "source": [0] if finished else []}
        point = complete(store, checkpoint_of(old, finished=flags, handles=handles))
        graph = graph_of({"source": 1, "op": parallelism}, edge)
        tasks = [
            restore_task(store, point, graph, TaskId(VertexId("op"), SubtaskIndex(subtask)))
            for subtask in range(parallelism)
        ]
        store.delete_tree("")
        return Job(self._with_union, [list(dict(task.tables).get(UID, ())) for task in tasks])


@settings(max_examples=150, deadline=None)
@given(steps())
def test_operator_state_survives_every_sequence_of_restores(case: tuple[bool, int, list[Step]]) -> None:
    """Of lists no element is lost or doubled, and subtasks have as many but for one after a change of parallelism.

    At the same parallelism each has its own again. Of a union everybody finds all, in the order of the subtasks; the
    broadcast map is that which all had. What subtasks had that have finished is left out.
    """
    with_union, parallelism, history = case
    job = Job(with_union, [[] for _ in range(parallelism)])
    rules: dict[str, int] = {}
    for step in history:
        job.give(step)
        rules = {key: value for key, value in (rules | step.rules).items() if value is not None}
        lists = {
            "few": [function.few.get() for function in job.functions],
            "points": [[point["x"] for point in function.points.get()] for function in job.functions],
        }
        union = [value for function in job.functions if with_union for value in function.union.get()]
        job = job.restored(step.finished, step.parallelism)

        remain = {
            name: [values if subtask not in step.finished else [] for subtask, values in enumerate(had)]
            for name, had in lists.items()
        }
        now = {
            "few": [function.few.get() for function in job.functions],
            "points": [[point["x"] for point in function.points.get()] for function in job.functions],
        }
        for name, had in remain.items():
            if step.parallelism == parallelism:
                assert had == now[name]
            else:
                assert Counter(chain(*had)) == Counter(chain(*now[name]))
                assert max(map(len, now[name])) - min(map(len, now[name])) <= 1
        assert [union] * step.parallelism == [function.found for function in job.functions]
        assert [rules] * step.parallelism == [dict(function.rules.items()) for function in job.functions]
        parallelism = step.parallelism
