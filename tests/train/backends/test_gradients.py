"""The gradient of every policy loss, advantage and correction, against loops over tokens in one process: the same on
any number of dp ranks, tensor and pipeline parallel ranks, and micro-batches."""

import own_algorithms  # registers names
import plain_losses
import pytest
import test_estimators
import torch
from reference import ReferenceGRPO, small_llama
from shard_helpers import assembled
from test_both_backends import DP2, DP4, FSDP1, FSDP2, FSDP4, PP2, SP2_DP2, TP2, TP2_DP2, TP2_PP2, called
from train_helpers import distance, gradients, learn, saved, whole_weights
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from single_controller import Broadcast, WorkerError
from workers.train.args import read_args

pytestmark = pytest.mark.timeout(180)

CASES = {
    "grpo": {"loss_aggregation": "sequence", "eps_clip_dual": 1.3},
    "dapo": {"eps_clip_high": 0.28, "rollout_max_response_len": 9, "overlong_buffer_len": 4},
    "dr_grpo": {"grpo_std_normalization": False, "loss_aggregation": "constant", "loss_constant_length": 12},
    "gspo": {"policy_loss_type": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03, "loss_aggregation": "sequence"},
    "cispo": {"policy_loss_type": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1},
    "rloo": {"advantage_estimator": "rloo", "rollout_correction": "token_tis"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1,
                            "rollout_correction": "icepop"},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline",
                                     "rollout_correction": "seq_rs+seq_tis", "loss_aggregation": "sequence"},
    "seq_mis": {"rollout_correction": "seq_mis"},
    "geo_mis": {"rollout_correction": "geo_mis"},
    "geo_mean": {"policy_loss_type": "geo_mean", "eps_clip": 0.2, "loss_aggregation": "sequence",
                 "rollout_correction": "token_tis"},
    "dppo_kl": {"policy_loss_type": "dppo_kl", "eps_clip": 1e-3, "eps_clip_dual": 1.4, "dppo_kl_tau": 0.1},
    "clip_cov": {"policy_loss_type": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.5,
                 "loss_aggregation": "sequence"},
    "kl_cov": {"policy_loss_type": "kl_cov", "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.8, "rollout_correction": "seq_rs"},
    "normalized": {"rollout_correction": "seq_tis", "rollout_correction_normalize": True},
    "normalized_rest": {"rollout_correction": "error_rs+token_tis", "rollout_correction_normalize": True,
                        "rollout_rejection_high": 1.35},
    "seq_mask_tis": {"rollout_correction": "seq_mask_tis", "rollout_rejection_low": 0.9, "rollout_rejection_high": 1.2},
    "off_policy_sequences": {"opsm_delta": 0.02, "rollout_correction": "icepop", "loss_aggregation": "sequence"},
    "kl_loss": {"kl_loss_coef": 0.5, "kl_loss_type": "k3+", "rollout_correction": "seq_rs+token_tis"},
    "unbiased_kl": {"kl_loss_coef": 0.5, "use_unbiased_kl": True, "loss_aggregation": "sequence"},
}  # fmt: skip
"""Each loss, advantage, aggregation, and level and kind of correction is in one of them."""

MASKS = {
    "normalized_rest": ["correction_rejected"],
    "seq_mask_tis": ["correction_rejected"],
    "off_policy_sequences": ["opsm_fraction"],
}

# An Adam step of lr / eps * gradient, to one part in a million: whole weights show the gradient on any backend.
EXPOSED = {"lr": 1e6, "adam_eps": 1e6, "adam_beta1": 0.0, "clip_grad": 0.0, "rollout_max_response_len": 16}


FIELDS = {**small_llama().config.to_diff_dict(), "initializer_range": 0.1, "head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
for llamas in ("model_type", "architectures", "rope_parameters"):
    FIELDS.pop(llamas, None)
OTHERS = {"mistral": MistralConfig(**FIELDS, sliding_window=4), "qwen3": Qwen3Config(**FIELDS, rope_parameters=YARN)}


@pytest.fixture(scope="module")
def off_policy(data):
    """The rollout with log-probabilities of other policies: an older one, the engine's and a reference's."""
    return with_other_policies(small_llama(), data)


def with_other_policies(model, data):
    g = torch.Generator().manual_seed(1)
    now = ReferenceGRPO(model).log_probs(data)
    made = {"old_log_probs": now + 0.2 * torch.randn(now.shape, generator=g)}
    made["rollout_log_probs"] = made["old_log_probs"] + 0.4 * torch.randn(now.shape, generator=g)
    made["ref_log_probs"] = now + 0.3 * torch.randn(now.shape, generator=g)
    whole = data.clone()
    for name, value in made.items():
        whole[name] = torch.where(whole["loss_mask"] != 0, value, torch.nan)  # what does not count is not read
    return whole


@pytest.fixture(scope="module")
def expected(off_policy):
    """Case -> (loss, name of a parameter -> gradient), in float64."""
    return of_loops(small_llama().double(), off_policy, CASES)


def of_loops(model, off_policy, cases):
    log_probs, found = completion_log_probs(model, off_policy), {}
    for name, args in cases.items():
        total = plain_losses.loss(log_probs, off_policy, args)
        found[name] = float(total.detach()), gradients_of(model, total)
    return found


def completion_log_probs(model, data):
    """The log-probabilities of the tokens that count, by row."""
    plain, found = ReferenceGRPO(model), []
    for row in range(len(data)):
        tokens = plain._tokens(model, data, row)
        found.append([tokens[t][0] for t in tokens if data["loss_mask"][row, t]])
    return found


def gradients_of(model, loss):
    """The loss may share a graph with others."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


MODEL_OUTPUTS = ["grpo", "gspo", "clip_cov", "kl_loss"]
"""Tensor parallel ranks differ in how they compute log-probabilities and their gradients, which all losses share. Those
of one loss per level of ratios, of covariances and of an additional term are computed in each run. One rank differs
from two in the sums over ranks: see test_invariance.py."""

PIPELINE = [*MODEL_OUTPUTS, "reinforce_plus_plus", "reinforce_plus_plus_baseline", *MASKS, "unbiased_kl"]
"""The first stage of a pipeline lacks log-probabilities: also those that make advantages of them, or leave rows out."""

IN_FULL = [(FSDP1, 16), (FSDP1, 1000), (FSDP2, 1000), (FSDP4, 40), (SP2_DP2, 20), (TP2, 40), (TP2, 1000), (PP2, 40),
           (PP2, 1000), (DP2, 40), (DP4, 16), (TP2_DP2, 40), (TP2_PP2, 40)]  # fmt: skip
OTHERS_IN_FULL = [(FSDP2, "mistral"), (FSDP2, "qwen3"), (PP2, "qwen3"), (TP2, "mistral"), (TP2_PP2, "qwen3"),
                  (TP2_DP2, "mistral")]  # fmt: skip

SECOND_FULL = [FSDP2, pytest.param(PP2, marks=pytest.mark.full("gradients in every parallel configuration"))]


@pytest.mark.parametrize(
    ("way", "most", "names"),
    [
        (FSDP2, 80, None),
        pytest.param(TP2, 80, MODEL_OUTPUTS, id="tp2-80-some"),
        pytest.param(PP2, 80, PIPELINE, id="pp2-80-some"),
        *(
            pytest.param(way, most, None, marks=pytest.mark.full("gradients in every parallel configuration"))
            for way, most in IN_FULL
        ),
    ],
    ids=called,
)
def test_gradients_match_plain_loops(start, off_policy, expected, way, most, names):
    cases = CASES if names is None else {name: CASES[name] for name in names}
    group = start(way, **EXPOSED)
    parts = group.worker_group.execute_with_func_generator(gradients, Broadcast(off_policy), Broadcast(cases), most)
    for name in cases:
        loss, of_parameters = expected[name]
        metrics = [part[name][0] for part in parts]
        assert all({**other, "seconds": 0} == {**metrics[0], "seconds": 0} for other in metrics)
        assert metrics[0]["loss"] == pytest.approx(loss, abs=1e-5), name
        found = assembled([part[name][1] for part in parts])
        assert distance(found, of_parameters) < 1e-5, name
        assert max(value.abs().max() for value in of_parameters.values()) > 1e-2  # so that 1e-5 says something
        for metric in MASKS.get(name, ()):
            assert 0 < metrics[0][metric] < 1, "the case masks nothing, or everything"


@pytest.mark.parametrize(
    ("way", "model_type"),
    [
        (TP2, "qwen3"),
        (PP2, "mistral"),
        *(pytest.param(*one, marks=pytest.mark.full("gradients of each type of model")) for one in OTHERS_IN_FULL),
    ],
    ids=called,
)
def test_gradients_of_other_model_types(start, tmp_path, data, way, model_type):
    """Of every parameter: those of Qwen3's norms of queries and keys are sums over the tensor-parallel ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(OTHERS[model_type]).eval()
    folder, rows = saved(model, tmp_path), with_other_policies(model, data)
    (loss, of_parameters) = of_loops(model.double(), rows, {"grpo": CASES["grpo"]})["grpo"]
    group = start(way, hf_checkpoint=folder, **EXPOSED)
    parts = group.worker_group.execute_with_func_generator(
        gradients, Broadcast(rows), Broadcast({"grpo": CASES["grpo"]}), 40
    )
    assert parts[0]["grpo"][0]["loss"] == pytest.approx(loss, abs=1e-5)
    found = assembled([part["grpo"][1] for part in parts])
    assert found.keys() == of_parameters.keys()
    for name, expected in of_parameters.items():
        assert (found[name] - expected).abs().max() < 1e-5 + 1e-4 * expected.abs().max(), name
    least = min(of_parameters.items(), key=lambda one: one[1].abs().max())
    print(f"{model_type}: difference {distance(found, of_parameters):.1e}, least gradient {least[1].abs().max():.1e}")
    assert least[1].abs().max() > 1e-4, least[0]


@pytest.mark.parametrize(
    "way", [pytest.param(FSDP2, marks=pytest.mark.full("what exact mode shows on FSDP")), PP2], ids=called
)
def test_corrections_change_nothing_where_engine_and_trainer_agree(start, data, way):
    """Not a bit of the weights."""
    found = {}
    for name in (None, "geo_rs+token_tis", "seq_mis", "report"):
        group = start(way, rollout_correction=name)
        same = data.clone().set("rollout_log_probs", group.worker_group.compute_log_prob(data))
        metrics = learn(group, 0, same)
        found[name] = whole_weights(group)
        assert distance(found[name], found[None]) == 0.0
        if name is not None:
            wanted = {"ratio": 1, "ratio_max": 1, "ess": 1, "outside": 0, "rejected": 0}
            assert {key: metrics[f"correction_{key}"] for key in wanted} == wanted
            assert metrics["mismatch_k1"] == metrics["mismatch_k3"] == metrics["mismatch_perplexity_gap"] == 0


@pytest.mark.parametrize("way", SECOND_FULL, ids=called)
def test_rollout_whose_completions_are_all_rejected_changes_nothing(start, data, way):
    """All ranks skip the step, those of the first pipeline stage too, which have no log-probabilities."""
    group = start(way, rollout_correction="geo_rs")
    before = whole_weights(group)
    far = data.clone().set("rollout_log_probs", group.worker_group.compute_log_prob(data) - 1)
    assert learn(group, 0, far)["correction_rejected"] == 1
    assert distance(whole_weights(group), before) == 0.0


@pytest.mark.parametrize("way", SECOND_FULL, ids=called)
def test_registered_loss_and_advantage_run_on_the_ranks(start, data, way):
    """The ranks have not imported the module that registers them. In the first step REINFORCE is PPO."""
    own = {"policy_loss_type": "own_reinforce", "advantage_estimator": "own_advantage", "user": {"scale": 0.5}}
    group = start(way, **own)
    metrics = learn(group, 0, data)
    assert metrics["own_metric"] == pytest.approx(0.5)
    found = whole_weights(group)
    group = start(way)
    given = data.exclude("rewards", "group_ids").set("advantages", 0.5 * (data["rewards"] - data["rewards"].mean()))
    assert learn(group, 0, given)["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
    assert distance(found, whole_weights(group)) < 1e-5


@pytest.mark.parametrize("way", [FSDP2], ids=called)
def test_error_of_a_loss_names_it(start, data, way):
    group = start(way, policy_loss_type=f"{own_algorithms.__name__}.unregistered")
    with pytest.raises(WorkerError, match=r"the loss has shape .* expected one number per token"):
        group.worker_group.train(0, data)
    group = start(way, rollout_correction="token_tis")
    with pytest.raises(WorkerError, match="rollout_correction='token_tis' needs 'rollout_log_probs'"):
        group.worker_group.train(0, data.exclude("rollout_log_probs"))


NEW = {
    "kl in rewards": {"advantage_estimator": "grpo", "kl_coef": 0.3},
    "opo": {"advantage_estimator": "opo"},
    "maxrl": {"advantage_estimator": "maxrl", "kl_coef": 0.2},
    "remax": {"advantage_estimator": "remax", "kl_coef": 0.2},
    "gdpo": {"advantage_estimator": "gdpo", "gdpo_weights": {"short": 0.5}, "kl_coef": 0.2},
    "grpo_passk": {"advantage_estimator": "grpo_passk", "passk_k": 2},
    "optimal_token_baseline": {"advantage_estimator": "optimal_token_baseline", "rollout_correction": "token_tis"},
    "overlong filtering": {"advantage_estimator": "reinforce_plus_plus_baseline", "overlong_filtering": True},
}


OF_LOG_PROBS = ["kl in rewards", "optimal_token_baseline", "overlong filtering"]
"""Cases in which the first stage of a pipeline lacks what the last one computes, or takes out the same rows."""


@pytest.mark.parametrize(
    ("way", "names"),
    [
        pytest.param(FSDP2, [*NEW], id="fsdp2"),
        pytest.param(PP2, OF_LOG_PROBS, id="pp2"),
        *(
            pytest.param(way, [*NEW], id=f"{called(way)}-all", marks=pytest.mark.full("the same estimators"))
            for way in (PP2, TP2, DP2)
        ),
    ],
)
def test_estimators_on_ranks_match_plain_loops(start, off_policy, way, names):
    """The step equals that on advantages from loops, where rows that are left out have no token that counts. The sums
    of squared probabilities are those of a softmax over the vocabulary; ranks compute them from two
    log-probabilities."""
    g = torch.Generator().manual_seed(4)
    rows = off_policy.clone().set("truncated", torch.rand(len(off_policy), generator=g) < 0.3)
    assert 1 < int(rows["truncated"].sum()) < len(rows)
    for name in ("reward_baselines", "rewards/right", "rewards/short"):
        rows[name] = torch.rand(len(rows), generator=g)
    rows["rewards"] = rows["rewards"] - rows["rewards"].min()
    rows["old_log_probs"] = (
        ReferenceGRPO(small_llama()).log_probs(off_policy).masked_fill(rows["loss_mask"] == 0, torch.nan)
    )
    known = dict(rows.items())
    squares = torch.full(rows["input_ids"].shape, torch.nan)
    for row in range(len(rows)):
        real = rows["attention_mask"][row] != 0
        logits = small_llama()(rows["input_ids"][row][real][None]).logits[0, :-1] / 1.0
        squares[row, real.nonzero()[1:, 0]] = logits.softmax(-1).square().sum(-1).detach()
    known["sum_pi_squared"] = squares
    log_ratios = torch.nan_to_num(rows["old_log_probs"] - rows["rollout_log_probs"])
    known["correction_weights"] = log_ratios.exp().clamp(max=2.0)
    run, usual = start(way, **EXPOSED).worker_group.execute_with_func_generator, read_args(EXPOSED)
    for name in names:
        case = NEW[name]
        left_out = rows["truncated"] & case.get("overlong_filtering", False)
        of_rows = test_estimators.plain({**known, "left_out": left_out}, case)
        advantages = torch.zeros(rows["input_ids"].shape)
        for row, values in enumerate(of_rows):
            advantages[row, rows["loss_mask"][row] != 0] = torch.tensor(values)
        plain = rows.clone().set("advantages", advantages).set("loss_mask", rows["loss_mask"] * ~left_out[:, None])
        alone = {name: {"rollout_correction": case.get("rollout_correction")}}
        parts = run(gradients, Broadcast(plain), Broadcast(alone), 1000)
        expected = assembled([part[name][1] for part in parts])
        args = read_args({**EXPOSED, **case})
        whole = {name: {key: args[key] for key in args if args[key] != usual[key]}}
        given = rows.exclude("old_log_probs") if name == "optimal_token_baseline" else rows
        parts = run(gradients, Broadcast(given), Broadcast(whole), 1000)
        metrics = [{**part[name][0], "seconds": 0} for part in parts]
        assert all(other == metrics[0] for other in metrics), name
        found = assembled([part[name][1] for part in parts])
        assert distance(found, expected) < 1e-5, name
        assert max(value.abs().max() for value in found.values()) > 1e-3, name


SUPERVISED = {
    "sft": {"policy_loss_type": "sft"},
    "sft, mean of rows": {"policy_loss_type": "sft", "loss_aggregation": "sequence"},
    "dpo": {"policy_loss_type": "dpo", "dpo_beta": 0.3},
}


@pytest.mark.parametrize(
    ("way", "most"),
    [(FSDP2, 40), pytest.param(PP2, 1000, marks=pytest.mark.full("gradients in every parallel configuration"))],
    ids=called,
)
def test_supervised_losses_match_plain_loops(start, off_policy, way, most):
    """The two rows of each pair are on different dp ranks, and in different micro-batches."""
    count = len(off_policy) // 2 * 2
    rows = off_policy[:count].exclude("rewards", "group_ids", "old_log_probs", "rollout_log_probs")
    model = small_llama().double()
    log_probs = completion_log_probs(model, rows)

    def losses(name):
        if name == "dpo":
            ref = torch.where(rows["loss_mask"] != 0, rows["ref_log_probs"], 0.0).double().sum(1)
            above = [sum(of) - ref[row] for row, of in enumerate(log_probs)]
            # The first rows are the chosen ones of odd pairs, the second ones those of even pairs.
            margins = [0.3 * (above[k] - above[k + count // 2]) * (1 if k % 2 else -1) for k in range(count // 2)]
            return sum(-torch.nn.functional.logsigmoid(margin) for margin in margins) / len(margins), margins
        if name == "sft":
            every = [one for of in log_probs for one in of]
            return -sum(every) / len(every), None
        means = [sum(of) / len(of) for of in log_probs if of]
        return -sum(means) / len(means), None

    pairs = torch.arange(count) % (count // 2)
    preferred = (torch.arange(count) < count // 2) == (pairs % 2 == 1)
    given = rows.clone().set("group_ids", pairs).set("rewards", preferred.float())
    given["old_log_probs"] = torch.zeros_like(rows["ref_log_probs"])  # of another policy: neither loss reads them
    group = start(way, **EXPOSED)
    cases = {
        name: {
            key: value
            for key, value in read_args(case).items()
            if key in {*case, "advantage_estimator", "loss_aggregation", "loss_constant_length"}
        }
        for name, case in SUPERVISED.items()
    }
    parts = group.worker_group.execute_with_func_generator(gradients, Broadcast(given), Broadcast(cases), most)
    for name in SUPERVISED:
        loss, margins = losses(name)
        wanted = gradients_of(model, loss)
        metrics = parts[0][name][0]
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4), name
        assert distance(assembled([part[name][1] for part in parts]), wanted) < 1e-5, name
        assert max(value.abs().max() for value in wanted.values()) > 1e-2
        if margins is not None:
            means = [sum(m.item() for m in margins), sum(m.item() > 0 for m in margins)]
            found = [metrics["dpo_margin"] * len(margins), metrics["dpo_accuracy"] * len(margins)]
            assert found == pytest.approx(means, rel=1e-3) and 0 < means[1] < len(margins)
