"""Runs the code of an update of weights step by step, for `weight_sync_model`.

A participant is suspended at each step by an exception, and resumed by running it again from its beginning with the
outcomes that it has had so far. A receiver between two calls is its history of calls.
"""

from __future__ import annotations

import pickle
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from sync_workers import ToyEngine

from single_controller import CallTimeoutError
from single_controller.call.worker.worker import RankInfo, RoleWorkers, assign
from workers.weight_sync import sync_protocol as protocol
from workers.weight_sync import weight_receiver as receiver
from workers.weight_sync import weight_sender as sender
from workers.weight_sync.receiver_calls import Receivers
from workers.weight_sync.transports import process_group
from workers.weight_sync.transports import weight_transport as sending
from workers.weight_sync.weight_plan import Shard
from workers.weight_sync.weight_receiver import WeightReceiver

SENDERS, RECEIVERS = 2, 3
NAMES = "abcd"  # of the tensors; train rank 0 has a and c, train rank 1 b and d
CLASS_OF = (0, 0, 1)  # of the receivers
BUCKET = 16  # two rounds


# --- running the code step by step ----------------------------------------------------------------------------------


class Suspend(BaseException):
    """The code has come to a step whose outcome is not yet known."""


class OtherStep(BaseException):
    """The code has come to another step than the one whose outcome is next."""


class Script:
    """The outcomes that a participant has had, and the step that it has come to."""

    def __init__(self, outcomes: tuple[Any, ...]) -> None:
        self.outcomes, self.position, self.step = outcomes, 0, None
        self.clock, self.seen = 0.0, ()
        self.owner, self.ids, self.born = "", 0, 0

    def do(self, *step: Any) -> Any:
        if self.step is not None or self.position == len(self.outcomes):
            self.step = self.step or step
            raise Suspend
        expected, outcome = self.outcomes[self.position]
        if expected != step:
            raise OtherStep
        self.position += 1
        if isinstance(outcome, Raised):
            raise outcome.kind(outcome.text)
        return outcome

    def ask(self, *question: Any) -> Any:
        """A read. If the answer is no, the next sleep ends when it is another one."""
        answer = self.do("ask", question)
        if not answer:
            self.seen = (*self.seen, question)
        return answer

    def sleep(self, *_: Any) -> None:
        seen, self.seen = self.seen, ()
        self.do("sleep", tuple(dict.fromkeys(seen)))


class Raised(NamedTuple):
    kind: type[Exception]
    text: str


running = Script(())

_values: list[Any] = []
_numbers: dict[Any, int] = {}


def number_of(value: Any) -> int:
    """Large values are numbers in states, so that comparing states is fast."""
    if value not in _numbers:
        _numbers[value] = len(_values)
        _values.append(value)
    return _numbers[value]


def value_of(number: int) -> Any:
    """The other way round."""
    return _values[number]


class Store:
    """The train ranks' store."""

    def set(self, key, value):
        running.do("set", key, number_of(value))

    def compare_set(self, key, expected, value):
        assert expected == ""
        return value_of(running.do("claim", key, number_of(value)))

    def get(self, key):
        return value_of(running.do("ask", ("get", key)))

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def check(self, keys):
        return running.ask("set", tuple(keys))

    def delete_key(self, key):
        running.do("ask", ("delete", key))


class Client:
    """The store for rendezvous, or a connection to it."""

    def __init__(self, host, port, is_master, timeout, wait_for_workers=True):
        self.port = running.born if is_master else port
        self.soon = timeout.total_seconds() < 100
        if not is_master:
            running.do("connect", self.port, self.soon)

    def set_timeout(self, timeout):
        pass

    def set(self, key, value):
        running.do("give up", self.port, key)

    def check(self, keys):
        return running.ask("given up", self.port, keys[0])


class Group:
    """A process group; the constructor only begins the rendezvous."""

    def __init__(self, store, rank, size, timeout):
        (self.name, client), self.rank = store, rank
        self.there = running.do("meet", client.port, self.name, rank, size, client.soon)

    def alltoall_base(self, output, input, output_sizes, input_sizes, options):
        parts = tuple(bytes(part.tolist()) for part in input.split(input_sizes))
        return self._begin(parts, output, output_sizes)

    def broadcast(self, tensors, options):
        own = bytes(tensors[0].tolist()) if self.rank == 0 else None
        return self._begin(own, tensors[0], None)

    def _begin(self, data, output, sizes):
        running.do("begin", self.name, self.rank, number_of(data))
        return Work(self, output, sizes)


class Work:
    def __init__(self, group, output, sizes):
        self.group, self.output, self.sizes, self.outcome = group, output, sizes, None

    def is_completed(self):
        self.outcome = running.ask("ended", self.group.name, self.group.rank)
        return bool(self.outcome)

    def wait(self):
        if self.outcome == "failed":
            raise RuntimeError("Connection closed by peer")
        sent = [value_of(data) for data in self.outcome]
        if self.sizes is not None and sum(self.sizes):
            received = b"".join(data[self.group.rank] for data in sent if self.group.rank < len(data))
        elif self.sizes is None and self.group.rank:
            received = sent[0]
        else:
            return
        self.output.copy_(torch.tensor(list(received), dtype=torch.uint8))


def interruptible(do, check, seconds):
    """As `process_group._interruptible`, without a thread."""
    channel = do()
    while True:
        met = running.ask("met", channel._group.name) if channel._group.there else running.ask("never")
        if met == "failed":
            raise dist.DistNetworkError("the store's process has died")
        if met:
            return channel
        check()
        running.sleep()


def leave(channel):
    """As `Channel.leave`."""
    group, channel._group = channel._group, None
    if group is not None:
        running.do("leave", group.name, group.rank)


def new_id():
    running.ids += 1
    return SimpleNamespace(hex=f"{running.owner} {running.ids}")


class Time:
    """Each look at the clock finds that enough has passed to look at everything else, too."""

    @staticmethod
    def monotonic():
        running.clock += 1.0
        return running.clock

    sleep = staticmethod(lambda seconds: running.sleep())


class Future:
    """Of a call of all receivers of a group."""

    def __init__(self, call):
        self.call = call

    def _outcome(self):
        return running.ask("call", self.call)

    def done(self):
        return bool(self._outcome())

    def exception(self):
        outcome = self._outcome()
        return outcome.kind(outcome.text) if isinstance(outcome, Raised) else None

    def result(self, timeout=None):
        if timeout is not None and ("call", self.call) in running.seen:
            running.sleep()  # the caller has looked at everything else, too
        while not (outcome := self._outcome()):
            if timeout is not None:
                raise CallTimeoutError("not yet", call_goes_on=True)
            running.sleep()
        if isinstance(outcome, Raised):
            raise outcome.kind(outcome.text)
        return [pickle.loads(value_of(one)) for one in outcome]


class FakeMethod:
    def __init__(self, group, name):
        self._group, self._name = group, name

    def options(self, timeout):
        return self

    def remote(self, *arguments):
        return Future(running.do("call", self._group, number_of(pickle.dumps((self._name, arguments)))))


class FakeMethods:
    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        return FakeMethod(self._group, name)


class FakeGroup:
    broken = None
    _transport = SimpleNamespace(synchronous=False)

    def __init__(self, number, members):
        self.methods, self.world_size = FakeMethods(number), len(members)


class Known(Receivers):
    """Receivers whose groups never change."""

    def __init__(self, groups):
        super().__init__(None)
        self._given = self._groups = [FakeGroup(number, one) for number, one in enumerate(groups)]

    def look_up(self, budget):
        self._budget = budget


@contextmanager
def patched(*more):
    """The code's surroundings are those of the model."""
    patches = [
        *(mock.patch.object(module, "time", Time) for module in (protocol, sending, process_group, receiver, sender)),
        mock.patch.object(receiver, "uuid", SimpleNamespace(uuid4=new_id)),
        mock.patch.object(sending.Update, "_store", Store()),
        mock.patch.object(sender.WeightSender, "_common_key", lambda self, ranks: f"update {self.version}"),
        mock.patch.object(process_group, "_interruptible", interruptible),
        mock.patch.object(
            process_group.FlatBuffer, "take", lambda self, nbytes: torch.zeros(nbytes, dtype=torch.uint8)
        ),
        mock.patch.object(process_group, "_PATIENT_SECONDS", 0.0),
        mock.patch.object(process_group.Channel, "leave", leave),
        mock.patch.object(dist, "TCPStore", Client),
        mock.patch.object(dist, "PrefixStore", lambda prefix, store: (prefix, store)),
        mock.patch.object(dist, "ProcessGroupGloo", Group),
        *more,
    ]
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


class Engine(ToyEngine):
    """Knows whether an update is under way."""

    told = ""

    def load_weights(self, pairs):
        for name, tensor in pairs:
            self.weights[name].copy_(tensor)

    def begin_update(self):
        self.told = "begun"

    def finish_update(self, version):
        self.told = ""

    def abandon_update(self):
        self.told = ""


# --- participants ---------------------------------------------------------------------------------------------------


class Participants:
    """Runs the code of each, and remembers what it did: equal histories have equal outcomes.

    Args:
        groups: of the receivers: their numbers.
        double_buffer: see `WeightSender`.
        verify: see `WeightSender`.
        updates: how many.
    """

    def __init__(self, groups, double_buffer, verify, updates):
        self.groups, self.updates, self._options = groups, updates, {"double_buffer": double_buffer, "verify": verify}
        self._senders, self._receivers = {}, {}
        self._histories, self._snapshots = [], {}
        self._first_ended = {}

    # A train rank: (rank, when it was started, outcomes). It sends versions from ``born + 1`` on.

    def sender_step(self, rank, born, outcomes):
        """Return the step that a train rank has come to, and its history: a shorter one if it has ended an update."""
        key = rank, born, outcomes
        if key not in self._senders:
            self._senders[key] = self._run_sender(*key)
        return self._senders[key]

    def _run_sender(self, rank, born, outcomes):
        global running
        running = Script(outcomes)
        running.born = born
        made = sender.WeightSender("group", [], bucket_bytes=BUCKET, timeout=1e7, **self._options)
        made._id, made._receivers = f"started {born}", Known(self.groups)
        try:
            for version in range(1 + born, 1 + self.updates):
                made.version, running.seen = version, ()
                running.do("next", version)
                held = [Shard.whole(name, torch.full((2,), float(version))) for name in NAMES[rank::SENDERS]]
                error = ""
                try:
                    made.send(version, held, rank=rank, ranks=SENDERS)
                except (protocol.WeightSyncError, dist.DistError) as failed:
                    error = f"{type(failed).__name__}: {failed}"
                made.ended = error
                running.do("ended", version, error)
            running.do("next", 0)
        except Suspend:
            pass
        if running.step[0] == "next" and outcomes:
            state = (rank, born, running.step, made._transport._channel is not None, made._transport._members,
                     made._packer.base, made._layout_id, made._plan_id, bool(made.ended))  # fmt: skip
            outcomes = self._first_ended.setdefault(repr(state), outcomes)
        return running.step, outcomes

    # A receiver: (number of its history, the call that it runs, outcomes in it).

    def fresh_receiver(self, number, born):
        return self._snapshot((number, born, ()))

    def receiver_step(self, history, call, outcomes):
        """Return the step that a receiver has come to, or ("return", its history then, the result)."""
        key = history, call, outcomes
        if key not in self._receivers:
            self._receivers[key] = self._run_receiver(*key)
        return self._receivers[key]

    def _run_receiver(self, history, call, outcomes):
        number, born, calls = self._histories[history][:3]
        ended, result = self._replay(number, born, (*calls, (call, outcomes)))
        if ended is None:
            return running.step
        return "return", self._snapshot((number, born, (*calls, (call, outcomes))), ended), result

    def _replay(self, number, born, calls):
        global running
        slices = {"a": ((0, 1),)} if CLASS_OF[number] else {}
        with assign(RankInfo(number, RECEIVERS, number, RECEIVERS, "", 0), RoleWorkers()):
            running = Script(())
            running.owner = f"receiver {number}.{born}:"
            one = WeightReceiver()
        one.engine = Engine(dict.fromkeys(NAMES, (2,)), slices=slices)
        one._version, one._ids = 0, 1
        result = None
        for call, outcomes in calls:
            running = Script(outcomes)
            running.owner, running.ids = f"receiver {number}.{born}:", one._ids
            method, arguments = pickle.loads(value_of(call))
            try:
                value = getattr(one, method)(*arguments)
                result = number_of(pickle.dumps(value)), None
            except Suspend:
                return None, None
            except Exception as failed:
                result = None, Raised(type(failed), str(failed))
            one._ids = running.ids
        return one, result

    def _snapshot(self, history, one=None):
        """Return the number of a history, whose receiver then is ``one``."""
        if one is None:
            one, _ = self._replay(*history)
        update, arrivals = one._update, one._arrivals
        weights = tuple(tuple(one.engine.weights[name].tolist()) for name in NAMES)
        state = (
            *history[:2],
            one._version,
            one._base,
            one._sender,
            one._ids,
            one.engine.told,
            weights,
            update and (update.key, update.version, update.buffered, update.failed, update.held),
            tuple(arrivals.missing.items()),
            tuple((n, tuple(t.tolist())) for n, t in arrivals._tensors.items()),
            tuple(arrivals.pieces),
            tuple((n, c._group and c._group.name) for n, c in one.channels.items()),
            tuple(one.fingerprints.items()),
        )
        if state not in self._snapshots:
            self._snapshots[state] = len(self._histories)
            self._histories.append((*history, one._version, weights))
        return self._snapshots[state]

    def weights(self, history):
        """Return a receiver's version and weights."""
        return self._histories[history][3:]
