"""Check ``mie serve --replicas`` and ``mie.ray.generate`` on a Ray cluster of this machine.

    python scripts/ray_check.py [ingress] [serve] [data]    # needs pip install 'mie[ray]'
    python scripts/ray_check.py routers [--vllm-router VENV/bin/vllm-router]

It prints a line for each check, the figures as JSON at the end, and exits with 1 if something is
wrong. Latencies are stated, not judged: a busy machine makes them long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import ray
import ray.data
from ray import serve
from ray_checks.load import (
    answers,
    client_of,
    end_of_stream,
    eventually,
    labelled,
    seeded,
    under_load,
)
from serve_checks.server import KEY, RunningServer, serving

import mie.ray
from mie.cli.serve import with_server_defaults
from mie.ray.app import build_replicas
from mie.ray.config import ROUTERS, ReplicaConfig
from mie.ray.server import APP, connected
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys

CPUS = 0.5
"""CPUs of a replica: three run on a machine of two."""
OPTIONS = ("--num-blocks", "256", "--max-num-seqs", "32", "--linear-plan", "tiled")
ENGINE = {"num_blocks": 256, "max_num_seqs": 32, "linear_plan": "tiled"}
NUM_SEEDED = 200
WRONG_KEY = {"Authorization": "Bearer wrong-key"}


class Checks:
    """What was found: problems, and figures."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.figures: dict[str, Any] = {}

    def expect(self, is_so: bool, what: str, found: object = "") -> None:
        """Note a problem unless it is so."""
        print(f"{'ok' if is_so else 'WRONG'}: {what} {found}".rstrip(), flush=True)
        if not is_so:
            self.problems.append(f"{what} {found}")


class Deployment:
    """What this script deploys in place of what ``mie serve`` has started."""

    def __init__(self, checks: Checks, server: RunningServer) -> None:
        self._checks = checks
        self._server = server
        self._config = ReplicaConfig(
            engine=with_server_defaults({**ENGINE, "model": "bundled"}),
            server=ServeConfig(max_chunks_per_second=500.0, keys=Keys.of([server.key])),
            num_cpus=CPUS,
        )

    async def change(self, what: str, **changes: Any) -> None:
        """Deploy another configuration while requests run. None may be lost."""
        self._config = replace(self._config, **changes)
        async with under_load(self._server) as counts:
            target = build_replicas(self._config)
            await asyncio.to_thread(serve.run, target, name=APP, route_prefix=None)
            number = self._config.num_replicas
            is_so = await eventually(lambda: has_replicas(self._server, number))
        self._checks.expect(is_so, f"after {what}, {number} replicas serve")
        self._checks.expect(set(counts) == {"200"}, "no request is lost", dict(counts))


async def check_serving(checks: Checks, server: RunningServer, plain: RunningServer) -> None:
    """Check a server on one replica, whose cluster this process is connected to.

    ``plain`` is a server without Ray.
    """
    requests = [seeded(number) for number in range(NUM_SEEDED)]
    expected = await answers(plain, requests)
    checks.expect(await answers(server, requests) == expected, "equal bytes on 1 replica")
    deployment = Deployment(checks, server)
    await deployment.change("a rolling restart")
    await deployment.change("scaling up", num_replicas=3)
    checks.expect(await answers(server, requests) == expected, "equal bytes on 3 replicas")
    for turn in (1, 2):  # in turns, since the machine may be busy
        checks.figures[f"64 streams, plain, turn {turn}"] = latencies(plain)
        checks.figures[f"64 streams, 3 replicas, turn {turn}"] = latencies(server)
    checks.figures["hit rate, prefix"] = await hit_rate(server)
    await disconnect(checks, server)
    await kill(checks, server)
    await deployment.change("scaling down", num_replicas=1)


async def has_replicas(server: RunningServer, number: int) -> bool:
    """Return whether as many replicas are healthy."""
    async with client_of(server) as client:
        said = (await client.get("/health")).json()
    return list(said.get("replicas", {}).values()) == ["ok"] * number


async def hit_rate(server: RunningServer, replicas: Sequence[RunningServer] = ()) -> float:
    """Return which part of prompts is cached where three requests share each beginning.

    The counts are those of ``replicas``, or of the server itself.
    """

    async def counted(name: str) -> float:
        counts = [await labelled(each, name) for each in replicas or (server,)]
        return sum(sum(count.values()) for count in counts)

    async def is_ready() -> bool:
        try:
            async with client_of(server) as client:
                return (await client.get("/v1/models")).status_code == 200
        except httpx2.TransportError:
            return False

    assert await eventually(is_ready)
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    before = [await counted(name) for name in names]
    for turn in range(3):
        prompts = ({"prompt": f"Topic {topic}. " * 60, "max_tokens": 1} for topic in range(30))
        await answers(server, [{**each, "prompt": f"{each['prompt']}{turn}"} for each in prompts])
    hits, queries = [await counted(name) - start for name, start in zip(names, before, strict=True)]
    return round(hits / queries, 3)


async def disconnect(checks: Checks, server: RunningServer) -> None:
    """Leave a stream that would run for long, and look at the replica that it ran on."""
    body = {"prompt": "Once", "max_tokens": 900, "n": 8, "ignore_eos": True, "stream": True}
    async with (
        client_of(server) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        await anext(response.aiter_lines())

    async def is_free() -> bool:
        left = await labelled(server, "mie:http_clients_disconnected_total")
        used = await labelled(server, "vllm:kv_cache_usage_perc")
        return sum(left.values()) == 1 and not any(used.values())

    checks.expect(await eventually(is_free), "a closed connection frees its replica's blocks")


async def kill(checks: Checks, server: RunningServer) -> None:
    """Kill a replica while it serves streams."""
    async with client_of(server) as client:
        bodies = (
            {"prompt": f"Stream {number}", "max_tokens": 300, "ignore_eos": True}
            for number in range(32)
        )
        streams = [asyncio.ensure_future(end_of_stream(client, body)) for body in bodies]

        async def all_serve() -> bool:
            running = await labelled(server, "vllm:num_requests_running")
            return len(running) == 3 and all(running.values())

        checks.expect(await eventually(all_serve), "every replica serves streams")
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        victim = min(name for name in names if name.startswith(f"SERVE_REPLICA::{APP}#Replica#"))
        ray.kill(ray.get_actor(victim, namespace="serve"))
        ends = Counter(await asyncio.gather(*streams))
    is_told = ends.keys() <= {"complete", "error", "503"}
    checks.expect(is_told and ends["complete"] < 32, "the requests of a killed replica are told")
    checks.expect(ends["complete"] > 0, "the others go on", dict(ends))
    checks.expect(await eventually(lambda: has_replicas(server, 3)), "it is replaced")


def latencies(server: RunningServer) -> dict[str, float]:
    """Return what 64 streams see, in milliseconds, and tokens a second."""
    command = [sys.executable, "-m", "mie", "bench", "serve", "--base-url", server.url, "--json"]
    command += ["--api-key", server.key, "--num-prompts", "64", "--input-len", "32"]
    done = subprocess.run(
        [*command, "--output-len", "48"], capture_output=True, text=True, check=True, timeout=300
    )
    results = json.loads(done.stdout)
    names = ("p99_itl_ms", "mean_tpot_ms", "p99_ttft_ms", "output_throughput")
    return {name: round(results[name], 1) for name in names}


async def check_ingress(checks: Checks) -> None:
    """Check the application behind Ray's own proxy, deployed from plain data as by KubeRay."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    args = {
        "engine": with_server_defaults(ENGINE),
        "server": {"keys": [KEY]},
        "num_replicas": 2,
        "num_cpus": CPUS,
    }
    target = mie.ray.build_openai_app(args)
    await asyncio.to_thread(serve.run, target, name="front", route_prefix="/mie")
    server = RunningServer(
        url=f"http://127.0.0.1:{port}/mie", key=KEY, process_id=os.getpid(), log=Path(os.devnull)
    )
    async with client_of(server) as client:
        refused = await client.post("/v1/completions", json=seeded(1), headers=WRONG_KEY)
        checks.expect(refused.status_code == 401, "behind Ray's proxy, a wrong key is refused")
        bodies = [seeded(number) for number in (1, 2)]
        found = [(await client.post("/v1/completions", json=body)).status_code for body in bodies]
        checks.expect(found == [200] * 2, "the right key is answered", found)
        ends = [await end_of_stream(client, {**body, "ignore_eos": True}) for body in bodies]
        checks.expect(ends == ["complete"] * 2, "streams end well", ends)
    checks.expect(await has_replicas(server, 2), "/health is that of all replicas")
    await disconnect(checks, server)
    await asyncio.to_thread(serve.shutdown)


def check_data(checks: Checks) -> None:
    """Check batches: one engine here, and one or two actors."""
    from mie.batch import answers as answers_here
    from mie.llm import LLM

    rows = [{"id": f"row {number}", "prompt": f"Story {number}"} for number in range(40)]
    rows[7]["prompt"] = "too long " * 1000
    settings = with_server_defaults({**ENGINE, "model": "bundled"})
    params = {"max_tokens": 8}
    here = answers_here(
        LLM(**settings), [(row["id"], {**params, "prompt": row["prompt"]}) for row in rows]
    )
    expected = {key: output.outputs[0].text if output.outputs else None for key, output in here}
    checks.expect(sum(text is None for text in expected.values()) == 1, "one row fails")
    with tempfile.TemporaryDirectory() as directory:
        for number, kept, todo in (
            (1, None, rows),
            (2, directory, rows[:20]),
            (2, directory, rows),
        ):
            dataset = ray.data.from_items([{**row, "sampling_params": params} for row in todo])
            found = mie.ray.generate(
                dataset, settings, num_actors=number, num_cpus=CPUS, batch_size=8, checkpoint=kept
            ).take_all()
            texts = {row["id"]: row["generated_text"] for row in found}
            wanted = {row["id"]: expected[row["id"]] for row in todo}
            checks.expect(
                texts == wanted, f"{len(todo)} rows with {number} actors equal one engine"
            )
            checks.expect(sum(row["error"] is not None for row in found) == 1, "failures are rows")
        num_kept = [len(file.read_text().splitlines()) for file in Path(directory).glob("*.jsonl")]
        checks.expect(sum(num_kept) == 40, "a restart computed only what was missing", num_kept)


def on_ray(number: int, router: str = "prefix") -> list[str]:
    """Return the options of ``mie serve`` with replicas on this process's cluster."""
    address = ray.get_runtime_context().gcs_address
    more = ["--ray-address", address, "--replicas", str(number), "--replica-cpus", str(CPUS)]
    return [*OPTIONS, *more, "--request-router", router]


def hit_rate_with(directory: Path, router: str) -> float:
    """Return the hit rate of three replicas behind a router."""
    with serving(directory / router, on_ray(3, router)) as server:
        return asyncio.run(hit_rate(server))


def hit_rate_behind_vllm_router(directory: Path, command: str, policy: str) -> float:
    """Return the hit rate of three servers behind vLLM's router, which is no part of Ray."""
    with ExitStack() as stack:
        logs = (directory / f"server {number}" for number in range(3))
        servers = [stack.enter_context(serving(log, OPTIONS)) for log in logs]
        address = ["--host", "127.0.0.1", "--port", str(free_port())]
        urls = ["--worker-urls", *(server.url for server in servers)]
        log = stack.enter_context((directory / "router").open("wb"))
        process = subprocess.Popen(
            [command, *address, *urls, "--policy", policy, "--prometheus-port", str(free_port())],
            stdout=log,
            stderr=log,
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        router = replace(servers[0], url=f"http://127.0.0.1:{address[3]}")
        return asyncio.run(hit_rate(router, servers))


def compare_routers(checks: Checks, directory: Path, vllm_router: str | None) -> None:
    """Measure the hit rate of every router by name."""
    for name in ROUTERS:
        checks.figures[f"hit rate, {name}"] = hit_rate_with(directory, name)
    for policy in ("cache_aware", "random") if vllm_router else ():
        rate = hit_rate_behind_vllm_router(directory, vllm_router, policy)
        checks.figures[f"hit rate, vllm-router {policy}"] = rate


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def serve_twice(checks: Checks, directory: Path) -> None:
    """Start ``mie serve`` on the cluster with each router, and check it."""
    with (
        serving(directory / "plain", OPTIONS) as plain,
        serving(directory / "prefix", on_ray(1)) as server,
    ):
        asyncio.run(check_serving(checks, server, plain))
    random = hit_rate_with(directory, "random")
    prefix = checks.figures["hit rate, prefix"]
    checks.expect(prefix >= 2 * random, "hit rate of the router and of random", (prefix, random))


def main() -> int:
    """Run the checks, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check mie on Ray.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="ingress, serve, data or routers")
    parser.add_argument(
        "--vllm-router", metavar="COMMAND", help="vLLM's router, where it is installed"
    )
    args = parser.parse_args()
    parts = args.parts or ["ingress", "serve", "data"]
    checks = Checks()
    with connected(None, 3 * CPUS), tempfile.TemporaryDirectory() as directory:
        if "ingress" in parts:
            asyncio.run(check_ingress(checks))
        if "serve" in parts:
            serve_twice(checks, Path(directory))
        if "data" in parts:
            check_data(checks)
        if "routers" in parts:
            compare_routers(checks, Path(directory), args.vllm_router)
    print(json.dumps({"problems": checks.problems, **checks.figures}, indent=2))
    return int(bool(checks.problems))


if __name__ == "__main__":
    sys.exit(main())
