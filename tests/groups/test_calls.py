"""What a driver gets from each mode, on every transport."""

import inspect
import pydoc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
import torch
from group_workers import Awkward, Gate, Grid, Log, Nested, RemoteCounter
from tensordict import TensorDict

from single_controller import (
    Broadcast,
    Dispatch,
    DispatchError,
    WorkerError,
    WorkerFuture,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from single_controller import Worker as BaseWorker
from single_controller.local.transport import LocalRef

TRANSPORTS = ("ray", "local", "local-threads")
overlapping = pytest.mark.transports("ray", "local-threads")
"""For a test whose ranks or calls must run at the same time."""
START = 100


def test_methods_may_be_named_like_library_internals(transport, make_group):
    group = make_group(Awkward)
    assert group.kept() == group.kept.remote().result() == [("kept", rank) for rank in range(4)]
    assert group.call(x=1) == group.call.remote(1).result() == [("call", rank, 1) for rank in range(4)]
    if transport.name == "ray":
        assert ray.get(group.workers[2].kept.remote()) == ("kept", 2)


def test_class_under_ray_remote(make_group):
    group = make_group(RemoteCounter, start=5)
    assert group.add(10) == group.add(x=0) == [15, 16, 17, 18]
    assert str(inspect.signature(group.add)) == "(x)"
    with pytest.raises(TypeError, match="_ray_trace_ctx"):
        group.add(1, _ray_trace_ctx=None)


def test_class_of_the_main_script(make_group):
    class Local(BaseWorker):
        @register(Dispatch.ONE_TO_ALL)
        def rank_plus(self, x):
            return self.rank + x

    assert make_group(Local).rank_plus(1) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda g: g.first("x"), (0, "x")),
        (lambda g: g.items([5, 6, 7, 8]), [(0, 5, 0), (1, 6, 0), (2, 7, 0), (3, 8, 0)]),
        (lambda g: g.items(x=[5, 6, 7, 8], y=(1, 2, 3, 4)), [(0, 5, 1), (1, 6, 2), (2, 7, 3), (3, 8, 4)]),
        (lambda g: g.items([5, 6, 7, 8], Broadcast([9])), [(r, 5 + r, [9]) for r in range(4)]),
        (lambda g: g.all_rank_zero([1, 2]), (0, [1, 2])),
        (lambda g: g.one_rank_zero("value"), "value"),
        (lambda g: g.times_rank([1, 1, 2, 2]), [0, 1, 4, 6]),
        (lambda g: g.double(list(range(8)), factor=1), list(range(8))),
        (lambda g: g.double(batch=np.arange(8)).tolist(), list(range(0, 16, 2))),
        (lambda g: g.double({"a": np.arange(4), "b": np.arange(4.0)})["b"].tolist(), [0, 2, 4, 6]),
        (lambda g: g.padded(list("abcde")), list("abcde")),
        (lambda g: g.padded([1]), [1]),
        (lambda g: g.padded([]), []),
        (lambda g: g.ragged(list("abcde")), list("abcde")),
        (lambda g: g.ragged([1]), [1]),
        (lambda g: g.double.options(uneven="ragged")(torch.arange(5)).tolist(), [0, 2, 4, 6, 8]),
        (lambda g: g.padded_later([1, 2, 3, 4, 5]).result(), [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]),
        (lambda g: g.metric([1, 2, 3]), [{"rank": r, "rows": 1} for r in range(4)]),
        (lambda g: g.apply(lambda worker, rows: [worker.rank + r for r in rows], [0, 0, 0, 0]), [0, 1, 2, 3]),
        (lambda g: g.custom(x=[1, 2], y=[5, 6]), [START + 6, START + 9, START + 8, START + 11]),
        (lambda g: g.custom([1, 2], [5, 6]), [START + 6, START + 9, START + 8, START + 11]),
    ],
)
def test_modes(counters, call, expected):
    assert call(counters) == expected


def test_batch_reaches_the_ranks_in_order_and_is_joined(counters):
    batch = TensorDict({"ids": torch.arange(12).reshape(12, 1), "mask": torch.ones(12, dtype=torch.bool)}, [12])
    rows = counters.apply(lambda worker, td: torch.cat([td["ids"], torch.full((len(td), 1), worker.rank)], 1), batch)
    assert rows.tolist() == [[i, i // 3] for i in range(12)]


@pytest.mark.transports("ray")
def test_object_refs_are_resolved_as_in_ray(counters):
    assert counters.echo(ray.put("stored")) == ["stored"] * 4


@pytest.mark.transports("ray")
def test_object_ref_that_a_method_returns_is_not_read(counters):
    refs = counters.execute_with_func_generator(lambda worker: ray.put(worker.rank))
    assert ray.get(refs) == [0, 1, 2, 3]


def test_remote_method_has_the_workers_signature_and_docstring(counters):
    assert str(inspect.signature(counters.double)) == "(batch, factor=2)"
    assert counters.add.__doc__ == "Add x to the value."
    page = pydoc.plain(pydoc.render_doc(counters.add))
    assert "add(x=0)" in page and "Add x to the value." in page
    assert {"add", "double", "close"} <= set(dir(counters))
    assert "plain" not in dir(counters)
    assert set(dir(counters.methods)) >= {"add", "double"}
    assert counters.methods.first(1) == (0, 1)


def rows_and_rank(worker, batch, scale=1):
    return batch * scale + worker.rank


class TestExecute:
    def test_all_sync(self, counters):
        assert counters.execute_all_sync("plain", 1) == [START + 1 + r for r in range(4)]
        assert counters.execute_all_sync("plain", x=[1, 1, 1, 1]) == [START + 1 + r for r in range(4)]
        assert counters.execute_all_sync("plain", [0, 1, 2, 3], y=[0, 0, 0, 10]) == [100, 102, 104, 116]
        assert counters.execute_all_sync("plain", [0, 1, 2, 3], Broadcast(10)) == [110, 112, 114, 116]

    def test_async_returns_plain_refs(self, transport, counters):
        kind = ray.ObjectRef if transport.name == "ray" else LocalRef
        for refs in (counters.execute_all_async("plain", 1), counters.execute_all("plain", 1)):
            assert type(refs) is list and all(isinstance(ref, kind) for ref in refs)
            assert transport.get(refs) == [START + 1 + r for r in range(4)]
            assert counters.echo(refs[1]) == [START + 2] * 4  # passed as an argument, it becomes its value

    def test_rank_zero(self, transport, counters):
        assert counters.execute_rank_zero_sync("plain", 1) == START + 1
        assert transport.get(counters.execute_rank_zero_async("plain", 1)) == START + 1
        assert transport.get(counters.execute_rank_zero("plain", [1] and 1)) == START + 1

    def test_async_errors_are_raised_by_get(self, transport, counters):
        with pytest.raises(TypeError):
            transport.get(counters.execute_all_async("plain", "text"))

    @pytest.mark.transports("ray")
    def test_direct_handles(self, counters):
        assert ray.get([w.plain.remote(1) for w in counters.workers]) == [START + 1 + r for r in range(4)]
        assert ray.get(counters.workers[2].add.remote(0)) == START + 2

    def test_functions_run_on_every_rank_with_its_worker(self, counters):
        assert counters.execute_with_func_generator(lambda worker: (worker.rank, worker.value)) == [
            (rank, START + rank) for rank in range(4)
        ]
        assert counters.execute_with_func_generator(lambda worker, x, y=0: x + y, 1, y=2) == [3] * 4

    def test_function_gets_a_shard_and_results_are_joined(self, counters):
        batch, expected = torch.arange(8), [10 * row + row // 2 for row in range(8)]
        assert counters.execute_with_func_generator(rows_and_rank, batch, scale=10).tolist() == expected
        future = counters.execute_with_func_generator.remote(rows_and_rank, batch, scale=10)
        assert counters.double(future).tolist() == [2 * value for value in expected]

    def test_function_on_rank_zero_gets_the_arguments_unchanged(self, counters):
        assert counters.execute_func_rank_zero(sorted, [3, 1, 2], reverse=True) == [3, 2, 1]
        assert counters.execute_func_rank_zero(lambda: "no argument") == "no argument"


class TestOrder:
    @overlapping
    def test_calls_run_in_the_order_they_were_sent(self, make_group):
        group = make_group(Log)
        futures = [
            group.note.remote("slow", 0.3),
            group.note_async.remote("async", 0.2),
            group.note.remote("fast"),
            group.note_async.remote("last"),
        ]
        for future in futures:
            future.result()
        assert group.read() == [["slow", "async", "fast", "last"]] * 4

    @overlapping
    @pytest.mark.ray_when_full
    def test_background_task_continues_between_calls(self, make_group):
        group = make_group(Log)
        group.leave_task()
        group.note("after", 0.6)
        assert group.read() == [["task", "after"]] * 4

    @overlapping
    def test_concurrent_method_overtakes(self, make_group):
        group = make_group(Gate)
        waiting = group.wait.remote(20)
        assert group.open() == [True] * 4
        assert waiting.result(10) == [True] * 4

    def test_concurrent_driver_threads_keep_the_same_order_on_all_ranks(self, make_group):
        group = make_group(Log)

        def send(name):
            for number in range(10):
                group.note.remote((name, number))

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(send, "abc"))
        logs = group.read()
        assert len(logs[0]) == 30
        assert all(log == logs[0] for log in logs)


DP2_TP2 = {"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1], "pp": [0, 0, 0, 0]}
TP2_PP2 = {"tp": [0, 1, 0, 1], "pp": [0, 0, 1, 1], "dp": [0, 0, 0, 0]}


class TestLayouts:
    def test_dp_by_tp(self, make_group):
        group = make_group(Grid, DP2_TP2)
        assert group.compute(["a", "b"]) == [(0, "a"), (2, "b")]
        assert group.last_seen() == ["a", "a", "b", "b"]
        assert group.compute_rows(torch.arange(5)).tolist() == [0, 10, 20, 30, 40]
        assert [t.tolist() for t in group.last_seen()] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]

    @pytest.mark.ray_when_full
    def test_last_stage_collects(self, make_group):
        group = make_group(Grid, TP2_PP2)
        assert group.compute(["a"]) == [(2, "a")]
        assert group.compute_pp(["a", "b"]) == [(0, "a"), (2, "b")]
        assert group.last_seen() == ["a", "a", "b", "b"]

    def test_late_and_changed_layout(self, make_group):
        group = make_group(Grid, DP2_TP2, late=True)
        with pytest.raises(DispatchError, match=r"compute\(\).*register_layout"):
            group.compute(["a", "b"])
        group.set_layout()
        assert group.compute(["a", "b"]) == [(0, "a"), (2, "b")]
        group.move({"dp": [0, 1, 0, 1], "tp": [0, 0, 1, 1]})
        assert group.compute(["a", "b"]) == [(0, "a"), (1, "b")]
        assert group.layout.size("tp") == 2

    def test_next_call_uses_a_new_layout_once_its_references_are_ready(self, transport, make_group):
        group = make_group(Grid, DP2_TP2)
        ways = ({"dp": [0, 1, 0, 1], "tp": [0, 0, 1, 1]}, [(0, "a"), (1, "b")]), (DP2_TP2, [(0, "a"), (2, "b")])
        for axes, results in ways * 5:
            future = group.move.remote(axes)
            transport.get(future.refs)
            assert group.compute(["a", "b"]) == results


@pytest.mark.ray_when_full
def test_custom_mode(transport, make_group):
    name = f"REVERSED_TEST_{transport.name.upper()}".replace("-", "_")
    mode = register_dispatch_mode(
        name, lambda group, x: (([x[-1 - r] for r in range(group.world_size)],), {}), lambda group, out: out
    )

    class Reversing(BaseWorker):
        @register(mode)
        def get(self, x):
            return x

    group = make_group(Reversing)
    assert group.get([1, 2, 3, 4]) == [4, 3, 2, 1]
    update_dispatch_mode(name, lambda group, x: ((x,), {}), lambda group, out: sum(out))
    assert group.get([1, 2, 3, 4]) == 10


def test_blocking_false_returns_a_future(counters):
    future = counters.add.options(blocking=False)(0)
    assert isinstance(future, WorkerFuture)
    assert future.result() == [100, 101, 102, 103]
    assert counters.padded_later.options(blocking=True)([1, 2, 3, 4]) == [(0, 1), (1, 2), (2, 3), (3, 4)]


@overlapping
@pytest.mark.ray_when_full
def test_call_waits_for_a_mesh_that_a_running_call_registers(make_group):
    group = make_group(Nested)
    group.join_mesh_later("early", 0)
    assert group.on_early([1, 2, 3, 4]) == [1, 2, 3, 4]
    group.join_mesh_later.remote("late", 0.5)
    assert group.on_late([1, 2, 3, 4]) == [1, 2, 3, 4]


@pytest.mark.ray_when_full
def test_library_error_raised_by_the_worker_names_the_rank(make_group):
    with pytest.raises(
        WorkerError, match=r"refuse\(\) raised dispatch\.errors\.DispatchError on (ranks .*; first: )?rank \d \("
    ):
        make_group(Nested).refuse()
