"""What all commands share: options, completion, signals, output."""
