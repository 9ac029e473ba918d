"""However a group ends, it leaves nothing: no actor, process, placement group, port, /dev/shm file, or reserved CPU."""

import signal
import time

import depth
import pytest
from footprint import Footprint, port_is_free
from group_workers import Counter, Fragile, Landlord
from waits import kill_before, wait_gone, wait_until

from single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    StartError,
    WorkerDiedError,
    WorkerError,
    colocate,
)

pytestmark = pytest.mark.alone  # other tests create files in /dev/shm too

CRATE = {"crate": 1}


@pytest.fixture
def before(ray_cluster):
    """The footprint before the test."""
    return Footprint.now()


def pool_of(size):
    return RayResourcePool([size], use_gpu=False, resources=CRATE)


def test_close(before):
    pool = pool_of(2)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Fragile))
    assert group.join_process_group() == [(0, 2), (1, 2)]
    pids, port = group.pid(), group.master_port
    assert not port_is_free(port)
    left = before.left_behind(Footprint.now())
    assert "actors" in left and "processes" in left and "placement_groups" in left
    group.close()
    pool.close()
    before.wait_same()
    wait_gone(pids, 5)  # Ray reports an actor dead just before its process exits
    wait_until(lambda: port_is_free(port), 5)  # a thread of the exiting process may hold the port a moment longer


def test_worker_exception_and_death(before):
    with pool_of(2) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) as group:
        with pytest.raises(WorkerError):
            group.fail([1])
        kill_before(group.ping, group.pid()[0])
    before.wait_same()


@pytest.mark.parametrize("how", [{"fail_rank": 1}, {"kill_rank": 0}])
def test_failed_start(before, how):
    with pool_of(2) as pool:
        with pytest.raises((StartError, WorkerDiedError)):
            RayWorkerGroup(pool, RayClassWithInitArgs(Fragile, **how))
        with pytest.raises((StartError, WorkerDiedError)):
            RayWorkerGroup(
                pool, colocate({"a": RayClassWithInitArgs(Counter), "b": RayClassWithInitArgs(Fragile, **how)})
            )
    before.wait_same()


def test_dropped_objects(before):
    def use():
        group = RayWorkerGroup(pool_of(2), RayClassWithInitArgs(Counter))
        return group.add.remote(0)

    assert use().result() == [0, 1]
    before.wait_same()


def test_pool_that_a_worker_made_ends_with_the_worker(before):
    """Ray alone keeps its placement group until the driver ends."""
    with pool_of(2) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Landlord), collectives=False)
        held = Footprint.now().placement_groups

        def made():
            return len(Footprint.now().placement_groups - held)

        assert group.let(True) == [[1], [1]] and made() == 2
        kill_before(group.pid, group.pid()[0])
        group.restart(ranks=[0])
        wait_until(lambda: made() == 1, 5)  # that of rank 1, which goes on
        group.close()
        wait_until(lambda: made() == 0, 5)
    before.wait_same()


def test_pool_of_a_dropped_worker_is_freed_for_the_next_pool(before):
    def use(pool):
        RayWorkerGroup(pool, RayClassWithInitArgs(Landlord)).let(False)

    with pool_of(1) as pool:
        held = Footprint.now()
        use(pool)
        wait_until(lambda: "actors" not in held.left_behind(Footprint.now()), 10)
        with pool_of(1) as following:
            following.place()
    before.wait_same()


@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.full("drivers that are killed while they start")), signal.SIGINT],
)
def test_driver_that_ends_during_the_start(before, start_driver, how):
    def starting():
        return any(name.startswith("Slow") for _, name in Footprint.now().actors)

    process = start_driver("""
        class Slow(Worker):
            def __init__(self):
                super().__init__()
                time.sleep(60)
        pool = RayResourcePool([2], use_gpu=False, resources={"crate": 1})
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell of the tests has set
        try:
            RayWorkerGroup(pool, RayClassWithInitArgs(Slow))
        except KeyboardInterrupt:
            print("interrupted", pool.closed, flush=True)
            time.sleep(60)
    """)
    wait_until(starting, 30)
    process.send_signal(how)
    if how == signal.SIGINT:
        assert process.stdout.readline() == "interrupted False\n"
        wait_until(lambda: not starting(), 15)  # the driver and its pool are alive; only the workers must end
        process.kill()
    before.wait_same(30)


def test_driver_that_is_killed_during_a_collective(before, start_driver):
    process = start_driver("""
        pool = RayResourcePool([2], use_gpu=False, resources={"crate": 1})
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Fragile))
        group.join_process_group()
        print("joined", flush=True)
        group.all_reduce(1, absent=1)
    """)
    assert process.stdout.readline() == "joined\n"
    time.sleep(0.3)
    process.kill()
    before.wait_same(30)


def test_many_groups_in_sequence(before):
    for turn in range(60 if depth.full else 2):
        with pool_of(1) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Counter)) as group:
            assert group.add(turn) == [turn]
    before.wait_same()
