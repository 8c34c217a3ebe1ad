"""Looks behind the public API: the nodes of a program before it is a job graph, and the runtime that runs a job."""

from __future__ import annotations

import tidegate as tg
from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.actors.runtimes.running_job import RunningJob, Runtime
from tidegate.api.streams.stream import Stream


def nodes_of(made: tg.StreamEnvironment | Stream) -> list[StreamNode]:
    """Returns the nodes of a program, in the order in which they were added."""
    return list(made._program.nodes)


def inputs_of(stream: Stream) -> list[StreamNode]:
    """Returns the nodes from which the rows of a stream come: one, or several of a union."""
    return [node for node, _ in stream._inputs]


def begin_anew(env: tg.StreamEnvironment) -> None:
    """Empties the program of an environment. Its earlier streams cannot be used any more."""
    env._program.clear()


def running_of(job: tg.Job) -> RunningJob:
    """Returns what the runtime of an environment knows of a job."""
    return job._running


def runtime_of(env: tg.StreamEnvironment) -> Runtime:
    """Returns the runtime of an environment."""
    return env._runtime
