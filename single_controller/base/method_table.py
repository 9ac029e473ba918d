"""MethodTable: the methods of a worker class, by name, and what to say of a name that is none."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace

from dispatch.errors import DispatchError
from dispatch.register import MethodSpec, method_spec, registered_methods
from single_controller.base.worker import Worker


class MethodTable:
    """The methods of one worker class.

    Args:
        cls: the class.
        role: its role, where several classes share a process.

    Attributes:
        registered: name -> method, of those under @register.
    """

    def __init__(self, cls: type[Worker], role: str | None = None) -> None:
        self.cls = cls
        self.role = role
        self.registered = {name: replace(spec, role=role) for name, spec in registered_methods(cls).items()}

    def refuse(self, taken: Iterable[str]) -> None:
        """Check that no registered method has one of some names.

        Raises:
            DispatchError: one has.
        """
        clashes = sorted(set(taken) & set(self.registered))
        if clashes:
            raise DispatchError(
                f"{self.cls.__name__} registers {', '.join(f'{name}()' for name in clashes)}, a name that a group "
                "needs for itself: rename the method",
                method=clashes[0],
            )

    def any(self, name: str) -> MethodSpec:
        """A method, registered or not.

        Raises:
            AttributeError: there is none of that name.
        """
        spec = self.registered.get(name) or method_spec(self.cls, name)
        if spec is None:
            raise AttributeError(f"{self.cls.__name__} has no method {name!r}{closest(name, dir(self.cls))}")
        return replace(spec, role=self.role)

    def missing(self, name: str, others: Iterable[str]) -> AttributeError:
        """The error for a name that is no registered method; ``others`` are the names that the group has besides."""
        owner = self.cls.__name__
        if method_spec(self.cls, name) is not None:
            return AttributeError(
                f"{owner}.{name}() is not registered: put @register(...) on it, or call "
                f"group.execute_all_sync({name!r}, ...)"
            )
        return AttributeError(f"the group has no method {name!r}, nor has {owner}{closest(name, others)}")


def closest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one that there is, or all of them."""
    public = [known for known in names if not known.startswith("_")]
    found = difflib.get_close_matches(name, public, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; it has {', '.join(public)}"
