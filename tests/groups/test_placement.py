"""Where ranks run and which devices they get, on logical GPUs and on several nodes, each in its own Ray cluster.

Expected values come from what Ray reports in the worker (`placed_workers`) and from its table of placement groups.
"""

import pytest
from test_other_clusters import run

from workers.device import ACCELERATORS, DeviceError, visible_index

pytestmark = pytest.mark.timeout(200)  # two scripts with many processes, on a possibly busy machine

PREAMBLE = """
        from placed_workers import Placed
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
        def placed(): return RayClassWithInitArgs(Placed)
        def refused(make):
            begin = time.monotonic()
            try:
                make()
            except (PlacementError, ValueError) as error:
                return str(error) if time.monotonic() - begin < 2 else "too late"
"""


clusters = pytest.mark.full("placement on several nodes and on a dozen logical GPUs, each in its own Ray cluster")


@clusters
def test_devices_are_shared_ordered_and_reported():
    out = run(
        PREAMBLE
        + """
        ray.init("local", num_cpus=16, num_gpus=12, resources={"NPU": 2}, include_dashboard=False, log_to_driver=False)
        def gpus(where): return [",".join(w["gpus"]) for w in where]

        with RayResourcePool([1, 2]) as pool:  # nothing is in use: the plan shows which devices come next
            expected = [(r.entry, r.device) for r in pool.plan().ranks]
            with RayWorkerGroup(pool, placed()) as group:
                print("> expected:", expected == [(r.entry, r.device) for r in group.plan().ranks], expected[0])
        end = time.monotonic() + 20
        while ray.available_resources().get("GPU") != 12 and time.monotonic() < end:
            time.sleep(0.1)

        # Two digits: what remains beside nine GPUs in use is 9, 10 and 11.
        others = placement_group([{"GPU": 9}])
        assert others.wait(30)
        with RayResourcePool([3], max_colocate_count=2) as pool:
            print("> before:", [r.devices for r in pool.plan().ranks], pool.plan().state)
            with RayWorkerGroup(pool, placed()) as group:
                where, said = group.where(), group.said()
                print("> order:", gpus(where), [s["devices"] for s in said])
                print("> rays list:", [w["visible"] for w in where], group.index())
                print("> plan:", [r.device for r in pool.plan().ranks], [r.device for r in group.plan().ranks])
                attached = RayWorkerGroup.from_detached(worker_handles=group.workers).plan()
                print("> attached:", [(r.device, r.entry, r.bundle) for r in attached.ranks])
                # A worker for which Ray is not to set the list sees all devices, and still knows its own.
                noset = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
                with RayWorkerGroup(pool[1:3], placed(), worker_env=noset) as second:
                    where = second.where()
                    print("> shared:", gpus(where), [w["assigned"]["GPU"] for w in where])
                    print("> noset:", [w["visible"] for w in where], second.index(),
                          gpus(where) == [s["devices"][0] for s in second.said()])
                    print("> full:", "is full" in refused(lambda: RayWorkerGroup(pool[2:], placed())))
        remove_placement_group(others)

        # A slice comes first: short tasks ask for the devices. The whole pool sees the same order.
        with RayResourcePool([3], num_gpus=0.5, max_colocate_count=1) as halves:
            with RayWorkerGroup(halves[1], placed()) as middle, RayWorkerGroup(halves[2], placed()) as last:
                apart = gpus(middle.where()) + gpus(last.where())
            with RayWorkerGroup(halves, placed(), use_gpu=False) as group:
                print("> without:", [s["devices"] for s in group.said()])
            with RayWorkerGroup(halves, placed()) as group:
                found = gpus(group.where())
                print("> halves:", found == sorted(found, key=int), apart == found[1:], len(set(found)),
                      {w["assigned"]["GPU"] for w in group.where()})

        # A custom resource whose units are devices.
        with RayResourcePool([2], use_gpu=False, resources={"NPU": 1}, max_colocate_count=1) as pool:
            with RayWorkerGroup(pool, placed()) as group:
                where = group.where()
                print("> npu:", [w["npus"] for w in where], [w["ascend"] for w in where],
                      [s["devices"] for s in group.said()])

        for entries, options in (([16], {}), ([13], {"across_nodes": True}), ([3], {"num_gpus": 5})):
            print("> short:", refused(RayResourcePool(entries, **options).place).splitlines()[-1])
    """,
        timeout=180,
    )
    assert out == [
        "> expected: True (1, '0')",
        "> before: [None, None, None] fits",
        "> order: ['9', '10', '11'] [('9',), ('10',), ('11',)]",
        "> rays list: ['9', '10', '11'] [0, 0, 0]",
        "> plan: ['9', '10', '11'] ['9', '10', '11']",
        "> attached: [('9', None, None), ('10', None, None), ('11', None, None)]",
        "> shared: ['10', '11'] [0.5, 0.5]",
        "> noset: [None, None] [10, 11] True",
        "> full: True",
        "> without: [(), (), ()]",
        "> halves: True True 2 {0.5}",
        "> npu: [['0'], ['1']] ['0', '1'] [('0',), ('1',)]",
        "> short: missing: 4 GPU (asked 16, there are 12)",
        "> short: missing: 1 GPU (asked 13, there are 12)",
        "> short: missing: 3 GPU (asked 15, there are 12)",
    ]


@clusters
def test_worker_with_noset_sees_the_devices_of_its_node():
    """Each time, the same with and without a runtime_env."""
    out = run(
        PREAMBLE
        + """
        name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
        os.environ["CUDA_VISIBLE_DEVICES"] = "5,6,7"
        ray.init("local", num_cpus=8, num_gpus=3, include_dashboard=False, log_to_driver=False)
        with RayResourcePool([1]) as pool:
            for value in ("1", "true", "0"):
                by_ray = placed()
                by_ray.update_options({"runtime_env": {"env_vars": {name: value}}})
                for made, given in ((by_ray, {}), (placed(), {name: value})):
                    with RayWorkerGroup(pool, made, worker_env=given) as group:
                        (where,) = group.where()
                        print(">", value, where["visible"], where["gpus"], group.said()[0]["devices"], group.index()[0])
            with RayWorkerGroup(pool, placed(), worker_env={name: "1", "CUDA_VISIBLE_DEVICES": "7,5"}) as group:
                print(">", group.where()[0]["visible"])
    """
    )
    shown = [*["1 5,6,7 ['5'] ('5',) 0"] * 2, *["true 5,6,7 ['5'] ('5',) 0"] * 2, *["0 5 ['5'] ('5',) 0"] * 2, "7,5"]
    assert out == [f"> {line}" for line in shown]


CLUSTER = (
    PREAMBLE
    + """
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "include_dashboard": False})
        ray.init(cluster.address, log_to_driver=False)
        # The larger address joins first, and has fewer of everything.
        ten = cluster.add_node(num_cpus=4, num_gpus=2, node_ip_address="127.0.0.10", resources={"disk": 1, "left": 2})
        two = cluster.add_node(num_cpus=4, num_gpus=4, node_ip_address="127.0.0.2", resources={"right": 2})
        cluster.wait_for_nodes()
        name = {ten.node_id: "ten", two.node_id: "two"}
        def homes(group): return " ".join(name[w["node"]] for w in group.where())
        def locals(group): return [s["local"] for s in group.said()], [s["node_rank"] for s in group.said()]
        def expected(pool):
            end = time.monotonic() + 10
            while pool.plan().state == "waits" and time.monotonic() < end:
                time.sleep(0.05)  # what was closed before becomes free at any time
            return [name[r.node_id] for r in pool.plan().ranks]
        def tabled(group):
            "By rank, the node that Ray's table of placement groups gives."
            table = placement_group_table()
            return " ".join(name[table[w["group"]]["bundles_to_node_id"][w["bundle"]]] for w in group.where())
"""
)


@clusters
def test_several_nodes():
    out = run(
        CLUSTER
        + """
        with RayResourcePool([2, 4], max_colocate_count=1, num_cpus=0.5) as pool:
            plan = expected(pool)
            with RayWorkerGroup(pool, placed()) as group:
                print("> whole:", homes(group), *locals(group))
                print("> as expected and tabled:", plan == homes(group).split(), tabled(group) == homes(group),
                      [r.node_id for r in pool.plan().ranks] == [w["node"] for w in group.where()],
                      [r.device for r in group.plan().ranks] == [s["devices"][0] for s in group.said()])
                said = group.said()
                print("> master:", {s["master"] for s in said}, sorted({s["NODE_RANK"] for s in said}))
            first, second = split_resource_pool(pool, [3, 3])
            third = merge_resource_pool(second[2:], first[0])
            with RayWorkerGroup(second, placed()) as group, RayWorkerGroup(first[0], placed()) as other:
                print("> split:", homes(group), *locals(group), "|", homes(other))
            with RayWorkerGroup(third, placed()) as group:  # merged ranks are ordered by node again
                print("> merged:", homes(group), *locals(group), third.store)
        print("> side by side:", refused(RayResourcePool([3, 3]).place).splitlines()[-1])
        print("> one node:", refused(RayResourcePool([5]).place).splitlines()[-1])
        shortage = refused(RayResourcePool([3], resources={"disk": 1}).place)
        print("> disk:", shortage.splitlines()[-1], "lacks" in shortage)
        print("> apart:", refused(RayResourcePool([4], strategy="STRICT_SPREAD", use_gpu=False).place).splitlines()[-1])

        options = {"max_colocate_count": 1, "num_cpus": 0.5}
        with RayResourcePool([1, 4], across_nodes=True, **options) as pool:  # one placement group; entries fill up
            plan = expected(pool)
            with RayWorkerGroup(pool, placed()) as group:
                print("> across:", homes(group), *locals(group), plan == homes(group).split())
                print("> one group:", len({w["group"] for w in group.where()}))
        with RayResourcePool([2], strategy="STRICT_SPREAD", **options) as pool, RayWorkerGroup(pool, placed()) as group:
            print("> apart:", homes(group), *locals(group), pool.local_world_sizes())
        with RayResourcePool([2], use_gpu=False, strategy="SPREAD") as pool, RayWorkerGroup(pool, placed()) as group:
            print("> spread:", homes(group), *locals(group))

        # Bundles 0 and 2 are on the second node, 1 and 3 on the tenth.
        pg = placement_group([{"CPU": 0.5, "GPU": 1, side: 1} for side in ("right", "left", "right", "left")])
        assert pg.wait(30)
        order = [3, 0, 1, 2]
        pool = RayResourcePool.from_placement_group((pg, order), max_colocate_count=1)
        with RayWorkerGroup(pool, placed()) as group:
            bundles = [w["bundle"] for w in group.where()]
            print("> external:", homes(group), bundles == order, *locals(group), pool.store)
            devices = [s["devices"] for s in group.said()]
            print("> devices:", [r.devices for r in pool.plan().ranks] == devices, group.said()[0]["master"])
        every = RayResourcePool.from_placement_group(pg, max_colocate_count=1)
        print("> found:", " ".join(expected(every)))
        pool.close()
        print("> kept:", placement_group_table(pg)["state"])
    """,
        timeout=180,
    )
    assert out == [
        "> whole: two two two two ten ten [(0, 4), (1, 4), (2, 4), (3, 4), (0, 2), (1, 2)] [0, 0, 0, 0, 1, 1]",
        "> as expected and tabled: True True True True",
        "> master: {'127.0.0.2'} ['0', '1']",
        "> split: two ten ten [(0, 1), (0, 2), (1, 2)] [0, 1, 1] | two",
        "> merged: two ten [(0, 1), (0, 1)] [0, 1] [1, 1]",
        "> side by side: missing: nodes for whole entries: 2 entries have 3 processes or more, room for 1",
        "> one node: missing: a node for 5 processes; the largest holds 4",
        "> disk: missing: 2 disk (asked 3, there are 1) True",
        "> apart: missing: 4 nodes, one for each process; 2 can hold one",
        "> across: two two two two ten [(0, 1), (0, 3), (1, 3), (2, 3), (0, 1)] [0, 0, 0, 0, 1] True",
        "> one group: 1",
        "> apart: two ten [(0, 1), (0, 1)] [0, 1] [1, 1]",
        "> spread: two ten [(0, 1), (0, 1)] [0, 1]",
        "> external: ten two ten two True [(0, 2), (0, 2), (1, 2), (1, 2)] [0, 1, 0, 1] [2, 2]",
        "> devices: True 127.0.0.10",
        "> found: two two ten ten",
        "> kept: CREATED",
    ]


@pytest.mark.parametrize(
    ("device_id", "variables", "kind", "index"),
    [
        ("3", {}, "cuda", 3),
        ("3", {"CUDA_VISIBLE_DEVICES": "3"}, "cuda", 0),
        ("5", {"CUDA_VISIBLE_DEVICES": "4, 5,6"}, "cuda", 1),
        ("GPU-9f", {"CUDA_VISIBLE_DEVICES": "GPU-1c,GPU-9f"}, "cuda", 1),
        ("3", {"CUDA_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "3"}, "rocm", 0),
        ("3", {"CUDA_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "3"}, "cuda", 1),
        ("3", {"CUDA_VISIBLE_DEVICES": "2,3"}, "rocm", 1),
        ("3", {"ASCEND_RT_VISIBLE_DEVICES": "0"}, "cuda", 3),
        ("3", {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "2,3"}, "npu", 1),
        ("3", {"ZE_AFFINITY_MASK": "3"}, "xpu", 0),
        ("3", {"ONEAPI_DEVICE_SELECTOR": "level_zero:2,3"}, "xpu", 1),  # as earlier versions of Ray set it
    ],
)
def test_device_index_is_its_position_in_the_list(device_id, variables, kind, index):
    assert visible_index(device_id, variables, ACCELERATORS[kind].visible) == index


def test_hidden_device_is_an_error():
    with pytest.raises(DeviceError, match=r"device 4 to this.*, but CUDA_VISIBLE_DEVICES='0,1' hides it.*worker_env"):
        visible_index("4", {"CUDA_VISIBLE_DEVICES": "0,1"}, ["CUDA_VISIBLE_DEVICES"])
    with pytest.raises(DeviceError, match="not a number"):
        visible_index("GPU-9f", {}, ["CUDA_VISIBLE_DEVICES"])
