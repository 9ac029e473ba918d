"""A process with a gateway, for tests that kill it: prints its endpoint, and serves until its input ends."""

import json
import sys

from agent_helpers import Characters, ScriptEngine

from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.rendering import TokenRenderer


def reversed_text(prompt, seed):
    """What a session that lost a token, or got another one's, would not say."""
    return f"{seed % 10_000}:" + prompt.rpartition("<|user|>")[2].partition("<end>")[0][::-1]


def main():
    tokens, delay = int(sys.argv[1]), float(sys.argv[2])
    engine = ScriptEngine(reversed_text, tokens=tokens, delay=delay)
    gateway = Gateway(engine, TokenRenderer(Characters()))
    gateway.start()
    print(json.dumps(gateway.endpoint), flush=True)
    sys.stdin.read()
    gateway.stop()
    engine.close()


if __name__ == "__main__":
    main()
