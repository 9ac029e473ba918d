"""What a call of the gateway costs besides the engine: `python -m benchmarks.gateway`.

Sessions are open at the same time, and each plays its turns over a connection of its own; a toy engine answers at once.
Clients are in another process. The CPU time is that of the gateway's thread: HTTP, JSON, rendering and the tree.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import resource
import time
from urllib.parse import urlsplit

from workers.rollout.agents.gateway.gateway import Gateway
from workers.rollout.agents.gateway.gateway_router import GatewayRouter
from workers.rollout.agents.rendering import TokenRenderer, load_renderer
from workers.rollout.engines.request_engine import RequestEngine

WORDS = 20  # of a message, five tokens each


class Bytes:
    """A tokenizer with a token for each byte, each role and the end of a message. It counts what it encodes."""

    eos_token_id = 256
    rendered = 0
    roles = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")

    def encode(self, text):
        ids = [257 + self.roles.index(text)] if text in self.roles else list(text.encode())
        self.rendered += len(ids)
        return ids

    def decode(self, ids):
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class Parrot(RequestEngine):
    """Answers each request in one step, always the same."""

    def __init__(self, reply):
        super().__init__()
        self.reply, self.tokens_in = reply, 0

    def serve(self):
        while (changes := self.next_step()) is not None:
            for request in changes.added:
                self.tokens_in += len(request.prompt)
                self.record(request, self.reply, [-0.5] * len(self.reply), "stop")

    def load_weights(self, weights):
        pass

    def weight_shapes(self):
        return {}


async def play(address, token, number, turns, took):
    url, messages = urlsplit(address), []
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{number:>4} {turn:>4} " + "word " * (WORDS - 2)})
        body = json.dumps({"model": "m", "messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {token}\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        begun = time.perf_counter()
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length"))
        reply = json.loads(await reader.readexactly(length))
        took.append(time.perf_counter() - begun)
        messages.append(reply["choices"][0]["message"])
    writer.close()


def clients(address, tokens, turns, result):
    async def all_of():
        took = []
        await asyncio.gather(*(play(address, token, number, turns, took) for number, token in enumerate(tokens)))
        return took

    took = sorted(asyncio.run(all_of()))
    result.send((took[len(took) // 2], took[-1]))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def thread_seconds():
    return time.thread_time()


def qwen_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = ["endoftext|", "im_start|", "im_end|"]
    tools = ["tool_call", "/tool_call", "tool_response", "/tool_response", "think", "/think"]
    tokenizer.add_special_tokens([f"<|{name}>" for name in named] + [f"<{name}>" for name in tools])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def measure(sessions, turns, routed, package):
    if package:
        tokenizer = qwen_tokenizer()
        renderer = load_renderer(tokenizer, "qwen3", thinking_retention="all")
    else:
        tokenizer = Bytes()
        renderer = TokenRenderer(tokenizer)
    reply = [*tokenizer.encode("word " * WORDS), tokenizer.eos_token_id]
    tokenizer.rendered = 0  # for `Bytes`, without the reply
    engine = Parrot(reply)
    gateway = Gateway(engine, renderer)
    gateway.start()
    router = GatewayRouter([gateway.endpoint]) if routed else None
    if router is not None:
        router.start()
    front = router or gateway
    tokens = [front.open(seed=number)[1] for number in range(sessions)]
    gc.collect()
    memory, cpu = resident(), [one._front.run(thread_seconds()) for one in (gateway, router) if one]
    receive, send = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=clients, args=(front.address, tokens, turns, send), daemon=True
    )
    begun = time.perf_counter()
    process.start()
    median, slowest = receive.recv()
    seconds = time.perf_counter() - begun
    cpu = [one._front.run(thread_seconds()) - before for one, before in zip((gateway, router), cpu, strict=False)]
    process.join()
    gc.collect()
    calls, used = sessions * turns, resident() - memory
    held = None if router is None else sum(map(len, next(iter(router._sessions.values())).journal))
    trees = [front.close(token) for token in tokens]
    length = max(map(trees[0].length, trees[0].leaves()))
    what = f"{', router' if routed else ''}, {'qwen3' if package else 'TokenRenderer'}"
    print(
        f"{sessions} sessions x {turns} turns{what}: "
        f"{1e3 * cpu[0] / calls:.2f} ms of CPU per call at the gateway"
        + (f", {1e3 * cpu[1] / calls:.2f} ms at the router" if routed else "")
        + f"; {used / sessions / 1024:.0f} KiB per session of {length} tokens; {calls / seconds:.0f} calls/s; "
        f"median {1e3 * median:.0f} ms, slowest {1e3 * slowest:.0f} ms"
        + ("" if held is None else f"; journal {held / 1024:.1f} KiB")
        + ("" if package else f"; {tokenizer.rendered / sessions:.0f} tokens rendered per session")
        + f"; {engine.tokens_in / sessions:.0f} tokens of prompts to the engine"
    )
    for one in (router, gateway):
        if one is not None:
            one.stop()
    engine.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print where the gateway's thread spends its time")
    parser.add_argument("--package", action="store_true", help="profile with the package's renderer of qwen3")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16384)), hard))
    if args.profile:
        profile(args)
        return
    for turns in (args.turns // 2, args.turns, 2 * args.turns):
        measure(args.sessions, turns, False, False)
    measure(args.sessions, args.turns, False, True)
    measure(args.sessions, args.turns, True, False)


def profile(args):
    import cProfile
    import pstats

    from workers.rollout.agents.gateway import http_front

    made, run = cProfile.Profile(), http_front.asyncio.run
    http_front.asyncio.run = lambda coroutine: made.runcall(run, coroutine)
    measure(args.sessions, args.turns, False, args.package)
    pstats.Stats(made).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
