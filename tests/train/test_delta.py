"""Patches make a base equal to the new tensor, bit for bit, and are small; digests are XXH3 of the bytes."""

import math
import random
from itertools import accumulate

import pytest
import torch
import xxhash
from depth import examples
from hypothesis import example, given
from hypothesis import strategies as st

from workers.weight_sync.delta import Patch, apply, encode
from workers.weight_sync.digest import combine, digest

pytestmark = pytest.mark.timeout(30)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool,
          torch.float8_e4m3fn]  # fmt: skip
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
densities = st.sampled_from([0, 0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 1])
seeds = st.integers(0, 2**32 - 1)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


def content(tensor):
    """The tensor's bytes in row-major order."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(shape, dtype, generator):
    """Any bits: NaNs with payloads, infinities, denormals, signed zeros. A bool is 0 or 1."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).view(torch.bool)
    flat = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return from_bytes(content(flat), dtype).view(shape)


def change(base, indices):
    """A copy with the lowest bit of these elements flipped."""
    bits = bytearray(content(base))
    for index in indices:
        bits[int(index) * base.dtype.itemsize] ^= 1
    return from_bytes(bits, base.dtype).view(base.shape)


def from_bytes(content, dtype):
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def pair(shape, dtype, density, seed):
    """A base, and a tensor that differs in about this part of its elements; and where."""
    generator = torch.Generator().manual_seed(seed)
    base = random_tensor(shape, dtype, generator)
    changed = torch.rand(math.prod(shape), generator=generator) < density
    return change(base, changed.nonzero()[:, 0].tolist()), base, changed.view(shape)


def sent(patch):
    """The patch as a receiver rebuilds it from bytes."""
    return Patch(patch.kind, *[from_bytes(content(tensor), tensor.dtype) for tensor in patch[1:]])


def nbytes_of(patch):
    return len(content(patch.positions)) + len(content(patch.values))


def roundtrip(new, base):
    before = content(new), content(base)
    patch = encode(new, base)
    assert (content(new), content(base)) == before
    if patch is None:
        return None
    nbytes = nbytes_of(patch)
    assert patch.values.dtype == new.dtype and patch.values.dim() == patch.positions.dim() == 1
    assert nbytes < new.nbytes or (nbytes == 0 and content(new) == content(base))
    into = base.clone()
    apply(sent(patch), into)
    assert content(into) == content(new)
    return patch


@examples(25, 2000)
@given(shapes, dtypes, densities, seeds)
@example((), torch.float32, 0, 0)
@example((), torch.float32, 1, 0)
@example((0, 3), torch.bfloat16, 1, 0)
@example((100, 100), torch.float32, 1, 0)
@example((1 << 18,), torch.float32, 0.03, 0)
@example(((1 << 18) + 1,), torch.bfloat16, 0.3, 0)
@example(((1 << 19) - 1,), torch.uint8, 0.001, 0)
@example(((1 << 19) + 9,), torch.float8_e4m3fn, 0.5, 0)
def test_patch_restores_every_bit(shape, dtype, density, seed):
    new, base, changed = pair(shape, dtype, density, seed)
    patch = roundtrip(new, base)
    if patch is None:  # at most what a bitmap would need
        assert changed.sum() * dtype.itemsize + -(-changed.numel() // 8) >= new.nbytes
    else:
        assert patch.values.numel() == changed.sum()


SPECIAL_GAPS = [0, 1, 253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131070, 131071, (1 << 18) - 1, 1 << 18]


@examples(25, 1000)
@given(st.lists(st.sampled_from(SPECIAL_GAPS), min_size=1, max_size=12), st.integers(0, 300), dtypes)
@example([0, 99_998], 0, torch.float32)
@example([255] * 12, 0, torch.float32)
@example([65535] * 4, 0, torch.float32)
@example([1 << 18, 1 << 18], 255, torch.bool)
@example([0] * 3000, 100_000, torch.bfloat16)
def test_positions_at_the_limits_of_the_formats(gaps, tail, dtype):
    """Numbers of unchanged elements in front of each changed one, and behind the last one."""
    indices = [end - 1 for end in accumulate(gap + 1 for gap in gaps)]
    base = torch.zeros(indices[-1] + 1 + tail, dtype=dtype)
    roundtrip(change(base, indices), base)


def test_every_format_is_used():
    assert {roundtrip(*pair((100_000,), torch.float32, density, 0)[:2]).kind for density in (0, 0.001, 0.03, 0.3)} == {
        "same",
        "gaps16",
        "gaps8",
        "bitmap",
    }


def test_formats_byte_by_byte():
    """As the docstring of `Patch` describes them."""
    base = torch.zeros(1000, dtype=torch.float32)
    new = base.clone()
    new[[3, 4, 260, 516, 999]] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    kind, positions, values = encode(new, base)
    assert (kind, positions.tolist(), values.tolist()) == ("gaps8", [3, 0, 255, 0, 255, 0, 255, 227], [1, 2, 3, 4, 5])

    base = torch.zeros(300_000, dtype=torch.float32)
    new = change(base, [7, 8 + 65_535, 200_000])
    kind, positions, values = encode(new, base)
    assert (kind, positions.dtype, positions.tolist()) == ("gaps16", torch.uint16, [7, 65535, 0, 65535, 65535, 3386])

    base = torch.zeros(18, dtype=torch.float32)
    kind, positions, _ = encode(change(base, [0, 2, 9, 10, 17]), base)
    assert (kind, positions.tolist()) == ("bitmap", [0b101, 0b110, 0b10])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_count_and_not_values(dtype):
    """-0.0 against 0.0 and NaNs that differ in their payload are changes; the same NaN is none."""
    base = torch.zeros(64, dtype=dtype)
    base[5:9] = float("nan")
    assert roundtrip(base.clone(), base).kind == "same"
    new = change(base, [6]) if dtype != torch.float8_e4m3fn else base.clone()  # the lowest bit of the payload
    new[1] = -0.0
    assert roundtrip(new, base).values.numel() == (1 if dtype == torch.float8_e4m3fn else 2)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 14), (torch.bfloat16, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_three_percent_changed_is_many_times_smaller(dtype, least, seed):
    new, base, _ = pair((1000, 1000), dtype, 0.03, seed)
    assert nbytes_of(roundtrip(new, base)) * least <= new.nbytes


def test_dtype_without_integers_of_its_width_is_sent_whole():
    base = torch.zeros(100, dtype=torch.complex128)
    assert encode(base.clone(), base) is None


def transposed(tensor):
    """The same tensor with its elements the other way round in memory."""
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).contiguous().permute(backwards)


def every_second_column(tensor):
    wide = torch.zeros(tensor.shape[0], tensor.shape[1] * 2, dtype=tensor.dtype)
    view = wide[:, ::2]
    view.copy_(tensor)
    return view


@examples(20, 500)
@given(st.sampled_from([transposed, every_second_column]), dtypes, densities, seeds)
def test_tensors_need_not_be_contiguous(layout, dtype, density, seed):
    new, base, _ = pair((30, 41), dtype, density, seed)
    patch, into = encode(layout(new), layout(base)), layout(base)
    assert not into.is_contiguous()
    if patch is not None:
        assert content(encode(new, base).positions) == content(patch.positions)
        apply(patch, into)
        assert content(into) == content(new)


def test_one_element_with_an_odd_stride():
    """PyTorch calls it contiguous, whatever its stride."""
    new, base = torch.arange(8.0).to(torch.float64)[4::8], torch.zeros(8, dtype=torch.float64)[::8]
    assert new.stride() == (8,) and new.is_contiguous()
    assert encode(new, new).kind == "same" and encode(new, base) is None
    assert digest(new) == digest(torch.tensor([4.0], dtype=torch.float64))
    apply(Patch("gaps8", torch.tensor([0], dtype=torch.uint8), new), base)
    assert base.item() == 4


def test_view_is_written_and_nothing_around_it():
    whole = torch.zeros(6, 8)
    new = torch.zeros(6, 3)
    new[::2, 1] = 7
    apply(encode(new, torch.zeros(6, 3)), whole[:, 2:5])
    assert whole[:, 2:5].equal(new) and whole.sum() == 21


@pytest.mark.parametrize("layout", [lambda tensor: tensor, transposed], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("held", [*DTYPES, torch.complex128], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_converted_as_copy_converts_them(dtype, held, layout):
    generator = torch.Generator().manual_seed(0)
    base, new = (torch.randn(20, 30, generator=generator).abs().mul(50).to(dtype) for _ in range(2))
    new = torch.where(torch.rand(20, 30, generator=generator) < 0.1, new, base)
    changed = new != base  # bfloat16 has few values: some are drawn twice
    into = layout(torch.ones(20, 30).to(held))
    expected = torch.where(changed, torch.empty_like(into).copy_(new).to(torch.complex128), into.to(torch.complex128))
    apply(encode(new, base), into)
    assert into.to(torch.complex128).equal(expected)


def test_parameters_are_patched_in_place():
    base = torch.nn.Parameter(torch.zeros(100))
    new = change(base.detach(), [3])
    apply(encode(torch.nn.Parameter(new), base), base)
    assert content(base.detach()) == content(new) and base.grad_fn is None


def test_tensors_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="shapes and dtypes"):
        encode(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="shapes and dtypes"):
        encode(torch.zeros(3), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("density", [0.001, 0.03, 0.3])
def test_damaged_patch_is_refused(density):
    new, base, _ = pair((20_000,), torch.float32, density, 0)
    kind, positions, values = encode(new, base)
    damaged = [
        Patch(kind, positions[:-1], values),
        Patch(kind, positions, values[:-1]),
        Patch(kind, torch.cat([positions, positions[-1:]]), values),
        Patch(kind, positions.to(torch.int64), values),
        Patch("same", positions, values),
        Patch("same", positions[:0], values),
        Patch("whole", positions, values),
    ]
    for patch in damaged:
        with pytest.raises(ValueError, match="does not fit"):
            apply(patch, base.clone())
    for size in (1, 10_000):
        with pytest.raises(ValueError, match="does not fit"):
            apply(Patch(kind, positions, values), torch.zeros(size))


@examples(25, 2000)
@given(st.sampled_from([0.001, 0.03, 0.3]), seeds)
def test_flipped_bit_of_positions_never_writes_outside(density, seed):
    """It is refused, or shows in the digest; memory around the tensor is never written."""
    new, base, _ = pair((3000,), torch.float32, density, 7)
    patch = sent(encode(new, base))
    pick = random.Random(seed)
    flat = patch.positions.view(torch.uint8)
    flat[pick.randrange(flat.numel())] ^= 1 << pick.randrange(8)
    around = torch.cat([torch.zeros(1000), base, torch.zeros(1000)])
    into = around[1000:-1000]
    try:
        apply(patch, into)
    except ValueError:
        pass
    else:
        assert digest(into) != digest(new)
    assert not around[:1000].any() and not around[-1000:].any()


@examples(25, 1000)
@given(shapes, dtypes, seeds)
@example((), torch.float32, 0)
@example((0, 3), torch.float32, 0)
def test_digest_is_xxh3_of_the_bytes(shape, dtype, seed):
    tensor = random_tensor(shape, dtype, torch.Generator().manual_seed(seed))
    expected = xxhash.xxh3_64(content(tensor)).intdigest()
    assert digest(tensor) == expected
    assert (
        digest(tensor.t() if tensor.dim() < 2 else transposed(tensor.flatten(1)).view_as(tensor.flatten(1))) == expected
    )


@examples(25, 1000)
@given(st.integers(1, 5000), st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]), seeds)
def test_any_flipped_bit_changes_the_digest(numel, dtype, seed):
    tensor = random_tensor((numel,), dtype, torch.Generator().manual_seed(seed))
    before, bit = digest(tensor), seed % (8 * tensor.nbytes)
    tensor.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert digest(tensor) != before


@pytest.mark.parametrize("shape", [(3, 4), (), (1,)], ids=str)
def test_contiguous_host_tensor_is_hashed_in_place(monkeypatch, shape):
    hashed = []
    monkeypatch.setattr(
        xxhash, "xxh3_64_intdigest", lambda data: hashed.append(torch.frombuffer(data, dtype=torch.uint8))
    )
    tensor = torch.ones(shape)
    digest(tensor)
    assert [(data.data_ptr(), data.nbytes) for data in hashed] == [(tensor.data_ptr(), tensor.nbytes)]


triples = st.tuples(
    st.text("ab.", max_size=5), st.lists(st.integers(0, 9), max_size=2).map(tuple), st.integers(0, 2**64 - 1)
)


@examples(25, 1000)
@given(st.lists(triples, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_fingerprint_is_independent_of_order_and_sensitive_to_each_part(parts, pick):
    fingerprint = combine(parts)
    assert 0 <= fingerprint < 2**63 and torch.tensor([fingerprint], dtype=torch.int64).item() == fingerprint
    shuffled = parts.copy()
    pick.shuffle(shuffled)
    assert combine(iter(shuffled)) == fingerprint
    at = pick.randrange(len(parts))
    name, begin, value = parts[at]
    for other in ((name + "x", begin, value), (name, (*begin, 0), value), (name, begin, value ^ 1)):
        assert combine([*parts[:at], other, *parts[at + 1 :]]) != fingerprint
    assert combine(parts[:at] + parts[at + 1 :]) != fingerprint
    assert combine([*parts, parts[at]]) != fingerprint
