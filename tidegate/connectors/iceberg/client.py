"""Client of Iceberg tables (`pyiceberg`, installed with `tidegate[iceberg]`): opens tables, and commits exactly once.

pyiceberg repeats a commit that lost against another writer on top of that writer's snapshot. For a sink that is wrong:
if the other writer was a second coordinator with the same rows, they would be in the table twice. So commits are made
here without pyiceberg's repetition. Rules:

- The commit token of a checkpoint is looked up in the table metadata at one snapshot. The commit requires that the
  table's branch still is at that snapshot. If it is not, nothing is written, and the look-up is done again.
- The token is in two places. A property of the table has the newest checkpoint of each job and sink, and is set by the
  commit that adds the rows. Expired snapshots do not remove it. The summary of the snapshot has the token as well, for
  users and for a table whose properties were removed.
- The commit also requires the table's UUID. A table that was dropped and created again is another table.
- After a commit that was refused, the table is loaded again before its manifests are deleted: the answer to an earlier
  try may have been lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.connectors.iceberg.options import CatalogOptions, check_columns, partition_transforms
from tidegate.connectors.sink import CommitContext
from tidegate.storage.errors import ConfigurationError, StorageError, TableError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update.snapshot import UpdateSnapshot, _SnapshotProducer

RACES_MAX = 32
"""Number of times that one commit may lose against other writers before StorageError is raised."""
FORMAT_VERSION_MAX = 2
"""Highest format version of tables that pyiceberg can write."""
_PROPERTY = "tidegate-committed"


@dataclass(frozen=True, slots=True)
class TablePlace:
    """The catalog and the name of a table."""

    catalog: CatalogOptions
    table: str

    @property
    def named(self) -> str:
        """Returns the name of the table, for errors."""
        return f"the Iceberg table {self.table} of the catalog {self.catalog.name!r}"

    def load(self, catalog: Catalog | None = None) -> Table:
        """Loads the current metadata of the table, by default from a newly opened catalog.

        Raises ConfigurationError if the table does not exist.
        """
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return (self.catalog.open() if catalog is None else catalog).load_table(self.table)
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            raise ConfigurationError(f"{self.named} does not exist: create it, or correct the name") from error

    def create(self, schema: pa.Schema, partition_by: tuple[str, ...], where: str) -> None:
        """Creates the table and its namespace, unless they exist.

        `where` begins error texts. Raises ConfigurationError, TableError.
        """
        from pyiceberg.exceptions import NamespaceAlreadyExistsError, TableAlreadyExistsError

        transforms = partition_transforms(partition_by, where)
        if unknown := [column for column, _ in transforms if column not in schema.names]:
            raise ConfigurationError(
                f"{where}: there is no column {unknown[0]!r} for partition_by; name a column of the stream"
            )
        catalog = self.catalog.open()
        if catalog.table_exists(self.table):
            return
        self._check_new(schema, where)
        floats = [column for column, _ in transforms if pa.types.is_floating(schema.field(column).type)]
        if floats:
            raise ConfigurationError(
                f"{where}: partition_by={floats[0]!r} is a column of floats, in which 0.0 and -0.0 would share a "
                "partition, and NaN would have no partition; partition by another column"
            )
        namespace = self.table.rpartition(".")[0]
        try:
            if not catalog.namespace_exists(namespace):
                catalog.create_namespace(namespace)
        except NamespaceAlreadyExistsError:
            pass  # another program was faster
        try:
            with catalog.create_table_transaction(self.table, schema) as transaction:
                if transforms:
                    with transaction.update_spec() as spec:
                        for column, transform in transforms:
                            spec.add_field(column, transform)
        except TableAlreadyExistsError:
            return  # another program was faster
        except (ValueError, TypeError) as error:
            raise TableError(
                f"{where}: {self.named} cannot be created: {error}"
                "; create it yourself, or correct what the catalog refuses"
            ) from error

    def _check_new(self, schema: pa.Schema, where: str) -> None:
        """Raises TableError for columns that a new table would not have, or would have with another type."""
        from pyiceberg.catalog import Catalog
        from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException

        try:
            wanted = Catalog._convert_schema_if_needed(schema)
        except UnsupportedPyArrowTypeException as error:
            raise TableError(
                f"{where}: {self.named} cannot be created: column {error.field.name!r} is {error.field.type}, which "
                'Iceberg does not have. Cast it in a step before: times to pa.timestamp("us") or ("us", "UTC") or '
                'pa.time64("us"), decimals to up to 38 digits, other columns to numbers or strings'
            ) from error
        except (ValueError, TypeError) as error:
            raise TableError(
                f"{where}: {self.named} cannot be created: {error}; cast the columns in a step before, or create the "
                "table yourself"
            ) from error
        check_columns(wanted, schema, f"{where}: {self.named}")


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The UUID, schema id and partition spec id that a table had when a program was submitted.

    Writers keep this schema and partition spec, so that a table may get new columns while a job runs.
    """

    uuid: str
    schema_id: int
    spec_id: int

    @staticmethod
    def of(table: Table) -> TableLayout:
        """Returns the layout of the table as loaded."""
        metadata = table.metadata
        return TableLayout(str(metadata.table_uuid), metadata.current_schema_id, metadata.default_spec_id)

    def check(self, table: Table, place: TablePlace) -> None:
        """Raises TableError if the table was replaced by another one, or no longer has this schema or partition
        spec.
        """
        metadata = table.metadata
        if str(metadata.table_uuid) != self.uuid:
            raise TableError(
                f"{place.named} was dropped and created again, and rows of a checkpoint belong to the former one. Give "
                "the sink another uid, and start it without its state"
            )
        if self.schema_id not in {schema.schema_id for schema in metadata.schemas}:
            raise TableError(
                f"{place.named} has lost the schema {self.schema_id} with which the job writes"
                "; give the sink another uid, and start it without its state"
            )
        if self.spec_id not in {spec.spec_id for spec in metadata.partition_specs}:
            raise TableError(
                f"{place.named} has lost the partition spec {self.spec_id} with which the job writes"
                "; give the sink another uid, and start it without its state"
            )

    def pinned(self, metadata: TableMetadata) -> TableMetadata:
        """Returns the table metadata with this layout's schema and partition spec as the current ones."""
        return metadata.model_copy(update={"current_schema_id": self.schema_id, "default_spec_id": self.spec_id})


def check_writable(table: Table, place: TablePlace) -> None:
    """Raises TableError for a table whose format version pyiceberg cannot write."""
    if table.metadata.format_version > FORMAT_VERSION_MAX:
        raise TableError(
            f"{place.named} has format version {table.metadata.format_version}; versions up to {FORMAT_VERSION_MAX} "
            "can be written. Write to another table, or use for_each_checkpoint with another writer"
        )
    check_partitions(table.metadata, place)


def check_partitions(metadata: TableMetadata, place: TablePlace) -> None:
    """Raises TableError for a table with partitions of floats. pyiceberg finds the rows of a partition by equality: it
    would write rows with 0.0 and -0.0 twice, and rows with NaN not at all.
    """
    schema = metadata.schema()
    for field in metadata.spec().fields:
        if str(field.transform) == "void":
            continue
        column = schema.find_field(field.source_id)
        if str(column.field_type) in ("float", "double"):
            raise TableError(
                f"{place.named} is partitioned by the column {column.name!r} of floats, which cannot be written: "
                "0.0 and -0.0 are equal, and NaN equals nothing. Partition by another column"
            )


def token_property(context: CommitContext) -> str:
    """Returns the name of the table property that stores the newest committed checkpoint of a job's sink."""
    return f"{_PROPERTY}.{context.uid}.{context.job_id}"


def token_summary(context: CommitContext) -> dict[str, str]:
    """Returns the properties that identify a checkpoint in a snapshot's summary."""
    return {
        "tidegate-job": context.job_id,
        "tidegate-sink": context.uid,
        "tidegate-checkpoint": str(context.checkpoint_id),
    }


def is_committed(metadata: TableMetadata, context: CommitContext) -> bool:
    """Returns whether the table has the rows of a checkpoint, or of a later one of the same job.

    A job commits its checkpoints in ascending order.
    """
    if _reaches(metadata.properties.get(token_property(context)), context.checkpoint_id):
        return True
    for snapshot in metadata.snapshots:
        summary: Mapping[str, Any] = {} if snapshot.summary is None else snapshot.summary.additional_properties
        same = (summary.get("tidegate-job"), summary.get("tidegate-sink")) == (context.job_id, context.uid)
        if same and _reaches(summary.get("tidegate-checkpoint"), context.checkpoint_id):
            return True
    return False


def _reaches(found: str | None, checkpoint_id: int) -> bool:
    return found is not None and found.isdecimal() and int(found) >= checkpoint_id


def commit_once(
    place: TablePlace,
    context: CommitContext,
    check: Callable[[Table], TableLayout],
    stage: Callable[[Table, UpdateSnapshot], _SnapshotProducer[Any] | None],
) -> bool:
    """Commits a checkpoint, unless the table has it already. Returns whether this call committed it.

    - `check`: returns the layout of the rows, or raises TableError if the table does not fit them.
    - `stage`: adds the files to a new snapshot, and returns its producer; None if the checkpoint changes no file. It is
      called again for each snapshot that another writer has committed meanwhile.

    Raises TableError, and StorageError if other writers were always faster.
    """
    for _ in range(RACES_MAX):
        table = place.load()
        layout = check(table)
        if is_committed(table.metadata, context):
            return False
        if _try(place, table, layout, context, stage):
            return True
    raise StorageError(
        f"cannot commit to {place.named}: {RACES_MAX} times another writer was faster"
        '. Execute the job again with restore="latest", and let fewer writers write at the same time'
    )


def _try(
    place: TablePlace,
    table: Table,
    layout: TableLayout,
    context: CommitContext,
    stage: Callable[[Table, UpdateSnapshot], _SnapshotProducer[Any] | None],
) -> bool:
    """Commits on top of the snapshot in `table`. Returns False if another writer has committed a newer snapshot."""
    from pyiceberg.exceptions import CommitFailedException, ValidationException
    from pyiceberg.table import Table
    from pyiceberg.table.refs import MAIN_BRANCH
    from pyiceberg.table.update import AssertRefSnapshotId, AssertTableUUID, SetPropertiesUpdate

    # Manifests are written with the partitions of the files, also if the table has others by now.
    metadata = table.metadata.model_copy(update={"default_spec_id": layout.spec_id})
    view = Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)
    update = view.transaction().update_snapshot(snapshot_properties=token_summary(context))
    producer = stage(view, update)
    current = table.metadata.current_snapshot()
    head = None if current is None else current.snapshot_id
    try:
        updates, _ = ((), ()) if producer is None else producer._commit()
        table._do_commit(
            (*updates, SetPropertiesUpdate(updates={token_property(context): str(context.checkpoint_id)})),
            (
                AssertTableUUID(uuid=table.metadata.table_uuid),
                AssertRefSnapshotId(ref=MAIN_BRANCH, snapshot_id=head),
            ),
        )
    except (CommitFailedException, ValidationException):
        if producer is None or place.load().metadata.snapshot_by_id(producer.snapshot_id) is None:
            if producer is not None:
                producer._clean_all_uncommitted()
            return False
    return True
