"""Read the shards of a TrainModel on its ranks, and put tensors together from them."""

import torch


def read_shards(shards):
    """(name, shape, begin, values) of each shard; values have the size and dtype that the shard says."""
    read = []
    for shard in shards:
        values = shard.read()
        assert (tuple(values.shape), values.dtype) == (shard.size, shard.dtype)
        assert not values.requires_grad and values.numel() > 0
        read.append((shard.name, shard.shape, shard.begin, values.cpu().clone()))
    assert len({name for name, *_ in read}) == len(read), "a rank has one shard of a tensor"
    return read


def assembled(ranks):
    """The whole tensors from what `read_shards` returned on each rank.

    Asserts that the ranks' boxes of a tensor are identical, with identical bytes, or disjoint, and that they cover it.
    """
    whole, boxes = {}, {}
    for rank in ranks:
        for name, shape, begin, values in rank:
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=values.dtype), torch.zeros(shape, dtype=torch.bool)
            tensor, covered = whole[name]
            assert (tuple(tensor.shape), tensor.dtype) == (shape, values.dtype)
            box = tuple(slice(start, start + size) for start, size in zip(begin, values.shape, strict=True))
            known = boxes.setdefault((name, begin, tuple(values.shape)), values)
            if known is values:
                assert covered[box].shape == values.shape and not covered[box].any(), f"{name}: boxes overlap"
            assert same_bytes(known, values), f"{name}: two ranks have different values"
            tensor[box], covered[box] = values, True
    assert [name for name, (_, covered) in whole.items() if not covered.all()] == []
    return {name: tensor for name, (tensor, _) in whole.items()}


def same_bytes(one, other):
    one, other = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def assert_same(found, expected):
    """The same names and dtypes, and the same bytes."""
    assert found.keys() == expected.keys()
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert [name for name in found if not same_bytes(found[name], expected[name])] == []
