"""An Iceberg table as a source: the rows of a snapshot, and the rows that later snapshots append, each once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import config, finish, local
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, LongType
from source_contract import check_source, read_split, rows_of
from waiting import until

import tidegate as tg
from tidegate.connectors.iceberg.client import TablePlace
from tidegate.connectors.iceberg.options import CatalogOptions
from tidegate.connectors.iceberg.source import Changes, IcebergFollower, IcebergSource

NAME = "shop.orders"
Properties = dict[str, str]


@pytest.fixture
def properties(tmp_path: Path) -> Properties:
    """Properties of a catalog on SQLite with a local warehouse."""
    warehouse = f"file://{tmp_path}/warehouse"
    return {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": warehouse}


def catalog_of(properties: Properties) -> Catalog:
    """Opens the catalog."""
    return load_catalog("default", **properties)


def created(properties: Properties, rows: Iterable[pa.Table] = ()) -> Table:
    """Creates the table, and appends each part as a snapshot."""
    catalog = catalog_of(properties)
    catalog.create_namespace("shop")
    table = catalog.create_table(NAME, numbers(0, 1).schema)
    for part in rows:
        table.append(part)
    return table


def numbers(begin: int, end: int) -> pa.Table:
    """Rows with the numbers of a range."""
    return pa.table({"k": ["even" if x % 2 == 0 else "odd" for x in range(begin, end)], "x": list(range(begin, end))})


def place(properties: Properties) -> TablePlace:
    """Names the table."""
    return TablePlace(CatalogOptions.of(properties, "test"), NAME)


def follower(
    properties: Properties, start: object = "all", changes: Changes = "fail", every_ms: int = 3_600_000
) -> IcebergFollower:
    """Opens the table to follow it. Each reader loads the table once in `every_ms`."""
    return IcebergFollower.open(place(properties), start, every_ms, 3, changes)


def xs(rows: Iterable[dict[str, object]]) -> list[object]:
    """The numbers of rows, in order."""
    return sorted(row["x"] for row in rows)  # type: ignore[type-var]


@pytest.mark.slow
def test_a_snapshot_is_read_from_any_position(properties: Properties) -> None:
    """By default the current one; or an earlier one."""
    table = created(properties, [numbers(0, 100), numbers(100, 150)])
    assert xs(check_source(IcebergSource.open(place(properties)))) == list(range(150))
    first = table.snapshots()[0].snapshot_id
    assert xs(check_source(IcebergSource.open(place(properties), first))) == list(range(100))
    only = IcebergSource.open(place(properties)).projected(["x"])
    assert {tuple(row) for row in check_source(only)} == {("x",)}
    with pytest.raises(tg.ConfigurationError, match=f"no snapshot 5; its newest ones are {first}"):
        IcebergSource.open(place(properties), 5)


def test_columns_are_found_by_their_ids(properties: Properties) -> None:
    """A renamed column keeps its values, and one that was added later is null in older files."""
    table = created(properties, [numbers(0, 10)])
    with table.update_schema() as schema:
        schema.rename_column("x", "n")
        schema.add_column("extra", LongType())
    table.append(pa.table({"k": ["new"], "n": [10], "extra": [1]}))
    found = check_source(IcebergSource.open(place(properties)))
    assert sorted(row["n"] for row in found) == list(range(11))  # type: ignore[type-var]
    assert {row["extra"] for row in found} == {None, 1}


def test_partition_columns_come_back(properties: Properties) -> None:
    """Values of the partition of a file travel with its split."""
    table = created(properties)
    with table.update_spec() as spec:
        spec.add_identity("k")
    table.append(numbers(0, 20))
    table = catalog_of(properties).load_table(NAME)
    found = check_source(IcebergSource.open(place(properties)))
    assert {(row["k"], row["x"]) for row in found} == {("even" if x % 2 == 0 else "odd", x) for x in range(20)}


@pytest.mark.slow
def test_a_follower_reads_what_is_appended(properties: Properties) -> None:
    """First the rows of the current snapshot, or none, or those after a snapshot."""
    table = created(properties, [numbers(0, 100), numbers(100, 150)])
    source = follower(properties)
    new = follower(properties, "new")
    assert xs(check_source(source)) == list(range(150))
    assert check_source(new) == []
    table.append(numbers(150, 170))
    table.append(numbers(170, 180))
    assert xs(check_source(source)) == list(range(180))
    assert xs(check_source(new)) == list(range(150, 180))
    first = table.snapshots()[0].snapshot_id
    assert xs(check_source(follower(properties, first))) == list(range(100, 180))
    with pytest.raises(tg.ConfigurationError, match="'all', 'new' or the id"):
        follower(properties, "old")


@pytest.mark.slow
def test_a_table_that_was_empty_is_followed(properties: Properties) -> None:
    """The first snapshot may come later, also while a reader has the table open."""
    table = created(properties)
    source = follower(properties)
    assert check_source(source) == []
    polling = follower(properties, every_ms=1)
    reader = polling.reader()
    assert [place for split in polling.splits() for place in read_split(polling, reader, split, 9)] == []
    table.append(numbers(0, 5))
    assert xs(check_source(source)) == list(range(5))
    found = [row for split in polling.splits() for row in rows_of(read_split(polling, reader, split, 9))]
    assert xs(found) == list(range(5))
    reader.close()


@pytest.mark.slow
def test_snapshots_that_change_rows_fail_or_are_skipped(properties: Properties) -> None:
    """Rows that were read cannot be taken back."""
    table = created(properties, [numbers(0, 10)])
    source = follower(properties)
    table.delete("k == 'odd'")
    table.append(numbers(10, 20))
    with pytest.raises(tg.ConfigurationError, match="it changes rows that were read before"):
        check_source(source)
    skipping = replace(source, changes="skip")
    assert xs(check_source(skipping)) == list(range(20))


def test_what_was_expired_before_it_was_read_is_named(properties: Properties) -> None:
    """A gap is an error, and never passed over."""
    table = created(properties, [numbers(0, 10)])
    source = follower(properties)
    for begin in (10, 20, 30):
        table.append(numbers(begin, begin + 10))
    old = [snapshot.snapshot_id for snapshot in table.snapshots()[:3]]
    expiry = table.maintenance.expire_snapshots()
    expiry.by_ids(old).commit()
    with pytest.raises(tg.ConfigurationError, match="was expired before all of its rows"):
        check_source(source)
    late = replace(source, whole=False, first=old[0])
    with pytest.raises(tg.ConfigurationError, match="does not lead to its current one"):
        check_source(late)


def test_files_that_are_gone_are_named(properties: Properties) -> None:
    """Whoever deletes files of a snapshot that is read gets an error with the file."""
    table = created(properties, [numbers(0, 10)])
    source = IcebergSource.open(place(properties))
    (task,) = table.scan().plan_files()
    Path(task.file.file_path.removeprefix("file://")).unlink()
    with pytest.raises(tg.ConfigurationError, match="does not exist any more"):
        read_split(source, source.reader(), source.splits()[0], 10)


def test_settings_that_contradict_are_refused(properties: Properties) -> None:
    """A bounded source takes no settings of a follower."""
    created(properties, [numbers(0, 1)])
    env = local()
    with pytest.raises(tg.ConfigurationError, match="remove start"):
        env.from_iceberg(catalog=properties, table=NAME, start="new")
    with pytest.raises(tg.ConfigurationError, match="in place of snapshot_id"):
        env.from_iceberg(catalog=properties, table=NAME, follow="1s", snapshot_id=1)
    with pytest.raises(tg.ConfigurationError, match=r"shop\.nothing .* does not exist"):
        env.from_iceberg(catalog=properties, table="shop.nothing")


@pytest.mark.slow
def test_a_job_follows_a_table_and_continues_after_a_savepoint(properties: Properties, tmp_path: Path) -> None:
    """Rows that come before and after the restore are read once, with another parallelism, too."""
    table = created(properties, [numbers(0, 100)])

    def job(parallelism: int, restore: str | None) -> tg.Job:
        env = local(parallelism)
        rows = env.from_iceberg(catalog=properties, table=NAME, follow="20ms", uid="rows")
        rows.to_table(tmp_path / "out", uid="out", if_exists="append")
        checkpoints = config(tmp_path / "checkpoints", interval="20ms")
        return env.execute("follow", checkpoints=checkpoints, restore=restore)

    def there() -> list[object]:
        try:
            return xs(tg.open_table(tmp_path / "out").rows())
        except tg.TableError:
            return []

    first = job(2, None)
    until("the first rows are there", lambda: there() == list(range(100)))
    table.append(numbers(100, 130))
    until("new rows are there", lambda: there() == list(range(130)))
    savepoint = first.stop(drain=False, savepoint=tmp_path / "savepoints")
    table.append(numbers(130, 140))
    second = job(3, str(savepoint))
    until("the rest is there", lambda: there() == list(range(140)))
    second.cancel()


def test_a_job_reads_a_snapshot(properties: Properties, tmp_path: Path) -> None:
    """The public call, and columns that the program does not use."""
    created(properties, [numbers(0, 50), numbers(50, 60)])
    env = local()
    rows = env.from_iceberg(catalog=properties, table=NAME, uid="rows").select("x").collect()
    finish(env, tmp_path / "checkpoints")
    assert xs(rows.rows()) == list(range(60))


def test_a_restored_job_reads_the_same_table(properties: Properties) -> None:
    """Ids of fields of a table that was created again name other columns."""
    created(properties, [numbers(0, 10)])
    before = IcebergSource.open(place(properties)).splits()
    catalog = catalog_of(properties)
    catalog.drop_table(NAME)
    catalog.create_table(NAME, numbers(0, 1).select(["x", "k"]).schema)
    with pytest.raises(tg.ConfigurationError, match="the checkpoint is of another table"):
        IcebergSource.open(place(properties)).check_restored(before)


def test_a_column_of_former_partitions_may_be_dropped(properties: Properties) -> None:
    """The files keep their partitions, and the rows are read without the column."""
    table = created(properties)
    with table.update_spec() as spec:
        spec.add_identity("k")
    table.append(numbers(0, 4))
    with table.update_spec() as spec:
        spec.remove_field("k")
    with table.update_schema() as schema:
        schema.delete_column("k")
    assert sorted(row["x"] for row in check_source(IcebergSource.open(place(properties)))) == [0, 1, 2, 3]


def test_a_follower_names_a_value_that_only_a_wider_type_holds(properties: Properties) -> None:
    """A column may become wider while a job runs. Values that fit the former type are read."""
    table = created(properties)
    with table.update_schema() as schema:
        schema.add_column("n", IntegerType())
    source = follower(properties)
    with table.update_schema() as schema:
        schema.update_column("n", LongType())
    rows = numbers(0, 2)
    table.append(rows.append_column("n", pa.array([1, 2])))
    assert xs(check_source(source)) == [0, 1]
    table.append(rows.append_column("n", pa.array([1, 2**40])))
    with pytest.raises(tg.ConfigurationError, match="column 'n' was int32 when the job was submitted, and has a value"):
        check_source(source)


def test_a_follower_refuses_a_table_that_was_created_again(properties: Properties) -> None:
    """Also if the former one was empty: the field ids of another table name other columns."""
    created(properties)
    source = follower(properties)
    catalog = catalog_of(properties)
    catalog.drop_table(NAME)
    catalog.create_table(NAME, pa.schema([("x", pa.int64()), ("k", pa.string())]))
    with pytest.raises(tg.ConfigurationError, match="was dropped and created again"):
        source.reader().read(source.splits()[0], 0, 10)
