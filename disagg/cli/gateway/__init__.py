"""Commands about a gateway that runs: what it has done and what it does."""
