"""SampleBuffer: each edge and policy, threads, and random histories against the model in sample_buffer_model.py."""

import pickle
import random
import threading
import time

import pytest
from depth import examples
from hypothesis import example, given
from hypothesis import strategies as st
from sample_buffer_model import History, settings_of_a_buffer

from workers import SampleBuffer

V1 = (1, 1)


def begun(buffer):
    """Begin all groups that may begin; their numbers."""
    return [group.number for group in iter(buffer.begin, None)]


def ready(buffer, *numbers, **about):
    version = buffer.version
    for number in numbers:
        buffer.put(number, f"payload {number}", **{"versions": (version, version), **about})


def taken(buffer, timeout=0):
    return [group.number for group in buffer.take(timeout)]


def buffer_with(version, *args, **kwargs):
    buffer = SampleBuffer(*args, **kwargs)
    buffer.set_version(version)
    return buffer


def in_flight(version, *args, **kwargs):
    """A buffer whose groups have all begun."""
    buffer = buffer_with(version, *args, **kwargs)
    begun(buffer)
    return buffer


# --- Begin, and admission --------------------------------------------------------------------------------------------


def test_nothing_begins_before_there_are_weights():
    buffer = SampleBuffer(2)
    assert buffer.begin() is None
    with pytest.raises(ValueError, match="before the first set_version"):
        buffer.take(0)
    buffer.set_version(1)
    assert buffer.begin() == (0, None)


@pytest.mark.parametrize(
    ("staleness", "interval", "first", "after_take", "after_update"),
    [
        # With staleness 0, the next batch begins after the update. With 1, while the batch before it is trained.
        (0, 1, 2, 0, 2),
        (1, 1, 4, 0, 2),
        (2, 1, 6, 0, 2),
        # With an update every two batches, two batches have the same weights.
        (0, 2, 4, 0, 0),
        (1, 2, 8, 0, 0),
    ],
)
def test_how_many_groups_begin(staleness, interval, first, after_take, after_update):
    buffer = buffer_with(1, 2, max_staleness=staleness, update_interval=interval)
    numbers = begun(buffer)
    assert numbers == list(range(first))
    ready(buffer, *numbers)
    assert [group.number for group in buffer.take(0)] == [0, 1]
    assert len(begun(buffer)) == after_take
    if buffer.batches % interval == 0:
        buffer.set_version(2)
    assert len(begun(buffer)) == after_update


def test_no_group_begins_for_a_batch_after_the_last():
    buffer = buffer_with(1, 2, max_staleness=5, num_batches=2)
    assert begun(buffer) == [0, 1, 2, 3]
    ready(buffer, 0, 1, 2, 3)
    assert taken(buffer) == [0, 1] and taken(buffer) == [2, 3]
    assert begun(buffer) == []
    with pytest.raises(ValueError, match="all 2 batches were taken"):
        buffer.take(0)


def test_groups_that_were_given_back_begin_first_and_keep_their_partial_completions():
    buffer = in_flight(1, 4, max_staleness=1)
    buffer.give_back(5, "half of 5", tokens=3)
    buffer.give_back(2)
    assert buffer.begin() == (2, None) and buffer.begin() == (5, "half of 5") and buffer.begin() is None
    counts = buffer.metrics()
    assert counts["buffer/given_back"] == 1 and counts["buffer/interrupted"] == 1 and counts["buffer/in_flight"] == 8


class Unwalked(dict):
    def items(self):
        raise AssertionError("looked through the whole buffer")

    __iter__ = values = items


def test_begin_looks_through_no_groups_if_none_is_pending():
    """A stream asks after each event, and the buffer of an asynchronous run may have thousands of groups."""
    buffer = buffer_with(1, 2, max_staleness=3)
    buffer._groups = Unwalked()
    assert begun(buffer) == list(range(8))


@pytest.mark.parametrize("edge", [lambda b, n: b.put(n, None, versions=V1), lambda b, n: b.give_back(n)])
def test_a_number_that_is_not_in_flight_is_an_error(edge):
    buffer = in_flight(1, 2)
    ready(buffer, 0)
    with pytest.raises(ValueError, match="group 0 is not in flight: it is ready"):
        edge(buffer, 0)
    with pytest.raises(ValueError, match="group 7 is not in flight"):
        edge(buffer, 7)
    ready(buffer, 1)
    taken(buffer)
    with pytest.raises(ValueError, match="group 0 is not in flight"):
        edge(buffer, 0)


@pytest.mark.parametrize("versions", [(2, 1), (-1, 1)])
def test_versions_that_are_none_are_an_error_and_change_nothing(versions):
    buffer = in_flight(1, 1)
    with pytest.raises(ValueError, match="group 0: versions"):
        buffer.put(0, None, versions=versions)
    ready(buffer, 0)
    assert taken(buffer) == [0]


@pytest.mark.parametrize("wrong", [
    {"groups_per_batch": 0}, {"groups_per_batch": None}, {"max_staleness": -1}, {"max_staleness": 0.5},
    {"update_interval": 0}, {"num_batches": True}, {"max_filtered": -1}, {"on_stale": "keep"}, {"order": "lifo"},
    {"window": 4}, {"window": 0, "order": "window"},
])  # fmt: skip
def test_arguments_out_of_range(wrong):
    with pytest.raises(ValueError, match=rf"SampleBuffer: {next(iter(wrong))}="):
        SampleBuffer(**{"groups_per_batch": 2, **wrong})


# --- Take: order, window, waiting ------------------------------------------------------------------------------------


def test_fifo_waits_for_the_lowest_numbers():
    buffer = in_flight(1, 2, max_staleness=1)
    ready(buffer, 3, 2, 1)
    with pytest.raises(TimeoutError, match="batch 0 is not complete; groups: 0 pending, 1 in flight, 3 ready"):
        buffer.take(0)
    ready(buffer, 0)
    assert [tuple(group) for group in buffer.take(0)] == [(0, "payload 0"), (1, "payload 1")]


def test_drop_begins_groups_again_that_have_become_too_old():
    buffer = in_flight(1, 2, max_staleness=1, order="window", window=5, on_stale="drop")
    ready(buffer, 1, 2)
    assert taken(buffer) == [1, 2]
    buffer.set_version(2)
    begun(buffer)
    ready(buffer, 4, 5)
    ready(buffer, 3, versions=V1, tokens=7)
    assert taken(buffer) == [3, 4]
    buffer.set_version(3)
    assert buffer.expired() == [0]
    buffer.give_back(0, "too old to go on", tokens=9)
    assert buffer.expired() == []
    assert buffer.begin() == (0, None)
    counts = buffer.metrics()
    assert counts["buffer/dropped"] == 1 and counts["buffer/dropped_tokens"] == 9
    assert counts["buffer/taken"] == 4 and counts["buffer/taken_tokens"] == 7
    assert counts["buffer/interrupted"] == 0


def test_train_takes_groups_however_old():
    buffer = in_flight(1, 1, max_staleness=0, on_stale="train")
    for version in (2, 3, 4):
        buffer.set_version(version)
    assert buffer.expired() == []
    ready(buffer, 0, versions=V1)
    assert taken(buffer) == [0]


# --- Versions --------------------------------------------------------------------------------------------------------


def test_the_same_weights_sent_again_make_nothing_older():
    buffer = in_flight(3, 1, max_staleness=0)
    buffer.set_version(4, same_weights=True)
    buffer.put(0, None, versions=(3, 4))
    assert buffer.staleness(3) == buffer.staleness(4) == 0
    assert taken(buffer) == [0]
    buffer.set_version(5)
    assert buffer.staleness(3) == buffer.staleness(4) == 1 and buffer.staleness(5) == 0


def test_versions_only_grow():
    buffer = buffer_with(3, 1)
    buffer.set_version(3)
    with pytest.raises(ValueError, match="version 3 is in force"):
        buffer.set_version(2)


# --- Dynamic sampling ------------------------------------------------------------------------------------------------


def test_flat_groups_are_replaced():
    buffer = buffer_with(1, 2)
    assert begun(buffer) == [0, 1]
    ready(buffer, 1, flat=True)
    assert begun(buffer) == [2]
    ready(buffer, 0, 2)
    assert taken(buffer) == [0, 2]
    assert buffer.metrics()["buffer/filtered"] == 1


def test_a_flat_group_that_is_dropped_comes_back_with_other_rewards():
    buffer = in_flight(1, 2, max_filtered=1)
    ready(buffer, 1, flat=True)  # kept if 0 is flat, too
    buffer.set_version(2)  # an update that was not declared: 1 is dropped
    buffer.give_back(0)
    assert begun(buffer) == [0, 1]
    ready(buffer, 0)
    ready(buffer, 1)
    assert taken(buffer) == [0, 1]


def test_a_flat_group_is_filtered_before_lower_numbers_arrive_if_that_is_certain():
    buffer = in_flight(1, 4, max_filtered=2)
    ready(buffer, 3, flat=True)  # 0, 1 and 2 may all be flat
    ready(buffer, 1)
    assert begun(buffer) == []
    ready(buffer, 2)  # only 0 may be
    assert begun(buffer) == [4]


# --- Errors, timeouts, threads ---------------------------------------------------------------------------------------


def test_fail_wakes_take_and_each_raise_is_a_copy():
    buffer = buffer_with(1, 1)
    error = RuntimeError("the reward function failed")
    threading.Timer(0.05, buffer.fail, [error]).start()
    raised = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the reward function failed") as caught:
            buffer.take(30)
        raised.append(caught.value)
    assert raised[0] is not raised[1] and error not in raised and error.__traceback__ is None
    assert buffer.begin() is None
    buffer.fail(ValueError("a later error"))
    with pytest.raises(RuntimeError):
        buffer.take(0)
    buffer.load_state_dict(buffer.state_dict())  # of a stream that has ended before the script continues from a state
    with pytest.raises(RuntimeError):
        buffer.take(0)


def test_take_returns_as_soon_as_the_group_that_held_it_up_begins_anew():
    """Group 2 may not overtake group 0, which would become too old; with newer weights group 0 has time again."""
    buffer = buffer_with(1, 1, max_staleness=1, order="window", window=4)
    assert begun(buffer) == [0, 1]
    ready(buffer, 1)
    assert taken(buffer) == [1]
    buffer.set_version(2)
    assert begun(buffer) == [2]
    ready(buffer, 2)
    with pytest.raises(TimeoutError):
        buffer.take(0)
    threading.Timer(0.1, buffer.give_back, (0,)).start()
    begin = time.monotonic()
    assert taken(buffer, 20) == [2]
    assert time.monotonic() - begin < 10


def test_time_in_take_is_counted():
    buffer = buffer_with(1, 1)
    with pytest.raises(TimeoutError, match="batch 0 is not complete"):
        buffer.take(0.05)
    assert 0.05 <= buffer.metrics()["buffer/wait_seconds"] < 5
    assert buffer.metrics()["buffer/wait_seconds"] == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [{}, {"order": "window"}, {"order": "window", "on_stale": "drop"}])
def test_several_producers_and_one_consumer(how):
    """Four threads generate, die, interrupt and abort; the trainer takes 60 batches and updates in between."""
    batches, seen, failed, done = 60, [], [], threading.Event()
    buffer = SampleBuffer(4, max_staleness=1, num_batches=batches, **how)

    def produce(seed):
        try:
            draw = random.Random(seed)
            while not done.is_set():
                version = buffer.version
                group = buffer.begin()
                if group is None:
                    time.sleep(0.0005)
                    continue
                born = version if group.partial is None else group.partial
                if draw.random() < 0.1:
                    time.sleep(0.003)
                fate = draw.random()
                if fate < 0.1 or group.number in buffer.expired():
                    buffer.give_back(group.number)
                elif fate < 0.2:
                    buffer.give_back(group.number, born)
                else:
                    buffer.put(group.number, born, versions=(born, buffer.version), flat=fate < 0.3)
        except BaseException as error:
            failed.append(error)
            buffer.fail(error)

    threads = [threading.Thread(target=produce, args=(seed,), daemon=True) for seed in range(4)]
    buffer.set_version(1)
    for thread in threads:
        thread.start()
    try:
        for batch in range(batches):
            groups = buffer.take(timeout=20)
            assert all(buffer.version - group.payload <= 1 for group in groups)
            seen += [group.number for group in groups]
            state = pickle.loads(pickle.dumps(buffer.state_dict()))
            assert not set(state["groups"]) & set(seen)
            buffer.set_version(batch + 2)
    finally:
        done.set()
        for thread in threads:
            thread.join(10)
    assert not failed
    assert len(set(seen)) == len(seen) == 4 * batches
    assert how or seen == sorted(seen)


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def test_resume():
    """Ready groups keep their payload, pending ones their partial completions, those in flight begin again."""
    buffer = in_flight(1, 2, max_staleness=2)
    ready(buffer, 0, 1, 4)
    buffer.give_back(3, "half of 3", tokens=1)
    assert taken(buffer) == [0, 1]
    state = pickle.loads(pickle.dumps(buffer.state_dict(materialize=lambda data: ["saved", data])))
    other = SampleBuffer(2, max_staleness=2)
    other.load_state_dict(state, restore=lambda data: data[1])
    assert other.version == 2 and other.batches == 1  # the update after batch 0 was due
    assert other.begin() == (2, None) and other.begin() == (3, "half of 3") and other.begin() == (5, None)
    ready(other, 2, 3)
    assert taken(other) == [2, 3]
    other.set_version(3)
    begun(other)
    ready(other, 5)
    assert [group.payload for group in other.take(0)] == ["payload 4", "payload 5"]


@pytest.mark.parametrize(
    ("interval", "updated", "version"),
    [
        (1, False, 2),  # the update was due, and has failed: the samples are no older than if it had succeeded
        (1, True, 2),  # the weights have not been trained since, so those of the next update are the same
        (2, False, 1),  # they have
    ],
)
def test_first_update_of_a_resumed_run_may_have_a_later_number(interval, updated, version):
    buffer = in_flight(1, 1, max_staleness=1, update_interval=interval)
    ready(buffer, 0, 1)
    assert taken(buffer) == [0]
    if updated:
        buffer.set_version(2)
    other = SampleBuffer(1, max_staleness=1, update_interval=interval)
    other.load_state_dict(buffer.state_dict())
    assert other.version == version
    other.set_version(3)
    assert other.staleness(1) == 1 and taken(other) == [1]
    other.set_version(4)  # of new weights
    assert other.staleness(3) == 1


def test_resume_from_before_the_batch_that_was_taken_last_was_trained():
    buffer = in_flight(1, 2, max_staleness=1)
    ready(buffer, 0, 1, 2)
    assert taken(buffer) == [0, 1]
    other = SampleBuffer(2, max_staleness=1)
    other.load_state_dict(buffer.state_dict(trained=0))
    assert other.version == 1 and other.batches == 0
    assert begun(other) == [0, 1, 3]
    ready(other, 0, 1)
    assert taken(other) == [0, 1]
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="1 batches were taken"):
            other.state_dict(trained=wrong)


def test_resume_keeps_the_order_of_numbers():
    buffer = in_flight(1, 1, max_staleness=1, order="window", on_stale="train")
    ready(buffer, 1)
    assert taken(buffer) == [1]
    other = SampleBuffer(1, max_staleness=1)
    other.load_state_dict(buffer.state_dict(trained=0))
    assert begun(other) == [0, 1]
    ready(other, 0, 1)
    assert taken(other) == [0] and taken(other) == [1]


def test_a_partial_completion_that_cannot_be_trained_in_time_is_not_continued():
    buffer = in_flight(1, 1, max_staleness=1, order="window", window=3, on_stale="drop")
    ready(buffer, 1)
    taken(buffer)
    buffer.set_version(2)
    begun(buffer)
    ready(buffer, 2)
    taken(buffer)
    assert buffer.expired() == []
    buffer.give_back(0, "of version 1")  # and version 3 comes before the next batch
    assert buffer.begin() == (0, None)
    assert buffer.metrics()["buffer/dropped"] == 1


def test_resume_with_a_lower_max_staleness_drops_what_is_too_old():
    buffer = in_flight(1, 1, max_staleness=2)
    ready(buffer, 0, 1, 2)
    taken(buffer)
    other = SampleBuffer(1, max_staleness=0)
    other.load_state_dict(buffer.state_dict())
    assert begun(other) == [1]
    ready(other, 1)
    assert taken(other) == [1]


def test_states_that_cannot_be_loaded():
    buffer = buffer_with(1, 2)
    state = buffer.state_dict()
    with pytest.raises(ValueError, match="the state has 2 groups per batch, and the buffer 3"):
        SampleBuffer(3).load_state_dict(state)
    buffer.begin()
    with pytest.raises(ValueError, match="1 groups are in flight"):
        buffer.load_state_dict(state)


# --- A trainer that goes back ----------------------------------------------------------------------------------------


def test_batches_are_taken_again_after_the_trainer_went_back():
    """Four batches were taken, the last two are kept, and the fifth is generated. Then the trainer is at the second."""
    buffer = buffer_with(1, 2, max_staleness=1, keep_batches=2)
    for batch in range(4):
        begun(buffer)
        ready(buffer, 2 * batch, 2 * batch + 1)
        assert taken(buffer) == [2 * batch, 2 * batch + 1]
        buffer.set_version(batch + 2)
    assert begun(buffer) == [10, 11], "8 and 9 have begun before"
    ready(buffer, 8, 9)  # of the weights after four batches
    buffer.rewind(1)
    buffer.set_version(6)  # the trainer sends the weights after one batch
    buffer.set_version(7)  # and the script once more
    assert buffer.batches == 1 and buffer.staleness(7) == buffer.staleness(2) == 0
    assert buffer.staleness(1) == 1 and buffer.staleness(5) == 0, "what newer weights have generated is not stale"
    assert begun(buffer) == [2, 3], "no further ones: there are 4 to 11"
    ready(buffer, 2, 3)
    assert [taken(buffer), taken(buffer), taken(buffer)] == [[2, 3], [4, 5], [6, 7]]
    assert buffer.metrics()["buffer/dropped"] == 0
    assert begun(buffer) == []
    for version in (8, 9, 10):  # those before batches 2, 3 and 4: as many as before
        buffer.set_version(version)
    assert buffer.staleness(5) == 0 and taken(buffer) == [8, 9]


def test_a_batch_that_was_not_taken_cannot_be_taken_again():
    buffer = in_flight(1, 1)
    ready(buffer, 0)
    taken(buffer)
    buffer.rewind(1)  # nothing to do
    for batch in (2, -1):
        with pytest.raises(ValueError, match=rf"rewind\({batch}\): the batches that can be taken next are 0 to 1"):
            buffer.rewind(batch)


# --- Random histories ------------------------------------------------------------------------------------------------


@examples(60, 1500)
@given(how=settings_of_a_buffer(), regular=st.booleans(), seed=st.integers(0, 2**32), length=st.integers(0, 150))
@example(
    how={"groups_per_batch": 3, "max_staleness": 1, "order": "window", "num_batches": 8},
    regular=True,
    seed=0,
    length=150,
)
def test_random_histories(how, regular, seed, length):
    """Arrivals, deaths, interruptions, updates, takes, saves and kills in any order, then to the end of the run.

    Every return value is that of the model, and `History` asserts what must hold after each step.
    """
    history = History(how, random.Random(seed), regular)
    for _ in range(length):
        history.step()
    history.finish()


@examples(40, 1000)
@given(
    seeds=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
    limit=st.none() | st.integers(0, 3),
    interval=st.integers(1, 2),
)
def test_fifo_with_staleness_0_does_not_depend_on_when_groups_arrive(seeds, limit, interval):
    """Which groups are in each batch, and the version of each, are the same for any two histories."""

    def run(seed):
        draw, record = random.Random(seed), []
        buffer = buffer_with(1, 3, update_interval=interval, max_filtered=limit)
        for batch in range(6):
            flying = []
            while True:
                flying += [(number, buffer.version) for number in begun(buffer)]
                if not flying:
                    break
                number, version = flying.pop(draw.randrange(len(flying)))
                if draw.random() < 0.2:
                    buffer.give_back(number)
                    continue
                flat = random.Random(number).random() < 0.5  # a property of the prompt and the weights
                buffer.put(number, version, versions=(version, version), flat=flat)
            record.append([tuple(group) for group in buffer.take(0)])
            if (batch + 1) % interval == 0:
                buffer.set_version(batch + 2)
        return record

    first, second = map(run, seeds)
    assert first == second
    assert all(
        version == 1 + batch // interval * interval for batch, groups in enumerate(first) for _, version in groups
    )
