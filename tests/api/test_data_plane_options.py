"""`tg.DataPlaneOptions`: each field is checked as it is built, and none is ignored in silence by a job."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

import tidegate as tg
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.state.rocksdb.tuning import DatabaseTuning

_NO_NUMBERS: tuple[object, ...] = (True, 1.5, "2", [1])
_FROM_1 = "a whole number from 1 up", (0, -1, None, *_NO_NUMBERS)
_FROM_0 = "a whole number from 0 up", (-1, None, *_NO_NUMBERS)
_SWITCH = "True or False", (None, 0, 1, "true")
_FOLDER = "the path of a folder as a str, or None", ("", 1, b"/x")
_FROM_1_OR_NONE = "a whole number from 1 up, or None", (0, -1, *_NO_NUMBERS)
_FROM_1_TO_2_31 = "a whole number from 1 to 2,147,483,647", (0, None, 2**31, *_NO_NUMBERS)

ALLOWED: dict[type, dict[str, tuple[str, tuple[object, ...]]]] = {
    tg.DataPlaneOptions: {
        "limits": ("a BufferLimits", (None, 1, {})),
        "source_rows_max": _FROM_1,
        "shared_bytes": _FROM_0,
        "sockets": _SWITCH,
        "inline_bytes_max": _FROM_0,
        "exactly_once": _SWITCH,
        "backend": ("a StateBackendOptions", (None, "rocksdb", BufferLimits())),
        "local_copies": _FOLDER,
        "state_bytes_max": _FROM_1_OR_NONE,
        "paused_ms_max": _FROM_0,
    },
    BufferLimits: {
        "credit_bytes": _FROM_1,
        "queue_bytes_max": _FROM_1,
        "frame_bytes_min": _FROM_1,
        "frame_bytes_max": _FROM_1,
        "frame_elements_max": _FROM_1,
        "linger_ms": _FROM_0,
        "probe_ms": ("a whole number from 10 up", (9, None, *_NO_NUMBERS)),
        "in_flight_bytes_max": _FROM_1,
        "turn_rows_max": _FROM_1,
        "merged_rows_max": _FROM_1,
        "debloat_target_ms": _FROM_0,
        "window_bytes_min": _FROM_1,
    },
    StateBackendOptions: {
        "kind": ("'columnar' or 'rocksdb'", (None, "hashmap", 1, ["rocksdb"])),
        "incremental": _SWITCH,
        "changelog": _SWITCH,
        "segment_bytes": _FROM_1,
        "compression": ("'lz4' or 'zstd' or None", ("gzip", True)),
        "directory": _FOLDER,
        "memory_bytes": _FROM_0,
        "cache_bytes": _FROM_0,
        "database": ("a DatabaseTuning", (None, 2)),
        "undo_bytes": _FROM_0,
        "restore_threads": _FROM_1,
    },
    DatabaseTuning: {
        "threads": _FROM_1_TO_2_31,
        "write_buffer_bytes": _FROM_1_OR_NONE,
        "block_bytes": _FROM_1_TO_2_31,
        "open_files_max": _FROM_1_TO_2_31,
    },
}
"""The values that each field takes, as errors state them, and some that it does not take."""

IGNORED_BY_JOBS: dict[str, tuple[tg.DataPlaneOptions, str]] = {
    "exactly_once": (tg.DataPlaneOptions(exactly_once=False), "mode"),
    "inline_bytes_max": (tg.DataPlaneOptions(inline_bytes_max=0), "inline_threshold"),
    "local_copies": (tg.DataPlaneOptions(local_copies="/copies"), "local_copies"),
    "state_bytes_max": (tg.DataPlaneOptions(state_bytes_max=1), "max_state_size"),
    "paused_ms_max": (tg.DataPlaneOptions(paused_ms_max=1), "timeout"),
    "debloat_target_ms": (tg.DataPlaneOptions(BufferLimits(debloat_target_ms=5)), "debloat_target"),
    "kind": (tg.DataPlaneOptions(backend=StateBackendOptions("rocksdb")), "backend"),
    "incremental": (tg.DataPlaneOptions(backend=StateBackendOptions(incremental=True)), "incremental"),
    "changelog": (tg.DataPlaneOptions(backend=StateBackendOptions(changelog=True)), "changelog"),
    "compression": (tg.DataPlaneOptions(backend=StateBackendOptions(compression="lz4")), "compression"),
    "directory": (tg.DataPlaneOptions(backend=StateBackendOptions(directory="/x")), "backend_directory"),
    "memory_bytes": (tg.DataPlaneOptions(backend=StateBackendOptions(memory_bytes=1)), "backend_memory"),
    "cache_bytes": (tg.DataPlaneOptions(backend=StateBackendOptions(cache_bytes=1)), "backend_cache"),
    "database": (tg.DataPlaneOptions(backend=StateBackendOptions(database=DatabaseTuning(3))), "rocksdb_threads"),
    "undo_bytes": (tg.DataPlaneOptions(backend=StateBackendOptions(undo_bytes=0)), "rewind_memory"),
}


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, named in ALLOWED.items() for field in named])
def test_a_field_is_checked_as_it_is_built(kind: Any, field: str) -> None:
    """One error names the class, the field, its value, and what is allowed."""
    allowed, wrong = ALLOWED[kind][field]
    for value in wrong:
        text = f"{kind.__name__}({field}={value!r}): give {allowed}"
        with pytest.raises(tg.ConfigurationError, match=f"^{re.escape(text)}$"):
            kind(**{field: value})


@pytest.mark.parametrize("kind", ALLOWED)
def test_no_field_is_left_out(kind: Any) -> None:
    """A field that is added to the options needs a check."""
    assert set(ALLOWED[kind]) == {field.name for field in fields(kind)}


def test_a_number_that_no_int64_holds_is_refused() -> None:
    """The error gives the largest one."""
    with pytest.raises(tg.ConfigurationError, match=r"give a whole number from 1 to 9,223,372,036,854,775,807$"):
        tg.DataPlaneOptions(source_rows_max=2**63)
    assert tg.DataPlaneOptions(source_rows_max=2**63 - 1).source_rows_max == 2**63 - 1


def test_the_smallest_frame_is_not_larger_than_the_largest() -> None:
    """Two sizes that contradict each other are refused together."""
    with pytest.raises(tg.ConfigurationError, match=r"BufferLimits\(frame_bytes_min=3, frame_bytes_max=2\): "):
        BufferLimits(frame_bytes_min=3, frame_bytes_max=2)


@pytest.mark.parametrize("field", IGNORED_BY_JOBS)
def test_an_environment_refuses_what_it_would_ignore(field: str) -> None:
    """The settings of checkpoints decide these fields, so the error names the setting."""
    options, setting = IGNORED_BY_JOBS[field]
    with pytest.raises(tg.ConfigurationError, match=rf"{field}=.* has no effect, because {setting}.* decides it"):
        tg.StreamEnvironment.local(options=options)


def test_an_environment_refuses_other_options() -> None:
    """A mapping is not read as options."""
    with pytest.raises(tg.ConfigurationError, match=r"^options=\{'source_rows_max': 3\}: give a tg.DataPlaneOptions$"):
        tg.StreamEnvironment.local(options={"source_rows_max": 3})  # type: ignore[arg-type]
