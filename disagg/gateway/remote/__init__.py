"""The gateway seen from another process: what clients have to configure, and a view that follows one that runs."""
