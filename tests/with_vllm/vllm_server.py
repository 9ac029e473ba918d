"""vLLM's own server, for the tests of HTTPEngine."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
from rollout_helpers import plain_model
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 400
# vLLM has no heads of less than 32 on the CPU.
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, vocab_size=64, max_position_embeddings=512, dtype="float32")  # fmt: skip


def _begin():
    """In the server's process, before it runs. No server is left when the tests are killed. It must not be killed
    itself: its children would go on. They wait in busy loops, which on two cores can keep the tests from running for
    seconds, so they are nicer than the tests: also as a session, because Linux may divide time between sessions."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")


class VLLMServer:
    """vLLM's server as a process, with all that it starts. Its model has `CONFIG` and the weights of seed 0.

    Args:
        folder: for the model and the log.
        options: of the command line.
        variables: of the environment.
    """

    def __init__(self, folder, *options, **variables):
        plain_model(CONFIG, 0).save_pretrained(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(folder, "server.log")
        variables = {
            **variables,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
                    *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
                    *("--skip-tokenizer-init", "--max-model-len", "512", "--max-num-seqs", "16"),
                    *("--disable-uvicorn-access-log", *options),
                ],
                env={**os.environ, **variables},
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its children can be ended with it
                preexec_fn=_begin,
            )
        end = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"vLLM's server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def ready(self):
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def engine_cores(self):
        """The processes that have the model, found among the server's children."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [one.pid for one in children if "EngineCor" in one.name()]

    def close(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
