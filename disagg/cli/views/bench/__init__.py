"""Views of disagg bench."""
