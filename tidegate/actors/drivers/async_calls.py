"""`AsyncCalls`: calls the async functions of `map_async` for one task, in an event loop on a separate thread.

Rules:

- All calls of a task share one event loop and its thread, which start with the first call.
- A call that raises, or takes too long, is repeated `retries` times, after growing pauses. Then it has failed.
- The error of a call that took too long names the likely cause, if the runtime can find it.
- One I/O thread of the task collects results at a time: `collect` waits for one result, and returns all that are there.
- In virtual time there is no thread: `call_now` makes one call, and returns its result.
- `close` cancels the calls and does not wait for them. A call that is cancelled before has failed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from tidegate.actors.task.instructions import MakeCalls
from tidegate.operators.functions.async_map import Answer, AsyncFunction, Call
from tidegate.operators.operator_errors import is_failure
from tidegate.operators.row_values import owned_result
from tidegate.storage.ids import OperatorUid

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
PAUSE_S_MAX = 10.0
WHY_LATE_S_MAX = 10.0

Answered = tuple[tuple[OperatorUid, Answer], ...]

_numbers = itertools.count(1)
"""Numbers of the async calls of this process, counted over all its tasks and attempts."""


class AsyncCalls:
    """The running async calls of one task. `ask` and `received` run on the task's thread, `collect` on any
    thread.
    """

    def __init__(
        self, functions: Mapping[OperatorUid, AsyncFunction], why_late: Callable[[], str | None] = lambda: None
    ) -> None:
        """Prepares the calls.

        `why_late` is called when a call is late, and returns text about the likely cause, or None. It may block.
        """
        self._functions = functions
        self._why_late = why_late
        self._answers: queue.SimpleQueue[tuple[OperatorUid, Answer] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._under_way: dict[tuple[OperatorUid, int], int] = {}
        """Running calls, oldest first: (operator, number within the operator), and their number within this
        process.
        """
        self.oldest: int | None = None
        """Process-wide number of the oldest running call, or None. May be read from any thread."""
        self.collecting = False
        """True while an I/O thread waits for results of calls."""

    @property
    def under_way(self) -> bool:
        """Returns whether the result of any call is still missing."""
        return bool(self._under_way)

    def ask(self, instruction: MakeCalls) -> None:
        """Starts the calls of an instruction in the event loop. Does nothing once closed."""
        loop = self._running_loop()
        if loop is None:
            return
        self._under_way |= {(instruction.uid, call.number): next(_numbers) for call in instruction.calls}
        self._find_oldest()
        for call in instruction.calls:
            asyncio.run_coroutine_threadsafe(self._answer(instruction.uid, call), loop)

    def received(self, answers: Answered) -> None:
        """Removes calls whose results the task has received."""
        for uid, answer in answers:
            self._under_way.pop((uid, answer.number), None)  # virtual calls are not requested here
        self._find_oldest()

    def collect(self) -> Answered:
        """Waits for the result of a call, and returns all results so far. Empty once closed."""
        found = [self._answers.get()]
        while not self._answers.empty():
            found.append(self._answers.get())
        return () if self._closed else tuple(answer for answer in found if answer is not None)

    def call_now(self, uid: OperatorUid, call: Call) -> Answered:
        """Makes one call in the calling thread, and returns its result."""
        return ((uid, asyncio.run(self._called(uid, call))),)

    def close(self) -> None:
        """Cancels the running calls. Idempotent."""
        with self._lock:
            self._closed = True
            loop = self._loop
            self._loop = None
        self._answers.put(None)
        self.oldest = None
        if loop is not None:
            loop.call_soon_threadsafe(_cancel_all, loop)

    async def _with_reason(self, said: str) -> str:
        try:
            reason = await asyncio.wait_for(asyncio.to_thread(self._why_late), WHY_LATE_S_MAX)
        except TimeoutError:
            log.warning("what a call may have waited for is not known after %g s", WHY_LATE_S_MAX)
            return said
        return said if reason is None else f"{said}, while {reason}"

    def _find_oldest(self) -> None:
        self.oldest = next(iter(self._under_way.values()), None)

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            if self._loop is None and not self._closed:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="tidegate-async", daemon=True).start()
            return self._loop

    async def _answer(self, uid: OperatorUid, call: Call) -> None:
        self._answers.put((uid, await self._called(uid, call)))

    async def _called(self, uid: OperatorUid, call: Call) -> Answer:
        function = self._functions[uid]
        pause_s = FIRST_PAUSE_S
        failed: BaseException = TimeoutError()
        for left in range(function.retries, -1, -1):
            try:
                return Answer(call.number, await asyncio.wait_for(_begun(function, call), function.timeout_ms / 1000))
            except asyncio.CancelledError:
                if self._closed:
                    raise
                failed = RuntimeError(
                    "the call was cancelled by the function, or by a library that it calls (asyncio.CancelledError); "
                    "let it raise another error"
                )
            except TimeoutError as error:
                said = str(error) or f"no result within {function.timeout_ms / 1000:g} s (timeout=)"
                failed = TimeoutError(said if left else await self._with_reason(said))
            except _ExitError as error:
                failed = error.exit
                if not is_failure(failed) and threading.current_thread() is threading.main_thread():
                    raise failed from None
            except BaseException as error:
                if not is_failure(error):
                    raise
                failed = error
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_S_MAX, pause_s * 2)
        return Answer(call.number, error=failed)


class _ExitError(Exception):
    """Carries a SystemExit or KeyboardInterrupt of a function, which would stop the event loop of all calls."""

    def __init__(self, exit: BaseException) -> None:
        super().__init__(repr(exit))
        self.exit = exit


async def _begun(function: AsyncFunction, call: Call) -> Any:
    try:
        return await _result(function, call)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ExitError(error) from error


async def _result(function: AsyncFunction, call: Call) -> Any:
    given = call.rows if function.batch_size is not None else call.rows.to_pylist()[0]
    result = function.fn(given)
    if isinstance(result, Future):
        return owned_result(await asyncio.wrap_future(result))
    if not hasattr(result, "__await__"):
        raise TypeError(
            f"the function of map_async returned {type(result).__name__}; make it an async def, or return a future. "
            "Use map or map_batches for a function that only computes"
        )
    return owned_result(await result)  # here: other calls may run before the answer is read


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    ended = asyncio.gather(*tasks, return_exceptions=True)
    ended.add_done_callback(lambda _: loop.stop())
