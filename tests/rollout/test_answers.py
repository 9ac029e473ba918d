"""exact_match, number_match, math_match and soft_overlong: what is right, what is not, and what ends a comparison."""

import functools
import inspect
import os
import random
import signal
import threading
import time
from fractions import Fraction

import pytest
import torch
from waits import wait_until

from workers.algorithms.advantages import overlong_penalty
from workers.rollout.rewards import math_process
from workers.rollout.rewards.answers import exact_match, math_match, number_match, soft_overlong

needs_math = functools.partial(pytest.importorskip, "math_verify", reason="the extra `math` is not installed")


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion, label, right",
    [
        ("Paris", "Paris", True),
        ("  Paris\n", "Paris", True),
        ("New \n York", "New York", True),
        ("paris", "Paris", False),
        ("Paris.", "Paris", False),
        ("", "Paris", False),
        ("4", 4, True),
        ("4.0", 4, False),
        ("b", ["a", "b"], True),
        ("a b", ["a", "b"], False),
    ],
)
def test_exact_match(completion, label, right):
    assert exact_match(completion, label) == float(right)


def test_exact_match_without_case():
    assert exact_match("STRASSE", "straße", ignore_case=True) == 1.0
    assert exact_match("STRASSE", "straße") == 0.0


# --- numbers ----------------------------------------------------------------------------------------------------------


NUMBERS = {
    7: ["7", "The answer is 7.", "It is 7, not 8? No: 7", r"\fbox{x}\boxed {x = {7}}"],
    1234: ["1,234", "1{,}234", r"1\,234"],
    1234567.5: ["1,234,567.5"],
    -3: ["-3", "\u22123", "x=-3"],
    3: ["+3", "10-3", "10 - 3", "- 3 apples"],  # the last one is an item of a list
    Fraction(1, 2): [".5", r"\frac{1.5}{3}", r"\boxed{1} or \boxed{\frac{1}{2}}"],
    Fraction(-1, 2): ["-0.5"],
    Fraction(1, 10): ["0.1"],
    1000: ["1e3"],
    Fraction(1, 40): ["2.5E-2"],
    Fraction(3, 4): ["3/4", r"\frac{3}{4}", r"\dfrac{ 3 }{ 4 }", r"x_1\frac{3}{4}", r"-\frac{-3}{4}"],
    Fraction(-3, 4): ["-3 / 4", r"-\frac{3}{4}", r"\frac{-3}{4}"],
    Fraction(3, 2): ["1 1/2"],
    Fraction(7, 4): [r"1\frac{3}{4}"],
    Fraction(-5, 2): [r"-2 \dfrac{1}{2}"],
    Fraction(-40, 9): ["-4 4/9"],
    Fraction(4, 9): ["0 4/9"],
    Fraction(7, 6): ["11 7/6"],  # no mixed number
    Fraction(5, 6): ["11\n5/6", "11\n\\frac{5}{6}"],
    5: ["$5", "5 apples"],
    Fraction(-2469, 2): ["-$1,234.50"],
    12: [r"\$12", "#### 11\n#### 12 apples"],
    33: ["033"],
    0: ["-0"],
    4: ["12 and 3,4"],  # two numbers, since 3,4 has no group of three digits
    2024: ["5/6/2024"],
    13: [r"so 12 + 1 is \boxed{13}, as 9 said"],
    11: ["5 + 5 = 10\n#### 11"],
    int("1" * 300): ["1" * 300],
}


@pytest.mark.parametrize(("text", "value"), [(text, value) for value, texts in NUMBERS.items() for text in texts])
def test_number_in_a_text(text, value):
    assert number_match(text, value if isinstance(value, int) else str(value)) == 1.0
    assert number_match(text, str(Fraction(value) + 1)) == 0.0


@pytest.mark.parametrize("text", [
    "", "none", "v2", "x_2", "1/0", r"\frac{1}{0}", r"\boxed{}", r"3 \boxed{12", r"3 \boxed{none}", "3 ####",
    "1e999999999", "1" * 301, "½",
])  # fmt: skip
def test_text_without_a_number_is_wrong(text):
    assert number_match(text, 0) == number_match(text, 3) == number_match(text, 2) == 0.0


@pytest.mark.parametrize("text, right", [("50%", [50, 0.5]), (r"12.5\%", [12.5, 0.125]), ("1/2 %", [0.5, 0.005])])
def test_percentage_is_both(text, right):
    assert all(number_match(text, one) for one in right) and not number_match(text, 5)
    assert all(number_match(str(one), text) for one in right)


def test_labels_of_all_kinds():
    assert number_match("so 72", "He sold 48+24 = 72 clips.\n#### 72") == 1.0
    assert number_match("0.30000000000000004", 0.1 + 0.2) == 1.0
    assert number_match("0.3", 0.1 + 0.2) == 0.0
    assert number_match("3", [2, 3]) == 1.0 and number_match("4", [2, 3]) == 0.0
    for label in ("none", None, float("nan"), float("inf"), True, "", [3, "x"]):
        with pytest.raises(ValueError, match="has no number"):
            number_match("4", label)


@pytest.mark.parametrize("match", [exact_match, number_match, math_match])
def test_empty_list_of_labels_is_refused(match):
    with pytest.raises(ValueError, match=r"the label \[\] has no answer"):
        match("4", [])


def test_tolerance_against_its_definition():
    draw = random.Random(0)
    for _ in range(300):
        y = Fraction(draw.randint(-50, 50), draw.choice([1, 10, 100]))
        x = y + Fraction(draw.randint(-300, 300), 10_000)
        tolerance = draw.choice([0, 0.125, 2**-7, 2**-10])
        right = abs(x - y) <= Fraction(tolerance) * max(1, abs(y))
        assert number_match(f"it is {float(x)!r}", float(y), tolerance=tolerance) == right


def test_long_texts_take_no_time():
    texts = ["1" * 200_000, "1 " * 100_000, "1," * 100_000, "1/" * 100_000, "-" * 200_000, "$" * 99_999]
    for text in [*texts, r"\boxed{" * 30_000]:
        began = time.monotonic()
        number_match(text, 5)
        assert time.monotonic() - began < 5


# --- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion, label, right",
    [
        (r"so \boxed{(x-1)(x+1)}", "x^2-1", True),
        (r"so \boxed{(x-1)(x+2)}", "x^2-1", False),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"the answer is $\frac{2}{4}$", r"\frac{1}{2}", True),
        (r"$\frac{2}{4}$", r"$\boxed{\frac{1}{2}}$", True),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", True),
        (r"\boxed{[1, 2)}", "[1,2)", True),
        (r"\boxed{(1, 2)}", "[1,2)", False),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
        ("42", 42, True),
        (r"\boxed{3}", ["4", "3"], True),
        ("I do not know", "4", False),
        ("", "4", False),
        (r"\boxed{", "4", False),
        (r"\boxed{\frac{1}{0}}", "4", False),
        (r"\boxed{4", "4", False),
        ("\ud800 $4$", "4", True),
    ],
)
def test_math_match(completion, label, right):
    needs_math()
    assert math_match(completion, label, timeout=20) == float(right)


def test_comparison_that_does_not_end_is_ended_and_the_next_one_works():
    """In any thread: math-verify's own limits need the main one."""
    needs_math()
    found = []

    def compare():
        began = time.monotonic()
        found.append(math_match(r"\boxed{9^{9^{9^{9}}}}", "1", timeout=0.4))
        found.append(time.monotonic() - began)
        found.append(math_match(r"\boxed{1}", "1", timeout=20))

    threads = [threading.Thread(target=compare) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), 60)
    assert found.count(1.0) == 2 and found.count(0.0) == 2 and max(found) < 30


def test_comparison_that_is_interrupted_leaves_no_answer_to_the_next_one():
    needs_math()
    assert math_match("4", 4, timeout=20) == 1.0  # the process runs

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            math_match(r"\boxed{9^{9^{9^{9}}}}", "1", timeout=5.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [math_match(str(number), "1", timeout=20) for number in (1, 2)] == [1.0, 0.0]


@pytest.mark.parametrize("label", [None, "", ["4", " "]], ids=repr)
def test_label_without_an_answer_is_refused(label):
    with pytest.raises(ValueError, match=r"the label .* is no answer"):
        math_match("4", label)


def test_time_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="timeout=0; expected seconds above 0"):
        math_match("4", 4, timeout=0)
    with pytest.raises(ValueError, match="timeout=inf; expected seconds above 0"):
        math_match("4", 4, timeout=float("inf"))


def test_process_that_has_died_is_replaced():
    needs_math()
    assert math_match("4", 4, timeout=20) == 1.0
    group = os.getpgid(math_process._PROCESS._process.pid)
    assert group != os.getpgrp()  # to which a terminal sends Ctrl-C, that this process may survive
    math_process._PROCESS._process.kill()
    math_process._PROCESS._process.wait()
    assert math_match("4", 4, timeout=20) == 1.0


def test_a_fork_does_not_wait_for_a_comparison_of_its_parent(monkeypatch):
    process = math_process._MathProcess()
    process._process = of_parent = object()
    monkeypatch.setattr(math_process, "_PROCESS", process)
    with process._lock:
        fork = os.fork()
        if not fork:
            own = process._lock.acquire(blocking=False) and process._process is None
            os._exit(0 if own and process._of_parents == [of_parent] else 1)
        assert os.waitpid(fork, 0)[1] == 0
    assert process._process is of_parent and process._of_parents == []


def test_math_verify_that_is_not_installed_is_named(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError(name='math_verify')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(math_process, "_PROCESS", math_process._MathProcess())
    with pytest.raises(ImportError, match=r"'math_verify' is not installed: pip install 'single-controller\[math\]'"):
        math_match("4", 4)
    math_process._PROCESS._process.kill()
    math_process._PROCESS._process.wait()


# --- length -----------------------------------------------------------------------------------------------------------


def test_soft_overlong_against_the_paper():
    for length in range(0, 25):
        if length <= 20 - 8:
            expected = 0.0
        elif length <= 20:
            expected = ((20 - 8) - length) / 8
        else:
            expected = -1.0
        found = soft_overlong([1] * length, max_length=20, buffer=8)
        assert found == expected == overlong_penalty(torch.tensor([length]), 20, 8).item()


def test_options_can_be_set_and_leave_what_the_data_gives():
    for function in (exact_match, number_match, math_match):
        assert list(inspect.signature(function).parameters)[:2] == ["completion", "label"]


def test_percentages_are_compared_with_each_other_as_they_are_written():
    assert number_match(r"\boxed{50\%}", "50%") == 1.0
    assert number_match(r"\boxed{0.5\%}", "50%") == number_match("5000%", "50%") == 0.0
