"""Where a model's networks and vocabularies come from, if not from its checkpoint: files of their own."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.reader import errors_of, open_checkpoint, split
from ldm_lite.core.files import Tensors, imported
from ldm_lite.text.tokenizer import (
    BERTTokenizer,
    CLIPTokenizer,
    OpenCLIPTokenizer,
    Qwen3Tokenizer,
    T5Tokenizer,
    TextTokenizer,
)
from ldm_lite.zoo.detection import check_texts, kinds_of, row_of, text_kind
from ldm_lite.zoo.family import Family, text_roles
from ldm_lite.zoo.networks import Spec

FOLDER = "ldm_lite.formats.diffusers_folder"
T5_VOCABS = ("spiece.model", "tokenizer.json")  # the file of T5's pieces
QWEN3_VOCABS = ("tokenizer.json", "vocab.json")  # vocab.json with merges.txt beside it
TOKENIZERS: dict[str, Callable[[int], TextTokenizer]] = {  # by the class of a text encoder's spec
    "CLIPTextSpec": CLIPTokenizer,
    "OpenCLIPTextSpec": OpenCLIPTokenizer,
    "BERTSpec": BERTTokenizer,
}
WORDS = 30522  # of BERT's vocabulary
# The metadata of each role's network, which follow it when it replaces another's.
METADATA_OF_ROLE = {
    "unet": ("unet_num_heads", "unet_head_dim", "sample_size"),
    "vae": ("scaling_factor",),
    "text_encoder": ("text_activation", "text_num_heads", "text_skip"),
    "text_encoder_2": ("text_2_activation", "text_2_num_heads"),
}


def open_source(source: str | os.PathLike[str] | None) -> Tensors:
    """Open a checkpoint: a file, or a diffusers folder of a whole pipeline or one network, as one file.

    Either may be on the hub: "owner/repository/file", or "owner/repository" for a folder; None is the bundled model.
    Raises FileNotFoundError and ValueError, one line.
    """
    repository = hub.repository(source)
    path = hub.resolve(source) if repository is None else imported(f"{FOLDER}:download")(repository)
    return imported(f"{FOLDER}:open_folder")(path) if path.is_dir() else open_checkpoint(path)


def metadata_of(role: str, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of the network of this role, of all in its file or folder."""
    return {name: metadata[name] for name in METADATA_OF_ROLE.get(role, ()) if name in metadata}


def tokenizer_of(spec: Spec | None) -> TextTokenizer | None:
    """Return the tokenizer of a text encoder; None if it does not read text, or its files have another of their own."""
    kind = TOKENIZERS.get(type(spec).__name__)
    if spec is None or kind is None or (kind is BERTTokenizer and spec.vocab_size != WORDS):  # else it reads boxes
        return None
    return kind(spec.length)


def placed(
    own: Mapping[str, Tensors], replaced: Mapping[str, Tensors], metadata: Mapping[str, str]
) -> dict[str, Tensors]:
    """Return the networks of all files by role; each text encoder of a transformer has the role of its kind."""
    parts = {**own, **replaced}
    unet = parts.get("unet")
    with errors_of(next(iter(parts.values())).path):
        row = None if unet is None else row_of(unet.shapes, metadata)
    if row is None or not row.text_encoders:
        return parts
    check_texts(
        row, {str(part.path): part.shapes for role, part in replaced.items() if role.startswith("text_encoder")}
    )
    texts = [part for parts in (own, replaced) for role, part in parts.items() if role.startswith("text_encoder")]
    kinds = {text_kind(part.shapes): part for part in texts}
    places = zip(text_roles(row.text_encoders), kinds_of(row), strict=True)
    others = {role: part for role, part in parts.items() if not role.startswith("text_encoder")}
    return others | {role: kinds[kind] for role, kind in places if kind in kinds}


def from_files(sources: Mapping[str, Sequence[str]]) -> tuple[dict[str, Tensors], Tensors | None]:
    """Return the networks from other files, by role, and the whole file of the UNet, if one is among them.

    Raises ValueError for a file without a network of its role.
    """
    replaced: dict[str, Tensors] = {}
    texts: list[Tensors] = []
    main = None
    for name, source in ((name, source) for name, several in sources.items() for source in several):
        parts = split(open_source(source))
        of_role = [part for role, part in parts.items() if role.startswith(name)]
        if not of_role:
            raise ValueError(f"{source}: holds no {name.replace('_', ' ')}, only {', '.join(sorted(parts))}")
        if name == "text_encoder":
            texts += of_role
        else:
            replaced[name] = of_role[0]
            main = parts.file if name == "unet" else main
    return replaced | dict(zip(text_roles(texts), texts, strict=True)), main


def tokenizers_of(
    family: Family, parts: Mapping[str, Tensors], source: str | None, vocab: str | None
) -> tuple[TextTokenizer | None, T5Tokenizer | None]:
    """Return the tokenizer of a family's text encoder, and that of its T5; None where it has none.

    Qwen3's files, `source`, and T5's, `vocab`, are else looked for beside their weights.  Raises ValueError, one line,
    if they are not there or those of another model.
    """
    roles = {type(spec).__name__: role for role, spec in family.networks.items()}
    if source is not None and "Qwen3Spec" not in roles:
        raise ValueError(f"got `tokenizer` {source}, which {family.title} does not use: leave it out")
    t5 = _t5_tokenizer(parts[roles["T5Spec"]].path, roles["T5Spec"], vocab) if "T5Spec" in roles else None
    if "Qwen3Spec" in roles:
        return _qwen3_tokenizer(parts[roles["Qwen3Spec"]], roles["Qwen3Spec"], source), t5
    return tokenizer_of(family.text), t5


def _t5_tokenizer(weights: Path, role: str, vocab: str | None) -> T5Tokenizer:
    path = hub.resolve(vocab) if vocab is not None else _beside(weights, role, T5_VOCABS)
    if path is None:
        raise ValueError(f"no spiece.model or tokenizer.json of T5 beside {weights}: name it with `t5_vocab=FILE`")
    return T5Tokenizer(512, path=path)


def _qwen3_tokenizer(encoder: Tensors, role: str, source: str | None) -> Qwen3Tokenizer:
    path = _beside(encoder.path, role, QWEN3_VOCABS) if source is None else hub.resolve(source)
    if path is not None and path.is_dir():
        path = _beside(path, role, QWEN3_VOCABS)
    if path is None:
        where = f"beside {encoder.path}" if source is None else f"in {source}"
        raise ValueError(
            f"no tokenizer.json of Qwen3, nor vocab.json with merges.txt, {where}: name one with `tokenizer=FILE`"
        )
    tokenizer = Qwen3Tokenizer(512, path=path)
    size = encoder.shapes["embed_tokens.weight"][0]
    if tokenizer.vocab_size > size:
        raise ValueError(f"{path}: has {tokenizer.vocab_size} tokens, but {encoder.path} only {size}: take its own")
    return tokenizer


def _beside(weights: Path, role: str, names: Sequence[str]) -> Path | None:
    """Return the first file of these names in the folder of a text encoder's weights or in the tokenizer's beside."""
    folder = weights.parent if weights.is_file() else weights
    places = [folder, *(folder / role.replace("text_encoder", "tokenizer") for folder in (folder, folder.parent))]
    files = (place / name for place in places for name in names)
    return next((file for file in files if file.is_file()), None)
