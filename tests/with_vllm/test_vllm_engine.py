"""VLLMEngine: the contract of all engines, and what is particular to vLLM. Run by `make test-vllm`."""

import pytest

pytest.importorskip("vllm", reason="needs .venv-vllm: run make test-vllm")

from engine_contract import EngineContract, Subject
from transformers import LlamaConfig

from workers.rollout.vllm_engine import VLLMEngine

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,  # vLLM has no kernel for heads smaller than 32
    num_key_value_heads=1,
    vocab_size=32,
    max_position_embeddings=512,
)


@pytest.fixture(scope="module")
def subject():
    engine = VLLMEngine(CONFIG)
    yield Subject(engine, CONFIG)
    engine.close()


class TestContract(EngineContract):
    seeded_continuation = False
