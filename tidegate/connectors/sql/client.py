"""`TableClient`: what the sink needs of a database. `postgres.py` and `alchemy.py` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import pyarrow as pa

from tidegate.connectors.sql.columns import TableColumn, TableShape
from tidegate.connectors.sql.options import TableWrite
from tidegate.storage.errors import StorageError
from tidegate.storage.user_values import without_secrets

DELETED = "tidegate_deleted"
"""The column of sent rows that is true where the row of this key is to be deleted."""

TRIES_MAX = 5
"""How often a commit begins anew because another process stored tokens meanwhile."""

LOCK_WAIT_S = 30
"""How long a statement waits for a lock before the commit fails, and is tried again."""

Files = Callable[[Set[int]], Iterator[pa.RecordBatch]]
"""Returns the rows of some buckets, one batch for each file, in the order in which the files were written."""


class DatabaseError(StorageError):
    """A database did not answer, or refused an operation that may be tried again."""


@dataclass(frozen=True, slots=True)
class CommitKey:
    """Identifies a commit in the table of tokens: the uid of the sink, the job that prepared it, its checkpoint."""

    sink: str
    job_id: str
    checkpoint_id: int


class TableSession(ABC):
    """A connection that commits rows. Calls come from one thread at a time."""

    @abstractmethod
    def commit(self, key: CommitKey, buckets: Set[int], files: Files) -> None:
        """Writes rows and tokens in one transaction, for the buckets that have no token at or past this checkpoint.

        Raises DatabaseError for a failure that may pass, and ConfigurationError for one that repeats.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnects."""


class TableClient(ABC):
    """A table of a database, and the table of tokens. It travels to the tasks with the program."""

    write: TableWrite
    where: str
    """The step, for errors."""

    @abstractmethod
    def prepare(self, schema: pa.Schema, create: bool) -> TableShape:
        """Returns the columns of the table. Creates the table of tokens, and with `create` the table, if missing.

        Raises ConfigurationError if rows of this schema cannot be written exactly once, and if the database does not
        answer.
        """

    @abstractmethod
    def open(self, columns: tuple[TableColumn, ...], sent: pa.Schema) -> TableSession:
        """Returns a session for rows of these columns. Connects with its first commit."""


def first_line(error: BaseException) -> str:
    """Returns the message of a driver's error in one line, without the statement and without passwords."""
    text = str(error).partition("\n\nQuery was:")[0]
    return without_secrets(" ".join(line.strip() for line in text.splitlines() if line.strip()))[:600]
