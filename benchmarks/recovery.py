"""How fast a group is back after a rank was killed, and what the snapshots cost that a train group recovers from.

    python -m benchmarks.recovery

Three tables, each from one run on this machine:

- A group of four ranks that have imported torch and keep a process group: `replace` with a standby, without one, and
  `restart`, in turn. Measured from the error of the call in which a rank was killed until all ranks have run a
  collective.
- A train group of two FSDP ranks with 256 MB of weights and optimizer state: `RayTrainGroup.replace` from snapshots in
  memory, and `restart` from a checkpoint.
- A training step of that group with snapshots every 1, 5 and 20 steps against none, in turn.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time

import ray
import torch
import torch.distributed as dist
from tensordict import TensorDict

from single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerDiedError,
    register,
)
from workers import RayTrainGroup
from workers.distributed import initialize_distributed

RANKS = 4
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8000,
    "max_position_embeddings": 256,
}
"""21 million parameters: 256 MB with Adam's state in float32."""


class Member(Worker):
    """Keeps a process group."""

    def __init__(self) -> None:
        super().__init__()
        if not self.is_replacement:
            self.on_membership_change(0)

    def on_membership_change(self, generation: int) -> None:
        """Create the process group."""
        initialize_distributed(self, "gloo")

    @register(Dispatch.ONE_TO_ALL)
    def reduce(self, kill: int | None = None) -> float:
        """All-reduce, while a rank is killed."""
        if self.rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.ones(1000)
        dist.all_reduce(value)
        return float(value[0])


PASSES = 3
"""How often each interval of snapshots is measured, in turn."""


def show(what: str, seconds: list[float]) -> None:
    """Print a row."""
    print(f"| {what} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {len(seconds)} |")


def ready(group: RayWorkerGroup) -> None:
    """Wait until all standbys are."""
    while any(one.memory is None for one in group.standbys()):
        time.sleep(0.05)


def of_workers(rounds: int) -> None:
    """The first table."""
    print("\n| four ranks with torch, back after | median s | least | most | n |\n|---|---|---|---|---|")
    with RayResourcePool([2 * RANKS + 1], use_gpu=False) as pool:
        made = RayClassWithInitArgs(Member)
        with (
            RayWorkerGroup(pool[: RANKS + 1], made, standby=1) as warm,
            RayWorkerGroup(pool[RANKS + 1 :], made) as cold,
        ):
            ways = {
                "replace(), with a standby": (warm, warm.replace),
                "replace(), without": (cold, cold.replace),
                "restart()": (cold, cold.restart),
            }
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(rounds):
                for way, (group, recover) in ways.items():
                    ready(group)
                    try:
                        group.reduce(kill=number % RANKS)
                    except WorkerDiedError:
                        began = time.monotonic()
                    recover()
                    group.reduce()
                    seconds[way].append(time.monotonic() - began)
    for way, of_way in seconds.items():
        show(way, of_way)


def rows(tokens: int = 128, count: int = 8) -> TensorDict:
    """Rollout data."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, MODEL["vocab_size"], (count, tokens), generator=generator)
    mask = torch.zeros(count, tokens, dtype=torch.bool)
    mask[:, tokens // 2 :] = True
    data = {
        "input_ids": ids,
        "attention_mask": torch.ones(count, tokens, dtype=torch.bool),
        "loss_mask": mask,
        "rollout_log_probs": torch.full((count, tokens), -9.0),
        "rewards": torch.arange(count, dtype=torch.float32) % 3,
        "group_ids": torch.arange(count) // 4,
    }
    return TensorDict(data, batch_size=[count])


def step_of(group: RayTrainGroup, number: int, data: TensorDict) -> dict[str, float]:
    """The metrics of one step."""
    metrics: dict[str, float] = ray.get(group.async_train(number, data))[0]
    return metrics


def of_train_groups(rounds: int, steps: int) -> None:
    """The second and the third table."""
    data = rows()
    with tempfile.TemporaryDirectory() as folder:
        args = {"hf_config": MODEL, "train_backend": "fsdp", "lr": 1e-4, "save": folder, "num_rollout": 10_000}
        print("\n| train group of 256 MB, back after | median s | least | most | n |\n|---|---|---|---|---|")
        seconds: dict[str, list[float]] = {"replace()": [], "restart()": []}
        with RayTrainGroup(args, 1, 2, standby=1) as group:
            ray.get(group.async_init({**args, "peer_snapshot_interval": 1}))
            for number in range(3):
                step_of(group, number, data)
            group.save_model(2)
            for number in range(rounds):
                for way, recover in (("replace()", group.replace), ("restart()", group.restart)):
                    step_of(group, 3, data)
                    step_of(group, 4, data)  # the snapshot before has been sent
                    ready(group.worker_group)
                    pid = group.worker_group.status().ranks[number % 2].process.pid
                    os.kill(pid, signal.SIGKILL)
                    while group.worker_group.broken is None:
                        try:
                            group.worker_group.position()
                        except WorkerDiedError:
                            began = time.monotonic()
                    (begin, *_) = recover() or [0]
                    seconds[way].append(time.monotonic() - began)
                    step_of(group, begin, data)
            for way, of_way in seconds.items():
                show(way, of_way)
            means: dict[int, list[float]] = {interval: [] for interval in (0, 1, 5, 20)}
            for _ in range(PASSES):
                for interval, of_interval in means.items():
                    ray.get(group.async_init({**args, "peer_snapshot_interval": interval}))
                    step_of(group, 0, data)
                    began = time.monotonic()
                    for number in range(1, steps + 1):
                        step_of(group, number, data)
                    of_interval.append((time.monotonic() - began) / steps)
            print("\n| snapshots every | mean step s | against none | by pass | n |\n|---|---|---|---|---|")
            for interval, of_interval in means.items():
                ratios = [each / alone for each, alone in zip(of_interval, means[0], strict=True)]
                mean, passes = statistics.mean(of_interval), ", ".join(f"{ratio:.3f}" for ratio in ratios)
                ratio = mean / statistics.mean(means[0])
                print(f"| {interval or 'never'} | {mean:.3f} | {ratio:.3f} | {passes} | {PASSES * steps} |")
            group.worker_group.close()


def main() -> None:
    """Read the options and run."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--steps", type=int, default=20, help="of each pass")
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    of_workers(given.rounds)
    of_train_groups(max(1, given.rounds // 2), given.steps)
    ray.shutdown()


if __name__ == "__main__":
    from benchmarks import recovery  # workers find the class there

    recovery.main()
