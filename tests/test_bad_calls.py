"""A table of bad calls. Each ends in the documented error, within its time limit, with a message that says what to do.

A row is one call of `bad`: its name, the error's type, a pattern that the message must match, the call, and what
must hold afterwards (`Then`). Each row is one test; ``-k <name>`` runs one.
"""

import asyncio
import os
import pickle
import re
import socket
import sys
import tempfile
import threading
import time
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import bad_calls_workers as workers
import numpy as np
import pytest
import ray
import torch
from bad_calls_workers import Kit, Starts
from tensordict import TensorDict
from waits import wait_until, within

from single_controller import (
    CallTimeoutError,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    LocalWorkerGroup,
    PlacementError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResultError,
    SingleControllerError,
    StartError,
    Worker,
    WorkerDiedError,
    WorkerError,
    merge_resource_pool,
)

pytestmark = pytest.mark.timeout(90)


class Then(Enum):
    """What must hold after the error. The kit is a group of four, the frail group has two ranks."""

    NOTHING = "nothing to check"
    KIT_SAW_NOTHING = "the call reached no rank of the kit, and the kit works"
    KIT_WORKS = "the kit works"
    FRAIL_WORKS = "the frail group is not broken and works"
    FRAIL_BROKEN = "the frail group refuses calls at once, and works after restart()"
    NOTHING_LEFT = "no actor is left but those of the shared groups"


@dataclass(frozen=True)
class Bad:
    id: str
    error: type[BaseException]
    says: str
    call: Callable[["Stage"], Any]
    within: float = 2.0
    then: Then = Then.NOTHING
    has: dict[str, Any] = field(default_factory=dict)


TABLE: list[Bad] = []

ALL_RANKS = "<all ranks>"
"""In a pattern: the ranks of a method that raised on all of them. On Ray, the error names those that raised soon enough
after the first; in this process all do."""


def bad(id, error, says, call, *, within=2.0, then=Then.NOTHING, **has):
    """Add a row to the table.

    Args:
        id: name of the test.
        error: the exact type; for Python's own types an instance is enough.
        says: pattern that the message must match.
        call: makes the call, on a `Stage`.
        within: seconds until the error, measured from `Stage.now`, or from the start if that is not called.
        then: what must hold afterwards.
        has: attributes of the error.
    """
    TABLE.append(Bad(id, error, says, call, within, then, has))


class Stage:
    """The groups and pools that the rows share, all created on first use.

    Args:
        threads: None for groups on Ray; for groups in this process, whether their ranks have threads.
    """

    def __init__(self, threads=None):
        self.on_ray = threads is None
        self._threads = threads
        self._made = {}
        self.begun = 0.0
        self.to_close = []
        self.to_check = []

    def now(self):
        """Start the clock of the time limit; everything before was preparation."""
        self.begun = time.monotonic()

    def afterwards(self, check):
        """Add a check to run after the error."""
        self.to_check.append(check)

    def once(self, name, make):
        if name not in self._made:
            self._made[name] = make()
            self.now()
        return self._made[name]

    def made(self, name):
        """A shared group, as the previous row left it."""
        return self._made[name]

    def pool(self, size):
        self.need_ray()
        return self.once(f"pool {size}", lambda: RayResourcePool([size], use_gpu=False))

    def need_ray(self):
        if not self.on_ray:
            pytest.skip("this row is about pools: add it to NO_GROUP or ONLY_ON_RAY")

    def workers(self, size, made, **options):
        """A group on the shared pool of its size, or in this process."""
        if self.on_ray:
            return RayWorkerGroup(self.pool(size), made, **options)
        return LocalWorkerGroup(size, made, threads=self._threads, **options)

    def own_pool(self, entries, **options):
        """A pool for one row."""
        self.need_ray()
        pool = RayResourcePool(entries, **{"use_gpu": False, **options})
        self.to_close.append(pool)
        return pool

    def group(self, made, pool=None, **options):
        """A group for one row."""
        group = self.workers(2, made, **options) if pool is None else RayWorkerGroup(pool, made, **options)
        self.to_close.append(group)
        return group

    @property
    def kit(self):
        """Four workers, dp 4. No row may end their processes."""
        group = self.once("kit", lambda: self.workers(4, RayClassWithInitArgs(Kit)))
        if group.broken is not None:  # an earlier row failed; the others must run anyway
            group.restart()
            self._made.pop("kit was called")
        self.once("kit was called", lambda: group.echo(torch.zeros(2)))
        return group

    @property
    def frail(self):
        """Two workers that rows may kill. The group is restarted if a row left it broken."""
        group = self.once("frail", lambda: self.workers(2, RayClassWithInitArgs(Kit, 10), error_grace=1.0))
        if group.broken is not None:
            group.restart()
        return group

    @property
    def grid(self):
        """Two workers with a layout: dp 2, and the mesh "actor" of size two."""

        def make():
            return self.workers(2, RayClassWithInitArgs(Kit))

        group = self.once("grid", make)
        group.set_layout({"dp": [0, 1]})
        group.join_mesh("actor", [0, 1], [True, True])
        return group

    @property
    def half(self):
        """Two workers of which only rank 0 has registered a layout and a mesh."""
        group = self.once("half", lambda: self.workers(2, RayClassWithInitArgs(Kit)))
        group.set_layout({"dp": [0, 1]}, ranks=[0])
        group.join_mesh("actor", [0, 1], [True, True], ranks=[0])
        return group

    @property
    def closed(self):
        """A closed group."""
        group = self.once("closed", lambda: self.workers(2, RayClassWithInitArgs(Kit)))
        group.close()
        return group

    def broken(self):
        """The frail group, broken by a death."""
        group = self.frail
        with pytest.raises(WorkerDiedError):
            group.leave("kill" if self.on_ray else "sys.exit", ranks=[1])
        return group

    def leave_row(self):
        for thing in reversed(self.to_close):
            thing.close()
        self.to_close.clear()
        self.to_check.clear()

    def close(self):
        for thing in reversed(self._made.values()):
            if hasattr(thing, "close"):
                thing.close()


# fmt: off
# (Each row of the table is a paragraph in columns; the formatter would put each argument on its own line.)

# --- The driver's call: Python's own rules ------------------------------------------------------------------

refused = partial(bad, then=Then.KIT_SAW_NOTHING)

refused("argument-missing", TypeError, r"add\(\) missing a required argument: 'x'", lambda s: s.kit.add())
refused("argument-too-many", TypeError, r"add\(\) too many positional arguments.*add\(x\)", lambda s: s.kit.add(1, 2))
refused("argument-misspelt", TypeError, r"rows\(\) got an unexpected keyword argument 'bach'.*rows\(batch",
        lambda s: s.kit.rows(bach=[1, 2, 3, 4]))
refused("argument-twice", TypeError, r"add\(\) multiple values for argument 'x'", lambda s: s.kit.add(1, x=1))
refused("argument-missing-custom", TypeError, r"custom\(\) missing a required argument: 'x'",
        lambda s: s.kit.custom(((), {})))

refused("method-misspelt", AttributeError, r"no method 'ad'.*did you mean 'add'", lambda s: s.kit.ad(1))
refused("method-unlike-any", AttributeError, r"no method 'zzz'.*Kit.*known are .*add", lambda s: s.kit.zzz)
refused("method-unregistered", AttributeError, r"Kit\.plain\(\) is not registered.*@register.*execute_all_sync",
        lambda s: s.kit.plain(1))
refused("method-of-methods-misspelt", AttributeError, r"did you mean 'add'", lambda s: s.kit.methods.addd)
refused("method-is-a-property", AttributeError, r"no method 'expensive'", lambda s: s.kit.expensive())
refused("method-direct-rollout", DispatchError, r"rollout\(\) cannot be called from the driver.*DIRECT_ROLLOUT_METHOD",
        lambda s: s.kit.rollout("Once"), method="rollout")

# --- Lists, one item per shard -------------------------------------------------------------------------------

for id, value, text in (("number", 1, "an int 1"), ("string", "abcd", "a str 'abcd'"), ("none", None, "None"),
                        ("tensor", torch.arange(4), r"a Tensor of shape \(4,\)"), ("dict", {0: 1}, "a dict")):
    refused(f"items-{id}", DispatchError,
            rf"items\(\): argument 'x' is {text}.*; Dispatch\.ALL_TO_ALL takes a list of 4.*per shard.*Broadcast",
            lambda s, value=value: s.kit.items(value), method="items", argument="x")
refused("items-too-few", DispatchError, r"items\(\).*'x' is a list of length 3.*list of 4.*world_size = 4",
        lambda s: s.kit.items([1, 2, 3]))
refused("items-keyword-mixed-lengths", DispatchError, r"items\(\): argument 'y' is a list of length 5",
        lambda s: s.kit.items(x=[1, 2, 3, 4], y=[1, 2, 3, 4, 5]), argument="y")
refused("items-list-beside-a-number", DispatchError, r"'y' is an int 2.*Broadcast",
        lambda s: s.kit.items([1, 2, 3, 4], 2))
refused("compute-wrong-length", DispatchError, r"compute\(\).*'x'.*length 2; Dispatch\.DP_COMPUTE takes a list of 4",
        lambda s: s.kit.compute([1, 2]))

# --- Batches, split along their rows -------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Stubborn:
    """Looks like a batch, but cannot be chunked."""

    def __len__(self):
        return 8

    def chunk(self, count):
        raise RuntimeError("no chunks today")

    @staticmethod
    def concat(parts):
        return parts[0]


EIGHT = list(range(8))


@dataclass
class Settings:
    options: object

SEVEN = list(range(7))
SIX = list(range(6))

refused("rows-do-not-divide", DispatchError,
        r"rows\(\): argument 'batch' has 6 rows.*4 shards.*multiple of 4.*uneven='pad' or 'ragged'",
        lambda s: s.kit.rows(SIX), method="rows", argument="batch")
refused("rows-do-not-divide-future", DispatchError, r"'batch' has 6 rows", lambda s: s.kit.rows.remote(np.zeros(6)))
refused("rows-differ", DispatchError, r"rows\(\): argument 'other' has 4 rows, but 'batch' has 8.*Broadcast",
        lambda s: s.kit.rows(EIGHT, other=torch.zeros(4)), argument="other")
refused("rows-dict-unequal", DispatchError,
        r"rows\(\).*'batch' is a dict.*'ids' has 8 rows, 'mask' has 4.*register_batch_type.*Broadcast",
        lambda s: s.kit.rows({"ids": torch.zeros(8), "mask": torch.zeros(4)}))
refused("rows-dict-unequal-inside", DispatchError, r"'batch'.*differ in length.*8.*4",
        lambda s: s.kit.rows({"ids": EIGHT, "more": {"mask": [1] * 4}}))
refused("rows-named-tuple-unequal", DispatchError, r"'batch' is a Point.*'x' has 8 rows, 'y' has 4",
        lambda s: s.kit.rows(Point(EIGHT, [1] * 4)))
refused("rows-tensordict-without-batch-dims", DispatchError,
        r"'batch' is a TensorDict.*no batch dim.*batch_size=\[rows\]",
        lambda s: s.kit.rows(TensorDict({"ids": torch.zeros(8)}, [])))
for id, make, text in (
    ("set", lambda: {1, 2}, "a set"),
    ("generator", lambda: (row for row in EIGHT), "a generator"),
    ("object", object, "an object"),
    ("class", lambda: dict, "a type"),
    ("module", lambda: torch.nn.Linear(2, 2), "a Linear"),
):
    refused(f"rows-{id}", DispatchError, rf"rows\(\).*'batch' is {text}.*cannot be cut.*register_batch_type.*Broadcast",
            lambda s, make=make: s.kit.rows(make()), method="rows", argument="batch")
refused("rows-dict-holds-a-set", DispatchError, r"'batch' is a dict.*set.*cannot be cut.*register_batch_type",
        lambda s: s.kit.rows({"a": {1}}))
refused("rows-an-object-ref", DispatchError, r"'batch' is an ObjectRef.*cannot be cut",
        lambda s: s.kit.rows(ray.put(EIGHT)))
refused("rows-a-sparse-tensor", DispatchError, r"rows\(\).*'batch'", lambda s: s.kit.rows(torch.eye(8).to_sparse()))
refused("rows-a-nested-tensor", DispatchError, r"rows\(\).*'batch'",
        lambda s: s.kit.rows(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])))
refused("rows-of-a-type-that-does-not-chunk", DispatchError, r"rows\(\).*'batch'.*Stubborn.*no chunks today",
        lambda s: s.kit.rows(Stubborn()))
refused("rows-no-function", DispatchError,
        r"apply\(\): Dispatch\.DP_COMPUTE_PROTO_WITH_FUNC takes a function first.*int 3",
        lambda s: s.kit.apply(3, EIGHT), method="apply")
refused("rows-function-and-batch-swapped", DispatchError, r"takes a function first.*list of length 8",
        lambda s: s.kit.apply(EIGHT, len))

# --- Layouts and meshes --------------------------------------------------------------------------------------

refused("mega-no-layout", DispatchError, r"mega\(\) needs a layout.*register_layout\(dp=", lambda s: s.kit.mega([1]))
refused("mesh-unknown", DispatchError, r"on_mesh\(\).*no mesh 'actor'.*registered: none.*register_mesh\('actor'",
        lambda s: s.kit.on_mesh(EIGHT))
bad("mega-some-ranks-silent", DispatchError, r"mega\(\).*ranks \[1\] have not called register_layout\(\).*'dp'",
    lambda s: s.half.mega([1, 2]))
bad("mesh-some-ranks-silent", DispatchError, r"on_mesh\(\).*ranks \[1\] have not called register_mesh\(\).*'actor'",
    lambda s: _half_with_layout(s).on_mesh([1, 2]))
bad("mega-wrong-length", DispatchError, r"mega\(\).*'x'.*length 4.*MEGATRON_COMPUTE takes a list of 2.*dp_size = 2",
    lambda s: s.grid.mega([1, 2, 3, 4]))
bad("pp-wrong-length", DispatchError,
    r"pp\(\).*'x'.*length 3.*MEGATRON_PP_AS_DP takes a list of 2.*dp_size \* cp_size \* pp_size = 2",
    lambda s: s.grid.pp([1, 2, 3]))


def _half_with_layout(s):
    """Both ranks have registered a layout, but only rank 0 the mesh."""
    made = RayClassWithInitArgs(Kit)
    group = s.once("half mesh", lambda: s.workers(2, made))
    group.set_layout({"dp": [0, 1]})
    group.join_mesh("actor", [0, 1], [True, True], ranks=[0])
    s.now()
    return group


@partial(bad, "layout-negative", WorkerError,
         r"set_layout\(\) raised ValueError.*register_layout\(\): dp=-1: expected an integer of at least 0")
def _(s):
    s.grid.set_layout({"dp": [0, -1]})


bad("layout-of-no-size", WorkerError,
    r"set_layout\(\) raised ValueError.*size of dp=1\.5: expected an integer of at least 1",
    lambda s: s.grid.set_layout({"dp": [0, 1]}, sizes={"dp": 1.5}))

bad("layout-without-axes", WorkerError, r"set_layout\(\) raised ValueError.*at least one axis, for example dp=0",
    lambda s: s.grid.set_layout({}))

# --- Custom modes --------------------------------------------------------------------------------------------

refused("custom-no-pair", DispatchError, r"custom\(\): its dispatch_fn returned.*'text'.*\(args, kwargs\)",
        lambda s: s.kit.custom("text"))
refused("custom-dispatch-fn-does-not-take-it", TypeError, r"y", lambda s: s.kit.custom(((1,), {}), y=2))
bad("custom-collect-fn-raises", LookupError, r"found nothing", lambda s: s.kit.collected_badly(((1,), {})),
    then=Then.KIT_WORKS)

# --- .options() ----------------------------------------------------------------------------------------------

refused("options-unknown", TypeError, r"options\(\).*num_cpus", lambda s: s.kit.add.options(num_cpus=1))
refused("options-positional", TypeError, r"options\(\).*positional", lambda s: s.kit.add.options(60))
for value in (0, -1, "60", True, float("nan")):
    refused(f"options-timeout-{value!r}", ValueError, r"timeout is a positive number of seconds",
            lambda s, value=value: s.kit.add.options(timeout=value))
refused("options-blocking", ValueError, r"blocking is True or False, got 'no'",
        lambda s: s.kit.add.options(blocking="no"))
refused("options-uneven", ValueError, r"uneven='truncate'.*'error', 'pad', 'ragged'",
        lambda s: s.kit.rows.options(uneven="truncate"))
refused("options-uneven-without-rows", ValueError, r"add\.options\(uneven='pad'\).*cuts no batch into rows",
        lambda s: s.kit.add.options(uneven="pad")(1))

refused("options-device-unknown", ValueError, r"'gpu' is not available in this process",
        lambda s: s.kit.add.options(device="gpu"))
refused("options-device-no-name", ValueError, r"like 'cuda', or None; got 0", lambda s: s.kit.add.options(device=0))

# --- execute_* -----------------------------------------------------------------------------------------------

refused("execute-list-beside-a-future", DispatchError,
        r"plain\(\): argument 'y' is a WorkerFuture, while 'x' is a list",
        lambda s: s.kit.execute_all_sync("plain", [1, 2, 3, 4], s.kit.calls.remote()))
refused("execute-unknown", AttributeError, r"Kit has no method 'plian'.*did you mean 'plain'",
        lambda s: s.kit.execute_all_sync("plian", 1))
refused("execute-a-property", AttributeError, r"Kit has no method 'expensive'",
        lambda s: s.kit.execute_all_sync("expensive"))
refused("execute-an-attribute", AttributeError, r"Kit has no method 'seen'", lambda s: s.kit.execute_all_sync("seen"))
refused("execute-not-a-name", TypeError, r"takes the name of a method.*got <remote method Kit\.add",
        lambda s: s.kit.execute_all_sync(s.kit.add, 1))
refused("execute-arguments", TypeError, r"plain\(\) got an unexpected keyword argument 'z'",
        lambda s: s.kit.execute_all_sync("plain", 1, z=2))
bad("execute-rank-zero-error", WorkerError, r"fail\(\) raised ValueError on rank 0",
    lambda s: s.kit.execute_rank_zero_sync("fail"), then=Then.KIT_WORKS)

# --- What is sent --------------------------------------------------------------------------------------------


class Trainer:
    """A user's object that holds a lock somewhere inside."""

    def __init__(self):
        self.lock = threading.Lock()


refused("send-a-lock", DispatchError, r"echo\(\): argument 'value', a lock, cannot be pickled.*Nothing was sent",
        lambda s: s.kit.echo(threading.Lock()), method="echo", argument="value")
refused("send-a-generator", DispatchError, r"echo\(\): argument 'value', a generator, cannot be pickled",
        lambda s: s.kit.echo(row for row in EIGHT))
refused("send-an-object-with-a-lock", DispatchError, r"echo\(\): argument 'value', a Trainer, cannot be pickled.*lock",
        lambda s: s.kit.echo(Trainer()))
refused("send-a-lock-keyword", DispatchError, r"items\(\): argument 'y', a \w+, cannot be pickled.*lock",
        lambda s: s.kit.items(x=[1, 2, 3, 4], y=[0, 0, 0, threading.Lock()]), argument="y")
refused("send-rows-with-a-lock", DispatchError,
        r"rows\(\): argument 'batch', a list of length 1, cannot be pickled.*lock",
        lambda s: s.kit.rows([1, 2, 3, threading.Lock()]), argument="batch")
refused("send-a-function-around-a-lock", DispatchError, r"apply\(\): argument 'function'.*cannot be pickled.*lock",
        lambda s: _with_lock(s.kit.apply))
refused("send-a-lock-execute", DispatchError, r"plain\(\): argument 'x', a lock, cannot be pickled",
        lambda s: s.kit.execute_all_sync("plain", threading.Lock()))
bad("send-what-does-not-unpickle-there", WorkerError, r"echo\(\) raised ModuleNotFoundError on rank.*only_here",
    lambda s: s.kit.echo(workers.UnpicklesOnlyInItsProcess()), then=Then.KIT_WORKS)
bad("send-a-failed-reference", WorkerError, r"echo\(\) raised .* on rank.*the true cause",
    lambda s: s.kit.echo(s.kit.execute_rank_zero_async("fail")), then=Then.KIT_WORKS)


def _with_lock(apply):
    lock = threading.Lock()
    apply(lambda worker, rows: lock and rows, EIGHT)


# --- What is returned -----------------------------------------------------------------------------------------

returned = partial(bad, then=Then.KIT_WORKS)

returned("result-does-not-pickle", WorkerError,
         r"^make_generator\(\)[^\n]*(result|answer|return)[^\n]*cannot (be )?pickle",
         lambda s: s.kit.make_generator())
returned("result-does-not-unpickle-here", ResultError, r"return_unpicklable_elsewhere\(\).*only_here",
         lambda s: s.kit.return_unpicklable_elsewhere(EIGHT))
returned("result-scalars", ResultError, r"apply\(\).*4 ranks cannot be joined.*float.*no rows.*DP_COMPUTE_METRIC",
         lambda s: s.kit.apply(lambda worker, rows: 0.5, EIGHT), method="apply")
returned("result-0d-tensors", ResultError, r"apply\(\).*cannot be joined.*Tensor of shape \(\).*DP_COMPUTE_METRIC",
         lambda s: s.kit.apply(lambda worker, rows: rows.sum(), torch.zeros(8)))
returned("result-dict-of-scalars", ResultError, r"apply\(\).*cannot be joined.*'loss'.*no rows.*DP_COMPUTE_METRIC",
         lambda s: s.kit.apply(lambda worker, rows: {"loss": 0.5}, EIGHT))
returned("result-types-differ", ResultError, r"apply\(\).*cannot be joined.*list.*Tensor",
         lambda s: s.kit.apply(lambda worker, rows: torch.zeros(2) if worker.rank else rows, EIGHT))
returned("result-some-none", ResultError, r"apply\(\).*cannot be joined.*None",
         lambda s: s.kit.apply(lambda worker, rows: None if worker.rank else rows, EIGHT))
returned("result-shapes-differ", ResultError, r"apply\(\).*cannot be joined.*shapes \(2, 1\), \(2, 2\)",
         lambda s: s.kit.apply(lambda worker, rows: rows.expand(2, worker.rank + 1), torch.zeros(8, 1)))
returned("result-keys-differ", ResultError, r"apply\(\).*different keys.*'only_0'",
         lambda s: s.kit.apply(lambda worker, rows: {f"only_{worker.rank}": rows}, EIGHT))
returned("result-objects", ResultError, r"apply\(\).*cannot be joined.*cannot be joined",
         lambda s: s.kit.apply(lambda worker, rows: set(rows), EIGHT))
returned("padding-stays-rows", ResultError, r"apply\(\).*result has 3 rows, not a multiple of the shard's 2.*padding",
         lambda s: s.kit.apply.options(uneven="pad")(lambda worker, rows: [1, 2, 3], SEVEN),
         method="apply")
returned("padding-stays-scalar", ResultError, r"apply\(\).*has no rows.*padding cannot be removed",
         lambda s: s.kit.apply.options(uneven="pad")(lambda worker, rows: 0.5, SEVEN))
returned("padding-stays-in-a-dict", ResultError, r"apply\(\).*'loss': float .*the ranks returned different values",
         lambda s: s.kit.apply.options(uneven="pad")(
             lambda worker, rows: {"rows": rows, "loss": float(worker.rank)}, SEVEN))

# --- A method raises -----------------------------------------------------------------------------------------

HOST = re.escape(socket.gethostname())

returned("raise-on-one-rank", WorkerError,
         rf"fail\(\) raised ValueError on rank 2 \({HOST}.*\): the true cause\n\nTraceback.*_workers\.py.*in fail",
         lambda s: s.kit.fail([2]), rank=2, method="fail", cause_type="ValueError")
returned("raise-on-all-ranks", WorkerError, r"fail\(\) raised ValueError on <all ranks>.*the true cause",
         lambda s: s.kit.fail())
returned("raise-on-a-rank-that-does-not-collect", WorkerError, r"rank 1", lambda s: s.grid.fail([1]), rank=1)
returned("raise-deep", WorkerError,
         r"fail_deep\(\) raised RuntimeError on <all ranks>.*not built.*KeyError: 'hidden_size'.*direct cause.*_deep",
         lambda s: s.kit.fail_deep())
returned("raise-in-a-coroutine", WorkerError, r"fail_async\(\) raised ValueError.*from a coroutine",
         lambda s: s.kit.fail_async())
returned("raise-user-type-error", WorkerError, r"rows\(\) raised TypeError|apply\(\) raised TypeError.*rank \d",
         lambda s: s.kit.apply(lambda rows: rows, EIGHT), cause_type="TypeError")
returned("raise-stop-iteration", WorkerError, r"fail\(\) raised StopIteration",
         lambda s: s.kit.fail(error=StopIteration))
returned("raise-recursion", WorkerError, r"recurse\(\) raised RecursionError", lambda s: s.kit.recurse())
returned("raise-what-does-not-pickle", WorkerError,
         r"fail\(\) raised bad_calls_workers\.HoldsLock on rank 0.*the true cause",
         lambda s: s.kit.fail([0], error=workers.HoldsLock), rank=0)
returned("raise-what-does-not-unpickle-here", WorkerError,
         r"fail_needs_two\(\) raised bad_calls_workers\.NeedsTwo on <all ranks>.*7: seven",
         lambda s: s.kit.fail_needs_two())
returned("raise-what-has-no-text", WorkerError, r"fail\(\) raised bad_calls_workers\.Mute on rank 0",
         lambda s: s.kit.fail([0], error=workers.Mute))
returned("raise-huge-message", WorkerError, r"^fail\(\) raised ValueError on rank 1",
         lambda s: s.kit.fail([1], message="x" * 2_000_000))
returned("raise-an-actor-error-of-ones-own", WorkerError, r"fail\(\) raised ray\.exceptions\.RayActorError on rank 0",
         lambda s: s.kit.fail([0], error=workers.actor_error_of_its_own))
bad("raise-cancelled", WorkerError, r"fail_async\(\) raised .*CancelledError on <all ranks>.*in fail_async",
    lambda s: s.frail.fail_async(asyncio.CancelledError), then=Then.FRAIL_WORKS)
bad("raise-keyboard-interrupt", WorkerError, r"fail\(\) raised KeyboardInterrupt on rank 1",
    lambda s: s.frail.fail([1], error=KeyboardInterrupt), then=Then.FRAIL_WORKS)


# --- A process ends ------------------------------------------------------------------------------------------

died = partial(bad, within=5.0, then=Then.FRAIL_BROKEN)

for how in ("sys.exit", "os._exit", "kill", "abort"):
    died(f"leave-{how}", WorkerDiedError, rf"rank 1 died during leave\(\) \({HOST}", rank=1, ranks=(1,), method="leave",
         call=lambda s, how=how: s.frail.leave(how, ranks=[1]))
died("leave-all", WorkerDiedError, r"ranks? \d.*died during leave\(\)", call=lambda s: s.frail.leave("os._exit"))


# --- Broken and closed groups --------------------------------------------------------------------------------


@partial(bad, "broken-layout", GroupBrokenError, r"rank 1 died.*restart\(\)", within=0.5, then=Then.FRAIL_BROKEN)
def _(s):
    group = s.broken()
    s.now()
    print(group.layout)


closed = partial(bad, within=0.5)

closed("closed-call", GroupClosedError, r"Kit is closed; create a new group", lambda s: _closed(s).add(1))
closed("closed-rank-zero", GroupClosedError, r"is closed", lambda s: _closed(s).execute_rank_zero_sync("plain", 1))
closed("closed-layout", GroupClosedError, r"is closed", lambda s: _closed(s).layout)


def _closed(s):
    group = s.closed
    s.now()
    return group


@partial(bad, "closed-pool-merged", GroupClosedError, r"is closed")
def _(s):
    pool = s.own_pool([1])
    merged = merge_resource_pool(pool, s.pool(2))
    pool.close()
    RayWorkerGroup(merged, RayClassWithInitArgs(Kit))


def _equal(found, expected):
    assert found == expected


# --- Futures as arguments ------------------------------------------------------------------------------------

returned("future-failed", WorkerError, r"^fail\(\) raised ValueError on (ranks .*; first: )?rank \d \(.*the true cause",
         lambda s: s.kit.echo(s.kit.fail.remote()), cause_type="ValueError")
returned("future-failed-into-rows", WorkerError, r"^fail_rows\(\) raised ValueError on (ranks .*; first: )?rank \d \(",
         lambda s: s.kit.rows(s.kit.fail_rows.remote(EIGHT)))
returned("future-failed-of-another-group", WorkerError, r"^fail\(\) raised ValueError on rank 1",
         lambda s: s.kit.items(_failed_already(s)))
returned("future-failed-into-a-chain", WorkerError, r"^fail_rows\(\) raised ValueError",
         lambda s: s.kit.rows.remote(s.kit.rows.remote(s.kit.fail_rows.remote(EIGHT))).result())
returned("futures-differ-in-rows", DispatchError, r"rows\(\).*'other'.* 4 rows.*8",
         lambda s: s.kit.rows(s.kit.rows.remote(EIGHT), other=s.kit.rows.remote(EIGHT[:4])))
returned("future-differs-from-a-batch", DispatchError, r"rows\(\).*4 rows.*8.*same number of rows",
         lambda s: s.kit.rows(EIGHT, other=s.kit.rows.remote(EIGHT[:4])), method="rows", argument="other")
returned("future-does-not-divide", DispatchError, r"rows\(\).*apply\(\).*5 rows.*4.*uneven='pad' or 'ragged'",
         lambda s: s.kit.rows(s.kit.apply.remote(lambda worker, rows: rows if worker.rank else [1, 2], EIGHT[:4])))
returned("future-of-a-list-of-another-length", DispatchError,
         r"future of pid\(\) is a list of 2; a list of 4 items is needed",
         lambda s: s.kit.items(s.frail.pid.remote()))
returned("future-of-a-batch-into-items", DispatchError,
         r"future of rows\(\) is not a list.*a list of 4 items is needed",
         lambda s: s.kit.items(s.kit.rows.remote(EIGHT)))
returned("future-of-a-value-into-items", DispatchError, r"future of first\(\) is not a list.*list of 4",
         lambda s: s.kit.items(s.kit.first.remote([1, 2, 3, 4])))
returned("future-of-scalars-into-rows", ResultError, r"results of apply\(\).*no rows",
         lambda s: s.kit.rows(s.kit.apply.remote(lambda worker, rows: 0.5, EIGHT)))
returned("future-of-objects-into-rows", DispatchError, r"result of apply\(\) cannot be cut into rows.*set",
         lambda s: s.kit.rows(s.kit.apply.remote(lambda worker, rows: set(rows), EIGHT)))
refused("future-inside-a-set", DispatchError, r"rows\(\).*'batch'.*future inside an object.*future\.result\(\)",
        lambda s: s.kit.rows([*EIGHT[:3], {s.kit.calls.remote()}]))
returned("future-of-rows-in-a-dataclass", DispatchError,
         r"rows\(\): argument \"batch\['of'\]\.options\".*8 rows.*dataclass.*Broadcast\(\.\.\.\)",
         lambda s: s.kit.rows({"ids": EIGHT, "of": Settings(s.kit.rows.remote(EIGHT))}))


def _failed_already(s):
    future = s.frail.fail.remote([1])
    assert isinstance(future.exception(5), WorkerError)
    s.now()
    return future


@partial(bad, "future-of-a-dead-rank", WorkerDiedError, r"leave\(\).*lost a rank|died during leave\(\)", within=5.0,
         then=Then.KIT_WORKS)
def _(s):
    future = s.frail.leave.remote("os._exit", ranks=[1])
    s.afterwards(lambda: wait_until(lambda: s.made("frail").broken is not None, 5.0))
    s.now()
    s.kit.echo(future)


# --- Classes and constructors --------------------------------------------------------------------------------

made = partial(bad, within=0.5)

made("class-no-worker", TypeError, r"subclass of single_controller\.Worker, got .*NoWorker",
     lambda s: RayClassWithInitArgs(workers.NoWorker))
made("class-no-worker-remote", TypeError, r"subclass of single_controller\.Worker, got .*NoWorker",
     lambda s: RayClassWithInitArgs(ray.remote(workers.NoWorker)))
made("class-an-instance", TypeError, r"subclass of single_controller\.Worker, got <.*Kit object",
     lambda s: RayClassWithInitArgs(Kit()))
made("constructor-unknown-argument", TypeError, r"Kit\(\) got an unexpected keyword argument 'num_gpus'",
     lambda s: RayClassWithInitArgs(Kit, num_gpus=1))
made("constructor-too-many", TypeError, r"Kit\(\) too many positional arguments",
     lambda s: RayClassWithInitArgs(Kit, 1, 2, 3))
made("constructor-none-of-its-own", TypeError, r"Plain\(\) too many positional arguments",
     lambda s: RayClassWithInitArgs(type("Plain", (Worker,), {}), 1))
made("class-option-unknown", ValueError, r"nmu_cpus",
     lambda s: RayClassWithInitArgs(Kit).update_options({"nmu_cpus": 1}))
made("class-option-of-the-group", ValueError, r"update_options\(\): the group sets \['name'\] itself",
     lambda s: RayClassWithInitArgs(Kit).update_options({"name": "x"}))
made("class-resource-negative", ValueError, r"set_additional_resource\(\): 'disk': -1 is not a positive amount",
     lambda s: RayClassWithInitArgs(Kit).set_additional_resource({"disk": -1}))


class Needs(Worker):
    def __init__(self, config):
        super().__init__()


group_refused = partial(bad, then=Then.NOTHING_LEFT)

group_refused("group-unknown-option", TypeError, r"unexpected keyword argument 'num_gpus'",
              lambda s: s.group(RayClassWithInitArgs(Starts), num_gpus=1))
group_refused("group-option-misspelt", TypeError, r"argument 'worker_enf'; did you mean 'worker_env'",
              lambda s: s.group(RayClassWithInitArgs(Starts), worker_enf={}))
group_refused("group-option-of-verl", ValueError, r"worker_nsight_options has no effect here: call .*update_options",
              lambda s: s.group(RayClassWithInitArgs(Starts), profile_steps=[1], worker_nsight_options={"t": "cuda"}))
group_refused("constructor-missing", TypeError, r"Needs\(\) missing a required argument: 'config'",
              lambda s: s.group(RayClassWithInitArgs(Needs)))
group_refused("constructor-missing-local", TypeError, r"Needs\(\) missing a required argument: 'config'",
              lambda s: LocalWorkerGroup(2, RayClassWithInitArgs(Needs)))
group_refused("group-class-not-wrapped", TypeError, r"RayClassWithInitArgs\(.*got .*Starts", lambda s: s.group(Starts))
group_refused("group-arguments-swapped", TypeError, r"resource_pool is a RayResourcePool, got RayClassWithInitArgs",
              lambda s: RayWorkerGroup(RayClassWithInitArgs(Starts), s.pool(2)))
group_refused("group-pool-is-a-list", TypeError, r"resource_pool is a RayResourcePool, got \[2\]",
              lambda s: RayWorkerGroup([2], RayClassWithInitArgs(Starts)))
for cls, method in ((workers.HasClose, "close"), (workers.HasStats, "stats"), (workers.HasWorkers, "workers")):
    group_refused(f"group-method-named-{method}", DispatchError, rf"{cls.__name__} registers {method}\(\).*rename",
                  lambda s, cls=cls: s.group(RayClassWithInitArgs(cls)), method=method)
group_refused("group-nothing-registered", AttributeError, r"Quiet\.train\(\) is not registered.*@register",
              lambda s: s.group(RayClassWithInitArgs(workers.Quiet)).train(), within=6.0)
group_refused("env-number", TypeError, r"worker_env maps strings to strings, got 'OMP_NUM_THREADS': 1",
              lambda s: s.group(RayClassWithInitArgs(Starts), worker_env={"OMP_NUM_THREADS": 1}))
group_refused("env-a-list", TypeError, r"worker_env",
              lambda s: s.group(RayClassWithInitArgs(Starts), worker_env=["A=1"]))
group_refused("env-impossible-name", ValueError, r"worker_env.*'A=B'",
              lambda s: s.group(RayClassWithInitArgs(Starts), worker_env={"A=B": "1"}))
for port in (0, -1, 70000, "http"):
    group_refused(f"master-port-{port}", ValueError, rf"master_port is a port number from 1 to 65535, got .*{port}",
                  lambda s, port=port: s.group(RayClassWithInitArgs(Starts), master_port=port))
group_refused("master-addr-empty", ValueError, r"master_addr is a host name or address",
              lambda s: s.group(RayClassWithInitArgs(Starts), master_addr="", master_port=29500))
group_refused("start-timeout-negative", ValueError, r"start_timeout",
              lambda s: s.group(RayClassWithInitArgs(Starts), start_timeout=-1))
group_refused("error-grace-text", ValueError, r"error_grace",
              lambda s: s.group(RayClassWithInitArgs(Starts), error_grace="5"))
group_refused("group-use-gpu-on-a-cpu-pool", ValueError, r"use_gpu=True, but RayResourcePool\(\[2\]\) has no GPUs",
              lambda s: s.group(RayClassWithInitArgs(Starts), use_gpu=True))
group_refused("constructor-argument-does-not-pickle", DispatchError, r"Kit.*'guard'.*cannot be pickled.*lock",
              lambda s: s.group(RayClassWithInitArgs(Kit, guard=threading.Lock())))

group_refused("class-does-not-pickle", DispatchError, r"Local.*cannot be pickled.*lock",
              lambda s: s.group(_class_with_a_lock()))

started = partial(bad, within=8.0, then=Then.NOTHING_LEFT)

started("constructor-raises-on-one-rank", StartError,
        rf"__init__\(\) raised RuntimeError on rank 1 \({HOST}.*no checkpoint at /nowhere\n\nTraceback.*_workers\.py",
        lambda s: s.group(RayClassWithInitArgs(Starts, "raise", 1)), rank=1, cause_type="RuntimeError")
started("constructor-raises-on-all-ranks", StartError, r"__init__\(\) raised RuntimeError on <all ranks>",
        lambda s: s.group(RayClassWithInitArgs(Starts, how="raise")))
started("constructor-exits", WorkerDiedError, r"rank 0 died during __init__\(\)",
        lambda s: s.group(RayClassWithInitArgs(Starts, "exit", 0)), rank=0)
started("constructor-too-slow", CallTimeoutError,
        r"__init__\(\) exceeded its timeout of 0\.5 s; rank 1 had not finished",
        lambda s: s.group(RayClassWithInitArgs(Starts, "sleep", 1), start_timeout=0.5), ranks=(1,))
started("class-of-a-module-that-workers-lack", StartError, r"ModuleNotFoundError on <all ranks>.*driver_only",
        lambda s: s.group(RayClassWithInitArgs(_class_of_driver_only_module())))
started("constructor-argument-does-not-unpickle-there", StartError, r"ModuleNotFoundError on <all ranks>.*only_here",
        lambda s: s.group(RayClassWithInitArgs(Kit, guard=workers.UnpicklesOnlyInItsProcess())))


@partial(started, "constructor-fails-and-frees-its-slot", StartError, r"rank 0")
def _(s):
    pool = s.own_pool([1], max_colocate_count=1)
    s.afterwards(lambda: _equal(s.group(RayClassWithInitArgs(Starts), pool).add(1), [1]))
    s.group(RayClassWithInitArgs(Starts, "raise"), pool)


@partial(started, "restart-fails", StartError, r"__init__\(\) raised RuntimeError on rank 0.*marked")
def _(s):
    with tempfile.TemporaryDirectory() as folder:
        mark = os.path.join(folder, "mark")
        group = s.group(RayClassWithInitArgs(Starts, "raise if marked", 0, mark))
        open(mark, "w").close()

        def check():
            with pytest.raises(GroupBrokenError, match=r"(?s)its restart failed.*RuntimeError.*restart\(\)"):
                group.add(1)
            group.restart()
            assert group.add(1) == [1, 2]

        s.afterwards(check)
        s.now()
        group.restart()


def _class_with_a_lock():
    class Local(Worker):
        lock = threading.Lock()

    return RayClassWithInitArgs(Local)


def _class_of_driver_only_module():
    module = types.ModuleType("driver_only")
    sys.modules["driver_only"] = module
    module.Alone = type("Alone", (Worker,), {"__module__": "driver_only", "__qualname__": "Alone"})
    return module.Alone


# --- Pools ---------------------------------------------------------------------------------------------------

pool_refused = partial(bad, within=1.0)

for entries in (8, "8", [], [0], [2, -1], [True], [2.0], ["2"], None):
    pool_refused(f"pool-of-{entries!r}", ValueError,
                 rf"process_on_nodes is a list of positive integers.*got {re.escape(repr(entries))}",
                 lambda s, entries=entries: RayResourcePool(entries, use_gpu=False))
pool_refused("pool-colocate-zero", ValueError, r"max_colocate_count=0: expected an integer of at least 1",
             lambda s: RayResourcePool([1], max_colocate_count=0))
pool_refused("pool-prefix-number", ValueError, r"name_prefix is a string or None, got 1",
             lambda s: RayResourcePool([1], name_prefix=1))
pool_refused("pool-accelerator-number", ValueError, r"accelerator_type is a string or None, got 100",
             lambda s: RayResourcePool([1], accelerator_type=100))
pool_refused("pool-timeout-zero", ValueError, r"placement_timeout is a positive number.*got 0",
             lambda s: RayResourcePool([1], placement_timeout=0))
pool_refused("pool-resource-negative", ValueError, r"resources.*'disk'.*-1",
             lambda s: RayResourcePool([1], use_gpu=False, resources={"disk": -1}))

pool_refused("merge-nothing", ValueError, r"at least one pool", lambda s: merge_resource_pool())
pool_refused("merge-a-list", TypeError, r"takes RayResourcePools, got \[",
             lambda s: merge_resource_pool([s.pool(2), s.pool(4)]))
pool_refused("merge-twice-inside", ValueError, r"same pool.*twice",
             lambda s: merge_resource_pool(merge_resource_pool(s.pool(2), s.pool(4)), s.pool(2)))
pool_refused("merge-gpu-with-cpu", ValueError, r"pools differ in use_gpu: \[False, True\]",
             lambda s: merge_resource_pool(s.pool(2), s.own_pool([1], use_gpu=True)))
pool_refused("merge-colocation", ValueError, r"pools differ in max_colocate_count: \[10, 2\]",
             lambda s: merge_resource_pool(s.pool(2), s.own_pool([1], max_colocate_count=2)))

group_refused("place-options-beyond-the-slot", PlacementError, r"GPU",
              lambda s: s.group(_with_options(num_gpus=1), s.own_pool([1], placement_timeout=4.0)))


def _with_options(**options):
    made = RayClassWithInitArgs(Starts)
    made.update_options(options)
    return made


# fmt: on

# --- The test ------------------------------------------------------------------------------------------------


NO_GROUP = re.compile("class-(no|an?|its|option|resource)-|constructor-(unk|too-m|mis|none)|pool-|merge-|place-")
"""Rows that create no group, or are about pools. They run once, in the Ray test."""

ONLY_ON_RAY = re.compile(
    "env-|master-|group-(arguments|option|pool|use-gpu)|rows-an-object-ref|leave-(os|kill|abort|future|all)"
    "|closed-pool|future-of-a-dead-rank|constructor-(exits|fails|argument-does-not-unpickle)"
    "|class-of-a-module|(send|result)-(what-)?does-not-unpickle"
)
"""Rows about processes, pools and Ray's references, and about what another process cannot open."""

DEPENDS_ON_RAY = re.compile(
    "env-|master-|group-(arguments|option|pool|use-gpu)|rows-an-object-ref|leave-kill"
    "|closed-pool|future-of-a-dead-rank|class-(of-a-module|does-not-pickle)"
    "|constructor-(argument|raises-on-one|exits|too-slow)|send-|result-does-not|raise-(on-one-rank|what-|huge)"
)
"""Rows whose outcome depends on Ray and that no other test covers: the end of a process, what is pickled, references.
They run on Ray in `make test`; in `make test-all` all rows do."""

WITH_THREADS_ALONE = re.compile("raise-keyboard|constructor-too-slow")
"""Rows whose ranks or calls run at the same time; and Ctrl-C, which is the driver's where it runs the ranks."""

also_on_ray = pytest.mark.full("bad calls on Ray that do not depend on Ray or that another test covers")
also_with_threads = pytest.mark.full("bad calls that reach no rank, with ranks in threads too")


def cases():
    """All rows on Ray; then those that need no Ray, with the same messages, from the transport without processes: first
    with ranks that run in turn, then with ranks in threads."""
    for row in TABLE:
        there = NO_GROUP.match(row.id) or DEPENDS_ON_RAY.match(row.id)
        yield pytest.param(None, row, id=row.id, marks=() if there else also_on_ray)
    here = [row for row in TABLE if not NO_GROUP.match(row.id) and not ONLY_ON_RAY.match(row.id)]
    for row in here:
        if not WITH_THREADS_ALONE.match(row.id):
            yield pytest.param(False, row, id=f"in-turn-{row.id}")
    for row in here:
        marks = also_with_threads if row.then is Then.KIT_SAW_NOTHING else ()
        yield pytest.param(True, row, id=f"threads-{row.id}", marks=marks)


@pytest.fixture(scope="module")
def stage(request):
    if request.param is None:
        request.getfixturevalue("ray_cluster")
    stage = Stage(threads=request.param)
    yield stage
    stage.close()


@pytest.mark.parametrize(("stage", "row"), cases(), indirect=["stage"])
def test_bad_call(stage, row):
    try:
        check_row(row, stage)
    finally:
        stage.leave_row()


def check_row(row, stage):
    seen = _make_ready(row.then, stage)
    stage.now()
    with pytest.raises(BaseException) as caught:
        row.call(stage)
    seconds = time.monotonic() - stage.begun
    error = caught.value
    if isinstance(error, pytest.skip.Exception):
        raise error

    assert _is_documented(error, row.error), f"expected {row.error.__name__}, got {_show(error)}"
    all_ranks = (
        r"(rank \d|ranks [\d, -]+; first: rank \d) \(" if stage.on_ray else r"ranks 0(-3|, 1); first: rank \d \("
    )
    says = row.says.replace(ALL_RANKS, all_ranks)
    assert re.search(says, str(error), re.DOTALL), f"the message lacks {says!r}: {_show(error)}"
    for name, value in row.has.items():
        assert getattr(error, name) == value, f"error.{name} is {getattr(error, name)!r}, not {value!r}"
    assert seconds < row.within, f"the error took {seconds:.2f} s, more than {row.within} s"
    if isinstance(error, SingleControllerError):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))

    for check in stage.to_check:
        check()
    _hold(row.then, stage, seen)


def _make_ready(then, stage):
    """Create or repair the group first, so that this does not count towards the row's time."""
    if then is Then.KIT_SAW_NOTHING:
        return stage.kit.calls()
    if then is Then.KIT_WORKS:
        stage.kit.calls()
    if then in (Then.FRAIL_BROKEN, Then.FRAIL_WORKS):
        stage.frail.calls()
    return None


def _is_documented(error, kind):
    if not issubclass(kind, SingleControllerError):
        return isinstance(error, kind)
    # The error of a method is also of the method's exception class: the documented class comes first in its order.
    named = (base for base in type(error).__mro__ if getattr(sys.modules[base.__module__], base.__name__, None) is base)
    return next(named) is kind


def _show(error):
    return f"{type(error).__name__}: {str(error)[:2000]}"


def _hold(then, stage, seen):
    match then:
        case Then.KIT_SAW_NOTHING:
            assert stage.made("kit").calls() == seen
            assert stage.made("kit").add.options(timeout=10)(1) == [1, 2, 3, 4]
        case Then.KIT_WORKS:
            assert stage.made("kit").add.options(timeout=10)(1) == [1, 2, 3, 4]
        case Then.FRAIL_WORKS:
            assert stage.made("frail").add.options(timeout=10)(1) == [11, 12]
        case Then.FRAIL_BROKEN:
            group = stage.made("frail")
            with within(0.5), pytest.raises(GroupBrokenError, match=r"restart\(\)"):
                group.add(1)
            group.restart()
            assert group.add.options(timeout=10)(1) == [11, 12]
        case Then.NOTHING_LEFT:
            mine = ("Starts", "Alone", "HasClose", "HasStats", "HasWorkers")
            if stage.to_check or not stage.on_ray:  # the row created a group on purpose
                return
            wait_until(lambda: not [name for name in ray.util.list_named_actors() if name.startswith(mine)], 3.0)


def test_table_is_long_enough_and_row_names_are_unique():
    assert len(TABLE) >= 70
    assert len({row.id for row in TABLE}) == len(TABLE)
