"""A scoring service: batches stream through workers, and only the rows of a killed worker are scored again.

    python tutorials/score.py                     # 60 batches on two workers; each is killed once
    python tutorials/score.py --workers 4 --kills 0

``group.map`` keeps a few batches in flight, so that workers never wait for the driver, and no more, so that a source of
any size fits. The workers are independent (``collectives=False``): if one dies, only this worker is restarted, and
only its rows are sent again.
"""

import argparse
import os
import signal
import sys
import time

import torch
from score_worker import Scorer

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

MODEL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ROWS, TOKENS = 64, 32


def batches(count):
    """Yield batches, each when a worker has room for it. A service would read a file or a queue here."""
    draw = torch.Generator().manual_seed(0)
    for number in range(count):
        ids = torch.randint(0, MODEL["vocab_size"], (ROWS, TOKENS), generator=draw)
        yield {"row": torch.arange(number * ROWS, (number + 1) * ROWS), "ids": ids}


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2, help="how many workers are killed meanwhile, one after another")
    asked = parser.parse_args()
    kill_at = {asked.batches * (number + 1) // (asked.kills + 1): number for number in range(asked.kills)}
    rows, scores = [], []
    with RayResourcePool([asked.workers], use_gpu=False) as pool:
        made = RayClassWithInitArgs(Scorer, MODEL)
        with RayWorkerGroup(pool, made, collectives=False) as group:
            began = time.monotonic()
            scored = group.map(group.score, batches(asked.batches), in_flight=4, retries=3, progress=True)
            for done, result in enumerate(scored, 1):
                rows += result["row"].tolist()
                scores += result["score"].tolist()
                if done in kill_at:
                    victim = kill_at[done] % asked.workers
                    os.kill(group.status().ranks[victim].process.pid, signal.SIGKILL)
            seconds = time.monotonic() - began
            restarts = group.generation
    print(f"\n{len(rows)} rows in {seconds:.1f} s, {restarts} restarts; mean score {sum(scores) / len(scores):.3f}")
    if rows != list(range(asked.batches * ROWS)):
        sys.exit("FAILED: rows are missing, doubled or out of order.")


if __name__ == "__main__":
    main()
