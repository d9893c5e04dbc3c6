"""Families of architectures for heterogeneous clients.

Client i gets member i mod n.
"""

from __future__ import annotations

__all__ = ["FAMILIES"]

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

FAMILIES: dict[str, tuple[str, ...]] = {
    # DFFKE's HtFE-1 and HtFE-10; 2, 3, 4, 5, 8 and 9 are HtFLlib's.
    "htfe-1": ("resnet18",),
    "htfe-2": ("cnn", "resnet18"),
    "htfe-3": ("resnet10", "resnet18", "resnet34"),
    "htfe-4": ("cnn", "googlenet", "mobilenet-v2", "resnet18"),
    "htfe-5": ("googlenet", "mobilenet-v2", "resnet18", "resnet34", "resnet50"),
    "htfe-8": ("cnn", "googlenet", "mobilenet-v2", *RESNETS),
    "htfe-9": ("resnet4", "resnet6", "resnet8", "resnet10", *RESNETS),
    "htfe-10": (
        *RESNETS[:3],
        "googlenet",
        "efficientnet-v2-s",
        "mobilenet-v3-small",
        "mobilenet-v3-large",
        "shufflenet-v2-x1.5",
        "shufflenet-v2-x2.0",
        "vit-tiny",
    ),
    "fedfree-8": ("fedfree-cnn", *RESNETS, "googlenet", "mobilenet-v2"),
    "resnets-3-3-4": ("resnet18",) * 3 + ("resnet34",) * 3 + ("resnet50",) * 4,  # FedZGE
    "small-5": ("small-cnn", "small-vgg", "small-resnet", "small-separable", "small-mlp"),
}
