"""Count the requests that wait, and the log-probabilities that they may take."""

from mie.base.stats.step import QueueState
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.sched.sequence import LOGPROBS_PER_TOKEN


def queue_of(engine: Engine, client: str | None = None) -> QueueState:
    """Return the number of requests of a client that wait. Any thread may call it.

    Clients differ under the fair policy only. Under others, all requests have the client None.
    """
    scheduler = engine.scheduler
    waiting = [seq for seq in [*scheduler.waiting] if seq.request.client == client]
    arrivals = [seq.request.metrics.arrival_time for seq in waiting]
    num_logprobs = sum(
        most_logprobs(each.params, each.num_prompt, engine.vocab_size, engine.max_model_len)
        for each in {seq.request for seq in waiting}
    )
    return QueueState(
        num_requests=len(waiting),
        num_tokens=sum(seq.num_tokens for seq in waiting) + num_logprobs // LOGPROBS_PER_TOKEN,
        num_free_seats=engine.config.max_num_seqs - len(scheduler.running),
        longest_wait=engine.clock() - min(arrivals) if arrivals else 0.0,
    )


def most_logprobs(
    params: SamplingParams, num_prompt: int, vocab_size: int, max_model_len: int
) -> int:
    """Return how many log-probabilities an answer may have."""
    num_new = max(0, max_model_len - num_prompt)
    if params.max_tokens is not None:
        num_new = min(num_new, params.max_tokens)
    found = 0
    for count, wanted in (
        (num_prompt, params.prompt_logprobs),
        (params.n * num_new, params.logprobs),
    ):
        if wanted is not None:  # -1 stands for the whole vocabulary
            found += count * (1 + (vocab_size if wanted < 0 else wanted))
    return found
