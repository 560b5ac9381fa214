"""The flag that chooses the machine, and the settings that belong to one."""

import pytest

from mie.backend import BACKENDS, SETTINGS, load_backend
from mie.config import EngineConfig
from mie.errors import ConfigError


def test_every_setting_of_a_backend_is_one_of_the_engine() -> None:
    names = {name for own in SETTINGS.values() for name in own}
    assert names <= set(EngineConfig.__dataclass_fields__)


def test_a_setting_reaches_its_backend_and_is_refused_by_the_others() -> None:
    config = EngineConfig(num_threads=3)
    backend = load_backend("numpy", config=config)
    assert backend.workers.num_threads == 3
    for name in BACKENDS:
        if "num_threads" not in SETTINGS[name]:
            with pytest.raises(ConfigError, match=f"num_threads is not a setting of the {name}"):
                load_backend(name, config=config)
