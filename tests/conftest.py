"""One local Ray for the whole test session."""

import os

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Ray's workers import the tests' worker classes by name.
_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDERS = [
    _HERE,
    *(os.path.join(_HERE, folder) for folder in ("groups", "megatron", "train", "train/backends", "rollout")),
]
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, os.environ.get("PYTHONPATH", "")])

import pytest  # noqa: E402  (Ray reads the variables when it is imported)
from folder_scope import leave_folders  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem):
    yield
    leave_folders(None if nextitem is None else nextitem.path)


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray of this session's own: 16 logical CPUs, 8 crates for the tests of pools, no GPU, no dashboard."""
    import ray

    ray.init(
        "local",
        num_cpus=16,
        num_gpus=0,
        resources={"crate": 8},
        include_dashboard=False,
        object_store_memory=2 * 1024**3,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
