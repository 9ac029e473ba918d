"""The lower bound: copy the same bytes once, between buffers whose pages are already mapped."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import data
from benchmarks.protocol import Call, serve


class Memcpy:
    """Copies the case's bytes once."""

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
