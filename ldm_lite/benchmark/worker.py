"""The process of a contender that runs apart: `python -m ldm_lite.benchmark.worker`, questions in, answers out.

A peer is its networks (with the same weights, renamed by diffusers' converters) and its schedulers in a bare loop, the
fastest way to use them: no pipeline, progress bar or safety checker.  The imports of a peer are here alone.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ldm_lite.benchmark import configurations, contender
from ldm_lite.benchmark.contender import Contender, Here, Unable
from ldm_lite.benchmark.jobs import CHECK_SCALE, Inputs, Job, Setting, inputs
from ldm_lite.benchmark.subjects import subject
from ldm_lite.checkpoint import split
from ldm_lite.families import Family
from ldm_lite.identify import identify
from ldm_lite.runtime.precision import DTYPES

Network = Callable[..., Tensor]
PEERS = ("diffusers", "diffusers-compiled", "openvino")


@dataclass(frozen=True)
class Networks:
    """A peer's networks as functions of tensors on the device, in the dtype."""

    unet: Network  # (x, t, context) -> prediction
    decode: Network  # unscaled latents -> pixels
    text: Network  # token ids -> context


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
        run, check = getattr(self, f"_{section}")(inputs(self.family, self.setting, batch))
        grad_free = torch.no_grad()
        return Job(grad_free(run), grad_free(check))

    def _loop(self, sampler: str, steps: int, noise: Tensor, both: Tensor) -> Tensor:
        from ldm_lite.benchmark import peers

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


def _diffusers(about: dict[str, Any], compiled: bool) -> tuple[str, Callable[[str], Theirs]]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise Unable(f"is not installed ({error.name}): pip install diffusers transformers") from error

    def make(dtype: str) -> Theirs:
        unet, vae, text, family = _torch_networks(about, dtype)
        if compiled:  # as its documentation says
            unet.to(memory_format=torch.channels_last)
            vae.to(memory_format=torch.channels_last)
            unet = torch.compile(unet, mode="max-autotune", fullgraph=True)
        networks = Networks(
            lambda x, t, context: unet(x, t, encoder_hidden_states=context, return_dict=False)[0],
            lambda z: vae.decode(z, return_dict=False)[0],
            lambda ids: text(ids).last_hidden_state,
        )
        return Theirs(networks, family, Setting(**about["setting"]), torch.device(about["device"]), DTYPES[dtype])

    return f"{diffusers.__version__}, transformers {transformers.__version__}", make


def _torch_networks(about: dict[str, Any], dtype: str) -> tuple[Any, Any, Any, Family]:
    """diffusers' UNet and autoencoder and transformers' text encoder with the subject's weights, and its family."""
    from ldm_lite.benchmark import peers

    checkpoint = subject(about["size"], about["ckpt"])
    shapes = {role: component.shapes for role, component in split(checkpoint).items()}
    family = identify(shapes, checkpoint.metadata)
    weights = {key: checkpoint.read(key).float() for key in checkpoint.shapes}
    made = (make(family, weights) for make in (peers.unet, peers.vae, peers.text_encoder))
    unet, vae, text = (network.to(about["device"], DTYPES[dtype]) for network in made)
    return unet, vae, text, family


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
        unet, vae, text, family = _torch_networks(about, dtype)
        networks = Networks(
            _converted(openvino, lambda x, t, context: unet(x, t, encoder_hidden_states=context, return_dict=False)[0]),
            _converted(openvino, lambda z: vae.decode(z, return_dict=False)[0]),
            _converted(openvino, lambda ids: text(ids).last_hidden_state),
        )
        return Theirs(networks, family, Setting(**about["setting"]), torch.device("cpu"), torch.float32)

    return f"{openvino.__version__.split('-')[0]}, of diffusers {diffusers.__version__}", make


def _converted(openvino: Any, function: Network) -> Network:
    """A function of tensors, converted and compiled for each combination of shapes when it first comes."""
    compiled: dict[tuple[torch.Size, ...], Any] = {}

    class Module(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return function(*args)

    def call(*args: Tensor) -> Tensor:
        shapes = tuple(each.shape for each in args)
        if shapes not in compiled:
            model = openvino.convert_model(Module(), example_input=args, input=[list(shape) for shape in shapes])
            compiled[shapes] = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return torch.from_numpy(compiled[shapes](args)[0].copy())

    return call


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
