"""Make the model, the dataset and the loss of a run from its options."""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ldm_lite.checkpoint.digest import digest
from ldm_lite.checkpoint.model import Model, load_model
from ldm_lite.checkpoint.parts import autoencoder_spec, open_autoencoder
from ldm_lite.checkpoint.reader import load_weights
from ldm_lite.cli.options import LoadOptions
from ldm_lite.models.clip import CLIPTextEncoder, CLIPTextSpec
from ldm_lite.models.unet import UNet
from ldm_lite.models.vae_kl import AutoencoderKL, VAESpec
from ldm_lite.runtime.precision import pick_device
from ldm_lite.text.tokenizer import CLIPTokenizer
from ldm_lite.train import distributed
from ldm_lite.train.batches import Batch, Order, in_order, reported_workers
from ldm_lite.train.data import Dataset, ImageFolder, TarShards, open_data, open_renderer
from ldm_lite.train.encoded import INDEX, EncodedDataset, encoder_digest, open_encoded, write_encoded
from ldm_lite.train.lora import LoRA
from ldm_lite.train.losses import AutoencoderLoss, DiffusionLoss, Loss, measure_scale, moments
from ldm_lite.train.options import TrainOptions
from ldm_lite.train.presets import PRESETS, initialise, initialise_text
from ldm_lite.zoo.detection import parse_prediction
from ldm_lite.zoo.families import Family

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
    elif options.stage == "diffusion":
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
    if family.conditioner in ("flux", "sd3") and family.task == "txt2img":
        _check_flow(options, family)
        return
    if family.unet.guidance_dim is not None:
        raise ValueError(f"{family.title}: is distilled: train the model it was distilled from")
    reads_text = family.task == "txt2img" and family.conditioner == "clip"
    if not reads_text or not isinstance(model.text_encoder, CLIPTextEncoder):
        raise ValueError(f"{family.title}: only text-to-image models with one CLIP-L text encoder can be trained here")
    length = model.text_encoder.spec.length
    if options.tokens is not None and options.tokens > length:
        raise ValueError(f"got `tokens` {options.tokens}, wanted 2 to {length}, the length of the text encoder")


def _check_flow(options: TrainOptions, family: Family) -> None:
    """Raise ValueError, one line, for what a transformer with several text encoders cannot be trained with here."""
    if options.lora_rank is None or options.lora_text:
        raise ValueError(f"{family.title}: only a LoRA of its transformer can be trained here: give `lora_rank=16`")
    if options.min_snr is not None or options.tokens is not None:
        raise ValueError(f"{family.title}: leave out `min_snr` and `tokens`, which are for CLIP and betas")


def open_dataset(options: TrainOptions, resolution: int) -> Dataset:
    """Open the options' data.  Raises ValueError, one line, if they are not usable."""
    if options.data is not None:
        path = Path(options.data)
        return open_encoded(path) if (path / INDEX).exists() else open_data(path, resolution)
    try:
        arguments = json.loads(options.renderer_options)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"got `renderer_options` {options.renderer_options!r:.100}, wanted JSON: {error}") from error
    return open_renderer(Path(str(options.renderer)), resolution, arguments, options.scenes)


def with_measured_scale(model: Model, dataset: Dataset, seed: int) -> Model:
    """Return a new model with the scale factor that gives the latents of up to 512 images unit variance."""
    assert isinstance(model.vae, AutoencoderKL)
    count = 512 if dataset.shards is None else min(512, sum(dataset.shards))
    order = Order(dataset, seed)
    scale = measure_scale(model.vae, torch.stack([dataset.example(order[i]).pixels for i in range(count)]))
    log.info("scale factor %.4f", scale)
    return replace(model, family=replace(model.family, scale_factor=scale))


def encoded(options: TrainOptions, dataset: Dataset, vae: nn.Module) -> EncodedDataset:
    """Encode finite data's latents into the run's folder, or take those there if data and autoencoder are the same."""
    assert isinstance(vae, AutoencoderKL)
    assert dataset.shards is not None
    folder, autoencoder, count = Path(options.out) / "latents", vae, sum(dataset.shards)
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


def _origin(options: TrainOptions, dataset: Dataset) -> str:
    """Digest what identifies the data of a run: names, sizes and times of the files, captions, the renderer."""
    if isinstance(dataset, ImageFolder):
        stats = [(path.stat(), path, caption) for path, caption in dataset.items]
        parts: list[object] = [(str(path), caption, stat.st_size, stat.st_mtime_ns) for stat, path, caption in stats]
    elif isinstance(dataset, TarShards):
        parts = [(str(path), changed) for path, changed in dataset.tars]
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
    if about.get("text_encoder") != digest(model.text_encoder):
        raise ValueError(f"{where}: was encoded by another text encoder than this model's: encode the data again")


def make_loss(options: TrainOptions, model: Model, empty: Tensor | None = None) -> Loss:
    """Return the loss with the networks to train: the autoencoder, the diffusion model, or a new LoRA for it.

    `empty` holds the embeddings (T,D) of the empty caption, if those of all captions are in the data.  The LoRA is not
    attached yet.
    """
    if options.stage == "autoencoder":
        assert isinstance(model.vae, AutoencoderKL)
        return AutoencoderLoss(model.vae, not options.freeze_encoder)
    networks = trained_networks(options, model)
    if options.lora_rank is not None:
        networks = {"lora": LoRA(networks, options.lora_rank, options.lora_alpha)}
    return DiffusionLoss(model, networks, options.caption_dropout, options.min_snr, options.tokens, empty)


def trained_networks(options: TrainOptions, model: Model) -> dict[str, nn.Module]:
    """Return the networks of a diffusion model that are trained, or changed by a LoRA, by role."""
    networks: dict[str, nn.Module] = {"unet": model.unet}
    if options.lora_text if options.lora_rank is not None else not options.freeze_text:
        assert model.text_encoder is not None
        networks["text_encoder"] = model.text_encoder
    return networks
