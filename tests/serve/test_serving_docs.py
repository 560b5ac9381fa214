"""The options, routes and metrics that docs/serving.md names exist, and its manifests are YAML."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from documented_options import unknown_options

from mie.serve.routes import OPERATIONS

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")
OF_DOCKER = {"--rm", "--gpus", "--entrypoint", "--build-arg"}
OF_OTHER_CLIENTS = {"--base-url", "--profile", "--data", "--constraint"}
OF_OTHER_PROGRAMS = OF_DOCKER | OF_OTHER_CLIENTS | {"--no-cache-dir", "--uid", "--create-home"}


def test_every_option_exists():
    commands = (("serve",), ("bench", "serve"), ("bench", "compare"), ("sim", "workload"))
    scripts = (PAGE.parents[1] / "scripts" / "serve_check.py").read_text()
    of_scripts = set(re.findall(r"--[\w-]+", scripts))
    assert unknown_options(TEXT, commands, OF_OTHER_PROGRAMS | of_scripts) == set()


def test_every_route_is_in_the_table():
    table = TEXT[TEXT.index("## Routes") : TEXT.index("Nothing in a request")]
    assert {each.path for each in OPERATIONS} <= set(re.findall(r"/[\w./{}-]+", table))


def manifests() -> Iterator[Any]:
    """The Kubernetes objects of the page."""
    section = TEXT[TEXT.index("## On Kubernetes") : TEXT.index("## Metrics")]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    yield from yaml.safe_load_all("\n".join(lines))


def test_the_manifests_fit_each_other():
    deployment, pool = manifests()
    template = deployment["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    [container] = template["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    assert {port["number"] for port in pool["spec"]["targetPorts"]} == ports
    assert template["spec"]["securityContext"]["runAsNonRoot"]


@pytest.fixture(scope="module")
def client(server: Any) -> httpx2.Client:
    return server.client


def test_every_probe_is_answered(client: httpx2.Client):
    deployment, _ = manifests()
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert client.get(container[name]["httpGet"]["path"]).status_code == 200


def test_every_metric_exists(client: httpx2.Client):
    metrics = client.get("/metrics").text
    for name in re.findall(r"`(vllm:\w+)`", TEXT):
        assert re.search(rf"^{name}(_total)?\b", metrics, re.MULTILINE), name
