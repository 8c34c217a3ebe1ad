"""`Program`: the operators, tables and hooks that a driver script has added since it last executed a job.

An environment has one for life, and clears it once a job was submitted. Streams know the program that they belong to,
and nothing of the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.checkpoint_calls import CheckpointFunction
from tidegate.api.given_names import check_name, check_uid
from tidegate.api.tables.output_tables import CollectedRows, OutputTable
from tidegate.api.views import Views
from tidegate.connectors.master_hooks import MasterHook
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.plain_types import form_with_rows, holds_views, without_views
from tidegate.storage.schemas.reserved_names import check_not_reserved

_NAME_IN_UID_CHARACTERS = 100


class Program:
    """Operators, tables, collected streams, views, functions of checkpoints and master hooks, as they were added."""

    def __init__(
        self, parallelism: int, open_store: OpenStore, preview: Callable[[Any, int, int], tuple[pa.Table, str]]
    ) -> None:
        """`preview` runs the steps before a stream for its first rows (`StreamEnvironment._preview`)."""
        self.preview = preview
        self.parallelism = parallelism
        """Parallelism of operators that name none."""
        self.max_parallelism: int | None = None
        """Number of key groups; None if the user has not said how many."""
        self.open_store = open_store
        self.given_up = False
        """Whether it could not be executed; then the next source begins another program."""
        self.clear()

    def clear(self) -> None:
        """Begin an empty program. Streams made so far belong to none."""
        self.nodes: list[StreamNode] = []
        self.tables: list[OutputTable] = []
        self.collected: list[CollectedRows] = []
        self.functions: list[CheckpointFunction] = []
        self.hooks: list[MasterHook] = []
        self.views = Views()
        self.given_up = False

    def up_to(self, streams: Sequence[StreamNode]) -> Program:
        """Another program, of these nodes and all nodes whose rows lead to them. This one stays as it is."""
        other = Program(self.parallelism, self.open_store, self.preview)
        other.max_parallelism = self.max_parallelism
        # A node comes behind those it reads. They are looked at twice: on the way to them, and on the way back.
        left = [(node.maker, False) for node in reversed(streams)]
        while left:
            node, complete = left.pop()
            if complete and node not in other.nodes:
                other.nodes.append(node)
            elif not complete and node not in other.nodes:
                left.append((node, True))
                left += [(upstream.maker, False) for upstream, _ in reversed(node.inputs)]
        return other

    def new_uid(self, name: str, uid: str | None) -> OperatorUid:
        """The uid given, or one made of the operator's name and its place in the program."""
        check_name("an operator's name", "name", name)
        if uid is None:
            uid = f"{name.replace('/', '-')[:_NAME_IN_UID_CHARACTERS]}-{len(self.nodes)}"
        check_uid(uid, name)
        return OperatorUid(uid)

    def add_node(self, node: StreamNode, own: Collection[str] = ()) -> None:
        """Add an operator. ConfigurationError if its input is of an earlier program, or its schema cannot be.

        `own` are the columns that tidegate itself adds in this step. They may pass through the steps behind.
        """
        known = {*own}.union(*(upstream.schema.names for upstream, _ in node.inputs if upstream.schema is not None))
        if not isinstance(node.parallelism, int) or isinstance(node.parallelism, bool) or node.parallelism < 1:
            raise ConfigurationError(
                f"operator {node.name!r}: parallelism={node.parallelism!r}: at least 1 is needed, a whole number"
            )
        if node.schema is not None:
            check_plain(node.schema, f"operator {node.name!r}", known)
        for tag in node.side_outputs:
            check_plain(tag.schema, f"side output {tag.name!r} of operator {node.name!r}", known)
        if any(upstream.maker not in self.nodes for upstream, _ in node.inputs):
            raise ConfigurationError(
                f"operator {node.name!r} follows a stream of an earlier program: execute() begins a new one, so make "
                "its streams from their sources again"
            )
        self.nodes.append(node)

    def add_table(self, table: OutputTable) -> None:
        """Add a table that a stream writes to. ConfigurationError if another stream writes to it already."""
        if any(other.url == table.url for other in self.tables):
            raise ConfigurationError(f"two streams of one job write to {table.url}; join them with union first")
        self.tables.append(table)


def check_plain(schema: pa.Schema, where: str, own: Collection[str] = ()) -> None:
    """Raise ConfigurationError for what is no schema, for columns that are called as tidegate's own, and for views.

    So for columns of which Arrow cannot take single rows. Files and kernels lack all of these. `own` are columns that
    are tidegate's own.
    """
    if not isinstance(schema, pa.Schema):
        raise ConfigurationError(f"{where}: the schema must be a pyarrow Schema, not {type(schema).__name__}")
    check_not_reserved((name for name in schema.names if name not in own), where)
    if doubles := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise ConfigurationError(f"{where}: columns {doubles} are there twice; rename or drop one of each")
    for field in schema:
        if holds_views(field.type):
            instead = without_views(field.type)
            raise ConfigurationError(f"{where}: column {field.name!r} is {field.type}, a view; use {instead} instead")
        if (instead := form_with_rows(field.type)) is not None:
            raise ConfigurationError(
                f"{where}: column {field.name!r} is {field.type}, of which single rows cannot be taken; {instead}"
            )
