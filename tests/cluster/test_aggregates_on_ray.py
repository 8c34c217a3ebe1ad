"""Aggregates with expressions and functions of the program on Ray: the result is right although a process is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import expression_program
import pyarrow as pa
import user_functions
from ray import cloudpickle

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.operators.aggregates.aggregate_function import Groups, NewState
from tidegate.spark_bridge import RayDPSession

# Processes of the job cannot import the modules of the tests: they are sent by value.
cloudpickle.register_pickle_by_value(user_functions)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class DiesOnce(user_functions.Product):
    """A product whose process is killed when it takes in some row for the first time."""

    def __init__(self, flag: Path) -> None:
        self._flag = str(flag)

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Multiply, or die."""
        if state.column("product").to_numpy().max() > 1 and not os.path.exists(self._flag):
            open(self._flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().accumulate(state, groups, *columns)


def test_totals_are_right_through_the_loss_of_a_process(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """State of any width is restored in another process, and so is the function of the program."""
    flag = tmp_path / "killed"
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    with tg.StreamEnvironment(runtime, parallelism=2, options=tg.DataPlaneOptions(source_rows_max=20)) as env:
        table = expression_program.totals(env, str(tmp_path / "out"), DiesOnce(flag))
        config = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        job = env.execute("aggregates", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(3, 0))
        assert job.wait("4min") == "finished"
        assert flag.exists()
        assert expression_program.written(table) == expression_program.expected()
