"""The page of finished runs, in a headless Chromium: what a user looks for is there, and hostile text does nothing."""

import json
import os

import numpy as np
import pytest
from browser import Browser
from served import served_runs
from synthetic_run import STARTED, update, write_lines, write_run, write_samples
from test_server import HOSTILE
from waits import within

pytestmark = pytest.mark.timeout(120)

WORDS = ["The", "answer", "is", "the", "sum", "of", "the", "two", "numbers", ",", "so", "we", "add", "them", ".\n"]


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


def learning(steps, pace):
    """Metrics as a run has them that learns."""
    done = 1 - np.exp(-np.arange(steps) / pace)
    noise = np.random.default_rng(pace).standard_normal((steps, 6))
    means = np.stack([done, 0.1 - 0.08 * done, 2 - 1.7 * done, 0.4 + 0 * done, 1 + 0 * done, 300 + 500 * done], axis=1)
    return means + noise * [0.05, 0.02, 0.06, 0.08, 0.3, 30]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The page of two runs: one with everything, and a short one."""
    folder = tmp_path_factory.mktemp("runs")
    metrics = ("reward", "loss", "entropy", "grad_norm", "staleness/mean", "completion_tokens")
    tokens = [f"{WORDS[n % len(WORDS)]} " for n in range(100)]
    run = write_run(folder / "grpo-7b", steps=400, metrics=metrics, values=learning(400, 80), vocabulary=tokens)
    write_run(folder / "grpo-7b-lr2", steps=250, metrics=metrics, values=learning(250, 40))
    write_lines(
        run / "events.jsonl",
        [
            *(update(version, version, seconds=100, pause_seconds=0.1) for version in range(1, 400)),
            {"step": 380, "time": STARTED + 380, "kind": "alarm", "text": "entropy collapsed", "advice": "see entropy"},
            {"step": 390, "time": STARTED + 390, "kind": "death", "text": "rank 3 died", "group": "rollout", "rank": 3},
        ],
    )
    for step in (398, 399):
        lengths = np.random.default_rng(step).integers(8, 120, 128)
        rewards = np.where(np.arange(128) // 8 % 4 == 0, 1.0, np.random.default_rng(step).random(128))
        rewards[77] = -1.5
        write_samples(
            run,
            step,
            lengths,
            prompt=6,
            rewards=rewards,
            groups=np.arange(128) // 8,
            seed=step,
            texts=[
                {
                    "fingerprints": {str(step): f"{step:016x}"},
                    "columns": {"label": "42"},
                    "turns": [{"start": 0, "end": 6, "kind": "given"}, {"start": 6, "end": int(n), "kind": "sampled"}],
                }
                for n in lengths
            ],
        )
    parts = []
    for n in range(340, 400):
        at = STARTED + n
        parts.append({"group": None, "rank": None, "method": "rollout", "start": at, "end": at + 0.45})
        parts.append({"group": None, "rank": None, "method": "train", "start": at + 0.5, "end": at + 0.95})
        for rank in range(4):
            end = at + 0.2 + 0.06 * rank
            parts.append({"group": "group rollout", "rank": rank, "method": "generate", "start": at + 0.1, "end": end})
            parts[-1]["waits"] = {"queue": 0.08, "open": 0.02, "return": 0.01}
        for rank in range(2):
            parts.append({"group": "group actor", "rank": rank, "method": "train", "start": at + 0.5, "end": at + 0.9})
    write_lines(run / "timeline.jsonl", parts)
    with served_runs([run, folder / "grpo-7b-lr2"]) as server:
        yield server.url


def shot(browser, name):
    if "SCREENSHOTS" in os.environ:
        browser.screenshot(f"{os.environ['SCREENSHOTS']}/{name}.png")


def test_finished_run(browser, url):
    browser.open(url)
    browser.wait("document.querySelectorAll('.card').length == 2")
    page = browser.text()
    assert "grpo-7b-lr2" in page and "entropy collapsed" in page and "ended: finished" in page and "df2d8c2" in page

    browser.js("document.querySelectorAll('details')[1].open = true")
    browser.js("document.querySelector('.card').dataset.old = 1")
    browser.wait("document.querySelector('.card').dataset.old === undefined")  # it was drawn again
    opened = browser.js("[...document.querySelectorAll('details')].map((one) => one.open).join()")
    assert opened.startswith("false,true,f")
    assert '"lr": 0.000001' in browser.text()

    browser.js("location.hash = '#curves'")
    browser.wait("document.querySelectorAll('.chart[data-points]').length == 6")
    points = browser.js(
        "[...document.querySelectorAll('.chart')].map((one) => [one.dataset.metric, one.dataset.points])"
    )
    assert ["reward", str(400 + 250)] in points
    drawn = "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert browser.js(f"[...document.querySelectorAll('canvas')].map({drawn}).every((colors) => colors > 20)")
    browser.js("document.querySelector('input[type=range]').value = 0.9")
    browser.js("document.querySelector('input[type=range]').oninput()")
    shot(browser, "view_curves")
    browser.js("[...document.querySelectorAll('#runs input')][1].click()")
    browser.wait("document.querySelector('.chart[data-metric=reward]').dataset.points == '400'")

    browser.js("location.hash = '#timeline'")
    browser.wait("document.querySelector('canvas')?.dataset.bars > 50")
    lanes = browser.text("table")
    assert "rollout: rank 3" in lanes and "actor: rank 1" in lanes and "script" in lanes
    shot(browser, "view_timeline")

    browser.js("location.hash = '#events?kind=death'")
    browser.wait("document.querySelector('td') && document.querySelector('main').innerText.includes('rank 3 died')")
    assert browser.js("document.querySelectorAll('tbody tr').length") == 1


def test_one_rank_waits_for_another_and_several_wait(browser, url):
    rank = {"host": "a", "pid": 1, "alive": True, "running": [], "doing": "idle", "waits": "", "waits_for": []}
    ranks = [rank | {"rank": 2, "awaited_by": [0]}, rank | {"rank": 3, "awaited_by": [0, 1]}]
    group = {"name": "group actor", "state": "open", "note": "driver: a", "generation": 0, "ranks": ranks}
    browser.open(url)
    browser.wait("document.querySelectorAll('.card').length == 2")
    browser.js(
        "window.server = window.fetch; window.fetch = async (url, ...more) => String(url).includes('api/live')"
        f" ? new Response({json.dumps(json.dumps({'problems': [], 'groups': [group]}))}) : window.server(url, ...more);"
        " location.hash = '#ranks'"
    )
    browser.wait("document.querySelectorAll('tr[data-rank]').length == 2")
    page = browser.text()
    assert "rank 0 waits for it" in page and "ranks 0, 1 wait for it" in page


def test_from_the_worst_sample_to_the_digest_of_its_weights(browser, url):
    """The clicks of docs/view.md."""
    browser.open(url + "#samples")
    browser.wait("document.querySelector('.grid-row')?.dataset.row")
    count = browser.text("#sample-count")
    assert "256" not in count and "128 of 128 samples; 4 of 16 groups" in count
    shot(browser, "view_samples")
    first = "document.querySelector('.grid-row')"
    assert browser.js(f"[{first}.dataset.step, {first}.dataset.row]") == ["399", "77"]
    browser.js(f"{first}.click()")
    browser.wait("document.querySelectorAll('.tokens span').length > 5")
    assert "truncated\ttrue" in browser.text() and "ref log probs" not in browser.text()
    assert "-1.5" in browser.text() and "label" in browser.text() and "sampled" in browser.text("#tokens")
    assert "The answer is" in browser.text("#tokens").replace("\n", " ") or "numbers" in browser.text("#tokens")
    colors = browser.js("[...document.querySelectorAll('.tokens span')].map((one) => one.style.backgroundColor)")
    assert colors[0] == "" and len(set(colors)) > 3
    browser.js("document.querySelectorAll('.tokens span')[6].click()")
    token = browser.text("#token")
    assert "The update to version 399" in token and f"{399:016x}" in token and "The engine had these weights." in token
    assert "1.67 min" in token
    colored = "[...document.querySelectorAll('.tokens span')].some((one) => one.style.backgroundColor)"
    for color in ("ratio", "advantage", "mask", "version"):
        browser.js(f"document.querySelector('main select').value = '{color}'")
        browser.js("document.querySelector('main select').onchange()")
        assert browser.js(colored), color
    browser.js("document.querySelector('main select').value = 'advantage'")
    browser.js("document.querySelector('main select').onchange()")
    shot(browser, "view_sample")
    browser.js("[...document.querySelectorAll('#token a')].at(-1).click()")
    browser.wait("document.querySelector('main').innerText.includes('Updates')")
    browser.wait("document.querySelectorAll('tbody tr').length == 200")
    assert browser.errors() == []


def test_the_table_scrolls_and_filters(browser, url):
    browser.open(url + "#samples?step=all&equal=yes")
    browser.wait("document.querySelector('#sample-count').innerText.startsWith('64 of 256')")
    browser.js("document.querySelector('.scroll').scrollTop = 1e6")
    browser.wait("[...document.querySelectorAll('.grid-row')].at(-1)?.dataset.row")
    assert browser.js("document.querySelectorAll('.grid-row').length") < 60
    browser.js("document.querySelector('.grid-head button:nth-child(4)').click()")
    browser.wait("location.hash.includes('sort=completion')")


def test_a_session_with_branches_and_experts(browser, tmp_path):
    """From a row to what its session tried besides, and to the experts of a token; beside a run of the same name that
    has nothing yet."""
    run = write_run(tmp_path / "a" / "run", name="grpo", vocabulary=[f"{word} " for word in WORDS[:10]], steps=1)
    write_run(tmp_path / "b" / "run", name="grpo", ended=False, groups=["group a"])
    (tmp_path / "b" / "run" / "metrics.jsonl").unlink()
    ways = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 7, 8], [0, 1, 9, 9]]
    turns = [{"start": 0, "end": 2, "kind": "given"}, {"start": 2, "end": 4, "kind": "sampled"}]
    texts = [
        {"turns": [*turns, {"start": 4, "end": len(way), "kind": "sampled"}], "info": {"turns": 2}} for way in ways
    ]
    write_samples(
        run,
        3,
        [len(way) for way in ways],
        tokens=np.concatenate(ways).astype(np.int32),
        rewards=[0.25, 0.5, 0.75],
        groups=[4, 4, 4],
        texts=texts,
        **{
            "row/rollout_ids": np.array([1, 1, 1]),
            "jagged/routed_experts": np.arange(17 * 4, dtype=np.int16).reshape(17, 2, 2),
            "jagged/routed_experts/offsets": np.array([0, 7, 13, 17]),
        },
    )
    with served_runs([run, tmp_path / "b" / "run"]) as server:
        browser.open(f"{server.url}#sample?step=3&row=0&token=6")
        browser.wait("document.querySelector('[data-column=routed_experts] pre')")
        assert browser.text("[data-column=routed_experts] pre") == "0: 24, 25\n1: 26, 27"
        assert browser.text("#tree").splitlines()[0] == "Its session: 3 branches"
        lines = "[...document.querySelectorAll('#tree li')].map((one) => one.innerText.split('\\n')[0])"
        assert browser.js(lines) == [
            "given 2",
            "sampled 2",
            "sampled 3 → row 0: 0.25",
            "sampled 2 → row 1: 0.5",
            "sampled 2 → row 2: 0.75",
        ]
        shot(browser, "view_session")
        browser.js("[...document.querySelectorAll('#tree a')].at(-2).click()")
        browser.wait("document.querySelector('main b').innerText == 'step 3, row 2'")
        for tab in ("overview", "curves", "timeline", "weights", "samples", "events"):
            browser.open(f"{server.url}#{tab}?run=1")
            browser.wait("(document.querySelector('main').innerText || 'Loading').startsWith('Loading') === false")
        browser.js("location.hash = '#overview'")
        browser.wait("document.querySelectorAll('.card').length == 2")
        assert "grpo (a/run)" in browser.text("#runs") and "grpo (b/run)" in browser.text("#runs")
        assert browser.errors() == []


def test_hostile_text_does_nothing(browser, tmp_path):
    """All at once, in every place that shows text of a run."""
    texts = [text[:25_000] for text in HOSTILE]
    run = write_run(
        tmp_path / "run",
        name=texts[0],
        config={text[:100]: text for text in texts},
        groups=texts[:3],
        git={"commit": texts[1], "dirty": True},
        resumed=[{"time": 1, "step": texts[2]}],
        vocabulary=[texts[n % len(texts)][:2000] for n in range(100)],
        ended={"time": 1, "reason": texts[1]},
    )
    write_lines(run / "metrics.jsonl", [{"step": 1, "time": 1, "metrics": {text[:200]: 1.0 for text in texts}}])
    kinds = ["alarm", "update", *texts[:3]]
    events = [{"step": text[:50], "time": 1.0, "kind": kinds[n % 5], "text": text} for n, text in enumerate(texts)]
    for event in events:
        event |= dict.fromkeys(("advice", "version", "digest"), event["text"])
    write_lines(run / "events.jsonl", events)
    write_lines(
        run / "timeline.jsonl",
        [{"group": text[:300], "rank": 1, "method": text[:300], "start": 1, "end": 2} for text in texts],
    )
    row = {"finish": texts[1], "columns": {texts[0]: texts[1]}, "reward_parts": {texts[1]: 1.0}, "info": {"x": texts}}
    turns = [{"start": texts[1], "end": 3, "kind": texts[0]}]
    row |= {"prompt": texts[0], "turns": turns, "fingerprints": {"1": texts[0]}}
    write_samples(run, 1, [40] * 12, texts=[row | {"completion": text} for text in texts])
    with served_runs([run]) as server:
        tabs = ["overview", "curves", "timeline", "ranks", "weights", "samples", "events"]
        tabs += ["sample?step=1&row=0&token=9", "sample?step=<script>window.hacked=1</script>&row=0"]
        tabs += ["<img src=x onerror=window.hacked=1>"]
        elements = "document.querySelectorAll('main script, main img, main svg, main iframe, main style')"
        loaded = "performance.getEntriesByType('resource')"
        for tab in tabs:
            browser.open(f"{server.url}#{tab}")
            browser.wait("(document.querySelector('main').innerText || 'Loading').startsWith('Loading') === false")
            browser.js("new Promise((done) => setTimeout(done, 50))")
            assert browser.js("window.hacked") is None, tab
            assert browser.js(f"{elements}.length") == 0
            assert browser.js(f"{loaded}.every((one) => one.name.startsWith(location.origin))")
        assert "<script>window.hacked" in browser.js("document.title")
    assert [one for one in browser.log if one["method"] == "Page.javascriptDialogOpening"] == []


@pytest.mark.full("large runs on the page")
@pytest.mark.alone
def test_large_runs_open_within_two_seconds(browser, tmp_path):
    """10,000 samples of 1,000 tokens in one step, and 100,000 steps; then the table is scrolled through."""
    wide, long = write_run(tmp_path / "wide", steps=10), tmp_path / "long"
    write_run(long, steps=100_000, metrics=[f"metric/{n}" for n in range(20)])
    write_samples(wide, 1, [1000] * 10_000, texts=[{"completion": "word " * 800}] * 10_000)
    for run, tab, ready in (
        (wide, "samples", "document.querySelector('.grid-row')?.dataset.row"),
        (long, "curves", "document.querySelectorAll('.chart[data-points=\"800\"]').length > 5"),
    ):
        with served_runs([run]) as server:  # which has read nothing yet
            browser.open("about:blank")
            with within(2):
                browser.open(f"{server.url}#{tab}")
                browser.wait(ready)
            if tab == "samples":
                with within(2):
                    for share in range(1, 11):
                        browser.js(f"document.querySelector('.scroll').scrollTop = {share} * 26_000")
                        browser.wait("[...document.querySelectorAll('.grid-row')].every((one) => one.dataset.row)")


def test_zoom_by_time_keeps_all_runs(browser, tmp_path):
    """Each begins at 0; they are of different days."""
    runs = []
    for day, name in enumerate("ab"):
        at = STARTED + 86_400 * day
        runs.append(write_run(tmp_path / name, started=at))
        lines = [{"step": n, "time": at + n, "metrics": {"reward": float(n)}} for n in range(100)]
        write_lines(runs[-1] / "metrics.jsonl", lines)
    with served_runs(runs) as server:
        browser.open(f"{server.url}#curves?x=time")
        browser.wait("document.querySelector('.chart')?.dataset.points == '200'")
        canvas = "document.querySelector('canvas')"
        browser.js(f"{canvas}.setPointerCapture = () => {{}}")
        browser.js(f"{canvas}.onpointerdown({{offsetX: 100, pointerId: 1}})")
        browser.js(f"{canvas}.onpointerup({{offsetX: 200}})")
        shown = "document.querySelector('.chart .value').textContent.split('   ').length"
        browser.wait(f"document.querySelector('.chart').dataset.points < 200 && {shown} == 2")


def test_late_answers_do_not_replace_those_to_what_was_typed_last(browser, tmp_path):
    run = write_run(tmp_path / "run")
    write_lines(run / "events.jsonl", [{"kind": "mine", "time": STARTED, "text": text} for text in ("a", "ab")])
    with served_runs([run]) as server:
        browser.open(f"{server.url}#events")
        browser.wait("document.querySelectorAll('tbody tr').length == 2")
        browser.js(
            "window.soon = window.fetch; window.late = 0; window.fetch = async (url, ...more) => {"
            " const answer = await window.soon(url, ...more);"
            " if (String(url).includes('text=a&')) {"
            " await new Promise((resolve) => setTimeout(resolve, 500)); window.late = 1; } return answer; }"
        )
        box = "document.querySelector('input[type=search]')"
        browser.js(f"{box}.value = 'a'; {box}.oninput(); {box}.value = 'ab'; {box}.oninput()")
        browser.wait("window.late == 1")
        browser.js("new Promise((resolve) => setTimeout(resolve, 100))")
        browser.wait("document.querySelectorAll('tbody tr').length == 1")
