"""Metrics in the names of verl and slime have the numbers that those libraries mean by them.

`VERL` and `verl_actor` are written from verl's definitions (`verl/trainer/ppo/metric_utils.py` and ``core_algos.py``),
for one batch with its own layout: prompts padded on the left, responses on the right, in one tensor each. The numbers
to compare come from a training step of this library.
"""

import json
import math

import pytest
import torch

from single_controller import ClassWithInitArgs, LocalWorkerGroup
from workers import Completion, RunLog, collate, read_args
from workers.fsdp.fsdp_worker import FSDPTrainWorker
from workers.tracking.metric_names import NAMES, BatchNumbers, renamed

PROMPT, RESPONSE = 6, 5  # verl's max_prompt_length and max_response_length, to which it pads
ARGS = {
    "hf_config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
    },
    "lr": 1e-2, "eps_clip": 0.2, "ppo_epochs": 1, "calculate_entropy": True, "use_rollout_logprobs": True,
    "rollout_max_response_len": RESPONSE, "rollout_max_prompt_len": PROMPT, "actor_num_gpus_per_node": 1,
}  # fmt: skip


def draw():
    """(prompt, response, log-probs of the old policy, score) of eight rows. One response is empty, some are cut off."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for row in range(8):
        prompt = torch.randint(0, 50, (3 + row % 4,), generator=random).tolist()
        length = (5, 3, 0, 5, 2, 4, 1, 5)[row]
        response = torch.randint(0, 50, (length,), generator=random).tolist()
        old = (-4.0 + torch.randn(length, generator=random) * 0.3).tolist()
        rows.append((prompt, response, old, float(torch.randn((), generator=random))))
    return rows


def of_verl(rows):
    """The batch as verl pads it."""
    size = len(rows)
    prompt_mask, response_mask = torch.zeros(size, PROMPT), torch.zeros(size, RESPONSE)
    scores = torch.zeros(size, RESPONSE)
    for row, (prompt, response, _, score) in enumerate(rows):
        prompt_mask[row, PROMPT - len(prompt) :] = 1
        response_mask[row, : len(response)] = 1
        scores[row, max(len(response) - 1, 0)] = score
    return prompt_mask, response_mask, scores


def three(name, x):
    return {f"{name}/mean": x.mean(), f"{name}/max": x.max(), f"{name}/min": x.min()}


def verl_data_metrics(rows):
    prompt_mask, response_mask, scores = of_verl(rows)
    lengths, prompts = response_mask.sum(1), prompt_mask.sum(1)
    kept = lengths > 0
    return {
        **three("critic/score", scores.sum(1)[kept]),
        **three("critic/rewards", scores.sum(1)[kept]),
        **three("response_length", lengths),
        "response_length/clip_ratio": (lengths == RESPONSE).float().mean(),
        **three("response_length_non_aborted", lengths[kept]),
        "response_length_non_aborted/clip_ratio": (lengths[kept] == RESPONSE).float().mean(),
        "response/aborted_ratio": (~kept).float().mean(),
        **three("prompt_length", prompts),
        "prompt_length/clip_ratio": (prompts == PROMPT).float().mean(),
        "perf/total_num_tokens": (lengths + prompts).sum(),
    }


def verl_actor_metrics(rows, log_probs):
    """GRPO's advantages (its mean and its standard deviation, with n - 1, in groups of four), and the clipped loss."""
    _, response_mask, scores = of_verl(rows)
    scores = scores.sum(1).view(2, 4)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).view(8, 1)
    advantages = advantages * response_mask
    old = torch.zeros(8, RESPONSE)
    for row, (_, response, log_probs_of_old, _) in enumerate(rows):
        old[row, : len(response)] = torch.tensor(log_probs_of_old)
    counted = response_mask.bool()

    def masked_mean(x):
        return x[counted].mean()

    negative_kl = (log_probs - old).clamp(-20, 20)
    ratio = negative_kl.exp()
    first, second = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    return {
        "actor/pg_loss": masked_mean(torch.maximum(first, second)),
        "actor/pg_clipfrac": masked_mean((second > first).float()),
        "actor/ppo_kl": masked_mean(-negative_kl),
        **three("critic/advantages", advantages[counted]),
        **three("critic/returns", advantages[counted]),  # without a critic, verl's returns are the advantages
    }


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """Train a step and log it. Returns what the json logger got, and the log-probabilities, as verl pads them."""
    tmp_path = tmp_path_factory.mktemp("verl")
    rows, args = draw(), read_args(ARGS)
    batch = collate(
        [prompt for prompt, *_ in rows],
        [Completion(response, old, "length" if len(response) == RESPONSE else "stop") for _, response, old, _ in rows],
        group_ids=[row // 4 for row in range(8)],
        rewards=[score for *_, score in rows],
    )
    with LocalWorkerGroup(1, ClassWithInitArgs(FSDPTrainWorker)) as group:
        group.init(args, "actor", False)
        log_probs = group.compute_log_prob(batch)
        with RunLog(run_dir=tmp_path, loggers=["json"], metric_names="verl", args=args) as log:
            with log.timed("rollout"), log.timed("train"):
                metrics = group.train(0, batch)[0]
            own = log.log(0, metrics, batch)
    told = json.loads((tmp_path / "json" / "metrics.jsonl").read_text())
    padded = torch.zeros(8, RESPONSE)
    begin = max(len(prompt) for prompt, *_ in rows)
    padded[:, : log_probs.shape[1] - begin] = log_probs[:, begin:]
    return rows, padded, own, told


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"policy_loss_type": "clip_cov"}, ["clip_fraction"]),  # others count other tokens
        ({"eps_clip_dual": 3.0}, ["clip_fraction"]),
        ({"policy_loss_type": "dpo"}, ["ppo_kl", "kl", "entropy", "rollout_log_prob_diff"]),  # sums over tokens
    ],
)
def test_numbers_of_another_kind_keep_their_names(config, kept):
    own = dict.fromkeys(kept, 0.1)
    for names in ("verl", "slime"):
        assert renamed(names, own, None, config) == own != renamed(names, own)


def test_verls_names_have_verls_numbers(stepped):
    rows, log_probs, own, told = stepped
    expected = {**verl_data_metrics(rows), **verl_actor_metrics(rows, log_probs)}
    assert 0 < expected["actor/pg_clipfrac"] < 1 and 0 < expected["response_length/clip_ratio"] < 1
    for name, value in expected.items():
        assert told[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    assert told["actor/entropy"] == own["entropy"] > 0 and told["actor/grad_norm"] == own["grad_norm"]
    assert told["actor/lr"] == 1e-2


def test_verls_times(stepped):
    rows, _, own, told = stepped
    whole = own["seconds/rollout"] + own["seconds/train"]
    tokens = sum(len(prompt) + len(response) for prompt, response, *_ in rows)
    assert told["timing_s/gen"] == own["seconds/rollout"] and told["timing_s/update_actor"] == own["seconds/train"]
    assert told["timing_s/step"] == told["perf/time_per_step"] == pytest.approx(whole)
    assert told["perf/throughput"] == pytest.approx(tokens / whole)  # of one rank
    assert told["timing_per_token_ms/update_actor"] == pytest.approx(1000 * own["seconds/train"] / tokens)
    responses = sum(len(response) for _, response, *_ in rows)
    assert told["timing_per_token_ms/gen"] == pytest.approx(1000 * own["seconds/rollout"] / responses)


def test_the_folder_has_this_librarys_names(stepped):
    own = stepped[2]
    assert {"policy_loss", "clip_fraction", "completion_length/max", "advantage/max", "truncated"} <= own.keys()
    assert own["completion_length/max"] == 5 and own["reward/max"] == pytest.approx(max(row[3] for row in stepped[0]))


def test_slimes_names(stepped):
    rows, _, own, _ = stepped
    told = renamed("slime", own)
    assert told["train/pg_loss"] == own["policy_loss"] and told["train/ppo_kl"] == own["ppo_kl"]
    assert told["train/train_rollout_logprob_abs_diff"] == own["rollout_log_prob_diff"]
    assert told["rollout/raw_reward"] == pytest.approx(sum(row[3] for row in rows) / 8)
    assert told["rollout/response_lengths"] == sum(len(row[1]) for row in rows) / 8
    assert told["rollout/total_lengths"] == sum(len(row[0]) + len(row[1]) for row in rows) / 8
    assert told["perf/step_time"] == own["seconds/rollout"] + own["seconds/train"]


@pytest.mark.parametrize("names", NAMES)
def test_no_metric_is_lost_or_merged(names):
    """Each number has exactly one name, and unknown ones keep theirs."""
    own = {name: float(k) for k, name in enumerate(["policy_loss", "kl", "critic/value", "mine/x", "seconds/train"])}
    told = renamed(names, own)
    assert all(list(told.values()).count(value) >= 1 for value in own.values()) and told["mine/x"] == 3.0
    assert (told == own) == (names == "own")


def test_with_a_kl_penalty_rewards_are_not_the_scores():
    """verl subtracts it from its token rewards, which the driver does not have: better no number than another one."""
    batch = BatchNumbers([1.0, 2.0], [3, 4], [1, 1], None)
    told = renamed("verl", {"reward": 1.5}, batch, {"kl_coef": 0.1})
    assert told["critic/score/mean"] == 1.5 and "critic/rewards/mean" not in told


def test_with_an_overlong_penalty_there_are_no_scores():
    """verl's scores have it, which the driver does not know."""
    told = renamed("verl", {}, BatchNumbers([1.0, 2.0], [3, 4], [1, 1], None), {"overlong_buffer_len": 2})
    assert "response_length/mean" in told and not any(name.startswith(("critic/score", "critic/rew")) for name in told)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"])
def test_returns_that_are_not_the_advantages(estimator):
    """Those of verl are the rewards to go; its advantages are these whitened, or minus a baseline."""
    advantages = {f"advantage/{what}": 0.5 for what in ("mean", "max", "min")}
    told = renamed("verl", advantages, None, {"advantage_estimator": estimator})
    assert told["critic/advantages/mean"] == 0.5 and "critic/returns/mean" not in told
    assert renamed("verl", advantages, None, {"advantage_estimator": "rloo"})["critic/returns/mean"] == 0.5


@pytest.mark.parametrize(
    ("aggregation", "others"),
    [
        ("token", set()),
        ("sequence", {"ppo_kl", "clip_fraction", "critic/value", "critic/value_clip_fraction"}),
        ("constant", {"kl", "entropy"}),
    ],
)
def test_means_over_what_verl_does_not_take_them_over_keep_their_names(aggregation, others):
    """verl takes the clipped share and its like over all tokens, and KL divergence and entropy as it takes the loss."""
    own = dict.fromkeys(["policy_loss", "ppo_kl", "clip_fraction", "kl", "entropy"], 0.1)
    own |= dict.fromkeys(["critic/value_loss", "critic/value", "critic/value_clip_fraction"], 0.1)
    told = renamed("verl", own, None, {"loss_aggregation": aggregation})
    assert own.keys() & told.keys() == others and len(told) == len(own)
    assert own.keys().isdisjoint(renamed("slime", {"ppo_kl": 0.1}, None, {"loss_aggregation": aggregation}))


def test_all_rows_without_a_completion():
    told = renamed("verl", {}, BatchNumbers([1.0], [0], [3], 0.0), {"rollout_max_response_len": 4})
    assert told["response/aborted_ratio"] == 1.0 and "critic/score/mean" not in told
    assert all(math.isfinite(value) for value in told.values())
