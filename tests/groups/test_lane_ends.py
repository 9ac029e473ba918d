"""Both ends of the lane at work, over sockets of this process: without Ray."""

import contextlib
import itertools
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager

import depth
import pytest
from test_lane_connections import KEY, TOKEN, header, wait_until

from single_controller.ray.call_thread import CallThread
from single_controller.ray.lane import Connection, Lane, Peer
from single_controller.ray.lane_handshake import Handshake, LaneAddress

pytestmark = pytest.mark.timeout(60)


class FakeRank:
    """The rank's end of a connection to a lane: a thread that replies to each call with its own bytes."""

    def __init__(self, lane, number):
        ours, self.sock = socket.socketpair()
        ours.setblocking(False)
        self.peer = lane.peers([*lane._peers, bytes([number] * 16)])[-1]
        lane._adopt(self.peer, Connection(ours))
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        connection, rng = Connection(self.sock), random.Random(self.peer.key)
        while True:
            try:
                messages, connection.read = connection.receive()
            except OSError:
                return
            for number, message in messages:
                if rng.random() < 0.2:
                    time.sleep(0.0005)
                reply = header(len(message), number) + message
                cut = rng.randrange(len(reply)) if rng.random() < 0.2 else 0  # it may arrive in two pieces
                with contextlib.suppress(OSError):  # the test has ended
                    for piece in (reply[:cut], reply[cut:]):
                        self.sock.sendall(piece)


@contextmanager
def lane_of(ranks):
    """A lane with connections to some `FakeRank`."""
    lane = Lane("group")
    fakes = [FakeRank(lane, number) for number in range(ranks)]
    try:
        yield lane, fakes
    finally:
        lane.close()
        for fake in fakes:
            fake.sock.close()
            fake.thread.join(5)


def call(lane, fakes, text):
    """Send one call. Returns its tokens, and what they are to have."""
    messages = {rank: (fake.peer, f"{text} {rank}".encode()) for rank, fake in enumerate(fakes)}
    tokens = lane.send("method", messages)
    return tokens, {token: messages[rank][1] for token, rank in tokens.items()}


def wait_for(lane, tokens, seconds=10):
    """Wait as `Monitor.wait` does: again and again, each time for a while."""
    end = time.monotonic() + seconds
    while any(token.reply is None and token.lost is None for token in tokens):
        assert time.monotonic() < end, "the replies did not arrive in time"
        lane.wait(tokens, 0.2)


@contextmanager
def interrupted(code):
    """Another process sends signals all the time. Those that this thread handles while ``code`` runs, raise, unless a
    callback of the garbage collector runs, out of which nothing is raised."""
    raised, places = [], {code.co_filename, *(module.__file__ for module in (contextlib, selectors))}

    def handle(_, frame):
        while frame is not None and frame.f_code.co_filename in places:
            if frame.f_code is code:
                raised.append(1)
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGUSR1, handle)
    script = "while True: time.sleep(random.random() / 4e3); os.kill(int(sys.argv[1]), 10)"
    sender = subprocess.Popen([sys.executable, "-ISc", f"import os, random, sys, time\n{script}", str(os.getpid())])
    try:
        yield raised
    finally:
        sender.kill()
        sender.wait(10)
        signal.signal(signal.SIGUSR1, before)


class TestWaiting:
    def test_threads_get_the_replies_of_their_own_calls(self):
        with lane_of(3) as (lane, fakes):

            def run(name):
                for number in range(100):
                    tokens, wanted = call(lane, fakes, f"{name} {number}")
                    wait_for(lane, tokens)
                    assert {token: token.reply for token in tokens} == wanted
                done.append(name)

            done = []
            threads = [threading.Thread(target=run, args=(k,)) for k in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(done) == list(range(8)) and not any(fake.peer.waiting for fake in fakes)

    def test_interrupts_anywhere_in_a_wait_lose_no_reply(self):
        """Each interrupted wait is given up, as by Ctrl-C; another thread needs the replies that its leader read."""
        seconds = 30.0 if depth.full else 2.0
        with lane_of(3) as (lane, fakes), ExitStack() as stack:
            end, failed, abandoned, count = time.monotonic() + seconds, [], [], 0

            def other():
                try:
                    for number in itertools.count():
                        if time.monotonic() > end:
                            return
                        tokens, wanted = call(lane, fakes, f"other {number}")
                        wait_for(lane, tokens, 3)
                        assert {token: token.reply for token in tokens} == wanted
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=other)
            thread.start()
            stack.callback(thread.join)
            raised = stack.enter_context(interrupted(Lane.wait.__code__))
            while time.monotonic() < end and not failed:
                tokens, wanted = call(lane, fakes, f"main {count}")
                count += 1
                try:
                    wait_for(lane, tokens)
                except KeyboardInterrupt:
                    abandoned.append((tokens, wanted))
                else:
                    assert {token: token.reply for token in tokens} == wanted
            stack.close()
            assert not failed, failed[0]
            for tokens, wanted in abandoned:
                wait_for(lane, tokens)
                assert {token: token.reply for token in tokens} == wanted
            print(f"\n{count} calls, {len(raised)} interrupts, {len(abandoned)} calls given up")
            assert len(raised) > 50 * seconds and not lane._leading.locked()
            assert not any(token.reply is None for fake in fakes for token in fake.peer.waiting.values())

    def test_what_an_interrupted_leader_has_read_is_not_left_lying(self):
        """Nothing more arrives on that connection that would make somebody look."""

        class Interrupting(deque):
            def extend(self, items):
                super().extend(items)
                raise KeyboardInterrupt

        with lane_of(2) as (lane, fakes):
            fakes[0].peer.connection.read = Interrupting()
            tokens, wanted = call(lane, fakes, "both")
            with pytest.raises(KeyboardInterrupt):
                wait_for(lane, tokens)
            fakes[0].peer.connection.read = deque(fakes[0].peer.connection.read)
            wait_for(lane, tokens, 2)
            assert {token: token.reply for token in tokens} == wanted


class TestBadRanks:
    """A rank that knows the token, and then sends something else than replies."""

    @pytest.mark.parametrize(
        ("sent", "told"),
        [
            (header(2**20 + 1, 1), "1,048,577 bytes were announced"),
            (b"GET / HTTP/1.1\r\n\r\n", "bytes were announced"),
            (header(2, 17) + b"ok", "call 17, which was not sent"),
            (None, "the other side has closed it"),
        ],
        ids=["too-large", "garbage", "unknown-call", "end"],
    )
    def test_its_connection_is_lost_and_no_other(self, sent, told):
        with lane_of(1) as (lane, fakes):
            ours, bad = socket.socketpair()
            ours.setblocking(False)
            peer = lane.peers([fakes[0].peer.key, b"bad" + bytes(13)])[1]
            lane._adopt(peer, Connection(ours))
            first = lane.send("method", {0: (fakes[0].peer, b"good"), 1: (peer, b"call")})
            if sent is None:
                bad.recv(100)  # or the kernel would reset the connection
                bad.close()
            else:
                bad.sendall(sent)
            wait_for(lane, first)
            good, lost = first
            assert good.reply == b"good" and lost.reply is None and told in lost.lost
            assert peer.connection is None and not peer.waiting
            assert lane.send("method", {0: (fakes[0].peer, b"call"), 1: (peer, b"call")}) == {}
            tokens, wanted = call(lane, fakes, "again")
            wait_for(lane, tokens)
            assert {token: token.reply for token in tokens} == wanted
            bad.close()

    @pytest.mark.parametrize("how", ["another reply", "end"])
    def test_what_arrives_between_calls_loses_the_connection(self, how):
        """Before the next call is sent, so that it can go another way."""
        with lane_of(2) as (lane, fakes):
            tokens, wanted = call(lane, fakes, "call")
            wait_for(lane, tokens)
            if how == "end":
                fakes[0].sock.shutdown(socket.SHUT_RDWR)
            else:
                fakes[0].sock.sendall(header(2, 1) + b"no")
            assert lane.send("method", {rank: (fake.peer, b"call") for rank, fake in enumerate(fakes)}) == {}
            assert {token: token.reply for token in tokens} == wanted
            assert [bool(fake.peer.connection) for fake in fakes] == [False, True]
            again, wanted = call(lane, fakes[1:], "again")
            wait_for(lane, again)
            assert {token: token.reply for token in again} == wanted


class FakeDriver:
    """A driver's end of the lane, in front of a `CallThread` that notes what it runs."""

    def __init__(self, token=TOKEN):
        self.ran = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = LaneAddress(*self.listener.getsockname(), token)
        self.go_on = threading.Event()
        self.calls = CallThread(self.run, lambda error: None, lambda: False)

    def run(self, number, message):
        self.go_on.wait(10)
        self.ran.append(message.decode())
        return b"reply"

    def through_ray(self, what, after=0):
        return threading.Thread(target=lambda: self.calls.run(lambda: self.ran.append(what), after), daemon=True)

    def dial(self):
        self.calls.run(lambda: self.calls.dial(self.address, KEY))
        sock, _ = self.listener.accept()
        return Connection(sock)

    def accept(self):
        """Have the rank dial, and complete the handshake."""
        connection, handshake = self.dial(), Handshake(TOKEN)
        connection.send(0, handshake.nonce)
        while not handshake.complete:
            messages, connection.read = connection.receive()
            for _, message in messages:
                connection.send(0, handshake.respond(message))
        return connection

    def close(self):
        self.go_on.set()
        self.listener.close()
        with pytest.raises(SystemExit):
            self.calls.run(lambda: sys.exit())
        self.calls._ended = SystemExit()
        self.calls._wake.send(b"\0")


@pytest.fixture
def driver():
    made = FakeDriver()
    yield made
    made.close()


class TestCallThread:
    @pytest.mark.parametrize("proof", [b"x" * 32, b"", b"x" * 5000], ids=["wrong", "empty", "long"])
    def test_driver_that_does_not_know_the_token_gets_no_further(self, driver, proof):
        """It listens where the driver did, for example after that has ended."""
        connection = driver.dial()
        connection.send(0, b"n" * 16)
        messages, connection.read = connection.receive()
        assert len(messages) == 1
        connection.send(0, proof)
        connection.send(1, b"call")
        with pytest.raises(OSError):
            while True:
                assert connection.receive()[0] == []
        driver.go_on.set()
        driver.calls.run(lambda: driver.ran.append("through Ray"))
        assert driver.ran == ["through Ray"]

    @pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", header(2**32 - 1, 0), header(3, 0) + b"abc"])
    def test_stranger_that_listens_is_dropped(self, driver, sent):
        connection = driver.dial()
        connection.sock.sendall(sent)
        with pytest.raises(OSError):
            connection.receive()
        driver.calls.run(lambda: driver.ran.append("through Ray"))
        assert driver.ran == ["through Ray"]

    def test_stranger_that_says_nothing_delays_nothing(self, driver):
        with driver.dial().sock:
            driver.calls.run(lambda: driver.ran.append("through Ray"))
        assert driver.ran == ["through Ray"]

    def test_driver_that_does_not_listen_delays_nothing(self, driver, caplog):
        driver.listener.close()
        driver.calls.run(lambda: driver.calls.dial(driver.address, KEY))
        assert len(caplog.messages) == 1 and "Calls go through Ray" in caplog.text

    def test_calls_of_both_ways_run_in_order(self, driver):
        connection = driver.accept()
        connection.send(1, b"1")
        connection.send(2, b"2")
        later = driver.through_ray("after 2", after=2)
        later.start()
        time.sleep(0.05)
        driver.go_on.set()
        later.join(10)
        assert driver.ran == ["1", "2", "after 2"]

    def test_calls_that_were_given_up_with_their_connection_never_overtake_later_ones(self, driver):
        """The driver has told that 1 to 4 are lost. What it sends then is later, and what comes after it is not run."""
        connection = driver.accept()
        connection.send(1, b"1")
        wait_until(lambda: driver.calls._calls or not driver.go_on.is_set())
        time.sleep(0.05)  # 1 is running, and 2 and 3 wait behind it
        connection.send(2, b"2")
        connection.send(3, b"3")
        peer = Peer(KEY)
        peer.sent = 3
        later = driver.through_ray("later", after=peer.last_unanswered())
        later.start()
        driver.go_on.set()
        later.join(10)
        assert driver.calls._connection is None
        with contextlib.suppress(OSError):
            connection.send(4, b"4")
        driver.calls.run(lambda: driver.ran.append("last"))
        assert driver.ran == ["1", "2", "3", "later", "last"]

    def test_connection_lost_while_a_call_through_ray_waits_for_one_on_it(self, driver):
        connection = driver.accept()
        connection.send(1, b"1")
        later = driver.through_ray("after 2", after=2)  # 2 was never sent whole
        later.start()
        connection.sock.sendall(header(5, 2) + b"2")
        connection.close()
        driver.go_on.set()
        later.join(10)
        assert driver.ran == ["1", "after 2"]
