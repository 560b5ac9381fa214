"""A small storm: rude clients, slow readers, nonsense and wrong keys, in this process.

`scripts/serve_check.py` is the large one.
"""

import asyncio
import logging
from typing import Any

import pytest
from audit import check_scheduler, engine_of
from live_server import INVARIANT, live
from serve_checks.storm import Storm, good_requests, malformed_payloads, slow_request

from mie import AsyncLLM
from mie.engine.watch.metrics import snapshot_of
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys

KEY = "right-key"
SOME, MANY = 30, pytest.param(120, marks=pytest.mark.slow)
"""Numbers of requests."""


@pytest.mark.parametrize("num_requests", [SOME, MANY])
@pytest.mark.parametrize(
    ("settings", "preempts"),
    # Each of the two slow readers, who begin together, needs 20 blocks in the end.
    [
        pytest.param({}, False, marks=pytest.mark.slow, id="enough blocks"),
        pytest.param({"num_blocks": 21, "max_num_seqs": 32}, True, id="too few blocks"),
    ],
)
def test_every_request_is_answered_right_and_no_block_stays(
    settings: dict[str, Any], preempts: bool, num_requests: int, caplog: pytest.LogCaptureFixture
):
    engine = AsyncLLM("bundled", **INVARIANT, **settings)
    try:
        with caplog.at_level(logging.INFO), live(engine, ServeConfig(keys=Keys.of([KEY]))) as url:
            storm = Storm(url=url, key=KEY, num_clients=16)
            asyncio.run(
                storm.run(
                    num_requests,
                    good_requests("bundled"),
                    slow=slow_request("bundled"),
                    malformed=malformed_payloads("bundled"),
                )
            )
        # The server has ended, and so has every request.
        scheduler = engine_of(engine).scheduler
        assert storm.wrong == []
        kinds = {"answered", "closed", "malformed", "wrong key", "slow reader"}
        assert storm.counts.keys() == kinds
        assert storm.counts["answered"] > num_requests / 3
        assert scheduler.manager.num_used == 0
        check_scheduler(scheduler)
        metrics = {each.name: each for each in snapshot_of(engine_of(engine)).read("bundled")}
        assert (metrics["vllm:num_preemptions"].value > 0) == preempts
    finally:
        engine.shutdown()
    records = [*caplog.records]
    assert not [record for record in records if record.exc_info or record.levelno >= logging.ERROR]
