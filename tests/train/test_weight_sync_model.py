"""An update of weights ends, on all sides and with complete weights, in whichever order everybody's steps come, and
whoever dies in it; and so does the next one."""

import time
from unittest import mock

import depth
import pytest
from weight_sync_model import Model, Violation
from weight_sync_steps import patched

from workers.weight_sync import sync_protocol as protocol
from workers.weight_sync import weight_receiver as receiver
from workers.weight_sync import weight_sender as sender
from workers.weight_sync.transports import process_group
from workers.weight_sync.transports import weight_transport as sending

APART = ((0,), (1, 2))  # one of the receivers of the class of two is in a group of its own
TOGETHER = ((0, 1, 2),)
ALL_ORDERS = pytest.mark.full("all orders of steps after a crash")


def explore(*mutations, draw=None, deaths=None, **options):
    begun = time.monotonic()
    model = Model(**options)
    with patched(*mutations):
        model.explore(draw, deaths)
    print(f"{options}: {model.states} states, {model.steps} steps, {time.monotonic() - begun:.1f} s")
    return model


def test_each_crash_of_an_update_ends_it_and_the_next_one_succeeds():
    """At each point of all orders of steps, for two participants that are drawn there, with --full for all; after it,
    one order is drawn."""
    assert explore(groups=APART, draw=1, deaths=None if depth.full else 2).states > (10_000 if depth.full else 3_000)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        {"groups": APART},
        {"groups": TOGETHER, "verify": "fingerprint"},
        {"groups": TOGETHER, "double_buffer": False},
        {"groups": APART, "updates": 3, "crash_from": 2},
    ],
    ids=["groups of workers", "proof", "in place", "process groups that are kept"],
)
@ALL_ORDERS
def test_all_orders_after_each_crash(options):
    explore(**options)


def stay_after_failure(self, receiver, key):
    for payload in self._receive(receiver):
        receiver.take(key, payload)


def wait_in_order(futures, update):
    for future in futures:
        while not sending._ended(future):
            update.check()


def take_at_once(self, key, verify=None, fingerprint=None):
    update = self.check_update(key)
    with self.weights_lock:
        self._version, self._update = update.version, None
    return protocol.Finished(0.0, None)


def finish_early(self, update, number, payloads, headers, transfer=process_group.ProcessGroupTransport.transfer):
    transfer(self, update, number, payloads, headers)
    if not update.rank:
        update.receivers.call("finish_weights", update.key, None, None)


def tell_nobody(self, error):
    return error


MUTATIONS = {
    "a sender that does not leave its group on failure": (
        mock.patch.object(process_group.ProcessGroupTransport, "failed", lambda self, update: None),
    ),
    "a receiver that does not leave its groups on failure": (
        mock.patch.object(process_group.AnnouncedRound, "receive", stay_after_failure),
    ),
    "an agreement without the failed key": (mock.patch.object(sending.Update, "give_up", tell_nobody),),
    "waiting for one group of receivers after the other": (
        mock.patch.object(process_group, "wait_all", wait_in_order),
    ),
    "a receiver that tries to connect for as long as an update may take": (
        mock.patch.object(process_group, "_CONNECT_SECONDS", 1e7),
    ),
    "finish before all rounds have arrived, and a receiver that does not look": (
        mock.patch.object(process_group.ProcessGroupTransport, "transfer", finish_early),
        mock.patch.object(receiver.WeightReceiver, "finish_weights", take_at_once),
    ),
    "success before the receivers have finished": (
        mock.patch.object(sender.WeightSender, "_finish", lambda self, update, fingerprint: []),
    ),
}


SOON_FOUND = [
    "an agreement without the failed key",
    "waiting for one group of receivers after the other",
    "a receiver that tries to connect for as long as an update may take",
]
LATER_FOUND = [
    pytest.param(name, marks=pytest.mark.full("mistakes that the model of weight sync finds after seconds"))
    for name in MUTATIONS
    if name not in SOON_FOUND
]


@pytest.mark.parametrize("mutation", [*SOON_FOUND, *LATER_FOUND])
def test_the_model_finds_mistakes(mutation):
    """With the steps that lead to them."""
    with pytest.raises(Violation) as found:
        explore(*MUTATIONS[mutation], groups=APART, draw=1)
    said = str(found.value)
    assert said.splitlines()[1].startswith("train rank ")
    print(said)
