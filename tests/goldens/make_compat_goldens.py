"""Make tests/data/compat.npz: the images that the original scripts save, on a CPU, for `compat`.

    pip install diffusers transformers einops omegaconf ftfy torchvision && pip install --no-deps open_clip_torch
    git clone https://github.com/CompVis/stable-diffusion
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_compat_goldens.py --originals .

scripts/txt2img.py and scripts/img2img.py run as they are; nothing of them is copied.  Their networks are replaced by
diffusers' and transformers', with the weights of random_checkpoint.py (the main ones of a file with an EMA copy).  Left
out are the watermark and the safety checker.
"""

import contextlib
import importlib
import importlib.util
import runpy
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import diffusers
import numpy as np
import peers
import torch
import toy
from making import DATA, Arrays, folder_of_originals, made_with, write
from PIL import Image
from random_checkpoint import state_dict
from torch import Tensor


def alone(package: str, file: str) -> ModuleType:
    """A module of an installed package, without the package's __init__."""
    package_spec = importlib.util.find_spec(package)
    assert package_spec is not None
    assert package_spec.submodule_search_locations is not None
    spec = importlib.util.spec_from_file_location(
        f"{package}_{file}", f"{package_spec.submodule_search_locations[0]}/{file}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """What the scripts use of LatentDiffusion."""

    def __init__(self) -> None:
        self.family = family = toy.SMALL
        weights = dict(state_dict(family, seed=1))  # of --ema: the main UNet is that of another seed
        copy = dict(state_dict(family))
        weights = {
            key: value if key.startswith("model.diffusion_model.") else copy[key] for key, value in weights.items()
        }
        self.unet, self.vae = peers.unet(family, weights), peers.vae(family, weights)
        self.text, self.tokenizer = (
            peers.text_encoder(family, weights),
            alone("open_clip", "tokenizer").SimpleTokenizer(),
        )
        self.parameterization = family.prediction
        self.num_timesteps, self.device = 1000, torch.device("cpu")
        self.betas, self.alphas_cumprod = weights["betas"], weights["alphas_cumprod"]
        self.alphas_cumprod_prev = torch.cat([torch.ones(1), self.alphas_cumprod[:-1]])
        self.ema_scope = contextlib.nullcontext  # use_ema is False

    def to(self, device: torch.device) -> "Model":
        """Stay on the CPU."""
        return self

    def get_learned_conditioning(self, prompts: list[str]) -> Tensor:
        """The text encoder's last states."""
        rows = [[49406, *self.tokenizer.encode(prompt)[:75], 49407] for prompt in prompts]
        ids = torch.tensor([row + [49407] * (77 - len(row)) for row in rows])
        return self.text(ids).last_hidden_state

    def apply_model(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """The UNet's prediction."""
        return self.unet(x, t, encoder_hidden_states=context).sample

    def encode_first_stage(self, pixels: Tensor) -> SimpleNamespace:
        """The autoencoder's distribution."""
        return self.vae.encode(pixels).latent_dist

    def get_first_stage_encoding(self, distribution: SimpleNamespace) -> Tensor:
        """A sample of it; contiguous, since randn_like fills latents in the order of their memory."""
        return self.family.scale_factor * distribution.sample().contiguous()

    def decode_first_stage(self, z: Tensor) -> Tensor:
        """The decoded image."""
        return self.vae.decode(1 / self.family.scale_factor * z).sample


def stubs() -> dict[str, ModuleType]:
    """Modules that the scripts import, and what they use of them."""
    modules = {
        name: ModuleType(name) for name in ("cv2", "imwatermark", "pytorch_lightning", "torchvision", "omegaconf")
    }
    modules["imwatermark"].WatermarkEncoder = mock.MagicMock  # type: ignore[attr-defined]
    modules["pytorch_lightning"].seed_everything = torch.manual_seed  # type: ignore[attr-defined]
    modules["omegaconf"].OmegaConf = mock.MagicMock()  # type: ignore[attr-defined]
    modules["torchvision.utils"] = alone("torchvision", "utils")
    checker = "diffusers.pipelines.stable_diffusion.safety_checker"
    for name, item in ((checker, "StableDiffusionSafetyChecker"), ("transformers", "AutoFeatureExtractor")):
        modules[name] = ModuleType(name)
        setattr(modules[name], item, mock.MagicMock())
    return modules


def run(originals: Path, name: str, folder: Path, model: Model) -> dict[str, np.ndarray]:
    """The files that a run of toy.COMPAT_RUNS saves, by their paths, as pixels."""
    command, flags = toy.COMPAT_RUNS[name]
    root, out, image = originals / "stable-diffusion", folder / name, folder / "image.png"
    Image.fromarray(toy.waves(40)[:32]).save(image)
    arguments = ["--prompt", toy.COMPAT_PROMPT, "--outdir", str(out), "--precision", "full", *flags.split()]
    arguments += ["--init-img", str(image)] if command == "img2img" else ["--H", "32", "--W", "32"]
    with mock.patch.dict(sys.modules, stubs()), mock.patch.object(sys, "path", [str(root), *sys.path]):
        for sampler in ("ddim", "plms", "dpm_solver.sampler"):
            module = importlib.import_module(f"ldm.models.diffusion.{sampler}")
            kind = next(member for key, member in vars(module).items() if key.endswith("Sampler"))
            kind.register_buffer = lambda self, key, value: setattr(self, key, value)  # the original moves all to CUDA
        main = runpy.run_path(str(root / "scripts" / f"{command}.py"))["main"]
        main.__globals__["load_model_from_config"] = lambda config, path: model
        main.__globals__["put_watermark"] = lambda image, encoder: image
        main.__globals__["check_safety"] = lambda images: (images, [])
        with mock.patch.object(sys, "argv", [command, *arguments]):
            main()
    return {path.relative_to(out).as_posix(): np.asarray(Image.open(path)) for path in sorted(out.rglob("*.png"))}


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    about = made_with((torch, np, diffusers), originals, ["stable-diffusion"])
    arrays: Arrays = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model = Model()
        for name in toy.COMPAT_RUNS:
            for path, pixels in run(originals, name, Path(folder), model).items():
                arrays[f"{name}/{path}"] = torch.from_numpy(pixels.copy())
    write(DATA / "compat.npz", arrays, torch.uint8, about)


if __name__ == "__main__":
    main()
