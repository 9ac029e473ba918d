"""``group.map``: many batches, a few in flight; what a death costs, and what it does not."""

import itertools
import threading
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from group_workers import Counter as Adder
from map_workers import Scorer

from single_controller import (
    ClassWithInitArgs,
    GroupClosedError,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    WorkerDiedError,
    WorkerError,
    colocate,
)
from single_controller.call.map_batches import BatchMap, _Batch

TRANSPORTS = ("ray", "local-threads", "local")


@pytest.fixture
def scorers(make_group, tmp_path, transport):
    """``scorers(delay, **group_options)``: a group, whose workers obey files in ``tmp_path``."""
    if transport.name != "ray":
        (tmp_path / "in-process").touch()

    def make(delay=0.0, **options):
        return make_group(Scorer, tmp_path, delay, group_options=options)

    return make


@pytest.fixture(scope="module")
def unharmed(transport, folder):
    """Groups without and with collectives, which obey files in ``folder``. No test ends their processes."""
    with (
        transport.make(Scorer, folder, group_options={"collectives": False}) as apart,
        transport.make(Scorer, folder) as together,
    ):
        yield apart, together


def rows_run(folder):
    """Row -> how often it was scored."""
    lines = (folder / "run").read_text().splitlines() if (folder / "run").exists() else []
    return Counter(int(line.split()[0]) for line in lines)


def tens(batches):
    return [[10 * row for row in batch] for batch in batches]


def test_results_order_and_back_pressure(unharmed, folder):
    group = unharmed[True]
    (folder / "run").unlink(missing_ok=True)
    taken = []

    def source():
        for number in range(6):
            taken.append(number)
            yield list(range(10 * number, 10 * number + 7))

    done = []
    mapped = group.map(group.score, source(), in_flight=3, progress=done.append)
    assert taken == [] and not rows_run(folder), "nothing is sent before the first result is wanted"
    for number, result in enumerate(mapped):
        assert result == [10 * row for row in range(10 * number, 10 * number + 7)]
        assert len(taken) <= number + 3 and done == list(range(1, number + 2))
    assert taken == list(range(6)) and set(rows_run(folder).values()) == {1}
    assert list(group.map("score", [])) == []


@pytest.mark.transports("ray", "local-threads")
def test_results_as_they_come(unharmed):
    apart, _ = unharmed
    seconds = [0.2, 0.0, 0.05, 0.0]
    # Each rank runs its calls in turn, so the order changes only between ranks.
    assert [found[0] for found in apart.map("slow", seconds, in_flight=4, ordered=False)] == seconds
    assert [found[0] for found in apart.map("slow", seconds, in_flight=4)] == seconds


@pytest.mark.parametrize("collectives", [True, False])
def test_modes(unharmed, collectives):
    group = unharmed[collectives]
    batches = [list(range(5)), [1, 2], [3], list(range(8))]
    assert list(group.map("score_padded", batches)) == tens(batches)
    tensors = [torch.tensor(batch) for batch in batches]
    assert all(map(torch.equal, group.map("score_padded", tensors), [10 * one for one in tensors]))
    # As of a call: a number for each rank.
    assert list(group.map("count", batches)) == [[2, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [2, 2, 2, 2]]
    assert list(group.map("total", batches)) == [10 * sum(batch) for batch in batches]
    assert list(group.map("score", [[], [1]])) == [[], [10]]
    futures = (group.score.remote(batch) for batch in batches)
    assert list(group.map(group.score.options(timeout=30), futures)) == tens(tens(batches))


def test_rows_of_living_ranks_are_not_lost(transport, scorers, tmp_path):
    ordered = transport.name != "local-threads"  # the transport has no part in the order of the results
    delay = {"ray": 0.03, "local-threads": 0.01, "local": 0.0}[transport.name]
    group = scorers(delay, collectives=False)
    batches = [list(range(8 * number, 8 * number + 8)) for number in range(6)]
    for row in (18, 36, 39):  # two batches; in the second, two ranks
        (tmp_path / f"die-{row}").touch()
    results = list(group.map("score", batches, in_flight=3, retries=2, ordered=ordered))
    assert sorted(results) == tens(batches)
    assert set(rows_run(tmp_path).values()) == {1}, "a row was scored twice"
    assert sorted(rows_run(tmp_path)) == list(range(48))


@pytest.mark.ray_when_full
def test_ranks_with_collectives_are_restarted_together(scorers, tmp_path):
    group = scorers()
    batches = [list(range(8 * number, 8 * number + 8)) for number in range(5)]
    (tmp_path / "die-18").touch()
    assert list(group.map("score", batches, in_flight=3, retries=1)) == tens(batches)
    assert group.generation == 1


also = pytest.mark.full("a death under map(), with and without collectives")


@pytest.mark.transports("ray")
@pytest.mark.parametrize(
    ("on_death", "collectives"),
    [
        ("replace", True),
        ("shrink", False),
        pytest.param("replace", False, marks=also),
        pytest.param("shrink", True, marks=also),
    ],
)
def test_on_death_is_obeyed(scorers, tmp_path, on_death, collectives):
    group = scorers(on_death=on_death, collectives=collectives)
    batches = [list(range(8 * number, 8 * number + 8)) for number in range(5)]
    (tmp_path / "die-18").touch()
    assert list(group.map("score", batches, in_flight=3, retries=1)) == tens(batches)
    assert group.world_size == (3 if on_death == "shrink" else 4)


@pytest.mark.ray_when_full
def test_batch_that_kills_its_rank_each_time(transport, scorers, tmp_path):
    retries = {"ray": 1, "local-threads": 0, "local": 2}[transport.name]
    group = scorers(collectives=False)
    (tmp_path / "poison-12").touch()
    batches = [list(range(8 * number, 8 * number + 8)) for number in range(3)]
    results, mapped = [], group.map("score", batches, retries=retries)
    with pytest.raises(WorkerDiedError, match="rank 2 died during score") as caught:
        results.extend(mapped)
    assert caught.value.__notes__ == [f"batch 1 of group.map() was in flight, with retries={retries}"]
    assert group.broken and group.generation == retries
    assert results == tens(batches)[:1], "what had returned was lost"


def test_error_of_the_method_ends_it(unharmed, folder):
    apart, _ = unharmed
    (folder / "raise-9").touch()
    mapped = apart.map("score", [[1], [9], [2]], retries=3)
    assert next(mapped) == [10]
    with pytest.raises(WorkerError, match="row 9"):
        next(mapped)
    assert list(mapped) == [] and not apart.broken


def test_generator_that_is_closed_early(scorers, tmp_path):
    group = scorers()
    mapped = group.map("score", ([number] for number in itertools.count()), in_flight=2)
    assert [next(mapped) for _ in range(3)] == [[0], [10], [20]]
    mapped.close()
    assert group.score([7]) == [70] and len(rows_run(tmp_path)) <= 6
    group.close()
    with pytest.raises(GroupClosedError):
        next(group.map("score", [[1]]))


@pytest.mark.transports("ray")
def test_ranks_are_dropped_and_added_between_results(scorers):
    """Shards of the plan before and after must not be joined."""
    batches = [list(range(10 * number, 10 * number + 7)) for number in range(12)]
    with scorers(0.02, collectives=False) as group:
        mapped = group.map("score", batches, in_flight=4, retries=2)
        found = [next(mapped) for _ in range(2)]
        group.shrink([0])
        found += [next(mapped) for _ in range(2)]
        group.grow(1)
        assert found + list(mapped) == tens(batches)


@pytest.mark.transports("local")
def test_wrong_arguments_and_the_bar(scorers, capsys):
    group = scorers()
    with pytest.raises(ValueError, match=r"map\(in_flight\)=0: expected an integer of at least 1"):
        group.map("score", [], in_flight=0)
    with pytest.raises(ValueError, match=r"map\(retries\)=-1"):
        group.map("score", [], retries=-1)
    with pytest.raises(AttributeError, match="did you mean 'score'"):
        group.map("scor", [])
    assert len(list(group.map("score", [[1], [2]], progress=True))) == 2
    assert "score: 100%" in capsys.readouterr().err


def test_calls_of_living_ranks_go_on_after_a_death(tmp_path):
    """What `map` relies on: only calls that wait for the dead rank end."""
    (tmp_path / "in-process").touch()
    (tmp_path / "poison-3").touch()
    with LocalWorkerGroup(2, ClassWithInitArgs(Scorer, tmp_path), threads=True, collectives=False) as group:
        spec, options = group.slow._spec, group.slow._options
        plan = group._plan(spec, (0.6,), {}, options)
        killing = group.score.remote([1, 3])
        lives, dies = (group._send(spec, plan.only([rank]), options) for rank in (0, 1))
        for future in (killing.result, dies.value):
            with pytest.raises(WorkerDiedError):
                future()
        assert group.broken and not lives.settled and lives.value() == [0.6]


def test_death_in_the_group_that_makes_the_batches_is_raised(unharmed):
    _, together = unharmed

    def batches():
        yield [1]
        raise WorkerDiedError("rank 2 of another group died", ranks=(2,))

    with pytest.raises(WorkerDiedError, match="another group"):
        list(together.map("score", batches(), retries=1))


@pytest.mark.parametrize("collectives", [True, False])
def test_death_that_a_collect_fn_meets_in_another_group_is_raised(unharmed, collectives, monkeypatch):
    met = []

    def stack(arrays):
        met.append(len(arrays))
        raise WorkerDiedError("rank 2 of another group died", ranks=(2,))

    monkeypatch.setattr(np, "stack", stack)
    with pytest.raises(WorkerDiedError, match="another group") as caught:
        list(unharmed[collectives].map("arrays", [[1, 2, 3, 4]], retries=1))
    assert met == [4] and not hasattr(caught.value, "__notes__")


@pytest.mark.transports("local")
def test_parts_of_a_batch_are_moved_when_they_are_joined(scorers):
    """As for a call: what collects the parts gets them where the ranks had them."""
    group = scorers(collectives=False)
    (value,) = group.map(group.arrays.options(device="meta"), [[1, 2, 3, 4]])
    assert value.device.type == "meta"


@pytest.mark.transports("local")
def test_method_of_another_group_is_refused(scorers):
    one, other = scorers(), scorers()
    with pytest.raises(TypeError, match="is a method of"):
        one.map(other.score, [[1]])


def test_method_of_another_role_is_refused():
    roles = {role: RayClassWithInitArgs(Adder) for role in ("actor", "critic")}
    with LocalWorkerGroup(2, colocate(roles)) as group:
        assert list(group.actor.map(group.actor.add, [1, 2])) == [[1, 2], [3, 4]]
        with pytest.raises(TypeError, match="is a method of"):
            group.actor.map(group.critic.add, [1])


def test_calls_of_a_batch_are_not_looked_at_again_when_one_has_ended():
    """Independent ranks have a call each, and thousands of them end one after the other."""
    looked = []

    class OneCall:
        error, settled = None, property(lambda call: looked.append(call) or call.outcome.done())

        def __init__(self):
            self.outcome = Future()

    batch = _Batch(0, None, calls={(rank,): OneCall() for rank in range(100)})
    mapped = BatchMap(None, None, None, [], in_flight=1, retries=0, ordered=True, progress=print)
    mapped._running.append(batch)
    threading.Timer(0.05, lambda: [call.outcome.set_result(None) for call in batch.calls.values()]).start()
    assert mapped._wait() is batch and len(looked) <= 100
