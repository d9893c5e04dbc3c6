"""Registry of architectures by name, and networks from Python factories."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from barter.core.errors import ConfigError
from barter.core.images import Spec
from barter.core.model import Classifier, split, verify_split
from barter.core.params import call_user_code, did_you_mean, import_object
from barter.models import small
from barter.models.families import FAMILIES
from barter.models.filters import filters

__all__ = ["ZOO", "Own", "build_network", "client_architectures", "name_models"]

# A user's network: a module with its weights, or a factory of one.
Own: TypeAlias = nn.Module | Callable[[Spec], nn.Module]


def _torchvision(name: str, spec: Spec, options: Mapping[str, object] | None = None) -> Classifier:
    """Build a network of torchvision.

    torchvision takes seconds to load and is imported only here, so that names can be listed without it.
    """
    from torchvision import models as tv

    module: nn.Module = getattr(tv, name)(num_classes=spec.classes, **(options or {}))
    if spec.channels != 3:
        _replace_first_convolution(module, spec.channels)
    return split(module)


def _replace_first_convolution(module: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for another number of input channels."""
    name, old = next(
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d)
    )
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, new)


def _shallow_resnet(stages: int, spec: Spec) -> Classifier:
    """Build one of HtFLlib's ResNets of 4 to 10 layers: one block per stage."""
    from torchvision.models.resnet import BasicBlock, ResNet

    module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=spec.classes)
    for unused in range(stages + 1, 5):
        setattr(module, f"layer{unused}", nn.Identity())
    module.fc = nn.Linear(32 * 2**stages, spec.classes)
    if spec.channels != 3:
        _replace_first_convolution(module, spec.channels)
    return split(module)


def _small_stem(name: str, spec: Spec) -> Classifier:
    """Build a ResNet for small images: a 3x3 stem of stride 1 without pooling."""
    from torchvision import models as tv

    module = getattr(tv, name)(num_classes=spec.classes)
    module.conv1 = nn.Conv2d(spec.channels, 64, 3, padding=1, bias=False)
    module.maxpool = nn.Identity()
    return split(module)


def _vit_tiny(spec: Spec) -> Classifier:
    """Build ViT-Tiny: 12 layers, 3 heads, width 192, 8 x 8 patches.

    There are 14 x 14 patches for images of 224 pixels and more.
    """
    side = spec.height
    patches = 14 if side >= 224 else 8  # along each side
    if spec.width != side or side % patches:
        raise ConfigError(
            f"vit-tiny wants square images whose side is a multiple of {patches}, not {_size(spec)}"
        )
    from torchvision.models import VisionTransformer

    module = VisionTransformer(side, side // patches, 12, 3, 192, 768, num_classes=spec.classes)
    if spec.channels != 3:
        module.conv_proj = nn.Conv2d(spec.channels, 192, side // patches, side // patches)
    return split(module)


ZOO: dict[str, Callable[[Spec], Classifier]] = {
    "resnet4": partial(_shallow_resnet, 1),
    "resnet6": partial(_shallow_resnet, 2),
    "resnet8": partial(_shallow_resnet, 3),
    "resnet10": partial(_shallow_resnet, 4),
    "resnet18": partial(_torchvision, "resnet18"),
    "resnet34": partial(_torchvision, "resnet34"),
    "resnet50": partial(_torchvision, "resnet50"),
    "resnet101": partial(_torchvision, "resnet101"),
    "resnet152": partial(_torchvision, "resnet152"),
    "resnet18-3x3": partial(_small_stem, "resnet18"),
    "resnet34-3x3": partial(_small_stem, "resnet34"),
    "googlenet": partial(
        _torchvision, "googlenet", options={"aux_logits": False, "init_weights": True}
    ),
    "mobilenet-v2": partial(_torchvision, "mobilenet_v2"),
    "mobilenet-v3-small": partial(_torchvision, "mobilenet_v3_small"),
    "mobilenet-v3-large": partial(_torchvision, "mobilenet_v3_large"),
    "shufflenet-v2-x1.5": partial(_torchvision, "shufflenet_v2_x1_5"),
    "shufflenet-v2-x2.0": partial(_torchvision, "shufflenet_v2_x2_0"),
    "efficientnet-v2-s": partial(_torchvision, "efficientnet_v2_s"),
    "vit-tiny": _vit_tiny,
    "convnet": small.convnet,
    "cnn": small.cnn,
    "fedfree-cnn": small.fedfree_cnn,
    "small-cnn": small.small_cnn,
    "small-vgg": small.small_vgg,
    "small-resnet": small.small_resnet,
    "small-separable": small.small_separable,
    "small-mlp": small.small_mlp,
    "filters": filters,
}


def client_architectures(name: str, clients: int) -> list[str]:
    """Return the architecture of each client, in order.

    Args:
        name: A family, a model of the zoo, a factory `package.module:function`, or several of these
            separated by commas. Families are replaced by their members.
        clients: Number of clients; client i gets member i mod n.

    Raises:
        ConfigError: If there is no family or model of a name. Factories are not looked up.
    """
    family: list[str] = []
    for part in map(str.strip, name.split(",")):
        family.extend(FAMILIES.get(part, (part,)))
    for model in family:
        if model not in ZOO and ":" not in model:
            raise ConfigError(
                f"unknown family or model {model!r}: {did_you_mean(model, [*FAMILIES, *ZOO])}"
            )
    return [family[i % len(family)] for i in range(clients)]


def build_network(name: str, spec: Spec, own: Own | None = None) -> Classifier:
    """Build a network for a task and check that it accepts the task's images.

    Its weights are random, from torch's global generator, except for those of a user's module.

    Args:
        name: A model of the zoo, or a factory `package.module:function` that is called with the
            spec. A factory can be given arguments, `package.module:function:depth=2`.
        spec: Format of the images, and the number of classes.
        own: A user's module, which is copied, or factory; `name` is then only its name.

    Raises:
        ConfigError: If there is no such model, it does not accept the images, or a user's network
            cannot be split into features and head.
    """
    outside = own is not None or ":" in name
    make = partial(_split, name, own or _factory(name)) if outside else ZOO.get(name)
    if make is None:
        raise ConfigError(f"unknown model {name!r}: {did_you_mean(name, ZOO)}")
    try:
        model = make(spec)
        _try_out(model, spec)
    except (RuntimeError, ValueError) as error:
        small = min(spec.shape[1:]) < 64
        hint = (
            "too small for it; set data.size to enlarge them" if small else "set another data.size"
        )
        raise ConfigError(
            f"{name} cannot take images of {_size(spec)}: {hint} ({error})"
        ) from error
    return model


def _factory(name: str) -> Own:
    """Return the factory of a name such as my.networks:make:depth=2.

    The arguments are bound.
    """
    place, *fields = re.split(r":(?=[^\W\d]\w*=)", name)
    factory: Own = import_object(place, "model")
    arguments = dict(_argument(field) for field in fields)
    if arguments and (isinstance(factory, nn.Module) or not callable(factory)):
        kind = type(factory).__name__
        raise ConfigError(f"{name}: {place} is a {kind}, which takes no arguments")
    return partial(factory, **arguments) if arguments else factory


def _argument(field: str) -> tuple[str, object]:
    """Parse an argument such as `depth=2` into name and value.

    Values that are not numbers, booleans or quoted strings are taken as strings.
    """
    key, _, text = field.partition("=")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return key, text


def _split(name: str, own: Own, spec: Spec) -> Classifier:
    """Build a user's network, and split it into features and head."""
    network: object = own
    if not isinstance(own, nn.Module):
        network = call_user_code(f"{name}, called with the task's spec,", partial(own, spec))
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"{name} made a {type(network).__name__} of the task's spec, not a module"
        )
    classifier = split(network)
    call_user_code(name, lambda: verify_split(network, classifier, spec.shape, spec.classes))
    return classifier


def _try_out(model: Classifier, spec: Spec) -> None:
    """Run one forward pass, so that a wrong input size is found before training."""
    was_training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(1, *spec.shape))
    model.train(was_training)


def _size(spec: Spec) -> str:
    """Return the size of the images for messages."""
    return f"{spec.height}x{spec.width}"


def name_models(models: Own | Sequence[str | Own]) -> list[tuple[str, Own | None]]:
    """Return pairs of name and model, with None where the name is enough.

    It is enough for a string, which is the name, and for a factory that can be imported from
    another module than `__main__`, whose name is `module:function`. Others are named by their class
    or function and their position, such as Net-0.

    Args:
        models: Names, modules, or factories that are called with the spec.

    Raises:
        ConfigError: If there is no model, or an entry is none of these.
    """
    entries: list[tuple[str, Own | None]] = []
    for i, model in enumerate(models if isinstance(models, Sequence) else [models]):
        if isinstance(model, str):
            entries.append((model, None))
        elif callable(model):
            kind = type(model) if isinstance(model, nn.Module) else model
            place = f"{kind.__module__}:{getattr(kind, '__qualname__', '')}"
            if kind is model and kind.__module__ != "__main__" and _lookup(place) is model:
                entries.append((place, None))
            else:
                entries.append((f"{getattr(kind, '__name__', 'model')}-{i}", model))
        else:
            raise ConfigError(f"models: {model!r} is neither a name, a module nor a factory of one")
    if not entries:
        raise ConfigError("models: give at least one; client i gets number i mod n")
    return entries


def _lookup(place: str) -> object:
    """Return the object at `module:name` if the module is loaded, else None."""
    module, _, name = place.partition(":")
    return getattr(sys.modules.get(module), name, None)
