"""Policy losses and advantage estimators by name: compared with loops over tokens, and registered by a user. Numbers of
other libraries are in test_peers.py."""

import math
from functools import partial

import own_algorithms as own
import plain_losses
import pytest
import torch
from rank_threads import on_ranks

from workers import register_advantage, register_policy_loss
from workers.algorithms.advantages import group_advantages
from workers.algorithms.estimators import AdvantageRows
from workers.algorithms.losses import policy_loss, token_weights
from workers.algorithms.policy_losses import SELECTIONS, PolicyTokens, StepTokens, ppo_clip
from workers.algorithms.registry import POLICY_LOSS_KEYS
from workers.data.micro_batches import cut_by_tokens
from workers.data.rollout_data import RolloutDataError
from workers.train.args import read_args
from workers.train.args_checks import TrainArgsError, function_of
from workers.train.train_model import TokenOutputs

ROWS, TOKENS = 8, 9


def made(seed=0):
    """Ragged rows, one of which has no token that counts; what does not count is NaN."""
    g = torch.Generator().manual_seed(seed)
    at, first = torch.arange(TOKENS), torch.tensor([0, 3, 1, 2, 0, 4, 1, 0])[:, None]
    real = (at >= first) & (at < first + torch.tensor([9, 4, 6, 2, 7, 5, 8, 3])[:, None])
    mask = real & (at > first + 1)
    mask[0, 4] = False  # the output of a tool
    data = {"attention_mask": real.long(), "loss_mask": mask.long(), "input_ids": real.long()}
    for name in ("log_probs", "old_log_probs", "ref_log_probs"):
        data[name] = (torch.randn(ROWS, TOKENS, generator=g) / 3 - 2).masked_fill(~mask, math.nan)
    data["rewards"] = torch.randint(0, 3, (ROWS,), generator=g) / 2.0 + torch.arange(ROWS) / 10
    data["group_ids"] = torch.tensor([5, 5, 9, 5, 9, 9, 9, 7])
    return data


LOSSES = {
    "ppo_clip": {"eps_clip": 0.2, "eps_clip_high": 0.28},
    "dual_clip": {"eps_clip": 0.2, "eps_clip_dual": 1.5},
    "gspo": {"policy_loss_type": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.1},
    "cispo": {"policy_loss_type": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.2},
    "sapo": {"policy_loss_type": "sapo", "tau_pos": 1.3, "tau_neg": 2.0},
    "gpg": {"policy_loss_type": "gpg"},
    "geo_mean": {"policy_loss_type": "geo_mean", "eps_clip": 0.2, "eps_clip_high": 0.1},
    "dro": {"policy_loss_type": "dro", "dro_beta": 0.7, "ppo_epochs": 2},
    "dppo_tv": {"policy_loss_type": "dppo_tv", "eps_clip": 0.02, "eps_clip_high": 0.03, "eps_clip_dual": 1.4},
    "dppo_kl": {"policy_loss_type": "dppo_kl", "eps_clip": 2e-3, "eps_clip_dual": 1.4, "dppo_kl_tau": 0.1},
    "clip_cov": {"policy_loss_type": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.5},
    "kl_cov": {"policy_loss_type": "kl_cov", "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.8, "ppo_epochs": 2},
}


@pytest.mark.parametrize("max_tokens", [9, 20, 1000])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_match_a_loop(name, aggregation, max_tokens):
    data = made()
    given = {**LOSSES[name], "loss_aggregation": aggregation}
    if aggregation == "constant":
        given["loss_constant_length"] = 12
    plain = torch.nan_to_num(data["log_probs"]).double().requires_grad_()
    counted = [[plain[b, t] for t in range(TOKENS) if data["loss_mask"][b, t]] for b in range(ROWS)]
    expected = plain_losses.loss(counted, data, given)
    expected.backward()

    args = read_args(given)
    weights, count = token_weights(data["loss_mask"], aggregation, 12)
    of_rows = group_advantages(data["rewards"], data["group_ids"])
    batch = {**data, "loss_weights": weights / count.float(), "advantages": of_rows[:, None].expand(ROWS, TOKENS)}
    del batch["ref_log_probs"]
    batch |= selected(data, batch["advantages"], args)
    own = data["log_probs"].clone().requires_grad_()
    batch["log_probs"] = own
    loss = policy_loss(partial(function_of(args, "policy_loss_type"), args=args))
    total, sums = 0.0, {}
    for part in cut_by_tokens(batch, max_tokens, multiple_of=4):  # with fillers
        of_part, report = loss(TokenOutputs(log_probs=part.others["log_probs"]), part)
        total = total + of_part
        sums = {key: sums.get(key, 0.0) + float(value) for key, value in report.items()}
    total.backward()
    assert float(total.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    torch.testing.assert_close(own.grad, plain.grad.float(), atol=1e-6, rtol=1e-5)
    assert sums["policy_loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    for metric in ("clip_fraction", "cov_fraction"):
        assert sums.get(metric, 0.5) > 0
    assert "cov_fraction" in sums or not name.endswith("_cov")


def test_metrics_are_means_whatever_the_loss_is_divided_by():
    data = made()
    weights, count = token_weights(data["loss_mask"], "constant", 1000)
    counted = data["loss_mask"].float()
    batch = {**data, "loss_weights": weights / count.float(), "metric_weights": counted / counted.sum()}
    batch |= {"advantages": torch.ones(ROWS, TOKENS), "rollout_log_probs": data["log_probs"] - 0.5}
    batch["old_log_probs"] = data["log_probs"]
    args = read_args(LOSSES["ppo_clip"])
    loss = policy_loss(partial(function_of(args, "policy_loss_type"), args=args), entropy_coef=0.1)
    sums = {}
    for part in cut_by_tokens(batch, 20, multiple_of=4):
        outputs = TokenOutputs(
            log_probs=part.others["log_probs"], entropy=torch.full_like(part.others["advantages"], 2)
        )
        for key, value in loss(outputs, part)[1].items():
            sums[key] = sums.get(key, 0.0) + float(value)
    assert sums["policy_loss"] == pytest.approx(-float(counted.sum()) / 1000 / float(count))
    expected = {"ratio": 1, "entropy": 2, "rollout_log_prob_diff": 0.5}
    assert {name: sums[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def selected(data, advantages, args, ranks=1):
    """The entry of the tokens that the loss chooses over the whole step, on that many dp ranks."""
    loss = function_of({"policy_loss_type": args.policy_loss_type}, "policy_loss_type")
    if loss not in SELECTIONS:
        return {}
    rows = {**data, "advantages": advantages}

    def select(own, rank, gather):
        tokens = [own[name] for name in ("log_probs", "old_log_probs", "advantages")]
        return SELECTIONS[loss](StepTokens(*tokens, own["loss_mask"] != 0, gather, seed=7), args)

    return {"selected_tokens": torch.cat(on_ranks(select, rows_of_ranks(rows, ranks)))}


def estimated(estimator, data, args, ranks):
    """What the estimator returns on each of some dp ranks."""
    return on_ranks(
        lambda own, rank, gather: estimator(AdvantageRows(own, rank, gather), args), rows_of_ranks(data, ranks)
    )


def rows_of_ranks(data, ranks):
    parts = torch.arange(len(data["loss_mask"])).tensor_split(ranks)
    return [{name: value[rows] for name, value in data.items()} for rows in parts]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_chosen_by_covariance_do_not_depend_on_ranks_or_on_the_order_of_rows(name, ranks):
    """One of the ranks has no token that counts."""
    data = made(5)
    args = read_args(LOSSES[name])
    advantages = (torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 0.618 % 1 - 0.5) * 4
    log_probs, old = plain_losses.counted(data, "log_probs"), plain_losses.counted(data, "old_log_probs")
    of_tokens = plain_losses.counted({**data, "advantages": advantages}, "advantages")
    expected = plain_losses.chosen_tokens(log_probs, old, of_tokens, {**plain_losses.DEFAULTS, **dict(args)})
    assert 0 < sum(map(sum, expected)) < sum(map(len, expected))
    found = selected(data, advantages, args, ranks)["selected_tokens"]
    counts = data["loss_mask"] != 0
    assert [row[own].tolist() for row, own in zip(found, counts, strict=True)] == expected
    assert not found[~counts].any()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(ranks))
    moved = selected({key: value[order] for key, value in data.items()}, advantages[order], args, ranks)
    assert torch.equal(moved["selected_tokens"], found[order])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_step_without_advantages_chooses_no_token(name):
    data = made()
    chosen = selected(data, torch.zeros(ROWS, TOKENS), read_args({"policy_loss_type": name}))
    assert not chosen["selected_tokens"].any()


def test_clip_cov_draws_its_share_of_the_tokens_at_random():
    """Of 10,000 tokens within the bounds, 5 % are drawn: others with another seed, the same on any number of ranks and
    in any order of rows, and small and large covariances alike."""
    g = torch.Generator().manual_seed(0)
    shape = (20, 500)
    rows = {name: torch.randn(shape, generator=g) * 0.5 - 2 for name in ("log_probs", "advantages")}
    rows |= {"old_log_probs": rows["log_probs"].clone(), "loss_mask": torch.ones(shape)}
    bounds = {"policy_loss_type": "clip_cov", "clip_cov_lb": -50, "clip_cov_ub": 50}

    def drawn(ranks, seed, rows=rows, share=0.05):
        args = read_args({**bounds, "clip_cov_ratio": share})

        def select(own, rank, gather):
            tokens = [own[name] for name in ("log_probs", "old_log_probs", "advantages")]
            return SELECTIONS[function_of(args, "policy_loss_type")](
                StepTokens(*tokens, own["loss_mask"] != 0, gather, seed), args
            )

        return torch.cat(on_ranks(select, rows_of_ranks(rows, ranks)))

    first = drawn(1, 0)
    assert int(first.sum()) == 500
    assert torch.equal(first, drawn(4, 0))
    backwards = {name: value.flip(0) for name, value in rows.items()}
    assert torch.equal(first.flip(0), drawn(3, 0, backwards))
    assert int(drawn(2, 0, share=1e-6).sum()) == 1  # at least one
    again = drawn(1, 1)
    assert int(again.sum()) == 500 and 5 < int((first & again).sum()) < 60  # 25 by chance
    parts = (rows["log_probs"] - rows["log_probs"].mean()) * (rows["advantages"] - rows["advantages"].mean())
    assert 180 < int((first & (parts > parts.median())).sum()) < 320  # 250 by chance
    none = read_args({"policy_loss_type": "clip_cov", "clip_cov_lb": 100, "clip_cov_ub": 200})
    assert not selected(rows, rows["advantages"], none)["selected_tokens"].any()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_no_token_is_chosen_of_rows_without_any(name):
    data = made()
    data["loss_mask"] = torch.zeros_like(data["loss_mask"])
    for ranks in (1, 2):
        assert not selected(data, torch.ones(ROWS, TOKENS), read_args(LOSSES[name]), ranks)["selected_tokens"].any()


@pytest.mark.parametrize("name", POLICY_LOSS_KEYS)
def test_the_table_has_the_keys_that_a_loss_reads(name):
    """`read_args` refuses all others, and completes these."""
    read = set()

    class Args:
        policy_loss_type = name

        def __getattr__(self, key):
            read.add(key)
            return given[key]

    needed = {"dro": {"ppo_epochs": 2, "dro_beta": 0.1}, "dpo": {}}.get(name, {"ppo_epochs": 2})
    given = read_args({"policy_loss_type": name, **needed})
    log_probs, old, advantages = torch.tensor([[[-1.0, -2.0]], [[-1.5, -1.0]], [[1.0, -1.0]]])
    data = {"log_probs": log_probs, "old_log_probs": old, "loss_mask": torch.ones(1, 2)}
    others = selected(data, advantages, Args())
    tokens = PolicyTokens(log_probs, old, advantages, torch.ones(1, 2, dtype=torch.bool), others)
    function_of(given, "policy_loss_type")(tokens, Args())
    assert read == POLICY_LOSS_KEYS[name].keys() - {"loss_aggregation"}


def test_a_loss_without_its_choice_of_tokens_names_what_is_missing():
    args = read_args({"policy_loss_type": "kl_cov", "ppo_epochs": 2})
    tokens = PolicyTokens(*(torch.zeros(1, 2) for _ in range(3)), torch.ones(1, 2, dtype=torch.bool), {})
    with pytest.raises(ValueError, match="no 'selected_tokens'"):
        function_of(args, "policy_loss_type")(tokens, args)


def test_dual_clip_by_hand():
    """Clipped at 2 where A = -1 and r = 3; at 0.8 where r = 0.5; not where r = 1.5; and at 1.2 where A = 1."""
    ratios, advantages = torch.tensor([3.0, 0.5, 1.5, 3.0]), torch.tensor([-1.0, -1.0, -1.0, 1.0])
    loss, ratio, clipped = ppo_clip(ratios.log(), torch.zeros(4), advantages, eps_clip_dual=2.0)
    assert loss.tolist() == pytest.approx([2.0, 0.8, 1.5, -1.2])
    assert ratio.tolist() == pytest.approx(ratios.tolist())
    assert clipped.tolist() == [True, True, False, True]


def test_missing_entry_is_named():
    args = read_args({"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1})
    data = made()
    del data["ref_log_probs"]
    with pytest.raises(
        RolloutDataError, match=r"no 'ref_log_probs', which .*='mine' needs; call init\(with_ref=True\)"
    ):
        function_of(args, "advantage_estimator")(AdvantageRows(data, estimator="mine"), args)


# --- a user's own --------------------------------------------------------------------------------------------


def test_registered_name_and_dotted_path_choose_a_function():
    given = {"policy_loss_type": "own_reinforce", "advantage_estimator": "own_advantage", "user": {"scale": 2.0}}
    args = read_args(given)
    # What the ranks read: they import the module themselves.
    assert (
        args.policy_loss_type == "own_algorithms.reinforce" and args.advantage_estimator == "own_algorithms.above_mean"
    )
    assert read_args(args) == args
    assert function_of(args, "policy_loss_type") is own.reinforce
    data = made()
    expected = 2 * (data["rewards"] - data["rewards"].mean())
    torch.testing.assert_close(torch.cat(estimated(own.above_mean, data, args, 2)), expected)
    by_path = read_args({"policy_loss_type": "own_algorithms.unregistered"})
    assert function_of(by_path, "policy_loss_type") is own.unregistered
    register_policy_loss("own_reinforce")(own.reinforce)  # once more is no error, as when a module is imported again


def test_loss_of_the_wrong_shape_is_an_error():
    batch = {**made(), "loss_weights": torch.ones(ROWS, TOKENS), "advantages": torch.ones(ROWS, TOKENS)}
    (part,) = cut_by_tokens(batch, 1000)
    log_probs = torch.zeros(part.input_ids.shape)
    with pytest.raises(ValueError, match=r"the loss has shape \(8, 8\); expected one number per token, \(8, 9\)"):
        policy_loss(partial(own.unregistered, args=None))(TokenOutputs(log_probs=log_probs), part)


def test_registering_is_refused_with_a_reason(monkeypatch):
    def inside(tokens, args):
        return tokens.log_probs, {}

    with pytest.raises(ValueError, match="inside is not at the top of its module"):
        register_policy_loss("inside")(inside)
    with pytest.raises(
        ValueError, match=r"'own_reinforce' is already the policy_loss_type of own_algorithms\.reinforce"
    ):
        register_policy_loss("own_reinforce")(own.unregistered)
    with pytest.raises(ValueError, match="'grpo' is already the advantage_estimator of workers"):
        register_advantage("grpo")(own.above_mean)
    with pytest.raises(ValueError, match=r"'a\.b' cannot be a name"):
        register_advantage("a.b")
    monkeypatch.setattr(own.above_mean, "__module__", "__main__")
    register_advantage("of_the_script")(own.above_mean)
    with pytest.raises(TrainArgsError, match="'of_the_script': the function is in __main__, which the ranks cannot"):
        read_args({"advantage_estimator": "of_the_script"})
