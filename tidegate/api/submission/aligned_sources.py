"""Finds the sources of a job that wait for each other in event time. `submission.py` calls this.

ConfigurationError where they cannot wait: a task that is not that of the source does not read splits, and a source that
says when checkpoints are taken would hold up the checkpoints of the whole job.
"""

from __future__ import annotations

from tidegate.actors.coordinator.job.job_spec import AlignedSource
from tidegate.actors.graph.job_graph import JobGraph, JobVertex
from tidegate.connectors.source import ExternallyInducedSource
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.storage.errors import ConfigurationError


def aligned_sources(graph: JobGraph) -> tuple[AlignedSource, ...]:
    """Those of a graph."""
    found = []
    for vertex in graph.vertices:
        alignments = _alignments(vertex)
        for name, alignment in alignments:
            where = f"{name!r} is in watermark group {alignment.group!r}"
            if vertex.source is None:
                raise ConfigurationError(
                    f"{where}, and does not run in the task of a source; call assign_timestamps right behind the "
                    "source, with its parallelism, and before several steps take the stream"
                )
            if isinstance(vertex.source.source, ExternallyInducedSource):
                raise ConfigurationError(
                    f"{where}, and its source says itself when checkpoints are taken, which would have to wait as "
                    "well; leave alignment= out"
                )
            found.append(AlignedSource(vertex.vertex, alignment.group, alignment.max_drift_ms))
        if len(alignments) > 1:
            raise ConfigurationError(f"{vertex.name!r}: a source can be in one watermark group, and is in two")
    return tuple(found)


def _alignments(vertex: JobVertex) -> list[tuple[str, WatermarkAlignment]]:
    made = ((spec.name, spec.factory()) for spec in vertex.operators)
    return [
        (name, operator.alignment)
        for name, operator in made
        if isinstance(operator, WatermarkGenerator) and operator.alignment is not None
    ]
