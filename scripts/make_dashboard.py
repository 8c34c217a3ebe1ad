"""Makes the dashboard for Grafana: `python scripts/make_dashboard.py > configs/grafana/tidegate.json`.

Panels are those that people know who run Flink or Spark, under the names of the registry of metrics, so that none asks
for what nobody publishes. A test compares the file with this, and asks a real Prometheus every question of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tidegate.actors.runtimes import metric_registry as m
from tidegate.actors.runtimes.metric_registry import Kind, Metric

COLUMNS = 24
ROW_HEIGHT, STAT_HEIGHT, GRAPH_HEIGHT = 1, 4, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: pairs of what it asks and how it calls the answers."""

    title: str
    meaning: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8


def of_job(metric: Metric, more: str = "") -> str:
    """The series of a metric of the chosen job; the coordinator that is there last counts."""
    return f'max by (job{more}) ({metric.exported[0]}{{job="$job"}})'


def of_vertex(how: str, metric: Metric, more: str = "") -> str:
    """The chosen vertices, all subtasks together: added up, or the greatest."""
    return f'{how} by (vertex{more}) ({metric.exported[0]}{{job="$job", vertex=~"$vertex"}})'


def growth(metric: Metric) -> str:
    """How much a total of the job has grown within the interval that a point stands for."""
    return f'max by (job) (increase({metric.exported[0]}{{job="$job"}}[$__rate_interval]))'


def added(metric: Metric) -> str:
    """What all processes of the job have done a second, added up."""
    return f'sum by (job) (rate({metric.exported[0]}{{job="$job"}}[$__rate_interval]))'


def slowest(metric: Metric) -> str:
    """What 19 of 20 values of a histogram of the job do not exceed."""
    buckets = f'rate({metric.exported[0]}{{job="$job"}}[$__rate_interval])'
    return f"histogram_quantile(0.95, sum by (le) ({buckets}))"


def stat(title: str, metric: Metric, unit: str = "short") -> Panel:
    """One number."""
    return Panel(title, metric.meaning, ((of_job(metric), title),), unit, "stat", 3)


def by_vertex(title: str, how: str, metric: Metric, unit: str) -> Panel:
    """A line for each vertex."""
    return Panel(title, metric.meaning, ((of_vertex(how, metric), "{{vertex}}"),), unit)


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Job",
        (
            Panel(
                "Status",
                m.STATUS.meaning,
                ((f"{of_job(m.STATUS, ', status')} == 1", "{{status}}"),),
                kind="stat",
                width=3,
            ),
            stat("Uptime", m.UPTIME, "ms"),
            stat("Downtime", m.DOWNTIME, "ms"),
            stat("Restarts", m.NUM_RESTARTS),
            stat("Completed checkpoints", m.COMPLETED),
            stat("Failed checkpoints", m.FAILED),
            stat("In progress", m.IN_PROGRESS),
            stat("Age of the last checkpoint", m.CHECKPOINT_AGE, "s"),
        ),
    ),
    (
        "Rows",
        (
            by_vertex("Rows in a second", "sum", m.RECORDS_IN_RATE, "rps"),
            by_vertex("Rows out a second", "sum", m.RECORDS_OUT_RATE, "rps"),
            Panel(
                "Rows in a second, by subtask",
                "How evenly the rows are spread over the subtasks",
                ((of_vertex("max", m.RECORDS_IN_RATE, ", subtask"), "{{vertex}} {{subtask}}"),),
                "rps",
            ),
            by_vertex("Bytes in a second", "sum", m.BYTES_IN_RATE, "Bps"),
            by_vertex("Bytes out a second", "sum", m.BYTES_OUT_RATE, "Bps"),
            Panel(
                "Rows in since the start",
                m.RECORDS_IN.meaning,
                ((of_vertex("sum", m.RECORDS_IN), "{{vertex}}"),),
            ),
        ),
    ),
    (
        "Back-pressure",
        (
            by_vertex("Busy, ms a second", "max", m.BUSY_TIME, "ms"),
            by_vertex("Back-pressured, ms a second", "max", m.BACK_PRESSURED_TIME, "ms"),
            by_vertex("Idle, ms a second", "min", m.IDLE_TIME, "ms"),
            by_vertex("Back-pressured subtasks", "sum", m.BACK_PRESSURED, "short"),
            by_vertex("Output that waits", "sum", m.QUEUED, "bytes"),
        ),
    ),
    (
        "Event time",
        (
            by_vertex("Lag of the watermark behind the clock", "max", m.OUTPUT_WATERMARK_LAG, "ms"),
            by_vertex("How far sources are ahead of their watermark group", "max", m.ALIGNMENT_DRIFT, "ms"),
            by_vertex("Watermark of the input", "min", m.INPUT_WATERMARK, "dateTimeAsIso"),
            by_vertex("Watermark of the output", "min", m.OUTPUT_WATERMARK, "dateTimeAsIso"),
        ),
    ),
    (
        "Checkpoints",
        (
            Panel(
                "Duration",
                m.LAST_DURATION.meaning,
                (
                    (of_job(m.LAST_DURATION), "the newest"),
                    (slowest(m.CHECKPOINT_DURATION), "no slower than this: 19 of 20"),
                ),
                "ms",
            ),
            Panel(
                "Size",
                m.LAST_FULL_SIZE.meaning,
                (
                    (of_job(m.LAST_FULL_SIZE), "all"),
                    (of_job(m.LAST_SIZE), "written"),
                    (of_job(m.LAST_IN_FLIGHT), "data in flight"),
                ),
                "bytes",
            ),
            Panel(
                "Completed and failed",
                "Checkpoints and savepoints within the interval of a point",
                ((growth(m.COMPLETED), "completed"), (growth(m.FAILED), "failed")),
            ),
            by_vertex("Start delay", "max", m.START_DELAY, "ms"),
            by_vertex("Alignment", "max", m.ALIGNMENT, "ms"),
            by_vertex("Sync part", "max", m.SYNC, "ms"),
            by_vertex("Async part", "max", m.ASYNC, "ms"),
            by_vertex("Size, all", "sum", m.SNAPSHOT_FULL_SIZE, "bytes"),
            by_vertex("Size, written", "sum", m.SNAPSHOT_SIZE, "bytes"),
        ),
    ),
    (
        "Recovery",
        (
            Panel(
                "Restarts",
                "Restarts, and coordinators that were lost, within the interval of a point",
                ((growth(m.NUM_RESTARTS), "restarts"), (growth(m.COORDINATOR_LOSSES), "coordinators")),
            ),
            Panel(
                "Restores by where the state was",
                m.RESTORES.meaning,
                ((of_vertex("sum", m.RESTORES, ", origin"), "{{vertex}} {{origin}}"),),
            ),
            Panel(
                "Last recovery",
                m.LAST_RECOVERY.meaning,
                (
                    (of_job(m.LAST_RECOVERY), "all of it"),
                    (of_job(m.LAST_RECOVERY_DEPLOYMENT), "until the deployment"),
                    (of_job(m.LAST_RECOVERY_RESTORE), "until all tasks were ready"),
                ),
                "ms",
            ),
            Panel(
                "Spare processes and nodes",
                "Spare processes that wait or start, and nodes that may be lost",
                (
                    (of_job(m.STANDBYS_READY), "ready"),
                    (of_job(m.STANDBYS_STARTING), "starting"),
                    (of_job(m.SUSPECT_NODES), "doubtful nodes"),
                ),
            ),
        ),
    ),
    (
        "State and storage",
        (
            Panel(
                "Rows of keyed state",
                m.STATE_ROWS.meaning,
                ((of_vertex("sum", m.STATE_ROWS, ", operator"), "{{operator}}"),),
            ),
            Panel(
                "Timers",
                m.STATE_TIMERS.meaning,
                ((of_vertex("sum", m.STATE_TIMERS, ", operator"), "{{operator}}"),),
            ),
            Panel(
                "Size of state",
                "Files and memtables of RocksDB; of state in memory, what its newest checkpoint refers to",
                (
                    (
                        f"{of_vertex('sum', m.STATE_SIZE)} or {of_vertex('sum', m.SNAPSHOT_FULL_SIZE)}",
                        "{{vertex}}",
                    ),
                ),
                "bytes",
            ),
            Panel(
                "Requests to S3, and repeated requests",
                m.S3_REQUESTS.meaning,
                ((added(m.S3_REQUESTS), "to S3"), (added(m.STORAGE_RETRIES), "repeated, to any storage")),
                "reqps",
            ),
        ),
    ),
    (
        "Functions",
        (
            Panel(
                "Metrics of functions",
                "What functions count of themselves, by subtask; of histograms their quantiles",
                (
                    (
                        '{__name__=~"ray_tidegate_operator_.+", job="$job", vertex=~"$vertex"}',
                        "{{__name__}} {{operator}} {{subtask}} {{quantile}}",
                    ),
                ),
                width=COLUMNS,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                **_place(len(panels), 0, y, COLUMNS, ROW_HEIGHT),
            }
        )
        y, x = y + ROW_HEIGHT, 0
        for panel in members:
            height = STAT_HEIGHT if panel.kind == "stat" else GRAPH_HEIGHT
            if x + panel.width > COLUMNS:
                y, x = y + height, 0
            panels.append(_panel(panel) | _place(len(panels), x, y, panel.width, height))
            x += panel.width
        y += STAT_HEIGHT if members[-1].kind == "stat" else GRAPH_HEIGHT
    return {
        "title": "tidegate",
        "uid": "tidegate",
        "description": "Jobs of tidegate on Ray; made by scripts/make_dashboard.py",
        "tags": ["tidegate"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _variable("job", None), _variable("vertex", "job")]},
        "panels": panels,
    }


def _place(number: int, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"id": number + 1, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for index, (query, legend) in enumerate(panel.queries)
    ]
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.kind == "stat":
        by_name = panel.title == "Status"
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "textMode": "name" if by_name else "auto",
            "colorMode": "value",
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": options,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(label: str, within: str | None) -> dict[str, Any]:
    """A choice of what there is: one job, and all or some of its vertices."""
    metric = m.UPTIME if within is None else m.BUSY_TIME
    assert metric.kind is Kind.GAUGE, "its name stands for one series"
    chosen = "" if within is None else f'{{{within}="${within}"}}'
    query = f"label_values({metric.exported[0]}{chosen}, {label})"
    many = within is not None
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": label},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": many,
        "includeAll": many,
        **({"allValue": ".*"} if many else {}),
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
