"""What other libraries' own code returned for the inputs in peers.json, and what ours returns for them.

Each case of peers.json has the formula's name; the peer, with the file and the function that were run outside of this
project, at the commit that ``peers`` states; what our side runs; what differs on purpose; the expected numbers; and the
largest error that the test accepts. ``python tests/train/peers.py`` writes the table of docs/formulas.md.
"""

import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from workers.algorithms.advantages import gae, group_advantages, moments, overlong_penalty, token_rewards, whiten
from workers.algorithms.corrections import (
    correct,
    correction_metrics,
    correction_of,
    find_correction,
    mean_weight,
    off_policy_sequences,
)
from workers.algorithms.estimators import AdvantageRows, value_targets
from workers.algorithms.losses import kl_estimate, policy_loss, token_weights, value_loss
from workers.algorithms.policy_losses import SELECTIONS, StepTokens
from workers.algorithms.schedule import adaptive_kl_coef
from workers.algorithms.token_log_probs import next_candidate_log_probs, next_token_log_probs, token_log_probs
from workers.data.micro_batches import MicroBatch
from workers.train.args import read_args
from workers.train.args_checks import function_of
from workers.train.train_model import TokenOutputs

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
DATA: dict[str, Any] = json.loads((HERE / "peers.json").read_text())
INPUTS = {name: torch.tensor(values) for name, values in DATA["inputs"].items()}
"""float32 or int64; the floats are multiples of 1/1024, so that they are the same numbers in float64."""

ROWS, TOKENS = INPUTS["log_probs"].shape

Found = dict[str, torch.Tensor]
Run = Callable[[dict[str, Any]], Found]
RUNS: dict[str, Run] = {}


def run(function: Run) -> Run:
    RUNS[function.__name__] = function
    return function


def ours(case: dict[str, Any]) -> Found:
    """Our numbers for a case, by the names of the expected ones."""
    return RUNS[case["ours"]["run"]](case["ours"])


def error(case: dict[str, Any], found: Found) -> float:
    """The largest difference from the expected numbers, relative to the largest of the same array. A loss is a sum of
    terms of both signs, so the unit of its error is not below 0.1."""
    largest = 0.0
    for name in case["ours"].get("compare", case["expected"]):
        expected = torch.tensor(case["expected"][name], dtype=torch.float64)
        got = found[name].detach().double()
        if got.shape != expected.shape:
            raise ValueError(f"{name}: our shape is {tuple(got.shape)}, theirs {tuple(expected.shape)}")
        scale = max(float(expected.abs().max()), 0.1 if name == "loss" else 0.0) or 1.0
        difference = float((got - expected).abs().max()) / scale
        largest = max(largest, difference if difference == difference else float("inf"))
    return largest


@lru_cache
def _args(given: str) -> Any:
    return read_args(json.loads(given))


def args_of(given: dict[str, Any]) -> Any:
    return _args(json.dumps(given))


def counted(given: dict[str, Any]) -> torch.Tensor:
    return INPUTS[given["mask"]]


def per_token(values: torch.Tensor) -> torch.Tensor:
    return values if values.dim() == 2 else values[:, None].expand(ROWS, TOKENS)


def micro_batch(others: Found) -> MicroBatch:
    rows = torch.arange(ROWS)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    return MicroBatch(rows, ids, torch.full((ROWS,), TOKENS), others, torch.zeros_like(rows))


def without_bessel(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What whitening by the variance with n - 1 would have returned for tokens whitened by that with n."""
    n = float(mask.sum())
    return values * ((n - 1) / n) ** 0.5


@run
def kl(given: dict[str, Any]) -> Found:
    log_probs = INPUTS["log_probs"].clone().requires_grad_()
    value = kl_estimate(log_probs, INPUTS[given["ref"]], given["estimator"])
    return {"value": value, "gradient": torch.autograd.grad(value.sum(), log_probs)[0]}


@run
def policy_loss_of(given: dict[str, Any]) -> Found:
    args, mask, old = args_of(given["args"]), counted(given), INPUTS[given["old"]]
    zeros = torch.zeros(ROWS, TOKENS)
    others = {"old_log_probs": old, **{name: INPUTS[name] for name in given.get("entries", ())}}
    others["advantages"] = zeros if given["advantages"] == "none" else per_token(INPUTS[given["advantages"]])
    correction = correction_of(args)
    if correction is not None:
        made = correct(old, INPUTS["rollout_log_probs"], mask, correction)
        others["correction_weights"] = made.weights
        mask = mask * ~made.rejected[:, None]
    weights, count = token_weights(mask, args.loss_aggregation, args.loss_constant_length or 1)
    others["loss_weights"] = weights / float(count)
    loss = policy_loss(
        partial(function_of(args, "policy_loss_type"), args=args),
        kl_coef=args.kl_loss_coef,
        kl_estimator=args.kl_loss_type,
        opsm_delta=args.opsm_delta,
        unbiased_kl=args.use_unbiased_kl,
    )
    select = SELECTIONS.get(function_of(args, "policy_loss_type"))
    if select is not None:  # of the whole step, which is one micro-batch here
        step = StepTokens(INPUTS["log_probs"], old, others["advantages"], mask != 0, lambda value: [value], seed=0)
        others["selected_tokens"] = select(step, args)
    log_probs = INPUTS["log_probs"].clone().requires_grad_()
    total, _ = loss(TokenOutputs(log_probs), micro_batch(others))
    return {"loss": total, "gradient": torch.autograd.grad(total, log_probs)[0]}


def of_rows(given: dict[str, Any]) -> tuple[AdvantageRows, Any]:
    args, mask = args_of(given["args"]), counted(given)
    data = {"loss_mask": mask, "input_ids": torch.zeros_like(mask), "group_ids": INPUTS[given["groups"]]}
    for name in ("old_log_probs", "ref_log_probs", "values", "sum_pi_squared"):
        data[name] = INPUTS[name]
    data["rewards"] = INPUTS[given.get("rewards", "rewards")]
    data["reward_baselines"] = INPUTS["baseline_rewards"]
    for name in given.get("components", ()):
        data[f"rewards/{name}"] = INPUTS[name]
    if given.get("weighted"):
        made = correct(data["old_log_probs"], INPUTS["rollout_log_probs"], mask, find_correction("token_tis"))
        data["correction_weights"] = made.weights
    return AdvantageRows(data, estimator=args.advantage_estimator), args


@run
def advantages(given: dict[str, Any]) -> Found:
    rows, args = of_rows(given)
    made = function_of(args, "advantage_estimator")(rows, args)
    if given.get("convert") == "by_rows":
        made = made[:, 0]  # every row begins with a token that counts
        made = (made - made.mean()) / made.std()
    if made.dim() == 1:
        made = per_token(made) * counted(given)
    return {"advantages": without_bessel(made, counted(given)) if given.get("convert") == "bessel" else made}


@run
def advantages_and_returns(given: dict[str, Any]) -> Found:
    return {**advantages(given), "returns": value_targets(*of_rows(given))}


@run
def adaptive_kl(given: dict[str, Any]) -> Found:
    coef, found = given["coef"], []
    for divergence in given["kl"]:
        coef = adaptive_kl_coef(
            coef, divergence, target=given["target"], horizon=given["horizon"], completions=given["rows"]
        )
        found.append(coef)
    return {"value": torch.tensor(found, dtype=torch.float64)}


@run
def group_advantages_of(given: dict[str, Any]) -> Found:
    made = group_advantages(INPUTS["rewards"], INPUTS[given["groups"]], eps=given["eps"])
    return {"advantages": per_token(made) * counted(given)}


@run
def gae_of(given: dict[str, Any]) -> Found:
    made = gae(INPUTS["token_rewards"], INPUTS["values"], counted(given), gamma=given["gamma"], lam=given["lam"])
    return dict(zip(("advantages", "returns"), made, strict=True))


@run
def whitened(given: dict[str, Any]) -> Found:
    x, mask, keep = INPUTS["returns"], counted(given), given.get("keep_mean", False)
    white = whiten(x, mask, moments(x, mask), keep_mean=keep)
    if given.get("convert") == "bessel":
        mean = float(x[mask != 0].mean()) if keep else 0.0
        white = (without_bessel(white - mean, mask) + mean) * mask
    return {"value": white}


@run
def value_loss_of(given: dict[str, Any]) -> Found:
    weights, count = token_weights(counted(given), given.get("aggregation", "token"))
    others = {"loss_weights": weights / float(count), "values": INPUTS["old_values"], "returns": INPUTS["returns"]}
    values = INPUTS["values"].clone().requires_grad_()
    total, _ = value_loss(eps_clip=given["eps_clip"])(TokenOutputs(values=values), micro_batch(others))
    total = total * given.get("scale", 1.0)
    return {"loss": total, "gradient": torch.autograd.grad(total, values)[0]}


@run
def aggregate(given: dict[str, Any]) -> Found:
    weights, count = token_weights(counted(given), given["aggregation"], given["length"])
    losses = INPUTS["log_probs"].clone().requires_grad_()
    total = (losses * (weights / float(count))).sum()
    return {"loss": total, "gradient": torch.autograd.grad(total, losses)[0]}


@run
def token_rewards_of(given: dict[str, Any]) -> Found:
    difference = kl_estimate(INPUTS["old_log_probs"], INPUTS["ref_log_probs"], "k1")
    made = token_rewards(INPUTS[given["rewards"]], counted(given), kl=difference, kl_coef=given["kl_coef"])
    return {"value": made}


@run
def overlong(given: dict[str, Any]) -> Found:
    return {"value": overlong_penalty(torch.tensor(given["lengths"]), given["max_length"], given["buffer"])}


@run
def corrected(given: dict[str, Any]) -> Found:
    name, mask = given["correction"], counted(given)
    bounds = {"reject_low": given["low"], "reject_high": given["high"]}
    if not name.endswith("_rs"):
        bounds = {"low": given["low"], "high": given["high"], "normalize": given.get("normalize", False)}
    made = correct(INPUTS["old_log_probs"], INPUTS["rollout_log_probs"], mask, find_correction(name, **bounds))
    weights = made.weights / mean_weight(made.sums) if given.get("normalize") else made.weights
    return {"weights": weights * mask, "rejected": made.rejected}


@run
def mismatch(given: dict[str, Any]) -> Found:
    made = correct(INPUTS["old_log_probs"], INPUTS["rollout_log_probs"], counted(given), find_correction("report"))
    found = correction_metrics(made.sums, [float(made.largest)])
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


@run
def kept_by_opsm(given: dict[str, Any]) -> Found:
    mask = counted(given)
    signs = per_token(INPUTS[given["advantages"]])
    out = off_policy_sequences(INPUTS["log_probs"], INPUTS[given["old"]], signs, mask, given["delta"])
    return {"value": (mask != 0) & ~out}


@run
def log_probs(given: dict[str, Any]) -> Found:
    logits = INPUTS["logits"].clone().requires_grad_()
    found = token_log_probs(logits, INPUTS["tokens"], temperature=given["temperature"], entropy=True)
    value = found[0] if given["what"] == "log_probs" else found[1]
    return {"value": value, "gradient": torch.autograd.grad(value.sum(), logits)[0]}


@run
def candidates(given: dict[str, Any]) -> Found:
    # Ours are about the token in the next position.
    ids = torch.nn.functional.pad(INPUTS["tokens"], (1, 0))
    wanted = torch.nn.functional.pad(INPUTS["candidate_ids"], (0, 0, 1, 0))
    logits = torch.cat([INPUTS["logits"], INPUTS["logits"][:, :1]], 1)
    own, _ = next_token_log_probs(logits, ids, temperature=given["temperature"])
    return {"value": next_candidate_log_probs(logits, ids, own, wanted, given["temperature"])[:, 1:]}


# --- the table --------------------------------------------------------------------------------------

RL2506, DPPO, PPO, GAE_PAPER = "2506.09477", "2602.04879", "1707.06347", "1506.02438"
SOURCES = {
    "Adaptive KL": "1909.08593",
    "Aggregation: constant": "2503.20783",
    "Aggregation: sequence": "2402.03300",
    "Aggregation: token": "2503.14476",
    "CISPO": "2506.13585",
    "Clip-Cov": "2505.22617",
    "DPPO": DPPO,
    "DRO": "2405.19107",
    "Dr. GRPO": "2503.20783",
    "Entropy": "definition",
    "GAE, decoupled": "2504.05118",
    "GAE, length": "2504.05118",
    "GAE": GAE_PAPER,
    "GDPO": "2601.05242",
    "GMPO": "2507.20673",
    "GPG": "2504.02546",
    "GRPO": "2402.03300",
    "GSPO": "2507.18071",
    "IcePop": "2510.18855",
    "KL in the reward": "1909.08593",
    "KL loss, k3": "Schulman 2020",
    "KL loss, unbiased": RL2506,
    "KL-Cov": "2505.22617",
    "KL": "Schulman 2020",
    "Log-probabilities": "definition",
    "MIS": "Liu et al. 2025",
    "MaxRL": "2602.02710",
    "Mismatch": "Schulman 2020",
    "OPO": "2505.23585",
    "Off-policy sequence mask": "2512.02556",
    "Optimal token baseline": "2602.07078",
    "Overlong": "2503.14476",
    "PPO with IcePop": "2510.18855",
    "PPO with KL loss, unbiased": RL2506,
    "PPO with off-policy": "2512.02556",
    "PPO with KL": "Schulman 2020",
    "PPO with MIS": "Liu et al. 2025",
    "PPO with seq-mask-tis": "Liu et al. 2025",
    "PPO with": "1802.01561",
    "PPO, clip-higher": "2503.14476",
    "PPO, dual": "1912.09729",
    "PPO": PPO,
    "Pass@k": "2503.19595",
    "REINFORCE++": "2501.03262",
    "RLOO": "2402.14740",
    "ReMax": "2310.10505",
    "Rejection": "Liu et al. 2025",
    "SAPO": "2511.20347",
    "Self-normalized": "Hesterberg 1995",
    "TIS": "1802.01561",
    "Value loss": PPO,
    "Whitening": "definition",
}
"""Where a formula comes from, by how its name begins; the first that fits. Numbers are arXiv's."""

FUNCTIONS = {
    "kl": "kl_estimate",
    "group_advantages_of": "group_advantages",
    "gae_of": "gae",
    "whitened": "whiten",
    "value_loss_of": "value_loss",
    "aggregate": "token_weights",
    "token_rewards_of": "token_rewards",
    "overlong": "overlong_penalty",
    "adaptive_kl": "adaptive_kl_coef",
    "mismatch": "correction_metrics",
    "kept_by_opsm": "off_policy_sequences",
    "log_probs": "token_log_probs",
    "candidates": "candidate_log_probs",
}


def table_rows() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The cases by formula and peer: one row of the table, and one test."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in DATA["cases"]:
        rows.setdefault((case["formula"], case["peer"]), []).append(case)
    order = sorted({formula for formula, _ in rows}, key=str.lower)
    peers = list(DATA["peers"])
    return dict(sorted(rows.items(), key=lambda row: (order.index(row[0][0]), peers.index(row[0][1]))))


def _name(given: dict[str, Any]) -> str:
    """Our name of a formula: of the configuration if it has one."""
    args = given.get("args", {})
    if given["run"] == "policy_loss_of":
        if given["advantages"] == "none":
            return f"kl_loss_type={args['kl_loss_type']}"
        loss = args.get("policy_loss_type", "ppo_clip")
        return f"{loss}, {args['rollout_correction']}" if "rollout_correction" in args else loss
    return FUNCTIONS.get(given["run"]) or args.get("advantage_estimator") or given["correction"]


def _source(formula: str) -> str:
    found = next(source for start, source in SOURCES.items() if formula.startswith(start))
    return f"[{found}](https://arxiv.org/abs/{found})" if found[:4].isdigit() and found[4:5] == "." else found


def table() -> str:
    """The table of docs/formulas.md."""
    lines = ["| formula | ours | source | peers |", "|---|---|---|---|"]
    rows = table_rows()
    for formula in dict.fromkeys(formula for formula, _ in rows):
        by_peer = {peer: cases for (other, peer), cases in rows.items() if other == formula}
        names = dict.fromkeys(f"`{_name(case['ours'])}`" for cases in by_peer.values() for case in cases)
        theirs = ", ".join(_compared(peer, cases) for peer, cases in by_peer.items())
        lines.append(f"| {formula} | {', '.join(names)} | {_source(formula)} | {theirs} |")
    return "\n".join(lines)


def _compared(peer: str, cases: list[Any]) -> str:
    """A link to each of the peer's functions, and what differs on purpose."""
    known, links = DATA["peers"][peer], []
    for source in dict.fromkeys(case["source"] for case in cases):
        path, function = source.split(":")
        links.append(f"[{peer}:`{function}`](https://github.com/{known['repository']}/blob/{known['commit']}/{path})")
    differs = "; ".join(dict.fromkeys(case["differs"] for case in cases if case["differs"]))
    return ", ".join(links) + (f" ({differs})" if differs else "")


def page(text: str) -> str:
    """Replace the table, and the numbers in the sentence above it, in the text of docs/formulas.md."""
    rows, cases = table_rows(), DATA["cases"]
    about = (
        f"{len(cases)} comparisons of {len({formula for formula, _ in rows})} formulas with the code of "
        f"{len(DATA['peers'])} peers:"
    )
    begin, end = "<!-- written by tests/train/peers.py -->\n", "<!-- end -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{about}\n\n{table()}\n\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    path = DOCS / "formulas.md"
    path.write_text(page(path.read_text()))
