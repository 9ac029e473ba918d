"""A mixture of experts in plain torch, in float64: every expert computes every token, and a matrix of scores weights
them. It knows nothing of transformers' modules, only the names of their weights (Mixtral, Qwen3-MoE)."""

import torch
import torch.nn.functional as F


def norm(x, weight, eps):
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def rotated(x, theta):
    """Rotary embedding of (T, heads, d)."""
    tokens, _, size = x.shape
    angles = torch.arange(tokens, dtype=x.dtype)[:, None] * theta ** -(torch.arange(0, size, 2, dtype=x.dtype) / size)
    cos, sin = (torch.cat([of, of], -1)[:, None] for of in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attention(x, weights, at, config):
    def heads(name):
        made = (x @ weights[f"{at}.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_dim or 8))
        scale = weights.get(f"{at}.{name}_norm.weight")
        return made if scale is None else norm(made, scale, config.rms_norm_eps)

    theta = config.rope_parameters["rope_theta"]
    q, k, v = rotated(heads("q"), theta), rotated(heads("k"), theta), heads("v")
    k, v = (of.repeat_interleave(q.shape[1] // of.shape[1], dim=1) for of in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    made = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return made.flatten(1) @ weights[f"{at}.o_proj.weight"].T


def mixture(x, weights, at, chosen, k, normalized):
    """Args: ``chosen``, (T, k) experts of each token; -1 for the k of the router."""
    probs = (x @ weights[f"{at}.gate.weight"].T).softmax(-1)
    chosen = torch.where(chosen < 0, probs.topk(k, -1).indices, chosen)
    scores = probs * torch.zeros_like(probs).scatter(1, chosen, 1.0)
    if normalized:
        scores = scores / scores.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,eih->tei", x, weights[f"{at}.experts.gate_up_proj"]).chunk(2, -1)
    made = torch.einsum("tei,ehi->teh", F.silu(gate) * up, weights[f"{at}.experts.down_proj"])
    return (scores[..., None] * made).sum(1)


def log_probs(weights, config, token_ids, experts):
    """Log-probability of each token given those before it, (T,); 0 at the first.

    Args:
        weights: name -> float64.
        config: of the model.
        token_ids: (T,).
        experts: (T, layers, k), -1 where the router chooses.
    """
    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(config.num_hidden_layers):
        at, eps = f"model.layers.{layer}", config.rms_norm_eps
        x = x + attention(norm(x, weights[f"{at}.input_layernorm.weight"], eps), weights, f"{at}.self_attn", config)
        h = norm(x, weights[f"{at}.post_attention_layernorm.weight"], eps)
        if f"{at}.mlp.gate.weight" in weights:
            normalized = getattr(config, "norm_topk_prob", True)
            x = x + mixture(h, weights, f"{at}.mlp", experts[:, layer].long(), config.num_experts_per_tok, normalized)
        else:
            gate, up, down = (weights[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    logits = norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ weights["lm_head.weight"].T
    found = logits[:-1].log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
    return F.pad(found, (1, 0))
