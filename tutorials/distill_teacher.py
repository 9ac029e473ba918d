"""The teacher of `distill.py`, and its two losses. In a module of its own, because the ranks import it."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from single_controller import Dispatch, Worker, register
from workers import register_advantage, register_policy_loss

LOWEST = -20.0  # a log-probability below this counts as this


class Teacher(Worker):
    """Scores rows with a model that nobody trains: no optimizer, no gradients.

    Args:
        model: a Hugging Face folder, or a config as a dict, with random weights.
        temperature: divides the logits; that of the rollout.
        top_k: how many of its most likely tokens it tells for each position; 0 for none.
    """

    def __init__(self, model, temperature, top_k):
        super().__init__()
        torch.manual_seed(1)
        make = AutoModelForCausalLM.from_pretrained
        if isinstance(model, dict):
            make, model = AutoModelForCausalLM.from_config, AutoConfig.for_model(**model)
        self.model, self.temperature, self.top_k = make(model).eval(), temperature, top_k

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    @torch.no_grad()
    def score(self, rows):
        """Return entries of rollout data: what the teacher says about each token, and about the likeliest ones."""
        ids, mask = rows["input_ids"], rows["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float()
        # The logits at position t are about the token at t + 1.
        log_probs = (logits / self.temperature).log_softmax(-1).roll(1, dims=1)
        scored = {"ref_log_probs": log_probs.gather(-1, ids[..., None])[..., 0]}
        if self.top_k:
            scored["candidate_log_probs"], scored["candidate_ids"] = log_probs.topk(self.top_k, dim=-1)
        return scored


@register_advantage("teacher")
def sampled_token(rows, args):
    """The sampled-token loss, with any policy loss: a token is as good as the teacher likes it more than the student
    that drew it. The advantage is -d, where d = log p_student - log p_teacher; its mean is -KL(student || teacher)."""
    difference = rows["rollout_log_probs"] - rows["ref_log_probs"]
    return torch.where(rows.counts, -difference, 0.0)


@register_policy_loss("teacher_top_k")
def top_k(tokens, args):
    """The generalized KL divergence (Csiszar 1991) over the teacher's k likeliest tokens: the sum of
    p_teacher (log p_teacher - log p_student) - p_teacher + p_student. No term is negative, and the minimum is at
    p_student = p_teacher. With k = vocabulary the last two add up to 0: it is KL(teacher || student). Without them, the
    sum is below 0 where the student gives the k tokens more than the teacher does, and pushes it further there."""
    teacher = tokens.others["candidate_log_probs"].float().clamp(min=LOWEST)
    student = tokens.candidates  # not clamped: where it is lowest, the gradient matters most
    divergence = (teacher.exp() * (teacher - student) - teacher.exp() + student.exp()).sum(-1)
    masses = {"teacher_mass": teacher.exp().sum(-1), "student_mass": student.exp().sum(-1)}
    return torch.where(tokens.mask, divergence, 0.0), {name: mass.detach() for name, mass in masses.items()}
