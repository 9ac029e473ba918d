"""length, shard, join, trim: what can be split into rows, and that joining undoes splitting."""

import copy
import dataclasses
import enum
import importlib
import itertools
import math
import sys
import threading
import types
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from plan_helpers import (
    BATCH_KINDS,
    NO_EMPTY_SHARD,
    Chunked,
    Sliced,
    Table,
    batches,
    concat,
    expected_rows,
    pick,
    rows_in,
    same,
    table_functions,
)
from tensordict import TensorDict, tensorclass

from dispatch import Broadcast, register_batch_type
from dispatch.batch import cut, describe, imported, join, length, shard, share_rows, trim
from dispatch.errors import BatchError
from workers import SamplingParams, read_args

# rows, shards: divisible; more rows than shards; fewer; equal; one of either; none
SIZES = [(6, 3), (7, 3), (2, 3), (4, 4), (1, 5), (5, 1), (0, 3)]


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Sizes:
    width: int = 3
    names: tuple[str, ...] = ("a", "b")
    inner: object = None
    options: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Lines:
    ids: tuple[int, ...] = (1, 2)

    def __len__(self):
        return len(self.ids)


def test_range_is_a_batch():
    assert length(range(1, 8)) == 7 and cut(range(10, 20), 2, 4) == range(12, 14)
    assert shard(range(7), share_rows(7, 3, "ragged")) == [range(0, 3), range(3, 5), range(5, 7)]
    assert [list(one) for one in shard(range(5), share_rows(5, 2, "pad"))] == [[0, 1, 2], [3, 4, 0]]
    assert join([range(3), range(3, 5)]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", BATCH_KINDS)
class TestEveryType:
    def test_split_trim_and_join_restore_the_batch(self, kind):
        for (rows, shards), uneven in itertools.product(SIZES, ("pad", "ragged")):
            value = batches(rows)[kind]
            if kind in NO_EMPTY_SHARD and uneven == "ragged" and 0 < rows < shards:
                with pytest.raises(BatchError, match="no slicing, so no empty shard"):
                    shard(value, share_rows(rows, shards, uneven))
                continue
            before, case = copy.deepcopy(value), (rows, shards, uneven)
            numbers, real = expected_rows(rows, shards, uneven)
            assert length(value) == rows
            made = shard(value, share_rows(rows, shards, uneven))
            assert len(made) == shards, case
            for one, rows_of_shard in zip(made, numbers, strict=True):
                assert same(one, pick(value, rows_of_shard)), case
            if uneven == "pad":
                kept = [
                    trim(one, len(n), r)
                    for one, n, r in zip(made, numbers, real, strict=True)
                    if r or (n and kind not in NO_EMPTY_SHARD)
                ]
                made = kept or made
            assert same(join(made), value), case
            assert same(value, before), f"{case}: the caller's object was changed"

    def test_cut_takes_a_range_of_rows(self, kind):
        value = batches(7)[kind]
        assert same(cut(value, 2, 5), pick(value, [2, 3, 4]))
        assert same(cut(value, 0, 7), value)

    def test_trim_keeps_m_rows_for_each_row(self, kind):
        result = batches(12)[kind]  # three rows for each of the shard's four
        assert same(trim(result, 4, 2), pick(result, range(6)))
        assert same(trim(result, 4, 4), result)

    def test_trim_rejects_other_numbers_of_rows(self, kind):
        with pytest.raises(BatchError, match=r"7 rows.*not a multiple of the shard's 3"):
            trim(batches(7)[kind], 3, 2)

    def test_joining_does_not_change_its_inputs(self, kind):
        made = [batches(2)[kind], batches(3)[kind]]
        before = copy.deepcopy(made)
        assert same(join(made), concat(made))
        assert same(made, before)
        assert [rows_in(one) for one in made] == [2, 3]


class TestWhole:
    @pytest.mark.parametrize(
        "value",
        [
            *(None, True, 3, 2.5, 1j, Decimal("1.5"), "text", "", b"bytes", Colour.RED),
            *(torch.tensor(3.0), np.array(3), np.float32(2), np.int64(1), np.bool_(True)),
            *(torch.float32, torch.device("cpu"), Broadcast([1, 2, 3]), Path("x")),
            *(SamplingParams(stop_token_ids=(1, 2)), Sizes(), Sizes(inner=Sizes(), options={"a": {"b": 1}})),
            *(read_args(), OmegaConf.create(["a", "b"]), Namespace(lr=1.0, name="x")),
        ],
        ids=lambda value: f"{value!r:.40}",
    )
    def test_values_sent_whole_have_no_rows(self, value):
        assert length(value) is None
        assert shard(value, share_rows(4, 2))[0] is (value.value if isinstance(value, Broadcast) else value)

    @pytest.mark.parametrize(
        "part", [[1, 2], torch.zeros(2), np.zeros(2), (torch.zeros(2),), {"a": [1]}, Broadcast([1])]
    )
    @pytest.mark.parametrize("cls", [Namespace, Sizes])
    def test_settings_with_something_that_may_have_rows_are_refused(self, cls, part):
        with pytest.raises(BatchError, match="cannot be cut into rows"):
            length(cls(inner=part))

    def test_dict_values_without_rows_are_in_every_shard(self):
        value = {"ids": [1, 2, 3, 4], "name": "x", "scale": torch.tensor(2.0), "all": Broadcast([9, 9, 9])}
        assert length(value) == 4
        made = shard(value, share_rows(4, 2))
        assert [one["ids"] for one in made] == [[1, 2], [3, 4]]
        for one in made:
            assert one["name"] == "x"
            assert one["scale"] is value["scale"]
            assert one["all"] == [9, 9, 9]
        assert type(value["all"]) is Broadcast

    def test_dict_without_rows_has_no_length(self):
        assert length({}) is None
        assert length({"a": None, "b": {"c": 1.0}}) is None

    def test_all_none_joins_to_none(self):
        assert join([None, None]) is None
        assert trim(None, 3, 1) is None


def _type_name(value):
    return getattr(value, "__name__", type(value).__name__)


class TestRejected:
    @pytest.mark.parametrize(
        "value", [object(), {1, 2}, len, int, Sizes, Lines(), Chunked, iter([1]), slice(3)], ids=_type_name
    )
    def test_values_that_cannot_be_split(self, value):
        with pytest.raises(BatchError, match="cannot be cut into rows"):
            length(value)

    def test_dict_with_values_of_different_lengths(self):
        with pytest.raises(BatchError) as caught:
            length({"a": [1, 2], "b": {"c": torch.zeros(2), "d": np.zeros(3)}})
        assert all(word in str(caught.value) for word in ("'c'", "2", "'d'", "3"))

    @pytest.mark.parametrize(
        ("values", "told"),
        [
            ([torch.zeros(1), None], ["Tensor", "None"]),
            ([None, torch.zeros(1)], ["Tensor", "None"]),
            ([torch.zeros(1), np.zeros(1)], ["Tensor", "ndarray"]),
            ([[1], {"a": [1]}], ["list", "dict"]),
            ([1.0, 2.0], ["float", "no rows"]),
            (["a", "b"], ["str", "no rows"]),
            ([torch.tensor(1.0), torch.tensor(2.0)], ["no rows"]),
            ([{"a": [1]}, {"b": [1]}], ["keys", "a", "b"]),
            ([{"a": [1], "loss": 0.1}, {"a": [1], "loss": 0.2}], ["'loss'", "float"]),
            ([{"a": {"b": 1.0}}, {"a": {"b": 1.0}}], ["'a'", "'b'"]),
            ([torch.zeros(1, 2), torch.zeros(1, 3)], ["(1, 2)", "(1, 3)"]),
            ([np.zeros((1, 2)), np.zeros((1, 3))], ["(1, 2)", "(1, 3)"]),
            ([object(), object()], ["object"]),
        ],
    )
    def test_values_that_cannot_be_joined(self, values, told):
        with pytest.raises(BatchError) as caught:
            join(values)
        assert all(word in str(caught.value) for word in told), str(caught.value)

    def test_tensordicts_with_different_keys_cannot_be_joined(self):
        one, other = (TensorDict({key: torch.zeros(2)}, batch_size=[2]) for key in "ab")
        with pytest.raises(BatchError):
            join([one, other])

    @pytest.mark.parametrize("value", [1.0, "text", torch.tensor(1.0), {"loss": 0.5}], ids=repr)
    def test_padding_cannot_be_removed_from_values_without_rows(self, value):
        with pytest.raises(BatchError, match="no rows"):
            trim(value, 2, 1)

    def test_later_dict_with_values_of_different_lengths_cannot_be_joined(self):
        """Even if the columns have equally many rows together."""
        with pytest.raises(BatchError, match=r"'a' has 1 rows, 'b' has 2"):
            join([{"a": [1, 2], "b": [3, 4]}, {"a": [1], "b": [2, 3]}, {"a": [4, 5], "b": [6]}])


class TestDictsWithWholeValues:
    """A value that is sent whole beside rows is returned whole, so that join(cut(x)) == x."""

    WHOLE = {"text": "t", "number": 0.5, "nothing": None, "deep": {"scale": 2}}  # noqa: RUF012

    def test_join_undoes_split(self):
        value = {"rows": [1, 2, 3, 4], **self.WHOLE}
        assert join([cut(value, 0, 1), cut(value, 1, 4)]) == value

    def test_trim_keeps_whole_values(self):
        assert trim({"rows": [1, 2, 3, 4], **self.WHOLE}, 2, 1) == {"rows": [1, 2], **self.WHOLE}

    @pytest.mark.parametrize("make", [lambda: math.nan, lambda: torch.tensor(math.nan), lambda: np.float32("nan")])
    def test_nan_on_all_ranks_is_the_same(self, make):
        joined = join([{"rows": [1], "kl": make()}, {"rows": [2], "kl": make()}])
        assert joined["rows"] == [1, 2] and joined["kl"] != joined["kl"]

    def test_whole_values_must_not_differ_between_ranks(self):
        with pytest.raises(BatchError, match=r"'number'.*different values"):
            join([{"rows": [1], "number": 1}, {"rows": [2], "number": 2}])


def test_type_with_only_chunk_and_concat_is_cut_into_ranges_of_any_size():
    value = Chunked(range(8))
    for start in range(8):
        for stop in range(start + 1, 9):
            assert cut(value, start, stop).items == list(range(start, stop))
    assert trim(value, 4, 3).items == list(range(6))


class TestViews:
    @pytest.mark.parametrize("uneven", ["error", "ragged"])
    def test_shards_of_tensors_and_arrays_share_memory_with_the_batch(self, uneven):
        rows = 6 if uneven == "error" else 7
        tensor, array = torch.zeros(rows, 2), np.zeros((rows, 2))
        for k, one in enumerate(shard({"t": tensor, "a": array}, share_rows(rows, 3, uneven))):
            one["t"] += k + 1
            one["a"] += k + 1
        assert all((array != 0).flat)
        assert torch.equal(tensor, torch.from_numpy(array).float())

    def test_shards_of_tensordicts_share_memory_with_the_batch(self):
        value = TensorDict({"a": torch.zeros(4, 2)}, batch_size=[4])
        for one in shard(value, share_rows(4, 2)):
            one["a"] += 1
        assert bool((value["a"] == 1).all())

    def test_padding_copies_only_padded_shards(self):
        value = torch.arange(5)
        memory = [one.untyped_storage().data_ptr() for one in shard(value, share_rows(5, 3, "pad"))]
        own = value.untyped_storage().data_ptr()
        assert [pointer == own for pointer in memory] == [True, True, False]

    def test_shards_of_a_list_are_new_lists(self):
        value = [[0], [1]]
        made = shard(value, share_rows(2, 2))
        made[0].append("more")
        assert value == [[0], [1]]
        (only,) = shard(value, share_rows(2, 1))
        only.append("more")
        assert value == [[0], [1]]


class TestOtherContainers:
    def test_ordered_dict_stays_an_ordered_dict(self):
        value = OrderedDict(b=[1, 2], a=[3, 4])
        made = shard(value, share_rows(2, 2))
        assert made == [OrderedDict(b=[1], a=[3]), OrderedDict(b=[2], a=[4])]
        assert all(type(one) is OrderedDict for one in made)
        assert same(join(made), value)

    def test_defaultdict_keeps_its_factory(self):
        value = defaultdict(list, a=[1, 2])
        one = shard(value, share_rows(2, 2))[0]
        assert one["a"] == [1]
        assert one["new"] == []
        assert list(value) == ["a"]

    def test_tensorclass_is_a_batch(self):
        sample = tensorclass(type("Sample", (), {"__annotations__": {"x": torch.Tensor}}))
        value = sample(x=torch.arange(6).reshape(3, 2), batch_size=[3])
        made = shard(value, share_rows(3, 2, "pad"))
        assert [one.x.tolist() for one in made] == [[[0, 1], [2, 3]], [[4, 5], [0, 1]]]
        assert torch.equal(join([trim(p, 2, r) for p, r in zip(made, (2, 1), strict=True)]).x, value.x)


class TestUserTypes:
    def test_subclasses_of_a_registered_type_are_batches(self):
        class Special(Table):
            pass

        made = shard(Special([1, 2]), share_rows(2, 2))
        assert [type(one) for one in made] == [Special, Special]
        assert join(made).items == [1, 2]

    def test_second_registration_replaces_the_first(self):
        register_batch_type(Table, **{**table_functions(), "length": lambda table: 40})
        assert length(Table([])) == 40

    def test_registration_wins_over_the_protocol(self):
        register_batch_type(Sliced, **{**table_functions(), "length": lambda value: 2 * len(value.items)})
        assert length(Sliced([1, 2, 3])) == 6

    def test_registration_wins_over_a_type_that_was_a_batch_before(self):
        assert length(np.zeros(3)) == 3
        register_batch_type(np.ndarray, **{**table_functions(), "length": lambda array: 40})
        assert length(np.zeros(3)) == 40

    @pytest.mark.parametrize(("rows", "chunks"), [(6, 3), (7, 7)])
    def test_chunk_is_called_once(self, rows, chunks):
        class Counting(Chunked):
            asked: list[int] = []  # noqa: RUF012

            def chunk(self, n):
                self.asked.append(n)
                return super().chunk(n)

        shard(Counting(range(rows)), share_rows(rows, 3, "ragged"))
        assert Counting.asked == [chunks]

    @pytest.mark.parametrize(
        ("cls", "change", "told"),
        [
            ("Table", {}, "takes a class"),
            (Table, {"length": 3}, "length="),
            (Table, {"cut": None}, "cut="),
            (Table, {"join": "cat"}, "join="),
        ],
    )
    def test_invalid_registrations(self, cls, change, told):
        with pytest.raises(TypeError, match=told):
            register_batch_type(cls, **{**table_functions(), **change})


class TestDescribe:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (torch.zeros(2, 3), "Tensor of shape (2, 3)"),
            (np.zeros(4), "ndarray of shape (4,)"),
            ([1, 2], "list of length 2"),
            (None, "None"),
            (3, "int 3"),
            (object(), "object"),
        ],
    )
    def test_short_description(self, value, text):
        assert describe(value) == text

    def test_long_strings_are_shortened(self):
        assert len(describe("x" * 1000)) < 60

    @pytest.mark.parametrize("shape", [7, "text-like", lambda: (1, 2)])
    def test_shape_attribute_may_be_anything(self, shape):
        thing = type("Blob", (), {"shape": staticmethod(shape) if callable(shape) else shape})()
        assert "Blob" in describe(thing)


def test_values_can_be_measured_before_torch_is_imported(monkeypatch):
    for name in ("torch", "numpy", "tensordict"):
        monkeypatch.delitem(sys.modules, name)
    assert length({"a": [1, 2], "b": "x"}) == 2
    assert join([[1], [2]]) == [1, 2]


def test_library_that_another_thread_imports_is_not_looked_into(tmp_path, monkeypatch):
    """Its classes are not there yet, and `sys.modules` has it already."""
    (tmp_path / "slow_library.py").write_text("import slow_events\nslow_events.begun.set()\nslow_events.go.wait(10)\n")
    events = types.SimpleNamespace(begun=threading.Event(), go=threading.Event())
    monkeypatch.setitem(sys.modules, "slow_events", events)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=importlib.import_module, args=("slow_library",))
    assert imported("slow_library") is None
    thread.start()
    assert events.begun.wait(10) and "slow_library" in sys.modules
    assert imported("slow_library") is None
    events.go.set()
    thread.join(10)
    assert imported("slow_library") is sys.modules.pop("slow_library")


class Counted(dict):
    """Has state of its own, and no way to cut it."""

    def __init__(self, n, **fields):
        super().__init__(fields)
        self.n = n

    def __len__(self):
        return self.n


class Slotted(dict):
    __slots__ = ("n",)


class SlicedDict(Counted):
    def __getitem__(self, key):
        if isinstance(key, slice):
            found = {name: part[key] for name, part in self.items()}
            return type(self)(len(range(self.n)[key]), **found)
        return super().__getitem__(key)


class Catting(SlicedDict):
    @classmethod
    def cat(cls, parts):
        return cls(
            sum(part.n for part in parts), **{key: [one for part in parts for one in part[key]] for key in parts[0]}
        )


class Methods(dict):
    def total(self):
        return sum(map(len, self.values()))


class Attributes(dict):
    def __init__(self, **fields):
        super().__init__(fields)
        self.__dict__ = self


class TestDictsWithStateOfTheirOwn:
    @pytest.mark.parametrize("make", [Counted, Slotted])
    def test_that_cannot_be_cut_are_refused(self, make):
        value = Counted(4, a=[1, 2, 3, 4]) if make is Counted else Slotted(a=[1, 2, 3, 4])
        value.n = 4
        with pytest.raises(BatchError, match=rf"'n'.*register_batch_type\({make.__name__}"):
            length(value)
        with pytest.raises(BatchError, match=rf"register_batch_type\({make.__name__}"):
            join([value, value])
        with pytest.raises(BatchError, match="register_batch_type"):
            length({"inner": value})

    def test_are_cut_by_their_own_slices(self):
        value = SlicedDict(4, a=[1, 2, 3, 4])
        shards = shard(value, share_rows(4, 2))
        assert [(type(one), one.n, len(one), dict(one)) for one in shards] == [
            (SlicedDict, 2, 2, {"a": [1, 2]}),
            (SlicedDict, 2, 2, {"a": [3, 4]}),
        ]
        with pytest.raises(BatchError, match=r"register_batch_type\(SlicedDict"):
            join(shards)

    def test_are_joined_by_their_own_cat(self):
        joined = join(shard(Catting(5, a=[1, 2, 3, 4, 5]), share_rows(5, 2, "ragged")))
        assert (type(joined), joined.n, dict(joined)) == (Catting, 5, {"a": [1, 2, 3, 4, 5]})

    @pytest.mark.parametrize("make", [Methods, Attributes, OrderedDict])
    def test_others_are_cut_field_by_field(self, make):
        shards = shard(make(a=[1, 2], b=[3, 4]), share_rows(2, 2))
        assert [(type(one), dict(one)) for one in shards] == [
            (make, {"a": [1], "b": [3]}),
            (make, {"a": [2], "b": [4]}),
        ]
        assert dict(join(shards)) == {"a": [1, 2], "b": [3, 4]}


def test_empty_part_has_no_say_in_the_dtype():
    """A rank without rows returns what `torch.tensor([])` is: float32, in which large integers are others."""
    large = 2**40 + 1
    for first, empty in ((torch.tensor([large]), torch.tensor([])), (np.array([large]), np.array([], np.float32))):
        for parts in ([first, empty], [empty, first]):
            joined = join(parts)
            assert joined.dtype == first.dtype and joined.tolist() == [large]
    for parts in ([np.array([]), np.ones((2, 5))], [np.ones((2, 5)), np.array([])]):
        assert join(parts).shape == (2, 5)
    for made in (torch.zeros, np.zeros):
        assert join([made((2, 5)), made((0, 0))]).shape == join([made((0, 0)), made((2, 5))]).shape == (2, 5)


def test_counter_stays_what_it_is():
    counter = Counter(a=3, b=1)
    assert cut(counter, 0, 0) == counter and type(cut(counter, 0, 0)) is Counter
    assert [part["n"] for part in shard({"x": np.arange(2), "n": counter}, share_rows(2, 2))] == [counter] * 2
