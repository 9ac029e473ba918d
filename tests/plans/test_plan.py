"""Custom modes, execute_all and execute_rank_zero, what a plan stores once, and planning time."""

import copy
import gc
import time
from types import SimpleNamespace

import pytest
import torch
from plan_helpers import Pair, arguments, coordinates, declare, layout_of, plain_layout, plan_of, run, same, simulate

from dispatch import Broadcast, DispatchError, Layout, collect_all_to_all
from dispatch.batch import Deferred
from dispatch.modes import Join
from dispatch.plan import CallPlan, DeferredArgument, plan_call, plan_execute, plan_rank_zero
from dispatch.register import method_spec

FOUR = plain_layout(4)
GROUP = SimpleNamespace(world_size=4, layout=FOUR)
"""Stands in for the group, which plan_call only passes to the functions of a custom mode."""


class Worker:
    def unregistered(self, x=None, y=None, *rest, key=None): ...


UNREGISTERED = method_spec(Worker, "unregistered")


def pair(dispatch_fn, collect_fn=collect_all_to_all):
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def custom(dispatch_fn, *args, collect_fn=collect_all_to_all, group=GROUP, **kwargs):
    return plan_call(declare(pair(dispatch_fn, collect_fn)), group.layout, args, kwargs, group=group)


class TestCustomModes:
    def test_arguments_without_lists_go_to_every_rank(self):
        made = custom(lambda group, x: ((x,), {"key": "k"}), (1, 2))
        assert [arguments(made, rank) for rank in range(4)] == [(((1, 2),), {"key": "k"})] * 4

    def test_collect_fn_gets_the_group_and_all_results_by_rank(self):
        seen = []

        def collect(group, results):
            seen.append((group, results))
            return "collected"

        made = custom(lambda group, x: ((x,), {}), 3, collect_fn=collect)
        assert simulate(made, lambda rank, x: (rank, x)) == "collected"
        assert seen == [(GROUP, [(0, 3), (1, 3), (2, 3), (3, 3)])]

    def test_context_of_the_dispatch_fn_reaches_the_collect_fn(self):
        def pad(group, x):
            lengths = [len(item) for item in x]
            return ([item + [0] * (max(lengths) - len(item)) for item in x],), {}, lengths

        def cut(group, results, lengths):
            return [result[:length] for result, length in zip(results, lengths, strict=True)]

        given = [[1], [1, 2], [], [3]]
        made = custom(pad, given, collect_fn=cut)
        assert simulate(made, lambda rank, x: [len(x), *x]) == [[2], [2, 1], [], [2]]
        other = custom(pad, [[1]] * 4, collect_fn=cut)  # each call has its own
        assert simulate(made, lambda rank, x: x) == given and simulate(other, lambda rank, x: x) == [[1]] * 4
        nothing = custom(lambda group: ((), {}, None), collect_fn=lambda *seen: seen[2:])
        assert simulate(nothing, lambda rank: 1) == (None,)
        # A built-in function may not tell what it takes
        assert custom(lambda group: ((), {}, 1), collect_fn=max).collecting == (0, 1, 2, 3)
        with pytest.raises(
            DispatchError, match=r"work\(\): its dispatch_fn returned .*, but its collect_fn takes no context"
        ):
            custom(pad, given)

    def test_dispatch_fn_sees_the_group_with_its_layout(self):
        group = SimpleNamespace(layout=Layout({"dp": [0, 0, 1, 1]}))
        made = custom(lambda g, x: (([x[g.layout.coordinate("dp", r)] for r in range(4)],), {}), "ab", group=group)
        assert simulate(made, lambda rank, x: x) == ["a", "a", "b", "b"]

    def test_dispatch_fn_may_accept_arguments_that_the_method_does_not(self):
        made = custom(lambda group, *, copies: ((copies + 1,), {}), copies=4)
        assert arguments(made, 2) == ((5,), {})

    def test_broadcast_beside_lists(self):
        made = custom(lambda group, x: ((x, Broadcast([0] * 9)), {}), [1, 2, 3, 4])
        assert arguments(made, 3) == ((4, [0] * 9), {})

    def test_dispatch_fn_may_return_a_list_of_arguments(self):
        assert arguments(custom(lambda group, x: ([x], {}), 7), 0) == ((7,), {})

    @pytest.mark.parametrize(
        "made", [None, 3, (1,), ((1,), {}, 3), ((1,), [2]), ("ab", {}), [(1,), {}], {"x": 1}], ids=repr
    )
    def test_dispatch_fn_returns_something_else(self, made):
        with pytest.raises(DispatchError, match=r"work\(\).*dispatch_fn returned.*\(args, kwargs\)") as caught:
            custom(lambda group: made)
        assert caught.value.method == "work"

    @pytest.mark.parametrize("made", [([1, 2],), ([1] * 4, 5), ([1] * 4, [1] * 5)], ids=repr)
    def test_lists_that_do_not_match_the_number_of_ranks(self, made):
        with pytest.raises(DispatchError, match=r"work\(\).*dispatch_fn splits.*world_size = 4.*Broadcast"):
            custom(lambda group: (made, {}))

    @pytest.mark.parametrize(
        "argument",
        [
            pytest.param([1, 2, 3], id="list"),
            pytest.param({"ids": 1}, id="dict"),
            pytest.param({"ids": [1, 2, 3]}, id="dict of lists"),
            pytest.param([[1], [2], [3]], id="list of lists"),
        ],
    )
    @pytest.mark.parametrize("way", ["positional", "keyword"])
    def test_dispatch_fn_that_pads_in_place_does_not_change_the_callers_objects(self, argument, way):
        def pad_in_place(group, x):
            inner = x["ids"] if isinstance(x, dict) else x
            for part in [x, inner, *(inner if isinstance(inner, list) else [])]:
                if isinstance(part, list):
                    part.append(0)
                elif isinstance(part, dict):
                    part["more"] = 1
            return (x,) if isinstance(x, dict) else ([x] * group.world_size,), {}

        before = copy.deepcopy(argument)
        args, kwargs = ((argument,), {}) if way == "positional" else ((), {"x": argument})
        custom(pad_in_place, *args, **kwargs)
        assert same(argument, before)


class TestExecuteAll:
    def made(self, *args, **kwargs):
        return plan_execute(UNREGISTERED, FOUR, args, kwargs)

    @pytest.mark.parametrize("value", [1, "abcd", None, (1, 2, 3, 4), torch.zeros(4), {"a": [1] * 4}], ids=repr)
    def test_without_lists_every_rank_gets_everything(self, value):
        made = self.made(value, key=value)
        for rank in range(4):
            (x,), kwargs = arguments(made, rank)
            assert x is value
            assert kwargs["key"] is value
        assert made.join is Join.LIST
        assert made.collecting == (0, 1, 2, 3)

    def test_without_arguments(self):
        assert simulate(self.made(), lambda rank: rank) == [0, 1, 2, 3]

    @pytest.mark.parametrize("length", [0, 1, 3, 5])
    def test_list_of_another_length_is_an_error(self, length):
        with pytest.raises(DispatchError) as caught:
            self.made([1] * length)
        for word in ("unregistered()", "'x'", f"list of length {length}", "world_size = 4", "Broadcast"):
            assert word in str(caught.value)
        assert (caught.value.method, caught.value.argument) == ("unregistered", "x")

    @pytest.mark.parametrize(
        ("args", "kwargs", "guilty"),
        [
            (([1] * 4, 5), {}, "y"),
            ((5, [1] * 4), {}, "x"),
            (([1] * 4,), {"key": None}, "key"),
            (([1] * 4, [1] * 3), {}, "y"),
            (([1] * 4, (1, 2, 3, 4)), {}, "y"),
            (([1] * 4, 1, 2), {}, "y"),
            (([1] * 4, [1] * 4, "s"), {}, "*rest[0]"),
        ],
    )
    def test_mixing_lists_and_other_values_is_an_error(self, args, kwargs, guilty):
        with pytest.raises(DispatchError, match=r"unregistered\(\).*every argument is a list.*Broadcast") as caught:
            self.made(*args, **kwargs)
        assert caught.value.argument == guilty
        assert repr(guilty) in str(caught.value)

    def test_broadcast_resolves_both_errors(self):
        made = self.made([1, 2, 3, 4], Broadcast(5), key=Broadcast([7]))
        assert arguments(made, 1) == ((2, 5), {"key": [7]})
        assert arguments(self.made(Broadcast([1, 2])), 3) == (([1, 2],), {})

    def test_group_of_one(self):
        made = plan_execute(UNREGISTERED, plain_layout(1), ([5],), {})
        assert simulate(made, lambda rank, x: x) == [5]


class TestExecuteRankZero:
    @pytest.mark.parametrize("value", [[1, 2, 3, 4], [1], 7, None])
    def test_only_rank_zero_gets_the_unchanged_arguments(self, value):
        made = plan_rank_zero(UNREGISTERED, FOUR, (value,), {"key": Broadcast(value)})
        assert made.ranks == [0]
        assert simulate(made, lambda rank, x, key: (rank, x, key)) == (0, value, value)

    def test_arguments_that_do_not_fit(self):
        with pytest.raises(TypeError, match="unregistered"):
            plan_rank_zero(UNREGISTERED, FOUR, (), {"z": 1})


class TestCallPlan:
    def test_empty_plan_calls_all_ranks(self):
        made = CallPlan.empty(3)
        assert made.ranks == [0, 1, 2]
        assert simulate(made, lambda rank: rank) == [0, 1, 2]

    def test_whole_and_split_arguments_keep_their_positions(self):
        made = plan_call(declare("DP_COMPUTE_PROTO"), FOUR, ("a", [1, 2, 3, 4], None, [5, 6, 7, 8], 9), {})
        assert run(made, lambda rank, *args: args)[2] == ("a", [3], None, [7], 9)

    def test_future_in_a_named_tuple_of_items_goes_to_its_rank(self):
        future = Deferred()
        made = plan_of("ALL_TO_ALL", plain_layout(2), Pair(future, "b"))
        assert arguments(made, 0) == ((DeferredArgument(future, "whole"),), {})
        assert arguments(made, 1) == (("b",), {}) and made.deferred == (future,)

    def test_plan_for_some_ranks_has_their_shards_alone(self):
        """`group.map` makes one for each rank, and the shards of all would be encoded each time."""
        made = plan_call(declare("MEGATRON_COMPUTE_PROTO"), megatron(2, 2), ([1, 2, 3, 4],), {})
        some = made.only([2, 3])
        assert (made.shard_of, some.shard_of) == ((0, 0, 1, 1), (None, None, 0, 0))
        assert some.shards == made.shards[1:] and some.collecting == (2,)
        assert run(some, lambda rank, x: x) == {2: [3, 4], 3: [3, 4]}

    def test_method_is_bound_before_batches_are_split(self):
        spec = declare("DP_COMPUTE_PROTO", lambda self, data: data)
        with pytest.raises(TypeError, match=r"work\(\).*too many"):
            plan_call(spec, FOUR, ([1], [2]), {})


def megatron(dp, tp):
    return layout_of(coordinates({"tp": tp, "dp": dp}, ("tp", "dp", "cp", "pp")))


def best_of(times, function):
    """The least CPU time in seconds, so that other processes do not count. As in timeit, without garbage collections,
    whose time depends on what else this process holds."""
    function()
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            start = time.process_time()
            function()
            found.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(found)


class TestThousandsOfRanks:
    """Each plan has a new layout, so that planning cannot rely on what a layout caches."""

    @staticmethod
    def seconds(mode, layout, repeat=7):
        spec = declare(mode)
        value = torch.zeros(layout.world_size * 2, 8)

        def once():
            fresh = Layout(layout.axes, world_size=layout.world_size)
            return plan_call(spec, fresh, (value,), {"key": value})

        return best_of(repeat, once)

    def test_dp_512_tp_8_under_50_ms(self):
        assert self.seconds("MEGATRON_COMPUTE_PROTO", megatron(512, 8)) < 0.050

    def test_flat_4096_under_50_ms(self):
        assert self.seconds("DP_COMPUTE_PROTO", plain_layout(4096)) < 0.050

    @pytest.mark.parametrize("mode", ["MEGATRON_COMPUTE_PROTO", "DP_COMPUTE_PROTO"])
    def test_planning_time_grows_linearly(self, mode):
        small, large = (self.seconds(mode, megatron(ranks // 8, 8), repeat=15) for ranks in (1024, 4096))
        assert large < 10 * small, "quadratic growth would be 16 times"
