"""A process with a gateway, for tests that kill it: prints its endpoint, and serves until its input ends. Rollout
workers on Ray, for tests that kill them, have the same engine and renderer."""

import json
import sys

from agent_helpers import Characters, ScriptEngine

from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.rendering import TokenRenderer


def reversed_text(prompt, seed):
    """What a session that lost a token, or got another one's, would not say."""
    return f"{seed % 10_000}:" + prompt.rpartition("<|user|>")[2].partition("<end>")[0][::-1]


def engine(tokens=8, delay=0.02):
    return ScriptEngine(reversed_text, tokens=tokens, delay=delay)


def renderer():
    return TokenRenderer(Characters())


def main():
    gateway = Gateway(engine(int(sys.argv[1]), float(sys.argv[2])), renderer())
    gateway.start()
    print(json.dumps(gateway.endpoint), flush=True)
    sys.stdin.read()
    gateway.stop()
    gateway.engine.close()


if __name__ == "__main__":
    main()
