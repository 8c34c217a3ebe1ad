"""What SQL does not cover is refused when the query is given: which part, where it is, and what to write instead."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa
import pytest
from sql_streams import AUCTIONS, environment

import tidegate as tg

RANKED = "(SELECT *, {} OVER (PARTITION BY auction ORDER BY price) AS rn FROM bids)"
WINDOWED = "TABLE(TUMBLE(TABLE bids, DESCRIPTOR({}), {})) GROUP BY {}"
BOTH = "window_start, window_end"
HOUR, MONTH = "INTERVAL '1' HOUR", "INTERVAL '1' MONTH"

ERRORS: dict[str, str] = {
    "SELECT x FROM bids": "line 1, column 8: x: there is no column 'x'; name one of auction, price, bidder, ts",
    "SELECT\n  price,\n  b.zz\nFROM bids b": "line 3, column 3: b.zz: there is no column 'zz'",
    "SELEC * FROM bids": "line 1, column 1: the query begins with 'SELEC', and not with SELECT or WITH",
    "\n (SELET auction FROM bids)": "line 2, column 3: the query begins with 'SELET'",
    "SELECT auction + FROM bids": "a part of the expression is missing, near",
    "SELECT auction FROM nothing": "line 1, column 21: nothing: there is no view 'nothing'; there are auctions, bids",
    "SELECT auction FROM db.bids": "neither databases nor catalogs",
    "SELECT auction FROM bids ORDER BY price": "a stream has no end, so it cannot be sorted: .*ROW_NUMBER",
    "SELECT auction FROM bids LIMIT 1 + 1": r"LIMIT 1 \+ 1: LIMIT takes a whole number as a literal",
    "SELECT auction FROM bids LIMIT ALL": "LIMIT takes a whole number",
    "SELECT auction FROM bids FETCH FIRST 2 ROWS WITH TIES": "LIMIT takes a whole number",
    "SELECT auction FROM bids LIMIT 2 BY auction": "EXPRESSIONS is not covered",
    "SELECT auction FROM bids LIMIT 2 OFFSET 3": "OFFSET 3: OFFSET is not covered",
    "(SELECT auction FROM bids) OFFSET 3": "OFFSET 3: OFFSET is not covered",
    "SELECT auction, COUNT(*) FROM bids GROUP BY auction LIMIT 2": "LIMIT 2: LIMIT cannot be applied to rows that may "
    "be replaced or retracted",
    "SELECT * FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '1' HOUR)) LIMIT 3": "LIMIT cannot be applied "
    "before the rows are grouped by their windows",
    "SELECT auction FROM bids ORDER BY price LIMIT 0": "keeps at least one row",
    "SELECT auction FROM bids ORDER BY 2 LIMIT 1": "the result has 1 columns: give a number",
    "SELECT auction FROM bids GROUP BY auction ORDER BY MAX(price) LIMIT 1": "add the aggregate to SELECT",
    "SELECT UPPER(EXPLODE(SPLIT(bidder, 'n'))) FROM bids": "EXPLODE makes several rows of one",
    "SELECT auction FROM bids WHERE EXPLODE(SPLIT(bidder, 'n')) = 'a'": "or in LATERAL VIEW",
    "SELECT EXPLODE(SPLIT(bidder, 'n')), EXPLODE(SPLIT(bidder, 'o')) FROM bids": "SPLIT.*: SELECT takes EXPLODE alone",
    "SELECT EXPLODE(SPLIT(bidder, 'n')) AS x, COUNT(*) FROM bids GROUP BY 1": "once and without groups",
    "SELECT EXPLODE(SPLIT(bidder, 'n'), 1) FROM bids": "EXPLODE takes 1 argument, not 2",
    "SELECT x FROM bids, UNNEST(price) AS u(x)": "price: a list is needed here, but this is BIGINT",
    "SELECT x FROM bids, UNNEST(SPLIT(bidder, 'n')) AS u": "name the column of the elements",
    "SELECT x FROM bids, UNNEST(SPLIT(bidder, 'n')) AS u(x, y)": r"UNNEST\(.*AS u\(x, y\): .* but 2 names are given",
    "SELECT x FROM bids, UNNEST(SPLIT(bidder, 'n')) WITH ORDINALITY AS u(x, n)": "WITH ORDINALITY is not covered",
    "SELECT x FROM bids, UNNEST(SPLIT(bidder, 'n'), SPLIT(bidder, 'o')) AS u(x)": "UNNEST takes one list",
    "SELECT x FROM bids RIGHT JOIN UNNEST(SPLIT(bidder, 'n')) AS u(x) ON TRUE": "with CROSS JOIN, or with LEFT JOIN",
    "SELECT x FROM bids JOIN UNNEST(SPLIT(bidder, 'n')) AS u(x) ON x = 'a'": "x = 'a': .* put the condition into WHERE",
    "SELECT x FROM bids JOIN UNNEST(SPLIT(bidder, 'n')) AS u(x) USING (x)": "USING is not covered",
    "SELECT x FROM UNNEST(SPLIT('a', 'n')) AS u(x)": "UNNEST in FROM is not covered",
    "SELECT x FROM bids LATERAL VIEW POSEXPLODE(SPLIT(bidder, 'n')) u AS i, x": "POSEXPLODE.*: LATERAL takes",
    "SELECT x FROM bids, LATERAL (SELECT id AS x FROM auctions) u": "LATERAL takes EXPLODE",
    "SELECT x FROM bids, LATERAL TABLE(f(bidder)) AS u(x)": "LATERAL takes EXPLODE",
    (
        "SELECT x FROM (SELECT SPLIT(bidder, 'n') AS l, COUNT(*) AS n FROM bids GROUP BY SPLIT(bidder, 'n')) "
        "LATERAL VIEW EXPLODE(l) u AS x"
    ): "SQL, line 1, column",
    "SELECT SPLIT(bidder, 'n*') FROM bids": "the pattern also matches an empty text",
    "SELECT SPLIT(bidder, '(?=n)') FROM bids": "the pattern also matches an empty text",
    "SELECT auction FROM bids ORDER BY zz LIMIT 1": "there is no column 'zz'",
    "SELECT bidder FROM bids ORDER BY bidder LIMIT 1": "cannot be ordered by a column of type string",
    "SELECT auction FRO bids": "line 1, column 20: Invalid expression",
    "SELECT 'abc": "the text cannot be split into words",
    "SELECT 1": "a query needs FROM",
    "SELECT auction FROM bids; SELECT 2": "sql takes one statement, not 2",
    "INSERT INTO t SELECT * FROM bids": "not INSERT: write rows with to_table",
    "SELECT auction FROM bids WHERE price": "column 32: price: a condition is needed here, but this is BIGINT",
    "SELECT auction FROM bids WHERE COUNT(*) > 1": "WHERE is calculated before aggregates: .*HAVING",
    "SELECT auction FROM bids HAVING price > 1": "HAVING is for groups",
    "SELECT price, COUNT(*) FROM bids GROUP BY auction": "'price' is neither in GROUP BY nor in an aggregate",
    "SELECT SUM(COUNT(*)) FROM bids": "an aggregate cannot contain another one|not within another aggregate",
    "SELECT SUM(DISTINCT price) FROM bids": "DISTINCT is for COUNT",
    "SELECT COUNT(DISTINCT price, bidder) FROM bids": "takes one column",
    "SELECT COLLECT_LIST(price) FROM bids": "tg.collect_list",
    "SELECT auction FROM bids GROUP BY ROLLUP(auction)": "write one query for each grouping",
    "SELECT NOW() FROM bids": "reads the clock",
    "SELECT CURRENT_TIMESTAMP FROM bids": "reads the clock",
    "SELECT RAND() FROM bids": "is random",
    "SELECT FOO(price) FROM bids": "there is no function FOO",
    "SELECT ABS(price, 1) FROM bids": "ABS takes 1 argument, not 2",
    "SELECT bidder + 1 FROM bids": "STRING is not a number: cast it",
    "SELECT price FROM bids UNION ALL SELECT NULL FROM bids": (
        r"UNION: column 'price' is BIGINT in the first query and STRING in the second; .*NULL without a CAST"
    ),
    "SELECT price = 'x' FROM bids": r"BIGINT and STRING cannot be combined; convert one of them with CAST",
    "SELECT ts > 'soon' FROM bids": "'soon' is not a TIMESTAMP",
    "SELECT ts - ts FROM bids": "TIMESTAMPDIFF",
    "SELECT CAST(ts AS BIGINT) FROM bids": "UNIX_MILLIS",
    "SELECT INTERVAL '1' DAY AS day FROM bids": "an interval cannot be a column",
    "SELECT bidder LIKE bidder FROM bids": "must be a text, as a literal",
    "SELECT price & 1 FROM bids": "BitwiseAnd is not covered",
    "SELECT price BETWEEN SYMMETRIC 30 AND 1 FROM bids": "SYMMETRIC is not covered",
    "SELECT CAST(bidder AS INT DEFAULT 1 ON CONVERSION ERROR) FROM bids": "DEFAULT is not covered",
    (
        "SELECT 1 FROM bids b JOIN auctions a ON b.auction = a.id "
        f"AND b.ts BETWEEN SYMMETRIC a.opened AND a.opened + {HOUR}"
    ): "SYMMETRIC is not covered",
    "SELECT REGEXP_REPLACE(bidder, '(a)', '$2') FROM bids": "the pattern has no group 2",
    "SELECT REGEXP_REPLACE(bidder, '(a)', '$') FROM bids": "a group's number after",
    "SELECT REGEXP_REPLACE(bidder, '(a)', bidder) FROM bids": "must be a text, as a literal",
    "SELECT REPLACE(bidder, 'a', NULL) FROM bids": "must be a text, as a literal",
    "SELECT DATE_FORMAT(ts, 'QQQQQ') FROM bids": "no letters 'QQQQQ' in a pattern",
    "SELECT auction AS x, price AS x FROM bids": "would have x twice",
    "SELECT auction FROM bids b JOIN bids c ON b.auction = c.auction": "'auction' is ambiguous: write b.auction",
    "SELECT SUM(price) OVER (PARTITION BY auction) FROM bids": "OVER .* is for ROW_NUMBER and RANK",
    f"SELECT * FROM {RANKED.format('ROW_NUMBER()')}": "limits the number of rows, as in WHERE rn <= 10",
    f"SELECT * FROM {RANKED.format('ROW_NUMBER()')} WHERE rn = 3": "a ranking keeps the first rows",
    f"SELECT * FROM {RANKED.format('RANK()')} WHERE rn < 3": "RANK is only supported for windows",
    f"SELECT * FROM {RANKED.format('DENSE_RANK()')} WHERE rn < 3": "is for ROW_NUMBER and RANK",
    (
        "SELECT n FROM (SELECT n, ROW_NUMBER() OVER (ORDER BY n DESC) AS rn FROM "
        "(SELECT COUNT(*) AS n FROM bids GROUP BY auction)) WHERE rn <= 2"
    ): "rows that may be retracted cannot be ranked",
    f"SELECT 1 FROM {WINDOWED.format('price', HOUR, BOTH)}": "the event time of this stream is 'ts'",
    f"SELECT 1 FROM {WINDOWED.format('ts', HOUR, 'window_start')}": "by both window_start and window_end",
    f"SELECT 1 FROM {WINDOWED.format('ts', MONTH, BOTH)}": "windows of months have no fixed length",
    f"SELECT 1 FROM {WINDOWED.format('ts', '10', BOTH)}": "an interval is needed here: write INTERVAL '10' SECONDS",
    "SELECT * FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '1' HOUR))": "does not use the windows",
    f"SELECT COUNT(*) FROM HOP(TABLE bids, DESCRIPTOR(ts), {HOUR}, {HOUR})": "add window_start and window_end to "
    "GROUP BY",
    "SELECT 1 FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts))) GROUP BY " + BOTH: "SIZE is missing",
    "SELECT auction, COUNT(*) FROM TABLE(SESSION(TABLE bids, DESCRIPTOR(ts), INTERVAL '1' HOUR)) GROUP BY auction, "
    + BOTH: "keys of the sessions are no columns, but GROUP BY names",
    "SELECT COUNT(*) FROM bids GROUP BY window(ts, '10 parsecs')": "unknown unit 'parsecs'",
    "SELECT window, COUNT(*) FROM bids GROUP BY window(ts, '10 seconds')": "window.start or window.end",
    "SELECT 1 FROM bids b JOIN auctions a ON b.price > 10": "needs an equality between a column of each side",
    "SELECT 1 FROM bids b LEFT JOIN auctions a ON b.auction = a.id AND b.price > 10": "put it into WHERE",
    "SELECT 1 FROM bids b LEFT JOIN auctions a ON b.auction = a.id AND b.price > a.id": "determine which rows have no",
    "SELECT 1 FROM bids b LEFT ANTI JOIN auctions a ON b.auction = a.id": "ANTI JOIN is for windows and intervals",
    "SELECT 1 FROM bids b NATURAL JOIN auctions a": "NATURAL JOIN is not covered",
    "SELECT 1 FROM bids b JOIN auctions FOR SYSTEM_TIME AS OF b.price AS a ON b.auction = a.id": "needs the event time",
    "SELECT 1 FROM bids b LEFT JOIN auctions FOR SYSTEM_TIME AS OF b.ts AS a ON b.auction = a.id AND a.id > 1": (
        "determine which rows have no partner"
    ),
    "SELECT 1 FROM bids FOR SYSTEM_TIME AS OF ts": "VERSION is not covered here",
    "SELECT city FROM sellers": "FROM must begin with a stream",
    "SELECT id FROM sellers s, auctions a WHERE a.seller = s.seller": "and join the registered table with it",
    "SELECT id FROM auctions a, sellers s WHERE s.city = 'Oslo'": "a join with a registered table needs equalities",
    "SELECT id FROM auctions a JOIN sellers s USING (id)": "the table has no column 'id'; name one of seller, city",
    f"SELECT 1 FROM {WINDOWED.replace(' GROUP', ' WHERE ts < window_end GROUP').format('ts', HOUR, BOTH)}": (
        "holds for all of its rows, but 'ts' belongs to one row: put the condition into HAVING"
    ),
    (
        f"SELECT 1 FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), {HOUR})) b LEFT JOIN (SELECT * FROM TABLE(TUMBLE("
        f"TABLE auctions, DESCRIPTOR(opened), {HOUR})) WHERE window_end > '2024-01-01') a ON b.auction = a.id "
        "AND b.window_start = a.window_start AND b.window_end = a.window_end"
    ): "is checked after the join, but a LEFT JOIN keeps rows without a partner",
    (
        f"SELECT b.window_end FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), {HOUR})) b FULL JOIN TABLE(TUMBLE("
        f"TABLE auctions, DESCRIPTOR(opened), {HOUR})) a ON b.auction = a.id AND b.window_start = a.window_start "
        "AND b.window_end = a.window_end"
    ): "b.window_end: there is no column 'window_end'; name one of .*, window_start, window_end",
    (
        f"SELECT auction FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), {HOUR})) WHERE window_end > '2024-01-01' "
        "UNION ALL SELECT id FROM auctions"
    ): "UNION cannot be applied before the rows are grouped by their windows",
    (
        f"SELECT window_end FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), {HOUR})) UNION ALL "
        "SELECT opened FROM auctions"
    ): "UNION cannot be applied before the rows are grouped by their windows",
    (
        f"SELECT b.price FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), {HOUR})) b JOIN auctions FOR SYSTEM_TIME AS OF "
        "b.ts AS a ON b.auction = a.id WHERE b.window_end > '2024-01-01'"
    ): "FOR SYSTEM_TIME AS OF joins single rows",
    "SELECT 1 FROM auctions a FULL JOIN sellers s ON a.seller = s.seller": "must be INNER or LEFT",
    "SELECT auction FROM bids INTERSECT SELECT id FROM auctions": "INTERSECT is not covered",
    "SELECT auction, price FROM bids UNION ALL SELECT id FROM auctions": "one side has 2 columns, the other 1",
    "SELECT 1 FROM bids WHERE auction IN (SELECT id FROM auctions)": "IN takes a list of values",
    "SELECT auction FROM bids TABLESAMPLE (10 PERCENT)": "SAMPLE is not covered",
    "SELECT x FROM VALUES (1) AS t(x)": "VALUES in FROM is not covered",
    "WITH RECURSIVE c AS (SELECT 1) SELECT * FROM c": "a recursive query is not covered",
    "SELECT auction, COUNT(*) n FROM (SELECT *, COUNT(*) OVER () FROM bids) GROUP BY auction": "OVER",
    "SELECT MIN_BY(bidder, price) FROM (SELECT bidder, MAX(price) AS price FROM bids GROUP BY bidder)": "changes",
}


@pytest.mark.parametrize("query", ERRORS)
def test_a_query_that_is_not_covered_is_refused(query: str) -> None:
    """At once, and nothing is made of it that would run."""
    with environment() as env, pytest.raises(tg.ConfigurationError, match=r"(?s)SQL|sql takes") as refused:
        env.sql(query)
    refused.match(f"(?s){ERRORS[query]}")


@pytest.mark.parametrize(
    "query",
    [
        f"SELECT {'(' * 3_000}auction{')' * 3_000} AS a FROM bids",
        f"SELECT {'abs(' * 3_000}auction{')' * 3_000} AS a FROM bids",
        f"SELECT auction FROM bids WHERE {'NOT ' * 3_000}auction = 1",
        f"SELECT {' + '.join(['price'] * 3_000)} AS p FROM bids",
        f"SELECT auction FROM {'(SELECT auction FROM ' * 3_000}bids{') AS q' * 3_000}",
        " UNION ALL ".join(["SELECT auction FROM bids"] * 3_000),
    ],
    ids=["parentheses", "calls", "not", "sum", "subqueries", "union"],
)
def test_a_query_that_is_nested_too_deeply_is_refused(query: str) -> None:
    """With what to do instead, and not by an error of Python's."""
    with environment() as env, pytest.raises(tg.ConfigurationError, match="nested too deeply"):
        env.sql(query)


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ("SELECT 1e3+1, missing FROM t", "line 1, column 15"),
        ("SELECT 1e3-1e2-1\n, missing + 1e3-1 FROM t", "line 2, column 3"),
        ("SELECT '1e3+1', 1e1+1e1+missing FROM t", "line 1, column 25"),
    ],
)
def test_an_error_behind_sums_of_doubles_has_its_place(query: str, where: str) -> None:
    """`1e3+1` is read as a number, a sign and a number, and later words keep their columns."""
    with tg.StreamEnvironment.local(1) as env:
        env.create_temporary_view("t", env.from_batches(pa.table({"x": [1]})))
        with pytest.raises(tg.ConfigurationError, match=f"SQL, {where}: missing"):
            env.sql(query)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"emit": "often"}, 'emit must be "changes", "update" or "final"'),
        ({"ttl": "1h"}, 'ttl= needs emit="update"'),
        ({"uid": "a/b"}, "uid"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    """Also where only the step that a query becomes can tell."""
    with environment() as env, pytest.raises(tg.ConfigurationError, match=said):
        env.sql("SELECT auction, COUNT(*) AS n FROM bids GROUP BY auction", **options)


def test_distinct_of_changes_takes_no_time_to_live() -> None:
    """It cannot forget a row that may be taken back; of a plain stream it can."""
    query = "SELECT DISTINCT b.auction FROM bids b LEFT JOIN auctions a ON b.auction = a.id"
    with environment() as env:
        env.sql(query)
        env.sql("SELECT DISTINCT auction FROM bids", ttl="1h")
        with pytest.raises(tg.ConfigurationError, match="DISTINCT of changes must keep all rows"):
            env.sql(query, ttl="1h")


def test_a_view_has_a_name_of_its_own_and_known_columns() -> None:
    """Names are any case; another stream takes a name only if that is asked for."""
    with environment() as env:
        other = env.from_batches(AUCTIONS, uid="other")
        for name, said in (("BIDS", "there is such a view"), ("a b", "letters, digits"), ("1a", "letters, digits")):
            with pytest.raises(tg.ConfigurationError, match=said):
                env.create_temporary_view(name, other)
        with pytest.raises(tg.ConfigurationError, match="refresh= and max_stale= are for tables"):
            env.create_temporary_view("fresh", other, refresh="1min")
        env.create_temporary_view("BIDS", other, replace=True)
        schema = env.sql("SELECT * FROM bids").schema
        assert schema is not None
        assert schema.names == ["id", "seller", "opened"]
        env.create_temporary_view("later", other.map_batches(lambda batch: batch))
        with pytest.raises(tg.ConfigurationError, match="columns of 'later' are not known before the job runs"):
            env.sql("SELECT * FROM later")
        env.create_temporary_view("wide", env.from_batches(pa.table({"u": pa.array([1], pa.uint64())}), uid="wide"))
        assert env.sql("SELECT u FROM wide").schema == pa.schema({"u": pa.uint64()})
        with pytest.raises(tg.ConfigurationError, match="column 'u' is uint64, for which SQL has no type"):
            env.sql("SELECT u + 1 FROM wide")


def test_a_missing_parser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that brings it."""
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    with environment() as env, pytest.raises(tg.ConfigurationError, match=r"needs sqlglot, .*'tidegate\[sql\]'"):
        env.sql("SELECT * FROM bids")
