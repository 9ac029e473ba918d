"""The workers of `benchmarks.weight_sync`: train ranks that hold rows, and rollout workers that only store weights."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import ray
import torch

from benchmarks.machine import memory
from single_controller import Dispatch, Worker, register
from workers import HFEngine, SamplingParams
from workers.distributed import initialize_distributed
from workers.rollout.engines.rollout_engine import RolloutEngine
from workers.weight_sync import WeightReceiver, WeightSender
from workers.weight_sync.weight_plan import Box, Shard

Shapes = dict[str, tuple[int, ...]]


class Sent(NamedTuple):
    """What one update took.

    Attributes:
        seconds: of this rank.
        nbytes: that this rank handed to the transport.
        wire: bytes that left its network interface.
        patched: receivers that got differences.
        pause: seconds without generation.
    """

    seconds: float
    nbytes: int
    wire: int
    patched: int
    pause: float


class MemoryEngine(RolloutEngine):
    """Stores tensors; cannot generate.

    Args:
        shapes: of the whole tensors.
        dtype: of what it holds.
        part: (number, of how many) tensor-parallel parts. Matrices are divided by rows and by columns in turn.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, part: tuple[int, int] = (0, 1)) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.slices: dict[str, Box] = {}
        number, parts = part
        for index, (name, shape) in enumerate(shapes.items()):
            if parts > 1 and len(shape) == 2:
                box = [(0, size) for size in shape]
                dim = index // 2 % 2
                box[dim] = (shape[dim] * number // parts, shape[dim] * (number + 1) // parts)
                self.slices[name] = tuple(box)
        self.weights = {
            name: torch.ones([end - begin for begin, end in self.slices.get(name, [(0, size) for size in shape])]).to(
                dtype
            )
            for name, shape in shapes.items()
        }

    def generate(self, prompts: Any, sampling_params: Any, seeds: Any) -> Any:
        """It cannot."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutEngine.load_weights`."""
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    def weight_shapes(self) -> Shapes:
        """See `RolloutEngine.weight_shapes`."""
        return self.shapes

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """See `RolloutEngine.weight_dtypes`."""
        return dict.fromkeys(self.shapes, self.dtype)

    def weight_slices(self) -> dict[str, Box]:
        """See `RolloutEngine.weight_slices`."""
        return self.slices

    def read_weights(self, names: Sequence[str]) -> list[torch.Tensor]:
        """See `RolloutEngine.read_weights`."""
        return [self.weights[name] for name in names]


class TimedEngine(HFEngine):
    """Notes when it generates."""

    steps: list[float]

    def record(self, *arguments: Any, **named: Any) -> None:
        """See `RequestEngine.record`."""
        self.steps.append(time.monotonic())
        super().record(*arguments, **named)


class Memory:
    """Measures the memory of this process at its peak."""

    def __init__(self) -> None:
        self._before = memory("VmRSS", "RssAnon", "RssShmem")
        self._most = [0, 0]
        self._over = threading.Event()
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
        self._thread = threading.Thread(target=self._watch, daemon=True)  # `growth` ends it
        self._thread.start()

    def growth(self) -> list[int]:
        """Return by how many bytes memory grew at most: all of it, what is anonymous, and what is shared. The kernel
        keeps only the first peak; the others are looked at every 2 ms."""
        self._over.set()
        self._thread.join()
        (peak,) = memory("VmHWM")
        return [
            peak - self._before[0],
            *(most - began for most, began in zip(self._most, self._before[1:], strict=True)),
        ]

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._most = [max(pair) for pair in zip(self._most, memory("RssAnon", "RssShmem"), strict=True)]


class Measured(Worker):
    """Can measure its memory, and says where it is."""

    @register(Dispatch.ONE_TO_ALL)
    def watch_memory(self) -> None:
        """Begin."""
        self.memory = Memory()

    @register(Dispatch.ONE_TO_ALL)
    def growth(self) -> list[int]:
        """End, and return `Memory.growth`."""
        return self.memory.growth()

    @register(Dispatch.RANK_ZERO)
    def place(self) -> str:
        """Return the id of this worker's Ray node."""
        node: str = ray.get_runtime_context().get_node_id()
        return node


class Rollout(WeightReceiver, Measured):
    """Stores weights."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, *, divided: bool = False) -> None:
        super().__init__()
        self.engine = MemoryEngine(shapes, dtype, (self.rank, self.world_size) if divided else (0, 1))

    @register(Dispatch.RANK_ZERO)
    def listen(self) -> tuple[str, int]:
        """Accept one connection, and read all that comes."""
        server = socket.create_server((ray.util.get_node_ip_address(), 0))

        def drain() -> None:
            connection, _ = server.accept()
            with server, connection:
                memory = bytearray(1 << 20)
                while connection.recv_into(memory):
                    pass

        threading.Thread(target=drain, daemon=True).start()  # ends with the connection
        address: tuple[str, int] = server.getsockname()
        return address


class Generating(WeightReceiver):
    """A real engine, which can be generating."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.engine: TimedEngine = TimedEngine(model)
        self.engine.steps = []

    @register(Dispatch.RANK_ZERO)
    def shapes(self) -> Shapes:
        """Return the shapes of the weights."""
        return self.engine.weight_shapes()

    @register(Dispatch.ONE_TO_ALL)
    def generate(self, prompts: int) -> None:
        """Begin to generate, until `gap`."""
        self.engine.steps = []
        params = SamplingParams(max_new_tokens=2000)
        for number in range(prompts):
            self.engine.submit([1 + number] * 8, params, str(number), seed=number)
        while not self.engine.steps:
            time.sleep(0.01)

    @register(Dispatch.ONE_TO_ALL)
    def gap(self) -> tuple[float, float]:
        """End it. Return the longest time between two steps, and the median."""
        known = len(self.engine.steps)
        while len(self.engine.steps) <= known:  # generation continues after the update
            time.sleep(0.01)
        steps = list(self.engine.steps)
        self.engine.abort()
        gaps = sorted(after - before for before, after in itertools.pairwise(steps) if after - before > 1e-3)
        return gaps[-1], gaps[len(gaps) // 2]


class Train(Measured):
    """A train rank. It holds a range of the rows of each tensor, as FSDP does."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, raw_bytes: int = 0) -> None:
        super().__init__()
        if self.world_size > 1:
            initialize_distributed(self, "gloo")
        self.random = torch.Generator().manual_seed(self.rank)
        self.shapes = shapes
        self.rows = {
            name: (shape[0] * self.rank // self.world_size, shape[0] * (self.rank + 1) // self.world_size)
            for name, shape in shapes.items()
        }
        self.shards = {
            name: torch.randn(end - begin, *shapes[name][1:], generator=self.random).to(dtype)
            for name, (begin, end) in self.rows.items()
        }
        self.senders: dict[str, WeightSender] = {}
        self.array = numpy.ones(raw_bytes if self.rank == 0 else 0, numpy.uint8)
        self.version = 0

    @register(Dispatch.ONE_TO_ALL)
    def connect(self, name: str, rollout: Any, transport: Any, options: dict[str, Any]) -> None:
        """Make a sender."""
        self.senders[name] = WeightSender(transport, rollout, **options)

    @register(Dispatch.ONE_TO_ALL)
    def change(self, fraction: float) -> None:
        """Flip the lowest bit of a random part of the elements."""
        for tensor in self.shards.values():
            words = tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)
            words ^= torch.rand(words.shape, generator=self.random) < fraction

    def _held(self) -> Iterator[Shard]:
        for name, tensor in self.shards.items():
            begin, shape = self.rows[name][0], self.shapes[name]
            yield Shard(
                name, shape, (begin,) + (0,) * (len(shape) - 1), tuple(tensor.shape), tensor.dtype, tensor.detach
            )

    @register(Dispatch.ONE_TO_ALL)
    def update(self, sender: str, interface: str = "lo", verify: Any = None) -> Sent:
        """Send the weights."""
        self.version += 1
        shards, before, begun = list(self._held()), _sent(interface), time.perf_counter()
        sent = self.senders[sender].send(self.version, shards, rank=self.rank, ranks=self.world_size, verify=verify)
        seconds = time.perf_counter() - begun
        return Sent(seconds, sent.nbytes, _sent(interface) - before, sent.patched, sent.pause_seconds)

    @register(Dispatch.RANK_ZERO)
    def raw(self, hands: list[Any], interface: str = "lo") -> Sent:
        """Send as many bytes with Ray alone."""
        before, begun = _sent(interface), time.perf_counter()
        ref = ray.put(self.array)
        ray.get([hand.copy.remote(ref) for hand in hands])
        seconds = time.perf_counter() - begun
        return Sent(seconds, self.array.nbytes, _sent(interface) - before, 0, 0.0)

    @register(Dispatch.RANK_ZERO)
    def plain(self, address: tuple[str, int]) -> Sent:
        """Send as many bytes through a socket."""
        before, begun = _sent("eth0"), time.perf_counter()
        with socket.create_connection(address) as connection:
            connection.sendall(self.array)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1):  # until the other side has read everything and closes
                pass
        return Sent(time.perf_counter() - begun, self.array.nbytes, _sent("eth0") - before, 0, 0.0)


@ray.remote(num_cpus=0)
class Hand:
    """Copies into memory whose pages are already mapped."""

    def __init__(self, nbytes: int) -> None:
        self.memory = numpy.ones(nbytes, numpy.uint8)

    def copy(self, array: numpy.ndarray) -> None:
        """Copy."""
        numpy.copyto(self.memory, array)


def _sent(interface: str) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
    return 0
