"""What requests may name: checkpoints, LoRAs, ControlNets, upscalers of folders; and the checkpoint that is loaded."""

import dataclasses
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ldm_lite import Pipeline, Upscaler
from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.options import ServeOptions
from ldm_lite.toolkit import LoraWeight, load_model, merge_loras, prompt_kind, with_autoencoder, with_exact_batches

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
KINDS = {"models": "model", "loras": "LoRA", "controlnets": "ControlNet", "upscalers": "upscaler"}  # as messages say
Loras = tuple[tuple[str, LoraWeight], ...]  # (name, weight)


class Library:
    """Names for files.  One model is loaded at a time, by the thread that uses it."""

    def __init__(self, load: LoadOptions, options: ServeOptions) -> None:
        """Load the default model, load.ckpt.  Raises ValueError, OSError."""
        self._load, self._options = load, options
        for kind in KINDS:
            folder = getattr(options, kind)
            if folder is not None and not Path(folder).is_dir():
                raise ValueError(f"got `{kind}` {folder!r}, wanted a folder")
        self.merged: Loras = ()  # the LoRAs that are merged into the loaded model
        self._swapping = threading.RLock()
        self._model: Pipeline | None = None
        self._unmerge: Callable[[], None] | None = None  # takes them out again
        self._preview: Pipeline | None = None
        self._upscaler: tuple[Path, Upscaler] | None = None
        self.together: Pipeline | None = None  # the model, if its batches are exact
        self._open(load)
        self.default = self.loaded = self.model.name

    @property
    def model(self) -> Pipeline:
        """The model that is loaded; another thread waits while it is replaced by another."""
        with self._swapping:
            assert self._model is not None
            return self._model

    @property
    def names(self) -> list[str]:
        """The models that requests may name; the first is the default."""
        return [self.default, *(name for name in self.files("models") if name != self.default)]

    def files(self, kind: str) -> dict[str, Path]:
        """Return the files of one of KINDS by name: the path in the folder, without the suffix."""
        if (folder := getattr(self._options, kind)) is None:
            return {}
        root = Path(folder)
        paths = (path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES and path.is_file())
        return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}

    def file(self, kind: str, name: str) -> Path:
        """Return a file of one of KINDS.  Raises ValueError for a name that there is not."""
        files = self.files(kind)
        if name not in files:
            known = [self.default, *files] if kind == "models" else list(files)
            wanted = "one of " + ", ".join(known) if known else "none"
            raise ValueError(f"unknown {KINDS[kind]} {name!r:.80}: wanted {wanted}")
        return files[name]

    def upscaler(self, name: str) -> Upscaler:
        """Return an ESRGAN network; the last one stays loaded.  Raises ValueError for another name, OSError."""
        file, held = self.file("upscalers", name), self._upscaler
        if held is None or held[0] != file:
            held = self._upscaler = file, Upscaler(file, device=self.model.device)
        return held[1]

    def check(self, name: str | None, loras: Loras) -> str:
        """Return the name of a model, by default the default's.  Raises ValueError for names that there are not."""
        for lora, _ in loras:
            self.file("loras", lora)
        if name is None or name == self.default:
            return self.default
        self.file("models", name)
        return name

    def use(self, name: str, loras: Loras) -> Pipeline:
        """Return a model with LoRAs merged; whatever was loaded before is freed.  Raises ValueError, OSError."""
        if (self.merged != loras or self.loaded != name) and self._unmerge is not None:
            self._unmerge()
            self.merged, self._unmerge = (), None
        if self.loaded != name:
            ckpt = self._load.ckpt if name == self.default else self.file("models", name)
            with self._swapping:
                self._model = self._preview = self.together = None  # before anything else takes its memory
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                try:
                    self._open(dataclasses.replace(self._load, ckpt=ckpt))
                    self.loaded = name
                except Exception:
                    self._open(self._load)  # the default keeps its place
                    self.loaded = self.default
                    raise
        if loras and self._unmerge is None:
            files = [(self.file("loras", lora), weight) for lora, weight in loras]
            self._unmerge = merge_loras(self.model, files)
            self.merged = loras
        return self.model

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

    def decoder(self) -> Pipeline:
        """Return the model whose autoencoder decodes previews."""
        if self._options.preview is None:
            return self.model
        if self._preview is None:
            self._preview = with_autoencoder(self.model, self._options.preview)
        return self._preview
