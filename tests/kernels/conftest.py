"""Kernels here run as a job runs them."""

from __future__ import annotations

import pytest

from tidegate.state.kernels.jit import Kernel


@pytest.fixture(autouse=True)
def images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel has an image wherever one can be, else each process of a job would load numba for it."""

    def refuse(self: Kernel, *arguments: object) -> object:
        raise AssertionError(f"kernel {self.__name__} has no image that takes these arguments")

    monkeypatch.setattr(Kernel, "general", refuse)
