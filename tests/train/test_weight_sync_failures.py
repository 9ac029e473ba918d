"""Updates of weights that fail: everyone learns why within seconds, and nobody generates with wrong weights."""

import re
import time

import pytest
import torch
from rollout_helpers import payload_of
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
from sync_workers import token
from waits import wait_until

from single_controller import GroupBrokenError, WorkerDiedError, WorkerError
from workers.weight_sync import WeightSyncError

pytestmark = pytest.mark.timeout(90)

TOLD = 5.0
"""Seconds in which everyone must have learned of a failure. It takes less than two, on an idle machine."""

NAME = "layers.1.weight"

full = "failures with the other transports"


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
    """Two receivers, which no test kills."""
    with receivers(pool) as group:
        yield group


@pytest.fixture
def rollout(rollouts):
    yield rollouts
    rollouts.equip()


def fails(train, version, says, **how):
    """Send a version, which must fail on both ranks. Checks that everyone learned of it soon, and can go on."""
    with pytest.raises(WorkerError, match=says) as caught:
        train.update(version, **how)
    ended = [end for _, end in train.times()]  # also waits for the other rank
    assert max(ended) - min(ended) < TOLD
    assert train.reduced() == [1.0, 1.0], "the process group of the training still works"
    return caught.value


def when_heard(rollout, ranks=(0, 1)):
    """When these rollout workers learned of the failure. The train ranks tell them while the driver gets the error."""
    end = time.monotonic() + TOLD
    while not all(heard := [rollout.ask("heard")[rank] for rank in ranks]) and time.monotonic() < end:
        time.sleep(0.01)
    return heard


# --- errors of train ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_error_in_any_step_leaves_the_version_before(train, rollout, transport, tmp_path):
    """Everyone learns of it, no rank waits for the failed one, and the next update is right."""
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(1, "rows")
    version = 1
    # A rank that fails between two collectives of the device transport leaves the other one in the second.
    rounds = [] if transport == "device" else [0, 2]
    for rank, step in [(0, "begin"), (1, "read"), (0, "flush"), (1, "flush"), *((rank % 2, rank) for rank in rounds)]:
        error = fails(train, version + 1, f"MemoryError: no memory at step {step}", held="rows", fails=(rank, step))
        assert isinstance(error.__cause__, WeightSyncError | MemoryError)
        times = train.times()
        noticed = times[rank][0]
        assert all(end - noticed < TOLD for _, end in times)
        assert all(0 < heard - noticed < TOLD for heard in when_heard(rollout))
        assert same(rollout, version)
        if step in ("read", 0):
            version += 2
            train.update(version, "rows")
            assert same(rollout, version)
    train.update(version + 2, "rows")
    assert same(rollout, version + 2)


@pytest.mark.parametrize("transport", ["store", "device"])
def test_without_a_double_buffer_there_is_no_version_from_begin_to_end(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, bucket_bytes=4000, double_buffer=False)
    train.update(1, "rows")
    sending = train.update.remote(2, "rows", gate=str(tmp_path))
    wait_for_gate(tmp_path)
    assert rollout.current_weight_version() == [None, None] and rollout.completes() == [None, None]
    (tmp_path / "open").touch()
    sending.result()
    assert same(rollout, 2)
    fails(train, 3, "no memory", held="rows", fails=(1, "flush"))
    assert rollout.current_weight_version() == [None, None] and rollout.completes() == [None, None]
    train.update(4, "rows")
    assert same(rollout, 4)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_goes_on_until_the_update_has_arrived(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(1, "rows")
    sending = train.update.remote(2, "rows", gate=str(tmp_path))
    wait_for_gate(tmp_path)
    assert same(rollout, 1)
    (tmp_path / "open").touch()
    reports = sending.result()
    assert same(rollout, 2)
    assert all(0 < report.pause_seconds < report.seconds for report in reports)


def wait_for_gate(folder):
    """Both train ranks are about to send the last round."""
    wait_until(lambda: all((folder / f"rank-{rank}").exists() for rank in (0, 1)))


@pytest.mark.full("an error that breaks a group of its own")
def test_error_while_the_others_wait_in_a_collective_is_raised_soon(pool, rollouts):
    """They cannot be told, so the group breaks with the cause, long before their collective's timeout."""
    with two_senders(pool) as train:
        train.connect(rollouts)
        begun = time.monotonic()
        with pytest.raises(WorkerError, match="MemoryError: no memory at step pairs"):
            train.update(1, fails=(1, "pairs"))
        with pytest.raises(GroupBrokenError, match=r"rank 0 had not finished update\(\) .* after an error on rank 1"):
            train.versions()  # waits for rank 0
        assert time.monotonic() - begun < 60


# --- wrong weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", mostly_full(full, TRANSPORTS, "store"))
def test_incomplete_update_is_rejected(train, rollout, transport, tmp_path):
    """Before anything is sent: the rollout workers go on with the version before."""
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(10)
    for fault, says in (
        ({"leave_out": ["norm.weight"]}, "version 11: no train rank has tensors that the engine needs: norm.weight"),
        ({"reshape": ["layers.0.weight"]}, r"'layers.0.weight' has shape \(45, 1\); the engine expects \(5, 9\)"),
        ({"rename": {"norm.weight": "norm.w"}}, "the engine has no weight 'norm.w'"),
        ({"dtype": torch.complex64}, "has dtype torch.complex64"),
        ({"held": "rows", "leave_out": [NAME]}, f"do not have 1200 of the 2400 elements of '{NAME}'"),
        ({"held": "rows", "again": [NAME]}, f"train ranks hold overlapping parts of '{NAME}'"),
    ):
        error = fails(train, 11, says, **fault)
        assert isinstance(error.__cause__, WeightSyncError)
        assert same(rollout, 10)
    train.update(12)
    assert same(rollout, 12)


@pytest.mark.parametrize(("transport", "verify"), [*((name, "fingerprint") for name in TRANSPORTS), ("store", "full")])
def test_bit_that_changed_on_the_way_never_reaches_an_engine(train, rollout, transport, verify, tmp_path):
    train.connect(rollout, transport, verify=verify, **options(transport, tmp_path))
    train.update(1, "rows")
    for version, bit in enumerate((0, 31, 32 * 8 - 1), 2):
        fails(train, version, damaged(NAME), held="rows", flips=(version % 2, NAME, bit))
        assert same(rollout, 1)
    train.update(9, "rows")
    assert same(rollout, 9)


def damaged(name):
    return rf"rollout rank \d, version \d+: '{re.escape(name)}' \(.* did not arrive as it was sent"


@pytest.mark.parametrize("transport", DIRECT)
def test_bit_that_changed_in_a_difference(train, rollout, transport):
    train.connect(rollout, transport, bucket_bytes=SMALL, delta=True)
    train.update(1, "rows", "drifted")
    train.update(2, "rows", "drifted")
    name = "model.embed_tokens.weight"
    fails(train, 3, damaged(name), held="rows", weights="drifted", flips=(1, name, 3))
    assert same(rollout, 2, weights="drifted")
    reports = train.update(4, "rows", "drifted")
    assert same(rollout, 4, weights="drifted") and reports[0].patched == 0


@pytest.mark.parametrize("tells", [True, False])
def test_bit_that_changed_on_the_way_to_an_engine_with_another_dtype(train, rollout, tells):
    rollout.equip(dtype=torch.bfloat16, tells=tells)
    train.connect(rollout, "store", bucket_bytes=SMALL)
    train.update(1, "rows")
    fails(train, 2, damaged(NAME), held="rows", flips=(0, NAME, 30))
    assert same(rollout, 1, to=torch.bfloat16)


@pytest.mark.parametrize("transport", mostly_full(full, TRANSPORTS, "store", "disk"))
def test_engine_that_holds_something_else_takes_no_prompts(train, rollout, transport, tmp_path):
    """It changes a bit, or ignores a tensor."""
    train.connect(rollout, transport, **options(transport, tmp_path))
    train.update(1, "rows")
    says = "rollout rank 1: ToyEngine does not hold what was sent as version {}: 1 tensors differ: {}$"
    for version, fault in ((2, {"spoil": NAME}), (4, {"ignore": "norm.weight"})):
        rollout.configure(rank=1, **fault)
        (name,) = fault.values()
        error = fails(train, version, says.format(version, name).removesuffix("$"), held="rows")
        assert str(error.__cause__).endswith(f"1 tensors differ: {name}")
        assert rollout.current_weight_version()[1] is None and rollout.completes()[1] is None
        # The other one had perhaps finished.
        assert rollout.current_weight_version()[0] in (None, version)
        assert rollout.completes()[0] in (None, token(expected(version)))
        rollout.configure()
        train.update(version + 1, "rows")
        assert same(rollout, version + 1)


def test_what_is_proved(train, rollout):
    """With differences, "fingerprint" compares what has changed, "full" everything, "none" nothing."""
    rollout.equip(partial=True)
    train.connect(rollout, "store", bucket_bytes=SMALL, delta=True)
    train.update(1, "rows", "drifted")
    rollout.damage(NAME, rank=0)  # of which nothing changes
    train.update(2, "rows", "drifted")
    assert rollout.current_weight_version() == [2, 2]
    says = f"rollout rank 0: ToyEngine does not hold what was sent as version 3: 1 tensors differ: {NAME}"
    fails(train, 3, says, held="rows", weights="drifted", verify="full")
    assert rollout.current_weight_version()[0] is None
    train.update(4, "rows", "drifted", verify="full")
    assert same(rollout, 4, weights="drifted")
    rollout.configure(rank=1, spoil="norm.weight")
    (report, _) = train.update(5, "rows", "drifted", verify="none")
    assert report.proved is None and rollout.current_weight_version() == [5, 5]
    assert not equal(rollout.weights()[1], expected(5, weights="drifted"))


# --- receivers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_error_names_the_failing_engine(train, rollout, transport, tmp_path):
    train.connect(rollout, transport, **options(transport, tmp_path))
    rollout.configure(fail_at="norm.weight", rank=1)
    fails(train, 13, r"rollout rank 1: ToyEngine could not load .* no room for it")
    assert rollout.current_weight_version()[1] is None
    (noticed,) = when_heard(rollout, [1])  # the other one need not be told
    assert all(end - noticed < TOLD for _, end in train.times())
    rollout.configure()
    train.update(14)
    assert same(rollout, 14)


def test_failed_process_group_setup_ends_the_update_on_all_ranks(train, rollout):
    """The other receiver, which waits for the failed one, is free again for the next update."""
    train.connect(rollout, "group", bucket_bytes=SMALL, timeout=100)
    rollout.configure(meets=False, rank=1)
    begun = time.monotonic()
    fails(train, 1, r"rollout rank 1 could not join the process group of the train ranks")
    rollout.configure()
    train.update(2)
    assert time.monotonic() - begun < 20
    assert same(rollout, 2)


@pytest.mark.parametrize("transport", mostly_full(full, DIRECT, "store"))
def test_all_phases_of_an_update_share_one_budget(train, rollout, transport):
    """No call takes longer than the budget; together they do."""
    train.connect(rollout, transport, bucket_bytes=1, timeout=0.9, double_buffer=False)
    rollout.configure(seconds=0.2)
    fails(train, 2, r"version 2 was not sent by transport .* within 0.9 s, .*update_weights_timeout_minutes")
    rollout.configure()
    train.connect(rollout, transport, bucket_bytes=SMALL)
    train.update(3)
    assert same(rollout, 3)


@pytest.mark.parametrize("transport", mostly_full(full, ["store", "group"], "store"))
def test_late_receiver_fails_the_update_but_not_the_next(train, rollout, transport):
    train.connect(rollout, transport, timeout=0.5)
    busy = rollout.note.remote(9, 0, 1.2)
    fails(train, 20, r"within 0.5 s, .* begin_weights\(\) exceeded its timeout of")
    busy.result()
    train.connect(rollout, transport)
    train.update(21)
    assert same(rollout, 21)


def test_pieces_of_another_update_are_rejected(rollout):
    rollout.begin_weights("first", 1, "test")
    rollout.begin_weights("second", 2, "test")
    with pytest.raises(WorkerError, match="a later update has begun"):
        rollout.receive_payload("first", payload_of({"norm.weight": torch.zeros(7)}))
    rollout.set_weight_version(5)
    with pytest.raises(WorkerError, match="no update is in progress"):
        rollout.finish_weights("second")
    assert rollout.current_weight_version() == [5, 5]


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killable(pool):
    """Two receivers that tests kill, one at a time."""
    with receivers(pool, name_prefix="killable_", collectives=False) as group:
        yield group


def test_death_in_one_group_does_not_wait_for_another_group(train, rollout, killable, tmp_path):
    train.connect([rollout, killable], "store")
    rollout.configure(gate=str(tmp_path))
    killable.configure(die_at="norm.weight", rank=1)
    begun = time.monotonic()
    fails(train, 26, "rank 1 died")
    assert max(end for _, end in train.times()) - begun < TOLD
    (tmp_path / "open").touch()
    killable.restart(ranks=[1])


@pytest.mark.parametrize("transport", mostly_full(full, TRANSPORTS, "group"))
def test_receiver_death_is_reported_within_seconds_and_the_next_update_works(train, killable, transport, tmp_path):
    train.connect(killable, transport, **options(transport, tmp_path))
    train.update(15)
    killable.configure(die_at="norm.weight", rank=1)
    begun = time.monotonic()
    error = fails(train, 16, r"rank 1 died")
    assert max(end for _, end in train.times()) - begun < TOLD
    assert error.cause_type.endswith("WeightSyncError")
    fails(train, 17, "rank 1 died")  # it is still dead
    assert time.monotonic() - begun < 15
    killable.restart(ranks=[1])
    # It died as it loaded what had arrived: by then, the survivor may have loaded it.
    assert killable.current_weight_version() in ([15, 0], [16, 0])
    train.reconnect(killable)
    train.update(18)
    assert train.versions() == [[18, 18]] * 2 and same(killable, 18)


def test_survivor_of_a_death_is_told_of_the_failure(train, killable):
    """Without a double buffer it would not generate until the next update, but take prompts."""
    train.connect(killable, "store", double_buffer=False)
    train.update(24)
    killable.configure(die_at="norm.weight", rank=1)
    fails(train, 25, "rank 1 died")
    killable.restart(ranks=[1])
    assert all(when_heard(killable, ranks=(0,)))


@pytest.mark.full(full)
def test_restarted_rollout_workers_receive_the_current_version(train, killable):
    """Whole, although the trainer sends differences."""
    train.connect(killable, "group", bucket_bytes=SMALL, delta=True)
    train.update(19, "rows")
    killable.restart()
    assert killable.current_weight_version() == [0, 0]
    train.reconnect(killable)
    assert train.versions() == [[0, 0]] * 2
    assert train.update(19, "rows")[0].patched == 0
    assert same(killable, 19)


@pytest.mark.parametrize(
    ("transport", "rank"), mostly_full(full, [(name, rank) for name in TRANSPORTS for rank in (0, 1)], ("store", 1))
)
def test_death_of_a_train_rank_leaves_the_version_before(pool, rollout, transport, rank, tmp_path):
    rollout.set_weight_version(None)
    with two_senders(pool) as train:
        train.connect(rollout, transport, **options(transport, tmp_path))
        train.update(1, "rows")
        begun = time.monotonic()
        with pytest.raises(WorkerDiedError, match=f"rank {rank}"):
            train.update(2, "rows", fails=("dies", rank, 1))
        assert time.monotonic() - begun < TOLD
        assert same(rollout, 1)
        train.restart()
        train.connect(rollout, transport, **options(transport, tmp_path))
        train.update(3, "rows")
        assert same(rollout, 3)
