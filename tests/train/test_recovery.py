"""Which snapshots are restored after a death, and who keeps whose copy, over many patterns of deaths."""

import random

import pytest

from workers.train.recovery import REFERENCE, buddies, choose_recovery, is_covered_by_replicas

pytestmark = pytest.mark.timeout(30)


def held(ranks, own, at_buddy, dead=(), buddy_of=None):
    """What the ranks have after deaths. ``own`` and ``at_buddy``: rank -> numbers."""
    buddy_of = buddy_of or buddies([0] * ranks)
    versions = [{} for _ in range(ranks)]
    for rank in range(ranks):
        if rank not in dead:
            versions[rank][rank] = {number: 10 * number for number in own[rank]}
        if buddy_of[rank] not in dead:
            versions[buddy_of[rank]][rank] = {number: 10 * number for number in at_buddy[rank]}
    return versions


def test_newest_snapshot_that_every_shard_has():
    both = [{1, 2}] * 4
    assert choose_recovery(held(4, both, both)).number == 2
    found = choose_recovery(held(4, both, both, dead={1}))
    assert (found.number, found.rollout_id, found.sources, found.references) == (2, 20, (0, 2, 2, 3), ())
    partly = [{1, 2}, {1}, {1, 2}, {1, 2}]
    assert choose_recovery(held(4, both, partly, dead={1})).number == 1
    assert choose_recovery(held(4, both, partly, dead={2})).number == 2, "rank 1 has its own"
    assert choose_recovery(held(4, both, both, dead={0, 2})).sources == (1, 1, 3, 3)
    assert choose_recovery(held(4, both, both, dead={1, 2})) is None, "rank 2 had the copy of rank 1"
    assert choose_recovery([{}] * 4) is None
    # Some ranks have begun the third snapshot: the others still have only the two before it.
    own = [{2, 3}, {2}, {1, 2}, {1, 2}]
    assert choose_recovery(held(4, own, [{2}, {2}, {1, 2}, {2}], dead={3})).number == 2


def test_reference_weights_are_needed_too():
    both = [{1, 2, REFERENCE}] * 3
    found = choose_recovery(held(3, both, both, dead={0}), with_ref=True)
    assert (found.number, found.sources, found.references) == (2, (1, 1, 2), (1, 1, 2))
    without = [{1, 2}, {1, 2, REFERENCE}, {1, 2, REFERENCE}]
    assert choose_recovery(held(3, both, without, dead={0}), with_ref=True) is None
    assert choose_recovery(held(3, both, without, dead={0})).number == 2
    assert choose_recovery([{0: {REFERENCE: -1}}]) is None


def test_replicas_stand_in_for_each_other_and_share_the_work():
    """Four ranks with the same state, of which three have died."""
    of_all = {rank: {5: 7} for rank in range(4)}
    assert choose_recovery([{}, of_all, {}, {}]).sources == (1, 1, 1, 1)
    assert choose_recovery([{}, of_all, of_all, {}]).sources == (1, 1, 2, 2)


@pytest.mark.parametrize("seed", range(200))
def test_any_death_at_any_moment_leaves_a_common_snapshot(seed):
    """Simulates the protocol: each rank takes, sends and forgets at its own pace, bound only by the agreement that the
    snapshot before has arrived everywhere."""
    g = random.Random(seed)
    ranks = g.choice([2, 3, 4, 7, 16])
    hosts = [g.randrange(g.choice([1, 2, 4])) for _ in range(ranks)]
    buddy_of = buddies(hosts)
    own, copies = [set() for _ in range(ranks)], [set() for _ in range(ranks)]
    taken = [0] * ranks
    for _ in range(g.randrange(1, 12 * ranks)):
        rank = g.randrange(ranks)
        latest = taken[rank] - 1
        if latest >= 0 and latest not in copies[rank]:
            copies[rank] = {latest - 1} & copies[rank]
            if g.random() < 0.5:  # otherwise it is on its way
                copies[rank].add(latest)
        elif latest < 0 or all(latest in copies[other] or latest + 1 in own[other] for other in range(ranks)):
            own[rank] = {latest} & own[rank] | {latest + 1}
            taken[rank] += 1
    committed = max(taken) - 2
    if committed < 0:
        return
    dead = {g.randrange(ranks)}
    found = choose_recovery(held(ranks, own, copies, dead, buddy_of))
    assert found is not None and found.number >= committed
    assert all(source not in dead for source in found.sources)


@pytest.mark.parametrize("seed", range(100))
def test_buddy_is_on_another_host_if_possible(seed):
    g = random.Random(seed)
    ranks = g.randrange(2, 40)
    hosts = [g.randrange(g.randrange(1, 9)) for _ in range(ranks)]
    of = buddies(hosts)
    assert sorted(of) == list(range(ranks)), "each rank keeps the copy of one"
    assert all(rank != buddy for rank, buddy in enumerate(of))
    largest = max(map(hosts.count, hosts))
    same = sum(hosts[rank] == hosts[buddy] for rank, buddy in enumerate(of))
    assert same == max(0, 2 * largest - ranks)


def test_replicas_on_one_of_several_hosts_are_no_copy():
    assert not is_covered_by_replicas([0], [0, 0])
    assert is_covered_by_replicas([0, 1], [0, 0])
    assert not is_covered_by_replicas([0, 1], [0, 0, 1, 1])
    assert is_covered_by_replicas([0, 2], [0, 0, 1, 1])
