"""Packing what a call carries, and what to say of that which does not pickle. The in-process engine packs likewise, so
that a call which works there works on Ray."""

from __future__ import annotations

from typing import Any

from dispatch.batch import described
from dispatch.errors import DispatchError
from dispatch.plan import Slot
from dispatch.register import MethodSpec
from single_controller.base.pool import ClassWithInitArgs
from single_controller.ray.transport import Packet, pack, packs


def pack_arguments(spec: MethodSpec, values: dict[Slot, Any]) -> Packet | None:
    """Some arguments of a call, by slot; None if there are none.

    Raises:
        DispatchError: one of them cannot be pickled.
    """
    try:
        return pack(values) if values else None
    except Exception as error:
        slot = next((slot for slot, value in values.items() if not packs(value)), None)
        name = None if slot is None else spec.parameter(slot)
        what = "an argument" if slot is None else f"argument {name!r}, {described(values[slot])},"
        raise DispatchError(
            f"{spec.label}(): {what} cannot be pickled to be sent: {type(error).__name__}: {error}. "
            "Nothing was sent; pass what it is made from, and make it on the worker",
            method=spec.name,
            argument=name,
        ) from error


def pack_answer(method: str, value: Any, kind: type[Packet] = Packet) -> Packet:
    """What a method returned.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return pack(value, kind)
    except Exception as error:
        raise TypeError(
            f"the result of {method}(), {described(value)}, cannot be pickled to be sent back: "
            f"{type(error).__name__}: {error}"
        ) from error


def refuse_unpicklable(made: ClassWithInitArgs, error: Exception) -> None:
    """Raise, with the name of what does not pickle, if it is in this class or its arguments.

    Raises:
        DispatchError: it is.
    """
    given = {**{f"argument {k}": value for k, value in enumerate(made.args)}, **made.kwargs}
    name = next((name for name, value in given.items() if not packs(value)), None)
    if name is None and packs(made.cls):
        return
    what = "the class itself" if name is None else f"{name!r}, {described(given[name])},"
    raise DispatchError(
        f"{made.cls.__name__}(): {what} cannot be pickled to be sent: {type(error).__name__}: {error}. "
        "Nothing was sent; pass what it is made from, and make it on the worker",
        method="__init__",
        argument=name,
    ) from error
