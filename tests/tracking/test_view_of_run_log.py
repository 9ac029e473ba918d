"""The page shows what `RunLog` has written, while it writes and after a step was repeated."""

import json
import urllib.request

import pytest
from run_batches import batch_of
from served import served_runs

from workers import RunLog


class Words:
    """A tokenizer whose token n is the word n."""

    def decode(self, tokens):
        return "".join(f"<{token}> " for token in tokens)


def test_page_of_a_run_that_goes_on(tmp_path):
    with RunLog(run_dir=tmp_path / "run", tokenizer=Words()) as log:
        with served_runs([tmp_path / "run"]) as server:

            def api(path):
                with urllib.request.urlopen(f"{server.url}api/{path}", timeout=20) as answer:
                    return json.load(answer)

            for step in range(3):
                with log.timed("train"):
                    log.log(step, {"value": step**2}, log.mark(step, batch_of(step)))
            log.event(
                "update", "weights of version 3", 2, version=3, bytes=10, seconds=0.5, proof="engine", digest="ab"
            )
            (run,) = api("runs")["runs"]
            assert (run["state"], run["last_step"], run["samples"]) == ("running", 2, [0, 2, 3])
            assert api("series?name=value")["value"]["mean"] == [0, 1, 4]
            table = api("samples?sort=reward&order=up")["rows"]
            rewards = [float((row * 7 + 2) % 5) for row in range(6)]
            assert [row["reward"] for row in table] == sorted(rewards)
            assert {row["finish"] for row in table} == {"length", None} and table[0]["newest"] == 3
            worst = table[0]["row"]
            sample = api(f"sample?step=2&row={worst}")
            completion = sample["tokens"][sample["prompt_length"] :]
            assert set(completion) == {200 + sample["row_columns"]["numbers"]}
            assert sample["pieces"][-1] == f"<{completion[0]}> " and sample["text"]["completion"].endswith(
                sample["pieces"][-1]
            )
            assert sample["columns"]["rollout_log_probs"][-1] == -0.5 and sample["updates"]["3"]["digest"] == "ab"
            assert [bar[3] for bar in api("timeline")["bars"]] == ["train"] * len(api("timeline")["bars"]) != []

            log.log(1, {"value": 100.0}, log.mark(1, batch_of(1)))  # training has gone back
            (run,) = api("runs")["runs"]
            assert (run["last_step"], run["samples"]) == (1, [0, 1, 2])
            assert api("series?name=value")["value"]["mean"] == [0, 100]
            with pytest.raises(urllib.error.HTTPError, match="404"):
                api("sample?step=2&row=0")
            log.close()
            assert api("runs")["runs"][0]["state"] == "ended: finished"
