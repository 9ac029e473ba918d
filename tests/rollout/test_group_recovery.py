"""GroupRecovery: what is done when workers of a stream die, and how long it tries. On stand-ins for groups."""

import threading

import pytest
from waits import wait_until

from single_controller import GroupBrokenError, GroupClosedError, PlacementError, StartError, WorkerDiedError
from workers.recovery import rollout_recovery as recovery
from workers.recovery.rollout_recovery import GroupRecovery


class Group:
    """A group of which rank 1 has died."""

    def __init__(self, size=3, collectives=False, shrinks=True):
        self.workers, self.collectives, self.broken = [object() for _ in range(size)], collectives, "rank 1 died"
        self.calls, self.results, self.generation = [], [], 0
        if shrinks:
            self.shrink = self._shrink

    @property
    def world_size(self):
        return len(self.workers)

    def standbys(self):
        return []

    def alive(self):
        return [rank != 1 or self.broken is None for rank in range(self.world_size)]

    def _shrink(self, ranks):
        self.calls.append(("shrink", ranks))
        if len(ranks) == self.world_size:
            raise GroupBrokenError("no rank is left")
        for rank in reversed(ranks):
            del self.workers[rank]
        self.broken = None
        return tuple(ranks)

    def restart(self, ranks=None):
        self.calls.append(("restart", ranks))
        if ranks and self.collectives:
            raise ValueError("they use collectives")
        for rank in ranks or range(self.world_size):
            self.workers[rank] = object()
        self.broken = None

    def grow(self, count):
        self.calls.append(("grow", count))
        result = self.results.pop(0) if self.results else count
        if isinstance(result, Exception):
            raise result
        self.workers += [object() for _ in range(result)]
        return tuple(range(result))


def died(*ranks):
    return WorkerDiedError("died", rank=ranks[0], ranks=ranks)


def grow(of, until):
    wait_until(lambda: until() or of.grow(), 10)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(recovery, "RETRY_SECONDS", (0.01, 0.04))


def test_group_goes_on_and_gets_its_size_back():
    group = Group()
    of = GroupRecovery(group)
    first, _, third = of.members()
    of.recover(died(1), elastic=True)
    assert of.members() == [first, third] and of.deaths == 1 and of.due
    grow(of, lambda: len(of.members()) == 3 and not of.due)
    assert group.calls == [("shrink", [1]), ("grow", 1)] and of.members()[:2] == [first, third]
    assert not any(thread.name == "rollout-grow" for thread in threading.enumerate())
    of.recover(died(1), elastic=True)  # somebody else has repaired it
    assert of.deaths == 1


def test_group_that_cannot_shrink_is_restarted():
    nobody_left, fixed, standby = Group(1), Group(), Group()
    standby.standbys = lambda: ["a process on another host"]
    nobody_left.alive = lambda: [False]
    for group, calls in (
        (nobody_left, [("shrink", [0]), ("restart", [0])]),
        (Group(collectives=True), [("restart", [1]), ("restart", None)]),
        (Group(shrinks=False), [("restart", [1])]),
        (fixed, [("restart", [1])]),
        (standby, [("restart", [1])]),
    ):
        of = GroupRecovery(group)
        of.recover(died(1) if group is not nobody_left else died(0), elastic=group is not fixed)
        assert group.calls == calls and group.broken is None and of.deaths == 1 and not of.due


def test_group_that_somebody_else_restarts_is_left_alone():
    group = Group()
    of = GroupRecovery(group)
    of.recover(GroupBrokenError("it is being restarted"), elastic=True)
    assert not group.calls and not of.deaths
    of.recover(GroupBrokenError("rank 1 died"), elastic=True)  # after the restart, if there was one
    assert group.calls == [("shrink", [1])]


def test_ranks_of_a_local_group_are_new_after_a_restart():
    group = Group(shrinks=False)
    del group.workers
    group.__class__ = type("Local", (Group,), {"world_size": 3, "restart": lambda self, ranks: None})
    of = GroupRecovery(group)
    before = of.members()
    assert of.members() == before
    of.recover(died(1), elastic=True)
    assert [a is b for a, b in zip(before, of.members(), strict=True)] == [True, False, True]


def test_attempts_are_repeated_and_take_what_there_is_room_for(caplog):
    group = Group(4)
    of = GroupRecovery(group)
    of.recover(died(1, 2), elastic=True)
    full, broken = PlacementError("no room for 2"), GroupBrokenError("another rank died")
    group.results = [full, 1, broken, StartError("the host is out of memory", rank=0), 1]
    grow(of, lambda: group.world_size == 4 and not of.due)
    assert group.calls[1:] == [("grow", 2), ("grow", 1), ("grow", 1), ("grow", 1), ("grow", 1)]
    assert "2 rollout workers are missing and could not be started; the next attempt is in 0 s: no room" in caplog.text
    assert "1 rollout workers are missing" in caplog.text


def test_attempts_go_on_through_an_outage_of_days():
    """A host is gone for so long that there were more attempts than a float has powers of two."""
    group = Group()
    of = GroupRecovery(group)
    of.recover(died(1), elastic=True)
    of._tries, group.results = 2000, [StartError("no host has room", rank=0)]
    grow(of, lambda: group.world_size == 3 and not of.due)
    assert group.calls[1:] == [("grow", 1)] * 2


def test_group_that_was_restarted_as_a_whole_lacks_nobody():
    group = Group()
    of = GroupRecovery(group)
    of.recover(died(1), elastic=True)
    assert of.due
    group.workers = [object() for _ in range(3)]
    assert not of.due
    of.grow()
    del group.workers[2]  # by somebody who wants fewer
    assert not of.due


def test_closed_group_is_told():
    group = Group()
    of = GroupRecovery(group)
    of.recover(died(1), elastic=True)
    group.results = [GroupClosedError("the group is closed")]
    with pytest.raises(GroupClosedError, match="the group is closed"):
        grow(of, lambda: False)
