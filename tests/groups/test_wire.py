"""Groups on the wire: what a lost connection costs, and what processes and threads see of each other's calls."""

import gc
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from waits import in_fork, repeated, wait_until, within
from wire_workers import Wired

from single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerDiedError,
    WorkerError,
    attach,
)

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def slots(ray_cluster):
    with RayResourcePool([2], use_gpu=False, detached=True, name_prefix="wired_") as pool:
        yield pool


@pytest.fixture(scope="module")
def wired(slots):
    with RayWorkerGroup(slots, RayClassWithInitArgs(Wired), name_prefix="wired_", detached=True) as group:
        yield group


@pytest.fixture
def group(wired):
    if wired.broken is not None:
        wired.restart()
    return wired


def connections(group):
    return [link._connection for link in group._transport._links]


class TestLostConnections:
    def test_cost_no_result(self, group):
        """They are reset at both ends, while calls, futures, large results and large arguments are on their way."""
        cutting = group.cut.options(blocking=False)(times=1)
        before = group.count()[0]
        assert cutting.result() == ["done"] * 2
        futures = []

        def cut():
            for one in connections(group):
                if one is not None:
                    one._shut()

        with repeated(cut, pause=0.01):
            for number in range(40):
                futures.append(group.count.options(blocking=False)())
                assert group.echo(number) == [number] * 2
                if number % 8 == 0:
                    assert group.large(number) == [bytes([number, rank]) * 2**20 for rank in range(2)]
                    for size in (200_000, 120_000):  # stored, and the largest frames
                        sent = torch.arange(size) + number
                        assert all(torch.equal(one, sent) for one in group.echo(sent))
        assert [future.result()[0] for future in futures] == list(range(before + 1, before + 41))


class TestValues:
    def test_results_of_all_kinds(self, group):
        assert group.large(7) == [bytes([7, rank]) * 2**20 for rank in range(2)]
        refs = group.reference()
        assert ray.get([one["ref"] for one in refs], timeout=30) == [("stored", 0), ("stored", 1)]
        with pytest.raises(WorkerError, match=r"unpicklable\(\).*lock") as caught:
            group.unpicklable()
        assert caught.value.cause_type == "TypeError"
        assert group.echo(None) == [None] * 2 and group.echo(b"") == [b""] * 2
        uneven = {"k" * 1_200_000: [1], "l" * 1_200_000: [1, 2]}  # why it has no rows is longer than a frame may be
        assert group.echo(uneven) == [uneven] * 2

    @pytest.mark.parametrize("nbytes", [10_000, 3_000_000])
    def test_errors_of_all_sizes(self, group, nbytes):
        with pytest.raises(WorkerError) as caught:
            group.raise_large(nbytes)
        cause = caught.value.__cause__
        assert isinstance(cause, ValueError) and len(cause.args[1]) == nbytes
        assert len(str(caught.value)) < 200_000 and group.ping() == [0, 1]

    @pytest.mark.parametrize("size", [4, 400_000])
    @pytest.mark.parametrize("blocking", [True, False])
    def test_result_that_the_next_call_changes(self, group, size, blocking):
        group.increment(1)
        increment = group.increment.options(blocking=blocking)
        first, second = increment(size), increment(size)
        if not blocking:
            first, second = first.result(), second.result()
        assert all(torch.equal(tensor, torch.ones(size)) for tensor in first)
        assert all(torch.equal(tensor, torch.full((size,), 2.0)) for tensor in second)

    @pytest.mark.parametrize("nbytes", [100, 1_600_000])
    @pytest.mark.parametrize("ended", [True, False])
    def test_references_of_a_future(self, group, nbytes, ended):
        future = group.large.options(blocking=False)(5, nbytes)
        if ended:
            future.wait()
        wanted = [bytes([5, rank]) * (nbytes // 2) for rank in range(2)]
        assert ray.get(future.refs, timeout=20) == wanted and future.result() == wanted
        assert ray.get(future.refs, timeout=20) == wanted

    def test_reply_that_cannot_be_made_is_an_error_and_hangs_nothing(self, group):
        with within(5), pytest.raises(WorkerError, match=r"break_reply\(\).*MemoryError.*no room for the reply"):
            group.break_reply()
        assert group.ping() == [0, 1]

    def test_ranks_keep_nothing_that_nobody_wants(self, group):
        for number in range(5):
            group.large.options(blocking=False)(number)  # dropped at once
            group.large(number)
            future = group.large.options(blocking=False)(number)
            assert group.echo(future) and future.refs
        del future
        wait_until(lambda: group.kept() == [0, 0], 10)


class TestThreadsAndProcesses:
    def test_large_results_of_several_threads(self, group):
        with ThreadPoolExecutor(16) as pool:
            large = [pool.submit(group.large, key, 1_600_000) for key in range(12)]
            small = [pool.submit(group.echo, key) for key in range(50)]
            assert [call.result() for call in small] == [[key, key] for key in range(50)]
            wanted = [[bytes([key, rank]) * 800_000 for rank in range(2)] for key in range(12)]
            assert [call.result() for call in large] == wanted

    def test_another_process_is_served_while_threads_keep_calling(self, group):
        with repeated(lambda: group.count(0.02), threads=8):
            time.sleep(0.3)
            with within(6), attach("wired_Wired") as attached:
                actor = ray.get_actor(group.worker_names[0])
                for value in range(5):
                    assert attached.echo(value) == [value] * 2
                    assert ray.get(actor.echo.remote(value), timeout=10) == value

    def test_fork_of_the_driver_has_no_connection(self, group):
        group.ping()
        assert in_fork(lambda: str([one._sock.fileno() for one in connections(group)])) == "[-1, -1]"
        assert group.ping() == [0, 1]

    def test_death_of_a_rank_that_has_forked(self, group):
        """The child lives on, and has copies of Ray's sockets, so Ray does not notice. It has none of the wire's."""
        pids = group.pid()
        group.fork(seconds=15)
        assert group.ping() == [0, 1]
        with within(8), pytest.raises(WorkerDiedError, match="rank 1"):
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(group.sleep, 30)
                time.sleep(0.2)
                os.kill(pids[1], signal.SIGKILL)
                wait_until(lambda: connections(group)[1] is None, 1)
                call.result()

    def test_copies_of_the_group(self, group):
        @ray.remote(num_cpus=0)
        def use(copy):
            return copy.count(), copy.large(1, 1_600_000)

        before = group.count()[0]
        counted, large = ray.get(use.remote(group))
        assert counted == [before + 1] * 2 and [len(part) for part in large] == [1_600_000] * 2
        assert pickle.loads(pickle.dumps(group)).count() == [before + 2] * 2
        assert group.count() == [before + 3] * 2

    @pytest.mark.parametrize(
        "how",
        ["kill -9", "sys.exit(0)", "exit_actor", pytest.param("sys.exit(3)", marks=pytest.mark.full("an exit code"))],
    )
    def test_ends_of_processes_are_told(self, group, how, caplog):
        group.ping()
        with within(5), pytest.raises(WorkerDiedError, match=r"rank 1 died during end\(\)") as caught:
            group.end(1, how)
        assert caught.value.ranks == (1,)
        wait_until(lambda: "is broken" in caplog.text, 5)
        threads = {record.threadName for record in caplog.records if "is broken" in record.getMessage()}
        assert threads == {"call-monitor"}, "a handler that waits for a call would wait for the thread that reads it"


def test_dropped_group_closes_its_connections(group):
    attached = attach("wired_Wired")
    assert attached.ping() == [0, 1]
    theirs = connections(attached)
    del attached
    gc.collect()
    wait_until(lambda: all(one._lost for one in theirs), 5)
    assert group.ping() == [0, 1]
