"""`nulls_tag`: the side output of rows without a time."""

from __future__ import annotations

import pyarrow as pa

from tidegate.actors.protocol.side_outputs import OutputTag
from tidegate.api.streams.updating import Updating
from tidegate.storage.errors import ConfigurationError


def nulls_tag(nulls_to: str | None, schema: pa.Schema | None, updating: Updating | None) -> tuple[OutputTag, ...]:
    """The tag, none without a name. ConfigurationError if the columns are not known, or rows are updates."""
    if nulls_to is None:
        return ()
    if schema is None:
        raise ConfigurationError(
            f"assign_timestamps(nulls_to={nulls_to!r}): the columns are known only when the job runs; give schema= to "
            "the step before, so that those of the side output are known"
        )
    if updating is not None:
        raise updating.refuse("assign_timestamps(nulls_to=...)")
    return (OutputTag(nulls_to, schema),)
