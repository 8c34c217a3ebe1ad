"""Lists all settings as text: for the page `docs/settings.md`, `tidegate config check` and the job page.

`python -m tidegate.api.config > docs/settings.md` writes the page, and a test checks that it is up to date. `tidegate
config check` prints the result of `effective`, and the job page shows the result of `shown_settings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.config_file import SECTIONS, Config, variable_of
from tidegate.api.config.restart_config import KIND_OF, RESTART_KEYS, TYPE_KEYS, default_of, keys_of, restart_text
from tidegate.api.config.restrictions import FIXED, REFUSED
from tidegate.recovery.restart_strategy import RestartStrategy, default_strategy

_TITLES = {
    "checkpoints": ("Checkpoints, state and failures", "`tg.CheckpointConfig(...)`, for `execute(checkpoints=)`"),
    "job": ("A job", "`execute(...)`"),
    "buffers": ("Data plane", "`tg.DataPlaneOptions`, for `options=` of an environment"),
    "log": ("Logging", "`log_level=` of an environment"),
    "web": ("Page and REST", "`env.serve_web(...)`"),
    "topology": ("Where jobs run", "`StreamEnvironment.local`, `.ray`, `.raydp` and `.on_spark`"),
}
"""The heading of each section on the page, and how its settings are given in Python."""
_OF_STRATEGIES = {
    "restart-strategy.fixed-delay.attempts": "Restarts in a row before the job fails. A completed checkpoint starts "
    "the count again.",
    "restart-strategy.fixed-delay.delay": "The wait after each failure.",
    "restart-strategy.exponential-delay.initial-backoff": "The wait after the first failure; `initial` in Python.",
    "restart-strategy.exponential-delay.max-backoff": "No wait is longer; `maximum`.",
    "restart-strategy.exponential-delay.backoff-multiplier": "Each further failure makes the wait longer by this "
    "factor. Above 1; `multiplier`.",
    "restart-strategy.exponential-delay.reset-backoff-threshold": "After this long without a failure the next wait is "
    "the first one again; `reset_after`.",
    "restart-strategy.exponential-delay.jitter-factor": "A wait is longer or shorter at random, by up to this part "
    "of it. From 0 to 1; `jitter`.",
    "restart-strategy.exponential-delay.attempts-before-reset-backoff": "Restarts in a row before the job fails. None: "
    "no limit; `attempts`.",
    "restart-strategy.failure-rate.max-failures-per-interval": "Failures within one interval that lead to a restart. "
    "One more fails the job. At most 10,000; `failures`.",
    "restart-strategy.failure-rate.failure-rate-interval": "The length of the interval, which ends with the newest "
    "failure: it slides; `interval`.",
    "restart-strategy.failure-rate.delay": "The wait after each failure.",
}
_HOW_TO_READ = (
    "[Configuration](configuration.md) describes how settings are given, and which source takes precedence. The "
    "variable of a key is the key in capitals, with `TIDEGATE_` in front, and `_` for dots and dashes: "
    f"`{variable_of('state.checkpoints.dir')}` is `state.checkpoints.dir`. If there are two keys, Flink 2 documents "
    "the second, and both are valid. Durations are `250ms`, `10s`, `5min`, `1h`, `2d`, or a number of milliseconds; "
    "sizes `512b`, `20kb`, `64mb`, `1gb`, or a number of bytes, and `kb` is 1,024 bytes."
)


@dataclass(frozen=True, slots=True)
class Row:
    """A setting as a row of the page.

    `kind` describes its values, and `default` is its default as written in YAML. `more` is a page that explains it, or
    None.
    """

    section: str
    name: str
    keys: tuple[str, ...]
    kind: str
    default: str
    doc: str
    more: str | None


def rows() -> Iterator[Row]:
    """Yields every setting as a row of the page, in the order of the sections."""
    for section, kind in SECTIONS.items():
        defaults = kind()
        for name, each in kind.settings().items():
            default = kind.text_of(name, getattr(defaults, name))
            yield Row(section, name, each.keys, each.kind.text, default, each.doc, each.more)


def effective(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields the key of each setting, its value as written in YAML, and where it was given (or "default")."""
    for section, kind in SECTIONS.items():
        settings = getattr(config, section)
        for name, each in kind.settings().items():
            origin = config.origins[name].origin if name in config.origins else "default"
            yield each.keys[-1], kind.text_of(name, getattr(settings, name)), origin
    strategy = config.restart
    if strategy is None:
        strategy = default_strategy(periodic_checkpoints=config.checkpoints.interval is not None)
    for key, value in keys_of(strategy).items():
        same = TYPE_KEYS if key in TYPE_KEYS else (key,) if key in RESTART_KEYS else ()
        given = [config.origins[each] for each in same if each in config.origins]
        yield key, restart_text(key, value), given[0].origin if given else "default"


def shown_settings(checkpoints: CheckpointConfig, restart: RestartStrategy) -> dict[str, str]:
    """Returns the settings that are in effect for a job, including defaults, as texts by key, for its page and REST."""
    shown = {
        each.keys[-1]: CheckpointConfig.text_of(name, getattr(checkpoints, name))
        for name, each in CheckpointConfig.settings().items()
    }
    return shown | {key: restart_text(key, value) for key, value in keys_of(restart).items()}


def render() -> str:
    """Returns the page `docs/settings.md`: every setting by section, restart strategies, and the keys that are not
    supported.
    """
    parts = [f"# Settings\n\nMade by `python -m tidegate.api.config` from `tidegate/api/config/`.\n\n{_HOW_TO_READ}\n"]
    for section, (title, where) in _TITLES.items():
        parts.append(f"\n## {title}\n\nIn Python: {where}.\n\n{_table(section)}")
    parts.append(
        f"\n## Restart strategies\n\nIn Python: `tg.RestartStrategy`, for `execute(restart=)`.\n\n{_restarts()}"
    )
    parts.append(
        "\n## Flink's keys with one value\n\n"
        "These keys describe behaviour that tidegate always has. They may be given with this value; others are refused."
        "\n\n"
        "| key | value | why |\n| --- | --- | --- |\n"
    )
    parts += [f"| `{key}` | `{str(value).lower()}` | {_sentence(why)} |\n" for key, (value, why) in FIXED.items()]
    parts.append(
        "\n## Flink's keys that are refused\n\n"
        "A key that ends in a dot or a dash means all keys that begin with it and are not above.\n\n"
        "| key | why |\n| --- | --- |\n"
    )
    parts += [f"| `{key}` | {_sentence(why)} |\n" for key, why in REFUSED.items()]
    return "".join(parts)


def _table(section: str) -> str:
    lines = ["| Python | keys | value | default | what it does |", "| --- | --- | --- | --- | --- |"]
    lines += [_line(row) for row in rows() if row.section == section]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    keys = ", ".join(f"`{key}`" for key in row.keys)
    default = "none" if row.default in ("null", "{}") else f"`{row.default}`"
    more = "" if row.more is None else f" ([more]({row.more}))"
    doc = row.doc.replace("|", "\\|")
    return f"| `{row.name}` | {keys} | {row.kind} | {default} | {doc}{more} |"


def _restarts() -> str:
    lines = ["| key | default | what it does |", "| --- | --- | --- |"]
    lines.append(
        f"| `{TYPE_KEYS[-1]}` | none | `none` (`off`, `disable`), `fixed-delay`, "
        "`exponential-delay` or `failure-rate`. By default `exponential-delay` for a job with periodic "
        f"checkpoints, `none` for one without. The older key `{TYPE_KEYS[0]}` means the same. |"
    )
    for key in KIND_OF:
        default = restart_text(key, default_of(key))
        shown = "none" if default == "null" else f"`{default}`"
        lines.append(f"| `{key}` | {shown} | {_OF_STRATEGIES[key]} |")
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
