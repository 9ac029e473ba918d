"""evaluate(): its estimates against enumeration, its intervals against simulation, and what it leaves untouched."""

import asyncio
import itertools
import math
import random

import pytest
import torch
from rollout_helpers import LLAMA, Bigram, BigramEngine, EchoEngine

from single_controller import Broadcast, LocalWorkerGroup, RayClassWithInitArgs
from workers import (
    HFEngine,
    RewardError,
    RewardRunner,
    RolloutManager,
    RolloutWorker,
    SamplingParams,
    WeightVersionError,
    evaluate,
)
from workers.rollout.evaluation import mean_interval, pass_at_k


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_choices_with_a_success(samples):
    for successes, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        outcomes = [True] * successes + [False] * (samples - successes)
        choices = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
        assert pass_at_k(samples, successes, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its expectation over the number of successes, which is binomial, is 1 - (1 - p)^k."""
    for p, k in itertools.product((0.0, 0.1, 0.5, 0.9, 1.0), (1, 3, 8)):
        chance = [math.comb(8, c) * p**c * (1 - p) ** (8 - c) for c in range(9)]
        expected = sum(weight * pass_at_k(8, c, k) for c, weight in enumerate(chance))
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_a_column_passed_as_a_keyword_is_named_with_the_known_ones():
    with pytest.raises(TypeError, match=r"evaluate\(\).*'label'; known are .*extras"):
        evaluate(None, [[1]], label=["a"])


@pytest.mark.parametrize(
    ("count", "t"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (30, 2.045), (1000, 1.962)]
)
def test_interval_against_the_table_of_t(count, t):
    values = [float(k % 2) for k in range(count)]
    mean, deviation = sum(values) / count, torch.tensor(values).double().std().item()
    low, high = mean_interval(values)
    assert (high - mean) == pytest.approx(t * deviation / math.sqrt(count), rel=5e-3)
    assert (mean - low) == pytest.approx(high - mean)


def test_interval_of_prompts_that_all_fail_or_all_succeed():
    assert mean_interval([0.0] * 10, share=True) == pytest.approx((0, 0.3085), abs=1e-4)  # Clopper and Pearson, 0 of 10
    assert mean_interval([1.0] * 10, share=True) == pytest.approx((0.6915, 1), abs=1e-4)
    low, high = mean_interval([1.0] * 9 + [0.9], share=True)
    assert 0.9 < low < 0.99 and high == 1.0


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("prompts", [12, 60])
def test_interval_contains_the_expected_value_as_often_as_it_says(k, prompts):
    """Prompts of very different difficulty, eight completions each, 1500 evaluations; the standard error is 0.6 %."""
    draw = random.Random(k)

    def evaluation():
        for _ in range(prompts):
            p = draw.betavariate(0.6, 0.9)
            yield pass_at_k(8, sum(draw.random() < p for _ in range(8)), k)

    grid = [(number + 0.5) / 20_000 for number in range(20_000)]
    density = [p**-0.4 * (1 - p) ** -0.1 for p in grid]
    expected = sum(d * (1 - (1 - p) ** k) for p, d in zip(grid, density, strict=True)) / sum(density)
    hits = 0
    for _ in range(1500):
        low, high = mean_interval(list(evaluation()), share=True)
        hits += low <= expected <= high
    assert 0.93 < hits / 1500 < 0.97


# --- on a group ----------------------------------------------------------------------------------------------------


def local(engine, *args, workers=1, **kwargs):
    return LocalWorkerGroup(workers, RayClassWithInitArgs(RolloutWorker, engine, *args, **kwargs))


def even(prompt_ids, completion_ids):
    return float(completion_ids[-1] % 2 == 0)


PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1], [11, 4], [1, 2]]


def test_metrics_against_the_completions():
    seen = []

    def reward(prompt_ids, completion_ids, label):
        seen.append((prompt_ids, completion_ids, even(prompt_ids, completion_ids) * label))
        return seen[-1][2]

    how = SamplingParams(9, stop_token_ids=(6, 17, 29))
    with local(BigramEngine, workers=2) as group:
        manager = RolloutManager(group, SamplingParams(2), even)
        found = evaluate(
            manager,
            PROMPTS,
            extras={"label": [1, 1, 0.5, 1, 1]},
            reward_function=reward,
            sampling_params=how,
            samples_per_prompt=4,
            ks=(1, 3, 4),
        )
        again = evaluate(manager, PROMPTS, sampling_params=how, samples_per_prompt=4)
        other = evaluate(manager, PROMPTS, sampling_params=how, samples_per_prompt=4, seed=1)
    rewards = torch.tensor([one[2] for one in seen]).double().view(5, 4)
    assert found["eval/mean@4"] == pytest.approx(rewards.mean().item())
    wins = (rewards >= 1).sum(1).tolist()
    assert wins[2] == 0 and len(set(wins)) > 2
    for k in (1, 3, 4):
        shares = [sum(map(any, itertools.combinations([1] * c + [0] * (4 - c), k))) / math.comb(4, k) for c in wins]
        assert found[f"eval/pass@{k}"] == pytest.approx(sum(shares) / 5)
        assert found[f"eval/pass@{k}/low"] <= found[f"eval/pass@{k}"] <= found[f"eval/pass@{k}/high"]
    lengths = [len(one[1]) for one in seen]
    assert found["eval/completion_length"] == pytest.approx(sum(lengths) / 20)
    assert found["eval/truncated"] == sum(one[1][-1] not in how.stop_token_ids for one in seen) / 20
    assert len(found) == 3 * 4 + 2 and {"eval/pass@1", "eval/pass@2", "eval/pass@4"} <= set(again)
    assert again["eval/completion_length"] == found["eval/completion_length"] != other["eval/completion_length"]


def test_greedy_evaluation_and_a_single_prompt():
    with local(HFEngine, LLAMA, seed=5) as group:
        (best,) = HFEngine(LLAMA, seed=5).generate([[1, 2]], SamplingParams(6, temperature=0), [0])
        found = evaluate(
            RolloutManager(group, reward_function=lambda prompt, completion: completion == best.token_ids),
            [[1, 2]],
            sampling_params=SamplingParams(6, temperature=0),
        )
    names = {"eval/mean@1": 1, "eval/pass@1": 1, "eval/completion_length": 6, "eval/truncated": 1}
    assert found == names  # one prompt has no interval


class Learner:
    """A plain policy gradient on the engine's own weights, so that any difference in the data changes them."""

    def __init__(self, group):
        self.group, self.model = group, Bigram(0)

    def step(self, data):
        ids, counts = data["input_ids"], data["loss_mask"][:, 1:].bool()
        logits = self.model.following[ids[:, :-1]] + self.model.bias
        taken = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        advantages = data["rewards"] - data["rewards"].mean()
        gradients = torch.autograd.grad((taken * counts).sum(1) @ advantages, list(self.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter += 0.1 * gradient
        weights = dict(self.model.state_dict())
        self.group.execute_with_func_generator(
            lambda worker, given: worker.engine.load_weights(given.items()), Broadcast(weights)
        )


def trained(evaluated):
    with local(BigramEngine, workers=2) as group:
        manager = RolloutManager(group, SamplingParams(9), even, samples_per_prompt=4, seed=3)
        learner, rollouts = Learner(group), []
        for rollout_id in range(4):
            if evaluated:
                evaluate(manager, PROMPTS, samples_per_prompt=2, sampling_params=SamplingParams(5))
                assert evaluate(manager, PROMPTS, sampling_params=SamplingParams(5, 0), reward_function=even)
            rollouts.append(manager.generate(PROMPTS, rollout_id=rollout_id))
            learner.step(rollouts[-1])
        return rollouts, dict(learner.model.state_dict())


def test_training_is_the_same_bit_for_bit_with_and_without_evaluation():
    (with_it, weights), (without, same) = trained(True), trained(False)
    assert not torch.equal(weights["bias"], Bigram(0).bias), "nothing was learned"
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    for first, second in zip(with_it, without, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first.keys() - {"group_ids"})


def test_completions_are_not_those_of_a_rollout():
    rows = []
    with local(EchoEngine, 1_000_000) as group:
        manager = RolloutManager(group, SamplingParams(12), lambda prompt, completion: rows.append(completion) or 0.0)
        for rollout_id in range(3):
            manager.generate([[1]], rollout_id=rollout_id)
        evaluate(manager, [[1]])
    assert len({tuple(row) for row in rows}) == 4


def test_weight_versions_are_those_of_the_manager():
    with local(EchoEngine) as group:
        manager = RolloutManager(group, SamplingParams(2), even)
        manager.weight_version = 4
        with pytest.raises(WeightVersionError, match="needs weight version 4, but rank 0 has version 0"):
            evaluate(manager, PROMPTS)

        def refresh():
            group.set_weight_version(5)
            manager.weight_version = 5

        manager.refresh = refresh
        assert evaluate(manager, PROMPTS)["eval/completion_length"] == 2


def test_own_runner_has_its_own_timeouts():
    async def never(prompt_ids, completion_ids):
        await asyncio.sleep(60)

    with local(EchoEngine) as group, RewardRunner(never, timeout=0.05, on_timeout=1) as runner:
        manager = RolloutManager(group, SamplingParams(2), even)
        assert evaluate(manager, PROMPTS, reward_function=runner)["eval/pass@1"] == 1
        assert runner.metrics()["rewards/timeouts"] == 5 and manager.reward_metrics()["rewards/timeouts"] == 0
        assert evaluate(manager, PROMPTS, reward_function=runner), "the runner was not closed"
        with pytest.raises(RewardError, match="raised ZeroDivisionError"):
            evaluate(manager, PROMPTS, reward_function=lambda prompt, completion: 1 / 0)


def test_invalid_calls():
    with local(EchoEngine) as group:
        manager = RolloutManager(group, SamplingParams(2), even)
        for options, message in (
            ({"ks": [1.5], "samples_per_prompt": 2}, r"ks has 1\.5; expected 1 to"),
            ({"samples_per_prompt": 0}, "samples_per_prompt=0"),
            ({"samples_per_prompt": 2.0}, "samples_per_prompt=2.0: expected an integer"),
            ({"sampling_params": SamplingParams(2, 0), "samples_per_prompt": 2}, "at temperature 0"),
        ):
            with pytest.raises(ValueError, match=message):
                evaluate(manager, **{"prompts": [[1]], **options})
