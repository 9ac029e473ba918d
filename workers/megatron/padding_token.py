"""The padding token's embedding stays as it is, as in the Hugging Face model."""

from __future__ import annotations

from typing import Any

import torch


def keep_padding_token(embedding: Any, hf_config: Any) -> None:
    """Let no gradient reach the embedding of the config's ``pad_token_id``, where it has one.

    Hugging Face's models look it up with ``padding_idx``, so it is not trained there, not even where it stands for
    something: as the end of an answer, say. A tied output layer learns its row all the same.

    Args:
        embedding: megatron's ``VocabParallelEmbedding`` of all tensor-parallel ranks' tokens.
        hf_config: the Hugging Face config.
    """
    pad = getattr(hf_config, "pad_token_id", None)
    if pad is None:
        return
    pad = int(pad) % int(hf_config.vocab_size)  # -1 is the last one

    def hold(module: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            at = (given[0] == pad)[..., None]
            output.register_hook(lambda gradient: gradient.masked_fill(at, 0.0))

    embedding.register_forward_hook(hold)
