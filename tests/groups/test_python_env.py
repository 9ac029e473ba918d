"""Workers in a Python environment of their own: `RayClassWithInitArgs(..., python=...)`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
import ray
import torch_scripts
from env_workers import ONLY_THERE, Constructed, InAnEnvironment, InTheDriversEnvironment, WithPythonVariables
from test_other_clusters import run

import single_controller
from single_controller import (
    Broadcast,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResultError,
    StartError,
    WorkerDiedError,
    WorkerError,
    attach,
    colocate,
)
from single_controller.ray import python_env


def make_environment(folder, files=None):
    """A virtual environment with the packages of this one, and files of its own, which come first. Its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    (packages / "of_the_driver.pth").write_text(sysconfig.get_path("purelib"))
    for name, text in (files or {}).items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text(text)
    return folder / "bin" / "python"


def distribution(name, number):
    """The file by which a package of that version counts as installed."""
    return {f"{name}-{number}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"}


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with a space in its path, which alone has the module `only_there`."""
    return make_environment(tmp_path_factory.mktemp("an environment"), {"only_there.py": ONLY_THERE})


@pytest.fixture(scope="module")
def theirs(pool, python, tmp_path_factory):
    """Two workers of that environment, which have one more folder on their PYTHONPATH."""
    folder = tmp_path_factory.mktemp("more")
    (folder / "more_modules.py").write_text("here = True")
    made = RayClassWithInitArgs(InAnEnvironment, python=python)
    made.update_options({"runtime_env": {"env_vars": {"PYTHONPATH": f"{folder}:${{PYTHONPATH}}"}}})
    with RayWorkerGroup(pool[:2], made, collectives=False) as group:
        yield group


@pytest.fixture
def drivers_module(tmp_path, monkeypatch):
    """A module that only the driver can import: workers were told the driver's path before."""
    (tmp_path / "only_here.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("only_here")
    del sys.modules["only_here"]


def actors():
    """All actors of this Ray that run or start."""
    return {actor["ActorID"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"}


# --- calls ----------------------------------------------------------------------------------------------------


def test_workers_run_there_with_the_drivers_copy_of_this_library(theirs, python):
    assert [place["prefix"] for place in theirs.where()] == [str(python.parent.parent)] * 2
    assert {place["library"] for place in theirs.where()} == {single_controller.__file__}


def test_child_processes_find_the_same_modules(theirs):
    code = "import more_modules, dispatch.batch, single_controller, workers.rollout; print(dispatch.__file__)"
    dispatch_file = Path(single_controller.__file__).parent.parent / "dispatch" / "__init__.py"
    assert theirs.child(code) == [str(dispatch_file)] * 2


def test_only_this_librarys_packages_are_found_in_the_folder(tmp_path):
    """Installed as a wheel, they are in one folder with all other packages of the driver."""
    root = Path(single_controller.__file__).parent.parent
    for package in ("dispatch", "single_controller", "workers"):
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "only_the_drivers.py").write_text("")
    code = """
        import importlib.util, dispatch.batch, single_controller.call.errors, workers.extras
        assert importlib.util.find_spec("only_the_drivers") is None
        print(dispatch.batch.__file__, single_controller.__file__, workers.extras.__file__)
    """
    folder = tmp_path / "single_controller" / "ray" / "pythonpath"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=root.anchor, env=environment
    )
    names = ("dispatch/batch.py", "single_controller/__init__.py", "workers/extras.py")
    assert done.stdout.split() == [str(tmp_path / name) for name in names], done.stderr


def test_exception_of_a_class_that_only_workers_have(theirs):
    with pytest.raises(WorkerError, match=r"^fail\(\) raised only_there\.OddError on ranks 0, 1.*the text") as caught:
        theirs.fail()
    error = caught.value
    assert (error.method, error.ranks, error.__cause__) == ("fail", (0, 1), None) and error.rank in error.ranks
    assert "raise only_there.OddError" in error.remote_traceback
    future = theirs.fail.remote()
    with pytest.raises(WorkerError, match="the text of an odd error"):
        future.result()
    with pytest.raises(ray.exceptions.RayError, match="the text of an odd error"):
        ray.get(future.refs[0])
    assert len(theirs.where()) == 2


def test_result_of_a_class_that_only_workers_have(theirs):
    with pytest.raises(
        ResultError, match=r"make_odd\(\): the result of rank 0 .*No module named 'only_there'"
    ) as caught:
        theirs.make_odd()
    assert (caught.value.method, caught.value.rank) == ("make_odd", 0)
    future = theirs.make_odd.remote()
    assert theirs.look(future) == [("only_there", 0), ("only_there", 1)]  # the driver does not decode it
    with pytest.raises(ResultError, match="No module named 'only_there'"):
        future.result()
    assert len(theirs.where()) == 2


def test_error_of_this_library_whose_cause_only_workers_have(theirs):
    """The error of a deferred argument that its consumer cannot unpickle: there, the cause is an `OddError`."""
    with pytest.raises(ResultError, match=r"make_unreadable\(\): .*OddError: nobody can read this") as caught:
        theirs.look(theirs.make_unreadable.remote())
    of_producer = caught.value.__cause__
    assert caught.value.consumer == "look" and of_producer.consumer is None and of_producer.__cause__ is None
    assert len(theirs.where()) == 2


def test_argument_of_a_class_that_only_the_driver_has(theirs, drivers_module):
    with pytest.raises(WorkerError, match=r"^look\(\) raised ModuleNotFoundError on ranks 0, 1.*'only_here'") as caught:
        theirs.look(Broadcast(drivers_module.Thing()))
    assert (caught.value.method, caught.value.ranks) == ("look", (0, 1))
    assert "An argument of look() cannot be unpickled on this rank, so the method has not begun" in str(caught.value)
    with pytest.raises(WorkerError, match=r"^look\(\) raised ModuleNotFoundError on rank 1 "):
        theirs.look([None, drivers_module.Thing()])
    assert len(theirs.where()) == 2


def test_one_restarted_rank_runs_there_too(theirs, python):
    before = theirs.where()
    theirs.restart(ranks=[1])
    after = theirs.where()
    assert after[0] == before[0] and after[1]["pid"] != before[1]["pid"]
    assert after[1]["prefix"] == str(python.parent.parent)


# --- checks ---------------------------------------------------------------------------------------------------


def other_python(folder):
    patched = "import sys\nsys.version_info = (3, 99, 0, 'final', 0)\n"
    return make_environment(folder, {"sitecustomize.py": patched})


def other_ray(folder):
    return make_environment(folder, distribution("ray", "1.2.3"))


def other_library(folder):
    return make_environment(folder, distribution("single_controller", "9.9.9"))


def broken_dependency(folder):
    return make_environment(folder, {"msgpack.py": "raise ImportError('msgpack is broken here')"})


def without_ray(folder):
    python = make_environment(folder)
    for file in folder.rglob("*.pth"):
        file.unlink()
    return python


OURS = version("single-controller")
DRIVERS = f"{sys.version_info[0]}.{sys.version_info[1]}"

CANNOT = {
    "nothing-there": (lambda folder: folder / "bin" / "python", r"exit code 127.*No such file"),
    "a-folder": (lambda folder: folder, "exit code 126"),
    "not-executable": (lambda folder: make_file(folder / "python"), "exit code 126.*Permission denied"),
    "not-a-python": (lambda folder: script(folder / "python", "echo I am a shell"), "exit code 0: I am a shell"),
    "silent": (lambda folder: script(folder / "python", "exit 3"), "exit code 3: no output"),
    "other-python": (other_python, rf"it is Python 3\.99, and the driver runs Python {DRIVERS}\. Create"),
    "other-ray": (other_ray, rf"it has Ray 1\.2\.3, and the driver has Ray {ray.__version__}\. Run there: .*pip"),
    "without-ray": (without_ray, rf"it has no Ray, and the driver has Ray {ray.__version__}"),
    "other-library": (other_library, rf"single-controller 9\.9\.9, and the driver has single-controller {OURS}\. Un"),
    "broken-dependency": (broken_dependency, "raised ImportError: msgpack is broken here"),
}


def make_file(path):
    path.write_text("text")
    return path


@pytest.mark.parametrize("what", CANNOT)
def test_python_that_cannot_run_workers_is_refused_before_any_is_created(pool, tmp_path, what):
    make, text = CANNOT[what]
    python, before = make(tmp_path), actors()
    begun = time.monotonic()
    with pytest.raises(StartError, match=text) as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(InAnEnvironment, python=str(python)), name_prefix="refused_")
    assert time.monotonic() - begun < 30 and actors() == before
    assert caught.value.host in str(caught.value) and repr(str(python)) in str(caught.value)
    assert str(caught.value).startswith("group refused_InAnEnvironment: workers cannot run in python=")


def test_python_that_hangs_is_refused(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(python_env, "CHECK_SECONDS", 0.3)
    python = script(tmp_path / "python", "exec sleep 100")
    with pytest.raises(StartError, match=r"has not imported this library within 0\.3 s"):
        RayWorkerGroup(pool, RayClassWithInitArgs(InAnEnvironment, python=python))


def test_repaired_environment_is_checked_again_and_a_good_one_once(pool, tmp_path, monkeypatch):
    nodes = single_controller.ray.placement.reservation.node_locations(pool.slots(), "test")
    python = make_environment(tmp_path, distribution("ray", "1.2.3"))
    env_vars = {"PATH": f"{tmp_path}:${{PATH}}"}  # without the rest of it, nothing would run
    with pytest.raises(StartError):
        python_env.check(str(python), env_vars, nodes, "test")
    for folder in list(tmp_path.rglob("*.dist-info")):
        shutil.rmtree(folder)
    python_env.check(str(python), env_vars, nodes, "test")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)
        python_env.check(str(python), env_vars, nodes, "test")
    python.unlink()
    with pytest.raises(StartError, match="exit code 127"):
        python_env.check(str(python), env_vars, nodes, "test")


def test_values_of_variables_are_in_no_command_line(pool, tmp_path, monkeypatch):
    """All users of a host see command lines."""
    nodes = single_controller.ray.placement.reservation.node_locations(pool.slots(), "test")
    run, commands = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda words, **options: commands.append(words) or run(words, **options))
    with pytest.raises(StartError, match=r"exit code 0: the secret\)"):
        python_env.check(str(script(tmp_path / "python", 'echo "$ONE"')), {"ONE": "more\nthe secret"}, nodes, "test")
    assert commands and "secret" not in str(commands)


def test_variables_of_the_job_are_in_the_environment_that_is_checked(pool, monkeypatch):
    def check(python, env_vars, nodes, name):
        raise StartError(f"checked with {env_vars}")

    made = RayClassWithInitArgs(InAnEnvironment, python=sys.executable)
    made.update_options({"runtime_env": {"env_vars": {"BOTH": "own"}}})
    job = {"env_vars": {"ONE": "job", "BOTH": "job"}}
    monkeypatch.setattr(ray.runtime_context.RuntimeContext, "runtime_env", job)
    monkeypatch.setattr(python_env, "check", check)
    with pytest.raises(StartError, match=r"checked with \{'ONE': 'job', 'BOTH': 'own'\}"):
        RayWorkerGroup(pool[:1], made)


def test_python_is_checked_where_a_group_grows(theirs, python):
    """The last test of that group."""
    assert theirs.shrink(ranks=[1]) == (1,)
    away = python.rename(python.with_name("away"))
    try:
        with pytest.raises(StartError, match="exit code 127"):
            theirs.grow(timeout=15)
    finally:
        away.rename(python)
    assert theirs.broken is None


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, error", [(3, TypeError), (b"bytes", TypeError), ("", ValueError), ("a\0b", ValueError), ([], TypeError)]
)
def test_python_must_be_a_path(given, error):
    with pytest.raises(error, match="python is the path of a Python interpreter"):
        RayClassWithInitArgs(InAnEnvironment, python=given)


def test_path_is_absolute_and_links_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    assert RayClassWithInitArgs(InAnEnvironment, python="python").python == str(tmp_path / "python")
    assert RayClassWithInitArgs(InAnEnvironment, python=Path("python")).python == str(tmp_path / "python")
    assert RayClassWithInitArgs(InAnEnvironment).python is None


def test_constructor_with_a_parameter_called_python_keeps_it():
    made = RayClassWithInitArgs(Constructed, python="pypy")
    assert (made.kwargs, made.python) == ({"python": "pypy"}, None)
    made.set_python(sys.executable)
    assert (made.kwargs, made.python) == ({"python": "pypy"}, sys.executable)
    with LocalWorkerGroup(1, made) as group:  # has no other Python, like other options for actors
        assert group.execute_with_func_generator(lambda worker: worker.python) == ["pypy"]


@pytest.mark.parametrize("key, value", [("py_executable", "python"), ("pip", ["numpy"]), ("conda", "some")])
def test_only_one_option_may_choose_the_python(key, value):
    text = rf"python='.*' and runtime_env=\{{'{key}': \.\.\.\}} both say"
    made = RayClassWithInitArgs(InAnEnvironment, python=sys.executable)
    with pytest.raises(ValueError, match=text):
        made.update_options({"runtime_env": {key: value}})
    other = RayClassWithInitArgs(InAnEnvironment)
    other.update_options({"runtime_env": {key: value}})
    with pytest.raises(ValueError, match=text):
        other.set_python(sys.executable)
    declared = ray.remote(runtime_env={key: value})(InAnEnvironment)
    with pytest.raises(ValueError, match=text):
        RayClassWithInitArgs(declared, python=sys.executable)


def test_roles_of_one_process_have_one_python(pool):
    one = RayClassWithInitArgs(InAnEnvironment, python=sys.executable)
    for other in (RayClassWithInitArgs(InAnEnvironment), RayClassWithInitArgs(InAnEnvironment, python="/other/python")):
        for roles in ({"a": one, "b": other}, {"b": other, "a": one}):
            with pytest.raises(ValueError, match=r"share a process, but '.' asks for python=.* earlier one for"):
                RayWorkerGroup(pool, colocate(roles))


# --- everything that starts workers ---------------------------------------------------------------------------

more_starts = pytest.mark.full("more ways to start workers in a Python of their own")


@more_starts
def test_roles_in_an_environment_and_a_group_outside_on_one_slot(pool, python):
    one = RayClassWithInitArgs(InAnEnvironment, python=python)
    other = RayClassWithInitArgs(InAnEnvironment, python=python)
    with (
        RayWorkerGroup(pool[:1], colocate({"one": one, "other": other})) as roles,
        RayWorkerGroup(pool[:1], RayClassWithInitArgs(InTheDriversEnvironment)) as ours,
    ):
        assert roles.one.where() == roles.other.where() and roles.one.where()[0]["prefix"] == str(python.parent.parent)
        odd = roles.one.make_odd.remote()
        with pytest.raises(ResultError, match=r"make_odd\(\): the result of rank 0 .*'only_there'") as caught:
            ours.look(odd)
        assert caught.value.consumer == "look"
        assert ours.look(["text"]) == ["builtins"]


@more_starts
def test_detached_workers_are_attached_to(ray_cluster, python):
    made = RayClassWithInitArgs(InAnEnvironment, python=python)
    with RayResourcePool([1], use_gpu=False, detached=True) as pool:
        with RayWorkerGroup(pool, made, name_prefix="lasting_env_", detached=True) as group:
            with attach("lasting_env_InAnEnvironment") as found:
                assert found.where() == group.where()
            with RayWorkerGroup.from_detached("lasting_env_", ray_cls_with_init=made) as found:
                assert found.where() == group.where()


@more_starts
def test_python_through_the_options_of_ray_works_as_before(pool, python):
    made = RayClassWithInitArgs(InAnEnvironment)
    env_vars = {"PYTHONPATH": f"{Path(single_controller.__file__).parent.parent}:${{PYTHONPATH}}"}
    path = str(python).replace(" ", "\\ ")  # Ray passes it to a shell
    made.update_options({"runtime_env": {"py_executable": path, "env_vars": env_vars}})
    with RayWorkerGroup(pool[:1], made) as group:
        assert group.where()[0]["prefix"] == str(python.parent.parent)


@more_starts
def test_pythonpath_of_worker_env(pool, python, tmp_path):
    (tmp_path / "of_worker_env.py").write_text("")
    made = RayClassWithInitArgs(InAnEnvironment, python=python)
    path = f"{tmp_path}:${{PYTHONPATH}}"
    with RayWorkerGroup(pool[:1], made, worker_env={"PYTHONPATH": path}) as group:
        assert group.child("import of_worker_env, workers.rollout; print('found')") == ["found"]


def test_python_variables_without_a_runtime_env(pool):
    """Python reads these when it starts, but a runtime_env is not needed for them."""
    switches = dict.fromkeys(("PYTHONASYNCIODEBUG", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER"), "1")
    given = {"PYTHONBREAKPOINT": "env_workers.stopped", "PYTHONUNBUFFERED": "1", **switches}
    made = RayClassWithInitArgs(WithPythonVariables)
    with RayWorkerGroup(pool[:1], made, worker_env=given) as group:
        assert group.effects() == [({}, "stopped", True, True)]
        child = "import faulthandler, sys; print(breakpoint(), sys.dont_write_bytecode, faulthandler.is_enabled())"
        assert group.child(child) == ["stopped True True"]
        pid = group.where()[0]["pid"]
        with pytest.raises(WorkerDiedError):
            group.crash()
    (log,) = Path(ray._private.worker._global_node.get_logs_dir_path()).glob(f"worker-*-{pid}.err")
    assert log.read_text().count("(most recent call first)") > 1  # without the variable, one thread: Ray's choice


@more_starts
def test_modules_beside_the_drivers_script_and_in_its_directory(ray_cluster, python, tmp_path):
    """In the environment, this library is not installed, and the modules are found nowhere else."""
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "beside.py").write_text(
        "import in_directory\nfrom env_workers import InAnEnvironment\nclass Beside(InAnEnvironment):\n    pass\n"
    )
    (tmp_path / "in_directory.py").write_text("")
    context = ray.get_runtime_context()
    driver = tmp_path / "script" / "driver.py"
    driver.write_text(
        textwrap.dedent(f"""
            import ray, sys
            sys.path.append("")
            from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
            from beside import Beside
            ray.init({context.gcs_address!r}, log_to_driver=False)
            made = RayClassWithInitArgs(Beside, python={str(python)!r})
            with RayResourcePool([1], use_gpu=False) as pool, RayWorkerGroup(pool, made) as group:
                print("prefix", group.where()[0]["prefix"])
        """)
    )
    done = subprocess.run(
        [sys.executable, str(driver)], capture_output=True, text=True, cwd=tmp_path, timeout=60, env=dict(os.environ)
    )
    assert f"prefix {python.parent.parent}" in done.stdout, done.stderr


@more_starts
def test_environment_of_the_job_that_chooses_a_python(ray_cluster):
    done = torch_scripts.python(f"""
        import ray, sys
        from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker
        job = {{"pip": ["nothing"], "config": {{"eager_install": False}}}}
        ray.init({ray.get_runtime_context().gcs_address!r}, log_to_driver=False, runtime_env=job)
        try:
            RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Worker, python=sys.executable))
        except ValueError as error:
            print("refused:", error)
    """)
    assert "refused: group Worker: ray.init(): python=" in done.stdout and "'pip'" in done.stdout, done.stderr


@pytest.mark.full("a Ray cluster of its own")
def test_each_node_is_checked(python):
    """The driver is on a node without workers, so both nodes are asked by tasks."""
    out = run(f"""
        from ray.cluster_utils import Cluster
        from env_workers import InAnEnvironment
        cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 0, "include_dashboard": False}})
        ray.init(cluster.address, log_to_driver=False)
        cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with RayResourcePool([1, 1], use_gpu=False) as pool:
            with RayWorkerGroup(pool, RayClassWithInitArgs(InAnEnvironment, python={str(python)!r})) as group:
                print("> runs:", {{place["prefix"] for place in group.where()}} == {{{str(python.parent.parent)!r}}})
            try:
                RayWorkerGroup(pool, RayClassWithInitArgs(InAnEnvironment, python="/nowhere/python"))
            except StartError as error:
                print("> refused:", "(and on 1 more node): " in str(error), "exit code 127" in str(error))
    """)
    assert out == ["> runs: True", "> refused: True True"]
