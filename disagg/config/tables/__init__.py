"""The tables of hosts.toml, one module each: checked, and turned into frozen values."""
