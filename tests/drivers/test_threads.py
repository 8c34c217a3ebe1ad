"""Threads of the runtimes: nothing that user code raises or does takes one away unnoticed, and none is waited for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from tidegate.actors.drivers import threads
from tidegate.actors.drivers.threads import EXIT_FORKED, ThreadPool, lacks_threads

WAIT_S = 240


@pytest.fixture
def made() -> Iterator[Callable[..., ThreadPool]]:
    """Makes pools that are closed in any case; a thread that dies fails the test, unless it is expected."""
    pools: list[ThreadPool] = []

    def make(number: int = 1, died: Callable[[BaseException], object] = pytest.fail) -> ThreadPool:
        pools.append(ThreadPool(number, "test", died))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        assert pool.join(WAIT_S)


def result_of(pool: ThreadPool, work: Callable[[], object]) -> Future[object]:
    """What `done` gets to see."""
    outcome: Future[Future[object]] = Future()
    pool.submit(work, outcome.set_result)
    return outcome.result(WAIT_S)


def raise_(error: BaseException) -> None:
    """As an expression."""
    raise error


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_whatever_work_raises_is_its_result(made: Callable[..., ThreadPool], kind: type[BaseException]) -> None:
    """The thread goes on with the next piece."""
    pool = made()
    assert isinstance(result_of(pool, lambda: raise_(kind("no"))).exception(), kind)
    assert result_of(pool, lambda: 7).result() == 7


def test_a_thread_that_dies_is_told(made: Callable[..., ThreadPool]) -> None:
    """What comes after the work is code of ours: when that raises, whoever waits for it would wait for ever."""
    told: Future[BaseException] = Future()
    pool = made(1, told.set_result)
    pool.submit(lambda: None, lambda future: raise_(MemoryError("none left")))
    assert isinstance(told.result(WAIT_S), MemoryError)


def test_closing_drops_what_waits_and_waits_for_nobody(made: Callable[..., ThreadPool]) -> None:
    """`then` comes once, after the work that was under way, on the thread that did it."""
    pool, begun, go = made(), threading.Event(), threading.Event()
    ended: list[str] = []
    over = threading.Event()

    def work() -> None:
        begun.set()
        go.wait(WAIT_S)
        ended.append("work")

    pool.submit(work, lambda future: None)
    pool.submit(lambda: ended.append("dropped"), lambda future: None)
    assert begun.wait(WAIT_S)
    pool.close(lambda: (ended.append("then"), over.set()))
    pool.close(lambda: ended.append("again"))
    pool.submit(lambda: ended.append("late"), lambda future: None)
    assert not pool.join(0)
    go.set()
    assert over.wait(WAIT_S)
    assert pool.join(WAIT_S)
    assert ended == ["work", "then"]


def test_closing_an_idle_pool_is_followed_up_too(made: Callable[..., ThreadPool]) -> None:
    """By the last thread that leaves."""
    over = threading.Event()
    made(3).close(over.set)
    assert over.wait(WAIT_S)


def test_threads_keep_no_process_alive(made: Callable[..., ThreadPool]) -> None:
    """Python waits at its end for all threads but daemons, and for all of its own pools."""
    made(2)
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("test-"))


def test_a_queue_that_gets_too_long_is_an_error(
    made: Callable[..., ThreadPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than memory that fills up."""
    monkeypatch.setattr(threads, "WAITING_MAX", 2)
    pool, begun, go = made(), threading.Event(), threading.Event()
    pool.submit(lambda: (begun.set(), go.wait(WAIT_S)), lambda future: None)
    assert begun.wait(WAIT_S)
    for _ in range(2):
        pool.submit(lambda: None, lambda future: None)
    with pytest.raises(RuntimeError, match="2 pieces of work wait"):
        pool.submit(lambda: None, lambda future: None)
    go.set()


def test_a_pool_that_cannot_start_its_threads_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has work; the threads that did start end again."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError) as raised:
        ThreadPool(3, "test", pytest.fail)
    assert lacks_threads(raised.value)
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_that_no_thread_can_be_started_is_seen_through_other_errors() -> None:
    """Those that wrap it, and rings of them."""
    assert not lacks_threads(RuntimeError("something else"))
    inner, outer = RuntimeError("can't start new thread"), ValueError("outer")
    outer.__cause__ = inner
    assert lacks_threads(outer)
    ring = ValueError("ring")
    ring.__context__ = outer
    outer.__cause__ = ring
    assert not lacks_threads(ring)


@pytest.mark.parametrize("comes_back", [lambda: None, lambda: raise_(SystemExit(0)), lambda: raise_(ValueError("no"))])
def test_a_process_that_user_code_forks_does_not_go_on_as_a_task(
    made: Callable[..., ThreadPool], comes_back: Callable[[], None]
) -> None:
    """It would do all over again what its parent does."""

    def fork() -> int:
        child = os.fork()
        if child == 0:
            comes_back()
        return child

    child = result_of(made(), fork).result()
    assert isinstance(child, int)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_FORKED
