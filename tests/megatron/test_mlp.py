"""ParallelLlamaMLP on four tensor-parallel ranks, compared with Hugging Face's dense layer in this process.

Tests of the same size follow one another: `have_tp` then keeps megatron's process groups.
"""

import pytest
import torch
from megatron_workers import forward_and_gradients, layer_from, load, load_fails, own_parameters, whole_state
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from single_controller import WorkerError

SIZES = {"hidden_size": 128, "intermediate_size": 344}
SMALL = {"hidden_size": 8, "intermediate_size": 24}


def hf_config(**config):
    """The layer has no attention heads, but the config requires that their number divides hidden_size."""
    return LlamaConfig(num_attention_heads=1, **config)


def dense(seed=0, **config):
    """Hugging Face's layer with random weights and biases, if it has them."""
    torch.manual_seed(seed)
    return LlamaMLP(hf_config(**config)).float()


def state_of(layer):
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def parallel(group, reference, config, tp=4, **megatron_config):
    """The parallel layer on the group's ranks, with the reference's weights."""
    group.have_tp(tp)
    group.make_layer({"hidden_act": "silu", **config}, **megatron_config)
    group.run(load, state_of(reference))


def joined(parts, name):
    """A gradient or weight of the dense layer, joined from those of the tensor-parallel ranks."""
    parts = sorted(parts, key=lambda part: part["tp"])
    layer, kind = name.rsplit(".", 1)
    if layer == "down_proj":
        return torch.cat([part[name] for part in parts], dim=1) if kind == "weight" else parts[0][name]
    half = ["gate_proj", "up_proj"].index(layer)
    return torch.cat([part[f"gate_up_proj.{kind}"].chunk(2)[half] for part in parts])


def distance(a, b):
    return (a - b).abs().max().item()


def check_against_dense(group, config, tp=4):
    """Outputs within 1e-5, gradients within 1e-5 of the largest, and the same on all ranks."""
    reference = dense(**config)
    parallel(group, reference, config, tp)
    x, upstream = torch.randn(2, 128, 4, config["hidden_size"]).unbind()
    parts = group.run(forward_and_gradients, x, upstream)
    x.requires_grad_()
    y = reference(x)
    y.backward(upstream)
    assert y.abs().max() > 0.1
    assert distance(parts[0]["y"], y) < 1e-5
    assert all(torch.equal(part["y"], parts[0]["y"]) for part in parts)
    gradients = {name: (joined(parts[:tp], name), parameter.grad) for name, parameter in reference.named_parameters()}
    for name, (found, expected) in {"x": (parts[0]["x"], x.grad), **gradients}.items():
        assert found.shape == expected.shape
        assert distance(found, expected) < 1e-5 * expected.abs().max().item(), name
    assert all(torch.equal(part["x"], parts[0]["x"]) for part in parts)


class TestAgainstTheDenseLayer:
    def test_tp4(self, four):
        check_against_dense(four, SIZES)

    def test_biases(self, four):
        check_against_dense(four, {**SIZES, "mlp_bias": True})

    @pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu"])
    def test_other_activations(self, four, name):
        check_against_dense(four, {**SMALL, "hidden_act": name})

    def test_inputs_of_other_shapes(self, four):
        reference = dense(**SMALL)
        parallel(four, reference, SMALL)
        for shape in [(8,), (3, 8), (0, 8), (2, 3, 4, 8)]:
            (y,) = four.run_layer([torch.randn(shape, generator=torch.Generator().manual_seed(1))])
            assert y.shape == shape
            assert torch.allclose(
                y, reference(torch.randn(shape, generator=torch.Generator().manual_seed(1))), atol=1e-6
            )

    def test_bf16(self, four):
        reference = dense(**SIZES).bfloat16()
        parallel(four, reference, SIZES, param_dtype="bf16")
        x = torch.randn(16, 4, 128, dtype=torch.bfloat16)
        (y,) = four.run_layer([x])
        assert y.dtype == torch.bfloat16
        assert distance(y.float(), reference(x).float()) < 0.02

    @pytest.mark.full("the tensor-parallel layer at a realistic size")
    def test_realistic_size(self, four):
        """540 MB of weights, stored once and read in place by all ranks."""
        config = {"hidden_size": 4096, "intermediate_size": 11008}
        reference = dense(**config)
        four.have_tp(4)
        four.make_layer(config)
        four.run_on_views(load, reference.state_dict())
        x = torch.randn(64, 2, 4096)
        (y,) = four.run_layer([x])
        with torch.no_grad():
            assert distance(y, reference(x)) < 1e-5
        four.make_layer(SMALL)  # frees the memory

    def test_tp2(self, four):
        check_against_dense(four, SIZES, tp=2)

    def test_two_batches_on_two_replicas_with_megatron_compute(self, four):
        reference = dense(**SIZES)
        parallel(four, reference, SIZES, tp=2)
        batches = list(torch.randn(2, 16, 4, 128))
        for x, y in zip(batches, four.run_layer(batches), strict=True):
            assert distance(y, reference(x)) < 1e-5


class TestHuggingFaceStateDict:
    def test_state_dict_is_a_copy(self, four):
        reference = dense(**SMALL)
        parallel(four, reference, SMALL, tp=1)
        four.run(scale_what_was_read)
        assert all(torch.equal(four.run(whole_state)[0][name], t) for name, t in reference.state_dict().items())

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_round_trip(self, four, tp, bias):
        config = {**SIZES, "mlp_bias": bias}
        reference = dense(seed=3, **config)
        parallel(four, reference, config, tp)
        for state in four.run(whole_state):
            assert set(state) == set(reference.state_dict())
            assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
        other = dense(seed=4, **config)
        other.load_state_dict(state)  # strict, by torch's default

    def test_rank_holds_its_rows_of_gate_then_up(self, four):
        reference = dense(**SMALL)
        parallel(four, reference, SMALL)
        whole = reference.state_dict()
        for tp, own in enumerate(four.run(own_parameters)):
            assert set(own) == {"gate_up_proj.weight", "down_proj.weight"}
            rows = slice(6 * tp, 6 * (tp + 1))
            gate_up = torch.cat([whole["gate_proj.weight"][rows], whole["up_proj.weight"][rows]])
            assert torch.equal(own["gate_up_proj.weight"], gate_up)
            assert torch.equal(own["down_proj.weight"], whole["down_proj.weight"][:, rows])

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda state: state.pop("down_proj.weight"), ["lacks 'down_proj.weight'"]),
            (lambda state: state.pop("gate_proj.weight"), ["lacks 'gate_proj.weight'"]),
            (lambda state: state.update({"down_proj.weight": torch.zeros(24, 8)}), ["'down_proj.weight'", "(24, 8)"]),
            (lambda state: state.update({"up_proj.weight": torch.zeros(6, 8)}), ["'up_proj.weight'", "(24, 8)"]),
            (lambda state: state.update({"down_proj.bias": torch.zeros(8)}), ["'down_proj.bias'"]),
            (
                lambda state: state.update({"gate_porj.weight": state.pop("gate_proj.weight")}),
                ["'gate_porj.weight'", "did you mean 'gate_proj.weight'"],
            ),
        ],
        ids=["no down", "no gate", "transposed", "one shard", "unknown", "misspelt"],
    )
    def test_wrong_state_dict_changes_nothing(self, four, change, told):
        parallel(four, dense(**SMALL), SMALL)
        bad = state_of(dense(seed=9, **SMALL))
        change(bad)
        for said, same in four.run(load_fails, bad):
            assert same
            assert all(part in said for part in [*told, "load_hf_state_dict()"])


def scale_what_was_read(worker):
    for tensor in worker.layer.hf_state_dict().values():
        tensor.mul_(2)


def test_same_seed_gives_the_same_layer_at_every_tp(four):
    states = []
    for tp in (1, 2, 4):
        four.set_up(tp, seed=7)
        four.make_layer({**SIZES, "mlp_bias": True})
        states += four.run(whole_state)
    assert all(torch.equal(state[name], tensor) for state in states for name, tensor in states[0].items())
    four.set_up(4, seed=8)
    four.make_layer({**SIZES, "mlp_bias": True})
    other = four.run(whole_state)[0]
    assert not torch.equal(other["up_proj.weight"], states[0]["up_proj.weight"])
    assert not torch.equal(other["up_proj.weight"], other["gate_proj.weight"])
    assert abs(other["down_proj.weight"].std().item() - 0.02) < 1e-3


class TestRejected:
    @pytest.mark.parametrize(
        ("config", "told"),
        [
            ({"hidden_size": 8, "intermediate_size": 10}, "intermediate_size=10 is not divisible by tp=4"),
            ({**SMALL, "hidden_act": "silo"}, "hidden_act='silo'.*did you mean 'silu'"),
            ({**SMALL, "hidden_act": "no such thing"}, "hidden_act='no such thing'.*gelu"),
            ({"hidden_size": 8}, "no 'intermediate_size'"),
        ],
    )
    def test_invalid_config(self, four, config, told):
        four.have_tp(4)
        with pytest.raises(WorkerError, match=told) as caught:
            four.make_layer(config)
        assert isinstance(caught.value.__cause__, ValueError)

    def test_before_megatron_is_initialised(self, four):
        four.tear_down()
        with pytest.raises(WorkerError, match=r"RuntimeError.*not initialised.*initialize_model_parallel"):
            four.make_layer(SMALL)

    def test_config_object_created_by_the_user(self, four):
        """Hugging Face's and megatron's own config classes work; unsupported combinations are rejected there too."""
        from megatron.core import ModelParallelConfig

        four.have_tp(4)
        hf = hf_config(**SMALL)
        four.run(layer_from, hf, ModelParallelConfig(tensor_model_parallel_size=4, use_cpu_initialization=True))
        assert [y.shape for y in four.run_layer([torch.ones(2, 8)])] == [(2, 8)]
        with pytest.raises(WorkerError, match="sequence_parallel=True needs Transformer Engine"):
            four.run(layer_from, hf, ModelParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True))
