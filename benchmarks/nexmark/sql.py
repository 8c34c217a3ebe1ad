"""Queries of Nexmark in SQL, over the views `bid`, `auction` and `person`, and the options that they are run with.

They are written as published, but for names of columns and for what a stream with an end needs; `queries/` has the same
as programs. Not here are q6, an aggregate of the last rows, q12, windows of the clock, q14, whose count of letters SQL
spells otherwise, and q10, which is about files.
"""

from __future__ import annotations

from typing import Any

import tidegate as tg
from nexmark.query import Events, Query

DAY = "DATE_FORMAT(date_time, 'yyyy-MM-dd')"
_RANKS = ("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")


def _figures(*counted: tuple[str, str]) -> str:
    """Each count of all bids, and of those of each rank."""
    parts = []
    for what, count in counted:
        parts.append(f"{count} AS total_{what}")
        parts += [f"{count} FILTER (WHERE {rank}) AS rank{n}_{what}" for n, rank in enumerate(_RANKS, start=1)]
    return ", ".join(parts)


_DISTINCT = _figures(
    ("bids", "COUNT(*)"), ("bidders", "COUNT(DISTINCT bidder)"), ("auctions", "COUNT(DISTINCT auction)")
)
_IN_TIME = "A.id = B.auction AND B.date_time BETWEEN A.date_time AND A.expires"

TEXTS: dict[str, str] = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": """
        SELECT P.name, P.city, P.state, A.id FROM auction AS A INNER JOIN person AS P ON A.seller = P.id
        WHERE A.category = 10 AND (P.state = 'OR' OR P.state = 'ID' OR P.state = 'CA')
    """,
    "q4": f"""
        SELECT Q.category, AVG(Q.final) AS final FROM (
            SELECT MAX(B.price) AS final, A.category FROM auction A, bid B WHERE {_IN_TIME} GROUP BY A.id, A.category
        ) Q GROUP BY Q.category
    """,
    "q5": """
        SELECT AuctionBids.auction, AuctionBids.num FROM (
            SELECT auction, count(*) AS num, window_start AS starttime, window_end AS endtime
            FROM TABLE(HOP(TABLE bid, DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
            GROUP BY auction, window_start, window_end
        ) AS AuctionBids JOIN (
            SELECT max(CountBids.num) AS maxn, CountBids.starttime, CountBids.endtime FROM (
                SELECT count(*) AS num, window_start AS starttime, window_end AS endtime
                FROM TABLE(HOP(TABLE bid, DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
                GROUP BY auction, window_start, window_end
            ) AS CountBids GROUP BY CountBids.starttime, CountBids.endtime
        ) AS MaxBids
        ON AuctionBids.starttime = MaxBids.starttime AND AuctionBids.endtime = MaxBids.endtime
            AND AuctionBids.num >= MaxBids.maxn
    """,
    "q7": """
        SELECT B.auction, B.price, B.bidder, B.date_time, B.extra FROM bid B JOIN (
            SELECT MAX(price) AS maxprice, window_start AS starts, window_end AS ends
            FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY window_start, window_end
        ) M ON B.price = M.maxprice
        WHERE B.date_time BETWEEN M.ends - INTERVAL '10' SECOND AND M.ends AND B.date_time < M.ends
    """,
    "q8": """
        SELECT P.id, P.name, P.window_start AS start_time FROM (
            SELECT id, name, window_start, window_end
            FROM TABLE(TUMBLE(TABLE person, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY id, name, window_start, window_end
        ) P JOIN (
            SELECT seller, window_start, window_end
            FROM TABLE(TUMBLE(TABLE auction, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY seller, window_start, window_end
        ) A ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end
    """,
    "q9": f"""
        SELECT id, item_name, description, initial_bid, reserve, date_time, expires, seller, category, extra,
            auction, bidder, price, bid_time, bid_extra
        FROM (
            SELECT A.*, B.auction, B.bidder, B.price, B.date_time AS bid_time, B.extra AS bid_extra,
                ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY B.price DESC, B.date_time ASC) AS rownum
            FROM auction A, bid B WHERE {_IN_TIME}
        ) WHERE rownum <= 1
    """,
    "q11": """
        SELECT B.bidder, COUNT(*) AS bid_count, window_start AS start_time, window_end AS end_time
        FROM TABLE(SESSION(TABLE bid PARTITION BY bidder, DESCRIPTOR(date_time), INTERVAL '10' SECOND)) B
        GROUP BY B.bidder, window_start, window_end
    """,
    "q13": """
        SELECT B.auction, B.bidder, B.price, B.date_time, S.value
        FROM (SELECT *, MOD(auction, 10000) AS place FROM bid) B JOIN side_input S ON B.place = S.key
    """,
    "q15": f"SELECT {DAY} AS day, {_DISTINCT} FROM bid GROUP BY {DAY}",
    "q16": f"""
        SELECT channel, {DAY} AS day, DATE_FORMAT(MAX(date_time), 'HH:mm') AS minute, {_DISTINCT}
        FROM bid GROUP BY channel, {DAY}
    """,
    "q17": f"""
        SELECT auction, {DAY} AS day, {_figures(("bids", "COUNT(*)"))}, MIN(price) AS min_price,
            MAX(price) AS max_price, AVG(price) AS avg_price, SUM(price) AS sum_price
        FROM bid GROUP BY auction, {DAY}
    """,
    "q18": """
        SELECT auction, bidder, price, channel, url, date_time, extra FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC) AS rank_number FROM bid
        ) WHERE rank_number <= 1
    """,
    "q19": """
        SELECT * FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS rank_number FROM bid
        ) WHERE rank_number <= 10
    """,
    "q20": """
        SELECT B.auction, B.bidder, B.price, B.date_time AS bid_time, B.extra AS bid_extra, B.channel, B.url,
            A.item_name, A.description, A.initial_bid, A.reserve, A.date_time AS auction_time, A.expires, A.seller,
            A.category, A.extra AS auction_extra
        FROM bid B JOIN auction A ON B.auction = A.id WHERE A.category = 10
    """,
    "q21": """
        SELECT auction, bidder, price, channel, CASE
            WHEN LOWER(channel) = 'apple' THEN '0'
            WHEN LOWER(channel) = 'google' THEN '1'
            WHEN LOWER(channel) = 'facebook' THEN '2'
            WHEN LOWER(channel) = 'baidu' THEN '3'
            ELSE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
        FROM bid
        WHERE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) <> ''
            OR LOWER(channel) IN ('apple', 'google', 'facebook', 'baidu')
    """,
    "q22": """
        SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3) AS dir1, SPLIT_INDEX(url, '/', 4) AS dir2,
            SPLIT_INDEX(url, '/', 5) AS dir3
        FROM bid
    """,
}
UPDATES = ("q18", "q19")
"""Queries whose rows replace others; those of the others that change are taken back."""


def stream(query: Query, events: Events, side_input: Any = None) -> tg.Stream:
    """The stream of a query in SQL."""
    env = events.env
    views = {"bid": lambda: events.bids, "auction": lambda: events.auctions, "person": lambda: events.people}
    for name in query.reads:
        env.create_temporary_view(name, views[name]())
    if side_input is not None:
        env.create_temporary_view("side_input", side_input)
    return env.sql(TEXTS[query.name], emit="update" if query.name in UPDATES else "changes")
