"""How long each test file may take, and what to report when one takes longer.

A budget is in seconds of wall time, setup and teardown included, and is about three times what the file takes on an
idle machine with two cores. A file without an entry has `DEFAULT`. The budgets also order the files of a parallel
run: the longest start first.

A slow or loaded machine must not fail the suite. If most files of a run take longer, the machine is the reason, and
the budgets grow with it: see `slowness`. A run of a few files cannot tell, so budgets apply only to larger runs.
"""

from statistics import median

DEFAULT = 30

BUDGETS: dict[str, int] = {
    "tests/agents/test_gateway.py": 60,
    "tests/agents/test_gateway_abuse.py": 45,
    "tests/agents/test_gateway_router.py": 60,
    "tests/agents/test_session_streams.py": 60,
    "tests/agents/test_sessions.py": 65,
    "tests/agents/test_worker_gateways.py": 45,
    "tests/groups/test_call_order.py": 50,
    "tests/groups/test_calls.py": 50,
    "tests/groups/test_changes_meet_calls.py": 140,
    "tests/groups/test_crossings.py": 60,
    "tests/groups/test_detached.py": 60,
    "tests/groups/test_failure.py": 130,
    "tests/groups/test_futures.py": 120,
    "tests/groups/test_leaves_nothing.py": 40,
    "tests/groups/test_local.py": 30,
    "tests/groups/test_map.py": 90,
    "tests/groups/test_memory.py": 40,
    "tests/groups/test_other_accelerator.py": 40,
    "tests/groups/test_other_clusters.py": 60,
    "tests/groups/test_pools.py": 90,
    "tests/groups/test_python_env.py": 40,
    "tests/groups/test_random_calls.py": 100,
    "tests/groups/test_replace.py": 50,
    "tests/groups/test_status.py": 60,
    "tests/groups/test_supervision.py": 100,
    "tests/groups/test_verl_calls.py": 75,
    "tests/groups/test_view_live.py": 60,
    "tests/groups/test_wire.py": 60,
    "tests/hosts/test_hosts.py": 120,
    "tests/megatron/test_cpu.py": 60,
    "tests/megatron/test_imports_of_megatron.py": 40,
    "tests/megatron/test_initialise.py": 110,
    "tests/megatron/test_lm.py": 70,
    "tests/megatron/test_mlp.py": 140,
    "tests/megatron/test_train_model.py": 130,
    "tests/plans/test_megatron.py": 40,
    "tests/rollout/test_code_reward.py": 45,
    "tests/rollout/test_exact.py": 60,
    "tests/rollout/test_hf_engine.py": 75,
    "tests/rollout/test_http_engine.py": 45,
    "tests/rollout/test_peer_weights.py": 45,
    "tests/rollout/test_rewards.py": 90,
    "tests/rollout/test_stream.py": 90,
    "tests/simdevice/test_simdevice.py": 115,
    "tests/test_bad_calls.py": 80,
    "tests/test_imports.py": 30,
    "tests/test_readme.py": 80,
    "tests/test_tutorials.py": 60,
    "tests/train/backends/test_actor_critic.py": 110,
    "tests/train/backends/test_async_rollout.py": 90,
    "tests/train/backends/test_both_backends.py": 260,
    "tests/train/backends/test_exact_training.py": 100,
    "tests/train/backends/test_fsdp.py": 80,
    "tests/train/backends/test_fsdp_shards.py": 60,
    "tests/train/backends/test_gradients.py": 90,
    "tests/train/backends/test_invariance.py": 45,
    "tests/train/backends/test_lora.py": 50,
    "tests/train/backends/test_megatron_group.py": 50,
    "tests/train/backends/test_model_types.py": 40,
    "tests/train/backends/test_replace_ranks.py": 40,
    "tests/train/backends/test_sequence_parallel.py": 80,
    "tests/train/backends/test_weights_reach_rollout.py": 235,
    "tests/train/test_train_group.py": 120,
    "tests/train/test_weight_sync.py": 80,
    "tests/train/test_weight_sync_failures.py": 50,
    "tests/train/test_weight_sync_model.py": 60,
    "tests/typing/test_install.py": 60,
    "tests/view/test_page.py": 40,
}

IN_FULL = {
    "tests/agents/test_session_streams.py": 370,
    "tests/hosts/test_faults.py": 590,
    "tests/recovery/test_rounds.py": 1,  # the last: it waits until the test of the other process has ended
    "tests/rollout/test_nothing_lost.py": 590,
    "tests/simdevice/test_demo_on_devices.py": 190,
    "tests/simdevice/test_simdevice.py": 710,
    "tests/test_demo.py": 800,
    "tests/test_notebooks.py": 290,
    "tests/train/test_weight_sync_model.py": 340,
}
"""Seconds of the files that take far longer in `make test-all` than their budget: for the order alone."""

HEADROOM = 3
"""The ratio of a budget to the file's time on an idle machine."""


def over_budget(seconds):
    """A line for each file that took longer than its budget; ``seconds`` are by file."""
    factor = slowness(seconds)
    if factor is None:
        return []
    allowed = {file: factor * BUDGETS.get(file, DEFAULT) for file in sorted(seconds)}
    return [
        f"{file} took {seconds[file]:.0f} s; its budget is {BUDGETS.get(file, DEFAULT)} s, on this machine {most:.0f} s"
        for file, most in allowed.items()
        if seconds[file] > most
    ]


def slowness(seconds):
    """How much slower than an idle two-core machine this one is, at least 1; None if too few files ran to tell.

    The median over the larger files with a budget: one file that has grown does not move it, a loaded machine does.
    """
    ratios = [
        took * HEADROOM / BUDGETS[file] for file, took in seconds.items() if BUDGETS.get(file, 0) > DEFAULT and took > 5
    ]
    return max(1.0, median(ratios)) if len(ratios) >= 5 else None
