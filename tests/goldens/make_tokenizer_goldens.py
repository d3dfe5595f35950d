"""Make tests/data/tokenizer.json: ids by transformers' CLIPTokenizer of texts that are hard to tokenize.

Each case is a pattern and how often it is repeated, its ids (start, at most 75 tokens, end; no padding), and how many
ids there would be without truncation. Every character is of Unicode 8 or older, so that the ids do not depend on how
new the Unicode tables of `tokenizers` are.

    pip install ftfy transformers && pip install --no-deps open_clip_torch
    PYTHONPATH=tests/fixtures:scripts python tests/goldens/make_tokenizer_goldens.py [bpe_simple_vocab_16e6.txt.gz]
"""

import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path
from unicodedata import normalize, ucd_3_2_0

import tokenizers
import transformers
from make_vocab import read_merges, source

TARGET = Path(__file__).resolve().parents[1] / "data" / "tokenizer.json"

PLAIN = [
    "",
    "a photo of an astronaut",
    "A Photo Of An ASTRONAUT",
    "a photograph of an astronaut riding a horse on mars, highly detailed, 8k, trending on artstation",
    "(masterpiece:1.2), [blurry], {best quality} | (((sharp))) -- ar 16:9 --v 4",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "snake_case camelCase kebab-case a/b\\c <lora:name:0.8> embedding:bad-hands-5",
    "!", "...", "!?!?", "?!'s", "a.b,c;d:e", "#$%&*+=@^~`", "\"quoted\" 'quoted'",
]  # fmt: skip
APOSTROPHES = ["'s", "it's", "IT'S", "we'LL", "'re 've 'm 'll 'd 't", "don't", "o''s", "'", "''", "rock'n'roll", "'sS"]
APOSTROPHES += ["it\u2019s a \u201cdog\u201d", "\u02bcs", "'\u017f"]  # typographic; the long s is no s here
DIGITS = ["0", "1234567890", "3.14159", "2024-01-31", "1,000,000", "a1b2c3", "\u00b2\u00bd", "\u0661\u0662", "\u2167"]
WHITE = [" ", "   ", "\n", " \t\r\n\v\f ", "a  b", " a ", "a\tb\nc\r\nd", "a\u00a0b", "a\u3000b", "a\u2028b\u2029c"]
WHITE += ["a\u1680b\u2003c\u202fd", "a\u200bb", "\ufeffa", "a\u2060b", "a\u00adb"]
CONTROL = ["\x00", "a\x00b", "\x1c\x1d\x1e\x1f", "a\x1cb", "a\x85b", "\x7f", "\x80\x9f", "\x1b[31mred\x1b[0m", "\x08"]
HTML = ["&", "&amp;", "caf\u00e9 &amp; bar", "&lt;b&gt; &quot;x&quot; &#39; &#x1F34E; &nbsp;", "<b>bold</b>", "a < b"]
SPECIAL = [
    "<|endoftext|>", "<|startoftext|>", "x<|endoftext|>y", "<|endoftext|><|startoftext|>", "<|ENDOFTEXT|>",
    "<|StartOfText|> a", "<|endoftext", "endoftext|>", "<| endoftext |>", "<start_of_text>", "</w>", "dog</w>",
]  # fmt: skip
LETTERS = [
    "\u00e9", "caf\u00e9", "cafe\u0301", "e\u0301\u0301", "a\u0316\u0301b", "q\u0301", "\u0301", "\u0344",
    "\u1e9b\u0323", "\u0130stanbul \u0131I\u0130", "I\u0307", "\u039f\u0394\u039f\u03a3 \u03a3\u03c3\u03c2",
    "STRA\u1e9eE stra\u00dfe", "\u01c4 \u01c5 \u01c6", "\ufb01sh \uff43\uff41\uff54", "\u212a \u212b \u2126",
    "\u0958 \uf900", "caf\u00c3\u00a9", "\u65e5\u672c\u8a9e\u306e\u732b", "\u4e2d\u6587\uff0c\u732b\u3002",
    "\ud55c\uad6d\uc5b4", "\u1100\u1161\u11a8 \uac00\u11a8", "\u304b\u3099 \u30ac \uff76\uff9e", "\u202eabc\u200f",
    "\u05e9\u05c1\u05dc\u05d5\u05dd", "\u0627\u0644\u0639\u064e\u0631\u0628\u0640", "\ue000",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
]  # fmt: skip
EMOJI = [
    "\U0001f34e", "a red apple \U0001f34e", "\U0001f34e\U0001f34e", "\u2764\ufe0f \u2764", "\U0001f468\U0001f3fd",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f1e9\U0001f1ea", "1\ufe0f\u20e3", "\U0001f600!\U0001f600's", "\u00a9\u2122\u2192",
]  # fmt: skip
LONG = [
    ("a ", 75), ("a ", 76), ("very ", 200), ("a", 10000), ("!", 10000), (" ", 10000), ("'s", 100), ("1", 10000),
    ("\U0001f34e", 400), ("\u65e5\u672c\u8a9e\u3001", 100), ("e\u0301 ", 100), ("\u0130 ", 100), ("<|endoftext|>", 100),
    ("word\x00", 60), ("a photo of an astronaut ", 400), ("pneumonoultramicroscopic", 400),
]  # fmt: skip


def random_texts(num: int, seed: int) -> list[str]:
    """The same random texts for the same seed: characters of one block, of several, or of all of Unicode 3.2.

    These tables are frozen, so a newer Python makes no other texts.
    """
    random_state = random.Random(seed)
    assigned = [chr(c) for c in range(0x30000) if ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs", "Co")]
    block_size = 96
    texts = []
    for index in range(num):
        starts = [random_state.randrange(len(assigned) - block_size) for _ in range(1 + index % 3)]
        pool = [c for start in starts for c in assigned[start : start + block_size]] if index % 4 else assigned
        text = "".join(random_state.choice([random_state.choice(pool), *" '1aE"]) for _ in range(10 + index))
        texts.append(normalize(("NFC", "NFD")[index % 2], text))
    return texts


def reference(merges: list[str], folder: Path) -> transformers.CLIPTokenizer:
    """The tokenizer of transformers, from a vocab.json and a merges.txt that are written to the folder."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [*map(chr, printable), *(chr(256 + n) for n in range(256 - len(printable)))]
    tokens = [*alphabet, *(f"{c}</w>" for c in alphabet), *(merge.replace(" ", "") for merge in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocab_path, merges_path = folder / "vocab.json", folder / "merges.txt"
    vocab_path.write_text(json.dumps({token: index for index, token in enumerate(tokens)}), encoding="utf-8")
    merges_path.write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return transformers.CLIPTokenizer(str(vocab_path), str(merges_path))


def main() -> None:
    """Write the goldens and say how many."""
    merges = read_merges(Path(sys.argv[1]) if len(sys.argv) > 1 else source())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = reference(merges, Path(folder))
    texts = [*PLAIN, *APOSTROPHES, *DIGITS, *WHITE, *CONTROL, *HTML, *SPECIAL, *LETTERS, *EMOJI]
    cases = []
    for pattern, repeat in [*((text, 1) for text in [*texts, *random_texts(24, seed=1)]), *LONG]:
        text = pattern * repeat
        ids = tokenizer(text, truncation=True, max_length=77)["input_ids"]
        cases.append({"pattern": pattern, "repeat": repeat, "ids": ids, "total": len(tokenizer(text)["input_ids"])})
    golden = {
        "versions": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
        "merges_sha256": hashlib.sha256("\n".join(merges).encode("utf-8")).hexdigest(),
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(case) for case in cases)
    TARGET.write_text(f'{json.dumps(golden)[:-1]}, "cases": [\n{rows}\n]}}\n', encoding="utf-8")
    print(f"{TARGET}: {len(cases)} cases, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
