"""Queries give what polars' own SQL gives for the same rows, and where it has no such words what is written here."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from sql_streams import AUCTIONS, BIDS, SELLERS, at, result_of

ALSO_POLARS = [
    "SELECT auction, price * 2 AS p, bidder FROM bids WHERE price > 10 AND bidder IS NOT NULL",
    "SELECT b.*, 1 AS one FROM bids AS b WHERE NOT (price BETWEEN 10 AND 30) OR bidder LIKE 'c%'",
    "SELECT auction, COUNT(*) AS n, SUM(price) AS s, MIN(price) AS low, AVG(price) AS mid FROM bids GROUP BY auction",
    "SELECT auction, MAX(price) - MIN(price) AS spread FROM bids GROUP BY auction HAVING COUNT(*) > 1",
    "SELECT auction % 2 AS odd, COUNT(DISTINCT bidder) AS bidders FROM bids GROUP BY auction % 2",
    "SELECT COUNT(price) AS n, SUM(price) + 1 AS more FROM bids",
    "SELECT DISTINCT bidder FROM bids",
    "SELECT bidder FROM bids GROUP BY bidder",
    "SELECT bids.auction, seller, price FROM bids JOIN auctions ON bids.auction = auctions.id WHERE price > 5",
    "SELECT b.auction, a.id, a.seller FROM bids AS b LEFT JOIN auctions AS a ON b.auction = a.id",
    "SELECT b.auction, a.id, a.seller FROM bids AS b RIGHT JOIN auctions AS a ON b.auction = a.id",
    "SELECT b.auction, a.id, a.seller FROM bids AS b FULL JOIN auctions AS a ON b.auction = a.id",
    "SELECT a.id, s.city FROM auctions AS a JOIN sellers AS s ON a.seller = s.seller",
    "SELECT a.id, s.seller, s.city FROM auctions AS a LEFT JOIN sellers AS s ON a.seller = s.seller",
    "SELECT auction AS x FROM bids UNION ALL SELECT id AS x FROM auctions",
    "SELECT auction AS x FROM bids UNION SELECT id AS x FROM auctions",
    "WITH t AS (SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction) SELECT n, COUNT(*) AS m FROM t GROUP BY n",
    (
        "SELECT seller, SUM(n) AS n FROM (SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction) AS c "
        "JOIN auctions AS a ON a.id = c.auction GROUP BY seller"
    ),
    "SELECT auction, CASE WHEN price > 20 THEN 'high' WHEN price IS NULL THEN 'none' ELSE 'low' END AS kind FROM bids",
    "SELECT auction, COALESCE(price, 0) AS price, UPPER(bidder) AS who FROM bids WHERE auction IN (1, 3)",
]
MANY = "TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECONDS))"

WRITTEN: list[tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = [
    (
        (
            f"SELECT auction, window_start, COUNT(*) AS n FROM {MANY} WHERE price > 9 "
            "GROUP BY auction, window_start, window_end"
        ),
        {},
        [(1, at(0), 1), (1, at(10), 1), (1, at(20), 1), (2, at(0), 1), (2, at(10), 1)],
    ),
    (
        (
            "SELECT window.end AS e, SUM(PRICE) FILTER (WHERE auction = 1) AS s FROM Bids "
            "GROUP BY window(ts, '20 seconds')"
        ),
        {},
        [(at(20), 40), (at(40), 30), (at(60), None)],
    ),
    (
        (
            "SELECT window_start AS s, COUNT(*) AS n FROM HOP(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECONDS, "
            "INTERVAL '20' SECONDS) GROUP BY window_start, window_end"
        ),
        {},
        [(at(-10), 2), (at(0), 4), (at(10), 5), (at(20), 3), (at(30), 1), (at(40), 1)],
    ),
    (
        (
            "SELECT window_end AS e, COUNT(*) AS n FROM TABLE(CUMULATE(TABLE bids, "
            "DESCRIPTOR(ts), INTERVAL '15' SECONDS, INTERVAL '30' SECONDS)) GROUP BY window_start, window_end"
        ),
        {},
        [(at(15), 4), (at(30), 7), (at(45), 1), (at(60), 1)],
    ),
    (
        (
            "SELECT auction, window_time AS last, COUNT(*) AS n FROM TABLE(SESSION(TABLE bids PARTITION BY auction, "
            "DESCRIPTOR(ts), INTERVAL '12' SECONDS)) WHERE auction < 3 GROUP BY auction, window_start, window_end"
        ),
        {},
        [(1, at(33.999), 3), (2, at(24.999), 2), (2, at(38.999), 1)],
    ),
    (
        (
            "SELECT auction, session_window.start AS s, COUNT(*) AS n FROM bids WHERE auction = 2 "
            "GROUP BY auction, session_window(ts, '12 seconds')"
        ),
        {},
        [(2, at(2), 2), (2, at(27), 1)],
    ),
    (
        (
            "WITH counts AS (SELECT auction, COUNT(*) AS n, window_start AS s, window_end AS e FROM HOP(TABLE bids, "
            "DESCRIPTOR(ts), INTERVAL '10' SECONDS, INTERVAL '20' SECONDS) GROUP BY auction, window_start, window_end) "
            "SELECT s, MAX(n) AS most, COUNT(*) AS auctions FROM counts GROUP BY s, e"
        ),
        {},
        [(at(-10), 1, 2), (at(0), 2, 2), (at(10), 2, 3), (at(20), 1, 3), (at(30), 1, 1), (at(40), 1, 1)],
    ),
    (
        (
            f"SELECT price, window_end AS e, rk FROM (SELECT *, RANK() OVER (PARTITION BY window_start, window_end "
            f"ORDER BY price DESC) AS rk FROM {MANY} WHERE price IS NOT NULL) WHERE rk = 1"
        ),
        {},
        [(20, at(10), 1), (40, at(20), 1), (30, at(30), 1), (7, at(50), 1)],
    ),
    (
        (
            f"SELECT b.auction, b.price, a.seller, b.window_start FROM {MANY} AS b "
            "JOIN TABLE(TUMBLE(DATA => TABLE auctions, TIMECOL => DESCRIPTOR(opened), SIZE => "
            "INTERVAL '10' SECONDS)) AS a ON b.auction = a.id "
            "AND b.window_start = a.window_start AND b.window_end = a.window_end"
        ),
        {},
        [(1, 10, "X", at(0)), (2, 20, "Y", at(0))],
    ),
    (
        (
            "SELECT b.auction, b.price FROM bids b LEFT SEMI JOIN auctions a ON b.auction = a.id "
            "AND b.ts >= a.opened AND b.ts <= a.opened + INTERVAL '12' SECONDS"
        ),
        {},
        [(1, 10), (1, 30), (2, 20), (2, 40), (3, None)],
    ),
    (
        (
            "SELECT b.auction, b.price FROM bids b JOIN auctions a ON b.auction = a.id "
            "WHERE b.ts BETWEEN a.opened AND a.opened + INTERVAL '12' SECONDS "
            "AND b.ts < a.opened + INTERVAL '12' SECONDS"
        ),
        {},
        [(1, 10), (2, 20), (3, None)],
    ),
    (
        (
            "SELECT b.auction, b.price, a.seller FROM bids b LEFT JOIN auctions FOR SYSTEM_TIME AS OF b.ts AS a "
            "ON b.auction = a.id WHERE b.price < 30"
        ),
        {},
        [(1, 10, "X"), (2, 5, "Y"), (2, 20, "Y"), (4, 7, None)],
    ),
    (
        (
            "SELECT auction, price, rn FROM (SELECT *, ROW_NUMBER() OVER "
            "(PARTITION BY auction ORDER BY price DESC, ts) AS rn FROM bids WHERE price IS NOT NULL) "
            "WHERE rn <= 2 AND auction < 3"
        ),
        {},
        [(1, 30, 1), (1, 30, 2), (2, 20, 2), (2, 40, 1)],
    ),
    (
        (
            "SELECT bidder, price FROM bids WHERE bidder IS NOT NULL "
            "QUALIFY ROW_NUMBER() OVER (PARTITION BY bidder ORDER BY ts) = 1"
        ),
        {},
        [("ann", 10), ("bob", 20), ("cy", None)],
    ),
    (
        (
            "SELECT price FROM (SELECT price, ROW_NUMBER() OVER (ORDER BY price DESC) AS place FROM bids "
            "WHERE price IS NOT NULL) WHERE 3 > place"
        ),
        {},
        [(30,), (40,)],
    ),
    (
        "SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction",
        {"emit": "final"},
        [(1, 3), (2, 3), (3, 1), (4, 1)],
    ),
    (
        (
            "SELECT id, `Seller` FROM (SELECT id, seller, opened FROM auctions) AS t(id, seller, o) "
            "WHERE o > '2024-03-01 00:00:01'"
        ),
        {},
        [(3, "X"), (9, "Z")],
    ),
    (
        (
            "SELECT b.price, a.seller FROM bids b JOIN (SELECT id AS auction, seller FROM auctions) a USING (auction) "
            "WHERE auction = 2"
        ),
        {},
        [(5, "Y"), (20, "Y"), (40, "Y")],
    ),
]


def _in_order(rows: pl.DataFrame) -> list[tuple[Any, ...]]:
    return sorted(rows.rows(), key=repr)


@pytest.mark.parametrize("query", ALSO_POLARS)
def test_a_query_gives_what_polars_gives(query: str) -> None:
    """Rows that are taken back have gone; names of columns are those of the query."""
    context = pl.SQLContext(
        bids=pl.DataFrame(BIDS), auctions=pl.DataFrame(AUCTIONS), sellers=pl.DataFrame(SELLERS), eager=True
    )
    expected = context.execute(query.replace("FULL JOIN", "FULL OUTER JOIN"))
    found = result_of(query)
    assert found.columns == expected.columns
    assert _in_order(found) == _in_order(expected)


@pytest.mark.parametrize(("query", "options", "expected"), WRITTEN)
def test_a_query_of_streams_gives_what_it_says(
    query: str, options: dict[str, Any], expected: list[tuple[Any, ...]]
) -> None:
    """Windows, joins in time and rankings."""
    assert _in_order(result_of(query, **options)) == sorted(expected, key=repr)
