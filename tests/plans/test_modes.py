"""Dispatch and Execute: printing, looking up, adding, replacing and pickling modes, and which ones are rejected."""

import copy
import dataclasses
import pickle

import pytest
from plan_helpers import arguments, declare, plain_layout, simulate

from dispatch import (
    Dispatch,
    DispatchError,
    Execute,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from dispatch.modes import DispatchMode, known_mode
from dispatch.plan import plan_call
from dispatch.register import registered_methods

BUILT_IN = [
    *("RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL"),
    *("DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC", "DP_COMPUTE_METRIC"),
    *("MEGATRON_COMPUTE", "MEGATRON_COMPUTE_PROTO", "MEGATRON_COMPUTE_METRIC"),
    *("MEGATRON_PP_AS_DP", "MEGATRON_PP_AS_DP_PROTO", "DIRECT_ROLLOUT_METHOD"),
]
PAIR = {"dispatch_fn": lambda group, *args, **kwargs: (args, kwargs), "collect_fn": collect_all_to_all}


def to_all(group, *args, **kwargs):
    return args, kwargs


def last_only(group, results):
    return results[-1]


def declare_unchecked(mode):
    """The spec of a method whose declaration was unpickled."""
    spec = declare("ONE_TO_ALL")
    return dataclasses.replace(spec, registration=dataclasses.replace(spec.registration, mode=mode))


@pytest.mark.parametrize(("space", "names"), [(Dispatch, BUILT_IN), (Execute, ["ALL", "RANK_ZERO"])])
class TestNamespaces:
    def test_members_are_those_that_are_documented_and_found_by_attribute_and_name(self, space, names):
        assert [mode.name for mode in space] == names and len(space) == len(names)
        assert repr(space) == f"<{space.__name__}: {', '.join(names)}>"
        assert len({mode: mode.name for mode in space}) == len(names)  # they are distinct, and work as keys
        for name in names:
            member = getattr(space, name)
            assert space[name] is member and member.name == name and repr(member) == f"{space.__name__}.{name}"
            assert member in space and name in space and name in dir(space)
            assert pickle.loads(pickle.dumps(member)) is member and copy.deepcopy(member) == member

    def test_unknown_names_are_no_members_and_their_errors_list_the_known_ones(self, space, names):
        assert "NOPE" not in space
        with pytest.raises(AttributeError, match=r"'NOPE'.*RANK_ZERO"):
            space.NOPE  # noqa: B018
        with pytest.raises(KeyError, match=r"'NOPE'.*RANK_ZERO"):
            space["NOPE"]


def test_members_of_one_namespace_are_none_of_the_other():
    assert Execute.ALL not in Dispatch and Dispatch.RANK_ZERO not in Execute
    assert Dispatch.RANK_ZERO != Execute.RANK_ZERO and Dispatch.DP_COMPUTE != Dispatch.ALL_TO_ALL


def test_meshes_print_and_compare_in_both_spellings():
    assert repr(Dispatch.mesh("infer")) == "Dispatch.mesh('infer')"
    assert Dispatch.mesh("infer") == make_nd_compute_dataproto_dispatch_fn(mesh_name="infer")
    assert Dispatch.mesh("infer") != Dispatch.mesh("train")


@pytest.mark.parametrize("name", ["", None, 3])
def test_mesh_requires_a_name(name):
    with pytest.raises(TypeError, match="mesh name"):
        make_nd_compute_dataproto_dispatch_fn(name)


class TestPickle:
    def test_mesh_pair_and_added_members(self):
        pair = known_mode({"dispatch_fn": to_all, "collect_fn": last_only})
        added = register_dispatch_mode("MINE", to_all, last_only)
        for member in (Dispatch.mesh("m"), pair, added):
            again = pickle.loads(pickle.dumps(member))
            assert again == member
            assert repr(again) == repr(member)

    def test_member_that_is_registered_after_it_arrived(self, monkeypatch):
        made = register_dispatch_mode("MINE", to_all, last_only)
        pickled = pickle.dumps(made)
        monkeypatch.delitem(Dispatch._members, "MINE")
        spec = declare_unchecked(pickle.loads(pickled))
        with pytest.raises(DispatchError, match=r"unknown dispatch mode 'MINE'.*register_dispatch_mode"):
            plan_call(spec, plain_layout(2), (1,), {})
        register_dispatch_mode("MINE", to_all, last_only)
        assert plan_call(spec, plain_layout(2), (1,), {}).ranks == [0, 1]


class TestRejectedAtDecoration:
    @pytest.mark.parametrize("mode", ["NOPE", "dp_compute", "", DispatchMode("GONE")])
    def test_unknown_mode_error_lists_the_known_modes(self, mode):
        with pytest.raises(ValueError) as caught:
            register(dispatch_mode=mode)
        assert all(name in str(caught.value) for name in [*BUILT_IN, "register_dispatch_mode"])

    @pytest.mark.parametrize("mode", [5, None, ["ALL_TO_ALL"], Execute.ALL])
    def test_value_is_not_a_mode(self, mode):
        with pytest.raises(TypeError, match="ALL_TO_ALL"):
            register(dispatch_mode=mode)

    @pytest.mark.parametrize(
        "pair",
        [
            {},
            {"dispatch_fn": to_all},
            {"collect_fn": last_only},
            {"dispatch_fn": to_all, "collect_fn": last_only, "extra": 1},
            {"dispatch": to_all, "collect": last_only},
        ],
    )
    def test_pair_requires_exactly_two_keys(self, pair):
        with pytest.raises(TypeError, match=r"'dispatch_fn' and 'collect_fn'"):
            register(dispatch_mode=pair)

    @pytest.mark.parametrize("key", ["dispatch_fn", "collect_fn"])
    def test_pair_requires_functions(self, key):
        with pytest.raises(TypeError, match=f"{key} must be callable"):
            register(dispatch_mode={**PAIR, key: "not a function"})

    @pytest.mark.parametrize("mode", ["NOPE", 3, Dispatch.RANK_ZERO])
    def test_unknown_execute_mode(self, mode):
        with pytest.raises(ValueError, match=r"Execute\.ALL, Execute\.RANK_ZERO"):
            register(execute_mode=mode)

    def test_error_also_lists_added_modes(self):
        register_dispatch_mode("ADDED_LATELY", to_all, last_only)
        with pytest.raises(ValueError, match="ADDED_LATELY"):
            register(dispatch_mode="NOPE")


class TestExtension:
    def test_added_mode_is_a_member_and_uses_its_functions(self):
        mode = register_dispatch_mode("REVERSED", lambda group, x: ((x[::-1],), {}), last_only)
        assert Dispatch.REVERSED is mode
        assert mode in Dispatch
        assert "REVERSED" in Dispatch
        assert list(Dispatch)[-1] is mode
        assert repr(mode) == "Dispatch.REVERSED"
        for spelling in (mode, "REVERSED"):
            plan = plan_call(declare(spelling), plain_layout(3), ([1, 2, 3],), {})
            assert [arguments(plan, rank)[0] for rank in range(3)] == [(3,), (2,), (1,)]
            assert simulate(plan, lambda rank, x: (rank, x)) == (2, 1)

    @pytest.mark.parametrize("name", ["ALL_TO_ALL", "DIRECT_ROLLOUT_METHOD"])
    def test_existing_name(self, name):
        with pytest.raises(ValueError, match=r"exists already.*update_dispatch_mode"):
            register_dispatch_mode(name, to_all, last_only)
        assert repr(Dispatch[name]) == f"Dispatch.{name}"

    @pytest.mark.parametrize("name", ["", "with space", "_private", "1st", None, 7, ["MINE"], "mro", "mesh", "lambda"])
    def test_name_is_not_an_attribute_name(self, name):
        with pytest.raises(ValueError, match="identifier"):
            register_dispatch_mode(name, to_all, last_only)

    @pytest.mark.parametrize("functions", [(None, last_only), (to_all, None), ("f", "g")])
    def test_functions_are_not_callable(self, functions):
        with pytest.raises(TypeError, match="must be callable"):
            register_dispatch_mode("MINE", *functions)
        assert "MINE" not in Dispatch

    def test_update_affects_methods_decorated_before(self):
        class Worker:
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def work(self, x): ...

            @register(dispatch_mode="ONE_TO_ALL")
            def other(self, x): ...

        update_dispatch_mode(Dispatch.ONE_TO_ALL, lambda group, x: ((x + 100,), {}), last_only)
        for spec in registered_methods(Worker).values():
            assert simulate(plan_call(spec, plain_layout(2), (1,), {}), lambda rank, x: (rank, x)) == (1, 101)

    @pytest.mark.parametrize("spelling", ["MINE", "member"])
    def test_update_of_an_added_mode_by_name_or_member(self, spelling):
        mode = register_dispatch_mode("MINE", to_all, last_only)
        spec = declare(mode)
        again = update_dispatch_mode(mode if spelling == "member" else spelling, to_all, lambda group, a: sum(a))
        assert again == mode
        assert simulate(plan_call(spec, plain_layout(4), (1,), {}), lambda rank, x: x) == 4

    def test_update_of_an_unknown_mode(self):
        with pytest.raises(ValueError, match="NOPE"):
            update_dispatch_mode("NOPE", to_all, last_only)

    def test_mesh_cannot_be_updated(self):
        with pytest.raises(ValueError, match="cannot be updated"):
            update_dispatch_mode(Dispatch.mesh("m"), to_all, last_only)

    def test_update_with_invalid_functions_changes_nothing(self):
        with pytest.raises(TypeError):
            update_dispatch_mode("ALL_TO_ALL", to_all, None)
        plan = plan_call(declare("ALL_TO_ALL"), plain_layout(2), ([1, 2],), {})
        assert arguments(plan, 1) == ((2,), {})

    def test_update_makes_direct_rollout_callable(self):
        spec = declare("DIRECT_ROLLOUT_METHOD")
        with pytest.raises(DispatchError):
            plan_call(spec, plain_layout(1), (), {})
        update_dispatch_mode("DIRECT_ROLLOUT_METHOD", to_all, collect_all_to_all)
        assert plan_call(spec, plain_layout(1), (), {}).ranks == [0]
