"""A server of the package openenv-core, for tests: a number to guess. ``python openenv_server.py PORT``."""

import sys
from uuid import uuid4

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.number = options.get("number", seed or 0)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Hint(hint="guess")

    def step(self, action, timeout_s=None, **options):
        self._state.step_count += 1
        if action.number == 13:
            raise RuntimeError("thirteen")
        if action.number == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.number else "lower", reward=0.0)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
