"""Asking whether a claim will be refused gives the answer of the claim, and changes nothing."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import FencedError, TableError, TidegateError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.table_info import IfExists, TableInfo
from tidegate.storage.tables.table_log import TableLog

_SCHEMA = pa.schema([("k", pa.string())])
_INFO = TableInfo.of(_SCHEMA, "append")
_OTHER_INFO = TableInfo.of(_SCHEMA, "upsert", ("k",))
_A, _B, _C = JobId("a-1"), JobId("b-1"), JobId("c-1")


def _full_table(store: FileSystemStore) -> None:
    """Claimed by A, which has shown a row, and then by B, which has shown another."""
    log = TableLog(store)
    log.create(_INFO)
    for number, job in enumerate((_A, _B), start=1):
        log.claim(job, if_exists="append")
        log.commit(job, CheckpointId(1), (DataFile(f"data/{number}.parquet", 1, 10, "xxh3:0"),))


@pytest.mark.parametrize(
    ("info", "job", "restored", "if_exists", "error", "message"),
    [
        pytest.param(_OTHER_INFO, _C, None, "append", TableError, "has mode 'append'", id="other table"),
        pytest.param(_OTHER_INFO, _C, _A, "append", TableError, "has mode 'append'", id="other table, restored"),
        pytest.param(_INFO, _C, None, "error", TableError, "shows 2 rows already", id="rows"),
        pytest.param(_INFO, _C, _C, "error", TableError, "shows 2 rows already", id="restored from a stranger"),
        pytest.param(_INFO, _A, None, "append", FencedError, "is owned by 'b-1', not by 'a-1'", id="fenced"),
        pytest.param(_INFO, _A, _A, "append", FencedError, "is owned by 'b-1', not by 'a-1'", id="fenced fallback"),
    ],
)
def test_what_a_claim_would_refuse_is_refused(
    memory_store: FileSystemStore,
    info: TableInfo,
    job: JobId,
    restored: JobId | None,
    if_exists: IfExists,
    error: type[TidegateError],
    message: str,
) -> None:
    """With the same error in the same words, and the log stays as it is."""
    _full_table(memory_store)
    before = TableLog(memory_store).entries()
    origin = None if restored is None else (restored, CheckpointId(1))

    with pytest.raises(error, match=message) as asked:
        TableLog(memory_store).check_claim(info, job, origin, if_exists)
    assert TableLog(memory_store).entries() == before

    with pytest.raises(error) as claimed:  # noqa: PT012 - either of the two may be what refuses
        TableLog(memory_store).create(info)
        TableLog(memory_store).claim(job, origin, if_exists)
    assert (type(asked.value), str(asked.value)) == (type(claimed.value), str(claimed.value))


@pytest.mark.parametrize(
    ("job", "restored", "if_exists"),
    [
        pytest.param(_C, None, "append", id="adds"),
        pytest.param(_C, None, "overwrite", id="replaces"),
        pytest.param(_C, _A, "error", id="restored"),
        pytest.param(_B, None, "error", id="owner"),
        pytest.param(_B, _B, "error", id="owner falls back"),
    ],
)
def test_what_a_claim_would_do_is_not_done(
    memory_store: FileSystemStore, job: JobId, restored: JobId | None, if_exists: IfExists
) -> None:
    """The answer is silence; the table has the same owner and shows the same rows, and the claim works then."""
    _full_table(memory_store)
    log = TableLog(memory_store)
    before = log.entries()
    origin = None if restored is None else (restored, CheckpointId(1))

    log.check_claim(_INFO, job, origin, if_exists)
    assert TableLog(memory_store).entries() == before

    log.claim(job, origin, if_exists)
    log.commit(job, CheckpointId(9), ())


def test_a_table_that_is_not_there_may_be_claimed_and_is_not_made(memory_store: FileSystemStore) -> None:
    """On its way to be created nothing can be in its way."""
    TableLog(memory_store).check_claim(_INFO, _A)

    assert TableLog(memory_store).entries() == ()


def test_what_others_have_done_since_counts(memory_store: FileSystemStore) -> None:
    """A log that has been read before looks again."""
    log = TableLog(memory_store)
    log.create(_INFO)
    log.check_claim(_INFO, _C)
    _full_table(memory_store)

    with pytest.raises(TableError, match="shows 2 rows"):
        log.check_claim(_INFO, _C)
