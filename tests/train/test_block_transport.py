"""Blocks over TCP: they arrive whole and unchanged, or not at all."""

import socket
import time
from dataclasses import replace

import pytest
import torch

from workers.block_transport import BlockServer, TransportError, checksum_of, send_block

pytestmark = pytest.mark.timeout(30)


class Receiver:
    def __init__(self):
        self.blocks, self.asked, self.refuse = [], [], False
        self.server = BlockServer("127.0.0.1", self.allocate, self.blocks.append)

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


def test_without_the_token_nothing_is_read(receiver):
    with pytest.raises(OSError):
        send_block(replace(receiver.server.address, token=bytes(32)), *block(100), soon())
    assert not receiver.asked and not receiver.blocks


def test_refused_block_is_an_error_of_the_sender(receiver):
    receiver.refuse = True
    with pytest.raises((TransportError, ConnectionError)):
        send_block(receiver.server.address, *block(100), soon())
    assert len(receiver.asked) == 1 and not receiver.blocks


def test_partly_sent_block_is_not_kept(receiver):
    header, memory = block(64 << 20)
    with pytest.raises(TimeoutError):
        send_block(receiver.server.address, header, memory, time.monotonic())
    address = receiver.server.address
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(address.token + bytes(7) + b"\x0e" + b'{"nbytes": 10}' + b"half")
    send_block(address, *block(10), soon())
    assert [len(one.memory) for one in receiver.blocks] == [10]


def test_receiver_that_does_not_read_costs_no_more_than_the_time():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = replace(Receiver().server.address, port=deaf.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            send_block(address, *block(64 << 20), soon(0.5))
    assert time.monotonic() - began < 5


def test_closed_server_refuses_connections(receiver):
    send_block(receiver.server.address, *block(10), soon())
    receiver.server.close()
    with pytest.raises(OSError):
        send_block(receiver.server.address, *block(10), soon())
