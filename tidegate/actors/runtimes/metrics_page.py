"""Prints the page `docs/metrics.md` from the registry of metrics.

Run `python -m tidegate.actors.runtimes.metrics_page > docs/metrics.md`. A test compares the page with the output.
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
    """Returns the page `docs/metrics.md`: every metric with its names, its kind, its tags and its meaning."""
    statuses = ", ".join(f"`{status}`" for status in STATUSES)
    return (
        "# Metrics\n\n"
        "Made by `python -m tidegate.actors.runtimes.metrics_page` from "
        "`tidegate/actors/runtimes/metric_registry.py`.\n\n"
        "A job on Ray publishes these through `ray.util.metrics`, so they are where Ray's own metrics are: Prometheus "
        "scrapes the metrics agent of each node, and `/tmp/ray/prom_metrics_service_discovery.json` on the head node "
        "names them all. Ray puts `ray_` in front of each name, and `_total` behind the names of counters. Processes "
        "write about once a second, never for each row, and Ray collects from them every 10 s. All metrics together "
        "cost a task some 0.05 % of a core, and slow a busy job down by less than can be measured "
        "([measured](../benchmarks/README.md#figures)).\n\n"
        "Names are Flink's in snake case, units last. Ray's labels are in ASCII: other characters in the name of a job "
        "or a step are escaped as Python writes them, so that `Zählung` is `Z\\xe4hlung`.\n\n"
        "## Prometheus, alerts and Grafana\n\n"
        "[`configs/prometheus.yaml`](../configs/prometheus.yaml) is a configuration for Prometheus on the head node: "
        "`prometheus --config.file=configs/prometheus.yaml`. Ray writes the file that it reads where its dashboard "
        "runs (`include_dashboard=True`). If you have a Prometheus already, copy its scrape job into your "
        "configuration, with `honor_labels: true`. Without that setting Prometheus renames the tag `job` to "
        "`exported_job`, also with the configuration that Ray writes.\n\n"
        "[`configs/alerts.yaml`](../configs/alerts.yaml) has alert rules for\n\n"
        "- a job that fails, does not run, or restarts again and again;\n"
        "- checkpoints that fail, take long or take longer and longer;\n"
        "- checkpoints that do not complete, which is the sign of a job that hangs;\n"
        "- event time that falls behind, and tasks under back-pressure.\n\n"
        "`scripts/debian_program.py prometheus` gets `prometheus` and `promtool` from Debian without root, to try the "
        "rules.\n\n"
        "[`configs/grafana/tidegate.json`](../configs/grafana/tidegate.json) is a dashboard for Grafana: *Dashboards, "
        "New, Import*, then choose the job. It has rows for the job, rows and bytes, back-pressure, event time, "
        "checkpoints, recovery, state and storage, and functions. Where Ray's dashboard embeds Grafana, put it into "
        "the folder that `RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR` names. Each of its queries is tested against a "
        "real Prometheus and a real job, but not in Grafana itself.\n\n"
        "## Metrics of a job\n\n"
        "The coordinator writes them. Gauges exist from the first second of a job on, and are 0 while nothing has "
        "happened. Their totals come from the event log, so they continue when another coordinator takes over. Values "
        f"of `status`: {statuses}.\n\n"
        f"{_table(JOB_METRICS)}\n"
        "## Metrics of a task\n\n"
        "The process that runs a task writes them. `vertex` and `subtask` name the task, also in a spare process that "
        "has taken it over and whose actor keeps its name. A counter appears when it is first incremented, and counts "
        "over all attempts of a process. After a task has left a process, its rates and lags there are 0.\n\n"
        f"{_table(TASK_METRICS)}\n"
        "## Metrics of a process\n\n"
        "Each process with a task of the job, and the process of its coordinator, writes these. Ray's tags distinguish "
        "the processes.\n\n"
        f"{_table(PROCESS_METRICS)}\n"
        "## Metrics of a function\n\n"
        "A metric that a function defines with [`context.metrics`](process-functions.md#metrics-of-your-own) is a "
        "gauge `ray_tidegate_operator_<name>` with the tags "
        f"{', '.join(f'`{tag}`' for tag in OPERATOR_TAGS)}. `operator` is the name of the step, and `operator_id` its "
        "uid. A histogram has a series for each `quantile` of its newest values "
        f"({', '.join(str(share) for share in QUANTILES)}), and `ray_tidegate_operator_<name>_count`; for all others "
        "that tag is empty. They begin with 0 in each attempt. Some steps have such metrics of their own. Steps with "
        "event time count `numLateRecordsDropped`, rows that came after their window or join was over. Sources and "
        "steps with `errors_to=` count `numRecordsInErrors`, rows that cannot be read or for which a function fails. "
        "Sources count `numRecordsLost`, records that were deleted before they were read. `pendingRecords` of a Kafka "
        "source is its lag, the records that exist and were not read yet, and `pendingRecordsMax` the lag of the "
        "partition that is furthest behind. `pendingCommits` of a sink that commits in its tasks is the number of "
        "completed checkpoints with rows that the subtask has not committed yet. Count windows count "
        "`numRecordsLeft`, rows in windows that are not full when the input ends.\n\n"
        "## In a program\n\n"
        "`job.vertices()` returns the metrics of tasks to a script, on every runtime: for each vertex, and each of its "
        "subtasks, rows and bytes, rates, busy, back-pressured and idle time, and watermarks. Totals begin with the "
        "attempt. `job.user_metrics()` returns the metrics of functions, `job.statistics()` the "
        "[checkpoints](checkpoints.md), and `job.progress()` the job at a glance.\n"
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
