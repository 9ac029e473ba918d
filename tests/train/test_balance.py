"""Equal numbers of rows, and about equal costs; what rows share is computed once."""

import heapq
import itertools
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import small_llama
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from dispatch.batch import share_rows
from workers.data import balance
from workers.data.balance import TOKENS, Balance, SequenceCost, balanced_order, balanced_rows, sequence_cost
from workers.data.packing import common_prefixes
from workers.train.args import TrainArgsError, read_args

LONG = SequenceCost(1000.0, 1.0)
"""In a row of 1,000 tokens, half of the cost is attention."""


def parts_of(order, parts):
    return [order[slice(*share.ranges[0])] for share in share_rows(len(order), parts, "ragged")]


def fullest(lengths, order, parts, cost=TOKENS):
    return max(sum(cost(lengths[row]) for row in part) for part in parts_of(order, parts))


def tree_cost(rows, cost):
    """Each distinct prefix is computed once; its last token costs what it makes the sequence more expensive by."""
    prefixes = {tuple(row[: at + 1]) for row in rows for at in range(len(row))}
    return sum(cost(len(prefix)) - cost(len(prefix) - 1) for prefix in prefixes)


def fullest_tree(rows, order, parts, cost):
    return max(tree_cost([rows[row] for row in part], cost) for part in parts_of(order, parts))


def rows_of_groups(groups, system=()):
    """Rows of distinct completions: (length of the prompt, lengths of the completions) of each group."""
    new = itertools.count(1000)
    rows = []
    for prompt, completions in groups:
        before = [*system, *(next(new) for _ in range(prompt))]
        rows += [[*before, *(next(new) for _ in range(length))] for length in completions]
    return rows


def balanced(rows, parts, cost, **options):
    return balanced_order(
        list(map(len, rows)), parts, cost, prefixes=common_prefixes([torch.tensor(row) for row in rows]), **options
    )


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 9), st.sampled_from([TOKENS, SequenceCost(5, 1)]))
def test_order_is_a_permutation_and_never_worse(lengths, parts, cost):
    order = balanced_order(lengths, parts, cost)
    assert sorted(order) == list(range(len(lengths)))
    assert fullest(lengths, order, parts, cost) <= fullest(lengths, range(len(lengths)), parts, cost)
    assert balanced_order(lengths, parts, cost) == order
    for part in parts_of(order, parts):
        assert part == sorted(part)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=8), st.integers(2, 3))
def test_order_is_close_to_the_optimum(lengths, parts):
    """Against all orders: at most 1.5 times the optimum; the worst of 30000 such cases was 1.25."""
    best = min(fullest(lengths, order, parts) for order in _splits(len(lengths), parts))
    assert fullest(lengths, balanced_order(lengths, parts), parts) <= best * 1.5


def _splits(rows, parts):
    """One order per way to divide the rows."""
    sizes = [share.rows for share in share_rows(rows, parts, "ragged")]

    def choose(rest, sizes):
        if not sizes:
            yield []
            return
        for chosen in itertools.combinations(rest, sizes[0]):
            for others in choose([row for row in rest if row not in chosen], sizes[1:]):
                yield [*chosen, *others]

    return choose(list(range(rows)), sizes)


def test_long_completions_are_balanced_within_one_percent():
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(6, 1))) for _ in range(512)]
    lengths.sort()  # the worst possible order
    mean = sum(lengths) / 8
    begun = time.process_time()
    order = balanced_order(lengths, 8)
    assert time.process_time() - begun < 2
    assert fullest(lengths, range(512), 8) > 2 * mean
    assert fullest(lengths, order, 8) < 1.01 * mean


def test_no_rows_and_fewer_rows_than_ranks():
    assert balanced_order([], 3) == []
    assert balanced_order([5, 9], 4) == [0, 1]


def karmarkar_karp(costs, parts):
    """The largest differencing method with equal numbers of rows (Karmarkar and Karp 1982; Michiels et al. 2003), for
    a number of rows that ``parts`` divides. Returns the largest sum."""
    ordered, heap, count = sorted(costs), [], itertools.count()
    for at in range(0, len(ordered), parts):
        of = sorted(ordered[at : at + parts])
        heapq.heappush(heap, (of[0] - of[-1], next(count), of))
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        of = sorted(a + b for a, b in zip(one, reversed(other), strict=True))
        heapq.heappush(heap, (of[0] - of[-1], next(count), of))
    return heap[0][2][-1]


@pytest.mark.parametrize(("rows", "parts"), [(8, 2), (16, 4), (64, 4), (64, 8), (256, 8), (512, 64)])
def test_spread_is_at_most_that_of_karmarkar_karp(rows, parts):
    """On log-normal lengths, in the mean over batches; a single small batch may be up to 3 % better balanced by it."""
    rng = random.Random(rows)
    ours, theirs = [], []
    for _ in range(20):
        lengths = [max(8, min(32768, int(rng.lognormvariate(7, 1)))) for _ in range(rows)]
        costs = [LONG(length) for length in lengths]
        mean = sum(costs) / parts
        ours.append(fullest(lengths, balanced_order(lengths, parts, LONG), parts, LONG) / mean)
        theirs.append(karmarkar_karp(costs, parts) / mean)
    print(f"{rows} rows over {parts}: {sum(ours) / 20:.4f}, Karmarkar-Karp {sum(theirs) / 20:.4f}")
    assert sum(ours) <= sum(theirs) + 1e-3 * 20
    assert all(one <= 1.03 * other for one, other in zip(ours, theirs, strict=True))


def test_equal_tokens_are_not_equal_costs():
    """Two rows of 100 tokens cost less than one of 190 and one of 10. By tokens, the given order is balanced."""
    lengths = [190, 10, 100, 100, 150, 50, 100, 100]
    cost = SequenceCost(0.0, 1.0)
    assert fullest(lengths, range(8), 2) == sum(lengths) / 2
    assert balanced_order(lengths, 2) == list(range(8))
    assert fullest(lengths, range(8), 2, cost) == 56200
    best = min(fullest(lengths, order, 2, cost) for order in _splits(8, 2))
    assert fullest(lengths, balanced_order(lengths, 2, cost), 2, cost) == best == 52500


# --- Rows with common prefixes -------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [0, 30])
@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        ([(40, [60] * 4), (40, [160] * 4), (40, [110] * 4), (40, [10] * 4)], 2),
        ([(60, [length] * 2) for length in (40, 140, 90, 10, 240, 190, 120, 60)], 4),
        ([(400, [20, 90, 50, 70, 30, 60, 80, 40])] * 4, 4),
    ],
)
def test_groups_are_kept_together(groups, parts, system):
    rows = rows_of_groups(groups, range(system))
    whose = [number for number, (_, completions) in enumerate(groups) for _ in completions]
    mixed = random.Random(3).sample(range(len(rows)), len(rows))
    order = balanced([rows[row] for row in mixed], parts, TOKENS)
    found = [{whose[mixed[row]] for row in part} for part in parts_of(order, parts)]
    assert sum(map(len, found)) == len(groups)  # none is in two parts
    of_groups = [system + prompt + sum(completions) for prompt, completions in groups]
    best = min(fullest(of_groups, order, parts) for order in _splits(len(groups), parts))
    assert fullest_tree([rows[row] for row in mixed], order, parts, TOKENS) <= 1.05 * best


def test_groups_are_divided_where_that_costs_less():
    """Short prompts of long completions: keeping the groups together would leave one rank twice the work."""
    rows = rows_of_groups([(10, [400] * 4), (10, [100] * 4)])
    order = balanced(rows, 2, TOKENS)
    assert fullest_tree(rows, order, 2, TOKENS) == 10 + 2 * 400 + 10 + 2 * 100
    assert fullest_tree(rows, range(8), 2, TOKENS) == 10 + 4 * 400


def test_a_group_larger_than_a_rank_is_divided_in_few_parts():
    rows = rows_of_groups([(500, [50] * 12), (100, [50] * 4)])
    order = balanced(rows, 4, TOKENS)
    costs = [tree_cost([rows[row] for row in part], TOKENS) for part in parts_of(order, 4)]
    assert sorted(costs) == [100 + 4 * 50, *[500 + 4 * 50] * 3]


@given(
    st.lists(st.tuples(st.integers(8, 20), st.lists(st.integers(1, 15), min_size=1, max_size=4)), max_size=6),
    st.integers(1, 5),
    st.sampled_from([0, 8]),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_trees_are_never_worse(groups, parts, system, steps, rng):
    """Than the given order, nor than rows that are balanced one by one: by what each step computes."""
    rows = rows_of_groups(groups, range(system))
    rng.shuffle(rows)
    cost = SequenceCost(20.0, 1.0)
    order = balanced(rows, parts, cost, steps=steps)
    assert sorted(order) == list(range(len(rows)))
    by_rows = balanced_order(list(map(len, rows)), parts, cost, steps=steps)
    for mine, others in zip(steps_of(order, parts, steps), steps_of(by_rows, parts, steps), strict=True):
        assert sorted(map(len, mine)) == sorted(map(len, others))
        assert sorted(itertools.chain(*mine)) == sorted(itertools.chain(*others))
        its = max(tree_cost([rows[row] for row in part], cost) for part in mine)
        assert its <= max(tree_cost([rows[row] for row in part], cost) for part in others) * 1.001


def steps_of(order, parts, steps):
    """By step: the rows of each part in it, as `PolicyTrainWorker` divides them."""
    of_parts, before = [], 0
    for part in parts_of(order, parts):
        numbers = range(before, before + len(part))  # dealt out to the steps in turn, on from those of the parts before
        sizes = [sum(number % steps == step for number in numbers) for step in range(steps)]
        ends = list(itertools.accumulate(sizes, initial=0))
        of_parts.append([part[begin:end] for begin, end in itertools.pairwise(ends)])
        before += len(part)
    return list(zip(*of_parts, strict=True))


def test_each_optimizer_step_is_balanced_and_has_the_same_rows_on_any_number_of_ranks():
    rng = random.Random(1)
    lengths = [max(8, min(8192, int(rng.lognormvariate(6.5, 0.9)))) for _ in range(512)]
    for parts in (1, 2, 4):
        order = balanced_order(lengths, parts, LONG, steps=4)
        for number, step in enumerate(steps_of(order, parts, 4)):
            assert sorted(itertools.chain(*step)) == list(range(128 * number, 128 * (number + 1)))
            costs = [sum(LONG(lengths[row]) for row in part) for part in step]
            assert max(costs) < 1.005 * sum(costs) / parts
    together = [sum(LONG(lengths[row]) for row in part) for part in steps_of(balanced_order(lengths, 4, LONG), 4, 4)[0]]
    assert max(together) > 1.02 * sum(together) / 4  # balanced over the whole rollout only


def test_rows_of_a_rollout_are_balanced_with_what_they_share():
    rows = rows_of_groups([(60, [5, 5]), (60, [25, 25]), (60, [5, 5]), (60, [25, 25])])
    mixed = [rows[at] for at in (0, 2, 4, 6, 1, 3, 5, 7)]
    ids, mask = torch.zeros(8, 100, dtype=torch.long), torch.zeros(8, 100, dtype=torch.long)
    for at, row in enumerate(mixed):
        ids[at, at : at + len(row)], mask[at, at : at + len(row)] = torch.tensor(row), 1
    data = {"input_ids": ids, "attention_mask": mask, "number": torch.arange(8)}
    apart = balanced_rows(data, Balance(2))["number"].tolist()
    together = balanced_rows(data, Balance(2, trees=True))["number"].tolist()
    assert fullest_tree(mixed, apart, 2, TOKENS) > fullest_tree(mixed, together, 2, TOKENS) == 2 * 60 + 2 * 5 + 2 * 25
    data["attention_mask"][3] = 0  # the ranks say what is wrong with it
    balanced_rows(data, Balance(2, trees=True))


@pytest.mark.alone
@pytest.mark.parametrize("samples", [1, 8])
def test_4096_rows_take_less_than_50_milliseconds(samples):
    rng = random.Random(2)
    lengths, shared = [], []
    for _ in range(4096 // samples):
        prompt = int(rng.lognormvariate(6, 0.6))
        lengths += [prompt + min(8192, int(rng.lognormvariate(6.5, 0.9))) for _ in range(samples)]
        shared += [0, *[prompt] * (samples - 1)]
    took = []
    for _ in range(5):
        begun = time.process_time()
        balanced_order(lengths, 4, LONG, prefixes=(range(4096), shared))
        took.append(time.process_time() - begun)
    print(f"{samples} samples: {1e3 * min(took):.1f} ms")
    assert min(took) < 0.05


@pytest.mark.alone
def test_exchanges_do_not_look_at_all_shards_each_time():
    """With thousands of data-parallel ranks, that would take seconds of each step."""
    parts = [[(cost, range(1)), (cost, range(1))] for cost in (10.0, 0.0) for _ in range(2000)]
    begun = time.process_time()
    exchanged = balance._exchange(parts)
    took = time.process_time() - begun
    assert {sum(of for of, _ in part) for part in exchanged} == {10.0}, "each expensive shard with a cheap one"
    assert took < 0.5


# --- The cost of a sequence ----------------------------------------------------------------------------------

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS = {
    "llama": small_llama,
    "qwen3": lambda: of(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32)),
    "tied": lambda: small_llama(tie_word_embeddings=True, num_key_value_heads=4),
    "mixtral": lambda: of(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2)),
    "qwen3_moe": lambda: of(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_key_value_heads=2, head_dim=8, num_experts=6,
                       num_experts_per_tok=3, decoder_sparse_step=1)
    ),
}  # fmt: skip


def of(config):
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", MODELS)
def test_cost_is_the_flops_that_torch_counts(name):
    """Torch counts the products of all tokens with all others, of which those with later ones are not needed. Of an
    expert, it counts the tokens that it gets; the choice of the experts is 1 % here."""
    model = MODELS[name]()
    model.set_attn_implementation("eager")  # whose products torch counts on a CPU, too
    model.set_experts_implementation("eager")
    counted = {}
    for tokens in (16, 64):
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            model(torch.arange(tokens)[None] % model.config.vocab_size, use_cache=False)
        counted[tokens] = flops.get_total_flops()
    pairs = (counted[64] / 64 - counted[16] / 16) / (64 - 16)
    cost = SequenceCost.of_model(model.config)
    assert cost.quadratic == pytest.approx(pairs / 2, rel=1e-9)
    assert cost.linear == pytest.approx(
        counted[16] / 16 - 16 * pairs, rel=0.02 if "moe" in name or name == "mixtral" else 1e-9
    )


def test_sliding_windows_cost_no_more_than_their_length():
    full = SequenceCost.of_model(Qwen3Config(**SIZES))
    some = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=1)
    assert some.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    cost = SequenceCost.of_model(some)
    assert cost.quadratic == full.quadratic / 3
    # 2 layers x 10 tokens x 4 heads x 128 numbers x a product with a key and one with a value x 2 FLOPs
    assert cost.linear == full.linear + 2 * 10 * 4 * 128 * 2 * 2


def test_rows_that_share_tokens_cost_the_rest():
    cost = SequenceCost(3.0, 2.0)
    assert (cost(10), cost(4), cost(10, 4)) == (230.0, 44.0, 230.0 - 44.0)


def test_coefficients_of_the_configuration_replace_the_model_s():
    config = small_llama().config
    assert sequence_cost(read_args({"sequence_cost": [2, 0]}), config) == SequenceCost(2.0, 0.0)
    assert sequence_cost(read_args({}), config) == SequenceCost.of_model(config)
    assert sequence_cost(read_args({}), None) == TOKENS
    for wrong in ([1], [1, -1], [0, 0], [float("inf"), 1], [1, 2, 3]):
        with pytest.raises(TrainArgsError, match=r"sequence_cost.*two numbers"):
            read_args({"sequence_cost": wrong})
    with pytest.raises(TrainArgsError, match=r"sequence_cost='12': expected list\[float\]"):
        read_args({"sequence_cost": "12"})  # not 1 and 2


@pytest.mark.parametrize(
    ("args", "trees", "steps"),
    [
        ({}, True, 1),
        ({"sequence_packing": False, "num_steps_per_rollout": 3}, False, 3),
        ({"exact": True}, False, 1),
        ({"train_backend": "megatron"}, False, 1),
        ({"num_steps_per_rollout": 4, "shuffle_minibatches": True}, True, 1),  # its steps are random
    ],
)
def test_balance_of_a_configuration(args, trees, steps):
    config = small_llama().config
    assert Balance.of(read_args(args), 4, config) == Balance(4, steps, SequenceCost.of_model(config), trees)
