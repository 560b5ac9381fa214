"""A storm: many clients, of whom some leave, some send nonsense, and some read slowly.

Every answer is compared with the answer that the same request got alone before the storm.
"""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

WORDS = (
    *("Mia", "the", "otter", "found", "a", "bell", "near", "old", "mill", "and", "rang", "it"),
    *("until", "Tom", "owl", "came"),
)
CLOSED, MALFORMED, WRONG_KEY = 0.30, 0.05, 0.05
"""The share of the requests that are closed early, are nonsense, or have a wrong key."""

Answer = list[tuple[str, str | None]]
"""Text and finish reason of each choice."""


@dataclass(frozen=True, kw_only=True)
class Good:
    """A request that must be answered."""

    path: str
    body: Mapping[str, Any]

    @property
    def payload(self) -> bytes:
        return json.dumps(self.body).encode()


def good_requests(model: str, seed: int = 0, count: int = 24) -> list[Good]:
    """Requests of every kind: streams, chats, several choices, seeds, stop strings."""
    rng, requests = random.Random(seed), []
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))
        body: dict[str, Any] = {"model": model, "max_tokens": rng.randrange(1, 40)}
        body |= rng.choice(
            [{"temperature": 0}, {"seed": number}, {"seed": number, "n": 3}, {"stop": ["."]}]
        )
        body.setdefault("seed", 7)
        if number % 2:
            body["stream"] = True
        if number % 3:
            requests.append(Good(path="/v1/completions", body={**body, "prompt": text}))
        else:
            messages = [{"role": "user", "content": text}]
            requests.append(Good(path="/v1/chat/completions", body={**body, "messages": messages}))
    return requests


def slow_request(model: str) -> Good:
    """A stream that is larger than the buffers of sockets."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 300, "seed": 1}
    return Good(path="/v1/completions", body={**body, "ignore_eos": True, "stream": True})


def malformed_payloads(model: str) -> list[bytes]:
    """Bodies that must be refused with a status of 400 to 499."""
    bodies: list[Any] = [
        [],
        None,
        {},
        {"model": model},
        {"model": "another", "prompt": "x"},
        {"model": model, "prompt": 3},
        {"model": model, "prompt": [-1]},
        {"model": model, "prompt": [2**40]},
        {"model": model, "prompt": "x", "max_tokens": -1},
        {"model": model, "prompt": "x", "max_tokens": "many"},
        {"model": model, "prompt": "x", "max_tokens": 10**9},
        {"model": model, "prompt": "x", "temperature": -1},
        {"model": model, "prompt": "x", "n": 10**6},
        {"model": model, "prompt": "x", "best_of": 4},
        {"model": model, "prompt": "x", "stop": [""]},
        {"model": model, "prompt": "x", "logprobs": 10**6},
        {"model": model, "prompt": "x", "logit_bias": {"x": 1}},
    ]
    return [b"", b"{", b"\xff\xfe", b'"\\ud800"', *(json.dumps(body).encode() for body in bodies)]


@dataclass
class Storm:
    """The counts of requests, and the wrong answers."""

    url: str
    key: str
    seed: int = 0
    num_clients: int = 64
    num_slow: int = 2
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _expected: dict[int, Answer] = field(default_factory=dict)

    async def run(
        self,
        num_requests: int,
        good: Sequence[Good],
        *,
        slow: Good,
        malformed: Sequence[bytes],
        at_request: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Send ``num_requests`` from all clients; ``at_request`` is called before each of them."""
        limits = httpx2.Limits(max_connections=self.num_clients + 1)
        async with httpx2.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:
            for number, request in enumerate(good):
                self._expected[number] = await self._ask(client, request)
            slow_answer = await self._ask(client, slow)
            is_over = asyncio.Event()
            readers = [
                asyncio.create_task(self._read_slowly(slow, slow_answer, is_over))
                for _ in range(self.num_slow)
            ]
            numbers = iter(range(num_requests))

            async def one_client() -> None:
                for number in numbers:
                    at_request(number)
                    await self._send(
                        client, random.Random(f"{self.seed}.{number}"), good, malformed
                    )

            await asyncio.gather(*(one_client() for _ in range(self.num_clients)))
            is_over.set()
            await asyncio.gather(*readers)

    async def _send(
        self,
        client: httpx2.AsyncClient,
        rng: random.Random,
        good: Sequence[Good],
        malformed: Sequence[bytes],
    ) -> None:
        fate, number = rng.random(), rng.randrange(len(good))
        request = good[number]
        if fate < CLOSED:
            await self._leave(rng, request)
        elif fate < CLOSED + MALFORMED:
            payload = rng.choice(malformed)
            status = await self._status(client, "/v1/completions", payload, self.key)
            self._check("malformed", 400 <= status < 500, f"{payload!r} got {status}")
        elif fate < CLOSED + MALFORMED + WRONG_KEY:
            status = await self._status(client, request.path, request.payload, "wrong-key")
            self._check("wrong key", status == 401, f"a wrong key got {status}")
        else:
            answer = await self._ask(client, request)
            expected = self._expected[number]
            message = f"{request.body} got {answer} instead of {expected}"
            self._check("answered", answer == expected, message)

    def _check(self, kind: str, is_right: bool, message: str) -> None:
        self.counts[kind] += 1
        if not is_right:
            self.wrong.append(message)

    async def _status(self, client: httpx2.AsyncClient, path: str, payload: bytes, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        response = await client.post(path, content=payload, headers=headers)
        body = response.json()
        if not {"message", "type", "param", "code"} <= body.get("error", {}).keys():
            self.wrong.append(f"{payload!r} got an error of another shape: {body}")
        return response.status_code

    async def _ask(self, client: httpx2.AsyncClient, request: Good) -> Answer:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        response = await client.post(request.path, content=request.payload, headers=headers)
        if response.status_code != 200:
            return [(f"{response.status_code}: {response.text}", None)]
        return answer_in(response.text, bool(request.body.get("stream")))

    async def _leave(self, rng: random.Random, request: Good) -> None:
        """Close the connection: inside the request, right after it, or inside the answer."""
        self.counts["closed"] += 1
        data = self._raw(request)
        reader, writer = await asyncio.open_connection(*_address(self.url))
        try:
            moment = rng.randrange(4)
            if moment == 0:
                data = data[: rng.randrange(len(data))]
            writer.write(data)
            await writer.drain()
            if moment == 2:
                await asyncio.sleep(rng.random() * 0.1)
            elif moment == 3:
                await reader.read(rng.randrange(1, 2000))
        except ConnectionError:
            self.wrong.append("the server closed a connection that the client had not closed")
        finally:
            if rng.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

    def _raw(self, request: Good) -> bytes:
        """The bytes of a request. An answer to HTTP/1.0 ends with the connection."""
        payload = request.payload
        head = (
            f"POST {request.path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload

    async def _read_slowly(self, request: Good, expected: Answer, is_over: asyncio.Event) -> None:
        """Read streams a few bytes at a time until the storm is over, and the last one quickly."""
        while not is_over.is_set():
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, _address(self.url))
            reader, writer = await asyncio.open_connection(sock=connection, limit=256)
            writer.write(self._raw(request))
            pieces = []
            while piece := await reader.read(128):
                pieces.append(piece)
                if not is_over.is_set():
                    await asyncio.sleep(0.005)
            writer.close()
            _, _, body = b"".join(pieces).partition(b"\r\n\r\n")
            answer = answer_in(body.decode(), True)
            self._check("slow reader", answer == expected, f"a slow reader got {answer}")


def answer_in(text: str, is_stream: bool) -> Answer:
    """Read the choices of a response, streamed or not."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    if is_stream:
        datas = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if datas[-1:] != ["[DONE]"]:
            return [("a stream without [DONE]", None)]
        events = [json.loads(data) for data in datas[:-1]]
    else:
        events = [json.loads(text)]
    for event in events:
        if "error" in event:
            return [(f"an error: {event}", None)]
        for choice in event["choices"]:
            index = choice["index"]
            message = choice.get("delta") or choice.get("message") or {}
            new_text = choice.get("text") or message.get("content") or ""
            texts[index] = texts.get(index, "") + new_text
            reasons[index] = choice.get("finish_reason") or reasons.get(index)
    return [(texts[index], reasons[index]) for index in sorted(texts)]


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)
