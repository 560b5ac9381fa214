"""The page in Firefox: those of the browser's tests that need neither a mouse nor a keyboard."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser import opened
from firefox import firefox
from test_page_in_browser import (  # noqa: F401  # tests and fixtures, for the browser below
    _no_errors,
    engine,
    shown,
    test_a_fork_shares_the_prompt_and_each_writer_copies_once,
    test_a_page_that_nobody_sees_leaves_its_connection_to_others,
    test_a_request_sent_twice_hits_what_the_answer_says,
    test_a_small_pool_preempts_as_often_as_the_counters_say,
    test_every_step_is_the_state_of_the_servers_replay,
    test_page_server_and_metrics_agree,
    test_tabs_share_one_stream_which_outlives_the_first,
    url,
)

pytestmark = pytest.mark.slow  # Chromium runs these tests in `make test`


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with firefox(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def num_tabs() -> int:
    """Return a smaller number than in Chromium, since each tab is a window here."""
    return 4


def test_the_story_and_the_chat_open_and_answer(browser: Any, url: str) -> None:  # noqa: F811
    with opened(browser, f"{url}/story.html#sharing") as story:
        story.until("mie.store?.run && mie.store.step === mie.chapters[3].to")
        assert story.js("document.querySelectorAll('.cell').length") > 0
        assert story.errors == []
    with opened(browser, f"{url}/chat") as chat:
        chat.until("window.mie?.page?.model")
        chat.js(
            """() => {
                const message = document.getElementById("message");
                message.value = "Tell me about an otter.";
                message.closest("form").requestSubmit();
            }"""
        )
        chat.until("document.querySelector('.facts-of')?.textContent.includes('generated')")
        assert chat.errors == []
