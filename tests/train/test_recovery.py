"""Which snapshots are restored after a death, and who keeps whose copy, over many patterns of deaths."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from workers import distributed
from workers.recovery import peer_snapshots
from workers.recovery.peer_snapshots import PeerSnapshots, SnapshotError
from workers.recovery.reshard import moves
from workers.recovery.snapshot_choice import (
    Recovery,
    Taken,
    buddies,
    choose_recovery,
    is_covered_by_replicas,
    reference_number,
)
from workers.recovery.train_recovery import START, Progress, _choose
from workers.recovery.weight_backup import take_snapshot

pytestmark = pytest.mark.timeout(30)


def held(ranks, own, at_buddy, dead=(), buddy_of=None):
    """What the ranks have after deaths. ``own`` and ``at_buddy``: rank -> numbers."""
    buddy_of = buddy_of or buddies([0] * ranks)
    versions = [{} for _ in range(ranks)]
    for rank in range(ranks):
        if rank not in dead:
            versions[rank][rank] = {number: Taken(10 * number, ranks) for number in own[rank]}
        if buddy_of[rank] not in dead:
            versions[buddy_of[rank]][rank] = {number: Taken(10 * number, ranks) for number in at_buddy[rank]}
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


@pytest.mark.parametrize(
    ("numbers", "position", "trained", "expected"),
    [
        ([{2, 3}, {1, 2}], 31, 40, (20, [2, 2])),  # the other one has snapshots of 20 and 10
        ([{2, 3}, {1, 2}], 31, 30, (30, [3, None])),  # and has just trained on 30
        ([{2, 3}, {2, 3}], 31, 30, (30, [3, None])),  # it is there already
        ([{2, 3}, {2, 3}], 31, 40, (30, [3, 3])),  # it was sent rollout 40, which failed
        ([{2, 3}, {2, 3}], 41, 40, (30, [3, 3])),  # it is ahead
        ([{3, 4}, {2, 3}], 31, 30, (30, [3, None])),
        ([{1, 2}, {3, 4}], 41, 40, None),  # too far ahead
    ],
)
def test_actor_and_critic_choose_a_rollout_that_both_have(numbers, position, trained, expected):
    def group(have, lost):
        def ask(answer):
            return SimpleNamespace(options=lambda timeout: lambda: answer)

        snapshots = held(2, [have] * 2, [have] * 2, dead={1} if lost else set())
        workers = SimpleNamespace(peer_snapshots=ask(snapshots), position=ask([(position, 0)] * 2))
        args = SimpleNamespace(distributed_timeout_minutes=1)
        return SimpleNamespace(worker_group=workers, args=args, _with_ref=False, _progress=Progress(trained))

    groups = [group(numbers[0], True), group(numbers[1], False)]
    found = _choose(groups, groups[:1])
    if expected is None:
        assert found is None
    else:
        assert {rollout_id for rollout_id, _ in found} == {expected[0]}
        assert [recovery and recovery.number for _, recovery in found] == expected[1]


def test_first_snapshot_of_a_single_rank_may_have_newer_weights_than_the_rollout_workers():
    """It takes its first one when it grows."""
    assert not Progress(3, START).has_sent(Recovery(0, 3, (0,)))
    assert Progress(3, START).after(Recovery(0, 3, (0,))) == Progress(3, START)
    assert Progress(START, START).has_sent(Recovery(0, -1, (0,)))


@pytest.mark.parametrize(
    ("sent_after", "number", "rollout_id", "exactly", "afterwards"),
    [
        (5, 3, 5, True, 5),
        (6, 3, 5, False, None),  # the rollout workers have newer weights
        (4, 3, 5, False, 4),  # updates come every few rollouts
        (None, 3, 5, False, None),  # an update has failed
        (START, 0, 9, True, 9),  # sent after the checkpoint of rollout 9 was loaded
        (START, 1, 10, False, START),
    ],
)
def test_weights_are_sent_again_if_the_rollout_workers_have_newer_ones(
    sent_after, number, rollout_id, exactly, afterwards
):
    progress, recovery = Progress(7, sent_after), Recovery(number, rollout_id, (0, 1))
    assert progress.has_sent(recovery) is exactly
    assert progress.after(recovery) == Progress(rollout_id, afterwards)
    progress.failed = True
    assert not progress.has_sent(recovery) and progress.after(recovery) == Progress(rollout_id)


def test_reference_weights_are_needed_too():
    reference = reference_number(3)
    both = [{1, 2, reference}] * 3
    found = choose_recovery(held(3, both, both, dead={0}), with_ref=True)
    assert (found.number, found.sources, found.references) == (2, (1, 1, 2), (1, 1, 2))
    without = [{1, 2}, {1, 2, reference}, {1, 2, reference}]
    assert choose_recovery(held(3, both, without, dead={0}), with_ref=True) is None
    assert choose_recovery(held(3, both, without, dead={0})).number == 2
    assert choose_recovery([{0: {reference_number(1): Taken(-1, 1)}}]) is None
    # A former group of three was resized to two, whose own copies need not be moved.
    both = [{rank: {2: Taken(20, 2), reference_number(2): Taken(-1, 2)}} for rank in range(2)]
    for owner in range(3):
        both[0].setdefault(owner, {})[reference_number(3)] = Taken(-1, 3)
    assert choose_recovery(both, with_ref=True).references == (0, 1)


@pytest.mark.alone
def test_snapshots_of_thousands_of_ranks_are_chosen_at_once():
    both = [{1, 2}] * 2000
    versions = held(2000, both, both, dead={7})
    begun = time.process_time()
    assert choose_recovery(versions).number == 2
    assert time.process_time() - begun < 0.2


def test_replicas_stand_in_for_each_other_and_share_the_work():
    """Four ranks with the same state, of which three have died."""
    of_all = {rank: {5: Taken(7, 4)} for rank in range(4)}
    assert choose_recovery([{}, of_all, {}, {}]).sources == (1, 1, 1, 1)
    assert choose_recovery([{}, of_all, of_all, {}]).sources == (1, 1, 2, 2)


def test_group_of_another_size_restores_what_all_ranks_of_one_size_have():
    of_four = [{0: {5: Taken(7, 4)}, 1: {5: Taken(7, 4)}}, {2: {5: Taken(7, 4)}, 3: {5: Taken(7, 4)}}, {}]
    assert choose_recovery(of_four).sources == (0, 0, 1, 1)
    # All three ranks have begun with the new size, but rank 2 has died before its first snapshot was copied.
    begun = [{**of, rank: {6: Taken(7, 3)}} for rank, of in enumerate(of_four[:2])]
    begun[0][0][5], begun[1][3][5] = Taken(7, 4), Taken(7, 4)
    assert choose_recovery([*begun, {}]).number == 5
    begun[0][2] = {6: Taken(7, 3)}
    assert choose_recovery([*begun, {}]).number == 6


def test_snapshot_of_another_size_is_not_written_over():
    """The last snapshot of two replicas becomes the first one of the single rank that is left."""
    peers, weights = PeerSnapshots("127.0.0.1", seconds=10), torch.zeros(3)
    try:
        peers.join(0, 0, 0, (0, 1), 0)
        peers.take([("w", weights)], {"rollout_id": 5})
        peers.restore(Recovery(0, 5, (0, 0)), 0, (0, 1), dict, dict)
        peers.join(0, 1, 0, (0, 1), 0)
        peers.take([("w", weights.fill_(1))], {"rollout_id": 6})
        state, about, _ = peers.restore(Recovery(1, 5, (0,)), 0, (0, 1), dict, dict)
    finally:
        peers.close()
    assert about == {"rollout_id": 5} and state.parts["w"].tolist() == [0, 0, 0]


def with_a_new_rank(value):
    """What a rank gathers with one that has no snapshots."""
    return [value, ((1, 2), None)] if isinstance(value, tuple) else [value, value]


def test_reference_of_the_former_size_counts_until_a_snapshot_of_the_new_one_is_complete(monkeypatch):
    """A rank gets a second one, which dies before it has sent anything: the group goes on from what one rank took."""
    peers, weights = PeerSnapshots("127.0.0.1", seconds=10), torch.arange(2.0)
    try:
        peers.join(0, 0, 0, (0, 1), 0)
        peers.set_reference(take_snapshot({"w": weights}, None))
        peers.take([("w", weights)], {"rollout_id": 5})
        taken = Recovery(0, 5, (0,), (0,))
        with monkeypatch.context() as patched:
            patched.setattr(peer_snapshots, "gathered", with_a_new_rank)
            patched.setattr(peer_snapshots, "_send", lambda *args: None)
            half = {"w": torch.zeros(1)}
            peers.restore(taken, 0, (0, 2), lambda about: half, lambda about: half)
        assert choose_recovery([peers.versions(lambda shard: True), {}], with_ref=True) == taken
        _, _, reference = peers.restore(taken, 0, (0, 1), dict, dict)
        peers.join(0, 1, 0, (0, 1), 0)
        peers.take([("w", weights)], {"rollout_id": 6})
        assert peers.versions(lambda shard: True)[0].keys() == {0, 1, reference_number(1)}
    finally:
        peers.close()
    assert reference.parts["w"].tolist() == [0, 1]


def test_ranks_exchange_no_rows_if_one_has_no_memory_for_its_new_shard(monkeypatch):
    """They would wait for its rows, while it waits for their errors."""
    peers, sent = PeerSnapshots("127.0.0.1", seconds=10), []
    try:
        peers.join(0, 0, 0, (0, 1), 0)
        peers.take([("w", torch.arange(2.0))], {"rollout_id": 5})
        monkeypatch.setattr(peer_snapshots, "gathered", with_a_new_rank)
        monkeypatch.setattr(peer_snapshots, "_send", lambda *args: sent.append(args))
        monkeypatch.setattr(distributed, "gathered", lambda value, group=None: [value, "MemoryError: none left"])
        with pytest.raises(SnapshotError, match="shards could not be allocated: rank 1: MemoryError: none left"):
            peers.restore(Recovery(0, 5, (0,)), 0, (0, 2), lambda about: {"w": torch.zeros(1)}, dict)
    finally:
        peers.close()
    assert not sent


@pytest.mark.parametrize("seed", range(100))
def test_moves_make_the_same_tensors_on_another_number_of_ranks(seed):
    """Against a plain split of the whole tensors."""
    g = random.Random(seed)
    whole = {name: torch.arange(g.randrange(0, 12) * 3).view(-1, 3) + 100 * name for name in range(4)}
    alike = {"step": torch.tensor(5.0), "scale": torch.arange(3)}

    def sharded(ranks):
        shards = [dict(alike) for _ in range(ranks)]
        for name, tensor in whole.items():
            rows = -(-len(tensor) // ranks)
            for rank, shard in enumerate(shards):
                shard[name] = tensor[rank * rows : (rank + 1) * rows]
        return shards

    sizes = g.sample(range(1, 8), 2)
    before, expected = map(sharded, sizes)
    found = [{name: torch.full_like(tensor, -1) for name, tensor in shard.items()} for shard in expected]
    shapes = [
        [{name: tuple(tensor.shape) for name, tensor in shard.items()} for shard in one] for one in (before, found)
    ]
    for move in moves(*shapes):
        source, target = before[move.source][move.name], found[move.target][move.name]
        if move.rows is None:
            target.copy_(source)
        else:
            target[move.target_row : move.target_row + move.rows] = source[move.source_row :][: move.rows]
    for shard, of in zip(found, expected, strict=True):
        assert all(torch.equal(shard[name], of[name]) for name in of)


def test_tensors_that_cannot_be_resharded():
    for before, after in (
        ([{"w": (4, 2)}], [{"w": (2, 3)}, {"w": (2, 3)}]),
        ([{"w": (4, 2)}], [{"w": (2, 2)}, {"w": (3, 2)}]),
        ([{"w": (4,)}], [{"v": (2,)}, {"v": (2,)}]),
        ([{"w": (4,)}], [{"w": (2,), "v": ()}, {"w": (2,), "v": ()}]),
    ):
        with pytest.raises(ValueError, match="'w'"):
            list(moves(before, after))


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


@pytest.mark.parametrize("per_host", [1, 2, 4, 8, 24])
@pytest.mark.parametrize("together", [2, 4, 8])
def test_buddy_does_not_leave_with_the_rank(per_host, together):
    """The ranks that share a sequence leave a group together, which then still has their state."""
    hosts, dp_ranks = ([rank // size for rank in range(24)] for size in (per_host, together))
    of = buddies(hosts, dp_ranks)
    assert sorted(of) == list(range(24))
    assert all(dp_ranks[rank] != dp_ranks[buddy] for rank, buddy in enumerate(of))
    assert per_host == 24 or all(hosts[rank] != hosts[buddy] for rank, buddy in enumerate(of))
    assert buddies(hosts, [0] * 24) == buddies(hosts) == buddies(hosts, range(24)), "there is no choice, or no need"


def test_replicas_on_one_of_several_hosts_are_no_copy():
    assert not is_covered_by_replicas([0], [0, 0])
    assert is_covered_by_replicas([0, 1], [0, 0])
    assert not is_covered_by_replicas([0, 1], [0, 0, 1, 1])
    assert is_covered_by_replicas([0, 2], [0, 0, 1, 1])
