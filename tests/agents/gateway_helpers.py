"""Gateways and routers in the process of a test, and calls of their sessions."""

import asyncio
from contextlib import contextmanager

import pytest
from agent_helpers import Characters, ScriptEngine

from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.gateway.gateway_router import GatewayRouter
from workers.rollout.agents.rendering import TokenRenderer

httpx = pytest.importorskip("httpx")
uvicorn_server = pytest.importorskip("uvicorn.server")


class Impatient:
    """asyncio for uvicorn's servers, which look ten times a second whether they shall end, and then wait as long for
    their connections. That would be half of the time that these tests take."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    @staticmethod
    def sleep(seconds):
        return asyncio.sleep(seconds / 10)


uvicorn_server.asyncio = Impatient()

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
def session(*engine, **options):
    """A gateway, and the token of a session that is open there."""
    with serving(*engine, **options) as gateway:
        yield gateway, gateway.open()[1]


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
