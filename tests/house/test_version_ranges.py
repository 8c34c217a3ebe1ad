"""What pyproject.toml allows is tested: pinned versions lie within its ranges, among them the newest and the lowest."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETS = ("constraints.txt", "constraints-newest.txt", "constraints-lowest.txt")
FOR_USERS = [extra for extra in PROJECT["optional-dependencies"] if extra not in ("all", "dev", "docs", "test")]


def requirements(*extras: str) -> dict[str, Requirement]:
    """What is required with these extras, by name."""
    texts = [*PROJECT["dependencies"], *(text for e in extras for text in PROJECT["optional-dependencies"][e])]
    found = [Requirement(text) for text in texts]
    return {canonicalize_name(each.name): each for each in found if each.name != "tidegate"}


def pins(name: str) -> dict[str, Version]:
    """A set of pinned versions."""
    lines = (ROOT / name).read_text().splitlines()
    return {canonicalize_name(key): Version(value) for key, value in (line.split("==") for line in lines)}


def too_narrow(specifier: SpecifierSet, tested: Version) -> bool:
    """Whether users could not have the next minor version of what is tested."""
    return Version(f"{tested.major}.{tested.minor + 1}.0") not in specifier


BEYOND = {"constraints-newest.txt": {"pandas"}}
"""What a set pins outside a range: no PySpark fully supports pandas 3, but programs without Spark take its frames."""


@pytest.mark.parametrize("name", SETS)
def test_pinned_versions_are_within_the_ranges(name: str) -> None:
    """Each of a set, as far as it is required."""
    required, pinned = requirements(*PROJECT["optional-dependencies"]), pins(name)
    outside = {key for key, each in required.items() if key in pinned and pinned[key] not in each.specifier}
    assert outside == BEYOND.get(name, set())


def test_the_newest_versions_are_told() -> None:
    """Of all that is required but RayDP, which takes no PySpark 4."""
    pinned = pins("constraints-newest.txt")
    assert requirements(*FOR_USERS).keys() - pinned.keys() == {"raydp"}
    assert pinned["pyspark"].major == 4


def lower_end(specifier: SpecifierSet) -> Version:
    """The lowest version that is allowed."""
    (found,) = (Version(each.version) for each in specifier if each.operator in (">=", "=="))
    return found


def test_the_lowest_versions_are_the_lower_ends() -> None:
    """Of all that is required of users: what is allowed has been tried."""
    pinned = pins("constraints-lowest.txt")
    lowest = {key: lower_end(each.specifier) for key, each in requirements(*FOR_USERS).items()}
    assert {key: str(pinned.get(key)) for key, version in lowest.items() if pinned.get(key) != version} == {}


def test_users_may_have_the_next_minor_version() -> None:
    """Of every library: upper ends are for what is known not to work."""
    pinned = pins("constraints.txt")
    ranges = {key: each.specifier for key, each in requirements(*FOR_USERS).items() if "==" not in str(each.specifier)}
    assert {key: str(found) for key, found in ranges.items() if too_narrow(found, pinned[key])} == {}
    assert too_narrow(SpecifierSet(">=2.60,<2.61"), Version("2.60.0"))
    assert not too_narrow(SpecifierSet(">=2.60"), Version("2.60.0"))
