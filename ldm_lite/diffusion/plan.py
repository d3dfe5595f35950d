"""Plans, as the core has them, and what some samplers need besides: a variance that the network predicts."""

from dataclasses import dataclass

import numpy as np

from ldm_lite.core.plan import ASIDE, H1, H2, H3, NOISE, NUM_REGISTERS, H, Plan, Rows, X
from ldm_lite.core.schedule import Array

__all__ = ["ASIDE", "H1", "H2", "H3", "NOISE", "NUM_REGISTERS", "H", "Plan", "Rows", "X"]


@dataclass(frozen=True, eq=False, repr=False)
class LearnedVariancePlan(Plan):
    """A plan for networks that predict their variance, between the posterior's (the plan's) and beta.

    No other coefficient depends on the data.  Nichol and Dhariwal 2021, eq. 15.
    """

    stretch: Array  # (N,) log of the largest factor by which the learned variance scales the row's noise

    @staticmethod
    def of(plan: Plan) -> "LearnedVariancePlan":
        """The same table for such networks."""
        after = np.append(plan.level[1:, 1], plan.end.s)
        ratio = np.divide(plan.level[:, 1], after, out=np.ones_like(after), where=plan.adds_noise)
        return LearnedVariancePlan(**vars(plan), stretch=np.log(ratio))


def rises_before(plan: Plan, call: int) -> int:
    """Return how often the noise has risen before a call by over a tenth of all timesteps, as Restart's does."""
    return int((np.diff(plan.t[: call + 1]) > 100).sum())
