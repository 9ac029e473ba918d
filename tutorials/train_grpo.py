"""Teach a small language model by reinforcement learning: GRPO, or PPO with a critic, in one script.

    python tutorials/train_grpo.py                                     # FSDP on two ranks, one rollout worker
    python tutorials/train_grpo.py train_backend=megatron tp=2         # the same on megatron-core, tensor-parallel
    python tutorials/train_grpo.py colocate=true offload_train=true    # train and rollout share devices
    python tutorials/train_grpo.py advantage_estimator=gae             # PPO with a critic
    python tutorials/train_grpo.py task=sort                           # sort the prompt's digits
    python tutorials/train_grpo.py task=calculator                     # call a tool, and answer with its result
    python tutorials/train_grpo.py async_rollout=true max_staleness=1  # generate the next batch while training this one
    python tutorials/train_grpo.py engine=vllm                         # vLLM generates, in an environment of its own
    python tutorials/train_grpo.py eval_interval=10 eval_temperature=0 # evaluates held-out prompts
    python tutorials/train_grpo.py standby=1                           # continues if you kill -9 a trainer
    python tutorials/train_grpo.py lora_rank=8                         # trains a LoRA adapter, and sends only that
    python tutorials/train_grpo.py rollout_data=FILE.jsonl             # trains on prompts and labels of a file
    python tutorials/train_grpo.py moe=true                            # a mixture of four experts per layer

Pass any key of workers/train/ARGUMENTS.md as key=value. The model is a Llama of two layers with random weights;
hf_config.num_hidden_layers=4 changes it, and hf_checkpoint=FOLDER loads another model.
"""

import sys
import time
from pathlib import Path

import ray
from byte_tokenizer import byte_tokenizer
from omegaconf import OmegaConf
from reward_curve import plot_rewards
from rl_tasks import DATA_ARGS, DATA_MODEL, TASKS, open_data
from tqdm import tqdm

from single_controller import RayClassWithInitArgs, RayWorkerGroup, SingleControllerError
from workers import (
    AgentEngine,
    HFEngine,
    LoraSettings,
    RayTrainGroup,
    RolloutManager,
    RolloutStream,
    RolloutWorker,
    RunLog,
    SamplingParams,
    VLLMEngine,
    evaluate,
    place,
    read_args,
)
from workers.hf_files import read_tokenizer

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # vLLM has no kernels for heads below 32
    "max_position_embeddings": 64,
}
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
# The output layer too: its random weights are so small that no adapter below it makes a token likely.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]
DEFAULTS = {"seed": 0, "eps_clip": 0.2, "clip_grad": 1.0, "rollout_stop_token_ids": [], "calculate_entropy": True}


ROOT = Path(__file__).parent.parent
ENGINES = {
    "hf": (HFEngine, {}),
    # `make demo ARGS="engine=vllm"` makes this environment. The driver and the trainers need no vLLM.
    "vllm": (VLLMEngine, {"python": ROOT / ".venv-vllm" / "bin" / "python"}),
}


def arguments(given):
    """Return the task (None for data), the engine, the file for the plot, the number of standbys, and the training
    arguments, from key=value on the command line."""
    given = {SHORT.get(name, name): value for name, value in OmegaConf.from_cli(given).items()}
    from_data = "rollout_data" in given
    name = given.pop("task", "data" if from_data else "lucky")
    engine, out = given.pop("engine", "hf"), given.pop("out", None)
    standby, mixture = given.pop("standby", 0), given.pop("moe", False)
    if engine not in ENGINES:
        sys.exit(f"engine={engine}: expected one of {', '.join(ENGINES)}")
    if from_data != (name == "data") or name not in (*TASKS, "data"):
        sys.exit(f"task={name}: expected one of {', '.join(TASKS)}, or rollout_data instead")
    task = None if from_data else TASKS[name]
    out = Path(out) if out else Path(__file__).parent / "out" / f"grpo_{name}.png"
    own = {"vocab_size": task.vocab_size, **task.config} if task else DATA_MODEL
    model = {**MODEL, **(MIXTURE if mixture else {}), **own, **given.pop("hf_config", {})}
    model = {} if "hf_checkpoint" in given else {"hf_config": model}
    usual = {**model, **DEFAULTS, **(task.args if task else DATA_ARGS)}
    if from_data:  # the end of a message; hf_checkpoint knows its own
        usual["rollout_stop_token_ids"] = None if "hf_checkpoint" in given else [257]
    if standby:
        usual["peer_snapshot_interval"] = 1
    if given.get("exact") and engine != "hf":
        sys.exit(f"engine={engine}: only the engine hf computes exactly; leave out exact")
    if given.get("lora_rank"):
        if engine != "hf":
            sys.exit(f"engine={engine}: only the engine hf applies a LoRA adapter; leave out lora_rank")
        if "hf_checkpoint" not in given:  # experts cannot have an adapter
            usual["lora_target_modules"] = [name for name in LORA_TARGETS if not (mixture and name in EXPERTS)]
    return task, engine, out, standby, read_args({**usual, **given})


def main():
    task, engine, out, standby, args = arguments(sys.argv[1:])
    began = time.monotonic()
    data = None
    if task is None:
        data, reward, held_out = open_data(args)
        if args.eval_interval and held_out is None:
            sys.exit("eval_interval: set eval_data to files with held-out prompts")
        text = read_tokenizer(args) or byte_tokenizer()
    else:
        text = task if task.decode else None
        prompts_of_eval = task.held_out()
        reward, held_out = task.reward, (prompts_of_eval, task.columns(prompts_of_eval))
    with (  # the run's folder is opened after Ray has started, whose address it has
        place(args, standby=standby) as placement,
        RunLog.from_args(args, run_dir=out.with_suffix(""), tokenizer=text) as log,
    ):
        ranks = placement.actor.world_size - standby
        options = {"standby": standby}
        if args.train_backend == "megatron" and not placement.actor.use_gpu:
            from workers.megatron.cpu import CpuMegatronTrainWorker

            options["actor_cls"] = CpuMegatronTrainWorker  # Megatron itself needs CUDA
        actor = RayTrainGroup(args, 1, ranks, placement.actor, placement.share, **options)
        start = ray.get(actor.async_init(with_ref=bool(args.kl_loss_coef or args.kl_coef)))[0]
        groups = [actor]
        if placement.critic is not None:
            ranks = placement.critic.world_size - standby
            critic = RayTrainGroup(args, 1, ranks, placement.critic, placement.share, role="critic", **options)
            other = ray.get(critic.async_init())[0]
            if other != start:
                both = min(start, other) - 1
                sys.exit(f"The actor resumes with rollout {start}, the critic with {other}: pass ckpt_step={both}.")
            actor.connect(critic)
            groups.append(critic)
        model = args.hf_checkpoint or OmegaConf.to_container(args.hf_config)
        engine_cls, options = ENGINES[engine]
        options = {"param_dtype": args.param_dtype, **options}
        if args.exact:
            options = {"exact": True, "fp32_lm_head": args.fp32_lm_head, **options}
        if args.lora_rank:  # the engine has the same base model as the trainers, and only gets the adapter
            options = {"seed": args.seed, "lora": LoraSettings.from_args(args), **options}
        if task and task.agent:  # a session per completion: AgentEngine(HFEngine, model, ..., environment=...)
            engine_cls, model, options = AgentEngine, engine_cls, {"model": model, **task.agent, **options}
        rollout = RayWorkerGroup(
            placement.rollout,
            RayClassWithInitArgs(RolloutWorker, engine_cls, model, **options),
            collectives=False,  # one that dies is restarted alone
        )
        extras = ["expression"] if task and task.agent else []
        manager = RolloutManager.from_args(args, rollout, reward, engine_extras=extras)
        actor.set_rollout_manager(manager)
        log.watch(*groups, manager)

        def prompts(rollout_id):
            if data:
                return data(rollout_id)
            drawn = task.prompts(rollout_id, args.rollout_batch_size, args.seed)
            return drawn, task.columns(drawn)

        state = (actor.load_driver_state() or {}) if start else {}
        if data and start:
            data.load_state_dict(state.get("data"))
        stream = None
        if args.async_rollout or args.dynamic_sampling:
            stream = RolloutStream.from_args(args, manager, prompts)
            if start:
                stream.load_state_dict(state.get("stream"))
        if args.tensorboard_dir is not None:
            for group in (actor.worker_group, rollout):
                group.record_ranks(calls=1000)  # for the trace of calls at the end
        print(f"{actor} learns from {rollout}; begins with rollout {start}")
        if standby:
            pids = [rank.process.pid for rank in actor.worker_group.status().ranks]
            print(f"Kill a trainer: kill -9 one of {pids}", flush=True)

        progress = tqdm(total=args.num_rollout, initial=start, desc="training", unit="rollout", mininterval=0.5)

        def step(rollout_id):
            if rollout_id == start or rollout_id % args.update_weights_interval == 0:
                with log.timed("sync"):
                    actor.update_weights()
            with log.timed("rollout"):
                if args.offload_train:
                    for group in groups:
                        group.offload()
                if stream:
                    batch = stream.take()
                else:
                    ids, columns = prompts(rollout_id)
                    batch = manager.generate(ids, rollout_id=rollout_id, extras=columns)
            scores = manager.reward_metrics()
            if args.eval_interval and rollout_id % args.eval_interval == 0:
                with log.timed("eval"):
                    scores |= evaluate(
                        manager,
                        held_out[0],
                        extras=held_out[1],
                        sampling_params=SamplingParams.for_eval(args),
                        samples_per_prompt=args.n_samples_per_eval_prompt,
                        threshold=args.eval_pass_threshold,
                    )
            with log.timed("train"):
                if args.offload_train:
                    manager.offload()
                    for group in groups:
                        group.onload()
                batch = log.mark(rollout_id, batch)
                learning = [group.async_train(rollout_id, batch) for group in groups]  # all at once
                metrics = [ray.get(refs)[0] for refs in learning]
                if args.offload_train:
                    manager.onload()
            about_the_critic = {f"critic/{name}": value for of in metrics[1:] for name, value in of.items()}
            mean_reward = batch["rewards"].mean().item()
            scores |= (stream.metrics() if stream else {}) | (data.metrics() if data else {})
            noted = log.log(rollout_id, {"reward": mean_reward, **scores, **metrics[0], **about_the_critic}, batch)
            progress.set_postfix({name: f"{noted[name]:.2f}" for name in ("reward", "entropy") if name in noted})
            due = (rollout_id + 1) % (args.save_interval or args.num_rollout) == 0
            saves = args.save or args.save_hf or args.critic_save or args.critic_save_hf
            if saves and (due or rollout_id + 1 == args.num_rollout):
                state = {"stream": stream.state_dict()} if stream and args.save else {}
                state |= {"data": data.state_dict(rollout_id)} if data else {}
                for group in groups:
                    group.save_model(rollout_id, driver_state=(state or None) if group is actor else None)

        rollout_id = start
        while rollout_id < args.num_rollout:
            try:
                step(rollout_id)
                rollout_id += 1
            except (ray.exceptions.RayError, SingleControllerError) as error:
                begin = actor.replace() if standby else None  # and the critic's ranks
                if begin is None:
                    raise
                print(f"\nA trainer was replaced; training goes on with rollout {begin[0]}. {error}")
                rollout_id = begin[0]
                if args.offload_train:
                    for one in (manager, *groups):  # the step may have ended before
                        one.onload()
            progress.update(rollout_id - progress.n)
        progress.close()
        for group in groups:
            group.wait_for_save()
        if stream:
            stream.close()
        if args.tensorboard_dir is not None:  # the trace of calls opens in Perfetto
            for name, group in (("actor", actor.worker_group), ("rollout", rollout)):
                group.trace(Path(args.tensorboard_dir) / f"calls_{name}.json")

    rewards = log.column("reward")
    if not rewards:
        sys.exit(f"Nothing to do: the checkpoint in {args.load} is of the last of {args.num_rollout} rollouts.")
    print(f"\nMean reward by rollout: first {rewards[0]:.3f}, last {rewards[-1]:.3f}")
    parts = ", ".join(f"{part} {sum(log.column(f'seconds/{part}')):.1f} s" for part in ("rollout", "train", "sync"))
    print(f"{len(rewards)} rollouts: {parts}; {time.monotonic() - began:.0f} s in all with starting.")
    plot_rewards(out, rewards, task and task.goal)
    print(f"The reward curve is in {out}.")
    if log.run_dir:
        print(f"Look at its samples and ranks: python -m single_controller view {log.run_dir}")
    if task and args.num_rollout >= task.args["num_rollout"] and sum(rewards[-5:]) / len(rewards[-5:]) < task.goal:
        sys.exit(f"FAILED: the mean reward of the last five rollouts is below {task.goal}.")


if __name__ == "__main__":
    main()
