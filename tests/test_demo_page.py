"""The page of the demo, while it runs and after it has ended."""

import signal
import subprocess
import sys

import pytest
from browser import Browser
from demo_runs import ROOT, start
from waits import wait_until

from single_controller.view.run_files import sample_steps

pytestmark = [pytest.mark.full("the page of the running demo"), pytest.mark.timeout(400)]


def test_running_and_finished_demo(tmp_path):
    driver, _ = start(tmp_path, "num_rollout=12")
    run = tmp_path / "curve"
    view = browser = None
    try:
        wait_until(lambda: driver.poll() is not None or sample_steps(run)[1:], 200, "the second step's samples")
        line = [sys.executable, "-m", "single_controller", "view", str(run)]
        view = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        browser = Browser()
        url = view.stdout.readline().strip()
        browser.open(url + "#ranks")
        browser.wait("document.querySelectorAll('tr[data-rank]').length == 3", 60)  # two trainers and a rollout worker
        assert "open" in browser.text()
        browser.open(url + "#overview")
        browser.wait("document.querySelector('.card').innerText.includes('running')")
        driver.wait(200)
        assert driver.returncode == 0
        browser.wait("document.querySelector('.card').innerText.includes('ended: finished')")
        browser.open(url + "#curves?find=reward")
        browser.wait("document.querySelector('.chart[data-points]').dataset.points == '12'")
        browser.open(url + "#weights")
        browser.wait("document.querySelectorAll('tbody tr').length >= 12")
        browser.open(url + "#timeline")
        browser.wait("document.querySelector('canvas').dataset.bars > 20")
        browser.open(url + "#samples")
        browser.wait("document.querySelector('.grid-row')?.dataset.step == '11'")
        browser.js("document.querySelector('.grid-row').click()")
        browser.wait("document.querySelectorAll('.tokens span').length > 3")
        browser.js("[...document.querySelectorAll('.turn.sampled span')].at(-1).click()")
        assert "The update to version" in browser.text("#token") and "digest" in browser.text("#token")
        assert browser.errors() == []
    finally:
        for process in (driver, view):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
        if browser is not None:
            browser.close()
