"""CallPlan: one call's arguments, cut once.

`plan_call` follows the mode of a registered method; `plan_execute` the rule of ``execute_all_*``. Both either
return a whole plan or raise before anything is sent, and neither changes the caller's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from dispatch import batch
from dispatch.batch import Broadcast, LaterBatch, described
from dispatch.errors import BatchError, DispatchError
from dispatch.layout import Routing
from dispatch.modes import CustomMode, Cut, Join, Mode, Ranks, RefusedMode
from dispatch.register import MethodSpec
from dispatch.rows import UNEVEN, share_rows

Slot = int | str
"""Where an argument goes: a position, or a keyword."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of every cut argument.

    Attributes:
        values: slot -> this shard's piece.
        rows: rows of this shard, padding included; None when nothing was cut along rows on the driver.
        real: rows without the padding.
    """

    values: dict[Slot, Any] = field(default_factory=dict)
    rows: int | None = None
    real: int | None = None


@dataclass(frozen=True)
class CallPlan:
    """Who gets what in one call.

    Attributes:
        whole: slot -> argument that every called rank gets as it is. Stored once.
        shards: the distinct shards of the other arguments. Each is stored once.
        shard_of: per rank the number of its shard; None for a rank that is not called.
        answers: collecting ranks, in the order of their answers.
        join: what the driver gets of the answers.
        collect: a custom mode's ``collect_fn``, already bound to the group; it replaces `join`.
        later: the arguments that were futures.
        rows: rows of the batches that were cut; None when none was.
    """

    whole: dict[Slot, Any]
    shards: tuple[Shard, ...]
    shard_of: tuple[int | None, ...]
    answers: tuple[int, ...]
    join: Join
    collect: Callable[[list[Any]], Any] | None = None
    later: tuple[LaterBatch, ...] = ()
    rows: int | None = None

    @classmethod
    def empty(cls, world_size: int) -> CallPlan:
        """A plan without arguments, for all ranks."""
        routing = Routing.only(range(world_size), world_size)
        return cls({}, (Shard(),), routing.shard_of, routing.answers, Join.LIST)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are called."""
        return [rank for rank, shard in enumerate(self.shard_of) if shard is not None]

    def only(self, ranks: Collection[int]) -> CallPlan:
        """The same for some of its ranks alone."""
        shard_of = tuple(shard if rank in ranks else None for rank, shard in enumerate(self.shard_of))
        return replace(self, shard_of=shard_of, answers=tuple(rank for rank in self.answers if rank in ranks))

    def arguments(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of one rank."""
        shard = self.shard_of[rank]
        if shard is None:
            raise ValueError(f"rank {rank} is not called")
        return merge_arguments(self.whole, self.shards[shard].values)


def merge_arguments(*parts: dict[Slot, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from slots."""
    slots: dict[Slot, Any] = {}
    for part in parts:
        slots.update(part)
    positions = sorted(slot for slot in slots if isinstance(slot, int))
    return tuple(slots[p] for p in positions), {s: v for s, v in slots.items() if isinstance(s, str)}


def plan_call(
    spec: MethodSpec,
    ranks: Ranks,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    uneven: str | None = None,
) -> CallPlan:
    """The plan of one call of a registered method.

    Args:
        spec: the method.
        ranks: the group: its world size and, for the modes that need it, its layout.
        args: the driver's positional arguments.
        kwargs: the driver's keyword arguments.
        uneven: replaces what the method declared, for this call.

    Raises:
        TypeError: the arguments do not fit the method's signature.
        DispatchError: they fit, but cannot be cut as the mode says.
    """
    declared = spec.registration
    uneven = declared.uneven if uneven is None else uneven
    if uneven not in UNEVEN:
        raise ValueError(f"uneven={uneven!r}: known are {', '.join(map(repr, UNEVEN))}")
    mode = declared.mode.mode
    if isinstance(mode, RefusedMode):
        raise DispatchError(f"{spec.label}() cannot be called from the driver: {mode.reason}", method=spec.name)
    if declared.execute.ranks is not None:
        spec.bind(args, kwargs)
        return _plan_chosen(spec, ranks, args, kwargs)
    if isinstance(mode, CustomMode):
        return _plan_custom(spec, mode, ranks, args, kwargs)
    spec.bind(args, kwargs)
    try:
        routing = mode.route(ranks)
    except DispatchError as error:
        raise type(error)(f"{spec.label}() needs a layout: {error}", method=spec.name) from None
    slots = _slots(args, kwargs)
    whole: dict[Slot, Any] = {}
    if not (slots or mode.function_first):
        return CallPlan(whole, (Shard(),) * routing.shards, routing.shard_of, routing.answers, mode.join)
    if mode.function_first:
        whole = _take_function(spec, slots)
    if mode.cut is Cut.WHOLE:
        return _plan(spec, routing, mode, {**whole, **slots}, [Shard()] * routing.shards)
    if mode.cut is Cut.ITEMS:
        return _plan_items(spec, routing, mode, slots)
    return _plan_rows(spec, routing, mode, whole, slots, uneven)


def plan_execute(spec: MethodSpec, ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """The plan of ``execute_all_*``: lists split when every argument is a list of world_size.

    Raises:
        TypeError: the arguments do not fit the method's signature.
        DispatchError: some arguments are lists and others are not, or a list has another length.
    """
    spec.bind(args, kwargs)
    return _plan_lists(spec, ranks, args, kwargs, source="execute_all splits")


def plan_rank_zero(spec: MethodSpec, ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """The plan of ``execute_rank_zero_*``: rank 0 gets the arguments as they are; its bare value comes back.

    Raises:
        TypeError: the arguments do not fit the method's signature.
    """
    spec.bind(args, kwargs)
    routing = Routing.only((0,), ranks.world_size)
    slots = _slots(args, kwargs)
    return CallPlan(*_whole(spec, slots), routing.shard_of, routing.answers, Join.VALUE, None, _later(slots))


def _plan_chosen(spec: MethodSpec, ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """The execute mode names the ranks: they get the arguments uncut, whatever the dispatch mode."""
    execute = spec.registration.execute
    chosen = tuple(execute.ranks(ranks.world_size)) if execute.ranks is not None else ()
    outside = [rank for rank in chosen if rank not in range(ranks.world_size)]
    if outside or not chosen or len(set(chosen)) != len(chosen):
        raise DispatchError(
            f"{spec.label}(): {execute!r} chose the ranks {list(chosen)} of a group of {ranks.world_size}; "
            "it must choose distinct ranks of the group, at least one",
            method=spec.name,
        )
    routing = Routing.only(chosen, ranks.world_size)
    slots = _slots(args, kwargs)
    join = Join.VALUE if execute.bare_value else Join.LIST
    return CallPlan(*_whole(spec, slots), routing.shard_of, routing.answers, join, None, _later(slots))


def _plan_custom(
    spec: MethodSpec, mode: CustomMode, ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallPlan:
    try:
        made = mode.dispatch_fn(ranks, *map(_own, args), **{key: _own(value) for key, value in kwargs.items()})
    except Exception as error:
        error.add_note(f"raised by the dispatch_fn of {spec.label}(); nothing was sent")
        raise
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict)
    ):
        raise DispatchError(
            f"{spec.label}(): its dispatch_fn returned {described(made)}; it returns (args, kwargs): a tuple or "
            "list of the positional and a dict of the keyword arguments",
            method=spec.name,
        )
    spec.bind(tuple(made[0]), made[1])
    plan = _plan_lists(spec, ranks, tuple(made[0]), made[1], source="its dispatch_fn gives")
    return replace(plan, collect=lambda answers: mode.collect_fn(ranks, answers))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, BatchError) else f"{type(error).__name__}: {error}"


def _own(value: Any) -> Any:
    """The value in lists and dicts of its own: a dispatch function may append to them, but not to the caller's."""
    if type(value) is list:
        return [_own(item) for item in value]
    if type(value) is tuple:
        return tuple(map(_own, value))
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    return value


def _plan_lists(spec: MethodSpec, ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any], source: str) -> CallPlan:
    slots = _slots(args, kwargs)
    world_size = ranks.world_size
    free = {slot: value for slot, value in slots.items() if not isinstance(value, Broadcast)}
    lists = [slot for slot, value in free.items() if isinstance(value, list)]
    if not lists:
        routing = Routing.only(range(world_size), world_size)
        return CallPlan(*_whole(spec, slots), routing.shard_of, routing.answers, Join.LIST, None, _later(slots))
    for slot, value in free.items():
        if not isinstance(value, list) or len(value) != world_size:
            others = ", ".join(repr(spec.parameter(other)) for other in lists if other != slot)
            raise DispatchError(
                f"{spec.label}(): argument {spec.parameter(slot)!r} is {described(value)}"
                + (f", while {others} is a list" if not isinstance(value, list) else "")
                + f"; {source} lists only when every argument is a list of world_size = {world_size}. "
                "Wrap an argument in Broadcast(...) to send it whole to every rank",
                method=spec.name,
                argument=spec.parameter(slot),
            )
    routing = Routing.flat(world_size)
    whole = {slot: _sent(spec, value) for slot, value in slots.items() if isinstance(value, Broadcast)}
    shards = tuple(
        Shard({slot: _sent(spec, value[rank]) for slot, value in free.items()}) for rank in range(world_size)
    )
    return CallPlan(whole, shards, routing.shard_of, routing.answers, Join.LIST, None, _later(slots))


def _plan_items(spec: MethodSpec, routing: Routing, mode: Mode, slots: dict[Slot, Any]) -> CallPlan:
    whole: dict[Slot, Any] = {}
    pieces: list[dict[Slot, Any]] = [{} for _ in range(routing.shards)]
    for slot, value in slots.items():
        if isinstance(value, Broadcast):
            whole[slot] = _sent(spec, value)
            continue
        if isinstance(value, LaterBatch):
            if not spec.registration.materialize_futures:
                whole[slot] = value
                continue
            items = [value.later_item(item, routing.shards) for item in range(routing.shards)]
        elif isinstance(value, (list, tuple)) and len(value) == routing.shards:
            items = [_sent(spec, item) for item in value]
        else:
            name = spec.parameter(slot)
            raise DispatchError(
                f"{spec.label}(): argument {name!r} is {described(value)}; {spec.registration.mode!r} takes a "
                f"list of {routing.shards} items, one for each shard ({routing.unit} = {routing.shards}). "
                "Pass such a list, or Broadcast(value) to give every rank the same",
                method=spec.name,
                argument=name,
            )
        for piece, item in zip(pieces, items, strict=True):
            piece[slot] = item
    return _plan(spec, routing, mode, whole, [Shard(piece) for piece in pieces], slots)


def _plan_rows(
    spec: MethodSpec,
    routing: Routing,
    mode: Mode,
    whole: dict[Slot, Any],
    slots: dict[Slot, Any],
    uneven: str,
) -> CallPlan:
    batches: dict[Slot, Any] = {}
    rows: int | None = None
    first: Slot = 0
    pieces: list[dict[Slot, Any]] = [{} for _ in range(routing.shards)]
    for slot, value in slots.items():
        name = spec.parameter(slot)
        if isinstance(value, LaterBatch):
            if not spec.registration.materialize_futures:
                whole[slot] = value
                continue
            for shard, piece in enumerate(pieces):
                piece[slot] = value.later_rows(shard, routing.shards, uneven)
            continue
        try:
            found = batch.length(value)
        except Exception as error:  # a BatchError, or whatever a type of others' raises
            raise DispatchError(
                f"{spec.label}(): argument {name!r} is {described(value)}, and {_said(error)}; "
                f"{spec.registration.mode!r} cuts tensors, arrays, TensorDicts, lists, dicts of those and types "
                "given to register_batch_type(). Broadcast(value) sends anything whole to every rank",
                method=spec.name,
                argument=name,
            ) from None
        if found is None:
            whole[slot] = _sent(spec, value) if isinstance(value, Broadcast) else batch.cut(value, 0, 0)
            continue
        if rows is None:
            rows, first = found, slot
        elif found != rows:
            raise DispatchError(
                f"{spec.label}(): argument {name!r} has {found} rows, but {spec.parameter(first)!r} has {rows}; "
                "all batches of one call have the same number of rows. Broadcast(value) sends one whole",
                method=spec.name,
                argument=name,
            )
        batches[slot] = value
    if rows is None:
        if mode.function_first and not any(pieces):
            mode = replace(mode, join=Join.LIST)  # no batch went in, so none is promised: every rank's own answer
        return _plan(spec, routing, mode, whole, [Shard(piece) for piece in pieces], slots)
    try:
        shares = share_rows(rows, routing.shards, uneven)
    except BatchError:
        name = spec.parameter(first)
        raise DispatchError(
            f"{spec.label}(): argument {name!r} has {rows} rows, which do not divide over {routing.shards} shards "
            f"({routing.unit} = {routing.shards}). Pass a multiple of {routing.shards}, or set uneven='pad' or "
            f"'ragged': group.{spec.label}.options(uneven='pad')(...), or in @register",
            method=spec.name,
            argument=name,
        ) from None
    for slot, value in batches.items():
        try:
            cut = batch.shard(value, shares)
        except Exception as error:  # a BatchError, or whatever a type of others' raises
            name = spec.parameter(slot)
            raise DispatchError(
                f"{spec.label}(): argument {name!r}, {described(value)}, cannot be cut: {_said(error)}. "
                "Broadcast(value) sends anything whole to every rank",
                method=spec.name,
                argument=name,
            ) from error
        for piece, shard_value in zip(pieces, cut, strict=True):
            piece[slot] = shard_value
    shards = [Shard(piece, share.rows, share.real) for piece, share in zip(pieces, shares, strict=True)]
    return replace(_plan(spec, routing, mode, whole, shards, slots), rows=rows)


def _plan(
    spec: MethodSpec,
    routing: Routing,
    mode: Mode,
    whole: dict[Slot, Any],
    shards: list[Shard],
    slots: dict[Slot, Any] | None = None,
) -> CallPlan:
    later = _later(whole if slots is None else slots)
    if mode.cut is Cut.WHOLE:
        whole, _ = _whole(spec, whole)
    return CallPlan(whole, tuple(shards), routing.shard_of, routing.answers, mode.join, None, later)


def _whole(spec: MethodSpec, slots: dict[Slot, Any]) -> tuple[dict[Slot, Any], tuple[Shard, ...]]:
    """Arguments that go as they are: `Broadcast` is unwrapped, a future becomes its value unless kept."""
    return {slot: _sent(spec, value) for slot, value in slots.items()}, (Shard(),)


def _sent(spec: MethodSpec, value: Any) -> Any:
    """A value that goes as it is: without its `Broadcast`, and what stands for it if it is a future."""
    if isinstance(value, Broadcast):
        value = value.value
    if isinstance(value, LaterBatch) and spec.registration.materialize_futures:
        return value.later_whole()
    return value


def _take_function(spec: MethodSpec, slots: dict[Slot, Any]) -> dict[Slot, Any]:
    first = next(iter(spec.signature.parameters), None)
    slot: Slot | None = 0 if 0 in slots else first if first in slots else None
    if slot is None or not callable(slots[slot]):
        got = "no argument" if slot is None else described(slots[slot])
        raise DispatchError(
            f"{spec.label}(): {spec.registration.mode!r} takes a function first, then batches; got {got}",
            method=spec.name,
            argument=None if slot is None else spec.parameter(slot),
        )
    return {slot: slots.pop(slot)}


def _slots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Slot, Any]:
    slots: dict[Slot, Any] = dict(enumerate(args))
    slots.update(kwargs)
    return slots


def _later(slots: dict[Slot, Any]) -> tuple[LaterBatch, ...]:
    values = [value.value if isinstance(value, Broadcast) else value for value in slots.values()]
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value]
    return tuple(value for value in values if isinstance(value, LaterBatch))
