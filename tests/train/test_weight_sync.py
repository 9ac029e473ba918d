"""Weights from train ranks, each holding a part, to rollout workers: complete, each element once, with a version."""

import json
import re

import depth
import pytest
import sync_workers
import torch
from safetensors import safe_open
from sync_helpers import (
    DIRECT,
    SMALL,
    TRANSPORTS,
    equal,
    expected,
    mostly_full,
    options,
    pool_of_two,
    receivers,
    same,
    two_senders,
)
from sync_workers import FROZEN, MODELS, SHAPES, model

from single_controller import RayClassWithInitArgs, RayWorkerGroup, WorkerError, colocate
from workers.weight_sync import WeightSender, WeightSyncError

pytestmark = pytest.mark.timeout(60)

WHOLE = sum(tensor.nbytes for tensor in model().values())


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with pool_of_two() as pool:
        yield pool


@pytest.fixture(scope="module")
def train(pool):
    """Two senders."""
    with two_senders(pool) as group:
        yield group


@pytest.fixture(scope="module")
def rollouts(pool):
    """Groups of one and of two receivers, which no test kills."""
    groups = {2: receivers(pool), 1: receivers(pool[0:1])}
    yield groups
    for group in groups.values():
        group.close()


@pytest.fixture
def rollout(rollouts):
    yield rollouts[2]
    rollouts[2].equip()


def test_sender_that_was_closed_sends_differences_again(rollouts):
    sender = WeightSender("store", rollouts[1], delta=True)
    patched = []
    for version in range(1, 5):
        if version == 3:
            sender.close()
        patched.append(sender.send(version, MODELS["drifted"](torch.float32, version).items()).patched)
    assert patched == [0, 1, 0, 1]


# --- what arrives -----------------------------------------------------------------------------------------------------


full = "weights by the other transports"
PAIRS = [(transport, receivers) for transport in TRANSPORTS for receivers in (1, 2)]


@pytest.mark.parametrize(("transport", "receivers"), mostly_full(full, PAIRS, *PAIRS[1::2], ("store", 1)))
def test_weights_arrive_bit_for_bit_in_place_with_their_version(train, rollouts, transport, receivers, tmp_path):
    """However the train ranks divide them."""
    rollout = rollouts[receivers]
    train.connect(rollout, transport, **options(transport, tmp_path))
    for version, held in enumerate(["stages", "rows", "columns", "copies"], 3):
        reports = train.update(version, held)
        assert same(rollout, version)
        assert sum(report.nbytes for report in reports) == WHOLE, "each byte is sent once"
        assert all(report.nbytes > WHOLE / 20 for report in reports), "by the rank that has it"
    assert [report.receivers for report in reports] == [receivers] * 2
    assert all(report.buckets > 1 and report.pause_seconds < report.seconds for report in reports)
    assert [report.proved for report in reports] == ["engine"] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_worker_gets_its_slices(train, rollout, transport, tmp_path):
    """Each of two engines needs half of each tensor, and gets it from ranks that divide the tensors otherwise."""
    train.connect(rollout, transport, **options(transport, tmp_path))
    for version, (dim, held) in enumerate([(0, "columns"), (1, "rows")], 3):
        rollout.equip(dim=dim)
        sent = sum(report.nbytes for report in train.update(version, held))
        for rank, found in enumerate(rollout.weights()):
            assert equal(found, expected(version, dim=dim, rank=rank)), (dim, held, rank)
        assert rollout.current_weight_version() == [version] * 2
        twice = sum(one.nbytes for name, one in model().items() if dim >= len(SHAPES[name]))
        assert sent == WHOLE + twice, "each element once for each worker that needs it"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_groups_with_other_dtypes_receive_at_once(train, rollouts, rollout, transport, tmp_path):
    """The trainer's bfloat16 in an engine's float32, and the other way round."""
    rollout.equip(dtype=torch.bfloat16)
    train.connect([rollouts[1], rollout], transport, **options(transport, tmp_path))
    reports = train.update(6)
    assert train.versions() == [[6] * 3] * 2
    assert same(rollouts[1], 6) and same(rollout, 6, to=torch.bfloat16)
    assert [report.proved for report in reports] == ["engine"] * 2
    train.update(7, "rows", dtype=torch.bfloat16)
    assert same(rollouts[1], 7, torch.bfloat16) and same(rollout, 7, torch.bfloat16, torch.bfloat16)


def test_fingerprint_is_that_of_the_weights(train, rollouts, rollout):
    """Trainer and workers have the same one; it changes with each bit, and is the same for the same weights."""
    train.connect([rollouts[1], rollout], "store", bucket_bytes=SMALL)

    def fingerprint(version, seed=None, **how):
        found = {report.fingerprint for report in train.update(version, "rows", **how)}
        found |= {*rollouts[1].ask("fingerprint"), *rollout.ask("fingerprint")}
        (one,) = found
        return one

    first, second = fingerprint(1), fingerprint(2)
    assert first == fingerprint(1) != second and 0 <= first < 2**63
    assert fingerprint(1, verify="full") == first
    assert {report.fingerprint for report in train.update(1, "rows", verify="none")} == {None}
    assert rollout.ask("fingerprint") == [None, None]
    sender, weights = WeightSender("store", rollouts[1], verify="fingerprint"), model()
    seen = {sender.send(1, weights.items()).fingerprint}
    for bit in (0, 13, 31):
        weights["layers.0.bias"] = model()["layers.0.bias"]
        sync_workers.flip(weights["layers.0.bias"], 64 + bit)
        seen.add(sender.send(1, weights.items()).fingerprint)
    assert len(seen) == 4


def test_engine_that_does_not_tell_what_it_holds(train, rollout):
    """Then what arrived is compared, and the report says so."""
    rollout.equip(tells=False)
    train.connect(rollout, "store", bucket_bytes=SMALL)
    reports = train.update(3, "rows")
    assert [report.proved for report in reports] == ["received"] * 2 and same(rollout, 3)
    assert {report.proved for report in train.update(4, "rows", verify="none")} == {None}


# --- differences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", DIRECT)
def test_changed_elements_arrive_bit_for_bit(train, rollouts, rollout, transport):
    """The engine's dtype is the trainer's, or another one."""
    rollouts[1].equip(dtype=torch.bfloat16)
    train.connect([rollouts[1], rollout], transport, bucket_bytes=SMALL, delta=True)
    nbytes = []
    for version in range(1, 5):
        reports = train.update(version, "rows", "drifted", verify="full" if version == 4 else None)
        assert same(rollout, version, weights="drifted")
        assert same(rollouts[1], version, to=torch.bfloat16, weights="drifted")
        assert [report.patched for report in reports] == [0 if version == 1 else 3] * 2
        nbytes.append(sum(report.nbytes for report in reports))
    assert nbytes[0] == 2 * WHOLE, "whole tensors for each dtype"
    # Three elements of five tensors, with their positions, for two dtypes. All of them may be in one round.
    assert max(nbytes[1:]) < 2 * 15 * (4 + 1) + 1
    assert max(nbytes[1:]) < 2 * model()[FROZEN].nbytes / 10, "nothing for a tensor that has not changed"
    assert sum(report.nbytes for report in train.update(6, "rows", "drifted")) > 0
    assert sum(report.nbytes for report in train.update(6, "rows", "drifted")) == 0, "nothing has changed"
    assert same(rollout, 6, weights="drifted")
    rollouts[1].equip()


@pytest.mark.parametrize("transport", mostly_full(full, DIRECT, "store"))
def test_worker_with_another_base_gets_whole_tensors(train, rollout, transport):
    train.connect(rollout, transport, bucket_bytes=SMALL, delta=True)
    version = 0

    def patched():
        nonlocal version
        version += 1
        (count,) = {report.patched for report in train.update(version, "rows", "drifted")}
        assert same(rollout, version, weights="drifted")
        return count

    assert (patched(), patched()) == (0, 2)
    rollout.set_weight_version(version)  # from a checkpoint, for all that the sender knows
    assert (patched(), patched()) == (0, 2)
    rollout.equip()  # as after a restart
    assert (patched(), patched()) == (0, 2)
    with pytest.raises(WorkerError, match="no memory at step"):  # some of the differences have arrived
        train.update(version + 1, "rows", "drifted", fails=(1, "flush" if transport == "device" else 1))
    assert same(rollout, version, weights="drifted")
    assert (patched(), patched()) == (0, 2)
    WeightSender("store", rollout, bucket_bytes=SMALL, delta=True).send(version, model(seed=9).items())
    assert (patched(), patched()) == (0, 2)


def test_whole_tensors_are_sent_every_so_many_updates(train, rollout):
    train.connect(rollout, "store", bucket_bytes=SMALL, delta=True, full_every=3)
    counts = [train.update(version, "rows", "drifted")[0].patched for version in range(1, 6)]
    assert counts == [0, 2, 0, 2, 2]
    assert same(rollout, 5, weights="drifted")


@pytest.mark.parametrize("transport", mostly_full(full, DIRECT, "group"))
def test_differences_for_slices(train, rollout, transport):
    rollout.equip(dim=1)
    train.connect(rollout, transport, bucket_bytes=SMALL, delta=True)
    for version in (1, 2, 3):
        reports = train.update(version, "rows", "drifted")
        for rank, found in enumerate(rollout.weights()):
            assert equal(found, expected(version, weights="drifted", dim=1, rank=rank))
    assert reports[0].patched == 2


def test_differences_after_workers_have_come_and_gone(train, rollouts, rollout):
    """What a rank keeps for a part that another rank has sent meanwhile is not a base."""
    rollouts[1].equip(dim=1)
    train.connect(rollout, "store", bucket_bytes=SMALL, delta=True, verify="none")
    for version in range(1, 7):
        train.reconnect([rollouts[1], rollout] if version % 2 == 0 else rollout)
        train.update(version, "copies", "swinging")
        assert same(rollout, version, weights="swinging"), version
    rollouts[1].equip()


# --- process groups, files, neighbours --------------------------------------------------------------------------------


def test_process_group_is_created_once_and_kept(train, rollouts):
    train.connect(rollouts[2], "group", bucket_bytes=SMALL)
    for version in (1, 2, 3):
        train.update(version)
    assert train.groups_made() == [1, 1]
    assert rollouts[2].ask("channels") == [2, 1]  # the first has one with the senders, and both have one
    train.reconnect([rollouts[2], rollouts[1]])  # one more receiver
    train.update(4)
    assert train.groups_made() == [2, 2]
    assert same(rollouts[1], 4)


def test_receivers_leave_the_process_groups_of_unused_senders(train, rollout):
    train.connect(rollout, "group", bucket_bytes=SMALL)
    train.update(1)
    assert rollout.ask("channels") == [2, 1]
    WeightSender("store", rollout).send(2, model(seed=2).items())
    assert rollout.ask("channels") == [0, 0] and same(rollout, 2)
    train.update(3)  # they send again, and create new process groups
    assert rollout.ask("channels") == [2, 1] and same(rollout, 3)
    assert train.groups_made() == [2, 2]


def test_disk_keeps_the_last_two_versions_readable_by_safetensors(train, rollout, tmp_path):
    train.connect(rollout, "disk", **options("disk", tmp_path))
    for version, held in ((7, "rows"), (8, "columns"), (9, "rows"), (9, "stages")):
        train.update(version, held)
    folder = tmp_path / "sync"
    assert sorted(path.name for path in folder.iterdir()) == ["version-8", "version-9"]
    index = json.loads((folder / "version-9" / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / "version-9" / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    assert equal(found, expected(9))
    train.update(2)  # a resumed run counts from its checkpoint
    assert sorted(path.name for path in folder.iterdir()) == ["version-2", "version-9"]


def test_disk_keeps_no_version_that_was_not_loaded(train, rollout, tmp_path):
    train.connect(rollout, "disk", **options("disk", tmp_path), double_buffer=False)
    train.update(1)
    rollout.configure(fail_at="norm.weight")
    for version in range(2, 5):
        with pytest.raises(WorkerError, match="no room for it"):
            train.update(version)
    assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == ["version-1"]


def test_rollout_worker_in_the_same_process_is_updated_directly(pool):
    roles = {
        "train": RayClassWithInitArgs(sync_workers.StageBeside),
        "rollout": RayClassWithInitArgs(sync_workers.Rollout),
    }
    with RayWorkerGroup(pool, colocate(roles)) as both:
        both.train.connect(bucket_bytes=SMALL, delta=True)
        for version, held in ((20, "rows"), (21, "rows")):
            (patched,) = {report.patched for report in both.train.update(version, held, "drifted")}
            assert same(both.rollout, version, weights="drifted")
        assert patched == 2
        both.rollout.configure(fail_at="norm.weight", rank=1)
        with pytest.raises(WorkerError, match="no room for it"):
            both.train.update(22)
        assert both.rollout.current_weight_version()[1] is None
        both.rollout.configure()
        both.train.update(23)
        assert both.train.versions() == [[23], [23]] and same(both.rollout, 23)


# --- who may send -----------------------------------------------------------------------------------------------------


def test_calls_of_several_drivers_keep_their_order(train, rollouts):
    """Train ranks each call the rollout group: nothing is lost, and the calls of one rank keep their order."""
    rollouts[2].note(9, 0, 0.0)
    train.call_many_times(rollouts[2], 20, 0.002)
    for seen in rollouts[2].ask("order"):
        for caller in (0, 1):
            assert [number for who, number in seen if who == caller] == list(range(20))


def test_driver_can_send_weights(rollouts):
    """One rank, no process group; the driver owns the rollout group."""
    sender = WeightSender("store", lambda: rollouts[1])
    report = sender.send(30, model(seed=30).items())
    assert sender.versions() == [30] and report.buckets == 1 and same(rollouts[1], 30)
    assert (report.proved, report.fingerprint) == (None, None), "a proof is made by request"


def test_invalid_options_are_rejected(rollouts):
    for bad, says in (
        ({"transport": "post"}, "use one of 'store', 'group', 'disk', 'device'"),
        ({"transport": "disk"}, "needs a folder"),
        ({"folder": "/tmp/x"}, "needs a folder; other transports do not use one"),
        ({"bucket_bytes": 0}, "bucket_bytes=0: expected an integer of at least 1"),
        ({"timeout": -1}, "timeout"),
        ({"neighbour": object()}, "'device'"),
        ({"transport": "disk", "folder": "/tmp/x", "delta": True}, "use another transport than 'disk'"),
        ({"delta": True, "double_buffer": False}, "receivers that keep the version before"),
        ({"full_every": -1}, "full_every=-1: expected an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=says):
            WeightSender(**{"rollout": rollouts[1], **bad})
    sender = WeightSender("store", rollouts[1])
    for version in (0, -1, 1.5, True, None):
        with pytest.raises(
            ValueError,
            match=r"expected an integer of at least 1; version 0 means that .* received no weights since",
        ):
            sender.send(version, [])
    with pytest.raises(ValueError, match="verify="):
        sender.send(1, [], verify="all")
    with pytest.raises(WeightSyncError, match="must be a group of rollout workers"):
        WeightSender("store", lambda: 3).send(1, [])


# --- mixtures of experts: 64 experts in each of 3 layers --------------------------------------------------------------


BUCKET = 24 << 10
OF_EXPERTS = sum(tensor.nbytes for tensor in sync_workers.stacked().values())
WAYS = [("stacked", "one_by_one"), ("one_by_one", "stacked"), ("stacked", "stacked"), ("stacked", "like_mixtral"),
        ("like_mixtral", "stacked")]  # fmt: skip


def holds(rollout, version, of):
    expected = MODELS[of](version=version)
    return rollout.current_weight_version() == [version] * 2 and all(
        equal(found, expected) for found in rollout.weights()
    )


@pytest.mark.parametrize("transport", mostly_full(full, TRANSPORTS, "store"))
def test_every_expert_arrives_and_is_proved(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, **options(transport, tmp_path) | {"bucket_bytes": BUCKET})
    version = 0
    for held, of in WAYS:
        rollout.equip(of=of)
        # Mixtral's are other names for the same tensors, and equal names need no conversion.
        alike = "like_mixtral" in (held, of) or held == of
        for division in ("rows",) if alike and not depth.full else ("rows", "stages"):
            version += 1
            reports = train.update(version, division, held)
            assert holds(rollout, version, of), (held, of, division)
            assert {report.proved for report in reports} == {"engine"}
            assert sum(report.nbytes for report in reports) == OF_EXPERTS, "each byte is sent once"
            assert reports[0].buckets <= 2 * OF_EXPERTS / BUCKET, "several experts in each"
            print(
                f"{transport}: {held} to {of}, {division}: {OF_EXPERTS} bytes in {reports[0].buckets} buckets, "
                f"{reports[0].seconds:.2f} s"
            )


@pytest.mark.parametrize("transport", mostly_full(full, DIRECT))
def test_differences_of_experts(train, rollout, transport):
    """Each update changes one expert of each layer, and its row of the router."""
    for held, of in WAYS[:3]:
        rollout.equip(of=of)
        train.connect(rollout, transport, bucket_bytes=BUCKET, delta=True)
        assert sum(report.nbytes for report in train.update(1, "rows", held)) == OF_EXPERTS
        for version in (2, 3):
            reports = train.update(version, "rows", held)
            assert holds(rollout, version, of)
            assert reports[0].patched == 2 and {report.proved for report in reports} == {"engine"}
            assert sum(report.nbytes for report in reports) < OF_EXPERTS / 8


@pytest.mark.parametrize("transport", mostly_full(full, TRANSPORTS, "store"))
@pytest.mark.parametrize(("held", "of"), mostly_full(full, WAYS[:3], WAYS[0]))
def test_exchanged_experts_are_both_named(train, rollout, transport, held, of, tmp_path):
    """On the way, and by the engine: 3 and 5 of layer 1."""
    rollout.equip(of=of)
    train.connect(rollout, transport, **options(transport, tmp_path) | {"bucket_bytes": 1 << 20})
    train.update(1, "copies", held)
    experts = "model.layers.1.mlp.experts"
    if of == "stacked":
        swap = (3, 5, f"{experts}.gate_up_proj")
        both = [f"{experts}.gate_up_proj[{one}]" for one in (3, 5)]
    else:
        both = [f"{experts}.{one}.gate_proj.weight" for one in (3, 5)]
        swap = (*both, None)
    for sender in (0, 1):  # one of them has it
        try:
            train.update(2, "copies", held, swaps=(sender, *swap))
        except WorkerError as error:
            told = str(error)
            assert isinstance(error, WeightSyncError)
            assert "did not arrive as it was sent" in told
            assert f"{both[0]} (has the bytes of {both[1]})" in told
            assert rollout.current_weight_version() == [1, 1], "the engines never saw it"
            break
    else:
        pytest.fail("no sender had the experts")
    rollout.configure(rank=1, exchange=swap)
    with pytest.raises(WeightSyncError, match=r"rollout rank 1: ToyEngine does not hold what was sent.* 2 ") as caught:
        train.update(3, "copies", held)
    for one, other in (both, both[::-1]):
        assert re.search(re.escape(f"{one} (has the bytes of {other})"), str(caught.value))
    rollout.configure(rank=1)
    train.update(4, "copies", held)
    assert holds(rollout, 4, of)
