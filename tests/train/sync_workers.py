"""Train ranks that hold parts of a model in several ways, and rollout workers whose engine only stores weights."""

import dataclasses
import functools
import os
import time
from pathlib import Path

import torch

from single_controller import Dispatch, Worker, register
from workers.rollout.engines.rollout_engine import Completion, RolloutEngine, SamplingParams
from workers.rollout.rollout_worker import RolloutWorker
from workers.weight_sync import WeightSender
from workers.weight_sync.digest import digest
from workers.weight_sync.pieces import Payload, pieces_of
from workers.weight_sync.sync_protocol import WeightSyncError
from workers.weight_sync.transports.process_group import Invitation
from workers.weight_sync.weight_plan import Shard

SHAPES = {
    "model.embed_tokens.weight": (33, 7),
    "layers.0.weight": (5, 9),
    "layers.0.bias": (5,),
    "layers.1.weight": (300, 8),
    "layers.1.empty": (0, 4),
    "layers.1.scale": (),
    "norm.weight": (7,),
}
FROZEN = "layers.1.weight"
"""The tensor that `drifted` leaves as it is."""


def model(dtype=torch.float32, seed=0):
    """Names and tensors of a small model. It is tied, so it has no output layer; it has odd sizes, one tensor without
    elements, one 0-d tensor, and one larger than the tests' buckets."""
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in SHAPES.items()}


def drifted(dtype=torch.float32, version=0):
    """The model after some updates, each of which changed three elements of each tensor except of `FROZEN`."""
    weights = model(dtype)
    make = torch.Generator().manual_seed(1)
    for _ in range(version):
        for name, tensor in weights.items():
            if tensor.numel() and name != FROZEN:
                at = torch.randint(0, tensor.numel(), (3,), generator=make)
                tensor.view(-1)[at] = torch.randn(3, generator=make).to(dtype)
    return weights


def swinging(dtype=torch.float32, version=0):
    """The models of `drifted` of versions 1 and 2 in turn."""
    return drifted(dtype, 2 - version % 2)


LAYERS, EXPERTS, ROWS, COLUMNS = 3, 64, 6, 8


def stacked(dtype=torch.float32, version=0):
    """A mixture of experts with one tensor for all experts of a layer. Each version has changed one expert's tensors,
    and the router, since the one before."""
    make = torch.Generator().manual_seed(2)
    weights = {}
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        weights[f"{mlp}.gate.weight"] = torch.randn(EXPERTS, COLUMNS, generator=make)
        weights[f"{mlp}.experts.gate_up_proj"] = torch.randn(EXPERTS, 2 * ROWS, COLUMNS, generator=make)
        weights[f"{mlp}.experts.down_proj"] = torch.randn(EXPERTS, COLUMNS, ROWS, generator=make)
    for number in range(1, version + 1):
        for tensor in weights.values():
            tensor[number % EXPERTS] += number
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def one_by_one(dtype=torch.float32, version=0):
    """The same with three tensors for each expert, as in Qwen's checkpoints."""
    weights = {}
    for name, tensor in stacked(dtype, version).items():
        prefix, _, kind = name.rpartition(".")
        if kind == "weight":
            weights[name] = tensor
        for expert in range(EXPERTS) if kind != "weight" else ():
            if kind == "down_proj":
                weights[f"{prefix}.{expert}.down_proj.weight"] = tensor[expert]
            else:
                weights[f"{prefix}.{expert}.gate_proj.weight"] = tensor[expert][:ROWS]
                weights[f"{prefix}.{expert}.up_proj.weight"] = tensor[expert][ROWS:]
    return weights


def like_mixtral(dtype=torch.float32, version=0):
    """The same with the names of Mixtral's checkpoints."""
    of = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    weights = one_by_one(dtype, version)
    return {".".join(of.get(part, part) for part in name.split(".")): tensor for name, tensor in weights.items()}


MODELS = {
    "model": model,
    "drifted": drifted,
    "swinging": swinging,
    "stacked": stacked,
    "one_by_one": one_by_one,
    "like_mixtral": like_mixtral,
}


def half(shape, dim, index):
    """The first or second half of a tensor along a dim: its box. Odd sizes are divided unevenly."""
    box = [(0, size) for size in shape]
    if dim < len(shape):
        middle = shape[dim] // 2
        box[dim] = ((0, middle), (middle, shape[dim]))[index]
    return tuple(box)


def cut(tensor, box):
    return tensor[tuple(slice(*dim) for dim in box)]


def read_part(tensor, box, at):
    at("read")
    return cut(tensor, box)


class ToyEngine(RolloutEngine):
    """Stores tensors, and generates a token that says which.

    Args:
        shapes: of the whole tensors.
        dtype: in which it holds them.
        slices: boxes of those that it does not need whole.
        tells: whether it tells what it holds.
    """

    def __init__(self, shapes=None, dtype=torch.float32, slices=None, tells=True):
        self.shapes, self.slices, self.tells = dict(shapes or SHAPES), slices or {}, tells
        sizes = {name: self.slices.get(name) for name in self.shapes}
        self.weights = {
            name: torch.zeros(self.shapes[name] if box is None else [end - begin for begin, end in box], dtype=dtype)
            for name, box in sizes.items()
        }

    def generate(self, prompts, sampling_params, seeds):
        return [Completion([token(self.weights)], [0.0], "length") for _ in prompts]

    def load_weights(self, weights):
        time.sleep(self.seconds)
        if self.gate is not None:
            wait_at(Path(self.gate), 0)
        for name, tensor in weights:
            if name == self.die_at:
                os._exit(1)
            if name == self.fail_at:
                raise RuntimeError("no room for it")
            if name == self.ignore:
                continue
            self.weights[name].copy_(tensor)
            if name == self.spoil:
                flip(self.weights[name])
        if self.exchange is not None:
            exchange(self.weights, *self.exchange)

    def weight_shapes(self):
        return self.shapes

    def weight_slices(self):
        return self.slices

    def weight_dtypes(self):
        return {name: tensor.dtype for name, tensor in self.weights.items()} if self.tells else None

    def read_weights(self, names):
        return [self.weights[name] for name in names]

    die_at = fail_at = ignore = spoil = exchange = None
    """A tensor at which the process exits or the engine fails; one that it does not load; one of which it changes a bit
    when it loads it; what it exchanges, see `exchange`."""
    seconds = 0.0
    gate = None
    """A folder where it waits before it loads, see `wait_at`."""


def token(weights):
    """A number that says which weights these are."""
    return sum(digest(weights[name]) for name in sorted(weights)) & 0xFFFFFFF


def exchange(tensors, one, other, name=None):
    """Exchange two tensors of a dict; with ``name``, two experts of that tensor."""
    one, other = (tensors[one], tensors[other]) if name is None else (tensors[name][one], tensors[name][other])
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def flip(tensor, bit=5):
    """Flip a bit of a tensor's bytes."""
    tensor.view(-1).view(torch.uint8)[bit // 8 :][:1].bitwise_xor_(1 << bit % 8)


class Rollout(RolloutWorker):
    def __init__(self, dtype=torch.float32, shapes=None):
        super().__init__(ToyEngine, shapes, dtype)
        self.order = []
        self.heard = 0.0
        self._note_places()

    def _note_places(self):
        self.where = {name: tensor.data_ptr() for name, tensor in self.engine.weights.items()}

    @register(Dispatch.ONE_TO_ALL)
    def equip(self, dtype=torch.float32, dim=None, tells=True, partial=False, of="model"):
        """Begin anew with another engine, for a model in `MODELS`. With ``dim``, each rank needs half of each tensor
        along this dim. With ``partial``, it keeps the tensors that have not changed."""
        shapes = {name: tuple(tensor.shape) for name, tensor in MODELS[of]().items()}
        slices = {} if dim is None else {name: half(shape, dim, self.rank) for name, shape in shapes.items()}
        self.engine = ToyEngine(shapes, dtype, slices, tells)
        self.engine.partial_updates = partial
        self.weight_version = 0
        self._note_places()

    @register(Dispatch.ONE_TO_ALL)
    def damage(self, name, rank):
        """Flip a bit of what an engine holds."""
        if rank == self.rank:
            flip(self.engine.weights[name])

    @register(Dispatch.ONE_TO_ALL)
    def weights(self):
        """The weights, or None if they have moved."""
        moved = {name: t.data_ptr() for name, t in self.engine.weights.items()} != self.where
        return None if moved else self.engine.weights

    @register(Dispatch.ONE_TO_ALL)
    def completes(self):
        """The token that this worker generates now, or None if it takes no prompts."""
        (made,) = self.generate([[1]], SamplingParams(1), [0])
        return None if made.completion is None else made.completion.token_ids[0]

    @register(Dispatch.ONE_TO_ALL)
    def state(self):
        """The version and `completes`; and `weights`."""
        return (self.weight_version, self.completes()), self.weights()

    @register(Dispatch.ONE_TO_ALL)
    def configure(self, rank=None, meets=True, **faults):
        """``faults``: attributes of the engine."""
        if rank in (None, self.rank):
            self.meets = meets
            for name in ("die_at", "fail_at", "ignore", "spoil", "seconds", "gate", "exchange"):
                setattr(self.engine, name, faults.get(name, getattr(ToyEngine, name)))

    meets = True

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, key, message):
        """With ``meets=False``, join process groups with nccl, for which there is no device."""
        if isinstance(message, Invitation) and not self.meets:
            message = dataclasses.replace(message, backend="nccl")
        super().receive_weights(key, message)

    def fail_update(self, key, why, cause=None):
        self.heard = self.heard or time.monotonic()
        super().fail_update(key, why, cause)

    @register(Dispatch.ONE_TO_ALL)
    def begin_weights(self, *arguments):
        self.heard = 0.0
        return super().begin_weights(*arguments)

    @register(Dispatch.ONE_TO_ALL)
    def ask(self, what):
        """``heard``: when this worker learned that the last update had failed, by `time.monotonic`."""
        answers = {
            "order": self.order,
            "channels": len(self.channels),
            "heard": self.heard,
            "fingerprint": self.fingerprints.get(self.weight_version),
        }
        return answers[what]

    @register(Dispatch.ONE_TO_ALL)
    def note(self, caller, number, seconds):
        """A driver's call that lasts ``seconds``."""
        self.order.append((caller, number))
        time.sleep(seconds)


class Stage(Worker):
    """One train rank of a gloo group."""

    def __init__(self):
        super().__init__()
        torch.distributed.init_process_group("gloo")
        self.sender, self.channels = None, set()

    @register(Dispatch.ONE_TO_ALL)
    def connect(self, rollout, transport="store", verify="fingerprint", **options):
        if self.sender is not None:
            self.sender.close()
        self.sender = WeightSender(transport, rollout, verify=verify, **options)
        self.channels = set()

    @register(Dispatch.ONE_TO_ALL)
    def reconnect(self, rollout):
        self.sender.connect(rollout)

    @register(Dispatch.ONE_TO_ALL)
    def update(
        self, version, held="stages", weights="model", fails=None, flips=None, swaps=None, gate=None, verify=None, **how
    ):
        """Send a version.

        Args:
            version: of the weights, and their seed.
            held: see `holds`.
            weights: a name in `MODELS`.
            fails: (rank, step) with a MemoryError on that rank: "pairs", while the other ranks wait in a collective of
                theirs; "begin"; "read"; "flush"; or the number of a round. With ("dies", rank, step) it exits instead.
            flips: (rank, name, bit) to flip in what that rank sends.
            swaps: (rank, one, other, name) to exchange in what that rank sends: experts of the tensor, or with None as
                the name, two tensors.
            gate: a folder: before its last round, each rank waits there until `opened`.
            verify: see `WeightSender.send`.
            how: see `holds`.
        """
        self.ended = self.failed = 0.0
        transport, kind = self.sender._transport, type(self.sender._transport)

        def at(step):
            if not self.failed and fails is not None and fails[-2:] == (self.rank, step):
                self.failed = time.monotonic()
                if fails[0] == "dies":
                    os._exit(1)
                raise MemoryError(f"no memory at step {step}")

        def transfer(update, number, payloads, headers):
            at(number)
            if gate is not None and number == len(update.rounds) - 1:
                wait_at(Path(gate), self.rank)
            if flips is not None and flips[0] == self.rank:
                payloads = {index: flipped(payload, *flips[1:]) for index, payload in payloads.items()}
            if swaps is not None and swaps[0] == self.rank:
                payloads = {index: swapped(payload, *swaps[1:]) for index, payload in payloads.items()}
            kind.transfer(transport, update, number, payloads, headers)

        transport.begin = lambda update: (at("begin"), kind.begin(transport, update))
        transport.flush = lambda update: (at("flush"), kind.flush(transport, update))
        transport.transfer = transfer
        shards = self.holds(MODELS[weights](how.pop("dtype", torch.float32), version), held, at, **how)
        try:
            return self.sender.send(version, shards, rank=self.rank, ranks=self.world_size, verify=verify)
        finally:
            self.ended = time.monotonic()
            self.channels.add(getattr(transport, "_channel", None))

    def holds(self, tensors, held, at, leave_out=(), again=(), reshape=(), rename=()):
        """Yield what this rank has.

        Args:
            tensors: the whole model.
            held: "stages": every ranks-th tensor, as pipeline stages have their own layers, by collectives of all
                ranks; "rows": consecutive rows of each tensor, the last rank more of them; "columns": the same for
                columns, and all tensors without columns; "copies": all of each.
            at: called at each step where this rank may have to fail.
            leave_out, reshape: names.
            again: names of tensors of which the last rank has the first row, too.
            rename: pairs of names.
        """
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == 3 and held == "stages":
                at("pairs")
            if held == "stages":
                torch.distributed.barrier()
            if name in reshape:
                tensor = tensor.reshape(-1, 1)
            shape, given = tuple(tensor.shape), dict(rename).get(name, name)
            if held == "stages":
                if number % self.world_size == self.rank and name not in leave_out:
                    yield given, tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
            else:
                dim = {"rows": 0, "columns": 1}.get(held, len(shape))
                boxes = [half(shape, dim, self.rank) if self.world_size == 2 else tuple((0, size) for size in shape)]
                if name in again and self.rank == self.world_size - 1:
                    boxes.append(((0, 1), *boxes[0][1:]))
                for box in boxes if name not in leave_out or self.rank == 0 else ():
                    begin, size = tuple(b for b, _ in box), tuple(e - b for b, e in box)
                    if all(size):
                        read = functools.partial(read_part, tensor, box, at)
                        yield Shard(given, shape, begin, size, tensor.dtype, read)

    @register(Dispatch.ONE_TO_ALL)
    def times(self):
        """When this rank failed on purpose, or 0, and when its last update ended; by `time.monotonic`."""
        return self.failed, self.ended

    @register(Dispatch.ONE_TO_ALL)
    def reduced(self):
        """The sum of the ranks, by a collective of the default process group."""
        total = torch.tensor(float(self.rank))
        torch.distributed.all_reduce(total)
        return total.item()

    @register(Dispatch.ONE_TO_ALL)
    def versions(self):
        return self.sender.versions()

    @register(Dispatch.ONE_TO_ALL)
    def groups_made(self):
        """How many process groups this rank has had at the ends of its updates."""
        return len(self.channels - {None})

    @register(Dispatch.ONE_TO_ALL)
    def call_many_times(self, rollout, times, seconds):
        """Call the rollout workers from here: first all futures, at once."""
        futures = [rollout.note.remote(self.rank, number, seconds) for number in range(times)]
        for future in futures:
            future.result()


def wait_at(folder, rank):
    """Say that this rank has come, and wait until the test has written ``open``."""
    (folder / f"rank-{rank}").touch()
    end = time.monotonic() + 20
    while not (folder / "open").exists():
        if time.monotonic() > end:
            raise WeightSyncError("the gate was not opened")
        time.sleep(0.002)


def flipped(payload, name, bit):
    """The payload with a bit flipped in the last tensor of a piece: its elements, or the new values of a patch."""
    tensors = []
    for spec, parts in pieces_of(payload):
        *others, last = parts
        if spec.name == name and last.numel():
            last = last.clone(memory_format=torch.contiguous_format)
            flip(last, bit)
        tensors += [*others, last]
    return Payload(payload.pieces, tensors)


def swapped(payload, one, other, name):
    """The payload of whole tensors with two of them exchanged, or two experts of one of them, if it has both."""
    pairs = [(spec, parts[-1].clone()) for spec, parts in pieces_of(payload)]
    if name is None:
        found = {spec.name: tensor for spec, tensor in pairs}
    else:
        of = [(spec.box[0], tensor) for spec, tensor in pairs if spec.name == name]
        found = {
            expert: next((tensor[expert - begin] for (begin, end), tensor in of if begin <= expert < end), None)
            for expert in (one, other)
        }
    if found.get(one) is not None and found.get(other) is not None:
        exchange(found, one, other)
    return Payload(payload.pieces, [tensor for _, tensor in pairs])


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
