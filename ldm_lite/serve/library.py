"""What requests may name: checkpoints, LoRAs, ControlNets, upscalers of folders; and the checkpoint that is loaded."""

import dataclasses
import gc
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from ldm_lite import Pipeline, Upscaler
from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.options import ServeOptions
from ldm_lite.toolkit import (
    LoraWeight,
    load_model,
    merge_loras,
    prompt_kind,
    with_autoencoder,
    with_exact_batches,
)

log = logging.getLogger("ldm_lite")

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
Loras = tuple[tuple[str, LoraWeight], ...]  # (name, weight)


class Library:
    """Names for files.  One model is loaded at a time, by the thread that uses it."""

    def __init__(self, load: LoadOptions, options: ServeOptions) -> None:
        """Load the default model, load.ckpt.  Raises ValueError, OSError."""
        self._load, self._options = load, options
        self._folders = {"models": options.models, "loras": options.loras, "controlnets": options.controlnets}
        self._folders["upscalers"] = options.upscalers
        for kind, folder in self._folders.items():
            if folder is not None and not Path(folder).is_dir():
                raise ValueError(f"got `{kind}` {folder!r}, wanted a folder")
        self._merged: tuple[Loras, Callable[[], None] | None] = ((), None)  # and what takes them out again
        self._model: Pipeline | None = None
        self._preview: Pipeline | None = None
        self._upscaler: tuple[Path, Upscaler] | None = None
        self.together: Pipeline | None = None  # the model, if its batches are exact
        self.default = self.loaded = ""
        self._open(load)
        assert self._model is not None
        self.default = self.loaded = self._model.name

    @property
    def names(self) -> list[str]:
        """The models that requests may name; the first is the default."""
        return [self.default, *(name for name in self._files("models") if name != self.default)]

    @property
    def loras(self) -> list[str]:
        """The LoRAs that requests may name."""
        return list(self._files("loras"))

    @property
    def controls(self) -> list[str]:
        """The ControlNets and T2I-Adapters that requests may name."""
        return list(self._files("controlnets"))

    def control_file(self, name: str) -> Path:
        """Return the file of a ControlNet.  Raises ValueError for another name."""
        return self._file("controlnets", name)

    def lora_file(self, name: str) -> Path:
        """Return the file of a LoRA.  Raises ValueError for another name."""
        return self._file("loras", name)

    @property
    def upscalers(self) -> list[str]:
        """The ESRGAN networks that requests may name."""
        return list(self._files("upscalers"))

    def upscaler(self, name: str) -> Upscaler:
        """Return an ESRGAN network; the last one stays loaded.  Raises ValueError for another name, OSError."""
        file, held = self._file("upscalers", name), self._upscaler
        if held is None or held[0] != file:
            held = self._upscaler = file, Upscaler(file, device=self.model.device)
        return held[1]

    def check(self, name: str | None, loras: Loras) -> str:
        """Return the name of a model, by default the default's.  Raises ValueError for names that there are not."""
        for each, _ in loras:
            self.lora_file(each)
        if name is None or name == self.default:
            return self.default
        self._file("models", name)
        return name

    @property
    def merged(self) -> Loras:
        """The LoRAs that are merged into the loaded model."""
        return self._merged[0]

    @property
    def model(self) -> Pipeline:
        """The model that is loaded."""
        assert self._model is not None
        return self._model

    def use(self, name: str, loras: Loras) -> Pipeline:
        """Return a model with LoRAs merged; whatever was loaded before is freed.  Raises ValueError, OSError."""
        if self._merged[0] != loras or self.loaded != name:
            self._unmerge()
        if self.loaded != name or self._model is None:
            self._close()
            ckpt = self._load.ckpt if name == self.default else self._file("models", name)
            try:
                self._open(dataclasses.replace(self._load, ckpt=ckpt))
            except Exception:
                self._open(self._load)  # the default keeps its place
                self.loaded = self.default
                raise
            self.loaded = name
        model = self.model
        if loras and self._merged[1] is None:
            files = [(self.lora_file(each), weight) for each, weight in loras]
            self._merged = loras, merge_loras(model, files)
        return model

    def decoder(self) -> Pipeline:
        """Return the model whose autoencoder decodes previews."""
        if self._options.preview is None:
            return self.model
        if self._preview is None:
            self._preview = with_autoencoder(self.model, self._options.preview)
        return self._preview

    def _open(self, load: LoadOptions) -> None:
        model = load_model(load)
        if prompt_kind(model) == "files":  # which requests cannot name
            raise ValueError(
                f"{model.name} is {model.family.title}, whose prompts are names of files: it is not served"
            )
        self.together = with_exact_batches(model) if self._options.batching == "exact" else None
        self._model = self.together or model

    @property
    def most_together(self) -> int:
        """How many images the loaded model denoises together; compiled and offloaded ones run one by one."""
        exact = self._options.batching == "exact"
        return 1 if exact and self.together is None else self._options.batch

    def _close(self) -> None:
        """Free what is loaded, before anything else takes its memory."""
        self._model = self._preview = self.together = None
        self._merged = (), None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _unmerge(self) -> None:
        undo, self._merged = self._merged[1], ((), None)
        if undo is not None:
            undo()

    def _file(self, kind: str, name: str) -> Path:
        files = self._files(kind)
        if name not in files:
            known = [self.default, *files] if kind == "models" else list(files)
            what = {"models": "model", "loras": "LoRA", "controlnets": "ControlNet", "upscalers": "upscaler"}[kind]
            raise ValueError(f"unknown {what} {name!r:.80}: wanted {'one of ' + ', '.join(known) if known else 'none'}")
        return files[name]

    def _files(self, kind: str) -> dict[str, Path]:
        """The files of a folder by name: the path in the folder, without the suffix."""
        if (folder := self._folders[kind]) is None:
            return {}
        root = Path(folder)
        found = (path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES and path.is_file())
        return {path.relative_to(root).with_suffix("").as_posix(): path for path in found}
