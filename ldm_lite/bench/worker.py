"""The process of a SubprocessBackend: `python -m ldm_lite.bench.worker`, requests in, answers out.

A peer runs its networks (with the same weights, renamed by diffusers' converters) and schedulers in a bare loop, the
fastest way to use them: no pipeline, progress bar or safety checker.  Only peers.py and this file import a peer.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ldm_lite.bench.backends import Backend, InProcessBackend, Unavailable, serve
from ldm_lite.bench.checkpoints import open_model
from ldm_lite.bench.configurations import CONFIGURATIONS, Models
from ldm_lite.bench.workload import CHECK_SCALE, Inputs, Job, Setting, Target, inputs
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
class PeerWorkload:
    """Every section by a peer's networks and diffusers' schedulers."""

    networks: Networks
    family: Family
    setting: Setting
    device: torch.device
    dtype: torch.dtype

    def job(self, section: str, batch: int) -> Job:
        """Prepare a section's work."""
        if section not in JOBS:
            raise Unavailable(f"does not run {section}")
        return JOBS[section](self, inputs(self.family, self.setting, batch))

    def denoise(self, sampler: str, steps: int, noise: Tensor, both: Tensor) -> Tensor:
        """Run diffusers' denoising loop from unit noise; both holds the contexts of both branches."""
        from ldm_lite.bench import peers

        schedulers = peers.schedulers(self.family)
        if sampler not in schedulers:
            raise Unavailable(f"runs {' and '.join(schedulers)} here, not {sampler}")
        scheduler: Any = schedulers[sampler]()
        scheduler.set_timesteps(steps)
        x = noise * scheduler.init_noise_sigma
        # The scheduler gets timesteps on the CPU: it reads their values, and would wait for a GPU at each step.
        for t, on_device in zip(scheduler.timesteps, scheduler.timesteps.to(self.device), strict=True):
            before, after = self.networks.unet(torch.cat([x, x]), on_device, both).chunk(2)
            x = scheduler.step(before + self.setting.scale * (after - before), t, x).prev_sample
        return x


class _PeerJob(Job):
    def __init__(self, workload: PeerWorkload, given: Inputs) -> None:
        self.workload, self.networks, self.setting = workload, workload.networks, workload.setting
        self.given, self.device = given, workload.device

    @torch.no_grad()
    def check(self) -> Tensor:
        return self._once()

    @torch.no_grad()
    def run(self, calls: int) -> None:
        self._repeat(calls)

    def _once(self) -> Tensor:
        raise NotImplementedError

    def _repeat(self, calls: int) -> None:
        for _ in range(calls):
            self._once()

    def _pixels(self, z: Tensor) -> Tensor:
        return self.networks.decode(z).float().clamp(-1, 1).cpu()


class _Step(_PeerJob):
    def __init__(self, workload: PeerWorkload, given: Inputs) -> None:
        super().__init__(workload, given)
        self.noise = given.noise.to(self.device, workload.dtype)
        self.both = torch.cat([given.uncond, given.context]).to(self.device, workload.dtype)

    def _once(self) -> Tensor:
        t = torch.tensor(999, device=self.device)
        before, after = self.networks.unet(torch.cat([self.noise, self.noise]), t, self.both).float().chunk(2)
        return before + CHECK_SCALE * (after - before)

    def _repeat(self, calls: int) -> None:
        self.workload.denoise("ddim", calls, self.noise, self.both)


class _Decode(_PeerJob):
    def __init__(self, workload: PeerWorkload, given: Inputs) -> None:
        super().__init__(workload, given)
        self.z = given.noise.to(self.device, workload.dtype)

    def _once(self) -> Tensor:
        return self._pixels(self.z)


class _Text(_PeerJob):
    def __init__(self, workload: PeerWorkload, given: Inputs) -> None:
        super().__init__(workload, given)
        self.ids = given.ids.to(self.device)

    def _once(self) -> Tensor:
        return self.networks.text(self.ids)


class _Txt2img(_PeerJob):
    """From prompts to uint8 pixels."""

    def _once(self) -> Tensor:
        setting, given, batch = self.setting, self.given, len(self.given.noise)
        for repeat in range(setting.n_iter):
            both = torch.cat([self.networks.text(ids.to(self.device)) for ids in (given.empty, given.ids)])
            seeds = range(setting.seed + repeat * batch, setting.seed + (repeat + 1) * batch)
            shape = given.noise.shape[1:]
            noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds])
            noise = noise.to(self.device, self.workload.dtype)
            x = self.workload.denoise(setting.sampler, setting.steps, noise, both)
            pixels = self._pixels(x / self.workload.family.scale_factor)
            arrays = ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        assert len(arrays) == batch
        return pixels


JOBS: dict[str, type[_PeerJob]] = {"step": _Step, "decode": _Decode, "text": _Text, "image": _Txt2img}


# ---- the peers ------------------------------------------------------------------------------------------------------


class TorchNetworks:
    """diffusers' UNet and autoencoder and transformers' text encoder with the model's weights, made when needed."""

    def __init__(self, target: Target, dtype: str, compiled: bool = False) -> None:
        checkpoint = open_model(target.size, target.ckpt)
        self._components = split(checkpoint)
        shapes = {role: component.shapes for role, component in self._components.items()}
        self.family = detect_family(shapes, checkpoint.metadata)
        self._device, self._dtype, self._compiled = target.device, DTYPES[dtype], compiled

    def _made(self, role: str) -> Any:
        from ldm_lite.bench import peers

        component = self._components[role]
        weights = {key: component.checkpoint.read(key).to(self._dtype) for key in component.keys.values()}
        network = peers.NETWORKS[role](self.family, weights).to(self._device)
        return network.to(memory_format=torch.channels_last) if self._compiled else network  # type: ignore[call-overload]

    @functools.cached_property
    def _unet(self) -> Any:
        unet = self._made("unet")
        if not self._compiled:
            return unet
        # As in diffusers' documentation, but for one size: otherwise its second batch gets a graph for all sizes.
        return torch.compile(unet, mode="max-autotune", fullgraph=True, dynamic=False)

    @functools.cached_property
    def _vae(self) -> Any:
        return self._made("vae")

    @functools.cached_property
    def _text(self) -> Any:
        return self._made("text_encoder")

    def unet(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """Latents, timestep and context -> prediction."""
        return self._unet(x, t, encoder_hidden_states=context, return_dict=False)[0]

    def decode(self, z: Tensor) -> Tensor:
        """Unscaled latents -> pixels."""
        return self._vae.decode(z, return_dict=False)[0]

    def text(self, ids: Tensor) -> Tensor:
        """Token ids -> context."""
        return self._text(ids).last_hidden_state

    def free(self) -> None:
        """Free the memory of all networks; they are made again when needed."""
        for name in ("_unet", "_vae", "_text"):
            vars(self).pop(name, None)


class OpenVINONetworks:
    """The same networks converted to OpenVINO and compiled for each combination of shapes at its first use."""

    def __init__(self, openvino: Any, networks: TorchNetworks) -> None:
        self._openvino, self._networks = openvino, networks
        self._compiled: dict[tuple[object, ...], Any] = {}

    def _run(self, name: str, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        key = (name, *(each.shape for each in args))
        if key not in self._compiled:
            self._compiled[key] = self._compile(function, args)
            self._networks.free()
        return torch.from_numpy(self._compiled[key](args)[0].copy())

    def _compile(self, function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> Any:
        class Module(torch.nn.Module):
            def forward(self, *inputs: Tensor) -> Tensor:
                return function(*inputs)

        function(*args)  # makes the network outside the trace
        shapes = [list(each.shape) for each in args]
        model = self._openvino.convert_model(Module(), example_input=args, input=shapes)
        return self._openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def unet(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """Latents, timestep and context -> prediction."""
        return self._run("unet", self._networks.unet, x, t, context)

    def decode(self, z: Tensor) -> Tensor:
        """Unscaled latents -> pixels."""
        return self._run("decode", self._networks.decode, z)

    def text(self, ids: Tensor) -> Tensor:
        """Token ids -> context."""
        return self._run("text", self._networks.text, ids)


def _diffusers(name: str, target: Target) -> tuple[str, Backend]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise Unavailable(f"is not installed ({error.name}): pip install diffusers transformers") from error
    device = torch.device(target.device)

    def make(dtype: str) -> PeerWorkload:
        networks = TorchNetworks(target, dtype, compiled=name == "diffusers-compiled")
        return PeerWorkload(networks, networks.family, target.setting, device, DTYPES[dtype])

    description = f"{diffusers.__version__}, transformers {transformers.__version__}"
    return description, InProcessBackend(name, device, make)


def _openvino(target: Target) -> tuple[str, Backend]:
    try:
        import diffusers
        import openvino
    except ImportError as error:
        raise Unavailable(f"is not installed ({error.name}): pip install openvino diffusers transformers") from error
    if target.device != "cpu":
        raise Unavailable("is for CPUs")
    device = torch.device("cpu")

    def make(dtype: str) -> PeerWorkload:
        if dtype != "fp32":
            raise Unavailable("runs in fp32 here")
        source = TorchNetworks(target, dtype)
        networks = OpenVINONetworks(openvino, source)
        return PeerWorkload(networks, source.family, target.setting, device, torch.float32)

    description = f"{openvino.__version__.split('-')[0]}, of diffusers {diffusers.__version__}"
    return description, InProcessBackend("openvino", device, make)


def make_backend(name: str, target: Target) -> tuple[str, Backend]:
    """Return a description and the backend: a peer, or one of our configurations in its own process.

    Raises Unavailable if it is not installed or does not support this device.
    """
    if target.threads is not None:
        torch.set_num_threads(target.threads)
    if name == "openvino":
        return _openvino(target)
    if name in PEERS:
        return _diffusers(name, target)
    models = Models(open_model(target.size, target.ckpt), torch.device(target.device))
    configuration = CONFIGURATIONS[name]
    return configuration.title, models.backend(name, configuration, target.setting)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print; only answers go to stdout
    serve(make_backend, sys.stdin, answers)
