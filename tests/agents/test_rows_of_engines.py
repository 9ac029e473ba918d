"""Engines whose rollouts are several rows, with a manager, a stream and an evaluation."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from rollout_helpers import BigramEngine, Toy, update

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers import RolloutError, RolloutManager, RolloutStream, Row, SampleBuffer, SamplingParams, evaluate
from workers.data.rollout_data import check_rollout_data, group_numbers, of_rollouts

HOW = SamplingParams(4, temperature=0.9)
PROMPTS = [[3, 4], [5]]


def branched(prompt, completion):
    """Of odd prompts two rows: the first half of the completion is trained in the first, the rest in the second."""
    if prompt[0] % 4 == 1 or completion.finish_reason == "abort":
        return completion
    half = len(completion.token_ids) // 2
    masks = [
        [1] * half + [0] * (len(completion.token_ids) - half),
        [0] * half + [1] * (len(completion.token_ids) - half),
    ]
    return replace(completion, rows=[Row([*prompt], replace(completion, loss_mask=mask)) for mask in masks])


class Branching(BigramEngine):
    def submit(self, prompt, *arguments, **options):
        outer = Future()
        inner = super().submit(prompt, *arguments, **options)
        inner.add_done_callback(lambda done: outer.set_result(branched(list(prompt), done.result())))
        return outer

    def generate(self, prompts, sampling_params, seeds):
        made = super().generate(prompts, sampling_params, seeds)
        return [branched(list(prompt), one) for prompt, one in zip(prompts, made, strict=True)]


def reward(prompt_ids, completion_ids):
    return float(sum(completion_ids) % 8) if prompt_ids[0] != 7 else 1.0


def check(data, samples, numbers):
    """Each rollout's reward once, with two rows of those with odd prompts; what is trained has a version."""
    check_rollout_data(data)
    groups = group_numbers(data["group_ids"])
    for number, rows in zip(*groups.unique(return_counts=True), strict=True):
        assert int(rows) == samples * numbers[int(number)]
    assert len(of_rollouts(data, "rewards")) == samples * len(numbers)
    versions = torch.where(data["loss_mask"] != 0, data["weight_versions"], 0)
    assert bool((versions >= 0).all()) and bool((data["weight_versions"][data["loss_mask"] == 0] == -1).all())
    if "weight_fingerprints" in data.keys():  # noqa: SIM118
        assert bool((data["weight_fingerprints"][data["loss_mask"] == 0] == -1).all())


def test_manager_and_evaluation():
    with LocalWorkerGroup(1, RayClassWithInitArgs(Toy, Branching), threads=True) as group:
        manager = RolloutManager(group, HOW, reward, samples_per_prompt=3, greedy_baselines=True, seed=2)
        data = manager.generate(PROMPTS)
        check(data, 3, {0: 2, 1: 1})
        assert len(data) == 9 and data["reward_baselines"][:6].unique().numel() == 1
        trained = data["loss_mask"].sum(1).tolist()
        assert trained == [2] * 6 + [4] * 3  # each token of the first prompt's completions once
        scores = evaluate(manager, PROMPTS, samples_per_prompt=2)
        assert 0 <= scores["eval/mean@2"] <= 8 and scores["eval/truncated"] == 1


def test_stream_counts_rollouts_and_filters_flat_groups():
    """Dynamic sampling looks at rollouts: the groups of prompt 7 are flat, whatever their rows."""

    def prompts(rollout_id):
        return [[3, rollout_id % 20], [5, 2], [7, rollout_id % 20]], {}

    with LocalWorkerGroup(2, RayClassWithInitArgs(Toy, Branching), threads=True) as group:
        manager = RolloutManager(group, HOW, reward, samples_per_prompt=4, seed=3)
        buffer = SampleBuffer(3, max_staleness=1, max_filtered=20)
        with RolloutStream(manager, prompts, buffer, dynamic_sampling=True) as stream:
            for version in (1, 2, 3):
                update(stream, manager, version)
                data = stream.take(60)
                groups = group_numbers(data["group_ids"]).unique().tolist()
                assert len(groups) == 3 and all(number % 3 != 2 for number in groups)
                check(data, 4, {number: 2 if number % 3 == 0 else 1 for number in groups})
                for number in groups:
                    own = of_rollouts(data[group_numbers(data["group_ids"]) == number], "rewards")
                    assert len(own) == 4 and len(own.unique()) > 1
                assert int(data["min_weight_versions"][data["min_weight_versions"] >= 0].min()) >= version - 1


def test_engine_that_returns_bad_rows_is_told():
    class Bad(Branching):
        def generate(self, prompts, sampling_params, seeds):
            return [replace(one, rows=[]) for one in super().generate(prompts, sampling_params, seeds)]

    with LocalWorkerGroup(1, RayClassWithInitArgs(Toy, Bad), threads=True) as group:
        with pytest.raises(RolloutError, match=r"no rows \(an empty list"):
            RolloutManager(group, HOW).generate(PROMPTS)
