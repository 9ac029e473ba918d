"""Kill processes at random moments, many times, and check that nothing hangs and nothing is leaked.

    python tests/chaos.py --rounds 50          # the long run, some ten minutes

A round creates a group and sends SIGKILL to one of its ranks, its driver or its node at a random moment: during start,
idle, in a call, in a collective, during a restart. It then checks that the driver got the error in time, that the group
works again, and that the cluster is as it was before. The moments are drawn from a seed, which is printed.

It starts its own Ray with logical GPUs. A round that kills a node adds that node first.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "groups"), os.path.dirname(HERE)]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray  # noqa: E402
from footprint import Footprint  # noqa: E402
from group_workers import Fragile  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from waits import runs, wait_gone, wait_until  # noqa: E402

from single_controller import (  # noqa: E402
    Dispatch,
    GroupBrokenError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    SingleControllerError,
    WorkerDiedError,
    register,
)

RANKS = 3
TOLD = 5.0
"""Seconds within which a call must report a rank's death."""
NODE_TOLD = 5.0
"""Seconds within which it must report a node's death, with the health checks of a Ray that this library starts."""
ROUND = 120
"""Timeout of a round in seconds; a longer round is a hang."""
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class Slow(Fragile):
    """Its constructor takes a while, so that a kill can happen during it."""

    def __init__(self):
        super().__init__()
        time.sleep(0.8)

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self):
        pass


class Round:
    """One kill. Every method raises AssertionError when a check fails."""

    def __init__(self, rng):
        self.rng = rng

    def rank(self, moment):
        """Kill a rank. Returns the seconds until the driver got the error."""
        with RayResourcePool([RANKS]) as pool:
            if moment == "start-up":
                group, told = self._kill_while(lambda: RayWorkerGroup(pool, RayClassWithInitArgs(Slow)), set())
            else:
                group = RayWorkerGroup(pool, RayClassWithInitArgs(Slow))
                told = self._kill_started(group, moment)
            if group is None:  # its start failed: start another
                group = RayWorkerGroup(pool, RayClassWithInitArgs(Slow))
            elif group.broken is not None:
                group.restart()
            assert group.ping() == list(range(RANKS)), "the group did not recover"
            pids = group.pid()
            group.close()
        wait_gone(pids, 10)
        return told

    def _kill_started(self, group, moment):
        pids = group.pid()
        if moment == "restart":
            _, told = self._kill_while(group.restart, set(pids), group)
            return told
        victim = self.rng.choice(pids)
        if moment == "idle":
            os.kill(victim, signal.SIGKILL)
            time.sleep(self.rng.uniform(0, 0.5))
            return seconds_until_told(group.ping)
        if moment == "collective":
            group.join_process_group()
            others = [rank for rank in range(RANKS) if pids[rank] != victim]
            call = lambda: group.all_reduce(10_000, absent=self.rng.choice(others))  # noqa: E731
        else:
            call = lambda: group.sleep(60)  # noqa: E731
        killed = kill_later(victim, self.rng.uniform(0, 0.6))
        return seconds_until_told(call, killed)

    def _kill_while(self, make, known, group=None):
        """Run something that starts processes, and kill one of them meanwhile."""
        found = threading.Event()
        killed = []

        def kill():
            wait_until(lambda: started(known), 20, "the start of a process")
            time.sleep(self.rng.uniform(0, 1.0))
            pids = started(known)
            if pids:
                killed.append(time.monotonic())
                os.kill(self.rng.choice(pids), signal.SIGKILL)
            found.set()

        threading.Thread(target=kill, daemon=True).start()
        try:
            made = make()
        except SingleControllerError as error:
            assert killed, f"the call raised although no process was killed: {error}"
            told = time.monotonic() - killed[0]
            assert told < TOLD, f"reported {told:.1f} s after the kill"
            assert "died" in str(error), error
            return group, told
        found.wait(20)  # the kill came when everything had started, so the next call reports it
        group = made or group
        return group, seconds_until_told(group.ping)

    def driver(self, moment):
        """Kill a driver in its own process. Returns the seconds until nothing of it was left."""
        code = {
            "start-up": "say(); RayWorkerGroup(pool, RayClassWithInitArgs(Slow))",
            "idle": "g = RayWorkerGroup(pool, RayClassWithInitArgs(Slow)); say(); time.sleep(60)",
            "call": "g = RayWorkerGroup(pool, RayClassWithInitArgs(Slow)); say(); g.sleep(60)",
            "collective": "g = RayWorkerGroup(pool, RayClassWithInitArgs(Slow)); g.join_process_group(); say(); "
            "g.all_reduce(1, absent=1)",
            "restart": "g = RayWorkerGroup(pool, RayClassWithInitArgs(Slow)); say(); g.restart(); time.sleep(60)",
        }[moment]
        context = ray.get_runtime_context()
        script = textwrap.dedent(f"""
            import ray, time
            from chaos import *
            ray.init({context.gcs_address!r}, log_to_driver=False)
            def say():
                print("ready", flush=True)
            pool = RayResourcePool([{RANKS}])
            {code}
        """)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout.readline() == b"ready\n", "the driver did not start its group"
        time.sleep(self.rng.uniform(0, 1.2))
        process.kill()
        process.wait()
        process.stdout.close()
        return 0.0

    def node(self, moment, cluster):
        """Kill the node of a group, while another group runs on the head node."""
        node = cluster.add_node(num_cpus=4, resources={"side": 4})
        wait_until(lambda: ray.cluster_resources().get("side") == 4, 20, "the node's joining")
        with (
            RayResourcePool([1], use_gpu=False) as near,
            RayWorkerGroup(near, RayClassWithInitArgs(Fragile)) as other,
            RayResourcePool([2], use_gpu=False, resources={"side": 1}) as pool,
            RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) as group,
        ):
            future = group.sleep.remote(60) if moment == "call" else None
            time.sleep(self.rng.uniform(0, 0.5))
            killed = time.monotonic()
            cluster.remove_node(node, allow_graceful=False)

            def ping_on():  # its processes may return a last result before they notice that their node is gone
                while time.monotonic() < killed + 2 * NODE_TOLD:
                    group.ping()
                    time.sleep(0.05)

            told = seconds_until_told(ping_on if future is None else future.result, [killed], NODE_TOLD)
            assert other.ping() == [0], "a group on another node does not respond"
        # Until Ray counts the node as dead, the next driver may be sent to it.
        wait_until(lambda: sum(found["Alive"] for found in ray.nodes()) == 1, 20, "the node's death")
        return told


OUT = sys.stdout


def say(line):
    """Print to the real standard output, even if it is redirected."""
    print(line, file=OUT, flush=True)


def started(known):
    """pids of living actors, except the known ones."""
    from ray._private.state import actors

    pids = [info["Pid"] for info in actors().values() if info["State"] == "ALIVE"]
    return sorted(pid for pid in pids if pid and pid not in known and runs(pid))


def kill_later(pid, seconds):
    """Kill a process after some seconds. Returns a list that receives the time of the kill."""
    killed = []

    def kill():
        killed.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    threading.Timer(seconds, kill).start()
    return killed


def seconds_until_told(call, killed=None, limit=TOLD):
    """Seconds from the kill until the call raised this library's error."""
    begun = time.monotonic()
    try:
        call()
    except (WorkerDiedError, GroupBrokenError) as error:
        told = time.monotonic() - (killed[0] if killed else begun)
        assert "died" in str(error) or "unavailable" in str(error), error
        assert told < limit, f"reported {told:.1f} s after the kill"
        return told
    raise AssertionError("the call did not raise")


MOMENTS = ("start-up", "idle", "call", "collective", "restart")


def hangs(*_):
    """Handle SIGALRM: a round took too long."""
    raise AssertionError(f"a round has not ended after {ROUND} s: something hangs")


def draw(rng, nodes):
    """Draw what is killed, and when."""
    who = rng.choices(("rank", "driver", "node"), (6, 3, 1 if nodes else 0))[0]
    return who, rng.choice(("idle", "call") if who == "node" else MOMENTS)


def run(rounds, seed, nodes):
    """Run some rounds. Returns the exit status."""
    rng = random.Random(seed)
    signal.signal(signal.SIGALRM, hangs)
    say(f"{rounds} rounds, seed {seed}")
    worst = {"rank": 0.0, "node": 0.0}
    with cluster_of_one() as cluster:
        before = Footprint.now()
        for number in range(rounds):
            who, moment = draw(rng, nodes)
            begun = time.monotonic()
            signal.alarm(ROUND)
            kill = getattr(Round(rng), who)
            told = kill(moment, cluster) if who == "node" else kill(moment)
            before.wait_same(30)
            signal.alarm(0)
            worst[who] = max(worst.get(who, 0.0), told)
            took = time.monotonic() - begun
            heard = f"told {told:4.1f} s" if who != "driver" else ""
            say(f"{number + 1:3d}  {who:6s}  {moment:10s}  {heard:11s}  round {took:5.1f} s")
    of_node = f", of a node's within {worst['node']:.1f} s" if nodes else ""
    say(f"all {rounds} rounds kept: told of a rank's death within {worst['rank']:.1f} s{of_node}")
    return 0


@contextlib.contextmanager
def cluster_of_one():
    """A Ray cluster of one node, with the health checks of a Ray that this library starts."""
    os.environ["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    head = {
        "num_cpus": 16,
        "num_gpus": RANKS,
        "include_dashboard": False,
        "object_store_memory": 512 << 20,
        "_system_config": HEALTH,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(cluster.address, log_to_driver=False)
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):  # Ray logs a lot about deaths
            yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def main():
    """Read the options and run."""
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options.add_argument("--no-nodes", action="store_true", help="kill no nodes: each costs ten seconds")
    given = options.parse_args()
    return run(given.rounds, given.seed, not given.no_nodes)


if __name__ == "__main__":
    sys.exit(main())
