"""Rollout workers on Ray whose gateways are tested."""

import os

from agent_helpers import Characters, ScriptEngine
from gateway_worker import reversed_text

from single_controller import Dispatch, register
from workers.rollout.agents.rendering import TokenRenderer
from workers.rollout.rollout_worker import RolloutWorker


class Served(RolloutWorker):
    @register(Dispatch.ONE_TO_ALL)
    def pid_of_process(self):
        return os.getpid()


def engine():
    return ScriptEngine(reversed_text, tokens=8, delay=0.02)


def renderer():
    return TokenRenderer(Characters())
