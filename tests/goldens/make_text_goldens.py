"""Make tests/data/text.npz and tests/data/wordpieces.json: text encoders and tokenizers of independent implementations.

    pip install transformers sentencepiece einops && pip install --no-deps open_clip_torch
    git clone https://github.com/CompVis/latent-diffusion && git clone https://github.com/Stability-AI/stablediffusion
    git clone https://github.com/Stability-AI/generative-models
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_text_goldens.py --originals .

The encoders are open_clip's TextTransformer, run by the originals' FrozenOpenCLIPEmbedder (Stable Diffusion 2) and
FrozenOpenCLIPEmbedder2 (SDXL), latent-diffusion's TransformerWrapper and transformers' T5EncoderModel, in miniature,
with toy.fill's weights, in float32.  The tokenizers are transformers' BertTokenizer with the vocabulary of
bert-base-uncased, and SentencePiece itself on a model of 150 pieces that is trained here and stored with the tests.
"""

import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import sentencepiece
import tokenizers
import torch
import toy
import transformers
from make_goldens import write as write_arrays
from make_tokenizer_goldens import APOSTROPHES, CONTROL, DIGITS, EMOJI, HTML, LETTERS, LONG, PLAIN, WHITE, random_texts
from making import DATA, Arrays, folder_of_originals, made_with, repository

from ldm_lite.models.t5 import T5Encoder
from ldm_lite.text.tokenizer import _BERT_VOCAB

STUBS = ("torchvision", "torchvision.ops", "torchvision.ops.misc", "kornia", "clip", "open_clip", "pytorch_lightning")


def open_clip(originals: Path) -> Arrays:
    """The context of Stable Diffusion 2, and the context and the pooled output of SDXL."""
    spec, ids = toy.OPEN_CLIP, toy.padded_ids(toy.OPEN_CLIP.vocab_size, toy.OPEN_CLIP.length)
    folder = Path(importlib.util.find_spec("open_clip").submodule_search_locations[0])
    with repository(folder.parent, ("open_clip",), STUBS[:3]):
        model = importlib.import_module("open_clip.transformer").TextTransformer(
            context_length=spec.length,
            vocab_size=spec.vocab_size,
            width=spec.width,
            heads=spec.heads,
            layers=spec.layers,
            mlp_ratio=spec.mlp_width / spec.width,
            output_dim=spec.width,
        )
    toy.fill(model)
    for block in model.transformer.resblocks:
        block.attn.batch_first = False  # as the originals, which are older, expect it

    def embed(kind: type, **attributes: object) -> object:
        embedder = SimpleNamespace(model=model, layer="penultimate", layer_idx=1, **attributes)
        for name in ("text_transformer_forward", "pool"):
            if hasattr(kind, name):
                setattr(embedder, name, getattr(kind, name).__get__(embedder))
        return kind.encode_with_transformer(embedder, ids)

    with repository(originals / "stablediffusion", (), STUBS):
        kind = importlib.import_module("ldm.modules.encoders.modules").FrozenOpenCLIPEmbedder
        arrays = {"open_clip.sd2": embed(kind)}
    packages = ("sgm", "sgm.modules", "sgm.modules.encoders", "sgm.modules.diffusionmodules")
    with repository(originals / "generative-models", packages, (*STUBS, "omegaconf")):
        for name in ("sgm.modules.autoencoding.regularizers", "sgm.util"):  # of no use to the text embedder
            sys.modules[name] = mock.MagicMock()
        kind = importlib.import_module("sgm.modules.encoders.modules").FrozenOpenCLIPEmbedder2
        embedded = embed(kind, legacy=False)
    return {**arrays, "open_clip.sdxl": embedded["penultimate"], "open_clip.pooled": embedded["pooled"]}


def bert(originals: Path) -> Arrays:
    """latent-diffusion's transformer."""
    spec = toy.BERT
    with repository(originals / "latent-diffusion"):
        module = importlib.import_module("ldm.modules.x_transformer")
        layers = module.Encoder(dim=spec.width, depth=spec.layers)
        model = module.TransformerWrapper(num_tokens=spec.vocab_size, max_seq_len=spec.length, attn_layers=layers)
    return {"bert": toy.fill(model)(toy.padded_ids(spec.vocab_size, spec.length), return_embeddings=True)}


def t5() -> Arrays:
    """transformers' encoder, with a mask and without."""
    spec = toy.T5
    config = transformers.T5Config(
        vocab_size=spec.vocab_size,
        d_model=spec.width,
        d_kv=spec.head_dim,
        d_ff=spec.mlp_width,
        num_layers=spec.layers,
        num_heads=spec.heads,
        relative_attention_num_buckets=spec.buckets,
        relative_attention_max_distance=spec.max_distance,
        feed_forward_proj="gated-gelu",
    )
    model = transformers.T5EncoderModel(config).eval()
    weights = toy.fill(T5Encoder(spec)).state_dict()
    model.load_state_dict({**weights, "encoder.embed_tokens.weight": weights["shared.weight"]}, strict=True)
    ids = toy.padded_ids(spec.vocab_size, 20)
    return {
        "t5": model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state,
        "t5.masked": model(ids, attention_mask=ids != 0).last_hidden_state,
    }


# ---- tokenizers -----------------------------------------------------------------------------------------------------

SPECIAL = ["[SEP]", "x[MASK]y", "[cls]", "[PAD] [UNK]", "##ing", "unaffable", "\u4e2dcat\u6587", "a" * 101]
SENTENCES = ["  two  spaces ", "\uff21\uff22 \uff11", "zzz\u65e5\u672czzz"]


def word_pieces() -> list[dict[str, object]]:
    """BERT's ids (start, at most 75 tokens, end) of texts that are hard to tokenize."""
    texts = [*PLAIN, *APOSTROPHES, *DIGITS, *WHITE, *CONTROL, *HTML, *LETTERS, *EMOJI, *SPECIAL]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.txt"
        path.write_bytes(gzip.decompress(_BERT_VOCAB.read_bytes()).partition(b"\n")[2])
        tokenizer = transformers.BertTokenizer(str(path))
    assert len(tokenizer) == 30522
    cases = [*((text, 1) for text in [*texts, *random_texts(12, seed=2)]), *LONG]
    return [
        {"pattern": p, "repeat": n, "ids": tokenizer(p * n, truncation=True, max_length=77)["input_ids"]}
        for p, n in cases
    ]


def sentence_pieces(target: Path) -> list[dict[str, object]]:
    """Train a small unigram model, store it, and its ids of some texts (without </s>)."""
    corpus = (DATA.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"  # full-width letters and figures; the usual rules take 240 KB
        pairs = [(ord("\uff21") + i, ord("A") + i) for i in range(26)] + [(0xFF10 + i, 0x30 + i) for i in range(10)]
        rules.write_text("".join(f"{wide:X}\t{narrow:X}\n" for wide, narrow in pairs), encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_prefix=str(Path(folder) / "small"),
            vocab_size=150,
            character_coverage=1.0,
            hard_vocab_limit=False,
            normalization_rule_tsv=str(rules),
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
        target.write_bytes((Path(folder) / "small.model").read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(target))
    texts = [*PLAIN, *WHITE[:6], *DIGITS[:4], *EMOJI[:4], *SENTENCES]
    return [{"text": text, "ids": processor.encode(text)} for text in texts]


def main() -> None:
    """The command line."""
    originals = folder_of_originals(__doc__)
    versions = {
        **json.loads(made_with((torch, np, transformers, tokenizers, sentencepiece))),
        "open_clip_torch": importlib.metadata.version("open_clip_torch"),
    }
    with torch.no_grad():
        arrays = open_clip(originals) | bert(originals) | t5()
        write_arrays(DATA / "text.npz", arrays, torch.float32, json.dumps(versions))
    golden = {"versions": versions, "bert": word_pieces(), "t5": sentence_pieces(DATA / "small_spiece.model")}
    target = DATA / "wordpieces.json"
    target.write_text(json.dumps(golden, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {len(golden['bert'])} and {len(golden['t5'])} cases, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
