"""Tests that need their own Ray cluster, each in a separate script: shutdown, several nodes, logical GPUs."""

import os
import socket
import textwrap
from unittest.mock import Mock

import pytest
import ray
from ray.util.client import ray as ray_client
from torch_scripts import printed, python

from single_controller import RayResourcePool
from single_controller.ray.runtime import ensure_ray
from single_controller.view.live import connect

PREAMBLE = """
import os, sys, time, ray
from group_workers import Counter, Fragile
from single_controller import *
def counter(*args):
    return RayClassWithInitArgs(Counter, *args)
"""


def run(code, timeout=90):
    done = python(PREAMBLE + textwrap.dedent(code), timeout, RAY_ADDRESS="local")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return marked(done.stdout)


def run_forked(config, folder, code):
    """Run code as `run` does, in `make test` as a fork of a process that has imported torch. Returns all it prints."""
    found = os.pathsep.join([os.environ["PYTHONPATH"], str(config.rootpath)])  # it runs in another folder
    environment = {**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": found}
    return printed(config, PREAMBLE + textwrap.dedent(code), folder, environment)


def marked(text):
    return [line for line in text.splitlines() if line.startswith("> ")]


@pytest.mark.full("other ways for a driver to end, each in its own Ray cluster")
@pytest.mark.parametrize("last", ["future = None", "future.result()", "pass", "group.close(); pool.close()"])
def test_ray_shutdown_with_a_call_nobody_waited_for(last):
    """Ray aborts a process whose threads use it during shutdown, so the monitor must not."""
    out = run(f"""
        pool = RayResourcePool([2], use_gpu=False)
        group = RayWorkerGroup(pool, counter())
        for number in range(3):
            future = group.add.remote(0)
        {last}
        ray.shutdown()
        print("> alive")
    """)
    assert out == ["> alive"]


def test_cluster_that_was_killed_is_not_waited_for(monkeypatch, tmp_path, caplog):
    """``ray start`` has left its address, which ``ray stop`` would have removed."""
    joined = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # those of other tests
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: joined.append(address))
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    ensure_ray()
    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        ensure_ray()
        assert not caplog.records
    ensure_ray()
    assert joined == ["auto", "auto", "local"] and "no Ray cluster runs any more at 127.0.0.1:" in caplog.text
    with pytest.raises(ConnectionError, match=f"no Ray cluster responds at '{file.read_text()}'"):
        connect(None)
    monkeypatch.setenv("RAY_ADDRESS", file.read_text())
    ensure_ray()
    assert joined[-1] == file.read_text()
    monkeypatch.delenv("RAY_ADDRESS")
    unreadable = Mock(side_effect=PermissionError)  # of another user, whose umask is 077
    monkeypatch.setattr("ray._private.utils.read_ray_address", unreadable)
    monkeypatch.setattr(ray, "init", lambda address, **_: joined.append(address) or address == "local" or unreadable())
    ensure_ray()
    assert joined[-2:] == ["auto", "local"]


def test_ray_client_is_refused(monkeypatch):
    """Ray itself would say of the first group that it has not been started yet."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_client, "is_connected", lambda: True)
    with pytest.raises(ConnectionError, match=r"Ray Client .* `ray job submit`"):
        RayResourcePool([1], use_gpu=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ConnectionError, match="Ray Client"):
        ensure_ray()


@pytest.mark.timeout(180)
def test_groups_after_ray_shutdown_and_on_nodes_of_unequal_size_of_which_one_dies(pytestconfig, tmp_path):
    """The results are in the memory of the former store. Ray aborts a process that uses it while it shuts down, so the
    monitor of the calls that nobody waits for must not. The next Ray has several nodes."""
    code = """
        import pytest, torch
        from ray.cluster_utils import Cluster
        from waits import within
        ray.init("local", num_cpus=2, include_dashboard=False)
        with RayResourcePool([1], use_gpu=False) as pool, RayWorkerGroup(pool, counter()) as group:
            with RayWorkerGroup(RayResourcePool([1], use_gpu=False), counter()) as closed:
                results = closed.echo(torch.ones(1 << 20))
                refs = closed.execute_with_func_generator(lambda worker: [ray.put(worker.rank)])
                # These ranks have imported no more than a rank needs, unlike those that the other tests fork.
                assert [ray.get(ref, timeout=30) for [ref] in refs] == [0]
            for _ in range(3):
                future = group.add.remote(0)
            ray.shutdown()
            for call in (lambda: group.add(0), future.result, lambda: group.workers[0]):
                try:
                    call()
                except GroupBrokenError as error:
                    print("> broken:", "was shut down" in str(error), ray.is_initialized())
            results[0].fill_(3)
            assert [float(result.mean()) for result in results] == [3.0]
            health = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500,
                      "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}
            cluster = Cluster(initialize_head=True, head_node_args={
                "num_cpus": 2, "include_dashboard": False, "_system_config": health})
            ray.init(cluster.address, log_to_driver=False)
            with pytest.raises(GroupBrokenError):
                group.add(0)
            with pytest.raises(GroupClosedError):
                RayWorkerGroup(pool, counter())
        print("> closed without a word")
        small = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with pytest.raises(PlacementError, match="a node for 3 processes; the largest holds 2"):
            RayWorkerGroup(RayResourcePool([3], use_gpu=False), counter())
        pool = RayResourcePool([2, 1], use_gpu=False)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Fragile))
        nodes = ray.get([w.node.remote() for w in group.workers])
        sizes = [place[2:4] for place in ray.get([w.place.remote() for w in group.workers])]
        assert sizes in ([(0, 2), (1, 2), (0, 1)], [(0, 1), (0, 2), (1, 2)]), sizes
        lost = group.execute_with_func_generator.remote(lambda worker: bytes(1 << 21))
        while not lost.done():
            time.sleep(0.01)
        future = group.sleep.remote(120)
        cluster.remove_node(small, allow_graceful=False)
        with within(20), pytest.raises(WorkerDiedError):
            future.result()
        error = lost.exception()
        assert isinstance(error, ResultError) and error.method == "execute_with_func_generator", error
        assert nodes[error.rank] == small.node_id and error.host in str(error)
        ray.shutdown()
        cluster.shutdown()
        print("> ended")
    """
    text = run_forked(pytestconfig, tmp_path, code)
    broken = ["> broken: True False"] * 2
    assert marked(text) == [*broken, "> closed without a word", "> ended"], text


@pytest.mark.full("a full store on a full disk, in its own Ray cluster")
def test_store_and_disk_are_full():
    out = run("""
        import torch
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20,
                 _system_config={"local_fs_capacity_threshold": 0.01})
        group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), counter())
        calls = (lambda: group.total(torch.zeros(60 << 20)),
                 lambda: group.apply(lambda worker, rows: torch.zeros(len(rows), 30 << 20), [1, 2]))
        for call in calls:
            try:
                call()
            except SingleControllerError as error:
                print(">", type(error).__name__, error.method, "object_store_memory" in str(error))
        print(">", group.add(0))
    """)
    assert out == ["> DispatchError None True", "> ResultError apply True", "> [0, 1]"]


@pytest.mark.full("a payload larger than the store, which Ray spills to disk")
def test_payload_larger_than_the_store():
    """Ray spills it: slow, but nothing hangs or is lost."""
    out = run("""
        import torch
        ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
        group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), counter())
        batch = torch.arange(200 << 18, dtype=torch.float32).reshape(200, -1)
        print(">", batch.nbytes >> 20, torch.equal(group.double(batch), 2 * batch))
    """)
    assert out == ["> 200 True"]
