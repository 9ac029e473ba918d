"""Replay: train a recorded step again in this process, under a debugger if wanted.

    python -m workers.tracking.replay RUN STEP            # compare the step's metrics with the recorded ones
    python -m workers.tracking.replay RUN STEP --debug    # stop before the step; `step` goes into the worker's method

A `LocalWorkerGroup` of one rank loads the last checkpoint before the step, or the initial weights, and trains on the
recorded rows of all steps from there. So their rows must all be recorded: ``record_rows=null``. A step of a run of one
rank has the same numbers, bit for bit. With more ranks, sums are taken in another order: the metrics agree within
`TOLERANCE`. The last bits also depend on the number of threads: the command takes ``OMP_NUM_THREADS``, or else one, as
Ray's workers with one CPU do.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dispatch import jagged
from dispatch.batch import share_rows
from dispatch.tables import aligned
from single_controller import ClassWithInitArgs, LocalWorkerGroup, SingleControllerError
from single_controller.local.debugger import set_trace
from single_controller.view.run_files import METRICS, read_lines, read_run, sample_files, sample_steps
from workers.data.balance import Balance, balanced_rows
from workers.data.rollout_data import RECORD_ROWS, rows_of, sizes_of_steps
from workers.hf_files import known_config
from workers.train.args import read_args
from workers.train.checkpoints import complete_checkpoints
from workers.train.train_worker import worker_class

if TYPE_CHECKING:
    from tensordict import TensorDict

TOLERANCE = 1e-3
"""Relative difference of metrics that a run of several ranks may have, in float32."""

_OF_THE_MACHINE = (
    *("seconds", "snapshot", "tokens_per_second", "computed_ratio", "cost_spread"),
    *("moe/load_min", "moe/load_max", "replay/overlap"),  # these count a common prefix once per micro-batch
)
"""Beginnings of the metrics that say how a step was computed, and not what."""

_OF_TOKENS = ("tokens", "loss_mask", "rollout_log_probs", "advantages", "versions")


class ReplayError(SingleControllerError, ValueError):
    """A step cannot be replayed; the message says what is missing."""


@dataclass(frozen=True)
class Replayed:
    """A step that was trained again.

    Attributes:
        step: its number.
        begun: the first step that was trained again.
        metrics: of the replay.
        recorded: of the run, those that the replay has too.
        exact: whether all numbers must be equal.
    """

    step: int
    begun: int
    metrics: Mapping[str, float]
    recorded: Mapping[str, float]
    exact: bool

    @property
    def different(self) -> dict[str, tuple[float, float]]:
        """name -> recorded and replayed number, of the metrics that differ by more than they may."""
        may = 0.0 if self.exact else TOLERANCE
        return {
            name: (value, self.metrics[name])
            for name, value in self.recorded.items()
            if not np.isclose(value, self.metrics[name], may, may**2, equal_nan=True)
        }

    def __str__(self) -> str:
        rows = [("metric", "recorded", "replayed")]
        rows += [(name, repr(value), repr(self.metrics[name])) for name, value in self.recorded.items()]
        how = "bit for bit" if self.exact else f"within {TOLERANCE:g}"
        different = self.different
        said = f"{', '.join(different)} differ" if different else f"all {len(self.recorded)} metrics are equal {how}"
        return "\n".join([*aligned(rows), f"step {self.step}, from step {self.begun} on: {said}"])


def replay(run_dir: str | Path, step: int, *, before: Callable[[], object] | None = None) -> Replayed:
    """Train a recorded step again.

    Args:
        run_dir: the run's folder.
        step: of the run.
        before: called before that step is trained, for a debugger.

    Raises:
        RunFolderError: it is no run folder.
        ReplayError: something is missing: all rows of a step, a checkpoint, or a configuration that can be replayed.
        CheckpointError: the checkpoint cannot be read.
    """
    folder = Path(run_dir)
    run = read_run(folder)
    of_steps = {line["step"]: line["metrics"] for line in read_lines(folder / METRICS)}
    if step not in of_steps:
        raise ReplayError(f"{folder} has no step {step}")
    recorded = of_steps[step]
    started = run["resumed"][-1]["step"] if run.get("resumed") else min(of_steps)  # of the run's last start
    args, ranks = _args(run), run.get("ranks") or {}
    if not ranks:
        raise ReplayError(f"{folder} does not say what was trained: call RunLog.watch() with the train group")
    several = ranks["world_size"] > 1
    if several and args.shuffle_minibatches and args.num_steps_per_rollout > 1:
        raise ReplayError("the run shuffles each rank's rows (shuffle_minibatches), which one rank cannot repeat")
    if ranks["dp_size"] > 1 and args.moe_aux_loss_coeff and args.moe_router_load_balancing_type == "aux_loss":
        raise ReplayError(
            "the run balances the experts in each micro-batch (moe_router_load_balancing_type='aux_loss'), which one "
            "rank cannot repeat"
        )
    since = run["resumed"][-1]["time"] if run.get("resumed") else run["started"]
    since = min(since, run["process"]["started"])  # later, if the run was opened again and has logged no step yet
    checkpoint, begin = _begin(args.load, run["config"].get("save"), step, started, since, folder)
    args["no_load_optim"] = args.no_load_optim and begin == started  # later, the run had an optimizer's state
    args["load"] = None if checkpoint is None else str(checkpoint.parent)
    args["ckpt_step"] = None if checkpoint is None else begin - 1
    made = ClassWithInitArgs(_class(ranks["worker_class"]))
    with LocalWorkerGroup(1, made) as group:
        group.init(args, "actor", ranks["with_ref"])
        for number in range(begin, step + 1):
            rows, version = _rows(folder, number, ranks["with_ref"])
            if version is not None:
                group.set_weight_version(version)
            rows = _in_order(rows, args, ranks["dp_size"])
            if number == step and before is not None:
                before()
            metrics: dict[str, float] = group.train(number, rows)[0]
    shared = {name: recorded[name] for name in metrics if name in recorded and not name.startswith(_OF_THE_MACHINE)}
    return Replayed(step, begin, metrics, shared, exact=not several)


def _args(run: Mapping[str, Any]) -> Any:
    """The configuration, for one rank in this process."""
    config = dict(run["config"])
    if not config:
        raise ReplayError("the run's configuration was not recorded: pass args= to RunLog")
    args: Any = read_args(argparse.Namespace(**config))  # it may have attributes of the script's own
    if args.keep_old_actor:
        raise ReplayError("keep_old_actor=True needs the weights of earlier versions, which are not recorded")
    sizes = ("tensor_model", "pipeline_model", "sequence", "expert_model")
    alone: dict[str, Any] = {**{f"{axis}_parallel_size": 1 for axis in sizes}, "peer_snapshot_interval": 0}
    alone["megatron_overrides"] = {name: of for name, of in args.megatron_overrides.items() if "parallel" not in name}
    nothing = ("save", "save_hf", "profile_dir", "profile_step_start", "profile_step_end", "fsdp_shard_size")
    for name, value in {**alone, **dict.fromkeys((*nothing, "expert_tensor_parallel_size"))}.items():
        args[name] = value
    return args


def _class(path: str) -> type[Any]:
    """Import the class of the run's train workers."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ReplayError(
            f"the run's train workers are of the class {path}, which cannot be imported here: {error}. Run the replay "
            "from the script's folder, and define the class in a module of its own"
        ) from None
    return worker_class("", found)


def _begin(
    load: str | None, save: str | None, step: int, started: int, since: float, folder: Path
) -> tuple[Path | None, int]:
    """Return the checkpoint to begin with, None for the initial weights, and the first step to train.

    Args:
        load: folder of the checkpoint that the run has loaded.
        save: folder of the run's own checkpoints.
        step: to be replayed.
        started: the first step since the run has loaded its checkpoint.
        since: time of that start. Older checkpoints in ``save`` are of another run.
        folder: the run's.

    Raises:
        ReplayError: not all rows of the steps from there on are recorded.
    """
    # Later ones in ``load`` are of the run that this one was begun from.
    found = {number: path for number, path in complete_checkpoints(load).items() if number < started}
    found |= complete_checkpoints(save, since)
    whole = {number for number in sample_steps(folder) if number <= step and _complete(folder, number)}
    begin = step
    while begin in whole and begin - 1 not in found and begin > 0:
        begin -= 1
    if begin in whole:
        return found.get(begin - 1), begin
    what = "has not all its rows" if sample_files(folder, begin)[1].exists() else "has no recorded rows"
    known = ", ".join(str(number) for number in sorted(found) if number < step) or "none"
    raise ReplayError(
        f"step {begin} {what}, and there is no later checkpoint before step {step} (checkpoints: {known} in "
        f"load={load!r} and save={save!r}). Record with record_rows=null, and save more often or keep more "
        "steps (record_steps)"
    )


def _complete(folder: Path, step: int) -> bool:
    about = json.loads(sample_files(folder, step)[1].read_bytes())
    return len(about["rows"]) == about["batch_rows"]


def _rows(folder: Path, step: int, with_ref: bool) -> tuple[TensorDict, int | None]:
    """Return the rows of a step as they were trained, including padding, and the weight version at that time. With
    ``with_ref``, the ranks compute the reference's log-probabilities again."""
    from tensordict import TensorDict

    data, text = sample_files(folder, step)
    about = json.loads(text.read_bytes())
    with np.load(data) as file:
        arrays = dict(file)
    count, width = about["batch_rows"], about["width"]
    starts, lengths = arrays["starts"], np.diff(arrays["offsets"])
    within = np.arange(width)
    real = (within >= starts[:, None]) & (within < (starts + lengths)[:, None])

    def padded(values: np.ndarray, padding: float = 0) -> Any:
        whole = np.full((count, width, *values.shape[1:]), padding, values.dtype)
        whole[real] = values
        return torch.from_numpy(whole)

    named = {"input_ids": "tokens", "weight_versions": "versions", "group_ids": "groups"}
    rows: dict[str, Any] = {"attention_mask": torch.from_numpy(real.astype(np.int64))}
    for name, dtype in about["columns"].items():
        own = named.get(name, name)
        if own in arrays and own in _OF_TOKENS:
            value = padded(arrays[own], -1 if name == "weight_versions" else 0)
        elif own in arrays:
            value = torch.from_numpy(arrays[own])
        elif f"token/{name}" in arrays:
            value = padded(arrays[f"token/{name}"])
        elif f"row/{name}" in arrays:
            value = torch.from_numpy(arrays[f"row/{name}"])
        elif f"jagged/{name}" in arrays:
            offsets = torch.from_numpy(arrays[f"jagged/{name}/offsets"])
            rows[name] = jagged.build(torch.from_numpy(arrays[f"jagged/{name}"]), offsets, 0)
            continue
        else:
            continue
        rows[name] = value.to(getattr(torch, dtype))
    for name in ("values",) if with_ref else ("values", "ref_log_probs"):  # from a critic, or a teacher's future
        if f"token/{name}" in arrays:
            rows[name] = padded(arrays[f"token/{name}"])
    rows[RECORD_ROWS] = torch.from_numpy(arrays["numbers"])
    return TensorDict(rows, batch_size=[count]), about.get("weight_version")


def _in_order(rows: Any, args: Any, dp_size: int) -> Any:
    """Return the rows in an order in which one rank has the same rows in each optimizer step as ``dp_size`` ranks."""
    if args.balance_data:
        rows = balanced_rows(rows, Balance.of(args, dp_size, known_config(args)))
    steps = args.num_steps_per_rollout
    if dp_size == 1 or steps == 1 or "rollout_ids" in rows.keys():  # noqa: SIM118  (a TensorDict has no `in`)
        return rows
    of_ranks = [range(*share.ranges[0]) for share in share_rows(len(rows["input_ids"]), dp_size, "ragged")]
    steps_of_ranks = []
    for of_rank in of_ranks:
        ends = accumulate(sizes_of_steps(of_rank.start, len(of_rank), steps), initial=0)
        steps_of_ranks.append([of_rank[begin:end] for begin, end in pairwise(ends)])
    return rows_of(rows, [row for of_step in zip(*steps_of_ranks, strict=True) for part in of_step for row in part])


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay a step, and exit with code 1 if its numbers differ or it cannot be replayed."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.tracking.replay", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("step", type=int, help="of the run")
    parser.add_argument("--debug", action="store_true", help="stop in a debugger before the step")
    given = parser.parse_args(arguments)
    if "OMP_NUM_THREADS" not in os.environ:  # as in Ray's workers: with more threads, sums have other last bits
        torch.set_num_threads(1)
    try:
        done = replay(given.run, given.step, before=set_trace if given.debug else None)
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    sys.stdout.write(f"{done}\n")
    if done.different:
        sys.exit(1)


if __name__ == "__main__":
    main()
