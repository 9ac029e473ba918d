"""Background jobs, with jobs that hang."""

import threading
import time

from single_controller.base.background import MAX_THREADS, THREADS, Background


def test_jobs_behind_stuck_ones_run_soon():
    """Also if a job has ended just before, so that the threads seemed to be at work."""
    background, release, done = Background(), threading.Event(), threading.Semaphore(0)
    for _ in range(THREADS - 1):
        background.run(release.wait)
    background.run(done.release)
    assert done.acquire(timeout=5)
    background.run(release.wait)
    begun = time.monotonic()
    for _ in range(3):
        background.run(done.release)
    for _ in range(3):
        assert done.acquire(timeout=5), "a job waits for those that are stuck"
    assert time.monotonic() - begun < 2
    release.set()


def test_a_burst_of_jobs_starts_few_threads():
    background, done = Background(), threading.Semaphore(0)
    time.sleep(0.2)  # idle for a while
    for _ in range(200):
        background.run(lambda: (time.sleep(0.002), done.release()))
    for _ in range(200):
        assert done.acquire(timeout=10)
    assert background._threads <= THREADS + 2 < MAX_THREADS


def test_process_without_threads_to_start_goes_on(monkeypatch, caplog):
    background, done = Background(), threading.Event()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        background.run(done.set)
    assert "no further thread could be started" in caplog.text and not done.is_set()
    background.run(lambda: None)
    assert done.wait(5)
