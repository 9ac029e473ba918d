"""Models that cannot be built, refused by one rank before any other matters."""

import lm_workers
import pytest
from lm_configs import LLAMA, SIZES
from transformers import LlamaConfig

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerError


@pytest.fixture(scope="module")
def alone(ray_cluster):
    """One rank, for what is refused before any rank matters."""
    with (
        RayResourcePool([1], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(lm_workers.ManyModels)) as group,
    ):
        yield group


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        pytest.param(
            LLAMA,
            {"overrides": {"pipeline_model_parallel_size": 2}},
            "pipeline_model_parallel_size=2, but megatron was initialised with 1",
            id="size",
        ),
        pytest.param(
            LLAMA,
            {"overrides": {"num_layers": 2}},
            "num_layers=2, but the Hugging Face config decides it, and gives 4",
            id="layers",
        ),
        pytest.param(LLAMA, {"overrides": {"hidden_dropuot": 0.1}}, "did you mean 'hidden_dropout'", id="override"),
        pytest.param(LLAMA, {"optimizer": {"learning_rate": 0.1}}, "does not know 'learning_rate'", id="optimizer"),
        pytest.param(LLAMA, {"optimizer": {"lr": -1}}, "lr=-1 is not a number from 0", id="learning rate"),
        pytest.param(LLAMA, {"param_dtype": "fp64"}, "param_dtype='fp64'", id="dtype"),
        pytest.param({"model_type": "gpt2"}, {}, "model_type 'gpt2'", id="model"),
        pytest.param(LlamaConfig(**SIZES, mlp_bias=True), {}, "biases on all linear layers, or on none", id="bias"),
        pytest.param(LlamaConfig(**SIZES, hidden_act="silo"), {}, "did you mean 'silu'", id="activation"),
        pytest.param(
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "rope_type 'linear'",
            id="rope",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(alone, config, options, told):
    with pytest.raises(WorkerError, match=told):
        alone.become(config, **options)
