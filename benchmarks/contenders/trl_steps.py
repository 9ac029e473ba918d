"""TRL's steps: `GRPOTrainer` in one process, which generates with transformers."""

from __future__ import annotations

import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.contenders.steps import Commands

STEPS = 10_000


class Turns(TrainerCallback):  # type: ignore[misc]
    """Takes a step when the benchmark wants one."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.generation = 0.0
        self.rewards: list[float] = []
        self.tokens = 0
        self.grad_norm = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the command."""
        if not self.commands.next():
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report."""
        seconds = time.monotonic() - self.commands.began
        self.commands.done(
            tokens=self.tokens,
            reward=sum(self.rewards) / len(self.rewards),
            grad_norm=self.grad_norm,
            step=state.global_step - 1,
            generation=self.generation,
            training=seconds - self.generation,
        )


def main() -> None:
    """Serve the benchmark's commands."""
    commands = Commands()
    task = commands.task
    turns = Turns(commands)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        turns.rewards = [task.reward(ids) for ids in completion_ids]
        turns.tokens = sum(map(len, completion_ids))
        return turns.rewards

    config = GRPOConfig(
        output_dir="/tmp/trl-steps",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=STEPS,
        disable_tqdm=True,
        max_steps=STEPS,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=task.prompts * task.samples,
        gradient_accumulation_steps=1,
        num_generations=task.samples,
        max_completion_length=task.new_tokens,
        generation_kwargs={"min_new_tokens": task.new_tokens},
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
    )
    prompts = [prompt for step in range(200) for prompt in task.prompts_of(step)]
    words = [" ".join(map(str, prompt)) for prompt in prompts]
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    if tokenizer(words)["input_ids"] != prompts:
        raise RuntimeError("the tokenizer has not turned the words into the tokens that the others get")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": words}),
        processing_class=tokenizer,
        callbacks=[turns],
    )
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return generate(*args, **kwargs)
        finally:
            turns.generation = time.monotonic() - began

    clip = trainer.accelerator.clip_grad_norm_

    def noted(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        turns.grad_norm = float(norm)
        return norm

    trainer._generate, trainer.accelerator.clip_grad_norm_ = timed, noted
    trainer.train()


if __name__ == "__main__":
    main()
