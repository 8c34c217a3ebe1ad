"""`Resources`: the CPUs, GPUs and custom resources that each subtask of a step reserves, instead of using a common
slot.

Rules:

- Steps without resources share the common slots of the job, with one CPU each: slot i holds subtask i of each such step
  (Flink's default slot sharing group).
- A step with resources has its own slots, one for each subtask. It is not chained to a step with other resources.
  Consecutive steps with equal resources are chained as usual, and share the reservation.
- Amounts follow Ray's rules: multiples of 0.0001, and GPUs above 1 are whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import repr_text

SLOT_CPUS = 1.0
"""Number of CPUs of a common slot."""
STEPS_OF_ONE = 10_000
"""Number of parts into which Ray divides one unit of a resource: four decimals."""
_NAMED = {"CPU": "num_cpus=", "GPU": "num_gpus="}
_OF_RAY = ("memory", "object_store_memory")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that each subtask of a step reserves. Create it with `of`, which checks the amounts.

    `custom` has pairs of the name and amount of each custom resource, sorted by name.
    """

    cpus: float
    gpus: float = 0.0
    custom: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(
        cls,
        step: str,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> Resources | None:
        """Returns the resources of a step, or None if none are given. Without `num_cpus` each subtask reserves 1 CPU.

        Raises ConfigurationError, which names the step, for amounts that Ray cannot reserve.
        """
        if num_cpus is None and num_gpus is None and resources is None:
            return None
        if resources is not None and not isinstance(resources, Mapping):
            raise ConfigurationError(
                f"{step}: resources must be a dict of names and amounts, such as {{'disk': 1}}, not "
                f"{repr_text(resources)}"
            )
        cpus = SLOT_CPUS if num_cpus is None else _amount(step, f"num_cpus={num_cpus!r}", num_cpus)
        gpus = 0.0 if num_gpus is None else _amount(step, f"num_gpus={num_gpus!r}", num_gpus)
        if gpus > 1 and not gpus.is_integer():
            raise ConfigurationError(
                f"{step}: num_gpus={num_gpus!r}: Ray reserves more than one GPU only in whole numbers; give a "
                "whole number"
            )
        custom = tuple(sorted((_name(step, name), _custom(step, name, n)) for name, n in (resources or {}).items()))
        found = cls(cpus, gpus, custom)
        if not found.bundle:
            raise ConfigurationError(
                f"{step}: num_cpus=0 reserves nothing; remove it to share the common slots, or name another resource"
            )
        return found

    @property
    def bundle(self) -> dict[str, float]:
        """Returns the resources as a bundle of a Ray placement group, such as `{"CPU": 1}`. Amounts of 0 are
        omitted.
        """
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **dict(self.custom)}
        return {name: amount for name, amount in amounts.items() if amount}


def _custom(step: str, name: str, amount: object) -> float:
    found = _amount(step, f"resources={{{name!r}: {repr_text(amount)}}}", amount)
    if not found:
        raise ConfigurationError(f"{step}: resources={{{name!r}: 0}} reserves nothing; remove {name!r}")
    return found


def _name(step: str, name: object) -> str:
    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError(f"{step}: resources= has the name {repr_text(name)}; name each resource by a string")
    if name in _NAMED:
        raise ConfigurationError(f"{step}: resources={{{name!r}: …}}: give it as {_NAMED[name]}")
    if name in _OF_RAY:
        raise ConfigurationError(f"{step}: resources={{{name!r}: …}}: memory cannot be reserved for a step; remove it")
    return name


def _amount(step: str, what: str, amount: object) -> float:
    number = isinstance(amount, int | float) and not isinstance(amount, bool)
    if not number or not math.isfinite(amount) or amount < 0:  # type: ignore[arg-type, operator]
        raise ConfigurationError(f"{step}: {what} is not an amount; give a number that is 0 or more")
    found = float(amount)  # type: ignore[arg-type]
    if found and round(found * STEPS_OF_ONE) < 1:
        raise ConfigurationError(f"{step}: {what} is too little: Ray counts to four decimals; give 0.0001 or more")
    return round(found, 4)
