"""docs/configuration.md says what the model does, setting by setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from config_keys import KEYS

from tidegate.api.config.checkpoint_config import CheckpointConfig, setting_keys
from tidegate.api.config.config_file import load_config

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (`[\w.-]+\.[\w.-]+`(?:, `[\w.-]+`)*) \| (none|`[^`]+`) \| (\S.*) \|$", re.MULTILINE)


def rows() -> dict[str, tuple[tuple[str, ...], str]]:
    """Name to keys and default, as the table of settings has them."""
    return {
        name: (tuple(re.findall(r"[\w.-]+", keys)), default.strip("`"))
        for name, keys, default, _ in ROW.findall(DOCUMENT)
    }


def test_document_lists_every_setting_and_no_other() -> None:
    """Each setting has one row with all of its keys, older first, in the order of the model."""
    model = {name: setting_keys(name) for name in CheckpointConfig.model_fields}
    assert model == {name: keys for name, (keys, _) in rows().items()}
    assert list(model) == list(rows())
    assert model == KEYS


def test_document_names_no_other_key() -> None:
    """A key that is mentioned anywhere in the document is one that can be given."""
    known = {key for keys in KEYS.values() for key in keys}
    text = re.sub(r"\]\([^)]*\)", "]", DOCUMENT)  # the target of a link is no key
    roots = "execution|jobmanager|state|taskmanager|web|high-availability|heartbeat|task|slotmanager|slot"
    mentioned = set(re.findall(rf"\b(?:{roots})(?:\.[a-z][\w-]*)+", text))
    assert known == mentioned


@pytest.mark.parametrize("name", list(KEYS))
def test_documented_default_is_the_default(name: str) -> None:
    """Writing the documented default down changes nothing."""
    default = rows()[name][1]
    config = (
        CheckpointConfig() if default == "none" else load_config({KEYS[name][0]: yaml.safe_load(default)}).checkpoints
    )
    assert CheckpointConfig() == config
    assert (default == "none") == (getattr(CheckpointConfig(), name) is None)


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
        {"debloat_target", "debloat"},
        {"heartbeat_interval", "heartbeat_timeout"},
        {"standbys", "incremental"},
        {"standbys", "changelog"},
        {"standbys", "undo_memory"},
    ] == pairs
