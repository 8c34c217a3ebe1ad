"""A pipeline with a side output for random simulations. Rules: as of `topologies.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidegate.api.environment import StreamEnvironment
from tidegate.operators.aggregates.aggregate import count, sum
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.protocol.edges import OutputTag
from tidegate.testing.pipelines.pieces import SCHEMA, Data, doubled, grouped, mapped, source_of, table_of
from tidegate.testing.runtime.run import Rows, counted

ODD = OutputTag("odd", SCHEMA)


class Parted(ProcessFunction):
    """Doubles even values, and emits odd ones under a tag."""

    def process(self, row: dict[str, Any], context: ProcessContext) -> Iterator[dict[str, Any]]:
        """One of the two."""
        if row["v"] % 2:
            context.emit(ODD, row)
        else:
            yield {**row, "v": 2 * row["v"]}


def aside(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Both outputs of one operator meet again in a union, so two edges join the same operators."""
    rows = source_of(env, inputs[0], 0, width[0]).rebalance()
    parted = rows.process(Parted(), schema=SCHEMA, uid="part", parallelism=width[1], side_outputs=[ODD])
    odd = parted.side_output("odd")
    both = parted.union(odd).key_by("k")
    table_of(both.aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[2]), "final", width[2])
    table_of(mapped(odd.rebalance(), "double", doubled, width[3]), "rows", width[3])


def expect_aside(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Totals of all rows, the even ones doubled; and the odd ones, doubled."""
    parted = [(k, v if v % 2 else 2 * v) for k, v in inputs[0]]
    return {"sim://final": grouped(parted), "sim://rows": counted([(k, 2 * v) for k, v in inputs[0] if v % 2])}
