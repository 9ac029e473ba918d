"""Weights from one rollout worker to another: exact, complete, given up when an update begins, without a trainer."""

import contextlib
import os
import signal
import threading

import pytest
import ray
import torch
from devices import ON_DEVICE
from rollout_helpers import LLAMA, TIED, Bigram, BigramEngine, EchoEngine, Toy, check_versions, payload_of, update
from waits import wait_until

from single_controller import (
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    SingleControllerError,
)
from workers import HFEngine, RolloutManager, RolloutStream, RolloutWorker, SampleBuffer, SamplingParams
from workers.data.rollout_data import group_numbers
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.stream.exchange import Orders
from workers.weight_sync.transports import peer_weights as peer

B, SAMPLES = 4, 2
LONG = SamplingParams(60, temperature=0.8, top_p=0.9)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(peer, "BUCKET_BYTES", 64)


@contextlib.contextmanager
def two(made, **options):
    with LocalWorkerGroup(2, made, threads=True, collectives=False, **options) as group:
        yield group


def toys(engine=BigramEngine):
    return RayClassWithInitArgs(Toy, engine)


def workers_of(group):
    return [rank.executor.workers[None] for rank in group._state.transport.ranks]


def exchange(group, version, sends=((), ()), copies=True):
    return group.exchange([Orders("a", version, copies=copies, send_weights=list(requests)) for requests in sends])


def only_first(group, version=3):
    """Rank 0 has a version, and rank 1 asks for it. Returns the request."""
    group.load(version, version)
    group.restart(ranks=[1])
    first, second = exchange(group, version)
    assert first.needs_weights is None and second.weight_version == 0
    return second.needs_weights


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, dtype", [(LLAMA, "fp32"), (TIED, "bf16")], ids=["fp32", "tied bf16"])
def test_hf_engine_gets_the_same_weights_bit_for_bit(config, dtype):
    made = RayClassWithInitArgs(RolloutWorker, HFEngine, config, param_dtype=dtype)
    with two(made) as group:
        first, second = workers_of(group)
        with torch.no_grad():
            for parameter in first.engine.model.parameters():
                parameter.normal_()
        first.weight_version = 7
        (_, report) = exchange(group, 7)
        exchange(group, 7, ([report.needs_weights], ()))
        wait_until(lambda: second.weight_version == 7)
        own, copied = first.engine.model.state_dict(), second.engine.model.state_dict()
        assert own.keys() == copied.keys()
        assert all(
            torch.equal(tensor.cpu().view(torch.uint8), copied[name].cpu().view(torch.uint8))
            for name, tensor in own.items()
        )
        prompts, seeds = [[5, 9, 2], [7]], [1, 2]
        assert first.engine.generate(prompts, LONG, seeds) == second.engine.generate(prompts, LONG, seeds)


def test_engine_without_raw_weights_waits_for_an_update():
    with two(RayClassWithInitArgs(RolloutWorker, EchoEngine)) as group:
        engine = EchoEngine()
        assert engine.raw_weights() == {}
        with pytest.raises(RolloutError, match="EchoEngine does not pass its weights on"):
            engine.read_raw(["shift"])
        worker = workers_of(group)[1]
        assert worker.peer.want(5) is None


def test_sleep_takes_the_version_away_before_others_can_copy_the_weights():
    class Lock:
        """Notes the version whenever a thread gives the lock up."""

        def __init__(self, worker):
            self.worker, self.lock, self.depth, self.seen = worker, worker.weights_lock, 0, []

        def __enter__(self):
            self.lock.acquire()
            self.depth += 1

        def __exit__(self, *raised):
            self.depth -= 1
            if not self.depth:
                self.seen.append(self.worker.weight_version)
            self.lock.release()

    with two(RayClassWithInitArgs(RolloutWorker, EchoEngine)) as group:
        worker = workers_of(group)[0]
        assert worker.weight_version == 0 and not worker.engine.keeps_weights
        lock = worker.weights_lock = Lock(worker)
        worker.sleep()
        assert worker.engine.asleep and lock.seen == [None]


# --- copies -----------------------------------------------------------------------------------------------------------


class Gate:
    """Makes each call of a method wait for the test."""

    def __init__(self, engine, method):
        self.called, self.may_return = threading.Semaphore(0), threading.Semaphore(0)
        self.method = getattr(engine, method)
        setattr(engine, method, self)

    def __call__(self, *arguments):
        result = self.method(*arguments)
        self.called.release()
        assert self.may_return.acquire(timeout=20)
        return result


def test_copy_has_the_version_only_when_it_is_complete():
    with two(toys()) as group:
        request = only_first(group)
        first, second = workers_of(group)
        gate = Gate(first.engine, "read_raw")
        exchange(group, 3, ([request], ()))
        assert gate.called.acquire(timeout=20)
        gate.may_return.release()
        assert gate.called.acquire(timeout=20)  # the first of two buckets has arrived
        assert group.version_of_weights() == [3, None]
        with pytest.raises(RolloutError, match="no complete weights"):
            second.engine.generate([[1]], LONG, [0])
        gate.may_return.release()
        wait_until(lambda: group.version_of_weights() == [3, 3])
        wait_until(lambda: not exchange(group, 3)[0].sending_weights)
        assert exchange(group, 3)[1].needs_weights is None
        assert not gate.called.acquire(blocking=False)
        prompts, seeds = [[5, 9, 2], [7]], [1, 2]
        assert first.engine.generate(prompts, LONG, seeds) == second.engine.generate(prompts, LONG, seeds)


def test_repeated_order_begins_nothing():
    with two(toys()) as group:
        request = only_first(group)
        gate = Gate(workers_of(group)[1].engine, "load_raw")
        for _ in range(3):
            first, second = exchange(group, 3, ([request, request], ()))
            assert list(first.sending_weights) == [request.id] and second.needs_weights in (request, None)
        gate.may_return.release(9)
        wait_until(lambda: group.version_of_weights() == [3, 3])
        assert gate.called._value == 2
    wait_until(lambda: not any(thread.name.startswith("bucket of") for thread in threading.enumerate()))


@pytest.mark.parametrize("how", ["update", "pause", "loaded"])
@pytest.mark.parametrize("side", [0, 1])
def test_update_ends_a_copy(how, side, caplog):
    """It waits for one bucket. What has arrived is not used, and an update of any kind has the last word."""
    with two(toys()) as group:
        request = only_first(group)
        gate = Gate(workers_of(group)[side].engine, ("read_raw", "load_raw")[side])
        exchange(group, 3, ([request], ()))
        assert gate.called.acquire(timeout=20)
        threading.Timer(0.1, gate.may_return.release).start()
        if how == "update":
            group.begin_weights("key", 4, "sender")
            assert group.version_of_weights() == [3, 0 if side == 0 else None]  # no copy has begun, or it was given up
            group.receive_payload("key", payload_of(Bigram(4).state_dict()))
            group.finish_weights("key")
        else:
            if how == "pause":
                _, report = exchange(group, 3, copies=False)
                assert report.needs_weights is None
            group.load(4, 4)
        wait_until(lambda: not exchange(group, 4)[0].sending_weights)
        assert group.version_of_weights() == [4, 4] and not gate.called.acquire(blocking=False)
        for worker in workers_of(group):
            assert worker.engine.weight_version == 4
            own = worker.engine.model.state_dict()
            assert all(torch.equal(own[name], one) for name, one in Bigram(4).state_dict().items())
    assert "Traceback" not in caplog.text


def test_end_of_an_update_ends_a_copy_that_began_in_it():
    with two(toys()) as group:
        request = only_first(group)
        first, second = workers_of(group)
        first.begin_weights("key", 4, "sender", True)
        first.receive_payload("key", payload_of(Bigram(4).state_dict()))
        gate = Gate(second.engine, "load_raw")
        exchange(group, 3, ([request], ()))
        assert gate.called.acquire(timeout=20)  # one of two buckets has arrived
        first.finish_weights("key")
        gate.may_return.release(9)
        wait_until(lambda: not exchange(group, 3)[0].sending_weights)
        assert group.version_of_weights() == [4, None]


def test_copy_that_was_cut_off_is_begun_again(caplog):
    with two(toys()) as group:
        request = only_first(group)
        engine = workers_of(group)[0].engine
        read = engine.read_raw

        def sleeps(names):
            if "bias" in names:
                raise RolloutError("the engine sleeps")
            return read(names)

        engine.read_raw = sleeps
        exchange(group, 3, ([request], ()))
        wait_until(lambda: not exchange(group, 3)[0].sending_weights)
        assert group.version_of_weights() == [3, None]
        assert "rollout rank 0 did not send its weights to rank 1: RolloutError: the engine sleeps" in caplog.text
        assert exchange(group, 3)[1].needs_weights == request
        engine.read_raw = read
        exchange(group, 3, ([request], ()))
        wait_until(lambda: group.version_of_weights() == [3, 3])


def test_copy_whose_thread_cannot_start_is_asked_for_again(monkeypatch, caplog):
    with two(toys()) as group:
        request = only_first(group)
        start = threading.Thread.start

        def start_others(thread):
            if thread.name == "weights-send":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_others)
            assert not exchange(group, 3, ([request], ()))[0].sending_weights
        assert "rollout rank 0 cannot send its weights to rank 1: can't start new thread" in caplog.text
        exchange(group, 3, ([request], ()))
        wait_until(lambda: group.version_of_weights() == [3, 3])


def test_weights_that_cannot_be_loaded_are_not_asked_for_again(caplog):
    with two(toys()) as group:
        request = only_first(group)
        workers_of(group)[1].engine.load_raw = lambda weights: 1 / 0
        exchange(group, 3, ([request], ()))
        # The thread that receives buckets gives the version up before it logs why.
        why = "could not be loaded: rollout rank 1: BigramEngine could not load weights of version 3"
        wait_until(lambda: why in caplog.text)
        assert exchange(group, 3)[1].needs_weights is None
        assert group.version_of_weights() == [3, None]
        assert exchange(group, 4)[1].needs_weights.version == 4
        group.load(4, 4)
        assert group.version_of_weights() == [4, 4]


@pytest.mark.parametrize("other", ["shape", "slice"])
def test_engine_with_other_weights_is_refused(caplog, other):
    with two(toys()) as group:
        request = only_first(group)
        engine = workers_of(group)[0].engine
        if other == "shape":
            engine.model.bias.data = torch.zeros(31)
        else:  # the same shapes of another part of the model
            engine.weight_slices = lambda: {"bias": ((0, 16),)}
        exchange(group, 3, ([request], ()))
        wait_until(lambda: "nobody needs it any more" in caplog.text)  # logged once the sender has been refused
        wait_until(lambda: not exchange(group, 3)[0].sending_weights)
        assert group.version_of_weights() == [3, 0]


# --- a stream ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rounds",
    [
        [("DELAY_START", 0, 1), ("DIE_IN_READ_RAW", 1, 2)],
        pytest.param([("DIE_IN_LOAD_RAW", 0, 2)], marks=pytest.mark.full("another order of two deaths")),
    ],
    ids=["sender", "receiver"],
)
def test_killed_workers_get_the_version_from_others_without_an_update(ray_cluster, tmp_path, rounds):
    """Workers are killed in the middle of groups; then also the worker that sends its weights, or the one that gets
    them. The others go on, however long a replacement takes to start. Then it gets their version, and generates.

    `rounds` has what happens, the rank that the test kills, and how many die.
    """
    flags = {name: tmp_path / name for name in ("DELAY_START", "DIE_IN_READ_RAW", "DIE_IN_LOAD_RAW")}
    environment = {name: str(file) for name, file in flags.items()} | {"BUCKET_BYTES": "64"}
    made = RayClassWithInitArgs(Toy, BigramEngine, delay=0.008)
    with (
        RayResourcePool([3], use_gpu=ON_DEVICE) as pool,
        RayWorkerGroup(pool, made, collectives=False, worker_env=environment) as group,
    ):
        manager = RolloutManager(group, LONG, samples_per_prompt=SAMPLES)
        manager.refresh = lambda: pytest.fail("the weights were sent again")
        found = []

        def prompts(rollout_id):
            return [[3 + rollout_id % 20, index + 1] for index in range(B)]

        def ask(method):
            """All ranks; [] if one has died."""
            try:
                return group.execute_all_sync(method)
            except SingleControllerError:
                return []

        def take(count=1):
            found.extend((manager.weight_version, stream.take(60)) for _ in range(count))

        def take_until(condition):
            wait_until(lambda: condition() or take(), 60)

        buffer = SampleBuffer(B, update_interval=1000)
        # A few requests at a time: hundreds would share the processor, and the groups of the first step would end last.
        with RolloutStream(manager, prompts, buffer, requests_per_worker=8) as stream:
            for version, (flag, killed, deaths) in enumerate(rounds, 1):
                update(stream, manager, version)
                take(2)  # so that no group is lost three times
                pids, restarts = ask("pid_of_process"), stream.metrics()["rollout/restarts"]
                flags[flag].touch()
                os.kill(pids[killed], signal.SIGKILL)
                if flag == "DELAY_START":
                    take_until(lambda: len(ask("version_of_weights")) == 2)
                    take(2)
                    assert ask("version_of_weights") == [version] * 2
                    flags[flag].unlink()
                take_until(lambda: ask("version_of_weights") == [manager.weight_version] * 3)
                assert not flags[flag].exists()
                assert len(set(pids) & set(ask("pid_of_process"))) == (1 if flag == "DIE_IN_READ_RAW" else 2)
                assert stream.metrics()["rollout/restarts"] == restarts + deaths
            take_until(lambda: min(ask("counted"), default=0) > 0)
            pending = stream.buffer._groups[B * len(found)].data
            assert isinstance(pending, (ray.ObjectRef, type(None)))
        numbers = [number for _, data in found for number in group_numbers(data["group_ids"])[::SAMPLES].tolist()]
        assert numbers == list(range(B * len(found)))
        for version, data in found:
            check_versions(data, lambda of, *made, **mask: Bigram(of).log_probs(*made, 0.8, **mask))
            assert data["weight_versions"].amax() == data["min_weight_versions"].min() == version
