"""Runs the commands on a CUDA device that need not be there: `python scripts/check_devices.py [FAMILY ...]`.

Nothing is computed (torch's fake tensors), but each tensor has a device, and an operator on tensors of two is an error:
what was left on the CPU is found without a GPU.  Needs a torch that was built for CUDA.  Not seen here: streams, pinned
memory, CUDA graphs, and what depends on values (all comparisons of them hold).
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ldm_lite import generate
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.cli.task_options import CascadeOptions, Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.control import control
from ldm_lite.diffusion.schedule import Schedule
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.pixels import Pixels
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.pipeline import Pipeline, tokenizer_of
from ldm_lite.tasks import cascade as cascade_task
from ldm_lite.tasks import img2img as img2img_task
from ldm_lite.tasks import inpaint as inpaint_task
from ldm_lite.tasks import txt2img as txt2img_task
from ldm_lite.tasks import upscale as upscale_task
from ldm_lite.train.tasks import DiffusionTask
from ldm_lite.zoo.families import FAMILIES, Family
from ldm_lite.zoo.networks import build

CUDA = torch.device("cuda")
ADAPTER = AdapterSpec(3, 8, (320, 640, 1280, 1280), 2, light=False)


class Values(TorchDispatchMode):
    """What a fake tensor's value is, where Python asks for it: True, 1 or 0.5."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        return True if dtype == torch.bool else 0.5 if dtype.is_floating_point else 1


def on_cuda(make: Callable[[], Any], dtype: torch.dtype = torch.float16) -> Any:
    """A network whose weights are on the device that is not there."""
    with on_meta():
        network: nn.Module = make()
    for module in network.modules():
        for kept in (module._parameters, module._buffers):
            for name, value in kept.items():
                if value is not None:
                    like = dtype if value.is_floating_point() else value.dtype
                    fresh = torch.empty(value.shape, device=CUDA, dtype=like)
                    kept[name] = nn.Parameter(fresh, requires_grad=False) if kept is module._parameters else fresh
    return network.eval()


def pipeline(name: str, family: Family) -> Pipeline:
    """A pipeline of a family, in half precision."""
    networks = {role: on_cuda(lambda spec=spec: build(spec)) for role, spec in family.networks.items()}
    schedule, tokenizer = Schedule.from_betas(family.noise.betas, family.prediction), tokenizer_of(family.text)
    networks = {"vae": Pixels(family.vae), "text_encoder": None, "text_encoder_2": None} | networks
    return Pipeline(name, family, schedule, tokenizer=tokenizer, description=name, **networks)


def jobs(pipe: Pipeline, folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a pipeline can be asked for, by name."""
    family, side = pipe.family, pipe.family.resolution
    picture, mask = Image.new("RGB", (side, side)), Image.new("L", (side, side), 181)
    picture.save(f"{folder}/picture.png")
    mask.save(f"{folder}/mask.png")
    Path(f"{folder}/boxes.json").write_text('[{"class": 12, "box": [0.1, 0.1, 0.5, 0.5]}]')
    np.save(f"{folder}/embedding.npy", np.zeros((1, (family.unet.vector_dim or 1536) // 2), np.float32))
    files = {"layouts": "boxes.json", "label_maps": "mask.png", "embeddings": "embedding.npy"}
    words = {"classes": "3", "nothing": None} | {name: f"{folder}/{file}" for name, file in files.items()}
    prompt: dict[str, Any] = {"prompt": words.get(family.conditioner, "a (red:1.2) apple"), "steps": 3}
    prompt |= {"image_embedding": f"{folder}/embedding.npy"} if family.conditioner.startswith("unclip") else {}
    prompt |= {"depth": f"{folder}/mask.png"} if family.task == "depth" else {}
    given: dict[str, Any] = {"pictures": [picture]}
    if family.task == "upscale":
        yield "upscale", lambda: list(upscale_task.upscale(pipe, UpscaleOptions(**prompt), **given))
    elif family.task == "cascade":
        small, text = family.unet.num_classes is None, torch.empty(1, 77, 4096)
        stages = [pipe] if small else [pipeline("if_I", FAMILIES["if_I"]), pipe]
        options = CascadeOptions("x")
        yield "cascade", lambda: list(cascade_task.cascade(stages, options, text, text))
    elif family.task.startswith("inpaint"):
        yield "inpaint", lambda: list(inpaint_task.inpaint(pipe, InpaintOptions(**prompt), masks=[mask], **given))
    elif family.task == "instruct":
        yield "img2img", lambda: list(img2img_task.img2img(pipe, Img2imgOptions(**prompt), **given))
    else:
        for more in ({}, {"scale": 1.0, "sampler": "euler_a"}, {"n_samples": 2, "n_iter": 2}, {"sampler": "unipc"}):
            options = Txt2imgOptions(**prompt, **more)
            yield f"txt2img {more}", lambda options=options: list(txt2img_task.txt2img(pipe, options))
        yield "img2img", lambda: list(img2img_task.img2img(pipe, Img2imgOptions(**prompt), **given))
        if family.task == "txt2img":
            yield "inpaint", lambda: list(inpaint_task.inpaint(pipe, InpaintOptions(**prompt), masks=[mask], **given))
    if family.unet.context_dim == 768 and family.unet.in_channels == 4 and family.conditioner == "clip":
        requests = [f"{name}:{folder}/picture.png{more}" for name, more in (("net", ":guess"), ("adapter", ":0.5-1"))]
        steered = Txt2imgOptions(**prompt, control=tuple(requests))
        networks = [on_cuda(lambda: ControlNet(family.unet)), on_cuda(lambda: T2IAdapter(ADAPTER))]
        controls = [control.Control(*each) for each in zip(control.parse(requests, None), networks, strict=True)]
        with mock.patch.object(control, "load_controls", return_value=controls):
            yield "control", lambda: list(txt2img_task.txt2img(pipe, steered))
        yield "loss", lambda: loss(family, pipe)


def loss(family: Family, pipe: Pipeline) -> Tensor:
    """Of a batch, in training; its gradients would need the device."""
    unet, vae, text = (on_cuda(lambda spec=spec: build(spec), torch.float32) for spec in family.networks.values())
    task = DiffusionTask(unet, text, vae, pipe.schedule, 0.18, {"unet": unet}, 0.1, 5.0, 77)
    pixels = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    return task.loss(pixels, ["a red apple", ""], torch.Generator())


def main(names: list[str]) -> int:
    """The families by name, all if none are given -> the number of failures."""
    if torch.version.cuda is None:
        sys.exit(f"this needs a torch that was built for CUDA, and this is {torch.__version__}")
    failed = 0
    for name in names or FAMILIES:
        with contextlib.ExitStack() as stack, torch.no_grad():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(Values())
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda self: self))
            stack.enter_context(mock.patch.object(generate, "broken_weights", return_value=None))
            for what, job in jobs(pipeline(name, FAMILIES[name]), folder):
                try:
                    job()
                    print(f"{name}: {what}: all on one device", flush=True)
                except Exception as error:  # whatever it is, it is the result
                    failed += 1
                    print(f"{name}: {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
