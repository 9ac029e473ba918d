"""This library's steps: synchronous or asynchronous, with `HFEngine` or `VLLMEngine`."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import ray

from benchmarks.contenders.steps import Commands
from single_controller import RayClassWithInitArgs, RayWorkerGroup
from workers import (
    HFEngine,
    RayTrainGroup,
    RolloutManager,
    RolloutStream,
    RolloutWorker,
    RunLog,
    SamplingParams,
    VLLMEngine,
    place,
    read_args,
)

VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


def main() -> None:
    """Serve the benchmark's commands."""
    commands = Commands()
    task = commands.task
    asynchronous, vllm = "asynchronous" in task.variant, "vLLM" in task.variant
    args = read_args(
        {
            "hf_checkpoint": task.model,
            "lr": task.lr,
            "actor_num_gpus_per_node": 1,
            "num_rollout": 10_000,
            "rollout_batch_size": task.prompts,
            "n_samples_per_prompt": task.samples,
            "rollout_max_response_len": task.new_tokens,
            "rollout_stop_token_ids": [],
            "async_rollout": asynchronous,
            "max_staleness": int(asynchronous),
        }
    )
    engine, options = (VLLMEngine, {"python": VLLM_PYTHON}) if vllm else (HFEngine, {})
    recorded = tempfile.mkdtemp() if "recorded" in task.variant else None
    with place(args) as placement, RunLog.from_args(args, run_dir=recorded) as log:
        actor = RayTrainGroup(args, 1, 1, placement.actor, placement.share)
        ray.get(actor.async_init())
        made = RayClassWithInitArgs(RolloutWorker, engine, task.model, random_weights=True, **options)
        manager = RolloutManager(
            RayWorkerGroup(placement.rollout, made, collectives=False),
            SamplingParams.from_args(args),
            lambda prompt, completion: task.reward(completion),
            samples_per_prompt=task.samples,
        )
        actor.set_rollout_manager(manager)
        log.watch(actor, manager)
        stream = RolloutStream.from_args(args, manager, task.prompts_of) if asynchronous else None
        actor.update_weights()
        step = 0
        while commands.next():
            times = [time.monotonic()]
            data = stream.take() if stream else manager.generate(task.prompts_of(step), rollout_id=step)
            times.append(time.monotonic())
            data = log.mark(step, data)
            metrics = ray.get(actor.async_train(step, data))[0]
            if recorded:
                log.log(step, metrics, data)
            times.append(time.monotonic())
            actor.update_weights()
            times.append(time.monotonic())
            parts = [end - begin for begin, end in itertools.pairwise(times)]
            # An asynchronous step waits for what was generated while the step before was trained.
            apart = {} if stream else dict(zip(("generation", "training", "update"), parts, strict=True))
            commands.done(
                tokens=int(data["loss_mask"].sum()),
                reward=float(data["rewards"].mean()),
                grad_norm=metrics["grad_norm"],
                step=step,
                **apart,
            )
            step += 1
        if stream:
            stream.close()


if __name__ == "__main__":
    main()
