"""The tutorials `distill.py`, `score.py`, `train_sft.py`, and `train_grpo.py` on a file, as a user runs them, and the
formulas of the first against loops."""

import json
import math
import random
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import depth
import pytest
import torch
from demo_runs import ROOT, environment, scalars
from fork_workers import fork_script, origin
from waits import wait_until

from workers import SamplingParams, read_args
from workers.algorithms.estimators import AdvantageRows
from workers.algorithms.policy_losses import PolicyTokens

TUTORIALS = ROOT / "tutorials"


@pytest.fixture
def run(other_drivers, pytestconfig, tmp_path):
    """Run a script on the tests' Ray, whose workers start quickly. Returns what it prints. It runs in ``folder``, and
    it and its workers can import modules from there: Ray gives workers the path of their driver's folder.

    In `make test` the script is a fork of a process that has imported torch already."""
    server = None if depth.full else origin(pytestconfig)

    def of(script, *given, folder=None):
        command = str(TUTORIALS / script), *given
        given = environment() | other_drivers | ({"PYTHONPATH": str(folder)} if folder else {})
        if server is None:
            done = subprocess.run(
                [sys.executable, *command], env=given, cwd=folder, capture_output=True, text=True, timeout=170
            )
            assert not done.returncode, done.stdout + done.stderr
            return done.stdout
        printed = tmp_path / "printed"
        printed.unlink(missing_ok=True)
        with fork_script(server, *command, environment=given, output=printed, folder=folder) as driver:
            driver.settimeout(170)
            assert driver.recv(4) == b"done", printed.read_text()
            driver.recv(1)  # until it has ended
        return printed.read_text()

    return of


@pytest.fixture(scope="module")
def tutorials():
    """The modules of `distill.py`."""
    sys.path.insert(0, str(TUTORIALS))
    try:
        import distill
        import distill_teacher
    finally:
        sys.path.remove(str(TUTORIALS))
    return SimpleNamespace(script=distill, teacher=distill_teacher)


@pytest.mark.full("fine-tuning that is killed, and GRPO after it")
@pytest.mark.timeout(400)
def test_fine_tuning_goes_on_after_a_kill_and_grpo_after_it(run, other_drivers, tmp_path):
    """A run that is killed at any moment and started again ends with the same weights, to the last bit."""
    moment = random.Random()

    def given(name):
        model = f"save_hf={tmp_path}/{name}/model"
        return "num_rollout=60", "save_interval=4", f"save={tmp_path}/{name}", model

    run("train_sft.py", *given("whole"))
    command = [sys.executable, str(TUTORIALS / "train_sft.py"), *given("killed")]
    with subprocess.Popen(command, env=environment() | other_drivers) as process:
        some = moment.randrange(2, 12)
        wait_until(lambda: len(list(tmp_path.glob("killed/rollout_*/position.json"))) >= some, 120)
        time.sleep(moment.random())
        process.kill()
    printed = run("train_sft.py", *given("killed"))
    start = int(re.search(r"begins with step (\d+)", printed)[1])
    assert 4 * (some - 1) <= start < 60
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert models[0] == models[1]
    rows = TUTORIALS / "out" / "sft" / "train.jsonl"
    further = ("label_key=answer", "num_rollout=60", "rollout_batch_size=16", "lr=1e-3")
    printed = run("train_grpo.py", f"hf_checkpoint={tmp_path}/killed/model", f"rollout_data={rows}", *further)
    first, last = map(float, re.search(r"first ([\d.]+), last ([\d.]+)", printed).groups())
    print(f"killed after {some} checkpoints, went on with step {start}; reward of GRPO {first} to {last}")
    assert last > first + 0.1


@pytest.mark.timeout(180)
def test_scores_survive_kills(run):
    batches = 60 if depth.full else 15
    printed = run("score.py", "--batches", str(batches))
    assert re.search(rf"{batches * 64} rows in [\d.]+ s, 2 restarts", printed), printed


@pytest.mark.full("distillation")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("loss", ["sampled", "top_k"])
def test_student_learns_the_teachers_policy(run, loss):
    printed = run("distill.py", f"loss={loss}")
    first, last = map(float, re.search(r"first ([\d.]+), last five ([\d.]+)", printed).groups())
    assert first > 1 and last < 0.2
    # 128 rows: what is sent holds their ids and masks, but nothing that the teacher has computed.
    assert int(re.search(r"([\d.]+) kB were sent", printed)[1]) < 250


def test_teacher_at_another_temperature_is_refused(tutorials, monkeypatch):
    said = "the student trains at temperature 1, the rollout draws at 1, and the teacher scores at 0.5"
    monkeypatch.setattr(sys, "argv", ["distill.py", "teacher_temperature=0.5"])
    with pytest.raises(ValueError, match=f"{said}; use one temperature"):
        tutorials.script.main()


def test_temperature_of_the_rollout_is_checked_too(tutorials):
    check = tutorials.script.check_temperature
    check(read_args({"temperature": 0.7}), SamplingParams(temperature=0.7), 0.7)
    for student, drawn, teacher in ((0.7, 0.7, 1.0), (0.7, 1.0, 0.7), (1.0, 0.7, 0.7), (1.0, 0.0, 1.0)):
        with pytest.raises(ValueError, match="use one temperature"):
            check(read_args({"temperature": student}), SamplingParams(temperature=drawn), teacher)


def test_teacher_scores_rows_that_are_padded_on_the_left(tutorials):
    with torch.random.fork_rng():  # it seeds torch
        teacher = tutorials.teacher.Teacher(tutorials.script.MODEL, 0.5, 3)
    ids = torch.tensor([[0, 0, 5, 9, 3], [7, 1, 2, 30, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    scored = teacher.score({"input_ids": ids, "attention_mask": mask})
    for row, first in enumerate((2, 0)):
        with torch.no_grad():
            logits = teacher.model(input_ids=ids[row : row + 1, first:]).logits[0]
        for token, likely in enumerate((logits / 0.5).log_softmax(-1)[:-1], first + 1):
            expected = float(likely[ids[row, token]])
            assert float(scored["ref_log_probs"][row, token]) == pytest.approx(expected, abs=1e-5)
            most, of = likely.topk(3)
            assert scored["candidate_log_probs"][row, token].tolist() == pytest.approx(most.tolist(), abs=1e-5)
            assert scored["candidate_ids"][row, token].tolist() == of.tolist()


def distributions(seed, rows=3, tokens=4, vocabulary=7):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, vocabulary, generator=draw).double().log_softmax(-1)


def test_sampled_token_loss_against_a_loop(tutorials):
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
    own, teacher = distributions(0)[..., 0], distributions(1)[..., 0]
    rows = AdvantageRows({"loss_mask": mask, "rollout_log_probs": own, "ref_log_probs": teacher})
    found = tutorials.teacher.sampled_token(rows, None)
    for row in range(3):
        for token in range(4):
            expected = teacher[row, token] - own[row, token] if mask[row, token] else 0.0
            assert found[row, token] == expected


@pytest.mark.parametrize("k", [1, 3, 7])
def test_top_k_loss_against_a_loop(tutorials, k):
    student, teacher = distributions(2), distributions(3)
    log_probs, ids = teacher.topk(k, dim=-1)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 2] = False
    own, others = student[..., 0], {"candidate_log_probs": log_probs}
    tokens = PolicyTokens(own, own, own, mask, others, student.gather(-1, ids))
    found, metrics = tutorials.teacher.top_k(tokens, None)
    for row in range(3):
        for token in range(4):
            p, q = teacher[row, token].exp().tolist(), student[row, token].exp().tolist()
            chosen = sorted(range(7), key=lambda v: -p[v])[:k]
            expected = sum(p[v] * (math.log(p[v]) - math.log(q[v])) - p[v] + q[v] for v in chosen)
            expected *= bool(mask[row, token])
            assert float(found[row, token]) == pytest.approx(expected, abs=1e-6)
            assert float(metrics["student_mass"][row, token]) == pytest.approx(sum(q[v] for v in chosen), abs=1e-6)
    if k == 7:  # the whole divergence
        whole = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(found.double(), torch.where(mask, whole, 0.0), atol=1e-6, rtol=0)


def test_top_k_loss_pulls_a_student_that_gives_the_candidates_too_much_back(tutorials):
    """The sum of p_teacher (log p_teacher - log p_student) alone is negative here: it would push the student further,
    and bounded at 0 it would have no gradient."""
    teacher = torch.tensor([0.3, 0.2]).log().view(1, 1, 2)
    student = torch.tensor([0.5, 0.4]).log().view(1, 1, 2).requires_grad_()
    own, mask = student.detach()[..., 0], torch.ones(1, 1, dtype=torch.bool)
    loss, _ = tutorials.teacher.top_k(
        PolicyTokens(own, own, own, mask, {"candidate_log_probs": teacher}, student), None
    )
    loss.sum().backward()
    assert float(loss) == pytest.approx(0.3 * math.log(0.3 / 0.5) + 0.2 * math.log(0.2 / 0.4) - 0.5 + 0.9)
    assert float(loss) > 0
    torch.testing.assert_close(student.grad, torch.tensor([[[0.2, 0.2]]]))  # p_student - p_teacher, each


REWARD = """
import json, pathlib

def reward(prompt, completion, label, level):
    with open(pathlib.Path(__file__).with_name("seen.jsonl"), "a") as file:
        file.write(json.dumps([prompt, label, level]) + "\\n")
    return completion.count(label) / 8 + len(set(completion)) / 100
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="sync"),
        pytest.param(
            ("async_rollout=true", "max_staleness=1"), id="async", marks=pytest.mark.full("async run on a file")
        ),
    ],
)
def test_run_on_a_file_continues_with_the_next_row(run, options, tmp_path):
    """One argument trains on a file. A run that is started again trains the rows of the one that was not ended."""
    rows = [{"prompt": f"{number} ", "label": str(number % 10), "level": number} for number in range(30)]
    rows[7]["prompt"] = rows[11]["prompt"] = "long" * 10
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join([*lines, "{"]))

    def trained(name, *more):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "its_reward.py").write_text(REWARD)
        given = (f"rollout_data={tmp_path}/data.jsonl", "reward_function=its_reward.reward", "num_rollout=4", *options)
        given += ("on_bad_row=skip", "rollout_max_prompt_len=20", "actor_num_gpus_per_node=1", "rollout_batch_size=4")
        given += (
            "n_samples_per_prompt=2",
            "rollout_max_response_len=4",
            "save_interval=2",
            f"out={tmp_path}/curve.png",
        )
        given += (f"tensorboard_dir={folder}/log", *more)
        run("train_grpo.py", *given, folder=folder)
        seen = (folder / "seen.jsonl").read_text().splitlines()
        return [json.loads(line) for line in seen], scalars(folder, "data/read")

    whole, counts = trained("whole", f"save={tmp_path}/checkpoints")
    assert all(rows[level] == {"prompt": prompt, "label": label, "level": level} for prompt, label, level in whole)
    again, counts_again = trained("again", f"load={tmp_path}/checkpoints", "ckpt_step=1")
    levels = [[level for _, _, level in seen] for seen in (whole, again)]
    if not options:  # an asynchronous run has the rewards of groups that were ready in its checkpoint
        assert len(levels[0]) == 4 * 4 * 2 and levels[1] == levels[0][2 * 4 * 2 :]
        assert set(counts_again) == {2, 3} and counts_again == {step: counts[step] for step in (2, 3)}
        assert not {7, 11} & {*levels[0]} and len({*levels[0][::2]}) == 16
    assert {*levels[1]} <= {*levels[0]} and len(levels[1]) >= 4 * 2
