"""PEFT's folders and metadata, LyCORIS's norms and differences, names of modules: as their libraries merge them."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from random_checkpoint import SMALL, random_tensor
from random_checkpoint import small as miniature
from random_checkpoint import write as write_checkpoint
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.checkpoint import hub

GOLDEN = dict(np.load(Path(__file__).parents[1] / "data" / "peft.npz"))
FC1 = "text_model.encoder.layers.0.mlp.fc1"
DOWN, UP = toy.normal(0, 2, 64), toy.normal(1, 256, 2)
PAIR = {"lora_A.weight": DOWN, "lora_B.weight": UP}


def about(name: str) -> dict[str, dict[str, object]]:
    return json.loads(str(GOLDEN[f"{name}.about"]))


def filled(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    return {key: random_tensor(key, tuple(shape)) for key, shape in shapes.items() if shape}


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """SDXL in miniature, which the tests restore."""
    file = tmp_path_factory.mktemp("sdxl") / "sdxl.safetensors"
    write_checkpoint(file, miniature("sdxl_base"))
    return ldm_lite.load(file, device="cpu")


def folder(path: Path, tensors: dict[str, Tensor], config: object, ending: str = "safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    file = path / f"adapter_model.{ending}"
    save_file(tensors, file) if ending == "safetensors" else torch.save(tensors, file)
    (path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def keyed(module: str, prefix: str = "base_model.model.") -> dict[str, Tensor]:
    return {f"{prefix}{module}.{part}": value for part, value in PAIR.items()}


def check(pipe: Pipeline, name: str) -> None:
    if name in ("text", "only", "biased"):
        output = pipe.text_encoder(torch.from_numpy(GOLDEN["ids"]))[:, ::5]
    else:
        x, context, _ = toy.unet_inputs(SMALL.unet)
        output = pipe.unet(x, toy.T, context)
    assert toy.relative_error(output, GOLDEN[name]) < 1e-5


# ---- as the libraries merge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unet", "text", "only", "biased"])
def test_a_folder_of_peft(tmp_path: Path, small: Pipeline, name: str) -> None:
    """Alpha, patterns, rsLoRA, biases, embeddings and modules_to_save are used; removal restores every bit."""
    before = [value.clone() for network in small.networks.values() for value in network.parameters()]
    path = folder(tmp_path / "adapter", filled(about(name)["shapes"]), about(name)["config"])
    with small.lora(path):
        check(small, name)
    after = [value for network in small.networks.values() for value in network.parameters()]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("storage", ["int8", None])
def test_weights_that_are_offloaded_or_quantised(tmp_path: Path, small_path: Path, storage: str | None) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", storage=storage, offload="sequential")
    assert pipe.offloader is not None
    kept = [copy.deepcopy(pipe.offloader.kept(v)) for network in pipe.networks.values() for v in network.parameters()]
    with pipe.lora(folder(tmp_path / "adapter", filled(about("text")["shapes"]), about("text")["config"])):
        norm = pipe.text_encoder.final_layer_norm.bias
        value = pipe.offloader.read(norm, torch.device("cpu"))
        key = next(key for key in about("text")["shapes"] if key.endswith("final_layer_norm.bias"))
        assert torch.allclose(value, random_tensor(key, tuple(value.shape)), atol=1e-6)
    now = [pipe.offloader.kept(value) for network in pipe.networks.values() for value in network.parameters()]
    assert all(torch.equal(a.values, b.values) for a, b in zip(kept, now, strict=True))


def test_the_metadata_of_diffusers(tmp_path: Path, small: Pipeline) -> None:
    names = about("diffusers")["names"]
    tensors = {key: random_tensor(same, tuple(shape)) for key, (same, shape) in names.items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata=about("diffusers")["metadata"])
    with small.lora(tmp_path / "a.safetensors"):
        check(small, "diffusers")


@pytest.mark.parametrize("name", ["locon", "full"])
def test_lycoris(tmp_path: Path, small: Pipeline, name: str) -> None:
    """Norms, biases and full differences."""
    alphas = {key: torch.tensor(value) for key, value in about(name)["alphas"].items()}
    tensors = {key.replace("lycoris_", "lora_unet_"): v for key, v in (filled(about(name)["shapes"]) | alphas).items()}
    save_file(tensors, tmp_path / "a.safetensors")
    assert any(key.endswith(".b_norm") for key in tensors)
    with small.lora(tmp_path / "a.safetensors", 0.7):
        check(small, name)


# ---- where it is, and whose -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "adapter_model.bin", "adapter_config.json"])
def test_a_folder_or_a_file_in_it(tmp_path: Path, small: Pipeline, name: str) -> None:
    folder(tmp_path / "adapter", keyed(FC1), {"peft_type": "LORA", "r": 2, "lora_alpha": 6}, "bin")
    weight = small.text_encoder.get_parameter("encoder.layers.0.mlp.fc1.weight")
    before = weight.clone()
    with small.lora(tmp_path / "adapter" / name, 0.5):
        assert torch.allclose(weight - before, 0.5 * 6 / 2 * UP @ DOWN, atol=1e-5)


def test_a_folder_for_each_network(tmp_path: Path, sdxl: Pipeline) -> None:
    """A bare folder is of the encoder that has its shapes, or that its name says; one file may lie in a folder too."""
    pipe = sdxl
    second = pipe.text_encoder_2.transformer.resblocks[0].mlp.c_fc
    wide = {"lora_A.weight": toy.normal(0, 2, 96), "lora_B.weight": toy.normal(1, len(second.weight), 2)}
    both = {"base_model.model." + FC1 + f".{part}": value for part, value in wide.items()}
    config = {"r": 2, "lora_alpha": 4, "use_rslora": True}
    folder(tmp_path / "pair" / "text_encoder", keyed(FC1), config)
    folder(tmp_path / "pair" / "text_encoder_2", both, config)
    first = pipe.text_encoder.encoder.layers[0].mlp.fc1
    for path, changed in (("pair", {0, 1}), ("pair/text_encoder_2", {1}), ("bare", {1})):
        folder(tmp_path / "bare", both, config)
        before = [layer.weight.clone() for layer in (first, second)]
        with pipe.lora(tmp_path / path):
            differ = {i for i, layer in enumerate((first, second)) if not torch.equal(layer.weight, before[i])}
            assert differ == changed
            change = 4 / 2**0.5 * wide["lora_B.weight"] @ wide["lora_A.weight"]
            assert torch.allclose(second.weight - before[1], change, atol=1e-5)


def test_on_the_hub(tmp_path: Path, small: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository, a folder of one, and a file, whose configuration is fetched too."""
    folder(tmp_path / "sub", keyed(FC1), {"r": 2, "lora_alpha": 6})
    folder(tmp_path, keyed(FC1), {"r": 2, "lora_alpha": 6})
    names = [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()]
    monkeypatch.setattr(hub, "files", {"o/r": names}.__getitem__)
    monkeypatch.setattr(hub, "download", lambda repository, file: {"o/r": tmp_path}[repository] / file)
    for source in ("o/r", "o/r/sub", "o/r/adapter_model.safetensors", "o/r/sub/adapter_model.safetensors"):
        [changes] = ldm_lite.open_lora(source).modules.values()
        assert changes["weight"].scale == 3


def test_a_folder_without_its_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder(tmp_path / "adapter", keyed(FC1), {})
    (path / "adapter_config.json").unlink()
    [changes] = ldm_lite.open_lora(path).modules.values()
    assert changes["weight"].scale == 1
    assert "adapter_config.json is missing beside it: alpha is taken to be the rank" in caplog.text
    save_file(PAIR, path / "b.safetensors")
    (path / "adapter_model.safetensors").rename(path / "a.safetensors")
    with pytest.raises(ValueError, match=r"use one of its files: a\.safetensors, b\.safetensors"):
        ldm_lite.open_lora(path)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[" * 100_000, r"adapter_config\.json: is nested too deeply"),
        ("{", r"adapter_config\.json: is not valid JSON"),
        ([1], "holds list, expected an object of settings"),
        (
            {"peft_type": "ADALORA"},
            "its peft_type is 'ADALORA', which is not supported: LORA, LOHA, LOKR, OFT, BOFT, IA3 are",
        ),
        ({"peft_type": ["LORA"]}, r"its peft_type is \['LORA'\], which is not supported"),
        ({"peft_type": "OFT", "coft": 1}, "its coft is 1, expected true or false"),
        ({"peft_type": "OFT", "num_cayley_neumann_terms": 1e9}, "its num_cayley_neumann_terms is .*, expected a num"),
        ({"peft_type": "IA3", "feedforward_modules": 3}, "its feedforward_modules is 3, expected a list of names"),
        ({"peft_type": "IA3", "feedforward_modules": "(a+)+$"}, "too complex"),
        ({"init_lora_weights": "pissa_niter_4"}, "its init_lora_weights is 'pissa_niter_4', which changes the base"),
        ({"init_lora_weights": "loftq"}, "which changes the base model too"),
        ({"target_parameters": ["a.b"]}, "its target_parameters is .*, which is not supported"),
        ({"layer_replication": [[0, 1]]}, "its layer_replication is .*, which is not supported"),
        ({"of_the_future": 1}, "its of_the_future is 1, which is not supported"),
        ({"bias": "some"}, "its bias is 'some', expected none, all, lora_only"),
        ({"r": 4}, "has rank 2, but .*adapter_config.json.* says 4: they do not belong together"),
        ({"r": "2"}, "its r is '2', expected a whole number"),
        ({"r": 0}, "its r is 0, expected a whole number"),
        ({"lora_alpha": None}, "its lora_alpha is None, expected a number"),
        ('{"lora_alpha": NaN}', "its lora_alpha is nan, expected a number"),
        ({"use_rslora": "yes"}, "its use_rslora is 'yes', expected true or false"),
        ({"alpha_pattern": [1]}, r"its alpha_pattern is \[1\], expected an object of numbers"),
        ({"alpha_pattern": {"fc1": "x"}}, "expected an object of numbers"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "too complex"),
        ({"rank_pattern": {"(": 1}}, "expected the name of a module"),
        ({"rank_pattern": {f"a{i}": 1 for i in range(9)}}, "has 9 patterns for 2 tensors"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: object, message: str) -> None:
    """By name, and whether they lie in a folder or in the metadata of diffusers."""
    with pytest.raises(ValueError, match=message):
        ldm_lite.open_lora(folder(tmp_path / "adapter", keyed(FC1), config))
    text = config if isinstance(config, str) else json.dumps(config)
    if isinstance(config, dict):
        text = json.dumps({f"text_encoder.{name}": value for name, value in config.items()})
        message = message.replace("adapter_config.json", "lora_adapter_metadata")
    elif "lora_alpha" in text:
        return
    save_file(keyed(FC1, "text_encoder."), tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": text})
    with pytest.raises(
        ValueError, match=message.split(", expected an object with")[0].replace(r"adapter_config\.json", "")
    ):
        ldm_lite.open_lora(tmp_path / "a.safetensors")


NAME = "lora_te_text_model_encoder_layers_0_mlp_fc1"
KOHYA = {f"{NAME}.lora_down.weight": DOWN, f"{NAME}.lora_up.weight": UP}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors, expected a checkpoint"),
        ({f"{NAME}.alpha": torch.tensor(1.0)}, "lacks its up and down weights"),
        (KOHYA | {f"{NAME}.alpha": torch.ones(2)}, "its alpha has 2 elements, expected one"),
        (KOHYA | {f"{NAME}.alpha": torch.tensor(float("nan"))}, "its part alpha holds NaN"),
        (KOHYA | {f"{NAME}.lora_up.weight": torch.ones(256, 3)}, r"do not fit together \(2 x 64, 256 x 3\)"),
        (KOHYA | {f"{NAME}.lora_up.weight": torch.ones(256)}, "do not fit together"),
        (KOHYA | {f"{NAME}.lora_up.weight": torch.tensor(1.0)}, "its part up is a single number"),
        (KOHYA | {f"{NAME}.lora_mid.weight": torch.ones(2, 3, 3, 3)}, "do not fit together"),
        (
            {f"{NAME}.lora_down.weight": torch.ones(0, 64), f"{NAME}.lora_up.weight": torch.ones(256, 0)},
            "its part down is 0 x 64, expected a tensor",
        ),
        (KOHYA | {f"{NAME}.lora_up.weight": UP / 0}, "its part up holds NaN or infinity"),
        (KOHYA | {f"{NAME}.lora_up.weight": UP.long()}, "its part up is int64, expected floating point"),
        (KOHYA | {f"{NAME}.lora_up.weight": UP > 0}, "its part up is bool, expected floating point"),
        (KOHYA | {f"{NAME}.lora_A.weight": DOWN.clone()}, "holds the same weights twice, as .*lora_.* and .*lora_"),
        (KOHYA | {f"{NAME}.diff": UP @ DOWN}, "changes its weight twice"),
        (KOHYA | {f"{NAME}.scalar": torch.ones(1)}, f"holds 1 tensors of a kind that is not known .{NAME}.scalar"),
        (KOHYA | {f"{NAME}.reshape_weight": torch.ones(2)}, "holds weights of another shape"),
        (KOHYA | {f"{NAME}.bias_values": torch.ones(2)}, "holds a sparse bias, which is not supported"),
        (KOHYA | {"bundle_emb.x.t5": torch.ones(1, 64)}, "holds bundle_emb.x.t5, expected emb_params"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message):
        ldm_lite.open_lora(tmp_path / "a.safetensors")


def test_a_module_by_two_names(tmp_path: Path, small: Pipeline) -> None:
    again = {key.replace("lora_te_", "lora_te1_"): value for key, value in KOHYA.items()}
    save_file({key: value.clone() for key, value in (KOHYA | again).items()}, tmp_path / "a.safetensors")
    before = small.text_encoder.encoder.layers[0].mlp.fc1.weight.clone()
    with pytest.raises(ValueError, match=r"changes text_encoder\.encoder\.layers\.0\.mlp\.fc1 twice, as .* and "):
        small.lora(tmp_path / "a.safetensors")
    assert torch.equal(before, small.text_encoder.encoder.layers[0].mlp.fc1.weight)


# ---- spellings ------------------------------------------------------------------------------------------------------


TO_OUT = "down_blocks.0.attentions.0.transformer_blocks.0.attn2"
OUT = "unet.input_blocks.1.1.transformer_blocks.0.attn2.to_out.0.weight"
ATTENTION, OURS = "text_model.encoder.layers.0.self_attn", "text_encoder.encoder.layers.0.self_attn"


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("diffusion_model.input_blocks.1.1.proj_in.lora_A.weight", "unet.input_blocks.1.1.proj_in.weight"),
        ("unet.down_blocks.0.attentions.0.proj_in.lora.down.weight", "unet.input_blocks.1.1.proj_in.weight"),
        ("base_model.model.down_blocks.0.attentions.0.proj_in.lora_A.x.weight", "unet.input_blocks.1.1.proj_in.weight"),
        ("lycoris_down_blocks_0_attentions_0_proj_in.lora_down.weight", "unet.input_blocks.1.1.proj_in.weight"),
        ("lora_unet_conv_in.lora_down.weight", "unet.input_blocks.0.0.weight"),
        ("lora_unet_input_blocks_0_0.lora_down.weight", "unet.input_blocks.0.0.weight"),
        ("lora_unet_out_2.lora_down.weight", "unet.out.2.weight"),
        ("unet.conv_out.lora_A.weight", "unet.out.2.weight"),
        (f"unet.{TO_OUT}.processor.to_out_lora.down.weight", OUT),
        (f"unet.{TO_OUT}.to_out.0.lora.down.weight", OUT),
        (f"{TO_OUT}.to_out.0.lora.down.weight", OUT),
        ("lora_unet_input_blocks_1_1_transformer_blocks_0_attn2_to_out_0.lora_down.weight", OUT),
        ("unet.time_embedding.linear_1.lora_A.weight", "unet.time_embed.0.weight"),
        ("lora_unet_time_embed_2.lora_down.weight", "unet.time_embed.2.weight"),
        (f"text_encoders.clip_l.transformer.{FC1}.lora_A.weight", "text_encoder.encoder.layers.0.mlp.fc1.weight"),
        (f"text_encoder.{ATTENTION}.q_proj.lora_linear_layer.down.weight", f"{OURS}.q_proj.weight"),
        (f"text_encoder.{ATTENTION}.to_out_lora.down.weight", f"{OURS}.out_proj.weight"),
        ("lora_te1_text_model_encoder_layers_0_layer_norm1.w_norm", "text_encoder.encoder.layers.0.layer_norm1.weight"),
        ("lora_te_text_model_final_layer_norm.b_norm", "text_encoder.final_layer_norm.bias"),
        ("lora_unet_down_blocks_0_resnets_0_norm1.w_norm", "unet.input_blocks.1.0.in_layers.0.weight"),
        ("lora_unet_down_blocks_0_attentions_0_norm.b_norm", "unet.input_blocks.1.1.norm.bias"),
        ("lora_unet_conv_norm_out.w_norm", "unet.out.0.weight"),
        ("diffusion_model.out.2.diff_b", "unet.out.2.bias"),
        ("diffusion_model.time_embed.0.diff", "unet.time_embed.0.weight"),
        ("diffusion_model.out.0.set_weight", "unet.out.0.weight"),
    ],
)  # fmt: skip
def test_names(tmp_path: Path, small: Pipeline, key: str, target: str) -> None:
    """The named parameter changes, and nothing else."""
    parameters = {f"{r}.{k}": v for r, net in small.networks.items() for k, v in net.named_parameters()}
    shape = parameters[target].shape
    if "down.weight" in key or "lora_A" in key:
        up = key.replace("down", "up") if "lora_A" not in key else key.replace("lora_A", "lora_B")
        up = up.replace("up_blocks", "down_blocks")
        down = toy.normal(0, 2, *shape[1:])
        tensors = {key: down, up: toy.normal(1, shape[0], 2, *[1] * (len(shape) - 2))}
        wanted = (tensors[up].flatten(1) @ down.flatten(1)).reshape(shape)
    else:
        tensors = {key: toy.normal(0, *shape)}
        wanted = tensors[key] - (parameters[target] if "set_weight" in key else 0)
    save_file(tensors, tmp_path / "a.safetensors")
    before = {name: value.clone() for name, value in parameters.items()}
    with small.lora(tmp_path / "a.safetensors", 0.5):
        assert torch.allclose(parameters[target] - before[target], 0.5 * wanted, atol=1e-5)
        assert [name for name, value in parameters.items() if not torch.equal(value, before[name])] == [target]
    assert torch.equal(parameters[target], before[target])


def test_names_of_openclip(tmp_path: Path, sdxl: Pipeline) -> None:
    pipe, text = sdxl, sdxl.text_encoder_2
    attention = text.transformer.resblocks[0].attn
    layer = "text_model.encoder.layers.0.self_attn"
    for key, parameter, rows in (
        (f"text_encoder_2.{layer}.to_k_lora", attention.in_proj_weight, slice(96, 192)),
        (f"text_encoders.clip_g.transformer.{layer}.v_proj", attention.in_proj_weight, slice(192, None)),
        ("lora_te2_text_projection", text.text_projection, slice(None)),
    ):
        ends = (".down", ".up") if key.endswith("_lora") else (".lora_down", ".lora_up")
        down, up = toy.normal(0, 2, 96), toy.normal(1, 96, 2)
        save_file({f"{key}{ends[0]}.weight": down, f"{key}{ends[1]}.weight": up}, tmp_path / "a.safetensors")
        before = parameter.clone()
        with pipe.lora(tmp_path / "a.safetensors"):
            change = up @ down
            change = change.T if "projection" in key else change
            assert torch.allclose((parameter - before)[rows], change, atol=1e-5)
            assert torch.equal(parameter[: rows.start or 0], before[: rows.start or 0])
    save_file({f"lora_te2_{layer.replace('.', '_')}_k_proj.diff_b": torch.ones(96)}, tmp_path / "b.safetensors")
    before = attention.in_proj_bias.clone()
    with pipe.lora(tmp_path / "b.safetensors"):
        assert torch.allclose(attention.in_proj_bias - before, torch.tensor([0.0, 1.0, 0.0]).repeat_interleave(96))


def test_a_bias_that_the_model_lacks_is_named(
    tmp_path: Path, small: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    save_file({f"{name}.diff_b": torch.ones(32), f"{name}.diff": torch.ones(32, 32)}, tmp_path / "a.safetensors")
    small.lora(ldm_lite.open_lora(tmp_path / "a.safetensors"), 1.0)
    assert f"1 weights or biases are not in this model and have no effect: the bias of {name}" in caplog.text


# ---- bundled embeddings ---------------------------------------------------------------------------------------------


def test_a_bundled_textual_inversion(
    tmp_path: Path, small_path: Path, small: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded with its LoRA it is a name in prompts; the same file as an embedding is that too, and both together."""
    caplog.set_level("INFO", "ldm_lite")
    file = tmp_path / "a.safetensors"
    save_file(KOHYA | {"bundle_emb.my.cat.string_to_param.*": toy.embedding(64)}, file)
    pipe = ldm_lite.load(small_path, device="cpu", lora=[str(file)])
    assert dict(pipe.tokenizer.added).keys() == {"my.cat"}
    assert "a.safetensors: in a prompt, 'my.cat' stands for 3 vectors" in caplog.text
    assert torch.equal(pipe.learned[64], toy.embedding(64))
    options = {"steps": 1, "width": 64, "height": 64, "output": "tensor", "seed": 1}
    wanted = pipe.txt2img("a my.cat", **options)[0]
    assert torch.equal(wanted, pipe.txt2img("a my.cat", embedding=(str(file),), **options)[0])
    with small.lora(file):
        assert "for prompts to use 'my.cat', which it bundles, give `embedding=FILE` too" in caplog.text
        assert not torch.equal(wanted, small.txt2img("a my.cat", **options)[0])
        assert torch.equal(wanted, small.txt2img("a my.cat", embedding=(str(file),), **options)[0])


def test_the_command_takes_a_folder(tmp_path: Path, small_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "adapter", keyed(FC1), {"r": 2, "lora_alpha": 6})
    arguments = ["x", "--ckpt", str(small_path), "--device", "cpu", "--steps", "1", "--H", "64", "--W", "64"]
    assert txt2img.main([*arguments, "--lora", f"{path}:0.5", "--out", str(tmp_path / "a.png")]) == 0
    assert "adapter: 1 of 1 modules merged, at 0.5" in capsys.readouterr().err
