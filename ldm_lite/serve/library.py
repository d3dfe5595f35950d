"""What requests may name: checkpoints, LoRAs, ControlNets, upscalers in folders; and the loaded checkpoint."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ldm_lite import Pipeline, Upscaler, toolkit
from ldm_lite.checkpoint.reader import open_checkpoint
from ldm_lite.cli.declared import import_features
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.core.layers import Shapes
from ldm_lite.serve.options import LARGEST, ServeOptions

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
_KINDS = {  # as messages say
    "models": "model",
    "loras": "LoRA",
    "controlnets": "ControlNet",
    "upscalers": "upscaler",
    "embeddings": "embedding",
}
MOST_RUNS = 16  # batches that take turns, each with its latents and texts in memory
TILE = 64  # pixels that a network enlarges at a time on a CPU: 64 channels that become four times as large take 115 MiB
MOST_LORAS = 32  # of a request
Loras = tuple[tuple[str, toolkit.LoraWeight], ...]  # (name, weight)


class ModelFacts(NamedTuple):
    """What is known about a model that is not loaded."""

    side: int  # pixels of its images
    steps: int
    scale: float  # of guidance
    sampler: str
    tasks: tuple[str, ...]
    words: str  # that its text encoder was trained on, "" for all
    widths: set[int]  # of its text encoders, which embeddings fit
    inputs: toolkit.ModelInputs  # what its network reads


class Library:
    """The server's files by name.  One model is loaded at a time, by the thread that uses it."""

    def __init__(self, load: LoadOptions, options: ServeOptions) -> None:
        """Load the default model, load.ckpt.  Raises ValueError, OSError."""
        self._load, self._options = load, options
        import_features(options.feature, Txt2imgOptions)
        for kind in _KINDS:
            folder = getattr(options, kind)
            if folder is not None and not Path(folder).is_dir():
                raise ValueError(f"got `{kind}` {folder!r}, expected a folder")
        self.merged: Loras = ()  # the LoRAs that are merged into the loaded model
        self.loaded = ""  # the name of the loaded model, if there is one
        self._model: Pipeline | None = None
        self._unmerge: Callable[[], None] | None = None  # removes them again
        self._preview: Pipeline | None = None
        self._upscaler: tuple[Path, nn.Module] | None = None  # the network that enlarged last
        self.given_up: Callable[[], bool] = lambda: False  # whether nobody waits for the running request
        self._facts: dict[str, ModelFacts] = {}
        self._broken: dict[Path, tuple[int, str]] = {}  # files that could not be loaded: when they were changed, why
        self.together: Pipeline | None = None  # the model, if its batches are exact
        self._open(load)
        self.default = self.loaded = self.model.name
        self._facts[self.default] = self._facts.pop("")
        self.device = self.model.device

    @property
    def model(self) -> Pipeline:
        """The model that is loaded, for the thread that uses it."""
        assert self._model is not None
        return self._model

    def ready(self, name: str | None) -> Pipeline | None:
        """Return a model if it is loaded, for any thread: it is never waited for."""
        model = self._model
        return model if name == self.loaded else None

    def facts(self, name: str | None) -> ModelFacts:
        """Return what is known about a model: if it was never loaded, what is true of the default."""
        return self._facts.get(name or self.default) or self._facts[self.default]

    def inputs(self, name: str | None) -> toolkit.ModelInputs:
        """Return what a model's network reads, from the header of its file if it was never loaded."""
        if name is None or name in self._facts:
            return self.facts(name).inputs
        path = self.file("models", name)
        return _inputs(dataclasses.replace(self._load, ckpt=path), path.stat().st_mtime_ns)

    @property
    def most_pixels(self) -> int:
        """How many pixels an image may have, if the options do not tell: an image of a model takes a multiple."""
        few = 17 * self.facts(None).side ** 2
        return LARGEST if self._options.models is not None else min(LARGEST, few)

    @property
    def names(self) -> list[str]:
        """The models that requests may name; the first is the default."""
        return [self.default, *(name for name in self.files("models") if name != self.default)]

    def files(self, kind: str) -> dict[str, Path]:
        """Return the files of one of _KINDS by name: the path in the folder, without the suffix."""
        if (folder := getattr(self._options, kind)) is None:
            return {}
        root = Path(folder)
        paths = (path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES and path.is_file())
        return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}

    def file(self, kind: str, name: str) -> Path:
        """Return a file of one of _KINDS.  Raises ValueError for an unknown name."""
        files = self.files(kind)
        name = self.plain(name, files)
        if name not in files:
            known = [self.default, *files] if kind == "models" else list(files)
            wanted = "one of " + ", ".join(known) if known else "none"
            raise ValueError(f"unknown {_KINDS[kind]} {name!r:.80}: expected {wanted}")
        return files[name]

    @staticmethod
    def plain(name: str, names: Iterable[str]) -> str:
        """Return a name without suffix and hash, as in A1111's titles, unless a file has the whole name."""
        if name in names:
            return name
        head, bracket, digest = name.rpartition(" [")
        name = head if bracket and re.fullmatch(r"[0-9a-f]{6,64}\]", digest) else name
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
        return name if name in names else name.removesuffix(suffix)

    def title(self, kind: str, name: str) -> tuple[str, str]:
        """Return a file's name as A1111 shows it, "NAME.safetensors [HASH]" for a model, and the hash."""
        path = self.files(kind).get(name)
        if path is None and isinstance(self._load.ckpt, str | Path):  # the default's
            path = Path(self._load.ckpt)
        if path is None or not path.is_file():
            return name, ""
        digest = _digest(path, path.stat().st_mtime_ns)
        return f"{name}{path.suffix if kind == 'models' else ''} [{digest}]", digest

    def embeddings(self) -> dict[str, tuple[Path, Shapes]]:
        """The files and shapes of textual inversions, by the names that prompts have for them."""
        embeddings: dict[str, tuple[Path, Shapes]] = {}
        for name, path in self.files("embeddings").items():
            with contextlib.suppress(ValueError):  # a file that does not open is not one
                embeddings[Path(name).name] = path, _shapes(path, path.stat().st_mtime_ns)
        return embeddings

    def embeddings_in(self, texts: Sequence[str], model: str | None) -> tuple[str, ...]:
        """Return the textual inversions that a request's texts name and that fit its model, as NAME=FILE."""
        text, widths = " ".join(texts).lower(), self.facts(model).widths
        return tuple(
            f"{name}={path}"
            for name, (path, shapes) in self.embeddings().items()
            if {shape[-1] for shape in shapes.values() if shape} >= widths
            and re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", text)
        )

    def upscaler(self, name: str) -> Upscaler:
        """Return an ESRGAN network, which is loaded when it enlarges.  Raises ValueError for another name, OSError."""
        file = self.file("upscalers", name)
        self._check_works(file)
        return _NamedUpscaler(self, file, TILE if self.device.type == "cpu" else 4 * TILE)

    def enlarging(self, file: Path) -> nn.Module:
        """Return a file's network, for the engine's thread; only the last one stays.  Raises ValueError, OSError."""
        if self._upscaler is None or self._upscaler[0] != file:
            self._upscaler = None  # before the next one is there
            try:
                network = Upscaler(file, device=self.device).network
            except (ValueError, OSError) as error:
                self._broken[file] = file.stat().st_mtime_ns, str(error)
                raise
            network.register_forward_pre_hook(self._check_given_up)  # before each tile
            self._upscaler = file, network
        return self._upscaler[1]

    def _check_given_up(self, *_: object) -> None:
        if self.given_up():
            raise TimeoutError("the client is not waiting any more")

    def check_request(self, name: str | None, loras: Loras) -> str:
        """Return the name of a model, by default the default's.  Raises ValueError for unknown names."""
        if len(loras) > MOST_LORAS:
            raise ValueError(f"got {len(loras)} LoRAs, expected at most {MOST_LORAS}")
        for lora, _ in loras:
            self.file("loras", lora)
        name = None if name is None else self.plain(name, self.names)
        if name is None or name == self.default:
            return self.default
        self._check_works(self.file("models", name))
        return name

    def _check_works(self, path: Path) -> None:
        """Raises ValueError for a file that could not be loaded, until it changes; OSError."""
        changed, why = self._broken.get(path, (0, ""))
        if why and path.stat().st_mtime_ns == changed:
            raise ValueError(why)

    def use(self, name: str, loras: Loras) -> Pipeline:
        """Return a model with LoRAs merged; whatever was loaded before is freed.  Raises ValueError, OSError."""
        if (self.merged != loras or self.loaded != name) and self._unmerge is not None:
            self._unmerge()
            self.merged, self._unmerge = (), None
        if self.loaded != name:
            self._swap(name)
        if loras and self._unmerge is None:
            files = [(self.file("loras", lora), weight) for lora, weight in loras]
            self._unmerge = toolkit.merge_loras(self.model, files)
            self.merged = loras
        return self.model

    def _swap(self, name: str) -> None:
        """Load a model instead of the loaded one.  A file that cannot be loaded is remembered until it changes."""
        before, ckpt = self.loaded, self._load.ckpt if name == self.default else self.file("models", name)
        try:
            load = dataclasses.replace(self._load, ckpt=ckpt)
            toolkit.check_checkpoint(load)  # before the other one is freed
            self.unload()
            self._open(load, name)
            self.loaded = name
        except Exception as error:
            if name != self.default and isinstance(error, (ValueError, OSError)):
                self._broken[Path(ckpt)] = Path(ckpt).stat().st_mtime_ns, str(error)
            if not self.loaded and before:  # go back to the default model
                self._open(self._load, self.default)
                self.loaded = self.default
            raise

    def unload(self) -> None:
        """Free the model."""
        if self._unmerge is not None:
            self.merged, self._unmerge = (), None
        self.loaded, self._model, self._preview, self.together = "", None, None, None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def works(self) -> bool:
        """Whether the device computes: after some errors of CUDA the process has to end."""
        try:
            return bool(torch.ones(1, device=self.device).add(1).item() == 2)
        except RuntimeError:
            return False

    def _open(self, load: LoadOptions, name: str = "") -> None:
        model = toolkit.load_model(load)
        if toolkit.prompt_kind(model) == "files":  # requests cannot name files
            raise ValueError(f"{model.name} is {model.family.title}, whose prompts are file names: it cannot be served")
        self.together = toolkit.with_exact_batches(model) if self._options.batching == "exact" else None
        encoders: tuple[Any, ...] = model.text_encoders
        widths = {encoder.spec.width for encoder in encoders if hasattr(encoder, "spec")}
        tasks, inputs = toolkit.tasks_of(model), toolkit.inputs_of(model)
        usual = model.family.steps, model.family.scale, model.family.sampler
        self._facts[name] = ModelFacts(model.family.resolution, *usual, tasks, model.family.words, widths, inputs)
        self._model = self.together or model

    @property
    def most_together(self) -> int:
        """How many images the loaded model denoises together; compiled and offloaded ones run one by one."""
        exact = self._options.batching == "exact"
        return 1 if exact and self.together is None else self._options.batch_size

    @property
    def most_runs(self) -> int:
        """How many runs may take turns: an offloaded model's networks are on the device for one."""
        return MOST_RUNS if self._model is None or self._model.offloader is None else 1

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def decoder(self) -> Pipeline:
        """Return the model whose autoencoder decodes previews."""
        if self._options.preview is None:
            return self.model
        if self._preview is None:
            self._preview = toolkit.with_autoencoder(self.model, self._options.preview)
        return self._preview


@dataclasses.dataclass(frozen=True)
class _NamedUpscaler(Upscaler):
    """A network by its file, so that waiting requests do not hold it in memory."""

    library: Library
    file: Path
    tile: int

    @property
    def name(self) -> str:  # type: ignore[override]
        """The file's."""
        return self.file.name

    @property
    def network(self) -> nn.Module:  # type: ignore[override]
        """The network, loaded."""
        return self.library.enlarging(self.file)


@functools.lru_cache(1024)
def _shapes(path: Path, changed: int) -> Shapes:
    return open_checkpoint(path).shapes


@functools.lru_cache(1024)
def _inputs(load: LoadOptions, changed: int) -> toolkit.ModelInputs:
    try:
        return toolkit.check_checkpoint(load)
    except (ValueError, OSError):  # the error is reported when it is loaded
        return toolkit.ModelInputs(references=False, scale=False)


@functools.lru_cache(1024)
def _digest(path: Path, changed: int) -> str:
    """A file's hash as older versions of A1111 and its ControlNets have it: of 64 KiB from its first MiB on."""
    with path.open("rb") as file:
        file.seek(0x100000 if path.stat().st_size > 2**21 else 0)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]
