"""Log-probs and entropies from logits: values and gradients match plain torch."""

import pytest
import torch

from workers.train.token_log_probs import token_log_probs


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("vocab_size", [None, 13])
@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
def test_matches_log_softmax(temperature, vocab_size, uses):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 16, requires_grad=True)
    tokens = torch.randint(0, 13, (2, 3))
    plain = logits.detach().double().requires_grad_()
    scaled = plain[..., : vocab_size or 16] / (temperature or 1.0)
    expected = scaled.log_softmax(-1)
    expected = expected.gather(-1, tokens[..., None])[..., 0], -(expected.exp() * expected).sum(-1)
    found = token_log_probs(logits, tokens, temperature=temperature, vocab_size=vocab_size, entropy=uses != "log_probs")
    weights = torch.randn(2, 2, 3)
    total = reference = 0.0
    for k, name in enumerate(("log_probs", "entropy")):
        if uses in (name, "both"):
            torch.testing.assert_close(found[k].double(), expected[k], atol=1e-5, rtol=1e-5)
            total = total + (weights[k] * found[k]).sum()
            reference = reference + (weights[k].double() * expected[k]).sum()
    total.backward()
    reference.backward()
    torch.testing.assert_close(logits.grad.double(), plain.grad, atol=1e-5, rtol=1e-4)
    assert (found[1] is None) == (uses == "log_probs")


def test_entropy_without_gradient_uses_no_extra_memory():
    """Only the softmax is kept for the backward pass, once."""
    logits = torch.randn(4, 1000, requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_log_probs(logits, torch.arange(4), entropy=True)
    assert sum(kept.values()) < 1.1 * logits.nbytes
