"""Code written for GPUs, on a machine without CUDA: "cuda" is the CPU in the workers, and only there.

Tests of the same parallel sizes follow one another, because `have_tp` then keeps megatron's process groups.
"""

import pytest
import ray
import torch
from megatron_workers import (
    checkpointed_dropout,
    cuda_device_mesh,
    cuda_keeps_the_rest,
    nccl_group,
    seeds_by_hand,
    spelled_cuda,
    tensordict_on_cuda,
)
from tensordict import TensorDict

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_every_spelling_of_cuda(four):
    for found in four.run(spelled_cuda):
        assert {spelling: device for spelling, device in found.items() if device != "cpu"} == {}
        assert len(found) > 15


def test_to_with_a_dtype_and_gradients(four):
    for dtype, gradient in four.run(cuda_keeps_the_rest):
        assert dtype is torch.float64
        assert torch.equal(gradient, torch.full((2, 2), 3.0))


@pytest.mark.parametrize("method", ["cuda_in_async", "cuda_in_concurrent_async", "cuda_in_concurrent"])
def test_async_and_concurrent_methods(four, method):
    assert getattr(four, method)() == [("cpu", "cpu")] * 4


def test_unregistered_methods(four):
    assert four.execute_all_sync("cuda_unregistered") == [("cpu", "cpu")] * 4
    assert ray.get(four.workers[2].cuda_unregistered.remote()) == ("cpu", "cpu")


def test_additional_process_group_on_nccl(four):
    four.have_tp(4)
    assert four.run(nccl_group) == ["gloo"] * 4


class TestRngTracker:
    def test_users_own_seeding(self, four):
        """The same seed gives the same draws, two draws differ, and the default generator is untouched."""
        four.have_tp(4)
        for once, again in four.run(seeds_by_hand, 10):
            (first, second, untouched), (first_again, second_again, _) = once, again
            assert torch.equal(first, first_again) and torch.equal(second, second_again)
            assert not torch.equal(first, second)
            assert untouched

    def test_checkpointing_repeats_the_same_dropout(self, four):
        four.have_tp(4)
        for y, gradient in four.run(checkpointed_dropout):
            assert 300 < (y == 0).sum() < 700
            assert torch.equal(gradient, 2 * y)

    def test_draws_differ_over_tp_and_agree_over_dp(self, four):
        four.have_tp(2)
        where = [coordinates["tp"] for coordinates, _ in four.where()]
        drawn = {}
        for tp, (once, _) in zip(where, four.run(seeds_by_hand, 10), strict=True):
            drawn.setdefault(tp, set()).add(tuple(once[0].tolist()))
        assert [len(by_replica) for by_replica in drawn.values()] == [1, 1]
        assert drawn[0] != drawn[1]


def test_tensordict(four):
    batch = TensorDict({"x": torch.arange(4.0)}, [4])
    for devices, made in four.run(tensordict_on_cuda, batch):
        assert devices == {"cpu"}
        assert made.device in (None, torch.device("cpu"))
        assert torch.equal(made["y"], torch.arange(0.0, 8.0, 2))


def test_device_mesh_on_cuda(four):
    four.have_tp(2)
    assert four.run(cuda_device_mesh) == [(0, 0, 2.0), (0, 1, 2.0), (1, 0, 2.0), (1, 1, 2.0)]
    assert four.layout.mesh("on_cuda").routing.collecting == (0, 2)


def test_torch_is_unchanged_in_this_process(four):
    """The driver imports the worker class, and torch is unchanged there."""
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1).cuda()
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert torch.distributed.init_process_group.__module__ == "torch.distributed.distributed_c10d"
