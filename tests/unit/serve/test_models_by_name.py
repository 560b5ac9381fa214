"""Test ``mie pull``, ``list``, ``show``, ``rm`` and ``run`` against a local server of the hub."""

import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import gguf_files
import pytest
from hub_server import HubServer
from huggingface_hub import constants, file_download, utils

from mie.checkpoint.hub import HubFile, HubModel, HubName, ask_hub, cached_models, download
from mie.checkpoint.locate import BUNDLED_DIRECTORY, locate_model
from mie.cli import main, pull
from mie.cli.inspect import inspect_model
from mie.cli.pull import is_read
from mie.errors import ModelError

try:
    close_session = utils.close_session
except AttributeError:  # before huggingface_hub 1.0
    close_session = utils.reset_sessions

STORY = "mia/tiny-stories"
GGUF = "mia/tiny-stories-GGUF"
NUMPY = ("--backend", "numpy")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with the bundled model and a repository of GGUF files, and an empty cache."""
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    story = {path.name: path.read_bytes() for path in BUNDLED_DIRECTORY.iterdir()}
    gguf = {f"tiny-{tag}.gguf": tag.encode() * 400 for tag in ("Q8_0", "Q4_K_M", "F16")}
    gguf |= {f"BF16/tiny-BF16-0000{i}-of-00002.gguf": b"%d" % i * 1500 for i in (1, 2)}
    with HubServer(
        {STORY: story, GGUF: {**gguf, "mmproj-F16.gguf": b"m", "README.md": b"#"}}
    ) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # old versions have a copy
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        yield hub
    close_session()


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of a refused command."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize(
    ("text", "repo", "tag"),
    [
        ("org/model", "org/model", None),
        ("org/model-GGUF:Q8_0", "org/model-GGUF", "Q8_0"),
        ("hf.co/org/model:UD-Q4_K_XL", "org/model", "UD-Q4_K_XL"),
        ("https://huggingface.co/org/model.1", "org/model.1", None),
    ],
)
def test_a_name_has_a_repository_and_a_tag(text: str, repo: str, tag: str | None) -> None:
    assert HubName.parse(text) == HubName(repo, tag)


@pytest.mark.parametrize("text", ["qwen3", "a/b/c", "org/", "org/model:", "../x", "org/mödel", ""])
def test_other_texts_are_no_names(text: str) -> None:
    assert HubName.parse(text) is None


def model_of(*names: str) -> HubModel:
    return HubModel(repo="o/m", commit="c", files={name: HubFile(size=1) for name in names})


def test_quantisations_are_read_from_the_names_of_files() -> None:
    model = model_of(
        "m-Q4_K_M.gguf", "m.q8_0.gguf", "UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf",
        "UD-Q2_K_XL/m-UD-Q2_K_XL-00002-of-00002.gguf", "m-IQ4_XS.gguf", "m-fp16.gguf",
        "mmproj-F16.gguf", "m.gguf", "Q5_K_S.gguf", "m-MXFP4_MOE.gguf",
    )  # fmt: skip
    assert list(model.tags) == [
        "Q5_K_S", "UD-Q2_K_XL", "IQ4_XS", "MXFP4_MOE", "Q4_K_M", "FP16", "Q8_0"
    ]  # fmt: skip
    assert len(model.choose("q2_k_xl")) == 2
    assert model.choose("q8_0") == ["m.q8_0.gguf"]
    assert model.choose("m.gguf") == ["m.gguf"]
    assert model.choose(None) == ["m-Q4_K_M.gguf"]
    with pytest.raises(ModelError, match=r"has no 'Q3_K'; choose one of Q5_K_S, UD-Q2_K_XL"):
        model.choose("Q3_K")


def test_a_model_without_a_choice_says_so() -> None:
    with pytest.raises(ModelError, match="has several quantisations; choose one of Q2_K, Q3_K"):
        model_of("m-Q2_K.gguf", "m-Q3_K.gguf").choose(None)
    with pytest.raises(ModelError, match=r"in safetensors or GGUF files, only model\.onnx"):
        model_of("model.onnx").choose(None)
    with pytest.raises(ModelError, match=r"has no GGUF files, from which ':Q8_0' would choose"):
        model_of("config.json", "model.safetensors").choose("Q8_0")


def test_a_missing_part_of_the_weights_is_noticed() -> None:
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert model_of("config.json", *parts).names == ["o/m"]
    assert model_of("config.json", *parts[1:]).names == []
    assert model_of(*parts).names == []
    assert model_of("m-Q8_0-00001-of-00002.gguf").names == []


def test_a_model_is_pulled_listed_run_and_deleted(hub, capsys, tmp_path) -> None:
    assert main(["pull", STORY]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{STORY} is ready: mie run {STORY}\n"
    assert "model.safetensors: 6.5 MiB" in shown.err
    assert not any("README" in each for each in hub.requests)  # files that are not read
    assert main(["list", "--json"]) == 0
    bundled, pulled = json.loads(capsys.readouterr().out)
    assert (bundled["name"], pulled["name"]) == ("bundled", STORY)
    assert pulled["bytes"] > 6_857_216
    hub.requests.clear()
    assert main(["run", *NUMPY, "--temperature", "0", STORY, "Who", "are you?"]) == 0
    assert capsys.readouterr().out.startswith("I am the tiny story model")
    assert hub.requests == []  # what is here needs no network
    assert main(["show", STORY]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert main(["rm", STORY]) == 0
    assert capsys.readouterr().out.startswith(f"deleted {STORY} (6.")
    assert not [path for path in tmp_path.rglob("blobs/*") if path.is_file()]
    assert f"{STORY} is not on this machine; it has no models" in refusal(capsys, "rm", STORY)


class Terminal(io.StringIO):
    """A terminal of 80 columns, whose bars are lines that begin again."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", [STORY, f"{GGUF}:Q8_0"])
def test_a_terminal_shows_the_large_file_and_no_empty_bars(hub, monkeypatch, name) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    assert main(["pull", name]) == 0
    file, bar, *rest = shown.getvalue().splitlines(keepends=True)
    assert re.fullmatch(r"\S+: [\d.]+ [KM]iB\n", file)
    assert re.search(r"100%.*\n", "".join((bar, *rest)))
    assert not re.search("Fetching|Download|Reconstruct", shown.getvalue())


def test_a_quantisation_is_fetched_and_deleted_alone(hub, capsys) -> None:
    assert main(["pull", f"{GGUF}:q8_0"]) == 0
    assert main(["pull", f"hf.co/{GGUF}:BF16"]) == 0
    path = locate_model(f"{GGUF}:Q8_0")
    assert path.read_bytes() == hub.models[GGUF]["tiny-Q8_0.gguf"]
    assert locate_model(f"{GGUF}:BF16").name == "tiny-BF16-00001-of-00002.gguf"
    assert not any("F16.gguf" in each or "Q4" in each for each in hub.requests)
    capsys.readouterr()
    assert main(["list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["bundled", f"{GGUF}:BF16", f"{GGUF}:Q8_0"]
    if not hasattr(utils.HFCacheInfo, "delete_files"):  # an old version
        assert "deletes only whole models" in refusal(capsys, "rm", f"{GGUF}:Q8_0")
        return
    assert main(["rm", f"{GGUF}:Q8_0"]) == 0
    assert not path.exists()
    assert locate_model(f"{GGUF}:BF16").exists()
    capsys.readouterr()
    assert "has no 'Q8_0'; choose one of BF16" in refusal(capsys, "rm", f"{GGUF}:Q8_0")


def test_a_name_of_a_gguf_repository_is_a_model(hub: HubServer) -> None:
    assert locate_model(GGUF).name == "tiny-Q4_K_M.gguf"
    hub.requests.clear()
    assert locate_model(f"{GGUF}:Q4_K_M").name == "tiny-Q4_K_M.gguf"
    assert hub.requests == []


def test_an_interrupted_download_goes_on_where_it_ended(hub, monkeypatch, capsys) -> None:
    monkeypatch.setattr("mie.checkpoint.hub.BLOCK_BYTES", 700)
    monkeypatch.setattr("time.sleep", lambda _: None)  # the library waits before it tries again
    hub.cut["tiny-F16.gguf"] = 900
    assert GGUF in refusal(capsys, "pull", f"{GGUF}:F16")
    hub.cut.clear()
    hub.requests.clear()
    assert main(["list"]) == 0
    assert GGUF not in capsys.readouterr().out
    assert main(["pull", f"{GGUF}:F16"]) == 0
    assert "tiny-F16.gguf: 1.2 KiB, of which 700 bytes are here" in capsys.readouterr().err
    [resumed] = [each for each in hub.requests if "tiny-F16" in each and "GET" in each]
    assert resumed.endswith("from 700")
    assert locate_model(f"{GGUF}:F16").read_bytes() == hub.models[GGUF]["tiny-F16.gguf"]


def test_the_rest_of_an_interrupted_download_is_deleted(hub, capsys, tmp_path) -> None:
    draft = tmp_path / "hub" / "models--mia--tiny-stories-GGUF" / "blobs" / "0.mie.incomplete"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(bytes(3000))
    assert main(["rm", GGUF]) == 0
    assert capsys.readouterr().out == f"deleted {GGUF} (2.9 KiB)\n"
    assert not draft.parent.exists()


def test_a_checksum_does_not_name_a_file_elsewhere(hub, monkeypatch, capsys) -> None:
    monkeypatch.setattr(HubServer, "sha256", lambda *_: "../../evil")
    assert "checksum '../../evil' is not a SHA-256" in refusal(capsys, "pull", f"{GGUF}:F16")


def test_a_damaged_file_does_not_enter_the_cache(hub, capsys) -> None:
    hub.damaged.add("tiny-Q8_0.gguf")
    error = refusal(capsys, "pull", f"{GGUF}:Q8_0")
    assert "arrived damaged: its SHA-256 is " in error
    assert hub.sha256(GGUF, "tiny-Q8_0.gguf") in error
    hub.damaged.clear()
    assert main(["pull", f"{GGUF}:Q8_0"]) == 0


def test_what_does_not_fit_is_said_before_the_download(hub, monkeypatch, capsys) -> None:
    def available(num_bytes: int) -> None:
        for module in ("mie.cli.pull", "mie.load.sizing", "mie.ops.numpy_backend"):
            monkeypatch.setattr(f"{module}.available_bytes", lambda: num_bytes, raising=False)

    available(2500)
    error = refusal(capsys, "pull", f"{GGUF}:BF16")
    assert f"{GGUF} was not downloaded: 2 files of 2.9 KiB do not fit the memory, of which" in error
    assert f"2.4 KiB are available ({GGUF}:Q8_0 has 1.6 KiB, which fits; --force" in error
    available(100)
    assert "no quantisation of it fits" in refusal(capsys, "pull", f"{GGUF}:BF16")
    assert not any("GET" in each and "resolve" in each for each in hub.requests)
    assert main(["pull", f"{GGUF}:BF16", "--force"]) == 0


def test_a_large_directory_is_refused_with_the_table_of_its_plan(hub, capsys) -> None:
    config = json.loads(hub.models[STORY]["config.json"])
    big = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200}
    hub.models[STORY]["config.json"] = json.dumps(config | big).encode()
    error = refusal(capsys, "pull", STORY)
    assert f"{STORY} was not downloaded: not enough memory" in error
    assert "GGUF repository" in error
    assert "  weights " in error
    assert not any("safetensors" in each for each in hub.requests)
    hub.models[STORY]["config.json"] = json.dumps({"architectures": ["NoSuch"]}).encode()
    constants.HF_HUB_CACHE += "-2"
    assert "was not downloaded: " in refusal(capsys, "pull", STORY)
    assert not any("safetensors" in each for each in hub.requests)


def test_a_full_disk_is_noticed_before_the_download(hub, monkeypatch, capsys) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda _: usage)
    error = refusal(capsys, "pull", f"{GGUF}:Q8_0")
    assert "needs 1.6 KiB, and the disk of " in error
    assert "has 1000 bytes free" in error


def test_show_lists_quantisations_before_the_download(hub, capsys) -> None:
    assert main(["show", GGUF]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"{GGUF}, not on this machine")
    assert [line[16:].split()[0] for line in lines[1:-1]] == ["BF16", "F16", "Q4_K_M", "Q8_0"]
    assert all(line.endswith("  fits") for line in lines[1:-1])
    assert not any("resolve" in each for each in hub.requests)


def test_a_quantisation_that_is_not_read_is_refused_before_the_download(hub, capsys) -> None:
    hub.models[GGUF]["tiny-UD-IQ2_XXS.gguf"] = b"x"
    error = refusal(capsys, "pull", f"{GGUF}:iq2_xxs")
    assert "quantisation UD-IQ2_XXS is not supported; of this repository are BF16, F16" in error
    assert not any("resolve" in each for each in hub.requests)
    assert main(["show", GGUF]) == 0
    assert "UD-IQ2_XXS      1 bytes  is not supported" in capsys.readouterr().out
    read = "Q4_K_M UD-Q4_K_XL Q8_0 FP16 F32 BF16 IQ4_XS MXFP4_MOE Q3_K_L Q2_K"
    assert all(map(is_read, read.split()))
    assert not any(map(is_read, ["IQ1_S", "TQ1_0", "UD-IQ3_XXS"]))


def test_a_gguf_model_is_run_by_its_name(hub, capsys, tmp_path) -> None:
    path = gguf_files.convert(BUNDLED_DIRECTORY, tmp_path / "tiny-BF16.gguf", "BF16", "gpt-2")
    hub.models["mia/real"] = {path.name: path.read_bytes()}
    assert (
        main(["run", "mia/real:BF16", "Who are you?", *NUMPY, "--temperature", "0", "--pull"]) == 0
    )
    assert capsys.readouterr().out.startswith("I am the tiny story model")
    assert main(["show", "mia/real:BF16"]) == 0
    assert "name            mia/real:BF16" in capsys.readouterr().out


def test_a_model_that_is_not_here_is_fetched_only_if_that_is_wanted(hub, capsys) -> None:
    assert f"mie pull {STORY}, or add --pull" in refusal(capsys, "run", STORY)
    assert hub.requests == []
    assert main(["run", STORY, "Who are you?", *NUMPY, "--temperature", "0", "--pull"]) == 0
    assert capsys.readouterr().out.startswith("I am the tiny")


def test_missing_gated_and_misspelt_models_are_explained(hub, capsys) -> None:
    error = refusal(capsys, "pull", "mia/other")
    assert f"no such model on the hub (check the spelling at {hub.address}/mia/other" in error
    assert "OWNER/MODEL:TAG" in refusal(capsys, "pull", "qwen3")
    hub.gated.add(STORY)
    error = refusal(capsys, "pull", STORY)
    assert f"it is gated: accept its licence at {hub.address}/{STORY}" in error
    with pytest.raises(ModelError, match="it has no such revision"):
        ask_hub(GGUF, "v9")


def test_a_hub_that_is_not_reached_is_explained(hub, monkeypatch, capsys) -> None:
    assert main(["pull", f"{GGUF}:Q8_0"]) == 0
    directory = locate_model(STORY)
    capsys.readouterr()
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    assert locate_model(STORY) == directory
    error = refusal(capsys, "pull", STORY)
    assert f"no such file or directory, and {nowhere} cannot be reached (check the name" in error
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy.invalid:3128")
    error = refusal(capsys, "pull", STORY)
    assert "through the proxy proxy.invalid" in error
    assert "secret" not in error
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    assert "HF_HUB_OFFLINE is set, and the model is not" in refusal(capsys, "pull", STORY)
    assert locate_model(f"{GGUF}:Q8_0").exists()


def test_a_name_of_a_file_with_brackets_is_fetched_exactly(hub: HubServer) -> None:
    hub.models[GGUF]["t[1]*.gguf"] = b"x" * 2000
    model = ask_hub(GGUF)
    path = download(model, model.choose(None))
    assert os.listdir(path.parent) == ["tiny-Q4_K_M.gguf"]


# Facts of a model that is not on this machine


def test_inspect_fetches_headers_only(hub: HubServer, tmp_path: Path) -> None:
    weights = hub.models[STORY]["model.safetensors"]
    hub.cut["model.safetensors"] = 8 + int.from_bytes(weights[:8], "little")
    local, remote = inspect_model(str(BUNDLED_DIRECTORY)), inspect_model(STORY)
    assert remote.directory == "not on this machine"
    same = {"model": STORY, "directory": remote.directory}
    assert asdict(remote) == asdict(local) | same
    fetched = {path.name for path in (tmp_path / "hub").rglob("snapshots/*/*")}
    assert fetched == {"config.json", "generation_config.json"}
    assert cached_models()[0].names == []


def test_inspect_reads_the_header_of_a_gguf_file(hub: HubServer, tmp_path: Path) -> None:
    path = gguf_files.convert(BUNDLED_DIRECTORY, tmp_path / "tiny-Q8_0.gguf", "Q8_0", "gpt-2")
    hub.models[GGUF] = {"tiny-Q8_0.gguf": path.read_bytes()}
    local, remote = inspect_model(str(path)), inspect_model(f"{GGUF}:Q8_0")
    assert (remote.forms, remote.weights_bytes) == (local.forms, local.weights_bytes)
    assert remote.num_parameters == local.num_parameters
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def test_inspect_says_what_is_wrong_with_a_model_on_the_hub(hub, capsys) -> None:
    config = json.loads(hub.models[STORY]["config.json"])
    hub.models[STORY]["config.json"] = json.dumps(
        {**config, "architectures": ["WhisperForConditionalGeneration"]}
    ).encode()
    assert main(["inspect", STORY]) == 1
    assert "WhisperForConditionalGeneration" in capsys.readouterr().out
    assert "mie pull mia/tiny-stories" in refusal(capsys, "inspect", STORY, "--check")
    hub.models[STORY]["model.safetensors"] = b"\xff" * 4000
    assert "has a header of" in refusal(capsys, "inspect", STORY)
