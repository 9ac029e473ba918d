"""Dispatch and Execute: the named modes, and the registry from a name to what it does.

A `Mode` is three answers: who gets which shard (`route`), how an argument becomes shards (`cut`), and what
the driver gets (`join`). The table at the end of this file is the whole of the built-in behaviour.
"""

from __future__ import annotations

import enum
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from dispatch.layout import Layout, Routing


class Ranks(Protocol):
    """What dispatch needs to know of a group."""

    @property
    def world_size(self) -> int: ...

    @property
    def layout(self) -> Layout: ...


class Cut(enum.Enum):
    """How the arguments become shards."""

    WHOLE = "the arguments as they are"
    ITEMS = "per argument a list, one item a shard"
    ROWS = "per argument a batch, cut along its rows"


class Join(enum.Enum):
    """What the driver gets."""

    VALUE = "the one answer"
    LIST = "the list of the answers"
    ROWS = "one batch, joined along its rows"


@dataclass(frozen=True)
class Mode:
    """What a built-in dispatch mode does.

    Attributes:
        route: who gets which shard, and who answers.
        cut: how an argument becomes shards.
        join: what the driver gets.
        function_first: whether the first argument is a function that goes whole.
    """

    route: Callable[[Ranks], Routing]
    cut: Cut
    join: Join
    function_first: bool = False


@dataclass(frozen=True)
class CustomMode:
    """A user's pair.

    Attributes:
        dispatch_fn: (group, *args, **kwargs) -> (args, kwargs). When every one of them is a list of
            world_size, rank i gets item i of each; when none is a list, every rank gets them all.
        collect_fn: (group, list of all ranks' answers) -> what the driver gets.
    """

    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]


@dataclass(frozen=True)
class RefusedMode:
    """A mode that the driver may not call, and why."""

    reason: str


AnyMode = Mode | CustomMode | RefusedMode


class DispatchMode:
    """A member of `Dispatch`: a name. What the name does is looked up at each call, so it can be replaced."""

    __slots__ = ("_own", "name")

    def __init__(self, name: str, own: AnyMode | None = None) -> None:
        self.name = name
        self._own = own

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}" if self._own is None else self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DispatchMode) and (self.name, self._own) == (other.name, other._own)

    def __hash__(self) -> int:
        return hash((self.name, self._own))

    def __reduce__(self) -> tuple[Any, ...]:
        return (DispatchMode, (self.name, self._own))

    @property
    def mode(self) -> AnyMode:
        """What this name does now.

        Raises:
            ValueError: the name is not registered in this process.
        """
        return self._own if self._own is not None else _dispatch_modes[known_mode(self.name).name]


@dataclass(frozen=True)
class ExecuteMode:
    """A member of `Execute`: who runs a method.

    Attributes:
        name: its name.
        ranks: world_size -> the ranks that run, in the order of their answers; None means all of them, with
            the arguments cut as the dispatch mode says. Otherwise the arguments go to those ranks uncut.
    """

    name: str
    ranks: Callable[[int], Sequence[int]] | None = None

    def __repr__(self) -> str:
        return f"Execute.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_execute_mode, (self.name,))

    @property
    def bare_value(self) -> bool:
        """Whether the driver gets the one rank's value instead of a list."""
        return self.name == "RANK_ZERO"


class _Members(type):
    """Makes a class a namespace of named members: attribute, ``[name]``, ``in``, iteration, a good repr."""

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

    RANK_ZERO: ClassVar[DispatchMode]
    ONE_TO_ALL: ClassVar[DispatchMode]
    ALL_TO_ALL: ClassVar[DispatchMode]
    DP_COMPUTE: ClassVar[DispatchMode]
    DP_COMPUTE_PROTO: ClassVar[DispatchMode]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[DispatchMode]
    DP_COMPUTE_METRIC: ClassVar[DispatchMode]
    MEGATRON_COMPUTE: ClassVar[DispatchMode]
    MEGATRON_COMPUTE_PROTO: ClassVar[DispatchMode]
    MEGATRON_COMPUTE_METRIC: ClassVar[DispatchMode]
    MEGATRON_PP_AS_DP: ClassVar[DispatchMode]
    MEGATRON_PP_AS_DP_PROTO: ClassVar[DispatchMode]
    DIRECT_ROLLOUT_METHOD: ClassVar[DispatchMode]

    @staticmethod
    def mesh(name: str) -> DispatchMode:
        """Batches cut over the named mesh that the workers registered with `Worker.register_mesh`."""
        return make_nd_compute_dataproto_dispatch_fn(mesh_name=name)


class Execute(metaclass=_Members):
    """Who runs a method. `Execute.register` adds a choice of ranks by name."""

    _members: ClassVar[dict[str, ExecuteMode]] = {
        "ALL": ExecuteMode("ALL"),
        "RANK_ZERO": ExecuteMode("RANK_ZERO", lambda world_size: (0,)),
    }

    ALL: ClassVar[ExecuteMode]
    RANK_ZERO: ClassVar[ExecuteMode]

    @classmethod
    def register(cls, name: str, ranks: Callable[[int], Sequence[int]]) -> ExecuteMode:
        """Add a choice of ranks.

        Args:
            name: its name, from then on ``Execute.<name>``.
            ranks: world_size -> the ranks that run. They get the arguments uncut; the driver gets the list
                of their answers in that order.

        Raises:
            ValueError: the name is taken, or is no Python name.
            TypeError: ``ranks`` cannot be called.
        """
        _check_new_name("Execute", name, cls._members)
        if not callable(ranks):
            raise TypeError(f"Execute.register({name!r}): ranks must be callable, got {ranks!r}")
        cls._members[name] = ExecuteMode(name, ranks)
        return cls._members[name]


_dispatch_modes: dict[str, AnyMode] = {}


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """Add a dispatch mode by name; it is ``Dispatch.<name>`` from then on.

    Args:
        name: a Python name that no mode has yet.
        dispatch_fn: see `CustomMode`.
        collect_fn: see `CustomMode`.

    Raises:
        ValueError: the name is taken, or is no Python name.
        TypeError: one of the functions cannot be called.
    """
    _check_new_name("Dispatch", name, Dispatch._members)
    mode = _custom(name, dispatch_fn, collect_fn)
    return _add(name, mode)


def update_dispatch_mode(
    dispatch_mode: DispatchMode | str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode:
    """Replace what a known mode does, for the methods already decorated with it too.

    Raises:
        ValueError: no mode has that name.
        TypeError: one of the functions cannot be called.
    """
    member = known_mode(dispatch_mode)
    if member._own is not None:
        raise ValueError(f"{member!r} has no name in Dispatch, so it cannot be updated")
    _dispatch_modes[member.name] = _custom(member.name, dispatch_fn, collect_fn)
    return member


def known_mode(mode: object) -> DispatchMode:
    """The mode that a user named: a member of `Dispatch`, its name, or a pair of functions in a dict.

    Raises:
        ValueError: an unknown name.
        TypeError: something that is no mode, or a dict without exactly ``dispatch_fn`` and ``collect_fn``.
    """
    if isinstance(mode, DispatchMode) and mode._own is not None:
        return mode
    name = mode.name if isinstance(mode, DispatchMode) else mode
    if isinstance(name, str):
        if name in Dispatch._members:
            return Dispatch._members[name]
        raise ValueError(
            f"unknown dispatch mode {name!r}; known are {', '.join(Dispatch._members)}. "
            "register_dispatch_mode() adds one"
        )
    if isinstance(mode, dict):
        if set(mode) != {"dispatch_fn", "collect_fn"}:
            raise TypeError(
                "a dispatch mode given as a dict has exactly the keys 'dispatch_fn' and 'collect_fn', "
                f"got {sorted(map(str, mode))}"
            )
        function = str(getattr(mode["dispatch_fn"], "__name__", "dispatch_fn"))
        return DispatchMode(f"custom({function})", _custom(function, **mode))
    raise TypeError(
        f"{mode!r} is no dispatch mode; use one of {', '.join(map(repr, Dispatch))}, "
        "or a dict of 'dispatch_fn' and 'collect_fn'"
    )


def known_execute_mode(mode: object) -> ExecuteMode:
    """The execute mode that a user named.

    Raises:
        ValueError: an unknown one.
    """
    if isinstance(mode, ExecuteMode):
        return mode
    if isinstance(mode, str) and mode in Execute._members:
        return Execute._members[mode]
    raise ValueError(f"unknown execute mode {mode!r}; known are {', '.join(map(repr, Execute))}")


def _execute_mode(name: str) -> ExecuteMode:
    """The member of that name; a bare one on a worker, where nobody asks which ranks it means."""
    return Execute._members.get(name) or ExecuteMode(name)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """The mode of a named mesh: batches cut by the mesh's dp ranks, joined from its collecting ranks.

    `Dispatch.mesh` is the shorter spelling.

    Raises:
        TypeError: the name is no string.
    """
    if not isinstance(mesh_name, str) or not mesh_name:
        raise TypeError(f"a mesh name is a non-empty string, got {mesh_name!r}")
    return DispatchMode(f"Dispatch.mesh({mesh_name!r})", Mode(_MeshRoute(mesh_name), Cut.ROWS, Join.ROWS))


def collect_all_to_all(group: Ranks, output: list[Any]) -> list[Any]:
    """The collect function that hands the driver every rank's answer, by rank."""
    return output


@dataclass(frozen=True)
class _MeshRoute:
    name: str

    def __call__(self, ranks: Ranks) -> Routing:
        return ranks.layout.mesh(self.name).routing


def _flat(ranks: Ranks) -> Routing:
    return Routing.flat(ranks.world_size)


def _to_all(ranks: Ranks) -> Routing:
    everyone = range(ranks.world_size)
    return Routing.only(everyone, ranks.world_size)


def _rank_zero(ranks: Ranks) -> Routing:
    return Routing.only((0,), ranks.world_size)


def _by_dp(ranks: Ranks) -> Routing:
    return ranks.layout.by_dp


def _by_dp_cp_pp(ranks: Ranks) -> Routing:
    return ranks.layout.by_dp_cp_pp


def _custom(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> CustomMode:
    for what, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
        if not callable(function):
            raise TypeError(f"dispatch mode {name!r}: {what} must be callable, got {function!r}")
    return CustomMode(dispatch_fn, collect_fn)


def _check_new_name(where: str, name: object, taken: Mapping[str, Any]) -> None:
    if not isinstance(name, str):
        raise ValueError(f"{where}: a mode's name is a Python name, got {name!r}")
    namespace = {"Dispatch": Dispatch, "Execute": Execute}[where]
    if name in taken:
        hint = "; update_dispatch_mode() replaces a mode" if where == "Dispatch" else ""
        raise ValueError(f"{where}.{name} exists already{hint}")
    usable = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
    if not usable or hasattr(namespace, name):
        raise ValueError(
            f"{where}: a mode's name is a Python name without a leading underscore, and no method of {where}; "
            f"got {name!r}"
        )


def _add(name: str, mode: AnyMode) -> DispatchMode:
    _dispatch_modes[name] = mode
    Dispatch._members[name] = DispatchMode(name)
    return Dispatch._members[name]


_BUILT_IN: dict[str, AnyMode] = {
    "RANK_ZERO": Mode(_rank_zero, Cut.WHOLE, Join.VALUE),
    "ONE_TO_ALL": Mode(_to_all, Cut.WHOLE, Join.LIST),
    "ALL_TO_ALL": Mode(_flat, Cut.ITEMS, Join.LIST),
    "DP_COMPUTE": Mode(_flat, Cut.ITEMS, Join.LIST),
    "DP_COMPUTE_PROTO": Mode(_flat, Cut.ROWS, Join.ROWS),
    "DP_COMPUTE_PROTO_WITH_FUNC": Mode(_flat, Cut.ROWS, Join.ROWS, function_first=True),
    "DP_COMPUTE_METRIC": Mode(_flat, Cut.ROWS, Join.LIST),
    "MEGATRON_COMPUTE": Mode(_by_dp, Cut.ITEMS, Join.LIST),
    "MEGATRON_COMPUTE_PROTO": Mode(_by_dp, Cut.ROWS, Join.ROWS),
    "MEGATRON_COMPUTE_METRIC": Mode(_by_dp, Cut.ROWS, Join.LIST),
    "MEGATRON_PP_AS_DP": Mode(_by_dp_cp_pp, Cut.ITEMS, Join.LIST),
    "MEGATRON_PP_AS_DP_PROTO": Mode(_by_dp_cp_pp, Cut.ROWS, Join.ROWS),
    "DIRECT_ROLLOUT_METHOD": RefusedMode(
        "its mode is DIRECT_ROLLOUT_METHOD: the rollout engine calls it on the worker directly, "
        "the driver never does; call it through group.workers[rank], or give it another mode"
    ),
}
for _name, _mode in _BUILT_IN.items():
    _add(_name, _mode)
