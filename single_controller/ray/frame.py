"""Frames: orders and receipts as bytes, which Ray carries faster than objects.

What is large, or has Ray references in it, cannot be in a frame: it goes beside it.
"""

from __future__ import annotations

import pickle

from single_controller.base.host import Order
from single_controller.base.receipt import Receipt
from single_controller.base.stats import Clock
from single_controller.ray.transport import Packet

BESIDE = 0
"""What stands in an order's frame instead of a packet that goes beside it. None stands for no arguments."""


def order_frame(order: Order, whole: Packet | int | None, shard: Packet | int | None) -> bytes:
    """The frame of an order and of its packets: of the arguments that go whole, and of those of the shard."""
    return pickle.dumps((tuple(order), whole, shard), protocol=5)


def open_order(frame: bytes, beside: tuple[Packet, ...]) -> tuple[Order, Packet | None, Packet | None]:
    """The order and its packets."""
    parts, *packets = pickle.loads(frame)
    rest = iter(beside)
    whole, shard = (next(rest) if packet == BESIDE else packet for packet in packets)
    return Order(*parts), whole, shard


def receipt_frame(receipt: Receipt) -> bytes | Receipt:
    """The frame of a receipt; the receipt itself where something in it cannot be in one."""
    value, cause = receipt.value, receipt.failure.cause if receipt.failure is not None else None
    if any(packet is not None and (packet.refs or not packet.inline) for packet in (value, cause)):
        return receipt
    clock = receipt.clock and tuple(receipt.clock)
    parts = (receipt.rank, receipt.standing, receipt.failure, value, receipt.rows, receipt.not_rows, receipt.empty)
    return pickle.dumps((*parts, receipt.returned, clock), protocol=5)


def open_receipt(frame: bytes | Receipt) -> Receipt:
    """A receipt as it was before `receipt_frame`."""
    if not isinstance(frame, bytes):
        return frame
    receipt = Receipt(*pickle.loads(frame))
    receipt.clock = receipt.clock and Clock(*receipt.clock)
    return receipt
