"""A fake CUDA device: networks and commands run with fake tensors, so that nothing is computed.

Each tensor has a device, and an operator on tensors of two devices is an error, so a tensor that was left on the CPU is
found without a GPU.  Needs a torch that was built for CUDA.  Streams, pinned memory, CUDA graphs and everything that
depends on values are not tested (all comparisons of values hold).  Run by `parity.py devices`.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ldm_lite.checkpoint import model as model_module
from ldm_lite.checkpoint.loading import tokenizer_of
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.cli.command_options import CascadeOptions
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.control.control import Control
from ldm_lite.control.loading import LoadedControl
from ldm_lite.diffusion.schedule import NoiseSchedule
from ldm_lite.features import control as control_feature
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.models.pixels import Pixels
from ldm_lite.models.t2i_adapter import AdapterSpec, T2IAdapter
from ldm_lite.tasks.cascade import cascade
from ldm_lite.tasks.img2img import img2img
from ldm_lite.tasks.inpaint import inpaint
from ldm_lite.tasks.txt2img import txt2img
from ldm_lite.tasks.upscale import upscale
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import FamilyRow, build_network

CUDA = torch.device("cuda")
ADAPTER = AdapterSpec(3, 8, (320, 640, 1280, 1280), 2, light=False)


class Values(TorchDispatchMode):
    """Gives fake tensors a value if Python asks for one: True, 1 or 0.5."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        return True if dtype == torch.bool else 0.5 if dtype.is_floating_point else 1


def fake_network(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float16) -> Any:
    """Make a network with fake weights on the device."""
    with on_meta():
        network = make()
    for module in network.modules():
        for kept in (module._parameters, module._buffers):
            for name, value in kept.items():
                if value is not None:
                    like = dtype if value.is_floating_point() else value.dtype
                    fresh = torch.empty(value.shape, device=CUDA, dtype=like)
                    kept[name] = nn.Parameter(fresh, requires_grad=False) if kept is module._parameters else fresh
    return network.eval()


def fake_model(name: str, family: FamilyRow) -> CheckpointModel:
    """Make a model of a family in half precision."""
    networks = {role: fake_network(lambda spec=spec: build_network(spec)) for role, spec in family.specs.items()}
    schedule, tokenizer = NoiseSchedule.from_betas(family.noise.betas, family.prediction), tokenizer_of(family.text)
    networks = {"vae": Pixels(family.vae), "text_encoder": None, "text_encoder_2": None} | networks
    return CheckpointModel(name, family, schedule, networks, tokenizer=tokenizer, description=name)


def jobs(model: CheckpointModel, folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a model's tasks and other runs, by name."""
    family, side = model.family, model.family.resolution
    image, mask = Image.new("RGB", (side, side)), Image.new("L", (side, side), 181)
    mask.save(f"{folder}/mask.png")
    Path(f"{folder}/boxes.json").write_text('[{"class": 12, "box": [0.1, 0.1, 0.5, 0.5]}]')
    np.save(f"{folder}/embedding.npy", np.zeros((1, (family.unet.vector_dim or 1536) // 2), np.float32))
    files = {"layouts": "boxes.json", "label_maps": "mask.png", "embeddings": "embedding.npy"}
    words = {"classes": "3", "nothing": None} | {name: f"{folder}/{file}" for name, file in files.items()}
    prompt: dict[str, Any] = {"prompt": words.get(family.conditioner, "a (red:1.2) apple"), "steps": 3}
    prompt |= {"image_embedding": f"{folder}/embedding.npy"} if family.conditioner.startswith("unclip") else {}
    prompt |= {"depth": f"{folder}/mask.png"} if family.task == "depth" else {}
    edited = prompt | {"init_img": image}
    if family.task == "upscale":
        yield "upscale", lambda: list(upscale(model, UpscaleOptions(**edited)))
    elif family.task == "cascade":
        small, text = family.unet.num_classes is None, torch.empty(1, 77, 4096)
        stages = [model] if small else [fake_model("if_I", FAMILY_ROWS["if_I"]), model]
        options = CascadeOptions("x")
        yield "cascade", lambda: list(cascade(stages, options, text, text))
    elif family.task.startswith("inpaint"):
        yield "inpaint", lambda: list(inpaint(model, InpaintOptions(**edited, mask=mask)))
    elif family.task == "instruct":
        yield "img2img", lambda: list(img2img(model, Img2imgOptions(**edited)))
    else:
        for more in ({}, {"scale": 1.0, "sampler": "euler_a"}, {"batch_size": 2, "n_iter": 2}, {"sampler": "unipc"}):
            options = Txt2imgOptions(**prompt, **more)
            yield f"txt2img {more}", lambda options=options: list(txt2img(model, options))
        yield "img2img", lambda: list(img2img(model, Img2imgOptions(**edited)))
        if family.task == "txt2img":
            yield "inpaint", lambda: list(inpaint(model, InpaintOptions(**edited, mask=mask)))
    if family.unet.context_dim == 768 and family.unet.in_channels == 4 and family.conditioner == "clip":
        controls = (Control("net", image, guess=True), Control("adapter", image, start=0.5))
        networks = [fake_network(lambda: ControlNet(family.unet)), fake_network(lambda: T2IAdapter(ADAPTER))]
        loaded = [LoadedControl(*pair) for pair in zip(controls, networks, strict=True)]
        with mock.patch.object(control_feature, "load_controls", return_value=loaded):
            yield "control", lambda: list(txt2img(model, Txt2imgOptions(**prompt, control=controls)))
        yield "loss", lambda: loss(family, model)


def loss(family: FamilyRow, model: CheckpointModel) -> Tensor:
    """The training loss of a batch; its gradients would need a real device."""
    networks = {
        role: fake_network(lambda spec=spec: build_network(spec), torch.float32) for role, spec in family.specs.items()
    }
    model = model.with_networks(**networks)
    compute = DiffusionLoss(model, {"unet": model.unet}, caption_dropout=0.1)
    pixels = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    return compute(Batch(pixels, ["a red apple", ""], None, (0, 1)), Draws(0, (0, 1)))


def run_commands(names: Iterable[str]) -> int:
    """Run everything that these families can do, print a line each, and return the number of failures."""
    if torch.version.cuda is None:
        sys.exit(f"this needs a torch that was built for CUDA, and this is {torch.__version__}")
    failed = 0
    for name in names:
        with contextlib.ExitStack() as stack, torch.no_grad():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(Values())
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda self: self))
            stack.enter_context(mock.patch.object(model_module, "broken_weights", return_value=None))
            for what, job in jobs(fake_model(name, FAMILY_ROWS[name]), folder):
                try:
                    job()
                    print(f"{name}: {what}: all on one device", flush=True)
                except Exception as error:  # any error is a result
                    failed += 1
                    print(f"{name}: {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return failed
