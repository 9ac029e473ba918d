"""RolloutWorker and RolloutManager: on groups in this process where processes do not matter, and on Ray."""

import asyncio
import math
import pickle
import threading
import time
from dataclasses import replace

import pytest
import ray
import torch
from rollout_kit import LLAMA, EchoEngine, plain_log_probs, plain_model

from single_controller import (
    Broadcast,
    Dispatch,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    StartError,
    Worker,
    WorkerError,
    register,
)
from workers.rollout.engine import Sampling
from workers.rollout.errors import PromptError, RewardError, RolloutError, WeightVersionError
from workers.rollout.hf_engine import HFEngine
from workers.rollout.manager import RolloutManager
from workers.rollout.worker import RolloutWorker
from workers.seeds import mixed_seed
from workers.train.rollout_data import check_rollout_data

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12], [11, 4], [1, 2, 3, 4]]
HOW = Sampling(10, temperature=1.5, stop_token_ids=(6, 17, 29))


class Pinned(RolloutWorker):
    """Its weights are of whatever version it is told to have."""

    @register(Dispatch.ALL_TO_ALL)
    def set_version(self, version):
        self.weight_version = version

    @register(Dispatch.ONE_TO_ALL)
    def is_asleep(self):
        return self.engine.asleep

    @register(Dispatch.ONE_TO_ALL)
    def wait(self, seconds):
        time.sleep(seconds)


def made(engine=HFEngine, *args, cls=RolloutWorker, **kwargs):
    if engine is HFEngine and not args:
        args, kwargs = (LLAMA,), {"seed": 5, **kwargs}
    return RayClassWithInitArgs(cls, engine, *args, **kwargs)


def local(world_size=1, *args, **kwargs):
    return LocalWorkerGroup(world_size, made(*args, **kwargs))


def length_reward(prompt_ids, answer_ids):
    return len(answer_ids) + len(prompt_ids) / 10


def same(first, second):
    assert set(first.keys()) == set(second.keys())
    for name in first.keys():  # noqa: SIM118  (a TensorDict has no `in`)
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
    with RayResourcePool([2], use_gpu=False) as pool:
        with RayWorkerGroup(pool, made(cls=Pinned)) as group:
            yield group


def test_rollout_data_row_by_row(one):
    manager = RolloutManager(one, HOW, length_reward, samples_per_prompt=3, seed=1, pad_token_id=31)
    data = manager.generate(PROMPTS, rollout_id=2)
    check_rollout_data(data, vocab_size=32)
    engine = HFEngine(LLAMA, seed=5)
    assert data.batch_size == (15,) and data["group_ids"].tolist() == [k // 3 for k in range(15)]
    assert data["weight_versions"].tolist() == [0] * 15
    longest = max(map(len, PROMPTS))
    lengths = set()
    for row in range(15):
        prompt = PROMPTS[row // 3]
        (answer,) = engine.generate([prompt], HOW, [mixed_seed(1, 2, row // 3, row % 3)])
        lengths.add(len(answer.token_ids))
        begin, end = longest - len(prompt), longest + len(answer.token_ids)
        width = data["input_ids"].shape[1]
        ids = [31] * begin + prompt + answer.token_ids + [31] * (width - end)
        assert data["input_ids"][row].tolist() == ids
        assert data["attention_mask"][row].tolist() == [int(begin <= k < end) for k in range(width)]
        assert data["loss_mask"][row].tolist() == [int(longest <= k < end) for k in range(width)]
        log_probs = plain_log_probs(engine.model, prompt, answer.token_ids, HOW.temperature)
        torch.testing.assert_close(data["rollout_log_probs"][row, longest:end].double(), log_probs, atol=2e-5, rtol=0)
        assert not data["rollout_log_probs"][row][data["loss_mask"][row] == 0].any()
        assert data["rewards"][row] == pytest.approx(length_reward(prompt, answer.token_ids))
        assert data["prompt_lengths"][row] == len(prompt) and data["answer_lengths"][row] == len(answer.token_ids)
        assert bool(data["truncated"][row]) == (answer.finish_reason == "length")
    assert len(lengths) > 2, "the answers were meant to be ragged"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_number_of_workers_does_not_matter(one, world_size):
    with local(world_size) as group:
        several = RolloutManager(group, HOW, length_reward, samples_per_prompt=3, seed=1).generate(PROMPTS)
    same(RolloutManager(one, HOW, length_reward, samples_per_prompt=3, seed=1).generate(PROMPTS), several)


def test_processes_do_not_matter(one, on_ray):
    data = RolloutManager(on_ray, HOW, length_reward, samples_per_prompt=3, seed=1).generate(PROMPTS)
    same(RolloutManager(one, HOW, length_reward, samples_per_prompt=3, seed=1).generate(PROMPTS), data)


def test_seeds_and_rollout_ids_and_samples_draw_differently(one):
    def drawn(seed=1, **options):
        manager = RolloutManager(one, Sampling(12, 2.0), samples_per_prompt=2, seed=seed)
        return manager.generate([[1, 2], [1, 2]], **options)["input_ids"].tolist()

    rows = [*drawn(), *drawn(rollout_id=1), *drawn(seed=2)]
    assert len({tuple(row) for row in rows}) == 12
    assert drawn() == rows[:4]
    assert len({mixed_seed(*(x // n % 5 for n in (1, 5, 25, 125))) for x in range(625)}) == 625


def test_fewer_prompts_than_workers_and_none(echoes):
    manager = RolloutManager(echoes, Sampling(2), length_reward)
    assert manager.generate([[1, 2]])["input_ids"].tolist() == [[1, 2, 2, 1]]
    empty = manager.generate([])
    assert empty.batch_size == (0,) and empty["input_ids"].shape == (0, 0)
    check_rollout_data(empty)


def test_options_of_one_call(echoes):
    manager = RolloutManager(echoes, Sampling(2), samples_per_prompt=3)
    data = manager.generate([torch.tensor([1, 2]), [3]], sampling=Sampling(1), samples_per_prompt=1)
    assert data["input_ids"].tolist() == [[1, 2, 2], [0, 3, 3]] and "rewards" not in data.keys()  # noqa: SIM118


def test_a_group_is_called_without_a_manager(echoes):
    found = echoes.generate([[1, 2], [3], [4]], Broadcast(Sampling(1)), [0, 0, 0])
    assert [(one.answer.token_ids, one.weight_version, one.rank) for one in found] == [
        ([2], 0, 0),
        ([3], 0, 0),
        ([4], 0, 1),
    ]


def test_the_default_engine_by_keyword():
    with LocalWorkerGroup(1, RayClassWithInitArgs(RolloutWorker, model=LLAMA, seed=5)) as group:
        assert RolloutManager(group, Sampling(3)).generate([[1, 2]])["input_ids"].shape == (1, 5)


@pytest.mark.parametrize("batched", [False, True])
def test_extras_go_to_the_reward_function(echoes, batched):
    def each(prompt_ids, answer_ids, label, weight):
        return weight * (answer_ids[0] == label)

    def all_at_once(prompts, answers, label, weight):
        return torch.tensor([each(*one) for one in zip(prompts, answers, label, weight, strict=True)])

    function = all_at_once if batched else each
    manager = RolloutManager(echoes, Sampling(2), function, samples_per_prompt=2, batched_rewards=batched)
    data = manager.generate([[1, 2], [3, 4]], extras={"label": [2, 9], "weight": torch.tensor([0.5, 2.0])})
    assert data["rewards"].tolist() == [0.5, 0.5, 0, 0] and data["rewards"].dtype is torch.float32


def test_an_async_reward_function_runs_for_all_samples_at_once(echoes):
    waiting = []

    async def reward(prompt_ids, answer_ids):
        waiting.append(None)
        while len(waiting) < 6:  # the others are under way, or this never ends
            await asyncio.sleep(0.001)
        return prompt_ids[0]

    async def in_a_loop():  # as in a notebook, whose thread has a running loop
        return RolloutManager(echoes, Sampling(2), reward, samples_per_prompt=3).generate([[1], [2]])

    assert asyncio.run(in_a_loop())["rewards"].tolist() == [1, 1, 1, 2, 2, 2]

    async def batched(prompts, answers):
        return [len(prompts)] * len(answers)

    manager = RolloutManager(echoes, Sampling(2), batched, batched_rewards=True)
    assert manager.generate([[1], [2]])["rewards"].tolist() == [2, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_in_a_reward_function_names_the_sample(echoes, is_async):
    def reward(prompt_ids, answer_ids):
        return 1 / (prompt_ids[0] - 2)

    async def later(prompt_ids, answer_ids):
        return reward(prompt_ids, answer_ids)

    manager = RolloutManager(echoes, Sampling(2), later if is_async else reward, samples_per_prompt=2)
    with pytest.raises(RewardError, match=r"ZeroDivisionError.* for row 2: prompt 1, sample 0") as caught:
        manager.generate([[1], [2]])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.row, copy.prompt, copy.sample, str(copy)) == (2, 1, 0, str(caught.value))


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1.0", [1, 2]], ids=repr)
def test_what_is_no_reward_is_refused(echoes, value):
    manager = RolloutManager(echoes, Sampling(2), lambda prompt, answer: value if prompt == [2] else True)
    with pytest.raises(RewardError, match=r"returned .* for row 1: prompt 1, sample 0, 2 tokens"):
        manager.generate([[1], [2]])


@pytest.mark.parametrize("value", [[1.0], 3, None], ids=repr)
def test_a_batched_reward_function_returns_one_number_for_each(echoes, value):
    manager = RolloutManager(echoes, Sampling(2), lambda prompts, answers: value, batched_rewards=True)
    with pytest.raises(RewardError, match="2 samples"):
        manager.generate([[1], [2]])


def test_bad_calls(echoes):
    manager = RolloutManager(echoes)
    for prompts, message in (
        ([[1], []], "prompt 1 is empty"),
        ([[0.5]], "prompt 0 is a list of token ids"),
        (torch.zeros(2, 2, 2).long(), "prompt 0 is a list of token ids"),
    ):
        with pytest.raises(PromptError, match=message):
            manager.generate(prompts)
    for extras in ({"label": [1]}, {"label": "ab"}, {"label": 3}):
        with pytest.raises(ValueError, match=r"'label'.* has one value for each of 2 prompts"):
            manager.generate([[1], [2]], extras=extras)
    with pytest.raises(ValueError, match="samples_per_prompt=0"):
        manager.generate([[1]], samples_per_prompt=0)
    with pytest.raises(TypeError, match="worker group of RolloutWorker"):
        RolloutManager([1, 2])
    with pytest.raises(TypeError, match="reward_function"):
        RolloutManager(echoes, reward_function=1.0)
    with pytest.raises(TypeError, match="sampling is a Sampling or None"):
        RolloutManager(echoes, length_reward)
    with pytest.raises(PromptError, match="prompt 0 is a list of token ids"):
        manager.generate([1, 2, 3])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_prompt_that_the_engine_refuses_has_its_number_and_breaks_nothing(world_size):
    with local(world_size, HFEngine, LLAMA) as group:
        manager = RolloutManager(group, Sampling(4), samples_per_prompt=3)
        with pytest.raises(
            PromptError, match="prompt 2 has tokens from 1 to 99; the model's vocabulary is 32"
        ) as caught:
            manager.generate([[1], [2], [1, 99], [3]])
        assert caught.value.number == 2 and pickle.loads(pickle.dumps(caught.value)).number == 2
        assert len(manager.generate([[1], [2]])) == 6


def test_engines_that_are_none_or_go_wrong():
    with pytest.raises(StartError, match=r"RayClassWithInitArgs\(RolloutWorker, HFEngine, config\)"):
        local(1, LLAMA)
    with pytest.raises(StartError, match="made a dict, which is no RolloutEngine"):
        local(1, dict)
    with local(1, EchoEngine, mistake="short") as group:
        with pytest.raises(WorkerError, match="EchoEngine gave 1 answers to 2 prompts"):
            RolloutManager(group).generate([[1], [2]])
    for mistake, message in (
        (lambda answers: (one for one in answers), "gave <generator"),
        (lambda answers: [answers[0], [1, 2]], r"gave \[1, 2\] to prompt 1; generate\(\) returns Answers"),
        (lambda answers: [answers[0], replace(answers[1], log_probs=[])], "gave 16 tokens and 0 log_probs to prompt 1"),
        (
            lambda answers: [replace(one, finish_reason="eos") for one in answers],
            "gave finish_reason='eos' to prompt 0",
        ),
    ):
        with local(1, EchoEngine, mistake=mistake) as group:
            with pytest.raises(WorkerError, match=f"EchoEngine {message}"):
                RolloutManager(group).generate([[1], [2]])
    with local(1, EchoEngine, mistake="raises") as group:
        future = RolloutManager(group).generate_async([[1]])
        with pytest.raises(WorkerError, match="out of paper"):
            future.result(timeout=20)


def test_workers_with_other_weights_are_named(echoes):
    manager = RolloutManager(echoes, Sampling(2))
    echoes.set_version([4, 4])
    assert manager.generate([[1], [2]])["weight_versions"].tolist() == [4, 4]  # nobody said which
    manager.weight_version = 4
    assert manager.generate([[1], [2]])["weight_versions"].tolist() == [4, 4]
    echoes.set_version([4, 3])
    with pytest.raises(WeightVersionError, match="weights of version 4, but rank 1 has version 3") as caught:
        manager.generate([[1], [2]])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.expected, copy.versions) == (4, {1: 3})
    manager.weight_version = None
    echoes.set_version([None, 4])
    with pytest.raises(WeightVersionError, match="complete weights, but rank 0 has an update that did not end"):
        manager.generate([[1], [2]])
    echoes.set_version([0, 0])
    assert manager.generate([[1]])["weight_versions"].tolist() == [0]


def test_an_async_rollout_has_the_weights_of_when_it_was_asked_for(on_ray):
    manager = RolloutManager(on_ray, Sampling(2), length_reward)
    manager.weight_version = 0
    on_ray.wait.remote(0.5)
    future = manager.generate_async([[1], [2]])
    on_ray.set_version.remote([1, 1])  # the next update, sent while the rollout is under way
    manager.weight_version = 1
    assert not future.done()
    data = future.result(timeout=60)
    assert data["weight_versions"].tolist() == [0, 0] and data["rewards"].tolist() == pytest.approx([2.1, 2.1])
    assert manager.generate([[1]])["weight_versions"].tolist() == [1]
    on_ray.set_version([0, 0])


def test_async_rollouts_are_rewarded_one_after_the_other(echoes):
    now = threading.Semaphore(1)

    def reward(prompt_ids, answer_ids):
        assert now.acquire(blocking=False)
        time.sleep(0.02)
        now.release()
        return 0.0

    manager = RolloutManager(echoes, Sampling(2), reward)
    futures = [manager.generate_async([[1], [2]], rollout_id=k) for k in range(3)]
    assert all(len(future.result(timeout=20)) == 2 for future in futures)


def test_weights_that_sleep_loses_have_no_version(echoes):
    manager = RolloutManager(echoes)
    before = echoes.current_weight_version()
    manager.offload()
    assert echoes.current_weight_version() == [None, None]  # an EchoEngine says nothing of keeping them
    manager.onload()
    with pytest.raises(WeightVersionError, match="were to generate with complete weights"):
        manager.generate([[1]])
    echoes.set_weight_version(before[0])


def test_sleep_and_wake_up(echoes):
    manager = RolloutManager(echoes)
    manager.offload()
    assert echoes.is_asleep() == [True, True]
    manager.onload()
    assert echoes.is_asleep() == [False, False]
    echoes.offload()
    assert echoes.is_asleep() == [True, True]
    echoes.onload()


class Trainer(Worker):
    """A worker that was given a manager, as `set_rollout_manager` does."""

    @register(Dispatch.ONE_TO_ALL)
    def roll(self, manager):
        data = manager.generate([[1, 2], [3]], rollout_id=7)
        return data["input_ids"], data["rewards"], type(manager.group).__name__


def test_a_manager_goes_to_another_process(on_ray):
    manager = RolloutManager(on_ray, HOW, lambda prompt, answer: len(answer), seed=4)
    manager.weight_version = 0
    expected = manager.generate([[1, 2], [3]], rollout_id=7)
    with RayResourcePool([1], use_gpu=False) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Trainer)) as trainers:
        ((ids, rewards, kind),) = trainers.roll(manager)
        assert torch.equal(ids, expected["input_ids"]) and torch.equal(rewards, expected["rewards"])
        assert kind == "RayWorkerGroup"
    copy = pickle.loads(pickle.dumps(manager))
    assert (copy.seed, copy.weight_version, copy.sampling) == (4, 0, HOW)


def test_a_reward_function_that_does_not_pickle_stays_behind(on_ray):
    lock = threading.Lock()
    copy = ray.cloudpickle.loads(ray.cloudpickle.dumps(RolloutManager(on_ray, HOW, lambda p, a: lock.locked())))
    assert copy.group.world_size == 2
    with pytest.raises(RolloutError, match="does not pickle"):
        copy.generate([[1]])


def test_log_probs_of_a_worker_with_new_weights(on_ray):
    """What a sync of weights brings, put in by hand."""
    new = plain_model(LLAMA, 8)
    weights = dict(new.state_dict())
    on_ray.execute_with_func_generator(
        lambda worker, given: worker.engine.load_weights(given.items()), Broadcast(weights)
    )
    data = RolloutManager(on_ray, HOW, seed=1).generate(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        counts = data["loss_mask"][row].bool()
        expected = plain_log_probs(new, prompt, data["input_ids"][row][counts].tolist(), HOW.temperature)
        torch.testing.assert_close(data["rollout_log_probs"][row][counts].double(), expected, atol=2e-5, rtol=0)
