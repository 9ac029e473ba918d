"""The gateway, through the clients that programs use: OpenAI's and Anthropic's packages, and plain HTTP."""

import asyncio
import base64
import io
import json
import logging
import os
import signal
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import Mock

import depth
import numpy
import pytest
from agent_helpers import Characters, ScriptEngine, log_prob, merging_tokenizer, user
from gateway_helpers import CLIENT, chat, httpx, serving, session
from waits import wait_until

from workers.rollout.agents.environment import SessionLimits
from workers.rollout.agents.gateway import http_front
from workers.rollout.agents.gateway.gateway import Gateway, read_node, write_node
from workers.rollout.agents.gateway.http_front import GatewayLimits
from workers.rollout.agents.rendering import TokenRenderer, load_renderer
from workers.rollout.agents.rows import rows
from workers.rollout.agents.trajectory import Node
from workers.rollout.engines.rollout_engine import RoutedExperts, SamplingMask, SamplingParams
from workers.rollout.rollout_errors import RolloutError, SamplingParamsError

anthropic, openai = (pytest.importorskip(name) for name in ("anthropic", "openai"))

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}]


def calculator(prompt, seed):
    """Asks the tool once, and then tells its result."""
    said = prompt.rpartition("<|tool|>")[2].partition("<end>")[0] if "<|tool|>" in prompt else None
    return f"let me see {CALL}" if said is None else f"it is {said}"


def complete(gateway, token, prompt, **how):
    """The reply to token ids."""
    url, headers = f"{gateway.address}/inference/v1/generate", {"authorization": f"Bearer {token}"}
    return CLIENT.post(url, json={"model": "m", "token_ids": prompt, "sampling_params": how}, headers=headers)


def shape(tree):
    """What two trees that mean the same have in common: everything."""
    return [write_node(node) for node in tree.nodes]


# --- the clients ------------------------------------------------------------------------------------------------------


def play_chat(address, token, stream):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0) as client:
        messages = [{"role": "system", "content": "be exact"}, user("1 + 2?")]
        for _ in range(2):
            if stream:
                with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as events:
                    reply = events.get_final_completion()
            else:
                reply = client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
            message, reason = reply.choices[0].message, reply.choices[0].finish_reason
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                said = json.loads(call.function.arguments)
                result = str(said["a"] + said["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert reason == "stop"
        return message.content


def play_messages(address, token, stream):
    tools = [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]
    with anthropic.Anthropic(base_url=address, api_key=token, max_retries=0) as client:
        messages = [user("1 + 2?")]
        how = {"model": "m", "max_tokens": 1000, "system": "be exact", "tools": tools}
        for _ in range(2):
            if stream:
                with client.messages.stream(messages=messages, **how) as events:
                    reply = events.get_final_message()
            else:
                reply = client.messages.create(messages=messages, **how)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": str(one.input["a"] + one.input["b"])}
                for one in reply.content
                if one.type == "tool_use"
            ]
            assert reply.stop_reason == ("tool_use" if results else "end_turn")
            messages.append({"role": "user", "content": results})
        return reply.content[0].text


def play_responses(address, token, stream):
    tools = [{"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": False}]
    with openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0) as client:
        items = [user("1 + 2?")]
        how = {"model": "m", "instructions": "be exact", "tools": tools}
        for _ in range(2):
            if stream:
                with client.responses.stream(input=items, **how) as events:
                    reply = events.get_final_response()
            else:
                reply = client.responses.create(input=items, **how)
            assert reply.status == "completed"
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
            for item in reply.output:
                if item.type == "function_call":
                    said = json.loads(item.arguments)
                    output = str(said["a"] + said["b"])
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        return reply.output_text


def test_three_dialects_give_the_same_tree_streamed_or_not():
    trees = []
    with serving(ScriptEngine(calculator)) as gateway:
        assert gateway.engine.keep_prefixes  # for the next call of a session
        for play in (play_chat, play_messages, play_responses):
            for stream in (False, True):
                _, token = gateway.open(seed=7)
                assert play(gateway.address, token, stream) == "it is 3"
                trees.append(gateway.close(token))
        seen = gateway.engine.seen
    assert [shape(tree) for tree in trees] == [shape(trees[0])] * 6
    # Four nodes, each prompt of the engine is the path before what it generated, and nothing else was ever generated.
    tree = trees[0]
    assert [node.sampled for node in tree.nodes] == [False, True, False, True]
    assert seen == [tree.token_ids(0), tree.token_ids(2)] * 6
    text = Characters().decode(tree.token_ids(3))
    assert text.endswith(f"let me see {CALL}<end><|tool|>3<end><|assistant|>it is 3<end>")
    for node in (1, 3):
        of, prompt = tree.nodes[node], tree.token_ids(node - 1)
        assert list(of.log_probs) == [log_prob(prompt, list(of.token_ids), i) for i in range(len(of.token_ids))]
        assert set(of.weight_versions) == {0}


def test_reasoning_comes_back_in_each_dialect():
    tokenizer = merging_tokenizer()
    text = "<think>\nhm\n</think>\n\nyes"
    trees, told = [], []
    with serving(
        ScriptEngine(lambda *_: text, tokenizer=tokenizer), load_renderer(tokenizer, "qwen3", thinking_retention="all")
    ) as gateway:
        for dialect in range(3):
            _, token = gateway.open(seed=1)
            if dialect == 0:
                client = openai.OpenAI(base_url=f"{gateway.address}/v1", api_key=token)
                messages = [user("a")]
                for _ in range(2):
                    message = client.chat.completions.create(model="m", messages=messages).choices[0].message
                    messages += [{"role": "assistant", "content": message.content}, user("b")]  # the reasoning left out
                told.append((message.reasoning_content, message.content))
            elif dialect == 1:
                client = anthropic.Anthropic(base_url=gateway.address, api_key=token)
                messages = [user("a")]
                for _ in range(2):
                    with client.messages.stream(model="m", max_tokens=99, messages=messages) as stream:
                        reply = stream.get_final_message()
                    messages += [{"role": "assistant", "content": reply.content}, user("b")]
                told.append((reply.content[0].thinking, reply.content[1].text))
            else:
                client = openai.OpenAI(base_url=f"{gateway.address}/v1", api_key=token)
                items = [user("a")]
                for _ in range(2):
                    with client.responses.stream(model="m", input=items) as stream:
                        reply = stream.get_final_response()
                    items += [*[item.model_dump(exclude_none=True) for item in reply.output], user("b")]
                told.append((reply.output[0].content[0].text, reply.output_text))
            client.close()
            trees.append(gateway.close(token))
    assert told == [("hm", "yes")] * 3
    assert [shape(tree) for tree in trees] == [shape(trees[0])] * 3
    assert [node.parent for node in trees[0].nodes] == [None, 0, 1, 2]


def test_token_ids_in_and_out():
    with session(ScriptEngine(lambda *_: "yo")) as (gateway, token):
        prompt = [5, 6, 7]
        for _ in range(2):
            reply = complete(gateway, token, prompt, max_tokens=9, logprobs=1, skip_special_tokens=False)
            choice = reply.json()["choices"][0]
            assert choice["token_ids"] == [*Characters().encode("yo"), 1] and choice["finish_reason"] == "stop"
            content = choice["logprobs"]["content"]
            assert [one["token"] for one in content] == [f"token_id:{one}" for one in choice["token_ids"]]
            assert [one["logprob"] for one in content] == [
                log_prob(prompt, choice["token_ids"], place) for place in range(3)
            ]
            prompt = [*prompt, *choice["token_ids"], 8]
        how = {"max_tokens": 9, "stop_token_ids": [Characters().encode("y")[0]]}
        again, other = complete(gateway, token, prompt[:7], **how), complete(gateway, token, [5, 9], **how)
        assert again.status_code == other.status_code == 200
        assert complete(gateway, token, [5, 9], max_tokens=1).json()["choices"][0]["finish_reason"] == "length"
        closed = gateway.close_session(token)
    assert closed.counters == {"calls": 5, "truncated": 1}
    tree = closed.tree
    # The second prompt continues the first; the third is the same again; the fourth begins anew, and is also the fifth.
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 2, 2, None, 5, 5]


def test_token_endpoint_returns_the_experts_that_the_engine_records():
    """As vLLM does: of all tokens but the last."""

    class Recording(ScriptEngine):
        routed_experts = True

        def record(self, request, token_ids, *rest):
            computed = range((len(request.prompt) + len(request.token_ids) + len(token_ids) - 1) * 6)
            super().record(request, token_ids, *rest, routed_experts=RoutedExperts(array("h", computed), 3, 2))

    with session(Recording(lambda *_: "yo")) as (gateway, token):
        choice = complete(gateway, token, [5, 6, 7]).json()["choices"][0]
    found = numpy.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert len(choice["token_ids"]) == 3 and found.dtype == numpy.int16
    assert numpy.array_equal(found, numpy.arange(5 * 6).reshape(5, 3, 2))


def test_a_prompt_of_tokens_continues_the_longest_path():
    with session(ScriptEngine(lambda *_: "yo")) as (gateway, token):

        def ask(prompt):
            return complete(gateway, token, prompt).json()["choices"][0]["token_ids"]

        first = [*Characters().encode("y"), *Characters().encode("o")]
        ask([5, 6, first[0]])  # a longer beginning of the last prompt than [5, 6], but of a shorter path
        ask([5, 6, *ask([5, 6]), 8])
        tree = gateway.close(token)
    assert [node.parent for node in tree.nodes] == [None, 0, None, 2, 3, 4]


def test_a_conversation_does_not_go_through_what_was_sent_as_tokens():
    with session(ScriptEngine(lambda *_: "yo")) as (gateway, token):
        tree, messages = gateway._sessions[token].tree, [user("x")]
        said = chat(gateway, token, messages).json()["choices"][0]["message"]
        for prompt in (tree.token_ids(0), [*tree.token_ids(1), 99]):
            assert complete(gateway, token, prompt).status_code == 200
        chat(gateway, token, messages)  # again
        chat(gateway, token, [*messages, said, user("y")])
        prompts = [
            TokenRenderer(Characters()).render(of, add_generation_prompt=True).token_ids
            for of in (messages, [*messages, said, user("y")])
        ]
        assert gateway.engine.seen[-2:] == prompts


def test_nemo_gym_fields_go_out_and_come_back():
    with serving(ScriptEngine(lambda *_: "a b")) as gateway:
        _, token = gateway.open(seed=1, token_ids=True)
        message = chat(gateway, token, [user("x")]).json()["choices"][0]["message"]
        tree = gateway._sessions[token].tree
        assert message["prompt_token_ids"] == tree.token_ids(0)
        assert message["generation_token_ids"] == list(tree.nodes[1].token_ids)
        assert message["generation_log_probs"] == list(tree.nodes[1].log_probs)
        # A client that has changed the text, but brings the ids along: the prefix is spliced from them.
        chat(gateway, token, [user("x"), {**message, "content": "a  b"}, user("y")])
        assert [node.parent for node in tree.nodes] == [None, 0, 1, 2]
        reply = httpx.post(
            f"{gateway.address}/v1/responses",
            json={"model": "m", "input": "x", "return_token_ids": True},
            headers={"authorization": f"Bearer {token}"},
        ).json()
        assert reply["output"][-1]["generation_token_ids"] == [*Characters().encode("a b"), 1]
        url, body = f"{gateway.address}/v1/messages", {"model": "m", "max_tokens": 9, "messages": [user("z")]}
        reply = CLIENT.post(url, json=body, headers={"x-api-key": token}).json()
        ids = {name: reply[name] for name in ("prompt_token_ids", "generation_token_ids")}
        body["messages"] += [{"role": "assistant", "content": "a  b", **ids}, user("y")]
        assert CLIENT.post(url, json=body, headers={"x-api-key": token}).status_code == 200
        assert [node.parent for node in tree.nodes[5:]] == [None, 5, 6, 7]


def test_a_node_goes_through_json_unchanged():
    mask = SamplingMask(array("i", [3, 4]), array("i", [2, 0]))
    for node in (
        Node(None, array("i", [1, 2]), ("a", "b.c")),
        Node(0, array("i", [7, 8]), ("d",), "stop", (-0.1, -1e-17), (3, None), mask, {3: 2**62, 4: -1}),
    ):
        assert read_node(write_node(node)) == node


# --- what a client can ask for ----------------------------------------------------------------------------------------


def test_sampling_is_the_trainers_decision(caplog):
    how = SamplingParams(5, temperature=0.7)
    with session(ScriptEngine(lambda *_: "abcdef"), sampling_params=how) as (gateway, token):
        with caplog.at_level(logging.INFO):
            replies = [
                chat(gateway, token, [user("x")], temperature=1.0, max_tokens=limit).json() for limit in (3, 100)
            ]
        assert [one["choices"][0]["message"]["content"] for one in replies] == ["abc", "abcde"]
        assert {one["choices"][0]["finish_reason"] for one in replies} == {"length"}
        closed = gateway.close_session(token)
    assert closed.counters == {"calls": 2, "overruled": 2, "truncated": 2}
    assert len([one for one in caplog.records if "no effect" in one.message]) == 1


def test_a_reply_that_was_cut_off_goes_on_as_one_row():
    with session(ScriptEngine(lambda *_: "abcdef")) as (gateway, token):
        first = chat(gateway, token, [user("x")], max_tokens=3).json()["choices"][0]
        assert first["finish_reason"] == "length" and first["message"]["content"] == "abc"
        assert chat(gateway, token, [user("x"), first["message"], user("go on")]).status_code == 200
        closed = gateway.close_session(token)
    assert closed.counters == {"calls": 2, "truncated": 1}
    (row,) = rows(closed.tree)
    assert sum(row.completion.loss_mask) == len("abc") + len("abcdef") + 1


def test_the_context_limits_a_completion_and_then_a_prompt():
    engine = ScriptEngine(lambda *_: "a" * 50)
    engine.max_positions = 20
    with session(engine) as (gateway, token):
        first = chat(gateway, token, [user("x")]).json()
        assert first["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}
        long = [user("x" * 30)]
        with openai.OpenAI(base_url=gateway.address, api_key=token) as client:
            with pytest.raises(openai.BadRequestError, match="33 tokens") as raised:
                client.chat.completions.create(model="m", messages=long)
        assert raised.value.code == "context_length_exceeded"
        with anthropic.Anthropic(base_url=f"{gateway.address}/v1", api_key=token) as client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                client.messages.create(model="m", max_tokens=5, messages=long)
        assert len(gateway.close(token).nodes) == 2  # what is refused leaves nothing behind


DEEP = {"function": {"name": "f", "arguments": "[" * 2000 + "]" * 2000}}


def said(**more):
    return {"role": "assistant", "content": "x", "generation_token_ids": [1], **more}


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat/completions", b"\xff{", "no JSON"),
        ("chat/completions", b"[" * 100_000, "no JSON"),
        ("chat/completions", b"[]", "expected an object"),
        ("chat/completions", {}, "messages is None"),
        ("chat/completions", {"messages": []}, "nothing to answer"),
        ("chat/completions", {"messages": [None]}, "list of objects"),
        ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}, "role is 'robot'"),
        ("chat/completions", {"messages": [{"role": "user", "content": {"a": 1}}]}, "list of objects"),
        ("chat/completions", {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "only text"),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, "ends with the assistant"),
        (
            "chat/completions",
            {"messages": [user("x"), {"role": "assistant", "tool_calls": [{}]}, user("y")]},
            "function",
        ),
        ("chat/completions", {"messages": [user("x")], "stop": ["a"]}, "stop="),
        ("chat/completions", {"messages": [user("x")], "n": 2}, "n=2"),
        ("chat/completions", {"messages": [user("x")], "max_tokens": "many"}, "max_tokens"),
        ("chat/completions", {"messages": [user("x")], "max_tokens": True}, "max_tokens"),
        ("chat/completions", {"messages": [user("x")], "max_completion_tokens": 0}, "max_tokens"),
        ("chat/completions", {"messages": [user("x")], "stream": True, "stream_options": "x"}, "stream_options"),
        ("chat/completions", {"messages": [user("x"), said(prompt_token_ids=["a"]), user("y")]}, "token ids"),
        ("chat/completions", {"messages": [user("x"), said(prompt_token_ids=[2**40]), user("y")]}, "token ids"),
        ("chat/completions", {"messages": [user("x"), said(tool_calls=[DEEP]), user("y")]}, "too deeply"),
        ("chat/completions", {"messages": [user("x")], "tools": [1]}, "tools"),
        ("chat/completions", {"messages": [user("x")], "tools": [{"function": {"name": 3}}]}, "tool's name"),
        ("chat/completions", {"messages": [user("x")], "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"messages": [user("x")], "tools": [TOOL], "tool_choice": "none"}, "leave out the tools"),
        ("chat/completions", {"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"messages": [user("x")], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("chat/completions", {"messages": [user("x")], "web_search_options": {}}, "web_search_options={} is not"),
        ("messages", {"messages": [user([{"type": "image", "source": {}}])], "max_tokens": 5}, "only text"),
        ("messages", {"messages": [user("x")], "max_tokens": 0}, "max_tokens"),
        ("messages", {"messages": [user("x")], "max_tokens": 5, "tools": [{"type": "bash_1", "name": "b"}]}, "bash_1"),
        ("messages", {"messages": [user("x")], "stop_sequences": ["a"]}, "stop_sequences"),
        ("messages", {"messages": [user("x")], "output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"input": "x", "text": {"format": "json"}}, "text={'format'"),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": "x", "conversation": "conv_1"}, "conversation"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ("../inference/v1/generate", {"token_ids": ["a"]}, "token_ids"),
        ("../inference/v1/generate", {"token_ids": []}, "empty"),
        ("../inference/v1/generate", {"token_ids": [2**40]}, "token_ids"),
        ("../inference/v1/generate", {"token_ids": [1], "sampling_params": {"ignore_eos": True}}, "ignore_eos=True"),
    ],
)
def test_bad_input_gets_the_dialects_error(shared_gateway, path, body, says):
    gateway, token = shared_gateway
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{gateway.address}/v1/{path}" if ".." not in path else f"{gateway.address}/{path[3:]}"
    reply = CLIENT.post(url, content=content, headers={"x-api-key": token})
    assert reply.status_code == 400 and says in reply.text, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert ("code" in error) == (path != "messages")


TYPED = {"type": "text", "text": "t"}
WHOLE = {
    "/v1/chat/completions": {
        "model": "m", "max_tokens": 5, "temperature": 1.0, "n": 1, "stop": [], "logprobs": True, "tool_choice": "auto",
        "stream": True, "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "tools": [TOOL],
        "messages": [
            {"role": "system", "content": [TYPED]}, user("x"),
            said(tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}], prompt_token_ids=[1]),
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ],
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 5, "system": [TYPED], "tools": [{"name": "f", "input_schema": {}}], "stream": False,
        "tool_choice": {"type": "auto"},
        "messages": [
            user("x"),
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t"}, TYPED, {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ]},
            user([{"type": "tool_result", "tool_use_id": "c", "content": [TYPED]}, TYPED]),
        ],
    },
    "/v1/responses": {
        "model": "m", "max_output_tokens": 5, "instructions": "s", "tools": [{"type": "function", "name": "f"}],
        "text": {"format": {"type": "text"}}, "stream": True, "metadata": {},
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
    },
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 5, "stop_token_ids": [1]}},
}  # fmt: skip
VALUES = (None, True, 0, -1, 1.5, "", "x", [], [1], ["x"], [[]], {}, {"a": 1}, [{}], "\ud800", 10**30)


def changed(value):
    """Copies of something in which one part is another value."""
    for part in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for other in (*VALUES, *changed(value[part])):
            yield {**value, part: other} if isinstance(value, dict) else [*value[:part], other, *value[part + 1 :]]


def test_no_request_is_an_error_of_the_server():
    """Whatever stands in a field: an answer, or an error that says what is wrong with the request."""

    async def play(gateway):
        transport, codes = httpx.ASGITransport(app=gateway._front), set()
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for path, whole in WHOLE.items():
                for number, body in enumerate(changed(whole)):
                    if depth.full or not number % 7:
                        _, token = gateway.open()
                        reply = await client.post(path, content=json.dumps(body), headers={"x-api-key": token})
                        gateway.close(token)
                        assert "server_error" not in reply.text, (path, body, reply.text)
                        codes.add(reply.status_code)
        return codes

    engine = ScriptEngine(lambda *_: "fine")
    assert asyncio.run(play(Gateway(engine, TokenRenderer(Characters())))) == {200, 400}
    engine.close()


@pytest.fixture(scope="module")
def shared_gateway():
    with serving() as gateway:
        yield gateway, gateway.open()[1]


def test_a_token_opens_one_session_and_a_closed_one_none():
    with session() as (gateway, token):
        assert chat(gateway, token, [user("x")]).status_code == 200
        gateway.close(token)
        for wrong in (token, "sk-none", "x" * 5000):
            reply = chat(gateway, wrong, [user("x")])
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
            client = anthropic.Anthropic(base_url=gateway.address, api_key=wrong)
            with pytest.raises(anthropic.AuthenticationError), client:
                client.messages.create(model="m", max_tokens=5, messages=[user("x")])
        with pytest.raises(KeyError):
            gateway.close(token)
        keyed = {"x-gateway-key": "wrong", "authorization": f"Bearer {token}"}
        assert httpx.request("PUT", f"{gateway.address}/private/sessions", headers=keyed).status_code == 401
        _, token = gateway.open()
        headers = {"authorization": f"Bearer {token}"}
        assert httpx.get(f"{gateway.address}/v1/models", headers=headers).json()["data"][0]["id"] == "policy"
        assert httpx.get(f"{gateway.address}/v1/nothing", headers=headers).status_code == 404
        assert httpx.get(f"{gateway.address}/v1/messages", headers=headers).status_code == 405
        assert httpx.get(f"{gateway.address}/health").status_code == 200


def test_limits_of_sessions_nodes_and_calls():
    engine = ScriptEngine(lambda *_: "a", delay=0.05)
    with serving(engine, limits=GatewayLimits(sessions=2, nodes=4, calls=2)) as gateway:
        gateway.open(expires=False)  # as those of a rollout, which do not count
        _, token = gateway.open()
        gateway.open()
        with pytest.raises(RolloutError, match="2 sessions"):
            gateway.open()
        replies = [chat(gateway, token, [user(str(number))]) for number in range(3)]
        assert [one.status_code for one in replies] == [200, 200, 400] and "4 nodes" in replies[2].text
    with pytest.raises(ValueError, match="calls=0"):
        GatewayLimits(calls=0)


def test_sessions_that_nobody_closes_expire_but_not_during_a_call(caplog):
    def sessions_become(number):
        wait_until(lambda: gateway.sessions == number)

    engine = ScriptEngine(lambda *_: "w" * 10**5, tokens=1, delay=0.01)
    with serving(engine, limits=GatewayLimits(idle_seconds=0.4, sessions=3)) as gateway:
        (_, left), (_, calling) = gateway.open("left"), gateway.open("calling")
        _, kept = gateway.open("kept", expires=False)
        found = []
        thread = threading.Thread(target=lambda: found.append(chat(gateway, calling, [user("x")])))
        thread.start()
        sessions_become(2)
        late = chat(gateway, left, [user("x")])
        assert late.status_code == 401 and "expired" in late.text
        with pytest.raises(KeyError, match="expire"):
            gateway.close(left)
        time.sleep(0.7)
        assert gateway.sessions == 2 and not found  # the call goes on
        ending, engine.tokens = time.monotonic(), 10**6
        thread.join(20)
        assert found[0].status_code == 200
        sessions_become(1)
        assert time.monotonic() - ending >= 0.4  # the call's end counts, and not its begin
        gateway.open()
        gateway.open()  # there is room again
        assert gateway.close(kept).nodes == []
    assert [one.args[0] for one in caplog.records if "expired" in one.message][:2] == ["left", "calling"]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_an_engines_error_is_an_error_of_one_call():
    def script(prompt, seed):
        if "boom" in prompt:
            raise RolloutError("the logits are not finite")
        return "fine"

    with serving(ScriptEngine(script)) as gateway:
        (_, token), (_, other) = gateway.open(), gateway.open()
        reply = chat(gateway, token, [user("boom")])
        assert reply.status_code == 500 and "not finite" in reply.json()["error"]["message"]
        assert chat(gateway, other, [user("x")]).status_code == chat(gateway, token, [user("x")]).status_code == 200
        tree = gateway.close(token)
        assert [node.sampled for node in tree.nodes] == [False, False, True]  # nothing of the failed call was sampled


def test_a_client_that_leaves_aborts_its_request_and_nothing_else():
    engine = ScriptEngine(lambda prompt, seed: "w" * 10**5 if "wait" in prompt else "yes", tokens=1, delay=0.002)
    with session(engine) as (gateway, token):
        with pytest.raises(httpx.ReadTimeout):
            chat(gateway, token, [user("wait")], timeout=0.3)
        wait_until(lambda: engine.load().running + engine.load().waiting == 0, 10)
        assert chat(gateway, token, [user("x")]).json()["choices"][0]["message"]["content"] == "yes"
        assert [node.sampled for node in gateway.close(token).nodes] == [False, False, True]


def test_a_call_for_which_others_may_leave_no_turn_waits_for_their_end():
    """If they fail, it gets their turn."""
    fails, engine = threading.Event(), ScriptEngine()

    def script(prompt, seed):
        if "boom" in prompt:
            fails.wait(20)
            raise RolloutError("the logits are not finite")
        return "fine"

    engine.script = script
    with serving(engine) as gateway, ThreadPoolExecutor() as threads:
        _, token = gateway.open(limits=SessionLimits(turns=1))
        fails_later = threads.submit(chat, gateway, token, [user("boom")])
        wait_until(lambda: engine.seen)
        waits = threads.submit(chat, gateway, token, [user("x")])
        wait_until(lambda: gateway._sessions[token].use.calls == 2)
        fails.set()
        assert (fails_later.result().status_code, waits.result().status_code) == (500, 200)
        assert chat(gateway, token, [user("x")]).status_code == 400
        assert gateway.close_session(token).end_reason == "turns"


@contextmanager
def answering(gateway, engine, token):
    """Inside, a call is being answered; afterwards, it has ended: yields a list that its reply is in then."""
    found = []
    thread = threading.Thread(target=lambda: found.append(chat(gateway, token, [user("x")])))
    thread.start()
    wait_until(lambda: engine.load().running)
    yield found
    thread.join(20)


def test_a_session_that_is_closed_ends_its_calls():
    engine = ScriptEngine(lambda *_: "w" * 10**5, tokens=1, delay=0.002)
    with session(engine) as (gateway, token):
        with answering(gateway, engine, token) as found:
            tree = gateway.close(token)
        assert found[0].status_code == 401 and "closed" in found[0].text
        assert [node.sampled for node in tree.nodes] == [False] and engine.load().running == 0


def test_an_abort_for_an_update_continues_and_a_turn_has_tokens_of_two_versions():
    engine = ScriptEngine(lambda *_: "abcdefghij" * 20, tokens=1, delay=0.005)
    with session(engine) as (gateway, token):
        with answering(gateway, engine, token) as found:
            engine.pause("abort")
            engine.begin_update()
            engine.finish_update(1)
            engine.resume()
        assert found[0].json()["choices"][0]["message"]["content"] == "abcdefghij" * 20
        versions = gateway.close(token).nodes[1].weight_versions
    assert set(versions) == {0, 1} and list(versions) == sorted(versions) and len(versions) == 201


def test_an_engine_that_takes_no_requests_is_waited_for():
    class Sleeper(ScriptEngine):
        asleep = True

        def submit(self, *args, **kwargs):
            if self.asleep:
                raise RolloutError("the engine is asleep")
            return super().submit(*args, **kwargs)

    engine = Sleeper(lambda *_: "yes")
    with session(engine, limits=GatewayLimits(wait_seconds=0.8)) as (gateway, token):
        threading.Timer(0.2, lambda: setattr(engine, "asleep", False)).start()
        assert chat(gateway, token, [user("x")]).status_code == 200
        engine.asleep = True
        late = chat(gateway, token, [user("y")])
        assert late.status_code == 503 and "asleep" in late.text


def test_what_an_engine_refuses_for_good_is_not_waited_for():
    class Refuses(ScriptEngine):
        def check_request(self, *given):  # as HTTPEngine, if its server's log-probabilities would be others
            raise SamplingParamsError("change the SamplingParams")

    with session(Refuses()) as (gateway, token):
        reply = chat(gateway, token, [user("x")], timeout=20)
    assert reply.status_code == 400 and "change the SamplingParams" in reply.text


def test_an_engine_that_learns_in_a_call_that_its_weights_are_gone_is_waited_for():
    def script(prompt, seed):
        if engine.lost:
            engine.lost = False
            engine.abandon_update()  # as HTTPEngine does when its server was restarted
            raise RolloutError("the server was restarted")
        return "yes"

    engine = ScriptEngine(script)
    engine.lost = True
    with session(engine, limits=GatewayLimits(wait_seconds=0.8)) as (gateway, token):

        def update():
            engine.begin_update()
            engine.finish_update(2)

        threading.Timer(0.2, update).start()
        assert chat(gateway, token, [user("x")]).status_code == 200
        engine.lost = True
        late = chat(gateway, token, [user("y")])
        assert late.status_code == 503 and "no complete weights" in late.text


@pytest.mark.parametrize("asleep", [True, False], ids=["while it waits", "as it begins"])
def test_a_session_that_is_closed_before_the_engine_has_its_request_generates_nothing(asleep):
    class Closing(ScriptEngine):
        calls = made = 0

        def record(self, request, token_ids, *args):
            self.made += len(token_ids)
            return super().record(request, token_ids, *args)

        def submit(self, *args, **kwargs):
            self.calls += 1
            if self.calls == 1:
                gateway.close(token)
                if asleep:
                    raise RolloutError("the engine is asleep")
            return super().submit(*args, **kwargs)

    engine = Closing(lambda *_: "x" * 200, tokens=1, delay=0.01)
    with session(engine) as (gateway, token):
        assert chat(gateway, token, [user("x")]).status_code == 401
        assert engine.load().running == 0 and engine.made < (1 if asleep else 100)


def test_an_engine_that_falls_asleep_during_a_long_completion_is_waited_for():
    engine = ScriptEngine(lambda *_: "x" * 40, tokens=1, delay=0.01)
    with session(engine, limits=GatewayLimits(wait_seconds=0.25)) as (gateway, token):

        def sleep():
            engine._hold("sleep")  # ScriptEngine has no sleep of its own
            engine.abort()
            time.sleep(0.1)
            engine._release("sleep")

        threading.Timer(0.3, sleep).start()
        assert chat(gateway, token, [user("x")]).json()["usage"]["completion_tokens"] == 41


def test_a_stream_is_kept_open_while_the_engine_works_and_ends_with_its_error():
    def script(prompt, seed):
        time.sleep(0.3)
        if "boom" in prompt:
            raise RolloutError("broken")
        return "yes"

    with session(ScriptEngine(script), limits=GatewayLimits(ping_seconds=0.1)) as (gateway, token):
        with openai.OpenAI(base_url=gateway.address, api_key=token, max_retries=0) as client:
            for content, error in (("x", None), ("boom", openai.APIError)):
                stream = client.chat.completions.create(model="m", messages=[user(content)], stream=True)
                if error is None:
                    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "yes"
                else:
                    with pytest.raises(error, match="broken"):
                        list(stream)
            events = client.responses.create(model="m", input="boom", stream=True)
            assert [event.message for event in events if event.type == "error"] == ["broken"]
        with anthropic.Anthropic(base_url=gateway.address, api_key=token, max_retries=0) as client:
            with pytest.raises(anthropic.APIError, match="broken"):
                with client.messages.stream(model="m", max_tokens=5, messages=[user("boom")]) as stream:
                    stream.get_final_message()
        text = chat(gateway, token, [user("x")], stream=True).text
        assert text.startswith(": waiting\n\n") and text.endswith("data: [DONE]\n\n")


def test_a_call_that_takes_too_long():
    engine = ScriptEngine(lambda *_: "w" * 10**5, tokens=1, delay=0.002)
    with session(engine, limits=GatewayLimits(call_seconds=0.3)) as (gateway, token):
        assert chat(gateway, token, [user("x")]).status_code == 504
        wait_until(lambda: engine.load().running == 0, 10)


def test_verification_names_session_position_and_texts():
    class Careless(ScriptEngine):
        """Generates from another prompt than it was given."""

        def _request(self, *args):
            request = super()._request(*args)
            if len(request.prompt) > 20:
                request.prompt[12] += 1
            return request

    with serving(Careless(lambda *_: "yes"), verify=True) as gateway:
        _, token = gateway.open("row 3")
        assert chat(gateway, token, [user("x")]).status_code == 200
        wrong = chat(gateway, token, [user("abcdefghijklmnopqrstuvwxyz")])
        assert wrong.status_code == 500
        said = wrong.json()["error"]["message"]
        assert "session row 3" in said and "position 12" in said
        assert "has 'defghijkmmnop" in said and "tree 'defghijklmnop" in said  # what the engine has, and the tree
        tree = gateway.close(token)
        assert sum(node.sampled for node in tree.nodes) == 1  # what came of it is not in the tree


def test_replies_on_an_open_connection_do_not_wait_for_acknowledgements():
    """A reply is sent in two parts. The system would hold the second for 40 ms, until the first is acknowledged."""
    seconds = []
    with serving(ScriptEngine(lambda *_: "fine")) as gateway:
        for _ in range(20):
            _, token = gateway.open()
            begun = time.perf_counter()
            assert chat(gateway, token, [user("a")]).status_code == 200
            seconds.append(time.perf_counter() - begun)
    assert min(seconds[10:]) < 0.03


def test_many_at_once():
    """60 sessions on asyncio's client: each has its own conversation, and no other's."""

    async def play(client, gateway, number):
        _, token = gateway.open(seed=number)
        messages = []
        for turn in range(3):
            messages.append(user(f"{number}-{turn}"))
            reply = await client.post(
                f"{gateway.address}/v1/chat/completions",
                json={"messages": messages},
                headers={"x-api-key": token},
                timeout=60,
            )
            messages.append(reply.json()["choices"][0]["message"])
        return token

    async def all_of(gateway):
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=50)) as client:
            return await asyncio.gather(*(play(client, gateway, number) for number in range(60)))

    def script(prompt, seed):
        return prompt.rpartition("<|user|>")[2].partition("<end>")[0][::-1]

    with serving(ScriptEngine(script)) as gateway:
        for number, token in enumerate(asyncio.run(all_of(gateway))):
            tree = gateway.close(token)
            text = Characters().decode(tree.token_ids(5))
            turns = (f"{number}-{turn}" for turn in range(3))
            assert text == "".join(f"<|user|>{one}<end><|assistant|>{one[::-1]}<end>" for one in turns)
        assert gateway.sessions == 0


def test_what_cannot_be_rendered_is_the_clients_error_in_any_turn():
    class Strict(Characters):
        def encode(self, text):
            text.encode()  # refuses half of an emoji, as Hugging Face's tokenizers do
            return super().encode(text)

    with session(ScriptEngine(lambda *_: "yes"), TokenRenderer(Strict())) as (gateway, token):
        answer = chat(gateway, token, [user("x")]).json()["choices"][0]["message"]
        for before in ([], [user("x"), answer]):
            body = json.dumps({"messages": [*before, user("\ud800")]})
            reply = CLIENT.post(f"{gateway.address}/v1/chat/completions", content=body, headers={"x-api-key": token})
            assert reply.status_code == 400 and "cannot be rendered" in reply.text


@pytest.mark.parametrize("arguments", ["[1, 2]", '"x"', '{"a": NaN}', '"{\\"a\\": 1e999}"', '{"a": "\\ud83d"}'])
def test_arguments_that_are_no_proper_object_come_back_in_anthropics_dialect(arguments):
    call = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    with session(ScriptEngine(lambda *_: call)) as (gateway, token):
        with anthropic.Anthropic(base_url=gateway.address, api_key=token, max_retries=0) as client:
            messages = [user("x")]
            for _ in range(2):
                reply = client.messages.create(model="m", max_tokens=500, messages=messages)
                json.dumps(reply.content[0].input, allow_nan=False)  # others than Python can read it
                messages.append({"role": "assistant", "content": [one.model_dump() for one in reply.content]})
                result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "r"}
                messages.append({"role": "user", "content": [result]})
        assert [node.parent for node in gateway.close(token).nodes] == [None, 0, 1, 2]


def test_a_gateway_is_started_once_and_again_after_its_stop(monkeypatch):
    with serving() as gateway:
        first, thread = gateway.address, gateway._front._thread
        assert gateway.start() == first and gateway._front._thread is thread
        gateway.stop()
        gateway._front.port = int(first.rpartition(":")[2])
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(RolloutError, match=r"did not start at .*can't start new thread"):
                gateway.start()
        gateway.stop()
        assert gateway.start() == first  # the port is free
        assert httpx.get(f"{gateway.address}/health").status_code < 500


def test_a_server_that_starts_too_late_ends(monkeypatch):
    """Or it would serve for ever, beside the one that the next attempt makes."""
    monkeypatch.setattr(http_front, "START_SECONDS", 0.05)
    goes_on = threading.Event()

    class Late(http_front.HTTPFront):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "loop":  # in the server's thread, before it serves
                goes_on.wait(20)

    front = Late(None, GatewayLimits())
    with pytest.raises(RolloutError, match=r"did not start at http://127\.0\.0\.1:.*timeout"):
        front.start()
    goes_on.set()
    wait_until(lambda: not front.running)


def test_a_fork_does_not_hide_the_end_of_its_parents_gateway():
    """Neither from clients that are connected, nor from those that connect."""
    began, begins = os.pipe()
    with session(ScriptEngine(lambda *_: "fine")) as (gateway, token):
        assert chat(gateway, token, [user("x")]).status_code == 200  # and its connection stays open
        fork = os.fork()
        if not fork:
            os.write(begins, b"x")
            time.sleep(60)
            os._exit(0)
        try:
            os.read(began, 1)
            assert chat(gateway, token, [user("y")]).status_code == 200
            gateway.stop()
            with pytest.raises(httpx.ConnectError):
                chat(gateway, token, [user("z")], timeout=5)
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)
            os.close(began)
            os.close(begins)


def test_limits_of_a_session_that_continues_count_what_it_had():
    with session(ScriptEngine(lambda *_: "abcd")) as (gateway, token):
        messages = [user("x")]
        messages += [chat(gateway, token, messages).json()["choices"][0]["message"], user("y")]
        tree = gateway.close(token)
        # Behind the first prompt are the 5 tokens of its answer, and the 4 of what follows it. So 2 are left.
        _, token = gateway.open(trajectory=tree, limits=SessionLimits(turns=2, tokens=11))
        assert chat(gateway, token, messages).json()["usage"]["completion_tokens"] == 2
        assert chat(gateway, token, messages).status_code == 400  # for the first reason, although it had two turns, too
        assert gateway.close_session(token).end_reason == "tokens"
