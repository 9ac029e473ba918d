"""The halves of weight sync on their own: process groups, messages, managers, and what an engine is told."""

import contextlib
import dataclasses
import datetime
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
import sync_workers
import torch
from rollout_helpers import payload_of
from sync_workers import model

from single_controller import GroupBrokenError, LocalWorkerGroup, RayClassWithInitArgs
from single_controller.call.worker.executor import Executor
from single_controller.call.worker.worker import RankInfo
from workers.rollout.rollout_worker import RolloutWorker
from workers.train.group_links import RolloutLink
from workers.train.model_worker import ModelWorker
from workers.weight_sync import WeightReceiver, WeightSender, WeightSyncError, weight_sender
from workers.weight_sync.receiver_calls import Receivers, receiver_groups
from workers.weight_sync.sync_protocol import Budget, ReceiverClass
from workers.weight_sync.transports import process_group
from workers.weight_sync.transports.process_group import AnnouncedRound, Channel, Invitation
from workers.weight_sync.transports.same_device import DeviceTransport, SharedRound, name_of
from workers.weight_sync.transports.weight_transport import Update
from workers.weight_sync.weight_plan import Shard
from workers.weight_sync.weight_sender import layout_of

pytestmark = pytest.mark.timeout(60)


def test_joining_a_process_group_takes_one_store_connection_per_member(monkeypatch):
    """torch looks up names for each of them, which blocks all clients of the store if a name server is slow."""
    seconds, opened = datetime.timedelta(seconds=60), []
    connect = process_group._client
    monkeypatch.setattr(process_group, "_client", lambda *args: opened.append(args) or connect(*args))
    monkeypatch.setattr(process_group, "_PATIENT_SECONDS", 60.0, raising=False)  # however slow the machine is
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
    invitation = Invitation("key", ("127.0.0.1", server.port), 1, (("one",),), "gloo", 60.0, 60.0)
    receiver = SimpleNamespace(receiver_id="one", channels={})
    thread = threading.Thread(target=invitation._join, args=(receiver,))
    thread.start()
    channels = [Channel(invitation, "senders", 0, 2, torch.device("cpu"))]
    thread.join(timeout=10)
    assert len(receiver.channels) == 1 and len(opened) == 2
    for channel in [*channels, *receiver.channels.values()]:
        channel.leave()


@pytest.fixture
def channels():
    """Of a sender and a receiver, both in this process, which has no other groups."""
    all_left()
    seconds = datetime.timedelta(seconds=60)
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
    invitation = Invitation("key", ("127.0.0.1", server.port), 1, (("one",),), "gloo", 60.0, 60.0)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: Channel(invitation, "senders", rank, 2, torch.device("cpu")), (0, 1)))
    yield made
    for channel in made:
        channel.leave()
    all_left()


def all_left():
    """Wait until the groups are destroyed that this process has left."""
    for thread in threading.enumerate():
        if thread.name == "weights-leave":
            thread.join(timeout=60)
            assert not thread.is_alive()


def event_loops():
    """gloo has one per group."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir's own
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names.count("anon_inode:[eventpoll]")


def test_failed_transfer_frees_the_group_while_its_error_is_kept(channels):
    def failed():
        raise WeightSyncError("a receiver failed")

    sender, _ = channels
    before = event_loops()
    with pytest.raises(WeightSyncError, match="a receiver failed") as kept:
        sender.exchange(torch.zeros(64 << 20, dtype=torch.uint8), [0, 64 << 20], 1.0, failed)
    all_left()
    assert event_loops() == before - 1, kept


def test_receiver_without_memory_for_a_round_leaves_the_group(channels, monkeypatch):
    """So the sender fails at once, instead of after its time."""
    sender, joined = channels
    receiver = SimpleNamespace(rank=0, channels={"senders": joined})
    monkeypatch.setattr(joined.memory, "take", mock.Mock(side_effect=MemoryError("no room")))
    with pytest.raises(MemoryError):
        AnnouncedRound([{}], 60.0).receive(receiver, "key")
    assert receiver.channels == {}
    begun = time.monotonic()
    with pytest.raises(WeightSyncError, match="a transfer of weights failed"):
        sender.exchange(torch.zeros(64 << 20, dtype=torch.uint8), [0, 64 << 20], 20.0)
    assert time.monotonic() - begun < 10


def test_all_ranks_name_the_late_rank(monkeypatch):
    """Also a rank that has waited as long as rank 0, whose verdict arrives at the end of that time."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    errors = {}

    def agree(rank):
        try:
            Update(1, "store", rank, 3, Receivers(None), Budget(0.5), "key").agree("begun")
        except WeightSyncError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # rank 1's time ends first
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(errors) == [0, 1]
    assert all("by these train ranks: 2." in error for error in errors.values()), errors


def test_ranks_agree_on_more_than_the_store_takes_at_once(monkeypatch):
    """A plan for hundreds of ranks, for example. Nothing of it stays in the store."""
    seconds, big = datetime.timedelta(seconds=20), b"0" * (9 << 20)
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
    of_thread = threading.local()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: of_thread.store)
    agreed, empty, all_have_ended = {}, server.num_keys(), threading.Barrier(3)

    def agree(rank):
        of_thread.store = torch.distributed.TCPStore("127.0.0.1", server.port, timeout=seconds)
        update = Update(1, "store", rank, 3, Receivers(None), Budget(20.0), "key")
        agreed[rank] = [update.agree(step, (rank, big), decide=list) for step in ("one", "two")]
        all_have_ended.wait(30)
        update.forget()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(agree, range(3)))  # raises their errors
    assert agreed == {rank: [[(0, big), (1, big), (2, big)]] * 2 for rank in range(3)}
    assert server.num_keys() == empty


def test_each_rank_deletes_what_it_has_told(monkeypatch):
    """Rank 0 would delete the values of thousands one after the other, in each round."""
    deleted, of_thread = [], threading.local()

    class Noting(torch.distributed.HashStore):
        def delete_key(self, key):
            deleted.append((of_thread.rank, key))
            return super().delete_key(key)

    store = Noting()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)

    def agree(rank):
        of_thread.rank = rank
        update = Update(1, "store", rank, 2, Receivers(None), Budget(20.0), "key")
        for step in ("one", "two"):
            update.agree(step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(agree, range(2)))
    assert sorted(deleted) == [(0, "weights/key/1"), (1, "weights/key/1/1")]


def test_error_of_a_single_train_rank_says_of_which_update(tmp_path):
    (tmp_path / "file").touch()
    with LocalWorkerGroup(1, RayClassWithInitArgs(sync_workers.Rollout)) as rollout:
        sender = WeightSender("disk", rollout, folder=tmp_path / "file")
        with pytest.raises(WeightSyncError, match=r"version 1 was not sent by transport 'disk': FileExistsError"):
            sender.send(1, model(seed=1).items())
        with pytest.raises(WeightSyncError, match=r"version 1 was not sent: .*threads=True"):
            WeightSender("group", rollout, timeout=5.0).send(1, model(seed=1).items())


def test_interrupted_update_has_failed_for_its_receivers():
    """Ctrl-C has no message. A receiver that is told no reason would wait for the rest of the update."""

    def interrupted():
        raise KeyboardInterrupt

    shards = [dataclasses.replace(Shard.whole(*pair), read=interrupted) for pair in model().items()]
    with LocalWorkerGroup(1, RayClassWithInitArgs(sync_workers.Rollout)) as rollout:
        with pytest.raises(KeyboardInterrupt):
            WeightSender("store", rollout).send(1, shards)
        assert rollout.execute_with_func_generator(lambda worker: worker.updating) == [False]


def test_equal_workers_are_described_to_the_train_ranks_once(monkeypatch):
    """Not for each of thousands, to each of thousands. What the ranks hold is put together in one update alone."""
    agree, merge, told, merged = Update.agree, weight_sender.merge_layouts, [], []

    def noting(self, step, *given, **how):
        verdict = agree(self, step, *given, **how)
        told.extend([verdict[0]] if step == "begin" else [])
        return verdict

    monkeypatch.setattr(Update, "agree", noting)
    monkeypatch.setattr(weight_sender, "merge_layouts", lambda layouts: merged.append(layouts) or merge(layouts))
    with LocalWorkerGroup(3, RayClassWithInitArgs(sync_workers.Rollout)) as rollout:
        sender = WeightSender("store", rollout)
        for version in (1, 2):
            sender.send(version, model().items())
    assert [[one.rank for one in infos] for infos in told] == [[0, 1, 2]] * 2 and len(merged) == 1
    assert all(one.shapes is infos[0].shapes and one.dtypes is infos[0].dtypes for infos in told for one in infos)


def test_failure_is_told_without_waiting_for_new_ranks():
    """Which a group with on_death="replace" would start first."""
    receivers, group = Receivers(None), mock.Mock(broken="rank 1 died")
    receivers._given = [group]
    receivers.abandon("key", "rank 1 died")
    assert not group.methods.mock_calls
    group.broken = None
    receivers.abandon("key", "rank 1 died")
    assert group.methods.mock_calls


def test_update_that_has_begun_does_not_wait_for_new_ranks():
    """They know nothing of it. The next update waits for them."""
    receivers, group = Receivers(None), mock.Mock(broken="rank 1 died")
    receivers._groups = [group]
    group._state.refusal.return_value = GroupBrokenError("rank 1 died")
    for method in ("receive_weights", "finish_weights"):
        with pytest.raises(GroupBrokenError, match="rank 1 died"):
            receivers.start(method, "key")
    with pytest.raises(GroupBrokenError, match="rank 1 died"):
        receivers.start_payloads("key", [], {})
    assert not group.methods.mock_calls
    receivers.start("begin_weights", "key")
    assert group.methods.mock_calls


def test_worker_that_joins_while_the_trainer_is_told_is_told_of_next_time():
    group = SimpleNamespace(workers=["first"])
    link = RolloutLink(SimpleNamespace(group=group), lambda: 1, 1.0)
    link.introduce(lambda manager: manager.group.workers.append("second"))
    assert link.outdated
    link.introduce(lambda manager: None)
    assert not link.outdated


def test_worker_that_joins_during_an_update_fails_it_with_a_reason():
    receivers = Receivers(None)
    receivers._groups = [SimpleNamespace(world_size=3, broken=None)]
    with pytest.raises(WeightSyncError, match="were added to the 2 rollout workers with which the update began"):
        receivers.start_payloads("key", [ReceiverClass((0, 1), {}, None, False)], {})


@pytest.mark.parametrize(("transport", "ranks"), [("disk", [0]), ("store", [0, 1])])
def test_ranks_know_no_more_than_they_need(transport, ranks, monkeypatch, tmp_path):
    """Of the plan their own part, and of the receivers nothing unless they call them: a manager that is a Ray actor
    would send its group to each of thousands, which would connect to all workers."""
    store, looked, held = torch.distributed.HashStore(), [], list(model().items())
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(WeightSender, "_common_key", lambda self, ranks: "sender update")
    how = {"folder": tmp_path} if transport == "disk" else {}
    made = RayClassWithInitArgs(sync_workers.Rollout)
    with LocalWorkerGroup(1, made, threads=True) as rollout, ThreadPoolExecutor() as pool:

        def send(rank):
            sender = WeightSender(transport, lambda: looked.append(rank) or rollout, **how)
            report = sender.send(1, held[rank::2], rank=rank, ranks=2)
            return report.receivers, {key for one in sender._plan[1] for key in one}

        assert list(pool.map(send, range(2))) == [(1, {(0, 0)}), (1, {(1, 0)})]
        assert rollout.current_weight_version() == [1] and sorted(looked) == ranks


@ray.remote(num_cpus=0)
class SlowManager:
    def weight_receivers(self):
        time.sleep(0.25)
        return []


def test_managers_share_the_time_to_answer(ray_cluster):
    managers = [SlowManager.remote() for _ in range(2)]
    assert receiver_groups(managers, Budget(60.0)) == []  # both have started
    with pytest.raises(WeightSyncError, match=r"did not answer weight_receivers\(\) within 0\.\d+ s|time limit"):
        receiver_groups(managers, Budget(0.4))
    for manager in managers:
        ray.kill(manager)


def test_error_names_an_unresponsive_manager(ray_cluster):
    """A Ray actor runs one method at a time, and may be busy with one that waits for the update."""
    manager = ray.remote(num_cpus=0)(sync_workers.Manager).remote()
    link = RolloutLink(manager, lambda: 1, 0.2)
    asks = [
        lambda: WeightSender("store", manager, timeout=0.2).send(1, []),
        lambda: WeightSender("store", [manager], timeout=0.2).versions(),
        lambda: link.outdated,
        lambda: link.expect(4),
    ]
    RolloutLink(manager, lambda: 1, 60.0).expect(3)  # it has started
    manager.generate.remote(60.0)
    for ask in asks:
        with pytest.raises(WeightSyncError, match=r"Actor\(Manager, .* within 0\.\d+ s\. .* busy in generate\(\)"):
            ask()
    ray.kill(manager)
    for ask in asks:
        with pytest.raises(
            WeightSyncError, match=r"of the rollout manager Actor\(Manager, .* failed: .* create a new one"
        ):
            ask()


def test_without_proc(monkeypatch):
    """As on macOS: only the memory of other processes is unavailable there."""

    def no_proc(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.readlink", no_proc)
    monkeypatch.delattr("os.memfd_create")
    assert name_of(torch.device("cpu")).startswith("cpu:")
    with LocalWorkerGroup(1, RayClassWithInitArgs(sync_workers.Rollout)) as rollout:
        WeightSender("store", rollout).send(1, model(seed=1).items())
        assert rollout.current_weight_version() == [1]
    with pytest.raises(WeightSyncError, match=r"only on Linux; use 'store', 'group' or 'disk'"):
        DeviceTransport().begin(Update(1, "device", 0, 1, Receivers(None, object()), Budget(1.0), "key"))


class FourDevices:
    """What torch says of the current device where there are four: each thread begins with device 0."""

    def __init__(self, monkeypatch):
        self._thread = threading.local()
        self.waited_for, self.opened_on = [], []
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        for name, answer in {
            "accelerator.current_accelerator": lambda check_available=False: torch.device("cuda"),
            "accelerator.device_count": lambda: 4,
            "accelerator.current_device_index": self.current,
            "accelerator.set_device_index": self.select,
            "accelerator.device_index": self.inside,
            "accelerator.synchronize": lambda device=None: self.waited_for.append(self.index(device)),
            "cuda.ipc_collect": lambda: None,
            "cuda.get_device_properties": lambda device: mock.Mock(uuid=f"uuid {self.index(device)}"),
        }.items():
            monkeypatch.setattr(f"torch.{name}", answer)
        monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", self.rebuild)

    def index(self, device):
        if isinstance(device, torch.device):
            return device.index
        return self.current() if device is None else device

    def current(self):
        return getattr(self._thread, "index", 0)

    def select(self, device):
        self._thread.index = self.index(device)

    @contextlib.contextmanager
    def inside(self, device):
        before = self.current()
        self.select(device)
        yield
        self.select(before)

    def rebuild(self, *arguments):
        self.opened_on.append(arguments[6])
        return arguments[0]  # in place of the tensor's class: the memory itself


class WhereEngine(sync_workers.ToyEngine):
    """Notes the current device of the thread that brings weights."""

    def __init__(self):
        super().__init__({"w": (3,)}, torch.float32)
        self.seen = []

    def load_weights(self, weights):
        super().load_weights(weights)
        self.seen.append(torch.accelerator.current_device_index())


class BareReceiver(WeightReceiver):
    """Selects no device."""

    def __init__(self, engine):
        super().__init__()
        self.engine = engine()


@pytest.mark.parametrize("worker", [RolloutWorker, BareReceiver])
def test_memory_is_opened_on_the_workers_own_device_on_every_thread(worker, monkeypatch):
    """As with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, where a worker sees all devices of its host."""
    devices = FourDevices(monkeypatch)
    info = RankInfo(0, 1, 2, 4, "127.0.0.1", 0, device_ids=("2",))
    executor = Executor("here", lambda value: value, in_process=True)
    assert executor.start(info, lambda: {None: (worker, (WhereEngine,), {})}).failure is None
    receiver = executor.workers[None]
    payload = payload_of({"w": torch.arange(3.0)})
    header = payload.header()
    flat = torch.empty(header.nbytes, dtype=torch.uint8)
    payload.copy_to(flat, header)
    handle = (flat, None, None, None, None, None, 0)  # the sender sees the device as its first

    seen = []

    def update():
        seen.append(executor.call(None, "execute_func_rank_zero", (torch.accelerator.current_device_index,), {}))
        receiver_id = executor.call(None, "begin_weights", ("key", 1, "sender", False), {}).id
        shared = SharedRound({receiver_id: handle}, {receiver_id: 0}, [(0, header)])
        executor.call(None, "receive_weights", ("key", shared), {})
        executor.call(None, "finish_weights", ("key",), {})

    thread = threading.Thread(target=update)
    thread.start()
    thread.join()
    assert receiver.weight_version == 1 and receiver.engine.weights["w"].tolist() == [0.0, 1.0, 2.0]
    assert (devices.opened_on, receiver.engine.seen, devices.waited_for) == ([2], [2], [2])
    assert seen == [2 if worker is RolloutWorker else 0]  # an engine may depend on it in any method


class ToldEngine(sync_workers.ToyEngine):
    """Notes what it is told of updates."""

    def __init__(self):
        super().__init__({"a": (1,), "b": (1,)}, torch.float32)
        self.told = []

    def begin_update(self):
        self.told.append("begin")

    def load_weights(self, weights):
        self.told.append([name for name, _ in weights])
        super().load_weights(weights)

    def finish_update(self, version):
        self.told.append(version)
        if version == self.fails:
            raise RuntimeError("no kernels")

    def abandon_update(self):
        self.told.append("abandon")
        raise RuntimeError("nothing to abandon")  # must not hide why the update failed

    fails = None


def test_engine_that_has_lost_its_weights_has_no_base():
    """Differences would be added to whatever it holds."""
    receiver = BareReceiver(ToldEngine)
    for key, lost in (("1", False), ("2", True)):
        receiver.begin_weights(key, int(key), "sender", True)
        receiver.receive_payload(key, payload_of({"a": torch.ones(1), "b": torch.ones(1)}))
        receiver.finish_weights(key)
        receiver.engine.weight_version = None if lost else int(key)
        assert receiver.begin_weights("next", 9, "sender", True).base == (None if lost else key)


def test_double_buffer_needs_memory_for_the_slices_alone(monkeypatch):
    """Nothing else is sent to the worker."""
    shapes, slices = {"a": (100, 10)}, {"a": ((0, 5), (0, 10))}
    receiver = BareReceiver(lambda: sync_workers.ToyEngine(shapes, slices=slices))
    receiver.set_weight_version(1)
    monkeypatch.setattr("workers.weight_sync.weight_receiver.free_host_memory", lambda: 1000)
    receiver.begin_weights("2", 2, "sender")
    assert receiver.weight_version == 1  # until the update is complete
    receiver._take_rank(RankInfo(0, 8, 0, 8, "127.0.0.1", 0))  # eight such buffers would not fit
    receiver.begin_weights("3", 3, "sender")
    assert receiver.weight_version is None


def test_error_of_reading_back_says_how_to_do_without():
    receiver = BareReceiver(ToldEngine)
    receiver.engine.read_weights = lambda names: 1 / 0
    receiver.begin_weights("1", 1, "sender", True)
    receiver.receive_payload("1", payload_of({"a": torch.ones(1), "b": torch.ones(1)}))
    with pytest.raises(WeightSyncError, match="verify='none' updates without proof"):
        receiver.finish_weights("1", "fingerprint")


def test_error_of_hf_shards_is_one_of_the_update():
    """The other ranks are told: they are in the update by then."""
    worker = SimpleNamespace(
        args=SimpleNamespace(debug_rollout_only=False),
        **{"weight_version": 0, "rank": 0, "world_size": 1, "_failed": set(), "_refuse_asleep": lambda what: None},
        model=SimpleNamespace(hf_shards=lambda: 1 / 0),
        _sender=WeightSender("store", lambda: []),
    )
    with pytest.raises(WeightSyncError, match="could not begin to send version 1: ZeroDivisionError"):
        ModelWorker.update_weights(worker)


def test_tensor_that_comes_twice_from_one_rank():
    pairs = [("a", torch.zeros(2)), ("a", torch.ones(2))]
    with pytest.raises(WeightSyncError, match="comes twice from one rank"):
        layout_of(Shard.whole(*pair) for pair in pairs)


def test_engine_is_told_of_the_beginning_and_the_end_of_each_update():
    receiver = BareReceiver(ToldEngine)
    engine = receiver.engine

    def update(key, version, *names, double_buffer=False):
        receiver.begin_weights(key, version, "sender", double_buffer)
        for name in names:
            receiver.receive_payload(key, payload_of({name: torch.zeros(1)}))

    def told():
        found, engine.told = engine.told, []
        return found

    update("1", 1, "a", "b")
    receiver.finish_weights("1")
    assert told() == ["begin", ["a"], ["b"], 1] and receiver.weight_version == 1
    update("2", 2, "a")
    update("3", 3, "b")  # the second one was not finished
    with pytest.raises(WeightSyncError, match=r"'c' .* was not expected"):
        receiver.receive_payload("3", payload_of({"c": torch.zeros(1)}))
    with pytest.raises(WeightSyncError, match=r"'c' .* was not expected"):
        receiver.finish_weights("3")
    assert told() == ["begin", ["a"], "abandon", "begin", ["b"], "abandon"]  # once for each update
    update("4", 4, "a")
    with pytest.raises(WeightSyncError, match="did not get all of version 4: b"):
        receiver.finish_weights("4")
    assert told() == ["begin", ["a"], "abandon"] and receiver.weight_version is None
    engine.fails = 5
    update("5", 5, "a", "b")
    with pytest.raises(WeightSyncError, match=r"ToldEngine could not finish the update to version 5: .*no kernels"):
        receiver.finish_weights("5")
    assert told() == ["begin", ["a"], ["b"], 5, "abandon"] and receiver.weight_version is None
    update("6", 6, "a")
    receiver.set_weight_version(6)  # the engine got its weights in another way
    assert told() == ["begin", ["a"], "abandon", "begin", 6] and receiver.weight_version == 6
    for expected in (["begin", "abandon"], []):  # once: later it may sleep
        receiver.set_weight_version(None)
        assert told() == expected and receiver.weight_version is None
    receiver.set_weight_version(6)
    told()
    engine.fails = 7
    with pytest.raises(RuntimeError, match="no kernels"):
        receiver.set_weight_version(7)
    assert told() == ["begin", 7, "abandon"] and receiver.weight_version is None


def test_engine_with_a_double_buffer_is_told_when_all_has_arrived():
    receiver = BareReceiver(ToldEngine)
    engine = receiver.engine
    receiver.set_weight_version(1)
    engine.told = []
    receiver.begin_weights("2", 2, "sender", True)
    receiver.receive_payload("2", payload_of({"a": torch.ones(1)}))
    assert engine.told == [] and receiver.weight_version == 1 and engine.weights["a"] == 0
    receiver.abandon_weights("2", "the sender has died")
    with pytest.raises(WeightSyncError, match="the sender has died"):
        receiver.receive_payload("2", payload_of({"b": torch.ones(1)}))
    assert engine.told == [] and receiver.weight_version == 1
    receiver.begin_weights("3", 3, "sender", True)
    receiver.receive_payload("3", payload_of({"a": torch.ones(1), "b": torch.ones(1)}))
    receiver.finish_weights("3")
    assert engine.told == ["begin", ["a", "b"], 3] and receiver.weight_version == 3
