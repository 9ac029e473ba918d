"""What the workers import and when, and the errors without megatron or transformers."""

import os
import subprocess
import sys
import textwrap

import pytest
from torch_scripts import printed

HEAVY = ("torch", "megatron", "transformers", "tensordict", "omegaconf")

BLOCK = """
    import sys

    class NotInstalled:
        def find_spec(self, name, path=None, target=None):
            if name in BLOCKED or name.startswith(tuple(f"{blocked}." for blocked in BLOCKED)):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NotInstalled())
"""


def environment():
    """Without PYTHONPATH, which is for the other tests' workers: one of its folders is called megatron too."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def python(code, cwd, blocked=None):
    """Run code in a separate process in which the given packages are not installed."""
    head = f"BLOCKED = {blocked!r}\n" + textwrap.dedent(BLOCK) if blocked else "import sys\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
        timeout=100,
    )


def test_driver_imports_nothing_heavy(tmp_path):
    lines = [
        "import single_controller",
        "from single_controller import NVMegatronRayWorkerGroup, RayResourcePool, RayWorkerGroup",
        "import workers",
        "import workers.megatron, workers.device, workers.extras",
        "from workers import MegatronWorker",
        "from workers import init_model_parallel_config, transformer_config",
    ]
    after_each = f"print([m for m in {HEAVY!r} if m in sys.modules])"
    done = python("\n".join(f"{line}\n{after_each}" for line in lines), tmp_path)
    found = dict(zip(lines, done.stdout.splitlines(), strict=True))
    assert found == dict.fromkeys(lines, "[]"), done.stderr


@pytest.fixture(scope="module")
def said(pytestconfig, tmp_path_factory):
    """What one process says in which three tests happen, because importing torch and megatron takes five seconds."""
    told = printed(
        pytestconfig,
        """
        import sys
        import torch, torch.distributed as dist
        import megatron.core.tensor_parallel.random as random
        watched = lambda: [
            *(torch.cuda.__dict__[n] for n in ("current_device", "set_device", "synchronize", "get_rng_state",
                                               "set_rng_state", "manual_seed")),
            dist.init_process_group, dist.new_group, random._get_cuda_rng_state, random._set_cuda_rng_state,
            random.CudaRNGStatesTracker, len(torch.overrides._get_current_function_mode_stack()),
        ]
        before = watched()
        import workers
        from workers import MegatronWorker, ParallelLlamaMLP, init_model_parallel_config
        if not torch.cuda.is_available():
            try:
                MegatronWorker()
            except Exception as error:
                refused = type(error).__name__, "CpuMegatronWorker" in str(error)
                print("without CUDA:", *refused, "workers.megatron.cpu" in sys.modules)
        from workers.megatron.cpu import CpuMegatronWorker
        class Mine(CpuMegatronWorker):
            pass
        init_model_parallel_config({})
        print("changed:", [a is b for a, b in zip(before, watched(), strict=True)].count(False))
        worker = CpuMegatronWorker()
        device = worker.initialize_model_parallel(backend="nccl")
        layer = ParallelLlamaMLP({"hidden_size": 8, "intermediate_size": 24}, init_model_parallel_config({}))
        print("alone:", device, layer(torch.ones(2, 8, device="cuda")).shape, dist.get_backend())
        """,
        tmp_path_factory.mktemp("imports"),
        environment(),
    )
    assert "alone: " in told, told  # the last line
    return dict(line.split(": ", 1) for line in told.splitlines() if ": " in line)


def test_importing_the_workers_does_not_change_torch(said):
    assert said["changed"] == "0"


class TestWithoutMegatron:
    INSTALL = "pip install 'single-controller[megatron]'"

    def test_error_says_what_to_install(self, tmp_path):
        """With nothing of that name; then with a folder called megatron, such as a checkout of its sources, which is
        importable but is not megatron-core. Then without transformers, which activations other than "silu" need."""
        (tmp_path / "megatron").mkdir()
        code = """
            import workers
            given = {"MegatronWorker": (), "init_model_parallel_config": ({},), "ParallelLlamaMLP": ({}, None)}
            for BLOCKED in (("megatron",), ("megatron.core",)):
                print("megatron" in sys.modules)
                for name, arguments in given.items():
                    try:
                        getattr(workers, name)(*arguments)
                    except ImportError as error:
                        print(name, type(error).__name__, error)
            print("megatron" in sys.modules)
            BLOCKED = ("transformers",)
            from workers.megatron.config import activation
            print(activation("silu").__name__)
            activation("gelu")
        """
        done = python(code, tmp_path, ("megatron",))
        names = ("MegatronWorker", "init_model_parallel_config", "ParallelLlamaMLP")
        said = done.stdout.splitlines()
        assert [said[0], said[4], said[8:]] == ["False", "False", ["True", "silu"]], done.stderr  # the folder
        for name, line in zip(2 * names, [*said[1:4], *said[5:8]], strict=True):
            assert line.startswith(f"{name} ImportError ") and self.INSTALL in line, done.stderr
        assert "pip install 'single-controller[hf]'" in done.stderr.splitlines()[-1]

    def test_driver_does_not_need_megatron(self, tmp_path):
        code = "import single_controller, workers; from workers import MegatronWorker; print(MegatronWorker.__name__)"
        done = python(code, tmp_path, ("megatron", "torch", "transformers"))
        assert done.stdout.strip() == "MegatronWorker", done.stderr

    def test_missing_dependency_of_megatron_is_not_reported_as_megatron(self, tmp_path):
        """megatron is installed but a package that it imports is not: the original error, without our advice."""
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        (tmp_path / "megatron" / "__init__.py").write_text("")
        (core / "__init__.py").write_text("import no_such_package")
        done = python("sys.path.insert(0, '.')\nfrom workers import MegatronWorker; MegatronWorker()", tmp_path)
        assert "No module named 'no_such_package'" in done.stderr and self.INSTALL not in done.stderr


def test_worker_without_a_group(said):
    """Constructed in a script or a notebook: rank 0 of 1, where "cuda" means the CPU too."""
    device = "cuda:0 torch.Size([2, 8]) nccl" if has_cuda() else "cpu torch.Size([2, 8]) gloo"
    assert said["alone"] == device


@pytest.mark.skipif("has_cuda()", reason="there is a CUDA device")
def test_worker_needs_cuda_unless_the_cpu_is_asked_for(said):
    assert said["without CUDA"] == "DeviceError True False"


def has_cuda():
    import torch

    return torch.cuda.is_available()
