from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pfedla.errors import ModelError
from pfedla.layers import LayerSpec, bank, change, entry, kind_of, layer_of, match_layers


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (x + out).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, (3, 2))
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class Rooted(nn.Module):
    """Owns a scalar parameter and a table that is not saved."""

    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x) * self.scale
        return out


def lazy() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.LazyLinear(2)


def vary(module: nn.Module) -> nn.Module:
    """Give every tensor of a module a value of its own."""
    with torch.no_grad():
        for i, tensor in enumerate(module.state_dict().values()):
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 1, generator=torch.Generator().manual_seed(i))
            else:
                tensor.fill_(i)
    return module


def test_a_module_whose_name_would_be_taken_for_an_entry_is_refused() -> None:
    module = nn.Sequential()
    module.add_module("fc#1", nn.Linear(2, 2))
    with pytest.raises(ModelError, match="module 'fc#1' cannot name a layer"):
        LayerSpec.of(module)


def test_a_layer_is_a_module_with_the_parameters_it_owns() -> None:
    spec = LayerSpec.of(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)))
    assert spec.names == ("0", "1", "4")
    assert [spec.size(name) for name in spec.names] == [4 * 2 * 9 + 4, 8, 15]
    assert spec.parameters == 76 + 8 + 15
    assert [slot.name for slot in spec.slots["1#stats"]] == ["1.running_mean", "1.running_var"]
    assert [slot.name for slot in spec.slots["1#counters"]] == ["1.num_batches_tracked"]


def test_patterns_join_modules_into_one_layer() -> None:
    spec = LayerSpec.of(ResNet(), {"block0": "blocks.0.*", "block1": ["blocks.1.conv*", "blocks.1.bn?"]})
    assert spec.names == ("stem", "block0", "block1", "head")
    assert spec.size("block0") == spec.size("block1") == 2 * 144 + 2 * 8
    assert len(spec.slots["block0#stats"]) == 4
    assert LayerSpec.of(ResNet(), ["blocks.*"]).names == ("stem", "blocks.*", "head")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"head": "haed"}, "'haed' matches no module: did you mean 'head'"),
        ({"a": "blocks.*", "b": "blocks.0.bn1"}, "'blocks.0.bn1' is matched by two layers: 'a' and 'b'"),
        ({"a#b": "head"}, "cannot name a layer"),
        ({"": "head"}, "cannot name a layer"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(groups: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LayerSpec.of(ResNet(), groups)


def test_match_layers_keeps_the_models_order_and_is_strict() -> None:
    assert match_layers(["fc?", "conv1"], ["conv1", "bn1", "fc1", "fc2"], "layer") == ("conv1", "fc1", "fc2")
    with pytest.raises(ModelError, match="head 'fc' matches no layer: did you mean 'fc1'"):
        match_layers(["fc"], ["conv1", "fc1"], "head")


def test_a_tied_parameter_belongs_to_the_first_layer_and_stays_tied() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = module.get_parameter("0.weight")
    module[1].weight = weight
    spec = LayerSpec.of(module)
    assert (spec.size("0"), spec.size("1")) == (12, 3)
    layers = {key: rows + 1 for key, rows in spec.read(module).items()}
    built = spec.build(module, layers)
    assert built.get_parameter("1.weight") is built.get_parameter("0.weight")
    assert torch.equal(built.get_parameter("1.weight"), weight + 1)


def test_two_parameters_in_one_memory_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module.get_parameter("0.weight").data)
    with pytest.raises(ModelError, match=r"'0\.weight' and '1\.weight' share memory"):
        LayerSpec.of(module)


def test_frozen_parameters_are_of_no_layer_and_stay_as_built() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).requires_grad_(True)
    module[0].requires_grad_(False)
    spec = LayerSpec.of(module)
    assert spec.names == ("1",)
    built = spec.build(module, {key: rows + 1 for key, rows in spec.read(module).items()})
    assert torch.equal(built.get_parameter("0.weight"), module.get_parameter("0.weight"))
    assert not torch.equal(built.get_parameter("1.weight"), module.get_parameter("1.weight"))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2).half(), r"'weight' is float16.*model\.float\(\)"),
        (nn.Linear(2, 2).bfloat16(), "'weight' is bfloat16"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), r"mix float32 \(0\.bias\) and float64 \(1\.bias\)"),
        (lazy(), "'weight' has no shape yet: run the lazy module"),
        (nn.ReLU(), "ReLU has no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameter"),
        (nn.ParameterList([torch.zeros(0, 2)]), "'0' is empty"),
    ],
)
def test_models_that_cannot_be_federated_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LayerSpec.of(module)


def test_statistics_of_a_module_without_parameters_ride_with_the_layer_before() -> None:
    spec = LayerSpec.of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)))
    assert spec.names == ("0", "2")
    assert "0#stats" in spec.slots
    assert "0#counters" in spec.slots


def test_statistics_before_the_first_layer_ride_with_it() -> None:
    spec = LayerSpec.of(nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)))
    assert spec.names == ("1",)
    assert [slot.name for slot in spec.slots["1#stats"]] == ["0.running_mean", "0.running_var"]


def test_norms_are_the_layers_of_nothing_else() -> None:
    assert LayerSpec.of(ResNet()).norms == {f"blocks.{block}.bn{norm}" for block in (0, 1) for norm in (1, 2)}
    assert LayerSpec.of(ResNet(), ["blocks.0.*"]).norms == {"blocks.1.bn1", "blocks.1.bn2"}


def test_parameters_of_the_outermost_module_are_a_layer_and_unsaved_buffers_are_not() -> None:
    spec = LayerSpec.of(Rooted())
    assert spec.names == ("(root)", "fc")
    assert spec.size("(root)") == 1
    assert list(spec.slots) == ["(root)", "fc"]


@pytest.mark.parametrize(
    "make",
    [
        ResNet,
        lambda: ResNet().double(),
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, affine=False), nn.Flatten(), nn.Linear(3 * 35, 2)),
    ],
)
def test_reading_writing_and_building_give_the_same_module(make: Callable[[], nn.Module]) -> None:
    module, other = vary(make()).eval(), make()
    spec = LayerSpec.of(module)
    layers = spec.read(module)
    x = torch.rand(2, 2, 6, 6, dtype=spec.dtype)
    x = x if isinstance(module, ResNet) else x.flatten(2)
    spec.write(other, {key: torch.cat([torch.zeros_like(rows), rows]) for key, rows in layers.items()}, row=1)
    for copied in (other.eval(), spec.build(make(), layers)):
        assert torch.equal(copied(x), module(x))
        for key, tensor in module.state_dict().items():
            assert torch.equal(copied.state_dict()[key], tensor), key
    for key, rows in spec.read(other).items():
        assert rows.dtype == layers[key].dtype
        assert torch.equal(rows, layers[key])


def test_reading_copies_and_building_leaves_the_template_alone() -> None:
    module = nn.Linear(2, 2)
    spec, before = LayerSpec.of(module), module.weight.detach().clone()
    layers = spec.read(module)
    for rows in layers.values():
        rows.fill_(7)
    built = spec.build(module, layers)
    assert torch.equal(module.weight, before)
    assert not built.training
    assert (built.get_parameter("weight") == 7).all()


def test_writing_needs_every_entry() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    spec = LayerSpec.of(module)
    with pytest.raises(KeyError):
        spec.write(module, {"0": torch.zeros(1, 6)})


def test_entries_are_named_by_layer_and_kind() -> None:
    assert entry("conv1") == "conv1"
    assert entry("conv1", "stats") == "conv1#stats"
    assert (layer_of("conv1#stats"), kind_of("conv1#stats")) == ("conv1", "stats")
    assert (layer_of("conv1"), kind_of("conv1")) == ("conv1", "")
    assert entry("", "alpha") == "#alpha"
    assert (layer_of("#alpha"), kind_of("#alpha")) == ("", "alpha")


def test_change_is_trained_minus_received_of_what_travels() -> None:
    received = {"a": torch.tensor([[1.0]]), "a#stats": torch.tensor([[2.0]]), "a#counters": torch.tensor([[3]])}
    received |= {"a#control": torch.tensor([[4.0]]), "#alpha": torch.tensor([[5.0]])}
    trained = {key: rows + 5 for key, rows in received.items()}
    assert {key: rows.item() for key, rows in change(trained, received).items()} == {"a": 5.0, "a#stats": 5.0}


def test_a_bank_holds_copies_of_all_that_travels() -> None:
    theta = {"a": torch.tensor([[1.0, 2.0]]), "a#stats": torch.tensor([[3.0]]), "a#counters": torch.tensor([[4]])}
    rows = bank(theta, 3)
    assert {key: x.tolist() for key, x in rows.items()} == {"a": [[1.0, 2.0]] * 3, "a#stats": [[3.0]] * 3}
    rows["a"][1] = 9
    assert rows["a"].tolist() == [[1.0, 2.0], [9.0, 9.0], [1.0, 2.0]]
    assert theta["a"].tolist() == [[1.0, 2.0]]
