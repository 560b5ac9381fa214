"""Count the drafts of speculative steps."""


class SpeculationStats:
    """The running totals of an engine that speculates."""

    def __init__(self) -> None:
        self.num_drafts = 0
        """Number of times that a sequence got drafts in a step."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_by_position: list[int] = []
        """Number of kept drafts at each position, the first draft of a step first."""

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a sequence in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        counts = self.num_accepted_by_position
        counts += [0] * (num_drafts - len(counts))
        for position in range(num_accepted):
            counts[position] += 1
