"""Mixtures of experts in train groups on Megatron, against a plain loop over transformers' model."""

import copy

import pytest
import torch
from mixtures import by_expert, column, drawn_routes, replaying, small_mixture
from reference import ReferenceGRPO
from tensordict import TensorDict
from train_helpers import begin, distance, learn, rollout, whole_weights

from single_controller import Broadcast
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.train.args import TrainArgsError

pytestmark = pytest.mark.timeout(240)

EP2 = {"expert_model_parallel_size": 2}
WAYS = {
    "ep2": (2, {**EP2}),
    "ep2, recomputed": (2, {**EP2, "gradient_checkpointing": True, "use_distributed_optimizer": True}),
    "tp2 ep2": (2, {**EP2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "tp2 pp2 ep2": (
        4,
        {**EP2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "pipeline_model_parallel_size": 2},
    ),
    "tp2 ep2 dp2": (4, {**EP2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "pp2 ep2 dp2": (4, {**EP2, "pipeline_model_parallel_size": 2, "gradient_checkpointing": True}),
}
rare = pytest.mark.full("train groups of mixtures of experts on Megatron")


def ways(*names):
    return pytest.mark.parametrize("way", [pytest.param(name, marks=rare) for name in names])


def close(group, plain, within=1e-4):
    expected = by_expert(plain.model.config, plain.weights())
    assert distance(whole_weights(group), expected) < within


@ways(*WAYS)
def test_grpo_steps_match_a_plain_loop(megatron_groups, mixture_folder, way):
    ranks, sizes = WAYS[way]
    group = megatron_groups(ranks)
    begin(group, {"hf_checkpoint": mixture_folder, "lr": 3e-3, "adam_eps": 1e-5, "balance_data": True, **sizes})
    assert group.get_parallel_config()["ep_size"] == 2
    plain = with_eps(ReferenceGRPO(small_mixture(), lr=3e-3))
    for step in range(3):
        rows = rollout(plain.model, prompts=5, samples=3, seed=step)
        expected, metrics = plain.step(rows), learn(group, step, rows)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert metrics["rollout_log_prob_diff"] < 1e-4
        assert 0 <= metrics["moe/load_min"] < 1 < metrics["moe/load_max"]
    close(group, plain)


def with_eps(plain):
    for group in plain.optimizer.param_groups:
        group["eps"] = 1e-5
    return plain


@ways("ep2", "tp2 ep2 dp2", "pp2 ep2 dp2")
def test_steps_with_the_experts_of_the_rollout_match_a_plain_loop(megatron_groups, mixture_folder, way):
    """R3, with experts that have nothing to do with those of the router."""
    ranks, sizes = WAYS[way]
    group = megatron_groups(ranks)
    args = {"hf_checkpoint": mixture_folder, "lr": 3e-3, "adam_eps": 1e-5, "routing_replay": "R3", **sizes}
    begin(group, {**args, "balance_data": True})
    plain = with_eps(ReferenceGRPO(small_mixture(), lr=3e-3))
    for step in range(2):
        rows = rollout(plain.model, prompts=5, samples=3, seed=step)
        rows["ref_log_probs"] = torch.zeros(rows["input_ids"].shape)
        routes = drawn_routes(plain.model.config, rows, seed=step)
        with replaying(plain.model, routes):
            expected = plain.step(rows)
        rows["routed_experts"] = column(routes)
        metrics = learn(group, step, rows)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert metrics["rollout_log_prob_diff"] == pytest.approx(expected["rollout_log_prob_diff"], rel=1e-3)
        assert metrics["rollout_log_prob_diff"] > 1e-3
        assert 0.2 < metrics["replay/overlap"] < 0.8 and 0 < metrics["replay/missing"] < 0.6
    close(group, plain)


@ways("tp2 ep2", "tp2 pp2 ep2")
def test_second_step_takes_the_experts_of_the_first_pass(megatron_groups, mixture_folder, way):
    """R2, with a learning rate at which the second step's routers choose other experts."""
    ranks, sizes = WAYS[way]
    group = megatron_groups(ranks)
    args = {"hf_checkpoint": mixture_folder, "lr": 3e-2, "adam_eps": 1e-5, "num_steps_per_rollout": 2, **sizes}
    begin(group, {**args, "routing_replay": "R2", "lr_decay_style": "constant"})
    plain = with_eps(ReferenceGRPO(small_mixture(), lr=3e-2))
    rows = rollout(plain.model, prompts=6, samples=4)
    known = rows.clone()
    with replaying(plain.model, None) as taken:
        known["old_log_probs"] = plain.log_probs(rows)
    known["advantages"] = torch.tensor(plain.advantages(rows))
    known["ref_log_probs"] = torch.zeros(rows["input_ids"].shape)
    routes = []
    for layers in taken:
        of_row = torch.full((len(layers[0]), 4, 2), -1, dtype=torch.int16)
        for layer, chosen in layers.items():
            of_row[:, layer] = chosen.short()
        routes.append(of_row)
    native = copy.deepcopy(plain)
    for half in (slice(0, 12), slice(12, 24)):
        with replaying(plain.model, routes[half]):
            plain.step(known[half])
        native.step(known[half])
    metrics = learn(group, 0, rows)
    assert metrics["replay/overlap"] < 1
    close(group, plain)
    effect = distance(native.weights(), plain.weights())
    assert effect > 1e-2, "the experts made no difference"


@ways("pp2", "ep2", "tp2 ep2", "pp2 ep2 dp2")
def test_experts_of_the_engine_compute_the_same_log_probs(megatron_groups, mixture_folder, way):
    """Recorded in HFEngine, replayed on ranks that share stages, tensors or experts."""
    engine = HFEngine(mixture_folder, return_routed_experts=True)
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12], [11, 4]] * 3
    done = engine.generate(prompts, SamplingParams(12, stop_token_ids=(6,)), range(len(prompts)))
    engine.close()
    rows = engine_rows(prompts, done)
    ranks, sizes = WAYS.get(way) or (2, {"pipeline_model_parallel_size": 2})
    group = megatron_groups(ranks)
    args = {"hf_checkpoint": mixture_folder, "lr": 1e-9, **sizes}
    begin(group, {**args, "routing_replay": "R3"})
    of_ranks = group.worker_group.execute_with_func_generator(experts_in_the_pass, Broadcast(rows))
    recorded = rows["routed_experts"].unbind()
    for row, (of_row, wanted) in enumerate(zip(zip(*of_ranks, strict=True), recorded, strict=True)):
        found = torch.stack(of_row).amax(0)  # of each layer, from the stage that has it
        for layer in (0, 2, 3):
            assert torch.equal(found[:-1, layer].sort(-1).values, wanted[:-1, layer].sort(-1).values), (row, layer)
    replayed = learn(group, 0, rows)
    begin(group, args)
    group.worker_group.execute_with_func_generator(disturb_routers)
    disturbed = learn(group, 0, rows)
    begin(group, {**args, "routing_replay": "R3"})
    group.worker_group.execute_with_func_generator(disturb_routers)
    both = learn(group, 0, rows)
    print(f"rollout_log_prob_diff: replayed {replayed['rollout_log_prob_diff']:.1e}; other routers "
          f"{disturbed['rollout_log_prob_diff']:.1e}, and replayed {both['rollout_log_prob_diff']:.1e}")  # fmt: skip
    assert replayed["rollout_log_prob_diff"] < 1e-6
    assert replayed["replay/overlap"] == 1 and replayed["replay/missing"] == 0
    assert disturbed["rollout_log_prob_diff"] > 1e-3
    assert both["replay/overlap"] < 1
    assert both["rollout_log_prob_diff"] < disturbed["rollout_log_prob_diff"]


def engine_rows(prompts, done):
    width = max(len(prompt) + len(one.token_ids) for prompt, one in zip(prompts, done, strict=True))
    made = {name: torch.zeros(len(done), width) for name in ("input_ids", "attention_mask", "loss_mask")}
    made["rollout_log_probs"] = torch.zeros(len(done), width)
    routes = []
    for row, (prompt, one) in enumerate(zip(prompts, done, strict=True)):
        begin_at, end = len(prompt), len(prompt) + len(one.token_ids)
        made["input_ids"][row, :end] = torch.tensor(prompt + one.token_ids)
        made["attention_mask"][row, :end] = 1
        made["loss_mask"][row, begin_at:end] = 1
        made["rollout_log_probs"][row, begin_at:end] = torch.tensor(one.log_probs)
        experts = one.routed_experts
        routes.append(torch.tensor(experts.ids, dtype=torch.int16).view(-1, experts.layers, experts.k))
    made = {name: value if name == "rollout_log_probs" else value.long() for name, value in made.items()}
    rewards, groups = torch.rand(len(done), generator=torch.Generator().manual_seed(0)), torch.arange(len(done)) % 4
    data = {**made, "rewards": rewards, "group_ids": groups, "routed_experts": column(routes)}
    return TensorDict(data, batch_size=[len(done)])


def experts_in_the_pass(worker, rows):
    _, routes = worker.model.log_probs_and_routes(rows, 1.0)
    return list(routes.unbind())


def disturb_routers(worker):
    for name, weight in worker.model.weights():
        if name.endswith("router.weight"):
            drawn = torch.Generator().manual_seed(len(name))
            weight.add_(torch.randn(weight.shape, generator=drawn) * 1e-2)
    worker.model.weights_changed()


def test_wrong_arguments(megatron_groups, mixture_folder, llama_folder):
    group = megatron_groups(2)
    for args, says in (
        ({"hf_checkpoint": mixture_folder, "expert_model_parallel_size": 3}, "does not divide the group's 2 ranks"),
        ({"hf_checkpoint": llama_folder, **EP2}, "has no experts"),
        ({"hf_checkpoint": llama_folder, "routing_replay": "R3"}, "routing_replay='R3' needs a mixture of experts"),
        (
            {"hf_checkpoint": llama_folder, "moe_z_loss_coeff": 0.1},
            "moe_z_loss_coeff=0.1, but a 'llama' has no experts",
        ),
    ):
        with pytest.raises(TrainArgsError, match=says):
            begin(group, {"train_backend": "megatron", **args})
