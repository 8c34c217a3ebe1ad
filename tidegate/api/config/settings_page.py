"""Renders all settings as the page `docs/settings.md`.

`python -m tidegate.api.config > docs/settings.md` calls it; a test compares the page with it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from tidegate.api.config.restrictions import FIXED, REFUSED
from tidegate.api.config.sections.restart_config import KIND_OF, TYPE_KEYS, default_of
from tidegate.api.config.sections.section import Section
from tidegate.api.config.sections.setting_names import variable_of
from tidegate.api.config.settings_table import SECTIONS, Row, restart_text, rows

_TITLES = {
    "checkpoints": "Checkpoints, state and failures",
    "job": "A job",
    "buffers": "Data plane",
    "log": "Logging",
    "web": "Page and REST",
    "topology": "Where jobs run",
}
_MORE = {
    "unaligned": "checkpoints.md",
    "incremental": "checkpoints.md",
    "undo_memory": "failures.md#what-survivors-do",
    "checkpoint_storage": "state.md#what-a-checkpoint-writes",
    "debloat": "batches.md#how-much-is-in-flight",
    "failover": "recovery.md#what-restarts",
    "keep_events": "state-as-data.md",
    "heartbeat_interval": "failures.md#processes-that-hang",
    "adoption_timeout": "failures.md#the-coordinator-is-lost",
    "deploy_timeout": "troubleshooting.md#it-is-never-ready",
    "standbys": "failures.md#spare-processes",
    "slot_request_timeout": "failures.md#nodes-that-are-lost",
    "retention": "configuration.md#retention",
    "placement": "placement.md",
    "log_level": "logging.md",
    "log_format": "logging.md",
    "log_rows": "logging.md#values-of-users",
    "target": "topologies.md",
    "progress": "sources.md",
    "local_aggregation": "aggregates.md#combined-before-they-are-sent",
    "slot_sharing": "placement.md#without-slot-sharing",
}
"""Setting to the page that says more."""
_OF_STRATEGIES = {
    "restart-strategy.fixed-delay.attempts": "Restarts in a row before the job fails. A completed checkpoint starts "
    "the count again.",
    "restart-strategy.fixed-delay.delay": "The wait after each failure.",
    "restart-strategy.exponential-delay.initial-backoff": "The wait after the first failure; `initial` in Python.",
    "restart-strategy.exponential-delay.max-backoff": "No wait is longer; `maximum`.",
    "restart-strategy.exponential-delay.backoff-multiplier": "Each further failure makes the wait longer by this "
    "factor. Above 1; `multiplier`.",
    "restart-strategy.exponential-delay.reset-backoff-threshold": "After so long without a failure the next wait is "
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
    "How settings are given, and which of several counts, is in [configuration](configuration.md). The variable of a "
    "key is the key in capitals, `TIDEGATE_` in front, `_` for dots and dashes: "
    f"`{variable_of('state.checkpoints.dir')}` is `state.checkpoints.dir`. Where there are two keys, the second is the "
    "one that Flink 2 documents, and both hold. Durations are `250ms`, `10s`, `5min`, `1h`, `2d`, or a number of "
    "milliseconds; sizes `512b`, `20kb`, `64mb`, `1gb`, or a number of bytes, and `kb` is 1,024 bytes."
)


def render() -> str:
    """The page: every setting by section, restart strategies, and what is refused."""
    parts = [f"# Settings\n\nMade by `python -m tidegate.api.config` from `tidegate/api/config/`.\n\n{_HOW_TO_READ}\n"]
    for section, (kind, where) in SECTIONS.items():
        parts.append(f"\n## {_TITLES[section]}\n\nIn Python: {where}.\n\n{_table(section, kind)}")
    parts.append(
        f"\n## Restart strategies\n\nIn Python: `tg.RestartStrategy`, for `execute(restart=)`.\n\n{_restarts()}"
    )
    parts.append(
        "\n## Flink's keys with one value\n\n"
        "These stand for what tidegate always does. They may be given with that value; another one is refused.\n\n"
        "| key | value | why |\n| --- | --- | --- |\n"
    )
    parts += [f"| `{key}` | `{str(value).lower()}` | {_sentence(why)} |\n" for key, (value, why) in FIXED.items()]
    parts.append(
        "\n## Flink's keys that are refused\n\n"
        "A key that ends in a dot or a dash stands for all that begin with it and are not above.\n\n"
        "| key | why |\n| --- | --- |\n"
    )
    parts += [f"| `{key}` | {_sentence(why)} |\n" for key, why in REFUSED.items()]
    return "".join(parts)


def _table(section: str, kind: type[Section]) -> str:
    said = meanings(kind)
    lines = ["| Python | keys | value | default | what it does |", "| --- | --- | --- | --- | --- |"]
    lines += [_line(row, said[row.name]) for row in rows() if row.section == section]
    return "\n".join(lines) + "\n"


def _line(row: Row, meaning: str) -> str:
    keys = ", ".join(f"`{key}`" for key in row.keys)
    default = "none" if row.default in ("null", "{}") else f"`{row.default}`"
    more = f" ([more]({_MORE[row.name]}))" if row.name in _MORE else ""
    return f"| `{row.name}` | {keys} | {row.kind} | {default} | {meaning}{more} |"


def _restarts() -> str:
    lines = ["| key | default | what it does |", "| --- | --- | --- |"]
    lines.append(
        f"| `{TYPE_KEYS[-1]}` | none | `none` (`off`, `disable`), `fixed-delay`, "
        "`exponential-delay` or `failure-rate`. Where nothing is said: `exponential-delay` for a job with periodic "
        f"checkpoints, `none` for one without. The older key `{TYPE_KEYS[0]}` means the same. |"
    )
    for key in KIND_OF:
        default = restart_text(key, default_of(key))
        shown = "none" if default == "null" else f"`{default}`"
        lines.append(f"| `{key}` | {shown} | {_OF_STRATEGIES[key]} |")
    return "\n".join(lines) + "\n"


def meanings(kind: type[Section]) -> dict[str, str]:
    """What each field of a section says of itself, in one line."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    return {name: " ".join(text.split()).replace("|", "\\|") for name, text in _documented(tree)}


def _documented(tree: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, said in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(said, ast.Expr):
            yield field.target.id, str(ast.literal_eval(said.value))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
