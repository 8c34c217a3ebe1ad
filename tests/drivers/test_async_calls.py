"""Calls of `map_async` in a task: which one has been under way for longest."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest

from tidegate.actors.drivers.async_calls import AsyncCalls
from tidegate.actors.task.instructions import MakeCalls
from tidegate.operators.functions.async_map import AsyncFunction, Call
from tidegate.storage.ids import OperatorUid

UID = OperatorUid("ask")


def test_the_oldest_call_is_known_until_its_answer_has_come() -> None:
    """Then the next one is the oldest, and no other call has ever had its number in this process."""
    given: list[Future[Any]] = [Future(), Future(), Future()]
    batch = pa.record_batch({"x": [0, 1, 2]})
    calls = AsyncCalls({UID: AsyncFunction(lambda row: given[row["x"]], 10, 60_000)})

    def begin(*rows: int) -> None:
        calls.ask(MakeCalls(UID, tuple(Call(row, batch.slice(row, 1)) for row in rows)))

    def answer(row: int) -> None:
        given[row].set_result({"x": row})
        calls.received(calls.collect())

    try:
        assert calls.oldest is None
        begin(0, 1)
        first = calls.oldest
        answer(1)
        assert first is not None
        assert calls.oldest == first
        begin(2)
        answer(0)
        assert calls.oldest not in (None, first)
        answer(2)
        assert (calls.oldest, calls.under_way) == (None, False)
    finally:
        calls.close()


@pytest.mark.parametrize("reason", [None, "Ray has pending tasks"])
def test_a_call_that_takes_too_long_names_what_it_may_have_waited_for(reason: str | None) -> None:
    """Once, when it is not made again."""
    asked = []

    def why_late() -> str | None:
        asked.append(reason)
        return reason

    calls = AsyncCalls({UID: AsyncFunction(lambda row: Future[Any](), 10, 1, retries=1)}, why_late)
    try:
        calls.ask(MakeCalls(UID, (Call(0, pa.record_batch({"x": [0]})),)))
        ((_, answer),) = calls.collect()
        while_ = "" if reason is None else f", while {reason}"
        assert str(answer.error) == f"no result within 0.001 s (timeout=){while_}"
        assert len(asked) == 1
    finally:
        calls.close()


async def _cancelled(row: dict[str, Any]) -> dict[str, Any]:
    raise asyncio.CancelledError


def _cancelled_future(row: dict[str, Any]) -> Future[Any]:
    future = Future[Any]()
    future.cancel()
    return future


@pytest.mark.parametrize("function", [_cancelled, _cancelled_future])
def test_a_call_that_is_cancelled_by_its_function_has_failed(function: Any) -> None:
    """It would never have an answer, and the job would wait for it forever."""
    calls = AsyncCalls({UID: AsyncFunction(function, 10, 60_000)})
    try:
        calls.ask(MakeCalls(UID, (Call(0, pa.record_batch({"x": [0]})),)))
        ((_, answer),) = calls.collect()
        assert "the call was cancelled by the function" in str(answer.error)
    finally:
        calls.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_exits_has_failed(error: BaseException) -> None:
    """It would stop the event loop, and with it all calls of the task."""

    async def exits(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 0:
            raise error
        return row

    batch = pa.record_batch({"x": [0, 1]})
    calls = AsyncCalls({UID: AsyncFunction(exits, 10, 60_000)})
    try:
        calls.ask(MakeCalls(UID, tuple(Call(row, batch.slice(row, 1)) for row in range(2))))
        answers = dict[int, Any]()
        while len(answers) < 2:
            answers |= {answer.number: answer for _, answer in calls.collect()}
        assert answers[0].error is error
        assert answers[1].error is None
    finally:
        calls.close()
