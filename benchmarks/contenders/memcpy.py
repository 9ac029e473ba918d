"""The floor: the same bytes copied once, from memory that has been touched to memory that has been touched."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import data
from benchmarks.protocol import Call, serve


class Memcpy:
    """One copy of the case's bytes."""

    def versions(self) -> dict[str, str]:
        """Versions of what runs here."""
        return {"python": platform.python_version(), "torch": torch.__version__}

    def broadcast(self, nbytes: int, **_: Any) -> Iterator[dict[str, Call]]:
        """Any case that moves ``nbytes``."""
        source = data.batch(nbytes)
        target = torch.empty_like(source)
        to, there = target.numpy(), source.numpy()  # libc's memcpy, which is faster than torch's own copy
        yield {"": Call(lambda: np.copyto(to, there), lambda _: data.same(target, source))}

    echo = mesh = chain = broadcast


if __name__ == "__main__":
    serve(Memcpy())
