"""The options, routers and manifest of docs/scale.md exist, and wrong settings are refused."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from documented_options import unknown_options

from mie.cli import main
from mie.errors import ConfigError
from mie.ray.config import MAX_CHUNKS_PER_SECOND, ROUTERS, ReplicaConfig

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
TEXT = PAGE.read_text(encoding="utf-8")
OF_OTHER_PROGRAMS = {"--policy", "--worker-urls", "--service-discovery", "--selector"}


def test_every_option_exists():
    commands = (("serve",), ("batch",), ("bench", "serve"), ("sim", "cluster"))
    assert unknown_options(TEXT, commands, OF_OTHER_PROGRAMS) == set()


def test_every_router_is_in_the_table():
    assert set(re.findall(r"^\| `(\w[\w-]*)` \|", TEXT, re.MULTILINE)) == set(ROUTERS)


def test_the_manifest_describes_replicas():
    section = TEXT[TEXT.index("## On Kubernetes") : TEXT.index("The manifest was not tried")]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    service = yaml.safe_load("\n".join(lines))
    serving = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = serving["applications"]
    assert application["import_path"] == "mie.ray:build_openai_app"
    config = ReplicaConfig.of(application["args"])
    assert config.server.max_chunks_per_second == MAX_CHUNKS_PER_SECOND
    [workers] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= config.num_gpus
    assert int(container["resources"]["limits"]["cpu"]) >= config.num_cpus
    assert config.autoscaling is not None
    assert workers["maxReplicas"] == config.autoscaling["max_replicas"]


def test_a_replica_computes_with_the_cpus_that_it_gets():
    assert ReplicaConfig(num_cpus=4).engine_settings["num_threads"] == 4
    assert ReplicaConfig(num_cpus=0.5).engine_settings["num_threads"] == 1
    given = ReplicaConfig(engine={"model": "bundled", "num_threads": 2}, num_cpus=4)
    assert given.engine_settings["num_threads"] == 2
    assert "num_threads" not in ReplicaConfig(engine={"backend": "cupy"}).engine_settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"num_cpus": -1}, "num_cpus"),
        ({"replicas": 3}, "replicas"),
        ({"engine": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"server": {"prot": 1}}, "prot"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ReplicaConfig.of(values)


def test_keys_are_a_list_or_a_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("team-a secret\n")
    server = ReplicaConfig.of({"server": {"keys": ["one", "two"], "admin_keys": str(file)}}).server
    assert server.keys is not None
    assert server.keys.find("two") == "key-2"
    assert server.admin_keys is not None
    assert server.admin_keys.find("secret") == "team-a"


AUTOSCALING = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16}


def test_the_options_reach_the_replicas_settings(monkeypatch):
    found: list[ReplicaConfig] = []
    server = SimpleNamespace(serve_replicas=lambda config, address: found.append(config) or 0)
    monkeypatch.setitem(sys.modules, "mie.ray.app", server)
    words = ("--autoscaling", json.dumps(AUTOSCALING), "--replica-cpus", "3", "--replica-gpus", "1")
    assert main(["serve", *words, "--num-blocks", "64"]) == 0
    [config] = found
    assert config.autoscaling == AUTOSCALING
    assert (config.num_cpus, config.num_gpus) == (3, 1)
    assert config.engine_settings["num_blocks"] == 64


class Deployed(SimpleNamespace):
    """The arguments of `ray.serve.deployment`, without Ray."""

    def bind(self, *args: Any) -> Deployed:
        self.args = args
        return self


@pytest.fixture
def build_replicas(monkeypatch) -> Any:
    """`mie.ray.app.build_replicas` on modules that only note their arguments."""
    serve = SimpleNamespace(
        deployment=lambda target, **options: Deployed(options=options),
        ingress=None,
        Application=None,
    )
    modules = {
        "ray": SimpleNamespace(serve=serve),
        "ray.serve": serve,
        "ray.serve.config": SimpleNamespace(RequestRouterConfig=SimpleNamespace),
        "ray.serve.handle": SimpleNamespace(DeploymentHandle=None),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mie.ray.app", raising=False)
    app = importlib.import_module("mie.ray.app")
    yield app.build_replicas
    del sys.modules["mie.ray.app"]
    vars(sys.modules["mie.ray"]).pop("app", None)  # other tests import the package anew


def test_the_settings_reach_the_deployment(build_replicas):
    config = ReplicaConfig(
        autoscaling=AUTOSCALING, num_cpus=3, num_gpus=1, router_settings={"slack": 2}
    )
    deployed = build_replicas(config)
    assert deployed.options["autoscaling_config"] == AUTOSCALING
    assert "num_replicas" not in deployed.options  # Ray takes one of the two
    assert deployed.options["ray_actor_options"] == {"num_cpus": 3, "num_gpus": 1}
    router = deployed.options["request_router_config"]
    assert router.request_router_class == ROUTERS["prefix"]
    assert router.request_router_kwargs == {"slack": 2}
    assert deployed.args == (config.engine_settings, config.server)


def test_another_number_of_replicas_restarts_none(build_replicas):
    one, other = [build_replicas(ReplicaConfig(num_replicas=number)) for number in (1, 3)]
    assert one.args == other.args  # Ray replaces replicas whose arguments have changed
    assert [each.options["num_replicas"] for each in (one, other)] == [1, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "0"), "num_replicas must be"),
        (("--replicas", "2", "--trace", "x"), "--trace writes the events of one engine"),
        (("--replicas", "2", "--autoscaling", "{}"), "give one of them"),
        (("--router-settings", "[]"), "not a JSON object"),
    ],
)
def test_mistakes_are_one_line(capsys, words, message):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert main(["serve", "--replicas", "2"]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert "pip install 'ray[serve]' pyarrow" in error
