"""Blocks of memory: they arrive whole and unchanged, or not at all."""

import struct
import time

import pytest
import torch

from single_controller.wire.stream import connect
from workers.blocks import BlockError, checksum_of, receive_blocks, send_block

pytestmark = pytest.mark.timeout(30)


class Receiver:
    def __init__(self):
        self.blocks, self.asked, self.refuse = [], [], False
        self.server = receive_blocks("127.0.0.1", self.allocate, self.blocks.append, "block")

    def allocate(self, header):
        self.asked.append(header)
        return None if self.refuse else torch.zeros(header["nbytes"], dtype=torch.uint8)


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.server.close()


def block(nbytes):
    return {"nbytes": nbytes, "number": 3}, torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def soon(seconds=10):
    return time.monotonic() + seconds


@pytest.mark.parametrize("nbytes", [0, 1, (9 << 20) + 5])
def test_block_arrives_unchanged(receiver, nbytes):
    header, memory = block(nbytes)
    checksum = send_block(receiver.server.address, header, memory, soon())
    (arrived,) = receiver.blocks
    assert (arrived.header, arrived.checksum) == (header, checksum) and checksum == checksum_of(memory)
    assert torch.equal(arrived.memory, memory)


def test_refused_block_is_an_error_of_the_sender(receiver):
    receiver.refuse = True
    with pytest.raises(ConnectionError):
        send_block(receiver.server.address, *block(100), soon())
    assert len(receiver.asked) == 1 and not receiver.blocks


def test_block_that_is_cut_off_or_changed_is_not_kept(receiver):
    header, memory = block(64 << 20)
    with pytest.raises(TimeoutError):
        send_block(receiver.server.address, header, memory, time.monotonic())
    begin = struct.pack("!Q", 14) + b'{"nbytes": 10}'
    for sent in (begin + b"half", begin + 14 * b"x", struct.pack("!Q", 1 << 40)):
        with connect(receiver.server.address, soon()) as stream:
            stream.write(sent)
            if len(sent) == 36:  # its checksum is wrong
                with pytest.raises(ConnectionError):
                    stream.read(1)
    send_block(receiver.server.address, *block(10), soon())
    assert [len(one.memory) for one in receiver.blocks] == [10]


def test_receiver_that_cannot_keep_it_refuses_it(receiver):
    def full(block):
        raise OSError("the disk is full")

    other = receive_blocks("127.0.0.1", receiver.allocate, full, "block")
    with pytest.raises(BlockError, match="has refused it"):
        send_block(other.address, *block(10), soon())
    other.close()
