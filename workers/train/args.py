"""TrainArgs: every key of a training run's configuration, with its type, default and meaning.

`workers.train.read_args` makes a complete and checked configuration of what a user has. The table of all keys is in
ARGUMENTS.md beside this file; ``python -m workers.train.args`` prints it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints


def _key(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    limits = {"from": least, "above": above, "at most": most, "below": below}
    metadata = {"meaning": meaning, "choices": choices, "limits": limits}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class TrainArgs:
    """The keys; see each one's meaning."""

    # model
    hf_checkpoint: str | None = _key(
        None, "folder (or hub name) of a Hugging Face model: its config, its tokenizer, and its weights to begin with"
    )
    hf_config: dict[str, Any] | None = _key(
        None, "a Hugging Face config as a dict with `model_type`, instead of hf_checkpoint: random weights from `seed`"
    )
    model_name: str | None = _key(None, "the kind of model; by default the config's `model_type`")
    vocab_size: int | None = _key(
        None,
        "tokens; by default the tokenizer's length, or without a tokenizer the config's. Set, ids of rollout data are "
        "below it; else they are tokens that the model has",
        least=1,
    )
    trust_remote_code: bool = _key(False, "whether code that comes with hf_checkpoint may run")
    param_dtype: str = _key("fp32", "dtype that the model computes in", choices=("fp32", "bf16", "fp16"))
    seed: int = _key(1234, "of random weights, of dropout, and of the rollout's samples unless rollout_seed is set")
    gradient_checkpointing: bool = _key(False, "compute activations again in the backward pass instead of keeping them")

    # backend and parallelism
    train_backend: str = _key("fsdp", "which worker trains", choices=("fsdp", "megatron"))
    tensor_model_parallel_size: int = _key(1, "megatron: ranks that share each layer", least=1)
    pipeline_model_parallel_size: int = _key(1, "megatron: ranks that share the stack of layers", least=1)
    use_distributed_optimizer: bool = _key(False, "megatron: whether the dp ranks share the optimizer's state")
    megatron_to_hf_mode: str = _key(
        "raw", "megatron: how weights get Hugging Face's names; `raw` is this library's own table", choices=("raw",)
    )
    megatron_overrides: dict[str, Any] = _key({}, "megatron: fields of its TransformerConfig to set")
    fsdp_shard_size: int | None = _key(
        None, "fsdp: ranks that share one copy of the model; fewer than all makes it HSDP", least=1
    )
    fsdp_reduce_dtype: str = _key("fp32", "fsdp: dtype that gradients are summed in", choices=("fp32", "bf16", "fp16"))
    fsdp_cpu_offload: bool = _key(False, "fsdp: keep parameters and optimizer on the host, always")

    # optimizer
    lr: float = _key(1e-6, "learning rate", least=0)
    min_lr: float = _key(0.0, "learning rate at the end of the decay", least=0)
    lr_warmup_iters: int = _key(0, "steps of the optimizer in which the learning rate rises to lr", least=0)
    lr_decay_style: str = _key("constant", "course after the warm-up", choices=("constant", "linear", "cosine"))
    lr_decay_iters: int | None = _key(
        None, "step at which min_lr is reached; by default that of the last rollout", least=1
    )
    adam_beta1: float = _key(0.9, "AdamW's decay of the first moment", least=0, below=1)
    adam_beta2: float = _key(0.999, "AdamW's decay of the second moment", least=0, below=1)
    adam_eps: float = _key(1e-8, "AdamW's epsilon", least=0)
    weight_decay: float = _key(0.0, "AdamW's decoupled weight decay; megatron leaves norms and biases out", least=0)
    clip_grad: float = _key(1.0, "largest norm of the whole gradient; 0 for no clipping", least=0)

    # algorithm
    advantage_estimator: str = _key(
        "grpo", "grpo: rewards compared within their group; gae: by a critic (PPO)", choices=("grpo", "gae")
    )
    grpo_std_normalization: bool = _key(True, "grpo: whether advantages are divided by the group's standard deviation")
    normalize_advantages: bool = _key(True, "gae: whether advantages are whitened over all tokens of a rollout")
    gamma: float = _key(1.0, "gae: discount for each token", least=0, most=1)
    gae_lambda: float = _key(0.95, "gae: lambda", least=0, most=1)
    eps_clip: float = _key(0.2, "how far below 1 the ratio to the old policy counts", least=0)
    eps_clip_high: float | None = _key(None, "how far above 1; by default eps_clip", least=0)
    value_clip: float = _key(
        0.2, "critic: how far values may move from the old ones in one step; 0 for no limit", least=0
    )
    kl_loss_coef: float = _key(0.0, "weight of the divergence from the reference in the loss", least=0)
    kl_loss_type: str = _key("k3", "its estimator", choices=("k1", "k2", "k3"))
    kl_coef: float = _key(0.0, "gae: weight of the divergence (k1) that is taken off each token's reward", least=0)
    entropy_coef: float = _key(0.0, "weight of the entropy, which the loss rewards")
    loss_aggregation: str = _key(
        "token", "mean over all tokens, or over the answers' means", choices=("token", "sequence")
    )
    num_steps_per_rollout: int = _key(1, "steps of the optimizer that one rollout's rows are dealt to", least=1)
    ppo_epochs: int = _key(1, "times that a rollout is gone through", least=1)
    use_rollout_logprobs: bool = _key(False, "whether old log-probabilities are the rollout's, not computed again")
    temperature: float = _key(1.0, "logits are divided by it, in training and in rollouts", above=0)
    keep_old_actor: bool = _key(
        False, "keep the weights that the rollout has, and compute old log-probabilities by them"
    )

    # batches
    max_tokens_per_micro_batch: int = _key(8192, "tokens that go through the model at once, padding included", least=1)
    balance_data: bool = _key(False, "whether rows are dealt so that all dp ranks have about as many tokens")
    rollout_data_postprocess_path: str | None = _key(
        None,
        "dotted path of a function (args, rollout data) -> rollout data, run on each rank's rows before training; "
        "with gae it leaves the rows themselves as they are, for values were computed of them",
    )

    # checkpoints
    load: str | None = _key(None, "folder of checkpoints to go on from: its latest, if it has one")
    ckpt_step: int | None = _key(
        None, "rollout id of the checkpoint in load to go on from; by default the latest", least=0
    )
    save: str | None = _key(None, "folder that save_model writes checkpoints into")
    save_interval: int | None = _key(None, "rollouts between two checkpoints, for the driver's script", least=1)
    async_save: bool = _key(False, "write checkpoints in the background")
    save_hf: str | None = _key(
        None, "folder for save_model to export to as a Hugging Face model; {rollout_id} in it is replaced"
    )
    no_load_optim: bool = _key(False, "take the weights of a checkpoint, not its optimizer and step")
    ref_load: str | None = _key(None, "Hugging Face folder of the reference; by default the weights to begin with")
    critic_load: str | None = _key(None, "load, for the critic role; by default the folder critic in load")
    critic_save: str | None = _key(None, "save, for the critic role; by default the folder critic in save")
    critic_save_hf: str | None = _key(None, "save_hf, for the critic role; by default the folder critic in save_hf")
    critic_lr: float | None = _key(None, "lr, for the critic role; by default lr", least=0)
    critic_lr_warmup_iters: int = _key(0, "lr_warmup_iters, for the critic role", least=0)

    # weights to the rollout
    update_weights_interval: int = _key(
        1, "rollouts between two updates of the rollout's weights, for the driver's script", least=1
    )
    update_weights_transport: str = _key(
        "store",
        "how weights travel: through Ray's object store, by a process group of their own, by files, or from memory "
        "to memory, for rollout workers on the train ranks' own devices",
        choices=("store", "group", "disk", "device"),
    )
    update_weights_bucket_bytes: int = _key(64 * 2**20, "bytes that are sent at once", least=1)
    update_weights_disk_dir: str | None = _key(None, "disk: a folder that train and rollout workers share")
    enable_weights_backuper: bool = _key(
        True, "keep named copies of the weights on the host; without, with_ref and keep_old_actor are refused"
    )

    # memory
    offload_train: bool = _key(
        False,
        "for the driver's script: train workers give their device's memory away between steps, by offload() and "
        "onload(); on megatron with CUDA it loads torch_memory_saver too",
    )
    train_memory_margin_bytes: int = _key(
        1 << 30, "device memory that must be free after training wakes up; less is warned of", least=0
    )
    colocate: bool = _key(False, "train and rollout workers share their devices, in turn")

    # placement
    actor_num_nodes: int = _key(1, "nodes of the actor", least=1)
    actor_num_gpus_per_node: int = _key(2, "ranks of the actor on each (without CUDA: CPU slots)", least=1)
    critic_num_nodes: int | None = _key(
        None, "nodes of the critic; by default the actor's; it has as many ranks", least=1
    )
    critic_num_gpus_per_node: int | None = _key(None, "ranks of the critic on each; by default the actor's", least=1)
    rollout_num_workers: int = _key(1, "rollout workers", least=1)

    # rollout
    num_rollout: int = _key(1, "rollouts of the run: its learning rate decays over them", least=1)
    rollout_batch_size: int = _key(8, "prompts of a rollout, for the driver's script", least=1)
    n_samples_per_prompt: int = _key(8, "answers to each, for the driver's script", least=1)
    rollout_max_response_len: int = _key(16, "tokens of an answer, at most", least=1)
    rollout_top_p: float = _key(1.0, "answers are drawn from the likeliest tokens of this probability", above=0, most=1)
    rollout_top_k: int = _key(0, "answers are drawn from this many likeliest tokens; 0 for all", least=0)
    rollout_stop_token_ids: list[int] | None = _key(
        None,
        "an answer ends with one of them; by default with the tokens that end a text of hf_checkpoint, if it is set",
    )
    rollout_seed: int | None = _key(None, "of the rollout's samples, for the driver's script; by default seed")
    debug_rollout_only: bool = _key(False, "make no train workers' model: their methods do nothing")

    # run
    distributed_timeout_minutes: float = _key(10.0, "a collective that takes longer has failed", above=0)
    train_env_vars: dict[str, str] = _key({}, "environment of the train workers")
    use_routing_replay: bool = _key(False, "set ENABLE_ROUTING_REPLAY=1 for the actor role")
    profile_step_start: int | None = _key(None, "first rollout id that torch's profiler records", least=0)
    profile_step_end: int | None = _key(None, "the one after the last", least=0)
    profile_dir: str | None = _key(None, "folder for its Chrome traces, one for each role and rank")
    tensorboard_dir: str | None = _key(None, "folder for TensorBoard's event files, for the driver's script")
    user: dict[str, Any] = _key({}, "yours: anything")


def table() -> str:
    """Every key as a Markdown table: type, default and meaning."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    hints = get_type_hints(TrainArgs)
    for item in dataclasses.fields(TrainArgs):
        default = getattr(TrainArgs(), item.name)
        choices = item.metadata["choices"]
        kind = ", ".join(f'"{choice}"' for choice in choices) if choices else type_name(hints[item.name])
        shown = repr(default).replace("'", '"')
        lines.append(
            f"| `{item.name}` | {kind} | `{shown}` | {item.metadata['meaning']} |".replace(" | None", " or None")
        )
    return "\n".join(lines)


def type_name(hint: Any) -> str:
    """A type as a reader would say it."""
    if hint is type(None):
        return "None"
    if hasattr(hint, "__args__") and str(hint).find("|") >= 0:
        return " | ".join(type_name(part) for part in hint.__args__)
    return str(getattr(hint, "__name__", hint)) if not hasattr(hint, "__args__") else str(hint).replace("typing.", "")


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
