"""Groups across two hosts: what `make test` shows of failures between hosts. `test_faults.py` has the others.

The tests share a cluster and a group, and the last one ends a host.
"""

import time

import pytest
from host_cluster import cluster

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def two_hosts():
    """Two hosts that know no other host by name. Ray takes 7.5 s to notice that one is gone."""
    with cluster(2, resolve="nothing", period=500, timeout=1000, threshold=5) as made:
        made.driver.do("from host_workers import OnHost; group = on(2, OnHost)")
        yield made


def test_reset_connection_between_calls_loses_nothing(two_hosts):
    driver, network = two_hosts.driver, two_hosts.network
    assert driver.do("group.count()") == [1, 1]
    network.reset("h1", "h2")
    assert driver.do("[group.count() for _ in range(3)]") == [[2, 2], [3, 3], [4, 4]]
    assert driver.do("[link.connected for link in group._transport._links]") == [True, True]


def test_reset_connection_during_a_call_loses_nothing(two_hosts):
    driver, network = two_hosts.driver, two_hosts.network
    before = driver.do("group.count()")[0]
    counted = two_hosts.meanwhile("group.count(seconds=1.0)", network.reset, "h1", "h2", after=0.5, seconds=20)
    assert counted.value == [before + 1] * 2, counted.trace
    assert driver.do("group.count()") == [before + 2] * 2
    assert driver.do("group.broken, group.alive()") == [None, [True, True]]


def test_process_group_of_hosts_whose_names_do_not_resolve(two_hosts):
    do = two_hosts.driver.do
    assert do("group.interfaces()") == [{"GLOO": "eth0", "NCCL": "=eth0", "TP": "eth0"}] * 2
    assert do("group.join(timeout=30)") == [None, None]
    assert do("group.all_reduce(3)") == [1.0, 1.0]


def test_host_that_vanishes_during_a_collective(two_hosts):
    """It closes no connection. The other rank waits for it in the collective."""
    driver = two_hosts.driver
    driver.tell("group.all_reduce(1, absent=1)")
    time.sleep(0.5)
    two_hosts.network.cut("h2")
    begun = time.monotonic()
    died = driver.hear(30)
    assert time.monotonic() - begun < two_hosts.window + 2
    assert died.error == "WorkerDiedError", died.trace
    assert (died.facts["rank"], died.facts["ranks"], died.facts["method"]) == (1, [1], "all_reduce")
    assert "10.77.0.2" in died.facts["host"] and "its host is gone" in died.text
    assert driver.outcome("group.ping()").error == "GroupBrokenError"
