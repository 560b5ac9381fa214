"""The options, routers and manifest of docs/scale.md exist, and what the settings refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_options import help_of, unknown_options

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
    section = TEXT[TEXT.index("## On Kubernetes") : TEXT.index("The manifest is parsed")]
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
    assert "pip install 'mie[ray]'" in error


def test_the_help_says_when_replicas_pay():
    text = " ".join(help_of("serve").split())
    assert "They pay when each has a GPU or a machine of its own." in text
    assert "Two replicas on one CPU buy nothing" in text
