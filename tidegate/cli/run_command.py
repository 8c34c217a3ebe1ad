"""`tidegate run MODULE:FUNC`: starts a program under a configuration, waits for its jobs, and ends as they do.

Rules:

- A function that takes an argument gets an environment, made as `execution.target` says. What it has not executed
  itself is executed when it returns, under its name. A function without arguments makes its own environment; its
  settings are those of the command all the same.
- Ctrl-C and SIGTERM end the jobs of that environment as `--on-interrupt` says, once; the second one ends the program at
  once. A detached job is left alone.
- Exit codes: 0 all jobs have finished, or were stopped with a savepoint; 1 one has failed or was cancelled, or the
  program has raised an error; 2 wrong usage or configuration; 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidegate.cli.config_command import SetOption
from tidegate.storage.errors import ConfigurationError, JobFailedError, TidegateError

# A command imports what it needs when it runs, so that `--help` is fast.

if TYPE_CHECKING:
    from tidegate.api.config.sources import Given
    from tidegate.api.environment import StreamEnvironment
    from tidegate.api.submission.job import Job

FAILED, WRONG_USAGE, SIGNALLED = 1, 2, 128
END_TIMEOUT = "1min"
"""For so long an interrupted job may take to be cancelled."""
OnInterrupt = Literal["cancel", "savepoint"]


class Interrupted(KeyboardInterrupt):
    """A signal that asks the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_command(
    program: Annotated[str, typer.Argument(metavar="MODULE:FUNC", help="Or FILE.py:FUNC.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The program finds them in sys.argv.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A YAML file with settings; else TIDEGATE_CONFIG.")
    ] = None,
    settings: SetOption = None,
    on_interrupt: Annotated[
        OnInterrupt,
        typer.Option("--on-interrupt", help="What Ctrl-C and SIGTERM do: cancel jobs, or stop them with a savepoint."),
    ] = "cancel",
    restore: Annotated[
        str | None,
        typer.Option("--restore", metavar="PATH", help='Start from a checkpoint or savepoint, or from "latest".'),
    ] = None,
    runtime_env: Annotated[
        str | None,
        typer.Option("--runtime-env", metavar="FILE|JSON", help="Ray's runtime environment: a YAML file, or JSON."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only report what --restore would do. Nothing is started; Ray is not needed."),
    ] = False,
) -> None:
    """Run a program that makes streams, and wait for its jobs.

    The function gets an environment, if it takes an argument. Ctrl-C cancels the jobs. Exit codes: 0 finished, 1 failed
    or cancelled, 2 wrong usage or configuration, 130 after Ctrl-C, 143 after SIGTERM.
    """
    from tidegate.api.config.config_file import load_config
    from tidegate.api.config.sources import of_command_line, of_words
    from tidegate.cli.loaded_functions import load_function

    try:
        words = [*(settings or []), *([] if restore is None else [f"execution.state-recovery.path={restore}"])]
        if check and restore is None:
            raise ConfigurationError("--check reports on a restore; name it with --restore PATH")
        layer = [*of_words(words), *([] if runtime_env is None else [_runtime_env(runtime_env)])]
        with of_command_line(config, layer), _as_main_program(program, arguments or []):
            settings_in_effect = load_config()  # Before the program is loaded, which may take long.
            job_settings = settings_in_effect.job
            function = load_function(program)
            if runtime_env is not None and settings_in_effect.topology.target == "local":
                _refuse_in_one_process(function)
            elif runtime_env is not None and not check:
                _check_runtime_env(settings_in_effect.topology.runtime_env)
            _send_by_value(function, program)
            with _signals():
                if check:
                    _check(function, job_settings.name, restore)
                elif _takes_an_environment(function):
                    _run_in_environment(function, job_settings.name or function.__name__, on_interrupt)
                else:
                    function()
    except Interrupted as stopped:
        raise typer.Exit(SIGNALLED + stopped.number) from stopped
    except TidegateError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigurationError) else FAILED) from error


def _run_in_environment(function: Callable[..., Any], name: str, on_interrupt: OnInterrupt) -> None:
    from tidegate.api.environment import StreamEnvironment

    jobs: list[tuple[Job, bool]] = []
    with StreamEnvironment.from_config() as env:
        env._submitted = lambda job, detached: jobs.append((job, detached))
        try:
            function(env)
            _execute_the_rest(env, name, bool(jobs))
            cancelled = [job.name for job, detached in jobs if _ended(job, detached) == "cancelled"]
        except Interrupted as stopped:
            _end([job for job, detached in jobs if not detached], on_interrupt, stopped)
            raise
    if cancelled:
        raise JobFailedError(f"somebody has cancelled {', '.join(cancelled)}")


def _runtime_env(given: str) -> Given:
    """The setting that `--runtime-env` stands for: a YAML or JSON file, or JSON itself. ConfigurationError."""
    import yaml

    from tidegate.api.config.sources import Given

    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--runtime-env {given}: cannot be read: {error}") from error
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--runtime-env {given}: neither JSON nor YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"--runtime-env {given}: holds no mapping such as {{working_dir: ., env_vars: {{A: b}}}}"
        )
    return Given("ray.options", {"runtime_env": found}, "--runtime-env")


def _refuse_in_one_process(function: Callable[..., Any]) -> None:
    """Raise ConfigurationError for a runtime environment where Ray does not run. A function may make Ray by itself."""
    if _takes_an_environment(function):
        raise ConfigurationError(
            "--runtime-env is for Ray, and execution.target is local: add --set execution.target=ray"
        )


def _check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a runtime environment that Ray does not take. With Spark, Ray would ignore names."""
    from tidegate.storage.extras import need

    need("--runtime-env", "ray")
    from tidegate.actors.ray.driver.connection import check_runtime_env

    check_runtime_env(runtime_env)


class _Executed(BaseException):
    """The program has called `execute` while a restore was only to be checked."""


def _check(function: Callable[..., Any], name: str | None, restore: str | None) -> None:
    """Print what a restore would do with the streams that a function makes, in an environment without Ray."""
    from tidegate.api.environment import StreamEnvironment

    if not _takes_an_environment(function):
        raise ConfigurationError(
            f"--check: {function.__name__} makes its own environment; let it take one as its argument, or call "
            "env.check_restore(path) in the program"
        )
    assert restore is not None, "a check without a restore"
    asked: list[dict[str, Any]] = []

    class Checked(StreamEnvironment):
        """An environment that executes nothing, and remembers what it was asked for."""

        def execute(self, name: str | None = None, **options: Any) -> Job:
            asked.append({"name": name, **options})
            raise _Executed

    with Checked.local() as env:
        with suppress(_Executed):
            function(env)
        said = asked[0] if asked else {}
        report = env.check_restore(
            restore,
            said.get("name") or name or function.__name__,
            checkpoints=said.get("checkpoints"),
            allow_non_restored_state=said.get("allow_non_restored_state"),
        )
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _execute_the_rest(env: StreamEnvironment, name: str, executed: bool) -> None:
    """Execute what the function has made and not executed."""
    if not env._program.nodes:
        if not executed:
            raise ConfigurationError(f"{name} has made no stream in the environment that it was given")
        return
    if executed:
        raise ConfigurationError(f"{name} has made streams after its last execute(); execute them, or leave them out")
    env.execute(name)


def _ended(job: Job, detached: bool) -> str:
    """Wait for a job, unless it goes on without this process; its status then."""
    typer.echo(f"{job.name} ({job.job_id}) is {job.status()}", err=True)
    if detached:
        return job.status()
    status = job.wait()
    typer.echo(f"{job.name} ({job.job_id}) is {status}", err=True)
    return status


def _end(jobs: list[Job], on_interrupt: OnInterrupt, why: Interrupted) -> None:
    """End the jobs that are not over; the first one that cannot be ended does not keep the others."""
    for job in jobs:
        if job.status() in ("finished", "failed", "cancelled", "suspended"):
            continue
        try:
            if on_interrupt == "savepoint":
                typer.echo(f"{job.name} ({job.job_id}) has a savepoint: {job.stop()}", err=True)
            else:
                job.cancel()
                typer.echo(f"{job.name} ({job.job_id}) is {job.wait(END_TIMEOUT)} ({why})", err=True)
        except TidegateError as error:
            typer.echo(f"{job.name} ({job.job_id}): {error}", err=True)


def _send_by_value(function: Callable[..., Any], program: str) -> None:
    """Processes on other machines have no such file: they get what is defined in it, as of a script."""
    import cloudpickle

    module = inspect.getmodule(function)
    if program.rpartition(":")[0].endswith(".py") and module is not None:
        cloudpickle.register_pickle_by_value(module)


def _takes_an_environment(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind in kinds and each.default is inspect.Parameter.empty
    ]
    if len(required) > 1:
        raise ConfigurationError(
            f"{function.__name__} takes {len(required)} arguments; it gets an environment, and the rest is in sys.argv"
        )
    return bool(required)


@contextmanager
def _as_main_program(program: str, arguments: list[str]) -> Iterator[None]:
    """What `python` does for a program: its folder is where modules are looked for, and sys.argv is its own."""
    place = program.rpartition(":")[0]
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else os.getcwd()
    before_path, before_argv = sys.path[:], sys.argv[:]
    sys.path.insert(0, folder)
    sys.argv = [place, *arguments]
    try:
        yield
    finally:
        sys.path[:], sys.argv = before_path, before_argv


@contextmanager
def _signals() -> Iterator[None]:
    """Signals that ask the program to end raise Interrupted in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
