"""Layout: the reported coordinates, which ranks share a shard, and which ranks collect."""

import pickle

import pytest
from plan_helpers import coordinates, layout_of

from dispatch import DispatchError, Layout, Mesh
from dispatch.layout import Routing

TP2_DP2_PP2 = layout_of(coordinates({"tp": 2, "dp": 2, "pp": 2}, ("tp", "dp", "pp")))


class TestAxes:
    def test_sizes_and_coordinates_are_those_reported(self):
        layout = Layout({"dp": [0, 0, 1, 1], "tp": (0, 1, 0, 1)})
        assert layout.world_size == 4
        assert (layout.size("dp"), layout.size("tp")) == (2, 2)
        assert [layout.coordinate("tp", rank) for rank in range(4)] == [0, 1, 0, 1]

    def test_unreported_axis_has_size_one(self):
        layout = Layout({"dp": [0, 1]})
        assert layout.size("pp") == 1
        assert layout.coordinate("pp", 1) == 0

    def test_flat_gives_each_rank_its_own_dp_rank(self):
        assert Layout.flat(3).axes["dp"] == (0, 1, 2)

    def test_empty_layout_has_no_ranks(self):
        assert Layout({}).world_size == 0

    def test_world_size_is_known_from_meshes_alone(self):
        assert Layout({}, {"infer": Mesh("infer", (0, 0, 1), (True, False, True))}).world_size == 3

    def test_later_changes_to_the_given_lists_have_no_effect(self):
        reported = [0, 1]
        layout = Layout({"dp": reported})
        reported[1] = 7
        assert layout.size("dp") == 2

    def test_pickles(self):
        layout = Layout({"dp": [0, 1]}, {"m": Mesh("m", (0, 1), (True, True))})
        layout.by_dp  # noqa: B018 - the cached routing must not prevent pickling
        again = pickle.loads(pickle.dumps(layout))
        assert again == layout
        assert again.by_dp == layout.by_dp

    @pytest.mark.parametrize(
        ("axes", "told"),
        [
            ({"dp": [0, 1], "tp": [0]}, ["'dp': 2", "'tp': 1"]),
            ({"dp": [0, -1]}, ["'dp'", "rank 1", "-1"]),
            ({"dp": [0, 0.5]}, ["'dp'", "rank 1", "0.5"]),
            ({"dp": [0, None]}, ["'dp'", "rank 1", "None"]),
            ({"dp": [0, True]}, ["'dp'", "rank 1", "True"]),
        ],
    )
    def test_invalid_coordinates_are_rejected(self, axes, told):
        with pytest.raises(ValueError) as caught:
            Layout(axes)
        assert all(word in str(caught.value) for word in told)

    def test_mesh_over_another_number_of_ranks_is_rejected(self):
        with pytest.raises(ValueError, match="mesh m"):
            Layout({"dp": [0, 1]}, {"m": Mesh("m", (0, 0, 0), (True, False, False))})


class TestRouting:
    def test_flat(self):
        assert Layout.flat(3).by_rank == Routing(3, (0, 1, 2), (0, 1, 2))

    def test_only_calls_the_given_ranks_and_keeps_their_order(self):
        routing = Routing.only((2, 0), 4)
        assert routing.shard_of == (0, None, 0, None)
        assert routing.collecting == (2, 0)

    def test_other_axes_change_nothing(self):
        axes = {"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}
        assert Layout({**axes, "ep": [0, 1, 2, 3]}).by_dp == Layout(axes).by_dp

    def test_tensor_parallelism_alone_is_one_shard(self):
        routing = Layout({"tp": [0, 1, 2]}).by_dp
        assert (routing.shards, routing.shard_of, routing.collecting) == (1, (0, 0, 0), (0,))

    def test_ranks_of_one_sequence_get_the_same_rows_and_the_first_collects(self):
        layout = Layout({"dp": [0, 0, 1, 1], "sp": [0, 1, 0, 1]}, sizes={"dp": 2, "sp": 2})
        assert layout.by_dp == Routing(2, (0, 0, 1, 1), (0, 2), "dp_size")
        layout = layout_of(coordinates({"sp": 3, "cp": 2, "dp": 2}, ("sp", "cp", "dp")))
        routing = layout.by_dp_cp_pp
        assert routing.collecting == (0, 3, 6, 9)
        assert routing.shard_of == tuple(rank // 3 for rank in range(12))

    @pytest.mark.parametrize("route", ["by_dp", "by_dp_cp_pp"])
    def test_two_ranks_with_the_same_coordinates(self, route):
        with pytest.raises(DispatchError, match=r"ranks 1 and 3 both collect for shard 1"):
            getattr(Layout({"dp": [0, 1, 2, 1], "tp": [0, 0, 0, 0]}), route)

    @pytest.mark.parametrize("route", ["by_dp", "by_dp_cp_pp"])
    def test_coordinates_without_a_rank(self, route):
        with pytest.raises(DispatchError, match="no rank collects for shard 1"):
            getattr(Layout({"dp": [0, 2]}), route)


class TestMesh:
    def test_results_are_in_dp_rank_order(self):
        mesh = Mesh("infer", (1, 1, 0, 0), (False, True, True, False))
        assert mesh.routing.shard_of == (1, 1, 0, 0)
        assert mesh.routing.collecting == (2, 1)

    @pytest.mark.parametrize(
        ("dp_rank", "collects"),
        [
            pytest.param((0, 0, 1), (True, True, True), id="two collect for one shard"),
            pytest.param((0, 0, 1), (True, False, False), id="no rank collects for a shard"),
            pytest.param((0, 2, 2), (True, True, False), id="a gap"),
            pytest.param((0, 0), (False, False), id="no rank collects"),
            pytest.param((-1, 0), (True, True), id="negative, one shard"),
            pytest.param((-1, 0, 1), (True, True, False), id="negative, instead of the last"),
            pytest.param((-1, 0, 1), (False, True, True), id="negative, collects nothing"),
        ],
    )
    def test_inconsistent_dp_ranks_are_rejected(self, dp_rank, collects):
        with pytest.raises((DispatchError, ValueError)):
            Layout({}, {"m": Mesh("m", dp_rank, collects)}).mesh("m").routing  # noqa: B018


class TestTable:
    ACTOR = Mesh("actor", (0, 1, 2, 3), (True,) * 4)
    ROLLOUT = Mesh("rollout", (0, 0, 1, 1), (False, True, True, False))

    def test_coordinates_shards_and_collecting_ranks(self):
        lines = str(TP2_DP2_PP2).splitlines()
        assert lines[0].split() == ["rank", "tp", "dp", "pp", "shard"]
        assert [line.split() for line in lines[1:-1]] == [
            ["0", "0", "0", "0", "0"],
            ["1", "1", "0", "0", "0"],
            ["2", "0", "1", "0", "1"],
            ["3", "1", "1", "0", "1"],
            ["4", "0", "0", "1", "0", "*"],
            ["5", "1", "0", "1", "0"],
            ["6", "0", "1", "1", "1", "*"],
            ["7", "1", "1", "1", "1"],
        ]
        assert lines[-1] == "* collecting rank of its shard"

    def test_columns_are_aligned_with_their_names(self):
        header, *rows = str(layout_of(coordinates({"tp": 2, "dp": 12}, ("tp", "dp")))).splitlines()[:-1]
        for name in ("rank", "tp", "dp"):
            end = header.index(name) + len(name)
            assert all(row[end - 1].isdigit() and row[end : end + 1] in ("", " ") for row in rows)

    def test_each_mesh_has_a_column(self):
        lines = str(
            Layout({"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]}, {"actor": self.ACTOR, "rollout": self.ROLLOUT})
        ).splitlines()
        assert lines[0].split() == ["rank", "dp", "tp", "shard", "mesh", "actor", "mesh", "rollout"]
        assert [line.split() for line in lines[1:-1]] == [
            ["0", "0", "0", "0", "*", "0", "*", "0"],
            ["1", "0", "1", "0", "1", "*", "0", "*"],
            ["2", "1", "0", "1", "*", "2", "*", "1", "*"],
            ["3", "1", "1", "1", "3", "*", "1"],
        ]

    def test_meshes_without_axes(self):
        lines = str(Layout({}, {"rollout": self.ROLLOUT})).splitlines()
        assert [line.split() for line in lines[1:3]] == [["0", "0"], ["1", "0", "*"]]

    def test_empty_layout(self):
        assert str(Layout({})).split() == ["rank"]


class TestLayoutWithAGap:
    """Coordinates with a gap, so no rank collects for one shard: calls are errors, and the table shows why."""

    GAP = Layout({"dp": [0, 2], "tp": [0, 0]})

    def test_table_has_the_coordinates_and_no_shards(self):
        assert [line.split() for line in str(self.GAP).splitlines()] == [
            ["rank", "dp", "tp"],
            ["0", "0", "0"],
            ["1", "2", "0"],
        ]

    def test_valid_mesh_is_shown(self):
        layout = Layout(
            self.GAP.axes, {"good": Mesh("good", (0, 1), (True, True)), "bad": Mesh("bad", (0, 2), (True, True))}
        )
        assert str(layout).splitlines()[0].split() == ["rank", "dp", "tp", "mesh", "good"]
