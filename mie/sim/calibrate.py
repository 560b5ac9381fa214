"""Fit `Costs` to a recorded run by non-negative least squares over its steps.

This is the one module of the simulator that knows arrays. The balance of the roofline is the number
of tokens whose arithmetic takes as long as reading the weights. For a given balance, a step's cost
is linear in the costs. So a grid of balances is tried, and the best fit wins.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.errors import ConfigError, shown
from mie.sim.costs import Costs
from mie.sim.metrics import percentile
from mie.sim.recorded import RecordedStep
from mie.system.files import read_json_object

FORMAT_VERSION = 1
MAX_COSTS_BYTES = 1 << 16
MAX_COST_PS = 10**18
"""Maximum cost of a unit of work, eleven days. A simulated clock is a float in seconds."""
BALANCES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The balances that are tried: tokens whose arithmetic hides behind reading the weights."""
NUM_ROUNDS = 12
SMALL_ERROR = 0.02
"""Relative errors below this are noise and count as equal."""
MIN_STEPS = 20
MIN_MOVING = 0.05
"""Minimum fraction of steps that copy or swap for these costs to be fitted.

With fewer such steps, the cost would absorb any other slowness in them.
"""
RIDGE = 1e-12

_NAMES = (
    *("step_ps", "matrix_ps", "token_ps", "pair_ps", "context_ps", "seq_ps", "chunk_ps"),
    *("copy_ps", "swap_ps"),
)
"""The columns of `_features`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted costs, and how well they predict the steps they come from. Errors are relative."""

    costs: Costs
    num_steps: int
    median_error: float
    """Median absolute error of a step."""
    p90_error: float
    total_error: float
    """Error of all steps together: predicted / measured - 1."""

    def to_json(self, **about: Any) -> str:
        """Return a file of costs, with other facts about them."""
        fit = {name: value for name, value in vars(self).items() if name != "costs"}
        values = {"format": FORMAT_VERSION, "costs": asdict(self.costs), "fit": fit, **about}
        return json.dumps(values, indent=2) + "\n"


def fit_costs(steps: Sequence[RecordedStep]) -> Fit:
    """Return the costs that predict the durations of the steps best, relative to each.

    Raises:
        ConfigError: there are too few steps.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"the trace has {len(steps)} steps; a fit needs at least {MIN_STEPS} (record a longer"
            " run)"
        )
    if not any(step.duration_ns for step in steps):
        raise ConfigError("no step of the trace took any time; there is nothing to fit")
    measured = np.array([step.duration_ns for step in steps], np.float64)
    fits = [_fit(steps, measured, balance) for balance in BALANCES]
    best = min(fits, key=lambda fit: fit[0])
    return _judged(best[1], steps)


def _fit(steps: Sequence[RecordedStep], measured: Floats, balance: int) -> tuple[float, Costs]:
    """Return the fit for one balance, and the mean of its relative errors.

    Iterative reweighting minimises the sum of absolute relative errors. A machine is sometimes slow
    for reasons outside the step, and squared errors would let such steps dominate. Errors are
    relative to the prediction, because errors relative to the measurement would bias it downwards.
    """
    features = _features(steps, balance)
    predicted = np.full_like(measured, np.median(measured))
    residuals = np.ones_like(measured)
    for _ in range(NUM_ROUNDS):
        weights = 1 / (predicted * np.sqrt(np.maximum(residuals, SMALL_ERROR)))
        solution = non_negative_least_squares(features * weights[:, None], measured * weights)
        predicted = np.maximum(features @ solution, 1.0)
        residuals = np.abs(measured / predicted - 1)
    picoseconds = dict(zip(_NAMES, (round(1000 * value) for value in solution), strict=True))
    costs = Costs(**picoseconds, weights_ps=balance * picoseconds["token_ps"])
    return float(residuals.mean()), costs


def _features(steps: Sequence[RecordedStep], balance: int) -> Floats:
    work = np.array([step.work for step in steps], np.float64)
    # A recording does not tell windows and states apart. Its other costs cover them.
    num_tokens, rest = work[:, 0], work[:, 2:8]
    features = np.column_stack(
        [np.ones(len(work)), num_tokens > 1, np.maximum(balance, num_tokens), rest]
    )
    moves = features[:, -2:]
    moves[:, np.count_nonzero(moves, axis=0) < MIN_MOVING * len(steps)] = 0
    return features


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the x ≥ 0 that minimises ``|matrix @ x - target|``: [n, k], [n] → [k].

    The solution solves the unconstrained problem on the columns where it is positive. There are so
    few columns that every subset is tried, all in one call.
    """
    num_columns = matrix.shape[1]
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    scaled = matrix / np.where(scale, scale, 1.0)
    gram, moments = scaled.T @ scaled, scaled.T @ target
    subsets = (np.arange(2**num_columns)[:, None] >> np.arange(num_columns) & 1) * (scale > 0)
    # Put ones on the diagonal outside a subset, and tiny values inside, because columns may be
    # parallel.
    outside = np.eye(num_columns) * (1 - subsets + RIDGE)[:, None, :]
    systems = gram * subsets[:, :, None] * subsets[:, None, :] + outside
    solutions = np.linalg.solve(systems, (moments * subsets)[:, :, None])[:, :, 0]
    # This is |Ax - b|² without the constant |b|².
    losses = ((solutions @ gram - 2 * moments) * solutions).sum(axis=1)
    losses[solutions.min(axis=1) < 0] = np.inf
    best: Floats = solutions[int(losses.argmin())] / np.where(scale, scale, 1.0)
    return best


def _judged(costs: Costs, steps: Sequence[RecordedStep]) -> Fit:
    pairs = [(costs.step_ns(step.work), step.duration_ns) for step in steps]
    errors = [abs(predicted / max(1, measured) - 1) for predicted, measured in pairs]
    total = sum(predicted for predicted, _ in pairs) / sum(measured for _, measured in pairs)
    return Fit(
        costs=costs,
        num_steps=len(steps),
        median_error=percentile(errors, 50),
        p90_error=percentile(errors, 90),
        total_error=total - 1,
    )


def read_costs(path: Path) -> tuple[Costs, Mapping[str, Any]]:
    """Return the costs in a file that `Fit.to_json` wrote, and everything else in the file.

    Raises:
        ConfigError: the file cannot be read, or holds no costs.
    """
    values = read_json_object(path, MAX_COSTS_BYTES, ConfigError)
    if values.get("format") != FORMAT_VERSION:
        raise ConfigError(f"{path} holds no costs of format {FORMAT_VERSION}")
    if not isinstance(values.get("costs"), dict):
        raise ConfigError(f"{path} has no costs")
    for name, value in values["costs"].items():
        if type(value) is not int or not 0 <= value <= MAX_COST_PS:
            raise ConfigError(
                f"{path}: {shown(name)} must be an integer in 0 … {MAX_COST_PS}, got {shown(value)}"
            )
    return Costs(**values["costs"]), values
