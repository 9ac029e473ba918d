"""Codec: the serialization of arguments, results and messages.

A value is encoded once into an `Encoded`: a pickle, the raw buffers of its contiguous tensors and arrays, and the
references in it. Buffers travel out of band: Ray writes them into its store without a further copy, and a reader maps
them. Ray by itself would pickle a tensor in band, together with the whole storage behind a view.

Memory of the store is shared between processes and not protected against writes. Decoding therefore copies the buffers,
unless the reader asks for views.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch import jagged
from dispatch.batch import Deferred, described
from dispatch.errors import DispatchError, ResultError
from dispatch.modes import Join
from dispatch.plan import CallPlan, Parameter
from dispatch.register import MethodSpec
from single_controller.call.buffer_pool import MIN_BYTES, buffer_pool

if TYPE_CHECKING:
    import numpy

MAX_INLINE_BYTES = (1 << 20) + (1 << 16)
"""Arguments and results of a rank up to this size are sent inside the message: 1 MiB, and what describes it. Larger
ones are stored once, and the message contains a reference. Measured with four ranks on one host, inside the message and
with the store: an echo of 512 KiB per rank takes 6 ms and 26 ms, one of 2 MiB 20 ms and 30 ms; an argument of 1 MiB
that all ranks read takes 7 ms and 9 ms, one of 4 MiB 20 ms and 12 ms. Not more, because what is inside a message is in
the driver's own memory, from which, unlike the store, nothing is spilled to disk."""

MAX_TASK_BYTES = 96 * 1024
"""Data that is sent to ranks through Ray, such as arguments with references, is stored first if it is larger than this.
From 100 KiB on, Ray itself would store an argument, once for each task."""

MAX_MAPPED_BYTES = 1 << 30
"""Bytes of shared memory that results may keep mapped in this process. Further results are copied out of it."""


# --- values -------------------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """An encoded value."""

    header: bytes  # the pickle of the value without its buffers
    # The buffers: instances of ``pickle.PickleBuffer`` until they are sent, then whatever has the buffer protocol
    buffers: tuple[Any, ...] = ()
    # Objects that travel beside the pickle, such as ObjectRefs and actor handles: the transport must see them to count
    # references
    references: tuple[Any, ...] = ()
    nbytes: int = 0  # size in bytes

    def decode(self, *, private: bool = True) -> Any:
        """Return the value; ``private``: copy tensors and arrays into memory of their own. Otherwise they share the
        buffers' memory and must not be written to."""
        # Restored behind it, because unpickling a value may decode another one in this thread.
        before = getattr(_decoding, "current", None)
        _decoding.current = (private, self.references)
        try:
            return pickle.loads(self.header, buffers=self.buffers)
        finally:
            _decoding.current = before

    def as_kept(self) -> KeptResult:
        """The same for `ray.get`, which decodes it."""
        return KeptResult(*self)


class KeptResult(Encoded):
    """A result behind a reference that users hold: ``ray.get`` of it returns the decoded value."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _decode_kept, (self.header, tuple(map(pickle.PickleBuffer, self.buffers)), *self[2:])


@contextmanager
def keep_encoded() -> Iterator[None]:
    """Inside, unpickling a `KeptResult` in this thread returns it undecoded."""
    _decoding.keep = True
    try:
        yield
    finally:
        _decoding.keep = False


class CallMessage(NamedTuple):
    """What a rank is told about a call, besides the arguments."""

    method: str
    role: str | None = None  # role of the worker, if several share the process
    collects: bool = True  # whether the driver wants this rank's result
    joins: bool = False  # whether results are joined along rows, so that padding must be removed
    private: bool = True  # whether the arguments are copied into memory of the method's own
    rows: int | None = None  # rows of this rank's shard, padding included
    real: int | None = None  # rows of this rank's shard without padding
    device: str | None = None  # device to move the arguments' tensors to; None leaves them where they are
    members: bytes | None = None  # of the group as the driver knows it; see `RankInfo`


SEPARATE = 0
"""Stands in a message for arguments that are sent beside it. None means no arguments."""


class FutureInside(Exception):
    """An argument has a future in it that `dispatch.plan.find_futures` has to find."""


def encode(value: Any, *, in_process: bool = False, futures: bool = True) -> Encoded:
    """Encode a value.

    Args:
        value: the value. Its tensors and arrays are not copied: the result refers to their memory.
        in_process: the readers are in this process. They would see what the owner of the value writes later, so the
            buffers are copied. The value may contain references that are valid only in this process.
        futures: whether futures may be in it.

    Raises:
        FutureInside: one is, and may not.
        Exception: whatever pickle raises for a part that cannot be pickled.
    """
    out = io.BytesIO()
    buffers: list[Any] = []
    if _encoder is None:
        import cloudpickle  # imported here: a process whose transport has its own copy does not need it

        use_pickler(cloudpickle.CloudPickler)
    encoder = _encoder(out, protocol=5, buffer_callback=buffers.append)
    encoder.reference_types = _reference_types + _in_process_types if in_process else _reference_types
    if not futures:
        encoder.reference_types += (Deferred,)
    # Of this value alone: the numbers of references and the identities of tensors mean nothing in another one.
    encoder.references, encoder.seen, encoder.made = [], {}, {}
    encoder.dump(value)
    header, nbytes = out.getvalue(), sum(memoryview(buffer).nbytes for buffer in buffers)
    kept = tuple(map(_copy, buffers) if in_process else buffers)
    return Encoded(header, kept, tuple(encoder.references), len(header) + nbytes)


def private_copy(value: Any) -> Any:
    """Return a copy of a decoded value that shares no buffer with it."""
    return encode(value, in_process=True).decode(private=False)


def can_encode(value: Any, *, in_process: bool = False) -> bool:
    """Whether a value can be encoded. See `encode`."""
    try:
        encode(value, in_process=in_process)
    except Exception:
        return False
    return True


def use_pickler(pickler: type[Any]) -> None:
    """Set the base class of the encoder, a ``CloudPickler``. A transport that has its own copy of cloudpickle sets it:
    each copy keeps its own table of the classes that it pickled by value, so that a class of ``__main__`` would
    otherwise arrive as two distinct classes."""
    global _encoder
    _encoder = type("Encoder", (_Reducers, pickler), {})


def add_reference_types(*types: type[Any], in_process: bool = False) -> None:
    """Have instances of these types travel beside the pickle, in `Encoded.references`; with ``in_process``, only where
    the readers are in this process. Elsewhere, their own ``__reduce__`` decides."""
    global _reference_types, _in_process_types
    if in_process:
        _in_process_types = tuple(dict.fromkeys((*_in_process_types, *types)))
    else:
        _reference_types = tuple(dict.fromkeys((*_reference_types, *types)))


def is_reference(value: Any) -> bool:
    """Whether the type of a value was passed to `add_reference_types`, without ``in_process``."""
    return isinstance(value, _reference_types)


_encoder: Any = None
_reference_types: tuple[type[Any], ...] = ()
_in_process_types: tuple[type[Any], ...] = ()
_decoding = threading.local()
"""``current``: (private, references) of the `Encoded` being decoded in this thread. ``keep``: see `keep_encoded`."""


class _Reducers:
    """The part of the encoder that is ours: how tensors, arrays and references are reduced."""

    reference_types: tuple[type[Any], ...]
    references: list[Any]
    seen: dict[Any, Any]
    """Identity of a view -> the first tensor that was one."""
    made: jagged.Made
    """See `jagged`."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self.reference_types):
            if isinstance(obj, Deferred):
                raise FutureInside
            self.references.append(obj)
            return _nth_reference, (len(self.references) - 1,)
        # A value of these libraries exists only after somebody has imported them.
        modules: Any = sys.modules
        numpy, torch, tensordict = map(modules.get, ("numpy", "torch", "tensordict"))
        array: Any = getattr(numpy, "ndarray", ())
        if isinstance(obj, array) and _is_plain_array(numpy, obj):
            return _reduce_array(numpy, obj)
        if isinstance(obj, getattr(torch, "Tensor", ())):
            is_jagged = type(obj) is not torch.Tensor and jagged.is_jagged(obj)
            reduced = _reduce_jagged(obj, self.made) if is_jagged else _reduce_tensor(torch, obj, self.seen)
            if reduced is not None:
                return reduced
        tensors: Any = getattr(tensordict, "TensorDictBase", ())
        if isinstance(obj, tensors) and obj.device is not None and obj.device.type not in ("cpu", "meta"):
            return _identity, (obj.cpu(),)  # its tensors arrive on the CPU, and its device must say so
        return super().reducer_override(obj)  # type: ignore[misc]


def _is_plain_array(numpy: Any, array: numpy.ndarray) -> bool:
    """Whether bytes, dtype and shape are the whole array. True also for subclasses without state, such as memmap."""
    base, cls = numpy.ndarray, type(array)
    return cls.__reduce__ is base.__reduce__ and cls.__reduce_ex__ is base.__reduce_ex__ and not array.dtype.hasobject


def _identity(value: Any) -> Any:
    return value


def _reduce_array(numpy: Any, array: numpy.ndarray) -> tuple[Any, ...]:
    plain = array.view(numpy.ndarray)
    if not (plain.flags.c_contiguous or plain.flags.f_contiguous):
        plain = numpy.ascontiguousarray(plain)
    order = "C" if plain.flags.c_contiguous else "F"
    data: Any = plain.ravel(order="K").view(numpy.uint8)
    cls = None if type(array) is numpy.ndarray else type(array)
    return _make_array, (pickle.PickleBuffer(data), array.dtype, array.shape, order, cls)


def _reduce_tensor(torch: Any, tensor: Any, seen: dict[Any, Any]) -> tuple[Any, ...] | None:
    """Reduce a tensor of which bytes, dtype, shape and attributes are all, also one of a subclass that adds only
    methods; None for any other."""
    import numpy

    base, cls = torch.Tensor, type(tensor)
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.device.type == "meta"
        or cls.__reduce_ex__ is not base.__reduce_ex__
        or cls.__torch_dispatch__ is not base.__torch_dispatch__
        or getattr(cls, "__getstate__", None) is not getattr(base, "__getstate__", None)
    ):
        return None
    attributes = vars(tensor) or None
    if attributes is None and tensor.numel():
        # A batch passed for two parameters was cut into two views of the same memory; it is sent once.
        flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
        view = (cls, tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *flags)
        first = seen.setdefault(view, tensor)
        if first is not tensor:
            return _identity, (first,)
    # numpy takes no tensor with a gradient, on another device, or whose conjugation or sign is still to be applied.
    # contiguous() copies a view alone, not the storage behind it.
    plain = tensor.detach().as_subclass(base).cpu().resolve_conj().resolve_neg().contiguous()
    # Not `Tensor.numpy`, after which torch resizes the storage no more: the tensor may be a weight that is offloaded.
    data: Any = numpy.from_dlpack(plain.reshape(-1).view(torch.uint8))
    kind = None if cls is base else cls
    made = (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, kind)
    return _make_tensor, made, attributes, None, None, _set_attributes


_JAGGED_ATTRIBUTES = frozenset(
    {"_ragged_idx", "_size", "_strides", "_values", "_offsets", "_lengths", "_metadata_cache"}
    | {"_dynamo_propagated_dynamic_indices"}
)
"""What torch itself keeps on a jagged tensor."""


@jagged.without_torch_function
def _reduce_jagged(value: Any, made: jagged.Made) -> tuple[Any, ...] | None:
    """Reduce a jagged tensor. The result of unpickling is compact, on the CPU, and shares its ``offsets`` object with
    other tensors of its ragged size.

    None for subclasses and the device "meta", whose own reduction is used. It would be right for all, but takes several
    times as long, and tensors that were moved to another device one by one have an ``offsets`` object each.
    """
    from torch.nested._internal.nested_tensor import NestedTensor

    if type(value) is not NestedTensor or value.device.type == "meta":
        return None
    value = jagged.compact(value, made)
    size = ("send", jagged.ragged_size(value))
    if size not in made:
        made[size] = _SentOffsets(value.offsets())
    value._clear_non_serializable_cached_data()  # as torch does before it pickles: capsules among the attributes
    attributes = {name: own for name, own in vars(value).items() if name not in _JAGGED_ATTRIBUTES}
    # Without detach(), an attribute that torch has set on the values would be pickled, too.
    values = value._values.detach().cpu()
    args = (values, made[size], value._ragged_idx - 1, jagged.extremes_of(value), value.requires_grad)
    return _make_jagged, args, attributes or None, None, None, _set_attributes


class _SentOffsets:
    """Offsets inside a pickle, which has one object only once. A buffer of their own would cost more than the copy."""

    def __init__(self, offsets: Any) -> None:
        self._offsets = offsets

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_offsets, (self._offsets.cpu().numpy().tobytes(), self._offsets.dtype)


def _read_offsets(data: bytes, dtype: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype)


def _make_jagged(values: Any, offsets: Any, dim: int, extremes: jagged.Extremes, requires_grad: bool) -> Any:
    value = jagged.build(values, offsets, dim, extremes)
    return value.requires_grad_() if requires_grad else value


def _make_array(buffer: Any, dtype: numpy.dtype, shape: tuple[int, ...], order: Any, cls: Any) -> numpy.ndarray:
    array = _memory(buffer).view(dtype).reshape(shape, order=order)
    return array if cls is None else array.view(cls)


def _make_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool, cls: Any) -> Any:
    import torch

    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.from_numpy(_memory(buffer)).view(dtype).reshape(shape)
    if cls is not None:
        tensor = tensor.as_subclass(cls)
    return tensor.requires_grad_() if requires_grad else tensor


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _nth_reference(position: int) -> Any:
    return _decoding.current[1][position]


def _decode_kept(*parts: Any) -> Any:
    kept = KeptResult(*parts)
    return kept if getattr(_decoding, "keep", False) else kept.decode()


def _copy(buffer: Any) -> numpy.ndarray:
    """A copy of a buffer in memory of the buffer pool."""
    import numpy

    raw = numpy.frombuffer(buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else buffer, numpy.uint8)
    copy = buffer_pool.take(raw.nbytes)
    numpy.copyto(copy, raw)
    return copy


def _memory(buffer: Any) -> numpy.ndarray:
    """The bytes of a buffer as a writable array: a copy, or the memory itself."""
    import numpy

    private, _ = getattr(_decoding, "current", (True, ()))
    if isinstance(buffer, pickle.PickleBuffer):
        buffer = buffer.raw()
    # Buffers that came inside a message are bytes objects. Python may share those, and they are small: always copy.
    owner = memoryview(buffer).obj
    shared = numpy.frombuffer(buffer, numpy.uint8)
    if private or isinstance(owner, bytes):
        return shared.copy() if shared.nbytes < MIN_BYTES else _copy(shared)
    # Not the store's memory: copied by `encode`, or out of a message.
    return shared if isinstance(owner, (numpy.ndarray, bytearray)) else numpy.asarray(_Mapped(shared))


class _Mapped:
    """Shared memory presented as writable, because torch warns about memory that is not. `Encoded.decode` decides who
    may write to it."""

    def __init__(self, shared: numpy.ndarray) -> None:
        self._shared = shared
        self.__array_interface__ = {
            "data": (shared.ctypes.data, False),
            "shape": shared.shape,
            "typestr": "|u1",
            "version": 3,
        }
        buffer_pool.count_mapped(shared.nbytes)

    def __del__(self) -> None:
        buffer_pool.count_mapped(-self._shared.nbytes)


# --- calls and results ------------------------------------------------------------------------------------------


def encode_call(
    spec: MethodSpec, plan: CallPlan, members: bytes | None = None, *, in_process: bool = False
) -> list[tuple[int, CallMessage, Encoded | None, Encoded | None]]:
    """Encode a call. Ranks that are told the same share the objects: each distinct shard is encoded once.

    Returns:
        For each called rank: the rank, its message, the arguments that all ranks get, and its shard; None for no
        arguments.

    Raises:
        DispatchError: an argument cannot be pickled.
        FutureInside: one has a future in it, and the method takes values.
    """
    parts = [plan.whole, *(shard.values for shard in plan.shards)]
    try:
        futures = not spec.registration.materialize_futures
        whole, *shards = [
            encode(values, in_process=in_process, futures=futures) if values else None for values in parts
        ]
    except FutureInside:
        raise
    except Exception as error:
        raise _argument_error(spec, parts, error, in_process) from error
    how, join, collecting = spec.registration, plan.join is Join.ROWS, frozenset(plan.collecting)
    messages: dict[tuple[int, bool], CallMessage] = {}
    encoded = []
    for rank, number in enumerate(plan.shard_of):
        if number is None:
            continue
        collects = rank in collecting
        message = messages.get((number, collects))
        if message is None:
            rows = plan.shards[number].rows, plan.shards[number].real
            private = how.inputs == "copy"
            message = CallMessage(spec.name, spec.role, collects, join, private, *rows, how.device, members)
            messages[number, collects] = message
        encoded.append((rank, message, whole, shards[number]))
    return encoded


def future_inside(spec: MethodSpec, plan: CallPlan) -> DispatchError:
    """The error of an argument with a future in something else than containers."""
    given = ((key, value) for values in (plan.whole, *(s.values for s in plan.shards)) for key, value in values.items())
    for key, value in given:
        try:
            encode(value, in_process=True, futures=False)
        except FutureInside:
            name = spec.parameter(key)
            return DispatchError(
                f"{spec.label}(): argument {name!r}, {described(value)}, has a future inside an object that is no "
                "dict, list, tuple or dataclass, or that contains itself. Pass future.result(), or register the method "
                "with materialize_futures=False to get the future itself",
                method=spec.name,
                argument=name,
            )
    return DispatchError(f"{spec.label}(): an argument has a future inside an object", method=spec.name)


def _argument_error(
    spec: MethodSpec, parts: list[dict[Parameter, Any]], error: Exception, in_process: bool
) -> DispatchError:
    """The error of a call of which an argument cannot be pickled."""
    given = ((key, value) for values in parts for key, value in values.items())
    for key, value in given:
        if not can_encode(value, in_process=in_process):
            name = spec.parameter(key)
            return cannot_send(f"{spec.label}(): argument {name!r}, {described(value)},", error, spec.name, name)
    return cannot_send(f"{spec.label}(): an argument", error, spec.name, None)


def cannot_send(what: str, error: Exception, method: str, argument: str | None) -> DispatchError:
    """The error of arguments that cannot be pickled; ``what`` says which."""
    return DispatchError(
        f"{what} cannot be pickled to be sent: {type(error).__name__}: {error}. "
        "Nothing was sent; pass what it is made from, and build it on the worker",
        method=method,
        argument=argument,
    )


def decode_result(label: str, rank: int, encoded: Encoded | None, *, private: bool, shared: bool = True) -> Any:
    """Decode the result of a rank; None stands for None. ``private``: whether the value needs memory of its own. If
    nobody else reads the same buffers, ``shared`` is false, and even a private value may stay in the shared memory,
    unless this process already maps `MAX_MAPPED_BYTES`. A `ResultError` if it cannot be unpickled in this process."""
    if encoded is None:
        return None
    try:
        return encoded.decode(
            private=private and (shared or buffer_pool.mapped_bytes + encoded.nbytes > MAX_MAPPED_BYTES),
        )
    except Exception as error:
        raise ResultError(
            f"{label}(): the result of rank {rank} arrived but cannot be unpickled here: "
            f"{type(error).__name__}: {error}. Return plain data, or make its class importable in this process",
            method=label,
            rank=rank,
        ) from error
