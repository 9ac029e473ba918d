"""The worker of `score.py`. In a module of its own, because the ranks import it."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from single_controller import Dispatch, Worker, register


class Scorer(Worker):
    """Scores rows of tokens with a language model: their log-likelihood. Its ranks are independent.

    Args:
        config: a Hugging Face config as a dict; the weights are random, the same on all ranks.
    """

    def __init__(self, config):
        super().__init__()
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    @torch.no_grad()
    def score(self, rows):
        """Return a dict of columns: each row's number, its score, and the rank that computed it."""
        ids = rows["ids"]
        log_probs = self.model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        scores = log_probs.gather(-1, ids[:, 1:, None]).sum((1, 2))
        return {"row": rows["row"], "score": scores, "rank": torch.full((len(ids),), self.rank)}
