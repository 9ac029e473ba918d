"""Kill asynchronous training runs at random moments, start them again, and check that each prompt was trained once.

    python tests/rollout/nothing_lost.py --runs 50

A run is tests/rollout/async_run.py. At random moments of its start and of its training, its driver, a rollout worker or
its trainer gets SIGKILL; some kills are aimed at the middle of an update or of a checkpoint. A run whose driver has
ended, killed or with the error of a trainer's death, is started again with ``load``, at once. The death of a rollout
worker must not end a run that trains. At the end:

- The weights have been trained on each prompt exactly once. The trainer's witness says so, of the weights that are
  there at the end; what it says of weights that were lost does not count.
- The checkpoints are consistent: what the weights were trained on, and what the stream's state holds, are together the
  prompts that had begun, each once. Each one that is loaded has the weights of its state.
- No process, actor or placement group is left.

Runs differ in staleness, order, how updates are done, and how checkpoints are written. All is drawn from a seed, which
is printed; moments depend on the machine, too. It starts its own Ray, which the runs share.
"""

import argparse
import contextlib
import json
import os
import pickle
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = [str(folder) for folder in (HERE, HERE.parent, HERE.parent / "groups", HERE.parent.parent)]
sys.path += [folder for folder in FOLDERS if folder not in sys.path]
if __name__ == "__main__":  # tests/conftest.py does the same for the tests
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import ray  # noqa: E402
from footprint import Footprint, runs  # noqa: E402
from fork_workers import fork_script, forked_workers  # noqa: E402

KINDS = ("driver", "rollout", "trainer")
BATCH, SAMPLES, ROLLOUTS = 3, 2, 8
MOST_KILLS = 3
"""In one run."""

AIMED = 0.2
"""Share of the kills that come in the middle of an update or of a checkpoint, which are short."""

HANG = 120.0
"""Seconds after which a run that was started has to have ended, by itself or because it was killed."""

GONE = 30.0
"""Seconds after its end in which a run's processes have to be gone."""


class Run:
    """One run, however often it is started. Methods raise AssertionError if a check fails."""

    def __init__(self, folder, address, server, rng, seed):
        self.folder, self.server, self.rng = folder, server, rng
        self.starts, self.kills = 0, []
        self.lost = self.staleness = 0
        self.gone = 0.0
        self.args = {"seed": seed, "rollout_batch_size": BATCH, "n_samples_per_prompt": SAMPLES,
                     "num_rollout": ROLLOUTS, "save_interval": 2, "max_staleness": rng.choice((1, 2)),
                     "rollout_order": rng.choice(("fifo", "window")),
                     "update_weights_mode": rng.choice(("interrupt", "interrupt", "wait")),
                     "async_save": rng.random() < 0.5}  # fmt: skip
        (folder / "pids").mkdir(parents=True)
        config = {"address": address, "seconds_per_token": 0.01, "args": self.args}
        (folder / "config.json").write_text(json.dumps(config))

    def play(self, moments):
        """Run to the end, and kill something at each of the moments.

        Args:
            moments: seconds after the beginning, and after the kill before.
        """
        moments = iter(moments)
        kill_at = time.monotonic() + next(moments, float("inf"))
        while not self.ended:
            fatal, deadline = False, time.monotonic() + HANG
            aimed = (self.folder / "die in save").exists()  # left by a start that ended before it wrote a checkpoint
            self.starts, self.began = self.starts + 1, time.time()
            script = str(HERE / "async_run.py"), str(self.folder)
            with fork_script(self.server, *script, environment=dict(os.environ)) as driver:
                while not select.select([driver], [], [], max(0, min(kill_at, deadline) - time.monotonic()))[0]:
                    assert time.monotonic() < deadline, "the run hangs"
                    fatal |= self._kill()
                    kill_at = time.monotonic() + next(moments, float("inf"))
            fatal |= aimed and not (self.folder / "die in save").exists()
            assert fatal or self.ended, "the run has ended, though nothing was killed that it needs"

    @property
    def ended(self):
        return (self.folder / "ended").exists()

    def _kill(self):
        """Kill one of the processes. Returns whether the run may end now."""
        if self.rng.random() < AIMED:
            kind, moment = self.rng.choice((("rollout", "update"), ("trainer", "save")))
            if not (self.folder / f"die in {moment}").exists():
                (self.folder / f"die in {moment}").touch()
                self.kills.append((kind, moment, "itself"))
            return kind == "trainer"
        kind = self.rng.choice(KINDS)
        pids = self.living(kind, self.began)
        if not pids:
            kind, pids = "driver", self.living("driver", self.began)
        if not pids or self.ended:
            return False
        now = self._lines("phases")[-1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rng.choice(pids), signal.SIGKILL)
        self.kills.append((kind, now["phase"], now["rollout_id"]))
        return kind != "rollout" or now["phase"] == "start"

    def _lines(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def seconds(self):
        """How long the last start took, and what came after it."""
        times = [line["at"] for line in self._lines("phases") if line["phase"] != "start" and line["at"] > self.began]
        return (times[0] - self.began, times[-1] - times[0]) if times else (0.0, 0.0)

    def living(self, kind="*", since=0.0):
        """The pids of the run's processes, or of those that began later than a time."""
        files = (self.folder / "pids").glob(f"{kind}-*")
        return sorted(filter(runs, (int(file.name.split("-")[1]) for file in files if file.stat().st_mtime >= since)))

    def check(self):
        """Check what is described at the top of the file."""
        lines = self._lines("witness.jsonl")
        trained = chain(lines, (self.folder / "ended").read_text())
        assert [line["rollout_id"] for line in trained] == list(range(ROLLOUTS)), trained
        prompts = Counter(prompt for line in trained for prompt in line["prompts"])
        assert prompts == dict.fromkeys(range(BATCH * ROLLOUTS), SAMPLES), prompts
        assert all(line["prompts"] == line["group_ids"] for line in trained), trained
        checkpoints = [path.parent for path in (self.folder / "checkpoints").glob("*/position.json")]
        assert checkpoints
        for checkpoint in checkpoints:
            state = pickle.loads((checkpoint / "driver_state.pkl").read_bytes())
            until = chain(lines, state["weights"])
            position = json.loads((checkpoint / "position.json").read_text())
            assert len(until) == state["stream"]["batches"] == position["rollout_id"] + 1, (checkpoint, len(until))
            begun = [*state["stream"]["groups"], *(prompt for line in until for prompt in line["prompts"][::SAMPLES])]
            assert sorted(begun) == list(range(state["stream"]["cursor"])), (checkpoint, begun)
        self.lost = len(lines) - len(trained)
        self.staleness = max(line["staleness"] for line in trained)

    def log(self):
        """The end of what the driver has written."""
        return (self.folder / "driver.log").read_text()[-6000:]


def chain(lines, weights):
    """The witness's lines that led to these weights, from the first."""
    by_weights = {}
    for line in lines:  # the same weights can come twice of the same batch only
        assert by_weights.setdefault(line["after"], line)["prompts"] == line["prompts"], line
    found = []
    while weights in by_weights:
        found.insert(0, by_weights[weights])
        weights = found[0]["before"]
    assert not lines or weights == lines[0]["before"], "the weights do not come from those that the run began with"
    return found


def wait_gone(before, run):
    """Wait until nothing of a run is left."""
    end = time.monotonic() + GONE
    while left := [run.living(), before.left_behind(Footprint.now(shared_memory=False))]:
        if not any(left):
            return
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.1)


def play(run, moments, before):
    """Play a run to its end, and check it. Returns (the run, its seconds, whether all was right)."""
    began = time.monotonic()
    try:
        run.play(moments)
        ended = time.monotonic()
        wait_gone(before, run)
        run.gone = time.monotonic() - ended
        run.kills = [
            kill for kill in run.kills if kill[2] != "itself" or not (run.folder / f"die in {kill[1]}").exists()
        ]
        run.check()
    except AssertionError as error:
        say(f"FAILED: {error}\n{run.log()}\nKilled: {run.kills}. Settings: {run.args}. See {run.folder}")
        for pid in run.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return run, time.monotonic() - began, False
    return run, time.monotonic() - began, True


def main():
    """Read the options and run. Returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--runs", type=int, default=50, help="runs in which something was killed")
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    given = options.parse_args()
    rng, begun, counts = random.Random(given.seed), time.monotonic(), Counter()
    say(f"{given.runs} runs of {BATCH * ROLLOUTS} prompts, seed {given.seed}")
    folder = tempfile.mkdtemp(prefix="nothing-lost-")
    with cluster() as (address, server):
        before = Footprint.now(shared_memory=False)

        def played(moments):
            counts["numbers"] += 1
            return play(Run(Path(folder) / str(counts["numbers"]), address, server, rng, given.seed), moments, before)

        run, _, right = played(())
        if not right:
            return 1
        start, rest = run.seconds()
        say(f"  -  nothing killed: started in {start:.1f} s, trained in {rest:.1f} s")

        def moment():
            """A quarter of the kills come during the start, which takes longer than in a real run's proportion."""
            return rng.uniform(0, start) if rng.random() < 0.25 else start + rng.uniform(0, rest)

        while counts["runs"] < given.runs:
            run, took, right = played([moment() for _ in range(rng.randint(1, MOST_KILLS))])
            if right and not run.kills:
                continue  # it had ended before the moment came
            counts.update(runs=1, right=right, kills=len(run.kills), lost=run.lost)
            counts.update(kind for kind, _, _ in run.kills)
            counts.update(f"in {phase}" for _, phase, _ in run.kills)
            names = ", ".join(f"{kind} in {phase} {rollout_id}" for kind, phase, rollout_id in run.kills)
            what = f"{run.starts} starts, {run.lost} batches again, staleness up to {run.staleness}; {took:.1f} s"
            what += f", {run.seconds()[0]:.1f} s for the last start and {run.gone:.1f} s until all was gone"
            say(f"{counts['runs']:3d}  {names or 'nothing killed'}: {what}")
        if counts["right"] == counts["runs"]:
            shutil.rmtree(folder)
    killed = [f"{name} {count}" for name, count in sorted(counts.items()) if name in KINDS or name.startswith("in ")]
    say(f"killed: {', '.join(killed)}; {counts['lost']} batches were lost and trained again")
    what = f"{counts['kills']} kills, {time.monotonic() - begun:.0f} s"
    say(f"{counts['right']} of {counts['runs']} runs trained each prompt exactly once; {what}")
    return int(counts["right"] < counts["runs"])


def say(line):
    print(line, flush=True)


@contextlib.contextmanager
def cluster():
    """A Ray of one node. Yields its address, and that of the server that forks its workers and the drivers."""
    with forked_workers() as start_server:
        context = ray.init(
            "local",
            num_cpus=16,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=512 << 20,
            log_to_driver=False,
        )
        try:
            yield context.address_info["gcs_address"], start_server(every_job=True)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
