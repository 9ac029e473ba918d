"""RolloutWorker and RolloutManager: on in-process groups where processes do not matter, and on Ray."""

import asyncio
import math
import pickle
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import ray
import torch
from devices import ON_DEVICE
from rollout_helpers import LLAMA, EchoEngine, ToolEngine, plain_log_probs

from single_controller import (
    Dispatch,
    DispatchError,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    StartError,
    Worker,
    WorkerError,
    WorkerFuture,
    register,
)
from workers.algorithms.advantages import group_advantages
from workers.data.collate import collate
from workers.data.rollout_data import RolloutDataError, check_rollout_data, group_numbers
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import Completion, SamplingParams
from workers.rollout.evaluation import evaluate
from workers.rollout.rollout_errors import PromptError, RewardError, RolloutError, WeightVersionError
from workers.rollout.rollout_manager import RolloutManager
from workers.rollout.rollout_worker import RolloutWorker
from workers.seeds import mixed_seed

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12], [11, 4], [1, 2, 3, 4]]
HOW = SamplingParams(10, temperature=1.5, stop_token_ids=(6, 17, 29))


class Pinned(RolloutWorker):
    """Reports the weight version that a test sets."""

    @register(Dispatch.ALL_TO_ALL)
    def set_version(self, version):
        self.weight_version = version

    @register(Dispatch.ONE_TO_ALL)
    def is_asleep(self):
        return self.engine.asleep

    @register(Dispatch.ONE_TO_ALL)
    def wait(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def take(self, rows):
        return rows


def made(engine=HFEngine, *args, cls=RolloutWorker, **kwargs):
    if engine is HFEngine and not args:
        args, kwargs = (LLAMA,), {"seed": 5, **kwargs}
    return RayClassWithInitArgs(cls, engine, *args, **kwargs)


def local(world_size=1, *args, **kwargs):
    return LocalWorkerGroup(world_size, made(*args, **kwargs))


def length_reward(prompt_ids, completion_ids):
    return len(completion_ids) + len(prompt_ids) / 10


def same(first, second):
    assert set(first.keys()) == set(second.keys())
    for name in first.keys() - {"group_ids"}:
        torch.testing.assert_close(first[name], second[name], atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def one():
    with local() as group:
        yield group


@pytest.fixture(scope="module")
def echoes():
    with local(2, EchoEngine, cls=Pinned) as group:
        yield group


@pytest.fixture(scope="module")
def on_ray(ray_cluster):
    with RayResourcePool([2], use_gpu=ON_DEVICE) as pool:
        with RayWorkerGroup(pool, made(cls=Pinned)) as group:
            yield group


def test_rollout_data_row_by_row(one):
    manager = RolloutManager(one, HOW, length_reward, samples_per_prompt=3, seed=1, pad_token_id=31)
    data = manager.generate(PROMPTS, rollout_id=2)
    check_rollout_data(data, vocab_size=32)
    engine = HFEngine(LLAMA, seed=5)
    assert data.batch_size == (15,) and group_numbers(data["group_ids"]).tolist() == [k // 3 for k in range(15)]
    assert data["min_weight_versions"].tolist() == data["max_weight_versions"].tolist() == [0] * 15
    longest = max(map(len, PROMPTS))
    lengths = set()
    for row in range(15):
        prompt = PROMPTS[row // 3]
        (completion,) = engine.generate([prompt], HOW, [mixed_seed(1, 2, row // 3, row % 3)])
        lengths.add(len(completion.token_ids))
        begin, end = longest - len(prompt), longest + len(completion.token_ids)
        width = data["input_ids"].shape[1]
        ids = [31] * begin + prompt + completion.token_ids + [31] * (width - end)
        assert data["input_ids"][row].tolist() == ids
        assert data["attention_mask"][row].tolist() == [int(begin <= k < end) for k in range(width)]
        assert data["loss_mask"][row].tolist() == [int(longest <= k < end) for k in range(width)]
        log_probs = plain_log_probs(engine.model, prompt, completion.token_ids, HOW.temperature)
        torch.testing.assert_close(data["rollout_log_probs"][row, longest:end].double(), log_probs, atol=2e-5, rtol=0)
        assert not data["rollout_log_probs"][row][data["loss_mask"][row] == 0].any()
        assert data["weight_versions"][row].tolist() == [0 if longest <= k < end else -1 for k in range(width)]
        assert data["rewards"][row] == pytest.approx(length_reward(prompt, completion.token_ids))
        assert data["prompt_lengths"][row] == len(prompt) and data["completion_lengths"][row] == len(
            completion.token_ids
        )
        assert bool(data["truncated"][row]) == (completion.finish_reason == "length")
    assert len(lengths) > 2, "the completions were meant to be ragged"


def test_groups_of_joined_rollouts_stay_apart(echoes):
    """Also of the same prompts, of a copy of the manager and of a manager with the same seed."""
    first = RolloutManager(echoes, SamplingParams(2), length_reward, samples_per_prompt=2, seed=3)
    again = RolloutManager(echoes, SamplingParams(2), length_reward, samples_per_prompt=2, seed=3)
    torch.manual_seed(0)
    data = [manager.generate([[1, 2], [3]], rollout_id=1) for manager in (first, first, again)]
    joined = torch.cat(data)
    groups, sizes = joined["group_ids"].unique(return_counts=True)
    assert len(groups) == 6 and sizes.tolist() == [2] * 6
    assert group_numbers(joined["group_ids"]).tolist() == [0, 0, 1, 1] * 3
    # Two rollouts with the rewards 0, 1 and 5, 6 of one prompt: in one group they would be below and above its mean.
    rewards = torch.tensor([0.0, 1.0, 5.0, 6.0])
    two = torch.cat([one[:2] for one in data[:2]])
    advantages = group_advantages(rewards, two["group_ids"], divide_by_std=False)
    assert advantages.tolist() == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("world_size", [2, 3, "ray"])
def test_result_does_not_depend_on_the_number_of_workers_or_where_they_run(one, world_size, request):
    other = request.getfixturevalue("on_ray") if world_size == "ray" else local(world_size)
    options = {"samples_per_prompt": 3, "seed": 1}
    with nullcontext(other) if world_size == "ray" else other as group:
        several = RolloutManager(group, HOW, length_reward, **options).generate(PROMPTS)
    same(RolloutManager(one, HOW, length_reward, **options).generate(PROMPTS), several)


def test_seed_rollout_id_and_sample_give_different_draws(one):
    def drawn(seed=1, **options):
        manager = RolloutManager(one, SamplingParams(12, 2.0), samples_per_prompt=2, seed=seed)
        return manager.generate([[1, 2], [1, 2]], **options)["input_ids"].tolist()

    rows = [*drawn(), *drawn(rollout_id=1), *drawn(seed=2)]
    assert len({tuple(row) for row in rows}) == 12
    assert drawn() == rows[:4]
    assert len({mixed_seed(*(x // n % 5 for n in (1, 5, 25, 125))) for x in range(625)}) == 625


def test_fewer_prompts_than_workers_and_no_prompts(echoes):
    manager = RolloutManager(echoes, SamplingParams(2), length_reward)
    assert manager.generate([[1, 2]])["input_ids"].tolist() == [[1, 2, 2, 1]]
    empty = manager.generate([])
    assert empty.batch_size == (0,) and empty["input_ids"].shape == (0, 0)
    check_rollout_data(empty)


def test_options_of_a_single_call(echoes):
    manager = RolloutManager(echoes, SamplingParams(2), samples_per_prompt=3)
    data = manager.generate([torch.tensor([1, 2]), [3]], sampling_params=SamplingParams(1), samples_per_prompt=1)
    assert data["input_ids"].tolist() == [[1, 2, 2], [0, 3, 3]] and "rewards" not in data.keys()  # noqa: SIM118


def test_manager_of_a_configuration(echoes):
    args = {"rollout_max_response_len": 3, "temperature": 0.5, "n_samples_per_prompt": 2, "seed": 5}
    ready = {"reward_workers": 2, "reward_timeout": 3.0, "on_reward_timeout": 0.0, "advantage_estimator": "remax"}
    group, of_args = echoes, RolloutManager.from_args
    by_hand = RolloutManager(group, SamplingParams.from_args(args), samples_per_prompt=2, seed=5)
    assert torch.equal(of_args(args, group).generate(PROMPTS)["input_ids"], by_hand.generate(PROMPTS)["input_ids"])
    assert of_args({**args, "rollout_seed": 7}, group).seed == 7
    assert len(of_args(args, group, samples_per_prompt=3, seed=1).generate([[1]])) == 3
    manager = of_args(ready, group, lambda prompt, completion: 1.0)
    assert manager.greedy_baselines and manager.rewards is not None
    assert (manager.rewards.workers, manager.rewards.timeout, manager.rewards.on_timeout) == (2, 3.0, 0.0)


def test_group_can_be_called_without_a_manager(echoes):
    found = echoes.generate([[1, 2], [3], [4]], SamplingParams(1), range(3))
    assert [(one.completion.token_ids, one.weight_version, one.rank) for one in found] == [
        ([2], 0, 0),
        ([3], 0, 0),
        ([4], 0, 1),
    ]


def test_weight_versions_are_those_of_each_token():
    completions = [
        Completion([1, 2, 3], [-1.0] * 3, "length", [4, None, 6]),
        Completion([1, 2], [-1.0] * 2, "length"),
        Completion([], [], "abort", []),
    ]
    data = collate([[7], [7, 7], [7]], completions, group_ids=[0, 1, 2], weight_versions=[5, 3, 5])
    assert data["weight_versions"].tolist() == [[-1, -1, 4, 5, 6], [-1, -1, 3, 3, -1], [-1] * 5]
    assert data["min_weight_versions"].tolist() == [4, 3, -1]
    assert data["max_weight_versions"].tolist() == [6, 3, -1]
    check_rollout_data(data.exclude("rewards"), vocab_size=32)
    with pytest.raises(RolloutDataError, match=r"weight_versions is torch.int64 \(3, 4\); expected shape \(3,\) or"):
        check_rollout_data({**data, "weight_versions": data["weight_versions"][:, 1:]})


def test_tokens_of_an_environment_do_not_count():
    completions = [
        Completion([1, 2, 3], [-1.0, 0.0, -2.0], "length", [4, None, 6], loss_mask=[1, 0, 1]),
        Completion([1, 2], [-1.0] * 2, "stop", loss_mask=[0, 0]),
        Completion([8], [-1.0], "stop"),
    ]
    data = collate([[7], [7, 7], [7]], completions, weight_versions=[5, 3, 5], rewards=[0, 1, 2])
    assert data["loss_mask"].tolist() == [[0, 0, 1, 0, 1], [0] * 5, [0, 0, 1, 0, 0]]
    assert data["loss_mask"].dtype == torch.int64 and data["attention_mask"][0].tolist() == [0, 1, 1, 1, 1]
    assert data["weight_versions"].tolist() == [[-1, -1, 4, -1, 6], [-1] * 5, [-1, -1, 5, -1, -1]]
    assert data["min_weight_versions"].tolist() == [4, -1, 5] and data["completion_lengths"].tolist() == [3, 2, 1]
    assert "group_ids" not in data.keys()  # noqa: SIM118
    check_rollout_data(data, vocab_size=32)
    half = collate([[7]], [Completion([1, 2], [0.0] * 2, "stop", loss_mask=[1, 0.5])])
    assert half["loss_mask"].tolist() == [[0, 1, 0.5]] and half["weight_versions"].tolist() == [[-1] * 3]


def test_engine_that_does_not_tell_what_was_left_is_reported_once(caplog):
    how = SamplingParams(1, top_p=0.9)
    with local(1, EchoEngine) as group:
        RolloutManager(group, SamplingParams(1, temperature=0, top_k=5)).generate(PROMPTS)
        assert "does not return" not in caplog.text
        for _ in range(2):
            RolloutManager(group, how).generate(PROMPTS)
    told = [record.message for record in caplog.records if "does not return the tokens" in record.message]
    assert len(told) == 1 and "EchoEngine" in told[0] and "top_p=0.9" in told[0] and "up to 0.11 nats" in told[0]
    caplog.clear()
    with local(1) as group:
        data = RolloutManager(group, how).generate(PROMPTS)
    assert "does not return" not in caplog.text and bool(data["sampling_mask_lengths"].any())


@pytest.mark.parametrize(("how", "told"), [({"top_p": 0.9}, True), ({"top_k": 5}, True), ({"top_k": 4}, False)])
def test_engine_that_tells_only_small_sets_is_reported(caplog, monkeypatch, how, told):
    monkeypatch.setattr(HFEngine, "largest_mask", 4)
    with local(1) as group:
        RolloutManager(group, SamplingParams(1, **how)).generate(PROMPTS)
    assert ("does not return sets of more than 4 of the tokens that top_p" in caplog.text) == told


@pytest.mark.parametrize(
    ("message", "wrong", "options"),
    [
        (r"the completion of row 0 has 1 token_ids and a loss_mask of 2; expected", {"loss_mask": [1, 0]}, {}),
        (r"2 group_ids for 1 completions", {}, {"group_ids": [0, 1]}),
    ],
)
def test_collate_says_what_does_not_fit(message, wrong, options):
    with pytest.raises(ValueError, match=message):
        collate([[7]], [Completion([1], [0.0], "stop", **wrong)], **options)


class Callable:
    def __call__(self, prompt_ids, completion_ids, *, label):
        return label


async def _later(prompt_ids, completion_ids, label):
    return label


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda prompt, completion, label: label, 0.5),
        (lambda prompt, completion: len(prompt), 1),
        (lambda prompt, completion, label=9, absent=2: label + absent, 2.5),
        (lambda prompt, completion, **columns: sum(map(len, columns)), len("label") + len("source") + len("more")),
        (lambda prompt, completion, label, **others: len(others), 2),
        (lambda source, more: len(source), 1),  # the tokens, as of any two first parameters
        (lambda prompt, more, **columns: sum(map(len, columns)), len("label") + len("source")),  # here too
        (partial(lambda prompt, completion, scale, label: scale * label, scale=4), 2),
        (Callable(), 0.5),
        (_later, 0.5),
    ],
)
def test_reward_function_gets_the_columns_that_it_names(function, expected):
    with local(1, EchoEngine) as group:
        manager = RolloutManager(group, SamplingParams(1), function)
        data = manager.generate([[1], [3]], extras={"label": [0.5, 0.5], "source": ["a", "b"], "more": [0, 0]})
        assert data["rewards"].tolist() == [expected] * 2
        manager.close()


def test_required_column_that_is_missing_is_named_before_anything_is_sent():
    with local(1, EchoEngine) as group:
        manager = RolloutManager(group, SamplingParams(1), lambda prompt, completion, label, level=0: label)
        sent = group._state.sent
        for extras, have in (({"labels": [1]}, "'labels'"), (None, "no entries"), ({"level": [1]}, "'level'")):
            with pytest.raises(RewardError, match=f"requires the column 'label', but extras has {have}"):
                manager.generate([[1]], extras=extras)
            with pytest.raises(RewardError, match="requires the column 'label'"):
                manager.generate_async([[1]], extras=extras).result()
        with pytest.raises(RewardError, match="requires the column 'label'"):
            evaluate(manager, [[1]])
        assert group._state.sent == sent
        manager.close()


@pytest.mark.parametrize("how", ["each", "batched", "processes"])
def test_engine_gets_extras_and_the_reward_function_gets_info(how, request):
    if how == "processes":
        request.getfixturevalue("ray_cluster")

    def reward(prompt_ids, completion_ids, info, label, **others):
        return info["answered"] + label + len(others)

    def of_all(prompts, completions, info, label, answer):
        return [reward(*one) for one in zip(prompts, completions, info, label, strict=True)]

    function = of_all if how == "batched" else reward
    options = {"batched_rewards": how == "batched", "reward_workers": 1 if how == "processes" else None}
    with local(2, ToolEngine) as group:
        manager = RolloutManager(
            group, SamplingParams(1), function, samples_per_prompt=2, engine_extras=["answer"], **options
        )
        extras = {"answer": [20, 30, 40], "label": [0.25, 0.5, 0.75]}
        data = manager.generate([[1, 2], [3], [4]], extras=extras)
        more = 0 if how == "batched" else 1
        assert data["rewards"].tolist() == [n + more for n in (20.25, 20.25, 30.5, 30.5, 40.75, 40.75)]
        assert data["input_ids"][2].tolist() == [0, 3, 3, 30] and data["loss_mask"][2].tolist() == [0, 0, 1, 0]
        with pytest.raises(ValueError, match="engine_extras names 'answer', but extras has 'label'"):
            manager.generate([[1]], extras={"label": [0]})
        manager.close()
    with local(1, EchoEngine) as group:  # its engine takes no extras
        manager = RolloutManager(group, SamplingParams(1), engine_extras=["answer"])
        with pytest.raises(WorkerError, match=r"unexpected keyword argument 'extras'"):
            manager.generate([[1]], extras={"answer": [1]})


def test_info_of_extras_and_no_info(echoes):
    manager = RolloutManager(echoes, SamplingParams(1), lambda prompt, completion, info: info["x"] if info else 0)
    assert manager.generate([[1], [2]])["rewards"].tolist() == [0, 0]
    assert manager.generate([[1], [2]], extras={"info": [{"x": 3}, {"x": 4}]})["rewards"].tolist() == [3, 4]


def test_default_engine_with_keyword_arguments():
    with LocalWorkerGroup(1, RayClassWithInitArgs(RolloutWorker, model=LLAMA, seed=5)) as group:
        assert RolloutManager(group, SamplingParams(3)).generate([[1, 2]])["input_ids"].shape == (1, 5)


@pytest.mark.parametrize("batched", [False, True])
def test_extras_are_passed_to_the_reward_function(echoes, batched):
    def each(prompt_ids, completion_ids, label, weight):
        return weight * (completion_ids[0] == label)

    def all_at_once(prompts, completions, label, weight):
        return torch.tensor([each(*one) for one in zip(prompts, completions, label, weight, strict=True)])

    function = all_at_once if batched else each
    manager = RolloutManager(echoes, SamplingParams(2), function, samples_per_prompt=2, batched_rewards=batched)
    data = manager.generate([[1, 2], [3, 4]], extras={"label": [2, 9], "weight": torch.tensor([0.5, 2.0])})
    assert data["rewards"].tolist() == [0.5, 0.5, 0, 0] and data["rewards"].dtype is torch.float32


def test_async_reward_function_runs_for_all_samples_at_once(echoes):
    waiting = []

    async def reward(prompt_ids, completion_ids):
        waiting.append(None)
        while len(waiting) < 6:  # this only ends if the others are running
            await asyncio.sleep(0.001)
        return prompt_ids[0]

    async def in_a_loop():  # as in a notebook, whose thread has a running loop
        return RolloutManager(echoes, SamplingParams(2), reward, samples_per_prompt=3).generate([[1], [2]])

    assert asyncio.run(in_a_loop())["rewards"].tolist() == [1, 1, 1, 2, 2, 2]

    async def batched(prompts, completions):
        return [len(prompts)] * len(completions)

    manager = RolloutManager(echoes, SamplingParams(2), batched, batched_rewards=True)
    assert manager.generate([[1], [2]])["rewards"].tolist() == [2, 2]


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (100, 20), (None, 20)])
@pytest.mark.parametrize("starts", ["when awaited", "when called"])
def test_concurrency_of_an_async_reward_function_is_bounded(echoes, concurrency, most, starts):
    """Also if calling the function starts the work, as with a remote judge, and rewards keep their order."""
    running, seen = set(), []

    async def judge(number):
        for _ in range(4 - number % 3):
            await asyncio.sleep(0)
        running.discard(number)
        return number

    def called(prompt_ids, completion_ids):
        running.add(prompt_ids[0])
        seen.append(len(running))
        return judge(prompt_ids[0])

    async def awaited(prompt_ids, completion_ids):
        return await called(prompt_ids, completion_ids)

    reward = called if starts == "when called" else awaited
    manager = RolloutManager(echoes, SamplingParams(2), reward, reward_concurrency=concurrency)
    prompts = [[number] for number in range(1, 21)]
    assert manager.generate(prompts)["rewards"].tolist() == [float(prompt) for (prompt,) in prompts]
    assert max(seen) == most and len(seen) == 20 and not running


@pytest.mark.parametrize("is_async", [False, True])
def test_reward_function_error_names_the_sample(echoes, is_async):
    def reward(prompt_ids, completion_ids):
        return 1 / (prompt_ids[0] - 2)

    async def later(prompt_ids, completion_ids):
        return reward(prompt_ids, completion_ids)

    manager = RolloutManager(echoes, SamplingParams(2), later if is_async else reward, samples_per_prompt=2)
    with pytest.raises(RewardError, match=r"ZeroDivisionError.* for row 2: prompt 1, sample 0") as caught:
        manager.generate([[1], [2]])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.row, copy.prompt, copy.sample, str(copy)) == (2, 1, 0, str(caught.value))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_cancelled_reward_function_is_a_reward_error(echoes, is_async, batched, caplog):
    def reward(prompts, completions):
        raise asyncio.CancelledError("by the judge's client")

    async def later(prompts, completions):
        if prompts == [1]:  # still waits when the other one fails
            await asyncio.sleep(60)
        return reward(prompts, completions)

    function = later if is_async else reward
    manager = RolloutManager(echoes, SamplingParams(2), function, batched_rewards=batched)
    where = "for 2 samples" if batched else f"for row {int(is_async)}: prompt"
    with pytest.raises(RewardError, match=f"raised CancelledError: by the judge's client {where}"):
        manager.generate([[1], [2]])
    assert "exception" not in caplog.text  # of the one that waited, which nobody asked for


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1.0", [1, 2]], ids=repr)
def test_invalid_rewards_are_rejected(echoes, value):
    manager = RolloutManager(echoes, SamplingParams(2), lambda prompt, completion: value if prompt == [2] else True)
    with pytest.raises(RewardError, match=r"returned .* for row 1: prompt 1, sample 0, a completion of 2 tokens"):
        manager.generate([[1], [2]])


def test_invalid_calls(echoes):
    manager = RolloutManager(echoes)
    for prompts, message in (
        ([[0.5]], "prompt 0 must be a list of token ids"),
        (torch.zeros(2, 2, 2).long(), "prompt 0 must be a list of token ids"),
    ):
        with pytest.raises(PromptError, match=message):
            manager.generate(prompts)
    for extras in ({"label": [1]}, {"label": "ab"}, {"label": 3}):
        with pytest.raises(ValueError, match=r"'label'.* must have one value for each of 2 prompts"):
            manager.generate([[1], [2]], extras=extras)
    with pytest.raises(ValueError, match="samples_per_prompt=0"):
        manager.generate([[1]], samples_per_prompt=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_error_of_a_rejected_prompt_has_its_number(world_size):
    with local(world_size, HFEngine, LLAMA) as group:
        manager = RolloutManager(group, SamplingParams(4), samples_per_prompt=3)
        with pytest.raises(
            PromptError, match="prompt 2 has token ids from 1 to 99, but the model's vocab_size is 32"
        ) as caught:
            manager.generate([[1], [2], [1, 99], [3]])
        assert caught.value.number == 2 and pickle.loads(pickle.dumps(caught.value)).number == 2
        assert len(manager.generate([[1], [2]])) == 6


def test_invalid_and_failing_engines():
    with pytest.raises(StartError, match=r"RayClassWithInitArgs\(RolloutWorker, HFEngine, config\)"):
        local(1, LLAMA)
    with pytest.raises(StartError, match="returned a dict, which is not a RolloutEngine"):
        local(1, dict)
    with local(1, EchoEngine, mistake="short") as group:
        with pytest.raises(WorkerError, match=r"EchoEngine.generate\(\) returned 1 completions for 2 prompts"):
            RolloutManager(group).generate([[1], [2]])
    for mistake, message in (
        (lambda completions: (one for one in completions), "<generator"),
        (lambda completions: [completions[0], [1, 2]], r"\[1, 2\] for prompt 1; expected a Completion"),
        (
            lambda completions: [completions[0], replace(completions[1], log_probs=[])],
            "16 token_ids and 0 log_probs for prompt 1",
        ),
        (
            lambda completions: [replace(one, finish_reason="eos") for one in completions],
            "finish_reason='eos' for prompt 0",
        ),
    ):
        with local(1, EchoEngine, mistake=mistake) as group:
            with pytest.raises(WorkerError, match=rf"EchoEngine.generate\(\) returned {message}"):
                RolloutManager(group).generate([[1], [2]])
    with local(1, EchoEngine, mistake="raises") as group:
        future = RolloutManager(group).generate_async([[1]])
        with pytest.raises(WorkerError, match="out of paper"):
            future.result(timeout=20)


def test_error_names_workers_with_other_weights(echoes):
    manager = RolloutManager(echoes, SamplingParams(2))
    echoes.set_version([4, 4])
    assert manager.generate([[1], [2]])["max_weight_versions"].tolist() == [4, 4]  # no version was requested
    manager.weight_version = 4
    assert manager.generate([[1], [2]])["max_weight_versions"].tolist() == [4, 4]
    echoes.set_version([4, 3])
    with pytest.raises(WeightVersionError, match="weight version 4, but rank 1 has version 3") as caught:
        manager.generate([[1], [2]])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.expected, copy.versions) == (4, {1: 3})
    manager.weight_version = None
    with pytest.raises(WeightVersionError, match="one weight version, but rank 0 has version 4, rank 1 has version 3;"):
        manager.generate([[1], [2]])
    echoes.set_version([None, 4])
    with pytest.raises(WeightVersionError, match="complete weights, but rank 0 has none;"):
        manager.generate([[1], [2]])
    echoes.set_version([0, 0])
    assert manager.generate([[1]])["max_weight_versions"].tolist() == [0]


def test_async_rollout_uses_the_weights_at_the_time_of_the_call(on_ray):
    manager = RolloutManager(on_ray, SamplingParams(2), length_reward)
    manager.weight_version = 0
    on_ray.wait.remote(0.5)
    future = manager.generate_async([[1], [2]])
    on_ray.set_version.remote([1, 1])  # the next update, sent while the rollout is running
    manager.weight_version = 1
    assert not future.done()
    data = future.result(timeout=60)
    assert data["max_weight_versions"].tolist() == [0, 0] and data["rewards"].tolist() == pytest.approx([2.1, 2.1])
    assert manager.generate([[1]])["max_weight_versions"].tolist() == [1]
    on_ray.set_version([0, 0])


def test_future_of_a_rollout_is_a_future_of_this_library(on_ray, echoes, monkeypatch):
    manager = RolloutManager(on_ray, SamplingParams(2), length_reward)
    expected = manager.generate([[1], [2]])
    future = manager.generate_async([[1], [2]])
    assert isinstance(future, WorkerFuture)
    same(ray.get(future.refs)[0], expected)
    assert future.refs is future.refs

    async def main():
        return await manager.generate_async([[1], [2]]), await asyncio.wrap_future(manager.generate_async([[1], [2]]))

    for data in asyncio.run(main()):
        same(data, expected)
    same(on_ray.take(manager.generate_async([[1], [2]])), expected)
    rows = {"data": manager.generate_async([[1], [2]]), "number": [1, 2]}
    found = on_ray.take(rows)
    same(found["data"], expected)
    with pytest.raises(PromptError):
        manager.generate_async([[]])
    in_process = RolloutManager(echoes, SamplingParams(2)).generate_async([[1]])
    assert in_process.result(timeout=20) is in_process.result()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(DispatchError, match=r"generate\(\) has no references without Ray; pass future.result\(\)"):
        _ = in_process.refs


def test_async_rollouts_are_rewarded_one_at_a_time(echoes):
    now = threading.Semaphore(1)

    def reward(prompt_ids, completion_ids):
        assert now.acquire(blocking=False)
        time.sleep(0.02)
        now.release()
        return 0.0

    manager = RolloutManager(echoes, SamplingParams(2), reward)
    futures = [manager.generate_async([[1], [2]], rollout_id=k) for k in range(3)]
    assert all(len(future.result(timeout=20)) == 2 for future in futures)


def test_offload_and_onload(echoes):
    """An `EchoEngine` does not declare that it keeps its weights."""
    manager, before = RolloutManager(echoes), echoes.current_weight_version()
    for offload, onload in ((manager.offload, manager.onload), (echoes.offload, echoes.onload)):
        offload()
        assert echoes.is_asleep() == [True, True] and echoes.current_weight_version() == [None, None]
        onload()
        assert echoes.is_asleep() == [False, False]
    with pytest.raises(WeightVersionError, match="the rollout needs complete weights"):
        manager.generate([[1]])
    echoes.set_weight_version(before[0])


class Trainer(Worker):
    """A worker that receives a manager, as with `set_rollout_manager`."""

    @register(Dispatch.ONE_TO_ALL)
    def roll(self, manager):
        data = manager.generate([[1, 2], [3]], rollout_id=7)
        return data["input_ids"], data["rewards"], type(manager.group).__name__


def test_manager_can_be_sent_to_another_process(on_ray):
    manager = RolloutManager(on_ray, HOW, lambda prompt, completion: len(completion), seed=4)
    manager.weight_version = 0
    expected = manager.generate([[1, 2], [3]], rollout_id=7)
    with (
        RayResourcePool([1], use_gpu=ON_DEVICE) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Trainer)) as trainers,
    ):
        ((ids, rewards, kind),) = trainers.roll(manager)
        assert torch.equal(ids, expected["input_ids"]) and torch.equal(rewards, expected["rewards"])
        assert kind == "RayWorkerGroup"
    manager.sessions.append({"turns": 3})  # `reward_metrics` of one process tells of it
    copy = pickle.loads(pickle.dumps(manager))
    assert not copy.sessions and len(manager.sessions) == 1
    assert (copy.seed, copy.weight_version, copy.sampling_params) == (4, 0, HOW)


def test_unpicklable_reward_function_is_left_out(on_ray):
    lock = threading.Lock()
    copy = ray.cloudpickle.loads(ray.cloudpickle.dumps(RolloutManager(on_ray, HOW, lambda p, a: lock.locked())))
    assert copy.group.world_size == 2
    with pytest.raises(RolloutError, match="cannot be pickled"):
        copy.generate([[1]])


def test_column_of_pandas_is_read_by_position(echoes):
    pandas = pytest.importorskip("pandas")
    manager = RolloutManager(echoes, SamplingParams(1), lambda prompt, completion, label: label)
    column = pandas.Series([2.0, 9.0], index=[1, 0])
    assert manager.generate([[1], [2]], extras={"label": column})["rewards"].tolist() == [2.0, 9.0]
    with pytest.raises(ValueError, match="must have one value for each of 2 prompts"):
        manager.generate([[1], [2]], extras={"label": {0: 1, 5: 2}})
