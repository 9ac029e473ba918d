"""Shared by the tests of weight sync: groups of train ranks and of rollout workers, and what the latter should hold."""

import contextlib

import pytest
import sync_workers
import torch
from devices import ON_DEVICE, need
from sync_workers import MODELS, SHAPES, cut, half, token

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

TRANSPORTS = ["store", "group", "disk", "device"]
DIRECT = ["store", "group", "device"]
"""Those that send differences."""
SMALL = 4000
"""Bytes per round: several rounds for each update."""


@contextlib.contextmanager
def pool_of_two():
    need(2)
    with RayResourcePool([2], use_gpu=ON_DEVICE, max_colocate_count=8) as pool:
        yield pool


def two_senders(pool):
    return RayWorkerGroup(pool, RayClassWithInitArgs(sync_workers.Stage))


def receivers(pool, **options):
    return RayWorkerGroup(pool, RayClassWithInitArgs(sync_workers.Rollout), **options)


def options(transport, tmp_path):
    return {"bucket_bytes": SMALL} | ({"folder": str(tmp_path / "sync")} if transport == "disk" else {})


def expected(version, dtype=torch.float32, to=None, weights="model", dim=None, rank=0):
    """What a rollout worker should hold: the whole tensors in the dtype ``to``, or its halves along a dim."""
    tensors = {name: tensor.to(to or dtype) for name, tensor in MODELS[weights](dtype, version).items()}
    if dim is not None:
        boxes = {name: half(SHAPES[name], dim, rank) for name in tensors}
        tensors = {name: cut(tensor, boxes[name]) for name, tensor in tensors.items()}
    return tensors


def equal(found, wanted):
    """The same names, dtypes and bytes."""
    return (
        found is not None
        and found.keys() == wanted.keys()
        and all(
            found[name].dtype == wanted[name].dtype and torch.equal(bits(found[name]), bits(wanted[name]))
            for name in wanted
        )
    )


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(rollout, version, dtype=torch.float32, to=torch.float32, weights="model"):
    """Whether all workers have this version, hold its bytes where their engines put them, and generate with them."""
    wanted = expected(version, dtype, to, weights)
    return all(found == (version, token(wanted)) and equal(held, wanted) for found, held in rollout.state())


def mostly_full(reason, all_of, *short):
    """Parameters of which only some belong to the short suite."""
    left_out = pytest.mark.full(reason)
    return [
        one if one in short else pytest.param(*(one if isinstance(one, tuple) else [one]), marks=left_out)
        for one in all_of
    ]
