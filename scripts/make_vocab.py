"""Make ldm_lite/clip_merges.txt.gz: the 48,894 BPE merges that CLIP uses, from OpenAI's full list of 262,144.

Source: bpe_simple_vocab_16e6.txt.gz of OpenAI CLIP (MIT, Copyright (c) 2021 OpenAI), the data file of open_clip_torch
(MIT). The first line of what is written says so too. The same source always gives the same bytes.

    pip install --no-deps open_clip_torch
    python scripts/make_vocab.py [bpe_simple_vocab_16e6.txt.gz]
"""

import gzip
import importlib.util
import io
import sys
from pathlib import Path

NUM_MERGES = 49152 - 256 - 2  # CLIP's 49,408 ids: 2 x 256 bytes, these merges, two special tokens
HEADER = "# CLIP BPE merges, the first 48894 of bpe_simple_vocab_16e6.txt. MIT licence, Copyright (c) 2021 OpenAI"
TARGET = Path(__file__).resolve().parents[1] / "ldm_lite" / "clip_merges.txt.gz"


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


def main() -> None:
    """Write the compact copy and say how large it is."""
    merges = read_merges(Path(sys.argv[1]) if len(sys.argv) > 1 else source())
    buffer = io.BytesIO()
    # No name and no time in the gzip header, so that the file changes only when its content does.
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as stream:
        stream.write("".join(f"{line}\n" for line in [HEADER, *merges]).encode("utf-8"))
    TARGET.write_bytes(buffer.getvalue())
    print(f"{TARGET}: {len(merges)} merges, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
