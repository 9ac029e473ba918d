"""Runs of the demo, as a user starts them. Rewards are read from TensorBoard's files.

python tests/demo_runs.py            # FSDP, Megatron and vLLM, colocated and separate, five seeds each: twenty minutes
python tests/demo_runs.py --seeds 1
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tutorials" / "train_grpo.py"

COLOCATED = ("colocate=true", "offload_train=true")
WAYS = {
    "fsdp": (),
    "fsdp-colocated": COLOCATED,
    "megatron": ("train_backend=megatron", "tp=2"),
    "megatron-colocated": ("train_backend=megatron", "tp=2", *COLOCATED),
    "vllm": ("engine=vllm",),
    "lora": ("lora_rank=8",),
    "moe": ("moe=true",),
    "moe-megatron": ("moe=true", "train_backend=megatron", "ep=2"),
    "moe-vllm": ("moe=true", "engine=vllm"),
    "async": ("async_rollout=true", "max_staleness=1", "update_weights_mode=interrupt"),
}


def command(folder, *given):
    """The command that a user types. The run writes into ``folder``."""
    return [sys.executable, str(SCRIPT), f"tensorboard_dir={folder}/log", f"out={folder}/curve.png", *given]


def environment():
    """A user's environment, without the paths that tests need."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}


def run(folder, *given, timeout=240):
    """The rewards of a whole run, by rollout.

    Raises:
        RuntimeError: the run failed or took too long. The message has its output and its threads' stacks.
    """
    driver, said = start(folder, *given)
    how = "ended"
    try:
        driver.wait(timeout)
    except subprocess.TimeoutExpired:
        how = f"had not ended after {timeout} s, and was made to"
        driver.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(30)
    finally:
        driver.kill()  # if something else was raised meanwhile
        driver.wait()
    if driver.returncode:
        raise RuntimeError(f"{' '.join(given)} {how} with {driver.returncode}:\n{said.read_text()[-8000:]}")
    return scalars(folder)


def start(folder, *given):
    """A driver process, and the file that receives its output."""
    said = Path(folder) / "said"
    with open(said, "w") as out:
        return subprocess.Popen(command(folder, *given), env=environment(), stdout=out, stderr=out), said


def scalars(folder, name="reward"):
    """step -> value, of the metrics logged so far."""
    log = Path(folder) / "log"
    if not log.exists():
        return {}
    events = EventAccumulator(str(log))
    events.Reload()
    if name not in events.Tags()["scalars"]:
        return {}
    return {event.step: event.value for event in events.Scalars(name)}


def run_until_killed(folder, step, *given, timeout=240):
    """Start a run, and kill its driver with SIGKILL once it has logged a step. Returns the rewards so far."""
    driver, said = start(folder, *given)
    end = time.monotonic() + timeout
    try:
        while max(scalars(folder), default=-1) < step:
            if driver.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it did not get to step {step}:\n{said.read_text()[-4000:]}")
            time.sleep(0.2)
    finally:
        driver.kill()
        driver.wait()
    return scalars(folder)


def run_with_kills(folder, steps, *given, timeout=240):
    """Run to the end with a standby, and kill a trainer after each of the steps, the last rank first. Returns the
    rewards, and what the run has printed."""
    driver, said = start(folder, "standby=1", *given)
    end = time.monotonic() + timeout
    try:
        for number, step in enumerate(steps, 1):
            while max(scalars(folder), default=-1) < step:
                if driver.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"it did not get to step {step}:\n{said.read_text()[-4000:]}")
                time.sleep(0.1)
            pids = re.search(r"kill -9 one of \[(.*)\]", said.read_text())[1].split(", ")
            os.kill(int(pids[-number]), signal.SIGKILL)
        driver.wait(max(1, end - time.monotonic()))
    finally:
        driver.kill()
        driver.wait()
    if driver.returncode:
        raise RuntimeError(f"it ended with {driver.returncode}:\n{said.read_text()[-8000:]}")
    return scalars(folder), said.read_text()


def run_resumed(folder, kill_at, *given, ranks=(2, 1)):
    """Run on two ranks until killed, and resume from the last checkpoint on each number of ranks.

    Returns:
        Rewards by step: of the killed run, and of the resumed runs by number of ranks.
    """
    folders = {name: Path(folder) / str(name) for name in ("killed", *ranks)}
    for made in folders.values():
        made.mkdir()
    kept = folders["killed"] / "checkpoints"
    before = run_until_killed(folders["killed"], kill_at, *given, f"save={kept}")
    after = {count: run(folders[count], *given, f"load={kept}", f"actor_num_gpus_per_node={count}") for count in ranks}
    return before, after


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("given", nargs="*", help="key=value, for all runs")
    asked = parser.parse_args()
    failed = 0
    for way in asked.ways:
        for seed in range(asked.seeds):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rewards = run(folder, *WAYS[way], f"seed={seed}", *asked.given)
                except RuntimeError as error:
                    failed += 1
                    print(f"{way:<20} seed {seed}: FAILED: {error}")
                    continue
            last = sum(list(rewards.values())[-5:]) / 5
            failed += last <= 0.9
            first = next((step for step, reward in rewards.items() if reward > 0.9), None)
            said = f"first {rewards[0]:.3f}, above .9 from rollout {first}, last five {last:.3f}"
            print(f"{way:<20} seed {seed}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(asked.ways) * asked.seeds - failed} of {len(asked.ways) * asked.seeds} runs above .9")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
