"""The built-in modes on small layouts: what each rank gets, which ranks collect, what the driver gets."""

import pytest
import torch
from plan_helpers import arguments, coordinates, declare, layout_of, plain_layout, run, same, simulate

from dispatch import Broadcast, Dispatch, DispatchError, Layout, Mesh
from dispatch.modes import _BUILT_IN, Join
from dispatch.plan import plan_call

# rank: 0 1 2 3 | 4 5 6 7   tp fastest, then dp, pp slowest: dp 0 is ranks 0 1 4 5; stage 1 is ranks 4 to 7
MEGATRON = layout_of(coordinates({"tp": 2, "dp": 2, "pp": 2}, ("tp", "dp", "pp")))
FLAT = plain_layout(4)


def plan(mode, layout, *args, **kwargs):
    return plan_call(declare(mode), layout, args, kwargs)


def received(plan):
    """The first argument of each called rank."""
    return run(plan, lambda rank, x=None, *more, **others: x)


class TestWhole:
    def test_rank_zero(self):
        made = plan("RANK_ZERO", FLAT, [1, 2, 3], y="text")
        assert made.ranks == [0]
        assert arguments(made, 0) == (([1, 2, 3],), {"y": "text"})
        assert simulate(made, lambda rank, x, y: (rank, x, y)) == (0, [1, 2, 3], "text")

    def test_one_to_all(self):
        argument = [1, 2, 3, 4]
        made = plan("ONE_TO_ALL", FLAT, argument, y=torch.arange(4))
        assert made.collecting == (0, 1, 2, 3)
        for rank in range(4):
            (x,), others = arguments(made, rank)
            assert x == [1, 2, 3, 4], "a list must not be split, whatever its length"
            assert torch.equal(others["y"], torch.arange(4))
        assert simulate(made, lambda rank, x, y: (rank, len(x))) == [(0, 4), (1, 4), (2, 4), (3, 4)]

    def test_argument_for_all_ranks_is_stored_once(self):
        made = plan("ONE_TO_ALL", FLAT, torch.zeros(3))
        assert set(made.whole) == {0}
        assert all(shard.values == {} for shard in made.shards)
        assert len({id(arguments(made, rank)[0][0]) for rank in range(4)}) == 1

    @pytest.mark.parametrize("mode", ["RANK_ZERO", "ONE_TO_ALL"])
    def test_broadcast_is_unwrapped(self, mode):
        assert arguments(plan(mode, FLAT, Broadcast([1]), y=Broadcast(None)), 0) == (([1],), {"y": None})

    @pytest.mark.parametrize("mode", ["RANK_ZERO", "ONE_TO_ALL"])
    def test_without_arguments(self, mode):
        assert arguments(plan(mode, FLAT), 0) == ((), {})


class TestItems:
    @pytest.mark.parametrize("mode", ["ALL_TO_ALL", "DP_COMPUTE"])
    def test_each_rank_gets_its_item(self, mode):
        made = plan(mode, FLAT, [10, 11, 12, 13], y=("a", "b", "c", "d"))
        assert [arguments(made, rank) for rank in range(4)] == [
            ((10,), {"y": "a"}),
            ((11,), {"y": "b"}),
            ((12,), {"y": "c"}),
            ((13,), {"y": "d"}),
        ]
        assert simulate(made, lambda rank, x, y: (rank, x, y))[2] == (2, 12, "c")

    def test_megatron_compute(self):
        made = plan("MEGATRON_COMPUTE", MEGATRON, ["p", "q"], key=[1, 2])
        assert list(received(made).values()) == ["p", "p", "q", "q", "p", "p", "q", "q"]
        assert arguments(made, 3) == (("q",), {"key": 2})
        assert simulate(made, lambda rank, x, key: (rank, x)) == [(4, "p"), (6, "q")]

    def test_megatron_pp_as_dp(self):
        made = plan("MEGATRON_PP_AS_DP", MEGATRON, ["d0p0", "d0p1", "d1p0", "d1p1"])
        assert list(received(made).values()) == ["d0p0"] * 2 + ["d1p0"] * 2 + ["d0p1"] * 2 + ["d1p1"] * 2
        assert simulate(made, lambda rank, x: (rank, x)) == [(0, "d0p0"), (4, "d0p1"), (2, "d1p0"), (6, "d1p1")]

    def test_item_may_be_anything(self):
        items = [None, torch.zeros(2), [1, 2], {"a": 1}]
        got = received(plan("ALL_TO_ALL", FLAT, items))
        assert all(got[rank] is items[rank] for rank in range(4))

    def test_without_arguments_every_rank_is_called(self):
        made = plan("DP_COMPUTE", FLAT)
        assert received(made) == {0: None, 1: None, 2: None, 3: None}

    def test_broadcast_sends_the_same_to_every_rank(self):
        made = plan("DP_COMPUTE", FLAT, [1, 2, 3, 4], Broadcast([9, 9]))
        assert [arguments(made, rank)[0] for rank in range(4)] == [(k, [9, 9]) for k in (1, 2, 3, 4)]


class TestRows:
    def test_dp_compute_proto(self):
        made = plan("DP_COMPUTE_PROTO", FLAT, torch.arange(8), y=list("abcdefgh"), key="all")
        (x,), others = arguments(made, 2)
        assert (x.tolist(), others) == ([4, 5], {"y": ["e", "f"], "key": "all"})
        assert made.collecting == (0, 1, 2, 3)
        assert made.rows == 8
        assert same(simulate(made, lambda rank, x, y, key: x * 10), torch.arange(8) * 10)

    def test_dp_compute_metric_returns_the_list_by_rank(self):
        made = plan("DP_COMPUTE_METRIC", FLAT, torch.arange(8))
        assert simulate(made, lambda rank, x: {"sum": int(x.sum())}) == [{"sum": s} for s in (1, 5, 9, 13)]

    def test_dp_compute_metric_keeps_every_result_under_padding(self):
        made = plan_call(declare("DP_COMPUTE_METRIC", uneven="pad"), FLAT, ([0],), {})
        assert simulate(made, lambda rank, x: (rank, x)) == [(rank, [0]) for rank in range(4)]

    def test_megatron_compute_metric_returns_one_result_per_dp_rank(self):
        made = plan_call(declare("MEGATRON_COMPUTE_METRIC", uneven="pad"), MEGATRON, ([0, 1, 2],), {})
        assert list(received(made).values()) == [[0, 1], [0, 1], [2, 0], [2, 0]] * 2
        assert simulate(made, lambda rank, x: (rank, x)) == [(4, [0, 1]), (6, [2, 0])]

    @pytest.mark.parametrize("mode", ["DP_COMPUTE_PROTO", "DP_COMPUTE_METRIC", "MEGATRON_COMPUTE_PROTO"])
    def test_without_batches_every_rank_gets_the_other_arguments(self, mode):
        made = plan(mode, MEGATRON, "text", key=3)
        assert [arguments(made, rank) for rank in range(8)] == [(("text",), {"key": 3})] * 8
        assert made.rows is None

    @pytest.mark.parametrize("mode", ["MEGATRON_COMPUTE", "MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP"])
    def test_without_a_registered_layout(self, mode):
        with pytest.raises(DispatchError, match=r"work\(\).*register_layout") as caught:
            plan(mode, FLAT, [0, 1])
        assert caught.value.method == "work"


class TestFunctionFirst:
    MODE = "DP_COMPUTE_PROTO_WITH_FUNC"

    @staticmethod
    def method(self, func, data, scale=1): ...

    def made(self, *args, **kwargs):
        return plan_call(declare(self.MODE, self.method), FLAT, args, kwargs)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((sum, [1, 2, 3, 4]), {}),
            ((sum,), {"data": [1, 2, 3, 4]}),
            ((), {"func": sum, "data": [1, 2, 3, 4]}),
            pytest.param((), {"data": [1, 2, 3, 4], "func": sum}, id="keywords in another order"),
        ],
    )
    def test_function_is_sent_whole_and_batches_are_split(self, args, kwargs):
        made = self.made(*args, **kwargs)
        assert made.collecting == (0, 1, 2, 3)
        assert simulate(made, lambda rank, func, data, scale=1: [func(data) * 10]) == [10, 20, 30, 40]
        assert [len(shard.values) for shard in made.shards] == [1, 1, 1, 1], "the function is in no shard"

    @pytest.mark.parametrize("args", [([1, 2, 3, 4], [1, 2, 3, 4]), (None, [1, 2, 3, 4]), ("sum", [1, 2, 3, 4])])
    def test_without_a_function(self, args):
        with pytest.raises(DispatchError, match=r"work\(\).*function first, then batches") as caught:
            self.made(*args)
        assert (caught.value.method, caught.value.argument) == ("work", "func")


class TestMeshes:
    LAYOUT = Layout(
        {"dp": range(6)},
        {
            "train": Mesh("train", (0, 0, 1, 1, 2, 2), (True, False) * 3),
            "infer": Mesh("infer", (1, 1, 1, 0, 0, 0), (False, True, False, False, False, True)),
        },
    )

    def test_several_meshes_over_the_same_ranks(self):
        train = plan(Dispatch.mesh("train"), self.LAYOUT, list(range(6)), key="k")
        assert list(received(train).values()) == [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 2
        assert simulate(train, lambda rank, x, key: [(rank, key, row) for row in x])[2:4] == [(2, "k", 2), (2, "k", 3)]
        infer = plan(Dispatch.mesh("infer"), self.LAYOUT, list(range(6)))
        assert list(received(infer).values()) == [[3, 4, 5]] * 3 + [[0, 1, 2]] * 3
        assert infer.collecting == (5, 1)
        assert simulate(infer, lambda rank, x: x) == list(range(6))

    def test_indivisible_rows_error_names_the_mesh(self):
        with pytest.raises(DispatchError, match=r"mesh 'train' = 3"):
            plan(Dispatch.mesh("train"), self.LAYOUT, [0, 1])

    def test_unknown_mesh(self):
        with pytest.raises(DispatchError, match=r"work\(\).*'rollout'.*infer, train.*register_mesh") as caught:
            plan(Dispatch.mesh("rollout"), self.LAYOUT, [0])
        assert caught.value.method == "work"

    def test_meshes_need_no_axes(self):
        layout = Layout({}, {"m": Mesh("m", (1, 0), (True, True))})
        assert simulate(plan(Dispatch.mesh("m"), layout, [5, 6]), lambda rank, x: [(rank, x[0])]) == [(1, 5), (0, 6)]


# Not all of Dispatch: modes that other tests register are there too, if their files were imported before.
@pytest.mark.parametrize("mode", [Dispatch[name] for name in _BUILT_IN if name != "DIRECT_ROLLOUT_METHOD"], ids=repr)
def test_execute_rank_zero_sends_unchanged_arguments_in_every_mode(mode):
    rows = [1, 2, 3]
    made = plan_call(declare(mode, execute_mode="RANK_ZERO"), FLAT, (rows,), {"key": Broadcast([4])})
    assert made.ranks == [0]
    assert made.join is Join.VALUE
    assert simulate(made, lambda rank, x, key: (rank, x, key)) == (0, [1, 2, 3], [4])


def test_execute_rank_zero_with_a_custom_mode_and_a_mesh():
    pair = {"dispatch_fn": lambda group, *a, **k: 1 / 0, "collect_fn": lambda group, results: 1 / 0}
    for mode in (pair, Dispatch.mesh("nowhere")):
        made = plan_call(declare(mode, execute_mode="RANK_ZERO"), FLAT, (), {"x": 1, "y": 2})
        assert simulate(made, lambda rank, x, y: 2 * x + y + 1) == 5
