"""Why a rank waits, and for whom: from the calls and stacks of a group's ranks."""

from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from single_controller.call.state import RankStatus
from single_controller.call.transport import Death, RankProcess, RunningCall
from single_controller.ray.inspect_groups import distinct_names
from single_controller.view import group_watch
from single_controller.view.group_watch import GroupLook, GroupStatus, GroupWatch
from single_controller.view.rank_waits import collective, frames, waits
from single_controller.wire.handshake import WireAddress

HERE = '  File "/home/me/trainer.py", line {line}, in {name}\n    {text}'
TORCH = (
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81, in wrapper\n'
    "    return func(*args, **kwargs)\n"
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2806, in {name}\n'
    "    work.wait()"
)
PY_SPY = """  Thread 77 (idle): "MainThread"
      select (selectors.py:415)
      Worker.main_loop (ray/_private/worker.py:1069)
      run (my/launcher.py:3)
  Thread 78 (active): "worker-calls"
      wait (torch/distributed/distributed_c10d.py:500)
      broadcast (torch/distributed/distributed_c10d.py:2500)
      Trainer.load (my/trainer.py:12)"""
SIGNAL = """  Thread 0x00007f (most recent call first):
    File "/usr/lib/python3.11/threading.py", line 324 in wait
  Current thread 0x00007e (most recent call first):
    File "/home/me/loss.py", line 5 in entropy
    File "/home/me/trainer.py", line 48 in train"""


def at(line, name="train", text="x = 1"):
    return HERE.format(line=line, name=name, text=text)


def within(name, line=48, group=""):
    return at(line, text=f"dist.{name}(loss)") + "\n" + TORCH.format(name=name) + group


def group_of(name, ranks):
    return f"\n  in process group {name!r}, ranks {ranks}"


def rank(number, *calls, alive=True, answers=True, seconds=10.0):
    running = tuple(RunningCall(*call) if isinstance(call, tuple) else RunningCall(call, seconds) for call in calls)
    death = None if alive else Death(1.0, "killed", 0)
    return RankStatus(
        number, RankProcess("host", "10.0.0.1", 100 + number), alive, running if answers else None, "", death
    )


def explained(ranks, stacks):
    return {number: str(wait) for number, wait in waits(ranks, stacks).items()}


def test_one_rank_is_late_for_a_collective():
    ranks = [rank(n, "train") for n in range(4)]
    stacks = {n: within("all_reduce") for n in (0, 1, 3)} | {2: at(30, "load")}
    assert explained(ranks, stacks) == {
        **{n: "waits in all_reduce, for rank 2; at trainer.py:48, in train" for n in (0, 1, 3)},
        2: "at trainer.py:30, in load; ranks 0, 1, 3 wait for it",
    }


@pytest.mark.parametrize("folder", ["/tmp/ray/session_1/working_dir_files/_ray_pkg_1", "/home/ray"])
def test_file_of_a_submitted_job_is_the_users(folder):
    stacks = {0: within("all_reduce").replace("/home/me", folder), 1: at(30, "load").replace("/home/me", folder)}
    found = waits([rank(n, "train") for n in range(2)], stacks)
    assert found[0].where == "trainer.py:48, in train"


@pytest.mark.parametrize("why", ["dead", "no answer", "ended", "another method"])
def test_the_missing_rank(why):
    other = {
        "dead": rank(1, alive=False),
        "no answer": rank(1, answers=False),
        "ended": rank(1),
        "another method": rank(1, "save", "train"),
    }[why]
    found = waits([rank(0, "train"), other], {0: within("barrier"), 1: at(9)})
    assert found[0].what == "in barrier" and found[0].ranks == (1,) and found[1].awaited == (0,)


def test_ranks_in_different_collectives_wait_for_each_other():
    stacks = {0: within("all_reduce"), 1: within("all_reduce"), 2: within("broadcast", 60)}
    found = waits([rank(n, "train") for n in range(3)], stacks)
    assert (found[0].ranks, found[1].ranks, found[2].ranks) == ((2,), (2,), (0, 1))


def test_all_in_the_same_collective_wait_for_the_network():
    found = waits([rank(n, "train") for n in range(3)], {n: within("all_reduce") for n in range(3)})
    assert [wait.ranks for wait in found.values()] == [(), (), ()]


def test_ranks_of_different_process_groups_wait_for_those_of_their_own():
    """Two by two: rank 5 sleeps, rank 4 waits for it in their tensor-parallel group, and 0 and 2 wait for 4 in their
    data-parallel group. The other data-parallel group has got to its next collective, and waits for 5 alone."""
    tp = [group_of("tp", f"{n}-{n + 1}") for n in (0, 0, 2, 2, 4, 4)]
    dp = [group_of("dp", ranks) for ranks in ("0-4:2", "1-5:2") * 3]
    stacks = {n: within("all_reduce", 60, dp[n]) for n in range(4)}
    stacks |= {4: within("all_reduce", 48, tp[4]), 5: at(30, "load")}
    ranks = [rank(n, "train") for n in range(6)]
    found = waits(ranks, stacks)
    assert {n: wait.ranks for n, wait in found.items()} == {0: (4,), 1: (5,), 2: (4,), 3: (5,), 4: (5,), 5: ()}
    assert found[0].what == "in all_reduce of process group dp (ranks 0, 2, 4)" and found[4].awaited == (0, 2)
    look = GroupLook(GroupStatus("group a", "open", "", 0, ranks), found, stacks)
    (problem,) = look.problems(late=1)  # rank 4 is not late: it waits for 5 itself
    assert problem.startswith("rank 5 of group a is late") and problem.endswith("ranks 1, 3, 4 wait for it")


def test_ranks_that_wait_for_each_other_in_two_process_groups():
    stacks = {0: within("barrier", 1, group_of("a", "0-1")), 1: within("barrier", 2, group_of("b's", "0-1"))}
    ranks = [rank(n, "train") for n in range(3)]
    found = waits(ranks, stacks | {2: within("barrier", 3, "\n  in process group 'c'")})
    assert (
        found[0].ranks == (1,)
        and found[1].ranks == (0,)
        and found[1].what.endswith("of process group b's (ranks 0, 1)")
    )
    assert found[2].what == "in barrier of process group c" and found[2].ranks == (0, 1)
    look = GroupLook(GroupStatus("group a", "open", "", 0, ranks), found, stacks)
    assert [one[:6] for one in look.problems(late=1)] == ["rank 0", "rank 1"]  # nobody else is to blame


@pytest.mark.parametrize("text", ["ranks 1--2", "ranks 9-" + "9" * 30, "ranks 0-4:0", "ranks x"])
def test_what_only_looks_like_a_process_group(text):
    assert frames(within("barrier", 1, f"\n  in process group 'a', {text}"))[-1].group is None


def test_a_call_that_waits_for_another_calls_result():
    waiting = rank(0, ("score", 3.0, "the result of generate()"))
    assert explained([waiting], {}) == {0: "waits for the result of generate()"}


def test_idle_ranks_wait_for_nothing():
    assert waits([rank(0), rank(1)], {}) == {}


def test_frames_of_all_sources():
    assert [str(frame) for frame in frames(at(1, "f") + "\n" + at(2, "g"))] == [
        "trainer.py:1, in f",
        "trainer.py:2, in g",
    ]
    assert [frame.function for frame in frames(PY_SPY)] == ["Trainer.load", "broadcast", "wait"]
    assert collective(frames(PY_SPY)) == "broadcast"
    assert [str(frame) for frame in frames(SIGNAL)] == ["trainer.py:48, in train", "loss.py:5, in entropy"]
    tasks = f"  task:\n{at(7, 'fetch')}\n  task:\n{at(8, 'other')}"
    assert [str(frame) for frame in frames(tasks)] == ["trainer.py:7, in fetch"]
    assert frames("") == frames("  no method is running") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("work.wait()", "wait"),
        ("dist.all_gather_into_tensor(a, b)", "all_gather_into_tensor"),
        ("broadcaster(x)", ""),
        ("reduced(x)", ""),
    ],
)
def test_collectives_without_a_frame_of_their_own(text, name):
    assert collective(frames(at(5, text=text))) == name


def test_groups_of_one_name_are_told_apart():
    groups = [
        SimpleNamespace(name=f"group {name}", driver=f"node, pid {pid}") for name, pid in ("a1", "a2", "a2", "b1")
    ]
    assert distinct_names(groups) == [
        "group a (driver: node, pid 1)",
        "group a (driver: node, pid 2)",
        "group a (driver: node, pid 2) #2",
        "group b",
    ]


def test_ranks_that_do_not_answer_are_read_in_turn(monkeypatch):
    """A look has time for two of eight, and may read the first again when the last have not been read yet."""
    clock = [100.0]

    def read(pid, file):
        clock[0] += 0.6
        return f"stack of {pid}"

    monkeypatch.setattr(group_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(group_watch, "frames_of", read)
    watch = object.__new__(GroupWatch)
    watch._dumps, watch._tasks, watch._node, watch._here = {}, {}, "node", "host"
    addresses = {n: WireAddress("10.0.0.1", 1, b"", 100 + n) for n in range(8)}
    place = SimpleNamespace(location=SimpleNamespace(node_id="node", hostname="host"))
    for _ in range(4):
        shown = watch._dumped(SimpleNamespace(ranks=[place] * 8), list(addresses), addresses)
        clock[0] += 1.0
    assert shown == {n: f"stack of {100 + n}" for n in addresses}


def test_host_that_answers_late_is_told_and_its_stack_is_shown(monkeypatch):
    """It may take minutes: py-spy tries for 20 s to stop each of the ranks."""
    clock, asked, ended = [100.0], [], []

    def ask(record, where, native):
        asked.extend(where)
        return {f"task {len(asked)}": list(where)} if where else {}

    def get(task, timeout):
        if task not in ended:
            raise GetTimeoutError
        return ["its stack"]

    monkeypatch.setattr(group_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(group_watch.inspect_groups, "dump_tasks", ask)
    monkeypatch.setattr(group_watch.ray, "wait", lambda tasks, timeout: ([one for one in tasks if one in ended], []))
    monkeypatch.setattr(group_watch.ray, "get", get)
    watch = object.__new__(GroupWatch)
    watch._dumps, watch._tasks, watch._node, watch._here = {}, {}, "node", "host"
    record = SimpleNamespace(ranks=[SimpleNamespace(location=SimpleNamespace(node_id="other", hostname="other"))])
    told = []
    for _ in range(4):
        told += watch._dumped(record, [0], {0: WireAddress("10.0.0.2", 1, b"", 7)}).values()
        clock[0] += 50.0
        if len(told) == 3:
            ended.append("task 1")
    assert "is being asked" in told[0] and "did not respond within 45 s" in told[1] == told[2]
    assert told[3] == "its stack" and asked == [0]


class TestProblems:
    def look(self, *ranks, stacks, state="open"):
        status = GroupStatus("group a", state, "why" if state == "broken" else "", 0, ranks)
        return GroupLook(status, waits(ranks, stacks), stacks)

    def test_late_only_after_the_limit_and_only_if_others_wait(self):
        stacks = {0: within("all_reduce"), 1: at(30, "load")}
        look = self.look(rank(0, "train"), rank(1, "train"), stacks=stacks)
        assert look.problems(late=11) == []
        (problem,) = look.problems(late=9)
        assert (
            problem == "rank 1 of group a is late: train() for 10.0 s, at trainer.py:30, in load; rank 0 waits for it"
        )
        alone = self.look(rank(0), rank(1, "train"), stacks={1: at(30)})
        assert alone.problems(late=1) == [] and len(alone.problems(late=1, no_progress=9)) == 1

    def test_a_rank_that_has_left_the_call_is_late_too(self):
        look = self.look(rank(0, "train"), rank(1), stacks={0: within("all_reduce")})
        assert look.problems(late=11) == []
        assert look.problems(late=9) == ["rank 1 of group a is late: idle; rank 0 waits for it"]

    def test_dead_silent_and_broken(self):
        look = self.look(rank(0, alive=False), rank(1, answers=False), stacks={}, state="broken")
        first, second, third = look.problems()
        assert "is broken: why" in first and "rank 0 of group a is dead: killed" in second and "rank 1" in third

    def test_json_is_plain(self):
        look = self.look(rank(0, "train"), rank(1, alive=False), stacks={0: within("all_reduce")})
        found = look.as_json()["ranks"]
        assert (
            found[0]["waits_for"] == [1] and found[1]["awaited_by"] == [0] and found[1]["death"]["reason"] == "killed"
        )
        assert found[0]["running"] == [{"method": "train", "seconds": 10.0, "waits": ""}]
