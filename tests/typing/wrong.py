"""Calls that type checkers reject: each marked line, and no other. A mark has mypy's and pyright's error code."""

# ruff: noqa: F841

from scorer import Batch, Loader, Quieter, Scorer

from single_controller import Broadcast, Dispatch, RayClassWithInitArgs, Worker, WorkerGroup, register
from workers import SamplingParams, read_args


def arguments(group: WorkerGroup, batch: Batch) -> None:
    group.on(Scorer.add)("1")  # E: arg-type | reportArgumentType
    group.on(Scorer.add)(1, 2)  # E: arg-type | reportArgumentType
    group.on(Scorer.add)()  # E: call-arg | reportCallIssue
    group.map("add", [1], in_fligt=2)  # E: call-overload | reportCallIssue
    group.on(Scorer.add)(1, z="")  # E: call-arg | reportCallIssue
    group.on(Scorer.add)([1, 2])  # E: arg-type | reportArgumentType
    group.on(Scorer.add).remote("1")  # E: arg-type | reportArgumentType
    group.on(Scorer.add).options(timeout=60)("1")  # E: arg-type | reportArgumentType
    group.on(Scorer.generate)(1)  # E: arg-type | reportArgumentType
    group.on(Scorer.ping)("1")  # E: arg-type | reportArgumentType
    group.on(Scorer.score)(group.on(Scorer.generate)(batch))  # E: arg-type | reportArgumentType
    group.on(Scorer.offset)(batch, Broadcast([1]))  # E: arg-type | reportArgumentType
    group.on(Scorer.add)(group.on(Scorer.generate)(batch).as_argument())  # E: arg-type | reportArgumentType


def constructors() -> None:
    RayClassWithInitArgs(Loader, 1)  # E: call-overload | reportArgumentType
    RayClassWithInitArgs(Loader, "folder", step=3)  # E: call-arg | reportCallIssue
    RayClassWithInitArgs(Loader, steps=3)  # E: call-overload | reportCallIssue
    RayClassWithInitArgs(Batch)  # E: arg-type | reportArgumentType
    x = read_args({}).learning_rate  # E: attr-defined | reportAttributeAccessIssue
    SamplingParams(top_q=1)  # E: call-arg | reportCallIssue


def results(group: WorkerGroup, batch: Batch) -> None:
    a: float = group.on(Scorer.add)(1)  # E: assignment | reportAssignmentType
    b: list[Batch] = group.on(Scorer.score)(batch)  # E: assignment | reportAssignmentType
    c: int = group.on(Scorer.item)([1, 2])  # E: assignment | reportAssignmentType
    d: Batch = group.on(Scorer.generate)(batch)  # E: assignment | reportAssignmentType
    e: str = group.on(Scorer.first).remote(1).result()  # E: assignment | reportAssignmentType
    f: list[float] = group.on(Scorer.add).options(blocking=False)(1)  # E: assignment | reportAssignmentType


def methods(group: WorkerGroup, worker: Scorer) -> None:
    group.on(Scorer.nothing)  # E: attr-defined | reportAttributeAccessIssue
    group.on("add")  # E: call-overload | reportCallIssue
    group.on(Scorer.add).options(timeuot=60)  # E: call-overload | reportCallIssue
    worker.add("1")  # E: arg-type | reportArgumentType
    Quieter().score(1)  # E: arg-type | reportArgumentType


class Badly(Worker):
    @register(Dispatch.ONE_TO_ALL, repaly=True)  # E: call-overload | reportCallIssue
    def misspelt(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL, uneven="round")  # E: call-overload | reportArgumentType
    def unknown(self) -> None: ...


class Overrides(Scorer):
    def add(self, x: str) -> float:  # E: override | reportIncompatibleVariableOverride
        return 0.0
