"""Other projects' programs for the same work, measured on the same machine as disagg."""
