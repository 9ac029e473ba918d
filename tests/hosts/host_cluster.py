"""A Ray cluster of several hosts, with a driver on the first one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager

from host_driver import Driver, Outcome
from host_network import Network

IMPORTS = "import ray, group_workers, single_controller"
SETUP = """
import os, time, ray
from group_workers import Fragile
from single_controller import *
ray.init(address="10.77.0.1:6379", log_to_driver=False)

def on(count, cls=Fragile, **options):
    '''A group with one rank on each of so many hosts.'''
    spread = {"across_nodes": True, "strategy": "STRICT_SPREAD"}
    pool = RayResourcePool([1] * count, use_gpu=False, num_cpus=0.5, **spread)
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls), **options)

def hosts_of(group):
    return [rank.hostname for rank in group.plan().ranks]
"""


def window(config: dict) -> float:
    """The seconds after which Ray's control store knows that a host is gone, at most."""
    once = config["health_check_period_ms"] + config["health_check_timeout_ms"]
    return config["health_check_failure_threshold"] * once / 1000


class Cluster:
    """A Ray cluster with a node on each host, and a driver on the first one.

    Attributes:
        network: the hosts and their switch.
        driver: the driver, in which ``on(hosts)`` makes groups.
        window: see `window`.
    """

    def __init__(self, network: Network, seconds: float) -> None:
        self.network, self.window = network, seconds
        self.driver = Driver(network.hosts[0])

    def host(self, name: str):
        """The host of that name."""
        return next(host for host in self.network.hosts if host.name == name)

    def meanwhile(
        self, code: str, fault: Callable[..., object], *args: object, after: float = 1.0, seconds: float = 60
    ) -> Outcome:
        """Have the driver run code, and call ``fault`` after a while. Returns the outcome of the code."""
        self.driver.tell(code)
        time.sleep(after)
        fault(*args)
        return self.driver.hear(seconds)


@contextmanager
def cluster(
    count: int, *, resolve: str = "address", period: int = 1000, timeout: int = 2000, threshold: int = 4, cpus: int = 1
):
    """Start hosts, a Ray node on each, and a driver. The numbers are those of Ray's health checks, in milliseconds: by
    default Ray takes 12 s to notice that a host is gone, so that a network that fails for 5 s, or a host that is slow
    because others use the machine, is not taken for a death."""
    config = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": period,
        "health_check_timeout_ms": timeout,
        "health_check_failure_threshold": threshold,
    }
    with Network(count, resolve=resolve) as network:
        made = Cluster(network, window(config))
        try:
            made.driver.tell(IMPORTS)  # while Ray starts
            network.start_ray(cpus=cpus, config=config)
            made.driver.hear(120)
            made.driver.do(SETUP, 120)
            yield made
        finally:
            made.driver.close()
