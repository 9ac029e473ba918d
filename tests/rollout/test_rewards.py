"""RewardRunner: rewards of groups, in the event loop, in processes that are killed, and in the caller's thread."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import ray
from waits import wait_gone, wait_until

from workers import RewardError, RewardRunner, Sample
from workers.rollout.rewards import reward_processes, reward_runner


def group(prompt, count, tokens=2):
    return [Sample(prompt, sample, [prompt], [sample] * tokens) for sample in range(count)]


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


async def waiting(prompt_ids, completion_ids):
    await asyncio.sleep(60)


def plain(prompt_ids, completion_ids, weight=1):
    return weight * (10 * prompt_ids[0] + completion_ids[0])


async def asynchronous(prompt_ids, completion_ids, weight=1):
    await asyncio.sleep(0)
    return plain(prompt_ids, completion_ids, weight)


@pytest.mark.parametrize("function", [plain, asynchronous], ids=["plain", "async"])
def test_groups_are_rewarded_as_they_are_submitted(function):
    with RewardRunner(function) as runner:
        first = runner.submit(group(1, 3), {"weight": {1: 2}})
        second = runner.submit(group(2, 2), {"weight": {2: 1}})
        assert first.result(20) == [20, 22, 24] and second.result(20) == [20, 21]
        assert runner.submit([]).result(20) == [] == runner.compute([])
        samples = [*group(0, 2), *group(1, 2)]
        assert runner.compute(samples, {"weight": [1, 5]}) == [0, 1, 50, 55]
    with pytest.raises(RewardError, match="closed"):
        runner.submit(group(1, 3))
    with pytest.raises(RewardError, match="closed"):
        runner.compute(group(1, 3))


def test_limit_in_flight_holds_over_all_groups():
    running, seen = 0, []

    async def judge(prompt_ids, completion_ids):
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    with RewardRunner(judge, concurrency=3) as runner:
        futures = [runner.submit(group(prompt, 2)) for prompt in range(6)]
        assert [future.result(20) for future in futures] == [[1.0, 1.0]] * 6
    assert max(seen) == 3 and len(seen) == 12


def test_error_of_a_group_names_its_row_and_leaves_other_groups():
    async def judge(prompt_ids, completion_ids):
        await asyncio.sleep(0.01)
        return 1 / (prompt_ids[0] - 2)

    with RewardRunner(judge) as runner:
        futures = [runner.submit(group(prompt, 2), first_row=2 * prompt) for prompt in (1, 2, 3)]
        with pytest.raises(RewardError, match=r"ZeroDivisionError.* for row 4: prompt 2, sample 0"):
            futures[1].result(20)
        assert futures[0].result(20) == [-1, -1] and futures[2].result(20) == [1, 1]
    for value in ([], 3, None):
        what = f"returned {re.escape(str(value))} for 2 samples of prompt 7; expected one number each"
        with RewardRunner(lambda prompts, completions, value=value: value, batched=True) as runner:
            with pytest.raises(RewardError, match=what) as caught:
                runner.submit(group(7, 2)).result(20)
            assert (caught.value.row, caught.value.prompt, caught.value.sample) == (None, 7, None)


@pytest.mark.parametrize("ignores", [False, True])
def test_async_call_that_exceeds_its_time(ignores):
    cancelled = []

    async def judge(prompt_ids, completion_ids):
        if completion_ids[0] == 1:
            while True:
                try:
                    await asyncio.sleep(20)
                except asyncio.CancelledError:
                    cancelled.append(prompt_ids[0])
                    if not ignores or len(cancelled) > 1:
                        raise
        return 1.0

    with RewardRunner(judge, timeout=0.1) as runner:
        begun = time.monotonic()
        with pytest.raises(RewardError, match=r"exceeded reward_timeout=0.1 s for row 1: prompt 7, sample 1") as caught:
            runner.compute(group(7, 3))
        assert (caught.value.row, caught.value.prompt, caught.value.sample) == (1, 7, 1)
        assert time.monotonic() - begun < 10
        wait_until(lambda: cancelled)
    cancelled.clear()
    with RewardRunner(judge, timeout=0.1, on_timeout=-0.5) as runner:
        assert runner.compute(group(7, 3)) == [1.0, -0.5, 1.0]
        found = runner.metrics()
        assert found["rewards/timeouts"] == 1 and 0.1 <= found["rewards/slowest_seconds"] < 10
        assert runner.metrics() == {"rewards/timeouts": 0, "rewards/slowest_seconds": 0}


def test_timeout_error_of_the_function_itself_is_no_timeout():
    async def judge(prompt_ids, completion_ids):
        raise TimeoutError("the judge's server")

    with RewardRunner(judge, timeout=20, on_timeout=0.0) as runner:
        with pytest.raises(RewardError, match="raised TimeoutError: the judge's server for row 0"):
            runner.compute(group(0, 1))


def test_timeout_of_a_batched_call_counts_for_all_its_samples():
    async def judge(prompts, completions):
        await asyncio.sleep(20 if prompts[0] == [1] else 0)
        return [1.0] * len(prompts)

    with RewardRunner(judge, batched=True, timeout=0.1, on_timeout=0) as runner:
        futures = [runner.submit(group(prompt, 3)) for prompt in (0, 1)]
        assert [future.result(20) for future in futures] == [[1.0] * 3, [0.0] * 3]
        assert runner.metrics()["rewards/timeouts"] == 3


def test_invalid_options():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"reward_workers=1: .* cannot be pickled"):
        RewardRunner(lambda prompt, completion: lock.locked(), workers=1)
    for options, message in (
        ({"workers": 0}, "reward_workers=0"),
        ({"workers": True}, "reward_workers=True"),
        ({"timeout": 0}, "reward_timeout=0"),
        ({"timeout": float("nan")}, "reward_timeout=nan"),
        ({"on_timeout": "zero"}, "on_reward_timeout='zero': expected a finite number"),
        ({"on_timeout": float("inf")}, "on_reward_timeout=inf"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardRunner(asynchronous, **options)


# --- threads -------------------------------------------------------------------------------------------------------


def test_plain_function_runs_in_the_callers_thread_or_in_one_of_its_own():
    """So that a function that uses signals works in a plain script, and a loop that submits does not wait."""
    seen = []

    def reward(prompt_ids, completion_ids):
        seen.append(threading.current_thread())
        return 0.0

    with RewardRunner(reward) as runner:
        runner.compute(group(0, 2))
        assert seen == [threading.main_thread()] * 2
        held = threading.Event()
        runner.function = lambda prompt, completion: held.wait(20)
        future = runner.submit(group(0, 1))
        assert not future.done()
        held.set()
        assert future.result(20) == [1.0]
        wait_until(lambda: not threads("rewards-plain"))


def test_function_that_turns_out_to_be_async_is_submitted_too():
    runner = RewardRunner(lambda prompt, completion: asynchronous(prompt, completion))
    with runner:
        futures = [runner.submit(group(prompt, 2)) for prompt in (1, 2)]
        assert [future.result(20) for future in futures] == [[10, 11], [20, 21]]


def test_rewards_are_computed_after_a_thread_could_not_be_started(monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    with RewardRunner(asynchronous) as runner:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
            patch.setattr(threading.Thread, "start", fail)
            runner.submit(group(1, 2))
        assert runner.submit(group(1, 2)).result(20) == [10, 11]


def test_threads_end_with_close_and_when_the_runner_is_collected():
    before = threads("rewards")
    runner = RewardRunner(asynchronous)
    runner.compute(group(1, 1))
    (thread,) = set(threads("rewards")) - set(before)
    pending = RewardRunner(waiting)
    futures = [pending.submit(group(1, 2)) for _ in range(2)]
    pending.close()
    assert all(future.cancelled() for future in futures)
    pending.close()
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    wait_until(lambda: gone() is None and not thread.is_alive())
    assert not set(threads("rewards")) - set(before)


def test_a_runner_is_closed_again_while_its_thread_ends(monkeypatch):
    serve, loop_closed, end = reward_runner._serve, threading.Event(), threading.Event()

    def end_late(loop):
        serve(loop)
        loop_closed.set()
        end.wait(20)

    monkeypatch.setattr(reward_runner, "_serve", end_late)
    monkeypatch.setattr(reward_runner, "CLOSE_SECONDS", 0.1)
    runner = RewardRunner(asynchronous)
    runner.compute(group(1, 1))
    runner.close()
    assert loop_closed.wait(20)
    runner.close()
    end.set()
    runner._thread.join(20)


def test_close_ends_a_computation_of_another_thread():
    runner, errors = RewardRunner(waiting), []

    def compute():
        with pytest.raises(RewardError, match="was closed") as caught:
            runner.compute(group(1, 2))
        errors.append(caught.value)

    thread = threading.Thread(target=compute)
    thread.start()
    wait_until(lambda: threads("rewards"))
    time.sleep(0.05)
    runner.close()
    thread.join(20)
    assert len(errors) == 1


def test_close_ends_the_thread_also_if_a_call_ignores_that_it_is_cancelled(monkeypatch):
    async def ignores(prompt_ids, completion_ids):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                begun.set()
                await asyncio.sleep(60)

    monkeypatch.setattr("workers.rollout.rewards.reward_runner.CLOSE_SECONDS", 1.0)
    begun, runner = threading.Event(), RewardRunner(ignores)
    future = runner.submit(group(1, 1))
    assert begun.wait(20)
    runner.close()
    assert not runner._thread.is_alive() and future.cancelled()


def test_exit_in_an_async_function_reaches_the_caller_and_the_runner_goes_on():
    async def judge(prompt_ids, completion_ids):
        if prompt_ids == [1]:
            sys.exit(3)
        return 1.0

    with RewardRunner(judge) as runner:
        with pytest.raises(SystemExit):
            runner.compute(group(1, 2))
        assert runner.compute(group(2, 2)) == [1.0, 1.0]


@pytest.fixture
def interrupt_when():
    """``interrupt_when(condition)`` presses Ctrl-C when the condition holds."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell of the tests has set
    yield _interrupt_when
    signal.signal(signal.SIGINT, before)


def _interrupt_when(condition):

    def press():
        wait_until(condition)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def test_ctrl_c_cancels_an_async_function(interrupt_when):
    started, cancelled = [], []

    async def judge(prompt_ids, completion_ids):
        started.append(None)
        try:
            await asyncio.sleep(0 if len(started) > 4 else 60)
        except asyncio.CancelledError:
            cancelled.append(None)
            raise
        return 1.0

    with RewardRunner(judge) as runner:
        interrupt_when(lambda: len(started) == 4)
        with pytest.raises(KeyboardInterrupt):
            runner.compute([*group(0, 2), *group(1, 2)])
        wait_until(lambda: len(cancelled) == 4)
        assert runner.compute(group(0, 1)) == [1.0]


@pytest.mark.parametrize("kind", ["blocks its loop", "plain in the queue"])
def test_function_that_ctrl_c_cannot_end_is_not_called_again_before_it_returns(kind, interrupt_when):
    inside, calls = [], []

    def reward(prompt_ids, completion_ids):
        assert not inside, "called while it runs"
        inside.append(None)
        calls.append(None)
        time.sleep(0.5 if len(calls) == 1 else 0)
        inside.pop()
        return 1.0

    async def blocking(prompt_ids, completion_ids):
        return reward(prompt_ids, completion_ids)

    with RewardRunner(reward if "plain" in kind else blocking) as runner:
        interrupt_when(lambda: calls)
        with pytest.raises(KeyboardInterrupt):
            if "plain" in kind:
                runner.submit(group(0, 1)).result(20)
            else:
                runner.compute(group(0, 3))
        assert inside
        assert runner.compute(group(1, 1)) == [1.0]


def test_ctrl_c_interrupts_a_plain_function(interrupt_when):
    started = []

    def reward(prompt_ids, completion_ids):
        started.append(None)
        time.sleep(0 if len(started) > 1 else 60)
        return 1.0

    runner = RewardRunner(reward)
    interrupt_when(lambda: started)
    with pytest.raises(KeyboardInterrupt):
        runner.compute(group(0, 2))
    assert runner.compute(group(0, 2)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "done", "slowest"),
    [("plain", 3, "row 3: prompt 1, sample 0, a completion of 7"), ("blocking", "[0-4]", "row"), ("async", 4, "row 3")],
)
def test_progress_is_logged(kind, done, slowest, caplog, monkeypatch):
    """Whichever thread the function blocks."""
    monkeypatch.setattr("workers.rollout.rewards.reward_progress.LOG_SECONDS", 0.1)
    logged = rf"running for 0 s, for 5 completions: {done} are done; the slowest has been running for 0 s, {slowest}"

    def plain(prompt_ids, completion_ids):
        end = time.monotonic() + 10
        while len(completion_ids) == 7 and time.monotonic() < end and not re.search(logged, caplog.text):
            time.sleep(0.01)
        return 1.0

    async def blocking(prompt_ids, completion_ids):
        return plain(prompt_ids, completion_ids)

    async def judge(prompt_ids, completion_ids):
        return await asyncio.to_thread(plain, prompt_ids, completion_ids)

    before = threads("rewards-log")  # of tests whose functions hang
    with RewardRunner({"plain": plain, "blocking": blocking, "async": judge}[kind]) as runner:
        runner.compute([*group(0, 3), *group(1, 1, tokens=7), *group(2, 1)])
    assert re.search(logged, caplog.text)
    wait_until(lambda: not set(threads("rewards-log")) - set(before))


# --- processes -----------------------------------------------------------------------------------------------------


def test_processes_run_closures_in_parallel_and_are_kept(ray_cluster):
    offset = 0.5

    def reward(prompt_ids, completion_ids, weight):
        time.sleep(0.05)
        assert threading.current_thread() is threading.main_thread()
        return offset + weight + os.getpid()

    with RewardRunner(reward, workers=2) as runner:
        first = runner.compute([*group(0, 4), *group(1, 4)], {"weight": [0, 10_000_000]})
        pids = {int(value) % 10_000_000 for value in first}
        assert len(pids) == 2 and os.getpid() not in pids
        assert [value >= 10_000_000 for value in first] == [False] * 4 + [True] * 4
        again = [runner.submit(group(1, 2), {"weight": {1: 0}}) for _ in range(4)]
        assert {int(value) for future in again for value in future.result(60)} <= pids
    wait_gone(pids)


def test_process_that_has_died_while_it_was_idle_is_replaced(ray_cluster):
    with RewardRunner(lambda prompt_ids, completion_ids: float(os.getpid()), workers=1) as runner:
        first, _ = runner.compute(group(0, 2), {})
        os.kill(int(first), signal.SIGKILL)
        wait_gone([int(first)])
        again = runner.compute(group(0, 2), {})
    assert again[0] == again[1] != first


def test_processes_of_a_connection_that_has_ended_are_left_alone(ray_cluster, monkeypatch):
    """To kill one after `ray.shutdown`, Ray would start another cluster."""
    runner = RewardRunner(lambda prompt_ids, completion_ids: 1.0, workers=1)
    assert runner.compute(group(0, 1)) == [1.0]
    (process,) = runner._processes._idle
    with monkeypatch.context() as patched:
        patched.setattr(reward_processes, "session", lambda: None)
        runner.close()
    assert not runner._thread.is_alive()
    ray.get(process.ready.remote(), timeout=30)
    ray.kill(process)


def hangs_or_dies(prompt_ids, completion_ids, folder):
    """A sample of prompt 1 holds the interpreter's lock for hours; one of prompt 2 kills its process; 3 exits."""
    if completion_ids[0] == 1:
        with open(os.path.join(folder, str(prompt_ids[0])), "w") as file:
            file.write(str(os.getpid()))
        if prompt_ids[0] == 1:
            re.match(r"(a+)+$", "a" * 60 + "b")
        if prompt_ids[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt_ids[0] == 3:
            sys.exit(4)
        if prompt_ids[0] == 4:
            raise LookupError("no such answer")
    return 1.0


def test_process_that_hangs_is_killed_and_one_that_dies_is_named(ray_cluster, tmp_path):
    extras = {"folder": [str(tmp_path)] * 5}
    with RewardRunner(hangs_or_dies, workers=2, timeout=0.6, on_timeout=-1.0) as runner:
        assert runner.compute(group(1, 4), extras) == [1.0, -1.0, 1.0, 1.0]
        assert runner.metrics()["rewards/timeouts"] == 1
        wait_gone([(tmp_path / "1").read_text()])
        assert runner.compute(group(0, 3), extras) == [1.0] * 3
    with RewardRunner(hangs_or_dies, workers=2) as runner:
        for prompt, what in (
            (2, "lost its process"),
            (3, "lost its process"),
            (4, "raised LookupError: no such answer"),
        ):
            with pytest.raises(RewardError, match=f"{what} for row 1: prompt {prompt}, sample 1") as caught:
                runner.compute(group(prompt, 3), extras)
        assert isinstance(caught.value.__cause__, LookupError)
        assert "in hangs_or_dies" in "".join(caught.value.__cause__.__notes__)  # the traceback in the process
        assert runner.compute(group(0, 3), extras) == [1.0] * 3
    with RewardRunner(hangs_or_dies, workers=1, timeout=0.6) as runner:
        with pytest.raises(RewardError, match=r"exceeded reward_timeout=0.6 s for row 1: prompt 1, sample 1"):
            runner.compute(group(1, 2), extras)


def test_ctrl_c_kills_the_processes_that_are_busy(ray_cluster, tmp_path, interrupt_when):
    with RewardRunner(hangs_or_dies, workers=1) as runner:
        interrupt_when(lambda: (tmp_path / "1").exists() and (tmp_path / "1").read_text())
        with pytest.raises(KeyboardInterrupt):
            runner.compute(group(1, 2), {"folder": [str(tmp_path)] * 2})
        wait_gone([(tmp_path / "1").read_text()])
        assert runner.compute(group(0, 1), {"folder": [str(tmp_path)]}) == [1.0]


def test_process_that_cannot_start_says_why(ray_cluster, tmp_path, monkeypatch):
    (tmp_path / "reward_of_the_driver.py").write_text("def reward(prompt_ids, completion_ids): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import reward_of_the_driver

    with RewardRunner(reward_of_the_driver.reward, workers=1) as runner:
        with pytest.raises(RewardError, match=r"(?s)cannot start.*No module named 'reward_of_the_driver'"):
            runner.compute(group(0, 1))


def test_copy_in_another_process_has_its_own_processes(ray_cluster):
    def reward(prompt_ids, completion_ids):
        return float(os.getpid())

    with RewardRunner(reward, workers=1) as runner:

        @ray.remote(num_cpus=0)
        def pids(copy):
            with copy:
                return copy.compute(group(0, 1))[0], os.getpid()

        (theirs, process), (ours,) = ray.get(pids.remote(runner)), runner.compute(group(0, 1))
        assert len({theirs, process, ours, os.getpid()}) == 4


DRIVER = """
    import os, signal, sys, threading, time
    from workers import RewardRunner, Sample

    def reward(prompt_ids, completion_ids):  # a function of the script, which has no `if __name__ == "__main__"`
        open(FILE, "w").write(str(os.getpid()))
        time.sleep(60)

    FILE = sys.argv[1]
    print("script runs", flush=True)
    runner = RewardRunner(reward, workers=1)
    future = runner.submit([Sample(0, 0, [1], [1])])
    while not (os.path.exists(FILE) and open(FILE).read()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(90)
def test_processes_end_with_a_killed_driver(other_drivers, tmp_path):
    script, noted = tmp_path / "driver.py", tmp_path / "pid"
    script.write_text(textwrap.dedent(DRIVER))
    environment = {**os.environ, **other_drivers}
    done = subprocess.run(
        [sys.executable, str(script), str(noted)], capture_output=True, text=True, timeout=80, env=environment
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.count("script runs") == 1
    wait_gone([noted.read_text()])


def test_number_that_is_no_float_names_its_row():
    with RewardRunner(lambda prompt_ids, completion_ids: 10**5000) as runner:
        with pytest.raises(RewardError, match=r"for row 0: prompt 1, sample 0.*expected a finite number"):
            runner.compute(group(1, 1))
