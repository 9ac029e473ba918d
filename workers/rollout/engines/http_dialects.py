"""What `HTTPEngine` says to a server, and how it reads the answers: one class for each kind of server. And what the
server's log-probabilities are: `probe_log_probs` finds out.

Endpoints and fields are those of vLLM 0.32.0 (``vllm/entrypoints``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from workers.rollout.engines.http_client import Server, ServerError, run
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_errors import RolloutError, SamplingParamsError

DEV_MODE = "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1, which adds its endpoints for training"

Meaning = Literal["raw", "tempered", "processed"]
"""At temperature 1; at the sampling temperature, as engines promise; or at the sampling temperature after ``top_p`` and
``top_k``."""


class Part(NamedTuple):
    """What an event of a stream adds to a completion.

    Attributes:
        token_ids: the new tokens.
        log_probs: of these tokens, as the server means them.
        top: for each of these tokens, the log-probabilities of the most likely tokens, by what the server calls them;
            empty if they were not asked for.
        ended: the server's reason why there will be no more; None if there will be.
    """

    token_ids: list[int]
    log_probs: list[float]
    top: list[dict[str, float | None]]
    ended: str | None


class OpenAI:
    """A server with ``/v1/completions`` that takes and returns token ids, and has nothing for training.

    Args:
        server: where it is.
        model: name of the model in requests; None for the first that the server has.

    Attributes:
        folder: where the server read the model from; it need not exist on this host.
        positions: maximum number of tokens of a prompt and its completion; None if the server does not tell.
        coldest: the server raises lower temperatures to this one, except 0.
        pauses: whether the server has `pause` and `resume`.
        no_updates: why the server cannot take weights, and what to do; empty if it can.
        modes: how to change what the log-probabilities are.
        name: of the dialect.

    Raises:
        ServerError: the server could not be reached, or refuses.
    """

    coldest = 0.0
    pauses = False
    no_updates = "an OpenAI-compatible server has no endpoint for weights; with dialect='vllm' those of vLLM are used"
    modes = "look for an option of the server that changes what it returns"
    name = "openai"

    def __init__(self, server: Server, model: str | None) -> None:
        listed = server.get("/v1/models")
        cards = {card["id"]: card for card in listed.get("data", ())} if isinstance(listed, dict) else {}
        if not cards:
            raise ServerError(f"{server.url}/v1/models names no model: {listed!r:.300}")
        self.server = server
        self.model: str = next(iter(cards)) if model is None else model
        if self.model not in cards:
            raise ServerError(f"the server at {server.url} has no model {model!r}; it has {', '.join(cards)}")
        self.folder: str | None = cards[self.model].get("root")
        self.positions: int | None = cards[self.model].get("max_model_len")

    def body(self, prompt: Sequence[int], how: SamplingParams, new_tokens: int, seed: int, top: int) -> dict[str, Any]:
        """The body of a request for a stream.

        Args:
            prompt: token ids.
            how: how to sample.
            new_tokens: maximum number of tokens.
            seed: from 0 to 2^63 - 1.
            top: log-probabilities of so many of the most likely tokens are wanted besides that of the drawn one.
        """
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": how.temperature,
            "top_p": how.top_p,
            "seed": seed,
            "logprobs": top,
            "stream": True,
            "stop_token_ids": list(how.stop_token_ids),
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            **({"top_k": how.top_k} if how.top_k else {}),
            **({"min_p": how.min_p} if how.min_p else {}),
        }

    async def parts(
        self,
        prompt: Sequence[int],
        how: SamplingParams,
        new_tokens: int,
        seed: int,
        top: int,
        fields: Mapping[str, Any],
    ) -> AsyncIterator[Part]:
        """Generate; see `body`, to which ``fields`` are added, and `Server.events`."""
        body = {**self.body(prompt, how, new_tokens, seed, top), **fields}
        async for event in self.server.events("/v1/completions", body):
            for choice in event.get("choices") or ():  # an event without has numbers about the request
                found = choice.get("logprobs") or {}
                token_ids = choice.get("token_ids")
                if token_ids is None:
                    token_ids = [token_of(token) for token in found.get("tokens") or ()]
                most_likely = [of for of in found.get("top_logprobs") or () if of is not None]
                yield Part(token_ids, found.get("token_logprobs") or [], most_likely, choice.get("finish_reason"))

    def pause(self) -> None:
        """Have the server take no step."""
        raise NotImplementedError

    def resume(self) -> None:
        """Have the server go on."""
        raise NotImplementedError

    def reload(self, folder: str, version: str) -> None:
        """Have the server load the safetensors files of a folder, forget what it computed with the old weights, and
        remember ``version``. It takes no step meanwhile, and may be paused or not afterwards."""
        raise NotImplementedError

    def version(self) -> str | None:
        """What the last `reload` said, or what the server says until then; None if it does not remember."""
        return None

    def sleep(self) -> None:
        """Free the device's memory; the weights are kept elsewhere."""
        raise self.lacks("sleep")

    def wake_up(self) -> None:
        """Take the memory back."""
        raise self.lacks("sleep")

    def lacks(self, what: str) -> RolloutError:
        """The error for something that the server cannot do."""
        return RolloutError(f"the server at {self.server.url} has no endpoint for {what}() (dialect {self.name!r})")


class VLLM(OpenAI):
    """vLLM's server. Everything but generating needs its development mode."""

    name = "vllm"
    coldest = 0.01
    no_updates = ""
    modes = (
        "start vLLM with --logprobs-mode processed_logits "
        "--logits-processors workers.rollout.engines.vllm_worker:LogProbs, VLLM_USE_V2_MODEL_RUNNER=0 "
        "and this library on its PYTHONPATH, which is right for every SamplingParams "
        "(--logprobs-mode raw_logprobs is for temperature 1, processed_logprobs for top_p=1 and top_k=0)"
    )

    def __init__(self, server: Server, model: str | None) -> None:
        super().__init__(server, model)
        try:
            paused = server.get("/is_paused")["is_paused"]
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            paused, self.no_updates = False, f"its endpoints for weights are off; {DEV_MODE}"
        self.pauses = not self.no_updates
        if paused:  # by an engine that was killed, perhaps asleep. Waking up ends a pause, too
            self.wake_up()

    def body(self, prompt: Sequence[int], how: SamplingParams, new_tokens: int, seed: int, top: int) -> dict[str, Any]:
        """See `OpenAI.body`. What is not sent would be taken from the model's generation_config.json."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {**super().body(prompt, how, new_tokens, seed, top), "top_k": how.top_k, "min_p": how.min_p, **neutral}

    def pause(self) -> None:
        """See `OpenAI.pause`. Requests keep their keys and values."""
        self.server.post("/pause", mode="keep", clear_cache="false")

    def resume(self) -> None:
        self.server.post("/resume")

    def reload(self, folder: str, version: str) -> None:
        # Pause the server, so that no step runs while only some weights are new.
        self.pause()
        try:
            self._reload_weights(weights_path=folder)
        except ServerError:
            # vLLM keeps tensors until their layer is complete, and its next reload would count those of this one too. A
            # reload of no tensors finishes this one.
            with suppress(ServerError):
                self._reload_weights(weights_iterator=[])
            raise
        # Requests of others go back to the queue, because they hold keys and values of the old weights. A KV connector
        # may keep more of these, in host memory for example.
        reset = self.server.post("/reset_prefix_cache", reset_running_requests="true", reset_external="true")
        if not reset.get("success"):
            raise ServerError(f"the server at {self.server.url} could not reset its prefix cache; see its log")
        # Set the version last, so that a server that reports a version has all of its weights.
        self.server.post("/update_weight_version", {"new_version": version})

    def _reload_weights(self, **options: Any) -> None:
        self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": options})

    def version(self) -> str | None:
        if not self.pauses:
            return None
        found: str = self.server.get("/weight_info")["weight_version"]
        return found

    def sleep(self) -> None:
        """See `OpenAI.sleep`. vLLM must run with --enable-sleep-mode."""
        if not self.pauses:
            raise RolloutError(f"{self.lacks('sleep')}; {DEV_MODE}")
        self.server.post("/sleep", level="1", mode="keep")

    def wake_up(self) -> None:
        self.server.post("/wake_up")


DIALECTS: dict[str, type[OpenAI]] = {dialect.name: dialect for dialect in (VLLM, OpenAI)}


def probe_log_probs(dialect: OpenAI, fields: Mapping[str, Any]) -> Meaning:
    """Find out what a server's log-probabilities are, from those of the two most likely tokens.

    Args:
        dialect: of the server.
        fields: further fields of each request.

    Raises:
        RolloutError: they are logits, or the server returns none.
    """
    for token in range(1, 4):
        first, second = _best_two(dialect, fields, token)
        warm_first, warm_second = _best_two(dialect, fields, token, temperature=2.0)
        if first - second < 1e-2:
            continue  # the model does not know what it wants
        if abs(warm_first - warm_second - (first - second)) < (first - second) / 4:
            return "raw"  # the temperature does not bring the tokens closer together
        if abs(2 * warm_first - first) < 1e-4 and abs(2 * warm_second - second) < 1e-4:
            raise RolloutError(
                f"the server at {dialect.server.url} returns logits instead of log-probabilities; {dialect.modes}"
            )
        only, _ = _best_two(dialect, fields, token, temperature=2.0, top_k=1)
        return "tempered" if abs(only - warm_first) < 1e-3 else "processed"
    return "raw"  # not known; what allows the least


def _best_two(dialect: OpenAI, fields: Mapping[str, Any], token: int, **how: Any) -> tuple[float, float]:
    """Generate a token after ``token``, sampled as ``how`` says. Return the log-probabilities of the two most likely
    ones, which the server may say are minus infinity."""
    server = dialect.server

    async def read() -> list[Part]:
        async with asyncio.timeout(server.timeout):
            return [part async for part in dialect.parts([token], SamplingParams(1, **how), 1, 0, 2, fields)]

    try:
        parts = run(read()).result()
    except TimeoutError as error:
        raise server.broken("a request for one token", error) from error
    tokens = sum(len(part.token_ids) for part in parts)
    found = [log_prob for part in parts if part.top for log_prob in part.top[0].values()]
    if tokens != 1 or len(found) < 2:
        raise RolloutError(
            f"the server at {server.url} returned {tokens} tokens and {len(found)} log-probabilities for a request "
            "of one token and the two most likely ones; an engine needs token ids and log-probabilities"
        )
    first, second, *_ = sorted((-math.inf if one is None else one for one in found), reverse=True)
    return first, second


def check_log_probs(log_probs: Meaning, dialect: OpenAI, how: SamplingParams) -> None:
    """Raise a `SamplingParamsError` unless a server's log-probabilities would be those of `Completion`."""
    url = dialect.server.url
    if log_probs == "raw" and how.temperature not in (0, 1):
        is_, wanted = "at temperature 1", f"temperature={how.temperature}"
    elif log_probs == "processed" and how.truncates:
        is_, wanted = "after top_p, top_k and min_p", f"top_p={how.top_p}, top_k={how.top_k}, min_p={how.min_p}"
    else:
        return
    raise SamplingParamsError(
        f"the server at {url} returns log-probabilities {is_}; with {wanted} they are not those that a trainer "
        f"computes. Change SamplingParams, or {dialect.modes}"
    )


def token_of(token: str) -> int:
    """The id of a token, from what a server calls it; a `RolloutError` if it has no id in it."""
    name, _, number = token.partition(":")
    if name != "token_id" or not number.isdecimal():
        raise RolloutError(
            f"the server returned {token!r} as a token; completions need token ids. It must understand vLLM's fields "
            "return_token_ids or return_tokens_as_token_ids"
        )
    return int(number)
