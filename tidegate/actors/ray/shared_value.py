"""`SharedValue`: one copy of a value in Ray's object store, for actors that may be restarted.

Ray (2.60) prints an error for every restartable actor whose constructor is given an object reference, because it does
not keep such objects by itself. Here the driver keeps it: the reference travels pickled ahead, which pins the object in
the driver's process until `release`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import cloudpickle as own_cloudpickle
import ray
from ray import cloudpickle


class SharedValue:
    """A value in the object store, alive until it is released or this process ends."""

    def __init__(self, value: object) -> None:
        self._lock = threading.Lock()
        self._reference: ray.ObjectRef[Any] | None = ray.put(value)
        self.pickled: bytes = cloudpickle.dumps(self._reference)
        """Opens with `open_shared` in any process of the cluster."""

    def release(self) -> None:
        """Let the object go. Idempotent."""
        with self._lock:
            reference, self._reference = self._reference, None
        if reference is not None and ray.is_initialized():
            # Ray has no public word for this: pickling took a reference for good, which is given back here.
            worker: Any = ray._private.worker.global_worker
            worker.core_worker.remove_object_ref_reference(reference)


def open_shared(pickled: bytes) -> ray.ObjectRef[Any]:
    """The reference to a shared value. It must not have been released."""
    reference: ray.ObjectRef[Any] = cloudpickle.loads(pickled)
    return reference


def share_modules_by_value() -> None:
    """Have Ray pickle by value the modules that are registered for it with cloudpickle (`register_pickle_by_value`).

    Ray pickles with a copy of cloudpickle that has a registry of its own. Without this, processes import these modules,
    and on other machines, or in a runtime environment with another working directory, there are none.
    """
    for name in own_cloudpickle.list_registry_pickle_by_value():
        if (module := sys.modules.get(name)) is not None:
            cloudpickle.register_pickle_by_value(module)
