"""Worker classes of the megatron tests, and functions for `Lab.run`."""

import gc
import os
import signal
import warnings

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from omegaconf import OmegaConf
from one_gloo_device import share_gloo_device
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from single_controller import Dispatch, register
from workers import MegatronLMWorker, ParallelLlamaMLP, init_model_parallel_config, transformer_config
from workers.distributed import end_process_groups, process_groups
from workers.megatron.cpu import CpuMegatronWorker

AXES = ("dp", "cp", "tp", "pp")

share_gloo_device()


class Modes(CpuMegatronWorker):
    """The four modes that use megatron's axes. Results contain the rank; each rank records what it received."""

    @register(Dispatch.MEGATRON_COMPUTE)
    def items(self, item):
        return self._saw("items", item), self.rank

    @register(Dispatch.MEGATRON_COMPUTE_PROTO)
    def rows(self, batch):
        return [(row, self.rank) for row in self._saw("rows", batch.tolist())]

    @register(Dispatch.MEGATRON_PP_AS_DP)
    def stage_items(self, item):
        return self._saw("stage_items", item), self.rank

    @register(Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def stage_rows(self, batch):
        return [(row, self.rank) for row in self._saw("stage_rows", batch.tolist())]

    @register(Dispatch.ONE_TO_ALL)
    def seen(self):
        return self.__dict__.pop("saw", {})

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        """(coordinates, sizes), each by axis, from megatron's own getters."""
        names = {"tp": "tensor_model", "pp": "pipeline_model", "dp": "data", "cp": "context"}
        return tuple(
            {axis: getattr(parallel_state, f"get_{names[axis]}_parallel_{what}")() for axis in AXES}
            for what in ("rank", "world_size")
        )

    def _saw(self, method, what):
        self.__dict__.setdefault("saw", {})[method] = what
        return what


class InConstructor(Modes):
    """What users write for GPUs: everything in the constructor, without the helper."""

    def __init__(self, tp):
        super().__init__()
        dist.init_process_group(backend="nccl")
        torch.cuda.set_device(self.device)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        tensor_parallel.model_parallel_cuda_manual_seed(10)
        self.layer = nn.Linear(2, 3).cuda()

    @register(Dispatch.ONE_TO_ALL)
    def of_the_constructor(self):
        return dist.get_backend(), self.layer.weight.device.type, torch.empty(1, device="cuda").device.type


class Replaceable(Modes):
    """Initializes megatron with the helper, so that ranks can be replaced. May be in a process with another one."""

    def __init__(self, tp):
        super().__init__()
        if not parallel_state.is_initialized():
            self.initialize_model_parallel(tp)

    @register(Dispatch.ONE_TO_ALL)
    def process_id_and_sum(self, kill=None):
        if self.rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor(self.rank + 1)
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return os.getpid(), int(total)


class Lab(Modes, MegatronLMWorker):
    """A process in which tests can initialize megatron repeatedly, with any sizes and any model."""

    sizes = None
    """The parallel sizes, if `train_model_workers.make` has set them."""

    def __init__(self):
        super(MegatronLMWorker, self).__init__()  # no model yet: see `become`

    @register(Dispatch.ONE_TO_ALL)
    def become(self, *args, **kwargs):
        """Become a language model worker with these arguments."""
        self.tear_down()
        MegatronLMWorker.__init__(self, *args, **kwargs)

    @register(Dispatch.ONE_TO_ALL)
    def tear_down(self):
        """Call megatron's `destroy_model_parallel`, and destroy the process groups that it leaves behind.

        A model, its buckets and its optimizer refer to each other and to process groups. Each process group has
        threads that wake a hundred times a second and end only when the garbage collector has freed all of them.
        """
        self.model = self.layer = self.sizes = self.kept_shards = None
        parallel_state.destroy_model_parallel()
        end_process_groups(process_groups())
        gc.collect()

    @register(Dispatch.ONE_TO_ALL)
    def set_up(self, tp=1, pp=1, **options):
        """Initialize with the base class's helper. Returns `where`."""
        self.tear_down()
        self.initialize_model_parallel(tp, pp, **options)
        return self.where()

    @register(Dispatch.ONE_TO_ALL)
    def have_tp(self, tp):
        """`set_up`, unless an earlier test of the file has left just these process groups. It saves half a second."""
        sizes = {"dp": self.world_size // tp, "cp": 1, "tp": tp, "pp": 1}
        if not parallel_state.is_initialized() or self.where()[1] != sizes:
            self.set_up(tp)

    @register(Dispatch.ONE_TO_ALL)
    def set_up_by_hand(self, **options):
        """Initialize with megatron's own functions. Returns `where`."""
        self.tear_down()
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(**options)
        return self.where()

    @register(Dispatch.ONE_TO_ALL)
    def initialise_again(self, **options):
        return self.initialize_model_parallel(**options)

    @register(Dispatch.ONE_TO_ALL)
    def run(self, function, *args, **kwargs):
        """Call ``function(worker, ...)`` on all ranks."""
        return function(self, *args, **kwargs)

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def run_on_views(self, function, *args, **kwargs):
        """Like `run`, with arguments that must not be changed: all ranks read one copy."""
        return function(self, *args, **kwargs)

    # --- the parallel layer ---------------------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def make_layer(self, config, **megatron_config):
        self.layer = ParallelLlamaMLP(OmegaConf.create(config), init_model_parallel_config(megatron_config))

    @register(Dispatch.MEGATRON_COMPUTE)
    def run_layer(self, x):
        with torch.no_grad():
            return self.layer(x)

    # --- where "cuda" is the CPU ----------------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    async def cuda_in_async(self):
        return torch.zeros(1, device="cuda").device.type, torch.ones(1).to("cuda").device.type

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    async def cuda_in_concurrent_async(self):
        return torch.zeros(1, device="cuda").device.type, torch.ones(1).to("cuda").device.type

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    def cuda_in_concurrent(self):
        return torch.zeros(1, device="cuda").device.type, torch.ones(1).to("cuda").device.type

    def cuda_unregistered(self):
        return torch.zeros(1, device="cuda").device.type, torch.ones(1).to("cuda").device.type


# --- functions for Lab.run ------------------------------------------------------------------------------------


def with_warnings(worker, **options):
    """Call `initialize_model_parallel`; return the texts of its warnings."""
    worker.tear_down()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.initialize_model_parallel(**options)
    return [str(warning.message) for warning in caught if "initialize_model_parallel" in str(warning.message)]


def random_numbers(worker):
    """One number from each generator, megatron's tracker last."""
    import random

    import numpy

    with tensor_parallel.get_cuda_rng_tracker().fork():
        tracked = torch.rand(1).item()
    return random.random(), numpy.random.rand(), torch.rand(1).item(), tracked


def count_parameters(worker):
    return sum(parameter.numel() for model in worker.model.models for parameter in model.parameters())


def make_transformer_config(worker, hf_config, overrides):
    """The overridden fields of the resulting config."""
    made = transformer_config(hf_config, overrides=overrides)
    return {name: getattr(made, name) for name in overrides}


def make_config(worker, config):
    """The fields of a megatron config that the tests check."""
    made = init_model_parallel_config(OmegaConf.create(config))
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    return {name: getattr(made, name) for name in (*names, "params_dtype", "sequence_parallel")}


def forward_and_gradients(worker, x, upstream):
    """The layer's output, and the gradients of its input and of this rank's parameters, by name."""
    x = x.requires_grad_()
    worker.layer.zero_grad()
    y = worker.layer(x)
    y.backward(upstream)
    parameters = {name: parameter.grad for name, parameter in worker.layer.named_parameters()}
    return {"tp": parallel_state.get_tensor_model_parallel_rank(), "y": y.detach(), "x": x.grad, **parameters}


def expert_coordinate(worker):
    """(rank, size) of expert parallelism, from megatron's own getters."""
    return (parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size())


def layer_from(worker, config, megatron_config):
    """Create a layer from config objects of any type."""
    worker.layer = ParallelLlamaMLP(config, megatron_config)


def own_parameters(worker):
    return {name: parameter.detach() for name, parameter in worker.layer.named_parameters()}


def whole_state(worker):
    return worker.layer.hf_state_dict()


def load(worker, state_dict):
    worker.layer.load_hf_state_dict(state_dict)


def load_fails(worker, state_dict):
    """The error of loading a wrong state dict, and whether all parameters are unchanged."""
    before = {name: parameter.detach().clone() for name, parameter in worker.layer.named_parameters()}
    try:
        worker.layer.load_hf_state_dict(state_dict)
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    same = all(torch.equal(parameter, before[name]) for name, parameter in worker.layer.named_parameters())
    return said, same


def spelled_cuda(worker):
    """spelling -> type of the tensor's device."""
    x = torch.ones(2, 2)
    layer = nn.Linear(2, 2)
    with torch.device("cuda"):
        inside = torch.zeros(1)
    made = {
        'zeros(device="cuda")': torch.zeros(1, device="cuda"),
        'empty(device="cuda:0")': torch.empty(1, device="cuda:0"),
        "tensor(device=torch.device)": torch.tensor([1], device=torch.device("cuda")),
        "full(device=current_device())": torch.full((1,), 1.0, device=torch.cuda.current_device()),
        "zeros_like(device=)": torch.zeros_like(x, device="cuda"),
        "new_zeros(device=)": x.new_zeros(1, device="cuda"),
        'to("cuda")': x.to("cuda"),
        'to(device="cuda")': x.to(device="cuda"),
        'to("cuda", dtype)': x.to("cuda", torch.float64),
        'to(torch.device("cuda", 0))': x.to(torch.device("cuda", 0)),
        "to(current_device())": x.to(torch.cuda.current_device()),
        ".cuda()": x.cuda(),
        ".cuda(0)": x.cuda(0),
        ".cuda(non_blocking=True)": x.cuda(non_blocking=True),
        "Module.cuda()": nn.Linear(2, 2).cuda().weight,
        'Module.to("cuda")': layer.to("cuda").weight,
        'Linear(device="cuda")': nn.Linear(2, 2, device="cuda").weight,
        "with torch.device": inside,
    }
    return {spelling: tensor.device.type for spelling, tensor in made.items()}


def cuda_keeps_the_rest(worker):
    """`to` with a dtype, and gradients, still work."""
    x = torch.ones(2, 2, requires_grad=True)
    moved = x.to("cuda", torch.float64)
    (moved.cuda() * 3).sum().backward()
    return moved.dtype, x.grad


def seeds_by_hand(worker, seed):
    """A user's own seeding, twice: two draws from the tracker, and whether the default generator was untouched."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(99)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        outside = torch.get_rng_state()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            first = torch.rand(3)
        after_one = torch.get_rng_state()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            second = torch.rand(3)
        untouched = torch.equal(outside, after_one) and torch.equal(outside, torch.get_rng_state())
        drawn.append((first, second, untouched))
    return drawn


def checkpointed_dropout(worker):
    """Megatron's checkpointing runs a dropout twice; the gradient shows whether both had the same mask."""
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    x = torch.ones(1000, requires_grad=True)

    def noisy(x):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(x, 0.5) * x

    y = tensor_parallel.checkpoint(noisy, False, x)
    y.sum().backward()
    return y.detach(), x.grad


def tensordict_on_cuda(worker, batch):
    """What a worker's method does first and last on GPUs, and the devices in between."""
    moved = batch.to("cuda")
    made = TensorDict({"y": torch.zeros(len(batch), device="cuda")}, [len(batch)], device="cuda")
    made["y"] = moved["x"] * 2
    devices = {str(tensor.device) for tensor in (moved["x"], batch.cuda()["x"], made["y"], moved[:1]["x"])}
    return devices, made.cpu()


def cuda_device_mesh(worker):
    """A mesh on "cuda": this rank's coordinates, and the sum over a row."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    worker.register_device_mesh("on_cuda", mesh)
    total = torch.ones(1).cuda()
    dist.all_reduce(total, group=mesh.get_group("tp"))
    return mesh.get_local_rank("dp"), mesh.get_local_rank("tp"), total.item()


def nccl_group(worker):
    """The backend of a new process group for which the user requests nccl."""
    group = dist.new_group(backend="nccl")
    backend = dist.get_backend(group)
    dist.barrier(group)  # another rank may still be connecting
    dist.destroy_process_group(group)
    return backend
