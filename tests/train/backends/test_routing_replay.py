"""Routing replay on FSDP: the experts that are recorded compute the tokens, in every pass."""

from copy import deepcopy

import dense_mixture
import pytest
import ray
import torch
from tensordict import TensorDict
from train_helpers import begin, kept_gradients, learn

from single_controller import Broadcast, LocalWorkerGroup, RayClassWithInitArgs
from workers.data.collate import collate
from workers.data.rollout_data import RolloutDataError, check_rollout_data, rows_of
from workers.data.routed_experts import RoutingShape, without_routes
from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel
from workers.hf_files import config_from
from workers.hf_routing import RoutingError
from workers.lora import LoraSettings
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_manager import RolloutManager
from workers.rollout.rollout_worker import RolloutWorker
from workers.train.args import TrainArgsError
from workers.train.group_links import RolloutLink

pytestmark = pytest.mark.timeout(180)

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.1}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 128}
QWEN = {**SIZES, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24, "num_hidden_layers": 3}
QWEN |= {"mlp_only_layers": [1], "norm_topk_prob": True}
MODELS = {
    "qwen3_moe": QWEN,
    "scores not normalized": {**QWEN, "norm_topk_prob": False},
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 8},
}
LENGTHS, SHARED = [16, 19, 14, 12, 7], 11


def tree_rows(config):
    """Rows of which three share their first tokens. A token id tells the token, and so what experts it has. Some tokens
    have none in one layer, and a row's last one has none at all."""
    shape, generator = RoutingShape.of(config), torch.Generator().manual_seed(0)
    of_ids = torch.rand(128, shape.layers, shape.experts, generator=generator).argsort(-1)[..., : shape.k].short()
    for layer in set(range(shape.layers)) - set(shape.sparse):
        of_ids[:, layer] = -1
    of_ids[5, shape.sparse[-1]] = -1
    ids, mask = torch.zeros(5, 20, dtype=torch.long), torch.zeros(5, 20, dtype=torch.long)
    routes, free = [], SHARED
    for row, length in enumerate(LENGTHS):
        own = list(range(SHARED)) if row < 3 else []
        own += range(free, free + length - len(own))
        free = own[-1] + 2
        ids[row, 1 : 1 + length], mask[row, 1 : 1 + length] = torch.tensor(own), 1
        routes.append(of_ids[own].clone())
        routes[-1][-1] = -1
    weights = torch.randn(5, 20, generator=generator) * mask
    weights[:, 1] = 0
    column = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    data = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask * (weights != 0), "weights": weights}
    return TensorDict({**data, "routed_experts": column}, [5]), of_ids


def weighted(outputs, part):
    return (outputs.log_probs * part.others["weights"] * part.attention_mask)[:, 1:].sum() / 10, {}


def spy(model, seen):
    """Write what the model computes: token ids of each pass, then (layer, experts of each of them). The hooks are on
    what uses the experts, the modules behind the routers."""
    model.register_forward_pre_hook(lambda _, given, named: seen.append(named["input_ids"].flatten()), with_kwargs=True)
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            layer = int(name.split(".layers.")[1].split(".")[0])
            module.register_forward_pre_hook(lambda _, given, layer=layer: seen.append((layer, given[1].clone())))


def steps(worker, given):
    """On a rank: log-probabilities, loss, gradients, and what was seen in both passes."""
    data, config, options = given
    size = options.get("sequence_parallel_size", 1)
    own = rows_of(data, list(range(worker.rank // size, len(data), worker.world_size // size)))
    of = FSDPOptions(max_tokens_per_micro_batch=45, clip_grad=0.0, seed=5, routing_replay=True, **options)
    model = FSDPTrainModel(deepcopy(config), "actor", worker.device, of)
    scored, seen = [], []
    spy(model.module, scored)
    log_probs = model.log_probs(own, 1.0)
    scored, before = list(scored), len(scored)
    spy(model.module, seen)
    gradients = kept_gradients(model)
    report = model.train_step(dict(own), weighted, lr=0.0)
    seen = list(seen)
    recorded = model.log_probs_and_routes(own, 1.0)[1]
    model._reshard()
    weights = {name: parameter.detach().full_tensor() for name, parameter in model.module.named_parameters()}
    return own, log_probs, report.sums, gradients, scored[:before], seen, recorded, weights


@pytest.fixture(scope="module")
def two(fsdp_groups):
    begin(fsdp_groups(2), {"hf_config": QWEN})
    return fsdp_groups(2)


CASES = {
    "packed, recomputed": ("qwen3_moe", {"gradient_checkpointing": True}),
    "padded": ("mixtral", {"sequence_packing": False}),
    "padded, recomputed": ("scores not normalized", {"sequence_packing": False, "gradient_checkpointing": True}),
    "shared sequence": ("qwen3_moe", {"sequence_parallel_size": 2, "gradient_checkpointing": True}),
    "shared sequence, padded": ("mixtral", {"sequence_parallel_size": 2, "sequence_packing": False}),
    "exact": ("qwen3_moe", {"exact": True, "gradient_checkpointing": True}),
    "offloaded": ("mixtral", {"cpu_offload": True, "reduce_dtype": torch.float64}),
    "adapter": ("qwen3_moe", {"lora": LoraSettings(2, 4), "gradient_checkpointing": True}),
}
QUICK = {"packed, recomputed"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(of, marks=() if of in QUICK else pytest.mark.full("ways to train with replay")) for of in CASES],
)
def test_replayed_experts_compute_the_tokens(two, case):
    """The experts are those of the column, token by token, also when activations are computed again; log-probabilities
    and gradients, the routers' included, are those of a dense mixture in plain torch."""
    model_type, options = CASES[case]
    config = config_from(MODELS[model_type])
    shape, (data, of_ids) = RoutingShape.of(config), tree_rows(config)
    ranks = two.worker_group.execute_with_func_generator(steps, Broadcast((data, config, options)))
    weights = {
        name: tensor.double().requires_grad_()
        for name, tensor in ranks[0][7].items()
        if "lora_" not in name
    }  # fmt: skip
    weights = {name.replace(".base_layer", ""): tensor for name, tensor in weights.items()}
    expected, total = {}, torch.zeros((), dtype=torch.float64)
    for row, experts in zip(range(5), data["routed_experts"].unbind(), strict=True):
        real = data["attention_mask"][row].bool()
        expected[row] = dense_mixture.log_probs(weights, config, data["input_ids"][row][real], experts)
        total = total + (expected[row] * data["weights"][row][real].double()).sum() / 10
    total.backward()
    passes = 2 if options.get("gradient_checkpointing") else 1
    for own, log_probs, sums, gradients, scored, seen, recorded, _ in ranks:
        assert sums["loss"] == pytest.approx(float(total.detach()), abs=1e-5)
        for at in range(len(own)):
            row = int((data["input_ids"] == own["input_ids"][at]).all(1).nonzero()[0])
            real = own["attention_mask"][at].bool()
            assert (log_probs[at][real] - expected[row].detach()).abs().max() < 1e-5
        for name, gradient in gradients.items():
            if "lora_" not in name:
                assert (gradient - weights[name].grad).abs().max() < 1e-5, name
        if "lora" not in options:
            assert gradients.keys() == weights.keys()
            assert all(gradients[f"model.layers.{layer}.mlp.gate.weight"].any() for layer in shape.sparse)
        for said, times in ((scored, 1), (seen, passes)):
            assert_experts(said, of_ids, shape, times)
        check_rollout_data({**without_routes(own), "routed_experts": recorded}, 128, shape)
        known = own["routed_experts"].values()
        assert torch.equal(recorded.values()[known >= 0], known[known >= 0])
    assert 0 < ranks[0][2]["replay/overlap"] < 0.6  # random experts


def assert_experts(seen, of_ids, shape, times):
    """In each pass every sparse layer used the experts of each token, so many times."""
    passes, tokens = [], None
    for said in seen:
        if isinstance(said, tuple):
            passes[-1].append(said)
        else:
            tokens = said
            passes.append([tokens])
    assert passes
    for ids, *layers in passes:
        assert sorted(layer for layer, _ in layers) == sorted(list(shape.sparse) * times)
        for layer, chosen in layers:
            last = {at for at in range(len(ids)) if at + 1 == len(ids) or ids[at + 1] != ids[at] + 1}
            for at, token in enumerate(ids.tolist()):
                wanted = of_ids[token, layer]
                if token and at not in last and (wanted >= 0).all():
                    assert chosen[at].tolist() == wanted.tolist(), (layer, token)


def test_load_of_experts(two):
    """Against counts over the rows, packed, so that shared tokens are computed once."""
    config = config_from(MODELS["mixtral"])
    data, of_ids = tree_rows(config)
    data["routed_experts"] = torch.nested.as_nested_tensor(
        [of_ids[row[mask.bool()]] for row, mask in zip(data["input_ids"], data["attention_mask"], strict=True)],
        layout=torch.jagged,
    )
    data["routed_experts"].values()[:, 1] = torch.tensor([2, 5])
    ranks = two.worker_group.execute_with_func_generator(steps, Broadcast((data, config, {})))
    sums, counts = ranks[0][2], torch.zeros(8)
    for rank in range(2):  # of each rank's rows, those with a common prefix are in one micro-batch
        own = {int(one) for row, mask in zip(data["input_ids"][rank::2], data["attention_mask"][rank::2], strict=True)
               for one in row[mask.bool()]}  # fmt: skip
        for token in own:
            counts[of_ids[token, 0].long()] += 1
    load = counts / counts.mean()
    assert sums["moe/load_max"] == pytest.approx(max(4.0, float(load.max())))  # all tokens have two of eight experts
    assert sums["moe/load_min"] == 0.0


# --- engine and trainer ---------------------------------------------------------------------------------------------


class NoisyEngine(HFEngine):
    """An engine whose routers choose with noise on their logits. The scores are the logits' own."""

    def __init__(self, model, *, noise, **options):
        super().__init__(model, **options)
        generator = torch.Generator().manual_seed(0)

        def choose(router, given, made):
            logits, scores, _ = made
            noisy = logits + noise * torch.randn(logits.shape, generator=generator)
            chosen = noisy.topk(scores.shape[-1], dim=-1).indices
            found = logits.softmax(-1).gather(1, chosen)
            return logits, found / found.sum(-1, keepdim=True), chosen

        for module in self.model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(choose, prepend=True)  # before the one that records


def generated(engine, rows=24):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(128, (3 + row % 5,), generator=generator).tolist() for row in range(rows // 2)] * 2
    completions = engine.generate(prompts, SamplingParams(24), range(rows))
    engine.close()
    rewards = [7 * row % 5 for row in range(rows)]
    return collate(prompts, completions, rewards=rewards, group_ids=[*range(rows // 2)] * 2)


def differences(group, data):
    """The largest difference between the engine's log-probabilities and the trainer's: with replay, and without."""
    counts = data["loss_mask"].bool()
    return [
        float((group.worker_group.compute_log_prob(rows) - data["rollout_log_probs"])[counts].abs().max())
        for rows in (data, data.exclude("routed_experts"))
    ]


def test_replay_removes_what_other_experts_make_of_log_probabilities(two):
    begin(two, {"hf_config": QWEN, "seed": 5, "routing_replay": "R3", "max_tokens_per_micro_batch": 200})
    with_replay, without = differences(two, generated(HFEngine(QWEN, seed=5, return_routed_experts=True)))
    assert with_replay < 1e-6 and without < 1e-6
    noisy = generated(NoisyEngine(QWEN, noise=1e-2, seed=5, return_routed_experts=True))
    with_replay, without = differences(two, noisy)
    assert with_replay < 1e-6 < 1e-3 < without


@pytest.mark.full("steps with replay of the rollout")
def test_rollout_replay_trains(two):
    """R3 through two steps of GRPO: the metrics say that all is replayed, and where the router would differ."""
    args = {"hf_config": QWEN, "seed": 5, "routing_replay": "R3", "num_steps_per_rollout": 2, "lr": 1e-2}
    begin(two, args, with_ref=True)
    data = generated(NoisyEngine(QWEN, noise=1e-2, seed=5, return_routed_experts=True))
    metrics = learn(two, 0, data)
    assert metrics["replay/missing"] == 0.0 and 0.5 < metrics["replay/overlap"] < 1
    assert metrics["mismatch_log_perplexity_gap"] < 1e-6
    begin(two, {**args, "routing_replay": None}, with_ref=True)
    natively = learn(two, 0, data)
    assert natively["mismatch_log_perplexity_gap"] > 1e-4 and "replay/overlap" not in natively
    # The reference is meant as it is: it chooses its experts itself.
    of_ref = two.worker_group.compute_ref_log_prob(data)
    assert torch.equal(of_ref, two.worker_group.compute_ref_log_prob(data.exclude("routed_experts")))


def test_trainers_own_replay(two):
    """R2: the second step, whose router was changed by the first one, computes with the experts of the old pass."""
    args = {"hf_config": QWEN, "seed": 5, "routing_replay": "R2", "num_steps_per_rollout": 2, "lr": 0.1}
    begin(two, args)
    data = generated(HFEngine(QWEN, seed=5))
    metrics = learn(two, 0, data)
    assert metrics["replay/overlap"] < 1
    begin(two, {**args, "lr": 0.0})
    assert learn(two, 0, data)["replay/overlap"] == 1.0


def test_wrong_experts_are_refused_before_the_step(two):
    begin(two, {"hf_config": QWEN, "seed": 5, "routing_replay": "R3"})
    data = generated(HFEngine(QWEN, seed=5, return_routed_experts=True), rows=8)
    begins = data["routed_experts"].offsets()
    data["routed_experts"].values()[begins[5] + 2, 2] = torch.tensor([4, 4])
    with pytest.raises(RolloutDataError, match=r"of row 5 has the experts \[4, 4\] at its token 2 in layer 2"):
        ray.get(two.async_train(0, data))
    with pytest.raises(RolloutDataError, match="needs 'routed_experts'"):
        ray.get(two.async_train(0, data.exclude("routed_experts")))


@pytest.mark.parametrize("asked", [{"routing_replay": "R3"}, {"use_routing_replay": True}])
def test_models_without_experts_are_refused_before_anything_is_sent(two, asked):
    with pytest.raises(TrainArgsError, match="needs a mixture of experts, and the model is a 'llama'"):
        two.async_init({"train_backend": "fsdp", "hf_config": {**SIZES, "model_type": "llama"}, **asked})


def test_engines_that_record_no_experts_are_refused_when_they_are_connected(two):
    """Not at the first step, after a whole rollout."""
    begin(two, {"hf_config": QWEN, "routing_replay": "R3"})
    with LocalWorkerGroup(2, RayClassWithInitArgs(RolloutWorker, HFEngine, QWEN)) as group:
        with pytest.raises(TrainArgsError, match=r"R3.* needs the experts of the rollout, .* does not record"):
            two.set_rollout_manager(RolloutManager(group))
    recording = RayClassWithInitArgs(RolloutWorker, HFEngine, QWEN, return_routed_experts=True)
    with LocalWorkerGroup(2, recording) as group:
        RolloutLink(RolloutManager(group), lambda: 0, 9.0).check_experts()


@pytest.mark.full("models without replay")
def test_models_without_such_routers_are_refused_at_the_start(two):
    with pytest.raises(RoutingError, match="PhimoeTopKRouter"):
        begin(two, {"hf_config": {**SIZES, "model_type": "phimoe", "num_local_experts": 4}, "routing_replay": "R2"})
