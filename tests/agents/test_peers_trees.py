"""Cases of other libraries' tests of trees, sessions and advantages, written anew as data: what a client sends and what
the engine returns, and the rows that come of it.

Sources: slime ``tests/test_agent/test_trajectory_manager_branching.py`` (35 cases), miles
``tests/fast/router/test_tree_trajectory.py`` (20), ``test_linear_trajectory.py`` (45) and
``tests/fast/rollout/session/test_samples.py`` (34), verl
``tests/trainer/test_multi_trajectories_advantage_on_cpu.py`` (2).

A session is a list of turns: messages, the prompt's tokens, and what was sampled, each a string of words; one word is
one token. ``>`` begins a reply and ``.`` ends it, so that a reply is sent back as it was sampled. In a row, tokens in
brackets are trained.

What differs on purpose (`DIFFERS` has the rows of both):

- slime 2.4, 4.6: a prompt that changes the last reply masks this reply. Here it stays trained behind what the engine
  saw, and the prompt begins a new root: no sampled token is dropped.
- slime 3.1, 3.5: a short reply that the client has rewritten is no longer trained. Here both branches are.
- slime 4.5: a turn without log-probabilities is trained with zeros. Here it is an error: the ratio would be wrong. An
  empty prompt (4.3) is not skipped, but an error.
- miles, a stop token that the next prompt lacks (three cases): it is cut off the sampled reply, within a limit. Here
  the prompt begins a new root; renderers that extend prompts keep the token.
- miles, a prompt that does not extend the last one, and a rollback of more than one reply: errors. Here, branches.
- miles attaches to whole turns, so a request that repeats a prompt is a new root; here it continues the given node,
  whose tokens are the same.

Not applicable: slime 1.9, 2.12, 4.4 (its store of sessions), miles' registry, roles of its templates (the renderer's),
node limit (the gateway's), expert routing and cache statistics of its samples.
"""

import math

import pytest
import torch

from workers.algorithms.estimators import AdvantageRows
from workers.data.collate import collate
from workers.rollout.agents.rows import drop_retries, rows
from workers.rollout.agents.trajectory import Trajectory
from workers.rollout.engines.rollout_engine import Completion
from workers.train.args import read_args
from workers.train.args_checks import function_of

WORDS = {}


def ids(text):
    return [WORDS.setdefault(word, len(WORDS)) for word in text.split()]


def play(turns):
    """The tree of a session: each prompt continues the deepest node for its messages whose tokens it extends."""
    tree = Trajectory()
    for number, (messages, prompt, reply, *finish) in enumerate(turns):
        said, tokens, sampled = messages.split(), ids(prompt), ids(reply)
        at, known = tree.find(said)
        if at is None or tokens[: tree.length(at)] != tree.token_ids(at):
            at, known = None, 0
        behind = tokens[0 if at is None else tree.length(at) :]
        at = tree.give(at, behind, said[known:]) if behind else at
        log_probs = [-(number + 1) / 10] * len(sampled)
        tree.sample(at, Completion(sampled, log_probs, *finish or ["stop"], [number] * len(sampled)), reply.split()[:1])
    return tree


def shown(row):
    names = {number: word for word, number in WORDS.items()}
    of = row.completion
    marked = [
        f"[{names[token]}]" if mask else names[token] for token, mask in zip(of.token_ids, of.loss_mask, strict=True)
    ]
    return " ".join([*(names[token] for token in row.prompt), *marked])


CALL = ("S u", "S u >", "call .")


def replies(first, last, changed=None):
    """Turns with the replies a1, a2, ... and the results t1, t2, ... behind them, from a number to another one.
    ``changed``: number -> (a part of this turn's prompt, what the prompt has instead of it)."""
    messages, prompt, turns = "S u", "S u >", []
    for number in range(first, last + 1):
        turns.append((messages, prompt.replace(*(changed or {}).get(number, ("", ""))), f"a{number} ."))
        messages += f" a{number} t{number}"
        prompt += f" a{number} . t{number} >"
    return turns


SAME = {
    "slime 1.1, 2.1, miles single record": ([("S u", "S u >", "a .")], ["S u > [a] [.]"]),
    "slime 1.2, 2.2, miles two turns": (
        [CALL, ("S u call 4", "S u > call . 4 >", "done .")],
        ["S u > [call] [.] 4 > [done] [.]"],
    ),
    "slime 1.3 another system message": (
        [("SA u", "SA u >", "a ."), ("SB u", "SB u >", "a .")],
        ["SA u > [a] [.]", "SB u > [a] [.]"],
    ),
    "slime 1.4, 2.9 another user message": (
        [("S A", "S A >", "a ."), ("S B", "S B >", "b .")],
        ["S A > [a] [.]", "S B > [b] [.]"],
    ),
    "slime 1.5 sampled twice": (
        [("S u", "S u >", "a1 ."), ("S u", "S u >", "a2 .")],
        ["S u > [a1] [.]", "S u > [a2] [.]"],
    ),
    "slime 1.6, 2.10 two results of a tool": (
        [CALL, ("S u call x", "S u > call . x >", "ax ."), ("S u call y", "S u > call . y >", "ay .")],
        ["S u > [call] [.] x > [ax] [.]", "S u > call . y > [ay] [.]"],
    ),
    "slime 1.7 the same messages in other tokens": (
        [("S u", "S u >", "a ."), ("S u", "S ! u >", "b .")],
        ["S u > [a] [.]", "S ! u > [b] [.]"],
    ),
    "slime 1.8 two tools in a turn": (
        [CALL, ("S u call A B", "S u > call . A B >", "done .")],
        ["S u > [call] [.] A B > [done] [.]"],
    ),
    "slime 1.10 nothing sampled": ([("S u", "S u >", "", "abort")], []),
    "slime 2.3, 2.8 other tokens in the prompt": (
        [CALL, ("S u call t", "S u ! > call . t >", "done .")],
        ["S u > [call] [.]", "S u ! > call . t > [done] [.]"],
    ),
    "slime 2.5, 2.6, miles reasoning that the next prompt lacks": (
        [CALL, ("S u call t", "S u > call ! t >", "done .")],
        ["S u > [call] [.]", "S u > call ! t > [done] [.]"],
    ),
    "slime 2.7 other tokens in an earlier reply": (
        replies(1, 3, {3: ("a1 .", "a1 !")}),
        ["S u > [a1] [.] t1 > [a2] [.]", "S u > a1 ! t1 > a2 . t2 > [a3] [.]"],
    ),
    "slime 2.11, miles a reply that was not sampled here": (
        [*replies(1, 2), ("S u a1 t1 a2 foreign t2", "S u > a1 . t1 > a2 . > foreign . t2 >", "a3 .")],
        ["S u > [a1] [.] t1 > [a2] [.] > foreign . t2 > [a3] [.]"],
    ),
    "slime 3.2, 3.3 a reply that the client has rewritten": (
        [("S u", "S u >", "ok ."), ("S u ok2 t", "S u > ok2 . t >", "done .")],
        ["S u > [ok] [.]", "S u > ok2 . t > [done] [.]"],
    ),
    "slime 3.4 a reply that neither branch has": (
        [("S u", "S u >", "a ."), ("S u", "S u >", "b ."), ("S u c t", "S u > c . t >", "d .")],
        ["S u > [a] [.]", "S u > [b] [.]", "S u > c . t > [d] [.]"],
    ),
    "slime 3.6 a branch and other tokens": (
        [
            CALL,
            ("S u call x", "S u > call . x >", "ax2 ."),
            ("S u call x ax2 xx", "S u ! > call . x > ax2 . xx >", "ax3 ."),
            ("S u call y", "S u > call . y >", "ay2 ."),
        ],
        ["S u > [call] [.] x > [ax2] [.]", "S u ! > call . x > ax2 . xx > [ax3] [.]", "S u > call . y > [ay2] [.]"],
    ),
    "slime 3.7 three branches behind two turns": (
        [*replies(1, 2), *((f"S u a1 t1 a2 {of}", f"S u > a1 . t1 > a2 . {of} >", f"end-{of} .") for of in "pqr")],
        [
            "S u > [a1] [.] t1 > [a2] [.] p > [end-p] [.]",
            "S u > a1 . t1 > a2 . q > [end-q] [.]",
            "S u > a1 . t1 > a2 . r > [end-r] [.]",
        ],
    ),
    "slime 3.8 a long session": (
        replies(0, 5, {3: ("t2", "t2 !"), 5: ("u", "u !")}),
        [
            "S u > [a0] [.] t0 > [a1] [.] t1 > [a2] [.] t2 ! > [a3] [.]",
            "S u > a0 . t0 > a1 . t1 > a2 . t2 > a3 . t3 > [a4] [.]",
            "S u ! > a0 . t0 > a1 . t1 > a2 . t2 > a3 . t3 > a4 . t4 > [a5] [.]",
        ],
    ),
    "miles three turns, no trailing token": (
        [("u", "p q", "a"), ("u a t", "p q a t", "b"), ("u a t b t2", "p q a t b t2", "c")],
        ["p q [a] t [b] t2 [c]"],
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_rows_are_the_peers(case):
    turns, expected = SAME[case]
    assert [shown(row) for row in rows(play(turns))] == expected


DIFFERS = {
    "slime 2.4, 4.6 other tokens in the last reply": (
        [CALL, ("S u call t", "S u > call ! t >", "done .")],
        ["S u > call ! t > [done] [.]"],
        ["S u > [call] [.]", "S u > call ! t > [done] [.]"],
    ),
    "slime 3.1, 3.5 a short reply that the client has rewritten": (
        [
            ("S u", "S u >", "ok ."),
            ("S u ok5 t1", "S u > ok5 . t1 >", "second ."),
            ("S u ok5 t1 second t2", "S u > ok5 . t1 > second . t2 >", "third ."),
        ],
        ["S u > ok5 . t1 > [second] [.] t2 > [third] [.]"],
        ["S u > [ok] [.]", "S u > ok5 . t1 > [second] [.] t2 > [third] [.]"],
    ),
    "miles a stop token that the next prompt lacks": (
        [("u", "p >", "a stop"), ("u a t", "p > a t >", "b stop")],
        ["p > [a] t > [b] [stop]"],
        ["p > [a] [stop]", "p > a t > [b] [stop]"],
    ),
}


@pytest.mark.parametrize("case", DIFFERS)
def test_rows_that_differ_train_every_sampled_token(case):
    turns, theirs, ours = DIFFERS[case]
    found = [shown(row) for row in rows(play(turns))]
    assert found == ours != theirs
    trained = [word for row in found for word in row.split() if word.startswith("[")]
    assert trained == [f"[{word}]" for _, _, reply in turns for word in reply.split()]


RETRIES = {
    "miles another result of the tool, then on": (
        [CALL, ("S u call t", "S u > call . t >", "x ."), ("S u call t'", "S u > call . t' >", "final .")],
        ["S u > [call] [.] t' > [final] [.]"],
    ),
    "miles another message instead of the result": (
        [CALL, ("S u call t", "S u > call . t >", "x ."), ("S u call S2", "S u > call . S2 >", "y .")],
        ["S u > [call] [.] S2 > [y] [.]"],
    ),
    "miles the first turn again": ([("u", "u >", "a ."), ("u", "u >", "b .")], ["u > [b] [.]"]),
    "miles cut off at the length, then again and on": (
        [
            CALL,
            ("S u call t", "S u > call . t >", "x y", "length"),
            ("S u call t", "S u > call . t >", "z ."),
            ("S u call t z v", "S u > call . t > z . v >", "w ."),
        ],
        ["S u > [call] [.] t > [z] [.] v > [w] [.]"],
    ),
    "miles a reply behind injected ones, again": (
        [
            CALL,
            ("S u call i1 i2 f", "S u > call . > i1 . > i2 . f >", "x ."),
            ("S u call i1 i2 f", "S u > call . > i1 . > i2 . f >", "y ."),
        ],
        ["S u > [call] [.] > i1 . > i2 . f > [y] [.]"],
    ),
    "miles another root is no retry": ([CALL, ("task", "task >", "a .")], ["S u > [call] [.]", "task > [a] [.]"]),
}


@pytest.mark.parametrize("case", RETRIES)
def test_retries_leave_the_peers_rows(case):
    turns, expected = RETRIES[case]
    assert [shown(row) for row in rows(play(turns), drop_retries)] == expected


def test_log_probs_versions_and_finish_reasons():
    """slime 2.2 and 2.10, miles' two turns: 0 at what was given, and at what another row trains; the leaf's end."""
    first, second = rows(
        play([*SAME["slime 1.6, 2.10 two results of a tool"][0][:2], ("S u call y", "S u > call . y >", "a", "length")])
    )
    assert first.completion.log_probs == [-0.1, -0.1, 0.0, 0.0, -0.2, -0.2] and first.completion.finish_reason == "stop"
    assert second.completion.log_probs == [0.0] * 4 + [-0.3] and second.completion.weight_versions == [-1] * 4 + [2]
    assert second.completion.finish_reason == "length"


def test_bad_turns_are_errors():
    """slime 4.2, and what it accepts: 4.3 no prompt, 4.5 no log-probabilities."""
    tree = Trajectory()
    node = tree.give(None, [1])
    for log_probs in ([-0.1, -0.2], []):
        with pytest.raises(ValueError, match="one log-probability and version per token"):
            tree.sample(node, Completion([1, 2, 3], log_probs, "stop"))
    with pytest.raises(ValueError, match="at least one token"):
        tree.give(None, [])


# --- where a conversation continues ----------------------------------------------------------------------------

LINEAR = [("S U1", "S U1", "A1"), ("S U1 A1 T1", "S U1 A1 T1", "A2"), ("S U1 A1 T1 A2 T2", "S U1 A1 T1 A2 T2", "A3")]
"""Nodes 0 to 5: S U1 | A1 | T1 | A2 | T2 | A3."""


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("S U1 A1 T1 A2 T2 A3 next", (5, 7)),  # a strict extension
        ("S U1 A1 T1 A2 T2 A3", (5, 7)),  # all of it again
        ("S U1 A1 T1 A2 T2'", (3, 5)),  # another second result
        ("S U1 A1 T1'", (1, 3)),  # another first result
        ("S other", (None, 0)),  # another question
        ("subagent task", (None, 0)),
        ("", (None, 0)),
        ("S U1", (0, 2)),  # miles: a new root, with the same tokens
        ("S U1 A1 T1 A2' go", (2, 4)),  # a rewritten reply; miles: at A1, with the same tokens
    ],
)
def test_find_is_where_miles_attaches(messages, expected):
    tree = play(LINEAR)
    before = len(tree.nodes)
    assert tree.find(messages.split()) == expected and len(tree.nodes) == before == 6


def test_find_takes_the_newest_of_twins_and_the_deepest_of_roots():
    tree = play([*LINEAR[:2], ("S U1 A1 T1", "S U1 A1 T1", "A2")])
    twins = [number for number, node in enumerate(tree.nodes) if node.messages == ("A2",)]
    assert len(twins) == 2 and tree.find(["S", "U1", "A1", "T1", "A2", "next"]) == (twins[1], 5)
    tree.sample(tree.give(None, ids("S U1 other"), ("S", "U1", "other")), Completion([], [], "abort"))
    assert tree.find(["S", "U1", "A1", "T1", "A2", "T2"]) == (twins[1], 5)


def test_deep_trees_and_copies():
    """Beyond Python's limit of recursion; and a tree keeps its own tokens."""
    tree, at = Trajectory(), None
    for _ in range(3000):
        at = tree.give(at, [1], ("U",))
    assert tree.find(["U"] * 3000) == (at, 3000) and tree.length(at) == 3000
    tokens = [7, 8]
    node = tree.give(None, tokens)
    tokens.append(9)
    assert tree.token_ids(node) == [7, 8]


def test_leaves_are_in_the_order_of_their_creation():
    tree = play([*LINEAR, ("S U1 A1 T1", "S U1 A1 T1", "retry")])
    assert [tree.token_ids(leaf)[-1] for leaf in tree.leaves()] == ids("A3 retry")


# --- verl: the advantage of a session is that of its last trajectory, for all of them ---------------------------


@pytest.mark.parametrize(
    ("shapes", "scores"),
    [
        ([1] * 6, [100, 10, 400, 300, 22, 38]),
        ([2, 2, 1, 1], [10, 300, 22, 38]),  # the sums of the last trajectories' rewards
    ],
)
def test_verl_multi_trajectory_advantage(shapes, scores):
    masks = [[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0]]
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    data = {
        "input_ids": torch.zeros(6, 4, dtype=torch.int64),
        "loss_mask": torch.tensor(masks),
        "group_ids": torch.zeros(6, dtype=torch.int64),
        "rewards": torch.tensor(
            [score for score, count in zip(scores, shapes, strict=True) for _ in range(count)]
        ).float(),
        "rollout_ids": torch.tensor([k for k, count in enumerate(shapes) for _ in range(count)]),
    }
    args = read_args({})
    found = function_of(args, "advantage_estimator")(AdvantageRows(data), args)[:, None] * data["loss_mask"]
    of_rows = [(score - mean) / (std + 1e-6) for score, count in zip(scores, shapes, strict=True) for _ in range(count)]
    torch.testing.assert_close(found, torch.tensor(of_rows)[:, None] * torch.tensor(masks))


def test_reward_is_in_full_in_every_row():
    """slime 2.8, 2.9."""
    made = rows(play(SAME["slime 2.3, 2.8 other tokens in the prompt"][0]))
    data = collate([ids("S u")], [Completion([], [], "stop", rows=made)], rewards=[1.0])
    assert data["rewards"].tolist() == [1.0, 1.0]
