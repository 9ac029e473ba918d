"""A training run's configuration: complete, validated, and documented on one page."""

import argparse
import pickle
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
    assert PAGE.read_text().endswith(table() + "\n"), "python -m workers.train.args prints the table"


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
        ({"use_routing_replay": True}, "use_routing_replay=True is not implemented.*rollout_correction"),
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
        ({"save_hf": "out/{step}"}, r"save_hf='out/{step}': the only placeholder is {rollout_id}"),
        ({"save": "out", "save_hf": "out/rollout_{rollout_id:07d}/hf"}, r"save_hf=.* is a checkpoint's folder"),
        ({"save": "out", "critic_save_hf": "./out/critic/rollout_{rollout_id:07d}"}, "is a checkpoint's folder"),
        ({"critic_save_hf": "out/{rollout_id"}, r"critic_save_hf=.* the only placeholder"),
        ({"profile_step_start": 1}, "set both"),
        ({"profile_step_start": 1, "profile_step_end": 1, "profile_dir": "x"}, "above profile_step_start=1"),
        ({"temperature": 0}, "args.temperature=0.0: expected a number above 0"),
        ({"rollout_top_p": 1.5}, "rollout_top_p=1.5: expected a number above 0 and at most 1"),
        ({"adam_beta1": 1.0}, "adam_beta1=1.0: expected a number of at least 0 and below 1"),
        (
            {"update_weights_timeout_minutes": 9},
            "9.0 is more than 0.8 of distributed_timeout_minutes=10",
        ),
        ({"save_keep": 0}, "args.save_keep=0: expected a number of at least 1"),
        ({"save_keep_every": 5}, "save_keep_every needs save_keep"),
        ({"distributed_timeout_minutes": 0}, "distributed_timeout_minutes=0.0: expected a number above 0"),
        ({"param_dtype": "fp16"}, "use 'bf16' or 'fp32' with fsdp"),
        ({"kl_coef": 0.1}, "kl_coef=0.1 needs advantage_estimator='gae' or 'reinforce_plus_plus'"),
        ({"advantage_estimator": "grop"}, "'grpo', 'rloo', .* or the dotted path of a function; did you mean 'grpo'?"),
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


def test_critic_has_its_own_keys():
    args = read_args({"load": "a", "save": "b", "lr": 1.0, "critic_load": "c", "critic_save": "d", "critic_lr": 2.0,
                      "critic_lr_warmup_iters": 7})  # fmt: skip
    critic, actor = role_args(args, "critic"), role_args(args, "actor")
    assert (critic.load, critic.save, critic.lr, critic.lr_warmup_iters) == ("c", "d", 2.0, 7)
    assert (actor.load, actor.save, actor.lr, actor.lr_warmup_iters) == ("a", "b", 1.0, 0)
    assert args.load == "a"
    other = role_args(read_args({"lr": 5.0, "save": "x", "save_hf": "y_{rollout_id}"}), "critic")
    assert (other.lr, other.save, other.load) == (5.0, "x/critic", None)  # never the actor's folder
    assert other.save_hf == "y_{rollout_id}/critic"
    assert role_args(read_args({"save_hf": "y", "critic_save_hf": "z"}), "critic").save_hf == "z"


def test_keys_of_evaluation_replace_those_of_the_rollout():
    given = {"temperature": 0.7, "rollout_top_p": 0.9, "rollout_max_response_len": 8, "rollout_stop_token_ids": [3]}
    assert SamplingParams.for_eval(given) == SamplingParams.from_args(given) == SamplingParams(8, 0.7, 0.9, 0, (3,))
    given |= {"eval_temperature": 0, "eval_top_p": 1.0, "eval_top_k": 5, "eval_max_response_len": 20}
    assert SamplingParams.for_eval(given) == SamplingParams(20, 0.0, 1.0, 5, (3,))
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
