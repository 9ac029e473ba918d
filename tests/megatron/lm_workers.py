"""A MegatronLMWorker that can become another model on other axes, without starting processes anew."""

from single_controller import Dispatch, register
from workers import MegatronLMWorker, transformer_config
from workers.distributed import end_process_groups, process_groups


class ManyModels(MegatronLMWorker):
    """Not a model at first; `become` makes one."""

    def __init__(self):
        super(MegatronLMWorker, self).__init__()

    @register(Dispatch.ONE_TO_ALL)
    def become(self, *args, **kwargs):
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        self.decoder = None
        end_process_groups(process_groups())
        MegatronLMWorker.__init__(self, *args, **kwargs)

    @register(Dispatch.ONE_TO_ALL)
    def parameters_here(self):
        return sum(parameter.numel() for model in self.decoder.models for parameter in model.parameters())


def make_transformer_config(worker, hf_config, overrides):
    """The overridden fields of the config that comes of it."""
    made = transformer_config(hf_config, overrides=overrides)
    return {name: getattr(made, name) for name in overrides}
