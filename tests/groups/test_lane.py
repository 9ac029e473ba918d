"""Groups with a lane: who may connect, what a lost connection costs, and that calls mean the same as without a lane.

The other files of this folder test groups with a lane too. Here is what they have no reason to look at.
"""

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from group_workers import Actor, Critic
from interrupted_waits import Interrupts
from lane_workers import OnLane
from replace_workers import Lone
from test_failure import in_fork, wait_until, within
from test_lane_connections import Dialing, closed, header
from test_random_calls import needs_lane, on_lane_and_without

from single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResultLostError,
    WorkerDiedError,
    WorkerError,
    attach,
    colocate,
)
from single_controller.ray.lane import Lane, lane_enabled

pytestmark = [pytest.mark.timeout(90), needs_lane]


@pytest.fixture(scope="module")
def slots(ray_cluster):
    """lane -> two slots for groups."""
    with RayResourcePool([2], use_gpu=False) as one, RayResourcePool([2], use_gpu=False) as other:
        yield {True: one, False: other}


@pytest.fixture(scope="module")
def groups(slots):
    """lane -> a group of two ranks."""
    with (
        RayWorkerGroup(slots[True], RayClassWithInitArgs(OnLane), name_prefix="on_lane_") as with_lane,
        RayWorkerGroup(slots[False], RayClassWithInitArgs(OnLane), lane=False) as without,
    ):
        yield {True: with_lane, False: without}


@pytest.fixture
def group(groups, request):
    """A group that takes calls, all of whose ranks are on the lane, if it has one."""
    lane = request.node.callspec.params.get("lane", True) if hasattr(request.node, "callspec") else True
    group = groups[lane]
    if group.broken is not None or not all(connections(group)):
        group.restart()
    return group


def connections(group):
    return [peer.connection for peer in group._engine.peers]


def on_lane(group, call):
    """What a call returns, and how many ranks it reached on the lane."""
    before = [peer.sent for peer in group._engine.peers]
    value = call()
    return value, sum(peer.sent - sent for peer, sent in zip(group._engine.peers, before, strict=True))


def cut(group, rank):
    """Cut a connection, as a firewall does that has forgotten it. Both processes live on."""
    connections(group)[rank].sock.shutdown(socket.SHUT_RDWR)


class TestStrangers:
    def test_group_that_strangers_connect_to_while_it_starts(self, slots, groups, monkeypatch, caplog):
        """They are there before the ranks, which take a while to construct."""
        listening, strangers, dialing = Lane.listening, [], []

        @contextlib.contextmanager
        def with_strangers(lane, address):
            with listening(lane, address) as where:
                assert where.address == "127.0.0.1"
                strangers.extend(socket.create_connection(where[:2]) for _ in range(205))
                for stranger, sent in zip(
                    strangers,
                    [
                        b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n",
                        header(2**32 - 1, 0) + b"x" * 1000,
                        os.urandom(50),
                        header(64, 0) + b"half",
                    ],
                    strict=False,
                ):
                    stranger.sendall(sent)
                dialing.append(Dialing(where, b"k" * 16, token=b"wrong" + bytes(27)))
                dialing.append(Dialing(where, b"k" * 16))
                yield where

        monkeypatch.setattr(Lane, "listening", with_strangers)
        made = RayClassWithInitArgs(OnLane, seconds=0.3)
        with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, made) as group:
            assert on_lane(group, lambda: group.ping()) == ([0, 1], 2)
            assert all(map(closed, strangers)) and all(closed(one.connection.sock) for one in dialing)
            assert on_lane(group, lambda: group.ping()) == ([0, 1], 2)
        told = [message for message in caplog.messages if "refused" in message]
        assert len(told) == 1 and "bytes were announced" in told[0] and len(told[0]) < 600
        assert not [message for message in caplog.messages if "did not connect" in message]
        for stranger in strangers:
            stranger.close()

    def test_nobody_listens_once_the_group_has_started(self, group):
        """Neither does a rank listen for the lane."""
        local = connections(group)[0].sock.getsockname()
        with socket.socket() as sock:
            assert sock.connect_ex(local) != 0

    def test_ranks_that_cannot_reach_the_driver(self, slots, groups, monkeypatch, caplog):
        """The driver is told once, and calls go through Ray."""
        listening = Lane.listening

        @contextlib.contextmanager
        def elsewhere(lane, address):
            with listening(lane, address) as where, socket.create_server(("127.0.0.1", 0)) as stranger:
                yield where._replace(port=stranger.getsockname()[1])

        monkeypatch.setattr(Lane, "listening", elsewhere)
        monkeypatch.setattr("single_controller.ray.lane.ACCEPT_SECONDS", 0.2)
        monkeypatch.setattr(Lane.accept, "__defaults__", (0.2,))
        made = RayClassWithInitArgs(OnLane)
        with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, made) as group:
            assert [group.count() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
            assert connections(group) == [None, None]
        assert caplog.text.count("2 of 2 ranks did not connect to the driver") == 1

    @pytest.mark.parametrize(
        ("sent", "reason"),
        [
            (header(2**20 + 1, 1), "1,048,577 bytes were announced"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "bytes were announced"),
            (header(2, 10**6) + b"ok", "a reply has come to call 1000000, which was not sent"),
        ],
        ids=["too-large", "garbage", "unknown-call"],
    )
    def test_rank_that_sends_something_else_than_replies(self, group, sent, reason):
        before = group.count()
        with within(5):
            with pytest.raises(ResultLostError, match=r"send_as_if_it_were_a_reply\(\) on rank 0") as caught:
                group.send_as_if_it_were_a_reply(sent)
        assert reason in str(caught.value) and "The rank is alive" in str(caught.value)
        assert connections(group)[0] is None and connections(group)[1] is not None
        assert on_lane(group, group.count) == ([calls + 1 for calls in before], 0)
        assert group.broken is None and group.alive() == [True, True]


class TestLostConnections:
    def test_while_a_call_waits(self, group):
        before = group.count()[0]
        threading.Timer(0.3, cut, (group, 1)).start()
        with within(5):
            with pytest.raises(ResultLostError, match=r"count\(\) on rank 1 .*may have run") as caught:
                group.count(seconds=0.8)
        assert (caught.value.rank, caught.value.method) == (1, "count")
        assert "connection for small calls was lost" in str(caught.value)
        # Calls go on through Ray, behind the one whose result was lost.
        assert on_lane(group, group.count) == ([before + 2] * 2, 0)
        assert group.count.remote().result() == [before + 3] * 2 and group.broken is None

    def test_while_no_call_waits(self, group):
        """The next call finds it before it is sent, and goes through Ray."""
        before = group.count()[0]
        cut(group, 0)
        assert on_lane(group, group.count) == ([before + 1, before + 1], 0)
        assert on_lane(group, group.count) == ([before + 2, before + 2], 0)
        assert [bool(connection) for connection in connections(group)] == [False, True] and group.broken is None

    def test_calls_of_other_threads_on_the_other_ranks_succeed(self, group):
        group.ping()
        threading.Timer(0.2, cut, (group, 1)).start()
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(group.sleep, 0.5) for _ in range(4)]
            with within(10):
                errors = [call.exception() for call in calls]
        assert any(isinstance(error, ResultLostError) for error in errors)
        assert all(error is None or (isinstance(error, ResultLostError) and error.rank == 1) for error in errors)
        assert group.ping() == [0, 1] and group.broken is None

    def test_order_with_calls_that_were_given_up(self, group):
        """Two calls were told lost before the rank had begun them. They must not run after later ones."""
        begun = group.count()[0]
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(group.count, 0.4)]
            time.sleep(0.1)
            calls += [pool.submit(group.count) for _ in range(2)]
            time.sleep(0.1)
            cut(group, 0)
            assert all(isinstance(call.exception(), ResultLostError) for call in calls)
        first = group.count()
        time.sleep(0.2)
        assert group.count() == [calls + 1 for calls in first]
        assert first[1] == begun + 4 and first[0] in (begun + 2, begun + 3, begun + 4)

    def test_restart_opens_them_again(self, group):
        cut(group, 0)
        assert on_lane(group, group.ping) == ([0, 1], 0)
        group.restart()
        assert on_lane(group, group.ping) == ([0, 1], 2)

    def test_replacing_shrinking_and_growing(self, groups):
        """A rank that stays keeps its connection, or opens another one if it was lost."""
        made = RayClassWithInitArgs(OnLane)
        with RayResourcePool([3], use_gpu=False) as pool, RayWorkerGroup(pool, made, standby=1) as group:
            first = connections(group)[0]
            assert on_lane(group, group.count) == ([1, 1], 2)
            with pytest.raises(WorkerDiedError), within(5):
                group.end(1, "kill -9", others_wait=0)
            assert group.replace() == (1,)
            assert on_lane(group, group.count) == ([2, 1], 2) and connections(group)[0] is first
            cut(group, 0)
            assert on_lane(group, group.count) == ([3, 2], 0)
            with pytest.raises(WorkerDiedError), within(5):
                group.end(1, "kill -9", others_wait=0)
            assert group.shrink() == (1,)
            assert on_lane(group, group.count) == ([4], 1)
            assert group.grow(1)
            assert on_lane(group, group.count) == ([5, 1], 2)


class TestSameSemantics:
    @on_lane_and_without
    def test_results_of_all_kinds(self, group, lane):
        assert group.large(7) == [bytes([7, rank]) * 2**19 for rank in range(2)]
        refs = group.reference()
        assert ray.get([one["ref"] for one in refs], timeout=30) == [("stored", 0), ("stored", 1)]
        with pytest.raises(WorkerError, match=r"unpicklable\(\).*lock") as caught:
            group.unpicklable()
        assert caught.value.cause_type == "TypeError"
        assert group.echo(None) == [None] * 2 and group.echo(b"") == [b""] * 2

    @on_lane_and_without
    @pytest.mark.parametrize("nbytes", [10_000, 3_000_000])
    def test_errors_of_all_sizes(self, group, lane, nbytes):
        with pytest.raises(WorkerError) as caught:
            group.raise_large(nbytes)
        cause = caught.value.__cause__
        assert isinstance(cause, ValueError) and len(cause.args[1]) == nbytes
        assert len(str(caught.value)) < 200_000 and group.ping() == [0, 1]

    @on_lane_and_without
    @pytest.mark.parametrize("size", [4, 100_000])
    def test_result_that_the_next_call_changes(self, group, lane, size):
        group.increment(1)
        first, second = group.increment(size), group.increment(size)
        assert all(torch.equal(tensor, torch.ones(size)) for tensor in first)
        assert all(torch.equal(tensor, torch.full((size,), 2.0)) for tensor in second)

    def test_large_results_of_several_threads(self, group):
        """Each is kept by its rank until the driver fetches it. Meanwhile the rank runs other calls."""
        group._engine._large.clear()
        with ThreadPoolExecutor(6) as pool:
            large = [pool.submit(group.large, key, 200_000) for key in range(12)]
            small = [pool.submit(group.echo, key) for key in range(50)]
            assert [call.result() for call in small] == [[key, key] for key in range(50)]
            wanted = [[bytes([key, rank]) * 100_000 for rank in range(2)] for key in range(12)]
            assert [call.result() for call in large] == wanted

    @on_lane_and_without
    def test_sixteen_threads(self, group, lane):
        def run(name):
            return [group.echo([name, number]) for number in range(20)]

        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(run, range(16)))
        assert results == [[[[name, number]] * 2 for number in range(20)] for name in range(16)]

    @on_lane_and_without
    def test_interrupted_call_is_not_lost_and_keeps_its_place(self, group, lane):
        before = group.count()[0]
        interrupts = Interrupts()
        try:
            with interrupts.after(0.2), within(0.8), pytest.raises(KeyboardInterrupt):
                group.count(seconds=1.0)
        finally:
            interrupts.close()
        assert group.count() == [before + 2] * 2

    @pytest.mark.parametrize("how", ["kill -9", "sys.exit(3)", "sys.exit(0)", "exit_actor"])
    def test_ends_of_processes_are_told_alike(self, groups, how):
        told = {}
        for lane, group in groups.items():
            if group.broken is not None or (lane and not all(connections(group))):
                group.restart()
            group.ping()
            with within(5), pytest.raises(WorkerDiedError, match=r"rank 1 died during end\(\)") as caught:
                group.end(1, how)
            told[lane] = re.sub(r"[0-9a-f]{8,}|\d+", "N", str(caught.value))
            assert caught.value.ranks == (1,)
        # Ray's own words for exit_actor() depend on who tells them first.
        assert told[True] == told[False] or (how == "exit_actor" and all("exit" in text for text in told.values()))

    @on_lane_and_without
    def test_death_of_a_rank_that_has_forked(self, group, lane):
        """The child has copies of Ray's sockets, so Ray notices when that has ended too. It has none of the lane's."""
        pids = group.pid()
        group.fork(seconds=2)
        assert group.ping() == [0, 1]
        with within(5), pytest.raises(WorkerDiedError, match="rank 1"):
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(group.sleep, 30)
                time.sleep(0.2)
                os.kill(pids[1], signal.SIGKILL)
                wait_until(lambda: not lane or connections(group)[1] is None, 1)
                call.result()

    def test_fork_of_the_driver_has_no_connection(self, group):
        group.ping()
        text = in_fork(lambda: str([connection.sock.fileno() for connection in connections(group)]))
        assert text == "[-1, -1]"
        assert on_lane(group, group.ping) == ([0, 1], 2)

    def test_copies_of_the_group_do_without(self, group):
        @ray.remote(num_cpus=0)
        def use(copy):
            return copy.count(), copy._engine.lane is None, copy.large(1, 200_000)

        before = group.count()[0]
        counted, without, large = ray.get(use.remote(group))
        assert counted == [before + 1] * 2 and without and [len(part) for part in large] == [200_000] * 2
        assert on_lane(group, group.count) == ([before + 2] * 2, 2)
        with attach("on_lane_OnLane") as attached:
            assert attached.count() == [before + 3] * 2 and attached._engine.lane is None
        assert on_lane(pickle.loads(pickle.dumps(group)), lambda: group.count()) == ([before + 4] * 2, 0)

    def test_group_that_was_taken_over_has_one_after_a_restart(self, groups):
        with RayResourcePool([1], use_gpu=False, detached=True, name_prefix="lane_taken_") as pool:
            first = RayWorkerGroup(pool, RayClassWithInitArgs(Lone), detached=True, name_prefix="lane_taken_")
            assert on_lane(first, lambda: first.add(1)) == ([1], 1)
            with attach("lane_taken_Lone", own=True) as group:
                assert on_lane(group, lambda: group.add(1)) == ([2], 0)
                group.restart()
                assert on_lane(group, lambda: group.add(1)) == ([1], 1)

    def test_roles(self, slots, groups):
        both = colocate({"actor": RayClassWithInitArgs(Actor, 1), "critic": RayClassWithInitArgs(Critic, 100)})
        with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, both) as group:
            assert on_lane(group, lambda: group.actor.add(1)) == ([2, 2], 2)
            assert on_lane(group, lambda: group.critic.add(1)) == ([101, 101], 2)
            assert on_lane(group, group.critic.take) == ([(2, True, "Actor")] * 2, 2)
            with pytest.raises(WorkerError, match=r"critic.fail\(\) raised ValueError .*the cause in Critic"):
                group.critic.fail()

    @on_lane_and_without
    def test_statistics_and_trace(self, group, lane, tmp_path):
        group.record_ranks()
        before = group.stats().methods["echo"].calls if "echo" in group.stats().methods else 0
        group.echo(b"x" * 5000)
        with pytest.raises(WorkerError):
            group.fail([1])
        echo, failed = group.stats().calls[-2:]
        assert group.stats().methods["echo"].calls == before + 1
        assert (echo.method, echo.failed, failed.method, failed.failed) == ("echo", None, "fail", "WorkerError")
        for rank in echo.ranks.values():
            assert 5000 <= rank.sent < 6000 and 5000 <= rank.returned < 6000
            received, began, ended, packed = rank.clock
            assert echo.begun <= received <= began <= ended <= packed <= rank.arrived
        group.trace(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert len({event["tid"] for event in events if "echo" in event.get("name", "")}) >= 3 or events
        group.record_ranks(0)


@pytest.mark.parametrize(
    ("name", "value", "enabled"),
    [
        ("SINGLE_CONTROLLER_LANE", "0", False),
        ("SINGLE_CONTROLLER_LANE", "1", True),
        ("RAY_USE_TLS", "1", False),
        ("RAY_USE_TLS", "0", True),
    ],
)
def test_environment_that_switches_the_lane_off(monkeypatch, name, value, enabled):
    monkeypatch.setenv(name, value)
    assert lane_enabled() is enabled


def test_group_made_while_the_environment_switches_it_off(slots, monkeypatch):
    monkeypatch.setenv("SINGLE_CONTROLLER_LANE", "0")
    with (
        RayResourcePool([1], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Lone), lane=True) as group,
    ):
        assert group.add(1) == [1] and group._engine.lane is None


def test_other_process_is_served_while_threads_of_the_driver_keep_calling(group):
    """Its calls come through Ray."""
    over = threading.Event()

    def keep_calling():
        while not over.is_set():
            group.count(0.02)

    with ThreadPoolExecutor(8) as threads:
        calling = [threads.submit(keep_calling) for _ in range(8)]
        try:
            time.sleep(0.3)
            actor = ray.get_actor(group.worker_names[0])  # as in another process: the group does not know of this call
            with within(3):
                for value in range(5):
                    assert ray.get(actor.echo.remote(value), timeout=10) == value
        finally:
            over.set()
        for one in calling:
            one.result()
