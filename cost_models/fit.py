"""Figures from measurements: what repeats have in common, curves through points, and parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

import numpy as np

from cost_models.curve import Curve

_MAD = 1.4826  # median absolute deviation of a normal distribution to its standard deviation
_ROUNDS = 8
# Terms of a curve that may be there: fixed, per byte, per cube root. Fewer come first, as they are taken where they fit as well.
_TERMS = ((1,), (0, 1), (1, 2), (0, 1, 2))


@dataclass(frozen=True)
class Sample:
    """What repeats of one measurement agree on. `spread` is their median deviation over the median, `count` how many were kept."""

    seconds: float
    spread: float
    count: int


def summarise(seconds: Sequence[float]) -> Sample:
    """The median of repeats without those more than three standard deviations above it: something else ran meanwhile.

    >>> summarise([1.0, 1.01, 0.99, 1.0, 9.0])
    Sample(seconds=1.0, spread=0.005, count=4)
    """
    middle = median(seconds)
    deviation = _MAD * median(abs(each - middle) for each in seconds)
    kept = [each for each in seconds if each <= middle + 3 * max(deviation, 0.01 * middle)]
    middle = median(kept)
    return Sample(middle, round(median(abs(each - middle) for each in kept) / middle, 4) if middle > 0 else 0.0, len(kept))


def fit_curve(points: Sequence[tuple[float, float]], ramp: bool = True, fixed: bool = True) -> Curve:
    """The curve through `(size, seconds)` points with the least squared relative error, no figure negative.

    Points far from it count less (weights of Huber, "Robust estimation of a location parameter", 1964, found by iteration). Sizes and
    seconds must be positive. `ramp=False` leaves the cube root out, `fixed=False` the fixed part. With fewer points than figures, the
    simpler curve through them is taken.
    """
    if not points:
        raise ValueError("a curve needs at least one point")
    size, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    columns = np.stack([np.ones_like(size), size, np.cbrt(size)], axis=1) / seconds[:, None]
    allowed = [each for each in _TERMS if (ramp or 2 not in each) and (fixed or 0 not in each)]
    weight, figures = np.ones_like(size), np.zeros(3)
    for _ in range(_ROUNDS):
        figures = _least(columns, weight, allowed)
        error = np.abs(columns @ figures - 1)
        scale = 2 * _MAD * float(np.median(error)) + 1e-6
        weight = np.sqrt(np.minimum(1.0, scale / np.maximum(error, 1e-12)))
    return Curve(float(figures[0]), ((float(figures[1]), float(figures[2])),))


def _least(columns: np.ndarray, weight: np.ndarray, allowed: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Non-negative least squares to 1: with three figures, every set of them can be tried."""
    found, least = np.zeros(3), np.inf
    for terms in allowed:
        if len(terms) > len(columns):
            continue
        solution = np.linalg.lstsq(columns[:, terms] * weight[:, None], weight, rcond=None)[0]
        loss = float(np.sum((weight * (columns[:, terms] @ solution - 1)) ** 2))
        if (solution >= 0).all() and loss < least * (1 - 1e-6) - 1e-15:
            found, least = np.zeros(3), loss
            found[list(terms)] = solution
    return found


def fit_figures(
    start: Mapping[str, float], predict: Callable[[Mapping[str, float]], Sequence[float]], seconds: Sequence[float]
) -> dict[str, float]:
    """Positive figures with the least squared logarithm of predicted over measured seconds (by Nelder and Mead's search, from `start`)."""
    from scipy.optimize import minimize  # takes a second to import, and plans need none of it

    names, measured = list(start), np.log(np.asarray(seconds, dtype=float))

    def loss(logs: Sequence[float]) -> float:
        predicted = predict(dict(zip(names, map(exp, logs), strict=True)))
        return float(np.mean((np.log(predicted) - measured) ** 2))

    first = np.array([log(start[name]) for name in names])
    simplex = np.vstack([first, *(first + 0.3 * step for step in np.eye(len(names)))])
    best = minimize(loss, first, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-10, "maxiter": 2000, "initial_simplex": simplex})
    return dict(zip(names, (exp(each) for each in best.x), strict=True))
