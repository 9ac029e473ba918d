"""What is specific to `LocalWorkerGroup`. The other files test what it has in common with a group on Ray."""

import asyncio
import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls_workers import Kit
from group_workers import Counter, Fragile, Gate, Grid, Log, Model
from rollout_helpers import EchoEngine
from torch.distributed.device_mesh import init_device_mesh
from torch_scripts import python
from waits import refuse_threads, wait_until, within

from dispatch.layout import layout_from
from single_controller import (
    Broadcast,
    CallTimeoutError,
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    LocalGroupError,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResultError,
    StartError,
    Worker,
    WorkerDiedError,
    WorkerError,
    colocate,
    register,
)
from single_controller.call import joining
from single_controller.call.future import WorkerFuture
from single_controller.call.worker.executor import Executor
from single_controller.call.worker.worker import RankInfo
from workers import RolloutWorker
from workers.distributed import initialize_distributed

ROOT = Path(__file__).resolve().parents[2]
SHARED: dict[str, Any] = {}


class Probe(Worker):
    """One method for each thing that a test asks of a worker."""

    raised = None

    def __init__(self, size=4, slow=None):
        super().__init__()
        self.weights = torch.zeros(size)
        if self.rank == slow:
            time.sleep(0.2)

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def is_done(self, future):
        return future.done()

    @register(Dispatch.ONE_TO_ALL)
    async def thread_async(self):
        await asyncio.sleep(0)
        return threading.current_thread().name

    @register(Dispatch.ONE_TO_ALL)
    def address(self):
        return (self.master_addr, self.master_port)

    @register(Dispatch.ONE_TO_ALL)
    def write(self, tensor, array):
        before = (float(tensor.sum()), float(array.sum()))
        tensor.fill_(self.rank + 1)
        array[:] = self.rank + 1
        return before

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def write_into_view(self, tensor):
        tensor += 1
        return float(tensor[0])

    @register(Dispatch.ONE_TO_ALL)
    def read(self, tensor):
        return float(tensor.sum())

    @register(Dispatch.ONE_TO_ALL)
    def share(self):
        return self.weights

    @register(Dispatch.ONE_TO_ALL)
    def change(self, by):
        self.weights += by

    @register(Dispatch.ONE_TO_ALL)
    def stop(self, how, ranks):
        if self.rank in ranks:
            if how == "exit":
                sys.exit(3)
            Probe.raised = how("of the method")
            raise Probe.raised

    @register(Dispatch.ONE_TO_ALL)
    async def stop_in_a_task(self, wait):
        async def leave():
            sys.exit(3)

        self.task = asyncio.create_task(leave())
        if wait:
            await self.task

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds, ranks=None):
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def join_process_group(self):
        initialize_distributed(self, "gloo")
        total = torch.ones(3)
        torch.distributed.all_reduce(total)
        mesh = init_device_mesh("cpu", (self.world_size,))
        return (torch.distributed.get_rank(), mesh.size(), float(total.sum()))

    @register(Dispatch.ONE_TO_ALL)
    async def join_in_a_coroutine(self):
        initialize_distributed(self, "gloo")

    @register(Dispatch.ONE_TO_ALL)
    def join_with_torch_alone(self, **options):
        torch.distributed.init_process_group("gloo", **options)
        return torch.distributed.get_world_size()


class BadRows(ValueError):
    """Has a length, for which the driver's error lacks the rows."""

    rows = ()

    def __len__(self):
        return len(self.rows)


class JoinsAtStart(Worker):
    """Joins a process group in its constructor."""

    def __init__(self):
        super().__init__()
        initialize_distributed(self, "gloo")


class JoinsLate(JoinsAtStart):
    joined = False

    def __init__(self):
        time.sleep(0.3)
        super().__init__()
        JoinsLate.joined = torch.distributed.is_initialized()


class FailsWhenItHasJoined(JoinsAtStart):
    """Its constructor raises at the end."""

    def __init__(self):
        super().__init__()
        raise RuntimeError("after it has joined")


class HasItsOwnGroup(Worker):
    """Creates a group in its constructor, and then a worker."""

    def __init__(self):
        super().__init__()
        with LocalWorkerGroup(3, ClassWithInitArgs(Counter)) as inner:
            self.inner = inner.add(0)
        self.helper = Worker()

    @register(Dispatch.ONE_TO_ALL)
    def say(self):
        return (self.rank, self.inner, self.helper.rank)


@pytest.fixture(params=[False, True], ids=["no-threads", "threads"])
def threads(request):
    return request.param


@pytest.fixture
def make(threads):
    """Create groups of Probe, or of another class, that are closed after the test."""
    groups = []

    def make(cls=Probe, *args, world_size=4, options=None, **kwargs):
        made = ClassWithInitArgs(cls, *args, **kwargs)
        groups.append(LocalWorkerGroup(world_size, made, threads=threads, **(options or {})))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def group_threads():
    """The threads that belong to groups in this process."""
    return {t for t in threading.enumerate() if t.name.startswith(("local-rank", "worker-loop"))}


# --- Debugging -----------------------------------------------------------------------------------------------

SCRIPT = """
from single_controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, register

class Mine(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def work(self, x):
        {inside}
        doubled = 2 * x
        return doubled + self.rank

if __name__ == "__main__":
    group = LocalWorkerGroup(2, ClassWithInitArgs(Mine))
    {before}
    results = group.work(21)
    print("results", results)
"""


def debug(tmp_path, commands, inside="pass", before="pass", **environment):
    """Run the script with debugger commands on its standard input."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(inside=inside, before=before))
    return subprocess.run(
        [sys.executable, str(script)],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        # Ray, which other tests start in this process, points breakpoint() at its own debugger with this variable.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONBREAKPOINT": "", **environment},
    )


def test_two_event_loops_do_not_wait_for_each_other(monkeypatch):
    with LocalWorkerGroup(2, ClassWithInitArgs(Counter), threads=True) as group:
        must_wait, values = group._must_wait, []

        def meet(*args):
            """The second loop leaves its call to a thread while the first one is about to send."""
            found = must_wait(*args)
            if threading.current_thread() is loops[0]:
                loops[1].start()
                wait_until(lambda: group._state.unsent, 5)
            return found

        async def call():
            values.append(await group.add.remote(1))

        loops = [threading.Thread(target=lambda: asyncio.run(call()), daemon=True) for _ in range(2)]
        monkeypatch.setattr(group, "_must_wait", meet)
        loops[0].start()
        wait_until(lambda: len(values) == 2, 10)


def test_breakpoint_stops_inside_the_method_below_the_drivers_line(tmp_path):
    commands = ["p self.rank, x", "next", "p doubled", "where", "continue", "p self.rank", "continue"]
    done = debug(tmp_path, commands, inside="breakpoint()")
    assert done.returncode == 0, done.stderr
    assert "(0, 21)" in done.stdout and "(Pdb) 42" in done.stdout and "(Pdb) 1\n" in done.stdout
    assert "<module>()\n-> results = group.work(21)" in done.stdout
    assert done.stdout.rstrip().endswith("results [42, 43]")


def test_quit_in_the_debugger_leaves_the_call(tmp_path):
    done = debug(tmp_path, ["quit"], inside="breakpoint()")
    assert done.returncode == 1 and done.stderr.rstrip().endswith("bdb.BdbQuit")
    assert "WorkerError" not in done.stderr and "results = group.work(21)" in done.stderr


@pytest.mark.parametrize("hook", [False, True], ids=["set_trace", "PYTHONBREAKPOINT"])
def test_step_goes_from_the_driver_into_each_ranks_method(tmp_path, hook):
    name = "single_controller.local.set_trace"
    before = "breakpoint()" if hook else "import single_controller.local; single_controller.local.set_trace()"
    steps = ["step", "p self.rank", "return", "step", "p self.rank", "return", "step", "continue"]
    done = debug(tmp_path, steps, before=before, **({"PYTHONBREAKPOINT": name} if hook else {}))
    assert done.returncode == 0, done.stderr
    stops = [line for line in done.stdout.splitlines() if line.startswith("-> ")]
    assert stops == [
        "-> results = group.work(21)",
        "-> @register(Dispatch.ONE_TO_ALL)",
        "-> return doubled + self.rank",
        "-> @register(Dispatch.ONE_TO_ALL)",
        "-> return doubled + self.rank",
        '-> print("results", results)',
    ]
    assert "(Pdb) 0\n" in done.stdout and "(Pdb) 1\n" in done.stdout and "results [42, 43]" in done.stdout


def test_breakpoint_at_a_line_of_the_method(tmp_path):
    done = debug(tmp_path, ["break script.py:8", "continue", "p x", "clear 1", "continue"], before="breakpoint()")
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 21\n" in done.stdout and "results [42, 43]" in done.stdout


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemError], ids=lambda kind: kind.__name__)
def test_interrupt_leaves_the_call_and_the_group_stays_usable(error):
    with LocalWorkerGroup(3, ClassWithInitArgs(Probe)) as group:
        expected = error if error is KeyboardInterrupt else WorkerError
        with pytest.raises(expected):
            group.stop(error, [1])
        assert group.sleep(0) == [0, 1, 2]


class Interrupting(Worker):
    """Its method interrupts the driver, which waits for it."""

    def __init__(self):
        super().__init__()
        self.ended = []

    @register(Dispatch.ONE_TO_ALL)
    async def interrupt(self):
        try:
            driver = threading.main_thread().ident
            while sys._current_frames()[driver].f_code is not threading.Condition.wait.__code__:
                await asyncio.sleep(0.01)
            signal.pthread_kill(driver, signal.SIGUSR1)
            await asyncio.sleep(30)
        finally:
            self.ended.append(self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def has_ended(self):
        return self.ended


def test_interrupt_ends_an_async_method():
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with LocalWorkerGroup(2, ClassWithInitArgs(Interrupting)) as group:
            with within(10), pytest.raises(KeyboardInterrupt):
                group.interrupt()
            wait_until(lambda: group.has_ended() == [[0], []], 10)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_error_cause_keeps_its_frames_for_post_mortem_debugging(make):
    with pytest.raises(WorkerError) as caught:
        make().stop(ValueError, [2])
    cause = caught.value.__cause__
    assert cause is Probe.raised
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    assert frames[-1].f_code.co_name == "stop" and frames[-1].f_locals["self"].rank == 2
    told = caught.value.remote_traceback.splitlines()
    assert told[0].startswith("Traceback") and "test_local.py" in told[1] and "in stop" in told[1]


def test_group_and_call_take_milliseconds():
    """In CPU time; the best of three runs, because the machine is noisy."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        with LocalWorkerGroup(2, ClassWithInitArgs(Counter, start=1)) as group:
            assert group.add(1) == [2, 3]
        times.append(time.process_time() - begin)
    assert min(times) < 0.05


def test_ray_is_not_needed_and_the_environment_is_unchanged():
    done = python("""
        import os
        import sys
        sys.modules["ray"] = None  # import ray raises
        before = dict(os.environ)
        from single_controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, WorkerError, register

        class Mine(Worker):
            @register(Dispatch.DP_COMPUTE_PROTO)
            def rows(self, batch):
                return [row + self.rank for row in batch]

            @register(Dispatch.ONE_TO_ALL)
            def fail(self, value):
                raise ValueError(f"no {value}")

        for threads in (False, True):
            with LocalWorkerGroup(2, ClassWithInitArgs(Mine), threads=threads) as group:
                assert group.rows(group.rows.remote([1, 2, 3, 4])) == [1, 2, 5, 6]
                ref = group.execute_rank_zero_async("rows", [1])
                try:
                    group.fail(ref)
                except WorkerError as error:
                    assert "fail() raised ValueError on ranks 0, 1; first: rank" in str(error), error
                    print(error.__cause__)
        assert not [name for name in sys.modules if name.startswith("single_controller.ray")]
        print(dict(os.environ) == before)
    """)
    assert done.stdout.splitlines() == ["no [1]", "no [1]", "True"], done.stderr


@pytest.mark.parametrize("closes", [False, True], ids=["dropped", "closed"])
def test_hanging_method_does_not_keep_the_process_alive(closes):
    done = python(f"""
        import time
        from single_controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, register

        class Mine(Worker):
            @register(Dispatch.ONE_TO_ALL)
            def hang(self):
                time.sleep(1000)

        group = LocalWorkerGroup(2, ClassWithInitArgs(Mine), threads=True)
        future = group.hang.remote()
        if {closes}:
            group.close()
        print("end")
    """)
    assert done.stdout == "end\n" and done.returncode == 0, done.stderr


# --- Ranks and threads ---------------------------------------------------------------------------------------


def test_worker_knows_its_rank_without_environment_variables(make):
    def place(worker):
        return (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size, worker.device_ids)

    group, names = make(Counter, world_size=3), ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    assert group.execute_with_func_generator(place) == [(rank, 3, rank, 3, ()) for rank in range(3)]
    assert group.environment(*names) == [{name: os.environ.get(name) for name in names}] * 3


def test_ranks_run_in_the_callers_thread_or_their_own(make, threads):
    group = make(world_size=2)
    here = threading.current_thread().name
    names = group.execute_with_func_generator(lambda worker: threading.current_thread().name)
    assert names == (["local-rank-0", "local-rank-1"] if threads else [here] * 2)
    assert group.thread_async() == ["worker-loop"] * 2


def test_call_without_threads_has_finished_when_it_returns():
    with LocalWorkerGroup(2, ClassWithInitArgs(Log)) as group:
        group.note.remote("first", 0.05)
        future = group.note.remote("second")
        assert future.done() and group.read() == [["first", "second"]] * 2


def test_stats_assign_time_to_phases_without_threads():
    with LocalWorkerGroup(2, ClassWithInitArgs(Probe)) as group:
        group.sleep(0.1)
        phases = group.stats().calls[-1].phases()
    assert phases["dispatch"] < 0.05 and 0.1 <= phases["method"] < 0.2
    assert phases["queue"] >= 0.1, "the second rank waits for the first"


def test_concurrent_method_without_threads_runs_in_order():
    with LocalWorkerGroup(2, ClassWithInitArgs(Gate)) as group:
        assert group.open() == [True] * 2 and group.wait(0) == [True] * 2


def test_process_that_can_start_no_thread(monkeypatch):
    with LocalWorkerGroup(2, ClassWithInitArgs(Gate), threads=True) as group:
        with monkeypatch.context() as patch:
            refuse_threads(patch)
            with pytest.raises(DispatchError, match=r"open\(\) was not sent: .*: can't start new thread"):
                group.open()
            for starts_one in (
                group.watch,
                lambda: asyncio.run(group.arestart()),
                lambda: LocalWorkerGroup(1, ClassWithInitArgs(Gate), threads=True),
            ):
                with pytest.raises(StartError, match="could not be started: can't start new thread"):
                    starts_one()
        assert group.open() == [True] * 2 and group.generation == 0
        with monkeypatch.context() as patch:
            refuse_threads(patch, lambda name: "rank-1" in name)
            with pytest.raises(GroupBrokenError, match=r"open\(\) was sent to rank 0, but not to rank 1: RuntimeError"):
                group.open()


def test_no_thread_outlives_a_closed_or_dropped_group(make):
    before = group_threads()
    group = make()
    group.thread_async()
    group.close()
    wait_until(lambda: group_threads() <= before, 5)
    dropped = LocalWorkerGroup(3, ClassWithInitArgs(Probe), threads=True)
    dropped.thread_async()
    assert len(group_threads() - before) == 6
    del dropped
    wait_until(lambda: group_threads() <= before, 5)


def test_ranks_that_share_a_process_need_no_files():
    before = len(os.listdir("/proc/self/fd"))
    with LocalWorkerGroup(100, ClassWithInitArgs(Counter)) as group:
        assert len(group.add(0)) == 100 and len(os.listdir("/proc/self/fd")) < before + 50


def test_worker_may_create_a_group_in_its_constructor(make):
    assert make(HasItsOwnGroup, world_size=2).say() == [(0, [0, 1, 2], 0), (1, [0, 1, 2], 1)]


# --- Arguments and results -----------------------------------------------------------------------------------


def test_each_rank_writes_to_its_own_copy(make):
    tensor, array = torch.ones(1000), np.ones(1000)
    assert make().write(tensor, array) == [(1000.0, 1000.0)] * 4
    assert float(tensor.sum()) == 1000 and float(array.sum()) == 1000


def test_view_is_shared_by_the_ranks_but_not_with_the_driver():
    tensor = torch.zeros(1000)
    with LocalWorkerGroup(4, ClassWithInitArgs(Probe)) as group:
        assert group.write_into_view(tensor) == [1, 2, 3, 4]
    assert float(tensor.sum()) == 0


def test_later_writes_by_the_driver_reach_no_rank(make):
    group = make(world_size=2)
    tensor = torch.ones(1000)
    group.sleep.remote(0.1)
    future = group.read.remote(tensor)
    tensor.zero_()
    assert future.result() == [1000.0] * 2


def test_driver_owns_copies_of_the_results(make):
    group = make(world_size=2)
    blocking, future = group.share(), group.share.remote()
    future.result()
    group.change(5)
    assert [float(t.sum()) for t in blocking + future.result()] == [0] * 4
    blocking[0].fill_(7)
    assert [float(t.sum()) for t in group.share()] == [20, 20]


def test_each_rank_copies_the_constructor_arguments(make):
    axes = {"dp": [0, 1]}
    group = make(Grid, axes, world_size=2)
    group.execute_all_sync("set_layout")
    axes["dp"][0] = 99
    assert group.compute(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group.execute_with_func_generator(lambda worker: id(worker.axes["dp"])) != [id(axes["dp"])] * 2


# --- Futures between transports ------------------------------------------------------------------------------


@pytest.mark.transports("ray")
def test_ray_future_as_argument_of_a_local_group(counters, make):
    here = make(Counter, world_size=2)
    assert here.double(counters.double.remote(torch.arange(8))).tolist() == [4 * row for row in range(8)]
    assert here.echo(counters.add.remote(0)) == [[100, 101, 102, 103]] * 2
    assert here.echo(counters.execute_rank_zero_async("plain", 1)) == [101] * 2
    failed = counters.execute_rank_zero_async("apply", "not a function", [1])
    with pytest.raises(WorkerError, match=r"echo\(\) raised .*TypeError.* on rank") as caught:
        here.echo(failed)
    assert isinstance(caught.value.__cause__, TypeError), "as on Ray"


def test_error_has_what_the_other_ranks_returned(make):
    with pytest.raises(ZeroDivisionError) as caught:
        make(Counter, world_size=3).apply(lambda worker, rows: [2 // (1 - worker.rank)], [0, 0, 0])
    assert caught.value.results == {0: [2], 2: [-2]}


@pytest.mark.transports("ray")
def test_local_future_cannot_be_sent_to_ray(counters, make):
    future = make(Counter, world_size=2).add.remote(0)
    told = r"LocalGroupError: the results of add\(\) are in the driver's process.*pass future\.result\(\)"
    with pytest.raises(DispatchError, match=told):
        counters.echo(future)
    with pytest.raises(DispatchError, match=r"LocalGroupError.*pass ref\.get\(\)"):
        counters.echo(future.refs[0])
    assert counters.echo(future.result()) == [[0, 1]] * 4


def test_layout_is_read_while_other_threads_calls_end():
    """Each result that arrives tells a rank's version of the layout, under the lock of the group's state."""
    group = LocalWorkerGroup(4, ClassWithInitArgs(Counter))
    state, layout = group._state, group.layout
    state.layout_versions[None].update(dict.fromkeys(range(4, 4000), 0))

    def end_calls():
        for rank in range(4000, 8000):
            with state.lock:
                state.layout_versions[None][rank] = 0
            time.sleep(1e-5)

    thread, interval = threading.Thread(target=end_calls), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            assert group.layout is layout
    finally:
        thread.join()
        sys.setswitchinterval(interval)
        group.close()


def test_failed_input_future_fails_the_call_without_threads():
    """The consumer's ranks run in this thread, where nothing could interrupt their wait for the producer."""
    with (
        LocalWorkerGroup(2, ClassWithInitArgs(Fragile), threads=True) as producer,
        LocalWorkerGroup(2, ClassWithInitArgs(Counter)) as consumer,
        LocalWorkerGroup(1, ClassWithInitArgs(Probe)) as probe,
    ):
        late = producer.sleep_on.options(timeout=0.2).remote([1], 20)
        with pytest.raises(CallTimeoutError, match=r"sleep_on\(\) exceeded its timeout.*rank 1"):
            consumer.echo(late)
        assert probe.is_done(late) == [True], "its error is that of the call, not of a wait"
        assert consumer.add(0) == [0, 1] and producer.broken


def call_back(worker):
    SHARED["waits"].wait(5)
    return SHARED["group"].add(0)


def test_group_without_threads_can_be_called_while_it_waits_for_an_argument(monkeypatch):
    waits, wait = threading.Event(), WorkerFuture.wait
    monkeypatch.setattr(WorkerFuture, "wait", lambda future: waits.set() or wait(future))
    with (
        LocalWorkerGroup(2, ClassWithInitArgs(Counter), threads=True) as producer,
        LocalWorkerGroup(2, ClassWithInitArgs(Counter)) as consumer,
    ):
        monkeypatch.setitem(SHARED, "waits", waits)
        monkeypatch.setitem(SHARED, "group", consumer)
        called = producer.execute_with_func_generator.options(timeout=5).remote(call_back)
        assert consumer.echo(called) == [[[0, 1]] * 2] * 2


def test_call_of_a_living_rank_gets_its_argument_although_another_one_dies(monkeypatch):
    """While the call is being sent."""
    made = ClassWithInitArgs(Counter)
    with (
        LocalWorkerGroup(1, ClassWithInitArgs(Gate), threads=True) as producer,
        LocalWorkerGroup(2, made, threads=True, collectives=False) as consumer,
    ):
        send = consumer._transport.send

        def send_then_break(*args):
            sent = send(*args)
            consumer._state.break_("rank 1 died", [1])
            return sent

        monkeypatch.setattr(consumer._transport, "send", send_then_break)
        first = consumer.first.remote(producer.wait.remote(30))
        producer.open()
        assert consumer.broken and first.result(timeout=5) == (0, [True])


def test_rows_of_a_future_are_located_once_for_all_ranks(make, monkeypatch):
    """Once for each rank would cost the square of their number."""
    located = []
    locate = joining.share_rows
    monkeypatch.setattr(joining, "share_rows", lambda *given: located.append(given) or locate(*given))
    producer, consumer = make(Counter, world_size=8), make(Counter, world_size=12)
    future = producer.double.remote(torch.arange(24))
    for _ in range(2):
        assert torch.equal(consumer.double(future), torch.arange(24) * 4)
    assert located == [(24, 12, "error")] * 2  # once for each call


def test_reference_waits_only_for_its_own_rank():
    with LocalWorkerGroup(2, ClassWithInitArgs(Probe), threads=True) as group:
        fast, slow = group.execute_all_async("sleep", 0.5, Broadcast([1]))
        assert fast.get(0.3) == 0
        with pytest.raises(CallTimeoutError):
            slow.get(0)
        assert slow.get() == 1
        failing = group.execute_all_async("stop", ValueError, Broadcast([0]))
        traces = []
        for _ in range(2):
            with pytest.raises(ValueError, match="of the method") as caught:
                failing[0].get()
            traces.append([entry.name for entry in caught.traceback])
        assert traces[0] == traces[1] and traces[0][-1] == "stop"


# --- Errors, deaths, timeouts --------------------------------------------------------------------------------


def test_sys_exit_in_a_method_is_a_death(make):
    group = make()
    told = []
    with group.watch(on_death=told.append, interval=0.05):
        future = group.stop.remote("exit", [1])
        with pytest.raises(WorkerDiedError, match=r"rank 1 died during stop\(\).*sys\.exit\(3\)") as caught:
            future.result()
        assert caught.value.ranks == (1,) and group.alive() == [True, False, True, True]
        with pytest.raises(GroupBrokenError, match=r"rank 1 died.*restart\(\)"):
            group.sleep(0)
        wait_until(lambda: told, 5)
    assert told[0].ranks == (1,)
    group.restart()
    assert group.sleep(0) == [0, 1, 2, 3] and group.alive() == [True] * 4


def test_sys_exit_in_a_task_ends_the_method_that_waits_for_it(make):
    group = make(world_size=2)
    group.stop_in_a_task(wait=False)
    assert group.thread_async() == ["worker-loop"] * 2, "the event loop goes on"
    with within(5), pytest.raises(WorkerDiedError, match=r"died during stop_in_a_task\(\).*sys\.exit\(3\)"):
        group.stop_in_a_task(wait=True)


def test_death_reaches_the_consumers_of_a_future(make):
    producer, consumer = make(world_size=2), make(Counter, world_size=2)
    with pytest.raises(WorkerDiedError, match=r"rank 0 died during stop\(\)"):
        consumer.echo(producer.stop.remote("exit", [0]))
    assert consumer.add(0) == [0, 1]


def test_error_of_length_0_reaches_the_consumers_of_a_future(make):
    producer, consumer = make(world_size=2), make(Counter, world_size=2)
    failed = producer.stop.remote(BadRows, [0])
    with pytest.raises(BadRows, match=r"stop\(\) raised .*BadRows on rank 0"):
        consumer.echo.remote(failed).result(timeout=5)
    assert consumer.add(0) == [0, 1]


def test_restart_repeats_a_call_that_has_just_been_sent(make, monkeypatch):
    """The restart of another thread, before the thread that has sent the call goes on."""
    group = make(Model, size=7)
    send = group._send

    def restarted(*args, **options):
        monkeypatch.undo()
        call = send(*args, **options)
        call.wait()
        group.restart()
        return call

    monkeypatch.setattr(group, "_send", restarted)
    group.load_checkpoint([1, 2, 3, 4])
    assert [log for _, _, log in group.read()] == [[("load", [1 + rank])] for rank in range(4)]


class Prepared(Worker):
    fails = False

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def prepare(self, state):
        if Prepared.fails:
            raise ValueError("no such state")


def test_repeated_call_that_fails_with_a_future_says_to_pass_its_value(make, monkeypatch):
    group = make(Prepared, world_size=1)
    group.prepare(group.prepare.remote(None))
    monkeypatch.setattr(Prepared, "fails", True)
    with pytest.raises(WorkerError, match="no such state") as caught:
        group.restart()
    assert "pass future.result() instead" in caught.value.__notes__[-1]


def test_partial_restart_with_collectives_is_rejected(make):
    group = make(world_size=2)
    with pytest.raises(ValueError, match=r"restart\(ranks=\[1\]\).*collectives=False") as caught:
        group.restart(ranks=[1])
    assert "replace" not in str(caught.value) and "Restart all ranks" in str(caught.value)
    for wrong in ([2], [-1], [0, 0], [1.0], [True], [[0]], 1, []):
        with pytest.raises(ValueError, match="distinct ranks from 0 to 1"):
            group.restart(ranks=wrong)
    assert group.broken is None


def test_timeout_without_threads_is_checked_afterwards_per_rank():
    with LocalWorkerGroup(4, ClassWithInitArgs(Probe)) as group:
        assert group.sleep.options(timeout=0.3)(0.1) == [0, 1, 2, 3]
        with pytest.raises(CallTimeoutError, match=r"sleep\(\) exceeded its timeout of 0\.3 s; rank 2 had") as caught:
            group.sleep.options(timeout=0.3)(0.4, ranks=[2])
        assert caught.value.ranks == (2,) and not caught.value.call_goes_on
        with pytest.raises(GroupBrokenError, match="exceeded its timeout"):
            group.sleep(0)
        group.restart()
        assert group.sleep(0) == [0, 1, 2, 3]


def test_constructor_exceeds_the_start_timeout(threads):
    with pytest.raises(CallTimeoutError, match=r"__init__\(\) exceeded its timeout of 0\.1 s; rank 1 had not finished"):
        LocalWorkerGroup(2, ClassWithInitArgs(Probe, slow=1), threads=threads, start_timeout=0.1)


# --- What a local group rejects ------------------------------------------------------------------------------


class TestCollectives:
    def test_collectives_between_ranks_are_rejected_at_once(self, make):
        group = make(world_size=2)
        with within(2):
            for call in (group.join_process_group, group.join_in_a_coroutine, group.address):
                with pytest.raises(
                    WorkerError, match=r"in one process, so they cannot use collectives.*world_size=1"
                ) as error:
                    call()
                assert isinstance(error.value.__cause__, LocalGroupError)
        assert not torch.distributed.is_initialized()
        assert group.sleep(0) == [0, 1]

    def test_collectives_in_a_constructor_are_rejected(self, threads):
        with pytest.raises(StartError, match="so they cannot use collectives"):
            LocalWorkerGroup(2, ClassWithInitArgs(JoinsAtStart), threads=threads)

    def test_failed_start_leaves_no_process_group(self, threads):
        alone, failing = ClassWithInitArgs(JoinsAtStart), ClassWithInitArgs(FailsWhenItHasJoined)
        for made in (failing, colocate({"alone": alone, "failing": failing})):
            with pytest.raises(StartError, match="after it has joined"):
                LocalWorkerGroup(1, made, threads=threads)
            assert not torch.distributed.is_initialized()
        # Nor in a process of its own, where `replace` may run the constructors again.
        roles = {"alone": (JoinsAtStart, (), {}), "failing": (FailsWhenItHasJoined, (), {})}
        result = Executor("host", None).start(RankInfo(0, 1, 0, 1, "127.0.0.1", 0), lambda: roles)
        assert result.failure.role == "failing" and not torch.distributed.is_initialized()

    def test_constructor_that_ends_after_the_start_timeout_leaves_no_process_group(self):
        with pytest.raises(CallTimeoutError, match=r"__init__\(\) exceeded"):
            LocalWorkerGroup(1, ClassWithInitArgs(JoinsLate), threads=True, start_timeout=0.05)
        wait_until(lambda: JoinsLate.joined, 10)
        wait_until(lambda: not torch.distributed.is_initialized(), 10)

    def test_group_of_one_supports_collectives(self, make):
        group = make(world_size=1)
        assert group.join_process_group() == [(0, 1, 3.0)] == group.join_process_group()
        group.restart()  # ends the process group of the old worker
        assert not torch.distributed.is_initialized()
        assert group.join_process_group() == [(0, 1, 3.0)]
        group.close()
        assert not torch.distributed.is_initialized()

    def test_groups_of_one_share_a_process_group_until_the_last_is_closed(self, make):
        first, second = make(world_size=1), make(world_size=1)
        assert first.join_process_group() == [(0, 1, 3.0)] == second.join_process_group()
        first.close()
        assert torch.distributed.is_initialized()
        second.close()
        assert not torch.distributed.is_initialized()

    def test_foreign_process_group_is_not_destroyed(self, make):
        group = make(world_size=1)
        group.join_process_group()
        torch.distributed.destroy_process_group()
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            group.close()
            assert torch.distributed.is_initialized()
        finally:
            torch.distributed.destroy_process_group()

    def test_torch_alone_finds_no_rank_in_the_environment(self, make, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)
        original = torch.distributed.init_process_group
        with pytest.raises(WorkerError, match="environment variable RANK expected, but not set"):
            make(world_size=2).join_with_torch_alone()
        assert torch.distributed.init_process_group is original

    def test_address_of_a_group_of_one_is_free_for_a_process_group(self, make):
        group = make(world_size=1)
        [(address, port)] = group.address()
        try:
            options = {"init_method": f"tcp://{address}:{port}", "rank": 0, "world_size": 1}
            assert address == "127.0.0.1" and group.join_with_torch_alone(**options) == [1]
        finally:
            torch.distributed.destroy_process_group()


def logged(method):
    def inner(*args, **kwargs):  # without functools.wraps, as verl's GPUMemoryLogger
        return method(*args, **kwargs)

    return inner


class Logged(Worker):
    @register(Dispatch.ONE_TO_ALL)
    @logged
    def first(self):
        return "first"

    @register(Dispatch.ONE_TO_ALL)
    @logged
    def second(self):
        return "second"


def test_methods_under_a_plain_wrapper_are_told_apart(make):
    group = make(Logged, world_size=1)
    assert group.on(Logged.first)() == ["first"] and group.on(Logged.second)() == ["second"]


@pytest.mark.parametrize("name", ["workers", "worker_names", "resource_pool", "detached", "master_port", "shrink"])
def test_attributes_of_ray_groups_are_missing(make, name):
    with pytest.raises(AttributeError, match=rf"a LocalWorkerGroup has no {name}: "):
        getattr(make(), name)


def test_names_of_ray_groups_are_reserved():
    """Otherwise, a worker whose method has such a name would work here, and be refused on Ray."""
    public = {name for name in dir(RayWorkerGroup) if not name.startswith("_")}
    assert public - {*dir(LocalWorkerGroup)} == {"takeover_data"}  # which a script may set here too
    members = {"grow": register(Dispatch.ONE_TO_ALL)(lambda self: None)}
    with pytest.raises(DispatchError, match=r"registers grow\(\), but the worker group uses this name itself"):
        LocalWorkerGroup(1, ClassWithInitArgs(type("Grower", (Worker,), members)))


def test_local_group_cannot_leave_its_process(make):
    with pytest.raises(TypeError, match="driver's process"):
        pickle.dumps(make())
    for call in (LocalWorkerGroup.attach, LocalWorkerGroup.from_detached):
        with pytest.raises(TypeError, match="nobody else can attach"):
            call("name")


@pytest.mark.parametrize(
    ("size", "made", "options", "error", "told"),
    [
        (0, None, {}, ValueError, "world_size is the number of ranks, a positive.*got 0"),
        (True, None, {}, ValueError, "world_size.*got True"),
        ("2", None, {}, ValueError, "world_size.*got '2'"),
        (2, Counter, {}, TypeError, r"ray_cls_with_init must be .*ClassWithInitArgs\(YourWorker"),
        (
            2,
            None,
            {"worker_env": {"A": "1"}},
            ValueError,
            r"worker_env: .*share the environment of the driver's process; set os\.environ",
        ),
        (2, None, {"name_prefix": 1}, ValueError, "name_prefix is a string or None"),
        (2, None, {"detached": True}, TypeError, "detached"),
    ],
)
def test_invalid_options(size, made, options, error, told):
    with pytest.raises(error, match=told):
        LocalWorkerGroup(size, made or ClassWithInitArgs(Counter), **options)


def test_group_that_is_closed_while_a_call_runs_in_the_callers_thread():
    with LocalWorkerGroup(2, ClassWithInitArgs(Fragile)) as group:
        closing = threading.Timer(0.1, group.close)
        closing.start()
        with pytest.raises(GroupClosedError):
            group.sleep(0.4)
        closing.join()
        assert group._state.deaths == []


class Scores(RolloutWorker):
    def generate(self, *given):
        return super().generate(*given)

    @register(Dispatch.ONE_TO_ALL)
    def score(self):
        return 1


class SentMeanwhile(Future):
    """Another thread sends the call after the first look."""

    def done(self):
        looked, self.looked = getattr(self, "looked", False), True
        return looked


def test_future_of_a_call_that_is_sent_meanwhile_is_not_done():
    with LocalWorkerGroup(2, ClassWithInitArgs(Gate), threads=True) as group:
        running = group.wait.remote(30)
        sending = SentMeanwhile()
        sending.set_result(running._call)
        future = WorkerFuture(None, sending=("Gate.wait", sending))
        assert not future.done() and not future.done()
        assert repr(future).endswith("running>")
        group.open()
        assert future.result() == [True, True] and future.done() and repr(future).endswith("done>")


def test_call_that_ends_while_its_late_ranks_are_asked_where_they_are(monkeypatch):
    monkeypatch.setattr("single_controller.call.call.ASK_AFTER_SECONDS", 0.01)
    with LocalWorkerGroup(2, ClassWithInitArgs(Gate), threads=True) as group:
        future = group.wait.remote(30)

        def stacks(ranks, seconds):
            group.open()
            future.wait()
            return {}

        monkeypatch.setattr(group._transport, "stacks", stacks)
        assert future.result(timeout=0.01) == [True, True]


def test_future_can_be_printed_in_a_fork(monkeypatch):
    with LocalWorkerGroup(1, ClassWithInitArgs(Gate), threads=True) as group:
        future = group.wait.remote(30)
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: -1)
            assert repr(future).endswith("running>")
        group.open()
        future.result()


def test_options_of_a_class_are_set_by_its_methods_alone():
    made = RayClassWithInitArgs(Counter)
    made.update_options({"num_cpus": 0.5})
    made.set_additional_resource({"disk": 1})
    made.options["num_cpu"] = 1
    made.additional_resource["disk"] = -1
    assert (made.options, made.additional_resource) == ({"num_cpus": 0.5}, {"disk": 1})
    with pytest.raises(AttributeError):
        made.python = "venv/bin/python"  # set_python() makes it absolute, and checks it


@dataclass
class Node:
    parent: Any = None


class Echo(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def contains_itself(self, x):
        return (x.parent.parent if isinstance(x, Node) else x[0]) is x


def test_argument_that_contains_itself():
    child, table, items = Node(), {}, []
    child.parent, table[0] = Node(child), table
    items.append(items)
    with LocalWorkerGroup(1, ClassWithInitArgs(Echo)) as group:
        assert [group.contains_itself(x) for x in (child, table, items)] == [[True]] * 3
        future = group.contains_itself.remote(items)
        for x in ({0: table, 1: future}, [items, future]):
            assert group.contains_itself(x) == [False]
        items.append(future)  # which no copy of the list can be without
        table[1] = future
        for x in (items, table):
            with pytest.raises(DispatchError, match=r"'x', a (list|dict) .*or that contains itself.*future\.result"):
                group.contains_itself(x)


def test_methods_of_the_user_come_first():
    with LocalWorkerGroup(1, RayClassWithInitArgs(Scores, EchoEngine)) as group:
        names = list(group.methods)
        assert set(names[:2]) == {"generate", "score"} and "exchange" in names[2:] and len(names) == len(set(names))
        assert dir(group.methods) == sorted(names) and repr(group.methods).startswith(f"<methods: {names[0]}, ")
        assert "score" in group.methods and "nothing" not in group.methods
        assert list(copy.copy(group.methods)) == names


def test_mapped_call_is_repeated_after_a_restart():
    with LocalWorkerGroup(2, ClassWithInitArgs(Model, size=7), collectives=False) as group:
        list(group.map("load_checkpoint", [[1, 2], [3, 4]]))
        group.restart()
        assert [log for _, _, log in group.read()] == [[("load", [3])], [("load", [4])]]


class Moves(Worker):
    """Rank 1 ends itself once. The next workers have each other's coordinates."""

    def __init__(self):
        super().__init__()
        self.register_layout(dp=(self.rank + self.generation) % 2)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def rows(self, rows):
        if self.rank == 1 and not self.generation:
            sys.exit("once")
        return [(self.rank, row) for row in rows]


def test_mapped_batch_is_cut_for_the_layout_of_new_workers(make):
    assert list(make(Moves, world_size=2).map("rows", [[5, 6], [7, 8]], retries=1)) == [
        [(1, 5), (0, 6)],
        [(1, 7), (0, 8)],
    ]


def test_call_is_planned_again_if_another_thread_restarts_the_workers_meanwhile(make, monkeypatch):
    """After the former ones have told their layout."""
    group = make(Moves, world_size=2)

    def restarted(reports):
        monkeypatch.undo()
        group.restart()
        return layout_from(reports)

    monkeypatch.setattr("single_controller.call.group.layout_from", restarted)
    assert group.rows([5, 6]) == [(1, 5), (0, 6)]


class Unreported(Worker):
    """After its method has failed, it cannot say where it is: as with process groups that are half made."""

    failed = False

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        self.failed = True
        raise KeyError("of the method")

    def _report(self):
        if self.failed:
            raise ValueError("no layout")
        return super()._report()


def test_error_of_a_method_after_which_there_is_no_layout(make):
    group = make(Unreported)
    for _ in range(2):
        with pytest.raises(KeyError, match="of the method"):
            group.fail.options(timeout=5)()


class StartsOnce(Worker):
    def __init__(self):
        super().__init__()
        if self.generation:
            raise RuntimeError("no second start")


def test_ranks_that_a_failed_restart_has_ended(make):
    """They are not alive, and what has ended them is no death."""
    group = make(StartsOnce)
    with pytest.raises(StartError, match="no second start"):
        group.restart()
    assert group.alive() == [rank.alive for rank in group.status().ranks] == [False] * 4
    assert group.broken and group.status().last_death is None


def test_death_that_a_restart_repairs_while_it_is_looked_for(monkeypatch):
    """Because a result was lost. The control store may answer late."""
    with LocalWorkerGroup(2, ClassWithInitArgs(Counter)) as group:
        call, before = group.add.remote(0)._call, group._transport

        def deaths():
            group.restart()
            before.restarted, before.ended = frozenset(), True  # as on Ray
            return {0: "it was killed"}

        monkeypatch.setattr(before, "deaths", deaths)
        assert call._death_of(ResultError("lost", rank=0)) is None
        assert group.broken is None and group.add(0) == [0, 1]


def test_each_check_of_a_call_raises_an_error_of_its_own():
    """Whose traceback, and with it the variables of who waits, goes with it."""
    with LocalWorkerGroup(1, ClassWithInitArgs(Probe)) as group:
        future, errors = group.stop.remote(ValueError, [0]), []
        assert isinstance(future.exception(), WorkerError)
        for _ in range(2):
            with pytest.raises(WorkerError, match="of the method") as caught:
                future._call.check()
            errors.append(caught.value)
        assert errors[0] is not errors[1] and future._call.error.__traceback__ is None
        assert errors[0].__cause__ is errors[1].__cause__ is Probe.raised


def test_workers_know_their_generation():
    with LocalWorkerGroup(2, ClassWithInitArgs(Counter), collectives=False) as group:

        def generations():
            return group.execute_with_func_generator(lambda worker: worker.generation)

        assert generations() == [0, 0]
        group.restart()
        assert generations() == [1, 1]
        group.restart(ranks=[1])
        assert generations() == [1, 2]


def test_on_death_that_raises_does_not_hide_the_next_death(make):
    group, told = make(), []

    def on_death(error):
        told.append(error.ranks)
        raise RuntimeError("of the callback")

    with group.watch(on_death, interval=0.3):
        group._state.deaths += [(0, WorkerDiedError("a", ranks=(0,))), (0, WorkerDiedError("b", ranks=(1,)))]
        wait_until(lambda: len(told) == 2, 20)
    assert told == [(0,), (1,)]
    with pytest.raises(TypeError, match=r"on_death is 1\.0; pass a function"):
        group.watch(1.0)


def test_exception_returns_what_collect_fn_raised():
    with LocalWorkerGroup(2, ClassWithInitArgs(Kit)) as group:
        assert isinstance(group.collected_badly.remote(((1,), {})).exception(), LookupError)
