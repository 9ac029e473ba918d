"""Dispatch and Execute: the named modes, and the registry from a name to its behavior.

A `Mode` answers three questions: which rank gets which shard (`route`), how an argument becomes shards (`cut`), and
what the driver gets (`join`). The table at the end of this file defines all built-in modes.
"""

from __future__ import annotations

import enum
import keyword
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, TypeVar

from dispatch.layout import Layout, Routing
from dispatch.typed import Blocks, ItemsToList, ReturnsFuture, ToAny, ToList, ToValue

Decorator = TypeVar("Decorator", covariant=True)
FutureDecorator = TypeVar("FutureDecorator", covariant=True)
Who = TypeVar("Who", covariant=True)
Route = Callable[[Layout], Routing]


class Cut(enum.Enum):
    """How the arguments become shards."""

    WHOLE = "the arguments unchanged"
    ITEMS = "each argument is a list with one item per shard"
    ROWS = "each argument is a batch, cut along its rows"


class Join(enum.Enum):
    """What the driver gets."""

    VALUE = "the result of the one collecting rank"
    LIST = "a list of the collecting ranks' results"
    ROWS = "one batch, joined along its rows"


@dataclass(frozen=True)
class Mode:
    """A built-in dispatch mode."""

    route: Route  # layout -> which rank gets which shard, and which ranks collect
    cut: Cut  # how an argument becomes shards
    join: Join  # what the driver gets
    function_first: bool = False  # whether the first argument is a function that every rank gets whole
    # Layout -> whether it has the coordinates that `route` reads; None if `route` needs only the number of ranks. The
    # group asks its workers for their coordinates before it plans a call of such a mode.
    in_layout: Callable[[Layout], bool] | None = None


@dataclass(frozen=True)
class CustomMode:
    """A pair of functions given by the user.

    Attributes:
        dispatch_fn: (group, *args, **kwargs) -> (args, kwargs), or (args, kwargs, context). If all of the arguments are
            lists of length world_size, rank i gets item i of each. If none is a list, every rank gets all of them. If
            the caller passes a future, the call waits for it, and the function gets its value; with
            ``materialize_futures=False``, the function gets the future itself.
        collect_fn: (group, list of all ranks' results) -> what the driver gets. If dispatch_fn has returned a context,
            which may be any value, it is called with (group, results, context).
    """

    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]


@dataclass(frozen=True)
class RefusedMode:
    """A mode that cannot be called from the driver, and the reason."""

    reason: str


AnyMode = Mode | CustomMode | RefusedMode


class DispatchMode(Generic[Decorator, FutureDecorator]):
    """A member of `Dispatch`, of which a process has one per name, or a mode of its own that is not in `Dispatch`.

    Replacing `mode`, the behavior of a member, also changes the methods that were decorated with it before. The type
    parameters are what `register` returns for it, for blocking and for non-blocking methods; see `typed`.
    """

    __slots__ = ("_own", "mode", "name")

    def __init__(self, name: str, own: AnyMode | None = None) -> None:
        self.name = name
        self._own = own
        self.mode: AnyMode = own or RefusedMode(
            f"unknown dispatch mode {name!r} in this process; register_dispatch_mode() adds one"
        )

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}" if self._own is None else self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DispatchMode) and (self.name, self._own) == (other.name, other._own)

    def __hash__(self) -> int:
        return hash((self.name, self._own))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_member, (self.name,)) if self._own is None else (DispatchMode, (self.name, self._own))


ListMode = DispatchMode[ToList[Blocks], ToList[ReturnsFuture]]
ItemsMode = DispatchMode[ItemsToList[Blocks], ItemsToList[ReturnsFuture]]
ValueMode = DispatchMode[ToValue[Blocks], ToValue[ReturnsFuture]]
UntypedMode = DispatchMode[ToAny, ToAny]


@dataclass(frozen=True)
class ExecuteMode(Generic[Who]):
    """A member of `Execute`: which ranks run a method."""

    name: str
    rank_zero: bool  # whether rank 0 runs alone, and gets the arguments uncut

    def __repr__(self) -> str:
        return f"Execute.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return known_execute_mode, (self.name,)


class _Members(type):
    """Makes a class a namespace of named members, with ``[name]``, ``in``, iteration and a readable repr."""

    _members: Mapping[str, Any]

    def __getattr__(cls, name: str) -> Any:
        if not name.startswith("_") and name in cls._members:
            return cls._members[name]
        raise AttributeError(f"{cls.__name__} has no mode {name!r}; it has {', '.join(cls._members)}")

    def __getitem__(cls, name: str) -> Any:
        if name in cls._members:
            return cls._members[name]
        raise KeyError(f"{cls.__name__} has no mode {name!r}; it has {', '.join(cls._members)}")

    def __contains__(cls, member: object) -> bool:
        return member in cls._members or member in cls._members.values()

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._members.values())

    def __len__(cls) -> int:
        return len(cls._members)

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *cls._members]

    def __repr__(cls) -> str:
        return f"<{cls.__name__}: {', '.join(cls._members)}>"


class Dispatch(metaclass=_Members):
    """The dispatch modes by name. `register_dispatch_mode` adds one, `update_dispatch_mode` replaces one."""

    _members: ClassVar[dict[str, DispatchMode]] = {}

    RANK_ZERO: ClassVar[ValueMode]
    ONE_TO_ALL: ClassVar[ListMode]
    ALL_TO_ALL: ClassVar[ItemsMode]
    DP_COMPUTE: ClassVar[ItemsMode]
    DP_COMPUTE_PROTO: ClassVar[ValueMode]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[ValueMode]
    DP_COMPUTE_METRIC: ClassVar[ListMode]
    MEGATRON_COMPUTE: ClassVar[ItemsMode]
    MEGATRON_COMPUTE_PROTO: ClassVar[ValueMode]
    MEGATRON_COMPUTE_METRIC: ClassVar[ListMode]
    MEGATRON_PP_AS_DP: ClassVar[ItemsMode]
    MEGATRON_PP_AS_DP_PROTO: ClassVar[ValueMode]
    DIRECT_ROLLOUT_METHOD: ClassVar[UntypedMode]

    @staticmethod
    def mesh(name: str) -> ValueMode:
        """Cut batches over the named mesh that the workers registered with `Worker.register_mesh`."""
        return make_nd_compute_dataproto_dispatch_fn(mesh_name=name)


class Execute(metaclass=_Members):
    """Which ranks run a method."""

    _members: ClassVar[dict[str, ExecuteMode]] = {
        "ALL": ExecuteMode("ALL", False),
        "RANK_ZERO": ExecuteMode("RANK_ZERO", True),
    }

    ALL: ClassVar[ExecuteMode[Literal["all"]]]
    RANK_ZERO: ClassVar[ExecuteMode[Literal["rank zero"]]]


_absent: dict[str, DispatchMode] = {}
"""Members without behavior, which arrived in a pickle before this process registered them. Methods may be decorated
with them, so a later registration of the name uses them again."""


def _member(name: str) -> DispatchMode:
    """Unpickle a member of `Dispatch`."""
    return Dispatch._members.get(name) or _absent.setdefault(name, DispatchMode(name))


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> UntypedMode:
    """Add a dispatch mode by name. It is then available as ``Dispatch.<name>`` in every process that has called this
    function: call it in a module that both the driver and the workers import.

    Args:
        name: an identifier that no mode has yet.
        dispatch_fn: ``(group, *args, **kwargs) -> (args, kwargs)``; see `CustomMode`.
        collect_fn: ``(group, results) -> value``; see `CustomMode`.

    Raises:
        ValueError: the name is taken, or is not a valid identifier.
        TypeError: one of the functions is not callable.
    """
    _check_new_name(name)
    return _add(name, _custom(name, dispatch_fn, collect_fn))


def update_dispatch_mode(
    dispatch_mode: DispatchMode | str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode:
    """Replace the behavior of a mode, also for methods that are already decorated with it.

    Raises:
        ValueError: no mode has that name.
        TypeError: one of the functions is not callable.
    """
    member = known_mode(dispatch_mode)
    if member._own is not None:
        raise ValueError(f"{member!r} has no name in Dispatch, so it cannot be updated")
    member.mode = _custom(member.name, dispatch_fn, collect_fn)
    return member


def known_mode(mode: object) -> DispatchMode:
    """Resolve a mode given by a user: a member of `Dispatch`, its name, or a dict of two functions."""
    if isinstance(mode, DispatchMode) and mode._own is not None:
        return mode
    name = mode.name if isinstance(mode, DispatchMode) else mode
    if isinstance(name, str):
        if name in Dispatch._members:
            return Dispatch._members[name]
        known = ", ".join(Dispatch._members)
        raise ValueError(f"unknown dispatch mode {name!r}; known are {known}. register_dispatch_mode() adds one")
    if isinstance(mode, dict):
        if set(mode) != {"dispatch_fn", "collect_fn"}:
            raise TypeError(
                "a dispatch mode given as a dict needs exactly the keys 'dispatch_fn' and 'collect_fn', "
                f"got {sorted(map(str, mode))}"
            )
        function = str(getattr(mode["dispatch_fn"], "__name__", "dispatch_fn"))
        return DispatchMode(f"custom({function})", _custom(function, **mode))
    raise TypeError(
        f"{mode!r} is not a dispatch mode; use one of {', '.join(map(repr, Dispatch))}, "
        "or a dict with 'dispatch_fn' and 'collect_fn'"
    )


def check_uneven(where: str, uneven: str, mode: DispatchMode, execute: ExecuteMode) -> None:
    """Raise a `ValueError` if ``uneven``, other than "error", would have no effect. With a custom mode it may have."""
    whole = execute.rank_zero or (isinstance(mode.mode, Mode) and mode.mode.cut is not Cut.ROWS)
    if uneven != "error" and whole:
        raise ValueError(f"{where}(uneven={uneven!r}): {mode!r} with {execute!r} cuts no batch into rows; leave it out")


def known_execute_mode(mode: object) -> ExecuteMode:
    """Resolve an execute mode given by a user: a member of `Execute`, or its name."""
    if isinstance(mode, ExecuteMode):
        return mode
    if isinstance(mode, str) and mode in Execute._members:
        return Execute._members[mode]
    raise ValueError(f"unknown execute mode {mode!r}; known are {', '.join(map(repr, Execute))}")


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ValueMode:
    """`Dispatch.mesh` under the name that verl uses: batches are cut by the mesh's dp ranks and joined from its
    collecting ranks. A `TypeError` if the name is not a non-empty string."""
    if not isinstance(mesh_name, str) or not mesh_name:
        raise TypeError(f"a mesh name is a non-empty string, got {mesh_name!r}")
    route = _MeshRoute(mesh_name)
    return DispatchMode(
        f"Dispatch.mesh({mesh_name!r})", Mode(route, Cut.ROWS, Join.ROWS, in_layout=_HasMesh(mesh_name))
    )


def collect_all_to_all(group: Any, output: list[Any]) -> list[Any]:
    """A ``collect_fn`` that returns the list of all ranks' results."""
    return output


@dataclass(frozen=True)
class _MeshRoute:
    name: str

    def __call__(self, layout: Layout) -> Routing:
        return layout.mesh(self.name).routing


@dataclass(frozen=True)
class _HasMesh:
    name: str

    def __call__(self, layout: Layout) -> bool:
        return self.name in layout.meshes


def _custom(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> CustomMode:
    for what, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
        if not callable(function):
            raise TypeError(f"dispatch mode {name!r}: {what} must be callable, got {function!r}")
    return CustomMode(dispatch_fn, collect_fn)


def _check_new_name(name: object) -> None:
    if isinstance(name, str) and name in Dispatch:
        raise ValueError(f"Dispatch.{name} exists already; update_dispatch_mode() replaces a mode")
    usable = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
    if not usable or hasattr(Dispatch, str(name)):
        raise ValueError(
            "Dispatch: the name of a mode is an identifier without a leading underscore that Dispatch does not use "
            f"itself; got {name!r}"
        )


def _add(name: str, mode: AnyMode) -> DispatchMode:
    Dispatch._members[name] = member = _absent.pop(name, None) or DispatchMode(name)
    member.mode = mode
    return member


has_axes: Callable[[Layout], bool] = attrgetter("known")
"""Whether a layout has what the MEGATRON modes read."""
_to_rank_zero: Route = attrgetter("rank_zero")
_to_all: Route = attrgetter("one_shard")
_by_rank: Route = attrgetter("by_rank")
_by_dp: Route = attrgetter("by_dp")
_by_dp_cp_pp: Route = attrgetter("by_dp_cp_pp")


_BUILT_IN: dict[str, AnyMode] = {
    "RANK_ZERO": Mode(_to_rank_zero, Cut.WHOLE, Join.VALUE),
    "ONE_TO_ALL": Mode(_to_all, Cut.WHOLE, Join.LIST),
    "ALL_TO_ALL": Mode(_by_rank, Cut.ITEMS, Join.LIST),
    "DP_COMPUTE": Mode(_by_rank, Cut.ITEMS, Join.LIST),
    "DP_COMPUTE_PROTO": Mode(_by_rank, Cut.ROWS, Join.ROWS),
    "DP_COMPUTE_PROTO_WITH_FUNC": Mode(_by_rank, Cut.ROWS, Join.ROWS, function_first=True),
    "DP_COMPUTE_METRIC": Mode(_by_rank, Cut.ROWS, Join.LIST),
    "MEGATRON_COMPUTE": Mode(_by_dp, Cut.ITEMS, Join.LIST, in_layout=has_axes),
    "MEGATRON_COMPUTE_PROTO": Mode(_by_dp, Cut.ROWS, Join.ROWS, in_layout=has_axes),
    "MEGATRON_COMPUTE_METRIC": Mode(_by_dp, Cut.ROWS, Join.LIST, in_layout=has_axes),
    "MEGATRON_PP_AS_DP": Mode(_by_dp_cp_pp, Cut.ITEMS, Join.LIST, in_layout=has_axes),
    "MEGATRON_PP_AS_DP_PROTO": Mode(_by_dp_cp_pp, Cut.ROWS, Join.ROWS, in_layout=has_axes),
    "DIRECT_ROLLOUT_METHOD": RefusedMode(
        "its mode is DIRECT_ROLLOUT_METHOD, for methods that the rollout engine calls on the worker itself. "
        "Call it through group.workers[rank], or give it another mode"
    ),
}
for _name, _mode in _BUILT_IN.items():
    _add(_name, _mode)
