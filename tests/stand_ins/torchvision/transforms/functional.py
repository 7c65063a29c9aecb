"""Names that are imported."""

pil_to_tensor = None
