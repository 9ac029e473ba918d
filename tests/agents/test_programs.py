"""Programs that play sessions inside a rollout, through the gateway of their worker."""

import asyncio
import json

import pytest
from agent_helpers import Characters, ScriptEngine, log_prob

from workers.rollout.agents.agent_engine import AgentEngine
from workers.rollout.agents.environment import Environment, SessionLimits, Step
from workers.rollout.agents.program import AgentProgram
from workers.rollout.agents.rendering import PromptMismatchError, TokenRenderer
from workers.rollout.engines.rollout_engine import SamplingParams

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

PROMPT = [20, 21]


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


def engine_of(agent, script=lambda prompt, seed: f"{len(prompt)}", limits=None, **options):
    inner = ScriptEngine(script, **options)
    return AgentEngine(inner, environment=AgentProgram(agent), renderer=TokenRenderer(Characters()), limits=limits)


def play(engine, rows):
    try:
        extras = {name: [row[name] for row in rows] for name in rows[0]}
        return engine.generate([PROMPT] * len(rows), SamplingParams(200), list(range(len(rows))), extras=extras)
    finally:
        engine.close()


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
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            if row["fault"] == "raises":
                raise KeyError("tool")
            if row["fault"] == "hangs":
                await asyncio.sleep(1000)
            if row["fault"] == "silent":
                return None
        return 1

    rows = [{"fault": fault} for fault in ("raises", "hangs", "none", "silent")]
    engine = engine_of(agent, limits=SessionLimits(seconds=3.0))
    programs = engine.environment
    done = play(engine, rows)
    assert [one.info["end_reason"] for one in done] == ["error", "seconds", "done", "done"]
    assert [one.info["reward"] for one in done] == [0.0, 0.0, 1.0, 0.0]
    # What was sampled before is there, and no session is left in the gateway.
    assert [one.info["turns"] for one in done] == [1, 1, 1, 1] and all(one.rows for one in done)
    assert "tool" in done[0].info["error"] and programs._gateway is None


def test_a_program_needs_a_renderer_and_an_async_function():
    with pytest.raises(TypeError, match="renderer"):
        AgentEngine(ScriptEngine(), environment=AgentProgram(asks_twice))
    with pytest.raises(TypeError, match="async def"):
        AgentProgram(3)


@pytest.mark.parametrize("wrong", [False, True])
def test_verification_compares_each_turns_prompt(wrong):
    class Careless(ScriptEngine):
        def _request(self, *args):
            request = super()._request(*args)
            if wrong and len(request.prompt) > len(PROMPT):
                request.prompt[-1] += 1
            return request

    class Twice(Environment):
        async def reset(self, row):
            self.left = 2

        async def step(self, action):
            self.left -= 1
            return Step([30, 31], reward=1.0, done=not self.left)

    engine = AgentEngine(Careless(lambda *_: "ab"), environment=Twice, verify=True)
    try:
        if wrong:
            with pytest.raises(PromptMismatchError, match="position 6"):
                engine.generate([PROMPT], SamplingParams(50, stop_token_ids=(1,)), [0])
        else:
            (done,) = engine.generate([PROMPT], SamplingParams(50, stop_token_ids=(1,)), [0])
            assert done.info["reward"] == 2.0 and done.prompt_ids is None
            json.dumps(done.token_ids)
    finally:
        engine.close()
