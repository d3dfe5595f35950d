"""A training step of ours against that of diffusers' train_text_to_image.py, in turn, on the same batches.

    python scripts/training_step.py --rounds 7

Needs diffusers.  Both train the same UNet with random weights from the same latents and text embeddings: noise,
forward, mean squared error, backward, clipped gradients, AdamW, EMA.  The script's own encoding of images and captions
in each step, which ours does once, is left out.  Prints the median seconds of a step, and the largest difference of
losses.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import diffusers
import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

import ldm_lite
from ldm_lite.bench import peers
from ldm_lite.bench.checkpoints import random_tensor
from ldm_lite.checkpoint.model import Model
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.models.unet import UNet
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss
from ldm_lite.train.norm import use_fast_backward
from ldm_lite.train.trainer import TrainConfig, Trainer
from ldm_lite.zoo.families import SD1

LR, DECAY, TOKENS = 1e-5, 0.999, 77
Step = Callable[[int], float]  # number of a step -> its loss


def batch(number: int, options: argparse.Namespace, width: int) -> Batch:
    """The latents and text embeddings of a step."""
    torch.manual_seed(number)
    shape = (options.batch, 4, options.latents, options.latents)
    moments = torch.cat([torch.randn(shape), torch.full(shape, -60.0)], dim=1)  # whose variance is nothing
    numbers = range(number * options.batch, (number + 1) * options.batch)
    return Batch(moments, [""] * options.batch, torch.randn(options.batch, TOKENS, width), tuple(numbers))


def ours(model: Model, options: argparse.Namespace, folder: Path) -> Step:
    """The trainer, with a batch of its own in each step."""
    width = model.family.unet.context_dim
    for weight in (p for p in model.unet.parameters() if p.ndim == 4):
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    loss = DiffusionLoss(
        model, {"unet": model.unet.requires_grad_(True)}, empty=Conditioning(torch.zeros(1, TOKENS, width))
    )
    config = TrainConfig(
        steps=10**6, batch=options.batch, accumulate=1, lr=LR, warmup=0, weight_decay=0.01, ema_decay=DECAY, clip=1.0,
        seed=0, minutes=None, save_every=10**6, workers=0, bf16=False,
    )  # fmt: skip
    trainer = Trainer(loss, config, folder)
    use_fast_backward(model.unet)

    def step(number: int) -> float:
        value = trainer._step(iter([batch(number, options, width)]), lambda step: None)
        trainer.step += 1
        return value

    return step


def theirs(unet: nn.Module, model: Model, options: argparse.Namespace) -> Step:
    """The arithmetic of a step of train_text_to_image.py, with --use_ema."""
    width = model.family.unet.context_dim
    unet.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
    ema = EMAModel(unet.parameters(), decay=DECAY)
    noises = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")

    def step(number: int) -> float:
        given = batch(number, options, width)
        draws = Draws(0, given.numbers)
        _, noise = (draws.normal(given.pixels[:, :4].shape[1:]) for _ in range(2))
        latents = given.pixels[:, :4] * model.family.scale_factor
        timesteps = draws.integers(1000)
        noisy = noises.add_noise(latents, noise, timesteps)
        predicted: Tensor = unet(noisy, timesteps, given.context, return_dict=False)[0]
        loss = nn.functional.mse_loss(predicted.float(), noise.float(), reduction="mean")
        value = loss.detach().item()
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(unet.parameters())
        return value

    return step


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--channels", type=int, default=128, help="width of the UNet; 320 is Stable Diffusion 1")
    parser.add_argument("--latents", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    base = ldm_lite.load(device="cpu")

    family = replace(SD1, unet=replace(SD1.unet, model_channels=options.channels))
    unet = UNet(family.unet)
    values = {key: random_tensor(key, tuple(value.shape)) for key, value in unet.state_dict().items()}
    unet.load_state_dict(values)
    model = replace(base, family=family, unet=unet, schedule=family.noise.schedule("eps"))
    other = peers.unet(family, {f"model.diffusion_model.{key}": value for key, value in copy.deepcopy(values).items()})
    with tempfile.TemporaryDirectory() as folder:
        steps = {"ours": ours(model, options, Path(folder)), "diffusers": theirs(other, model, options)}
        times: dict[str, list[float]] = {name: [] for name in steps}
        difference = 0.0
        for number in range(options.rounds + 1):
            losses = []
            for name in steps if number % 2 else reversed(steps):
                start = time.perf_counter()
                losses.append(steps[name](number))
                times[name].append(time.perf_counter() - start)
            difference = max(difference, abs(losses[0] - losses[1]) / losses[0])
    count = sum(p.numel() for p in unet.parameters()) / 1e6
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}  # the first is a warm-up
    print(
        f"{count:.0f} M parameters, batch {options.batch}, latents {options.latents}, {torch.get_num_threads()} threads"
    )
    for name, each in times.items():
        spread = (max(each[1:]) - min(each[1:])) / medians[name]
        print(f"{name}: {medians[name]:.3f} s a step, spread {spread:.1%}")
    print(f"ratio {medians['ours'] / medians['diffusers']:.3f}, losses within {difference:.1e}")


if __name__ == "__main__":
    main()
