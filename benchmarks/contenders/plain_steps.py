"""The steps by hand: one process, one loop over tokens with transformers' cache, one backward pass over all rows."""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.contenders.steps import Commands


def main() -> None:
    """Serve the benchmark's commands."""
    commands = Commands()
    task = commands.task
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.0)
    step = 0
    while commands.next():
        began = time.monotonic()
        rows = torch.tensor([prompt for prompt in task.prompts_of(step) for _ in range(task.samples)])
        with torch.no_grad():
            made = model(rows, use_cache=True)
            for _ in range(task.new_tokens):
                token = torch.multinomial(made.logits[:, -1].softmax(-1), 1)
                rows = torch.cat([rows, token], 1)
                made = model(token, past_key_values=made.past_key_values, use_cache=True)
        completions = rows[:, task.prompt_tokens :]
        rewards = torch.tensor([task.reward(completion) for completion in completions.tolist()])
        generated = time.monotonic()
        groups = rewards.view(-1, task.samples)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        log_probs = model(rows).logits[:, task.prompt_tokens - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(-1, completions[..., None])[..., 0]
        optimizer.zero_grad()
        (-advantages.view(-1, 1) * chosen).mean().backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        commands.done(
            tokens=completions.numel(),
            reward=float(rewards.mean()),
            grad_norm=float(grad_norm),
            step=step,
            generation=generated - began,
            training=time.monotonic() - generated,
        )
        step += 1


if __name__ == "__main__":
    main()
