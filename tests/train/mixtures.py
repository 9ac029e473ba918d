"""Mixtures of experts of transformers: their tensors by expert, and routers that are told which experts to take."""

from contextlib import contextmanager

import torch

from workers.megatron.config import experts_of


def small_mixture(seed=0, **changes):
    """A random Qwen3-MoE like `reference.small_llama`: 4 layers, one of them without experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
               "mlp_only_layers": [1], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
               "norm_topk_prob": True, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
               "max_position_embeddings": 128, "tie_word_embeddings": False, "pad_token_id": 0}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**options, **changes})).eval()


def by_expert(config, tensors):
    """Tensors under the names of Hugging Face's checkpoints: transformers' modules have all experts in one."""
    experts, found = experts_of(config), {}
    gate, up, down = experts.names
    for name, tensor in tensors.items():
        at, _, kind = name.partition(".mlp.experts.")
        at = f"{at}.{experts.block}.experts"
        if kind == "gate_up_proj":
            for number, both in enumerate(tensor):
                first, second = both.chunk(2)
                found |= {f"{at}.{number}.{gate}.weight": first, f"{at}.{number}.{up}.weight": second}
        elif kind == "down_proj":
            found |= {f"{at}.{number}.{down}.weight": own for number, own in enumerate(tensor)}
        else:
            found[name.replace(".mlp.gate.", f".{experts.block}.gate.")] = tensor
    return found


@contextmanager
def replaying(model, routes):
    """Let transformers' routers take these experts, where they are not -1, with scores from their own logits. The model
    runs one row after the other, once or several times.

    Yields what the routers have chosen: by row and layer with experts, (tokens, k).
    """
    gates = [(layer.mlp.gate, number) for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]
    taken, normalized = [], experts_of(model.config).normalized

    def hook(layer, first):
        def take(gate, given, output):
            if first:
                taken.append({})
            logits, _, native = output
            chosen = native
            if routes is not None:
                own = routes[(len(taken) - 1) % len(routes)][:, layer].long()
                chosen = torch.where((own >= 0).all(-1, keepdim=True), own, native)
            scores = logits.softmax(-1).gather(-1, chosen)
            taken[-1][layer] = chosen
            return logits, scores / scores.sum(-1, keepdim=True) if normalized else scores, chosen

        return take

    handles = [gate.register_forward_hook(hook(number, at == 0)) for at, (gate, number) in enumerate(gates)]
    yield taken
    for handle in handles:
        handle.remove()


def drawn_routes(config, data, seed=3):
    """Experts that have nothing to do with those of the router; some are left to it."""
    drawn, experts = torch.Generator().manual_seed(seed), experts_of(config)
    rows = []
    for length in data["attention_mask"].sum(1).tolist():
        orders = torch.rand(length, experts.shape.layers, experts.shape.experts, generator=drawn).argsort(-1)
        chosen = orders[..., : experts.shape.k].short()
        chosen[torch.rand(chosen.shape[:2], generator=drawn) < 0.2] = -1
        rows.append(chosen)
    return rows


def column(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
