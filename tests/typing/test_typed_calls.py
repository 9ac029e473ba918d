"""Typed calls, ``group.on(Scorer.score)``, at run time. `test_install.py` has what type checkers infer of them."""

import pytest
import right
from scorer import Other, Quieter, Scorer

from single_controller import Broadcast, ClassWithInitArgs, DispatchError, LocalWorkerGroup
from single_controller.call.worker.worker_class import colocate


def test_accepted_calls_run():
    right.main()


@pytest.fixture
def group():
    with LocalWorkerGroup(1, ClassWithInitArgs(Quieter)) as group:
        yield group


def test_on_returns_the_method_of_the_groups_class(group):
    assert group.on(Scorer.add)(4) == group.on(Quieter.add)(4) == group.add(4) == [2.0]
    assert repr(group.on(Scorer.score)) == repr(group.score)


def test_typed_call_accepts_a_future_and_a_broadcast(group):
    future = group.on(Scorer.generate)({"x": [1, 2]})
    assert group.on(Scorer.offset)(future.as_argument(), Broadcast([10]).as_argument()) == {"x": [11, 12]}


def test_on_rejects_a_method_of_another_class(group):
    with pytest.raises(
        DispatchError, match=r"Other\.add\(\) is not a method of .* Quieter, which registers .*add, load, score"
    ):
        group.on(Other.add)


def test_on_rejects_an_unregistered_method(group):
    with pytest.raises(AttributeError, match=r"plain\(\) is not registered"):
        group.on(Scorer.plain)


@pytest.mark.parametrize("given", ["add", len, Quieter().add])
def test_on_rejects_anything_but_a_method_of_a_class(group, given):
    with pytest.raises(TypeError, match=r"group\.on\(Scorer\.score\); got"):
        group.on(given)


def test_on_for_a_group_with_roles_names_the_roles():
    roles = {"scorer": ClassWithInitArgs(Scorer), "other": ClassWithInitArgs(Other)}
    with LocalWorkerGroup(1, colocate(roles)) as group:
        assert group.other.on(Other.add)(1) == [1]
        with pytest.raises(DispatchError, match=r"group\.scorer\.on\(\.\.\.\) or group\.other\.on\(\.\.\.\)"):
            group.on(Other.add)
