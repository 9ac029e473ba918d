"""LocalWorkerGroup: a group whose workers are in the driver's own process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dispatch.checks import check_seconds, is_count
from dispatch.plan import CallPlan
from single_controller.call.codec import encode
from single_controller.call.group import ERROR_GRACE_SECONDS, WorkerGroup
from single_controller.call.worker.executor import Constructor
from single_controller.call.worker.worker_class import ClassWithInitArgs, Colocated, constructors
from single_controller.local.transport import LocalRank, LocalTransport

_ON_RAY_ONLY = {
    "workers": "there are no actors, the workers are in this process; group.execute_all_sync('name', ...) calls any of "
    "their methods",
    "worker_names": "its workers are not actors, and no other process can find them by name",
    "resource_pool": "it takes no resources from a pool",
    "plan": "all its workers are in this process",
    "detached": "its workers end with this process",
    "master_address": "its ranks share one process and have no rendezvous",
    "master_port": "its ranks share one process and have no rendezvous",
    "standbys": "all its workers are in this process",
    "hand_over_placement": "it takes no resources from a pool",
    **dict.fromkeys(
        ("replace", "areplace", "replace_or_shrink", "shrink", "ashrink", "grow", "agrow"),
        "its ranks share one process and cannot be added or removed; restart() creates new workers for all of them",
    ),
}
"""Attributes that only a group on Ray has, and why this one does not."""


def _on_ray_only(group: object) -> NoReturn:
    """Reserve a name that a group on Ray uses. `LocalWorkerGroup.__getattr__` then says why there is no value."""
    raise AttributeError


class LocalWorkerGroup(WorkerGroup):
    """Workers of one class, or of several roles, in the driver's own process and without Ray: to debug and test them.

    It behaves like a group on Ray: each rank has its own copy of its arguments (with ``inputs="view"``, the ranks share
    one), results are private to the driver, and a value that cannot be pickled is refused.

    By default, the ranks run one after the other in the caller's thread, and a call has ended when it returns, even
    ``group.m.remote(x)``. ``breakpoint()`` in a method stops there, below the driver's line. If Ray was started too,
    ``breakpoint()`` is that of Ray: call ``pdb.set_trace()`` instead. `single_controller.local.set_trace` steps from
    the driver's line into the method. An ``async def`` method runs in the worker's event loop, in a thread of its own.
    Ctrl-C, or "quit" in a debugger, leaves the call at once: earlier ranks have run it, later ranks have not. Nothing
    else interrupts a call: timeouts are compared with the time that each rank took, including time at a breakpoint.

    With ``threads=True``, each rank has a thread: futures are asynchronous, ranks overlap, methods with
    ``concurrent=True`` overtake others, and a rank that does not end in time breaks the group. Its method continues,
    whereas a process would be killed.

    Several ranks in one process cannot run collectives: `workers.distributed.initialize_distributed`,
    ``self.master_addr`` and ``self.master_port`` raise `LocalGroupError`. In a group of one rank, they work. RANK and
    the other variables are not set in the environment, which all ranks share. Therefore
    ``torch.distributed.init_process_group()`` needs explicit arguments, and you must destroy its process group
    yourself. ``sys.exit()`` in a method ends that rank; ``os._exit()`` or a signal ends the driver.

    Args:
        world_size: number of ranks.
        ray_cls_with_init: the worker class and its arguments: ``ClassWithInitArgs(YourWorker, ...)``, or
            ``RayClassWithInitArgs(...)``, whose options for Ray have no effect here, or `colocate` of several.
        threads: whether each rank has its own thread.
        name_prefix: prefix of the group's name in messages.
        worker_env: refused, because the ranks share the driver's environment.
        start_timeout: seconds that each constructor may take, or None.
        error_grace: seconds that the other ranks have to end a call after one raised.
        collectives: whether ranks wait for each other in collectives when the group runs on Ray; see `RayWorkerGroup`.

    Raises:
        StartError: a constructor raised.
        WorkerDiedError: a constructor called ``sys.exit()``.
        CallTimeoutError: a constructor took longer than ``start_timeout``.
        DispatchError: a class or an argument cannot be pickled, which Ray would need, or a registered method has a name
            that the group uses itself.
        ValueError: an option has an invalid value.
    """

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
        if not is_count(world_size):
            raise ValueError(f"world_size is the number of ranks, a positive integer; got {world_size!r}")
        made = ray_cls_with_init
        if not isinstance(made, (ClassWithInitArgs, Colocated)):
            raise TypeError(
                "ray_cls_with_init must be ClassWithInitArgs(YourWorker, ...), RayClassWithInitArgs(YourWorker, ...) "
                f"or colocate({{...}}) of several, got {made!r}"
            )
        if name_prefix is not None and not isinstance(name_prefix, str):
            raise ValueError(f"name_prefix is a string or None, got {name_prefix!r}")
        if worker_env is not None:
            raise ValueError(
                "worker_env: the workers of a LocalWorkerGroup share the environment of the driver's process; "
                "set os.environ, or pass constructor arguments to the workers"
            )
        self._constructors = constructors(made)
        for role in self._constructors.values():
            role.check_arguments()
        name = made.name if isinstance(made, Colocated) else made.cls.__name__
        classes = {role: made.cls for role, made in self._constructors.items()}
        super().__init__(classes, f"group {name_prefix or ''}{name}", error_grace)
        self._size = world_size
        self._threads = bool(threads)
        self._state.independent = not collectives
        self._start_timeout = None if start_timeout is None else check_seconds("start_timeout", start_timeout)
        self._start_workers(None)

    @classmethod
    def attach(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: no other process can reach the workers.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "the workers of a LocalWorkerGroup are in their driver's process; nobody else can attach to them"
        )

    from_detached = attach

    def __reduce__(self) -> Any:
        raise TypeError(
            "a LocalWorkerGroup runs in the driver's process, so it cannot be pickled and sent to a worker or a Ray "
            "task; use a RayWorkerGroup"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _ON_RAY_ONLY:
            raise AttributeError(f"a LocalWorkerGroup has no {name}: {_ON_RAY_ONLY[name]}")
        return super().__getattr__(name)

    def _start_workers(self, ranks: tuple[int, ...] | None) -> None:
        encoded = self._encode_constructors()
        before = self._state.transport
        known = before.ranks if isinstance(before, LocalTransport) else ()
        chosen = range(self._size) if ranks is None else ranks
        if before is not None:
            before.restarted |= frozenset(chosen)
        for rank in known:
            if rank.rank in chosen:
                rank.end("it was restarted")
        generation = self._state.restarts + (before is not None)  # `GroupState.restart` counts when it is done
        new = {rank: LocalRank(rank, self._size, self._threads, generation) for rank in chosen}
        transport = LocalTransport([new.get(rank) or known[rank] for rank in range(self._size)], self._threads)
        try:
            plan = CallPlan.empty(self._size).only(chosen)
            send = functools.partial(transport.start, encoded, chosen)
            self._wait_for_constructors(transport, plan, send, self._start_timeout)
        except BaseException:
            for rank in new.values():
                rank.end("its start failed")
            raise
        self._state.transport = transport

    def _encode_constructors(self) -> Callable[[], dict[str | None, Constructor]]:
        """Encode the arguments of the constructors. Returns what gives a rank the constructors, with its own arguments.
        The classes are encoded only to find out whether they can be."""
        classes = {role: made.cls for role, made in self._constructors.items()}
        try:
            encode(list(classes.values()))
            arguments = {role: (made.args, made.kwargs) for role, made in self._constructors.items()}
            encoded = encode(arguments, in_process=True)
        except Exception as error:
            for made in self._constructors.values():
                made.check_encodable(error)
            raise

        def decode() -> dict[str | None, Constructor]:
            own = encoded.decode()
            return {role: (cls, *own[role]) for role, cls in classes.items()}

        return decode


for _name in _ON_RAY_ONLY:
    setattr(LocalWorkerGroup, _name, property(_on_ray_only))
