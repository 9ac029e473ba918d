"""The worker class of the Megatron groups that the tests of this folder share."""

from one_gloo_device import share_gloo_device

from workers.megatron.megatron_train_worker import MegatronTrainWorker

share_gloo_device()


class MegatronRank(MegatronTrainWorker):
    """A `MegatronTrainWorker` with one gloo device."""
