"""Corrections compared with loops over tokens, and with numbers of other libraries. test_peers.py has most of these."""

import math
import re
import statistics
from functools import partial
from types import SimpleNamespace

import plain_losses
import pytest
import torch

from workers.algorithms.corrections import (
    PRESETS,
    Correction,
    correct,
    correction_metrics,
    find_correction,
    importance_ratios,
    mean_weight,
    off_policy_sequences,
    probability_errors,
)
from workers.algorithms.losses import policy_loss, token_weights
from workers.algorithms.policy_losses import ppo_clip_loss
from workers.data.micro_batches import cut_by_tokens
from workers.train.train_model import TokenOutputs

ROWS, TOKENS = 7, 11
BOTH = ["geo_rs+token_tis", "seq_mis+token_rs", "error_rs+icepop"]


def made(seed=0, spread=0.5):
    """Rows with holes, one of them without a token that counts; what does not count is NaN."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 2, (ROWS, TOKENS), generator=g)
    mask[3] = 0
    old = torch.randn(ROWS, TOKENS, generator=g) - 2
    rollout = old + spread * torch.randn(ROWS, TOKENS, generator=g)
    rollout[1] = old[1] + 0.0005  # within the bounds of every preset
    hidden = mask == 0
    return {
        "loss_mask": mask,
        "old_log_probs": old.masked_fill(hidden, math.nan),
        "rollout_log_probs": rollout.masked_fill(hidden, math.nan),
    }


def corrected(data, name, **bounds):
    return correct(data["old_log_probs"], data["rollout_log_probs"], data["loss_mask"], find_correction(name, **bounds))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*PRESETS, *BOTH])
def test_every_preset_matches_a_loop(name, seed):
    data = made(seed)
    factors, rejected = plain_losses.corrections(data, "" if name == "report" else name)
    found = corrected(data, name)
    assert found.weights.dtype == torch.float32 and found.rejected.tolist() == rejected
    for row in range(ROWS):
        of_row = found.weights[row][data["loss_mask"][row] != 0].tolist()
        assert of_row == pytest.approx(factors[row], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", [*PRESETS, *BOTH])
def test_metrics_match_a_loop_on_any_number_of_ranks(name, ranks):
    data = made(5)
    parts = [
        corrected({key: value[rows] for key, value in data.items()}, name)
        for rows in torch.arange(ROWS).tensor_split(ranks)
    ]
    found = correction_metrics(torch.stack([part.sums for part in parts]).sum(0), [float(p.largest) for p in parts])

    rows = list(zip(*(plain_losses.counted(data, f"{of}_log_probs") for of in ("old", "rollout")), strict=True))
    of_rows, rejected = plain_losses.corrections(data, "" if name == "report" else name)
    full = [
        (old, rollout, factors, out)
        for (old, rollout), factors, out in zip(rows, of_rows, rejected, strict=True)
        if old
    ]
    preset = find_correction(name)
    level = preset.weight or ("token" if preset.reject == "error" else preset.reject) or "token"
    raw = [plain_losses.ratios(old, rollout, level) for old, rollout, *_ in full]
    used = [[0.0 if out else factor for factor in factors] for *_, factors, out in full]
    zeroed = [preset.zero_rejected and not any(factors) for *_, factors, _ in full]
    if level != "token":  # one ratio per completion
        raw, used = [row[:1] for row in raw], [row[:1] for row in used]
    flat, weights = [x for row in raw for x in row], [x for row in used for x in row]
    kept = [not out for (*_, out), row in zip(full, raw, strict=True) for _ in row]
    left = [weight for weight, keep in zip(weights, kept, strict=True) if keep]
    outside = [keep and not preset.low <= ratio <= preset.high for ratio, keep in zip(flat, kept, strict=True)]
    logs = [b - a for old, rollout, *_ in full for a, b in zip(old, rollout, strict=True)]
    means = [(statistics.fmean(old), statistics.fmean(rollout)) for old, rollout, *_ in full]
    expected = {
        "mismatch_k1": statistics.fmean(logs),
        "mismatch_k3": statistics.fmean(math.exp(-log) - 1 + log for log in logs),
        "mismatch_perplexity_gap": statistics.fmean(math.exp(-old) - math.exp(-rollout) for old, rollout in means),
        "mismatch_log_perplexity_gap": statistics.fmean(abs(rollout - old) for old, rollout in means),
        "correction_ratio": statistics.fmean(flat),
        "correction_ratio_max": max(flat),
        "correction_weight": statistics.fmean(left) if left else 1.0,
        "correction_ess": sum(weights) ** 2 / len(weights) / sum(weight**2 for weight in weights),
        "correction_outside": sum(outside) / len(outside),
        "correction_rejected": (sum(rejected) + sum(zeroed)) / len(full),
    }
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["token_tis", "seq_tis", "geo_mis", "icepop", "seq_mask_tis", *BOTH])
def test_normalized_weights_match_a_loop_on_any_number_of_ranks(name, ranks):
    """One of three ranks has the row without a token that counts. Completions that are left out do not count."""
    data = made(2)
    expected, _ = plain_losses.corrections(data, name, normalize=True)
    shards = [{key: value[rows] for key, value in data.items()} for rows in torch.arange(ROWS).tensor_split(ranks)]
    parts = [corrected(shard, name, normalize=True) for shard in shards]
    mean = mean_weight(torch.stack([part.sums for part in parts]).sum(0))
    assert mean != pytest.approx(1, abs=1e-4)
    found = torch.cat([part.weights for part in parts]) / mean
    for row in range(ROWS):
        assert found[row][data["loss_mask"][row] != 0].tolist() == pytest.approx(expected[row], rel=1e-6)


def test_metrics_without_a_token_that_counts():
    data = {**made(), "loss_mask": torch.zeros(ROWS, TOKENS)}
    found = correction_metrics(corrected(data, "token_tis").sums, [0.0])
    assert found.pop("correction_weight") == 1.0
    assert set(found.values()) == {0.0}


def test_mean_of_weights_that_are_all_masked_is_0():
    old, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-5.0, -6.0]])
    found = correct(old, rollout, torch.ones(1, 2), find_correction("icepop"))
    metrics = correction_metrics(found.sums, [float(found.largest)])
    assert metrics["correction_weight"] == 0.0 and metrics["correction_outside"] == 1.0
    assert mean_weight(found.sums) == 1.0  # by which they are divided


@pytest.mark.parametrize("name", [*PRESETS, *BOTH])
def test_loss_is_the_same_bit_for_bit_where_engine_and_trainer_agree(name):
    data = made(1)
    found = corrected({**data, "rollout_log_probs": data["old_log_probs"]}, name)
    assert not found.rejected.any() and bool((found.weights[data["loss_mask"] != 0] == 1).all())
    assert mean_weight(found.sums) == 1.0
    weights, count = token_weights(data["loss_mask"])
    log_probs = torch.nan_to_num(data["old_log_probs"]) + 0.1  # the policy has moved in an earlier step
    results = []
    for more in ({}, {"correction_weights": found.weights}):
        batch = {
            "input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64),
            "attention_mask": torch.ones(ROWS, TOKENS),
            "loss_weights": weights / count.float(),
            "advantages": torch.linspace(-1, 1, ROWS)[:, None].expand(ROWS, TOKENS).clone(),
            "old_log_probs": data["old_log_probs"],
            **more,
        }
        (part,) = cut_by_tokens(batch, 1000)
        own = log_probs.clone().requires_grad_()
        args = SimpleNamespace(eps_clip=0.2, eps_clip_high=None, eps_clip_dual=None)
        total, _ = policy_loss(partial(ppo_clip_loss, args=args))(TokenOutputs(log_probs=own), part)
        total.backward()
        results.append((float(total.detach()), own.grad))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def logs(*rows):
    return torch.tensor(rows)


def test_tokens_that_reject_their_row():
    """NovaSky-AI/SkyRL, skyrl-train/tests/cpu/algorithms/test_off_policy_correction.py, with its bounds."""

    def out(old, rollout, mask=(1.0, 1.0, 1.0), **bounds):
        found = correct(logs(old), logs(rollout), logs([*mask]), find_correction("token_rs", **bounds))
        return bool(found.rejected)

    outlier = [-1.0] * 3, [-1.0, -1.0, -6.0]
    assert out(*outlier) and not out(*outlier, mask=[1.0, 1.0, 0.0])
    assert not out([-1.0, -1.5, -1.0], [-1.5, -1.0, -1.0])
    assert out([-1.0, -1.0, -11.0], [-1.0] * 3, reject_high=math.inf)


OLD = [[-1.0, -1.5, -0.5, -2.0, 0.0], [-1.2, -0.7, 0.0, 0.0, 0.0], [-0.9, -1.1, -1.3, 0.0, 0.0]]
ROLLOUT = [[-1.5, -1.0, -1.5, -1.9, 0.0], [-1.21, -0.692, 0.0, 0.0, 0.0], [-2.0, -1.9, -2.2, 0.0, 0.0]]
MASK = [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
UNEVEN = torch.tensor(OLD), torch.tensor(ROLLOUT), torch.tensor(MASK)
"""Rows of several lengths, on which the function of another library was run."""


def test_errors_have_no_lower_bound():
    with pytest.raises(ValueError, match="no bound 'reject_low': an error is at least 1"):
        find_correction("error_rs", reject_low=0.5)


def test_sequence_errors_of_nemo_rl():
    """NVIDIA-NeMo/RL 7ea279a, nemo_rl/algorithms/grpo.py: compute_and_apply_seq_logprob_error_masking with a
    seq_logprob_error_threshold of 2."""
    expected = [1.7802238464355469, 1.0090410709381104, 2.563103437423706]
    torch.testing.assert_close(probability_errors(*UNEVEN)[:, 0].float(), torch.tensor(expected), rtol=1e-6, atol=0)
    assert correct(*UNEVEN, find_correction("error_rs")).rejected.tolist() == [False, False, True]
    assert correct(*UNEVEN, find_correction("error_rs", reject_high=1.7)).rejected.tolist() == [True, False, True]
    # Errors of opposite signs, which cancel in the geometric mean.
    far = logs([-1.0, -3.0]), logs([-3.0, -1.0]), torch.ones(1, 2)
    assert correct(*far, find_correction("error_rs")).rejected.all()
    assert not correct(*far, find_correction("geo_rs")).rejected.any()


def test_only_tokens_of_negative_advantage_are_masked():
    """In a completion that is far off-policy; tokens that do not count do not take part in its mean."""
    log_probs, rollout = logs([-3.0, -2.0, math.nan]), logs([-1.0, -2.0, math.nan])
    advantages, mask = torch.tensor([[-1.0, 0.0, -1.0]]), torch.tensor([[1, 1, 0]])
    found = off_policy_sequences(log_probs, rollout, advantages, mask, 0.99)
    assert found.tolist() == [[True, False, False]]
    assert not off_policy_sequences(log_probs, rollout, advantages, mask, 1.0).any()  # the mean itself is allowed


def test_what_is_done_outside_of_the_bounds():
    ratios = torch.tensor([0.25, 0.6, 1.0, 1.9, 4.0])
    old, none = ratios.log().expand(2, 5), torch.zeros(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])

    def found(**how):
        return correct(old, none, mask, Correction(low=0.5, high=2.0, **how))

    assert found(weight="token", outside="truncate").weights[0].tolist() == pytest.approx([0.5, 0.6, 1.0, 1.9, 2.0])
    assert found(weight="token", outside="mask").weights[0].tolist() == pytest.approx([0.0, 0.6, 1.0, 1.9, 0.0])
    assert found(reject="token", reject_low=0.5, reject_high=2.0).rejected.tolist() == [True, False]
    for level in ("token", "sequence", "geometric"):
        for log in (5000.0, -5000.0):
            extreme = importance_ratios(logs([log]), torch.zeros(1, 1), torch.ones(1, 1), level)
            assert extreme.tolist() == [[pytest.approx(math.exp(math.copysign(20, log)))]]
    assert probability_errors(logs([5000.0]), torch.zeros(1, 1), torch.ones(1, 1)).tolist() == [
        [pytest.approx(math.exp(20))]
    ]


def test_ratios_of_long_completions_are_exact():
    """The log ratios of 20,000 tokens, added in float32, would be wrong in the sixth digit."""
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(1, 20_000, generator=g)
    rollout = old + 0.01 * torch.randn(old.shape, generator=g)
    total = math.fsum(a - b for a, b in zip(old[0].tolist(), rollout[0].tolist(), strict=True))
    for level, log in (("sequence", total), ("geometric", total / 20_000)):
        found = importance_ratios(old, rollout, torch.ones(old.shape), level)
        assert found.tolist() == [[pytest.approx(math.exp(log), rel=1e-11, abs=0)] * 20_000]


def test_bounds_replace_those_of_the_preset():
    assert find_correction("icepop") == Correction("token", "mask", 0.5, 5.0)
    both = find_correction("token_tis+geo_rs", low=0.1, reject_high=1.5)
    assert (
        both
        == Correction("token", "truncate", 0.1, 2.0, "geometric", 0.99, 1.5)
        == find_correction("geo_rs+token_tis", low=0.1, reject_high=1.5)
    )


@pytest.mark.parametrize(
    ("name", "bounds", "message"),
    [
        ("tis", {}, "'tis' is no correction; expected one of report, token_tis"),
        ("token_tis+seq_tis", {}, "only one *_rs and one weighting can be joined"),
        ("geo_rs+token_tis+icepop", {}, "only one *_rs and one weighting can be joined"),
        ("report+token_tis", {}, "only one *_rs and one weighting can be joined"),
        ("seq_mask_tis+token_tis", {}, "only one *_rs and one weighting can be joined"),
        ("seq_mask_tis+geo_rs", {}, "only one *_rs and one weighting can be joined"),
        ("geo_rs", {"normalize": True}, "'geo_rs' has no weights to normalize"),
        ("geo_rs", {"high": 2.0}, "'geo_rs' has no bound 'high'"),
        ("token_tis", {"reject_low": 0.5}, "'token_tis' has no bound 'reject_low'"),
        ("token_tis", {"high": 0.5}, "high=0.5: expected 0 <= low <= 1 <= high"),
        ("geo_rs", {"reject_low": 1.5}, "reject_low=1.5 and reject_high=1.01: expected 0 <= reject_low <= 1"),
    ],
)
def test_error_names_what_is_wrong(name, bounds, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find_correction(name, **bounds)


def test_unknown_level():
    with pytest.raises(ValueError, match="level='row'; expected one of token, sequence, geometric"):
        importance_ratios(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "row")
