"""One step of GRPO beside TRL's trainer: `python -m benchmarks.rl_step` (an hour and a half on two idle cores).

All train the same model from the same weights, generate as many tokens for the same prompts, and take one AdamW step in
float32: this library synchronously and asynchronously, with HFEngine and, where `make setup-vllm` was run, VLLMEngine;
TRL in an environment of its own; and a loop by hand, in one process. All are alive, and take turns of a step that does
not count and three that do. Steps with and without a run folder alternate: the difference is what recording costs.
Prints one table of medians in Markdown.

verl is not among them: its trainer generates with servers of vLLM, SGLang or TensorRT-LLM only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contenders.ours_steps import VLLM_PYTHON
from benchmarks.contenders.steps import TASK, Task
from benchmarks.machine import machine, memory
from benchmarks.protocol import Session
from benchmarks.roster import Contender
from benchmarks.rounds import CALL_TIMEOUT, ENVIRONMENT
from benchmarks.venvs import HERE, python_for

VOCABULARY, LENGTH = 1024, 512
MODELS = {
    "4 x 256": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4},
    "8 x 512": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
}
TRL = Contender("trl", "TRL 1.16.0", "benchmarks.contenders.trl_steps", venv="trl", requirements=("trl==1.16.0",))
_OURS = "benchmarks.contenders.ours_steps"
_PLAIN, _RECORDED = "this library, synchronous", "this library, synchronous, recorded"
WAYS = {
    # Asynchronous: two processes compute at once, with a thread each, instead of one at a time with two.
    _PLAIN: (Contender("ours", "", _OURS), 2),
    _RECORDED: (Contender("ours", "", _OURS), 2),  # with a run folder
    "this library, asynchronous": (Contender("ours", "", _OURS), 1),
    "this library, vLLM, synchronous": (Contender("ours", "", _OURS), 2),
    "this library, vLLM, asynchronous": (Contender("ours", "", _OURS), 1),
    TRL.title: (TRL, 2),
    "a loop by hand": (Contender("by hand", "", "benchmarks.contenders.plain_steps"), 2),
}


class Shape(NamedTuple):
    """Of a step; see `Task`."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int


@dataclass
class Way:
    """A contender, and its measurements: one per turn."""

    session: Session = field(init=False)
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    memory: float = 0.0
    grad_norm: float = 0.0
    singles: list[float] = field(default_factory=list)
    """Seconds of each step, where `seconds` has the mean of each turn."""

    def step(self, task: Task) -> dict[str, Any]:
        """Take a step, and check it."""
        stop = threading.Event()
        watch = threading.Thread(target=self._watch, args=(stop,))
        watch.start()
        try:
            report: dict[str, Any] = self.session.ask("step", CALL_TIMEOUT)
        finally:
            stop.set()
            watch.join()
        if report["tokens"] != task.tokens:
            raise RuntimeError(f"step {report['step']} has {report['tokens']} generated tokens, not {task.tokens}")
        self.rewards.append(report["reward"])
        self.grad_norm = self.grad_norm or report["grad_norm"]
        return report

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(0.2):
            self.memory = max(self.memory, sum(map(_own_memory, tree(self.session.pid))))


def turn(ways: list[Way], task: Task, steps: int) -> None:
    """Take the steps of a turn. Those of several ways alternate."""
    cpu, reports = [0.0] * len(ways), [list[dict[str, Any]]() for _ in ways]
    for way in ways:
        way.step(task)
    for number in range(steps):
        for which in range(len(ways))[:: -1 if number % 2 else 1]:
            before = cpu_seconds(ways[which].session.pid)
            reports[which].append(ways[which].step(task))
            cpu[which] += cpu_seconds(ways[which].session.pid) - before
    for way, seconds, found in zip(ways, cpu, reports, strict=True):
        way.cpu.append(seconds / steps)
        way.singles += [report["seconds"] for report in found]
        way.seconds.append(statistics.mean(way.singles[-steps:]))
        for name in ("generation", "training", "update"):
            if name in found[0]:
                way.parts.setdefault(name, []).append(statistics.mean(report[name] for report in found))


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def cpu_seconds(pid: int) -> float:
    """Seconds of user and system time of a process and its descendants, those that have ended included."""
    ticks = 0
    for one in tree(pid):
        try:
            ticks += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_memory(pid: int) -> float:
    """GiB of a process that are not files: anonymous and shared memory."""
    try:
        return sum(memory("RssAnon", "RssShmem", pid=pid)) / 2**30
    except OSError:
        return 0.0


def save_model(folder: str, name: str) -> None:
    """Write the model that all begin with, and a tokenizer whose token k is the word "k"."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **MODELS[name],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    # Special tokens are found inside words too: named "0", "1" and "2", they would cut most prompts into more tokens.
    special = ["<pad>", "<s>", "</s>"]
    names = [*special, *map(str, range(len(special), VOCABULARY))]
    words = Tokenizer(models.WordLevel({word: token for token, word in enumerate(names)}, unk_token=special[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end = special
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, bos_token=begin, eos_token=end)
    made.save_pretrained(folder)


def measure(
    model: str, names: list[str], rounds: int, steps: int, shape: Shape, apart: bool, logs: Path
) -> dict[str, Way]:
    """Start the ways to train a model, and let them take turns; or start each for its turn, if ``apart``.

    Raises:
        ContenderError: a way has ended.
        RuntimeError: what a way computes is not what the others do.
    """
    ways = {name: Way() for name in names}
    alive: list[Way] = []
    # Ways whose steps alternate take their turn together.
    pair = [name for name in names if name in (_PLAIN, _RECORDED)]
    turns = [[name] for name in names if name not in pair] + ([pair] if pair else [])
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, model)
        task = Task(folder, VOCABULARY, *shape, 1e-3, "")

        def begin(name: str) -> None:
            contender, threads = WAYS[name]
            given = {"OMP_NUM_THREADS": str(threads), TASK: json.dumps(asdict(task) | {"variant": name})}
            log = logs / f"{model}, {name}.log".replace(" ", "_")
            way = ways[name]
            way.session = Session(python_for(contender), contender.module, {**ENVIRONMENT, **given}, log, spare=0)
            alive.append(way)
            for _ in range(2):  # started and warm before the next begins
                way.step(task)

        def end() -> None:
            while alive:
                alive.pop().session.close()

        try:
            for name in [] if apart else names:
                begin(name)
            for number in range(rounds):
                first = number % len(turns)
                for together in turns[first:] + turns[:first]:
                    for name in together if apart else []:
                        begin(name)
                    turn([ways[name] for name in together], task, steps)
                    said = "; ".join(f"{name}: {ways[name].seconds[-1]:.2f} s" for name in together)
                    print(f"{model}, turn {number}, {said}", file=sys.stderr, flush=True)
                    if apart:
                        end()
                if not number:
                    check_gradients(ways)
        finally:
            end()
    return ways


def check_gradients(ways: dict[str, Way]) -> None:
    """All begin with the same weights, so the gradients of the first step differ by what was sampled.

    Raises:
        RuntimeError: they differ by more, as those of another loss would.
    """
    norms = {name: way.grad_norm for name, way in ways.items()}
    print("norms of the first gradients:", norms, file=sys.stderr, flush=True)
    if max(norms.values()) > 1.5 * min(norms.values()):
        raise RuntimeError(f"the ways do not compute the same: the norms of their first gradients are {norms}")


def row(name: str, way: Way, tokens: int) -> str:
    """A line of the table."""

    def said(values: list[float] | None) -> str:
        return f"{statistics.median(values):.2f}" if values else "-"

    per_second = tokens / statistics.median(way.seconds)
    third = max(len(way.rewards) // 3, 1)
    first, last = statistics.mean(way.rewards[:third]), statistics.mean(way.rewards[-third:])
    return (
        f"| {name} | {said(way.seconds)} ({min(way.seconds):.2f}-{max(way.seconds):.2f}) | {per_second:,.0f} "
        f"| {said(way.parts.get('generation'))} | {said(way.parts.get('training'))} | {said(way.parts.get('update'))} "
        f"| {said(way.cpu)} | {way.memory:.1f} | {first:.3f}, {last:.3f} |"
    )


def main() -> None:
    """Run all contenders in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="that are timed, of each way in each round")
    parser.add_argument("--quick", action="store_true", help="one small step each, to see that all ways work")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--apart", action="store_true", help="start each way for its turn, for less memory")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "rl_step", help="folder for the logs and results")
    options = parser.parse_args()
    rounds, steps, shape = options.rounds, options.steps, Shape(16, 8, 32, 64)
    if options.quick:
        rounds, steps, shape = 1, 1, Shape(8, 4, 32, 16)
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in options.ways if "vLLM" not in name or VLLM_PYTHON.exists()]
    about = machine()
    lines = [
        f"{about['processor']}, {about['cores']} cores; n = {rounds} turns of {steps} steps; "
        f"{shape.prompts} prompts of {shape.prompt_tokens} tokens, {shape.samples} completions of {shape.new_tokens} "
        "each, float32."
    ]
    for model in options.models:
        began = time.monotonic()
        ways = measure(model, names, rounds, steps, shape, options.apart, options.out)
        lines += [
            "",
            f"| Llama {model} | s per step (least-most) | generated tokens/s | generation s | training s | update s "
            "| CPU s | peak memory, GiB | reward, first and last third |",
            "|---|" + "--:|" * 8,
            *(row(name, way, shape.prompts * shape.samples * shape.new_tokens) for name, way in ways.items()),
        ]
        if _PLAIN in ways and _RECORDED in ways:
            pairs = zip(ways[_RECORDED].singles, ways[_PLAIN].singles, strict=True)
            more = [recorded - plain for recorded, plain in pairs]
            lines += ["", f"Recording: {1000 * statistics.median(more):+.1f} ms per step, median of {len(more)} pairs."]
        print(f"{model}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = "\n".join(lines) + "\n"
    (options.out / "table.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
