"""The commands that set up and operate the hosts of hosts.toml."""
