"""The settings in the configuration files of diffusers and transformers: heeded, or checked against what is computed.

A setting is in one of three places: IMPLEMENTED lists the values that the networks here compute; read_network() and
read_scheduler() turn some into metadata, which detection.py heeds; INERT ones change no picture, or the shapes of the
weights tell them.  Any other is named in a warning, unless it is off (null or false).
"""

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ldm_lite.diffusion.names import resolve
from ldm_lite.models.shapes import Shapes

log = logging.getLogger("ldm_lite")

Config = Mapping[str, Any]
Values = tuple[object, ...]
UNET: dict[str, Values] = {
    "act_fn": ("silu", "swish"),
    "addition_embed_type": (None, "text_time"),
    "addition_time_embed_dim": (None, 256),
    "attention_type": ("default",),
    "center_input_sample": (False,),
    "class_embed_type": (None, "projection"),
    "class_embeddings_concat": (False,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "cross_attention_norm": (None,),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "downsample_padding": (1,),
    "dual_cross_attention": (False,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "mid_block_only_cross_attention": (None, False),
    "mid_block_scale_factor": (1,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn", None),  # None: the shapes tell
    "norm_eps": (1e-5,),
    "norm_num_groups": (32,),
    "num_attention_heads": (None,),  # of no effect in diffusers but an error
    "resnet_out_scale_factor": (1,),
    "resnet_skip_time_act": (False,),
    "resnet_time_scale_shift": ("default",),
    "time_embedding_act_fn": (None,),
    "time_embedding_type": ("positional",),
    "timestep_post_act": (None,),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
NO_SHIFT: dict[str, Values] = {"shift_factor": (None, 0), "latents_mean": (None,), "latents_std": (None,)}
SHIFTS: dict[str, Values] = {
    "shift_factor": (None, 0, 0.0609, 0.1159)
}  # Stable Diffusion 3's and FLUX.1's, in their rows
CLIP: dict[str, Values] = {"layer_norm_eps": (1e-5,), "eos_token_id": (None, 2, 49407), "use_attention_mask": (None, 0)}
IMPLEMENTED: dict[str, dict[str, Values]] = {
    "unet": {"_class_name": ("UNet2DConditionModel",), **UNET},
    "control": {"_class_name": ("ControlNetModel",), "controlnet_conditioning_channel_order": ("rgb",), **UNET},
    "vae": {
        "_class_name": ("AutoencoderKL", "VQModel"),
        "act_fn": ("silu", "swish"),
        "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        "lookup_from_codebook": (False,),
        "norm_num_groups": (32,),
        "norm_type": ("group",),
        "up_block_types": ("UpDecoderBlock2D", "AttnUpDecoderBlock2D"),
        **NO_SHIFT,
    },
    "tiny": {
        "_class_name": ("AutoencoderTiny",),
        "act_fn": ("relu",),
        "upsample_fn": ("nearest",),
        "upsampling_scaling_factor": (2,),
        **NO_SHIFT,
    },
    "adapter": {"_class_name": ("T2IAdapter",), "adapter_type": ("full_adapter", "full_adapter_xl", "light_adapter")},
    "text": {"model_type": ("clip_text_model",), "hidden_act": ("quick_gelu", "gelu"), **CLIP},
    "vision": {"model_type": ("clip_vision_model",), "hidden_act": ("quick_gelu",), **CLIP},
    "scheduler": {
        "num_train_timesteps": (1000,),
        "original_inference_steps": (50,),
        "prediction_type": ("epsilon", "v_prediction", "sample"),
        "sigma_max": (None,),
        "sigma_min": (None,),
        "thresholding": (False,),
        "timestep_scaling": (10,),
        "timestep_spacing": ("leading", "linspace", "trailing"),
        "timestep_type": ("discrete",),
        "use_dynamic_shifting": (False,),
        "use_flow_sigmas": (False,),
    },
}
FLOW: dict[str, Values] = {  # the families' own schedules
    "num_train_timesteps": (1000,),
    "shift": (1, 3),
    "use_dynamic_shifting": (True, False),
    "base_image_seq_len": (256,),
    "max_image_seq_len": (4096,),
    "base_shift": (0.5,),
    "max_shift": (1.15,),
    "invert_sigmas": (False,),
    "shift_terminal": (None,),
    "stochastic_sampling": (False,),
}
# Told by the shapes, of training, of precision, of defaults in no use here, or read elsewhere in this file.
_INERT = """
    adapter_type addition_embed_type_num_heads architectures attention_dropout attention_head_dim block_out_channels
    bos_token_id channels chunk_size_feed_forward conditioning_channels conditioning_embedding_out_channels
    cross_attention_dim decay decoder_block_out_channels downscale_factor dropout dtype encoder_block_out_channels
    force_upcast global_pool_conditions gradient_checkpointing hidden_size id2label image_size in_channels
    initializer_factor initializer_range intermediate_size inv_gamma is_encoder_decoder label2id latent_channels
    latent_magnitude latent_shift layers_per_block max_position_embeddings mid_block_add_attention min_decay
    num_attention_heads num_channels num_class_embeds num_decoder_blocks num_encoder_blocks num_hidden_layers
    num_res_blocks num_vq_embeddings only_cross_attention optimization_step out_channels output_attentions
    output_hidden_states pad_token_id patch_size power problem_type projection_class_embeddings_input_dim projection_dim
    return_dict reverse_transformer_layers_per_block sample_size scaling_factor time_cond_proj_dim time_embedding_dim
    torch_dtype transformer_layers_per_block transformers_version upcast_attention update_after_step use_ema_warmup
    use_linear_projection use_post_quant_conv use_quant_conv vocab_size vq_embed_dim
    beta_end beta_schedule beta_start rescale_betas_zero_snr trained_betas
    algorithm_type clip_sample clip_sample_range disable_corrector dynamic_thresholding_ratio euler_at_final
    final_sigmas_type flow_shift interpolation_type lambda_min_clipped lower_order_final noise_sampler_seed predict_x0
    sample_max_value set_alpha_to_one skip_prk_steps solver_order solver_p solver_type steps_offset time_shift_type
    use_beta_sigmas use_exponential_sigmas use_karras_sigmas use_lu_lambdas variance_type
"""
INERT = frozenset(_INERT.split())
# A key that only this kind of network has, in the format of diffusers or transformers.  The first match wins.
KINDS = {
    "controlnet_cond_embedding.conv_in.weight": "control",
    "time_embedding.linear_1.weight": "unet",
    "decoder.conv_in.weight": "vae",
    "decoder.layers.0.weight": "tiny",
    "adapter.conv_in.weight": "adapter",
    "vision_model.embeddings.patch_embedding.weight": "vision",
    "text_model.embeddings.token_embedding.weight": "text",
    "embeddings.token_embedding.weight": "text",
}


def read_network(place: str, config: Config, shapes: Shapes) -> dict[str, str]:
    """Return the metadata in a network's config.json, for a file with these shapes in the format of diffusers.

    Raises ValueError for a setting that is not implemented, naming it.
    """
    kind = next((kind for key, kind in KINDS.items() if key in shapes), None)
    if kind is None:
        return {}
    if kind == "text" or kind == "vision":
        nested = config.get(f"{kind}_config")  # of a whole CLIP
        config = config if not isinstance(nested, dict) else {key: nested[key] for key in nested.keys() & CLIP_KEYS}
    shifted = kind == "vae" and not any("quant_conv." in key for key in shapes)
    check(place, config, IMPLEMENTED[kind] | (SHIFTS if shifted else {}))
    found: dict[str, object] = {"global_pool_conditions": config.get("global_pool_conditions")}
    if kind in ("unet", "control"):
        _check_only_cross(place, config, shapes)
        found |= _heads(place, config)
        size = config.get("sample_size")
        found["sample_size"] = _number(place, "sample_size", size, whole=True) if isinstance(size, int) else None
    elif kind in ("vae", "tiny") and config.get("scaling_factor") is not None:
        found["scaling_factor"] = _number(place, "scaling_factor", config["scaling_factor"])
    elif kind == "text":
        heads = config.get("num_attention_heads")
        found |= {"hidden_act": config.get("hidden_act"), "text_activation": config.get("hidden_act")}
        found["text_num_heads"] = None if heads is None else _number(place, "num_attention_heads", heads, whole=True)
    return {key: str(value) for key, value in found.items() if value is not None}


CLIP_KEYS = {"num_attention_heads", *IMPLEMENTED["text"]}
# The metadata of each role's network, which follow it when it replaces another's.
OWN = {
    "unet": ("unet_num_heads", "unet_head_dim", "sample_size"),
    "vae": ("scaling_factor",),
    "text_encoder": ("text_activation", "text_num_heads", "text_skip"),
    "text_encoder_2": ("text_2_activation", "text_2_num_heads"),
}


def metadata_of(role: str, about: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of the network of this role, of all in its file or folder."""
    return {name: about[name] for name in OWN.get(role, ()) if name in about}


def check(place: str, config: Config, implemented: Mapping[str, Values]) -> None:
    """Raise ValueError for a setting with another value than those implemented; warn of unknown settings."""
    unknown = []
    for key, value in config.items():
        if key in implemented:
            parts = value if key.endswith("_types") and isinstance(value, list) else [value]
            if wrong := [part for part in parts if part not in implemented[key]]:
                wanted = " or ".join(json.dumps(each) for each in implemented[key])
                raise ValueError(f"{place}: its {key} {_short(wrong[0])} is not supported: wanted {wanted}")
        elif key not in INERT and not key.startswith("_") and value is not None and value is not False:
            unknown.append(f"{key} {_short(value)}")
    if unknown:
        log.warning("%s: ignored unknown settings: %s", place, ", ".join(unknown))


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


def _number(place: str, key: str, value: object, whole: bool = False) -> float | int:
    """Return a positive number from a configuration.  Raises ValueError for anything else."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise ValueError(f"{place}: its {key} cannot be {_short(value)}: wanted a number above 0")
    return value


def _heads(place: str, config: Config) -> dict[str, object]:
    """Return the number of attention heads or their width; attention_head_dim is the number, for historical reasons."""
    given = config.get("attention_head_dim")
    if given is None:
        return {}
    if not isinstance(given, list):
        return {"unet_num_heads": _number(place, "attention_head_dim", given, whole=True)}
    heads = [_number(place, "attention_head_dim", each, whole=True) for each in given]
    widths = config.get("block_out_channels")
    if len(set(heads)) == 1:
        return {"unet_num_heads": heads[0]}
    if isinstance(widths, list) and len(widths) == len(heads):
        sizes = {_number(place, "block_out_channels", width) / num for width, num in zip(widths, heads, strict=True)}
        if len(sizes) == 1 and (size := sizes.pop()) == int(size):
            return {"unet_head_dim": int(size)}
    raise ValueError(
        f"{place}: its attention_head_dim {_short(given)} is not supported: wanted one number of heads, or one width "
        "of heads, for all levels"
    )


def _check_only_cross(place: str, config: Config, shapes: Shapes) -> None:
    """Raise ValueError unless only_cross_attention is what the shapes tell: keys as wide as the text."""
    given = config.get("only_cross_attention", False)
    levels = given if isinstance(given, list) else [given] * 20
    for level, only in enumerate(levels):
        inside = f"down_blocks.{level}.attentions.0.transformer_blocks.0.attn1.to_"
        query, key = shapes.get(f"{inside}q.weight"), shapes.get(f"{inside}k.weight")
        if query and key and bool(only) != (query[-1] != key[-1]):
            raise ValueError(f"{place}: its only_cross_attention {_short(given)} is not what its weights are made for")


# ---- schedulers -----------------------------------------------------------------------------------------------------

# Schedulers of the same noise process whose solvers are not here; the family's own sampler takes their place.
NOT_HERE = ("DDIMParallelScheduler", "DDPMParallelScheduler", "DPMSolverSinglestepScheduler", "SASolverScheduler")
SOLVED_BY_DDIM = ("DDIMScheduler", "DDIMParallelScheduler", "PNDMScheduler")
SCHEDULES = ("beta_start", "beta_end", "beta_schedule")


def read_scheduler(place: str, config: Config, pipeline: str) -> dict[str, str]:
    """Return the metadata in a scheduler_config.json: prediction, noise schedule, spacing, zero terminal SNR, solver.

    `pipeline` is the class of the pipeline.  Raises ValueError for another noise process and settings not implemented.
    """
    if not config:
        return {}
    name, spacing = str(config.get("_class_name")), config.get("timestep_spacing")
    if name == "FlowMatchEulerDiscreteScheduler" and pipeline.startswith("ZImage"):
        check(place, config, FLOW | {"shift": (3, 6), "use_dynamic_shifting": (False,)})
        return {"family": "z_image" if config.get("shift") == 6 else "z_image_turbo"}  # what the weights do not tell
    if name == "FlowMatchEulerDiscreteScheduler" and pipeline.startswith(("Flux", "StableDiffusion3")):
        check(place, config, FLOW)
        return {}
    sampler = _sampler(place, name, config)
    check(place, config, IMPLEMENTED["scheduler"])
    _tell_unused(place, name, config, fixed="XL" not in pipeline)
    found = {key: config.get(key) for key in SCHEDULES}
    found |= {"prediction": config.get("prediction_type"), "scheduler": f"{name}, {spacing}"}
    if config.get("trained_betas") is not None:
        found["trained_betas"] = json.dumps(config["trained_betas"])
    if config.get("rescale_betas_zero_snr"):
        found["zero_snr"] = "yes"
    clean = config.get("set_alpha_to_one")
    if spacing == "trailing":
        found["spacing"] = "trailing_to_0" if name in SOLVED_BY_DDIM and clean is False else "trailing"
    elif spacing == "leading" and name in SOLVED_BY_DDIM and clean is True:
        found["spacing"] = "leading_clean"
    if sampler in ("lcm", "tcd"):
        found["sampler"] = sampler
        found.pop("spacing", None)
    elif sampler not in (None, "ddim"):
        log.info('%s: its %s is `sampler="%s"`; the default is the family\'s own sampler', place, name, sampler)
    return {key: str(value) for key, value in found.items() if value is not None}


def _sampler(place: str, name: str, config: Config) -> str | None:
    """Return the name here of a scheduler's solver; None if it is not here.  Raises ValueError for another process."""
    if name in (*NOT_HERE, "None"):
        return None
    try:
        key, _ = resolve(name)
    except ValueError as error:
        raise ValueError(
            f"{place}: {_short(name)} is not supported: wanted a scheduler of a variance-preserving process, such "
            "as DDIMScheduler, EulerDiscreteScheduler or LCMScheduler"
        ) from error
    ends = (end for end in ("karras", "exponential", "beta") if config.get(f"use_{end}_sigmas"))
    return " ".join([key, *ends])


def _tell_unused(place: str, name: str, config: Config, fixed: bool) -> None:
    """Warn of settings of a DDIM scheduler that the sampler here has not.

    `fixed` = diffusers' pipeline overrides clip_sample and steps_offset itself, with the values that are used here.
    """
    unused: dict[str, Values] = {"timestep_spacing": ("linspace",)}
    if not fixed:
        unused |= {"clip_sample": (True,), "steps_offset": (0,)}
    found = [f"{key} {_short(config[key])}" for key, values in unused.items() if config.get(key) in values]
    if found and name in SOLVED_BY_DDIM:
        log.warning("%s: ignored %s, which DDIM has not here", place, " and ".join(found))


# ---- pipelines and tokenizers ---------------------------------------------------------------------------------------

PIPELINES = (
    frozenset(
        f"{family}{name}Pipeline"
        for family in ("Flux", "StableDiffusion3", "ZImage")
        for name in ("", "Img2Img", "Inpaint", "Fill", "Control")
    )
    | frozenset(
        f"StableDiffusion{name}Pipeline"
        for name in (
            *("", "Img2Img", "Inpaint", "InpaintLegacy", "InstructPix2Pix", "Depth2Img", "Upscale", "XL", "XLImg2Img"),
            *(
                "XLInpaint",
                "ControlNet",
                "ControlNetImg2Img",
                "ControlNetInpaint",
                "XLControlNet",
                "XLControlNetImg2Img",
            ),
            *("XLControlNetInpaint", "Adapter", "XLAdapter", "XLInstructPix2Pix"),
        )
    )
    | {
        "LatentConsistencyModelPipeline",
        "LatentConsistencyModelImg2ImgPipeline",
        "FluxKontextPipeline",
        "StableUnCLIPImg2ImgPipeline",
        "AutoPipelineForText2Image",
        "DiffusionPipeline",
        "None",
    }
)


def check_pipeline(place: str, index: Config, roles: Collection[str]) -> None:
    """Warn of what a model_index.json asks for beyond the networks of these roles."""
    name = str(index.get("_class_name"))
    if name not in PIPELINES:
        log.warning("%s: is of %s, which ldm_lite does not know: only its networks are used", place, _short(name))
    if index.get("force_zeros_for_empty_prompt") is False and {"text_encoder", "text_encoder_2"} <= set(roles):
        log.warning('%s: its unconditional text is the empty prompt: give `negative_prompt=""`', place)


END = "<|endoftext|>"


def check_tokenizer(place: str, files: Sequence[Config], open_clip: bool, length: int | None) -> None:
    """Raise ValueError if a tokenizer pads with another token, or to another length, than the one here."""
    pads = [pad["content"] if isinstance(pad, dict) and "content" in pad else pad for pad in _all(files, "pad_token")]
    wanted = "!" if open_clip else END
    if open_clip and pads and all(pad == END for pad in pads):
        log.warning("%s: pads prompts with %s; here they are padded with ! as in the original", place, END)
    elif pads and wanted not in pads:
        raise ValueError(f"{place}: its pad_token {_short(pads[0])} is not supported: wanted {_short(wanted)}")
    lengths = [each for each in _all(files, "model_max_length") if isinstance(each, int) and each < 10**6]
    if length is not None and lengths and length not in lengths:
        raise ValueError(f"{place}: its model_max_length {lengths[0]} is not supported: wanted {length}")
    names = _all(files, "tokenizer_class")
    if names and not str(names[0]).startswith("CLIPTokenizer"):
        raise ValueError(f"{place}: its tokenizer_class {_short(names[0])} is not supported: wanted CLIPTokenizer")


def _all(files: Sequence[Config], key: str) -> list[Any]:
    return [file[key] for file in files if file.get(key) is not None]
