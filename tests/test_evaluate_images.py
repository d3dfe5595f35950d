"""FID, precision, recall and CLIP score through their libraries, with random weights of the networks that they need."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evaluate_images as evaluate
import numpy as np
import pytest
import torch
from PIL import Image

from ldm_lite.cli.version import pip_install


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Six images, and six others."""
    random = np.random.default_rng(0)
    for name, most in (("a", 255), ("b", 90)):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.fromarray(random.integers(0, most, (40, 40, 3), dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_mistakes_are_one_line(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistakes = [
        ([], "expected a folder of images, and --reference FOLDER or --clip MODEL"),
        ([folders[0]], "expected a folder of images, and --reference FOLDER or --clip MODEL"),
        ([str(tmp_path / "none"), "--clip", "x"], "none: is not a folder, expected one of images"),
        ([folders[0], "--reference", folders[1]], f"torch_fidelity is missing: {pip_install('evaluate')}"),
        ([folders[0], "--clip", "x"], f"is missing: {pip_install('evaluate')}"),
    ]

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(evaluate.importlib, "import_module", missing)
    for arguments, message in mistakes:
        assert evaluate.main(arguments) == 2
        assert message in capsys.readouterr().err

    def unfit(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(evaluate.importlib, "import_module", unfit)
    assert evaluate.main(mistakes[-2][0]) == 2
    assert "torch_fidelity does not run here (operator torchvision::nms does not exist)" in capsys.readouterr().err


def test_photos_of_any_size_and_format_are_measured(
    tmp_path: Path, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch-fidelity gets pixels, not files of which it reads few formats; images of one size still in batches."""
    calls: list[dict[str, Any]] = []
    names = ("frechet_inception_distance", "precision", "recall")

    def measured(**options: Any) -> dict[str, float]:
        calls.append(options)
        return dict.fromkeys(names, 0.5)

    monkeypatch.setattr(evaluate, "_imported", lambda name: SimpleNamespace(calculate_metrics=measured))
    photos = tmp_path / "photos"
    photos.mkdir()
    for i, kind in enumerate(("png", "jpg", "webp", "avif")):
        Image.open(Path(folders[0]) / f"{i}.png").resize((40 + i, 50 - i)).save(photos / f"{i}.{kind}")
    for reference in (folders[1], str(photos)):
        evaluate.evaluate(evaluate.EvaluateOptions(folders[0], reference))
    assert [call["batch_size"] for call in calls] == [32, 1]
    images = calls[1]["input2"]
    assert [tuple(images[i].shape) for i in range(len(images))] == [(3, 50 - i, 40 + i) for i in range(4)]
    assert {images[i].dtype for i in range(4)} == {torch.uint8}
    assert torch.equal(images[0], torch.from_numpy(np.array(Image.open(photos / "0.png"))).permute(2, 0, 1))


@pytest.mark.extra
def test_distances_are_frechets_and_of_neighbours(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of equal folders they are 0, 1 and 1; of others those of the features, computed again here."""
    try:
        importlib.import_module("torch_fidelity")
    except (ImportError, RuntimeError) as error:  # torchvision's CUDA build raises RuntimeError beside torch for CPUs
        pytest.skip(f"torch-fidelity does not run here: {error}")
    inception = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    torch.manual_seed(0)
    path = tmp_path / "inception.pth"
    with pytest.MonkeyPatch.context() as patch:  # random weights: the real ones are not here
        patch.setattr(inception, "load_state_dict", lambda self, values: None)
        torch.save({}, path)
        network = inception("it", ["2048"], feature_extractor_weights_path=str(path))
    torch.save(network.state_dict(), path)
    arguments = [folders[0], "--inception", str(path), "--batch-size", "3", "--reference"]
    assert evaluate.main([*arguments, folders[0]]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same == {"fid": pytest.approx(0, abs=1e-3), "precision": 1, "recall": 1}
    assert evaluate.main([*arguments, folders[1]]) == 0
    distances = json.loads(capsys.readouterr().out)
    features = []
    for folder in folders:
        pixels = [np.array(Image.open(file)) for file in sorted(Path(folder).glob("*.png"))]
        with torch.no_grad():
            features.append(network(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))[0].double().numpy())
    a, b = features
    x, y = (a - a.mean(0)) / 5**0.5, (b - b.mean(0)) / 5**0.5
    eigenvalues = np.linalg.eigvals(x @ y.T @ y @ x.T).real  # those of the product of both covariances but zeros
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + a.var(0, ddof=1).sum() + b.var(0, ddof=1).sum()
    wanted -= 2 * np.sqrt(np.clip(eigenvalues, 0, None)).sum()
    assert distances["fid"] == pytest.approx(wanted, rel=1e-2)

    def share(of: np.ndarray, among: np.ndarray) -> float:  # type: ignore[type-arg]
        radii = np.sort(np.linalg.norm(among[:, None] - among, axis=2), axis=1)[:, 3]
        return float((np.linalg.norm(of[:, None] - among, axis=2) <= radii).any(axis=1).mean())

    assert distances["precision"] == pytest.approx(share(a, b))
    assert distances["recall"] == pytest.approx(share(b, a))

    photos = tmp_path / "photos"  # of other sizes and formats
    photos.mkdir()
    for i, kind in enumerate(("png", "jpg", "webp", "avif", "webp")):
        Image.open(Path(folders[0]) / f"{i}.png").resize((40 + i, 50 - i)).save(photos / f"{i}.{kind}")
    assert evaluate.main([*arguments, str(photos)]) == 0
    assert json.loads(capsys.readouterr().out)["fid"] > 0
