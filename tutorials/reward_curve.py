"""The plot of `train_grpo.py`: mean reward by rollout."""

from pathlib import Path


def plot_rewards(path: Path, rewards: list[float], goal: float | None) -> None:
    """Draw the rewards, and a line at the goal if there is one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, label="mean reward")
    axes.set(xlabel="rollout", ylabel="mean reward")
    if goal is not None:
        axes.axhline(goal, linestyle="--", color="grey", label=f"goal: {goal}")
        axes.set(ylim=(0, 1.02))
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
