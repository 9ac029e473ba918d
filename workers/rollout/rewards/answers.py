"""Ready rewards for tasks whose answer is known: 1.0 for the right one, 0.0 for any other. They are functions of texts;
`text_reward` makes reward functions of them, and `functools.partial` sets their options.

They are plain functions: `RolloutManager` calls them one after the other in the driver, unless there are
``reward_workers``, which are processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from workers.rollout.rewards.math_process import equal_mathematics

_BOXED = re.compile(r"\\f?boxed\s*(?=\{)")
_DIGITS = 300
"""A number with more digits, or a larger exponent, is none: it could not be compared in reasonable time."""

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}])[+-])?(?:[$€£]\s?)?(?:"
    rf"(?:(?<![\w.])(?P<mixed>\d+)[ \t]*)?"
    rf"\\[dt]?frac\s*\{{\s*(?P<minus>-?)\s*(?P<above>{_UNSIGNED})\s*\}}\s*\{{\s*(?P<below>{_UNSIGNED})\s*\}}|"
    rf"(?<![\w./])(?:(?P<whole>\d+)[ \t]+)?(?P<top>\d+)\s?/\s?(?P<bottom>\d+)(?!\s?/|\d|\.\d)|"
    rf"(?<![\w.])(?P<plain>{_UNSIGNED})(?!\d))(?:\s?(?P<percent>%))?"
)


def exact_match(completion: str, label: Any, *, ignore_case: bool = False) -> float:
    """Whether the completion is the label, apart from white space: at the ends it is removed, and in between any is one
    space.

    Args:
        completion: what was generated.
        label: the answer, or a list of right ones. Numbers are compared as they are written.
        ignore_case: compare without upper and lower case.

    Raises:
        ValueError: a label is None, or there is none.
    """

    def plain(text: Any) -> str:
        words = " ".join(str(text).split())
        return words.casefold() if ignore_case else words

    labels = _labels(label)
    if any(one is None for one in labels):
        raise ValueError(f"the label {label!r:.60} is no text")
    return float(plain(completion) in map(plain, labels))


def number_match(completion: str, label: Any, *, tolerance: float = 0.0) -> float:
    """Whether the completion's answer is the number of the label.

    The answer is the last number in the last ``\\boxed{...}``, or without one after the last ``####``, or without that
    in the whole completion. Numbers are integers and decimals, with thousands separators (1,234.5) and exponents (1e3),
    fractions (3/4, 1 1/2, ``\\frac{3}{4}``), amounts ($5) and percentages: 50% is both 50 and 0.5, but compared with
    another percentage only 50. Comparisons are exact: 0.1 is 1/10.

    Args:
        completion: what was generated.
        label: a number, a text whose answer is one (such as ``"... #### 72"``), or a list of right ones.
        tolerance: t, with which x is right for the label y if |x - y| <= t * max(1, |y|).

    Raises:
        ValueError: a label has no number, or there is none.
    """
    found = _number(_answer(completion)) or ()
    for one in _labels(label):
        expected = _number(_answer(str(one)))
        if expected is None:
            raise ValueError(f"the label {str(one)!r:.80} has no number")
        alike = len(found) == len(expected)  # both percentages, or neither: 0.5% is not 50%
        for x in found[:1] if alike else found:
            for y in expected[:1] if alike else expected:
                if abs(x - y) <= Fraction(tolerance) * max(Fraction(1), abs(y)):
                    return 1.0
    return 0.0


def math_match(completion: str, label: Any, *, timeout: float = 5.0) -> float:
    """Whether the completion's answer equals the label as mathematics: ``x^2 - 1`` is ``(x-1)(x+1)``. By
    math-verify (https://github.com/huggingface/Math-Verify), which takes the last ``\\boxed{...}``, formula or number.

    It runs in a process of its own, which is started at the first call, and ended when a comparison takes too long or
    too much memory. That is 0.0, as is an answer that cannot be read.

    Args:
        completion: what was generated.
        label: the answer in LaTeX, or a list of right ones.
        timeout: seconds that a comparison may take.

    Raises:
        ValueError: a label is None or empty, or there is none; or ``timeout`` is not above 0, or above 1e9.
        ImportError: ``single-controller[math]`` is not installed.
    """
    labels = _labels(label)
    if any(one is None or not str(one).strip() for one in labels):
        raise ValueError(f"the label {label!r:.60} is no answer")
    return float(any(equal_mathematics(completion, str(one), timeout) for one in labels))


def soft_overlong(completion_ids: Sequence[int], *, max_length: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13): 0 up to ``max_length - buffer``
    tokens, from there linearly down to -1 at ``max_length``, and -1 above. It is to be added to another reward:
    ``{"right": number_match(...), "length": soft_overlong(...)}``. The argument ``overlong_buffer_len`` of a training
    run adds the same in training.

    Args:
        completion_ids: tokens of the completion.
        max_length: of a completion, in tokens.
        buffer: the last tokens before it, in which the penalty grows; at least 1.
    """
    return min(0.0, max(-1.0, (max_length - buffer - len(completion_ids)) / buffer))


def _labels(label: Any) -> list[Any]:
    labels = list(label) if isinstance(label, (list, tuple)) else [label]
    if not labels:
        raise ValueError(f"the label {label!r} has no answer")
    return labels


def _answer(text: str) -> str:
    """Return the part of a text that has the answer."""
    if boxes := list(_BOXED.finditer(text)):
        return _in_braces(text, boxes[-1].end())
    return text.rpartition("####")[2]


def _in_braces(text: str, begin: int) -> str:
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin + 1 : place]
    return ""  # the completion was cut off, perhaps in the middle of a number


def _number(text: str) -> tuple[Fraction, ...] | None:
    """Return the values that the last number in a text may have; None if there is none."""
    text = text.replace("\\%", "%").replace("\\$", "$").replace("{,}", ",").replace("\\,", "").replace("\u2212", "-")
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    parts = found[-1].groupdict()
    above, below = parts["above"] or parts["top"] or parts["plain"], parts["below"] or parts["bottom"] or "1"
    whole, top, bottom = (_exact(one) for one in (parts["whole"] or parts["mixed"] or "0", above, below))
    if whole is None or top is None or not bottom:
        return None
    value = top / bottom
    if value < 1:  # or it is no mixed number, and the integer before it no part of it
        value += whole
    if (parts["sign"] == "-") != (parts["minus"] == "-"):
        value = -value
    return (value, value / 100) if parts["percent"] else (value,)


def _exact(text: str) -> Fraction | None:
    digits, _, exponent = text.replace(",", "").lower().partition("e")
    if len(digits) > _DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > _DIGITS:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)
