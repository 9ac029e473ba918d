"""PyTorch Monarch's actors, on their public interface.

Monarch has no batch type, so rows are sharded and joined by hand, as in the adapter for plain Ray. It has no references
to results either, so in a chain the consumers hold the producers' mesh and request the rows that they need.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from monarch.actor import Actor, current_rank, endpoint, shutdown_context, this_host

from benchmarks import data
from benchmarks.contenders.by_hand import forms, joined, tensor
from benchmarks.contenders.processes import check_started, in_flight, small_calls
from benchmarks.protocol import Call, serve


class Small(Actor):
    """An actor that imports nothing, or only torch."""

    def __init__(self, with_torch=False):
        self.rank = current_rank().rank
        if with_torch:
            import torch

            self.torch = torch.__version__

    @endpoint
    def where(self):
        return self.rank, os.getpid()

    @endpoint
    def take(self, payload=None, back=False):
        return payload if back else None


class Ranks(Actor):
    """An actor that takes and returns tensors or arrays."""

    @endpoint
    def load(self, nbytes, of):
        self.shard = data.shard(nbytes, current_rank().rank, of)

    @endpoint
    def digest(self, x):
        return data.digest(tensor(x))

    @endpoint
    def take(self, x):
        return data.ends(tensor(x))

    @endpoint
    def echo(self, x):
        return x

    @endpoint
    def echo_from(self, x, collecting):
        here = current_rank()
        return x if all(here[axis] == coordinate for axis, coordinate in collecting.items()) else None

    @endpoint
    def rows(self, start, stop, form):
        return form(self.shard[start:stop])


class Consumers(Actor):
    """An actor that requests rows from other actors."""

    @endpoint
    async def pull(self, producers, first, second, look, form):
        rank, mine, theirs = current_rank().rank, data.ROWS // second, data.ROWS // first
        wanted = [
            (k, max(rank * mine, k * theirs) - k * theirs, min((rank + 1) * mine, (k + 1) * theirs) - k * theirs)
            for k in range(first)
        ]
        asked = [producers.slice(procs=k).rows.call_one(start, stop, form) for k, start, stop in wanted if start < stop]
        return look(joined([await shard for shard in asked]))


class Monarch:
    """The cases on Monarch."""

    def versions(self):
        """Versions of what runs here."""
        found = {package: metadata.version(package) for package in ("torchmonarch", "torch")}
        return {"python": platform.python_version(), **found}

    def broadcast(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """One message to a mesh."""
        batch = data.batch(nbytes)
        with _mesh(Ranks, procs=ranks) as mesh:
            yield forms(
                lambda form: list(mesh.take.call(form(batch)).get().values()),
                functools.partial(data.same, wanted=[data.ends(batch)] * ranks),
                lambda form: data.same(
                    list(mesh.digest.call(form(batch)).get().values()), [data.digest(batch)] * ranks
                ),
            )

    def echo(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """Rows out and back."""
        batch = data.batch(nbytes)
        with _mesh(Ranks, procs=ranks) as mesh:

            def run(form):
                shards = enumerate(batch.chunk(ranks))
                futures = [mesh.slice(procs=k).echo.call_one(form(shard)) for k, shard in shards]
                return joined([future.get() for future in futures])

            yield forms(run, functools.partial(data.same, wanted=batch))

    def mesh(self, nbytes: int, dp: int, tp: int, pp: int) -> Iterator[dict[str, Call]]:
        """Rows to the ranks of each dp coordinate, and back from tp 0 of the last pp stage."""
        batch = data.batch(nbytes)
        collecting = {"pp": pp - 1, "tp": 0}
        with _mesh(Ranks, dp=dp, pp=pp, tp=tp) as mesh:

            def run(form):
                shards = enumerate(batch.chunk(dp))
                futures = [mesh.slice(dp=k).echo_from.call(form(shard), collecting) for k, shard in shards]
                return joined([value for future in futures for value in future.get().values() if value is not None])

            yield forms(run, functools.partial(data.same, wanted=batch))

    def chain(self, nbytes: int, first: int, second: int) -> Iterator[dict[str, Call]]:
        """Consumers pull from producers."""
        digests, ends = data.expected(nbytes, second)
        with _mesh(Ranks, procs=first) as producers, _mesh(Consumers, procs=second) as consumers:
            producers.load.call(nbytes, first).get()

            def run(form, look=data.ends):
                return list(consumers.pull.call(producers, first, second, look, form).get().values())

            yield forms(
                run,
                functools.partial(data.same, wanted=ends),
                lambda form: data.same(run(form, data.digest), digests),
            )

    def start(self, ranks: int, torch: bool) -> Iterator[dict[str, Call]]:
        """Processes, actors, and a first call."""

        def run():
            procs = this_host().spawn_procs(per_host={"procs": ranks})
            mesh = procs.spawn("small", Small, torch)
            return procs, list(mesh.where.call().get().values())

        def finish(got):
            procs, where = got
            procs.stop().get()
            check_started(sorted(where), ranks)

        yield {"": Call(run, finish)}

    def small_calls(self, ranks: int) -> Iterator[dict[str, Call]]:
        """Calls without an argument or with a small one, and without a result."""
        with _mesh(Small, procs=ranks) as mesh:

            def wait(sent):
                return list(sent.get().values())

            calls = small_calls(lambda *args: wait(mesh.take.call(*args)), ranks)
            if ranks == 4:
                calls["100 in flight"] = in_flight(mesh.take.call, wait, ranks)
            yield calls


@contextmanager
def _mesh(cls, **sizes):
    procs = this_host().spawn_procs(per_host=sizes)
    mesh = procs.spawn("ranks", cls)
    mesh.initialized.get()
    yield mesh
    procs.stop().get()


if __name__ == "__main__":
    serve(Monarch())
    shutdown_context().get()
