"""Names that are imported."""
