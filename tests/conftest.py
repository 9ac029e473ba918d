"""Suite-wide setup: one local Ray per process, tests left out, tests that run alone, and the budget of each file.

``make test`` runs the files in three processes (pytest-xdist), each with its own Ray. All tests of a file run in one
process; so do all files of a folder whose conftest.py shares worker groups among them.
"""

import fcntl
import gc
import os
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

gc.disable()  # until all tests are collected: modules are no garbage, and looking takes a quarter of the time
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# torch looks up this host's name for each connection to a store. Where a name server drops queries, each would take the
# resolver's default of five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
# Ray's log monitor looks for new files ten times a second, and twice from this number of files on. Over the files of
# hundreds of workers, each look takes ten milliseconds.
os.environ["RAY_LOG_MONITOR_MANY_FILES_THRESHOLD"] = "1"
# Ray's workers import the tests' worker classes by name.
_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDERS = [
    os.path.join(_HERE, folder)
    for folder in (
        "",
        "groups",
        "megatron",
        "train",
        "train/backends",
        "rollout",
        "simdevice/on_device",
        "with_vllm",
        "agents",
    )
]
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")])

import budgets  # noqa: E402  (Ray reads the variables when it is imported)
import depth  # noqa: E402
import devices  # noqa: E402
import pytest  # noqa: E402
from folder_scope import leave_folders  # noqa: E402
from fork_workers import CAN_FORK, FOR_SERVERS, ORIGIN, PRESTART, forked_workers, origin, server  # noqa: E402
from hypothesis import settings  # noqa: E402

LEFT_OUT = pytest.StashKey[Counter]()
SHARED = pytest.StashKey[tuple[Path, ExitStack]]()
durations = Counter()
"""The seconds of each file. Complete only in the reporting process, which runs no tests itself under pytest-xdist."""

FOLDERS_IN_ONE_PROCESS = ("tests/megatron/", "tests/train/backends/")
"""Their conftest.py shares worker groups among files."""


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run everything: `make test-all`")


def pytest_configure(config):
    depth.full = config.getoption("--full")
    # Property tests say nothing of time, and a busy machine is slow.
    settings.register_profile("suite", deadline=None, max_examples=100 if depth.full else 40)
    settings.load_profile("suite")
    config.stash[LEFT_OUT] = Counter()
    os.environ.pop(ORIGIN, None)  # a process of tests in a test has its own
    if address := origin(config):
        os.environ[ORIGIN] = str(address)
    # Also in scripts that start a Ray of their own: it would start a worker for each CPU, used or not.
    os.environ[PRESTART] = "0"


# --- Tests left out ------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.stash[LEFT_OUT].update(item.get_closest_marker("full").args[0] for item in left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:
        raise pytest.UsageError(
            f"{addresses[0]}: the id of a test must not hold an address; the processes of pytest-xdist have to agree"
        )
    if is_worker(config):  # longest first, so that all processes end at about the same time
        items.sort(key=lambda item: -budget_of_unit(unit_of(item.nodeid)))


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


def pytest_sessionfinish(session):
    config = session.config
    if is_worker(config):
        config.workeroutput["left_out"] = dict(config.stash[LEFT_OUT])
    elif over_budget(config):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Every process collects all tests, so the last process's counts are used."""
    found = getattr(node, "workeroutput", {}).get("left_out", {})
    if found:
        node.config.stash[LEFT_OUT] = Counter(found)


# --- One file in one process, and tests that run alone -------------------------------------------------------


def is_worker(config):
    """Whether this is one of pytest-xdist's processes."""
    return hasattr(config, "workerinput")


def unit_of(nodeid):
    """What runs in one process: the file of a test, or its folder."""
    file = nodeid.split("::")[0]
    return next((folder for folder in FOLDERS_IN_ONE_PROCESS if file.startswith(folder)), file)


def budget_of_unit(unit):
    known = budgets.BUDGETS | (budgets.IN_FULL if depth.full else {})
    files = [seconds for file, seconds in known.items() if unit_of(file) == unit]
    return sum(files) or budgets.DEFAULT


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class LongestUnitsFirst(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # keep the order of pytest_collection_modifyitems
    return LongestUnitsFirst(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give pytest-xdist's processes a folder for their shared locks, and a server to fork theirs from."""
    if SHARED not in node.config.stash:
        stack = ExitStack()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)))
        if CAN_FORK:
            stack.enter_context(server(folder / "server", FOR_SERVERS, wait=False))
        node.config.stash[SHARED] = folder, stack
    node.workerinput["shared"] = str(node.config.stash[SHARED][0])


def pytest_unconfigure(config):
    if SHARED in config.stash:
        config.stash[SHARED][1].close()


def runs_alone(item):
    return item is not None and item.get_closest_marker("alone") is not None


kept = []
"""The machine's lock, between two tests that run alone. Otherwise each of them would wait for another test to end."""


@contextmanager
def turn(item, nextitem):
    """Hold the lock that a test needs: exclusive with ``@pytest.mark.alone``, else shared.

    A test that waits for the machine holds the gate, so that no new test of another process starts before it. Both
    locks are acquired outside pytest-timeout, so that waiting does not count.
    """
    if not is_worker(item.config):
        yield
        return
    folder = Path(item.config.workerinput["shared"])
    machine = kept.pop() if kept else acquired(folder, fcntl.LOCK_EX if runs_alone(item) else fcntl.LOCK_SH)
    try:
        yield
    finally:
        if runs_alone(item) and runs_alone(nextitem):
            kept.append(machine)
        else:
            fcntl.flock(machine, fcntl.LOCK_UN)  # closing is not enough if a process that a test forked has a copy
            os.close(machine)


def acquired(folder, how):
    machine = os.open(folder / "machine", os.O_RDWR | os.O_CREAT)
    with open(folder / "gate", "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, how)
        fcntl.flock(gate, fcntl.LOCK_UN)
    return machine


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    with turn(item, nextitem):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem):
    yield
    leave_folders(None if nextitem is None else nextitem.path)


# --- Budgets and the summary ---------------------------------------------------------------------------------


def pytest_runtest_logreport(report):
    durations[report.nodeid.split("::")[0]] += report.duration


def over_budget(config):
    """The files that took too long. Budgets are for `make test`: with ``--full`` there are none."""
    return [] if config.getoption("--full") else budgets.over_budget(durations)


def pytest_terminal_summary(terminalreporter, config):
    too_long = over_budget(config)
    if too_long:
        terminalreporter.section("files over their budget", red=True)
        terminalreporter.line("\n".join(too_long))
        terminalreporter.line("Make them faster; tests/budgets.py says what a budget is.")
    if len(durations) > 1:
        terminalreporter.section("slowest files")
        for file, seconds in durations.most_common(10):
            terminalreporter.line(f"{seconds:7.1f} s  {file}")
    left_out = config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.section("left out")
        for reason, count in sorted(left_out.items()):
            terminalreporter.line(f"{count:4d} tests: {reason}")
        terminalreporter.line("Property tests ran on few examples, at up to 512 ranks.")
        terminalreporter.line("`make test-all` runs everything; `pytest --full FILE` runs all of a file.")


if devices.SIMULATED:

    @pytest.fixture(autouse=True)
    def no_faults_of_devices(request):
        """Fails a test in which a simulated device has found a fault, in any process."""
        before = len(devices.simulated_faults())
        yield
        if request.path.name != "test_device.py":  # which makes them
            assert devices.simulated_faults()[before:] == []


@pytest.fixture(scope="session")
def ray_cluster(pytestconfig):
    """This process's own Ray: 16 logical CPUs, 8 crates for the tests of pools, no dashboard, and devices only
    where they are simulated."""
    import ray

    with forked_workers(origin=origin(pytestconfig)) if CAN_FORK else nullcontext() as start_server:
        ray.init(
            "local",
            num_cpus=16,
            num_gpus=devices.DEVICES,
            resources={"crate": 8},
            include_dashboard=False,
            object_store_memory=2 * 1024**3,
            log_to_driver=False,
        )
        # It reads the files of all workers again and again, to print what is new on drivers that want it: none here.
        ray._private.worker._global_node.kill_log_monitor()
        if start_server is not None:
            start_server()
        yield start_server
        ray.shutdown()


@pytest.fixture(scope="session")
def other_drivers(ray_cluster):
    """For a test that starts other drivers of this process's Ray: their workers are forked too. Its value is the
    environment in which a script connects to this Ray."""
    import ray

    if ray_cluster is not None:
        ray_cluster(every_job=True)
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
