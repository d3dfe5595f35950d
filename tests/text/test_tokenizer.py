"""CLIPTokenizer against transformers' (the goldens), and its padding, truncation and errors."""

import gc
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from ldm_lite import Pipeline
from ldm_lite.core import tokenizer as core
from ldm_lite.text.bert import _VOCAB, BERTTokenizer
from ldm_lite.text.t5 import T5Tokenizer

SOT, EOT = 49406, 49407
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "tokenizer.json").read_text(encoding="utf-8"))
CASES = [(case["pattern"] * case["repeat"], case["ids"], case["total"]) for case in GOLDEN["cases"]]
WORD_PIECES = json.loads((Path(__file__).parents[1] / "data" / "wordpieces.json").read_text(encoding="utf-8"))
SPIECE = Path(__file__).parents[1] / "data" / "small_spiece.model"
ASTRONAUT = [SOT, 320, 1125, 539, 550, 18376, EOT]
TOO_LONG = [text for text, _, total in CASES if total > 77]


@pytest.fixture(scope="module")
def tokenizer(sd: Pipeline) -> Any:
    return sd.tokenizer


def tokens_of(row: torch.Tensor) -> list[int]:
    """The ids between the start and the end; for texts that hold no literal <|endoftext|>."""
    ids: list[int] = row.tolist()
    return ids[1 : ids.index(EOT)]


def test_merges_are_those_of_clip() -> None:
    _, *merges = (
        gzip.decompress(Path(core.__file__).with_name("clip_merges.txt.gz").read_bytes())
        .decode("utf-8")
        .rstrip("\n")
        .split("\n")
    )
    assert hashlib.sha256("\n".join(merges).encode("utf-8")).hexdigest() == GOLDEN["merges_sha256"]


@pytest.mark.parametrize(("text", "ids", "total"), CASES, ids=[ascii(text)[:40] for text, _, _ in CASES])
def test_ids_are_those_of_transformers(tokenizer: Any, text: str, ids: list[int], total: int) -> None:
    assert tokenizer([text]).tolist() == [ids + [EOT] * (77 - len(ids))]
    assert (tokenizer.dropped(text) == "") == (total <= 77)


def test_a_batch_is_its_rows(tokenizer: Any) -> None:
    texts = [text for text, _, _ in CASES]
    ids = tokenizer(texts)
    assert ids.shape == (len(texts), 77)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, torch.cat([tokenizer([text]) for text in texts]))


def test_no_texts_make_no_rows(tokenizer: Any) -> None:
    assert tokenizer([]).shape == (0, 77)


def test_padding(tokenizer: Any) -> None:
    texts = ["a photo of an astronaut"]
    assert tokenizer(texts).tolist() == [ASTRONAUT + [EOT] * 70]
    assert replace(tokenizer, pad_id=0)(texts).tolist() == [ASTRONAUT + [0] * 70]
    assert replace(tokenizer, length=8)(texts).tolist() == [[*ASTRONAUT, EOT]]


def test_truncation_keeps_the_end_token(tokenizer: Any) -> None:
    short = replace(tokenizer, length=5, pad_id=0)
    assert short(["a photo of an astronaut"]).tolist() == [[SOT, 320, 1125, 539, EOT]]
    assert short.dropped("a photo of an astronaut") == "an astronaut"
    assert replace(tokenizer, length=2)(["a photo"]).tolist() == [[SOT, EOT]]
    assert replace(tokenizer, length=2).dropped(" a photo") == "a photo"


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("a photo of an astronaut", ""),
        ("a " * 75, ""),
        ("a " * 75 + "Red  Fox \n", "Red  Fox"),  # as it was written: neither lower case nor one space
        ("  a\n" * 75 + "\tCAT", "CAT"),
        ("a " * 74 + "don't", "'t"),
        ("e\u0301 " * 76 + "x", "e\u0301 x"),  # normalised to one character each
        ("\u0130 " * 39, "\u0130 \u0130"),  # lower-cased to two characters, which are two tokens
        ("\u1100\u1161 " * 38, "\u1100\u1161"),  # composed to one character of two tokens, and cut between them
        ("\U0001f34e " * 75 + "\U0001f98a fox", "\U0001f98a fox"),
        ("a " * 74 + "\u65e5\u672c\u8a9e", "\u672c\u8a9e"),  # one token, then two characters that did not fit
        ("a " * 74 + "\U0001f9ff", "\U0001f9ff"),  # cut between its bytes
        ("<|endoftext|>" * 76, "<|endoftext|>"),
        ("a " * 75 + "\x1c", "\x1c"),  # a token, though Python takes it for white space
    ],
)
def test_dropped(tokenizer: Any, text: str, dropped: str) -> None:
    assert tokenizer.dropped(text) == dropped


@pytest.mark.parametrize("text", TOO_LONG, ids=[ascii(text)[:40] for text in TOO_LONG])
def test_dropped_is_the_end_of_the_text(tokenizer: Any, text: str) -> None:
    assert text.strip().endswith(tokenizer.dropped(text))


def test_what_was_kept_and_dropped_is_the_whole_text(tokenizer: Any) -> None:
    text = "An astronaut, riding a horse (8k) \u2764\ufe0f on caf\u00e9 terraces. " * 8
    dropped = tokenizer.dropped(text)
    kept = text.rstrip().removesuffix(dropped)
    long = replace(tokenizer, length=1000)
    assert tokens_of(long([kept])[0]) == tokens_of(tokenizer([text])[0])
    assert tokens_of(long([kept])[0]) + tokens_of(long([dropped])[0]) == tokens_of(long([text])[0])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a cat", r"got a single string, expected a list of strings: pass \[text\]"),
        (["a cat", None], "got NoneType among the texts"),
        ([b"a cat"], "got bytes among the texts"),
        ([["a cat"]], "got list among the texts"),
        (["a \ud800 cat"], r"got a lone surrogate, '\\ud800', at character 2, expected valid Unicode"),
    ],
)
def test_errors_are_one_line(tokenizer: Any, texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer(texts)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is ValueError


def test_dropped_raises_as_a_call_does(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.dropped("\udfff")


def test_no_room_for_start_and_end_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="got length 1, expected at least 2"):
        replace(tokenizer, length=1)


@pytest.mark.slow
def test_two_threads_give_what_one_gives(tokenizer: Any) -> None:
    texts = [text for text, _, _ in CASES]
    tokenizers = [tokenizer, replace(tokenizer, pad_id=0), replace(tokenizer, length=20)]
    jobs = [tokenizer for tokenizer in tokenizers for _ in range(4)]
    alone = {tokenizer: tokenizer(texts) for tokenizer in tokenizers}
    with ThreadPoolExecutor(max_workers=2) as pool:
        together = list(pool.map(lambda tokenizer: tokenizer(texts), jobs))
    assert all(torch.equal(ids, alone[tokenizer]) for tokenizer, ids in zip(jobs, together, strict=True))


def test_remembered_texts_take_little_memory(tokenizer: Any) -> None:
    """Whatever they are: a server that runs for months has seen the most of them."""
    pick, animals = random.Random(0), [*map(chr, range(0x1F400, 0x1F440))]
    tokenizer.encode("the backend is built")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(200):
            tokenizer.encode("".join(pick.choices(animals, k=200)))
            tokenizer.encode("".join(pick.choices("!#$%()*+,-./:;<=>?@[]^_{|}~0123456789", k=200)))
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 400 * 100 < taken < 400 * 1600


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_after_use_prints_no_warning() -> None:
    code = """
import os
from ldm_lite.text.tokenizer import FixingCLIPTokenizer
tokenizer = FixingCLIPTokenizer()
tokenizer(["a cat"] * 64)
child = os.fork()
tokenizer(["a cat"] * 64)
if child:
    os.waitpid(child, 0)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "parallelism" not in done.stderr


# ---- BERT -----------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_that_of_bert() -> None:
    pieces = gzip.decompress(_VOCAB.read_bytes()).partition(b"\n")[2]
    assert hashlib.sha256(pieces).hexdigest().startswith("07eced375cec144d27c900241f3e3394")


def test_bert_ids_are_those_of_transformers() -> None:
    bert = BERTTokenizer()
    for case in WORD_PIECES["bert"]:
        text, ids = case["pattern"] * case["repeat"], case["ids"]
        assert bert([text]).tolist() == [ids + [0] * (77 - len(ids))], ascii(text)[:60]


def test_bert_drops_what_does_not_fit_and_keeps_its_end() -> None:
    bert = BERTTokenizer(length=6)
    assert bert(["a photo of an astronaut"]).tolist() == [[101, 1037, 6302, 1997, 2019, 102]]
    assert bert.dropped("a photo of an Astronaut ") == "Astronaut"
    assert bert([""]).tolist() == [[101, 102, 0, 0, 0, 0]]


# ---- T5 -------------------------------------------------------------------------------------------------------------


def test_t5_ids_are_those_of_sentencepiece() -> None:
    t5 = T5Tokenizer(path=SPIECE)
    for case in WORD_PIECES["t5"]:
        assert t5.encode(case["text"]) == case["ids"], ascii(case["text"])
    ids = t5(["A photo", "photo " * 90])
    assert ids[0, 0] != 1
    assert ids[0].tolist() == [*t5.encode("A photo"), 1, *[0] * (76 - len(t5.encode("A photo")))]
    assert ids[1, -1] == 1


def test_t5_reads_the_json_of_tokenizers_too(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    t5 = T5Tokenizer(path=SPIECE)
    t5._backend().save(str(path))
    assert torch.equal(T5Tokenizer(path=path)(["a fox  </s> x"]), t5(["a fox  </s> x"]))
    padded = tmp_path / "padded.json"  # as transformers saves it after a use; </s> must stand before the padding
    backend = Tokenizer.from_file(str(path))
    backend.enable_padding(length=20)
    backend.enable_truncation(3)
    backend.save(str(padded))
    assert torch.equal(T5Tokenizer(path=padded)(["a fox  </s> x"]), t5(["a fox  </s> x"]))


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04", b"\x0a\xff\x01abc", b"\xff" * 30])
def test_a_file_that_is_not_a_t5_vocabulary_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "spiece.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"spiece.model: is not a spiece.model or tokenizer.json") as caught:
        T5Tokenizer(path=path)
    assert "\n" not in str(caught.value)


def test_hostile_vocabularies_are_refused_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "varint.model"
    path.write_bytes(b"\xff" * 10**6)  # one number of 7 million bits
    start = time.process_time()
    with pytest.raises(ValueError, match=r"is not a spiece.model .* \(a number of more than 64 bits\)"):
        T5Tokenizer(path=path)
    assert time.process_time() - start < 10
    other_path = tmp_path / "clip.json"
    core.clip_bpe().save(str(other_path))
    with pytest.raises(ValueError, match=r"is not a spiece.model or tokenizer.json of T5 \(<pad> and </s>"):
        T5Tokenizer(path=other_path)
    charsmap = tmp_path / "charsmap.model"  # its tree points outside itself, where the library panics
    charsmap.write_bytes(SPIECE.read_bytes() + b"\x1a\x0a\x12\x08" + b"\4\0\0\0abcd")
    with pytest.raises(ValueError, match="the tokenizer's vocabulary is damaged: download it again"):
        T5Tokenizer(path=charsmap)(["a fox"])


def test_t5_has_no_vocabulary_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"expected the path of a spiece.model"):
        T5Tokenizer()
