"""RolloutStream: what arrives, from which weights, when workers die, and when it ends. On toy engines."""

import asyncio
import contextlib
import pickle
import queue
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import ray
import torch
from devices import ON_DEVICE
from fake_server import FakeServer, kill, serving
from rollout_helpers import Bigram, BigramEngine, BigramTrainer, Toy, check_versions, update
from waits import wait_until

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers import HTTPEngine, RayTrainGroup, SampleBuffer
from workers.data.rollout_data import group_numbers
from workers.rollout.engines import http_engine
from workers.rollout.engines.rollout_engine import Completion, EngineLoad, SamplingParams
from workers.rollout.rollout_errors import PromptError, RewardError, RolloutError, WeightVersionError
from workers.rollout.rollout_manager import RolloutManager
from workers.rollout.stream.exchange import FinishedGroup, Report
from workers.rollout.stream.rollout_stream import RolloutStream
from workers.rollout.stream.router import Router, _Worker
from workers.train.group_links import RolloutLink
from workers.weight_sync import WeightSender, WeightSyncError

B, SAMPLES = 4, 3
HOW = SamplingParams(12, temperature=0.8, stop_token_ids=(0, 1, 2))
LONG = SamplingParams(60, temperature=0.8, top_k=9)


def prompts(rollout_id):
    draw = random.Random(rollout_id)
    return [[draw.randrange(3, 32) for _ in range(draw.randint(1, 4))] for _ in range(B)]


def with_labels(rollout_id):
    return prompts(rollout_id), {"label": [rollout_id * B + index for index in range(B)]}


def reward(prompt_ids, completion_ids, label=0):
    return 1000 * label + len(completion_ids) + prompt_ids[0] / 100


def made(delay=0.0):
    return RayClassWithInitArgs(Toy, BigramEngine, delay=delay)


@pytest.fixture
def group():
    with LocalWorkerGroup(2, made(0.0005), threads=True) as group:
        yield group


URLS = queue.SimpleQueue()
"""A global, since each rank gets a copy of its arguments."""


def engine_of_next_server(folder):
    made = HTTPEngine(URLS.get(), config={"vocab_size": 32}, weights_dir=folder)
    made._shapes = {name: tuple(weight.shape) for name, weight in Bigram(0).state_dict().items()}
    return made


@contextlib.contextmanager
def group_of_servers(urls, folder):
    """A group whose workers have an `HTTPEngine` each."""
    for url in urls:
        URLS.put(url)
    made = RayClassWithInitArgs(Toy, engine_of_next_server, folder)
    with LocalWorkerGroup(len(urls), made, threads=True, collectives=False) as group:
        yield group


@pytest.fixture
def servers_group(tmp_path):
    """Each worker has an `HTTPEngine` with a server of its own."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(contextlib.closing(FakeServer(delay=0.002))) for _ in range(2)]
        for server in servers:
            server.log_probs = "tempered"
        group = stack.enter_context(group_of_servers([server.url for server in servers], tmp_path))
        group.servers = servers
        yield group


@pytest.fixture
def processes():
    """Servers that can be killed."""
    started = [serving("0", "tempered") for _ in range(2)]
    yield started
    for process in started:
        kill(process)


def start_again(processes, which):
    processes[which] = serving(processes[which].url.rpartition(":")[2], "tempered")


def managed(group, how=HOW, function=reward, **options):
    return RolloutManager(group, how, function, samples_per_prompt=SAMPLES, seed=7, **options)


@contextlib.contextmanager
def streaming(manager, source=prompts, *, buffer=None, mode="wait", **options):
    named = {name: options.pop(name) for name in ("dynamic_sampling", "requests_per_worker") if name in options}
    with RolloutStream(manager, source, buffer or SampleBuffer(B, **options), update_mode=mode, **named) as stream:
        yield stream


def check_log_probs(data):
    return check_versions(data, lambda version, *made, **mask: Bigram(version).log_probs(*made, 0.8, **mask))


class BigramWithTool(BigramEngine):
    """Marks the first token of each completion as the output of a tool, which says the column `label`."""

    def submit(self, *given, extras, **options):
        marked = Future()

        def mark(done):
            one = done.result()
            mask = [0] + [1] * (len(one.token_ids) - 1)
            marked.set_result(replace(one, loss_mask=mask, info={"label": extras["label"]}))

        super().submit(*given, **options).add_done_callback(mark)
        return marked


def test_masks_info_and_extras_of_a_stream():
    def of_info(prompt_ids, completion_ids, info, label):
        return info["label"] + 0.5 * (info["label"] == label)

    made = RayClassWithInitArgs(Toy, BigramWithTool)
    with LocalWorkerGroup(2, made, threads=True) as group:
        manager = managed(group, function=of_info, engine_extras=["label"])
        with streaming(manager, with_labels, num_batches=2) as stream:
            for rollout_id in range(2):
                update(stream, manager, rollout_id + 1)
                data = stream.take(30)
                rewards = [rollout_id * B + index + 0.5 for index in range(B) for _ in range(SAMPLES)]
                assert data["rewards"].tolist() == rewards
                assert torch.equal(data["loss_mask"].sum(1), data["completion_lengths"] - 1)
                labels = [rollout_id * B + index for index in range(B) for _ in range(SAMPLES)]
                notes = manager.row_notes.of(data)  # what a run's samples have of them
                assert [(note.columns, note.info) for note in notes] == [({"label": k}, {"label": k}) for k in labels]


def test_without_staleness_it_returns_what_the_manager_generates(group):
    manager = managed(group)
    with streaming(manager, with_labels, num_batches=4) as stream:
        for rollout_id in range(4):
            update(stream, manager, rollout_id + 1)
            data = stream.take(30)
            given, extras = with_labels(rollout_id)
            expected = manager.generate(given, rollout_id=rollout_id, extras=extras)
            assert (group_numbers(data.pop("group_ids")) - rollout_id * B).equal(
                group_numbers(expected.pop("group_ids"))
            )
            assert set(data.keys()) == set(expected.keys())
            for name in expected.keys():  # noqa: SIM118
                assert torch.equal(data[name], expected[name]), name
        with pytest.raises(ValueError, match="all 4 batches were taken"):
            stream.take(1)


@pytest.mark.parametrize(
    ("workers", "mode"), [("group", "wait"), ("group", "interrupt"), ("servers_group", "interrupt")]
)
def test_each_token_is_of_the_weights_that_its_version_says(request, workers, mode):
    manager = managed(request.getfixturevalue(workers), LONG)
    batches = []
    with streaming(manager, mode=mode, max_staleness=2, requests_per_worker=2 * SAMPLES) as stream:
        for version in range(1, 5):  # nothing else here, so that updates find requests in flight
            update(stream, manager, version)
            batches.append(stream.take(30))
    found, mixed = [], 0
    for version, data in enumerate(batches, 1):
        found += group_numbers(data["group_ids"])[::SAMPLES].tolist()
        for of in check_log_probs(data):
            assert of == sorted(of) and len(of) <= 60 and version - 2 <= of[0] and of[-1] <= version
            mixed += of[0] != of[-1]
        assert data["min_weight_versions"].min() >= version - 2
        assert data["completion_lengths"].unique().tolist() == [60]
    assert found == list(range(4 * B))
    assert mixed > 0 if mode == "interrupt" else mixed == 0


def test_one_step_off_policy_generates_the_next_batch_meanwhile(group):
    manager = managed(group)
    with streaming(manager, max_staleness=1) as stream:
        for version in range(1, 5):
            update(stream, manager, version)
            data = stream.take(30)
            wait_until(lambda: stream.metrics()["buffer/ready"] >= B)  # while this thread "trains"
            assert data["weight_versions"].amax() == max(1, version - 1)


def test_weights_that_are_never_updated(group):
    """As with ``debug_rollout_only``. The prompts are a tuple, which is no pair of prompts and columns."""
    manager = managed(group)
    with streaming(manager, lambda rollout_id: tuple(prompts(rollout_id)), max_staleness=1) as stream:
        for rollout_id in range(4):
            with stream.updating():
                pass
            data = stream.take(30)
            assert group_numbers(data["group_ids"])[::SAMPLES].tolist() == list(
                range(rollout_id * B, rollout_id * B + B)
            )
            assert data["max_weight_versions"].unique().tolist() == [0]


@pytest.mark.timeout(40)
@pytest.mark.parametrize(
    "mode", [pytest.param("wait", marks=pytest.mark.full("asynchronous runs in the other update mode")), "interrupt"]
)
def test_update_is_given_up_in_time_while_an_exchange_hangs(group, monkeypatch, mode):
    """And can be repeated, when it goes on. No group is lost."""
    hangs, goes_on = threading.Event(), threading.Event()
    goes_on.set()
    exchange = Toy.exchange

    def hanging(self, orders):
        if not goes_on.is_set():
            hangs.set()
            assert goes_on.wait(30)
        return exchange(self, orders)

    monkeypatch.setattr(Toy, "exchange", hanging)
    manager = managed(group)
    found = []
    with streaming(manager, max_staleness=1, mode=mode) as stream:
        update(stream, manager, 1)
        found += group_numbers(stream.take(30)["group_ids"])[::SAMPLES].tolist()
        goes_on.clear()
        try:
            assert hangs.wait(10)
            for _ in range(2):
                began = time.monotonic()
                with (
                    pytest.raises(WeightSyncError, match=r"within 0.2 s.*exchange\(\) of the workers has not returned"),
                    RolloutLink(manager, lambda: 1, 0.2).updating(same_weights=False),
                ):
                    raise AssertionError("the update began")
                assert time.monotonic() - began < 5
        finally:
            goes_on.set()
        for version in (2, 3):
            update(stream, manager, version)
            data = stream.take(30)
            check_log_probs(data)
            found += group_numbers(data["group_ids"])[::SAMPLES].tolist()
    assert found == list(range(3 * B))


def test_workers_may_be_busy_with_an_update_for_as_long_as_it_may_take(group, monkeypatch):
    """The timeout of a call begins when it is sent; a worker that loads weights takes its orders later. The
    same holds for the call with which a stream ends."""
    limits, exchange = [], group.exchange

    class Noting:
        def options(self, timeout):
            limits.append(timeout)
            return exchange.options(timeout=timeout)

    monkeypatch.setattr(group, "exchange", Noting())
    with streaming(managed(group, timeout=30), mode="interrupt") as stream:
        with stream.updating(100):
            limits.clear()
            wait_until(lambda: len(limits) > 1)
            assert set(limits) == {130}
        wait_until(lambda: limits[-1] == 30)
        monkeypatch.setattr(Router, "due", True)  # or it may have nothing to tell the workers
        with stream.updating(100):
            limits.clear()
            stream.close()
            assert set(limits) == {130}


@pytest.mark.timeout(40)
def test_stream_whose_exchange_hangs_can_be_closed(group, monkeypatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def hanging(self, orders):
        hangs.set()
        assert goes_on.wait(30)
        return exchange(self, orders)

    exchange = Toy.exchange
    monkeypatch.setattr(Toy, "exchange", hanging)
    monkeypatch.setattr("workers.rollout.stream.rollout_stream.CLOSE_SECONDS", 0.1)
    manager = managed(group)
    stream = RolloutStream(manager, prompts, SampleBuffer(B))
    try:
        assert hangs.wait(10)
        with pytest.raises(WeightSyncError, match="has not returned"), stream.updating(0.1):
            raise AssertionError("the update began")
        stream.close()
        assert manager.stream is None
    finally:
        goes_on.set()
    stream._thread.join(10)
    assert not stream._thread.is_alive()


@pytest.mark.timeout(40)
def test_update_is_given_up_in_time_while_requests_run(group):
    manager = managed(group, LONG)
    with streaming(manager) as stream:
        update(stream, manager, 1)
        group.set_delay([0.02, 0.02])  # a group takes more than a second
        wait_until(lambda: any(worker.running for worker in group.execute_all_sync("load_of_engine")))
        with (
            pytest.raises(WeightSyncError, match=r"within 0.4 s.*requests that are running .*update_mode='interrupt'"),
            stream.updating(0.4),
        ):
            raise AssertionError("the update began")
        assert group_numbers(stream.take(30)["group_ids"])[::SAMPLES].tolist() == list(range(B))


def test_slow_worker_gets_fewer_groups(group):
    manager = managed(group, LONG)
    group.set_delay([0.0005, 0.01])
    with streaming(manager, requests_per_worker=SAMPLES, max_staleness=4) as stream:
        update(stream, manager, 1)
        for _ in range(3):
            stream.take(30)
        fast, slow = group.counted()
        assert slow >= 1 and fast > 2 * slow


def test_groups_that_become_too_old_are_aborted_and_begin_again(group):
    manager = managed(group, LONG)
    group.set_delay([0.0002, 0.015])  # the slow worker needs a second for a group
    options = {"max_staleness": 1, "order": "window", "on_stale": "drop", "mode": "interrupt"}
    with streaming(manager, requests_per_worker=SAMPLES, **options) as stream:
        found = []
        for version in range(1, 6):
            update(stream, manager, version)
            data = stream.take(30)
            check_log_probs(data)
            assert data["min_weight_versions"].min() >= version - 1
            found += group_numbers(data["group_ids"])[::SAMPLES].tolist()
        assert stream.metrics()["buffer/dropped"] >= 1
    assert len(set(found)) == len(found) == 5 * B


def test_equal_workers_get_equally_many_groups(group):
    manager = managed(group, LONG)
    with streaming(manager) as stream:
        update(stream, manager, 1)
        stream.take(30)
        assert group.counted() == [B // 2, B // 2]


def test_groups_begin_without_a_look_at_all_workers_for_each(group, monkeypatch):
    """With thousands of both, the router would do nothing else. The workers with the fewest requests get them."""
    manager, buffer, looked, has_room = managed(group), SampleBuffer(B, max_staleness=1), [], Router._has_room
    router = Router(manager, prompts, buffer, dynamic_sampling=False, requests_per_worker=2 * SAMPLES)
    buffer.set_version(0)
    report = replace(router.exchange()[0], weight_version=0)
    router._workers = [_Worker(number, report) for number in range(100)]
    monkeypatch.setattr(Router, "_has_room", lambda self, worker: looked.append(worker) or has_room(self, worker))
    router.begin_groups()
    assert [len(worker.running) for worker in router._workers] == [1] * 2 * B + [0] * (100 - 2 * B)
    assert len(looked) == 100 + 2 * B


def test_groups_without_variance_are_replaced(group):
    def same_for_even_prompts(prompt_ids, completion_ids, label):
        return float(label % 2 and len(completion_ids) + completion_ids[0] / 100)

    manager = managed(group, function=same_for_even_prompts)
    with streaming(manager, with_labels, dynamic_sampling=True, max_staleness=1) as stream:
        found = []
        for version in range(1, 4):
            update(stream, manager, version)
            found += group_numbers(stream.take(30)["group_ids"])[::SAMPLES].tolist()
        assert stream.metrics()["buffer/filtered"] >= 3 * B - 1
    assert found == sorted(found) and all(number % 2 for number in found)


class NoCopy(Exception):
    def __init__(self, what, of):
        super().__init__(f"{what} {of}")


def fails(error):
    raise error


@pytest.mark.parametrize(
    ("source", "function", "kind", "message"),
    [
        (lambda rollout_id: [*prompts(rollout_id)[1:], [99]], reward, PromptError, "prompt 3 has token ids from 99"),
        (lambda rollout_id: [[], *prompts(rollout_id)[1:]], reward, PromptError, "prompt 0 is empty"),
        (lambda rollout_id: [[3]], reward, ValueError, r"prompts\(0\) returned 1 prompts; expected 4"),
        (lambda rollout_id: 1 / 0, reward, ZeroDivisionError, "division"),
        (lambda rollout_id: fails(NoCopy("no", "prompts")), reward, RolloutError, "has ended: .*NoCopy: no prompts"),
        (lambda rollout_id: fails(TimeoutError("no disk")), reward, RolloutError, "has ended: TimeoutError: no disk"),
        (prompts, lambda prompt, completion: None, RewardError, "returned None"),
        (prompts, lambda prompt, completion: 1 / 0, RewardError, "raised ZeroDivisionError"),
        (with_labels, lambda prompt, completion, label: 1 / (label - 2), RewardError, "zero for prompt 2, sample 0, a"),
        (with_labels, lambda prompt, completion, level: level, RewardError, "column 'level', but extras has 'label'"),
        # The next call would return the batch after it.
        (with_labels, lambda prompt, made, label: {f"{label % 2 * (label < B)}": 1.0}, ValueError, "row 0 lack '1'"),
    ],
)
def test_errors_end_the_stream_and_reach_the_trainer(group, source, function, kind, message):
    manager = managed(group, function=function)
    with streaming(manager, source) as stream:
        update(stream, manager, 1)
        for _ in range(2):
            with pytest.raises(kind, match=message) as caught:
                stream.take(30)
            assert not isinstance(caught.value, TimeoutError)  # after which `take` may be called again
            assert getattr(caught.value, "row", None) is None  # a group may be any rows of its batch
        update(stream, manager, 2)  # does not wait for a stream that has ended


def test_error_ends_what_is_being_generated(monkeypatch):
    with LocalWorkerGroup(2, made(0.01), threads=True) as group:
        manager = managed(group, SamplingParams(400))
        with streaming(manager) as stream:
            exchange = stream._router.exchange

            def fails_while_they_run(**options):
                reports = exchange(**options)
                if all(one.running for one in group.execute_all_sync("load_of_engine")):
                    fails(OSError("no disk"))
                return reports

            monkeypatch.setattr(stream._router, "exchange", fails_while_they_run)
            update(stream, manager, 1)
            with pytest.raises(OSError, match="no disk") as caught:
                stream.take(30)
            assert caught.traceback[-1].name == "fails"  # where it was raised, in another thread
            wait_until(lambda: [one.running for one in group.execute_all_sync("load_of_engine")] == [0, 0], 2)


def test_batch_that_was_interrupted_ends_the_stream(group, monkeypatch):
    manager = managed(group)
    with streaming(manager, max_staleness=1) as stream:
        update(stream, manager, 1)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(manager, "batch_of", lambda *groups: fails(KeyboardInterrupt()))
            stream.take(30)
        with pytest.raises(KeyboardInterrupt):
            stream.take(30)


def test_engine_that_fails_ends_the_stream(group):
    manager = managed(group, SamplingParams(400))
    with streaming(manager) as stream:
        update(stream, manager, 1)
        time.sleep(0.05)
        group.load(None, 1)
        with pytest.raises(RolloutError, match="the logits are not finite"):
            stream.take(30)


def test_it_leaves_no_thread_and_no_request(group):
    before = set(threading.enumerate())
    manager = managed(group, SamplingParams(400))
    with streaming(manager) as stream:
        update(stream, manager, 1)
        with pytest.raises(TimeoutError, match="batch 0 is not complete; groups: "):
            stream.take(0.1)
        with pytest.raises(ValueError, match="the manager has a stream"):
            RolloutStream(manager, prompts, SampleBuffer(B))
    with pytest.raises(RolloutError, match="the stream was closed"):
        stream.take()
    stream.close()
    assert [worker.running for worker in group.execute_all_sync("load_of_engine")] == [0, 0]
    manager.close()
    left = {thread for thread in threading.enumerate() if thread.name != "engine"} - before
    assert not left
    assert manager.stream is None and pickle.loads(pickle.dumps(stream.buffer.metrics()))
    with streaming(manager) as again:
        assert manager.stream is again


@pytest.mark.timeout(40)
def test_stream_that_is_closed_just_before_it_waits_for_the_end_of_an_update_ends(group):
    with streaming(managed(group)) as stream, stream.updating():
        stream.close()  # what its thread does now, this one does
        stream._step()


def test_wrong_arguments_are_refused(group):
    manager = managed(group)
    for options, message in (
        ({"update_mode": "stop"}, "update_mode='stop'; expected 'wait' or 'interrupt'"),
        ({"requests_per_worker": 0}, "requests_per_worker=0: expected an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RolloutStream(manager, prompts, SampleBuffer(B), **options)
    with pytest.raises(ValueError, match="needs a reward function and samples_per_prompt > 1"):
        RolloutStream(managed(group, function=None), prompts, SampleBuffer(B), dynamic_sampling=True)
    with pytest.raises(TypeError, match="expected a RolloutManager of this process"):
        RolloutStream(group, prompts, SampleBuffer(B))
    assert manager.stream is None


def test_saved_state_goes_on_where_it_was(group):
    how = replace(LONG, max_new_tokens=30)
    manager = managed(group, how)
    found = []
    with streaming(manager, max_staleness=2, mode="interrupt", requests_per_worker=2 * SAMPLES) as stream:
        for version in (1, 2, 3):
            update(stream, manager, version)
            before = stream.take(30)["group_ids"]
            found += group_numbers(before)[::SAMPLES].tolist()
        state = pickle.loads(pickle.dumps(stream.state_dict()))
        stream.take(30)  # trained by the run that dies, and lost with it
    again = managed(group, how)
    with streaming(again, max_staleness=2) as stream:
        stream.load_state_dict(state)
        for version in (4, 5, 6):
            update(stream, again, version)
            data = stream.take(30)
            check_log_probs(data)
            found += group_numbers(data["group_ids"])[::SAMPLES].tolist()
            assert data["group_ids"].unique().numel() == B
            assert (
                not (data["group_ids"] - group_numbers(data["group_ids"]))
                .eq(before[0] - group_numbers(before[0]))
                .any()
            )
    assert found == list(range(6 * B))


def test_completions_that_wait_for_their_rewards_are_saved(group):
    judged = threading.Event()

    async def judge(prompt_ids, completion_ids):
        await asyncio.to_thread(judged.wait, 30)
        return reward(prompt_ids, completion_ids)

    manager = managed(group, function=judge)
    with streaming(manager) as stream:
        update(stream, manager, 1)
        wait_until(lambda: stream._router.completed == B)
        saved = [of for _, _, of, _ in stream.state_dict()["groups"].values()]
        judged.set()
        lengths = stream.take(30)["completion_lengths"].tolist()
    assert [len(one.token_ids) for of in saved for one in of.completions] == lengths


def test_no_worker_with_the_version_is_an_error_or_a_refresh(group):
    manager = managed(group)
    with streaming(manager, max_staleness=1) as stream:
        with pytest.raises(ValueError, match="before the first"):
            stream.take(1)
        update(stream, manager, 1)
        stream.take(30)
        group.restart()
        with pytest.raises(WeightVersionError, match=r"needs weight version 1, but no worker has it: \{0: 0, 1: 0\}"):
            while True:
                stream.take(30)
        manager.refresh = lambda: update(stream, manager, manager.weight_version + 1)
        assert len(stream.take(30)["group_ids"]) == B * SAMPLES


def test_refresh_that_does_not_help_is_an_error_also_behind_a_timeout(group):
    manager, calls = managed(group), []
    with streaming(manager) as stream:
        update(stream, manager, 1)
        stream.take(30)
        group.restart()
        manager.refresh = lambda: (calls.append(1), time.sleep(0.2))
        with pytest.raises(WeightVersionError, match="no worker has it"):
            while len(calls) < 5:
                with contextlib.suppress(TimeoutError):
                    stream.take(0.1)


@pytest.mark.parametrize("lost", [False, True], ids=["workers", "servers"])
def test_group_that_three_workers_or_their_servers_died_of_is_an_error(group, lost):
    """Also if it comes back from another worker in between, which has refused it. Servers that die with the same
    weights count once: somebody may have stopped all of them."""
    manager, buffer = managed(group), SampleBuffer(B)
    router = Router(manager, prompts, buffer, dynamic_sampling=False, requests_per_worker=B * SAMPLES)
    buffer.set_version(0)
    router.exchange()

    def begun():
        router.begin_groups()
        return next((one, of) for one in router._workers for of in one.running if of.number == 0)

    def come_back():
        worker, attempt = begun()
        back = FinishedGroup(attempt, [Completion([], [], "abort", [])] * SAMPLES, lost=lost)
        left = [of for of in worker.running if of != attempt]
        router._handle(worker, replace(worker.report, finished=[back], running=left))

    for losses in range(1, 4):
        buffer.set_version(losses)
        for worker in router._workers:
            worker.report = replace(worker.report, weight_version=losses)
        with pytest.raises(RolloutError, match="to 3 workers that died") if losses == 3 else contextlib.nullcontext():
            if not lost:
                worker, attempt = begun()
                router._give_back_lost(worker.running.pop(attempt))
            for _ in range(3):
                come_back()


def test_weights_that_are_sent_again_drop_nothing(group):
    refreshed = threading.Event()

    async def reward_of_the_last(prompt_ids, completion_ids, label):
        while label == B - 1 and not refreshed.is_set():
            await asyncio.sleep(0.01)
        return 1.0

    manager = managed(group, function=reward_of_the_last)
    with streaming(manager, with_labels) as stream:
        update(stream, manager, 1)
        wait_until(lambda: stream.buffer.metrics()["buffer/ready"] == B - 1, 30)
        group.restart()
        manager.refresh = lambda: (refreshed.set(), update(stream, manager, manager.weight_version + 1))
        stream.take(30)
        assert not stream.metrics()["buffer/dropped"]
        update(stream, manager, 7)  # after a batch, the weights are new
        assert manager.weight_version == stream.buffer.version == 7 and stream.buffer.staleness(1) == 1


def test_reports_of_before_an_update_say_nothing_about_its_version(group):
    manager = managed(group)
    with streaming(manager, mode="interrupt") as stream:
        update(stream, manager, 1)
        stream.take(30)
        stream.close()  # what its thread does now, this one does
        stream._look([Report(0, None, EngineLoad(0, 0), [], [])], updating=True)
        assert stream._stuck is None


def test_worker_whose_server_has_kept_the_weights_goes_on_with_them(servers_group):
    """And one whose server was restarted too waits for the next update."""
    manager = managed(servers_group)
    with streaming(manager, update_interval=100, requests_per_worker=2 * B * SAMPLES) as stream:
        update(stream, manager, 1)
        stream.take(30)
        urls = servers_group.execute_with_func_generator(lambda worker: worker.engine.url)
        for server in servers_group.servers:
            server.version = "default" if server.url == urls[0] else server.version
        for rank, url in enumerate(urls):
            URLS.put(url)
            servers_group.restart(ranks=[rank])
        while servers_group.counted()[1] < 3:
            check_log_probs(stream.take(30))
        assert servers_group.version_of_weights() == [0, 1]


@pytest.mark.timeout(60)
def test_groups_go_on_elsewhere_if_their_server_was_restarted(servers_group, monkeypatch, caplog):
    """It gets weights with the next update."""
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    manager = managed(servers_group)
    with streaming(manager, update_interval=2, requests_per_worker=SAMPLES) as stream:
        found = []
        for version in (1, 2):
            update(stream, manager, version)
            assert servers_group.version_of_weights() == [version] * 2
            data = stream.take(30)
            found.append(data)
            servers_group.servers[0].version = "default"
            found.append(stream.take(30))
        for data in found:
            check_log_probs(data)
        groups = [number for data in found for number in group_numbers(data["group_ids"])[::SAMPLES].tolist()]
        assert groups == list(range(4 * B))
    assert "has weights 'default' instead of" in caplog.text


@pytest.mark.timeout(60)
def test_groups_go_on_if_servers_are_restarted_under_them(processes, tmp_path, monkeypatch, caplog):
    """On the other worker. If its server is gone, too, an update is asked for, and waits until the servers are back."""
    found = []

    def busy(which):
        loads = zip(urls, group.load_of_engine(), strict=True)
        return dict(loads)[processes[which].url].running > 0

    def take():
        data = stream.take(30)
        check_log_probs(data)
        found.extend(group_numbers(data["group_ids"])[::SAMPLES].tolist())

    def refresh():
        def supervise():
            wait_until(lambda: caplog.text.count("The update waits for it, for at most 300 s") == 2, 20)
            for which in range(2):
                start_again(processes, which)

        monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.1)  # how often the update looks for the servers
        supervisor = threading.Thread(target=supervise)
        supervisor.start()
        update(stream, manager, 2)
        supervisor.join()

    with group_of_servers([process.url for process in processes], tmp_path) as group:
        urls = group.execute_with_func_generator(lambda worker: worker.engine.url)  # by rank; any has any server
        manager = managed(group, how=replace(LONG, max_new_tokens=120))
        with streaming(manager, max_staleness=4, mode="interrupt", requests_per_worker=SAMPLES) as stream:
            update(stream, manager, 1)
            wait_until(lambda: busy(0) and busy(1), 20)
            kill(processes[0])
            take()
            wait_until(lambda: busy(1), 20)
            kill(processes[1])
            manager.refresh = refresh
            while manager.weight_version != 2:  # at first, perhaps, batches that were complete
                take()
            assert group.version_of_weights() == [2, 2]
    assert found == list(range(len(found)))


@pytest.mark.timeout(60)
def test_weights_that_are_lost_twice_are_asked_for_twice(servers_group, monkeypatch):
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    servers, lost = servers_group.servers, []

    def reward_and_lose(prompt_ids, completion_ids, label=0):
        if len(lost) < 2 and all(server.version != "default" for server in servers):
            lost.append(prompt_ids)
            for server in servers:
                server.version = "default"
        return 1.0

    manager = managed(servers_group, how=replace(LONG, max_new_tokens=12), function=reward_and_lose)
    # One worker is still in the middle of a group, between two samples, when the other one finishes one.
    servers_group.execute_with_func_generator(lambda worker: setattr(worker.engine, "max_running", 1))
    servers[0].delay = 0.02
    with streaming(manager, requests_per_worker=SAMPLES) as stream:
        update(stream, manager, 1)
        manager.refresh = lambda: update(stream, manager, manager.weight_version + 1)
        check_log_probs(stream.take(30))
        assert len(lost) == 2 and manager.weight_version == 3


def test_rollout_asks_for_weights_that_a_server_has_lost(servers_group, monkeypatch):
    monkeypatch.setattr(http_engine, "ASK_SECONDS", 0.0)
    manager = managed(servers_group)

    def refresh():
        manager.weight_version = (manager.weight_version or 0) + 1
        servers_group.load(manager.weight_version, manager.weight_version)

    refresh()
    check_log_probs(manager.generate(prompts(0)))
    servers_group.servers[0].version = "default"
    with pytest.raises(WeightVersionError, match=r"needs weight version 1, but rank \d has none"):
        manager.generate(prompts(1), rollout_id=1)
    assert {*WeightSender("store", servers_group).versions()} == {1, None}
    manager.refresh = refresh
    data = manager.generate(prompts(1), rollout_id=1)
    check_log_probs(data)
    assert manager.weight_version == 2 and set(data["weight_versions"].unique().tolist()) <= {-1, 2}


def test_update_in_which_a_worker_dies_is_repeated(ray_cluster, tmp_path):
    """One of two workers is killed between two tensors of an update. The other one's groups go on, and its
    replacement gets the weights from it."""
    flag = tmp_path / "die"
    with (
        RayResourcePool([3], use_gpu=ON_DEVICE) as pool,
        RayTrainGroup({"train_backend": "fsdp"}, 1, 1, pool[:1], actor_cls=BigramTrainer) as trainer,
        RayWorkerGroup(pool[1:], made(0.001), collectives=False, worker_env={"DIE_IN_UPDATE": str(flag)}) as group,
    ):
        ray.get(trainer.async_init())
        manager = managed(group)
        trainer.set_rollout_manager(manager)
        with streaming(manager, max_staleness=1, mode="interrupt") as stream:
            found = []
            for version in range(1, 5):
                if version == 3:
                    flag.touch()
                assert trainer.update_weights() == version
                assert not flag.exists()
                data = stream.take(60)
                check_log_probs(data)
                found += group_numbers(data["group_ids"])[::SAMPLES].tolist()
            assert found == list(range(4 * B))
            assert stream.metrics()["rollout/restarts"] == 1
            # Its replacement may still be starting.
            wait_until(lambda: group.execute_all_sync("version_of_weights") == [4, 4], 60)
