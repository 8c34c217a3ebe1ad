"""Queries give what polars' own SQL gives for the same rows, and where it has no such words what is written here."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from programs import nodes_of
from sql_streams import AUCTIONS, BIDS, SELLERS, at, environment, result_of

import tidegate as tg

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
    "SELECT b.price, a.id FROM bids AS b JOIN auctions AS a ON b.auction = a.id AND b.price - 9 = a.id",
    "SELECT b.price, a.id FROM bids AS b, auctions AS a WHERE b.auction = a.id AND b.price > 5",
    "SELECT a.id, s.city FROM auctions AS a, sellers AS s WHERE a.seller = s.seller AND s.city <> 'Oslo'",
    "SELECT a.id, s.city FROM auctions AS a JOIN sellers AS s USING (seller) WHERE seller <> 'Y'",
    "SELECT a.id, s.city FROM auctions AS a CROSS JOIN sellers AS s WHERE s.seller = a.seller AND a.id + 1 > 2",
    (
        "SELECT b.price, s.city FROM bids AS b, auctions AS a, sellers AS s "
        "WHERE a.seller = s.seller AND b.auction = a.id AND b.price IS NOT NULL"
    ),
    "SELECT a.id, s.city FROM auctions AS a LEFT JOIN sellers AS s ON a.seller = s.seller WHERE s.city IS NULL",
    (
        "SELECT a.id, s.one, s.two FROM auctions AS a JOIN (SELECT x.id AS one, y.id AS two FROM auctions AS x "
        "JOIN auctions AS y ON x.seller = y.seller) AS s ON a.id = s.one"
    ),
    "SELECT auction, price FROM bids WHERE price IS NOT NULL ORDER BY price DESC, ts LIMIT 3",
    "SELECT auction AS a, price + auction AS p FROM bids WHERE price IS NOT NULL ORDER BY ts DESC LIMIT 2",
    "SELECT id FROM auctions ORDER BY 10 * id DESC LIMIT 1",
    "SELECT DISTINCT auction FROM bids ORDER BY auction DESC LIMIT 2",
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
    ("SELECT price * 2 AS price FROM bids b WHERE price > 0 ORDER BY b.price LIMIT 2", {}, [(10,), (14,)]),
    ("SELECT auction AS x FROM bids UNION ALL SELECT id FROM auctions ORDER BY x DESC LIMIT 2", {}, [(4,), (9,)]),
    ("SELECT auction FROM bids ORDER BY price LIMIT 2", {}, [(2,), (3,)]),
    ("SELECT auction FROM bids ORDER BY price NULLS LAST LIMIT 2", {}, [(2,), (4,)]),
    ("SELECT auction FROM bids ORDER BY price DESC LIMIT 1", {}, [(2,)]),
    ("SELECT auction FROM bids ORDER BY price DESC NULLS FIRST LIMIT 1", {}, [(3,)]),
    (
        (
            "SELECT auction, window_start FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end "
            f"ORDER BY price) AS rn FROM {MANY}) AS ranked WHERE rn = 1"
        ),
        {},
        [(1, at(0)), (1, at(10)), (3, at(20)), (4, at(40))],
    ),
    (
        (
            "SELECT bidder, COUNT(*) AS n, SUM(price) FROM bids WHERE price > 0 GROUP BY bidder "
            "ORDER BY 2 DESC, SUM(price) DESC LIMIT 1"
        ),
        {"emit": "final"},
        [("bob", 3, 57)],
    ),
    (
        (
            f"SELECT auction, COUNT(*) AS n FROM {MANY} GROUP BY auction, window_start, window_end "
            "ORDER BY window_start DESC LIMIT 1"
        ),
        {},
        [(4, 1)],
    ),
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
            f"SELECT auction, window_time AS last, COUNT(*) AS n FROM (SELECT * FROM {MANY} WHERE window_time > "
            "'2024-03-01 00:00:10') AS w WHERE price > 9 AND w.window_end <= '2024-03-01 00:00:30' "
            "GROUP BY auction, window_start, window_end"
        ),
        {},
        [(1, at(19.999), 1), (1, at(29.999), 1), (2, at(19.999), 1)],
    ),
    (
        (
            "SELECT window_start AS s, COUNT(*) AS n FROM HOP(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECONDS, "
            "INTERVAL '20' SECONDS) WHERE window_start BETWEEN '2024-03-01' AND '2024-03-01 00:00:20' AND auction < 4 "
            "GROUP BY window_start, window_end"
        ),
        {},
        [(at(0), 4), (at(10), 5), (at(20), 3)],
    ),
    (
        (
            "SELECT b.price, a.seller, b.window_start FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '20' "
            "SECONDS)) AS b, TABLE(TUMBLE(TABLE auctions, DESCRIPTOR(opened), INTERVAL '20' SECONDS)) AS a "
            "WHERE b.auction = a.id AND b.window_start = a.window_start AND b.window_end = a.window_end "
            "AND a.window_end > '2024-03-01' AND b.window_start < '2024-03-01 00:00:20'"
        ),
        {},
        [(10, "X", at(0)), (20, "Y", at(0)), (30, "X", at(0)), (40, "Y", at(0))],
    ),
    (
        (
            "SELECT price, window_start FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start, window_end "
            f"ORDER BY price DESC) AS rn FROM {MANY} WHERE price IS NOT NULL AND window_start > '2024-03-01 00:00:05') "
            "WHERE rn = 1 AND window_end < '2024-03-01 00:00:45'"
        ),
        {},
        [(30, at(20)), (40, at(10))],
    ),
    (
        (
            "SELECT s.city, window_start, COUNT(*) AS n FROM TABLE(TUMBLE(TABLE auctions, DESCRIPTOR(opened), "
            "INTERVAL '10' SECONDS)) AS a, sellers AS s WHERE a.seller = s.seller "
            "AND window_start > '2024-03-01 00:00:05' GROUP BY s.city, window_start, window_end"
        ),
        {},
        [("Oslo", at(10), 1)],
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
            "SELECT b.auction, b.price, a.seller FROM bids b LEFT JOIN auctions a ON b.auction = a.id "
            "AND a.opened < b.ts AND a.opened > b.ts - INTERVAL '12' SECONDS"
        ),
        {},
        [
            (1, 10, "X"),
            (1, 30, None),
            (1, 30, None),
            (2, 5, None),
            (2, 20, "Y"),
            (2, 40, None),
            (3, None, "X"),
            (4, 7, None),
        ],
    ),
    (
        (
            f"SELECT b.price, a.seller, a.window_start FROM {MANY} AS b RIGHT JOIN {MANY.replace('bids', 'auctions')} "
            "AS a ON b.auction = a.id AND b.window_start = a.window_start AND b.window_end = a.window_end"
        ).replace("auctions, DESCRIPTOR(ts)", "auctions, DESCRIPTOR(opened)"),
        {},
        [(10, "X", at(0)), (20, "Y", at(0)), (None, "X", at(10)), (None, "Z", at(30))],
    ),
    (
        (
            f"SELECT b.price, a.seller, window_start FROM {MANY} AS b FULL JOIN {MANY.replace('bids', 'auctions')} "
            "AS a ON b.auction = a.id AND b.window_start = a.window_start AND b.window_end = a.window_end "
            "WHERE b.price IS NULL AND seller IS NOT NULL"
        ).replace("auctions, DESCRIPTOR(ts)", "auctions, DESCRIPTOR(opened)"),
        {},
        [(None, "X", at(10)), (None, "Z", at(30))],
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
            "SELECT b.auction, b.price, v.price AS held FROM bids b JOIN bids FOR SYSTEM_TIME AS OF b.ts AS v "
            "ON b.auction = v.auction AND v.bidder IS NOT NULL WHERE v.price > 15"
        ),
        {},
        [(1, 30, 30), (1, 30, 30), (2, 20, 20)],
    ),
    (
        (
            f"WITH w AS (SELECT auction, COUNT(*) AS n, window_start AS s, window_end AS e FROM {MANY} "
            "GROUP BY auction, window_start, window_end) "
            "SELECT x.auction, y.n, x.s FROM w AS x JOIN w AS y ON x.auction = y.auction AND x.s = y.s "
            "WHERE x.auction <> 2"
        ),
        {},
        [(1, 1, at(0)), (1, 1, at(10)), (1, 1, at(20)), (3, 1, at(20)), (4, 1, at(40))],
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
        (
            "SELECT b.price FROM bids AS b JOIN auctions AS a ON b.auction = a.id AND b.auction = a.id + 0 "
            "WHERE a.id = b.auction AND a.id > 1"
        ),
        {},
        [(5,), (20,), (40,), (None,)],
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


LISTS = pa.table(
    {
        "k": [1, 2, 3, 4],
        "tags": [["a", "b"], [], None, ["c", None]],
        "points": [[{"x": 1, "y": "p"}, {"x": 2, "y": None}], [], None, [None]],
        "nested": [[[1], [2, 3]], [], None, [[4], None]],
        "line": ["to be  or", "", None, "x.y|z"],
    }
)
ONE_EACH = [(1, "a"), (1, "b"), (4, "c"), (4, None)]
WITH_EMPTY = [*ONE_EACH, (2, None), (3, None)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT k, x FROM lists CROSS JOIN UNNEST(tags) AS u(x)", ONE_EACH),
        ("SELECT k, u.x FROM lists l, UNNEST(l.tags) AS u(x) WHERE u.x <> 'a'", ONE_EACH[1:3]),
        ("SELECT k, x FROM lists LEFT JOIN UNNEST(tags) AS u(x) ON TRUE", WITH_EMPTY),
        ("SELECT k, y, z FROM lists, UNNEST(points) AS u(z, y)", [(1, "p", 1), (1, None, 2), (4, None, None)]),
        ("SELECT u.k, v.x FROM lists AS u, UNNEST(points) AS v", [(1, 1), (1, 2), (4, None)]),
        ("SELECT k, x FROM lists LATERAL VIEW explode(tags) u AS x", ONE_EACH),
        ("SELECT k, u.col FROM lists LATERAL VIEW OUTER explode(tags) u", WITH_EMPTY),
        ("SELECT k, p.x FROM lists LATERAL VIEW explode(points) u AS p", [(1, 1), (1, 2), (4, None)]),
        (
            "SELECT k, y FROM lists LATERAL VIEW explode(nested) u AS x LATERAL VIEW explode(x) v AS y",
            [(1, 1), (1, 2), (1, 3), (4, 4)],
        ),
        ("SELECT k, x FROM lists, LATERAL explode(tags) AS u(x)", ONE_EACH),
        ("SELECT k, x FROM lists LEFT JOIN LATERAL explode(tags) AS u(x) ON TRUE", WITH_EMPTY),
        ("SELECT k, x FROM lists JOIN LATERAL explode_outer(tags) AS u(x) ON TRUE", WITH_EMPTY),
        ("SELECT k, explode(tags) AS tags FROM lists WHERE k > 0", ONE_EACH),
        (
            "SELECT explode(tags) AS k FROM lists QUALIFY ROW_NUMBER() OVER (PARTITION BY k ORDER BY lists.k) = 1",
            [("a", "+I"), ("c", "+I")],
        ),
        ("SELECT k, tags[0], explode(tags) FROM lists", [(1, "a", "a"), (1, "a", "b"), (4, "c", "c"), (4, "c", None)]),
        (
            "SELECT w, COUNT(*) AS n FROM (SELECT explode(split(line, '[ ]+')) AS w FROM lists) GROUP BY w",
            [("", 1), ("be", 1), ("or", 1), ("to", 1), ("x.y|z", 1)],
        ),
        (
            "SELECT a.id, x FROM lists, UNNEST(tags) AS u(x), auctions a WHERE a.id = lists.k AND x <> 'a'",
            [(1, "b")],
        ),
    ],
)
def test_a_row_comes_for_each_element(query: str, expected: list[tuple[Any, ...]]) -> None:
    """UNNEST, LATERAL VIEW and explode give the same rows. Only UNNEST turns the fields of a struct into columns."""
    with environment() as env:
        env.create_temporary_view("lists", env.from_batches(LISTS, splits=2, uid="lists"))
        rows = env.sql(query, emit="final").collect()
        assert env.execute("sql").wait("4min") == "finished"
    assert _in_order(pl.DataFrame(rows.to_arrow())) == sorted(expected, key=repr)


def test_a_list_is_not_repeated_where_only_its_elements_are_needed() -> None:
    """A row with a thousand elements would have a thousand lists of a thousand."""
    query = "SELECT k, x FROM lists, UNNEST(tags) AS u(x)"
    with environment() as env:
        env.create_temporary_view("lists", env.from_batches(LISTS, uid="lists"))
        env.sql(query)
        (node,) = (each for each in nodes_of(env) if each.name == "sql explode")
        assert node.schema is not None
        assert node.schema.names == ["k", "x"]


@pytest.mark.parametrize(
    ("query", "options", "count"),
    [
        ("SELECT auction FROM bids LIMIT 3", {}, 3),
        ("SELECT auction FROM bids LIMIT 30", {}, 8),
        ("SELECT auction FROM bids LIMIT 0", {}, 0),
        ("(SELECT auction FROM bids) LIMIT 2", {}, 2),
        ("SELECT auction FROM bids UNION ALL SELECT id FROM auctions LIMIT 9", {}, 9),
        ("SELECT * FROM (SELECT auction FROM bids LIMIT 5) WHERE auction > 0", {}, 5),
        ("WITH some AS (SELECT auction FROM bids LIMIT 4) SELECT COUNT(*) AS n FROM some", {"emit": "final"}, 1),
        ("SELECT bidder, COUNT(*) AS n FROM bids GROUP BY bidder LIMIT 3", {"emit": "final"}, 3),
    ],
)
def test_a_limit_keeps_so_many_rows(query: str, options: dict[str, Any], count: int) -> None:
    """LIMIT counts the rows of all subtasks together. An inner query's LIMIT applies before the outer query."""
    found = result_of(query, **options)
    assert found.height == count
    assert query.startswith("WITH") is (found.columns == ["n"] and found.rows() == [(4,)])


@pytest.mark.parametrize(
    "query",
    [
        "SELECT auction, price, ts FROM bids WHERE price > 0 ORDER BY price DESC, ts LIMIT 3",
        "SELECT auction, price, ts FROM bids WHERE price > 0 QUALIFY ROW_NUMBER() OVER (ORDER BY price DESC, ts) <= 3",
    ],
)
def test_the_first_rows_of_all_are_upserted_by_keys_of_the_table(query: str) -> None:
    """One subtask ranks them, so changes of a row are in order, whatever its keys are."""
    with environment() as env:
        table = env.sql(query).to_table("memory://first", mode="upsert", keys=["ts"], if_exists="overwrite")
        assert env.execute("sql").wait("4min") == "finished"
    assert _in_order(table.to_polars().select("auction", "price")) == [(1, 30), (1, 30), (2, 40)]


def test_a_row_finds_in_a_table_what_equals_it() -> None:
    """A value that the type of the table's column does not have finds nothing: 2.5 is no 2."""
    sizes = pa.table({"size": [2, 3, 5], "most": [4, 3, 5], "name": ["two", "three", "five"]})
    with environment() as env:
        env.create_temporary_view("sizes", sizes)
        rows = env.sql("SELECT b.price, s.name FROM bids b LEFT JOIN sizes s ON b.price / 2 = s.size").collect()
        query = "SELECT s.name FROM auctions a JOIN sizes s ON a.id = s.size AND a.id = s.most AND s.most = a.id"
        twice = env.sql(query).collect()
        assert env.execute("sql").wait("4min") == "finished"
    assert twice.to_arrow().column("name").to_pylist() == ["three"]
    named = [(row["price"], row["name"]) for row in rows.to_arrow().to_pylist() if row["name"] is not None]
    assert named == [(10, "five")]
    assert rows.to_arrow().num_rows == BIDS.num_rows


@pytest.mark.parametrize("of_table", [pa.uint8(), pa.uint16(), pa.uint32(), pa.int32()])
@pytest.mark.parametrize("of_stream", [pa.uint32(), pa.int64()])
@pytest.mark.parametrize("how", ["JOIN", "LEFT JOIN"])
def test_a_table_is_looked_up_by_unsigned_numbers(of_table: pa.DataType, of_stream: pa.DataType, how: str) -> None:
    """They are equal as numbers are, however wide; the key of the table keeps its type, or has the stream's."""
    stream = pa.table({"n": pa.array([1, 3, 255, 70_000, None], of_stream)})
    table = pa.table({"k": pa.array([3, 1, 255 if of_table != pa.int32() else 70_000], of_table), "name": list("abc")})
    with environment() as env:
        env.create_temporary_view("numbers", env.from_batches(stream, uid="numbers"))
        env.create_temporary_view("named", table)
        query = f"SELECT n, k, name FROM numbers {how} named ON n = k"
        rows = env.sql(query).collect()
        assert env.execute("sql").wait("4min") == "finished"
    wide = [pl.DataFrame(each).with_columns(pl.selectors.numeric().cast(pl.Int64)) for each in (stream, table)]
    expected = pl.SQLContext(numbers=wide[0], named=wide[1], eager=True).execute(query)
    found = pl.DataFrame(rows.to_arrow()).with_columns(pl.selectors.numeric().cast(pl.Int64))
    assert _in_order(found) == _in_order(expected)
    assert found.columns == ["n", "k", "name"]


def test_a_table_is_looked_up_by_categories() -> None:
    """They are text."""
    cities = pa.table({"of": pa.array(["Y", "X", "Y"]).dictionary_encode(), "city": ["Kyiv", "Oslo", "Lviv"]})
    with environment() as env:
        env.create_temporary_view("cities", cities)
        rows = env.sql("SELECT a.id, c.of, c.city FROM auctions a, cities c WHERE a.seller = c.of").collect()
        assert env.execute("sql").wait("4min") == "finished"
    found = {tuple(str(value) for value in row.values()) for row in rows.to_arrow().to_pylist()}
    assert found == {("1", "X", "Oslo"), ("2", "Y", "Kyiv"), ("2", "Y", "Lviv"), ("3", "X", "Oslo")}


def test_event_time_that_no_query_names_goes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A query says which columns it wants; what needs event time later says so itself."""
    with environment() as env:
        env.create_temporary_view(
            "prices", env.sql("SELECT auction, price FROM bids UNION ALL SELECT id, 1 FROM auctions")
        )
        with pytest.raises(tg.ConfigurationError, match="the stream has no event time"):
            env.sql("SELECT COUNT(*) AS n FROM prices GROUP BY window(price, '10 seconds')")
    assert "event time" not in caplog.text


def test_fields_of_structs_are_joined_by() -> None:
    """In equalities, and in other conditions of two streams."""
    orders = pa.table({"item": [{"id": 1, "most": 2}, {"id": 2, "most": 1}], "at": [at(1), at(2)]})
    with environment() as env:
        env.create_temporary_view("orders", env.from_batches(orders, timestamp="at", uid="orders"))
        query = "SELECT a.id FROM orders o JOIN auctions a ON o.item.id = a.id AND o.item.most > a.id"
        rows = env.sql(query).collect()
        assert env.execute("sql").wait("4min") == "finished"
    assert rows.to_arrow().column("id").to_pylist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "rows"), [("AND", 0), ("OR", 4)])
def test_a_condition_may_have_hundreds_of_parts(word: str, rows: int) -> None:
    """Programs make such queries. The parts of a chain are not nested in each other."""
    parts = f" {word} ".join(
        f"price = {price}" for price in (BIDS["price"].to_pylist()[:3] + list(range(1_000, 1_500)))
    )
    assert result_of(f"SELECT auction FROM bids WHERE {parts}").height == rows
