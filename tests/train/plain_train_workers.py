"""Train workers without a model and without torch, so that groups start fast. They report what they received."""

import json
import os
import signal

from single_controller import Dispatch, register
from workers.train.train_worker import TrainWorker


class Manager:
    """What a train group needs from a rollout manager. As in the real one, `refresh` stays on the driver."""

    def __init__(self, name="manager", refresh=None):
        self.name, self.refresh, self.weight_version = name, refresh, None

    def __getstate__(self):
        return {**vars(self), "refresh": None}


class Plain(TrainWorker):
    """Records its calls. A checkpoint is a file that rank 0 writes."""

    def init(self, args, role, with_ref=False):
        self.args, self.role, self.with_ref = args, role, with_ref
        self.calls, self.weight = [], 0.0
        self.register_layout({"dp": self.world_size}, dp=self.rank)
        folder = args.critic_load if role == "critic" else args.load
        if folder is not None and os.path.exists(os.path.join(folder, "position")):
            with open(os.path.join(folder, "position")) as file:
                self.next_rollout_id = int(file.read()) + 1
                return self.next_rollout_id
        if args.user.get("fail_in_init") == self.rank:
            raise OSError("no disk")
        self.next_rollout_id = 0
        return 0

    def train(self, rollout_id, rollout_data_ref, **computed):
        if self.args.user.get("fail_at") == self.rank:
            raise ZeroDivisionError(f"rank {self.rank} cannot")
        self.weight += float(rollout_data_ref["x"].sum())
        self.next_rollout_id = rollout_id + 1
        return {"rollout_id": rollout_id, "rows": rollout_data_ref["x"].tolist(), "computed": sorted(computed)}

    def save_model(self, step, force_sync=False):
        folder = self.args.critic_save if self.role == "critic" else self.args.save
        if folder is not None and not self.rank:
            with open(os.path.join(folder, "position"), "w") as file:
                file.write(str(step))
        return folder

    def update_weights(self, version=None):
        self.weight_version = version
        return version

    asleep = False

    def sleep(self):
        self.asleep = True
        return 100 + self.rank

    def wake_up(self):
        self.asleep = False
        return 10 + self.rank

    def clear_memory(self):
        self.calls.append("clear_memory")

    def get_parallel_config(self):
        return {"dp_size": self.world_size}

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def double(self, rows):
        return 2 * rows

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def compute_log_prob(self, rows):
        """By row: its first token, and the number of real tokens of this rank's rows."""
        return rows["input_ids"][:, :1] + rows["attention_mask"].sum() * rows["attention_mask"].new_tensor([0, 1])

    def echo(self, value):
        return value

    # --- what the tests query --------------------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def said(self):
        return {
            "rank": self.rank,
            "role": getattr(self, "role", None),
            "with_ref": getattr(self, "with_ref", None),
            "version": self.weight_version,
            "manager": self.rollout_manager,
            "pid": os.getpid(),
            "weight": getattr(self, "weight", None),
            "calls": getattr(self, "calls", None),
            "asleep": self.asleep,
            "load": self.args.load if hasattr(self, "args") else None,
        }

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        """What Ray reports about this process."""
        import re

        import ray

        context = ray.get_runtime_context()
        held = ray._private.worker.global_worker.core_worker.resource_ids()
        bundles = {int(found[1]) for key in held if (found := re.search(r"_group_(\d+)_[0-9a-f]+$", key))}
        assigned = {key: amount for key, amount in context.get_assigned_resources().items() if "group" not in key}
        return {
            "group": ray.util.get_current_placement_group().id.hex(),
            "bundle": max(bundles, default=None),
            "assigned": assigned,
            "gpus": context.get_accelerator_ids()["GPU"],
            "devices": self.device_ids,
        }

    @register(Dispatch.ONE_TO_ALL)
    def variables(self, *names):
        """By name: the variable's current value, and whether it was set when the process started."""
        with open("/proc/self/environ", "rb") as file:
            first = dict(item.split("=", 1) for item in file.read().decode().split("\0") if "=" in item)
        return {name: (os.environ.get(name), name in first) for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def critic_said(self):
        """What the critic worker that this one reaches reports: a call from worker to worker."""
        import ray

        return ray.get(self.critic.said.remote())


class Meeting(Plain):
    """Ranks that enter a gloo collective; one of them dies before it completes."""

    def train(self, rollout_id, rollout_data_ref, **computed):
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        dist.barrier()
        if self.args.user.get("die") == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        one = torch.ones(1)
        dist.all_reduce(one)
        return {"sum": one.item()}


class Minimal(Plain):
    """Its methods accept and return no more than they must."""

    def update_weights(self):
        pass

    def sleep(self):
        pass

    def wake_up(self):
        pass


class Choosy(Plain):
    """Drops the manager that it has for one that it refuses."""

    def set_rollout_manager(self, manager):
        super().set_rollout_manager(manager)
        if getattr(manager, "name", None) == "other":
            raise TypeError("not for these workers")


class Counting(Plain):
    """Counts its versions by itself. Its next update fails, if that is set."""

    fails = False

    def update_weights(self, verify=None):
        self.verify = verify
        fails, self.fails = self.fails, False
        if fails:
            raise OSError("not sent")
        self.weight_version += 1
        return self.weight_version


class FailingUpdate(Plain):
    """Its next update fails, if that is set, and all do while a file is there."""

    fails = False

    def update_weights(self, version=None):
        fails, self.fails = self.fails, False
        if fails or os.path.exists(self.args.user.get("offline", "")):
            raise OSError("not sent")
        return super().update_weights(version)


class DiskFull(Plain):
    """Its background save fails. The error is reported once, then cleared."""

    failed = False

    def save_model(self, step, force_sync=False):
        self.failed = True
        return os.path.join(self.args.save, f"rollout_{step:07d}")

    def wait_for_save(self):
        failed, self.failed = self.failed, False
        if failed:
            raise OSError("disk full")


class ExportFails(Plain):
    """It fails, or dies, when its checkpoint is complete."""

    def save_model(self, step, force_sync=False):
        folder = super().save_model(step)
        latest = os.path.join(folder, "latest.json")
        before = ""
        if os.path.exists(latest):
            with open(latest) as file:
                before = json.load(file)["folder"]
        name = f"rollout_{step:07d}"
        with open(latest, "w") as file:
            json.dump({"folder": name + "_again" * (before == name), "rollout_id": step}, file)
        if self.args.user["death"]:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("no room for the export")

    def wait_for_save(self):
        with open(os.path.join(self.args.save, "waited"), "w"):
            pass


class Incomplete(TrainWorker):
    def init(self, args, role, with_ref=False):
        return 0

    def train(self, rollout_id, rollout_data_ref, **computed):
        return {}
