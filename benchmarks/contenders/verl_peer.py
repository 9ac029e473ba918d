"""verl's single controller, on its public interface. Its numpy mode is an environment variable of the process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks import data
from benchmarks.contenders.local_ray import PROBES, LocalRay, versions
from benchmarks.contenders.processes import check_started, in_flight, small_calls
from benchmarks.protocol import Call, serve


@ray.remote
class Small(Worker):
    """A worker that imports nothing itself."""

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return self.rank, os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def take(self, payload=None, back=False):
        return payload if back else None

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def take_later(self):
        return None


@ray.remote
class Flat(Worker):
    """Ranks that are all data parallel."""

    @register(Dispatch.ONE_TO_ALL)
    def digest(self, x):
        return data.digest(_tensor(x))

    @register(Dispatch.DP_COMPUTE_METRIC)
    def digest_shard(self, x):
        return data.digest(_tensor(x))

    @register(Dispatch.ONE_TO_ALL)
    def take(self, x):
        return data.ends(_tensor(x))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, x):
        return x

    @register(Dispatch.ONE_TO_ALL)
    def load(self, nbytes):
        self.shard = _proto(data.shard(nbytes, self.rank, self.world_size))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce(self):
        return self.shard

    @register(Dispatch.DP_COMPUTE_METRIC)
    def consume(self, x):
        return data.ends(_tensor(x))


@ray.remote
class Mesh(Worker):
    """Ranks on a dp x pp x tp mesh; tp moves fastest."""

    def __init__(self, tp, pp):
        super().__init__()
        model = tp * pp
        self._register_dispatch_collect_info(
            "model", dp_rank=self.rank // model, is_collect=self.rank % model == (pp - 1) * tp
        )

    @register(make_nd_compute_dataproto_dispatch_fn("model"))
    def echo(self, x):
        return x


def _proto(tensor):
    return DataProto.from_single_dict({"x": tensor})


def _tensor(x):
    return x.batch["x"] if isinstance(x, DataProto) else x


class Verl:
    """The cases on verl."""

    def versions(self):
        """Versions of what runs here."""
        return versions("verl", "ray", "torch", "tensordict")

    def broadcast(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """The same tensor to all ranks, as a tensor or as a DataProto."""
        batch = data.batch(nbytes)
        with _group(Flat, ranks) as group:

            def call(x):
                return Call(
                    lambda: group.take(x),
                    functools.partial(data.same, wanted=[data.ends(batch)] * ranks),
                    lambda: data.same(group.digest(x), [data.digest(batch)] * ranks),
                )

            yield {"a tensor": call(batch), "a DataProto": call(_proto(batch))}

    def echo(self, nbytes: int, ranks: int) -> Iterator[dict[str, Call]]:
        """Rows out and back."""
        batch = data.batch(nbytes)
        proto = _proto(batch)
        with _group(Flat, ranks) as group:
            yield {"": Call(lambda: group.echo(proto), lambda got: data.same(_tensor(got), batch))}

    def mesh(self, nbytes: int, dp: int, tp: int, pp: int) -> Iterator[dict[str, Call]]:
        """Rows to the ranks of each dp coordinate, and back."""
        batch = data.batch(nbytes)
        proto = _proto(batch)
        with _group(Mesh, dp * tp * pp, tp, pp) as group:
            yield {"": Call(lambda: group.echo(proto), lambda got: data.same(_tensor(got), batch))}

    def chain(self, nbytes: int, first: int, second: int) -> Iterator[dict[str, Call]]:
        """A DataProtoFuture from one group to another."""
        digests, ends = data.expected(nbytes, second)
        with _group(Flat, first) as producer, _group(Flat, second) as consumer:
            producer.load(nbytes)

            def prove():
                data.same(consumer.digest_shard(producer.produce()), digests)

            yield {
                "": Call(lambda: consumer.consume(producer.produce()), functools.partial(data.same, wanted=ends), prove)
            }

    def start(self, ranks: int, torch: bool) -> Iterator[dict[str, Call]]:
        """A pool, a group, and a first call. verl's workers always import torch."""

        def run():
            pool, group = _make(Small, ranks)
            return pool, group, group.where()

        def finish(got):
            pool, group, where = got
            _end(pool, group)
            check_started(where, ranks)

        yield {"": Call(run, finish)}

    def small_calls(self, ranks: int) -> Iterator[dict[str, Call]]:
        """Calls without an argument or with a small one, and without a result. Up to 16 ranks: verl's workers import
        torch, and 32 of them beside the others need too much memory."""
        if ranks > 16:
            yield {}
            return
        with _group(Small, ranks) as group:
            calls = small_calls(group.take, ranks)
            if ranks == 4:
                calls["100 in flight"] = in_flight(group.take_later, ray.get, ranks)
            yield calls


def _make(cls, ranks, *args):
    # One logical CPU per slot, as for the other contenders; verl's default of ten would not fit.
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return pool, RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args), device_name="cpu")


def _end(pool, group):
    for worker in group.workers:
        ray.kill(worker)
    for placement_group in pool.get_placement_groups(device_name="cpu"):
        ray.util.remove_placement_group(placement_group)


@contextmanager
def _group(cls, ranks, *args):
    pool, group = _make(cls, ranks, *args)
    yield group
    _end(pool, group)


if __name__ == "__main__":
    with LocalRay():
        serve(Verl(), PROBES)
