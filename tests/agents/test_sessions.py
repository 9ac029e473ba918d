"""Sessions on a toy engine: the contract of all engines, budgets, errors, hanging tools, abort, states, and many."""

import asyncio
import pickle
import threading
import time
from dataclasses import replace

import pytest
import torch
from engine_contract import EngineContract, Subject
from rollout_helpers import Bigram, BigramEngine
from waits import wait_until

from workers.rollout.agents import session as session_file
from workers.rollout.agents.agent_engine import AgentEngine
from workers.rollout.agents.environment import Environment, SessionLimits, Step
from workers.rollout.engines.rollout_engine import Completion, EngineLoad, SamplingParams
from workers.rollout.rollout_errors import RolloutError

SECONDS = 20


class OneTurn(Environment):
    async def step(self, action):
        return Step(done=True)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class OfTurns(AgentEngine):
    def load(self):
        """A session runs as soon as it is begun; the contract waits for the engine's requests."""
        inner = self.engine.load()
        return replace(inner, waiting=len(self._sessions) - inner.running)


@pytest.fixture(scope="module")
def subject():
    engine = OfTurns(BigramEngine, delay=0.001, environment=OneTurn)
    yield Subject(engine, model_of=Bigram, distributions=Bigram.distributions, positions=BigramEngine.max_positions)
    engine.close()


class TestContract(EngineContract):
    long = 100


class Counting(Environment):
    """Answers each turn with the number of the turn, as a token, and ends after ``row["turns"]``."""

    def __init__(self):
        self.turn = 0

    async def reset(self, row):
        self.turns = row["turns"]
        return [20]

    async def step(self, action):
        self.turn += 1
        done = self.turn == self.turns
        return Step([20 + self.turn % 8], reward=float(self.turn), done=done, info={"last": action.token_ids[-1]})

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


class Forgetful(Counting):
    def state_dict(self):
        return None


@pytest.fixture
def make():
    made = []

    def make(environment=Counting, *, delay=0.0, **options):
        made.append(AgentEngine(BigramEngine, delay=delay, environment=environment, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def submit(engine, name="a", length=4, *, turns=3, **options):
    return engine.submit([1, 2], SamplingParams(length), name, seed=5, extras={"turns": turns}, **options)


def play(engine, **options):
    return submit(engine, **options).result(SECONDS)


def check(completion, versions=(0,)):
    """Each token that counts was sampled: it has the log-probability of its version's weights, behind all tokens before
    it. Those that do not count say nothing."""
    prompt, ids = [1, 2], completion.token_ids
    expected = {version: Bigram(version).log_probs(prompt, ids) for version in {*completion.weight_versions} - {-1}}
    for place, mask in enumerate(completion.loss_mask):
        version = completion.weight_versions[place]
        if mask:
            assert abs(completion.log_probs[place] - float(expected[version][place])) <= 1e-5
            assert version in versions
        else:
            assert (completion.log_probs[place], version) == (0.0, -1)


def aborted(engine, steps=50):
    """A session as it was when it was aborted."""
    future = submit(engine, length=40)
    wait_until(lambda: engine.engine.steps >= steps)
    engine.abort()
    return future.result(SECONDS)


# --- the tokens of a session ----------------------------------------------------------------------------------------


def test_session_is_the_path_of_its_turns_and_observations(make):
    completion = play(make())
    check(completion)
    assert completion.loss_mask == [0] + 4 * [1] + [0] + 4 * [1] + [0] + 4 * [1]
    assert [completion.token_ids[place] for place in (0, 5, 10)] == [20, 21, 22]
    assert completion.finish_reason == "length"  # the last turn was cut off
    assert completion.info == {
        "last": completion.token_ids[-1],
        "reward": 6.0,
        "turn_rewards": [1.0, 2.0, 3.0],
        "turns": 3,
        "end_reason": "length",
        "rerenders": 0,
        "restarts": 0,
    }
    assert completion.rows is None and completion.token_rewards is None


def test_generate_plays_a_session_per_prompt(make):
    rows = {"turns": [1, 2, 3]}
    first, *others = make().generate([[1, 2]] * 3, SamplingParams(4), [5, 5, 5], extras=rows)
    assert [one.info["turns"] for one in (first, *others)] == [1, 2, 3]
    for other in others:  # the same seed, so the same first turn
        assert other.token_ids[:5] == first.token_ids


def test_session_runs_after_a_thread_could_not_be_started(make, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    engine = make()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", fail)
        submit(engine)
    assert play(engine).info["turns"] == 3  # its request id is free


def test_turns_draw_different_tokens(make):
    ids = play(make(), length=12).token_ids
    assert ids[1:13] != ids[14:26]


def test_rewards_of_turns_become_token_rewards(make):
    completion = play(make(turn_discount=0.5))
    earned = [sum(completion.token_rewards[place:]) for place in (1, 6, 11)]
    assert earned == [1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3.0]


def test_update_in_the_middle_of_a_turn_gives_tokens_of_two_versions(make):
    engine = make(delay=0.005)
    future = submit(engine, length=40)
    wait_until(lambda: engine.engine.steps > 60)
    engine.begin_update()
    engine.load_weights(Bigram(1).state_dict().items())
    engine.finish_update(1)
    completion = future.result(SECONDS)
    check(completion, (0, 1))
    versions = completion.weight_versions
    assert {*versions[42:82]} == {0, 1} and {*versions[1:41]} == {0}  # the second turn has both
    assert sorted(version for version in versions if version >= 0) == [version for version in versions if version >= 0]


# --- how a session ends ---------------------------------------------------------------------------------------------


class Invalid(Environment):
    def __init__(self):
        self.turn = 0

    async def step(self, action):
        self.turn += 1
        return Step([3], invalid=self.turn != 2)


class Sleepy(Environment):
    """Takes long in one method. Notes whether it was cancelled there, and closed."""

    reached, cancelled, closed = [], [], []

    def __init__(self, where="step", how="async"):
        self.where, self.how = where, how

    async def _maybe(self, here):
        if self.where != here:
            return
        self.reached.append(here)
        try:
            if self.how == "thread":
                await asyncio.to_thread(time.sleep, 1.5)
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.cancelled.append(here)
            if self.how == "stubborn":
                await asyncio.sleep(1.0)
            raise

    async def reset(self, row):
        await self._maybe("reset")

    async def step(self, action):
        await self._maybe("step")
        return Step([3])

    async def close(self):
        await self._maybe("close")
        self.closed.append(self.where)


def sleepy(*args):
    Sleepy.reached, Sleepy.cancelled, Sleepy.closed = [], [], []
    return lambda: Sleepy(*args)


@pytest.mark.parametrize(
    ("environment", "limits", "reason", "turns", "tokens"),
    [
        (Counting, {"turns": 5}, "turns", 5, 25),
        (Counting, {"tokens": 12}, "tokens", 3, 12),
        (Counting, {"tokens": 11}, "tokens", 2, 10),  # no room behind the observation: it is left out
        (Counting, {"turns": None}, "tokens", 102, 510),  # the engine's positions
        (Invalid, {"invalid": 1}, "invalid", 1, 4),
        (Invalid, {"invalid": 2}, "invalid", 4, 19),  # the second turn was valid
        (sleepy(), {"silence": 0.1}, "silence", 1, 4),
        (sleepy("reset"), {"silence": 0.1}, "silence", 0, 0),
        (sleepy("step", "stubborn"), {"silence": 0.1}, "silence", 1, 4),
        (sleepy("step", "thread"), {"silence": 0.1}, "silence", 1, 4),
        (sleepy(), {"seconds": 0.2, "silence": None}, "seconds", 1, 4),
        (sleepy("close"), {"silence": 0.1, "turns": 2}, "turns", 2, 9),
    ],
)
def test_each_budget_has_its_reason(make, monkeypatch, environment, limits, reason, turns, tokens):
    monkeypatch.setattr(session_file, "CANCEL_SECONDS", 0.2)
    engine = make(environment, limits=SessionLimits(**limits))
    completion = play(engine, turns=10_000)
    assert (completion.info["end_reason"], completion.info["turns"]) == (reason, turns)
    assert len(completion.token_ids) == tokens
    finish = {"turns": "length", "tokens": "length", "seconds": "length", "silence": "error"}
    assert completion.finish_reason == finish.get(reason, "stop")
    wait_until(lambda: not engine._tasks)


def test_time_of_a_session_ends_a_turn_and_keeps_its_tokens(make):
    completion = play(make(delay=0.01, limits=SessionLimits(seconds=0.3)), length=400)
    assert (completion.info["end_reason"], completion.info["turns"]) == ("seconds", 0)
    assert 5 < sum(completion.loss_mask) < 100
    check(completion)


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"tokens": 1.5}, {"silence": -1}, {"seconds": True}])
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match=f"SessionLimits: {next(iter(wrong))}="):
        SessionLimits(**wrong)


class Raising(Counting):
    def __init__(self, where):
        super().__init__()
        if where == "init":
            raise KeyError("init")
        self.where = where

    async def reset(self, row):
        if self.where == "reset":
            raise KeyError("reset")
        return await super().reset(row)

    async def step(self, action):
        if self.where == "step" and self.turn == 1:
            raise KeyError("step")
        if self.where == "tokens" and self.turn == 1:
            return Step([1000])
        if self.where == "reward" and self.turn == 1:
            return Step(reward="much")
        return await super().step(action)

    async def close(self):
        if self.where == "close":
            raise KeyError("close")


@pytest.mark.parametrize(
    ("where", "turns"), [("init", 0), ("reset", 0), ("step", 2), ("tokens", 2), ("reward", 2), ("close", 3)]
)
def test_exception_ends_its_session_only(make, caplog, where, turns):
    kinds = iter(["", where])
    engine = make(lambda: Raising(next(kinds)))
    second, first = engine.generate([[1, 2]] * 2, SamplingParams(4), [5, 5], extras={"turns": [3, 3]})
    assert second.info["end_reason"] == "length" and second.info["turns"] == 3
    assert first.info["turns"] == turns
    if where != "close":
        assert first.info["end_reason"] == "error" and first.finish_reason == "error"
        assert first.info["reward"] == (1.0 if turns else 0.0)
        assert first.info["error"].split(":")[0] in ("KeyError", "PromptError", "ValueError")
        assert any("session generate-" in record.message for record in caplog.records)


def test_what_is_wrong_with_the_program_is_raised(make):
    class Plain(Counting):
        def step(self, action):
            return Step()

    class Messages(Counting):
        async def step(self, action):
            return Step([{"role": "user", "content": "hi"}])

    for environment, what in ((Plain, "must be an `async def`"), (Messages, "pass a renderer")):
        with pytest.raises(RolloutError, match=what):
            play(make(environment))
    with pytest.raises(TypeError, match="environment='x'"):
        make("x")
    with pytest.raises(TypeError, match="is no RequestEngine"):
        AgentEngine(lambda: 3, environment=Counting)


def test_error_of_the_engine_fails_its_sessions(make):
    engine = make()
    engine.engine.drawn = None
    with pytest.raises(RolloutError, match="the engine failed"):
        play(engine)


# --- abort, and states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "reset"])
def test_abort_cancels_a_call_of_the_environment(make, where):
    engine = make(sleepy(where))
    future = submit(engine)
    wait_until(lambda: engine.engine.steps == 4 or where == "reset")
    time.sleep(0.05)
    engine.abort(["a", "unknown"])
    completion = future.result(SECONDS)
    assert completion.finish_reason == "abort" and len(completion.token_ids) == (4 if where == "step" else 0)
    wait_until(lambda: Sleepy.closed == [where])
    assert Sleepy.cancelled == [where] and engine.load() == EngineLoad(0, 0)


@pytest.mark.parametrize("moment", [3, 30, 50, 70, 100])
def test_session_that_was_aborted_in_a_turn_continues_elsewhere(make, moment):
    whole = play(make(), length=40)
    partial = pickle.loads(pickle.dumps(aborted(make(delay=0.002), moment)))
    assert partial.finish_reason == "abort" and partial.session is not None
    count = len(partial.token_ids)
    assert moment <= count < len(whole.token_ids) and partial.token_ids == whole.token_ids[:count]
    other = make()
    again = play(other, length=40, partial=partial)
    assert again.token_ids == whole.token_ids and again.info == whole.info and again.loss_mask == whole.loss_mask
    left = sum(whole.loss_mask) - sum(partial.loss_mask)
    wait_until(lambda: other.engine.steps >= left)  # it counts a step behind the completion
    assert other.engine.steps == left  # nothing was sampled twice
    check(again)


def test_turn_that_somebody_else_aborts_goes_on(make):
    """As the request of an `HTTPEngine`, at the server."""
    whole = play(make(), length=40)
    engine = make(delay=0.002)
    future = submit(engine, length=40)
    wait_until(lambda: engine.engine.steps >= 50)
    engine.engine.abort()
    assert future.result(SECONDS) == whole


class Once(Counting):
    """Its second step takes long, in the first process."""

    slow = True

    async def step(self, action):
        if self.turn == 1 and type(self).slow:
            self.turn = 77  # what a step that was cancelled has done does not count
            await asyncio.sleep(1000)
        return await super().step(action)


def test_step_that_was_cancelled_is_repeated_from_the_state_before(make):
    Once.slow = False
    whole = play(make(Once))
    Once.slow = True
    engine = make(Once)
    future = submit(engine)
    wait_until(lambda: engine.engine.steps == 8)
    time.sleep(0.05)
    engine.abort()
    partial = future.result(SECONDS)
    assert partial.token_ids == whole.token_ids[:10]
    Once.slow = False
    other = make(Once)
    assert play(other, partial=partial) == whole
    wait_until(lambda: other.engine.steps == 4)


def test_session_without_a_state_begins_again_and_says_so(make):
    again = play(make(Forgetful), length=40, partial=aborted(make(Forgetful, delay=0.002)))
    whole = play(make(Forgetful), length=40)
    assert again.token_ids == whole.token_ids
    assert again.info == {**whole.info, "restarts": 1}


def test_partial_of_an_engine_without_sessions_is_the_first_turn(make):
    plain = BigramEngine()
    begun = plain.submit([1, 2], SamplingParams(3), "a", seed=0).result(SECONDS)
    completion = play(make(OneTurn), partial=Completion(begun.token_ids, begun.log_probs, "abort", [0] * 3))
    assert completion.token_ids[:3] == begun.token_ids and len(completion.token_ids) == 4
    plain.close()


def test_states_of_running_sessions_are_told_in_steps(make):
    """As a driver keeps them: it gets what it does not have, and at any moment can continue from what it has."""
    engine = make(delay=0.01)
    future = submit(engine, length=10, turns=6)
    held, seen = {}, []
    while not future.done():
        known = {name: (state.number, len(state.nodes)) for name, state in held.items()}
        for name, state in engine.progress(known).items():
            assert state.base == known.get(name, (0, 0))[1]
            held[name] = pickle.loads(pickle.dumps(state)).onto(held.get(name))
            seen.append(held[name])
        assert engine.progress({"a": (10**6, 0)}) == {}
        time.sleep(0.001)
    whole = future.result()
    assert len(seen) >= 5 and [one.number for one in seen] == sorted({one.number for one in seen})
    for state in seen:
        other = make()
        again = play(other, length=10, turns=6, partial=Completion([], [], "abort", session=state))
        assert again == whole
        wait_until(lambda other=other, state=state: other.engine.steps >= 60 - state.tokens)
        assert other.engine.steps == 60 - state.tokens


# --- the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def in_a_step(make):
    """An engine whose session is in its first step: the engine, the session's future, and what the step waits for."""
    go_on = threading.Event()

    class Gated(Counting):
        async def step(self, action):
            await asyncio.to_thread(go_on.wait)
            return await super().step(action)

    engine = make(Gated)
    whole = submit(engine)
    wait_until(lambda: engine.engine.steps == 4)
    return engine, whole, go_on


def test_turn_waits_while_the_engine_sleeps_or_has_no_weights(in_a_step):
    engine, whole, go_on = in_a_step
    engine.engine._hold("sleep")  # BigramEngine has no sleep of its own
    engine.sleep()
    go_on.set()
    time.sleep(0.2)
    assert not whole.done()
    with pytest.raises(RolloutError, match="asleep"):
        submit(engine, "b")
    engine.engine._release("sleep")
    engine.wake_up()
    check(whole.result(SECONDS))


def test_turn_that_the_engine_refuses_as_it_wakes_up_is_repeated(in_a_step, monkeypatch):
    engine, whole, go_on = in_a_step
    plain, refused = engine.engine.submit, []

    def wakes_up(*args, **options):
        try:
            return plain(*args, **options)
        except RolloutError as error:
            refused.append(error)
            engine.engine._release("sleep")
            engine.wake_up()
            raise

    engine.engine._hold("sleep")
    engine.sleep()
    monkeypatch.setattr(engine.engine, "submit", wakes_up)
    go_on.set()
    check(whole.result(SECONDS))
    assert len(refused) == 1


def test_engine_that_could_not_sleep_fails_its_sessions_as_ever(make, monkeypatch):
    engine = make()

    def sleep():
        raise RolloutError("the server cannot sleep")

    monkeypatch.setattr(engine.engine, "sleep", sleep)
    with pytest.raises(RolloutError, match="cannot sleep"):
        engine.sleep()
    engine.engine.drawn = None
    with pytest.raises(RolloutError, match="the engine failed"):
        play(engine)


def test_a_session_that_waits_with_its_next_turn_is_no_waiting_request(in_a_step):
    """A `RolloutStream` gives a worker no groups as long as some request waits."""
    engine, first, go_on = in_a_step
    engine.engine.pause()
    go_on.set()
    wait_until(lambda: engine.engine.load().waiting == 1)
    assert engine.load() == EngineLoad(1, 0)
    second = submit(engine, "second")
    wait_until(lambda: engine.engine.load().waiting == 2)
    assert engine.load() == EngineLoad(1, 1)
    engine.resume()
    check(first.result(SECONDS))
    check(second.result(SECONDS))


def test_pause_that_waits_lets_sessions_end(make):
    engine = make(delay=0.002)
    first = submit(engine, turns=3)
    paused = threading.Thread(target=engine.pause, args=("wait",))
    wait_until(lambda: engine.engine.steps)
    paused.start()
    wait_until(lambda: engine._draining)
    second = submit(engine, "second")
    third = submit(engine, "third")
    engine.abort(["third"])
    assert third.result(SECONDS).finish_reason == "abort"
    paused.join(SECONDS)
    assert first.done() and not second.done()
    steps = engine.engine.steps
    time.sleep(0.1)
    assert engine.engine.steps == steps
    engine.resume()
    check(second.result(SECONDS))


def test_pause_that_waits_is_refused_while_the_engine_sleeps(in_a_step):
    """Also if it has fallen asleep only then: no session would end."""
    engine, whole, go_on = in_a_step
    asleep = threading.Timer(0.2, engine.engine._hold, ("sleep",))  # BigramEngine has no sleep of its own
    asleep.start()
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"cannot end \(sleep\)"):
            engine.pause("wait")
    engine.engine._release("sleep")
    go_on.set()
    check(whole.result(SECONDS))


def test_pause_keeps_what_a_waiting_session_has_from_elsewhere_and_ends_with_the_engine(make):
    whole = play(make(), length=40)
    engine = make(delay=0.002)
    partial = aborted(engine)
    submit(engine, "long", length=400)
    paused = threading.Thread(target=engine.pause, args=("wait",))
    paused.start()
    wait_until(lambda: engine._draining)
    waiting = submit(engine, length=40, partial=partial)
    engine.abort(["a"])
    again = waiting.result(SECONDS)
    assert (again.finish_reason, again.token_ids) == ("abort", partial.token_ids)
    assert play(make(), length=40, partial=again).token_ids == whole.token_ids
    late = submit(engine, "late")
    engine.close()
    paused.join(SECONDS)
    assert not paused.is_alive()
    with pytest.raises(RolloutError, match="closed"):
        late.result(SECONDS)


def test_pause_that_fails_leaves_its_engine_to_sessions(make, monkeypatch):
    engine, meanwhile = make(), []

    def fail():
        meanwhile.append(submit(engine))
        raise RolloutError("a step has not ended")

    monkeypatch.setattr(engine.engine, "pause", fail)
    with pytest.raises(RolloutError, match="has not ended"):
        engine.pause("wait")
    check(meanwhile[0].result(SECONDS))
    check(play(engine, name="later"))


def test_closed_engine_fails_its_sessions_and_closes_environments():
    engine = AgentEngine(BigramEngine, environment=sleepy())
    future = submit(engine)
    wait_until(lambda: Sleepy.reached)
    engine.close()
    with pytest.raises(RolloutError, match="closed before the session ended"):
        future.result(SECONDS)
    assert Sleepy.closed == ["step"] and Sleepy.cancelled == ["step"]
    assert not engine._thread.is_alive()
    with pytest.raises(RolloutError, match="was closed"):
        submit(engine)
    engine.close()


def test_an_engine_is_closed_again_while_its_thread_ends(make, monkeypatch):
    engine, loop_closed, end = make(), threading.Event(), threading.Event()
    serve = engine._serve

    def end_late(loop):
        serve(loop)
        loop_closed.set()
        end.wait(SECONDS)

    monkeypatch.setattr(engine, "_serve", end_late)
    monkeypatch.setattr("workers.rollout.agents.agent_engine.CLOSE_SECONDS", 0.1)
    check(play(engine))
    engine.close()
    assert loop_closed.wait(SECONDS)
    engine.close()
    end.set()


@pytest.mark.parametrize("ended", [True, False], ids=["after a session", "in a step"])
def test_closing_an_engine_lets_environments_close(ended):
    closed = []

    class Slow(Environment):
        async def step(self, action):
            await asyncio.sleep(0 if ended else 1000)
            return Step(done=True)

        async def close(self):
            closed.append("begun")
            await asyncio.sleep(0.3)
            closed.append("done")

    engine = AgentEngine(BigramEngine, environment=Slow)
    future = submit(engine)
    wait_until(lambda: closed if ended else engine.engine.steps == 4)
    engine.close()
    assert closed == ["begun", "done"] and future.done()


class Busy(Environment):
    """Each of its steps takes 0.5 s, and is busy in them as long as it says."""

    def __init__(self, seconds):
        self.seconds = seconds

    async def step(self, action):
        began = time.monotonic()
        while (passed := time.monotonic() - began) < 0.5:
            self.busy = passed < self.seconds
            await asyncio.sleep(0.01)
        return Step(done=True)


@pytest.mark.parametrize(
    ("busy", "limits", "reason"),
    [(1, {}, "done"), (0.25, {}, "silence"), (0, {}, "silence"), (1, {"seconds": 0.3}, "seconds")],
)
def test_an_environment_that_is_busy_is_not_silent(make, busy, limits, reason):
    engine = make(lambda: Busy(busy), limits=SessionLimits(silence=0.1, **limits))
    completion = engine.submit([1, 2], SamplingParams(4, stop_token_ids=tuple(range(32))), "a", seed=5)
    assert completion.result(SECONDS).info["end_reason"] == reason


class Batched(BigramEngine):
    """All requests get one token per step, in one operation."""

    def serve(self):
        running, table = [], (self.model.following + self.model.bias).detach().log_softmax(-1)
        while (changes := self.next_step()) is not None:
            running = [one for one in (*running, *changes.added) if not one.ended]
            if not running:
                continue
            last = [(one.token_ids or one.prompt)[-1] for one in running]
            tokens = torch.multinomial(table[last].exp(), 1)[:, 0].tolist()
            for one, before, token in zip(running, last, tokens, strict=True):
                self.record(one, [token], [float(table[before, token])], "length" if one.remaining == 1 else None)
            self.steps += len(running)


def test_a_thousand_sessions_at_once():
    engine = AgentEngine(Batched, environment=Counting)
    count, turns = 1000, 4
    began, threads = time.process_time(), threading.active_count()
    futures = [submit(engine, str(number), turns=turns) for number in range(count)]
    wait_until(lambda: engine.load().running + engine.load().waiting > 700 or all(one.done() for one in futures))
    assert threading.active_count() <= threads + 2
    for future in futures:
        completion = future.result(60)
        check(completion) if completion is futures[0].result() else None
        assert completion.info["turns"] == turns and completion.info["reward"] == 10.0
    used = time.process_time() - began
    assert engine.load() == EngineLoad(0, 0)
    assert used / (count * turns) < 0.01, f"{used / (count * turns) * 1000:.2f} ms of CPU per turn"
    engine.close()
