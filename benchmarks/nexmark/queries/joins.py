"""Queries over two streams: q3, q4, q9, q20. The programs keep in state what waits for the other stream."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa

import tidegate as tg
from nexmark import auctions
from nexmark.query import Events, Query, Rows

Row = dict[str, Any]

MOMENT = pa.timestamp("ms")

STATES = ("OR", "ID", "CA")
CATEGORY = 10
PERSON = pa.schema([("name", pa.string()), ("city", pa.string()), ("state", pa.string())])


class Sellers(tg.CoProcessFunction):
    """A person meets each of their auctions, whichever comes first."""

    SCHEMA = PERSON.append(pa.field("id", pa.int64()))

    def open(self, context: tg.ProcessContext) -> None:
        """What waits for the other side."""
        self._person = context.state(tg.ValueState("person", pa.struct(list(PERSON))))
        self._auctions = context.state(tg.ListState("auctions", pa.int64()))

    def process1(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """An auction."""
        person = self._person.value()
        if person is None:
            self._auctions.add(row["id"])
        else:
            yield {**person, "id": row["id"]}

    def process2(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """A person: there is one of each id."""
        person = {name: row[name] for name in PERSON.names}
        self._person.update(person)
        for auction in self._auctions.get():
            yield {**person, "id": auction}
        self._auctions.clear()


def _q3(events: Events) -> tg.Stream:
    auctions = events.auctions.filter(pl.col("category") == CATEGORY).select("id", "seller")
    people = events.people.filter(pl.col("state").is_in(STATES)).select("id", *PERSON.names)
    return auctions.connect(people).key_by("seller", "id").process(Sellers(), schema=Sellers.SCHEMA)


def _q3_reference(rows: Rows) -> pl.DataFrame:
    auctions = rows.auctions.filter(pl.col("category") == CATEGORY)
    people = rows.people.filter(pl.col("state").is_in(STATES)).rename({"id": "seller"})
    return auctions.join(people, on="seller").select(*PERSON.names, "id").collect()


BID = pa.schema(
    [
        ("auction", pa.int64()),
        ("bidder", pa.int64()),
        ("price", pa.int64()),
        ("bid_time", MOMENT),
        ("bid_extra", pa.string()),
    ]
)
Q9 = pa.schema([*auctions.SCHEMA, *BID])


class Winners(tg.CoProcessFunction):
    """The highest bid of each auction, of several the earliest, told when the auction is over; `kept` are its columns.

    Bids that come before their auction wait for it as long as bids may be out of order, and then for nothing.
    """

    def __init__(self, auction: pa.Schema, bid: pa.Schema) -> None:
        self._kept = auction
        self._bid = bid

    def open(self, context: tg.ProcessContext) -> None:
        """The auction, its best bid, and bids that wait."""
        self._auction = context.state(tg.ValueState("auction", pa.struct(list(self._kept))))
        self._best = context.state(tg.ValueState("best", pa.struct(list(self._bid))))
        self._early = context.state(tg.ListState("early", pa.struct(list(self._bid))))

    def process1(self, row: Row, context: tg.ProcessContext) -> None:
        """An auction begins."""
        self._auction.update({name: row[name] for name in self._kept.names})
        for bid in list(self._early.get()):
            self._bids(bid, row)
        self._early.clear()
        context.timer_service.register_event_time_timer(_ms(row["expires"]))

    def process2(self, row: Row, context: tg.ProcessContext) -> None:
        """A bid."""
        auction, bid = self._auction.value(), {name: row[name] for name in self._bid.names}
        if auction is not None:
            self._bids(bid, auction)
            return
        self._early.add(bid)
        assert context.timestamp is not None
        context.timer_service.register_event_time_timer(context.timestamp)

    def _bids(self, bid: Row, auction: Row) -> None:
        if not auction["date_time"] <= bid["bid_time"] <= auction["expires"]:
            return
        best = self._best.value()
        if best is None or (bid["price"], best["bid_time"]) > (best["price"], bid["bid_time"]):
            self._best.update(bid)

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        """An auction is over, or a bid has waited for one that was not open."""
        auction, best = self._auction.value(), self._best.value()
        if auction is None:
            self._early.update([bid for bid in self._early.get() if _ms(bid["bid_time"]) > timestamp])
        elif _ms(auction["expires"]) <= timestamp:
            self._auction.clear()
            self._best.clear()
            if best is not None:
                yield {**auction, **best}


def _ms(moment: dt.datetime) -> int:
    return (moment - dt.datetime(1970, 1, 1)) // dt.timedelta(milliseconds=1)


def _renamed(bids: tg.Stream, *columns: str) -> tg.Stream:
    """Bids with names that auctions do not have."""
    names = {"bid_time": pl.col("date_time").alias("bid_time"), "bid_extra": pl.col("extra").alias("bid_extra")}
    return bids.select(*(names.get(column, column) for column in columns))


def _winners(events: Events, auction: pa.Schema, bid: pa.Schema) -> tg.Stream:
    bids = _renamed(events.bids, *dict.fromkeys(["auction", *bid.names]))
    both = events.auctions.select(*auction.names).connect(bids).key_by("id", "auction")
    return both.process(Winners(auction, bid), schema=pa.schema([*auction, *bid]), name="winners", uid="winners")


def _winners_reference(rows: Rows) -> pl.LazyFrame:
    bids = rows.bids.select("auction", "bidder", "price", bid_time="date_time", bid_extra="extra", id="auction")
    both = rows.auctions.join(bids, on="id").filter(pl.col("bid_time").is_between("date_time", "expires"))
    best = both.sort("price", "bid_time", descending=[True, False]).unique("id", keep="first", maintain_order=True)
    return best.select(Q9.names)


def _q9(events: Events) -> tg.Stream:
    return _winners(events, auctions.SCHEMA, BID)


def _q9_reference(rows: Rows) -> pl.DataFrame:
    return _winners_reference(rows).collect()


def _q4(events: Events) -> tg.Stream:
    auction = pa.schema([auctions.SCHEMA.field(name) for name in ("id", "category", "date_time", "expires")])
    bid = pa.schema([BID.field(name) for name in ("price", "bid_time")])
    return _winners(events, auction, bid).key_by("category").aggregate(final=tg.mean("price"), uid="averages")


def _q4_reference(rows: Rows) -> pl.DataFrame:
    return _winners_reference(rows).group_by("category").agg(final=pl.col("price").mean()).collect()


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
Q20_BID = pa.schema([*BID, ("channel", pa.string()), ("url", pa.string())])


class Expanded(tg.CoProcessFunction):
    """Each bid with its auction, of one category. Bids of auctions of others are let go of when these are known."""

    AUCTION = pa.schema([auctions.SCHEMA.field(name).with_name(new) for name, new in Q20_AUCTION.items()])
    SCHEMA = pa.schema([*Q20_BID, *AUCTION])

    def open(self, context: tg.ProcessContext) -> None:
        """The auction; whether one is known; bids that wait."""
        self._auction = context.state(tg.ValueState("auction", pa.struct(list(self.AUCTION))))
        self._known = context.state(tg.ValueState("known", pa.bool_()))
        self._early = context.state(tg.ListState("early", pa.struct(list(Q20_BID))))

    def process1(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """An auction: there is one of each id."""
        self._known.update(True)
        if row["category"] == CATEGORY:
            auction = {name: row[name] for name in self.AUCTION.names}
            self._auction.update(auction)
            for bid in self._early.get():
                yield {**bid, **auction}
        self._early.clear()

    def process2(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """A bid."""
        bid = {name: row[name] for name in Q20_BID.names}
        if not self._known.value():
            self._early.add(bid)
        elif (auction := self._auction.value()) is not None:
            yield {**bid, **auction}


def _q20(events: Events) -> tg.Stream:
    bids = _renamed(events.bids, *Q20_BID.names)
    known = events.auctions.select("id", *(pl.col(name).alias(new) for name, new in Q20_AUCTION.items()))
    both = known.connect(bids).key_by("id", "auction")
    return both.process(Expanded(), schema=Expanded.SCHEMA, name="with auction", uid="with-auction")


def _q20_reference(rows: Rows) -> pl.DataFrame:
    wanted = rows.auctions.filter(pl.col("category") == CATEGORY).rename({"extra": "auction_extra"})
    named = wanted.rename({"date_time": "auction_time", "id": "auction"})
    bids = rows.bids.rename({"date_time": "bid_time", "extra": "bid_extra"})
    return bids.join(named, on="auction").select(Expanded.SCHEMA.names).collect()


QUERIES = (
    Query("q3", "local items", ("person", "auction"), _q3, _q3_reference),
    Query("q4", "average price of a category", ("auction", "bid"), _q4, _q4_reference, keys=("category",)),
    Query("q9", "winning bids", ("auction", "bid"), _q9, _q9_reference),
    Query("q20", "bids with their auctions", ("auction", "bid"), _q20, _q20_reference),
)
