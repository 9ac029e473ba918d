"""An asynchronous run of sessions that can be killed at any moment and started again: sessions of two toy workers, a
driver that writes down what it would train, and checkpoints. test_session_streams.py kills it.

    python tests/agents/killed_driver.py FOLDER

FOLDER/config.json says how. The run leaves there:

- ``checkpoint``: the newest one: the state of the stream, and how many batches were trained. It is also written while
  the driver waits for a batch.
- ``trained.jsonl``: a line for each batch that was trained; those that a checkpoint does not have were lost.
- ``starts.jsonl``: a line for each start, with its pid and what its checkpoint has: group -> for each session, how many
  steps its environment had made, or None if it was complete.
- ``steps``: a line ``START GROUP STEP`` for each step of an environment.
"""

import json
import os
import pickle
import sys
import time
from pathlib import Path

from rollout_helpers import BigramEngine, Toy, update
from session_helpers import Agents, Slow, check_rows, check_said, numbers, said_reward

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers import RolloutManager, RolloutStream, SampleBuffer, SamplingParams

HOW = SamplingParams(6)


class Noted(Slow):
    """Writes down each step that it makes."""

    async def reset(self, row):
        self.key = row["key"]
        return await super().reset(row)

    async def step(self, action):
        step = len(self.said)
        made = await super().step(action)
        with open(os.environ["STEPS"], "a") as file:
            file.write(f"{os.environ['START']} {self.key} {step}\n")
        return made

    def state_dict(self):
        return super().state_dict() | {"key": self.key}


def prompts_of(config):
    batch, turns = config["batch"], config["turns"]

    def prompts(rollout_id):
        keys = [rollout_id * batch + index for index in range(batch)]
        return [[key % 30 + 1, 3 + key % 7] for key in keys], {"turns": [turns] * batch, "key": keys}

    return prompts


def manager_of(group, config):
    columns = ["turns", "key"]
    return RolloutManager(group, HOW, said_reward, samples_per_prompt=config["samples"], seed=3, engine_extras=columns)


def steps_of(completion):
    """How many steps the environment of a saved session had made; None if the session was complete."""
    if completion.finish_reason != "abort":
        return None
    session = completion.session
    return 0 if session is None else session.turns - session.acting


def saved_steps(state):
    """Group -> `steps_of` each of its sessions."""
    return {
        number: [steps_of(one) for one in data.completions] if data else None
        for number, (_, _, data, _) in state["groups"].items()
    }


def append(file, value):
    with open(file, "a") as lines:
        lines.write(json.dumps(value) + "\n")


def run(folder, group, config):
    """Play until all batches are trained. With "updates", the weights are others for each batch."""
    manager = manager_of(group, config)
    updates, first = config["updates"], 0
    options = {"max_staleness": 2, "num_batches": config["batches"]}
    buffer = SampleBuffer(config["batch"], update_interval=1 if updates else 10_000, **options)

    def save(batches):
        state = {"stream": stream.state_dict(), "batches": batches, "version": manager.weight_version}
        (folder / "checkpoint.new").write_bytes(pickle.dumps(state))
        (folder / "checkpoint.new").replace(folder / "checkpoint")

    with RolloutStream(manager, prompts_of(config), buffer, update_mode="interrupt") as stream:
        version = 0
        if (folder / "checkpoint").exists():
            state = pickle.loads((folder / "checkpoint").read_bytes())
            first, version = state["batches"], state["version"]
            stream.load_state_dict(state["stream"])
            append(folder / "starts.jsonl", {"pid": os.getpid(), "steps": saved_steps(state["stream"])})
        else:
            append(folder / "starts.jsonl", {"pid": os.getpid(), "steps": {}})
        for batch in range(first, config["batches"]):
            if batch == first or updates:
                version = batch if updates else 0
                update(stream, manager, version)
            while True:
                try:
                    data = stream.take(0.3)
                    break
                except TimeoutError:
                    save(batch)
            turns, versions = check_rows(data)
            check_said(data, turns)
            time.sleep(config["seconds"])  # the training
            append(
                folder / "trained.jsonl",
                {"batch": batch, "groups": numbers(data), "turns": turns, "versions": versions},
            )
            save(batch + 1)


def made():
    return RayClassWithInitArgs(Toy, Agents, BigramEngine, delay=0.02, environment=Noted)


def main(folder):
    config = json.loads((folder / "config.json").read_text())
    starts = folder / "starts.jsonl"
    os.environ["STEPS"] = str(folder / "steps")
    os.environ["START"] = str(len(starts.read_text().splitlines()) if starts.exists() else 0)
    if not config["ray"]:
        with LocalWorkerGroup(2, made(), threads=True) as group:
            run(folder, group, config)
        return
    import ray

    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    own = {name: os.environ[name] for name in ("STEPS", "START")}
    with (
        RayResourcePool([2], use_gpu=False) as pool,
        RayWorkerGroup(pool, made(), collectives=False, worker_env=own) as group,
    ):
        run(folder, group, config)


if __name__ == "__main__":
    import killed_driver  # Ray's workers import the classes by name

    killed_driver.main(Path(sys.argv[1]))
