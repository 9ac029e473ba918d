"""The task `calculator` of `train_grpo.py`: a model learns to call a tool, and to answer with what it returns.

The policy sees ``3*7=``. In its first turn it should write ``C*;``: the calculator, which has the two numbers, returns
``21``. In its second turn it should write ``21;``. It begins with random weights, and knows neither.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from workers import Action, SessionLimits, Step, TokenRenderer, ToolEnvironment
from workers.rollout.agents.environment import Observation
from workers.rollout.agents.rendering import Parsed, ParsedCall, Rendered

ALPHABET = "0123456789+*=C;?"
END = ALPHABET.index(";")


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ALPHABET.index(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(ALPHABET[token] for token in token_ids)


class CalculatorFormat(TokenRenderer):
    """Messages of the roles user and tool are their text, and ``C`` before an operator is a tool call."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(encode=encode, decode=decode), END)

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        return Rendered([token for message in messages for token in encode(message["content"])])

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> Parsed:
        text = decode(token_ids).removesuffix(";")
        if not text.startswith("C"):
            return Parsed(text)
        return Parsed("", None, [ParsedCall(text, "calculate", {"operator": text[1:]})])


class Calculator(ToolEnvironment):
    """Half of the reward is for the call, and half for the answer: each is the share of its characters that are right,
    so that a model with random weights can begin to learn."""

    functions = ("calculate",)
    limits = SessionLimits(turns=2)

    def calculate(self, operator: str) -> str:
        """Add or multiply the two numbers of the problem.

        Args:
            operator: + or *; the result of anything else is ??.
        """
        left, right = self.numbers
        return {"+": f"{left + right:02}", "*": f"{left * right:02}"}.get(operator, "??")

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        left, self.operator, right = row["expression"]
        self.numbers, self.called = (int(left), int(right)), False
        return None

    async def step(self, action: Action) -> Step:
        said = decode(action.token_ids)
        if self.called:
            return Step(reward=share(said, f"{self.calculate(self.operator)};") / 2, done=True)
        self.called = True
        result = await super().step(action)
        call = f"C{self.operator};"
        return Step(result.observation, share(said, call) / 2, invalid=said != call)

    def state_dict(self) -> Any:
        return {"operator": self.operator, "numbers": self.numbers, "called": self.called}

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


def share(said: str, expected: str) -> float:
    """The share of the characters that are right."""
    return sum(a == b for a, b in zip(said, expected, strict=False)) / max(len(said), len(expected))
