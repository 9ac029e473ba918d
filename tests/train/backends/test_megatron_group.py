"""Train groups on Megatron only. The numbers are checked in test_both_backends.py."""

import pytest
import ray
import torch
from reference import ReferenceGRPO, small_llama
from train_helpers import begin, distance, learn, whole_weights

from single_controller import WorkerError
from workers.distributed import process_groups

pytestmark = pytest.mark.timeout(180)

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


def test_processes_can_be_reinitialized_with_other_layouts(megatron_groups, llama_folder, data):
    expected = ReferenceGRPO(small_llama()).log_probs(data)
    group, counts = megatron_groups(4), []
    with pytest.raises(WorkerError, match=r"tensor_model_parallel_size=3 .* does not divide the group's 4 ranks"):
        group.worker_group.init({"hf_checkpoint": llama_folder, "tensor_model_parallel_size": 3}, "actor")
    for sizes in ({**TP2, **PP2}, TP2, TP2):
        begin(group, {"hf_checkpoint": llama_folder, "max_tokens_per_micro_batch": 50, **sizes})
        assert group.worker_group.dp_size == 4 // 2 ** len(sizes)
        found = group.worker_group.compute_log_prob(data)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        counts.append(group.worker_group.execute_with_func_generator(lambda worker: len(process_groups())))
    assert counts[-2] == counts[-1]  # the process groups of the previous layout are gone


def test_rows_are_divided_between_optimizer_steps(megatron_groups, llama_folder, data):
    """Two steps of one rollout, half the rows each, use the advantages and old log-probs from before both."""
    plain = ReferenceGRPO(small_llama())
    half = data.clone()
    half["old_log_probs"] = plain.log_probs(data)
    half["advantages"] = torch.tensor(plain.advantages(data))
    for rows in (slice(0, 12), slice(12, 24)):
        plain.step(half[rows])
    group = megatron_groups(2)
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "num_steps_per_rollout": 2, "num_rollout": 2,
                  "lr_decay_style": "constant", **PP2})  # fmt: skip
    learn(group, 0, data)
    assert distance(whole_weights(group), plain.weights()) < 1e-4
    # Four steps: 1.5e-3, then from 3e-3 at step 1 down to 0 at step 4. Only each rollout's last step is reported.
    begin(group, {"hf_checkpoint": llama_folder, "lr": 3e-3, "num_steps_per_rollout": 2, "num_rollout": 2,
                  "lr_decay_style": "linear", "lr_warmup_iters": 2, **PP2})  # fmt: skip
    assert [learn(group, step, data)["lr"] for step in range(2)] == pytest.approx([3e-3, 1e-3])


def test_actor_uses_values_from_a_critic_of_another_backend(
    megatron_groups, fsdp_groups, llama_folder, data, monkeypatch
):
    """Two tensor-parallel ranks share the values that two data-parallel ranks of the critic computed for their rows."""
    actor, critic = megatron_groups(2), fsdp_groups(2)
    args = {"hf_checkpoint": llama_folder, "lr": 3e-3, "advantage_estimator": "gae", "kl_coef": 0.05, **TP2}
    begin(actor, args, with_ref=True)
    monkeypatch.setattr(critic, "role", "critic")
    begin(critic, args)
    for group in (actor, critic):
        monkeypatch.setattr(group, "_pair", group._pair)  # restored after this test
    actor.connect(critic)
    values = critic.worker_group.compute_values(data)
    of_critic = critic.async_train(0, data)
    found = ray.get(actor.async_train(0, data))[0]
    assert ray.get(of_critic)[0]["value_loss"] > 0
    weights = whole_weights(actor)
    begin(actor, args, with_ref=True)
    workers = actor.worker_group
    known = data.clone()
    known["values"] = values
    known["old_log_probs"], known["ref_log_probs"] = workers.compute_log_prob(data), workers.compute_ref_log_prob(data)
    again = workers.train(0, known)[0]
    assert again["loss"] == pytest.approx(found["loss"], abs=1e-6)
    assert again["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-4)
    assert distance(whole_weights(actor), weights) < 1e-6
