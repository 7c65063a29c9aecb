"""Names that are imported."""

ImageReadMode = decode_image = None
