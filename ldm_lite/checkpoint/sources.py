"""Where a model's networks and vocabularies come from, if not from its checkpoint: files of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ldm_lite.checkpoint import hub
from ldm_lite.checkpoint.diffusers_folder import QWEN3_VOCABS, T5_VOCABS, open_source
from ldm_lite.checkpoint.reader import Component, errors_of, split
from ldm_lite.models.bert import BERTSpec
from ldm_lite.models.clip import CLIPTextSpec
from ldm_lite.models.open_clip import OpenCLIPTextSpec
from ldm_lite.models.qwen3 import Qwen3Spec
from ldm_lite.models.t5 import T5Spec
from ldm_lite.text.tokenizer import (
    BERTTokenizer,
    CLIPTokenizer,
    OpenCLIPTokenizer,
    Qwen3Tokenizer,
    T5Tokenizer,
    TextTokenizer,
)
from ldm_lite.zoo.families import Family, text_roles
from ldm_lite.zoo.networks import BERT_LARGE, EncoderSpec
from ldm_lite.zoo.transformers import check_texts, text_kind, transformer_row


def tokenizer_of(spec: EncoderSpec | None) -> TextTokenizer | None:
    """Return the tokenizer of a text encoder; None if it does not read text."""
    if isinstance(spec, CLIPTextSpec):
        return CLIPTokenizer(spec.length)
    if isinstance(spec, OpenCLIPTextSpec):
        return OpenCLIPTokenizer(spec.length)
    if isinstance(spec, BERTSpec) and spec.vocab_size == BERT_LARGE.vocab_size:  # otherwise it reads boxes
        return BERTTokenizer(spec.length)
    return None


def placed(
    own: Mapping[str, Component], given: Mapping[str, Component], metadata: Mapping[str, str]
) -> dict[str, Component]:
    """Return the components of all files by role; each text encoder of a transformer has the role of its kind."""
    components = {**own, **given}
    unet = components.get("unet")
    with errors_of(next(iter(components.values())).checkpoint.path):
        row = None if unet is None else transformer_row(unet.shapes, metadata)
    if row is None:
        return components
    check_texts(row, {str(c.checkpoint.path): c.shapes for role, c in given.items() if role.startswith("text_encoder")})
    texts = [each for part in (own, given) for role, each in part.items() if role.startswith("text_encoder")]
    kinds = {text_kind(each.shapes): each for each in texts}
    places = zip(text_roles(row.text_encoders), map(type, row.text_encoders), strict=True)
    others = {role: each for role, each in components.items() if not role.startswith("text_encoder")}
    return others | {role: kinds[kind] for role, kind in places if kind in kinds}


def from_files(sources: Mapping[str, Sequence[str]]) -> dict[str, Component]:
    """Return the weights from other files, by role.  Raises ValueError for a file without weights of its role."""
    components: dict[str, Component] = {}
    texts: list[Component] = []
    for name, source in ((name, source) for name, several in sources.items() for source in several):
        given = split(open_source(source))
        found = [component for role, component in given.items() if role.startswith(name)]
        if not found:
            raise ValueError(f"{source}: holds no {name.replace('_', ' ')}, only {', '.join(sorted(given))}")
        if name == "text_encoder":
            texts += found
        else:
            components[name] = found[0]
    return components | dict(zip(text_roles(texts), texts, strict=True))


def t5_tokenizer_of(family: Family, components: Mapping[str, Component], vocab: str | None) -> T5Tokenizer | None:
    """Return the tokenizer of a family's T5, None if it has none, from a file that is given or lies beside its weights.

    Raises ValueError, one line, if there is none.
    """
    role = next((role for role, spec in family.networks.items() if isinstance(spec, T5Spec)), None)
    if role is None:
        return None
    weights = components[role].checkpoint.path
    path = hub.resolve(vocab) if vocab is not None else _beside(weights, role, T5_VOCABS)
    if path is None:
        raise ValueError(f"no spiece.model or tokenizer.json of T5 beside {weights}: name it with `t5_vocab=FILE`")
    return T5Tokenizer(512, path=path)


def qwen3_tokenizer_of(family: Family, components: Mapping[str, Component], given: str | None) -> Qwen3Tokenizer | None:
    """Return the tokenizer of a family's Qwen3, None if it has none, from a file or folder that is given, or beside it.

    Raises ValueError, one line, if there is none, or if it is of another model.
    """
    role = next((role for role, spec in family.networks.items() if isinstance(spec, Qwen3Spec)), None)
    if role is None:
        if given is not None:
            raise ValueError(f"got `tokenizer` {given}, which {family.title} does not use: leave it out")
        return None
    weights = components[role].checkpoint.path
    path = _beside(weights, role, QWEN3_VOCABS) if given is None else hub.resolve(given)
    if path is not None and path.is_dir():
        path = _beside(path, role, QWEN3_VOCABS)
    if path is None:
        where = f"beside {weights}" if given is None else f"in {given}"
        raise ValueError(
            f"no tokenizer.json of Qwen3, nor vocab.json with merges.txt, {where}: name one with `tokenizer=FILE`"
        )
    tokenizer = Qwen3Tokenizer(512, path=path)
    known = components[role].shapes["embed_tokens.weight"][0]
    if tokenizer.vocab_size > known:
        raise ValueError(f"{path}: has {tokenizer.vocab_size} tokens, but {weights} only {known}: take its own")
    return tokenizer


def _beside(weights: Path, role: str, names: Sequence[str]) -> Path | None:
    """Return the first file of these names in the folder of a text encoder's weights or in the tokenizer's beside."""
    folder = weights.parent if weights.is_file() else weights
    places = [folder, *(folder / role.replace("text_encoder", "tokenizer") for folder in (folder, folder.parent))]
    files = (place / name for place in places for name in names)
    return next((file for file in files if file.is_file()), None)
