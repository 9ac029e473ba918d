"""move, with torch's "meta" device, which exists on every machine."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dispatch.move import check_device, move

Pair = namedtuple("Pair", "a b")


class Movable:
    """A third-party type with a `to` method."""

    def to(self, device):
        """See torch.Tensor.to."""
        return f"moved to {device}"


def test_every_object_with_a_to_method_is_moved():
    assert move(torch.ones(2), "meta").device.type == "meta"
    assert move(TensorDict({"x": torch.ones(2)}, [2]), "meta")["x"].device.type == "meta"
    assert move(Movable(), "meta") == "moved to meta"


def test_containers_keep_their_types_and_other_values_are_unchanged():
    array, text = np.ones(2), "to"
    value = OrderedDict(a=[torch.ones(1), (torch.ones(2), array)], b=Pair(torch.ones(3), text), c=None, d=torch.Tensor)
    moved = move(value, "meta")
    assert type(moved) is OrderedDict and list(moved) == list(value)
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].a.device.type == "meta"
    assert type(moved["a"][1]) is tuple and type(moved["b"]) is Pair
    assert moved["a"][1][1] is array and moved["b"].b is text and moved["c"] is None and moved["d"] is torch.Tensor
    assert value["a"][0].device.type == "cpu"  # the original is unchanged


def test_error_names_the_unavailable_device():
    check_device("device", "meta")
    with pytest.raises(ValueError, match="'tpu9' is not available in this process"):
        check_device("device", "tpu9")
