"""Length, slice, concat and trim of everything that has rows.

A *batch* is a tensor, jagged or not, or an array (rows along dim 0), a TensorDict (rows along its first batch dim), a
list or tuple (rows are items), a dict or named tuple of those (field by field, all of one length), or a user's type: a
class with ``__len__``, ``chunk(n)`` and ``concat(list)``, or one given to `register_batch_type`. None, strings,
numbers, 0-d tensors, settings (see `_is_settings`) and `Broadcast` are not batches: every rank gets them whole.

`batch_type` alone decides what a value is. Torch, numpy and tensordict are looked up with `imported`: before somebody
imports them, no value of theirs can exist.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import numbers
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import PurePath
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast, get_args

from dispatch import jagged
from dispatch.errors import BatchError
from dispatch.jagged import Made

T = TypeVar("T")

Uneven = Literal["error", "pad", "ragged"]
UNEVEN: tuple[str, ...] = get_args(Uneven)


class Broadcast(Generic[T]):
    """Marks an argument that every rank gets whole, whatever its type."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def as_argument(self) -> T:
        """This object itself, typed as its value: type checkers then take it as an argument of a typed call."""
        return cast(T, self)

    def __repr__(self) -> str:
        return f"Broadcast({type(self.value).__name__})"


class Deferred:
    """Base class of futures, by which planning recognizes them: the result of a call that may still be running.

    The driver cannot count the rows of such an argument before the call has ended that computes it. Planning leaves a
    `dispatch.plan.DeferredArgument` in its place, and each rank fetches its own rows.
    """

    label: str  # the method that computes the result, for messages
    computed_here = False  # whether this process itself computes the result, so that an argument is its value

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result, and return it."""
        raise NotImplementedError

    @property
    def failed(self) -> Exception | None:
        """The error of the call that computes the result, if it is known to have failed."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the call has ended that computes the result, with or without an error."""
        raise NotImplementedError

    def hand_on(self) -> None:
        """Do not log the error of the call that computes the result as unhandled: another call raises it."""

    def source(self) -> tuple[Any, Any]:
        """The results, as `single_controller.call.joining.CallResults`, and the `dispatch.modes.Join` that makes one
        value of them. Does not wait."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether the call that computes the result is known to have ended."""
        raise NotImplementedError

    def when_ended(self, tell: Callable[[bool], object]) -> None:
        """Call a function once that call has ended, with whether it is known to have failed. In any thread, which may
        wait if there are large results."""
        raise NotImplementedError


# --- which type a value has -------------------------------------------------------------------------------


@dataclass(eq=False)
class BatchType:
    """How values of one type are measured, cut and joined."""

    length: Callable[[Any], int | None]  # value -> number of rows; None for a value that is sent whole
    # (value, start, stop) -> rows ``start:stop``. It must not change the value; it may return a view.
    cut: Callable[[Any, int, int], Any]
    join: Callable[[list[Any]], Any]  # list of values -> one value with all their rows in order
    # Value -> its (key, value) pairs, or None; only for types whose parts are joined one by one
    parts: Callable[[Any], list[tuple[Any, Any]] | None] | None = None
    # What `join` raises for values that do not fit together, such as tensors of different shapes
    errors: tuple[type[Exception], ...] = ()


_user_types: dict[type, BatchType] = {}


def register_batch_type(
    cls: type,
    *,
    length: Callable[[Any], int],
    cut: Callable[[Any, int, int], Any],
    join: Callable[[list[Any]], Any],
) -> None:
    """Make instances of ``cls`` and its subclasses batches. A second call for a class replaces the first.

    Call it before you create the groups that use the type: their workers get it when they start.

    Args:
        cls: the class.
        length: value -> number of rows.
        cut: (value, start, stop) -> a value of rows ``start:stop``; it must not change its argument.
        join: list of values -> one value with all their rows in order.

    Raises:
        TypeError: ``cls`` is not a class, or one of the functions is not callable.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_batch_type() takes a class, got {cls!r}")
    for name, function in (("length", length), ("cut", cut), ("join", join)):
        if not callable(function):
            raise TypeError(f"register_batch_type({cls.__name__}): {name}= must be callable, got {function!r}")
    _user_types[cls] = BatchType(length, cut, join)


def user_batch_types() -> dict[type, BatchType]:
    """The types registered in this process with `register_batch_type`."""
    return dict(_user_types)


def imported(name: str) -> Any:
    """Return a module if it was imported, else None. Also None while another thread imports it: its classes may not
    exist yet, and no value of theirs does."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def batch_type(value: Any) -> BatchType:
    """How ``value`` is measured, cut and joined. Every function of this module asks here, and nowhere else."""
    cls = type(value)
    if _user_types:
        for base in cls.__mro__:
            if base in _user_types:
                return _user_types[base]
    found = _known_types.get(cls) or _find_type(value)
    # The only types of which some values have rows and others do not.
    if found is _TENSOR:
        return _NESTED if value.is_nested else _TENSOR if value.ndim else _WHOLE
    return _WHOLE if found is _NDARRAY and not value.ndim else found


def _find_type(value: Any) -> BatchType:
    """`batch_type` by ``isinstance``, for values whose class is not in the table. Adds the classes of libraries."""
    if isinstance(value, (str, bytes, numbers.Number, enum.Enum)):
        return _WHOLE
    if isinstance(value, (list, tuple)):
        return _FIELDS if fields_of(value) else _SEQUENCE
    if isinstance(value, range):
        return _RANGE
    found = _library_type(value)
    if found is not None:
        if type(value).__module__.partition(".")[0] in _LIBRARIES:  # classes of users come and go: keep none alive
            _known_types[type(value)] = found
        return found
    if isinstance(value, dict):
        cuts_itself = _chunks_itself(value) or (type(value).__getitem__ is not dict.__getitem__ and _own_state(value))
        return _OWN if cuts_itself else _FIELDS
    if not isinstance(value, type) and hasattr(value, "__len__") and _chunks_itself(value):
        return _OWN
    return _WHOLE if _is_settings(value) else _UNKNOWN


def _is_settings(value: Any) -> bool:
    """Whether no mode could mean to cut a value: a configuration of OmegaConf or argparse, a path, or a dataclass such
    as `SamplingParams`. One with anything in it that may have rows is refused, as any other object."""
    if isinstance(value, (argparse.Namespace, PurePath)):
        return isinstance(value, PurePath) or all(map(_has_no_rows, vars(value).values()))
    omegaconf = imported("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return True
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or hasattr(value, "__len__"):
        return False
    return all(_has_no_rows(getattr(value, item.name, None)) for item in dataclasses.fields(value))


def _has_no_rows(value: Any) -> bool:
    """Whether a field is a setting. Tuples of strings and numbers are; lists and dicts with lists may be rows."""
    if isinstance(value, dict):
        return all(map(_has_no_rows, value.values()))
    if type(value) in (tuple, frozenset):
        return all(isinstance(item, (str, numbers.Number, enum.Enum)) for item in value)
    return batch_type(value) is _WHOLE and not isinstance(value, Broadcast)


def _library_type(value: Any) -> BatchType | None:
    torch, numpy, tensordict = map(imported, _LIBRARIES)
    if torch is not None and isinstance(value, torch.Tensor):
        return _JAGGED if type(value) is not torch.Tensor and jagged.is_jagged(value) else _TENSOR
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _NDARRAY
    if tensordict is not None and (isinstance(value, tensordict.TensorDictBase) or tensordict.is_tensorclass(value)):
        return _TENSORDICT
    if torch is not None and isinstance(value, (torch.dtype, torch.device)):
        return _WHOLE
    return _WHOLE if numpy is not None and isinstance(value, numpy.generic) else None


# --- which rows a shard has ---------------------------------------------------------------------------------


class Share(NamedTuple):
    """The rows of one shard."""

    ranges: tuple[tuple[int, int], ...]  # half-open ranges of row numbers, in order; more than one only with padding
    real: int  # number of rows without padding. The padding is at the end and repeats earlier rows.
    rows: int  # number of rows with padding


def share_rows(rows: int, shards: int, uneven: str = "error") -> list[Share]:
    """Divide ``rows`` over ``shards``, in order.

    Args:
        rows: rows of the whole batch.
        shards: number of shards, at least 1.
        uneven: what to do if the rows do not divide. ``"error"`` raises a `BatchError`; ``"pad"`` repeats rows from the
            start until they do; ``"ragged"`` makes shards whose sizes differ by at most one, larger ones first.
    """
    size, rest = divmod(rows, shards)
    if rest == 0:
        return [Share(((k * size, (k + 1) * size),), size, size) for k in range(shards)]
    if uneven == "ragged":
        starts = [k * size + min(k, rest) for k in range(shards + 1)]
        return [Share(((a, b),), b - a, b - a) for a, b in pairwise(starts)]
    if uneven == "pad":
        size += 1
        return [_padded_share(rows, k * size, (k + 1) * size) for k in range(shards)]
    raise BatchError(f"{rows} rows do not divide over {shards}")


def _padded_share(rows: int, start: int, stop: int) -> Share:
    """Rows ``start:stop`` of the batch repeated endlessly."""
    real = max(0, min(stop, rows) - start)
    padded = stop - start
    ranges: list[tuple[int, int]] = []
    while start < stop:
        first = start % rows
        last = min(rows, first + stop - start)
        ranges.append((first, last))
        start += last - first
    return Share(tuple(ranges), real, padded)


# --- measure, cut, join -----------------------------------------------------------------------------------


def length(value: Any) -> int | None:
    """Number of rows of a batch; None for a value that is sent whole. A `BatchError` if it is neither, or if the fields
    of a dict differ in length."""
    return batch_type(value).length(value)


def shard(value: Any, shares: Sequence[Share], made: Made | None = None) -> list[Any]:
    """Cut a batch into one shard per share, in the order of their rows. Shards are views where the type has views. A
    value that is sent whole, or such a field of a dict, is the same in every shard. ``made`` is the same dict for all
    batches of a call; see `jagged`."""
    made = {} if made is None else made
    found = batch_type(value)
    if found is _WHOLE:
        return [value.value if isinstance(value, Broadcast) else value] * len(shares)
    if found is _FIELDS:
        columns = {key: shard(part, shares, made) for key, part in fields_of(value) or ()}
        return [rebuild(value, {key: column[k] for key, column in columns.items()}) for k in range(len(shares))]
    # TensorDict itself cuts jagged entries only in its newest versions.
    if found is _TENSORDICT and (apart := {key: part for key, part in _entries(value) or () if _has_jagged(part)}):
        columns = {key: shard(part, shares, made) for key, part in apart.items()}
        rest = shard(value.exclude(*apart), shares, made)
        return [_with_entries(one, {key: column[k] for key, column in columns.items()}) for k, one in enumerate(rest)]
    rows = shares[0].rows * len(shares)
    if (
        found is _OWN
        and _chunks_itself(value)
        and len(shares) > 1
        and rows == len(value) > 0
        and shares == share_rows(rows, len(shares))
    ):
        chunks = list(value.chunk(len(shares)))
        if len(chunks) != len(shares):
            raise BatchError(f"its chunk({len(shares)}) returned {len(chunks)} chunks")
        return chunks
    ranges = [part for share in shares for part in share.ranges]
    sizes = [stop - start for start, stop in ranges]
    # The same views as one slice per range, in half the time. Autograd forbids in-place changes of what split() returns
    # for a tensor with a gradient; only strided tensors have split().
    splits = found is _TENSORDICT or (
        found is _TENSOR and not value.requires_grad and value.layout is sys.modules["torch"].strided
    )
    if found is _JAGGED:
        cuts = jagged.split(value, ranges, made)
    elif splits and all(sizes) and sum(sizes) == found.length(value):
        cuts = list(value.split(sizes))
    elif found is _OWN:
        one_by_one: list[Any] = []  # single rows, which the first range that needs them puts there
        cuts = [_own_rows(value, start, stop, one_by_one) for start, stop in ranges]
    else:
        cuts = [found.cut(value, start, stop) for start, stop in ranges]
    if len(ranges) == len(shares):
        return cuts
    left = iter(cuts)  # with padding, a shard may have several ranges
    return [join([next(left) for _ in share.ranges], made) if len(share.ranges) > 1 else next(left) for share in shares]


def cut(value: Any, start: int, stop: int, made: Made | None = None) -> Any:
    """Rows ``start:stop`` of a batch."""
    return shard(value, [Share(((start, stop),), stop - start, stop - start)], made)[0]


def join(values: Sequence[Any], made: Made | None = None) -> Any:
    """Concatenate batches in order. If all values are None, the result is None. A `BatchError` if they do not fit."""
    made = {} if made is None else made
    first, found = values[0], batch_type(values[0])
    if first is None and all(value is None for value in values):
        return None
    for value in values:
        if type(value) is not type(first) and (found in _ONE_CLASS or batch_type(value) is not found):
            raise BatchError(f"{describe(first)} and {describe(value)} cannot be joined")
    values = list(values)
    if found in (_TENSOR, _NDARRAY) and len({(value.dtype, tuple(value.shape[1:])) for value in values}) > 1:
        # A rank without rows makes its empty result of any dtype and shape, which has no say.
        values = [value for value in values if value.shape[:1] != (0,)] or values
    try:
        if found is _FIELDS:
            return _join_fields(values, made)
        if found is _TENSORDICT:
            return _join_tensordicts(values, made)
        if found is _JAGGED:
            return jagged.join(values, made, _concatenate or _join_tensors)
        if found is _TENSOR and _concatenate is not None:
            nbytes = sum(value.numel() for value in values) * values[0].element_size()
            return (_concatenate if nbytes >= _concatenate_least else sys.modules["torch"].cat)(values)
        return found.join(values)
    except found.errors as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in values[:8])
        raise BatchError(f"{type(first).__name__}s of shapes {shapes} cannot be joined: {error}") from error


def concatenate_tensors_with(function: Callable[..., Any], nbytes: int = 0) -> None:
    """Have `join` call ``function(tensors, dim=0)`` instead of ``torch.cat`` for tensors that have ``nbytes`` together,
    for example to reuse memory. It must return new memory, and raise what torch raises."""
    global _concatenate, _concatenate_least
    _concatenate, _concatenate_least = function, nbytes


_concatenate: Callable[..., Any] | None = None
_concatenate_least = 0


def trim(value: Any, rows: int, real: int, made: Made | None = None) -> Any:
    """Remove the padding from the result for a shard of ``rows`` rows with it, and ``real`` without. If the result has
    m times as many rows, there are m for each row of the shard. A `BatchError` if the result has no rows, or a number
    that is not a multiple of the shard's."""
    made = {} if made is None else made
    if value is None:
        return None
    found = batch_type(value)
    returned = None if found is _UNKNOWN else found.length(value)
    if returned is None:
        raise BatchError(f"{describe(value)} has no rows, so its padding cannot be removed")
    if found is _FIELDS:
        fields = fields_of(value) or ()
        return rebuild(value, {k: part if length(part) is None else trim(part, rows, real, made) for k, part in fields})
    if returned % rows:
        raise BatchError(
            f"the result has {returned} rows, not a multiple of the shard's {rows}, so its padding cannot be removed"
        )
    return cut(value, 0, returned // rows * real, made)


def joins_into_new_memory(value: Any) -> bool:
    """Whether `join` copies the rows of the value or of a part of it, even of a single value. True for tensors, arrays,
    and dicts and TensorDicts with one."""
    found = batch_type(value)
    if found is _TENSOR:
        return type(value) is sys.modules["torch"].Tensor and value.layout is sys.modules["torch"].strided
    if found is _NDARRAY:
        return type(value) is sys.modules["numpy"].ndarray and not value.dtype.hasobject
    if found is _JAGGED or found.parts is None:
        return found is _JAGGED
    return any(joins_into_new_memory(part) for _, part in found.parts(value) or ())


def copy_the_rest(value: Any, copy: Callable[[Any], Any]) -> Any:
    """Replace the parts of a value that `join` does not copy by copies, unless they are made of strings and numbers."""
    found = batch_type(value)
    parts = found.parts(value) if found.parts is not None else None
    if parts is None:
        return value if joins_into_new_memory(value) or _is_immutable(value) else copy(value)
    copied = {key: copy_the_rest(part, copy) for key, part in parts}
    if all(copied[key] is part for key, part in parts):
        return value
    return _with_entries(value, copied) if found is _TENSORDICT else rebuild(value, copied)


def _is_immutable(value: Any) -> bool:
    """Whether a value, or each item of a list or dict, is a string, a number or the like. They hold no buffers."""
    if value is None or isinstance(value, (str, bytes, int, float, enum.Enum)):
        return True
    if type(value) in (list, tuple, set):
        return all(map(_is_immutable, value))
    if type(value) is dict:
        return all(map(_is_immutable, chain(value.keys(), value.values())))
    tensordict = imported("tensordict")
    if tensordict is not None and isinstance(value, tensordict.NonTensorData):
        return _is_immutable(value.data)
    return tensordict is not None and isinstance(value, tensordict.NonTensorStack) and _is_immutable(value.tolist())


# --- for messages -----------------------------------------------------------------------------------------


def described(value: Any) -> str:
    """`describe` with an article, to follow "is"."""
    text = describe(value)
    return text if value is None else f"{'an' if text[0].lower() in 'aeio' else 'a'} {text}"


def describe(value: Any) -> str:
    """Describe a value for an error message: its type, and its size if it has one."""
    name = type(value).__name__
    try:
        shape = getattr(value, "shape", None)
    except Exception:  # a nested tensor has none
        shape = None
    if isinstance(shape, tuple):  # torch.Size is one
        return f"{name} of shape {tuple(shape)}"
    if value is None:
        return "None"
    if isinstance(value, (str, int, float)):
        text = repr(value)
        return f"{name} {text if len(text) <= 40 else text[:37] + '...'}"
    try:
        return f"{name} of length {len(value)}"
    except Exception:  # it has none, or its type does not tell
        return name


# --- dicts and named tuples: field by field ---------------------------------------------------------------


def fields_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a dict or named tuple; None for anything else."""
    if isinstance(value, dict):
        return list(value.items())
    names = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return list(zip(names, value, strict=True))
    return None


def rebuild(like: Any, fields: dict[Any, Any]) -> Any:
    """A dict or named tuple of the same type with other values."""
    if isinstance(like, tuple):
        return type(like)(**fields)
    if type(like) is dict:
        return fields
    other = copy.copy(like)
    for name, value in fields.items():  # `Counter.update` would add
        other[name] = value
    return other


def _own_state(value: Any) -> list[str]:
    """The attributes of a dict that are not items too. Every shard would have those of the whole."""
    if type(value) is dict or not isinstance(value, dict):
        return []
    names = [*getattr(value, "__dict__", ())]
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith("__") and hasattr(value, name) and name not in value]


def _fields_length(value: Any) -> int | None:
    if state := _own_state(value):
        raise BatchError(
            f"{describe(value)} has state of its own beside its items, {', '.join(map(repr, state))}, and no way to "
            f"cut it. Tell how with register_batch_type({type(value).__name__}, ...), or pass a dict"
        )
    rows: int | None = None
    first: Any = None
    for key, part in fields_of(value) or ():
        if isinstance(part, Deferred):
            raise BatchError(
                f"it has a future at {key!r}, which a method with materialize_futures=False gets as it is; pass it as "
                "an argument of its own"
            )
        part_rows = length(part)
        if part_rows is None:
            continue
        if rows is None:
            rows, first = part_rows, key
        elif rows != part_rows:
            raise BatchError(f"its values differ in length: {first!r} has {rows} rows, {key!r} has {part_rows}")
    return rows


def _join_fields(values: list[Any], made: Made) -> Any:
    lengths = [length(value) for value in values]  # of each: columns that differ in length would pair the wrong rows
    has_rows = lengths[0] is not None

    def join_column(column: list[Any]) -> Any:
        return _same_on_all(column) if has_rows and length(column[0]) is None else join(column, made)

    return rebuild(values[0], _by_key([dict(fields_of(value) or ()) for value in values], join_column))


def _by_key(values: list[dict[Any, Any]], function: Callable[[list[Any]], Any]) -> dict[Any, Any]:
    """Key -> the function's result for the values of the key; a `BatchError` if the values have different keys."""
    keys = values[0].keys()
    for value in values:
        if value.keys() != keys:
            raise BatchError(f"they have different keys: {sorted(map(str, keys ^ value.keys()))}")
    results = {}
    for key in keys:
        try:
            results[key] = function([value[key] for value in values])
        except BatchError as error:
            raise BatchError(f"at {key!r}: {error}") from None
    return results


def _same_on_all(parts: list[Any]) -> Any:
    """A field without rows is returned unchanged if all ranks agree on it."""

    def agrees(part: Any) -> bool:  # two NaNs do
        return type(part) is type(parts[0]) and bool(part == parts[0] or (part != part and parts[0] != parts[0]))

    try:
        same = all(map(agrees, parts))
    except Exception:  # a type whose == has no truth value
        same = False
    if not same:
        raise BatchError(f"{describe(parts[0])} has no rows to join, and the ranks returned different values")
    return parts[0]


# --- lists, tensors, arrays -------------------------------------------------------------------------------


def _slice(value: Any, start: int, stop: int) -> Any:
    return value[start:stop]


def _join_sequence(values: list[Any]) -> Any:
    if any(fields_of(value) for value in values):
        raise BatchError("named tuples and plain tuples cannot be joined")
    return type(values[0])(chain.from_iterable(values))


def _join_tensors(tensors: list[Any], dim: int = 0) -> Any:
    return sys.modules["torch"].cat(tensors, dim)


def _join_ndarrays(values: list[Any]) -> Any:
    numpy = sys.modules["numpy"]
    masked = any(isinstance(value, numpy.ma.MaskedArray) for value in values)
    return (numpy.ma if masked else numpy).concatenate(values, axis=0)


# --- TensorDicts: entry by entry --------------------------------------------------------------------------


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    return list(value.items()) if type(value) is sys.modules["tensordict"].TensorDict else None


def _has_jagged(part: Any) -> bool:
    found = batch_type(part)
    if found is _JAGGED or found.parts is None:
        return found is _JAGGED
    return any(_has_jagged(entry) for _, entry in found.parts(part) or ())


def _with_entries(value: Any, entries: dict[Any, Any]) -> Any:
    """A TensorDict with the entries of another and these."""
    other = value.copy()
    for key, part in entries.items():
        other.set(key, part)
    return other


def _tensordict_rows(value: Any) -> int:
    if not value.batch_size:
        raise BatchError(f"{type(value).__name__} has no batch dim to cut; set batch_size=[rows]")
    return int(value.batch_size[0])


def _join_tensordicts(values: list[Any], made: Made) -> Any:
    """Join the tensors entry by entry, and leave the other entries to TensorDict."""
    for value in values:
        _tensordict_rows(value)
    entries = [_entries(value) for value in values]
    if not all(entries):
        return _TENSOR.join(values)
    columns: dict[Any, list[Any]] = _by_key([dict(parts or ()) for parts in entries], list)
    own = {key: column for key, column in columns.items() if all(map(joins_into_new_memory, column))}
    rest = _TENSOR.join([value.exclude(*own) for value in values])
    return _with_entries(rest, _by_key([own], lambda column: join(column[0], made)))


# --- types that chunk or slice themselves -----------------------------------------------------------------


def _chunks_itself(value: Any) -> bool:
    return hasattr(value, "chunk") and _own_concat(value) is not None


def _own_concat(value: Any) -> Callable[[list[Any]], Any] | None:
    return getattr(type(value), "concat", None) or getattr(type(value), "cat", None)


def _own_rows(value: Any, start: int, stop: int, one_by_one: list[Any]) -> Any:
    """Rows by the type's own slicing, if that gives them, else row by row with its ``chunk``, which is called once."""
    if start == 0 and stop == len(value):
        return value
    try:
        rows = value[start:stop]
    except Exception:  # a user's __getitem__ may raise anything for a slice: the type does not slice
        rows = None
    if type(rows) is type(value) and len(rows) == stop - start:
        return rows
    if not _chunks_itself(value):
        raise BatchError(
            f"{describe(value)} has state of its own beside its items, and slicing it does not give its rows. Tell how "
            f"to cut it with register_batch_type({type(value).__name__}, ...)"
        )
    if not one_by_one:
        one_by_one += value.chunk(len(value))
    if not (chunks := one_by_one[start:stop]):
        raise BatchError(f"{type(value).__name__} has chunk() but no slicing, so no empty shard can be made")
    return _join_own(chunks)


def _join_own(values: list[Any]) -> Any:
    concat = _own_concat(values[0])
    if concat is None:
        raise BatchError(
            f"{describe(values[0])} has neither concat() nor cat(). Tell how to join it with "
            f"register_batch_type({type(values[0]).__name__}, ...)"
        )
    return concat(values)


# --- the table --------------------------------------------------------------------------------------------


def _refuse(what: str) -> Callable[..., Any]:
    """What measures, cuts or joins values of which that cannot be done."""

    def refuse(value: Any, *_: int) -> Any:
        raise BatchError(f"{describe(value[0] if type(value) is list else value)} {what}")

    return refuse


_TORCH_ERRORS = (RuntimeError, TypeError, KeyError)

_UNCUT = _refuse("cannot be cut into rows")
_WHOLE = BatchType(lambda value: None, _UNCUT, _refuse("has no rows to join"))
_UNKNOWN = BatchType(_UNCUT, _UNCUT, _refuse("cannot be joined"))
_SEQUENCE = BatchType(len, _slice, _join_sequence)
_RANGE = BatchType(len, _slice, lambda ranges: list(chain.from_iterable(ranges)))
_TENSOR = BatchType(len, _slice, _join_tensors, errors=_TORCH_ERRORS)
_LAYOUT = _refuse("of this layout cannot be sliced; create it with layout=torch.jagged")
_NESTED = BatchType(_LAYOUT, _LAYOUT, _LAYOUT)
_NDARRAY = BatchType(len, _slice, _join_ndarrays, errors=(ValueError, TypeError))
_OWN = BatchType(len, cut, _join_own)
# Those that `shard` and `join` pass the dict `made`, because they are jagged tensors or may have some in them.
_JAGGED = BatchType(jagged.length, cut, join, errors=_TORCH_ERRORS)
_FIELDS = BatchType(_fields_length, cut, join, fields_of)
_TENSORDICT = BatchType(_tensordict_rows, _slice, join, _entries, _TORCH_ERRORS)

_ONE_CLASS = (_WHOLE, _UNKNOWN, _FIELDS)
"""Types of which only values of one class can be joined."""

_LIBRARIES = ("torch", "numpy", "tensordict")

_known_types: dict[type, BatchType] = {
    **dict.fromkeys((type(None), str, bytes, bool, int, float, Broadcast), _WHOLE),
    **dict.fromkeys((list, tuple), _SEQUENCE),
    dict: _FIELDS,
}
"""The types of classes. `_find_type` adds those of torch, numpy and tensordict when it sees their first value."""
