"""Tools and the environments that come with the library: schemas, wrong calls, results that are errors, hang or flood;
the sandbox; a renderer that cannot extend a conversation."""

import asyncio
import functools
import json
import pickle
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import depth
import pytest
from agent_helpers import Characters, ScriptEngine, merging_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import BigramEngine

from workers import AgentEngine, CodeLimits, SamplingParams, SessionLimits, Step, TokenRenderer, ToolEnvironment
from workers.rollout.agents import sandbox as sandbox_file
from workers.rollout.agents import tools as tools_file
from workers.rollout.agents.environment import Action, Environment, session_metrics
from workers.rollout.agents.rendering import load_renderer, render_prompt
from workers.rollout.agents.sandbox import PythonSandbox
from workers.rollout.agents.tools import Tool, ToolCall, ToolCallError
from workers.rollout.engines.rollout_engine import Completion
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.rollout_manager import RolloutManager, check_sessions


def act(*calls, text="", finish_reason="stop"):
    made = [ToolCall(name, arguments, f"call_{k}") for k, (name, arguments) in enumerate(calls)]
    return Action([5], finish_reason, {"role": "assistant", "content": text}, made)


# --- tools ----------------------------------------------------------------------------------------------------------


def search(
    query: str, count: int = 3, kind: Literal["web", "news"] = "web", near: list[float] | None = None, more: Any = None
) -> str:
    """Search the web.

    Finds pages.

    Args:
        query: words,
            in English.
        count (int): how many.

    Returns:
        The pages.
    """
    return f"{query} {count} {kind} {near}"


def test_schema_of_a_tool_is_that_of_its_signature_and_docstring():
    assert Tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.\n\nFinds pages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words, in English."},
                    "count": {"type": "integer", "description": "how many."},
                    "kind": {"enum": ["web", "news"], "type": "string"},
                    "near": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
                    "more": {},
                },
                "required": ["query"],
            },
        },
    }


def no_type(a):
    """Do."""


def many(*a: int):
    """Do."""


def odd(a: bytes):
    """Do."""


@pytest.mark.parametrize(("function", "what"), [(no_type, "annotation"), (many, "name each"), (odd, "no JSON schema")])
def test_functions_that_are_no_tools(function, what):
    with pytest.raises(TypeError, match=what):
        Tool(function)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "needs the argument 'query'"),
        ({"query": 1}, "query=1 does not fit"),
        ({"query": "a", "count": True}, "count=True"),
        ({"query": "a", "count": 1.5}, "count=1.5"),
        ({"query": "a", "kind": "old"}, "kind='old'"),
        ({"query": "a", "near": [1, "x"]}, "near="),
        ({"query": "a", "page": 1}, "no parameter 'page'; it has 'query'"),
        ("{", "no valid JSON"),
        ("[1]", "no JSON object"),
        ('{"query": ' + "[" * 2000, "nested too deeply"),
        ('{"query": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply"),
    ],
)
def test_arguments_that_do_not_fit(arguments, what):
    with pytest.raises(ToolCallError, match=what):
        Tool(search).checked(arguments)


def test_arguments_that_fit():
    assert Tool(search).checked('{"query": "a", "near": [1, 2.5]}') == {"query": "a", "near": [1, 2.5]}

    def half(number: float) -> float:
        """Halve."""
        return number / 2

    assert type(Tool(half).checked({"number": 3})["number"]) is float
    with pytest.raises(ToolCallError, match="too large"):
        Tool(half).checked({"number": 10**400})


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def fails() -> int:
    """Fail."""
    return [][1]


def flood(count: int) -> str:
    """Say much."""
    return "ab" * count


async def later(seconds: float) -> dict:
    """Wait."""
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def unwritable() -> dict:
    """Return what JSON cannot have."""
    return {(1, 2): 3}


TOOLS = [add, fails, flood, later, unwritable]


def step(*calls, cut="right", **options):
    environment = ToolEnvironment(TOOLS, result_chars=20, cut=cut)
    return asyncio.run(environment.step(act(*calls, **options)))


def test_all_calls_of_a_turn_run_at_once_and_in_order():
    began = time.monotonic()
    made = step(("later", {"seconds": 0.3}), ("add", {"a": 1, "b": 2}), ("later", {"seconds": 0.3}))
    assert time.monotonic() - began < 0.55
    assert [one["content"] for one in made.observation] == ['{"waited": 0.3}', "3", '{"waited": 0.3}']
    assert [one["tool_call_id"] for one in made.observation] == ["call_0", "call_1", "call_2"]
    assert {one["role"] for one in made.observation} == {"tool"} and not made.done and not made.invalid


def test_errors_are_results_and_wrong_calls_are_invalid():
    assert step(("fails", {})).observation[0]["content"] == "Error: IndexError: l[...]"
    assert step(("unwritable", {})).observation[0]["content"].startswith("Error: TypeError: ")
    assert not step(("fails", {})).invalid
    assert step(("nothing", {})).invalid and step(("add", {"a": 1})).invalid and step(("add", "{")).invalid
    assert not step(("nothing", {}), ("add", {"a": 1, "b": 2})).invalid  # one of them was right
    assert step(("no such" * 99, {})).observation[0]["content"] == "Error: there is no t[...]"


@pytest.mark.parametrize(("cut", "kept"), [("left", "[...]" + 10 * "ab"), ("right", 10 * "ab" + "[...]")])
def test_results_are_cut(cut, kept):
    assert step(("flood", {"count": 5_000_000}), cut=cut).observation[0]["content"] == kept
    assert step(("flood", {"count": 10})).observation[0]["content"] == 10 * "ab"
    middle = step(("flood", {"count": 5_000_000}), cut="middle").observation[0]["content"]
    assert middle == 5 * "ab" + "[...]" + 5 * "ab"


def test_answer_and_turn_that_was_cut_off_end_the_session():
    class Scored(ToolEnvironment):
        async def score(self, action):
            return float(action.text == self.row["answer"])

    async def play(text, **options):
        environment = Scored()
        await environment.reset({"answer": "4"})
        return await environment.step(act(text=text, **options))

    assert asyncio.run(play("4")) == Step(reward=1.0, done=True)
    assert asyncio.run(play("5")) == Step(reward=0.0, done=True)
    assert asyncio.run(play("4", finish_reason="length")) == Step(done=True, reason="length")
    with pytest.raises(ValueError, match="two tools have one name"):
        ToolEnvironment([add, add])


def test_tools_that_hang_do_not_stop_others(monkeypatch):
    monkeypatch.setattr(tools_file, "THREADS", 2)

    def hang() -> int:
        """Hang."""
        time.sleep(1.5)
        return 1

    async def play():
        tools = ToolEnvironment([hang, add])
        hanging = [asyncio.ensure_future(tools.step(act(("hang", {})))) for _ in range(4)]
        await asyncio.sleep(0.1)
        for one in hanging:
            one.cancel()
        await asyncio.wait(hanging)
        began = time.monotonic()
        made = await tools.step(act(("add", {"a": 1, "b": 1})))
        return made.observation[0]["content"], time.monotonic() - began

    content, seconds = asyncio.run(play())
    assert content == "2" and seconds < 1.0


# --- messages in sessions -------------------------------------------------------------------------------------------


class Scripted(BigramEngine):
    """Says what the test has written, turn by turn, with a renderer of characters."""

    max_positions = 2000

    def __init__(self, script, vocabulary=512, encode=lambda text: [*Characters().encode(text), 1]):
        super().__init__(vocabulary=vocabulary)
        self.script, self.encode = script, encode

    def drawn(self, request):
        said = self.encode(self.script[int(request.id.rpartition("/")[2])])
        place = len(request.token_ids)
        return [said[place]], [-0.5], "stop" if place == len(said) - 1 else None, [()]


def session(script, environment, renderer=None, limits=None, **row):
    engine = AgentEngine(
        Scripted, script, environment=environment, renderer=renderer or TokenRenderer(Characters()), limits=limits
    )
    prompt = TokenRenderer(Characters()).render([{"role": "user", "content": "3+4"}], add_generation_prompt=True)
    try:
        (made,) = engine.generate(
            [prompt.token_ids], SamplingParams(200), [0], extras={name: [value] for name, value in row.items()}
        )
    finally:
        engine.close()
    return made, Characters().decode(made.token_ids)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Adder(ToolEnvironment):
    functions = (add,)

    async def score(self, action):
        return float(action.text == "7")


def test_session_with_tools_and_a_renderer():
    made, text = session([call("add", a=3, b=4), "7"], Adder)
    assert text == f"{call('add', a=3, b=4)}<end><|tool|>7<end><|assistant|>7<end>"
    assert (made.info["reward"], made.info["turns"], made.info["end_reason"]) == (1.0, 2, "done")
    sampled = Characters().decode([t for t, counts in zip(made.token_ids, made.loss_mask, strict=True) if counts])
    assert sampled == f"{call('add', a=3, b=4)}<end>7<end>"


def test_wrong_calls_in_a_row_end_a_session():
    wrong = [call("sub", a=1, b=2), "<tool_call>{</tool_call>", call("add", a="1", b=2), "7"]
    made, text = session(wrong, Adder, limits=SessionLimits(invalid=3))
    assert made.info["end_reason"] == "invalid" and made.info["turns"] == 3
    assert "there is no tool 'sub'; there are 'add'" in text and "could not be read: invalid_json" in text
    made, _ = session(wrong, Adder, limits=SessionLimits(invalid=4))
    assert made.info["end_reason"] == "done" and made.info["reward"] == 1.0


def repeat(text: str) -> str:
    """Repeat."""
    return text


class Repeater(Adder):
    functions = (add, repeat)


PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "{", "}", "[", "]", ", ", ": ", "\n", "{}"),
    *('"name"', '"arguments"', '"add"', '"repeat"', '"text"', '"a"', '"\\ud83d"', "null", "NaN", "1e999", "-1", "\x00"),
    *("hello", "1" * 400, "[" * 1000, '{"a":' * 300),
]
VALUES = [1, -3, 1.5, "x", "\ud83d", None, True, [1, "a"], {"k": {}}, {}, 10**400, float("inf")]


def any_text(draw):
    """What a policy might write: pieces of calls, and calls in which something is wrong."""
    if draw.random() < 0.3:
        return "".join(draw.choices(PIECES, k=draw.randrange(1, 20)))
    arguments = {draw.choice(["a", "b", "text", "other"]): draw.choice(VALUES) for _ in range(draw.randrange(3))}
    called = {"name": draw.choice(["add", "repeat", "repeat", "", 1, ["add"]]), "arguments": arguments}
    called["arguments"] = draw.choice([arguments, arguments, json.dumps(arguments), draw.choice(VALUES)])
    text = json.dumps(called)
    if draw.random() < 0.3:
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(PIECES) + text[place + 1 :]
    return draw.choice(["", "so "]) + f"<tool_call>\n{text}\n</tool_call>" * draw.randrange(1, 3)


@pytest.mark.parametrize("renderer", ["token", "qwen3", "default"])
def test_no_text_of_the_policy_is_an_error_of_its_environment(renderer):
    tokenizer, draw = merging_tokenizer(), random.Random(3)
    found = {
        "token": lambda: TokenRenderer(Characters()),
        "qwen3": lambda: load_renderer(tokenizer, "qwen3"),
        "default": lambda: load_renderer(tokenizer, "default", tool_parser="qwen3"),
    }[renderer]()
    deep = f'<tool_call>\n{{"name": "repeat", "arguments": {{"text": {"[" * 2000}}}}}\n</tool_call>'
    half = '<tool_call>\n{"name": "repeat", "arguments": {"text": "\\ud83d"}}\n</tool_call>'
    first = iter([deep, half, "7"])
    spelled = Characters() if renderer == "token" else tokenizer
    engine = ScriptEngine(lambda *_: next(first, None) or any_text(draw), 10_000, tokenizer=spelled)
    engine.log_probs = False
    agents = AgentEngine(engine, environment=Repeater, renderer=found, limits=SessionLimits(turns=3, invalid=None))
    messages = [{"role": "user", "content": "3+4"}]
    prompt, how, rows = render_prompt(found, messages, [repeat]), SamplingParams(9000), {"messages": [messages]}
    (made,) = agents.generate([prompt], how, [0], extras=rows)
    others = [agents.generate([prompt], how, [0], extras=rows)[0] for _ in range(500 if depth.full else 30)]
    agents.close()
    assert (made.info["end_reason"], made.info["reward"], made.info["turns"]) == ("done", 1.0, 3)
    text = engine.tokenizer.decode(made.token_ids)
    assert "could not be read: nested too deeply" in text and "?" in text
    assert {one.info["end_reason"] for one in others} <= {"done", "turns"}


class Forgets(TokenRenderer):
    """Cannot extend the second turn."""

    def bridge_to_next_turn(self, prompt, completion, messages, *, tools=None):
        self.count = getattr(self, "count", 0) + 1
        return None if self.count == 2 else super().bridge_to_next_turn(prompt, completion, messages, tools=tools)


class Talker(Environment):
    async def step(self, action):
        return Step([{"role": "user", "content": "go on"}])


class Never(TokenRenderer):
    def bridge_to_next_turn(self, *args, **options):
        return None


def test_turn_that_was_cut_off_ends_its_session_if_nothing_can_follow():
    agents = AgentEngine(ScriptEngine(lambda *_: "a long answer"), environment=Talker, renderer=Never(Characters()))
    prompt = TokenRenderer(Characters()).render([{"role": "user", "content": "3+4"}], add_generation_prompt=True)
    (made,) = agents.generate([prompt.token_ids], SamplingParams(4), [0])
    assert (made.info["end_reason"], made.info["turns"]) == ("length", 1)
    with pytest.raises(RolloutError, match="give the rows a column 'messages'"):
        agents.generate([prompt.token_ids], SamplingParams(100), [0])
    agents.close()


def test_conversation_that_cannot_be_extended_is_a_branch(caplog):
    script = [call("add", a=3, b=4), call("add", a=0, b=7), "7"]
    messages = [{"role": "user", "content": "3+4"}]
    made, _ = session(script, Adder, Forgets(Characters()), messages=messages)
    assert made.info["rerenders"] == 1 and made.info["reward"] == 1.0
    assert len(made.rows) == 2 and "is rendered anew" in caplog.text
    trained = [
        [token for token, counts in zip(row.completion.token_ids, row.completion.loss_mask, strict=True) if counts]
        for row in made.rows
    ]
    assert Characters().decode(trained[0]) == f"{script[0]}<end>{script[1]}<end>"
    assert Characters().decode(trained[1]) == "7<end>"
    with pytest.raises(RolloutError, match="give the rows a column 'messages'"):
        session(script, Adder, Forgets(Characters()))


class Resumable(Adder):
    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.row = state["row"]


@pytest.mark.parametrize("turns", [1, 2])
def test_conversation_is_rendered_whole_after_its_session_has_moved(turns):
    """The other worker, which has seen none of its messages, renders all of them anew; the state arrives in parts, as a
    driver gets it."""

    script = [call("add", a=3, b=4), call("add", a=0, b=7), "7"]
    first, other = TokenRenderer(Characters()), Never(Characters())
    row = {"messages": [{"role": "user", "content": "3+4"}]}
    prompt = render_prompt(first, row["messages"])

    def engine(renderer, script):
        return AgentEngine(Scripted, script, environment=Resumable, renderer=renderer)

    def of(engine, **options):
        return engine.submit(prompt, SamplingParams(200), "a", seed=0, extras=row, **options)

    whole = [*row["messages"]]
    for turn in range(turns):
        whole += [{"role": "assistant", "content": script[turn]}, {"role": "tool", "content": "7"}]
    agents, held = engine(first, [*script[:turns], "unread" * 20]), {}
    future = of(agents)
    while held.get("turns", 0) < turns or held["state"].acting:
        known = {"a": (held["state"].number, len(held["state"].nodes))} if held else {}
        for state in agents.progress(known).values():
            moved = pickle.loads(pickle.dumps(state)).onto(held.get("state"))
            held = {"state": moved, "turns": moved.turns}
    agents.abort()
    future.result(20)
    agents.close()
    agents = engine(other, [*script[:turns], script[1], "7"])
    made = of(agents, partial=Completion([], [], "abort", session=held["state"])).result(20)
    agents.close()
    whole += [{"role": "assistant", "content": script[1]}, {"role": "tool", "content": "7"}]
    assert made.rows[-1].prompt == render_prompt(first, whole, [add]) and made.info["rerenders"] == 1


def test_a_manager_keeps_no_more_of_a_session_than_it_counts():
    """Nobody has to call `reward_metrics`, and what an environment tells may be large."""
    info = {"turns": 2, "end_reason": "done", "rerenders": 0, "restarts": 1, "transcript": "x" * 10**6}
    told = SimpleNamespace(sessions=[])
    other = Completion([], [], "stop", info={"end_reason": "error"})  # of an engine that plays no sessions
    RolloutManager.note_sessions(told, [Completion([], [], "stop", info=info), Completion([], [], "stop"), other])
    check_sessions([other] * 2)
    assert len(pickle.dumps(told.sessions)) < 1000
    assert session_metrics(told.sessions) == session_metrics([info])


@given(turns=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_rows_have_what_was_sampled_and_nothing_else(turns):
    """Random observations of tokens: each sampled token is trained once, with its own log-probability."""

    class Random(Environment):
        def __init__(self):
            self.left = list(turns)

        async def step(self, action):
            count, _ = self.left.pop(0)
            return Step([40 + count] * count or None, done=not self.left)

    script = ["abc"[: 1 + long] for _, long in turns]
    engine = AgentEngine(Scripted, script, environment=Random, limits=SessionLimits(turns=None))
    (made,) = engine.generate([[2]], SamplingParams(50), [0])
    engine.close()
    expected, mask = [], []
    for number, (text, (count, _)) in enumerate(zip(script, turns, strict=True)):
        own = [*Characters().encode(text), 1]
        expected, mask = expected + own, mask + [1] * len(own)
        if number < len(turns) - 1:
            expected, mask = expected + [40 + count] * count, mask + [0] * count
    assert (made.token_ids, list(made.loss_mask)) == (expected, mask)
    assert made.log_probs == [-0.5 * counts for counts in mask]


@pytest.mark.parametrize(
    ("script", "reward", "turns"),
    [
        (["C*;", "12;"], 1.0, 2),
        (["C*;", "13;"], 0.5 + 0.5 * 2 / 3, 2),
        (["C+;", "12;"], 0.5 * 2 / 3 + 0.5, 2),
        (["12;", "12;"], 0.5 * 1 / 3 + 0.5, 2),
    ],
)
def test_calculator_of_the_tutorials(monkeypatch, script, reward, turns):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tutorials"))
    import calculator

    engine = AgentEngine(
        Scripted,
        script,
        len(calculator.ALPHABET),
        calculator.encode,
        environment=calculator.Calculator,
        renderer=calculator.CalculatorFormat,
        limits=calculator.Calculator.limits,
    )
    rows = {"expression": ["3*4"]}
    (made,) = engine.generate([calculator.encode("3*4=")], SamplingParams(5), [0], extras=rows)
    engine.close()
    assert made.info["reward"] == pytest.approx(reward) and made.info["turns"] == turns
    result = {"C*;": "12", "C+;": "07"}.get(script[0], "")
    assert calculator.decode(made.token_ids) == script[0] + result + script[1]


# --- the sandbox ----------------------------------------------------------------------------------------------------


def in_sandbox(program, limits=None):
    environment = PythonSandbox(limits)
    return asyncio.run(environment.step(act(("python", {"program": program})))).observation[0]["content"]


def test_sandbox_runs_programs():
    assert in_sandbox("print(sum(range(10)))") == "45\n"
    assert "ZeroDivisionError" in in_sandbox("1 / 0")
    assert "MemoryError" in in_sandbox("bytearray(1 << 40)")
    assert "not finished after 0.5 s" in in_sandbox("while True: pass", CodeLimits(seconds=0.5))
    assert len(in_sandbox("print('x' * 100_000)")) < 9000
    assert PythonSandbox().tools[0].schema["function"]["parameters"]["required"] == ["program"]


def test_a_program_that_runs_is_no_silence():
    """Only its own limits count, and those of other tools are the session's."""

    class Coder(PythonSandbox):
        functions = ("python", "think")

        async def think(self) -> str:
            """Think."""
            await asyncio.sleep(0.3)
            return "done"

    async def play(name, arguments):
        environment = Coder(CodeLimits(seconds=20, isolate=False))
        step = asyncio.ensure_future(environment.step(act((name, arguments))))
        await asyncio.sleep(0.1)
        busy = environment.busy
        await step
        return busy, environment.busy

    assert asyncio.run(play("python", {"program": "import time; time.sleep(0.3)"})) == (True, False)
    assert asyncio.run(play("think", {})) == (False, False)


def test_sandbox_without_namespaces_is_an_error(monkeypatch):
    monkeypatch.setattr(sandbox_file, "_check_isolation", sandbox_file._check_isolation.__wrapped__)
    plain = sandbox_file.run_python
    monkeypatch.setattr(
        sandbox_file, "run_python", lambda *args, **options: plain(*args, limits=CodeLimits(isolate=False))
    )
    with pytest.raises(RolloutError, match="allows no namespaces"):
        in_sandbox("print(1)")


def test_a_decorated_async_tool_is_awaited():
    @functools.wraps(later)
    def logged(**arguments):
        return later(**arguments)

    made = asyncio.run(ToolEnvironment([logged]).step(act(("later", {"seconds": 0.0}))))
    assert made.observation[0]["content"] == '{"waited": 0.0}'
