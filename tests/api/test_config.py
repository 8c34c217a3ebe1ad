"""Settings: read exactly, refused with advice, never ignored."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config import CheckpointConfig, load_config
from tidegate.storage.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]

KEYS = {
    "interval": "execution.checkpointing.interval",
    "storage": "state.checkpoints.dir",
    "mode": "execution.checkpointing.mode",
    "timeout": "execution.checkpointing.timeout",
    "min_pause": "execution.checkpointing.min-pause",
    "tolerable_failed": "execution.checkpointing.tolerable-failed-checkpoints",
    "retained": "state.checkpoints.num-retained",
    "inline_bytes": "state.storage.fs.memory-threshold",
}


def test_defaults() -> None:
    """Without settings: no periodic checkpoints, none may fail, one is kept, up to 20 KB are inlined."""
    assert CheckpointConfig().model_dump() == {
        "interval": None,
        "storage": None,
        "mode": "exactly_once",
        "timeout": 600_000,
        "min_pause": 0,
        "tolerable_failed": 0,
        "retained": 1,
        "inline_bytes": 20 * 1024,
    }


def test_units() -> None:
    """Durations become milliseconds and sizes bytes, from strings, timedeltas and numbers."""
    config = CheckpointConfig(interval="1s", timeout=timedelta(minutes=2), min_pause=250, inline_bytes="64kb")
    assert (config.interval, config.timeout, config.min_pause, config.inline_bytes) == (
        1_000,
        120_000,
        250,
        65_536,
    )


@pytest.mark.parametrize(("interval", "expected_ms"), [(None, None), (0, None), ("9ms", None), ("10ms", 10), (11, 11)])
def test_short_interval_switches_periodic_checkpoints_off(interval: object, expected_ms: int | None) -> None:
    """Below 10 ms is off, as None is; 10 ms is on."""
    assert CheckpointConfig(interval=interval).interval == expected_ms


def test_min_pause_may_exceed_interval() -> None:
    """The pause then sets the pace, as in Flink."""
    assert CheckpointConfig(interval="1s", min_pause="1min").min_pause == 60_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("interval", "fast"),
        ("interval", -1),
        ("interval", False),
        ("timeout", "9ms"),
        ("timeout", None),
        ("min_pause", "-1s"),
        ("tolerable_failed", -1),
        ("tolerable_failed", "2"),
        ("tolerable_failed", True),
        ("retained", 0),
        ("retained", 1.5),
        ("mode", "at_least_once"),
        ("mode", None),
        ("storage", ""),
        ("storage", 7),
        ("inline_bytes", "20 parsecs"),
    ],
)
def test_wrong_value_is_refused_by_both_names(name: str, value: object) -> None:
    """The error names the setting as Python and YAML know it, and repeats what was given, through both."""
    with pytest.raises(ConfigurationError) as python:
        CheckpointConfig(**{name: value})
    with pytest.raises(ConfigurationError) as yaml:
        load_config({KEYS[name]: value})
    assert f"{name} ({KEYS[name]})" in str(python.value)
    assert str(value).strip("-").removesuffix("ms") in str(python.value)
    assert str(python.value) == str(yaml.value)


def test_mode_as_flink_writes_it() -> None:
    """EXACTLY_ONCE is the same mode."""
    assert load_config({KEYS["mode"]: "EXACTLY_ONCE"}).checkpoints.mode == "exactly_once"


@pytest.mark.parametrize(
    ("given_name", "nearest"),
    [("intervall", "interval"), ("minpause", "min_pause"), ("tolerable_failures", "tolerable_failed")],
)
def test_unknown_argument_names_the_nearest(given_name: str, nearest: str) -> None:
    """A misspelt argument is refused together with the one that was probably meant."""
    with pytest.raises(ConfigurationError, match=f"'{given_name}'.*'{nearest}'"):
        CheckpointConfig(**{given_name: 1})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("execution.checkpointing.intervall", "interval"),
        ("execution.checkpointing.min_pause", "min_pause"),
        ("execution.checkpoint.timeout", "timeout"),
        ("interval", "interval"),
        ("retained", "retained"),
        ("state.checkpoint.dir", "storage"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    """A misspelt or shortened key is refused together with the one that was probably meant."""
    with pytest.raises(ConfigurationError) as refused:
        load_config({key: 1})
    assert repr(key) in str(refused.value)
    assert repr(KEYS[nearest]) in str(refused.value)


def test_one_setting_under_two_names_is_refused() -> None:
    """Neither of two values wins silently."""
    with pytest.raises(ConfigurationError, match="one setting"):
        CheckpointConfig(**{"interval": "1s", KEYS["interval"]: "2s"})


def test_config_is_frozen_and_travels() -> None:
    """A configuration cannot change after its check, and is the same in another process."""
    config = CheckpointConfig(interval="1s", storage=Path("a") / "b")
    with pytest.raises(ValueError, match="frozen"):
        config.interval = 5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.storage == "a/b"


VALUES = st.fixed_dictionaries(
    {},
    optional={
        KEYS["interval"]: st.integers(10, 10**9),
        KEYS["timeout"]: st.integers(10, 10**9),
        KEYS["min_pause"]: st.integers(0, 10**9),
        KEYS["retained"]: st.integers(1, 100),
        KEYS["inline_bytes"]: st.integers(0, 2**40),
    },
)


@given(VALUES)
def test_nested_and_flat_keys_are_the_same(flat: dict[str, int]) -> None:
    """`a.b: 1` and `a: {b: 1}` say the same, at any depth, and every value arrives."""
    nested: dict[str, object] = {}
    for key, value in flat.items():
        *folders, last = key.split(".")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})  # type: ignore[assignment]
        place[last] = value
    loaded = load_config(nested)
    assert loaded == load_config(flat)
    assert {key: value for key, value in loaded.checkpoints.model_dump(by_alias=True).items() if key in flat} == flat


def test_default_file_holds_the_defaults() -> None:
    """configs/default.yaml spells out what holds without it, except for an interval."""
    shipped = load_config(ROOT / "configs" / "default.yaml").checkpoints
    assert shipped == CheckpointConfig(interval="10s")
    text = (ROOT / "configs" / "default.yaml").read_text()
    assert [key for key in KEYS.values() if f"{key.rpartition('.')[2]}:" not in text] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n- b\n", "holds a list"),
        ("a: [", "not YAML"),
        ("state.checkpoints.num-retained: 1\nstate.checkpoints.num-retained: 2\n", "line 2: .* twice"),
        (
            "state:\n  checkpoints.dir: a\n  checkpoints:\n    dir: b\n",
            "state.checkpoints.dir is given twice",
        ),
        ("execution.checkpointing.interval: off\n", "interval .*False"),
        ("execution.checkpointing: 5\n", "unknown setting 'execution.checkpointing'"),
        ("executing:\n", "unknown setting 'executing'"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """The error names the file and what is wrong in it."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"job.yaml: {complaint}"):
        load_config(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there is an error, not a set of defaults."""
    with pytest.raises(ConfigurationError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "state:\n  checkpoints:\n    # dir: x\n"])
def test_empty_file_and_empty_sections_are_defaults(tmp_path: Path, text: str) -> None:
    """A file whose lines are all comments says nothing, which is allowed."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert load_config(path).checkpoints == CheckpointConfig()
