"""Shared by the rollout tests: small models, and a second engine that has no model at all."""

import contextlib
import math
import os
import random
import signal
import time

import torch
from plain_train_workers import Plain
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from single_controller import Dispatch, register
from workers.rollout.engines.decoding import truncated
from workers.rollout.engines.request_engine import RequestEngine
from workers.rollout.engines.rollout_engine import Completion, RolloutEngine, SamplingMask
from workers.rollout.rollout_errors import RolloutError
from workers.rollout.rollout_worker import RolloutWorker
from workers.weight_sync import WeightSender
from workers.weight_sync.pieces import WHOLE, Payload, PieceSpec
from workers.weight_sync.transports import peer_weights as peer
from workers.weight_sync.weight_plan import whole

peer.BUCKET_BYTES = int(os.environ.get("BUCKET_BYTES", peer.BUCKET_BYTES))

LLAMA = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=32, max_position_embeddings=64)  # fmt: skip
TIED = Qwen2Config(**{**LLAMA.to_diff_dict(), "tie_word_embeddings": True, "num_key_value_heads": 4})
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=32, n_positions=64)  # learned position embeddings


def plain_model(config, seed):
    """A transformers model with larger weights than usual, so that its logits are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


@torch.no_grad()
def plain_distributions(model, prompt, completion, temperature=1.0):
    """Log-probabilities of all tokens at each place of a completion, from one forward pass, without padding or
    cache."""
    logits = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : len(prompt) + len(completion) - 1]


def plain_log_probs(model, prompt, completion, temperature=1.0, sampling_mask=None):
    return chosen_log_probs(plain_distributions(model, prompt, completion, temperature), completion, sampling_mask)


def kept_sets(sampling_mask):
    """The set of each token."""
    left = iter(sampling_mask.token_ids)
    return [[next(left) for _ in range(length)] for length in sampling_mask.lengths]


def check_completion(model, prompt, completion, temperature=1.0, atol=5e-5):
    expected = plain_log_probs(model, prompt, completion.token_ids, temperature or 1.0, completion.sampling_mask)
    torch.testing.assert_close(torch.tensor(completion.log_probs).double(), expected, atol=atol, rtol=0)


def chosen_log_probs(distributions, completion, sampling_mask=None):
    """Log-probabilities of a completion. With a mask, each token's is its share of the tokens that were left."""
    found = distributions[range(len(completion)), completion].clone()
    for place, kept in enumerate([] if sampling_mask is None else kept_sets(sampling_mask)):
        if kept:
            found[place] -= distributions[place, kept].exp().sum().log()
    return found


def left_to_choose(log_probs, how):
    """The tokens that `how` leaves, from the definition: the most likely `top_k`, of these those with `min_p` of the
    most likely one's probability, and of these the most likely ones until they reach `top_p` of their probability.
    Empty if nothing is left out."""
    ranked = sorted(range(len(log_probs)), key=lambda token: -float(log_probs[token]))
    lowest = how.min_p * math.exp(float(log_probs[ranked[0]]))
    ranked = [token for token in ranked[: how.top_k or None] if math.exp(float(log_probs[token])) >= lowest]
    total = sum(math.exp(float(log_probs[token])) for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += math.exp(float(log_probs[token])) / total
        if mass >= how.top_p:
            break
    return sorted(kept) if how.temperature and (how.top_k or how.min_p or how.top_p < 1) else []


def check_versions(data, log_probs_of, atol=1e-5):
    """Each token's log-prob in a batch of a stream is that of the weights which its version says.

    `log_probs_of` is (version, prompt, completion) -> log-probs of the reference; if the data has sampling masks, it
    gets the completion's as `sampling_mask`. Returns the versions of each row.
    """
    begin = int(data["prompt_lengths"].max())
    versions = []
    for row in range(len(data["input_ids"])):
        end = begin + int(data["completion_lengths"][row])
        prompt = data["input_ids"][row, begin - int(data["prompt_lengths"][row]) : begin].tolist()
        completion = data["input_ids"][row, begin:end].tolist()
        of = data["weight_versions"][row, begin:end].tolist()
        mask = {}
        if "sampling_mask" in data.keys():  # noqa: SIM118
            lengths = data["sampling_mask_lengths"][row, begin:end].tolist()
            mask = {"sampling_mask": SamplingMask(data["sampling_mask"].unbind()[row].tolist(), lengths)}
        expected = {version: log_probs_of(version, prompt, completion, **mask) for version in set(of)}
        plain = torch.stack([expected[version][place] for place, version in enumerate(of)])
        torch.testing.assert_close(data["rollout_log_probs"][row, begin:end].double(), plain, atol=atol, rtol=0)
        versions.append(of)
    return versions


class EchoEngine(RolloutEngine):
    """A toy engine: its completion is the reversed prompt, then random tokens. Its only weight is a number added to
    each token."""

    def __init__(self, vocabulary=100, *, mistake=None):
        self.vocabulary = vocabulary
        self.mistake = mistake
        self.shift = torch.zeros(1)
        self.asleep = False

    def generate(self, prompts, sampling_params, seeds):
        if self.mistake == "raises":
            raise RuntimeError("out of paper")
        completions = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            draw = random.Random(seed)
            tokens = [
                *reversed(prompt),
                *(draw.randrange(self.vocabulary) for _ in range(sampling_params.max_new_tokens)),
            ]
            tokens = [(token + int(self.shift)) % self.vocabulary for token in tokens][: sampling_params.max_new_tokens]
            completions.append(Completion(tokens, [-0.5] * len(tokens), "length"))
        if callable(self.mistake):
            return self.mistake(completions)
        return completions[1:] if self.mistake == "short" else completions

    def load_weights(self, weights):
        for _, tensor in weights:
            self.shift.copy_(tensor)

    def weight_shapes(self):
        return {"shift": (1,)}

    def sleep(self):
        self.asleep = True

    def wake_up(self):
        self.asleep = False


class ToolEngine(EchoEngine):
    """Its environment appends the column `answer` of the prompt to each completion, as the output of a tool."""

    def generate(self, prompts, sampling_params, seeds, extras):
        completions = super().generate(prompts, sampling_params, seeds)
        return [
            Completion(
                [*one.token_ids, answer],
                [*one.log_probs, 0.0],
                "stop",
                loss_mask=[1] * len(one.token_ids) + [0],
                info={"answered": answer, "turns": 2},
            )
            for one, answer in zip(completions, extras["answer"], strict=True)
        ]


class Bigram(torch.nn.Module):
    """A language model in which only the last token counts."""

    def __init__(self, seed, vocabulary=32):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.following = torch.nn.Parameter(2 * torch.randn(vocabulary, vocabulary, generator=draw))
        self.bias = torch.nn.Parameter(torch.randn(vocabulary, generator=draw))

    def distributions(self, prompt, completion, temperature=1.0):
        last = [prompt[-1], *completion[:-1]]
        return ((self.following[last] + self.bias).detach().double() / temperature).log_softmax(-1)

    def log_probs(self, prompt, completion, temperature=1.0, sampling_mask=None):
        return chosen_log_probs(self.distributions(prompt, completion, temperature), completion, sampling_mask)


def die_in(moment):
    """Kill this process, if the file named by the variable DIE_IN_... exists: the first one to come here, once."""
    with contextlib.suppress(FileNotFoundError):
        if file := os.environ.get(f"DIE_IN_{moment}"):
            os.unlink(file)
            os.kill(os.getpid(), signal.SIGKILL)


class BigramEngine(RequestEngine):
    """A toy with the whole interface, that of requests included: one token per request and step."""

    max_positions = 512
    any_rank = True
    sampling_masks = True

    def __init__(self, seed=0, vocabulary=32, delay=0.0):
        super().__init__()
        while os.path.exists(os.environ.get("DELAY_START", "")):
            time.sleep(0.01)
        self.vocab_size = vocabulary
        self.model = Bigram(seed, vocabulary)
        self.delay = delay
        self.steps = 0

    def serve(self):
        running = []
        while (changes := self.next_step()) is not None:
            time.sleep(self.delay)
            running = [one for one in (*running, *changes.added) if not one.ended]
            for request in running:
                self.record(request, *self.drawn(request))
            running = [one for one in running if not one.ended]
            self.steps += 1

    def drawn(self, request):
        how, place = request.sampling_params, len(request.token_ids)
        last = (request.prompt + request.token_ids)[-1]
        with torch.no_grad():
            logits = (self.model.following[last] + self.model.bias) / (how.temperature or 1.0)
        if not logits.isfinite().all():
            raise RolloutError("the logits are not finite")
        log_probs = logits.log_softmax(-1)
        left = truncated(log_probs[None], how.top_k, how.top_p, how.min_p)[0] if how.temperature else log_probs
        draw = torch.Generator().manual_seed((1_000_003 * request.seed + place) % 2**63)  # the same, however it came
        token = int(log_probs.argmax() if how.temperature == 0 else torch.multinomial(left.exp(), 1, generator=draw))
        ended = "stop" if token in how.stop_token_ids else "length" if request.remaining == 1 else None
        kept = left.isfinite().nonzero()[:, 0].tolist() if left.isinf().any() else []
        return [token], [float(left[token] - left.logsumexp(0))], ended, [kept]

    def load_weights(self, weights):
        own = self.model.state_dict()
        for place, (name, tensor) in enumerate(weights):
            if place:
                die_in("UPDATE")
            own[name].copy_(tensor)

    def weight_shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def weight_dtypes(self):
        return {name: tensor.dtype for name, tensor in self.model.state_dict().items()}

    def read_weights(self, names):
        return [self.model.state_dict()[name] for name in names]

    def raw_weights(self):
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.model.state_dict().items()}

    def read_raw(self, names):
        if "bias" in names:  # the last one
            die_in("READ_RAW")
        return self.read_weights(names)

    def load_raw(self, weights):
        self.load_weights(weights)
        die_in("LOAD_RAW")


class BigramTrainer(Plain):
    """A train worker that sends the weights of `Bigram(version)`."""

    def set_rollout_manager(self, manager):
        self.sender = None if manager is None else WeightSender("store", manager)

    def update_weights(self, version=None):
        if not self.rank:
            self.sender.send(version, iter(Bigram(version).state_dict().items()))
        self.weight_version = version
        return version


class Toy(RolloutWorker):
    """For a `BigramEngine`. Its weights and its speed can be set from a test.

    Attributes:
        groups: how many it was given to generate.
    """

    groups = 0

    def exchange(self, orders):
        self.groups += len(orders.submit)
        return super().exchange(orders)

    @register(Dispatch.ALL_TO_ALL)
    def set_delay(self, delay):
        self.engine.delay = delay

    @register(Dispatch.ONE_TO_ALL)
    def counted(self):
        return self.groups

    @register(Dispatch.ONE_TO_ALL)
    def load_of_engine(self):
        return self.engine.load()

    @register(Dispatch.ONE_TO_ALL)
    def version_of_weights(self):
        return self.weight_version

    @register(Dispatch.ONE_TO_ALL)
    def pid_of_process(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def load(self, seed, version):
        """Load the weights of `Bigram(seed)`, or NaN."""
        self.engine.begin_update()
        weights = Bigram(seed or 0).state_dict()
        self.engine.load_weights((name, w if seed is not None else w * torch.nan) for name, w in weights.items())
        self.engine.finish_update(version)
        self.weight_version = version

    @register(Dispatch.ALL_TO_ALL)
    def die(self, dies):
        if dies:
            os._exit(1)


def update(stream, manager, version):
    """What `RayTrainGroup.update_weights` does: the weights of `Bigram(version)`, to a group of `Toy`."""
    with stream.updating():
        manager.weight_version = version
        manager.group.load(version, version)


def payload_of(pairs):
    """Whole tensors as a train rank sends them, without digests."""
    pairs = dict(pairs)
    pieces = [PieceSpec(name, whole(tensor.shape), WHOLE, tensor.dtype, None) for name, tensor in pairs.items()]
    return Payload(pieces, list(pairs.values()))
