"""The in-process transport: the workers of a group in the driver's own process, without Ray, to debug and test them."""

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:
    from single_controller.local.debugger import set_trace
    from single_controller.local.group import LocalWorkerGroup

__all__ = ["LocalWorkerGroup", "set_trace"]

_HOMES = {
    "LocalWorkerGroup": "single_controller.local.group",
    "set_trace": "single_controller.local.debugger",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
