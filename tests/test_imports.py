"""What importing costs and refuses, and what a type checker sees."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python(code, cwd=None, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=cwd, timeout=60, **kwargs
    )


def test_import_pulls_in_neither_torch_nor_transformers():
    done = python("""
        import sys
        import single_controller
        print([m for m in ("torch", "transformers", "tensordict", "megatron", "omegaconf") if m in sys.modules])
    """)
    assert done.stdout.strip() == "[]", done.stderr


def test_import_takes_under_three_tenths_of_a_second():
    """Ray's own import not counted. The best of three: the machine is noisy."""
    times = []
    for _ in range(3):
        done = python("""
            import time
            import ray, ray.actor, ray.cloudpickle, ray.exceptions, ray.util.placement_group
            begin = time.perf_counter()
            import single_controller
            print(time.perf_counter() - begin)
        """)
        times.append(float(done.stdout))
    assert min(times) < 0.3


@pytest.mark.parametrize("name", ["dispatch", "workers"])
def test_a_folder_of_the_users_that_hides_ours_is_reported(tmp_path, name):
    (tmp_path / name).mkdir()
    theirs = tmp_path / name / "__init__.py"
    theirs.write_text("register = None\n")
    done = python("import single_controller", cwd=tmp_path)
    assert "ImportError" in done.stderr
    assert str(theirs) in done.stderr and str(ROOT / name / "__init__.py") in done.stderr
    assert "Rename" in done.stderr


def test_base_never_imports_ray():
    done = python(f"""
        import sys
        sys.modules["ray"] = None
        import dispatch
        from importlib import import_module
        import pkgutil, types
        package = types.ModuleType("single_controller")
        package.__path__ = [{str(ROOT / "single_controller")!r}]
        sys.modules["single_controller"] = package
        base = import_module("single_controller.base")
        for module in pkgutil.iter_modules(base.__path__):
            import_module("single_controller.base." + module.name)
        print("fine")
    """)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_engine_in_this_process_starts_no_ray_and_is_imported_when_asked_for():
    done = python("""
        import sys
        import single_controller
        print("ray" in sys.modules, "single_controller.local" in sys.modules)
        from single_controller import LocalWorkerGroup
        import ray
        print(ray.is_initialized(), "torch" in sys.modules, "single_controller.ray.group" in sys.modules)
    """)
    assert done.stdout.split() == ["False", "False", "False", "False", "False"], done.stderr


def test_only_local_and_who_uses_it_know_of_it():
    for folder in ("base", "ray"):
        for file in (ROOT / "single_controller" / folder).glob("*.py"):
            assert "single_controller.local" not in file.read_text(), file


def test_the_wheel_has_exactly_the_three_packages():
    top = importlib.metadata.distribution("single-controller").read_text("top_level.txt")
    assert set(top.split()) == {"dispatch", "single_controller", "workers"}
    assert all((ROOT / name / "py.typed").exists() for name in top.split())


def test_a_type_checker_still_knows_a_registered_method(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent("""
        from single_controller import Dispatch, Worker, register

        class Mine(Worker):
            @register(Dispatch.ONE_TO_ALL)
            def add(self, x: int, y: str = "") -> float:
                return 1.0

        reveal_type(Mine().add)
        Mine().add("wrong")
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(script)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        timeout=120,
    )
    assert "def (x: int, y: str =) -> float" in done.stdout
    assert 'incompatible type "str"; expected "int"' in done.stdout


@pytest.mark.parametrize(
    "package", ["single_controller", "single_controller.local", "single_controller.ray", "workers"]
)
def test_every_name_that_a_package_promises_can_be_imported(package):
    module = importlib.import_module(package)
    assert set(module.__all__) == set(module._HOMES) <= set(dir(module))
    assert all(getattr(module, name).__name__ == name or name in ("Dispatch", "Execute") for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name
