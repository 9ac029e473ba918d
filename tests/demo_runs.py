"""Runs of the demo, as a user starts them; their rewards are read from TensorBoard's files.

python tests/demo_runs.py            # FSDP and Megatron, colocated and not, five seeds each: a quarter of an hour
python tests/demo_runs.py --seeds 1
"""

import argparse
import os
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
}


def command(folder, *given):
    """What a user types; ``folder`` takes what the run writes."""
    return [sys.executable, str(SCRIPT), f"tensorboard_dir={folder}/log", f"out={folder}/curve.png", *given]


def environment():
    """A user's: without the paths that tests need."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(folder, *given, timeout=240):
    """The rewards of a whole run, by rollout.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command(folder, *given), env=environment(), capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(given)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return scalars(folder)


def scalars(folder, name="reward"):
    """step -> value, of what has been logged so far."""
    log = Path(folder) / "log"
    if not log.exists():
        return {}
    events = EventAccumulator(str(log))
    events.Reload()
    if name not in events.Tags()["scalars"]:
        return {}
    return {event.step: event.value for event in events.Scalars(name)}


def run_until_killed(folder, step, *given, timeout=240):
    """Start a run, and kill its driver with SIGKILL once it has logged a step. The rewards so far."""
    with open(Path(folder) / "said", "w") as said:
        driver = subprocess.Popen(command(folder, *given), env=environment(), stdout=said, stderr=said)
    end = time.monotonic() + timeout
    try:
        while max(scalars(folder), default=-1) < step:
            if driver.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it did not get to step {step}:\n{(Path(folder) / 'said').read_text()[-4000:]}")
            time.sleep(0.2)
    finally:
        driver.kill()
        driver.wait()
    return scalars(folder)


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
                except (RuntimeError, subprocess.TimeoutExpired) as error:
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
