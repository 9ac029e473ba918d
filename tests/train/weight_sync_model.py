"""Explores every interleaving of an update of weights: two train ranks, three receivers, and at most one crash.

The steps are those of the code itself: `WeightSender.send` and the methods of `WeightReceiver` run here, with a store,
calls and process groups that belong to the model. Where the code would write, send or wait, it is suspended, and any
participant may go on. A participant is suspended by an exception and resumed by running it again from its beginning
with the outcomes that it has had so far; so its local state is the list of these outcomes. Reads are one step with the
write or wait before them.

A wait has no time limit here. So a run in which somebody still waits when nobody can go on is one that only the
deadline of the update would end, and is reported.

What the model says of the outside:

- *Store* of the train ranks, and the store for rendezvous: processes of train rank 0. When it dies, both fail at once,
  and a new connection to the latter is refused only after the timeout of the one who connects.
- *Calls*: a receiver runs the calls in the order in which rank 0 made them, one at a time, also after rank 0 has died.
  A call fails when a receiver of its group has failed or died. A call to a group with a dead receiver may also be
  refused.
- *Process groups*: an operation ends for a member when all have begun it. It may fail if a member has left or died
  that has not ended it; it fails if one that has not begun it has. A member that leaves in the middle of an operation
  is connected until that has ended, as with gloo.
- *Driver*: starts the second update when all train ranks have ended the first one, and a receiver that has died anew
  before. If a train rank has died, it starts all train ranks anew, which takes longer than what the others have left to
  do.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from functools import cache
from typing import NamedTuple

import torch.distributed as dist
from weight_sync_steps import RECEIVERS, SENDERS, OtherStep, Participants, Raised, value_of

from single_controller import GroupBrokenError, WorkerDiedError

STORE_DIED = Raised(dist.DistNetworkError, "the store's process has died")
DRIVER = SENDERS + RECEIVERS
"""Follows the numbers of train ranks and receivers."""


class State(NamedTuple):
    """A state of everything.

    Attributes:
        senders: of each train rank: when it was started, and the number of its outcomes; None if it has died.
        receivers: of each: the number of its history, the call that it runs, and the number of its outcomes in it.
        store: of the train ranks: (key, value) pairs; None if its process has died.
        server: when the rank was started that has the store for rendezvous; None if it has died.
        given_up: keys of that store.
        groups: (name, processes, members) of each process group. A process is None before it has begun the rendezvous,
            -1 if it has died in it. A member: what it has sent, operations that it has ended, and its status.
        calls: (group of receivers, what is called, statuses of the receivers) of each.
        queues: numbers of the calls that a receiver has not yet begun.
        crashed: the participant that has died; None if none has.
        phase: number of the update.
    """

    senders: tuple
    receivers: tuple
    store: frozenset | None = frozenset()
    server: int | None = 0
    given_up: frozenset = frozenset()
    groups: tuple = ()
    calls: tuple = ()
    queues: tuple = ((),) * RECEIVERS
    crashed: int | None = None
    phase: int = 1


class Violation(Exception):
    """A property does not hold. Has the steps that lead there."""


def changed(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


class Model:
    """See the module's docstring.

    Args:
        groups: of the receivers: their numbers.
        double_buffer, verify: see `WeightSender`.
        updates: how many. The last one is the retry: nobody dies there.
        crash_from: the first update in which somebody may die. Before, one order of steps is explored.
    """

    def __init__(self, groups=((0,), (1, 2)), double_buffer=True, verify="none", updates=2, crash_from=1):
        self.run = Participants(groups, double_buffer, verify, updates)
        self.groups, self.updates, self.crash_from = groups, updates, crash_from
        self._nodes, self._numbers = [()], {(): 0}
        self._steps_at, self._ran, self._kept = {}, {}, {}  # see `_step` and `_after`: comparing numbers is fast
        self.states = self.steps = 0

    # -- outcomes of steps. Each method returns pairs (outcome, state after it); none if the step has to wait.

    def outcomes(self, state, who, step):
        kind, *args = step
        return getattr(self, "_" + kind.replace(" ", "_"))(state, who, *args)

    def _next(self, state, who, version):
        return [(None, state)] if version == state.phase else []

    def _ended(self, state, who, version, error):
        if not error:
            for number, one in enumerate(state.receivers):
                if one is not None and self.run.weights(one[0])[0] != version:
                    raise Violation(f"train rank {who} reports success, but receiver {number} has another version")
        elif state.crashed is None or version == self.updates:
            raise Violation(f"update {version} fails on train rank {who} without reason: {error}")
        return [(None, state)]

    def _set(self, state, who, key, value):
        return (
            [(STORE_DIED, state)]
            if state.store is None
            else [(None, state._replace(store=state.store | {(key, value)}))]
        )

    def _claim(self, state, who, key, value):
        if state.store is None:
            return [(STORE_DIED, state)]
        held = dict(state.store).get(key)
        return [(value, state._replace(store=state.store | {(key, value)})) if held is None else (held, state)]

    def _connect(self, state, who, port, soon):
        if state.server == port:
            return [(None, state)]
        return [(STORE_DIED, state)] if soon else []

    def _give_up(self, state, who, port, key):
        if state.server != port:
            return [(STORE_DIED, state)]
        return [(None, state._replace(given_up=state.given_up | {key}))]

    def _meet(self, state, who, port, name, rank, size, soon):
        if state.server != port:
            return [(STORE_DIED if soon else False, state)]
        groups = {one[0]: one for one in state.groups}
        processes = changed(groups.get(name, (name, (None,) * size))[1], rank, who)
        groups[name] = name, processes, (((), 0, "in"),) * size
        return [(True, state._replace(groups=tuple(sorted(groups.values(), key=lambda one: one[0]))))]

    def _begin(self, state, who, name, rank, data):
        return [(None, self._member(state, name, rank, lambda sent, done, status: ((*sent, data), done, status)))]

    def _leave(self, state, who, name, rank):
        def left(sent, done, status):
            return sent, done, "leaving" if status == "in" and done < len(sent) else "left"

        return [(None, settled(self._member(state, name, rank, left)))]

    def _member(self, state, name, rank, change):
        return state._replace(
            groups=tuple(
                (one, processes, changed(members, rank, change(*members[rank])))
                if one == name
                else (one, processes, members)
                for one, processes, members in state.groups
            )
        )

    def _call(self, state, who, group, payload):
        members = self.groups[group]
        dead = [number for number in members if state.receivers[number] is None]
        number = len(state.calls)
        queues = state.queues
        for member in members:
            if member not in dead:
                queues = changed(queues, member, (*queues[member], number))
        statuses = tuple(("died",) if member in dead else () for member in members)
        sent = number, state._replace(calls=(*state.calls, (group, payload, statuses)), queues=queues)
        refused = Raised(GroupBrokenError, "a receiver has died"), state
        return [sent, refused] if dead else [sent]

    def _sleep(self, state, who, questions):
        awake = any(answer for question in questions for answer, _ in self._ask(state, who, question))
        return [(None, state)] if awake else []

    def _ask(self, state, who, question):
        kind, *args = question
        if kind in ("set", "get", "delete") and state.store is None:
            return [(STORE_DIED, state)]
        if kind == "set":
            held = {key for key, _ in state.store}
            return [(all(key in held for key in args[0]), state)]
        if kind == "get":
            return [(dict(state.store)[args[0]], state)]
        if kind == "delete":
            return [(None, state._replace(store=frozenset(one for one in state.store if one[0] != args[0])))]
        if kind == "given up":
            return [(args[1] in state.given_up if state.server == args[0] else STORE_DIED, state)]
        if kind == "never":
            return [(False, state)]
        if kind == "met":
            processes = next(one[1] for one in state.groups if one[0] == args[0])
            if all(one is not None and one >= 0 for one in processes):
                return [(True, state)]
            return [("failed" if state.server is None else False, state)]
        if kind == "call":
            statuses = state.calls[args[0]][2]
            for status in statuses:
                if status and status[0] == "died":
                    return [(Raised(WorkerDiedError, "a receiver died"), state)]
                if status and status[0] == "raised":
                    return [(status[1], state)]
            return [(all(statuses) and tuple(status[1] for status in statuses), state)]
        return self._operation(state, *args)

    def _operation(self, state, name, rank):
        members = next(one[2] for one in state.groups if one[0] == name)
        number = len(members[rank][0])
        begun, gone = all(len(one[0]) >= number for one in members), False
        for sent, done, status in members:
            gone |= status == "left" and done < number and (begun or len(sent) < number)
        answers = []
        if begun:
            after = self._member(state, name, rank, lambda sent, done, status: (sent, number, status))
            answers.append((tuple(one[0][number - 1] for one in members), settled(after)))
        if gone:
            answers.append(("failed", self._member(state, name, rank, lambda sent, done, _: (sent, done, "failed"))))
        return answers or [(False, state)]

    # -- steps of participants

    def successors(self, state, draw=None):
        """Return (what happens, state after it) of all steps, without crashes; with ``draw``, a `random.Random`, those
        of the first who can go on, in a drawn order."""
        for number, queue in enumerate(state.queues):
            # Nobody waits for it, and it concerns nobody else: so it need not be tried at other times, too.
            if queue and state.receivers[number][1] is None and method_of(state, queue[0]) == "abandon_weights":
                return self._steps_of(state, SENDERS + number)
        found, everybody = [], list(range(DRIVER))
        for who in everybody if draw is None else draw.sample([*everybody, DRIVER], DRIVER + 1):
            found += self._driver(state, others=True) if who == DRIVER else self._steps_of(state, who)
            if draw is not None and any(after != state for _, after in found):
                return found
        return found + self._driver(state, others=bool(found))

    def _steps_of(self, state, who):
        """Return those of a train rank or of a receiver."""
        one = (*state.senders, *state.receivers)[who]
        if one is None:
            return []
        if who >= SENDERS:
            return [(f"{name_of(who)}: {what}", after) for what, after in self._receiver(state, who - SENDERS)]
        step = self._sender_step(who, one)
        return [(f"{name_of(who)}: {step[0]}", after) for after in self._sender(state, who, step)]

    def _run(self, who, outcomes):
        """Return the step that somebody has come to after these outcomes, and what is kept of them.

        Args:
            who: ("sender", rank, when it was started) or ("receiver", number of its history, its call).
            outcomes: those so far.
        """
        kind, *of = who
        if kind == "sender":
            return self.run.sender_step(*of, outcomes)
        return self.run.receiver_step(*of, outcomes), outcomes

    def _step(self, who, node):
        """Return the step after the outcomes of that number."""
        if (who, node) not in self._steps_at:
            self._steps_at[who, node] = self._run(who, self._nodes[node])[0]
        return self._steps_at[who, node]

    def _sender_step(self, rank, sender):
        born, node = sender
        return self._step(("sender", rank, born), node)

    def _after(self, state, who, node, step, outcome):
        """Return the step after one more outcome, and the number of the outcomes then."""
        key = who, node, outcome
        if key not in self._ran:
            self._ran[key] = self._run(who, (*self._nodes[node], (step, outcome)))
        then, outcomes = self._ran[key]
        whole = then[0] == "return" or self._reads(state, then)
        if (key, whole) not in self._kept:
            kept = outcomes if whole else self._without_vain_looks(who, outcomes, then)
            self._kept[key, whole] = self._node_of(kept)
        return then, self._kept[key, whole]

    def _without_vain_looks(self, who, outcomes, step):
        """Leave out that somebody has looked before in vain."""
        sleeps = [index for index, (one, _) in enumerate(outcomes) if one[0] == "sleep"]
        if sleeps:
            end = sleeps[-1] + 1
            begin = end - 1
            while begin and outcomes[begin - 1][0][0] == "ask":
                begin -= 1
            for first in range(begin, end):
                shorter = (*outcomes[:first], *outcomes[end:])
                try:
                    found, _ = self._run(who, shorter)
                except OtherStep:
                    continue
                if found == step or found[0] == step[0] == "sleep":
                    return shorter
        return outcomes

    def _node_of(self, outcomes):
        if outcomes not in self._numbers:
            self._numbers[outcomes] = len(self._nodes)
            self._nodes.append(outcomes)
        return self._numbers[outcomes]

    def _sender(self, state, rank, step):
        for outcome, after in self.outcomes(state, rank, step):
            born, node = after.senders[rank]
            then, node = self._after(after, ("sender", rank, born), node, step, outcome)
            after = after._replace(senders=changed(after.senders, rank, (born, node)))
            yield from self._sender(after, rank, then) if self._reads(after, then) else [after]

    def _reads(self, state, step):
        """Whether a step is not one of its own."""
        return step[0] in ("ask", "ended") or (step[0] == "connect" and state.server == step[1])

    def _receiver(self, state, number):
        history, call, node = state.receivers[number]
        if call is not None:
            step = self._step(("receiver", history, state.calls[call][1]), node)
            yield from ((step[0], after) for after in self._resumed(state, number, step))
        elif state.queues[number]:
            call, *left = state.queues[number]
            after = state._replace(queues=changed(state.queues, number, tuple(left)))
            after = after._replace(receivers=changed(after.receivers, number, (history, call, 0)))
            step = self._step(("receiver", history, state.calls[call][1]), 0)
            yield from ((method_of(state, call), one) for one in self._arrived(after, number, step))

    def _resumed(self, state, number, step):
        for outcome, after in self.outcomes(state, SENDERS + number, step):
            history, call, node = after.receivers[number]
            then, node = self._after(after, ("receiver", history, after.calls[call][1]), node, step, outcome)
            after = after._replace(receivers=changed(after.receivers, number, (history, call, node)))
            yield from self._arrived(after, number, then)

    def _arrived(self, state, number, step):
        """A receiver has come to a step."""
        if self._reads(state, step):
            yield from self._resumed(state, number, step)
        elif step[0] == "return":
            call = state.receivers[number][1]
            group, payload, statuses = state.calls[call]
            value, error = step[2]
            place = self.groups[group].index(number)
            statuses = changed(statuses, place, ("raised", error) if error is not None else ("ok", value))
            self._check_weights(number, step[1])
            yield state._replace(
                receivers=changed(state.receivers, number, (step[1], None, 0)),
                calls=changed(state.calls, call, (group, payload, statuses)),
            )
        else:
            yield state

    def _check_weights(self, number, history):
        version, weights = self.run.weights(history)
        if version is not None and any(value != version for tensor in weights for value in tensor):
            raise Violation(f"receiver {number} says that it has version {version}, and has {weights}")

    # -- crashes and the driver

    def crash(self, state, who):
        """Return the state after a participant has died."""
        groups = []
        for name, processes, members in state.groups:
            met = all(one is not None for one in processes)
            members = tuple(
                (sent, done, "left") if process == who else (sent, done, status)
                for process, (sent, done, status) in zip(processes, members, strict=True)
            )
            groups.append((name, processes if met else tuple(-1 if one == who else one for one in processes), members))
        state = settled(state._replace(groups=tuple(groups), crashed=who))
        if who >= SENDERS:
            number = who - SENDERS
            calls = tuple(
                (group, payload, changed(statuses, self.groups[group].index(number), ("died",)))
                if number in self.groups[group] and not statuses[self.groups[group].index(number)]
                else (group, payload, statuses)
                for group, payload, statuses in state.calls
            )
            return state._replace(
                receivers=changed(state.receivers, number, None), queues=changed(state.queues, number, ()), calls=calls
            )
        state = state._replace(senders=changed(state.senders, who, None))
        return state if who else state._replace(store=None, server=None, given_up=frozenset())

    def _driver(self, state, others):
        """Begin the next update, if it is time."""
        if state.phase == self.updates:
            return []
        at_end = [
            self._sender_step(rank, one) == ("next", state.phase + 1)
            for rank, one in enumerate(state.senders)
            if one is not None
        ]
        restart = None in state.senders
        if others if restart else not all(at_end):
            return []
        if restart:
            for rank, one in enumerate(state.senders):
                if one is not None:
                    state = self.crash(state, rank)
            born = self._node_of(())
            state = state._replace(senders=((state.phase, born),) * SENDERS, server=state.phase)
        receivers = tuple(
            (self.run.fresh_receiver(number, state.phase), None, 0) if one is None else one
            for number, one in enumerate(state.receivers)
        )
        # What is left of the update before matters only where a receiver still has to do with it.
        kept = [
            number
            for number in range(len(state.calls))
            if any(number in queue for queue in state.queues) or any(one[1] == number for one in receivers)
        ]
        new = {number: place for place, number in enumerate(kept)}
        if not kept:
            used = {
                name.partition("/")[0]
                for name, processes, members in state.groups
                if 0 in processes and not restart and all(one[2] == "in" for one in members)
            }
            groups = tuple(one for one in state.groups if one[0].partition("/")[0] in used)
            state = state._replace(groups=groups, given_up=frozenset())
        return [
            (
                f"driver: begin update {state.phase + 1}",
                state._replace(
                    receivers=tuple((a, None if call is None else new[call], b) for a, call, b in receivers),
                    queues=tuple(tuple(new[call] for call in queue) for queue in state.queues),
                    calls=tuple(state.calls[number] for number in kept),
                    store=frozenset(),
                    phase=state.phase + 1,
                ),
            )
        ]

    def done(self, state):
        """Whether all updates have ended."""
        return (
            state.phase == self.updates
            and not any(state.queues)
            and all(one[1] is None for one in state.receivers if one is not None)
            and all(
                one is not None and self._sender_step(rank, one) == ("next", 0)
                for rank, one in enumerate(state.senders)
            )
        )

    # -- exploration

    def explore(self, draw=None, deaths=None):
        """Visit all states, those with the fewest steps first.

        Args:
            draw: a seed: after a crash, try one step of one who can go on, both drawn, instead of all.
            deaths: how many participants die in each state, one in each order of steps; they are drawn, too. All by
                default.

        Raises:
            Violation: a property does not hold, with the steps.
        """
        state = State(((0, 0),) * SENDERS, tuple((self.run.fresh_receiver(n, 0), None, 0) for n in range(RECEIVERS)))
        while state.phase < self.crash_from:
            _, state = self.successors(state)[0]
        trace = {state: None}
        waiting, drawing = deque([state]), random.Random(draw)
        while waiting:
            state = waiting.popleft()
            drawn = drawing if draw is not None and state.crashed is not None else None
            try:
                found = [one for one in self.successors(state, drawn) if one[1] != state]
                if not found and not self.done(state):
                    raise Violation(f"nobody can go on: {self._waits(state)}")
            except Violation as error:
                raise Violation("\n".join([str(error), *self._steps(trace, state)])) from None
            if drawn is not None and found:
                found = [drawn.choice(found)]
            if state.crashed is None and state.phase < self.updates:
                dying = range(DRIVER) if deaths is None else drawing.sample(range(DRIVER), deaths)
                found += [(f"{name_of(who)} dies", self.crash(state, who)) for who in dying]
            self.steps += len(found)
            for label, after in found:
                known = len(trace)
                trace.setdefault(after, (state, label))  # computes the hash of a state once
                if len(trace) > known:
                    waiting.append(after)
        self.states = len(trace)

    def _steps(self, trace, state):
        steps = []
        while trace[state] is not None:
            state, label = trace[state]
            steps.append(label)
        return reversed(steps)

    def _waits(self, state):
        found = []
        for rank, one in enumerate(state.senders):
            if one is not None:
                found.append(f"train rank {rank} at {self._sender_step(rank, one)}")
        for number, one in enumerate(state.receivers):
            if one is not None and one[1] is not None:
                step = self._step(("receiver", one[0], state.calls[one[1]][1]), one[2])
                found.append(f"receiver {number} at {step}")
        return "; ".join(found)


def settled(state):
    """End the operations of members that leave, as far as they can end."""
    groups, again = list(state.groups), True
    while again:
        again = False
        for index, (name, processes, members) in enumerate(groups):
            for rank, (sent, done, status) in enumerate(members):
                if status == "leaving":
                    begun = all(len(one[0]) >= len(sent) for one in members)
                    if begun or any(one[2] == "left" and one[1] < len(sent) for one in members):
                        left = sent, len(sent) if begun else done, "left"
                        groups[index] = name, processes, changed(members, rank, left)
                        again = True
                        break
    return state._replace(groups=tuple(groups))


def method_of(state, call):
    return method_in(state.calls[call][1])


@cache
def method_in(payload):
    return pickle.loads(value_of(payload))[0]


def name_of(who):
    return f"train rank {who}" if who < SENDERS else f"receiver {who - SENDERS}"
