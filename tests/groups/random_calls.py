"""Random calls on a group of `random_call_workers.Journal`, checked against a sequential model.

A `Sender` makes calls from one thread. Its model is that the calls which it sends to a rank run there one after the
other, in the order in which it sends them. What the calls return, and the ranks' journals at the end, must agree.
"""

import asyncio
import contextlib
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import ray
from random_call_workers import START, advance, digest, pattern
from ray.exceptions import RayError

from single_controller import Broadcast, CallTimeoutError, SingleControllerError

WAIT = 60
"""Bound of each wait in seconds."""

MOST_OPEN = 12
"""Calls of a sender whose results it has not asked for."""


class Fails:
    """Expected of a call: that it raises one of these."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return f"an error with {self.text!r}"


class Request:
    """One call that is to be made.

    Args:
        method: name of the method.
        args: its arguments.
        expected: its value, or `Fails`.
    """

    def __init__(self, method, args, expected):
        self.method, self.args, self.expected = method, args, expected


@ray.remote(num_cpus=0, max_retries=0)
def produce(nbytes, key, seconds):
    time.sleep(seconds)
    if key is None:
        raise RuntimeError("no argument today")
    return pattern(nbytes, key)


@ray.remote(num_cpus=0)
class Owner:
    def lend(self, count):
        return [ray.put(pattern(300_000, number)) for number in range(count)]


def lost_references(count=4):
    """References to objects that are lost, because their owner is dead."""
    owner = Owner.remote()
    references = ray.get(owner.lend.remote(count), timeout=WAIT)
    ray.kill(owner)
    end = time.monotonic() + 20

    def wait_until_lost(reference):
        with contextlib.suppress(RayError):
            while ray.get(reference, timeout=WAIT) and time.monotonic() < end:
                time.sleep(0.05)  # the store has it a moment longer
            raise AssertionError("an object has outlived its owner")

    with ThreadPoolExecutor(count) as threads:  # each takes Ray a second
        list(threads.map(wait_until_lost, references))
    return references


class Sender:
    """Makes random calls from one thread, and checks them.

    Args:
        group: the group.
        name: what distinguishes it from others with the same group.
        seed: of the random choices.
        lost: references to objects that are lost.
        interrupts: raises KeyboardInterrupt in waits, only for the main thread.
        references: whether to wait for references of Ray too, which the group does not end when it breaks.
    """

    def __init__(self, group, name, seed, lost=(), interrupts=None, references=True):
        self.group, self.name, self.lost, self.interrupts = group, name, lost, interrupts
        self.references = references
        self.size = group.world_size
        self.rng = random.Random(f"{seed} {name}")
        self.number = 0
        self.states = [START] * self.size
        self.sent = [[] for _ in range(self.size)]
        self.open = []  # (what, how to get its value, what is expected)
        self.doing = ""

    # --- the model --------------------------------------------------------------------------------------------------

    def begin(self, method, ranks):
        """Note a call that is about to be sent. Returns its first argument, and the ranks' states after it."""
        self.number += 1
        call = (self.name, self.number)
        for rank in ranks:
            self.states[rank] = advance(self.states[rank], self.number, method)
            self.sent[rank].append((*call, method))
        return call, [(rank, *self.states[rank]) for rank in ranks]

    @property
    def all(self):
        return range(self.size)

    def check(self, what, get, expected):
        """Get the value of a call, and compare."""
        self.doing = what
        try:
            value = get()
        except Exception as error:
            if not isinstance(expected, Fails) or expected.text not in str(error):
                raise AssertionError(f"{what}: {type(error).__name__}: {error}; expected {expected!r}") from error
            return
        assert not isinstance(expected, Fails), f"{what} returned {value!r}; expected {expected!r}"
        assert digest(value) == digest(expected), f"{what} returned {value!r}; expected {expected!r}"

    def later(self, what, get, expected):
        """Check a call at some later time."""
        self.open.append((what, get, expected))
        while len(self.open) > MOST_OPEN:
            self.check(*self.open.pop(self.rng.randrange(len(self.open))))

    def finish(self):
        """Check all that is left."""
        while self.open:
            self.check(*self.open.pop())

    # --- what is called ---------------------------------------------------------------------------------------------

    def data(self):
        """An argument, most often a small one."""
        kind = self.rng.random()
        if kind < 0.55:
            return self.rng.choice([None, self.rng.randrange(1000), "text", {"a": [1, 2]}])
        nbytes = self.rng.randrange(1, 1_000_000) if kind < 0.92 else self.rng.randrange(1_120_000, 1_500_000)
        return pattern(nbytes, self.number, array=self.rng.random() < 0.5)

    def small(self, ranks=None):
        data = self.data()
        call, states = self.begin("small", ranks or self.all)
        return Request("small", (call, data), [(state, digest(data)) for state in states])

    def make(self, ranks=None):
        nbytes = self.rng.choice([10, 20_000, 1_000_000, 1_120_000, 1_500_000])
        array = self.rng.random() < 0.5
        call, states = self.begin("make", ranks or self.all)
        return Request("make", (call, nbytes, array), [(state, pattern(nbytes, state, array)) for state in states])

    def zero(self):
        data = self.data()
        call, states = self.begin("zero", [0])
        return Request("zero", (call, data), (states[0], digest(data)))

    def items(self):
        data = [self.data() for _ in self.all]
        call, states = self.begin("items", self.all)
        return Request("items", (Broadcast(call), data), [(s, digest(d)) for s, d in zip(states, data, strict=True)])

    def rows(self):
        data = [self.data() for _ in range(self.size * self.rng.randrange(1, 4))]
        call, states = self.begin("rows", self.all)
        return Request("rows", (Broadcast(call), data), self.of_rows(states, data))

    def of_rows(self, states, data):
        each = len(data) // self.size
        return [(states[k // each], digest(row)) for k, row in enumerate(data)]

    def by_layout(self):
        tp = 1 if self.size % 2 else 2
        data = [self.data() for _ in range(self.size // tp)]
        call, states = self.begin("by_layout", self.all)
        return Request(
            "by_layout", (Broadcast(call), data), [(s, digest(d)) for s, d in zip(states[::tp], data, strict=True)]
        )

    def custom(self):
        data = [self.data() for _ in self.all]
        call, states = self.begin("custom", self.all)
        return Request("custom", (call, data), [(s, digest(d)) for s, d in zip(states, data, strict=True)])

    def fail(self, ranks=None):
        call, _ = self.begin("fail", ranks or self.all)
        return Request("fail", (call, self.some(ranks or self.all)), Fails(f"as told, {call}"))

    def unpicklable(self, ranks=None):
        call, _ = self.begin("unpicklable", ranks or self.all)
        victims, told = self.some(ranks or self.all), Fails("cannot pickle '_thread.lock' object")
        return Request("unpicklable", (call, victims), told)

    def sleep(self, ranks=None):
        call, states = self.begin("sleep", ranks or self.all)
        return Request("sleep", (call, self.rng.uniform(0.0, 0.05)), states)

    def async_sleep(self, ranks=None):
        call, states = self.begin("async_sleep", ranks or self.all)
        return Request("async_sleep", (call, self.rng.uniform(0.0, 0.02)), states)

    def aside(self):
        data = self.data()
        return Request("aside", (data, self.rng.choice([0.0, 0.0, 0.05])), [(rank, digest(data)) for rank in self.all])

    def aside_zero(self):
        data = self.data()
        return Request("aside_zero", (data,), (0, digest(data)))

    def some(self, ranks):
        return sorted(self.rng.sample(ranks, self.rng.randrange(1, len(ranks) + 1)))

    def of_reference(self, ranks=None):
        """A call with a reference of Ray as argument."""
        reference, value = self.reference()
        return self.of_argument(reference, value, ranks)

    def reference(self):
        """A reference of Ray, and its value or `Fails`."""
        nbytes, kind = self.rng.choice([10, 50_000, 300_000]), self.rng.random()
        if kind < 0.5:
            value = pattern(nbytes, self.number)
            return ray.put(value), value
        seconds = self.rng.uniform(0.0, 0.03)
        if kind < 0.7:
            return produce.remote(nbytes, self.number, seconds), pattern(nbytes, self.number)
        if kind < 0.85 or not self.lost:
            return produce.remote(nbytes, None, seconds), Fails("no argument today")
        return self.rng.choice(self.lost), Fails("")

    def of_argument(self, argument, value, ranks=None):
        """A call of one of several methods with an argument that somebody else computes. Without it, no method runs."""
        method = "small" if ranks else self.rng.choice(["small", "small", "zero"])
        ranks = ranks or {"small": self.all, "zero": [0]}[method]
        if isinstance(value, Fails):
            self.number += 1
            return Request(method, ((self.name, self.number), argument), value)
        call, states = self.begin(method, ranks)
        expected = [(state, digest(value)) for state in states]
        return Request(method, (call, argument), expected[0] if method == "zero" else expected)

    def of_future(self):
        """A call with the future of another one as argument."""
        kind = self.rng.choice(["rows", "items", "take", "whole", "whole", "whole"])
        if kind == "rows":
            source = self.rows()
            future = self.send(source)
            call, states = self.begin("rows", self.all)
            return Request("rows", (Broadcast(call), future), self.of_rows(states, source.expected))
        source = self.request(self.rng.choice([*VALUES, "fail", "unpicklable"]) if kind == "whole" else "make")
        future = self.send(source)
        if kind == "items":
            call, states = self.begin("items", self.all)
            expected = [(s, digest(d)) for s, d in zip(states, source.expected, strict=True)]
            return Request("items", (Broadcast(call), future), expected)
        if kind == "take":
            call, states = self.begin("take", self.all)
            return Request("take", (call, future), [(state, digest(source.expected)) for state in states])
        return self.of_argument(future, source.expected)

    def request(self, name):
        return getattr(self, name)()

    # --- how it is called -------------------------------------------------------------------------------------------

    def send(self, request):
        self.doing = f"send {request.method}{str(request.args)[:60]}"
        return getattr(self.group, request.method).remote(*request.args)

    def wait_for(self, request):
        method = getattr(self.group, request.method)
        if self.rng.random() < 0.2:
            method = method.options(timeout=WAIT)
        self.check(self.what(request), lambda: method(*request.args), request.expected)

    def what(self, request):
        return f"sender {self.name}: {request.method}{str(request.args)[:60]}"

    def collect_later(self, request):
        future = self.send(request)
        self.later(self.what(request), lambda: future.result(timeout=WAIT), request.expected)

    def collect_now(self, request):
        future = self.send(request)
        self.check(self.what(request), lambda: future.result(timeout=WAIT), request.expected)

    def drop(self, request):
        self.send(request)

    def wait_briefly(self, request):
        future = self.send(request)

        def get():
            with contextlib.suppress(CallTimeoutError):
                return future.result(timeout=0.001)
            return future.result(timeout=WAIT)

        self.later(self.what(request), get, request.expected)
        self.check(*self.open.pop())

    def await_some(self, request):
        """Await several calls at once."""
        requests = [request, *(self.request(self.rng.choice(VALUES)) for _ in range(self.rng.randrange(4)))]

        async def main():
            futures = [self.send(request) for request in requests]
            if self.rng.random() < 0.3:
                with contextlib.suppress(TimeoutError, SingleControllerError):
                    await asyncio.wait_for(_value(futures[0]), 0.001)
            waiting = [asyncio.wait_for(_value(future), WAIT) for future in futures]
            return await asyncio.gather(*waiting, return_exceptions=True)

        for request, value in zip(requests, asyncio.run(main()), strict=True):
            self.check(self.what(request), lambda value=value: _raised(value), request.expected)

    def interrupt(self, request):
        """Ctrl-C while the call is waited for. It goes on."""
        method = getattr(self.group, request.method)
        self.doing = f"interrupt {self.what(request)}"

        def get():
            with self.interrupts.after(self.rng.choice([0.0, self.rng.uniform(0.0, 0.03)])):
                return method(*request.args)

        with contextlib.suppress(KeyboardInterrupt):
            self.check(self.what(request), get, request.expected)

    # --- calls that do not go through a generated method ------------------------------------------------------------

    def handle(self):
        """Call one rank directly. Such a call has no place among those of the group, so none of this sender's may run
        meanwhile."""
        request = self.small()
        self.check(self.what(request), lambda: getattr(self.group, request.method)(*request.args), request.expected)
        rank = self.rng.choice(self.all)
        request = getattr(self, self.rng.choice(DIRECT))([rank])
        expected = request.expected[0] if isinstance(request.expected, list) else request.expected
        if request.method == "unpicklable":
            expected = Fails("pickle")  # the text is Ray's
        self.doing = what = f"sender {self.name}: workers[{rank}].{request.method}{str(request.args)[:60]}"
        reference = getattr(self.group.workers[rank], request.method).remote(*request.args)
        self.check(what, lambda: ray.get(reference, timeout=WAIT), expected)

    def execute(self):
        """Call a method that is not registered."""
        data, kind = self.data(), self.rng.randrange(4)
        call, states = self.begin("plain", [0] if kind > 1 else self.all)
        self.doing = what = f"sender {self.name}: execute {kind} of plain{call}"
        expected = [(state, digest(data)) for state in states]
        if kind == 0:
            self.check(what, lambda: self.group.execute_all_sync("plain", call, data), expected)
        elif kind == 1:
            references = self.group.execute_all_async("plain", call, data)
            self.later(what, lambda: ray.get(references, timeout=WAIT), expected)
        elif kind == 2:
            self.check(what, lambda: self.group.execute_rank_zero_sync("plain", call, data), expected[0])
        else:
            reference = self.group.execute_rank_zero_async("plain", call, data)
            self.later(what, lambda: ray.get(reference, timeout=WAIT), expected[0])

    def step(self):
        """Make a random call."""
        kind = self.rng.random()
        if kind < 0.12 and self.references:
            return self.handle()
        if kind < 0.17 and self.references:
            return self.execute()
        name = self.rng.choices(list(REQUESTS), list(REQUESTS.values()))[0]
        request = self.request(name)
        ways = WAYS if self.interrupts is not None else WAYS_WITHOUT_INTERRUPTS
        return getattr(self, self.rng.choices(list(ways), list(ways.values()))[0])(request)


REQUESTS = {
    "small": 30,
    "make": 5,
    "zero": 6,
    "items": 6,
    "rows": 5,
    "by_layout": 5,
    "custom": 3,
    "fail": 4,
    "unpicklable": 2,
    "sleep": 2,
    "async_sleep": 2,
    "aside": 3,
    "aside_zero": 2,
    "of_reference": 4,
    "of_future": 6,
}
"""What is called, with weights."""

DIRECT = ("small", "small", "make", "fail", "unpicklable", "of_reference", "sleep", "async_sleep")
"""Those that are also made on one rank. They take the ranks; by default, all."""

VALUES = ("small", "make", "zero", "items", "rows", "by_layout", "sleep")
"""Those that succeed, and whose futures may be arguments."""

WAYS_WITHOUT_INTERRUPTS = {
    "wait_for": 50,
    "collect_later": 20,
    "collect_now": 6,
    "drop": 6,
    "wait_briefly": 4,
    "await_some": 3,
}
WAYS = {**WAYS_WITHOUT_INTERRUPTS, "interrupt": 6}
"""How it is called, with weights."""


async def _value(future):
    return await future


def _raised(value):
    if isinstance(value, Exception):
        raise value
    return value


def check_journals(group, senders):
    """The ranks have run what was sent, each once, in the order in which it was sent."""
    found = group.journal()
    for rank, (entries, faults) in enumerate(found):
        assert not faults, f"rank {rank}: {faults[:5]}"
        for sender in senders:
            ran = [entry for entry in entries if entry[0] == sender.name]
            assert ran == sender.sent[rank], f"rank {rank}: {first_difference(ran, sender.sent[rank])}"
    # Calls of several ranks are in the same order on all of them, whichever thread has sent them.
    for a, b in itertools.combinations([entries for entries, _ in found], 2):
        common = set(a) & set(b)
        of_a, of_b = ([entry for entry in entries if entry in common] for entries in (a, b))
        assert of_a == of_b, f"two ranks differ: {first_difference(of_a, of_b)}"


def first_difference(ran, sent):
    for k, (one, other) in enumerate(zip(ran, sent, strict=False)):
        if one != other:
            return f"at {k} of {len(ran)}: {ran[max(k - 3, 0) : k + 4]}; expected {sent[max(k - 3, 0) : k + 4]}"
    return f"{len(ran)} calls, expected {len(sent)}: {(ran + sent)[min(len(ran), len(sent)) :][:5]}"
