"""Rounds in which a host of a training run is lost, or its network fails for a while.

The run is that of training_kinds.py, on three hosts (see tests/hosts/host_network.py): each trainer and the standby on
a host of its own, the driver and the rollout workers on the first one, which is never lost. A trainer's snapshot is in
the memory of another host. A host that was lost joins the cluster again after the round, with a new Ray node.
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from host_cluster import cluster
from rounds import Seen
from waits import wait_until

CPUS = 4
OUTAGE = 5.0


class Hosts:
    """The hosts, and one round per call of a method.

    Args:
        rng: draws moments and victims.
        folder: an empty folder.
    """

    def __init__(self, rng, folder):
        self.rng, self.folder = rng, Path(folder)
        with ExitStack() as stack:
            self.cluster = stack.enter_context(cluster(3, cpus=CPUS))
            self.network, self.driver = self.cluster.network, self.cluster.driver
            self.driver.do(
                f"""
                import faulthandler, random, signal
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                from training_kinds import Training
                run = Training(random.Random({rng.randrange(1 << 30)}), {str(folder)!r}, spread=True)
                """,
                120,
            )
            self._stack = stack.pop_all()

    def close(self):
        self.driver.do("run.close()")
        self._stack.close()

    def stacks(self):
        """Where the ranks and the driver are."""
        self.network.hosts[0].kill(having="host_driver", number=10)
        return self.network.hosts[0].run(
            sys.executable, "-m", "single_controller", "stacks", "", "--address", "10.77.0.1:6379"
        )

    # --- the kinds ------------------------------------------------------------------------------------------

    def host_whose_processes_are_killed(self):
        return self._lost(lambda host: host.kill())

    def host_that_loses_its_power(self):
        """No connection is closed."""
        return self._lost(lambda host: self.network.cut(host.name))

    def host_cut_off_for_5_s(self):
        """Nobody is told, and nothing is replaced."""
        _, host = self._victim()
        self.driver.tell("run.through_an_outage()")
        time.sleep(self.rng.uniform(0, 1))
        self.network.cut(host.name)
        time.sleep(OUTAGE)
        self.network.heal(host.name)
        (self.folder / "healing").write_text(repr(time.monotonic()))
        (self.folder / "healing").replace(self.folder / "healed")
        seen = self._seen()
        # To Ray, another outage before its own connections have sent again would be one that lasts for both.
        wait_until(lambda: not self._waits_to_send(host), 20, f"the end of the outage for all that {host.name} runs")
        return seen

    def _waits_to_send(self, host):
        """Whether a connection between a host and the first one waits before it sends again what was lost."""
        first = self.network.hosts[0]
        known = [here.run("ss", "-tiH", "state", "established", "dst", there.address)
                 for here, there in ((first, host), (host, first))]  # fmt: skip
        return "backoff:" in "".join(known)

    def _victim(self):
        """A trainer that is on another host than the driver, and its host."""
        self.driver.do("run.begin()", 120)
        addresses = [address for address, _ in self.driver.do("run.processes()")]
        first, *others = self.network.hosts
        rank = self.rng.choice([rank for rank, address in enumerate(addresses) if address != first.address])
        return rank, next(host for host in others if host.address == addresses[rank])

    def _lost(self, lose):
        rank, host = self._victim()
        self.driver.tell(f"run.checked(run.until_back({rank}))")
        time.sleep(self.rng.uniform(0, 1))
        (self.folder / "killed").write_text(repr(time.monotonic()))
        lose(host)
        seen = self._seen()
        host.kill()  # what a host without power still runs here
        wait_until(lambda: not host.pids(), 30, f"the end of the processes of {host.name}")
        self.network.heal(host.name)
        self.network.start_node(host, cpus=CPUS)
        return seen

    def _seen(self):
        outcome = self.driver.hear(50)
        assert outcome.error is None, outcome.trace
        return Seen(*outcome.value)
