"""Sessions with the manager, streams, updates and evaluation; they survive the death of a worker, and of the driver."""

import contextlib
import os
import pickle
import signal
import time

import pytest
from devices import ON_DEVICE
from rollout_helpers import BigramEngine, Toy
from session_helpers import Agents, Diary, NoDiary, Slow, check_rows, check_said, numbers, said_reward

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers import RolloutManager, RolloutStream, SampleBuffer, SamplingParams, evaluate

B, SAMPLES, TURNS = 4, 2, 5
HOW = SamplingParams(6)


def prompts(rollout_id):
    return [[rollout_id % 30 + 1, 3 + index] for index in range(B)], {"turns": [TURNS] * B}


def made(environment=Diary, delay=0.0005, **options):
    return RayClassWithInitArgs(Toy, Agents, BigramEngine, delay=delay, environment=environment, **options)


@contextlib.contextmanager
def local(environment=Diary, delay=0.0005, **options):
    with LocalWorkerGroup(2, made(environment, delay, **options), threads=True) as group:
        yield group


def managed(group, **options):
    return RolloutManager(
        group, HOW, said_reward, samples_per_prompt=SAMPLES, seed=7, engine_extras=["turns"], **options
    )


def update(stream, manager, version):
    with stream.updating():
        manager.weight_version = version
        manager.group.load(version, version)


def check(data):
    turns, versions = check_rows(data)
    check_said(data, turns)
    assert {len(said) for said in turns} == {TURNS} and {len(turn) for said in turns for turn in said} == {6}
    assert data["rewards/reward"].tolist() == [15.0] * len(turns)
    return turns, versions


def test_manager_and_evaluation_play_sessions():
    with local() as group:
        group.load(1, 1)
        manager = managed(group)
        ids, extras = prompts(0)
        data = manager.generate(ids, extras=extras)
        check(data)
        assert len({tuple(row.tolist()) for row in data["input_ids"]}) == B * SAMPLES
        scores = evaluate(manager, ids, extras=extras, samples_per_prompt=4)
        assert scores["eval/mean@4"] > 15 and scores["eval/truncated"] == 1.0
        metrics = manager.reward_metrics()
        assert metrics["sessions/turns"] == TURNS and metrics["sessions/ended/length"] == 1.0
        assert metrics["sessions/ended/error"] == 0.0
        assert "sessions/turns" not in manager.reward_metrics()


@pytest.mark.parametrize("mode", ["wait", "interrupt"])
def test_updates_of_a_stream(mode):
    """An update in the middle of a session, and of a turn, gives tokens of several versions; each is what it says."""
    mixed = 0
    with local(Slow, 0.002) as group:
        manager = managed(group)
        buffer = SampleBuffer(B, max_staleness=0 if mode == "wait" else 2)
        with RolloutStream(manager, prompts, buffer, update_mode=mode) as stream:
            for version in range(1, 7):
                update(stream, manager, version)
                data = stream.take(60)
                _, versions = check(data)
                assert all(of == sorted(of) for of in versions)
                mixed += sum(len({*of}) > 1 for of in versions)
                assert numbers(data)[::SAMPLES] == list(range((version - 1) * B, version * B))
                assert data["min_weight_versions"].tolist() == [of[0] for of in versions]
    assert (mixed == 0) == (mode == "wait")


def undisturbed(batches):
    with local() as group:
        group.load(1, 1)
        manager = managed(group)
        manager.weight_version = 1
        given = [prompts(number) for number in range(batches)]
        return [
            check(manager.generate(ids, rollout_id=number, extras=extras))[0]
            for number, (ids, extras) in enumerate(given)
        ]


def test_sessions_of_a_saved_state_go_on():
    """The driver is gone; another one continues from its checkpoint, in the middle of sessions. With the same weights,
    tokens are those of a run in which nothing happened, and only what was sampled since is sampled again."""
    expected = undisturbed(2)
    with local(Slow, 0.002) as group:
        group.load(1, 1)
        manager = managed(group)
        manager.weight_version = 1
        with RolloutStream(manager, prompts, SampleBuffer(B, max_staleness=1, num_batches=2)) as stream:
            stream.buffer.set_version(1)
            end = time.monotonic() + 20
            while True:
                state = stream.state_dict()
                groups = state["groups"].values()
                sessions = [one.session for _, _, data, _ in groups if data for one in data.completions if one.session]
                if sum(len(session.rewards) for session in sessions) >= B * SAMPLES:
                    break
                assert time.monotonic() < end
                time.sleep(0.002)
    state = pickle.loads(pickle.dumps(state))
    sampled = sum(session.tokens for session in sessions)
    assert sampled >= B * SAMPLES * HOW.max_new_tokens
    with local(Slow, 0.0) as group:
        group.load(1, 1)
        again = managed(group)
        again.weight_version = 1
        with RolloutStream(again, prompts, SampleBuffer(B, max_staleness=1, num_batches=2)) as stream:
            stream.load_state_dict(state)
            data = [stream.take(30) for _ in range(2)]
    assert [check(one)[0] for one in data] == expected


@pytest.mark.parametrize(
    ("environment", "rounds", "batch", "samples"),
    [
        (Slow, 1, 6, 4),
        (NoDiary, 1, 6, 4),
        pytest.param(Slow, 20, 25, 8, marks=pytest.mark.full("20 kills of workers with 200 sessions")),
    ],
)
@pytest.mark.timeout(900)
def test_sessions_survive_the_death_of_their_worker(ray_cluster, monkeypatch, environment, rounds, batch, samples):
    """kill -9 of one of two workers, again and again, while all its sessions are in the middle: with a state they go on
    at another worker, without one they begin again. Tokens are those of a run in which nothing dies."""
    turns = 12

    def source(rollout_id):
        return [[rollout_id % 30 + 1, 3 + index] for index in range(batch)], {"turns": [turns] * batch}

    def manager_of(group):
        return RolloutManager(group, HOW, said_reward, samples_per_prompt=samples, seed=3, engine_extras=["turns"])

    with LocalWorkerGroup(1, made(Diary, 0.0), threads=True) as group:
        reference = manager_of(group)
        undisturbed = [
            check_rows(reference.generate(ids, rollout_id=number, extras=extras))[0]
            for number, (ids, extras) in enumerate(map(source, range(rounds)))
        ]
    gone_on, data = [], []
    with (
        RayResourcePool([2], use_gpu=ON_DEVICE) as pool,
        RayWorkerGroup(pool, made(environment, 0.02), collectives=False) as group,
    ):
        manager = manager_of(group)
        buffer = SampleBuffer(batch, max_staleness=1, update_interval=10_000)
        with RolloutStream(manager, source, buffer, requests_per_worker=batch * samples) as stream:
            buffer.set_version(0)
            manager.weight_version = 0
            for kills in range(rounds):
                wait(lambda: sum(turns_of(stream).values()) >= 3 * batch * samples, 60)
                victim = group.status().ranks[0].process.pid
                os.kill(victim, signal.SIGKILL)
                began, before = time.monotonic(), turns_of(stream)
                if environment is Slow:
                    wait(lambda before=before: all_go_on(stream, before), 60)
                wait(lambda kills=kills: stream.metrics()["rollout/restarts"] > kills, 60)
                gone_on.append(time.monotonic() - began)
                data.append(stream.take(120))
            metrics = stream.metrics()
    for one, expected in zip(data, undisturbed, strict=True):
        found, _ = check_rows(one)
        check_said(one, found)
        assert found == expected
        assert not one["rewards/restarts"].any()
    lost = int(metrics.get("rollout/sessions_lost", 0))
    assert metrics["rollout/restarts"] == rounds
    assert (lost == 0) == (environment is Slow)
    print(
        f"{environment.__name__}: {rounds} kills with {batch * samples} sessions; all go on after "
        f"{max(gone_on):.1f} s at most; {lost} began again"
    )


def turns_of(stream):
    """How many turns the sessions of each running group have played, as far as the driver knows."""
    journals = [one for worker in list(stream._router._workers) for one in list(worker.journals.items())]
    return {
        attempt.number: sum(one.session.turns if one.session else one.info["turns"] for one in list(journal.values()))
        for attempt, journal in journals
    }


def all_go_on(stream, before):
    """Whether each group has gone on since, or is complete."""
    now, buffer = turns_of(stream), stream.buffer
    with buffer._changed:
        left = {number for number, group in buffer._groups.items() if group.state != "ready"}
    return all(number not in left or now.get(number, 0) > turns for number, turns in before.items())


def wait(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
