"""Train a character-level language model, data-parallel, on the prose that comes with Python itself.

    python tutorials/train_char_lm.py        # four workers on CPU; about a minute on two cores

The text is the documentation behind Python's `help()`, so nothing is downloaded. The driver, `main()`,
never says which worker gets which rows: `@register` on the worker's methods does.
"""

import argparse
import hashlib
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from char_text import count_models, load_text, plot_losses
from torch import Tensor, nn
from tqdm import tqdm

from single_controller import (
    Dispatch,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)

CONTEXT = 64  # characters that the model sees in a window
ROWS_PER_WORKER = 32  # windows per worker and training step
TARGET = 2.3  # nats per character


class CharLM(nn.Module):
    def __init__(self, vocab_size: int, hidden: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 64)
        self.rnn = nn.GRU(64, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        features, state = self.rnn(self.embed(tokens), state)
        return self.head(features), state


def row_losses(model: nn.Module, windows: Tensor) -> Tensor:
    logits, _ = model(windows[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)


class CharLMWorker(Worker):
    """One rank. Its methods receive this rank's shard of the rows as `windows`."""

    def __init__(self, hidden: int):
        super().__init__()
        self.hidden = hidden

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self, vocab_size: int, seed: int) -> int:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        dist.init_process_group("gloo")  # rank, world size and address are already in the environment
        self.model = CharLM(vocab_size, self.hidden)
        self.ddp = nn.parallel.DistributedDataParallel(self.model)  # averages gradients over the ranks
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98))
        return sum(p.numel() for p in self.model.parameters())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)  # rows are sharded over the ranks, a list is returned
    def train_step(self, windows: Tensor, lr: float) -> float:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = row_losses(self.ddp, windows).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="ragged")  # rows are sharded, results joined
    def evaluate(self, windows: Tensor) -> Tensor:
        with torch.no_grad():
            return row_losses(self.model, windows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def sample(self, prompt: Tensor, length: int, temperature: float = 0.6) -> Tensor:
        tokens, state = [prompt[None]], None
        with torch.no_grad():
            for _ in range(length):
                logits, state = self.model(tokens[-1], state)
                tokens.append(torch.multinomial(F.softmax(logits[:, -1] / temperature, dim=-1), 1))
        return torch.cat(tokens, dim=1)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_digest(self) -> str:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "char_lm_loss.png")
    args = parser.parse_args()
    if args.steps < 1 or args.workers < 1:
        parser.error("--steps and --workers must be at least 1")

    began = time.monotonic()
    torch.manual_seed(args.seed)
    alphabet, train, valid = load_text()
    eval_windows = valid[: len(valid) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    train_losses: list[float] = []
    valid_losses: dict[int, float] = {}

    pool = RayResourcePool([args.workers], use_gpu=False)
    with pool, RayWorkerGroup(pool, RayClassWithInitArgs(cls=CharLMWorker, hidden=192)) as group:
        parameters = group.setup(len(alphabet), args.seed)[0]
        print(f"{group.world_size} workers, {parameters:,} parameters each")
        progress = tqdm(range(1, args.steps + 1), desc="training", unit="step", mininterval=0.5)
        for step in progress:
            starts = torch.randint(len(train) - CONTEXT, (ROWS_PER_WORKER * group.world_size, 1))
            windows = train[starts + torch.arange(CONTEXT + 1)]
            lr = 4e-3 * min(step / 20, 0.05 + 0.95 * math.cos(math.pi / 2 * step / args.steps) ** 2)
            losses = group.train_step(windows, lr)
            train_losses.append(sum(losses) / len(losses))
            if step % 50 == 0 or step == args.steps:
                valid_losses[step] = group.evaluate(eval_windows).mean().item()
                progress.set_postfix(train=f"{train_losses[-1]:.2f}", valid=f"{valid_losses[step]:.2f}")
        prompt = torch.tensor([alphabet.index(char) for char in "The "])
        sample = "".join(alphabet[i] for i in group.sample(prompt, length=400))
        digests = group.weights_digest()

    print(f"\nA sample, drawn by rank 0:\n{'-' * 72}\n{sample}\n{'-' * 72}\n")
    references = count_models(train, valid, len(alphabet))
    loss = valid_losses[args.steps]
    print("Nats per character on the validation text:")
    for name, value in {**references, "this model": loss}.items():
        print(f"  {name:<14}{value:.3f}")
    plot_losses(args.out, train_losses, valid_losses, references)
    print(f"\nThe loss curve is in {args.out}; {time.monotonic() - began:.0f} s in all.")

    if len(set(digests)) != 1:
        sys.exit(f"FAILED: the ranks' weights differ; digests by rank: {[d[:12] for d in digests]}")
    print(f"The weights of all {len(digests)} ranks are identical (sha256 {digests[0][:12]}...).")
    if not loss < TARGET:
        sys.exit(f"FAILED: the validation loss {loss:.3f} is not below {TARGET} nats per character.")


if __name__ == "__main__":
    main()
