"""This library."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import ray
import torch

from benchmarks import data
from benchmarks.contenders.local_ray import PROBES, LocalRay, versions
from benchmarks.contenders.processes import check_started, in_flight, small_calls
from benchmarks.protocol import Call, serve
from dispatch import Layout
from dispatch.plan import plan_call
from dispatch.register import registered_methods
from single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register
from single_controller.call import buffer_pool

VIEW = {"inputs": "view"}
MAX_IDLE_BYTES = buffer_pool.MAX_IDLE_BYTES


class Small(Worker):
    """A worker that imports nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return self.rank, os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def take(self, payload=None, back=False):
        return payload if back else None


class SmallWithTorch(Small):
    """The same, with torch."""

    def __init__(self):
        super().__init__()
        import torch

        self.torch = torch.__version__


class Flat(Worker):
    """Ranks that are all data parallel."""

    @register(Dispatch.ONE_TO_ALL, **VIEW)
    def digest(self, x):
        return data.digest(x)

    @register(Dispatch.DP_COMPUTE_METRIC, **VIEW)
    def digest_shard(self, x):
        return data.digest(x)

    @register(Dispatch.ONE_TO_ALL, **VIEW)
    def take_view(self, x):
        return data.ends(x)

    @register(Dispatch.ONE_TO_ALL)
    def take_copy(self, x):
        return data.ends(x)

    @register(Dispatch.DP_COMPUTE_METRIC, **VIEW)
    def echo_list(self, x):
        return x

    @register(Dispatch.DP_COMPUTE_PROTO, **VIEW)
    def echo_view(self, x):
        return x

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo_copy(self, x):
        return x

    @register(Dispatch.ONE_TO_ALL)
    def load(self, nbytes):
        self.shard = data.shard(nbytes, self.rank, self.world_size)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def produce(self):
        return self.shard

    @register(Dispatch.DP_COMPUTE_METRIC, **VIEW)
    def consume_view(self, x):
        return data.ends(x)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def consume_copy(self, x):
        return data.ends(x)


class FlatFresh(Flat):
    """The same, without the buffer pool."""

    def __init__(self):
        super().__init__()
        _pool_buffers(False)


class Mesh(Worker):
    """Ranks on a dp x pp x tp mesh; tp moves fastest."""

    def __init__(self, tp, pp):
        super().__init__()
        self.register_layout(dp=self.rank // (tp * pp), pp=self.rank // tp % pp, tp=self.rank % tp)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, **VIEW)
    def echo_view(self, x):
        return x

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def echo_copy(self, x):
        return x


class Ours:
    """The cases on this library."""

    def versions(self):
        """Versions of what runs here."""
        return versions("single-controller", "ray", "torch")

    def broadcast(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """The same tensor to all ranks."""
        batch = data.batch(nbytes)
        with _group(Flat, ranks) as group:

            def prove():
                data.same(group.digest(batch), [data.digest(batch)] * ranks)

            def finish(got):
                data.same(got, [data.ends(batch)] * ranks)

            yield {
                "views": Call(lambda: group.take_view(batch), finish, prove),
                "private copies": Call(lambda: group.take_copy(batch), finish, prove),
            }

    def echo(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """Rows out and back."""
        batch = data.batch(nbytes)
        finish = functools.partial(data.same, wanted=batch)
        with _group(Flat, ranks) as group, _group(FlatFresh, ranks) as fresh:

            def call(method, pooled=True):
                def run():
                    _pool_buffers(pooled)
                    return getattr(group if pooled else fresh, method)(batch)

                return Call(run, finish)

            yield {
                "views, a list": call("echo_list"),
                "views, joined": call("echo_view"),
                "private copies, joined": call("echo_copy"),
                "views, joined, no buffer pool": call("echo_view", pooled=False),
                "private copies, joined, no buffer pool": call("echo_copy", pooled=False),
            }

    def types(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """Rows out and back, in batches of several types."""
        with _group(Flat, ranks) as group:
            yield {
                f"{form}, {name}": Call(functools.partial(method, batch), functools.partial(data.same, wanted=batch))
                for name, batch in data.by_type(nbytes).items()
                for form, method in (("views", group.echo_view), ("private copies", group.echo_copy))
            }

    def mesh(self, nbytes: int, dp: int, tp: int, pp: int) -> Iterator[dict[str, Call]]:
        """Rows to the ranks of each dp coordinate, and back from one of them."""
        batch = data.batch(nbytes)
        finish = functools.partial(data.same, wanted=batch)
        with _group(Mesh, dp * tp * pp, tp, pp) as group:
            yield {
                "views": Call(lambda: group.echo_view(batch), finish),
                "private copies": Call(lambda: group.echo_copy(batch), finish),
            }

    def chain(self, nbytes: int, first: int, second: int) -> Iterator[dict[str, Call]]:
        """A result of one group as the argument of another."""
        digests, ends = data.expected(nbytes, second)
        with _group(Flat, first) as producer, _group(Flat, second) as consumer:
            producer.load(nbytes)
            finish = functools.partial(data.same, wanted=ends)

            def prove():
                data.same(consumer.digest_shard(producer.produce.remote()), digests)

            yield {
                "views": Call(lambda: consumer.consume_view(producer.produce.remote()), finish, prove),
                "private copies": Call(lambda: consumer.consume_copy(producer.produce.remote()), finish, prove),
            }

    def start(self, ranks: int, torch: bool) -> Iterator[dict[str, Call]]:
        """A pool, a group, and a first call."""

        def run():
            pool = RayResourcePool([ranks], use_gpu=False)
            group = RayWorkerGroup(pool, RayClassWithInitArgs(SmallWithTorch if torch else Small))
            return pool, group.where()

        def finish(got):
            pool, where = got
            pool.close()
            check_started(where, ranks)

        yield {"": Call(run, finish)}

    def small_calls(self, ranks: int) -> Iterator[dict[str, Call]]:
        """Calls without an argument or with a small one, and without a result."""
        with ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(100))
            group = stack.enter_context(_group(Small, ranks))
            if len({rank.hostname for rank in group.plan().ranks}) < min(ranks, len(ray.nodes())):
                raise RuntimeError("the ranks are not spread over all hosts")
            calls = small_calls(group.take, ranks)
            if ranks == 4:
                submit = functools.partial(threads.submit, group.take)
                calls["100 in flight, threads"] = in_flight(submit, lambda call: call.result(), ranks)
                calls["100 in flight, futures"] = in_flight(group.take.remote, lambda call: call.result(), ranks)
            yield calls

    def plan(self, sizes: list[int]) -> Iterator[dict[str, Call]]:
        """Plan one call for many ranks, dp x tp 8, in this process alone."""
        yield {f"{ranks:,} ranks": _plan(ranks) for ranks in sizes}


def _plan(ranks):
    spec = registered_methods(Mesh)["echo_view"]
    layout = Layout({"dp": [rank // 8 for rank in range(ranks)], "tp": [rank % 8 for rank in range(ranks)]})
    batch = torch.arange(ranks * 4).reshape(ranks * 2, 2)

    def finish(plan):
        first = [plan.shards[plan.shard_of[rank]].values[0] for rank in range(0, ranks, 8)]
        last = [plan.shards[plan.shard_of[rank]].values[0] for rank in range(7, ranks, 8)]
        data.same(first, batch.chunk(ranks // 8))
        data.same(last, batch.chunk(ranks // 8))

    return Call(lambda: plan_call(spec, layout, (batch,), {}), finish)


def _pool_buffers(on):
    """Switch the library's internal buffer pool on or off in this process, to measure what it saves."""
    buffer_pool.MAX_IDLE_BYTES = MAX_IDLE_BYTES if on else 0
    if not on:
        buffer_pool.buffer_pool.clear()


@contextmanager
def _group(cls, ranks, *args, **options):
    with RayResourcePool([ranks], use_gpu=False, across_nodes=True, strategy="SPREAD") as pool:
        yield RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args), **options)


if __name__ == "__main__":
    with LocalRay():
        serve(Ours(), PROBES)
