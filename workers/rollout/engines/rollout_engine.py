"""RolloutEngine: the interface to a generation engine. Implement it to put another engine behind a `RolloutWorker`."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from workers.data.rollout_data import LARGEST_SET
from workers.rollout.rollout_errors import RolloutError, WeightsError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        max_new_tokens: maximum length of a completion, in tokens.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: sample only from the most likely tokens that together have this probability; 1 keeps all tokens.
        top_k: sample only from this many of the most likely tokens; 0 keeps all tokens.
        stop_token_ids: a completion ends with the first of these tokens and includes it.
        min_p: sample only from tokens with at least this share of the most likely one's probability (Nguyen et al.
            2024, arXiv 2407.01082); 0 keeps all tokens. ``top_p`` applies to the tokens that ``top_k`` and ``min_p``
            keep.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0

    def __post_init__(self) -> None:
        def take(name: str, value: Any, ok: bool, expected: str) -> None:
            if not ok:
                raise ValueError(f"SamplingParams: {name}={getattr(self, name)!r}; expected {expected}")
            object.__setattr__(self, name, value)  # Python's own number, whatever was given

        new, top_k = as_integer(self.max_new_tokens), as_integer(self.top_k)
        temperature, top_p, min_p = map(_as_number, (self.temperature, self.top_p, self.min_p))
        take("max_new_tokens", new, new is not None and new >= 1, "an integer of at least 1")
        take("temperature", temperature, 0 <= temperature < math.inf, "a number of at least 0")
        take("top_p", top_p, 0 < top_p <= 1, "a number above 0 and at most 1")
        take("min_p", min_p, 0 <= min_p <= 1, "a number from 0 to 1")
        take("top_k", top_k, top_k is not None and top_k >= 0, "an integer of at least 0")
        try:
            stops = tuple(as_integer(token) for token in self.stop_token_ids)
        except TypeError:  # a single token
            stops = (None,)
        ok = all(token is not None and token >= 0 for token in stops)
        take("stop_token_ids", stops, ok, "a sequence of token ids, integers from 0 on")

    def greedy(self) -> SamplingParams:
        """Return parameters that take the most likely token each time."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out before one is drawn. Taking the most likely one draws nothing."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @classmethod
    def from_args(cls, args: Any) -> SamplingParams:
        """Read the sampling parameters from a training run's configuration; see `workers.train.args`.

        Raises:
            TrainArgsError: the configuration is invalid.
        """
        from workers.hf_files import end_tokens
        from workers.train.args import read_args

        args = read_args(args)
        stops = args.rollout_stop_token_ids
        return cls(
            max_new_tokens=args.rollout_max_response_len,
            temperature=args.temperature,
            top_p=args.rollout_top_p,
            top_k=args.rollout_top_k,
            stop_token_ids=tuple(end_tokens(args) if stops is None else stops),
            min_p=args.rollout_min_p,
        )

    @classmethod
    def for_eval(cls, args: Any) -> SamplingParams:
        """Read the sampling parameters of an evaluation: those of `from_args`, replaced by the ``eval_`` keys.

        Raises:
            TrainArgsError: the configuration is invalid.
        """
        from workers.train.args import read_args

        args = read_args(args)
        given = {
            "max_new_tokens": args.eval_max_response_len,
            "temperature": args.eval_temperature,
            "top_p": args.eval_top_p,
            "top_k": args.eval_top_k,
            "min_p": args.eval_min_p,
        }
        return replace(cls.from_args(args), **{name: value for name, value in given.items() if value is not None})


def as_integer(value: Any) -> int | None:
    """A value as Python's integer, such as one of numpy; None if it is not an integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _as_number(value: Any) -> float:
    """A value as Python's number; NaN if it is not a number."""
    try:
        return math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


FinishReason = Literal["stop", "length", "abort", "error"]
PauseMode = Literal["keep", "abort", "wait"]


@dataclass(frozen=True)
class SamplingMask:
    """The tokens that ``top_p``, ``top_k`` and ``min_p`` left to choose from, for each token of a completion: 4 bytes
    per kept token, and 4 per position.

    Attributes:
        token_ids: int32, those of all positions, one position after the other, in any order within one.
        lengths: int32, how many each position has; 0 if it had the whole vocabulary.
    """

    token_ids: array[int]
    lengths: array[int]

    @classmethod
    def whole(cls, count: int) -> SamplingMask:
        """The mask of ``count`` tokens that were drawn from the whole vocabulary."""
        return cls(array("i"), array("i", [0]) * count)

    def append(self, kept: Iterable[int] = ()) -> None:
        """Add a position.

        Args:
            kept: the tokens that were left; none for the whole vocabulary.
        """
        before = len(self.token_ids)
        self.token_ids.extend(kept)
        self.lengths.append(len(self.token_ids) - before)

    def copy(self) -> SamplingMask:
        """A mask that grows by itself."""
        return SamplingMask(self.token_ids[:], self.lengths[:])


@dataclass(frozen=True)
class RoutedExperts:
    """Which experts computed tokens, see `workers.data.routed_experts`: 2 bytes for each token, layer and expert.

    Attributes:
        ids: int16, those of all tokens, one token after the other: k of each hidden layer; -1 where they are not known,
            and in layers without experts.
        layers: number of hidden layers.
        k: number of experts of a token in a layer.
    """

    ids: array[int]
    layers: int
    k: int

    @classmethod
    def unknown(cls, count: int, layers: int, k: int) -> RoutedExperts:
        """Those of ``count`` tokens of which nothing is known."""
        return cls(array("h", [-1]) * (count * layers * k), layers, k)

    def __len__(self) -> int:
        """How many tokens these are."""
        return len(self.ids) // (self.layers * self.k)

    def of_tokens(self, begin: int, end: int | None = None) -> RoutedExperts:
        """A copy of those of some tokens."""
        size = self.layers * self.k
        return replace(self, ids=self.ids[begin * size : None if end is None else end * size])

    def known(self) -> RoutedExperts:
        """A copy without the last tokens of which nothing is known."""
        size, end = self.layers * self.k, len(self)
        nothing = array("h", [-1]) * size
        while end and self.ids[(end - 1) * size : end * size] == nothing:
            end -= 1
        return self.of_tokens(0, end)

    def fill(self, begin: int, others: RoutedExperts) -> None:
        """Take over the experts of tokens from ``begin`` on, where none are known."""
        size = self.layers * self.k
        nothing = array("h", [-1]) * size
        for at in range(0, len(others.ids), size):
            place = slice(begin * size + at, begin * size + at + size)
            if self.ids[place] == nothing:
                self.ids[place] = others.ids[at : at + size]

    def extend(self, ids: array[int], end: int) -> None:
        """Add the experts of the last tokens of a sequence. Those that are there already stay: a token keeps those
        that computed it first, also if it is computed again, with newer weights for example.

        Args:
            ids: the experts.
            end: number of tokens of the sequence.
        """
        size, have = self.layers * self.k, len(self)
        begin = end - len(ids) // size
        self.ids.extend(array("h", [-1]) * (size * (begin - have)))
        self.ids.extend(ids[size * max(0, have - begin) :])


TIES = 16
"""How many equal logits at the end of ``top_k`` may be kept besides. bfloat16 has few digits."""


def top_wanted(sampling_params: SamplingParams, most: int) -> int:
    """How many of the most likely tokens to ask for, so that `left_of_top` can find the sets.

    Args:
        sampling_params: of the request.
        most: how many there are at most: the size of the vocabulary, or a limit of the engine.

    Returns:
        0 if nothing is left out.
    """
    if not sampling_params.truncates:
        return 0
    return min(min(sampling_params.top_k or LARGEST_SET, LARGEST_SET) + TIES, most)


def largest_told(most: int, vocab_size: int | None) -> int | None:
    """Return `RolloutEngine.largest_mask` of an engine that uses `left_of_top`; ``most`` as for `top_wanted`."""
    most = min(most, LARGEST_SET + TIES)
    return None if most == vocab_size else max(0, most - 1)


def check_min_p(sampling_params: SamplingParams, largest_mask: int | None) -> None:
    """Raise if a set may be too large to be found by `left_of_top`. vLLM applies ``min_p`` before `LogProbs` of
    `workers.rollout.engines.vllm_worker`, so that the log-probability before it is not known.

    Args:
        sampling_params: of the request.
        largest_mask: see `largest_told`.

    Raises:
        ValueError: ``min_p`` needs another ``top_k``.
    """
    if largest_mask is None or not (sampling_params.min_p and sampling_params.truncates):
        return
    most = min(largest_mask, LARGEST_SET)
    if not 0 < sampling_params.top_k <= most:
        needed = f"top_k from 1 to {most} with vLLM" if most > 0 else "a larger max_logprobs"
        raise ValueError(
            f"SamplingParams: min_p={sampling_params.min_p} needs {needed}, so that the tokens that are left can be "
            "told"
        )


def left_of_top(
    log_prob: float, top: Mapping[int, float], wanted: int, vocab_size: int | None
) -> tuple[Sequence[int], float]:
    """Find the tokens that were left to choose from, where those that were left out have a log-probability of minus
    infinity.

    Args:
        log_prob: of the token, before the truncation.
        top: token -> log-probability of the ``wanted`` most likely ones, and perhaps of the token itself.
        wanted: see `top_wanted`.
        vocab_size: None if it is not known.

    Returns:
        The tokens, and the token's log-probability among them. If there may be more, no tokens, which stands for the
        whole vocabulary, and ``log_prob``: both are then those before the truncation.
    """
    kept = [token for token, one in top.items() if one > -9000.0]  # -9999 is vLLM's minus infinity in JSON
    if len(kept) >= wanted or len(kept) == vocab_size:
        return (), log_prob
    return kept, min(0.0, log_prob - math.log(math.fsum(math.exp(top[token]) for token in kept)))


@dataclass(frozen=True)
class Completion:
    """What an engine generated for one prompt.

    Attributes:
        token_ids: the generated tokens, including the stop token.
        log_probs: log-probability of each token, in nats, under the model at the sampling temperature (at temperature 1
            if it is 0). With a ``sampling_mask``, it is that of the distribution from which the token was sampled,
            renormalized over the tokens that were kept; otherwise, it is that before ``top_p``, ``top_k`` and ``min_p``
            truncate the distribution. A trainer computes the same for the same tokens and mask.
        finish_reason: "stop" if a stop token ended it, "length" if ``max_new_tokens`` did, "abort" if
            `RolloutEngine.abort` did, "error" if the environment failed: `collate` then leaves it out of training.
        weight_versions: version of the weights that generated each token; None if the engine does not report it, in
            which case all tokens have the worker's weight version.
        fingerprints: weight version -> fingerprint of the weights, as far as the worker knows it; added by the worker.
        loss_mask: one number per token, 0 for tokens that the policy did not choose, such as the output of a tool; None
            if it chose all of them. It becomes the ``loss_mask`` of the rollout data.
        info: what the engine's environment reports about the completion, such as whether a test passed. A reward
            function with a parameter ``info`` gets it.
        sampling_mask: the tokens that ``top_p``, ``top_k`` and ``min_p`` kept at each position; None if they kept the
            whole vocabulary everywhere, or if the engine does not report it. It becomes the ``sampling_mask`` of the
            rollout data.
        routed_experts: the experts of the prompt's and the completion's tokens; None if the engine does not report
            them. Those of the last token are unknown, because it was not computed yet. They become the
            ``routed_experts`` of the rollout data.
        token_rewards: one number per token, for rewards that were earned before the end, such as those of turns; None
            if the reward is one number. They become the ``token_rewards`` of the rollout data.
        rows: the rows of the rollout data that this rollout becomes, at least one; for example, a session with branches
            has several. None for exactly one row of the prompt and this completion. With ``rows``, the fields above are
            what a reward function gets, and ``finish_reason`` is that of the rollout.
        session: with the finish reason "abort", a picklable state from which an engine with sessions continues this
            one, if the completion is passed back as ``partial``; None if there is none.
        prompt_ids: the prompt from which the engine generated, as reported by the engine, if
            `RequestEngine.echo_prompts`; None otherwise.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_versions: list[int | None] | None = None
    fingerprints: Mapping[int, int] | None = None
    loss_mask: Sequence[float] | None = None
    info: Mapping[str, Any] | None = None
    sampling_mask: SamplingMask | None = None
    token_rewards: Sequence[float] | None = None
    rows: Sequence[Row] | None = None
    session: Any | None = None
    prompt_ids: Sequence[int] | None = None
    routed_experts: RoutedExperts | None = None


@dataclass(frozen=True)
class Row:
    """One of the rows of the rollout data that a rollout becomes; see `Completion.rows` and `workers.rollout.agents`.

    Attributes:
        prompt: the tokens before the first that was sampled, at least one.
        completion: the tokens behind it, with a ``loss_mask``: 1 for the tokens that are trained in this row. Without
            ``rows`` and ``session`` of its own.
    """

    prompt: list[int]
    completion: Completion


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        running: requests of which tokens are being generated.
        waiting: requests that were submitted and have not begun.
        cache_usage: share of the key/value cache in use, from 0 to 1; None if the engine has no limit, or its cache is
            a server's.
    """

    running: int
    waiting: int
    cache_usage: float | None = None


class RolloutEngine(ABC):
    """Generates completions and takes new weights. Each rollout worker's process has one engine.

    An engine has two interfaces. `generate` is for one batch, and every engine has it. Requests (`submit` to `load`)
    are for completions that begin and end at different times; engines that subclass `RequestEngine` have them.

    Attributes:
        weight_version: version of the weights in force, set by the worker and by `finish_update`; None if the engine
            has no complete weights.
        any_rank: whether engines do not depend on their worker's rank. If so, a `RolloutStream` lets the other workers
            continue when one dies, and starts a worker with another rank. Otherwise it restarts the worker at its rank,
            and the others get no prompts meanwhile.
        partial_updates: whether an update may leave out tensors, which then keep their values.
        sampling_masks: whether completions have a `Completion.sampling_mask` if `SamplingParams.truncates`.
        largest_mask: maximum number of tokens of a set in a sampling mask; None for any number.
        routed_experts: whether completions have `Completion.routed_experts`.
        exact_digest: what `exact_decoding.probe` returned, in exact mode; None otherwise.
        journals: whether `progress` returns states.
        keeps_weights: whether the engine still has its weights after `sleep`. If not, the worker has no weight version
            until the next update.
    """

    weight_version: int | None = 0
    any_rank = False
    partial_updates = False
    sampling_masks = False
    largest_mask: int | None = None
    routed_experts = False
    exact_digest: str | None = None
    journals = False
    keeps_weights = False

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Generate one completion per prompt.

        Args:
            prompts: token ids of each prompt, at least one; prompts may differ in length. The list may be empty.
            sampling_params: how to sample.
            seeds: one per prompt. The same prompt, seed and weights give the same completion in every batch.

        An engine with an environment adds a parameter ``extras``: name -> one value per prompt, of the columns that
        ``RolloutManager(engine_extras=...)`` names. `submit` gets ``extras`` of its prompt alone: name -> value.

        Raises:
            PromptError: the engine cannot generate from a prompt. It generates nothing then.
        """

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        seed: int,
        partial: Completion | None = None,
    ) -> Future[Completion]:
        """Begin a completion, and return a future of it.

        Args:
            prompt: token ids, at least one.
            sampling_params: how to sample. ``max_new_tokens`` includes the tokens of ``partial``.
            request_id: names the request in `abort`; no two unfinished requests may share it.
            seed: of the random numbers; any integer.
            partial: what another engine, or this one, has already generated for the prompt. The completion begins with
                its tokens, log-probabilities and versions, and continues.

        Raises:
            PromptError: the engine cannot generate from this prompt.
            RolloutError: the engine sleeps, was closed, or has no complete weights.
            ValueError: ``request_id`` is in use, or ``seed`` or ``partial`` is not valid.
        """
        raise self._no_requests("submit")

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests now. Their completions have the tokens so far and the finish reason "abort".

        Args:
            request_ids: those to end; unknown and finished ones are ignored. None for all.
        """
        raise self._no_requests("abort")

    def pause(self, mode: PauseMode = "keep") -> None:
        """Generate no tokens until `resume`. New requests wait. Returns when no token is being generated.

        Args:
            mode: what becomes of the requests that are running. "keep": they continue after `resume`; "abort": they
                end now; "wait": they end first.
        """
        raise self._no_requests("pause")

    def resume(self) -> None:
        """Continue after `pause`."""
        raise self._no_requests("resume")

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        raise self._no_requests("load")

    def progress(self, known: Mapping[str, tuple[int, int]]) -> Mapping[str, Any]:
        """Return the states of running requests from which another engine can continue, for a driver that keeps them in
        case this process dies. By default there are none.

        Args:
            known: request id -> (``number``, number of nodes) of the state that the driver has.

        Returns:
            request id -> `SessionState`, of those that the driver does not have, without the nodes that it has.
        """
        return {}

    def _no_requests(self, method: str) -> RolloutError:
        name = type(self).__name__
        return RolloutError(f"{name}.{method}(): {name} generates batches only; requests need a RequestEngine")

    # --- weights --------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Called when an update begins. Calls of `load_weights` follow, and then `finish_update` or `abandon_update`.
        Running requests wait until an update is finished."""
        self.weight_version = None

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some of the weights, in place. An update consists of several calls.

        Args:
            weights: pairs of a name as in the Hugging Face model's ``state_dict()`` and the whole tensor. The memory
                belongs to the caller: do not write to it, and keep no reference to it.
        """

    def finish_update(self, version: int) -> None:
        """Called when all tensors have been loaded. Running requests continue with the new weights, from the tokens
        that they have.

        Args:
            version: of the weights.
        """
        self.weight_version = version

    def abandon_update(self) -> None:  # noqa: B027  (optional)
        """Called when an update ends before all tensors have arrived. The engine has no complete weights until a later
        update is finished: it keeps requests waiting, and refuses new ones."""

    @abstractmethod
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of an update. Tied weights count once, under the first name."""

    # The three below prove an update: the worker compares what the engine holds with what the trainer sent.

    def weight_dtypes(self) -> dict[str, torch.dtype] | None:
        """Return the dtype in which the engine holds each tensor of `weight_shapes`, the same in all updates. May be
        called at any time.

        Returns:
            name -> dtype; None if the engine cannot read its weights back. `read_weights` is then not called, and the
            worker compares the tensors as they arrived, not as the engine holds them.
        """
        return None

    def weight_slices(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return the parts that this engine needs of some tensors, such as the heads of its tensor-parallel rank. Only
        these are sent to it. The same in all updates; may be called at any time.

        Returns:
            name -> (begin, end) for each dim of the whole tensor. The engine needs tensors that are not in it whole,
            which is the default for all. `load_weights` gets, and `read_weights` returns, tensors of the slice's
            shape; `weight_shapes` has the whole tensor's.
        """
        return {}

    def read_weights(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return tensors as the engine holds them now, not as they were loaded: cut out of fused tensors, and joined
        if several processes have them. May be called outside of an update, also while requests are running, and in an
        update between the last `load_weights` (or `load_raw`) and `finish_update`.

        Args:
            names: keys of `weight_shapes`.

        Returns:
            A tensor for each name, with the dtype of `weight_dtypes`, whole or the part of `weight_slices`, on any
            device. They are views of the engine's memory or copies: do not write to them. They are valid until the
            next update or `sleep`.

        Raises:
            RolloutError: the engine cannot read its weights back (`weight_dtypes` is None), the weights are not on the
                device, or tensors of an update have not come.
        """
        raise RolloutError(f"{type(self).__name__} does not tell its weights")

    # --- weights of another engine --------------------------------------------------------------------------------
    #
    # A worker that was started in the place of one that died gets the weights of another worker's engine, which has the
    # same class and arguments. They need no names of a checkpoint: an engine passes on what it has.

    def raw_weights(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape, dtype) of the tensors that the engine has made of the weights, in any form that
        `load_raw` takes back unchanged. By default there are none: then the engine gets weights from updates alone."""
        return {}

    @property
    def weights_id(self) -> str | None:
        """What identifies the weights in force, if they outlive the worker's process; None if they do not. An engine
        with the same id that is started in the place of this one has them already."""
        return None

    def read_raw(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return some of these tensors, or copies. Another thread than that of the worker's methods may call this, but
        not during an update. Requests may be running.

        Args:
            names: keys of `raw_weights`.

        Raises:
            RolloutError: the engine sleeps, or has no such tensors.
        """
        raise RolloutError(f"{type(self).__name__} does not pass its weights on to another engine")

    def load_raw(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load some of another engine's `raw_weights`: instead of `load_weights`, between `begin_update` and
        `finish_update`. May be called in another thread than that of the worker's methods.

        Args:
            weights: pairs of a name and a tensor; see `load_weights`.
        """
        self.load_weights(weights)

    # --- device memory --------------------------------------------------------------------------------------------

    def sleep(self) -> None:  # noqa: B027  (optional)
        """Free device memory. Weights and caches may be lost; an update follows `wake_up`."""

    def wake_up(self) -> None:  # noqa: B027  (optional)
        """Take the device memory back."""

    def close(self) -> None:  # noqa: B027  (optional)
        """End threads and processes, and free all memory. Unfinished requests fail."""


def check_tensor(name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Check a tensor of an update.

    Args:
        name: of the tensor.
        tensor: the tensor.
        shapes: of all tensors that the model has.
        model: what to call it.

    Raises:
        WeightsError: the model has none of this name, or of another shape.
    """
    shape = shapes.get(name)
    if shape is None:
        raise WeightsError(
            f"the weight update has a tensor {name!r}, but {model} has none of this name; use the names of its "
            f"state_dict() in transformers, such as {next(iter(shapes))!r}"
        )
    if shape != tuple(tensor.shape):
        raise WeightsError(
            f"the weight update has {name!r} with shape {tuple(tensor.shape)}, but the model's has shape {shape}"
        )
