"""uneven= error, pad and ragged through whole calls: every rows mode, every type, positional and keyword."""

import copy

import pytest
import torch
from plan_helpers import (
    NO_EMPTY_SHARD,
    Chunked,
    arguments,
    batches,
    coordinates,
    declare,
    expected_rows,
    layout_of,
    pick,
    plain_layout,
    plan_of,
    run,
    same,
    simulate,
)

from dispatch import Broadcast, Dispatch, DispatchError, Mesh
from dispatch.plan import plan_call

PLACES = coordinates({"tp": 2, "dp": 3, "pp": 2}, ("tp", "pp", "dp"))
LAYOUT = layout_of(PLACES, meshes={"m": Mesh("m", (0, 1, 2, 3) * 3, (True,) * 4 + (False,) * 8)})
# mode -> shard of each rank, computed from the coordinates
SHARD_OF = {
    Dispatch.DP_COMPUTE_PROTO: list(range(12)),
    Dispatch.DP_COMPUTE_METRIC: list(range(12)),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: list(range(12)),
    Dispatch.MEGATRON_COMPUTE_PROTO: [place["dp"] for place in PLACES],
    Dispatch.MEGATRON_PP_AS_DP_PROTO: [2 * place["dp"] + place["pp"] for place in PLACES],
    Dispatch.mesh("m"): [0, 1, 2, 3] * 3,
}
MODES = list(SHARD_OF)
JOINED = [mode for mode in MODES if mode != Dispatch.DP_COMPUTE_METRIC]


def function_first(mode, *args):
    return (abs, *args) if mode == Dispatch.DP_COMPUTE_PROTO_WITH_FUNC else args


@pytest.mark.parametrize("mode", MODES, ids=repr)
@pytest.mark.parametrize("uneven", ["pad", "ragged"])
@pytest.mark.parametrize("rows", [0, 1, 5, 13, 24])
def test_each_rank_gets_its_rows_of_every_type(mode, uneven, rows):
    shards = max(SHARD_OF[mode]) + 1
    cut, real = expected_rows(rows, shards, uneven)
    values = batches(rows)
    if uneven == "ragged" and 0 < rows < shards:
        values = {kind: value for kind, value in values.items() if kind not in NO_EMPTY_SHARD}
    before = copy.deepcopy(values)
    by_keyword = {f"key{k}": value for k, value in enumerate(values.values())}
    made = plan_of(mode, LAYOUT, *function_first(mode, *values.values()), uneven=uneven, **by_keyword)
    assert made.ranks == list(range(12)), "every rank must be called"
    assert len(made.shards) == shards
    assert [shard.rows for shard in made.shards] == [len(numbers) for numbers in cut]
    assert [shard.real for shard in made.shards] == real
    wanted = [[pick(value, numbers) for value in values.values()] for numbers in cut]
    for rank, number in enumerate(SHARD_OF[mode]):
        args, kwargs = arguments(made, rank)
        assert same(list(args), list(function_first(mode, *wanted[number])))
        assert list(kwargs) == list(by_keyword)
        assert same(list(kwargs.values()), wanted[number])
    assert same(values, before), "the caller's objects were changed"


@pytest.mark.parametrize("mode", JOINED, ids=repr)
@pytest.mark.parametrize("uneven", ["error", "pad", "ragged"])
def test_driver_gets_its_rows_back(mode, uneven):
    rows = 24 if uneven == "error" else 14
    for kind, value in batches(rows).items():
        made = plan_of(mode, LAYOUT, *function_first(mode), uneven=uneven, key=value)
        assert same(simulate(made, lambda rank, *function, key: key), value), kind


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_error_has_method_argument_and_remedy(mode):
    shards = max(SHARD_OF[mode]) + 1
    first = "y" if mode == Dispatch.DP_COMPUTE_PROTO_WITH_FUNC else "x"
    for value in batches(7).values():
        for name, args, kwargs in ((first, (value,), {}), ("key", (), {"key": value})):
            with pytest.raises(DispatchError) as caught:
                plan_of(mode, LAYOUT, *function_first(mode, *args), **kwargs)
            message = str(caught.value)
            for word in ("work()", repr(name), "7 rows", f"{shards} shards", "uneven='pad'", "'ragged'", "options("):
                assert word in message
            assert (caught.value.method, caught.value.argument) == ("work", name)


def test_error_for_a_batch_that_asks_for_padding_itself():
    """As verl's DataProto with auto_padding=True."""
    batch = type("DataProto", (Chunked,), {"is_padding_enabled": lambda self: True})([1, 2, 3])
    with pytest.raises(
        DispatchError, match=r"'x' has 3 rows.*batch itself asks for has no effect: set uneven='pad' in @"
    ):
        plan_of("DP_COMPUTE_PROTO", plain_layout(2), batch)
    assert len(plan_of("DP_COMPUTE_PROTO", plain_layout(2), batch, uneven="pad").shards) == 2


def test_call_overrides_the_declaration():
    spec = declare("DP_COMPUTE_PROTO", uneven="pad")
    layout = plain_layout(2)
    assert [s.rows for s in plan_call(spec, layout, ([1, 2, 3],), {}).shards] == [2, 2]
    assert [s.rows for s in plan_call(spec, layout, ([1, 2, 3],), {}, uneven="ragged").shards] == [2, 1]
    with pytest.raises(DispatchError):
        plan_call(spec, layout, ([1, 2, 3],), {}, uneven="error")


@pytest.mark.parametrize("uneven", ["error", "pad", "ragged"])
def test_arguments_without_rows_are_sent_whole(uneven):
    whole = {
        "text": "x" * 5,
        "number": 3,
        "nothing": None,
        "scalar": torch.tensor(1.5),
        "config": Broadcast({"a": [1, 2, 3]}),
    }
    rows = torch.arange(4 if uneven == "error" else 5)
    made = plan_of("DP_COMPUTE_PROTO", plain_layout(2), rows, uneven=uneven, **whole)
    seen = run(made, lambda rank, x, **others: others)
    for rank in (0, 1):
        assert seen[rank]["config"] == {"a": [1, 2, 3]}
        assert seen[rank]["scalar"] is whole["scalar"]
        assert (seen[rank]["text"], seen[rank]["number"], seen[rank]["nothing"]) == ("xxxxx", 3, None)
    assert all(set(shard.values) == {0} for shard in made.shards), "an argument that is sent whole is stored once"


def test_broadcast_inside_a_dict_is_unwrapped():
    beside, alone = {"ids": [1, 2], "table": Broadcast([7, 8, 9])}, {"table": Broadcast([7, 8, 9])}
    made = plan_of("DP_COMPUTE_PROTO", plain_layout(2), beside, alone)
    assert arguments(made, 0)[0] == ({"ids": [1], "table": [7, 8, 9]}, {"table": [7, 8, 9]})


@pytest.mark.parametrize("uneven", ["error", "pad", "ragged"])
def test_batches_of_different_lengths_are_rejected_by_every_rule(uneven):
    with pytest.raises(DispatchError) as caught:
        plan_of("DP_COMPUTE_PROTO", plain_layout(2), [1, 2, 3, 4], uneven=uneven, key=torch.zeros(6))
    for word in ("work()", "'key' has 6 rows", "'x' has 4", "Broadcast"):
        assert word in str(caught.value)
    assert caught.value.argument == "key"


def test_error_names_a_type_without_an_empty_shard():
    with pytest.raises(DispatchError, match=r"work\(\).*'key'.*Chunked.*no slicing, so no empty shard"):
        plan_of("DP_COMPUTE_PROTO", plain_layout(3), uneven="ragged", key=Chunked([1]))


@pytest.mark.parametrize("chunks", [1, 3])
def test_wrong_number_of_chunks_is_a_dispatch_error(chunks):
    class Liar(Chunked):
        def chunk(self, n):
            return [self] * chunks

    with pytest.raises(DispatchError, match=r"work\(\).*'x'.*Liar"):
        plan_of("DP_COMPUTE_PROTO", plain_layout(2), Liar([1, 2, 3, 4]))
