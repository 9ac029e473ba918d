"""An actor and its critic as FSDP ranks: each value is computed once, and results do not depend on the rank count."""

import numpy as np
import pytest
import ray
import torch
from plain_losses import naive_gae
from plain_train_workers import Manager
from reference import small_llama
from tensordict import TensorDict
from torch.nn.functional import pad
from train_helpers import begin, distance, learn, rollout, whole_weights
from transformers import AutoModelForCausalLM

from single_controller import GroupClosedError, WorkerError
from workers.data.rollout_data import RolloutDataError
from workers.train.args import TrainArgsError
from workers.train.train_group import RayTrainGroup

pytestmark = pytest.mark.timeout(180)

PPO = {"advantage_estimator": "gae", "gae_lambda": 0.9, "gamma": 0.98, "normalize_advantages": False, "lr": 3e-3,
       "critic_lr": 3e-3, "max_tokens_per_micro_batch": 64}  # fmt: skip


STILL = {"lr": 0.0, "critic_lr": 0.0}
"""Each step does the same."""


@pytest.fixture(scope="module")
def data():
    return rollout(small_llama(), prompts=5, samples=3)  # 15 rows: two ranks have 8 and 7


@pytest.fixture(scope="module")
def pair_of(fsdp_groups, train_pool):
    """A connected actor and critic: ``pair_of(ranks, args)``."""
    critics = {}

    def of(ranks, args, with_ref=False):
        if ranks not in critics:
            critics[ranks] = RayTrainGroup({}, 1, ranks, train_pool, 0.1, role="critic")
        actor, critic = fsdp_groups(ranks), critics[ranks]
        ray.get([*actor.async_init(args, with_ref=with_ref), *critic.async_init(args)])
        actor.connect(critic)
        return actor, critic

    yield of
    for group in critics.values():
        group.disconnect()  # other tests use the actors alone
        group.close()


def estimates(rewards, values, counts, gamma, lam):
    """Per-token advantages and returns: one flat list of each, in the order of the tokens."""
    made = naive_gae(rewards.tolist(), values.tolist(), counts.tolist(), gamma, lam)
    advantages = torch.tensor(made, dtype=torch.float64)[counts]
    return advantages.tolist(), (advantages + values[counts]).tolist()


def at_the_last_token(data):
    """(B, T): the reward of each row, where its completion ends."""
    counts = data["loss_mask"] != 0
    rewards = torch.zeros(counts.shape)
    for row in range(len(data)):
        rewards[row, counts[row].nonzero()[-1, 0]] = data["rewards"][row]
    return rewards


def mean(numbers):
    return sum(numbers) / len(numbers)


def test_step_matches_manual_computation_on_one_and_two_ranks(pair_of, llama_folder, data):
    """Two ranks have a part of the rows each, or of the sequence."""
    counts, rewards = data["loss_mask"] != 0, at_the_last_token(data)
    losses, weights = [], []
    for ranks, share in ((1, 1), (2, 1), (2, 2)):
        actor, critic = pair_of(ranks, {"hf_checkpoint": llama_folder, **PPO, "sequence_parallel_size": share})
        values = critic.worker_group.compute_values(data)
        advantages, returns = estimates(rewards, values, counts, 0.98, 0.9)
        of_critic, of_actor = learn(critic, 0, data), learn(actor, 0, data)
        assert of_actor["loss"] == pytest.approx(-mean(advantages), abs=1e-5), "the ratio is 1"
        assert of_critic["return"] == pytest.approx(mean(returns), abs=1e-5)
        explained = 1 - np.var(advantages) / np.var(returns)  # a return is value + advantage
        assert of_critic["explained_variance"] == pytest.approx(explained, abs=1e-5)
        halves = [advantage**2 / 2 for advantage in advantages]
        assert of_critic["value_loss"] == pytest.approx(mean(halves), abs=1e-5)
        again = [learn(group, 1, data)["loss"] for group in (actor, critic)]
        losses.append([of_actor["loss"], of_critic["loss"], *again])
        weights.append([whole_weights(actor), whole_weights(critic)])
    for k in (1, 2):
        assert losses[k] == pytest.approx(losses[0], abs=1e-4)
        assert all(distance(one, other) < 1e-4 for one, other in zip(weights[0], weights[k], strict=True))
    assert losses[0][1] != losses[0][3], "the values of an earlier rollout were used again"


def test_values_are_not_rounded_to_bfloat16(pair_of, llama_folder, data):
    """As on Megatron, whose value head computes in float32."""
    _, critic = pair_of(1, {"hf_checkpoint": llama_folder, **PPO, "param_dtype": "bf16"})
    values = critic.worker_group.compute_values(data)[data["loss_mask"] != 0]
    assert (values != values.bfloat16().float()).double().mean() > 0.9


def test_call_order_does_not_matter_and_values_bypass_the_driver(pair_of, llama_folder, data):
    # So long that the values of a rank, of 7 or 8 rows, are more than a frame has.
    rows = TensorDict({key: pad(value, (0, 44_000)) if value.dim() == 2 else value for key, value in data.items()},
                      batch_size=[len(data)])  # fmt: skip
    found = []
    actor, critic = pair_of(2, {"hf_checkpoint": llama_folder, **PPO, **STILL})
    for order in (1, -1):
        refs = {group.role: group.async_train(0, rows) for group in (actor, critic)[::order]}
        found.append({role: {**ray.get(refs[role])[0], "seconds": 0} for role in ("actor", "critic")})
        rows = rows.clone()
    assert found[0] == found[1]

    def last(group, method):
        call = [call for call in group.worker_group.stats().calls if call.method == method][-1]
        return call.sent, call.returned

    alone, values = last(critic, "compute_values")
    assert values >= 4 * rows["input_ids"].numel()
    for group in (actor, critic):
        assert last(group, "train")[0] < alone + values / 4, "train() sent the values, not just references"


def test_rewards_include_the_kl_penalty(pair_of, llama_folder, data):
    args = {"hf_checkpoint": llama_folder, **PPO, "kl_coef": 0.3, "num_steps_per_rollout": 2}
    actor, critic = pair_of(2, args, with_ref=True)
    learn(actor, 0, data)
    old, ref = actor.worker_group.compute_log_prob(data), actor.worker_group.compute_ref_log_prob(data)
    counts = data["loss_mask"] != 0
    assert (old - ref)[counts].abs().max() > 1e-3, "the actor has not moved"
    values = critic.worker_group.compute_values(data)
    rewards = at_the_last_token(data) - 0.3 * (old - ref)
    _, returns = estimates(rewards, values, counts, 0.98, 0.9)
    refs = actor.async_train(1, data)  # first the actor: the critic must use its log-probs from before this step
    of_critic = learn(critic, 1, data)
    ray.get(refs)
    # Two steps with about the same number of tokens each.
    assert of_critic["return"] == pytest.approx(mean(returns), abs=0.05)
    given = data.clone().set("old_log_probs", old).set("ref_log_probs", ref).set("values", values)
    actor, critic = pair_of(2, args)
    assert learn(critic, 1, given)["return"] == pytest.approx(of_critic["return"], abs=1e-5)
    critic.worker_group.init(critic.args, "critic", True)  # with a reference, which only an actor computes
    with pytest.raises(WorkerError, match="rollout data has no 'ref_log_probs'"):
        critic.worker_group.train(2, data)


def test_critic_learns_alone_at_first(pair_of, llama_folder, data):
    """In the first two rollouts the actor does not move, but the KL coefficients of both change, and stay the same. Its
    learning rate decays over the other two rollouts."""
    args = {"hf_checkpoint": llama_folder, **PPO, "num_critic_only_steps": 2, "num_rollout": 4, "kl_coef": 0.2,
            "kl_target": 0.01, "kl_horizon": 100, "lr_decay_style": "linear"}  # fmt: skip
    actor, critic = pair_of(2, args, with_ref=True)
    before, values = whole_weights(actor), [critic.worker_group.compute_values(data)]
    rows, real = data.clone().set("record_rows", torch.arange(len(data))), data["attention_mask"].bool()
    found = []
    for step in range(4):
        refs = critic.async_train(step, rows)
        metrics = learn(actor, step, rows)
        found.append((metrics, ray.get(refs)[0]))
        kept = actor.recorded_rows()  # a replay needs the values from the first rollout on
        for number in range(len(data)):
            expected = values[-1][number][real[number]].numpy()
            np.testing.assert_allclose(kept[number]["values"], expected, atol=1e-5)
        values.append(critic.worker_group.compute_values(data))
        assert (distance(whole_weights(actor), before) == 0.0) == (step < 2)
        assert (values[-1] - values[-2]).abs().max() > 1e-4
    of_actor, of_critic = zip(*found, strict=True)
    assert [metrics["lr"] for metrics in of_actor] == pytest.approx([0.0, 0.0, 3e-3, 1.5e-3])
    assert [metrics["grad_norm"] > 0 for metrics in of_actor] == [False, False, True, True]
    # No divergence until the actor has moved: 15 completions lower the coefficient by 3 % each time.
    coefs = [0.2 * 0.97**step for step in range(4)]
    assert [metrics["kl_coef"] for metrics in of_actor] == pytest.approx(coefs)
    for name in ("kl_coef", "reward_kl", "reward"):
        assert [metrics[name] for metrics in of_actor] == [metrics[name] for metrics in of_critic]
    assert of_actor[3]["reward_kl"] != 0 == of_actor[2]["reward_kl"]


def test_entries_in_the_data_are_not_recomputed(pair_of, llama_folder, data):
    actor, critic = pair_of(2, {"hf_checkpoint": llama_folder, **PPO})
    zeros = data.clone().set("values", torch.zeros(data["input_ids"].shape))
    before = critic.worker_group.stats().methods["compute_values"].calls
    advantages = [(0.98 * 0.9) ** k * float(row["rewards"]) for row in data for k in range(int(row["loss_mask"].sum()))]
    assert learn(actor, 0, zeros)["loss"] == pytest.approx(-mean(advantages), abs=1e-5)
    assert critic.worker_group.stats().methods["compute_values"].calls == before


@pytest.mark.parametrize("balance", [False, pytest.param(True, marks=pytest.mark.full("references, balanced"))])
def test_references_instead_of_data(pair_of, llama_folder, data, balance):
    found = []
    given = [data, ray.put(data)] + ([] if balance else [[ray.put(data[:5]), ray.put(data[5:])]])
    actor, critic = pair_of(2, {"hf_checkpoint": llama_folder, **PPO, **STILL, "balance_data": balance})
    for rows in given:
        refs = critic.async_train(0, rows)
        found.append([learn(actor, 0, rows)["loss"], ray.get(refs)[0]["loss"]])
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-6)


def test_log_probs_and_values_as_methods(pair_of, llama_folder, data):
    actor, critic = pair_of(2, {"hf_checkpoint": llama_folder, **PPO, "temperature": 0.7, "balance_data": True})
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    for group, method in ((actor, "compute_log_prob"), (critic, "compute_values")):
        found = getattr(group, method)(data)
        assert found.shape == data["input_ids"].shape and found.dtype == torch.float32
        later = getattr(group, f"async_{method}")(data)
        references = [ray.put(data), [ray.put(data[:12]), ray.put(data[12:])], dict(data)]
        for other in (later.result(), *(getattr(group, method)(given) for given in references)):
            torch.testing.assert_close(other, found, atol=1e-6, rtol=0)
        with pytest.raises(TrainArgsError, match=method + r"\(\): rollout_data_ref has 1 references for 2 dp ranks"):
            getattr(group, method)([ray.put(data)])
        with pytest.raises(RolloutDataError, match="rollout data has no 'loss_mask'"):
            getattr(group, method)(data.exclude("loss_mask"))
    begin = int(data["attention_mask"][0].argmax())
    real = data["input_ids"][0, begin:][data["attention_mask"][0, begin:] != 0]
    expected = (model(real[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, real[1:, None])[:, 0]
    torch.testing.assert_close(
        actor.compute_log_prob(data)[0, begin + 1 : begin + len(real)], expected.detach(), atol=1e-4, rtol=0
    )
    with pytest.raises(WorkerError, match="role"):
        critic.compute_log_prob(data)


def test_error_names_the_released_critic(pair_of, llama_folder, data):
    actor, critic = pair_of(1, {"hf_checkpoint": llama_folder, **PPO})
    critic.release()
    with pytest.raises(GroupClosedError, match="the critic's train workers were released"):
        actor.async_train(0, data)
    critic.create()
    learn(actor, 0, data)
    critic.offload()
    with pytest.raises(WorkerError, match=r"this worker is offloaded; call onload\(\)"):
        ray.get(actor.async_train(1, data))
    critic.onload()
    learn(actor, 1, data)  # the same rows of the same rollout, requested again


def test_create_resumes_from_a_background_checkpoint(fsdp_groups, train_pool, llama_folder, tmp_path):
    data = rollout(small_llama(), prompts=2, samples=2)
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "save": str(tmp_path), "async_save": True}
    with RayTrainGroup(args, 1, 1, train_pool, 0.1) as group:
        begin(group, args)
        learn(group, 0, data)
        group.save_model(0)
        expected = whole_weights(group)
        group.release()  # waits for the save
        assert (tmp_path / "latest.json").exists()
        assert group.create() == [1]
        assert distance(whole_weights(group), expected) == 0.0
        learn(group, 1, data)
        group.save_model(1)
        expected = whole_weights(group)
        group.wait_for_save()
        group._saved.writing = True  # as if nobody had waited
        ray.kill(group.worker_group.workers[0])
        group.release()
        assert group.create() == [2]
        assert distance(whole_weights(group), expected) == 0.0

        # Rollouts only: no model is created.
        assert begin(group, {"debug_rollout_only": True}) == [0]
        manager = Manager()
        group.set_rollout_manager(manager)
        assert ray.get(group.async_train(0, data)) == [{}]
        assert (group.save_model(0), group.offload(), group.onload(), group.clear_memory()) == (None, 0, 0, None)
        assert group.update_weights() == 0 and manager.weight_version is None
        assert group.get_parallel_config()["dp_size"] == 1
        with pytest.raises(WorkerError, match="this worker has no model"):
            group.worker_group.compute_log_prob(data)
        group.wait_for_save()
        group.release()
        assert group.create() == [0]


@pytest.mark.parametrize("normalize", [False, True])
def test_critic_and_whitening_leave_out_what_is_rejected_or_truncated(pair_of, llama_folder, data, normalize):
    """As in verl: the mean of the value loss is over the completions that are kept, and so are the moments of
    whitening. The critic gets the log-probabilities by which they are rejected from the actor."""
    args = {"hf_checkpoint": llama_folder, **PPO, **STILL, "normalize_advantages": normalize, "calculate_entropy": True}
    actor, critic = pair_of(2, {**args, "rollout_correction": "token_rs", "overlong_filtering": True})
    old, values = actor.worker_group.compute_log_prob(data), critic.worker_group.compute_values(data)
    counts = data["loss_mask"] != 0
    far = old.clone()
    for row in (1, 8):
        far[row, counts[row].nonzero()[-1, 0]] -= 20
    truncated = torch.zeros(len(data), dtype=torch.bool)
    truncated[[8, 11]] = True
    kept = [row for row in range(len(data)) if row not in (1, 8, 11)]
    rewards = at_the_last_token(data)
    advantages, returns = estimates(rewards[kept], values[kept], counts[kept], 0.98, 0.9)
    rows = data.clone().set("rollout_log_probs", far).set("truncated", truncated)
    refs = actor.async_train(0, rows)
    of_critic, of_actor = learn(critic, 0, rows), ray.get(refs)[0]
    assert of_critic["return"] == pytest.approx(mean(returns), abs=1e-5)
    assert of_critic["value_loss"] == pytest.approx(mean([one**2 / 2 for one in advantages]), abs=1e-5)
    if not normalize:
        assert of_actor["loss"] == pytest.approx(-mean(advantages), abs=1e-5)
    else:
        assert of_actor["loss"] == pytest.approx(0, abs=1e-5)  # the mean of what is whitened
    for metrics in (of_actor, of_critic):
        assert metrics["overlong_filtered"] == pytest.approx(2 / 15)
        assert metrics["correction_rejected"] == pytest.approx(1 / 13)  # of those that are not truncated


def test_values_are_clipped_around_those_before_the_step(pair_of, llama_folder, data):
    """The critic's own values, and others in the data, as if it had moved from there."""
    _, critic = pair_of(2, {"hf_checkpoint": llama_folder, **PPO, **STILL, "value_clip": 0.05})
    values, counts = critic.worker_group.compute_values(data), data["loss_mask"] != 0
    before = values + torch.where(torch.arange(len(data))[:, None] % 3 == 0, 0.01, 0.2)
    rewards = at_the_last_token(data)
    _, returns = estimates(rewards, before, counts, 0.98, 0.9)
    losses, clipped = [], 0
    rows = zip(values[counts].tolist(), before[counts].tolist(), returns, strict=True)
    for now, old, target in rows:
        near = old + min(max(now - old, -0.05), 0.05)
        losses.append(max((now - target) ** 2, (near - target) ** 2) / 2)
        clipped += (near - target) ** 2 > (now - target) ** 2
    metrics = learn(critic, 0, data.clone().set("values", before))
    assert metrics["value_loss"] == pytest.approx(mean(losses), abs=1e-5)
    assert metrics["value_clip_fraction"] == pytest.approx(clipped / len(losses)) and 0 < clipped < len(losses)


def test_decoupled_lambda_on_ranks(pair_of, llama_folder, data):
    vapo = {"gae_lambda_value": 1.0, "gae_length_adaptive_alpha": 0.3, "gamma": 1.0, **STILL}
    actor, critic = pair_of(2, {"hf_checkpoint": llama_folder, **PPO, **vapo})
    values, counts = critic.worker_group.compute_values(data), data["loss_mask"] != 0
    rewards, expected = at_the_last_token(data), []
    for row in range(len(data)):
        lam = max(0.0, 1 - 1 / (0.3 * int(counts[row].sum())))
        expected += estimates(rewards[row : row + 1], values[row : row + 1], counts[row : row + 1], 1.0, lam)[0]
    refs = actor.async_train(0, data)
    returns = [float(row["rewards"]) for row in data for _ in range(int(row["loss_mask"].sum()))]
    assert learn(critic, 0, data)["return"] == pytest.approx(mean(returns), abs=1e-5)
    assert ray.get(refs)[0]["loss"] == pytest.approx(-mean(expected), abs=1e-5)


def test_estimator_of_ones_own_reads_the_values_of_a_connected_critic(pair_of, llama_folder, data):
    own = {"advantage_estimator": "own_algorithms.less_values"}
    actor, critic = pair_of(2, {"hf_checkpoint": llama_folder, **PPO, **STILL, **own})
    expected = data["rewards"][:, None] - critic.worker_group.compute_values(data)
    found = learn(actor, 0, data)["advantage/mean"]
    assert found == pytest.approx(float(expected[data["loss_mask"] != 0].mean()), abs=1e-5)
