"""Worker groups that several test files share; no test changes their processes.

Tests of behavior common to all groups run on every transport: Ray, and the driver's process with and without threads.
A file lists its transports in TRANSPORTS, a test with ``@pytest.mark.transports``; the default is Ray alone.
"""

import os
import subprocess
import sys
import textwrap
import threading

import group_workers as workers
import pytest

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from single_controller.ray import compat


def pytest_generate_tests(metafunc):
    if "transport" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("transports")
        names = mark.args if mark else getattr(metafunc.module, "TRANSPORTS", ("ray",))
        if metafunc.definition.get_closest_marker("ray_when_full"):
            left_out = pytest.mark.full("tests on Ray that also run in process")
            names = [pytest.param(name, marks=left_out) if name == "ray" else name for name in names]
        metafunc.parametrize("transport", names, indirect=True, scope="session")


class Kit:
    """Creates groups."""

    def make(self, cls, *args, world_size=4, group_options=None, **kwargs):
        """Return a group of one class. The caller closes it."""
        return self.group(RayClassWithInitArgs(cls, *args, **kwargs), world_size, **(group_options or {}))


class OnRay(Kit):
    """Groups on the shared pool of four slots, or on pools of their own."""

    def __init__(self, pool):
        self.pool = pool
        self.pools = []

    def group(self, made, world_size=4, **options):
        from single_controller import RayResourcePool, RayWorkerGroup

        pool = self.pool
        if world_size != 4:
            pool = RayResourcePool([world_size], use_gpu=False)
            self.pools.append(pool)
        return RayWorkerGroup(pool, made, **options)

    def get(self, refs):
        import ray

        return ray.get(refs)

    def close(self):
        while self.pools:
            self.pools.pop().close()


class InThisProcess(Kit):
    """Groups in the test's own process."""

    def __init__(self, threads):
        self.threads = threads

    def group(self, made, world_size=4, **options):
        return LocalWorkerGroup(world_size, made, threads=self.threads, **options)

    def get(self, refs):
        return [ref.get() for ref in refs] if isinstance(refs, list) else refs.get()

    def close(self):
        pass


@pytest.fixture(scope="session")
def transport(request):
    """Creates the groups of a test and resolves their references."""
    if request.param == "ray":
        kit = OnRay(request.getfixturevalue("pool"))
    else:
        kit = InThisProcess(threads=request.param == "local-threads")
    kit.name = request.param
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def pool(ray_cluster):
    """Four CPU slots, for the whole session."""
    from single_controller import RayResourcePool

    with RayResourcePool([4], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="session")
def counters(transport):
    """Four counters. Tests leave their values unchanged."""
    with transport.make(workers.Counter, start=100) as group:
        yield group


@pytest.fixture(scope="module")
def fragile(transport):
    """Four ranks that fail on demand. No test ends their processes or breaks the group."""
    with transport.make(workers.Fragile) as group:
        yield group


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for the files that the workers of a test file obey and write."""
    return tmp_path_factory.mktemp("workers")


@pytest.fixture
def make_group(transport):
    """Creates groups of four that are closed after the test."""
    groups = []

    def make(cls, *args, **kwargs):
        group = transport.make(cls, *args, **kwargs)
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.close()


DRIVER = """
import os, ray, signal, sys, threading, time
ray.init({address!r}, namespace={namespace!r}, log_to_driver=False)
from group_workers import Actor, Counter, Critic, Fragile
from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, colocate
"""
"""The head of a script that is another driver of this Ray and namespace."""


@pytest.fixture
def start_driver(other_drivers, tmp_path):
    """Start a script as another driver, which is killed after the test if it still runs."""
    import ray

    context = ray.get_runtime_context()
    started = []

    def start(code):
        script = tmp_path / f"driver_{len(started)}.py"
        head = DRIVER.format(address=context.gcs_address, namespace=context.namespace)
        script.write_text(head + textwrap.dedent(code))
        command = [sys.executable, str(script)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def run_driver(start_driver):
    """Run a script as another driver, and return what it prints behind "answer"."""

    def run(code):
        process = start_driver(code)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0, printed
        return next(line for line in printed.splitlines() if line.startswith("answer ")).removeprefix("answer ")

    return run


@pytest.fixture
def silent_store(monkeypatch):
    """A function after which Ray's control store does not answer, and questions end after half a second. It returns
    one that has it answer again."""
    from ray._private.state import state

    answered, connect = threading.Event(), state._connect_and_get_accessor

    class Accessor:
        def __getattr__(self, name):
            return lambda *args: answered.wait(60) and getattr(connect(), name)(*args)

    def answer():
        answered.set()
        monkeypatch.setattr(state, "_connect_and_get_accessor", connect)

    def silence():
        monkeypatch.setattr(compat, "STORE_SECONDS", 0.5)
        monkeypatch.setattr(state, "_connect_and_get_accessor", Accessor)
        return answer

    yield silence
    answer()
