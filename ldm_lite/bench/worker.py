"""The process of a contender that runs apart: `python -m ldm_lite.benchmark.worker`, questions in, answers out.

A peer is its networks (with the same weights, renamed by diffusers' converters) and its schedulers in a bare loop, the
fastest way to use them: no pipeline, progress bar or safety checker.  The imports of a peer are here alone.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ldm_lite.bench import configurations, contender
from ldm_lite.bench.contender import Contender, Here, Unable
from ldm_lite.bench.jobs import CHECK_SCALE, Inputs, Job, Setting, inputs
from ldm_lite.bench.subjects import subject
from ldm_lite.checkpoint.reader import split
from ldm_lite.runtime.precision import DTYPES
from ldm_lite.zoo.detection import detect_family
from ldm_lite.zoo.families import Family

PEERS = ("diffusers", "diffusers-compiled", "openvino")


class Networks(Protocol):
    """A peer's networks as functions of tensors on the device, in the dtype."""

    def unet(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """Latents, timestep and context -> prediction."""

    def decode(self, z: Tensor) -> Tensor:
        """Unscaled latents -> pixels."""

    def text(self, ids: Tensor) -> Tensor:
        """Token ids -> context."""


@dataclass(frozen=True)
class Theirs:
    """Every section by a peer's networks and diffusers' schedulers."""

    networks: Networks
    family: Family
    setting: Setting
    device: torch.device
    dtype: torch.dtype

    def job(self, section: str, batch: int) -> Job:
        """The work of a section, with its inputs in place."""
        if not hasattr(self, f"_{section}"):
            raise Unable(f"has no {section} here")
        run, check = getattr(self, f"_{section}")(inputs(self.family, self.setting, batch))
        grad_free = torch.no_grad()
        return Job(grad_free(run), grad_free(check))

    def _loop(self, sampler: str, steps: int, noise: Tensor, both: Tensor) -> Tensor:
        from ldm_lite.bench import peers

        schedulers = peers.schedulers(self.family)
        if sampler not in schedulers:
            raise Unable(f"its runs here are of {' and '.join(schedulers)}, not {sampler}")
        scheduler: Any = schedulers[sampler]()
        scheduler.set_timesteps(steps, device=self.device)
        x = noise * scheduler.init_noise_sigma
        for t in scheduler.timesteps:
            before, after = self.networks.unet(torch.cat([x, x]), t, both).chunk(2)
            x = scheduler.step(before + self.setting.scale * (after - before), t, x).prev_sample
        return x

    def _step(self, given: Inputs) -> Job:
        noise = given.noise.to(self.device, self.dtype)
        both = torch.cat([given.uncond, given.context]).to(self.device, self.dtype)

        def check() -> Tensor:
            t = torch.tensor(999, device=self.device)
            before, after = self.networks.unet(torch.cat([noise, noise]), t, both).float().chunk(2)
            return before + CHECK_SCALE * (after - before)

        return Job(lambda calls: self._loop("ddim", calls, noise, both), check)

    def _decode(self, given: Inputs) -> Job:
        z = given.noise.to(self.device, self.dtype)

        def decode() -> Tensor:
            return self.networks.decode(z).float().clamp(-1, 1).cpu()

        return Job(lambda calls: [decode() for _ in range(calls)], decode)

    def _text(self, given: Inputs) -> Job:
        ids = given.ids.to(self.device)
        return Job(lambda calls: [self.networks.text(ids) for _ in range(calls)], lambda: self.networks.text(ids))

    def _image(self, given: Inputs) -> Job:
        setting, batch = self.setting, len(given.noise)

        def images() -> Tensor:
            for repeat in range(setting.n_iter):
                both = torch.cat([self.networks.text(ids.to(self.device)) for ids in (given.empty, given.ids)])
                seeds = range(setting.seed + repeat * batch, setting.seed + (repeat + 1) * batch)
                shape = given.noise.shape[1:]
                noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds])
                x = self._loop(setting.sampler, setting.steps, noise.to(self.device, self.dtype), both)
                pixels = self.networks.decode(x / self.family.scale_factor).float().clamp(-1, 1).cpu()
                arrays = ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
            assert len(arrays) == batch
            return pixels

        return Job(lambda calls: [images() for _ in range(calls)], images)


# ---- the peers ------------------------------------------------------------------------------------------------------


class TorchNetworks:
    """diffusers' UNet and autoencoder and transformers' text encoder with the subject's weights, made when needed."""

    def __init__(self, about: dict[str, Any], dtype: str, compiled: bool = False) -> None:
        checkpoint = subject(about["size"], about["ckpt"])
        self._components = split(checkpoint)
        shapes = {role: component.shapes for role, component in self._components.items()}
        self.family = detect_family(shapes, checkpoint.metadata)
        self._device, self._dtype, self._compiled = about["device"], DTYPES[dtype], compiled

    def _made(self, role: str) -> Any:
        from ldm_lite.bench import peers

        component = self._components[role]
        weights = {key: component.checkpoint.read(key).to(self._dtype) for key in component.keys.values()}
        network = getattr(peers, role)(self.family, weights).to(self._device)
        return network.to(memory_format=torch.channels_last) if self._compiled else network

    @functools.cached_property
    def _unet(self) -> Any:
        unet = self._made("unet")  # compiled as diffusers' documentation says
        return torch.compile(unet, mode="max-autotune", fullgraph=True) if self._compiled else unet

    @functools.cached_property
    def _vae(self) -> Any:
        return self._made("vae")

    @functools.cached_property
    def _text(self) -> Any:
        return self._made("text_encoder")

    def unet(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """As of Networks."""
        return self._unet(x, t, encoder_hidden_states=context, return_dict=False)[0]

    def decode(self, z: Tensor) -> Tensor:
        """As of Networks."""
        return self._vae.decode(z, return_dict=False)[0]

    def text(self, ids: Tensor) -> Tensor:
        """As of Networks."""
        return self._text(ids).last_hidden_state

    def forget(self) -> None:
        """Give the memory of all networks back; they are made again when asked for."""
        for name in ("_unet", "_vae", "_text"):
            vars(self).pop(name, None)


def _diffusers(about: dict[str, Any], compiled: bool) -> tuple[str, Callable[[str], Theirs]]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise Unable(f"is not installed ({error.name}): pip install diffusers transformers") from error

    def make(dtype: str) -> Theirs:
        made = TorchNetworks(about, dtype, compiled)
        return Theirs(made, made.family, Setting(**about["setting"]), torch.device(about["device"]), DTYPES[dtype])

    return f"{diffusers.__version__}, transformers {transformers.__version__}", make


def _openvino(about: dict[str, Any]) -> tuple[str, Callable[[str], Theirs]]:
    try:
        import diffusers
        import openvino
    except ImportError as error:
        raise Unable(f"is not installed ({error.name}): pip install openvino diffusers transformers") from error
    if about["device"] != "cpu":
        raise Unable("is for CPUs")

    def make(dtype: str) -> Theirs:
        if dtype != "fp32":
            raise Unable("runs in fp32 here")
        made = TorchNetworks(about, dtype)
        networks = OpenVINONetworks(openvino, made)
        return Theirs(networks, made.family, Setting(**about["setting"]), torch.device("cpu"), torch.float32)

    return f"{openvino.__version__.split('-')[0]}, of diffusers {diffusers.__version__}", make


class OpenVINONetworks:
    """The same networks converted to OpenVINO, and compiled for each combination of shapes when it first comes."""

    def __init__(self, openvino: Any, made: TorchNetworks) -> None:
        self._openvino, self._made = openvino, made
        self._compiled: dict[tuple[object, ...], Any] = {}

    def _run(self, name: str, *args: Tensor) -> Tensor:
        key = (name, *(each.shape for each in args))
        if key not in self._compiled:
            self._compiled[key] = self._compile(getattr(self._made, name), args)
            self._made.forget()
        return torch.from_numpy(self._compiled[key](args)[0].copy())

    def _compile(self, function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> Any:
        class Module(torch.nn.Module):
            def forward(self, *inputs: Tensor) -> Tensor:
                return function(*inputs)

        function(*args)  # the network is made here, and not in the trace
        shapes = [list(each.shape) for each in args]
        model = self._openvino.convert_model(Module(), example_input=args, input=shapes)
        return self._openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def unet(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """As of Networks."""
        return self._run("unet", x, t, context)

    def decode(self, z: Tensor) -> Tensor:
        """As of Networks."""
        return self._run("decode", z)

    def text(self, ids: Tensor) -> Tensor:
        """As of Networks."""
        return self._run("text", ids)


def become(about: dict[str, Any]) -> tuple[str, Contender]:
    """What the first line asks for: a peer, or one of our own configurations alone in a process."""
    framework, device = about["framework"], torch.device(about["device"])
    if about["threads"] is not None:
        torch.set_num_threads(about["threads"])
    if framework == "openvino":
        description, make = _openvino(about)
    elif framework in PEERS:
        description, make = _diffusers(about, compiled=framework == "diffusers-compiled")
    else:
        models = configurations.Models(subject(about["size"], about["ckpt"]), device)
        configuration = configurations.CONFIGURATIONS[framework]
        return configuration.title, models.contender(framework, configuration, Setting(**about["setting"]))
    return description, Here(framework, device, make)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    contender.serve(become, sys.stdin, answers)
