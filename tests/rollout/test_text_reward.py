"""text_reward: what a function of texts is called with, and that a RolloutManager calls it."""

import asyncio
import functools
from contextlib import closing

import pytest
from byte_tokens import byte_tokenizer
from rollout_helpers import BigramEngine, Toy

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers import (
    PromptData,
    RewardError,
    RewardRunner,
    RolloutManager,
    Sample,
    SamplingParams,
    TrainArgsError,
    number_match,
    open_rows,
    read_args,
    reward_of,
    soft_overlong,
    text_reward,
)

TOKENIZER = byte_tokenizer()
PROMPT, COMPLETION = [258, *b"2+2?", 257, 259], [*"4é".encode(), 257]


def compute(function, extras=None, info=None, **options):
    with closing(RewardRunner(text_reward(function, TOKENIZER), **options)) as runner:
        return runner.compute([Sample(0, 0, PROMPT, COMPLETION, info)], extras or {})


def test_function_gets_what_its_parameters_name():
    seen = {}

    def reward(completion, prompt, label, prompt_ids, *, completion_ids, info, level=3, other="unchanged"):
        seen.update(locals())
        return 2

    assert compute(reward, {"label": {0: 4}, "level": {0: 5}, "more": {0: 6}}, {"turns": 1}) == [2.0]
    seen.pop("seen")
    assert seen == {"completion": "4é", "prompt": "<|user|>2+2?<|end|><|assistant|>", "label": 4,
                    "prompt_ids": PROMPT, "completion_ids": COMPLETION, "info": {"turns": 1}, "level": 5,
                    "other": "unchanged"}  # fmt: skip


def test_function_with_columns_gets_all():
    def reward(completion, **columns):
        return len(columns) if columns["more"] == 6 else 0

    assert compute(reward, {"label": {0: 4}, "more": {0: 6}}) == [6.0]  # and prompt, both ids, and info


def test_column_of_the_name_of_a_text_does_not_replace_it():
    assert compute(lambda completion: float(completion == "4é"), {"completion": {0: "x"}, "prompt_ids": {0: 1}}) == [
        1.0
    ]


@pytest.mark.parametrize("workers", [None, 1])
def test_async_function_runs_as_one(workers, request):
    if workers:
        request.getfixturevalue("ray_cluster")

    loops = []

    async def reward(completion, label):
        loops.append(asyncio.get_running_loop())  # the same in all calls, or what a function keeps would be useless
        await asyncio.sleep(0)
        return float(completion == label and loops[0] is loops[-1])

    # A plain function could have no timeout without processes.
    with RewardRunner(text_reward(reward, TOKENIZER), timeout=60, workers=workers) as runner:
        samples = [Sample(0, number, PROMPT, COMPLETION) for number in range(2)]
        assert runner.compute(samples, {"label": {0: "4é"}}) == [1.0, 1.0]


def test_several_rewards_and_options():
    def reward(completion, label, completion_ids):
        length = soft_overlong(completion_ids, max_length=4, buffer=2)
        return {"right": number_match(completion, label), "length": length}

    (found,) = compute(reward, {"label": {0: 4}})
    assert found.parts == {"right": 1.0, "length": -1.0} and found == 0.0
    for column in ({}, {"tolerance": {0: None}}):  # as in a row that has none, beside one that does
        assert compute(functools.partial(number_match, tolerance=0.5), {"label": {0: 4.4}, **column}) == [1.0]
    assert compute(number_match, {"label": {0: 4.4}}) == [0.0]


def test_missing_column_is_named():
    with pytest.raises(RewardError, match=r"requires the column 'label', but extras has 'answer', 'more'"):
        compute(number_match, {"answer": {0: 4}, "more": {0: 1}})
    with pytest.raises(RewardError, match="has no number"):
        compute(number_match, {"label": {0: "none"}})


def test_function_without_a_completion_is_refused():
    for function in (lambda: 0, lambda text, label: 0):
        with pytest.raises(TypeError, match="no parameter `completion`"):
            text_reward(function, TOKENIZER)


def test_function_of_the_configuration():
    for name in ("number_match", "workers.number_match"):
        function = reward_of(read_args({"reward_function": name}), TOKENIZER)
        assert function(PROMPT, COMPLETION, label=4) == 1.0
    with pytest.raises(TrainArgsError, match="reward_function is not set; choose exact_match"):
        reward_of(read_args({}), TOKENIZER)


def test_from_data_to_rewards():
    """Each completion is rewarded with the columns of its own prompt."""
    rows = [{"prompt": [number, number + 1], "label": number, "level": number % 2} for number in range(3, 9)]
    seen = []

    def reward(prompt_ids, completion_ids, label, level):
        seen.append((prompt_ids, label, level))
        return label + len(completion_ids) / 100

    data = PromptData(open_rows(rows, seed=1), 4)
    with LocalWorkerGroup(2, RayClassWithInitArgs(Toy, BigramEngine), threads=True) as group:
        manager = RolloutManager(group, SamplingParams(5), text_reward(reward, TOKENIZER), samples_per_prompt=2)
        for rollout_id in range(3):
            prompts, extras = data(rollout_id)
            found = manager.generate(prompts, rollout_id=rollout_id, extras=extras)
            assert found["rewards"].floor().tolist() == [label for label in extras["label"] for _ in range(2)]
    assert len(seen) == 24
    assert all(prompt == [label, label + 1] and level == label % 2 for prompt, label, level in seen)


def test_object_with_an_async_call_may_have_a_timeout():
    class Judge:
        async def __call__(self, completion, label):
            return float(completion == label)

    assert compute(Judge(), {"label": {0: "4é"}}, timeout=60) == [1.0]
