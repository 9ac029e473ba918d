"""The in-process transport: the workers of a group in the driver's own process, without Ray, to debug and test them."""

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:  # the table of what this package exports, which `lazy_exports` reads too
    from single_controller.local.debugger import set_trace as set_trace
    from single_controller.local.group import LocalWorkerGroup as LocalWorkerGroup
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
