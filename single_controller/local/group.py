"""LocalWorkerGroup: a group whose workers are in the driver's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from dispatch.plan import CallPlan
from single_controller.base.call import Call
from single_controller.base.checks import check_seconds
from single_controller.base.colocate import Colocated
from single_controller.base.group import ERROR_GRACE_SECONDS, WorkerGroup
from single_controller.base.monitor import monitor
from single_controller.base.pool import ClassWithInitArgs
from single_controller.local.engine import LocalEngine
from single_controller.local.parcel import Parcel
from single_controller.local.place import LocalPlace
from single_controller.local.rank import LocalRank
from single_controller.ray.carried import refuse_unpicklable
from single_controller.ray.transport import pack

_ELSEWHERE = {
    "workers": "there are no actors, the workers are in this process; group.execute_all_sync('name', ...) calls any of "
    "their methods",
    "worker_names": "its workers are no actors, and nobody else can find them by name",
    "resource_pool": "it takes no room in a pool",
    "plan": "its workers are in this process, and nowhere else",
    "detached": "its workers end with this process",
    "master_address": "its ranks have no rendezvous, being in one process",
    "master_port": "its ranks have no rendezvous, being in one process",
}
"""What a group on Ray has and this one cannot have, and why."""


class _OnRayOnly:
    """The name is taken, as it is in a group on Ray; `LocalWorkerGroup.__getattr__` says why there is nothing."""

    def __get__(self, group: object, owner: type) -> _OnRayOnly:
        if group is None:
            return self
        raise AttributeError


class LocalWorkerGroup(WorkerGroup):
    """Workers of one class, or of several roles, in the driver's own process and without Ray: to debug and test them.

    Classes, decorators, modes, layouts, futures, errors, roles, stats, `watch` and `restart` are those of a group on
    Ray, and so is what arguments mean: each rank has its own private copy of what it gets (``inputs="view"``: one that
    the ranks share), answers are the driver's own, and what cannot be pickled is refused.

    By default the ranks run one after the other, in the thread that calls: ``breakpoint()`` in a method stops there,
    below the driver's line, and a debugger steps into it (`single_controller.local.set_trace` in one step). A call has
    ended when it returns, also ``group.m.remote(x)``. Ctrl-C, or "quit" in a debugger, leaves the call at once: ranks
    before have run it, ranks behind have not. Where Ray was started in the same process, ``breakpoint()`` belongs to
    Ray's debugger: call ``pdb.set_trace()`` or `set_trace`. An ``async def`` method runs on the worker's event loop, in
    its thread.

    With ``threads=True`` each rank has a thread: futures are asynchronous, ranks overlap, ``concurrent=True`` methods
    overtake, and a rank that does not end in time breaks the group. A thread cannot be stopped, so its method goes on
    where a process would be killed.

    What needs processes is an error that says so: collectives between ranks (a group of one rank may have a process
    group), ``self.master_addr`` and ``self.master_port`` of a group of several, detached workers. The ranks have one
    environment: RANK and the like are not in it, ``self.rank`` and the like are set. ``sys.exit()`` in a method ends
    that rank; what ends a process, ``os._exit()`` or a signal, ends the driver.

    Args:
        world_size: number of ranks.
        ray_cls_with_init: what they are: ``ClassWithInitArgs(YourWorker, ...)``, ``RayClassWithInitArgs(...)`` (what it
            asks of Ray does not count here), or `colocate` of several.
        threads: whether each rank has a thread of its own.
        name_prefix: prefix of the group's name in messages.
        worker_env: refused: the ranks share the driver's environment.
        start_timeout: seconds that each constructor may take, or None.
        error_grace: seconds that the other ranks have to end a call after one raised in it.
        collectives: whether ranks wait for each other in collectives when the group runs on Ray. If they never do,
            ``restart(ranks=[3])`` may restart some of them alone.

    A call's timeout, and ``start_timeout``, is compared with what each rank took after it has ended, where ranks run
    one after the other: nothing interrupts them, and the time that you spend at a break point counts.

    Raises:
        StartError: a constructor raised.
        WorkerDiedError: a constructor called ``sys.exit()``.
        CallTimeoutError: the constructors took longer than ``start_timeout``.
        DispatchError: the class or its arguments cannot be pickled, which Ray would need, or it registers a method
            whose name the group needs.
        ValueError: an option that is not possible.
    """

    workers = worker_names = resource_pool = plan = detached = master_address = master_port = _OnRayOnly()

    def __init__(
        self,
        world_size: int,
        ray_cls_with_init: ClassWithInitArgs | Colocated,
        *,
        threads: bool = False,
        name_prefix: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        start_timeout: float | None = None,
        error_grace: float = ERROR_GRACE_SECONDS,
        collectives: bool = True,
    ) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
            raise ValueError(f"world_size is the number of ranks, a positive integer; got {world_size!r}")
        if not isinstance(ray_cls_with_init, (ClassWithInitArgs, Colocated)):
            raise TypeError(
                "ray_cls_with_init is RayClassWithInitArgs(YourWorker, ...) or ClassWithInitArgs(YourWorker, ...), or "
                f"colocate({{...}}) of several, got {ray_cls_with_init!r}"
            )
        if name_prefix is not None and not isinstance(name_prefix, str):
            raise ValueError(f"name_prefix is a string or None, got {name_prefix!r}")
        if worker_env is not None:
            raise ValueError(
                "worker_env: the workers of a LocalWorkerGroup are in the driver's process and have its environment, "
                "one for all ranks; set os.environ, or give the workers what they need as constructor arguments"
            )
        made = ray_cls_with_init
        roles: Mapping[Any, ClassWithInitArgs] = made.roles if isinstance(made, Colocated) else {None: made}
        self._made: dict[str | None, ClassWithInitArgs] = dict(roles)
        what = made.name if isinstance(made, Colocated) else made.cls.__name__
        super().__init__(self._roles_classes(), f"group {name_prefix or ''}{what}", error_grace)
        self._size = world_size
        self._threads = bool(threads)
        self._collectives = bool(collectives)
        self._start_timeout = None if start_timeout is None else check_seconds("start_timeout", start_timeout)
        try:
            self._start_again(None)
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see the message.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "the workers of a LocalWorkerGroup are in their driver's process; nobody else can attach to them"
        )

    @classmethod
    def from_detached(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as `attach` is.

        Raises:
            TypeError: always.
        """
        cls.attach()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a LocalWorkerGroup and its workers are in the driver's process: it cannot be sent to a worker, or to Ray. "
            "A RayWorkerGroup can"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _ELSEWHERE:
            raise AttributeError(f"a LocalWorkerGroup has no {name}: {_ELSEWHERE[name]}")
        return super().__getattr__(name)

    # --- the inside -----------------------------------------------------------------------------------------------

    def _roles_classes(self) -> dict[str | None, Any]:
        return {role: made.cls for role, made in self._made.items()}

    def _start_again(self, ranks: tuple[int, ...] | None) -> None:
        """Start the workers of some ranks, or all; those that were there are ended."""
        parcel = self._pack_arguments()
        before = self._running.ranks if isinstance(self._running, LocalEngine) else ()
        chosen = range(self._size) if ranks is None else ranks
        if self._running is not None:
            self._running.given_up |= frozenset(chosen)
        for rank in before:
            if rank.place.rank in chosen:
                rank.end("it was restarted")
        anew = {rank: LocalRank(LocalPlace(rank, self._size), self._threads) for rank in chosen}
        engine = LocalEngine([anew.get(rank) or before[rank] for rank in range(self._size)], self._threads)
        try:
            sent = engine.start(self._roles_classes(), parcel, chosen)
            plan = CallPlan.empty(self._size).only(chosen)
            call = Call(self._state, engine, "__init__", plan, sent, self._start_timeout, starting=True)
            monitor.wait(call)
            if call.error is not None:
                raise call.error
        except BaseException:
            for rank in anew.values():
                rank.end("its start failed")
            raise
        self._running = engine

    def _pack_arguments(self) -> Parcel:
        """The constructors' arguments, by role; the classes are packed too, to find out whether they can be.

        Raises:
            DispatchError: a class or an argument cannot be pickled.
        """
        arguments = {role: (made.args, made.kwargs) for role, made in self._made.items()}
        try:
            pack(list(self._roles_classes().values()))
            parcel = Parcel.of(lambda: pack(arguments))
        except Exception as error:
            for made in self._made.values():
                refuse_unpicklable(made, error)
            raise
        return parcel or Parcel(pack(arguments), [])
