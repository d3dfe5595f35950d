"""A ControlNet begins as the UNet's copy without effect, learns, and its file steers the UNet as it did in training."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from training import check_gradient, load_options, losses, options, train

import ldm_lite
from ldm_lite.cli.version import pip_install
from ldm_lite.control.control import Control
from ldm_lite.control.loading import load_controls
from ldm_lite.models.controlnet import ControlNet
from ldm_lite.train.additions import new_control
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss


def batch(count: int) -> Batch:
    moments, hint = toy.normal(1, count, 8, 8, 8), torch.arange(count * 3 * 64 * 64).view(count, 3, 64, 64) % 255
    return Batch(moments, ["a cat", "a dog"][:count], None, tuple(range(count)), hint=hint.to(torch.uint8))


def test_a_new_controlnet_changes_nothing_and_its_gradient_is_the_losses(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    control, train_batch = new_control(pipe), batch(2)
    loss = DiffusionLoss(pipe, {"control": control}, control=control)
    with torch.no_grad():
        plain = DiffusionLoss(pipe, {})(train_batch, Draws(0, (0, 1)))
        assert torch.allclose(loss(train_batch, Draws(0, (0, 1))), plain, rtol=1e-6)
    torch.manual_seed(0)
    for parameter in (*control.zero_convs.parameters(), *control.middle_block_out.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    assert pipe.text_encoder is not None
    with toy.in_float64(pipe.unet, control, pipe.text_encoder):
        for network in (pipe.unet, control):
            network.register_forward_pre_hook(lambda net, args: tuple(None if x is None else x.double() for x in args))
        control.input_hint_block.register_forward_pre_hook(lambda net, args: (args[0].double(),))
        check_gradient(lambda: loss(train_batch, Draws(0, (0, 1))), list(control.parameters()))
    assert all(p.grad is None for p in pipe.unet.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"buckets": True, "checkpointing": True, "validation": "0.4"}])
def test_its_file_is_read_as_a_controlnet(
    tmp_path: Path, folder: Path, small_path: Path, extra: dict[str, Any]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for image in folder.iterdir():
        (data / image.name).symlink_to(image)
        if image.suffix == ".png":
            Image.fromarray(255 - np.asarray(Image.open(image))).save(data / f"{image.stem}.hint.png")
    train_options = options(data, tmp_path / "run", steps=2, stage="control", lr=0.1, warmup=0, ema_decay=0.0, **extra)
    path = train(train_options, load_options(small_path))
    assert path.name == "control.safetensors"
    assert list((tmp_path / "run").glob("samples*.png"))
    pipe = ldm_lite.load(small_path, device="cpu")
    [loaded] = load_controls(pipe, [Control(path, data / "0.hint.png")])
    assert isinstance(loaded.network, ControlNet)
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)["networks"]["control"]
    trained = ControlNet(pipe.family.unet)
    trained.load_state_dict(state)
    text, x, hint = pipe.encode_prompt("a cat").context, toy.normal(1, 1, 4, 8, 8), toy.picture(3, 64, 64)
    with torch.no_grad():
        ours, theirs = (net(x, toy.T[:1], text, net.embed_hint(hint))[-1] for net in (loaded.network, trained))
    assert theirs.abs().max() > 0
    assert toy.relative_error(ours, theirs.double().numpy()) < 5e-3  # the file is in float16
    (data / "0.hint.png").unlink()
    with pytest.raises(ValueError, match=r"0\.png: has no image for the ControlNet: expected 0\.hint\.png beside it"):
        train(options(data, tmp_path / "no", steps=1, stage="control"), load_options(small_path))


@pytest.mark.extra
@pytest.mark.parametrize(("name", "package"), [("prodigy", "prodigyopt"), ("adamw8bit", "bitsandbytes")])
def test_optimisers_of_libraries_learn_and_resume(
    name: str, package: str, tmp_path: Path, folder: Path, small_path: Path
) -> None:
    """Prodigy to the bit; bitsandbytes' kernels for a CPU differ in the last bits after a restart."""
    pytest.importorskip(package)
    more = {"optimizer": name, "lr": 1.0 if name == "prodigy" else 1e-2, "steps": 4, "freeze_text": True, "warmup": 0}
    train(options(folder, tmp_path / "whole", **more), load_options(small_path))
    for i in range(4):
        train(options(folder, tmp_path / "parts", minutes=0.0, resume=i > 0, **more), load_options(small_path))
    close = 0 if name == "prodigy" else 1e-6
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=close, abs=0)
    plain = more | {"optimizer": "adamw", "lr": 0.0}
    train(options(folder, tmp_path / "none", **plain), load_options(small_path))
    assert losses(tmp_path / "whole")[-1] != losses(tmp_path / "none")[-1]


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ldm_lite.train import state, trainer

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(trainer.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=f"needs prodigyopt: {re.escape(pip_install('optimizers'))}"):
        trainer.make_optimizer("prodigy", [], 1.0, 0.0)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ValueError, match=f"`log_to={name}` needs its package: {re.escape(pip_install('loggers'))}"):
            state.open_logger(name, tmp_path, {}, 0)


@pytest.mark.extra
def test_tensorboard_has_the_rows_of_the_log(tmp_path: Path, folder: Path, small_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(options(folder, tmp_path, steps=2, log_to=("tensorboard",), lora_rank=2), load_options(small_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(tmp_path), rel=1e-6)


@pytest.mark.extra
def test_wandb_has_the_rows_of_the_log(
    tmp_path: Path, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that W&B keeps to itself, since it would open connections."""
    wandb = pytest.importorskip("wandb")
    rows: list[tuple[dict[str, float], int]] = []
    ids = list[str]()
    init = wandb.init

    def watched(**arguments: Any) -> Any:
        ids.append(arguments["id"])
        run = init(mode="disabled", **arguments)
        run.log = lambda row, step: rows.append((row, step))
        return run

    monkeypatch.setattr(wandb, "init", watched)
    train(options(folder, tmp_path, steps=2, log_to=("wandb",), lora_rank=2), load_options(small_path))
    assert [step for _, step in rows] == [1, 2]
    ids.append((tmp_path / "wandb.id").read_text())
    train(options(folder, tmp_path, steps=3, log_to=("wandb",), lora_rank=2, resume=True), load_options(small_path))
    other_path = tmp_path / "other" / tmp_path.name
    train(options(folder, other_path, steps=1, log_to=("wandb",), lora_rank=2), load_options(small_path))
    assert ids[0] == ids[1] == ids[2] != ids[3], "a resumed run is the same, one in a folder of the same name another"
    del rows[2:]
    assert [row["loss"] for row, _ in rows] == losses(tmp_path)[:2]
