"""Rounds in which processes of an asynchronous training run are killed: trainers with snapshots, and rollout workers.

The run goes on from round to round: two FSDP ranks with a standby and a snapshot in their buddy's memory after every
step, and two rollout workers that generate in the background. After a death of a trainer, the driver calls
`RayTrainGroup.replace` and trains on from the rollout that it returns; the stream returns the same rows again. The
death of a rollout worker raises nothing in the driver. After each round:

- The weights and the optimizer state have learned from rollouts 0 to n-1, each once: the witnesses of the ranks say so
  (see recovery_workers.py). Rollouts on which lost weights were trained do not count.
- Of all prompts that have begun, each is in those rollouts or in the buffer: the others are lost. Those that are in
  both, or in those rollouts more often than they have samples, are trained twice.
- A step that was taken twice from the same state led to the same state, bit for bit.
- The other trainer has kept its process. The trainers have returned to a snapshot, one step back at most.

*Steps repeated* are those whose result the driver already had, and which it had to train again on the same rows because
all ranks returned to the state before. The step in which the rank died is not counted: it was never finished.
"""

import json
import logging
import os
import signal
import time
from collections import Counter
from pathlib import Path

import ray
from ray.exceptions import RayError
from recovery_workers import Engine, Trainer, ask, prompt
from rounds import Seen
from waits import wait_until

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, SingleControllerError
from workers import RayTrainGroup, RolloutManager, RolloutStream, RolloutWorker, SamplingParams, read_args

TRAINERS, ROLLOUTS = 2, 2
BATCH, SAMPLES = 3, 2
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
STANDBY = 60
"""Seconds after which a new standby must be ready."""

STEPS = 100
"""In how many steps the driver must have been told of a death."""


def reward(prompt_ids, completion_ids):
    """Never the same for two different completions: each step changes the weights."""
    return sum(token / (place + 1) for place, token in enumerate(completion_ids))


class Warnings(logging.Handler):
    """Remembers when the library warned, for deaths that it repairs itself."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.times = []

    def emit(self, record):
        self.times.append(time.monotonic())


class Training:
    """The run, and one round per call of a method.

    Args:
        rng: draws moments and victims.
        folder: an empty folder, which all processes see.
        spread: whether each trainer and the standby are on hosts of their own, and the rollout workers on the driver's.
    """

    def __init__(self, rng, folder, spread=False):
        self.rng, self.folder = rng, Path(folder)
        self.step, self.trained, self.seconds = 0, [], 0.2
        self.save, self.spread = None, spread
        args = read_args(
            {
                "hf_config": MODEL,
                "lr": 1e-3,
                "rollout_batch_size": BATCH,
                "n_samples_per_prompt": SAMPLES,
                "num_rollout": 100_000,
                "rollout_max_response_len": 8,
                "rollout_stop_token_ids": [0, 1, 2],
                "async_rollout": True,
                "max_staleness": 2,
                "update_weights_mode": "interrupt",
                "peer_snapshot_interval": 1,
                "async_save": True,
                "save": str(self.folder / "checkpoints"),
                "save_keep": 2,
                "user": {"folder": str(self.folder)},
            }
        )
        options = {"use_gpu": False, "num_cpus": 0.5}
        if spread:
            one_each = {"across_nodes": True, "strategy": "STRICT_SPREAD"}
            trainers = RayResourcePool([1] * (TRAINERS + 1), **options, **one_each)
            here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
            rollouts = RayResourcePool([ROLLOUTS], **options, resources=here)
        else:
            trainers, rollouts = (RayResourcePool([count], **options) for count in (TRAINERS + 1, ROLLOUTS))
        self.pools = trainers, rollouts
        self.actor = RayTrainGroup(args, 1, TRAINERS, trainers, actor_cls=Trainer, standby=1)
        ray.get(self.actor.async_init())
        engine = RayClassWithInitArgs(
            RolloutWorker, Engine, MODEL, folder=str(folder), seconds=0.01, random_weights=True
        )
        self.rollout = RayWorkerGroup(rollouts, engine, collectives=False)
        self.manager = RolloutManager(
            self.rollout, SamplingParams.from_args(args), reward, samples_per_prompt=SAMPLES, seed=1
        )
        self.actor.set_rollout_manager(self.manager)
        self.stream = RolloutStream.from_args(
            args, self.manager, lambda rollout_id: [prompt(rollout_id * BATCH + index) for index in range(BATCH)]
        )
        self.stream.buffer.keep_batches = 2  # so that a step that is repeated has the same rows
        self.warnings = Warnings()
        logging.getLogger("workers").addHandler(self.warnings)
        while self.step < 3:
            self._step()

    @property
    def groups(self):
        return self.actor.worker_group, self.rollout

    def close(self):
        logging.getLogger("workers").removeHandler(self.warnings)
        self.stream.close()
        self.manager.close()
        self.rollout.close()
        self.actor.close()
        for pool in self.pools:
            pool.close()

    # --- the kinds ------------------------------------------------------------------------------------------

    def trainer_in_a_step(self):
        """At any moment of its forward and backward passes, which consist of collectives for the most part."""
        return self._trainer("a step", self.rng.uniform(0, self.seconds))

    def trainer_in_a_snapshot(self):
        """When half of a snapshot is sent or received."""
        return self._trainer("a snapshot", self.rng.uniform(0, 0.05))

    def trainer_in_a_weight_update(self):
        return self._trainer("an update", self.rng.uniform(0, 0.05))

    def trainer_in_a_save(self):
        return self._trainer("a save", self.rng.uniform(0, 0.1), save="foreground")

    def trainer_in_a_background_save(self):
        return self._trainer("a background save", self.rng.uniform(0, 0.1), save="background")

    def trainer_and_the_one_that_replaces_it(self):
        return self._trainer("a step", self.rng.uniform(0, self.seconds), again="recovery")

    def rollout_worker_that_generates(self):
        self.begin()
        pid = self.rng.choice(self.rollout.status().ranks).process.pid
        end = time.monotonic() + self.rng.uniform(0, 0.5)
        while time.monotonic() < end:
            self._step()
        (self.folder / "killed").write_text(repr(time.monotonic()))
        os.kill(pid, signal.SIGKILL)
        return self._rollout()

    def rollout_worker_in_a_weight_update(self):
        self.begin()
        ask(self.folder, "receiving", None, self.rng.uniform(0, 0.02))
        return self._rollout()

    def _trainer(self, moment, seconds, *, save=None, again=None):
        self.begin()
        victim = self.rng.randrange(TRAINERS)
        if again:
            ask(self.folder, again, victim, self.rng.uniform(0, 0.2))
        self.save = save
        ask(self.folder, moment, victim, seconds)
        seen = self.until_back(victim)
        if save:  # the next one is written in spite of what is left of this one
            folder = Path(self.actor.save_model(self.step - 1, driver_state=self.stream.state_dict(trained=self.step)))
            self.actor.wait_for_save()
            assert json.loads((folder.parent / "latest.json").read_text())["rollout_id"] == self.step - 1
        return self.checked(seen)

    def _rollout(self):
        before = len(self.warnings.times)
        first = self.step
        while len(self.warnings.times) == before or not all(self.rollout.alive()) or self.rollout.broken:
            assert self.step < first + 50, "the rollout worker was not restarted"
            self._step()
        told = self.warnings.times[before]
        while self.trained[-1][1] < told:
            self._step()
        back = next(at for _, at in self.trained if at > told)
        return self.checked(Seen(told - self._killed_at(), back - told, 0))

    # --- a round --------------------------------------------------------------------------------------------

    def begin(self):
        """Wait until what the last round has replaced is complete."""
        workers = self.actor.worker_group
        wait_until(lambda: [one for one in workers.standbys() if one.memory], STANDBY, "a standby of the trainers")
        self._step()  # all snapshots that replaced trainers lack have then arrived
        (self.folder / "killed").unlink(missing_ok=True)
        self.trained.clear()

    def until_back(self, victim):
        """Train until a death was told, and a step was trained after it. Returns what was seen."""
        before, first, told = self.processes(), self.step, None
        while True:
            assert self.step < first + STEPS, "the driver was not told of the death"
            try:
                self._step()
                if told is not None:
                    break
            except (RayError, SingleControllerError):
                if told is not None:
                    raise
                told = time.monotonic()
                begin = self.actor.replace()
                if begin is None:
                    raise
                assert set(begin) <= {self.step - 1, self.step, self.step + 1}, f"at {self.step}, returned to {begin}"
                (self.step,) = set(begin)
                self.save = None
        for rank, (process, now) in enumerate(zip(before, self.processes(), strict=True)):
            assert (process == now) == (rank != victim), f"rank {victim} was killed; rank {rank}: {process}, now {now}"
        rollouts = [rollout for rollout, _ in self.trained]
        back = next(at for _, at in self.trained if at > told)
        return Seen(told - self._killed_at(), back - told, len(rollouts) - len(set(rollouts)))

    def through_an_outage(self):
        """Train until a step was trained after the file ``healed`` was written. Nobody has died: no process changes.
        Returns what was seen."""
        before, file = (self.processes(), self.actor.worker_group.generation), self.folder / "healed"
        while not file.exists() or self.trained[-1][1] < float(file.read_text()):
            self._step()
        assert (self.processes(), self.actor.worker_group.generation) == before, "a process was replaced"
        healed = float(file.read_text())
        file.unlink()
        return self.checked(Seen(None, next(at for _, at in self.trained if at > healed) - healed, 0))

    def processes(self):
        """The address and the pid of each trainer."""
        return [(one.process.address, one.process.pid) for one in self.actor.worker_group.status().ranks]

    def _step(self):
        rollout_id = self.step
        self.actor.update_weights()
        metrics = ray.get(self.actor.async_train(rollout_id, self.stream.take(timeout=30)))
        self.trained.append((rollout_id, time.monotonic()))
        self.seconds, self.step = metrics[0]["seconds"], rollout_id + 1
        if self.save:
            state = self.stream.state_dict(trained=self.step)
            self.actor.save_model(rollout_id, force_sync=self.save == "foreground", driver_state=state)

    def _killed_at(self):
        left = [file.name for file in self.folder.glob("die in *")]
        assert not left, f"nobody has died: {left}"
        return float((self.folder / "killed").read_text())

    def checked(self, seen):
        """Check what is described at the top of the file. Returns what was seen, with lost prompts and others."""
        counts = Counter()
        for rank, digest in enumerate(self.actor.worker_group.digest()):
            lines = [json.loads(line) for line in (self.folder / f"witness-{rank}.jsonl").read_text().splitlines()]
            trained = chain(lines, digest)
            assert [line["rollout_id"] for line in trained] == list(range(self.step)), f"rank {rank}: {trained}"
            counts.update(prompt for line in trained for prompt in line["prompts"])
        buffer = self.stream.buffer.state_dict()
        assert buffer["batches"] == self.step, f"{buffer['batches']} batches were taken, {self.step} trained"
        counts.update({number: SAMPLES for number in buffer["groups"]})
        lost = sum(counts[number] < SAMPLES for number in range(buffer["cursor"]))
        twice = sum(count > SAMPLES for count in counts.values())
        return seen._replace(lost=lost, twice=twice)


def chain(lines, state):
    """The witness's lines that led to a state, from the first."""
    steps, ends = {}, {}
    for line in lines:
        known = steps.setdefault(line["before"], line)
        assert known == line, f"the same step led to another state: {known} and {line}"
        ends[line["after"]] = line
    found = []
    while state in ends:
        found.insert(0, ends[state])
        state = found[0]["before"]
    assert state == lines[0]["before"], "the state does not come from that with which the run began"
    return found
