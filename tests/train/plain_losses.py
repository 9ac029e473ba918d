"""Policy losses, advantages and corrections from the papers' formulas: loops over tokens in Python's own float64.

It imports nothing from this library. ``data`` is rollout data as `workers.data.rollout_data` describes it, with
``old_log_probs``; ``args`` are keys of the configuration, all of those in `DEFAULTS`.
"""

import itertools
import math
import statistics

DEFAULTS = {"advantage_estimator": "grpo", "grpo_std_normalization": True, "gamma": 1.0, "kl_coef": 0.0,
            "overlong_buffer_len": 0, "overlong_penalty_factor": 1.0, "rollout_max_response_len": 16,
            "policy_loss_type": "ppo_clip", "eps_clip": 0.2, "eps_clip_high": None, "eps_clip_dual": None,
            "tau_pos": 1.0, "tau_neg": 1.05, "dppo_kl_tau": 0.0, "loss_aggregation": "token",
            "loss_constant_length": None, "rollout_correction": None, "rollout_correction_normalize": False,
            "rollout_rejection_low": None, "rollout_rejection_high": None, "opsm_delta": None, "kl_loss_coef": 0.0,
            "kl_loss_type": "k3", "use_unbiased_kl": False}  # fmt: skip

# name: (level, what happens outside, low, high)
CORRECTIONS = {
    "token_tis": ("token", "truncate", 0.0, 2.0),
    "seq_tis": ("sequence", "truncate", 0.0, 2.0),
    "geo_tis": ("geometric", "truncate", 0.0, 2.0),
    "token_mis": ("token", "mask", 0.0, 2.0),
    "seq_mis": ("sequence", "mask", 0.0, 2.0),
    "geo_mis": ("geometric", "mask", 0.0, 2.0),
    "icepop": ("token", "mask", 0.5, 5.0),
    "token_rs": ("token", "reject", 1e-4, 100.0),
    "seq_rs": ("sequence", "reject", 0.5, 2.0),
    "geo_rs": ("geometric", "reject", 0.99, 1.01),
    "error_rs": ("error", "reject", 0.0, 2.0),
    "seq_mask_tis": ("geometric", "zero", 0.999, 1.002),
}


def counted(data, name):
    """An entry's values at the tokens that count, a list of floats per row."""
    return [
        [float(value) for value, counts in zip(values, mask, strict=True) if counts]
        for values, mask in zip(data[name].tolist(), data["loss_mask"].tolist(), strict=True)
    ]


def rewards(data, args):
    """Rewards with the overlong penalty: DAPO, equation 13."""
    found = []
    for reward, row in zip(data["rewards"].tolist(), data["loss_mask"].tolist(), strict=True):
        length, longest, cache = sum(map(bool, row)), args["rollout_max_response_len"], args["overlong_buffer_len"]
        if not cache or length <= longest - cache:
            penalty = 0.0
        elif length <= longest:
            penalty = ((longest - cache) - length) / cache
        else:
            penalty = -1.0
        found.append(reward + args["overlong_penalty_factor"] * penalty)
    return found


def advantages(data, args, left_out):
    """A list of floats per row, one per token that counts. Rows that are left out are in their groups, but not in
    whitening."""
    args = {**DEFAULTS, **args}
    kind, groups, scores = args["advantage_estimator"], data["group_ids"].tolist(), rewards(data, args)
    rows, old = range(len(groups)), counted(data, "old_log_probs")
    ref = counted(data, "ref_log_probs") if args["kl_coef"] else old
    penalties = [[args["kl_coef"] * (a - b) for a, b in zip(*pair, strict=True)] for pair in zip(old, ref, strict=True)]
    lengths = [len(row) for row in old]
    whole = [reward - sum(of) for reward, of in zip(scores, penalties, strict=True)]
    gamma, to_go = args["gamma"], []
    for row in rows:
        each = [-penalty for penalty in penalties[row]]
        each[-1:] = [scores[row] + last for last in each[-1:]]
        to_go.append([sum(gamma ** (j - t) * each[j] for j in range(t, len(each))) for t in range(len(each))])
    members = {group: [row for row in rows if groups[row] == group] for group in groups}

    def above(values, row):
        return values[row] - statistics.fmean(values[other] for other in members[groups[row]])

    def std(values, row):
        of_group = [values[other] for other in members[groups[row]]]
        return statistics.stdev(of_group) if len(of_group) > 1 else 0.0

    def whitened(found):
        every = [value for row in rows if not left_out[row] for value in found[row]]
        mean, deviation = statistics.fmean(every), math.sqrt(statistics.pvariance(every) + 1e-8)
        return [[(value - mean) / deviation for value in row] for row in found]

    def spread(of_rows):
        return [[of_rows[row]] * lengths[row] for row in rows]

    if kind == "grpo":
        divided = args["grpo_std_normalization"]
        return spread([above(whole, row) / (std(whole, row) + 1e-6 if divided else 1) for row in rows])
    if kind == "rloo":
        sizes = [len(members[group]) for group in groups]
        return spread([above(whole, row) * sizes[row] / max(sizes[row] - 1, 1) for row in rows])
    if kind == "reinforce_plus_plus_baseline":
        return whitened(spread([above(whole, row) for row in rows]))
    if kind == "reinforce_plus_plus":
        return whitened(to_go)
    if kind == "opo":
        found = []
        for row in rows:
            of_group = members[groups[row]]
            total = sum(lengths[other] for other in of_group)
            found.append(whole[row] - sum(lengths[other] * whole[other] for other in of_group) / total)
        return spread(found)
    if kind == "remax":
        baselines = data["reward_baselines"].tolist()
        return [[value - baselines[row] for value in to_go[row]] for row in rows]
    if kind == "maxrl":
        sums = [sum(of) for of in penalties]
        return spread(
            [above(scores, row) / (scores[row] - above(scores, row) + 1e-6) - above(sums, row) for row in rows]
        )
    if kind == "gdpo":
        total = [0.0] * len(scores)
        for name in ("right", "short"):
            of = data[f"rewards/{name}"].tolist()
            weight = args.get("gdpo_weights", {}).get(name, 1.0)
            total = [total[row] + weight * above(of, row) / (std(of, row) + 1e-6) for row in rows]
        sums = [sum(of) for of in penalties]
        return whitened(spread([total[row] - above(sums, row) for row in rows]))
    if kind == "grpo_passk":
        found = []
        for row in rows:
            others = [whole[other] for other in members[groups[row]] if other != row]
            k = min(args.get("passk_k") or len(others) + 1, len(others) + 1)
            gains = [max(whole[row], *some) - max(some) for some in itertools.combinations(others, k - 1) if some]
            gain = statistics.fmean(gains) if gains else 0.0
            found.append(gain / (std(whole, row) + 1e-6) if args["grpo_std_normalization"] else gain)
        return spread(found)
    if kind == "optimal_token_baseline":
        squares = counted(data, "sum_pi_squared")
        factors = counted(data, "correction_weights") if "correction_weights" in data else [[1.0] * n for n in lengths]
        found = []
        for row in rows:
            of_row = []
            for t in range(lengths[row]):
                alive = [other for other in members[groups[row]] if lengths[other] > t and not left_out[other]]
                energy = {
                    other: sum(
                        factors[other][j] ** 2 * (1 - 2 * math.exp(old[other][j]) + squares[other][j])
                        for j in range(t + 1)
                    )
                    for other in alive
                }
                weighted = sum(energy[other] * to_go[other][t] for other in alive)
                baseline = weighted / (sum(energy.values()) + 1e-8) if len(alive) > 1 else 0.0
                of_row.append(0.0 if left_out[row] else to_go[row][t] - baseline)
            found.append(of_row)
        return found
    raise AssertionError(kind)


def naive_gae(rewards, values, mask, gamma, lam):
    """Directly from the definition: the sum over later tokens of (gamma lam)^k delta."""
    advantages = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        counted = [t for t, flag in enumerate(row) if flag]
        deltas = []
        for k, t in enumerate(counted):
            after = values[b][counted[k + 1]] if k + 1 < len(counted) else 0.0
            deltas.append(rewards[b][t] + gamma * after - values[b][t])
        for k, t in enumerate(counted):
            advantages[b][t] = sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
    return advantages


def ratios(old, rollout, level):
    """One number per token of a row."""
    logs = [a - b for a, b in zip(old, rollout, strict=True)]
    if level == "token" or not logs:
        return [math.exp(log) for log in logs]
    if level == "error":
        return [statistics.fmean(math.exp(abs(log)) for log in logs)] * len(logs)
    return [math.exp(sum(logs) / (len(logs) if level == "geometric" else 1))] * len(logs)


def corrections(data, name, normalize=False, reject_low=None, reject_high=None):
    """(factors of the tokens' losses, a list per row; whether each row is rejected)."""
    old, rollout = counted(data, "old_log_probs"), counted(data, "rollout_log_probs" if name else "old_log_probs")
    factors, rejected = [[1.0] * len(row) for row in old], [False] * len(old)
    for part in name.split("+") if name else ():
        level, how, low, high = CORRECTIONS[part]
        if how in ("reject", "zero"):
            low, high = low if reject_low is None else reject_low, high if reject_high is None else reject_high
        for row in range(len(old)):
            of_tokens = ratios(old[row], rollout[row], level)
            if how == "reject":
                rejected[row] = any(not low <= ratio <= high for ratio in of_tokens)
            elif how == "zero":
                inside = all(low <= ratio <= high for ratio in of_tokens)
                factors[row] = [ratio if inside else 0.0 for ratio in ratios(old[row], rollout[row], "token")]
            elif how == "mask":
                factors[row] = [ratio if low <= ratio <= high else 0.0 for ratio in of_tokens]
            else:
                factors[row] = [min(max(ratio, low), high) for ratio in of_tokens]
    if normalize:  # over tokens, or over completions, each of which has one weight
        kept = [row for row, out in zip(factors, rejected, strict=True) if row and not out]
        by_token = any(part in ("token_tis", "token_mis", "icepop", "seq_mask_tis") for part in name.split("+"))
        mean = statistics.fmean([x for row in kept for x in row] if by_token else [row[0] for row in kept])
        factors = [[factor / mean for factor in row] for row in factors]
    return factors, rejected


def chosen_tokens(log_probs, old, of_tokens, args):
    """Which tokens Clip-Cov drops (all within the bounds: the random choice is left out) or KL-Cov penalizes.

    Args:
        log_probs, old, of_tokens: floats, a list per row.

    Returns:
        A list of bools per row.
    """
    every = [(row, t) for row in range(len(old)) for t in range(len(old[row]))]
    mean = sum(float(log_probs[row][t]) for row, t in every) / len(every)
    mean_advantage = sum(of_tokens[row][t] for row, t in every) / len(every)
    parts = {(row, t): (float(log_probs[row][t]) - mean) * (of_tokens[row][t] - mean_advantage) for row, t in every}
    if args["policy_loss_type"] == "kl_cov":
        chosen = set(sorted(every, key=parts.get)[-max(int(args["kl_cov_ratio"] * len(every)), 1) :])
    else:
        chosen = set()
        for row, t in every:
            ratio = math.exp(float(log_probs[row][t]) - old[row][t])
            high = args["eps_clip"] if args["eps_clip_high"] is None else args["eps_clip_high"]
            advantage = of_tokens[row][t]
            clipped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - args["eps_clip"])
            if not clipped and args["clip_cov_lb"] < parts[row, t] < args["clip_cov_ub"]:
                chosen.add((row, t))
    return [[(row, t) in chosen for t in range(len(old[row]))] for row in range(len(old))]


def outside_trust_region(log_prob, old, advantage, args):
    """Whether DPPO masks a token; floats."""
    p, q = math.exp(log_prob), math.exp(old)
    high = args["eps_clip"] if args["eps_clip_high"] is None else args["eps_clip_high"]
    if args["policy_loss_type"] == "dppo_tv":
        divergence = abs(p - q)
    else:
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return p > q and divergence > high if advantage > 0 else p < q and divergence > args["eps_clip"]


def token_losses(log_probs, old, of_tokens, args, chosen=()):
    """Each token's loss, as tensors.

    Args:
        log_probs: of one row's tokens, float64 scalars with gradients.
        old, of_tokens: old log-probabilities and advantages, floats.
        chosen: of each token, with clip_cov and kl_cov.
    """
    kind = args["policy_loss_type"]
    if kind == "geo_mean" and log_probs:
        high = args["eps_clip"] if args["eps_clip_high"] is None else args["eps_clip_high"]
        logs = []
        for log_prob, before, advantage in zip(log_probs, old, of_tokens, strict=True):
            log = log_prob - before
            if (advantage > 0 and float(log.detach()) > high) or (
                advantage < 0 and float(log.detach()) < -args["eps_clip"]
            ):
                log = log.detach().clamp(-args["eps_clip"], high)
            logs.append(log)
        return [-statistics.fmean(of_tokens) * (sum(logs) / len(logs)).exp()] * len(logs)
    low, high = 1 - args["eps_clip"], 1 + (args["eps_clip"] if args["eps_clip_high"] is None else args["eps_clip_high"])
    losses = []
    for t, (log_prob, advantage) in enumerate(zip(log_probs, of_tokens, strict=True)):
        log = log_prob - old[t]
        ratio = log.exp()
        if kind == "gpg":
            losses.append(-advantage * log_prob)
            continue
        if kind == "dro":
            losses.append(-advantage * log_prob + args["dro_beta"] / 2 * log**2)
            continue
        if kind == "sapo":
            tau = args["tau_pos"] if advantage > 0 else args["tau_neg"]
            losses.append(-advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp()))
            continue
        if kind.startswith("dppo"):
            weight = min(float(ratio.detach()), args["eps_clip_dual"])
            if outside_trust_region(float(log_prob.detach()), old[t], advantage, args):
                weight = 0.0
            losses.append(-advantage * weight * log_prob + args["dppo_kl_tau"] * log**2)
            continue
        if kind == "kl_cov":
            losses.append(-advantage * ratio + (args["ppo_kl_coef"] * abs(log) if chosen[t] else 0.0))
            continue
        if kind == "clip_cov" and chosen[t]:
            losses.append(0.0 * log_prob)
            continue
        if args["policy_loss_type"] == "cispo":
            losses.append(-min(max(float(ratio.detach()), low), high) * advantage * log_prob)
            continue
        if args["policy_loss_type"] == "gspo":  # the whole sequence's ratio, with its gradient
            ratio = sum((a - b for a, b in zip(log_probs, old, strict=True)), start=0.0 * log_prob)
            ratio = (ratio / len(log_probs)).exp()
        gain = min(ratio * advantage, ratio.clamp(low, high) * advantage)
        if args["eps_clip_dual"] is not None and advantage < 0:
            gain = max(gain, args["eps_clip_dual"] * advantage + 0.0 * log_prob)
        losses.append(-gain)
    return losses


def kl_terms(log_probs, old, ref, args):
    """Each token's estimate of the KL divergence from the reference, as tensors; arguments as in `token_losses`."""
    terms = []
    for log_prob, before, of_ref in zip(log_probs, old, ref, strict=True):
        d = log_prob - of_ref
        kinds = {"k1": d, "k2": d**2 / 2, "k3": ((-d).exp() - 1 + d).clamp(max=10)}
        term = kinds[args["kl_loss_type"].removesuffix("+")]
        if args["kl_loss_type"].endswith("+") or args["use_unbiased_kl"]:  # the gradient is d grad log p
            term = term.detach() + d.detach() * (log_prob - log_prob.detach())
        if args["use_unbiased_kl"]:
            term = term * math.exp(float(log_prob.detach()) - before)
        terms.append(term)
    return terms


def loss(log_probs, data, args):
    """The step's loss.

    Args:
        log_probs: a list per row of float64 scalars, of the tokens that count.
    """
    args = {**DEFAULTS, **args}
    bounds = args["rollout_rejection_low"], args["rollout_rejection_high"]
    factors, rejected = corrections(data, args["rollout_correction"], args["rollout_correction_normalize"], *bounds)
    old, of_tokens = counted(data, "old_log_probs"), advantages(data, args, rejected)
    chosen = [()] * len(old)
    if args["policy_loss_type"] in ("clip_cov", "kl_cov"):  # among the tokens of completions that are kept
        kept = [[[] if rejected[k] else row for k, row in enumerate(rows)] for rows in (log_probs, old, of_tokens)]
        chosen = chosen_tokens([[float(x.detach()) for x in row] for row in kept[0]], *kept[1:], args)
    rows = []
    for row in range(len(old)):
        if old[row] and not rejected[row]:
            losses = token_losses(log_probs[row], old[row], of_tokens[row], args, chosen[row])
            if args["opsm_delta"] is not None:
                pair = zip(counted(data, "rollout_log_probs")[row], log_probs[row], strict=True)
                apart = statistics.fmean(sampled - float(now.detach()) for sampled, now in pair)
                if apart > args["opsm_delta"]:
                    losses = [0.0 * x if a < 0 else x for x, a in zip(losses, of_tokens[row], strict=True)]
            rows.append([factor * value for factor, value in zip(factors[row], losses, strict=True)])
            if args["kl_loss_coef"]:
                terms = kl_terms(log_probs[row], old[row], counted(data, "ref_log_probs")[row], args)
                rows[-1] = [x + args["kl_loss_coef"] * term for x, term in zip(rows[-1], terms, strict=True)]
    if args["loss_aggregation"] == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if args["loss_aggregation"] == "sequence":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / (args["loss_constant_length"] or args["rollout_max_response_len"]) / len(rows)
