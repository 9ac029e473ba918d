"""The contenders, with the module of each adapter and the requirements of its environment."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Contender:
    """One contender.

    Attributes:
        name: its short name, for ``--contenders``.
        title: its name in the table.
        module: module of its adapter.
        venv: name of its virtual environment; None for the one that runs the command.
        requirements: packages to install there, with their dependencies.
        alone: packages to install there afterwards, without dependencies.
        env: environment variables.
        data_only: whether to measure it only in cases that move data, because it equals another contender in others.
    """

    name: str
    title: str
    module: str
    venv: str | None = None
    requirements: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    data_only: bool = False


_VERL = {
    "module": "benchmarks.contenders.verl_peer",
    "venv": "verl",
    # The imports of verl and its single controller. verl itself is installed without dependencies: they would replace
    # torch and pull in an inference engine.
    "requirements": ("ray", "numpy", "tensordict", "omegaconf", "transformers", "codetiming", "hydra-core"),
    "alone": ("verl==0.9.1",),
}

CONTENDERS = (
    Contender("memcpy", "one warm memcpy", "benchmarks.contenders.memcpy"),
    Contender("ours", "this library", "benchmarks.contenders.ours"),
    Contender("ray", "plain Ray", "benchmarks.contenders.plain_ray"),
    Contender("verl", "verl 0.9.1", **_VERL),
    Contender(
        "verl-numpy",
        "verl 0.9.1, numpy mode",
        **_VERL,
        env={"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"},
        data_only=True,
    ),
    Contender(
        "monarch",
        "torchmonarch 0.7.0",
        "benchmarks.contenders.monarch_peer",
        venv="monarch",
        requirements=("torchmonarch==0.7.0",),
    ),
)
