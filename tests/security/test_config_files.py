"""Check that a hostile ``config.json`` or ``generation_config.json`` is refused at little cost."""

import os
import socket
from pathlib import Path

import pytest
from hostile_files import HUGE, model_directory, nested, with_raw
from measured import MAX_BYTES, Zygote
from tables import quick_third


def rope(kind: str, **changes: str) -> str:
    """Return a ``rope_scaling`` of a type, with the values unchanged."""
    values = {
        "yarn": {"factor": "4.0", "original_max_position_embeddings": "64"},
        "llama3": {"factor": "8", "low_freq_factor": "1", "high_freq_factor": "4"},
        "linear": {},
    }[kind]
    pairs = {"rope_type": f'"{kind}"', **values, **changes}
    return "{" + ", ".join(f'"{key}": {value}' for key, value in pairs.items()) + "}"


SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)
VALUES = [
    ("num_hidden_layers", "100000000"),
    ("num_hidden_layers", "1025"),
    ("hidden_size", "1000000000000"),
    ("vocab_size", "9223372036854775808"),
    ("max_position_embeddings", "2147483648"),
    *((name, HUGE) for name in SIZES),
    ("hidden_size", "-9223372036854775809"),
    ("hidden_size", "1e308"),
    ("rms_norm_eps", HUGE),
    ("rms_norm_eps", "1e308"),
    ("rms_norm_eps", "1e999"),
    ("rms_norm_eps", "5e-324"),
    ("rms_norm_eps", "NaN"),
    ("rms_norm_eps", "-Infinity"),
    ("rope_theta", HUGE),
    ("rope_theta", "1e308"),
    ("rope_theta", "Infinity"),
    ("rope_theta", "1.0000000000000002"),
    ("eos_token_id", HUGE),
    ("eos_token_id", f"[{'0,' * 100_000}0]"),
    ("bos_token_id", "-1"),
    ("layer_types", '["sliding_attention"]'),
    ("layer_types", f"[{'[],' * 100_000}1]"),
    ("layer_types", f'[{nested(900)}, "full_attention"]'),
    ("layer_types", f"[{','.join(str(x) for x in range(100_000))}]"),
    ("hidden_act", nested(900)),
    ("hidden_size", nested(900)),
    ("hidden_size", nested(450, '{"a":', "}", "1")),
    ("hidden_size", f"[{'1,' * 400_000}1]"),
    ("hidden_size", f'"{"x" * 900_000}"'),
    ("architectures", f'["{"Llama" * 150_000}"]'),
    ("architectures", f"[{nested(900)}]"),
    ("architectures", '["\\u001b[2J"]'),
    ("tie_word_embeddings", '"\\u001b]0;title\\u0007"'),
    ("torch_dtype", "7"),
    ("rope_scaling", nested(900)),
    ("rope_scaling", rope("linear", factor="1e308")),
    ("rope_scaling", rope("linear", factor="1e-300")),
    ("rope_scaling", rope("linear", factor="1e-6")),
    ("rope_scaling", rope("linear", factor=HUGE)),
    ("rope_scaling", rope("yarn", beta_fast="5e-324")),
    ("rope_scaling", rope("yarn", beta_fast=HUGE)),
    ("rope_scaling", rope("yarn", beta_slow="1e308")),
    ("rope_scaling", rope("yarn", attention_factor="1e308")),
    ("rope_scaling", rope("yarn", mscale="-10", mscale_all_dim="-7.213475204444817")),
    ("rope_scaling", rope("yarn", mscale="1e308", mscale_all_dim="5e-324")),
    ("rope_scaling", rope("yarn", original_max_position_embeddings=HUGE)),
    ("rope_scaling", rope("yarn", rope_theta=HUGE)),
    ("rope_scaling", rope("yarn", factor="1e6", original_max_position_embeddings="1000000")),
    ("rope_scaling", rope("llama3", low_freq_factor="5e-324")),
    ("rope_scaling", rope("llama3", high_freq_factor=HUGE)),
    ("rope_scaling", rope("llama3", factor="1e999")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"))


def short(text: object) -> str:
    return str(text)[:24]


@pytest.mark.parametrize(("key", "value"), quick_third(VALUES), ids=short)
def test_a_hostile_value_is_refused_by_its_name(zygote, model, key, value) -> None:
    with_raw(model, key, value)
    word = {"hidden_act": "activation", "architectures": "", "layer_types": "layer"}.get(key, key)
    zygote.run("config", model).check_refused("config.json", word)


@pytest.mark.parametrize("kind", ['["yarn"]', "{}", '"yarn\\u0000"', nested(900), "[1e999]", HUGE])
def test_a_hostile_rope_type_is_refused(zygote: Zygote, model: Path, kind: str) -> None:
    with_raw(model, "rope_scaling", f'{{"rope_type": {kind}, "a": 1}}')
    zygote.run("config", model).check_refused("config.json", "")


def test_a_value_that_is_not_read_is_ignored(zygote: Zygote, model: Path) -> None:
    for value in ("NaN", HUGE, "1e999", nested(900), '"\\ud800"'):
        with_raw(model, "a_key_of_the_future", value)
        result = zygote.run("config", model)
        result.check_cost()
        assert result.error is None


NO_TYPE = "neither 'architectures' nor 'model_type' is given"
CONTENTS = {
    "nothing": (b"", "not valid JSON"),
    "a list": (b"[]", "JSON object"),
    "not UTF-8": (b'{"a": "\xff"}', "not valid JSON"),
    "nested deeply": (nested(500_000).encode(), "not valid JSON"),
    "an integer of 900,000 digits": (b'{"a": ' + b"1" * 900_000 + b"}", "digits"),
    "a key twice": (b'{"vocab_size": 40, "vocab_size": 41}', "'vocab_size' is given twice"),
    "300,000 lists": (b'{"a": [' + b"[]," * 300_000 + b"1]}", NO_TYPE),
    "100,000 keys": (b"{" + b",".join(b'"%d":0' % n for n in range(90_000)) + b"}", NO_TYPE),
    "1 MB and a byte": (b" " * (1 << 20) + b"{", "more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", quick_third((name,) for name in CONTENTS))
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_hostile_json_is_refused(zygote: Zygote, tmp_path: Path, file: str, name: str) -> None:
    data, word = CONTENTS[name]
    model_directory(tmp_path)
    (tmp_path / file).write_bytes(data)
    result = zygote.run("config", tmp_path)
    if file == "generation_config.json" and word == NO_TYPE:  # on a path where it requests nothing
        result.check_cost()
        assert result.error is None
    else:
        result.check_refused(file, word)


def test_a_sparse_file_is_not_read(zygote: Zygote, tmp_path: Path) -> None:
    model_directory(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    zygote.run("config", tmp_path).check_refused("config.json", "more than 1,048,576 bytes")


# Paths that are not files.


def put(path: Path, kind: str) -> None:
    """Create a path that is not a regular file."""
    path.unlink(missing_ok=True)
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        # The path of a socket has at most 108 characters, so it is bound from its folder.
        before = os.getcwd()
        os.chdir(path.parent)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(before)
    else:
        path.symlink_to({"a loop": path.name, "nothing": "nowhere"}.get(kind, kind))


KINDS = {
    "/dev/zero": "it is a device",
    "/dev/urandom": "it is a device",
    "/dev/tty": "",
    "/proc/self/mem": "",
    "/proc/kmsg": "",
    "a pipe": "it is a pipe",
    "a directory": "it is a directory",
    "a socket": "",
    "a loop": "symbolic links",
    "nothing": "No such file",
}
FILES = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        *(("config.json", kind) for kind in KINDS),
        *((file, kind) for file in FILES[1:] for kind in ("/dev/zero", "a pipe", "a directory")),
    ],
)
def test_a_path_that_is_not_a_file_is_refused_without_waiting(zygote, tmp_path, file, kind) -> None:
    model_directory(tmp_path)
    put(tmp_path / file, kind)
    action = "weights" if file == "model.safetensors" else "config"
    zygote.run(action, tmp_path).check_refused(file, KINDS[kind])


def test_the_commands_refuse_with_the_same_message(zygote: Zygote, tmp_path: Path) -> None:
    model_directory(tmp_path)
    put(tmp_path / "config.json", "/dev/zero")
    for command in (["inspect"], ["generate", "Hello", "--model"], ["chat", "--model"]):
        result = zygote.run("cli", *command, tmp_path)
        result.check_refused("config.json", "it is a device, not a regular file")


def test_inspect_names_a_hostile_value_as_a_problem(zygote: Zygote, model: Path) -> None:
    with_raw(model, "num_hidden_layers", "100000000")
    result = zygote.run("cli", "inspect", model)
    result.check_cost()
    assert result.code == 1
    assert "num_hidden_layers must be at most 1024, got 100000000" in result.stdout


@pytest.mark.parametrize("name", ['"\\u001b[2J\\u001b]0;owned\\u0007"', nested(900)])
def test_inspect_shows_no_control_characters(zygote: Zygote, model: Path, name: str) -> None:
    with_raw(model, "architectures", f"[{name}]")
    result = zygote.run("cli", "inspect", model)
    result.check_cost()
    assert "\x1b" not in result.stdout + result.stderr


def test_the_largest_config_costs_a_fraction_of_the_limit(zygote: Zygote, tmp_path: Path) -> None:
    """The worst JSON of the maximum size costs half of the limits."""
    model_directory(tmp_path)
    text = '{"a": [' + ",".join([nested(100)] * 5000) + "]}"
    (tmp_path / "config.json").write_text(text)
    result = zygote.run("config", tmp_path)
    result.check_cost()
    assert result.peak_bytes < MAX_BYTES / 2
