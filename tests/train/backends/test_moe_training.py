"""Mixtures of experts on FSDP, compared with one process that runs row by row: the models of transformers 5, whose
experts are one parameter. The auxiliary losses are written as loops over tokens."""

import math

import pytest
import torch
from model_types import config_of, model_of
from shard_helpers import assembled, read_shards
from tensordict import TensorDict
from test_model_types import COUNTED, TEMPERATURE, weighted
from train_helpers import begin, distance
from transformers import AutoConfig

from single_controller import Broadcast
from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel
from workers.fsdp.fsdp_worker import FSDPTrainWorker
from workers.lora import LoraSettings
from workers.train.args import TrainArgsError, read_args

pytestmark = pytest.mark.timeout(180)

CLIP, LR = 0.5, 1e-3
BALANCED = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}
SEED = 5


def config(model_type):
    """With normalized scores where the type has them, and one dense layer."""
    made = config_of(model_type)
    for name, value in (("norm_topk_prob", True), ("num_hidden_layers", 3), ("mlp_only_layers", [1])):
        if hasattr(made, name):
            setattr(made, name, value)
    if getattr(made, "layer_types", None):
        made.layer_types = [made.layer_types[0]] * made.num_hidden_layers
    return AutoConfig.for_model(**made.to_dict())


def rows():
    """Ragged rows with padding on either side; the first four begin alike, as completions of one prompt do."""
    drawn = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(1, 32, (8, 18), generator=drawn), torch.zeros(8, 18, dtype=torch.long)
    ids[1:4, :10] = ids[0, :10]
    for row, (start, end) in enumerate([(0, 18), (0, 16), (0, 11), (0, 14), (3, 12), (2, 9), (5, 8), (0, 18)]):
        mask[row, start:end] = 1
    weights = torch.randn(8, 18, generator=drawn)
    return TensorDict({"input_ids": ids * mask, "attention_mask": mask, "weights": weights}, [8])


def run(worker, hf_config, data, options):
    """On a rank: log-probabilities, gradients, the report of a step, and the weights after two steps of AdamW."""
    usual = {"seed": SEED, "clip_grad": CLIP, **options}
    own = data[worker.rank :: worker.world_size]
    # A step of lr / eps * gradient, to one part in a million: the weights show the gradient.
    exposed = FSDPOptions(**{**usual, "clip_grad": 0.0, "eps": 1e6, "betas": (0.0, 0.9)})
    model = FSDPTrainModel(hf_config, "actor", worker.device, exposed)
    log_probs = model.log_probs(own, TEMPERATURE)
    before = read_shards(model.hf_shards())
    report = model.train_step(dict(own), weighted, lr=1e6, temperature=TEMPERATURE)
    after = read_shards(model.hf_shards())
    gradients = [(*old[:3], old[3] - new[3]) for old, new in zip(before, after, strict=True)]
    model = FSDPTrainModel(hf_config, "actor", worker.device, FSDPOptions(**usual))
    for _ in range(2):
        model.train_step(dict(own), weighted, lr=LR, temperature=TEMPERATURE)
    return log_probs, gradients, report, read_shards(model.hf_shards()), model._packed


def policy_loss(model, data, row):
    """The loss of a row and the logits of its routers, by layer."""
    mask = data["attention_mask"][row].bool()
    ids = data["input_ids"][row, mask]
    out = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
    of_all = (out.logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    log_probs = of_all.gather(-1, ids[1:, None])[:, 0]
    return -(log_probs * data["weights"][row, mask][1:]).sum() / COUNTED, out.router_logits, log_probs.detach()


def balancing(of_rows, k):
    """Load-balancing loss and z-loss of one batch of rows of one layer, summed over its tokens."""
    logits = torch.cat(of_rows)
    tokens, experts = logits.shape
    chosen = [0] * experts
    for token in logits:
        for expert in sorted(range(experts), key=lambda one, of=token: -float(of.detach()[one]))[:k]:
            chosen[expert] += 1
    balance = sum(chosen[e] / tokens * logits.softmax(-1)[:, e].mean() for e in range(experts)) * experts / k
    return balance * tokens, logits.logsumexp(-1).square().sum(), chosen


def reference_step(model, data, k, batches, aux, z_loss):
    """Backward of a whole step. Returns the loss without the auxiliary ones, these two, and each layer's load."""
    made = [policy_loss(model, data, row) for row in range(len(data))]
    total = sum(loss for loss, _, _ in made)
    tokens = int(data["attention_mask"].sum())
    layers, balance, z, loads = len(made[0][1]), 0.0, 0.0, []
    for layer in range(layers):
        loads.append([0] * made[0][1][layer].shape[-1])
        for batch in batches:
            of_batch, z_of_batch, chosen = balancing([made[row][1][layer] for row in batch], k)
            balance, z = balance + of_batch / tokens, z + z_of_batch / tokens
            loads[-1] = [one + other for one, other in zip(loads[-1], chosen, strict=True)]
    (total + aux * balance + z_loss * z).backward()
    return float(total.detach()), float(balance.detach()) / layers, float(z.detach()) / layers, loads


def norm_of(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


@pytest.fixture(scope="module")
def groups(fsdp_groups):
    def of(ranks):
        begin(fsdp_groups(ranks), {"hf_config": config_of("llama").to_diff_dict()})
        return fsdp_groups(ranks).worker_group

    return of


COMMON = ("qwen3_moe", 2, {**BALANCED, "sequence_packing": True})
RARE = [
    ("qwen3_moe", 4, {**BALANCED, "gradient_checkpointing": True}),
    ("qwen3_moe", 2, {**BALANCED, "sequence_packing": False, "gradient_checkpointing": True}),
    ("qwen3_moe", 2, {**BALANCED, "moe_balance_rows": False, "max_tokens_per_micro_batch": 1000}),
    ("qwen3_moe", 2, {**BALANCED, "reduce_dtype": torch.float64}),
    ("mixtral", 2, BALANCED),
    ("mixtral", 4, {**BALANCED, "gradient_checkpointing": True}),
    ("olmoe", 2, BALANCED),
    ("olmoe", 4, {**BALANCED, "sequence_packing": False}),
    ("qwen2_moe", 2, {**BALANCED, "gradient_checkpointing": True}),
    ("qwen2_moe", 4, {}),
]
in_full = pytest.mark.full("mixtures of experts on FSDP in every way")


@pytest.mark.parametrize(
    ("model_type", "ranks", "options"), [COMMON, *(pytest.param(*case, marks=in_full) for case in RARE)]
)
def test_training_equals_one_process(groups, model_type, ranks, options):
    hf_config, data = config(model_type), rows()
    k = hf_config.num_experts_per_tok
    options = {"max_tokens_per_micro_batch": 40, **options}
    aux, z_loss = options.get("moe_aux_loss_coeff", 0.0), options.get("moe_z_loss_coeff", 0.0)
    batches = [[row] for row in range(len(data))]
    if not options.get("moe_balance_rows", True):  # a micro-batch is all rows of a rank
        batches = [list(range(rank, len(data), ranks)) for rank in range(ranks)]
    found = groups(ranks).execute_with_func_generator(run, Broadcast(hf_config), Broadcast(data), Broadcast(options))
    log_probs, gradients, reports, weights, packed = zip(*found, strict=True)
    assert set(packed) == {options.get("sequence_packing", True)}

    model = model_of(hf_config, seed=SEED)
    loss, balance, z, loads = reference_step(model, data, k, batches, aux, z_loss)
    for row in range(len(data)):
        expected = policy_loss(model, data, row)[2]
        mask = data["attention_mask"][row].bool()
        torch.testing.assert_close(log_probs[row % ranks][row // ranks, mask][1:], expected, atol=1e-5, rtol=0)
    of_step = reports[0]
    assert of_step.sums["loss"] == pytest.approx(loss, abs=1e-5)
    assert of_step.grad_norm == pytest.approx(float(norm_of(model)), rel=1e-5)
    if aux or z_loss:
        assert of_step.sums["moe/load_balancing_loss"] == pytest.approx(balance, rel=1e-5)
        assert of_step.sums["moe/z_loss"] == pytest.approx(z, rel=1e-5)
    if not packed[0]:  # packed rows compute a common beginning once
        even = [[one * len(of) / sum(of) for one in of] for of in loads]
        assert of_step.sums["moe/load_min"] == pytest.approx(min(map(min, even)))
        assert of_step.sums["moe/load_max"] == pytest.approx(max(map(max, even)))
    assert all(report.sums == of_step.sums for report in reports)
    assert min(map(min, loads)) < max(map(max, loads))
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    difference = distance(assembled(gradients), expected)
    of_experts = [name for name in expected if ".experts." in name or ".gate." in name or "router" in name]
    print(f"\n{model_type}, {ranks} ranks: gradients differ by {difference:.1e}")
    assert of_experts and min(expected[name].abs().max() for name in of_experts) > 1e-4
    assert difference < 1e-5

    model = model_of(hf_config, seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        reference_step(model, data, k, batches, aux, z_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    difference = distance(assembled(weights), dict(model.named_parameters()))
    print(f"after two steps, the weights differ by {difference:.1e}")
    assert difference < 1e-4


def adapted(worker, hf_config, data, targets):
    lora = LoraSettings(4, target_modules=targets)
    options = FSDPOptions(seed=SEED, lora=lora, max_tokens_per_micro_batch=40, eps=1e6, betas=(0.0, 0.9), clip_grad=0.0)
    model = FSDPTrainModel(hf_config, "actor", worker.device, options)
    own = data[worker.rank :: worker.world_size]
    before = read_shards(model.hf_shards())
    report = model.train_step(dict(own), weighted, lr=1e6, temperature=TEMPERATURE)
    after = read_shards(model.hf_shards())
    return before, [(*old[:3], old[3] - new[3]) for old, new in zip(before, after, strict=True)], report


def test_adapter_on_attention(groups):
    import peft  # takes a second, which only one of the processes of pytest-xdist needs

    hf_config, data, targets = config("qwen3_moe"), rows(), ("q_proj", "v_proj")
    found = groups(2).execute_with_func_generator(adapted, Broadcast(hf_config), Broadcast(data), Broadcast(targets))
    before, gradients, reports = zip(*found, strict=True)
    adapter = assembled(before)
    base = adapter.pop("lora_base_digest")
    model = peft.get_peft_model(
        model_of(hf_config, seed=SEED),
        peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), task_type="CAUSAL_LM"),
    )
    assert not peft.set_peft_model_state_dict(model, adapter).unexpected_keys and base
    loss, *_ = reference_step(model, data, 2, [[row] for row in range(len(data))], 0.0, 0.0)
    assert reports[0].sums["loss"] == pytest.approx(loss, abs=1e-5)
    expected = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    made = assembled(gradients)
    made.pop("lora_base_digest")
    assert distance(made, expected) < 1e-5
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj", "model.layers.0.mlp.experts"])
def test_adapter_on_experts_is_refused(target):
    model = model_of(config("qwen3_moe"))
    with pytest.raises(ValueError, match=rf"'{target}'.*experts of a layer.*'qwen3_moe'.*q_proj.*lora_rank=0"):
        LoraSettings(4, target_modules=("q_proj", target)).inject(model)


def test_adapter_on_a_shared_expert_is_possible():
    model = model_of(config("qwen2_moe"))
    LoraSettings(4, target_modules=("q_proj", "shared_expert.down_proj")).inject(model)
    assert any("shared_expert.down_proj.lora_A" in name for name, _ in model.named_parameters())


def test_losses_that_a_model_has_not_are_refused_before_anything_starts():
    dense, mixture = (config_of(kind).to_diff_dict() for kind in ("llama", "qwen3_moe"))
    with pytest.raises(TrainArgsError, match=r"moe_z_loss_coeff=0.1 needs a mixture .* 'llama'"):
        FSDPTrainWorker.check_args(read_args({"hf_config": dense, "moe_z_loss_coeff": 0.1}), 2, False)
    given = {"hf_config": mixture, "moe_aux_loss_coeff": 0.1, "sequence_parallel_size": 2}
    with pytest.raises(TrainArgsError, match=r"moe_aux_loss_coeff=0.1 .* sequence_parallel_size=2"):
        FSDPTrainWorker.check_args(read_args(given), 2, False)
    FSDPTrainWorker.check_args(read_args({"hf_config": mixture, "moe_aux_loss_coeff": 0.1}), 2, False)
    assert math.isclose(read_args({}).moe_aux_loss_coeff, 0.0)
