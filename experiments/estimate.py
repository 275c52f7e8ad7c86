"""Means and how sure they are."""

import math
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean and its standard error; the error of an exact value is 0."""

    mean: float
    error: float

    @classmethod
    def of_kinds(cls, values: np.ndarray) -> "Estimate":
        """Of independent rows [M, R] of M kinds with equal weight."""
        values = np.asarray(values, np.float64)
        kinds, rows = values.shape
        return cls(float(values.mean()), math.sqrt(values.var(axis=1, ddof=1).sum() / rows) / kinds)

    @classmethod
    def of_groups(cls, values: np.ndarray, groups: np.ndarray) -> "Estimate":
        """Of rows [R] in groups [R], of which only the groups are independent: positions of one prompt are alike.

        The mean is over rows. With as many rows in every group, the error is that of the groups' means.
        """
        values = np.asarray(values, np.float64)
        _, places = np.unique(groups, return_inverse=True)
        totals = np.bincount(places, values - values.mean())
        count = len(totals)
        error = math.sqrt((totals**2).sum() * count / max(count - 1, 1)) / len(values)
        return cls(float(values.mean()), error if count > 1 else math.nan)

    @property
    def from_zero(self) -> float:
        """How many standard errors the mean is away from 0."""
        return abs(self.mean) / self.error if self.error else math.inf if self.mean else 0.0
