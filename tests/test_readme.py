"""The README and docs/: Python blocks run as written, tables are complete, links are valid."""

import gc
import inspect
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import single_controller
import workers
from benchmarks import summary
from single_controller import Dispatch
from single_controller.call.transport import Transport

ROOT = Path(__file__).resolve().parent.parent
README, CHINESE, CONTRIBUTING = ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, CHINESE, CONTRIBUTING, *DOCS]

BLOCK = re.compile(r"(?P<skip><!-- no-run -->\s*)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")

STATED = re.compile(r"^(?P<call>\w\S*\(.*\)) +# (?P<result>\[.*\]|\d+)$", re.MULTILINE)
"""A call with its result in a comment: ``group.add(10)  # [10, 11, 12, 13]``."""


def script(page):
    """Return a page's blocks as one script, with the page's line numbers. Results given in comments become
    assertions."""
    text, lines = page.read_text(), []
    for match in BLOCK.finditer(text):
        if match["skip"]:
            continue
        code = STATED.sub(r"assert \g<call> == \g<result>, 'not as stated'", match["code"])
        first = text.count("\n", 0, match.start("code"))
        lines += [""] * (first - len(lines)) + code.splitlines()
    return "\n".join(lines)


def test_page_that_includes_a_file_links_to_it_for_readers_of_the_repository():
    included = {page: re.findall(r'^--8<-- "(.*)"$', page.read_text(), re.MULTILINE) for page in DOCS}
    assert {page.name for page, files in included.items() if files} == {"arguments.md", "contributing.md"}
    for page, files in included.items():
        linked = [(page.parent / link).resolve() for link in re.findall(r'<a href="(.*?)">', page.read_text())]
        assert [file for file in files if (ROOT / file) not in linked] == []


SCRIPTS = {page: code for page in [README, *DOCS] if (code := script(page))}


@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: page.name)
def test_python_blocks_run_and_give_the_documented_results(page, ray_cluster, tmp_path, monkeypatch):
    """Each page is a script of its own; they share Ray and its idle workers."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    try:
        exec(compile(SCRIPTS[page], page, "exec"), names)
    finally:
        names.clear()  # groups and pools that the page has left open end with their names
        gc.collect()


def test_results_are_documented():
    assert sum(code.count("not as stated") for code in SCRIPTS.values()) >= 15


def test_chinese_readme_has_the_same_code_links_and_figures():
    english, chinese = README.read_text(), CHINESE.read_text()
    assert FENCE.findall(chinese) == FENCE.findall(english)
    assert set(LINK.findall(chinese)) - {README.name} == set(LINK.findall(english)) - {CHINESE.name}
    figures = re.compile(r"\d+\.\d+(?:\.\d+)?")
    assert set(figures.findall(FENCE.sub("", chinese))) == set(figures.findall(FENCE.sub("", english)))


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 200


def test_benchmark_picture_matches_the_table():
    assert summary.PICTURE.read_text() == summary.draw(summary.read_table(summary.TABLE.read_text()))
    assert summary.STEPS.read_text() == summary.draw_steps(summary.read_steps(summary.TABLE.read_text()))


# --- tables ---------------------------------------------------------------------------------------------------


def test_every_mode_is_in_its_table():
    modes = [name for name in Dispatch.__annotations__ if not name.startswith("_")]  # other tests add to Dispatch
    text = (ROOT / "docs" / "dispatch-modes.md").read_text()
    assert [name for name in modes if f"`{name}`" not in text] == []


def test_every_error_is_in_its_table():
    text = (ROOT / "docs" / "failures.md").read_text()
    errors = [name for package in (single_controller, workers) for name in package.__all__ if name.endswith("Error")]
    assert [name for name in errors if f"`{name}`" not in text] == []


def test_table_of_engine_methods_is_complete():
    table = re.findall(r"^\| `(\w+)", (ROOT / "docs" / "extending.md").read_text(), re.MULTILINE)
    assert set(table) == set(Transport.__abstractmethods__)


def test_every_public_name_is_in_the_api_reference():
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert {*single_controller.__all__, *workers.__all__} - listed == set()
    returned = {
        name
        for cls in (single_controller.WorkerGroup, workers.RayTrainGroup, workers.RolloutManager, workers.TrainModel)
        for method, function in vars(cls).items()
        if inspect.isfunction(function) and not method.startswith("_")
        for name in re.findall(r"\b[A-Z]\w+", str(function.__annotations__.get("return")))
        if getattr(inspect.unwrap(function).__globals__.get(name), "__module__", "").startswith(
            ("single_controller.", "workers.")
        )
    }
    assert {"ReferencedFuture", "ComputedFuture", "WorkerFuture"} <= returned
    assert returned - listed == {"RoleGroup"}  # a group of one role has a group's methods


# --- links ----------------------------------------------------------------------------------------------------


def anchors(page):
    """The anchors of a page's headings, as GitHub and MkDocs create them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFKC", heading)).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_valid(page):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link:
            assert well_formed(link), f"{link} is not a valid URL"
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


def linked_pages(page):
    targets = (link.partition("#")[0] for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link)
    return {(page.parent / target).resolve() for target in targets if target.endswith(".md")}


def test_every_page_is_at_most_two_links_from_the_readme():
    near = linked_pages(README)
    near |= {target for page in near for target in linked_pages(page)}
    apart = {"index.md", "contributing.md"}  # the site's home, and its copy of CONTRIBUTING.md
    assert {page.relative_to(ROOT / "docs").as_posix() for page in DOCS if page.resolve() not in near} == apart


def test_map_is_compared_with_ray_data():
    assert "`map_batches`" in (ROOT / "docs" / "calls.md").read_text()


def test_pages_say_who_they_are_for():
    says = re.compile(r"^For (everyone|users|readers|contributors)\b", re.MULTILINE)
    without = {page.name for page in (ROOT / "docs").glob("*.md") if not says.search(page.read_text())}
    assert without == {"index.md", "limits.md", "arguments.md", "contributing.md"}


def test_pages_are_short():
    assert [page.name for page in PAGES if len(page.read_text().split()) >= 2000] == []


def well_formed(address):
    """Whether the URL of another site is well formed; nothing is fetched."""
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") and "." in (parts.hostname or "") and not re.search(r"\s", address)


@pytest.mark.full("the documentation site")
@pytest.mark.timeout(300)
def test_site_builds_strictly(tmp_path):
    """A dead link, an unknown anchor and a name of the API that does not resolve fail the build; see mkdocs.yml."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
