"""The text for `train_char_lm.py`, two n-gram models to compare with, and the plot of the losses."""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor


def load_text() -> tuple[str, Tensor, Tensor]:
    """Return the alphabet, and the training and validation text (the last tenth) as indices into it."""
    everything = "\n\n".join(topics.values())
    # Topics quote each other; a repeated paragraph would leak from training into validation.
    text = "\n\n".join(dict.fromkeys(everything.split("\n\n")))
    print(f"{len(everything):,} characters of prose, {len(text):,} without repeated paragraphs")
    alphabet = "".join(sorted(set(text)))
    encoded = torch.tensor([alphabet.index(char) for char in text])
    cut = len(encoded) * 9 // 10
    return alphabet, encoded[:cut], encoded[cut:]


def count_models(train: Tensor, valid: Tensor, size: int) -> dict[str, float]:
    """Return nats per character on `valid` for a unigram and a bigram model that count characters in `train`."""
    unigram = (torch.bincount(train, minlength=size) + 1) / (len(train) + size)
    pairs = torch.bincount(train[:-1] * size + train[1:], minlength=size * size).view(size, size)
    bigram = (pairs + unigram) / (pairs.sum(1, keepdim=True) + 1)  # unseen pairs fall back to the unigram
    log_probs = {"unigram model": unigram[valid].log(), "bigram model": bigram[valid[:-1], valid[1:]].log()}
    return {name: -values.mean().item() for name, values in log_probs.items()}


def plot_losses(path: Path, train: list[float], valid: dict[int, float], references: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(train) + 1), train, alpha=0.5, label="training, mean of the ranks")
    axes.plot(list(valid), list(valid.values()), "o-", markersize=3, label="validation")
    for (name, loss), style in zip(references.items(), ("--", ":"), strict=True):
        axes.axhline(loss, color="gray", linestyle=style, label=f"{name}: {loss:.2f}")
    axes.set(xlabel="step", ylabel="nats per character")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, dpi=150)
