"""What a job is given of its settings: all of them reach its coordinator, and what cannot work is refused before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from config_keys import KEYS
from local_jobs import local

import tidegate as tg
from tidegate.actors.coordinator.job_spec import CheckpointSettings, JobSpec, Retention
from tidegate.actors.drivers.job_context import ProcessSettings
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.runtimes.running_job import Submission
from tidegate.api.config.config_file import load_config

DATA = pa.table({"k": [1, 2]})


def planned(env: tg.StreamEnvironment, checkpoints: tg.CheckpointConfig | None = None) -> Submission:
    """A small job, ready to run."""
    env.from_batches(DATA, uid="source").collect(uid="rows")
    return env.plan("job", checkpoints=checkpoints)


def spec(folder: Path, **settings: object) -> JobSpec:
    """What the coordinator of a job with these settings is told."""
    return planned(local(), tg.CheckpointConfig(storage=str(folder / "checkpoints"), **settings)).spec


def test_defaults_of_the_settings_and_of_the_coordinator_agree(tmp_path: Path) -> None:
    """A job without settings is coordinated as one whose settings nobody named."""
    assert CheckpointSettings(interval_ms=None) == spec(tmp_path).checkpoints


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"interval": "1s"}, {"interval_ms": 1_000}),
        ({"timeout": "2min"}, {"timeout_ms": 120_000}),
        ({"min_pause": "3s"}, {"min_pause_ms": 3_000}),
        ({"tolerable_failed_checkpoints": 4}, {"tolerable_failures": 4}),
        ({"num_retained": 5}, {"retained": 5}),
        ({"mode": "at_least_once"}, {"exactly_once": False}),
        ({"unaligned": True}, {"unaligned": True, "aligned_timeout_ms": 0}),
        ({"unaligned": True, "aligned_timeout": "6s"}, {"unaligned": True, "aligned_timeout_ms": 6_000}),
        ({"max_concurrent": 7}, {"max_concurrent": 7}),
        ({"retention": "RETAIN_ON_CANCELLATION"}, {"retention": Retention.RETAIN_ON_CANCELLATION}),
        ({"retention": "DELETE_ON_CANCELLATION"}, {"retention": Retention.RETAIN_ON_FAILURE}),
        ({"retention": "NO_EXTERNALIZED_CHECKPOINTS"}, {"retention": Retention.NEVER_RETAIN}),
        ({"history": 8}, {"history_max": 8}),
        ({"ignore_in_flight_of": 9}, {"ignore_in_flight_of": 9}),
    ],
)
def test_every_setting_reaches_the_coordinator(
    tmp_path: Path, settings: dict[str, object], expected: dict[str, object]
) -> None:
    """Each setting changes what it names for the coordinator, and nothing else."""
    assert CheckpointSettings(**{"interval_ms": None, **expected}) == spec(tmp_path, **settings).checkpoints  # type: ignore[arg-type]


def test_the_storage_outage_reaches_the_coordinator(tmp_path: Path) -> None:
    """It is about all of the job's storage, not about checkpoints alone."""
    assert spec(tmp_path, storage_outage="30s").storage_outage_ms == 30_000


def test_inline_bytes_reach_the_tasks(tmp_path: Path) -> None:
    """How much state is inlined is decided by the tasks, which write it."""
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"), inline_threshold="1kb")
    assert planned(local(), checkpoints).context.options.inline_bytes_max == 1_024


def test_the_lease_reaches_the_job(tmp_path: Path) -> None:
    """Whoever drives the job renews it."""
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"), lease="5s")
    assert planned(local(), checkpoints).context.lease_ms == 5_000


def test_processes_beside_the_tasks_reach_the_runtime(tmp_path: Path) -> None:
    """A job that says nothing leaves spare processes to its environment."""
    storage = str(tmp_path / "checkpoints")
    assert planned(local(), tg.CheckpointConfig(storage=storage)).context.processes == ProcessSettings(None, 300_000)
    checkpoints = tg.CheckpointConfig(storage=storage, standbys=3, slot_request_timeout="1min")
    assert planned(local(), checkpoints).context.processes == ProcessSettings(3, 60_000)


def test_a_wrong_number_of_spare_processes_is_refused_before_ray_is_started() -> None:
    """Whatever the file says."""
    for make in (tg.StreamEnvironment.raydp, tg.StreamEnvironment.ray):
        with pytest.raises(tg.ConfigurationError, match="standbys: 'few' is not a number of spare processes"):
            make(standbys=cast(Any, "few"), config={KEYS["standbys"][0]: 2})


def test_spare_processes_of_an_environment_are_those_of_its_jobs(tmp_path: Path) -> None:
    """Unless a job names some itself; what they need of its other settings is looked at then."""
    storage = str(tmp_path / "checkpoints")

    def standbys_with(**settings: object) -> object:
        below = load_config({KEYS["standbys"][0]: 7}, {})
        with tg.StreamEnvironment(LocalRuntime(), 1, standbys="warm", config=below) as env:
            return planned(env, tg.CheckpointConfig(storage=storage, **settings)).context.processes.standbys

    with pytest.raises(tg.ConfigurationError, match=r"standbys .* is 'warm' but incremental .* is False: it would"):
        standbys_with()
    assert standbys_with(incremental=True) == "warm"
    assert standbys_with(backend="rocksdb") == "warm"
    assert standbys_with(standbys=2) == 2


@pytest.mark.parametrize(
    ("settings", "target_ms"), [({}, 1_000), ({"debloat_target": "200ms"}, 200), ({"debloat": False}, 0)]
)
def test_the_time_in_flight_reaches_the_tasks(tmp_path: Path, settings: dict[str, object], target_ms: int) -> None:
    """Beside the sizes of the buffers, which stay what they are."""
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"), **settings)
    limits = planned(local(), checkpoints).context.options.limits
    assert limits == replace(tg.DataPlaneOptions().limits, debloat_target_ms=target_ms)


def test_settings_of_a_file_reach_the_coordinator(tmp_path: Path) -> None:
    """config= of the environment takes every key, by the file as by a mapping."""
    path = tmp_path / "job.yaml"
    path.write_text(f"state.checkpoints.dir: {tmp_path}/c\nexecution.checkpointing:\n  unaligned.enabled: true\n")
    mapping = {KEYS["storage"][0]: f"{tmp_path}/c", KEYS["unaligned"][1]: True}
    expected = CheckpointSettings(interval_ms=None, unaligned=True, aligned_timeout_ms=0)
    for config in (path, str(path), mapping):
        job = planned(tg.StreamEnvironment.local(1, config=config)).spec
        assert (f"{tmp_path}/c", expected) == (job.root, job.checkpoints)


@pytest.mark.parametrize("name", ["storage", "savepoints"])
def test_place_that_cannot_be_opened_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    """Not only when the first savepoint is asked for."""
    places = {"storage": str(tmp_path / "checkpoints"), name: "viewfs://namenode/savepoints"}
    with pytest.raises(tg.ConfigurationError, match="viewfs"):
        planned(local(), tg.CheckpointConfig(**places))


def test_folder_of_savepoints_is_probed(tmp_path: Path) -> None:
    """A folder that cannot be written is found out when the job is submitted, not when a savepoint is due."""
    (tmp_path / "file").write_text("")
    checkpoints = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"), savepoints=str(tmp_path / "file" / "s"))
    with pytest.raises(tg.StorageError, match="file"):
        planned(local(), checkpoints)
