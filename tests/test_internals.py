"""docs/internals.md lists every thread and every lock of the library, and no other."""

import ast
import re

import pytest
from import_graph import ROOT, library_files


@pytest.fixture(scope="module")
def sources():
    """Of the files that start a thread or make a lock."""
    texts = {path.relative_to(ROOT): path.read_text() for path in library_files()}
    some = re.compile("in_thread|Timer|Thread|Lock|Condition")
    return [(path, ast.parse(text)) for path, text in texts.items() if some.search(text)]


def listed(section):
    """The names in the first column of a section's table."""
    text = re.search(rf"^## {section}\n(.*?)^## ", (ROOT / "docs/internals.md").read_text(), re.M | re.S)[1]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def calls(node, *functions):
    """Whether a node calls one of the functions of any module but asyncio."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    return name in functions and getattr(getattr(called, "value", None), "id", None) != "asyncio"


def threads(tree):
    """(line, pattern of the name) of each thread that is started; the pattern is None if the name is unknown."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if calls(node, "in_thread"):
            yield node.lineno, pattern(node.args[0], None)
        elif calls(node, "Timer"):  # has no name
            yield node.lineno, "Timer"
        elif calls(node, "Thread", "ThreadPoolExecutor"):
            options = {option.arg: option.value for option in node.keywords}
            prefix = node.args[1] if calls(node, "ThreadPoolExecutor") and len(node.args) > 1 else None
            around = [one for one in functions if one.lineno <= node.lineno <= one.end_lineno]
            if around[0].name == "in_thread":  # the name is that of its callers
                continue
            yield node.lineno, pattern(options.get("name") or options.get("thread_name_prefix") or prefix, around[-1])


def pattern(name, function):
    match name:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern(part, function) or ".+" for part in parts)
        case ast.Name(id=variable):
            values = (node.value for node in ast.walk(function) if isinstance(node, ast.Assign)
                      and ast.unparse(node.targets[0]) == variable)  # fmt: skip
            return next((pattern(value, function) for value in values), None)
    return None


def locks(node, owner=""):
    """``Class.attribute`` of each lock, or the variable of a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign) and calls(child.value, "Lock", "RLock", "Condition"):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            yield owner + ast.unparse(target).removeprefix("self.")
        yield from locks(child, f"{child.name}." if isinstance(child, ast.ClassDef) else owner)


def test_all_threads_are_listed(sources):
    found = {f"{path}:{line}": name for path, tree in sources for line, name in threads(tree)}
    assert [where for where, name in found.items() if name in (None, ".+")] == [], "give them a name"
    names = listed("Threads")
    missing = {where: name for where, name in found.items() if not any(re.fullmatch(name, one) for one in names)}
    assert missing == {}, "add them to the table of docs/internals.md"
    gone = [one for one in names if not any(re.fullmatch(name, one) for name in found.values())]
    assert gone == [], "remove them from the table of docs/internals.md"


def test_all_locks_are_listed(sources):
    found = {lock for _, tree in sources for lock in locks(tree)}
    assert found - {*listed("Locks")} == set(), "add them to the table of docs/internals.md"
    assert {*listed("Locks")} - found == set(), "remove them from the table of docs/internals.md"


def test_threads_and_locks_of_all_spellings_are_found():
    tree = ast.parse("""
class A:
    _shared = RLock()

    def start(self, n):
        self.turn: Any = threading.Condition(threading.Lock())
        name = f"rank-{n}"
        threading.Thread(target=f, name="a-b")
        Thread(target=f, name=f"{n}-server")
        Thread(target=f, name=name)
        cf.ThreadPoolExecutor(2, "calls")
        ThreadPoolExecutor(thread_name_prefix="calls")
        threading.Timer(1, f)
        Thread(target=f)
        in_thread("c", f)
_lock = Lock()
""")
    assert list(locks(tree)) == ["A._shared", "A.turn", "_lock"]
    assert [name for _, name in threads(tree)] == [
        r"a\-b",
        r".+\-server",
        r"rank\-.+",
        "calls",
        "calls",
        "Timer",
        None,
        "c",
    ]
