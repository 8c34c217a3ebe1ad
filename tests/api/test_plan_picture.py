"""`env.plan()` in words and as a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from local_jobs import config, local

import tidegate as tg
from tidegate.actors.runtimes.job_snapshot import About

ROWS = pa.table({"k": ["a", "b", "a"], "n": [1, 20, 300]})
SVG = "{http://www.w3.org/2000/svg}"


def planned(env: tg.StreamEnvironment, folder: Path) -> tg.OutputTable:
    """A program of two vertices, one of which has a name that would be markup."""
    rows = env.from_batches(ROWS, name="<orders> & 'more'", uid="orders", parallelism=1)
    counts = rows.key_by("k").aggregate(n=tg.count(), emit="final", name="count by key", uid="count")
    return counts.to_table(str(folder / "t"), name="out", uid="out")


@pytest.mark.slow
def test_a_plan_is_a_picture_of_its_graph(tmp_path: Path) -> None:
    """A box for each vertex with its name and parallelism, a labelled arrow for each edge, and nothing outside."""
    with local(2) as env:
        planned(env, tmp_path)
        drawn = env.plan("drawn", checkpoints=config(tmp_path / "c"))._repr_svg_()
    assert drawn is not None
    picture = ElementTree.fromstring(drawn)
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    boxes = picture.findall(f"{SVG}g")
    texts = [[text.text for text in box.findall(f"{SVG}text")] for box in boxes]
    assert [(lines[0], " ".join(str(line) for line in lines[1:])) for lines in texts] == [
        ("x1", "<orders> & 'more'"),
        ("x2", "count by key -> out"),
    ]
    assert [text.text for text in picture.findall(f"{SVG}text")] == ["HASH"]
    assert len(picture.findall(f"{SVG}path")) == 1
    for box in boxes:
        x, y = map(float, box.attrib["transform"].removeprefix("translate(").rstrip(")").split(","))
        frame = box.find(f"{SVG}rect")
        assert frame is not None
        assert x + float(frame.attrib["width"]) < width
        assert y + float(frame.attrib["height"]) < height


def test_a_plan_in_words_leaves_the_program_as_it_is(tmp_path: Path) -> None:
    """It names vertices and inputs; the program runs afterwards."""
    with local(2) as env:
        table = planned(env, tmp_path)
        assert repr(env.plan("said", checkpoints=config(tmp_path / "c"))).splitlines() == [
            "Plan of 'said', 2 vertices, 3 tasks",
            """  "<orders> & 'more'" x1""",
            """  'count by key -> out' x2, of "<orders> & 'more'" by HASH""",
        ]
        env.execute("said", checkpoints=config(tmp_path / "c")).wait("4min")
        assert table.to_arrow().num_rows == 2


def test_a_plan_names_slot_sharing_groups(tmp_path: Path) -> None:
    """Not the default one, and none of a step with slots of its own."""
    with local(2) as env:
        rows = env.from_batches(ROWS, name="orders", parallelism=1)
        scored = rows.map(lambda row: row, name="score", slot_sharing_group="scoring", parallelism=1)
        train = scored.map(lambda row: row, name="train", num_cpus=2, parallelism=1)
        train.map(lambda row: row, name="out", slot_sharing_group="default", parallelism=1)
        plan = env.plan("said", checkpoints=config(tmp_path / "c"))
        assert repr(plan).splitlines()[1:] == [
            "  'orders' x1",
            "  'score' x1 in slot sharing group 'scoring', of 'orders' by FORWARD",
            "  'train' x1, of 'score' by FORWARD",
            "  'out' x1, of 'train' by FORWARD",
        ]
    about = About.of(plan.context, plan.spec)
    assert [vertex.slot_group for vertex in about.vertices] == ["default", "scoring", None, "default"], (
        "for the job page"
    )


def test_a_large_graph_is_only_words(tmp_path: Path) -> None:
    """As on the job page."""
    with local(1) as env:
        for number in range(41):
            env.from_batches(ROWS, uid=f"rows-{number}").to_table(str(tmp_path / f"t{number}"), uid=f"t-{number}")
        large = env.plan("large", checkpoints=config(tmp_path / "c"))
    assert large._repr_svg_() is None
    assert repr(large).startswith("Plan of 'large', 41 vertices")
