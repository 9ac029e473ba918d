"""Environments of tests whose workers are processes, and checks of the tokens of sessions."""

import asyncio

from rollout_helpers import Bigram

from workers.data.rollout_data import group_numbers
from workers.rollout.agents.agent_engine import AgentEngine
from workers.rollout.agents.environment import Environment, Step


class Diary(Environment):
    """Ends after ``row["turns"]`` turns, takes some time for each, and remembers all that the policy says."""

    seconds = 0.0

    async def reset(self, row):
        self.turns, self.said = row["turns"], []
        return [20]

    async def step(self, action):
        said = [*self.said, action.token_ids]
        await asyncio.sleep(self.seconds)
        self.said = said
        turn = len(said)
        return Step([20 + turn % 8], float(turn), done=turn == self.turns, info={"said": said})

    def state_dict(self):
        return {"turns": self.turns, "said": self.said}

    def load_state_dict(self, state):
        vars(self).update(state)


class Slow(Diary):
    seconds = 0.02


class NoDiary(Slow):
    """Has no state, so its sessions begin again."""

    def state_dict(self):
        return None


def check_rows(data):
    """Each token that is trained has the log-probability that the weights of its version give it behind all tokens
    before it; the others say nothing. Returns the tokens of the turns of each row, and the versions."""
    begin, turns, versions = int(data["prompt_lengths"].max()), [], []
    for row in range(len(data["input_ids"])):
        end = begin + int(data["completion_lengths"][row])
        prompt = data["input_ids"][row, begin - int(data["prompt_lengths"][row]) : begin].tolist()
        ids = data["input_ids"][row, begin:end].tolist()
        mask = data["loss_mask"][row, begin:end].tolist()
        of = data["weight_versions"][row, begin:end].tolist()
        found = data["rollout_log_probs"][row, begin:end].tolist()
        expected = {version: Bigram(version).log_probs(prompt, ids) for version in {*of} - {-1}}
        said, before = [], 0
        for place, counts in enumerate(mask):
            if counts:
                assert abs(found[place] - float(expected[of[place]][place])) <= 1e-5
                said += [] if before else [[]]
                said[-1].append(ids[place])
            else:
                assert (found[place], of[place]) == (0.0, -1)
            before = counts
        turns.append(said)
        versions.append([version for version in of if version >= 0])
    return turns, versions


def said_reward(prompt_ids, completion_ids, info, turns):
    """The environment and the rows agree on what was said, or this is not the reward: `check_said` compares."""
    flat = [token for turn in info["said"] for token in turn]
    return {"reward": info["reward"], "checksum": checksum(flat), "turns": info["turns"], "restarts": info["restarts"]}


def checksum(tokens):
    found = 7
    for token in tokens:
        found = (found * 31 + token) % 1_000_003
    return float(found)


def check_said(data, turns):
    """Every token that the environment has seen is in its row, once, and no other."""
    sums = [checksum([token for turn in said for token in turn]) for said in turns]
    assert data["rewards/checksum"].tolist() == sums


def numbers(data):
    return group_numbers(data["group_ids"]).tolist()


class Agents(AgentEngine):
    """Lets `Toy` of rollout_helpers set the delay of the inner engine."""

    @property
    def delay(self):
        return self.engine.delay

    @delay.setter
    def delay(self, seconds):
        self.engine.delay = seconds
