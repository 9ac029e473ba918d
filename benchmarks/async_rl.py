"""Compare ways to train while generating: `python -m benchmarks.async_rl` (about ten minutes on two cores).

The engine is a toy: its policy is one vector of logits, and a completion's length is drawn from a log-normal
distribution whatever the weights are. Each decoding step of a worker takes `STEP_SECONDS` of sleep for all its running
requests, and each batch `TRAIN_SECONDS` of training, so that two cores suffice. Everything else is the library: rollout
workers on Ray, `RolloutStream`, `SampleBuffer`, the losses and corrections. The reward is the share of one token.

Prints one table in Markdown: medians over the seeds, which all policies share.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import ray
import torch

from single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, register
from workers import RolloutManager, RolloutWorker, SamplingParams
from workers.algorithms.advantages import group_advantages
from workers.algorithms.corrections import PRESETS, correct
from workers.algorithms.policy_losses import ppo_clip
from workers.rollout.engines.request_engine import Request, RequestEngine
from workers.rollout.stream.rollout_stream import RolloutStream
from workers.rollout.stream.sample_buffer import SampleBuffer

VOCABULARY, GOOD, STOP = 16, 7, 0
WORKERS, SLOTS = 2, 16
PROMPTS, SAMPLES = 8, 8
MEDIAN_LENGTH, SIGMA, LONGEST = 24, 1.0, 384
STEP_SECONDS, TRAIN_SECONDS = 0.003, 0.15
LR = 10.0


def length_of(seed: int) -> int:
    """Tokens of a completion, its stop token included."""
    drawn = numpy.random.default_rng(seed).lognormal(numpy.log(MEDIAN_LENGTH), SIGMA)
    return min(max(int(drawn), 2), LONGEST)


class ToyEngine(RequestEngine):
    """Draws each token from one distribution; at most `SLOTS` requests run at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.zeros(VOCABULARY)
        self.busy = 0
        """Tokens generated since the last `take_busy`."""

    def check_request(self, number: int | None, prompt: Any, sampling_params: SamplingParams) -> None:
        """Any prompt will do."""

    def serve(self) -> None:
        """See `RequestEngine.serve`."""
        running: list[Request] = []
        lengths: dict[int, int] = {}
        while (changes := self.next_step()) is not None:
            time.sleep(STEP_SECONDS)
            running = [one for one in (*running, *changes.added) if not one.ended]
            log_probs = self.logits.log_softmax(0)
            edges = log_probs.double().exp().cumsum(0)
            for request in running[:SLOTS]:
                place, seed = len(request.token_ids), request.seed
                if place + 1 == (lengths.get(seed) or lengths.setdefault(seed, length_of(seed))):
                    self.record(request, [STOP], [0.0], "stop")
                    continue
                draw = numpy.random.default_rng((seed, place)).random()
                token = min(int(torch.searchsorted(edges, draw * float(edges[-1]))), VOCABULARY - 1)
                self.record(request, [token], [float(log_probs[token])])
            self.busy += len(running[:SLOTS])

    def load_weights(self, weights: Any) -> None:
        """See `RolloutEngine.load_weights`."""
        for _, tensor in weights:
            self.logits.copy_(tensor)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `RolloutEngine.weight_shapes`."""
        return {"logits": (VOCABULARY,)}


class ToyWorker(RolloutWorker):
    """Takes weights from the driver, which trains."""

    @register(Dispatch.ONE_TO_ALL)
    def load(self, logits: torch.Tensor, version: int) -> None:
        """Load weights, as a receiver of weights does."""
        self.engine.begin_update()
        self.engine.load_weights([("logits", logits)])
        self.engine.finish_update(version)
        self.weight_version = version

    @register(Dispatch.ONE_TO_ALL)
    def take_busy(self) -> int:
        """Tokens generated since the last call."""
        busy, self.engine.busy = self.engine.busy, 0
        return busy


@dataclass(frozen=True)
class Policy:
    """How to generate and train; without a ``buffer``, in turns.

    Attributes:
        buffer: arguments of `SampleBuffer`.
        update_mode: see `RolloutStream`.
    """

    buffer: dict[str, Any] | None = None
    update_mode: Any = "wait"


POLICIES = {
    "sync": Policy(),
    "one step off": Policy({"max_staleness": 1}),
    "drop": Policy({"max_staleness": 1, "order": "window", "on_stale": "drop"}, "interrupt"),
    "wait": Policy({"max_staleness": 1, "order": "window", "on_stale": "wait"}, "interrupt"),
    "window": Policy({"max_staleness": 2, "order": "window", "on_stale": "train"}),
    "partial": Policy({"max_staleness": 4, "order": "window", "window": 4 * PROMPTS}, "interrupt"),
}


class Trainer:
    """Trains the logits with GRPO, the clipped loss, and truncated importance sampling."""

    def __init__(self) -> None:
        self.logits = torch.zeros(VOCABULARY, requires_grad=True)
        self.version = 0

    def train(self, data: Any) -> float:
        """Take one step. Returns the mean staleness of the tokens, in versions."""
        began = time.monotonic()
        counts = (data["loss_mask"] != 0) & (data["input_ids"] != STOP)
        log_probs = self.logits.log_softmax(0)[data["input_ids"]]
        old = log_probs.detach()
        correction = correct(old, data["rollout_log_probs"], counts, PRESETS["token_tis"])
        advantages = group_advantages(data["rewards"], data["group_ids"])[:, None] * counts
        losses, _, _ = ppo_clip(log_probs, old, advantages)
        loss = (losses * correction.weights * counts).sum() / counts.sum()
        (gradient,) = torch.autograd.grad(loss, self.logits)
        with torch.no_grad():
            self.logits -= LR * gradient
        time.sleep(max(0.0, TRAIN_SECONDS - (time.monotonic() - began)))
        versions = data["weight_versions"]
        return float((self.version - versions)[versions >= 0].double().mean())


def reward(prompt: list[int], completion: list[int]) -> float:
    """The share of the good token."""
    return completion.count(GOOD) / max(len(completion) - 1, 1)


def run(group: RayWorkerGroup, policy: Policy, seed: int, batches: int) -> dict[str, Any]:
    """Train for some batches. Returns what the table needs, and the rewards with their times."""
    trainer = Trainer()
    manager = RolloutManager(
        group,
        SamplingParams(max_new_tokens=LONGEST, stop_token_ids=(STOP,)),
        reward,
        samples_per_prompt=SAMPLES,
        seed=seed,
    )
    prompts = [[1]] * PROMPTS
    with contextlib.ExitStack() as stack:
        stream = None
        if policy.buffer is not None:
            buffer = SampleBuffer(PROMPTS, num_batches=batches, **policy.buffer)
            stream = stack.enter_context(
                RolloutStream(
                    manager,
                    lambda rollout_id: prompts,
                    buffer,
                    update_mode=policy.update_mode,
                    requests_per_worker=2 * SLOTS,
                )
            )

        def update() -> None:
            with stream.updating() if stream else contextlib.nullcontext():
                trainer.version += 1
                group.load(trainer.logits.detach(), trainer.version)
                manager.weight_version = trainer.version

        update()
        group.take_busy()
        began = time.monotonic()
        training = 0.0
        curve: list[tuple[float, float]] = []
        staleness: list[float] = []
        lengths: list[float] = []
        for batch in range(batches):
            data = stream.take(120) if stream else manager.generate(prompts, rollout_id=batch)
            begins = time.monotonic()
            staleness.append(trainer.train(data))
            training += time.monotonic() - begins
            update()
            curve.append((time.monotonic() - began, float(data["rewards"].mean())))
            lengths += data["completion_lengths"].tolist()
        seconds = time.monotonic() - began
        busy = sum(group.take_busy())
    return {
        "samples/s": batches * PROMPTS * SAMPLES / seconds,
        "trainer idle": 1 - training / seconds,
        "generator idle": 1 - busy * STEP_SECONDS / (WORKERS * SLOTS * seconds),
        "staleness": statistics.mean(staleness),
        "length": statistics.mean(lengths),
        "curve": curve,
    }


def at_seconds(curve: list[tuple[float, float]], seconds: float) -> float:
    """Mean reward of the five batches before a time."""
    rewards = [value for when, value in curve if when <= seconds] or [curve[0][1]]
    return statistics.mean(rewards[-5:])


@contextlib.contextmanager
def workers() -> Iterator[RayWorkerGroup]:
    """A group of rollout workers on a local Ray."""
    ray.init(num_cpus=WORKERS + 2, include_dashboard=False, object_store_memory=512 << 20, log_to_driver=False)
    try:
        pool = RayResourcePool([WORKERS], use_gpu=False)
        yield RayWorkerGroup(pool, RayClassWithInitArgs(ToyWorker, ToyEngine), collectives=False)
    finally:
        ray.shutdown()


def main() -> None:
    """Run all policies in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    options = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.policies}
    with workers() as group:
        for seed in range(options.seeds):
            for name in options.policies:
                results[name].append(run(group, POLICIES[name], seed, options.batches))
                print(f"seed {seed}, {name}: {results[name][-1]['samples/s']:.0f} samples/s", flush=True)
    # As many seconds as the fastest policy takes for all its samples.
    limits = [min(results[name][seed]["curve"][-1][0] for name in results) for seed in range(options.seeds)]
    unbiased = results.get("sync") or next(iter(results.values()))
    print(f"\nMedians of {options.seeds} seeds, {options.batches} batches of {PROMPTS} x {SAMPLES} completions.\n")
    print(
        "| policy | samples/s | against sync | trainer idle | generator idle | staleness | length of trained samples "
        "| reward, equal samples | reward, equal seconds |"
    )
    print("|---|" + "--:|" * 8)
    for name, runs in results.items():

        def median(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return statistics.median(one[key] for one in runs)

        speedup = statistics.median(
            one["samples/s"] / base["samples/s"] for one, base in zip(runs, unbiased, strict=True)
        )
        bias = statistics.median(one["length"] / base["length"] for one, base in zip(runs, unbiased, strict=True)) - 1
        ends = [at_seconds(one["curve"], float("inf")) for one in runs]
        equal = [at_seconds(one["curve"], limit) for one, limit in zip(runs, limits, strict=True)]
        print(
            f"| {name} | {median('samples/s'):.0f} | {speedup:.2f} | {median('trainer idle'):.0%} "
            f"| {median('generator idle'):.0%} | {median('staleness'):.2f} | {median('length'):.1f} ({bias:+.1%}) "
            f"| {statistics.median(ends):.3f} ({min(ends):.3f}-{max(ends):.3f}) | {statistics.median(equal):.3f} |"
        )


if __name__ == "__main__":
    main()
