"""Workers that outlive their driver, and drivers that find workers which run already."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
import ray
from group_workers import Counter, Fragile

from single_controller import (
    GroupBrokenError,
    GroupClosedError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerDiedError,
)


@pytest.fixture
def another_driver(ray_cluster, tmp_path):
    """Runs a script as another driver of the same Ray and namespace."""
    context = ray.get_runtime_context()

    def run(code):
        script = tmp_path / "driver.py"
        script.write_text(
            f"import ray\nray.init({context.gcs_address!r}, namespace={context.namespace!r}, log_to_driver=False)\n"
            + textwrap.dedent(code)
        )
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=dict(os.environ)
        )
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("answer ")).removeprefix("answer ")

    return run


def test_a_group_outlives_its_driver_and_is_found_again(another_driver):
    names = another_driver("""
        from group_workers import Counter
        from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        pool = RayResourcePool([2], use_gpu=False, detached=True, name_prefix="outliving_")
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5), name_prefix="outliving_", detached=True)
        group.add(1)
        print("answer", ",".join(group.worker_names))
    """)
    assert names == "outliving_Counter_0,outliving_Counter_1"
    try:
        for how in (
            {"name_prefix": "outliving_"},
            {"worker_names": names.split(",")[::-1]},
            {"worker_handles": [ray.get_actor(name) for name in names.split(",")]},
        ):
            with RayWorkerGroup.from_detached(**how) as group:
                assert group.world_size == 2 and group.worker_names == names.split(",")
                assert group.add(0) == [6, 7]
                assert group.place()[1][0] == 1 and group.place()[0][5] == group.master_port
                with pytest.raises(GroupBrokenError, match="attached"):
                    group.restart()
            with pytest.raises(GroupClosedError):
                group.add(0)
    finally:
        for name in names.split(","):
            ray.kill(ray.get_actor(name))
        for table in ray.util.placement_group_table().values():
            if table["name"].startswith("outliving_"):
                ray.util.remove_placement_group(ray.util.get_placement_group(table["name"]))


def test_attaching_asks_for_all_ranks(counters):
    with pytest.raises(ValueError, match=r"all 4 ranks.*\[0, 1\]"):
        RayWorkerGroup.from_detached(worker_handles=counters.workers[:2])
    with pytest.raises(ValueError, match="exactly one"):
        RayWorkerGroup.from_detached()
    with pytest.raises(ValueError, match="no actor's name begins with 'nobody_'"):
        RayWorkerGroup.from_detached(name_prefix="nobody_")


def test_a_group_that_is_attached_to_hears_of_a_death(make_group):
    group = make_group(Fragile)
    attached = RayWorkerGroup.from_detached(worker_handles=group.workers)
    pids = attached.pid()
    group.close()
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end, "the workers of a closed group live on"
        time.sleep(0.05)
    with pytest.raises(WorkerDiedError):
        attached.ping()


def test_a_detached_group_needs_a_detached_pool(pool):
    with pytest.raises(ValueError, match="detached=True too"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Counter), detached=True)


def test_a_driver_that_is_killed_takes_its_workers_along(ray_cluster, tmp_path):
    context = ray.get_runtime_context()
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import ray, time
        ray.init({context.gcs_address!r}, log_to_driver=False)
        from group_workers import Fragile
        from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Fragile))
        print(*group.pid(), flush=True)
        group.sleep(60)
        """)
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    end = time.monotonic() + 15
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end, "the workers of a dead driver live on"
        time.sleep(0.1)
    with RayResourcePool([1], use_gpu=False) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Counter)) as group:
        assert group.add(0) == [0]


def test_ctrl_c_during_the_start_leaves_nothing(ray_cluster, tmp_path):
    context = ray.get_runtime_context()
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import ray, threading, time, os, signal
        ray.init({context.gcs_address!r}, namespace={context.namespace!r}, log_to_driver=False)
        from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
        class Slow(Worker):
            def __init__(self):
                super().__init__()
                time.sleep(60)
        pool = RayResourcePool([2], use_gpu=False)
        threading.Timer(2.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            RayWorkerGroup(pool, RayClassWithInitArgs(Slow), name_prefix="interrupted_")
        except KeyboardInterrupt:
            time.sleep(1)
            print([n for n in ray.util.list_named_actors() if n.startswith("interrupted_")], pool.closed)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[] False", done.stderr


def test_a_prefix_of_several_groups_is_not_guessed(pool):
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="twin"),
        RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="twin_two"),
    ):
        with pytest.raises(ValueError, match=r"several groups.*twinCounter_.*twin_twoFragile_"):
            RayWorkerGroup.from_detached(name_prefix="twin")
