"""One step of GRPO beside TRL's trainer: `python -m benchmarks.rl_step` (an hour and a half on two idle cores).

All train the same model from the same weights, generate as many tokens for the same prompts, and take one AdamW step in
float32: this library synchronously and asynchronously, with HFEngine and, where `make setup-vllm` was run, VLLMEngine;
TRL in an environment of its own; and a loop by hand, in one process. All are alive, and take turns of four steps, of
which the first does not count. Prints one table of medians in Markdown.

verl is not among them: its trainer generates with servers of vLLM, SGLang or TensorRT-LLM only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders.ours_steps import VLLM_PYTHON
from benchmarks.contenders.steps import Task
from benchmarks.machine import machine
from benchmarks.roster import Contender
from benchmarks.rounds import ENVIRONMENT
from benchmarks.venvs import HERE, python_for

VOCABULARY, LENGTH = 1024, 512
MODELS = {
    "4 x 256": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4},
    "8 x 512": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
}
TURN = 4
TRL = Contender("trl", "TRL 1.16.0", "benchmarks.contenders.trl_steps", venv="trl", requirements=("trl==1.16.0",))
_OURS = "benchmarks.contenders.ours_steps"
WAYS = {
    # Asynchronous: two processes compute at once, with a thread each, instead of one at a time with two.
    "this library, synchronous": (Contender("ours", "", _OURS), 2),
    "this library, synchronous, recorded": (Contender("ours", "", _OURS), 2),  # with a run folder
    "this library, asynchronous": (Contender("ours", "", _OURS), 1),
    "this library, vLLM, synchronous": (Contender("ours", "", _OURS), 2),
    "this library, vLLM, asynchronous": (Contender("ours", "", _OURS), 1),
    TRL.title: (TRL, 2),
    "a loop by hand": (Contender("by hand", "", "benchmarks.contenders.plain_steps"), 2),
}


@dataclass
class Way:
    """A running contender, and its measurements: one per turn."""

    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    memory: float = 0.0

    def turn(self, task: Task) -> None:
        """Take the steps of a turn."""
        self.steps(1, task)
        before = cpu_seconds(self.process.pid)
        reports = self.steps(TURN - 1, task)
        self.cpu.append((cpu_seconds(self.process.pid) - before) / len(reports))
        self.seconds.append(statistics.mean(report["seconds"] for report in reports))
        for name in ("generation", "training", "update"):
            if name in reports[0]:
                self.parts.setdefault(name, []).append(statistics.mean(report[name] for report in reports))

    def steps(self, count: int, task: Task) -> list[dict[str, Any]]:
        """Take some steps, and check them."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        stop = threading.Event()
        watch = threading.Thread(target=self._watch, args=(stop,))
        watch.start()
        line = self.process.stdout.readline()
        stop.set()
        watch.join()
        if not line:
            raise RuntimeError(f"the process has ended with status {self.process.wait()}; see its log")
        reports: list[dict[str, Any]] = json.loads(line)
        for report in reports:
            wanted = task.prompts * task.samples * task.new_tokens
            if report["tokens"] != wanted:
                raise RuntimeError(f"step {report['step']} has {report['tokens']} generated tokens, not {wanted}")
            self.rewards.append(report["reward"])
        return reports

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(0.2):
            self.memory = max(self.memory, sum(map(_own_memory, tree(self.process.pid))))


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
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 2**20


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


def measure(model: str, names: list[str], rounds: int, logs: Path) -> dict[str, Way]:
    """Start the ways to train a model, and let them take turns."""
    ways: dict[str, Way] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, model)
        task = Task(folder, VOCABULARY, 16, 8, 32, 64, 1e-3, "")
        try:
            for name in names:
                contender, threads = WAYS[name]
                log = open(logs / f"{model}, {name}.log".replace(" ", "_"), "w")  # noqa: SIM115  (the process has it)
                process = subprocess.Popen(
                    [python_for(contender), "-m", contender.module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=HERE.parent,
                    env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
                )
                ways[name] = Way(process)
                assert process.stdin is not None
                process.stdin.write(json.dumps(asdict(task) | {"variant": name}) + "\n")
                ways[name].steps(2, task)  # started and warm before the next begins
            for turn in range(rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    ways[name].turn(task)
                    print(f"{model}, turn {turn}, {name}: {ways[name].seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        finally:
            for way in ways.values():
                assert way.process.stdin is not None
                way.process.stdin.close()
            for way in ways.values():
                try:
                    way.process.wait(60)
                except subprocess.TimeoutExpired:
                    way.process.kill()
    return ways


def row(name: str, way: Way, task_tokens: int) -> str:
    """A line of the table."""

    def said(values: list[float] | None) -> str:
        return f"{statistics.median(values):.2f}" if values else "-"

    per_second = task_tokens / statistics.median(way.seconds)
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
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, default=HERE / "out" / "rl_step", help="folder for the logs and results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in options.ways if "vLLM" not in name or VLLM_PYTHON.exists()]
    about = machine()
    lines = [
        f"{about['processor']}, {about['cores']} cores; n = {options.rounds} turns of {TURN - 1} steps; "
        "16 prompts of 32 tokens, 8 completions of 64 each, float32."
    ]
    for model in options.models:
        began = time.monotonic()
        ways = measure(model, names, options.rounds, options.out)
        lines += [
            "",
            f"| Llama {model} | s per step (least-most) | generated tokens/s | generation s | training s | update s "
            "| CPU s | peak memory, GiB | reward, first and last third |",
            "|---|" + "--:|" * 8,
            *(row(name, way, 16 * 8 * 64) for name, way in ways.items()),
        ]
        print(f"{model}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = "\n".join(lines) + "\n"
    (options.out / "table.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
