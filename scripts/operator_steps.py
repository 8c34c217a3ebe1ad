"""What the transcript for operators types (`operator_transcript.py`): settings, commands, and words between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

JOB = "live-flights"


@dataclass(frozen=True)
class Step:
    """What the page says, the commands that follow, and what is waited for before the first one, in words."""

    title: str
    text: str
    commands: Sequence[str]
    when: str = ""


CONFIG = """\
execution:
  target: ray
  detached: true                # the job outlives the command that starts it
  savepoint.path: latest        # the first time it starts afresh
  checkpointing.interval: 2s
parallelism.default: 2
pipeline.name: live-flights
rest: {enabled: true, port: $PORT}    # the job page and REST
state:
  checkpoints: {dir: $DATA/checkpoints, num-retained: 3}
  savepoints.dir: $DATA/savepoints
"""
PROMETHEUS = """\
global: {scrape_interval: 2s}
scrape_configs:
  - job_name: ray
    honor_labels: true
    file_sd_configs: [{files: ["$DATA/ray/prom_metrics_service_discovery.json"]}]
"""

RUN = "tidegate run examples/live_flights.py:delays --config $DATA/job.yaml"


BEFORE_KILL = "Kill a task"
"""The step before which the picture is taken."""

ASK_FOR_SAVEPOINT = (
    "curl -sS -X POST -H \"Authorization: Bearer $TIDEGATE_REST_TOKEN\" $WEB/jobs/$ID/savepoints -d '{}' "
    "| tee $DATA/asked"
)
AWAIT_SAVEPOINT = (
    "for i in $(seq 120); do curl -sS $WEB/jobs/$ID/savepoints/$REQUEST > $DATA/answer; "
    "grep -q COMPLETED $DATA/answer && break; sleep 1; done; jq . $DATA/answer"
)
LAST_EXCEPTION = (
    "curl -sS $WEB/jobs/$ID/exceptions?maxExceptions=1 | jq -r '.exceptionHistory.entries[0] "
    "| .taskName, (.stacktrace | .[:80])'"
)
DEFINE_ASK = (
    'ask() { curl -sS $PROMETHEUS/api/v1/query --data-urlencode "query=$1" '
    '| jq -r \'.data.result[] | "\\(.metric | to_entries | map(.value) | join(" ")): \\(.value[1])"\'; }'
)
AWAIT_RESTART = (
    "for i in $(seq 120); do ask 'max by (job) (ray_tidegate_job_num_restarts{job=\"live-flights\"}) > 0' "
    "| grep . && break; sleep 1; done"
)

STEPS = (
    Step(
        "Start",
        "A Ray that stays was started by `ray start --head`. `RAY_ADDRESS` is its address, and `RAY_AUTH_TOKEN` gives\n"
        "access; with `TIDEGATE_REST_TOKEN` a job may be changed by HTTP. The settings of the job are in a file.\n"
        "The program is the main job without an end: delays of real flights, per carrier and origin\n"
        "(`examples/live_flights.py`).",
        (
            "cat $DATA/job.yaml",
            "tidegate config check $DATA/job.yaml --changed",
            f"{RUN} -- $DATA/delays",
        ),
    ),
    Step(
        "Watch",
        "The command has returned, because the job is detached.",
        ("tidegate jobs", f"tidegate job {JOB} status", f"tidegate job {JOB} tasks"),
        "it had completed three checkpoints",
    ),
    Step(
        "Request by REST",
        "Paths and names of fields are Flink's ([REST](rest.md)). The same server has the\n"
        "[job page](job-page.md), at `$WEB/ui/jobs/$ID`.",
        (
            "curl -sS $WEB/jobs/overview | jq .",
            "ID=$(curl -sS $WEB/jobs/overview | jq -r .jobs[0].jid)",
            "curl -sS $WEB/jobs/$ID/checkpoints | jq -c .counts",
            "curl -sS $WEB/jobs/$ID/checkpoints/config | jq -c '{mode, interval, timeout, state_backend}'",
            "curl -sS $WEB/jobs/$ID/vertices/per-carrier/backpressure | jq -c '.subtasks[]'",
        ),
    ),
    Step(
        "Take a savepoint",
        "The job continues meanwhile. Every byte of a savepoint can be verified.",
        (
            f"BEFORE=$(tidegate job {JOB} savepoint); echo $BEFORE",
            "tidegate checkpoints verify $BEFORE",
            "tidegate checkpoints inspect $BEFORE",
        ),
    ),
    Step(
        "Take a savepoint by REST",
        "The answer is the id of the request, and a query with that id returns its state. Without the token nothing\n"
        "happens.",
        (
            "curl -sS -X POST $WEB/jobs/$ID/savepoints -d '{}' | jq -c .",
            ASK_FOR_SAVEPOINT,
            "REQUEST=$(jq -r '.\"request-id\"' $DATA/asked)",
            AWAIT_SAVEPOINT,
        ),
    ),
    Step(
        BEFORE_KILL,
        "![The actors of the job in Ray's dashboard](images/ray-dashboard-actors.png)\n\n"
        "In Ray's dashboard the actors have the names of their tasks. One with keyed state is killed.",
        (
            f"VICTIM=$(tidegate job {JOB} tasks --json | jq 'map(select(.vertex == \"per-carrier\"))[0].pid')",
            "kill -9 $VICTIM",
        ),
        "its spare process was ready",
    ),
    Step(
        "See the recovery, and its parts",
        "The job recovered by itself. The times in the lines are the parts of the recovery: until the failure was\n"
        "known, until tasks were deployed, until all of them had their state.",
        (
            f"tidegate events $DATA/checkpoints --job {JOB} --restarts",
            f"tidegate job {JOB} status | grep -E '^(status|attempt|restarts|last_failure|standbys)'",
            "curl -sS $WEB/jobs/$ID/recoveries | jq '.recoveries[0] | {attempt, task, checkpoint, total, parts}'",
            LAST_EXCEPTION,
        ),
        "the job ran again, and had completed a checkpoint since",
    ),
    Step(
        "The same in Prometheus",
        "A Prometheus scrapes the addresses that Ray writes down, as `configs/prometheus.yaml` has it. These are the\n"
        "questions of panels of `configs/grafana/tidegate.json`: restarts, status, the last recovery, rows in a\n"
        "second. Ray collects every ten seconds, so the first query is repeated until its answer has the restart.",
        (
            DEFINE_ASK,
            AWAIT_RESTART,
            "ask 'max by (job, status) (ray_tidegate_job_status{job=\"live-flights\"}) == 1'",
            "ask 'max by (job) (ray_tidegate_job_last_recovery_ms{job=\"live-flights\"})'",
            "ask 'max by (job) (ray_tidegate_job_last_recovery_restore_ms{job=\"live-flights\"})'",
            "ask 'sum by (vertex) (ray_tidegate_task_num_records_in_per_second{job=\"live-flights\"})'",
        ),
    ),
    Step(
        "Stop with a savepoint",
        "From the shell, as before an upgrade.",
        (
            f"tidegate job {JOB} stop | tee $DATA/stopped",
            "SAVEPOINT=$(grep -o '[^ ]*$' $DATA/stopped)",
            f"tidegate events $DATA/checkpoints --job {JOB} | tail -4",
            "tidegate checkpoints verify $SAVEPOINT",
        ),
    ),
    Step(
        "Restore from it",
        "`--set` overrides the file. The new job has another id, and continues where the old one had stopped.",
        (f"{RUN} --set execution.savepoint.path=$SAVEPOINT -- $DATA/delays",),
    ),
    Step(
        "Was every flight counted once?",
        "The job is stopped, and its table is compared with the result of polars for the same flights. In between a\n"
        "process was killed, and the job was stopped and restored.",
        (
            "tidegate jobs",
            f"tidegate job {JOB} stop",
            "python examples/live_flights.py --check $DATA/delays",
        ),
        "the restored job had completed a checkpoint",
    ),
)

HEAD = """\
# As an operator would

Made by `scripts/operator_transcript.py`: it has typed these commands, on one machine, and this is what they printed.
Only folders (`/data`, `/app`) and the name of the machine were changed. What the commands mean is in
[operations](operations.md) and [commands](commands.md).

"""
