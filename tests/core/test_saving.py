"""What is saved is loaded as the same model, bit for bit, or it is refused before anything is written."""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from random_sd1 import CLIP, UNET, VAE, fill
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from ldm_lite.core import Pipeline, load
from ldm_lite.core.clip import CLIPTextEncoder
from ldm_lite.core.denoise import run_row
from ldm_lite.core.layers import attention_layers, explicit, shared_copy
from ldm_lite.core.networks import KINDS
from ldm_lite.core.schedule import Schedule
from ldm_lite.core.tokenizer import CLIPTokenizer
from ldm_lite.core.unet import Attention, UNet
from ldm_lite.core.vae import AutoencoderKL

ATTENTION = "input_blocks.1.1.transformer_blocks.0.attn1"


def outputs(pipe: Pipeline) -> list[Tensor]:
    """What a pipeline computes: latents of its default sampler, pixels, latents of an image."""
    size: dict[str, Any] = {"width": 32, "height": 32}
    image = Image.fromarray(np.random.Generator(np.random.PCG64(0)).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    with torch.compiler.set_stance("force_eager"):
        *_, state = pipe.stream("a cat", steps=3, seed=7, **size)
    return [state.latents, *pipe.decode_pixels(state.latents), pipe.encode(image)]


def changed_unet(change: Callable[[UNet], Any], whole: bool = False) -> Callable[[Pipeline], Pipeline]:
    """What changes a copy of the UNet: in place, or it returns another network. `whole`: weights are copied too."""

    def changed(pipe: Pipeline) -> Pipeline:
        unet = copy.deepcopy(pipe.unet) if whole else shared_copy(pipe.unet)
        result = change(unet)
        return pipe.with_networks(unet=result if isinstance(result, nn.Module) else unet)

    return changed


def module(network: nn.Module, name: str) -> Any:
    return network.get_submodule(name)


# ---- saved ----------------------------------------------------------------------------------------------------------


def tied(unet: UNet) -> None:
    attention = module(unet, ATTENTION)
    attention.to_k = attention.to_q


def expanded(unet: UNet) -> None:
    norm = module(unet, "input_blocks.1.1.transformer_blocks.0.norm1")
    norm.bias = nn.Parameter(torch.full((1,), 0.3).expand(32), requires_grad=False)


def compiled_inside(unet: UNet) -> None:
    unet.middle_block = torch.compile(unet.middle_block, backend="eager")  # type: ignore[assignment]


def smaller_vae(pipe: Pipeline) -> Pipeline:
    spec = replace(VAE, channel_mult=(1, 2), mid_attn=False)
    return pipe.with_networks(vae=fill(AutoencoderKL(spec)))


def shorter_prompts(pipe: Pipeline) -> Pipeline:
    clip = fill(CLIPTextEncoder(replace(CLIP, length=20, heads=8)))
    return replace(pipe.with_networks(clip=clip), family=replace(pipe.family, tokenizer=CLIPTokenizer(20)))


def settings(**values: Any) -> Callable[[Pipeline], Pipeline]:
    return lambda pipe: replace(pipe, family=replace(pipe.family, **values))


def schedule(change: Callable[[np.ndarray], Any], prediction: Any = "eps") -> Callable[[Pipeline], Pipeline]:
    return lambda pipe: replace(pipe, schedule=Schedule(change(pipe.schedule.alpha_bar), prediction))


class Doubled(UNet):
    """A network of one's own, with the keys of the original."""

    def forward(self, *arguments: Any, **more: Any) -> Tensor:
        return 2 * super().forward(*arguments, **more)


SAVED: dict[str, Callable[[Pipeline], Pipeline]] = {
    "as it is": lambda pipe: pipe,
    "other heads": lambda pipe: pipe.with_networks(unet=fill(UNet(replace(UNET, heads=2)))),
    "another width": lambda pipe: pipe.with_networks(unet=fill(UNet(replace(UNET, model_channels=64)))),
    "other levels": lambda pipe: pipe.with_networks(
        unet=fill(UNet(replace(UNET, channel_mult=(1, 2, 2), num_res_blocks=(2, 1, 1), transformer_depth=(0, 2, 1))))
    ),
    "another autoencoder": smaller_vae,
    "another text encoder": shorter_prompts,
    "compiled": changed_unet(lambda unet: torch.compile(unet, backend="eager")),
    "compiled in place": changed_unet(lambda unet: unet.compile(backend="eager")),
    "compiled inside": changed_unet(compiled_inside),
    "on several devices": changed_unet(lambda unet: nn.DataParallel(unet)),
    "averaged": changed_unet(lambda unet: AveragedModel(unet, use_buffers=True), whole=True),
    "compiled and averaged": changed_unet(lambda unet: torch.compile(AveragedModel(unet), backend="eager"), whole=True),
    "merged": changed_unet(lambda unet: module(unet, ATTENTION).to_q.weight.data.mul_(1.5), whole=True),
    "tied weights": changed_unet(tied),
    "expanded weights": changed_unet(expanded),
    "trained": changed_unet(lambda unet: unet.requires_grad_(True).train()),
    "another schedule": schedule(lambda alpha_bar: alpha_bar**1.5),
    "nearly the family's schedule": schedule(lambda alpha_bar: alpha_bar * (1 - 1e-5)),
    "half of the schedule": schedule(lambda alpha_bar: alpha_bar[::2]),
    "zero terminal SNR": schedule(lambda alpha_bar: np.append(alpha_bar[:-1], 0), "v"),
    "v prediction": schedule(lambda alpha_bar: alpha_bar, "v"),
    "another sampler": settings(sampler="dpmpp_2m_karras"),
    "other defaults": settings(steps=3, scale=1.5, resolution=128, title='a title with "quotes"'),
    "another scale factor": settings(scale_factor=1 / 3),
}


@pytest.fixture
def networks() -> Iterator[None]:
    with mock.patch.dict(KINDS):
        yield


def saved_and_loaded(pipe: Pipeline, folder: Path, dtype: Any = None) -> Pipeline:
    pipe.save(folder / "saved.safetensors")
    assert os.listdir(folder) == ["saved.safetensors"]
    return load(folder / "saved.safetensors", device="cpu", dtype=dtype)


@pytest.mark.parametrize("change", SAVED)
def test_what_is_saved_is_loaded_bit_for_bit(change: str, small: Pipeline, tmp_path: Path) -> None:
    pipe = SAVED[change](small)
    loaded = saved_and_loaded(pipe, tmp_path)
    for ours, again in zip(outputs(pipe), outputs(loaded), strict=True):
        assert torch.equal(ours, again)
    assert np.array_equal(loaded.schedule.alpha_bar, pipe.schedule.alpha_bar)
    names = ("title", "tokenizer", "scale_factor", "sampler", "resolution", "steps", "scale")
    assert [getattr(loaded.family, name) for name in names] == [getattr(pipe.family, name) for name in names]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_are_saved_in_their_dtype(dtype: torch.dtype, small_path: Path, tmp_path: Path) -> None:
    pipe = load(small_path, device="cpu", dtype=dtype)
    if dtype == torch.float64:
        pipe.unet.out[0].bias.data += 1e-12
    loaded = saved_and_loaded(pipe, tmp_path, dtype)
    assert all(torch.equal(ours, again) for ours, again in zip(outputs(pipe), outputs(loaded), strict=True))
    assert torch.equal(loaded.unet.out[0].bias, pipe.unet.out[0].bias)


def test_a_compiled_step_is_not_part_of_the_file(small: Pipeline, tmp_path: Path) -> None:
    loaded = saved_and_loaded(replace(small, run_row=torch.compile(run_row)), tmp_path)
    assert loaded.run_row is run_row
    assert torch.equal(outputs(loaded)[0], outputs(small)[0])


def test_a_class_of_ones_own_is_saved_once_the_reader_knows_it(small: Pipeline, tmp_path: Path, networks: None) -> None:
    pipe = small.with_networks(unet=fill(Doubled(UNET)))
    with pytest.raises(ValueError, match="the network is a Doubled, where load\\(\\) would make a UNet"):
        pipe.save(tmp_path / "saved.safetensors")
    KINDS["unet"] = KINDS["unet"]._replace(network=Doubled)
    assert torch.equal(outputs(saved_and_loaded(pipe, tmp_path))[0], outputs(pipe)[0])


# ---- refused --------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **more: Any) -> Any:
        return self.inner(*arguments, **more)


class LoRALinear(Wrapper):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class SharperAttention(Attention):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return super().forward(2 * x, context)


class Shifted(Schedule):
    def at(self, t: int) -> Any:
        return super().at(max(0, t - 1))


def put(name: str, make: Callable[[Any], nn.Module]) -> Callable[[UNet], None]:
    """Put another module in the place of one."""

    def change(unet: UNet) -> None:
        parent, _, key = name.rpartition(".")
        setattr(module(unet, parent), key, make(module(unet, name)))

    return change


def set_attribute(name: str, key: str, value: Any) -> Callable[[UNet], None]:
    return lambda unet: setattr(module(unet, name), key, value)


def without_text(pipe: Pipeline) -> Pipeline:
    return pipe.with_networks(unet=fill(UNet(replace(UNET, transformer_depth=(0, 0), middle_depth=0))))


def other_gelu(pipe: Pipeline) -> Pipeline:
    clip = shared_copy(pipe.networks["clip"])
    clip.encoder.layers[1].mlp.activation = nn.GELU()
    return pipe.with_networks(clip=clip)


def weight_norm(unet: UNet) -> None:
    parametrizations.weight_norm(module(unet, ATTENTION).to_q)


def pruned(unet: UNet) -> None:
    prune.l1_unstructured(module(unet, ATTENTION).to_q, "weight", 0.5)


def longer(unet: UNet) -> None:
    unet.middle_block.append(nn.Identity())


NORM = "out.0"
REFUSED: dict[str, tuple[Callable[[Pipeline], Pipeline], str]] = {
    "an attention by name": (lambda pipe: pipe.with_attention("explicit"), "attn1 has attention of its own"),
    "an attention": (lambda pipe: pipe.with_attention(lambda q, k, v: explicit(q, k, v), "*attn2"), "attn2 has attent"),
    "LoRA by hand": (
        changed_unet(put(f"{ATTENTION}.to_q", LoRALinear)),
        r"input_blocks.1.1.*attn1.to_q is a LoRALinear, where load\(\) would make a Linear; .*merge",
    ),
    "a wrapper": (changed_unet(Wrapper), "cannot save the unet, a Wrapper: a file holds the weights of plain networks"),
    "a subclass": (lambda pipe: pipe.with_networks(unet=fill(Doubled(UNET))), "the network is a Doubled"),
    "a layer of a subclass": (
        changed_unet(put(ATTENTION, lambda layer: SharperAttention(32, 32, 4))),
        "attn1 is a SharperAttention, where load",
    ),
    "another activation": (changed_unet(put("out.1", lambda layer: nn.ReLU())), "out.1 is a ReLU, where load"),
    "another activation of the text": (other_gelu, r"cannot save the clip: encoder.layers.1.mlp.activation is a GELU"),
    "a hook": (
        changed_unet(lambda unet: unet.middle_block.register_forward_hook(lambda block, args, out: 2 * out)),
        "middle_block has forward hooks of its own",
    ),
    "a hook before": (
        changed_unet(lambda unet: unet.register_forward_pre_hook(lambda block, args: None)),
        "the network has forward pre hooks of its own",
    ),
    "a method": (changed_unet(lambda unet: setattr(unet, "embed", lambda t: torch.zeros(1))), "has embed of its own"),
    "forward itself": (changed_unet(set_attribute(NORM, "forward", lambda x: x)), "out.0 has forward of its own"),
    "another eps": (changed_unet(set_attribute(NORM, "eps", 1e-3)), "out.0 has eps of its own"),
    "seamless": (
        changed_unet(set_attribute("input_blocks.0.0", "padding_mode", "circular")),
        "input_blocks.0.0 has padding mode of its own",
    ),
    "heads of a layer": (changed_unet(set_attribute(ATTENTION, "num_heads", 2)), "attn1 has num heads of its own"),
    "another parameter": (
        changed_unet(lambda unet: unet.register_parameter("gain", nn.Parameter(torch.ones(1)))),
        r"the network has tensors \{'gain': \(1,\)\}, where load",
    ),
    "a parametrization": (changed_unet(weight_norm), "attn1.to_q is a ParametrizedLinear"),
    "pruned": (
        changed_unet(pruned, whole=True),
        "attn1.to_q has tensors",
    ),
    "a block less": (
        changed_unet(lambda unet: unet.output_blocks[1].__delitem__(-1)),  # type: ignore[operator]
        r"load\(\) would add output_blocks.1.1",
    ),
    "a block more": (
        changed_unet(longer),
        r"load\(\) would leave out middle_block.3, a Identity",
    ),
    "no text": (without_text, "could not be loaded again: this UNet reads no text"),
    "a further network": (
        lambda pipe: pipe.with_networks(control=nn.Linear(1, 1)),
        "cannot save the network 'control': add its kind to networks.KINDS",
    ),
    "a network less": (
        lambda pipe: replace(pipe, networks={kind: pipe.networks[kind] for kind in ("unet", "clip")}),
        "could not be loaded again: unknown model, with unet and clip",
    ),
    "a schedule of a subclass": (
        lambda pipe: replace(pipe, schedule=Shifted(pipe.schedule.alpha_bar, "eps")),
        "cannot save a schedule of the class Shifted",
    ),
    "a condition": (settings(condition=lambda model, prompts: {}), "cannot save the family's condition, <function"),
    "another padding": (settings(tokenizer=CLIPTokenizer(pad=0)), r"cannot save the family's tokenizer, CLIPTokenizer"),
    "no sampler": (settings(sampler=None), "cannot save the family's sampler, None"),
    "a step": (
        lambda pipe: replace(pipe, run_row=lambda *arguments: run_row(*arguments)),
        "cannot save a model with a `run_row` of your own",
    ),
    "no values": (
        lambda pipe: pipe.with_networks(unet=copy.deepcopy(pipe.unet).to("meta")),
        "input_blocks.0.0.weight is on the meta device|time_embed.0.weight is on the meta device",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_a_file_cannot_hold_is_refused(change: str, small: Pipeline, tmp_path: Path) -> None:
    changed, message = REFUSED[change]
    (tmp_path / "saved").write_text("before")
    with pytest.raises(ValueError, match=message) as raised:
        changed(small).save(tmp_path / "saved")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500
    assert os.listdir(tmp_path) == ["saved"]
    assert (tmp_path / "saved").read_text() == "before"


def test_a_change_that_is_undone_can_be_saved(small: Pipeline, tmp_path: Path) -> None:
    hooked = shared_copy(small.unet)
    hook = hooked.register_forward_hook(lambda network, arguments, out: 2 * out)
    hook.remove()
    saved_and_loaded(small.with_networks(unet=hooked), tmp_path)
    saved_and_loaded(small.with_attention("explicit").with_attention("sdpa"), tmp_path)


def test_a_file_that_cannot_be_read_again_takes_no_one_s_place(small: Pipeline, tmp_path: Path) -> None:
    """What was written is read by the reader's rules before it gets its name."""
    (tmp_path / "saved").write_text("before")
    with mock.patch("ldm_lite.core.saving.save_file") as save_file:
        save_file.side_effect = lambda tensors, path, metadata: Path(path).write_bytes(b"half")
        with pytest.raises(ValueError, match="is not a checkpoint"):
            small.save(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert (tmp_path / "saved").read_text() == "before"


def test_a_folder_that_is_missing_is_said_before_the_work(small: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        small.save(tmp_path / "none" / "saved")


def test_shared_copies_are_saved_with_their_attention_layers(small: Pipeline, tmp_path: Path) -> None:
    loaded = saved_and_loaded(small.with_networks(unet=shared_copy(small.unet)), tmp_path)
    assert attention_layers(loaded.unet).keys() == attention_layers(small.unet).keys()
