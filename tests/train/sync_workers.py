"""Train ranks that hold weights as pipeline stages do, and rollout workers that only store weights."""

import dataclasses
import functools
import os
import time

import torch

from single_controller import Dispatch, Worker, register
from workers.rollout.engine import RolloutEngine
from workers.weight_sync import WeightReceiver, WeightSender
from workers.weight_sync.process_group import Invitation
from workers.weight_sync.shards import Shard


def model(dtype=torch.float32, seed=0):
    """Names and tensors of a small model. It is tied, so it has no output layer; it has odd sizes, one tensor without
    elements, one 0-d tensor, and one larger than the tests' buckets."""
    make = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (33, 7),
        "layers.0.weight": (5, 9),
        "layers.0.bias": (5,),
        "layers.1.weight": (300, 7),
        "layers.1.empty": (0, 4),
        "layers.1.scale": (),
        "norm.weight": (7,),
    }
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in shapes.items()}


class ToyEngine(RolloutEngine):
    """Stores tensors; cannot generate."""

    def __init__(self, shapes, dtype):
        self.weights = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        self.calls = 0

    def generate(self, prompts, sampling_params, seeds):
        raise NotImplementedError

    def load_weights(self, weights):
        time.sleep(self.seconds)
        for name, tensor in weights:
            if name == self.die_at:
                os._exit(1)
            if name == self.fail_at:
                raise RuntimeError("no room for it")
            self.weights[name].copy_(tensor)
        self.calls += 1

    def weight_shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    def weight_dtypes(self):
        return {name: tensor.dtype for name, tensor in self.weights.items()}

    def read_weights(self, names):
        return [self.weights[name] for name in names]

    die_at = None
    fail_at = None
    seconds = 0.0


class Rollout(WeightReceiver):
    def __init__(self, dtype=torch.float32, shapes=None):
        super().__init__()
        shapes = shapes or {name: tensor.shape for name, tensor in model().items()}
        self.engine = ToyEngine(shapes, dtype)
        self.where = {name: tensor.data_ptr() for name, tensor in self.engine.weights.items()}
        self.order = []

    def take(self, key, payload):
        self.order += [piece.name for piece in payload.pieces]
        super().take(key, payload)

    @register(Dispatch.ONE_TO_ALL)
    def weights(self):
        """The weights, or None if they have moved."""
        moved = {name: t.data_ptr() for name, t in self.engine.weights.items()} != self.where
        return None if moved else self.engine.weights

    @register(Dispatch.ONE_TO_ALL)
    def configure(self, die_at=None, fail_at=None, rank=None, meets=True, seconds=0.0):
        """``seconds``: how long each bucket takes to load."""
        if rank in (None, self.rank):
            self.engine.die_at, self.engine.fail_at, self.engine.seconds = die_at, fail_at, seconds
            self.meets = meets

    meets = True

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, key, message):
        """With ``meets=False``, join process groups with nccl, for which there is no device."""
        if isinstance(message, Invitation) and not self.meets:
            message = dataclasses.replace(message, backend="nccl")
        super().receive_weights(key, message)

    @register(Dispatch.ONE_TO_ALL)
    def ask(self, what):
        return {"order": self.order, "calls": self.engine.calls, "channels": len(self.channels)}[what]

    @register(Dispatch.ONE_TO_ALL)
    def note(self, caller, number, seconds):
        """A driver's call that lasts ``seconds``."""
        self.order.append((caller, number))
        time.sleep(seconds)


class Stage(Worker):
    """One train rank of a gloo group. It holds every ranks-th tensor, as pipeline stages hold their own layers."""

    def __init__(self):
        super().__init__()
        torch.distributed.init_process_group("gloo")
        self.sender = None

    @register(Dispatch.ONE_TO_ALL)
    def connect(self, rollout, transport="store", **options):
        self.sender = WeightSender(transport, rollout, **options)

    @register(Dispatch.ONE_TO_ALL)
    def reconnect(self, rollout):
        self.sender.connect(rollout)

    @register(Dispatch.ONE_TO_ALL)
    def update(self, version, dtype=torch.float32, leave_out=(), reshape=(), rename=(), fails=None):
        """``fails``: (rank, where) with an error on that rank: when it begins, behind its last shard, or when it reads
        one."""
        self.fails = fails[1] if fails is not None and fails[0] == self.rank else None
        transport = self.sender._transport
        transport.begin = lambda update: (self.fail_at("begin"), type(transport).begin(transport, update))
        shards = self.shards(version, dtype, leave_out, reshape, dict(rename))
        return self.sender.send(version, shards, rank=self.rank, ranks=self.world_size)

    def fail_at(self, where):
        if self.fails == where:
            raise MemoryError(f"no memory at its {where}")

    def shards(self, version, dtype, leave_out, reshape, rename):
        for number, (name, tensor) in enumerate(model(dtype, version).items()):
            if number % self.world_size == self.rank and name not in leave_out:
                tensor = tensor.reshape(-1, 1) if name in reshape else tensor
                tensor = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
                shard = Shard.whole(rename.get(name, name), tensor)
                yield dataclasses.replace(shard, read=functools.partial(self.read, tensor, number))
        self.fail_at("end")

    def read(self, tensor, number):
        if number > 3:
            self.fail_at("read")
        return tensor

    @register(Dispatch.ONE_TO_ALL)
    def versions(self):
        return self.sender.versions()

    @register(Dispatch.ONE_TO_ALL)
    def groups_made(self):
        return self.sender._transport.groups_made

    @register(Dispatch.ONE_TO_ALL)
    def call_many_times(self, rollout, times, seconds):
        """Call the rollout workers from here: first all futures, at once."""
        futures = [rollout.note.remote(self.rank, number, seconds) for number in range(times)]
        for future in futures:
            future.result()


class Manager:
    """Becomes a Ray actor: it has no group, and is busy when told to be."""

    def weight_receivers(self):
        return []

    def set_weight_version(self, version):
        pass

    def generate(self, seconds):
        time.sleep(seconds)


class StageBeside(Stage):
    """A `Stage` with a rollout worker in the same process."""

    @register(Dispatch.ONE_TO_ALL)
    def connect(self, transport="device", **options):
        self.sender = WeightSender(transport, neighbour=self.role_worker("rollout"), **options)
