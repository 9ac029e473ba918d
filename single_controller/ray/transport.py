"""How values travel through Ray: tensors and arrays as out-of-band buffers, everything else by cloudpickle.

Ray would pickle a tensor in-band, together with the whole storage behind a view. Here a value is packed once
into a `Packet`: a header, the raw buffers of its contiguous tensors and arrays, and the Ray references in it.
Ray then writes the buffers into its store without a further copy, and a reader maps them.

Store memory is shared and not protected against writing, so opening a packet copies the buffers unless the
reader asks for views.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
import ray.cloudpickle
from ray.actor import ActorHandle

from dispatch.warm import warm

if TYPE_CHECKING:
    import numpy

INLINE_BYTES = 96 * 1024
"""Packets up to this size travel inside the call; larger ones are stored once and referred to. Measured with four
ranks and 96 KiB each: 4.2 ms inside against 6.4 stored for an argument that all read, 4.7 against 9.6 for shards. From
100 KiB on Ray stores a message by itself, once for every rank (8.4 against 6.7, and 8.8 against 9.6)."""

MOST_HELD = 1 << 30
"""Bytes of the store that results may hold in this process, before more of them are copied out of it."""

_opening = threading.local()


class Packet:
    """A packed value.

    Attributes:
        header: the pickle of the value without its buffers.
        buffers: the buffers, as memory.
        refs: ObjectRefs and actor handles inside the value: Ray must see them to count them.
    """

    __slots__ = ("buffers", "header", "refs")

    def __init__(self, header: bytes, buffers: tuple[Any, ...] = (), refs: tuple[Any, ...] = ()) -> None:
        self.header = header
        self.buffers = buffers
        self.refs = refs

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.header) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    @property
    def inline(self) -> bool:
        """Whether it is small enough to travel inside a call."""
        return self.nbytes <= INLINE_BYTES

    def open(self, *, private: bool = True) -> Any:
        """The value.

        Args:
            private: copy tensors and arrays into memory of their own. If not, they share the store's memory
                and must not be written to.
        """
        before = getattr(_opening, "packet", None)
        _opening.packet = (private, self.refs)
        try:
            return pickle.loads(self.header, buffers=self.buffers)
        finally:
            _opening.packet = before

    def open_own(self) -> Any:
        """The value of a packet that nobody else has or will open: in the store's memory as it is, or copied out of it
        where this process holds `MOST_HELD` bytes of the store already."""
        return self.open(private=_Writable.held_bytes + self.nbytes > MOST_HELD)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.header, *self._parts()))

    def _parts(self) -> tuple[Any, ...]:
        return tuple(map(pickle.PickleBuffer, self.buffers)), self.refs


class AnswerPacket(Packet):
    """A packed answer behind a reference that users hold: ``ray.get`` of it gives them the value, copied."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_open_answer, (self.header, *self._parts()))


@contextmanager
def kept_packed() -> Iterator[None]:
    """Inside, ``ray.get`` in this thread gives an `AnswerPacket` as it is."""
    _opening.keep = True
    try:
        yield
    finally:
        _opening.keep = False


def pack(value: Any, kind: Callable[..., Packet] = Packet) -> Packet:
    """Pack a value. Its tensors and arrays are not copied yet: the packet refers to their memory.

    Raises:
        Exception: whatever pickle raises for a part that does not pickle.
    """
    out = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(out, buffers)
    pickler.dump(value)
    return kind(out.getvalue(), tuple(buffers), tuple(pickler.refs))


def packs(value: Any) -> bool:
    """Whether a value can be packed."""
    try:
        pack(value)
    except Exception:
        return False
    return True


class _Pickler(ray.cloudpickle.CloudPickler):
    def __init__(self, out: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffers.append)
        self.refs: list[Any] = []
        self._seen: dict[Any, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (ray.ObjectRef, ActorHandle)):
            self.refs.append(obj)
            return _nth_ref, (len(self.refs) - 1,)
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # there are no values of theirs before that
        if numpy is not None and isinstance(obj, numpy.ndarray) and _is_plain_array(numpy, obj):
            return _reduce_array(numpy, obj)
        if torch is not None and isinstance(obj, torch.Tensor) and _is_plain(torch, obj):
            # One batch for two parameters was cut into two views of the same memory: it is sent once.
            place = (
                type(obj),
                obj.device,
                obj.data_ptr(),
                obj.dtype,
                obj.shape,
                obj.stride(),
                obj.requires_grad,
                obj.is_conj(),
                obj.is_neg(),
            )
            first = self._seen.setdefault(place, obj) if obj.numel() and not vars(obj) else obj
            return _reduce_tensor(torch, obj) if first is obj else (_itself, (first,))
        tensordict = sys.modules.get("tensordict")
        if tensordict is not None and isinstance(obj, tensordict.TensorDictBase) and _on_cuda(obj):
            return _itself, (obj.cpu(),)  # its tensors arrive on the CPU, and it is to say so
        return super().reducer_override(obj)


def _on_cuda(tensordict: Any) -> bool:
    return tensordict.device is not None and tensordict.device.type == "cuda"


def _is_plain_array(numpy: Any, array: numpy.ndarray) -> bool:
    """Whether bytes, type and shape say all of it, as they do of numpy's own subclasses without state (memmap)."""
    base, cls = numpy.ndarray, type(array)
    return cls.__reduce__ is base.__reduce__ and cls.__reduce_ex__ is base.__reduce_ex__ and not array.dtype.hasobject


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Whether bytes, type, shape and attributes say all of it, as they do of subclasses that add only behaviour."""
    base, cls = torch.Tensor, type(tensor)
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
        and cls.__reduce_ex__ is base.__reduce_ex__
        and cls.__torch_dispatch__ is base.__torch_dispatch__
        and getattr(cls, "__getstate__", None) is getattr(base, "__getstate__", None)
    )


def _itself(value: Any) -> Any:
    return value


def _reduce_array(numpy: Any, array: numpy.ndarray) -> tuple[Any, ...]:
    plain = array.view(numpy.ndarray)
    if not (plain.flags.c_contiguous or plain.flags.f_contiguous):
        plain = numpy.ascontiguousarray(plain)
    order = "C" if plain.flags.c_contiguous else "F"
    data: Any = plain.ravel(order="K").view(numpy.uint8)
    cls = None if type(array) is numpy.ndarray else type(array)
    return _make_array, (pickle.PickleBuffer(data), array.dtype, array.shape, order, cls)


def _reduce_tensor(torch: Any, tensor: Any) -> tuple[Any, ...]:
    plain = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    cls = None if type(tensor) is torch.Tensor else type(tensor)
    made = (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, cls)
    return _make_tensor, made, vars(tensor) or None, None, None, _set_attributes


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


def _nth_ref(position: int) -> Any:
    return _opening.packet[1][position]


def _open_answer(header: bytes, buffers: tuple[Any, ...], refs: tuple[Any, ...]) -> Any:
    packet = AnswerPacket(header, buffers, refs)
    return packet if getattr(_opening, "keep", False) else packet.open()


def _memory(buffer: Any) -> numpy.ndarray:
    """The bytes of a buffer as an array that may be written to: a copy, or the shared memory itself."""
    import numpy

    shared = numpy.frombuffer(buffer, numpy.uint8)
    private, _ = getattr(_opening, "packet", (True, ()))
    # What came inside a message is a bytes object, which Python may share, and small: it is always copied.
    if private or isinstance(memoryview(buffer).obj, bytes):
        copy = warm.take(shared.nbytes)
        numpy.copyto(copy, shared)
        return copy
    return numpy.asarray(_Writable(shared))


class _Writable:
    """Store memory under a flag that lets torch map it without its warning. Who may write to it is decided by whoever
    opens a packet without copying it."""

    held_bytes = 0
    """Of all that are alive in this process: the store cannot move or drop these."""

    _lock = threading.RLock()  # one may end while another begins

    def __init__(self, shared: numpy.ndarray) -> None:
        self._shared = shared
        self.__array_interface__ = {
            "data": (shared.ctypes.data, False),
            "shape": shared.shape,
            "typestr": "|u1",
            "version": 3,
        }
        with _Writable._lock:
            _Writable.held_bytes += shared.nbytes

    def __del__(self) -> None:
        with _Writable._lock:
            _Writable.held_bytes -= self._shared.nbytes
