"""The worker classes of the typed calls that are checked here."""

from typing import Any, TypeVar

from single_controller import Dispatch, Execute, Worker, register, register_dispatch_mode

Batch = dict[str, list[int]]
T = TypeVar("T")


def take_as_is(group: Any, *args: Any) -> Any:
    return args, {}


class Scorer(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self, x: int, y: str = "") -> float:
        return x + len(y)

    @register(Dispatch.ONE_TO_ALL, replay=True, inputs="view")
    def load(self) -> None: ...

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def score(self, batch: Batch, scale: float = 1.0) -> Batch:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO)
    def offset(self, batch: Batch, by: list[int]) -> Batch:
        return {"x": [x + by[0] for x in batch["x"]]}

    @register(Dispatch.mesh("scorers"))
    def by_mesh(self, batch: Batch) -> Batch:
        return batch

    @register(Dispatch.DP_COMPUTE_METRIC)
    def loss(self, batch: Batch) -> float:
        return float(len(batch["x"]))

    @register(Dispatch.ALL_TO_ALL)
    def item(self, x: int) -> str:
        return str(x)

    @register(Dispatch.RANK_ZERO)
    def world(self) -> int:
        return self.world_size

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def first(self, x: int) -> int:
        return x

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False)
    def first_later(self, x: int) -> int:
        return x

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate(self, batch: Batch) -> Batch:
        return batch

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    async def ping(self, x: int) -> str:
        return str(x)

    @register("ONE_TO_ALL")
    def by_name(self, x: int) -> float:
        return self.add(x)

    @register(register_dispatch_mode("TYPED_AS_IS", take_as_is, lambda group, results: results))
    def custom(self, x: int) -> float:
        return self.add(x, "y")

    def plain(self) -> None: ...


class Quieter(Scorer):
    def add(self, x: int, y: str = "") -> float:
        return super().add(x, y) / 2

    @register(Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch: Batch, scale: float = 1.0) -> Batch:
        return Scorer.score(self, batch, scale=scale)


class Loader(Worker):
    def __init__(self, folder: str, steps: int = 1) -> None:
        super().__init__()
        self.folder, self.steps = folder, steps


class Other(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> float:
        return x
