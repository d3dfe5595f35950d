"""Read checkpoint files safely, tensor by tensor, without running any code in them.

open_checkpoint() tells safetensors, torch zip files and legacy torch pickles apart by their first bytes.  torch_file.py
reads the files that torch has written.
"""

import contextlib
import io
import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ldm_lite.checkpoint import vision_keys
from ldm_lite.checkpoint.diffusers_keys import StoredTensor, original_layout, taesd_keys
from ldm_lite.checkpoint.gguf import MAGIC, open_gguf
from ldm_lite.checkpoint.scaled import is_scaled, unscaled
from ldm_lite.checkpoint.torch_file import open_torch
from ldm_lite.cli.files import open_file
from ldm_lite.core.layers import Shapes
from ldm_lite.models.rrdb import original_keys
from ldm_lite.runtime.blocks import BlockLinear, Blocks
from ldm_lite.runtime.memory import MappedPages
from ldm_lite.zoo.foreign import foreign
from ldm_lite.zoo.transformers import TRANSFORMERS

log = logging.getLogger("ldm_lite")


def _no_blocks(key: str) -> Blocks | None:
    return None


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: the shapes of its tensors by key, its metadata, and functions that read one tensor."""

    path: Path
    shapes: Shapes
    metadata: Mapping[str, str]
    read: Callable[[str], Tensor]  # key -> tensor on the CPU
    blocks: Callable[[str], Blocks | None] = _no_blocks  # key -> a GGUF file's tensor as it is stored, if in blocks


# ---- opening --------------------------------------------------------------------------------------------------------


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .safetensors or torch file, whatever its extension.

    Raises ValueError, one line, for a file that is not a checkpoint, is damaged, or would run code.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, wanted a .safetensors or .ckpt file in the original layout")
    with open_file(path) as file:
        head, size = file.read(64), file.seek(0, io.SEEK_END)
    if size == 0:
        raise ValueError(f"{path}: is empty, wanted a checkpoint: download it again")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: is a Git LFS pointer, not the weights themselves: run `git lfs pull`")
    if len(head) > 8 and head[8:9] == b"{":
        return _checked(Checkpoint(path, *_open_safetensors(path, size, header=int.from_bytes(head[:8], "little"))))
    if head.startswith(b"PK\x03\x04") or head[:1] == b"\x80":
        shapes, read = open_torch(path)
        return _checked(Checkpoint(path, shapes, {}, read))
    if head.startswith(MAGIC):
        return _checked(Checkpoint(path, *open_gguf(path)))
    raise ValueError(f"{path}: is not a checkpoint (starts with {head[:8]!r}), wanted .safetensors, .ckpt or .gguf")


MOST_TENSORS = 65536  # Stable Diffusion XL with an EMA copy has 5,000
MOST_HEADER = 64 * 2**20  # bytes; most of a large one is metadata
LONGEST_KEY = 512
NO_INDEX = re.compile(r"(?:^|\.)\d{5,}\.")  # blocks are built by their numbers


def _open_safetensors(path: Path, size: int, header: int) -> tuple[Shapes, Mapping[str, str], Callable[[str], Tensor]]:
    """Return the shapes of a file's tensors by key, its metadata, and a function that reads one tensor.

    `header` is what the file says to be the length of its header.  Raises ValueError, one line.
    """
    if 8 + header > size:
        raise ValueError(f"{path}: is truncated: {size} bytes, but its header alone takes {8 + header}")
    if header > MOST_HEADER:
        raise ValueError(f"{path}: has a header of {header} bytes, wanted at most {MOST_HEADER}")
    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        with open(path, "rb") as raw:
            ends = re.findall(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,18})\b', raw.read(8 + header))
        wanted = 8 + header + max(map(int, ends), default=0)
        if size < wanted:
            raise ValueError(f"{path}: is truncated: {size} of {wanted} bytes: download it again") from error
        raise ValueError(f"{path}: is a damaged safetensors file ({error}): download it again") from error
    keys = file.keys()
    if len(keys) > MOST_TENSORS:
        raise ValueError(f"{path}: holds {len(keys)} tensors, wanted at most {MOST_TENSORS}")
    shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    return shapes, file.metadata() or {}, file.get_tensor


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint.  Raises ValueError for more tensors, longer keys or higher numbers than networks have."""
    keys = checkpoint.shapes.keys()
    if not keys:
        raise ValueError(f"{checkpoint.path}: holds no tensors, wanted a checkpoint")
    if len(keys) > MOST_TENSORS:
        raise ValueError(f"{checkpoint.path}: holds {len(keys)} tensors, wanted at most {MOST_TENSORS}")
    odd = (key for key in keys if len(key) > LONGEST_KEY or NO_INDEX.search(key))
    if (key := next(odd, None)) is not None:
        raise ValueError(f"{checkpoint.path}: has the key {key[:60]!r}, which is too long or has too high a number")
    if not is_scaled(keys):
        return checkpoint
    with errors_of(checkpoint.path):
        kept, read = unscaled(checkpoint.shapes, checkpoint.metadata, checkpoint.read)
    return replace(checkpoint, shapes=kept, read=read)


def combine(path: Path, tensors: Mapping[str, tuple[Checkpoint, str]], metadata: Mapping[str, str]) -> Checkpoint:
    """Return one checkpoint of tensors from several.  `tensors` maps each key to a checkpoint and its key there."""
    shapes = {key: checkpoint.shapes[stored] for key, (checkpoint, stored) in tensors.items()}
    return Checkpoint(path, shapes, metadata, partial(_read_from, tensors), partial(_blocks_from, tensors))


def _read_from(tensors: Mapping[str, tuple[Checkpoint, str]], key: str) -> Tensor:
    checkpoint, stored = tensors[key]
    return checkpoint.read(stored)


def _blocks_from(tensors: Mapping[str, tuple[Checkpoint, str]], key: str) -> Blocks | None:
    checkpoint, stored = tensors[key]
    return checkpoint.blocks(stored)


def join(parts: Sequence[Checkpoint]) -> Checkpoint:
    """Return one checkpoint of the files (shards) that hold one network together."""
    return combine(parts[0].path, {key: (part, key) for part in parts for key in part.shapes}, parts[0].metadata)


def to_original_layout(checkpoint: Checkpoint) -> Checkpoint:
    """Convert a file of one network in the format of diffusers to the original layout; return any other file as is."""
    act = checkpoint.metadata.get("hidden_act")  # from transformers' config.json: OpenCLIP's is gelu
    told = checkpoint.metadata.get("open_clip", None if act is None else str(act == "gelu"))
    with errors_of(checkpoint.path):
        tensors = original_layout(checkpoint.shapes, open_clip=None if told is None else told == "True")
    if tensors is None:
        return checkpoint
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    read = partial(_read_stored, checkpoint, tensors, MappedPages())
    return Checkpoint(checkpoint.path, shapes, checkpoint.metadata, read)


def _read_stored(checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], pages: MappedPages, key: str) -> Tensor:
    return tensors[key].read(partial(read_weight, checkpoint), pages)


# ---- splitting ------------------------------------------------------------------------------------------------------

SGM = "conditioner.embedders."  # prefix of text encoders in files of generative-models: SDXL, SD-Turbo
CLIP_G = "text_encoders.clip_g.transformer."  # of bigG's in files of Stable Diffusion 3, with transformers' names
T5 = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
QWEN3 = "layers.0.self_attn.q_norm.weight"
# A component's role, a key that it always has, and its possible prefixes.  The first match wins.
COMPONENTS = (
    ("control", "input_hint_block.0.weight", ("control_model.", "")),
    ("adapter", "body.0.block1.weight", ("adapter.", "")),
    ("adapter", "body.0.body.0.block1.weight", ("adapter.", "")),
    ("style", "style_embedding", ("adapter.", "")),
    ("ip_adapter", "ip_adapter.1.to_k_ip.weight", ("",)),
    ("redux", "redux_up.weight", ("",)),
    ("upscaler", "body.0.rdb1.conv1.weight", ("",)),
    ("vision", "embeddings.patch_embedding.weight", ("vision_model.", "")),
    ("unet", "input_blocks.0.0.weight", ("model.diffusion_model.", "")),
    *(("unet", key, ("model.diffusion_model.", "diffusion_model.", "")) for key in TRANSFORMERS),
    ("vae", "decoder.conv_in.weight", ("first_stage_model.", "vae.", "")),
    ("vae", "decoder.1.weight", ("",)),  # TAESD
    ("vae", "encoder.0.weight", ("",)),
    ("text_encoder", T5, ("",)),
    ("text_encoder", QWEN3, ("text_encoders.qwen3_4b.transformer.model.", "model.", "")),
    ("text_encoder_3", T5, ("text_encoders.t5xxl.transformer.",)),  # a family with fewer encoders gives it its place
    (
        "text_encoder",
        "embeddings.token_embedding.weight",
        (
            "cond_stage_model.transformer.text_model.",
            "cond_stage_model.transformer.",
            f"{SGM}0.transformer.text_model.",
            "text_encoders.clip_l.transformer.text_model.",
            "text_model.",
            "",
        ),
    ),
    ("text_encoder", "ln_final.weight", ("cond_stage_model.model.", f"{SGM}0.model.", "")),
    ("text_encoder", "token_emb.weight", ("cond_stage_model.transformer.", "")),  # BERT
    ("text_encoder", "embedding.weight", ("cond_stage_model.", "")),  # classes
    ("text_encoder", "channel_mapper.weight", ("cond_stage_model.", "")),  # label maps
    ("text_encoder_2", "ln_final.weight", (f"{SGM}1.model.", CLIP_G)),
)
# Keys that carry no weights and are ignored without a warning, unless a network has them.
NO_WEIGHTS = re.compile(
    r"^(betas|alphas_cumprod|alphas_cumprod_prev|(sqrt|log)_\w+|posterior_\w+|lvlb_weights|logvar|scale_factor"
    r"|global_step|loss\..*|embedding_manager\..*|denoiser\.sigmas|noise_augmentor\..*)$"
    r"|^low_scale_model\.|^(cond_stage_model\.)?(transformer\.)?to_logits\."
    r"|^cond_stage_model\.(encoder|decoder|quantize|quant_conv|post_quant_conv)\."  # a second time in inpainting_big
    r"|position_ids$|logit_scale$|(text|visual)_projection(\.weight)?$|^(v_pred|ztsnr|difference)$|^encoder\.embed_tokens\."
    r"|(^|\.)lm_head\.weight$|^norm_final\.weight$|^head\.(probe$|\w+\.)"  # Qwen3's, Lumina's, SigLIP's, of no use
)
EMA = "model_ema."


@dataclass(frozen=True)
class Component:
    """The weights of one network in an open checkpoint.  `keys` maps the network's keys to the file's."""

    checkpoint: Checkpoint
    keys: Mapping[str, str]

    @property
    def shapes(self) -> Shapes:
        """The shapes by the network's keys, without prefix."""
        return {key: self.checkpoint.shapes[stored] for key, stored in self.keys.items()}


def prefix(role: str, keys: Container[str], sgm: bool = False) -> str:
    """Return the prefix of a network's keys in the original layout, or with `sgm` in that of generative-models."""
    roles = (role, "text_encoder_3") if T5 in keys else (role,)  # T5's place depends on the family
    prefixes = next(prefixes for name, probe, prefixes in COMPONENTS if name in roles and probe in keys)
    return next((place for place in prefixes if place.startswith(SGM) == sgm), prefixes[0])


def split(checkpoint: Checkpoint) -> dict[str, Component]:
    """Return the components of a file by role: "unet", "vae", "text_encoder", ...

    Raises ValueError, one line, if there is none or ldm_lite does not read this kind of file.
    """
    checkpoint = _with_clip_g(to_original_layout(checkpoint))
    with errors_of(checkpoint.path):
        if vision := vision_keys.renamed(checkpoint.shapes, checkpoint.read):
            checkpoint = Checkpoint(checkpoint.path, vision[0], checkpoint.metadata, vision[1])
    stored = taesd_keys({_plain(key): key for key in checkpoint.shapes if not _plain(key).startswith(EMA)})
    stored = original_keys(stored)
    if what := foreign(stored):
        raise ValueError(f"{checkpoint.path}: is {what}, wanted a latent diffusion checkpoint in the original layout")
    components = {}
    used: set[str] = set()
    for role, probe, prefixes in COMPONENTS:
        place = next((prefix for prefix in prefixes if prefix + probe in stored.keys() - used), None)
        if place is None or role in components:
            continue
        keys = {key.removeprefix(place): key for key in stored if key.startswith(place) and key not in used}
        if role == "vision":  # its output is beside it, without its prefix
            keys |= {key: key for key in stored.keys() & {"visual_projection.weight"}}
        used |= set(keys.values())
        components[role] = Component(checkpoint, {key: stored[long] for key, long in keys.items()})
    if "vae" in components:
        components["vae"] = _with_other_half(components["vae"])
    if not components:
        has = _sample(sorted(stored))
        raise ValueError(f"{checkpoint.path}: holds no known UNet, autoencoder or text encoder (it has {has})")
    ignored = sorted(key for key in stored if key not in used and not NO_WEIGHTS.search(key))
    if ignored:
        log.warning("%s: ignored %d unknown tensors: %s", checkpoint.path.name, len(ignored), _sample(ignored))
    return components


def _plain(key: str) -> str:
    """Remove what torch.compile and DataParallel add to a key, and undo what ComfyUI renames in FLUX.1."""
    return NORM.sub(r"\1.scale", key.replace("_orig_mod.", "").removeprefix("module."))


NORM = re.compile(r"\b(query_norm|key_norm)\.weight$")


def _with_clip_g(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with OpenCLIP's names in place of transformers' in the part with the prefix CLIP_G."""
    if f"{CLIP_G}text_model.final_layer_norm.weight" not in checkpoint.shapes:
        return checkpoint
    inside = {key for key in checkpoint.shapes if key.startswith(CLIP_G)}
    keys = {key.removeprefix(CLIP_G): (checkpoint, key) for key in inside}
    part = to_original_layout(combine(checkpoint.path, keys, {"open_clip": "True"}))
    tensors = {key: (checkpoint, key) for key in checkpoint.shapes if key not in inside}
    return combine(checkpoint.path, tensors | {CLIP_G + key: (part, key) for key in part.shapes}, checkpoint.metadata)


def _with_other_half(vae: Component) -> Component:
    """Add TAESD's other half from the file beside it: taesd_decoder.pth and taesd_encoder.pth."""
    path, half = vae.checkpoint.path, " ".join({key.partition(".")[0] for key in vae.keys})
    missing = {"decoder": "encoder", "encoder": "decoder"}.get(half, half)
    beside = path.with_name(path.name.replace(half, missing))
    if beside == path or not beside.is_file():
        return vae
    second = open_checkpoint(beside)
    keys = taesd_keys({key: key for key in second.shapes})
    if not all(key.startswith(f"{missing}.") for key in keys):
        return vae
    log.info("%s: taken together with %s", path.name, beside.name)
    tensors = {key: (vae.checkpoint, stored) for key, stored in vae.keys.items()}
    tensors |= {key: (second, stored) for key, stored in keys.items()}
    return Component(combine(path, tensors, vae.checkpoint.metadata), {key: key for key in tensors})


def ema_copy(unet: Component) -> Component | None:
    """Return the EMA copy of a UNet in the same file; None if there is none or it is incomplete.

    EMA keys are "model_ema." plus the key in the Lightning module without its dots.  The dots cannot be restored, so
    the EMA keys are built from the UNet's.
    """
    shapes = unet.checkpoint.shapes
    names = {key: EMA + f"diffusion_model.{key}".replace(".", "") for key in unet.keys if not NO_WEIGHTS.search(key)}
    if all(shapes.get(name) == shapes[unet.keys[key]] for key, name in names.items()):
        return Component(unet.checkpoint, names)
    return None


# ---- loading --------------------------------------------------------------------------------------------------------


class _WithoutInit(TorchFunctionMode):
    """Skip torch.nn.init: on the meta device it has no effect, but it imports the compiler, over a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def errors_of(path: object) -> Iterator[None]:
    """Put the path of a file before the message of a ValueError that reading sizes or building a network raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build networks in this block on the meta device, without memory, for load_weights to fill."""
    with torch.device("meta"), _WithoutInit():
        yield


WEIGHTS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
WEIGHTS |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


def read_weight(checkpoint: Checkpoint, key: str) -> Tensor:
    """Read one tensor.  Raises ValueError, naming it, if it holds no plain floating-point numbers."""
    value = checkpoint.read(key)
    if value.dtype not in WEIGHTS:
        name = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"{checkpoint.path}: {key} is stored as {name}, wanted floating-point numbers of 8 to 64 bits")
    return value


def load_weights(
    network: nn.Module,
    component: Component,
    title: str,
    device: torch.device,
    dtype: torch.dtype,
    in_blocks: bool = False,
) -> None:
    """Fill a network built on the meta device, strictly, reading each tensor directly to device and dtype.

    With `in_blocks`, the linears whose weights a GGUF file stores in blocks keep them so, and compute in dtype.
    Raises ValueError, one line with the first differences, if names or shapes differ.
    """
    wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    got = component.shapes
    missing = sorted(set(wanted) - set(got))
    unexpected = sorted(key for key in set(got) - set(wanted) if not NO_WEIGHTS.search(key))
    reshaped = [f"{k} {got[k]} in place of {wanted[k]}" for k in wanted if k in got and got[k] != wanted[k]]
    problems = [
        f"{len(keys)} tensors {what} ({_sample(keys)})"
        for what, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if keys
    ]
    if problems:
        raise ValueError(f"{component.checkpoint.path}: the {title} does not fit: {'; '.join(problems)}")
    weights, pages = {}, MappedPages()
    if in_blocks:
        wanted = {
            key: shape for key, shape in wanted.items() if not _keep_blocks(network, component, key, device, dtype)
        }
    for key in wanted:
        value = read_weight(component.checkpoint, component.keys[key])
        weights[key] = value.to(device=device, dtype=dtype)
        if weights[key] is not value:
            pages.release(value)
    network.load_state_dict(weights, assign=True, strict=False)  # blocks are there already
    network.requires_grad_(False).eval()


def _keep_blocks(network: nn.Module, component: Component, key: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Replace the linear whose weight has this key by one that keeps it in blocks, if the file does."""
    name, _, last = key.rpartition(".")
    linear, weight = network.get_submodule(name), component.checkpoint.blocks(component.keys[key])
    if weight is None or last != "weight" or type(linear) is not nn.Linear:
        return False
    network.set_submodule(name, BlockLinear(weight._replace(data=weight.data.to(device)), linear.bias, dtype))
    return True


def _sample(items: Iterable[str], most: int = 3) -> str:
    items = list(items)
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def broken_weights(networks: Mapping[str, nn.Module]) -> str | None:
    """Describe the first network with non-finite weights; None if all are finite.  Explains a non-finite result."""
    for title, network in networks.items():
        bad = [key for key, value in network.state_dict().items() if not torch.isfinite(value.float()).all()]
        if bad:
            return f"{len(bad)} of the {title}'s weights hold NaN or infinity ({_sample(bad)}): the file is damaged"
    return None
