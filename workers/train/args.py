"""TrainArgs: every key of a training run's configuration, with its type, default and meaning; and `read_args`, which
turns what users have (an OmegaConf config, a mapping, a Namespace) into a complete and checked configuration.

The tables of all keys are in ARGUMENTS.md beside this file; ``python -m workers.train.args`` prints them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import pickle
import re
import warnings
from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from workers.train.args_checks import (
    TrainArgsError,
    check_algorithm,
    check_effects,
    check_rollout,
    check_together,
    check_value,
    warn_of_defaults,
)


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
    limits = {"of at least": least, "above": above, "at most": most, "below": below}
    metadata = {"meaning": meaning, "choices": choices, "limits": limits}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class TrainArgs:
    """The keys of a configuration. ARGUMENTS.md is generated from them, with the comments between them as headings."""

    if TYPE_CHECKING:  # of the DictConfig that `read_args` returns, for ``{**args, "lr": 1e-5}``

        def keys(self) -> KeysView[str]: ...
        def __getitem__(self, name: str, /) -> Any: ...

    # Model
    hf_checkpoint: str | None = _key(
        None, "folder or hub name of a Hugging Face model: its config, its tokenizer and the initial weights"
    )
    hf_config: dict[str, Any] | None = _key(
        None,
        "instead of hf_checkpoint: a Hugging Face config as a dict with `model_type`, with random weights from `seed`",
    )
    model_name: str | None = _key(None, "expected `model_type` of the model; another one is an error")
    vocab_size: int | None = _key(
        None,
        "vocabulary size; by default the tokenizer's length, or the config's without a tokenizer. If set, token ids of "
        "rollout data must be below it; otherwise below the model's own size",
        least=1,
    )
    trust_remote_code: bool = _key(False, "whether code that comes with hf_checkpoint may run")
    param_dtype: str = _key("fp32", "dtype of the model's computation", choices=("fp32", "bf16", "fp16"))
    fp32_lm_head: bool = _key(
        False,
        "with bf16 or fp16: compute the actor's output layer, and so the logits, in float32, from weights in "
        "param_dtype; logits then take twice the memory",
    )
    seed: int = _key(1234, "seed of random weights, of dropout, and of sampling unless rollout_seed is set")
    gradient_checkpointing: bool = _key(False, "recompute activations in the backward pass instead of storing them")
    exact: bool = _key(
        False,
        "fsdp: log-probabilities equal those of an HFEngine with exact=True, bit for bit; a check at the start raises "
        "an error if they do not",
    )

    # Backend and parallelism
    train_backend: str = _key("fsdp", "training backend", choices=("fsdp", "megatron"))
    tensor_model_parallel_size: int = _key(1, "megatron: tensor parallel size", least=1)
    pipeline_model_parallel_size: int = _key(1, "megatron: pipeline parallel size", least=1)
    expert_model_parallel_size: int = _key(
        1, "megatron: ranks among which the experts of a mixture of experts are distributed", least=1
    )
    expert_tensor_parallel_size: int | None = _key(
        None, "megatron: ranks that share each expert; by default tensor_model_parallel_size", least=1
    )
    use_distributed_optimizer: bool = _key(False, "megatron: shard the optimizer state over the dp ranks")
    megatron_to_hf_mode: str = _key(
        "raw", "accepted for slime's command lines; there is no other mode", choices=("raw",)
    )
    megatron_overrides: dict[str, Any] = _key({}, "megatron: fields of TransformerConfig to override")
    fsdp_shard_size: int | None = _key(
        None, "fsdp: ranks that shard one copy of the model; fewer than all ranks means HSDP", least=1
    )
    sequence_parallel_size: int = _key(
        1,
        "fsdp: consecutive ranks that share the sequence of each micro-batch (Ulysses); it divides the number of ranks "
        "and of attention heads",
        least=1,
    )
    fsdp_reduce_dtype: str = _key(
        "fp32",
        "fsdp: dtype of the gradient reduction; fp64 adds micro-batches up in it too, and reduces once per step",
        choices=("fp32", "bf16", "fp16", "fp64"),
    )
    fsdp_cpu_offload: bool = _key(False, "fsdp: always keep parameters and optimizer state in host memory")

    # Mixtures of experts
    moe_aux_loss_coeff: float = _key(
        0.0, "coefficient of the load-balancing loss of each layer of a mixture of experts", least=0
    )
    moe_z_loss_coeff: float = _key(
        0.0, "coefficient of the z-loss of its routers, the mean squared logsumexp of their logits", least=0
    )
    moe_router_load_balancing_type: str = _key(
        "seq_aux_loss",
        "balance the experts in each row, which does not depend on micro-batches or ranks, or in each micro-batch",
        choices=("seq_aux_loss", "aux_loss"),
    )
    routing_replay: str | None = _key(
        None,
        "compute each token with recorded experts: those of the rollout (R3), or those of the trainer's own pass for "
        "old log-probabilities (R2); see docs/routing-replay.md",
        choices=("R2", "R3"),
    )
    use_routing_replay: bool = _key(False, "slime's name for routing_replay=R2")
    use_rollout_routing_replay: bool = _key(False, "slime's name for routing_replay=R3")

    # LoRA
    lora_rank: int = _key(
        0, "fsdp: rank of the LoRA adapter that the actor trains, instead of all its weights; 0 for none", least=0
    )
    lora_alpha: int = _key(16, "the adapter's output is multiplied by lora_alpha / lora_rank", least=1)
    lora_dropout: float = _key(0.0, "probability of dropout on the adapter's input", least=0, below=1)
    lora_target_modules: list[str] = _key(
        ["all-linear"],
        "modules that get an adapter, such as q_proj; all-linear for all linear layers except the output layer",
    )

    # Optimizer
    lr: float = _key(1e-6, "learning rate", least=0)
    min_lr: float = _key(0.0, "learning rate at the end of the decay", least=0)
    lr_warmup_iters: int = _key(0, "optimizer steps of linear warm-up to lr", least=0)
    lr_decay_style: str = _key("constant", "schedule after the warm-up", choices=("constant", "linear", "cosine"))
    lr_decay_iters: int | None = _key(
        None, "optimizer step, from 0, at which min_lr is reached; by default the first one after the run", least=1
    )
    adam_beta1: float = _key(0.9, "AdamW's beta1", least=0, below=1)
    adam_beta2: float = _key(0.999, "AdamW's beta2", least=0, below=1)
    adam_eps: float = _key(1e-8, "AdamW's epsilon", least=0)
    weight_decay: float = _key(0.0, "AdamW's decoupled weight decay; megatron excludes norms and biases", least=0)
    clip_grad: float = _key(1.0, "maximum norm of the whole gradient; 0 disables clipping", least=0)
    critic_lr: float | None = _key(None, "lr, for the critic role; by default lr", least=0)
    critic_lr_warmup_iters: int = _key(0, "lr_warmup_iters, for the critic role", least=0)

    # Advantages
    advantage_estimator: str = _key(
        "grpo",
        "grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gae (PPO with a critic), opo, remax, "
        "grpo_passk, maxrl, gdpo or optimal_token_baseline; or a name that you have registered, or the dotted path of "
        "a function",
    )
    grpo_std_normalization: bool = _key(
        True, "grpo, grpo_passk and gdpo: divide advantages by the group's standard deviation"
    )
    passk_k: int | None = _key(
        None,
        "grpo_passk: number of completions of which the best counts; by default all of a group",
        least=2,
    )
    gdpo_weights: dict[str, float] = _key({}, "gdpo: weights of the normalized rewards, by name; by default 1")
    normalize_advantages: bool = _key(
        True, "gae, reinforce_plus_plus(_baseline) and gdpo: whiten advantages over all tokens of a rollout"
    )
    gamma: float = _key(1.0, "gae and reinforce_plus_plus: discount per token", least=0, most=1)
    gae_lambda: float = _key(0.95, "gae: lambda", least=0, most=1)
    gae_lambda_value: float | None = _key(
        None, "gae: lambda of the critic's targets (decoupled GAE; 1 in VAPO); by default gae_lambda", least=0, most=1
    )
    gae_length_adaptive_alpha: float | None = _key(
        None,
        "gae: lambda of the policy's advantages is 1 - 1 / (alpha * length), instead of gae_lambda (0.05 in VAPO); by "
        "default it does not depend on the length",
        above=0,
    )
    overlong_filtering: bool = _key(
        False, "leave completions that rollout_max_response_len cut off (truncated) out of the loss"
    )
    overlong_buffer_len: int = _key(
        0, "last tokens before rollout_max_response_len in which the overlong penalty grows; 0 for no penalty", least=0
    )
    overlong_penalty_factor: float = _key(1.0, "reward that a completion of the maximum length loses", least=0)

    # Losses
    policy_loss_type: str = _key(
        "ppo_clip",
        "ppo_clip, gspo, cispo, sapo, gpg, geo_mean (GMPO), dro, dppo_tv, dppo_kl, clip_cov or kl_cov; sft (supervised "
        "fine-tuning) or dpo, which have no other advantage_estimator; or a name that you have registered, or the "
        "dotted path of a function",
    )
    eps_clip: float | None = _key(
        None,
        "clip of the policy ratio below 1; geo_mean: of its logarithm below 0; dppo_*: divergence above which tokens "
        "are masked. By default 0.2; gspo: 3e-4, geo_mean: 0.4, dppo_tv: 0.15, dppo_kl: 0.05",
        least=0,
    )
    eps_clip_high: float | None = _key(
        None,
        "the same above 1 (or 0), or at positive advantages; by default eps_clip, gspo without eps_clip: 4e-4",
        least=0,
    )
    eps_clip_dual: float | None = _key(
        None,
        "ppo_clip: clip of the policy ratio at negative advantages (dual clip), by default none; dppo_*: largest "
        "ratio, by default 20",
        above=1,
    )
    tau_pos: float | None = _key(None, "sapo: steepness of the gate at positive advantages; by default 1", above=0)
    tau_neg: float | None = _key(None, "sapo: the same at other advantages; by default 1.05", above=0)
    dro_beta: float | None = _key(None, "dro: weight of the squared log-ratio, halved; required", above=0)
    dppo_kl_tau: float | None = _key(
        None, "dppo_*: weight of the squared log-ratio; by default 0; 1e-3 in prime-rl, as kl_tau", least=0
    )
    clip_cov_ratio: float | None = _key(
        None, "clip_cov: share of the tokens of a step without a loss; by default 2e-4", above=0, most=1
    )
    clip_cov_lb: float | None = _key(None, "clip_cov: lower bound of their covariances; by default 1")
    clip_cov_ub: float | None = _key(None, "clip_cov: upper bound of their covariances; by default 5")
    kl_cov_ratio: float | None = _key(
        None, "kl_cov: share of the tokens of a step that are penalized; by default 2e-4", above=0, most=1
    )
    ppo_kl_coef: float | None = _key(
        None, "kl_cov: weight of the absolute log-ratio at these tokens; by default 1", least=0
    )
    dpo_beta: float | None = _key(
        None, "dpo: beta; larger values keep the policy closer to the reference; by default 0.1", above=0
    )
    value_clip: float = _key(
        0.2, "critic: clip of the change of values during the steps of a rollout; 0 disables it", least=0
    )
    loss_aggregation: str | None = _key(
        None,
        "token: mean over all tokens; sequence: mean over the completions' means; constant: mean over the completions' "
        "sums over loss_constant_length (Dr. GRPO). By default token; gspo, sapo, geo_mean: sequence; dpo: constant",
        choices=("token", "sequence", "constant"),
    )
    loss_constant_length: int | None = _key(
        None, "loss_aggregation=constant: number of tokens; by default rollout_max_response_len", least=1
    )

    # KL divergence and entropy
    kl_loss_coef: float = _key(0.0, "weight of the KL divergence from the reference in the loss", least=0)
    kl_loss_type: str = _key(
        "k3",
        "estimator of the KL divergence in the loss; k3 (low_var_kl) is bounded at 10 nats; k1+ and k3+ have the "
        "unbiased gradient",
        choices=("k1", "k2", "k3", "low_var_kl", "k1+", "k3+", "low_var_kl+"),
    )
    use_unbiased_kl: bool = _key(
        False,
        "multiply each token's KL term in the loss by p / p_old, and use the unbiased gradient: for several steps per "
        "rollout, or stale tokens with use_rollout_logprobs or keep_old_actor",
    )
    kl_coef: float = _key(
        0.0,
        "weight of the KL divergence from the reference (k1) that is subtracted from each token's reward, or its sum "
        "over the completion from the completion's",
        least=0,
    )
    kl_target: float | None = _key(
        None,
        "adapt kl_coef after each rollout, so that the KL divergence (k1), in nats per token, mean over completions, "
        "approaches this; by default kl_coef stays",
        above=0,
    )
    kl_horizon: float = _key(
        10000, "kl_target: number of completions in which kl_coef changes by at most 20 %", above=0
    )
    entropy_coef: float = _key(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = _key(False, "report the metric entropy also if entropy_coef is 0")

    # Corrections
    use_rollout_logprobs: bool = _key(
        False,
        "bypass mode: take old log-probabilities from the rollout instead of computing them; saves a forward pass",
    )
    rollout_correction: str | None = _key(
        None,
        "correction for tokens that another policy or engine generated: token_tis, seq_tis, geo_tis, token_mis, "
        "seq_mis, geo_mis, icepop, seq_mask_tis, token_rs, seq_rs, geo_rs, error_rs; one *_rs and another, joined by "
        "'+'; or report, which only adds metrics",
    )
    rollout_correction_low: float | None = _key(
        None, "lower bound of the importance weights; by default the preset's", least=0, most=1
    )
    rollout_correction_high: float | None = _key(
        None, "upper bound of the importance weights; by default the preset's", least=1
    )
    rollout_rejection_low: float | None = _key(
        None,
        "*_rs, seq_mask_tis: completions with a lower ratio are rejected; by default the preset's",
        least=0,
        most=1,
    )
    rollout_rejection_high: float | None = _key(
        None, "*_rs, seq_mask_tis: completions with a higher ratio are rejected; by default the preset's", least=1
    )
    rollout_correction_normalize: bool = _key(
        False, "divide the importance weights by their mean over the rollout (self-normalized importance sampling)"
    )
    opsm_delta: float | None = _key(
        None,
        "off-policy sequence masking: no policy loss for tokens of negative advantage in completions whose mean of "
        "log(p_rollout / p) is above this, in nats; by default none",
        least=0,
    )
    keep_old_actor: bool = _key(
        False,
        "keep the weights of the last two updates, and compute the old log-probabilities of each token with those that "
        "generated it; if those were lost in a resume, a recovery or a failed update, take the rollout's",
    )

    # Optimizer steps and micro-batches
    num_steps_per_rollout: int = _key(
        1, "optimizer steps per rollout; each gets a part of the rows, and all rows of a session", least=1
    )
    ppo_epochs: int = _key(1, "passes over each rollout", least=1)
    shuffle_minibatches: bool = _key(
        False, "in each epoch, assign each rank's rows to its optimizer steps in another random order, from seed"
    )
    num_critic_only_steps: int = _key(
        0, "critic warm-up: the first rollouts of a run, in which only the critic takes optimizer steps", least=0
    )
    max_tokens_per_micro_batch: int = _key(
        8192,
        "maximum number of tokens per micro-batch: those that are computed, padding included where rows are padded. "
        "Per rank: with sequence_parallel_size, a micro-batch has as many for each rank that shares it",
        least=1,
    )
    sequence_packing: bool | None = _key(
        None,
        "fsdp: compute the rows of a micro-batch without padding, and their common prefixes once; by default if the "
        "model supports it; true makes it an error if the model does not; false turns it off",
    )
    balance_data: bool = _key(
        False,
        "assign rows so that each optimizer step (with shuffle_minibatches: each rollout) costs about as much on all "
        "dp ranks; rows with a common prefix stay together where that saves more than it unbalances",
    )
    sequence_cost: list[float] | None = _key(
        None,
        "a and b of the cost a L + b L^2 of a row of L tokens, in any unit, for balance_data, the order of "
        "micro-batches and the metric cost_spread; by default the FLOPs of the model, see docs/training.md",
    )
    rollout_data_postprocess_path: str | None = _key(
        None,
        "dotted path of a function (args, rollout data) -> rollout data, called on each rank's rows before training; "
        "with gae it must not change, move or drop rows, because values were computed from them",
    )

    # Checkpoints and recovery
    load: str | None = _key(None, "folder of checkpoints to continue from: the latest, if there is one")
    ckpt_step: int | None = _key(
        None, "rollout id of the checkpoint in load to continue from; by default the latest", least=0
    )
    save: str | None = _key(None, "folder for save_model's checkpoints")
    save_interval: int | None = _key(None, "rollouts between checkpoints, for the driver's script", least=1)
    save_keep: int | None = _key(
        None,
        "number of the latest checkpoints to keep in save; older ones are deleted once a new one is complete. By "
        "default all are kept",
        least=1,
    )
    save_keep_every: int | None = _key(
        None,
        "with save_keep: also keep each checkpoint after a multiple of this many rollouts (rollout ids count from 0)",
        least=1,
    )
    async_save: bool = _key(False, "write checkpoints in the background")
    peer_snapshot_interval: int = _key(
        0,
        "rollouts between snapshots of each rank's state in the memory of another rank, from which "
        "RayTrainGroup.replace() continues after a death; 0 for none",
        least=0,
    )
    save_hf: str | None = _key(None, "folder for save_model's Hugging Face export; {rollout_id} in it is replaced")
    no_load_optim: bool = _key(False, "load only the weights of a checkpoint, not the optimizer state and step")
    ref_load: str | None = _key(None, "Hugging Face folder of the reference model; by default the initial weights")
    critic_load: str | None = _key(None, "load, for the critic role; by default the folder `critic` in load")
    critic_save: str | None = _key(None, "save, for the critic role; by default the folder `critic` in save")
    critic_save_hf: str | None = _key(None, "save_hf, for the critic role; by default the folder `critic` in save_hf")

    # Weight updates
    update_weights_interval: int = _key(1, "rollouts between weight updates, for the driver's script", least=1)
    update_weights_transport: str = _key(
        "store",
        "transport of weight updates: Ray's object store, a process group, files, or device memory for rollout "
        "workers on the train ranks' own devices",
        choices=("store", "group", "disk", "device"),
    )
    update_weights_bucket_bytes: int = _key(64 * 2**20, "size of a bucket in bytes", least=1)
    update_weights_disk_dir: str | None = _key(None, "disk: a folder that train and rollout workers share")
    update_weights_timeout_minutes: float | None = _key(
        None,
        "time for a whole weight update, all phases together; by default half of distributed_timeout_minutes, and at "
        "most 0.8 of it, so that an update fails before a collective does that waits for it",
        above=0,
    )
    update_weights_verify: str = _key(
        "none",
        "what rollout workers compare before they accept new weights: nothing, the digests of the tensors that have "
        "changed, or the digests of all tensors",
        choices=("none", "fingerprint", "full"),
    )
    update_weights_delta: bool = _key(
        False, "send only the elements that have changed; each train rank keeps a copy of its shards in host memory"
    )
    update_weights_full_every: int = _key(
        0, "delta: n sends whole tensors in every n-th update; 0 only to workers that need them", least=0
    )
    update_weights_double_buffer: bool | None = _key(
        None,
        "rollout workers keep the previous weights, and generate with them, until an update is complete; by default if "
        "they have the host memory",
    )

    # Workers, placement and memory
    actor_num_nodes: int = _key(1, "number of nodes of the actor; `place` only uses the number of ranks", least=1)
    actor_num_gpus_per_node: int = _key(2, "ranks of the actor per node (CPU slots without GPUs)", least=1)
    critic_num_nodes: int | None = _key(
        None, "number of nodes of the critic; by default the actor's. Both need the same number of ranks", least=1
    )
    critic_num_gpus_per_node: int | None = _key(None, "ranks of the critic per node; by default the actor's", least=1)
    rollout_num_workers: int = _key(1, "number of rollout workers", least=1)
    colocate: bool = _key(False, "train and rollout workers take turns on the same devices")
    offload_train: bool = _key(
        False,
        "for the driver's script: offload() the train workers between steps and onload() them; on megatron with GPUs "
        "it also loads torch_memory_saver",
    )
    train_memory_margin_bytes: int = _key(
        1 << 30, "warn if less device memory than this is free after onload()", least=0
    )
    enable_weights_backuper: bool = _key(
        True, "keep named copies of the weights in host memory; with_ref and keep_old_actor need it"
    )
    distributed_timeout_minutes: float = _key(10.0, "timeout of the train ranks' collectives", above=0)
    train_env_vars: dict[str, str] = _key({}, "environment variables of the train workers")
    debug_rollout_only: bool = _key(False, "create no model in the train workers, which train, send and save nothing")

    # Rollout and sampling
    num_rollout: int = _key(1, "number of rollouts; the learning rate decays over them", least=1)
    rollout_batch_size: int = _key(8, "prompts per rollout, for the driver's script", least=1)
    n_samples_per_prompt: int = _key(8, "completions per prompt, for the driver's script", least=1)
    rollout_max_response_len: int = _key(16, "maximum length of a completion, in tokens", least=1)
    temperature: float = _key(1.0, "sampling temperature, in training and in rollouts", above=0)
    rollout_top_p: float = _key(1.0, "sample from the most likely tokens with this total probability", above=0, most=1)
    rollout_top_k: int = _key(0, "sample from this many of the most likely tokens; 0 for all", least=0)
    rollout_min_p: float = _key(
        0.0, "sample from the tokens with at least this share of the most likely one's probability", least=0, most=1
    )
    rollout_stop_token_ids: list[int] | None = _key(
        None,
        "tokens that end a completion; by default the end-of-text tokens of hf_checkpoint, if it is set",
    )
    rollout_seed: int | None = _key(None, "seed of sampling, for the driver's script; by default seed")

    # Data
    rollout_data: list[str] | None = _key(
        None,
        "files with prompts (JSON Lines or Parquet), patterns of them, or hf:NAME for a dataset; see docs/data.md, and "
        "PromptData.from_args, which reads this and the following keys for the driver's script",
    )
    rollout_data_weights: list[float] | None = _key(
        None, "share of each of rollout_data in the run, in any unit; by default each row comes once per epoch"
    )
    rollout_shuffle: bool = _key(True, "give each epoch an order of its own, from seed")
    input_key: str = _key(
        "prompt", "column with the prompt: a text, a list of messages with role and content, or a list of token ids"
    )
    label_key: str | None = _key(
        None,
        "column that the reward function gets as `label`; by default all columns keep their names. sft: column of the "
        "completion, by default `completion`",
    )
    apply_chat_template: bool = _key(
        False, "treat a text as a message of the user; messages always use the chat template"
    )
    apply_chat_template_kwargs: dict[str, Any] = _key({}, "further variables of the chat template")
    rollout_max_prompt_len: int | None = _key(
        None,
        "leave out rows with longer prompts (sft: longer rows), in tokens; the metric data/too_long counts them",
        least=1,
    )
    on_bad_row: str = _key(
        "error",
        "a row that cannot be used is an error, or is left out and counted (data/bad)",
        choices=("error", "skip"),
    )

    # Rewards
    reward_function: str | None = _key(
        None,
        "exact_match, number_match, math_match or code_tests (see docs/data.md), or the dotted path of a function of "
        "texts, for the driver's script",
    )
    reward_concurrency: int | None = _key(
        128,
        "number of completions whose rewards an async reward function computes at once, for the driver's script; null "
        "for all",
        least=1,
    )
    reward_workers: int | None = _key(
        None, "processes that run the reward function, for the driver's script; null runs it in the driver", least=1
    )
    reward_timeout: float | None = _key(
        None,
        "seconds that one call of the reward function may take, for the driver's script; a plain function needs "
        "reward_workers for that",
        above=0,
    )
    on_reward_timeout: float | None = _key(
        None, "reward of a completion whose call takes longer than reward_timeout; by default that is an error"
    )

    # Evaluation
    eval_interval: int | None = _key(
        None, "rollouts between evaluations, for the driver's script; by default there are none", least=1
    )
    eval_data: list[str] | None = _key(None, "files with held-out prompts, read as rollout_data is, each row once")
    n_samples_per_eval_prompt: int = _key(1, "completions per prompt of an evaluation", least=1)
    eval_temperature: float | None = _key(
        None, "temperature in an evaluation; 0 takes the most likely tokens; by default temperature", least=0
    )
    eval_top_p: float | None = _key(None, "rollout_top_p in an evaluation; by default rollout_top_p", above=0, most=1)
    eval_top_k: int | None = _key(None, "rollout_top_k in an evaluation; by default rollout_top_k", least=0)
    eval_min_p: float | None = _key(None, "rollout_min_p in an evaluation; by default rollout_min_p", least=0, most=1)
    eval_max_response_len: int | None = _key(
        None, "rollout_max_response_len in an evaluation; by default rollout_max_response_len", least=1
    )
    eval_pass_threshold: float = _key(1.0, "reward from which on a completion counts as a success in pass@k")

    # Asynchronous rollout and dynamic sampling
    async_rollout: bool = _key(False, "generate while training, for the driver's script; see docs/async-rl.md")
    max_staleness: int = _key(
        0, "async: maximum age, in weight updates, of the weights that generated a token", least=0
    )
    on_stale: str = _key(
        "wait",
        "async: prompts that would become too old because others overtake them: do not overtake these, drop them, or "
        "train them",
        choices=("wait", "drop", "train"),
    )
    rollout_order: str = _key(
        "fifo", "async: train on prompts in their order, or let finished ones overtake", choices=("fifo", "window")
    )
    rollout_window: int | None = _key(
        None, "async: how many prompts may overtake one; by default two batches of them", least=1
    )
    update_weights_mode: str = _key(
        "wait",
        "async: an update waits for running completions, or interrupts them, and they continue with the new weights",
        choices=("wait", "interrupt"),
    )
    dynamic_sampling: bool = _key(False, "replace prompts whose completions all have the same reward by further ones")
    dynamic_sampling_max: int | None = _key(
        None, "replace at most this many prompts per batch and train on the others; by default four batches", least=0
    )

    # Tracking and profiling
    profile_step_start: int | None = _key(None, "first rollout id to record with torch's profiler", least=0)
    profile_step_end: int | None = _key(None, "rollout id after the last one to record", least=0)
    profile_dir: str | None = _key(None, "folder for the profiler's Chrome traces, one per role and rank")
    tensorboard_dir: str | None = _key(None, "folder for TensorBoard event files, for the driver's script")
    run_dir: str | None = _key(
        "auto", "the run's folder, see docs/runs.md; auto leaves the choice to the script, and null writes no folder"
    )
    loggers: list[str] = _key(
        [],
        "where the metrics are also sent: any of tensorboard, wandb, mlflow, swanlab, trackio, json, console and ray",
    )
    metric_names: str = _key("own", "names of the metrics for the loggers", choices=("own", "verl", "slime"))
    record_rows: int | None = _key(
        64, "rows of each step that the run's folder has; 0 for none, null for all, which a replay needs", least=0
    )
    record_steps: int = _key(200, "how many of the latest steps keep their rows", least=1)

    # Your own keys
    user: dict[str, Any] = _key({}, "your own keys")


_OR_HUB_NAMES = ("hf_checkpoint", "ref_load")
_FOLDERS = (
    *_OR_HUB_NAMES,
    *("load", "save", "save_hf", "critic_load", "critic_save", "critic_save_hf"),
    *("update_weights_disk_dir", "profile_dir"),
)
"""Folders that workers read and write."""


def read_args(given: Any = None) -> TrainArgs:
    """Complete and check a configuration.

    Args:
        given: an OmegaConf config or a mapping with keys of `TrainArgs`; or a Namespace (any object with attributes,
            those of its class included), whose own other attributes pass through with one warning; or None for the
            defaults.

    Returns:
        An OmegaConf ``DictConfig`` with every key of `TrainArgs` as an attribute, as which type checkers know it. Other
        attributes are errors. Relative folders, and those that begin with ``~``, are made absolute here: workers have
        another current directory.

    Raises:
        TrainArgsError: a key is unknown (the message has the closest one), or a value has the wrong type or is out of
            range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = {item.name: item for item in dataclasses.fields(TrainArgs)}
    values, extras = _split(given, known)
    typed, untyped, hints = _defaults()
    args = pickle.loads(typed)
    own: set[str] = set()
    for name, value in values.items():
        default = _default(known[name])
        if type(value) is type(default) in (bool, int, float, str, type(None)) and value == default:
            continue  # setting a value takes OmegaConf longer than all else here
        wanted = hints[name]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, str) and wanted in (list[str], list[str] | None):
            value = [value]
        if wanted == dict[str, float] and isinstance(value, Mapping):
            value = {key: float(one) if type(one) is int else one for key, one in value.items()}
        if wanted == list[float] | None and isinstance(value, Sequence) and not isinstance(value, str):
            value = [float(one) if type(one) is int else one for one in value]
        try:
            args[name] = float(value) if is_number and wanted in (float, float | None) else value
        except OmegaConfBaseException as error:
            why = str(error).partition("\n")[0]
            raise TrainArgsError(f"args.{name}={value!r}: expected {type_name(wanted)} ({why})") from None
        own.add(name)
    for name, item in known.items():
        if name in own:
            check_value(name, item, args[name])
    check_algorithm(args)
    check_rollout(args)
    check_together(args)
    changed = {name for name, item in known.items() if args[name] != _default(item)}
    check_effects(changed, args)
    for name in _FOLDERS:  # after the checks, whose messages have what was given
        path = args[name] and os.path.abspath(os.path.expanduser(args[name]))
        if path != args[name] and (name not in _OR_HUB_NAMES or os.path.isdir(path)):
            args[name] = path
    if type(given) is dict and values.keys() == known.keys():  # such as {**args, "policy_loss_type": "gspo"}
        warn_of_defaults(values, args)
    made = pickle.loads(untyped)
    for name in changed | own:
        made[name] = args._get_node(name)
    for name, value in extras.items():
        made[name] = value
    OmegaConf.set_struct(made, True)
    OmegaConf.set_struct(made.user, False)
    return cast(TrainArgs, made)


@functools.cache
def _defaults() -> tuple[bytes, bytes, dict[str, Any]]:
    """Return the pickled defaults, as a config that checks types and as one that takes other keys, and the types.

    OmegaConf takes twenty times as long to make a config as to unpickle it, and every rank reads the arguments.
    """
    from omegaconf import DictConfig, OmegaConf

    typed = OmegaConf.structured(TrainArgs)
    nodes = {item.name: typed._get_node(item.name) for item in dataclasses.fields(TrainArgs)}
    untyped = DictConfig(nodes, flags={"allow_objects": True})
    return pickle.dumps(typed), pickle.dumps(untyped), get_type_hints(TrainArgs)


def _default(item: dataclasses.Field[Any]) -> Any:
    factory = item.default_factory
    return item.default if factory is dataclasses.MISSING else factory()


def update_seconds(args: Any) -> float:
    """Return the seconds that a weight update may take."""
    minutes = args.update_weights_timeout_minutes
    return 60 * float(args.distributed_timeout_minutes / 2 if minutes is None else minutes)


def _meant(name: str, known: Mapping[str, Any]) -> str | None:
    """Return the key that an unknown one may stand for: one that is spelt almost alike, contains it, or has it as its
    meaning."""
    words, close = name.replace("_", " "), difflib.get_close_matches
    return next(
        iter(
            close(name, known, n=1, cutoff=0.8)
            or [key for key in known if len(name) > 3 and name in key]
            or [key for key, item in known.items() if item.metadata["meaning"].startswith(words)]
            or close(name, known, n=1)
        ),
        None,
    )


def _split(given: Any, known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from omegaconf import DictConfig, OmegaConf

    if given is None:
        return {}, {}
    if isinstance(given, TrainArgs):
        return {name: getattr(given, name) for name in known}, {}
    if isinstance(given, (DictConfig, Mapping)):
        passed = isinstance(given, DictConfig) and given._get_flag("allow_objects")
        items = {str(key): given[key] for key in given}
        if unknown := [name for name in items if name not in known]:
            if passed:  # a result of `read_args`, originally from a Namespace
                return {k: v for k, v in items.items() if k in known}, {k: items[k] for k in unknown}
            meant = _meant(unknown[0], known)
            hint = f"; did you mean {meant!r}?" if meant else "; put your own keys under 'user'"
            raise TrainArgsError(f"args has no key {unknown[0]!r}{hint}")
        return items, {}
    if isinstance(given, (str, int, float, list, tuple)) or not hasattr(given, "__dict__"):
        raise TrainArgsError(f"args must be an OmegaConf config, a mapping or a Namespace, got {given!r}")
    items = {name: value for name, value in vars(given).items() if not name.startswith("_")}
    extras = {name: value for name, value in items.items() if name not in known}
    if extras:
        names = ", ".join(sorted(extras))
        warnings.warn(f"args: unknown attributes are passed through unchecked: {names}", stacklevel=4)
    # Attributes of its class are values, too, but its methods are not: one may be named like a key, such as save().
    found = {name: getattr(given, name) for name in known if hasattr(given, name)}
    plain = {name: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for name, v in found.items()}
    return {name: value for name, value in plain.items() if name in items or not callable(value)}, extras


def table() -> str:
    """Return all keys as Markdown tables under the headings of `TrainArgs`: type, default and meaning."""
    lines: list[str] = []
    hints = get_type_hints(TrainArgs)
    known = {item.name: item for item in dataclasses.fields(TrainArgs)}
    for heading, name in re.findall(r"^    (?:# (.+)|(\w+): )", inspect.getsource(TrainArgs), re.MULTILINE):
        if heading:
            lines += ["", f"## {heading}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
            continue
        item = known[name]
        default = getattr(TrainArgs(), name)
        choices = item.metadata["choices"]
        kind = ", ".join(f'"{choice}"' for choice in choices) if choices else type_name(hints[name])
        shown = repr(default).replace("'", '"')
        lines.append(f"| `{name}` | {kind} | `{shown}` | {item.metadata['meaning']} |".replace(" | None", " or None"))
    return "\n".join(lines[1:])


def type_name(hint: Any) -> str:
    """Return the readable name of a type."""
    return str(hint.__name__ if type(hint) is type else hint).replace("typing.", "")


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
