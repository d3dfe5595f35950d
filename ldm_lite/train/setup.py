"""Make the model, the dataset and the loss of a run from its options."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldm_lite import Pipeline
from ldm_lite.cli.options import LoadOptions
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.models.unet import UNet
from ldm_lite.networks import digest, token_tables, unread_parameters
from ldm_lite.toolkit import load_model
from ldm_lite.train import distributed
from ldm_lite.train.batches import Batch, in_order, reported_workers
from ldm_lite.train.control import new_control
from ldm_lite.train.data import (
    BESIDE,
    ImageFolder,
    RenderedScenes,
    beside,
    in_buckets,
    open_data,
    open_folder,
    open_renderer,
    with_hints,
)
from ldm_lite.train.embedding import Vectors
from ldm_lite.train.encoded import INDEX, EncodedDataset, encoder_digest, open_encoded, write_encoded
from ldm_lite.train.examples import Buckets, Dataset, Part
from ldm_lite.train.lora import LoRA
from ldm_lite.train.losses import ConsistencyLoss, DiffusionLoss, Loss, moments_of
from ldm_lite.train.options import TrainOptions
from ldm_lite.train.tars import TarShards
from ldm_lite.train.weighting import LearnedWeighting, Weighting, of_x0, uniform

log = logging.getLogger("ldm_lite")


def make_model(options: TrainOptions, load_options: LoadOptions) -> Pipeline:
    """Return the model to start from, in float32.  Raises ValueError, one line, if it cannot be trained here."""
    model = load_model(replace(load_options, dtype="fp32"))
    check_model(options, model)
    return model


def check_model(options: TrainOptions, model: Pipeline) -> None:
    """Raise ValueError, one line, if this model cannot be trained here."""
    family = model.family
    if not isinstance(model.vae, AutoencoderKL):
        raise ValueError(f"{family.title}: has no KL autoencoder, the only kind that can be trained with here")
    if options.lcm and (model.schedule.is_flow or family.unet.guidance_dim is not None):
        raise ValueError(f"{family.title}: `lcm` distils Stable Diffusion 1, 2 and XL only: leave it out")
    if model.schedule.is_flow and family.task == "txt2img":
        _check_flow(options, family.title)
        return
    if family.unet.guidance_dim is not None and options.lora_rank is None and options.stage == "diffusion":
        raise ValueError(f"{family.title}: is distilled: train a LoRA of it, or the model it was distilled from")
    if options.stage == "control" and not isinstance(model.unet, UNet):
        raise ValueError(f"{family.title}: has no UNet that a ControlNet could steer")
    encoders: tuple[Any, ...] = model.text_encoders
    reads_text = family.task == "txt2img" and family.conditioner in ("clip", "sdxl")
    if not reads_text or len(token_tables(model)) < len(encoders):
        raise ValueError(f"{family.title}: only text-to-image models with CLIP text encoders can be trained here")
    length = min(encoder.spec.length for encoder in encoders)
    if options.tokens is not None and (options.tokens > length or len(encoders) > 1):
        raise ValueError(f"got `tokens` {options.tokens}, wanted 2 to {length}, the length of a single text encoder")


def _check_flow(options: TrainOptions, title: str) -> None:
    """Raise ValueError, one line, for what a transformer with several text encoders cannot be trained with here."""
    if options.lora_rank is None or options.lora_text:
        raise ValueError(f"{title}: only a LoRA of its transformer can be trained here: give `lora_rank=16`")
    fixed = options.min_snr is not None or options.weighting in ("snr", "debiased")
    if fixed or options.tokens is not None:
        raise ValueError(f"{title}: leave out `min_snr`, `weighting` and `tokens`, which are for CLIP and betas")


def side_of(options: TrainOptions, model: Pipeline) -> int:
    """Return the resolution of a run.  Raises ValueError for one that the model's latents cannot have."""
    side = options.resolution or model.family.resolution
    model.latent_shape(side, side)
    return side


def open_dataset(options: TrainOptions, model: Pipeline, path: str | None) -> Dataset:
    """Open a folder of data, or the options' renderer.  Raises ValueError, one line, if they are not usable."""
    resolution = side_of(options, model)
    if path is None:
        return open_scenes(options, resolution)
    folder, kind = Path(path), "class_data" if path == options.class_data else "data"
    if (folder / INDEX).exists():
        plain: Dataset = open_encoded(folder)
    elif folder.is_dir() and not any(folder.glob("*.tar")):
        caption = options.class_prompt if kind == "class_data" else options.caption
        images = replace(open_folder(folder, resolution, caption), masked=options.masked)
        images = with_hints(images) if options.stage == "control" else images
        factor = model.vae.spec.factor * getattr(model.family.unet, "patch", 1)
        step = factor * max(1, round(resolution / 8 / factor))
        return in_buckets(images, step) if options.buckets else images
    else:
        plain = open_data(folder, resolution)
    if options.stage == "control":
        raise ValueError(f"{path}: is no folder of images, with NAME.hint.png beside each, which `stage=control` needs")
    for name in ("caption", "buckets", "masked"):
        if getattr(options, name):
            raise ValueError(f"{path}: is no folder of images, which `{name}` is for: leave it out")
    return plain


def open_scenes(options: TrainOptions, resolution: int) -> RenderedScenes:
    """Open the options' renderer.  Raises ValueError, one line, if it is not usable."""
    try:
        arguments = json.loads(options.renderer_options)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"got `renderer_options` {options.renderer_options!r:.100}, wanted JSON: {error}") from error
    return open_renderer(Path(str(options.renderer)), resolution, arguments, options.scenes)


def held_out(options: TrainOptions, dataset: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Divide a finite dataset: what is learned, and the fraction that is only measured, at least one example each.

    Raises ValueError if there are too few.
    """
    count = sum(dataset.shards or ())
    if count < 2:
        raise ValueError(f"got `validation` {fraction:g} of {count} images: wanted two or more")
    order = [int(index) for index in np.random.default_rng([5, options.seed]).permutation(count)]
    most = min(count - 1, max(1, round(fraction * count)))
    kept, out = sorted(order[most:]), sorted(order[:most])
    if not isinstance(dataset, Buckets):
        return Part(dataset, tuple(kept)), Part(dataset, tuple(out))
    divided = []
    for indices in (kept, out):
        parts = []
        for part, end, size in zip(dataset.parts, dataset.ends.tolist(), dataset.counts, strict=True):
            if rows := tuple(index - end + size for index in indices if end - size <= index < end):
                parts.append(Part(part, rows))
        divided.append(Buckets(tuple(parts)))
    return divided[0], divided[1]


def encoded(options: TrainOptions, dataset: Dataset, vae: nn.Module, name: str = "latents") -> Dataset:
    """Encode finite data's latents into the run's folder, or take those there if data and autoencoder are the same."""
    if isinstance(dataset, Buckets):
        parts = zip(dataset.parts, bucket_names(dataset), strict=True)
        return Buckets(tuple(encoded(options, part, vae, f"{name}/{size}") for part, size in parts))
    assert isinstance(vae, AutoencoderKL)
    assert dataset.shards is not None
    folder, autoencoder, count = Path(options.out) / name, vae, sum(dataset.shards)
    about = {"data": _origin(options, dataset), "vae": encoder_digest(vae)}

    @torch.no_grad()
    def encode(first: int) -> Iterator[Batch]:
        log.info("encoding %d images", count - first)
        with reported_workers():
            for batch in in_order(dataset, options.batch, options.workers, first):
                values = moments_of(autoencoder, batch.pixels, next(autoencoder.parameters()).device)
                yield replace(batch, pixels=torch.cat(values, dim=1).cpu())

    if distributed.rank() == 0:
        write_encoded(folder, encode, count, about)
    distributed.barrier()
    return open_encoded(folder)


def bucket_names(dataset: Buckets) -> list[str]:
    """Return the sizes of buckets of images, as names of folders."""
    return ["x".join(map(str, part.size)) for part in dataset.parts if isinstance(part, ImageFolder)]


def _origin(options: TrainOptions, dataset: Dataset) -> str:
    """Digest what identifies the data of a run: names, sizes and times of the files, captions, the renderer."""
    if isinstance(dataset, ImageFolder):
        files = [(path, caption) for path, caption in dataset.items]
        files += [(file, "") for path, _ in files for what in BESIDE if (file := beside(path, what)).is_file()]
        stats = [(path.stat(), path, caption) for path, caption in files]
        parts: list[object] = [(str(path), caption, stat.st_size, stat.st_mtime_ns) for stat, path, caption in stats]
        parts.append((dataset.size, dataset.masked, dataset.hinted))
    elif isinstance(dataset, TarShards):
        parts = [(str(path), state) for path, state in dataset.tars]
    else:
        parts = [Path(str(options.renderer)).read_bytes(), options.renderer_options, options.scenes]
    return hashlib.sha256(repr((parts, getattr(dataset, "resolution", None))).encode()).hexdigest()[:32]


def check_encoded(options: TrainOptions, model: Pipeline, dataset: EncodedDataset, reads_text: bool) -> None:
    """Raise ValueError, one line, if data were encoded for another model; its text counts only if that is read."""
    about, where = dataset.about, dataset.folder / INDEX
    if about.get("vae") != encoder_digest(model.vae):
        raise ValueError(f"{where}: was encoded by another autoencoder than this model's: encode the data again")
    if not reads_text:
        return
    if options.tokens is not None:
        raise ValueError("`tokens` has no effect on text that was encoded beforehand: leave it out")
    if about["context"] is None or model.text_encoder is None:
        raise ValueError(f"{where}: holds no text embeddings: encode the data again, or train the text encoder too")
    if about.get("text_encoder") != digest(*model.text_encoders):
        raise ValueError(f"{where}: was encoded by another text encoder than this model's: encode the data again")
    if (model.family.conditioner == "sdxl" or model.schedule.is_flow) and about.get("y") is None:
        raise ValueError(f"{where}: holds no y.npy, which {model.family.title} reads too: encode the data again")


def no_caption(model: Pipeline, dataset: EncodedDataset) -> dict[str, Tensor]:
    """Return what the network reads without a caption, as inference does: SDXL reads zeros, others the empty text."""
    context = dataset.empty("context")
    assert context is not None
    if model.family.conditioner != "sdxl":
        y = dataset.empty("y")
        return {"context": context[None].float()} | ({} if y is None else {"y": y[None]})
    return {
        "context": torch.zeros_like(context[None], dtype=torch.float32),
        "y": torch.zeros(1, *dataset.about["y"]),
    }


def make_loss(options: TrainOptions, model: Pipeline, empty: Mapping[str, Tensor] | None = None) -> Loss:
    """Return the loss with the networks to train: the diffusion model, or what is new.

    `empty` holds the embeddings of no caption, if those of all captions are in the data.  A LoRA is not attached yet.
    """
    if options.tokens is not None:
        assert model.tokenizer is not None
        model = replace(model, tokenizer=replace(model.tokenizer, length=options.tokens))
    networks, control = trained_networks(options, model), None
    if options.stage == "embedding":
        vectors = Vectors(model, options.init_word, options.vectors)
        model, networks = vectors.known_to(model, str(options.token)), {"embedding": vectors}
    elif options.stage == "control":
        control = new_control(model)
        networks = {"control": control}
    elif options.lora_rank is not None:
        kind = (options.lora_rank, options.lora_alpha, options.lora_kind, options.lokr_factor)
        networks = {"lora": LoRA(networks, *kind)}
    else:
        for network in networks.values():
            _unfreeze(network)
    weighting: Weighting = uniform
    if options.weighting == "learned":
        networks["weighting"] = weighting = LearnedWeighting().to(model.device)
    elif options.weighting is not None or options.min_snr is not None:
        weighting = of_x0(options.weighting or "min_snr", model.schedule.prediction, options.min_snr or 5.0)
    if options.lcm:
        return ConsistencyLoss(model, networks, empty=empty, guidance=options.lcm_guidance)
    return DiffusionLoss(model, networks, options.caption_dropout, weighting, empty, control=control)


def _unfreeze(network: nn.Module) -> None:
    """Let all parameters require gradients but those of which nothing is read: they would have none."""
    network.requires_grad_(True)
    for parameter in unread_parameters(network):
        parameter.requires_grad_(False)


def text_encoders(model: Pipeline) -> dict[str, nn.Module]:
    """Return a model's text encoders by role."""
    return {role: network for role, network in model.networks.items() if role not in ("unet", "vae")}


def trained_networks(options: TrainOptions, model: Pipeline) -> dict[str, nn.Module]:
    """Return the networks of a diffusion model that are trained, or changed by a LoRA, by role."""
    if options.stage in ("embedding", "control"):
        return {}
    networks: dict[str, nn.Module] = {"unet": model.unet}
    if options.lora_text if options.lora_rank is not None else not options.freeze_text:
        networks |= text_encoders(model)
    return networks
