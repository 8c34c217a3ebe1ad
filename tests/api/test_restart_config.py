"""Restart strategies under Flink's keys, and which one a job gets."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import config

import tidegate as tg
from tidegate.api.config.config_file import load_config
from tidegate.api.config.restart_config import KIND_OF, RESTART_KEYS
from tidegate.recovery.restart_strategy import default_strategy
from tidegate.storage.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text()
EVERY: dict[str, dict[str, object]] = {
    "none": {},
    "fixed-delay": {"attempts": 5, "delay": "3s"},
    "exponential-delay": {
        "initial-backoff": "10 s",
        "max-backoff": "2 min",
        "backoff-multiplier": 1.4,
        "reset-backoff-threshold": "10 min",
        "jitter-factor": 0.2,
        "attempts-before-reset-backoff": 10,
    },
    "failure-rate": {"max-failures-per-interval": 3, "failure-rate-interval": "5 min", "delay": "10 s"},
}
"""Each strategy with a value for each of its keys that is not the default."""
MEANT = {
    "none": tg.RestartStrategy.none(),
    "fixed-delay": tg.RestartStrategy.fixed_delay(5, "3s"),
    "exponential-delay": tg.RestartStrategy.exponential_delay("10s", "2min", 1.4, 0.2, "10min", 10),
    "failure-rate": tg.RestartStrategy.failure_rate(3, "5min", "10s"),
}
DEFAULTS = {
    "none": tg.RestartStrategy.none(),
    "fixed-delay": tg.RestartStrategy.fixed_delay(1, "1s"),
    "exponential-delay": tg.RestartStrategy.exponential_delay(),
    "failure-rate": tg.RestartStrategy.failure_rate(1, "1min", "1s"),
}


@pytest.mark.parametrize("kind", EVERY)
def test_every_key_gives_its_argument(kind: str) -> None:
    """Flat or nested, with the older key of the type or the newer one."""
    assert {f"restart-strategy.{kind}.{key}" for key in EVERY[kind]} == {k for k, of in KIND_OF.items() if of == kind}
    nested = {"restart-strategy": {"type": kind, kind: EVERY[kind]}}
    flat = {"restart-strategy": kind} | {f"restart-strategy.{kind}.{key}": v for key, v in EVERY[kind].items()}
    assert load_config(nested).restart == load_config(flat).restart == MEANT[kind]


@pytest.mark.parametrize("kind", EVERY)
def test_the_defaults_are_those_of_flink(kind: str) -> None:
    """A type alone is enough."""
    assert load_config({"restart-strategy.type": kind}).restart == DEFAULTS[kind]


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("off", "none"),
        (False, "none"),
        ("disable", "none"),
        ("FixedDelay", "fixed-delay"),
        ("failurerate", "failure-rate"),
        ("EXPONENTIAL_DELAY", "exponential-delay"),
        ("exponentialdelay", "exponential-delay"),
    ],
)
def test_a_type_may_be_written_as_flink_does(written: object, kind: str) -> None:
    """YAML reads `off` as false, which means the same here."""
    assert load_config({"restart-strategy.type": written}).restart == DEFAULTS[kind]


def test_without_a_type_the_default_strategy_is_meant() -> None:
    """As in Flink, whose default is exponential delay; where nothing is said, the checkpoints decide."""
    found = load_config({"restart-strategy.exponential-delay.max-backoff": "5min"}).restart
    assert found == tg.RestartStrategy.exponential_delay(maximum="5min")
    assert load_config({}).restart is None


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"restart-strategy.type": "sometimes"}, "'sometimes' is none of 'none', 'fixed-delay'"),
        ({"restart-strategy": "none", "restart-strategy.type": "none"}, "are one setting"),
        ({"restart-strategy.fixed-delay.attempts": 3}, "type is 'exponential-delay': .* choose 'fixed-delay'"),
        ({"restart-strategy.type": "none", "restart-strategy.failure-rate.delay": 1}, "choose 'failure-rate'"),
        ({"restart-strategy.exponential-delay.jitter-factor": 2}, r"restart-strategy.exponential-delay: .*jitter=2"),
        ({"restart-strategy.exponential-delay.max-backof": 2}, "nearest known one is .*max-backoff"),
        ({"restart-strategy.type": None}, "None.* is none of"),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, object], complaint: str) -> None:
    """The error names the key; nothing is ignored."""
    with pytest.raises(ConfigurationError, match=complaint):
        load_config(settings)


def test_which_strategy_a_job_gets(tmp_path: Path) -> None:
    """That of the call; else that of the environment's settings; else the default for its checkpoints."""

    def planned(settings: dict[str, object], interval: str | None, restart: tg.RestartStrategy | None) -> object:
        env = tg.StreamEnvironment.local(1, config=settings)
        env.from_batches(pa.table({"x": [1]})).collect()
        return env.plan("job", checkpoints=config(tmp_path, interval=interval), restart=restart).spec.restart

    rate = {"restart-strategy.type": "failure-rate"}
    own = tg.RestartStrategy.fixed_delay(7, 7)
    assert planned(rate, "1s", own) == own
    assert planned(rate, None, None) == DEFAULTS["failure-rate"]
    assert planned({}, "1s", None) == default_strategy(periodic_checkpoints=True)
    assert planned({}, None, None) == default_strategy(periodic_checkpoints=False)


def test_the_default_file_spells_out_the_default() -> None:
    """configs/default.yaml says what holds without it for a job that takes checkpoints."""
    assert load_config(ROOT / "configs" / "default.yaml").restart == default_strategy(periodic_checkpoints=True)


def test_the_page_has_every_key_with_its_default() -> None:
    """docs/settings.md: each key has a row; writing the defaults of a type down changes nothing."""
    rows = dict(re.findall(r"^\| `(restart-strategy[\w.-]*)` \| (none|`[^`]+`) \|", PAGE, re.MULTILINE))
    assert rows.keys() == set(KIND_OF) | {"restart-strategy.type"}
    assert set(re.findall(r"restart-strategy(?:\.[a-z][\w-]*)*", PAGE)) <= set(RESTART_KEYS)
    for kind, default in DEFAULTS.items():
        given = {key: _value(rows[key]) for key, of in KIND_OF.items() if of == kind and rows[key] != "none"}
        assert load_config({"restart-strategy.type": kind, **given}).restart == default


def _value(written: str) -> object:
    text = written.strip("`")
    return float(text) if "." in text else int(text) if text.isdigit() else text
