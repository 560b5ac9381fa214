"""State which GPUs the kernels run on. Imports nothing, so that `mie doctor` can always ask."""

OLDEST_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPU. Its cp.async and bfloat16 products need Ampere."""


def remedy_for(capability: tuple[int, ...]) -> str | None:
    """Return why a GPU of this compute capability is refused and the remedy, or None if it runs."""
    if capability >= OLDEST_CAPABILITY:
        return None
    oldest = ".".join(map(str, OLDEST_CAPABILITY))
    return f"the kernels need {oldest} (Ampere) or later; use backend numpy"
