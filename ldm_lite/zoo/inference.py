"""What a file holds, read from its keys and shapes: the specs of its networks, or what else it is."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import pairwise

from ldm_lite.models.bert import BERTSpec
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.clip_vision import CLIPVisionSpec
from ldm_lite.models.embedders import ClassSpec, LabelMapSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.models.style_adapter import StyleAdapterSpec
from ldm_lite.models.t2i_adapter import AdapterSpec
from ldm_lite.models.t5 import T5Spec
from ldm_lite.models.taesd import TAESDSpec
from ldm_lite.models.unet import UNetSpec
from ldm_lite.models.unet_if import IFSpec
from ldm_lite.models.vae_kl import VAESpec
from ldm_lite.models.vae_vq import VQSpec

Shapes = Mapping[str, tuple[int, ...]]
TextSpec = CLIPTextSpec | OpenCLIPTextSpec | BERTSpec | ClassSpec | LabelMapSpec

# ---- what is not a latent diffusion checkpoint ----------------------------------------------------------------------

FOREIGN = {  # a pattern among the keys -> what such a file is; the first match wins
    r"\.lora_(down|up|A|B)\.|\.lora\.(down|up)\.|^bundle_emb\.": "a LoRA (to be added to a checkpoint with `lora=FILE`)",
    r"\.hada_w1_a|\.lokr_w1|\.oft_blocks": "a LyCORIS adapter",
    r"^(string_to_param|string_to_token|emb_params|clip_[lg])\b": "a textual inversion embedding (for `embedding=FILE`)",
    r"^(image_proj|ip_adapter)\.": "an IP-Adapter",
    r"^task_embedding$": "a ControlNet++ (union, ProMax)",
    r"\b(base_to_ctrl|ctrl_to_base|enc_zero_convs_out)\.": "a ControlNet-XS",
    r"^lora_controlnet$": "a Control-LoRA",
    r"\blllite_": "a ControlNet-LLLite",
    r"^controlnet_(single_)?blocks\.": "a ControlNet for Stable Diffusion 3, Flux or another diffusion transformer",
    r"^controlnet_\w+\.": "a ControlNet in the format of diffusers, of a kind that is not read",
    r"joint_blocks\.": "Stable Diffusion 3",
    r"double_blocks\.|^transformer_blocks\.": "Flux or another diffusion transformer",
    r"time_stack|time_mixer": "Stable Video Diffusion",
    r"motion_modules\.": "AnimateDiff",
    r"^cond_stage_model\.roberta\.": "AltDiffusion",
    r"^edm_(mean|std)$": "Playground 2.5",
    r"^edm_vpred\.": "CosXL",
    r"^(unet\.)?(down_blocks|up_blocks|mid_block)\.": "a UNet in the format of diffusers, of a kind that is not read",
    r"^(first_stage_model\.)?quantize\.(embed|proj)\.": "a Gumbel VQ autoencoder, or a model on top of one",
}


def foreign(keys: Iterable[str]) -> str | None:
    """What a file with these keys is, if it is none that ldm_lite reads; else None."""
    text = "\n".join(keys)
    return next((what for pattern, what in FOREIGN.items() if re.search(pattern, text, re.MULTILINE)), None)


# ---- inference ------------------------------------------------------------------------------------------------------


def _count(shapes: Shapes, pattern: str) -> int:
    """How many indices stand where `pattern` has its group: 1 + the largest, 0 if there is none."""
    return max((1 + int(m[1]) for key in shapes if (m := re.match(pattern, key))), default=0)


def infer_unet(shapes: Shapes) -> UNetSpec:
    """Shapes of an LDM UNet's weights, keys without prefix -> its spec, with num_heads and head_dim both None.

    Raises KeyError if a key that every LDM UNet has is missing.
    """
    mc, in_channels = shapes["input_blocks.0.0.weight"][:2]
    num_in, num_out = (_count(shapes, rf"{side}_blocks\.(\d+)\.") for side in ("input", "output"))

    # levels: closed by strided convolutions, or else (reading from the deepest) by residual blocks that upsample
    ends = [i for i in range(num_in) if f"input_blocks.{i}.0.op.weight" in shapes]
    ups = [i for i in range(num_out) for j in (1, 2) if f"output_blocks.{i}.{j}.in_layers.0.weight" in shapes]
    if ends or not num_out:
        bounds = [0, *ends, num_in]
        num_res_blocks = tuple(after - before - 1 for before, after in pairwise(bounds))
    else:
        bounds = [-1, *ups, num_out - 1]
        num_res_blocks = tuple(after - before - 1 for before, after in pairwise(bounds))[::-1]

    # widths and attention: seen at the first residual block of each level
    firsts = [1 + sum(num_res_blocks[:level]) + level for level in range(len(num_res_blocks))]
    widths = [shapes[f"input_blocks.{i}.0.out_layers.0.weight"][0] for i in firsts]

    def depth(block: str) -> int:
        blocks = _count(shapes, rf"{re.escape(block)}\.1\.transformer_blocks\.(\d+)\.")
        return blocks or int(f"{block}.1.qkv.weight" in shapes)

    def cross_only(block: str) -> bool:
        to_q, to_k = (shapes.get(f"{block}.1.transformer_blocks.0.attn1.{p}.weight", (0, 0)) for p in ("to_q", "to_k"))
        return to_q[1] != to_k[1]

    contexts = [shape[1] for key, shape in shapes.items() if key.endswith("attn2.to_k.weight")]
    label, label_mlp = shapes.get("label_emb.weight"), shapes.get("label_emb.0.0.weight")
    guidance = shapes.get("cond_proj.weight")
    return UNetSpec(
        in_channels=in_channels,
        out_channels=shapes["out.2.weight"][0],
        model_channels=mc,
        channel_mult=tuple(width // mc for width in widths),
        num_res_blocks=num_res_blocks,
        transformer_depth=tuple(depth(f"input_blocks.{i}") for i in firsts),
        middle_depth=depth("middle_block"),
        num_heads=None,
        head_dim=None,
        context_dim=contexts[0] if contexts else None,
        linear_proj=len(shapes.get("middle_block.1.proj_in.weight", ())) == 2,
        cross_only=tuple(cross_only(f"input_blocks.{i}") for i in firsts),
        vector_dim=label_mlp[1] if label_mlp else None,
        guidance_dim=guidance[1] if guidance else None,
        num_classes=label[0] if label else None,
        scale_shift=shapes["input_blocks.1.0.emb_layers.1.weight"][0] == 2 * widths[0],
        resblock_updown=bool(ups),
    )


def infer_control(shapes: Shapes) -> UNetSpec:
    """Shapes of a ControlNet's weights -> its spec, as infer_unet's; its depths may be less than its UNet's.

    Raises KeyError if a key that every ControlNet has is missing.
    """
    return infer_unet({**shapes, "out.2.weight": shapes["input_blocks.0.0.weight"][1:2]})


def infer_if(shapes: Shapes) -> IFSpec:
    """Shapes of a DeepFloyd IF stage's weights -> its spec; heads are 64 wide everywhere, which no weight tells.

    Raises KeyError if a key that every such stage has is missing.
    """
    spec, second = infer_unet(shapes), "aug_proj.0.weight" in shapes
    text_dim = shapes["encoder_pooling.1.positional_embedding"][1]
    known = {field.name: getattr(spec, field.name) for field in fields(UNetSpec)}
    known |= {"head_dim": 64, "context_dim": text_dim, "num_classes": 1000 if second else None}
    return IFSpec(**known, pool_heads=text_dim // 64, super_resolution=second)


def infer_t5(shapes: Shapes) -> T5Spec:
    """Shapes of a T5 v1.1 encoder's weights -> its spec.  Raises KeyError if one is missing."""
    vocab_size, width = shapes["shared.weight"]
    buckets, heads = shapes["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    return T5Spec(
        vocab_size=vocab_size,
        width=width,
        mlp_width=shapes["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"][0],
        layers=_count(shapes, r"encoder\.block\.(\d+)\."),
        heads=heads,
        head_dim=shapes["encoder.block.0.layer.0.SelfAttention.q.weight"][0] // heads,
        buckets=buckets,
        max_distance=128,
    )


def infer_adapter(shapes: Shapes, num_levels: int) -> AdapterSpec:
    """Shapes of a T2I-Adapter's weights, and the number of its UNet's levels -> its spec.

    Raises KeyError if a key that every such adapter has is missing.
    """
    light, num_blocks = "body.0.in_conv.weight" in shapes, _count(shapes, r"body\.(\d+)\.")
    unshuffled = shapes["body.0.in_conv.weight" if light else "conv_in.weight"][1]
    factor = 16 if unshuffled % 256 == 0 else 8
    if light:
        channels = [shapes[f"body.{i}.out_conv.weight"][0] for i in range(num_blocks)]
        num_res_blocks = _count(shapes, r"body\.0\.body\.(\d+)\.")
    else:
        num_res_blocks = max(1, num_blocks // (num_levels + (factor == 16)))
        channels = [shapes[f"body.{i}.block1.weight"][0] for i in range(0, num_blocks, num_res_blocks)]
    return AdapterSpec(unshuffled // factor**2, factor, tuple(channels), num_res_blocks, light)


def infer_style(shapes: Shapes) -> StyleAdapterSpec:
    """Shapes of a style adapter's weights -> its spec.  Raises KeyError if a key that every such has is missing."""
    _, num_tokens, width = shapes["style_embedding"]
    layers = _count(shapes, r"transformer_layes\.(\d+)\.")
    return StyleAdapterSpec(num_tokens, width, shapes["proj"][1], layers, heads=8)


def infer_vision(shapes: Shapes) -> CLIPVisionSpec:
    """Shapes of the weights of an image encoder of OpenAI's CLIP -> its spec.  Raises KeyError as infer_style does."""
    width, _, patch, _ = shapes["embeddings.patch_embedding.weight"]
    return CLIPVisionSpec(
        size=patch * math.isqrt(shapes["embeddings.position_embedding.weight"][0] - 1),
        patch=patch,
        width=width,
        mlp_width=shapes["encoder.layers.0.mlp.fc1.weight"][0],
        layers=_count(shapes, r"encoder\.layers\.(\d+)\."),
        heads=width // 64,  # in ViT-B and L
        activation="quick_gelu",
    )


def infer_vae(shapes: Shapes) -> VAESpec | VQSpec | TAESDSpec:
    """Shapes of an autoencoder's weights, keys without prefix -> its spec.  Raises KeyError if one is missing."""
    tiny = [
        side for side in ("encoder", "decoder") if f"{side}.1.conv.0.weight" in shapes or f"{side}.1.weight" in shapes
    ]
    if tiny:
        embed_dim = shapes["decoder.1.weight"][1] if "decoder" in tiny else shapes["encoder.14.weight"][0]
        return TAESDSpec(embed_dim, encoder="encoder" in tiny, decoder="decoder" in tiny)
    channels = shapes["encoder.conv_in.weight"][0]
    levels = range(_count(shapes, r"encoder\.down\.(\d+)\."))
    widths = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in levels]
    spec = VAESpec(
        channels=channels,
        channel_mult=tuple(width // channels for width in widths),
        num_res_blocks=_count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
        z_channels=shapes["decoder.conv_in.weight"][1],
        embed_dim=shapes["post_quant_conv.weight"][1],
        attn_levels=tuple(i for i in levels if f"encoder.down.{i}.attn.0.norm.weight" in shapes),
        mid_attn="encoder.mid.attn_1.norm.weight" in shapes,
    )
    codes = shapes.get("quantize.embedding.weight")
    return spec if codes is None else VQSpec(**vars(spec), num_codes=codes[0])


def infer_text(shapes: Shapes, like: TextSpec, heads: int | None = None) -> TextSpec:
    """Shapes of the weights of what reads a prompt, keys without prefix, and the spec of one of its kind -> its own.

    What shapes do not tell is as there; so are the heads, unless given.  Raises KeyError if a tensor is missing.
    """
    if isinstance(like, LabelMapSpec):
        channels, num_labels = shapes["channel_mapper.weight"][:2]
        return replace(like, channels=channels, num_labels=num_labels)
    if isinstance(like, ClassSpec):
        num_classes, width = shapes["embedding.weight"]
        last = None if like.unconditional is None else num_classes - 1
        return ClassSpec(num_classes, width, unconditional=last)
    if isinstance(like, BERTSpec):
        vocab_size, width = shapes["token_emb.weight"]
        layers = _count(shapes, r"attn_layers\.layers\.(\d+)\.") // 2
        return BERTSpec(vocab_size, shapes["pos_emb.emb.weight"][0], width, layers)
    heads = like.heads if heads is None else heads
    if isinstance(like, OpenCLIPTextSpec):
        vocab_size, width = shapes["token_embedding.weight"]
        layers = _count(shapes, r"transformer\.resblocks\.(\d+)\.")
        return replace(
            like,
            vocab_size=vocab_size,
            length=shapes["positional_embedding"][0],
            width=width,
            mlp_width=shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
            layers=layers,
            heads=heads,
            # Converted files have lost the layers that nothing reads, and sometimes the projection.
            skip=0 if layers == like.layers - like.skip else like.skip,
            projection="text_projection" in shapes,
        )
    vocab_size, width = shapes["embeddings.token_embedding.weight"]
    return replace(
        like,
        vocab_size=vocab_size,
        length=shapes["embeddings.position_embedding.weight"][0],
        width=width,
        mlp_width=shapes["encoder.layers.0.mlp.fc1.weight"][0],
        layers=_count(shapes, r"encoder\.layers\.(\d+)\."),
        heads=heads,
    )
