"""Options that a run would not use are refused, before torch or a model is loaded."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ldm_lite
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.version import pip_install
from ldm_lite.train.options import TrainOptions, as_toml, check, check_here, resolved, with_config
from ldm_lite.train.run import changes_text


@pytest.mark.parametrize(
    ("settings", "load", "message"),
    [
        ({}, {"storage": "int8"}, "`storage` has no effect on training of a whole model: leave it out"),
        ({}, {"offload": "model"}, "`offload` has no effect on training of a whole model: leave it out"),
        ({}, {"compiled": "unet.pt2"}, "`compiled` has no effect on training: leave it out"),
        ({}, {"compile": "step"}, "`compile` has no effect on training: leave it out, or use `compile_network`"),
        ({}, {"dtype": "fp8"}, "got `dtype=fp8`, expected fp32, bf16 or fp16: trained weights are always float32"),
        (
            {"lora_rank": 2, "lora_kind": "dora"},
            {"storage": "fp8"},
            "`lora_kind=dora` measures weights, which `storage`",
        ),
        ({"sample_every": 1500}, {}, "got `sample_every` 1500, expected a multiple of `save_every`"),
        ({"lora_alpha": 2.0}, {}, "`lora_alpha` has no effect without `lora_rank`"),
        ({"lora_text": True}, {}, "`lora_text` has no effect without `lora_rank`"),
        ({"lora_rank": 2, "freeze_text": True}, {}, "`freeze_text` has no effect with `lora_rank`"),
        ({"lora_rank": 2, "train_text": True}, {}, "`train_text` has no effect with `lora_rank`"),
        ({"stage": "control", "train_text": True}, {}, "`train_text` has no effect with `stage=control`"),
        ({"freeze_text": True, "train_text": True}, {}, "`train_text` has no effect with `freeze_text`"),
        ({"lora_rank": 2, "stage": "control"}, {}, "`lora_rank` trains a LoRA for the diffusion model: leave out"),
        ({"scenes": 5}, {}, "`scenes` has no effect without `renderer`"),
        ({"fsdp": True, "ema_lengths": True}, {}, "`ema_lengths` has no effect with `fsdp`"),
        ({"fsdp": True, "optimizer": "prodigy"}, {}, "`fsdp` has no effect with `optimizer=prodigy`"),
        ({"log_to": ("paper",)}, {}, "got `log_to` 'paper', expected tensorboard or wandb"),
        ({"stage": "embedding"}, {}, "`stage=embedding` learns a name in captions: give it as `token`"),
        ({"token": "<it>"}, {}, "`token` has no effect without `stage=embedding`"),
        ({"stage": "control", "class_prompt": "a"}, {}, "`class_prompt` has no effect with `stage=control`"),
        ({"lora_kind": "loha"}, {}, "`lora_kind` has no effect without `lora_rank`"),
        ({"lora_rank": 2, "lokr_factor": 4}, {}, "`lokr_factor` has no effect without `lora_kind=lokr`"),
        ({"lcm": True}, {}, "`lcm` has no effect without `lora_rank`"),
        ({"lora_rank": 2, "lcm_guidance": 2.0}, {}, "`lcm_guidance` has no effect without `lcm`"),
        ({"lora_rank": 2, "lcm": True, "lora_text": True}, {}, "`lora_text` has no effect with `lcm`"),
        ({"lora_rank": 2, "lcm": True, "validation": "0.1"}, {}, "`validation` has no effect with `lcm`"),
        ({"min_snr": 5.0, "weighting": "snr"}, {}, "got `min_snr` and `weighting=snr`: expected one of them"),
        (
            {"optimizer": "prodigy", "weighting": "learned"},
            {},
            "`weighting=learned` has its own learning rate, which",
        ),
        ({"prior_weight": 2.0}, {}, "`prior_weight` has no effect without `class_data` or `class_prompt`"),
        ({"validate_every": 2}, {}, "`validate_every` has no effect without `validation`"),
        ({"validation": "2"}, {}, "got `validation` 2, expected a folder, or a fraction between 0 and 1"),
        ({"renderer_options": "{1: 2}"}, {}, "`renderer_options` has no effect without `renderer`"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, {}, "got `lora_alpha` 0, by which the LoRA would change nothing"),
        ({"renderer": "a.py"}, {}, "expected either `data=FOLDER` or `renderer=FILE.py`"),
        ({"data": None}, {}, "expected either `data=FOLDER` or `renderer=FILE.py`"),
    ],
)
def test_an_option_without_effect_is_refused(
    settings: dict[str, object], load: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(TrainOptions(**{"data": "photos", **settings}), LoadOptions(**load))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "steps", "lr", "decay"),
    [
        ({}, 10_000, 1e-5, 0.999),
        ({"stage": "control"}, 10_000, 1e-5, 0.999),
        ({"stage": "embedding"}, 3_000, 5e-3, 0.0),
        ({"lora_rank": 16}, 2_000, 1e-4, 0.0),
        ({"lora_rank": 16, "lcm": True}, 2_000, 1e-4, 0.95),
        ({"lora_rank": 16, "optimizer": "prodigy"}, 2_000, 1.0, 0.0),
        ({"lr": 0.5, "steps": 7, "ema_decay": 0.1}, 7, 0.5, 0.1),
        ({"lora_rank": 16, "lr": 0.0, "ema_decay": 0.9}, 2_000, 0.0, 0.9),
    ],
)
def test_defaults_follow_what_is_trained(settings: dict[str, Any], steps: int, lr: float, decay: float) -> None:
    options = resolved(TrainOptions(**settings))
    assert (options.steps, options.lr, options.ema_decay) == (steps, lr, decay)
    assert (options.batch_size, options.caption_dropout, options.train_text) == (1, 0.0, False)
    assert options == resolved(options)


def test_whether_text_changes_follows_what_is_trained(small_path: Path) -> None:
    pipe, lora = ldm_lite.load(small_path, device="cpu"), {"lora_rank": 2}
    for changing in ({"train_text": True}, lora | {"lora_text": True}, {"stage": "embedding", "token": "it"}):
        assert changes_text(TrainOptions(data="a", **changing), pipe)  # type: ignore[arg-type]
    for fixed in ({}, lora, {"stage": "control"}):
        assert not changes_text(TrainOptions(data="a", **fixed), pipe)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "load"),
    [
        ({"data": "a"}, {"ckpt": "a", "vae": "b", "lora": ("c",), "ema": "no", "attention": "math", "compile": "off"}),
        ({"renderer": "a.py", "renderer_options": "{}", "scenes": 3}, {"vae": "b"}),
        ({"data": "a", "lora_rank": 2, "lora_alpha": 1.0, "lora_text": True, "checkpointing": True}, {"dtype": "fp32"}),
    ],
)
def test_the_options_of_each_kind_of_run_are_taken(settings: dict[str, object], load: dict[str, object]) -> None:
    check(TrainOptions(**settings), LoadOptions(**load))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["data", "class_data", "validation", "renderer", "lora_weights"])
def test_a_file_that_is_not_there_is_told_before_a_model_is_loaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"none: no such file or folder, which `{name}` names"):
        check_here(TrainOptions(**{name: str(tmp_path / "none")}))  # type: ignore[arg-type]
    check_here(TrainOptions(**{name: str(tmp_path)}, out=str(tmp_path.parent / "run")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "prodigy"},
            f"prodigy needs prodigyopt, which is not installed: {pip_install('optimizers')}",
        ),
        ({"log_to": ("wandb",)}, f"wandb needs wandb, which is not installed: {pip_install('loggers')}"),
    ],
)
def test_a_missing_package_is_told_first(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_here(TrainOptions(data=str(tmp_path), out=f"{tmp_path}-run", **options))


def test_the_options_and_the_package_do_without_torch() -> None:
    """A process of its own, since this one has imported torch."""
    code = "import sys, ldm_lite.train.options, ldm_lite.train.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_config_repeats_the_options_of_a_run(tmp_path: Path) -> None:
    """Every kind of value; what is given overrules the file; the options of a call are not in it."""
    options = TrainOptions(
        data='a "folder" \\ \n\x7f é', out="run", resume=True, steps=7, lr=1e-5, lora_rank=2, lora_text=True, min_snr=5
    )
    load = LoadOptions(ckpt=Path("model.safetensors"), lora=("a:0.5", "b"), zero_snr=True)
    path = tmp_path / "config.toml"
    path.write_text(as_toml(options, load), encoding="utf-8")
    again, loaded = with_config(TrainOptions(config=str(path), out="new", steps=9), LoadOptions(device="cpu"))
    assert again == dataclasses.replace(options, out="new", resume=False, steps=9)
    assert loaded == dataclasses.replace(load, ckpt="model.safetensors", device="cpu")


def test_a_config_is_toml_whatever_the_texts() -> None:
    """Every character there is, alone and beside others; what is not text at all is left out, in a comment."""
    random = np.random.default_rng(0)
    texts = ["🍎|🚀", '"""', "'''", "\\U0001F600", "\\", "#", "\r\n", "\x00", "\ud83c\udf4e", "caf\udce9\n"]
    texts += ["".join(map(chr, random.integers(0, 0x110000, 50))) for _ in range(200)]
    texts += ["".join(map(chr, range(first, first + 0x100))) for first in range(0, 0x20000, 0x100)]
    for text in texts:
        options, load = TrainOptions(data="a", samples=text, log_to=(text, "b")), LoadOptions(ckpt=text, lora=(text,))
        tables = tomllib.loads(as_toml(options, load).encode().decode())
        is_text = not any("\ud800" <= character <= "\udfff" for character in text)
        assert tables["train"].get("samples") == (text if is_text else None)
        assert tables["train"].get("log_to") == ([text, "b"] if is_text else None)
        assert tables["load"].get("ckpt") == (text if is_text else None)
        assert tables["train"]["data"] == "a"
    numbers = TrainOptions(lr=1e-300, prior_weight=1e22, max_grad_norm=0.1 + 0.2, seed=2**31 - 1)
    table = tomllib.loads(as_toml(numbers, LoadOptions()))["train"]
    assert [table[name] for name in ("lr", "prior_weight", "max_grad_norm", "seed")] == [
        1e-300,
        1e22,
        0.1 + 0.2,
        2**31 - 1,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = ", "is not a config.toml ("),
        ("a = " + "[" * 10_000, "is not a config.toml ("),
        ("steps = 5", "has 'steps', expected the tables [train] and [load]"),
        ("[other]", "has 'other', expected the tables [train] and [load]"),
        ("[train]\nstep = 5", "'step' is not an option of training"),
        ("[train]\nout = 'a'", "'out' is not an option of training"),
        ("[train]\nsteps = 'a'", "got `steps` 'a', expected a whole number"),
        ("[train]\nsteps = 0", "got `steps` 0, expected 1 to"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        with_config(TrainOptions(config=str(tmp_path / "c.toml")), LoadOptions())
