"""The inputs and work of a run beyond its prompts and steps, known before anything is made: for limits and batches."""

from dataclasses import dataclass

from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.tasks.features import used


@dataclass(frozen=True)
class Cost:
    """What features add to a run; a feature that adds something has a method `add_cost`, from a Cost to a Cost."""

    texts: tuple[str, ...] = ()  # texts to encode besides the prompt and the negative prompt
    joins_parts: bool = False  # AND joins the parts of a prompt, whatever its syntax
    controls: int = 0  # networks that run beside the UNet
    references: int = 0  # images that the network reads beside the noised one
    passes: tuple[tuple[float, int | None], ...] = ()  # after the first: times its size, and steps; None: its steps
    changes_networks: str = ""  # the option by which the run has networks of its own


def cost_of(options: Txt2imgOptions) -> Cost:
    """Return the cost that the options' features add.  Raises ValueError for options that are wrong by themselves."""
    cost = Cost()
    for feature in used(options):
        if hasattr(feature, "add_cost"):
            cost = feature.add_cost(cost)
    return cost
