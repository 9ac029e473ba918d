"""What a `RunLog` records of training on several ranks, and the replay of a recorded step."""

import json
import re
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from reference import ReferenceGRPO
from train_helpers import begin, learn, llamas_rollout

from single_controller.view.run_files import EVENTS, RUN, read_lines, read_run, sample_files
from workers import RunLog, read_args
from workers.tracking import replay as replaying
from workers.tracking.replay import ReplayError, replay

SETTINGS = {"lr": 3e-3, "kl_loss_coef": 0.05, "calculate_entropy": True, "balance_data": True, "record_rows": None}


def record(group, folder, args, *, first=0, steps=4, save_after=(1,), values=False):
    """Train, with a checkpoint after some of the steps, and the values of a critic if wanted.

    Returns by step: the data, and the log-probabilities before.
    """
    begin(group, {**SETTINGS, **args, "save": str(folder / "checkpoints")}, with_ref=True)
    trained = []
    with RunLog.from_args(group.args, run_dir=folder / "run") as log:
        log.watch(group)
        for step in range(first, steps):
            data = llamas_rollout(prompts=4, samples=4, tokens=6, seed=step)
            if values:
                data["values"] = torch.randn(data["input_ids"].shape, generator=torch.Generator().manual_seed(step))
            trained.append((data, group.compute_log_prob(data)))
            batch = log.mark(step, data)
            log.log(step, learn(group, step, batch), batch)
            if step in save_after:
                group.save_model(step)
    return trained


@pytest.mark.parametrize(("ranks", "steps_per_rollout"), [(1, 1), (2, 2)])
def test_rows_have_what_the_ranks_computed_and_a_step_can_be_replayed(
    fsdp_groups, llama_folder, tmp_path, ranks, steps_per_rollout
):
    args = {"hf_checkpoint": llama_folder, "num_steps_per_rollout": steps_per_rollout}
    trained = record(fsdp_groups(ranks), tmp_path, args)
    run = tmp_path / "run"
    for step, (data, log_probs) in enumerate(trained):
        file, text = sample_files(run, step)
        arrays, about = np.load(file), json.loads(text.read_bytes())
        advantages = torch.tensor(ReferenceGRPO.advantages(data), dtype=torch.float64)
        assert len(about["rows"]) == about["batch_rows"] == len(data["input_ids"])
        for row, number in enumerate(arrays["numbers"]):  # whatever rank has trained it
            begin_, end = arrays["offsets"][row : row + 2]
            real = data["attention_mask"][number].bool()
            assert arrays["tokens"][begin_:end].tolist() == data["input_ids"][number][real].tolist()
            torch.testing.assert_close(
                torch.from_numpy(arrays["log_probs"][begin_ + 1 : end]), log_probs[number][real][1:], rtol=0, atol=1e-5
            )
            counted = (data["loss_mask"][number][real] != 0).double()
            torch.testing.assert_close(
                torch.from_numpy(arrays["advantages"][begin_:end]).double(), counted * advantages[number],
                rtol=1e-4, atol=1e-4,
            )  # fmt: skip
        assert np.isfinite(arrays["token/ref_log_probs"]).all()
    assert read_run(run)["ranks"] == {
        "world_size": ranks,
        "dp_size": ranks,
        "with_ref": True,
        "worker_class": "workers.fsdp.fsdp_worker:FSDPTrainWorker",
    }
    (saved,) = [line for line in read_lines(run / EVENTS) if line["kind"] == "checkpoint"]
    assert saved["folder"].endswith("rollout_0000001")

    done = replay(run, 3)
    assert done.begun == 2 and done.exact == (ranks == 1) and done.different == {}, str(done)
    assert {"loss", "policy_loss", "grad_norm", "entropy", "kl", "reward", "advantage/max"} <= done.recorded.keys()
    if ranks == 1:  # bit for bit, and from the initial weights too
        assert {**done.metrics, **done.recorded} == done.metrics
        done = replay(run, 1)
        assert done.different == {} and done.begun == 0
        # That the replay can fail: the recorded number of another run.
        lines = (run / "metrics.jsonl").read_text().splitlines()
        other = json.loads(lines[2])
        other["metrics"]["grad_norm"] *= 1 + 1e-6
        (run / "metrics.jsonl").write_text("\n".join([*lines[:2], json.dumps(other), *lines[3:]]) + "\n")
        assert list(replay(run, 2).different) == ["grad_norm"]


def test_step_that_is_logged_when_the_next_one_was_sent(fsdp_groups, llama_folder, tmp_path):
    """Its number is not that of its rollout."""
    group = fsdp_groups(1)
    begin(group, {**SETTINGS, "hf_checkpoint": llama_folder}, with_ref=True)
    with RunLog.from_args(group.args, run_dir=tmp_path) as log:
        log.watch(group)
        batches = [log.mark(1 + k, llamas_rollout(prompts=4, samples=4, tokens=6, seed=k)) for k in range(2)]
        log_probs = group.compute_log_prob(batches[0])
        sent = [group.async_train(step, batch) for step, batch in enumerate(batches)]
        log.log(1, sent[0].result()[0], batches[0])
    arrays = np.load(sample_files(tmp_path, 1)[0])
    for row, real in enumerate(batches[0]["attention_mask"].bool()):
        begin_, end = arrays["offsets"][row : row + 2]
        torch.testing.assert_close(
            torch.from_numpy(arrays["log_probs"][begin_ + 1 : end]), log_probs[row][real][1:], rtol=0, atol=1e-5
        )


def test_what_cannot_be_replayed(fsdp_groups, llama_folder, tmp_path, capsys, monkeypatch):
    record(fsdp_groups(1), tmp_path, {"hf_checkpoint": llama_folder, "record_rows": 3}, steps=3, save_after=(0,))
    run = tmp_path / "run"
    with pytest.raises(ReplayError, match=r"step 2 has not all its rows.*checkpoints: 0 in"):
        replay(run, 2)
    for file in sample_files(run, 2):
        file.unlink()
    with pytest.raises(ReplayError, match="step 2 has no recorded rows"):
        replay(run, 2)
    with pytest.raises(ReplayError, match="has no step 7"):
        replay(run, 7)
    about = read_run(run)
    about["ranks"] |= {"world_size": 2, "dp_size": 2}
    about["config"] |= {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"}
    (run / RUN).write_text(json.dumps(about))
    with pytest.raises(ReplayError, match="balances the experts in each micro-batch"):
        replay(run, 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads := Mock())
    with pytest.raises(SystemExit) as ended:
        replaying.main([str(tmp_path), "1"])
    assert ended.value.code == 1 and "is not a run folder" in capsys.readouterr().err
    threads.assert_called_once_with(1)  # as many as a rank on Ray has


def test_replay_begins_with_what_the_run_has_loaded(fsdp_groups, llama_folder, tmp_path):
    """Not with a later checkpoint of the run before, and without an optimizer's state if the run had none."""
    args = {"hf_checkpoint": llama_folder, "lr": 1e-2}
    record(fsdp_groups(1), tmp_path / "one", args, steps=2, save_after=(0, 1))
    args |= {"load": str(tmp_path / "one" / "checkpoints"), "ckpt_step": 0, "no_load_optim": True}
    record(fsdp_groups(1), tmp_path / "other", args, first=1, steps=3, save_after=())
    done = replay(tmp_path / "other" / "run", 2)
    assert done.exact and done.begun == 1 and done.different == {}, str(done)


def test_replay_begins_with_no_checkpoint_of_another_run(fsdp_groups, llama_folder, tmp_path):
    """Two runs begin from the initial weights, one after the other, with one folder for their checkpoints."""
    args = {"hf_checkpoint": llama_folder}
    record(fsdp_groups(1), tmp_path, {**args, "lr": 1e-2}, steps=3, save_after=(0, 1))
    record(fsdp_groups(1), tmp_path, args, steps=3, save_after=())
    done = replay(tmp_path / "run", 2)
    assert done.exact and done.begun == 0 and done.different == {}, str(done)


CASES = {
    "gae": {"advantage_estimator": "gae", "kl_coef": 0.01},
    "steps": {"rollout_correction": "token_tis", "ppo_epochs": 2, "num_steps_per_rollout": 2,
              "shuffle_minibatches": True},
    "rollout's log-probs": {"use_rollout_logprobs": True},
    "adaptive KL": {"kl_coef": 0.01, "kl_target": 0.1, "advantage_estimator": "reinforce_plus_plus"},
    "adapter": {"lora_rank": 4, "kl_loss_coef": 0.0},
}  # fmt: skip


@pytest.mark.full("replays of several algorithms, and of Megatron's")
@pytest.mark.parametrize("case", CASES)
def test_replays_of_one_rank_are_equal_bit_for_bit(fsdp_groups, llama_folder, tmp_path, case):
    record(fsdp_groups(1), tmp_path, {"hf_checkpoint": llama_folder, **CASES[case]}, values=case == "gae")
    done = replay(tmp_path / "run", 3)
    assert done.exact and done.begun == 2 and done.different == {} and len(done.recorded) >= 15, str(done)


@pytest.mark.full("replays of several algorithms, and of Megatron's")
def test_tensor_parallel_step_of_megatron_is_replayed_on_one_rank(megatron_groups, llama_folder, tmp_path):
    args = {"train_backend": "megatron", "tensor_model_parallel_size": 2, "hf_checkpoint": llama_folder}
    record(megatron_groups(2), tmp_path, args)
    # In a process of its own: to run Megatron's ranks without a GPU, their module replaces functions of torch.
    command = [sys.executable, "-m", "workers.tracking.replay", str(tmp_path / "run"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step 3, from step 2 on: all \d+ metrics are equal within ", done.stdout, re.MULTILINE), (
        done.stdout
    )


@pytest.mark.full("a replay under a debugger, in a process of its own")
def test_replay_stops_in_a_debugger(fsdp_groups, llama_folder, tmp_path):
    record(fsdp_groups(1), tmp_path, {"hf_checkpoint": llama_folder}, steps=1, save_after=())
    command = [sys.executable, "-m", "workers.tracking.replay", str(tmp_path / "run"), "0", "--debug"]
    done = subprocess.run(
        command, input="next\nnext\nargs\nstep\nwhere\ncontinue\n", capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "(Pdb)" in done.stdout and "metrics are equal bit for bit" in done.stdout


def test_run_that_was_profiled_can_be_replayed():
    profiled = {"profile_step_start": 0, "profile_step_end": 1, "profile_dir": "x"}
    assert read_args(replaying._args({"config": profiled})).profile_step_start is None


def test_overrides_that_belong_to_several_ranks_are_not_replayed():
    overrides = {"sequence_parallel": True, "tensor_model_parallel_size": 2, "moe_layer_freq": [1, 0]}
    args = replaying._args({"config": {"train_backend": "megatron", "megatron_overrides": overrides}})
    assert args.megatron_overrides == {"moe_layer_freq": [1, 0]} and args.tensor_model_parallel_size == 1


def test_run_with_attributes_of_its_own_can_be_replayed():
    with pytest.warns(UserWarning, match="passed through unchecked: mine"):
        args = replaying._args({"config": {"lr": 0.5, "mine": 1}})  # as read_args has made it of a Namespace
    assert (args.lr, args.mine) == (0.5, 1)


def test_replay_has_what_a_teacher_has_computed(fsdp_groups, llama_folder, tmp_path):
    """As a future in the batch, which the driver does not record: the ranks do."""
    group = fsdp_groups(1)
    begin(group, {**SETTINGS, "hf_checkpoint": llama_folder, "balance_data": False})
    data = llamas_rollout(prompts=4, samples=4, tokens=6)
    with RunLog.from_args(group.args, run_dir=tmp_path) as log:
        log.watch(group)
        batch = log.mark(0, {**data, "ref_log_probs": group.async_compute_log_prob(data)})
        log.log(0, learn(group, 0, batch), batch)
    done = replay(tmp_path, 0)
    assert done.exact and done.different == {} and "kl" in done.recorded, str(done)


def test_replay_does_not_compare_what_depends_on_micro_batches():
    """One rank has rows with a common prefix in one micro-batch, which several ranks have in several."""
    for name in ("moe/load_min", "moe/load_max", "replay/overlap", "computed_ratio"):
        assert name.startswith(replaying._OF_THE_MACHINE)
    for name in ("moe/load_balancing_loss", "moe/z_loss", "replay/missing"):
        assert not name.startswith(replaying._OF_THE_MACHINE)


def test_log_probs_are_of_the_trained_weights_with_keep_old_actor(fsdp_groups, llama_folder, tmp_path):
    """Not those of the weights that generated the tokens, which are trained with."""
    args = {"hf_checkpoint": llama_folder, "keep_old_actor": True}
    for step, (data, log_probs) in enumerate(record(fsdp_groups(1), tmp_path, args, steps=3)):
        file, _ = sample_files(tmp_path / "run", step)
        arrays = np.load(file)
        for row, number in enumerate(arrays["numbers"]):
            begins, ends = arrays["offsets"][row : row + 2]
            real = data["attention_mask"][number].bool()
            found = torch.from_numpy(arrays["log_probs"][begins + 1 : ends])
            torch.testing.assert_close(found, log_probs[number][real][1:], rtol=0, atol=1e-5)


def test_log_probs_of_the_engine_are_not_recorded_as_those_of_the_trainer(fsdp_groups, llama_folder, tmp_path):
    """In a rollout that only the critic is trained on, the actor computes none of its own."""
    args = {"hf_checkpoint": llama_folder, "advantage_estimator": "gae", "num_critic_only_steps": 1, "num_rollout": 2}
    args |= {"use_rollout_logprobs": True, "kl_coef": 0.01, "kl_target": 0.1}
    record(fsdp_groups(1), tmp_path, args, steps=2, save_after=(), values=True)
    first, second = (np.load(sample_files(tmp_path / "run", step)[0]).files for step in range(2))
    assert "token/values" in first and "log_probs" not in first and "log_probs" in second
