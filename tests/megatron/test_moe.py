"""Mixtures of experts on four real processes, compared with transformers' models in this one."""

import math
from functools import partial

import pytest
import torch
import train_model_workers as on_ranks
from hf_reference import Reference, Whole, assert_training_continues, batch, joined, loaded, whole_weights
from lm_configs import LLAMA, PP2, SIZES, TP2, VPP
from mixtures import by_expert, column, drawn_routes, replaying
from shard_helpers import assert_same
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from workers.megatron.config import check_model, experts_of, transformer_config
from workers.megatron.hf_weights import read_folder

HEADS = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4}
MIXED = {**HEADS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
QWEN3 = Qwen3MoeConfig(**MIXED, head_dim=16, norm_topk_prob=True)
MODELS = {
    "qwen3": QWEN3,
    "mixtral": MixtralConfig(**HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "qwen2": Qwen2MoeConfig(**MIXED, shared_expert_intermediate_size=80, tie_word_embeddings=True),
    "late": Qwen3MoeConfig(**{**MIXED, "mlp_only_layers": [0, 1]}, head_dim=16, norm_topk_prob=True),
}
QWEN3_TIED = Qwen3MoeConfig(**MIXED, head_dim=16, tie_word_embeddings=True)
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
ETP2, ETP4 = {"expert_tensor_parallel_size": 2}, {"expert_tensor_parallel_size": 4}
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


def auxiliary(model, data, overrides):
    """The auxiliary losses of all rows, each row alone, from transformers' router logits; and (load, loss, z) means."""
    balance = z = 0.0
    load, experts = 0.0, experts_of(model.config)
    for row, mask in enumerate(data["attention_mask"].bool()):
        layers = model(input_ids=data["input_ids"][row, mask][None], output_router_logits=True).router_logits
        for logits in layers:
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(experts.shape.k).indices, 1.0)
            share = chosen.mean(0) / experts.shape.k
            balance = balance + len(logits) * experts.shape.experts * (share * logits.softmax(-1).mean(0)).sum()
            z = z + logits.logsumexp(-1).square().sum()
        load = load + torch.stack(
            [torch.zeros_like(one).scatter(1, one.topk(experts.shape.k).indices, 1.0).sum(0) for one in layers]
        )
    total = float(data["attention_mask"].sum())
    wanted = {
        "moe/load_min": (load / load.mean(1, keepdim=True)).min().item(),
        "moe/load_max": (load / load.mean(1, keepdim=True)).max().item(),
        "moe/load_balancing_loss": balance.item() / total / len(load),
        "moe/z_loss": z.item() / total / len(load),
    }
    of_balance, of_z = (overrides.get(f"moe_{name}_coeff", 0.0) for name in ("aux_loss", "z_loss"))
    return (of_balance * balance + of_z * z) / total, wanted


def made(four, saved, config, parallel, overrides, **options):
    return loaded(four, saved, config, parallel, sharp=True, overrides=overrides, **options)


def compare_gradients(four, model, overrides):
    """One step of gradient descent on both sides."""
    data, config = batch(), model.config
    before = whole_weights(four)
    reports = four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e6, 0.7)
    after = whole_weights(four)
    total, _ = on_ranks.policy_loss(Reference(model, data, 0.7), Whole(data), 9.0)
    losses, wanted = auxiliary(model, data, overrides)
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
    assert len(routers) == len(experts_of(config).shape.sparse)
    assert all(expected[name].abs().max() > 1e-5 for name in routers), "without a gradient nothing is compared"
    worst = max(found, key=found.get)
    print(f"gradients: {found[worst]:.1e} of the largest of {worst}; routers {max(found[r] for r in routers):.1e}")
    assert found[worst] < 1e-4, worst
    for name, value in before.items():
        assert (value - after[name] - expected[name]).abs().max() < 1e-5 * max(1.0, float(norm)), name


def compare_steps(four, model, overrides, count=2):
    """Steps of Adam on both sides."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM["eps"], weight_decay=0.0)
    for step in range(count):
        data = batch(seed=10 + step)
        reports = four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e-3, 0.7)
        total, _ = on_ranks.policy_loss(Reference(model, data, 0.7), Whole(data), 9.0)
        losses, _ = auxiliary(model, data, overrides)
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
    pytest.param("qwen3", {**TP2, **ETP1}, LOSSES, {}, id="dp2 tp2 etp1", marks=rare),
    pytest.param("qwen3", {**TP2, **ETP1}, LOSSES, DISTRIBUTED, id="dp2 tp2 etp1, distributed", marks=rare),
    pytest.param("qwen3", {**TP2, **ETP4}, LOSSES, DISTRIBUTED, id="dp2 tp2 etp4, distributed", marks=rare),
    pytest.param("qwen3", {**PP2, **ETP2}, {**ALLGATHER, **RECOMPUTED}, {},
                 id="dp2 pp2 etp2, allgather, recomputed", marks=rare),
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
def test_gradients_and_steps_match_transformers(four, saved, name, parallel, overrides, optimizer):
    model, folder = made(four, saved, MODELS[name], parallel, overrides, optimizer={**GRADIENT_DESCENT, **optimizer})
    data = batch()
    off = (joined(four.run(on_ranks.log_probs, data, 0.7), 7) - Reference(model, data, 0.7).log_probs).abs().max()
    print(f"log-probabilities: {off:.1e}")
    assert off < 2e-5
    compare_gradients(four, model, overrides)
    four.run(on_ranks.make, MODELS[name], parallel, overrides=overrides, optimizer={**ADAM, **optimizer})
    four.run(on_ranks.load_hf, folder)
    compare_steps(four, model, overrides)


# --- replay ---------------------------------------------------------------------------------------------


def known_routes(results, rows):
    """The experts of every row, from the layers of all pipeline stages."""
    found = [None] * rows
    dps = {dp for dp, _, _ in results}
    for dp, _, of_rows in results:
        for at, routes in enumerate(of_rows):
            row = dp + at * len(dps)
            before = found[row]
            assert before is None or ((before == routes) | (before < 0) | (routes < 0)).all()
            found[row] = routes if before is None else torch.where(before < 0, routes, before)
    return found


REPLAYS = [
    pytest.param("qwen3", EP2, {}, id="dp4 ep2"),
    pytest.param("qwen3", {**TP2, **PP2, **EP2, **ETP1}, RECOMPUTED, id="tp2 pp2 ep2, recomputed", marks=rare),
    pytest.param("qwen3", {**TP2, **EP2}, {**ALLGATHER, **EXPERTS_RECOMPUTED},
                 id="dp2 tp2 ep2 etp2, allgather, experts recomputed", marks=rare),
    pytest.param("qwen2", {**VPP, **EP2}, {**UNBATCHED, **RECOMPUTED}, id="interleaved, ep2, recomputed", marks=rare),
    pytest.param("mixtral", {**TP2, **EP2, **ETP1}, RECOMPUTED, id="Mixtral, dp2 tp2 ep2, recomputed", marks=rare),
    pytest.param("late", {**PP2, **EP2}, {}, id="dp2 pp2 ep2, no_experts in the first stage", marks=rare),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parallel", "overrides"), REPLAYS)
def test_given_experts_compute_the_tokens_and_get_the_gradient(four, saved, name, parallel, overrides):
    model, _ = made(four, saved, MODELS[name], parallel, overrides, optimizer=GRADIENT_DESCENT)
    data = batch()
    rows = drawn_routes(model.config, data)
    given = {**data, "routed_experts": column(rows)}
    with replaying(model, rows) as taken:
        expected = Reference(model, data, 0.7)
    off = (joined(four.run(on_ranks.log_probs, given, 0.7), 7) - expected.log_probs).abs().max().item()
    effect = (Reference(model, data, 0.7).log_probs - expected.log_probs).abs().max().item()
    found = known_routes(four.run(on_ranks.log_probs_and_routes, given, 0.7), 7)
    for row, layers in enumerate(taken):
        for layer, chosen in layers.items():
            assert torch.equal(found[row][:, layer].long().sort(-1).values, chosen.sort(-1).values), (row, layer)
    before = whole_weights(four)
    (report, *_) = four.run(on_ranks.train_step, given, on_ranks.policy_loss, 9.0, 1e6, 0.7)
    after = whole_weights(four)
    total, _ = on_ranks.policy_loss(expected, Whole(data), 9.0)
    model.zero_grad()
    total.backward()
    gradients = by_expert(model.config, {name: one.grad for name, one in model.named_parameters()})
    wrong = {name: (before[name] - after[name] - one).abs().max().item() for name, one in gradients.items()}
    worst, largest = max(wrong, key=wrong.get), max(one.abs().max().item() for one in gradients.values())
    print(f"replayed: log-probabilities {off:.1e} (effect of the experts {effect:.1e}), gradients {wrong[worst]:.1e} "
          f"of {largest:.1e}, overlap {report['replay/overlap']:.2f}")  # fmt: skip
    assert off < 2e-5 < 1e-2 < effect
    assert report["loss"] == pytest.approx(total.item(), abs=1e-5)
    assert wrong[worst] < 1e-5 * max(1.0, largest), worst
    assert 0.1 < report["replay/overlap"] < 0.6


@pytest.mark.parametrize(("name", "parallel", "overrides"), REPLAYS)
def test_recorded_experts_are_those_of_transformers_and_are_replayed(four, saved, name, parallel, overrides):
    """Recorded in one pass, replayed in the next ones although the routers have changed."""
    model, _ = made(four, saved, MODELS[name], parallel, overrides, optimizer=ADAM)
    data = batch()
    with replaying(model, None) as taken:
        expected = Reference(model, data).log_probs
    results = four.run(on_ranks.log_probs_and_routes, data)
    rows = known_routes(results, 7)
    for row, layers in enumerate(taken):
        for layer, chosen in layers.items():
            assert torch.equal(rows[row][:, layer].long().sort(-1).values, chosen.sort(-1).values), (row, layer)
    given = {**data, "routed_experts": column(rows)}
    same = (joined(four.run(on_ranks.log_probs, given), 7) - expected).abs().max().item()
    four.run(on_ranks.disturb_routers, 1.0)
    again = known_routes(four.run(on_ranks.log_probs_and_routes, given), 7)
    assert all(torch.equal(one, other) for one, other in zip(rows, again, strict=True))
    changed = known_routes(four.run(on_ranks.log_probs_and_routes, data), 7)
    assert not all(torch.equal(one, other) for one, other in zip(rows, changed, strict=True))
    (report, *_) = four.run(on_ranks.train_step, given, on_ranks.policy_loss, 9.0, 1e-3)
    print(f"recorded and replayed: log-probabilities {same:.1e}, overlap with other routers {report['replay/overlap']}")
    assert same < 2e-5
    assert report["replay/overlap"] < 0.99


# --- around training ------------------------------------------------------------------------------------


@rare
def test_micro_batch_losses_are_those_of_transformers(four, saved):
    """One layer with experts, and one micro-batch: then both definitions agree, except for the factor k."""
    config = Qwen3MoeConfig(**{**MIXED, "mlp_only_layers": [0, 1, 2]}, head_dim=16)
    overrides = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
    options = {"optimizer": ADAM, "max_tokens_per_micro_batch": 1000}
    model, _ = made(four, saved, config, {**TP2, **PP2, **EP2, **ETP1}, overrides, **options)
    data = batch()
    (report, *_) = four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e-3, 0.7)
    lengths = data["attention_mask"].sum(1).tolist()
    rows = [data["input_ids"][row, mask] for row, mask in enumerate(data["attention_mask"].bool())]
    left = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(left.shape[1]) < torch.tensor(lengths)[:, None]).long()
    out = model(input_ids=left, attention_mask=mask, output_router_logits=True)
    assert report["moe/load_balancing_loss"] == pytest.approx(out.aux_loss.item() / 2, rel=1e-5)


@rare
def test_critic_with_experts_matches_a_token_classifier(four, saved):
    config = Qwen3MoeConfig(**MIXED, head_dim=16, num_labels=1, tie_word_embeddings=True)
    model, folder = saved(config, AutoModelForTokenClassification)
    parallel = {**TP2, **PP2, **EP2, **ETP1}
    four.run(on_ranks.make, QWEN3_TIED, parallel, role="critic", optimizer=ADAM)
    four.run(on_ranks.load_hf, folder)
    data = batch()
    found = joined(four.run(on_ranks.values, data), 7)
    assert (found - Reference(model, data).values).abs().max() < 1e-4
    (report, *_) = four.run(on_ranks.train_step, data, on_ranks.value_loss, 9.0, 1e-3)
    total, _ = on_ranks.value_loss(Reference(model, data), Whole(data), 9.0)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert report["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@rare
@pytest.mark.parametrize(
    ("name", "before", "after", "distributed"),
    [
        pytest.param("qwen3", EP2, {**PP2, **EP2}, False, id="dp4 ep2 to dp2 pp2 ep2"),
        pytest.param("qwen3", {**TP2, **EP2, **ETP1}, EP2, True, id="dp2 tp2 ep2 etp1 to dp4 ep2, distributed"),
        pytest.param("qwen3", {}, EP2, False, id="dp4 to dp4 ep2"),
        pytest.param("qwen3", EP2, TP2, False, id="dp4 ep2 to dp2 tp2"),
        pytest.param("qwen3", {**TP2, **ETP1}, EP2, True, id="dp2 tp2 etp1 to dp4 ep2, distributed"),
        pytest.param("qwen3", {**PP2, **EP2}, ETP2, True, id="dp2 pp2 ep2 to dp4 etp2, distributed"),
        pytest.param("late", {**PP2, **EP2}, {}, False, id="no_experts in the first stage, to dp4"),
        pytest.param("late", {**PP2, **EP2}, PP2, True, id="no experts in the first stage, to dp2 pp2, distributed"),
        pytest.param("qwen2", {**TP2, **EP2}, {**PP2, "expert_model_parallel_size": 2}, True,
                     id="Qwen2, dp2 tp2 ep2 etp2 to dp2 pp2 ep2, distributed"),
    ],
)  # fmt: skip
def test_training_continues_from_a_checkpoint_at_other_sizes(four, saved, tmp_path, name, before, after, distributed):
    options = {"overrides": LOSSES, "optimizer": {**ADAM, "distributed": distributed}}
    assert_training_continues(four, saved, str(tmp_path), MODELS[name], before, after, sharp=True, **options)


@rare
@pytest.mark.parametrize("name", MODELS)
def test_export_can_be_loaded_by_transformers(four, saved, tmp_path, name):
    model, folder = made(four, saved, MODELS[name], {**TP2, **PP2, **EP2, **ETP1}, {})
    four.run(on_ranks.export, str(tmp_path))
    assert_same(read_folder(tmp_path), read_folder(folder))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and type(again) is type(model)


@rare
@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        pytest.param({**TP2, **EP2}, {"optimizer": {}}, id="dp2 tp2 ep2 etp2, bf16"),
        pytest.param(EP2, {"optimizer": DISTRIBUTED}, id="dp4 ep2, bf16, distributed optimizer"),
    ],
)
def test_restored_weights_are_trained(four, saved, parallel, options):
    loaded(four, saved, QWEN3, parallel, param_dtype="bf16", **options)
    assert four.run(on_ranks.snapshot_step_back, batch(), 9.0) == [(True,) * 4] * 4
    assert all(tensor.dtype == torch.bfloat16 for tensor in whole_weights(four).values())


@rare
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("overrides", [LOSSES, {**ALLGATHER, **LOSSES}], ids=["alltoall", "allgather"])
def test_ranks_without_rows_run_the_experts_of_the_others(four, saved, rows, overrides):
    """They have no token of their own; others need their experts, in each micro-batch."""
    model, _ = made(four, saved, QWEN3, {**PP2, **EP2}, overrides, optimizer=ADAM, max_tokens_per_micro_batch=8)
    data = batch(rows)
    found = joined(four.run(on_ranks.log_probs, data), rows)
    assert (found - Reference(model, data).log_probs).abs().sum() < 1e-4
    if rows:
        (report, *_) = four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e-3)
        total, _ = on_ranks.policy_loss(Reference(model, data), Whole(data), 9.0)
        losses, wanted = auxiliary(model, data, LOSSES)
        (total + losses).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert report["moe/z_loss"] == pytest.approx(wanted["moe/z_loss"], rel=1e-5)
    reports = four.run(on_ranks.train_step, batch(0), on_ranks.no_loss, 1.0, 0.0)
    assert reports[0]["loss"] == reports[0]["grad_norm"] == 0.0


@rare
def test_auxiliary_losses_are_scaled_as_the_loss_in_float16(four, saved):
    """There is no other gradient here. Larger ones would overflow at the first loss scale, 65536."""
    overrides, norms = {"moe_aux_loss_coeff": 0.03, "moe_z_loss_coeff": 0.003}, []
    for dtype in ("fp32", "fp16"):
        loaded(four, saved, QWEN3, {**TP2, **EP2}, param_dtype=dtype, overrides=overrides, optimizer=ADAM)
        norms.append(four.run(on_ranks.train_step, batch(), on_ranks.no_loss, 1.0, 1e-3)[0]["grad_norm"])
    print(f"gradient norms in float32 and float16: {norms}")
    assert norms[0] > 0.01 and norms[1] == pytest.approx(norms[0], rel=0.02)


@rare
@pytest.mark.parametrize("distributed", [False, True])
def test_overflow_of_experts_alone_keeps_one_loss_scale_in_float16(four, saved, distributed):
    """Megatron halves the scale after two overflows in a row. Each of its optimizers has a scaler of its own, but there
    is one loss: gradients that were divided by another scale would be too large."""
    options = {"overrides": {"moe_aux_loss_coeff": 0.03, "moe_z_loss_coeff": 0.003}, "param_dtype": "fp16"}
    loaded(four, saved, QWEN3, EP2, optimizer={**ADAM, "distributed": distributed}, **options)

    def norm(**infinite):
        return four.run(on_ranks.train_step, batch(), on_ranks.no_loss, 1.0, 0.0, **infinite)[0]["grad_norm"]

    before = norm()
    assert all(math.isnan(norm(infinite=".0.mlp.experts.")) for _ in range(2))
    assert norm() == pytest.approx(before, rel=0.02)


@rare
def test_failed_pass_leaves_no_experts_to_the_next(four, saved):
    """Its routes would be taken, and its tokens be counted, by later passes."""
    make = partial(made, four, saved, QWEN3, EP2, RECOMPUTED, optimizer=ADAM)
    data = batch()
    given = {**data, "routed_experts": column(drawn_routes(QWEN3, data))}
    make()
    expected = four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e-3)
    make()
    assert all(four.run(on_ranks.step_fails, given)), "every router is empty again"
    assert four.run(on_ranks.train_step, data, on_ranks.policy_loss, 9.0, 1e-3) == expected


@rare
@pytest.mark.parametrize("distributed", [False, True])
def test_offloaded_experts_continue_unchanged(four, saved, distributed):
    again = partial(loaded, four, saved, QWEN3, {**TP2, **EP2, **ETP1}, optimizer={"distributed": distributed})
    again()
    four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 1e-3)
    expected = four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 1e-3)
    again()
    for (asleep, freed, copied, found), wanted in zip(
        four.run(on_ranks.sleep_and_wake, batch(), 9.0), expected, strict=True
    ):
        assert asleep == 0 and freed > copied > 0
        assert found == wanted


@rare
def test_random_weights_are_those_of_one_process(four):
    """The experts differ from each other, and nothing depends on which ranks have it."""
    found = []
    for parallel in ({}, EP2, {**TP2, **EP2}, {**PP2, **EP2}):
        four.run(on_ranks.make, QWEN3, parallel)
        found.append(whole_weights(four))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])
    first, fifth = (found[0][f"model.layers.0.mlp.experts.{number}.up_proj.weight"] for number in (0, 4))
    assert (first - fifth).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        (QWEN3, {"expert_model_parallel_size": 3}, "number of experts, 8, is not divisible by expert_model"),
        (QWEN3, {"expert_tensor_parallel_size": 5}, "width of an expert, 48, is not divisible by expert_tensor_paral"),
        (LLAMA, EP2, "model_type 'llama' has no experts"),
        (Qwen3MoeConfig(**{**MIXED, "num_experts_per_tok": 9}), {}, "num_experts_per_tok=9 must be at most the num"),
        (Qwen3MoeConfig(**{**MIXED, "num_experts_per_tok": 1}, norm_topk_prob=True), {}, "would get no gradient"),
        (Qwen3MoeConfig(**{**MIXED, "mlp_only_layers": [0, 1, 2, 3]}), {}, "leave no layer with experts"),
        (MixtralConfig(**HEADS, router_jitter_noise=0.1), {}, "router_jitter_noise=0.1 is not supported"),
    ],
)
def test_what_is_refused(config, sizes, says):
    with pytest.raises(ValueError, match=says):
        check_model(config, sizes)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "'flex' is not supported; use one of 'alltoall', 'allgather'"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "use one of 'seq_aux_loss', 'aux_loss'"),
        ({"moe_aux_loss_coeff": [0.1]}, "must be a number of at least 0"),
        ({"sequence_parallel": True}, "if and only if tensor_model_parallel_size is above 1"),
        ({"moe_router_topk": 3}, "moe_router_topk=3 contradicts the Hugging Face config"),
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay=True contradicts"),
        ({"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps=0.01 contradicts"),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm=True needs Transformer Engine"),
    ],
)
def test_overrides_that_are_refused(overrides, says):
    with pytest.raises(ValueError, match=says):
        transformer_config(QWEN3, overrides=overrides)
