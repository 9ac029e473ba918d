"""CallPlan: the arguments of one call, sharded.

`plan_call` follows the mode of a registered method, `plan_execute` the rule of ``execute_all_*``. Both are pure: they
get the group's `Layout` as a value. Both return a complete plan or raise before anything is sent, and never change the
caller's objects.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dispatch import batch
from dispatch.batch import Broadcast, Deferred, Share, described, share_rows
from dispatch.errors import BatchError, DispatchError, ResultError
from dispatch.jagged import Made
from dispatch.layout import Layout, Routing
from dispatch.modes import CustomMode, Cut, Join, Mode, RefusedMode, check_uneven
from dispatch.register import CALL_OPTIONS, Attribute, MethodSpec, check_arguments, misfit

Parameter = int | str | tuple[Any, ...]
"""Which parameter an argument fills: a position, or a keyword. With the steps from there to a future inside the
argument, which travels beside it: keys, indices and `Attribute`s."""

_DATACLASS = "__dataclass_fields__"
"""What the classes of dataclasses have."""

_BROADCAST = "Broadcast(value) sends anything whole to every rank"


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of every sharded argument."""

    values: dict[Parameter, Any] = field(default_factory=dict)  # parameter -> value
    rows: int | None = None  # rows of the shard, padding included; None if the driver cut no batch
    real: int | None = None  # rows of the shard without padding


@dataclass(frozen=True, slots=True)
class DeferredArgument:
    """Stands for an argument that is a future: what one rank fetches of its result."""

    source: Deferred  # the future
    # ``"rows"`` of a shard, one ``"item"`` of a list, the ``"whole"`` result, or as a ``"setting"``, which has no rows
    kind: Literal["rows", "item", "whole", "setting"]
    index: int = 0  # number of the shard or item
    count: int = 1  # number of shards or items
    uneven: str = "error"  # the rule of the consuming call for rows that do not divide


@dataclass(frozen=True)
class CallPlan:
    """Which rank gets what in one call."""

    whole: dict[Parameter, Any]  # parameter -> argument that every called rank gets. Sent once.
    shards: tuple[Shard, ...]  # the distinct shards of the other arguments. Each is sent once.
    shard_of: tuple[int | None, ...]  # the shard number of each rank; None for a rank that is not called
    collecting: tuple[int, ...]  # the collecting ranks, in the order of their results
    join: Join  # what the driver gets
    # A custom mode's ``collect_fn``, bound to the group; it replaces `join`
    collect: Callable[[list[Any]], Any] | None = None
    deferred: tuple[Deferred, ...] = ()  # the futures among the arguments
    rows: int | None = None  # rows of the batches that were cut; None if none was

    @classmethod
    def empty(cls, world_size: int) -> CallPlan:
        """A plan that calls all ranks without arguments."""
        routing = Routing.only(range(world_size), world_size)
        return cls({}, (Shard(),), routing.shard_of, routing.collecting, Join.LIST)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are called."""
        return [rank for rank, shard in enumerate(self.shard_of) if shard is not None]

    def only(self, ranks: Collection[int]) -> CallPlan:
        """The same plan for a subset of its ranks, without the shards of the others, which would be encoded too."""
        chosen, kept = frozenset(ranks), dict[int, int]()  # number of a shard -> its number among those that are left
        shard_of: list[int | None] = [None] * len(self.shard_of)
        for rank in chosen:
            if (number := self.shard_of[rank]) is not None:
                shard_of[rank] = kept.setdefault(number, len(kept))
        return replace(
            self,
            shards=tuple(self.shards[number] for number in kept),
            shard_of=tuple(shard_of),
            collecting=tuple(rank for rank in self.collecting if rank in chosen),
        )


def plan_call(
    spec: MethodSpec,
    layout: Layout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    uneven: str | None = None,
    group: Any = None,
) -> CallPlan:
    """Plan one call of a registered method.

    Args:
        spec: the method.
        layout: the group's layout. Modes without coordinates read only its world size.
        args: the driver's positional arguments.
        kwargs: the driver's keyword arguments.
        uneven: overrides for this call what the method declared; one of `batch.UNEVEN`.
        group: passed to the functions of a custom mode.

    Raises:
        TypeError: the arguments do not fit the method's signature.
        DispatchError: they fit, but cannot be sharded as the mode says.
    """
    declared = spec.registration
    uneven = declared.uneven if uneven is None else uneven
    if uneven != declared.uneven:
        check_uneven(f"{spec.label}.options", uneven, declared.mode, declared.execute)
    mode = declared.mode.mode
    if isinstance(mode, RefusedMode):
        raise DispatchError(f"{spec.label}() cannot be called from the driver: {mode.reason}", method=spec.name)
    custom = mode if isinstance(mode, CustomMode) and not declared.execute.rank_zero else None
    context: list[Any] = []
    if custom is not None:
        args, kwargs, *context = _call_dispatch_fn(spec, custom, group, args, kwargs)
    try:
        spec.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(spec.label, spec.signature, kwargs, error, CALL_OPTIONS) from None
    arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs
    # Inline, because every call passes here. See `_may_have_futures`.
    if any(isinstance(v, (Deferred, dict, tuple)) or hasattr(type(v), _DATACLASS) for v in arguments.values()):
        arguments = _futures_apart(spec, arguments)
    if custom is not None:
        plan = _plan_lists(spec, layout, arguments, source="its dispatch_fn splits")
        return replace(plan, collect=lambda results: custom.collect_fn(group, results, *context))
    if declared.execute.rank_zero:
        return _plan_whole(spec, layout.rank_zero, Join.VALUE, arguments)
    if not isinstance(mode, Mode):
        raise TypeError(f"{spec.label}(): {mode!r} is not a dispatch mode")
    try:
        routing = mode.route(layout)
    except DispatchError as error:
        raise DispatchError(f"{spec.label}() needs a layout: {error}", method=spec.name) from None
    if mode.cut is Cut.WHOLE:
        return _plan_whole(spec, routing, mode.join, arguments)
    whole = _take_function(spec, arguments) if mode.function_first else {}
    if mode.cut is Cut.ITEMS:
        return _plan_items(spec, routing, mode.join, arguments)
    return _plan_rows(spec, routing, mode, whole, arguments, uneven)


def join_values(label: str, values: list[Any], join: Join) -> Any:
    """Make one value of the results of ranks.

    Raises:
        ResultError: they cannot be joined.
    """
    if join is not Join.ROWS:
        return values if join is Join.LIST else values[0]
    try:
        if len(values) > 1:
            return batch.join(values)
        if values[0] is not None and batch.length(values[0]) is None:
            raise BatchError(f"{batch.describe(values[0])} has no rows to join")
        return values[0]
    except BatchError as error:
        raise ResultError(
            f"{label}(): the results of {len(values)} ranks cannot be joined: {error}. Use a mode that returns "
            "a list by rank instead, such as Dispatch.DP_COMPUTE_METRIC or ONE_TO_ALL",
            method=label,
        ) from error


def plan_execute(spec: MethodSpec, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """Plan ``execute_all_*``: lists are split if every argument is a list of length world_size. Raises as `plan_call`
    does, also if only some arguments are lists, or a list has another length."""
    check_arguments(spec.label, spec.signature, args, kwargs)
    return _plan_lists(spec, layout, _futures_apart(spec, dict(enumerate(args)) | kwargs), source="execute_all splits")


def plan_rank_zero(spec: MethodSpec, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """Plan ``execute_rank_zero_*``: rank 0 gets the arguments unchanged and returns its value."""
    check_arguments(spec.label, spec.signature, args, kwargs)
    return _plan_whole(spec, layout.rank_zero, Join.VALUE, _futures_apart(spec, dict(enumerate(args)) | kwargs))


def put_back(arguments: dict[Parameter, Any]) -> None:
    """Put the values of futures into the arguments that they were taken out of."""
    for path in [key for key in arguments if isinstance(key, tuple)]:
        arguments[path[0]] = _with_part(arguments[path[0]], path[1:], arguments.pop(path))


def find_futures(spec: MethodSpec, plan: CallPlan) -> CallPlan | None:
    """The plan with the futures taken out of all containers in its arguments; None if there are none. `plan_call` looks
    into dicts and dataclasses alone: looking at each item of each list would make all calls slower."""
    found: list[Deferred] = []

    def taken(values: dict[Parameter, Any]) -> dict[Parameter, Any]:
        apart: dict[Any, Any] = {}
        kept = {
            key: _take_futures(value, key if isinstance(key, tuple) else (key,), apart, everywhere=True)
            for key, value in values.items()
        }
        found.extend(apart.values())
        return kept | {path: _to_send(spec, future) for path, future in apart.items()}

    parts = [plan.whole, *(shard.values for shard in plan.shards)]
    whole, *shards = map(taken, parts)
    pairs = zip(parts, (whole, *shards), strict=True)
    if all(new[key] is value for old, new in pairs for key, value in old.items()):
        return None
    return replace(
        plan,
        whole=whole,
        shards=tuple(replace(shard, values=values) for shard, values in zip(plan.shards, shards, strict=True)),
        deferred=(*plan.deferred, *dict.fromkeys(found)),
    )


def _futures_apart(spec: MethodSpec, arguments: dict[Any, Any]) -> dict[Parameter, Any]:
    """The arguments with futures taken out of dicts and dataclasses, which `put_back` puts back on the rank."""
    if not spec.registration.materialize_futures:
        return arguments
    apart: dict[Any, Any] = {}
    kept = {key: _take_futures(_computed(value), (key,), apart) for key, value in arguments.items()}
    return kept | {path[0] if len(path) == 1 else path: future for path, future in apart.items()}


def _may_have_futures(value: Any) -> bool:
    return isinstance(value, (Deferred, dict, tuple)) or hasattr(type(value), _DATACLASS)


def _take_futures(
    value: Any, path: tuple[Any, ...], apart: dict[Any, Any], *, everywhere: bool = False, within: tuple[int, ...] = ()
) -> Any:
    """A container with None in place of its futures, which are added to ``apart`` by their paths; unchanged if it has
    none.

    Args:
        value: the container, which is copied where it changes.
        path: where it is.
        apart: path -> future.
        everywhere: also in lists, tuples and batches of the user's own types.
        within: ids of the containers that it is in, because one may contain itself.
    """
    if isinstance(value, Deferred):
        apart[path] = value
        return None
    if isinstance(value, DeferredArgument):
        return value
    within = (*within, id(value))
    for step, part in _parts(value, everywhere=everywhere):
        if id(part) in within or not (everywhere or _may_have_futures(part)):
            continue
        new = _take_futures(_computed(part), (*path, step), apart, everywhere=everywhere, within=within)
        if new is not part:
            value = _with_part(value, (step,), new)
    return value


def _parts(value: Any, *, everywhere: bool = False) -> list[tuple[Any, Any]]:
    """(step, part) of a dict, named tuple or dataclass instance; with ``everywhere``, see `_take_futures`."""
    if hasattr(type(value), _DATACLASS) and (everywhere or not hasattr(type(value), "__len__")):
        names = [item.name for item in dataclasses.fields(value)]
        return [(Attribute(name), getattr(value, name)) for name in names if hasattr(value, name)]
    if isinstance(value, dict) and (everywhere or batch.batch_type(value).parts is batch.fields_of):
        return list(value.items())
    if isinstance(value, (list, tuple)) and (everywhere or hasattr(type(value), "_fields")):
        return list(enumerate(value))
    return []


def _with_part(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    """A copy of a container with another part at a path. Dataclasses are not initialized again: their fields were
    checked with the future, and may be read-only or of another shape than their ``__init__`` takes."""
    if not path:
        return part
    step = path[0]
    name = step.name if isinstance(step, Attribute) else ""
    if len(path) > 1:
        part = _with_part(getattr(value, name) if name else value[step], path[1:], part)
    if isinstance(value, tuple):
        return tuple.__new__(type(value), (part if k == step else item for k, item in enumerate(value)))
    other = copy.copy(value)
    if name:
        object.__setattr__(other, name, part)
    else:
        other[step] = part
    return other


def _computed(value: Any) -> Any:
    """The value of a future that this process itself computes, once it is there; other values unchanged."""
    return value.result() if isinstance(value, Deferred) and value.computed_here else value


def _plan_whole(spec: MethodSpec, routing: Routing, join: Join, arguments: dict[Parameter, Any]) -> CallPlan:
    whole = {key: _to_send(spec, value) for key, value in arguments.items()}
    return CallPlan(whole, (Shard(),), routing.shard_of, routing.collecting, join, None, deferred_in(arguments))


def _plan_lists(spec: MethodSpec, layout: Layout, arguments: dict[Parameter, Any], source: str) -> CallPlan:
    """Lists are split if every argument is a list of length world_size; if none is one, all ranks get everything."""
    world_size = layout.world_size
    free = {key: value for key, value in arguments.items() if not isinstance(value, Broadcast)}
    lists = [key for key, value in free.items() if isinstance(value, list) and not isinstance(value, Deferred)]
    if not lists:
        return _plan_whole(spec, layout.one_shard, Join.LIST, arguments)
    for key, value in free.items():
        if not isinstance(value, list) or len(value) != world_size:
            others = ", ".join(repr(spec.parameter(other)) for other in lists if other != key)
            reason = (
                f"is {described(value)}"
                + (f", while {others} is a list" if not isinstance(value, list) else "")
                + f"; {source} lists only if every argument is a list of world_size = {world_size}. "
                "Wrap an argument in Broadcast(...) to send it whole to every rank"
            )
            raise _bad_argument(spec, key, reason)
    return _plan_items(spec, layout.by_rank, Join.LIST, arguments)


def _plan_items(spec: MethodSpec, routing: Routing, join: Join, arguments: dict[Parameter, Any]) -> CallPlan:
    count = routing.shards
    put_back(arguments)  # here a named tuple is a list of items, so a future in it is one of them
    whole: dict[Parameter, Any] = {}
    shards: list[dict[Parameter, Any]] = [{} for _ in range(count)]
    for key, value in arguments.items():
        if isinstance(value, Broadcast) or (isinstance(value, Deferred) and not spec.registration.materialize_futures):
            whole[key] = _to_send(spec, value)
            continue
        if isinstance(value, Deferred):
            items: list[Any] = [DeferredArgument(value, "item", item, count) for item in range(count)]
        elif isinstance(value, (list, tuple, range)) and len(value) == count:
            items = [_to_send(spec, item) for item in value]
        else:
            reason = (
                f"is {described(value)}; {spec.registration.mode!r} takes a list of {count} items, one item per shard "
                f"({routing.unit} = {count}). Pass such a list, or Broadcast(value) to send the same value to all ranks"
            )
            raise _bad_argument(spec, key, reason)
        for shard, item in zip(shards, items, strict=True):
            shard[key] = item
    made = tuple(map(Shard, shards))
    return CallPlan(whole, made, routing.shard_of, routing.collecting, join, None, deferred_in(arguments))


def _plan_rows(
    spec: MethodSpec,
    routing: Routing,
    mode: Mode,
    whole: dict[Parameter, Any],
    arguments: dict[Parameter, Any],
    uneven: str,
) -> CallPlan:
    count, join = routing.shards, mode.join
    shards: list[dict[Parameter, Any]] = [{} for _ in range(count)]
    rows: dict[Parameter, int] = {}
    for key, value in arguments.items():
        if isinstance(value, Deferred):
            if spec.registration.materialize_futures:
                if isinstance(key, tuple) and any(isinstance(step, Attribute) for step in key):
                    whole[key] = DeferredArgument(value, "setting")
                    continue
                for index, shard in enumerate(shards):
                    shard[key] = DeferredArgument(value, "rows", index, count, uneven)
            else:
                whole[key] = value
            continue
        try:
            length = batch.batch_type(value).length(value)
        except Exception as error:  # a BatchError, or whatever a user's type raises
            reason = (
                f"is {described(value)}, and {reason_of(error)}; {spec.registration.mode!r} cuts tensors, arrays, "
                f"TensorDicts, lists, dicts of those and types given to register_batch_type(). {_BROADCAST}"
            )
            raise _bad_argument(spec, key, reason) from None
        if length is not None:
            rows[key] = length
        elif isinstance(value, Broadcast):
            whole[key] = _to_send(spec, value)
        else:  # copies a dict of values without rows, and unwraps a Broadcast in it
            whole[key] = batch.cut(value, 0, 0)
    shares: list[Share] | list[None] = [None] * count
    total: int | None = None
    if rows:
        first, total = next(iter(rows.items()))
        other = next((key for key, length in rows.items() if length != total), None)
        if other is not None:
            reason = (
                f"has {rows[other]} rows, but {spec.parameter(first)!r} has {total}; all batches of one call need the "
                "same number of rows. Broadcast(value) sends a batch whole"
            )
            raise _bad_argument(spec, other, reason)
        try:
            shares = share_rows(total, count, uneven)
        except BatchError:
            # verl's DataProto(auto_padding=True)
            asks = any(getattr(arguments[key], "is_padding_enabled", bool)() for key in rows)
            way = (
                "The padding that the batch itself asks for has no effect: set uneven='pad'"
                if asks
                else f"Pass a multiple of {count}, or set uneven='pad' or 'ragged'"
            )
            reason = (
                f"has {total} rows, which do not divide over {count} shards ({routing.unit} = {count}). {way} in "
                f"@register or for one call: group.{spec.label}.options(uneven='pad')(...)"
            )
            raise _bad_argument(spec, first, reason) from None
        offsets: Made = {}
        for key in rows:
            try:
                cut = batch.shard(arguments[key], shares, offsets)
            except Exception as error:  # a BatchError, or whatever a user's type raises
                reason = f"is {described(arguments[key])} and cannot be cut: {reason_of(error)}. {_BROADCAST}"
                raise _bad_argument(spec, key, reason) from error
            for shard, rows_of_shard in zip(shards, cut, strict=True):
                shard[key] = rows_of_shard
    elif mode.function_first and not any(shards):
        join = Join.LIST  # no batch went in, so none comes out: the driver gets every rank's own result
    made = tuple(
        Shard(values) if share is None else Shard(values, share.rows, share.real)
        for values, share in zip(shards, shares, strict=True)
    )
    # Inline too
    may_have = any(isinstance(value, (Deferred, Broadcast, list, tuple)) for value in arguments.values())
    deferred = deferred_in(arguments) if may_have else ()
    return CallPlan(whole, made, routing.shard_of, routing.collecting, join, None, deferred, total)


def _bad_argument(spec: MethodSpec, key: Parameter, reason: str) -> DispatchError:
    name = spec.parameter(key)
    return DispatchError(f"{spec.label}(): argument {name!r} {reason}", method=spec.name, argument=name)


def _to_send(spec: MethodSpec, value: Any) -> Any:
    """An argument that is not cut: unwrapped from `Broadcast`; a future becomes its whole result unless kept."""
    if isinstance(value, Broadcast):
        value = value.value
    if isinstance(value, Deferred) and spec.registration.materialize_futures:
        return value.result() if value.computed_here else DeferredArgument(value, "whole")
    return value


def deferred_in(arguments: dict[Parameter, Any]) -> tuple[Deferred, ...]:
    """The futures among the arguments, in a `Broadcast` or a list too."""
    values = [value.value if isinstance(value, Broadcast) else value for value in arguments.values()]
    # Not in a future that is a list: it makes its references when it is read.
    lists = [value for value in values if isinstance(value, (list, tuple)) and not isinstance(value, Deferred)]
    values += [item for value in lists for item in value]
    return tuple(value for value in values if isinstance(value, Deferred))


def futures_in(value: Any, *, everywhere: bool = False, within: tuple[int, ...] = ()) -> Iterator[Deferred]:
    """The futures in a value that `plan_call` finds; with ``everywhere``, those that `find_futures` does."""
    if isinstance(value, Deferred):
        yield value
    elif isinstance(value, Broadcast):
        yield from futures_in(value.value, everywhere=everywhere)
    else:
        within = (*within, id(value))
        for _, part in _parts(value, everywhere=everywhere):
            if id(part) not in within:
                yield from futures_in(part, everywhere=everywhere, within=within)


def _take_function(spec: MethodSpec, arguments: dict[Parameter, Any]) -> dict[Parameter, Any]:
    """Remove the function, which is sent whole, from the arguments of DP_COMPUTE_PROTO_WITH_FUNC."""
    first = next(iter(spec.signature.parameters), None)
    key: Parameter | None = 0 if 0 in arguments else first if first in arguments else None
    if key is None or not callable(arguments[key]):
        got = "no argument" if key is None else described(arguments[key])
        raise DispatchError(
            f"{spec.label}(): {spec.registration.mode!r} takes a function first, then batches; got {got}",
            method=spec.name,
            argument=None if key is None else spec.parameter(key),
        )
    return {key: arguments.pop(key)}


def _call_dispatch_fn(
    spec: MethodSpec, mode: CustomMode, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Call a dispatch_fn. Returns (args, kwargs), or (args, kwargs, context)."""
    if spec.registration.materialize_futures:
        args, kwargs = tuple(map(_value_of, args)), {key: _value_of(value) for key, value in kwargs.items()}
    try:
        made = mode.dispatch_fn(
            group, *map(_copy_containers, args), **{key: _copy_containers(value) for key, value in kwargs.items()}
        )
    except Exception as error:
        error.add_note(f"raised by the dispatch_fn of {spec.label}(); nothing was sent")
        raise
    fits = isinstance(made, tuple) and len(made) in (2, 3)
    if not (fits and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict)):
        raise DispatchError(
            f"{spec.label}(): its dispatch_fn returned {described(made)}; it must return (args, kwargs): a tuple or "
            "list of positional arguments and a dict of keyword arguments; or (args, kwargs, context), if its "
            "collect_fn takes (group, results, context)",
            method=spec.name,
        )
    if len(made) == 3:
        try:
            inspect.signature(mode.collect_fn).bind(group, [], made[2])
        except ValueError:  # a built-in function that does not tell its parameters
            pass
        except TypeError:
            raise DispatchError(
                f"{spec.label}(): its dispatch_fn returned (args, kwargs) and a context, but its collect_fn takes no "
                "context; it must take (group, results, context)",
                method=spec.name,
            ) from None
    return tuple(made[0]), *made[1:]


def _value_of(value: Any) -> Any:
    """A value with the results of the futures in it, which are waited for."""
    apart: dict[Any, Any] = {}
    value = _take_futures(value, (), apart, everywhere=True)
    for path, future in apart.items():
        value = _with_part(value, path, future.result())
    return value


def _copy_containers(value: Any) -> Any:
    """Copy lists and dicts, but not what they hold: a dispatch_fn may append to its arguments."""
    if type(value) is list:
        return [_copy_containers(item) for item in value]
    if type(value) is tuple:
        return tuple(map(_copy_containers, value))
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return value


def reason_of(error: Exception) -> str:
    """Why a batch cannot be measured or cut: a `BatchError`, or what a function of the user has raised."""
    return str(error) if isinstance(error, BatchError) else f"{type(error).__name__}: {error}"
