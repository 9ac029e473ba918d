"""Rollouts of several rows: they count once in groups and metrics, in one optimizer step, and in the mean of a loss.

The references are loops over rollouts, each with its list of rows.
"""

import itertools
import math
import random
import statistics
from collections import Counter

import pytest
import torch
from rank_threads import on_ranks
from test_estimators import of_ranks, plain

from dispatch.batch import share_rows
from workers.algorithms.losses import token_weights
from workers.algorithms.registry import NEEDS_GROUPS
from workers.data.balance import Balance, SequenceCost, balanced_rows
from workers.data.collate import collate, trained_versions, with_fingerprints, with_versions
from workers.data.rollout_data import RolloutDataError, check_rollout_data, of_rollouts, rollout_numbers, step_numbers
from workers.rollout.engines.rollout_engine import Completion, Row, SamplingMask
from workers.train.args import read_args
from workers.train.args_checks import function_of
from workers.train.policy_worker import PolicyTrainWorker, check_entries
from workers.train.train_model import StepReport

TOKENS = 9
SHAPES = [[3], [5, 4], [5], [1, 1, 3], [4], [2], [6, 2], [3, 0], [4], [2, 2, 2, 2], [3]]
"""Of each rollout: how many tokens count in each of its rows."""
GROUPS = [5, 2**40, 9, 5, 9, 2**40, 9, 5, 5, 2**40, 7]
ROWS = sum(map(len, SHAPES))
PER_TOKEN = ("old_log_probs", "ref_log_probs", "sum_pi_squared")


def made(seed=0):
    """Rows in a random order, so that the rows of a rollout are on different ranks. What does not count is NaN."""
    rng = random.Random(seed)
    rows = []
    of_rollout = []
    for number, lengths in enumerate(SHAPES):
        shared = {
            "rollout_ids": 70 + 3 * number,
            "group_ids": GROUPS[number],
            "rewards": rng.randrange(5) / 4,
            "rewards/right": float(rng.randrange(2)),
            "rewards/short": 10 * rng.random(),
            "reward_baselines": rng.random(),
            "left_out": False,
            "truncated": rng.random() < 0.3,
        }
        mine = []
        for length in lengths:
            before = rng.randint(1, TOKENS - length)
            places = sorted(rng.sample(range(before, TOKENS), length))  # the output of tools is between them
            row = dict(shared, places=places)
            for name in PER_TOKEN:
                row[name] = [-(rng.random() * 2 + 0.05) for _ in places]
            row["sum_pi_squared"] = [math.exp(2 * old) + 0.1 * rng.random() for old in row["old_log_probs"]]
            mine.append(row)
            rows.append(row)
        of_rollout.append(mine)
    order = rng.sample(range(len(rows)), len(rows))
    return tensors([rows[at] for at in order]), of_rollout


def tensors(rows, width=TOKENS):
    data = {name: torch.tensor([row[name] for row in rows]) for name in rows[0] if not isinstance(rows[0][name], list)}
    data["loss_mask"] = torch.zeros(len(rows), width, dtype=torch.int64)
    data["attention_mask"] = torch.ones_like(data["loss_mask"])
    data["input_ids"] = torch.ones_like(data["loss_mask"])
    for name in PER_TOKEN:
        data[name] = torch.full((len(rows), width), math.nan)
    for at, row in enumerate(rows):
        data["loss_mask"][at, row["places"]] = 1
        for name in PER_TOKEN:
            data[name][at, row["places"]] = torch.tensor(row[name])
    return data


def joined(of_rollout):
    """The same rollouts with one row each: all tokens that count, one row after the other."""
    wide = max(sum(map(len, (row["places"] for row in rows))) for rows in of_rollout) + 1
    one = []
    for rows in of_rollout:
        made = {name: value for name, value in rows[0].items() if name != "rollout_ids"}
        for name in PER_TOKEN:
            made[name] = [value for row in rows for value in row[name]]
        made["places"] = list(range(1, 1 + len(made["old_log_probs"])))
        one.append(made)
    return tensors(one, wide)


SPLITS = [[ROWS], [4, ROWS - 4], [1, 0, 7, ROWS - 8]]


COMPARE = sorted(NEEDS_GROUPS - {"dpo", "optimal_token_baseline"})


@pytest.mark.parametrize(
    ("estimator", "kl_coef"),
    # Without a penalty, the returns of all tokens of a rollout are its reward, whatever the rows.
    [(estimator, kl_coef) for estimator in COMPARE for kl_coef in (0.0, 0.2)] + [("reinforce_plus_plus", 0.0)],
)
def test_groups_count_a_rollout_once(estimator, kl_coef):
    """The advantages are those of the same rollouts with one row each, on any ranks."""
    given = {"advantage_estimator": estimator, "kl_coef": kl_coef}
    args = read_args(given)
    every = []
    for seed in range(2):
        _, of_rollout = made(seed)
        expected = plain(joined(of_rollout), given)
        for split in SPLITS:
            data, _ = made(seed)
            found = torch.cat(of_ranks(function_of(args, "advantage_estimator"), data, args, split))
            for row, rollout in enumerate(((data["rollout_ids"] - 70) // 3).tolist()):
                counts = data["loss_mask"][row] != 0
                values = found[row].expand(int(counts.sum())) if found.dim() == 1 else found[row][counts]
                for value in values.tolist():
                    assert value == pytest.approx(expected[rollout][0], abs=2e-5), (split, row, rollout)
        every += [value for of in expected for value in of]
    assert any(abs(value) > 0.01 for value in every)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_optimal_token_baseline_counts_a_rollout_once(split):
    """Each row is a sequence; in the baseline of its t-th token, the rows of a rollout have together the weight of
    one."""
    args = read_args({"advantage_estimator": "optimal_token_baseline"})
    data, _ = made()
    found = torch.cat(of_ranks(function_of(args, "advantage_estimator"), data, args, split))
    old, squares = ([row[~row.isnan()].tolist() for row in data[name]] for name in ("old_log_probs", "sum_pi_squared"))
    rollout, group, reward = (data[name].tolist() for name in ("rollout_ids", "group_ids", "rewards"))
    several = Counter(rollout)
    for row in range(ROWS):
        for t, place in enumerate(data["loss_mask"][row].nonzero()[:, 0].tolist()):
            above, below, alive = 0.0, 1e-8, set()
            for other in range(ROWS):
                if group[other] == group[row] and len(old[other]) > t:
                    energy = sum(1 - 2 * math.exp(old[other][j]) + squares[other][j] for j in range(t + 1))
                    above += energy * reward[other] / several[rollout[other]]
                    below += energy / several[rollout[other]]
                    alive.add(rollout[other])
            baseline = above / below if len(alive) > 1 else 0.0
            assert float(found[row, place]) == pytest.approx(reward[row] - baseline, abs=2e-5)


def test_a_rollout_of_several_rows_can_be_alone_in_its_group():
    rows = {"group_ids": torch.tensor([1, 1, 2]), "rollout_ids": torch.tensor([8, 8, 9]), "rewards": torch.zeros(3)}
    rows |= {name: torch.ones(3, 4, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")}
    rows["loss_mask"][:, 0] = 0
    args = read_args({"vocab_size": 9})
    with pytest.raises(RolloutDataError, match="each of the 2 completions is alone"):
        PolicyTrainWorker.check_rows(args, rows, "actor", ())


def test_rows_of_a_rollout_agree():
    data, _ = made()
    for name in PER_TOKEN:
        del data[name]
    check_rollout_data(data)
    row = (data["rollout_ids"] == 70 + 3 * 9).nonzero()[-1, 0]
    for name in ("rewards", "rewards/short", "group_ids", "reward_baselines", "truncated"):
        wrong = {**data, name: data[name].clone()}
        wrong[name][row] = ~wrong[name][row] if name == "truncated" else wrong[name][row] + 1
        with pytest.raises(RolloutDataError, match=rf"{name} of row {row} is .* another of this rollout"):
            check_rollout_data(wrong)


def test_dpo_refuses_rollouts_of_several_rows():
    args = read_args({"policy_loss_type": "dpo"})
    data = {name: torch.ones(3, 4, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")}
    data["loss_mask"][:, 0] = 0
    data |= {"group_ids": torch.tensor([1, 1, 1]), "rewards": torch.tensor([1.0, 1.0, 0.0])}
    data |= {"ref_log_probs": torch.zeros(3, 4), "old_log_probs": torch.zeros(3, 4)}
    data["rollout_ids"] = torch.tensor([1, 1, 2])
    with pytest.raises(RolloutDataError, match=r"'rollout_ids'.*whole completions"):
        PolicyTrainWorker.check_rows(args, data, "actor", ())
    (raised,) = of_ranks(function_of(args, "advantage_estimator"), data, args, [3])
    assert isinstance(raised, RolloutDataError)


# --- rewards of turns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "remax", "gae", "optimal_token_baseline"])
def test_token_rewards_replace_the_reward(estimator):
    """Of estimators that go from token to token; the sum of a token's later rewards is its return."""
    args = read_args({"advantage_estimator": estimator})
    if estimator in ("gae", "reinforce_plus_plus"):
        args.normalize_advantages = False
        args.gae_lambda = 1.0
    data, _ = made()
    data["token_rewards"] = torch.where(data["loss_mask"] != 0, torch.rand(ROWS, TOKENS), math.nan)
    data["values"] = torch.zeros(ROWS, TOKENS)
    data["group_ids"] = torch.arange(ROWS)  # alone at every place: no baseline
    del data["rollout_ids"]
    data["rewards"] = torch.full((ROWS,), 100.0)
    found = torch.cat(of_ranks(function_of(args, "advantage_estimator"), data, args, [4, ROWS - 4]))
    for row in range(ROWS):
        places = data["loss_mask"][row].nonzero()[:, 0].tolist()
        for at, place in enumerate(places):
            later = sum(float(data["token_rewards"][row, other]) for other in places[at:])
            baseline = float(data["reward_baselines"][row]) if estimator == "remax" else 0.0
            assert float(found[row, place]) == pytest.approx(later - baseline, abs=1e-5)


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "gdpo", "maxrl", "opo", "grpo_passk", "reinforce_plus_plus_baseline"]
)
def test_token_rewards_that_an_estimator_does_not_read_are_an_error(estimator):
    names = ["rewards", "rewards/a", "group_ids", "token_rewards"]
    with pytest.raises(RolloutDataError, match=r"'token_rewards', but .* use one of gae, optimal_token_baseline"):
        check_entries(names, read_args({"advantage_estimator": estimator}), "actor")
    check_entries(names[:-1], read_args({"advantage_estimator": estimator}), "actor")


# --- optimizer steps -------------------------------------------------------------------------------------------


class Ranks:
    """dp ranks that are threads, each with a worker whose model records what it is given."""

    def __init__(self, data, split, args):
        begins = [sum(split[:rank]) for rank in range(len(split))]
        self.parts = [
            {name: value[begin : begin + size].clone() for name, value in data.items()}
            for begin, size in zip(begins, split, strict=True)
        ]
        self.workers = [Bare(rank, args) for rank in range(len(split))]

    def run(self, method, *arguments):
        def of_rank(part, rank, gather):
            worker = self.workers[rank]
            worker._over_dp = gather
            return getattr(worker, method)(part, *arguments)

        return on_ranks(of_rank, self.parts)


class Bare(PolicyTrainWorker):
    _dp_rank = None  # instead of the property, which asks torch.distributed

    def __init__(self, rank, args):
        self._dp_rank, self.args, self.role, self.model, self.steps = rank, args, "actor", self, []
        self.optimizer_step, self._rollout_id = 0, 3

    def of_last_stage(self, value):
        return value

    def train_step(self, part, loss, **options):
        self.steps.append(part)
        return StepReport({}, 1.0)


Bare.__abstractmethods__ = frozenset()


def chunks(values, count):
    """Lists that differ in length by one at most, longer ones first."""
    size, rest = divmod(len(values), count)
    starts = [k * size + min(k, rest) for k in range(count + 1)]
    return [values[a:b] for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("split", [*SPLITS, [2] * (ROWS // 2) + [ROWS % 2]], ids=str)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("steps", [1, 3, 20])
def test_steps_have_whole_rollouts_and_means_over_them(split, aggregation, steps):
    """More steps than rollouts too: steps without any are skipped. Every rank takes the same steps."""
    given = {"num_steps_per_rollout": steps, "loss_aggregation": aggregation, "rollout_max_response_len": 12}
    data, _ = made(1)
    ranks = Ranks(data, split, read_args(given))
    ranks.run("_steps", None)
    expected = [part for part in chunks(range(len(SHAPES)), steps) if part]
    for rank in ranks.workers:
        assert len(rank.steps) == len(expected)
    for step, part in enumerate(expected):
        rows = [
            row
            for worker in ranks.workers
            for row in zip(
                *(worker.steps[step][name].tolist() for name in ("rollout_ids", "loss_mask", "loss_weights")),
                strict=True,
            )
        ]
        assert Counter((number - 70) // 3 for number, *_ in rows) == {k: len(SHAPES[k]) for k in part}
        lengths = {k: sum(SHAPES[k]) for k in part}
        for number, mask, weights in rows:
            tokens = lengths[(number - 70) // 3]
            one = {
                "token": 1 / sum(lengths.values()),
                "sequence": 1 / tokens / len(part),
                "constant": 1 / 12 / len(part),
            }[aggregation]
            assert weights == pytest.approx([one * counts for counts in mask], rel=1e-5)
        if aggregation == "constant":  # whose weights do not sum to 1
            of_metrics = [float(worker.steps[step]["metric_weights"].sum()) for worker in ranks.workers]
            assert sum(of_metrics) == pytest.approx(1)


@pytest.mark.parametrize(
    ("split", "steps", "expected"),
    [
        ([2, 2, 2, 2], 4, [2] * 4),
        ([2, 2, 1, 1], 2, [3, 3]),
        ([4] * 16, 8, [8] * 8),
        ([3, 2, 2], 4, [2, 2, 2, 1]),
        ([1, 1], 4, [1, 1]),
        ([5, 5], 1, [10]),
    ],
    ids=str,
)
def test_steps_have_equally_many_rows_of_any_number_of_ranks(split, steps, expected):
    data = {"input_ids": torch.ones(sum(split), 3, dtype=torch.int64)}
    data |= {"loss_mask": torch.ones_like(data["input_ids"]), "number": torch.arange(sum(split))}
    ranks = Ranks(data, split, read_args({"num_steps_per_rollout": steps}))
    ranks.run("_steps", None)
    taken = [[worker.steps[step]["number"].tolist() for worker in ranks.workers] for step in range(len(expected))]
    assert all(len(worker.steps) == len(expected) for worker in ranks.workers)
    assert [sum(map(len, of_step)) for of_step in taken] == expected
    for rank, size in enumerate(split):
        assert [row for of_step in taken for row in of_step[rank]] == list(
            range(sum(split[:rank]), sum(split[:rank]) + size)
        )


def test_steps_do_not_depend_on_the_number_of_ranks_and_shuffle_rollouts():
    given = {"num_steps_per_rollout": 3, "shuffle_minibatches": True, "ppo_epochs": 2}
    data, _ = made(1)
    seen = []
    for split in SPLITS:
        ranks = Ranks(data, split, read_args(given))
        ranks.run("_steps", None)
        seen.append(
            [
                sorted(number for worker in ranks.workers for number in worker.steps[step]["rollout_ids"].tolist())
                for step in range(6)
            ]
        )
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][:3] != seen[0][3:] and len(set(seen[0][0])) == 4 and len(set(seen[0][2])) == 3
    for epoch in (seen[0][:3], seen[0][3:]):
        assert sorted(number for step in epoch for number in step) == sorted(data["rollout_ids"].tolist())


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_metrics_count_a_rollout_once(split):
    data, of_rollout = made(2)
    args = read_args({"overlong_buffer_len": 4, "rollout_max_response_len": 8, "overlong_filtering": True})
    first = [rows[0] for rows in of_rollout]
    for about in Ranks(data, split, args).run("_about"):
        assert about["reward"] == pytest.approx(statistics.fmean(row["rewards"] for row in first))
        assert about["rewards/short"] == pytest.approx(statistics.fmean(row["rewards/short"] for row in first))
        assert about["completion_tokens"] == sum(map(sum, SHAPES))
        assert about["rows_per_rollout"] == pytest.approx(ROWS / len(SHAPES))
    penalties = [min(0.0, (8 - 4 - sum(lengths)) / 4) for lengths in SHAPES]  # of all rows of the rollout together
    ranks = Ranks(data, split, args)
    for found in ranks.run("_penalize_length"):
        assert found["overlong_penalty"] == pytest.approx(statistics.fmean(max(-1.0, one) for one in penalties))
    for part in ranks.parts:
        for number, reward in zip(part["rollout_ids"].tolist(), part["rewards"].tolist(), strict=True):
            rollout = (number - 70) // 3
            assert reward == pytest.approx(first[rollout]["rewards"] + max(-1.0, penalties[rollout]), abs=1e-6)
    for found in ranks.run("_filter_overlong"):
        assert found["overlong_filtered"] == pytest.approx(statistics.fmean(row["truncated"] for row in first))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_adaptive_coefficient_takes_the_mean_over_rollouts(split):
    data, of_rollout = made(2)
    given = {"kl_coef": 0.1, "kl_target": 0.05, "kl_horizon": 100}
    means = [
        statistics.fmean(a - b for row in rows for a, b in zip(row["old_log_probs"], row["ref_log_probs"], strict=True))
        for rows in of_rollout
    ]
    kl = statistics.fmean(means)
    error = max(-0.2, min(0.2, kl / 0.05 - 1))
    ranks = Ranks(data, split, None)
    for worker in ranks.workers:
        worker.args = read_args(given)  # each rank changes its own
        worker.next_rollout_id = 3
    for found in ranks.run("_adapt_kl_coef"):
        assert found["reward_kl"] == pytest.approx(kl, abs=1e-5)
    for worker in ranks.workers:
        assert worker.args.kl_coef == pytest.approx(0.1 * (1 + error * len(SHAPES) / 100), rel=1e-5)
        assert worker.next_rollout_id is None, "if the step fails, a repetition would adapt it twice"


@pytest.mark.parametrize("seed", range(30))
def test_balanced_rows_keep_rollouts_in_their_steps(seed):
    """Each shard has equally many rows of each step, or one more, and steps are those of the rows without balance."""
    rng = random.Random(seed)
    rollouts, steps = rng.randint(1, 20), rng.randint(2, 4)
    ids = [number for number in range(rollouts) for _ in range(rng.choice([1, 1, 2, 5]))]
    rng.shuffle(ids)
    lengths = [rng.randint(1, 40) for _ in ids]
    at = torch.arange(40)
    data = {"rollout_ids": torch.tensor(ids), "row": torch.arange(len(ids))}
    data["attention_mask"] = (at < torch.tensor(lengths)[:, None]).long()
    data["input_ids"] = torch.randint(0, 2, data["attention_mask"].shape, generator=torch.Generator().manual_seed(seed))
    of_step = {number: step for step, part in enumerate(chunks(range(rollouts), steps)) for number in part}
    for parts in (1, 2, 3):
        for trees in (False, True):
            made = balanced_rows(data, Balance(parts, steps, SequenceCost(1, 0.01), trees))
            assert sorted(made["row"].tolist()) == list(range(len(ids)))
            shares = share_rows(len(ids), parts, "ragged")
            for step in range(steps):
                count = []
                for share in shares:
                    own = made["rollout_ids"][slice(*share.ranges[0])].tolist()
                    count.append(sum(of_step[number] == step for number in own))
                assert max(count) - min(count) <= 1
    numbers, first = rollout_numbers(data["rollout_ids"])
    assert step_numbers(numbers, len(first), steps).tolist() == [of_step[number] for number in ids]


# --- collate ---------------------------------------------------------------------------------------------------


def test_collate_rows_of_rollouts():
    masks = SamplingMask.whole(0)
    for kept in ((), [5, 6], [7]):
        masks.append(kept)
    branched = [
        Row([1, 2], Completion([3, 4], [-0.1, -0.2], "stop", [7, None], loss_mask=[1, 1])),
        Row([1, 2, 9], Completion([3, 5, 7], [0.0, -0.4, -0.5], "length", [-1, 8, 8], None, [0, 1, 1], None, masks)),
    ]
    completions = [
        Completion([8], [-1.0], "stop", [6]),
        Completion([5, 7], [0.0, -0.5], "length", info={"of": "the session"}, rows=branched),
    ]
    data = collate(
        [[1], [1, 2]],
        completions,
        group_ids=[4, 5],
        weight_versions=[None, 9],
        rewards=[0.5, 2.0],
        reward_baselines=[1, 3],
    )
    assert data["input_ids"].tolist() == [[0, 0, 1, 8, 0, 0], [0, 1, 2, 3, 4, 0], [1, 2, 9, 3, 5, 7]]
    assert data["loss_mask"].tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert data["weight_versions"].tolist() == [[-1, -1, -1, 6, -1, -1], [-1, -1, -1, 7, 9, -1], [-1] * 4 + [8, 8]]
    torch.testing.assert_close(data["rollout_log_probs"][2], torch.tensor([0, 0, 0, 0, -0.4, -0.5]))
    assert data["group_ids"].tolist() == [4, 5, 5] and data["rewards"].tolist() == [0.5, 2.0, 2.0]
    assert data["reward_baselines"].tolist() == [1, 3, 3] and data["truncated"].tolist() == [False, True, True]
    assert data["sampling_mask"].offsets().tolist() == [0, 0, 0, 3]
    assert data["sampling_mask_lengths"][2].tolist() == [0, 0, 0, 0, 2, 1]
    ids = data["rollout_ids"].tolist()
    assert ids[1] == ids[2] != ids[0] and of_rollouts(data, "rewards").tolist() == [0.5, 2.0]
    check_rollout_data(data)
    again = collate([[1], [1, 2]], completions)
    assert not {*ids} & {*again["rollout_ids"].tolist()}  # so that batches can be joined
    alone = collate([[1], [1, 2]], [completions[0], Completion([], [], "stop", rows=branched[1:])], rewards=[1, 2])
    assert "rollout_ids" not in alone.keys() and alone["prompt_lengths"].tolist() == [1, 3]  # noqa: SIM118


def test_collate_token_rewards():
    first = Completion([3, 4, 5], [-0.1] * 3, "stop", loss_mask=[1, 0, 1], token_rewards=[0.25, 0.0, 1.5])
    data = collate([[1], [1]], [first, Completion([6, 7], [-0.1] * 2, "stop", loss_mask=[1, 0])], rewards=[1.75, 0.5])
    assert data["token_rewards"].tolist() == [[0, 0.25, 0, 1.5], [0, 0.5, 0, 0]]
    check_rollout_data(data)
    assert "token_rewards" not in collate([[1]], [Completion([6], [-0.1], "stop")]).keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"rows": []}, "has no rows"),
        ({"rows": [Row([], Completion([], [], "stop"))]}, "in its row 0 no prompt"),
        ({"rows": [Row([1], Completion([2], [], "stop"))]}, "in its row 0 1 token_ids and 0 log_probs"),
        ({"rows": [Row([1], Completion([], [], "stop", rows=[]))]}, "in its row 0 rows again"),
        ({"token_rewards": [1.0]}, "2 token_ids and 1 token_rewards"),
        ({"weight_versions": [3]}, "2 token_ids and 1 weight_versions"),
    ],
)
def test_bad_rows(wrong, what):
    with pytest.raises(ValueError, match=what):
        collate([[1]], [Completion([2, 3], [-1.0, -1.0], "stop", **wrong)])


def test_versions_and_fingerprints_reach_the_rows():
    """Given tokens have no version, whatever the worker's is; the staleness is that of the oldest token of any row."""
    rows = [
        Row([1], Completion([2, 3], [-1.0] * 2, "stop", [4, None], loss_mask=[1, 1])),
        Row([1], Completion([2, 3, 5], [0.0, 0.0, -1.0], "stop", [-1, -1, 6], loss_mask=[0, 0, 1])),
    ]
    one = Completion([2, 3, 5], [0.0, 0.0, -1.0], "stop", [-1, -1, 6], loss_mask=[0, 0, 1], rows=rows)
    told = with_versions(with_fingerprints(one, {4: 44, 5: 55, 6: 66}, 5), 5)
    assert sorted(trained_versions(told)) == [4, 5, 6] and told.fingerprints == {6: 66}
    assert [row.completion.fingerprints for row in told.rows] == [{4: 44, 5: 55}, {6: 66}]
    data = collate([[1]], [told])
    assert data["weight_versions"].tolist() == [[-1, 4, 5, -1], [-1, -1, -1, 6]]
    assert data["weight_fingerprints"].tolist() == [[-1, 44, 55, -1], [-1, -1, -1, 66]]
    assert data["min_weight_versions"].tolist() == [4, 6]


def test_rows_keep_the_fingerprints_of_the_worker_before():
    """A session that has moved: the worker that ends it does not know the weights of its first turn."""
    row = Completion([2, 3], [-1.0] * 2, "stop", [4, 6], loss_mask=[1, 1])
    for one in (row, Completion([2, 3], [-1.0] * 2, "stop", [4, 6], rows=[Row([1], row)] * 2)):
        data = collate([[1]], [with_fingerprints(one, {6: 66}, 6, {4: 44})])
        assert data["weight_fingerprints"].tolist() == [[-1, 44, 66]] * len(data)


def test_a_fingerprint_that_the_worker_drops_meanwhile_is_unknown():
    class Dropping(dict):
        """Entries are dropped between a membership test and the lookup."""

        def __contains__(self, version):
            return True

    one = Completion([2, 3], [-1.0] * 2, "stop", [4, 6])
    assert with_fingerprints(one, Dropping({6: 66}), 6).fingerprints == {6: 66}


def test_weights_of_rollouts_without_a_token():
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0]])
    weights, count = token_weights(mask, "sequence", totals=torch.tensor([3.0, 3.0, 3.0, 0.0]))
    assert float(count) == pytest.approx(1) and weights.sum(1).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
