"""What the commands about the gateway print."""
