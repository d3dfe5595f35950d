"""Peak memory with the options that save memory; each makes one image in a separate process."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

import ldm_lite
from ldm_lite.bench.benchmark import resolved
from ldm_lite.bench.checkpoints import open_model
from ldm_lite.bench.measure import status
from ldm_lite.bench.options import BenchOptions
from ldm_lite.bench.report import describe_run
from ldm_lite.cli import flags
from ldm_lite.cli.options import RuntimeOptions, given

MODES = (
    "",
    "--vae-tiling",
    "--attention sliced:8",
    "--storage fp8",
    "--storage int8",
    "--offload model",
    "--offload model --vae-tiling",
    "--offload sequential --vae-tiling",
    "--offload sequential --storage int8 --vae-tiling",
)


class MemoryResult(NamedTuple):
    """The memory and time that one image took."""

    image: np.ndarray[Any, Any]  # pixels (3,H,W) in [-1,1]
    peak: int | None  # bytes: on CUDA of all tensors, otherwise of the process
    reserved: int | None  # bytes that CUDA's allocator took for them
    context: int | None  # bytes of the device beside them: CUDA's context, its kernels, and other processes
    weights: int  # bytes as they are stored
    step_s: float  # seconds per step, the median without the first
    decode_s: float


def make_image(options: BenchOptions, mode: str) -> MemoryResult:
    """Load with the flags of a mode, make one image in the first dtype, and measure, in a separate process."""
    options = resolved(options)
    [runtime], _ = flags.parse(mode.split(), "bench", "", (RuntimeOptions,))
    flagged = {name: getattr(runtime, name) for name in given(runtime)}
    # Memory of weights that are drawn ahead would count.
    checkpoint = open_model(options.size, options.ckpt, options.device, ahead=False)
    pipe = ldm_lite.load(checkpoint, device=options.device, dtype=options.dtypes[0], **flagged)
    on_cuda, times = pipe.device.type == "cuda", list[float]()
    if on_cuda:  # the drawing, in float32, does not
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(pipe.device)

    def note_time() -> None:
        if on_cuda:
            torch.cuda.synchronize(pipe.device)
        times.append(time.perf_counter())

    names = ("height", "width", "sampler", "steps", "scale", "seed")
    settings = {name: getattr(options, name) for name in names}
    for state in pipe.stream(options.prompt, batch_size=1, n_iter=1, **settings):
        latents = state.latents
        note_time()
    [pixels] = pipe.decode(latents, output="tensor")
    note_time()
    *steps, decode_s = np.diff(times)
    free, total = torch.cuda.mem_get_info(pipe.device) if on_cuda else (0, 0)
    return MemoryResult(
        pixels.numpy(),
        torch.cuda.max_memory_allocated(pipe.device) if on_cuda else status("VmHWM"),
        torch.cuda.max_memory_reserved(pipe.device) if on_cuda else None,
        total - free - torch.cuda.memory_reserved(pipe.device) if on_cuda else None,
        sum(value.nbytes for network in pipe.networks.values() for value in network.state_dict().values()),
        float(np.median(steps)) if steps else 0.0,
        float(decode_s),
    )


def table(options: BenchOptions, modes: tuple[str, ...] | None = None) -> Iterator[str]:
    """Measure the modes (default: the options'), and yield a table in Markdown line by line."""
    if modes is None:
        kinds = {"plain": MODES[:1], "lowest": MODES[-1:], "others": MODES[1:-1]}
        modes = tuple(mode for kind in options.modes for mode in kinds[kind])
    asked, options = options, resolved(options)
    about = describe_run(asked, options)
    yield f"{about['command']}: {about['model']}, {options.dtypes[0]}, {about['device']}, {about['versions']}\n"
    yield "| mode | peak, GiB | reserved, GiB | beyond weights, GiB | context, GiB | s/step | decode, s | PSNR, dB |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    first = None
    for mode in modes:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            try:
                result = process.submit(make_image, options, mode).result()
            except Exception as error:  # any error is a result
                yield f"| {mode or 'plain'} | {str(error).splitlines()[0][:120]} | | | | | | |"
                continue
        first = result.image if first is None else first
        difference = float(np.square((result.image - first) / 2).mean())
        psnr = -10 * np.log10(difference) if difference else float("inf")
        beyond = None if result.peak is None else result.peak - result.weights
        counts = (result.peak, result.reserved, beyond, result.context)
        sizes = (f"{count / 2**30:.2f}" if count is not None else "" for count in counts)
        yield f"| {mode or 'plain'} | {' | '.join(sizes)} | {result.step_s:.3g} | {result.decode_s:.3g} | {psnr:.1f} |"
