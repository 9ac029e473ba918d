"""What is special about a group in the driver's own process. What it shares with Ray's, the other files test."""

import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from group_workers import Actor, Counter, Critic, Fragile, Gate, Grid, Log, Model

from single_controller import (
    Broadcast,
    CallTimeoutError,
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    LocalEngineError,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    SingleControllerError,
    StartError,
    Worker,
    WorkerDiedError,
    WorkerError,
    colocate,
    register,
)

ROOT = Path(__file__).resolve().parents[2]
BARRIER = threading.Barrier(2)


class Probe(Worker):
    """One method for each thing that is to be found out."""

    raised = None

    def __init__(self, size=4, slow=None):
        super().__init__()
        self.weights = torch.zeros(size)
        if self.rank == slow:
            time.sleep(0.2)

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return (self.rank, self.world_size, self.local_rank, self.local_world_size, self.device_ids)

    @register(Dispatch.ONE_TO_ALL)
    def thread(self):
        return threading.current_thread().name

    @register(Dispatch.ONE_TO_ALL)
    async def thread_async(self):
        await asyncio.sleep(0)
        return threading.current_thread().name

    @register(Dispatch.ONE_TO_ALL)
    def address(self):
        return (self.master_addr, self.master_port)

    @register(Dispatch.ONE_TO_ALL)
    def environment(self):
        return [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ]

    @register(Dispatch.ONE_TO_ALL)
    def meet(self):
        BARRIER.wait(5)
        return self.rank

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
    def sleep(self, seconds, ranks=None):
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def join_process_group(self, **options):
        torch.distributed.init_process_group("gloo", **options)
        total = torch.ones(3)
        torch.distributed.all_reduce(total)
        return (torch.distributed.get_rank(), torch.distributed.get_world_size(), float(total.sum()))

    @register(Dispatch.ONE_TO_ALL)
    def join_as_torch_imports_it(self):
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (self.world_size,)).size()

    @register(Dispatch.ONE_TO_ALL)
    async def join_in_a_coroutine(self):
        torch.distributed.init_process_group("gloo")


class HasItsOwnGroup(Worker):
    """Makes a group inside its constructor, and a worker after that."""

    def __init__(self):
        super().__init__()
        with LocalWorkerGroup(3, ClassWithInitArgs(Counter)) as inner:
            self.inner = inner.add(0)
        self.helper = Worker()

    @register(Dispatch.ONE_TO_ALL)
    def say(self):
        return (self.rank, self.inner, self.helper.rank)


@pytest.fixture(params=[False, True], ids=["in-turn", "threads"])
def threads(request):
    return request.param


@pytest.fixture
def make(threads):
    """Makes groups of Probes, or of something else, that are closed after the test."""
    groups = []

    def make(cls=Probe, *args, world_size=4, options=None, **kwargs):
        made = ClassWithInitArgs(cls, *args, **kwargs)
        groups.append(LocalWorkerGroup(world_size, made, threads=threads, **(options or {})))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def ours():
    """Threads of groups in this process."""
    return [t.name for t in threading.enumerate() if t.name.startswith(("local-rank", "worker-loop"))]


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


# --- A debugger ----------------------------------------------------------------------------------------------

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
    answers = group.work(21)
    print("answers", answers)
"""


def debug(tmp_path, commands, inside="pass", before="pass", **environment):
    """Run the script with a debugger's commands on its standard input."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(inside=inside, before=before))
    return subprocess.run(
        [sys.executable, str(script)],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        # Ray, which other tests start in this process, takes breakpoint() for its own debugger by this variable.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONBREAKPOINT": "", **environment},
    )


def test_a_breakpoint_stops_inside_the_method_below_the_drivers_line(tmp_path):
    commands = ["p self.rank, x", "next", "p doubled", "where", "continue", "p self.rank", "continue"]
    done = debug(tmp_path, commands, inside="breakpoint()")
    assert done.returncode == 0, done.stderr
    assert "(0, 21)" in done.stdout and "(Pdb) 42" in done.stdout and "(Pdb) 1\n" in done.stdout
    assert "<module>()\n-> answers = group.work(21)" in done.stdout
    assert done.stdout.rstrip().endswith("answers [42, 43]")


def test_quit_gets_out_of_the_call(tmp_path):
    done = debug(tmp_path, ["quit"], inside="breakpoint()")
    assert done.returncode == 1 and done.stderr.rstrip().endswith("bdb.BdbQuit")
    assert "WorkerError" not in done.stderr and "answers = group.work(21)" in done.stderr


@pytest.mark.parametrize("hook", [False, True], ids=["set_trace", "PYTHONBREAKPOINT"])
def test_a_step_goes_from_the_drivers_line_into_the_method_of_each_rank(tmp_path, hook):
    name = "single_controller.local.set_trace"
    before = "breakpoint()" if hook else "import single_controller.local; single_controller.local.set_trace()"
    steps = ["step", "p self.rank", "return", "step", "p self.rank", "return", "step", "continue"]
    done = debug(tmp_path, steps, before=before, **({"PYTHONBREAKPOINT": name} if hook else {}))
    assert done.returncode == 0, done.stderr
    stops = [line for line in done.stdout.splitlines() if line.startswith("-> ")]
    assert stops == [
        "-> answers = group.work(21)",
        "-> @register(Dispatch.ONE_TO_ALL)",
        "-> return doubled + self.rank",
        "-> @register(Dispatch.ONE_TO_ALL)",
        "-> return doubled + self.rank",
        '-> print("answers", answers)',
    ]
    assert "(Pdb) 0\n" in done.stdout and "(Pdb) 1\n" in done.stdout and "answers [42, 43]" in done.stdout


def test_a_break_point_at_a_line_of_the_method(tmp_path):
    done = debug(tmp_path, ["break script.py:8", "continue", "p x", "clear 1", "continue"], before="breakpoint()")
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 21\n" in done.stdout and "answers [42, 43]" in done.stdout


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemError], ids=lambda kind: kind.__name__)
def test_ctrl_c_gets_out_and_the_group_answers_afterwards(error):
    with LocalWorkerGroup(3, ClassWithInitArgs(Probe)) as group:
        expected = error if error is KeyboardInterrupt else WorkerError
        with pytest.raises(expected):
            group.stop(error, [1])
        assert group.sleep(0) == [0, 1, 2]


def test_post_mortem_has_the_frames_of_the_method(make):
    with pytest.raises(WorkerError) as caught:
        make().stop(ValueError, [2])
    cause = caught.value.__cause__
    assert cause is Probe.raised
    frames = []
    trace = cause.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    assert frames[-1].f_code.co_name == "stop" and frames[-1].f_locals["self"].rank == 2
    told = caught.value.remote_traceback.splitlines()
    assert told[0].startswith("Traceback") and "test_local.py" in told[1] and "in stop" in told[1]


def test_it_takes_milliseconds():
    """The best of three: the machine is noisy."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        with LocalWorkerGroup(2, ClassWithInitArgs(Counter, start=1)) as group:
            assert group.add(1) == [2, 3]
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05


def test_ray_is_not_started_and_the_environment_stays_as_it_was(tmp_path):
    code = """
        import os
        import ray
        before = dict(os.environ)
        from single_controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, register

        class Mine(Worker):
            @register(Dispatch.DP_COMPUTE_PROTO)
            def rows(self, batch):
                return [row + self.rank for row in batch]

        for threads in (False, True):
            with LocalWorkerGroup(2, ClassWithInitArgs(Mine), threads=threads) as group:
                assert group.rows(group.rows.remote([1, 2, 3, 4])) == [1, 2, 5, 6]
        print(ray.is_initialized(), dict(os.environ) == before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


# --- Ranks and threads ---------------------------------------------------------------------------------------


def test_a_rank_knows_where_it_stands_and_the_environment_does_not(make):
    group = make(world_size=3)
    assert group.where() == [(rank, 3, rank, 3, ()) for rank in range(3)]
    assert group.environment() == [[name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ]] * 3


def test_ranks_run_in_the_callers_thread_or_in_one_each(make, threads):
    group = make(world_size=2)
    here = threading.current_thread().name
    assert group.thread() == (["local-rank-0", "local-rank-1"] if threads else [here] * 2)
    assert group.thread_async() == ["worker-loop"] * 2


def test_ranks_with_threads_overlap():
    with LocalWorkerGroup(2, ClassWithInitArgs(Probe), threads=True) as group:
        assert group.meet() == [0, 1]
        begin = time.monotonic()
        future = group.sleep.remote(0.3)
        assert not future.done() and time.monotonic() - begin < 0.2
        assert future.result() == [0, 1]


def test_one_rank_after_the_other_has_ended_when_the_call_returns():
    with LocalWorkerGroup(2, ClassWithInitArgs(Log)) as group:
        group.note.remote("first", 0.05)
        future = group.note.remote("second")
        assert future.done() and group.read() == [["first", "second"]] * 2


def test_time_goes_to_the_phase_that_took_it_where_ranks_run_in_turn():
    with LocalWorkerGroup(2, ClassWithInitArgs(Probe)) as group:
        group.sleep(0.1)
        phases = group.stats().calls[-1].phases()
    assert phases["dispatch"] < 0.05 and 0.1 <= phases["method"] < 0.2
    assert phases["queue"] >= 0.1, "the second rank waited for the first"


def test_a_concurrent_method_has_its_turn_where_nothing_overlaps():
    with LocalWorkerGroup(2, ClassWithInitArgs(Gate)) as group:
        assert group.open() == [True] * 2 and group.wait(0) == [True] * 2


def test_several_threads_of_a_driver(make):
    group = make(Log)
    sending = [threading.Thread(target=lambda k=k: [group.note((k, n)) for n in range(20)]) for k in range(3)]
    for thread in sending:
        thread.start()
    for thread in sending:
        thread.join(20)
    logs = group.read()
    assert len(logs[0]) == 60 and all(log == logs[0] for log in logs)


def test_no_thread_is_left_after_close_or_when_the_group_is_dropped(make):
    before = ours()
    group = make()
    group.thread_async()
    group.close()
    until(lambda: ours() == before)
    dropped = LocalWorkerGroup(3, ClassWithInitArgs(Probe), threads=True)
    dropped.thread_async()
    assert len(ours()) == len(before) + 6
    del dropped
    until(lambda: ours() == before)


def test_a_group_in_a_workers_constructor(make):
    assert make(HasItsOwnGroup, world_size=2).say() == [(0, [0, 1, 2], 0), (1, [0, 1, 2], 1)]


# --- What arguments and answers are --------------------------------------------------------------------------


def test_each_rank_writes_into_its_own_copy(make):
    tensor, array = torch.ones(1000), np.ones(1000)
    assert make().write(tensor, array) == [(1000.0, 1000.0)] * 4
    assert float(tensor.sum()) == 1000 and float(array.sum()) == 1000


def test_a_view_is_shared_by_the_ranks_and_not_with_the_driver():
    tensor = torch.zeros(1000)
    with LocalWorkerGroup(4, ClassWithInitArgs(Probe)) as group:
        assert group.write_into_view(tensor) == [1, 2, 3, 4]
    assert float(tensor.sum()) == 0


def test_what_the_driver_does_after_the_call_reaches_nobody(make):
    group = make(world_size=2)
    tensor = torch.ones(1000)
    group.sleep.remote(0.1)
    future = group.read.remote(tensor)
    tensor.zero_()
    assert future.result() == [1000.0] * 2


def test_answers_are_the_drivers_own(make):
    group = make(world_size=2)
    now, later = group.share(), group.share.remote()
    later.result()
    group.change(5)
    assert [float(t.sum()) for t in now + later.result()] == [0] * 4
    now[0].fill_(7)
    assert [float(t.sum()) for t in group.share()] == [20, 20]


def test_constructor_arguments_are_each_ranks_own(make):
    axes = {"dp": [0, 1]}
    group = make(Grid, axes, world_size=2)
    group.execute_all_sync("stand")
    axes["dp"][0] = 99
    assert group.compute(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group.execute_with_func_generator(lambda worker: id(worker.axes["dp"])) != [id(axes["dp"])] * 2


@pytest.mark.parametrize("kind", [ClassWithInitArgs, RayClassWithInitArgs])
def test_what_ray_could_not_carry_is_refused(kind, threads):
    with pytest.raises(DispatchError, match=r"Counter\(\): 'start', a lock, cannot be pickled.*Nothing was sent"):
        LocalWorkerGroup(2, kind(Counter, start=threading.Lock()), threads=threads)
    with LocalWorkerGroup(2, kind(Counter), threads=threads) as group:
        with pytest.raises(DispatchError, match=r"echo\(\): argument 'value', a lock, cannot be pickled"):
            group.echo(threading.Lock())
        with pytest.raises(DispatchError, match=r"echo\(\): argument 'value', a LocalWorkerGroup, cannot be pickled"):
            group.echo(group)
        with pytest.raises(WorkerError, match=r"the result of apply\(\), a generator, cannot be pickled"):
            group.apply(lambda worker, rows: (row for row in rows), [1, 2])


# --- Futures between engines ---------------------------------------------------------------------------------


@pytest.mark.engines("ray")
def test_a_future_of_ray_goes_into_a_group_of_this_process(counters, make):
    here = make(Counter, world_size=2)
    assert here.double(counters.double.remote(torch.arange(8))).tolist() == [4 * row for row in range(8)]
    assert here.echo(counters.add.remote(0)) == [[100, 101, 102, 103]] * 2
    assert here.echo(counters.execute_rank_zero_async("plain", 1)) == [101] * 2


@pytest.mark.engines("ray")
def test_a_future_of_this_process_does_not_go_to_ray(counters, make):
    future = make(Counter, world_size=2).add.remote(0)
    told = r"LocalEngineError: the answers of add\(\) are in the driver's process.*pass future\.result\(\)"
    with pytest.raises(DispatchError, match=told):
        counters.echo(future)
    with pytest.raises(DispatchError, match=r"LocalEngineError.*pass ref\.get\(\)"):
        counters.echo(future.refs[0])
    assert counters.echo(future.result()) == [[0, 1]] * 4


def test_futures_do_not_pickle_elsewhere(make):
    with pytest.raises(LocalEngineError, match="driver's process"):
        pickle.dumps(make(Counter).add.remote(0))


def test_a_future_that_never_comes_ends_a_call_that_runs_in_turn():
    """The ranks of the second group run in this thread, and wait for nobody."""
    with (
        LocalWorkerGroup(2, ClassWithInitArgs(Fragile), threads=True) as producer,
        LocalWorkerGroup(2, ClassWithInitArgs(Counter)) as consumer,
    ):
        late = producer.sleep_on.options(timeout=0.2).remote([1], 20)
        with pytest.raises(CallTimeoutError, match=r"sleep_on\(\) passed its timeout.*rank 1"):
            consumer.echo(late)
        assert consumer.add(0) == [0, 1] and producer.broken


def test_a_reference_waits_for_its_own_rank_alone():
    with LocalWorkerGroup(2, ClassWithInitArgs(Probe), threads=True) as group:
        fast, slow = group.execute_all_async("sleep", 0.5, Broadcast([1]))
        assert fast.get(0.3) == 0
        with pytest.raises(CallTimeoutError):
            slow.get(0)
        assert slow.get() == 1
        failing = group.execute_all_async("stop", ValueError, Broadcast([0]))
        with pytest.raises(ValueError, match="of the method"):
            failing[0].get()


# --- Errors, deaths, time ------------------------------------------------------------------------------------


def test_a_constructor_that_raises(threads):
    before = ours()
    with pytest.raises(StartError, match=r"__init__\(\) raised RuntimeError on rank 2.*chosen rank") as caught:
        LocalWorkerGroup(4, ClassWithInitArgs(Fragile, fail_rank=2), threads=threads)
    assert caught.value.rank == 2 and isinstance(caught.value.__cause__, RuntimeError)
    until(lambda: ours() == before)


def test_sys_exit_is_the_death_of_a_rank(make):
    group = make()
    told = []
    with group.watch(on_death=told.append, interval=0.05):
        future = group.stop.remote("exit", [1])
        with pytest.raises(WorkerDiedError, match=r"rank 1 died during stop\(\).*sys\.exit\(3\)") as caught:
            future.result()
        assert caught.value.ranks == (1,) and group.alive() == [True, False, True, True]
        with pytest.raises(GroupBrokenError, match=r"rank 1 died.*restart\(\)"):
            group.sleep(0)
        until(lambda: told)
    assert told[0].ranks == (1,)
    group.restart()
    assert group.sleep(0) == [0, 1, 2, 3] and group.alive() == [True] * 4


def test_a_death_reaches_who_has_its_future(make):
    producer, consumer = make(world_size=2), make(Counter, world_size=2)
    with pytest.raises(WorkerDiedError, match=r"rank 0 died during stop\(\)"):
        consumer.echo(producer.stop.remote("exit", [0]))
    assert consumer.add(0) == [0, 1]


def test_restart_replays(make):
    group = make(Model, size=7, options={"collectives": False})
    group.init_model("a")
    group.load_checkpoint([1, 2, 3, 4])
    group.train()
    group.restart()
    assert [log for _, _, log in group.read()] == [[("init", "a"), ("load", [1 + rank])] for rank in range(4)]
    group.train()
    group.restart(ranks=[3])
    logs = [log for _, _, log in group.read()]
    assert logs[3] == [("init", "a"), ("load", [4])] and ("train", None) in logs[0]


def test_a_call_without_a_wait_is_replayed_too_where_ranks_run_in_turn():
    with LocalWorkerGroup(2, ClassWithInitArgs(Model, size=7)) as group:
        group.init_model.remote("a")
        group.restart()
        assert [log for _, _, log in group.read()] == [[("init", "a")]] * 2


def test_some_ranks_alone_only_where_ray_would(make):
    group = make(world_size=2)
    with pytest.raises(ValueError, match=r"restart\(ranks=\[1\]\).*collectives=False"):
        group.restart(ranks=[1])
    with pytest.raises(ValueError, match="distinct ranks of the group"):
        group.restart(ranks=[2])


def test_a_timeout_counts_afterwards_and_for_each_rank_where_ranks_run_in_turn():
    with LocalWorkerGroup(4, ClassWithInitArgs(Probe)) as group:
        assert group.sleep.options(timeout=0.15)(0.05) == [0, 1, 2, 3]
        with pytest.raises(CallTimeoutError, match=r"sleep\(\) passed its timeout of 0\.05 s; rank 2 had") as caught:
            group.sleep.options(timeout=0.05)(0.1, ranks=[2])
        assert caught.value.ranks == (2,) and not caught.value.call_goes_on
        with pytest.raises(GroupBrokenError, match="passed its timeout"):
            group.sleep(0)
        group.restart()
        assert group.sleep(0) == [0, 1, 2, 3]


def test_constructors_that_take_too_long(threads):
    with pytest.raises(CallTimeoutError, match=r"__init__\(\) passed its timeout of 0\.1 s; rank 1 had not ended"):
        LocalWorkerGroup(2, ClassWithInitArgs(Probe, slow=1), threads=threads, start_timeout=0.1)


def test_a_thread_that_is_stuck_is_left_and_its_group_begins_anew():
    with LocalWorkerGroup(2, ClassWithInitArgs(Probe), threads=True) as group:
        with pytest.raises(CallTimeoutError, match="rank 1"):
            group.sleep.options(timeout=0.1)(1.0, ranks=[1])
        with pytest.raises(GroupBrokenError):
            group.sleep(0)
        group.restart()
        assert group.sleep(0) == [0, 1]


def test_a_closed_group(make):
    group = make()
    group.close()
    group.close()
    assert group.alive() == [False] * 4
    for call in (lambda: group.sleep(0), group.restart, lambda: group.execute_all_sync("sleep", 0)):
        with pytest.raises(GroupClosedError, match="closed"):
            call()


def test_roles(threads):
    roles = {"actor": ClassWithInitArgs(Actor, start=1), "critic": RayClassWithInitArgs(Critic, start=100)}
    with LocalWorkerGroup(2, colocate(roles), threads=threads) as group:
        assert group.actor.add(1) == [2, 2] and group.critic.add_later(1) == [101, 101]
        assert group.critic.take() == [(2, True, "Actor")] * 2
        with pytest.raises(WorkerError, match=r"critic\.fail\(\) raised ValueError.*the cause in Critic") as caught:
            group.critic.fail()
        assert caught.value.role == "critic"
        with pytest.raises(AttributeError, match="no actors"):
            group.critic.workers  # noqa: B018
        group.critic.restart()
        assert group.actor.add(0) == [1, 1]


# --- What it refuses -----------------------------------------------------------------------------------------


class TestCollectives:
    def test_between_ranks_they_are_refused_at_once(self, make):
        group = make(world_size=2)
        original = torch.distributed.init_process_group
        begin = time.monotonic()
        for call in (
            group.join_process_group,
            lambda: group.join_process_group(init_method="tcp://127.0.0.1:1", rank=0, world_size=2),
            group.join_as_torch_imports_it,
            group.join_in_a_coroutine,
            group.address,
        ):
            with pytest.raises(WorkerError, match=r"in one process, so there are no.*world_size=1") as error:
                call()
            assert isinstance(error.value.__cause__, LocalEngineError)
        assert time.monotonic() - begin < 2
        assert torch.distributed.init_process_group is original and not torch.distributed.is_initialized()
        assert group.sleep(0) == [0, 1]

    def test_in_a_constructor(self, threads):
        from group_workers import OnMeshes

        with pytest.raises(StartError, match="there are no collectives between them"):
            LocalWorkerGroup(2, ClassWithInitArgs(OnMeshes), threads=threads)

    def test_a_group_of_one_has_them(self, make):
        group = make(world_size=1)
        assert group.join_process_group() == [(0, 1, 3.0)]
        assert group.address()[0][0] == "127.0.0.1" and group.address()[0][1] > 0
        group.restart()  # the process group went with the worker that made it
        assert group.join_process_group() == [(0, 1, 3.0)]
        group.close()
        assert not torch.distributed.is_initialized()
        again = make(world_size=1)
        assert again.join_as_torch_imports_it() == [1]


def test_a_worker_that_imports_torch_itself():
    """Before the call nobody had imported it; after the call it is as torch made it."""
    code = """
        import sys
        from single_controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, WorkerError, register

        class Mine(Worker):
            @register(Dispatch.ONE_TO_ALL)
            def join(self):
                import torch.distributed as dist
                dist.init_process_group("gloo")
                return dist.get_world_size()

        assert "torch" not in sys.modules
        for world_size in (2, 1):
            with LocalWorkerGroup(world_size, ClassWithInitArgs(Mine)) as group:
                try:
                    print(group.join())
                except WorkerError as error:
                    print("no collectives between them" in str(error), type(error.__cause__).__name__)
        import torch.distributed as dist
        from torch.distributed import device_mesh, distributed_c10d
        left = [dist.init_process_group, device_mesh.init_process_group, distributed_c10d.rendezvous]
        print([f.__name__ for f in left if "single_controller" in f.__code__.co_filename], dist.is_initialized())
        print([finder for finder in sys.meta_path if "single_controller" in type(finder).__module__])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines() == ["True LocalEngineError", "[1]", "[] False", "[]"], done.stderr


@pytest.mark.parametrize("name", ["workers", "worker_names", "resource_pool", "detached", "master_port"])
def test_names_that_only_a_group_on_ray_has(make, name):
    with pytest.raises(AttributeError, match=rf"a LocalWorkerGroup has no {name}: "):
        getattr(make(), name)


def test_it_stays_in_its_process(make):
    with pytest.raises(TypeError, match="driver's process"):
        pickle.dumps(make())
    for call in (LocalWorkerGroup.attach, LocalWorkerGroup.from_detached):
        with pytest.raises(TypeError, match="nobody else can attach"):
            call("name")


@pytest.mark.parametrize(
    ("size", "made", "options", "error", "told"),
    [
        (0, None, {}, ValueError, "world_size is the number of ranks.*got 0"),
        (True, None, {}, ValueError, "world_size.*got True"),
        ("2", None, {}, ValueError, "world_size.*got '2'"),
        (2, Counter, {}, TypeError, r"ray_cls_with_init is .*ClassWithInitArgs\(YourWorker"),
        (2, None, {"worker_env": {"A": "1"}}, ValueError, r"worker_env: .*one for all ranks; set os\.environ"),
        (2, None, {"start_timeout": -1}, ValueError, "start_timeout is a positive number"),
        (2, None, {"error_grace": "5"}, ValueError, "error_grace is a positive number"),
        (2, None, {"name_prefix": 1}, ValueError, "name_prefix is a string or None"),
        (2, None, {"detached": True}, TypeError, "detached"),
    ],
)
def test_options_that_cannot_be(size, made, options, error, told):
    with pytest.raises(error, match=told):
        LocalWorkerGroup(size, made or ClassWithInitArgs(Counter), **options)


def test_the_error_is_one_of_ours_and_pickles():
    error = LocalEngineError("why")
    assert isinstance(error, SingleControllerError) and str(pickle.loads(pickle.dumps(error))) == "why"
