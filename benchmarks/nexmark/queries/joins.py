"""Queries over two streams: q3, q4, q6, q9, q20.

They are joins without a window, so all rows stay in state, as in Flink's. Winners of auctions (q4, q6, q9) are told
as they are so far, and take back what was told before.
"""

from __future__ import annotations

import polars as pl

import tidegate as tg
from nexmark import auctions
from nexmark.queries.newest_sales import SALES, NewestSales
from nexmark.query import Events, Query, Rows

STATES = ("OR", "ID", "CA")
CATEGORY = 10
PERSON = ("name", "city", "state")


def _q3(events: Events) -> tg.Stream:
    auctions = events.auctions.filter(pl.col("category") == CATEGORY).select("id", "seller")
    people = events.people.filter(pl.col("state").is_in(STATES)).select(*PERSON, seller="id")
    return auctions.join(people, on="seller", uid="sellers").select(*PERSON, "id")


def _q3_reference(rows: Rows) -> pl.DataFrame:
    auctions = rows.auctions.filter(pl.col("category") == CATEGORY)
    people = rows.people.filter(pl.col("state").is_in(STATES)).rename({"id": "seller"})
    return auctions.join(people, on="seller").select(*PERSON, "id").collect()


BID = ("auction", "bidder", "price", "bid_time", "bid_extra")
Q9 = (*auctions.SCHEMA.names, *BID)


def _renamed(bids: tg.Stream, *columns: str) -> tg.Stream:
    """Bids with names that auctions do not have."""
    names = {"bid_time": pl.col("date_time").alias("bid_time"), "bid_extra": pl.col("extra").alias("bid_extra")}
    return bids.select(*(names.get(column, column) for column in columns))


def _in_time(events: Events, auction: tuple[str, ...], bid: tuple[str, ...]) -> tg.Stream:
    """Bids beside their auctions, which were open."""
    bids = _renamed(events.bids, "auction", *bid)
    both = events.auctions.select(*auction).join(bids, on=[("id", "auction")], uid="auctions")
    return both.filter(pl.col("bid_time").is_between("date_time", "expires"))


def _winners_reference(rows: Rows) -> pl.LazyFrame:
    bids = rows.bids.select("auction", "bidder", "price", bid_time="date_time", bid_extra="extra", id="auction")
    both = rows.auctions.join(bids, on="id").filter(pl.col("bid_time").is_between("date_time", "expires"))
    best = both.sort("price", "bid_time", descending=[True, False]).unique("id", keep="first", maintain_order=True)
    return best.select(*Q9)


def _q9(events: Events) -> tg.Stream:
    bids = _in_time(events, tuple(auctions.SCHEMA.names), BID[1:]).key_by("id")
    best = bids.top_n(1, by=("price", "bid_time"), descending=(True, False), name="winners", uid="winners")
    return best.with_columns(auction=pl.col("id"))


def _q9_reference(rows: Rows) -> pl.DataFrame:
    return _winners_reference(rows).collect()


def _q4(events: Events) -> tg.Stream:
    bids = _in_time(events, ("id", "category", "date_time", "expires"), ("price", "bid_time"))
    best = bids.key_by("id", "category").aggregate(price=tg.max("price"), emit="changes", uid="winners")
    return best.key_by("category").aggregate(final=tg.mean("price"), emit="changes", uid="averages")


def _q4_reference(rows: Rows) -> pl.DataFrame:
    return _winners_reference(rows).group_by("category").agg(final=pl.col("price").mean()).collect()


def _q6(events: Events) -> tg.Stream:
    bids = _in_time(events, ("id", "seller", "date_time", "expires"), ("price", "bid_time")).key_by("id")
    best = bids.top_n(1, by=("price", "bid_time"), descending=(True, False), name="winners", uid="winners")
    sales = tg.udaf(NewestSales(), "bid_time", "id", "price")
    return best.key_by("seller").aggregate(final=sales, emit="changes", uid="averages")


def _q6_reference(rows: Rows) -> pl.DataFrame:
    newest = pl.struct("bid_time", "id").rank("ordinal", descending=True).over("seller")
    sales = _winners_reference(rows).filter(newest <= SALES)
    return sales.group_by("seller").agg(final=pl.col("price").mean()).collect()


Q20_AUCTION = {
    "item_name": "item_name",
    "description": "description",
    "initial_bid": "initial_bid",
    "reserve": "reserve",
    "date_time": "auction_time",
    "expires": "expires",
    "seller": "seller",
    "category": "category",
    "extra": "auction_extra",
}
Q20_BID = (*BID, "channel", "url")
Q20 = (*Q20_BID, *Q20_AUCTION.values())


def _q20(events: Events) -> tg.Stream:
    wanted = events.auctions.filter(pl.col("category") == CATEGORY)
    wanted = wanted.select(
        pl.col("id").alias("auction"), *(pl.col(name).alias(new) for name, new in Q20_AUCTION.items())
    )
    return _renamed(events.bids, *Q20_BID).join(wanted, on="auction", name="with auction", uid="with-auction")


def _q20_reference(rows: Rows) -> pl.DataFrame:
    wanted = rows.auctions.filter(pl.col("category") == CATEGORY).rename({"extra": "auction_extra"})
    named = wanted.rename({"date_time": "auction_time", "id": "auction"})
    bids = rows.bids.rename({"date_time": "bid_time", "extra": "bid_extra"})
    return bids.join(named, on="auction").select(*Q20).collect()


QUERIES = (
    Query("q3", "local items", ("person", "auction"), _q3, _q3_reference),
    Query("q4", "average price of a category", ("auction", "bid"), _q4, _q4_reference, keys=("category",)),
    Query("q6", "average price of a seller", ("auction", "bid"), _q6, _q6_reference, keys=("seller",)),
    Query("q9", "winning bids", ("auction", "bid"), _q9, _q9_reference, keys=("id",)),
    Query("q20", "bids with their auctions", ("auction", "bid"), _q20, _q20_reference),
)
