"""Worker classes for the group tests."""

import asyncio
import ctypes
import os
import signal
import threading
import time
import traceback

import ray

from single_controller import (
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    Execute,
    LocalWorkerGroup,
    Worker,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Counter(Worker):
    """State that starts at the rank, and one method for most of the modes."""

    kind = "counter"

    def __init__(self, start=0):
        super().__init__()
        self.value = start + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x=0):
        """Add x to the value."""
        self.value += x
        return self.value

    @property
    def expensive(self):
        raise AssertionError("nobody asked for this property")

    @register(Dispatch.RANK_ZERO)
    def first(self, x):
        return (self.rank, x)

    @register(Dispatch.ALL_TO_ALL)
    def items(self, x, y=0):
        return (self.rank, x, y)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def all_rank_zero(self, x):
        return (self.rank, x)

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def one_rank_zero(self, x):
        return x

    @register(Dispatch.DP_COMPUTE)
    def times_rank(self, x):
        return x * self.rank

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch, factor=2):
        return batch * factor if not isinstance(batch, dict) else {k: v * factor for k, v in batch.items()}

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="pad")
    def padded(self, batch):
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def ragged(self, batch):
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="pad", blocking=False)
    def padded_later(self, batch):
        return [(self.rank, row) for row in batch]

    @register(Dispatch.DP_COMPUTE_METRIC, uneven="pad")
    def metric(self, batch):
        return {"rank": self.rank, "rows": len(batch)}

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, batch):
        return function(self, batch)

    @register(
        {
            "dispatch_fn": lambda group, *args, **kwargs: _repeat_pair(group, args, kwargs),
            "collect_fn": collect_all_to_all,
        }
    )
    def custom(self, x, y):
        return self.value + x + y

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, *names):
        return {name: os.environ.get(name) for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return (self.rank, self.world_size, self.local_rank, self.local_world_size, self.master_addr, self.master_port)

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "main_thread": threading.current_thread() is threading.main_thread(),
            "group_free": context.get_assigned_resources(),
        }

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def scribble_on_view(self, tensor):
        if self.rank == 0:
            tensor.fill_(777)
        time.sleep(1.0)
        return float(tensor.mean())

    @register(Dispatch.ONE_TO_ALL)
    def scribble(self, tensor):
        before = tensor.clone()
        tensor.fill_(self.rank)
        time.sleep(0.2)
        return (float(before.sum()), float(tensor.mean()))

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def total(self, tensor):
        return float(tensor.double().sum())

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def take_future(self, future):
        return (type(future).__name__, future.result())

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def take_failed_future(self, future):
        """Wait twice, and return whether the errors are distinct, with the length of each traceback."""
        raised = []
        for _ in range(2):
            try:
                future.result()
            except Exception as error:
                raised.append(error)
        told = future.exception()
        lengths = [len(traceback.extract_tb(error.__traceback__)) for error in (*raised, told)]
        return len({*map(id, raised), id(told)}), lengths, str(told)

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def pass_on(self, future, threads):
        """Pass a future to a group of this process."""
        with LocalWorkerGroup(2, ClassWithInitArgs(Counter), threads=threads) as group:
            return group.echo(future)

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    async def await_futures(self, futures):
        """Await futures in this process, all at once."""
        return await asyncio.gather(*(_value(future) for future in futures))

    def plain(self, x, y=0):
        return self.value + x + y


def collect_slowly(group, output):
    """A ``collect_fn`` that takes half a second; returns the thread that it ran in, and the results."""
    time.sleep(0.5)
    return threading.current_thread().name, output


class SlowToJoin(Worker):
    """Its results take long to join."""

    @register({"dispatch_fn": lambda group, *args, **kwargs: (args, kwargs), "collect_fn": collect_slowly})
    def ranks(self):
        return self.rank


async def _value(future):
    return await future


class Own:
    """A batch type that only the driver's script registers."""

    def __init__(self, rows):
        self.rows = list(rows)


class Nested(Worker):
    """A worker whose own code raises this library's errors."""

    @register(Dispatch.ONE_TO_ALL)
    def refuse(self):
        raise DispatchError("of the worker's own making")

    @register(Dispatch.ONE_TO_ALL)
    def join_mesh_later(self, name, seconds):
        time.sleep(seconds)
        self.register_mesh(name, self.rank)

    @register(Dispatch.mesh("early"))
    def on_early(self, batch):
        return batch

    @register(Dispatch.mesh("late"))
    def on_late(self, batch):
        return batch


class Landlord(Worker):
    """Each rank makes a pool of its own, with a group in it."""

    @register(Dispatch.ONE_TO_ALL)
    def let(self, occupied):
        from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        self.own = RayResourcePool([1], use_gpu=False, resources={"crate": 1})
        if not occupied:
            self.own.place()
            self.own.wait()
            return []
        self.tenant = RayWorkerGroup(self.own, RayClassWithInitArgs(Counter))
        return self.tenant.add(1)

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


def _repeat_pair(group, args, kwargs):
    def repeat(pair):
        return [pair[rank % 2] for rank in range(group.world_size)]

    return tuple(map(repeat, args)), {key: repeat(pair) for key, pair in kwargs.items()}


@ray.remote
class RemoteCounter(Worker):
    """A `Counter` under @ray.remote."""

    def __init__(self, start=0):
        super().__init__()
        self.value = start + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.value += x
        return self.value


class Log(Worker):
    """Records the order of its calls."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.open = threading.Event()
        self.task = None

    @register(Dispatch.ONE_TO_ALL)
    def note(self, what, seconds=0.0):
        time.sleep(seconds)
        self.log.append(what)

    @register(Dispatch.ONE_TO_ALL)
    async def note_async(self, what, seconds=0.0):
        await asyncio.sleep(seconds)
        self.log.append(what)

    @register(Dispatch.ONE_TO_ALL)
    async def leave_task(self):
        async def later():
            await asyncio.sleep(0.2)
            self.log.append("task")

        self.task = asyncio.get_running_loop().create_task(later())

    @register(Dispatch.ONE_TO_ALL)
    def read(self):
        return list(self.log)


class Gate(Worker):
    """A regular method that waits until a concurrent one opens the gate."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    @register(Dispatch.ONE_TO_ALL)
    def wait(self, seconds):
        return self.gate.wait(seconds)

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    async def open(self):
        self.gate.set()
        return True


class Grid(Worker):
    """Registers the coordinates that the test gives, one per rank."""

    def __init__(self, axes=None, late=False):
        super().__init__()
        self.axes = axes or {}
        self.seen = None
        if self.axes and not late:
            self.set_layout()

    @register(Dispatch.ONE_TO_ALL)
    def set_layout(self):
        self.register_layout(**{axis: places[self.rank] for axis, places in self.axes.items()})

    @register(Dispatch.ONE_TO_ALL)
    def move(self, axes):
        self.axes = axes
        self.set_layout()

    def rest(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.MEGATRON_COMPUTE)
    def compute(self, x):
        self.seen = x
        return (self.rank, x)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_rows(self, batch):
        self.seen = batch
        return batch * 10

    @register(Dispatch.MEGATRON_PP_AS_DP)
    def compute_pp(self, x):
        self.seen = x
        return (self.rank, x)

    @register(Dispatch.ONE_TO_ALL)
    def last_seen(self):
        return self.seen


class Traced(Exception):
    """Notes in `TRACED` that it was unpickled."""

    def __reduce__(self):
        return _traced, self.args


TRACED = []


def _traced(*args):
    TRACED.append(args)
    return Traced(*args)


class Fragile(Worker):
    """Fails on demand."""

    def __init__(self, fail_rank=None, kill_rank=None):
        super().__init__()
        if self.rank == fail_rank:
            raise RuntimeError("constructor of the chosen rank")
        if self.rank == kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.joined = False

    @register(Dispatch.ONE_TO_ALL)
    def ping(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def large(self):
        return bytes(1 << 21)

    def node(self):
        return ray.get_runtime_context().get_node_id()

    def place(self):
        return (self.rank, self.world_size, self.local_rank, self.local_world_size)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, ranks, others_sleep=0.0):
        if self.rank in ranks:
            raise ValueError(f"the true cause on rank {self.rank}")
        time.sleep(others_sleep)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail_traced(self):
        raise Traced("its class has code")

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def sleep_on(self, ranks, seconds):
        if self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def hang_in_c_on(self, rank, others):
        """One rank hangs in a C function that holds the interpreter's lock, some others sleep."""
        if self.rank == rank:
            ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # goes on after a signal
        elif self.rank in others:
            time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    async def sleep_async(self, seconds):
        await asyncio.gather(asyncio.sleep(seconds))
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail_differently(self, lost):
        if self.rank in lost:
            raise RuntimeError("Connection closed by peer [127.0.0.1]")
        raise ValueError(f"the batch of rank {self.rank} is empty")

    @register(Dispatch.ONE_TO_ALL)
    def join_process_group(self):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.joined = True
        return dist.get_rank(), dist.get_world_size()

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self, times=1, absent=None, kill=None, fail=None):
        """All-reduce, while rank `absent` sleeps, `kill` kills itself, `fail` raises."""
        import torch
        import torch.distributed as dist

        total = None
        for turn in range(times):
            if self.rank == absent:
                time.sleep(60)
            if self.rank == kill and turn == times - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.rank == fail:
                raise ValueError("the true cause, beside a collective")
            tensor = torch.full((1000,), float(self.rank))
            dist.all_reduce(tensor)
            total = float(tensor[0])
        return total

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce_in_pairs(self, absent, seconds):
        """All-reduce among two ranks each, while rank `absent` sleeps, and then among all; under many frames."""
        import torch
        import torch.distributed as dist

        pairs = [dist.new_group([n, n + 1], group_desc="pair") for n in range(0, self.world_size, 2)]

        def reduce(depth, **group):
            return reduce(depth - 1, **group) if depth else dist.all_reduce(torch.zeros(1), **group)

        if self.rank == absent:
            time.sleep(seconds)
        reduce(3, group=pairs[self.rank // 2])
        reduce(30)


class OnMeshes(Worker):
    """Joins the named meshes that a test requests, over the ranks of one gloo process group."""

    def __init__(self):
        super().__init__()
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.seen = None

    @register(Dispatch.ONE_TO_ALL)
    def join_device_mesh(self, name, shape, axes, data_axes="dp"):
        """Return this rank's mesh coordinates, as torch reports them."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
        self.register_device_mesh(name, mesh, data_axes)
        return {axis: mesh.get_local_rank(axis) for axis in axes or ()}

    @register(Dispatch.ONE_TO_ALL)
    def join_part(self, name, ranks):
        """Register a mesh of only some of the ranks."""
        from torch.distributed.device_mesh import DeviceMesh

        self.register_device_mesh(name, DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)))

    @register(Dispatch.ONE_TO_ALL)
    def join_places(self, name, dp_ranks, collects):
        self.register_mesh(name, dp_ranks[self.rank], collects[self.rank])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def on_actor(self, batch):
        return self._rows(batch)

    @register(Dispatch.mesh("rollout"))
    def on_rollout(self, batch):
        return self._rows(batch)

    @register(Dispatch.mesh("other"))
    def on_other(self, batch):
        return self._rows(batch)

    @register(Dispatch.ONE_TO_ALL)
    def last_seen(self):
        return self.seen

    def _rows(self, batch):
        self.seen = batch.tolist() if hasattr(batch, "tolist") else list(batch)
        return [(row, self.rank) for row in self.seen]


class Awkward(Worker):
    """Methods whose names resemble the library's internal names."""

    @register(Dispatch.ONE_TO_ALL)
    def kept(self):
        return ("kept", self.rank)

    @register(Dispatch.ONE_TO_ALL)
    def call(self, x=0):
        return ("call", self.rank, x)


class OnDevices(Worker):
    """Methods whose arguments are moved to a device. "meta" exists everywhere; it keeps shapes and no data."""

    @register(Dispatch.DP_COMPUTE_METRIC, device="meta")
    def arrive(self, batch, whole=None):
        return (
            batch["x"].device.type,
            tuple(batch["x"].shape),
            type(batch["y"]).__name__,
            str(getattr(whole, "device", "")),
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, batch):
        return {"x": batch["x"] + 1, "y": batch["y"]}

    @register(Dispatch.ONE_TO_ALL, device="cuda")
    def on_cuda(self, tensor):
        return tensor.device.type


class Actor(Worker):
    """One of two classes that share a process; both have methods of the same names."""

    def __init__(self, start=0, fail=False):
        super().__init__()
        if fail and self.rank == 1:
            raise RuntimeError("the actor cannot begin")
        self.value = start

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.value += x
        return self.value

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch):
        return batch * 10 + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    async def add_later(self, x):
        await asyncio.sleep(0.01)
        self.value += x
        return self.value

    @register(Dispatch.ONE_TO_ALL)
    def set_layout(self, dp, tp):
        self.register_layout(dp=dp[self.rank], tp=tp[self.rank])

    @register(Dispatch.MEGATRON_COMPUTE)
    def on_dp(self, x):
        return (self.rank, x)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError(f"the cause in {type(self).__name__}")

    @register(Dispatch.ONE_TO_ALL)
    def leave(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    def unregistered(self):
        return (type(self).__name__, self.rank)


class Critic(Actor):
    """The same methods, and one that calls the other worker in its process."""

    @register(Dispatch.ONE_TO_ALL)
    def take(self):
        actor = self.role_worker("actor")
        return (actor.value, self.get_fused_worker_by_name("actor") is actor, type(actor).__name__)

    @register(Dispatch.ONE_TO_ALL)
    def missing(self):
        return self.role_worker("aktor")

    @register(Dispatch.ONE_TO_ALL)
    def twice(self, x):
        return 2 * x


class Early(Worker):
    """Requests the worker of another role in its constructor."""

    def __init__(self, role):
        super().__init__()
        self.found = type(self.role_worker(role)).__name__

    @register(Dispatch.ONE_TO_ALL)
    def say(self):
        return self.found


class Model(Worker):
    """State that a restart must restore."""

    def __init__(self, size):
        super().__init__()
        self.size, self.log = size, []

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def init_model(self, name):
        self.log.append(("init", name))

    @register(Dispatch.DP_COMPUTE_METRIC, replay=True)
    def load_checkpoint(self, rows):
        if list(rows) == [-1] * len(rows):
            raise ValueError("no such checkpoint")
        self.log.append(("load", list(rows)))

    @register(Dispatch.ONE_TO_ALL)
    def train(self):
        self.log.append(("train", None))

    @register(Dispatch.ONE_TO_ALL)
    def read(self):
        return (self.size, os.getpid(), list(self.log))


class Drives(Worker):
    """Calls another group."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group

    @register(Dispatch.ONE_TO_ALL)
    def drive(self, group, x):
        return (self.group if group is None else group).echo([self.rank, x])
