"""`TableOptions`: how a job writes a table, as far as that is no part of what the table is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.tables.compaction.compaction_plan import CompactionSettings
from tidegate.storage.tables.compaction.small_files import FILE_BYTES
from tidegate.storage.tables.table_log import IfExists
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

HISTORY_DEFAULT = "7d"
SchemaEvolution = Literal["add_columns"]


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What a job does about rows that are there, how large its files become, and how small ones are put together."""

    if_exists: IfExists = "error"
    file_bytes: int = FILE_BYTES
    compaction: CompactionSettings | None = None
    """None: small files stay while the job runs."""
    history_ms: int | None = None
    """For how long files stay that the table does not show any more, while the job runs; None: until a vacuum."""
    evolves: bool = False
    """Whether a table that is there gets the columns that the job adds."""

    @staticmethod
    def of(
        where: str,
        if_exists: IfExists,
        target_file_size: str | int,
        auto_compact: bool,
        schema_evolution: SchemaEvolution | None,
        history: str | timedelta | int | None,
    ) -> TableOptions:
        """What a user has said. ConfigurationError, which names `where`, for what is none of what there is."""
        if schema_evolution not in (None, "add_columns"):
            raise ConfigurationError(
                f'{where}: schema_evolution={schema_evolution!r} is not known; give "add_columns", or leave it out'
            )
        file_bytes = parse_size_bytes(target_file_size, setting=f"{where}: target_file_size")
        if file_bytes == 0:
            raise ConfigurationError(f"{where}: target_file_size must be positive; leave it out for 64 MB")
        history_ms = None if history is None else parse_duration_ms(history, setting=f"{where}: history")
        if history_ms == 0:
            raise ConfigurationError(f"{where}: history must be greater than 0; None keeps everything until a vacuum")
        return TableOptions(
            if_exists,
            file_bytes,
            CompactionSettings(file_bytes) if auto_compact else None,
            history_ms,
            schema_evolution is not None,
        )
