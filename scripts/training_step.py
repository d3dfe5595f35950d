"""Time a training step of ours and of diffusers' scripts, in turn, on the same batches.

    python scripts/training_step.py --rounds 7                                       # train_text_to_image.py
    python scripts/training_step.py --rounds 3 --channels 320 --lora 16              # train_text_to_image_lora.py
    python scripts/training_step.py --bf16                                           # in bfloat16, by autocast
    python scripts/training_step.py --rounds 2 --only ours                           # peak memory

Needs diffusers and peft.  Both train the same UNet with random weights from the same latents and text embeddings:
noise, forward, mean squared error, backward, clipped gradients, AdamW, EMA (diffusers' LoRA has none).  Ours is set up
as `python -m ldm_lite.train` does it; both LoRAs have the same layers and values.  The scripts' own
encoding of images and captions in each step, which ours does once, is left out.  Prints the median seconds of a step,
and the largest difference of losses; with --only the peak memory of the process.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ldm_lite.cli import threads

os.environ.update(threads.settings())  # before torch is loaded

import diffusers
import peft
import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

import ldm_lite
from ldm_lite.bench import peers
from ldm_lite.bench.checkpoints import random_tensor
from ldm_lite.checkpoint.model import CheckpointModel
from ldm_lite.cli.options import RuntimeOptions
from ldm_lite.families.sd1 import SD1
from ldm_lite.models.unet import LDMUNet
from ldm_lite.runtime.setup import prepare_networks
from ldm_lite.train.additions import LoRA
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss, checkpoint_activations
from ldm_lite.train.options import TrainOptions
from ldm_lite.train.trainer import Trainer
from ldm_lite.zoo.family import FamilyRow

LR, DECAY, TOKENS = 1e-5, 0.999, 77
LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]  # as kohya's LoRAs
Step = Callable[[int], float]  # number of a step -> its loss


def batch(number: int, options: argparse.Namespace, width: int) -> Batch:
    """The latents and text embeddings of a step."""
    torch.manual_seed(number)
    shape = (options.batch, 4, options.latents, options.latents)
    moments = torch.cat([torch.randn(shape), torch.full(shape, -60.0)], dim=1)  # whose variance is nothing
    numbers = range(number * options.batch, (number + 1) * options.batch)
    return Batch(moments, [""] * options.batch, torch.randn(options.batch, TOKENS, width), tuple(numbers))


def weights(family: FamilyRow) -> dict[str, Tensor]:
    """Random weights of a UNet."""
    with torch.device("meta"):
        unet = LDMUNet(family.unet)
    return {key: random_tensor(key, tuple(value.shape)) for key, value in unet.state_dict().items()}


def ours(family: FamilyRow, options: argparse.Namespace, folder: Path) -> Step:
    """The trainer, with a new batch in each step."""
    with torch.device("meta"):
        unet = LDMUNet(family.unet)
    unet.load_state_dict(weights(family), assign=True)
    unet.requires_grad_(False).eval()
    prepare_networks({"unet": unet}, RuntimeOptions(), torch.device("cpu"))
    model: CheckpointModel = ldm_lite.load(device="cpu").with_networks(unet=unet)
    model = replace(model, family=family, schedule=family.noise.schedule("eps"))
    networks: dict[str, nn.Module] = {"unet": unet}
    if options.lora:
        lora = LoRA(networks, options.lora)
        fill(lora)
        lora.attach(networks)
        networks = {"lora": lora}
    empty = {"context": torch.zeros(1, TOKENS, family.unet.context_dim)}
    config = TrainOptions(
        steps=10**6, batch_size=options.batch, lr=LR, warmup=0, ema_decay=DECAY, save_every=10**6, data_workers=0,
        optimizer=options.optimizer,
    )  # fmt: skip
    if options.checkpointing:
        checkpoint_activations(unet)
    precision = torch.bfloat16 if options.bf16 else None
    trainer = Trainer(DiffusionLoss(model, networks, empty=empty), config, folder, precision)

    def step(number: int) -> float:
        trainer._step(iter([batch(number, options, family.unet.context_dim)]))
        trainer.step += 1
        return trainer.read()[0]

    return step


def theirs(family: FamilyRow, options: argparse.Namespace, folder: Path) -> Step:
    """The arithmetic of a step of train_text_to_image.py with --use_ema, or of train_text_to_image_lora.py."""
    unet = peers.unet(family, {f"model.diffusion_model.{key}": value for key, value in weights(family).items()})
    unet.requires_grad_(not options.lora).train()
    if options.lora:
        _add_lora(unet, options.lora)
    trained = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
    ema = None if options.lora else EMAModel(trained, decay=DECAY)
    noises = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")

    def step(number: int) -> float:
        examples = batch(number, options, family.unet.context_dim)
        draws = Draws(0, examples.numbers)
        noise = draws.normal("noise", examples.pixels[:, :4].shape[1:])
        latents = examples.pixels[:, :4] * family.scale_factor
        timesteps = draws.integers("timesteps", 1000)
        noisy = noises.add_noise(latents, noise, timesteps)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):  # as accelerate does for mixed_precision=bf16
            predicted: Tensor = unet(noisy, timesteps, examples.context, return_dict=False)[0]
        loss = nn.functional.mse_loss(predicted.float(), noise.float(), reduction="mean")
        value = loss.detach().item()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.step(trained)
        return value

    return step


def fill(lora: LoRA) -> None:
    """Give a LoRA values that depend only on the names of its weights."""
    for name, value in lora.named_parameters():
        value.data.copy_(random_tensor(name, tuple(value.shape)))


def _add_lora(unet: nn.Module, rank: int) -> None:
    """Add peft's LoRA, with the values of ours."""
    unet.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=LAYERS))  # type: ignore[operator]
    for name, value in unet.named_parameters():
        if value.requires_grad:
            layer, part = name.split(".lora_")
            key = f"lora_unet_{layer.replace('.', '_')}.lora_{'down' if part[0] == 'A' else 'up'}.weight"
            value.data.copy_(random_tensor(key, tuple(value.shape)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--channels", type=int, default=128, help="width of the UNet; 320 is Stable Diffusion 1")
    parser.add_argument("--latents", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRAs of this rank")
    parser.add_argument("--optimizer", default="adamw", help="of ours (default: %(default)s)")
    parser.add_argument(
        "--checkpointing", action="store_true", help="ours recomputes activations, as --checkpointing does"
    )
    parser.add_argument("--bf16", action="store_true", help="both compute in bfloat16, by autocast")
    parser.add_argument("--only", choices=MAKERS, help="run one of them, and print the peak memory")
    options = parser.parse_args()
    family = replace(SD1, unet=replace(SD1.unet, model_channels=options.channels))
    with tempfile.TemporaryDirectory() as folder:
        makers = {name: make for name, make in MAKERS.items() if options.only in (None, name)}
        steps = {name: make(family, options, Path(folder)) for name, make in makers.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        difference = 0.0
        for number in range(options.rounds + 1):
            losses = []
            for name in steps if number % 2 else reversed(steps):
                start = time.perf_counter()
                losses.append(steps[name](number))
                times[name].append(time.perf_counter() - start)
            difference = max(difference, abs(losses[0] - losses[-1]) / losses[0])
    print(f"{options}, {torch.get_num_threads()} threads")
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}  # the first is a warm-up
    for name, seconds in times.items():
        spread = (max(seconds[1:]) - min(seconds[1:])) / medians[name]
        print(f"{name}: {medians[name]:.3f} s a step, spread {spread:.1%}")
    if options.only is None:
        print(f"ratio {medians['ours'] / medians['diffusers']:.3f}, losses within {difference:.1e}")
    else:
        print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


MAKERS: dict[str, Callable[[FamilyRow, argparse.Namespace, Path], Step]] = {"ours": ours, "diffusers": theirs}

if __name__ == "__main__":
    main()
