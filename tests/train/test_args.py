"""A training run's configuration: complete, validated, and documented on one page."""

import argparse
import dataclasses
import pickle
import re
import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from workers.rollout.engines.rollout_engine import SamplingParams
from workers.train.args import TrainArgs, TrainArgsError, read_args, table, update_seconds
from workers.train.args_checks import function_at, role_args

PAGE = Path(__file__).resolve().parents[2] / "workers" / "train" / "ARGUMENTS.md"


def test_documentation_page_lists_every_key():
    page = PAGE.read_text()
    assert page.endswith(table() + "\n"), "python -m workers.train.args prints the tables"
    listed = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    assert listed == [item.name for item in dataclasses.fields(TrainArgs)]


def test_defaults_and_given_values():
    args = read_args(OmegaConf.create({"lr": 3, "user": {"mine": [1, {"deep": 2}]}, "rollout_stop_token_ids": [5]}))
    assert (args.lr, args.train_backend, args.user.mine[1].deep, list(args.rollout_stop_token_ids)) == (
        3.0,
        "fsdp",
        2,
        [5],
    )
    assert read_args(args) == args == pickle.loads(pickle.dumps(args)) == read_args(dict(args))
    assert read_args(None) == read_args(TrainArgs()) == read_args({})
    args.user.more = "anything"
    with pytest.raises(ConfigAttributeError, match="learning_rate"):
        _ = args.learning_rate


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip_gradd": 1}, "no key 'clip_gradd'; did you mean 'clip_grad'?"),
        ({"n_samples": 4}, "no key 'n_samples'; did you mean 'n_samples_per_prompt'?"),
        ({"learning_rate": 1e-3}, "no key 'learning_rate'; did you mean 'lr'?"),
        ({"use_routing_replay": True, "keep_old_actor": True}, "R2.* does not go with keep_old_actor=True.*Use .R3"),
        ({"megatron_to_hf_mode": "bridge"}, "megatron_to_hf_mode='bridge': expected one of 'raw'"),
        ({"zzz": 1}, "no key 'zzz'; put your own keys under 'user'"),
        ({"lr": "fast"}, r"args.lr='fast': expected float"),
        ({"num_rollout": 1.5}, r"args.num_rollout=1.5: expected int"),
        ({"colocate": "perhaps"}, r"args.colocate='perhaps': expected bool"),
        ({"rollout_stop_token_ids": 3}, "rollout_stop_token_ids=3: expected list"),
        ({"lr": -1}, "args.lr=-1.0: expected a number of at least 0"),
        ({"train_backend": "megatrn"}, "'fsdp', 'megatron'; did you mean 'megatron'?"),
        ({"hf_config": {"hidden_size": 3}}, "no 'model_type'"),
        ({"hf_config": {"model_type": "llama"}, "hf_checkpoint": "x"}, "are both set"),
        ({"update_weights_transport": "disk"}, "needs update_weights_disk_dir"),
        ({"max_staleness": 1}, "args.max_staleness=1 needs async_rollout=True"),
        ({"async_rollout": True, "rollout_window": 4}, "args.rollout_window=4 needs rollout_order='window'"),
        ({"dynamic_sampling_max": 4}, "args.dynamic_sampling_max=4 needs dynamic_sampling=True"),
        ({"async_rollout": True, "colocate": True}, "args.async_rollout and colocate are both set"),
        ({"dynamic_sampling": True, "offload_train": True}, "args.dynamic_sampling and offload_train are both set"),
        ({"update_weights_mode": "stop"}, "expected one of 'wait', 'interrupt'"),
        ({"keep_old_actor": True, "enable_weights_backuper": False}, "needs enable_weights_backuper"),
        ({"keep_old_actor": True, "async_rollout": True, "max_staleness": 2}, "but with max_staleness=2 tokens may be"),
        ({"keep_old_actor": True, "async_rollout": True, "on_stale": "train"}, "but with on_stale='train' tokens may"),
        ({"save_hf": "out/{step}"}, r"save_hf='out/{step}': the only placeholder is {rollout_id}"),
        ({"save": "out", "save_hf": "out/rollout_{rollout_id:07d}/hf"}, r"save_hf=.* is a checkpoint's folder"),
        ({"save": "out", "critic_save_hf": "./out/critic/rollout_{rollout_id:07d}"}, "is a checkpoint's folder"),
        ({"critic_save_hf": "out/{rollout_id"}, r"critic_save_hf=.* the only placeholder"),
        ({"hf_checkpoint": "out/", "save_hf": "./out"}, r"save_hf='./out' is also hf_checkpoint, whose weights"),
        ({"ref_load": "a/out", "critic_save_hf": "a/b/../out"}, "critic_save_hf='a/b/../out' is also ref_load"),
        ({"num_rollout": 10, "hf_checkpoint": "out/9", "save_hf": "out/{rollout_id}"}, "is also hf_checkpoint, whose"),
        ({"advantage_estimator": "gae", "save": "out", "critic_save": "./out/"}, "critic_save='./out/' is also save;"),
        ({"profile_step_start": 1}, "set both"),
        ({"profile_step_start": 1, "profile_step_end": 1, "profile_dir": "x"}, "above profile_step_start=1"),
        ({"temperature": 0}, "args.temperature=0.0: expected a number above 0"),
        ({"rollout_top_p": 1.5}, "rollout_top_p=1.5: expected a number above 0 and at most 1"),
        ({"adam_beta1": 1.0}, "adam_beta1=1.0: expected a number of at least 0 and below 1"),
        ({"update_weights_timeout_minutes": 9}, "9.0 is more than 0.8 of distributed_timeout_minutes=10"),
        ({"save_keep": 0}, "args.save_keep=0: expected a number of at least 1"),
        ({"save_keep_every": 5}, "save_keep_every needs save_keep"),
        ({"save_keep": 1, "advantage_estimator": "gae"}, "save_keep=1 would leave no checkpoint that actor and critic"),
        ({"ckpt_step": 3, "save": "x"}, "ckpt_step=3 needs load"),
        ({"distributed_timeout_minutes": 0}, "distributed_timeout_minutes=0.0: expected a number above 0"),
        ({"param_dtype": "fp16"}, "use 'bf16' or 'fp32' with fsdp"),
        ({"policy_loss_type": "gspo", "eps_clip_dual": 3}, "eps_clip_dual=3.0 has no effect .*='gspo'.*'ppo_clip'"),
        ({"policy_loss_type": "cispo", "eps_clip_dual": 3}, "eps_clip_dual=3.0 has no effect with .*='cispo'"),
        ({"keep_old_actor": True, "use_rollout_logprobs": True}, "keep_old_actor has no effect with use_rollout_log"),
        ({"loss_constant_length": 5}, "loss_constant_length=5 has no effect with loss_aggregation='token'.*'constant'"),
        ({"loss_constant_length": 5, "policy_loss_type": "gspo"}, "no effect with loss_aggregation='sequence'"),
        ({"policy_loss_type": "sapo", "eps_clip": 0.2}, "eps_clip=0.2 has no effect with policy_loss_type='sapo'"),
        ({"use_unbiased_kl": True}, "use_unbiased_kl=True has no effect with kl_loss_coef=0"),
        ({"policy_loss_type": "dro"}, "policy_loss_type='dro' needs dro_beta"),
        ({"tau_pos": 1.5}, "tau_pos=1.5 has no effect with policy_loss_type='ppo_clip'; .* use 'sapo'"),
        ({"policy_loss_type": "clip_cov", "kl_cov_ratio": 0.1}, "kl_cov_ratio=0.1 has no effect .* use 'kl_cov'"),
        (
            {"policy_loss_type": "clip_cov", "clip_cov_lb": 6},
            r"clip_cov_lb=6.0 and clip_cov_ub=5.0: .*expected clip_cov_lb <",
        ),
        (
            {"policy_loss_type": "kl_cov", "kl_cov_ratio": 0},
            "kl_cov_ratio=0.0: expected a number above 0 and at most 1",
        ),
        ({"kl_loss_type": "k4"}, "kl_loss_type='k4': expected one of 'k1', 'k2', 'k3', 'low_var_kl', 'k1\\+'"),
        ({"advantage_estimator": "grop"}, "'grpo', 'rloo', .* or the dotted path of a function; did you mean 'grpo'?"),
        ({"advantage_estimator": "gspo"}, "the dotted path of a function; set policy_loss_type=.gspo. instead"),
        ({"policy_loss_type": "ppo"}, "policy_loss_type='ppo': expected one of 'ppo_clip', 'gspo', 'cispo'"),
        ({"policy_loss_type": "os.path.jion"}, "policy_loss_type='os.path.jion' cannot be imported"),
        ({"policy_loss_type": "os.sep"}, "is a str, not a function"),
        ({"eps_clip_dual": 1.0}, "eps_clip_dual=1.0: expected a number above 1"),
        ({"overlong_buffer_len": 17}, "overlong_buffer_len=17 is more than rollout_max_response_len=16"),
        (
            {"rollout_correction": "tis"},
            "rollout_correction='tis': 'tis' is no correction; expected one of report, tok",
        ),
        ({"rollout_correction": "seq_rs+geo_rs"}, "only one \\*_rs and one weighting can be joined"),
        ({"rollout_correction": "geo_rs", "rollout_correction_high": 2}, "'geo_rs' has no bound 'high'"),
        (
            {"rollout_correction": "token_tis", "rollout_correction_high": 0.5},
            "high=0.5: expected a number of at least 1",
        ),
        ({"rollout_rejection_low": 0.5}, "args.rollout_rejection_low needs rollout_correction"),
        ({"rollout_correction_normalize": True}, "args.rollout_correction_normalize needs rollout_correction"),
        ({"rollout_correction": "geo_rs", "rollout_correction_normalize": True}, "'geo_rs' has no weights"),
        ({"kl_target": 0.1}, "args.kl_target=0.1 adapts kl_coef, which is 0"),
        ({"num_critic_only_steps": 2}, "num_critic_only_steps=2 needs advantage_estimator='gae': 'grpo' has no critic"),
        ({"shuffle_minibatches": True}, "shuffle_minibatches=True needs num_steps_per_rollout above 1"),
        ({"fp32_lm_head": True}, "fp32_lm_head=True has no effect with param_dtype='fp32'"),
        (
            {"fp32_lm_head": True, "param_dtype": "bf16", "lora_rank": 2, "lora_target_modules": ["q_proj", "lm_head"]},
            "does not go with lm_head in lora_target_modules",
        ),
        ({"opsm_delta": -0.1}, "args.opsm_delta=-0.1: expected a number of at least 0"),
        ({"rollout_correction": "icepop", "use_rollout_logprobs": True}, "set only one of them"),
        ({"advantage_estimator": "gae", "critic_num_nodes": 2}, "is 4, but actor_num_nodes .* is 2"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 3, "lr_warmup_iters": 5}, "less than lr_warmup_iters=5"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 3, "critic_lr_warmup_iters": 5}, "than critic_lr_warmup_iters"),
        ("lr=3", "an OmegaConf config, a mapping or a Namespace"),
        (argparse.Namespace(lr="fast"), "args.lr='fast'"),
    ],
)
def test_error_names_the_invalid_key(given, message):
    with pytest.raises(TrainArgsError, match=message) as caught:
        read_args(given)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_policy_loss_chooses_its_clip_and_its_mean_unless_set(caplog):
    def read(**given):
        caplog.clear()
        args = read_args(given)
        said = [record.getMessage() for record in caplog.records if record.name == "workers.train.args_checks"]
        assert read_args(args) == args and len(said) < 2  # what is complete stays as it is
        return (args.eps_clip, args.eps_clip_high, args.loss_aggregation), *said

    assert read() == ((0.2, None, "token"),)
    assert read(policy_loss_type="cispo", eps_clip=1) == ((1.0, None, "token"),)
    assert read(policy_loss_type="os.path.join") == ((0.2, None, "token"),)  # a user's own
    chosen = (3e-4, 4e-4, "sequence")
    for name in ("gspo", "workers.algorithms.policy_losses.gspo_loss"):
        values, message = read(policy_loss_type=name)
        assert values == chosen
        assert message == (
            "policy_loss_type='gspo' chooses loss_aggregation='sequence', eps_clip=0.0003, eps_clip_high=0.0004, "
            "as in its paper; set these keys to choose others"
        )
    assert read(policy_loss_type="geo_mean")[0] == (0.4, None, "sequence")
    assert read(policy_loss_type="sapo")[0] == (None, None, "sequence")
    assert read(policy_loss_type="gpg") == ((None, None, "token"),)
    values, message = read(policy_loss_type="dppo_kl")
    assert values == (0.05, None, "token") and "chooses eps_clip=0.05, eps_clip_dual=20.0, as" in message
    gspo = {"policy_loss_type": "gspo"}
    assert read(**gspo, eps_clip=0.2, loss_aggregation="token") == ((0.2, None, "token"),)
    assert read(**gspo, eps_clip=0.1)[0] == (0.1, None, "sequence")
    assert read(**gspo, eps_clip_high=0.1)[0] == (3e-4, 0.1, "sequence")
    assert read(**gspo, loss_aggregation="constant", loss_constant_length=7)[0] == (3e-4, 4e-4, "constant")


def test_defaults_of_another_loss_are_a_warning():
    """`read_args` has set them, so they look like the user's in a configuration that is made of it."""
    ppo, gspo = read_args({}), read_args({"policy_loss_type": "gspo"})
    with pytest.warns(UserWarning, match=r"'gspo' with .*eps_clip=0\.2, the defaults of 'ppo_clip'.*None"):
        assert read_args({**ppo, "policy_loss_type": "gspo"}).eps_clip == 0.2
    with pytest.warns(UserWarning, match=r"'ppo_clip' with .*eps_clip_high=0\.0004.*the defaults of 'gspo'"):
        read_args({**gspo, "policy_loss_type": "ppo_clip"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_args({**ppo, "policy_loss_type": "gspo", "eps_clip": None, "loss_aggregation": None}) == gspo
        for args in (ppo, gspo, read_args({"loss_aggregation": "sequence", "eps_clip": 0.1})):
            assert read_args({**args}) == args


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gamma": 0.9}, "gamma has no effect with advantage_estimator='grpo'"),
        ({"gae_lambda": 1.0, "critic_lr": 1e-3}, "gae_lambda, critic_lr have no effect with .*='grpo'"),
        (
            {"advantage_estimator": "gae", "gae_lambda": 0.9, "gae_lambda_value": 1, "gae_length_adaptive_alpha": 0.05},
            "gae_lambda has no effect with both gae_length_adaptive_alpha, .* and gae_lambda_value",
        ),
        ({"kl_coef": 0.1, "kl_horizon": 500}, "kl_horizon has no effect with kl_target=None"),
        ({"advantage_estimator": "rloo", "grpo_std_normalization": False}, "grpo_std_normalization has no effect"),
        ({"advantage_estimator": "reinforce_plus_plus", "value_clip": 0.5}, "value_clip has no effect"),
        ({"normalize_advantages": False}, "normalize_advantages has no effect"),
        ({"min_lr": 1e-7}, "min_lr has no effect with lr_decay_style='constant'"),
        ({"lora_alpha": 32}, "lora_alpha has no effect with lora_rank=0"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size has no effect with train_backend='fsdp'"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size has no effect with train_backend='fsdp'"),
        (
            {"rollout_order": "window", "on_stale": "drop"},
            "rollout_order, on_stale have no effect without async_rollout or dynamic_sampling",
        ),
        ({"kl_loss_coef": 0.1, "use_unbiased_kl": True}, "p / p_old is 1 in the first step"),
        ({"train_backend": "megatron", "fsdp_shard_size": 2}, "fsdp_shard_size has no effect"),
        ({"overlong_penalty_factor": 0.5}, "overlong_penalty_factor has no effect with overlong_buffer_len=0"),
        ({"update_weights_disk_dir": "x"}, "update_weights_disk_dir has no effect with .*='store'"),
        ({"update_weights_full_every": 3}, "update_weights_full_every has no effect"),
        ({"kl_loss_coef": 0.1, "kl_loss_type": "k1"}, "the gradient of k1 has mean 0"),
        (
            {"rollout_top_p": 0.9},
            "rollout_top_p=0.9, rollout_top_k=0 and rollout_min_p=0.0 may leave any .* rollout_top_k to at most 512",
        ),
        ({"rollout_min_p": 0.1}, "may leave any number of tokens"),
        ({"rollout_top_k": 513}, "may leave any number of tokens"),
        ({"policy_loss_type": "kl_cov"}, r"'kl_cov': the penalty \|log\(p / p_old\)\| is 0 in the first step"),
        (
            {"policy_loss_type": "dro", "dro_beta": 0.1},
            r"'dro': the penalty log\(p / p_old\)\^2 is 0 in the first step",
        ),
    ],
)
def test_key_without_an_effect_is_reported(given, message):
    with pytest.warns(UserWarning, match=message) as told:
        read_args(given)
    assert len(told) == 1


def test_keys_with_an_effect_are_not_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (
            {"rollout_top_p": 0.9, "rollout_top_k": 512},
            {"advantage_estimator": "gae", "gamma": 0.9, "gae_lambda": 1.0, "critic_lr": 1e-3, "value_clip": 0.5},
            {"advantage_estimator": "gae", "gae_lambda": 0.9, "gae_lambda_value": 1},
            {"advantage_estimator": "gae", "gae_lambda": 0.9, "gae_length_adaptive_alpha": 0.05},
            {"kl_coef": 0.1, "kl_target": 0.05, "kl_horizon": 500},
            {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "normalize_advantages": False},
            {"advantage_estimator": "os.path.join", "gamma": 0.9, "gae_lambda": 1.0, "grpo_std_normalization": False},
            {"train_backend": "megatron", "tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
            {"lora_rank": 4, "lora_alpha": 32, "lr_decay_style": "cosine", "min_lr": 1e-7},
            {"kl_loss_coef": 0.1, "kl_loss_type": "k1+", "keep_old_actor": True},
            {"kl_loss_coef": 0.1, "kl_loss_type": "k1", "use_unbiased_kl": True, "num_steps_per_rollout": 2},
            {"async_rollout": True, "rollout_order": "window", "update_weights_mode": "interrupt"},
            {"policy_loss_type": "kl_cov", "num_steps_per_rollout": 4},
            {"policy_loss_type": "dro", "dro_beta": 0.1, "use_rollout_logprobs": True},
        ):
            read_args(given)


def test_weight_update_has_half_the_time_of_a_collective_unless_set():
    assert update_seconds(read_args({})) == 300
    assert update_seconds(read_args({"distributed_timeout_minutes": 3})) == 90
    assert update_seconds(read_args({"distributed_timeout_minutes": 3, "update_weights_timeout_minutes": 2})) == 120


def test_namespace_may_have_extra_keys():
    thing = object()
    with pytest.warns(UserWarning, match="passed through unchecked: megatron_thing, other") as told:
        args = read_args(argparse.Namespace(lr=1e-3, megatron_thing=thing, other=3, train_env_vars={"A": "b"}))
    assert len(told) == 1
    assert (args.lr, args.megatron_thing, args.other, dict(args.train_env_vars)) == (1e-3, thing, 3, {"A": "b"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = read_args(args)
    assert again.megatron_thing is thing


def test_attributes_of_a_class_count_but_not_its_methods():
    args = read_args(type("Mine", (), {"lr": 1e-3, "save": lambda self: None})())
    assert (args.lr, args.save) == (1e-3, None)


def test_folders_begin_at_the_current_directory_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("model").mkdir()
    given = {"hf_checkpoint": "model", "ref_load": "me/model", "save": "~/out", "load": "out", "save_hf": "hf"}
    args = read_args(given)
    monkeypatch.chdir("/")  # where a worker may be
    read = read_args(args)
    assert {name: read[name] for name in given} == {
        "hf_checkpoint": f"{tmp_path}/model",
        "ref_load": "me/model",  # the name of a model on the hub
        "save": "/home/me/out",
        "load": f"{tmp_path}/out",
        "save_hf": f"{tmp_path}/hf",
    }


def test_critic_has_its_own_keys():
    args = read_args({"load": "/a", "save": "/b", "lr": 1.0, "critic_load": "/c", "critic_save": "/d", "critic_lr": 2.0,
                      "critic_lr_warmup_iters": 7})  # fmt: skip
    critic, actor = role_args(args, "critic"), role_args(args, "actor")
    assert (critic.load, critic.save, critic.lr, critic.lr_warmup_iters) == ("/c", "/d", 2.0, 7)
    assert (actor.load, actor.save, actor.lr, actor.lr_warmup_iters) == ("/a", "/b", 1.0, 0)
    assert args.load == "/a"
    other = role_args(read_args({"lr": 5.0, "save": "/x", "save_hf": "/y_{rollout_id}"}), "critic")
    assert (other.lr, other.save, other.load) == (5.0, "/x/critic", None)  # never the actor's folder
    assert other.save_hf == "/y_{rollout_id}/critic"
    assert role_args(read_args({"save_hf": "/y", "critic_save_hf": "/z"}), "critic").save_hf == "/z"


def test_keys_of_evaluation_replace_those_of_the_rollout():
    given = {"temperature": 0.7, "rollout_top_p": 0.9, "rollout_max_response_len": 8, "rollout_stop_token_ids": [3]}
    assert SamplingParams.for_eval(given) == SamplingParams.from_args(given) == SamplingParams(8, 0.7, 0.9, 0, (3,))
    given |= {"eval_temperature": 0, "eval_top_p": 1.0, "eval_top_k": 5, "eval_min_p": 0.1, "eval_max_response_len": 20}
    assert SamplingParams.for_eval(given) == SamplingParams(20, 0.0, 1.0, 5, (3,), 0.1)
    with pytest.raises(TrainArgsError, match=r"n_samples_per_eval_prompt=4: with eval_temperature=0"):
        read_args({"eval_temperature": 0, "n_samples_per_eval_prompt": 4})
    with pytest.raises(TrainArgsError, match=r"on_reward_timeout=0\.0 needs reward_timeout"):
        read_args({"on_reward_timeout": 0})


def test_function_path_is_imported():
    assert function_at("os.path.join", "key") is __import__("os").path.join
    for path, message in (
        ("join", "a dotted path such as"),
        ("os.path.jion", "args.key='os.path.jion' cannot be imported: .*jion"),
        ("no_such_module.f", "No module named 'no_such_module'"),
        ("os.sep", "is a str, not a function"),
    ):
        with pytest.raises(TrainArgsError, match=message):
            function_at(path, "key")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"train_backend": "megatron"}, r"args.exact=True needs train_backend='fsdp': megatron has a model of its own"),
        ({"lora_rank": 4, "lora_dropout": 0.1}, r"args.exact=True does not go with lora_dropout=0.1"),
    ],
)
def test_what_exact_mode_cannot_hold_is_refused(given, why):
    read_args(given)
    read_args({"exact": True})
    with pytest.raises(TrainArgsError, match=why):
        read_args({**given, "exact": True})
