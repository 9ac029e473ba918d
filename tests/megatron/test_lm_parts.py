"""What the decoder is made of, without processes: micro-batches, and the names and shapes of Hugging Face weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from workers.megatron.micro_batches import micro_batches
from workers.megatron.weights import hf_shapes

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
CPU = torch.device("cpu")


def cut(rows, size, group=1, tokens=5, **others):
    ids = torch.arange(rows * tokens).view(rows, tokens)
    return ids, micro_batches({"input_ids": ids, **others}, size, group, max(rows * tokens, 1), CPU)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
        Qwen2Config(**SIZES),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
    ],
    ids=["Llama", "biases", "tied", "Qwen2", "Qwen2 tied"],
)
def test_names_and_shapes_are_those_of_the_hugging_face_model(config):
    model = AutoModelForCausalLM.from_config(config)
    assert hf_shapes(config) == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("rows", "size", "group", "number"), [(6, 2, 1, 3), (5, 2, 1, 3), (5, 2, 2, 4), (0, 2, 2, 2)])
def test_micro_batches_have_one_shape_and_every_row_once(rows, size, group, number):
    ids, parts = cut(rows, size, group)
    assert len(parts) == number
    assert {tuple(part.input_ids.shape) for part in parts} == {(size, 5)}
    assert torch.equal(torch.cat([part.input_ids for part in parts])[:rows], ids)
    counts = torch.cat([part.loss_mask for part in parts])
    assert counts[:rows].eq(1).all() and counts[rows:].eq(0).all(), "rows that fill up count for nothing"


def test_masks():
    real = torch.tensor([[0, 1, 1, 1, 0]])
    _, (part,) = cut(1, 1, attention_mask=real)
    assert part.loss_mask.tolist() == [[1, 1, 1, 0]]
    hidden = part.attention_mask[0, 0]
    for query in range(5):
        for key in range(5):
            assert hidden[query, key] == (key > query or not real[0, key])
    _, (part,) = cut(1, 1, attention_mask=real, loss_mask=torch.tensor([[1, 0, 0, 1, 0]]))
    assert part.loss_mask.tolist() == [[0, 0, 1, 0]]


def test_what_else_the_batch_has_goes_with_its_rows():
    rewards = torch.tensor([1.0, 2.0, 3.0])
    _, parts = cut(3, 2, rewards=rewards, missing=None)
    assert [part.others["rewards"].tolist() for part in parts] == [[1.0, 2.0], [3.0, 1.0]]
    assert parts[0].others.keys() == {"rewards"}


def test_the_callers_batch_is_not_changed():
    ids, mask = torch.arange(15).view(3, 5), torch.ones(3, 5)
    batch = {"input_ids": ids, "loss_mask": mask}
    micro_batches(batch, 2, 1, 15, CPU)
    assert batch.keys() == {"input_ids", "loss_mask"}
    assert mask.eq(1).all() and torch.equal(ids, torch.arange(15).view(3, 5))


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_sizes_that_make_no_sense(size):
    with pytest.raises(ValueError, match="micro_batch_size"):
        cut(2, size)
