"""Test how settings of the prefix cache on a disk are refused."""

from pathlib import Path
from typing import Any

import pytest

from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

MODEL = Path(__file__).parents[2] / "golden" / "models" / "qwen3_tied"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_cache_disk": 1 << 30}, "prefix_cache_disk is 1073741824 without"),
        ({"prefix_cache_dir": "/proc/nope"}, "prefix_cache_dir cannot be used"),
    ],
)
def test_a_cache_that_cannot_be_kept_is_refused(settings: dict[str, Any], message: str):
    config = EngineConfig(num_blocks=8, max_model_len=32, **settings)
    with pytest.raises(ConfigError, match=message):
        load_engine(MODEL, LoadSettings(engine=config, backend="numpy"), use_tqdm=False)
