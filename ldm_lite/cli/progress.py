"""Progress bars on stderr, and peak memory.  Nothing here imports torch."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


def step_bar(bar_class: Any = tqdm) -> Callable[[Any], None]:
    """Return a function that takes the State after every step, and shows a bar for each batch."""
    bar: Any = None  # of a batch, from its first step to its last

    def update(state: Any) -> None:
        nonlocal bar
        if bar is None:
            count = len(state.latents)
            bar = bar_class(total=state.num_steps, desc=f"{count} image{'s' * (count > 1)}", unit="it")
        bar.update()
        if state.step == state.num_steps:
            bar = bar.close()

    return update


class TrainingBar:
    """A progress bar over the steps of a training run, with the loss; call it after every step."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps  # None: unknown
        self._bar: Any = None

    def __call__(self, step: int, loss: float | None) -> None:
        """Show that `step` steps are done, including those before a resume; the bar opens at the first call."""
        if self._bar is None:
            self._bar = tqdm(total=self._steps, initial=step - 1, unit="step")
        self._bar.update()
        if loss is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}")


def memory() -> str:
    """Describe the peak memory of this process so far (unknown on Windows), and of CUDA if it was used."""
    parts = []
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        parts.append(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB of memory")
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        peak = max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
        parts.append(f"{peak / 2**30:.2f} GiB on the GPU")
    return "peak " + " and ".join(parts) if parts else "peak memory not known"


def end_bars() -> None:
    """Close open progress bars, so that a message starts on a new line."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
