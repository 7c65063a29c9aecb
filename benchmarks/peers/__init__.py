"""Programs that others build for the same work, run beside ours on the same machine."""
