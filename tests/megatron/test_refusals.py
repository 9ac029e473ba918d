"""What megatron-core cannot do as it is installed is refused when the model is set up, with the reason."""

import importlib.util

import pytest
import torch
from lm_configs import LLAMA
from lm_workers import make_transformer_config
from megatron_workers import make_config
from omegaconf import OmegaConf

from single_controller import WorkerError
from workers import init_model_parallel_config, transformer_config

without_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed: it can"
)


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


class TestTwoStagesWithVirtualOnes:
    SILENTLY_WRONG = "silently wrong.*overlap_p2p_comm=True and batch_p2p_comm=False"

    @pytest.mark.parametrize("virtual", [2, 3])
    def test_are_refused_with_the_remedy(self, virtual):
        with pytest.raises(ValueError, match=self.SILENTLY_WRONG):
            made(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual)

    def test_half_the_remedy_is_none(self):
        with pytest.raises(ValueError, match=self.SILENTLY_WRONG):
            made(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, batch_p2p_comm=False)

    def test_the_remedy_works(self):
        config = made(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        )
        assert config.overlap_p2p_comm and not config.batch_p2p_comm

    @pytest.mark.parametrize(("stages", "virtual"), [(2, None), (2, 1), (4, 2)])
    def test_other_pipelines_are_right(self, stages, virtual):
        config = made(pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual)
        assert config.pipeline_model_parallel_size == stages

    def test_what_megatron_was_initialised_with_counts_without_being_said(self, four):
        four.set_up(2, 2, virtual_pipeline_model_parallel_size=2)
        with pytest.raises(WorkerError, match=self.SILENTLY_WRONG):
            four.run(make_config, {})


@without_transformer_engine
def test_context_parallelism_that_megatron_was_initialised_with(four):
    four.set_up(2, context_parallel_size=2)
    with pytest.raises(WorkerError, match="context_parallel_size=2 needs Transformer Engine"):
        four.run(make_config, {})


class TestOverridesOfAModel:
    """`transformer_config(overrides=)`: what the parallel sizes and the Hugging Face config say holds."""

    @pytest.mark.parametrize(
        ("sizes", "overrides", "told"),
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
                {"pp": 2, "virtual_pipeline_model_parallel_size": 2},
                {"virtual_pipeline_model_parallel_size": None},
                "virtual_pipeline_model_parallel_size=None, .*initialised with 2",
            ),
        ],
        ids=["pp", "tp", "cp", "vpp", "no vpp"],
    )
    def test_other_sizes_than_megatron_was_initialised_with(self, four, sizes, overrides, told):
        four.set_up(**sizes)
        with pytest.raises(WorkerError, match=f"{told}; leave it out") as caught:
            four.run(make_transformer_config, LLAMA, overrides)
        assert isinstance(caught.value.__cause__, ValueError)

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
    def test_what_the_hugging_face_config_decides(self, name, value, given):
        with pytest.raises(ValueError) as caught:
            transformer_config(LLAMA, overrides={name: value})
        assert str(caught.value) == (
            f"{name}={value!r}, but the Hugging Face config decides it, and gives {given!r}; leave it out, or change "
            "the Hugging Face config"
        )

    def test_the_same_values_and_other_fields_are_taken(self, four):
        four.set_up(2, 2)
        overrides = {
            "num_layers": 4,
            "add_qkv_bias": False,
            "tensor_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 1,
            "hidden_dropout": 0.1,
        }
        found = four.run(make_transformer_config, LLAMA, overrides)
        assert found == [{**overrides, "virtual_pipeline_model_parallel_size": None}] * 4

    @without_transformer_engine
    @pytest.mark.parametrize(
        ("sizes", "overrides"), [({"tp": 2}, {"sequence_parallel": True}), ({"context_parallel_size": 2}, {})]
    )
    def test_what_needs_transformer_engine(self, four, sizes, overrides):
        four.set_up(**sizes)
        with pytest.raises(WorkerError, match="needs Transformer Engine"):
            four.run(make_transformer_config, LLAMA, overrides)

    def test_two_stages_with_virtual_ones(self, four):
        four.set_up(1, 2, virtual_pipeline_model_parallel_size=2)
        with pytest.raises(WorkerError, match=TestTwoStagesWithVirtualOnes.SILENTLY_WRONG):
            four.run(make_transformer_config, LLAMA, {})
        found = four.run(make_transformer_config, LLAMA, {"overlap_p2p_comm": True, "batch_p2p_comm": False})
        assert found == [{"overlap_p2p_comm": True, "batch_p2p_comm": False}] * 4


class TestKeys:
    def test_all_of_verls(self, four):
        four.set_up(2, 2)
        found = four.run(
            make_config,
            {
                "sequence_parallel": False,
                "param_dtype": "bf16",
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_rank": 0,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_rank": None,
                "virtual_pipeline_model_parallel_size": None,
            },
        )
        assert (
            found
            == [
                {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 2,
                    "virtual_pipeline_model_parallel_size": None,
                    "params_dtype": torch.bfloat16,
                    "sequence_parallel": False,
                }
            ]
            * 4
        )

    def test_sizes_are_those_that_megatron_was_initialised_with(self, four):
        four.set_up(4)
        found = four.run(make_config, {})
        assert {config["tensor_model_parallel_size"] for config in found} == {4}
        assert {config["params_dtype"] for config in found} == {torch.float32}

    @pytest.mark.parametrize(
        "key", ["tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"]
    )
    def test_another_size_than_megatron_was_initialised_with(self, four, key):
        four.set_up(2)
        with pytest.raises(WorkerError, match=f"{key}=4") as caught:
            four.run(make_config, {key: 4})
        assert isinstance(caught.value.__cause__, ValueError)

    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("sequence_paralel", "sequence_parallel"),
            ("param_dtpye", "param_dtype"),
            ("tensor_parallel_size", "context_parallel_size"),
            ("pipeline_model_parallel_ranks", "pipeline_model_parallel_rank"),
        ],
    )
    def test_an_unknown_one_names_the_closest(self, key, meant):
        with pytest.raises(ValueError, match=rf"init_model_parallel_config\(\) does not know '{key}'.*'.*") as caught:
            made(**{key: 1})
        assert f"did you mean '{meant}'?" in str(caught.value) or key == "tensor_parallel_size"

    def test_an_unknown_one_like_no_other(self):
        with pytest.raises(ValueError, match=r"does not know 'colour'$"):
            made(colour="red")

    def test_a_plain_dict_is_as_good(self):
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

    def test_a_dtype_itself(self):
        assert init_model_parallel_config({"param_dtype": torch.bfloat16}).params_dtype is torch.bfloat16

    @pytest.mark.parametrize("name", ["fp8", "int32", "", 16])
    def test_what_is_none(self, name):
        with pytest.raises(ValueError, match=r"param_dtype=.*bf16"):
            made(param_dtype=name)
