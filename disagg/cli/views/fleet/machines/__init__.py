"""What the commands about machines show."""
