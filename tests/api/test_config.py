"""Settings: read exactly, refused with advice, never ignored."""

from __future__ import annotations

import inspect
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from config_keys import GIVEN, KEYS, NEEDS

from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.config_file import load_config
from tidegate.storage.errors import ConfigurationError


def test_defaults() -> None:
    """Without settings: no periodic checkpoints, none may fail, one is kept whatever happens, up to 20 KB inlined."""
    assert CheckpointConfig().model_dump() == {
        "interval": None,
        "storage": None,
        "savepoints": None,
        "mode": "exactly_once",
        "timeout": 600_000,
        "min_pause": 0,
        "max_concurrent": 1,
        "unaligned": False,
        "aligned_timeout": 0,
        "tolerable_failed_checkpoints": 0,
        "storage_outage": 600_000,
        "num_retained": 1,
        "retention": "retain_on_cancellation",
        "inline_threshold": 20 * 1024,
        "ignore_in_flight_of": None,
        "history": 10,
        "keep_events": False,
        "backend": "columnar",
        "incremental": False,
        "changelog": False,
        "compression": None,
        "backend_memory": 64 * 1024 * 1024,
        "backend_cache": 128 * 1024 * 1024,
        "rocksdb_threads": 2,
        "rocksdb_write_buffer": None,
        "rocksdb_block_size": 8 * 1024,
        "rocksdb_open_files": 512,
        "rewind_memory": 256 * 1024 * 1024,
        "backend_directory": None,
        "local_copies": False,
        "local_directory": None,
        "checkpoint_storage": "filesystem",
        "max_state_size": 5 * 1024 * 1024,
        "debloat": True,
        "debloat_target": 1_000,
        "failover": "region",
        "lease": 30_000,
        "heartbeat_interval": 10_000,
        "heartbeat_timeout": 50_000,
        "call_timeout": None,
        "takeover_timeout": 60_000,
        "deploy_timeout": 600_000,
        "standbys": None,
        "slot_request_timeout": 300_000,
    }


@pytest.mark.parametrize("name", list(KEYS))
def test_every_name_and_every_key_sets_the_setting(name: str) -> None:
    """The Python name and each key of Flink's, flat or nested, old or new, say the same."""
    written, kept = GIVEN[name]
    expected = CheckpointConfig(**{name: written}, **NEEDS.get(name, {}))
    assert kept == getattr(expected, name)
    for key in KEYS[name]:
        more = {KEYS[other][0]: value for other, value in NEEDS.get(name, {}).items()}
        assert expected == load_config({key: written, **more}).checkpoints
        folder, _, last = key.rpartition(".")
        assert expected == load_config({folder: {last: written}, **more}).checkpoints
        assert expected == CheckpointConfig(**{key: written}, **NEEDS.get(name, {}))


def test_the_tables_of_the_tests_know_every_setting() -> None:
    """A setting that is added is tested as well."""
    assert list(CheckpointConfig.model_fields) == list(KEYS) == list(GIVEN)


def test_units() -> None:
    """Durations become milliseconds and sizes bytes, from strings, timedeltas and numbers."""
    config = CheckpointConfig(interval="1s", timeout=timedelta(minutes=2), min_pause=250, inline_threshold="64kb")
    assert (config.interval, config.timeout, config.min_pause, config.inline_threshold) == (1_000, 120_000, 250, 65_536)


@pytest.mark.parametrize(("interval", "expected_ms"), [(None, None), (0, None), ("10ms", 10), (11, 11)])
def test_an_interval_of_none_switches_periodic_checkpoints_off(interval: object, expected_ms: int | None) -> None:
    """An interval of 0 does the same, and 10 ms is the shortest one."""
    assert expected_ms == CheckpointConfig(interval=interval).interval


@pytest.mark.parametrize("interval", [5, "9ms"])
def test_an_interval_of_a_few_milliseconds_is_refused(interval: object) -> None:
    """A number without a unit is mostly meant as seconds."""
    with pytest.raises(ConfigurationError, match=r"ms, which is too short; give 10 ms or more, with a unit such as"):
        CheckpointConfig(interval=interval)


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
        ("max_concurrent", 0),
        ("max_concurrent", True),
        ("unaligned", "true"),
        ("unaligned", 1),
        ("aligned_timeout", "-1s"),
        ("aligned_timeout", None),
        ("tolerable_failed_checkpoints", -1),
        ("tolerable_failed_checkpoints", "2"),
        ("tolerable_failed_checkpoints", True),
        ("num_retained", 0),
        ("num_retained", 1.5),
        ("retention", "retain_on_failure"),
        ("retention", False),
        ("failover", "none"),
        ("mode", "at_most_once"),
        ("mode", None),
        ("storage", ""),
        ("storage", 7),
        ("savepoints", ""),
        ("inline_threshold", "20 parsecs"),
        ("ignore_in_flight_of", 0),
        ("ignore_in_flight_of", "chk-3"),
        ("history", -1),
        ("backend", "forst"),
        ("backend", "abacus"),
        ("backend", 1),
        ("incremental", "no"),
        ("changelog", 1),
        ("compression", "snappy"),
        ("backend_memory", "much"),
        ("rocksdb_threads", 0),
        ("rocksdb_write_buffer", 0),
        ("rocksdb_block_size", "much"),
        ("rocksdb_open_files", -1),
        ("rewind_memory", -1),
        ("backend_directory", ""),
        ("local_copies", "here"),
        ("local_directory", 3),
        ("checkpoint_storage", "tape"),
        ("max_state_size", 0),
        ("max_state_size", "65mb"),
        ("debloat", "off"),
        ("debloat_target", "9ms"),
        ("debloat_target", 0),
        ("lease", "10ms"),
        ("heartbeat_interval", "99ms"),
        ("heartbeat_timeout", "soon"),
        ("call_timeout", "1ms"),
        ("standbys", -1),
        ("standbys", True),
        ("standbys", "many"),
        ("standbys", 1_001),
        ("slot_request_timeout", "9ms"),
    ],
)
def test_wrong_value_is_refused_by_every_name(name: str, value: object) -> None:
    """The error names the setting as Python and YAML know it, and repeats what was given, through all of them."""
    with pytest.raises(ConfigurationError) as python:
        CheckpointConfig(**{name: value})
    assert f"{name} ({' or '.join(KEYS[name])}): " in str(python.value)
    assert str(value).strip("-").removesuffix("ms") in str(python.value)
    for key in KEYS[name]:
        with pytest.raises(ConfigurationError) as yaml:
            load_config({key: value})
        assert str(python.value) == str(yaml.value)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("backend", "FORST", "'FORST' is none of .*; there is no ForSt backend; write 'columnar'.*'rocksdb'"),
        ("backend", "abacus", "none of 'columnar', 'rocksdb', 'hashmap'"),
        ("compression", "snappy", "none of 'none', 'lz4', 'zstd'"),
        ("checkpoint_storage", "tape", "none of 'filesystem', 'jobmanager'"),
        ("retention", "maybe", "'retain_on_cancellation', 'delete_on_cancellation', 'no_externalized_checkpoints'"),
        ("mode", "maybe", "none of 'exactly_once', 'at_least_once'"),
        ("unaligned", "yes", "neither true nor false"),
        ("ignore_in_flight_of", -1, "the N of chk-N.* from 1 up"),
    ],
)
def test_refusal_says_what_to_write(name: str, value: object, advice: str) -> None:
    """What Flink has and tidegate has not is called by its name, and so is what may be written instead."""
    with pytest.raises(ConfigurationError, match=advice):
        CheckpointConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "written", "kept"),
    [
        ("mode", "EXACTLY_ONCE", "exactly_once"),
        ("mode", "At-Least-Once", "at_least_once"),
        ("retention", "RETAIN_ON_CANCELLATION", "retain_on_cancellation"),
        ("retention", "NO_EXTERNALIZED_CHECKPOINTS", "no_externalized_checkpoints"),
        ("backend", "HashMap", "columnar"),
        ("backend", "columnar", "columnar"),
        ("checkpoint_storage", "FILESYSTEM", "filesystem"),
        ("history", 0, 0),
    ],
)
def test_choices_may_be_written_as_flink_does(name: str, written: object, kept: object) -> None:
    """Capitals and dashes do not matter."""
    assert kept == getattr(CheckpointConfig(**{name: written}), name)


CONTRADICTIONS = [
    ({"rocksdb_threads": 3}, ("rocksdb_threads", "backend")),
    ({"rocksdb_open_files": 3, "backend": "columnar"}, ("rocksdb_open_files", "backend")),
    (
        {"backend": "rocksdb", "rocksdb_write_buffer": "33mb", "backend_memory": "64mb"},
        ("rocksdb_write_buffer", "backend_memory"),
    ),
    (
        {"backend": "rocksdb", "rocksdb_block_size": "65mb", "backend_memory": "64mb"},
        ("rocksdb_block_size", "backend_memory"),
    ),
    ({"mode": "at_least_once", "unaligned": True}, ("mode", "unaligned")),
    ({"mode": "at_least_once", "unaligned": True, "aligned_timeout": "1s"}, ("mode", "unaligned")),
    ({"unaligned": True, "max_concurrent": 2}, ("unaligned", "max_concurrent")),
    ({"max_concurrent": 2, "min_pause": 1}, ("max_concurrent", "min_pause")),
    ({"aligned_timeout": 1}, ("aligned_timeout", "unaligned")),
    ({"unaligned": True, "aligned_timeout": "10s", "timeout": "10s"}, ("aligned_timeout", "timeout")),
    ({"backend_directory": "/mnt/disk"}, ("backend_directory", "backend")),
    ({"local_directory": "/mnt/disk"}, ("local_directory", "local_copies")),
    ({"max_state_size": "1mb"}, ("max_state_size", "checkpoint_storage")),
    ({"debloat": False, "debloat_target": "200ms"}, ("debloat_target", "debloat")),
    (
        {"slot_request_timeout": "1min", "deploy_timeout": "1min"},
        ("slot_request_timeout", "deploy_timeout"),
    ),
    ({"heartbeat_interval": "50s"}, ("heartbeat_interval", "heartbeat_timeout")),
    ({"standbys": "warm"}, ("standbys", "incremental")),
    ({"standbys": "warm", "incremental": True, "changelog": True}, ("standbys", "changelog")),
    ({"standbys": "warm", "incremental": True, "rewind_memory": 0}, ("standbys", "rewind_memory")),
]


@pytest.mark.parametrize(("settings", "pair"), CONTRADICTIONS)
def test_contradiction_is_refused_by_both_names(settings: dict[str, object], pair: tuple[str, str]) -> None:
    """Two settings that cannot both be kept are an error that names both, in Python and in YAML."""
    with pytest.raises(ConfigurationError) as python:
        CheckpointConfig(**settings)
    for name in pair:
        assert f"{name} ({' or '.join(KEYS[name])}) is " in str(python.value)
    with pytest.raises(ConfigurationError) as yaml:
        load_config({KEYS[name][-1]: value for name, value in settings.items()})
    assert str(python.value) == str(yaml.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "at_least_once", "max_concurrent": 3},
        {"unaligned": True},
        {"unaligned": True, "min_pause": "1s"},
        {"unaligned": True, "aligned_timeout": 9, "timeout": 10},
        {"max_concurrent": 2},
        {"max_concurrent": 1, "min_pause": "1s"},
        {"aligned_timeout": 0},
        {"interval": "1min", "timeout": "1s"},
        {"max_state_size": "5mb"},
        {"deploy_timeout": "1min"},
        {"slot_request_timeout": "1min", "deploy_timeout": "2min"},
        {"debloat": False},
        {"debloat": True, "debloat_target": "10ms"},
        {"standbys": "warm", "incremental": True},
        {"standbys": "warm", "backend": "rocksdb", "rewind_memory": 0},
    ],
)
def test_what_is_no_contradiction_is_accepted(settings: dict[str, object]) -> None:
    """The neighbours of every contradiction are fine."""
    assert CheckpointConfig(**settings).model_fields_set == set(settings)


@pytest.mark.parametrize(
    ("given_name", "nearest"),
    [("intervall", "interval"), ("minpause", "min_pause"), ("tolerable_failures", "tolerable_failed_checkpoints")],
)
def test_unknown_argument_names_the_nearest(given_name: str, nearest: str) -> None:
    """A misspelt argument is refused together with the one that was probably meant."""
    with pytest.raises(ConfigurationError, match=f"'{given_name}'.*'{nearest}'"):
        CheckpointConfig(**{given_name: 1})


@pytest.mark.parametrize("name", list(KEYS))
def test_one_setting_under_two_names_is_refused(name: str) -> None:
    """Neither of two values wins silently, whichever two of its names a setting was given by."""
    spellings = (name, *KEYS[name])
    for one in spellings:
        for other in spellings:
            if one != other:
                with pytest.raises(ConfigurationError, match=f"^{one} and {other} are one setting"):
                    CheckpointConfig(**{one: GIVEN[name][0], other: GIVEN[name][0]})


def test_config_is_frozen_and_travels() -> None:
    """A configuration cannot change after its check, and is the same in another process."""
    config = CheckpointConfig(interval="1s", storage=Path("a") / "b")
    with pytest.raises(ConfigurationError, match=r"cannot be set afterwards.*CheckpointConfig\(interval=\.\.\.\)"):
        config.interval = 5  # type: ignore[misc]
    assert config == pickle.loads(pickle.dumps(config))
    assert config.storage == "a/b"


def test_settings_without_names_are_refused() -> None:
    """The first setting of a class may be another one than its caller thinks. The signature has the names."""
    with pytest.raises(ConfigurationError, match=r"^CheckpointConfig\(1000\): settings are given by name, such as"):
        CheckpointConfig(1000)  # type: ignore[misc]
    assert list(inspect.signature(CheckpointConfig).parameters) == list(CheckpointConfig.settings())
