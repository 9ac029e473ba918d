"""Packed rows: every token stands once behind the same tokens as in its row, and micro-batches stay in the budget."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.data.balance import SequenceCost
from workers.data.micro_batches import cut_by_tokens, restore
from workers.data.packing import MIN_SHARED, common_prefixes, divide, fill, pack_rows

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * MIN_SHARED)


@st.composite
def families(draw):
    """Rows that continue prompts, or each other, or stand alone."""
    rows = draw(st.lists(TOKENS, min_size=1, max_size=3))
    for _ in range(draw(st.integers(0, 7))):
        begin = draw(st.sampled_from(rows))
        rows.append([*begin[: draw(st.integers(0, len(begin)))], *draw(TOKENS)])
    return draw(st.permutations(rows))


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def common(first, second):
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def check(packed, rows):
    """Independent of how rows are packed: what each token of each row sees, and what predicts it."""
    tokens, positions = packed.input_ids[0].tolist(), packed.position_ids[0].tolist()
    seen = {}
    for segment in packed.segments:
        parts = [packed.segments[number] for number in segment.before]
        before = [token for part in parts for token in range(part.begin, part.end)]
        for token in range(segment.begin, segment.end):
            seen[token] = [*before, *range(segment.begin, token + 1)]
    assert sorted(seen) == list(range(len(tokens)))
    for row, places in zip(rows, packed.places.tolist(), strict=True):
        assert places[0] == len(tokens) and set(places[len(row) :]) <= {len(tokens)}
        first = seen[places[1]][0] if len(row) > 1 else None
        path = [first, *places[1 : len(row)]]
        for at, token in enumerate(path[1:], 1):
            assert seen[token] == path[: at + 1]
            assert packed.predictors[token] == path[at - 1]
            assert [tokens[one] for one in seen[token]] == row[: at + 1]
            assert positions[token] == at
    owners = packed.owners.tolist()
    assert owners == sorted(set(owners))
    flat = padded(rows).flatten().tolist()
    assert [flat[owner] for owner in owners] == tokens


@given(families())
def test_each_token_sees_its_row(rows):
    order, shared = common_prefixes([torch.tensor(row) for row in rows])
    assert sorted(order) == list(range(len(rows))) and shared[0] == 0
    sorted_rows = [rows[row] for row in order]
    for at, (first, second) in enumerate(itertools.pairwise(sorted_rows), 1):
        assert shared[at] == (common(first, second) if common(first, second) >= MIN_SHARED else 0)
    packed = pack_rows(padded(sorted_rows), [len(row) for row in sorted_rows], shared)
    check(packed, sorted_rows)
    assert packed.input_ids.numel() == sum(map(len, rows)) - sum(shared)


@given(families(), st.integers(1, 7))
def test_slices_are_the_sequence(rows, ranks):
    """The outputs of all slices, one after the other, are at the places of the rows where those of the whole are."""
    order, shared = common_prefixes([torch.tensor(row) for row in rows])
    rows = [rows[row] for row in order]
    whole = pack_rows(padded(rows), [len(row) for row in rows], shared)
    slices = [whole.slice_of(rank, ranks) for rank in range(ranks)]
    count, each = whole.input_ids.shape[1], slices[0].input_ids.shape[1]
    assert each == -(-count // ranks)
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name)[0] for part in slices])
        assert joined[:count].tolist() == getattr(whole, name)[0].tolist() and not joined[count:].any()
    # An output says which token it is computed from, and for which token of the rows.
    flat = padded(rows).flatten()
    outputs = torch.cat(
        [torch.stack([part.predictors + rank * each, flat[part.owners]], 1) for rank, part in enumerate(slices)]
    )
    expected = whole.of_rows(torch.stack([whole.predictors, whole.input_ids[0]], 1))
    for part in slices:
        assert torch.equal(part.of_rows(outputs), expected)
        assert len(part.predictors) == len(outputs) // ranks and (part.predictors < each).all()
        assert part.segments[: len(whole.segments)] == whole.segments
        assert part.segments[-1].end == ranks * each
        tokens = part.owners[part.owners != 0]
        assert torch.equal(tokens, tokens.unique()), "they ascend, and none is there twice"
    computed = sum(len(row) - common for row, common in zip(rows, shared, strict=True)) - shared.count(0)
    assert sum(int((part.owners != 0).sum()) for part in slices) == computed


@given(families(), st.integers(1, 60), st.integers(0, 12))
def test_micro_batches_stay_within_the_budget(rows, most, at_least):
    mask = padded([[1] * len(row) for row in rows])
    data = {"input_ids": padded(rows), "attention_mask": mask, "number": torch.arange(len(rows))}
    cost = SequenceCost(3.0, 1.0)
    cut = cut_by_tokens(data, most, at_least=at_least, packed=True, cost=cost)
    assert len(cut) >= at_least
    assert [part.cost for part in cut] == sorted((part.cost for part in cut), reverse=True)
    real = [part for part in cut if not part.is_filler]
    assert sorted(row for part in real for row in part.rows.tolist()) == list(range(len(rows)))
    for part in real:
        own = [rows[row] for row in part.rows.tolist()]
        assert part.packed.input_ids.numel() <= most or len(own) == 1
        assert part.others["number"].tolist() == part.rows.tolist()
        check(part.packed, own)
        # A token is as much as the sequence costs more with it.
        positions = part.packed.position_ids[0].tolist()
        assert part.cost == sum(cost(position + 1) - cost(position) for position in positions)
    for part in cut[len(real) :]:
        assert part.packed.input_ids.tolist() == [[0, 0]]
    outputs = [part.packed.of_rows(part.packed.position_ids[0].float()) for part in cut]
    whole = restore(outputs, cut, tuple(mask.shape))
    assert torch.equal(whole, torch.arange(mask.shape[1]) * mask.float())


def test_rows_of_a_group_are_computed_together():
    """Eight samples of each of four prompts, of which two groups fit."""
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 99, (4, 50), generator=g)
    ids = torch.cat([prompts.repeat_interleave(8, 0), 100 + torch.arange(320).view(32, 10)], dim=1)
    mixed = torch.randperm(32, generator=g)
    cut = cut_by_tokens({"input_ids": ids[mixed], "attention_mask": torch.ones_like(ids)}, 260, packed=True)
    assert [part.packed.input_ids.numel() for part in cut] == [2 * (50 + 80)] * 2
    assert all(len({prompt.item() // 8 for prompt in mixed[part.rows]}) == 2 for part in cut)


def test_a_group_that_does_not_fit_is_divided():
    ids = torch.cat([torch.arange(20).expand(8, 20), torch.arange(80).view(8, 10)], dim=1)
    cut = cut_by_tokens({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 50, packed=True)
    assert [part.packed.input_ids.numel() for part in cut] == [50, 50, 40]


def test_groups_with_a_common_system_prompt_are_divided_between_groups():
    """Four groups of three, all behind the same 20 tokens. Cut wherever 190 tokens are full, a group would be in two
    micro-batches, and its prompt of 80 tokens computed twice."""
    ids = torch.cat([torch.arange(20).expand(12, 20), 20 + torch.arange(240).view(4, 60).repeat_interleave(3, 0),
                     300 + torch.arange(120).view(12, 10)], dim=1)  # fmt: skip
    cut = cut_by_tokens({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 205, packed=True)
    assert [part.packed.input_ids.numel() for part in cut] == [20 + 2 * 90] * 2
    assert [sorted({row // 3 for row in part.rows.tolist()}) for part in cut] in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])
    cut = cut_by_tokens({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 110, packed=True)
    assert [part.packed.input_ids.numel() for part in cut] == [20 + 90] * 4


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=25), st.integers(1, 80), st.booleans())
def test_units_are_as_large_as_fits_and_divided_where_least_is_shared(rows, most, by_rows):
    lengths = [length for length, _ in rows]
    shared = [0, *(min(common, lengths[at], lengths[at + 1]) for at, (_, common) in enumerate(rows[1:]))][: len(rows)]
    sizes, saved = ([1] * len(rows), [0] * len(rows)) if by_rows else (lengths, shared)

    def size(unit):
        return sum(sizes[at] for at in unit) - sum(saved[at] for at in unit[1:])

    units = divide(shared, sizes, saved, most)
    assert [at for unit in units for at in unit] == list(range(len(rows)))
    for unit in units:
        assert size(unit) <= most or len(unit) == 1
        assert all(shared[at] for at in unit[1:])
    begins = {unit[0] for unit in units}
    trees = [at for at, common in enumerate(shared) if not common]
    for begin, end in itertools.pairwise([*trees, len(rows)]):
        tree = range(begin, end)
        inside = begins & set(tree[1:])
        assert bool(inside) == (size(tree) > most and len(tree) > 1)
        if inside:  # the first cut
            assert min(shared[at] for at in inside) == min(shared[at] for at in tree[1:])


def test_what_may_differ_is_not_shared():
    """Candidates of a teacher, and tokens that were drawn from sets."""
    ids = torch.arange(40).expand(2, 40).contiguous()
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    (part,) = cut_by_tokens(data, 100, packed=True)
    assert part.packed.input_ids.numel() == 40
    candidates = torch.zeros(2, 40, 3, dtype=torch.int64)
    candidates[1, 30:, 2] = 1
    (part,) = cut_by_tokens({**data, "candidate_ids": candidates}, 100, packed=True)
    assert part.packed.input_ids.numel() == 50
    lengths = torch.zeros(2, 40, dtype=torch.int64)
    lengths[:, 25:] = 2
    sets = torch.nested.nested_tensor([torch.arange(30), torch.arange(30)], layout=torch.jagged)
    (part,) = cut_by_tokens({**data, "sampling_mask": sets, "sampling_mask_lengths": lengths}, 100, packed=True)
    assert part.packed.input_ids.numel() == 55
    ids, counts = part.sampling_mask
    assert len(ids) == counts.flatten()[part.packed.owners].sum() == 60


def test_computed_tokens_are_the_real_ones():
    """Log-normal lengths on four ranks that need the same number of micro-batches, fillers included."""
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(256, generator=g) * 0.9 + 6).exp().long().clamp(8, 4096)
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    ratios = {}
    for packed in (False, True):
        ids = torch.randint(0, 10**6, real.shape, generator=g)
        ranks = [{"input_ids": ids[rank::4], "attention_mask": real[rank::4]} for rank in range(4)]
        most = max(len(cut_by_tokens(rank, 8192, packed=packed)) for rank in ranks)
        parts = [part for rank in ranks for part in cut_by_tokens(rank, 8192, at_least=most, packed=packed)]
        assert sum(part.real for part in parts) == int(real.sum())
        ratios[packed] = sum(part.computed for part in parts) / int(real.sum())
    print(f"computed tokens per real token: padded {ratios[False]:.3f}, packed {ratios[True]:.4f}")
    assert ratios[True] <= 1.001 and ratios[False] > 1.03


def test_few_tokens_are_wasted():
    """Log-normal lengths, as completions have: the model computes little more than the tokens that there are."""
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(256, generator=g) * 0.8 + 5.5).exp().long().clamp(8, 2000).tolist()
    micro_batches = fill(range(256), lengths, [0] * 256, 8192)
    assert sorted(row for unit in micro_batches for row in unit) == list(range(256))
    assert len(micro_batches) == -(-sum(lengths) // 8192)
