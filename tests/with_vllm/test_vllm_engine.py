"""VLLMEngine: the contract of all engines, and what is particular to vLLM. Run by `make test-vllm`."""

import re
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs .venv-vllm: run make test-vllm")

import torch
from engine_contract import PROMPTS, SEEDS, EngineContract, Subject
from transformers import LlamaConfig, Qwen2Config

from workers.hf_files import make_model
from workers.rollout.engines import request_engine
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.engines.vllm_engine import VLLMEngine
from workers.rollout.rollout_errors import RolloutError, WeightsError

pytestmark = pytest.mark.timeout(300)  # vLLM starts in 10 s, or in minutes on a busy machine

# vLLM has no kernel for heads smaller than 32.
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, vocab_size=32, max_position_embeddings=512, bos_token_id=1,
                     eos_token_id=2)  # fmt: skip
TIED = Qwen2Config(**{**CONFIG.to_diff_dict(), "tie_word_embeddings": True})
SECONDS = 60


def left_behind():
    """vLLM's sockets have names like b1946ac9-2f8a-...."""
    return {path for path in Path(tempfile.gettempdir()).iterdir() if re.match(r"vllm|[0-9a-f]{8}-", path.name)}


# --- before anything starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, told",
    [
        ({"gpu_memory_utilisation": 0.5}, "no engine argument 'gpu_memory_utilisation'; did you mean 'gpu_memory_util"),
        ({"logprobs_mode": "raw_logprobs"}, "'logprobs_mode' is always 'processed_logits', got 'raw_logprobs'"),
        ({"pipeline_parallel_size": 2}, "'pipeline_parallel_size' is always 1, got 2"),
        ({"enable_chunked_prefill": True}, "'enable_chunked_prefill' is always False on the CPU, got True"),
        ({"enable_return_routed_experts": True}, "Model Runner V2 alone, which needs Triton.*routing_replay='R2'"),
        ({"return_routed_experts": True}, "return_routed_experts=True is not possible"),
        ({"enable_expert_parallel": True}, "'enable_expert_parallel' is always False on the CPU, got True"),
        ({"dtype": "float32"}, "'dtype' is set by VLLMEngine's own argument 'param_dtype'"),
    ],
)
def test_argument_that_cannot_be_is_an_error_before_anything_starts(options, told):
    with pytest.raises(TypeError, match=told):
        VLLMEngine("no such model", **options)


def test_model_must_be_a_config_or_a_folder():
    with pytest.raises(ValueError, match="model=3; expected a Hugging Face config"):
        VLLMEngine(3)
    with pytest.raises(ValueError, match="param_dtype='fp17'"):
        VLLMEngine(CONFIG, param_dtype="fp17")


@pytest.mark.parametrize(
    "options, told",
    [
        ({"max_model_len": 4096}, "max_model_len"),  # the model has 512 positions
        ({"block_size": 32, "num_gpu_blocks_override": 3}, "KV cache"),  # of 96 tokens
    ],
    ids=["config", "cache"],
)
def test_engine_that_cannot_start_says_why_and_leaves_nothing(options, told):
    before = left_behind()
    with pytest.raises(RolloutError, match=rf"vLLM [0-9.]+ could not start: (.|\n)*{told}") as caught:
        VLLMEngine(CONFIG, **options)
    assert caught.value.__cause__ is not None
    assert not torch.distributed.is_initialized()
    assert left_behind() <= before


def test_attention_heads_without_a_kernel_are_told():
    with closing(VLLMEngine(LlamaConfig(**{**CONFIG.to_diff_dict(), "head_dim": 16}))) as engine:
        with pytest.raises(RolloutError, match="head"):
            engine.generate([[1]], SamplingParams(4), [0])


# --- a running engine ----------------------------------------------------------------------------------------


class TestLlama(EngineContract):
    seeded_continuation = False

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls):
        before = left_behind()
        engine = VLLMEngine(CONFIG, seed=5)
        (folder,) = left_behind() - before
        assert not (folder / "model").exists()
        cls.version_0 = engine.generate(PROMPTS, SamplingParams(8), SEEDS)
        yield Subject(engine, CONFIG)
        engine.close()
        engine.close()
        assert left_behind() <= before and not torch.distributed.is_initialized()
        with pytest.raises(RolloutError, match="was closed"):
            engine.generate([[1]], SamplingParams(), [0])

    def test_random_weights_are_those_of_an_hf_engine(self, subject, first):
        subject.check_all(self.version_0, {0: make_model(CONFIG, True, 5, False)})
        assert subject.engine.weight_shapes() == HFEngine(CONFIG, seed=5).weight_shapes()

    def test_tensors_belong_to_the_caller(self, subject, first):
        new = subject.model(8)
        expected = {name: tensor.clone() for name, tensor in subject.weights(new)}
        subject.engine.begin_update()
        for name, tensor in expected.items():
            subject.engine.load_weights([(name, tensor)])
            tensor.fill_(1e3)
        subject.engine.finish_update(2)
        subject.check_next({2: new})

    def test_more_prompts_than_a_step_computes(self, subject, first):
        prompts = [[1 + (row + place) % 30 for place in range(500)] for row in range(9)]  # a step has 2,048 tokens
        running = subject.engine.submit([5, 9, 2], SamplingParams(400), "running", seed=0)
        made = subject.engine.generate(prompts, SamplingParams(4), range(9))
        for prompt, completion in zip(prompts, made, strict=True):
            subject.check(completion, prompt, {1: first})
        (alone,) = subject.engine.generate(prompts[4:5], SamplingParams(4), [4])
        assert alone.token_ids == made[4].token_ids
        subject.engine.abort(["running"])
        assert running.result(SECONDS).finish_reason == "abort"

    def test_update_without_tensors_changes_nothing(self, subject, first):
        before = subject.engine.generate(PROMPTS, SamplingParams(8), SEEDS)
        subject.engine.begin_update()
        subject.engine.finish_update(7)
        after = subject.engine.generate(PROMPTS, SamplingParams(8), SEEDS)
        assert [one.token_ids for one in after] == [one.token_ids for one in before]
        assert after[0].weight_versions == [7] * 8

    @pytest.mark.parametrize(
        "change, told",
        [
            (lambda named: [("lm_head.wait", named[0][1])], "has a tensor 'lm_head.wait', but the model has none"),
            (lambda named: [(named[0][0], named[0][1][:-1])], r"with shape \(31, 64\), but the model's has shape \(32"),
            (lambda named: [named[0], named[1], named[1]], f"has {'model.layers.0.self_attn.q_proj.weight'!r} twice"),
        ],
        ids=["name", "shape", "twice"],
    )
    def test_tensor_that_does_not_fit_is_refused(self, subject, first, change, told):
        named = subject.weights(subject.model(8))
        subject.engine.begin_update()
        with pytest.raises(WeightsError, match=told):
            subject.engine.load_weights(change(named))
        subject.engine.abandon_update()

    def test_update_with_missing_tensors_cannot_be_finished(self, subject, first):
        named = subject.weights(subject.model(8))
        subject.engine.begin_update()
        subject.engine.load_weights(named[:-2])
        with pytest.raises(WeightsError, match=rf"2 of {len(named)} tensors of the update are missing"):
            subject.engine.finish_update(2)
        subject.engine.abandon_update()
        with pytest.raises(RolloutError, match="no complete weights"):
            subject.engine.generate([[1]], SamplingParams(), [0])
        subject.update(first, 1)
        with pytest.raises(RolloutError, match=r"no update has begun; call begin_update"):
            subject.engine.load_weights(named)

    def test_weights_are_not_read_before_all_have_come(self, subject, first):
        named = subject.weights(subject.model(8))
        subject.engine.begin_update()
        subject.engine.load_weights(named[:-2])
        with pytest.raises(RolloutError, match=r"read_weights\(\): 2 tensors of the update have not come"):
            subject.engine.read_weights([named[0][0]])
        subject.engine.load_weights(named[-2:])
        subject.engine.read_weights([named[0][0]])
        with pytest.raises(RolloutError, match=r"the model has no tensor 'lm_head.wait'"):
            subject.engine.read_weights(["lm_head.wait"])
        subject.engine.finish_update(2)

    def test_second_update_begins_over_a_partial_one(self, subject, first):
        """As when the first one's sender has died without a word."""
        new = subject.model(8)
        futures = subject.run(self.long)
        subject.engine.begin_update()
        subject.engine.load_weights(subject.weights(subject.model(9))[:-3])
        subject.update(new, 2)
        subject.check_all(futures, {1: first, 2: new})

    def test_sleeping_engine_keeps_requests_and_weights(self, subject, first):
        futures = subject.run(self.long)
        assert 0 < subject.engine.load().cache_usage <= 1
        subject.engine.sleep()
        with pytest.raises(RolloutError, match="asleep"):
            subject.engine.generate([[1]], SamplingParams(), [0])
        assert subject.engine.keeps_weights
        subject.engine.wake_up()
        subject.check_all(futures, {1: first})
        assert subject.engine.load().cache_usage == 0

    def test_weights_that_are_not_finite_are_told(self, subject, first):
        broken = subject.model(8)
        with torch.no_grad():
            broken.lm_head.weight.fill_(torch.nan)
        subject.update(broken, 2)
        with pytest.raises(RolloutError, match="logits are not finite"):
            subject.engine.generate(PROMPTS, SamplingParams(4), SEEDS)
        subject.update(first, 1)
        subject.check_next({1: first})

    def test_step_that_fails_is_told_and_the_engine_goes_on(self, subject, first, monkeypatch):
        def fails(*args, **kwargs):
            raise MemoryError("no memory for the hidden states")

        executor = subject.engine._engine.engine_core.engine_core.model_executor
        futures = subject.run(self.long)
        with monkeypatch.context() as patch:
            patch.setattr(executor, "execute_model", fails)
            errors = [future.exception(SECONDS) for future in futures]
        for error in errors:
            assert isinstance(error, RolloutError) and isinstance(error.__cause__, MemoryError)
            assert "failed: MemoryError: no memory for the hidden states" in str(error)
        subject.until(lambda load: subject.idle)
        subject.check_all(subject.engine.generate(PROMPTS, SamplingParams(40), SEEDS), {1: first})

    def test_keys_and_values_of_a_connector_are_reset_with_an_update(self, subject, first, monkeypatch):
        """Such as those of ``kv_offloading_size``."""
        scheduler, reset = subject.engine._engine.engine_core.engine_core.scheduler, []
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "reset_connector_cache", lambda: not reset.append("done"))
            subject.update(first, 1)
            subject.engine.generate([[1]], SamplingParams(1), [0])
            assert reset
            patch.setattr(scheduler, "reset_connector_cache", lambda: False)
            subject.update(first, 1)
            with pytest.raises(RolloutError, match="could not reset the cache of its KV connector"):
                subject.engine.generate([[1]], SamplingParams(1), [0])
            subject.until(lambda load: not subject.engine._serving)  # or it may fail once more
        subject.check_next({1: first})

    def test_idle_engine_keeps_its_prefix_cache(self, subject, first, monkeypatch):
        """Its thread ends meanwhile."""
        monkeypatch.setattr(request_engine, "IDLE_SECONDS", 0.01)
        subject.engine.generate([[1]], SamplingParams(1), [0])
        subject.until(lambda load: not subject.engine._serving)
        reset = []
        monkeypatch.setattr(subject.engine, "_reset_caches", lambda: reset.append("done"))
        subject.engine.generate([[1]], SamplingParams(1), [0])
        assert not reset

    def test_temperature_that_vllm_would_change_is_refused(self, subject, first):
        with pytest.raises(ValueError, match=r"temperature=0.001; VLLMEngine has 0, and from 0.01 on"):
            subject.engine.generate([[1]], SamplingParams(4, temperature=0.001), [0])
        with pytest.raises(ValueError, match=r"stop_token_ids \[32\] are outside"):
            subject.engine.generate([[1]], SamplingParams(4, stop_token_ids=(3, 32)), [0])

    def test_any_integer_is_a_seed(self, subject, first):
        seeds = [-1, 0, 2**70, -(2**40)]
        one, two = (subject.engine.generate([[5, 9]] * 4, SamplingParams(20), seeds) for _ in range(2))
        assert [c.token_ids for c in one] == [c.token_ids for c in two]
        assert len({tuple(c.token_ids) for c in one}) == 4

    def test_second_engine_in_a_process_is_refused(self, subject, first):
        with pytest.raises(RolloutError, match="has a default process group"):
            VLLMEngine(CONFIG)

    def test_many_threads_submit_and_abort(self, subject, first):
        subject.check_threads(40)


class TestTiedWeightsAndAFullCache(EngineContract):
    """The contract with tied weights and biases, and so small a cache that vLLM preempts most of the requests."""

    seeded_continuation = False
    updates = 5

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("model")
        make_model(TIED, True, 0, False).save_pretrained(folder)
        engine = VLLMEngine(folder, block_size=32, num_gpu_blocks_override=18, enable_prefix_caching=False)
        yield Subject(engine, TIED)
        engine.close()

    def test_cache_is_smaller_than_the_requests(self, subject, first):
        """Eight requests of 200 tokens and more take 56 blocks; there are 18."""
        futures = subject.submit(self.long)
        most = 0.0
        while not all(future.done() for future in futures):
            most = max(most, subject.engine.load().cache_usage)
            time.sleep(0.001)
        assert most > 0.8
        unbroken = [future.result().token_ids for future in futures]
        alone = [
            subject.engine.generate([prompt], SamplingParams(self.long), [seed])[0]
            for prompt, seed in zip(PROMPTS[:3], SEEDS, strict=False)
        ]
        assert [one.token_ids for one in alone] == unbroken[:3]


def test_bfloat16():
    """With biases, without tied weights. Rounding errors of about 0.4 % of a logit; the weights are those that
    `plain_model` begins with, so logits are small."""
    config = Qwen2Config(**{**TIED.to_diff_dict(), "tie_word_embeddings": False})

    def model_of(seed):
        model = make_model(config, True, seed, False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.02)
        return model

    with closing(VLLMEngine(config, param_dtype="bf16", load_format="safetensors")) as engine:
        subject = Subject(engine, config, model_of=model_of, atol=0.02)
        for version in (1, 2):
            model = subject.model(version)
            subject.update(model, version)
            subject.check_read(model)  # float32 was sent
            subject.check_all(engine.generate(PROMPTS, SamplingParams(12), SEEDS), {version: model})
        generated = engine.generate(PROMPTS, SamplingParams(12), SEEDS)
        saved = [(name, engine.read_raw([name])[0].clone()) for name in engine.raw_weights()]
        subject.update(subject.model(1), 3)
        with pytest.raises(RolloutError, match=r"load_raw\(\): no update has begun"):
            engine.load_raw(saved)
        engine.begin_update()
        engine.load_raw(saved)
        engine.finish_update(2)
        assert engine.generate(PROMPTS, SamplingParams(12), SEEDS) == generated
        assert all(torch.equal(tensor, *engine.read_raw([name])) for name, tensor in saved)
