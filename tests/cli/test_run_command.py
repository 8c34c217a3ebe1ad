"""`tidegate run` starts programs, and ends as they end; `tidegate config check` shows what holds."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandRunner
from local_jobs import GatedSource, opening
from typer.testing import Result

import tidegate as tg
from tidegate.cli.main import app

PROGRAM = """
import os, sys
import pyarrow as pa
import tidegate as tg

ROWS = pa.table({"x": range(10)})

def streams(env):
    env.from_batches(ROWS).to_table(os.environ["OUT"])

def executes(env):
    streams(env)
    env.execute("by itself")

def own():
    with tg.StreamEnvironment.from_config() as env:
        streams(env)
        env.execute("its own").wait()
    print("parallelism", env.parallelism, "arguments", sys.argv[1:])

def nothing(env):
    pass

def options():
    import json
    from tidegate.api.config.config_file import load_config
    print(json.dumps(load_config().topology.ray_options))

def forgets(env):
    executes(env)
    streams(env)

def fails(env):
    env.from_batches(ROWS).map(lambda row: row["missing"], schema=ROWS.schema).to_table(os.environ["OUT"])

def gives_up(env):
    env.from_rate(1).to_table(os.environ["OUT"])
    env.execute("given up").cancel()

def raises(env):
    raise ValueError("no luck")

def two(env, other):
    pass
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a program, in the working directory."""
    path = tmp_path / "program_to_run.py"
    path.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("TIDEGATE_STATE_CHECKPOINTS_DIR", str(tmp_path / "checkpoints"))
    yield path
    sys.modules.pop(path.stem, None)


def run(*arguments: str) -> Result:
    """Run a command."""
    return CommandRunner().invoke(app, ["run", *arguments])


@pytest.mark.parametrize("reference", ["program_to_run.py:streams", "program_to_run:streams"])
def test_what_a_function_has_made_is_executed(reference: str, tmp_path: Path) -> None:
    """Under its name; the command waits for the end."""
    done = run(reference)
    assert done.exit_code == 0, done.output
    assert tg.open_table(str(tmp_path / "out")).to_arrow().num_rows == 10
    assert "streams (streams-" in done.stderr
    assert done.stderr.rstrip().endswith("is finished")


def test_a_function_may_execute_itself() -> None:
    """It is not executed a second time."""
    done = run("program_to_run:executes")
    assert (done.exit_code, done.stderr.count("is finished")) == (0, 1)
    assert "by itself (by-itself-" in done.stderr


def test_a_function_may_make_its_own_environment(tmp_path: Path) -> None:
    """File and options of the command hold there as well; arguments are where Python has them."""
    (tmp_path / "job.yaml").write_text("parallelism.default: 2\npipeline.max-parallelism: 16\n")
    before = sys.argv[:], sys.path[:]
    done = run("program_to_run:own", "--config", "job.yaml", "--set", "parallelism.default=3", "--", "--day", "7")
    assert (done.exit_code, done.stdout) == (0, "parallelism 3 arguments ['--day', '7']\n")
    assert before == (sys.argv, sys.path)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["program_to_run"], 2, "does not name a function: write MODULE:FUNC or FILE.py:FUNC"),
        (["no_program:streams"], 2, "there is no module 'no_program'"),
        (["no_program.py:streams"], 2, "no_program.py does not exist"),
        (["program_to_run:no"], 2, "has no function 'no'"),
        (["program_to_run:two"], 2, "two takes 2 arguments"),
        (["program_to_run:nothing"], 2, "nothing made no stream"),
        (["program_to_run:forgets"], 2, "forgets made streams after its last execute"),
        (["program_to_run:streams", "--config", "none.yaml"], 2, "none.yaml: No such file"),
        (["program_to_run:streams", "--set", "heartbeat.interval=1x"], 2, "--set heartbeat.interval: .*'x'"),
        (["program_to_run:streams", "--set", "x=1"], 2, "unknown setting 'x'"),
        (["program_to_run:gives_up"], 1, "given up: cancelled from outside"),
        (["program_to_run:fails"], 1, "job 'fails' failed: .*missing"),
    ],
)
def test_the_exit_code_says_what_was_wrong(arguments: list[str], code: int, complaint: str) -> None:
    """2: usage or configuration; 1: the job. One sentence, no traceback."""
    done = run(*arguments)
    assert done.exit_code == code
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert re.search(complaint, line), line


def test_an_error_of_the_program_is_shown_whole() -> None:
    """It is the user's, with its traceback."""
    done = run("program_to_run:raises")
    assert done.exit_code == 1
    assert isinstance(done.exception, ValueError)


@pytest.mark.parametrize(
    ("number", "how", "code", "end"),
    [
        (signal.SIGINT, "cancel", 130, "is cancelled (SIGINT)"),
        (signal.SIGTERM, "cancel", 143, "is cancelled (SIGTERM)"),
        (signal.SIGINT, "savepoint", 130, "has a savepoint: "),
    ],
)
def test_a_signal_ends_the_job_first(
    number: int, how: str, code: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the option says; the handlers of the process are back afterwards."""
    before = signal.getsignal(number)
    with opening(GatedSource(40, gates=[10])) as source:

        def hold(env: tg.StreamEnvironment) -> None:
            env.from_source(source, uid="in").to_table(str(tmp_path / "held"))
            env.from_rate(100, uid="endless").to_table(str(tmp_path / "endless"))  # else the job may end first

        module = type(sys)("held_program")
        module.hold = hold  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "held_program", module)

        def interrupt() -> None:
            source.await_gate(10)
            os.kill(os.getpid(), number)
            if how == "savepoint":
                source.open_all()

        thread = threading.Thread(target=interrupt)
        thread.start()
        savepoints = f"state.savepoints.dir={tmp_path}/savepoints"
        done = run("held_program:hold", "--on-interrupt", how, "--set", savepoints, "--set", "pipeline.name=held")
        thread.join()
    assert done.exit_code == code, done.output
    assert end in done.stderr
    assert signal.getsignal(number) is before


def check(*arguments: str) -> Result:
    """Run `tidegate config check`."""
    return CommandRunner().invoke(app, ["config", "check", *arguments])


def test_check_shows_who_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting, or those that are not by default; as YAML, or as JSON."""
    path = tmp_path / "job.yaml"
    path.write_text("heartbeat:\n  interval: 2s\nrestart-strategy.type: none\n")
    monkeypatch.setenv("TIDEGATE_HEARTBEAT_TIMEOUT", "1min")
    monkeypatch.delenv("TIDEGATE_STATE_CHECKPOINTS_DIR")
    shown = check(str(path), "--set", "execution.target=ray", "--changed")
    assert (shown.exit_code, shown.stdout.splitlines()) == (
        0,
        [
            f"heartbeat.interval: 2s  # {path}:2",
            "heartbeat.timeout: 1min  # variable TIDEGATE_HEARTBEAT_TIMEOUT",
            "execution.target: ray  # --set execution.target",
            f"restart-strategy.type: none  # {path}:3",
        ],
    )
    everything = [json.loads(line) for line in check(str(path), "--json").stdout.splitlines()]
    assert {"key": "execution.checkpointing.mode", "value": "exactly_once", "origin": "default"} in everything


def test_check_refuses_a_wrong_file(tmp_path: Path) -> None:
    """Exit code 2, one sentence, the line."""
    path = tmp_path / "job.yaml"
    path.write_text("heartbeat:\n  intervall: 2s\n")
    refused = check(str(path))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"Error: {path}:2: unknown setting 'heartbeat.intervall'")


def test_a_runtime_environment_is_that_of_ray(tmp_path: Path) -> None:
    """As JSON, or as a file in YAML; it is an option of Ray beside others, for whatever environment is made."""
    (tmp_path / "env.yaml").write_text("env_vars:\n  A: b\npy_modules: [lib]\n")
    (tmp_path / "job.yaml").write_text("ray.options: {num_cpus: 2}\n")
    for given, expected in (
        ('{"env_vars": {"A": "b"}}', {"env_vars": {"A": "b"}}),
        ("env.yaml", {"env_vars": {"A": "b"}, "py_modules": ["lib"]}),
    ):
        done = run("program_to_run:options", "--config", "job.yaml", "--runtime-env", given)
        assert (done.exit_code, json.loads(done.stdout)) == (0, {"num_cpus": 2, "runtime_env": expected})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("none.yaml", "--runtime-env none.yaml: cannot be read: .*No such file"),
        ("{1: ", "neither JSON nor YAML"),
        ("list.yaml", "list.yaml: is not a mapping such as"),
        ('{"env_vars": {}}', "--runtime-env is for Ray, and execution.target is local"),
    ],
)
def test_a_wrong_runtime_environment_is_wrong_usage(given: str, complaint: str, tmp_path: Path) -> None:
    """It ends with the reason before the program runs; what Ray would not see is refused."""
    (tmp_path / "list.yaml").write_text("[1]\n")
    done = run("program_to_run:streams", "--runtime-env", given)
    assert done.exit_code == 2
    assert re.search(complaint, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["ray", "raydp", "on_spark"])
def test_a_name_that_ray_lacks_is_refused_before_anything_starts(target: str) -> None:
    """Ray itself would ignore it."""
    given = ["--runtime-env", '{"envvars": {}}', "--set", f"execution.target={target}"]
    done = run("program_to_run:streams", *given)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "runtime_env: Ray has no field envvars; give one of" in done.stderr


def test_a_check_finds_the_restore_in_the_settings() -> None:
    """`--restore` is short for a setting, which `--check` takes as well. Without either there is nothing to check."""
    assert run("program_to_run:streams").exit_code == 0
    key = "execution.state-recovery.path"
    by_option, by_key = (
        run("program_to_run:streams", "--check", *given)
        for given in (["--restore", "latest"], ["--set", f"{key}=latest"])
    )
    assert by_option.stdout == by_key.stdout
    assert "restore from" in by_key.output, by_key.output
    without = run("program_to_run:streams", "--check")
    assert without.exit_code == 2
    assert f"no restore is given; name its savepoint or checkpoint with --restore PATH, or with --set {key}" in (
        " ".join(without.stderr.split())
    )
