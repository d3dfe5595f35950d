"""Recognise files that ldm_lite does not read as a checkpoint by their keys, so that errors can name them."""

import re

from ldm_lite.core.files import Tensors
from ldm_lite.zoo.families import FAMILY_ROWS

FACE_ID = (
    "an IP-Adapter FaceID, which reads the embedding of a face by InsightFace's network, which ldm_lite does not have: "
    "use ip-adapter-plus-face or ip-adapter-full-face"
)
FOREIGN = {  # a pattern in a key -> the kind of file; the first match wins
    r"\.lora_(down|up|A|B)\.|\.lora\.(down|up)\.|^bundle_emb\.": "a LoRA (to be added to a checkpoint with `lora`)",
    r"\.hada_w1_a|\.lokr_w1|\.oft_blocks": "a LyCORIS adapter",
    r"^(string_to_param|string_to_token|emb_params|clip_[lg])\b": "a textual inversion embedding (for `embedding`)",
    r"^ip_adapter\.\d+\.to_\w+_lora\.|^image_proj\.perceiver_resampler\.": FACE_ID,
    r"(?s)\A(?=.*^image_proj\.proj\.0\.)(?=.*^image_proj\.norm\.)": FACE_ID,  # portrait
    r"(?s)\A(?!.*^ip_adapter\.1\.to_k_ip\.weight$).*^(image_proj|ip_adapter)\.": "an unsupported kind of IP-Adapter",
    r"\.(wscales|smooth_factor)$": "a file of Nunchaku (SVDQuant), packed for its kernels: use one in fp8 or GGUF",
    r"(^|\.)caption_projection\.0\.linear\.": "Bria FIBO (not supported)",
    r"(^|\.)context_embedder_norm\.|\.img_mlp\.gate_proj\.": "Ovis-Image (not supported)",
    r"(^|\.)(context_embedder\.token_refiner|byt5_in)\.|individual_token_refiner\.": "HunyuanImage (not supported)",
    r"(^|\.)(text|visual)_transformer_blocks\.": "Kandinsky 5 (not supported)",
    r"\.(conv_inverted|inverted_conv)\.": "Sana (not supported)",
    r"(^|\.)time_embed\.timestep_embedder\.": "LongCat-Image or Bria (not supported)",
    r"\.weight\.(absmax|quant_map|quant_state\.\w+)$|\.(SCB|qweight|qzeros)$": "a quantised file (bitsandbytes, GPTQ)",
    r"^task_embedding$": "a ControlNet++ (union, ProMax)",
    r"\b(base_to_ctrl|ctrl_to_base|enc_zero_convs_out)\.": "a ControlNet-XS",
    r"\blllite_": "a ControlNet-LLLite",
    r"^(controlnet_(single_)?blocks|control_all_x_embedder)\.": "a ControlNet for a diffusion transformer",
    r"^controlnet_\w+\.": "an unsupported kind of ControlNet in diffusers' format",
    r"double_blocks\.0\.img_attn_qkv|(?s:\A(?!.*^(\w+\.)*txt_norm\.weight$).*^transformer_blocks\.)": (
        "a diffusion transformer that is not supported"
    ),
    r"\A(?![\s\S]*\bcap_pad_token$)[\s\S]*^(model\.diffusion_model\.)?cap_embedder\.": "Lumina (not supported)",
    r"time_stack|time_mixer": "Stable Video Diffusion",
    r"motion_modules\.": "AnimateDiff",
    r"^cond_stage_model\.roberta\.": "AltDiffusion",
    r"^edm_(mean|std)$": "Playground 2.5",
    r"^edm_vpred\.": "CosXL",
    r"^(unet\.)?(down_blocks|up_blocks|mid_block)\.": "an unsupported kind of UNet in diffusers' format",
    r"^(first_stage_model\.)?quantize\.(embed|proj)\.": "a Gumbel VQ autoencoder, or a model on top of one",
}


def refuse(tensors: Tensors) -> None:
    """Raise ValueError, naming the kind of a file, if ldm_lite does not read it."""
    text = "\n".join(key for key in tensors if not key.startswith("model_ema."))
    patterns = FOREIGN
    for module in FAMILY_ROWS.modules.values():
        if module.key and any(key.endswith(module.key) for key in tensors):
            patterns = {**FAMILY_ROWS[module.rows[0]].look_alikes, **patterns}
    if what := next((what for pattern, what in patterns.items() if re.search(pattern, text, re.MULTILINE)), None):
        raise ValueError(f"is {what}, expected a latent diffusion checkpoint in the original layout")
