"""Make the pictures of the job page in `docs/images/`, of a real job in this process and its real server.

    python scripts/screenshots.py [--into docs/images] [--only running]

The job counts orders by customer. While it runs it is made slow, then stuck for so long that a checkpoint expires, and
then one of its tasks fails and recovers. Nothing is drawn by hand. Needs a Chromium (`headless_chromium.py`).
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from headless_chromium import chromium
from playwright.sync_api import Browser, Locator, Page

import tidegate as tg

ROOT = Path(__file__).resolve().parents[1]
WIDE, LOW, PHONE = (1_120, 880), (1_120, 640), (360, 880)
BYTES_MAX = 150_000
WAIT_MS = 500_000
CHECKPOINTS = 45
"""How many there are before the first picture: a strip of a few says little."""


class Faults:
    """What the job is made to suffer. Its functions look for files, since they may run anywhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, name: str, on: bool = True) -> None:
        """From now on, or not any more: `slow`, `stuck`; `broken` strikes once."""
        if on:
            (self._folder / name).touch()
        else:
            (self._folder / name).unlink(missing_ok=True)

    def strike(self) -> None:
        """Called with each batch of orders."""
        if (self._folder / "broken").exists():
            self.set("broken", on=False)
            raise ValueError("order 4711 has no customer")
        for name, seconds in (("slow", 0.5), ("stuck", 4.0)):
            if (self._folder / name).exists():
                threading.Event().wait(seconds)


def build(env: tg.StreamEnvironment, folder: Path, faults: Faults) -> None:
    """The program: orders of customers, and what each of them has spent."""
    schema = pa.schema({"customer": pa.int64(), "amount": pa.int64()})

    def check(batch: pa.RecordBatch) -> pa.RecordBatch:
        faults.strike()
        return batch

    def order(batch: pa.RecordBatch) -> pa.RecordBatch:
        numbers = batch.column("value").to_pylist()
        columns = {"customer": [n * 7_919 % 5_000 for n in numbers], "amount": [n % 97 for n in numbers]}
        return pa.record_batch(columns, schema)

    orders = env.from_rate(2_000.0, name="orders", uid="orders", parallelism=1)
    parsed = orders.map_batches(order, schema=schema, name="parse", uid="parse", parallelism=1)
    checked = parsed.rebalance().map_batches(check, schema=schema, name="check customers", uid="check", parallelism=2)
    spent = checked.key_by("customer").aggregate(
        name="spent by customer", uid="spent", parallelism=2, orders=tg.count(), spent=tg.sum("amount")
    )
    spent.to_table(folder / "spent", mode="upsert", keys=["customer"], name="to table", uid="table")


@contextmanager
def running(folder: Path) -> Iterator[tuple[str, Faults]]:
    """The address of the page of a job that runs, and what it can be made to suffer."""
    (folder / "faults").mkdir()
    faults = Faults(folder / "faults")
    config = tg.CheckpointConfig(
        interval="300ms",
        timeout="3s",
        tolerable_failed_checkpoints=1_000,
        history=60,
        storage=str(folder / "checkpoints"),
    )
    with tg.StreamEnvironment.local(parallelism=2) as env:
        env.serve_web(port=0)
        build(env, folder, faults)
        job = env.execute("orders", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(attempts=3, delay="1s"))
        address = job.web_url
        assert address is not None, "the environment serves its jobs"
        try:
            yield address, faults
        finally:
            job.cancel()


class Photographer:
    """Opens pages, waits for what they shall show, and keeps pictures of them."""

    def __init__(self, browser: Browser, into: Path, only: str | None) -> None:
        self._browser = browser
        self._into = into
        self._only = only

    def take(
        self,
        name: str,
        address: str,
        shows: Callable[[Page], Locator],
        section: str | None = None,
        size: tuple[int, int] = WIDE,
        dark: bool = False,
    ) -> None:
        """A picture of a page once what it `shows` is there. `section`: the id of the heading where it begins."""
        with self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
        ) as context:
            page = context.new_page()
            page.goto(address)
            shows(page).first.wait_for(timeout=WAIT_MS)
            if section is not None:
                page.locator(f"section:has(#{section})").evaluate("element => element.scrollIntoView()")
                page.evaluate("window.scrollBy(0, -50)")
            if self._only in (None, name):
                file = self._into / f"job-page-{name}.png"
                page.screenshot(path=file)
                size_bytes = file.stat().st_size
                assert size_bytes <= BYTES_MAX, f"{file.name} has {size_bytes:,} bytes, more than {BYTES_MAX:,}"
                print(f"{file.name}: {size_bytes:,} bytes")


def take_all(photographer: Photographer, address: str, faults: Faults) -> None:
    """All pictures, in the order in which things happen to the job."""
    take = photographer.take
    take("running", address, lambda page: page.locator(f".history a:text-is('#{CHECKPOINTS}')"))
    faults.set("slow")
    take("back-pressured", address, lambda page: page.locator("table:has(.pressed-high):has(.working)"))
    faults.set("stuck")
    take("failed", address, lambda page: page.locator(".history .state.bad"), section="checkpoints")
    faults.set("slow", on=False)
    faults.set("stuck", on=False)
    failed = f"{address}/checkpoints/{_number_of_failed(photographer, address)}"
    take("failed-checkpoint", failed, lambda page: page.locator("h2#subtasks"), size=LOW)
    faults.set("broken")
    take("recovered", address, lambda page: page.locator("svg.timeline .restore"), section="recoveries", size=LOW)
    flows = ".graph.narrow .flow:text-matches('out [1-9]')"
    take("phone", address, lambda page: page.locator(flows), size=PHONE, dark=True)


def _number_of_failed(photographer: Photographer, address: str) -> str:
    with photographer._browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        row = page.locator(".history tr:has(.state.bad) a").first
        return row.inner_text().removeprefix("#")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", help="keep this picture alone")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser, running(Path(folder)) as (address, faults):
        take_all(Photographer(browser, given.into, given.only), address, faults)


if __name__ == "__main__":
    main()
