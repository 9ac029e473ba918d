"""Losses compared with loops over tokens, and their gradients with formulas."""

import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from workers.algorithms.losses import kl_estimate, policy_loss, token_weights, value_loss
from workers.algorithms.policy_losses import ppo_clip, ppo_clip_loss
from workers.data.micro_batches import cut_by_tokens
from workers.train.train_model import TokenOutputs

ROWS, TOKENS = 5, 9


def ppo(eps_clip=0.2, eps_clip_high=None):
    args = SimpleNamespace(eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_dual=None)
    return partial(ppo_clip_loss, args=args)


def data(**changes):
    g = torch.Generator().manual_seed(0)
    length = torch.tensor([9, 4, 6, 2, 7])
    first = torch.tensor([0, 5, 2, 3, 1])
    at = torch.arange(TOKENS)
    real = (at >= first[:, None]) & (at < (first + length)[:, None])
    counts = real & (at > first[:, None] + 1)  # the prompt has two tokens; the row of two tokens has no completion
    weights, count = token_weights(counts)
    batch = {
        "input_ids": torch.randint(0, 32, (ROWS, TOKENS), generator=g),
        "attention_mask": real.long(),
        "loss_weights": weights / count.float(),
    }
    for name in ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages", "values", "returns", "new"):
        batch[name] = torch.randn(ROWS, TOKENS, generator=g).masked_fill(~counts, math.nan)
    return {**batch, **changes}


def run(loss, batch, max_tokens, *, outputs):
    """A step's loss and its sums over micro-batches, with a filler; outputs are the batch's own entries."""
    total, sums = torch.zeros(()), {}
    cut = cut_by_tokens(batch, max_tokens)
    for part in [*cut, cut_by_tokens(batch, max_tokens, at_least=len(cut) + 1)[-1]]:
        given = {name: part.others[key] for name, key in outputs.items()}
        piece, report = loss(TokenOutputs(**given), part)
        total = total + piece
        for name, value in report.items():
            assert not value.requires_grad and value.dim() == 0
            sums[name] = sums.get(name, 0.0) + float(value)
    return total, sums


def mean(batch, token):
    """The mean of ``token(entries of that token)`` over the tokens that count."""
    names = [name for name, value in batch.items() if value.dtype == torch.float32]
    total = count = 0.0
    for b in range(ROWS):
        for t in range(TOKENS):
            if batch["loss_weights"][b, t]:
                total += token({name: float(batch[name][b, t].detach()) for name in names})
                count += 1
    return total / count


@pytest.mark.parametrize("max_tokens", [7, 18, 1000])
def test_policy_loss_matches_a_loop(max_tokens):
    batch = data()
    batch["rollout_log_probs"] = batch["log_probs"] - torch.linspace(-1, 2, ROWS * TOKENS).view(ROWS, TOKENS)
    batch["log_probs"] = batch["log_probs"].requires_grad_()
    loss = policy_loss(ppo(0.2, 0.5), kl_coef=0.3, entropy_coef=0.1)
    total, sums = run(loss, batch, max_tokens, outputs={"log_probs": "log_probs", "entropy": "entropy"})

    def surrogate(e):
        ratio = math.exp(e["log_probs"] - e["old_log_probs"])
        return -min(ratio * e["advantages"], min(max(ratio, 0.8), 1.5) * e["advantages"])

    def clipped(e):
        ratio = math.exp(e["log_probs"] - e["old_log_probs"])
        return float((e["advantages"] > 0 and ratio > 1.5) or (e["advantages"] < 0 and ratio < 0.8))

    def k3(e):
        d = e["ref_log_probs"] - e["log_probs"]
        return math.exp(d) - d - 1

    expected = {
        "policy_loss": mean(batch, surrogate),
        "clip_fraction": mean(batch, clipped),
        "ratio": mean(batch, lambda e: math.exp(e["log_probs"] - e["old_log_probs"])),
        "ppo_kl": mean(batch, lambda e: e["old_log_probs"] - e["log_probs"]),
        "kl": mean(batch, k3),
        "entropy": mean(batch, lambda e: e["entropy"]),
        "rollout_log_prob_diff": mean(batch, lambda e: abs(e["log_probs"] - e["rollout_log_probs"])),
    }
    assert 0 < expected["clip_fraction"] < 1
    assert sums == pytest.approx(expected, rel=1e-5)
    whole = expected["policy_loss"] + 0.3 * expected["kl"] - 0.1 * expected["entropy"]
    assert float(total.detach()) == pytest.approx(whole, rel=1e-5)


def test_without_old_log_probs_the_gradient_is_that_of_reinforce():
    batch = data()
    del batch["old_log_probs"], batch["ref_log_probs"]
    batch["log_probs"] = batch["log_probs"].requires_grad_()
    total, sums = run(policy_loss(ppo()), batch, 20, outputs={"log_probs": "log_probs"})
    assert sums == pytest.approx(
        {"policy_loss": mean(batch, lambda e: -e["advantages"]), "ratio": 1, "ppo_kl": 0, "clip_fraction": 0}, rel=1e-5
    )
    (gradient,) = torch.autograd.grad(total, batch["log_probs"])
    torch.testing.assert_close(gradient, -torch.nan_to_num(batch["advantages"]) * batch["loss_weights"])


def test_micro_batch_with_only_a_filler_has_a_graph():
    batch = {name: value[:0] for name, value in data().items()}
    (filler,) = cut_by_tokens(batch, 8, at_least=1)
    log_probs = torch.full((1, 2), -math.inf, requires_grad=True)
    total, _ = policy_loss(ppo(), kl_coef=0.1)(TokenOutputs(log_probs=log_probs), filler)
    total.backward()
    assert float(total.detach()) == 0 and log_probs.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("eps_clip", [0.4, None])
@pytest.mark.parametrize("max_tokens", [7, 1000])
def test_value_loss_matches_a_loop(eps_clip, max_tokens):
    batch = data()
    total, sums = run(value_loss(eps_clip=eps_clip), batch, max_tokens, outputs={"values": "new"})

    def both(e):
        clipped = e["values"] + min(max(e["new"] - e["values"], -0.4), 0.4)
        return (e["new"] - e["returns"]) ** 2, (clipped - e["returns"]) ** 2 if eps_clip else -math.inf

    expected = {
        "value_loss": mean(batch, lambda e: max(both(e)) / 2),
        "value_clip_fraction": mean(batch, lambda e: float(both(e)[1] > both(e)[0])),
        "value": mean(batch, lambda e: e["new"]),
        "return": mean(batch, lambda e: e["returns"]),
    }
    assert sums == pytest.approx(expected, rel=1e-5)
    assert float(total) == pytest.approx(expected["value_loss"], rel=1e-5)
    if eps_clip:
        assert 0 < expected["value_clip_fraction"] < 1


def test_kl_estimators_agree_with_the_exact_divergence():
    """Their expectation over all tokens of two distributions, summed exactly."""
    g = torch.Generator().manual_seed(3)
    p = (torch.randn(50, generator=g) * 0.3).log_softmax(0)
    q = (torch.randn(50, generator=g) * 0.3).log_softmax(0)
    divergence = float((p.exp() * (p - q)).sum())
    of = {name: float((p.exp() * kl_estimate(p, q, name)).sum()) for name in ("k1", "k2", "k3")}
    assert of["k1"] == pytest.approx(divergence, rel=1e-4) and of["k3"] == pytest.approx(divergence, rel=1e-4)
    assert of["k2"] == pytest.approx(divergence, rel=0.2)
    assert bool((kl_estimate(p, q, "k3") >= 0).all()) and float(kl_estimate(p, p, "k3").abs().max()) == 0


def test_gradients_of_the_estimators_in_expectation():
    """Arithmetic on the softmax by hand: the gradient of KL(p || q) for logit i is p_i (log(p_i / q_i) - KL), that of
    KL(q || p) is p_i - q_i. What k3 has is the second, what a "+" has is the first, and k1 has none."""
    g = torch.Generator().manual_seed(6)
    logits = torch.randn(20, generator=g, requires_grad=True)
    q = (logits.detach() + torch.randn(20, generator=g)).log_softmax(0)
    p = logits.log_softmax(0)
    probs, of_q = p.detach().exp().tolist(), q.exp().tolist()
    logs = [math.log(a / b) for a, b in zip(probs, of_q, strict=True)]
    assert min(logs) > -2.5  # no token is beyond the bound of k3
    divergence = sum(a * log for a, log in zip(probs, logs, strict=True))
    reverse = [a * (log - divergence) for a, log in zip(probs, logs, strict=True)]
    forward = [a - b for a, b in zip(probs, of_q, strict=True)]
    expected = {"k1": [0.0] * 20, "k2": reverse, "k3": forward, "low_var_kl": forward}
    expected |= dict.fromkeys(("k1+", "k3+", "low_var_kl+"), reverse)
    drawn = p.detach().exp()
    for name, of_logits in expected.items():
        (found,) = torch.autograd.grad((drawn * kl_estimate(p, q, name)).sum(), logits, retain_graph=True)
        assert found.tolist() == pytest.approx(of_logits, abs=1e-6), name
        assert torch.equal(kl_estimate(p, q, name), kl_estimate(p, q, name.removesuffix("+")))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3+", "low_var_kl"])
def test_unbiased_kl_is_unbiased_for_tokens_of_an_older_policy(name):
    """Tokens are drawn from the old policy: over all 20 of them, weighted by its probabilities, the gradient is that of
    KL(p || p_ref) for each logit, p_i (log(p_i / q_i) - KL). Without the ratios it is another one."""
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(20, generator=g, requires_grad=True)
    q = (logits.detach() + torch.randn(20, generator=g)).log_softmax(0)
    old = (logits.detach() + torch.randn(20, generator=g)).log_softmax(0)
    p = logits.log_softmax(0)
    probs, logs = p.detach().exp().tolist(), (p.detach() - q).tolist()
    divergence = sum(a * log for a, log in zip(probs, logs, strict=True))
    expected = [a * (log - divergence) for a, log in zip(probs, logs, strict=True)]
    batch = {"loss_weights": old.exp()[None], "advantages": torch.zeros(1, 20), "ref_log_probs": q[None]}
    batch |= {"input_ids": torch.zeros(1, 20, dtype=torch.int64), "attention_mask": torch.ones(1, 20)}
    (part,) = cut_by_tokens({**batch, "old_log_probs": old[None]}, 100)
    found = {}
    for unbiased in (True, False):
        loss = policy_loss(ppo(), kl_coef=0.5, kl_estimator=name, unbiased_kl=unbiased)
        total, report = loss(TokenOutputs(log_probs=p[None]), part)
        (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
        found[unbiased] = gradient.tolist(), float(report["kl"])
    assert found[True][0] == pytest.approx([0.5 * value for value in expected], abs=1e-6)
    assert found[False][0] != pytest.approx([0.5 * value for value in expected], abs=1e-3)
    assert found[True][1] == found[False][1]


@pytest.mark.parametrize("name", ["k3", "low_var_kl", "k3+", "low_var_kl+"])
@pytest.mark.parametrize("log_ratio", [-24.0, -20.0, -3.0, -2.0, 0.5, 24.0])
def test_one_stale_token_does_not_take_the_whole_step(name, log_ratio):
    """Among 9 tokens with a log-ratio of 0.1, one is far from the reference. k3 is at most 10 nats there, and the
    gradient of the whole loss is at most that of the bound."""
    log_probs = torch.full((1, 10), -1.0)
    log_probs[0, 4] = -1.0 + log_ratio
    log_probs.requires_grad_()
    ref = torch.full((1, 10), -1.1)
    ref[0, 4] = -1.0
    batch = {"loss_weights": torch.full((1, 10), 0.1), "advantages": torch.zeros(1, 10), "ref_log_probs": ref}
    batch |= {"input_ids": torch.zeros(1, 10, dtype=torch.int64), "attention_mask": torch.ones(1, 10)}
    (part,) = cut_by_tokens(batch, 100)
    total, report = policy_loss(ppo(), kl_coef=1.0, kl_estimator=name)(TokenOutputs(log_probs=log_probs), part)
    total.backward()
    exact = math.exp(-log_ratio) - 1 + log_ratio
    near = math.exp(-0.1) - 1 + 0.1
    assert float(report["kl"]) == pytest.approx(0.1 * (9 * near + min(exact, 10.0)), rel=1e-4)
    slope = log_ratio if name.endswith("+") else 1 - math.exp(-log_ratio) if exact < 10 else 0.0
    if abs(log_ratio) > 20:  # every estimator bounds the log-ratio
        slope = 0.0
    assert float(log_probs.grad[0, 4]) == pytest.approx(0.1 * slope, rel=1e-4, abs=1e-7)


def test_extreme_ratios_stay_finite():
    log_probs = torch.tensor([0.0, -500.0, -math.inf], requires_grad=True)
    loss, ratio, _ = ppo_clip(log_probs, torch.tensor([-500.0, 0.0, 0.0]), torch.tensor([-1.0, -1.0, 1.0]))
    assert bool(loss.isfinite().all()) and bool(ratio.isfinite().all())
    assert bool(kl_estimate(log_probs, torch.tensor([-500.0, 0.0, 0.0])).isfinite().all())


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("fraction", [1, 0.25])
def test_weights_give_the_requested_mean(aggregation, cut, fraction):
    """A token with a fraction in the mask counts as that much of a token."""
    mask = torch.tensor([[0, 1, fraction, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, fraction, 0], [fraction, 1, 1, 1]])
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(5))
    ranks = [token_weights(piece, aggregation, 6) for piece in mask.tensor_split(cut)]
    count = sum(float(count) for _, count in ranks)
    got = float((torch.cat([weights for weights, _ in ranks]) / count * x).sum())
    sums = [sum(float(mask[b, t]) * float(x[b, t]) for t in range(4)) for b in range(5)]
    lengths = [float(mask[b].sum()) for b in range(5)]
    expected = {
        "token": sum(sums) / sum(lengths),
        "sequence": sum(total / length for total, length in zip(sums, lengths, strict=True) if length) / 4,
        "constant": sum(sums) / 6 / 4,
    }
    assert got == pytest.approx(expected[aggregation], rel=1e-5)


def test_loss_of_ones_own_may_divide_by_the_number_of_tokens_of_a_row():
    """It is 0 in a filler, and in the row without a completion."""

    def step(least):
        def of_tokens(tokens):
            counts = tokens.mask.sum(1, keepdim=True).clamp(min=least)
            means = (tokens.log_probs.sum(1, keepdim=True) / counts).expand_as(tokens.log_probs)
            return -tokens.advantages * means, {"mean": means}

        batch = data()
        batch["log_probs"] = batch["log_probs"].requires_grad_()
        total, sums = run(policy_loss(of_tokens), batch, 20, outputs={"log_probs": "log_probs"})
        return total.detach(), sums, *torch.autograd.grad(total, batch["log_probs"])

    (total, sums, gradient), (expected, expected_sums, expected_gradient) = step(0), step(1)
    assert bool(total.isfinite()) and total == expected and sums == expected_sums
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("loss", "outputs", "without", "message"),
    [
        (
            policy_loss(ppo()),
            {"log_probs": "log_probs"},
            "loss_weights",
            "policy_loss: the micro-batch has no 'loss_weights'",
        ),
        (policy_loss(ppo()), {"log_probs": "log_probs"}, "advantages", "no 'advantages', only entropy, log_probs"),
        (policy_loss(ppo(), kl_coef=0.1), {"log_probs": "log_probs"}, "ref_log_probs", "no 'ref_log_probs'"),
        (policy_loss(ppo()), {"values": "values"}, "new", "the model returned no log_probs"),
        (policy_loss(ppo(), entropy_coef=0.1), {"log_probs": "log_probs"}, "new", "the model returned no entropy"),
        (value_loss(), {"values": "new"}, "values", "value_loss: the micro-batch has no 'values'"),
        (value_loss(), {"values": "new"}, "returns", "no 'returns'"),
    ],
)
def test_error_names_the_missing_entry(loss, outputs, without, message):
    batch = data()
    del batch[without]
    with pytest.raises(ValueError, match=re.escape(message)):
        run(loss, batch, 100, outputs=outputs)


def test_error_names_an_entry_of_the_wrong_shape():
    with pytest.raises(ValueError, match=re.escape("advantages has shape (5,); expected one number per token, (5, 9)")):
        run(policy_loss(ppo()), data(advantages=torch.zeros(ROWS)), 100, outputs={"log_probs": "log_probs"})


@pytest.mark.parametrize("name", ["loss", "policy_loss", "kl", "grad_norm"])
def test_metric_of_a_policy_loss_has_a_name_of_its_own(name):
    """Otherwise one of both would be lost: the loss's, or that of the trainer, which has the KL divergence here."""
    loss = policy_loss(lambda tokens: (tokens.log_probs, {name: tokens.log_probs}))
    with pytest.raises(ValueError, match=f"a metric named '{name}'; give it another name"):
        run(loss, data(), 100, outputs={"log_probs": "log_probs"})


def test_policy_loss_may_report_what_the_trainer_does_not_report():
    loss = policy_loss(lambda tokens: (tokens.log_probs, {"entropy": tokens.mask}))
    _, sums = run(loss, data(), 100, outputs={"log_probs": "log_probs"})
    assert sums["entropy"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("of_tokens", "message"),
    [
        (lambda tokens: tokens.log_probs, "returned a Tensor of shape (5, 9); expected the loss of each token and a"),
        (lambda tokens: tokens.log_probs[:2], "returned a Tensor of shape (2, 9); expected the loss of each token"),
        (lambda tokens: (tokens.log_probs, {"mean": 0.5}), "the mean has shape (); expected one number per token"),
    ],
)
def test_error_says_what_a_policy_loss_returned(of_tokens, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(policy_loss(of_tokens), data(), 100, outputs={"log_probs": "log_probs"})


def test_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="estimator='k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
