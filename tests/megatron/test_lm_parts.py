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
    assert part.loss_mask.tolist() == [[0, 1, 1, 0]], "nothing predicts the first real token"
    hidden = part.attention_mask[0, 0]
    for query in range(5):
        for key in range(5):
            assert hidden[query, key] == (key > query or not real[0, key])
    _, (part,) = cut(1, 1, attention_mask=real, loss_mask=torch.tensor([[0, 0, 0, 1, 0]]))
    assert part.loss_mask.tolist() == [[0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("real", "counted"),
    [
        ([[0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0]]),
        ([[0, 0, 0, 1, 0]], [[0, 0, 0, 0, 0]]),
        ([[1, 1, 1, 1, 1]], [[0, 1, 1, 1, 1]]),
        ([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]], [[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]]),
        ([[1, 1, 0, 1, 1]], [[0, 1, 0, 0, 1]]),
    ],
    ids=["all padding", "one token", "no padding", "either side", "a hole"],
)
def test_tokens_that_count(real, counted):
    """Those that a real token predicts; a loss_mask that counts any other is refused."""
    real, counted = torch.tensor(real), torch.tensor(counted)
    _, (part,) = cut(len(real), len(real), attention_mask=real)
    assert torch.equal(part.loss_mask, counted[:, 1:].float())
    _, (part,) = cut(len(real), len(real), attention_mask=real, loss_mask=counted)
    assert torch.equal(part.loss_mask, counted[:, 1:].float())
    for row, token in (counted == 0).nonzero().tolist():
        mask = counted.float()
        mask[row, token] = 0.5
        with pytest.raises(ValueError, match=rf"loss_mask of row {row} counts token {token}, .* set loss_mask to 0"):
            cut(len(real), len(real), attention_mask=real, loss_mask=mask)


def test_without_an_attention_mask_a_loss_mask_counts_all_but_the_first_token():
    _, (part,) = cut(2, 2, loss_mask=torch.ones(2, 5).index_fill(1, torch.tensor([0]), 0.0))
    assert part.loss_mask.eq(1).all()
    with pytest.raises(ValueError, match="loss_mask of row 0 counts token 0"):
        cut(2, 2, loss_mask=torch.ones(2, 5))


def test_no_micro_batch_holds_a_mask_of_all_pairs_of_tokens():
    """Those of the whole batch would take tokens times its memory."""
    _, parts = cut(6, 2, tokens=40)
    for part in parts:
        held = [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
        assert max(tensor.numel() for tensor in held) == 2 * 40
        assert part.attention_mask.shape == (2, 1, 40, 40)


def test_what_else_the_batch_has_goes_with_its_rows():
    rewards = torch.tensor([1.0, 2.0, 3.0])
    _, parts = cut(3, 2, rewards=rewards, missing=None)
    assert [part.others["rewards"].tolist() for part in parts] == [[1.0, 2.0], [3.0, 1.0]]
    assert parts[0].others.keys() == {"rewards"}


def test_the_callers_batch_is_not_changed():
    ids, mask = torch.arange(15).view(3, 5), torch.tensor([0.0, 1, 1, 1, 1]).repeat(3, 1)
    batch = {"input_ids": ids, "loss_mask": mask}
    micro_batches(batch, 2, 1, 15, CPU)
    assert batch.keys() == {"input_ids", "loss_mask"}
    assert mask.eq(torch.tensor([0, 1, 1, 1, 1])).all() and torch.equal(ids, torch.arange(15).view(3, 5))


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_sizes_that_make_no_sense(size):
    with pytest.raises(ValueError, match="micro_batch_size"):
        cut(2, size)
