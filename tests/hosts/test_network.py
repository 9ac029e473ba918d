"""The harness itself: hosts are apart, faults are what their names say, and nothing remains."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from host_network import HERE, Network, wait_until

pytestmark = pytest.mark.alone

CLIENT = """
import socket, sys, time
begun = time.monotonic()
with socket.create_connection((sys.argv[1], 5000), timeout=1) as connection:
    connection.sendall(b"x" * int(sys.argv[2]) + b"!")
    print(connection.recv(1), time.monotonic() - begun)
"""
SERVER = """
import socket
listening = socket.create_server(("", 5000))
print("listening", flush=True)
while True:
    connection, _ = listening.accept()
    while data := connection.recv(1 << 20):
        if data.endswith(b"!"):
            connection.sendall(b"!")
"""


def serve(host):
    server = host.popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"listening\n"
    return server


def ask(host, name, nbytes=10):
    """Send bytes to the server on another host. Returns the seconds until it answered, or None."""
    try:
        answer, seconds = host.run(sys.executable, "-c", CLIENT, name, nbytes).split()
    except RuntimeError as error:
        assert "timed out" in str(error)
        return None
    assert answer == "b'!'"
    return float(seconds)


def processes_of(pid):
    """Names of the processes that descend from one."""
    found, parents = [], [pid]
    while parents:
        for task in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            children = [int(child) for child in task.read_text().split()]
            found += children
            parents += children
    return found


def test_hosts_and_the_faults_between_them():
    with Network(2) as network:
        one, other = network.hosts
        assert (one.run("hostname"), other.run("hostname")) == ("h1\n", "h2\n")
        server = serve(other)
        assert ask(one, "h2") < 0.5
        network.cut("h2")
        assert ask(one, "h2") is None
        network.heal("h2")
        assert ask(one, "h2", 10_000_000) < 1
        network.degrade("h2", delay=0.1, loss=0.0)
        wait_until(lambda: ask(one, "h2") is not None, 5)
        assert 0.4 <= ask(one, "h2") < 0.9  # two round trips of 0.2 s
        other.kill(having="create_server")
        assert server.wait(5) != 0
    assert server.wait(5) is not None


def test_nothing_remains_of_hosts_whose_test_was_killed():
    code = f"""
        import sys, time
        sys.path.insert(0, {str(HERE)!r})
        from host_network import Network
        network = Network(2)
        for host in network.hosts:
            host.popen(["sleep", "1000"])
            while not host.pids("sleep"):
                time.sleep(0.01)
        print("ready", flush=True)
        time.sleep(1000)
    """
    before = set(os.listdir("/tmp"))
    test = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert test.stdout.readline() == b"ready\n"
    hosts = processes_of(test.pid)
    assert len(hosts) >= 6  # a switch and two hosts with their first processes, and what runs on them
    test.kill()
    test.wait(5)
    test.stdout.close()
    gone = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in hosts) and time.monotonic() < gone:
        time.sleep(0.05)
    assert [pid for pid in hosts if os.path.exists(f"/proc/{pid}")] == []
    assert {name for name in set(os.listdir("/tmp")) - before if "host" in name} == set()
