"""Weights from train ranks, each holding a part, to rollout workers: complete, each tensor once, with a version."""

import contextlib
import datetime
import os
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
import sync_workers
import torch
from rollout_helpers import payload_of
from sync_workers import model

from single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerError,
    colocate,
)
from single_controller.base.executor import Executor
from single_controller.base.worker import RankInfo
from workers.rollout.worker import RolloutWorker
from workers.train.rollout_link import RolloutLink
from workers.weight_sync import WeightSender, WeightSyncError, process_group
from workers.weight_sync.device import DeviceTransport, SharedRound, name_of
from workers.weight_sync.process_group import AnnouncedRound, Channel, Invitation
from workers.weight_sync.protocol import Budget
from workers.weight_sync.receivers import Receivers, receiver_groups
from workers.weight_sync.update import Update

TRANSPORTS = ["store", "group", "disk", "device"]
SMALL = 600  # bytes per bucket: several for each sender


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with RayResourcePool([2], use_gpu=False, max_colocate_count=8) as pool:
        yield pool


@pytest.fixture(scope="module")
def train(pool):
    """Two senders."""
    with RayWorkerGroup(pool, RayClassWithInitArgs(sync_workers.Stage)) as group:
        yield group


@pytest.fixture(scope="module")
def rollouts(pool):
    """Groups of one and of two receivers, which no test kills."""
    made = RayClassWithInitArgs(sync_workers.Rollout)
    groups = {2: RayWorkerGroup(pool, made), 1: RayWorkerGroup(pool[0:1], made)}
    yield groups
    for group in groups.values():
        group.close()


@pytest.fixture
def rollout(rollouts):
    yield rollouts[2]
    rollouts[2].configure()


def options(transport, tmp_path):
    return {"bucket_bytes": SMALL} | ({"folder": str(tmp_path / "sync")} if transport == "disk" else {})


def same(weights, version, dtype=torch.float32, to=torch.float32):
    expected = {name: tensor.to(to) for name, tensor in model(dtype, version).items()}
    return all(
        one is not None and one.keys() == expected.keys() and all(torch.equal(one[k], expected[k]) for k in one)
        for one in weights
    )


@pytest.mark.parametrize("receivers", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_arrive_bit_for_bit_in_place_with_their_version(train, rollouts, transport, receivers, tmp_path):
    rollout = rollouts[receivers]
    train.connect(rollout, transport, **options(transport, tmp_path))
    for version in (3, 4):
        reports = train.update(version)
        assert rollout.current_weight_version() == [version] * receivers
        assert same(rollout.weights(), version)
    assert sum(report.nbytes for report in reports) == sum(tensor.nbytes for tensor in model().values())
    assert [report.receivers for report in reports] == [receivers] * 2
    assert all(report.buckets > 1 for report in reports)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_is_loaded_into_float32(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(5, dtype=torch.bfloat16)
    assert same(rollout.weights(), 5, torch.bfloat16)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_groups_receive_at_once(train, rollouts, transport, tmp_path):
    train.connect([rollouts[1], rollouts[2]], transport, **options(transport, tmp_path))
    train.update(6)
    assert train.versions() == [[6] * 3] * 2
    assert same(rollouts[1].weights() + rollouts[2].weights(), 6)


def test_process_group_is_created_once_and_kept(train, rollouts):
    train.connect(rollouts[2], "group", bucket_bytes=SMALL)
    for version in (1, 2, 3):
        train.update(version)
    assert train.groups_made() == [1, 1]
    assert rollouts[2].ask("channels") == [2, 1]  # with the train ranks, and with the other receiver
    train.reconnect([rollouts[2], rollouts[1]])  # one more receiver
    train.update(4)
    assert train.groups_made() == [2, 2]
    assert same(rollouts[1].weights(), 4)


def test_receivers_leave_the_process_groups_of_unused_senders(train, rollout):
    train.connect(rollout, "group", bucket_bytes=SMALL)
    train.update(1)
    assert rollout.ask("channels") == [2, 1]
    WeightSender("store", rollout).send(2, model(seed=2).items())
    assert rollout.ask("channels") == [0, 0] and same(rollout.weights(), 2)
    train.update(3)  # they send again, and create new process groups
    assert rollout.ask("channels") == [2, 1] and same(rollout.weights(), 3)
    assert train.groups_made() == [2, 2]


def test_failed_process_group_setup_ends_the_update_on_all_ranks(train, rollout):
    """The other receiver, which waits for the failed one, is free again for the next update."""
    train.connect(rollout, "group", bucket_bytes=SMALL, timeout=100)
    rollout.configure(meets=False, rank=1)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"rollout rank 1 could not join the process group of the train ranks"):
        train.update(1)
    train.groups_made()  # returns once both ranks have ended
    rollout.configure()
    train.update(2)
    assert time.monotonic() - begun < 20
    assert rollout.current_weight_version() == [2, 2] and same(rollout.weights(), 2)


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
    made = [None, None]

    def make(rank):
        made[rank] = Channel(invitation, "senders", rank, 2, torch.device("cpu"))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
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
        AnnouncedRound(0, [{}], 60.0).receive(receiver, "key")
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
            Update(1, "store", rank, 3, Receivers(None), Budget(3.0), "key").agree("begun")
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


@ray.remote(num_cpus=0)
class SlowManager:
    def weight_receivers(self):
        time.sleep(0.7)
        return []


def test_managers_share_the_time_to_answer(ray_cluster):
    managers = [SlowManager.remote() for _ in range(2)]
    assert receiver_groups(managers, 60.0) == []  # both have started
    with pytest.raises(WeightSyncError, match=r"did not answer weight_receivers\(\) within 0\.\d+ s|time limit"):
        receiver_groups(managers, 1.2)
    for manager in managers:
        ray.kill(manager)


@pytest.mark.parametrize("where", ["begin", "end", "read"])
@pytest.mark.parametrize("transport", ["store", "group", "device"])
@pytest.mark.parametrize("rank", [0, 1])
def test_error_on_one_rank_is_raised_on_all_ranks(train, rollout, transport, where, rank):
    """No rank waits for the failed one, so the group goes on."""
    train.connect(rollout, transport, bucket_bytes=SMALL)
    train.update(1)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=f"MemoryError: no memory at its {where}"):
        train.update(2, fails=(rank, where))
    train.versions()  # returns once both ranks have ended
    assert time.monotonic() - begun < 5
    assert rollout.current_weight_version() == [1, 1] and same(rollout.weights(), 1)
    train.update(3)
    assert same(rollout.weights(), 3)


@pytest.mark.parametrize("transport", ["store", "group", "device"])
def test_all_phases_of_an_update_share_one_budget(train, rollouts, transport):
    """No call takes longer than the budget; together they do."""
    rollout = rollouts[1]
    train.connect(rollout, transport, bucket_bytes=1, timeout=0.9, double_buffer=False)
    rollout.configure(seconds=0.2)
    with pytest.raises(
        WorkerError, match=r"version 2 was not sent by transport .* within 0.9 s, .*update_weights_timeout_minutes"
    ):
        train.update(2)
    rollout.configure()
    train.connect(rollout, transport, bucket_bytes=SMALL)
    train.update(3)
    assert same(rollout.weights(), 3)


def test_disk_keeps_the_last_two_versions_readable_by_transformers(train, rollout, tmp_path):
    import json

    from safetensors import safe_open

    from workers.weight_sync.disk import latest

    train.connect(rollout, "disk", **options("disk", tmp_path))
    for version in (7, 8, 9, 9):
        train.update(version)
    folder = tmp_path / "sync"
    assert sorted(path.name for path in folder.iterdir()) == ["version-8", "version-9"]
    assert latest(folder) == folder / "version-9"
    index = json.loads((folder / "version-9" / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / "version-9" / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    assert same([found], 9)
    train.update(2)  # a resumed run counts from its checkpoint
    assert sorted(path.name for path in folder.iterdir()) == ["version-2", "version-9"]


@pytest.mark.parametrize("transport", ["store", "group", "disk"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"leave_out": ["norm.weight"]}, "version 11: no train rank has tensors that the engine needs: norm.weight"),
        ({"reshape": ["layers.0.weight"]}, r"'layers.0.weight' has shape \(45, 1\); the engine expects \(5, 9\)"),
        ({"rename": {"norm.weight": "norm.w"}}, "the engine has no weight 'norm.w'"),
        ({"dtype": torch.complex64}, "has dtype torch.complex64"),
    ],
)
def test_incomplete_update_is_rejected(train, rollout, transport, fault, says, tmp_path):
    """Before anything is sent: the rollout workers go on with the version before."""
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(10)
    with pytest.raises(WorkerError, match=says) as caught:
        train.update(11, **fault)
    assert isinstance(caught.value.__cause__, WeightSyncError)
    assert rollout.current_weight_version() == [10, 10] and same(rollout.weights(), 10)
    train.update(12)
    assert rollout.current_weight_version() == [12, 12] and same(rollout.weights(), 12)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_error_names_the_failing_engine(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, **options(transport, tmp_path))
    rollout.configure(fail_at="norm.weight", rank=1)
    with pytest.raises(WorkerError, match=r"rollout rank 1: ToyEngine could not load .* no room for it"):
        train.update(13)
    assert rollout.current_weight_version()[1] is None
    rollout.configure()
    train.update(14)
    assert same(rollout.weights(), 14)


@pytest.fixture(scope="module")
def killable(pool):
    """Two receivers that tests kill, one at a time."""
    made = RayClassWithInitArgs(sync_workers.Rollout)
    with RayWorkerGroup(pool, made, name_prefix="killable_", collectives=False) as group:
        yield group


full = pytest.mark.full("deaths and delays of receivers with the other transports")


@pytest.mark.parametrize(
    "transport", ["group", *(pytest.param(name, marks=full) for name in TRANSPORTS if name != "group")]
)
def test_receiver_death_is_reported_within_seconds_and_the_next_update_works(train, killable, transport, tmp_path):
    train.connect(killable, transport, **options(transport, tmp_path))
    train.update(15)
    killable.configure(die_at="norm.weight", rank=1)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 died") as caught:
        train.update(16)
    with pytest.raises(WorkerError, match=r"rank 1 died"):
        train.update(17)  # it is still dead
    assert time.monotonic() - begun < 15
    assert caught.value.cause_type.endswith("WeightSyncError")
    killable.restart(ranks=[1])
    # It died as it loaded what had arrived: by then, the survivor may have loaded it.
    assert killable.current_weight_version() in ([15, None], [16, None])
    train.reconnect(killable)
    train.update(18)
    assert train.versions() == [[18, 18]] * 2 and same(killable.weights(), 18)


@full
def test_restarted_rollout_workers_receive_the_current_version(train, killable):
    train.connect(killable, "group", bucket_bytes=SMALL)
    train.update(19)
    killable.restart()
    assert killable.current_weight_version() == [None, None]
    train.reconnect(killable)
    assert train.versions() == [[None, None]] * 2
    train.update(19)
    assert killable.current_weight_version() == [19, 19] and same(killable.weights(), 19)


@pytest.mark.parametrize("transport", ["store", pytest.param("group", marks=full)])
def test_late_receiver_fails_the_update_but_not_the_next(train, rollouts, transport):
    rollout = rollouts[1]
    train.connect(rollout, transport, timeout=1.0)
    busy = rollout.note.remote(9, 0, 2.5)
    with pytest.raises(WorkerError, match=r"within 1 s, .* begin_weights\(\) exceeded its timeout of"):
        train.update(20)
    busy.result()
    train.connect(rollout, transport)
    train.update(21)
    assert rollout.current_weight_version() == [21] and same(rollout.weights(), 21)


def test_rollout_worker_in_the_same_process_is_updated_directly(pool):
    roles = {
        "train": RayClassWithInitArgs(sync_workers.StageBeside),
        "rollout": RayClassWithInitArgs(sync_workers.Rollout),
    }
    with RayWorkerGroup(pool, colocate(roles)) as both:
        both.train.connect(bucket_bytes=SMALL)
        both.train.update(21)
        assert both.rollout.current_weight_version() == [21, 21] and same(both.rollout.weights(), 21)
        both.rollout.configure(fail_at="norm.weight", rank=1)
        with pytest.raises(WorkerError, match="no room for it"):
            both.train.update(22)
        assert both.rollout.current_weight_version()[1] is None
        both.rollout.configure()
        both.train.update(23)
        assert both.train.versions() == [[23], [23]] and same(both.rollout.weights(), 23)


def test_calls_of_several_drivers_keep_their_order(train, rollouts):
    """Train ranks each call the rollout group: nothing is lost, and the calls of one rank keep their order."""
    rollouts[2].note(9, 0, 0.0)
    train.call_many_times(rollouts[2], 20, 0.002)
    for seen in rollouts[2].ask("order"):
        calls = [entry for entry in seen if isinstance(entry, tuple)]
        for caller in (0, 1):
            assert [number for who, number in calls if who == caller] == list(range(20))


def test_bucket_of_another_update_is_rejected(rollouts):
    rollout = rollouts[1]
    rollout.begin_weights("first", 1, "test")
    rollout.begin_weights("second", 2, "test")
    with pytest.raises(WorkerError, match="a later update has begun"):
        rollout.receive_payload("first", payload_of({"norm.weight": torch.zeros(7)}))
    rollout.set_weight_version(5)
    with pytest.raises(WorkerError, match="no update is in progress"):
        rollout.finish_weights("second")
    assert rollout.current_weight_version() == [5]


def test_invalid_options_are_rejected(rollouts):
    for bad, says in (
        ({"transport": "post"}, "use one of 'store', 'group', 'disk', 'device'"),
        ({"transport": "disk"}, "needs a folder"),
        ({"folder": "/tmp/x"}, "needs a folder; other transports do not use one"),
        ({"bucket_bytes": 0}, "at least 1"),
        ({"timeout": -1}, "timeout"),
        ({"neighbour": object()}, "'device'"),
        ({"verify": "all"}, "use one of 'fingerprint', 'full', 'none'"),
        ({"delta": True, "double_buffer": False}, "receivers that keep the version before"),
        ({"delta": True, "transport": "disk", "folder": "/tmp/x"}, "another transport than 'disk'"),
        ({"full_every": -1}, "at least 0"),
    ):
        with pytest.raises(ValueError, match=says):
            WeightSender(**bad)
    sender = WeightSender("store", rollouts[1])
    for version in (0, -1, 1.5, True, None):
        with pytest.raises(
            ValueError,
            match=r"expected an integer of at least 1; version 0 means that .* received no weights since",
        ):
            sender.send(version, [])
    with pytest.raises(WeightSyncError, match="must be a group of rollout workers"):
        WeightSender("store", 3).send(1, [])


def test_driver_can_send_weights(rollouts):
    """One rank, no process group; the driver owns the rollout group."""
    sender = WeightSender("store", lambda: rollouts[1])
    report = sender.send(30, model(seed=30).items())
    assert sender.versions() == [30] and report.buckets == 1 and same(rollouts[1].weights(), 30)


def test_error_names_an_unresponsive_manager(ray_cluster):
    """A Ray actor runs one method at a time, and may be busy with one that waits for the update."""
    manager = ray.remote(num_cpus=0)(sync_workers.Manager).remote()
    link = RolloutLink(manager, lambda: 1, 0.5)
    asks = [
        lambda: WeightSender("store", manager, timeout=0.5).send(1, []),
        lambda: WeightSender("store", [manager], timeout=0.5).versions(),
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


def test_without_proc(rollouts, monkeypatch):
    """As on macOS: only the memory of other processes is unavailable there."""

    def no_proc(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.readlink", no_proc)
    monkeypatch.delattr("os.memfd_create")
    assert name_of(torch.device("cpu")).startswith("cpu:")
    WeightSender("store", rollouts[1]).send(1, model(seed=1).items())
    with pytest.raises(WeightSyncError, match=r"only on Linux; use 'store', 'group' or 'disk'"):
        DeviceTransport().begin(Update(1, "device", 0, 1, Receivers(None, object()), Budget(1.0), "key"))


class FourDevices:
    """What `torch.cuda` says of the current device where there are four: each thread begins with device 0."""

    def __init__(self, monkeypatch):
        self._thread = threading.local()
        self.waited_for, self.opened_on = [], []
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: 4,
            "current_device": self.current,
            "set_device": self.select,
            "device": self.inside,
            "synchronize": lambda device=None: self.waited_for.append(self.index(device)),
            "ipc_collect": lambda: None,
            "get_device_properties": lambda device: mock.Mock(uuid=f"uuid {self.index(device)}"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
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
        self.seen.append(torch.cuda.current_device())


class BareReceiver(sync_workers.WeightReceiver):
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
        seen.append(executor.call(None, "execute_func_rank_zero", (torch.cuda.current_device,), {}))
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
    receiver.set_weight_version(None)
    assert told() == [] and receiver.weight_version is None


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
