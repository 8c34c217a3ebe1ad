"""Every setting is the same in Python, in a file, as a variable and as an option; and which of several counts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg
from tidegate.api.config.config_file import (
    SECTIONS,
    Config,
    load_config,
    of_command_line,
    of_file,
    of_words,
    resolve,
    variable_of,
)
from tidegate.api.config.sections import TopologySettings
from tidegate.api.config.settings_table import Row, effective, rows
from tidegate.storage.errors import ConfigurationError

INTERVAL = "execution.checkpointing.interval"
ROWS = list(rows())


def written(row: Row) -> st.SearchStrategy[object]:
    """Values as people write them for a setting."""
    if row.kind == "duration":
        return st.integers(1_000, 10**8) | st.integers(1, 90).map(lambda n: f"{n}min")
    if row.kind == "size":
        return st.integers(2**20, 2**26) | st.integers(1, 64).map(lambda n: f"{n}MB")
    if row.kind == "number":
        return st.integers(1, 1_000)
    if row.kind == "mapping":
        return st.dictionaries(st.sampled_from(["a.b", "c", "d_e"]), st.integers(0, 9), min_size=1)
    words = [word for word in re.findall(r"`(\w+)`", row.kind) if word not in ("true", "false")]
    if row.kind == "`true` or `false`":
        return st.booleans()
    if words:
        return st.sampled_from(words) | st.sampled_from(
            [word.upper() for word in words if word[:6] != "latest"] or words
        )
    return st.from_regex(r"s3://b[a-z]{1,5}/x|[a-z]{2}/[a-w]{2}", fullmatch=True)


@st.composite
def some_settings(draw: st.DrawFn) -> list[tuple[Row, str, object]]:
    """A few settings, each under one of its keys, with a value."""
    chosen = draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=5, unique=True))
    return [(row, draw(st.sampled_from(row.keys)), draw(written(row))) for row in chosen]


def outcome(make: Any) -> object:
    """What is made; or what is said against it, without the place."""
    try:
        return make()
    except ConfigurationError as error:
        return str(error)[str(error).find(" is ") :] if " but " in str(error) else str(error).partition(": ")[2][-40:]


@settings(max_examples=20)
@given(some_settings())
def test_python_file_variable_and_command_line_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[Row, str, object]]
) -> None:
    """Whatever is set to whatever; also where it is refused, because two settings contradict each other."""
    path = tmp_path_factory.getbasetemp() / "same.yaml"
    path.write_text(yaml.safe_dump({key: value for _, key, value in said}))

    def in_python() -> Config:
        made = {
            section: kind(**{row.name: value for row, _, value in said if row.section == section})
            for section, kind in SECTIONS.items()
        }
        return Config(**made)  # type: ignore[arg-type]

    forms = (
        in_python,
        lambda: load_config(path, {}),
        lambda: load_config({key: value for _, key, value in said}, {}),
        lambda: load_config(None, {variable_of(key): text(value) for _, key, value in said}),
        lambda: resolve([of_words([f"{key}={text(value)}" for _, key, value in said])]),
    )
    outcomes = [outcome(form) for form in forms]
    assert outcomes == [outcomes[0]] * len(forms)


def text(value: object) -> str:
    """A value as it is typed into a shell."""
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n")


@settings(max_examples=20)
@given(some_settings())
def test_what_is_in_effect_can_be_written_down(said: list[tuple[Row, str, object]]) -> None:
    """Loading what `tidegate config check` prints comes to the same configuration."""
    try:
        config = load_config({key: value for _, key, value in said}, {})
    except ConfigurationError:
        return
    printed = "".join(f"{key}: {value}  # {origin}\n" for key, value, origin in effective(config))
    again = load_config(yaml.safe_load(printed), {})
    for section in SECTIONS:
        assert getattr(config, section) == getattr(again, section)


def interval_of(env: tg.StreamEnvironment, given_in_python: tg.CheckpointConfig | None = None) -> int | None:
    """The interval of a job in this environment."""
    env.from_batches(pa.table({"x": [1]})).collect()
    return env.plan("job", checkpoints=given_in_python).spec.checkpoints.interval_ms


def test_what_is_nearer_to_the_run_counts_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python, --set, variable, file of config=, file of the command line or TIDEGATE_CONFIG, default."""
    below, own = tmp_path / "below.yaml", tmp_path / "own.yaml"
    below.write_text(f"{INTERVAL}: 1s\nweb.checkpoints.history: 71\n")
    own.write_text(f"{INTERVAL}: 2s\n")
    monkeypatch.setenv("TIDEGATE_STATE_CHECKPOINTS_DIR", str(tmp_path / "checkpoints"))

    assert interval_of(tg.StreamEnvironment.local()) is None
    monkeypatch.setenv("TIDEGATE_CONFIG", str(below))
    assert interval_of(tg.StreamEnvironment.local()) == 1_000
    assert interval_of(tg.StreamEnvironment.local(config=own)) == 2_000
    assert load_config(own).checkpoints.history == 71
    monkeypatch.setenv(variable_of(INTERVAL), "3s")
    assert interval_of(tg.StreamEnvironment.local(config=own)) == 3_000
    with of_command_line(None, of_words([f"{INTERVAL}=4s"])):
        env = tg.StreamEnvironment.local(config=own)
        assert interval_of(env) == 4_000
        assert interval_of(env, tg.CheckpointConfig(timeout="1min")) == 4_000
        assert interval_of(env, tg.CheckpointConfig(interval="5s")) == 5_000
        assert interval_of(env, tg.CheckpointConfig(interval=None)) is None
    assert interval_of(tg.StreamEnvironment.local(config=own)) == 3_000


def test_a_contradiction_between_two_places_names_both(tmp_path: Path) -> None:
    """Of a program and a file as well: who reads it has to look there."""
    path = tmp_path / "job.yaml"
    path.write_text("execution.checkpointing:\n  unaligned: true\n")
    with pytest.raises(ConfigurationError, match=r"job.yaml:2, variable TIDEGATE_EXECUTION_CHECKPOINTING_MODE: unali"):
        load_config(path, {"TIDEGATE_EXECUTION_CHECKPOINTING_MODE": "AT_LEAST_ONCE"})
    with pytest.raises(ConfigurationError, match=r"job.yaml:2: unaligned .* is True but mode"):
        load_config(path, {}).checkpoints_of(tg.CheckpointConfig(mode="at_least_once"))


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"TIDEGATE_HEARTBEAT_INTERVALL": "1s"}, "'TIDEGATE_HEARTBEAT_INTERVALL'; .* 'TIDEGATE_HEARTBEAT_INTERVAL'"),
        ({"TIDEGATE_HEARTBEAT_INTERVAL": "1x"}, "^variable TIDEGATE_HEARTBEAT_INTERVAL: heartbeat_interval .*'x'"),
        ({"TIDEGATE_HEARTBEAT_INTERVAL": "{a"}, "variable TIDEGATE_HEARTBEAT_INTERVAL: '{a' cannot be read"),
        ({"TIDEGATE_STATE_CHECKPOINTS_NUM_RETAINED": "many"}, "num_retained .*'many' is not a number"),
        ({"TIDEGATE_EXECUTION_CHECKPOINTING_UNALIGNED": "1"}, "1 is neither true nor false"),
        ({"TIDEGATE_EXECUTION_ATTACHED": "true"}, "variable TIDEGATE_EXECUTION_ATTACHED: .*write execution.detached"),
        (
            {"TIDEGATE_STATE_BACKEND": "rocksdb", "TIDEGATE_STATE_BACKEND_TYPE": "rocksdb"},
            "state.backend and state.backend.type are one setting",
        ),
        ({"TIDEGATE_RESTART_STRATEGY_TYPE": "often"}, "variable TIDEGATE_RESTART_STRATEGY_TYPE: .*'often' is none of"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(variables: dict[str, str], complaint: str) -> None:
    """A misspelt one too: nobody would find out why it changes nothing."""
    with pytest.raises(ConfigurationError, match=complaint):
        load_config(None, variables)


@pytest.mark.parametrize("word", ["parallelism.default", "=3", "parallelism.default={"])
def test_a_wrong_option_is_refused(word: str) -> None:
    """The error says how to write it, or where."""
    with pytest.raises(ConfigurationError, match=r"^--set .*(write key=value|cannot be read)"):
        of_words([word])


def test_variables_that_say_nothing_are_passed_over() -> None:
    """Empty ones, those of other libraries, and what Kubernetes makes of a service that is called tidegate."""
    environ = {
        "HOME": "/nowhere",
        "TIDEGATE_HEARTBEAT_INTERVAL": " ",
        "TIDEGATE_SERVICE_HOST": "10.0.0.1",
        "TIDEGATE_HEAD_SVC_SERVICE_PORT_DASHBOARD": "8265",
        "TIDEGATE_PORT_8265_TCP_ADDR": "10.0.0.1",
    }
    assert load_config(None, environ) == load_config(None, {})


def test_a_strategy_is_chosen_by_its_type() -> None:
    """What a file says of another strategy is dropped when a variable chooses; beside the type it is refused."""
    file = {"restart-strategy.type": "fixed-delay", "restart-strategy.fixed-delay.attempts": 7}
    assert load_config(file, {"TIDEGATE_RESTART_STRATEGY_TYPE": "none"}).restart == tg.RestartStrategy.none()
    changed = load_config(file, {"TIDEGATE_RESTART_STRATEGY_FIXED_DELAY_DELAY": "3s"}).restart
    assert changed == tg.RestartStrategy.fixed_delay(7, "3s")
    again = {"TIDEGATE_RESTART_STRATEGY_TYPE": "fixed-delay", "TIDEGATE_RESTART_STRATEGY_NONE": ""}
    assert load_config(file, again).restart == tg.RestartStrategy.fixed_delay(7, "1s")
    with pytest.raises(ConfigurationError, match=r"variable TIDEGATE_RESTART_STRATEGY_FIXED_DELAY_DELAY.*remove it"):
        load_config(
            None,
            {"TIDEGATE_RESTART_STRATEGY_TYPE": "none", "TIDEGATE_RESTART_STRATEGY_FIXED_DELAY_DELAY": "3s"},
        )


def test_settings_of_other_libraries_come_together(tmp_path: Path) -> None:
    """Of Spark and Ray: nested or flat, of several places; each counts by itself."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "spark:\n  sql.shuffle.partitions: 8\n  executor:\n    cores: 3\n    extra: true\n"
        "ray.options:\n  _system_config:\n    worker_niceness: 0\nray.options.num_cpus: 8\n"
    )
    found = load_config(path, {"TIDEGATE_SPARK": "{sql.shuffle.partitions: 4, ui.enabled: false}"}).topology
    assert found.executor_cores == 3
    assert found.spark_configs == {
        "spark.sql.shuffle.partitions": "4",
        "spark.executor.extra": "true",
        "spark.ui.enabled": "false",
    }
    assert found.ray_options == {"_system_config": {"worker_niceness": 0}, "num_cpus": 8}
    path.write_text("spark.a: 1\nspark: {a: 2}\n")
    with pytest.raises(ConfigurationError, match=r"job.yaml:2: spark.a is given twice"):
        load_config(path, {})


def test_lines_are_those_of_the_keys(tmp_path: Path) -> None:
    """Also of nested ones, and of what is merged from elsewhere in the file."""
    path = tmp_path / "job.yaml"
    path.write_text("heartbeat: &h\n  interval: 1s\n\n  timeout: 2s\n")
    assert [given.origin.rpartition(":")[2] for given in of_file(path)] == ["2", "4"]


def test_an_unknown_variable_names_the_nearest() -> None:
    """The error is about the variable."""
    with pytest.raises(
        tg.ConfigurationError, match=r"^unknown environment variable 'TIDEGATE_PARALELISM_DEFAULT'; the"
    ) as refused:
        load_config(None, {"TIDEGATE_PARALELISM_DEFAULT": "2"})
    assert "is 'TIDEGATE_PARALLELISM_DEFAULT'. Correct it" in str(refused.value)


def test_a_job_is_as_its_environment_says(tmp_path: Path) -> None:
    """Its name, where it starts, and what else `execute` may say, which counts more."""
    config = {
        "pipeline.name": "nightly",
        "pipeline.max-parallelism": 64,
        "parallelism.default": 3,
        "state.checkpoints.dir": str(tmp_path / "checkpoints"),
        "execution.state-recovery.path": "latest",
        "taskmanager.network.memory.channel-credit": "1mb",
        "task.source-batch-rows": 7,
        "state.changelog.segment-size": "2mb",
    }
    env = tg.StreamEnvironment.local(config=config, options=tg.DataPlaneOptions(source_rows_max=9))
    env.from_batches(pa.table({"x": [1]}), uid="rows").collect(uid="out")
    planned = env.plan()
    assert (planned.spec.job_name, env.parallelism, env.max_parallelism) == ("nightly", 3, 64)
    options = planned.context.options
    assert (options.limits.credit_bytes, options.source_rows_max) == (2**20, 9)
    assert options.backend.segment_bytes == 2 * 2**20
    chosen = tg.StreamEnvironment.local(2, max_parallelism=32, config=config)
    assert (chosen.parallelism, chosen.max_parallelism) == (2, 32)
    with pytest.raises(ConfigurationError, match=r"found again by its name; give name=, or set pipeline.name"):
        tg.StreamEnvironment.local(config={}).execute(restore="latest")
    wrong = tg.StreamEnvironment.local(config={**config, "execution.state-recovery.path": "sometimes"})
    wrong.from_batches(pa.table({"x": [1]})).collect()
    with pytest.raises(ConfigurationError, match="'sometimes'"):
        wrong.execute()


@pytest.mark.slow
def test_what_spark_and_ray_are_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments count more than the configuration; where both are silent the default of the topology holds."""
    from tidegate import spark_bridge

    class Started(Exception):
        """With what."""

    def start(*names: object, **arguments: object) -> None:
        raise Started(names, arguments)

    def started(**arguments: Any) -> dict[str, Any]:
        with pytest.raises(Started) as found:
            tg.StreamEnvironment.from_config(arguments.pop("config")) if len(arguments) == 1 else (
                tg.StreamEnvironment.raydp(**arguments)
            )
        (names, keywords) = found.value.args
        return {"name": names[0], **keywords}

    monkeypatch.setattr(spark_bridge.RayDPSession, "start", start)
    config = {
        "execution.target": "raydp",
        "spark.executor.instances": 3,
        "spark.executor.memory": "512m",
        "taskmanager.numberOfTaskSlots": 4,
        "spark.app.name": "nightly",
        "spark.x": 1,
        "ray.placement": "pack",
        "ray.options": {"num_gpus": 1},
        "ray.include-dashboard": False,
    }
    default = started(config={"execution.target": "RAYDP"})
    assert (default["name"], default["executors"], default["slots_per_executor"]) == ("tidegate", 2, 2)
    assert (default["executor_cores"], default["executor_memory"], default["include_dashboard"]) == (1, 2**30, True)
    configured = started(config=config)
    assert (configured["name"], configured["executors"], configured["slots_per_executor"]) == ("nightly", 3, 4)
    assert (configured["executor_memory"], configured["placement"]) == (2**29, "pack")
    assert (configured["ray_options"], configured["spark_configs"]) == ({"num_gpus": 1}, {"spark.x": "1"})
    said = started(
        config=config, executors=5, spark_configs={"spark.x": "2"}, include_dashboard=True, placement="spread"
    )
    assert (said["executors"], said["spark_configs"], said["placement"]) == (5, {"spark.x": "2"}, "spread")
    assert (said["include_dashboard"], said["ray_address"]) == (True, None)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("state.backend: filesystem", "write state.backend.type: hashmap"),
        ("state.backend.type: memory", "state.checkpoint-storage: jobmanager"),
        ("state.backend: jobmanager", "state.checkpoint-storage: jobmanager"),
        ("execution.checkpointing.externalized-checkpoint-retention: RETAIN_ON_FAILURE", "DELETE_ON_CANCELLATION"),
        (
            "execution.checkpointing.externalized-checkpoint-retention: NEVER_RETAIN_AFTER_TERMINATION",
            "write NO_EXTERNALIZED_CHECKPOINTS",
        ),
        ("execution.checkpointing.tolerable-failed-checkpoints: -1", "for any number write 2147483647"),
        ("execution.checkpointing.alignment-timeout: 10s", "aligned-checkpoint-timeout"),
        ("state.checkpoints.dir: viewfs://name/folder", "Mount it as a folder"),
        ("state.savepoints.dir: oss://bucket/folder", "Mount it as a folder"),
        (
            "state.savepoints.dir: ftp://host/folder",
            "'/folder', 'file://', 's3://', 'gs://', 'abfs://', 'hdfs://', 'memory://'",
        ),
    ],
)
def test_values_of_flink_that_are_refused_name_what_to_write(tmp_path: Path, line: str, meant: str) -> None:
    """When the file is read: `tidegate config check` refuses what `execute` would."""
    file = tmp_path / "settings.yaml"
    file.write_text(line)
    with pytest.raises(ConfigurationError, match=re.escape(meant)):
        load_config(file)


@pytest.mark.parametrize("value", ["", [], 0, False, "env.yaml", [1]])
def test_a_runtime_environment_is_a_mapping_wherever_it_stands(value: object, tmp_path: Path) -> None:
    """In a file, in a variable, as a setting of a program and as an argument. Nothing at all stands for none."""
    text = json.dumps(value)
    path = tmp_path / "job.yaml"
    path.write_text(f"ray.options:\n  runtime_env: {text}\n")
    makes: list[Callable[[], object]] = [
        lambda: load_config(path),
        lambda: load_config(None, {"TIDEGATE_RAY_OPTIONS": f"{{runtime_env: {text}}}"}),
        lambda: load_config({"ray.options": {"runtime_env": value}}),
        lambda: tg.StreamEnvironment.raydp(ray_options={"runtime_env": value}),
        lambda: tg.StreamEnvironment.ray(runtime_env=value),  # type: ignore[arg-type]
    ]
    for make in makes:
        with pytest.raises(ConfigurationError, match=r"runtime_env.* not a mapping"):
            make()
    assert load_config({"ray.options": {"runtime_env": None}}).topology.runtime_env == {}


def test_an_application_without_a_name_is_refused() -> None:
    """The error names the setting, its key and its value, in words of tidegate."""
    expected = "app_name (spark.app.name): it must be a string that is not empty, not None"
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        TopologySettings.model_validate({"spark.app.name": None})


def test_settings_that_are_no_mapping_are_refused() -> None:
    """The error names the section and the value, without the text of another library."""
    with pytest.raises(ConfigurationError, match=r"^TopologySettings: 'x' is refused \(.*\); correct it$"):
        TopologySettings.model_validate("x")


@pytest.mark.parametrize("value", [None, 1.5, float("nan"), "", "\x00", b"x", [], [1], {"a": [1]}, {1: 2}, object, -1])
def test_every_wrong_value_is_refused_with_the_name_of_its_setting(value: object) -> None:
    """No setting shows the text of another library, which names neither the setting nor what it takes."""
    shown = dict[str, str]()
    for section in SECTIONS.values():
        for name in section.settings():
            try:
                section(**{name: value})
            except ConfigurationError as error:
                shown[section.title(name)] = str(error)
    assert shown
    assert all(title in text and "pydantic" not in text for title, text in shown.items())


@pytest.mark.parametrize("source", [5, ["job.yaml"], b"job.yaml"])
def test_a_configuration_is_a_path_or_a_mapping(source: Any) -> None:
    """Another object is refused with what to give."""
    with pytest.raises(ConfigurationError, match=r"config=.*: give the path of a YAML file, or a mapping"):
        load_config(source)


def test_a_duration_with_a_colon_is_not_a_number(tmp_path: Path) -> None:
    """YAML 1.1 reads 10:00 as 600, which would be a checkpoint every 600 ms."""
    path = tmp_path / "job.yaml"
    path.write_text("execution.checkpointing.interval: 10:00\n")
    makes: list[Callable[[], object]] = [
        lambda: load_config(path),
        lambda: load_config(None, {"TIDEGATE_EXECUTION_CHECKPOINTING_INTERVAL": "10:00"}),
    ]
    for make in makes:
        with pytest.raises(ConfigurationError, match=r"interval .*: cannot read '10:00'; write"):
            make()


@pytest.mark.parametrize("argument", ["allow_non_restored_state", "detached", "slot_sharing"])
def test_a_text_is_not_taken_for_true(argument: str) -> None:
    """`allow_non_restored_state="no"` would drop state."""
    with tg.StreamEnvironment.local(1) as env:
        env.from_rows([1]).collect()
        with pytest.raises(ConfigurationError, match=rf"execute\({argument}=...\): give True or False, not 'no'"):
            env.execute("job", **{argument: "no"})  # type: ignore[arg-type]
