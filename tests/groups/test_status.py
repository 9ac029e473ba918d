"""What a group is doing now: `status()`, and ``python -m single_controller`` in another process."""

import builtins
import os
import re
import signal
import socket
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
import ray
from group_workers import Counter, Fragile
from ray.exceptions import RpcError
from waits import wait_until, within

from single_controller import ControlStoreError, GroupMetrics, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from single_controller.__main__ import main
from single_controller.call.transport import RunningCall
from single_controller.ray import compat, group_records, inspect_groups
from single_controller.ray.inspect_groups import living_ranks, status_from
from single_controller.ray.rank.frames import frames_of
from single_controller.wire.link import ask_at

pytestmark = pytest.mark.timeout(90)


def start(*arguments, address=True):
    """Start ``python -m single_controller``, as from another terminal than that of the driver, whose Ray has told its
    own children how to authenticate."""
    shell = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    line = [sys.executable, "-m", "single_controller", *arguments]
    line += ["--address", ray.get_runtime_context().gcs_address] if address else []
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=shell)


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def run_here(monkeypatch, capsys, *arguments):
    """Run a command in this process, which is connected. Returns its exit code, and what it prints."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr("single_controller.__main__.connect", lambda address: None)
        patch.setattr(ray, "shutdown", lambda: None)
        main(arguments)
    return exit.value.code, *capsys.readouterr()


def records_of(name):
    return [record for record in group_records.read().groups.values() if record.name == f"group {name}"]


@pytest.fixture(scope="module")
def hung(pool):
    """Four ranks: 1 sleeps, 2 hangs in C and holds the interpreter's lock, 0 and 3 are idle."""
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="hung_") as group:
        group.pids = group.pid()
        group.hang_in_c_on.remote(2, [1])
        # Rank 2 still answers in the moments between the beginning of its call and the C function.
        wait_until(lambda: [rank.running and 1 for rank in group.status(0.6).ranks] == [(), 1, None, ()])
        yield group


class TestHungGroup:
    """One group, which the last test kills."""

    def test_status_tells_what_each_rank_runs(self, hung):
        with within(2):
            status = hung.status(timeout=0.6)
        assert (status.state, status.generation, status.last_death) == ("open", 0, None)
        assert [rank.process.pid for rank in status.ranks] == hung.pids
        assert {rank.process.host for rank in status.ranks} == {socket.gethostname()}
        assert [rank.alive for rank in status.ranks] == [True] * 4
        assert status.ranks[0].running == status.ranks[3].running == ()
        (call,) = status.ranks[1].running
        assert call.method == "hang_in_c_on" and 0 < call.seconds < 60
        assert status.ranks[2].running is None and "did not answer" in status.ranks[2].unknown
        text = str(status)
        assert re.search(rf"^1 .* {hung.pids[1]} +alive +hang_in_c_on\(\) for [0-9.]+ s", text, re.MULTILINE)
        assert re.search(r"^2 .* alive +no answer", text, re.MULTILINE)

    def test_status_and_stacks_from_another_process(self, hung):
        status, stacks = start("status", "hung_Fragile"), start("stacks", "hung_", "--ranks", "1,2")
        code, text, _ = finish(status)
        assert code == 0 and f"driver: {socket.gethostname()}, pid {os.getpid()}\n" in text
        assert re.search(rf"^1 .* {hung.pids[1]} +alive +hang_in_c_on\(\) for", text, re.MULTILINE)
        assert re.search(r"^2 .* alive +no answer", text, re.MULTILINE)
        code, text, _ = finish(stacks)
        assert code == 0 and "rank 0" not in text
        by_rank = dict(re.findall(r"rank (\d) is at:\n((?:  .*\n?)+)", text))
        assert "time.sleep(600)" in by_rank["1"]
        assert "hang_in_c_on" in by_rank["2"]  # from py-spy, or from the interpreter's own signal handler

    def test_frames_without_py_spy(self, hung):
        process = next(record.ranks[2].location.wire for record in records_of("hung_Fragile"))
        for _ in range(2):
            text = frames_of(process.pid, process.frames, py_spy="")
            assert "_raylet" not in text and "worker/executor.py" not in text
            assert "pip install py-spy" in text and "in hang_in_c_on" in text
            with open(f"/proc/{process.pid}/fd/{process.frames}") as written:  # those of before are gone
                assert written.read().count("in hang_in_c_on") == text.count("in hang_in_c_on")
        with subprocess.Popen(["sleep", "60"]) as other:  # which has got the pid of a rank that has ended
            try:
                assert re.search(r"unknown: .*not installed.*has ended", frames_of(other.pid, 1, py_spy=""))
                assert other.poll() is None
            finally:
                other.kill()

    def test_death_and_its_cause(self, hung):
        before = time.time()
        os.kill(hung.pids[1], signal.SIGKILL)
        wait_until(lambda: hung.broken is not None)
        wait_until(lambda: records_of("hung_Fragile")[0].broken is not None)
        records = group_records.read()
        record = next(record for record in records.groups.values() if record.name == hung.name)
        answers = ask_at(living_ranks(record, records), "status", 0.4)
        for status in (hung.status(0.4), status_from(record, records, answers)):
            assert status.state == "broken" and status.reason == hung.broken
            assert [rank.alive for rank in status.ranks] == [True, False, True, True]
            assert status.last_death.rank == 1 and before - 1 < status.last_death.death.at < time.time()
            assert "hang_in_c_on" in status.last_death.death.reason
            assert "last death of rank 1, " in str(status)


def nest():
    """Make a group in a worker."""
    pool = RayResourcePool([1], use_gpu=False)
    builtins.nested = pool, RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="nested_")


def test_record_follows_restart_and_close(pool, monkeypatch):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 1), name_prefix="recorded_") as group:
        wait_until(lambda: records_of("recorded_Counter"))
        reads, actors, jobs = compat.read_records, compat.all_actors, compat.living_jobs
        with monkeypatch.context() as patch:  # the group has started while another process reads the records
            read = []
            patch.setattr(compat, "read_records", lambda prefix: read.append(prefix) or reads(prefix))
            patch.setattr(compat, "all_actors", lambda: actors() if read else {})
            patch.setattr(compat, "living_jobs", lambda: jobs() if read else frozenset())
            assert records_of("recorded_Counter")
        os.kill(group.status().ranks[3].process.pid, signal.SIGKILL)
        wait_until(lambda: not all(group.alive()))
        assert group.status().last_death.rank == 3  # without a call that ran into it
        with GroupMetrics(group, interval=0.02):  # it looks while the workers are ended, which is no death
            group.restart()
        wait_until(lambda: records_of("recorded_Counter")[0].generation == 1)
        status = group.status()
        assert (status.state, status.generation) == ("open", 1) and all(rank.alive for rank in status.ranks)
        assert status.last_death.death.generation == 0
        assert [rank.rank for rank in status.ranks if rank.death is not None] == [3]
        pids = [rank.location.pid for rank in records_of("recorded_Counter")[0].ranks]
        assert pids == [rank.process.pid for rank in status.ranks]
        group.execute_func_rank_zero(nest)
        wait_until(lambda: records_of("nested_Counter"))
    assert not records_of("recorded_Counter")
    wait_until(lambda: not records_of("nested_Counter"))  # its driver, a worker, was ended without closing it
    assert group.status().state == "closed" and not any(rank.alive for rank in group.status().ranks)


def test_dropped_group_is_not_shown(pool):
    RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="dropped_")
    wait_until(lambda: not records_of("dropped_Counter"))


@pytest.mark.transports("local", "local-threads")
def test_local_group(make_group):
    group = make_group(Fragile)
    assert [rank.running for rank in group.status().ranks] == [()] * 4
    assert {rank.process.pid for rank in group.status().ranks} == {os.getpid()}
    if not group._transport.synchronous:
        future = group.sleep_on.remote([2], 0.5)
        wait_until(lambda: group.status().ranks[2].running)
        assert isinstance(group.status().ranks[2].running[0], RunningCall) and "sleep_on() for" in str(group.status())
        future.result()


@pytest.mark.parametrize("command", ["status", "stacks"])
def test_texts_of_ranks_have_no_control_characters(monkeypatch, capsys, command):
    monkeypatch.setattr(inspect_groups, command, lambda *_, **__: "a\x1b[2J\nb")
    assert run_here(monkeypatch, capsys, command, "group")[:2] == (0, "a?[2J\nb\n")


def test_commands_explain_what_is_missing(ray_cluster, capsys, monkeypatch):
    for arguments, told in (
        (["status", "--late", "0"], "argument --late: expected a positive number of seconds, got '0'"),
        (["status", "--no-progress", "soon"], "expected a positive number of seconds, got 'soon'"),
        (["stacks", "group", "--ranks", "0,a"], "argument --ranks: expected ranks such as 0,3, got '0,a'"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert told in capsys.readouterr().err
    code, _, err = run_here(monkeypatch, capsys, "status", "nobody")
    assert code == 1 and "no group is called 'nobody'" in err

    for name, error, told in (
        ("all_actors", ControlStoreError("no answer"), "no answer\n"),
        ("ray_worker", RpcError("late"), "store has not answered within 5 s: late\n"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(compat, name, Mock(side_effect=error))
            code, _, err = run_here(patch, capsys, "status")
        assert code == 1 and told in err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SystemExit) as exit:
        main(["status", "--address", f"127.0.0.1:{port}"])
    text = capsys.readouterr().err
    assert exit.value.code == 1 and f"no Ray cluster responds at '127.0.0.1:{port}'" in text and "--address" in text
