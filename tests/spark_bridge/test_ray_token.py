"""The one token of a Ray cluster in Spark's executors, and how its nodes get it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray._common.utils import load_class
from ray.util.spark.start_hook_base import RayOnSparkStartHook

from tidegate.spark_bridge import ray_on_spark
from tidegate.spark_bridge.ray_on_spark import (
    VARIABLE,
    environment_of_nodes,
    nodes_get,
    token_of_cluster,
    token_settings,
)


@pytest.fixture(autouse=True)
def nobody_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A user without a token file; gives how often Ray was told to read its environment again."""
    monkeypatch.setenv("HOME", str(tmp_path))
    told: list[str] = []
    monkeypatch.setattr(ray_on_spark, "_read_again", lambda: told.append("again"))
    return told


class HookOfTheUser(RayOnSparkStartHook):  # type: ignore[misc]
    """A hook that was there before."""

    def __init__(self) -> None:
        super().__init__(False)

    def custom_environment_variables(self) -> dict[str, str]:
        """Of the user."""
        return {"THEIRS": "1", "RAY_AUTH_MODE": "disabled"}

    def get_default_temp_root_dir(self) -> str:
        """Elsewhere."""
        return "/elsewhere"


def test_a_token_is_made_where_there_is_none() -> None:
    """Another one each time, long enough not to be guessed."""
    first, second = token_settings({}), token_settings({})
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first != second


def test_the_token_of_the_user_goes_before(tmp_path: Path) -> None:
    """From the environment, from a file that is named, or from where Ray keeps its own."""
    assert token_settings({"RAY_AUTH_TOKEN": "mine"})["RAY_AUTH_TOKEN"] == "mine"
    named = tmp_path / "token"
    named.write_text("of a file\n")
    named.chmod(0o600)
    assert token_settings({"RAY_AUTH_TOKEN_PATH": str(named)})["RAY_AUTH_TOKEN"] == "of a file"
    (tmp_path / ".ray").mkdir()
    own = tmp_path / ".ray" / "auth_token"
    own.write_text("of Ray")
    own.chmod(0o600)
    assert token_settings({})["RAY_AUTH_TOKEN"] == "of Ray"


def test_a_mode_that_was_switched_off_stays_off() -> None:
    """And all processes are told so."""
    assert token_settings({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "mine"}) == {"RAY_AUTH_MODE": "disabled"}


def test_the_process_has_the_token_as_long_as_the_cluster_lives(nobody_home: list[str]) -> None:
    """Afterwards it has what it had before; Ray reads it both times."""
    environ = {"RAY_AUTH_MODE": "TOKEN", "OTHER": "1"}
    with token_of_cluster(environ) as settings:
        assert environ == {**settings, "OTHER": "1"}
        assert len(nobody_home) == 1
    assert environ == {"RAY_AUTH_MODE": "TOKEN", "OTHER": "1"}
    assert len(nobody_home) == 2


def test_nodes_get_the_token_and_find_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what a hook of the user gives them, which does all the rest."""
    monkeypatch.setenv(VARIABLE, f"{__name__}.HookOfTheUser")
    given = environment_of_nodes(token_settings({"RAY_AUTH_TOKEN": "t"}), "/there/bin", {"PATH": "/here/bin"})
    with nodes_get(given):
        hook = load_class(os.environ[VARIABLE])()
        seen = hook.custom_environment_variables()
        assert hook.get_default_temp_root_dir() == "/elsewhere"
    assert seen["PATH"].endswith("/bin:/here/bin:/there/bin")
    assert (seen["THEIRS"], seen["RAY_AUTH_MODE"], seen["RAY_AUTH_TOKEN"]) == ("1", "token", "t")
    assert os.environ[VARIABLE] == f"{__name__}.HookOfTheUser"


def test_without_a_hook_before_there_is_none_afterwards() -> None:
    """Ray's own does what it always does."""
    with nodes_get({"A": "b"}):
        hook = load_class(os.environ[VARIABLE])()
        assert hook.custom_environment_variables() == {"A": "b"}
        assert hook.get_default_temp_root_dir() == "/tmp"
    assert VARIABLE not in os.environ
