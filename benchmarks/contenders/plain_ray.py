"""Plain Ray with careful hand-written code: each shard is stored once, and ranks return no unused results.

"tensors" sends tensors. Shards are cloned first, because Ray would pickle the whole storage of a view. "numpy" converts
to arrays on both sides, which Ray shares without a copy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks import data
from benchmarks.contenders.by_hand import array, forms, joined
from benchmarks.contenders.local_ray import PROBES, LocalRay, versions
from benchmarks.contenders.processes import check_started, in_flight, small_calls
from benchmarks.protocol import Call, serve


@ray.remote(num_cpus=1)
class Small:
    """An actor that imports nothing, or only torch."""

    def __init__(self, rank=0, with_torch=False):
        self.rank = rank
        if with_torch:
            import torch

            self.torch = torch.__version__

    def where(self):
        return self.rank, os.getpid()

    def address(self):
        import socket

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def join(self, address, world_size):
        host, port = address
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(self.rank), WORLD_SIZE=str(world_size))
        return self.where()

    def take(self, payload=None, back=False):
        return payload if back else None


@ray.remote(num_cpus=1)
class Ranks:
    """An actor that takes and returns tensors or arrays."""

    def load(self, nbytes, k, of):
        self.shard = data.shard(nbytes, k, of)

    def digest(self, *shards):
        return data.digest(joined(shards))

    def take(self, *shards):
        return data.ends(joined(shards))

    def echo(self, x, collects=True):
        return x if collects else None

    def produce(self, parts, numpy):
        shards = [shard.numpy() if numpy else shard.clone() for shard in self.shard.chunk(parts)]
        return shards if parts > 1 else shards[0]


class PlainRay:
    """The cases on Ray alone."""

    def versions(self):
        """Versions of what runs here."""
        return versions("ray", "torch")

    def broadcast(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """One put, many readers."""
        batch = data.batch(nbytes)
        with _actors(ranks) as actors:

            def run(form):
                ref = ray.put(form(batch))
                return ray.get([actor.take.remote(ref) for actor in actors])

            def prove(form):
                ref = ray.put(form(batch))
                data.same(ray.get([actor.digest.remote(ref) for actor in actors]), [data.digest(batch)] * ranks)

            finish = functools.partial(data.same, wanted=[data.ends(batch)] * ranks)
            yield forms(run, finish, prove)

    def echo(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """Rows out and back."""
        batch = data.batch(nbytes)
        with _actors(ranks) as actors:

            def run(form):
                shards = (form(shard) for shard in batch.chunk(ranks))
                refs = [actor.echo.remote(shard) for actor, shard in zip(actors, shards, strict=True)]
                return joined(ray.get(refs))

            yield forms(run, functools.partial(data.same, wanted=batch))

    def mesh(self, nbytes: int, dp: int, tp: int, pp: int) -> Iterator[dict[str, Call]]:
        """Rows to the ranks of each dp coordinate, and back from tp 0 of the last pp stage."""
        batch = data.batch(nbytes)
        model = tp * pp
        with _actors(dp * model) as actors:

            def run(form):
                refs = [ray.put(form(shard)) for shard in batch.chunk(dp)]
                calls = [
                    actor.echo.remote(refs[rank // model], rank % model == (pp - 1) * tp)
                    for rank, actor in enumerate(actors)
                ]
                got = ray.get(calls)  # of all ranks, as the others may have failed
                return joined(got[(pp - 1) * tp :: model])

            yield forms(run, functools.partial(data.same, wanted=batch))

    def chain(self, nbytes: int, first: int, second: int) -> Iterator[dict[str, Call]]:
        """Pass references from one set of actors to the other. Producers split their rows if there are more
        consumers."""
        digests, ends = data.expected(nbytes, second)
        parts = max(1, second // first)
        with _actors(first) as producers, _actors(second) as consumers:
            ray.get([actor.load.remote(nbytes, k, first) for k, actor in enumerate(producers)])

            def shards_of(form):
                made = [actor.produce.options(num_returns=parts).remote(parts, form is array) for actor in producers]
                flat = [ref for refs in made for ref in (refs if parts > 1 else [refs])]
                each = len(flat) // second
                return [flat[k * each : (k + 1) * each] for k in range(second)]

            def run(form):
                return ray.get([c.take.remote(*refs) for c, refs in zip(consumers, shards_of(form), strict=True)])

            def prove(form):
                got = ray.get([c.digest.remote(*refs) for c, refs in zip(consumers, shards_of(form), strict=True)])
                data.same(got, digests)

            yield forms(run, functools.partial(data.same, wanted=ends), prove)

    def start(self, ranks: int, torch: bool) -> Iterator[dict[str, Call]]:
        """Actors and a first call: bare, and with the environment that a torch process group needs."""

        def bare():
            actors = [Small.remote(rank, torch) for rank in range(ranks)]
            return actors, None, ray.get([actor.where.remote() for actor in actors])

        def by_hand():
            group = ray.util.placement_group([{"CPU": 1}] * ranks, strategy="PACK")
            actors = [
                Small.options(
                    scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, k)
                ).remote(k, torch)
                for k in range(ranks)
            ]
            address = actors[0].address.remote()
            return actors, group, ray.get([actor.join.remote(address, ranks) for actor in actors])

        def finish(got):
            actors, group, where = got
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                ray.util.remove_placement_group(group)
            check_started(where, ranks)

        yield {"bare actors": Call(bare, finish), "ranks and address by hand": Call(by_hand, finish)}

    def small_calls(self, ranks: int) -> Iterator[dict[str, Call]]:
        """Calls without an argument or with a small one, and without a result. Arguments travel in the calls: a put and
        a reference take longer at these sizes."""
        with _actors(ranks, Small) as actors:

            def send(*args):
                return [actor.take.remote(*args) for actor in actors]

            calls = small_calls(lambda *args: ray.get(send(*args)), ranks)
            if ranks == 4:
                calls["100 in flight"] = in_flight(send, ray.get, ranks)
            yield calls


@contextmanager
def _actors(ranks, cls=Ranks):
    nodes = [node["NodeID"] for node in ray.nodes()]
    places = [NodeAffinitySchedulingStrategy(nodes[rank % len(nodes)], soft=False) for rank in range(ranks)]
    actors = [cls.options(scheduling_strategy=place).remote() for place in places]
    yield actors
    for actor in actors:
        ray.kill(actor)


if __name__ == "__main__":
    with LocalRay():
        serve(PlainRay(), PROBES)
