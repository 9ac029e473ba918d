"""The wire in one process: who is let in, and what lost connections cost."""

import contextlib
import errno
import gc
import os
import random
import selectors
import shutil
import socket
import subprocess
import threading
import time
import timeit
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import in_fork, interrupt_first_start, refuse_threads, repeated, wait_until, within

from dispatch.errors import ResultError
from single_controller.call.errors import CallTimeoutError, WorkerDiedError
from single_controller.call.joining import RankResult
from single_controller.ray.rank.call_thread import CallThread
from single_controller.ray.results import RankReply, RayResults
from single_controller.wire import connection, link, listener, stream
from single_controller.wire.handshake import HandshakeError, Kind, hello, new_nonce, received_text, welcome, welcomed
from single_controller.wire.link import Link, Reply, ask, ask_at
from single_controller.wire.listener import Listener
from single_controller.wire.stream import StreamListener, connect

pytestmark = pytest.mark.timeout(60)


class Rank:
    """Answers each call with its payload, and notes what it has run."""

    def __init__(self, delay=0.0):
        self.ran = []
        self.delay = delay
        self.hold = threading.Event()
        self.hold.set()
        self.listener = Listener("127.0.0.1", self.call, {"hi": lambda: "there", "wait": self.wait})

    def wait(self):
        self.hold.wait(20)
        return "waited"

    def call(self, kind, session, number, payload):
        assert kind == Kind.CALL
        self.ran.append((number, payload))
        if self.delay:
            threading.Timer(self.delay, session.reply, (Kind.REPLY, number, payload)).start()
        else:
            session.reply(Kind.REPLY, number, payload)


@pytest.fixture
def rank():
    return Rank()


def test_concurrent_call_waits_for_a_thread_that_cannot_be_started(monkeypatch):
    calls, held, ran = CallThread(lambda error: None), threading.Event(), threading.Event()
    calls.submit_concurrent(lambda: held.wait(20))

    with monkeypatch.context() as patch:
        refuse_threads(patch)
        calls.submit_concurrent(ran.set)
    held.set()
    assert ran.wait(5)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_rank_behind_another_address_listens_for_its_family():
    sock, address = listener.listen("2001:db8::1")  # no address of this host, as behind address translation
    with sock:
        assert (sock.family, address.host) == (socket.AF_INET6, "2001:db8::1")


@pytest.fixture
def to_rank(rank):
    one = Link(rank.listener.address)
    assert one.opened.wait(5)
    yield one
    one.close()


class Replied(Reply):
    """A reply that keeps what it was told."""

    def __init__(self, to_rank):
        super().__init__(to_rank)
        self.told = threading.Event()
        self.lost = None

    def arrive(self):
        self.told.set()

    def lose(self, reason, *, dead):
        self.lost = reason
        self.told.set()


def call(to_rank, payload):
    reply = Replied(to_rank)
    to_rank.send(Kind.CALL, payload, reply)
    return reply


def answered(replies, seconds=20):
    end = time.monotonic() + seconds
    return all(reply.told.wait(max(0.0, end - time.monotonic())) for reply in replies)


def heard(sock):
    """What comes until the other end closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            data += part
    return data


def unanswered(rank, to_rank):
    """A call that the rank has received and does not answer, and the session of its driver."""
    rank.delay = 30
    reply = call(to_rank, b"x")
    wait_until(lambda: rank.ran)
    (session,) = rank.listener._sessions.values()
    return reply, session


class TestHandshake:
    @settings(max_examples=60)
    @given(st.data())
    def test_any_changed_frame_is_refused(self, data):
        key, of_rank, of_driver, session = b"k" * 32, b"r" * 16, b"d" * 16, b"s" * 16
        first = hello(key, of_rank, of_driver, session)
        _, proof = welcome(key, of_rank, first)

        def changed(frame):
            place = data.draw(st.integers(0, len(frame) - 1))
            return frame[:place] + bytes([frame[place] ^ data.draw(st.integers(1, 255))]) + frame[place + 1 :]

        with pytest.raises(HandshakeError):
            welcome(key, of_rank, changed(first))
        with pytest.raises(HandshakeError):
            welcomed(key, of_rank, of_driver, session, received_text(changed(proof), 0))

    def test_recorded_or_reflected_frames_prove_nothing(self):
        key, of_rank, of_driver, session = b"k" * 32, new_nonce(), new_nonce(), new_nonce()
        recorded = hello(key, of_rank, of_driver, session)
        with pytest.raises(HandshakeError):
            welcome(key, new_nonce(), recorded)
        with pytest.raises(HandshakeError):
            welcomed(key, of_rank, of_driver, session, received_text(recorded[-32:], 0))

    def test_link_with_another_key_is_never_opened(self, rank):
        stranger = Link(rank.listener.address._replace(key=b"x" * 32))
        assert not stranger.opened.wait(0.5)
        call(stranger, b"no")
        time.sleep(0.3)
        stranger.close()
        assert rank.ran == []

    @pytest.mark.parametrize(
        "sent",
        [
            b"GET / HTTP/1.0\r\n\r\n" * 20,
            connection.HEADER.pack(1 << 30, Kind.HELLO, 0, 0),
            connection.HEADER.pack(3, Kind.CALL, 1, 0) + b"now",
            connection.HEADER.pack(16, Kind.NONCE, 0, 0) + b"n" * 16,
        ],
    )
    def test_strangers_are_dropped_and_others_served(self, rank, to_rank, sent):
        with socket.create_connection(rank.listener.address[:2], 5) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
            heard(sock)
        assert rank.ran == []
        assert answered([call(to_rank, b"x")])

    def test_strangers_that_say_nothing(self, rank, monkeypatch):
        """Neither their number nor their silence keeps a driver out, and in the end they are dropped."""
        monkeypatch.setattr(listener, "MAX_STRANGERS", 20)
        monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(rank.listener.address[:2], 5)) for _ in range(60)]
            one = Link(rank.listener.address)
            assert one.opened.wait(5)
            assert answered([call(one, b"x")])
            for sock in silent:
                heard(sock)
            one.close()


class TestFrames:
    @settings(max_examples=30)
    @given(st.lists(st.binary(max_size=40), max_size=8), st.data())
    def test_frames_arrive_whole_wherever_the_stream_is_split(self, payloads, data):
        stream = b"".join(
            connection.HEADER.pack(len(payload), Kind.CALL, number, 0) + payload
            for number, payload in enumerate(payloads)
        )
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        ours, theirs = socket.socketpair()
        taken = []
        one = connection.Connection(ours, lambda kind, number, acked, payload: taken.append(payload), lambda why: None)
        connection.hub.remove(ours)  # this thread reads instead
        try:
            for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                if stop > start:
                    theirs.sendall(stream[start:stop])
                    one._receive()
            assert taken == payloads
        finally:
            one.close()
            theirs.close()


class TestLostConnections:
    def test_link_that_is_closed_while_it_connects_leaves_no_file_behind(self, rank, monkeypatch):
        removed, added = threading.Event(), threading.Event()
        remove = connection.hub.remove

        def remove_and_wait(sock):  # the closing thread, until the hub's thread has added the socket again
            remove(sock)
            if threading.current_thread() in closing:
                removed.set()
                added.wait(0.5)

        def connect(sock, *args):
            closing.append(threading.Thread(target=dialled[0].close))
            closing[0].start()
            removed.wait(0.5)
            try:
                return connection.Connection(sock, *args)
            finally:
                added.set()

        closing, dialled = [], []
        monkeypatch.setattr(connection.hub, "remove", remove_and_wait)
        monkeypatch.setattr(link, "Connection", connect)
        with monkeypatch.context() as patch:  # it connects when the test has the link
            patch.setattr(Link, "_dial", lambda self: None)
            dialled.append(Link(rank.listener.address))
        dialled[0]._dial()
        assert added.wait(5)
        closing[0].join(5)
        assert [key for key in connection.hub._selector.get_map().values() if key.fileobj.fileno() < 0] == []

    def test_socket_of_a_link_whose_closing_was_interrupted_does_not_keep_the_hub_busy(self, rank, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(Link, "_dial", lambda self: None)
            one = Link(rank.listener.address)
        one.close()  # Ctrl-C has come before it removed this socket, which it was dialling with
        with socket.create_connection(rank.listener.address[:2]) as sock:
            connection.hub.add(sock, selectors.EVENT_WRITE, lambda _: one._connected(sock))
            wait_until(lambda: sock not in connection.hub._selector.get_map(), 5)

    def test_every_call_runs_once_in_order_and_no_reply_is_lost(self, rank, to_rank):
        rank.delay, replies = 0.001, []
        random.seed(3)

        def cut():
            time.sleep(random.random() * 0.03)
            ends = [to_rank._connection, to_rank._dialling, *rank.listener._strangers]
            ends += [session.connection for session in list(rank.listener._sessions.values())]
            for one in ends:
                if isinstance(one, connection.Connection):
                    one._shut()

        with repeated(cut):
            for number in range(1500):
                replies.append(call(to_rank, b"%d" % number))
                time.sleep(0.0003)
        assert answered(replies)
        assert [reply.payload for reply in replies] == [b"%d" % number for number in range(1500)]
        assert [payload for _, payload in rank.ran] == [b"%d" % number for number in range(1500)]

    def test_fork_has_no_socket_that_is_being_connected_or_listens(self):
        with contextlib.ExitStack() as stack:
            host, port = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)).getsockname()
            for _ in range(4):  # further connections get no answer
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex((host, port))
            opening = Link(link.WireAddress(host, port, b"k" * 32, 1))
            listening = StreamListener(host, print, "test")
            sock = opening._dialling
            assert isinstance(sock, socket.socket)
            assert in_fork(lambda: f"{sock.fileno()} {listening._listener.fileno()}") == "-1 -1"
            opening.close()
            listening.close()

    def test_fork_has_no_socket_that_has_just_been_connected(self, rank, monkeypatch):
        """The hub has removed it, to add it again as a connection."""
        reached, forked, sockets = threading.Event(), threading.Event(), []

        def wait_and_connect(sock, *args):
            sockets.append(sock)
            reached.set()
            forked.wait(5)
            return connection.Connection(sock, *args)

        monkeypatch.setattr(link, "Connection", wait_and_connect)
        one = Link(rank.listener.address)
        assert reached.wait(5)
        # Fork in this thread: Python clears the other threads' states in the child, and a process group of torch that
        # an earlier test has left in the main thread's state would wait there for its own threads.
        closed = in_fork(lambda: str(sockets[0].fileno())) == "-1"
        forked.set()
        assert one.opened.wait(5) and closed
        one.close()

    def test_rank_that_could_not_accept_a_connection_does_so_later(self, rank, monkeypatch):
        """It has too many open files."""
        accept, failed = socket.socket.accept, []

        def fail_once(sock):
            if sock is rank.listener._listener and not failed:
                failed.append(sock)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", fail_once)
        one = Link(rank.listener.address)
        wait_until(lambda: failed, 5)
        assert failed[0] in connection.hub._selector.get_map()
        assert one.opened.wait(5)
        one.close()

    def test_silence_that_shows_when_a_call_is_sent(self, rank, to_rank, monkeypatch):
        """As when the thread that reads sees it first: how long a host has been silent tells whether it is dead."""
        lost, send, failed = to_rank._connection, socket.socket.send, []

        def fail_once(sock, *data):
            if sock is lost._sock and not failed:
                failed.append(sock)
                raise TimeoutError(errno.ETIMEDOUT, "no acknowledgement")
            return send(sock, *data)

        monkeypatch.setattr(socket.socket, "send", fail_once)
        with to_rank.lock:  # the second call, too, is sent before the connection is known to be lost
            replies = [call(to_rank, b"x") for _ in range(2)]
        assert answered(replies) and failed
        assert lost.timed_out and not lost.reset and "no acknowledgement" in to_rank.last_error

    def test_cancelling_while_there_is_none(self, rank, to_rank):
        waiting, session = unanswered(rank, to_rank)
        to_rank._connection._shut()
        assert to_rank.tell(Kind.CANCEL, waiting.number) and not to_rank.tell(Kind.CANCEL, 1 << 20)
        wait_until(lambda: session.cancelled == {waiting.number}, 5)

    def test_wanted_reply_is_kept_although_it_crosses_a_request_that_is_lost(self, rank, to_rank, monkeypatch):
        reply, session = unanswered(rank, to_rank)
        with monkeypatch.context() as patch:
            patch.setattr(to_rank._connection, "send", lambda *frame: None)
            assert to_rank.tell(Kind.WANT, reply.number)
        session.reply(Kind.REPLY, reply.number, b"x")
        assert answered([reply]) and reply.payload == b"x"
        reply.told.clear()
        to_rank._connection._shut()
        wait_until(lambda: not (to_rank._unanswered or to_rank._notes), 5)
        assert session.kept == {reply.number: (b"x", None)}
        assert not reply.told.is_set(), "it has arrived once"

    @pytest.mark.parametrize("replied", [False, True])
    def test_wanted_reply(self, rank, to_rank, replied):
        reply, session = unanswered(rank, to_rank)
        with to_rank.lock if replied else contextlib.nullcontext():  # the hub cannot take the reply meanwhile
            if replied:
                session.reply(Kind.REPLY, reply.number, b"x")
            assert to_rank.tell(Kind.WANT, reply.number)
        if not replied:
            wait_until(lambda: session.wanted)
            session.reply(Kind.REPLY, reply.number, b"x")
        assert answered([reply]) and reply.payload == b"x"
        wait_until(lambda: session.kept, 5)
        assert session.take_kept(reply.number) == (b"x", None) and not session.wanted
        wait_until(lambda: not to_rank._unanswered, 5)

    def test_rank_waits_for_no_driver_that_is_gone(self, rank, to_rank, monkeypatch):
        monkeypatch.setattr(link, "RETURN_SECONDS", 0.3)
        monkeypatch.setattr(link, "LOOK_SECONDS", 0.1)
        assert answered([call(to_rank, b"before")])
        (session,) = rank.listener._sessions.values()
        with ThreadPoolExecutor() as pool:
            parts = [pool.submit(session.take_parts, 2), pool.submit(session.take_parts, 2, link.INPUTS_OF)]
            kept = pool.submit(session.take_kept, 2)
            assert not wait([*parts, kept], 0.5).done, "it is connected"
            to_rank.close()
            assert [one.result(5) for one in parts] == [None, None]
            assert "gone" in str(kept.exception(5))

    def test_deferred_arguments_that_are_lost_with_the_connection(self, rank, to_rank):
        rank.delay = 30
        waiting = call(to_rank, b"waiting")
        to_rank._connection._shut()
        to_rank.tell(Kind.INPUTS, waiting.number, b"where")
        wait_until(lambda: rank.ran)
        (session,) = rank.listener._sessions.values()
        assert session.take_parts(waiting.number, link.INPUTS_OF) == (b"where",)

    def test_rank_keeps_only_what_is_not_acknowledged(self, rank, to_rank):
        replies = [call(to_rank, b"x" * 1000) for _ in range(500)]
        assert answered(replies)
        assert answered([call(to_rank, b"last")])
        (session,) = rank.listener._sessions.values()
        assert len(session.replies) <= link.ACK_REPLIES + 1

    def test_rank_keeps_no_replies_for_as_long_as_an_earlier_call_runs(self, rank, to_rank):
        long, session = unanswered(rank, to_rank)
        rank.delay = 0
        assert answered([call(to_rank, b"x" * 1000) for _ in range(100)]) and not long.told.is_set()
        wait_until(lambda: not session.replies, 5)

    def test_interrupted_call_leaves_no_number_open(self, rank, to_rank, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(to_rank._connection, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call(to_rank, b"interrupted")
        assert answered([call(to_rank, b"next")]) and to_rank._acknowledged == 2
        assert rank.ran == [(1, b"interrupted"), (2, b"next")], "it is sent again: its arguments may be on their way"

    def test_rank_notes_no_fetched_result_for_as_long_as_an_earlier_call_runs(self, rank, to_rank):
        rank.delay = 30
        long, *others = [call(to_rank, b"x") for _ in range(4)]
        wait_until(lambda: len(rank.ran) == 4)
        (session,) = rank.listener._sessions.values()
        for reply in others:
            assert to_rank.tell(Kind.WANT, reply.number)
            session.reply(Kind.KEPT, reply.number, b"", "kept")
        assert answered(others) and not long.told.is_set()
        wait_until(lambda: not session.replies, 5)
        assert [session.take_kept(reply.number) for reply in others] == ["kept"] * 3 and not session.given

    def test_rank_looks_for_late_arguments_once_for_each_acknowledgement(self):
        class Parts(dict):
            walks = 0

            def __iter__(self):
                self.walks += 1
                return super().__iter__()

        session = link.Session()
        session.parts = Parts({1: (), 1 + link.INPUTS_OF: (), 2: ()})
        for _ in range(3):
            session.acknowledge(1)
        session.give_parts(1, ())
        assert session.parts.walks == 1 and list(session.parts) == [2]

    def test_looking_for_the_oldest_does_not_walk_over_those_that_have_ended(self, monkeypatch):
        """In a plain dict it does, and many outstanding calls take quadratic time."""

        def seconds(look):
            return min(timeit.repeat(look, number=50, repeat=5))

        monkeypatch.setattr(Link, "_dial", lambda self: None)
        to_nobody, session, many = Link(link.WireAddress("127.0.0.1", 1, b"k" * 32, 1)), link.Session(), 30_000
        reply = Replied(to_nobody)
        for number in range(1, many + 1):
            to_nobody.send(Kind.CALL, b"", reply)
            session.reply(Kind.REPLY, number, b"")
        calls, replies = seconds(lambda: to_nobody._acknowledged), seconds(lambda: session.acknowledge(0))
        for number in range(1, many):
            to_nobody._take(Kind.REPLY, number, 0, b"")
        session.acknowledge(many - 1)
        assert to_nobody._acknowledged == many - 1 and list(session.replies) == [many]
        assert seconds(lambda: to_nobody._acknowledged) < 20 * calls
        assert seconds(lambda: session.acknowledge(0)) < 20 * replies

    def test_rank_that_has_forgotten_the_driver(self, rank, to_rank):
        assert answered([call(to_rank, b"before")])
        rank.delay = 30
        waiting = call(to_rank, b"waiting")
        wait_until(lambda: len(rank.ran) == 2)
        rank.delay = 0
        rank.listener._sessions.clear()
        to_rank._connection._shut()
        assert waiting.told.wait(5) and "too long" in waiting.lost
        assert answered([call(to_rank, b"after")])
        assert [payload for _, payload in rank.ran] == [b"before", b"waiting", b"after"]

    def test_rank_that_many_drivers_have_left_walks_over_none(self, rank, monkeypatch):
        class NotWalked(dict):
            def items(self):
                raise AssertionError("one after the other is asked whether it is old")

        monkeypatch.setattr(rank.listener, "_sessions", NotWalked())
        assert ask_at({0: rank.listener.address}, "hi", 5)[0].ok

    def test_first_call_of_a_forgotten_driver_is_not_run_again(self, rank, to_rank, monkeypatch):
        monkeypatch.setattr(listener, "SESSION_SECONDS", 0.2)
        rank.delay = 30
        waiting = call(to_rank, b"waiting")
        wait_until(lambda: rank.ran)
        with monkeypatch.context() as patch:
            patch.setattr(to_rank, "_dial", lambda: None)
            to_rank._connection._shut()
            wait_until(lambda: not to_rank.connected)
            wait_until(lambda: not rank.listener._sessions)
        rank.listener.session(to_rank.session)  # a late task of the forgotten session makes another one of that name
        to_rank._dial()
        assert waiting.told.wait(5) and "too long" in waiting.lost
        rank.delay = 0
        assert answered([call(to_rank, b"after")])
        assert [payload for _, payload in rank.ran] == [b"waiting", b"after"]

    def test_process_that_is_gone(self, rank, to_rank, monkeypatch):
        monkeypatch.setattr(link, "REFUSED_SECONDS", 0.3)
        assert to_rank.gone() is None
        connection.hub.remove(rank.listener._listener)
        rank.listener._listener.close()
        to_rank._connection._shut()
        wait_until(to_rank.gone, 5)
        assert to_rank.gone() == "refused"

    def test_closing_gives_up_what_has_not_arrived(self, rank, to_rank):
        rank.delay = 30
        reply = call(to_rank, b"x")
        to_rank.close()
        assert reply.told.wait(5) and reply.lost
        late = call(to_rank, b"y")
        assert late.told.wait(5) and late.lost


class TestCommands:
    def test_answers(self, rank, to_rank):
        assert ask({0: to_rank}, "hi", 5) == {0: ("there", True, True)}
        told = ask({0: to_rank}, "bye", 5)[0]
        assert not told.ok and told.told and "another version" in told.text
        assert ask_at({3: rank.listener.address}, "hi", 5) == {3: ("there", True, True)}

    def test_rank_that_does_not_answer(self, rank, to_rank):
        rank.hold.clear()
        with within(2):
            told = ask({0: to_rank}, "wait", 0.3)[0]
        assert not told.told and "did not answer within 0.3 s" in told.text
        assert ask({0: to_rank}, "hi", 5)[0].ok  # nobody else waits for that command
        rank.hold.set()

    def test_nobody_listens(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        told = ask_at({0: link.WireAddress("127.0.0.1", port, b"k" * 32, 1)}, "hi", 0.5)[0]
        assert not told.told and "cannot be reached" in told.text


@pytest.fixture
def certificates(tmp_path, monkeypatch):
    """What Ray's documentation has users set, with a certificate that signs itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=ray"
    command = f"{openssl} {new} -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    for name, path in (("SERVER_CERT", cert), ("SERVER_KEY", key), ("CA_CERT", cert)):
        monkeypatch.setenv(f"RAY_TLS_{name}", str(path))
    monkeypatch.setenv("RAY_USE_TLS", "1")


@pytest.mark.usefixtures("certificates")
class TestEncryption:
    def test_calls_in_both_directions(self, rank, to_rank):
        payloads = [bytes([n]) * 300_000 for n in range(8)]
        replies = [call(to_rank, payload) for payload in payloads]
        assert answered(replies) and [reply.payload for reply in replies] == payloads
        to_rank._connection._shut()
        again = [call(to_rank, b"%d" % n) for n in range(50)]
        assert answered(again) and len(rank.ran) == 58

    def test_whoever_does_not_encrypt_gets_nowhere(self, rank):
        with socket.create_connection(rank.listener.address[:2], 5) as sock:
            sock.sendall(connection.HEADER.pack(3, Kind.CALL, 1, 0) + b"now")
            assert len(heard(sock)) < 20 and rank.ran == []  # an alert of TLS, and no nonce

    def test_files_that_cannot_be_read_are_why_there_is_no_connection(self, monkeypatch):
        with socket.create_server(("127.0.0.1", 0)) as listening, monkeypatch.context() as patch:
            patch.delenv("RAY_TLS_CA_CERT")
            one = Link(link.WireAddress(*listening.getsockname(), b"k" * 32, 1))
            wait_until(lambda: "KeyError: 'RAY_TLS_CA_CERT'" in one.last_error)
            patch.setenv("RAY_TLS_CA_CERT", "/missing")
            wait_until(lambda: "FileNotFoundError" in one.last_error)
            one.close()


@pytest.fixture(params=["plain", "encrypted"])
def streams(request):
    """A listener, what its streams read, and why they ended."""
    if request.param == "encrypted":
        request.getfixturevalue("certificates")
    read, ends = [], []

    def serve(one):
        try:
            read.append(one.read(100_000))
            one.write(read[-1][::-1])
        except OSError as error:
            ends.append(error)
            raise

    listening = StreamListener("127.0.0.1", serve, "test")
    yield listening.address, read, ends
    listening.close()
    with pytest.raises(OSError):
        connect(listening.address, time.monotonic() + 5)


class TestStreams:
    payload = random.Random(1).randbytes(100_000)

    def test_bytes_in_both_directions(self, streams):
        address, read, _ = streams
        with connect(address, time.monotonic() + 10) as one, connect(address, time.monotonic() + 10) as other:
            for sent, to in ((self.payload, one), (bytes(100_000), other)):
                to.write(sent)
                assert to.read(len(sent)) == sent[::-1]
        assert read == [self.payload, bytes(100_000)]

    def test_both_sides_must_know_the_key(self, streams, caplog):
        address, read, ends = streams
        with pytest.raises(ConnectionError):
            connect(address._replace(key=b"x" * 32), time.monotonic() + 5)
        wait_until(lambda: "HandshakeError: its key is wrong" in caplog.text)
        assert read == ends == []

    def test_listener_that_does_not_know_the_key(self, streams, monkeypatch):
        monkeypatch.setattr(stream, "welcome", lambda key, nonce, frame: (b"", bytes(32)))
        with pytest.raises(HandshakeError, match="its key is wrong"):
            connect(streams[0], time.monotonic() + 5)

    def test_stream_that_ends_early(self, streams):
        address, read, ends = streams
        with connect(address, time.monotonic() + 5) as one:
            one.write(self.payload[:-1])
        wait_until(lambda: ends)
        assert read == [] and "1 bytes are missing" in str(ends[0])

    def test_peer_that_falls_silent(self, streams, monkeypatch):
        """Both sides give up when their time is over."""
        address, read, ends = streams
        monkeypatch.setattr(stream, "IDLE_SECONDS", 0.3)
        begun = time.monotonic()
        with connect(address, begun + 0.6) as one:
            wait_until(lambda: ends)
            assert isinstance(ends[0], TimeoutError) and read == []
        with connect(address, time.monotonic() + 0.2) as one, pytest.raises(TimeoutError):
            one.read(1)
        with pytest.raises(TimeoutError):
            connect(address, time.monotonic())
        assert time.monotonic() - begun < 5

    def test_fork_has_neither_end(self, streams):
        with connect(streams[0], time.monotonic() + 5):
            ends = [one for one in gc.get_objects() if type(one) is stream.Stream]
            assert in_fork(lambda: str({one._sock.fileno() for one in ends})) == "{-1}"
            assert sum(one._sock.fileno() >= 0 for one in ends) >= 2

    def test_peer_that_does_not_read(self, streams):
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            port = deaf.getsockname()[1]
            begun = time.monotonic()
            with pytest.raises(TimeoutError):
                connect(streams[0]._replace(port=port), begun + 0.3)
            with (
                pytest.raises(TimeoutError),
                stream.Stream(socket.create_connection(("127.0.0.1", port)), server=False, end=begun + 0.6) as one,
            ):
                one.write(bytes(64 << 20))
            assert time.monotonic() - begun < 5

    def test_stranger_gets_a_nonce_at_most(self, streams, monkeypatch):
        address, read, ends = streams
        monkeypatch.setattr(stream, "IDLE_SECONDS", 0.3)
        with socket.create_connection(address[:2], 5) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert len(heard(sock)) < 20 and read == ends == []

    def test_strangers_do_not_take_all_threads(self, streams, monkeypatch):
        monkeypatch.setattr(stream, "MAX_STRANGERS", 2)
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(connect(streams[0], time.monotonic() + 10))
            strangers = [stack.enter_context(socket.create_connection(streams[0][:2], 5)) for _ in range(3)]
            assert strangers[2].recv(100) == b""
            one.write(self.payload)
            assert one.read(len(self.payload)) == self.payload[::-1]


class Told:
    """Stands for a call."""

    def __init__(self):
        self.results = []

    def arrive(self, result):
        self.results.append(result)


def test_reply_that_cannot_be_read_is_a_lost_result():
    """Otherwise the connection would be closed, and whoever waits for the call would do so for ever."""
    listener = Listener("127.0.0.1", lambda kind, session, number, _: session.reply(Kind.REPLY, number, b"garbage"), {})
    to_rank, told = Link(listener.address), Told()
    reply = RankReply(to_rank, 0, "here", None, weakref.ref(told))
    to_rank.send(Kind.CALL, b"", reply)
    wait_until(lambda: told.results)
    to_rank.close()
    assert told.results[0].failure.no_contact and "cannot be read" in told.results[0].failure.message


def test_death_is_not_told_in_the_thread_that_reads_connections():
    told = Told()
    reply = RankReply(None, 0, "here", None, weakref.ref(told))
    reply.lose("it was killed", dead=True)
    assert told.results == [] and reply.result.died == "it was killed"


def test_result_of_a_dead_rank_is_an_error_elsewhere():
    results = RayResults("work", [0], [(RankResult(0, died="it was killed"), None)], 1, ["here"])
    with pytest.raises(WorkerDiedError, match=r"rank 0 died during work\(\) \(here\): it was killed"):
        results.wait()


def test_wait_that_ends_names_the_ranks_that_have_not_answered():
    told = Told()
    replies = [RankReply(None, rank, "here", None, weakref.ref(told)) for rank in range(3)]
    replies[1].result = RankResult(1)
    results = RayResults("work", [0, 1, 2], replies, 3, ["here"] * 3, Future())
    with pytest.raises(CallTimeoutError, match="still running: ranks 0, 2") as caught:
        results.wait(0.01)
    assert caught.value.ranks == (0, 2)


def test_values_that_died_with_their_ranks_are_waited_for_at_once(monkeypatch):
    """Also if each of them is sent by itself, to the rank that needs it."""
    told, waited, outcome = Told(), [], Future()
    monkeypatch.setattr(ray, "wait", lambda refs, **_: waited.append(refs) or ([], refs))
    dead = SimpleNamespace(dead="its host is gone")
    replies = [RankReply(dead, rank, "here", None, weakref.ref(told)) for rank in range(3)]
    for reply in replies:
        reply.result = RankResult(reply.rank, kept=True)
        reply.fetched = reply.result, [f"value {reply.rank}"]
    source = RayResults("work", range(3), replies, 3, ["here"] * 3, outcome)
    outcome.set_result(None)
    assert [result.rank for result in source.wait()] == [0, 1, 2]
    for rank in range(3):
        _, (_, _, ((sent, _),), *_) = source.only([rank]).__reduce__()
        assert f"rank {rank} of work() (here) is lost with its rank" in sent.failure.message
    with pytest.raises(ResultError, match=r"rank 2 of work.*which has died: its host is gone"):
        source.values([2], private=True)
    assert waited == [["value 0", "value 1", "value 2"]]


def test_function_that_raises_in_the_hub_keeps_no_other_from_running(monkeypatch):
    """Nor does a handler of the log that raises, too."""
    hub, ran = connection.Hub(), threading.Event()

    def queue_both():
        hub.soon(lambda: 1 / 0)
        hub.soon(ran.set)

    def unwritable(*record):
        raise OSError("no space left on device")

    for log in (connection.logger.exception, unwritable):
        monkeypatch.setattr(connection.logger, "exception", log)
        hub.later(0.0, queue_both)
        assert ran.wait(5)
        ran.clear()


def test_interrupted_start_of_the_hub_does_not_leave_two_threads(monkeypatch):
    """They would read the same connections, and mix up the frames."""
    hub, ran = connection.Hub(), threading.Event()
    with monkeypatch.context() as patch:
        started = interrupt_first_start(patch, "wire")
        with pytest.raises(KeyboardInterrupt):
            hub.start()
        hub.later(0.0, ran.set)
    assert ran.wait(5)
    wait_until(lambda: sum(thread.is_alive() for thread in started) == 1, 5)


def test_socket_that_was_closed_is_no_error_while_other_threads_add_theirs():
    class Changing(dict):
        def values(self):
            raise RuntimeError("dictionary changed size during iteration")

    hub = connection.Hub()
    hub._selector._fd_to_key = Changing(hub._selector._fd_to_key)
    with socket.socket() as sock:
        pass
    hub.change(sock, selectors.EVENT_READ)
    hub.remove(sock)
