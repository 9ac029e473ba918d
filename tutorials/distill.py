"""Distil a teacher's policy into a student, on tokens that the student samples (on-policy distillation).

    python tutorials/distill.py                    # the sampled-token loss: a policy gradient
    python tutorials/distill.py loss=top_k k=32    # over the teacher's k most likely tokens
    python tutorials/distill.py teacher=FOLDER hf_checkpoint=FOLDER     # models of your own

Pass any key of workers/train/ARGUMENTS.md as key=value. The teacher's outputs go from its ranks to the student's
as a future; large ones never pass through the driver.
"""

import sys
import time
from typing import Any

import distill_teacher  # noqa: F401  (registers the losses)
import ray
import torch
from distill_teacher import Teacher
from omegaconf import OmegaConf
from tqdm import tqdm

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers import HFEngine, RayTrainGroup, RolloutManager, RolloutWorker, SamplingParams, read_args

MODEL = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TEACHER = {**MODEL, "num_hidden_layers": 0, "initializer_range": 0.3}  # bigrams, and far from uniform
USUAL: Any = {"hf_config": MODEL, "seed": 0, "num_rollout": 60, "rollout_batch_size": 32, "n_samples_per_prompt": 4}
USUAL |= {"rollout_max_response_len": 12, "lr": 1e-2, "lr_decay_style": "cosine", "rollout_stop_token_ids": []}
LOSSES = {"sampled": {"advantage_estimator": "teacher"}, "top_k": {"policy_loss_type": "teacher_top_k"}}
GOAL = 0.2  # nats per token


def arguments(words):
    given: Any = OmegaConf.to_container(OmegaConf.from_cli(words))
    teacher, temperature = given.pop("teacher", TEACHER), given.pop("teacher_temperature", None)
    loss, k = given.pop("loss", "sampled"), given.pop("k", 32)
    if loss not in LOSSES:
        sys.exit(f"loss={loss}: expected one of {', '.join(LOSSES)}")
    usual = {key: value for key, value in USUAL.items() if key != "hf_config" or "hf_checkpoint" not in given}
    args = read_args({**usual, **LOSSES[loss], **given})
    return args, teacher, args.temperature if temperature is None else temperature, k if loss == "top_k" else 0


def check_temperature(args, sampling_params, teacher):
    """The student's probabilities, those that its tokens were drawn with, and the teacher's must be of one temperature:
    otherwise the loss pulls the student to another distribution than the teacher's, and nothing fails."""
    if not args.temperature == sampling_params.temperature == teacher:
        raise ValueError(
            f"the student trains at temperature {args.temperature:g}, the rollout draws at "
            f"{sampling_params.temperature:g}, and the teacher scores at {teacher:g}; use one temperature"
        )


def main():
    args, teacher_model, temperature, k = arguments(sys.argv[1:])
    sampling_params = SamplingParams.from_args(args)
    check_temperature(args, sampling_params, temperature)
    began = time.monotonic()
    use_gpu = torch.cuda.is_available()
    with RayResourcePool([4], use_gpu=use_gpu) as pool:
        student = RayTrainGroup(args, 1, 2, pool[:2])
        teacher = RayWorkerGroup(pool[2:3], RayClassWithInitArgs(Teacher, teacher_model, temperature, k))
        model = args.hf_checkpoint or OmegaConf.to_container(args.hf_config)
        made = RayClassWithInitArgs(RolloutWorker, HFEngine, model, random_weights=True)
        rollout = RayWorkerGroup(pool[3:], made, collectives=False)
        student.async_init().result()
        manager = RolloutManager(rollout, sampling_params, samples_per_prompt=args.n_samples_per_prompt, seed=args.seed)
        student.set_rollout_manager(manager)
        draw = torch.Generator().manual_seed(args.seed)
        divergences = []
        for rollout_id in tqdm(range(args.num_rollout), desc="distilling", unit="rollout", mininterval=0.5):
            student.update_weights()
            prompts = torch.randint(0, MODEL["vocab_size"], (args.rollout_batch_size, 2), generator=draw).tolist()
            data = manager.generate(prompts, rollout_id=rollout_id)
            if k:
                data["advantages"] = torch.zeros(len(data))  # the loss reads none
            # A future: the teacher still computes when the student is sent its rows.
            said = teacher.score.remote(data.select("input_ids", "attention_mask"))
            metrics = ray.get(student.async_train(rollout_id, {**data, "teacher": said}))[0]
            divergences.append(metrics["kl"])
        mean = sum(divergences[-5:]) / len(divergences[-5:])
        sent = student.worker_group.stats().methods["train"].sent / args.num_rollout
        print(f"\nKL(student || teacher), nats per token: first {divergences[0]:.3f}, last five {mean:.3f}")
        print(f"{sent / 1000:.0f} kB were sent to the student in each step; {time.monotonic() - began:.0f} s in all.")
    if args.num_rollout >= USUAL["num_rollout"] and mean > GOAL:
        sys.exit(f"FAILED: the divergence of the last five rollouts is above {GOAL}.")


if __name__ == "__main__":
    main()
