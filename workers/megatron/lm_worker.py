"""MegatronLMWorker: a ready-made worker for a language model over tp, pp and dp ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_count
from single_controller import Dispatch, register
from workers.distributed import all_or_none
from workers.hf_files import config_of
from workers.megatron.megatron_worker import MegatronWorker

if TYPE_CHECKING:
    import torch

    from workers.megatron.megatron_optimizer import AdamOptions


_ONLY_RESTART = (
    "MegatronLMWorker: the model cannot continue after replace(), shrink() or grow(). Call restart() of the group, and "
    "load the weights again"
)


def _to_all(group: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def _merge(group: Any, by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for own in by_rank for name, tensor in own.items()}


class MegatronLMWorker(MegatronWorker):
    """One rank of a Hugging Face decoder on megatron-core: log-probabilities, training steps, and weights in
    Hugging Face's format. The model itself is a `MegatronTrainModel`, as in `MegatronTrainWorker`.

    The model starts with random weights. A group of these workers can be restarted, but its ranks cannot be replaced.

    Args:
        hf_config: the config of a model in `SUPPORTED_MODELS`, a dict of one, or a folder with its config.json.
        parallel: keyword arguments of `MegatronWorker.initialize_model_parallel`, such as
            ``{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}``.
        optimizer: `AdamOptions` or a mapping of them; None for a model that is not trained.
        param_dtype: "fp32", "bf16" or "fp16".
        micro_batch_size: a micro-batch has at most as many tokens as this number of full rows.
        overrides: fields of megatron's ``TransformerConfig`` to set, see `transformer_config`.

    Raises:
        ValueError: the model is not supported or not divisible by the parallel sizes; the message has the reason.
        RuntimeError: this rank replaces another one, or was added.
        ImportError: megatron-core or transformers is not installed.
    """

    def __init__(
        self,
        hf_config: Any,
        parallel: Mapping[str, Any] | None = None,
        optimizer: AdamOptions | Mapping[str, Any] | None = None,
        *,
        param_dtype: str = "fp32",
        micro_batch_size: int = 1,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        from workers.megatron.megatron_model import MegatronTrainModel
        from workers.megatron.megatron_optimizer import AdamOptions

        check_count("micro_batch_size", micro_batch_size)
        if self.is_replacement:
            raise RuntimeError(_ONLY_RESTART)
        self.initialize_model_parallel(**dict(parallel or {}))
        self.micro_batch_size = micro_batch_size
        self.lr = AdamOptions.of(optimizer).lr
        self.model = MegatronTrainModel(
            config_of("hf_config", hf_config, False),
            param_dtype=param_dtype,
            optimizer=optimizer,
            max_tokens_per_micro_batch=1,  # `_data` sets it for each batch
            overrides=overrides,
        )

    def on_membership_change(self, generation: int) -> None:
        """Refuse: the model would keep process groups that have ended, and new ranks would have other weights."""
        raise RuntimeError(_ONLY_RESTART)

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, uneven="ragged")
    def compute_log_prob(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        temperature: float = 1.0,
    ) -> torch.Tensor | None:
        """Log-probability of each token but the first, given the tokens before it.

        Args:
            input_ids: (rows, tokens), integers, at least two tokens.
            attention_mask: (rows, tokens), 1 for real tokens; padding may be on either side.
            temperature: the logits are divided by it, unless it is 0.

        Returns:
            (rows, tokens - 1), float32. Undefined where the token or the one before it is padding.

        Raises:
            ValueError: on all ranks, if on any of them a shape or a token is wrong, or ``attention_mask`` has padding
                between tokens.
        """
        data = self._data(input_ids, attention_mask)
        log_probs = self.model.log_probs(data, temperature)
        return None if log_probs is None else log_probs[:, 1:].contiguous()

    @register(Dispatch.MEGATRON_COMPUTE_METRIC, uneven="ragged")
    def train_step(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """One step of Adam on the next-token loss, averaged over all tokens of the whole batch.

        Args:
            input_ids: (rows, tokens), integers, at least two tokens.
            attention_mask: (rows, tokens), 1 for real tokens; padding may be on either side.
            loss_mask: (rows, tokens), the weight of each token's loss. Defaults to 1 for every real token but the
                first of each row, which nothing predicts.

        Returns:
            loss (nats per token), tokens, grad_norm (before clipping) and lr. They are of the whole batch, so they are
            the same on every rank. The driver gets a list by dp rank.

        Raises:
            RuntimeError: the worker was made without an optimizer.
            ValueError: on all ranks, if on any of them a shape or a token is wrong, ``attention_mask`` has padding
                between tokens, or ``loss_mask`` counts padding or the first real token of a row.
        """
        import torch
        from megatron.core import parallel_state

        data = self._data(input_ids, attention_mask, loss_mask)
        tokens = data["loss_mask"].sum(dtype=torch.float64).to(self.model.device)
        torch.distributed.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        # Count over all dp ranks, because the loss is a mean over the whole batch, and gradients are summed.
        count = tokens.item()

        def loss(outputs: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return -(outputs.log_probs * batch.others["loss_mask"]).sum() / (count or 1.0), {}

        report = self.model.train_step(data, loss, lr=self.lr)
        return {"loss": report.sums["loss"], "tokens": count, "grad_norm": report.grad_norm, "lr": self.lr}

    @register(Dispatch.ONE_TO_ALL, inputs="view")
    def load_hf_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load the whole Hugging Face model's weights; each rank copies its shards.

        Raises:
            ValueError: a name is missing or unknown, a shape is wrong, or tied weights differ. No weight was changed.
        """
        self.model.load_hf_state_dict(state_dict)

    @register(Dispatch.ONE_TO_ALL)
    def load_hf(self, folder: str) -> None:
        """Load the weights from a folder written by ``save_pretrained`` that every rank can read. A rank reads only
        the tensors it needs.

        Raises:
            FileNotFoundError: the folder has no ``.safetensors`` files.
            ValueError: as in `load_hf_state_dict`.
        """
        from workers.megatron.hf_weights import read_folder

        self.model.load_hf_state_dict(read_folder(folder))

    @register({"dispatch_fn": _to_all, "collect_fn": _merge})
    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights as the Hugging Face model's ``state_dict()`` has them, whole, on the CPU; each expert under its
        name in Hugging Face's checkpoints. The driver gets one dict; each pipeline stage sends its own weights once."""
        from megatron.core import parallel_state

        from workers.megatron.config import tied
        from workers.megatron.hf_weights import EMBEDDING, HEAD, distinct_weights

        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        first = not parallel_state.get_tensor_model_parallel_rank()
        of_experts = (
            parallel_state.get_expert_data_parallel_rank(),
            not parallel_state.get_expert_tensor_parallel_rank(),
        )
        state: dict[str, torch.Tensor] = {}
        for weight in distinct_weights(self.model.models, self.model.hf_config):
            copy, sends = of_experts if weight.expert else (replica, first)
            if not copy:  # all its tensor-parallel ranks gather it
                state |= {name: tensor.cpu() for name, tensor in weight.whole() if sends}
        if tied(self.model.hf_config) and EMBEDDING in state:
            state[HEAD] = state[EMBEDDING]
        return state

    def _data(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        loss_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        from megatron.core import parallel_state

        # The ranks have different rows, and wait for each other in the step, or for each other's experts.
        dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        with all_or_none(ValueError, "invalid rows, by data-parallel rank", dp_group):
            data = checked_batch(input_ids, attention_mask, loss_mask)
            self.model.check_token_ids(data["input_ids"])
        self.model.max_tokens = self.micro_batch_size * input_ids.shape[-1]
        return data


def checked_batch(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, loss_mask: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Check a batch, and fill in the masks that were not given; see `MegatronLMWorker.train_step`.

    Returns:
        input_ids (int64), attention_mask (bool) and loss_mask (float32), each (rows, tokens).

    Raises:
        ValueError: ``input_ids`` is not (rows, tokens) of integers or has fewer than two tokens, a mask has another
            shape, ``attention_mask`` has padding between tokens, or ``loss_mask`` counts padding or the first real
            token of a row.
    """
    import torch

    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.shape[1] < 2:
        raise ValueError(
            "input_ids must be integers of shape (rows, tokens) with at least two tokens per row; got "
            f"{input_ids.dtype} {tuple(input_ids.shape)}"
        )
    for name, mask in (("attention_mask", attention_mask), ("loss_mask", loss_mask)):
        if mask is not None and mask.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)}; expected the shape of input_ids, {tuple(input_ids.shape)}"
            )
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    begins = real[:, 0].int() + (real[:, 1:] & ~real[:, :-1]).sum(1)
    if bool((begins > 1).any()):
        raise ValueError(
            f"the attention_mask of row {int((begins > 1).nonzero()[0])} has padding between its tokens; padding may "
            "only come before and after them"
        )
    predicted = torch.zeros_like(real)
    predicted[:, 1:] = real[:, 1:] & real[:, :-1]
    counts = predicted.float() if loss_mask is None else loss_mask.float()
    wrong = ((counts != 0) & ~predicted).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the loss_mask of row {row} counts token {token}, which no output predicts, because it is padding or has "
            "no real token before it; set loss_mask to 0 there"
        )
    # Micro-batches need a token in every row. Nothing is predicted in a row that is all padding.
    real = torch.cat([real[:, :1] | ~real.any(1, keepdim=True), real[:, 1:]], dim=1)
    return {"input_ids": input_ids.long(), "attention_mask": real, "loss_mask": counts}
