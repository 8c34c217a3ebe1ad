"""The columns that tables of upserts have besides those of their rows. Who only writes rows needs no more of tables."""

from __future__ import annotations

from tidegate.storage.schemas.reserved_names import own_name

VERSION_COLUMN = own_name("version")
"""Hidden int64 column of an upsert table's files: a later row of a key has a higher value."""
DELETED_COLUMN = own_name("deleted")
"""Hidden column of an upsert table that takes deletions: whether the row says that its key has none."""
