"""An asynchronous training run in small, which can be killed at any moment and started again: one trainer, two rollout
workers, the loop of tutorials/train_grpo.py. tests/rollout/nothing_lost.py kills it.

    python tests/rollout/async_run.py FOLDER

FOLDER/config.json says how; the run leaves there what happened:

- ``phases``: what the driver did, and when; the last line is what it does now.
- ``pids/KIND-PID``: a file for each process of the run.
- ``witness.jsonl``: what the trainer was given to train on, written by the trainer. Each line has a digest of the
  model's weights before and after, so that the lines form chains: that of the weights at the end is what the model has
  learned from, however often the run was killed, and whatever was lost with it.
- ``die in update``, ``die in save``: made by others; the next rollout worker that gets weights, or the trainer while it
  writes the next checkpoint, removes the file and kills itself.
- ``driver.log``, and ``ended``, with the digest of the weights, when the run is complete.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import ray

from single_controller import Dispatch, RayClassWithInitArgs, RayWorkerGroup, register
from workers import (
    HFEngine,
    RayTrainGroup,
    RolloutManager,
    RolloutStream,
    RolloutWorker,
    SamplingParams,
    own_rows,
    place,
    read_args,
)
from workers.data.rollout_data import group_numbers
from workers.fsdp.fsdp_worker import FSDPTrainWorker

VOCABULARY = 32
DIGITS, FIRST_DIGIT = 3, 16
"""A prompt is its number in octal, in tokens from 16 to 23, after some tokens below 16."""

MODEL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 64}  # fmt: skip


def prompt(number):
    digits = [FIRST_DIGIT + number // 8**place % 8 for place in reversed(range(DIGITS))]
    return [number % 7 + 1] * (number % 3) + digits


def number_of(tokens):
    """Which prompt it is, from its tokens alone."""
    number = 0
    for token in tokens[-DIGITS:]:
        assert FIRST_DIGIT <= token < FIRST_DIGIT + 8, tokens
        number = 8 * number + token - FIRST_DIGIT
    assert prompt(number) == tokens, tokens
    return number


def reward(prompt_ids, completion_ids):
    """Never the same for two different completions: each step changes the weights."""
    return sum(token / (place + 1) for place, token in enumerate(completion_ids))


def append(file, **line):
    with open(file, "a") as lines:
        lines.write(json.dumps(line) + "\n")


def here(folder, kind):
    (Path(folder) / "pids" / f"{kind}-{os.getpid()}").touch()


def die(folder, moment, seconds=0.0):
    """Kill this process after some seconds, if there is a file ``die in MOMENT``. One process dies for each file."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(Path(folder) / f"die in {moment}")
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)


class Paced(HFEngine):
    """Sleeps in each step, so that generation takes long and costs little."""

    def __init__(self, *args, folder, seconds, **options):
        here(folder, "rollout")
        super().__init__(*args, **options)
        self.folder, self.seconds = folder, seconds

    def load_weights(self, weights):
        die(self.folder, "update")
        super().load_weights(weights)

    def _step(self, batch):
        time.sleep(self.seconds)
        super()._step(batch)


class Witness(FSDPTrainWorker):
    """Writes down what it is given to train on."""

    def init(self, args, role, with_ref=False):
        self.folder = Path(args.user["folder"])
        here(self.folder, "trainer")
        return super().init(args, role, with_ref)

    @register(Dispatch.RANK_ZERO)
    def digest(self):
        """Of the weights, and of the number of steps."""
        found = hashlib.sha256(str(self.optimizer_step).encode())
        for shard in sorted(self.model.hf_shards(), key=lambda shard: shard.name):
            found.update(shard.name.encode() + shard.read().cpu().numpy().tobytes())
        return found.hexdigest()[:16]

    def train(self, rollout_id, rollout_data_ref, **computed):
        rows = own_rows(rollout_data_ref, 0, 1)
        begin = int(rows["prompt_lengths"].max())
        prompts = [
            number_of(ids[begin - length : begin])
            for ids, length in zip(rows["input_ids"].tolist(), rows["prompt_lengths"].tolist(), strict=True)
        ]
        oldest = int(rows["min_weight_versions"].min())
        before = self.digest()
        metrics = super().train(rollout_id, rollout_data_ref, **computed)
        append(
            self.folder / "witness.jsonl",
            rollout_id=rollout_id,
            prompts=prompts,
            group_ids=group_numbers(rows["group_ids"]).tolist(),
            staleness=self.weight_version - oldest,
            before=before,
            after=self.digest(),
        )
        return metrics

    def save_model(self, step, force_sync=False, driver_state=None):
        seconds = random.uniform(0, 0.05)
        threading.Thread(target=die, args=(self.folder, "save", seconds), daemon=True).start()
        return super().save_model(step, force_sync, driver_state)


def run(folder, config, phase):
    checkpoints = str(folder / "checkpoints")
    args = read_args({
        "hf_config": MODEL, "lr": 1e-2, "rollout_max_response_len": 24, "rollout_stop_token_ids": [0, 1, 2],
        "rollout_num_workers": 2, "actor_num_gpus_per_node": 1, "async_rollout": True, "load": checkpoints,
        "save": checkpoints, "save_keep": 2, "user": {"folder": str(folder)}, **config["args"]})  # fmt: skip
    with place(args) as placement:
        actor = RayTrainGroup(args, 1, 1, placement.actor, placement.share, actor_cls=Witness)
        start = ray.get(actor.async_init())[0]
        engine = {"folder": str(folder), "seconds": config["seconds_per_token"], "random_weights": True}
        rollout = RayWorkerGroup(
            placement.rollout, RayClassWithInitArgs(RolloutWorker, Paced, MODEL, **engine), collectives=False
        )
        how = SamplingParams.from_args(args)
        manager = RolloutManager(rollout, how, reward, samples_per_prompt=args.n_samples_per_prompt, seed=args.seed)
        actor.set_rollout_manager(manager)
        batch = args.rollout_batch_size
        stream = RolloutStream.from_args(
            args, manager, lambda rollout_id: [prompt(rollout_id * batch + index) for index in range(batch)]
        )
        if start:
            state = actor.load_driver_state()
            weights = actor.worker_group.digest()
            assert state["weights"] == weights, "the checkpoint's driver state is of other weights"
            stream.load_state_dict(state["stream"])
        for rollout_id in range(start, args.num_rollout):
            if rollout_id == start or rollout_id % args.update_weights_interval == 0:
                phase("update", rollout_id)
                actor.update_weights()
            phase("take", rollout_id)
            data = stream.take()
            phase("train", rollout_id)
            ray.get(actor.async_train(rollout_id, data))
            if (rollout_id + 1) % args.save_interval == 0 or rollout_id + 1 == args.num_rollout:
                phase("save", rollout_id)
                weights = actor.worker_group.digest()
                actor.save_model(rollout_id, driver_state={"stream": stream.state_dict(), "weights": weights})
            print(f"rollout {rollout_id}", stream.metrics(), flush=True)
        phase("end", args.num_rollout)
        actor.wait_for_save()
        stream.close()
    (folder / "ended").write_text(weights)


def main(folder):
    log = os.open(folder / "driver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    here(folder, "driver")

    def phase(name, rollout_id=0):
        append(folder / "phases", phase=name, rollout_id=rollout_id, at=time.time())

    phase("start")
    config = json.loads((folder / "config.json").read_text())
    ray.init(config["address"], log_to_driver=False)
    run(folder, config, phase)


if __name__ == "__main__":
    import async_run  # Ray's workers import the classes by name

    async_run.main(Path(sys.argv[1]))
