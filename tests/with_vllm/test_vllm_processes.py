"""VLLMEngine on two processes (tensor parallelism), and what is left of them when one dies. Run by `make test-vllm`."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs .venv-vllm: run make test-vllm")

import psutil
import torch
from engine_contract import PROMPTS, SEEDS, EngineContract, Subject
from test_vllm_engine import left_behind
from transformers import Qwen2Config, Qwen3Config
from waits import wait_until

from workers.hf_files import make_model
from workers.rollout.engines import vllm_options
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.engines.vllm_engine import VLLMEngine
from workers.rollout.rollout_errors import RolloutError

pytestmark = pytest.mark.timeout(300)  # vLLM starts in 10 s, or in minutes on a busy machine

FIELDS = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 512,
          "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
# Biases, and 96 rows of embeddings, which vLLM pads to 128: the second process has 32 and as many padded ones.
TIED = {**FIELDS, "model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 96}
SECONDS = 60


def ranks_of(pid):
    """vLLM's processes, which have set their titles."""
    return [one for one in psutil.Process(pid).children() if "VLLM::Worker" in str(one.cmdline())]


class TestTwoProcesses(EngineContract):
    seeded_continuation = False
    updates = 10

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls):
        engine = VLLMEngine(TIED, tensor_parallel_size=2)
        ranks = ranks_of(os.getpid())
        assert len(ranks) == 2
        yield Subject(engine, Qwen2Config(**TIED))
        engine.close()
        psutil.wait_procs(ranks, SECONDS)
        assert not any(one.is_running() for one in ranks)

    def test_second_engine_in_the_process_is_refused(self, subject, first):
        with pytest.raises(RolloutError, match="this process has another one; close it"):
            VLLMEngine(FIELDS, tensor_parallel_size=2)
        subject.engine.generate([[1]], SamplingParams(2), [0])


def test_key_value_head_in_both_processes_is_read_back():
    """With an output layer, norms of queries and keys, and in bfloat16."""
    config = Qwen3Config(**{**FIELDS, "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 32})
    with closing(VLLMEngine(config, tensor_parallel_size=2, param_dtype="bf16")) as engine:
        subject = Subject(engine, config)
        for seed in (1, 2):
            model = make_model(config, True, seed, False)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            subject.update(model, seed)
            subject.check_read(model)
            assert engine.weight_dtypes()["model.norm.weight"] == torch.bfloat16
        for name in ("model.norm.weight", "model.layers.0.self_attn.k_norm.weight"):
            (tensor,) = engine.read_raw([f"1:{name}"])
            tensor[3] += 1
            engine.begin_update()
            engine.load_raw([(f"1:{name}", tensor)])
            engine.finish_update(3)
            with pytest.raises(RolloutError, match=f"processes 0 and 1 hold different bytes of '{name}'"):
                engine.read_weights(list(engine.weight_shapes()))
            subject.update(model, 4)
            subject.check_read(model)


def test_death_of_a_process_fails_the_requests_and_leaves_no_process():
    before = left_behind()
    engine = VLLMEngine(FIELDS, tensor_parallel_size=2)
    ranks = ranks_of(os.getpid())
    futures = [
        engine.submit(prompt, SamplingParams(500 - len(prompt)), f"of-{seed}", seed=seed)
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    wait_until(lambda: engine.load().running == 8, SECONDS)
    ranks.sort(key=lambda one: one.cmdline())  # VLLM::Worker_TP0, VLLM::Worker_TP1
    ranks[1].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    for future in futures:
        assert "vLLM" in str(future.exception(SECONDS)) and isinstance(future.exception(), RolloutError)
    assert time.monotonic() - begin < 20
    told = str(futures[0].exception())
    assert f"process {ranks[1].pid} (VllmWorker-1) died unexpectedly (exit code: -9, by SIGKILL)" in told
    assert max(map(len, told.splitlines())) <= 1000  # vLLM also logs its whole configuration
    for _ in range(2):
        with pytest.raises(RolloutError, match="died unexpectedly"):
            engine.generate([[1]], SamplingParams(4), [0])
    with pytest.raises(RolloutError, match="died unexpectedly"):
        engine.begin_update()
        engine.load_weights([("lm_head.weight", torch.zeros(32, 128))])
    engine.close()
    assert not any(one.is_running() for one in ranks)
    assert left_behind() <= before  # the start of an engine removes what killed workers have left


def test_failed_start_leaves_no_process_and_no_file():
    before = left_behind()
    with pytest.raises(RolloutError, match="could not start"):
        VLLMEngine(FIELDS, tensor_parallel_size=2, block_size=32, num_gpu_blocks_override=3)
    assert not ranks_of(os.getpid())
    assert left_behind() <= before  # the start of an engine removes what killed workers have left


@pytest.mark.parametrize("busy", [True, False])
def test_killed_worker_leaves_no_process(busy):
    before = left_behind()
    code = f"""
        import time
        from workers.rollout.engines.vllm_engine import VLLMEngine
        from workers.rollout.engines.rollout_engine import SamplingParams

        if __name__ == "__main__":
            engine = VLLMEngine({FIELDS!r}, tensor_parallel_size=2)
            print("ready", flush=True)
            while {busy}:
                engine.generate([[1], [2]], SamplingParams(400), [0, 1])
            time.sleep(600)
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        while "ready" not in (line := worker.stdout.readline()):
            assert line
        ranks = ranks_of(worker.pid)
        assert len(ranks) == 2
        time.sleep(0.5)
    finally:
        worker.kill()
        worker.wait()
    _, left = psutil.wait_procs(ranks, 20)
    assert not left
    assert len(left_behind() - before) == 1


def test_folders_of_killed_processes_are_removed_and_those_of_others_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv(vllm_options.SOCKETS, str(tmp_path))
    vllm_options._folder_of.cache_clear()
    abandoned, too_new = tmp_path / "vllm-engine-a", tmp_path / "vllm-engine-b"
    for folder in (abandoned, too_new):
        Path(folder, "model").mkdir(parents=True)
    os.utime(abandoned, (0, 0))
    first = vllm_options.EngineFolder()
    os.utime(first.path, (0, 0))
    second = vllm_options.EngineFolder()  # of the same process
    assert set(tmp_path.iterdir()) == {first.path, too_new} and second.path == first.path
    with monkeypatch.context() as patch, pytest.raises(RolloutError, match="another user"):
        patch.setattr(vllm_options, "_folder_of", lambda pid: (first.path, first.path.stat().st_uid + 1))
        vllm_options.EngineFolder()
    first.remove()
    assert set(tmp_path.iterdir()) == {too_new}
    vllm_options._folder_of.cache_clear()
