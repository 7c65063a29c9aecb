"""cli/views."""
