"""Arrivals: which tensors an engine is given when an update is complete."""

import pytest
import torch

from workers.weight_sync.arrivals import Arrivals
from workers.weight_sync.pieces import Packer
from workers.weight_sync.sync_protocol import ReceiverClass
from workers.weight_sync.weight_plan import Piece, Shard, whole

SHAPES = {"changed": (6, 5), "unchanged": (7,), "number": ()}


@pytest.mark.timeout(30)
def test_a_tensor_without_changes_is_not_loaded_again():
    """Differences arrive for all tensors; the engine gets those in which an element has changed, and only these."""
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    packer, arrivals = Packer(delta=True), Arrivals()
    taken = []
    for patched in (False, True):
        packer.begin(Shard.whole(*pair) for pair in weights.items())
        pieces = [Piece(name, whole(shape)) for name, shape in SHAPES.items()]
        payload = packer.pack(pieces, ReceiverClass((0,), {}, None, patched), digests=True)
        arrivals.begin(SHAPES, {}, keep=True)
        arrivals.add(payload)
        assert not arrivals.missing
        taken.append(dict(arrivals.take(every=False)))
        packer.next_round()
        packer.end("key")
        if not patched:
            assert all(torch.equal(taken[0][name], tensor) for name, tensor in weights.items())
            weights["changed"][2, 3] += 1
    assert taken[0].keys() == SHAPES.keys()
    assert list(taken[1]) == ["changed"]
    assert torch.equal(taken[1]["changed"], weights["changed"])
    assert arrivals.differing(lambda names: [weights[name] for name in names], every=True) == []


class Unread(list):
    def __iter__(self):
        raise AssertionError("looked through all pieces")


def test_taking_without_a_double_buffer_does_not_look_through_all_pieces():
    """It takes after each payload."""
    weights, packer = {name: torch.randn(shape) for name, shape in SHAPES.items()}, Packer(delta=False)
    packer.begin(Shard.whole(*pair) for pair in weights.items())
    arrivals = Arrivals()
    arrivals.begin(SHAPES, {}, keep=False)
    arrivals.pieces = Unread()
    for name, shape in SHAPES.items():
        arrivals.add(packer.pack([Piece(name, whole(shape))], ReceiverClass((0,), {}, None, False), digests=False))
        assert [taken for taken, _ in arrivals.take(every=True)] == [name]


@pytest.mark.parametrize("keep", [False, True])
def test_an_engine_gets_the_tensors_without_elements_once(keep):
    """Nothing is sent of them, and an engine that counts what has come would miss them."""
    weights, packer = {name: torch.randn(shape) for name, shape in SHAPES.items()}, Packer(delta=False)
    arrivals = Arrivals()
    for _ in range(2):
        packer.begin(Shard.whole(*pair) for pair in weights.items())
        arrivals.begin({**SHAPES, "empty": (0, 4), "cut": (5, 3)}, {"cut": ((2, 2), (0, 3))}, keep=keep)
        taken = []
        for name, shape in SHAPES.items():
            piece = Piece(name, whole(shape))
            arrivals.add(packer.pack([piece], ReceiverClass((0,), {}, None, False), digests=False))
            taken += [] if keep else arrivals.take(every=True)
        taken += arrivals.take(every=True)
        sizes = {**SHAPES, "empty": (0, 4), "cut": (0, 3)}
        assert sorted((name, tuple(tensor.shape)) for name, tensor in taken) == sorted(sizes.items())
