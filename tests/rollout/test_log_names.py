"""Worker output on the driver's terminal shows the worker's class and rank. Runs a separate driver, with a Ray of its
own: the tests' Ray has no log monitor, which brings the output there."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

DRIVER = """
    import logging, os, sys
    from single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

    class Talker(Worker):
        def __init__(self):
            super().__init__()
            print("made", self.rank)

        @register(Dispatch.ONE_TO_ALL)
        def talk(self):
            print("printed by", self.rank)
            logging.getLogger("mine").warning("logged by %d", self.rank)
            os.system(f"echo echoed by {self.rank}")

    with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Talker)) as group:
        group.talk()
        import time
        lines = [f"{what} {rank}" for what in ("made", "printed by", "logged by", "echoed by") for rank in (0, 1)]
        end = time.monotonic() + 20  # Ray's log monitor looks twice a second
        while time.monotonic() < end and not all(line in open(sys.argv[1]).read() for line in lines):
            time.sleep(0.02)
"""


@pytest.mark.timeout(90)
def test_worker_lines_show_class_and_rank(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    environment = {
        **os.environ,
        "RAY_ADDRESS": "local",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "PYTHONUNBUFFERED": "1",
    }
    said, command = tmp_path / "said", [sys.executable, str(script), str(tmp_path / "said")]
    with said.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, timeout=80, cwd=os.getcwd(), env=environment)
    text = re.sub(r"\x1b\[\d+m", "", said.read_text())
    assert done.returncode == 0, text
    for rank in (0, 1):
        for line in ("made", "printed by", "logged by", "echoed by"):
            assert re.search(rf"^\(Talker rank {rank} pid=\d+\) .*{line} {rank}$", text, re.M), text
    assert ":actor_name:" not in text
