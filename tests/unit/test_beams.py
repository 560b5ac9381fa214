"""Test the costs of beams, where a step of a beam search is a one-token request for each beam."""

from test_scheduler import Driver

BLOCK_SIZE, WIDTH = 4, 4
PROMPT = list(range(10, 30))
"""A prompt of five full blocks."""


def extend(driver, beams):
    """Request a token after each beam, and return three counts.

    They are the blocks that all beams share, the blocks taken from the free list, and the computed
    tokens.
    """
    records = []
    driver.manager._emit = records.append
    for beam in beams:
        driver.add_ids([*PROMPT, *beam], max_tokens=1)
    plan = driver.scheduler.schedule()
    num_used = driver.manager.num_used
    driver.answer(plan)
    allocated = [len(r[3]) for r in records if r[0] == "alloc"]
    return num_used, sum(allocated), plan.num_tokens


def test_beams_share_all_full_blocks_and_compute_their_last_one():
    driver = Driver(num_blocks=64, enable_prefix_caching=True)
    driver.add_ids(PROMPT, max_tokens=1)
    driver.run()
    beams = [[40 + i] for i in range(WIDTH)]
    for length in range(1, 11):
        # A block that the previous request filled is in the tree, except the last one.
        num_own = (length - 1) // BLOCK_SIZE
        num_tail = length - num_own * BLOCK_SIZE
        expected = (5 + WIDTH * (num_own + 1), WIDTH, WIDTH * num_tail)
        assert extend(driver, beams) == expected
        beams = [[*beam, 50 + length] for beam in beams]


def test_beams_that_diverged_late_share_their_common_blocks():
    driver = Driver(num_blocks=64, enable_prefix_caching=True)
    stem = list(range(60, 60 + BLOCK_SIZE + 1))
    extend(driver, [stem])
    num_used, num_allocated, num_computed = extend(driver, [[*stem, 70 + i] for i in range(WIDTH)])
    assert num_used == 6 + WIDTH, "the prompt, the stem's full block, and a last one for each"
    assert num_allocated == WIDTH
    assert num_computed == 2 * WIDTH
