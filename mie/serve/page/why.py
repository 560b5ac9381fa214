"""Why a sequence waits, in a sentence."""

from __future__ import annotations

from mie.reprs import count
from mie.sched.waiting import Wait


def sentence(wait: Wait | None) -> str:
    """Return what is missing for a sequence, which waits unless ``wait`` is None."""
    if wait is None:
        return "It does not wait: it runs, or has ended."
    blocks = (
        f"It needs {count(wait.blocks_needed, 'block')}; {wait.blocks_free} are free and "
        f"{wait.blocks_evictable} can be evicted"
    )
    if wait.blocks_spare:
        blocks += f", of which {wait.blocks_spare} must be left"
    running = wait.seats - wait.seats_free
    left = wait.budget - wait.budget_decodes - wait.budget_prefills
    return {
        "queue": f"{count(wait.position, 'sequence')} wait before it, and none overtakes another.",
        "quota": "Its client runs as many sequences as its max_num_seqs allows.",
        "seats": f"All {wait.seats} seats are taken by {count(running, 'sequence')} that run.",
        "blocks": f"{blocks}.",
        "budget": (
            f"A step has {wait.budget} tokens: {wait.budget_decodes} go to answers, "
            f"{wait.budget_prefills} to prompts that have begun, and {left} are left."
        ),
        "nothing": f"Nothing: the next step admits it. {blocks}.",
    }[wait.because]
