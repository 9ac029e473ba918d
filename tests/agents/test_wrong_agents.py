"""What goes wrong in environments, tools and programs: it is told early, with what to do, and harms nothing else."""

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch
from agent_helpers import Characters, ScriptEngine
from rollout_helpers import BigramEngine
from waits import wait_until

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers import (
    Action,
    AgentEngine,
    Completion,
    Environment,
    RolloutManager,
    RolloutStream,
    RolloutWorker,
    SampleBuffer,
    SamplingParams,
    SessionLimits,
    Step,
    TokenRenderer,
    Tool,
    ToolEnvironment,
    render_prompt,
    session_reward,
)
from workers.algorithms.estimators import AdvantageRows, grpo
from workers.data.collate import collate
from workers.data.rollout_data import group_numbers
from workers.rollout.agents import agent_engine as engine_file
from workers.rollout.agents.program import AgentProgram
from workers.rollout.agents.sandbox import PythonSandbox
from workers.rollout.engines.rollout_engine import Row
from workers.rollout.rewards.code_process import CodeLimits
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.rollout_manager import GroupData
from workers.rollout.stream.router import Router, is_flat
from workers.train.args import read_args
from workers.train.policy_worker import PolicyTrainWorker

SECONDS = 20
RENDERER = TokenRenderer(Characters())


class Ends(Environment):
    """Ends after a turn, unless the row says what else to do."""

    async def reset(self, row):
        self.what = row.get("what")
        if isinstance(self.what, BaseException) and self.what.args == ("reset",):
            raise self.what

    def state_dict(self):
        if isinstance(self.what, BaseException) and self.what.args == ("state",):
            raise self.what

    async def step(self, action):
        if isinstance(self.what, BaseException):
            raise self.what
        if callable(self.what):
            return await self.what()
        return Step(reward=1.0, done=True) if self.what is None else self.what


@pytest.fixture
def make():
    made = []

    def make(environment=Ends, engine=BigramEngine, **options):
        made.append(AgentEngine(engine, environment=environment, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def submit(engine, number=0, **row):
    return engine.submit([1, 2], SamplingParams(4), str(number), seed=number, extras=row)


async def nested():
    async def inner():
        raise SystemExit("inner")

    return await asyncio.gather(inner(), inner())


# --- what ends the process ends a session ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", [SystemExit(3), KeyboardInterrupt(), SystemExit("reset"), BaseException(), BaseException("state"), nested]
)
def test_exit_ends_its_session_only(make, what):
    engine = make()
    futures = [submit(engine, number, what=what if number == 1 else None) for number in range(3)]
    reasons = [future.result(SECONDS).info["end_reason"] for future in futures]
    assert reasons == ["length", "error", "length"]
    assert submit(engine, 7).result(SECONDS).info["reward"] == 1.0


def fails() -> str:
    """Fail with what is no Exception, as pytest.fail() does."""
    raise BaseException("bye")


async def quits_async() -> str:
    """Quit."""
    raise SystemExit("bye")


@pytest.mark.parametrize("tool", [fails, quits_async])
def test_exit_of_a_tool_is_its_result(make, tool):
    def script(prompt, seed):
        called = ": bye<end>" in prompt
        return "done" if called else f'<tool_call>{{"name": "{tool.__name__}"}}</tool_call>'

    engine = make(lambda: ToolEnvironment([tool]), lambda: ScriptEngine(script), renderer=RENDERER)
    (made,) = engine.generate([Characters().encode("a")], SamplingParams(100), [0])
    assert (made.info["end_reason"], made.info["turns"]) == ("done", 2)


def test_sessions_end_with_their_event_loop(make, monkeypatch):
    engine = make()
    monkeypatch.setattr(engine.engine, "prepare_thread", lambda: 1 / 0)
    with pytest.raises(RolloutError, match="event loop of the sessions has ended: ZeroDivisionError"):
        submit(engine).result(SECONDS)
    with pytest.raises(RolloutError, match="was closed") as raised:
        submit(engine)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


# --- failures are counted, and not trained --------------------------------------------------------------------------


def test_each_failure_is_logged_once_and_counted(make, caplog):
    def kinds(number):
        return KeyError(f"number {number}") if number else None

    engine = make()
    for future in [submit(engine, number, what=kinds(number)) for number in range(25)]:
        future.result(SECONDS)
    told = [record for record in caplog.records if "number" in record.message]
    assert [bool(record.exc_info) for record in told] == [True, False]
    assert "10 sessions failed like this" in told[1].message


def test_silence_and_close_are_logged(make, caplog):
    class Hangs(Ends):
        async def step(self, action):
            await asyncio.sleep(100)

        async def close(self):
            raise KeyError("closing")

    engine = make(Hangs, limits=SessionLimits(silence=0.1))
    made = submit(engine).result(SECONDS)
    assert made.info["error"] == "Hangs.step() took longer than SessionLimits.silence, 0.1 s"
    wait_until(lambda: not engine._tasks)
    assert "Hangs.step() took longer" in caplog.text and "Hangs.close() raised KeyError" in caplog.text


def test_a_step_that_blocks_for_a_second_is_reported(make, monkeypatch, caplog):
    async def block():
        time.sleep(0.8)
        return Step(done=True)

    assert engine_file.LAG_SECONDS <= 1
    monkeypatch.setattr(engine_file, "LAG_SECONDS", 0.2)  # it looks twice a second, so it sees at least 0.3 s
    submit(make(), what=block).result(SECONDS)
    wait_until(lambda: "has blocked the event loop" in caplog.text)


@pytest.fixture(scope="module")
def group():
    made = RayClassWithInitArgs(RolloutWorker, AgentEngine, BigramEngine, environment=Ends)
    with LocalWorkerGroup(2, made, threads=True) as group:
        yield group


def manager(group):
    return RolloutManager(group, SamplingParams(4), session_reward, samples_per_prompt=2, engine_extras=["what"])


def test_rollout_of_sessions_that_all_fail_at_once_is_an_error(group):
    with pytest.raises(RolloutError, match=r"all 4 sessions .* before their first turn, 4 of them with KeyError"):
        manager(group).generate([[1], [2]], extras={"what": [KeyError("reset"), KeyError("reset")]})
    data = manager(group).generate([[1], [2]], extras={"what": [KeyError("reset"), None]})
    assert data["completion_lengths"].tolist() == [0, 0, 4, 4]


def test_batch_of_a_stream_whose_sessions_all_fail_at_once_is_an_error(group):
    def prompts(rollout_id):
        return [[1], [2]], {"what": [KeyError("reset"), KeyError("reset") if rollout_id else None]}

    made = manager(group)
    with RolloutStream(made, prompts, SampleBuffer(2)) as stream:
        with stream.updating():
            made.weight_version = None
        assert stream.take(30)["completion_lengths"].tolist() == [0, 0, 4, 4]
        with stream.updating():
            pass
        for _ in range(2):  # it has ended
            with pytest.raises(RolloutError, match=r"all 4 sessions .* before their first turn, 4 of them with KeyErr"):
                stream.take(30)


def test_failed_sessions_are_not_trained(group):
    data = manager(group).generate([[1], [2], [3]], extras={"what": [None, KeyError("step"), None]})
    assert data["loss_mask"].any(1).tolist() == [True, True, False, False, True, True]
    assert data["completion_lengths"].tolist() == [4] * 6
    assert group_numbers(data["group_ids"]).tolist() == [0, 0, 1, 1, 2, 2]


def test_failed_session_makes_its_group_no_older():
    buffer = SampleBuffer(1)
    buffer.set_version(1)
    buffer.begin()
    buffer.set_version(2)
    failed, made = (Completion([5], [-0.1], *about) for about in (("error", [1]), ("stop", [2])))
    group = GroupData([1], [failed, made], [0.0, 1.0])
    Router._put(SimpleNamespace(_buffer=buffer, _dynamic_sampling=False), 0, group)
    assert len(buffer.take(0)) == 1 and buffer.metrics()["buffer/taken_tokens"] == 2


@pytest.mark.parametrize("several", [False, True])
def test_failed_session_is_not_in_the_statistics_of_its_group(several):
    rewards = [1.0, 0.0, 3.0, 0.0]
    made = [Completion([5, 6], [-0.1] * 2, "stop") for _ in rewards]
    failed = Completion([5, 6], [-0.1] * 2, "error")
    if several:
        half = Row([1], Completion([5], [-0.1], "stop", loss_mask=[1]))
        failed = Completion([5], [-0.1], "error", rows=[half, half])
    data = collate([[1]] * 4, [*made[:3], failed], group_ids=[7] * 4, rewards=rewards)
    alone = collate([[1]] * 3, made[:3], group_ids=[7] * 3, rewards=rewards[:3])
    args = read_args({"hf_config": {"model_type": "llama"}})
    expected, found = (grpo(AdvantageRows(dict(one), estimator="grpo"), args) for one in (alone, data))
    torch.testing.assert_close(found[:3], expected)
    assert not data["loss_mask"][3:].any() and not found[3:].any() and len(found) == 4 + several
    assert data["group_ids"][:3].tolist() == [7, 7, 7] and 7 not in data["group_ids"][3:]


def test_failed_sessions_that_leave_all_others_alone_do_not_end_the_run():
    made, failed = (Completion([5, 6], [-0.1] * 2, reason) for reason in ("stop", "error"))
    data = collate([[1]] * 4, [made, failed, failed, made], group_ids=[7, 7, 8, 8], rewards=[1.0, 0.0, 0.0, 2.0])
    args = read_args({"vocab_size": 9})
    PolicyTrainWorker.check_rows(args, data, "actor", ())
    assert not grpo(AdvantageRows(dict(data), estimator="grpo"), args).any()


def test_failed_sessions_are_trained_on_demand(make):
    made = submit(make(train_failed=True), what=KeyError("step")).result(SECONDS)
    assert (made.finish_reason, made.info["end_reason"]) == ("stop", "error")
    assert is_flat([])  # dynamic sampling drops a group that failed as a whole


# --- wrong uses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("info", [{}, {"source": "web"}, "web"])
def test_column_that_replaces_the_info_of_a_session_is_named(info):
    with pytest.raises(RolloutError, match="or a column 'info' of the data replaces Completion"):
        session_reward([1], [2], info)


def lookup(key: str) -> str:
    """Look a key up."""
    return key


class Methods(ToolEnvironment):
    def lookup(self, key: str) -> str:
        """Look a key up."""
        return key


def of(**attributes):
    return type("Mine", (Methods,), attributes)


def engine_of(environment=Ends, renderer=RENDERER, **options):
    return AgentEngine(BigramEngine, environment=environment, renderer=renderer, **options)


AT_START = {
    "functions as methods": (lambda: engine_of(of(functions=(Methods.lookup,))), r"give its name, \('lookup',\)"),
    "one function": (lambda: engine_of(of(functions=staticmethod(lookup))), "expected a tuple"),
    "one text": (lambda: engine_of(of(functions=("lookup"))), "expected a tuple"),
    "no such method": (lambda: engine_of(of(functions=("look",))), "functions names 'look'"),
    "tools": (lambda: engine_of(of(tools=(lookup,))), "name it `functions`"),
    "no super": (lambda: engine_of(of(__init__=lambda self: None)), "does not call super"),
    "no docstring": (lambda: engine_of(lambda: ToolEnvironment([lambda: 1])), "needs a docstring"),
    "no renderer": (lambda: engine_of(Methods, None), "pass a renderer"),
    "renderer's name": (lambda: engine_of(renderer="qwen3"), r"load_renderer\(tokenizer, 'qwen3'\)"),
    "tokenizer": (lambda: engine_of(renderer=Characters()), "pass load_renderer"),
    "a row": (lambda: engine_of(lambda row: Ends()), "makes an Environment"),
    "no environment": (lambda: engine_of(lambda: 3), "returned 3; expected an Environment"),
    "an instance": (lambda: engine_of(Ends()), "pass a class or a function"),
    "discount": (lambda: engine_of(turn_discount="0.9"), "turn_discount='0.9'; expected a number"),
    "typo": (lambda: AgentEngine(BigramEngine(), environment=Ends, limit=1), "nothing takes the argument limit"),
    "agent": (lambda: AgentProgram(lambda row, base_url: 1), r"agent\(row, base_url, api_key\)"),
    "no agent": (lambda: AgentProgram(3), "async def"),
    "limits of sessions": (lambda: AgentProgram(lambda *_: 1, limits=SessionLimits()), "expected GatewayLimits"),
    "extras": (lambda: RolloutManager(Group(), engine_extras="answer"), r"pass a list, \['answer'\]"),
} | {
    f"result_chars={chars!r}": (lambda chars=chars: ToolEnvironment(result_chars=chars), "expected an integer above 0")
    for chars in (0, -1, "8k", None)
}


class Group:
    methods = ("generate",)


@pytest.mark.parametrize("name", AT_START)
def test_wrong_use_is_an_error_at_start(name):
    wrong, what = AT_START[name]
    with pytest.raises((TypeError, ValueError), match=what):
        wrong()


@pytest.mark.parametrize("environment", [lambda: 3, AgentProgram(lambda row, base_url, api_key: 1)])
def test_wrong_environment_is_told_before_the_engine_is_made(environment):
    """Nobody could close it, and its model may take minutes."""
    made = []
    with pytest.raises(TypeError, match=r"expected an Environment|pass a renderer"):
        AgentEngine(lambda: made.append("an engine"), environment=environment)
    assert made == []


class ReadsAnswer(Environment):
    async def step(self, action):
        return self.row["answer"]

    async def reset(self, row):
        self.row = row


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (Step("higher"), r"Ends.step\(\) returned the observation 'higher'; expected token ids"),
        (Step({"role": "user"}), "expected token ids"),
        (Step([{"content": "higher"}]), "expected token ids"),
        (Step([1.5]), "observation 1.5; expected token ids"),
        (Step(3), "observation 3; expected token ids"),
        (Step(one for one in [2]), "expected token ids"),
        (Step({2, 3}), "expected token ids"),
        (Step([2], done="yes"), "Step.done='yes'.; expected True or False"),
        (Step(done=True, reason=3), "Step.reason=3.; expected a text"),
        (Step(done=True, info=[1]), "a dict or None"),
        (1.0, "returned 1.0; expected a Step"),
    ],
)
def test_wrong_type_of_an_environment_ends_the_run(make, returned, what):
    with pytest.raises(RolloutError, match=what):
        submit(make(), what=returned).result(SECONDS)


def test_reason_of_an_environment_is_no_abort_of_its_session(make):
    made = submit(make(), what=Step(reward=1.0, done=True, reason="abort")).result(SECONDS)
    assert (made.finish_reason, made.info["end_reason"], made.session) == ("stop", "abort", None)


@pytest.mark.parametrize("reward", ["1", float("nan"), float("inf"), [1]])
def test_wrong_reward_names_the_environment(make, reward):
    made = submit(make(), what=Step(reward=reward, done=True)).result(SECONDS)
    assert made.info["end_reason"] == "error"
    assert made.info["error"].startswith("ValueError: Ends.step() returned Step(reward=...): the reward is ")


@pytest.mark.parametrize("reward", [True, 1, torch.tensor(1.0), None])
def test_rewards_are_numbers(make, reward):
    made = submit(make(), what=Step(torch.tensor([4]), reward, done=True)).result(SECONDS)
    assert made.info["reward"] == float(reward or 0)


def test_missing_column_names_engine_extras(make):
    with pytest.raises(RolloutError, match=r"no column 'answer', only 'question'; name it in RolloutManager\(engine_"):
        submit(make(ReadsAnswer), question=1).result(SECONDS)


def test_action_without_a_renderer_has_no_text():
    with pytest.raises(RolloutError, match="pass a renderer"):
        Action([1], "stop").text  # noqa: B018


def test_score_must_be_async(make):
    class Plain(ToolEnvironment):
        def score(self, action):
            return 1.0

    engine = make(Plain, lambda: ScriptEngine(lambda prompt, seed: "4"), renderer=RENDERER)
    with pytest.raises(RolloutError, match=r"Plain.score\(\) must be an `async def`"):
        engine.generate([Characters().encode("a")], SamplingParams(100), [0])


def test_a_program_has_an_hour_by_default_and_returns_a_number(make):
    async def agent(row, base_url, api_key):
        return "good"

    engine = make(AgentProgram(agent), ScriptEngine, renderer=RENDERER)
    assert engine.limits.seconds == 3600
    assert "the reward is 'good'" in submit(engine).result(SECONDS).info["error"]


def test_sandbox_names_the_time_that_was_exceeded():
    sandbox = PythonSandbox(CodeLimits(cpu_seconds=1, isolate=False))
    assert sandbox.python("while True: pass").strip() == "Error: exceeded 1 s of CPU time"


def test_the_policy_is_told_of_its_tools():
    messages = [{"role": "user", "content": "hi"}]
    expected = RENDERER.render(messages, tools=[Tool(lookup).schema], add_generation_prompt=True).token_ids
    assert render_prompt(RENDERER, messages, [lookup]) == render_prompt(RENDERER, messages, [Tool(lookup)]) == expected
    assert "Look a key up." in Characters().decode(expected)
    assert "lookup" not in Characters().decode(render_prompt(RENDERER, messages))
