"""An error of a worker's method is an instance of the method's own exception class too."""

import copy
import json
import pickle
import subprocess
import threading
from dataclasses import dataclass

import pytest

from single_controller import CallTimeoutError, ResultError, StartError, WorkerError
from single_controller.call.errors import Failure, catchable_as


class Odd(Exception):
    def __init__(self, code, *, reason):
        super().__init__(code)
        self.reason = reason

    def __str__(self):
        return self.reason.upper()


class OddNew(OSError):
    def __new__(cls, first, second):
        return super().__new__(cls, first, second)


class Slotted(LookupError):
    __slots__ = ("where",)


@dataclass
class BadRows(ValueError):
    rows: list

    def __len__(self):
        return len(self.rows)

    def __reduce_ex__(self, protocol):
        return BadRows, (self.rows,)


class Sealed(ValueError):
    def __init_subclass__(cls, **options):
        raise TypeError("Sealed cannot be subclassed")


SUBCLASSED = [
    *(ValueError, KeyError, OSError, FileNotFoundError, UnicodeDecodeError, SyntaxError, ImportError, TimeoutError),
    *(subprocess.CalledProcessError, Odd, OddNew, Slotted, BadRows),
]
LEFT_ALONE = [Sealed, ExceptionGroup, StopIteration, StopAsyncIteration, KeyboardInterrupt, SystemExit, WorkerError]


@pytest.mark.parametrize("base", [WorkerError, StartError])
@pytest.mark.parametrize("kind", [*SUBCLASSED, *LEFT_ALONE], ids=lambda kind: kind.__name__)
def test_error_is_of_both_classes_wherever_that_is_possible(kind, base):
    plain = base("work() raised on rank 3", rank=3, host="a", method="work", cause_type="K", ranks=[3, 4])
    plain.add_note("a note")
    error = catchable_as(plain, kind)
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(one, base) and isinstance(one, kind) == (kind in SUBCLASSED or issubclass(base, kind))
        assert str(one) == "work() raised on rank 3" and one.args == (str(one),) and type(one).__name__ == base.__name__
        assert (one.rank, one.host, one.method, one.cause_type, one.ranks) == (3, "a", "work", "K", (3, 4))
        assert one.__notes__ == ["a note"]
        assert one and one == one and len({one, copy.copy(one)}) == 2
        one.add_note("of this one alone")


def test_copy_of_an_error_whose_class_cannot_be_pickled():
    lock = threading.Lock()

    class Local(ValueError):
        def held(self):
            return lock

        def __reduce_ex__(self, protocol):
            return Local, self.args

    again = copy.copy(catchable_as(WorkerError("it failed", rank=3), Local))
    assert isinstance(again, WorkerError) and isinstance(again, Local)
    assert (str(again), again.rank) == ("it failed", 3)


def test_causes_that_are_equal_are_sent_all():
    error = ResultError("a result is lost")
    error.__cause__, error.__cause__.__cause__ = BadRows([1]), BadRows([1])
    raised = Failure.of(error, 0, "here", "work", None, in_process=False).error()
    assert isinstance(raised, ResultError) and raised.__cause__.__cause__ == BadRows([1])


def test_process_that_lacks_the_class_gets_a_plain_error():
    script = """
import sys
from single_controller.call.errors import catchable_as
from single_controller import WorkerError
import types, pickle
module = types.ModuleType("only_here")
sys.modules["only_here"] = module
exec("class Local(Exception): pass", vars(module))
sys.stdout.buffer.write(pickle.dumps(catchable_as(WorkerError("text", rank=1), module.Local)))
"""
    import sys

    sent = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60).stdout
    error = pickle.loads(sent)
    assert type(error) is WorkerError and str(error) == "text" and error.rank == 1


@pytest.mark.parametrize(
    "make",
    [lambda: WorkerError("it failed").results, lambda: CallTimeoutError("late").stacks],
    ids=["results", "stacks"],
)
def test_empty_fields_of_errors_are_dicts_of_their_own(make):
    assert pickle.loads(pickle.dumps(make())) == {} and json.dumps(make()) == "{}" and make() is not make()
