"""Stages sources: writes their input to files when the job is submitted. Some are fed more while the job runs.

A bounded DataFrame is staged, a streaming one is fed. `submission.py` calls this. Rules:

- A restored job reads on in what was staged for the first job of its line: the input may differ by now.
- A fed source needs periodic checkpoints, since its rows are deleted once a checkpoint covers them. It also needs a
  driver that lives as long as the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from tidegate.actors.graph.job_graph import JobGraph, SourceSpec
from tidegate.actors.runtimes.companions import Companion
from tidegate.actors.runtimes.running_job import FedJob
from tidegate.connectors.source import Source
from tidegate.recovery.job_lineage import SOURCE, taskowned_url
from tidegate.storage.errors import ConfigurationError, NotFoundError
from tidegate.storage.ids import JobId, OperatorUid


@runtime_checkable
class StagedSource(Protocol):
    """A source that must be written to files before it can be read twice, such as a DataFrame."""

    def stage(self, url: str) -> Source:
        """Write the input under `url`, once, and return what reads it."""
        ...

    def reopen(self, url: str) -> Source:
        """What reads the input that was staged under `url` for an earlier job. NotFoundError if nothing was."""
        ...


@runtime_checkable
class FedSource(StagedSource, Protocol):
    """A staged source to which more is written while the job runs, such as a streaming DataFrame."""

    def feed(self, staged: Source, job: FedJob) -> Companion:
        """The companion that writes the input while the job runs. ConfigurationError while another job feeds it."""
        ...


@dataclass(frozen=True, slots=True)
class StagedGraph:
    """The graph with staged sources, and the companions that feed some of them."""

    graph: JobGraph
    companions: tuple[Companion, ...]


def check_fed_sources(graph: JobGraph, *, periodic_checkpoints: bool, detached: bool) -> None:
    """Raise ConfigurationError for a fed source in a job that is detached or takes no periodic checkpoints."""
    for vertex in graph.vertices:
        if vertex.source is None or not isinstance(vertex.source.source, FedSource):
            continue
        named = f"source {vertex.source.uid!r} is a streaming DataFrame, and"
        if detached:
            raise ConfigurationError(
                f"{named} its Spark query lives in this driver: a detached job would outlive it. Leave detached out"
            )
        if not periodic_checkpoints:
            raise ConfigurationError(
                f"{named} the job takes no periodic checkpoints: its rows would stay on disk for ever. Set an interval "
                '(CheckpointConfig(interval="10s"))'
            )


def with_staged_sources(
    graph: JobGraph,
    own_url: Callable[[OperatorUid], str],
    fed_job: Callable[[OperatorUid], FedJob],
    restored: set[OperatorUid],
    line: Sequence[tuple[str, JobId]],
) -> StagedGraph:
    """Stage the sources of a graph under `own_url`; reopen those in `restored`, which a job of the `line` has staged.

    Raises ConfigurationError if what was staged is gone, and what staging raises.
    """
    companions: list[Companion] = []

    def staged(spec: SourceSpec) -> SourceSpec:
        if not isinstance(spec.source, StagedSource):
            return spec
        again = spec.uid in restored
        source = _reopen(spec.source, spec.uid, line) if again else spec.source.stage(own_url(spec.uid))
        if isinstance(spec.source, FedSource):
            companions.append(spec.source.feed(source, fed_job(spec.uid)))
        return replace(spec, source=source)

    return StagedGraph(graph.with_sources(staged), tuple(companions))


def _reopen(source: StagedSource, uid: OperatorUid, line: Sequence[tuple[str, JobId]]) -> Source:
    for root, job_id in line:
        try:
            return source.reopen(taskowned_url(root, job_id, SOURCE, uid))
        except NotFoundError:
            continue
    raise ConfigurationError(
        f"source {uid!r}: the rows that were staged for {line[0][1]} or a job before it are gone, so it cannot go "
        "on where the checkpoint was; start without restore"
    )
