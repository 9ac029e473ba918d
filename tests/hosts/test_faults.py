"""The table of faults between hosts: what a driver is told, and after how many seconds."""

import textwrap
import time

import pytest
from host_cluster import SETUP, cluster
from host_driver import Driver
from waits import wait_until

pytestmark = [pytest.mark.full("faults between hosts: killed, cut off, slow"), pytest.mark.timeout(300)]

OUTAGE = 5.0


@pytest.fixture(scope="module")
def healthy():
    """Three hosts. Their tests leave them as they were."""
    with cluster(3) as made:
        made.driver.do("from host_workers import OnHost; import torch")
        yield made


@pytest.fixture
def doomed():
    """Three hosts of which a test ends one."""
    with cluster(3) as made:
        made.driver.do("from host_workers import OnHost; import torch")
        yield made


@pytest.fixture
def group(healthy):
    """A group on all three hosts, in a process group."""
    healthy.driver.do("group = on(3, OnHost); group.join(timeout=60)")
    assert connected(healthy.driver) == 3
    yield
    healthy.driver.do("group.close(); group.resource_pool.close()")


def outage(made, name):
    """Cut a host off for a while."""
    made.network.cut(name)
    time.sleep(OUTAGE)
    made.network.heal(name)


def connected(driver):
    """How many ranks a driver's group is connected to."""
    return driver.do("sum(link.connected for link in group._transport._links)")


def show(fault, outcome):
    """A row of the table, for the log of `make test-all`."""
    print(f"\n{fault:<44}{outcome}")


# --- what passes --------------------------------------------------------------------------------------------


def test_outage_while_idle(healthy, group):
    time.sleep(1)
    outage(healthy, "h2")
    outcome = healthy.driver.outcome("group.ping()")
    show("cut for 5 s while idle", outcome)
    assert outcome.value == [0, 1, 2], outcome.trace


def test_outage_during_a_call(healthy, group):
    outcome = healthy.meanwhile("group.count(seconds=3.0)", outage, healthy, "h2")
    show("cut for 5 s in a call", outcome)
    assert outcome.value == [1, 1, 1], outcome.trace
    assert healthy.driver.do("group.count()") == [2, 2, 2]
    assert connected(healthy.driver) == 3  # the connections have survived, and nothing was lost on them


def test_outage_while_threads_call(healthy, group):
    """Many calls are in flight, and begin, while the link is cut. Each runs once, in the order of its thread."""
    code = """
        from concurrent.futures import ThreadPoolExecutor
        end = time.time() + 9
        def run(_):
            found = []
            while time.time() < end:
                found.append(group.count(seconds=0.01))
            return found
        with ThreadPoolExecutor(4) as threads:
            each = list(threads.map(run, range(4)))
        counts = sorted(tuple(found) for of in each for found in of)
        [len(counts), counts == [(k, k, k) for k in range(1, len(counts) + 1)], all(of == sorted(of) for of in each)]
        """
    outcome = healthy.meanwhile(code, outage, healthy, "h2")
    show("cut for 5 s while 4 threads call", outcome)
    assert outcome.error is None, outcome.trace
    count, once, in_order = outcome.value
    assert count > 20 and once and in_order and connected(healthy.driver) == 3


def test_outage_during_a_collective(healthy, group):
    outcome = healthy.meanwhile("group.reduce_for(4.0)", outage, healthy, "h2")
    show("cut for 5 s in a collective", outcome)
    assert outcome.value == [True] * 3, outcome.trace


def test_reset_connections_during_a_collective(healthy, group):
    """Every rank is alive, so the error of the rank is raised, and not after the 12 s that a death may take to show."""
    healthy.driver.tell("group.all_reduce(1, absent=2)")
    time.sleep(1)
    healthy.network.reset("h1", "h2")
    healthy.network.reset("h2", "h3")
    outcome = healthy.driver.hear()
    show("connections reset in a collective", outcome)
    assert outcome.error in ("WorkerError", "ResultLostError") and outcome.seconds < 10, outcome.trace
    assert healthy.driver.do("group.alive()") == [True] * 3


# --- deaths -------------------------------------------------------------------------------------------------


def test_killed_rank(healthy, group):
    outcome = healthy.meanwhile("group.all_reduce(1, absent=0)", healthy.host("h2").kill, "ray::OnHost")
    show("a rank killed", outcome)
    assert (outcome.error, outcome.facts.get("ranks")) == ("WorkerDiedError", [1]), outcome.trace
    assert outcome.seconds < 5 and "host is gone" not in outcome.text
    assert healthy.driver.do("group.restart(); group.ping()") == [0, 1, 2]


def test_killed_host(doomed):
    """All of its processes end at once: its connections are closed, and Ray's own word comes later."""
    doomed.driver.do("group = on(3, OnHost); group.join(timeout=60)")
    outcome = doomed.meanwhile("group.all_reduce(1, absent=0)", doomed.host("h3").kill)
    show("all processes of a host killed", outcome)
    assert (outcome.error, outcome.facts.get("ranks")) == ("WorkerDiedError", [2]), outcome.trace
    assert "its host is gone" in outcome.text and "10.77.0.3" in outcome.text
    assert outcome.seconds < 1 + 5


def lose_power(made, method, seconds, checks=""):
    """Cut off the host of rank 1 in a call, which must tell the death within some seconds. Returns the host's name."""
    made.driver.do("group = on(2, OnHost); group.join(timeout=60)")
    _, there = made.driver.do("hosts_of(group)")
    outcome = made.meanwhile(f"group.{method}", made.network.cut, there)
    show(f"power loss in {method.partition('(')[0]}{checks}", outcome)
    assert (outcome.error, outcome.facts.get("ranks")) == ("WorkerDiedError", [1]), outcome.trace
    assert "its host is gone" in outcome.text and outcome.seconds < 1 + seconds, outcome.seconds
    return there


def test_power_loss(doomed):
    """No connection is closed. A new worker then runs on another host."""
    there = lose_power(doomed, "sleep(60)", doomed.window + 2)
    assert doomed.driver.do("group.restart(); group.ping()", 120) == [0, 1]
    assert set(doomed.driver.do("hosts_of(group)")) == {"h1", "h2", "h3"} - {there}


@pytest.mark.parametrize("method", ["count(seconds=60.0)", "all_reduce(1, absent=1)"])
def test_power_loss_with_the_default_health_checks_of_ray(method):
    """Ray itself would take 65 s."""
    with cluster(2, period=3000, timeout=10_000, threshold=5) as made:
        made.driver.do("from host_workers import OnHost")
        lose_power(made, method, 15, ", Ray's defaults")


@pytest.mark.parametrize("standby", [1, 0])
def test_rank_of_a_lost_host_is_replaced_on_another_host(doomed, standby):
    """By the standby there, or in the slot that Ray has moved there. The other rank keeps its process."""
    do = doomed.driver.do
    do(f"from replace_workers import Member; group = on(2 + {standby}, Member, standby={standby})")
    (first, second), hosts = do("group.me()"), do("hosts_of(group)")
    died = doomed.meanwhile("group.total(asleep=[1])", doomed.network.cut, hosts[1])
    assert (died.error, died.facts.get("ranks")) == ("WorkerDiedError", [1]), died.trace
    replaced = doomed.driver.outcome("group.replace()", 120)
    show(f"its rank replaced, {standby or 'no'} standby", replaced)
    assert replaced.value == [1], replaced.trace
    after = do("group.me()")
    assert after[0]["pid"] == first["pid"] and after[0]["port"] != first["port"]
    assert do("group.total()") == [12.0] * 2
    assert [one["environment"][:3] for one in after] == [["0", "2", "0"], ["1", "2", "0"]]
    assert do("hosts_of(group)") == [hosts[0], next(h for h in ("h1", "h2", "h3") if h not in hosts)]
    assert second["history"] == ["constructed"] and after[1]["history"] == ["constructed", "generation 1"]


def test_group_goes_on_without_a_lost_host_and_takes_it_back(doomed):
    """No other host has room for the lost rank. Later the host comes back, with a new Ray node."""
    do = doomed.driver.do
    do("from replace_workers import Member; group = on(3, Member, on_death='shrink')")
    before, hosts = do("group.me()"), do("hosts_of(group)")
    died = doomed.meanwhile("group.total(asleep=[2])", doomed.network.cut, hosts[2])
    assert (died.error, died.facts.get("ranks")) == ("WorkerDiedError", [2]), died.trace
    outcome = doomed.driver.outcome("group.total()", 60)
    show("fewer ranks", outcome)
    assert outcome.value == [12.0] * 2, outcome.trace
    assert do("group.grow()") == []  # the host is still gone
    host = doomed.host(hosts[2])
    host.kill()
    doomed.network.heal(hosts[2])
    doomed.network.start_node(host, cpus=1)
    do("while not group.grow(): time.sleep(0.2)", 60)
    assert do("group.total()") == [54.0] * 3 and do("hosts_of(group)") == hosts
    assert [one["pid"] for one in do("group.me()")[:2]] == [one["pid"] for one in before[:2]]


def test_results_on_a_lost_host(doomed):
    """Large results stay in the store of their host. The driver, a consumer and its workers learn which are lost."""
    doomed.driver.do("producer = on(3, OnHost); lost = producer.enlarge(torch.ones(6, 1))")
    there = doomed.driver.do("hosts_of(producer)")[2]
    doomed.driver.do("while not lost.done(): time.sleep(0.01)")
    doomed.network.cut(there)
    doomed.driver.do("while all(producer.alive()): time.sleep(0.1)", doomed.window + 20)
    doomed.driver.do("from group_workers import Counter; consumer = on(2, Counter)", 60)
    for consumer, code in (
        (None, "lost.result()"),
        (None, "raise lost.exception()"),
        ("double", "consumer.double(lost)"),
    ):
        outcome = doomed.driver.outcome(code)
        show(f"results lost: {code}", outcome)
        facts = [outcome.facts.get(name) for name in ("method", "rank", "consumer")]
        assert (outcome.error, facts) == ("ResultError", ["enlarge", 2, consumer]), outcome.trace
        assert there in outcome.facts["host"] and outcome.text.startswith("the result of rank 2 of enlarge()")
        assert outcome.seconds < 10
    outcome = doomed.driver.outcome("consumer.take_future(lost)")  # the workers wait for the future themselves
    assert (outcome.error, outcome.facts["cause_type"]) == ("WorkerError", "dispatch.errors.ResultError"), outcome.trace
    assert doomed.driver.do("consumer.add(0)") == [0, 1]


def test_death_wins_over_its_echo_on_a_healthy_rank(doomed):
    """The healthy rank's collective gives up 10 s before Ray knows that the other rank's host is gone."""
    doomed.driver.do("group = on(2, OnHost); group.join(timeout=2)")
    there = doomed.driver.do("hosts_of(group)")[1]
    outcome = doomed.meanwhile("group.all_reduce(1, absent=1)", doomed.network.cut, there, after=0.5)
    show("power loss; a healthy rank gives up first", outcome)
    assert (outcome.error, outcome.facts.get("ranks")) == ("WorkerDiedError", [1]), outcome.trace
    assert "its host is gone" in outcome.text and outcome.seconds < 1 + doomed.window + 2


def test_error_of_a_collective_is_raised_when_all_ranks_are_alive(healthy):
    """The same error without a death: nothing waits for the health checks."""
    healthy.driver.do("group = on(2, OnHost, error_grace=60); group.join(timeout=2)")
    outcome = healthy.driver.outcome("group.all_reduce(1, absent=1)")
    show("a collective gives up, all ranks alive", outcome)
    assert (outcome.error, outcome.facts.get("rank")) == ("WorkerError", 0), outcome.trace
    assert outcome.seconds < 2 + 5
    healthy.driver.do("group.close(); group.resource_pool.close()")


def test_killed_driver(healthy):
    driver = Driver(healthy.network.hosts[1], SETUP)
    driver.do("from host_workers import OnHost; group = on(3, OnHost)")
    hosts = healthy.network.hosts
    assert all(host.pids("ray::OnHost") for host in hosts)
    driver.close()
    seconds = wait_until(lambda: not any(host.pids("ray::OnHost") for host in hosts), 20)
    print(f"\n{'driver killed':<44}{seconds:6.2f} s  no worker is left")


def test_host_of_the_driver_lost(doomed):
    """Ray notices that the driver's host is gone, and ends the workers that it started on others."""
    driver = Driver(doomed.network.hosts[1], SETUP)
    driver.do("from host_workers import OnHost; group = on(3, OnHost)")
    doomed.network.cut("h2")
    others = [doomed.host("h1"), doomed.host("h3")]
    seconds = wait_until(lambda: not any(host.pids("ray::OnHost") for host in others), doomed.window + 20)
    print(f"\n{'power loss of the driver':<44}{seconds:6.2f} s  no worker is left")
    driver.close()


# --- slow networks and names --------------------------------------------------------------------------------


def test_slow_network_that_loses_packets():
    with cluster(2) as made:
        made.driver.do("from host_workers import OnHost; import torch; group = on(2, OnHost)")
        made.driver.do("group.join(timeout=60)")
        made.network.degrade("h2", delay=0.1, loss=0.05)
        begun = time.monotonic()
        for number in range(1, 6):
            assert made.driver.do("group.count()") == [number, number]
        batch = made.driver.do("batch = torch.arange(8.0).reshape(4, 2); group.total(batch).tolist()")
        assert batch == [[1.0], [5.0], [9.0], [13.0]]
        assert made.driver.do("group.all_reduce(3)") == [1.0, 1.0]
        assert made.driver.do("group.broken") is None
        seconds = (time.monotonic() - begun) / 9
        print(f"\n{'100 ms late, 5 % lost':<44}{seconds:6.2f} s  per call or all-reduce")
        assert seconds > 0.2  # a round trip


def test_process_group_of_hosts_whose_names_stand_for_the_loopback():
    """As with Debian's default /etc/hosts, where a host's own name is 127.0.1.1."""
    with cluster(2, resolve="loopback") as made:
        outcome = made.driver.outcome(
            "from host_workers import OnHost; group = on(2, OnHost); group.join(timeout=30); group.all_reduce(2)"
        )
        show("names that stand for 127.0.1.1", outcome)
        assert outcome.value == [1.0, 1.0], outcome.trace


# --- data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["store", "group", "disk"])
def test_weight_sync_with_an_outage(healthy, transport):
    """Weights from three hosts to three, of which one is cut off for a while: bit for bit those of the version."""
    healthy.driver.do(
        textwrap.dedent(f"""
        import sync_workers
        train, rollout = on(3, sync_workers.Stage), on(3, sync_workers.Rollout)
        folder = {{"folder": f"/tmp/weights-{{os.getpid()}}"}} if {transport!r} == "disk" else {{}}
        train.connect(rollout, {transport!r}, bucket_bytes=600, **folder)
        train.update(1)
        """),
        120,
    )
    code = "[train.update(version) for version in range(2, 42)]; rollout.current_weight_version()"
    outcome = healthy.meanwhile(code, outage, healthy, "h3", after=0.3, seconds=120)
    show(f"weight sync by {transport}, cut for 5 s", outcome)
    assert outcome.value == [41] * 3, outcome.trace
    healthy.driver.do("wanted = sync_workers.model(seed=41)")
    same = "[all(torch.equal(rank[name], wanted[name]) for name in wanted) for rank in rollout.weights()]"
    assert healthy.driver.do(same) == [True] * 3
    healthy.driver.do("train.close(); rollout.close(); train.resource_pool.close(); rollout.resource_pool.close()")
