"""Training runs, on a miniature checkpoint: they learn, resume exactly, and end in one line when something is wrong."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch._dynamo.testing import CompileCounter
from training import CONFIG, load_options, losses, options, plain_options, train

import ldm_lite
from ldm_lite.train import __main__ as command
from ldm_lite.train import distributed, run, trainer
from ldm_lite.train import losses as losses_of_training
from ldm_lite.train.batches import Batch, Draws


def test_fine_tuning_writes_an_original_checkpoint(tmp_path: Path, folder: Path, small_path: Path) -> None:
    path = train(options(folder, tmp_path, save_every=2), load_options(small_path))
    before, after = ldm_lite.load(small_path, device="cpu"), ldm_lite.load(path, device="cpu")
    assert after.family == before.family
    assert not torch.equal(after.unet.out[2].weight, before.unet.out[2].weight)
    assert torch.equal(after.vae.decoder.conv_in.weight, before.vae.decoder.conv_in.weight.half().float())
    assert [path.name for path in sorted(tmp_path.glob("samples*"))] == ["samples-0000002.png", "samples-0000004.png"]
    assert len(losses(tmp_path)) == 4
    again = train(
        plain_options(config=os.fspath(tmp_path / "config.toml"), out=os.fspath(tmp_path / "again")), load_options()
    )
    assert again.read_bytes() == path.read_bytes(), "config.toml does not repeat the run"
    with safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "4"
    assert not list(tmp_path.glob(".*"))
    [result] = after.txt2img("picture 1", steps=2, output="result")
    assert np.isfinite(result.pixels.numpy()).all()


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"accumulate": 2, "min_snr": 5.0, "freeze_text": True, "checkpointing": True}])
def test_a_resumed_run_has_the_losses_of_one_that_was_never_stopped(
    tmp_path: Path, folder: Path, small_path: Path, extra: dict[str, object]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(options(folder, whole, steps=3, **extra), load_options(small_path))
    for i in range(3):  # minutes 0: one step at a time
        train(options(folder, parts, steps=3, minutes=0.0, resume=i > 0, **extra), load_options(small_path))
    assert losses(parts) == losses(whole)
    assert len(losses(whole)) == 3


@pytest.mark.slow
def test_steps_after_the_last_state_are_done_again(tmp_path: Path, folder: Path, small_path: Path) -> None:
    train(options(folder, tmp_path, steps=3), load_options(small_path))
    wanted = losses(tmp_path)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 3
    assert set(state) == {"step", "settings", "losses", "networks", "average", "optimizer", "scaler"}
    train(options(folder, tmp_path / "again", steps=3, minutes=0.0), load_options(small_path))
    with open(tmp_path / "again" / "log.jsonl", "a") as log:  # as if it had gone on, and was killed
        log.write('{"step": 2, "loss": 99.0}\n')
    train(options(folder, tmp_path / "again", steps=3, resume=True), load_options(small_path))
    assert losses(tmp_path / "again") == wanted


def test_overfitting_a_few_images_lowers_the_loss(tmp_path: Path, folder: Path, small_path: Path) -> None:
    train(options(folder, tmp_path, steps=12, batch_size=6, save_every=99, lr=3e-3), load_options(small_path))
    got = losses(tmp_path)
    assert np.mean(got[-4:]) < 0.7 * np.mean(got[:4])


@pytest.mark.slow
def test_a_renderer(tmp_path: Path, small_path: Path) -> None:
    (tmp_path / "grey.py").write_text(
        "from PIL import Image\n"
        "def scenes(resolution, level=0):\n"
        "    return lambda i: (Image.new('RGB', (resolution, resolution), (level, i % 256, 0)), f'grey {i}')\n"
    )
    for name, extra in (("new", {}), ("kept", {"scenes": 5})):
        drawn = plain_options(
            renderer=os.fspath(tmp_path / "grey.py"),
            renderer_options='{"level": 100}',
            out=os.fspath(tmp_path / name),
            steps=2,
            batch_size=2,
            data_workers=0,
            samples="grey 1",
            **extra,
        )
        train(drawn, load_options(small_path))
        assert len(losses(tmp_path / name)) == 2


@pytest.mark.slow
def test_a_run_with_workers_ends(tmp_path: Path, folder: Path, small_path: Path) -> None:
    """Workers ignore signals: a process that waited for them at its end would never end."""
    command_line = ["--data", folder, "--ckpt", small_path, "--out", tmp_path, "--data-workers", "1", "--steps", "2"]
    argv = [
        sys.executable,
        "-m",
        "ldm_lite.train",
        *map(os.fspath, command_line),
        "--batch-size",
        "2",
        "--device",
        "cpu",
    ]
    subprocess.run(argv, check=True, timeout=200)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_the_noise_schedule_of_the_first_checkpoint_is_kept(tmp_path: Path, folder: Path, small_path: Path) -> None:
    load = load_options(small_path, prediction="v", zero_snr=True)
    pipe = ldm_lite.load(train(options(folder, tmp_path, steps=1), load), device="cpu")
    assert pipe.schedule.prediction == "v"
    assert pipe.schedule.alpha_bar[-1] == 0
    wanted = ldm_lite.load(small_path, device="cpu", prediction="v", zero_snr=True).schedule.alpha_bar
    assert np.allclose(pipe.schedule.alpha_bar, wanted, atol=1e-6)


def test_a_run_without_options_changes_the_unet_alone_and_little(
    tmp_path: Path, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line such as the README's: no text encoder is trained, no caption dropped, and samples are of the data."""
    prompts, dropped = list[str](), list[bool]()
    sampled, read = ldm_lite.Pipeline.txt2img, losses_of_training.read
    monkeypatch.setattr(ldm_lite.Pipeline, "txt2img", lambda *a, **k: (prompts.extend(a[1]), sampled(*a, **k))[1])
    monkeypatch.setattr(losses_of_training, "read", lambda *a: (dropped.extend(a[2].tolist()), read(*a))[1])
    train_options = plain_options(data=os.fspath(folder), out=os.fspath(tmp_path), steps=2, data_workers=0)
    after = ldm_lite.load(train(train_options, load_options(small_path)), device="cpu")
    before = ldm_lite.load(small_path, device="cpu")
    assert prompts == [f"picture {i}" for i in range(4)]
    assert dropped == 3 * [False], "two steps and the check at the save, of one image each"
    for name, value in after.text_encoder.state_dict().items():
        assert torch.equal(value, before.text_encoder.state_dict()[name].half().float())
    weights = zip(after.unet.parameters(), before.unet.parameters(), strict=True)
    most = max(float((new - old.half()).abs().max()) for new, old in weights)
    assert 0 < most < 1e-3


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which files are open")
def test_a_run_that_has_ended_has_no_file_open(tmp_path: Path, folder: Path, small_path: Path) -> None:
    train(options(folder, tmp_path, steps=1), load_options(small_path))
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [name for name in open_files if str(tmp_path) in name]


def test_a_model_that_reads_an_image_is_refused(folder: Path, small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    pipe = replace(pipe, family=replace(pipe.family, task="inpaint"))
    with pytest.raises(ValueError, match="only text-to-image models with CLIP text encoders can be trained here"):
        run.check_model(options(folder, folder), pipe)


@pytest.mark.parametrize(
    ("num_gpus", "local", "gpu", "backend"),
    [(0, 1, None, "gloo"), (1, 1, None, "gloo"), (2, 1, 1, "cpu:gloo,cuda:nccl"), (8, 1, 1, "cpu:gloo,cuda:nccl")],
)
def test_each_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, local: int, gpu: int | None, backend: str
) -> None:
    for name, value in (("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))
    took, met = list[int](), list[str]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", took.append)
    monkeypatch.setattr(distributed.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed.dist, "init_process_group", met.append)
    distributed.init()
    assert took == ([] if gpu is None else [gpu])
    assert met == [backend]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either --data FOLDER or --renderer FILE.py"),
        (["--data", "DATA", "--renderer", "x.py"], "expected either --data FOLDER or --renderer FILE.py"),
        (["--data", "none"], "none: no such file or folder, which --data names"),
        (["--data", "EMPTY"], "holds no images"),
        (["--data", "UNCAPTIONED"], "has no caption: expected a.txt beside it"),
        (["--data", "BLANK"], "its caption is empty"),
        (["--data", "BROKEN"], "none of the images can be read"),
        (["--data", "BROKEN", "--data-workers", "1", "--lora_rank", "1"], "none of the images can be read"),
        (["--data", "LIST"], "captions.jsonl, line 1: expected"),
        (["--data", "TYPES"], "captions.jsonl, line 2: expected"),
        (["--data", "LATIN"], "a.txt: is not text in UTF-8"),
        (["--renderer", "SYNTAX/r.py"], "r.py: cannot be imported: SyntaxError"),
        (["--renderer", "FAILS/r.py"], "the renderer fails at scene 0: KeyError: 0"),
        (["--renderer", "none.py"], "none.py: no such file or folder, which --renderer names"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    folder: Path,
    small_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    image = (folder / "0.png").read_bytes()
    contents: dict[str, dict[str, bytes]] = {
        "DATA": {"a.png": image, "a.txt": b"a"},
        "EMPTY": {},
        "UNCAPTIONED": {"a.png": image},
        "BLANK": {"a.png": image, "a.txt": b" \n"},
        "BROKEN": {"a.png": b"nothing", "a.txt": b"a"},
        "LIST": {"captions.jsonl": b"{}\n"},
        "TYPES": {
            "a.png": image,
            "captions.jsonl": b'\xef\xbb\xbf{"file_name": "a.png", "text": "a"}\r\n{"file_name": 1, "text": null}',
        },
        "LATIN": {"a.png": image, "a.txt": b"\xe9t\xe9"},
        "SYNTAX": {"r.py": b"def"},
        "FAILS": {"r.py": b"def scenes(resolution):\n    return {}.__getitem__"},
    }
    for name, files in contents.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
    workers = [] if "--data-workers" in arguments else ["--data-workers", "0"]
    small = ["--ckpt", os.fspath(small_path), "--device", "cpu", "--steps", "1", "--batch-size", "1"]
    assert command.main([*arguments, *small, *workers]) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_checkpoints_before_the_first_loss_is_logged(
    tmp_path: Path, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that was lost, since the run was ended between its last state and its checkpoint, is written again."""
    monkeypatch.setattr(trainer, "CHECK_EVERY", 20)
    path = train(options(folder, tmp_path, steps=2, save_every=1), load_options(small_path))
    path.unlink()
    assert train(options(folder, tmp_path, steps=2, resume=True), load_options(small_path)).is_file()


@pytest.mark.slow
def test_a_run_is_not_overwritten(tmp_path: Path, folder: Path, small_path: Path) -> None:
    train(options(folder, tmp_path, steps=1), load_options(small_path))
    with pytest.raises(ValueError, match="already holds a run: continue it with `resume=True`, or choose"):
        train(options(folder, tmp_path, steps=1), load_options(small_path))
    with pytest.raises(ValueError, match="is not the state of this run"):
        train(options(folder, tmp_path, resume=True, lora_rank=2), load_options(small_path))


def test_the_check_at_a_save_compiles_nothing() -> None:
    """Compiled code is for steps with gradients; the check has none, and would compile everything once more."""
    network, counter = Doubled(), CompileCounter()
    network.compile(backend=counter)
    new = trainer.Trainer.__new__(trainer.Trainer)
    new.loss = SumOfOutputs(network)
    new.options, new.precision = replace(CONFIG, batch_size=1), None
    new._last = Batch(torch.ones(1, 2), [""], None, (0,))
    new.loss(new._last, Draws(0, (0,)))
    new._loss_now()
    assert counter.frame_count == 1


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.weight * x


class SumOfOutputs:
    def __init__(self, network: torch.nn.Module) -> None:
        self.networks = {"network": network}

    def __call__(self, batch: Batch, draws: Draws) -> torch.Tensor:
        return self.networks["network"](batch.pixels).sum()
