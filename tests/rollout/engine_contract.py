"""What every engine promises. A test file subclasses `EngineContract` and has a fixture ``subject``."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import depth
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_helpers import chosen_log_probs, kept_sets, left_to_choose, plain_distributions, plain_model
from waits import wait_until

from workers.rollout.agents.agent_engine import AgentEngine
from workers.rollout.agents.environment import Environment, Step
from workers.rollout.engines.request_engine import RequestEngine
from workers.rollout.engines.rollout_engine import Completion, EngineLoad, RolloutEngine, SamplingMask, SamplingParams
from workers.rollout.rollout_errors import PromptError, RolloutError

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12], [11, 4], [1, 2, 3, 4], [6, 6], [2, 9, 17], [31]]
SEEDS = list(range(10, 18))
HOW = [
    SamplingParams(12),
    SamplingParams(12, temperature=0.7),
    SamplingParams(12, top_p=0.8),
    SamplingParams(12, top_k=5),
    SamplingParams(12, temperature=0.7, top_p=0.8, top_k=9),
    SamplingParams(12, min_p=0.1),
    SamplingParams(12, top_p=0.8, top_k=9, min_p=0.2),
    SamplingParams(12, temperature=0.0),
]
SECONDS = 30.0


def bad_submit(**wrong: Any) -> Callable[[RolloutEngine], object]:
    def call(engine: RolloutEngine) -> object:
        how = SamplingParams(4)
        options = {"prompt": [1, 2], "sampling_params": how, "request_id": "bad", "seed": 0, **wrong}
        return engine.submit(**options)

    return call


def bad_params(**wrong: Any) -> Callable[[RolloutEngine], object]:
    return lambda engine: engine.submit([1, 2], SamplingParams(4, **wrong), "bad", seed=0)


ANY_SEEDS = {f"seed {seed}": seed for seed in (2**64, 2**70, -(2**63) - 1, -1)}
"""Seeds that engines must make smaller."""

BAD: dict[str, Callable[[RolloutEngine], object]] = {
    **{f"seed {seed!r}": bad_submit(seed=seed) for seed in (0.5, "1", None, True)},
    **{
        f"prompt {prompt!r}": bad_submit(prompt=prompt)
        for prompt in ([], [1.5], ["a"], "ab", [None], [[1]], 3, None, [-1], [10**9], [2**70], torch.tensor([0.5]))
    },
    **{f"sampling_params {how!r}": bad_submit(sampling_params=how) for how in (None, {"max_new_tokens": 4}, 4)},
    **{f"request_id {name!r}": bad_submit(request_id=name) for name in (["a"], 3, None)},
    **{
        f"partial {partial!r}": bad_submit(partial=partial)
        for partial in (
            [1, 2],
            Completion([10**9], [0.0], "abort"),
            Completion([-1], [0.0], "abort"),
            Completion([1.5], [0.0], "abort"),  # type: ignore[list-item]
            Completion([1, 2], [0.0], "abort"),
            Completion([1, 2], [0.0, 0.0], "abort", [1]),
            Completion([1, 2], [0.0, 0.0], "abort", sampling_mask=SamplingMask.whole(1)),
        )
    },
    **{f"temperature {value!r}": bad_params(temperature=value) for value in (1e-9, -1, math.nan, math.inf, "1", None)},
    **{f"top_p {value!r}": bad_params(top_p=value) for value in (0, 1.5, math.nan, "1")},
    **{f"top_k {value!r}": bad_params(top_k=value) for value in (-1, 0.5, True)},
    **{f"min_p {value!r}": bad_params(min_p=value) for value in (-0.1, 1.5, math.nan, "1", None)},
    **{f"stop_token_ids {ids!r}": bad_params(stop_token_ids=ids) for ids in (2, [10**9], [-1], ["a"], [0.5])},
    "prompt and seed of generate": lambda engine: engine.generate([[1], [2]], SamplingParams(4), [0, 0.5]),
}
"""Requests that no engine takes."""


class Talk(Environment):
    """Answers each turn with some tokens, of another number each time."""

    turns = 4

    async def reset(self, row):
        self.said = 0

    async def step(self, action):
        self.said += 1
        return Step([3 + self.said, *action.token_ids[: self.said]], done=self.said == self.turns)


@dataclass
class Subject:
    """An engine under test.

    Attributes:
        engine: the engine, shared by the tests of a module.
        model_of: seed -> the reference model with the weights of this seed; transformers' by default.
        config: of the reference model, for `plain_model`.
        distributions: (model, prompt, completion, temperature) -> float64 log-probabilities of the reference, of all
            tokens at each place.
        positions: prompts and completions together have at most so many tokens; at least 256.
        atol: how far the log-probabilities may be from those of the reference.
    """

    engine: RolloutEngine
    config: Any = None
    model_of: Callable[[int], torch.nn.Module] | None = None
    distributions: Callable[..., torch.Tensor] = plain_distributions
    positions: int = 512
    atol: float = 1e-4

    def model(self, seed: int) -> torch.nn.Module:
        return plain_model(self.config, seed) if self.model_of is None else self.model_of(seed)

    def update(self, model: torch.nn.Module, version: int) -> None:
        """One update in two calls, as the receiver of weights does it."""
        self.engine.begin_update()
        named = self.weights(model)
        self.engine.load_weights(named[::2])
        self.engine.load_weights(iter(named[1::2]))
        self.engine.finish_update(version)

    def weights(self, model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        state = model.state_dict()
        return [(name, state[name]) for name in self.engine.weight_shapes()]

    def check_read(self, model: torch.nn.Module) -> None:
        """The engine holds the model's weights bit for bit, cast to its own dtypes."""
        dtypes, shapes, slices = self.engine.weight_dtypes(), self.engine.weight_shapes(), self.engine.weight_slices()
        assert dtypes is not None and dtypes.keys() == shapes.keys() >= slices.keys()
        for (name, tensor), found in zip(self.weights(model), self.engine.read_weights(list(shapes)), strict=True):
            part = tensor[tuple(slice(*bounds) for bounds in slices.get(name, ()))].to(dtypes[name])
            assert (found.shape, found.dtype) == (part.shape, part.dtype), name
            assert torch.equal(found.cpu().reshape(-1).view(torch.uint8), part.reshape(-1).view(torch.uint8)), name

    def check(
        self, completion: Any, prompt: list[int], models: dict[int | None, Any], temperature: float = 1.0
    ) -> None:
        """Compare each token's log-probability with that of the model whose version it has."""
        versions = completion.weight_versions or [self.engine.weight_version] * len(completion.token_ids)
        assert len(completion.token_ids) == len(completion.log_probs) == len(versions)
        for version in set(versions):
            of_all = self.distributions(models[version], prompt, completion.token_ids, temperature or 1.0)
            expected = chosen_log_probs(of_all, completion.token_ids, completion.sampling_mask)
            chosen = [k for k, of in enumerate(versions) if of == version]
            found = torch.tensor(completion.log_probs, dtype=torch.float64)[chosen]
            torch.testing.assert_close(found, expected[chosen].double(), atol=self.atol, rtol=0)

    def check_all(self, made: Sequence[Any], models: dict[int | None, Any]) -> None:
        """`check` the completions of `PROMPTS`, or their futures."""
        for prompt, one in zip(PROMPTS, made, strict=True):
            self.check(one.result(SECONDS) if isinstance(one, Future) else one, prompt, models)

    def check_next(self, models: dict[int | None, Any]) -> None:
        """`check` what the engine generates now."""
        (completion,) = self.engine.generate([[5, 9, 2]], SamplingParams(12), [1])
        self.check(completion, [5, 9, 2], models)

    def submit(
        self, length: int, prompts: Sequence[list[int]] = PROMPTS, seeds: Sequence[int] = SEEDS, **options: Any
    ) -> list[Any]:
        return [
            self.engine.submit(prompt, SamplingParams(length, **options), f"request-{k}", seed=seed)
            for k, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]

    def run(self, length: int, *prompts_and_seeds: Any, **options: Any) -> list[Any]:
        """`submit`, and wait until all requests run. On a busy machine a server may send the first tokens of a request
        with its last; then submit them again."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            futures = self.submit(length, *prompts_and_seeds, **options)
            while not any(future.done() for future in futures):
                if self.engine.load().running == len(futures) and not any(future.done() for future in futures):
                    return futures
                time.sleep(0.001)
            for future in futures:
                future.result(SECONDS)
        raise AssertionError("the requests never ran all at once")

    def check_threads(self, count: int) -> None:
        """Requests that many threads submit, abort and pause at once get the beginning of their completions."""
        engine, how = self.engine, SamplingParams(15)
        expected = engine.generate([[number % 32] for number in range(count)], how, range(count))

        def run(number: int) -> Completion:
            future = engine.submit([number % 32], how, f"of-{number}", seed=number)
            if number % 3 == 0:
                engine.abort([f"of-{number}"])
            elif number % 7 == 0:
                engine.pause()
                engine.resume()
            return future.result(SECONDS)

        with ThreadPoolExecutor(16) as pool:
            for number, completion in enumerate(pool.map(run, range(count))):
                assert completion.token_ids == expected[number].token_ids[: len(completion.token_ids)]
                assert completion.finish_reason in (("length",) if number % 3 else ("length", "abort"))
        assert self.idle

    @property
    def idle(self) -> bool:
        load = self.engine.load()
        return load.running == load.waiting == 0

    def until(self, condition: Callable[[EngineLoad], bool]) -> None:
        wait_until(lambda: condition(self.engine.load()), SECONDS)


class EngineContract:
    """The tests. ``subject`` is a fixture of the module's scope: a `Subject` whose engine is idle.

    Attributes:
        updates: how many updates are made one after the other.
        long: tokens of a request that must not end before it is interrupted.
        seeded_continuation: whether a request that was interrupted gets the tokens that it would have got.
    """

    updates = 100 if depth.full else 30
    long = 200
    seeded_continuation = True

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, subject):
        """The model of version 1, loaded into the engine."""
        model = subject.model(3)
        subject.update(model, 1)
        return model

    @pytest.fixture
    def first(self, subject, loaded):
        """The same. The engine has it again after the test."""
        yield loaded
        if subject.engine.weight_version != 1:
            subject.update(loaded, 1)

    @pytest.fixture(scope="class")
    @classmethod
    def unbroken(cls, subject, loaded):
        """The tokens of long requests that nothing interrupts."""
        return [future.result(SECONDS).token_ids for future in subject.submit(cls.long)]

    @pytest.mark.parametrize("how", HOW, ids=str)
    def test_log_probs_match_the_reference(self, subject, first, how):
        """And the sampling mask has the tokens that were left."""
        subject.update(first, 1)
        for prompt, completion in zip(PROMPTS, subject.engine.generate(PROMPTS, how, SEEDS), strict=True):
            assert len(completion.token_ids) == 12 and completion.finish_reason == "length"
            subject.check(completion, prompt, {1: first, None: first}, how.temperature)
            if not (subject.engine.sampling_masks and how.truncates):
                assert completion.sampling_mask is None
                continue
            of_all = subject.distributions(first, prompt, completion.token_ids, how.temperature)
            expected = [left_to_choose(log_probs, how) for log_probs in of_all]
            assert [sorted(kept) for kept in kept_sets(completion.sampling_mask)] == expected

    def test_continued_request_keeps_its_sampling_mask(self, subject, first):
        """Also if sampling parameters change: some tokens are from a set, and others from the whole vocabulary."""
        if not subject.engine.sampling_masks:
            pytest.skip("the engine does not tell the tokens that were left")
        (future,) = subject.run(self.long, [[5, 9, 2]], [77], top_k=5)
        subject.engine.abort()
        partial = future.result(SECONDS)
        count = len(partial.token_ids)
        for length, options in ((count + 3, {"top_k": 5}), (count + 6, {}), (count + 9, {"top_p": 0.8})):
            before = list(partial.sampling_mask.lengths), list(partial.sampling_mask.token_ids)
            again = subject.engine.submit(
                [5, 9, 2], SamplingParams(length, **options), "again", seed=77, partial=partial
            ).result(SECONDS)
            assert (list(partial.sampling_mask.lengths), list(partial.sampling_mask.token_ids)) == before
            subject.check(again, [5, 9, 2], {1: first})
            partial = again
        lengths = list(partial.sampling_mask.lengths)
        assert lengths[: count + 3] == [5] * (count + 3) and lengths[count + 3 : count + 6] == [0] * 3
        assert min(lengths[count + 6 :]) >= 1
        plain = replace(subject.engine.generate([[7]], SamplingParams(3), [1])[0], finish_reason="abort")
        later = subject.engine.submit([7], SamplingParams(5, top_k=4), "later", seed=1, partial=plain).result(SECONDS)
        assert list(later.sampling_mask.lengths) == [0, 0, 0, 4, 4]
        subject.check(later, [7], {1: first})

    def test_completion_does_not_depend_on_the_batch(self, subject, first):
        how = SamplingParams(10)
        together = [one.token_ids for one in subject.engine.generate(PROMPTS, how, SEEDS)]
        alone = [subject.engine.generate([p], how, [s])[0].token_ids for p, s in zip(PROMPTS, SEEDS, strict=True)]
        backwards = [one.token_ids for one in subject.engine.generate(PROMPTS[::-1], how, SEEDS[::-1])][::-1]
        assert together == alone == backwards
        others = [one.token_ids for one in subject.engine.generate(PROMPTS, how, [seed + 50 for seed in SEEDS])]
        assert sum(a != b for a, b in zip(together, others, strict=True)) >= len(PROMPTS) - 1

    def test_top_k_and_temperature_zero_restrict_the_tokens(self, subject, first):
        best = subject.engine.generate(PROMPTS, SamplingParams(6, temperature=0), SEEDS)
        one = subject.engine.generate(PROMPTS, SamplingParams(6, top_k=1), SEEDS)
        assert [c.token_ids for c in best] == [c.token_ids for c in one]

    def test_stop_tokens_end_a_completion_and_belong_to_it(self, subject, first):
        free = subject.engine.generate(PROMPTS, SamplingParams(16), SEEDS)
        stops = (free[0].token_ids[3], free[2].token_ids[5])
        stopped = subject.engine.generate(PROMPTS, SamplingParams(16, stop_token_ids=stops), SEEDS)
        for whole, completion in zip(free, stopped, strict=True):
            end = next((k + 1 for k, token in enumerate(whole.token_ids) if token in stops), None)
            assert completion.token_ids == whole.token_ids[:end]
            assert completion.finish_reason == ("length" if end is None else "stop")
        assert {one.finish_reason for one in stopped} >= {"stop"}

    def test_turns_of_sessions_match_the_reference(self, subject, first, monkeypatch):
        """`AgentEngine` in front of the engine: in each turn, the log-probabilities are those of one forward pass over
        the whole session, also after an update, whatever the engine keeps between turns."""
        if not isinstance(subject.engine, RequestEngine):
            pytest.skip("it plays sessions itself")
        monkeypatch.setattr(subject.engine, "close", lambda: None)  # it is shared
        agents = AgentEngine(subject.engine, environment=Talk, verify=True)
        assert subject.engine.keep_prefixes and subject.engine.echo_prompts
        prompts = [prompt * 8 for prompt in PROMPTS[:4]]
        differences = []
        try:
            for version, model in ((1, first), (2, subject.model(4))):
                subject.update(model, version)
                for prompt, made in zip(
                    prompts, agents.generate(prompts, SamplingParams(6, 0.8), SEEDS[:4]), strict=True
                ):
                    assert made.info["turns"] == Talk.turns and made.loss_mask.count(1) == 6 * Talk.turns
                    of_all = subject.distributions(model, prompt, made.token_ids, 0.8)
                    expected = chosen_log_probs(of_all, made.token_ids)
                    off = (torch.tensor(made.log_probs, dtype=torch.float64) - expected.double()).abs()
                    turns = [mask == 1 for mask in made.loss_mask]
                    begin = [at for at, sampled in enumerate(turns) if sampled and not (at and turns[at - 1])]
                    differences += [float(off[at : at + 6].mean()) for at in begin]
                    assert {version} == {v for v, m in zip(made.weight_versions, made.loss_mask, strict=True) if m}
        finally:
            agents.close()
            subject.engine.echo_prompts = subject.engine.keep_prefixes = False
        print(f"{type(subject.engine).__name__}: rollout_log_prob_diff of {len(differences)} turns: {max(differences)}")
        assert len(differences) == 2 * 4 * Talk.turns and max(differences) <= 1e-5

    def test_no_prompts_give_no_completions(self, subject, first):
        assert subject.engine.generate([], SamplingParams(), []) == []

    def test_invalid_prompts_are_rejected(self, subject, first):
        generate = subject.engine.generate
        for prompt in ([], [1, 10_000_000], [1] * (subject.positions - 3)):
            with pytest.raises(PromptError, match="prompt 1 ") as caught:
                generate([[1], prompt, [2]], SamplingParams(4), [0, 0, 0])
            assert caught.value.number == 1
            with pytest.raises(PromptError):
                subject.engine.submit(prompt, SamplingParams(4), "refused", seed=0)
        with pytest.raises(ValueError, match="2 prompts and 1 seeds"):
            generate([[1], [2]], SamplingParams(), [0])
        assert generate([[1] * (subject.positions - 4)], SamplingParams(4), [0])[0].finish_reason == "length"

    def test_weight_shapes_are_those_of_the_reference(self, subject, first):
        shapes = subject.engine.weight_shapes()
        state = first.state_dict()
        assert {name: tuple(state[name].shape) for name in shapes} == shapes
        assert {tensor.data_ptr() for tensor in state.values()} == {state[name].data_ptr() for name in shapes}

    def test_weights_are_read_back(self, subject, first):
        engine = subject.engine
        if engine.weight_dtypes() is None:
            with pytest.raises(RolloutError, match="does not tell its weights"):
                engine.read_weights(["model.norm.weight"])
            return
        new = subject.model(8)
        with torch.no_grad():
            for tensor in new.state_dict().values():
                tensor.view(-1)[-1] = -0.0  # equals 0.0, and has other bits
        futures = subject.run(self.long)
        subject.check_read(first)  # while it generates
        engine.begin_update()
        named = subject.weights(new)
        engine.load_weights(named[1::2])
        engine.load_weights(named[::2])
        subject.check_read(new)
        engine.finish_update(2)
        subject.check_read(new)
        subject.check_all(futures, {1: first, 2: new})
        (name, tensor), *_ = reversed(named)
        (alone,) = engine.read_weights([name])
        assert torch.equal(alone.cpu(), tensor.to(alone.dtype)) and engine.read_weights([]) == []
        subject.update(first, 1)
        subject.check_read(first)

    def test_many_updates(self, subject, first):
        for number in range(2, 2 + self.updates):
            model = subject.model(number)
            subject.update(model, number)
            (completion,) = subject.engine.generate([[5, 9, 2]], SamplingParams(4), [number])
            subject.check(completion, [5, 9, 2], {number: model})

    def test_abandoned_update_refuses_until_a_complete_one(self, subject, first):
        new = subject.model(8)
        subject.engine.begin_update()
        subject.engine.load_weights(subject.weights(new)[:3])
        subject.engine.abandon_update()
        assert subject.engine.weight_version is None
        with pytest.raises(RolloutError, match=r"no complete weights"):
            subject.engine.generate(PROMPTS, SamplingParams(4), SEEDS)
        with pytest.raises(RolloutError, match=r"no complete weights"):
            subject.engine.submit([1], SamplingParams(4), "refused", seed=0)
        subject.update(new, 2)
        subject.check_next({2: new})

    # --- requests -------------------------------------------------------------------------------------------------

    def test_requests_get_what_a_batch_gets(self, subject, first):
        futures = subject.submit(10)
        assert set(as_completed(futures, timeout=SECONDS)) == set(futures)
        batch = subject.engine.generate(PROMPTS, SamplingParams(10), SEEDS)
        assert [future.result().token_ids for future in futures] == [one.token_ids for one in batch]
        assert [future.result().weight_versions for future in futures] == [[1] * 10] * 8
        assert subject.idle

    @settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(mix=st.lists(st.sampled_from(["good", "generate", *ANY_SEEDS, *BAD]), min_size=4, max_size=12))
    def test_no_request_fails_another(self, subject, first, mix):
        """Bad requests among good ones: each is refused where it is made, and those that run get their completions."""
        engine = subject.engine
        asked = [SamplingParams(12, temperature=(1.0, 0.0)[k % 2], top_k=(0, 2**70)[k % 2]) for k in range(8)]
        if not hasattr(self, "alone"):
            alone = [engine.generate([PROMPTS[k]], asked[k], [SEEDS[k]])[0] for k in range(8)]
            type(self).alone = [completion.token_ids for completion in alone]
        running = {}
        for number, kind in enumerate(["good", *mix, "good"]):
            k = number % 8
            if kind in ("good", *ANY_SEEDS):
                k |= kind in ANY_SEEDS  # those of odd numbers are greedy, so that the seed makes no difference
                seed = ANY_SEEDS.get(kind, SEEDS[k])
                running[number] = k, engine.submit(PROMPTS[k], asked[k], f"request-{number}", seed=seed)
            elif kind == "generate":
                (made,) = engine.generate([PROMPTS[k]], asked[k], [SEEDS[k]])
                assert made.token_ids == self.alone[k]
            else:
                with pytest.raises((PromptError, ValueError, TypeError)) as caught:
                    BAD[kind](engine)
                assert str(caught.value)
        for k, future in running.values():
            assert future.result(SECONDS).token_ids == self.alone[k], mix
        assert subject.idle

    def test_update_in_the_middle_of_running_requests(self, subject, first):
        futures = subject.run(self.long)
        new = subject.model(8)
        subject.update(new, 2)
        completions = [future.result(SECONDS) for future in futures]
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert len(completion.token_ids) == self.long
            assert completion.weight_versions == sorted(completion.weight_versions)
            subject.check(completion, prompt, {1: first, 2: new})
        assert {version for one in completions for version in one.weight_versions} == {1, 2}

    def test_raw_weights_are_taken_back_unchanged(self, subject, first):
        """By another engine, in this case by the same one after an update, and while requests are running."""
        engine = subject.engine
        if not (kinds := engine.raw_weights()):
            pytest.skip("the engine's weights are elsewhere")
        generated = engine.generate(PROMPTS, SamplingParams(12), SEEDS)
        told = engine.weight_dtypes() is not None
        saved = [(name, *engine.read_raw([name])) for name in kinds]
        saved = [(name, tensor.clone()) for name, tensor in saved]
        assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in saved} == kinds
        new = subject.model(8)
        subject.update(new, 2)
        futures = subject.run(self.long)
        changed = engine.read_raw(list(kinds))
        assert not all(torch.equal(one, tensor) for one, (_, tensor) in zip(changed, saved, strict=True))
        subject.until(lambda load: load.running == 8)
        engine.begin_update()
        engine.load_raw(saved[::2])
        engine.load_raw(saved[1::2])
        if told:
            subject.check_read(first)
        engine.finish_update(1)
        subject.check_all(futures, {1: first, 2: new})
        assert all(
            torch.equal(one.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            for one, (_, tensor) in zip(engine.read_raw(list(kinds)), saved, strict=True)
        )
        assert engine.generate(PROMPTS, SamplingParams(12), SEEDS) == generated
        subject.update(new, 2)  # as usual, after weights that came otherwise
        subject.check_next({2: new})

    def test_pause_keeps_requests_and_resume_continues_them(self, subject, first, unbroken):
        futures = subject.run(self.long)
        subject.engine.pause("keep")
        later = subject.engine.submit([1, 2], SamplingParams(3), "later", seed=1)
        time.sleep(0.2)
        assert not any(future.done() for future in (*futures, later))
        with pytest.raises(RolloutError, match="paused"):  # waiting for it would be for ever
            subject.engine.generate([[1]], SamplingParams(2), [0])
        subject.engine.resume()
        assert [future.result(SECONDS).token_ids for future in futures] == unbroken
        assert len(later.result(SECONDS).token_ids) == 3

    def test_abort_gives_the_tokens_so_far(self, subject, first, unbroken):
        futures = subject.run(self.long)
        subject.engine.abort(["request-2", "request-5", "unknown"])
        completions = [future.result(SECONDS) for future in futures]
        for number, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
            ended = number in (2, 5)
            assert completion.finish_reason == ("abort" if ended else "length")
            assert (0 < len(completion.token_ids) < self.long) == ended
            assert completion.token_ids == unbroken[number][: len(completion.token_ids)]
            subject.check(completion, prompt, {1: first})

    def test_aborted_request_is_continued(self, subject, first):
        unbroken = subject.engine.generate([[5, 9, 2]], SamplingParams(self.long), [77])[0]
        (future,) = subject.run(self.long, [[5, 9, 2]], [77])
        subject.engine.abort()
        partial = future.result(SECONDS)
        count = len(partial.token_ids)
        assert partial.finish_reason == "abort" and 0 < count < self.long
        new = subject.model(8)
        for model, version in ((first, 1), (new, 2)):
            subject.update(model, version)
            again = subject.engine.submit(
                [5, 9, 2], SamplingParams(self.long), "again", seed=77, partial=partial
            ).result(SECONDS)
            assert again.token_ids[:count] == partial.token_ids and again.log_probs[:count] == partial.log_probs
            assert again.weight_versions == [1] * count + [version] * (self.long - count)
            assert again.finish_reason == "length"
            subject.check(again, [5, 9, 2], {1: first, 2: new})
            if model is first and self.seeded_continuation:
                assert again.token_ids == unbroken.token_ids
        subject.update(first, 1)
        whole = subject.engine.submit([5, 9, 2], SamplingParams(count), "whole", seed=77, partial=partial)
        assert whole.result(SECONDS).token_ids == partial.token_ids and whole.result().finish_reason == "length"

    def test_pause_aborts_or_waits(self, subject, first):
        futures = subject.run(self.long)
        subject.engine.pause("abort")
        assert [future.result(SECONDS).finish_reason for future in futures] == ["abort"] * 8
        subject.engine.resume()
        futures = subject.submit(20)
        subject.engine.pause("wait")
        done = [future.done() for future in futures]
        subject.engine.resume()
        completions = [future.result(SECONDS) for future in futures]
        assert [one.finish_reason for one in completions] == ["length"] * 8
        assert subject.idle and len(set(done)) <= 2  # those that had not begun waited
        with pytest.raises(ValueError, match="mode='slowly'"):
            subject.engine.pause("slowly")

    def test_request_id_is_used_once_at_a_time(self, subject, first):
        subject.engine.pause()
        try:
            future = subject.engine.submit([1], SamplingParams(2), "same", seed=0)
            with pytest.raises(ValueError, match="'same' is in use"):
                subject.engine.submit([1], SamplingParams(2), "same", seed=0)
            assert subject.engine.load() == EngineLoad(0, 1, subject.engine.load().cache_usage)
            subject.engine.abort(["same"])
            assert future.result(SECONDS).token_ids == [] and future.result().finish_reason == "abort"
        finally:
            subject.engine.resume()
        again = subject.engine.submit([1], SamplingParams(2), "same", seed=0)
        assert len(again.result(SECONDS).token_ids) == 2
