"""Who is told that others may run code on their Ray cluster."""

from __future__ import annotations

import logging

import pytest

from tidegate.actors.ray import authentication as ray_tokens
from tidegate.actors.ray.authentication import warn_if_open, why_open

TOKEN = {"RAY_AUTH_TOKEN": "t"}


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "127.0.0.1", "localhost:6379", "[::1]:6379", "::1"])
def test_nobody_is_told_of_loopback(address: str) -> None:
    """Only users of this machine get there."""
    assert why_open(address, {"RAY_AUTH_MODE": "disabled"}) is None
    assert why_open(address, {}, on_spark=True) is None


@pytest.mark.parametrize("address", ["10.0.0.7:6379", "head.example:6379", "ray://10.0.0.7:10001", "[fd00::1]:6379"])
@pytest.mark.parametrize(
    ("environ", "on_spark", "reason"),
    [
        ({}, False, None),
        ({"RAY_AUTH_MODE": "token"}, False, None),
        ({"RAY_AUTH_MODE": "TOKEN"}, False, None),
        ({"RAY_AUTH_MODE": "disabled"} | TOKEN, False, "RAY_AUTH_MODE is 'disabled'"),
        ({"RAY_AUTH_MODE": "disabled"} | TOKEN, True, "RAY_AUTH_MODE is 'disabled'"),
        ({"RAY_AUTH_MODE": ""}, False, "RAY_AUTH_MODE is ''"),
        ({}, True, "does not pass the token"),
        (TOKEN, True, None),
        ({"RAY_AUTH_TOKEN_PATH": "/secret"}, True, None),
    ],
)
def test_where_no_token_is_asked_for(address: str, environ: dict[str, str], on_spark: bool, reason: str | None) -> None:
    """The mode that was switched off, and Ray on Spark without a token that its nodes can have."""
    found = why_open(address, environ, on_spark=on_spark)

    assert found is None if reason is None else found is not None and reason in found


def test_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With the address, the reason, and what to do."""
    monkeypatch.setattr(ray_tokens, "_warned", False)
    with caplog.at_level(logging.WARNING):
        warn_if_open("10.0.0.7:6379", {})
        assert caplog.records == []
        for _ in range(2):
            warn_if_open("10.0.0.7:6379", {"RAY_AUTH_MODE": "disabled"})

    (warning,) = caplog.records
    assert "10.0.0.7:6379" in warning.getMessage()
    assert "RAY_AUTH_MODE=token" in warning.getMessage()
