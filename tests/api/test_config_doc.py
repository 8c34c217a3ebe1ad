"""docs/settings.md is what the code says, and docs/configuration.md speaks of settings that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from config_keys import KEYS

from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.config_file import KNOWN_KEYS, VARIABLES, load_config
from tidegate.api.config.restrictions import FIXED, REFUSED
from tidegate.api.config.settings_table import Row, render, rows

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = (DOCS / "configuration.md").read_text()
SETTINGS = [row for row in rows() if row.kind != "mapping"]


def test_the_page_is_what_the_code_says() -> None:
    """Make it anew: `python -m tidegate.api.config > docs/settings.md`."""
    assert render() == (DOCS / "settings.md").read_text()


def test_the_page_has_every_key_and_why_others_are_refused() -> None:
    """Each with its own line, and a meaning in words."""
    page = render()
    for key in (*KNOWN_KEYS, *FIXED, *REFUSED):
        assert f"`{key}`" in page
    assert all(row.doc for row in rows())


def test_the_settings_of_checkpoints_have_the_keys_of_flink() -> None:
    """Older first, in the order of the model."""
    assert {name: each.keys for name, each in CheckpointConfig.settings().items()} == KEYS


def test_no_two_settings_have_one_key_or_one_variable() -> None:
    """Else one of them could not be given."""
    keys = [key for row in rows() for key in row.keys]
    assert len(keys) == len(set(keys))
    assert len(VARIABLES) == len({*KNOWN_KEYS, *FIXED, *(key for key in REFUSED if key[-1] not in ".-")})


def test_the_pages_name_no_other_key() -> None:
    """A key that is mentioned is one that can be given."""
    known = {*KNOWN_KEYS, *FIXED, *REFUSED}
    text = re.sub(r"\]\([^)]*\)", "]", DOCUMENT)  # the target of a link is no key
    roots = "execution|jobmanager|state|taskmanager|web|high-availability|heartbeat|task|slotmanager|slot|pipeline|ray"
    mentioned = set(re.findall(rf"`(?:{roots})(?:\.[a-z][\w-]*)+`", text))
    assert {key.strip("`") for key in mentioned} - known == set()


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_documented_default_is_the_default(row: Row) -> None:
    """Writing the documented default down changes nothing."""
    loaded = load_config({row.keys[0]: yaml.safe_load(row.default)}, {})
    assert loaded == load_config({}, {})
    assert row.name in getattr(loaded, row.section).model_fields_set


def test_documented_retention_and_contradictions() -> None:
    """The tables of retention and of contradictions have a row for each."""
    for value in ("retain_on_cancellation", "delete_on_cancellation", "no_externalized_checkpoints"):
        assert f"\n| `{value}` |" in DOCUMENT
        assert value == CheckpointConfig(retention=value).retention
    section = DOCUMENT.partition("## What does not go together")[2].partition("\n## ")[0]
    pairs = [set(re.findall(r"`(\w+)`", line)) for line in section.splitlines() if line.startswith("| `")]
    assert [
        {"unaligned", "mode"},
        {"unaligned", "max_concurrent"},
        {"max_concurrent", "min_pause"},
        {"aligned_timeout", "unaligned"},
        {"aligned_timeout", "timeout"},
        {"backend_directory", "backend"},
        {"local_directory", "local_copies"},
        {"max_state_size", "checkpoint_storage"},
        {"debloat_target", "debloat"},
        {"heartbeat_interval", "heartbeat_timeout"},
        {"standbys", "incremental"},
        {"standbys", "changelog"},
        {"standbys", "rewind_memory"},
        {"slot_request_timeout", "deploy_timeout"},
        {"frame_bytes_min", "frame_bytes_max"},
    ] == pairs
