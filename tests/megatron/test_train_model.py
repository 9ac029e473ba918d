"""MegatronTrainModel on four real processes, against the Hugging Face model in this one."""

import pytest
import torch
import train_model_workers as on_ranks
from lm_configs import LLAMA, SIZES
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    Qwen2Config,
)

TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
QWEN2 = Qwen2Config(**SIZES)
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
VPP = {**PP2, "virtual_pipeline_model_parallel_size": 2}
ADAM = {"clip_grad": 0.5}
TOKENS = 14

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What `saved` has written already."""
    return {}, tmp_path_factory.mktemp("models")


@pytest.fixture
def saved(folders):
    """(Hugging Face model with random weights, norms and biases included; the folder that it is saved in)."""
    made, home = folders

    def of(config, kind=AutoModelForCausalLM, seed=0):
        key = config.model_type, config.tie_word_embeddings, kind.__name__, seed
        if key not in made:
            torch.manual_seed(seed)
            model = kind.from_config(config).float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.1)
            made[key] = home / "-".join(map(str, key))
            model.save_pretrained(made[key])
        return kind.from_pretrained(made[key]).float().eval(), str(made[key])

    return of


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
        for row, mask in enumerate(data["attention_mask"].bool()):
            ids = data["input_ids"][row, mask][None]
            at = mask.nonzero()[1:, 0]
            logits = model(ids).logits[0, :-1] / temperature
            if logits.shape[-1] == 1:
                self.values = self.values.index_put((torch.tensor(row), at), logits[:, 0])
                continue
            of_all = logits.log_softmax(-1)
            picked = of_all.gather(-1, ids[0, 1:, None])[:, 0]
            self.log_probs = self.log_probs.index_put((torch.tensor(row), at), picked)
            self.entropy = self.entropy.index_put((torch.tensor(row), at), -(of_all.exp() * of_all).sum(-1))


class Whole:
    """The batch as one micro-batch."""

    def __init__(self, data):
        self.others = data


def joined(answers, rows):
    """The rows in their order, from the ranks that have some; the tensor-parallel ranks agree."""
    found = {}
    for dp, _, tensor in answers:
        if tensor is not None:
            assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
            assert torch.equal(found.setdefault(dp, tensor), tensor)
    whole = torch.zeros(rows, TOKENS)
    for dp, tensor in found.items():
        whole[dp :: len(found)] = tensor
    return whole


def merged(parts):
    """The weights that the ranks send; each comes once."""
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names))
    return {name: tensor for part in parts for name, tensor in part.items()}


def steps(four, model, loss, count=3, rows=7, lr=1e-3, within=1e-5, first=0):
    """The same steps on both sides, and what the ranks said of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(first, first + count):
        data = batch(rows, seed=10 + step)
        rate = lr * (step + 1)
        said = four.run(on_ranks.train_step, data, loss, 9.0, rate, 0.7)
        total, sums = loss(Reference(model, data, 1.0 if loss is on_ranks.value_loss else 0.7), Whole(data), 9.0)
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert all(one == said[0] for one in said)
        assert said[0]["loss"] == pytest.approx(total.item(), rel=1e-4, abs=within)
        assert said[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        for name, value in sums.items():
            assert said[0][name] == pytest.approx(value.item(), rel=1e-4, abs=1e-4)
    return optimizer


def check_weights(four, model, within=1e-4):
    expected = dict(model.named_parameters())
    found = merged(four.run(on_ranks.hf_weights))
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < within


@pytest.mark.parametrize(
    ("config", "parallel", "options"),
    [
        pytest.param(LLAMA, TP2, {}, id="dp2 tp2"),
        pytest.param(TIED, PP2, {}, id="dp2 pp2, tied"),
        pytest.param(QWEN2, {**TP2, **PP2}, {}, id="tp2 pp2, Qwen2"),
        pytest.param(TIED, PP4, {}, id="pp4, tied"),
        pytest.param(LLAMA, {}, {"optimizer": {**ADAM, "distributed": True}}, id="dp4, distributed optimizer"),
        pytest.param(
            LLAMA, VPP, {"overrides": {"overlap_p2p_comm": True, "batch_p2p_comm": False}}, id="interleaved pipeline"
        ),
    ],
)
def test_log_probs_entropy_and_three_steps_are_those_of_hugging_face(four, saved, config, parallel, options):
    model, folder = saved(config)
    four.run(on_ranks.make, config, parallel, **{"optimizer": ADAM, **options})
    four.run(on_ranks.load_hf, folder)
    data = batch()
    found = joined(four.run(on_ranks.log_probs, data, 0.7), 7)
    assert (found - Reference(model, data, 0.7).log_probs).abs().max() < 1e-4
    steps(four, model, on_ranks.policy_loss)
    check_weights(four, model)


@pytest.mark.parametrize("parallel", [{**TP2, **PP2}, TP2], ids=["tp2 pp2", "dp2 tp2"])
def test_a_critic_has_the_values_and_steps_of_a_token_classifier(four, saved, parallel):
    model, folder = saved(LlamaConfig(**SIZES, tie_word_embeddings=True, num_labels=1), AutoModelForTokenClassification)
    four.run(on_ranks.make, TIED, parallel, role="critic", optimizer=ADAM)
    four.run(on_ranks.load_hf, folder)
    data = batch()
    found = joined(four.run(on_ranks.values, data), 7)
    assert (found - Reference(model, data).values).abs().max() < 1e-4
    steps(four, model, on_ranks.value_loss)
    check_weights(four, model)


@pytest.mark.parametrize("rows", [0, 1])
def test_ranks_without_rows_fill_up(four, saved, rows):
    model, folder = saved(LLAMA)
    four.run(on_ranks.make, LLAMA, PP2, optimizer=ADAM)
    four.run(on_ranks.load_hf, folder)
    data = batch(rows)
    answers = four.run(on_ranks.log_probs, data)
    assert [tensor is None for _, _, tensor in answers].count(True) == 2, "the first stages have none"
    assert (joined(answers, rows) - Reference(model, data).log_probs).abs().sum() < 1e-4
    if rows:
        steps(four, model, on_ranks.policy_loss, count=1, rows=1)
        check_weights(four, model)
    said = four.run(on_ranks.train_step, data, on_ranks.no_loss, 1.0, 0.0)
    assert said[0] == {"loss": 0.0, "grad_norm": 0.0}
