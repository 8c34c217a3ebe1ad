"""A streaming DataFrame at one end of a job, a function for checkpoints at the other: each row is handed over once."""

from __future__ import annotations

import pytest
from checkpoint_calls import Calls
from fake_queries import Streaming
from local_jobs import local
from waiting import until

import tidegate as tg


def hand_over(streaming: Streaming, calls: Calls, retries: int = 3) -> None:
    """The program ends in a function."""
    streaming.end = lambda rows: rows.for_each_checkpoint(calls, uid="calls", retries=retries)


def until_all_were_handed_over(streaming: Streaming, calls: Calls) -> None:
    """Every row of the stream, once."""
    until("all rows", lambda: len(calls.rows) >= len(streaming.stream.values), lambda: calls.all)
    assert calls.rows == streaming.stream.values


@pytest.mark.parametrize("stops", [False, True])
def test_each_row_is_handed_over_once(streaming: Streaming, stops: bool) -> None:
    """Also those that were on their way when the job was ended, and another one restored at once."""
    calls = Calls()
    hand_over(streaming, calls)
    restore = "latest"
    with local() as env:
        for run in range(2):
            job = streaming.execute(env, restore=restore)
            until_all_were_handed_over(streaming, calls)
            streaming.stream.put([100 + run], [200 + run])
            if stops:
                restore = job.stop(savepoint=str(streaming.savepoints))
            else:
                job.cancel()
        job = streaming.execute(env, restore=restore)
        until_all_were_handed_over(streaming, calls)
        job.cancel()
        assert job.wait("4min") == "cancelled"
    assert calls.rows == streaming.stream.values
    assert calls.ids == sorted(set(calls.ids))
    assert streaming.stream.active == []
    assert streaming.stream.most_active == 1


def test_a_function_that_fails_ends_the_query(streaming: Streaming) -> None:
    """With the job; a restored one hands over what the function did not take."""

    def fail(number: int) -> None:
        raise ValueError("the database is away")

    hand_over(streaming, Calls(fail), retries=0)
    with local() as env:
        job = streaming.execute(env)
        with pytest.raises(tg.JobFailedError, match="the database is away"):
            job.wait("4min")
        assert streaming.stream.active == []
        calls = Calls()
        hand_over(streaming, calls)
        streaming.stream.put([7])
        streaming.execute(env, restore="latest")
        until_all_were_handed_over(streaming, calls)
