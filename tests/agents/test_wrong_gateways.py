"""Wrong uses of the gateway and its router: they are told, and do not hang."""

import socket
from functools import partial

import pytest
from agent_helpers import Characters, ScriptEngine, merging_tokenizer, user
from gateway_helpers import chat, httpx, routing, serving

from workers.rollout.agents.agent_engine import AgentEngine
from workers.rollout.agents.environment import SessionLimits
from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.gateway.gateway_router import GatewayRouter
from workers.rollout.agents.program import AgentProgram
from workers.rollout.agents.rendering import RenderError, TemplateRenderer, TokenRenderer, load_renderer
from workers.rollout.rollout_errors import RolloutError


def test_renderers_are_checked_before_anything_runs():
    renderers = pytest.importorskip("renderers")
    tokenizer, engine = merging_tokenizer(), ScriptEngine()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        bare = renderers.DefaultRenderer(tokenizer)
        for renderer in (bare, TemplateRenderer(bare, tokenizer)):
            for build in (Gateway, partial(AgentEngine, environment=AgentProgram(no_agent))):
                with pytest.raises(RenderError, match="has no chat template; name a renderer, or use TokenRenderer"):
                    build(engine, renderer=renderer)
        with pytest.raises(RenderError, match=r"load_renderer: the tokenizer .* has no chat template"):
            load_renderer(tokenizer, "default")
        for wrong in (tokenizer, None):
            with pytest.raises(TypeError, match=r"Gateway: renderer=.* is no renderer"):
                Gateway(engine, wrong)
    finally:
        tokenizer.chat_template = template
        engine.close()
    assert not engine.keep_prefixes
    assert isinstance(Gateway(engine, partial(TokenRenderer, Characters())).renderer, TokenRenderer)


async def no_agent(row, base_url, api_key):
    return 0.0


def test_limits_are_those_of_a_gateway():
    gateway = partial(Gateway, ScriptEngine(), TokenRenderer(Characters()))
    for build, name in ((gateway, "Gateway"), (GatewayRouter, "GatewayRouter")):
        with pytest.raises(TypeError, match=rf"^{name}: limits=SessionLimits\(.*; expected GatewayLimits"):
            build(limits=SessionLimits(turns=3))


def test_router_that_was_not_started_says_so():
    router = GatewayRouter()
    router.set_workers([("http://127.0.0.1:1", "key")])
    with pytest.raises(RolloutError, match=r"call start\(\) first"):
        router.open()
    assert router.sessions == 0


@pytest.mark.parametrize("workers", ["http://a", ["http://a"], [("http://a",)], [("http://a", 1)], 3])
def test_workers_are_endpoints(workers):
    with pytest.raises(TypeError, match=r"pass the list that group.start_gateway\(renderer\) returns"):
        GatewayRouter(workers)


def test_router_without_workers_says_so_and_has_an_address_that_others_reach(caplog):
    with routing(host="0.0.0.0") as router:
        address, token = router.open()
        assert address == router.address and "0.0.0.0" not in address
        with pytest.raises(httpx.ReadTimeout):  # a worker may come: see test_a_call_waits_while_no_worker_is_there
            chat(router, token, [user("abc")], timeout=0.3)
    assert caplog.text.count("the router has no worker; see GatewayRouter.set_workers") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_served(stream):
    with serving(ScriptEngine(lambda prompt, seed: "xy")) as gateway:
        _, token = gateway.open("a", seed=1)
        reply = chat(gateway, token, [user("abc")], logprobs=True, stream=stream).text
        refused = chat(gateway, token, [user("abc")], logprobs=True, top_logprobs=3)
        tree = gateway.close(token)
    (node,) = [one for one in tree.nodes if one.sampled]
    found = [float(one.split(",")[0]) for one in reply.split('"logprob":')[1:]]
    assert found == pytest.approx(list(node.log_probs))
    assert refused.status_code == 400 and "top_logprobs=3 is not supported" in refused.text


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_a_router_at_all_addresses_of_ipv6_has_those_of_ipv4_too():
    with routing(host="::") as router:
        assert httpx.get(f"{router.address}/health").status_code == 200
