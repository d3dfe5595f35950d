"""On a GPU: every precision, attention, compilation tier and memory mode against plain float32 on the CPU.

    python -m pytest -m cuda
    LDM_LITE_TEST_DEVICE=cpu python -m pytest -m cuda     # the same tests without a GPU

Networks are miniatures with random weights.  Noise is drawn on the CPU, so results differ by rounding alone.
"""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from random_checkpoint import SMALL
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import cpp_extension
from waiting import at_once

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.adapters.lora import Lora
from ldm_lite.runtime import aot, attention, cuda_graphs, fused, tiling
from ldm_lite.runtime.compile import CompiledStep
from ldm_lite.runtime.precision import set_matmul_precision
from ldm_lite.runtime.quantization import STORAGES
from ldm_lite.runtime.setup import KERNELS, SETTINGS
from ldm_lite.runtime.timing import measured_convolutions
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss

pytestmark = pytest.mark.cuda
NAME = os.environ.get("LDM_LITE_TEST_DEVICE", "cuda")
if NAME == "cuda" and not torch.cuda.is_available():
    pytest.skip("no CUDA device; LDM_LITE_TEST_DEVICE=cpu runs these tests on the CPU", allow_module_level=True)

# The largest relative error of an image after three steps of a random network, against float32 on the CPU.
LIMITS = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 2e-1}
PROMPT = "a red apple"


def images(pipe: Pipeline, prompt: Any = PROMPT, **options: Any) -> Tensor:
    """Pixels (B,3,H,W) on the CPU."""
    return torch.stack(pipe.txt2img(prompt, output="tensor", **{"steps": 3, **options}))


def assert_close(image: Tensor, wanted: Tensor, dtype: str) -> None:
    assert torch.isfinite(image).all()
    assert toy.relative_error(image, wanted.numpy()) < LIMITS[dtype]


def half(device: torch.device) -> str:
    """A CPU computes float16 convolutions of these sizes too slowly."""
    return "fp16" if device.type == "cuda" else "bf16"


def memory(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def compiled(pipe: Pipeline, tier: str) -> Pipeline:
    """On a CPU without Inductor, whose kernels are not the point here."""
    backend = "inductor" if pipe.device.type == "cuda" else "eager"
    return replace(pipe, run_row=CompiledStep(tier, pipe.unet, backend))


def assert_compiled(pipe: Pipeline) -> None:
    assert isinstance(pipe.run_row, CompiledStep)
    assert pipe.run_row.failure is None
    assert pipe.run_row._step is not None


@pytest.fixture(scope="session")
def device() -> torch.device:
    set_matmul_precision("highest")  # results are compared with float32 on the CPU
    return torch.device(NAME)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def truth(small_path: Path) -> Pipeline:
    return ldm_lite.load(small_path, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def wanted(truth: Pipeline) -> Tensor:
    return images(truth)


@pytest.fixture(scope="module")
def pipe(small_path: Path, device: torch.device) -> Pipeline:
    return ldm_lite.load(small_path, device=device, dtype="fp32")


@pytest.fixture(scope="module")
def lora(truth: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Lora:
    """A LoRA of all cross-attentions."""
    tensors, path = {}, tmp_path_factory.mktemp("lora") / "lora.safetensors"
    for name, layer in truth.unet.named_modules():
        if name.endswith(("attn2.to_q", "attn2.to_v")):
            (out, into), module = layer.weight.shape, "lora_unet_" + name.replace(".", "_")
            tensors |= {f"{module}.lora_up.weight": toy.normal(1, out, 2)}
            tensors |= {f"{module}.lora_down.weight": toy.normal(2, 2, into)}
    save_file(tensors, path)
    return ldm_lite.open_lora(path)


# ---- precision and attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS)
def test_precisions(dtype: str, small_path: Path, device: torch.device, wanted: Tensor) -> None:
    assert_close(images(ldm_lite.load(small_path, device=device, dtype=dtype)), wanted, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "half"])
@pytest.mark.parametrize("name", [*attention.names(), "sliced:3"])
def test_attention(name: str, dtype: str, small_path: Path, device: torch.device, wanted: Tensor) -> None:
    """What does not run here is refused in one line, before the first step."""
    dtype = half(device) if dtype == "half" else dtype
    widths = {
        attention.head_dim(layer) for layer in attention.layers(ldm_lite.load(small_path, device="cpu").unet).values()
    }
    kind, torch_dtype = name.partition(":")[0], {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if any(kind not in attention.available(device, torch_dtype[dtype], width) for width in widths):
        with pytest.raises(ValueError, match="is not available on"):
            ldm_lite.load(small_path, device=device, dtype=dtype, attention=name)
        return
    assert_close(images(ldm_lite.load(small_path, device=device, dtype=dtype, attention=name)), wanted, dtype)


@pytest.mark.parametrize(("name", "tier"), [*((kernel, "off") for kernel in ("plain", *KERNELS)), ("all", "step")])
def test_kernels(name: str, tier: str, small_path: Path, device: torch.device, wanted: Tensor) -> None:
    """Each alone, in plain and in compiled steps."""
    dtype = half(device)
    fast = ldm_lite.load(small_path, device=device, dtype=dtype, kernels=name)
    if tier != "off":
        settings = {setting: True for kernel, setting in SETTINGS.items() if name in (kernel, "all")}
        backend = "inductor" if device.type == "cuda" else "eager"
        fast = replace(fast, run_row=CompiledStep(tier, fast.unet, backend, settings))
    for _ in range(2):
        assert_close(images(fast), wanted, dtype)
    if tier != "off":
        assert_compiled(fast)


def test_the_bundled_model_is_finite_in_half_precision(device: torch.device) -> None:
    dtype = half(device)
    [image], [wanted] = (
        ldm_lite.load(device=device, dtype=name).txt2img(PROMPT, steps=4, output="tensor") for name in (dtype, "fp32")
    )
    assert_close(image, wanted, dtype)


def test_loading_leaves_the_processs_settings(small_path: Path, device: torch.device) -> None:
    def settings() -> tuple[object, ...]:
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.get_default_dtype(),
        )

    torch.backends.cudnn.allow_tf32 = True  # PyTorch's default
    try:
        before = settings()
        images(ldm_lite.load(small_path, device=device))
        assert settings() == before
    finally:
        set_matmul_precision("highest")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("group norm", (320, 32, 257)),  # channels, groups, positions: two kernels
        ("group norm", (2560, 32, 256)),  # one
        ("group norm", (32, 32, 64)),
        ("layer norm", (1280, 1, 1)),
        ("GEGLU", (2560, 1, 1)),
    ],
)
def test_kernels_in_triton_run_and_are_right(
    name: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Else PyTorch's would run in their place, with a line in the log."""
    if device.type != "cuda":
        pytest.skip("Triton's kernels: only on a GPU")
    assert fused._computes(name, device, dtype, *sizes)


# ---- jobs -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_its_images(pipe: Pipeline) -> None:
    together = images(pipe, [PROMPT, "a cat"], seed=[3, 9], batch_size=2)
    alone = torch.cat([images(pipe, PROMPT, seed=3), images(pipe, "a cat", seed=9)])
    assert_close(together, alone, "fp32")


@pytest.mark.parametrize("sampler", ["plms", "euler_a", "unipc"])
def test_samplers(sampler: str, pipe: Pipeline, truth: Pipeline) -> None:
    image, wanted = (images(model, sampler=sampler, steps=4) for model in (pipe, truth))
    assert_close(image, wanted, "fp32")


def test_img2img_and_inpaint(pipe: Pipeline, truth: Pipeline) -> None:
    photo, mask = toy.photo(), np.zeros(toy.photo().shape[:2], np.uint8)
    mask[:32] = 255
    for mode in ("img2img", "inpaint"):
        sources = (photo, mask) if mode == "inpaint" else (photo,)
        image, wanted = (
            getattr(model, mode)(PROMPT, *sources, steps=4, width=64, height=64, output="tensor")[0]
            for model in (pipe, truth)
        )
        assert_close(image, wanted, "fp32")


def test_control(pipe: Pipeline, truth: Pipeline, tmp_path: Path) -> None:
    save_file(
        {f"control_model.{key}": value for key, value in toy.control(SMALL.unet).items()}, tmp_path / "net.safetensors"
    )
    Image.fromarray(toy.photo()).save(tmp_path / "photo.png")
    control = [f"{tmp_path / 'net.safetensors'}:{tmp_path / 'photo.png'}:0.7"]
    image, wanted, plain = images(pipe, control=control), images(truth, control=control), images(truth)
    assert_close(image, wanted, "fp32")
    assert (wanted - plain).abs().max() > 1e-3


def test_tiles(pipe: Pipeline, small_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "STRIP", 2**16)
    tiled = ldm_lite.load(small_path, device=device, dtype="fp32", vae_tiling=True)
    assert_close(images(tiled, height=192, width=128), images(pipe, height=192, width=128), "fp32")


def test_noise_in_the_order_of_the_original(pipe: Pipeline) -> None:
    """Its generator is on the device."""
    first, again = (images(pipe, compat=True, steps=4) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.isfinite(first).all()


def test_what_the_loop_yields_stays_as_it_is(pipe: Pipeline) -> None:
    seen = [(state.latents, state.latents.clone()) for state in compiled(pipe, "step").stream(PROMPT, steps=4)]
    assert len(seen) == 4
    assert all(torch.equal(kept, copy) for kept, copy in seen)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_leaving_the_loop_leaves_the_pipeline_usable(pipe: Pipeline) -> None:
    wanted = images(pipe)
    for _ in pipe.stream(PROMPT, steps=5):
        break
    assert torch.equal(images(pipe), wanted)


def test_a_stream_of_the_users_own(pipe: Pipeline, device: torch.device) -> None:
    stream: Any = contextlib.nullcontext()
    if device.type == "cuda":
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        stream = torch.cuda.stream(side)
    wanted = images(pipe)
    with stream:
        image = images(pipe)
    assert torch.equal(image, wanted)


# ---- compilation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["regional", "step", "max"])
def test_tiers(tier: str, small_path: Path, device: torch.device, wanted: Tensor) -> None:
    fast = compiled(ldm_lite.load(small_path, device=device, dtype="fp32"), tier)  # regional changes the network
    for _ in range(2):
        assert_close(images(fast), wanted, "fp32")
    assert_compiled(fast)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("CUDA graphs, streams and cuDNN: only on a GPU")
    return device


def test_graphs_of_plain_steps_are_the_default(
    small_path: Path, cuda: torch.device, wanted: Tensor, lora: Lora
) -> None:
    """Captured at the third step of a shape; attention maps and LoRAs reach the image as before."""
    fast = ldm_lite.load(small_path, device=cuda, dtype="fp32")
    plain = ldm_lite.load(small_path, device=cuda, dtype="fp32", compile="off")
    assert isinstance(fast.run_row, CompiledStep)
    for _ in range(2):
        assert_close(images(fast, steps=3), wanted, "fp32")
        assert torch.equal(images(fast, steps=6, sampler="euler_a"), images(plain, steps=6, sampler="euler_a"))
    assert fast.run_row.failure is None
    assert isinstance(fast.run_row._step, cuda_graphs.Graphs)
    assert [len(graphs) for graphs in fast.run_row._step._graphs.values()] == [1]
    with attention.record(fast.unet, "middle_block*attn2") as maps:
        images(fast)
    assert [len(layer_maps) for layer_maps in maps.values()] == [3]
    with fast.lora(lora, 0.8), plain.lora(lora, 0.8):
        assert torch.equal(images(fast, steps=6), images(plain, steps=6))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_step_does_not_wait_for_the_device(pipe: Pipeline, cuda: torch.device) -> None:
    """Also where guidance changes by the step and the sampler adds noise."""
    options: dict[str, Any] = {"steps": 8, "sampler": "euler_a", "guidance_schedule": "cosine"}
    images(pipe, **options)
    states = pipe.stream(PROMPT, **options)
    for _ in range(4):
        next(states)
    try:
        torch.cuda.set_sync_debug_mode("error")  # which holds for the process, also if setting it raises
        for _ in range(2):
            next(states)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
def test_max_keeps_the_convolutions_that_cudnn_measures(small_path: Path, cuda: torch.device) -> None:
    """The kernels of a captured step are those of a thread that measures, by their names."""
    fast = ldm_lite.load(small_path, device=cuda, dtype="fp16", compile="max")
    images(fast)

    def kernels(run: Any) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        names = {event.key for event in profile.key_averages()}
        # Inductor names what it fuses with a convolution, such as its bias, after it.
        names = {name for name in names if not name.startswith("triton")}
        return {name for name in names if any(word in name for word in ("conv", "fprop", "winograd", "implicit"))}

    def measured() -> None:
        with measured_convolutions():
            thread = threading.Thread(target=lambda: images(plain))
            thread.start()
            thread.join()

    plain = ldm_lite.load(small_path, device=cuda, dtype="fp16", compile="off")
    measured()
    assert kernels(lambda: images(fast)) <= kernels(measured)


def test_a_tier_in_half_precision(small_path: Path, device: torch.device, wanted: Tensor) -> None:
    fast = compiled(ldm_lite.load(small_path, device=device, dtype=half(device)), "step")
    assert_close(images(fast), wanted, half(device))
    assert_compiled(fast)


def test_new_sizes_prompts_batches_and_samplers_and_back(pipe: Pipeline) -> None:
    fast = compiled(pipe, "step")
    jobs: list[dict[str, Any]] = [
        {},
        {"height": 96},
        {"prompt": ["a cat", "a dog on a sofa"], "batch_size": 2},
        {"sampler": "euler_a", "steps": 5},
        {"scale": 1.0},
        {"prompt": "a (very:1.3) " + "long " * 90, "prompt_syntax": "a1111"},
        {},
    ]
    for job in jobs:
        assert_close(images(fast, **job), images(pipe, **job), "fp32")
    assert_compiled(fast)


def test_more_sizes_than_graphs_are_kept(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    fast = compiled(pipe, "step")
    for side in (64, 80, 96, 112, 64):
        assert_close(images(fast, width=side), images(pipe, width=side), "fp32")
    assert_compiled(fast)


def test_a_lora_in_place_reaches_compiled_code(small_path: Path, device: torch.device, lora: Lora) -> None:
    pipe = ldm_lite.load(small_path, device=device, dtype="fp32")
    fast, before = compiled(pipe, "step"), images(pipe)
    assert_close(images(fast), before, "fp32")
    with pipe.lora(lora, 0.8):
        changed = images(pipe)
        assert (changed - before).abs().max() > 1e-2
        assert_close(images(fast), changed, "fp32")
    assert_close(images(fast), before, "fp32")
    assert torch.equal(images(pipe), before)
    assert_compiled(fast)


def test_two_threads_on_streams_of_their_own(pipe: Pipeline, device: torch.device) -> None:
    fast = compiled(pipe, "step")
    wanted = {seed: images(pipe, seed=seed, steps=6) for seed in (1, 2)}
    images(fast, steps=1)  # compiled once

    def work(seed: int) -> list[Tensor]:
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
        with stream:
            return [images(fast, seed=seed, steps=6) for _ in range(4)]

    for seed, values in zip(wanted, at_once(*(partial(work, seed) for seed in wanted)), strict=True):
        for image in values:
            assert_close(image, wanted[seed], "fp32")


def test_two_pipelines_do_not_share_graphs(small_path: Path, pipe: Pipeline, device: torch.device) -> None:
    other_pipe = ldm_lite.load(small_path, device=device, dtype="fp32")
    with torch.no_grad():
        for parameter in other_pipe.unet.parameters():
            parameter.mul_(0.9)
    fast = [compiled(model, "step") for model in (pipe, other_pipe)]
    for _ in range(2):
        for model, plain in zip(fast, (pipe, other_pipe), strict=True):
            assert_close(images(model), images(plain), "fp32")
    assert (images(pipe) - images(other_pipe)).abs().max() > 1e-2


def test_export(pipe: Pipeline, tmp_path: Path, device: torch.device, small_path: Path) -> None:
    if device.type == "cuda" and cpp_extension.CUDA_HOME is None:
        pytest.skip("torch finds no toolkit of CUDA, whose headers its packages include")
    path = tmp_path / "unet.pt2"
    spec = pipe.family.unet
    x, context = toy.normal(0, 2, 4, 8, 8).to(device), toy.normal(1, 2, 77, spec.context_dim).to(device)
    aot.export(pipe.unet, [(x, torch.full((2,), 7.0, device=device), context)], path)
    assert_close(
        images(ldm_lite.load(small_path, device=device, dtype="fp32", compiled=str(path))), images(pipe), "fp32"
    )


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [None, *STORAGES])
@pytest.mark.parametrize("offload", [None, "model", "sequential"])
def test_memory_modes(
    offload: str | None, storage: str | None, small_path: Path, device: torch.device, wanted: Tensor
) -> None:
    """Moved weights are the same; quantised ones give the same image wherever they are kept."""
    pipe = ldm_lite.load(small_path, device=device, dtype="fp32", offload=offload, storage=storage)
    if storage is not None:
        wanted = images(ldm_lite.load(small_path, device="cpu", dtype="fp32", storage=storage))
    for _ in range(2):  # the first learns the order of the blocks
        assert_close(images(pipe), wanted, "fp32")


def test_offloaded_weights_are_not_on_the_device(small_path: Path, device: torch.device) -> None:
    images(ldm_lite.load(small_path, device=device, dtype="fp32", compile="off"))  # libraries allocate workspaces once
    before = memory(device)
    pipe = ldm_lite.load(small_path, device=device, dtype="fp32", offload="sequential")
    images(pipe)
    whole = sum(p.numel() * p.element_size() for net in pipe.networks.values() for p in net.parameters())
    assert memory(device) - before < 0.2 * whole
    assert all(p.device.type == "cpu" for p in pipe.unet.parameters())


def test_two_threads_on_an_offloaded_pipeline(small_path: Path, device: torch.device) -> None:
    pipe = ldm_lite.load(small_path, device=device, dtype="fp32", offload="sequential")
    wanted = images(pipe)
    for result in at_once(*[lambda: images(pipe)] * 2):
        assert_close(result, wanted, "fp32")


def test_a_lora_on_offloaded_and_quantised_weights(small_path: Path, device: torch.device, lora: Lora) -> None:
    pipe = ldm_lite.load(small_path, device=device, dtype="fp32", offload="sequential", storage="int8")
    before = images(pipe)
    with pipe.lora(lora, 0.8):
        assert (images(pipe) - before).abs().max() > 1e-2
    assert torch.equal(images(pipe), before)


def test_memory_is_returned(small_path: Path, device: torch.device) -> None:
    images(ldm_lite.load(small_path, device=device))  # libraries allocate workspaces once
    before = memory(device)
    for tier in (None, "step"):
        pipe: Pipeline | None = ldm_lite.load(small_path, device=device)
        if tier is not None:
            pipe = compiled(pipe, tier)  # type: ignore[arg-type]
        images(pipe)  # type: ignore[arg-type]
        del pipe
        torch._dynamo.reset()
        assert memory(device) - before < 2**20


def test_jobs_do_not_grow_memory(pipe: Pipeline, device: torch.device) -> None:
    images(pipe)
    sizes = []
    for seed in range(4):
        images(pipe, seed=seed)
        sizes.append(memory(device))
    assert len(set(sizes)) == 1


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_a_training_step(autocast: bool, small_path: Path, device: torch.device) -> None:
    """The loss and its gradients are those of the CPU in float32."""
    results = []
    for place in (device, torch.device("cpu")):
        model = ldm_lite.load(small_path, device=place, dtype="fp32")
        model.unet.requires_grad_(True).train()
        loss = DiffusionLoss(model, {"unet": model.unet}, caption_dropout=0.0)
        pixels = torch.from_numpy(np.stack([toy.photo()[:64, :64]] * 2)).permute(0, 3, 1, 2)
        with torch.autocast(place.type, torch.bfloat16, enabled=autocast and place == device):
            value = loss(Batch(pixels, ["a cat", "a dog"], None, (0, 1)), Draws(0, (0, 1)))
        value.backward()  # type: ignore[no-untyped-call]
        gradients = torch.cat([p.grad.flatten().cpu() for p in model.unet.parameters() if p.grad is not None])
        results.append((value.item(), gradients))
    (value, gradients), (true_value, true_gradients) = results
    limit = 5e-2 if autocast else 1e-3
    assert value == pytest.approx(true_value, rel=limit)
    assert toy.relative_error(gradients, true_gradients.numpy()) < (0.2 if autocast else 1e-2)
