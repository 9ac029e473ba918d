"""The gradient of every loss, estimator and correction is that of one process, however rows are divided: over dp,
tensor and pipeline parallel ranks and micro-batches, padded or packed, with common prefixes computed once or not."""

import functools
import warnings
from dataclasses import dataclass
from unittest import mock

import depth
import pytest
import torch
from reference import ReferenceGRPO, random_prompts, sample, small_llama
from shard_helpers import assembled
from tensordict import TensorDict
from test_both_backends import DP2, FSDP1, FSDP2, HSDP, NAMES, PP2, SP2_DP2, TP2, TP2_DP2, TP2_PP2, Way, called
from train_helpers import begin, distance, gradients_of_case, learn, lucky, own_shards, saved, set_tokens, whole_weights
from transformers import AutoModelForTokenClassification

from dispatch.batch import share_rows
from single_controller import Broadcast
from workers.algorithms.corrections import PRESETS
from workers.algorithms.registry import _BUILT_IN
from workers.data import packing
from workers.data.balance import Balance, SequenceCost, balanced_rows
from workers.data.micro_batches import cut_by_tokens
from workers.data.rollout_data import rows_of
from workers.train.args import read_args

pytestmark = pytest.mark.timeout(300)

ALL = 10**6
"""A limit that no micro-batch reaches."""


@dataclass(frozen=True)
class Layout:
    """How rows are divided.

    Attributes:
        most: tokens of a micro-batch.
        trees: whether packed rows share common prefixes.
        balanced: whether rows are divided over the ranks by their cost, instead of in turns.
    """

    most: int
    trees: bool = True
    balanced: bool = False


PADDED = (Layout(64), Layout(ALL, balanced=True))
PACKED = (Layout(40, balanced=True), Layout(64, trees=False), Layout(ALL), Layout(25, balanced=True))

SP4 = Way("fsdp", 4, {"sequence_parallel_size": 4})
GROUPS = [
    *((way, False, PADDED) for way in (FSDP2, HSDP, SP2_DP2, TP2, PP2, DP2, TP2_DP2, TP2_PP2)),
    *((way, True, PACKED) for way in (FSDP1, FSDP2, HSDP, SP2_DP2, SP4)),
]
"""The parallel sizes, whether rows are packed, and the layouts. HSDP has four dp ranks."""


CASES = {
    "ppo_clip": {"eps_clip_dual": 1.3, "rollout_correction": "token_tis", "entropy_coef": 0.01},
    "gspo": {"policy_loss_type": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03, "advantage_estimator": "rloo",
             "rollout_correction": "seq_tis", "kl_loss_coef": 0.1, "kl_loss_type": "k2"},
    "cispo": {"policy_loss_type": "cispo", "advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1,
              "rollout_correction": "geo_tis"},
    "sapo": {"policy_loss_type": "sapo", "advantage_estimator": "reinforce_plus_plus_baseline",
             "rollout_correction": "token_mis", "overlong_filtering": True},
    "gpg": {"policy_loss_type": "gpg", "advantage_estimator": "gae", "rollout_correction": "seq_mis",
            "kl_loss_coef": 0.2, "kl_loss_type": "k1+"},
    "geo_mean": {"policy_loss_type": "geo_mean", "advantage_estimator": "opo", "rollout_correction": "geo_mis"},
    "dro": {"policy_loss_type": "dro", "dro_beta": 0.5, "advantage_estimator": "remax", "kl_coef": 0.2,
            "rollout_correction": "icepop"},
    "dppo_tv": {"policy_loss_type": "dppo_tv", "eps_clip": 0.01, "advantage_estimator": "grpo_passk", "passk_k": 2,
                "rollout_correction": "seq_mask_tis", "rollout_rejection_low": 0.9, "rollout_rejection_high": 1.2},
    "dppo_kl": {"policy_loss_type": "dppo_kl", "eps_clip": 1e-3, "advantage_estimator": "maxrl",
                "rollout_correction": "token_rs", "rollout_rejection_low": 0.5, "rollout_rejection_high": 2.5,
                "kl_loss_coef": 0.1, "kl_loss_type": "k3+"},
    "clip_cov": {"policy_loss_type": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": 0.05, "clip_cov_ub": 0.8,
                 "advantage_estimator": "gdpo", "gdpo_weights": {"short": 0.5}, "rollout_correction": "geo_rs",
                 "rollout_rejection_low": 0.9, "rollout_rejection_high": 1.2},
    "kl_cov": {"policy_loss_type": "kl_cov", "kl_cov_ratio": 0.2, "advantage_estimator": "optimal_token_baseline",
               "rollout_correction": "error_rs+token_tis", "rollout_rejection_high": 1.35,
               "rollout_correction_normalize": True},
    "dr_grpo": {"grpo_std_normalization": False, "loss_aggregation": "constant", "loss_constant_length": 12,
                "rollout_correction": "seq_rs", "kl_loss_coef": 0.3, "use_unbiased_kl": True},
    "opsm": {"loss_aggregation": "sequence", "opsm_delta": 0.02, "rollout_correction": "report", "kl_loss_coef": 0.1,
             "kl_loss_type": "k1", "overlong_buffer_len": 4},
    "sft": {"policy_loss_type": "sft"},
    "dpo": {"policy_loss_type": "dpo", "dpo_beta": 0.5},
}  # fmt: skip
CRITIC_CASES = {
    "value": {"advantage_estimator": "gae", "value_clip": 0.1, "gae_lambda_value": 0.8},
    "rejected": {"advantage_estimator": "gae", "rollout_correction": "seq_rs", "loss_aggregation": "sequence"},
}
CASES_OF = {"actor": CASES, "critic": CRITIC_CASES}
"""All names of losses, estimators and corrections are in one of them."""

SAMPLE = ("gspo", "dppo_tv", "clip_cov", "kl_cov", "dpo", "value", "rejected")
"""Those of `make test`: whole sequences, rejected rows, tokens that are chosen for the whole step, and pairs."""

# An Adam step of lr / eps * gradient, to one part in a million: the weights show the gradient on any backend.
EXPOSED = {"lr": 1e6, "adam_eps": 1e6, "adam_beta1": 0.0, "clip_grad": 0.0, "rollout_max_response_len": 8}


def test_every_name_is_in_a_case():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [read_args(case) for case in [*CASES.values(), *CRITIC_CASES.values()]]
    for key, names in _BUILT_IN.items():
        assert {case[key] for case in cases} == set(names), key
    assert {name for case in cases for name in (case.rollout_correction or "").split("+")} == {"", *PRESETS}
    assert sum(len(layouts) for _, _, layouts in GROUPS) >= 24


@functools.cache
def changes_of(role):
    """By case: what it changes in the configuration, complete."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k1
        usual = read_args(EXPOSED)
        made = {name: read_args({**EXPOSED, **case}) for name, case in CASES_OF[role].items()}
    return {name: {key: args[key] for key in args if args[key] != usual[key]} for name, args in made.items()}


def pairs_of(data):
    """Pairs of completions for DPO, whose own log-probabilities the ranks compute. Each has a counted token."""
    ordered = data[(data["loss_mask"] != 0).any(1)][:20].exclude("old_log_probs")
    return ordered.set("group_ids", torch.arange(20) // 2).set("rewards", torch.arange(20.0) % 3)


def own_rows(data, layout, rank, ranks):
    """The rows of a dp rank."""
    if not layout.balanced:
        return data[rank::ranks]
    whole = balanced_rows(data, Balance(ranks, cost=SequenceCost(20.0, 1.0), trees=layout.trees))
    return rows_of(whole, slice(*share_rows(len(data), ranks, "ragged")[rank].ranges[0]))


def run(worker, data, cases, layouts):
    """By layout and case: (metrics, micro-batches, this rank's shards of the gradients, for `assembled`). The weights
    are as before afterwards."""
    ranks = worker.get_parallel_config()["dp_size"]
    found = []
    worker.backup.copy("before")
    before = own_shards(worker)
    for layout in layouts:
        set_tokens(worker, layout.most)
        with mock.patch.object(packing, "MIN_SHARED", packing.MIN_SHARED if layout.trees else ALL):
            of_cases = {}
            for name, changes in cases.items():
                rows = own_rows(pairs_of(data) if name == "dpo" else data, layout, worker._dp_rank, ranks)
                count = len(cut_by_tokens(rows, layout.most, packed=bool(worker.args.sequence_packing)))
                worker.optimizer_step = 0  # which seeds random choices of tokens
                metrics, gradients = gradients_of_case(worker, rows, changes, before)
                of_cases[name] = metrics, count, gradients
        found.append(of_cases)
    return found


@pytest.fixture(scope="module")
def off_policy():
    """Rows of several prompts, some of them long enough to be shared, of other policies than the one in training: a
    row that is the same twice, one without a token that counts, and a group of one."""
    model = small_llama()
    prompts = random_prompts(6, (12, 3, 17, 9), seed=1)
    data = sample(model, prompts, 4, 8, reward=lucky, seed=1, stop_token_ids=(3, 4))
    rows = TensorDict(data, [24])[:21]
    for name in ("input_ids", "attention_mask", "loss_mask"):
        rows[name][6] = rows[name][5]
    g = torch.Generator().manual_seed(2)
    now = ReferenceGRPO(model).log_probs(rows)
    rows["old_log_probs"] = now + 0.2 * torch.randn(now.shape, generator=g)
    rows["rollout_log_probs"] = rows["old_log_probs"] + 0.4 * torch.randn(now.shape, generator=g)
    rows["ref_log_probs"] = now + 0.3 * torch.randn(now.shape, generator=g)
    rows["values"] = torch.randn(now.shape, generator=g)
    rows["loss_mask"][2] = 0
    for name in ("reward_baselines", "rewards/right", "rewards/short"):
        rows[name] = torch.rand(21, generator=g)
    rows["truncated"] = torch.rand(21, generator=g) < 0.3
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values"):
        rows[name] = torch.where(rows["loss_mask"] != 0, rows[name], torch.nan)  # what does not count is not read
    return rows


@pytest.fixture(scope="module")
def folders(llama_folder, tmp_path_factory):
    """By role. The critic's model has a head, which otherwise is random."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        critic = AutoModelForTokenClassification.from_config(small_llama(num_labels=1).config)
    return {"actor": llama_folder, "critic": saved(critic, tmp_path_factory.mktemp("critic"))}


@pytest.fixture(scope="module")
def computed(group_of, off_policy, folders):
    """``computed(way, packed, role, layouts, names)``: by layout and case, (metrics, micro-batches, gradients)."""

    def of(way, packed, role, layouts, names=None):
        group = group_of(way.backend, way.ranks)
        packs = {"sequence_packing": packed} if way.backend == "fsdp" else {}
        args = way.arguments(folders[role], **EXPOSED, **packs)
        if role == "actor":
            begin(group, args)
        else:
            group.worker_group.init(read_args(args), role)
        changes = {name: of for name, of in changes_of(role).items() if names is None or name in names}
        ranks = group.worker_group.execute_with_func_generator(
            run, Broadcast(off_policy), Broadcast(changes), Broadcast(layouts)
        )
        return [
            {
                name: (ranks[0][at][name][0], [rank[at][name][1] for rank in ranks],
                       assembled([rank[at][name][2] for rank in ranks]))
                for name in changes
            }
            for at in range(len(layouts))
        ]  # fmt: skip

    return of


@pytest.fixture(scope="module")
def one_process(computed):
    """Role -> case -> (metrics, micro-batches, gradients): all rows in one padded micro-batch. The cases that are
    compared with it."""
    made, names = {}, None if depth.full else SAMPLE

    def of(role):
        if role not in made:
            made[role] = computed(FSDP1, False, role, [Layout(ALL)], names)[0]
        return made[role]

    return of


def group_id(way, packed):
    name = called(way) if way in NAMES.values() else f"{way.ranks}-sp{way.sizes['sequence_parallel_size']}"
    return f"{name}-{'packed' if packed else 'padded'}"


def sampled(way, packed, layouts, names):
    return pytest.param(way, packed, layouts, names, id=f"{group_id(way, packed)}-sample")


def full(way, packed, layouts):
    id_ = group_id(way, packed)
    return pytest.param(way, packed, layouts, None, id=id_, marks=pytest.mark.full("gradients in every layout"))


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("way", "packed", "layouts", "names"),
    [
        sampled(FSDP2, True, PACKED[:1], SAMPLE),
        *(full(*group) for group in GROUPS),
    ],
)
def test_gradients_are_those_of_one_process(computed, one_process, way, packed, layouts, names, role):
    expected = one_process(role)
    for layout, found in zip(layouts, computed(way, packed, role, layouts, names), strict=True):
        for name, (metrics, counts, gradients) in found.items():
            usual, _, of_parameters = expected[name]
            where = f"{name}, {layout}"
            assert distance(gradients, of_parameters) < 1e-5, where
            assert metrics["loss"] == pytest.approx(usual["loss"], abs=1e-5), where
            for metric in ("completion_tokens", "correction_rejected", "clip_fraction", "opsm_fraction", "reward"):
                assert metrics.get(metric) == pytest.approx(usual.get(metric), abs=1e-6), f"{where}: {metric}"
            assert (max(counts) == 1) == (layout.most == ALL), where
            if packed:
                assert metrics["computed_ratio"] < (1 if layout.trees and layout.balanced else 1.1), where
    print(f"{group_id(way, packed)}, {role}: {len(layouts)} layouts of {len(found)} cases")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_cases_train_something_and_reject_something(one_process, role):
    """So that equal gradients say something."""
    for name, (metrics, _, gradients) in one_process(role).items():
        assert max(value.abs().max() for value in gradients.values()) > 1e-2, name
        if "_rs" in CASES_OF[role][name].get("rollout_correction", "") or name == "dppo_tv":
            assert 0 < metrics["correction_rejected"] < 1, name


@pytest.mark.parametrize(
    "way", [FSDP2, pytest.param(TP2_DP2, marks=pytest.mark.full("gradients in every layout"))], ids=called
)
def test_steps_of_balanced_rows_are_the_same_on_any_number_of_ranks(start, off_policy, way):
    """Two optimizer steps of ten rows each: on every number of ranks, the first takes the first ten."""
    rows, found = off_policy[:20], []
    for one in (FSDP1, way):
        options = {"balance_data": True, "num_steps_per_rollout": 2, "max_tokens_per_micro_batch": 64}
        group = start(one, **EXPOSED, **options)
        before = whole_weights(group)
        metrics = learn(group, 0, rows)
        found.append(whole_weights(group))
        assert metrics["cost_spread"] == 1.0 if one is FSDP1 else 1.0 < metrics["cost_spread"] < 1.2
    assert distance(*found) < 1e-5 and distance(found[0], before) > 1e-2
