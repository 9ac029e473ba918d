"""GRPO in one process, written as naively as possible: the backends are compared with it.

Row by row and token by token, without padding, micro-batches or a cache. It imports nothing from this library, only
torch and transformers; rollout data is as `workers.data.rollout_data` describes it.
"""

import copy
import math
import statistics

import torch


def small_llama(seed=0, **changes):
    """A random Llama: 2 layers, hidden 64, vocabulary 32; in eval mode, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
               "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": None,
               "eos_token_id": None}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**options, **changes})).eval()


def random_prompts(count, lengths=(4,), *, vocab_size=32, seed=0):
    """Lists of token ids; the lengths are used in turn."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (lengths[k % len(lengths)],), generator=g).tolist() for k in range(count)]


@torch.no_grad()
def sample(model, prompts, samples, max_new_tokens, *, reward, seed=0, stop_token_ids=(), left=None):
    """Rollout data: ``samples`` completions per prompt; prompts are padded on the left, completions on the right.

    Args:
        reward: (prompt, completion), lists of token ids -> float.
        left: log-probabilities of the vocabulary -> the tokens to draw from; they are then in the data, too.
    """
    sets = {}
    g = torch.Generator().manual_seed(seed)
    longest = max(map(len, prompts))
    rows = {name: [] for name in ("input_ids", "attention_mask", "loss_mask", "rollout_log_probs")}
    rewards, group_ids = [], []
    for group, prompt in enumerate(prompts):
        ids = torch.tensor([prompt] * samples)
        log_probs = torch.zeros(samples, 0)
        for _ in range(max_new_tokens):
            of_next = model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
            if left is not None:
                for row in range(samples):
                    kept = sets[group, row, log_probs.shape[1]] = left(of_next[row])
                    gone = [token for token in range(of_next.shape[1]) if token not in kept]
                    of_next[row, gone] = -math.inf
                of_next = of_next.log_softmax(-1)
            token = torch.multinomial(of_next.exp(), 1, generator=g)
            ids = torch.cat([ids, token], 1)
            log_probs = torch.cat([log_probs, of_next.gather(1, token)], 1)
        for row in range(samples):
            completion = ids[row, len(prompt) :].tolist()
            ends = [t + 1 for t, token in enumerate(completion) if token in stop_token_ids]
            completion = completion[: ends[0]] if ends else completion
            before, after = longest - len(prompt), max_new_tokens - len(completion)
            rows["input_ids"].append([0] * before + prompt + completion + [0] * after)
            rows["attention_mask"].append([0] * before + [1] * len(prompt + completion) + [0] * after)
            rows["loss_mask"].append([0] * longest + [1] * len(completion) + [0] * after)
            known = log_probs[row, : len(completion)].tolist()
            rows["rollout_log_probs"].append([0.0] * longest + known + [0.0] * after)
            rewards.append(float(reward(prompt, completion)))
            group_ids.append(group)
    if left is not None:
        rows["sampling_mask_lengths"], kept_in = [], []
        for row, mask in enumerate(rows["loss_mask"]):
            place = iter(range(max_new_tokens))
            of_row = [sets[(*divmod(row, samples), next(place))] if counts else [] for counts in mask]
            rows["sampling_mask_lengths"].append(list(map(len, of_row)))
            kept_in.append(torch.tensor([token for kept in of_row for token in kept], dtype=torch.int32))
    made = {"sampling_mask": torch.nested.as_nested_tensor(kept_in, layout=torch.jagged)} if left is not None else {}
    return {
        **made,
        **{name: torch.tensor(value) for name, value in rows.items()},
        "rewards": torch.tensor(rewards),
        "group_ids": torch.tensor(group_ids),
    }


class ReferenceGRPO:
    """A policy, a reference model with its initial weights, and AdamW.

    Args:
        model: a Hugging Face causal LM; it is trained in place.
        aggregation: "token": mean over all tokens; "sequence": over the completions' means.
    """

    def __init__(
        self, model, *, lr=3e-3, kl_coef=0.0, entropy_coef=0.0, clip_grad=1.0, aggregation="token", temperature=1.0
    ):
        self.model = model
        self.ref = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self.kl_coef, self.entropy_coef, self.clip_grad = kl_coef, entropy_coef, clip_grad
        self.aggregation, self.temperature = aggregation, temperature

    def weights(self):
        """A copy: name in the state dict -> tensor."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def log_probs(self, data, model=None):
        """(B, T), 0 at padding and at each row's first token."""
        whole = torch.zeros(data["input_ids"].shape)
        with torch.no_grad():
            for row in range(len(whole)):
                for t, (log_prob, _) in self._tokens(model or self.model, data, row).items():
                    whole[row, t] = log_prob
        return whole

    @staticmethod
    def advantages(data):
        """One per row: the entry of that name, or the reward relative to its group's."""
        if "advantages" in data:
            return data["advantages"].tolist()
        rewards, groups = data["rewards"].tolist(), data["group_ids"].tolist()
        found = []
        for reward, group in zip(rewards, groups, strict=True):
            members = [other for other, its in zip(rewards, groups, strict=True) if its == group]
            if len(members) == 1:
                found.append(0.0)
                continue
            found.append((reward - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6))
        return found

    def step(self, data, epochs=1):
        """Train on rollout data; one optimizer step over all rows per epoch.

        Returns:
            Of the last epoch: loss, policy_loss, kl, entropy, ratio, clip_fraction and, if the data has
            rollout_log_probs, rollout_log_prob_diff (means as set by the aggregation); and grad_norm (before clipping).
        """
        advantages = self.advantages(data)
        old = data["old_log_probs"] if "old_log_probs" in data else self.log_probs(data)
        ref = data["ref_log_probs"] if "ref_log_probs" in data else self.log_probs(data, self.ref)
        for _ in range(epochs):
            report = self._update(data, advantages, old, ref)
        return report

    def _update(self, data, advantages, old, ref):
        rows = []
        for row, advantage in enumerate(advantages):
            tokens = self._tokens(self.model, data, row)
            counted = [t for t in tokens if data["loss_mask"][row, t]]
            rows.append([self._token(*tokens[t], float(old[row, t]), float(ref[row, t]), advantage) for t in counted])
            if "rollout_log_probs" in data:
                for token, t in zip(rows[-1], counted, strict=True):
                    token["rollout_log_prob_diff"] = abs(float(tokens[t][0]) - float(data["rollout_log_probs"][row, t]))
        if self.aggregation == "token":
            weights = [[1 / sum(map(len, rows))] * len(row) for row in rows]
        else:
            completions = sum(1 for row in rows if row)
            weights = [[1 / len(row) / completions] * len(row) for row in rows]
        report = dict.fromkeys(next(token for row in rows for token in row), 0.0)
        for row, its_weights in zip(rows, weights, strict=True):
            for token, weight in zip(row, its_weights, strict=True):
                for name in report:
                    report[name] = report[name] + weight * token[name]
        loss = report["policy_loss"] + self.kl_coef * report["kl"] - self.entropy_coef * report["entropy"]
        self.optimizer.zero_grad()
        loss.backward()
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in trained))
        if self.clip_grad and norm > self.clip_grad:
            for parameter in trained:
                parameter.grad.mul_(self.clip_grad / norm)
        self.optimizer.step()
        report = {**report, "loss": loss}
        return {name: float(torch.as_tensor(value).detach()) for name, value in report.items()} | {"grad_norm": norm}

    def _tokens(self, model, data, row):
        """Column -> (log-probability, entropy of its distribution), for every token of a row but the first."""
        columns = data["attention_mask"][row].nonzero()[:, 0].tolist()
        ids = data["input_ids"][row, columns]
        logits = model(input_ids=ids[None]).logits[0].float() / self.temperature
        if "sampling_mask" not in data.keys():  # noqa: SIM118
            log_probs = logits.log_softmax(-1)
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            return {t: (log_probs[k, ids[k + 1]], entropies[k]) for k, t in enumerate(columns[1:])}
        left, found = iter(data["sampling_mask"].unbind()[row].tolist()), {}
        for k, t in enumerate(columns[1:]):  # the distribution that the token was drawn from
            kept = [next(left) for _ in range(int(data["sampling_mask_lengths"][row, t]))] or list(
                range(len(logits[k]))
            )
            log_probs = logits[k, kept].log_softmax(-1)
            found[t] = log_probs[kept.index(int(ids[k + 1]))], -(log_probs.exp() * log_probs).sum()
        return found

    def _token(self, log_prob, entropy, old, ref, advantage):
        ratio = (log_prob - old).exp()
        free, clipped = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
        return {
            "policy_loss": -torch.minimum(free, clipped),
            "kl": (ref - log_prob).exp() - (ref - log_prob) - 1,
            "entropy": entropy,
            "ratio": ratio.detach(),
            "clip_fraction": float(clipped < free),
        }
