"""RolloutWorker: one rank of a group that generates. You choose the engine behind it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from single_controller import Dispatch, register
from workers.data.collate import with_fingerprints
from workers.device import take_device, use_device
from workers.distributed import node_address
from workers.rollout.engines.rollout_engine import Completion, RolloutEngine, SamplingParams
from workers.rollout.rollout_errors import PromptError, RolloutError
from workers.rollout.stream.exchange import Exchange, Orders, Report, check_completion
from workers.weight_sync import WeightReceiver

if TYPE_CHECKING:
    import torch

    from workers.rollout.agents.gateway.gateway import Gateway


logger = logging.getLogger(__name__)


class Generated(NamedTuple):
    """What a worker returns for one prompt.

    Attributes:
        completion: None if the worker does not have the expected weight version, or its engine refused a prompt.
        weight_version: version of the weights that generated it; None if there were none, as during an update.
        rank: of the worker.
        refused: the engine's error about one of this worker's prompts, numbered within its own shard; or None.
    """

    completion: Completion | None
    weight_version: int | None
    rank: int
    refused: PromptError | None = None


class RolloutWorker(WeightReceiver):
    """Generates with an engine, and takes new weights for it.

    The weights that the engine starts with are version 0; updates count from 1.

    Args:
        engine: a subclass of `RolloutEngine`, or a function that returns an engine; `HFEngine` by default. It is called
            in the worker's process, after the worker has selected its device.
        args: positional arguments of the engine.
        kwargs: keyword arguments of the engine.

    Raises:
        TypeError: ``engine`` did not return an engine.
    """

    _taken: torch.device | None = None
    _gateway: Gateway | None = None

    def __init__(self, engine: Callable[..., RolloutEngine] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._taken = take_device(self.local_rank, self.device_ids)
        if engine is None:
            from workers.rollout.engines.hf_engine import HFEngine

            engine = HFEngine
        if not callable(engine):
            raise TypeError(
                f"RolloutWorker: engine must be a RolloutEngine class or a function that returns an engine, got "
                f"{engine!r}; pass the class, then its arguments: RayClassWithInitArgs(RolloutWorker, HFEngine, config)"
            )
        self.engine = engine(*args, **kwargs)
        if not isinstance(self.engine, RolloutEngine):
            raise TypeError(
                f"RolloutWorker: {engine!r} returned a {type(self.engine).__name__}, which is not a RolloutEngine"
            )
        self.weight_version = 0
        self._told_bias = False
        self._exchange = Exchange(self.fingerprints)
        self._cleanups.append(self.engine.close)

    def _prepare_thread(self) -> None:
        super()._prepare_thread()
        use_device(self._taken)

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="ragged")
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams,
        seeds: Sequence[int],
        expected_version: int | None = None,
        extras: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Generated]:
        """Generate one completion per prompt, in order.

        On a driver: ``group.generate(prompts, SamplingParams(), seeds)``.

        A worker with another weight version, or whose engine refuses a prompt or loses its weights, generates nothing
        and returns its version or the error. It does not raise, because that would fail the call for ranks that are
        still generating; the caller decides.

        Args:
            prompts: token ids of each, sharded over the ranks; shard sizes differ by at most one.
            sampling_params: how to sample.
            seeds: one per prompt.
            expected_version: the weight version to generate with; None for any complete version.
            extras: name -> one value per prompt, for the engine; see `RolloutEngine.generate`.

        Raises:
            RolloutError: the engine did not return one valid completion per prompt. The engine's own errors pass
                through.
        """
        # Read the version once, so that the one that is checked is also the one that is returned.
        version = self.weight_version
        if version is None or expected_version not in (None, version):
            return [Generated(None, version, self.rank)] * len(prompts)
        self._tell_bias(sampling_params)
        try:
            given: dict[str, Any] = {"extras": extras} if extras else {}
            completions = self.engine.generate(prompts, sampling_params, seeds, **given)
        except PromptError as error:
            return [Generated(None, version, self.rank, error)] * len(prompts)
        except RolloutError as error:
            if self.engine.weight_version is not None:
                raise
            logger.warning("rank %d has generated nothing: %s", self.rank, error)  # as without weights from the start
            return [Generated(None, None, self.rank)] * len(prompts)
        self._check(completions, prompts)
        tagged = [with_fingerprints(one, self.fingerprints, version) for one in completions]
        return [Generated(completion, version, self.rank) for completion in tagged]

    @register(Dispatch.ONE_TO_ALL)
    def records_experts(self) -> bool:
        """Return whether completions have ``routed_experts``, which a trainer with ``routing_replay="R3"`` needs."""
        return self.engine.routed_experts

    @register(Dispatch.ALL_TO_ALL)
    def exchange(self, orders: Orders) -> Report:
        """Begin and abort groups, and return those that are finished. `RolloutStream` calls it; see
        `workers.rollout.stream.exchange`.

        Args:
            orders: of this rank.

        Raises:
            RolloutError: the engine has no requests.
        """
        if not orders.copies:
            self.peer.stop()
        elif orders.held_weights is not None and self.weight_version != orders.version:
            self._take_held(orders)
        for group in orders.submit:
            self._tell_bias(group.sampling_params)
        # Send before the exchange, which waits: meanwhile, the copies make progress.
        for request in orders.send_weights:
            self.peer.send(request)
        # In this order: a copy that ends in between has a version then.
        version, updating = self.weight_version, self._update is not None
        report = self._exchange(orders, self.rank, self.engine, version, updating)
        # Ask after the exchange: meanwhile, the weights may have arrived.
        needed = self.peer.want(orders.version if orders.copies else None)
        return replace(
            report,
            needs_weights=needed,
            sending_weights=self.peer.sending,
            weights_id=self.engine.weights_id,
            any_rank=self.engine.any_rank,
        )

    @register(Dispatch.ONE_TO_ALL)
    def start_gateway(
        self,
        renderer: Any,
        sampling_params: SamplingParams | None = None,
        *,
        limits: Any = None,
        host: str | None = None,
        verify: bool = False,
    ) -> tuple[str, str]:
        """Serve sessions over HTTP in front of the engine, besides everything else that the worker does. A second call
        returns the same.

        Args:
            renderer: a `Renderer`, or a function that returns one.
            sampling_params: see `Gateway`.
            limits: see `Gateway`.
            verify: see `Gateway`.
            host: address to listen at; by default that of the worker's node in Ray.

        Returns:
            The endpoint, for a `GatewayRouter`.

        Raises:
            RolloutError: the engine has no requests.
        """
        from workers.rollout.agents.gateway.gateway import Gateway
        from workers.rollout.engines.request_engine import RequestEngine

        if self._gateway is None:
            # An AgentEngine has no requests, but the engine that plays its turns has.
            inner = self.engine if isinstance(self.engine, RequestEngine) else getattr(self.engine, "engine", None)
            if not isinstance(inner, RequestEngine):
                raise RolloutError(f"start_gateway(): {type(self.engine).__name__} generates batches only")
            gateway = Gateway(
                inner,
                renderer,
                sampling_params,
                limits=limits,
                host=host or node_address(),
                verify=verify,
                tag=lambda completion: with_fingerprints(completion, self.fingerprints, self.weight_version),
            )
            gateway.start()
            # Stop the gateway before the engine is closed. Otherwise, its sessions would get the engine's errors.
            self._cleanups.insert(0, gateway.stop)
            self._gateway = gateway
        return self._gateway.endpoint

    def _tell_bias(self, how: SamplingParams) -> None:
        """Warn once, before the first rollout, of what an engine without sampling masks, or with small ones, makes of
        ``top_p`` and ``top_k``."""
        engine = self.engine
        most = engine.largest_mask if engine.sampling_masks else 0
        if self._told_bias or not how.truncates or most is None or 0 < how.top_k <= most:
            return
        self._told_bias = True
        sets, use = "the tokens", "an engine with the sets"
        if most:
            sets, use = f"sets of more than {most} of the tokens", f"top_k from 1 to {most}"
        logger.warning(
            "%s does not return %s that top_p=%g, top_k=%d and min_p=%g leave to choose from. It samples from "
            "the distribution renormalized over them, but rollout_log_probs and the trainer's log-probabilities are "
            "those before: each token's importance weight against the sampler is wrong by the log of the probability "
            "that was kept%s. Use top_p=1, top_k=0 and min_p=0, or %s: docs/corrections.md",
            type(engine).__name__,
            sets,
            how.top_p,
            how.top_k,
            how.min_p,
            f", up to {-math.log(how.top_p):.2g} nats per token" if not how.top_k and not how.min_p else "",
            use,
        )

    def _take_held(self, orders: Orders) -> None:
        """Take the version of weights that the engine has kept when this worker's process was replaced."""
        if self.engine.weights_id == orders.held_weights:
            # Setting the version makes the engine ask its server which weights it has, so compare again below.
            # No copy of these weights begins in between, because only this thread begins copies.
            self.weight_version = orders.version
            if self.engine.weights_id != orders.held_weights:  # somebody else has updated them meanwhile
                self.weight_version = None

    def _check(self, completions: Any, prompts: Sequence[Sequence[int]]) -> None:
        returned = f"{type(self.engine).__name__}.generate() returned"
        if not isinstance(completions, (list, tuple)) or len(completions) != len(prompts):
            counted = isinstance(completions, (list, tuple))
            what = f"{len(completions)} completions" if counted else repr(completions)[:80]
            raise RolloutError(f"{returned} {what} for {len(prompts)} prompts; expected a list of one Completion each")
        for number, completion in enumerate(completions):
            check_completion(completion, returned, f"for prompt {number}")

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Free device memory for a trainer on the same device."""
        # Hold the lock for both steps, so that no thread copies the weights to another worker in between.
        with self.weights_lock:
            if not self.engine.keeps_weights:  # first, because an engine that sleeps may take no update
                self.weight_version = None
            self.engine.sleep()

    @register(Dispatch.ONE_TO_ALL)
    def wake_up(self) -> None:
        """Take the device memory back."""
        with self.weights_lock:
            self.engine.wake_up()

    @register(Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """`sleep`, under the name that train groups use."""
        self.sleep()

    @register(Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """`wake_up`, under the name that train groups use."""
        self.wake_up()
