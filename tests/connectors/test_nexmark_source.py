"""The source of the Nexmark benchmark: any part can be read again, and its rows are as published."""

from __future__ import annotations

import polars as pl
import pytest
from nexmark.source import NexmarkSource, table
from nexmark.workload import KINDS, Workload
from source_contract import check_source

SMALL = Workload(1_000, out_of_order=50, block=250)
MANY = Workload(100_000, out_of_order=1_000, block=50_000)


def frame(workload: Workload, kind: str) -> pl.DataFrame:
    """All rows of a kind."""
    return pl.DataFrame(table(workload, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_part_can_be_read_again(kind: str) -> None:
    """Splits have all rows of the kind, whatever the size of reads."""
    rows = check_source(NexmarkSource(SMALL, kind, parts=3, also=("person",)))
    key = ["id"] if kind != "bid" else ["auction", "bidder", "price", "date_time", "extra"]
    assert pl.DataFrame(rows, frame(SMALL, kind).schema).sort(key).equals(frame(SMALL, kind).sort(key))


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_the_rest_bids() -> None:
    """Ids of people and of auctions follow one another without a gap."""
    assert [len(frame(MANY, kind)) for kind in KINDS] == [2_000, 6_000, 92_000]
    for kind, count in (("person", 2_000), ("auction", 6_000)):
        assert sorted(frame(MANY, kind)["id"]) == list(range(1_000, 1_000 + count))


def test_rows_are_as_wide_as_published() -> None:
    """A person has about 200 bytes, an auction 500, a bid 100 besides channel and url."""
    width = {kind: table(MANY, kind).nbytes / MANY.rows(kind) for kind in KINDS}
    text = frame(MANY, "bid").select(pl.col("channel", "url").str.len_bytes().mean()).row(0)
    assert width["person"] == pytest.approx(200, rel=0.1)
    assert width["auction"] == pytest.approx(500, rel=0.1)
    assert width["bid"] - sum(text) - 2 * 4 == pytest.approx(100, rel=0.1)


def test_some_items_bidders_and_sellers_are_hot() -> None:
    """Half of the bids are for one auction of a hundred; three of four come from one person of a hundred."""
    bids, auctions = frame(MANY, "bid"), frame(MANY, "auction")
    assert ((bids["auction"] - 1_000) % 100 == 0).mean() == pytest.approx(0.5, abs=0.02)
    assert ((bids["bidder"] - 1_000) % 100 == 1).mean() == pytest.approx(0.75, abs=0.02)
    assert ((auctions["seller"] - 1_000) % 100 == 0).mean() == pytest.approx(0.75, abs=0.02)
    assert bids["channel"].is_in(["Google", "Facebook", "Baidu", "Apple"]).mean() == pytest.approx(0.5, abs=0.02)
    prices = bids["price"]
    assert int(prices.min()) >= 100  # type: ignore[arg-type]
    assert (prices < 100_000).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("out_of_order", [1, 50, 1_000])
def test_events_are_out_of_order_by_a_group_at_most(out_of_order: int) -> None:
    """Those of one group are mixed, so a watermark that lags by the length of a group makes none of them late."""
    workload = Workload(10_000, rate=1_000.0, out_of_order=out_of_order, block=5_000)
    behind = frame(workload, "bid")["date_time"].dt.timestamp("ms")
    lag = int((behind.cum_max() - behind).max())  # type: ignore[arg-type]
    assert lag <= workload.disorder_ms
    assert (lag > 0) == (out_of_order > 1)


def test_auctions_last_as_long_as_a_hundred_of_them_take() -> None:
    """On average; each ends after it has begun."""
    lasts = (frame(MANY, "auction")["expires"] - frame(MANY, "auction")["date_time"]).dt.total_milliseconds()
    assert int(lasts.min()) >= 1  # type: ignore[arg-type]
    assert lasts.mean() == pytest.approx(100 * 50 / 3 / 100_000 * 1_000, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"events": 1_001, "block": 50, "out_of_order": 50}, "whole blocks"),
        ({"events": 1_000, "block": 40, "out_of_order": 1}, "not a multiple"),
        ({"events": 1_000, "block": 1_000, "out_of_order": 953}, "out of order"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(settings: dict[str, int], message: str) -> None:
    """Blocks are whole, and groups are mixed."""
    with pytest.raises(ValueError, match=message):
        Workload(**settings)
