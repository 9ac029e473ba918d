"""A trainer and a rollout engine that kill themselves at the moment that a test asks for.

`ask` writes a file ``die in MOMENT``, which names a rank and a delay. The process that it is for removes the file when
it comes to that moment, and dies in it, after the delay at most. It leaves the time in a file ``killed``.

Trainers write a line into ``witness-RANK.jsonl`` for each rollout that they have trained on, with digests of the rank's
own weights and optimizer state before and after. The lines form chains: that of the state at the end is what it has
learned from, whatever was trained and lost meanwhile.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import torch

from single_controller import Dispatch, Worker, register
from workers import HFEngine, blocks
from workers.data.rollout_data import group_numbers
from workers.fsdp.fsdp_worker import FSDPTrainWorker
from workers.recovery.weight_backup import live_tensors
from workers.rollout.engines.rollout_engine import RolloutEngine
from workers.weight_sync import WeightReceiver, WeightSender
from workers.weight_sync.weight_plan import Shard

FIRST_DIGIT, DIGITS = 16, 5
"""A prompt is its number in octal, in tokens from 16 to 23, after a token below 16."""


def prompt(number):
    return [1 + number % 7] + [FIRST_DIGIT + number // 8**place % 8 for place in reversed(range(DIGITS))]


def number_of(tokens):
    """Which prompt it is, from its tokens alone."""
    number = 0
    for token in tokens[-DIGITS:]:
        number = 8 * number + token - FIRST_DIGIT
    assert prompt(number) == tokens, tokens
    return number


def ask(folder, moment, rank, seconds):
    """Have a rank kill itself in its next such moment.

    Args:
        folder: where the files are.
        moment: see the uses of `asked` and `dying`.
        rank: the rank; None for whichever process is first.
        seconds: the delay.
    """
    written = Path(folder) / "written"
    written.write_text(json.dumps([rank, seconds]))
    written.replace(Path(folder) / f"die in {moment}")


def asked(folder, moment, rank=None):
    """Return the delay, if this rank has to die in this moment; else None."""
    file = Path(folder) / f"die in {moment}"
    with contextlib.suppress(FileNotFoundError):
        victim, seconds = json.loads(file.read_text())
        if victim == rank:
            file.unlink()  # raises if another process was faster
            return seconds
    return None


_dead = threading.Lock()
"""Held from the moment at which this process begins to die: another thread may have come to that, too."""


def die(folder, seconds=0.0):
    """Kill this process after some seconds."""
    time.sleep(seconds)
    _dead.acquire()
    with contextlib.suppress(FileExistsError), open(Path(folder) / "killed", "x") as file:  # of the first death
        file.write(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def dying(folder, moment, rank=None):
    """Inside, this process dies if it has to: after the delay, or at the end."""
    seconds = asked(folder, moment, rank)
    if seconds is not None:
        threading.Thread(target=die, args=(folder, seconds), daemon=True).start()
    yield
    if seconds is not None:
        die(folder)


class Engine(HFEngine):
    """Sleeps in each step, so that generation takes long and costs little."""

    def __init__(self, *args, folder, seconds, **options):
        super().__init__(*args, **options)
        self.folder, self.seconds = folder, seconds

    def load_weights(self, weights):
        with dying(self.folder, "receiving"):
            super().load_weights(weights)

    def _step(self, batch):
        time.sleep(self.seconds)
        super()._step(batch)


class Trainer(FSDPTrainWorker):
    """See the top of the file."""

    def init(self, args, role, with_ref=False):
        self.folder = Path(args.user["folder"])
        return super().init(args, role, with_ref)

    def recover(self, args, role, with_ref, recovery, version, current):
        self.folder = Path(args.user["folder"])
        with dying(self.folder, "recovery", self.rank):
            return super().recover(args, role, with_ref, recovery, version, current)

    @register(Dispatch.ONE_TO_ALL)
    def digest(self):
        """Of this rank's shard of the weights and of the optimizer state, and of the number of steps."""
        found = hashlib.sha256(str(self.optimizer_step).encode())
        for name, tensor in sorted(live_tensors(self.model.state_tensors()).items()):
            found.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def train(self, rollout_id, rollout_data_ref, **computed):
        rows = rollout_data_ref
        self.prompts = [
            number_of(ids[mask.bool()][:length].tolist())
            for ids, mask, length in zip(rows["input_ids"], rows["attention_mask"], rows["prompt_lengths"], strict=True)
        ]
        assert self.prompts == group_numbers(rows["group_ids"]).tolist(), (self.prompts, rows["group_ids"])
        self.before = self.digest()
        seconds = asked(self.folder, "a snapshot", self.rank)
        if seconds is not None:
            self._die_in_a_transfer(seconds)
        return super().train(rollout_id, rollout_data_ref, **computed)

    def _train_actor(self, data):
        with dying(self.folder, "a step", self.rank):
            return super()._train_actor(data)

    def snapshot_after(self, rollout_id):
        line = {"rollout_id": rollout_id, "prompts": self.prompts, "before": self.before, "after": self.digest()}
        with open(self.folder / f"witness-{self.rank}.jsonl", "a") as lines:  # before a snapshot has the new state
            lines.write(json.dumps(line) + "\n")
        return super().snapshot_after(rollout_id)

    def _die_in_a_transfer(self, seconds):
        """Die some seconds after half of the next block is sent or received."""

        def half(memory):
            yield memory.numpy().data[: memory.numel() // 2]
            die(self.folder, seconds)

        blocks._chunks = half

    def save_model(self, step, force_sync=False, driver_state=None):
        with dying(self.folder, "a save", self.rank):
            folder = super().save_model(step, force_sync, driver_state)
        seconds = asked(self.folder, "a background save", self.rank)
        if seconds is not None:
            threading.Thread(target=self._die_while_writing, args=(seconds,), daemon=True).start()
        return folder

    def _die_while_writing(self, seconds):
        concurrent.futures.wait([self.checkpoints._writing], seconds)
        die(self.folder)

    def update_weights(self, version=None):
        with dying(self.folder, "an update", self.rank):
            return super().update_weights(version)


# --- weight updates -------------------------------------------------------------------------------------------------

SHAPES = {f"layer.{number}": (544, 1024) for number in range(8)} | {"norm": (7,)}
BUCKET_BYTES = 2176 << 10  # a layer; the half that each of two senders has is more than a frame has


@functools.cache
def base():
    make = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=make) for name, shape in SHAPES.items()}


def weights(version):
    """Those of a version: every 37th element differs from those of the version before."""
    changed = {name: tensor.clone() for name, tensor in base().items()}
    for tensor in changed.values():
        tensor.view(-1)[version % 3 :: 37] += version
    return changed


def digests(version, held=None):
    """What identifies the weights of a version, or those that are held."""
    of = weights(version) if held is None else held
    return {name: hashlib.sha256(of[name].numpy().tobytes()).hexdigest() for name in SHAPES}


class Sender(Worker):
    """A train rank that has its share of the rows of each tensor."""

    def __init__(self):
        super().__init__()
        torch.distributed.init_process_group("gloo")
        self.sender = None

    @register(Dispatch.ONE_TO_ALL)
    def connect(self, rollout, transport, **options):
        if self.sender is not None:
            self.sender.close()
        self.sender = WeightSender(transport, rollout, bucket_bytes=BUCKET_BYTES, timeout=60, **options)

    @register(Dispatch.ONE_TO_ALL)
    def reconnect(self, rollout):
        self.sender.connect(rollout)

    @register(Dispatch.ONE_TO_ALL)
    def update(self, version):
        shards = []
        for name, tensor in weights(version).items():
            rows = -(-len(tensor) // self.world_size)
            begin, part = self.rank * rows, tensor[self.rank * rows :][:rows]
            first = (begin,) + (0,) * (tensor.dim() - 1)
            shape = tuple(tensor.shape)
            shards.append(Shard(name, shape, first, tuple(part.shape), tensor.dtype, functools.partial(_same, part)))
        return self.sender.send(version, shards, rank=self.rank, ranks=self.world_size)

    @register(Dispatch.ONE_TO_ALL)
    def pids(self):
        return os.getpid()


def _same(tensor):
    return tensor


class Store(RolloutEngine):
    """Stores weights; cannot generate."""

    def __init__(self):
        self.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def generate(self, prompts, sampling_params, seeds):
        raise NotImplementedError

    def load_weights(self, weights):
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    def weight_shapes(self):
        return dict(SHAPES)

    def weight_dtypes(self):
        return dict.fromkeys(SHAPES, torch.float32)

    def read_weights(self, names):
        return [self.weights[name] for name in names]


class Receiver(WeightReceiver):
    def __init__(self):
        super().__init__()
        self.engine = Store()
        self.weight_version = 0

    @register(Dispatch.ONE_TO_ALL)
    def holds(self):
        """The version, and what identifies the weights."""
        version = self.weight_version
        return version, None if not version else digests(version, self.engine.weights)

    @register(Dispatch.ONE_TO_ALL)
    def pids(self):
        return os.getpid()
