"""Renders the registry of metrics as the page `docs/metrics.md`.

`python -m tidegate.actors.runtimes.metrics_page > docs/metrics.md` writes it. A test compares the page with it.
"""

from __future__ import annotations

from tidegate.actors.runtimes.job_metrics import STATUSES
from tidegate.actors.runtimes.metric_registry import (
    JOB_METRICS,
    OPERATOR_TAGS,
    PROCESS_METRICS,
    TASK_METRICS,
    Kind,
    Metric,
)
from tidegate.operators.user_metrics import QUANTILES


def render() -> str:
    """The page: every metric with its names, its kind, its tags and its meaning."""
    statuses = ", ".join(f"`{status}`" for status in STATUSES)
    return (
        "# Metrics\n\n"
        "Made by `python -m tidegate.actors.runtimes.metrics_page` from "
        "`tidegate/actors/runtimes/metric_registry.py`.\n\n"
        "A job on Ray publishes these through `ray.util.metrics`, so they are where Ray's own metrics are: Prometheus "
        "scrapes the metrics agent of each node, and `/tmp/ray/prom_metrics_service_discovery.json` on the head node "
        "names them all. Ray puts `ray_` in front of each name, and `_total` behind those of counters. Processes write "
        "about once a second, never for each row; Ray collects from them every 10 s. All of it costs a task some "
        "0.05 % of a core, and a busy job nothing that can be told from chance "
        "([measured](../benchmarks/README.md#figures)).\n\n"
        "Names are Flink's in snake case, units last. Ray's labels are in ASCII: other characters in the name of a job "
        "or a step are escaped as Python writes them, so that `Zählung` is `Z\\xe4hlung`.\n\n"
        "## Prometheus, alerts and Grafana\n\n"
        "[`configs/prometheus.yaml`](../configs/prometheus.yaml) is a configuration for Prometheus on the head node: "
        "`prometheus --config.file=configs/prometheus.yaml`. Ray writes the file that it reads where its dashboard "
        "runs (`include_dashboard=True`). Whoever has a Prometheus already takes its scrape job over, with "
        "`honor_labels: true`: without that Prometheus calls the tag `job` `exported_job`, also with the configuration "
        "that Ray writes.\n\n"
        "[`configs/alerts.yaml`](../configs/alerts.yaml) has alert rules: a job that fails, does not run or restarts "
        "again and again; checkpoints that fail, take long, take longer and longer, or do not come, which is how a job "
        "that hangs shows; event time that falls behind; tasks that are held up. "
        "`scripts/debian_program.py prometheus` gets `prometheus` and `promtool` from Debian without root, to try "
        "them.\n\n"
        "[`configs/grafana/tidegate.json`](../configs/grafana/tidegate.json) is a dashboard for Grafana: *Dashboards, "
        "New, Import*, then choose the job. It has rows for the job, rows and bytes, back-pressure, event time, "
        "checkpoints, recovery, state and storage, and functions. Where Ray's dashboard embeds Grafana, put it into "
        "the folder that `RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR` names. Each of its queries is tested against a "
        "real Prometheus and a real job; no package of Grafana itself could be had for a test.\n\n"
        "## Of a job\n\n"
        "The coordinator writes them. Gauges are there from the first second of a job on, with 0 where nothing has "
        "happened; their totals come from the event log, so they go on when another coordinator takes over. Values "
        f"of `status`: {statuses}.\n\n"
        f"{_table(JOB_METRICS)}\n"
        "## Of a task\n\n"
        "The process that runs a task writes them. `vertex` and `subtask` say which task that is, also in a spare "
        "process that has taken it over, whose actor keeps its name. Counters begin with the first thing to count, "
        "and are counted over all attempts of a process. A process that has given a task up shows it at rest: rates "
        "and lags are 0.\n\n"
        f"{_table(TASK_METRICS)}\n"
        "## Of a process\n\n"
        "Each process that has a task of the job, and that of its coordinator, writes these; Ray's tags tell processes "
        "apart.\n\n"
        f"{_table(PROCESS_METRICS)}\n"
        "## Of a function\n\n"
        "What a function counts of itself with [`context.metrics`](process-functions.md#metrics-of-your-own) is a "
        "gauge `ray_tidegate_operator_<name>` with the tags "
        f"{', '.join(f'`{tag}`' for tag in OPERATOR_TAGS)}. `operator` is the name of the step, and `operator_id` its "
        "uid. A histogram has a series for each `quantile` of its newest values "
        f"({', '.join(str(share) for share in QUANTILES)}), and `ray_tidegate_operator_<name>_count`; for all others "
        "that tag is empty. They begin with 0 in each attempt. Steps with event time count so as well: the name "
        "`numLateRecordsDropped` is that of rows for which windows, joins and the like were over. Sources and steps "
        "with `errors_to=` count `numRecordsInErrors`, rows that cannot be read or for which a function fails. Sources "
        "count `numRecordsLost`, records that were deleted before they were read. Count windows count "
        "`numRecordsLeft`, rows in windows that are not full when the input ends.\n\n"
        "## In a program\n\n"
        "`job.vertices()` gives the figures of tasks to a script, on every runtime: for each vertex, and each of its "
        "subtasks, rows and bytes, rates, busy, back-pressured and idle time, and watermarks. Totals are those of the "
        "attempt. `job.user_metrics()` has what functions count, `job.statistics()` the [checkpoints](checkpoints.md), "
        "`job.progress()` the job at a glance.\n"
    )


def _table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| name in Prometheus | kind | tags | Flink's name | what it is |", "| --- | --- | --- | --- | --- |"]
    for metric in metrics:
        histogram = metric.kind is Kind.HISTOGRAM
        name = f"ray_{metric.name}" if histogram else metric.exported[0]
        tags = ", ".join(f"`{tag}`" for tag in metric.tags)
        flink = f"`{metric.flink}`" if metric.flink else ""
        lines.append(f"| `{name}` | {metric.kind.value} | {tags} | {flink} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
