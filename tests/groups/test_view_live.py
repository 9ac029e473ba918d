"""The page and ``status --watch`` of a running group: who waits for whom, and where each rank is."""

import json
import os
import re
import signal
import time

import pytest
import ray
from browser import Browser
from group_workers import Counter, Fragile
from served import served_runs
from synthetic_run import write_run
from test_status import finish, run_here, start
from waits import wait_until, within

from single_controller import RayClassWithInitArgs, RayWorkerGroup
from single_controller.ray import group_records
from single_controller.view import group_watch
from single_controller.view.group_watch import GroupWatch
from single_controller.view.live import Live
from single_controller.view.rank_waits import Wait
from single_controller.wire.connection import hub
from single_controller.wire.link import Link

pytestmark = pytest.mark.timeout(120)

SECONDS = 2.0
"""Within which a hung rank is on the page, with its stack."""


@pytest.fixture(scope="module")
def stuck(pool):
    """Four ranks in a process group."""
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="stuck_") as group:
        group.join_process_group()
        wait_until(lambda: any(record.name == group.name for record in group_records.read().groups.values()))
        yield group


@pytest.fixture(scope="module")
def hung(stuck):
    """Rank 2 sleeps while the others wait for it."""
    stuck.all_reduce.remote(absent=2)


class TestStuckGroup:
    """One group, in this order; the last test kills a rank of it."""

    def test_status_of_a_healthy_group(self, stuck, monkeypatch, capsys):
        code, out, _ = run_here(monkeypatch, capsys, "status", "stuck_", "--json")
        found = json.loads(out)
        assert (code, found["ok"], found["problems"]) == (0, True, [])
        assert [rank["doing"] for rank in found["groups"][0]["ranks"]] == ["idle"] * 4

    def test_ranks_that_are_being_connected_are_not_silent(self, stuck, monkeypatch):
        """As long as they may take, not only as long as they may take to answer: here one second."""
        dial = Link._dial
        monkeypatch.setattr(group_watch, "OPEN_SECONDS", 30.0)
        monkeypatch.setattr(Link, "_dial", lambda link: hub.later(1.1, lambda: dial(link)))
        with GroupWatch("stuck_") as watch:
            (look,) = watch.look(1.0)
            assert look.problems() == [] and look.stacks == {}
            monkeypatch.setattr(Link, "_dial", lambda link: hub.later(0.5, lambda: dial(link)))
            for link in watch._links.values():
                link._connection._shut()
            wait_until(lambda: not any(link.connected for link in watch._links.values()), 5)
            (look,) = watch.look(1.0)
        assert look.problems() == [] and look.stacks == {}

    def test_a_cluster_that_has_ended_costs_no_other_its_connection(self, stuck, monkeypatch):
        """As on the overview of a run that was killed and of one that goes on."""
        ended = []
        monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
        with Live() as live:
            live.look(ray.get_runtime_context().gcs_address)
            watch, live._connected = live._watch, True  # as in the process of the page
            assert "no Ray cluster responds" in live.look("127.0.0.1:1")["error"]
            assert live._watch is watch and not ended

    def test_a_connection_that_no_page_asks_for_is_closed(self, stuck, tmp_path, monkeypatch):
        """Otherwise, Ray would end the server a minute after the cluster has ended."""
        with served_runs([write_run(tmp_path / "run", ended=False)]) as server:
            live = server._live
            live.look(ray.get_runtime_context().gcs_address)
            assert live._watch is not None
            monkeypatch.setattr("single_controller.view.live.IDLE_SECONDS", 0.1)
            wait_until(lambda: live._watch is None)

    def test_process_groups_are_told_apart(self, stuck):
        """Rank 2 waits for rank 3 in their pair; ranks 0 and 1 have left theirs, and wait for both."""
        with GroupWatch("stuck_") as watch:
            later = stuck.all_reduce_in_pairs.remote(3, 2.0)
            wait_until(lambda: len(watch.look()[0].waits.get(3, Wait()).awaited) == 3)
            (look,) = watch.look()
            assert look.waits[2].what == "in all_reduce of process group pair (ranks 2, 3)"
            assert look.waits[2].ranks == (3,) and look.waits[0].ranks == (2, 3)
            (late,) = look.problems(late=0.01)
            assert late.startswith("rank 3 of") and late.endswith("ranks 0-2 wait for it")
            # Of a deep stack, the worker's method is shown too.
            assert "in all_reduce_in_pairs" in look.stacks[0] and "frames ..." in look.stacks[0]
            later.result(timeout=30)

    def test_a_rank_that_hangs_is_on_the_page_with_its_stack(self, stuck, tmp_path, request):
        run = write_run(
            tmp_path / "run",
            steps=3,
            ended=False,
            ray_address=ray.get_runtime_context().gcs_address,
            groups=[stuck.name],
        )
        browser = Browser()
        server = start("view", str(run), address=False)
        try:
            browser.open(server.stdout.readline().strip() + "#ranks")
            # Below it, the page has the groups of other tests in this cluster.
            browser.wait(f"document.querySelectorAll('tr[data-group=\"{stuck.name}\"]').length == 4", 30)
            with within(SECONDS):
                request.getfixturevalue("hung")
                browser.wait("/time.sleep/.test(document.querySelector('pre.stack[data-rank=\"2\"]').textContent)")
            page = browser.text()
            assert stuck.name in page and "ranks 0, 1, 3 wait for it" in page
            assert page.count("waits in all_reduce, for rank 2") == 3
            assert re.search(r"group_workers\.py:\d+, in all_reduce", page)
            if "SCREENSHOTS" in os.environ:  # for the docs, without this machine's folders
                here = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
                stack = "document.querySelector('pre.stack')"
                browser.js(f"{stack}.textContent = {stack}.textContent.replaceAll('{here}', '/home/me')")
                browser.screenshot(f"{os.environ['SCREENSHOTS']}/view_ranks.png")
            browser.js("document.querySelector('tr[data-rank=\"0\"]').click()")
            browser.wait("/dist.all_reduce/.test(document.querySelector('pre.stack[data-rank=\"0\"]').textContent)")
            assert browser.errors() == []
        finally:
            browser.close()
            server.send_signal(signal.SIGINT)
            code, _, err = finish(server)
        assert code == 0, err

    def test_status_says_who_is_late(self, hung, tmp_path, monkeypatch, capsys):
        time.sleep(0.5)  # of the call, for the rank to be late
        run = str(write_run(tmp_path / "run", steps=3))
        code, out, _ = run_here(monkeypatch, capsys, "status", "stuck_", "--late", "0.5", "--run", run)
        assert code == 1
        assert re.search(r"^  rank 2 of group stuck_Fragile is late: all_reduce\(\) for .*wait for it$", out, re.M)
        assert re.search(r"^run: ended: finished, step 2$", out, re.M)
        assert re.search(r"^0 .* waits in all_reduce, for rank 2; at group_workers\.py:\d+, in all_reduce$", out, re.M)

    @pytest.mark.full("what status --watch shows")
    def test_watch_shows_it_again_and_again(self, hung):
        process = start("status", "stuck_", "--watch")
        seconds = []
        for line in process.stdout:
            if (match := re.match(r"2 .* all_reduce\(\) for ([0-9.]+) s", line)) is not None:
                seconds.append(float(match[1]))
            if len(seconds) == 2:
                break
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 0 and 0.8 < seconds[1] - seconds[0] < 5

    def test_death_of_the_rank(self, stuck, hung):
        with GroupWatch("stuck_") as watch:
            (look,) = watch.look()
            assert look.waits[2] == Wait("", (), look.waits[2].where, (0, 1, 3))
            os.kill(look.status.ranks[2].process.pid, signal.SIGKILL)
            wait_until(lambda: stuck.broken is not None)
            wait_until(lambda: any("dead" in one for one in watch.look()[0].problems()))
            (look,) = watch.look()
            assert any("is broken" in one for one in look.problems()) and look.status.last_death.rank == 2


@pytest.mark.full("what status --watch shows")
def test_rank_whose_c_code_holds_the_lock(pool):
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="in_c_") as group,
        GroupWatch("in_c_") as watch,
    ):
        watch.look()
        group.hang_in_c_on.remote(1, [])
        # On a busy machine, it may already be late with an answer before it is in the C function.
        wait_until(lambda: "hang_in_c_on" in watch.look(0.3)[0].stacks.get(1, ""))
        (look,) = watch.look(0.3)
        assert "hang_in_c_on" in look.waits[1].where
        (problem,) = look.problems()
        assert "rank 1" in problem and "does not answer" in problem and "hang_in_c_on" in problem
        watch._node, watch._dumps = "another host", {}  # from there, a task on the rank's host reads it
        assert watch.look(0.3)[0].stacks[1] == "  its host is being asked"
        wait_until(lambda: "hang_in_c_on" in watch.look(0.3)[0].stacks[1], 45)


@pytest.mark.full("what status --watch shows")
def test_wait_for_the_result_of_another_group(pool):
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="slow_") as slow,
        RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="eager_") as eager,
        GroupWatch() as watch,
    ):

        def eagers():
            return next(look for look in watch.look() if look.status.name == eager.name).waits

        later = eager.times_rank.remote(slow.sleep.remote(2.0))
        wait_until(lambda: eagers().get(0, Wait()).what == f"for the result of sleep() of {slow.name}")
        later.result(timeout=30)
        assert eagers() == {}
