"""Progress bars on stderr, and peak memory.  Nothing here imports torch."""

import sys
from typing import Any

from tqdm import tqdm


class Progress:
    """A progress bar per batch, in denoising steps; call it after every step."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, step: int, num_steps: int, images: int) -> None:
        """Show that step `step`, from 1, is done; the bar opens with a batch's first step and closes with its last."""
        if self._bar is None:
            self._bar = tqdm(total=num_steps, desc=f"{images} image{'s' * (images > 1)}", unit="it")
        self._bar.update()
        if step == num_steps:
            self._bar.close()
            self._bar = None


class TrainingBar:
    """A progress bar over the steps of a training run, with the loss; call it after every step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._bar: Any = None

    def __call__(self, step: int, loss: float | None) -> None:
        """Show that `step` steps are done, including those before a resume; the bar opens at the first call."""
        if self._bar is None:
            self._bar = tqdm(total=self._steps, initial=step - 1, unit="step")
        self._bar.update()
        if loss is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}")


class ImagesBar:
    """A progress bar over the images of a batch job; call it with the number of those that are new."""

    def __init__(self, images: int) -> None:
        self._bar: Any = tqdm(total=images, unit="image", smoothing=0)

    def __call__(self, images: int) -> None:
        """Show that so many more are done."""
        self._bar.update(images)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


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
