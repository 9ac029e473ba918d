"""torch's profiler around the steps that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def profiled(args: Any, role: str, rollout_id: int, rank: int) -> Iterator[None]:
    """Record what runs inside, for rollouts from ``profile_step_start`` to before ``profile_step_end``, into
    ``profile_dir/actor_rollout_0000003_rank_0.json``: a Chrome trace for Perfetto."""
    start, end = args.profile_step_start, args.profile_step_end
    if start is None or not start <= rollout_id < end:
        yield
        return
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    folder = Path(args.profile_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{role}_rollout_{rollout_id:07d}_rank_{rank}.json"))
