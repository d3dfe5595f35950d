"""Make tests/data/qwen_image_edit.npz: what diffusers' pipelines for Qwen-Image-Edit and transformers compute.

    pip install diffusers transformers peft
    PYTHONPATH=tests/fixtures:tests/goldens python tests/goldens/make_qwen_image_edit_goldens.py

The networks are those of make_qwen_image_goldens.py, but for a vision transformer of 8 layers, of which the last
attends to whole images.  Whole runs are diffusers' QwenImageEditPipeline, and QwenImageEditPlusPipeline with two
images, without and with `zero_cond_t` (2511), from prompts and images to pixels.  What is changed in them: images have
a 64th of the pixels; the processor is transformers' without its video part, which needs torchvision; the text encoder
is told which tokens are images', which diffusers 0.42 leaves to it, as transformers 4 did it: transformers 5 without it
gives them the positions of a text.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import make_qwen_image_goldens as plain
import numpy as np
import torch
import toy
import toy_qwen_image
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from family_goldens import shapes_of
from making import DATA, Arrays, made_with, write
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ldm_lite.models.qwen25_vl import VISION

TOY = toy_qwen_image
PICTURES = TOY.pictures()


def vision(spec: Any) -> dict[str, Any]:
    """transformers' settings of a vision transformer."""
    return {
        "depth": spec.layers,
        "hidden_size": spec.width,
        "num_heads": spec.heads,
        "intermediate_size": spec.mlp_width,
        "out_hidden_size": spec.output_width,
        "fullatt_block_indexes": list(spec.full_attention),
    }


def processor(tokenizer: Any) -> Any:
    """What transformers' Qwen2_5_VLProcessor does with texts and images; with a lower limit than the release's."""
    of_images = Qwen2VLImageProcessorPil(min_pixels=28**2, max_pixels=12845056)

    def process(text: Sequence[str], images: Any, padding: bool, return_tensors: str) -> Any:
        seen = of_images(images=images, return_tensors=return_tensors)
        counts = iter((seen["image_grid_thw"].prod(1) // 4).tolist())
        parts = [part.split("<|image_pad|>") for part in text]
        texts = [first + "".join("<|image_pad|>" * next(counts) + part for part in rest) for first, *rest in parts]
        return transformers.BatchFeature({**tokenizer(texts, padding=padding, return_tensors=return_tensors), **seen})

    return process


def pipelines(folder: Path) -> list[Any]:
    """diffusers' pipelines of the first Edit, 2509 and 2511, with the same weights."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(TOY.write_tokenizer(folder)), pad_token="<|endoftext|>", padding_side="right"
    )
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    with torch.no_grad():
        base = plain.pipeline(folder)
    config = base.text_encoder.config.to_dict() | {"vision_config": vision(TOY.VISION), "image_token_id": image}
    text = toy.fill(
        transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**config)), "text_encoder."
    )
    forward = text.forward

    def told(input_ids: Tensor, **others: Any) -> Any:
        return forward(input_ids=input_ids, mm_token_type_ids=(input_ids == image).int(), **others)

    text.forward = told
    results = []
    for kind, clean in (
        (diffusers.QwenImageEditPipeline, False),
        (diffusers.QwenImageEditPlusPipeline, False),
        (diffusers.QwenImageEditPlusPipeline, True),
    ):
        network = diffusers.QwenImageTransformer2DModel(**plain.SIZES, zero_cond_t=clean)
        pipe = kind(
            scheduler=base.scheduler,
            vae=base.vae,
            text_encoder=text,
            tokenizer=tokenizer,
            processor=None,
            transformer=toy.fill(network, "transformer."),
        )
        pipe.processor = processor(tokenizer)
        before, _ = pipe.prompt_template_encode.split("<|im_start|>user\n")
        pipe.prompt_template_encode_start_idx = len(tokenizer(before + "<|im_start|>user\n").input_ids)
        results.append(pipe)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        theirs = module.calculate_dimensions
        module.calculate_dimensions = lambda area, ratio, theirs=theirs: theirs(area / TOY.LESS, ratio)
    return results


def runs(pipes: list[Any]) -> Arrays:
    """Texts with images, and whole runs."""
    prompt, arrays = TOY.PROMPTS[0], Arrays()
    images: list[Image.Image]
    for name, pipe, images in zip(("first", "2509", "2511"), pipes, (PICTURES[:1], PICTURES, PICTURES), strict=True):
        more = {"num_inference_steps": TOY.STEPS, "true_cfg_scale": TOY.GUIDANCE, "height": 32, "width": 48}
        more |= {"negative_prompt": TOY.NEGATIVE, "latents": plain.packed(toy.normal(1, 1, 16, 4, 6))}
        texts: list[Tensor] = []
        encode = pipe.encode_prompt

        def noted(*args: Any, texts: list[Tensor] = texts, encode: Any = encode, **others: Any) -> Any:
            texts.append(encode(*args, **others)[0])
            return texts[-1], None

        pipe.encode_prompt = noted
        shown = images[0] if name == "first" else list(images)
        arrays[f"run.{name}"] = pipe(image=shown, prompt=prompt, output_type="pt", **more).images
        if name != "2511":
            arrays[f"text.{name}"] = texts[0][..., ::4].contiguous()
    for pipe, shown, size in zip(pipes, (PICTURES[0], list(PICTURES)), TOY.SIZES, strict=False):
        assert pipe(image=shown, prompt=prompt, num_inference_steps=2).images[0].size == size
    return arrays


def wide_block() -> Arrays:
    """transformers' vision block of the released width, on windows of an image of 10 x 12 patches."""
    config = transformers.Qwen2_5_VLConfig(vision_config=vision(VISION)).vision_config
    block = toy.fill(modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock(config))
    grid = torch.tensor([[1, 10, 12]])
    order, ends = modeling_qwen2_5_vl.get_vision_window_index(grid, 2, config.window_size, config.patch_size)
    rotary = modeling_qwen2_5_vl.Qwen2_5_VLVisionRotaryEmbedding(config)
    x = toy.normal(1, 1, 120, config.hidden_size)[0]  # row by row
    by_token = torch.arange(120).view(5, 2, 6, 2).transpose(1, 2).reshape(30, 4)[order].flatten()
    rows, columns = torch.arange(120) // 12, torch.arange(120) % 12
    rotation = rotary(x, torch.stack([rows, columns], dim=1)[by_token])
    out = torch.empty_like(x)
    out[by_token] = block(x[by_token], cu_seqlens=ends, position_embeddings=rotation)
    return {"wide": out[:, ::48].contiguous()}


def main() -> None:
    """The command line."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        pipes = pipelines(Path(folder))
        arrays = runs(pipes)
        seen = pipes[0].text_encoder.model.visual
        inputs = Qwen2VLImageProcessorPil()(images=[Image.fromarray(toy.photo(140, 252))], return_tensors="pt")
        assert inputs["image_grid_thw"].tolist() == [[1, 10, 18]]
        arrays["vision"] = seen(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
        arrays |= wide_block()
    about, shapes = made_with((torch, diffusers, transformers)), json.dumps(shapes_of(pipes[0]))
    write(DATA / "qwen_image_edit.npz", arrays, torch.float32, about, shapes=np.array(shapes))


if __name__ == "__main__":
    main()
