"""Names of other programs: what is said of them is true, for every row of the table."""

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ldm_lite
from ldm_lite import Control, Pipeline
from ldm_lite import __main__ as package
from ldm_lite.batch.rows import COLUMNS
from ldm_lite.cli import synonyms
from ldm_lite.cli.console import as_flags
from ldm_lite.cli.options import CheckedOptions, LoadOptions, SaveOptions
from ldm_lite.cli.synonyms import PYTHON, TABLES, TRAINING, advice, targets
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions, UpscaleOptions
from ldm_lite.pipeline import OUTPUTS
from ldm_lite.serve.options import ServeOptions
from ldm_lite.tasks.xy import read_axis
from ldm_lite.train.options import TrainOptions, with_config

ROWS = [(title, names, text) for title, table in TABLES.items() for names, text in table.items()]
COMMANDS: dict[str, tuple[type[CheckedOptions], ...]] = {
    "txt2img": (Txt2imgOptions, LoadOptions, SaveOptions),
    "img2img": (Img2imgOptions, LoadOptions, SaveOptions),
    "inpaint": (InpaintOptions, LoadOptions, SaveOptions),
    "upscale": (UpscaleOptions, LoadOptions, SaveOptions),
    "serve": (ServeOptions, LoadOptions),
    "train": (TrainOptions, LoadOptions),
}


def fields(command: str) -> set[str]:
    return {field.name for group in COMMANDS[command] for field in dataclasses.fields(group)}


@pytest.mark.parametrize(("title", "names", "text"), ROWS)
def test_each_row_names_options_that_one_command_takes(title: str, names: str, text: str) -> None:
    places = ["train"] if title == TRAINING else [name for name in COMMANDS if name != "train"]
    known = [fields(place) | {"output", "on_step"} for place in places]
    assert any(set(targets(text)) <= options for options in known)
    for name, value in re.findall(r"`([a-z]\w*)=([^`A-Z]+)`", text):  # a value that is meant as it stands is one
        group = next(group for place in places for group in COMMANDS[place] if name in group.__dataclass_fields__)
        kind = str(group.__dataclass_fields__[name].type)
        group(**{name: float(value) if "float" in kind else value})


def test_no_name_is_in_a_table_twice_with_one_meaning_nor_taken_by_training_itself() -> None:
    taken = {
        spelling.removeprefix("--")
        for group in COMMANDS["train"]
        for field in dataclasses.fields(group)
        for spelling in (field.name, *field.metadata["flags"])
    }
    for title, table in TABLES.items():
        listed = [name for names in table for name in names.split()]
        twice = {name for name in listed if listed.count(name) > 1}
        assert twice <= {"denoising_strength"}, title  # of img2img, and of hires fix
        assert title != TRAINING or not taken & {*listed}


def refuse(command: str, *argv: str) -> None:
    """Run a command with flags that it does not have."""
    folder = ".__main__" if command in ("train", "serve") else ""
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"ldm_lite.{command}{folder}").main([*argv])
    assert end.value.code == 2


@pytest.mark.parametrize("place", COMMANDS)
def test_every_name_is_answered_on_the_command_line(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with flags that some command takes: those of the place, or of the command that the line names."""
    names = {name for _, names, _ in ROWS for name in names.split() if "*" not in name}
    spelled = {spelling for group in COMMANDS[place] for field in dataclasses.fields(group)
               for spelling in (field.name, *(flag[2:] for flag in field.metadata.get("flags", ())))}  # fmt: skip
    names -= spelled | {"precision", "scheduler", "embeddings", "model", "output"}
    for name in sorted(names):
        refuse(place, f"--{name}", "1")
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        hint = error.partition(f"error: unknown flag --{name}: ")[2]
        assert hint, error
        match = re.search(r"\(of python -m ldm_lite\.(\w+)\)", hint)
        flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w-]*)", hint)} - {"help", "encode"}
        assert flags <= (fields(match[1]) | fields(place) if match else fields(place)), error


PEOPLE = {  # what they type, and what they read
    ("txt2img", "--lowvram --xformers --sampling-steps 20 --cfg-scale 7 --sampler-name Euler"): (
        "--lowvram: use --offload sequential, or the faster --offload model; --xformers: leave it out: PyTorch's fast "
        "attention is the default (--attention chooses another); --sampling-steps: use --steps; --cfg-scale: use "
        "--scale; --sampler-name: use --sampler"
    ),
    ("serve", "--medvram --listen --port 7861 --api --no-half-vae --ckpt-dir models"): (
        "--medvram: use --offload model; --listen: use --host 0.0.0.0; --api: leave it out: the server has its page "
        "and its API; --no-half-vae: use --dtype fp16,vae=fp32; --ckpt-dir: use --models DIR"
    ),
    ("txt2img", "--num_inference_steps 30 --guidance_scale=7 --torch_dtype fp16"): (
        "--num_inference_steps: use --steps; --guidance_scale: use --scale; --torch_dtype: use --dtype"
    ),
    ("img2img", "--cfg 8 --denoise -0.5 --ckpt_name a --image b"): (
        "--cfg: use --scale; --denoise: use --strength; --ckpt_name: use --ckpt FILE; --image: use --init-img"
    ),
    ("train", "--mixed_precision fp16 --network_module=networks.lora --optimizer_type AdamW8bit --unet_lr 1e-4"): (
        "--mixed_precision: use --dtype: bf16, fp16 or fp32 (no); --network_module: use --lora-rank, with --lora-kind "
        "for dora, loha and lokr; --optimizer_type: use --optimizer: adamw, adamw8bit or prodigy; --unet_lr: use --lr"
    ),
    ("train", "--cfg 7"): "--cfg: use --scale (of python -m ldm_lite.txt2img)",
    ("txt2img", "--strength 0.5"): "--strength: it belongs to python -m ldm_lite.img2img",
    ("txt2img", "--learning_rate 1"): "--learning_rate: it belongs to python -m ldm_lite.train",
    ("txt2img", "--embeddings-dir x"): "--embeddings-dir: use --embeddings DIR (of python -m ldm_lite.serve)",
    ("txt2img", "--output_type np"): "--output_type: use output: pil, numpy, tensor or result (in Python)",
    ("txt2img", "--guidence_scale 7"): "--guidence_scale: use --scale",
    ("train", "--save_evry 7"): "--save_evry: did you mean --save-every?",
}


@pytest.mark.parametrize(("command", "typed"), PEOPLE)
def test_what_people_type(command: str, typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(command, *typed.split())
    line = PEOPLE[command, typed]
    several = "s" * (line.count("; --") > 0)
    assert capsys.readouterr().err == f"error: unknown flag{several} {line} (see --help)\n"


def test_trainers_flags_with_our_meaning_are_taken() -> None:
    from ldm_lite.cli.flags import parse

    typed = (
        "--pretrained_model_name_or_path sd.ckpt --train_data_dir a --output_dir b --max_train_steps 5 --rank 8 "
        "--learning_rate 1e-4 --lr_warmup_steps 10 --gradient_accumulation_steps 2 --snr_gamma 5 --enable_bucket "
        "--caption_dropout_rate 0.1 --adam_beta2 0.999 --save_every_n_steps 3 --report_to wandb --class_data_dir c"
    )
    (train, load), _ = parse(typed.split(), "train", "", (TrainOptions, LoadOptions))
    assert load == LoadOptions(ckpt="sd.ckpt")
    assert train == TrainOptions(
        data="a", out="b", steps=5, lora_rank=8, lr=1e-4, warmup=10, accumulate=2, min_snr=5, buckets=True,
        caption_dropout=0.1, beta2=0.999, save_every=3, log_to=("wandb",), class_data="c",
    )  # fmt: skip


# ---- Python ---------------------------------------------------------------------------------------------------------


METHODS = {"txt2img": Txt2imgOptions, "img2img": Img2imgOptions, "inpaint": InpaintOptions, "load": LoadOptions}


@pytest.mark.parametrize("method", METHODS)
def test_every_name_is_answered_in_python(method: str, pipe: Pipeline) -> None:
    rows = dataclasses.fields(METHODS[method])
    ours = {row.name for row in rows} | {*PYTHON.values(), "output", "on_step"}
    ours |= {flag.strip("-").replace("-", "_") for row in rows for flag in row.metadata.get("flags", ())}  # taken, too
    everywhere = ours.union(*(fields(command) for command in COMMANDS))
    calls = {"txt2img": pipe.txt2img, "load": ldm_lite.load, "img2img": pipe.img2img, "inpaint": pipe.inpaint}
    arguments = {"img2img": ("a cat", "a.png"), "inpaint": ("a cat", "a.png")}.get(method, ())
    for name in sorted({name for _, names, _ in ROWS for name in names.split() if "*" not in name} - ours):
        with pytest.raises(TypeError) as raised:
            calls[method](*arguments, **{name: 1})  # type: ignore[operator]
        line = str(raised.value)
        assert line.startswith(f"{method}() has no argument {name!r}: "), line
        assert "lists all" not in line
        assert len(line) < 200
        assert "\n" not in line
        assert {*targets(line)} <= (everywhere if " (of " in line else ours), line


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guidance_scale", "use `scale`"),
        ("num_inference_steps", "use `steps`"),
        ("mask_image", r"use `mask` \(of inpaint\(\)\)"),
        ("generator", "use `seed=N`, with `noise=diffusers`"),
        ("vae", r"it belongs to load\(\)"),
        ("image", r"it belongs to img2img\(\)"),
        ("torch_dtype", r"use `dtype` \(of load\(\)\)"),
        ("skip_save", "it belongs to python -m ldm_lite.txt2img"),
        ("text_guidance_scale", "help.ldm_lite.cli.task_options.Txt2imgOptions. lists all"),
    ],
)
def test_a_meaning_goes_before_a_spelling(pipe: Pipeline, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^txt2img\(\) has no argument '{name}': {hint}"):
        pipe.txt2img("a cat", **{name: 3})


def test_attributes_of_diffusers_pipelines_are_answered(pipe: Pipeline) -> None:
    for names in synonyms.OF_PIPELINE:
        for name in names.replace("*", "anything").split():
            with pytest.raises(AttributeError, match=f"a Pipeline has no {name}: "):
                getattr(pipe, name)
    with pytest.raises(TypeError, match=r"use pipe.txt2img\(PROMPT"):
        pipe("a cat")  # type: ignore[operator]
    for name in ("scheduler", "unet", "anything"):
        with pytest.raises(AttributeError, match=f"a Pipeline takes no {name}: "):
            setattr(pipe, name, None)
    with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'xyzzy'"):
        _ = pipe.xyzzy  # type: ignore[attr-defined]
    assert not hasattr(pipe, "_repr_anything_")
    images = pipe.txt2img("a cat", steps=1)
    for name in ("images", "save"):
        with pytest.raises(AttributeError, match=rf"'Images' object has no attribute '{name}': .* images\[0\]"):
            getattr(images, name)
    assert not hasattr(images, "_repr_html_")


def test_a_network_that_was_moved_is_named(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    pipe.unet.to("meta")  # another device that every machine has
    with pytest.raises(ValueError, match=r"^the networks are on cpu and meta: leave them where `load"):
        pipe.txt2img("a cat", steps=1)


def test_classes_of_diffusers_are_answered() -> None:
    for names in synonyms.OF_PACKAGE:
        for name in names.replace("*", "Xyz").split():
            with pytest.raises(ImportError, match=f"ldm_lite has no {name}: .*(ldm_lite|pipe)\\."):
                exec(f"from ldm_lite import {name}")
    with pytest.raises(AttributeError, match="'ldm_lite' has no attribute 'xyzzy'"):
        _ = ldm_lite.xyzzy


def code() -> Iterator[str]:
    for table in (synonyms.OF_PIPELINE, synonyms.OF_PACKAGE):
        for text in table.values():
            yield from re.findall(r"(?:pipe|ldm_lite)\.[\w.]+(?:\([^)]*\)?\))?", text)


@pytest.mark.parametrize("call", sorted(set(code())))
def test_what_the_answers_call_is_there(call: str, pipe: Pipeline) -> None:
    name, _, arguments = call.partition("(")
    thing = eval(name, {"pipe": pipe, "ldm_lite": ldm_lite})
    known = set()
    if callable(thing):
        known = {*inspect.signature(thing).parameters}
        known |= {field.name for field in dataclasses.fields(METHODS.get(name.rpartition(".")[2], LoadOptions))}
    assert {*re.findall(r"[(\s](\w+)=", f"({arguments}")} <= known | {"progress"} | {
        *inspect.signature(Control).parameters
    }


# ---- elsewhere ------------------------------------------------------------------------------------------------------


def test_commands_and_columns_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in synonyms.COMMANDS.items():
        assert command in package.COMMANDS
        for name in names.split():
            assert package.main([name, "--port", "1"]) == 2
            assert f"unknown command {name!r}: did you mean {command}? " in capsys.readouterr().err
    columns = {name: name for name in COLUMNS}
    assert advice("guidance_scale", columns, "batch", elsewhere=False) == "use `scale`"
    assert advice("loras", columns, "batch", elsewhere=False) == "use `lora=FILE:WEIGHT`"
    assert advice("torch_dtype", columns, "batch", elsewhere=False) == ""


@pytest.mark.parametrize(
    ("group", "option", "value", "hint"),
    [
        (TrainOptions, "lr_schedule", "cosine_with_restarts", ": use `lr_schedule=cosine`, with `lr_cycles=N`"),
        (TrainOptions, "optimizer", "AdamW8bit", ": use adamw8bit"),
        (TrainOptions, "lora_kind", "locon", ": use `lora_kind=lora`, with `lora_conv=RANK`"),
        (LoadOptions, "prediction", "v_prediction", ": use `prediction=v`"),
        (Img2imgOptions, "resize", "1", ": use `resize=crop`"),
        (InpaintOptions, "masked_content", "0", ": use `masked_content=fill`"),
        (TrainOptions, "lr_schedule", "polynomial", ", expected one of constant, linear, cosine"),
    ],
)
def test_values_of_other_programs_are_answered(group: type[CheckedOptions], option: str, value: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"^got `{option}` '{value}'{re.escape(hint)}$"):
        group(**{option: value})


def test_every_answer_to_a_value_names_one_that_is_taken(pipe: Pipeline) -> None:
    for option, values in synonyms.VALUES.items():
        groups = [group for groups in COMMANDS.values() for group in groups if option in group.__dataclass_fields__]
        choices = groups[0].__dataclass_fields__[option].metadata["choices"] if groups else OUTPUTS
        for value, text in values.items():
            assert value not in choices
            assert not groups or {*targets(text)} <= {field.name for field in dataclasses.fields(groups[0])}
            for name, ours in re.findall(r"`(\w+)=(\w+)`", text):
                assert name != option or ours in choices
    for output in ("np", "pt", "latent"):
        with pytest.raises(ValueError, match=f"got `output` '{output}': use "):
            pipe.txt2img("a cat", output=output)  # type: ignore[call-overload]


def test_parts_settings_and_axes_are_answered(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no argument 'prompt_2': leave it out: all text encoders read `prompt`"):
        pipe.encode_prompt("a cat", prompt_2="a dog")
    with pytest.raises(ValueError, match="unknown spacing 'SGM Uniform': did you mean sgm_uniform"):
        pipe.plan("euler", 3, spacing="SGM Uniform")
    for axis, hint in (("cfg_scale", ": use `scale`"), ("CFG Scale", ": use `scale`"), ("x", ", expected an option")):
        with pytest.raises(ValueError, match=f"got '{axis}' as an axis{hint}"):
            read_axis(Txt2imgOptions, axis, "5,7")
    config = tmp_path / "config.toml"
    for name, hint in (("max_train_steps", ": use steps"), ("mixed_precision", ""), ("unet_lr", ": use lr")):
        config.write_text(f"[train]\n{name} = 5\n")
        with pytest.raises(ValueError, match=f"'{name}' is not an option of training{hint}$"):
            with_config(TrainOptions(config=str(config)), LoadOptions())


def test_the_table_is_read_only_when_a_name_is_unknown() -> None:
    program = (
        "import sys, ldm_lite\nfrom ldm_lite import txt2img, Pipeline\nfrom ldm_lite.cli import flags\n"
        "print('ldm_lite.cli.synonyms' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_values_that_rows_list_are_those_of_the_options() -> None:
    text = TABLES["diffusers"]["output_type"]
    assert re.findall(r"\w+", text.partition(":")[2].replace(" or ", " ")) == list(OUTPUTS)
    for title, table in TABLES.items():
        groups = COMMANDS["train"] if title == TRAINING else COMMANDS["inpaint"]
        choices = {field.name: field.metadata["choices"] for group in groups for field in dataclasses.fields(group)}
        for text in table.values():
            if ": " in text and (named := targets(text.partition(":")[0])) and choices.get(named[0]):
                listed = re.sub(r"\([^)]*\)", "", text.partition(": ")[2]).replace(" or ", ", ").split(",")
                if "=" not in text:
                    assert {word.strip() for word in listed if " if " not in word} <= {*choices[named[0]]}, text
    assert as_flags("`hires=2`") == "--hires 2"
