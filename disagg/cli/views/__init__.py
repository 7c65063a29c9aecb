"""What several commands show: pure functions from values to Rich renderables."""
