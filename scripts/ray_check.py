"""Check ``mie serve --replicas`` and ``mie.ray.generate`` on a Ray cluster of this machine.

    python scripts/ray_check.py [ingress] [serve] [data]    # needs '.[ray]'

It prints a line for each check, the figures as JSON at the end, and exits with 1 if something is
wrong. Latencies are stated, not judged: a busy machine makes them long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import ray
import ray.data
from ray import serve
from ray_checks.deployment import CPUS, ENGINE, OPTIONS, Checks, Deployment, has_replicas
from ray_checks.load import (
    Site,
    answers,
    client_of,
    end_of_stream,
    eventually,
    hit_rate,
    labelled,
    latencies,
    seeded,
)
from serve_checks.server import KEY, serving

import mie.ray
from mie.cli.serve import with_server_defaults
from mie.ray.app import APP, connected

NUM_SEEDED = 200
NUM_STREAMS = 12
WRONG_KEY = {"Authorization": "Bearer wrong-key"}


async def check_serving(checks: Checks, site: Site, plain: Site) -> None:
    """Check a server on one replica. This process is connected to its cluster.

    ``plain`` is a server without Ray.
    """
    requests = [seeded(number) for number in range(NUM_SEEDED)]
    expected = await answers(plain, requests)
    checks.expect(await answers(site, requests) == expected, "equal bytes on 1 replica")
    deployment = Deployment()
    await deployment.change_under_load(checks, site, "a rolling restart")
    await deployment.change_under_load(checks, site, "scaling up", num_replicas=3)
    checks.expect(await answers(site, requests) == expected, "equal bytes on 3 replicas")
    for name, each in (("plain", plain), ("3 replicas", site)):
        checks.figures[f"64 streams, {name}"] = await latencies(each)
    await disconnect(checks, site)
    await kill(checks, site)
    prefix = await hit_rate(site)
    random = await hit_rate(deployment.at_random())
    rates = {"prefix": prefix, "random": random}
    checks.expect(prefix >= 2 * random, "the router's hit rate is twice that of random", rates)
    checks.figures["hit rates"] = rates
    await deployment.change_under_load(checks, site, "scaling down", num_replicas=1)


async def disconnect(checks: Checks, site: Site) -> None:
    """Leave a stream that would run for long, and look at the replica that it ran on."""
    body = {"prompt": "Once", "max_tokens": 900, "n": 8, "ignore_eos": True, "stream": True}
    async with (
        client_of(site) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        await anext(response.aiter_lines())

    async def is_free() -> bool:
        left = await labelled(site, "mie:http_clients_disconnected_total")
        used = await labelled(site, "vllm:kv_cache_usage_perc")
        return sum(left.values()) == 1 and not any(used.values())

    checks.expect(await eventually(is_free), "a closed connection frees its replica's blocks")


async def kill(checks: Checks, site: Site) -> None:
    """Kill a replica while it serves streams that are as long as the context allows."""
    async with client_of(site) as client:

        def start() -> list[asyncio.Future[str]]:
            bodies = (
                {"prompt": f"Stream {number}", "max_tokens": 900, "ignore_eos": True}
                for number in range(NUM_STREAMS)
            )
            return [asyncio.ensure_future(end_of_stream(client, body)) for body in bodies]

        streams = start()

        async def all_serve() -> bool:
            if all(stream.done() for stream in streams):  # they ended before a look
                streams[:] = start()
            running = await labelled(site, "vllm:num_requests_running")
            return len(running) == 3 and all(running.values())

        checks.expect(await eventually(all_serve), "every replica serves streams")
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        victim = min(name for name in names if name.startswith(f"SERVE_REPLICA::{APP}#Replica#"))
        ray.kill(ray.get_actor(victim, namespace="serve"))
        ends = Counter(await asyncio.gather(*streams))
    is_told = ends.keys() <= {"complete", "error", "503"}
    checks.expect(
        is_told and ends["complete"] < NUM_STREAMS, "the requests of a killed replica are told"
    )
    checks.expect(ends["complete"] > 0, "the others go on", dict(ends))
    checks.expect(await eventually(lambda: has_replicas(site, 3)), "it is replaced")


async def check_ingress(checks: Checks) -> None:
    """Check the application behind Ray's own proxy, deployed from plain data as by KubeRay."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    args = {
        "engine": with_server_defaults(ENGINE),
        "server": {"keys": [KEY]},
        "num_replicas": 2,
        "num_cpus": CPUS,
    }
    target = mie.ray.build_openai_app(args)
    await asyncio.to_thread(serve.run, target, name="front", route_prefix="/mie")
    site = Site(url=f"http://127.0.0.1:{port}/mie")
    async with client_of(site) as client:
        refused = await client.post("/v1/completions", json=seeded(1), headers=WRONG_KEY)
        checks.expect(refused.status_code == 401, "behind Ray's proxy, a wrong key is refused")
        bodies = [seeded(number) for number in (1, 2)]
        found = [(await client.post("/v1/completions", json=body)).status_code for body in bodies]
        checks.expect(found == [200] * 2, "the right key is answered", found)
        ends = [await end_of_stream(client, {**body, "ignore_eos": True}) for body in bodies]
        checks.expect(ends == ["complete"] * 2, "streams end well", ends)
    checks.expect(await has_replicas(site, 2), "/health is that of all replicas")
    await disconnect(checks, site)
    await asyncio.to_thread(serve.shutdown)


def check_data(checks: Checks) -> None:
    """Check batches: one engine here, and one or two actors."""
    from mie.frontend.batch import answers as answers_here
    from mie.frontend.llm import LLM

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
        for number, todo in ((1, rows[:20]), (2, rows)):  # the second one goes on
            dataset = ray.data.from_items([{**row, "sampling_params": params} for row in todo])
            found = mie.ray.generate(
                dataset,
                settings,
                num_actors=number,
                num_cpus=CPUS,
                batch_size=8,
                checkpoint=directory,
            ).take_all()
            texts = {row["id"]: row["generated_text"] for row in found}
            wanted = {row["id"]: expected[row["id"]] for row in todo}
            checks.expect(
                texts == wanted, f"{len(todo)} rows with {number} actors equal one engine"
            )
            checks.expect(sum(row["error"] is not None for row in found) == 1, "failures are rows")
        num_kept = [len(file.read_text().splitlines()) for file in Path(directory).glob("*.jsonl")]
        checks.expect(sum(num_kept) == 40, "a restart computed only what was missing", num_kept)


def check_batch(checks: Checks, directory: Path) -> None:
    """Check that ``mie batch`` gives the same answers with and without Ray."""
    bodies = ({"prompt": f"Story {number}", "max_tokens": 8} for number in range(20))
    lines = (
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    )
    asked = directory / "in.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for name, more in (("here", ()), ("on Ray", on_ray(2))):
        answered = directory / name
        command = [sys.executable, "-m", "mie", "batch", str(asked), str(answered)]
        subprocess.run([*command, *OPTIONS, *more], check=True, timeout=1200)
        records = [json.loads(line) for line in answered.read_text().splitlines()]
        found.append({each["custom_id"]: each["response"]["body"]["choices"] for each in records})
    here, there = found
    checks.expect(len(here) == 20 and here == there, "mie batch answers alike on two replicas")


def on_ray(number: int) -> list[str]:
    """Return the options of replicas on this process's cluster."""
    address = ray.get_runtime_context().gcs_address
    return ["--ray-address", address, "--replicas", str(number), "--replica-cpus", str(CPUS)]


def check_serve(checks: Checks, directory: Path) -> None:
    """Start ``mie serve`` with and without Ray, and compare the two."""
    with (
        serving(directory / "plain", OPTIONS) as plain,
        serving(directory / "replicas", [*OPTIONS, *on_ray(1)]) as server,
    ):
        asyncio.run(check_serving(checks, Site.of(server), Site.of(plain)))


def main() -> int:
    """Run the checks, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check mie on Ray.")
    names = ("ingress", "serve", "data")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(names))
    parts = parser.parse_args().parts or names
    checks = Checks()
    with connected(None, 3 * CPUS), tempfile.TemporaryDirectory() as directory:
        if "ingress" in parts:
            asyncio.run(check_ingress(checks))
        if "serve" in parts:
            check_serve(checks, Path(directory))
        if "data" in parts:
            check_data(checks)
            check_batch(checks, Path(directory))
    print(json.dumps({"problems": checks.problems, **checks.figures}, indent=2))
    return int(bool(checks.problems))


if __name__ == "__main__":
    sys.exit(main())
