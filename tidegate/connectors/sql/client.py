"""`TableClient`: the interface of a database for the sink. `postgres.py` and `alchemy.py` implement it."""

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
"""Name of the column in sent rows that is true if the row with this key is to be deleted."""

FILE = "tidegate_file"
"""Name of the column in sent rows of PostgreSQL with the number of a row's file."""

TRIES_MAX = 5
"""Number of times that a commit is restarted because another process stored tokens meanwhile."""

LOCK_WAIT_S = 30
"""Time in seconds that a statement waits for a lock before the commit fails, and is tried again."""

Files = Callable[[Set[int]], Iterator[pa.RecordBatch]]
"""A function that returns the rows of the given buckets, one batch for each file, in the order of the files."""


class DatabaseError(StorageError):
    """Raised if a database did not answer, or refused an operation that may be tried again."""


@dataclass(frozen=True, slots=True)
class CommitKey:
    """The key of a commit in the table of tokens: uid of the sink, job that prepared the rows, and checkpoint."""

    sink: str
    job_id: str
    checkpoint_id: int


class TableSession(ABC):
    """A database connection that commits rows. Calls come from one thread at a time."""

    @abstractmethod
    def commit(self, key: CommitKey, buckets: Set[int], files: Files) -> None:
        """Writes rows and tokens in one transaction, for the buckets that have no token of this or a later checkpoint.

        Raises DatabaseError for a temporary failure, and ConfigurationError for a permanent one.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connection."""


class TableClient(ABC):
    """A client for a table of a database and its table of tokens. It is pickled with the program."""

    write: TableWrite
    where: str
    """The name of the step, for errors."""

    @abstractmethod
    def prepare(self, schema: pa.Schema, create: bool) -> TableShape:
        """Checks the table, and returns its columns and unique indexes. Creates the table of tokens, and with `create`
        the table, if missing.

        Raises ConfigurationError if rows of this schema cannot be written exactly once, and if the database does not
        answer.
        """

    @abstractmethod
    def open(self, columns: tuple[TableColumn, ...], sent: pa.Schema) -> TableSession:
        """Returns a session for rows with these columns. It connects at its first commit."""


def first_line(error: BaseException) -> str:
    """Returns the message of a driver's error as one line, without the statement and without passwords."""
    text = str(error).partition("\n\nQuery was:")[0]
    return without_secrets(" ".join(line.strip() for line in text.splitlines() if line.strip()))[:600]
