"""The files for Prometheus and Grafana: they are understood, name what exists, and rules fire when they should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_server import CONFIGS, DASHBOARD, ROOT, promtool

from tidegate.actors.runtimes.metric_registry import METRICS

CASES = Path(__file__).with_name("alert_cases.yaml")


@pytest.mark.slow
def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    """promtool looks at the file and at all that it names."""
    assert "is valid prometheus config file syntax" in promtool("check", "config", str(CONFIGS / "prometheus.yaml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(CONFIGS / "alerts.yaml"))


@pytest.mark.slow
def test_rules_fire_when_they_should_and_only_then() -> None:
    """Each rule has a case, with a job that is well beside the one that is not."""
    promtool("test", "rules", str(CASES))
    groups = yaml.safe_load((CONFIGS / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    fired = {test["alertname"] for case in cases for test in case["alert_rule_test"] if test.get("exp_alerts")}
    assert fired == {rule["alert"] for group in groups for rule in group["rules"]}


def test_the_dashboard_is_made_by_its_script() -> None:
    """`python scripts/make_dashboard.py > configs/grafana/tidegate.json` brings it up to date."""
    command = [sys.executable, str(ROOT / "scripts" / "make_dashboard.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert DASHBOARD.read_text(encoding="utf-8") == made


def test_the_dashboard_asks_for_what_is_published() -> None:
    """And its panels have places of their own, in 24 columns."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    exported = {name for metric in METRICS for name in metric.exported}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        queries = [target["expr"] for target in panel.get("targets", ())]
        assert queries or panel["type"] == "row", panel["title"]
        named = {name for query in queries for name in re.findall(r"\bray_tidegate_(?!operator_)\w+", query)}
        assert named <= exported, panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
