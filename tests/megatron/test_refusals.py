"""Configs that the installed megatron-core does not support are rejected, with the reason.

Most tests need no processes: `initialised` replaces the sizes that megatron reports. The tests with `four` check that
these sizes come from megatron.
"""

import importlib.util

import pytest
import torch
from lm_configs import LLAMA
from megatron_workers import make_config, make_transformer_config
from omegaconf import OmegaConf

from single_controller import WorkerError
from workers import init_model_parallel_config, transformer_config

without_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="needs an environment without Transformer Engine"
)


@pytest.fixture
def initialised(monkeypatch):
    """``initialised(tp=2)``: act as if megatron had been initialized with this size."""

    def of(tp=1, pp=1, vpp=None, cp=1):
        sizes = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "context_parallel_size": cp,
        }
        monkeypatch.setattr("workers.megatron.config._parallel_sizes", lambda: sizes)

    return of


def made(**keys):
    return init_model_parallel_config(OmegaConf.create(keys))


@without_transformer_engine
def test_sequence_parallelism_needs_transformer_engine():
    with pytest.raises(ValueError, match=r"sequence_parallel=True needs Transformer Engine.*sequence_parallel=False"):
        made(sequence_parallel=True, tensor_model_parallel_size=2)


@without_transformer_engine
def test_context_parallelism_needs_transformer_engine():
    with pytest.raises(ValueError, match=r"context_parallel_size=2 needs Transformer Engine.*use 1"):
        made(context_parallel_size=2)


class TestTwoStagesWithVirtualStages:
    WRONG_RESULTS = "silently gives wrong results.*overlap_p2p_comm=True and batch_p2p_comm=False"

    @pytest.mark.parametrize("virtual", [2, 3])
    def test_rejected_with_a_workaround(self, virtual):
        with pytest.raises(ValueError, match=self.WRONG_RESULTS):
            made(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual)

    def test_half_the_workaround_is_rejected(self):
        with pytest.raises(ValueError, match=self.WRONG_RESULTS):
            made(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, batch_p2p_comm=False)

    def test_workaround_is_accepted(self):
        config = made(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        )
        assert config.overlap_p2p_comm and not config.batch_p2p_comm

    @pytest.mark.parametrize(("stages", "virtual"), [(2, None), (2, 1), (4, 2)])
    def test_other_pipelines_are_accepted(self, stages, virtual):
        config = made(pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual)
        assert config.pipeline_model_parallel_size == stages

    def test_rejected_when_megatron_was_initialized_with_them(self, four):
        four.set_up(2, 2, virtual_pipeline_model_parallel_size=2)
        with pytest.raises(WorkerError, match=self.WRONG_RESULTS):
            four.run(make_config, {})
        with pytest.raises(WorkerError, match=self.WRONG_RESULTS):
            four.run(make_transformer_config, LLAMA, {})
        found = four.run(make_transformer_config, LLAMA, {"overlap_p2p_comm": True, "batch_p2p_comm": False})
        assert found == [{"overlap_p2p_comm": True, "batch_p2p_comm": False}] * 4


@without_transformer_engine
def test_context_parallelism_set_when_megatron_was_initialized(initialised):
    initialised(tp=2, cp=2)
    with pytest.raises(ValueError, match="context_parallel_size=2 needs Transformer Engine"):
        made()


class TestModelOverrides:
    """`transformer_config(overrides=)` cannot contradict the parallel sizes or the Hugging Face config."""

    @pytest.mark.parametrize(
        ("sizes", "overrides", "message"),
        [
            ({}, {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2, .*initialised with 1"),
            ({"tp": 2}, {"tensor_model_parallel_size": 1}, "tensor_model_parallel_size=1, .*initialised with 2"),
            ({}, {"context_parallel_size": 2}, "context_parallel_size=2, .*initialised with 1"),
            (
                {"pp": 2},
                {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False},
                "virtual_pipeline_model_parallel_size=2, .*initialised with None",
            ),
            (
                {"pp": 2, "vpp": 2},
                {"virtual_pipeline_model_parallel_size": None},
                "virtual_pipeline_model_parallel_size=None, .*initialised with 2",
            ),
        ],
        ids=["pp", "tp", "cp", "vpp", "no vpp"],
    )
    def test_sizes_that_contradict_the_initialization(self, initialised, sizes, overrides, message):
        initialised(**sizes)
        with pytest.raises(ValueError, match=f"{message}; remove it"):
            transformer_config(LLAMA, overrides=overrides)

    @pytest.mark.parametrize(
        ("name", "value", "given"),
        [
            ("num_layers", 2, 4),
            ("hidden_size", 32, 64),
            ("ffn_hidden_size", 48, 96),
            ("ffn_hidden_size", None, 96),
            ("num_attention_heads", 8, 4),
            ("num_query_groups", 4, 2),
            ("kv_channels", 8, 16),
            ("normalization", "LayerNorm", "RMSNorm"),
            ("gated_linear_unit", False, True),
            ("add_bias_linear", True, False),
            ("add_qkv_bias", True, False),
            ("attention_output_gate", True, False),
            ("multi_latent_attention", True, False),
            ("num_moe_experts", 4, None),
            ("qk_layernorm", True, False),
            ("softmax_type", "learnable", "vanilla"),
        ],
    )
    def test_fields_determined_by_the_hugging_face_config(self, name, value, given):
        with pytest.raises(ValueError) as caught:
            transformer_config(LLAMA, overrides={name: value})
        assert str(caught.value) == (
            f"{name}={value!r} contradicts the Hugging Face config, which has {given!r}; remove the override, or "
            "change the Hugging Face config"
        )

    def test_equal_values_and_other_fields_are_accepted(self, four):
        four.set_up(2, 2)
        overrides = {"num_layers": 4, "add_qkv_bias": False, "tensor_model_parallel_size": 2,
                     "virtual_pipeline_model_parallel_size": 1, "hidden_dropout": 0.1}  # fmt: skip
        found = four.run(make_transformer_config, LLAMA, overrides)
        assert found == [{**overrides, "virtual_pipeline_model_parallel_size": None}] * 4

    @without_transformer_engine
    def test_dense_models_have_no_sequence_parallelism(self, initialised):
        initialised(tp=2)
        with pytest.raises(ValueError, match="sequence_parallel=True: models are built of megatron-core"):
            transformer_config(LLAMA, overrides={"sequence_parallel": True})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 4}, "num_key_value_heads=2 is not divisible by tensor_model_parallel_size=4"),
        ({"pp": 8}, "num_hidden_layers=4 is not divisible by 8 pipeline stages"),
        ({"pp": 4, "vpp": 2}, "num_hidden_layers=4 is not divisible by 8 pipeline stages"),
    ],
)
def test_sizes_that_do_not_divide_the_model(initialised, sizes, message):
    initialised(**sizes)
    with pytest.raises(ValueError, match=message):
        transformer_config(LLAMA)


class TestKeys:
    def test_all_verl_keys(self, four):
        four.set_up(2, 2)
        kept = {"sequence_parallel": False, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": None}  # fmt: skip
        ranks = {"pipeline_model_parallel_rank": 0, "virtual_pipeline_model_parallel_rank": None}
        found = four.run(make_config, {**kept, **ranks, "param_dtype": "bf16"})
        assert found == [{**kept, "params_dtype": torch.bfloat16}] * 4

    def test_sizes_default_to_the_initialized_ones(self, four):
        four.set_up(4)
        found = four.run(make_config, {})
        assert {config["tensor_model_parallel_size"] for config in found} == {4}
        assert {config["params_dtype"] for config in found} == {torch.float32}

    @pytest.mark.parametrize(
        "key", ["tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"]
    )
    def test_size_that_contradicts_the_initialization(self, initialised, key):
        initialised(tp=2)
        with pytest.raises(ValueError, match=f"{key}=4"):
            made(**{key: 4})

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("sequence_paralel", "sequence_parallel"),
            ("param_dtpye", "param_dtype"),
            ("tensor_parallel_size", "context_parallel_size"),
            ("pipeline_model_parallel_ranks", "pipeline_model_parallel_rank"),
        ],
    )
    def test_unknown_key_error_suggests_the_closest(self, key, meant):
        with pytest.raises(ValueError, match=rf"init_model_parallel_config\(\): unknown name '{key}'.*'.*") as caught:
            made(**{key: 1})
        assert f"did you mean '{meant}'?" in str(caught.value) or key == "tensor_parallel_size"

    def test_unknown_key_without_a_similar_one(self):
        with pytest.raises(ValueError, match=r"unknown name 'colour'$"):
            made(colour="red")

    def test_plain_dict_is_accepted(self):
        assert init_model_parallel_config({"param_dtype": "fp16"}).params_dtype is torch.float16


class TestDtypes:
    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("fp32", torch.float32),
            ("float32", torch.float32),
            ("torch.float32", torch.float32),
            ("bf16", torch.bfloat16),
            ("bfloat16", torch.bfloat16),
            ("torch.bfloat16", torch.bfloat16),
            ("fp16", torch.float16),
            ("half", torch.float16),
        ],
    )
    def test_names(self, name, dtype):
        config = made(param_dtype=name)
        assert config.params_dtype is config.pipeline_dtype is dtype
        assert (config.bf16, config.fp16) == (dtype is torch.bfloat16, dtype is torch.float16)

    def test_torch_dtype(self):
        assert init_model_parallel_config({"param_dtype": torch.bfloat16}).params_dtype is torch.bfloat16

    @pytest.mark.parametrize("name", ["fp8", "int32", "", 16])
    def test_unknown_names(self, name):
        with pytest.raises(ValueError, match=r"param_dtype=.*bf16"):
            made(param_dtype=name)


@pytest.mark.parametrize("installed", [None, object()])
def test_models_have_no_context_parallelism(initialised, monkeypatch, installed):
    """Also with Transformer Engine: they are built of megatron-core's own layers."""
    initialised(tp=2, cp=2)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: installed)
    with pytest.raises(ValueError, match="context_parallel_size=2 and sequence_parallel=False: models are built"):
        transformer_config(LLAMA)
