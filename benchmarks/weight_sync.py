"""What weight sync takes: seconds, bytes, memory, and the time without generation.

    python -m benchmarks.weight_sync [--quick] [--only machine proof hosts pause memory]

Tables, each from one run on this machine, whose ways take turns within a round:

- *machine*: weights from one train rank, and from two that hold rows as FSDP does, to two rollout workers, with some of
  the elements changed since the update before: differences, whole tensors, and Ray alone (``ray.put``, and two actors
  that copy into their own memory). The bytes are those that the train ranks hand to the transport, and those that the
  loopback device carries. The aim for whole tensors through the store is at most three times Ray's time.
- *proof*: whole tensors with ``verify="none"``, "fingerprint" and "full"; *hosts* has it for the link.
- *hosts*: the same as *machine* from one host to another over a link of 1 Gbit/s: network namespaces, a Ray node on
  each, and a token bucket filter on both ends of the link, whose speed is measured with a plain socket. The bytes are
  those that the sending host's network device counts. Needs root.
- *pause*: how long `HFEngine` generates nothing during an update, while it generates and while it is idle.
- *memory*: of a model on four train ranks that hold rows, and two rollout workers that hold tensor-parallel halves: by
  how much each process grows at most (the kernel's VmHWM) over what it had before the first update.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.contenders.local_ray import CLUSTER, probe_store
from benchmarks.machine import machine
from benchmarks.sync_workers import Generating, Hand, Rollout, Sent, Shapes, Train
from benchmarks.two_hosts import on_two_hosts
from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

FRACTIONS = (0.0, 0.01, 0.03, 0.1, 1.0)
AIM = 3.0
MIB = 1 << 20
LINK = ("tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms")
MODEL = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 7,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 12000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""68 million parameters: 272 MB in float32."""

Way = Callable[[], list[Sent]]


def shapes_of(nbytes: int, dtype: torch.dtype) -> Shapes:
    """A model of about that size: square matrices of 4 MiB (in float32) and vectors, in turn."""
    shapes: Shapes = {}
    for number in range(max(1, nbytes // (MIB * dtype.itemsize))):
        shapes |= {f"layer.{number}.weight": (1024, 1024), f"layer.{number}.norm": (1024,)}
    return shapes


def show(*cells: Any) -> None:
    """Print a row."""
    text = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(text)} |", flush=True)


def header(*cells: str) -> None:
    """Print the head of a table."""
    print()
    show(*cells)
    show(*["---"] * len(cells))


def sizes(nbytes: float) -> str:
    """Megabytes."""
    return f"{nbytes / 1e6:.2f}" if nbytes < 1e7 else f"{nbytes / 1e6:.0f}"


@contextmanager
def connected(
    train: RayWorkerGroup, pool: RayResourcePool, made: RayClassWithInitArgs, ways: dict[str, dict[str, Any]]
) -> Iterator[None]:
    """Make a sender and rollout workers of their own for each way."""
    with ExitStack() as stack:
        for name, options in ways.items():
            group = stack.enter_context(RayWorkerGroup(pool, made))
            train.connect(name, group, options.pop("transport"), {"double_buffer": True, **options})
        yield


def take_turns(ways: dict[str, Way], number: int, found: dict[str, list[list[Sent]]], *, counts: bool) -> None:
    """Run each way once, in an order that changes with the number of the round."""
    first = number % len(ways)
    for name in [*ways][first:] + [*ways][:first]:
        sent = ways[name]()
        if counts:
            found.setdefault(name, []).append(sent)


def summary(found: list[list[Sent]]) -> tuple[float, float, float]:
    """Median seconds, bytes sent by all ranks, and bytes on the wire."""
    return (
        median([sent[0].seconds for sent in found]),
        median([sum(one.nbytes for one in sent) for sent in found]),
        median([sent[0].wire for sent in found]),
    )


def changes(
    train: RayWorkerGroup, hands: list[Any], transports: dict[str, bool], interface: str, rounds: int
) -> dict[str, list[list[Sent]]]:
    """Measure differences and whole tensors, by transport (and whether it has differences), and Ray alone. All senders
    of differences send after each change, so each of them finds what changed last."""
    whole: dict[str, Way] = {"raw": lambda: [train.raw(hands, interface)]}
    for name in transports:
        whole[f"{name} full"] = lambda name=name: train.update(f"{name} full", interface)  # type: ignore[misc]
    found: dict[str, list[list[Sent]]] = {}
    for number in range(rounds + 1):  # the first one warms up
        for index, fraction in enumerate(FRACTIONS):
            train.change(fraction)
            ways: dict[str, Way] = {
                f"{name} {fraction}": lambda name=name: train.update(f"{name} delta", interface)  # type: ignore[misc]
                for name, delta in transports.items()
                if delta
            }
            if index == number % len(FRACTIONS):
                ways |= whole
            take_turns(ways, number, found, counts=number > 0)
    return found


def report(found: dict[str, list[list[Sent]]], transports: dict[str, bool], label: str, rounds: int) -> None:
    """Print the table of `changes`."""
    raw = summary(found["raw"])
    header(
        f"{label}, n = {rounds}", "changed", "s", "least - most", "MB sent", "MB on the wire", "against full: bytes",
        "time", "s / raw Ray",
    )  # fmt: skip

    def row(what: str, changed: str, name: str, full: tuple[float, float, float] | None = None) -> None:
        seconds, sent, wire = summary(found[name])
        each = [one[0].seconds for one in found[name]]
        against = ("", "")
        if full is not None:
            carried = full[2] / wire if label.startswith("two hosts") else full[1] / max(sent, 1)
            against = f"1/{carried:.1f}" if sent else "nothing sent", f"1/{full[0] / seconds:.1f}"
        spread = f"{min(each):.3f} - {max(each):.3f}"
        show(what, changed, seconds, spread, sizes(sent), sizes(wire), *against, f"{seconds / raw[0]:.2f}")

    row("Ray alone", "", "raw")
    for transport, delta in transports.items():
        row(f"{transport}, whole tensors", "any", f"{transport} full")
        full = summary(found[f"{transport} full"])
        for fraction in FRACTIONS if delta else ():
            row(f"{transport}, differences", f"{fraction:.0%}", f"{transport} {fraction}", full)
    if "store" in transports and not label.startswith("two hosts"):
        ratio = summary(found["store full"])[0] / raw[0]
        print(
            f"\nstore, whole tensors: {ratio:.2f} x raw Ray; the aim is {AIM:g}: {'missed' if ratio > AIM else 'met'}"
        )


def options_of(transports: dict[str, bool], folder: str) -> dict[str, dict[str, Any]]:
    """The senders that `changes` needs."""
    ways: dict[str, dict[str, Any]] = {}
    for transport, delta in transports.items():
        ways[f"{transport} full"] = {"transport": transport} | ({"folder": folder} if transport == "disk" else {})
        if delta:
            ways[f"{transport} delta"] = {"transport": transport, "delta": True}
    return ways


def on_machine(given: argparse.Namespace) -> None:
    """The first table."""
    transports = {name: name in ("store", "group") for name in given.transports}
    for dtype in given.dtypes:
        for ranks in (1, 2):
            shapes = shapes_of(given.mb * MIB, dtype)
            hands = [Hand.remote(given.mb * MIB) for _ in range(2)]
            with (
                tempfile.TemporaryDirectory() as folder,
                RayResourcePool([2], use_gpu=False, max_colocate_count=8) as pool,
                RayWorkerGroup(
                    pool[0:ranks], RayClassWithInitArgs(Train, shapes, dtype, raw_bytes=given.mb * MIB)
                ) as train,
                connected(
                    train, pool, RayClassWithInitArgs(Rollout, shapes, dtype), options_of(transports, f"{folder}/sync")
                ),
            ):
                found = changes(train, hands, transports, "lo", given.rounds)
            for hand in hands:
                ray.kill(hand)
            label = f"one machine, {given.mb} MB of {str(dtype)[6:]}, {ranks} -> 2"
            report(found, transports, label, given.rounds)


def proofs(given: argparse.Namespace) -> None:
    """The second table."""
    shapes = shapes_of(given.mb * MIB, torch.float32)
    names = [name for name in given.transports if name in ("store", "group")]
    with (
        RayResourcePool([2], use_gpu=False, max_colocate_count=8) as pool,
        RayWorkerGroup(pool[0:1], RayClassWithInitArgs(Train, shapes, torch.float32)) as train,
        connected(
            train,
            pool,
            RayClassWithInitArgs(Rollout, shapes, torch.float32),
            {f"{name} full": {"transport": name} for name in names},
        ),
    ):
        proof(train, names, "lo", f"one machine, {given.mb} MB, 1 -> 2", 3 * given.rounds)


def proof(train: RayWorkerGroup, names: Sequence[str], interface: str, label: str, rounds: int) -> None:
    """Measure and print what the proof costs."""
    header(f"whole tensors, {label}", "verify", "s", "least - most", "against none", "by pairs", "n")
    for name in names:
        ways: dict[str, Way] = {
            verify: (lambda verify=verify, name=name: train.update(f"{name} full", interface, verify))  # type: ignore[misc]
            for verify in ("none", "fingerprint", "full")
        }
        found: dict[str, list[list[Sent]]] = {}
        for number in range(rounds + 3):
            take_turns(ways, number, found, counts=number > 2)
        none = [one[0].seconds for one in found["none"]]
        for verify in ways:
            seconds = [one[0].seconds for one in found[verify]]
            spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
            pairs = median([one / without for one, without in zip(seconds, none, strict=True)])
            share = median(seconds) / median(none) - 1
            show(name, verify, median(seconds), spread, f"{share:+.1%}", f"{pairs - 1:+.1%}", rounds)


def between_hosts(given: argparse.Namespace) -> None:
    """The third table, on the first of the two hosts."""
    transports = {name: True for name in given.transports if name in ("store", "group")}
    shapes = shapes_of(given.mb * MIB, torch.float32)
    spread = {"across_nodes": True, "strategy": "STRICT_SPREAD", "num_cpus": 0.5}
    with (
        RayResourcePool([1, 1], use_gpu=False, max_colocate_count=8, **spread) as pool,
        RayWorkerGroup(
            pool[0:1], RayClassWithInitArgs(Train, shapes, torch.float32, raw_bytes=given.mb * MIB)
        ) as train,
        RayWorkerGroup(pool[1:2], RayClassWithInitArgs(Rollout, {}, torch.float32)) as other,
        connected(train, pool[1:2], RayClassWithInitArgs(Rollout, shapes, torch.float32), options_of(transports, "")),
    ):
        there = other.place()
        hand = Hand.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False)).remote(
            given.mb * MIB
        )
        if train.place() == there:
            raise RuntimeError("both workers are on one host")
        plain = [train.plain(other.listen()) for _ in range(3)]
        seconds = median([sent.seconds for sent in plain])
        rate = median([sent.wire for sent in plain]) * 8 / seconds / 1e9
        print(f"\nthe link: {given.mb} MB through a plain socket in {seconds:.3f} s, {rate:.3f} Gbit/s on the wire")
        found = changes(train, [hand], transports, "eth0", given.rounds)
        report(found, transports, f"two hosts, 1 Gbit/s, {given.mb} MB of float32, 1 -> 1", given.rounds)
        proof(train, list(transports), "eth0", f"two hosts, 1 Gbit/s, {given.mb} MB, 1 -> 1", given.rounds)


def pauses(given: argparse.Namespace) -> None:
    """The fourth table."""
    model = {**MODEL, "num_hidden_layers": 1, "vocab_size": 1000} if given.quick else MODEL
    ways = {
        "double buffer": {"transport": "store", "double_buffer": True},
        "double buffer, differences": {"transport": "store", "double_buffer": True, "delta": True},
        "in place": {"transport": "store", "double_buffer": False},
    }
    with RayResourcePool([1], use_gpu=False, max_colocate_count=8) as pool:
        with RayWorkerGroup(pool, RayClassWithInitArgs(Generating, model)) as rollout:
            shapes = rollout.shapes()
            with RayWorkerGroup(pool, RayClassWithInitArgs(Train, shapes, torch.float32)) as train:
                nbytes = sum(4 * math.prod(shape) for shape in shapes.values())
                header(f"HFEngine, {nbytes / 1e6:.0f} MB, n = {given.rounds}", "engine", "update s", "pause s",
                       "longest time between tokens s", "median time s")  # fmt: skip
                for name, options in ways.items():
                    transport = options.pop("transport")
                    train.connect(name, rollout, transport, options)
                    for busy in (False, True):
                        found: list[list[float]] = []
                        for number in range(given.rounds + 1):
                            train.change(0.03)
                            if busy:
                                rollout.generate(4)
                            (sent,) = train.update(name)
                            gaps = rollout.gap()[0] if busy else (math.nan, math.nan)
                            found += [[sent.seconds, sent.pause, *gaps]] if number else []
                        cells = map(median, zip(*found, strict=True))
                        show(name, "generating" if busy else "idle", *cells)


def memory(given: argparse.Namespace) -> None:
    """The fifth table."""
    nbytes = given.model_mb * MIB
    shapes, bucket = shapes_of(nbytes, torch.float32), given.bucket_mb * MIB
    header(
        f"{given.model_mb} MB, 4 -> 2, buckets of {given.bucket_mb} MB", "workers", "hold MB",
        "grow by MB (VmHWM)", "anonymous", "shared", "store at most", "anonymous in buckets",
    )  # fmt: skip
    for buffered in (False, True):
        for transport in given.transports:
            if transport == "disk":
                continue
            with (
                RayResourcePool([4], use_gpu=False, max_colocate_count=2) as pool,
                RayWorkerGroup(pool, RayClassWithInitArgs(Train, shapes, torch.float32)) as train,
                RayWorkerGroup(
                    pool[0:2], RayClassWithInitArgs(Rollout, shapes, torch.float32, divided=True)
                ) as rollout,
            ):
                options = {"double_buffer": buffered, "bucket_bytes": bucket}
                train.connect("", rollout, transport, options)
                for group in (train, rollout):
                    group.watch_memory()
                (stored,) = probe_store(lambda train=train: train.update("")).values()
                for who, group, held in (("train", train, nbytes / 4), ("rollout", rollout, nbytes / 2)):
                    grown = [max(of_ranks) for of_ranks in zip(*group.growth(), strict=True)]
                    what = f"{transport}, {'double buffer' if buffered else 'in place'}"
                    show(what, who, sizes(held), *map(sizes, [*grown, stored]), f"{grown[1] / bucket:.2f}")


TABLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "machine": on_machine,
    "proof": proofs,
    "pause": pauses,
    "memory": memory,
}


def main() -> None:
    """Read the options and run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=[*TABLES, "hosts"], default=[*TABLES, "hosts"])
    options.add_argument("--quick", action="store_true", help="small sizes, for a look at the program itself")
    options.add_argument("--rounds", type=int, help="7 by default; 2 with --quick")
    options.add_argument("--mb", type=int, help="of the weights: 256 by default; 16 with --quick")
    options.add_argument("--model-mb", type=int, help="of the model in the last table: 1024; 64 with --quick")
    options.add_argument("--bucket-mb", type=int, help="in the last table: 64; 4 with --quick")
    options.add_argument("--transports", nargs="+", default=["store", "group", "disk", "device"])
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--timeout", type=float, default=1800.0, help="seconds that the hosts have")
    given = options.parse_args()
    for name, whole, quick in (("rounds", 7, 2), ("mb", 256, 16), ("model_mb", 1024, 64), ("bucket_mb", 64, 4)):
        if getattr(given, name) is None:
            setattr(given, name, quick if given.quick else whole)
    given.dtypes = [getattr(torch, name) for name in given.dtypes]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if CLUSTER in os.environ:
        ray.init(os.environ[CLUSTER], log_to_driver=False)
        between_hosts(given)
        return
    about = machine()
    print(f"{about['cores']} cores ({about['processor']}), load at start {about['load_at_start']}")
    for name in given.only:
        if name in TABLES:
            ray.init(
                "local",
                num_cpus=16,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=max(256, 4 * given.mb) * MIB,
                # `probe_store` needs it.
                _system_config={"raylet_report_resources_period_milliseconds": 10} if name == "memory" else None,
            )
            TABLES[name](given)
            ray.shutdown()
    if "hosts" in given.only:  # this program again, on the first of them
        store = max(200, 3 * given.mb) * MIB
        on_two_hosts("benchmarks.weight_sync", sys.argv[1:], store=store, timeout=given.timeout, link=LINK)


if __name__ == "__main__":
    from benchmarks import weight_sync  # workers find the classes there

    weight_sync.main()
