"""Mixtures of experts on four real processes, compared with transformers' models in this one."""

import pytest
import torch
import train_model_workers as on_ranks
from hf_reference import Reference, Whole, batch, joined, whole_weights
from lm_configs import SIZES
from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from workers.megatron.config import experts_of

HEADS = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4}
MIXED = {**HEADS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
QWEN3 = Qwen3MoeConfig(**MIXED, head_dim=16, norm_topk_prob=True)
MODELS = {
    "qwen3": QWEN3,
    "mixtral": MixtralConfig(**HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "qwen2": Qwen2MoeConfig(**MIXED, shared_expert_intermediate_size=80, tie_word_embeddings=True),
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
LOSSES = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
UNBATCHED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
DISTRIBUTED = {"distributed": True}
GRADIENT_DESCENT = {"clip_grad": 0.0, "betas": (0.0, 0.999), "eps": 1e6}
"""With the learning rate 1e6, a step changes the weights by the gradient."""
ADAM = {"clip_grad": 0.5, "eps": 1e-5}
"""Adam's usual epsilon would let it move by rounding what has hardly a gradient, such as an expert of few tokens."""

pytestmark = pytest.mark.timeout(300)
rare = pytest.mark.full("layouts and variants of mixtures of experts on Megatron")


def by_expert(config, tensors):
    """Tensors under the names of Hugging Face's checkpoints: transformers' modules have all experts in one."""
    experts, found = experts_of(config), {}
    gate, up, down = experts.names
    for name, tensor in tensors.items():
        at, _, kind = name.partition(".mlp.experts.")
        at = f"{at}.{experts.block}.experts"
        if kind == "gate_up_proj":
            for number, both in enumerate(tensor):
                first, second = both.chunk(2)
                found |= {f"{at}.{number}.{gate}.weight": first, f"{at}.{number}.{up}.weight": second}
        elif kind == "down_proj":
            found |= {f"{at}.{number}.{down}.weight": own for number, own in enumerate(tensor)}
        else:
            found[name.replace(".mlp.gate.", f".{experts.block}.gate.")] = tensor
    return found


def auxiliary(model, data, coefficients):
    """The auxiliary losses of all rows, each row alone, from transformers' router logits; and (load, loss, z) means."""
    balance = z = 0.0
    load, experts = 0.0, experts_of(model.config)
    for row, mask in enumerate(data["attention_mask"].bool()):
        layers = model(input_ids=data["input_ids"][row, mask][None], output_router_logits=True).router_logits
        for logits in layers:
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(experts.topk).indices, 1.0)
            share = chosen.mean(0) / experts.topk
            balance = balance + len(logits) * experts.count * (share * logits.softmax(-1).mean(0)).sum()
            z = z + logits.logsumexp(-1).square().sum()
        load = load + torch.stack(
            [torch.zeros_like(one).scatter(1, one.topk(experts.topk).indices, 1.0).sum(0) for one in layers]
        )
    total = float(data["attention_mask"].sum())
    wanted = {
        "moe/load_min": (load / load.mean(1, keepdim=True)).min().item(),
        "moe/load_max": (load / load.mean(1, keepdim=True)).max().item(),
        "moe/load_balancing_loss": balance.item() / total / len(load),
        "moe/z_loss": z.item() / total / len(load),
    }
    return (coefficients[0] * balance + coefficients[1] * z) / total, wanted


def made(four, saved, config, parallel, overrides, **options):
    model, folder = saved(config, sharp=True)
    four.run(on_ranks.make, config, parallel, overrides=overrides, **options)
    four.run(on_ranks.load_hf, folder)
    return model, folder


def compare_gradients(four, model, overrides):
    """One step of gradient descent on both sides."""
    data, config = batch(), model.config
    before = whole_weights(four)
    reports = four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e6, 0.7)
    after = whole_weights(four)
    total, _ = on_ranks.policy_loss(Reference(model, data, 0.7), Whole(data), 9.0)
    losses, wanted = auxiliary(
        model, data, [overrides.get(name, 0.0) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")]
    )
    model.zero_grad()
    (total + losses).backward()
    assert all(one == reports[0] for one in reports)
    assert reports[0]["loss"] == pytest.approx(total.item(), abs=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert reports[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, value in wanted.items():
        if "loss" not in name or losses:
            assert reports[0][name] == pytest.approx(value, rel=1e-5), name
    expected = by_expert(config, {name: one.grad for name, one in model.named_parameters()})
    assert before.keys() == expected.keys()
    found = {
        name: ((before[name] - after[name] - one).abs().max() / one.abs().max().clamp(min=1e-6)).item()
        for name, one in expected.items()
    }
    routers = [name for name in expected if ".gate.weight" in name]
    assert len(routers) == sum(experts_of(config).layers)
    assert all(expected[name].abs().max() > 1e-5 for name in routers), "without a gradient nothing is compared"
    worst = max(found, key=found.get)
    print(f"gradients: {found[worst]:.1e} of the largest of {worst}; routers {max(found[r] for r in routers):.1e}")
    assert found[worst] < 1e-4, worst
    for name, value in before.items():
        assert (value - after[name] - expected[name]).abs().max() < 1e-5 * max(1.0, float(norm)), name


def compare_steps(four, model, overrides, count=3):
    """Steps of Adam on both sides."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM["eps"], weight_decay=0.0)
    for step in range(count):
        data = batch(seed=10 + step)
        reports = four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e-3, 0.7)
        total, _ = on_ranks.policy_loss(Reference(model, data, 0.7), Whole(data), 9.0)
        losses, _ = auxiliary(
            model, data, [overrides.get(name, 0.0) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")]
        )
        optimizer.zero_grad()
        (total + losses).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert reports[0]["loss"] == pytest.approx(total.item(), abs=1e-4)
        assert reports[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    expected, found = by_expert(model.config, dict(model.named_parameters())), whole_weights(four)
    off = {name: (found[name] - one).abs().max().item() for name, one in expected.items()}
    worst = max(off, key=off.get)
    print(f"weights after {count} steps: {off[worst]:.1e} ({worst})")
    assert off[worst] < 1e-4


CASES = [
    pytest.param("qwen3", EP2, LOSSES, {}, id="dp4 ep2"),
    pytest.param("qwen3", EP2, {**ALLGATHER, **LOSSES}, DISTRIBUTED, id="dp4 ep2, allgather, distributed", marks=rare),
    pytest.param("qwen3", {"expert_model_parallel_size": 4}, {}, {}, id="dp4 ep4", marks=rare),
    pytest.param("qwen3", {**TP2, **EP2}, LOSSES, {}, id="dp2 tp2 ep2 etp2", marks=rare),
    pytest.param("qwen3", {**TP2, **EP2, **ETP1}, ALLGATHER, DISTRIBUTED, id="dp2 tp2 ep2 etp1, allgather", marks=rare),
    pytest.param("qwen3", {**TP2, **PP2}, {**LOSSES, **RECOMPUTED}, {}, id="tp2 pp2 etp2, recomputed", marks=rare),
    pytest.param("qwen3", {**TP2, **PP2, **EP2, **ETP1}, LOSSES, {}, id="tp2 pp2 ep2 etp1", marks=rare),
    pytest.param("qwen3", {**PP2, **EP2}, {**LOSSES, **RECOMPUTED}, {}, id="dp2 pp2 ep2, recomputed", marks=rare),
    pytest.param("qwen3", {**PP2, **EP2}, {**ALLGATHER, **EXPERTS_RECOMPUTED}, {},
                 id="dp2 pp2 ep2, allgather, experts recomputed", marks=rare),
    pytest.param("qwen3", {**VPP, **EP2}, {**LOSSES, **UNBATCHED, **RECOMPUTED}, {},
                 id="interleaved pipeline, ep2, recomputed", marks=rare),
    pytest.param("mixtral", {**TP2, **EP2, **ETP1}, LOSSES, {}, id="Mixtral, tp2 ep2 etp1", marks=rare),
    pytest.param("qwen2", {**TP2, **EP2}, LOSSES, DISTRIBUTED, id="Qwen2, shared expert, tp2 ep2 etp2", marks=rare),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parallel", "overrides", "optimizer"), CASES)
def test_gradients_and_three_steps_match_transformers(four, saved, name, parallel, overrides, optimizer):
    model, folder = made(four, saved, MODELS[name], parallel, overrides, optimizer={**GRADIENT_DESCENT, **optimizer})
    data = batch()
    off = (joined(four.run(on_ranks.log_probs, data, 0.7), 7) - Reference(model, data, 0.7).log_probs).abs().max()
    print(f"log-probabilities: {off:.1e}")
    assert off < 2e-5
    compare_gradients(four, model, overrides)
    four.run(on_ranks.make, MODELS[name], parallel, overrides=overrides, optimizer={**ADAM, **optimizer})
    four.run(on_ranks.load_hf, folder)
    compare_steps(four, model, overrides)
