"""Make the model, the dataset and the loss of a run from its options."""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ldm_lite.checkpoint.digest import digest
from ldm_lite.checkpoint.model import Model, load_model
from ldm_lite.checkpoint.parts import autoencoder_spec, open_autoencoder
from ldm_lite.checkpoint.reader import load_weights
from ldm_lite.checkpoint.textual_inversion import CLIP
from ldm_lite.cli.options import LoadOptions
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.models.clip import CLIPTextEncoder, CLIPTextSpec
from ldm_lite.models.open_clip import OpenCLIPTextEncoder
from ldm_lite.models.unet import UNet
from ldm_lite.models.vae_kl import AutoencoderKL, VAESpec
from ldm_lite.runtime.precision import pick_device
from ldm_lite.text.tokenizer import CLIPTokenizer
from ldm_lite.train import distributed
from ldm_lite.train.batches import Batch, Order, in_order, reported_workers
from ldm_lite.train.consistency import ConsistencyLoss
from ldm_lite.train.control import new_control
from ldm_lite.train.data import (
    BESIDE,
    ImageFolder,
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
from ldm_lite.train.lora import LoRA, unread_parts
from ldm_lite.train.losses import AutoencoderLoss, DiffusionLoss, Loss, measure_scale, moments
from ldm_lite.train.options import TrainOptions
from ldm_lite.train.presets import PRESETS, initialise, initialise_text
from ldm_lite.train.tars import TarShards
from ldm_lite.train.text import TextLoss
from ldm_lite.train.weighting import LearnedWeighting, Weighting, of_x0, uniform
from ldm_lite.zoo.detection import parse_prediction
from ldm_lite.zoo.families import Family, text_roles

log = logging.getLogger("ldm_lite")


def make_model(options: TrainOptions, load_options: LoadOptions) -> Model:
    """Return the model to start from, in float32: a checkpoint, or a preset with new weights.

    Raises ValueError, one line, for an unknown preset, and for a model that cannot be trained here.
    """
    if options.preset is None:
        model = load_model(replace(load_options, dtype="fp32"), Model)
    else:
        model = _new_model(options, load_options)
    check_model(options, model)
    return model


def _new_model(options: TrainOptions, load_options: LoadOptions) -> Model:
    """Return a preset with new weights, except for an autoencoder from a file."""
    if options.preset not in PRESETS:
        raise ValueError(f"unknown preset {options.preset!r}: wanted one of {', '.join(PRESETS)}")
    device, family = pick_device(load_options.device), PRESETS[options.preset]
    if load_options.prediction is not None:
        family = replace(family, prediction=parse_prediction(load_options.prediction))
    component = None
    if load_options.vae is not None:
        component = open_autoencoder(load_options.vae)
        family = replace(family, vae=autoencoder_spec(component))
    elif options.stage != "autoencoder":
        raise ValueError(
            "a new diffusion model needs an autoencoder: train one with `stage=autoencoder`, then give it as `vae=FILE`"
        )
    if type(family.vae) is not VAESpec:
        raise ValueError(f"{load_options.vae}: is not a KL autoencoder, the only kind that can be trained with here")
    assert isinstance(family.text, CLIPTextSpec)
    with torch.device(device):
        unet, vae, text = UNet(family.unet), AutoencoderKL(family.vae), CLIPTextEncoder(family.text)
    initialise(unet)
    initialise_text(text)
    if component is not None:
        load_weights(vae, component, "vae", device, torch.float32)
    schedule = family.noise.schedule(family.prediction)
    tokenizer = CLIPTokenizer(text.spec.length)
    return Model("model", family, schedule, unet, vae, text, None, tokenizer, f"{family.title}, new weights")


def check_model(options: TrainOptions, model: Model) -> None:
    """Raise ValueError, one line, if this model cannot be trained here."""
    family = model.family
    if not isinstance(model.vae, AutoencoderKL):
        raise ValueError(f"{family.title}: has no KL autoencoder, the only kind that can be trained with here")
    if options.stage == "autoencoder":
        return
    if options.lcm and (model.schedule.is_flow or family.unet.guidance_dim is not None):
        raise ValueError(f"{family.title}: `lcm` distils Stable Diffusion 1, 2 and XL only: leave it out")
    if model.schedule.is_flow and family.task == "txt2img":
        _check_flow(options, family)
        return
    if family.unet.guidance_dim is not None and options.lora_rank is None and options.stage == "diffusion":
        raise ValueError(f"{family.title}: is distilled: train a LoRA of it, or the model it was distilled from")
    if options.stage == "control" and not isinstance(model.unet, UNet):
        raise ValueError(f"{family.title}: has no UNet that a ControlNet could steer")
    encoders = model.text_encoders
    reads_text = family.task == "txt2img" and family.conditioner in ("clip", "sdxl")
    if not reads_text or not all(isinstance(encoder, CLIP) for encoder in encoders):
        raise ValueError(f"{family.title}: only text-to-image models with CLIP text encoders can be trained here")
    length = min(encoder.spec.length for encoder in encoders if isinstance(encoder, CLIP))
    if options.tokens is not None and (options.tokens > length or len(encoders) > 1):
        raise ValueError(f"got `tokens` {options.tokens}, wanted 2 to {length}, the length of a single text encoder")


def _check_flow(options: TrainOptions, family: Family) -> None:
    """Raise ValueError, one line, for what a transformer with several text encoders cannot be trained with here."""
    if options.lora_rank is None or options.lora_text:
        raise ValueError(f"{family.title}: only a LoRA of its transformer can be trained here: give `lora_rank=16`")
    fixed = options.min_snr is not None or options.weighting in ("snr", "debiased")
    if fixed or options.tokens is not None:
        raise ValueError(f"{family.title}: leave out `min_snr`, `weighting` and `tokens`, which are for CLIP and betas")


def side_of(options: TrainOptions, model: Model) -> int:
    """Return the resolution of a run.  Raises ValueError for one that the model's latents cannot have."""
    side = options.resolution or model.family.resolution
    model.latent_shape(side, side)
    return side


def open_dataset(options: TrainOptions, model: Model, path: str | None) -> Dataset:
    """Open a folder of data, or the options' renderer.  Raises ValueError, one line, if they are not usable."""
    resolution = side_of(options, model)
    if path is None:
        return _renderer(options, resolution)
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


def _renderer(options: TrainOptions, resolution: int) -> Dataset:
    try:
        arguments = json.loads(options.renderer_options)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"got `renderer_options` {options.renderer_options!r:.100}, wanted JSON: {error}") from error
    return open_renderer(Path(str(options.renderer)), resolution, arguments, options.scenes)


def held_out(options: TrainOptions, dataset: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Divide a finite dataset: what is learned, and the share that is only measured, at least one example each.

    Raises ValueError if there are too few.
    """
    count = sum(dataset.shards or ())
    if count < 2:
        raise ValueError(f"got `validation` {share:g} of {count} images: wanted two or more")
    order = [int(index) for index in np.random.default_rng([5, options.seed]).permutation(count)]
    most = min(count - 1, max(1, round(share * count)))
    kept, out = sorted(order[most:]), sorted(order[:most])
    if not isinstance(dataset, Buckets):
        return Part(dataset, tuple(kept)), Part(dataset, tuple(out))
    divided = []
    for indices in (kept, out):
        parts = []
        for part, end, size in zip(dataset.parts, dataset.ends.tolist(), dataset.counts, strict=True):
            if own := tuple(index - end + size for index in indices if end - size <= index < end):
                parts.append(Part(part, own))
        divided.append(Buckets(tuple(parts)))
    return divided[0], divided[1]


def with_measured_scale(model: Model, dataset: Dataset, seed: int) -> Model:
    """Return a new model with the scale factor that gives the latents of up to 512 images unit variance."""
    assert isinstance(model.vae, AutoencoderKL)
    count = 512 if dataset.shards is None else min(512, sum(dataset.shards))
    order = Order(dataset, seed)
    scale = measure_scale(model.vae, torch.stack([dataset.example(order[i]).pixels for i in range(count)]))
    log.info("scale factor %.4f", scale)
    return replace(model, family=replace(model.family, scale_factor=scale))


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
                values = moments(autoencoder, batch.pixels, next(autoencoder.parameters()).device)
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
        files += [(other, "") for path, _ in files for what in BESIDE if (other := beside(path, what)).is_file()]
        stats = [(path.stat(), path, caption) for path, caption in files]
        parts: list[object] = [(str(path), caption, stat.st_size, stat.st_mtime_ns) for stat, path, caption in stats]
        parts.append((dataset.size, dataset.masked, dataset.hinted))
    elif isinstance(dataset, TarShards):
        parts = [(str(path), state) for path, state in dataset.tars]
    else:
        parts = [Path(str(options.renderer)).read_bytes(), options.renderer_options, options.scenes]
    return hashlib.sha256(repr((parts, getattr(dataset, "resolution", None))).encode()).hexdigest()[:32]


def check_encoded(options: TrainOptions, model: Model, dataset: EncodedDataset, reads_text: bool) -> None:
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


def no_caption(model: Model, dataset: EncodedDataset) -> Conditioning:
    """Return what the network reads without a caption, as inference does: SDXL reads zeros, others the empty text."""
    context = dataset.empty("context")
    assert context is not None
    if model.family.conditioner != "sdxl":
        y = dataset.empty("y")
        return Conditioning(context[None].float(), None if y is None else y[None])
    return Conditioning(torch.zeros_like(context[None], dtype=torch.float32), torch.zeros(1, *dataset.about["y"]))


def make_loss(options: TrainOptions, model: Model, empty: Conditioning | None = None) -> Loss:
    """Return the loss with the networks to train: the autoencoder, the diffusion model, or what is new.

    `empty` holds the embeddings of no caption, if those of all captions are in the data.  A LoRA is not attached yet.
    """
    if options.stage == "autoencoder":
        assert isinstance(model.vae, AutoencoderKL)
        return AutoencoderLoss(model.vae, not options.freeze_encoder)
    if options.tokens is not None:
        assert model.tokenizer is not None
        model = replace(model, tokenizer=replace(model.tokenizer, length=options.tokens))
    if options.stage == "text":
        return TextLoss(model, options.caption_dropout)
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
    for part in unread_parts(network):
        part.requires_grad_(False)
    if isinstance(network, OpenCLIPTextEncoder) and network.spec.norm and network.text_projection is not None:
        network.text_projection.requires_grad_(False)  # Stable Diffusion 2 reads no pooled output


def trained_networks(options: TrainOptions, model: Model) -> dict[str, nn.Module]:
    """Return the networks of a diffusion model that are trained, or changed by a LoRA, by role."""
    if options.stage in ("embedding", "control"):
        return {}
    networks: dict[str, nn.Module] = {"unet": model.unet}
    if options.lora_text if options.lora_rank is not None else not options.freeze_text:
        networks |= dict(zip(text_roles(model.text_encoders), model.text_encoders, strict=True))
    return networks
