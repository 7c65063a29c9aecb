"""Names that are imported."""

from .. import InterpolationMode  # noqa: TID252 - it has no other name without torchvision

__all__ = ["InterpolationMode"]
