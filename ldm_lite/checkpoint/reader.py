"""Open checkpoint files safely, tensor by tensor, and find the networks in them.

Further formats of files and layouts of keys are in formats/, one file each, imported when a file needs them.
"""

import contextlib
import io
import logging
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint import hub
from ldm_lite.cli.files import open_file
from ldm_lite.core import files
from ldm_lite.core.files import Tensors, bundled, imported
from ldm_lite.core.networks import WithoutInit, check_fit, few
from ldm_lite.runtime.memory import MappedPages
from ldm_lite.zoo.families import DENOISERS, stored_facts

log = logging.getLogger("ldm_lite")

# As in core/files.py, whose tables stay as they are: a pattern of a file's first bytes -> Path -> Tensors, ...
FILE_OPENERS: list[tuple[bytes, Any]] = [
    files.OPENERS[0],  # safetensors
    (rb"PK\x03\x04|\x80", "ldm_lite.formats.torch_file:open_torch"),
    (rb"GGUF", "ldm_lite.formats.gguf:open_gguf"),
]
# ... and a pattern of a key -> Tensors -> Tensors in the original layout, or None; all that match, in this order.
KEY_ADAPTERS: list[tuple[str, str]] = [
    *files.ADAPTERS,
    (  # networks that are refused, though their other keys are a known family's
        r"(^|\.)(time_embed\.timestep_embedder|context_embedder_norm|caption_projection\.0\.linear|byt5_in"
        r"|context_embedder\.token_refiner|(text|visual)_transformer_blocks)\.|individual_token_refiner\."
        r"|\.(conv_inverted|inverted_conv|img_mlp\.gate_proj)\.|\.(wscales|smooth_factor)$",
        "ldm_lite.formats.foreign:refuse",
    ),
    (r"\.(scale_weight|weight_scale)$|(^|\.)(comfy_quant|scaled_fp8)$", "ldm_lite.formats.scaled:unscaled"),
    (
        r"(^|\.)decoder\.(middle\.0\.residual\.0|mid_block\.resnets\.0\.norm1)\.gamma$",
        "ldm_lite.formats.wan_vae:to_images",
    ),
    (
        r"^time_embedding\.linear_1\.weight$|^adapter\.body\.0\.resnets\.0\.|^(encoder|decoder)\.mid_block\.resnets\.0\."
        r"|^(text_model\.)?final_layer_norm\.weight$|(^|^(model\.)?diffusion_model\.)(transformer_blocks|layers\.0\.attention)\.",
        "ldm_lite.formats.diffusers_layout:to_original",
    ),
    (r"^text_encoders\.clip_g\.transformer\.text_model\.final_layer_norm\.weight$", "ldm_lite.formats.comfyui:clip_g"),
    (r"^visual\.transformer\.resblocks\.0\.attn\.in_proj_weight$", "ldm_lite.formats.open_clip_vision:to_transformers"),
    (r"_orig_mod\.|^module\.", "ldm_lite.formats.compiled:plain"),
    (r"\b(query_norm|key_norm|guidance_layer\.norms\.\d+)\.weight$", "ldm_lite.formats.comfyui:norms"),
    (r"(^|\.)decoder\.post_quant_conv\.", "ldm_lite.formats.comfyui:quant_convs"),
    (r"^((decoder|encoder)\.layers\.0|[01])\.weight$", "ldm_lite.formats.taesd:whole"),
    (r"^model\.1\.sub\.0\.RDB1\.conv1\.0\.weight$", "ldm_lite.formats.esrgan:as_basicsr"),
    (  # which no original checkpoint of a known family has
        r"^(?!(model\.diffusion_model|first_stage_model|cond_stage_model|model_ema)\.)\w+\.|^(emb_|clip_|edm_|task_|string_to_)"
        r"|time_(stack|mixer|text_embed)|__index_timestep|distilled_|_modulation|_qkv|cap_embedder|siglip|motion_|\.roberta\."
        r"|\.quantize\.(embed|proj)\.",
        "ldm_lite.formats.foreign:refuse",
    ),
]

FOLDER = "ldm_lite.formats.diffusers_folder"

# ---- opening --------------------------------------------------------------------------------------------------------

MOST_HEADER = 64 * 2**20  # bytes of a safetensors file's header; if it is large, mostly metadata
MOST_TENSORS = 65536  # Stable Diffusion XL with an EMA copy has 5,000
LONGEST_KEY = 512
NO_INDEX = re.compile(r"(?:^|\.)\d{5,}\.")  # blocks are built by their numbers


def open_checkpoint(path: Path) -> Tensors:
    """Open a checkpoint file, whatever its extension, in the layout that it has.

    Its metadata are those that stored_facts returns.
    Raises ValueError, one line, for a file that is not a checkpoint, is damaged, would run code, or has more tensors,
    longer keys or higher numbers in them than networks have.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, expected a .safetensors or .ckpt file in the original layout")
    with open_file(path) as file:
        head, size = file.read(64), file.seek(0, io.SEEK_END)
    if size == 0:
        raise ValueError(f"{path}: is empty, expected a checkpoint: download it again")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: is a Git LFS pointer, not the weights themselves: run `git lfs pull`")
    header = int.from_bytes(head[:8], "little") if head[8:9] == b"{" else 0
    if 8 + header > max(size, 8):
        raise ValueError(f"{path}: is truncated: {size} bytes, but its header alone takes {8 + header}")
    if header > MOST_HEADER:
        raise ValueError(f"{path}: has a header of {header} bytes, expected at most {MOST_HEADER}")
    opener = next((opener for first_bytes, opener in FILE_OPENERS if re.match(first_bytes, head, re.DOTALL)), None)
    if opener is None:
        raise ValueError(f"{path}: is not a checkpoint (starts with {head[:8]!r}), expected .safetensors, .ckpt, .gguf")
    try:
        tensors: Tensors = imported(opener)(path)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        tensors = imported("ldm_lite.formats.unmapped:open_safetensors")(path)
    if not tensors:
        raise ValueError(f"{path}: holds no tensors, expected a checkpoint")
    if len(tensors) > MOST_TENSORS:
        raise ValueError(f"{path}: holds {len(tensors)} tensors, expected at most {MOST_TENSORS}")
    odd = (key for key in tensors if len(key) > LONGEST_KEY or NO_INDEX.search(key))
    if (key := next(odd, None)) is not None:
        raise ValueError(f"{path}: has the key {key[:60]!r}, which is too long or has too high a number")
    return replace(tensors, metadata=stored_facts(tensors.metadata))


def open_source(source: str | os.PathLike[str] | None) -> Tensors:
    """Open a checkpoint: a file, or a diffusers folder of a whole pipeline or one network, as one file.

    Either may be on the hub: "owner/repository/file", or "owner/repository" for a folder; None is the bundled model.
    Raises FileNotFoundError and ValueError, one line.
    """
    if source is None:
        return open_checkpoint(bundled())
    repository = hub.repository(source)
    path = hub.resolve(source) if repository is None else imported(f"{FOLDER}:download")(repository)
    return imported(f"{FOLDER}:open_folder")(path) if path.is_dir() else open_checkpoint(path)


def places_in(files: Iterable[Tensors]) -> dict[str, tuple[Tensors, str]]:
    """Return where each tensor of several files is, for `joined`.  Raises ValueError for one that is in two files."""
    places: dict[str, tuple[Tensors, str]] = {}
    for file in files:
        for key in file:
            if key in places:
                where = f"both {places[key][0].path.name} and {file.path.name} hold {key}"
                raise ValueError(f"{file.path.parent}: {where}: download the whole folder again")
            places[key] = file, key
    return places


def joined(path: Path, places: Mapping[str, tuple[Tensors, str]], metadata: Mapping[str, str]) -> Tensors:
    """Return a view of tensors from several files.  `places` maps each key to a file and its key there."""
    shapes = {key: tensors.shapes[stored] for key, (tensors, stored) in places.items()}

    def read(key: str) -> Tensor:
        tensors, stored = places[key]
        return tensors.read(stored)

    return Tensors(path, shapes, read, metadata)


# ---- splitting ------------------------------------------------------------------------------------------------------

SGM = "conditioner.embedders."  # prefix of text encoders in files of generative-models: SDXL, SD-Turbo
T5 = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


class NetworkKind(NamedTuple):
    """A kind of network, and how it is found in a file."""

    role: str
    probe: str  # a key that it always has
    prefixes: tuple[str, ...]  # of its keys; the first that fits counts
    beside: str = ""  # how those of its keys begin that are one module further out
    spec: str = ""  # the class of its spec, if it is a text encoder that several families share


# The first kind of a role that a file has is that network.
NETWORK_KINDS = (
    NetworkKind("control", "input_hint_block.0.weight", ("control_model.", "")),
    NetworkKind("adapter", "body.0.block1.weight", ("adapter.", "")),
    NetworkKind("adapter", "body.0.body.0.block1.weight", ("adapter.", "")),
    NetworkKind("style", "style_embedding", ("adapter.", "")),
    NetworkKind("ip_adapter", "ip_adapter.1.to_k_ip.weight", ("",)),
    NetworkKind("redux", "redux_up.weight", ("",)),
    NetworkKind("upscaler", "body.0.rdb1.conv1.weight", ("",)),
    NetworkKind(
        "vision", "embeddings.patch_embedding.weight", ("vision_model.", ""), beside="visual_projection.weight"
    ),
    NetworkKind("unet", "input_blocks.0.0.weight", ("model.diffusion_model.", "")),
    *(NetworkKind("unet", key, ("model.diffusion_model.", "diffusion_model.", "")) for key in DENOISERS),
    NetworkKind("vae", "decoder.conv_in.weight", ("first_stage_model.", "vae.", "")),
    NetworkKind("vae", "decoder.1.weight", ("",)),  # TAESD
    NetworkKind("vae", "encoder.0.weight", ("",)),
    NetworkKind("text_encoder", T5, ("",), spec="T5Spec"),
    NetworkKind(
        "text_encoder",
        "layers.0.self_attn.q_norm.weight",
        ("text_encoders.qwen3_4b.transformer.model.", "model.", ""),
        spec="Qwen3Spec",
    ),
    NetworkKind(
        "text_encoder",
        "layers.0.self_attn.k_proj.bias",
        ("text_encoders.qwen25_7b.transformer.model.", "model.language_model.", "model.", ""),
        beside="visual.",
        spec="Qwen25Spec",
    ),
    NetworkKind("text_encoder_3", T5, ("text_encoders.t5xxl.transformer.",)),  # a family with fewer encoders moves it
    NetworkKind(
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
        beside="text_projection.weight",
        spec="CLIPTextSpec",
    ),
    NetworkKind(
        "text_encoder", "ln_final.weight", ("cond_stage_model.model.", f"{SGM}0.model.", ""), spec="OpenCLIPTextSpec"
    ),
    NetworkKind("text_encoder", "token_emb.weight", ("cond_stage_model.transformer.", "")),  # BERT
    NetworkKind("text_encoder", "embedding.weight", ("cond_stage_model.", "")),  # classes
    NetworkKind("text_encoder", "channel_mapper.weight", ("cond_stage_model.", "")),  # label maps
    NetworkKind("text_encoder_2", "ln_final.weight", (f"{SGM}1.model.", "text_encoders.clip_g.transformer.")),
)
# Keys that carry no weights and are ignored without a warning, unless a network has them.
WITHOUT_WEIGHTS = re.compile(
    r"^(betas|alphas_cumprod|alphas_cumprod_prev|(sqrt|log)_\w+|posterior_\w+|lvlb_weights|logvar|scale_factor"
    r"|global_step|loss\..*|embedding_manager\..*|denoiser\.sigmas|noise_augmentor\..*)$"
    r"|^low_scale_model\.|^(cond_stage_model\.)?(transformer\.)?to_logits\."
    r"|^cond_stage_model\.(encoder|decoder|quantize|quant_conv|post_quant_conv)\."  # a second time in inpainting_big
    r"|position_ids$|logit_scale$|(text|visual)_projection(\.weight)?$|\bbn\.num_batches_tracked$|^(v_pred|ztsnr|difference)$|^encoder\.embed_tokens\."
    r"|(^|\.)lm_head\.weight$|^norm_final\.weight$|^head\.(probe$|\w+\.)"  # Qwen3's, Lumina's, SigLIP's, of no use
    r"|^(text_encoders\.qwen25_7b\.transformer\.|model\.)?visual\."  # Qwen2.5-VL's, where it reads text alone
    r"|(^|\.)__index_timestep_zero__$"  # a mark, not a weight
)
EMA = "model_ema."
# The metadata of each role's network, which follow it when it replaces another's.
METADATA_OF_ROLE = {
    "unet": ("unet_num_heads", "unet_head_dim", "sample_size"),
    "vae": ("scaling_factor", "shift_factor"),
    "text_encoder": ("text_activation", "text_num_heads", "text_skip", "words"),
    "text_encoder_2": ("text_2_activation", "text_2_num_heads"),
}


class Parts(dict[str, Tensors]):
    """The networks of a file by role, without prefixes."""

    file: Tensors  # all of its tensors: networks, EMA copies, buffers


def prefix(role: str, keys: Container[str], sgm: bool = False) -> str:
    """Return the prefix of a network's keys in the original layout, or with `sgm` in that of generative-models."""
    roles = (role, "text_encoder_3") if T5 in keys else (role,)  # T5's place depends on the family
    prefixes = next(kind.prefixes for kind in NETWORK_KINDS if kind.role in roles and kind.probe in keys)
    return next((place for place in prefixes if place.startswith(SGM) == sgm), prefixes[0])


def metadata_of(role: str, metadata: Mapping[str, str]) -> dict[str, str]:
    """Choose the entries of a file's or folder's metadata that are about the network of this role."""
    return {name: metadata[name] for name in METADATA_OF_ROLE.get(role, ()) if name in metadata}


def parts_of(tensors: Tensors) -> Parts:
    """Return the networks of a file by role: "unet", "vae", "text_encoder", ...

    Raises ValueError, one line, if there is none or ldm_lite does not read this kind of file.
    """
    with errors_of(tensors.path):
        for pattern, adapter in KEY_ADAPTERS:
            if any(re.search(pattern, key) for key in tensors):
                adapted = imported(adapter)(tensors)
                tensors = tensors if adapted is None else adapted
    parts = Parts()
    parts.file = tensors
    unused = {key for key in tensors if not key.startswith(EMA)}
    for kind in NETWORK_KINDS:
        before = next((prefix for prefix in kind.prefixes if prefix + kind.probe in unused), None)
        if before is None or kind.role in parts:
            continue
        keys = {key.removeprefix(before): key for key in tensors if key in unused and key.startswith(before)}
        if kind.beside:
            outside = re.sub(r"\w+\.$", "", before)
            further = (key for key in tensors if key in unused and key.startswith(outside + kind.beside))
            keys |= {key.removeprefix(outside): key for key in further}
        unused -= set(keys.values())
        parts[kind.role] = tensors.renamed(keys)
    if not parts:
        has = few(sorted(tensors))
        raise ValueError(f"{tensors.path}: holds no known UNet, autoencoder or text encoder (it has {has})")
    if ignored := sorted(key for key in unused if not WITHOUT_WEIGHTS.search(key)):
        log.warning("%s: ignored %d unknown tensors: %s", tensors.path.name, len(ignored), few(ignored))
    return parts


# ---- loading --------------------------------------------------------------------------------------------------------


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
    with torch.device("meta"), WithoutInit():
        yield


FLOATING_TYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
FLOATING_TYPES |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


def read_weight(tensors: Tensors, key: str) -> Tensor:
    """Read one tensor.  Raises ValueError, naming it, if it holds no plain floating-point numbers."""
    value = tensors.read(key)
    if value.dtype not in FLOATING_TYPES:
        name = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"{tensors.path}: {key} is stored as {name}, expected floating-point numbers of 8 to 64 bits")
    return value


def load_weights(
    network: nn.Module, tensors: Tensors, title: str, device: torch.device, dtype: torch.dtype, in_blocks: bool = False
) -> None:
    """Fill a network built on the meta device, strictly, reading each tensor directly to device and dtype.

    With `in_blocks`, the linears whose weights a GGUF file stores in blocks keep them so, and compute in dtype.
    Raises ValueError, one line with the first differences, if names or shapes differ.
    """
    check_fit(network, title, tensors, WITHOUT_WEIGHTS)
    keys = list(network.state_dict())  # before blocks are filled, which have keys of their own
    fill_blocks = getattr(tensors, "fill_blocks", None)  # of a GGUF file
    done: set[str] = fill_blocks(network, device, dtype) if in_blocks and fill_blocks is not None else set()
    weights, pages = {}, MappedPages()
    for key in (key for key in keys if key not in done):
        value = read_weight(tensors, key)
        weights[key] = value.to(device=device, dtype=dtype)
        if weights[key] is not value:
            pages.release(value)
    network.load_state_dict(weights, assign=True, strict=False)  # blocks are there already
    network.requires_grad_(False).eval()


def broken_weights(networks: Mapping[str, nn.Module]) -> str | None:
    """Describe the first network with non-finite weights; None if all are finite.  Explains a non-finite result."""
    for title, network in networks.items():
        bad = [key for key, value in network.state_dict().items() if not torch.isfinite(value.float()).all()]
        if bad:
            return f"{len(bad)} of the {title}'s weights hold NaN or infinity ({few(bad)}): the file is damaged"
    return None
