"""From messages to tokens and back: what was sampled is never rendered again."""

import json
import logging
import pickle
import random

import pytest
from agent_helpers import Characters, merging_tokenizer, user

from workers.rollout.agents.rendering import (
    PromptMismatchError,
    RenderError,
    TokenRenderer,
    assistant_message,
    check_prompt,
    digest,
    extend,
    load_renderer,
    record,
)
from workers.rollout.agents.rows import rows
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


def sampled(token_ids, reason="stop"):
    return Completion(list(token_ids), [-0.5] * len(token_ids), reason, [3] * len(token_ids))


def turn(tree, renderer, messages, token_ids, tools=None, counters=None, reason="stop"):
    """Play one turn: the prompt that the engine got, the new node, and the assistant's message."""
    node = extend(tree, renderer, messages, tools, counters)
    prompt = tree.token_ids(node)
    after, message = record(tree, renderer, node, sampled(token_ids, reason), tools)
    assert tree.token_ids(after) == prompt + list(token_ids)
    return prompt, after, message


# --- digests ----------------------------------------------------------------------------------------------------------


def call(name, arguments, id_="x"):
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_digest_counts_what_a_message_says():
    same = [
        {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1, "b": [2]}')]},
        {"role": "assistant", "content": "", "tool_calls": [call("f", {"b": [2], "a": 1}, "y")]},
        {"role": "assistant", "content": [], "tool_calls": [call("f", '{ "b":[2],"a":1 }')], "refusal": None},
        {"role": "assistant", "tool_calls": [call("f", '{"a": 1.0, "b": [2e0]}')]},  # JavaScript returns 1 and 2
    ]
    assert len({digest(message) for message in same}) == 1
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert digest(user("one two")) == digest(user(parts))
    said = {"role": "assistant", "content": "one"}
    others = [user("one"), user("two"), {"role": "system", "content": "one"}, said]
    others += [said | {"reasoning_content": text} for text in "rs"]
    for arguments in ("{}", "[1]", "no json", '{"a": 1}', '{"a": 1.5}'):
        others.append(said | {"tool_calls": [call("f", arguments)]})
    others += [said | {"tool_calls": [call("g", "{}")] * count} for count in (1, 2)]
    assert len({digest(message) for message in others}) == len(others)


@pytest.mark.parametrize(
    "message",
    ["text", {"content": "x"}, user(3), user([{"type": "image_url", "image_url": {}}]), user([None])]
    + [{"role": "assistant", "tool_calls": wrong} for wrong in ([{}], ["f"], [{"function": {}}])],
)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(RenderError):
        digest(message)


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_a_conversation_is_a_path_of_which_only_new_messages_are_rendered():
    renderer, tree = TokenRenderer(Characters()), Trajectory()
    encode = Characters().encode
    messages = [{"role": "system", "content": "be"}, user("hi")]
    prompt, _, answer = turn(tree, renderer, messages, [*encode("yo"), 1])
    assert prompt == [2, *encode("be"), 1, 3, *encode("hi"), 1, 4]
    assert answer == {"role": "assistant", "content": "yo"}
    following, after, _ = turn(tree, renderer, [*messages, answer, user("?")], encode("no"))
    assert following == [*prompt, *encode("yo"), 1, 3, *encode("?"), 1, 4]
    assert [node.sampled for node in map(tree.nodes.__getitem__, tree.path(after))] == [False, True, False, True]


def test_a_retry_is_a_sibling_and_a_subagent_a_root():
    renderer, tree, counters = TokenRenderer(Characters()), Trajectory(), {}
    first, one, _ = turn(tree, renderer, [user("a")], [20, 1], counters=counters)
    again, two, _ = turn(tree, renderer, [user("a")], [21, 1], counters=counters)
    assert first == again and tree.nodes[one].parent == tree.nodes[two].parent
    turn(tree, renderer, [user("b")], [22, 1], counters=counters)
    assert len(tree.children(None)) == 2 and counters == {}


def test_a_retry_with_the_same_words_continues_the_newest():
    renderer, tree = TokenRenderer(Characters()), Trajectory()
    for _ in range(2):
        _, last, answer = turn(tree, renderer, [user("a")], [20, 1])
    _, after, _ = turn(tree, renderer, [user("a"), answer, user("b")], [21, 1])
    assert last in tree.path(after)


def test_an_edited_history_is_a_branch_and_what_was_sampled_stays():
    renderer, tree, counters = TokenRenderer(Characters()), Trajectory(), {}
    turn(tree, renderer, [user("a")], [*Characters().encode("yes"), 1], counters=counters)
    edited = [user("a"), {"role": "assistant", "content": "no"}, user("b")]
    prompt, after, _ = turn(tree, renderer, edited, [20, 1], counters=counters)
    assert Characters().decode(prompt).count("no") == 1
    given = [tree.nodes[node] for node in tree.path(after)]
    assert [node.sampled for node in given] == [False, False, True]  # the client's "no" is given, below the same prompt
    assert len(tree.leaves()) == 2 and counters == {}


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_prompt_that_was_not_answered_is_left_behind(tools):
    """As of a client that has given up a call, and says something more."""
    renderer, tree, counters = TokenRenderer(Characters()), Trajectory(), {}
    extend(tree, renderer, [user("?")], tools, counters)
    prompt, node, answer = turn(tree, renderer, [user("?"), user("a")], [20, 1], tools, counters)
    messages = [user("?"), user("a"), answer, user("b")]
    extend(tree, renderer, messages, tools, counters)
    following, after, _ = turn(tree, renderer, [*messages, user("c")], [21, 1], tools, counters)
    assert following[: len(prompt) + 2] == [*prompt, 20, 1] and tree.path(after)[1] == node
    assert [len(tree.children(one)) for one in (None, node)] == [2, 2] and counters == {}


def test_other_tools_begin_anew():
    renderer, tree = TokenRenderer(Characters()), Trajectory()
    _, _, answer = turn(tree, renderer, [user("a")], [20, 1], TOOLS)
    prompt, after, _ = turn(tree, renderer, [user("a"), answer, user("b")], [20, 1])
    assert len(tree.children(None)) == 2 and len(tree.path(after)) == 2
    prompt, after, _ = turn(tree, renderer, [user("a"), answer, user("b")], [20, 1], TOOLS)
    assert len(tree.path(after)) == 4 and "add" in Characters().decode(prompt)


@pytest.mark.parametrize("said", ["yes", "<think>\nhm", '<tool_call>\n{"name": "ad'])
@pytest.mark.parametrize("name", ["tokens", "qwen3"])
def test_a_reply_that_was_cut_off_continues_with_an_end_that_is_given(name, said):
    tokenizer = Characters() if name == "tokens" else merging_tokenizer()
    renderer = TokenRenderer(tokenizer) if name == "tokens" else load_renderer(tokenizer, "qwen3")
    tree, counters = Trajectory(), {}
    words = tokenizer.encode(said)
    prompt, node, answer = turn(tree, renderer, [user("a")], words, counters=counters, reason="length")
    answer = json.loads(json.dumps(answer))
    result = {"role": "tool", "content": "3", "tool_call_id": "call_0"}
    after = extend(tree, renderer, [user("a"), answer, result], counters=counters)
    assert tree.path(after)[:2] == [0, node] and not tree.nodes[after].sampled and counters == {}
    behind = tree.nodes[after].token_ids.tolist()
    end = renderer.get_stop_token_ids()[0]
    assert tree.token_ids(after) == [*prompt, *words, *behind] and end in behind[:2]
    tree.sample(after, sampled([end]))
    (row,) = rows(tree)
    trained = zip(row.completion.token_ids, row.completion.loss_mask, strict=True)
    assert [token for token, mask in trained if mask] == [*words, end]


def test_a_reply_that_was_cut_off_is_a_branch_where_the_renderer_has_no_end_for_it():
    renderer, tree, counters = load_renderer(merging_tokenizer(), "default"), Trajectory(), {}
    # Not the spelling that the tokenizer would choose.
    words = [token for character in "the the" for token in merging_tokenizer().encode(character)]
    prompt, node, answer = turn(tree, renderer, [user("a")], words, counters=counters, reason="length")
    after = extend(tree, renderer, [user("a"), answer, user("b")], counters=counters)
    assert node not in tree.path(after) and tree.nodes[after].parent == tree.nodes[node].parent and counters == {}
    assert tree.token_ids(after)[: len(prompt)] == prompt


def test_a_client_may_leave_the_reasoning_out():
    renderer, tree = load_renderer(merging_tokenizer(), "qwen3"), Trajectory()
    encode = merging_tokenizer().encode
    prompt, _, answer = turn(tree, renderer, [user("a")], encode("<think>\nhm\n</think>\n\nyes<|im_end|>"))
    assert answer["reasoning_content"] == "hm"
    result = {"role": "tool", "content": "3", "tool_call_id": "call_0"}
    without = {"role": "assistant", "content": answer["content"]}
    for told in (answer, without):
        following = tree.token_ids(extend(tree, renderer, [user("a"), told, result]))
        assert following[: len(prompt)] == prompt and encode("hm")[0] in following
    assert len(tree.children(None)) == 1
    other = {**answer, "reasoning_content": "something else"}
    assert len(tree.path(extend(tree, renderer, [user("a"), other, result]))) != 3


def test_the_same_words_after_other_thoughts_are_two_turns():
    """As of an agent that runs the same command twice, whose client drops the reasoning."""
    renderer, tree, counters = load_renderer(merging_tokenizer(), "qwen3"), Trajectory(), {}
    encode, messages = merging_tokenizer().encode, [user("a")]
    for thought in "xyz":
        said = encode(f"<think>\n{thought}\n</think>\n\nls<|im_end|>")
        _, _, answer = turn(tree, renderer, messages, said, counters=counters)
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "tool", "content": "none"}]
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 2, 3, 4] and counters == {}


def test_a_bridge_that_does_not_extend_is_not_taken(caplog):
    """A renderer that breaks its contract: the whole conversation is rendered, counted, and logged once."""

    class Careless(TokenRenderer):
        def bridge_to_next_turn(self, prompt, completion, new_messages, *, tools=None):
            right = super().bridge_to_next_turn(prompt, completion, new_messages, tools=tools)
            right.token_ids[len(prompt)] += 1
            return right

    renderer, tree, counters = Careless(Characters()), Trajectory(), {}
    messages = [user("a")]
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            # A header in the middle of a completion: its text is rendered to other tokens.
            prompt, _, answer = turn(tree, renderer, messages, [3, 20, 1], counters=counters)
            assert len(tree.children(None)) == number + 1 and prompt.count(3) == number + 1
            messages = [*messages, answer, user("b")]
    assert counters == {"rerenders": 2}
    assert len([line for line in caplog.records if "does not begin" in line.message]) == 1


def test_random_conversations():
    """Clients that retry, edit, forget and branch: each prompt is exactly a path, a path's sampled tokens are those
    that were sampled, and a history that came back unchanged continues the tokens, whatever their spelling."""
    renderers = [
        (TokenRenderer(Characters()), range(1, 60)),
        (load_renderer(merging_tokenizer(), "qwen3", thinking_retention="all"), range(0, 270)),
        (load_renderer(merging_tokenizer(), "default"), [*range(0, 262), 264, 269]),
    ]
    continued = 0
    for seed in range(150):
        rng = random.Random(seed)
        renderer, alphabet = renderers[seed % 3]
        end = renderer.get_stop_token_ids()[0]
        tree, histories, spoken, counters = Trajectory(), [([], [])], {}, {}
        for _ in range(12):
            history, before = rng.choice(histories)
            messages = [*history, user("".join(rng.choices("abthe 123", k=rng.randrange(1, 6))))]
            if edited := rng.random() < 0.15 and len(messages) > 1:
                place = rng.randrange(len(messages))
                messages[place] = {**messages[place], "content": f"edited {rng.random()}"}
            prompt_node = extend(tree, renderer, messages, None, counters)
            prompt = tree.token_ids(prompt_node)
            # qwen3 does not continue reasoning that has not ended.
            open_reasoning = any(one.get("reasoning_content") and not one["content"] for one in history)
            if not edited and not open_reasoning:
                assert prompt[: len(before)] == before, (seed, history)
                continued += len(history) > 0
            words = [token for token in rng.choices(alphabet, k=rng.randrange(0, 8)) if token != end]
            words += [end] * (rng.random() < 0.9)
            completion = sampled(words, "stop" if words and words[-1] == end else "length")
            node, message = record(tree, renderer, prompt_node, completion)
            spoken[node] = words
            whole = tree.token_ids(node)
            assert whole == prompt + words
            if completion.finish_reason == "stop" or (words and not seed % 3):  # a TokenRenderer ends any reply
                # As a client has it: through JSON.
                history = json.loads(json.dumps([*messages, message]))
                histories.append((history, whole))
        assert tree.nodes == pickle.loads(pickle.dumps(tree)).nodes
        for node in range(len(tree.nodes)):
            assert tree.nodes[node].sampled == (node in spoken)
            path = tree.token_ids(node)
            for one in tree.path(node):
                if one in spoken:
                    begin = tree.length(one) - len(spoken[one])
                    assert path[begin : tree.length(one)] == spoken[one]
    assert continued > 500


# --- renderers --------------------------------------------------------------------------------------------------------


def test_the_token_renderer_reads_tool_calls():
    renderer, encode = TokenRenderer(Characters()), Characters().encode
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"x"</tool_call><tool_call>{'
    message = assistant_message(renderer.parse_response([*encode(text), 1]))
    assert message["content"] == 'so {"x"{'
    assert [one["function"] for one in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert [one["status"] for one in message["invalid_tool_calls"]] == ["invalid_json", "unclosed_block"]
    said = {"role": "assistant", "content": "so ", "tool_calls": message["tool_calls"]}
    rendered = renderer.render([said]).token_ids
    assert Characters().decode(rendered) == f"<|assistant|>{text[: text.index('</tool_call>')]}</tool_call><end>"


def test_remembered_tokens_are_the_tokenizers():
    """Short texts are encoded once; what is rendered is what the package renders without that, also after pickling."""
    from renderers import create_renderer
    from renderers.configs import Qwen3RendererConfig

    tokenizer, texts = merging_tokenizer(), []
    plain = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    ours = load_renderer(tokenizer, "qwen3", thinking_retention="all")

    class Seen(type(tokenizer)):
        def _encode_plus(self, text, *args, **options):
            texts.append(text)
            return super()._encode_plus(text, *args, **options)

    seen = Seen(tokenizer_object=tokenizer._tokenizer, eos_token="<|im_end|>")
    seen = load_renderer(seen, "qwen3", thinking_retention="all")
    said = [*tokenizer.encode("the answer"), tokenizer.eos_token_id]
    for number in range(3):
        messages = [user(f"the {number}" * 40), {"role": "tool", "content": "the"}]
        expected = plain.render(messages, tools=TOOLS, add_generation_prompt=True).token_ids
        behind = plain.bridge_to_next_turn(expected, said, messages).token_ids
        for one in (ours, pickle.loads(pickle.dumps(ours)), seen):
            assert one.render(messages, tools=TOOLS, add_generation_prompt=True).token_ids == expected
            assert one.bridge_to_next_turn(expected, said, messages).token_ids == behind
    short = [text for text in texts if len(text) < 20]
    assert "assistant\n" in short and len(short) == len(set(short)) + short.count("a") - 1 <= 12


def test_the_package_renders_a_qwen_conversation():
    """The hand-written renderers need a tokenizer with the format's special tokens, and no file from the hub."""
    tokenizer = merging_tokenizer()
    renderer, tree = load_renderer(tokenizer, "qwen3"), Trajectory()
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 3}}\n</tool_call><|im_end|>'
    # Token by token: not the spelling that the tokenizer would choose.
    words = [token for character in ("1", "2") for token in tokenizer.encode(character)]
    head, _, tail = said.partition("12")
    token_ids = [*tokenizer.encode(head), *words, *tokenizer.encode(tail)]
    assert token_ids != tokenizer.encode(said) and tokenizer.decode(token_ids) == said
    prompt, _, answer = turn(tree, renderer, [user("12 and 3?")], token_ids, TOOLS)
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 12, "b": 3}
    result = {"role": "tool", "content": "15", "tool_call_id": "call_0"}
    following, _, _ = turn(tree, renderer, [user("12 and 3?"), answer, result], [5, 258], TOOLS)
    assert following[: len(prompt) + len(token_ids)] == prompt + token_ids
    assert tokenizer.decode(following).endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("name", "keep"), [("qwen3", "loop.last"), ("default", "loop.last"), ("default", "false")])
def test_reasoning_that_the_format_removes_from_the_history_is_a_new_root(name, keep):
    tokenizer = merging_tokenizer(keep)
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    renderer, tree, counters = load_renderer(tokenizer, name), Trajectory(), {}
    _, _, answer = turn(tree, renderer, [user("a")], tokenizer.encode("<think>hm</think>yes<|im_end|>"))
    following, _, _ = turn(tree, renderer, [user("a"), answer, user("b")], [1], counters=counters)
    assert counters == {"rerenders": 1} and len(tree.children(None)) == 2
    assert "hm" not in tokenizer.decode(following) and "yes" in tokenizer.decode(following)


def test_a_chat_template_continues_other_spellings():
    """ "abc" in three tokens, which a second rendering would make one of."""
    tokenizer = merging_tokenizer()
    renderer, tree, counters = load_renderer(tokenizer, "default", tool_parser="qwen3"), Trajectory(), {}
    spelled = [token for character in "abc" for token in tokenizer.encode(character)]
    token_ids = [*spelled, *tokenizer.encode("<|im_end|>")]
    prompt, _, answer = turn(tree, renderer, [user("the")], token_ids, TOOLS, counters)
    messages = [user("the"), answer, user("123")]
    following, _, _ = turn(tree, renderer, messages, [1], TOOLS, counters)
    assert following[: len(prompt) + 4] == prompt + token_ids and counters == {}
    # The rest is what the template writes.
    canonical = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(following) == canonical


def test_renderers_that_do_not_fit(caplog):
    with pytest.raises(ValueError, match="does not fit"):
        load_renderer(merging_tokenizer(), "llama-3")
    with pytest.raises(ValueError, match="qwen9"):
        load_renderer(merging_tokenizer(), "qwen9")
    with pytest.raises(ValueError, match="chat template"):
        load_renderer(Characters(), "default")
    with pytest.raises(ValueError, match="eos_token_id"):
        TokenRenderer(object())
    with caplog.at_level(logging.WARNING):
        load_renderer(merging_tokenizer())
    assert "no renderer is known" in caplog.text


# --- proof ------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_not_the_path_is_an_error():
    tree = Trajectory()
    node = tree.give(tree.give(None, Characters().encode("hello ")), Characters().encode("world"))
    check_prompt(tree, node, Characters().encode("hello world"), "s1")
    with pytest.raises(
        PromptMismatchError, match=r"session s1: .* position 7: .*'hello wurld'.*'hello world'"
    ) as raised:
        check_prompt(tree, node, Characters().encode("hello wurld"), "s1", Characters().decode)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.session, again.position, str(again)) == ("s1", 7, str(raised.value))
    with pytest.raises(PromptMismatchError, match="10 tokens differs from the tree's 11 tokens at position 10"):
        check_prompt(tree, node, Characters().encode("hello worl"), "s1", Characters().decode)
