"""Other programs' names for our options: one table, for hints and for docs/coming-from.md.

A row has the names that people type, as they are in Python (flags have - for _), and what to use in their place, with
our options in backticks.  Nothing imports this file at its top: it is read when a name is unknown.
"""

import dataclasses
import difflib
import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

NOTHING = "there is no such option here: leave it out"
FLASH = "leave it out: PyTorch's fast attention is the default (`attention` chooses another)"
KNOWN = "leave it out: the checkpoint says what it is"

TABLES: dict[str, dict[str, str]] = {
    "diffusers": {
        "num_inference_steps": "`steps`",
        "guidance_scale true_cfg_scale": "`scale`",
        "image_guidance_scale": "`image_scale`",
        "num_images_per_prompt": "`batch_size`, for a single prompt",
        "generator": "`seed=N`, with `noise=diffusers` for the same noise",
        "latents": "`noise`, of unit variance (N,C,h,w)",
        "output_type": "`output`: pil, numpy, tensor or result",
        "return_dict": "leave it out: the result is a list of images",
        "callback_on_step_end callback": "`on_step`, a function of a State (step, latents, x0)",
        "callback_steps callback_on_step_end_tensor_inputs": "leave it out: `on_step` gets every step's latents and x0",
        "image": "`init_img`",
        "mask_image": "`mask`",
        "padding_mask_crop": "`only_masked`",
        "control_image control_guidance_start control_guidance_end controlnet_conditioning_scale controlnet": (
            "`control`: FILE:IMAGE:WEIGHT:START-END, or in Python a Control"
        ),
        "guess_mode": "`control=FILE:IMAGE:guess`",
        "ip_adapter_image image_encoder": "`control=FILE:IMAGE`, with `clip_vision=FILE`",
        "cross_attention_kwargs joint_attention_kwargs attention_kwargs": "`lora=FILE:WEIGHT`",
        "prompt_embeds pooled_prompt_embeds": "`cond`, which pipe.encode_prompt makes",
        "negative_prompt_embeds negative_pooled_prompt_embeds": "`uncond`, which pipe.encode_prompt makes",
        "prompt_2 prompt_3": "leave it out: all text encoders read `prompt`",
        "negative_prompt_2 negative_prompt_3": "leave it out: all text encoders read `negative_prompt`",
        "sigmas timesteps": "`spacing`, by name, in Python also a function of (schedule, steps)",
        "denoising_end denoising_start": "`refiner_start`, with `refiner=FILE`",
        "crops_coords_top_left": "`crop_top_left`",
        "skip_layer_guidance_scale": "`skip_layer_scale`",
        "clean_caption": "leave it out: prompts are always cleaned",
        "torch_dtype": "`dtype`",
        "device_map": "`device`, or `offload=model`",
        "quantization_config load_in_8bit": "`storage=int8`",
        "scheduler": "`sampler` for the method, `spacing` for karras and the like",
        "variant subfolder weight_name": "leave it out: name the file, owner/repository/FILE",
        "original_config original_config_file": KNOWN,
        "cache_dir token local_files_only": "leave it out: set HF_HOME, HF_TOKEN or HF_HUB_OFFLINE=1",
        "safety_checker requires_safety_checker feature_extractor use_safetensors low_cpu_mem_usage": (
            "leave it out: nothing here needs it"
        ),
    },
    "AUTOMATIC1111 and Forge": {
        "cfg_scale cfg distilled_cfg_scale": "`scale`",
        "sampling_steps num_steps": "`steps`",
        "sampler_name sampling_method sampler_index": "`sampler`",
        "schedule_type": "`spacing`",
        "batch_count": "`n_iter`",
        "negative neg": "`negative_prompt`",
        "subseed": "`variation_seed`",
        "subseed_strength": "`variation_strength`",
        "eta_noise_seed_delta": "`ensd`",
        "randn_source": "`noise=a1111`",
        "s_churn": "`churn`",
        "clip_stop_at_last_layers": "`clip_skip`",
        "tiling": "`seamless=xy`",
        "init_images input_image": "`init_img`",
        "denoising_strength": "`strength`",
        "denoising_strength hires_denoising_strength": "`hires_strength`",
        "image_cfg_scale": "`image_scale`",
        "resize_mode": "`resize`: stretch (0), crop (1) or fit (2)",
        "mask_blur": "`feather`",
        "inpainting_fill": "`masked_content`: fill (0), original (1), noise (2) or nothing (3)",
        "inpaint_full_res inpaint_full_res_padding": "`only_masked=PADDING`",
        "inpainting_mask_invert": "`invert_mask`",
        "enable_hr hr_scale hires_scale hires_upscale hires_fix": "`hires=2`, the factor",
        "hr_resize_x hr_resize_y": "`hires=2`, a factor in place of a size",
        "hr_upscaler": "`hires_upscaler`, or `hires_esrgan=FILE` for a network",
        "hr_second_pass_steps": "`hires_steps`",
        "hr_sampler_name hr_scheduler": "`hires_sampler`, such as 'DPM++ 2M Karras'",
        "hr_prompt": "`hires_prompt`",
        "hr_negative_prompt": "`hires_negative_prompt`",
        "refiner_checkpoint": "`refiner=FILE`",
        "refiner_switch_at": "`refiner_start`",
        "sd_model_checkpoint checkpoint model model_path": "`ckpt=FILE`",
        "sd_vae vae_path": "`vae=FILE`",
        "do_not_save_samples": "`skip_save`",
        "do_not_save_grid": "`skip_grid`",
        "outpath_samples outpath_grids outdir_samples": "`out`",
        "styles": "leave it out: write the style into `prompt`",
        "script_name": "`x` and `y`, which draw an X/Y plot",
        "alwayson_scripts override_settings restore_faces hr_checkpoint_name seed_resize_from_h seed_resize_from_w": (
            NOTHING
        ),
        "s_tmin s_tmax s_noise s_min_uncond token_merging_ratio initial_noise_multiplier hypernetwork": NOTHING,
    },
    "Launch flags (AUTOMATIC1111, Forge, ComfyUI)": {
        "lowvram novram always_low_vram always_no_vram": "`offload=sequential`, or the faster `offload=model`",
        "medvram medvram_sdxl always_offload_from_vram": "`offload=model`",
        "highvram normalvram gpu_only always_gpu always_high_vram always_normal_vram lowram": (
            "leave it out: networks stay on the device without `offload`"
        ),
        "xformers force_enable_xformers xformers_flash_attention disable_xformers opt_sdp_attention": FLASH,
        "opt_sdp_no_mem_attention attention_pytorch use_pytorch_cross_attention use_flash_attention": FLASH,
        "enable_xformers_memory_efficient_attention sdpa use_sage_attention": FLASH,
        "opt_split_attention opt_split_attention_v1 opt_sub_quad_attention opt_split_attention_invokeai": (
            "`attention=sliced:8`"
        ),
        "use_split_cross_attention use_quad_cross_attention attention_split attention_quad": "`attention=sliced:8`",
        "no_half force_fp32 all_in_fp32 fp32": "`dtype=fp32`",
        "no_half_vae fp32_vae vae_in_fp32": "`dtype=fp16,vae=fp32`",
        "force_fp16 all_in_fp16 fp16_unet unet_in_fp16 fp16 half": "`dtype=fp16`",
        "bf16_unet unet_in_bf16 bf16": "`dtype=bf16`",
        "bf16_vae vae_in_bf16": "`dtype=fp16,vae=bf16`",
        "fp8_e4m3fn_unet unet_in_fp8_e4m3fn fp8": "`storage=fp8`",
        "precision": "`dtype=fp32` in place of full; autocast is the default",
        "use_cpu cpu always_cpu": "`device=cpu`",
        "device_id cuda_device gpu_device_id": "`device=cuda:N`",
        "listen server_name": "`host=0.0.0.0`",
        "api nowebui webui": "leave it out: the server has its page and its API",
        "api_auth gradio_auth gradio_auth_path": "`api_key`",
        "ckpt_dir": "`models=DIR`",
        "lora_dir": "`loras=DIR`",
        "embeddings_dir": "`embeddings=DIR`",
        "controlnet_dir": "`controlnets=DIR`",
        "esrgan_models_path realesrgan_models_path": "`upscalers=DIR`",
        "preview_method": "`preview=FILE`, a small autoencoder such as taesd",
        "output_directory": "`out`",
        "autolaunch auto_launch": "leave it out: open the address that the server prints",
        "skip_torch_cuda_test": "leave it out: without a GPU the CPU is used",
        "share ngrok theme vae_dir tls_keyfile tls_certfile cors_allow_origins enable_cors_header subpath": NOTHING,
        "disable_nan_check upcast_sampling opt_channelslast force_channels_last deterministic directml": NOTHING,
        "skip_install skip_version_check skip_python_version_check no_hashing update_check cuda_malloc": NOTHING,
    },
    "Everywhere": {
        "size image_size resolution": "`width` and `height`",
        "n batch count num_images num_outputs num_samples n_images": "`batch_size`",
        "output output_path output_dir save_path": "`out`",
        "path file filename checkpoint_path ckpt_path model_id repo_id": "`ckpt=FILE`",
        "loras lora_path lora_weights lora_scale": "`lora=FILE:WEIGHT`",
        "random_seed": "`seed`",
    },
    "ComfyUI": {
        "cfg": "`scale`",
        "noise_seed": "`seed`",
        "sampler_name": "`sampler`",
        "positive text": "`prompt`",
        "negative": "`negative_prompt`",
        "denoise": "`strength`",
        "latent_image": "`width` and `height`, or an image for img2img",
        "start_at_step end_at_step": "`refiner_start`, with `refiner=FILE`",
        "add_noise": "leave it out: in Python pipe.denoise starts from any latents, with noise or without",
        "return_with_leftover_noise": "leave it out: in Python pipe.stream gives the latents after every step",
        "ckpt_name": "`ckpt=FILE`",
        "unet_name": "`unet=FILE`",
        "vae_name": "`vae=FILE`",
        "clip_name clip_name1 clip_name2 clip_name3": "`text_encoder=FILE`, once for each",
        "lora_name strength_model": "`lora=FILE:WEIGHT`",
        "strength_clip": "`lora=FILE:te=WEIGHT:unet=WEIGHT`",
        "stop_at_clip_layer": "`clip_skip`, without the minus: -2 is 2",
        "control_net control_net_name style_model_name start_percent end_percent": (
            "`control=FILE:IMAGE:WEIGHT:START-END`"
        ),
        "clip_name_vision clip_vision_name": "`clip_vision=FILE`",
        "guidance": "`scale`",
        "pixels": "`init_img`",
        "noise_mask": "`mask`",
        "upscale_method": "`hires_upscaler`",
        "scale_by": "`hires`",
        "model_name upscale_model": "`hires_esrgan=FILE`",
        "noise_augmentation": "`noise_level`",
        "filename_prefix": "`out`",
        "grow_mask_by max_shift base_shift weight_dtype": NOTHING,
    },
    "Training (sd-scripts, diffusers)": {
        "max_steps train_steps num_steps": "`steps`",
        "train_batch_size": "`batch_size`, of all processes together",
        "unet_lr": "`lr`",
        "offset_noise": "`noise_offset=0.1`",
        "no_half_vae": "leave it out: the autoencoder is in float32",
        "enable_model_cpu_offload": "`offload=model`",
        "learning_rate_te learning_rate_te1 learning_rate_te2": "`text_lr`",
        "optimizer_type use_lion_optimizer use_adafactor": "`optimizer`: adamw, adamw8bit or prodigy",
        "use_8bit_adam": "`optimizer=adamw8bit`",
        "optimizer_args": "`beta1`, `beta2` and `weight_decay`",
        "lr_scheduler_type": "`lr_schedule`: constant, linear or cosine",
        "instance_prompt": "`caption`, for images without a caption of their own",
        "num_class_images": "`class_data=DIR`, or `class_prompt` alone",
        "with_prior_preservation": "`class_data=DIR`, or `class_prompt` alone",
        "alpha_mask masked_loss": "`masked`: NAME.mask.png beside NAME.png, or its alpha",
        "conditioning_data_dir conditioning_image_column": "`stage=control`: NAME.hint.png beside NAME.png",
        "dataset_name in_json jsonl_for_train load_from_disk streaming": "`data`, a folder of captioned images",
        "dataset_config config_file": "leave it out: give its entries as options, `data` first",
        "caption_extension caption_extention caption_column image_column": (
            "leave it out: NAME.txt, NAME.caption and .jsonl are read"
        ),
        "dataset_repeats repeats": "leave it out: a folder 10_name in `data` is repeated ten times",
        "center_crop": "leave it out: images are always centre-cropped (`buckets` crops less)",
        "network_module": "`lora_rank`, with `lora_kind` for dora, loha and lokr",
        "network_args": "`lora_conv` for conv_dim, `lora_kind` for algo, `lokr_factor` for factor",
        "use_dora": "`lora_kind=dora`",
        "network_train_unet_only": "leave it out: text encoders are trained only with `lora_text`",
        "train_text_encoder": "`lora_text` for a LoRA, `train_text` for a whole model",
        "base_weights": "`lora=FILE:WEIGHT`",
        "debiased_estimation_loss": "`weighting=debiased`",
        "timestep_sampling weighting_scheme": "`flow_sampling`: logit_normal or uniform",
        "mixed_precision full_bf16 full_fp16": "`dtype`: bf16, fp16 or fp32 (no)",
        "fp8_base fp8_base_unet": "`storage=fp8`",
        "blocks_to_swap": "`offload=sequential`",
        "cache_latents cache_latents_to_disk": "leave it out: latents are always kept on disk",
        "cache_text_encoder_outputs cache_text_encoder_outputs_to_disk pre_compute_text_embeddings": (
            "leave it out: `data` also takes the folder that batch --encode writes"
        ),
        "allow_tf32": "`matmul_precision=high`",
        "torch_compile dynamo_backend": "`compile_network`",
        "deepspeed zero_stage": "`fsdp`",
        "use_ema": "`ema_decay`, which is on for a whole model",
        "save_every_n_epochs save_n_epoch_ratio": "`save_every`, in steps",
        "save_steps": "`save_every`",
        "save_last_n_steps save_last_n_epochs checkpoints_total_limit": "`keep`, the number of saves",
        "save_state save_state_on_train_end": "leave it out: the state is always saved",
        "save_precision save_model_as": "leave it out: files are .safetensors in float16",
        "sample_every_n_epochs validation_epochs validation_steps": "`sample_every`, in steps",
        "sample_prompts validation_prompt validation_prompts": "`samples`, prompts with | between them",
        "validate_every_n_epochs": "`validate_every`, in steps",
        "resume_from_checkpoint": "`resume`, without a value: it continues the run in `out`",
        "output_name": "`out`, the folder of the run",
        "logging_dir tracker_project_name log_tracker_name": "leave it out: logs are in `out` (`log_to` adds others)",
        "max_token_length max_sequence_length t5xxl_max_token_length": "`tokens`",
        "tokenizer_name model_type tokenizer_*": KNOWN,
        "v2 v_parameterization": KNOWN + " (`prediction=v` if the file is wrong)",
        "prediction_type": "`prediction`: eps, v or x0, if the file is wrong",
        "zero_terminal_snr": "`zero_snr`",
        "pretrained_vae_model_name_or_path ae": "`vae=FILE`",
        "clip_l clip_g t5xxl qwen3 gemma2": "`text_encoder=FILE`",
        "pretrained_teacher_model": "`ckpt=FILE`, with `lcm`",
        "w_min w_max": "`lcm_guidance`, a single w",
        "base": "`ckpt=FILE`: training starts from a checkpoint",
        "logdir": "`out`",
        "xformers mem_eff_attn enable_xformers_memory_efficient_attention enable_npu_flash_attention": FLASH,
        "highvram lowram persistent_data_loader_workers local_rank ddp_* zero3_* offload_optimizer_* offload_param_* "
        "from_pt set_grads_to_none disable_mmap_* async_upload support_* text_encoder_batch_size dataset_* "
        "use_auth_token no_safe_serialization diffusers_xformers ccache": "leave it out: nothing here needs it",
        "color_aug random_crop face_crop_aug_range weighted_captions caption_prefix caption_suffix secondary_separator "
        "keep_tokens_separator caption_separator enable_wildcard caption_*dropout_* token_warmup_* "
        "*_dropout_rate": NOTHING,
        "multires_noise_* ip_noise_gamma* adaptive_noise_scale input_perturbation noise_offset_random_strength "
        "loss_type huber_* *v_pred* sigmoid_scale logit_* mode_scale model_prediction_type timestep_bias_* dream_* "
        "apply_*_attn_mask text_encoder_use_attention_mask *edm* precondition_outputs training_shift train_t5xxl "
        "guidance_scale clip_skip class_labels_conditioning num_extra_conditioning_channels": NOTHING,
        "*_bucket_reso bucket_reso_steps *interpolation* vae_batch_size max_train_samples adam_epsilon scale_lr "
        "lr_power lr_scheduler_* lr_decay_steps block_lr stop_text_encoder_training adam_weight_decay_text_encoder "
        "prodigy_* fused_* blockwise_* fp16_master_* upcast_* offload_ema foreach_ema split_mode": NOTHING,
        "network_train_text_encoder_only scale_weight_norms dim_from_weights base_weights_multiplier lora_* weights "
        "learnable_property use_*_template controlnet_* num_*_layers *_pos_embed pos_emb_* crops_coords_* "
        "prior_generation_precision cpu_offload_checkpointing t5xxl_device t5xxl_dtype": NOTHING,
        "push_to_hub hub_* huggingface_* resume_from_huggingface wandb_* no_metadata training_comment metadata_* log_* "
        "logging_steps sample_* initial_* skip_* num_validation_images validation_* max_validation_steps revision "
        "*_revision profile_* debug_* cache_info no_token_padding save_* output_config output_kohya_format": NOTHING,
    },
}  # fmt: skip

# What people look for in a Pipeline, * for any letters -> what there is.
OF_PIPELINE = {
    "from_pretrained from_single_file from_ckpt from_config": "use ldm_lite.load(FILE)",
    "from_pipe": "not needed: one Pipeline has txt2img, img2img, inpaint and upscale",
    "to cuda cpu half float": 'device and dtype are chosen in load: ldm_lite.load(FILE, device="cuda", dtype="fp16")',
    "generate text2img txt2image text2image run sample": "use pipe.txt2img(PROMPT)",
    "image2image image_to_image": "use pipe.img2img(PROMPT, IMAGE)",
    "outpaint": 'use pipe.inpaint(PROMPT, IMAGE, extend="left=128")',
    "load_lora_weights load_lora fuse_lora unfuse_lora unload_lora_weights set_adapters enable_lora disable_lora": (
        'use `with pipe.lora(FILE, 0.8): ...`, or ldm_lite.load(..., lora=["FILE:0.8"])'
    ),
    "load_textual_inversion": 'use pipe.txt2img(..., embedding="FILE")',
    "load_ip_adapter set_ip_adapter_scale load_controlnet": (
        "use pipe.txt2img(..., control=[ldm_lite.Control(FILE, IMAGE, weight=0.8)])"
    ),
    "enable_model_cpu_offload enable_group_offload": 'use ldm_lite.load(..., offload="model")',
    "enable_sequential_cpu_offload": 'use ldm_lite.load(..., offload="sequential")',
    "enable_attention_slicing set_attention_slice": 'use ldm_lite.load(..., attention="sliced:8")',
    "enable_vae_tiling enable_vae_slicing": "use ldm_lite.load(..., vae_tiling=True)",
    "enable_freeu": 'use pipe.txt2img(..., freeu="1.5,1.6,0.9,0.2")',
    "enable_xformers_memory_efficient_attention fuse_qkv_projections enable_*": (
        "not needed, or an option of ldm_lite.load: help(ldm_lite.load)"
    ),
    "disable_*": "not needed: it is off unless you ask load or txt2img for it",
    "set_progress_bar_config progress_bar": "use pipe.txt2img(..., progress=True)",
    "scheduler": 'the sampler is chosen in each call: pipe.txt2img(..., sampler="DPM++ 2M Karras")',
    "transformer model diffusion_model": "the network that denoises is pipe.unet",
    "components": "the networks are pipe.networks",
    "config": "the model's settings are in pipe.family",
    "safety_checker feature_extractor watermark": "there is none here",
    "vae_scale_factor": "it is pipe.vae.spec.factor",
    "image_processor": "images go in as paths, PIL, arrays or tensors, and come out as `output` says",
}
OF_PACKAGE = {  # and in the package
    "*Pipeline AutoPipelineFor* StableDiffusion*": "use ldm_lite.load(FILE), whatever the model",
    "from_pretrained from_single_file load_checkpoint load_model": "use ldm_lite.load(FILE)",
    "*Scheduler": 'samplers are names: pipe.txt2img(..., sampler="DPM++ 2M Karras")',
    "ControlNetModel T2IAdapter": "use ldm_lite.Control(FILE, IMAGE)",
    "AutoencoderKL AutoencoderTiny": "use ldm_lite.load(..., vae=FILE)",
    "UNet2DConditionModel *Transformer2DModel": "use ldm_lite.load(..., unet=FILE)",
    "CLIPTextModel T5EncoderModel": "use ldm_lite.load(..., text_encoder=FILE)",
}
VALUES = {  # an option that has choices -> values of other programs, in lower case, and what to use
    "lr_schedule": {
        "cosine_with_restarts": "`lr_schedule=cosine`, with `lr_cycles=N`",
        "constant_with_warmup": "`lr_schedule=constant`, with `warmup=STEPS`",
    },
    "lora_kind": {"locon": "`lora_kind=lora`, with `lora_conv=RANK`"},
    "prediction": {"epsilon": "`prediction=eps`", "v_prediction": "`prediction=v`", "sample": "`prediction=x0`"},
    "output": {"np": "`output=numpy`", "pt": "`output=tensor`", "latent": "pipe.stream, whose states have latents"},
    "resize": {"0": "`resize=stretch`", "1": "`resize=crop`", "2": "`resize=fit`"},
    "masked_content": {
        "0": "`masked_content=fill`",
        "1": "`masked_content=original`",
        "2": "`masked_content=noise`",
        "3": "`masked_content=nothing`",
    },
}
COMMANDS = {  # our command -> other programs' names for it
    "serve": "webui ui gui app server api launch",
    "txt2img": "generate sample text2img txt2image text2image image",
    "img2img": "edit edit_cli instruct_pix2pix image2image",
    "inpaint": "outpaint",
    "train": "finetune fine_tune lora dreambooth train_network sdxl_train_network train_db train_text_to_image "
    "train_text_to_image_lora train_dreambooth train_dreambooth_lora textual_inversion train_controlnet",
}
PYTHON = {"init_img": "image", "ckpt": "source"}  # options that are arguments of another name
# The function and the command that take an option which others lack.
PLACES = (
    ("ldm_lite.cli.task_options:Txt2imgOptions", "txt2img()", "txt2img"),
    ("ldm_lite.cli.task_options:Img2imgOptions", "img2img()", "img2img"),
    ("ldm_lite.cli.task_options:InpaintOptions", "inpaint()", "inpaint"),
    ("ldm_lite.cli.task_options:UpscaleOptions", "upscale()", "upscale"),
    ("ldm_lite.cli.options:LoadOptions", "load()", "txt2img"),
    ("ldm_lite.cli.options:SaveOptions", "", "txt2img"),
    ("ldm_lite.serve.options:ServeOptions", "", "serve"),
    ("ldm_lite.train.options:TrainOptions", "", "train"),
    ("ldm_lite.batch.options:BatchOptions", "", "batch"),
    ("ldm_lite.cli.command_options:CascadeOptions", "", "cascade"),
    ("ldm_lite.cli.command_options:StageOptions", "", "cascade"),
)
TRAINING = "Training (sd-scripts, diffusers)"
_OPTION = re.compile(r"`([a-z]\w*)((?:=[^`]*)?)`")  # as in console.as_flags


def advice(name: str, options: Mapping[str, str], place: str, python: bool = False, elsewhere: bool = True) -> str:
    """Return what to use in place of an unknown name, as a clause with our options in backticks, or "".

    options maps the spellings that are known there, with _, to their options; place is the name of the command or
    the function.  A name's meaning in another program comes before its spelling.  Without `elsewhere` no
    other place is named that takes such an option.
    """
    key = name.lstrip("-").replace("-", "_").replace(" ", "_")
    if key in options:
        return f"use `{options[key] if python else key}`"
    meanings = _meanings(key, place, python)
    for text in meanings:
        if _fits(text, options):
            return _clause(text)
    for text in meanings if elsewhere else ():
        missing = {target for target in targets(text) if options.get(target) != target}
        if (home := _home(missing, python)) and missing == {key}:
            break
        return f"{_clause(text)} (of {home})" if home else f"{_clause(text).replace('`', '')} (in Python)"
    if elsewhere and (home := _home({key}, python)):
        return f"it belongs to {home}"
    near = _nearest(key, [*options, *_names(options, place, python)])
    if near is None:
        return next(iter(_meanings(key, place, python, whole=False)), "")
    if near not in options:
        return advice(near, options, place, python)
    return f"did you mean `{options[near] if python else near}`?"


def of_attribute(name: str, table: Mapping[str, str]) -> str:
    """Return what to use instead of an unknown attribute, as a clause, or ""."""
    texts = (text for names, text in table.items() if any(fnmatchcase(name, known) for known in names.split()))
    return next(texts, "")


def of_value(option: str, value: object, choices: Collection[str]) -> str:
    """Return what to use in place of a value that an option does not have, or its values, as a clause."""
    text = str(value).lower()
    if text in VALUES.get(option, {}):
        return f": use {VALUES[option][text]}"
    return f": use {text}" if text in choices else f", expected one of {', '.join(choices)}"


def of_command(name: str) -> str:
    """Return the command with this name in another program, or ""."""
    key = name.removesuffix(".py").replace("-", "_").lower()
    return next((command for command, names in COMMANDS.items() if key in names.split()), "")


def targets(text: str) -> list[str]:
    """Return the options that a row names."""
    return [match[1] for match in _OPTION.finditer(text)]


def _meanings(key: str, place: str, python: bool, whole: bool = True) -> list[str]:
    """The rows for a name, by the name itself or a * in it: the trainers' first for training, otherwise last."""
    tables = sorted(TABLES, key=lambda title: (title == TRAINING) != (place == "train"))
    rows = [(names.split(), text) for title in tables for names, text in TABLES[title].items()]
    key = key.lower()
    fits = [
        text
        for names, text in rows
        if (key in names if whole else any("*" in n and fnmatchcase(key, n) for n in names))
    ]
    return [_in_python(text) if python else text for text in fits]


def _names(options: Mapping[str, str], place: str, python: bool) -> list[str]:
    """The names in the tables whose meaning is an option of the place."""
    rows = [row for title, table in TABLES.items() if title != TRAINING or place == "train" for row in table.items()]
    fitting = [names for names, text in rows if _fits(_in_python(text) if python else text, options)]
    return [name for names in fitting for name in names.split() if "*" not in name]


def _fits(text: str, options: Mapping[str, str]) -> bool:
    return all(options.get(target) == target for target in targets(text))


def _in_python(text: str) -> str:
    return _OPTION.sub(lambda match: f"`{PYTHON.get(match[1], match[1])}{match[2]}`", text)


def _clause(text: str) -> str:
    return f"use {text}" if text.startswith("`") else text


def _home(names: Collection[str], python: bool) -> str:
    """The function or the command that takes options of these names, or a single one of this spelling, or ""."""
    arguments = {argument: name for name, argument in PYTHON.items()} if python else {}
    names = {arguments.get(name, name) for name in names}
    by_name, by_alias = [], []
    for path, function, command in PLACES:
        module, _, group = path.partition(":")
        fields = dataclasses.fields(getattr(importlib.import_module(module), group))
        fields = tuple(field for field in fields if field.metadata["flag"] or (python and function))
        home = function if python and function else f"python -m ldm_lite.{command}"
        by_name += [home] * (names <= {field.name for field in fields})
        aliases = {flag[2:].replace("-", "_") for field in fields for flag in field.metadata.get("flags", ())}
        by_alias += [home] * (names <= aliases)
    return next(iter(by_name + by_alias), "")


def _nearest(key: str, names: Sequence[str]) -> str | None:
    """The name that differs from a key by a typing error: a letter or two, more of them in a long name."""
    for near in difflib.get_close_matches(key, names, n=3, cutoff=0.65):
        same = sum(block.size for block in difflib.SequenceMatcher(None, key, near).get_matching_blocks())
        slips = len(key) + len(near) - 2 * same  # a replaced letter counts twice
        if slips <= min(len(key) // 2, 3) or (len(key) > 2 and sorted(key) == sorted(near)):
            return near
    return None
