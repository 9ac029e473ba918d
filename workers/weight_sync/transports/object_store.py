"""Weights through Ray's object store: a payload is stored once, and the receivers copy from the store.

The receiving half is `WeightReceiver.receive_payload`: tensors travel as an argument, which workers read in place.
"""

from __future__ import annotations

from single_controller.call.future import WorkerFuture
from workers.device import on_accelerator
from workers.weight_sync.buckets import FlatBuffer
from workers.weight_sync.pieces import Header, Payload
from workers.weight_sync.transports.weight_transport import Transport, Update, wait_all


class ObjectStoreTransport(Transport):
    """See the module's docstring. Tensors on an accelerator go through pinned host memory."""

    every_rank_calls = True

    def __init__(self) -> None:
        self._in_flight: list[WorkerFuture] = []
        self._pinned = FlatBuffer(pinned=True)

    def transfer(
        self, update: Update, number: int, payloads: dict[int, Payload], headers: list[dict[int, Header]]
    ) -> None:
        """As in `Transport`. Two rounds are in the store at a time, so that receivers load one while the next is
        packed."""
        before, self._in_flight = self._in_flight, []
        if any(on_accelerator(tensor.device) for payload in payloads.values() for tensor in payload.tensors):
            wait_all(before, update)  # first: there is one buffer
            payloads = self._on_host(payloads, headers[update.rank])
        self._in_flight = update.receivers.start_payloads(update.key, update.classes, payloads)
        wait_all(before, update)

    def _on_host(self, payloads: dict[int, Payload], headers: dict[int, Header]) -> dict[int, Payload]:
        sizes = [headers[index].nbytes for index in payloads]
        flats = dict(zip(payloads, self._pinned.take(sum(sizes)).split(sizes), strict=True))
        for index, payload in payloads.items():
            payload.copy_to(flats[index], headers[index])
        return {index: Payload.of(headers[index], flat) for index, flat in flats.items()}

    def flush(self, update: Update) -> None:
        in_flight, self._in_flight = self._in_flight, []
        wait_all(in_flight, update)

    def failed(self, update: Update) -> None:
        """Nobody waits for what is under way: receivers reject its key from now on."""
        self._in_flight = []

    def close(self) -> None:
        self._pinned.free()
