"""What is sent, and who owns the memory afterwards."""

import numpy as np
import pytest
import ray
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack

from single_controller import Broadcast
from single_controller.call.codec import encode


def tensors():
    base = torch.arange(24.0).reshape(4, 6)
    floats = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn
    for dtype in (*floats, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64):
        yield base.to(dtype)
    yield base.t()  # not contiguous
    yield base[1:3]  # a view
    yield base[:, ::2]
    yield torch.tensor(3.5)  # no dims
    yield torch.empty(0, 5)
    yield torch.view_as_complex(torch.randn(3, 2)).conj()
    yield torch.randn(3, requires_grad=True)
    yield torch.eye(4).to_sparse()
    yield torch.nn.Parameter(torch.randn(2))


def test_tensors_survive_a_round_trip(counters):
    for tensor in tensors():
        for out in counters.echo(tensor)[:2]:
            assert type(out) is type(tensor) and out.dtype == tensor.dtype and out.shape == tensor.shape
            assert out.requires_grad == tensor.requires_grad
            same = out.to_dense() == tensor.to_dense() if tensor.is_sparse else out == tensor
            assert bool(same.all()), tensor


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(12)[::3],
    np.array(["2026-01-01"], dtype="datetime64[D]"),
    np.array(["ab", "c"]),
    np.array([{"a": 1}, None], dtype=object),
    np.zeros((0, 3)),
    np.float32(2.5),
    np.array(7),
]


def test_arrays_survive_a_round_trip(counters):
    for array in ARRAYS:
        for out in counters.echo(array)[:2]:
            assert type(out) is type(array) and out.dtype == array.dtype and out.shape == array.shape
            assert np.array_equal(out, array)
            assert not isinstance(out, np.ndarray) or out.flags.writeable


def test_nested_containers_survive_a_round_trip(counters):
    value = {
        "table": TensorDict({"x": torch.randn(3, 2), "inner": {"y": torch.ones(3)}, "name": NonTensorData("n")}, [3]),
        "list": [torch.arange(3), (np.ones(2), None, "text")],
        3: {"deep": [torch.zeros(1)]},
    }
    out = counters.echo(value)[3]
    assert torch.equal(out["table"]["x"], value["table"]["x"]) and out["table"]["name"] == "n"
    assert torch.equal(out["list"][0], torch.arange(3)) and out["list"][1][1:] == (None, "text")
    assert out[3]["deep"][0].item() == 0.0


def kinds():
    """Everything whose bytes must be sent outside the pickle: name, value, bytes of its rows."""
    big = torch.randn(500, 500)
    own = torch.randn(50, 500).as_subclass(Marked)
    own.note = "kept"
    yield "tensor", big, 1_000_000
    yield "parameter", torch.nn.Parameter(big[:50]), 100_000
    yield "subclass", big[:50].as_subclass(Marked), 100_000
    yield "subclass-attributes", own, 100_000
    yield "coo", torch.eye(1000).to_sparse(), 20_000
    yield "csr", torch.eye(1000).to_sparse_csr(), 20_008
    yield "jagged", torch.nested.nested_tensor([big[:30], big[:20]], layout=torch.jagged), 100_000
    yield (
        "jagged-in-tensordict",
        TensorDict({"x": torch.nested.nested_tensor([big[:30], big[:20]], layout=torch.jagged)}, [2]),
        100_000,
    )
    yield "tensordict", TensorDict({"x": big[:50], "inner": {"y": big[:50]}, "n": NonTensorData("n")}, [50]), 100_000
    yield "lazy-tensordict", lazy_stack([TensorDict({"x": big[:20]}, []), TensorDict({"x": big[:30]}, [])]), 100_000
    yield "array", np.zeros((500, 500)), 2_000_000
    yield "structured", np.zeros(1000, dtype=[("a", "f4"), ("b", "i8")]), 12_000
    yield "matrix", np.matrix(np.zeros((50, 50))), 20_000
    yield "record-array", np.rec.array(np.zeros(1000, dtype=[("a", "f4")])), 4_000


class Marked(torch.Tensor):
    """A subclass that adds nothing but its name."""


@pytest.mark.parametrize(("value", "rows"), [pytest.param(value, rows, id=name) for name, value, rows in kinds()])
def test_bytes_are_sent_outside_the_pickle(value, rows):
    encoded = encode(value)
    assert len(encoded.header) < 2000 and rows <= encoded.nbytes < rows + 3000
    out = encoded.decode()
    assert type(out) is type(value)
    if isinstance(value, torch.Tensor):
        assert vars(out).get("note") == vars(value).get("note")
        assert all(torch.equal(a, b) for a, b in zip(plain(out), plain(value), strict=True))
    elif isinstance(value, np.ndarray):
        assert out.dtype == value.dtype and np.array_equal(out, value)
    else:
        assert leaves(out).keys() == leaves(value).keys()
        for key, leaf in leaves(value).items():
            assert all(torch.equal(a, b) for a, b in zip(plain(leaves(out)[key]), plain(leaf), strict=True))


def leaves(table):
    """The tensors of a TensorDict by key; for a lazy stack, of each member."""
    if isinstance(table, LazyStackedTensorDict):
        return {(k, key): leaf for k, part in enumerate(table.tensordicts) for key, leaf in leaves(part).items()}
    return {key: leaf for key, leaf in table.items(True, True) if isinstance(leaf, torch.Tensor)}


def plain(tensor):
    """Plain dense tensors with the same content."""
    if tensor.is_nested:
        return tensor.unbind()
    return [tensor.to_dense() if tensor.layout is not torch.strided else tensor.as_subclass(torch.Tensor)]


def test_memory_mapped_array_sends_only_the_requested_rows(tmp_path):
    mapped = np.memmap(tmp_path / "tokens", dtype=np.int32, mode="w+", shape=(10_000, 10))
    mapped[:] = np.arange(100_000).reshape(10_000, 10)
    encoded = encode(mapped[100:200])
    assert encoded.nbytes < 100 * 10 * 4 + 1000
    out = encoded.decode()
    out[0] = 0  # a separate copy, not the file
    assert mapped[100, 0] == 1000 and np.array_equal(out[1:], mapped[101:200])


def test_row_slice_sends_only_its_rows():
    whole = torch.zeros(1000, 1000)
    assert encode(whole[:10]).nbytes < 10 * 1000 * 4 + 2000
    assert encode({"a": whole, "b": whole}).nbytes < whole.nbytes + 2000  # stored once per message


@pytest.mark.parametrize("size", [100, 1_000_000], ids=["inline", "stored"])
def test_worker_may_write_to_its_arguments(counters, size):
    """The default: each rank has its own memory, and the driver keeps its own."""
    mine = torch.ones(size)
    results = counters.scribble(mine)
    assert results == [(float(size), float(rank)) for rank in range(4)]
    assert bool((mine == 1).all())


@pytest.mark.parametrize("size", [100, 1_000_000], ids=["inline", "stored"])
def test_driver_may_write_to_results(counters, size):
    future = counters.echo.remote(torch.ones(size))
    for value in (*future.result(), *ray.get(future.refs)):
        value.fill_(5)
    assert all(bool((value == 1).all()) for value in ray.get(future.refs))


def test_views_share_memory(counters):
    """inputs="view" makes no copy and protects no other reader. Its docstring forbids what rank 0 does here."""
    mine = torch.ones(1_000_000)
    assert counters.scribble_on_view(mine) == [777.0] * 4  # one rank wrote, every rank sees it
    assert bool((mine == 1).all())  # the driver's own tensor was copied into the store once
    assert counters.total(mine) == [1_000_000.0] * 4


@pytest.mark.parametrize(
    ("whole", "shard", "stored"),
    [(1, 1, 0), (500, 500, 0), (1024, 1, 0), (1, 1024, 0), (600, 600, 1), (1, 1800, 4), (1800, 1, 1), (1800, 1800, 5)],
    ids=str,
)
def test_large_values_are_stored_once_and_small_ones_sent_inline(counters, monkeypatch, whole, shard, stored):
    """Sizes in KiB: shared by all ranks, and per rank. A frame has up to 1 MiB, and what describes it."""
    puts = []
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or real(value))
    mine = [torch.full((shard * 256,), float(rank)) for rank in range(4)]
    assert counters.items(mine, y=Broadcast(torch.zeros(whole * 256)))[3][1].sum() == 3 * shard * 256
    assert len(puts) == stored


def test_tensordict_reports_the_device_its_tensors_arrive_on():
    """CUDA tensors arrive on the CPU, so the TensorDict must not claim that they are on a GPU."""
    made = TensorDict({"x": torch.ones(3), "deep": TensorDict({"y": torch.zeros(3)}, [3])}, [3])
    made._device = made["deep"]._device = torch.device("cuda")  # as if created on a GPU
    opened = encode({"batch": made}).decode()["batch"]
    assert opened.device in (None, torch.device("cpu")) and opened["deep"].device in (None, torch.device("cpu"))
    assert opened["x"].tolist() == [1, 1, 1]


def sequences(rows):
    """A table as verl's trainer sends it: jagged tensors of one ragged size, dense ones, and other data."""
    tokens = torch.nested.as_nested_tensor([torch.arange(k % 4) + 10 * k for k in range(rows)], layout=torch.jagged)
    mask = torch.nested.nested_tensor_from_jagged(torch.ones(len(tokens.values())), tokens.offsets())
    text = NonTensorStack(*[f"t{k}" for k in range(rows)])
    columns = {"tokens": tokens, "mask": mask, "number": torch.arange(rows), "text": text}
    return TensorDict({**columns, "temperature": NonTensorData(0.5)}, [rows])


def score(worker, table):
    """Compute with two jagged tensors, which torch allows only if they were cut alike."""
    table["score"] = table["tokens"] + table["mask"]
    return table


@pytest.mark.parametrize("rows", [8, 5])
def test_jagged_tensors_are_cut_joined_and_passed_on(counters, rows):
    table = sequences(rows)
    apply = counters.apply.options(uneven="pad")
    scored = apply(score, table)
    again = apply(score, apply.remote(score, table))
    for out in (scored, again):
        assert out.batch_size == (rows,) and out["number"].tolist() == list(range(rows))
        assert list(out["text"]) == [f"t{k}" for k in range(rows)] and out["temperature"] == 0.5
        for k, (tokens, result) in enumerate(zip(out["tokens"].unbind(), out["score"].unbind(), strict=True)):
            assert tokens.tolist() == [10 * k + j for j in range(k % 4)]
            assert result.tolist() == [token + 1 for token in tokens.tolist()]
        assert torch.equal((out["score"] - out["mask"]).values(), out["tokens"].values())
    alone = counters.ragged(counters.ragged.remote(table["tokens"]))
    assert [row.tolist() for row in alone.unbind()] == [row.tolist() for row in table["tokens"].unbind()]
