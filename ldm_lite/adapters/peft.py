"""PEFT's configuration of an adapter, in adapter_config.json or in a file's metadata, and the folders that hold one.

Source: PEFT's LoraConfig and those of the other KINDS, LoraLayer.update_layer and get_pattern_key; diffusers'
lora_adapter_metadata.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ldm_lite.checkpoint import hub

CONFIG = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
DIFFUSERS = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
ROLES = ("unet", "text_encoder", "text_encoder_2")  # names of subfolders, as training scripts write them
# Kinds by peft_type -> their setting of alpha, if they have one.
_KINDS = {"LORA": "lora_alpha", "LOHA": "alpha", "LOKR": "alpha", "OFT": None, "BOFT": None, "IA3": None}
# Settings that change nothing once an adapter is trained.  Linears ignore fan_in_fan_out; the weights show the layers.
WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "lora_bias"),
    *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("rank_dropout", "module_dropout", "rank_dropout_scale", "init_weights", "init_ia3_weights", "decompose_both"),
    *("decompose_factor", "use_effective_conv2d", "oft_block_size", "block_share"),  # the shapes show these
    *("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout"),
)
HEEDED = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights", "bias"),
    "use_dora",  # the lengths in the file show it
    *("alpha", "coft", "eps", "use_cayley_neumann", "num_cayley_neumann_terms", "feedforward_modules"),
)
BIASES = ("none", "all", "lora_only", "oft_only", "boft_only")
# Initial values that leave the base model's weights as they are.
INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class PeftConfig:
    """The part of a configuration that has alpha, and what else the tensors do not show."""

    where: str
    rank: int | None
    alpha: float
    rslora: bool
    ranks: Sequence[tuple[re.Pattern[str], float]]
    alphas: Sequence[tuple[re.Pattern[str], float]]
    rotation: Mapping[str, Any]  # settings of OFT, by name
    feedforward: Sequence[re.Pattern[str]] | None  # IA3: modules whose columns are scaled
    base: str = ""  # the model that it was trained with

    def alpha_of(self, module: str, rank: int) -> float:
        """Return the alpha of a module, for a scale of alpha / rank; with rank 0, which a whole LoKr has, the scale.

        Raises ValueError if the configuration has another rank.
        """
        wanted = _first(self.ranks, module, self.rank)
        if rank == 0:
            return (_first(self.alphas, module, self.alpha) or 0.0) / (wanted or 1.0)
        if wanted is not None and wanted != rank:
            raise ValueError(f"has rank {rank}, but {self.where} says {wanted:g}: they do not belong together")
        alpha = _first(self.alphas, module, self.alpha)
        assert alpha is not None
        return alpha * math.sqrt(rank) if self.rslora else alpha

    def about_module(self, module: str) -> Mapping[str, Any]:
        """Return the settings of OFT, and whether IA3 scales the columns of a module ("feedforward")."""
        if self.feedforward is None:
            return self.rotation
        return {"feedforward": any(pattern.match(module) for pattern in self.feedforward)}


def _first(patterns: Sequence[tuple[re.Pattern[str], float]], module: str, default: float | None) -> float | None:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def read_config(about: Any, where: str, most: int) -> PeftConfig:
    """Check a configuration; `most` is the number of tensors, which its patterns cannot exceed.

    Raises ValueError, one line, naming a setting that is damaged, unknown or not supported.
    """
    if not isinstance(about, dict):
        raise ValueError(f"{where}: holds {type(about).__name__}, expected an object of settings")
    kind, init, bias = about.get("peft_type", "LORA"), about.get("init_lora_weights"), about.get("bias", "none")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{where}: its peft_type is {_short(kind)}, which is not supported: {', '.join(_KINDS)} are")
    if not any(init is known or (isinstance(init, str) and init == known) for known in INITS):
        raise ValueError(
            f"{where}: its init_lora_weights is {init!r}, which changes the base model too: convert the LoRA with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    if bias not in BIASES:
        raise ValueError(f"{where}: its bias is {_short(bias)}, expected {', '.join(BIASES)}")
    for name, value in about.items():
        if value and name not in HEEDED and name not in WITHOUT_EFFECT:
            raise ValueError(f"{where}: its {name} is {_short(value)}, which is not supported")
    has_rank = _KINDS[kind] is not None
    rank, rslora = about.get("r") if has_rank else None, about.get("use_rslora") or False
    alpha = about.get(_KINDS[kind] or "", 8)  # as PEFT
    if rank is not None and not (_is_number(rank) and rank >= 1 and rank == int(rank)):
        raise ValueError(f"{where}: its r is {_short(rank)}, expected a whole number from 1")
    if not _is_number(alpha):
        raise ValueError(f"{where}: its {_KINDS[kind]} is {_short(alpha)}, expected a number")
    if not isinstance(rslora, bool):
        raise ValueError(f"{where}: its use_rslora is {_short(rslora)}, expected true or false")
    ranks, alphas = (_patterns(about.get(name), f"{where}: its {name}", most) for name in HEEDED[3:5])
    rotation = _rotation(about, where) if kind == "OFT" else {}
    feedforward = _feedforward(about, where, most) if kind == "IA3" else None
    base = str(about.get("base_model_name_or_path") or "")
    return PeftConfig(where, rank, float(alpha), rslora, ranks, alphas, rotation, feedforward, base)


def _rotation(about: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check the settings of OFT that change the meaning of its angles."""
    switches = {name: about[name] for name in ("coft", "use_cayley_neumann") if about.get(name) is not None}
    if wrong := [name for name, value in switches.items() if not isinstance(value, bool)]:
        raise ValueError(f"{where}: its {wrong[0]} is {_short(switches[wrong[0]])}, expected true or false")
    numbers = {name: about[name] for name in ("eps", "num_cayley_neumann_terms") if about.get(name) is not None}
    for name, value in numbers.items():
        most = 1e30 if name == "eps" else 100
        if not _is_number(value) or not 0 < value <= most or (name != "eps" and value != int(value)):
            raise ValueError(f"{where}: its {name} is {_short(value)}, expected a number above 0")
    return switches | numbers


def _feedforward(about: Mapping[str, Any], where: str, most: int) -> list[re.Pattern[str]]:
    """Compile the names of modules whose inputs IA3 scales: ends of names, or one regular expression for all."""
    names = about.get("feedforward_modules") or []
    if isinstance(names, str):
        return [pattern for pattern, _ in _patterns({names: 0}, f"{where}: its feedforward_modules", most)]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: its feedforward_modules is {_short(names)}, expected a list of names")
    return [re.compile(rf".*{re.escape(name)}$") for name in names]


def _patterns(values: Any, what: str, most: int) -> list[tuple[re.Pattern[str], float]]:
    """Compile the patterns of module names, which are regular expressions, anchored at a dot."""
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(map(_is_number, values.values())):
        raise ValueError(f"{what} is {_short(values)}, expected an object of numbers")
    if len(values) > most:
        raise ValueError(f"{what} has {len(values)} patterns for {most} tensors: it is damaged")
    compiled = []
    for pattern, value in values.items():
        try:
            # Two repetitions at most and none of a group: matching others can take years.
            if len(pattern) > 500 or len(re.findall(r"[*+?{]", pattern)) > 2 or re.search(r"\)\s*[*+?{]", pattern):
                raise re.error("too complex")
            compiled.append((re.compile(rf"(?:.*\.)?(?:{pattern})$"), float(value)))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{what} has the pattern {_short(pattern)} ({error}), expected the name of a module"
            ) from error
    return compiled


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def by_role(about: Any, where: str, most: int) -> dict[str, PeftConfig]:
    """Return the configurations in diffusers' metadata, whose names begin with a network's: "unet.r", ..."""
    if not isinstance(about, dict):
        raise ValueError(f"{where}: holds {type(about).__name__}, expected an object of settings")
    roles: dict[str, dict[str, Any]] = {}
    for name, value in about.items():
        role, _, setting = name.rpartition(".")
        roles.setdefault(role, {})[setting] = value
    return {
        role: read_config(settings, f"{where} ({role})" if role else where, most) for role, settings in roles.items()
    }


# ---- folders --------------------------------------------------------------------------------------------------------


def find(source: str) -> tuple[str, list[tuple[str, Path, Path | None]]]:
    """Find a LoRA: a file, a folder, or either on the hub; return its title and its files.

    They are (role, weights, configuration): the role is the name of a subfolder, or "".  Raises FileNotFoundError or
    ValueError, one line.
    """
    repository, parts = hub.repository(source), source.split("/")
    local = Path(source).expanduser() if source.startswith("~/") else Path(source)
    below = len(parts) > 2 and not local.exists() and not local.suffix and hub.repository("/".join(parts[:2]))
    if repository is not None or below:
        repository, folder = "/".join(parts[:2]), "/".join(parts[2:])
        names, before = hub.files(repository), f"{folder}/" if folder else ""
        inside = [name.removeprefix(before) for name in names if name.startswith(before)]

        def fetch(name: str) -> Path:
            return hub.download(repository, before + name)

        return source, [
            (role or _role(folder), fetch(weights), fetch(config) if config else None)
            for role, weights, config in _choose(inside, source)
        ]
    path = hub.resolve(source)
    if path.name in WEIGHT_NAMES and not local.exists():
        names = hub.files("/".join(parts[:2]))
        if (beside := "/".join([*parts[2:-1], CONFIG])) in names:
            return source, [(_role(parts[-2]), path, hub.download("/".join(parts[:2]), beside))]
        return source, [("", path, None)]
    path = path.parent if path.name == CONFIG else path
    if not path.is_dir():
        config = path.with_name(CONFIG)
        return path.name, [("", path, None)] if not config.is_file() else [(_role(path.parent.name), path, config)]
    inside = [file.relative_to(path).as_posix() for file in (*path.iterdir(), *path.glob("*/*")) if file.is_file()]
    return hub.title(path), [
        (role or _role(path.name), path / weights, None if config is None else path / config)
        for role, weights, config in _choose(inside, str(path))
    ]


def _role(folder: str) -> str:
    name = folder.rpartition("/")[2]
    return name if name in ROLES else ""


def _choose(names: Collection[str], where: str) -> list[tuple[str, str, str | None]]:
    """Choose among the files of a folder: PEFT's, of one or several networks, or the only other file of weights."""
    adapters: list[tuple[str, str, str | None]] = []
    for role in ("", *ROLES):
        before = f"{role}/" if role else ""
        if before + CONFIG in names:
            weights = next((before + name for name in WEIGHT_NAMES if before + name in names), None)
            if weights is None:
                raise ValueError(f"{where}: has {before}{CONFIG}, but not {before}{WEIGHT_NAMES[0]}: download it whole")
            adapters.append((role, weights, before + CONFIG))
    if adapters:
        return adapters
    files = sorted(name for name in names if "/" not in name and name.endswith(hub.ENDINGS))
    chosen = [name for name in (*WEIGHT_NAMES, *DIFFUSERS) if name in files][:1] or files
    if len(chosen) != 1:
        some = ", ".join(files[:5]) + ", ..." * (len(files) > 5)
        raise ValueError(f"{where}: is not a LoRA of PEFT ({CONFIG}); use one of its files: {some or 'it has none'}")
    return [("", chosen[0], None)]
