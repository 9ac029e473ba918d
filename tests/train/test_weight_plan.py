"""The plan of an update: every element goes to every receiver once, from a rank that has it, in rounds of a bucket."""

import functools
import itertools
import math
import time
from collections import Counter

import numpy
import pytest
from depth import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from workers.weight_sync.weight_plan import Held, make_plan

pytestmark = pytest.mark.timeout(60)


# --- how frameworks cut tensors, written down independently of the library --------------------------------------------


@functools.cache
def chunks(begin, end, count):
    """As torch.chunk, and so FSDP: all but the last chunks are equally large; there may be none for the last ranks."""
    size = -(-(end - begin) // count)
    cuts = [min(begin + size * index, end) for index in range(count + 1)]
    return list(itertools.pairwise(cuts))


def cut_along(shape, dim, count):
    """Equal slices along a dim, as tensor parallelism makes them; the whole tensor for each if it does not divide."""
    if dim >= len(shape) or shape[dim] % count:
        return [tuple((0, size) for size in shape)] * count
    size = shape[dim] // count
    slices = []
    for index in range(count):
        box = [(0, size) for size in shape]
        box[dim] = (size * index, size * (index + 1))
        slices.append(tuple(box))
    return slices


def held_by(shape, itemsize, stage, mesh, tp_dim):
    """What the ranks of a mesh (stages, replicas, tensor parallel, FSDP) hold of a tensor of one stage."""
    _, replicas, tp, fsdp = mesh
    boxes = {}
    for replica, column, shard in itertools.product(range(replicas), range(tp), range(fsdp)):
        rank = ((stage * replicas + replica) * tp + column) * fsdp + shard
        box = list(cut_along(shape, tp_dim, tp)[column])
        if box:
            box[0] = chunks(*box[0], fsdp)[shard]
        if all(begin < end for begin, end in box):
            boxes.setdefault(tuple(box), []).append(rank)
    return Held(shape, itemsize, boxes)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
meshes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 3]), st.integers(1, 4))


@st.composite
def updates(draw):
    """What the train ranks hold, and what classes of rollout workers need."""
    mesh = draw(meshes)
    held, classes = {}, [{} for _ in range(draw(st.integers(1, 3)))]
    for number, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=6))):
        name, tp_dim = f"tensor {number}", draw(st.integers(0, 2))
        itemsize, stage = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, mesh[0] - 1))
        held[name] = held_by(shape, itemsize, stage, mesh, tp_dim)
        for slices in classes:  # whole, or one of two or three slices along a dim of its own
            count, dim = draw(st.integers(1, 3)), draw(st.integers(0, 1))
            if count > 1:
                slices[name] = draw(st.sampled_from(cut_along(shape, dim, count)))
    return held, classes, draw(st.integers(1, 300))


def painted(shape, box):
    """An array of zeros with ones in the box."""
    array = numpy.zeros(shape, int)
    array[tuple(slice(*dim) for dim in box)] += 1
    return array


@examples(60, 5000)
@given(updates())
def test_every_element_goes_to_every_class_once_from_a_rank_that_has_it(update):
    held, classes, bucket_bytes = update
    rounds = make_plan(held, classes, bucket_bytes)
    for index, slices in enumerate(classes):
        got = {name: numpy.zeros(one.shape, int) for name, one in held.items()}
        for (rank, receivers), pieces in itertools.chain.from_iterable(one.items() for one in rounds):
            for name, box in pieces if receivers == index else ():
                had = [painted(held[name].shape, outer) for outer, ranks in held[name].boxes.items() if rank in ranks]
                piece = painted(held[name].shape, box)
                assert piece.any() and any((piece <= one).all() for one in had), (rank, name, box)
                got[name] += piece
        for name, one in held.items():
            whole = tuple((0, size) for size in one.shape)
            assert (got[name] == painted(one.shape, slices.get(name, whole))).all(), (index, name)


@examples(60, 5000)
@given(updates())
def test_rounds_are_at_most_a_bucket_or_a_row(update):
    held, classes, bucket_bytes = update
    for one in make_plan(held, classes, bucket_bytes):
        assert one and all(one.values()), "no empty rounds or payloads"
        for index in range(len(classes)):
            pieces = [piece for (_, receivers), pieces in one.items() if receivers == index for piece in pieces]
            nbytes = sum(math.prod(b - a for a, b in box) * held[name].itemsize for name, box in pieces)
            assert nbytes <= bucket_bytes or len({(name, box[0] if box else ()) for name, box in pieces}) == 1
            if nbytes > bucket_bytes and pieces[0].box:
                assert pieces[0].box[0][1] - pieces[0].box[0][0] == 1


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("classes", [1, 2])
def test_replicas_share_the_work(stages, replicas, classes):
    held = {
        f"{stage} {number}": held_by((16, 4), 4, stage, (stages, replicas, 1, 2), 0)
        for stage in range(stages)
        for number in range(8)
    }
    sent = Counter()
    for one in make_plan(held, [{}] * classes, 512):
        for (rank, _), pieces in one.items():
            sent[rank] += sum(math.prod(b - a for a, b in box) for _, box in pieces)
    assert sorted(sent) == list(range(stages * replicas * 2)) and len(set(sent.values())) == 1, sent


def test_stages_send_side_by_side():
    """Each round has something of both pipeline stages."""
    held = {
        f"{stage} {number}": Held((4, 4), 4, {((0, 4), (0, 4)): [stage]}) for stage in (0, 1) for number in range(8)
    }
    for one in make_plan(held, [{}], 128):
        assert {rank for rank, _ in one} == {0, 1}


@examples(40, 2000)
@given(updates(), st.randoms(use_true_random=False))
def test_what_is_missing_or_held_twice_is_named(update, pick):
    held, classes, bucket_bytes = update
    names = [name for name, one in held.items() if one.boxes]
    assume(names)
    name = pick.choice(names)
    shape, itemsize, boxes = held[name]
    box = pick.choice(list(boxes))
    without = {other: ranks for other, ranks in boxes.items() if other != box}
    with pytest.raises(ValueError, match=f"do not have {painted(shape, box).sum()} of the .* of '{name}'"):
        make_plan(held | {name: Held(shape, itemsize, without)}, classes, bucket_bytes)
    split = [dim for dim, (begin, end) in enumerate(box) if end - begin > 1]
    assume(split)
    dim = pick.choice(split)
    inner = (*box[:dim], (box[dim][0], box[dim][1] - 1), *box[dim + 1 :])
    with pytest.raises(ValueError, match=f"overlapping parts of '{name}'"):
        make_plan(held | {name: Held(shape, itemsize, {**boxes, inner: [0]})}, classes, bucket_bytes)
    end = (*box[:dim], (box[dim][0], box[dim][1] + 1), *box[dim + 1 :])
    moved = {**without, end: boxes[box]}
    with pytest.raises(ValueError, match=f"'{name}'"):
        make_plan(held | {name: Held(shape, itemsize, moved)}, classes, bucket_bytes)


MESHES = [(1, 32, 1, 64), (4, 4, 8, 16), (8, 32, 8, 1)]
FLAT = pytest.param((1, 1, 1, 2048), marks=pytest.mark.full("a plan of 400,000 boxes"))


@pytest.mark.parametrize("mesh", [*MESHES, FLAT], ids=str)
def test_thousands_of_ranks_are_planned_within_seconds(mesh):
    assert math.prod(mesh) == 2048
    kinds = [held_by((4096, 64), 2, stage, mesh, dim) for stage in range(mesh[0]) for dim in (0, 1)]
    held = {f"tensor {number}": kinds[number % len(kinds)] for number in range(200)}
    classes = [{name: cut_along((4096, 64), 0, 2)[half] for name in held} for half in (0, 1)]
    begun = time.process_time()
    rounds = make_plan(held, classes, 8 << 20)
    assert time.process_time() - begun < 5
    sent = sum(math.prod(b - a for a, b in box) for one in rounds for pieces in one.values() for _, box in pieces)
    assert sent == 200 * 4096 * 64
