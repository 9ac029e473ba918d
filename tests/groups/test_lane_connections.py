"""The lane's handshake, its messages, and both of its ends, over sockets of this process: without Ray."""

import contextlib
import hmac
import itertools
import random
import select
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from single_controller.ray import lane
from single_controller.ray.lane import Connection, Lane
from single_controller.ray.lane_handshake import Handshake, HandshakeError

pytestmark = pytest.mark.timeout(60)

TOKEN, KEY = b"t" * 32, b"k" * 16


def header(nbytes, number):
    """What precedes a message, as docs/lane.md and other languages see it."""
    return nbytes.to_bytes(4, "little") + number.to_bytes(8, "little")


@contextmanager
def pair(**options):
    """A connection, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours, **options)
    with theirs:
        yield connection, theirs
        connection.close()


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)


@pytest.mark.parametrize("silent", [6.0])
def test_connection_outlives_a_side_that_does_not_read(monkeypatch, silent):
    """A rank reads between methods only, and a stopped driver not at all. The limit of silence is far shorter here."""
    monkeypatch.setattr(lane, "_SILENCE_SECONDS", 2)
    monkeypatch.setattr(lane, "_PROBE_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = Connection(socket.create_connection(listener.getsockname()))
        theirs = Connection(listener.accept()[0])
    ours.sock.setblocking(False)
    calls = [bytes([number]) * 64_000 for number in range(100)]
    for number, call in enumerate(calls):
        ours.send(number, call)
    assert ours.unsent, "the window is closed"
    time.sleep(silent)
    received = []
    while len(received) < len(calls):
        with contextlib.suppress(BlockingIOError):
            del ours.unsent[: ours.sock.send(ours.unsent)]
        messages, theirs.read = theirs.receive()
        received += messages
    assert received == list(enumerate(calls))
    ours.close()
    theirs.close()


class TestHandshake:
    def test_both_sides_prove_that_they_know_the_token(self):
        driver, rank = Handshake(TOKEN), Handshake(TOKEN, KEY)
        from_rank = rank.respond(driver.nonce)
        assert not driver.complete and not rank.complete
        from_driver = driver.respond(from_rank)
        assert driver.complete and not rank.complete and driver.key == KEY
        assert rank.respond(from_driver) == b"" and rank.complete
        nonces = driver.nonce + rank.nonce + KEY
        assert from_rank == KEY + rank.nonce + hmac.digest(TOKEN, b"rank" + nonces, "sha256")
        assert from_driver == hmac.digest(TOKEN, b"driver" + nonces, "sha256")
        assert TOKEN not in driver.nonce + from_rank + from_driver

    @given(st.data())
    @examples(100, 1000)
    def test_any_changed_message_is_refused(self, data):
        """One bit flipped, one byte more or less, in any of the three messages."""
        driver, rank = Handshake(TOKEN), Handshake(TOKEN, KEY)
        changed, message = data.draw(st.integers(0, 2)), driver.nonce
        for number, side in enumerate((rank, driver, rank)):
            if number == changed:
                place = data.draw(st.integers(0, len(message) - 1))
                flipped = message[place] ^ (1 << data.draw(st.integers(0, 7)))
                message = data.draw(
                    st.sampled_from(
                        [
                            message[:place] + bytes([flipped]) + message[place + 1 :],
                            message[:place],
                            message + bytes([flipped]),
                        ]
                    )
                )
                if number == 0 and len(message) == 16:  # the rank cannot know; the driver refuses the response
                    message = side.respond(message)
                    side = driver
                with pytest.raises(HandshakeError):
                    side.respond(message)
                assert not side.complete
                return
            message = side.respond(message)

    @given(st.binary(max_size=128), st.booleans())
    @examples(100, 1000)
    def test_garbage_is_refused(self, garbage, is_rank):
        side = Handshake(TOKEN, KEY if is_rank else b"")
        if is_rank:
            side.respond(b"n" * 16)
        with pytest.raises(HandshakeError):
            side.respond(garbage)
        assert not side.complete

    def test_recorded_or_reflected_messages_prove_nothing(self):
        driver, rank = Handshake(TOKEN), Handshake(TOKEN, KEY)
        recorded = rank.respond(driver.nonce)
        proof = driver.respond(recorded)
        with pytest.raises(HandshakeError):  # to a later driver, which has another nonce
            Handshake(TOKEN).respond(recorded)
        with pytest.raises(HandshakeError):  # the rank's own proof back to it
            rank.respond(recorded[32:])
        later = Handshake(TOKEN, KEY)
        later.respond(driver.nonce)
        with pytest.raises(HandshakeError):  # to a later rank, which has another nonce
            later.respond(proof)

    def test_the_token_of_another_group_is_refused(self):
        driver, rank = Handshake(TOKEN), Handshake(b"u" * 32, KEY)
        with pytest.raises(HandshakeError, match="token is wrong"):
            driver.respond(rank.respond(driver.nonce))


class TestConnection:
    @given(st.data())
    @examples(60, 600)
    def test_messages_arrive_whole_wherever_the_stream_is_split(self, data):
        sent = data.draw(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40)), max_size=20))
        stream = b"".join(header(len(message), number) + message for number, message in sent)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
        taken = []
        with pair() as (connection, other):
            connection.sock.setblocking(False)
            for begin, end in itertools.pairwise([0, *cuts, len(stream)]):
                other.sendall(stream[begin:end])
                messages, rest = connection.receive()
                assert connection.receive()[0] == messages  # until they are taken
                taken += messages
                connection.read = rest
            assert taken == sent and not connection.read

    def test_large_messages_cross_slow_sockets_in_both_modes(self):
        rng = random.Random(1)
        sent = [(number, rng.randbytes(rng.randrange(200_000))) for number in range(30)]
        for blocking in (True, False):
            with pair() as (sender, other):
                receiver, taken = Connection(other), []
                sender.sock.setblocking(blocking)
                other.setblocking(False)
                thread = threading.Thread(target=lambda: [sender.send(*message) for message in sent])
                thread.start()
                while len(taken) < len(sent):
                    select.select([other], [], [], 0.01)
                    messages, receiver.read = receiver.receive()
                    taken += messages
                    if not blocking and not thread.is_alive() and sender.unsent:
                        with contextlib.suppress(BlockingIOError):
                            del sender.unsent[: sender.sock.send(sender.unsent)]
                thread.join()
                assert taken == sent and not sender.unsent

    @pytest.mark.parametrize("nbytes", [129, 2**32 - 1])
    def test_announced_size_is_refused_before_the_bytes_come(self, nbytes):
        with pair(max_bytes=128) as (connection, other):
            other.sendall(header(nbytes, 1))
            with pytest.raises(ConnectionAbortedError, match=f"{nbytes:,} bytes were announced"):
                connection.receive()

    def test_end_of_the_stream_is_a_lost_connection(self):
        with pair() as (connection, other):
            connection.sock.setblocking(False)
            other.sendall(header(3, 1)[:7])
            messages, connection.read = connection.receive()
            assert messages == []
            other.close()
            for _ in range(2):
                with pytest.raises(ConnectionResetError):
                    connection.receive()


class Dialing(threading.Thread):
    """A rank that dials, and completes the handshake after some seconds."""

    def __init__(self, address, key, after=0.0, token=None):
        super().__init__(daemon=True)
        self.connection = Connection(socket.create_connection(address[:2]))
        self.handshake, self.after, self.refused = Handshake(token or address.token, key), after, False
        self.start()

    def run(self):
        time.sleep(self.after)
        try:
            while not self.handshake.complete:
                messages, self.connection.read = self.connection.receive()
                for _, message in messages:
                    if response := self.handshake.respond(message):
                        self.connection.send(0, response)
        except (OSError, HandshakeError):
            self.refused = True


def closed(sock):
    """Whether the other side closes a connection, whatever it has sent before."""
    sock.settimeout(5)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


class TestAccepting:
    """Who connects while a lane waits for two ranks."""

    @contextmanager
    def starting(self, caplog, seconds=5.0):
        """A lane that listens, and a function that accepts two ranks."""
        lane = Lane("group")
        peers = lane.peers([b"0" * 16, b"1" * 16])
        with lane.listening("127.0.0.1") as address:
            yield address, peers, lambda: lane.accept(peers, seconds)
        lane.close()
        assert len(caplog.messages) <= 1 and (seconds < 5 or "did not connect" not in caplog.text)

    @pytest.mark.parametrize(
        ("sent", "reason"),
        [
            (b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n", "bytes were announced; a message has 128 at most"),
            (header(2**32 - 1, 0), "4,294,967,295 bytes were announced"),
            (header(70, 0) + b"x" * 70, "its token is wrong"),
            (header(7, 0) + b"garbage", "it does not follow the protocol"),
            (header(0, 0), "it does not follow the protocol"),
            (b"", "it did not complete the handshake"),
            (header(64, 0) + b"x" * 30, "it did not complete the handshake"),
            (None, "the other side has closed it"),
        ],
        ids=["http", "endless", "wrong-proof", "garbage", "empty", "silent", "half", "leaves"],
    )
    def test_stranger_is_refused_and_the_ranks_are_accepted(self, caplog, sent, reason):
        with self.starting(caplog) as (address, peers, accept):
            stranger = socket.create_connection(address[:2])
            if sent is None:
                stranger.shutdown(socket.SHUT_WR)
            else:
                stranger.sendall(sent)
            ranks = [Dialing(address, peer.key, after=0.05) for peer in peers]
            accept()
            assert all(peer.connection for peer in peers) and not any(rank.refused for rank in ranks)
            assert closed(stranger) and len(caplog.messages) == 1
            assert f"refused 1 connections: {reason}" in caplog.text or reason in caplog.text
            stranger.close()

    @pytest.mark.parametrize(
        ("key", "token", "reason"),
        [
            (b"0" * 16, b"x" * 32, "its token is wrong"),
            (b"9" * 16, None, "it is not of a rank that is expected"),
            (b"1" * 16, None, "it is not of a rank that is expected"),
        ],
        ids=["wrong-token", "unknown-rank", "same-rank-twice"],
    )
    def test_handshake_of_somebody_else_is_refused(self, caplog, key, token, reason):
        with self.starting(caplog) as (address, peers, accept):
            ranks = [Dialing(address, peers[1].key)]
            stranger = Dialing(address, key, 0.05, token)
            ranks.append(Dialing(address, peers[0].key, 0.15))
            accept()
            assert all(peer.connection for peer in peers) and not any(rank.refused for rank in ranks)
            stranger.join(5)
            assert closed(stranger.connection.sock)
            assert f"refused 1 connections: {reason}" in caplog.text

    @pytest.mark.parametrize(("before", "after", "limit"), [(200, 200, None), (100, 0, 10)])
    def test_hundreds_of_open_connections_keep_no_rank_out(self, caplog, monkeypatch, before, after, limit):
        if limit is not None:
            monkeypatch.setattr("single_controller.ray.lane.MAX_STRANGERS", limit)
        with self.starting(caplog) as (address, peers, accept):
            strangers = [socket.create_connection(address[:2]) for _ in range(before)]
            ranks = [Dialing(address, peer.key) for peer in peers]
            strangers += [socket.create_connection(address[:2]) for _ in range(after)]
            accept()
            assert all(peer.connection for peer in peers) and not any(rank.refused for rank in ranks)
        assert all(map(closed, strangers)) and len(caplog.messages) == 1
        for stranger in strangers:
            stranger.close()

    def test_each_kind_of_garbage_is_named_but_not_each_one(self, caplog):
        with self.starting(caplog) as (address, peers, accept):
            strangers = [socket.create_connection(address[:2]) for _ in range(40)]
            for number, stranger in enumerate(strangers):
                stranger.sendall(header(1000 + number, 0))
            for peer in peers:
                Dialing(address, peer.key, 0.1)
            accept()
            assert "refused 40 connections: 1,000 bytes" in caplog.text and caplog.text.count("announced") == 4
            for stranger in strangers:
                stranger.close()

    def test_rank_that_does_not_come_is_waited_for_once(self, caplog):
        with self.starting(caplog, 0.2) as (address, peers, accept):
            Dialing(address, peers[0].key)
            begun = time.monotonic()
            accept()
            assert time.monotonic() - begun < 1
            assert peers[0].connection is not None and peers[1].connection is None
            assert "1 of 2 ranks did not connect" in caplog.text
