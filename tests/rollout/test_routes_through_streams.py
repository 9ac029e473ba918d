"""Recorded experts on their way from engines to rollout data: managers, streams with interruptions and dynamic
sampling, checkpoints of their buffers, and sessions of agents."""

import pickle
import threading
import time
from contextlib import closing

import pytest
import torch
from rollout_helpers import Toy
from test_recorded_experts import QWEN, indices_of
from waits import wait_until

from dispatch import jagged
from single_controller import Dispatch, LocalWorkerGroup, RayClassWithInitArgs, register
from workers import AgentEngine, HFEngine, RolloutManager, RolloutStream, SampleBuffer, SamplingParams
from workers.data.rollout_data import check_rollout_data
from workers.data.routed_experts import RoutingShape, missing_routes
from workers.hf_files import config_from
from workers.rollout.agents.environment import Environment, Step

HOW = SamplingParams(12, stop_token_ids=(7, 11, 13, 17))
SHAPE = RoutingShape.of(config_from(QWEN))


class Same(Toy):
    """An update that does not change the weights: what was recorded can be compared with one model."""

    @register(Dispatch.ONE_TO_ALL)
    def update(self, version):
        self.engine.begin_update()
        self.engine.load_weights([])
        self.engine.finish_update(version)
        self.weight_version = version


@pytest.fixture(scope="module")
def model():
    engine = HFEngine(QWEN)
    yield engine.model
    engine.close()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Of its weights. Random ones are the same in all processes, but not in threads that draw them at once."""
    path = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(path)
    return str(path)


@pytest.fixture
def group(folder):
    made = RayClassWithInitArgs(Same, HFEngine, folder, return_routed_experts=True, max_batch_size=5)
    with LocalWorkerGroup(2, made, threads=True) as group:
        yield group


def prompts(rollout_id):
    return [[20 + rollout_id % 50, 3], [30, rollout_id % 90, 5, 6], [40 + rollout_id % 30] * 5, [50]], {}


def reward(prompt_ids, completion_ids):
    return float(len(completion_ids) > 4)


def check(data, model):
    """Each token of each row has the experts that a pass over the row chooses."""
    check_rollout_data(data, 96, SHAPE)
    assert missing_routes(data["routed_experts"], SHAPE)[0] == 0
    column = jagged.compact(data["routed_experts"], {})
    for row, experts in enumerate(column.values().split(column.offsets().diff().tolist())):
        chosen = indices_of(model, data["input_ids"][row][data["attention_mask"][row].bool()].tolist())
        for layer in SHAPE.sparse:
            assert torch.equal(experts[:-1, layer].long(), chosen[layer][:-1])


def test_manager(group, model):
    check(RolloutManager(group, HOW, reward, samples_per_prompt=3).generate(prompts(0)[0]), model)


def test_stream_with_interrupted_completions_and_dynamic_sampling(group, model):
    """Completions continue after updates, also on the other worker, and after their buffer was read from a
    checkpoint."""
    manager = RolloutManager(group, HOW, reward, samples_per_prompt=3)
    buffer = SampleBuffer(4, max_staleness=2, max_filtered=40)
    with RolloutStream(manager, prompts, buffer, dynamic_sampling=True, update_mode="interrupt") as stream:
        for version in (1, 2):
            with stream.updating():
                manager.weight_version = version
                group.update(version)
            check(stream.take(60), model)
        state = pickle.dumps(stream.state_dict())
    buffer = SampleBuffer(4, max_staleness=2, max_filtered=40)
    stream = RolloutStream(manager, prompts, buffer, dynamic_sampling=True, update_mode="interrupt")
    stream.load_state_dict(pickle.loads(state))
    manager.weight_version = buffer.version
    group.update(buffer.version)
    with stream:
        check(stream.take(60), model)


class Turns(Environment):
    """Three turns, each answered by given tokens."""

    turn = 0

    async def step(self, action):
        self.turn += 1
        return Step([60 + self.turn, 61], reward=float(len(action.token_ids) > 3), done=self.turn == 3)

    def state_dict(self):
        return self.turn

    def load_state_dict(self, state):
        self.turn = state


def test_sessions_of_an_agent(folder, model):
    """Turns whose first tokens the engine has kept, interrupted and continued on the other worker."""
    made = RayClassWithInitArgs(Same, AgentEngine, HFEngine, folder, return_routed_experts=True, environment=Turns)
    with LocalWorkerGroup(2, made, threads=True) as group:
        manager = RolloutManager(group, HOW, samples_per_prompt=3)
        buffer = SampleBuffer(4, max_staleness=2)
        with RolloutStream(manager, prompts, buffer, update_mode="interrupt") as stream:
            for version in (1, 2):
                with stream.updating():
                    manager.weight_version = version
                    group.update(version)
                data = stream.take(60)
                check(data, model)
                assert int(data["loss_mask"].sum(1).max()) > 4


class Once(Turns):
    """Whose second turn begins."""

    begun = threading.Event()

    async def step(self, action):
        made = await super().step(action)
        type(self).begun.set()
        return made


def test_session_that_was_aborted_in_a_later_turn_continues(folder):
    """The experts of that turn are of its whole prompt, which is longer than the session's."""
    how, seconds = SamplingParams(40), 30
    first = AgentEngine(HFEngine, folder, return_routed_experts=True, environment=Once)
    second = AgentEngine(HFEngine, folder, return_routed_experts=True, environment=Once)
    record = first.engine.record

    def slowly(*args, **options):
        if Once.begun.is_set():
            time.sleep(0.1)  # so that the abort comes before the turn's end
        record(*args, **options)

    first.engine.record = slowly
    with closing(first), closing(second):
        future = first.submit([1, 2], how, "a", seed=5)
        wait_until(lambda: Once.begun.is_set() and any(len(one.token_ids) for one in running(first.engine)), seconds)
        first.abort()
        partial = future.result(seconds)
        assert partial.finish_reason == "abort" and partial.session.turns == 1
        begun = partial.session.partial
        assert len(begun.routed_experts) > 2 + len(begun.token_ids)
        again = second.submit([1, 2], how, "a", seed=5, partial=partial).result(seconds)
        assert again.token_ids[: len(partial.token_ids)] == partial.token_ids and again.info["turns"] == 3
        assert len(again.routed_experts) == 2 + len(again.token_ids)


def running(engine):
    return list(engine._requests.values())
