"""What the bundled model needs before `python -m ldm_lite.train`, which goes on from a checkpoint, can train it.

    python scripts/train_emoji.py autoencoder --out vae [--vae FILE] [--freeze-encoder] ...
    python scripts/train_emoji.py reconstruct --vae vae/model.safetensors --out sheet.png ...
    python scripts/train_emoji.py new --vae vae/model.safetensors --out start.safetensors
    python -m ldm_lite.train --ckpt start.safetensors --renderer scripts/render_emoji.py --out run ...
    python scripts/train_emoji.py text --ckpt run/model.safetensors --out text ...
    python scripts/train_emoji.py words --ckpt text/model.safetensors --out words.safetensors
    python scripts/train_emoji.py characters --ckpt words.safetensors --out characters.safetensors
    python scripts/train_emoji.py decoder --ckpt characters.safetensors --out crisp ...
    python scripts/train_emoji.py sharpen --ckpt crisp/model.safetensors --out sharp.safetensors
    python scripts/train_emoji.py pack --ckpt sharp.safetensors --out emoji.safetensors
    python scripts/train_emoji.py whole --out emoji --minutes 12                          # all of it, on a GPU

`autoencoder` trains a KL autoencoder on reconstruction, a new one or that of a file (--freeze-encoder: its decoder
alone, so that latents do not change).  `reconstruct` tells how well it does on scenes, and draws them.  `new` writes a
checkpoint with new weights, whose scale factor gives the latents unit variance.  `text` trains the text encoder of a
finished model alone, on captions in other words for instance: all that the UNet can draw stays as it is; with
--with-unet it trains both.  `words` adds other words for what the model knows, `characters` the emoji themselves, and
both change nothing else.  `decoder` trains the decoder of a finished model alone: images become crisp, and latents
stay.  `sharpen` folds an unsharp mask into its last layer.  `pack` keeps of the token table the rows that were
learned, and lists the words.  Runs are stopped and continued (--resume) as those of `python -m ldm_lite.train`.

`whole` is for a GPU that is there for minutes: all of it, from the autoencoder of --vae on.  A fifth of the time goes
to the autoencoder, on scenes that are drawn anew; then --scenes are drawn and encoded once, and the
diffusion model has what is left.  Both learning rates end at 0.  OUT/run/model.safetensors is the model so far.
"""

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher
from pathlib import Path

from ldm_lite.cli import threads

os.environ.update(threads.settings())  # before torch is loaded

import numpy as np
import torch
from emoji_characters import with_characters
from emoji_words import kinds_of, other_names, reworded, word_list
from render_emoji import VOCABULARY, contact_sheet
from torch import Tensor, nn
from torch.nn import functional as F

from ldm_lite import Pipeline
from ldm_lite.checkpoint.parts import load_autoencoder
from ldm_lite.checkpoint.reader import prefix
from ldm_lite.cli import console
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.progress import TrainingBar
from ldm_lite.core import files
from ldm_lite.core.networks import pick_device
from ldm_lite.core.tokenizer import END as EOT
from ldm_lite.core.unet import ResBlock, SpatialTransformer
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.families.sd1 import SD1
from ldm_lite.image import to_pil
from ldm_lite.models.clip import CLIP_L, CLIPTextModel, CLIPTextSpec
from ldm_lite.models.unet import AttentionBlock, LDMUNet
from ldm_lite.networks import encode_captions, network_inputs, token_tables
from ldm_lite.runtime import cpu
from ldm_lite.text.tokenizer import FixingCLIPTokenizer
from ldm_lite.toolkit import load_model
from ldm_lite.train.additions import Content
from ldm_lite.train.batches import Batch, Draws, Order
from ldm_lite.train.data import Dataset, to_float
from ldm_lite.train.encoded import encoded, open_scenes
from ldm_lite.train.losses import DiffusionLoss, Loss, moments, moments_of
from ldm_lite.train.options import TrainOptions
from ldm_lite.train.run import check_model, checkpoint, make_trainer, plot_losses, precision_of, run_folder, train
from ldm_lite.train.state import write_tensors
from ldm_lite.zoo.family import KL_F8, FamilyRow

# ---- new models -----------------------------------------------------------------------------------------------------

EMOJI = replace(
    SD1,
    title="emoji, 128 px",
    unet=replace(
        SD1.unet,
        in_channels=16,
        out_channels=16,
        model_channels=96,
        channel_mult=(1, 2),  # 9.5 M parameters; with a token table of width 112 the file stays below 40 MB
        num_res_blocks=(1, 1),
        transformer_depth=(1, 1),
        num_heads=4,
        context_dim=112,
        cross_only=(False, False),
    ),
    vae=replace(KL_F8, channels=32, num_res_blocks=1, z_channels=16, embed_dim=16),
    # With SD's 0.012 a mean over 16 x 16 positions shows what is under the last step's noise, which sampling has not.
    noise=replace(SD1.noise, end=0.02),
    prediction="v",  # at t = T, where x is pure noise, the target is still the image
    text_encoders=(replace(CLIP_L, length=40, width=112, mlp_width=448, layers=3, heads=4),),
    resolution=128,
    scale=2.5,
    steps=20,
)
DATA = (
    '{"emoji":440,"two":0.25,"counts":0.12,"tinted":0.15,"sized":0.25,"gradients":0.25,"solid":0.5,"free":0.3,'
    '"jitter":0.5,"split":"train"}'
)
CAPTIONS = 3000  # that are reworded
SHARPENED = 192  # scenes whose latents tell how
MEASURED = 512  # images whose latents give the scale factor, and whose captions the tokens that begin above 0


def new_model(family: FamilyRow, vae: AutoencoderKL, dataset: Dataset, seed: int) -> Pipeline:
    """Return a model with new weights but for its autoencoder, whose latents get unit variance (Rombach 2022, app. G).

    Embeddings of tokens that the first captions do not have begin at 0, and stay there if no caption has them: random
    numbers could not be compressed.
    """
    torch.manual_seed(seed)
    assert isinstance(family.text, CLIPTextSpec)
    device = next(vae.parameters()).device
    with torch.device(device):
        unet, text = LDMUNet(family.unet), CLIPTextModel(family.text)
    initialise(unet)
    tokenizer = FixingCLIPTokenizer(text.spec.length)
    order = Order(dataset, seed)
    examples = [dataset.example(order[i]) for i in range(min(MEASURED, sum(dataset.shards or (MEASURED,))))]
    seen = tokenizer([example.caption for example in examples]).unique()
    # Small values, as the code of CLIP has them.  Radford et al. 2021.
    table = text.embeddings.token_embedding.weight
    nn.init.normal_(table, std=0.02)
    nn.init.normal_(text.embeddings.position_embedding.weight, std=0.01)
    with torch.no_grad():
        table[~torch.isin(torch.arange(len(table)), seen)] = 0
    mean, logvar = moments_of(vae, torch.stack([example.pixels for example in examples]), device)
    scale = float(1 / (mean.var() + logvar.exp().mean()).sqrt())
    family = replace(family, vae=vae.spec, scale_factor=scale)
    schedule = family.noise.schedule(family.prediction)
    networks = {"unet": unet, "vae": vae, "text_encoder": text}
    return Pipeline(
        "model", family, schedule, networks, tokenizer=tokenizer, description=f"{family.title}, new weights"
    )


def initialise(unet: LDMUNet) -> None:
    """Zero the last layer of each residual branch, as the original does: every block starts as the identity."""
    lasts: list[nn.Module] = [unet.out[2]]
    for module in unet.modules():
        if isinstance(module, ResBlock):
            lasts.append(module.out_layers[3])
        elif isinstance(module, (SpatialTransformer, AttentionBlock)):
            lasts.append(module.proj_out)
    for last in lasts:
        for parameter in last.parameters():
            nn.init.zeros_(parameter)


# ---- losses ---------------------------------------------------------------------------------------------------------


@dataclass
class AutoencoderLoss:
    """Reconstruction: L1, 0.5 L2, 0.5 L1 of the differences of neighbours, and a small KL term.

    Neighbours are pixels, and the means of 2 x 2 and 4 x 4: so edges are crisp, and flat grounds without stains.
    """

    vae: AutoencoderKL
    train_encoder: bool = True  # False: train only the decoder, so that latents do not change
    kl_weight: float = 1e-4

    def __post_init__(self) -> None:
        self.networks: dict[str, nn.Module] = {"vae": self.vae}
        self.vae.requires_grad_(self.train_encoder)
        for part in (self.vae.decoder, self.vae.post_quant_conv):
            part.requires_grad_(True)

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of one batch; captions are ignored."""
        device = next(self.vae.parameters()).device
        x = to_float(batch.pixels, device)
        with torch.set_grad_enabled(self.train_encoder and torch.is_grad_enabled()):
            mean, logvar = moments(self.vae, x)
        noise = draws.normal("latents", mean.shape[1:], device)
        y = self.vae.decode(mean + (logvar / 2).exp() * noise)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        loss = F.l1_loss(y, x) + 0.5 * F.mse_loss(y, x) + self.kl_weight * kl
        for size in (1, 2, 4):
            means = F.avg_pool2d(y, size), F.avg_pool2d(x, size)
            loss = loss + 0.5 * edge_error(*means)
        return loss


def edge_error(y: Tensor, x: Tensor) -> Tensor:
    """Return the L1 of the differences of neighbours of two images (B,C,H,W), over both directions."""
    return F.l1_loss(y.diff(dim=2), x.diff(dim=2)) + F.l1_loss(y.diff(dim=3), x.diff(dim=3))


def slope_error(y: Tensor, x: Tensor, size: int) -> Tensor:
    """Return how much steeper or flatter the squares of an image (B,C,H,W) are than another's, wherever edges lie.

    Of differences to the right and down, and of the Laplacian: the L1 of their mean sizes in squares of `size` pixels,
    and of their RMS.  An edge of one step has the largest RMS for its height, so a blurred one is made steep; ripples
    would make the means too large, and so would grain on a plain ground.
    """
    error = torch.zeros((), device=x.device)
    for of_y, of_x in zip(slopes(y), slopes(x), strict=True):
        error = error + F.l1_loss(F.avg_pool2d(of_y.abs(), size), F.avg_pool2d(of_x.abs(), size))
        squares = F.avg_pool2d(of_y.square(), size), F.avg_pool2d(of_x.square(), size)
        error = error + F.l1_loss(*((square + 1e-5).sqrt() for square in squares))
    return error


def slopes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the differences to the next pixels on the right and below of x (B,C,H,W), and the Laplacian."""
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    right, below = padded[..., 1:-1, 2:] - x, padded[..., 2:, 1:-1] - x
    return right, below, right + below + padded[..., 1:-1, :-2] + padded[..., :-2, 1:-1] - 2 * x


@torch.no_grad()
def begin_words(model: Pipeline) -> None:
    """Let the last token of each other word, where it has no row yet, begin as that of the usual name."""
    [table], usual = token_tables(model), {entry.names[0]: entry.character for entry in VOCABULARY}
    assert isinstance(model.tokenizer, FixingCLIPTokenizer)
    for name, character in usual.items():
        if name in other_names():
            words = (*other_names()[name], character, f"{character}\ufe0f", *kinds_of().get(name, ()))
            ids = model.tokenizer([name, *words])
            first, *last = (row[int((row == EOT).int().argmax()) - 1] for row in ids)
            for token in last:
                if not table[token].any():
                    table[token] = table[first]


def copy_words(
    model: Pipeline, captions: Sequence[str], steps: int, seed: int, size: int = 64, lr: float = 2e-3
) -> None:
    """Train the rows of tokens that had none, so that reworded captions get the hidden states of the usual ones.

    All else stays: images of known words do not change by a bit.  (Trained as a whole, the encoder forgot.)
    """
    encoder, tokenizer, rng = model.networks["text_encoder"], model.tokenizer, np.random.default_rng([seed, 0xC09])
    assert isinstance(encoder, CLIPTextModel)
    assert isinstance(tokenizer, FixingCLIPTokenizer)
    former = copy.deepcopy(encoder).requires_grad_(False)
    known = former.embeddings.token_embedding.weight.any(dim=1).nonzero()[:, 0]
    begin_words(model)
    tokens = encoder.requires_grad_(False).embeddings.token_embedding
    tokens.weight.requires_grad_(True)
    tokens.sparse = True  # a step changes the rows of its tokens alone
    optimiser = torch.optim.SparseAdam([tokens.weight], lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, steps + 1, pct_start=0.1, cycle_momentum=False)
    for step in range(1, steps + 1):
        usual = [captions[int(k)] for k in rng.integers(len(captions), size=size)]
        ids, former_ids = tokenizer([reworded(caption, rng) for caption in usual]), tokenizer(usual)
        places = torch.tensor([aligned(*rows) for rows in zip(ids.tolist(), former_ids.tolist(), strict=True)])
        loss = F.mse_loss(encoder(ids), former(former_ids).take_along_dim(places[:, :, None], dim=1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            tokens.weight[known] = former.embeddings.token_embedding.weight[known]
        if step % 100 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.4f}", flush=True)
    tokens.sparse = False


def aligned(ids: list[int], others: list[int]) -> list[int]:
    """Return the place of the token of `others` that stands for each of `ids`: words that differ end together.

    For the first tokens of a word that has more of them here, it is the place before the word.
    """
    end, other_end = ids.index(EOT), others.index(EOT)
    places: list[int] = []
    for _, first, last, other_first, other_last in SequenceMatcher(
        None, ids[:end], others[:other_end], autojunk=False
    ).get_opcodes():
        places += [max(other_first - 1, other_last - (last - place)) for place in range(first, last)]
    return places + [min(other_end + place, len(others) - 1) for place in range(len(ids) - end)]


def details(x: Tensor) -> Tensor:
    """Return what a blur by (1,2,1)/4 in both directions takes away from x (B,C,H,W)."""
    kernel = torch.tensor([0.25, 0.5, 0.25], dtype=x.dtype, device=x.device)
    kernel = (kernel[:, None] * kernel).expand(x.shape[1], 1, 3, 3)
    return x - F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, groups=x.shape[1])


@dataclass
class RewordedLoss:
    """A diffusion model's loss, on captions of which a share has other words for what they show."""

    loss: DiffusionLoss
    share: float

    def __post_init__(self) -> None:
        self.networks = self.loss.networks

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of one batch; an example's words depend on its number alone."""
        captions = [
            reworded(caption, np.random.default_rng([draws.seed, 0x5EB, number]), kept=1 - self.share)
            for caption, number in zip(batch.captions, batch.numbers, strict=True)
        ]
        return self.loss(replace(batch, captions=captions), draws)


@dataclass
class DecoderLoss:
    """What makes a decoder crisp: slopes like those of scenes, whether or not its latents are quite right.

    Half of the latents are those of scenes, and reconstruction counts too: pixels, edges, and features of the frozen
    encoder's first levels.  The others, noised and denoised by the UNet in two guided steps, err as those of samples
    do.  What they show is not quite in its place, so they are compared by means of 4 x 4 pixels and the slopes of large
    squares; along the frame, where all is ground, by pixels.  Those count five times, and the worst of them a bit more:
    a decoder steers its norms by a hot spot in a corner, which leaves a mark.
    """

    model: Pipeline
    slopes: float  # weight of their error
    steps: tuple[float, ...] = (1.0, 0.25)  # of denoising: shares of the first timestep, which is in [150,650)

    def __post_init__(self) -> None:
        assert isinstance(self.model.vae, AutoencoderKL)
        self.vae, device = self.model.vae.requires_grad_(False), self.model.device
        for part in (self.vae.decoder, self.vae.post_quant_conv):
            part.requires_grad_(True)
        self.networks: dict[str, nn.Module] = {"vae": self.vae}
        alpha_bar = torch.tensor(self.model.schedule.alpha_bar, dtype=torch.float64, device=device)
        self._a, self._s = alpha_bar.sqrt().float(), (1 - alpha_bar).sqrt().float()
        side = self.model.family.resolution
        self._frame = torch.ones(side, side, dtype=torch.bool, device=device)
        self._frame[side // 32 : -side // 32, side // 32 : -side // 32] = False  # where all that scenes have is

    def __call__(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the loss of one batch."""
        x, half = to_float(batch.pixels, self.model.device), len(batch.numbers) // 2
        y = self.vae.decode(self.latents(batch, draws)).float()
        loss = F.l1_loss(*(F.avg_pool2d(pixels[:half], 4) for pixels in (y, x)))
        apart = (y - x).abs()[:, :, self._frame].flatten(1)
        loss = loss + 5 * apart.mean() + 0.5 * apart.topk(apart.shape[1] // 100).values.mean()
        loss = loss + self.slopes * (slope_error(y[:half], x[:half], 16) + slope_error(y[half:], x[half:], 8))
        y, x = y[half:], x[half:]
        loss = loss + F.l1_loss(y, x) + 0.5 * F.mse_loss(y, x)
        for size in (1, 2, 4):
            loss = loss + 0.5 * edge_error(F.avg_pool2d(y, size), F.avg_pool2d(x, size))
        for of_y, of_x in zip(self.features(y), self.features(x), strict=True):
            loss = loss + 0.1 * F.l1_loss(of_y.float(), of_x.float()) / of_x.float().abs().mean()
        return loss

    def latents(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the latents of a batch, the first half noised and denoised."""
        z, _ = moments_of(self.vae, batch.pixels, self.model.device)
        half = len(z) // 2
        z[:half] = self.denoised(z[:half], batch.captions[:half], Draws(draws.seed, batch.numbers[:half]))
        return z

    def features(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the encoder's first two levels, of pixels (B,3,H,W) in [-1,1]."""
        first, second = self.vae.encoder.down[:2]
        outputs = [first(self.vae.encoder.conv_in(x))]
        return [*outputs, second(outputs[0])]

    @torch.no_grad()
    def denoised(self, z: Tensor, captions: list[str], draws: Draws) -> Tensor:
        """Noise latents (B,C,h,w), each to a timestep of its own, and return what the UNet makes of them: DDIM."""
        factor, prediction = self.model.family.scale_factor, self.model.schedule.prediction
        assert prediction == "v"
        text = network_inputs(self.model, encode_captions(self.model, [*captions, *[None] * len(captions)]))
        first = 150 + draws.integers("timesteps", 500)
        x0, noise = factor * z, draws.normal("noise", z.shape[1:], z.device)
        for share in self.steps:
            t = (share * first).long().to(z.device)
            a, s = (values[t][:, None, None, None] for values in (self._a, self._s))
            x = a * x0 + s * noise
            v, unguided = self.model.unet(x.repeat(2, 1, 1, 1), t.repeat(2), **text).float().chunk(2)
            v = unguided + self.model.family.scale * (v - unguided)
            x0, noise = a * x - s * v, s * x + a * v
        return x0 / factor


@torch.no_grad()
def sharpen(vae: AutoencoderKL, batches: Iterable[Tensor], share: float) -> None:
    """Change the last convolution of a decoder so that it adds a share of an unsharp mask to its images, in place.

    A loss by pixels blurs an edge that is not known exactly, and unlearns slowly what it has blurred.  What the mask
    adds is known, so here least squares find it in what the convolution reads of batches of latents (B,C,h,w).
    """
    last, inputs = vae.decoder.conv_out, list[Tensor]()
    size = last.weight[0].numel() + 1
    squares = torch.zeros(size, size, dtype=torch.float64)
    products = torch.zeros(size, last.out_channels, dtype=torch.float64)
    hook = last.register_forward_pre_hook(lambda module, read: inputs.append(read[0].float()))
    for z in batches:
        added = share * details(vae.decode(z).float())
        read = F.unfold(inputs.pop(), last.kernel_size, padding=last.padding)  # (B,C*9,H*W)
        rows = torch.cat([read, torch.ones_like(read[:, :1])], dim=1).transpose(1, 2).flatten(0, 1).double()
        squares += rows.T @ rows
        products += rows.T @ added.flatten(2).transpose(1, 2).flatten(0, 1).double()
    hook.remove()
    ridge = 1e-6 * squares.diagonal().mean() * torch.eye(size)
    solution = torch.linalg.solve(squares + ridge, products).T.float()
    last.weight += solution[:, :-1].reshape(last.weight.shape)
    last.bias += solution[:, -1]


# ---- runs -----------------------------------------------------------------------------------------------------------

DEFAULTS = {  # for new weights: other ones than the package's, which are for changing a model that is good already
    "steps": 10_000, "batch_size": 64, "accumulate": 1, "warmup": 200, "save_every": 1000, "data_workers": 2,
    "lr": 1e-3, "weight_decay": 0.01, "ema_decay": 0.999, "max_grad_norm": 1.0,
}  # fmt: skip
FEW_STEPS = {"batch_size": 8, "warmup": 20, "lr": 2.5e-4, "weight_decay": 0.0, "ema_decay": 0.995}  # of the decoder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("autoencoder", "reconstruct", "new", "text", "words", "characters", "decoder", "sharpen", "pack", "whole")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(names))
    parsers = [commands.add_parser(name) for name in names]
    autoencoder, look, new, text, words, characters, decoder, sharper, packer, whole = parsers
    bodies = (
        *(train_autoencoder, reconstruct, write_new, train_text, teach_words, teach_characters, train_decoder),
        *(sharpen_decoder, pack, train_whole),
    )
    for command, body in zip(parsers, bodies, strict=True):
        command.set_defaults(body=body)
        command.add_argument("--out", required=True, help="the checkpoint to write, or the folder of a run")
        command.add_argument("--renderer", default=os.fspath(Path(__file__).with_name("render_emoji.py")))
        command.add_argument("--renderer-options", default="{}", help="arguments of its scenes(), as JSON")
        several = (
            "how many (default: 200)" if command is look else "draw this many once (default: new ones at every step)"
        )
        command.add_argument("--scenes", type=int, help=f"scenes: {several}")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--device")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for command in (autoencoder, text, decoder):
        for name, value in (DEFAULTS | (FEW_STEPS if command is decoder else {})).items():
            command.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
        command.add_argument("--minutes", type=float, help="stop after this many minutes; --resume continues")
        command.add_argument("--lr-by-time", action="store_true", help="the learning rate ends at 0 with the minutes")
        command.add_argument("--resume", action="store_true", help="continue the run in that folder")
    autoencoder.add_argument("--vae", help="begin with the autoencoder of this file (default: new weights)")
    autoencoder.add_argument("--freeze-encoder", action="store_true", help="train the decoder alone: latents stay")
    look.add_argument("--vae", required=True, help="file with the autoencoder")
    for command in (autoencoder, look):
        command.add_argument("--resolution", type=int, default=EMOJI.resolution, help="pixels per side")
    new.add_argument("--vae", required=True, help="file with the autoencoder")
    for name in ("channel_mult", "transformer_depth"):
        text_of = f"of the UNet's levels, such as 1,2,4 (default: {getattr(EMOJI.unet, name)})"
        new.add_argument(f"--{name.replace('_', '-')}", type=whole_numbers, metavar="N,N", help=text_of)
    new.add_argument("--model-channels", type=int, metavar="N", help="of the UNet's highest level")
    for command in (text, words, characters, decoder, sharper, packer):
        command.add_argument("--ckpt", required=True, help="the checkpoint")
    words.add_argument("--steps", type=int, default=2000, help="of 64 captions (default: 2000)")
    characters.add_argument("--steps", type=int, default=500, help="of 128 captions (default: 500)")
    text.add_argument("--min-timestep", type=int, default=200, help="the first: later ones read more (default: 200)")
    text.add_argument("--caption-dropout", type=float, default=0.1)
    text.add_argument("--with-unet", action="store_true", help="train the UNet too")
    text_of = "how far the saved weights are on the way from --ckpt to the learned ones: less forgets less (default: 1)"
    text.add_argument("--way", type=float, default=1.0, help=text_of)
    text.add_argument("--reworded", type=float, default=0.0, help="share of captions with other names (default: 0)")
    decoder.add_argument("--slopes", type=float, default=0.5, help="weight of the error of slopes (default: 0.5)")
    sharper.add_argument(
        "--share", type=float, default=0.3, help="of the mask: (1,2,1) in both directions (default: 0.3)"
    )
    whole.add_argument("--vae", default=os.fspath(files.bundled()), help="begin with this file's (default: bundled)")
    whole.add_argument("--minutes", type=float, default=12.0, help="of all of it (default: 12)")
    whole.add_argument("--vae-share", type=float, default=0.2, help="of the time; 0: --vae as it is (default: 0.2)")
    whole.add_argument("--steps", type=int, default=100_000, help="the most of each part")
    whole.add_argument("--batch-size", type=int, default=512, help="of the diffusion model (default: 512)")
    whole.add_argument("--data-workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    whole.add_argument("--compile-network", action="store_true", help="compile the diffusion model's networks")
    whole.set_defaults(scenes=120_000, renderer_options=DATA, resolution=EMOJI.resolution, freeze_encoder=False)
    whole.set_defaults(model_channels=None, channel_mult=None, transformer_depth=None)
    args = parser.parse_args(argv)
    kept = "the state of the last save is kept, `resume=True` continues"
    return console.run(lambda: args.body(args, options_of(args)), (args,), kept)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse "1,2,4"."""
    return tuple(int(number) for number in text.split(","))


def options_of(args: argparse.Namespace) -> TrainOptions:
    """Return the arguments as the options of the package's trainer.  Raises ValueError for values out of range."""
    names = [field.name for field in fields(TrainOptions) if field.name in args]
    return TrainOptions(**{name: getattr(args, name) for name in names})


def open_kl(path: str, device: str | None) -> AutoencoderKL:
    """Load an autoencoder to train, or to train with.  Raises ValueError unless it is a KL autoencoder."""
    vae = load_autoencoder(path, device=device, dtype="fp32")
    if not isinstance(vae, AutoencoderKL):
        raise ValueError(f"{path}: is not a KL autoencoder, the only kind that can be trained with here")
    return vae


@torch.no_grad()
def reconstruct(args: argparse.Namespace, options: TrainOptions) -> None:
    """Print the PSNR and the edge error of scenes' reconstructions, and draw the first of them beside the scenes."""
    vae, dataset = open_kl(args.vae, args.device), open_scenes(options, args.resolution)
    order, count = Order(dataset, args.seed), args.scenes or 200
    examples = [dataset.example(order[i]) for i in range(count)]
    pixels = torch.stack([example.pixels for example in examples])
    device = next(vae.parameters()).device
    means = [moments_of(vae, part, device)[0] for part in pixels.split(16)]
    x, y = to_float(pixels, torch.device("cpu")), torch.cat([vae.decode(mean).cpu() for mean in means]).clamp(-1, 1)
    psnr = -10 * ((y - x) / 2).square().mean((1, 2, 3)).log10()
    pairs = zip(x[:40], y[:40], examples, strict=False)
    cells = [(to_pil(image), example.caption) for *both, example in pairs for image in both]
    contact_sheet(cells).save(args.out)
    low, middle = (float(psnr.quantile(share)) for share in (0.1, 0.5))
    text = f"PSNR {psnr.mean():.2f} dB (median {middle:.2f}, worst tenth {low:.2f}), edge error {edge_error(y, x):.4f}"
    print(f"{text}, of {count} scenes; {args.out}")


def write_new(args: argparse.Namespace, options: TrainOptions) -> None:
    """Write a checkpoint with new weights."""
    asked = {name: getattr(args, name) for name in ("model_channels", "channel_mult", "transformer_depth")}
    unet = replace(EMOJI.unet, **{name: value for name, value in asked.items() if value is not None})
    levels = len(unet.channel_mult)
    if len(unet.transformer_depth) != levels:
        raise ValueError(f"got {levels} of `channel_mult`, {len(unet.transformer_depth)} of `transformer_depth`")
    family = replace(EMOJI, unet=replace(unet, num_res_blocks=(1,) * levels, cross_only=(False,) * levels))
    vae = open_kl(args.vae, args.device)
    model = new_model(family, vae, open_scenes(options, family.resolution), args.seed)
    write_tensors(Path(args.out), *checkpoint(model, {}))
    print(args.out)


def teach_words(args: argparse.Namespace, options: TrainOptions) -> None:
    """Write a checkpoint whose text encoder reads other words for what it knows, such as "kitten" and emoji."""
    model = load_model(LoadOptions(ckpt=args.ckpt, device="cpu", dtype="fp32"))
    copy_words(model, captions_to_reword(args, options), args.steps, args.seed)
    write_tensors(Path(args.out), *checkpoint(model, {}))
    print(args.out)


def teach_characters(args: argparse.Namespace, options: TrainOptions) -> None:
    """Write a checkpoint whose text encoder reads emoji as it reads their names."""
    model = load_model(LoadOptions(ckpt=args.ckpt, device="cpu", dtype="fp32"))
    encoder, tokenizer, captions = model.text_encoder, model.tokenizer, captions_to_reword(args, options)
    assert isinstance(encoder, CLIPTextModel)
    assert isinstance(tokenizer, FixingCLIPTokenizer)
    wide = with_characters(encoder.requires_grad_(False), tokenizer, captions, aligned, args.steps, args.seed)
    write_tensors(Path(args.out), *checkpoint(model.with_networks(text_encoder=wide), {}))
    print(args.out)


def captions_to_reword(args: argparse.Namespace, options: TrainOptions) -> list[str]:
    """Return the captions of the first scenes."""
    dataset = open_scenes(options, 16)
    order = Order(dataset, args.seed)
    return [dataset.example(order[k]).caption for k in range(args.scenes or CAPTIONS)]


def pack(args: argparse.Namespace, options: TrainOptions) -> None:
    """Write a checkpoint with the learned rows of its token table alone, and the words in its metadata."""
    model = load_model(LoadOptions(ckpt=args.ckpt, device="cpu", dtype="fp32"))
    tensors, metadata = checkpoint(model, {})
    [table] = [key for key in tensors if key.endswith("token_embedding.weight")]
    learned, tokenizer = tensors[table].any(dim=1), model.tokenizer
    assert isinstance(tokenizer, FixingCLIPTokenizer)
    tensors[table.removesuffix("weight") + "rows"] = rows = learned.nonzero()[:, 0].int()
    tensors[table] = tensors[table][rows]
    metadata["words"] = word_list(lambda words: bool(learned[tokenizer.encode(words)].all()))
    write_tensors(Path(args.out), tensors, metadata)
    print(f"{args.out}: {len(rows)} of {len(learned)} rows")


def train_autoencoder(args: argparse.Namespace, options: TrainOptions) -> None:
    """Train an autoencoder on reconstruction."""
    with run_folder(options):
        torch.manual_seed(args.seed)
        if args.vae is None:
            vae = AutoencoderKL(EMOJI.vae).to(pick_device(args.device))
            if next(vae.parameters()).device.type == "cpu":
                cpu.use(vae)
        else:
            vae = open_kl(args.vae, args.device)

        def content(ema: Mapping[str, nn.Module]) -> Content:
            weights = ema["vae"].state_dict()
            front = prefix("vae", weights)
            return {front + key: value.to("cpu", torch.float16).contiguous() for key, value in weights.items()}, {}

        fit(options, AutoencoderLoss(vae, not args.freeze_encoder), open_scenes(options, args.resolution), content)


def train_text(args: argparse.Namespace, options: TrainOptions) -> None:
    """Train the text encoder of a checkpoint, alone or with the UNet."""
    if not 0 <= args.reworded <= 1:
        raise ValueError(f"got `reworded` {args.reworded}, expected a share from 0 to 1")
    with run_folder(options):
        torch.manual_seed(args.seed)
        model = load_model(LoadOptions(ckpt=args.ckpt, device=args.device, dtype="fp32"))
        check_model(options, model)
        for network in model.networks.values():
            network.requires_grad_(False).eval()
        dataset = open_scenes(options, model.family.resolution)
        if dataset.shards is not None:
            dataset, _ = encoded(options, dataset, model.vae)
        assert model.text_encoder is not None
        networks: dict[str, nn.Module] = {"text_encoder": model.text_encoder}
        if args.with_unet:
            networks["unet"] = model.unet
        for network in networks.values():
            network.requires_grad_(True)
        before = {role: copy.deepcopy(network.state_dict()) for role, network in networks.items()}

        def content(ema: Mapping[str, nn.Module]) -> Content:
            between = {role: copy.deepcopy(network) for role, network in ema.items()}
            for role, network in between.items():
                after = network.state_dict()
                network.load_state_dict({key: old.lerp(after[key], args.way) for key, old in before[role].items()})
            return checkpoint(model, between)

        loss = DiffusionLoss(model, networks, args.caption_dropout, timesteps=(args.min_timestep, 1000))
        fit(options, RewordedLoss(loss, args.reworded), dataset, content)


def train_decoder(args: argparse.Namespace, options: TrainOptions) -> None:
    """Train the decoder of a checkpoint alone."""
    if options.batch_size < 2:
        raise ValueError("got `batch_size` 1, expected 2 or more: half of the latents are the UNet's")
    with run_folder(options):
        torch.manual_seed(args.seed)
        model = load_model(LoadOptions(ckpt=args.ckpt, device=args.device, dtype="fp32"))
        check_model(options, model)
        for network in model.networks.values():
            network.requires_grad_(False).eval()
        scenes = open_scenes(options, model.family.resolution)
        fit(options, DecoderLoss(model, args.slopes), scenes, lambda ema: checkpoint(model, ema))


def sharpen_decoder(args: argparse.Namespace, options: TrainOptions) -> None:
    """Write a checkpoint whose images are sharper by an unsharp mask."""
    model = load_model(LoadOptions(ckpt=args.ckpt, device="cpu", dtype="fp32"))
    loss, dataset = DecoderLoss(model, 0.0), open_scenes(options, model.family.resolution)
    order, size = Order(dataset, args.seed), 8

    def latents() -> Iterator[Tensor]:
        for first in range(0, args.scenes or SHARPENED, size):
            numbers = tuple(range(first, first + size))
            examples = [dataset.example(order[number]) for number in numbers]
            pixels = torch.stack([example.pixels for example in examples])
            batch = Batch(pixels, [example.caption for example in examples], None, numbers)
            yield loss.latents(batch, Draws(args.seed, numbers))

    sharpen(loss.vae, latents(), args.share)
    write_tensors(Path(args.out), *checkpoint(model, {}))
    print(args.out)


def train_whole(args: argparse.Namespace, options: TrainOptions) -> None:
    """Train all of it in args.minutes: autoencoder, new weights, latents, diffusion.  No part is resumed."""
    began, folder = time.monotonic(), Path(args.out)

    def changed(**changes: object) -> argparse.Namespace:
        return argparse.Namespace(**vars(args) | changes)

    def say(what: str) -> None:
        print(f"{what} after {time.monotonic() - began:.0f} s", flush=True)

    options = replace(options, minutes=args.vae_share * args.minutes, lr_by_time=True)
    kind = {"batch_size": min(64, args.batch_size), "lr": 1e-3, "warmup": 60, "ema_decay": 0.99, "scenes": None}
    folder.mkdir(parents=True, exist_ok=True)
    vae, start = args.vae, os.fspath(folder / "start.safetensors")
    if args.vae_share:
        train_autoencoder(args, replace(options, out=os.fspath(folder / "vae"), **kind))
        say("autoencoder")
        vae = os.fspath(folder / "vae" / "model.safetensors")
    data = json.loads(args.renderer_options)
    held_out = json.dumps(data | ({"split": "held_out"} if "split" in data else {}))
    count = min(200, args.scenes)
    reconstruct(
        changed(vae=vae, out=os.fspath(folder / "sheet.png"), scenes=count), replace(options, renderer_options=held_out)
    )
    write_new(changed(vae=vae, out=start), replace(options, scenes=None))
    say("new model")
    options = replace(
        options, out=os.fspath(folder / "run"), resolution=None, train_text=True, caption_dropout=0.1,
        lr=2e-3, warmup=300, ema_decay=0.998, save_every=4000, sample_every=4000,
    )  # fmt: skip
    load = LoadOptions(ckpt=start, device=args.device)
    with run_folder(options):
        model = load_model(replace(load, dtype="fp32", compile="off"))
        encoded(options, open_scenes(options, args.resolution), model.vae)
    del model
    say("latents")
    left = args.minutes - (time.monotonic() - began) / 60
    print(train(replace(options, minutes=max(0.0, left - 0.1)), load, TrainingBar(options.steps)))  # 6 s for the files
    say("all")


def fit(
    options: TrainOptions, loss: Loss, dataset: Dataset, content: Callable[[Mapping[str, nn.Module]], Content]
) -> None:
    """Train the networks of a loss; at each save write what `content` makes of their EMA to model.safetensors."""
    device = next(parameter for network in loss.networks.values() for parameter in network.parameters()).device
    trainer = make_trainer(options, loss, precision_of(LoadOptions(), device))
    path = trainer.folder / "model.safetensors"

    def save(step: int) -> None:
        tensors, metadata = content(trainer.ema)
        write_tensors(path, tensors, metadata | {"step": str(step)})
        plot_losses(trainer.folder)

    trainer.fit(dataset, TrainingBar(options.steps), save)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
