"""The manifests for KubeRay have the fields that it documents, of the right types, and lead to files that there are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import pytest
import yaml
from repository import ROOT

FOLDER = ROOT / "configs" / "kuberay"

NUMBER, TEXT, SWITCH = int, str, bool
CONTAINER: dict[str, Any] = {
    "name!": TEXT,
    "image!": TEXT,
    "ports": [{"containerPort!": NUMBER, "name": TEXT}],
    "envFrom": [{"secretRef": {"name!": TEXT}}],
    "resources": {"requests": {"cpu": TEXT, "memory": TEXT}, "limits": {"cpu": TEXT, "memory": TEXT}},
    "volumeMounts": [{"name!": TEXT, "mountPath!": TEXT}],
}
POD: dict[str, Any] = {
    "spec!": {
        "containers!": [CONTAINER],
        "volumes": [{"name!": TEXT, "configMap": {"name!": TEXT}}],
        "terminationGracePeriodSeconds": NUMBER,
    }
}
CLUSTER: dict[str, Any] = {
    "rayVersion": TEXT,
    "authOptions": {"mode": ("token", "disabled")},
    "headGroupSpec!": {"rayStartParams": TEXT, "template!": POD},
    "workerGroupSpecs": [
        {
            "groupName!": TEXT,
            "replicas": NUMBER,
            "minReplicas": NUMBER,
            "maxReplicas": NUMBER,
            "rayStartParams": TEXT,
            "template!": POD,
        }
    ],
}
JOB: dict[str, Any] = {
    "entrypoint": TEXT,
    "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    "backoffLimit": NUMBER,
    "shutdownAfterJobFinishes": SWITCH,
    "ttlSecondsAfterFinished": NUMBER,
    "rayClusterSpec": CLUSTER,
}
SPECS = {"raycluster.yaml": ("RayCluster", CLUSTER), "rayjob.yaml": ("RayJob", JOB)}
"""Fields as KubeRay documents them (ray.io/v1), as far as the manifests use them; `!`: one that must be there."""


def problems(found: object, wanted: object, at: str) -> list[str]:
    """What does not fit, with its place. A type in place of a mapping: a mapping of texts to values of it."""
    if isinstance(wanted, dict):
        if not isinstance(found, Mapping):
            return [f"{at} is no mapping"]
        known = {name.rstrip("!"): fields for name, fields in wanted.items()}
        wrong = [f"{at}.{name[:-1]} is missing" for name in wanted if name[-1] == "!" and name[:-1] not in found]
        wrong += [f"{at}.{name} is unknown" for name in found if name not in known]
        return wrong + [
            p for name in found if name in known for p in problems(found[name], known[name], f"{at}.{name}")
        ]
    if isinstance(wanted, list):
        if not isinstance(found, list):
            return [f"{at} is no list"]
        return [p for n, each in enumerate(found) for p in problems(each, wanted[0], f"{at}[{n}]")]
    if isinstance(wanted, tuple):
        return [] if found in wanted else [f"{at} is {found!r}"]
    assert isinstance(wanted, type)
    if isinstance(found, Mapping):  # rayStartParams
        return [f"{at}.{name} is {each!r}" for name, each in found.items() if not isinstance(each, wanted)]
    return [] if type(found) is wanted else [f"{at} is {found!r}"]


def manifest(name: str) -> Any:
    """One of them."""
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("name", SPECS)
def test_a_manifest_has_the_documented_fields(name: str) -> None:
    """None is missing, misspelt, or of another type: numbers of Ray's parameters are texts."""
    kind, spec = SPECS[name]
    found = manifest(name)
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", kind)
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,40}", found["metadata"]["name"])
    assert problems(found["spec"], spec, "spec") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"entrypoints": "x"}, "spec.entrypoints is unknown"),
        ({"backoffLimit": "0"}, "spec.backoffLimit is '0'"),
        ({"submissionMode": "k8s"}, "spec.submissionMode is 'k8s'"),
        ({"rayClusterSpec": {"headGroupSpec": {"rayStartParams": {"num-cpus": 0}}}}, "rayStartParams.num-cpus is 0"),
        ({"rayClusterSpec": {"headGroupSpec": {}}}, "headGroupSpec.template is missing"),
        ({"rayClusterSpec": {"headGroupSpec": {"template": []}}}, "template is no mapping"),
        ({"rayClusterSpec": {"headGroupSpec": {"template": {"spec": {"containers": {}}}}}}, "containers is no list"),
    ],
)
def test_what_is_wrong_is_found(change: dict[str, object], problem: str) -> None:
    """The check bites."""
    found = problems({**manifest("rayjob.yaml")["spec"], **change}, JOB, "spec")
    assert [each for each in found if each.endswith(problem)] != []


@pytest.mark.parametrize("name", SPECS)
def test_a_manifest_fits_what_it_leads_to(name: str) -> None:
    """The version of Ray, volumes that are mounted, and slots that the workers have."""
    spec = manifest(name)["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    assert cluster["rayVersion"].rpartition(".")[0] == version("ray").rpartition(".")[0]
    pod = cluster["headGroupSpec"]["template"]["spec"]
    mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert worker["resources"]["requests"] == worker["resources"]["limits"]
    slots = yaml.safe_load((FOLDER / "settings.yaml").read_text())["ray"]["slots"]
    assert workers["minReplicas"] * int(worker["resources"]["requests"]["cpu"]) >= slots
    text = (FOLDER / name).read_text()
    assert "--config /etc/tidegate/settings.yaml" in text
