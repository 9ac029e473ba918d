"""Mixtures of experts in VLLMEngine: after an update it computes with each expert and holds each one's bytes. vLLM
reorders experts for its kernels on the CPU. Run by `make test-vllm`."""

import copy
import re
from contextlib import closing, contextmanager

import pytest

pytest.importorskip("vllm", reason="needs .venv-vllm: run make test-vllm")

import torch
from engine_contract import PROMPTS, SEEDS, Subject
from test_vllm_engine import CONFIG
from transformers import AutoConfig

from workers.hf_files import make_model
from workers.rollout.engines import vllm_worker
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.engines.vllm_engine import VLLMEngine
from workers.weight_sync import WeightReceiver, WeightSender, WeightSyncError

pytestmark = pytest.mark.timeout(300)  # vLLM starts in 10 s, or in minutes on a busy machine

USUAL = {name: CONFIG.to_dict()[name] for name in (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)} | {"initializer_range": 0.2, "max_position_embeddings": 64, "num_experts_per_tok": 2}  # fmt: skip
KINDS = {
    # 24 is no multiple of what the kernels need, so vLLM pads the experts.
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "head_dim": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 32},
    "olmoe": {"num_experts": 6, "intermediate_size": 32},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
GREEDY = SamplingParams(6, temperature=0.0)


class Receiver(WeightReceiver):
    def __init__(self, engine):
        super().__init__()
        self.engine = engine


def config_of(kind):
    return AutoConfig.for_model(kind, **USUAL, **KINDS[kind])


def model_of(config, seed):
    """Another random model, with negative zeros, which take part in the proof."""
    model = make_model(copy.deepcopy(config), True, seed, False)
    model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"][1, 3, 4:9] = -0.0
    return model


def same_completions(engine, plain, atol=1e-5):
    for one, other in zip(engine.generate(PROMPTS, GREEDY, SEEDS), plain.generate(PROMPTS, GREEDY, SEEDS), strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=atol, rtol=0)


@contextmanager
def updated(kind, **options):
    """An engine and an `HFEngine` after two updates that were proved, the sender to the first, and the last model."""
    config = config_of(kind)
    plain = HFEngine(copy.deepcopy(config), random_weights=True, seed=1)
    with closing(VLLMEngine(copy.deepcopy(config), random_weights=True, seed=1, max_model_len=64, **options)) as engine:
        same_completions(engine, plain)
        senders = [WeightSender("device", neighbour=Receiver(one), verify="full") for one in (engine, plain)]
        for version in (1, 2):
            model = model_of(config, version)
            assert [sender.send(version, model.state_dict().items()).proved for sender in senders] == ["engine"] * 2
            same_completions(engine, plain)
            Subject(engine).check_read(model)
        yield engine, plain, senders[0], model


@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_experts_are_computed_with_and_proved(kind):
    with updated(kind) as (engine, plain, sender, model):
        raw = list(engine.raw_weights())
        kept = [(name, tensor.clone()) for name, tensor in zip(raw, engine.read_raw(raw), strict=True)]
        sender.send(3, model_of(config_of(kind), 3).state_dict().items())
        engine.begin_update()
        engine.load_raw(kept)  # as a copy from another worker
        engine.finish_update(4)
        same_completions(engine, plain)
        Subject(engine).check_read(model)


def test_experts_that_vllm_exchanges_are_both_named(monkeypatch):
    """As by a wrong table of its experts."""
    config = config_of("qwen3_moe")
    engine = VLLMEngine(copy.deepcopy(config), random_weights=True, seed=1, max_model_len=64, param_dtype="bf16")
    sender = WeightSender("device", neighbour=(receiver := Receiver(engine)), verify="fingerprint")
    right = vllm_worker.one_by_one

    def wrong(name, tensor):
        for own, part in right(name, tensor):
            swap = {".2.": ".4.", ".4.": ".2."} if "layers.1." in name else {}
            number = re.search(r"experts(\.\d+\.)", own)[1]
            yield own.replace(f"experts{number}", f"experts{swap.get(number, number)}"), part

    with closing(engine):
        assert sender.send(1, model_of(config, 1).state_dict().items()).proved == "engine"
        monkeypatch.setattr(vllm_worker, "one_by_one", wrong)
        with pytest.raises(WeightSyncError, match=r"VLLMEngine does not hold .*version 2: 4 tensors differ") as caught:
            sender.send(2, model_of(config, 2).state_dict().items())
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{part}"
            assert f"{name}[2] (has the bytes of {name}[4])" in str(caught.value)
            assert f"{name}[4] (has the bytes of {name}[2])" in str(caught.value)
        assert receiver.weight_version is None
        monkeypatch.setattr(vllm_worker, "one_by_one", right)
        assert sender.send(3, model_of(config, 3).state_dict().items()).proved == "engine"


def test_two_processes_share_experts():
    """Each has half of every expert."""
    with updated("qwen3_moe", tensor_parallel_size=2):
        pass
