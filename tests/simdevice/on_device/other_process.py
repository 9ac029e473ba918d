"""What another process does with the memory of a device. It imports little else, which would take seconds."""

import torch
from host_waits import simulated

from workers.device import opened_memory


def serve(tasks, answers):
    """Run the functions below that are sent, until None is."""
    while (task := tasks.get(timeout=100)) is not None:
        function, *given = task
        function(*given, tasks, answers)


def copy_shared(handle, tasks, answers):
    target = torch.zeros(1000).pin_memory()
    with opened_memory(handle, torch.device("cuda", 0)) as memory:
        target.copy_(memory, non_blocking=True)
    answers.put("closed")
    tasks.get(timeout=100)  # until it is overwritten
    answers.put(target.tolist())
    answers.put(simulated().faults())


def device_inside(handle, tasks, answers):
    with opened_memory(handle, torch.device("cuda", 1)):
        inside = torch.cuda.current_device()
    answers.put((inside, torch.cuda.current_device()))
