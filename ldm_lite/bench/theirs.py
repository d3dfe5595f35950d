"""Every section by a peer: diffusers, eager and compiled, and OpenVINO, in a bare loop with diffusers' schedulers.

That is the fastest way to use them: no pipeline, progress bar or safety checker.  The weights are the same.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ldm_lite.bench.checkpoints import family_of, open_model
from ldm_lite.bench.options import PEERS, BenchOptions
from ldm_lite.bench.work import CHECK_SCALE, BenchInputs, Unavailable, inputs
from ldm_lite.checkpoint.reader import parts_of, prefix
from ldm_lite.core.networks import DTYPES
from ldm_lite.core.tasks import noise_of
from ldm_lite.runtime.precision import set_matmul_precision

PRECISIONS = {"fp32": "f32", "bf16": "bf16"}  # OpenVINO's names
# What a network, by its role, is called with: latents, timestep and context; unscaled latents; token ids.
CALLS: dict[str, Callable[..., Tensor]] = {
    "unet": lambda unet, x, t, context: unet(x, t, encoder_hidden_states=context, return_dict=False)[0],
    "vae": lambda vae, z: vae.decode(z, return_dict=False)[0],
    "text_encoder": lambda encoder, ids: encoder(ids).last_hidden_state,
}


def versions(name: str, options: BenchOptions) -> str:
    """Return a peer's versions.  Raises Unavailable if it is not installed or does not run on the device."""
    try:
        numbers = {module: importlib.import_module(module).__version__.partition("-")[0] for module in PEERS[name]}
    except ImportError as error:
        raise Unavailable(f"is not installed ({error.name}): pip install {' '.join(PEERS[name])}") from error
    if name == "openvino" and options.device != "cpu":
        raise Unavailable("is for CPUs")
    text = ", ".join(f"{module} {number}" for module, number in numbers.items()).removeprefix(f"{name} ")
    return text if name == "openvino" else f"{text}, attention sdpa"


class PeerWorkload:
    """A workload by a peer's networks, which are made when they are needed."""

    def __init__(self, name: str, options: BenchOptions, dtype: str) -> None:
        """dtype is a short name.  Raises Unavailable if the peer does not run in it here."""
        if name == "openvino" and dtype not in PRECISIONS:
            raise Unavailable(f"runs in {' or '.join(PRECISIONS)} here")
        checkpoint = open_model(options.size, options.ckpt, options.device)
        if options.device.startswith("cuda"):
            set_matmul_precision("highest")  # as for our rows
        self._parts, self.family = parts_of(checkpoint), family_of(checkpoint)
        self.name, self.options, self.device = name, options, torch.device(options.device)
        self.dtype = torch.float32 if name == "openvino" else DTYPES[dtype]  # it rounds weights itself
        self._settings = {"INFERENCE_PRECISION_HINT": PRECISIONS.get(dtype)}
        self._networks: dict[str, Any] = {}
        self._converted: dict[tuple[object, ...], Any] = {}  # OpenVINO's, by role and shapes

    def network(self, role: str) -> Any:
        """Return the network of a role with the model's weights."""
        if role not in self._networks:
            from ldm_lite.bench import peers

            part, compiled = self._parts[role], self.name == "diffusers-compiled"
            before = prefix(role, part.shapes)
            weights = {before + key: part.read(key).to(self.dtype) for key in part}
            network: Any = peers.NETWORKS[role](self.family, weights).to(self.device)
            if compiled:
                network = network.to(memory_format=torch.channels_last)
            if compiled and role == "unet":
                # As in diffusers' guide to speed, without its coordinate descent, which takes minutes and which ours
                # lacks too; and for one size, like ours: else its second batch gets a graph for all sizes.
                network.fuse_qkv_projections()
                inductor: Any = importlib.import_module("torch._inductor.config")
                inductor.conv_1x1_as_mm, inductor.epilogue_fusion = True, False
                network = torch.compile(network, mode="max-autotune", fullgraph=True, dynamic=False)
            self._networks[role] = network
        return self._networks[role]

    def call(self, role: str, *args: Tensor) -> Tensor:
        """Run a network as in CALLS; OpenVINO runs one that is converted for the arguments' shapes."""
        if self.name != "openvino":
            return CALLS[role](self.network(role), *args)
        key = (role, *(value.shape for value in args))
        if key not in self._converted:
            network = self.network(role)

            class Module(torch.nn.Module):
                def forward(self, *inputs: Tensor) -> Tensor:
                    return CALLS[role](network, *inputs)

            openvino, shapes = importlib.import_module("openvino"), [list(value.shape) for value in args]
            model = openvino.convert_model(Module(), example_input=args, input=shapes)
            self._converted[key] = openvino.Core().compile_model(model, "CPU", self._settings)
            self._networks.clear()  # their memory
        return torch.from_numpy(self._converted[key](args)[0].copy())

    def inputs(self, batch: int) -> BenchInputs:
        return inputs(self.family, self.options, batch).to(self.device, self.dtype)

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
            before, after = self.call("unet", torch.cat([x, x]), on_device, both).chunk(2)
            x = scheduler.step(before + self.options.scale * (after - before), t, x).prev_sample
        return x

    @torch.no_grad()
    def prediction(self, tensors: BenchInputs) -> Tensor:
        x, both = torch.cat([tensors.noise, tensors.noise]), torch.cat([tensors.uncond, tensors.context])
        before, after = self.call("unet", x, torch.tensor(999, device=self.device), both).float().chunk(2)
        return before + CHECK_SCALE * (after - before)

    @torch.no_grad()
    def steps(self, tensors: BenchInputs, count: int) -> None:
        self.denoise("ddim", count, tensors.noise, torch.cat([tensors.uncond, tensors.context]))

    @torch.no_grad()
    def decode(self, tensors: BenchInputs) -> Tensor:
        return self.call("vae", tensors.noise).float().clamp(-1, 1).cpu()

    @torch.no_grad()
    def image(self, tensors: BenchInputs) -> Tensor:
        options, (batch, channels, height, width) = self.options, tensors.noise.shape
        for first in range(options.seed, options.seed + options.n_iter * batch, batch):
            both = torch.cat([self.call("text_encoder", ids) for ids in (tensors.empty, tensors.ids)])
            noise = noise_of(range(first, first + batch), (channels, height, width))()
            x = self.denoise(options.sampler, options.steps, noise.to(self.device, self.dtype), both)
            pixels = self.decode(tensors._replace(noise=x / self.family.scale_factor))
            arrays = ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        assert len(arrays) == batch
        return pixels
