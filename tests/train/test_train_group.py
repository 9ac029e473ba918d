"""RayTrainGroup as a user meets it: its worker, its place, its environment, its life, and what goes wrong.

The workers of `plain_train_workers` have no model. The references are what Ray says in the worker's process, and Ray's
table of placement groups.
"""

import argparse
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import ray
from plain_train_workers import DiskFull, Incomplete, Manager, Meeting, Plain, Spartan
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from single_controller import GroupBrokenError, GroupClosedError, PlacementError, RayResourcePool, Worker, WorkerError
from workers.train.environment import NOSET, train_environment
from workers.train.group import RayTrainGroup
from workers.train.placement import place
from workers.train.read_args import TrainArgsError, read_args
from workers.train.worker_class import backend_class

ROWS = {"x": np.arange(5)}


def group_of(args=None, ranks=2, pg=None, share=0.1, **options):
    return RayTrainGroup(args or {}, 1, ranks, pg, share, **{"actor_cls": Plain, **options})


@pytest.fixture(scope="module")
def slots(ray_cluster):
    with RayResourcePool([3], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="module")
def actor(slots):
    with group_of(pg=slots[:2]) as group:
        ray.get(group.async_init())
        yield group


@pytest.fixture
def bundles(ray_cluster):
    pg = placement_group([{"CPU": 0.5}] * 4)
    assert pg.wait(30)
    yield pg
    remove_placement_group(pg)


# --- which worker ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Incomplete, "Incomplete lacks clear_memory, get_parallel_config, save_model, sleep, update_weights, wake_up"),
        (Worker, "actor_cls is a subclass of TrainWorker"),
        (Plain.init, "actor_cls is a subclass of TrainWorker"),
    ],
)
def test_a_class_that_is_no_train_worker(ray_cluster, cls, message):
    with pytest.raises(TypeError, match=message):
        group_of(actor_cls=cls)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: group_of({"clip_gradd": 1}), TrainArgsError, "did you mean 'clip_grad'"),
        (lambda: group_of(ranks=0), ValueError, "num_gpus_per_node=0: it is an integer from 1"),
        (lambda: RayTrainGroup({}, 1.5, 1, actor_cls=Plain), ValueError, "num_nodes=1.5"),
        (lambda: group_of(share=1.5), ValueError, "num_gpus_per_actor=1.5: it is a share"),
        (lambda: group_of(role="judge"), ValueError, "role='judge': it is one of 'actor', 'critic'"),
        (lambda: group_of(num_resources_per_node=2), ValueError, "give resources, and no pg"),
        (lambda: group_of(pg=3), TypeError, "takes a placement group"),
        (lambda: group_of(ranks=40), PlacementError, r"missing: 24 CPU \(asked 40, there are 16\)"),
        (lambda: group_of(resources={"barge": 1}), PlacementError, "barge"),
    ],
)
def test_what_a_group_is_not_made_of(ray_cluster, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_backend_decides():
    assert [backend_class(name).__name__ for name in ("fsdp", "megatron")] == ["FSDPTrainWorker", "MegatronTrainWorker"]


# --- where -------------------------------------------------------------------------------------------------------


def where(group):
    return group.worker_group.where()


def test_without_a_place_one_is_made_and_freed(ray_cluster):
    group = group_of(share=0.5, resources={"crate": 1}, num_resources_per_node=3)
    found = where(group)
    (table,) = [t for t in placement_group_table().values() if t["placement_group_id"] == found[0]["group"]]
    assert list(table["bundles"].values()) == [{"CPU": 1.0, "crate": 1.5}] * 2
    assert [w["assigned"] for w in found] == [{"CPU": 0.5, "crate": 1.0}] * 2
    group.close()
    assert placement_group_table()[found[0]["group"]]["state"] == "REMOVED"
    with pytest.raises(GroupClosedError, match="make a new one"):
        group.async_init()
    with pytest.raises(GroupClosedError, match="make a new one"):
        group.create()


def test_a_pool_lends_its_first_slots_and_stays(slots):
    with group_of(pg=slots, share=0.4) as one, group_of(pg=slots, share=0.4, role="critic") as two:
        assert one.world_size == 2
        assert [w["bundle"] for w in where(one)] == [w["bundle"] for w in where(two)]
        assert [w["assigned"]["CPU"] for w in where(one) + where(two)] == [0.4] * 4
    with group_of(pg=slots, ranks=3) as group:
        assert [s["rank"] for s in group.worker_group.said()] == [0, 1, 2]
        with pytest.raises(TrainArgsError, match="has 3 slots for 4 ranks"):
            group_of(pg=slots, ranks=4)


def test_rank_i_is_in_the_ith_bundle(bundles):
    order = [2, 0, 3, 1]
    with group_of(pg=(bundles, order), share=1) as group:
        assert [w["bundle"] for w in where(group)] == [2, 0]
        assert {w["group"] for w in where(group)} == {bundles.id.hex()}
        assert [w["assigned"]["CPU"] for w in where(group)] == [0.5, 0.5], "a share of what a slot has"
    with group_of(pg=(bundles, order, [7, 5, 3, 1]), ranks=4) as group:
        assert [w["bundle"] for w in where(group)] == order
    with group_of(pg=bundles) as group:
        assert len(where(group)) == 2
    with pytest.raises(TrainArgsError, match="3 bundle indices for 4 ranks"):
        group_of(pg=(bundles, order[:3]), ranks=4)
    with pytest.raises(TrainArgsError, match="4 slots for 5 ranks"):
        group_of(pg=bundles, ranks=5)
    assert placement_group_table(bundles)["state"] == "CREATED", "who made it frees it"


def test_shares_that_do_not_come_out_even_fit_all_the_same(bundles):
    groups = [group_of(ranks=1, pg=(bundles, [0]), share=1 / 6) for _ in range(6)]
    assert [where(group)[0]["assigned"]["CPU"] for group in groups] == [0.0833] * 6
    for group in groups:
        group.close()


def test_place_puts_roles_side_by_side_or_together(ray_cluster):
    args = {"actor_num_gpus_per_node": 2, "rollout_num_workers": 3}
    with place(args) as side:
        assert (side.whole.world_size, side.critic, side.share) == (5, None, 1.0)
        with group_of(pg=side.actor, share=side.share) as actor, group_of(ranks=3, pg=side.rollout) as rollout:
            assert [w["bundle"] for w in where(actor) + where(rollout)] == [s.bundle for s in side.whole.slots()]
    with place({**args, "advantage_estimator": "gae", "critic_num_nodes": 2, "critic_num_gpus_per_node": 1}) as side:
        assert [side.actor.world_size, side.critic.world_size, side.rollout.world_size] == [2, 2, 3]
        assert side.whole.world_size == 7
    with pytest.raises(GroupClosedError, match="closed"):
        group_of(pg=side.actor)
    with place({**args, "advantage_estimator": "gae", "colocate": True}) as shared:
        assert (shared.whole.world_size, shared.share) == (3, 1 / 3)
        pools = (shared.actor, shared.critic, shared.rollout)
        groups = [group_of(ranks=pool.world_size, pg=pool, share=shared.share) for pool in pools]
        found = [[w["bundle"] for w in where(group)] for group in groups]
        assert found[0] == found[1] == found[2][:2]
    for group in groups:
        with pytest.raises(GroupClosedError):
            where(group)
    with (
        pytest.raises(PlacementError, match=r"(?s)node.*missing: 44 CPU \(asked 60, there are 16\)"),
        place({"actor_num_gpus_per_node": 59}) as side,
    ):
        group_of(ranks=59, pg=side.actor)


# --- what it is given --------------------------------------------------------------------------------------------


def test_the_environment_of_its_workers(slots, monkeypatch):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    args = {"train_env_vars": {"MINE": "1", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}, "use_routing_replay": True}
    names = ("NCCL_CUMEM_ENABLE", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "MINE", "ENABLE_ROUTING_REPLAY", NOSET[0])
    for role, replay in (("actor", "1"), ("critic", None)):
        with group_of(args, 1, slots, role=role) as group:
            found = group.worker_group.variables(*names)[0]
            assert [found[name][0] for name in names] == ["0", "0", "1", replay, "1"]


def test_variables_by_role_and_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    plain = train_environment(read_args({"offload_train": True, "train_backend": "megatron"}), "actor", use_gpu=False)
    assert plain.worker["NCCL_CUMEM_ENABLE"] == "1" and plain.process == {}
    assert plain.worker["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert {name for name in plain.worker if "NOSET" in name} == set(NOSET)
    assert not {"LD_PRELOAD", "TMS_INIT_ENABLE", "ENABLE_ROUTING_REPLAY"} & {*plain.worker}

    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    megatron = {"offload_train": True, "train_backend": "megatron"}
    with pytest.raises(TrainArgsError, match="without its preload library"):
        train_environment(read_args(megatron), "actor", use_gpu=True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    (tmp_path / "torch_memory_saver_hook_mode_preload_cu12.abi3.so").touch()
    with pytest.raises(TrainArgsError, match="library beside it for CUDA 13"):
        train_environment(read_args(megatron), "actor", use_gpu=True)
    library = tmp_path / "torch_memory_saver_hook_mode_preload.abi3.so"
    library.touch()
    assert train_environment(read_args(megatron), "actor", use_gpu=True).process["LD_PRELOAD"] == str(library)
    library = tmp_path / "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    library.touch()
    found = train_environment(read_args(megatron), "critic", use_gpu=True)
    assert found.process == {
        **dict.fromkeys(NOSET, "1"),
        "LD_PRELOAD": str(library),
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    }
    assert not found.worker.keys() & found.process.keys()
    for args in (
        {"offload_train": True},
        {"train_backend": "megatron"},
        {**megatron, "update_weights_transport": "device"},  # another process cannot open such memory
    ):
        assert "LD_PRELOAD" not in train_environment(read_args(args), "actor", use_gpu=True).process
    given = train_environment(read_args({**megatron, "train_env_vars": {"LD_PRELOAD": "m"}}), "actor", use_gpu=True)
    assert given.process["LD_PRELOAD"] == "m"


def test_logical_gpus_their_shares_and_what_a_process_begins_with():
    """In a Ray of its own, that was told of GPUs."""
    code = """
        import ray
        from plain_train_workers import Plain
        from workers.train.group import RayTrainGroup
        from workers.train.placement import place
        ray.init("local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
        args = {"train_env_vars": {"LD_PRELOAD": "libm.so.6", "LATER": "1"}}
        with RayTrainGroup(args, 1, 2, None, 0.4, actor_cls=Plain) as one:
            with RayTrainGroup({}, 1, 2, one.pool, 0.4, actor_cls=Plain, role="critic") as two:
                for group in (one, two):
                    found = group.worker_group.where()
                    print(">", [w["gpus"] for w in found], [list(w["devices"]) for w in found],
                          [w["assigned"]["GPU"] for w in found])
            noset = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
            print(">", one.worker_group.variables("LD_PRELOAD", noset, "LATER", "CUDA_VISIBLE_DEVICES")[1])
        with place({"rollout_num_workers": 2}) as side:
            print(">", side.whole.use_gpu, side.whole.bundle)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("> ")] == [
        "> [['0'], ['1']] [['0'], ['1']] [0.4, 0.4]",
        "> [['0'], ['1']] [['0'], ['1']] [0.4, 0.4]",
        "> {'LD_PRELOAD': ('libm.so.6', True), 'RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES': ('1', True), "
        "'LATER': ('1', False), 'CUDA_VISIBLE_DEVICES': (None, False)}",
        "> True {'CPU': 1.0, 'GPU': 1.0}",
    ]


def test_a_namespaces_extras_reach_the_workers(slots):
    with pytest.warns(UserWarning, match="my_thing") as told, group_of(
        argparse.Namespace(lr=1e-3, my_thing={"deep": (1, 2)}, user={"a": 1}), 1, slots
    ) as group:  # fmt: skip
        ray.get(group.async_init())
        found = group.worker_group.execute_with_func_generator(
            lambda worker: (worker.args.lr, worker.args.my_thing, worker.args.user.a)
        )
    assert found == [(1e-3, {"deep": (1, 2)}, 1)]
    assert len(told) == 1


# --- what it does ------------------------------------------------------------------------------------------------


def test_async_methods_give_a_reference_for_each_rank(actor):
    refs = actor.async_init(with_ref=True)
    assert len(refs) == 2 and all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert ray.get(refs) == [0, 0]
    refs = actor.async_train(3, ROWS)
    assert len(refs) == 2 and all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert ray.get(refs) == [
        {"rollout_id": 3, "rows": [0, 1, 2], "computed": []},
        {"rollout_id": 3, "rows": [3, 4], "computed": []},
    ]
    said = actor.worker_group.said()
    assert [(s["rank"], s["role"], s["with_ref"]) for s in said] == [(0, "actor", True), (1, "actor", True)]
    with pytest.raises(TrainArgsError, match="3 references for 2 dp ranks"):
        actor.async_train(3, [ray.put(1)] * 3)
    with pytest.raises(ValueError, match="was made for the role 'actor'"):
        actor.async_init(role="critic")


def test_the_other_methods_wait(actor):
    assert actor.offload() == 201 and actor.onload() == 21
    assert actor.get_parallel_config() == {"dp_size": 2}
    actor.clear_memory()
    assert [s["calls"] for s in actor.worker_group.said()] == [["clear_memory"]] * 2
    assert actor.save_model(0) is None
    address, port = actor.worker_group.get_master_addr_and_port()[1]
    assert (address, port) == (actor.worker_group.master_address, actor.worker_group.master_port)
    assert actor.worker_group.get_master_addr_and_port()[0] == (address, port) and port > 0
    assert "RayTrainGroup of 2: actor, Plain" in repr(actor)


def test_nothing_before_async_init(slots):
    with group_of(pg=slots) as group:
        for name, args in {"async_train": (0, ROWS), "save_model": (0,), "update_weights": (), "onload": (),
                           "offload": (), "clear_memory": (), "set_rollout_manager": (None,)}.items():  # fmt: skip
            with pytest.raises(RuntimeError, match=rf"{name}\(\): the actor's workers have no model yet; call async_"):
                getattr(group, name)(*args)


def test_versions_are_counted_and_told_to_the_manager(slots):
    with group_of(pg=slots) as group:
        ray.get(group.async_init())
        assert (group.weight_version, group.update_weights(), group.update_weights()) == (0, 1, 2)
        manager = Manager()
        sent = []
        group.set_rollout_manager(manager)
        assert group.worker_group.said()[1]["manager"].name == "manager"
        assert group.update_weights() == manager.weight_version == group.weight_version == 3
        assert manager.refresh() == 4, "the manager calls it for workers that were restarted"
        assert [s["version"] for s in group.worker_group.said()] == [4, 4]
        ray.get(group.async_init())  # whose workers forget whom they send to
        group.worker_group.execute_with_func_generator(lambda worker: setattr(worker, "rollout_manager", None))
        assert group.update_weights() == 5 and group.worker_group.said()[0]["manager"] is not None
        group.offload()
        assert manager.refresh() == 6 and group.worker_group.said()[0]["asleep"], "they sleep while others generate"
        group.onload()
        other = Manager(refresh=sent.append)
        group.set_rollout_manager(other)
        assert other.refresh == sent.append


def test_a_rank_that_raises_shows_soon(slots):
    with group_of({"user": {"fail_at": 1}}, pg=slots, actor_cls=Meeting) as group:
        ray.get(group.async_init())
        begin = time.monotonic()
        with pytest.raises(ZeroDivisionError, match="rank 1 cannot"):
            ray.get(group.async_train(0, ROWS)[1])
        assert time.monotonic() - begin < 30


def test_a_rank_that_is_killed_amid_a_collective_shows_soon_and_the_group_can_go_on(slots):
    with group_of({"user": {"die": 1}}, pg=slots, actor_cls=Meeting) as group:
        ray.get(group.async_init())
        refs = group.async_train(0, ROWS)
        begin = time.monotonic()
        with pytest.raises(ray.exceptions.RayError, match=r"(?s)died|gloo|[Cc]onnection"):
            ray.get(refs)
        with pytest.raises(ray.exceptions.ActorDiedError):
            ray.get(refs[1])
        assert time.monotonic() - begin < 30
        with pytest.raises(GroupBrokenError, match=r"rank 1 died.*restart\(\) of the train group makes"):
            group.async_train(1, ROWS)
        group._init = (read_args({}), "actor", False)
        assert group.restart() == [0, 0]
        assert ray.get(group.async_train(0, ROWS)) == [{"sum": 2.0}] * 2


def test_a_worker_of_slimes_form(slots):
    """Whose methods take no version and return nothing."""
    with group_of(pg=slots, actor_cls=Spartan) as group:
        ray.get(group.async_init())
        assert (group.update_weights(), group.offload(), group.onload()) == (1, 0, 0)


def test_a_call_that_is_refused_changes_nothing(slots):
    with group_of({"lr": 1.0}, pg=slots) as group:
        with pytest.raises(ValueError, match="was made for the role 'actor'"):
            group.async_init({"lr": 2.0}, role="critic")
        assert group.args.lr == 1.0
        with pytest.raises(RuntimeError, match="no model yet"):
            group.save_model(0)


# --- release and create ------------------------------------------------------------------------------------------


def test_released_workers_are_made_again_where_they_were(slots, tmp_path):
    group = group_of({"save": str(tmp_path)}, pg=slots)
    assert group.release() is None and group.create() is None, "not initialised before, not after"
    ray.get(group.async_init(with_ref=True))
    group.update_weights()
    group.set_rollout_manager(Manager())
    before = where(group), group.worker_group.said()
    with pytest.raises(RuntimeError, match=r"has its workers; release\(\) ends them first"):
        group.create()
    group.release()
    group.release()
    assert "released" in repr(group)
    for call in (lambda: group.async_train(0, ROWS), group.async_init, group.update_weights, group.onload,
                 group.get_parallel_config, lambda: group.save_model(1), lambda: group.worker_group):  # fmt: skip
        with pytest.raises(GroupClosedError, match=r"released; create\(\) makes them again"):
            call()
    assert group.create() == [0, 0], "nothing was saved: from the beginning"
    assert where(group) == before[0]
    for old, new in zip(before[1], group.worker_group.said(), strict=True):
        assert old["pid"] != new["pid"]
        same = {"pid": 0, "manager": None}
        assert {**old, **same} == {**new, **same}
        assert (new["version"], new["manager"].name, new["with_ref"]) == (1, "manager", True)
    assert group.save_model(4) == str(tmp_path)
    group.release()
    assert group.create() == [5, 5]
    assert group.update_weights() == 2
    assert ray.get(group.async_init({"save": None})) == [0, 0]
    group.release()
    assert group.create() == [0, 0], "what another configuration had saved is not this one's"
    group.close()


def test_workers_that_were_restarted_behind_its_back_are_not_used(slots, tmp_path):
    with group_of({"save": str(tmp_path)}, pg=slots) as group:
        ray.get(group.async_init())
        group.save_model(4)
        group.worker_group.restart()
        with pytest.raises(RuntimeError, match=r"are others than this group has made.*Call restart\(\)"):
            group.update_weights()
        assert group.restart() == [5, 5]
        assert group.update_weights() == 1


def test_a_critic_goes_on_from_its_own_checkpoint(slots, tmp_path):
    args = {"save": str(tmp_path / "none"), "critic_save": str(tmp_path)}
    with group_of(args, pg=slots, role="critic") as group:
        ray.get(group.async_init())
        group.save_model(7)
        group.release()
        assert group.create() == [8, 8]


def test_a_checkpoint_that_was_not_written_is_an_error_and_not_gone_on_from(slots, tmp_path):
    (tmp_path / "latest.json").write_text('{"folder": "rollout_0000009", "rollout_id": 9}')  # another run's
    args = {"save": str(tmp_path), "load": str(tmp_path / "mine"), "async_save": True}
    with group_of(args, pg=slots, actor_cls=DiskFull) as group:
        ray.get(group.async_init())
        for unsuccessful in (group.wait_for_save, group.release):
            group.save_model(2)
            with pytest.raises(WorkerError, match="disk full"):
                unsuccessful()
        group.create()
        group.save_model(3)
        ray.kill(group.worker_group.workers[0])
        for _ in range(2):
            group.release()
            group.create()
            assert {s["load"] for s in group.worker_group.said()} == {args["load"]}
        group.save_model(4)
        with pytest.raises(WorkerError, match="disk full"):
            group.close()


def test_a_manager_that_knows_nothing_of_versions(slots):
    """A Ray actor of the user's own, for workers of the user's own; or nobody any more."""
    with group_of(pg=slots) as group:
        ray.get(group.async_init())
        group.set_rollout_manager(ray.remote(num_cpus=0)(Incurious).remote())
        assert group.update_weights() == 1
        group.set_rollout_manager(None)
        assert group.update_weights() == 2


class Incurious:
    pass


def test_create_that_fails_can_be_tried_again(slots):
    with group_of({}, pg=slots) as group:
        ray.get(group.async_init())
        group.release()
        good = group._init
        group._init = (read_args({"user": {"fail_in_init": 1}}), "actor", False)
        with pytest.raises(WorkerError, match="no disk"):
            group.create()
        group._init = good
        assert group.create() == [0, 0]


# --- the critic --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def critic(slots):
    with group_of(pg=slots[:2], role="critic") as group:
        yield group


def test_rank_i_reaches_rank_i(actor, critic):
    actor.connect(critic)
    ray.get(critic.async_init())

    def reached():
        said = actor.worker_group.critic_said()
        assert [(s["rank"], s["role"]) for s in said] == [(0, "critic"), (1, "critic")]
        assert [s["pid"] for s in said] == [s["pid"] for s in critic.worker_group.said()]

    reached()
    critic.release()
    critic.create()
    reached()
    actor.release()
    actor.create()
    reached()
    actor.release()
    critic.release()
    actor.create()
    critic.create()
    reached()


def test_groups_that_cannot_be_connected(slots, actor, critic):
    with group_of(ranks=1, pg=slots, role="critic") as lone:
        with pytest.raises(ValueError, match="actor group has 2 ranks, the critic group 1;"):
            actor.connect(lone)
        lone.release()
    with pytest.raises(ValueError, match="not 'actor' with 'actor'"):
        actor.connect(actor)
    with pytest.raises(ValueError, match="not 'critic' with 'critic'"):
        critic.connect(critic)


def test_workers_of_ones_own_need_not_compute_values(slots):
    args = {"advantage_estimator": "gae"}
    with group_of(args, pg=slots) as one, group_of(args, pg=slots, role="critic") as two:
        one.connect(two)
        ray.get([*one.async_init(), *two.async_init()])
        assert [m["computed"] for m in ray.get(one.async_train(0, ROWS))] == [[], []]
