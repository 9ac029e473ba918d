"""Programs that play sessions inside a rollout, through the gateway of their worker."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import gateway_helpers  # noqa: F401 - a gateway ends at once
import pytest
from agent_helpers import Characters, ScriptEngine, log_prob, user
from waits import wait_until

from workers.rollout.agents import session as session_file
from workers.rollout.agents.agent_engine import AgentEngine
from workers.rollout.agents.environment import Environment, SessionLimits, Step
from workers.rollout.agents.gateway.http_front import GatewayLimits
from workers.rollout.agents.program import AgentProgram
from workers.rollout.agents.rendering import PromptMismatchError, TokenRenderer
from workers.rollout.engines.rollout_engine import Completion, EngineLoad, SamplingParams
from workers.rollout.rollout_errors import RolloutError

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

PROMPT = [20, 21]


async def ask(base_url, api_key, text="x"):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=[user(text)])


async def asks_twice(row, base_url, api_key):
    """A program that knows nothing of this library. It asks, and asks again behind the answer; a subagent sums up."""
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key) as client:
        messages = [{"role": "user", "content": row["question"]}]
        for follow in ("and then?", None):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            if follow:
                messages.append({"role": "user", "content": follow})
        if row["subagent"]:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "sum up"}])
    return {"reward": float(len(messages)), "said": messages[-1]["content"]}


def engine_of(agent, script=lambda prompt, seed: f"{len(prompt)}", kind=ScriptEngine, of_gateway=None, **options):
    program = AgentProgram(agent, limits=of_gateway)
    return AgentEngine(kind, script, environment=program, renderer=TokenRenderer(Characters()), **options)


def play(engine, rows):
    with closing(engine):
        extras = {name: [row[name] for row in rows] for name in rows[0]}
        return engine.generate([PROMPT] * len(rows), SamplingParams(200), list(range(len(rows))), extras=extras)


def test_a_program_is_a_rollout_with_a_row_for_each_leaf():
    rows = [{"question": "why?", "subagent": False}, {"question": "how?", "subagent": True}] * 10
    engine = engine_of(asks_twice)
    for row, done in zip(rows, play(engine, rows), strict=True):
        assert done.info["reward"] == 4.0 and done.info["turns"] == 2 + row["subagent"]
        assert done.info["end_reason"] == "done" and done.info["said"] and done.info["calls"] == done.info["turns"]
        assert done.info["rerenders"] == 0 and len(done.rows) == 1 + row["subagent"]
        for number, made in enumerate(done.rows):
            whole = [*made.prompt, *made.completion.token_ids]
            text = Characters().decode(whole)
            expected = "<|user|>sum up<end>" if number else f"<|user|>{row['question']}<end>"
            assert text.startswith(f"{expected}<|assistant|>")
            # Each trained token has the log-probability that the engine gave it behind exactly these tokens.
            begin = len(made.prompt)
            for place, counts in enumerate(made.completion.loss_mask or [1] * len(made.completion.token_ids)):
                if not counts:
                    begin = len(made.prompt) + place + 1
                    continue
                own = whole[begin : len(made.prompt) + place + 1]
                assert made.completion.log_probs[place] == log_prob(whole[:begin], own, len(own) - 1)


def test_a_program_that_raises_or_takes_too_long_ends_its_session_only():
    async def agent(row, base_url, api_key):
        await ask(base_url, api_key)
        if row["fault"] == "raises":
            raise KeyError("tool")
        if row["fault"] == "hangs":
            await asyncio.sleep(1000)
        return None if row["fault"] == "silent" else 1

    rows = [{"fault": fault} for fault in ("raises", "hangs", "none", "silent")]
    engine = engine_of(agent, limits=SessionLimits(seconds=1.5))
    programs = engine.environment
    done = play(engine, rows)
    assert [one.info["end_reason"] for one in done] == ["error", "seconds", "done", "done"]
    assert [one.info["reward"] for one in done] == [0.0, 0.0, 1.0, 0.0]
    # What was sampled before is there, and no session is left in the gateway.
    assert [one.info["turns"] for one in done] == [1, 1, 1, 1] and all(one.rows for one in done)
    assert "tool" in done[0].info["error"] and programs._gateway is None
    with pytest.raises(RolloutError, match="closed"):  # a session that had still waited for it
        programs.gateway()


def test_a_program_whose_cleanup_takes_long_keeps_its_tokens(monkeypatch):
    monkeypatch.setattr(session_file, "CANCEL_SECONDS", 0.3)

    async def agent(row, base_url, api_key):
        await ask(base_url, api_key)
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)

    (done,) = play(engine_of(agent, limits=SessionLimits(seconds=1.5)), [{"row": 0}])
    assert (done.info["end_reason"], done.info["turns"], len(done.rows)) == ("seconds", 1, 1)


def test_reward_of_a_program_that_has_sampled_nothing_counts():
    async def agent(row, base_url, api_key):
        return -1.0

    (done,) = play(engine_of(agent), [{"row": 0}])
    assert (done.info["reward"], done.info["turns"], done.token_ids) == (-1.0, 0, [])


class Careless(ScriptEngine):
    """Generates from another prompt than it was given, unless that is the first one of a session."""

    def _request(self, *args):
        request = super()._request(*args)
        if len(request.prompt) > len(PROMPT):
            request.prompt[-1] += 1
        return request


@pytest.mark.parametrize("wrong", [False, True])
def test_verification_compares_each_turns_prompt(wrong):
    class Twice(Environment):
        async def reset(self, row):
            self.left = 2

        async def step(self, action):
            self.left -= 1
            return Step([30, 31], reward=1.0, done=not self.left)

    engine = AgentEngine(Careless if wrong else ScriptEngine, lambda *_: "ab", environment=Twice, verify=True)
    if wrong:
        with pytest.raises(PromptMismatchError, match="position 6"):
            play(engine, [{"row": 0}])
    else:
        (done,) = play(engine, [{"row": 0}])
        assert done.info["reward"] == 2.0 and done.prompt_ids is None
        json.dumps(done.token_ids)


def test_verification_of_a_programs_calls_fails_the_rollout():
    async def agent(row, base_url, api_key):
        with suppress(openai.InternalServerError):
            await ask(base_url, api_key)
        return 1.0

    with pytest.raises(PromptMismatchError, match="position 3"):
        play(engine_of(agent, lambda *_: "ab", Careless, verify=True), [{"row": 0}])


def test_a_program_whose_engine_loses_its_weights_fails_the_rollout():
    """Which is generated again, with others, whatever the program has made of the error that its call got."""

    def script(prompt, seed):
        engine.engine.abandon_update()  # as HTTPEngine does when its server was restarted
        raise RolloutError("the server was restarted")

    async def agent(row, base_url, api_key):
        with suppress(openai.InternalServerError):
            await ask(base_url, api_key)
        return 0.0

    engine = engine_of(agent, script, of_gateway=GatewayLimits(wait_seconds=0.1))
    with pytest.raises(RolloutError, match="has lost its weights meanwhile: an update was abandoned"):
        play(engine, [{"row": 0}])


async def counts(row, base_url, api_key):
    """Asks until it is told to stop, by ``row`` or by an error, and returns how many answers it got."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages, answers = [{"role": "user", "content": "x"}], 0
        while answers < row["stop"]:
            try:
                reply = await client.chat.completions.create(model="m", messages=messages)
            except openai.BadRequestError as error:
                seen.append(error.body)
                if row["raises"]:
                    raise
                return answers
            answers += 1
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "y"}]
    return answers


seen = []
"""The errors that `counts` got."""


@pytest.mark.parametrize(
    ("limit", "turns"),
    [
        (SessionLimits(turns=3), 3),
        # An answer has 5 tokens, and what follows it 4. Of 5 + 4 + 5 + 4 + 2 tokens, the third answer gets the last 2.
        (SessionLimits(turns=None, tokens=20), 3),
        # No token is left behind the prompt of the third call.
        (SessionLimits(turns=None, tokens=18), 2),
    ],
)
def test_turns_and_tokens_bound_a_programs_calls(limit, turns):
    seen.clear()
    rows = [
        {"stop": stop, "raises": raises} for stop, raises in ((100, False), (100, True), (turns, False), (1, False))
    ]
    done = play(engine_of(counts, lambda *_: "abcd", limits=limit), rows)
    (name,) = {key for key, value in vars(limit).items() if key in ("turns", "tokens") and value is not None}
    cut = limit.tokens == 20
    # The tokens end a session when a turn gets the last one, as with an environment; else when one is asked for.
    assert [one.info["end_reason"] for one in done] == [name, name, name if cut else "done", "done"]
    assert [one.info["reward"] for one in done] == [turns, 0.0, turns, 1.0]
    assert [one.info["turns"] for one in done] == [turns, turns, turns, 1]
    assert [one.finish_reason for one in done] == ["length", "length", "length" if cut else "stop", "stop"]
    # One error for each of the two that went on asking: the client does not retry.
    assert len(seen) == 2 and all(f"SessionLimits.{name}" in one["message"] for one in seen)
    assert {one["code"] for one in seen} == {"budget"}
    if limit.tokens is not None:
        for one in done[:3]:
            (row,) = one.rows or [None]
            assert row is not None and len(row.completion.token_ids) <= limit.tokens
    assert len(done[0].rows[0].completion.token_ids) == (5 + 4) * (turns - 1) + (2 if cut else 5)


def test_a_program_that_raises_behind_the_models_positions_has_used_its_tokens():
    """`SessionLimits.tokens` says that they are a limit too. A program that has asked something else since is at fault
    by itself."""

    async def agent(row, base_url, api_key):
        await ask(base_url, api_key)
        try:
            await ask(base_url, api_key, "x" * 300)
        except openai.BadRequestError:
            if not row["shortens"]:
                raise
            await ask(base_url, api_key, "y")
        raise KeyError("tool")

    engine = engine_of(agent)
    engine.engine.max_positions = 250
    done = play(engine, [{"shortens": False}, {"shortens": True}])
    assert [(one.info["end_reason"], one.finish_reason) for one in done] == [("tokens", "length"), ("error", "error")]
    assert [one.info["turns"] for one in done] == [1, 2] and all(one.info["reward"] == 0.0 for one in done)
    assert "error" not in done[0].info and "tool" in done[1].info["error"]


def test_a_program_that_raises_behind_the_last_node_of_its_tree_has_used_its_tokens():
    async def agent(row, base_url, api_key):
        await ask(base_url, api_key)
        await ask(base_url, api_key, "y")

    (done,) = play(engine_of(agent, lambda *_: "a", of_gateway=GatewayLimits(nodes=2)), [{"row": 0}])
    assert (done.info["end_reason"], done.info["turns"], done.info["reward"]) == ("tokens", 1, 0.0)


def test_a_program_can_stop_the_run_behind_a_limit_too():
    async def agent(row, base_url, api_key):
        await ask(base_url, api_key)
        try:
            await ask(base_url, api_key)
        except openai.BadRequestError as error:
            raise RolloutError("one turn is too few") from error

    with pytest.raises(RolloutError, match="too few"):
        play(engine_of(agent, limits=SessionLimits(turns=1)), [{"row": 0}])


@pytest.mark.parametrize("turns", [1, 3])
def test_calls_that_run_at_once_are_turns_too(turns):
    async def agent(row, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            calls = [
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"part {number}"}])
                for number in range(5)
            ]
            told = await asyncio.gather(*calls, return_exceptions=True)
        return sum(not isinstance(one, Exception) for one in told)

    engine = engine_of(agent, limits=SessionLimits(turns=turns), tokens=1, delay=0.05)
    (done,) = play(engine, [{"question": "x"}])
    assert done.info["reward"] == done.info["turns"] == turns and done.info["end_reason"] == "turns"
    assert len(done.rows) == turns


def test_a_driver_knows_of_a_programs_session_which_begins_again():
    async def agent(row, base_url, api_key):
        await asyncio.sleep(0.3)
        return 1

    engine = engine_of(agent)
    whole = engine.submit(PROMPT, SamplingParams(9), "a", seed=1)
    while not (states := engine.progress({})):
        assert not whole.done()
    assert states["a"].environment is None and states["a"].tokens == 0
    told = Completion([], [], "abort", session=states["a"])
    again = engine.submit(PROMPT, SamplingParams(9), "b", seed=1, partial=told)
    assert (whole.result(20).info["restarts"], again.result(20).info["restarts"]) == (0, 1)
    engine.close()


def test_a_program_that_was_aborted_before_its_first_call_begins_again():
    """And so does its time."""
    begun = threading.Event()

    async def agent(row, base_url, api_key):
        begun.set()
        await asyncio.sleep(row["seconds"])
        return 1

    engine = engine_of(agent)
    first = engine.submit(PROMPT, SamplingParams(9), "a", seed=1, extras={"seconds": 1000})
    assert begun.wait(20)
    engine.abort(["a"])
    told = first.result(20)
    again = engine.submit(PROMPT, SamplingParams(9), "b", seed=1, partial=told, extras={"seconds": 0})
    assert (told.finish_reason, again.result(20).info["restarts"]) == ("abort", 1)
    engine.close()


def test_limits_of_other_peoples_sessions_are_none_of_a_rollouts_programs():
    """However many there are, and however long they are silent."""

    async def agent(row, base_url, api_key):
        for number in range(2):
            await asyncio.sleep(0.5 * number)
            await ask(base_url, api_key, str(number))
        return 1

    engine = engine_of(agent, lambda *_: "a", of_gateway=GatewayLimits(idle_seconds=0.1, sessions=1))
    for done in play(engine, [{"question": "x"}] * 2):
        assert done.info["end_reason"] == "done" and done.info["turns"] == 2


def test_a_session_of_a_program_is_no_waiting_request_once_a_call_was_answered():
    """A `RolloutStream` gives a worker no groups as long as some request waits."""
    answered, goes_on = threading.Event(), threading.Event()

    async def agent(row, base_url, api_key):
        await ask(base_url, api_key)
        answered.set()
        await asyncio.to_thread(goes_on.wait)
        await ask(base_url, api_key, "y")
        return 1

    engine = engine_of(agent)
    engine.pause()
    session = engine.submit(PROMPT, SamplingParams(9), "a", seed=1)
    wait_until(lambda: engine.engine.load().waiting == 1)
    assert engine.load() == EngineLoad(0, 1)
    engine.resume()
    assert answered.wait(20)
    engine.pause()
    goes_on.set()
    wait_until(lambda: engine.engine.load().waiting == 1)
    assert engine.load() == EngineLoad(1, 0)
    engine.resume()
    assert session.result(20).info["turns"] == 2
    engine.close()


def test_a_session_begins_while_others_have_all_threads_of_the_event_loop():
    """As calls of `asyncio.to_thread` that hang, in programs that were cancelled long ago."""
    blocks, goes_on = threading.Event(), threading.Event()

    async def agent(row, base_url, api_key):
        if row["blocks"]:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            blocks.set()
            await asyncio.to_thread(goes_on.wait)
        return 1

    engine = engine_of(agent)
    try:
        first = engine.submit(PROMPT, SamplingParams(9), "a", seed=1, extras={"blocks": True})
        assert blocks.wait(20)
        assert engine.submit(PROMPT, SamplingParams(9), "b", seed=1, extras={"blocks": False}).result(20).info["reward"]
        assert not first.done()
    finally:
        goes_on.set()
        engine.close()
