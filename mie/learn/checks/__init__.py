"""Check the rules of each exercise, and name the first rule that a learner's code breaks.

A check calls the learner's functions in small situations, mostly with a `Probe` in place of the
model, and compares with the rule. It never reads the source.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mie.learn.checks import attention, blocks, engine, sharing, weights

CHECKS: Mapping[int, Callable[[Any, Mapping[int, Any]], None]] = {
    1: attention.check_1,
    2: attention.check_2,
    3: blocks.check_3,
    4: blocks.check_4,
    5: engine.check_5,
    6: sharing.check_6,
    7: weights.check_7,
    8: blocks.check_8,
    9: engine.check_9,
}
"""The check of each exercise. It gets the learner's module and the solutions of all steps."""
