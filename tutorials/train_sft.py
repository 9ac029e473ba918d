"""Supervised fine-tuning of a small language model, from which GRPO can continue.

    python tutorials/train_sft.py                                          # sums of two numbers, half of them wrong
    python tutorials/train_sft.py rollout_data=FILE.jsonl hf_checkpoint=FOLDER   # rows and a model of your own
    python tutorials/train_sft.py save=FOLDER save_interval=20             # continues from there if it was interrupted
    python tutorials/train_sft.py sequence_parallel_size=2                 # two ranks share each sequence

Pass any key of workers/train/ARGUMENTS.md as key=value; num_rollout is the number of steps. A row has a prompt and a
completion, or is a conversation: see docs/data.md. Without lora_rank, the last line printed is the command that trains
the result further with GRPO, which learns the right sums from a reward.
"""

import json
import random
import sys
import time
from pathlib import Path

import ray
from byte_tokenizer import byte_tokenizer
from omegaconf import OmegaConf
from rl_tasks import DATA_MODEL
from tqdm import tqdm
from train_grpo import MODEL

from workers import RayTrainGroup, RunLog, SFTData, read_args
from workers.hf_files import read_tokenizer

OUT = Path(__file__).parent / "out" / "sft"
USUAL = {
    "hf_config": {**MODEL, **DATA_MODEL},
    "policy_loss_type": "sft",
    "seed": 0,
    "num_rollout": 120,
    "rollout_batch_size": 64,
    "lr": 5e-3,
    "lr_decay_style": "cosine",
    "save_hf": str(OUT / "model"),
    "eval_interval": 20,
}


def write_sums(path, rows, wrong, seed=0):
    """Write rows ``{"prompt": "3+4=", "completion": "7", "answer": "7"}``, with the share ``wrong`` of completions that
    are wrong by one."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(rows):
            a, b = rng.randrange(5), rng.randrange(5)
            said = a + b + (rng.random() < wrong)
            file.write(json.dumps({"prompt": f"{a}+{b}=", "completion": f"{said}", "answer": f"{a + b}"}) + "\n")
    return str(path)


def mean_loss(group, rows):
    """Cross-entropy of rows, in nats per token that counts."""
    counts = rows["loss_mask"] != 0
    return -float(group.compute_log_prob(rows)[counts].mean())


def main():
    given = OmegaConf.to_container(OmegaConf.from_cli(sys.argv[1:]))
    given.pop("loss", None)  # by which `make demo` chooses this script
    own = {key: value for key, value in USUAL.items() if key != "hf_config" or "hf_checkpoint" not in given}
    own["load"] = given.get("save")  # to go on from there
    if "rollout_data" not in given:
        own["rollout_data"] = write_sums(OUT / "train.jsonl", 5000, wrong=0.5)
        own["eval_data"] = write_sums(OUT / "held_out.jsonl", 200, wrong=0.5, seed=1)
    args = read_args({**own, **given})
    began = time.monotonic()
    tokenizer = read_tokenizer(args) or byte_tokenizer()
    data = SFTData.from_args(args, tokenizer)
    held_out = SFTData.from_args(args, tokenizer, key="eval_data").all() if args.eval_data is not None else None
    with (
        RayTrainGroup(args, args.actor_num_nodes, args.actor_num_gpus_per_node) as group,
        RunLog.from_args(args, run_dir=OUT / "run", tokenizer=tokenizer) as log,
    ):
        start = ray.get(group.async_init())[0]
        log.watch(group)
        if start:
            data.load_state_dict(group.load_driver_state())
        print(f"{group} learns from {list(args.rollout_data)}; begins with step {start}", flush=True)
        for step in tqdm(range(start, args.num_rollout), desc="training", unit="step", mininterval=0.5):
            batch = log.mark(step, data(step))
            metrics = ray.get(group.async_train(step, batch))[0]
            last = step + 1 == args.num_rollout
            if held_out is not None and args.eval_interval and (last or step % args.eval_interval == 0):
                metrics["eval_loss"] = mean_loss(group, held_out)
            log.log(step, {**metrics, **data.metrics()}, batch)
            if last or (args.save is not None and (step + 1) % (args.save_interval or args.num_rollout) == 0):
                group.save_model(step, driver_state=data.state_dict(step))
        group.wait_for_save()
    if not log.column("loss"):
        sys.exit(f"Nothing to do: the checkpoint in {args.load} is of the last of {args.num_rollout} steps.")
    losses = log.column("eval_loss") or log.column("loss")
    print(f"\nLoss, in nats per token: first {losses[0]:.3f}, last {losses[-1]:.3f}; {time.monotonic() - began:.0f} s.")
    folder = args.save_hf and args.save_hf.format(rollout_id=args.num_rollout - 1)
    if folder is None:
        return
    tokenizer.save_pretrained(folder)
    if args.lora_rank:  # an adapter alone is no hf_checkpoint
        return
    further = "label_key=answer num_rollout=100 rollout_batch_size=16 lr=1e-3"
    print(
        f'GRPO goes on with it:\nmake demo ARGS="hf_checkpoint={folder} rollout_data={args.rollout_data[0]} {further}"'
    )


if __name__ == "__main__":
    main()
