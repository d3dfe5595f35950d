"""Compare ldm_lite with other implementations at full size, with random weights.

    python tests/fixtures/random_checkpoint.py sd1.safetensors
    python scripts/parity.py sd1 sd1.safetensors      # every network, DDIM and PLMS runs, with diffusers; 12 GB
    python scripts/parity.py images sd1.safetensors   # img2img, inpaint, InstructPix2Pix runs, with diffusers; 9 GB
    python scripts/parity.py families sdxl_base       # Stable Diffusion 2 and XL, with diffusers' pipelines
    python scripts/parity.py if --originals .         # a DeepFloyd IF stage, with a clone of github.com/deep-floyd/IF
    python scripts/parity.py control sd15 sd21 sdxl   # ControlNets, with diffusers; sdxl needs 11 GB, and 5 of disk
    python scripts/parity.py transformers --originals .   # of FLUX.1, Z-Image and SD3 at full width, with clones
    python scripts/parity.py devices                  # all commands on a fake CUDA device

Prints relative errors |ours - theirs| / |theirs| and exits 1 if one exceeds its limit.  Needs
`pip install diffusers transformers loguru`; families also needs `pip install --no-deps open_clip_torch`.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ldm_lite.cli import threads

os.environ.update(threads.settings())  # before torch is loaded

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import ldm_lite
from ldm_lite.bench.checkpoints import random_checkpoint, random_tensor
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.cli.progress import memory
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions
from ldm_lite.conditioning.prompts import PromptOptions, encode_prompts
from ldm_lite.control.control import Control
from ldm_lite.control.loading import load_controls
from ldm_lite.core.layers import sinusoids
from ldm_lite.diffusion.guidance import Conditioning, classifier_free
from ldm_lite.diffusion.names import named_plan
from ldm_lite.families.deepfloyd import IF_I_XL, IF_II_L
from ldm_lite.formats.diffusers_names import renamed
from ldm_lite.generate import State, denoise
from ldm_lite.models.flux import FLUX_DEV
from ldm_lite.models.mmdit import SD3_MEDIUM, SD35_LARGE, SD35_MEDIUM, JointBlock
from ldm_lite.models.unet import LDMUNet
from ldm_lite.models.unet_if import IFSpec, UNetIF
from ldm_lite.models.z_image import Z_IMAGE
from ldm_lite.runtime.precision import NAMED_DTYPES
from ldm_lite.tasks.img2img import img2img
from ldm_lite.tasks.inpaint import inpaint
from ldm_lite.zoo.families import FAMILY_ROWS
from ldm_lite.zoo.family import build_network

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "fixtures"), str(TESTS / "goldens")]

PROMPT, NEGATIVE = "a photo of an astronaut riding a horse on mars", "blurry"


class Checks:
    """Compares results and remembers whether one exceeded its limit."""

    def __init__(self) -> None:
        self.failed = False
        self._start = time.perf_counter()

    def compare(self, name: str, ours: Tensor, theirs: Tensor, limit: float) -> None:
        """Print the relative error."""
        self.report(name, float((ours - theirs).norm() / theirs.norm()), limit)

    def report(self, name: str, error: float, limit: float) -> None:
        """Print an error and the seconds since the last one."""
        now = time.perf_counter()
        print(f"{name:28} {error:.2e}  (limit {limit:.0e})  {now - self._start:.0f} s", flush=True)
        self._start = now
        self.failed |= not error <= limit


# ---- Stable Diffusion 1.x -------------------------------------------------------------------------------------------


def sd1(args: argparse.Namespace, checks: Checks) -> None:
    """Text encoder, autoencoder and UNet, then whole runs, in float32."""
    sys.path.insert(0, os.fspath(Path(__file__).parents[1] / "tests" / "fixtures"))
    peers = importlib.import_module("peers")
    pipe, weights = ldm_lite.load(args.path, device="cpu", dtype="fp32"), load_file(args.path)
    print(pipe.description, flush=True)
    generator, side = torch.Generator().manual_seed(0), args.size // pipe.vae.spec.factor

    text = peers.text_encoder(pipe.family, weights)
    both = encode_prompts(pipe, [PROMPT, ""])["context"]
    context, uncond = both.chunk(2)
    checks.compare("text encoder", both, text(pipe.tokenizer([PROMPT, ""])).last_hidden_state, 1e-5)

    vae = peers.vae(pipe.family, weights)
    image = torch.rand(1, 3, args.size, args.size, generator=generator) * 2 - 1
    moments = vae.encode(image).latent_dist
    theirs = torch.cat([moments.mean, moments.std])
    checks.compare("autoencoder, encode", torch.cat(pipe.vae.encode(image)), theirs, 1e-5)
    z = torch.randn(1, 4, side, side, generator=generator)
    checks.compare("autoencoder, decode", pipe.vae.decode(z), vae.decode(z).sample, 1e-5)
    del vae, text

    unet = peers.unet(pipe.family, weights)
    x = torch.randn(2, pipe.family.unet.in_channels, side, side, generator=generator)
    both = torch.cat([uncond, context])
    for t in (981, 501, 1):
        theirs = unet(x, t, encoder_hidden_states=both).sample
        checks.compare(f"UNet at t = {t}", pipe.unet(x, torch.tensor([t, t]), both), theirs, 1e-5)

    side = args.run_size // pipe.vae.spec.factor
    first = torch.randn(1, 4, side, side, generator=generator)
    branches = classifier_free(Conditioning(context), Conditioning(uncond), 7.5)
    for name in ("ddim", "plms"):
        scheduler = peers.schedulers(pipe.family)[name]()
        theirs = peers.sample(unet, scheduler, first, context, uncond, args.steps, scale=7.5)
        ours = denoise(pipe, first, branches, named_plan(name, pipe.schedule, args.steps))
        checks.compare(f"{args.steps} steps of {name}", ours, theirs, 1e-4)


# The runs of a checkpoint by its task, with strengths at which diffusers draws noise in the same order.
IMAGE_RUNS = {
    "txt2img": {"img2img": 0.6, "inpaint": 0.9},
    "inpaint": {"inpaint": 1.0},
    "instruct": {"img2img": 1.0},
}


def images(args: argparse.Namespace, checks: Checks) -> None:
    """The last latents of runs from an image, in float32."""
    toy, goldens = importlib.import_module("toy"), importlib.import_module("make_picture_goldens")
    pipe = ldm_lite.load(args.path, device="cpu", dtype="fp32")
    print(pipe.description, flush=True)
    image, mask = toy.waves(args.size), toy.mask(args.size)
    context, uncond = toy.embeddings(pipe.family.unet.context_dim)
    for command, strength in IMAGE_RUNS[pipe.family.task].items():
        run = toy.PictureRun(pipe.family.task, command, strength, steps=args.steps)
        theirs = goldens.from_diffusers(run, pipe.family, load_file(args.path), args.size)
        latents: list[Tensor] = []
        settings: Any = {"steps": run.steps, "scale": 5.0, "strength": strength, "sampler": "ddim"}
        settings |= {"cond": context, "uncond": uncond, "init_img": Image.fromarray(image)}

        def on_step(state: State, latents: list[Tensor] = latents) -> None:
            latents.append(state.latents)

        if command == "inpaint":
            list(inpaint(pipe, InpaintOptions(**settings, mask=Image.fromarray(mask)), on_step))
        else:
            list(img2img(pipe, Img2imgOptions(**settings), on_step))
        ours = latents[-1]
        if command == "inpaint" and pipe.family.task == "txt2img":  # diffusers replaces the rest after the last step
            repainted = torch.from_numpy(mask[4::8, 4::8] > 0)
            ours, theirs = ours[:, :, repainted], theirs[:, :, repainted]
        checks.compare(f"{args.steps} steps of {command}", ours, theirs, 1e-4)


# ---- Stable Diffusion 2 and XL --------------------------------------------------------------------------------------

STEPS, SCALE = 2, 5.0
DTYPE_LIMITS = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}


def families(args: argparse.Namespace, checks: Checks) -> None:
    """Two guided steps of DDIM; the two sides run in turn, each in its own process."""
    print(f"{FAMILY_ROWS[args.family].title}, {args.dtype}, {args.size} px, torch {torch.__version__}")
    latents = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in ("ldm_lite", "diffusers"):
            out = Path(folder, f"{side}.pt")
            command = [sys.executable, __file__, "family-side", args.family, "--dtype", args.dtype]
            command += ["--size", str(args.size), "--side", side, "--out", str(out)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            report = json.loads(done.stdout.splitlines()[-1])
            took = f"load {report['load']:.0f} s, {STEPS} steps {report['steps']:.1f} s, peak {report['peak']:.2f} GiB"
            print(f"{side:10} {took}", flush=True)
            latents[side] = torch.load(out, weights_only=True)
    checks.compare("latents", latents["ldm_lite"], latents["diffusers"], DTYPE_LIMITS[args.dtype])


def family_side(args: argparse.Namespace, checks: Checks) -> None:
    """One side of `families`: write the latents and print times and memory as JSON."""
    side = args.size // 8
    noise = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(0))
    run = _our_steps if args.side == "ldm_lite" else _diffusers_steps
    load, steps, latents = run(args.family, args.dtype, noise)
    torch.save(latents.float(), args.out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"load": load, "steps": steps, "peak": peak}))


def _our_steps(name: str, dtype: str, noise: Tensor) -> tuple[float, float, Tensor]:
    """Return the seconds to load, the seconds of the steps, and the latents."""
    start = time.perf_counter()
    pipe = ldm_lite.load(random_checkpoint(name, FAMILY_ROWS[name]), device="cpu", dtype=dtype, prediction="eps")
    loaded = time.perf_counter()
    size = (noise.shape[2] * 8, noise.shape[3] * 8)
    cond, uncond = (encode_prompts(pipe, [prompt], PromptOptions(size=size)) for prompt in (PROMPT, NEGATIVE))
    latents = denoise(pipe, noise, classifier_free(cond, uncond, SCALE), named_plan("ddim", pipe.schedule, STEPS))
    return loaded - start, time.perf_counter() - loaded, latents


def _diffusers_steps(name: str, dtype: str, noise: Tensor) -> tuple[float, float, Tensor]:
    """The same by diffusers' pipeline."""
    goldens = importlib.import_module("make_family_goldens")
    start, family = time.perf_counter(), FAMILY_ROWS[name]
    checkpoint = random_checkpoint(name, family)
    weights = {key: checkpoint.read(key).to(NAMED_DTYPES[dtype]) for key in checkpoint.shapes}
    first, second = goldens.tokenizers()
    if len(family.text_encoders) == 1:
        pipe = goldens.sd2_pipeline(family, weights, second)
    else:
        pipe = goldens.sdxl_pipeline(family, weights, first, second)
    del weights
    loaded = time.perf_counter()
    latents = pipe(
        PROMPT,
        negative_prompt=NEGATIVE,
        num_inference_steps=STEPS,
        guidance_scale=SCALE,
        height=noise.shape[2] * 8,
        width=noise.shape[3] * 8,
        latents=noise.to(NAMED_DTYPES[dtype]),
        output_type="latent",
    ).images
    return loaded - start, time.perf_counter() - loaded, latents


# ---- DeepFloyd IF ---------------------------------------------------------------------------------------------------

IF_STAGES = {
    "I-M": replace(IF_I_XL, model_channels=192),
    "I-L": replace(IF_I_XL, model_channels=320),
    "I-XL": IF_I_XL,
    "II-M": replace(IF_II_L, model_channels=96),
    "II-L": IF_II_L,
}


def deepfloyd_if(args: argparse.Namespace, checks: Checks) -> None:
    """One call of a stage in float32, loaded from a file as `ldm_lite.cascade` loads it."""
    spec = IF_STAGES[args.stage]
    with on_meta():
        shapes = {key: tuple(value.shape) for key, value in UNetIF(spec).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, spec.in_channels, args.size, args.size, generator=generator)
    t, context = torch.tensor([501.0]), torch.randn(1, 77, 4096, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"IF-{args.stage}.bin"
        torch.save({key: random_tensor(key, shape) for key, shape in shapes.items()}, path)
        pipe = ldm_lite.load(path, device="cpu", dtype="fp32")
        print(f"{pipe.description}; {memory()}", flush=True)
        start, level = time.perf_counter(), torch.tensor([250.0])
        ours = pipe.unet(x, t, context, level if spec.super_resolution else None)
        print(f"one call at {args.size} px: {time.perf_counter() - start:.1f} s; {memory()}", flush=True)
        network: Any = original_if(spec, args.originals.resolve())
        network.load_state_dict(pipe.unet.state_dict(), strict=True, assign=True)
        network.eval()
        start, embeddings, forward = time.perf_counter(), {}, type(network).forward
        if spec.super_resolution:  # its own forward draws noise; the one that it calls does not
            embeddings = {"aug_emb": network.aug_proj(sinusoids(level, spec.model_channels))}
            forward = type(network).__base__.forward
        theirs = forward(network, x, t, context, **embeddings)
        print(f"the original: {time.perf_counter() - start:.1f} s")
    checks.compare(f"IF stage {args.stage}", ours, theirs, 1e-5)


def original_if(spec: IFSpec, originals: Path) -> torch.nn.Module:
    """Build the original's network of the same size, on the meta device."""
    size = 256 if spec.super_resolution else 64
    resolutions = [size >> level for level, depth in enumerate(spec.transformer_depth) if depth]
    repository = importlib.import_module("make_goldens").repository
    with repository(originals / "IF", ("deepfloyd_if", "deepfloyd_if.model")), torch.device("meta"):
        model = importlib.import_module("deepfloyd_if.model.unet")
        return (model.SuperResUNetModel if spec.super_resolution else model.UNetModel)(
            **({"low_res_diffusion": None} if spec.super_resolution else {}),
            in_channels=spec.in_channels,
            model_channels=spec.model_channels,
            out_channels=spec.out_channels,
            num_res_blocks=list(spec.num_res_blocks),
            attention_resolutions=",".join(map(str, resolutions)),
            activation="gelu",
            encoder_dim=spec.context_dim,
            att_pool_heads=spec.pool_heads,
            encoder_channels=spec.emb_channels,
            image_size=size,
            channel_mult=",".join(map(str, spec.channel_mult)),
            num_head_channels=spec.head_dim,
            use_scale_shift_norm=True,
            resblock_updown=True,
            efficient_activation=spec.super_resolution,
            scale_skip_connection=spec.super_resolution,
        )


# ---- ControlNet -----------------------------------------------------------------------------------------------------

CONTROLS = ("sd15", "sd21", "sdxl", "sdxl_mid", "sdxl_small")  # of make_diffusers_goldens


def control(args: argparse.Namespace, checks: Checks) -> None:
    """What ControlNets add to the UNet, at 128 px in float32; saved by diffusers as a folder and loaded from it."""
    toy, goldens = importlib.import_module("toy"), importlib.import_module("make_diffusers_goldens")
    for name in args.names:
        torch.manual_seed(0)
        family = FAMILY_ROWS[{"sd15": "sd1", "sd21": "sd2"}.get(name, "sdxl_base")]
        theirs = goldens.controlnet(goldens.CONTROLS[name]).eval()
        for parameter in theirs.parameters():
            if not parameter.any():  # the zero convolutions of a new one
                parameter.normal_(std=0.02)
        with on_meta():
            unet = LDMUNet(family.unet)
        cpu = torch.device("cpu")
        pipe: Any = SimpleNamespace(unet=unet, family=family, device=cpu, dtype=torch.float32, offloader=None)
        x, context, _ = toy.unet_inputs(family.unet, h=16, w=16)
        sizes, pooled = torch.tensor([[128.0, 128, 0, 0, 128, 128]] * 2), toy.normal(3, 2, 1280)
        y = torch.cat([pooled, sinusoids(sizes.flatten(), 256).view(2, -1)], dim=1)
        image = toy.picture(h=128, w=128)
        conditions = {"text_embeds": pooled, "time_ids": sizes}
        hint = image.expand(2, -1, -1, -1)
        down, middle = theirs(x, toy.T, context, hint, added_cond_kwargs=conditions, return_dict=False)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            del theirs
            [loaded] = load_controls(pipe, [Control(folder, Image.new("RGB", (128, 128)))])
            net: Any = loaded.network
            ours = net(x, toy.T, context, net.embed_hint(image), y)
        errors = [toy.relative_error(a, b.numpy()) for a, b in zip(ours, [*down, middle], strict=True)]
        checks.report(f"{name}, worst output", max(errors), 1e-5)


# ---- devices --------------------------------------------------------------------------------------------------------


# ---- FLUX.1 and Stable Diffusion 3 ----------------------------------------------------------------------------------


def filled(network: torch.nn.Module) -> torch.nn.Module:
    """A network on meta with weights that depend on its keys."""
    tensors = {key: random_tensor(key, tuple(value.shape)) for key, value in network.state_dict().items()}
    network.load_state_dict(tensors, assign=True)
    return network.eval()


def z_image(normal: Callable[..., Tensor], checks: Checks) -> None:
    """Z-Image of full width with one block of each kind, with the original: needs loguru."""
    spec = Z_IMAGE
    module = importlib.import_module("zimage.transformer")
    with on_meta():
        ours = build_network(replace(spec, depth=1, refiner_depth=1))
        theirs = module.ZImageTransformer2DModel(n_layers=1, n_refiner_layers=1)
    weights = filled(ours).state_dict()
    modules = [name for name, _ in ours.named_modules()]
    for name, (parts, _) in renamed(modules, spec.other_names).items():
        for last in [last for last in ("weight", "bias") if f"{name}.{last}" in weights]:
            value = weights.pop(f"{name}.{last}")
            for part, rows in zip(parts, value.chunk(len(parts)), strict=True):
                weights[f"{part}.{last}"] = rows
    theirs.load_state_dict(weights, assign=True)
    x, context, t = normal(2, 16, 18, 26), normal(2, 70, spec.context_dim), torch.tensor([0.3, 0.9])
    captions = [context[0], context[1, :20]]
    out = torch.stack(theirs([image_latents[:, None] for image_latents in x], t, captions)[0])[:, :, 0]
    mine = ours(x, t, context, torch.tensor([[70], [20]]))
    checks.compare(f"Z-Image, width {spec.width}", mine, out, 1e-5)


def transformers(args: argparse.Namespace, checks: Checks) -> None:
    """FLUX.1 and Z-Image of full width with a block of each kind, and blocks of SD3, with the originals, in float32."""
    sys.path[:0] = [str(args.originals.resolve() / "flux" / "src"), str(args.originals.resolve() / "sd3.5")]
    sys.path.insert(0, str(args.originals.resolve() / "Z-Image" / "src"))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    model, spec = importlib.import_module("flux.model"), replace(FLUX_DEV, depth=1, single_depth=1)
    with on_meta():
        ours = build_network(spec)
        sizes = (4 * spec.in_channels, 4 * spec.out_channels, spec.vector_dim, spec.context_dim, spec.width, 4.0)
        theirs = model.Flux(model.FluxParams(*sizes, spec.heads, 1, 1, list(spec.axes), 10000, True, True))
    filled(ours)
    theirs.load_state_dict(ours.state_dict(), assign=True)
    side = args.size // 8
    x, t, context, y, scale = normal(1, 16, side, side), torch.tensor([0.7]), normal(1, 128, 4096), normal(1, 768), 3.5
    tokens = torch.nn.functional.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2)
    rows, columns = torch.meshgrid(torch.arange(side // 2), torch.arange(side // 2), indexing="ij")
    ids = torch.stack([0 * rows, rows, columns], dim=-1).view(1, -1, 3).float()
    guidance = torch.tensor([scale])
    out = theirs(tokens, ids, context, torch.zeros(1, 128, 3), t, y, guidance)
    mine = torch.nn.functional.pixel_unshuffle(ours(x, t, context, y, guidance=guidance), 2).flatten(2).transpose(1, 2)
    checks.compare("FLUX.1, width 3072", mine, out, 1e-5)
    del ours, theirs

    z_image(normal, checks)
    mmditx = importlib.import_module("mmditx")
    released = {"SD3 medium": SD3_MEDIUM, "SD3.5 medium": SD35_MEDIUM, "SD3.5 large": SD35_LARGE}
    for name, sd3 in released.items():
        with on_meta():
            block = JointBlock(sd3, 0)
            options = {"qk_norm": "rms" if sd3.qk_norm else None, "x_block_self_attn": sd3.dual_depth > 0}
            original = mmditx.JointBlock(sd3.width, sd3.heads, mlp_ratio=4.0, qkv_bias=True, pre_only=False, **options)
        filled(block)
        original.load_state_dict(block.state_dict(), assign=True)
        text, image, c = normal(1, 154, sd3.width), normal(1, tokens.shape[1], sd3.width), normal(1, sd3.width)
        both = block(text, image, torch.nn.functional.silu(c)), original(text, image, c=c)
        for what, mine, out in zip(("text", "image"), *both, strict=True):
            checks.compare(f"{name}, width {sd3.width}, {what}", mine, out, 1e-5)


def devices(args: argparse.Namespace, checks: Checks) -> None:
    """Run every family's commands with fake tensors: an operator on tensors of two devices fails."""
    checks.failed |= importlib.import_module("fake_cuda").run_commands(args.names or FAMILY_ROWS) > 0


# ---- the command line -----------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Parse the command line; `compare` is the function of the chosen comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")

    def add(name: str, compare: Any, size: int | None = None) -> argparse.ArgumentParser:
        command = commands.add_parser(name, description=compare.__doc__, help=compare.__doc__)
        command.set_defaults(compare=compare)
        if size is not None:
            command.add_argument("--size", type=int, default=size, help="pixels a side")
        return command

    command = add("sd1", sd1, size=512)
    command.add_argument("path", type=Path, help="a .safetensors checkpoint of Stable Diffusion 1.x")
    command.add_argument("--run-size", type=int, default=256, help="pixels a side of the runs")
    command.add_argument("--steps", type=int, default=50)
    command = add("images", images, size=256)
    command.add_argument("path", type=Path, help="a .safetensors checkpoint of Stable Diffusion 1.x")
    command.add_argument("--steps", type=int, default=10)
    for name, compare in (("families", families), ("family-side", family_side)):
        command = add(name, compare, size=256)
        command.add_argument("family", choices=["sd2", "sdxl_base"])
        command.add_argument("--dtype", choices=DTYPE_LIMITS, default="fp32")
    command.add_argument("--side")
    command.add_argument("--out", type=Path)
    command = add("if", deepfloyd_if, size=64)
    command.add_argument("--originals", type=Path, required=True, help="the folder of the cloned repository")
    command.add_argument("--stage", choices=IF_STAGES, default="I-L")
    add("control", control).add_argument("names", nargs="+", choices=CONTROLS)
    command = add("transformers", transformers, size=256)
    command.add_argument("--originals", type=Path, required=True, help="the folder of the cloned repositories")
    add("devices", devices).add_argument("names", nargs="*", metavar="FAMILY", help="default: all")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    """Run the comparison and return the exit status."""
    args, checks = parse(), Checks()
    versions = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    print(", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "transformers") if name in versions))
    args.compare(args, checks)
    return int(checks.failed)


if __name__ == "__main__":
    sys.exit(main())
