"""The worker class of the Megatron groups that the tests of this folder share."""

from one_gloo_device import share_gloo_device

from workers.megatron.cpu import CpuMegatronTrainWorker

share_gloo_device()


class MegatronRank(CpuMegatronTrainWorker):
    """A `MegatronTrainWorker` on the CPU, with one gloo device."""
