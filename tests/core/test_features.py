"""Features: options of one's own, the order in which they change a run, and what guidance is told."""

import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ldm_lite.core import FEATURES, Feature, Pipeline, register_feature
from ldm_lite.core.denoise import Branch, Call, Inputs, InputSource, Outputs, State, run_row, weighted
from ldm_lite.core.features import STAGES
from ldm_lite.core.job import Item, Job, Latents
from ldm_lite.core.layers import Place, attention_layers, explicit, sdpa
from ldm_lite.core.model import Model
from ldm_lite.core.options import Options

pytestmark = pytest.mark.usefixtures("tables")
FAST: dict[str, Any] = {"prompt": "a cat", "steps": 3, "sampler": "euler", "width": 32, "height": 32}


def latents(pipe: Pipeline, **options: Any) -> Tensor:
    *_, state = pipe.stream(**{**FAST, **options})
    return state.latents


# ---- the table ------------------------------------------------------------------------------------------------------


def test_options_are_read_by_name(small: Pipeline) -> None:
    seen: list[Any] = []

    @register_feature
    @dataclass(frozen=True)
    class Noisy(Feature):
        amount: float = 0.5
        kind: str = "white"

        def change_options(self, model: Model, options: Options) -> tuple[Model, Options]:
            seen.append((self.amount, self.kind, options.steps))
            return model, replace(options, steps=2)

    assert (FEATURES["amount"], FEATURES["kind"]) == (Noisy, Noisy)
    plain = latents(small, steps=2)
    assert torch.equal(latents(small, kind="pink"), plain)
    assert seen == [(0.5, "pink", 3)]
    latents(small)
    assert len(seen) == 1  # a feature takes part if one of its options is given


def test_a_feature_is_imported_when_it_is_needed(small: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    FEATURES["absent"] = "no_such_module:Absent"
    assert latents(small).shape == (1, 4, 4, 4)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        latents(small, absent=1)


def test_an_unknown_option_is_an_error_with_the_nearest_name(small: Pipeline) -> None:
    with pytest.raises(
        TypeError, match="no argument 'sampeler': did you mean sampler\\? expected some of prompt, negati"
    ):
        small.txt2img("a cat", sampeler="ddim")
    with pytest.raises(TypeError, match="no argument 'x': expected some of"):
        small.txt2img("a cat", x=1)


def test_options_that_do_not_go_together(small: Pipeline) -> None:
    @register_feature
    @dataclass(frozen=True)
    class First(Feature):
        excludes = ("mask", "second")
        first: int = 0

    @register_feature
    @dataclass(frozen=True)
    class Second(Feature):
        second: int = 0

    with pytest.raises(ValueError, match="`first` does not go with `second`: leave one of them out"):
        latents(small, second=1, first=1)


def test_an_option_belongs_to_one_feature(small: Pipeline) -> None:
    def tint(default: int) -> type[Feature]:
        @register_feature
        class Tint(Feature):
            tint: int = default

        return Tint

    tint(1)
    second = tint(2)  # as when a notebook's cell runs again
    assert FEATURES["tint"] is second
    for name, owner in (("tint", "Tint"), ("steps", "Options")):
        with pytest.raises(ValueError, match=f"the option `{name}` of Other is one of .*{owner}: give it another name"):
            register_feature(type("Other", (Feature,), {"__annotations__": {name: int}, name: 0}))


@pytest.mark.parametrize("turned", [False, True])
def test_features_are_applied_in_the_order_of_their_stages(small: Pipeline, turned: bool) -> None:
    order: list[str] = []

    def feature(name: str) -> Any:
        def change_job(self: Feature, job: Job) -> Job:
            order.append(name)
            return job

        members = {"stage": name, "__annotations__": {f"at_{name}": int}, f"at_{name}": 0, "change_job": change_job}
        return register_feature(dataclass(frozen=True)(type(name, (Feature,), members)))

    for name in reversed(STAGES) if turned else STAGES:
        feature(name)
    latents(small, **{f"at_{name}": 1 for name in sorted(STAGES)})
    assert order == list(STAGES)


# ---- where attention is ---------------------------------------------------------------------------------------------


def test_an_attention_function_is_told_where_it_is(small: Pipeline) -> None:
    seen: list[Any] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        assert q.shape[2] == place.height * place.width
        assert place.by_branch(q).shape == (len(place.branches), len(q) // len(place.branches), *q.shape[1:])
        seen.append((place.layer, place.height, place.width, place.call, place.branches, float(place.t or 0)))
        return sdpa(q, k, v)

    pipe = small.with_attention(watched, "*attn1")
    options: dict[str, Any] = {"sampler": "plms", "steps": 2, "width": 48, "height": 32}
    assert torch.equal(latents(pipe, **options), latents(small, **options))
    layers = [*attention_layers(small.unet, "*attn1")]
    sizes = [(4, 6), (2, 3), (4, 6), (4, 6)]
    plan = small.plan("plms", 2)
    calls = [Call(0, 0, 2), Call(1, 0, 2), Call(2, 1, 2)]
    assert seen == [
        (layer, *size, call, (False, True), float(plan.t[call.number]))
        for call in calls
        for layer, size in zip(layers, sizes, strict=True)
    ]
    seen.clear()
    latents(pipe, scale=1, steps=1)
    assert {branches for *_, branches, _ in seen} == {(True,)}
    seen.clear()
    noise = torch.zeros(3, 4, 2, 6)
    pipe.unet(noise, torch.zeros(3), small.encode_prompt(["a"] * 3)["context"])  # outside of a run
    assert seen[0] == (layers[0], 2, 6, None, (True,), 0.0)


def test_the_place_is_that_of_the_thread(small: Pipeline) -> None:
    seen = dict[str, set[int]]()
    barrier = threading.Barrier(2)

    def watched(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        barrier.wait(60)
        seen.setdefault(threading.current_thread().name, set()).add(place.width)
        return sdpa(q, k, v)

    pipe = small.with_attention(watched, "middle_block*attn1")
    threads = [
        threading.Thread(target=latents, args=(pipe,), kwargs={"width": width}, name=str(width)) for width in (32, 48)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"32": {2}, "48": {3}}


def test_functions_of_q_k_and_v_alone_are_called_as_before(small: Pipeline) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None
        return sdpa(q, k, v)

    for function in (masked, torch.nn.functional.scaled_dot_product_attention):
        assert torch.equal(latents(small.with_attention(function)), latents(small))


@pytest.mark.slow
def test_an_attention_with_a_place_compiles_to_one_graph(small: Pipeline) -> None:
    """Without breaks, for all calls: it compares the timestep, a tensor."""

    def sharper(q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        scale = torch.where(place.t < 500, 1.0, 0.1 * place.height + len(place.branches))
        return sdpa(scale * q, k, v)

    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    pipe = small.with_attention(sharper)
    step = torch.compile(run_row, backend=backend, fullgraph=True)
    torch.testing.assert_close(latents(replace(pipe, run_row=step), steps=6), latents(pipe, steps=6))
    assert len(graphs) == 1


# ---- what features change -------------------------------------------------------------------------------------------


def change_inputs(small: Pipeline, change: Any, **options: Any) -> Tensor:
    """The latents of a run whose calls read what `change` makes of their inputs."""

    @register_feature
    @dataclass(frozen=True)
    class Changed(Feature):
        stage = "guidance"
        changed: bool = True

        def change_job(self, job: Job) -> Job:
            return job.changing_inputs(change)

    return latents(small, changed=True, **options)


def test_calls_are_told_their_number_and_step(small: Pipeline) -> None:
    calls: list[Call] = []

    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        calls.append(call)
        assert job.options.steps == 3
        return inputs

    assert torch.equal(change_inputs(small, change, sampler="plms"), latents(small, sampler="plms"))
    assert calls == [Call(0, 0, 3), Call(1, 0, 3), Call(2, 1, 3), Call(3, 2, 3)]


def test_guidance_is_told_units_weights_and_which_branches_are_positive(small: Pipeline) -> None:
    seen: list[Outputs] = []

    def combine(outputs: Outputs) -> Tensor:
        seen.append(outputs)
        return weighted(outputs)

    out = change_inputs(small, lambda inputs, call, job: inputs.combined_by(combine), scale=3.0)
    assert torch.equal(out, latents(small, scale=3.0))
    outputs = seen[0]
    assert outputs.positive == (False, True)
    assert torch.equal(outputs.cond, outputs.outs[1])
    assert outputs.weights.flatten().tolist()[1] == 3.0
    a, s = outputs.row.level
    torch.testing.assert_close(outputs.to_x0(outputs.cond), (outputs.x - s * outputs.cond) / a)  # eps prediction
    torch.testing.assert_close(outputs.from_x0(outputs.to_x0(outputs.cond)), outputs.cond, rtol=1e-3, atol=1e-4)


def test_guidance_is_called_without_guidance_too(small: Pipeline) -> None:
    def zero(out: Tensor, outputs: Outputs) -> Tensor:
        assert outputs.positive == (True,)
        return 0 * out

    changed = change_inputs(small, lambda inputs, call, job: inputs._replace(adjust=(*inputs.adjust, zero)), scale=1)
    assert not torch.allclose(changed, latents(small, scale=1), atol=1e-3)


def test_two_features_cannot_both_replace_the_guidance(small: Pipeline) -> None:
    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        return inputs.combined_by(lambda outputs: outputs.cond).combined_by(lambda outputs: outputs.outs[0])

    with pytest.raises(ValueError, match="two options replace the guidance: leave one of them out"):
        change_inputs(small, change)


def test_adjustments_follow_whatever_replaces_the_guidance(small: Pipeline) -> None:
    """In the order of a call's inputs, and after `combine`, whichever was set first."""

    def double(out: Tensor, outputs: Outputs) -> Tensor:
        return 2 * out

    def plus(out: Tensor, outputs: Outputs) -> Tensor:
        return out + 1

    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        inputs = inputs._replace(adjust=(double, plus))
        return inputs.combined_by(lambda outputs: outputs.cond)

    def at_once(inputs: Inputs, call: Call, job: Job) -> Inputs:
        return inputs.combined_by(lambda outputs: 2 * outputs.cond + 1)

    assert torch.equal(change_inputs(small, change), change_inputs(small, at_once))


def test_maps_of_weights_place_prompts_in_the_image(small: Pipeline) -> None:
    """With a whole map it is the prompt alone; two maps are each prompt's guidance in its place."""
    left = torch.zeros(1, 4, 4)
    left[:, :, :2] = 1
    dog, cat = ({"context": small.encode_prompt(text)["context"]} for text in ("a dog", "a cat"))
    nothing = Branch(small.encode_prompt(""), positive=False)
    maps: list[tuple[Branch, ...]] = [
        (nothing, Branch(dog, left), Branch(cat, 1 - left)),
        (nothing, Branch(dog)),
        (nothing, Branch(cat)),
        (nothing, Branch(dog, torch.ones(1, 4, 4))),
    ]
    seen: list[Tensor] = []
    for branches in maps:
        inputs = Inputs(small.unet, branches, 3.0)
        seen.append(change_inputs(small, lambda old, call, job, inputs=inputs: inputs, steps=1))
    torch.testing.assert_close(seen[3], seen[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen[0][..., :2], seen[1][..., :2], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(seen[0][..., 2:], seen[2][..., 2:], rtol=1e-3, atol=1e-4)


def test_a_scale_of_1_leaves_all_positive_branches(small: Pipeline) -> None:
    """So a guidance interval is a scale of 1 outside of it, whatever the prompt is made of."""
    positive = [Branch(small.encode_prompt(text), weight=0.5) for text in ("a dog", "a cat")]
    nothing = Branch(small.encode_prompt(""), positive=False)
    seen: list[tuple[bool, ...]] = []

    def combine(outputs: Outputs) -> Tensor:
        seen.append(outputs.positive)
        return weighted(outputs)

    with_nothing = Inputs(small.unet, (nothing, *positive), 1.0, combine)
    mean = Inputs(small.unet, (nothing, *positive), 1.0, lambda outputs: outputs.outs.mean(dim=0))
    ours = change_inputs(small, lambda inputs, call, job: with_nothing, steps=1)
    assert seen == [(True, True)]
    torch.testing.assert_close(ours, change_inputs(small, lambda inputs, call, job: mean, steps=1))


def test_cond_is_the_mean_of_the_positive_branches_by_weight(small: Pipeline) -> None:
    """A branch of one's own is one of them unless it says that it is not."""
    seen: list[Outputs] = []

    def combine(outputs: Outputs) -> Tensor:
        seen.append(outputs)
        return weighted(outputs)

    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        (negative, cond), dog = inputs.branches, small.encode_prompt("a dog")
        extra = Branch(dog, 0.5), Branch(dog, -3.0, positive=False)
        return inputs._replace(branches=(negative, cond, *extra), combine=combine)

    change_inputs(small, change, steps=1, scale=3.0)
    (outputs,) = seen
    assert outputs.positive == (False, True, True, False)
    torch.testing.assert_close(outputs.cond, (outputs.outs[1] + 0.5 * outputs.outs[2]) / 1.5)


def test_maps_of_different_sizes_are_an_error(small: Pipeline) -> None:
    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        negative, cond = inputs.branches
        maps = torch.ones(1, 4, 4), torch.ones(1, 2, 4)
        return inputs._replace(branches=(negative, *(cond._replace(weight=weight) for weight in maps)))

    with pytest.raises(ValueError, match=r"got maps of weights of shapes \(1, 4, 4\) and \(1, 2, 4\), exp"):
        change_inputs(small, change)


@pytest.mark.parametrize(("scale", "from_step"), [(3.0, 0), (1.0, 0), (3.0, 2)])
def test_arguments_of_the_network_are_told_the_branches_that_run(small: Pipeline, scale: float, from_step: int) -> None:
    """As ControlNet's residuals, which belong to an image, in an interval of guidance."""
    sizes: list[int] = []

    def residuals(branches: tuple[bool, ...]) -> list[Tensor]:
        sizes.append(len(branches))
        assert branches == ((False, True) if len(branches) == 2 else (True,))
        return [torch.ones(len(branches), channels, 1, 1) for channels in (*small.unet.skip_channels, 64)]

    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        guided = inputs if call.step >= from_step else inputs._replace(scale=1.0)
        return guided._replace(arguments={"residuals": residuals})

    def by_hand(inputs: Inputs, call: Call, job: Job) -> Inputs:
        def network(x: Tensor, t: Tensor, context: Tensor) -> Tensor:
            return small.unet(x, t, context, [torch.ones(1, n, 1, 1) for n in (*small.unet.skip_channels, 64)])

        return inputs._replace(network=network, scale=inputs.scale if call.step >= from_step else 1.0)

    changed = change_inputs(small, change, scale=scale)
    assert sizes == [1 if scale == 1 or step < from_step else 2 for step in range(3)]
    assert torch.equal(changed, change_inputs(small, by_hand, scale=scale))


def test_guidance_can_differentiate_by_the_latents(small: Pipeline) -> None:
    """Universal guidance: the gradient of a loss of x0, through the network, in the same call."""
    calls: list[int] = []

    def counted(*arguments: Tensor) -> Tensor:
        calls.append(len(calls))
        return small.unet(*arguments)  # type: ignore[no-any-return]

    gradients: list[Tensor] = []

    def adjust(out: Tensor, outputs: Outputs) -> Tensor:
        (gradient,) = torch.autograd.grad(outputs.to_x0(out).square().sum(), outputs.x)
        gradients.append(gradient)
        return out + 0.01 * gradient

    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        network = lambda x, t, context: counted(x, t, context)  # noqa: E731
        return inputs._replace(network=network, adjust=(*inputs.adjust, adjust), gradients=True)

    changed = change_inputs(small, change, steps=2)
    assert calls == [0, 1]
    assert not changed.requires_grad
    assert not torch.allclose(changed, latents(small, steps=2), atol=1e-3)
    assert all(weight.grad is None for weight in small.unet.parameters())

    # The first gradient, by finite differences in a random direction, in float64.
    pipe = small.with_networks(unet=copy.deepcopy(small.unet).double())
    plan = small.plan("euler", 2)
    p, q = plan.x0_of_out[0]
    cond, uncond = (small.encode_prompt(text)["context"].double() for text in ("a cat", ""))
    x = (small.noise(42, 32, 32) * plan.initial).double()
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.manual_seed(0))

    def loss(x: Tensor) -> float:
        t = torch.tensor([float(plan.t[0])])
        outs = [pipe.unet(x, t, context) for context in (uncond, cond)]
        return float((p * x + q * (outs[0] + 7.5 * (outs[1] - outs[0]))).square().sum())

    step = 1e-6
    slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert float((gradients[0] * direction).sum()) == pytest.approx(slope, rel=1e-3)


def test_a_run_has_no_gradients_unless_a_feature_asks(small: Pipeline) -> None:
    enabled: list[bool] = []

    def adjust(out: Tensor, outputs: Outputs) -> Tensor:
        enabled.append(torch.is_grad_enabled())
        return out

    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        return inputs._replace(adjust=(adjust,), gradients=call.step == 1)

    assert torch.equal(change_inputs(small, change), latents(small))
    assert enabled == [False, True, False]


def test_conditionings_of_different_shapes_are_an_error(small: Pipeline) -> None:
    def change(inputs: Inputs, call: Call, job: Job) -> Inputs:
        shorter = {"context": inputs.branches[1].conditioning["context"][:, :5]}
        return inputs._replace(branches=(inputs.branches[0], Branch(shorter)))

    with pytest.raises(ValueError, match=r"got context of shapes \(1, 77, 64\) and \(1, 5, 64\), expected the same"):
        change_inputs(small, change)


def test_a_wrapper_is_made_for_each_batch(small: Pipeline) -> None:
    """Where something is remembered during a run: here the first call's inputs are all calls' inputs."""
    batches: list[int] = []

    def once(inputs_of: InputSource, job: Job) -> InputSource:
        batches.append(len(batches))
        remembered: list[Inputs] = []

        def source(call: Call) -> Inputs:
            if not remembered:
                remembered.append(inputs_of(call))
            return remembered[0]

        return source

    @register_feature
    @dataclass(frozen=True)
    class Once(Feature):
        once: bool = True

        def change_job(self, job: Job) -> Job:
            return replace(job, wrappers=(*job.wrappers, once))

    results = list(small.results(**{**FAST, "prompt": ["a", "b", "c"], "once": True}))
    assert [result.item.prompt for result in results] == ["a", "b", "c"]
    assert batches == [0, 1, 2]


def test_slots_follow_a_job_whose_model_is_replaced_later(small: Pipeline) -> None:
    zeroed = small.with_attention(lambda q, k, v: 0 * q)

    @register_feature
    @dataclass(frozen=True)
    class Second(Feature):
        second: bool = True

        def change_job(self, job: Job) -> Job:
            return replace(job, model=zeroed, plan=zeroed.plan("euler", 2))

    assert torch.equal(latents(small, second=True), latents(zeroed, steps=2))


def test_noise_first_latents_and_pixels_can_be_replaced(small: Pipeline) -> None:
    def first_latents(job: Job, items: Sequence[Item], draw: Any) -> Any:
        x = torch.full((len(items), *job.shape), 0.25)
        return x, lambda number, latents: latents.clamp(-0.5, 0.5)

    @register_feature
    @dataclass(frozen=True)
    class Flat(Feature):
        flat: bool = True

        def change_job(self, job: Job) -> Job:
            return replace(job, first_latents=first_latents, finish=lambda item, pixels: -pixels)

    states = list(small.stream(**FAST, flat=True))
    assert states[0].before.eq(0.25).all()
    assert all(state.latents.abs().max() <= 0.5 for state in states[-1:])
    assert states[-1].x0.abs().max() <= 0.5
    result = next(iter(small.results(**FAST, flat=True)))
    plain = next(iter(small.decode_pixels(states[-1].latents)))
    assert torch.equal(result.pixels, -plain)


def test_events_can_be_watched_and_made(small: Pipeline) -> None:
    """A second pass: the latents of the first are turned around before they are decoded."""

    @register_feature
    @dataclass(frozen=True)
    class Turned(Feature):
        turned: bool = True

        def change_events(self, events: Iterator[State | Latents]) -> Iterator[State | Latents]:
            for event in events:
                yield event._replace(latents=event.latents.flip(-1)) if isinstance(event, Latents) else event

    result = next(iter(small.results(**FAST, turned=True)))
    assert torch.equal(result.pixels, next(iter(small.decode_pixels(latents(small).flip(-1)))))


def test_items_of_unlike_keys_do_not_share_a_batch(small: Pipeline) -> None:
    sizes: list[int] = []

    def counted(*arguments: Any) -> Tensor:
        sizes.append(arguments[1].shape[1])
        return run_row(*arguments)

    @register_feature
    @dataclass(frozen=True)
    class Keyed(Feature):
        keyed: bool = True

        def change_job(self, job: Job) -> Job:
            return replace(job, key=lambda item: len(item.prompt))

    options = {**FAST, "prompt": ["a", "b", "cc", "d"], "steps": 1, "batch_size": 3}
    list(replace(small, run_row=counted).results(**options))
    list(replace(small, run_row=counted).results(**options, keyed=True))
    assert sizes == [3, 1, 2, 1, 1]


def test_a_class_without_the_decorator_of_dataclasses_is_made_one(small: Pipeline) -> None:
    @register_feature
    class Plain(Feature):
        plain: int = 1

        def change_job(self, job: Job) -> Job:
            return replace(job, plan=job.model.plan("euler", self.plain))

    assert torch.equal(latents(small, plain=2), latents(small, steps=2))
    with pytest.raises(AttributeError):
        Plain(plain=3).plain = 4  # type: ignore[call-arg]


def test_what_is_no_feature_is_refused() -> None:
    for kind in (
        type("Other", (), {"__annotations__": {"other": int}, "other": 0}),
        type("Other", (Feature,), {}),
        type("Other", (Feature,), {"__annotations__": {"other": int}, "other": 0, "stage": "guidence"}),
    ):
        with pytest.raises(
            ValueError, match="Other: expected a Feature with options, and a stage of settings, prompts, model, text"
        ):
            register_feature(kind)
    assert "other" not in FEATURES


def test_a_second_change_of_attention_leaves_the_first(small: Pipeline) -> None:
    """An object that remembers, and cannot be copied."""

    class Recorder:
        def __init__(self) -> None:
            self.lock, self.shapes = threading.Lock(), list[torch.Size]()

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.shapes.append(k.shape)
            return explicit(q, k, v)

    recorder = Recorder()
    changed = small.with_attention(recorder.attend, "*attn2").with_attention("explicit", "*attn1")
    next(changed.stream("a cat", steps=1))
    assert len(recorder.shapes) == len(attention_layers(small.unet, "*attn2"))
