"""RayClassWithInitArgs: a worker class, its constructor's arguments, and options for the actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.actor import ActorClass

from single_controller.base.checks import check_amounts
from single_controller.base.pool import ClassWithInitArgs


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its constructor's arguments, with options for the actors.

    Args:
        cls: a subclass of `Worker`, plain or under ``@ray.remote``.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.

    Raises:
        TypeError: ``cls`` is no subclass of `Worker`, or the arguments do not fit its constructor.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        options: dict[str, Any] = {}
        if isinstance(cls, ActorClass):
            declared = getattr(cls, "_default_options", None) or {}
            # The pool decides how much of a CPU and a GPU a worker has.
            options = {key: value for key, value in declared.items() if key not in ("num_cpus", "num_gpus")}
            cls = cast(Any, cls).__ray_metadata__.modified_class.__ray_actor_class__
            _refuse_held(f"@ray.remote(...) on {cls.__name__}", options)
        super().__init__(cls, *args, **kwargs)
        self._options = options
        self._additional_resource: dict[str, float] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Ray's actor options, besides those that the group sets."""
        return dict(self._options)

    @property
    def additional_resource(self) -> dict[str, float]:
        """Custom resources of each worker."""
        return dict(self._additional_resource)

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray's actor options (``{"num_cpus": 0.5}``). They win over the group's own.

        Raises:
            ValueError: Ray has no such option, or the group needs it for itself.
        """
        _refuse_held("update_options()", options)
        ray.remote(_Probe).options(**options)  # Ray's own check of names and values
        self._options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Set custom resources that each worker takes (``{"disk": 1}``).

        Raises:
            ValueError: an amount that is no positive number.
        """
        self._additional_resource = check_amounts("set_additional_resource()", additional_resource)


_HELD = frozenset(
    {
        "concurrency_groups",
        "lifetime",
        "max_concurrency",
        "max_restarts",
        "max_task_retries",
        "name",
        "namespace",
        "placement_group",
        "scheduling_strategy",
    }
)
"""Options of Ray's that a group needs for itself. An actor that Ray revived, say, would have lost its worker."""


def _refuse_held(what: str, options: Mapping[str, Any]) -> None:
    held = sorted(_HELD & {key for key, value in options.items() if value is not None})
    if held:
        raise ValueError(f"{what}: the group sets {held} itself")


class _Probe:
    pass
