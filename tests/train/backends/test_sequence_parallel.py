"""Ranks that share a sequence (Ulysses) train as one process does, each with its share of the tokens and memory."""

from dataclasses import dataclass, field

import pytest
import ray
import torch
from devices import ON_DEVICE
from model_types import config_of
from reference import ReferenceGRPO, small_llama
from tensordict import TensorDict
from test_replace_ranks import kill, learning, wait_for_snapshots
from test_sequence_packing import CANDIDATES, SETS, rows, weighted
from torch.autograd.graph import saved_tensors_hooks
from train_helpers import begin, distance, kept_gradients, learn, rollout, whole_weights
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from single_controller import Broadcast, WorkerError
from workers.data.rollout_data import rows_of
from workers.fsdp.fsdp_model import FSDPOptions, FSDPTrainModel
from workers.fsdp.fsdp_worker import FSDPTrainWorker
from workers.fsdp.sequence_parallel import check_sliceable
from workers.lora import LoraSettings
from workers.train.args import read_args
from workers.train.args_checks import TrainArgsError

pytestmark = pytest.mark.timeout(180)

TEMPERATURE = 0.7

CLOSE = 3e-6 if ON_DEVICE else 1e-6
"""One process computes on the CPU; a device has another kernel for attention."""


@dataclass(frozen=True)
class Case:
    """What four ranks train, and how."""

    size: int
    model_type: str = "llama"
    fields: dict = field(default_factory=dict)
    role: str = "actor"
    without: tuple = ()
    options: dict = field(default_factory=dict)
    limit: int = 40

    @property
    def config(self):
        config = config_of(self.model_type)
        for name, value in {"vocab_size": 64, **self.fields}.items():
            setattr(config, name, value)
        return config

    @property
    def data(self):
        return rows().exclude(*self.without)


PLAIN = (*SETS, *CANDIDATES)
SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
CASES = {
    "4, fewer groups of heads, sampling sets, candidates": Case(4, limit=20),
    "2x2, three groups of heads, hsdp, recomputed": Case(
        2, fields=SIX_HEADS, options={"shard_size": 2, "gradient_checkpointing": True}
    ),
    "2x2, adapter, offloaded": Case(
        2, "qwen2", without=SETS, options={"lora": LoraSettings(2, 4), "cpu_offload": True}
    ),
    "4, critic, padded": Case(4, role="critic", without=PLAIN, options={"sequence_packing": False}),
}
MORE = {
    "4, padded": Case(4, options={"sequence_packing": False}),
    "4, critic": Case(4, role="critic", without=PLAIN, limit=20),
    "2x2, hsdp, recomputed": Case(2, options={"shard_size": 2, "gradient_checkpointing": True}),
    "2x2, three groups of heads": Case(2, fields=SIX_HEADS, without=PLAIN, limit=1000),
    "4, sliding window": Case(4, "mistral", {"sliding_window": 8}, without=SETS),
    "4, experts": Case(4, "qwen3_moe", without=PLAIN),
    "2x2, latent attention": Case(2, "deepseek_v3", without=PLAIN),
    "2x2, padded, three groups of heads": Case(2, fields=SIX_HEADS, options={"sequence_packing": False}),
    "2x2, critic, hsdp, padded": Case(
        2, role="critic", without=PLAIN, options={"shard_size": 2, "sequence_packing": False}
    ),
    "2x2, replicas of one rank": Case(2, options={"shard_size": 1}),
}


def plain(case):
    """Log-probabilities or values (B, T), loss, and gradients in one process, row by row."""
    options = case.options
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if case.role == "critic":
            config = case.config
            config.num_labels, config.classifier_dropout = 1, 0.0
            model = AutoModelForTokenClassification.from_config(config).train()
        else:
            model = AutoModelForCausalLM.from_config(case.config).train()
        if options.get("lora") is not None:
            options["lora"].inject(model)
    data = case.data
    outputs, total = torch.zeros(data["input_ids"].shape), 0.0
    drawn = list(data["sampling_mask"].unbind()) if "sampling_mask" in data.keys() else None  # noqa: SIM118
    for row in range(len(data)):
        at = data["attention_mask"][row].nonzero()[:, 0]
        ids = data["input_ids"][row, at]
        made = model(input_ids=ids[None]).logits[0]
        left = [] if drawn is None else drawn[row].tolist()
        for k, t in enumerate(at.tolist()[1:]):
            weight = data["weights"][row, t] / 50
            if case.role == "critic":
                outputs[row, t] = made[k, 0].detach()
                total = total + weight * made[k, 0]
                continue
            everything = (made[k].float() / TEMPERATURE).log_softmax(-1)
            count = int(data["sampling_mask_lengths"][row, t]) if drawn is not None else 0
            kept, left = left[:count], left[count:]
            some = everything[kept].log_softmax(-1) if kept else everything
            log_prob = some[kept.index(int(ids[k + 1]))] if kept else some[ids[k + 1]]
            entropy = -(some.exp() * some).sum()
            outputs[row, t] = log_prob.detach()
            term = log_prob + 0.3 * entropy
            if "candidate_ids" in data.keys():  # noqa: SIM118
                term = term + 0.1 * everything[data["candidate_ids"][row, t]].sum()
            total = total + weight * term
    total.backward()
    return outputs, float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run(worker, case):
    """On a rank: (outputs of its rows, report, gradients, tokens of each pass)."""
    of = FSDPOptions(
        max_tokens_per_micro_batch=case.limit, clip_grad=0.0, seed=5, sequence_parallel_size=case.size, **case.options
    )
    model = FSDPTrainModel(case.config, case.role, worker.device, of)
    data = case.data
    own = rows_of(data, list(range(worker.rank // case.size, len(data), worker.world_size // case.size)))
    passes = []
    model.module.register_forward_pre_hook(
        lambda module, args, given: passes.append(given["input_ids"].numel()), with_kwargs=True
    )
    outputs = model.values(own) if case.role == "critic" else model.log_probs(own, TEMPERATURE)
    gradients, before = kept_gradients(model), len(passes)
    report = model.train_step(dict(own), weighted, lr=0.0, temperature=TEMPERATURE, entropy=case.role != "critic")
    return outputs, report, gradients, passes[before:]


@pytest.fixture(scope="module")
def four(fsdp_groups):
    begin(fsdp_groups(4), {"hf_config": config_of("llama").to_diff_dict()})
    return fsdp_groups(4).worker_group


def check(four, case):
    """The ranks' results, which must equal those of one process."""
    expected, loss, of_parameters = plain(case)
    ranks = four.execute_with_func_generator(run, Broadcast(case))
    dp = 4 // case.size
    for rank, (outputs, report, gradients, _) in enumerate(ranks):
        assert (outputs - expected[rank // case.size :: dp]).abs().max() < CLOSE * expected.abs().max()
        assert report.sums == ranks[0][1].sums and report.grad_norm == ranks[0][1].grad_norm
        assert report.sums["loss"] == pytest.approx(loss, abs=1e-5)
        assert gradients.keys() == of_parameters.keys()
        for name, gradient in of_parameters.items():
            assert (gradients[name] - gradient).abs().max() < 1e-5 * max(1, gradient.abs().max()), name
    norm = sum(float(gradient.double().square().sum()) for gradient in of_parameters.values()) ** 0.5
    assert ranks[0][1].grad_norm == pytest.approx(norm, rel=1e-5) and norm > 0.1
    passes = [rank[3] for rank in ranks]
    assert all(of == passes[rank - rank % case.size] for rank, of in enumerate(passes)), "equal slices"
    real = int(case.data["attention_mask"].sum())
    assert ranks[0][1].sums["computed_ratio"] == sum(map(sum, passes)) / real
    return passes


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.full("rare ways to share a sequence")) for name in MORE)]
)
def test_ranks_of_a_sequence_train_as_one_process(four, name):
    case = {**CASES, **MORE}[name]
    passes = check(four, case)
    assert len({len(of) for of in passes}) == 1
    padded = case.options.get("sequence_packing") is False
    assert (sum(map(sum, passes)) > int(case.data["attention_mask"].sum())) == padded, "prefixes are computed once"


@pytest.mark.full("rare ways to share a sequence")
def test_bfloat16(four):
    case = Case(4, options={"param_dtype": torch.bfloat16})
    expected, _, of_parameters = plain(case)
    outputs, report, gradients, _ = four.execute_with_func_generator(run, Broadcast(case))[0]
    assert (outputs - expected).abs().max() < 0.3
    norm = sum(float(gradient.double().square().sum()) for gradient in of_parameters.values()) ** 0.5
    assert report.grad_norm == pytest.approx(norm, rel=0.05) and gradients.keys() == of_parameters.keys()


@dataclass(frozen=True)
class Long(Case):
    """One row of 240 tokens among short ones."""

    @property
    def data(self):
        g = torch.Generator().manual_seed(0)
        lengths = torch.tensor([9, 240, 2, 30])
        mask = (torch.arange(240) < lengths[:, None]).long()
        ids = torch.randint(0, 32, (4, 240), generator=g) * mask
        weights = torch.randn(4, 240, generator=g)
        return TensorDict({"input_ids": ids, "attention_mask": mask, "weights": weights}, [4])


def test_row_that_is_too_long_for_a_rank_trains_on_four(four):
    """The limit is 64 tokens for each rank."""
    passes = check(four, Long(4, fields={"max_position_embeddings": 512}, limit=64))
    assert max(passes[0]) <= 64 < 240 / 2


def saved_bytes(worker, config):
    """Bytes that autograd keeps on a rank for each additional token of a sequence, by number of ranks that share it."""
    found = {}
    for size in (1, 2, 4):
        of = FSDPOptions(sequence_parallel_size=size, seed=5)
        model = FSDPTrainModel(config, "actor", worker.device, of)
        kept = []
        for length in (128, 256):
            storages = {}

            def keep(tensor, storages=storages):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage
                return tensor

            ids = torch.arange(length)[None] % config.vocab_size
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                (part,) = model._cut({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
                outputs = model._outputs(part.to(worker.device), 1.0, True)
            kept.append(sum(storage.nbytes() for storage in storages.values()))
            outputs.log_probs.sum().backward()
        found[size] = (kept[1] - kept[0]) / 128  # parameters do not count
    return found


def test_activations_are_shared(four):
    config = config_of("llama")
    config.vocab_size, config.max_position_embeddings = 512, 1024
    config.num_key_value_heads = 4  # fewer are repeated
    for of in four.execute_with_func_generator(saved_bytes, Broadcast(config)):
        print({size: round(count) for size, count in of.items()}, "bytes for each token")
        assert of[1] > 2 * 4 * 512, "the logits are among them"
        for size in (2, 4):
            assert of[size] == pytest.approx(of[1] / size, rel=0.02)


# --- groups -----------------------------------------------------------------------------------------------

TWO = {"sequence_parallel_size": 2, "max_tokens_per_micro_batch": 30, "lr": 3e-3}


def test_group_gives_the_ranks_of_a_sequence_the_same_rows(fsdp_groups, llama_folder, data, tmp_path):
    group = fsdp_groups(4)
    args = {"hf_checkpoint": llama_folder, **TWO, "save": str(tmp_path)}
    begin(group, args)
    assert group.get_parallel_config() == {"dp_size": 2, "sp_size": 2, "shard_size": 4, "replicas": 1}
    workers = group.worker_group
    assert workers.dp_size == workers.sp_size == 2
    assert workers.layout.by_dp.shard_of == (0, 0, 1, 1) and workers.layout.by_dp.collecting == (0, 2)
    seeds = workers.execute_with_func_generator(lambda worker: worker.seed(7) or torch.initial_seed())
    assert seeds[0] == seeds[2] != seeds[1] == seeds[3], "dropout differs from slice to slice"
    plain = ReferenceGRPO(small_llama(), lr=3e-3)
    odd = data[:23]
    for some in (odd, data[:1]):  # of one row, the other dp rank has none
        torch.testing.assert_close(workers.compute_log_prob(some), plain.log_probs(some), atol=1e-6, rtol=0)
    expected = plain.step(data)
    metrics = learn(group, 0, data)
    assert {name: metrics[name] for name in ("loss", "grad_norm")} == pytest.approx(
        {name: expected[name] for name in ("loss", "grad_norm")}, abs=1e-5
    )
    assert metrics["tokens"] == int(data["attention_mask"].sum()) and metrics["computed_ratio"] < 1.1
    assert distance(whole_weights(group), plain.weights()) < 1e-4
    refs = [ray.put(data[:11]), ray.put(data[11:])]
    assert learn(group, 1, refs)["loss"] == pytest.approx(plain.step(data)["loss"], abs=1e-4)
    with pytest.raises(TrainArgsError, match="4 references for 2 dp ranks"):
        group.async_train(2, refs * 2)
    group.save_model(1)
    before = whole_weights(group)
    assert begin(group, {**args, "load": str(tmp_path), "sequence_parallel_size": 4}) == [2] * 4
    assert distance(whole_weights(group), before) == 0.0 and group.worker_group.dp_size == 1
    assert learn(group, 2, data)["loss"] == pytest.approx(plain.step(data)["loss"], abs=1e-3)


def test_killed_rank_is_replaced(fsdp_groups, llama_folder):
    """With the ranks of its sequence, it continues from snapshots in memory, and nothing changes."""
    group = fsdp_groups(4)
    rollouts = [rollout(small_llama(), prompts=3, samples=3, seed=seed) for seed in range(2)]
    args = {"hf_checkpoint": llama_folder, **TWO}
    begin(group, args)
    expected = [learning(group, step, given) for step, given in enumerate(rollouts)]
    begin(group, {**args, "peer_snapshot_interval": 1})
    assert learning(group, 0, rollouts[0]) == expected[0]
    wait_for_snapshots(group)
    kill(group, 3)
    assert group.replace() == [1] * 4
    assert learning(group, 1, rollouts[1]) == expected[1]
    assert group.worker_group.sp_size == 2


# --- what cannot be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"train_backend": "megatron"}, "needs train_backend='fsdp': megatron's own context parallelism needs Transf"),
        ({"exact": True}, "does not go with exact=True"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size=0: expected a number of at least 1"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(args, said):
    with pytest.raises(TrainArgsError, match=said):
        read_args({"hf_config": config_of("llama").to_diff_dict(), "sequence_parallel_size": 2, **args})


@pytest.mark.parametrize(
    ("size", "fields", "said"),
    [
        (3, {}, r"sequence_parallel_size=3 does not divide the group's 4 ranks"),
        (4, SIX_HEADS, r"sequence_parallel_size=4 does not divide the model's 6 attention heads"),
        (
            2,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic' depends on the",
        ),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_on_the_driver(size, fields, said):
    args = read_args({"hf_config": {**config_of("llama").to_diff_dict(), **fields}, "sequence_parallel_size": size})
    with pytest.raises(TrainArgsError, match=said):
        FSDPTrainWorker.check_args(args, 4, with_ref=False)


def test_models_without_attention_are_refused():
    with pytest.raises(ValueError, match="no attention heads"):
        check_sliceable(config_of("mamba"), 2)
    check_sliceable(config_of("mamba"), 1)


def test_models_with_a_state_are_refused_at_the_start(four):
    """Its attention could be shared, but not the state that passes from token to token."""
    with pytest.raises(WorkerError, match=r"ModelFilesError: sequence parallelism is not possible with 'jamba'"):
        four.execute_with_func_generator(run, Broadcast(Case(2, "jamba", without=PLAIN)))
