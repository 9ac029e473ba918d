"""Log-probs and entropies from logits: values and gradients match plain torch."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from workers.algorithms import token_log_probs as module
from workers.algorithms.token_log_probs import CHUNK, next_candidate_log_probs, next_token_log_probs, token_log_probs


@pytest.fixture(params=[CHUNK, 33, 1], ids=["one chunk", "chunks of two rows", "chunks of a row"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("vocab_size", [None, 13])
@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
def test_matches_log_softmax(temperature, vocab_size, uses):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 16, requires_grad=True)
    tokens = torch.randint(0, 13, (2, 3))
    plain = logits.detach().double().requires_grad_()
    scaled = plain[..., : vocab_size or 16] / (temperature or 1.0)
    expected = scaled.log_softmax(-1)
    expected = expected.gather(-1, tokens[..., None])[..., 0], -(expected.exp() * expected).sum(-1)
    found = token_log_probs(logits, tokens, temperature=temperature, vocab_size=vocab_size, entropy=uses != "log_probs")
    weights = torch.randn(2, 2, 3)
    total = reference = 0.0
    for k, name in enumerate(("log_probs", "entropy")):
        if uses in (name, "both"):
            torch.testing.assert_close(found[k].double(), expected[k], atol=1e-5, rtol=1e-5)
            total = total + (weights[k] * found[k]).sum()
            reference = reference + (weights[k].double() * expected[k]).sum()
    total.backward()
    reference.backward()
    torch.testing.assert_close(logits.grad.double(), plain.grad, atol=1e-5, rtol=1e-4)
    assert (found[1] is None) == (uses == "log_probs")


def on_four_ranks(of_rank):
    """What ``of_rank(rank, process group)`` returns on each of four ranks, which are threads."""
    store = dist.HashStore()

    def run(rank):
        return of_rank(rank, dist.ProcessGroupGloo(store, rank, 4, timedelta(seconds=20)))

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(run, range(4)))


def by_log_softmax(logits, tokens, temperature):
    """Log-probs, entropies and the gradient of their weighted sum, in float64."""
    plain = logits.detach().double().requires_grad_()
    of_all = (plain / temperature).log_softmax(-1)
    log_probs, entropies = of_all.gather(-1, tokens[..., None])[..., 0], -(of_all.exp() * of_all).sum(-1)
    (2 * log_probs + 3 * entropies).sum().backward()
    return log_probs.detach(), entropies.detach(), plain.grad


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("vocab_size", [32, 21, 12], ids=["full", "padded", "ranks without tokens"])
def test_sharded_vocabulary_matches_the_whole(vocab_size):
    """Four ranks hold eight columns each."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(5, 32), torch.randint(0, vocab_size, (5,))
    expected = by_log_softmax(logits[:, :vocab_size], tokens, 0.7)

    def of_rank(number, group):
        own = logits[:, 8 * number : 8 * number + 8].clone().requires_grad_()
        options = {"temperature": 0.7, "entropy": True, "vocab_size": vocab_size, "group": group}
        log_probs, entropies = token_log_probs(own, tokens, **options)
        (2 * log_probs + 3 * entropies).sum().backward()
        return log_probs.detach(), entropies.detach(), own.grad

    found = on_four_ranks(of_rank)
    whole = torch.cat([one[2] for one in found], -1)
    assert not bool(whole[:, vocab_size:].any())
    for number in range(4):
        for one, other in zip(found[number][:2], expected[:2], strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole[:, :vocab_size].double(), expected[2], atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("chunk")
def test_padding_of_the_vocabulary_has_no_gradient():
    logits, tokens = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 4, 2])
    torch.use_deterministic_algorithms(True)  # new memory is then full of NaN
    try:
        log_probs, entropies = token_log_probs(logits, tokens, vocab_size=5, entropy=True)
        (log_probs + entropies).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert logits.grad[:, 5:].tolist() == [[0.0] * 3] * 3
    assert bool((logits.grad[:, :5] != 0).all())


@pytest.mark.usefixtures("chunk")
def test_bfloat16_logits_are_computed_in_float32():
    """Only the gradient is rounded to bfloat16, once."""
    torch.manual_seed(0)
    logits = torch.randn(7, 16).bfloat16().requires_grad_()
    tokens = torch.randint(0, 16, (7,))
    log_probs, entropies = token_log_probs(logits, tokens, temperature=0.7, entropy=True)
    (2 * log_probs + 3 * entropies).sum().backward()
    expected = by_log_softmax(logits, tokens, 0.7)
    assert log_probs.dtype == entropies.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(log_probs.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.double(), expected[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad, expected[2].bfloat16(), atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("tokens", [1, 6])
def test_next_tokens(tokens):
    """Position t is about token t, and the last position's logits have no part in it."""
    torch.manual_seed(0)
    logits, ids = torch.randn(3, tokens, 16), torch.randint(0, 16, (3, tokens))
    strided = torch.stack([logits, logits], 1)[:, 1].requires_grad_()
    log_probs, entropies = next_token_log_probs(strided, ids, entropy=True)
    expected = by_log_softmax(logits[:, :-1], ids[:, 1:], 1.0)
    for found, wanted in zip((log_probs, entropies), expected[:2], strict=True):
        assert found.shape == ids.shape and not bool(found[:, 0].any())
        torch.testing.assert_close(found[:, 1:].double(), wanted, atol=1e-5, rtol=1e-5)
    (2 * log_probs + 3 * entropies).sum().backward()
    torch.testing.assert_close(strided.grad[:, :-1].double(), expected[2], atol=1e-5, rtol=1e-4)
    assert not bool(strided.grad[:, -1].any())
    assert next_token_log_probs(logits, ids)[1] is None


def test_memory_at_a_large_vocabulary():
    """Measured by the system: a few chunks in the forward pass, and also the gradient, in the logits' dtype, in the
    backward pass.

    At 8,192 tokens the logits are 16 times as large, and the chunks are the same.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs the peak resident size, which Linux tells")
    logits = torch.full((512, 152_064), 0.5, dtype=torch.bfloat16).requires_grad_()
    tokens = torch.arange(512)
    chunks = 3 * 4 * CHUNK  # float32, and their temporary copies
    (log_probs, entropies), peak = peak_of(lambda: token_log_probs(logits, tokens, temperature=0.7, entropy=True))
    assert peak < chunks
    _, peak = peak_of((log_probs + entropies).sum().backward)
    assert peak < logits.nbytes + chunks


def peak_of(call):
    """What a call returns, and by how many bytes the resident size grew at most meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the present size
    before = resident("VmRSS")
    value = call()
    return value, resident("VmHWM") - before


def resident(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def test_entropy_without_gradient_uses_no_extra_memory():
    """Only the logits are kept for the backward pass, which exist anyway."""
    logits = torch.randn(4, 1000, requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_log_probs(logits, torch.arange(4), entropy=True)
    assert sum(kept.values()) < 1.1 * logits.nbytes


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_candidates_match_log_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 16, requires_grad=True)
    ids, candidates = torch.randint(0, 16, (2, 4)), torch.randint(0, 16, (2, 4, 3))
    log_probs, _ = next_token_log_probs(logits, ids, temperature=temperature)
    found = next_candidate_log_probs(logits, ids, log_probs, candidates, temperature)
    plain = logits.detach().double().requires_grad_()
    expected = (plain[:, :-1] / (temperature or 1.0)).log_softmax(-1).gather(-1, candidates[:, 1:])
    torch.testing.assert_close(found[:, 1:].double(), expected, atol=1e-5, rtol=1e-5)
    assert found.shape == (2, 4, 3) and not found[:, 0].any()
    weights = torch.randn(2, 4, 3)
    (weights * found).sum().backward()
    (weights[:, 1:].double() * expected).sum().backward()
    torch.testing.assert_close(logits.grad.double(), plain.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_candidates_of_a_sharded_vocabulary_match_the_whole(temperature):
    """Four ranks hold five columns each; the last one only padding."""
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 20)
    ids, candidates, weights = torch.randint(0, 13, (2, 4)), torch.randint(0, 13, (2, 4, 3)), torch.randn(2, 4, 3)
    plain = logits[..., :13].double().requires_grad_()
    expected = (plain[:, :-1] / (temperature or 1.0)).log_softmax(-1).gather(-1, candidates[:, 1:])
    (weights[:, 1:].double() * expected).sum().backward()

    def of_rank(number, group):
        own = logits[..., 5 * number : 5 * number + 5].clone().requires_grad_()
        log_probs, _ = next_token_log_probs(own, ids, temperature=temperature, vocab_size=13, group=group)
        others = next_candidate_log_probs(own, ids, log_probs, candidates, temperature, group)
        (weights * others).sum().backward()
        return others.detach(), own.grad

    found = on_four_ranks(of_rank)
    for number in range(4):
        torch.testing.assert_close(found[number][0][:, 1:].double(), expected, atol=1e-5, rtol=1e-5)
        assert not found[number][0][:, 0].any()
    gradient = torch.cat([one[1] for one in found], -1)
    assert not gradient[..., 13:].any()
    torch.testing.assert_close(gradient[..., :13].double(), plain.grad, atol=1e-5, rtol=1e-4)


# --- sampling masks ------------------------------------------------------------------------------------------


def random_sets(rows, vocabulary, tokens, seed=0):
    """One set of tokens for each row, as lists: some rows have the whole vocabulary, others the token alone."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for row, token in enumerate(tokens.tolist()):
        size = (None, 1, 3, 7, vocabulary)[row % 5]
        order = torch.randperm(vocabulary, generator=generator).tolist()
        sets.append([] if size is None else [token, *(one for one in order if one != token)][:size])
    return sets


def as_mask(sets, shape):
    ids = torch.tensor([token for one in sets for token in one], dtype=torch.int32)
    return ids, torch.tensor([len(one) for one in sets], dtype=torch.int32).view(shape)


def by_sets(logits, tokens, sets, temperature, vocab_size):
    """As `by_log_softmax`, token by token: the softmax over the logits of the set, in float64."""
    plain = logits.detach().double().requires_grad_()
    log_probs, entropies = [], []
    for row, (token, one) in enumerate(zip(tokens.tolist(), sets, strict=True)):
        kept = sorted(one) or list(range(vocab_size))
        of_set = (plain[row, kept] / temperature).log_softmax(-1)
        log_probs.append(of_set[kept.index(token)])
        entropies.append(-(of_set.exp() * of_set).sum())
    (2 * torch.stack(log_probs) + 3 * torch.stack(entropies)).sum().backward()
    return torch.stack(log_probs).detach(), torch.stack(entropies).detach(), plain.grad


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampling_mask_is_a_softmax_over_the_set(temperature):
    torch.manual_seed(0)
    logits, tokens = torch.randn(11, 16, requires_grad=True), torch.randint(0, 13, (11,))
    sets = random_sets(11, 13, tokens)
    expected = by_sets(logits, tokens, sets, temperature, 13)
    options = {"temperature": temperature, "vocab_size": 13, "entropy": True, "sampling_mask": as_mask(sets, (11,))}
    log_probs, entropies = token_log_probs(logits, tokens, **options)
    (2 * log_probs + 3 * entropies).sum().backward()
    for found, wanted in zip((log_probs, entropies, logits.grad), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    assert not bool(log_probs[1]) and not bool(logits.grad[1].any())  # its set is the token alone
    assert torch.equal(log_probs, token_log_probs(logits, tokens, **{**options, "entropy": False})[0])
    every = as_mask([list(range(13))] * 11, (11,))  # bit for bit the same as no mask
    assert torch.equal(
        token_log_probs(logits, tokens, temperature=temperature, vocab_size=13, sampling_mask=every)[0],
        token_log_probs(logits, tokens, temperature=temperature, vocab_size=13)[0],
    )


@pytest.mark.usefixtures("chunk")
def test_a_row_of_a_sampling_mask_does_not_depend_on_the_others():
    torch.manual_seed(1)
    logits, tokens = torch.randn(9, 16), torch.randint(0, 16, (9,))
    sets = random_sets(9, 16, tokens)
    together, _ = token_log_probs(logits, tokens, sampling_mask=as_mask(sets, (9,)))
    for row in range(9):
        alone = as_mask([sets[row]], (1,))
        assert torch.equal(
            together[row], token_log_probs(logits[row : row + 1], tokens[row : row + 1], sampling_mask=alone)[0][0]
        )


def test_set_far_below_the_greatest_logit():
    """A later policy may have moved away from the set: its probability underflows, and log-probabilities do not."""
    logits = torch.tensor([[500.0, 1.0, 2.0, 0.0]], requires_grad=True)
    mask = as_mask([[1, 2]], (1,))
    log_probs, entropies = token_log_probs(logits, torch.tensor([2]), entropy=True, sampling_mask=mask)
    expected = by_sets(logits, torch.tensor([2]), [[1, 2]], 1.0, 4)
    (2 * log_probs + 3 * entropies).sum().backward()
    for found, wanted in zip((log_probs, entropies, logits.grad), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("vocab_size", [32, 21, 12], ids=["full", "padded", "ranks without tokens"])
def test_sampling_mask_with_a_sharded_vocabulary(vocab_size):
    """Of some sets, a rank has no token at all."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(10, 32), torch.randint(0, vocab_size, (10,))
    sets = random_sets(10, vocab_size, tokens)
    expected = by_sets(logits, tokens, sets, 0.7, vocab_size)

    def of_rank(number, group):
        own = logits[:, 8 * number : 8 * number + 8].clone().requires_grad_()
        options = {"temperature": 0.7, "entropy": True, "vocab_size": vocab_size, "group": group}
        log_probs, entropies = token_log_probs(own, tokens, sampling_mask=as_mask(sets, (10,)), **options)
        (2 * log_probs + 3 * entropies).sum().backward()
        return log_probs.detach(), entropies.detach(), own.grad

    found = on_four_ranks(of_rank)
    for number in range(4):
        for one, other in zip(found[number][:2], expected[:2], strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    whole = torch.cat([one[2] for one in found], -1)
    torch.testing.assert_close(whole.double(), expected[2], atol=1e-5, rtol=1e-4)


def test_sampling_mask_of_next_tokens():
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 6, 16, requires_grad=True), torch.randint(0, 16, (2, 6))
    sets = random_sets(12, 16, ids.reshape(-1))
    sets[0] = sets[6] = []  # nothing predicts the first tokens
    log_probs, entropies = next_token_log_probs(logits, ids, entropy=True, sampling_mask=as_mask(sets, (2, 6)))
    for row in range(2):
        wanted = by_sets(logits[row, :-1], ids[row, 1:], sets[6 * row + 1 : 6 * row + 6], 1.0, 16)
        torch.testing.assert_close(log_probs[row, 1:].double(), wanted[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropies[row, 1:].double(), wanted[1], atol=1e-5, rtol=1e-5)


def test_memory_of_a_sampling_mask(monkeypatch):
    """Chunks only, and what other threads of this process need: no (tokens, vocabulary) mask, which would be 78 MB."""
    monkeypatch.setattr(module, "CHUNK", 2**20)
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs the peak resident size, which Linux tells")
    logits = torch.full((512, 152_064), 0.5, dtype=torch.bfloat16).requires_grad_()
    tokens = torch.arange(512)
    ids = (tokens[:, None] + torch.arange(50)).int().reshape(-1)
    mask = ids, torch.full((512,), 50, dtype=torch.int32)
    chunks = 12 * 4 * 2**20
    (log_probs, _), peak = peak_of(lambda: token_log_probs(logits, tokens, entropy=True, sampling_mask=mask))
    assert peak < chunks
    _, peak = peak_of(log_probs.sum().backward)
    assert peak < logits.nbytes + chunks
