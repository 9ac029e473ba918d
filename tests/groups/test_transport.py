"""What travels, and whose memory it is afterwards."""

import numpy as np
import pytest
import ray
import torch
from tensordict import NonTensorData, TensorDict

from single_controller.ray.transport import pack

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def tensors():
    base = torch.arange(24.0).reshape(4, 6)
    yield from (base.to(dtype) for dtype in DTYPES)
    yield base.t()  # not contiguous
    yield base[1:3]  # a view
    yield base[:, ::2]
    yield torch.tensor(3.5)  # no dims
    yield torch.empty(0, 5)
    yield torch.view_as_complex(torch.randn(3, 2)).conj()
    yield torch.randn(3, requires_grad=True)
    yield torch.eye(4).to_sparse()
    yield torch.nn.Parameter(torch.randn(2))


@pytest.mark.parametrize("tensor", list(tensors()), ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.layout}")
def test_tensors_there_and_back(counters, tensor):
    for out in counters.echo(tensor)[:2]:
        assert type(out) is type(tensor) and out.dtype == tensor.dtype and out.shape == tensor.shape
        assert out.requires_grad == tensor.requires_grad
        same = out.to_dense() == tensor.to_dense() if tensor.is_sparse else out == tensor
        assert bool(same.all())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12)[::3],
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array(["ab", "c"]),
        np.array([{"a": 1}, None], dtype=object),
        np.zeros((0, 3)),
        np.float32(2.5),
        np.array(7),
    ],
    ids=lambda a: f"{a.dtype}-{a.shape}",
)
def test_arrays_there_and_back(counters, array):
    for out in counters.echo(array)[:2]:
        assert type(out) is type(array) and out.dtype == array.dtype and out.shape == array.shape
        assert np.array_equal(out, array)
        if isinstance(out, np.ndarray):
            assert out.flags.writeable


def test_containers_of_everything(counters):
    value = {
        "table": TensorDict({"x": torch.randn(3, 2), "inner": {"y": torch.ones(3)}, "name": NonTensorData("n")}, [3]),
        "list": [torch.arange(3), (np.ones(2), None, "text")],
        3: {"deep": [torch.zeros(1)]},
    }
    out = counters.echo(value)[3]
    assert torch.equal(out["table"]["x"], value["table"]["x"]) and out["table"]["name"] == "n"
    assert torch.equal(out["list"][0], torch.arange(3)) and out["list"][1][1:] == (None, "text")
    assert out[3]["deep"][0].item() == 0.0


def test_a_row_slice_ships_its_own_rows_only():
    whole = torch.zeros(1000, 1000)
    assert pack(whole[:10]).nbytes < 10 * 1000 * 4 + 2000
    assert pack({"a": whole, "b": whole}).nbytes < whole.nbytes + 2000  # shared within a value: once


@pytest.mark.parametrize("size", [100, 1_000_000], ids=["inline", "stored"])
def test_a_worker_may_write_into_what_it_got(counters, size):
    """The default: each rank has memory of its own, and the driver keeps its own."""
    mine = torch.ones(size)
    answers = counters.scribble(mine)
    assert answers == [(float(size), float(rank)) for rank in range(4)]
    assert bool((mine == 1).all())


@pytest.mark.parametrize("size", [100, 1_000_000], ids=["inline", "stored"])
def test_what_the_driver_gets_is_its_own(counters, size):
    future = counters.echo.remote(torch.ones(size))
    for value in (*future.result(), *ray.get(future.refs)):
        value.fill_(5)
    assert all(bool((value == 1).all()) for value in ray.get(future.refs))


def test_views_share_memory_which_is_why_they_are_an_option(counters):
    """inputs="view": no copy, and nothing that protects the others. Its docstring forbids what rank 0 does here."""
    mine = torch.ones(1_000_000)
    assert counters.scribble_on_view(mine) == [777.0] * 4  # one rank wrote, every rank sees it
    assert bool((mine == 1).all())  # the driver's own tensor was copied into the store once
    assert counters.total(mine) == [1_000_000.0] * 4
