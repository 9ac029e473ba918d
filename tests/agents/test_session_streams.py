"""Sessions with the manager, streams, updates and evaluation; they survive the death of a worker, and of the driver."""

import asyncio
import contextlib
import json
import os
import pickle
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import killed_driver
import pytest
from devices import ON_DEVICE
from rollout_helpers import BigramEngine, Toy, update
from session_helpers import Agents, Diary, NoDiary, Slow, check_rows, check_said, numbers, said_reward
from torch_scripts import driver
from waits import wait_until

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers import RolloutManager, RolloutStream, SampleBuffer, SamplingParams, evaluate
from workers.rollout.agents.session import SessionState
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion, Row
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.stream.exchange import request_name
from workers.rollout.stream.router import Router, load

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
            for version in range(1, 4 if mode == "wait" else 6):
                update(stream, manager, version)
                data = stream.take(60)
                _, versions = check(data)
                assert all(of == sorted(of) for of in versions)
                mixed += sum(len({*of}) > 1 for of in versions)
                assert numbers(data)[::SAMPLES] == list(range((version - 1) * B, version * B))
                assert data["min_weight_versions"].tolist() == [of[0] for of in versions]
    assert (mixed == 0) == (mode == "wait")


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

    def source(rollout_id):
        return [[rollout_id % 30 + 1, 3 + index] for index in range(batch)], {"turns": [8] * batch}

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
                wait_until(lambda: sum(turns_of(stream).values()) >= 3 * batch * samples, 60)
                victim = group.status().ranks[0].process.pid
                os.kill(victim, signal.SIGKILL)
                began, before = time.monotonic(), turns_of(stream)
                if environment is Slow:
                    wait_until(lambda before=before: all_go_on(stream, before), 60)
                wait_until(lambda kills=kills: stream.metrics()["rollout/restarts"] > kills, 60)
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


@pytest.mark.parametrize(
    ("kills", "ray", "updates"),
    [
        (1, False, False),
        pytest.param(20, True, False, marks=pytest.mark.full("20 kills of drivers with sessions, on Ray")),
        pytest.param(20, True, True, marks=pytest.mark.full("20 kills of drivers with sessions, on Ray")),
    ],
    ids=["once", "on Ray", "on Ray with updates"],
)
@pytest.mark.timeout(1500)
def test_sessions_survive_the_death_of_the_driver(request, tmp_path, monkeypatch, kills, ray, updates):
    """kill -9 of the driver of an asynchronous run while sessions are in the middle, and a start from its checkpoint:
    each group is trained once, with the tokens of a run in which nothing dies, and no environment makes a step again
    that it had made in the checkpoint."""
    config = {"batch": 3, "samples": 2, "turns": 6, "batches": 4 if kills == 1 else 8 * kills}
    config |= {"ray": ray, "updates": updates, "seconds": 0.3 if ray else 0.05}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    others = request.getfixturevalue("other_drivers") if ray else {}  # it adds to the environment
    environment = {**os.environ, **others}
    draw, in_flight, script = random.Random(kills), [], Path(killed_driver.__file__)
    for kill in range(kills):
        with driver(request.config, script, tmp_path, environment=environment, said=tmp_path / "said") as ended:
            wait_until(lambda kill=kill: len(lines(tmp_path / "starts.jsonl")) > kill or ended(), 120)
            begun = time.time()
            time.sleep(draw.uniform(0.0, 1.0))
            wait_until(lambda begun=begun: sessions_in(tmp_path, begun) >= 2 or ended(), 60)
            assert not ended(), f"the run has ended by itself; see {tmp_path}/said"
            os.kill(lines(tmp_path / "starts.jsonl")[-1]["pid"], signal.SIGKILL)
            wait_until(ended)
        in_flight.append(sessions_in(tmp_path, begun))
    if ray:
        subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, check=True, timeout=600)
    else:
        monkeypatch.setenv("START", str(kills))
        with LocalWorkerGroup(2, killed_driver.made(), threads=True) as group:
            killed_driver.run(tmp_path, group, config)
    starts, trained = lines(tmp_path / "starts.jsonl"), lines(tmp_path / "trained.jsonl")
    last = {line["batch"]: line for line in trained}
    numbers = [group for batch in range(config["batches"]) for group in last[batch]["groups"]]
    assert numbers == [group for group in range(3 * config["batches"]) for _ in range(2)]
    assert len(starts) == kills + 1 and min(in_flight) >= 2
    steps = Counter(tuple(map(int, line.split())) for line in (tmp_path / "steps").read_text().splitlines())
    for (start, group, step), count in steps.items():
        saved = starts[start]["steps"].get(str(group))
        sessions = [0] * config["samples"] if saved is None else saved
        assert count <= sum(made is not None and made <= step for made in sessions), (start, group, step)
    total = config["batches"] * config["batch"] * config["samples"] * config["turns"]
    again = sum(steps.values()) - total
    assert again >= 0 and {(group, step) for _, group, step in steps} == {
        (group, step) for group in range(3 * config["batches"]) for step in range(config["turns"])
    }
    print(
        f"{kills} kills of a driver with {statistics.median(in_flight):g} sessions in the middle in its checkpoint; "
        f"{again} of {total} turns were played again; {len(trained) - len(last)} batches were trained again"
    )
    if not updates:
        with LocalWorkerGroup(1, made(Diary, 0.0), threads=True) as group:
            manager = killed_driver.manager_of(group, config)
            for batch in range(config["batches"]):
                ids, extras = killed_driver.prompts_of(config)(batch)
                data = manager.generate(ids, rollout_id=batch, extras=extras)
                assert check_rows(data)[0] == last[batch]["turns"]


def lose_weights(group, ranks):
    """As if their servers were restarted, between two steps."""

    def lose(worker):
        if worker.rank in ranks:
            worker.engine.engine.begin_update()
            worker.engine.engine.abandon_update()

    group.execute_with_func_generator(lose)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["wait", "interrupt"])
def test_sessions_go_on_elsewhere_if_their_engine_has_lost_its_weights(mode):
    """Nothing waits for them, and if no engine has any, the trainer is asked for them."""
    with local(Slow, 0.002) as group:
        manager = managed(group)
        with RolloutStream(manager, prompts, SampleBuffer(B, max_staleness=1), update_mode=mode) as stream:
            update(stream, manager, 1)
            wait_until(lambda: sum(turns_of(stream).values()) > 4, 20)
            lose_weights(group, [0])
            found = []
            for version in (2, 3):
                data = stream.take(20)
                check(data)
                found += numbers(data)[::SAMPLES]
                with stream.updating(20):
                    manager.weight_version = version
                    manager.group.load(version, version)
                assert group.version_of_weights() == [version] * 2
            wait_until(lambda: sum(turns_of(stream).values()) > 4, 20)
            lose_weights(group, [0, 1])
            manager.refresh = lambda: update(stream, manager, 4)
            while group.version_of_weights() != [4, 4]:  # at first, batches that were complete
                data = stream.take(20)
                check(data)
                found += numbers(data)[::SAMPLES]
            assert found == list(range(len(found))) and len(found) <= 5 * B
            assert not stream.metrics()["rollout/restarts"]


class Gated(Diary):
    """Whose second turn does not end before `opened` is set."""

    opened = threading.Event()

    async def step(self, action):
        while self.said and not self.opened.is_set():
            await asyncio.sleep(0.01)
        return await super().step(action)


def test_sessions_of_a_dead_worker_that_the_next_one_refuses_are_not_lost():
    """Its weights have changed meanwhile. What it gives back has tokens in the state of the sessions alone."""
    with local(Gated) as group, contextlib.ExitStack() as at_end:
        at_end.callback(Gated.opened.set)
        group.load(0, 0)
        manager, buffer = managed(group), SampleBuffer(B, num_batches=1)
        manager.weight_version = 0
        router = Router(manager, prompts, buffer, dynamic_sampling=False, requests_per_worker=B * SAMPLES)
        buffer.set_version(0)
        router.exchange()
        router.begin_groups()

        def journals():
            running = [one for worker in router._workers for one in worker.running.values()]
            return [one.session for of_group in running for one in of_group.journal.values()]

        wait_until(lambda: router.exchange() and sum(one.turns > 0 for one in journals()) == B * SAMPLES, 20)
        for _ in range(2):  # as if both had died, and the next ones before their first report
            for worker in router._workers:
                for attempt in list(worker.running):
                    router._give_back_lost(worker.running.pop(attempt))
            router.begin_groups()
        known = {number: buffer._groups[number].update for number in range(B)}
        group.load(1, 1)
        router.exchange()
        given_back = [buffer._groups[number] for number in range(B)]
        assert [one.state for one in given_back] == ["pending"] * B and not router.sessions_lost
        assert all(one.tokens >= 6 * SAMPLES for one in given_back)
        assert all(session.turns for one in given_back for session in (of.session for of in load(one.data).completions))
        assert {number: buffer._groups[number].update for number in range(B)} == known
        router.leave()


def test_group_of_which_a_session_ends_three_workers_is_an_error():
    """Also if another session of it has ended: the one that begins again has not come further."""
    with local() as group:
        manager, buffer = managed(group), SampleBuffer(B)
        router = Router(manager, prompts, buffer, dynamic_sampling=False, requests_per_worker=B * SAMPLES)
        buffer.set_version(0)
        router.exchange()
        for losses in range(3):
            router.begin_groups()
            worker, attempt = next((one, of) for one in router._workers for of in one.running if of.number == 0)
            ended, killer = (request_name(router._id, attempt, sample) for sample in range(SAMPLES))
            told = {killer: SessionState(number=1)}
            if not losses:
                told[ended] = Completion([5], [-1.0], "stop", [0])
            router._note_progress(worker, replace(worker.report, progress=told))
            is_last = losses == 2
            with pytest.raises(RolloutError, match="to 3 workers that died") if is_last else contextlib.nullcontext():
                router._give_back_lost(worker.running.pop(attempt))


def test_session_that_has_ended_with_several_rows_has_come_further():
    """Its newest row may have fewer tokens than its state had."""
    tree = Trajectory()
    tree.sample(tree.give(None, [1]), Completion([5, 6], [-1.0] * 2, "stop", [0] * 2))
    rows = [Row([1], Completion([5, 6], [-1.0] * 2, "stop", [0] * 2)), Row([1], Completion([7], [-1.0], "stop", [0]))]
    with local() as group:
        manager, buffer = managed(group), SampleBuffer(B)
        router = Router(manager, prompts, buffer, dynamic_sampling=False, requests_per_worker=B * SAMPLES)
        buffer.set_version(0)
        router.exchange()
        router.begin_groups()
        worker, attempt = next((one, of) for one in router._workers for of in one.running if of.number == 0)
        for tokens, told in (
            (2, SessionState(1, tree.nodes, node=1, environment=b"")),
            (3, replace(rows[1].completion, rows=rows)),
        ):
            router._losses[0] = {"another worker"}
            router._note_progress(worker, replace(worker.report, progress={request_name(router._id, attempt, 0): told}))
            assert (worker.running[attempt].so_far()[1], router._losses) == (tokens, {})


def test_fingerprints_of_a_session_outlive_two_workers():
    """The third one does not know the weights of the first."""
    tree = Trajectory()
    tree.sample(tree.give(None, [1]), Completion([5], [-1.0], "stop", [0]))
    with local() as group:
        manager, buffer = managed(group), SampleBuffer(B)
        router = Router(manager, prompts, buffer, dynamic_sampling=False, requests_per_worker=B * SAMPLES)
        buffer.set_version(0)
        router.exchange()
        for number, fingerprints in enumerate(({0: 44}, {1: 55}), 1):
            router.begin_groups()
            worker, attempt = next((one, of) for one in router._workers for of in one.running if of.number == 0)
            told = {request_name(router._id, attempt, 0): SessionState(number, tree.nodes, node=1, environment=b"")}
            router._note_progress(worker, replace(worker.report, progress=told, fingerprints=fingerprints))
            running = worker.running.pop(attempt)
            router._give_back_lost(running)
        assert running.journal[0].fingerprints == {0: 44, 1: 55}


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def sessions_in(folder, since):
    """How many sessions are in the middle in a checkpoint that was written later than a time."""
    file = folder / "checkpoint"
    if not file.exists() or file.stat().st_mtime < since:
        return 0
    steps = killed_driver.saved_steps(pickle.loads(file.read_bytes())["stream"])
    return sum(bool(made) for of_group in steps.values() for made in of_group or ())


def turns_of(stream):
    """How many turns the sessions of each running group have played, as far as the driver knows."""
    running = [one for worker in list(stream._router._workers) for one in list(worker.running.items())]
    return {
        attempt.number: sum(
            one.session.turns if one.session else one.info["turns"] for one in list(of.journal.values())
        )
        for attempt, of in running
    }


def all_go_on(stream, before):
    """Whether each group has gone on since, or is complete."""
    now, buffer = turns_of(stream), stream.buffer
    with buffer._changed:
        left = {number for number, group in buffer._groups.items() if group.state != "ready"}
    return all(number not in left or now.get(number, 0) > turns for number, turns in before.items())
