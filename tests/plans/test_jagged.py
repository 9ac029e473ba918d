"""Jagged tensors: cut, joined and sent, compared row by row with the same rows in padded form."""

import numpy as np
import pytest
import torch
from depth import examples
from hypothesis import example, given
from hypothesis import strategies as st
from plan_helpers import arguments, expected_rows, plain_layout, plan_of
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dispatch.batch import cut, describe, join, length, shard, share_rows, trim
from dispatch.errors import BatchError
from dispatch.move import move
from single_controller.call.codec import encode

LONGEST = 6


def jagged(lengths, ragged_dim=1, width=2, dtype=torch.float32):
    """A jagged tensor of distinct values, and the same rows padded with -1.

    Padded rows are [LONGEST, width] or, if the ragged dim is 2, [width, LONGEST].
    """
    padded = torch.full((len(lengths), LONGEST, width), -1, dtype=dtype)
    numbers = torch.arange(len(lengths) * LONGEST * width).reshape(padded.shape) % 250
    for row, size in enumerate(lengths):
        padded[row, :size] = numbers[row, :size].to(dtype)
    values = torch.cat([padded[row, :size] for row, size in enumerate(lengths)] or [torch.zeros(0, width, dtype=dtype)])
    if ragged_dim == 2:
        values, padded = values.t().contiguous(), padded.transpose(1, 2)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_dim), padded


def same_rows(value, padded):
    """Whether each row of a jagged tensor is the corresponding row of the padded tensor, without its padding."""
    rows = value.unbind() if len(value) else []
    assert len(rows) == len(padded) and value.dtype == padded.dtype
    for row, expected in zip(rows, padded, strict=True):
        ragged = 0 if value._ragged_idx == 1 else 1
        size = int((expected != -1).any(1 - ragged).sum())
        assert torch.equal(row, expected.narrow(ragged, 0, size))
    return True


def with_holes(lengths):
    """A jagged tensor whose rows are not next to each other in memory, and the same rows padded with -1."""
    table = torch.arange(float(len(lengths) * 1000)).reshape(len(lengths), 1000)
    sizes, starts = torch.tensor(lengths), torch.arange(len(lengths)) % 3
    value = torch.nested.narrow(table, 1, starts, sizes, layout=torch.jagged)
    padded = torch.full((len(lengths), LONGEST, 1), -1.0)
    for row, size in enumerate(lengths):
        padded[row, :size, 0] = table[row, int(starts[row]) :][:size]
    return value, padded


CONTAINERS = {
    "alone": (lambda x, ids: x, lambda value: value),
    "dict": (lambda x, ids: {"x": x, "ids": ids, "text": [f"t{k}" for k in ids], "note": "n"}, lambda v: v["x"]),
    "TensorDict": (
        lambda x, ids: TensorDict({"x": x, "ids": ids, "note": NonTensorData("n")}, [len(ids)]),
        lambda value: value["x"],
    ),
    "TensorDict in a TensorDict": (
        lambda x, ids: TensorDict({"ids": ids, "in": TensorDict({"x": x}, [len(ids)])}, [len(ids)]),
        lambda value: value["in", "x"],
    ),
    "TensorDict in a dict": (
        lambda x, ids: {"table": TensorDict({"x": x, "ids": ids}, [len(ids)]), "ids": ids},
        lambda value: value["table"]["x"],
    ),
}

lengths_of_rows = st.lists(st.integers(0, LONGEST), max_size=12)


@pytest.mark.parametrize("container", CONTAINERS)
@examples(15, 150)
@given(
    lengths=lengths_of_rows,
    ragged_dim=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.bfloat16]),
    shards=st.integers(1, 6),
    uneven=st.sampled_from(["pad", "ragged"]),
)
@example(lengths=[2, 0, 3, 1, 6], ragged_dim=2, dtype=torch.float32, shards=3, uneven="pad")
@example(lengths=[0, 0, 0], ragged_dim=1, dtype=torch.int64, shards=4, uneven="ragged")
def test_shards_and_results_equal_the_padded_rows(container, lengths, ragged_dim, dtype, shards, uneven):
    pack, unpack = CONTAINERS[container]
    x, padded = jagged(lengths, ragged_dim, dtype=dtype)
    value = pack(x, torch.arange(len(lengths)))
    assert length(value) == len(lengths)
    numbers, real = expected_rows(len(lengths), shards, uneven)
    results = []
    for one, rows, count in zip(shard(value, share_rows(len(lengths), shards, uneven)), numbers, real, strict=True):
        sent = encode(one).decode()
        assert same_rows(unpack(sent), padded[rows])
        if count or not rows:
            results.append(trim(sent, len(rows), count) if rows else sent)
    if results:
        joined = join(results)
        assert same_rows(unpack(joined), padded)
        assert type(joined) is type(value)
    assert same_rows(x, padded), "the caller's tensor was changed"


@examples(20, 100)
@given(lengths=lengths_of_rows.filter(len), data=st.data())
def test_any_range_of_rows(lengths, data):
    x, padded = jagged(lengths)
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    assert same_rows(cut(x, start, stop), padded[start:stop])


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_ranks_without_values_have_no_say_in_the_dtype(lengths):
    x, padded = jagged([2, 0, 3], dtype=torch.int64)
    joined = join([jagged(lengths, dtype=torch.float32)[0], x])
    assert same_rows(joined, torch.cat([jagged(lengths, dtype=torch.int64)[1], padded]))


class TestOneRaggedSize:
    """Tensors that torch could compute with before a call can be computed with at each of its stages."""

    @staticmethod
    def pair():
        x, _ = jagged([2, 0, 3, 1, 4])
        return x, torch.nested.nested_tensor_from_jagged(x.values() * 10, x.offsets())

    @pytest.mark.parametrize("kind", ["dict", "TensorDict", "nested"])
    def test_fields_of_one_batch(self, kind):
        x, y = self.pair()
        value = {"x": x, "y": y} if kind == "dict" else TensorDict({"x": x, "y": y}, [5])
        if kind == "nested":
            value = {"in": TensorDict({"x": x, "y": y}, [5])}

        def total(v):
            v = v["in"] if kind == "nested" else v
            return (v["x"] + v["y"]).values().sum().item()

        whole = total(value)
        shards = [encode(one).decode() for one in shard(value, share_rows(5, 3, "pad"))]
        assert sum(map(total, shards)) > whole  # one row was repeated
        kept = [trim(one, 2, real) for one, real in zip(shards, (2, 2, 1), strict=True)]
        assert total(encode(join(kept)).decode()) == total(join(kept)) == sum(map(total, kept)) == whole

    def test_two_arguments_of_one_call(self):
        x, y = self.pair()
        plan = plan_of("DP_COMPUTE_PROTO", plain_layout(2), x, y, uneven="ragged")
        totals = [(a + b).values().sum().item() for a, b in (arguments(plan, rank)[0] for rank in range(2))]
        assert sum(totals) == (x + y).values().sum().item()

    def test_tensors_moved_one_by_one_from_a_device(self):
        """Each has offsets of its own then, and torch remembers that they are equal."""
        from torch.nested._internal.nested_tensor import _tensor_symint_registry as symbols

        x, y = self.pair()
        offsets = x.offsets().clone()
        symbols[offsets] = symbols[x.offsets()]
        moved = torch.nested.nested_tensor_from_jagged(y.values(), offsets)
        assert moved.offsets() is not x.offsets()
        assert (moved + x).shape == x.shape
        one, other = encode([x, moved]).decode()
        assert torch.equal((one + other).values(), (x + y).values())


class TestTransport:
    def test_cut_sends_only_its_rows(self):
        x, _ = jagged([6] * 1000, width=100)
        sent = encode(cut(x, 10, 20)).nbytes
        assert 10 * 6 * 100 * 4 <= sent < 10 * 6 * 100 * 4 + 3000

    def test_shards_are_views(self):
        x, _ = jagged([2, 3, 1, 4])
        for one in shard(x, share_rows(4, 2)):
            assert one.values().untyped_storage().data_ptr() == x.values().untyped_storage().data_ptr()

    def test_values_between_rows_are_not_sent(self):
        x, padded = with_holes([3, 0, 6, 2])
        encoded = encode({"x": x})
        assert encoded.nbytes < 2000 < x.values().nbytes
        assert same_rows(encoded.decode()["x"].unsqueeze(-1), padded)

    def test_values_between_rows_are_dropped_by_cut_and_join(self):
        x, padded = with_holes([3, 0, 6, 2])
        assert same_rows(cut(x, 1, 3).unsqueeze(-1), padded[1:3])
        assert same_rows(join([cut(x, 0, 1), x]).unsqueeze(-1), padded[[0, 0, 1, 2, 3]])

    def test_values_before_and_behind_the_rows_are_not_sent(self):
        values, offsets = torch.arange(2000.0), torch.tensor([500, 502, 502, 505])
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        encoded = encode(x)
        assert encoded.nbytes < 2000
        expected = [[500.0, 501.0], [], [502.0, 503.0, 504.0]]
        assert [row.tolist() for row in encoded.decode().unbind()] == expected
        assert [row.tolist() for row in join([cut(x, 0, 2), cut(x, 2, 3)]).unbind()] == expected

    def test_gradient(self):
        leaf = torch.arange(10.0).requires_grad_()
        x = torch.nested.nested_tensor_from_jagged(leaf, torch.tensor([0, 3, 4, 10]))
        cut(x, 1, 3).values().sum().backward()
        assert leaf.grad.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]

    @pytest.mark.parametrize("container", CONTAINERS)
    def test_move(self, container):
        pack, unpack = CONTAINERS[container]
        x, _ = jagged([2, 0, 3])
        moved = unpack(move(pack(x, torch.arange(3)), "meta"))
        assert moved.device.type == "meta" and moved.values().device.type == "meta"


class TestNonTensorData:
    def table(self, rows, note="n"):
        x, _ = jagged([k % 3 + 1 for k in range(rows)])
        stack = NonTensorStack(*[f"t{k}" for k in range(rows)])
        return TensorDict({"text": stack, "x": x, "note": NonTensorData(note)}, [rows])

    def test_items_for_each_row_are_cut_and_joined(self):
        made = [encode(one).decode() for one in shard(self.table(5), share_rows(5, 2, "ragged"))]
        assert [list(one["text"]) for one in made] == [["t0", "t1", "t2"], ["t3", "t4"]]
        assert [one["note"] for one in made] == ["n", "n"]
        joined = join(made)
        assert list(joined["text"]) == ["t0", "t1", "t2", "t3", "t4"] and joined["note"] == "n"
        assert joined.batch_size == (5,)

    def test_values_that_differ_become_items_for_each_row(self):
        joined = join([self.table(2, "a"), self.table(1, "b")])
        assert list(joined["note"]) == ["a", "a", "b"]

    def test_tables_without_rows_do_not_join(self):
        with pytest.raises(BatchError, match=r"no batch dim.*set batch_size"):
            join([TensorDict({"loss": NonTensorData(loss)}, []) for loss in (0.1, 0.2)])

    def test_locked_tables(self):
        table = self.table(4).lock_()
        assert list(join(shard(table, share_rows(4, 2)))["text"]) == ["t0", "t1", "t2", "t3"]


class TestRejected:
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_other_nested_tensors(self):
        value = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)
        with pytest.raises(BatchError, match=r"layout=torch\.jagged"):
            length(value)

    @pytest.mark.parametrize(
        ("other", "told"),
        [
            (torch.zeros(2, 3, 2), "Tensor of shape"),
            (jagged([1, 2], ragged_dim=2)[0], "ragged dims differ"),
            (jagged([1, 2], width=3)[0], "cannot be joined"),
        ],
        ids=["dense", "dim", "width"],
    )
    def test_tensors_that_do_not_join(self, other, told):
        with pytest.raises(BatchError, match=told):
            join([jagged([1, 2])[0], other])
        with pytest.raises(BatchError, match=f"'x'.*{told}"):
            join([TensorDict({"x": x}, [2]) for x in (jagged([1, 2])[0], other)])

    def test_description(self):
        assert "Nested" in describe(jagged([1, 2])[0])

    @pytest.mark.parametrize("own", ["attribute", "gradient", "extremes"])
    def test_what_torch_keeps_on_a_tensor_arrives(self, own):
        value = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged)
        if own == "attribute":
            value.note = "mine"
        elif own == "gradient":
            value.requires_grad_()
        arrived = encode(value, in_process=True).decode()
        assert getattr(arrived, "note", None) == getattr(value, "note", None)
        assert arrived.requires_grad == value.requires_grad
        assert arrived.is_leaf
        assert torch.equal(arrived.to_padded_tensor(0.0), value.to_padded_tensor(0.0))

    def test_padded_cuts_are_as_wide_as_their_longest_row(self):
        rows = [torch.full((n, 2), float(n)) for n in (1, 5, 2, 3)]
        value = torch.nested.nested_tensor(rows, layout=torch.jagged)
        first, second = shard(value, share_rows(4, 2, "error"))
        for made, longest in ((first, 5), (second, 3), (encode(second).decode(), 3), (join([second, first]), 5)):
            assert made.to_padded_tensor(0.0).shape == (len(made), longest, 2)

    def test_tensors_of_one_ragged_size_stay_so_if_torch_knows_the_longest_row_of_one(self):
        value = torch.nested.nested_tensor([torch.ones(n, 2) for n in (1, 4, 2)], layout=torch.jagged)
        other = torch.nested.nested_tensor_from_jagged(torch.ones(7, 2), value.offsets())
        parts = [encode(part).decode() for part in shard({"a": value, "b": other}, share_rows(3, 2, "ragged"))]
        for batch in (*parts, join(parts)):
            assert (batch["a"] + batch["b"]).values().eq(2).all()

    def test_same_rows_in_two_entries_are_sent_once(self):
        value, _ = jagged([1, 2, 3])
        twice = shard({"a": value, "b": value}, share_rows(3, 1, "error"))[0]
        assert len(encode(twice).buffers) == len(encode(value).buffers)
