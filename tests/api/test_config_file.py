"""Files of settings: flat or nested keys, and an error that names the file for everything that is wrong in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.config_file import SECTIONS, load_config
from tidegate.storage.errors import ConfigurationError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = ("default.yaml", "laptop.yaml", "s3.yaml", "cluster.yaml", "kuberay/settings.yaml")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("execution.checkpointing.intervall", "execution.checkpointing.interval"),
        ("execution.checkpointing.min_pause", "execution.checkpointing.min-pause"),
        ("execution.checkpoint.timeout", "execution.checkpointing.timeout"),
        ("execution.checkpointing.aligned-checkpoint-timeouts", "execution.checkpointing.aligned-checkpoint-timeout"),
        ("interval", "execution.checkpointing.interval"),
        ("state.checkpoint.dir", "state.checkpoints.dir"),
        ("state.backen", "state.backend"),
        ("taskmanager.network.memory.buffer-debloat.enable", "taskmanager.network.memory.buffer-debloat.enabled"),
        ("unaligned", "execution.checkpointing.unaligned"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    """A misspelt or shortened key is refused together with the one that was probably meant."""
    with pytest.raises(ConfigurationError) as refused:
        load_config({key: 1})
    expected = f"unknown setting {key!r}; the nearest known one is {nearest!r}. Correct it, or remove it"
    assert expected == str(refused.value)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "execution.checkpointing.interval": st.integers(10, 10**9),
        "execution.checkpointing.timeout": st.integers(10, 10**9),
        "execution.checkpointing.max-concurrent-checkpoints": st.integers(1, 100),
        "execution.checkpointing.externalized-checkpoint-retention": st.sampled_from(
            ["retain_on_cancellation", "delete_on_cancellation", "no_externalized_checkpoints"]
        ),
        "state.checkpoints.num-retained": st.integers(1, 100),
        "state.storage.fs.memory-threshold": st.integers(0, 2**40),
        "web.checkpoints.history": st.integers(0, 100),
    },
)


@given(VALUES)
def test_nested_and_flat_keys_are_the_same(flat: dict[str, object]) -> None:
    """`a.b: 1` and `a: {b: 1}` say the same, at any depth, and every value arrives."""
    nested: dict[str, object] = {}
    for key, value in flat.items():
        *folders, last = key.split(".")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})  # type: ignore[assignment]
        place[last] = value
    loaded = load_config(nested)
    assert load_config(flat) == loaded
    kept = loaded.checkpoints.given()
    assert flat == {each.keys[0]: kept[name] for name, each in CheckpointConfig.settings().items() if name in kept}


def test_default_file_holds_the_defaults(tmp_path: Path) -> None:
    """configs/default.yaml spells out what holds without it, except for an interval, and leaves out no setting."""
    path = CONFIGS / "default.yaml"
    loaded = load_config(path)
    for section, kind in SECTIONS.items():
        written = {"interval": "10s"} if section == "checkpoints" else {}
        assert kind(**written) == getattr(loaded, section)
    # Settings whose default is no value to write down stand in comments; two of them want another one changed.
    uncommented = tmp_path / "all.yaml"
    text = re.sub(r"^( *)# ([A-Za-z.-]+: \S+)$", r"\1\2", path.read_text(), flags=re.MULTILINE)
    uncommented.write_text(text.replace("type: columnar", "type: rocksdb").replace("recovery: false", "recovery: true"))
    everything = load_config(uncommented)
    for section, kind in SECTIONS.items():
        assert set(kind.model_fields) == getattr(everything, section).model_fields_set


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_can_be_loaded(name: str) -> None:
    """What is shipped is right, and takes checkpoints."""
    assert load_config(CONFIGS / name).checkpoints.interval is not None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n- b\n", " holds a list"),
        ("5", " holds a int"),
        ("a: [", " not YAML"),
        ("state.checkpoints.num-retained: 1\nstate.checkpoints.num-retained: 2\n", "2: .* twice"),
        ("state:\n  checkpoints.dir: a\n  checkpoints:\n    dir: b\n", "4: state.checkpoints.dir is given twice"),
        (
            "state.checkpoints.dir: a\nexecution.checkpointing.dir: a\n",
            "2: state.checkpoints.dir and execution.checkpointing.dir are one setting",
        ),
        ("execution.checkpointing.interval: off\n", "1: interval .*False"),
        ("\nexecution.checkpointing: 5\n", "2: unknown setting 'execution.checkpointing'"),
        ("executing:\n", "1: unknown setting 'executing'"),
        (
            "execution.checkpointing:\n  mode: AT_LEAST_ONCE\n  unaligned.enabled: true\n",
            r"3, \S*job.yaml:2: unaligned .* is True but mode .* is 'at_least_once': only exactly-once",
        ),
        ("restart-strategy:\n  type: none\n  fixed-delay.delay: 1s\n", r"3, \S*job.yaml:2: restart-.*remove it"),
        (
            "restart-strategy:\n  type: fixed-delay\n  fixed-delay.delay: 1x\n",
            "3: restart-strategy.fixed-delay: .*'1x'",
        ),
        (
            "state.backend.rocksdb.block.size: 1\n",
            "1: state.backend.rocksdb.block.size is a setting of Flink that tidegate lacks",
        ),
        ("execution.attached: true\n", "1: .*write execution.detached"),
        (
            "execution.checkpointing.checkpoints-after-tasks-finish.enabled: false\n",
            "1: .* can only be true: a job always takes them",
        ),
        ("execution.checkpointing.unaligned.forced: 'no'\n", "1: .* 'no' is neither true nor false"),
        ("taskmanager.network.frame:\n  max-size: 1kb\n", "2: frame_bytes_min .* but frame_bytes_max"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """The error names the file and what is wrong in it."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"job.yaml:{complaint}"):
        load_config(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there is an error, not a set of defaults."""
    with pytest.raises(ConfigurationError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "state:\n  checkpoints:\n    # dir: x\n",
        "execution.checkpointing:\n  unaligned:\n    # a: 1\n",
    ],
)
def test_empty_file_and_empty_sections_are_defaults(tmp_path: Path, text: str) -> None:
    """A file whose lines are all comments says nothing, which is allowed."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert CheckpointConfig() == load_config(path).checkpoints
