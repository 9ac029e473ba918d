"""Trajectory: the tokens of one session, as an append-only tree. Pure: it imports neither torch nor Ray.

A path from the root to a node is one sequence of tokens, exactly as the engine saw and produced it: prompts and tool
results are rendered once and then kept, and sampled tokens are never rendered again. A retry, a subagent, or a history
that the client has edited is a branch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.rollout.engines.rollout_engine import Completion, FinishReason, RoutedExperts, SamplingMask


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens that follow those of the parent. A node is *sampled* if an engine generated it in one completion, and
    *given* otherwise.

    Attributes:
        parent: index of the parent; None for a root.
        token_ids: at least one, except for a completion that was aborted before its first token.
        messages: a digest of each message that these tokens stand for; see `Trajectory.find`.
        finish_reason: why the completion ended; None for a given node.
        log_probs, weight_versions: of each sampled token, as in `Completion`; empty for a given node.
        sampling_mask, fingerprints: as in `Completion`.
        routed_experts: of the last tokens of the path to this node: those that no sampled node before it has. The last
            token of a completion is computed with what follows it.
    """

    parent: int | None
    token_ids: array[int]
    messages: tuple[str, ...] = ()
    finish_reason: FinishReason | None = None
    log_probs: Sequence[float] = ()
    weight_versions: Sequence[int | None] = ()
    sampling_mask: SamplingMask | None = None
    fingerprints: Mapping[int, int] | None = None
    routed_experts: RoutedExperts | None = None

    @property
    def sampled(self) -> bool:
        return self.finish_reason is not None


class Trajectory:
    """An append-only tree, or several, of `Node`. Nodes are named by their index in ``nodes``; a parent's index is
    smaller than its children's.

    It can be pickled and copied at any time between two calls. Not thread-safe.
    """

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes: list[Node] = []
        self._children: dict[int | None, tuple[int, ...]] = {None: ()}
        """Tuples, which the garbage collector leaves alone: there are thousands of trees."""
        self._lengths: list[int] = []
        for node in nodes:
            self._add(node)

    def __reduce__(self) -> tuple[type[Trajectory], tuple[list[Node]]]:
        return type(self), (self.nodes,)

    def _add(self, node: Node) -> int:
        number = len(self.nodes)
        if node.parent is not None and not 0 <= node.parent < number:
            raise IndexError(f"there is no node {node.parent}; the trajectory has {number}")
        self.nodes.append(node)
        self._lengths.append(len(node.token_ids) + (0 if node.parent is None else self._lengths[node.parent]))
        self._children[number] = ()
        self._children[node.parent] += (number,)
        return number

    def give(self, parent: int | None, token_ids: Sequence[int], messages: Sequence[str] = ()) -> int:
        """Append tokens that no engine sampled, and return the new node. If ``parent`` has the same child already, that
        is returned: a retry of a request adds nothing.

        Args:
            parent: the node that they follow; None for a root.
            token_ids: at least one.
            messages: digests of the messages that were rendered.

        Raises:
            IndexError: there is no such parent.
            ValueError: there are no tokens.
        """
        given = array("i", token_ids)
        if not given:
            raise ValueError("a given node needs at least one token")
        for child in self.children(parent):
            node = self.nodes[child]
            if not node.sampled and node.token_ids == given and node.messages == tuple(messages):
                return child
        return self._add(Node(parent, given, tuple(messages)))

    def sample(self, parent: int, completion: Completion, messages: Sequence[str] = ()) -> int:
        """Append what an engine generated, and return the new node.

        Args:
            parent: the node whose path was the engine's prompt.
            completion: without a ``loss_mask``: it has sampled tokens only.
            messages: digest of the message that was parsed from it.

        Raises:
            IndexError: there is no such parent.
            ValueError: the completion has not one log-probability and version per token, or has a loss mask, or experts
                of another number of tokens than the path's and its own.
        """
        count = len(completion.token_ids)
        versions = completion.weight_versions or [None] * count
        if completion.loss_mask is not None or not count == len(completion.log_probs) == len(versions):
            raise ValueError("a sampled node needs one log-probability and version per token, and no loss_mask")
        experts = completion.routed_experts
        if experts is not None:
            if len(experts) != self.length(parent) + count:
                raise ValueError(
                    f"a sampled node needs the experts of all {self.length(parent) + count} tokens of its path, and "
                    f"got those of {len(experts)}"
                )
            experts = experts.of_tokens(self._computed(parent))
        return self._add(
            Node(
                parent,
                array("i", completion.token_ids),
                tuple(messages),
                completion.finish_reason,
                tuple(completion.log_probs),
                tuple(versions),
                completion.sampling_mask,
                completion.fingerprints,
                experts,
            )
        )

    def drop(self) -> None:
        """Remove the newest node, of which nobody has been told."""
        node, number = self.nodes.pop(), len(self._lengths) - 1
        self._lengths.pop()
        del self._children[number]
        self._children[node.parent] = self._children[node.parent][:-1]

    def _computed(self, node: int | None) -> int:
        """Of how many tokens of the path to a node the experts are known."""
        while node is not None and self.nodes[node].routed_experts is None:
            node = self.nodes[node].parent
        # The engine has computed no experts for the last token of a node, because it generated nothing after it.
        return 0 if node is None else self._lengths[node] - 1

    def children(self, node: int | None) -> Sequence[int]:
        """The children of a node, oldest first; the roots for None."""
        if node not in self._children:
            raise IndexError(f"there is no node {node}; the trajectory has {len(self.nodes)}")
        return self._children[node]

    def leaves(self) -> list[int]:
        """The nodes without children, oldest first."""
        return [number for number in range(len(self.nodes)) if not self._children[number]]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        path: list[int] = []
        here: int | None = node
        while here is not None:
            path.append(here)
            here = self.nodes[here].parent
        return path[::-1]

    def token_ids(self, node: int) -> list[int]:
        """The tokens of the path to a node: what an engine gets as its prompt, or what it saw and produced."""
        return self.token_array(node).tolist()

    def token_array(self, node: int) -> array[int]:
        """`token_ids`, without making an object of each."""
        whole = array("i")
        for number in self.path(node):
            whole += self.nodes[number].token_ids
        return whole

    def length(self, node: int) -> int:
        """The number of tokens of the path to a node."""
        return self._lengths[node]

    def find(self, messages: Sequence[str]) -> tuple[int | None, int]:
        """Find where a conversation continues.

        Args:
            messages: a digest of each message of the conversation. That of a sampled message may lack what its own has
                behind a dot, which is the reasoning: not every client returns it.

        Returns:
            The deepest node whose path stands for the first messages, the newest of several, and how many messages that
            is; ``(None, 0)`` if the conversation is new. A completion that was aborted is not continued.
        """
        deepest = (0, -1)  # how many messages, and the node
        stack = [(child, 0) for child in self.children(None)]
        while stack:
            here, begin = stack.pop()
            of = self.nodes[here]
            if not of.messages:
                continue  # a client has sent tokens: no conversation goes through them
            end = begin + len(of.messages)
            given = tuple(messages[begin:end])
            same = of.messages == given or (of.sampled and tuple(one.partition(".")[0] for one in of.messages) == given)
            if same and of.finish_reason != "abort":
                deepest = max(deepest, (end, here))
                stack += [(child, end) for child in self._children[here]]
        count, node = deepest
        return (node, count) if count else (None, 0)
