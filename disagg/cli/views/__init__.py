"""What the commands show: pure functions from values to Rich renderables."""
