"""move: everything with tensors in it, to torch's device "meta", which every machine has."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dispatch.move import check_device, move

Pair = namedtuple("Pair", "a b")


class Movable:
    """A type of somebody else's."""

    def to(self, device):
        """Where it went."""
        return f"moved to {device}"


def test_everything_with_a_to_method_is_asked_for_it():
    assert move(torch.ones(2), "meta").device.type == "meta"
    assert move(TensorDict({"x": torch.ones(2)}, [2]), "meta")["x"].device.type == "meta"
    assert move(Movable(), "meta") == "moved to meta"


def test_containers_keep_their_types_and_the_rest_is_left():
    array, text = np.ones(2), "to"
    value = OrderedDict(a=[torch.ones(1), (torch.ones(2), array)], b=Pair(torch.ones(3), text), c=None, d=torch.Tensor)
    moved = move(value, "meta")
    assert type(moved) is OrderedDict and list(moved) == list(value)
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].a.device.type == "meta"
    assert type(moved["a"][1]) is tuple and type(moved["b"]) is Pair
    assert moved["a"][1][1] is array and moved["b"].b is text and moved["c"] is None and moved["d"] is torch.Tensor
    assert value["a"][0].device.type == "cpu"  # what was given is as it was


def test_a_device_that_is_not_there_is_named():
    check_device("device", "meta")
    with pytest.raises(ValueError, match="'tpu9' is not to be had in this process"):
        check_device("device", "tpu9")
