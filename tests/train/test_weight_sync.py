"""Weights from train ranks, each with a part of them, to rollout workers: whole, once, and with a version."""

import contextlib
import threading
import time

import pytest
import ray
import sync_workers
import torch
from sync_workers import model

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerError, colocate
from workers.train import rollout_link
from workers.train.sync_by_group import GroupTransport
from workers.train.sync_on_device import DeviceTransport, name_of
from workers.train.weight_receivers import Receivers
from workers.train.weight_sync import WeightSender, WeightSyncError
from workers.train.weight_transport import Ranks, Update

TRANSPORTS = ["store", "group", "disk", "device"]
SMALL = 600  # bytes of a bucket: several for each sender


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
    """Groups of one and of two receivers; they are not killed."""
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
def test_weights_arrive_bit_by_bit_in_place_with_their_version(train, rollouts, transport, receivers, tmp_path):
    rollout = rollouts[receivers]
    train.connect(rollout, transport, **options(transport, tmp_path))
    for version in (3, 4):
        reports = train.update(version)
        assert rollout.current_weight_version() == [version] * receivers
        assert same(rollout.weights(), version)
    sent = sum(report.nbytes for report in reports)
    whole = sum(tensor.nbytes for tensor in model().values())
    assert sent == (whole * 2 if transport == "device" else whole)
    assert [report.receivers for report in reports] == [receivers] * 2
    assert all(report.buckets > 1 for report in reports)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_goes_into_float32(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(5, dtype=torch.bfloat16)
    assert same(rollout.weights(), 5, torch.bfloat16)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 20])
def test_pairs_on_one_rank_only_are_refused_where_every_rank_needs_them(train, rollout, bucket_bytes, rank):
    train.connect(rollout, "device", bucket_bytes=bucket_bytes)
    with pytest.raises(WorkerError, match=r"train ranks (0 and 1 do not have|are not at) the same"):
        train.update(7, here={"norm.weight": rank})
    assert rollout.current_weight_version() == [None, None]
    train.update(8)
    assert same(rollout.weights(), 8)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_groups_receive_at_once(train, rollouts, transport, tmp_path):
    train.connect([rollouts[1], rollouts[2]], transport, **options(transport, tmp_path))
    train.update(6)
    assert train.versions() == [[6] * 3] * 2
    assert same(rollouts[1].weights() + rollouts[2].weights(), 6)


def test_a_process_group_is_made_once_and_kept(train, rollouts):
    train.connect(rollouts[2], "group", bucket_bytes=SMALL)
    for version in (1, 2, 3):
        train.update(version)
    assert train.groups_made() == [1, 1]
    assert rollouts[2].ask("members") == [2, 2]
    train.reconnect([rollouts[2], rollouts[1]])  # one more receiver has come
    train.update(4)
    assert train.groups_made() == [2, 2]
    assert same(rollouts[1].weights(), 4)


def test_the_process_groups_of_who_sends_no_more_are_left(train, rollout):
    train.connect(rollout, "group", bucket_bytes=SMALL)
    train.update(1)
    assert rollout.ask("members") == [2, 2]
    WeightSender("store", rollout).send(2, model(seed=2).items())
    assert rollout.ask("members") == [0, 0] and same(rollout.weights(), 2)
    train.update(3)  # they do send again, and meet anew
    assert rollout.ask("members") == [2, 2] and same(rollout.weights(), 3)
    assert train.groups_made() == [2, 2]


def test_a_meeting_that_fails_ends_the_update_at_once_on_all_ranks(train, rollouts):
    rollout = rollouts[1]
    train.connect(rollout, "group", bucket_bytes=SMALL)
    rollout.configure(meets=False)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"rollout rank 0 did not meet sender \d in a process group"):
        train.update(1)
    train.groups_made()  # both ranks have ended
    assert time.monotonic() - begun < 10
    rollout.configure()
    train.update(2)
    assert rollout.current_weight_version() == [2] and same(rollout.weights(), 2)


def test_senders_take_turns_and_pass_them_on_when_they_fail():
    first, second = GroupTransport(5.0), GroupTransport(0.2)
    updates = [Update("key", 1, Ranks(rank, 2), Receivers(None, 1.0)) for rank in range(2)]
    address = first.prepare(updates[0])
    for transport, update in zip((first, second), updates, strict=True):
        update.shared = address
        transport.begin(update)
    with first._turn(updates[0]), pytest.raises(WeightSyncError, match=r"train rank 1 has waited 0.2 s for"):
        with second._turn(updates[1]):
            raise AssertionError("two at once")
    updates[0].key = updates[1].key = "next"
    order = []

    def send(transport, update):
        with contextlib.suppress(KeyError), transport._turn(update):
            order.append("in")
            time.sleep(0.02)
            order.append("out")
            raise KeyError("as when a broadcast fails")

    for _ in range(3):
        others = threading.Thread(target=send, args=(second, updates[1]))
        others.start()
        send(first, updates[0])
        others.join()
    assert order == ["in", "out"] * 6
    left = first._known_store().num_keys()
    assert left <= 5, "tickets of both updates, a turn that nobody has taken of each, and one of the store's own"


def test_the_disk_keeps_the_last_two_versions_as_transformers_reads_them(train, rollout, tmp_path):
    import json

    from safetensors import safe_open

    from workers.train.sync_by_disk import latest

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
    train.update(2)  # a run that was resumed counts from where its checkpoint was
    assert sorted(path.name for path in folder.iterdir()) == ["version-2", "version-9"]


@pytest.mark.parametrize("transport", ["store", "group", "disk"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"leave_out": ["norm.weight"]}, "has not got 1 of 7 tensors of version 11: norm.weight"),
        ({"twice": ["layers.0.bias"]}, "'layers.0.bias' came twice"),
        ({"reshape": ["layers.0.weight"]}, r"'layers.0.weight' came as \(45, 1\); the engine has \(5, 9\)"),
        ({"rename": {"norm.weight": "norm.w"}}, "'norm.w' is no weight of the engine"),
        ({"dtype": torch.complex64}, "came as torch.complex64"),
    ],
)
def test_an_update_that_is_not_whole_is_refused(train, rollout, transport, fault, says, tmp_path):
    """The rollout workers have no version afterwards, and the next update repairs it."""
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(10)
    with pytest.raises(WorkerError, match=says) as caught:
        train.update(11, **fault)
    assert isinstance(caught.value.__cause__, WeightSyncError)
    assert rollout.current_weight_version() == [None, None]
    train.update(12)
    assert rollout.current_weight_version() == [12, 12] and same(rollout.weights(), 12)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_fails_is_named(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, **options(transport, tmp_path))
    rollout.configure(fail_at="norm.weight", rank=1)
    with pytest.raises(WorkerError, match=r"rollout rank 1: ToyEngine did not take .* no room for it"):
        train.update(13)
    assert rollout.current_weight_version()[1] is None
    rollout.configure()
    train.update(14)
    assert same(rollout.weights(), 14)


@pytest.fixture(scope="module")
def mortal(pool):
    """Two receivers that tests kill, one at a time."""
    made = RayClassWithInitArgs(sync_workers.Rollout)
    with RayWorkerGroup(pool, made, name_prefix="mortal_", collectives=False) as group:
        yield group


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_that_dies_is_named_within_seconds_and_the_next_update_repairs(train, mortal, transport, tmp_path):
    train.connect(mortal, transport, **options(transport, tmp_path))
    train.update(15)
    mortal.configure(die_at="norm.weight", rank=1)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 died") as caught:
        train.update(16)
    with pytest.raises(WorkerError, match=r"rank 1 died"):
        train.update(17)  # it is still dead
    assert time.monotonic() - begun < 15
    assert caught.value.cause_type.endswith("WeightSyncError")
    mortal.restart(ranks=[1])
    assert mortal.current_weight_version() == [None, None]
    train.reconnect(mortal)
    train.update(18)
    assert train.versions() == [[18, 18]] * 2 and same(mortal.weights(), 18)


def test_rollout_workers_that_were_restarted_get_the_current_version(train, mortal):
    train.connect(mortal, "group", bucket_bytes=SMALL)
    train.update(19)
    mortal.restart()
    assert mortal.current_weight_version() == [None, None]
    train.reconnect(mortal)
    assert train.versions() == [[None, None]] * 2
    train.update(19)
    assert mortal.current_weight_version() == [19, 19] and same(mortal.weights(), 19)


@pytest.mark.parametrize("transport", ["store", "group"])
def test_a_receiver_that_is_late_ends_the_update_but_not_the_next(train, rollouts, transport):
    rollout = rollouts[1]
    train.connect(rollout, transport, timeout=1.0)
    busy = rollout.note.remote(9, 0, 2.5)
    with pytest.raises(WorkerError, match=r"begin_weights\(\) passed its timeout of 1 s"):
        train.update(20)
    busy.result()
    train.update(21)
    assert rollout.current_weight_version() == [21] and same(rollout.weights(), 21)


def test_the_rollout_worker_in_the_same_process_is_fed_directly(pool):
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


def test_calls_of_several_drivers_to_the_same_workers_come_each_in_its_order(train, rollouts):
    """Train ranks each drive the rollout group: nothing is lost, and the calls of one rank keep their order."""
    rollouts[2].note(9, 0, 0.0)
    train.call_many_times(rollouts[2], 20, 0.002)
    for seen in rollouts[2].ask("order"):
        calls = [entry for entry in seen if isinstance(entry, tuple)]
        for caller in (0, 1):
            assert [number for who, number in calls if who == caller] == list(range(20))


def test_a_bucket_of_another_update_is_refused(rollouts):
    rollout = rollouts[1]
    rollout.begin_weights("first", 1, "test")
    rollout.begin_weights("second", 2, "test")
    with pytest.raises(WorkerError, match="another update has begun since"):
        rollout.take_weights("first", {"norm.weight": torch.zeros(7)})
    rollout.set_weight_version(5)
    with pytest.raises(WorkerError, match="no update is under way"):
        rollout.finish_weights("second")
    assert rollout.current_weight_version() == [5]


def test_options_that_make_no_sense_are_refused(rollouts):
    for bad, says in (
        ({"transport": "post"}, "known are 'store', 'group', 'disk', 'device'"),
        ({"transport": "disk"}, "needs a folder"),
        ({"folder": "/tmp/x"}, "needs a folder, the others none"),
        ({"bucket_bytes": 0}, "from 1, got 0"),
        ({"timeout": -1}, "timeout"),
        ({"neighbour": object()}, "'device'"),
    ):
        with pytest.raises(ValueError, match=says):
            WeightSender(**bad)
    sender = WeightSender("store", rollouts[1])
    for version in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"integer from 1, got .*; 0 are the weights that .* begins with"):
            sender.send(version, [])
    with pytest.raises(WeightSyncError, match="is a group of rollout workers"):
        WeightSender("store", 3).send(1, [])


def test_a_driver_can_send_by_itself(rollouts):
    """One rank, no process group; the driver owns the rollout group."""
    sender = WeightSender("store", lambda: rollouts[1])
    report = sender.send(30, model(seed=30).items())
    assert sender.versions() == [30] and report.buckets == 1 and same(rollouts[1].weights(), 30)


def test_a_manager_that_does_not_answer_is_named(ray_cluster, monkeypatch):
    """A Ray actor, which does one thing at a time, and may be at what waits for the update."""
    manager = ray.remote(num_cpus=0)(sync_workers.Manager).remote()
    link = rollout_link.RolloutLink(manager, lambda: 1)
    asks = [
        lambda: WeightSender("store", manager, timeout=0.5).send(1, []),
        lambda: WeightSender("store", [manager], timeout=0.5).versions(),
        lambda: link.outdated,
        lambda: link.expect(4),
    ]
    link.expect(3)
    monkeypatch.setattr(rollout_link, "MANAGER_SECONDS", 0.5)
    manager.generate.remote(60.0)
    for ask in asks:
        with pytest.raises(WeightSyncError, match=r"Actor\(Manager, .* within 0.5 s: .* busy in generate\(\)"):
            ask()
    ray.kill(manager)
    for ask in asks:
        with pytest.raises(WeightSyncError, match=r"Actor\(Manager, .* cannot be asked for .* make it anew"):
            ask()


def test_where_there_is_no_proc(rollouts, monkeypatch):
    """As on macOS. Only memory of other processes cannot be had there."""

    def no_proc(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.readlink", no_proc)
    monkeypatch.delattr("os.memfd_create")
    assert name_of(torch.device("cpu")).startswith("cpu:")
    WeightSender("store", rollouts[1]).send(1, model(seed=1).items())
    with pytest.raises(WeightSyncError, match=r"only on Linux .* use 'store', 'group' or 'disk'"):
        DeviceTransport()._room(torch.device("cpu"), 1)
