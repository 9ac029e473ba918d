"""Rewards beyond one number per completion: those of greedy completions, as baselines, and several by name."""

import pickle
from concurrent.futures import Future
from dataclasses import replace
from unittest.mock import Mock, call

import pytest
import torch
from rollout_helpers import LLAMA, BigramEngine, EchoEngine, Toy, update
from waits import wait_until

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers import (
    HFEngine,
    RolloutManager,
    RolloutStream,
    RolloutWorker,
    SampleBuffer,
    SamplingParams,
    evaluate,
    group_numbers,
    read_args,
)
from workers.algorithms.estimators import AdvantageRows, gdpo
from workers.data.collate import collate
from workers.data.rollout_data import check_rollout_data
from workers.rollout.engines.rollout_engine import Completion
from workers.rollout.rewards.reward_calls import Reward
from workers.rollout.rollout_errors import RewardError, RolloutError
from workers.rollout.stream.router import is_flat

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12]]
HOW = SamplingParams(6, temperature=1.5, top_p=0.9, stop_token_ids=(6,))


def reward(prompt_ids, completion_ids):
    return float(sum(completion_ids)) + len(prompt_ids) / 8


@pytest.fixture(scope="module")
def group():
    made = RayClassWithInitArgs(RolloutWorker, HFEngine, LLAMA, seed=5)
    with LocalWorkerGroup(1, made, threads=True) as group:  # several would seed torch at once
        yield group


def greedy_rewards():
    engine = HFEngine(LLAMA, seed=5)
    how = SamplingParams(6, temperature=0.0, stop_token_ids=(6,))
    made = [engine.generate([prompt], how, [0])[0].token_ids for prompt in PROMPTS]
    return [reward(*pair) for pair in zip(PROMPTS, made, strict=True)]


def test_baselines_are_the_rewards_of_greedy_completions(group):
    expected = greedy_rewards()
    plain = RolloutManager(group, HOW, reward, samples_per_prompt=3, seed=1).generate(PROMPTS, rollout_id=2)
    manager = RolloutManager(group, HOW, reward, samples_per_prompt=3, seed=1, greedy_baselines=True)
    data = manager.generate(PROMPTS, rollout_id=2)
    check_rollout_data(data, vocab_size=32)
    assert data["reward_baselines"].tolist() == pytest.approx([expected[row // 3] for row in range(9)])
    # The rows themselves are those without baselines.
    for name in plain.keys() - {"group_ids"}:
        found, expected_rows = (of[name].values() if of[name].is_nested else of[name] for of in (data, plain))
        assert found.equal(expected_rows), name
    later = manager.generate_async(PROMPTS, rollout_id=2, samples_per_prompt=1).result()
    assert later["reward_baselines"].tolist() == pytest.approx(expected)
    assert "reward_baselines" not in plain.keys()  # noqa: SIM118
    scores = evaluate(manager, PROMPTS, sampling_params=HOW, samples_per_prompt=2)
    assert scores["eval/completion_length"] > 0
    with pytest.raises(ValueError, match="greedy_baselines=True needs a reward function"):
        RolloutManager(group, greedy_baselines=True)


def test_greedy_completions_have_the_time_of_those_before_them_too():
    """Workers generate them afterwards, but the timeout of a call begins when it is sent."""
    group = Mock(methods=("generate",))
    RolloutManager(group, HOW, reward, greedy_baselines=True, timeout=10)._send(PROMPTS, 0, None, None, None)
    assert group.generate.options.call_args_list == [call(timeout=10), call(timeout=20)]


class FailingBaselines(BigramEngine):
    """The greedy completion of the second prompt fails, as a session whose environment is down."""

    def submit(self, prompt, sampling_params, *arguments, **options):
        outer, inner = Future(), super().submit(prompt, sampling_params, *arguments, **options)
        inner.add_done_callback(lambda done: outer.set_result(failed(prompt, sampling_params, done.result())))
        return outer

    def generate(self, prompts, sampling_params, seeds):
        made = super().generate(prompts, sampling_params, seeds)
        return [failed(prompt, sampling_params, one) for prompt, one in zip(prompts, made, strict=True)]


def failed(prompt, how, completion):
    down = list(prompt) == PROMPTS[1] and how.temperature == 0
    return replace(completion, finish_reason="error") if down else completion


def test_a_prompt_whose_baseline_failed_is_not_trained():
    with LocalWorkerGroup(2, RayClassWithInitArgs(Toy, FailingBaselines), threads=True) as group:
        manager = RolloutManager(group, HOW, reward, samples_per_prompt=2, seed=1, greedy_baselines=True)
        with RolloutStream(manager, lambda rollout_id: PROMPTS, SampleBuffer(groups_per_batch=3)) as stream:
            update(stream, manager, 1)
            data = [stream.take(30), manager.generate(PROMPTS)]
        for rows in data:
            assert rows["loss_mask"].any(1).tolist() == [True, True, False, False, True, True]
            assert group_numbers(rows["group_ids"]).tolist() == [0, 0, 1, 1, 2, 2]


def set_version(stream, manager, version):
    """An update with the weights that the engines have."""
    with stream.updating():
        manager.group.set_weight_version(version)
        manager.weight_version = version


def test_stream_has_the_same_baselines(group):
    """Also in groups that were interrupted and go on, and in a stream that goes on from a saved state."""
    expected = greedy_rewards()
    manager = RolloutManager(group, HOW, reward, samples_per_prompt=2, seed=1, greedy_baselines=True)
    other = RolloutManager(group, HOW, reward, samples_per_prompt=2, seed=1)

    def begin(manager):
        buffer = SampleBuffer(groups_per_batch=3, max_staleness=2)
        return RolloutStream(manager, lambda rollout_id: PROMPTS, buffer, update_mode="interrupt")

    with begin(manager) as stream:
        for version in (1, 2, 3):
            set_version(stream, manager, version)
            data = stream.take(30)
            assert group_numbers(data["group_ids"]).tolist() == [3 * (version - 1) + row // 2 for row in range(6)]
            assert data["reward_baselines"].tolist() == pytest.approx([expected[row // 2] for row in range(6)])
        state = pickle.loads(pickle.dumps(stream.state_dict()))
    rows = other.generate(PROMPTS, rollout_id=2)
    for name in ("input_ids", "loss_mask", "rewards", "rollout_log_probs"):
        torch.testing.assert_close(data[name], rows[name], atol=2e-5, rtol=0)
    for again in (manager, other):
        again.weight_version = None
        with begin(again) as stream:
            stream.load_state_dict(state)
            set_version(stream, again, 4)
            assert len(stream.take(30)["rewards"]) == 6  # never the greedy ones
    other.weight_version = manager.weight_version = None
    with begin(other) as stream:
        set_version(stream, other, 5)
        arrived = []  # `metrics` counts since the last call

        def enough(stream=stream):
            arrived.append(stream.buffer.metrics()["buffer/arrived"])
            return sum(arrived) >= 6

        wait_until(enough)
        state = stream.state_dict()
    with begin(manager) as stream:
        stream.load_state_dict(state)
        set_version(stream, manager, 6)
        with pytest.raises(RolloutError, match="generated without greedy_baselines=True"):
            stream.take(30)
    group.set_weight_version(0)


def test_batch_that_is_taken_again_has_groups_of_its_own(group):
    """After the trainer has gone back, some groups are generated anew. Joined with those before, they stay apart."""
    manager = RolloutManager(group, HOW, reward, samples_per_prompt=2, seed=1)
    buffer = SampleBuffer(groups_per_batch=3, max_staleness=2, keep_batches=2)
    with RolloutStream(manager, lambda rollout_id: PROMPTS, buffer) as stream:
        found = []
        for version in (1, 2, 3):
            set_version(stream, manager, version)
            if version == 3:
                buffer.rewind(1)
            found.append(stream.take(30))
    assert [group_numbers(data["group_ids"]).tolist()[0] for data in found] == [0, 3, 3]
    assert found[2]["input_ids"].equal(found[1]["input_ids"])
    groups, sizes = torch.cat([data["group_ids"] for data in found]).unique(return_counts=True)
    assert len(groups) == 9 and sizes.tolist() == [2] * 9
    group.set_weight_version(0)


def parts(prompt_ids, completion_ids):
    return {"right": float(completion_ids[0] == 2), "format": 0.25 * len(completion_ids)}


@pytest.mark.parametrize("batched", [False, True])
def test_several_rewards_are_columns_and_their_sum_is_the_reward(batched):
    def of_all(prompts, completions):
        return [parts(*one) for one in zip(prompts, completions, strict=True)]

    with LocalWorkerGroup(2, RayClassWithInitArgs(RolloutWorker, EchoEngine)) as group:
        function = of_all if batched else parts
        manager = RolloutManager(group, SamplingParams(2), function, samples_per_prompt=2, batched_rewards=batched)
        data = manager.generate([[1, 2], [3, 4, 5]])
        check_rollout_data(data)
        assert data["rewards/right"].tolist() == [1, 1, 0, 0] and data["rewards/format"].tolist() == [0.5] * 4
        assert data["rewards"].tolist() == [1.5, 1.5, 0.5, 0.5]
        rows = {**dict(data.items()), "rewards/right": torch.tensor([1.0, 0.0, 0.0, 0.0])}
        advantages = gdpo(AdvantageRows(rows), read_args({"advantage_estimator": "gdpo"}))
        assert (advantages[:, -1] > 0).tolist() == [True, False, False, False]
        manager = RolloutManager(group, SamplingParams(2), lambda *_: {"right": "yes"})
        with pytest.raises(RewardError, match="returned 'yes' for row 0"):
            manager.generate([[1, 2]])


def test_parts_pickle_and_plain_numbers_among_them_count_for_each():
    one = pickle.loads(pickle.dumps(Reward({"a": 1.0, "b": 0.5})))
    assert one == 1.5 and one.parts == {"a": 1.0, "b": 0.5}
    rows = [Completion([1], [0.0], "stop")] * 2
    data = collate([[7], [7]], rows, rewards=[one, -1.0])
    assert data["rewards/a"].tolist() == [1, -1] and data["rewards/b"].tolist() == [0.5, -1]
    with pytest.raises(ValueError, match="the rewards of row 1 lack 'b', which other rows have"):
        collate([[7], [7]], rows, rewards=[one, Reward({"a": 1.0})])
    # Dynamic sampling: equal sums of different rewards are a signal for GDPO.
    assert is_flat([one, one]) and is_flat([2.0, 2.0]) and not is_flat([2.0, 1.0])
    assert not is_flat([one, Reward({"a": 0.5, "b": 1.0})])
    nothing = Reward({"a": 0.0, "b": 0.0})
    assert is_flat([nothing, 0.0]) and not is_flat([one, 1.5])
