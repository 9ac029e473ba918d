"""Gateways and routers in the process of a test, and calls of their sessions."""

from contextlib import contextmanager

import pytest
from agent_helpers import Characters, ScriptEngine

from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.gateway.gateway_router import GatewayRouter
from workers.rollout.agents.rendering import TokenRenderer

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

CLIENT = httpx.Client()


@contextmanager
def serving(engine=None, renderer=None, kind=Gateway, **options):
    engine = engine or ScriptEngine()
    gateway = kind(engine, renderer or TokenRenderer(Characters()), **options)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()
        engine.close()


@contextmanager
def routing(*workers, **options):
    router = GatewayRouter(workers, **options)
    router.start()
    try:
        yield router
    finally:
        router.stop()


def chat(server, token, messages, *, client=CLIENT, timeout=60, **more):
    """The reply of a gateway, or a router, to a call of a session."""
    body = {"model": "m", "messages": messages, **more}
    url, headers = f"{server.address}/v1/chat/completions", {"x-api-key": token}
    return client.post(url, json=body, headers=headers, timeout=timeout)
