"""An accelerator that is not CUDA's: a matter of names, from Ray's resource to the backend of torch.distributed. And
what workers print, which this Ray brings to its driver's terminal: the tests' Ray has no log monitor."""

import re

import pytest
from test_other_clusters import marked, run_forked

CODE = """
    import logging
    from fork_workers import RANKS_ONLY, forked_workers
    from npu_workers import NpuWorker
    from workers.train.train_placement import slot_devices

    said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout.reconfigure(line_buffering=True)

    class Talker(Worker):
        def __init__(self):
            super().__init__()
            print("made", self.rank)

        @register(Dispatch.ONE_TO_ALL)
        def talk(self):
            print("printed by", self.rank)
            logging.getLogger("mine").warning("logged by %d", self.rank)
            os.system(f"echo echoed by {self.rank}")

    with forked_workers(RANKS_ONLY) as start_server:
        ray.init("local", num_cpus=2, num_gpus=0, resources={"NPU": 4}, include_dashboard=False)
        start_server()
        print("> slots:", slot_devices(), slot_devices(False))
        with RayResourcePool([2], **slot_devices(), max_colocate_count=1) as pool:
            with RayWorkerGroup(pool, RayClassWithInitArgs(NpuWorker)) as group:
                for one in group.where():
                    print(">", *one.values())
                print("> summed:", *group.summed())
                print("> channel:", *group.channel())
                print(">", group.device_transport()[0])
        with RayResourcePool([2], use_gpu=False) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Talker)) as group:
            group.talk()
            lines = [f"{what} {rank}" for what in ("made", "printed by", "logged by", "echoed by") for rank in (0, 1)]
            end = time.monotonic() + 20  # Ray's log monitor looks twice a second
            while time.monotonic() < end and not all(line in open("said").read() for line in lines):
                time.sleep(0.02)
        shared = RayResourcePool([2], use_gpu=False, resources={"NPU": 0.5}, max_colocate_count=1)
        try:
            RayWorkerGroup(shared, RayClassWithInitArgs(NpuWorker))
        except SingleControllerError as error:
            print("> shared:", "ranks 0 and 1 are on the same GPU, but hccl needs" in str(error) or error)
        ray.shutdown()
"""


@pytest.fixture(scope="module")
def said(pytestconfig, tmp_path_factory):
    """What is on the terminal of a driver."""
    folder = tmp_path_factory.mktemp("driver")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_DEDUP_LOGS", "RAY_COLOR_PREFIX"):
            patch.setenv(name, "0")
        printed = run_forked(pytestconfig, folder, CODE)
    return printed + (folder / "said").read_text()


def test_npus_are_placed_seen_and_connected(said):
    names = "('hccl', 'cpu:gloo,npu:hccl')"
    assert marked(said) == [
        "> slots: {'use_gpu': False, 'resources': {'NPU': 1.0}} {'use_gpu': False, 'resources': {}}",
        f"> ('0',) 0 npu:0 npu:0 {names} 0",
        f"> ('1',) 1 npu:0 npu:0 {names} 1",
        "> summed: (3.0, [(0, 2, [])], 2) (3.0, [(1, 2, [])], 2)",
        "> channel: (1, (0, 1, [0])) (1, (0, 1, [0]))",
        "> torch shares no memory of a 'npu' device between processes, and transport='device' has no other way to a "
        "rollout worker in a process of its own; use 'store', 'group' or 'disk' here",
        "> shared: True",
    ], said


def test_worker_lines_show_class_and_rank(said):
    text = re.sub(r"\x1b\[\d+m", "", said)
    for rank in (0, 1):
        for line in ("made", "printed by", "logged by", "echoed by"):
            assert re.search(rf"^\(Talker rank {rank} pid=\d+\) .*{line} {rank}$", text, re.M), text
    assert ":actor_name:" not in text
