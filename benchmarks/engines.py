"""Measure HFEngine and VLLMEngine on the same work: `.venv-vllm/bin/python -m benchmarks.engines` (ten minutes).

Each engine runs in a process of its own; they take turns. Prints one table of medians in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import random
import resource
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

PROMPTS = 64
MODELS: dict[str, dict[str, Any]] = {
    "2 x 64": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    # With its vocabulary, 256 MB in float32.
    "8 x 512": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
}
VOCABULARY = {"2 x 64": 32, "8 x 512": 37_800}
LENGTHS = (16, 64, 256)


def engine_process(name: str, model: str, pipe: Connection) -> None:
    """Serve one engine: ("generate", tokens, seed), ("update",), and None to end."""
    import torch

    from workers import HFEngine, SamplingParams, VLLMEngine

    vocabulary = VOCABULARY[model]
    config = {"model_type": "llama", "vocab_size": vocabulary, "max_position_embeddings": 512, **MODELS[model]}
    began = time.monotonic()
    engine = {"HFEngine": HFEngine, "VLLMEngine": VLLMEngine}[name](config, random_weights=True)
    draw = torch.Generator().manual_seed(1)
    shapes = engine.weight_shapes()
    weights = [(name, 0.02 * torch.randn(shape, generator=draw)) for name, shape in shapes.items()]
    pipe.send(time.monotonic() - began)
    versions = itertools.count(1)
    for command in iter(pipe.recv, None):
        rng = random.Random(command[-1])
        cpu, began = time.process_time(), time.monotonic()
        made = 0
        if command[0] == "update":
            engine.begin_update()
            engine.load_weights(weights)
            engine.finish_update(next(versions))
            made = sum(tensor.nbytes for _, tensor in weights)
        else:
            # Lengths differ: prompts of 4 to 32 tokens, and a stop token that ends about half of them early.
            prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(4, 32))] for _ in range(PROMPTS)]
            each = command[1]
            stops = tuple(rng.sample(range(vocabulary), max(1, round(vocabulary * 0.7 / each))))
            how = SamplingParams(each, stop_token_ids=stops)
            made = sum(len(one.token_ids) for one in engine.generate(prompts, how, range(PROMPTS)))
        wall = time.monotonic() - began
        pipe.send((made, wall, time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    engine.close()


def measure(model: str, repeats: int, lengths: tuple[int, ...]) -> list[str]:
    context = mp.get_context("spawn")
    pipes, processes = {}, []
    for name in ("HFEngine", "VLLMEngine"):
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=engine_process, args=(name, model, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    started = {name: pipe.recv() for name, pipe in pipes.items()}
    print(f"{model}: started in " + ", ".join(f"{name} {took:.1f} s" for name, took in started.items()), flush=True)

    def ask(name: str, *command: Any) -> Any:
        pipes[name].send(command)
        return pipes[name].recv()

    rows = []
    for work in [*lengths, "update"]:
        command = ("update",) if work == "update" else ("generate", work)
        found: dict[str, list[Any]] = {name: [] for name in pipes}
        for number in range(repeats + 1):
            names = list(pipes) if number % 2 else list(pipes)[::-1]
            for name in names:
                answer = ask(name, *command, number)
                if number:  # the first one touches fresh memory
                    found[name].append(answer)
        for name, answers in found.items():
            made, walls, cpus, memory = zip(*answers, strict=True)
            rates = [count / wall for count, wall in zip(made, walls, strict=True)]
            cells = (
                [f"{made[0] / 2**20:.0f} MiB", f"{statistics.median(walls):.2f} s"]
                if work == "update"
                else [f"{PROMPTS} x {work}", f"{statistics.median(rates):,.0f} tokens/s"]
            )
            rows.append([model, name, *cells, f"{statistics.median(cpus):.2f}", f"{max(memory):,.0f}"])
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join(30)
    return ["| " + " | ".join(row) + " |" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    options = parser.parse_args()
    lines = [line for model in options.models for line in measure(model, options.repeats, tuple(options.lengths))]
    print(f"\n| model | engine | work | median of {options.repeats} | CPU s | peak MB |\n|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
