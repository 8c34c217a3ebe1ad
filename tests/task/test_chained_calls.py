"""Operators that are chained behind calls that wait: rows and watermarks come to them in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.operators.functions.async_map import Answer, AsyncFunction, AsyncMap
from tidegate.operators.operator import Emit, Operator
from tidegate.storage.ids import OperatorUid, SubtaskIndex

CALLS = OperatorUid("calls")


class Slow(Operator):
    """Is done with a watermark in three steps, and knows it from the first one on."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        self._log += batch.column("x").to_pylist()

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        self._log.append(f"reached {watermark_ms}")
        yield
        yield
        self._log.append(f"done with {watermark_ms}")
        yield


def test_rows_come_behind_all_steps_of_the_watermark_before_them() -> None:
    """Else a second watermark would wait for the steps of the first, and the rows behind it would come before it."""
    log: list[Any] = []
    specs = [
        OperatorSpec(CALLS, "calls", lambda: AsyncMap(AsyncFunction(str, 9, 1_000))),
        OperatorSpec(OperatorUid("slow"), "slow", lambda: Slow(log)),
    ]
    chain = OperatorChain(specs, SubtaskIndex(0), 1, 16, lambda batch: None)
    chain.open({})
    for x in range(3):
        chain.process(pa.record_batch({"x": [x]}))
        chain.advance_watermark(10 * x)

    (made,) = chain.callers.take_calls(TaskStatus.RUNNING)
    answers = [(CALLS, Answer(call.number, call.rows.to_pylist()[0])) for call in made.calls]
    chain.callers.answered(answers, TaskStatus.RUNNING)

    told = [(x, f"reached {10 * x}", f"done with {10 * x}") for x in range(3)]
    assert log == [item for of in told for item in of]
    chain.close()
