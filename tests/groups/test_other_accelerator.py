"""An accelerator that is not CUDA's: a matter of names, from Ray's resource to the backend of torch.distributed."""

from test_other_clusters import marked, run_forked


def test_npus_are_placed_seen_and_connected(pytestconfig, tmp_path):
    code = """
        from fork_workers import RANKS_ONLY, forked_workers
        from npu_workers import NpuWorker
        from workers.train.train_placement import slot_devices
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
            shared = RayResourcePool([2], use_gpu=False, resources={"NPU": 0.5}, max_colocate_count=1)
            try:
                RayWorkerGroup(shared, RayClassWithInitArgs(NpuWorker))
            except SingleControllerError as error:
                print("> shared:", "ranks 0 and 1 are on the same GPU, but hccl needs" in str(error) or error)
            ray.shutdown()
    """
    text = run_forked(pytestconfig, tmp_path, code)
    names = "('hccl', 'cpu:gloo,npu:hccl')"
    assert marked(text) == [
        "> slots: {'use_gpu': False, 'resources': {'NPU': 1.0}} {'use_gpu': False, 'resources': {}}",
        f"> ('0',) 0 npu:0 npu:0 {names} 0",
        f"> ('1',) 1 npu:0 npu:0 {names} 1",
        "> summed: (3.0, [(0, 2, [])], 2) (3.0, [(1, 2, [])], 2)",
        "> channel: (1, (0, 1, [0])) (1, (0, 1, [0]))",
        "> torch shares no memory of a 'npu' device between processes, and transport='device' has no other way to a "
        "rollout worker in a process of its own; use 'store', 'group' or 'disk' here",
        "> shared: True",
    ], text
