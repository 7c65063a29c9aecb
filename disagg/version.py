"""The one place that says which version of disagg this is."""

VERSION = "0.1.0"
