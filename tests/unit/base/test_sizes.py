"""Test the parsing and formatting of sizes."""

import pytest

from mie.config.arguments import parse_size
from mie.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1b", 1),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("512MiB", 512 * 1024**2),
        ("2GB", 2 * 1000**3),
        (" 1.5 GiB ", 3 * 1024**3 // 2),
        ("0.1kb", 100),
        ("1tib", 1024**4),
        ("3TB", 3 * 1000**4),
        ("1.9", 1),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "12 XB", "1,000", "5M", "٣", "1.", "nan"])
def test_a_text_that_is_not_a_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 512MiB") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["0", "0GB", "0.4"])
def test_a_size_must_be_positive(text: str) -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        parse_size(text)
