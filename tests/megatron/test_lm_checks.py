"""What MegatronLMWorker and its model check locally, before other ranks are involved; without processes."""

from types import SimpleNamespace

import pytest
import torch
from lm_configs import LLAMA, SIZES
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from workers import MegatronLMWorker, read_args, transformer_config
from workers.data.micro_batches import cut_by_tokens
from workers.megatron.config import scaled_rope
from workers.megatron.hf_weights import check_state_dict, read_folder
from workers.megatron.lm_worker import checked_batch
from workers.megatron.megatron_optimizer import AdamOptions
from workers.megatron.megatron_train_worker import MegatronTrainWorker
from workers.megatron.megatron_worker import MegatronWorker
from workers.train.args_checks import TrainArgsError


@pytest.mark.parametrize("size", ["100KB", "1GB"])
def test_only_the_models_own_files_are_read(size, tmp_path):
    """Mistral's folders have the weights twice."""
    model = AutoModelForCausalLM.from_config(LLAMA)
    model.save_pretrained(tmp_path, max_shard_size=size)
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert read_folder(tmp_path).keys() == model.state_dict().keys()


def test_misspelt_field_of_a_config(monkeypatch):
    monkeypatch.setattr(MegatronLMWorker, "needs_cuda", False)
    monkeypatch.setattr(MegatronLMWorker, "initialize_model_parallel", lambda self: None)
    with pytest.raises(ValueError, match="did you mean 'num_hidden_layers'"):
        MegatronLMWorker({"model_type": "llama", "num_hidden_layer": 4})


def test_layout_is_registered_when_all_its_groups_exist(monkeypatch):
    """A concurrent method may end while another one initializes megatron."""
    from megatron.core import parallel_state

    monkeypatch.setattr(MegatronWorker, "needs_cuda", False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def have(*names):
        for name in names:
            monkeypatch.setattr(parallel_state, f"_{name}_GROUP", group)

    worker = MegatronWorker()
    have("DATA_PARALLEL", "CONTEXT_PARALLEL", "MODEL_PARALLEL")
    assert worker._report().axes == {}
    have("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "EXPERT_MODEL_PARALLEL")
    assert worker._report().axes == {"dp": 0, "cp": 0, "tp": 0, "pp": 0}


class TestBatch:
    @pytest.mark.parametrize(
        ("real", "counted"),
        [
            ([[0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0]]),
            ([[0, 0, 0, 1, 0]], [[0, 0, 0, 0, 0]]),
            ([[1, 1, 1, 1, 1]], [[0, 1, 1, 1, 1]]),
            ([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]], [[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]]),
        ],
        ids=["all padding", "one token", "no padding", "either side"],
    )
    def test_which_tokens_count(self, real, counted):
        """Only tokens predicted from a real token count; a loss_mask that counts any other is rejected."""
        real, counted = torch.tensor(real), torch.tensor(counted)
        ids = torch.zeros_like(real)
        assert torch.equal(checked_batch(ids, real)["loss_mask"], counted.float())
        assert torch.equal(checked_batch(ids, real, counted)["loss_mask"], counted.float())
        for row, token in (counted == 0).nonzero().tolist():
            mask = counted.float()
            mask[row, token] = 0.5
            message = rf"loss_mask of row {row} counts token {token}, .* set loss_mask to 0"
            with pytest.raises(ValueError, match=message):
                checked_batch(ids, real, mask)

    def test_without_an_attention_mask_all_tokens_but_the_first_count(self):
        ids = torch.zeros(2, 5).long()
        data = checked_batch(ids)
        assert data["attention_mask"].all() and data["loss_mask"].tolist() == [[0, 1, 1, 1, 1]] * 2
        with pytest.raises(ValueError, match="loss_mask of row 0 counts token 0"):
            checked_batch(ids, None, torch.ones(2, 5))

    def test_padding_row_runs_through_the_model_and_does_not_count(self):
        data = checked_batch(torch.zeros(2, 3).long(), torch.tensor([[0, 0, 0], [0, 1, 1]]))
        assert data["attention_mask"].tolist() == [[True, False, False], [False, True, True]]
        assert len(cut_by_tokens(data, max_tokens=6)) == 1

    def test_padding_between_tokens_is_rejected(self):
        with pytest.raises(ValueError, match="attention_mask of row 1 has padding between its tokens"):
            checked_batch(torch.zeros(2, 5).long(), torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 1, 1]]))

    def test_callers_tensors_are_not_changed(self):
        given = [torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), torch.zeros(1, 3)]
        checked_batch(*given)
        assert all(tensor.eq(0).all() for tensor in given)

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ((torch.zeros(2, 3),), "must be integers .*; got torch.float32"),
            ((torch.zeros(2, 1).long(),), "at least two tokens"),
            ((torch.zeros(6).long(),), r"\(rows, tokens\)"),
            ((torch.zeros(2, 3).long(), torch.ones(2, 4)), r"attention_mask has shape \(2, 4\); expected"),
            ((torch.zeros(2, 3).long(), None, torch.ones(2, 4)), r"loss_mask has shape \(2, 4\); expected"),
        ],
        ids=["floats", "one token", "one row without a dimension", "attention_mask", "loss_mask"],
    )
    def test_wrong_shapes_and_types(self, batch, message):
        with pytest.raises(ValueError, match=message):
            checked_batch(*batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda sd: sd.pop("model.norm.weight"), "lacks 'model.norm.weight'", id="missing"),
        pytest.param(lambda sd: sd.update({"model.norm.wieght": torch.ones(64)}), "did you mean", id="unknown"),
        pytest.param(lambda sd: sd.update({"lm_head.weight": torch.ones(7, 64)}), r"\(7, 64\); expected", id="shape"),
    ],
)
def test_wrong_state_dict(change, message):
    state = AutoModelForCausalLM.from_config(LLAMA).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_state_dict("load()", state, shapes)
    change(state)
    with pytest.raises(ValueError, match=message):
        check_state_dict("load()", state, shapes)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        pytest.param(LLAMA, {"param_dtype": "fp64"}, "param_dtype='fp64'", id="dtype"),
        pytest.param(LLAMA, {"overrides": {"hidden_dropuot": 0.1}}, "did you mean 'hidden_dropout'", id="override"),
        pytest.param(type("GPT2", (), {"model_type": "gpt2"}), {}, "model_type 'gpt2' is not supported", id="model"),
        pytest.param(LlamaConfig(**SIZES, mlp_bias=True), {}, "biases to all linear layers or to none", id="bias"),
        pytest.param(LlamaConfig(**SIZES, hidden_act="silo"), {}, "did you mean 'silu'", id="activation"),
        pytest.param(
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "rope_type 'dynamic' is not supported",
            id="rope",
        ),
        pytest.param(
            MistralConfig(**SIZES, sliding_window=8),
            {"overrides": {"masked_softmax_fusion": True}},
            "which megatron-core's fused softmax ignores",
            id="fused window",
        ),
        pytest.param(
            MistralConfig(**SIZES, sliding_window=8),
            {"overrides": {"window_size": (8, 0)}},
            r"window_size=\(8, 0\) contradicts the Hugging Face config, which has \(7, 0\)",
            id="other window",
        ),
        pytest.param(
            Qwen3Config(**SIZES, head_dim=16, layer_types=["full_attention", "chunked_attention"] * 2),
            {},
            "layer_types has 'chunked_attention'",
            id="layer types",
        ),
        pytest.param(
            Qwen3Config(**SIZES, attention_bias=True, mlp_bias=True),
            {},
            "attention_bias and mlp_bias differ",
            id="Qwen3 bias",
        ),
    ],
)
def test_unsupported_models(config, options, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(config, **options)


@pytest.mark.parametrize(("beta_fast", "truncate"), [(32.0, True), (2.0, True), (2.0, False)])
def test_yarn_is_megatron_cores(beta_fast, truncate):
    """The frequencies that a model gets are those of megatron-core's formulas, where it has the options."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as core

    rope = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": beta_fast}
    config = Qwen3Config(**SIZES, head_dim=32, rope_parameters={"rope_type": "yarn", "truncate": truncate, **rope})
    low, high = core._yarn_find_correction_range(beta_fast, 1.0, 32, 1e4, 64, truncate)
    keep = 1 - core._yarn_linear_ramp_mask(low, high, 16, torch.device("cpu"))
    plain = 1 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    frequencies, factor = scaled_rope(config)
    torch.testing.assert_close(frequencies, plain * keep + plain / 4 * (1 - keep), rtol=1e-6, atol=0)
    assert factor == core._yarn_get_concentration_factor(4.0, None, None)
    assert transformer_config(config).softmax_scale == pytest.approx(factor**2 / 32**0.5)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ({"model_type": "gpt2"}, {}, "model_type 'gpt2' is not supported on Megatron; use one of llama, mistral"),
        ({"model_type": "mistral", **SIZES, "num_key_value_heads": 1}, {"tensor_model_parallel_size": 2},
         "num_key_value_heads=1 is not divisible"),
        ({"model_type": "qwen3", **SIZES}, {"pipeline_model_parallel_size": 3}, "not divisible by 3 pipeline stages"),
        ({"model_type": "qwen3", **SIZES, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0,
          "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}}, {}, "rope_type 'longrope' is not supported"),
    ],
    ids=["model", "tp", "pp", "rope"],
)  # fmt: skip
def test_group_refuses_a_model_before_anything_is_sent(model, sizes, message):
    """On the driver: no rank exists yet."""
    args = {"train_backend": "megatron", "hf_config": model, **sizes}
    with pytest.raises(TrainArgsError, match=message):
        MegatronTrainWorker.check_args(read_args(args), 6, False)
    args["hf_config"] = {"model_type": "qwen3", **SIZES}
    args["pipeline_model_parallel_size"] = 1
    MegatronTrainWorker.check_args(read_args(args), 6, False)


def test_megatron_overrides_reach_megatron(monkeypatch):
    """With plain lists, because Megatron asks whether a value is one; and instead of what gradient_checkpointing sets,
    which it refuses together with them."""
    made = {}
    monkeypatch.setattr(
        "workers.megatron.megatron_train_worker.MegatronTrainModel", lambda config, **options: made.update(options)
    )
    own = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    args = read_args({"train_backend": "megatron", "gradient_checkpointing": True, "megatron_overrides": own})
    MegatronTrainWorker.make_model(SimpleNamespace(args=args, role="actor"), LLAMA)
    assert made["overrides"] == own
    assert type(made["overrides"]["recompute_modules"]) is list


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.1}, "unknown name 'learning_rate'"),
        ({"lr": -1}, "lr=-1 must be at least 0"),
        ({"betas": (0.9, 1.0)}, "at least 0 and below 1"),
    ],
)
def test_invalid_optimizer_options(options, message):
    with pytest.raises(ValueError, match=message):
        AdamOptions.of(options)


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_invalid_micro_batch_sizes(size, monkeypatch):
    monkeypatch.setattr(MegatronLMWorker, "needs_cuda", False)  # it fails before it needs megatron's
    with pytest.raises(ValueError, match=f"micro_batch_size={size}: expected an integer of at least 1"):
        MegatronLMWorker(LLAMA, micro_batch_size=size)


def test_replaced_rank_has_no_weights(monkeypatch):
    monkeypatch.setattr(MegatronLMWorker, "needs_cuda", False)
    monkeypatch.setattr(MegatronLMWorker, "is_replacement", True)
    with pytest.raises(RuntimeError, match=r"Call restart\(\) of the group"):
        MegatronLMWorker(LLAMA)
    with pytest.raises(RuntimeError, match=r"shrink\(\) or grow\(\)\. Call restart\(\)"):  # on a rank that has stayed
        MegatronLMWorker.__new__(MegatronLMWorker).on_membership_change(1)
