"""How a layout is shown: a text table, and in notebooks an SVG picture, which the tests parse."""

from collections import Counter
from xml.etree import ElementTree

import pytest
from plan_helpers import AXES, coordinates, factorizations, layout_of, orders

from dispatch import Layout
from dispatch.layout import Mesh

SVG = "{http://www.w3.org/2000/svg}"

DP2_TP2_PP2 = layout_of(coordinates({"tp": 2, "cp": 1, "dp": 2, "pp": 2}, ("tp", "cp", "dp", "pp")))
ACTOR = Mesh("actor", (0, 1, 2, 3), (True,) * 4)
ROLLOUT = Mesh("rollout", (0, 0, 1, 1), (False, True, True, False))


class Panel:
    """A rectangle of the picture."""

    def __init__(self, rectangle):
        self.left, self.top = float(rectangle.get("x")), float(rectangle.get("y"))
        self.right = self.left + float(rectangle.get("width"))
        self.bottom = self.top + float(rectangle.get("height"))
        self.thick = float(rectangle.get("stroke-width", 0)) > 2

    def holds(self, other):
        return self.left <= other.left and other.right <= self.right and self.top <= other.top <= self.bottom

    def overlaps(self, other):
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def read(layout):
    """[heading, [shard, [(rank, coordinates, collects)]]] of every view, from the positions of the shapes."""
    root = ElementTree.fromstring(layout._repr_svg_())
    assert root.tag == f"{SVG}svg"
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    background, *rectangles = root.iter(f"{SVG}rect")
    assert (float(background.get("width")), float(background.get("height"))) == (width, height)
    shapes = [Panel(rectangle) for rectangle in rectangles]
    boxes = [s for s, r in zip(shapes, rectangles, strict=True) if r.get("stroke")]
    panels = [s for s, r in zip(shapes, rectangles, strict=True) if not r.get("stroke")]
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k]), "boxes must not overlap"
    assert not any(a.overlaps(b) for k, a in enumerate(panels) for b in panels[:k])
    assert all(s.left >= 0 and s.right <= width and s.top >= 0 and s.bottom <= height for s in shapes)
    texts = [(float(t.get("x")), float(t.get("y")), t.text or "") for t in root.iter(f"{SVG}text")]

    def inside(shape):
        return [words for x, y, words in texts if shape.left <= x < shape.right and shape.top <= y <= shape.bottom]

    views, headings = [], [(y, words) for _, y, words in texts if words.endswith((" shard", " shards"))]
    for number, (y, heading) in enumerate(headings):
        end = headings[number + 1][0] if number + 1 < len(headings) else height
        shards = []
        for panel in (panel for panel in panels if y < panel.top < end):
            own = [box for box in boxes if panel.holds(box)]
            (shard,) = [int(words.split()[1]) for words in inside(panel) if words.startswith("shard ")]
            ranks = []
            for box in own:
                rank, place = inside(box)
                ranks.append((int(rank.split()[1]), place, box.thick))
            shards.append((shard, ranks))
        views.append((heading, shards))
    assert sum(len(ranks) for _, shards in views for _, ranks in shards) == len(boxes), "every box must be in one panel"
    return views


class TestTable:
    def test_coordinates_shards_and_collecting_ranks(self):
        lines = str(DP2_TP2_PP2).splitlines()
        assert lines[0].split() == ["rank", "tp", "cp", "dp", "pp", "shard"]
        assert [line.split() for line in lines[1:-1]] == [
            ["0", "0", "0", "0", "0", "0"],
            ["1", "1", "0", "0", "0", "0"],
            ["2", "0", "0", "1", "0", "1"],
            ["3", "1", "0", "1", "0", "1"],
            ["4", "0", "0", "0", "1", "0", "*"],
            ["5", "1", "0", "0", "1", "0"],
            ["6", "0", "0", "1", "1", "1", "*"],
            ["7", "1", "0", "1", "1", "1"],
        ]
        assert lines[-1] == "* collecting rank of its shard"

    def test_columns_are_aligned_with_their_names(self):
        header, *rows = str(layout_of(coordinates({"tp": 2, "dp": 12}, ("tp", "dp")))).splitlines()[:-1]
        for name in ("rank", "tp", "dp"):
            end = header.index(name) + len(name)
            assert all(row[end - 1].isdigit() and row[end : end + 1] in ("", " ") for row in rows)

    def test_each_mesh_has_a_column(self):
        lines = str(Layout({"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}, {"actor": ACTOR, "rollout": ROLLOUT})).splitlines()
        assert lines[0].split() == ["rank", "dp", "tp", "shard", "mesh", "actor", "mesh", "rollout"]
        assert [line.split() for line in lines[1:-1]] == [
            ["0", "0", "0", "0", "*", "0", "*", "0"],
            ["1", "0", "1", "0", "1", "*", "0", "*"],
            ["2", "1", "0", "1", "*", "2", "*", "1", "*"],
            ["3", "1", "1", "1", "3", "*", "1"],
        ]

    def test_meshes_without_axes(self):
        lines = str(Layout({}, {"rollout": ROLLOUT})).splitlines()
        assert [line.split() for line in lines[1:3]] == [["0", "0"], ["1", "0", "*"]]

    def test_empty_layout(self):
        assert str(Layout({})).split() == ["rank"]
        assert Layout({})._repr_svg_() is None


class TestPicture:
    def test_small_layout(self):
        ((heading, shards),) = read(DP2_TP2_PP2)
        assert heading == "MEGATRON modes, by dp: 2 shards"
        assert shards == [
            (
                0,
                [
                    (0, "tp0 dp0 pp0", False),
                    (4, "tp0 dp0 pp1", True),
                    (1, "tp1 dp0 pp0", False),
                    (5, "tp1 dp0 pp1", False),
                ],
            ),
            (
                1,
                [
                    (2, "tp0 dp1 pp0", False),
                    (6, "tp0 dp1 pp1", True),
                    (3, "tp1 dp1 pp0", False),
                    (7, "tp1 dp1 pp1", False),
                ],
            ),
        ]

    @pytest.mark.parametrize("world_size", [1, 2, 6, 8, 12, 16, 24])
    def test_every_rank_is_in_its_shard_and_collecting_ranks_have_a_thick_border(self, world_size):
        for factors in factorizations(world_size, 4):
            sizes = dict(zip(AXES, factors, strict=True))
            order = next(orders(sizes))
            places = coordinates(sizes, order)
            ((_, shards),) = read(layout_of(places))
            assert [shard for shard, _ in shards] == list(range(sizes["dp"]))
            found = {rank: (shard, thick) for shard, ranks in shards for rank, _, thick in ranks}
            assert found == {
                rank: (p["dp"], p["tp"] == 0 and p["cp"] == 0 and p["pp"] == sizes["pp"] - 1)
                for rank, p in enumerate(places)
            }

    def test_each_mesh_has_a_view(self):
        layout = Layout({"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}, {"actor": ACTOR, "rollout": ROLLOUT})
        views = read(layout)
        assert [heading for heading, _ in views] == [
            "MEGATRON modes, by dp: 2 shards",
            "mesh actor: 4 shards",
            "mesh rollout: 2 shards",
        ]
        thick = [{rank for _, ranks in shards for rank, _, thick in ranks if thick} for _, shards in views]
        assert thick == [{0, 2}, {0, 1, 2, 3}, {1, 2}]
        assert all(
            Counter(rank for _, ranks in shards for rank, *_ in ranks) == Counter(range(4)) for _, shards in views
        )

    def test_mesh_names_are_escaped(self):
        views = read(Layout({}, {'<"a" & b>': Mesh('<"a" & b>', (0, 1), (True, True))}))
        assert views[0][0] == 'mesh <"a" & b>: 2 shards'

    @pytest.mark.parametrize("sizes", [{"pp": 64}, {"tp": 64}, {"dp": 512}, {"dp": 4, "tp": 8, "pp": 16}])
    def test_large_layouts_stay_inside_the_picture(self, sizes):
        ((_, shards),) = read(layout_of(coordinates(sizes, tuple(sizes))))
        assert len(shards) == sizes.get("dp", 1)

    def test_picture_is_limited_to_512_ranks(self):
        assert Layout.flat(512)._repr_svg_() is not None
        assert Layout.flat(513)._repr_svg_() is None
        assert len(str(Layout.flat(513)).splitlines()) == 515


class TestLayoutWithAGap:
    """Coordinates with a gap, so no rank collects for one shard: calls are errors, and the table shows why."""

    GAP = Layout({"dp": [0, 2], "tp": [0, 0]})

    def test_table_has_the_coordinates_and_no_shards(self):
        assert [line.split() for line in str(self.GAP).splitlines()] == [
            ["rank", "dp", "tp"],
            ["0", "0", "0"],
            ["1", "2", "0"],
        ]

    def test_there_is_no_picture(self):
        assert self.GAP._repr_svg_() is None

    def test_valid_mesh_is_shown(self):
        layout = Layout(
            self.GAP.axes, {"good": Mesh("good", (0, 1), (True, True)), "bad": Mesh("bad", (0, 2), (True, True))}
        )
        assert str(layout).splitlines()[0].split() == ["rank", "dp", "tp", "mesh", "good"]
        assert [heading for heading, _ in read(layout)] == ["mesh good: 2 shards"]
