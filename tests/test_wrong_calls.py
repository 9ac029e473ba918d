"""Wrong calls of what is around a group: engines, rollouts, rewards, training, weights. Each message says what to do.

`test_bad_calls.py` has those of groups, modes and pools, for which workers must run; here nothing starts a process.
"""

import re

import pytest
import torch
from byte_tokens import byte_tokenizer
from rollout_helpers import BigramEngine

from dispatch import Dispatch, Layout, register
from single_controller import (
    ClassWithInitArgs,
    DispatchError,
    LocalWorkerGroup,
    ResourcePoolManager,
    StartError,
    Worker,
)
from workers import (
    AgentEngine,
    Completion,
    DataError,
    Environment,
    HFEngine,
    HTTPEngine,
    LoraSettings,
    ModelFilesError,
    PromptData,
    PromptError,
    RayTrainGroup,
    RewardError,
    RewardRunner,
    RolloutManager,
    RolloutStream,
    RolloutWorker,
    RunLog,
    SampleBuffer,
    SamplingParams,
    SFTData,
    TokenRenderer,
    Tool,
    TrainArgsError,
    WeightBackup,
    WeightSender,
    collate,
    evaluate,
    exact_match,
    export_hf,
    open_rows,
    read_args,
    register_advantage,
    register_policy_loss,
    render_prompt,
    text_reward,
)
from workers.recovery.weight_backup import BackupError

SHORT = SamplingParams(2)
TEXTS = byte_tokenizer()
LLAMA = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}


class Mine(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x


def reward(prompt_ids, completion_ids):
    return 1.0


class Kit:
    """What the calls are made on."""

    def __init__(self):
        self.engine = BigramEngine()
        self.group = LocalWorkerGroup(1, ClassWithInitArgs(RolloutWorker, BigramEngine))
        self.other = LocalWorkerGroup(1, ClassWithInitArgs(Mine))
        self.manager = RolloutManager(self.group, SHORT, reward)

    def rewarded(self, function, **options):
        """Generate with a reward function."""
        extras = options.pop("extras", None)
        return RolloutManager(self.group, SHORT, function, **options).generate([[1]], extras=extras)

    def close(self):
        for thing in (self.engine, self.group, self.other):
            thing.close()


@pytest.fixture(scope="module")
def kit():
    kit = Kit()
    yield kit
    kit.close()


generate = "pass a list with the token ids of each prompt"
ids = r"must be a list of token ids \(integers\)"

# fmt: off
CALLS = {
    # SamplingParams
    "no new tokens": (ValueError, "max_new_tokens=0; expected an integer of at least 1", lambda k: SamplingParams(0)),
    "half a token": (ValueError, "max_new_tokens=4.5; expected an integer", lambda k: SamplingParams(4.5)),
    "cold": (ValueError, "temperature=-1; expected a number of at least 0", lambda k: SamplingParams(temperature=-1)),
    "nan": (ValueError, "temperature=nan; expected", lambda k: SamplingParams(temperature=float("nan"))),
    "top_p of 0": (ValueError, "top_p=0; expected a number above 0 and at most 1", lambda k: SamplingParams(top_p=0)),
    "top_k of -1": (ValueError, "top_k=-1; expected an integer of at least 0", lambda k: SamplingParams(top_k=-1)),
    "one stop token": (ValueError, "stop_token_ids=2; expected a sequence", lambda k: SamplingParams(stop_token_ids=2)),
    "stop text": (ValueError, "expected a sequence of token ids", lambda k: SamplingParams(stop_token_ids=["</s>"])),
    # engines
    "one flat prompt": (PromptError, "prompt 0 .*must be a sequence of token ids",
                        lambda k: k.engine.generate([1, 2], SHORT, [0, 0])),
    "text": (PromptError, "must be a sequence of token ids", lambda k: k.engine.generate(["hello"], SHORT, [0])),
    "no seeds": (ValueError, "0 seeds; expected one seed per prompt", lambda k: k.engine.generate([[1]], SHORT, [])),
    "one seed": (ValueError, "expected a list of one seed per prompt", lambda k: k.engine.generate([[1]], SHORT, 0)),
    "half a seed": (ValueError, "seed=0.5; expected an integer", lambda k: k.engine.submit([1], SHORT, "a", seed=0.5)),
    "dict of params": (TypeError, r"pass SamplingParams\(", lambda k: k.engine.generate([[1]], {"top_k": 1}, [0])),
    "number as id": (TypeError, "request_id is 5; expected a str", lambda k: k.engine.submit([1], SHORT, 5, seed=0)),
    "partial as list": (TypeError, "pass the Completion of an earlier request",
                        lambda k: k.engine.submit([1], SHORT, "a", seed=0, partial=[1])),
    "long prompt": (PromptError, "exceeds the model's 512 positions; shorten it, or lower max_new_tokens",
                    lambda k: k.engine.generate([[1] * 600], SHORT, [0])),
    "unknown token": (PromptError, "vocab_size is 32; use its own tokenizer",
                      lambda k: k.engine.generate([[99]], SHORT, [0])),
    "pause": (ValueError, "expected 'keep', 'abort' or 'wait'", lambda k: k.engine.pause("later")),
    "abort of a text": (TypeError, r"pass a list of ids, \['a'\]", lambda k: k.engine.abort("a")),
    "no model": (ValueError, "expected a Hugging Face config, a dict of one, a folder", lambda k: HFEngine(None)),
    "dict without type": (ModelFilesError, "no 'model_type'; add it, such as 'llama'", lambda k: HFEngine({"a": 8})),
    "misspelt field": (ModelFilesError, "did you mean 'hidden_size'", lambda k: HFEngine({**LLAMA, "hiden_size": 8})),
    "folder": (OSError, "HFEngine: model='/no/such': there is no such folder on", lambda k: HFEngine("/no/such")),
    "url": (ValueError, "expected an address such as 'http://127.0.0.1:8000'", lambda k: HTTPEngine("127.0.0.1:8000")),
    "dialect": (ValueError, "expected one of 'vllm', 'openai'", lambda k: HTTPEngine("http://localhost", dialect="x")),
    # rollouts
    "no group": (TypeError, "group must be a worker group of RolloutWorker", lambda k: RolloutManager(None)),
    "other group": (TypeError, "group must be a worker group of RolloutWorker", lambda k: RolloutManager(k.other)),
    "manager's params": (TypeError, "must be a SamplingParams or None",
                         lambda k: RolloutManager(k.group, {"top_k": 1})),
    "manager's seed": (ValueError, "seed='x'; expected an integer", lambda k: RolloutManager(k.group, seed="x")),
    "manager's timeout": (ValueError, "timeout is a positive number", lambda k: RolloutManager(k.group, timeout=-1)),
    "padding": (ValueError, "pad_token_id=None; expected", lambda k: RolloutManager(k.group, pad_token_id=None)),
    "no samples": (ValueError, "samples_per_prompt=0: expected",
                   lambda k: RolloutManager(k.group, samples_per_prompt=0)),
    "no prompts": (TypeError, generate, lambda k: k.manager.generate(None)),
    "a text": (TypeError, generate, lambda k: k.manager.generate("hello")),
    "texts": (PromptError, f"prompt 0 {ids}", lambda k: k.manager.generate(["hello"])),
    "flat": (PromptError, f"prompt 0 {ids}", lambda k: k.manager.generate([1, 2])),
    "floats": (PromptError, f"prompt 0 {ids}", lambda k: k.manager.generate([torch.tensor([1.0])])),
    "empty": (PromptError, "prompt 1 is empty; it must have", lambda k: k.manager.generate([[1], []])),
    "other vocabulary": (PromptError, "prompt 1 .*use its own tokenizer", lambda k: k.manager.generate([[1], [99]])),
    "labels": (ValueError, r"extras\['label'\] must have one value for each of 1 prompts",
               lambda k: k.manager.generate([[1]], extras={"label": [1, 2]})),
    "list of labels": (TypeError, "pass a dict with one value per prompt",
                       lambda k: k.manager.generate([[1]], extras=[1])),
    "column as a keyword": (TypeError, r"generate\(\) got an unexpected keyword argument 'label'; known are .*extras",
                            lambda k: k.manager.generate([[1]], label=[1])),
    "misspelt keyword": (TypeError, r"generate_async\(\) got .*'extra'; did you mean 'extras'",
                         lambda k: k.manager.generate_async([[1]], extra={"label": [1]})),
    "call's params": (TypeError, "must be a SamplingParams", lambda k: k.manager.generate([[1]], sampling_params=4)),
    "engine": (StartError, "engine must be a RolloutEngine class or a function that returns an engine.*pass the class",
               lambda k: LocalWorkerGroup(1, ClassWithInitArgs(RolloutWorker, 3))),
    "engine made here": (DispatchError, "cannot be pickled.*build it on the worker",
                         lambda k: LocalWorkerGroup(1, ClassWithInitArgs(RolloutWorker, k.engine))),
    "stream": (TypeError, r"a function \(rollout id\) -> prompts, and a SampleBuffer",
               lambda k: RolloutStream(k.manager, None, 4)),
    "buffer": (ValueError, "expected one of fifo, window", lambda k: SampleBuffer(1, order="lifo")),
    # rewards
    "reward of None": (RewardError, "returned None for row 0.*expected a finite number", lambda k: k.rewarded(print)),
    "reward as a list": (RewardError, "expected a finite number", lambda k: k.rewarded(lambda p, c: [1.0])),
    "parameters": (RewardError, r"called as function\(prompt_ids, completion_ids, label=\.\.\.\)",
                   lambda k: k.rewarded(lambda prompt, ids, label: label + "", extras={"label": [1]})),
    "one for all": (RewardError, "for 1 samples; expected one number each",
                    lambda k: k.rewarded(reward, batched_rewards=True)),
    "no function": (TypeError, "reward_function must be a function or None", lambda k: RewardRunner(5)),
    "concurrency": (ValueError, "reward_concurrency=0: expected an integer",
                    lambda k: RewardRunner(reward, concurrency=0)),
    "plain timeout": (ValueError, "Set reward_workers to run it in processes",
                      lambda k: RewardRunner(reward, timeout=3)),
    "evaluation of a group": (TypeError, "pass a RolloutManager", lambda k: evaluate(k.group, [[1]])),
    "without rewards": (ValueError, "pass reward_function", lambda k: evaluate(RolloutManager(k.group), [[1]])),
    "of nothing": (ValueError, "there are no prompts; pass", lambda k: evaluate(k.manager, [])),
    "ks": (ValueError, "ks has 2; expected 1 to samples_per_prompt=1", lambda k: evaluate(k.manager, [[1]], ks=[2])),
    "confidence": (ValueError, "a number between 0 and 1", lambda k: evaluate(k.manager, [[1]], confidence=95)),
    "sampling of an evaluation": (TypeError, "must be a SamplingParams",
                                  lambda k: evaluate(k.manager, [[1]], sampling_params={"temperature": 1})),
    "rollout id": (TypeError, "rollout_id='a'; pass the number of the rollout",
                   lambda k: k.manager.generate([[1]], rollout_id="a")),
    "text reward by name": (TypeError, r"function='exact_match'; pass text_reward\(number_match, tokenizer\)",
                            lambda k: text_reward("exact_match", TEXTS)),
    "no tokenizer": (TypeError, "tokenizer=None; pass text_reward", lambda k: text_reward(exact_match, None)),
    "label of None": (ValueError, "the label None is no text", lambda k: exact_match("a", None)),
    # rollout data and files
    "tuple as completion": (TypeError, r"completion 0 is .*pass Completion\(ids, log_probs, 'stop'\)",
                            lambda k: collate([[1]], [([2], [0.0])])),
    "prompts without completions": (ValueError, "2 prompts for 1 completions; expected one each",
                                    lambda k: collate([[1], [2]], [Completion([3], [0.0], "stop")])),
    "log-probabilities": (ValueError, "row 0 has 2 token_ids and .*one number per token",
                          lambda k: collate([[1]], [Completion([2, 3], [0.0], "stop")])),
    "misspelt parameter": (TypeError, "'max_tokens'; did you mean 'max_new_tokens'",
                           lambda k: SamplingParams(max_tokens=5)),
    "file instead of rows": (TypeError, r"PromptData: rows='train.jsonl'; pass open_rows\(",
                             lambda k: PromptData("train.jsonl", batch_size=1)),
    "list instead of rows": (TypeError, r"SFTData: rows=\[.*pass open_rows\(",
                             lambda k: SFTData([{"prompt": [1], "completion": [2]}], batch_size=1)),
    "other column": (DataError, r"row 1: has no 'prompt' \(input_key\); it has 'text'",
                     lambda k: PromptData(open_rows([{"text": [1]}]), batch_size=1)(0)),
    "texts without tokenizer": (DataError, "there is no tokenizer: set hf_checkpoint",
                                lambda k: PromptData(open_rows([{"prompt": "hello"}]), batch_size=1)(0)),
    # agents
    "messages as text": (TypeError, r"messages='hello'; pass a list, \[\{'role': 'user'",
                         lambda k: render_prompt(TokenRenderer(TEXTS), "hello")),
    "one tool": (TypeError, "tools=<function .*; pass a list of functions",
                 lambda k: render_prompt(TokenRenderer(TEXTS), [{"role": "user", "content": "x"}], reward)),
    "tool": (TypeError, r"Tool\(3\): pass a function with a docstring", lambda k: Tool(3)),
    "undescribed tool": (TypeError, "the tool reward needs a docstring", lambda k: Tool(reward)),
    "engine by name": (TypeError, "engine='HFEngine'; pass the class of the engine",
                       lambda k: AgentEngine("HFEngine", environment=Environment)),
    "limits as a dict": (TypeError, r"limits=\{'turns': 3\}; expected SessionLimits\(",
                         lambda k: AgentEngine(k.engine, environment=Environment, limits={"turns": 3})),
    # RayTrainGroup and its arguments
    "death": (ValueError, "expected 'replace' or 'shrink'", lambda k: RayTrainGroup({}, 1, 1, on_death="ignore")),
    "pg": (TypeError, r"pg is 5; pass a RayResourcePool, \(placement_group", lambda k: RayTrainGroup({}, 1, 1, 5)),
    "resources": (ValueError, "Pass resources= with it", lambda k: RayTrainGroup({}, 1, 1, num_resources_per_node=2)),
    "replay": (TrainArgsError, "leave one of them out",
               lambda k: read_args({"use_routing_replay": True, "routing_replay": "R3"})),
    "lambda": (ValueError, "not at the top of its module", lambda k: register_advantage("x")(lambda r, a: 1)),
    "bare decorator": (TypeError, r"write it in parentheses", lambda k: register_advantage(reward)),
    "no loss": (TypeError, "is for a function at the top of a module", lambda k: register_policy_loss("x")(3)),
    "lora": (ValueError, "expected rank >= 1", lambda k: LoraSettings(rank=0)),
    "log": (TypeError, "pass a path, or None", lambda k: RunLog(3)),
    "export": (TypeError, "pass a TrainModel", lambda k: export_hf(None, "/x")),
    # weights
    "proof": (ValueError, "use one of 'fingerprint', 'full', 'none'",
              lambda k: WeightSender("store", k.manager, verify="y")),
    "no receivers": (TypeError, "must be a group of rollout workers.*got None", lambda k: WeightSender("store", None)),
    "other receivers": (TypeError, "got 3", lambda k: WeightSender("store", [k.group, 3])),
    "receivers later": (TypeError, "got None", lambda k: WeightSender("store", k.group).connect(None)),
    "snapshot": (BackupError, r"Call copy\('old'\) to take one", lambda k: WeightBackup(lambda: []).restore("old")),
    # futures and many batches
    "item of a future": (TypeError, r"^add\(\) has returned a future, not its value; use .result\(\) or `await`",
                         lambda k: k.other.add.remote(1)[0]),
    "length of a future": (TypeError, r"add\(\) has returned a future.*use .result\(\)",
                           lambda k: len(k.other.add.remote(1))),
    "items of a future": (TypeError, r"add\(\) has returned a future.*use .result\(\)",
                          lambda k: list(k.other.add.remote(1))),
    "future of a rollout": (TypeError, r"generate\(\) has returned a future.*use .result\(\)",
                            lambda k: k.manager.generate_async([[1]])["rewards"]),
    "seconds as text": (TypeError, "timeout='5'; pass a number of seconds",
                        lambda k: k.other.add.remote(1).result("5")),
    "method of the class": (TypeError, r"map\(\): method is <function .*pass a method of the group, group.score",
                            lambda k: k.other.map(Mine.add, [1])),
    "number of batches": (TypeError, "batches is 5; pass a list or generator of batches",
                          lambda k: k.other.map(k.other.add, 5)),
    # layouts, modes, groups and pools
    "axes": (ValueError, r"pass a dict of coordinates, such as \{'dp': \[0, 1\]\}", lambda k: Layout([0, 1])),
    "size of an axis": (ValueError, "the coordinate of each rank", lambda k: Layout({"dp": 2})),
    "mapping": (ValueError, "known are a", lambda k: ResourcePoolManager({"a": [1]}, {"role": "b"})),
    "option": (TypeError, "'timeot'; did you mean 'timeout'", lambda k: k.other.add.options(timeot=5)),
    "option as an argument": (TypeError, r"'timeout'; as an option it is \.options\(timeout=\.\.\.\)\(\.\.\.\)",
                              lambda k: k.other.add(1, timeout=5)),
    "register": (TypeError, r"register\(\) got .*'dispatch'; did you mean 'dispatch_mode'",
                 lambda k: register(dispatch=Dispatch.ONE_TO_ALL)),
}
# fmt: on


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_message_says_what_to_do(kit, call):
    error, says, wrong = call
    with pytest.raises(error) as caught:
        wrong(kit)
    assert re.search(says, str(caught.value), re.DOTALL), str(caught.value)


def test_good_calls_work_afterwards(kit):
    """None of the wrong calls has left anything behind."""
    assert kit.engine.generate([[1]], SHORT, [0])[0].finish_reason == "length"
    assert len(kit.manager.generate([[1], [2]])) == 2
    assert kit.other.add(1) == [1]
    assert evaluate(kit.manager, [[1]])["eval/mean@1"] == 1.0
