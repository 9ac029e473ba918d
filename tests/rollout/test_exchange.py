"""RolloutWorker.exchange: orders may be lost or repeated, and each group is delivered once."""

import re
import threading
import time
from concurrent.futures import Future
from contextlib import closing

import pytest
from devices import ON_DEVICE
from engine_contract import Subject
from rollout_helpers import Bigram, BigramEngine, EchoEngine, Toy

from single_controller import (
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerDiedError,
    WorkerError,
)
from workers.rollout.engines.rollout_engine import Completion, SamplingParams
from workers.rollout.rollout_errors import PromptError, RolloutError
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.stream.exchange import Attempt, GroupRequest, Orders, _error_of

HOW = SamplingParams(20, stop_token_ids=(0, 1, 2))
LONG = SamplingParams(400)


def request(number, attempt=0, prompt=(3, 4), how=HOW, samples=3, partials=None):
    seeds = [100 * number + sample for sample in range(samples)]
    nothing = [Completion([], [], "abort", [])] * samples
    return GroupRequest(Attempt(number, attempt), list(prompt), how, seeds, partials or nothing)


def to_one(group, *, stream="a", version=0, wait=5.0, **orders):
    (report,) = group.exchange([Orders(stream, version, wait=wait, **orders)])
    return report


def until_finished(group, **orders):
    """Exchange until nothing is running. The completions by attempt; acknowledges all."""
    found = {}
    deadline = time.monotonic() + 20
    report = to_one(group, **orders)
    while report.running or report.finished:
        assert time.monotonic() < deadline
        for one in report.finished:
            assert one.attempt not in found
            found[one.attempt] = one.completions if one.error is None else one.error
        report = to_one(group, acknowledged=list(found))
    return found


def expected(group, number, prompt=(3, 4), how=HOW, samples=3):
    """The same completions from a call of the engine's own `generate`."""
    with closing(BigramEngine()) as engine:
        return engine.generate([list(prompt)] * samples, how, [100 * number + sample for sample in range(samples)])


@pytest.fixture
def group():
    with LocalWorkerGroup(1, RayClassWithInitArgs(Toy, BigramEngine, delay=0.001)) as group:
        yield group


def test_groups_are_generated_and_reported_as_they_finish(group):
    found = until_finished(group, submit=[request(0), request(1, prompt=[7])])
    assert found == {Attempt(0, 0): expected(group, 0), Attempt(1, 0): expected(group, 1, [7])}
    short = SamplingParams(2)
    report = to_one(group, submit=[request(2, how=LONG), request(3, how=short)])
    assert [one.attempt.number for one in report.finished] == [3] and report.running == [Attempt(2, 0)]
    assert (report.rank, report.weight_version, report.load.running) == (0, 0, 3)


def test_orders_may_be_repeated_and_finished_groups_are_kept_until_acknowledged(group):
    orders = {"submit": [request(0)]}
    first = to_one(group, **orders)
    assert to_one(group, **orders).finished == first.finished  # the driver repeats what it thinks was lost
    assert to_one(group).finished == first.finished
    assert to_one(group, acknowledged=[Attempt(0, 0)]).finished == []
    assert to_one(group, acknowledged=[Attempt(0, 0)], abort=[Attempt(0, 0)]).running == []
    (again,) = to_one(group, submit=[request(0, attempt=1)]).finished  # another attempt is another group
    assert (again.attempt, again.completions) == (Attempt(0, 1), first.finished[0].completions)


def test_aborted_groups_continue_from_their_tokens_with_other_weights(group):
    to_one(group, wait=0, submit=[request(5, how=LONG), request(6, how=LONG)])
    time.sleep(0.05)
    report = to_one(group, abort=[Attempt(5, 0)])
    (aborted,) = report.finished
    assert report.running == [Attempt(6, 0)] and {one.finish_reason for one in aborted.completions} == {"abort"}
    assert all(0 < len(one.token_ids) < 400 for one in aborted.completions)
    group.load(1, version=1)
    again = request(5, 1, how=LONG, partials=aborted.completions)
    (other,) = to_one(group, version=1, acknowledged=[Attempt(5, 0)], submit=[again], abort=[Attempt(6, 0)]).finished
    assert other.attempt == Attempt(6, 0)
    (whole,) = to_one(group, version=1, acknowledged=[Attempt(6, 0)]).finished
    models = {0: Bigram(0), 1: Bigram(1)}
    for before, after in zip(aborted.completions, whole.completions, strict=True):
        count = len(before.token_ids)
        assert after.token_ids[:count] == before.token_ids and after.log_probs[:count] == before.log_probs
        assert after.weight_versions == [0] * count + [1] * (400 - count) and after.finish_reason == "length"
        Subject(None, distributions=Bigram.distributions, atol=1e-5).check(after, [3, 4], models)


def test_complete_samples_of_a_partial_group_are_not_generated_again(group):
    done = expected(group, 9)
    aborted = [*done[:2], type(done[2])(done[2].token_ids[:1], done[2].log_probs[:1], "abort", [0])]
    assert until_finished(group, submit=[request(9, partials=aborted)]) == {Attempt(9, 0): done}


def test_worker_with_another_version_returns_the_group_untouched(group):
    partials = [type(one)(one.token_ids[:1], one.log_probs[:1], "abort", [0]) for one in expected(group, 9)]
    for version in (None, 3):
        (back,) = to_one(group, version=version, submit=[request(9, 0 if version else 1, partials=partials)]).finished[
            -1:
        ]
        assert back.completions == partials and back.error is None
    group.set_weight_version(None)
    report = to_one(group, stream="b", version=0, submit=[request(9)])
    assert report.weight_version is None
    assert [one.finish_reason for one in report.finished[0].completions] == ["abort"] * 3
    with pytest.raises(RolloutError, match="no complete weights"):  # nor does a gateway's call begin
        group.execute_with_func_generator(lambda worker: worker.engine.submit([1], HOW, "a", seed=0))


def test_groups_say_that_their_engine_has_lost_its_weights(group):
    to_one(group, wait=0, submit=[request(0, how=LONG)])
    group.execute_with_func_generator(lambda worker: (worker.engine.begin_update(), worker.engine.abandon_update()))
    report = to_one(group, submit=[request(1)])  # which never began
    assert [(one.attempt.number, one.lost) for one in report.finished] == [(0, True), (1, False)]


def test_groups_end_when_their_worker_has_lost_its_version(group):
    """Otherwise, an update that waits for them would never begin."""
    to_one(group, wait=0, submit=[request(0, how=LONG)])
    group.set_weight_version(None)
    (ended,) = to_one(group).finished
    assert ended.lost and {one.finish_reason for one in ended.completions} == {"abort"}


def test_groups_come_back_after_an_update_without_a_double_buffer_has_failed(group):
    to_one(group, wait=0, submit=[request(0, how=LONG)])
    group.begin_weights("key", 1, "sender", False)
    assert to_one(group, wait=0).running == [Attempt(0, 0)]  # it goes on after the update
    group.abandon_weights("key", "the trainer has died")
    (back,) = to_one(group, copies=True).finished  # the driver has no update under way
    assert back.lost and {one.finish_reason for one in back.completions} == {"abort"}


class Broke(RolloutError):
    def __init__(self, cents, wanted):
        super().__init__(f"{cents} of {wanted} cents")


def test_errors_come_back_with_the_group(group):
    found = until_finished(group, submit=[request(0), request(4, prompt=[99]), request(7, prompt=[])])
    assert found[Attempt(0, 0)] == expected(group, 0)
    assert [(type(one), one.number) for one in (found[4, 0], found[7, 0])] == [(PromptError, 4), (PromptError, 7)]
    assert (
        str(found[4, 0])
        == "prompt 4 has token ids from 99 to 99, but the model's vocab_size is 32; use its own tokenizer"
    )
    group.load(None, version=0)
    (failed,) = to_one(group, submit=[request(8, how=LONG)]).finished
    assert type(failed.error) is RolloutError and str(failed.error) == "the logits are not finite"
    locked = RolloutError("no more coins")
    locked.purse = threading.Lock()
    told = [_error_of(one, BigramEngine, Attempt(4, 0)) for one in (Broke(1, 5), locked)]  # which cannot be sent
    assert [type(one) for one in told] == [RolloutError] * 2
    assert [str(one) for one in told] == ["group 4: Broke: 1 of 5 cents", "group 4: RolloutError: no more coins"]


class WrongEngine(BigramEngine):
    """Returns what it is told to."""

    def submit(self, *arguments, **options):
        future = Future()
        future.set_result(self.returned)
        return future


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1, 2], r"\[1, 2\] for group 3; expected a Completion"),
        (
            Completion([1, 2], [0.0, 0.0], "stop", loss_mask=[1]),
            "2 token_ids and a loss_mask of 1 for group 3; expected",
        ),
        (Completion([1], [0.0], "eos"), "finish_reason='eos' for group 3; expected 'stop', 'length', 'abort' or"),
    ],
)
def test_invalid_completions_come_back_as_an_error(returned, told):
    with LocalWorkerGroup(1, RayClassWithInitArgs(Toy, WrongEngine)) as group:
        group.execute_with_func_generator(lambda worker: setattr(worker.engine, "returned", returned))
        (failed,) = to_one(group, submit=[request(3)], wait=0).finished
    assert type(failed.error) is RolloutError
    assert re.search(rf"WrongEngine.submit\(\) returned {told}", str(failed.error))


def test_another_stream_ends_the_groups_of_the_one_before(group):
    to_one(group, wait=0, submit=[request(0, how=LONG), request(1)])
    report = to_one(group, stream="b", wait=0)
    assert (report.finished, report.running, report.load.running) == ([], [], 0)


def test_engine_without_requests_is_refused():
    with LocalWorkerGroup(1, RayClassWithInitArgs(RolloutWorker, EchoEngine)) as group:
        with pytest.raises(WorkerError, match="EchoEngine generates batches only; requests need a RequestEngine"):
            to_one(group)


def test_death_of_a_rank_loses_no_group_of_the_others(ray_cluster):
    made = RayClassWithInitArgs(Toy, BigramEngine, delay=0.001)
    with RayResourcePool([2], use_gpu=ON_DEVICE) as pool, RayWorkerGroup(pool, made, collectives=False) as group:
        orders = [Orders("a", 0, [request(rank), request(2 + rank, how=LONG)], wait=5.0) for rank in range(2)]
        lost = group.exchange.remote(orders)
        group.die.remote([False, True])
        with pytest.raises(WorkerDiedError):
            group.die([False, False])
        del lost  # as if rank 1 had died in it
        group.restart(ranks=[1])
        first, second = group.exchange(orders)
        assert [one.attempt for one in first.finished] == [Attempt(0, 0)]
        assert first.finished[0].completions == expected(group, 0)
        assert first.running == [Attempt(2, 0)] and second.finished[0].completions == expected(group, 1)
