"""The Hugging Face model in this process, with which the tests compare MegatronTrainModel on several."""

import pytest
import torch
import train_model_workers as on_ranks
from lm_configs import SIZES
from shard_helpers import assembled

TOKENS = 14


def batch(rows=7, seed=1):
    """Ragged rows with padding on either side; the second half of each was generated."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, TOKENS), generator=drawn)
    mask, counts = torch.zeros_like(ids), torch.zeros(rows, TOKENS)
    for row in range(rows):
        length = int(torch.randint(2, TOKENS + 1, (), generator=drawn))
        start = int(torch.randint(0, TOKENS - length + 1, (), generator=drawn))
        mask[row, start : start + length] = 1
        counts[row, start + (length + 1) // 2 : start + length] = 1.0
    noise = torch.randn(4, rows, TOKENS, generator=drawn)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "loss_mask": counts,
        "advantages": noise[0],
        "old_log_probs": -4.9 + 0.1 * noise[1],
        "weights": noise[2],
        "returns": noise[3],
    }


class Reference:
    """The outputs of the whole batch from the Hugging Face model, each row alone and without its padding."""

    def __init__(self, model, data, temperature=1.0):
        self.log_probs, self.entropy, self.values = (torch.zeros(data["input_ids"].shape) for _ in range(3))
        self.candidates = torch.zeros(data["candidate_ids"].shape) if "candidate_ids" in data else None
        for row, mask in enumerate(data["attention_mask"].bool()):
            ids = data["input_ids"][row, mask][None]
            at = mask.nonzero()[1:, 0]
            logits = model(input_ids=ids).logits[0, :-1] / temperature
            if logits.shape[-1] == 1:
                self.values = self.values.index_put((torch.tensor(row), at), logits[:, 0])
                continue
            of_all = logits.log_softmax(-1)
            of_sets = of_all
            if "sampling_mask" in data:
                kept = iter(data["sampling_mask"].unbind()[row].tolist())
                hidden = torch.zeros(logits.shape, dtype=torch.bool)
                for place, count in enumerate(data["sampling_mask_lengths"][row, at].tolist()):
                    hidden[place] = bool(count)
                    hidden[place, [next(kept) for _ in range(count)]] = False
                of_sets = logits.masked_fill(hidden, -torch.inf).log_softmax(-1)
            picked = of_sets.gather(-1, ids[0, 1:, None])[:, 0]
            self.log_probs = self.log_probs.index_put((torch.tensor(row), at), picked)
            self.entropy = self.entropy.index_put((torch.tensor(row), at), torch.special.entr(of_sets.exp()).sum(-1))
            if self.candidates is not None:
                others = of_all.gather(-1, data["candidate_ids"][row, at])
                self.candidates = self.candidates.index_put((torch.tensor(row), at), others)


class Whole:
    """The batch as one micro-batch."""

    def __init__(self, data):
        self.others = data


def joined(results, rows):
    """The rows in order, from the ranks that return some. Tensor-parallel ranks return the same."""
    found = {}
    for dp, _, tensor in results:
        if tensor is not None:
            assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
            assert torch.equal(found.setdefault(dp, tensor), tensor)
    whole = torch.zeros(rows, TOKENS)
    for dp, tensor in found.items():
        whole[dp :: len(found)] = tensor
    return whole


def whole_weights(four):
    return assembled(four.run(on_ranks.hf_shards))


def loaded(four, saved, config, parallel, sharp=False, **options):
    """A new model on the ranks, with a Hugging Face model's weights. Returns the latter, and its folder."""
    model, folder = saved(config, sharp=sharp)
    four.run(on_ranks.make, config, parallel, **options)
    four.run(on_ranks.load_hf, folder)
    return model, folder


def assert_training_continues(four, saved, checkpoint, config, before, after, sharp=False, **options):
    """Save after one step, make the model anew at other sizes, load: the next step and the weights after it are the
    same."""
    loaded(four, saved, config, before, sharp, **options)
    four.run(on_ranks.train_step, batch(), on_ranks.policy_loss, 9.0, 1e-3)
    four.run(on_ranks.save, checkpoint)
    expected = four.run(on_ranks.train_step, batch(seed=2), on_ranks.policy_loss, 9.0, 1e-3)[0]
    weights = whole_weights(four)
    four.run(on_ranks.make, config, after, **options)
    four.run(on_ranks.load, checkpoint)
    found = four.run(on_ranks.train_step, batch(seed=2), on_ranks.policy_loss, 9.0, 1e-3)[0]
    assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
    again = whole_weights(four)
    assert again.keys() == weights.keys()
    assert max((again[name] - weights[name]).abs().max().item() for name in weights) < 1e-5


def steps(four, model, loss, count=2, rows=7):
    """Take the same steps on both sides, and compare the reports."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(count):
        data = batch(rows, seed=10 + step)
        rate = 1e-3 * (step + 1)
        reports = four.run(on_ranks.train_step, data, loss, 9.0, rate, 0.7)
        total, sums = loss(Reference(model, data, 1.0 if loss is on_ranks.value_loss else 0.7), Whole(data), 9.0)
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert all(one == reports[0] for one in reports)
        assert reports[0]["loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-5)
        assert reports[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        for name, value in sums.items():
            assert reports[0][name] == pytest.approx(value.item(), rel=1e-4, abs=1e-4)


def check_weights(four, model, within=1e-4):
    expected = dict(model.named_parameters())
    found = whole_weights(four)
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < within
